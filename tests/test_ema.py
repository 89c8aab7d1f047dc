"""The moving average of the weights: its values, where it lies, and that it shares nothing with the weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.layout import make_plan
from jfsdp.plan import memory
from jfsdp.precision import LossScale, MixedPrecision
from jfsdp.state import TrainState, check_separate_buffers
from jfsdp.step import eval_step, train_step
from jfsdp.unit import unshard
from tests.support import HYBRID, PLAIN, bitwise_equal, submesh

MESHES = [*(("1x8", s) for s in PLAIN), *(("2x4", s) for s in HYBRID)]


def products(params, batch, key):
    """Mean over rows of `sum(p * g)`: SGD with a learning rate of 1 subtracts the mean of g."""
    whole = unshard(params)
    return sum(jnp.sum(whole[name] * batch["g"].mean(0)) for name in whole)


def start(mesh="1x8", strategy=None, decay=0.9, precision=MixedPrecision(), loss_scale=None, frozen=(), **options):
    """Uneven weights of 5 elements, all 1, a matrix, and a state with an average."""
    params = {"w": np.ones(5, np.float32), "m": np.ones((16, 5), np.float32)}
    plan, tx = (
        make_plan(
            params, submesh(mesh), strategy=strategy, precision=precision, trainable=lambda path: path not in frozen
        ),
        optax.sgd(1.0),
    )
    state = TrainState.create(plan.place(params), tx, plan, ema=True, loss_scale=loss_scale)
    return state, train_step(products, tx, plan, ema=decay, **options), plan


UP = {"g": np.full((8, 1), -1, np.float32)}  # every weight goes up by 1


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
def test_weights_that_go_1_2_3_average_to_1_1_and_1_29(mesh, strategy):
    """C-29: decay 0.9; placed and padded like the weights, float32, of their shapes when exported."""
    state, step, plan = start(mesh, strategy)
    for weight, average in ((2, 1.1), (3, 1.29)):
        state, _ = step(state, UP)
        np.testing.assert_array_equal(state.params["w"][:5], np.full(5, weight))
        exported = plan.unpad(state.averaged_params())
        assert exported["w"].shape == (5,) and exported["m"].shape == (16, 5)
        for leaf in jax.tree.leaves(exported):
            np.testing.assert_allclose(leaf, average, rtol=1e-6)
    for a, w in zip(jax.tree.leaves(state.ema), jax.tree.leaves(state.params), strict=True):
        assert (a.shape, a.sharding, a.dtype) == (w.shape, w.sharding, jnp.float32)
    assert not np.asarray(state.ema["w"])[5:].any()  # padding


def test_a_decay_may_follow_the_updates():
    state, step, _ = start(decay=lambda k: jnp.minimum(0.9, k / 2))
    seen = []
    for _ in range(3):
        state, _ = step(state, UP)
        seen.append(float(state.ema["w"][0]))
    np.testing.assert_allclose(seen, [2, 0.5 * 2 + 0.5 * 3, 0.9 * 2.5 + 0.1 * 4], rtol=1e-6)


@pytest.mark.parametrize("loss_scale", [None, LossScale(init_scale=1024)])
def test_a_skipped_step_leaves_the_average_bitwise(loss_scale):
    """C-19, C-20: weights moved before, so an average that went on would move."""
    precision = MixedPrecision(param_dtype="fp16" if loss_scale else None)
    state, step, _ = start(nonfinite="skip", precision=precision, loss_scale=loss_scale)
    state, _ = step(state, UP)
    before = jax.tree.map(np.array, state.ema)
    state, metrics = step(state, {"g": np.full((8, 1), np.nan, np.float32)})
    assert int(metrics["skipped"]) == 1 and bitwise_equal(state.ema, before)


def test_a_frozen_parameter_is_its_own_average():
    state, step, _ = start(frozen=("m",))
    state, _ = step(state, UP)
    assert state.ema["m"] is None and float(state.ema["w"][0]) == pytest.approx(1.1)
    np.testing.assert_array_equal(state.averaged_params()["m"], state.params["m"])


def test_the_average_can_be_looked_at_and_evaluated():
    state, step, plan = start()
    state, _ = step(state, UP)
    params = state.module(averaged=True)
    np.testing.assert_allclose(params["w"], np.full(5, 1.1), rtol=1e-6)
    total, _ = eval_step(lambda p, b, k: (jnp.sum(unshard(p)["w"]), jnp.float32(1)), plan)(state.averaged_params(), UP)
    assert float(total) == pytest.approx(8 * 5 * 1.1)


class TestBuffers:
    @pytest.mark.parametrize("when", ["start", "after a step"])
    def test_the_average_has_buffers_of_its_own_also_after_a_swap(self, when):
        """C-72: initialised from the weights, swapped with them, one donated step each."""
        state, step, _ = start()
        if when == "after a step":
            state, _ = step(state, UP)
        check_separate_buffers(state)
        swapped = replace(state, params=state.averaged_params())
        check_separate_buffers(swapped)
        swapped, _ = step(swapped, UP)
        assert not any(a.is_deleted() for a in jax.tree.leaves(swapped))

    def test_an_average_put_in_place_of_the_weights_is_refused(self):
        """C-72: the leaf names are in the message, before the step frees anything."""
        state, step, _ = start()
        with pytest.raises(ValueError, match=r"params\.m and ema\.m share one buffer.*Copy one of them"):
            step(replace(state, params=state.ema), UP)
        step(state, UP)

    def test_an_abstract_state_is_shaped_and_placed_as_a_real_one(self):
        state, step, plan = start("2x4", frozen=("m",))
        describe = lambda s: [(p, a.shape, a.dtype, a.sharding) for p, a in jax.tree_util.tree_leaves_with_path(s)]  # noqa: E731
        assert describe(TrainState.abstract(optax.sgd(1.0), plan, ema=True)) == describe(state)
        before = describe(state)
        state, _ = step(state, UP)
        assert describe(state) == before


class TestRefusals:
    def test_state_and_step_must_agree(self):
        state, step, plan = start()
        with pytest.raises(ValueError, match="keeps an average of its weights and the step has no ema. Give both"):
            train_step(products, optax.sgd(1.0), plan)(state, UP)
        bare = replace(state, ema=None)
        with pytest.raises(ValueError, match=r"keeps no average .* step has ema. Give both.*ema=True"):
            step(bare, UP)
        with pytest.raises(ValueError, match=r"keeps no average of its weights. Use TrainState.create\(..., ema=True"):
            bare.averaged_params()

    @pytest.mark.parametrize("decay", [-0.1, 1, 1.5])
    def test_decays_out_of_range(self, decay):
        with pytest.raises(ValueError, match="it is what the average keeps, so use a number from 0 to below 1"):
            start(decay=decay)


def test_the_memory_formula_counts_it():
    plan = start()[2]
    for has in (False, True):
        state = TrainState.abstract(optax.sgd(1.0), plan, ema=has)
        kept = {k.name: k.bytes for k in memory(plan, state, [])}
        assert kept.get("average", 0) == has * kept["parameters"]
