"""A stack equals its layers one after the other, whatever the schedule; what it gathers, keeps and frees."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.schedule import Schedule
from jfsdp.stack import Stack, checkpointed, run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import unshard
from tests.support import assert_close, submesh, train_alone, train_sharded

STACKED = {"blocks": UnitOptions(stacked=True)}
NAMES = ("hidden",)

# ------------------------------------------------------------ values


def rich_params(layers: int):
    """Blocks with an even, an uneven, a tiny and an empty leaf; a root whose arrays go through the stack."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3)  # noqa: E731
    return {
        "blocks": {
            "up": draw(layers, 8, 13),
            "down": draw(layers, 13, 5),
            "bias": draw(layers, 5),
            "empty": draw(layers, 0),
        },
        "enter": draw(5, 5),
        "inputs": {"scale": draw(layers, 5), "shift": draw(layers)},
        "shared": draw(5),
        "closed": draw(5),
    }


def rich_block(closed, weights, x, given, shared, positions):
    """Uses everything a block may get: also integers, a random key of its own, and what it closes over."""
    noise = jax.random.normal(given["key"], (5,), x["h"].dtype)
    wide = jnp.concatenate([x["h"], jnp.ones_like(x["h"][:, :3])], -1)
    hidden = checkpoint_name(jnp.tanh(wide @ weights["up"]), "hidden")
    h = x["h"] + (hidden @ weights["down"] + weights["bias"]) * given["scale"] + weights["empty"].sum()
    h = h + noise * shared[positions] + given["shift"] * closed * given["number"] + 0.1 * x["count"][:, None]
    return {"h": h, "count": x["count"] + 1}, {"auxiliary": (h**2).mean(-1), "count": x["count"]}


def rich_loss(layers: int, schedule: Schedule, remat):
    def loss(params, batch, key):
        root = unshard({name: params[name] for name in ("enter", "inputs", "shared", "closed")})
        keys = jax.random.split(jax.random.key(7), layers)
        inputs = {**root["inputs"], "key": keys, "number": jnp.arange(layers)}
        x = {"h": batch["x"] @ root["enter"], "count": batch["count"]}
        positions = jnp.arange(5)[::-1]
        x, out = run_stack(
            functools.partial(rich_block, root["closed"]),
            params["blocks"],
            x,
            root["shared"],
            positions,
            inputs=inputs,
            remat=remat,
            schedule=schedule,
        )
        per_layer = jnp.arange(1, layers + 1)[:, None] * out["auxiliary"] + out["count"]
        weight = batch["count"].astype(x["h"].dtype) + 1
        return ((x["h"].sum(-1) ** 2 + per_layer.sum(0) + x["count"]) * weight).sum(), weight.sum()

    return loss


def rich_batch():
    return {"x": np.random.default_rng(1).normal(size=(8, 5)), "count": np.arange(8, dtype=np.int32)}


def one_by_one(layers: int):
    """`rich_loss` as a plain Python loop: the reference knows no scan, no stack and no checkpointing."""

    def loss(params, batch, key):
        keys = jax.random.split(jax.random.key(7), layers)
        x = {"h": batch["x"] @ params["enter"], "count": batch["count"]}
        weight, total = batch["count"].astype(x["h"].dtype) + 1, 0.0
        for i in range(layers):
            weights, given = jax.tree.map(lambda a, i=i: a[i], (params["blocks"], params["inputs"]))
            given |= {"key": keys[i], "number": i}
            x, out = rich_block(params["closed"], weights, x, given, params["shared"], jnp.arange(5)[::-1])
            total += ((i + 1) * out["auxiliary"] + out["count"]) * weight
        return (total + (x["h"].sum(-1) ** 2 + x["count"]) * weight).sum(), weight.sum()

    return loss


@functools.cache
def stepped_alone(layers: int):
    return train_alone(one_by_one(layers), rich_params(layers), rich_batch(), optax.sgd(1.0), 1)


