"""A mesh axis that belongs to the model: jfsdp names `replica` and `shard` and leaves `tensor` alone.

A Megatron-style pair of matrices, the first cut on columns and the second on rows, runs tensor-parallel inside the
step on 2 x 2 x 2 and equals one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import call
from tests.support import HYBRID, PLAIN, assert_close, train_alone

LAYERS, WIDTH, INNER, ROWS, STEPS = 3, 16, 24, 16, 5
UNITS = {"blocks": UnitOptions(stacked=True), "out": UnitOptions()}
WHOLE, COLUMNS, ROWS_CUT = PartitionSpec(), PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)


def alone(w, x):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def by_constraints(w, x):
    """Tensor parallelism as annotations: the partitioner adds the one sum."""
    cut = jax.lax.with_sharding_constraint
    h = cut(jnp.tanh(x @ cut(w["up"], COLUMNS)), COLUMNS)
    return cut(h @ cut(w["down"], ROWS_CUT), PartitionSpec(None, None))


def by_hand(w, x):
    """Tensor parallelism written down: `[B, D] x [D, F/tensor] x [F/tensor, D]`, then the one sum."""
    # The checkpoint: what a shard_map inside another one saves for its backward pass, JAX 0.10 cannot lower.
    return jax.shard_map(
        jax.checkpoint(lambda up, down, x: jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor")),
        axis_names={"tensor"},
        in_specs=(COLUMNS, ROWS_CUT, WHOLE),
        out_specs=WHOLE,
    )(w["up"], w["down"], x)


def loss_of(pair):
    def loss(params, batch, key):
        x, _ = run_stack(lambda w, x, _: (x + pair(w, x), None), params["blocks"], batch["x"])
        error = (call(lambda w, x: x @ w, params["out"], x) - batch["y"]) ** 2
        return error.sum(), jnp.asarray(error.size, error.dtype)

    return loss


def data(dtype=np.float64):
    rng = np.random.default_rng(0)
    draw = lambda *dims: np.asarray(0.3 * rng.normal(size=dims), dtype)  # noqa: E731
    blocks = {"up": draw(LAYERS, WIDTH, INNER), "down": draw(LAYERS, INNER, WIDTH)}
    return {"blocks": blocks, "out": draw(WIDTH, 5)}, {"x": draw(ROWS, WIDTH), "y": draw(ROWS, 5)}


def prepare(pair, strategy, dtype=np.float64):
    mesh = jax.make_mesh((2, 2, 2), ("replica", "shard", "tensor"), axis_types=(AxisType.Auto,) * 3)
    (params, batch), tx = data(dtype), optax.adamw(1e-2)
    plan = make_plan(params, mesh, strategy=strategy, units=UNITS)
    return TrainState.create(plan.place(params), tx, plan), train_step(loss_of(pair), tx, plan), batch


QUICK = [(by_constraints, "HYBRID_SHARD"), (by_hand, "FULL_SHARD")]
CASES = [(pair, strategy) for pair in (by_constraints, by_hand) for strategy in PLAIN + HYBRID]


@pytest.mark.parametrize(
    ("pair", "strategy"),
    [pytest.param(*c, id=f"{c[0].__name__}-{c[1]}", marks=() if c in QUICK else pytest.mark.slow) for c in CASES],
)
def test_a_tensor_parallel_pair_trains_as_on_one_device(pair, strategy, float64):
    params, batch = data()
    want_loss, want, _ = train_alone(loss_of(alone), jax.tree.map(jnp.asarray, params), batch, optax.adamw(1e-2), STEPS)
    state, step, batch = prepare(pair, strategy)
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    # Rounding of float64 over five steps.
    assert_close(metrics["loss"], want_loss, 1e-12)
    assert_close(state.logical_params(), want, 1e-12)


@pytest.mark.parametrize("pair", [by_constraints, by_hand], ids=lambda pair: pair.__name__)
def test_the_pair_is_cut_over_tensor_and_units_over_shard_alone(pair):
    state, step, batch = prepare(pair, "HYBRID_SHARD", np.float32)
    compiled = step.lower(state, batch).compile()
    program = audit.read(compiled, step.plan.mesh)
    sums = [c for c in program.select("all-reduce", "tensor") if c.payload_bytes() == ROWS // 4 * WIDTH * 4]
    # Once a layer forward, and once backward to x (recomputing it, remat="full", sums once more unless found unused).
    assert 2 * LAYERS <= sum(c.runs for c in sums) <= 3 * LAYERS
    gathered = [c for c in program.select("all-gather") if "shard" in c.axes]
    assert gathered and {c.axes for c in gathered} == {("shard",)}
    assert f"f32[{ROWS // 4},{INNER // 2}]" in compiled.as_text()  # a device's rows of its columns
    assert f"f32[{ROWS // 4},{INNER}]" not in compiled.as_text()
