"""One optimizer step: how losses, weights, micro-batches, norms and bad gradients become a new state.

Most cases are linear in the parameters, so that a learning rate of 1 shows the gradient in them.
"""

import math
from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.layout import UnitOptions, make_plan
from jfsdp.loss import Auxiliary
from jfsdp.schedule import Schedule
from jfsdp.stack import run_stack
from jfsdp.state import TrainState, check_separate_buffers
from jfsdp.step import train_step
from jfsdp.unit import unshard
from tests.support import HYBRID, PLAIN, assert_close, bitwise_equal, compile_step, shape, submesh

MESHES = [*(("1x8", s) for s in PLAIN), *(("2x4", s) for s in HYBRID)]


def start(params, mesh="1x8", strategy=None, tx=None, units=None):
    """A state of NumPy parameters, the optimizer (a learning rate of 1 shows gradients), and the plan."""
    tx = optax.sgd(1.0) if tx is None else tx
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=units)
    return TrainState.create(plan.place(params), tx, plan), tx, plan


def zeros(*dims):
    return np.zeros(dims, np.float32)


def products(params, batch, key):
    """Mean over rows of `sum(p * g)`: the gradient of each parameter is the mean of its g."""
    whole = unshard(params)
    return sum(jnp.sum(whole[name] * batch[name]) for name in whole) / jax.tree.leaves(batch)[0].shape[0]


def rows(gradients: dict, count=8):
    """A batch in which every row holds these gradients."""
    return {name: np.broadcast_to(np.float32(g), (count, *np.shape(g))) for name, g in gradients.items()}


def token_loss(params, batch, key):
    """Each token has its own entry of p, whose gradient is its loss times the weight that it carries."""
    per_token = batch["loss"] * (1 + unshard(params)["p"][batch["id"]])
    return jnp.sum(per_token * batch["valid"]), jnp.sum(batch["valid"])


def tokens(*rows, width):
    """One row per tuple of token losses, padded to `width` with tokens of loss 100 that do not count."""
    loss, valid = np.full((len(rows), width), 100, np.float32), zeros(len(rows), width)
    for i, row in enumerate(rows):
        loss[i, : len(row)], valid[i, : len(row)] = row, 1
    return {"loss": loss, "valid": valid, "id": np.arange(loss.size).reshape(loss.shape)}


class TestWeights:
    """Losses are sums and weights; the total weight divides."""

    @pytest.mark.parametrize("mesh", ["1x2", "2x1"])
    @pytest.mark.parametrize("padding", [0, 3])
    def test_every_token_counts_the_same_on_all_devices(self, mesh, padding):
        """C-10: 3 tokens of loss 2 beside 1 token of loss 6."""
        batch = tokens((2, 2, 2), (6,), width=3 + padding)
        state, tx, plan = start({"p": zeros(32)}, mesh)
        state, metrics = train_step(token_loss, tx, plan)(state, batch)
        assert float(metrics["loss"]) == 3.0 and float(metrics["weight"]) == 4
        gradient = (batch["loss"] * batch["valid"] / 4).reshape(-1)
        np.testing.assert_array_equal(state.logical_params()["p"][: gradient.size], -gradient)

    @pytest.mark.parametrize("mesh", ["1x2", "2x1"])
    @pytest.mark.parametrize("no_sync", [False, True])
    def test_every_token_counts_the_same_in_all_micro_batches(self, mesh, no_sync):
        """C-11: rows are A1, A2, B1, B2 of two devices and two micro-batches; sum 16 over 10 tokens."""
        batch = tokens((1, 3), (5,), (1, 1, 1, 1, 1, 1), (1,), width=6)
        state, tx, plan = start({"p": zeros(32)}, mesh)
        state, metrics = train_step(token_loss, tx, plan, accumulate=2, no_sync=no_sync)(state, batch)
        assert float(metrics["loss"]) == pytest.approx(1.6, rel=1e-6) and float(metrics["weight"]) == 10
        gradient = (batch["loss"] * batch["valid"] / 10).reshape(-1)
        np.testing.assert_allclose(state.logical_params()["p"][: gradient.size], -gradient, rtol=1e-6)

    def test_a_short_sequence_counts_only_its_own_targets_and_an_empty_batch_is_no_nan(self):
        """C-12: 7 sequences of 4 tokens and one of 1 have 21 targets; 8 of length 1 have none."""
        state, tx, plan = start({"p": zeros(32)})
        step = train_step(token_loss, tx, plan, clip_norm=1.0)
        batch = tokens(*([(1, 2, 3)] * 7), (), width=3)
        state, metrics = step(state, batch)
        assert float(metrics["weight"]) == 21
        assert float(metrics["loss"]) == pytest.approx(2.0, rel=1e-6)
        before = np.asarray(state.params["p"])
        state, metrics = step(state, tokens(*([()] * 8), width=3))
        assert {k: float(metrics[k]) for k in ("loss", "weight", "grad_norm")} == dict(loss=0, weight=0, grad_norm=0)
        np.testing.assert_array_equal(state.params["p"], before)

    def test_a_scalar_loss_is_the_mean_over_rows(self):
        state, tx, plan = start({"p": zeros(8)})
        batch = {"p": np.arange(128, dtype=np.float32).reshape(16, 8)}
        state, metrics = train_step(products, tx, plan, accumulate=2)(state, batch)
        np.testing.assert_allclose(state.params["p"], -batch["p"].mean(0), rtol=1e-6)
        assert float(metrics["weight"]) == 16

    def test_auxiliary_losses_are_averaged_on_their_own_and_logged_apart(self):
        def loss(params, batch, key):
            p, x = unshard(params)["p"], batch["x"]
            router = Auxiliary(jnp.sum(p) * jnp.sum(x), jnp.sum(batch["n"]), coefficient=0.5)
            return jnp.sum(x * (3 + p[0])), jnp.float32(len(x)), {"router": router}

        start_at = np.ones(8, np.float32)
        state, tx, plan = start({"p": start_at})
        x, n = np.arange(1, 9, dtype=np.float32), np.arange(8, dtype=np.float32)
        state, metrics = train_step(loss, tx, plan)(state, {"x": x, "n": n})
        assert float(metrics["loss"]) == pytest.approx(4 * x.mean())
        assert float(metrics["router"]) == pytest.approx(8 * x.sum() / n.sum())
        gradient = 0.5 * x.sum() / n.sum() + np.eye(8)[0] * x.mean()
        np.testing.assert_allclose(state.params["p"], start_at - gradient, rtol=1e-6)


