"""Published counts of memory and traffic come out exactly, each from where it was published to what we print."""

import pytest

from jfsdp.planning.published import Published, activations

GB = 1e9


def test_zero_stages_of_7_5b_on_64_gpus():
    """ZeRO, figure 1: none, optimizer, and gradients, and parameters."""
    model = Published(params=7.5e9, devices=64)
    stages = [model.state(s) / GB for s in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD")]
    assert stages == [120, pytest.approx(31.4, abs=0.01), pytest.approx(16.6, abs=0.05), 1.875]
    assert [f"{s:.3g}" for s in stages] == ["120", "31.4", "16.6", "1.88"]


def test_7b_on_8_gpus_with_32_units():
    model = Published(params=7e9, devices=8, units=32)
    assert model.state("NO_SHARD") == 112 * GB
    assert model.state("FULL_SHARD") == 14 * GB
    assert model.window() == 0.875 * GB
    assert model.peak() == 14.875 * GB


def test_a_layer_of_7b_saves_67_mb():
    assert activations(4, 2048, 4096) == 67_108_864


def test_savings_on_64_gpus_in_fp32():
    model = Published(params=1, devices=64, accounting="fp32")
    assert model.saved("SHARD_GRAD_OP") == 12 * 63 / 64 == 11.8125
    assert model.saved("FULL_SHARD") == 15.75


@pytest.mark.parametrize(
    ("params", "devices", "state"),
    [(13e9, 8, 26), (70e9, 1, 1120), (70e9, 8, 140), (70e9, 32, 35), (70e9, 64, 17.5), (175e9, 64, 43.75)],
)
def test_full_shard_state(params, devices, state):
    assert Published(params=params, devices=devices).state("FULL_SHARD") == state * GB


def test_window_of_70b_with_80_layers():
    model = Published(params=70e9, devices=1024, units=80)
    assert model.window() == 3.5 * GB
    assert model.window(backward=True) == 5.25 * GB
    assert model.state("FULL_SHARD") == 1.09375 * GB


def test_traffic_is_three_passes_against_two():
    model = Published(params=1, devices=64)
    assert model.traffic("FULL_SHARD") / model.traffic("NO_SHARD") == 1.5
    # Gathers in bf16 and reduction in fp32, against an all-reduce in fp32: 8 bytes each.
    assert model.traffic("FULL_SHARD", reduce_bytes=4) == model.traffic("NO_SHARD", reduce_bytes=4) == 8


def test_both_meanings_of_shard_grad_op_are_offered():
    whole = Published(params=1e9, devices=8)
    at_rest = Published(params=1e9, devices=8, shard_grad_op="at_rest")
    assert whole.state("SHARD_GRAD_OP") - at_rest.state("SHARD_GRAD_OP") == 2e9 * 7 / 8
    assert at_rest.state("SHARD_GRAD_OP") == at_rest.state("FULL_SHARD")


def test_unknown_words_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="accounting 'zer0' is unknown. Use one of zero, fp32"):
        Published(params=1, devices=1, accounting="zer0")
    with pytest.raises(ValueError, match="shard_grad_op is 'cut'. Use whole or at_rest"):
        Published(params=1, devices=1, shard_grad_op="cut")
    with pytest.raises(ValueError, match="devices is 0; it is a count, so use 1 or more"):
        Published(params=1, devices=0)
    with pytest.raises(ValueError, match="'ZERO3' has no published count. Use one of NO_SHARD"):
        Published(params=1, devices=1).state("ZERO3")
    with pytest.raises(ValueError, match="'ZERO3' has no published count"):
        Published(params=1, devices=1).traffic("ZERO3")
