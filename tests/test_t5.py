"""T5: what its rules say by themselves; that it equals transformers is in test_huggingface.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import t5

SMALL = t5.Config(
    vocab_size=37, width=24, num_layers=2, num_decoder_layers=3, num_heads=3, head_size=6, inner_width=40, buckets=8,
    max_distance=20,
)  # fmt: skip
HUB = dict(
    model_type="t5", vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.1,
    relative_attention_num_buckets=32, layer_norm_epsilon=1e-6, is_encoder_decoder=True, n_positions=512,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: t5.build(SMALL, rngs=nnx.Rngs(0)))()


@nnx.jit
def logits(model, source, tokens, mask=None):
    return model(source, tokens, source_mask=mask)


def pairs():
    rng = np.random.default_rng(0)
    return rng.integers(1, 37, (2, 9)), rng.integers(1, 37, (2, 7))


def test_padding_of_the_source_changes_nothing_and_its_tokens_do(model):
    source, tokens = pairs()
    mask = np.array([[1] * 6 + [0] * 3] * 2)
    want = logits(model, source, tokens, mask)
    other = source.copy()
    other[:, 6:] = 5
    np.testing.assert_allclose(logits(model, other, tokens, mask), want, atol=1e-5)
    other[:, 5] = (other[:, 5] + 1) % 37
    assert np.abs(logits(model, other, tokens, mask) - want).max() > 1e-3


def test_the_decoder_sees_nothing_behind_a_token_and_the_encoder_everything(model):
    source, tokens = pairs()
    want, other = logits(model, source, tokens), tokens.copy()
    other[:, 4:] = (other[:, 4:] + 1) % 37
    got = logits(model, source, other)
    np.testing.assert_allclose(got[:, :4], want[:, :4], atol=1e-5)
    assert np.abs(got[:, 4:] - want[:, 4:]).max() > 1e-3
    memory, changed = (nnx.jit(lambda m, s: m.encode(s))(model, s) for s in (source, source + (np.arange(9) == 8)))
    assert (np.abs(memory - changed).max(-1) > 1e-6).all()


def test_loss_is_the_weighted_sum_over_the_logits(model):
    source, tokens = pairs()
    weights = jnp.linspace(0, 2, 14).reshape(2, 7)
    total, weight = nnx.jit(lambda m: m.loss(source, tokens, tokens, weights))(model)
    log_p = np.asarray(jax.nn.log_softmax(logits(model, source, tokens)))
    want = -sum(float(weights[at]) * log_p[(*at, tokens[at])] for at in np.ndindex(2, 7))
    assert float(weight) == pytest.approx(14) and float(total) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name, parameters", [
    ("t5-small", 60_506_624), ("t5-base", 222_903_552), ("t5-v1.1-small", 76_961_152), ("t5-v1.1-base", 247_577_856),
])  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name, parameters):
    model = nnx.eval_shape(lambda: t5.build(t5.presets[name], rngs=nnx.Rngs(0)))
    assert sum(w.size for w in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


def test_flops_are_the_matmuls_of_a_source_and_a_target_token_three_times():
    attention, mlp, scores = 4 * 24 * 18, 2 * 24 * 40, 2 * 18 * 100
    encoder, decoder = 2 * (attention + mlp + scores), 3 * (2 * attention + mlp + 2 * scores)
    assert t5.flops(SMALL, 100) == 3 * 2 * (encoder + decoder + 24 * 37)


def test_the_configuration_on_the_hub_is_the_preset_and_is_written_as_it_was_read():
    assert t5.config_from(HUB) == t5.presets["t5-small"]
    for config in (*t5.presets.values(), SMALL):
        assert t5.config_from(t5.config_to(config)) == config


@pytest.mark.parametrize("changes, mend", [
    (dict(model_type="gpt2"), r"model_type is 'gpt2'; .*\['t5'\]"),
    (dict(feed_forward_proj="gated-silu"), "feed_forward_proj is 'gated-silu'"),
    (dict(is_encoder_decoder=False), "is_encoder_decoder is False"),
])  # fmt: skip
def test_a_config_for_another_model_is_refused_by_name(changes, mend):
    with pytest.raises(NotImplementedError, match=mend):
        t5.config_from({**HUB, **changes})


def test_a_config_with_a_hole_and_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="config.json lacks d_kv. Give the file as its checkpoint has it"):
        t5.config_from({key: value for key, value in HUB.items() if key != "d_kv"})
    with pytest.raises(ValueError, match="num_decoder_layers is 0; it is a count"):
        dataclasses.replace(SMALL, num_decoder_layers=0)
    with pytest.raises(ValueError, match="buckets is 7 and max_distance 20; use an even number"):
        dataclasses.replace(SMALL, buckets=7)