class TestRefusedLosses:
    @pytest.mark.parametrize("weight", [lambda p, key: jnp.sum(p), lambda p, key: jax.random.uniform(key)])
    def test_a_weight_must_follow_from_the_batch(self, weight):
        def loss(params, batch, key):
            p = unshard(params)["p"]
            return jnp.sum(p), weight(p, key)

        state, tx, plan = start({"p": zeros(8)})
        with pytest.raises(ValueError, match="on the parameters, on buffers or on random.*count its tokens or rows"):
            train_step(loss, tx, plan)(state, {"x": zeros(8)})

    def test_other_results_and_taken_names_say_what_to_return(self):
        state, tx, plan = start({"p": zeros(8)})
        five = lambda params, batch, key: (1.0, 1.0, {}, {}, {})  # noqa: E731
        with pytest.raises(TypeError, match=r"returned 5 values. Return a mean, \(sum, weight\), "):
            train_step(five, tx, plan)(state, {"x": zeros(8)})

        def taken(params, batch, key):
            return (
                jnp.sum(unshard(params)["p"]),
                1.0,
                {"grad_norm": Auxiliary(jnp.float32(0), jnp.float32(1))},
            )

        with pytest.raises(ValueError, match=r"named \['grad_norm'\], which the step logs itself. Choose another"):
            train_step(taken, tx, plan)(state, {"x": zeros(8)})


class TestBatches:
    def test_a_batch_that_does_not_divide_names_the_nearest_sizes(self):
        """C-60, the refusal."""
        state, tx, plan = start({"p": zeros(8)})
        step = train_step(products, tx, plan)
        with pytest.raises(ValueError, match="10 rows .* 8 devices x 1 micro-batches = 8. Use 8 or 16 rows"):
            step(state, {"p": zeros(10, 8)})
        with pytest.raises(ValueError, match="batch of 8 rows .* = 16. Use 16 rows"):
            train_step(products, tx, plan, accumulate=2)(state, {"p": zeros(8, 8)})

    def test_arrays_of_a_batch_have_equal_rows(self):
        state, tx, plan = start({"p": zeros(8)})
        with pytest.raises(ValueError, match=r"leading sizes \['16', '8'\]; all need the same number of rows"):
            train_step(products, tx, plan)(state, {"p": zeros(8, 8), "q": zeros(16)})

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (dict(accumulate=0), "accumulate is 0; it counts micro-batches, so use 1 or more"),
            (dict(nonfinite="stop"), "nonfinite 'stop' is unknown. Use raise, skip or ignore"),
            (dict(clip_norm=0.0), "clip_norm is 0.0; use a positive norm, or None not to clip"),
            (dict(norm_type=0.5), "norm_type is 0.5; use 1 or more, or math.inf"),
        ],
    )
    def test_options_out_of_range_say_what_to_use(self, option, message):
        _, tx, plan = start({"p": zeros(8)})
        with pytest.raises(ValueError, match=message):
            train_step(products, tx, plan, **option)


