"""Sharded training equals training on one device: the same model, key and data, every strategy and mesh.

Float64 is the judge. Rounding differs (sums over devices have another order), so "equal" is 1e-11 of a leaf's
largest value after 20 steps, and 1e-15 in the smallest witness, where nothing but rounding is left.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.layout import UnitOptions, make_plan
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import call, unshard
from tests.support import (
    HYBRID,
    PLAIN,
    assert_close,
    logical_moments,
    submesh,
    toy_batch,
    toy_loss,
    toy_params,
    train_alone,
    train_sharded,
)

# ------------------------------------------------------------ the smallest witness

LEARNING_RATE = 0.5


def fsdp_in_numpy(params, batch, shards: int, steps: int):
    """Fully sharded SGD spelled out: `shards` ranks in one process, each with its rows of matrices and batch.

    Two residual blocks `h + tanh(h w)` and a head; mean squared error. Gives every loss and the matrices.
    """
    # [unit][rank]: [d/shards, d_out]
    pieces = [np.split(w, shards) for w in (*params["blocks"]["w"], params["head"])]
    xs, ys = (np.split(a, shards) for a in (batch["x"], batch["y"]))
    count, losses = batch["y"].size, []

    def gather(unit):
        return np.concatenate(pieces[unit])

    def reduce_scatter(per_rank):
        return np.split(sum(per_rank), shards)

    for _ in range(steps):
        # Forward: gather a unit, let every rank use it on its own rows, drop it.
        hidden = [xs]
        for unit in (0, 1):
            w = gather(unit)
            hidden.append([h + np.tanh(h @ w) for h in hidden[-1]])
        w = gather(2)
        errors = [h @ w - y for h, y in zip(hidden[-1], ys)]
        losses.append(sum((e**2).sum() for e in errors) / count)

        # Backward: gather it again, and leave each rank its rows of the summed gradient.
        to_out = [2 * e / count for e in errors]
        grads = {2: reduce_scatter([h.T @ g for h, g in zip(hidden[-1], to_out)])}
        to_hidden = [g @ w.T for g in to_out]
        for unit in (1, 0):
            w = gather(unit)
            to_sum = [g * (1 - np.tanh(h @ w) ** 2) for h, g in zip(hidden[unit], to_hidden)]
            grads[unit] = reduce_scatter([h.T @ g for h, g in zip(hidden[unit], to_sum)])
            to_hidden = [g + s @ w.T for g, s in zip(to_hidden, to_sum)]

        # The optimizer sees shards only.
        for unit, rows in enumerate(pieces):
            for rank in range(shards):
                rows[rank] = rows[rank] - LEARNING_RATE * grads[unit][rank]
    return losses, {"blocks": {"w": np.stack([gather(0), gather(1)])}, "head": gather(2)}


def witness_loss(params, batch, key):
    x, _ = run_stack(lambda p, x, _: (x + jnp.tanh(x @ p["w"]), None), params["blocks"], batch["x"])
    error = (call(lambda w, x: x @ w, params["head"], x) - batch["y"]) ** 2
    return error.sum(), jnp.asarray(error.size, error.dtype)


def test_the_smallest_witness_equals_one_process_and_numpy(float64):
    rng = np.random.default_rng(0)
    params = {"blocks": {"w": 0.3 * rng.normal(size=(2, 8, 8))}, "head": 0.3 * rng.normal(size=(8, 4))}
    batch = {"x": rng.normal(size=(8, 8)), "y": rng.normal(size=(8, 4))}
    tx, steps, units = optax.sgd(LEARNING_RATE), 5, {"blocks": UnitOptions(stacked=True)}
    assert sum(w.size for w in jax.tree.leaves(params)) == 160

    metrics, state, _ = train_sharded(witness_loss, params, batch, tx, steps, "1x4", units=units)
    assert all(w.sharding.shard_shape(w.shape) != w.shape for w in jax.tree.leaves(state.params))
    losses, by_hand = fsdp_in_numpy(params, batch, shards=4, steps=steps)
    loss, alone, _ = train_alone(witness_loss, params, batch, tx, steps)
    assert losses[-1] < 0.7 * losses[0]  # the parameters really moved

    # Five steps of float64 rounding: 2.2e-16 each.
    for want_loss, want in ((losses[-1], by_hand), (loss, alone)):
        assert_close(state.params, want, 1e-15)
        assert abs(metrics["loss"] - want_loss) <= 1e-15 * want_loss


# ------------------------------------------------------------ every strategy, every mesh

TOY = {"layers": 2, "width": 8, "inner": 16}
DEFAULT_RUN = [  # each strategy and each mesh once
    ("FULL_SHARD", "1x1"),
    ("FULL_SHARD", "1x8"),
    ("SHARD_GRAD_OP", "1x2"),
    ("SHARD_OPT", "2x4"),
    ("NO_SHARD", "4x2"),
    ("HYBRID_SHARD", "2x4"),
    ("HYBRID_SHARD_ZERO2", "4x2"),
    ("HYBRID_SHARD", "8x1"),
]
GRID = [(s, m) for s in PLAIN for m in ("1x1", "1x2", "1x8", "2x4", "4x2", "8x1")]
GRID += [(s, m) for s in HYBRID for m in ("2x4", "4x2", "8x1")]


@functools.cache
def toy_alone():
    tx = optax.adamw(1e-2)
    params, batch = toy_params(**TOY), toy_batch(width=TOY["width"])
    return tx, params, batch, train_alone(toy_loss(), params, batch, tx, 20)


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [pytest.param(*c, id="-".join(c), marks=() if c in DEFAULT_RUN else pytest.mark.slow) for c in GRID],
)
def test_twenty_adamw_steps_equal_one_device(strategy, mesh, float64):
    tx, params, batch, (loss, want, moments) = toy_alone()
    metrics, state, step = train_sharded(toy_loss(), params, batch, tx, 20, mesh, strategy)
    assert_close(metrics["loss"], loss, 1e-11)
    assert_close(state.logical_params(), want, 1e-11)
    assert_close(logical_moments(state, step), moments, 1e-11)


# ------------------------------------------------------------ C-01, and the second half of C-17

VOCABULARY, WIDTH, HEADS, TOKENS, CLIP, RATE = 16, 16, 2, 6, 1.0, 1e-2


def transformer_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape) * 0.3, np.float32)  # noqa: E731
    return {
        "embed": draw(VOCABULARY, WIDTH),
        "blocks": {
            "qkv": draw(2, WIDTH, 3 * WIDTH),
            "out": draw(2, WIDTH, WIDTH),
            "up": draw(2, WIDTH, 2 * WIDTH),
            "down": draw(2, 2 * WIDTH, WIDTH),
        },
        "head": draw(WIDTH, VOCABULARY),
    }


def transformer_block(p, x, _):
    def normed(x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    q, k, v = (a.reshape(*x.shape[:2], HEADS, -1) for a in jnp.split(normed(x) @ p["qkv"], 3, -1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"], None


def transformer_loss(params, batch, key):
    tokens = batch["tokens"]
    x = call(lambda table, t: table[t], params["embed"], tokens[:, :-1])
    x, _ = run_stack(transformer_block, params["blocks"], x)
    logits = call(lambda head, x: x @ head, params["head"], x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def steps_of(strategy: str | None, mesh: str, steps: int):
    """Loss, norm, parameters and first moment of every step; `strategy` None is one device without jfsdp."""
    params = transformer_params()
    batch = {"tokens": np.random.default_rng(1).integers(0, VOCABULARY, (8, TOKENS + 1), dtype=np.int32)}
    tx = optax.adamw(RATE)
    if strategy is None:

        @jax.jit
        def step(params, state):
            loss, grads = jax.value_and_grad(transformer_loss)(params, batch, None)
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, CLIP / norm), grads)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss, norm

        state = tx.init(params)
        for _ in range(steps):
            params, state, loss, norm = step(params, state)
            yield float(loss), float(norm), params, state[0].mu
        return
    units = {"blocks": UnitOptions(stacked=True), "embed": UnitOptions(), "head": UnitOptions()}
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=units)
    state = TrainState.create(plan.place(params), tx, plan)
    step = train_step(transformer_loss, tx, plan, clip_norm=CLIP)
    for _ in range(steps):
        state, metrics = step(state, batch)
        moments = logical_moments(state, step)[0].mu
        yield jax.device_get((metrics["loss"], metrics["grad_norm"], state.logical_params(), moments))


@functools.cache
def transformer_alone():
    return list(steps_of(None, "1x1", 5))


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("FULL_SHARD", "1x8"),
        ("SHARD_GRAD_OP", "1x8"),
        ("NO_SHARD", "1x8"),
        ("HYBRID_SHARD", "2x4"),
        ("HYBRID_SHARD_ZERO2", "2x4"),
    ],
)
def test_five_strategies_give_one_answer_with_clipping(strategy, mesh):
    """C-01, and C-17's model of six parameters: its norm agrees within 1e-6 under both strategies."""
    assert len(jax.tree.leaves(transformer_params())) == 6
    assert transformer_alone()[0][1] > CLIP  # clipping is at work
    steps = zip(steps_of(strategy, mesh, 5), transformer_alone(), strict=True)
    for number, (got, want) in enumerate(steps, start=1):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
        # Both sides start from the same parameters; later ones differ by what AdamW makes of rounding.
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6 if number == 1 else 1e-5)
        for a, b in zip(jax.tree.leaves(got[2]), jax.tree.leaves(want[2])):
            # AdamW moves an entry whose gradient is near zero by the rate times its rounding noise.
            np.testing.assert_allclose(a, b, rtol=0, atol=0.05 * RATE * number)
        if number == 1:
            assert_close(got[3], want[3], 1e-5)  # AdamW hardly sees how a gradient is scaled; its moment does