def check_against_one_by_one(mesh, strategy, layers, schedule, remat):
    loss, want, _ = stepped_alone(layers)
    tx, params = optax.sgd(1.0), rich_params(layers)
    metrics, state, _ = train_sharded(
        rich_loss(layers, schedule, remat), params, rich_batch(), tx, 1, mesh, strategy, units=STACKED
    )
    assert_close(metrics["loss"], loss, 1e-13)
    assert_close(state.logical_params(), want, 1e-13)  # float64 rounding of one step


CASES = [
    ("1x8", "FULL_SHARD", 5, Schedule(), "full"),
    ("1x8", "FULL_SHARD", 1, Schedule(), "none"),
    ("1x8", "FULL_SHARD", 3, Schedule(prefetch=0, late_reduce=False), "none"),
    ("1x4", "FULL_SHARD", 5, Schedule(prefetch=2, unroll=2), "dots"),
    ("1x2", "FULL_SHARD", 2, Schedule(prefetch=2), NAMES),
    ("2x4", "HYBRID_SHARD", 4, Schedule(unroll=2), NAMES),
    ("2x4", "HYBRID_SHARD", 2, Schedule(prefetch=0), "full"),
    ("2x4", "HYBRID_SHARD_ZERO2", 3, Schedule(prefetch=2, late_reduce=False), "dots"),
    ("1x8", "SHARD_GRAD_OP", 5, Schedule(), "none"),
    ("2x4", "SHARD_OPT", 4, Schedule(), "full"),
    ("2x4", "NO_SHARD", 2, Schedule(late_reduce=False), "full"),
]


def case_id(value):
    if isinstance(value, Schedule):
        late = "late" if value.late_reduce else "at-once"
        return f"prefetch{value.prefetch}-unroll{value.unroll}-{late}"
    return "names" if value is NAMES else f"L{value}" if isinstance(value, int) else value


@pytest.mark.parametrize(("mesh", "strategy", "layers", "schedule", "remat"), CASES, ids=case_id)
def test_values_and_all_gradients_equal_the_layers_one_by_one(
    mesh, strategy, layers, schedule, remat, float64
):
    """Gradients of parameters, x, per-layer inputs, shared and closed-over values; integers and keys pass."""
    check_against_one_by_one(mesh, strategy, layers, schedule, remat)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(prefetch=p, unroll=u, late_reduce=r)
        for p, u, r in itertools.product((0, 1, 2), (1, 2), (True, False))
    ],
    ids=case_id,
)
@pytest.mark.parametrize(("mesh", "strategy"), [("1x4", "FULL_SHARD"), ("2x2", "HYBRID_SHARD_ZERO2")])
def test_every_schedule_equals_the_layers_one_by_one(mesh, strategy, schedule, layers, float64):
    check_against_one_by_one(mesh, strategy, layers, schedule, "full")


def test_without_a_mesh_a_stack_is_a_scan(float64):
    loss, params, _ = stepped_alone(3)
    tx = optax.sgd(1.0)
    got_loss, got, _ = train_alone(rich_loss(3, Schedule(), "full"), rich_params(3), rich_batch(), tx, 1)
    assert_close(got_loss, loss, 1e-13)
    assert_close(got, params, 1e-13)


def test_a_stack_module_runs_its_blocks_in_order(compiled_as_for_users):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x, scale):
            return jnp.tanh(self.linear(x)) * scale

    stack = Stack(Block, 3, rngs=nnx.Rngs(0))
    kernel, bias = stack.each.linear.kernel[...], stack.each.linear.bias[...]
    assert kernel.shape == (3, 4, 4)
    assert not np.array_equal(kernel[0], kernel[1])  # every layer drew its own values
    x = want = jnp.arange(8.0).reshape(2, 4)
    for i in range(3):
        want = jnp.tanh(want @ kernel[i] + bias[i]) * 2.0
    np.testing.assert_allclose(stack(x, 2.0), want, rtol=1e-6)  # fp32 rounding


