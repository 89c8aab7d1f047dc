"""Sampling with a cache on sharded parameters: the same tokens as without a cache, a mesh or other prompts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.audit import gpu
from jfsdp.generate import _jitted, make_generate
from jfsdp.state import TrainState
from jfsdp.wrap import plan_module
from models import gpt2, llama
from models.experts import ExpertOptions
from tests.support import submesh

TINY = dict(vocab_size=53, width=24, num_layers=3, num_heads=4, query_chunk=8)
MODELS = {
    "llama": (llama, llama.Config(**TINY, num_kv_heads=2, inner_width=40)),
    "window, norms and biases": (
        llama,
        llama.Config(
            **TINY,
            num_kv_heads=2,
            inner_width=40,
            sliding_window=5,
            qk_norm=True,
            qkv_bias=True,
            tied=True,
            head_dim=10,
        ),
    ),
    "experts": (
        llama,
        llama.Config(**TINY, num_kv_heads=2, inner_width=16, experts=ExpertOptions(count=4, per_token=2)),
    ),
    "gpt2": (gpt2, gpt2.Config(**TINY, max_positions=32)),
}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8, 9, 7, 9]]


@functools.cache
def ready(name, mesh="2x2"):
    """Plan, stored and logical parameters; weights large enough to be sure of a token."""
    family, config = MODELS[name]

    def make():
        return family.build(config, rngs=nnx.Rngs(0))

    plan = plan_module(make, mesh=submesh(mesh))

    params = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: w if "norm" in jax.tree_util.keystr(path) else 8 * w, params
    )
    return plan, plan.place(params), params


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def greedy_by_hand(name, prompt, count):
    """The likeliest token, again and again, from the whole row's logits."""
    plan, _, params = ready(name)
    model, tokens = plan.door.outside(params, {}), list(prompt)
    length = 16  # one compilation for all prompts
    for _ in range(count):
        row = jnp.array([tokens + [0] * (length - len(tokens))])  # causal: what follows changes nothing
        tokens.append(int(jnp.argmax(logits(model, row)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (m in ("llama", "experts"))) for m in MODELS]
)
def test_the_cache_changes_no_token(name):
    """Prompts of unequal length on 2x2 devices, padded on the left, against one row at a time without cache or mesh."""
    plan, params, _ = ready(name)
    got = make_generate(plan, max_new_tokens=9)(params, PROMPTS)
    want = [greedy_by_hand(name, prompt, 9) for prompt in PROMPTS]
    assert got == want
    assert len({tuple(row) for row in got}) > 1 and max(len(set(row)) for row in got) >= 3


def test_draws_follow_seed_and_place_and_not_the_mesh():
    make = functools.partial(make_generate, max_new_tokens=6, temperature=1.0)
    plan, params, _ = ready("llama")
    generate = make(plan)
    one, again, other = generate(params, PROMPTS, 1), generate(params, PROMPTS, 1), generate(params, PROMPTS, 2)
    assert one == again != other
    small, small_params, _ = ready("llama", "1x2")
    assert make(small)(small_params, PROMPTS, 1) == one


@pytest.mark.slow
def test_top_1_is_the_likeliest_and_the_end_stops_a_row():
    plan, params, _ = ready("llama")
    greedy = make_generate(plan, max_new_tokens=9)(params, PROMPTS)
    assert make_generate(plan, max_new_tokens=9, temperature=0.7, top_k=1)(params, PROMPTS, 5) == greedy
    end = greedy[0][4]
    stopped = make_generate(plan, max_new_tokens=9, end=end)(params, PROMPTS)
    assert stopped == [row[: row.index(end)] if end in row else row for row in greedy]


def test_temperature_draws_from_the_distribution():
    """Of many rows with one prompt, the share of each first token is its probability."""
    plan, params, logical = ready("llama", "1x2")
    rows = 2000
    drawn = make_generate(plan, max_new_tokens=1, temperature=2.0)(params, [[3, 1]] * rows)
    share = np.bincount(np.ravel(drawn), minlength=53) / rows
    z = nnx.jit(lambda model: model(jnp.array([[3, 1]])))(plan.door.outside(logical, {}))[0, -1]
    p = np.asarray(jax.nn.softmax(z / 2.0))
    assert p.max() < 0.9 and (np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / rows) + 1e-3).all()


@pytest.mark.parametrize("options, mend", [
    (dict(max_new_tokens=0), "max_new_tokens is 0; use 1 or more"),
    (dict(max_new_tokens=1, temperature=-1), "temperature is -1; use 0 for the likeliest"),
    (dict(max_new_tokens=1, top_k=0), "top_k is 0; use 1 or more, or None"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(options, mend):
    with pytest.raises(ValueError, match=mend):
        make_generate(ready("llama")[0], **options)


def test_empty_prompts_and_rows_beyond_the_positions_are_refused():
    plan, params, _ = ready("gpt2")
    with pytest.raises(ValueError, match="every prompt needs one token or more"):
        make_generate(plan, max_new_tokens=1)(params, [[1], []])
    with pytest.raises(ValueError, match="a row of 33 tokens is longer than the 32 positions"):
        make_generate(plan, max_new_tokens=31)(params, [[1, 2]])


def ahead(mesh):
    """A target for `compile_ahead`."""
    family, config = MODELS["llama"]
    plan = plan_module(lambda: family.build(config, rngs=nnx.Rngs(0)), mesh=mesh)
    rows, key = (jax.ShapeDtypeStruct((4, length), jnp.int32) for length in (8, 1)), jax.eval_shape(jax.random.key, 0)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    return _jitted(plan, 5, 1.0, 3), (TrainState.abstract(optax.identity(), plan).params, {}, *rows, ids, key)


@pytest.mark.aot
@pytest.mark.skipif(gpu.missing_tools() is not None, reason=f"needs {gpu.missing_tools()}")
def test_gpus_take_the_program():
    """With the options of a training step the compiler refused it, on every GPU."""
    gathered = gpu.compile_ahead(f"{__name__}:ahead", mesh="1x4", options={}).program.select("all-gather")
    assert gathered and max(c.runs for c in gathered) >= 4  # once for each token that is not the prompt's
