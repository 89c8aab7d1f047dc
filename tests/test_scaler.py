"""float16 and its loss scale: scaled on every wire, unscaled before anything looks, one verdict on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.layout import UnitOptions, make_plan
from jfsdp.precision import LossScale, MixedPrecision, ScaleState
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import unshard
from tests.support import assert_close, bitwise_equal, submesh

HALF = MixedPrecision(param_dtype="fp16")


def products(params, batch, key):
    """Mean over rows of `sum(p * g)`: the gradient of each parameter is the mean of its g, formed in float16."""
    whole = unshard(params)
    assert {w.dtype for w in whole.values()} == {jnp.dtype("float16")}
    return sum(jnp.sum(whole[name] * batch[name]) for name in whole) / jax.tree.leaves(batch)[0].shape[0]


def rows(gradients, count=8):
    return {name: np.tile(np.float32(g), (count, *[1] * np.ndim(g))) for name, g in gradients.items()}


def start(params, mesh="1x8", tx=None, loss_scale=None, precision=HALF, trainable=lambda path: True):
    """A state and its optimizer; a learning rate of 1 shows gradients."""
    tx = optax.sgd(1.0) if tx is None else tx
    params = {name: np.float32(w) for name, w in params.items()}
    plan = make_plan(params, submesh(mesh), precision=precision, trainable=trainable)
    return TrainState.create(plan.place(params), tx, plan, loss_scale=loss_scale), tx, plan


class TestOverflow:
    @pytest.mark.parametrize(
        ("mesh", "size", "element", "device", "nonfinite"),
        [("1x8", 16, 0, 0, "raise"), ("2x4", 16, 5, 5, "skip"), ("1x8", 9, 0, 7, "ignore")],
        ids=["device 0", "device 5 of 2x4", "a device with padding only"],
    )
    def test_a_step_that_overflows_on_one_device_changes_nothing_on_any(self, mesh, size, element, device, nonfinite):
        """C-20: scale 1024, step 2 of 4; one element of one device's rows is too large for float16 once scaled."""
        good = {"p": np.linspace(-1, 1, size), "q": np.ones(8)}
        state, tx, plan = start(jax.tree.map(np.zeros_like, good), mesh, optax.adamw(0.1), LossScale(init_scale=1024))
        step = train_step(products, tx, plan, clip_norm=1.0, nonfinite=nonfinite)
        state, _ = step(state, rows(good))
        before = jax.tree.map(np.array, (state.params, state.opt_state))
        bad = rows(good)
        bad["p"][device, element] = 1000  # x 1024 / 8 rows: above 65504
        state, metrics = step(state, bad)
        assert bitwise_equal((state.params, state.opt_state), before)
        assert [float(np.asarray(copy.data)) for copy in state.scale.scale.addressable_shards] == [512] * 8
        counts = {name: float(metrics[name]) for name in ("loss_scale", "skipped", "updates")}
        assert counts == {"loss_scale": 1024, "skipped": 1, "updates": 1}
        for _ in range(2):
            state, metrics = step(state, rows(good))
        other = TrainState.create(plan.place(jax.tree.map(np.zeros_like, good)), tx, plan)
        for _ in range(3):
            other, _ = step(other, rows(good))
        assert_close(state.params, other.params, 1e-6)
        assert (int(state.step), int(metrics["skipped"]), int(metrics["updates"])) == (4, 1, 3)

    def test_what_overflows_at_the_least_scale_is_raised_and_names_the_parameter(self):
        state, tx, plan = start({"p": np.zeros(8), "q": np.zeros(8)}, loss_scale=LossScale(init_scale=4, min_scale=2))
        step = train_step(products, tx, plan)
        nan = rows({"p": np.full(8, np.nan), "q": np.ones(8)})
        state, metrics = step(state, nan)
        assert (float(metrics["loss_scale"]), float(state.scale.scale)) == (4, 2)
        with pytest.raises(FloatingPointError, match="step 2: the gradient of p is not finite"):
            step(state, nan)

    def test_a_reduction_in_float16_that_overflows_is_seen(self):
        precision = MixedPrecision(param_dtype="fp16", reduce_dtype="fp16")
        state, tx, plan = start({"p": np.zeros(8)}, precision=precision, loss_scale=LossScale(init_scale=1024))
        large = rows({"p": np.full(8, 100.0)})  # 12,800 a device, 102,400 when summed
        state, metrics = train_step(products, tx, plan)(state, large)
        assert (int(metrics["skipped"]), float(state.scale.scale)) == (1, 512)
        state, metrics = train_step(products, tx, plan)(state, large)  # 51,200
        assert int(metrics["skipped"]) == 1
        np.testing.assert_array_equal(state.params["p"], np.full(8, -100.0))


