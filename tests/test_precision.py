"""Mixed precision: which dtype is stored, computed in and reduced in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.layout import make_plan
from jfsdp.precision import MixedPrecision, parse_dtype
from jfsdp.step import TrainState, train_step
from jfsdp.unit import unshard
from tests.support import compile_step, shape, submesh


def product(params, batch, key):
    """Mean over rows of `w * x`: a device hands in its x by the number of devices as the gradient of w."""
    w = unshard(params)["w"]
    return jnp.sum(w * batch["x"].astype(w.dtype)).astype(jnp.float32), jnp.float32(len(batch["x"]))


class TestReduction:
    BATCH = {"x": np.array([256] + [1] * 7, np.float32)[:, None].repeat(8, 1)}

    def gradient(self, mesh, reduce_dtype):
        precision = MixedPrecision(param_dtype="bf16", reduce_dtype=reduce_dtype)
        params = {"w": np.zeros(8, np.float32)}
        plan, tx = make_plan(params, submesh(mesh), precision=precision), optax.sgd(1.0)
        state, _ = train_step(product, tx, plan)(TrainState.create(plan.place(params), tx, plan), self.BATCH)
        assert state.params["w"].dtype == jnp.float32
        return set((-np.asarray(state.params["w"])).tolist())

    @pytest.mark.parametrize("mesh", ["1x8", "2x4", "8x1"])
    @pytest.mark.parametrize("reduce_dtype", [None, "fp32"])
    def test_gradients_of_256_and_seven_1_average_exactly_in_fp32(self, mesh, reduce_dtype):
        """C-23: 32.875; 32.0 and 33.0 are what bf16 sums give."""
        assert self.gradient(mesh, reduce_dtype) == {32.875}

    @pytest.mark.parametrize(
        ("reduce_dtype", "operand"), [(None, "float32"), ("fp32", "float32"), ("bf16", "bfloat16")]
    )
    def test_the_reduction_has_operands_of_the_asked_dtype(self, reduce_dtype, operand):
        """C-23, read from StableHLO."""
        precision = MixedPrecision(param_dtype="bf16", reduce_dtype=reduce_dtype)
        params, batch = {"w": shape(8)}, {"x": shape(8, 8)}
        got = compile_step(product, params, batch, "2x4", precision=precision, units={})
        scatter = [c for c in got.asked if c.kind == "reduce-scatter"]
        copies = [c for c in got.asked if c.kind == "all-reduce" and c.axes == ("replica",)]
        assert scatter and copies and {c.dtype for c in scatter + copies} == {operand}


def test_the_stored_weight_moves_in_steps_that_bf16_cannot_hold():
    """C-24: w = 1, gradient 1, Adam at 1e-3, 100 steps: 0.9; bf16 has steps of 0.004 there."""
    params = {"w": np.ones(8, np.float32)}
    plan = make_plan(params, submesh("1x8"), precision=MixedPrecision(param_dtype="bf16"))
    seen = []

    def loss(params, batch, key):
        w = unshard(params)["w"]
        seen.append(w.dtype)
        return jnp.sum(w.astype(jnp.float32)) * jnp.mean(batch["x"])

    tx = optax.adam(1e-3)
    state, step = TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan)
    for _ in range(100):
        state, _ = step(state, {"x": np.ones(8, np.float32)})
    np.testing.assert_allclose(state.params["w"], 0.9, atol=1e-4)
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert {a.dtype for a in jax.tree.leaves((state.params, state.opt_state)) if a.ndim} == {jnp.dtype("float32")}


class TestNames:
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("bf16", jnp.bfloat16),
            ("fp32", "float32"),
            ("float32", jnp.float32),
            (jnp.bfloat16, jnp.bfloat16),
            ("fp64", "float64"),
        ],
    )
    def test_names_and_dtypes_are_understood(self, name, dtype):
        assert MixedPrecision(param_dtype=name).param_dtype == jnp.dtype(dtype)
        assert MixedPrecision(reduce_dtype=name).reduce_dtype == jnp.dtype(dtype)

    def test_none_keeps_the_dtype_of_the_parameter(self):
        assert MixedPrecision() == MixedPrecision(param_dtype=None, reduce_dtype=None)
        plan = make_plan({"w": shape(8)}, submesh("1x8"))
        assert plan.leaves[0].param_dtype == plan.leaves[0].reduce_dtype == jnp.float32

    def test_others_are_refused_with_the_known_names(self):
        with pytest.raises(ValueError, match="param_dtype 'bf8' is not a dtype. Use one of fp32, bf16"):
            MixedPrecision(param_dtype="bf8")
        with pytest.raises(ValueError, match="reduce_dtype int8 is not a floating dtype. Use one of fp32, bf16"):
            MixedPrecision(reduce_dtype="int8")
        with pytest.raises(ValueError, match="dtype bool is not a floating dtype"):
            parse_dtype(bool)
