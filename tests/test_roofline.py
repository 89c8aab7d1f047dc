"""Time by formula: what it must do when one figure changes, and its sums by hand."""

from dataclasses import replace

import pytest

from jfsdp.planning.hardware import Cluster
from jfsdp.planning.roofline import Rates, Run, Shape, step_time, tokens_to_hide

SHAPE = Shape(
    layers=32, layer_params=218e6, head_params=525e6, params=8.03e9, width=4096, attention=2.0 * 4096 * 4096,
    tokens=4096, vocabulary=128256,
)  # fmt: skip
RUN = Run(shards=8)


def test_compute_by_hand_without_communication():
    alone = step_time(SHAPE, Run(gathers=0, checkpointing="none", recomputes_logits=False), Cluster())
    rate = 794e12 * Rates().matmul
    matmuls = 2 * 32 * 218e6 * 4096 / rate
    attention = 32 * SHAPE.attention * 4096 / (rate * Rates().attention)
    between = 32 * Rates().between * 4096 * 4096 * 2 / (3.352e12 * Rates().memory)
    assert alone.forward == pytest.approx(matmuls + attention + between)
    assert alone.backward == pytest.approx(2 * matmuls + 2.5 * attention + 2 * between)
    assert alone.exposed == alone.communication == alone.slowed == 0
    assert alone.seconds == pytest.approx(alone.forward + alone.backward + alone.head + alone.optimizer)


def test_checkpointing_costs_a_forward_pass():
    none, full = (step_time(SHAPE, replace(RUN, checkpointing=kind), Cluster()) for kind in ("none", "full"))
    assert full.backward - none.backward == pytest.approx(none.forward)


def test_a_layer_is_hidden_from_the_stated_tokens_on_and_not_below():
    least = tokens_to_hide(SHAPE, RUN, Cluster())
    waits = lambda tokens: step_time(replace(SHAPE, tokens=tokens), RUN, Cluster()).exposed
    hidden = waits(100 * least)  # the first and the last unit, which nothing can hide
    assert waits(least / 4) > 3 * hidden
    assert waits(4 * least) == pytest.approx(hidden)


def test_a_slow_network_shows_and_replicas_use_it():
    fast, slow = (step_time(SHAPE, replace(RUN, replicas=4), Cluster(network_gbps=gbps)).seconds for gbps in (400, 10))
    inside = step_time(SHAPE, RUN, Cluster(network_gbps=10)).seconds
    assert slow > 1.5 * fast and fast == pytest.approx(inside, rel=0.15)


def test_without_prefetch_or_late_reduction_everything_is_exposed():
    lean = step_time(SHAPE, replace(RUN, prefetch=False, late_reduce=False), Cluster())
    ours = step_time(SHAPE, RUN, Cluster())
    assert lean.exposed > 10 * ours.exposed and lean.communication > 0.95 * ours.communication


def test_no_sync_reduces_once():
    each = step_time(SHAPE, replace(RUN, accumulate=4), Cluster())
    once = step_time(SHAPE, replace(RUN, accumulate=4, reduces_each=False), Cluster())
    one_reduction = (each.communication - once.communication) / 3
    assert one_reduction == pytest.approx(33 * Cluster().seconds(218e6 * 4, 8))
    assert each.tokens == 4 * 4096


def test_fp32_runs_at_half_the_rate():
    fp32 = step_time(SHAPE, replace(RUN, is_fp32=True, wire_bytes=4), Cluster())
    assert 1.9 < fp32.forward / step_time(SHAPE, RUN, Cluster()).forward < 2.1


def test_the_range_holds_the_estimate():
    low, high = (t := step_time(SHAPE, RUN, Cluster())).range
    assert low < t.seconds < high


def test_unknown_checkpointing_lists_the_known_kinds():
    with pytest.raises(ValueError, match="checkpointing 'some' is unknown. Use one of none, selective, dots, full"):
        step_time(SHAPE, replace(RUN, checkpointing="some"), Cluster())