# ------------------------------------------------------------ C-02, C-08, C-17

SIZES = (1, 3, 5, 7, 9, 13, 17)


def uneven_loss(params, batch, key):
    def outputs(p, x):
        assert [p[f"w{n}"].shape for n in SIZES] == [(n, 6) for n in SIZES]  # whole, unpadded
        return sum(jnp.tanh(x @ p[f"w{n}"].T).sum(-1) for n in SIZES)

    error = (call(outputs, params, batch["x"]) - batch["y"]) ** 2
    return error.sum(), jnp.asarray(error.size, error.dtype)


@pytest.mark.parametrize("mesh", ["1x8", "1x3", "2x4"])
def test_uneven_parameters_train_in_their_own_shapes(mesh, float64):
    """C-02."""
    rng = np.random.default_rng(0)
    params = {f"w{n}": jnp.asarray(rng.normal(size=(n, 6))) for n in SIZES}
    batch, tx = {"x": rng.normal(size=(24, 6)), "y": rng.normal(size=24)}, optax.adamw(1e-2)
    loss, want, moments = train_alone(uneven_loss, params, batch, tx, 3)
    metrics, state, step = train_sharded(uneven_loss, params, batch, tx, 3, mesh, units={})
    assert_close(metrics["loss"], loss, 1e-13)
    assert_close(state.logical_params(), want, 1e-13)
    assert_close(logical_moments(state, step), moments, 1e-13)
    leaves = state.plan.leaves
    assert any(leaf.padded_shape != leaf.shape for leaf in leaves) == (
        mesh != "1x3"
    )  # the second dim divides by 3
    for leaf, stored in zip(leaves, jax.tree.leaves(state.params)):
        outside = np.array(stored)
        outside[tuple(slice(n) for n in leaf.shape)] = 0
        assert not outside.any(), f"{leaf.path}: the padding was trained"


