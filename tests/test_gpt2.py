"""GPT-2: what its rules say by themselves; that it equals transformers is in test_huggingface.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import gpt2

SMALL = gpt2.Config(vocab_size=37, width=24, num_layers=2, num_heads=4, max_positions=16, query_chunk=8)
HUB = dict(
    model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024, n_ctx=1024,
    activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, layer_norm_epsilon=1e-5,
)  # fmt: skip


def filled(seed=0):
    model = nnx.eval_shape(lambda: gpt2.build(SMALL, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    rng = np.random.default_rng(seed)
    draw = lambda path, w: jnp.asarray(0.2 * rng.normal(size=w.shape) + ("scale" in str(path)), w.dtype)  # noqa: E731
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, state))


def test_packed_documents_equal_separate_rows():
    run = nnx.jit(lambda model, tokens, segments: model(tokens, segments=segments))
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 1, 37)
    model, ones = filled(), jnp.ones((2, 12), jnp.int32)
    separate = np.asarray(run(model, tokens, ones))
    packed = jnp.concatenate([tokens[0, :5], tokens[1, :7]])[None].repeat(2, 0)
    got = np.asarray(run(model, packed, jnp.array([[1] * 5 + [2] * 7] * 2)))[0]
    np.testing.assert_allclose(got[:5], separate[0, :5], atol=1e-5)
    np.testing.assert_allclose(got[5:], separate[1, :7], atol=1e-5)
    assert np.abs(np.asarray(run(model, packed, ones))[0, 5:] - separate[1, :7]).max() > 0.1


def test_loss_is_the_weighted_sum_over_the_logits():
    tokens, targets = jax.random.randint(jax.random.key(0), (2, 2, 12), 1, 37)
    weights = jnp.linspace(0, 2, 24).reshape(2, 12)
    total, weight = nnx.jit(lambda m: m.loss(tokens, targets, weights))(filled())
    log_p = np.asarray(jax.nn.log_softmax(nnx.jit(lambda m: m(tokens))(filled())))
    want = -sum(float(weights[at]) * log_p[(*at, int(targets[at]))] for at in np.ndindex(2, 12))
    assert float(weight) == pytest.approx(24) and float(total) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name, parameters", [
    ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
])  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name, parameters):
    model = nnx.eval_shape(lambda: gpt2.build(gpt2.presets[name], rngs=nnx.Rngs(0)))
    assert sum(w.size for w in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


def test_flops_are_the_matmuls_of_one_token_three_times():
    layer = 3 * 24 * 24 + 24 * 24 + 2 * 24 * 96 + 2 * 24 * 100  # qkv, o, MLP, scores and values at 100 tokens
    assert gpt2.flops(SMALL, 100) == 3 * 2 * (2 * layer + 24 * 37)


def test_the_configuration_on_the_hub_is_the_preset_and_is_written_as_it_was_read():
    assert gpt2.config_from(HUB) == gpt2.presets["gpt2"]
    for config in gpt2.presets.values():
        read = gpt2.config_from(gpt2.config_to(config))
        assert read == dataclasses.replace(config, query_chunk=256)  # how to compute is no part of a checkpoint


@pytest.mark.parametrize("changes, mend", [
    (dict(model_type="llama"), r"model_type is 'llama'; .*\['gpt2'\]"),
    (dict(activation_function="relu"), "activation_function is 'relu'"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    (dict(add_cross_attention=True), "add_cross_attention is True"),
    (dict(tie_word_embeddings=False), "tie_word_embeddings is False"),
])  # fmt: skip
def test_a_config_for_another_model_is_refused_by_name(changes, mend):
    with pytest.raises(NotImplementedError, match=mend):
        gpt2.config_from({**HUB, **changes})


def test_a_config_with_a_hole_and_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="config.json lacks n_head. Give the file as its checkpoint has it"):
        gpt2.config_from({key: value for key, value in HUB.items() if key != "n_head"})
    with pytest.raises(ValueError, match="width 24 does not split into 5 heads. Use a multiple of 5"):
        dataclasses.replace(SMALL, num_heads=5)
    with pytest.raises(ValueError, match="num_layers is 0; it is a count"):
        dataclasses.replace(SMALL, num_layers=0)
    with pytest.raises(ValueError, match="attention is 'flash'; use one of auto"):
        dataclasses.replace(SMALL, attention="flash")


def test_a_row_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="a row of 17 tokens is longer than the 16 positions.*Use rows of at most 16"):
        filled()(jnp.ones((1, 17), jnp.int32))