def test_a_state_that_a_step_has_taken_is_refused_with_what_to_use():
    state, tx, plan = start({"p": zeros(8)})
    step = train_step(lambda p, batch, key: jnp.sum(unshard(p)["p"] ** 2), tx, plan)
    step(state, {"x": zeros(8)})
    with pytest.raises(RuntimeError, match="given to a step before.*Go on with the state that the step returned"):
        step(state, {"x": zeros(8)})


class TestAccumulation:
    @pytest.mark.parametrize("no_sync", [True, False])
    def test_hybrid_copies_stay_equal_over_ten_windows(self, no_sync):
        """C-15: device i has gradients i and 10+i, whose mean is 8.5; the scalar is kept whole."""
        state, tx, plan = start({"p": zeros(8), "s": np.float32(0)}, "2x4", tx=optax.sgd(0.1))
        step = train_step(products, tx, plan, accumulate=2, no_sync=no_sync)
        per_row = np.stack([np.arange(8), 10 + np.arange(8)], 1).reshape(16).astype(np.float32)
        batch = {"p": np.repeat(per_row[:, None], 8, 1), "s": per_row}
        for window in range(1, 11):
            state, metrics = step(state, batch)
            np.testing.assert_allclose(state.params["p"], -0.85 * window, rtol=1e-6)
        np.testing.assert_allclose(state.params["s"], -8.5, rtol=1e-6)
        assert float(metrics["grad_norm"]) == pytest.approx(8.5 * 3)
        for w in jax.tree.leaves(state.params):
            pieces = {}
            for copy in w.addressable_shards:
                pieces.setdefault(str(copy.index), []).append(np.asarray(copy.data))
            for first, *others in pieces.values():
                assert others and all(np.array_equal(first, other) for other in others)

    @pytest.mark.parametrize("no_sync", [True, False])
    def test_two_backward_loops_whatever_the_number_of_micro_batches(self, no_sync):
        """Rule 14: one inside the scan over micro-batches, one for the last."""
        two, eight = (stacked(accumulate=n, no_sync=no_sync) for n in (2, 8))
        assert len(two.asked) == len(eight.asked)
        layers = sorted(loop.runs for loop in eight.program.loops if loop.trips == 4)
        assert layers == [4, 4, 7 * 4, 7 * 4]  # a forward and a backward loop, in either place

    def test_the_mesh_and_micro_batches_change_nothing_but_rounding(self, float64):
        params = {"blocks": {"kernel": np.random.default_rng(0).normal(size=(5, 16, 24)) * 0.3}}
        batch = {"x": np.random.default_rng(1).normal(size=(32, 16))}
        ends = []
        for mesh, options in [
            ("1x1", {}),
            ("1x8", dict(accumulate=4)),
            ("2x4", dict(accumulate=2, no_sync=True)),
            ("2x4", dict(accumulate=4)),
            ("2x4", dict(accumulate=2, reshard_after_backward=False)),
        ]:
            state, tx, plan = start(params, mesh, tx=optax.adamw(1e-2), units=BLOCKS)
            step = train_step(block_loss, tx, plan, clip_norm=1.0, **options)
            for _ in range(3):
                state, metrics = step(state, batch)
            ends.append((state.params, metrics["loss"], metrics["grad_norm"]))
        for end in ends[1:]:
            assert_close(end, ends[0], 1e-12)  # float64 has 2e-16; three steps of AdamW on sums in another order


BLOCKS = {"blocks": UnitOptions(stacked=True)}


def block_loss(params, batch, key):
    def block(w, x, _):
        return x + jnp.tanh(x @ w["kernel"]) @ w["kernel"].T, None

    return jnp.mean(run_stack(block, params["blocks"], batch["x"], schedule=Schedule(late_reduce=False))[0] ** 2)


def stacked(**options):
    """Five layers, compiled for 1x8."""
    params, batch = {"blocks": {"kernel": shape(5, 16, 24)}}, {"x": shape(64, 16)}
    return compile_step(block_loss, params, batch, "1x8", units=BLOCKS, **options)