@pytest.mark.parametrize("mesh", ["1x1", "1x2", "1x4", "1x8", "2x4", "8x1"])
def test_the_gradient_is_a_mean_whatever_the_device_count(mesh):
    """C-08, for a scalar that stays whole and for a vector that is cut."""

    def loss(params, batch, key):
        p = unshard(params)
        return (p["w"] * batch["d"] + (p["v"] * batch["d"][:, None]).sum(-1)).mean()

    params = {"w": np.float32(3), "v": np.full(8, 3, np.float32)}
    batch = {"d": np.arange(8, dtype=np.float32)}
    metrics, state, _ = train_sharded(loss, params, batch, optax.sgd(1.0), 1, mesh, units={})
    assert float(state.params["w"]) == 3 - 3.5
    assert np.asarray(state.params["v"]).tolist() == [3 - 3.5] * 8
    assert float(metrics["loss"]) == 9 * 3 * 3.5


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "4x2", "8x1"])
def test_the_norm_counts_each_parameter_once(mesh):
    """C-17: eight cut elements and one scalar that every device holds, gradients 1."""

    def loss(params, batch, key):
        p = unshard(params)
        return (batch["x"] * (p["cut"].sum() + p["scalar"])).mean()

    params, batch = {"cut": np.ones(8, np.float32), "scalar": np.float32(1)}, {"x": np.ones(8, np.float32)}
    metrics, _, _ = train_sharded(loss, params, batch, optax.sgd(1.0), 1, mesh, units={})
    assert float(metrics["grad_norm"]) == 3.0
