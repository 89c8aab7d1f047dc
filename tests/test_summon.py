"""Whole parameters and gradients by name, from any layout, and parameters written back."""

import jax
import numpy as np
import optax
import pytest

from jfsdp import summon
from jfsdp.layout import make_plan
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.summon import FullTensors, summon_full_gradients, summon_full_params, write_full_params
from tests.support import HYBRID, PLAIN, UNITS, bitwise_equal, submesh, toy_batch, toy_loss, toy_params, train_alone

MESHES = [*(("1x8", s) for s in PLAIN), *(("2x4", s) for s in HYBRID)]
FEW = [("1x8", "SHARD_OPT"), ("2x4", "HYBRID_SHARD"), pytest.param("1x8", "FULL_SHARD", marks=pytest.mark.slow)]
PARAMS = toy_params(dtype=np.float32)
BATCH = toy_batch(dtype=np.float32)
LAYERS = [f"blocks.{i}.{name}" for name in ("down", "gate", "scale", "up") for i in range(3)]
NAMES = [*LAYERS, "head.bias", "head.kernel", "shift", "temperature"]


def logical(params, name):
    """The tensor of that name, looked up by hand."""
    unit, _, rest = name.partition(".")
    if unit != "blocks":
        return np.asarray(params[unit][rest] if rest else params[unit])
    layer, name = rest.split(".")
    return np.asarray(params["blocks"][name][int(layer)])


def start(mesh="1x8", strategy=None, trainable=lambda path: True, **options):
    plan, tx = make_plan(PARAMS, submesh(mesh), strategy=strategy, units=UNITS, trainable=trainable), optax.sgd(0.1)
    return TrainState.create(plan.place(PARAMS), tx, plan), train_step(toy_loss(), tx, plan, **options)


class TestParameters:
    @pytest.mark.parametrize(("mesh", "strategy"), MESHES)
    def test_every_tensor_comes_whole_under_its_name(self, mesh, strategy):
        """Uneven, scalar, stacked, whole and cut ones; bitwise."""
        full = summon_full_params(start(mesh, strategy)[0])
        assert list(full) == NAMES and len(full) == len(NAMES)
        for name in NAMES:
            assert isinstance(full[name], np.ndarray) and full[name].dtype == np.float32
            np.testing.assert_array_equal(full[name], logical(PARAMS, name))
            assert full[name].shape == logical(PARAMS, name).shape

    def test_names_and_patterns_choose(self):
        state, _ = start()
        assert list(summon_full_params(state, "blocks.*.gate")) == [f"blocks.{i}.gate" for i in range(3)]
        assert list(summon_full_params(state, ["head.bias", "blocks.1.up"])) == ["blocks.1.up", "head.bias"]
        with pytest.raises(ValueError, match=r"is called 'blocks.\*.kernel'. There are blocks.0.down, .* more"):
            summon_full_params(state, ["head.bias", "blocks.*.kernel"])

    def test_one_tensor_is_fetched_when_it_is_read_and_not_before(self, monkeypatch):
        """Host memory is bounded by what the caller keeps, and a layer never brings its stack along."""
        fetched = []

        def pick(sharding):
            run = picks(sharding)
            return lambda *args: (out := run(*args), fetched.append(out.shape))[0]

        picks = summon._pick
        monkeypatch.setattr(summon, "_pick", pick)
        full = summon_full_params(start()[0])
        assert fetched == []
        full["blocks.2.up"]
        assert fetched == [(16, 24)]
        assert [np.prod(full[name].shape) for name in LAYERS] == [np.prod(shape) for shape in fetched[1:]]

    def test_the_average_too(self):
        plan, tx = make_plan(PARAMS, submesh("1x8"), units=UNITS), optax.sgd(0.1)
        state = TrainState.create(plan.place(PARAMS), tx, plan, ema=True)
        state, _ = train_step(toy_loss(), tx, plan, ema=0.5)(state, BATCH)
        moved, average = (summon_full_params(state, "head.kernel", averaged=a)["head.kernel"] for a in (False, True))
        np.testing.assert_allclose(average, (moved + logical(PARAMS, "head.kernel")) / 2, rtol=1e-5, atol=1e-7)


class TestGradients:
    @pytest.mark.parametrize(("mesh", "strategy"), FEW)
    def test_they_are_those_of_one_device(self, mesh, strategy):
        state, step = start(mesh, strategy, accumulate=2, clip_norm=1e-3)
        before = jax.tree.map(np.array, state.params)
        got = summon_full_gradients(step, state, BATCH)
        _, moved, _ = train_alone(toy_loss(), PARAMS, BATCH, optax.sgd(1.0), 1)
        for name in NAMES:
            want = logical(PARAMS, name) - logical(moved, name)
            # Subtracted weights near 1 keep 6e-8 of them.
            np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-6)
        assert bitwise_equal(state.params, before)

    def test_a_frozen_parameter_has_none(self):
        state, step = start(trainable=lambda path: not path.startswith("head"))
        full = summon_full_gradients(step, state, BATCH, "*")
        assert list(full) == [*LAYERS, "shift", "temperature"]
        with pytest.raises(ValueError, match="no parameter is called 'head.bias'"):
            summon_full_gradients(step, state, BATCH, "head.bias")


class TestWriteBack:
    @pytest.mark.parametrize(("mesh", "strategy"), FEW)
    def test_a_new_state_holds_what_was_written_and_trains(self, mesh, strategy):
        state, step = start(mesh, strategy)
        names = ["blocks.1.up", "blocks.2.up", "head.bias", "temperature", "shift"]
        written = {name: 2 * array for name, array in summon_full_params(state, names).items()}
        new = write_full_params(state, written)
        for name, array in summon_full_params(new).items():
            np.testing.assert_array_equal(array, written.get(name, logical(PARAMS, name)))
        for name in names:  # the old state still holds its own
            np.testing.assert_array_equal(summon_full_params(state)[name], logical(PARAMS, name))
        for old, now in zip(jax.tree.leaves(state.params), jax.tree.leaves(new.params), strict=True):
            assert (old.shape, old.dtype, old.sharding) == (now.shape, now.dtype, now.sharding)
        plan = new.plan
        fresh = TrainState.create(plan.place(plan.unpad(new.params)), optax.sgd(0.1), plan)
        assert bitwise_equal(step(new, BATCH)[0].params, step(fresh, BATCH)[0].params)  # padding is zero again too

    def test_unknown_names_and_other_shapes_are_refused(self):
        state, _ = start()
        with pytest.raises(ValueError, match="no parameter is called 'head.weight'. There are blocks.0.down"):
            write_full_params(state, {"head.weight": np.zeros(3)})
        with pytest.raises(ValueError, match=r"head.bias: got shape \(16,\), the parameter has \(13,\)"):
            write_full_params(state, {"head.bias": np.zeros(16)})


def test_an_unread_mapping_holds_no_copies():
    state, _ = start()
    assert not [a for a in vars(FullTensors(state.params, state.plan, "*")).values() if isinstance(a, np.ndarray)]
