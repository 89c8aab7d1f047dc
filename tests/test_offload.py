"""Offload: what lies in host memory, and that it changes no result."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

from jfsdp.layout import make_plan
from jfsdp.offload import HOST, CPUOffloadPolicy, OffloadPolicy
from jfsdp.step import TrainState, eval_step, train_step
from tests.support import HYBRID, PLAIN, UNITS, assert_close, bitwise_equal, submesh, toy_batch, toy_loss, toy_params

POLICIES = {
    "params": OffloadPolicy(params=True),
    "opt_state": OffloadPolicy(opt_state=True),
    "all": OffloadPolicy(params=True, gradients=True, opt_state=True),
    "host": CPUOffloadPolicy(),
}
MESHES = [*(("1x8", s) for s in PLAIN), *(("2x4", s) for s in HYBRID)]
CASES = [(*where, policy) for where in MESHES for policy in POLICIES]
QUICK = [("1x8", "FULL_SHARD", "all"), ("2x4", "HYBRID_SHARD", "host")]


def kinds(tree) -> set[str]:
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}


def train(mesh, strategy, policy=OffloadPolicy(), steps=3, **options):
    params, batch, tx = toy_params(layers=3, dtype=jnp.float32), toy_batch(dtype=np.float32), optax.adamw(1e-2)
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=UNITS, offload_policy=policy)
    state = TrainState.create(plan.place(params), tx, plan, ema=True)
    step = train_step(toy_loss(), tx, plan, ema=0.9, **options)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


reference = cache(train)


@pytest.mark.parametrize(
    ("mesh", "strategy", "policy"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_it_lies_where_the_policy_says_and_trains_the_same(mesh, strategy, policy):
    asked = POLICIES[policy]
    state, metrics = train(mesh, strategy, asked, clip_norm=1.0)
    want, want_metrics = reference(mesh, strategy, clip_norm=1.0)
    assert kinds(state.params) == kinds(state.ema) == {HOST if asked.params else "device"}
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert kinds(moments) == {HOST if asked.opt_state else "device"}
    assert float(metrics["loss"]) == pytest.approx(float(want_metrics["loss"]), rel=1e-6)
    # Another program, whose fusions round differently.
    assert_close(state.params, want.params, 1e-5)
    assert_close(state.ema, want.ema, 1e-5)
    assert_close(state.opt_state, want.opt_state, 1e-5)


def test_layers_come_to_the_device_one_at_a_time():
    """What crosses inside the loops of the jaxpr is one layer's shard, never `[L, ...]`."""
    params, tx = toy_params(layers=3, dtype=jnp.float32), optax.sgd(0.1)
    plan = make_plan(params, submesh("1x8"), units=UNITS, offload_policy=OffloadPolicy(params=True))
    state, step = TrainState.create(plan.place(params), tx, plan), train_step(toy_loss(), tx, plan)
    jaxpr = jax.make_jaxpr(step._step)(state, toy_batch(dtype=np.float32))
    (inner,) = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    crossing = [
        e.invars[0].aval
        for e in equations(inner.params["jaxpr"])
        if e.primitive.name == "device_put" and e.invars[0].aval.memory_space == jax.memory.Space.Host
    ]
    layers = {leaf.path: leaf.shard_shape for leaf in plan.leaves if leaf.layers}
    assert {a.shape for a in crossing} >= set(layers.values())
    assert not {a.shape for a in crossing} & {(3, *dims) for dims in layers.values() if dims}


def equations(jaxpr):
    """Every equation, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_parameters_on_the_host_serve_evaluation_and_calls_outside_the_step():
    params, batch = toy_params(layers=3, dtype=jnp.float32), toy_batch(dtype=np.float32)
    plan = make_plan(params, submesh("1x8"), units=UNITS, offload_policy=OffloadPolicy(params=True))
    state = TrainState.create(plan.place(params), optax.sgd(0.1), plan, ema=True)
    want = toy_loss()(params, batch, None)
    np.testing.assert_allclose(eval_step(toy_loss(), plan)(state.params, batch), want, rtol=1e-6)
    logical = state.logical_params()
    assert kinds(logical) == {"device"}
    assert bitwise_equal(logical, params)
    np.testing.assert_allclose(toy_loss()(state.module(), batch, None), want, rtol=1e-6)
    assert kinds(state.averaged_params()) == {HOST}


def test_a_step_on_the_host_needs_everything_there():
    with pytest.raises(ValueError, match=r"Set params, gradients and opt_state, or use CPUOffloadPolicy"):
        OffloadPolicy(params=True, step_on="host")
    with pytest.raises(ValueError, match=r"'gpu'. Use device or host"):
        OffloadPolicy(step_on="gpu")