class TestUnscaling:
    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    @pytest.mark.parametrize("trained", [("a", "b"), ("a", "b", "c")])
    def test_the_norm_and_the_clip_see_true_gradients_also_where_the_scale_grows(self, mesh, trained):
        """C-21: gradients 3 and 4, norm 5 and not 5120; the scale doubles after every step; a part may be frozen."""
        params = {"a": np.zeros(8), "b": np.zeros(8), "c": np.zeros(8)}
        scale = LossScale(init_scale=1024, growth_interval=1)
        state, tx, plan = start(params, mesh, loss_scale=scale, trainable=lambda path: path in trained)
        step = train_step(products, tx, plan, clip_norm=1.0)
        c = 0 if "c" in trained else 12
        batch = rows({"a": 3 * np.eye(8)[0], "b": 4 * np.eye(8)[7], "c": c * np.eye(8)[1]})
        for i in (1, 2):
            state, metrics = step(state, batch)
            assert float(metrics["grad_norm"]) == 5
            assert float(state.scale.scale) == 1024 * 2**i
            np.testing.assert_allclose(state.params["a"], -0.6 * i * np.eye(8)[0], rtol=1e-6)
            np.testing.assert_allclose(state.params["b"], -0.8 * i * np.eye(8)[7], rtol=1e-6)

    @pytest.mark.parametrize(("accumulate", "no_sync"), [(1, False), (2, False), (2, True)])
    def test_gradients_too_small_for_float16_survive_with_a_scale_only(self, accumulate, no_sync):
        small = rows({"p": np.full(8, 2.0**-26)}, 16)  # float16 ends at 2**-24, and each row hands in a sixteenth
        for scale, wanted in ((1.0, 0.0), (2.0**14, -(2.0**-26))):
            state, tx, plan = start({"p": np.zeros(8)}, loss_scale=LossScale.static(scale))
            step = train_step(products, tx, plan, accumulate=accumulate, no_sync=no_sync)
            state, _ = step(state, small)
            np.testing.assert_array_equal(state.params["p"], np.full(8, wanted, np.float32))

    def test_a_stack_in_float16_follows_the_one_in_float32(self):
        """float16 keeps 3 digits; a gradient that still held the scale, or a part of it, would be off by far more."""
        rng = np.random.default_rng(0)
        params = {"blocks": {"kernel": (0.3 * rng.normal(size=(3, 16, 16))).astype(np.float32)}}
        batch, tx = {"x": rng.normal(size=(16, 16)).astype(np.float32)}, optax.sgd(0.1)

        def block(w, x, _):
            return x + jnp.tanh(x @ w["kernel"]), None

        def loss(params, batch, key):
            x = batch["x"].astype(dtype)
            return jnp.mean(run_stack(block, params["blocks"], x)[0].astype(jnp.float32) ** 2)

        ends = []
        for dtype in ("float32", "float16"):
            units = {"blocks": UnitOptions(stacked=True)}
            plan = make_plan(params, submesh("2x4"), units=units, precision=MixedPrecision(param_dtype=dtype))
            state, step = TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan, accumulate=2)
            for _ in range(3):
                state, metrics = step(state, batch)
            assert int(metrics["skipped"]) == 0 and ("loss_scale" in metrics) == (dtype == "float16")
            ends.append((state.params, metrics["loss"], metrics["grad_norm"]))
        assert_close(ends[1], ends[0], 3e-3)


class TestScale:
    def test_it_moves_as_torch_amp_moves_it(self):
        """Recorded from `torch.amp.GradScaler` 2.13 with these settings; the scale before each step."""
        rule, finite = LossScale(init_scale=1024, growth_interval=2), [1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1]
        state, seen = ScaleState.start(rule), []
        for good in finite:
            seen.append(float(state.scale))
            state = state.after(jnp.bool_(good))
        assert seen == [1024, 1024, 2048, 2048, 1024, 1024, 2048, 1024, 512, 512, 256, 256, 512, 512]

    def test_it_ends_where_float32_does_and_at_the_least(self):
        top = ScaleState.start(LossScale(init_scale=2.0**127, growth_interval=1)).after(jnp.bool_(True))
        assert float(top.scale) == 2.0**127
        low = ScaleState.start(LossScale(init_scale=1.5)).after(jnp.bool_(False)).after(jnp.bool_(False))
        assert float(low.scale) == 1
        static = ScaleState.start(LossScale.static(0.25))
        assert float(static.after(jnp.bool_(False)).scale) == float(static.after(jnp.bool_(True)).scale) == 0.25

    @pytest.mark.parametrize(
        ("precision", "has"),
        [
            (MixedPrecision(), False),
            (MixedPrecision(param_dtype="bf16"), False),
            (HALF, True),
            (MixedPrecision(reduce_dtype="fp16"), True),
        ],
    )
    def test_there_is_one_where_float16_is(self, precision, has):
        state, tx, plan = start({"p": np.zeros(8)}, precision=precision)
        assert (state.scale is not None) == has
        assert not has or (float(state.scale.scale), state.scale.rule) == (65536, LossScale())
        describe = lambda s: [(p, a.shape, a.dtype, a.sharding) for p, a in jax.tree_util.tree_leaves_with_path(s)]  # noqa: E731
        assert describe(TrainState.abstract(tx, plan)) == describe(state)
        if precision == HALF:
            before = describe(state)
            state, _ = train_step(products, tx, plan)(state, rows({"p": np.ones(8)}))
            assert describe(state) == before

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (dict(init_scale=0), "init_scale is 0 and min_scale 1.0.*Use positive numbers"),
            (dict(init_scale=4, min_scale=8), "init_scale is 4 and min_scale 8"),
            (dict(growth_factor=0.5), r"growth_factor is 0.5; use 1 \(never grow\) or more"),
            (dict(backoff_factor=2), "backoff_factor is 2; use 1"),
            (dict(growth_interval=0), "growth_interval is 0; it counts steps"),
        ],
    )
    def test_rules_that_cannot_work_are_refused(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            LossScale(**wrong)

    def test_a_parameter_stored_in_float16_is_refused_unless_it_is_frozen(self):
        params, tx = {"p": np.zeros(8, np.float16), "q": np.zeros(8, np.float32)}, optax.sgd(1.0)
        plan = make_plan(params, submesh("1x8"))
        with pytest.raises(ValueError, match="p is trained and stored in float16.*Store it in float32"):
            TrainState.create(plan.place(params), tx, plan)
        plan = make_plan(params, submesh("1x8"), trainable=lambda path: path == "q")
        assert TrainState.create(plan.place(params), tx, plan).scale is not None