# ------------------------------------------------------------ the program: sizes, gathers, what is live

WIDTH, LAYER = 64, 64 * 64


def square_step(layers: int, strategy="FULL_SHARD", schedule: Schedule = Schedule(), remat="full"):
    """A step of `layers` matrices [64, 64] on 1x8, and its arguments; nothing is allocated."""

    def block(w, x, _):
        return checkpoint_name(jnp.tanh(x @ w), "hidden") @ w.T, None

    def loss(params, batch, key):
        return (run_stack(block, params["blocks"], batch, remat=remat, schedule=schedule)[0] ** 2).mean()

    shape = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    plan = make_plan({"blocks": shape}, submesh("1x8"), strategy=strategy, units=STACKED)
    tx = optax.sgd(1.0)
    step = train_step(loss, tx, plan)
    return step, TrainState.abstract(tx, plan), jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


@functools.cache
def compiled(layers: int, remat="full"):
    step, *args = square_step(layers, remat=remat)
    lowered = step.lower(*args)
    executable = lowered.compile()
    return lowered.as_text(), executable, audit.read(executable, step.plan.mesh)


def test_the_program_does_not_grow_with_the_number_of_layers():
    (short, *few, _), (long, *many, _) = compiled(8), compiled(64)
    few, many = few[0].as_text().count(" = "), many[0].as_text().count(" = ")
    assert len(long) < 1.1 * len(short)
    assert many < 1.1 * few


def test_each_gather_produces_one_layer():
    """C-36, the gathers."""
    gathers = compiled(16)[2].select("all-gather", min_bytes=1024)
    assert {8 * g.operands[0].bytes for g in gathers} == {4 * LAYER}
    assert sorted(g.runs for g in gathers) == [1, 1, 15, 15]  # one ahead of each loop


