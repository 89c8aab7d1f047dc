"""What may be done to gradients between the backward pass and the optimizer: clip, divide otherwise, hook."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.layout import UnitOptions, make_plan
from jfsdp.precision import LossScale, MixedPrecision
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import call, unshard
from jfsdp.wrap import fully_shard
from tests.support import HYBRID, PLAIN, submesh

MESHES = [
    *(("1x8", s) for s in ("FULL_SHARD", "NO_SHARD")),
    ("2x4", "HYBRID_SHARD"),
    *(pytest.param("1x8", s, marks=pytest.mark.slow) for s in PLAIN if s not in ("FULL_SHARD", "NO_SHARD")),
    *(pytest.param("2x4", s, marks=pytest.mark.slow) for s in HYBRID if s != "HYBRID_SHARD"),
]


def loss(params, batch, key):
    """The gradient of each parameter is the mean over rows of its g, the same in each layer."""
    total = 0.0
    if "blocks" in params:
        block = lambda w, x, _: (x + jnp.sum(w["kernel"] * batch["blocks"].mean(0)), None)  # noqa: E731
        total += run_stack(block, params["blocks"], jnp.float32(0))[0]
    if "head" in params:
        total += call(lambda w, g: jnp.sum(w["w"] * g), params["head"], batch["head"].mean(0))
    rest = unshard({name: w for name, w in params.items() if name not in ("blocks", "head")})
    return total + sum(jnp.sum(w * batch[name].mean(0).astype(w.dtype)) for name, w in rest.items())


def gradients(values, mesh="1x8", strategy=None, units=None, precision=MixedPrecision(), dtype=np.float32, **options):
    """The gradients that were applied, logical, and the metrics; `values` are the true ones, those of one layer."""
    stacked = {"blocks": UnitOptions(stacked=True)} if "blocks" in values else {}
    params = {name: np.zeros(np.shape(g), dtype) for name, g in values.items()}
    for name in ("blocks", "head"):
        if name in params:
            leaf = np.broadcast_to(params[name], (3, *params[name].shape)) if name == "blocks" else params[name]
            params[name] = {"kernel" if name == "blocks" else "w": leaf}
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=stacked | (units or {}), precision=precision)
    tx, batch = optax.sgd(1.0), {n: np.tile(np.float32(g), (8, *[1] * np.ndim(g))) for n, g in values.items()}
    state = TrainState.create(plan.place(params), tx, plan)
    state, metrics = train_step(loss, tx, plan, **options)(state, batch)
    return jax.tree.map(lambda w: -np.asarray(w), plan.unpad(state.params)), metrics, state


class TestClipping:
    def test_by_value_cuts_every_entry(self):
        got, metrics, _ = gradients({"a": [-7, 2, 0.5, -0.25]}, clip_value=1.0)
        np.testing.assert_allclose(got["a"], [-1, 1, 0.5, -0.25], rtol=1e-6)
        assert float(metrics["grad_norm"]) == pytest.approx(math.sqrt(49 + 4 + 0.25 + 0.0625))

    def test_by_value_after_by_norm(self):
        got, _, _ = gradients({"a": [3.0, 4, 0, 0, 0, 0, 0, 0]}, clip_norm=1.0, clip_value=0.7)
        np.testing.assert_allclose(got["a"][:2], [0.6, 0.7], rtol=1e-6)

    def test_by_value_does_not_hide_what_is_not_finite(self):
        with pytest.raises(FloatingPointError, match="gradient of a is not finite"):
            gradients({"a": [np.inf, 1]}, clip_value=1.0)

    @pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
    def test_norms_add_up_in_fp32_whatever_is_stored(self, norm_type):
        """C-16 to C-18 for bf16 parameters: a sum of ones in bf16 ends at 256."""
        got, metrics, _ = gradients({"a": np.ones(4096)}, dtype=jnp.bfloat16, norm_type=norm_type, clip_norm=0.5)
        norm = 1 if math.isinf(norm_type) else 4096 ** (1 / norm_type)
        assert metrics["grad_norm"].dtype == jnp.float32
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert got["a"].dtype == jnp.bfloat16
        np.testing.assert_allclose(got["a"].astype(np.float32), 0.5 / norm, rtol=2**-8)

    @pytest.mark.parametrize("bound", [0, -1.0])
    def test_bounds_out_of_range_are_refused(self, bound):
        with pytest.raises(ValueError, match="clip_value is .*; use a positive bound, or None not to clip"):
            gradients({"a": [1.0]}, clip_value=bound)


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_a_divide_factor_replaces_the_number_of_devices(mesh, strategy):
    """With a factor of 1 the unit's gradient is the sum over 8 devices, whatever they are to each other."""
    units = {
        "blocks": UnitOptions(stacked=True, gradient_divide_factor=1),
        "head": UnitOptions(gradient_divide_factor=2),
        "a": UnitOptions(),
    }
    values = {"blocks": np.arange(16.0), "head": np.ones(5), "a": np.ones(3), "rest": np.ones(8)}
    got, metrics, _ = gradients(values, mesh, strategy, units)
    np.testing.assert_allclose(got["blocks"]["kernel"], np.tile(8 * np.arange(16.0), (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(got["head"]["w"], 4 * np.ones(5), rtol=1e-6)
    np.testing.assert_allclose(got["a"], np.ones(3), rtol=1e-6)
    everything = np.concatenate([np.ravel(g) for g in jax.tree.leaves(got)])
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(everything), rel=1e-6)


def test_a_divide_factor_must_be_positive():
    with pytest.raises(ValueError, match="gradient_divide_factor is 0; it divides gradients, so use a positive number"):
        UnitOptions(gradient_divide_factor=0)


class TestHooks:
    @pytest.mark.parametrize(("mesh", "strategy"), MESHES)
    def test_a_hook_sees_the_finished_pieces_of_its_unit_layer_by_layer(self, mesh, strategy):
        """Uneven shapes: what a hook writes into the padding is neither stored nor counted in the norm."""
        seen = {}

        def hook(path, shard):
            seen.setdefault(path, set()).add(shard.shape)
            return 2 * shard + 1

        units = {"blocks": UnitOptions(stacked=True, gradient_hook=hook), "head": UnitOptions(gradient_hook=hook)}
        values = {"blocks": np.ones((13, 3)), "head": np.ones(13), "rest": np.ones(13)}
        got, metrics, state = gradients(values, mesh, strategy, units)
        shards = {"NO_SHARD": 1}.get(strategy, 8 if mesh == "1x8" else 4)
        assert seen == {"blocks.kernel": {(-(-13 // shards), 3)}, "head.w": {(-(-13 // shards),)}}
        np.testing.assert_array_equal(got["blocks"]["kernel"], np.full((3, 13, 3), 3))
        np.testing.assert_array_equal(got["head"]["w"], np.full(13, 3))
        np.testing.assert_array_equal(got["rest"], np.ones(13))
        assert float(metrics["grad_norm"]) == pytest.approx(math.sqrt(9 * (3 * 39 + 13) + 13), rel=1e-6)
        assert not np.asarray(state.params["head"]["w"])[13:].any()

    def test_a_hook_sees_true_gradients_under_a_loss_scale(self):
        units = {"head": UnitOptions(gradient_hook=lambda path, shard: jnp.clip(shard, -0.5, 0.5))}
        precision = MixedPrecision(param_dtype="fp16")
        got, metrics, _ = gradients({"head": np.linspace(0.25, 2, 8)}, units=units, precision=precision)
        np.testing.assert_array_equal(got["head"]["w"], np.minimum(np.linspace(0.25, 2, 8), 0.5))
        assert float(metrics["loss_scale"]) == LossScale().init_scale

    def test_a_hook_that_changes_the_shape_is_refused(self):
        units = {"head": UnitOptions(gradient_hook=lambda path, shard: shard[:1].astype(jnp.bfloat16))}
        with pytest.raises(ValueError, match=r"hook of head.w took float32\[2\] and gave bfloat16\[1\]. Give back"):
            gradients({"head": np.ones(16)}, units=units)


def test_a_flax_unit_has_a_divide_factor_and_a_hook_of_its_own():
    class Two(nnx.Module):
        def __init__(self):
            self.inner, self.outer = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.outer(self.inner(x))

    def kernels(**options):
        model, tx = Two(), optax.sgd(1.0)
        fully_shard(model.inner, **options)
        fully_shard(model, mesh=submesh("1x8"))
        state = TrainState.create(model, tx)
        before = jax.tree.map(np.array, state.params)
        step = train_step(lambda m, b, k: jnp.mean(m(b["x"])), tx, state.plan)
        state, _ = step(state, {"x": np.ones((8, 8), np.float32)})
        moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
        return moved["inner"]["kernel"], moved["outer"]["kernel"]

    plain, divided = kernels(), kernels(gradient_divide_factor=2)
    hooked = kernels(gradient_hook=lambda path, shard: -shard if path == "inner.kernel" else shard)
    for factor, got in ((4, divided), (-1, hooked)):
        np.testing.assert_allclose(got[0], factor * plain[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], plain[1], rtol=1e-5, atol=1e-6)
    assert np.abs(plain[0]).max() > 0.01