class TestNorms:
    def test_the_norm_joins_gradients_on_different_devices(self):
        """C-16: 3 and 4 on two devices; clipped to 0.6 and 0.8, norm 5 everywhere."""
        state, tx, plan = start({"a": zeros(8), "b": zeros(8)})
        batch = rows({"a": 3 * np.eye(8)[0], "b": 4 * np.eye(8)[7]})
        state, metrics = train_step(products, tx, plan, clip_norm=1.0)(state, batch)
        assert [float(np.asarray(copy.data)) for copy in metrics["grad_norm"].addressable_shards] == [5.0] * 8
        np.testing.assert_allclose(state.params["a"], -0.6 * np.eye(8)[0], rtol=1e-6)
        np.testing.assert_allclose(state.params["b"], -0.8 * np.eye(8)[7], rtol=1e-6)

    def test_the_infinity_norm_is_the_largest_entry(self):
        """C-18."""
        state, tx, plan = start({"a": zeros(8)})
        batch = rows({"a": np.array([-7, 0, 0, 2, 0, 0, 0, 5])})
        state, metrics = train_step(products, tx, plan, clip_norm=1.0, norm_type=math.inf)(state, batch)
        assert [float(np.asarray(copy.data)) for copy in metrics["grad_norm"].addressable_shards] == [7.0] * 8
        np.testing.assert_allclose(np.asarray(state.params["a"])[[0, 3, 7]], [1, -2 / 7, -5 / 7], rtol=1e-6)

    @pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
    def test_norms_of_cut_padded_and_whole_parameters_equal_numpy(self, norm_type):
        rng = np.random.default_rng(0)
        gradients = {
            "cut": rng.normal(size=(16, 3)),
            "padded": rng.normal(size=13),
            "whole": rng.normal(size=3),
        }
        state, tx, plan = start({name: zeros(*g.shape) for name, g in gradients.items()}, "2x4")
        state, metrics = train_step(products, tx, plan, clip_norm=0.5, norm_type=norm_type)(state, rows(gradients))
        norm = np.linalg.norm(np.concatenate([g.reshape(-1) for g in gradients.values()]), norm_type)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        clipped = {name: -g * 0.5 / norm for name, g in gradients.items()}
        assert_close(state.logical_params(), clipped, 1e-5)

    def test_a_small_gradient_is_not_scaled(self):
        state, tx, plan = start({"a": zeros(8)})
        state, _ = train_step(products, tx, plan, clip_norm=1.0)(state, rows({"a": np.full(8, 0.125)}))
        np.testing.assert_array_equal(state.params["a"], np.full(8, -0.125))


class TestBadGradients:
    """C-19: one element on device 5 is NaN in step 2 of 3."""

    GOOD = rows({"p": np.arange(8.0), "q": np.ones(13)})

    def bad(self):
        batch = {name: g.copy() for name, g in self.GOOD.items()}
        batch["p"][5, 5] = np.nan
        return batch

    @pytest.mark.parametrize("norm_type", [2, math.inf])
    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_skip_changes_nothing_and_the_next_step_is_as_if_it_had_not_been(self, mesh, norm_type):
        state, tx, plan = start({"p": zeros(8), "q": zeros(13)}, mesh, tx=optax.adamw(0.1))
        step = train_step(products, tx, plan, nonfinite="skip", clip_norm=1.0, norm_type=norm_type)
        state, _ = step(state, self.GOOD)
        before = jax.tree.map(np.array, (state.params, state.opt_state))
        state, metrics = step(state, self.bad())
        assert bitwise_equal((state.params, state.opt_state), before)
        assert (int(metrics["skipped"]), int(state.skipped), int(state.step)) == (1, 1, 2)
        assert not math.isfinite(metrics["grad_norm"])
        state, metrics = step(state, self.GOOD)
        assert int(metrics["skipped"]) == 1
        other = TrainState.create(plan.place({"p": zeros(8), "q": zeros(13)}), tx, plan)
        for _ in range(2):
            other, _ = step(other, self.GOOD)
        assert bitwise_equal((state.params, state.opt_state), (other.params, other.opt_state))

    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_raise_names_the_step_and_the_parameter(self, mesh):
        state, tx, plan = start({"p": zeros(8), "q": zeros(13)}, mesh)
        step = train_step(products, tx, plan)
        state, _ = step(state, self.GOOD)
        with pytest.raises(
            FloatingPointError, match=r"step 2: the gradient of p is not finite .*nonfinite='skip' goes on"
        ):
            step(state, self.bad())

    def test_the_schedule_ignores_skipped_steps(self):
        """C-22: gradients 1, NaN, 1 with rate 1/(1+k) of applied updates."""
        state, tx, plan = start({"p": zeros(8)}, tx=optax.sgd(lambda k: 1 / (1 + k)))
        step, seen = train_step(products, tx, plan, nonfinite="skip"), []
        for gradient in (1.0, np.nan, 1.0):
            state, metrics = step(state, rows({"p": np.full(8, gradient)}))
            seen.append(float(state.params["p"][0]))
        assert seen == [-1.0, -1.0, -1.5]
        assert (int(state.step), int(metrics["skipped"]), int(metrics["updates"])) == (3, 1, 2)


