"""One unit: its gradient is the sum of all uses, reduced once, and a mean wherever its parameters live."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import eval_step, train_step
from jfsdp.unit import call, unshard
from tests.support import assert_close, bitwise_equal, submesh, train_alone, train_sharded

INNER = {"inner": UnitOptions()}
ONE_TO_EIGHT = np.arange(1, 9, dtype=np.float32)
"""One number per device on eight devices."""

# ------------------------------------------------------------ gradients by hand


@pytest.mark.parametrize("mesh", ["1x1", "1x2", "1x8", "2x4"])
def test_a_tiny_parameter_of_an_inner_unit_gets_the_mean(mesh):
    """C-03."""

    def loss(params, x, key):
        return call(lambda inner, x: inner["s"] * x, params["inner"], x).mean()

    params = {"inner": {"s": np.array([2.0], np.float32)}}
    metrics, state, _ = train_sharded(loss, params, ONE_TO_EIGHT, optax.sgd(0.1), 1, mesh, units=INNER)
    assert float(metrics["grad_norm"]) == 4.5
    np.testing.assert_allclose(state.logical_params()["inner"]["s"], [1.55], rtol=1e-7)  # fp32 rounding


def test_a_scalar_stays_whole_and_keeps_its_shape():
    """C-04, as far as the engine goes; its checkpoint and export come with checkpoints."""

    def loss(params, x, key):
        return call(lambda inner, x: inner["s"] * x, params["inner"], x).mean()

    params = {"inner": {"s": np.array(2.0, np.float32)}}
    metrics, state, step = train_sharded(loss, params, ONE_TO_EIGHT, optax.sgd(0.1), 1, "1x8", units=INNER)
    (scalar,) = jax.tree.leaves(state.params)
    assert float(metrics["grad_norm"]) == 4.5
    assert scalar.shape == () and scalar.sharding.is_fully_replicated
    assert step.plan.leaves[0].reason == "1 elements for 8 shards"
    np.testing.assert_allclose(scalar, 1.55, rtol=1e-7)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    "prefetch", [None, 0, 1], ids=["unit", "stack-without-prefetch", "stack-with-prefetch"]
)
def test_a_block_applied_twice_sums_both_gradients(strategy, prefetch):
    """C-06. Only a stack prefetches, so the block is also a stack of one layer. Eight elements: w is cut."""

    def twice(params, x):
        if prefetch is None:
            apply = lambda x: call(lambda w, x: w * x, params["inner"], x)  # noqa: E731
        else:
            block, schedule = lambda w, x, _: (w * x, None), Schedule(prefetch=prefetch)
            apply = lambda x: run_stack(block, params["inner"], x, schedule=schedule)[0]  # noqa: E731
        return apply(apply(x))

    shape = (8,) if prefetch is None else (1, 8)
    params, units = (
        {"inner": np.full(shape, 2, np.float32)},
        {"inner": UnitOptions(stacked=prefetch is not None)},
    )
    # Each element of w meets a column of its own, all alike: its gradient is that of the scalar, 18, over 8.
    metrics, state, _ = train_sharded(
        lambda params, x, key: twice(params, jnp.broadcast_to(x[:, None], (*x.shape, 8))).mean(),
        params, ONE_TO_EIGHT, optax.sgd(8.0), 1, "1x8", strategy, units=units,
    )  # fmt: skip
    assert np.asarray(state.params["inner"]).ravel().tolist() == [2 - 18] * 8
    assert float(metrics["loss"]) == 4 * 4.5


def test_a_parameter_used_by_some_examples_only():
    """C-07: the other devices give a zero gradient, without a hang; an unused parameter does not move."""

    def loss(params, x, key):
        def branch(inner, x):
            return lax.cond(x[0] % 2 == 0, lambda x: inner["w"] * x, lambda x: 0 * x, x)

        return (call(branch, params["inner"], x) * unshard(params["scale"])).mean()

    spare = {"cut": np.full(16, 0.1, np.float32), "whole": np.float32(0.1)}
    params = {"inner": {"w": np.float32(1)}, "scale": np.float32(1)}
    params |= {"unit": spare, "root": spare}  # a whole unit without a use, and a part of one
    units = {**INNER, "unit": UnitOptions()}
    metrics, state, _ = train_sharded(loss, params, ONE_TO_EIGHT, optax.sgd(1.0), 1, "1x8", units=units)
    assert [float(s.data) for s in state.params["inner"]["w"].addressable_shards] == [1 - 2.5] * 8
    np.testing.assert_allclose(metrics["grad_norm"], 2.5 * 2**0.5, rtol=1e-6)  # of w and of the scale

    tx = optax.adamw(0.1, weight_decay=0.0)
    _, state, _ = train_sharded(loss, params, ONE_TO_EIGHT, tx, 3, "1x8", units=units)
    assert float(state.params["inner"]["w"]) != 1
    assert bitwise_equal(
        {name: state.params[name] for name in ("unit", "root")}, {"unit": spare, "root": spare}
    )
    moments = jax.tree.leaves([state.opt_state[0].mu[name] for name in ("unit", "root")])
    assert len(moments) == 4 and not any(
        np.asarray(m).any() for m in moments
    )  # zero gradients, not missing ones


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_copies_of_a_replicated_parameter_stay_bitwise_equal(mesh):
    """C-09."""

    def loss(params, batch, key):
        def block(inner, x):
            return inner["g"].sum() * x + batch["curved"] * jnp.tanh(
                inner["kernel"] @ (inner["g"][:2].sum() * x * jnp.ones(8))
            )

        return call(block, params["inner"], batch["x"]).mean()

    rng = np.random.default_rng(0)
    params = {"inner": {"kernel": rng.normal(size=(8, 8)).astype(np.float32), "g": np.ones(3, np.float32)}}
    plan, tx = make_plan(params, submesh(mesh), units=INNER), optax.sgd(0.125)
    assert {leaf.path: leaf.dim for leaf in plan.leaves} == {"inner.g": None, "inner.kernel": 0}
    state, step = TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan)
    state, _ = step(state, {"x": ONE_TO_EIGHT, "curved": np.zeros(8, np.float32)})
    assert [s.data.tolist() for s in state.params["inner"]["g"].addressable_shards] == [[1 - 4.5 / 8] * 3] * 8
    for _ in range(10):
        batch = {"x": rng.normal(size=8).astype(np.float32), "curved": np.ones(8, np.float32)}
        state, _ = step(state, batch)
    copies = {s.data.tobytes() for s in state.params["inner"]["g"].addressable_shards}
    assert len(copies) == 1
    assert not np.array_equal(state.params["inner"]["g"], [1 - 4.5 / 8] * 3)


# ------------------------------------------------------------ uses of a unit


def tied_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    return {"table": draw(16, 8), "inner": {"w": draw(8, 16), "b": draw(8)}, "outer": draw(8)}


def tied_loss(params, batch, key):
    """A table is embedding under `call` and head under `unshard`; another unit closes over a parameter."""
    x = call(lambda table, t: table[t], params["table"], batch["token"])
    outer = unshard(params["outer"])

    def inner(p, x, token):
        h = jnp.tanh(x * outer @ p["w"])  # closed over, and differentiated
        return {"h": h[:, :8] * p["b"] + h[:, 8:], "token": token + 1}

    out = call(inner, params["inner"], x, batch["token"])
    logits = (x + out["h"]) @ unshard(params["table"]).T
    return optax.softmax_cross_entropy_with_integer_labels(logits, out["token"] % 16).sum(), jnp.asarray(
        len(logits), logits.dtype
    )


TIED_UNITS = {"table": UnitOptions(), "inner": UnitOptions()}
TOKENS = {"token": np.arange(8, dtype=np.int32) * 3 % 16}


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("1x8", "FULL_SHARD"), ("2x4", "HYBRID_SHARD"), ("2x4", "SHARD_OPT"), ("4x2", "NO_SHARD")],
)
def test_tied_uses_closures_and_integers_differentiate_as_on_one_device(mesh, strategy, float64):
    tx = optax.sgd(1.0)
    loss, want, _ = train_alone(tied_loss, tied_params(), TOKENS, tx, 1)
    metrics, state, _ = train_sharded(
        tied_loss, tied_params(), TOKENS, tx, 1, mesh, strategy, units=TIED_UNITS
    )
    assert_close(metrics["loss"], loss, 1e-13)  # float64 rounding of one step
    assert_close(state.logical_params(), want, 1e-13)


def lower(loss, params, batch, strategy="FULL_SHARD", units=TIED_UNITS, **options):
    plan, tx = make_plan(params, submesh("1x8"), strategy=strategy, units=units, **options), optax.sgd(1.0)
    step = train_step(loss, tx, plan)
    return step.lower(TrainState.abstract(tx, plan), batch), plan.mesh


def test_a_tied_parameter_is_reduced_once():
    lowered, mesh = lower(tied_loss, tied_params(), TOKENS)
    program = audit.read(lowered.compile(), mesh)
    assert program.count("reduce-scatter") == 3  # table, inner, root
    assert sorted(c.operands[0].shape for c in program.select("reduce-scatter")) == [(8, 1), (8, 16), (8, 17)]


@pytest.mark.parametrize(
    ("use", "strategy", "gathers"),
    [
        ("call", "FULL_SHARD", 2),
        ("call", "SHARD_GRAD_OP", 1),
        ("unshard", "FULL_SHARD", 1),
        ("call", "SHARD_OPT", 0),
    ],
)
def test_call_gathers_again_for_backward_and_unshard_keeps(use, strategy, gathers):
    """As asked for; what the compilers make of it is in `test_communication.py` and `test_gpu_program.py`."""

    def product(p, x):
        return jnp.tanh(x @ p["w"]) @ p["w"].T  # its pullback reads w

    def loss(params, x, key):
        if use == "unshard":
            return product(unshard(params), x).mean()
        return call(product, params, x).mean()

    lowered, mesh = lower(
        loss, {"w": np.ones((8, 4), np.float32)}, np.ones((8, 8), np.float32), strategy, units={}
    )
    asked = [c.kind for c in audit.lowered_collectives(lowered, mesh)]
    # Under SHARD_OPT the only gather is the one of the updated parameter.
    assert asked.count("all-gather") == (1 if strategy == "SHARD_OPT" else gathers)
    assert asked.count("reduce-scatter") == 1


def test_a_unit_computes_in_the_dtype_of_its_policy():
    seen = []

    def loss(params, x, key):
        def inner(p, x):
            seen.append((p["w"].dtype.name, p["w"].shape))
            return (x.astype(p["w"].dtype) @ p["w"]).astype(jnp.float32)

        return call(inner, params["inner"], x).mean()

    params = {"inner": {"w": np.ones((13, 3), np.float32)}}
    precision = MixedPrecision(param_dtype="bf16")
    lowered, mesh = lower(loss, params, np.ones((8, 13), np.float32), units=INNER, precision=precision)
    assert set(seen) == {("bfloat16", (13, 3))}  # whole and without padding
    wire = {c.kind: c.dtype for c in audit.lowered_collectives(lowered, mesh) if c.kind != "all-reduce"}
    assert wire == {"all-gather": "bfloat16", "reduce-scatter": "float32"}


def test_without_a_mesh_a_unit_is_a_function_call():
    assert call(lambda p, x: p["w"] * x, {"w": jnp.float32(2)}, jnp.float32(3)) == 6
    assert unshard({"w": jnp.float32(2)}) == {"w": 2}


def test_a_unit_evaluates_without_gradients():
    plan = make_plan({"inner": {"w": np.ones((13, 3), np.float32)}}, submesh("2x4"), units=INNER)
    params = plan.place({"inner": {"w": np.full((13, 3), 2, np.float32)}})
    evaluate = eval_step(lambda p, x, key: call(lambda p, x: x @ p["w"], p["inner"], x).mean(), plan)
    total, weight = evaluate(params, np.ones((8, 13), np.float32))
    assert float(total / weight) == 26


# ------------------------------------------------------------ errors


def test_sharded_and_plain_parameters_in_one_unit_are_refused():
    def loss(params, x, key):
        return call(lambda p, x: p["w"] * p["plain"], {**params, "plain": jnp.ones(8)}, x).mean()

    with pytest.raises(TypeError, match="1 sharded and 1 plain parameters. Lay out all of them in one plan"):
        lower(loss, {"w": np.ones(8, np.float32)}, ONE_TO_EIGHT, units={})


def test_a_stack_used_twice_under_accumulation_is_refused():
    """Each use would add what earlier micro-batches left."""

    def loss(params, x, key):
        for _ in range(2):
            x, _ = run_stack(lambda w, x, _: (w * x, None), params["inner"], x)
        return x.mean()

    plan = make_plan(
        {"inner": np.ones((1, 8), np.float32)}, submesh("1x8"), units={"inner": UnitOptions(stacked=True)}
    )
    tx, batch = optax.sgd(1.0), np.ones((16, 8), np.float32)
    with pytest.raises(
        NotImplementedError, match="inner goes through a stack more than once.* Use accumulate=1"
    ):
        train_step(loss, tx, plan, accumulate=2).lower(TrainState.abstract(tx, plan), batch)
    train_step(loss, tx, plan, accumulate=1).lower(TrainState.abstract(tx, plan), batch)