def test_temporary_memory_does_not_follow_the_number_of_layers():
    """C-36, the memory: activations (one row of 64 per layer) and gradient shards aside."""

    def temporary(layers):
        memory = audit.memory(compiled(layers)[1])
        return memory.temp - layers * 4 * (LAYER // 8 + WIDTH)

    assert abs(temporary(32) - temporary(16)) <= 0.1 * temporary(16)


@pytest.mark.parametrize("remat", ["none", "dots", NAMES], ids=case_id)
def test_checkpointing_never_adds_a_gather(remat):
    """C-38: two gathers per unit and step, however much of a block is computed twice."""
    assert compiled(4, "full")[2].count("all-gather", min_bytes=1024) == 8
    assert compiled(4, remat)[2].count("all-gather", min_bytes=1024) == 8


@pytest.mark.parametrize("late", [True, False], ids=["late", "at-once"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_loops_carry_as_many_gathered_units_as_are_fetched_ahead(prefetch, late):
    """With the one that is being gathered, depth + 1 are alive; and no stack of whole units is ever saved."""
    step, *args = square_step(6, schedule=Schedule(prefetch=prefetch, late_reduce=late))
    forward, backward = loops_of(step.jitted.trace(*args).jaxpr)
    assert whole_units(forward["carry"]) == prefetch
    assert whole_units(backward["carry"]) == prefetch + (1 if late else 0)  # and a gradient that waits
    for loop in (forward, backward):
        assert whole_units(loop["stacked"]) == 0


def test_units_that_stay_gathered_are_saved_once_each():
    """The same reading sees what SHARD_GRAD_OP keeps: a stack of whole units between the loops."""
    step, *args = square_step(6, strategy="SHARD_GRAD_OP")
    forward, backward = loops_of(step.jitted.trace(*args).jaxpr)
    assert whole_units(forward["stacked"]) == whole_units(backward["stacked"]) == 1


def loops_of(jaxpr) -> list[dict]:
    """The two scans over layers: shapes of what they carry, and of what goes in and out layer by layer."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and eqn.params["length"] > 1:
                body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
                outer = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
                inner = [v.aval.shape for v in (*body.invars, *body.outvars)]
                # What is carried has one shape inside and outside; what is stacked has a dim more outside.
                results = zip(outer[len(eqn.invars) :], inner[len(eqn.invars) :])
                carry = [shape for shape, each in results if shape == each]
                stacked = [shape for shape, each in zip(outer, inner) if shape != each]
                found.append({"carry": carry, "stacked": stacked})
            jax.tree.map(lambda p: visit(getattr(p, "jaxpr", p)) if hasattr(p, "eqns") else None, eqn.params)

    visit(jaxpr.jaxpr)
    assert len(found) == 2
    return found


def whole_units(shapes) -> int:
    return sum(shape[-2:] == (WIDTH, WIDTH) for shape in shapes)


# ------------------------------------------------------------ errors


def trace(block, params, units, **options):
    """Trace a step over `params` with `block`; nothing is compiled."""
    plan = make_plan(params, submesh("1x8"), units=units)
    tx, batch = optax.sgd(1.0), jax.ShapeDtypeStruct((8, 4), jnp.float32)

    def loss(params, batch, key):
        return run_stack(block, params, batch, **options)[0].mean()

    train_step(loss, tx, plan).lower(TrainState.abstract(tx, plan), batch)


def shapes(**sizes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}


def test_a_block_that_changes_the_shape_or_dtype_of_x_is_refused():
    params, units = {"a": shapes(w=(3, 4, 8))}, {"a": UnitOptions(stacked=True)}
    with pytest.raises(
        TypeError, match=r"got \['float32\[1, 4\]'\] and returned \['float32\[1, 8\]'\]. Cast or project"
    ):
        trace(lambda p, x, _: (x @ p["a"]["w"], None), params, units)
    with pytest.raises(TypeError, match=r"returned \['bfloat16\[1, 4\]'\]"):
        trace(lambda p, x, _: (x.astype(jnp.bfloat16), None), params, units)


def test_units_with_unequal_numbers_of_layers_are_refused_in_one_stack():
    params = {"a": shapes(v=(3, 4)), "b": shapes(w=(2, 4))}
    units = {"a": UnitOptions(stacked=True), "b": UnitOptions(stacked=True)}
    with pytest.raises(ValueError, match=r"b\.w has 2 layers and a\.v has 3; a stack needs equal counts"):
        trace(lambda p, x, _: (x, None), params, units)


def test_a_unit_that_is_not_stacked_is_refused():
    with pytest.raises(ValueError, match=r"w goes through a stack .* UnitOptions\(stacked=True\)"):
        trace(lambda p, x, _: (x, None), shapes(w=(3, 4)), {})


def test_sharded_and_plain_parameters_together_are_refused():
    params, units = {"a": shapes(w=(3, 4))}, {"a": UnitOptions(stacked=True)}
    plan, tx = make_plan(params, submesh("1x8"), units=units), optax.sgd(1.0)

    def loss(params, batch, key):
        return run_stack(lambda p, x, _: (x, None), {**params["a"], "plain": jnp.ones((3, 4))}, batch)[
            0
        ].mean()

    with pytest.raises(
        TypeError, match="sharded and plain parameters together. Lay out all of them in one plan"
    ):
        train_step(loss, tx, plan).lower(TrainState.abstract(tx, plan), np.ones((8, 4), np.float32))


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="remat 'half' is unknown. Use none, full, dots"):
        checkpointed(lambda x: x, "half")
    with pytest.raises(ValueError, match="prefetch is 3; .* use 0, 1 or 2"):
        Schedule(prefetch=3)
    with pytest.raises(ValueError, match="unroll is 4; .* use 1 or 2"):
        Schedule(unroll=4)
    with pytest.raises(ValueError, match="num_layers is 0; a stack needs 1 layer or more"):
        Stack(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 0, rngs=nnx.Rngs(0))