def test_the_schedule_counts_optimizer_steps():
    """C-30 in one process: warm-up over 4 steps, 4 micro-batches each."""
    state, tx, plan = start({"p": zeros(8)}, tx=optax.sgd(lambda k: jnp.minimum((k + 1) / 4, 1)))
    step, at = train_step(products, tx, plan, accumulate=4), [0.0]
    for _ in range(4):
        state, _ = step(state, rows({"p": np.ones(8)}, count=32))
        at.append(-float(state.params["p"][0]))
    assert np.diff(at).tolist() == [0.25, 0.5, 0.75, 1.0]


class TestStates:
    def test_a_donated_state_shares_no_buffer(self):
        """C-72: a new state is separate, whatever it was made from; shared leaves are refused by name."""
        start_at = {"p": jnp.ones(8), "q": jnp.ones(8)}
        start_at["q"] = start_at["p"]
        ema = optax.GradientTransformation(lambda params: params, lambda g, s, params: (g, params))
        state, tx, plan = start(start_at, tx=ema)  # its state is the parameters themselves
        check_separate_buffers(state)
        step = train_step(products, tx, plan)
        shared = replace(state, opt_state=state.params)
        with pytest.raises(ValueError, match=r"params\.p and opt_state\.p share one buffer.*Copy one of them"):
            step(shared, rows({"p": np.ones(8), "q": np.ones(8)}))
        state, _ = step(state, rows({"p": np.ones(8), "q": np.ones(8)}))
        swapped = replace(state, params=state.opt_state)
        with pytest.raises(ValueError, match="share one buffer"):
            step(swapped, rows({"p": np.ones(8), "q": np.ones(8)}))
        step(state, rows({"p": np.ones(8), "q": np.ones(8)}))
        np.testing.assert_array_equal(start_at["p"], np.ones(8))  # the caller's array survives

    def test_parameters_placed_otherwise_are_refused(self):
        plan = make_plan({"p": zeros(8)}, submesh("1x8"))
        with pytest.raises(ValueError, match=r"p: got \(8,\) placed as .*Place parameters with plan.place"):
            TrainState.create({"p": jnp.zeros(8)}, optax.sgd(1.0), plan)

    def test_a_state_of_another_plan_is_refused(self):
        state, tx, _ = start({"p": zeros(8)})
        _, _, other = start({"p": zeros(8)})
        step = train_step(products, tx, other)
        for use in (step, step.lower):
            with pytest.raises(ValueError, match="another plan than the step.*Make one plan and pass it to"):
                use(state, rows({"p": np.ones(8)}))

    @pytest.mark.parametrize("donate", [True, False])
    def test_donation_frees_the_old_state(self, donate):
        state, tx, plan = start({"p": zeros(8)})
        train_step(products, tx, plan, donate=donate)(state, rows({"p": np.ones(8)}))
        assert state.params["p"].is_deleted() == donate

    def test_an_abstract_state_is_shaped_and_placed_as_a_real_one(self):
        params = {"blocks": {"kernel": zeros(3, 16, 13)}, "q": zeros(13)}
        state, tx, plan = start(params, "2x4", tx=optax.adamw(1e-3), units=BLOCKS)
        assert described(TrainState.abstract(tx, plan)) == described(state)


def described(state):
    return [(path, a.shape, a.dtype, a.sharding) for path, a in jax.tree_util.tree_leaves_with_path(state)]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_a_run_compiles_once_and_leaves_stay_where_they_are(mesh, strategy):
    """C-76 from a fresh state: five steps, one compilation; placement, dtype and shape of every leaf stay."""
    params = {"blocks": {"kernel": zeros(3, 16, 24)}, "q": zeros(13)}
    state, tx, plan = start(params, mesh, strategy, optax.adamw(1e-3), BLOCKS)

    def loss(params, batch, key):
        return block_loss(params, batch, key) + jnp.sum(unshard({"q": params["q"]})["q"])

    step, before, compiled = train_step(loss, tx, plan, clip_norm=1.0, nonfinite="skip"), described(state), []

    def count(event, duration, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(about)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for i in range(5):
            state, _ = step(state, {"x": np.full((16, 16), i, np.float32)})
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert len(compiled) == 1
    assert described(state) == before
