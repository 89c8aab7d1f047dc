"""Any Flax module, unchanged: blocks in a Python loop, nested and shared units, frozen parts, dropout, batch norms."""

import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from jfsdp import randomness
from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions
from jfsdp.policy import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from jfsdp.precision import MixedPrecision
from jfsdp.stack import Stack
from jfsdp.state import TrainState
from jfsdp.step import eval_step, train_step
from jfsdp.tables import sharding_table
from jfsdp.wrap import fully_shard, init_sharded, plan_of, register_fsdp_forward_method
from tests import support
from tests.support import assert_close, submesh

WIDTH = 16
DTYPE = jnp.float64
pytestmark = pytest.mark.usefixtures("float64")


def linear(d_in, d_out, rngs):
    return nnx.Linear(d_in, d_out, rngs=rngs, param_dtype=DTYPE)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = linear(WIDTH, 24, rngs), linear(24, WIDTH, rngs)

    def __call__(self, x, *, scale=1.0):
        return x + self.down(jnp.tanh(self.up(x))) * scale


class Model(nnx.Module):
    """Three blocks in a Python loop, the first used twice, and a head that belongs to the root."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.out = linear(WIDTH, 13, rngs)

    def __call__(self, x):
        return self.out(self.encode(x))

    def encode(self, x):
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x, scale=0.5)
        return x


def loss(model, batch, key):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(rows=16):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, WIDTH)), "y": rng.normal(size=(rows, 13))}


def train_alone(model, batch, tx, steps, loss=loss, wrt=nnx.Param):
    """One device, whole batch, the module as it is. Gives parameters of all kinds and the optimizer's state."""
    graph, params, rest = nnx.split(model, wrt, ...)
    mean = lambda params, batch, key: (loss(nnx.merge(graph, params, rest), batch, key), 1.0)  # noqa: E731
    _, params, state = support.train_alone(mean, params, batch, tx, steps)
    return nnx.to_pure_dict(nnx.state(nnx.merge(graph, params, rest), nnx.Param)), state


def train(model, batch, tx, steps, loss=loss, **options):
    state = TrainState.create(model, tx)
    step = train_step(loss, tx, state.plan, **options)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.fixture(scope="module")
def alone():
    with jax.enable_x64(True):
        return train_alone(Model(), batch_of(), optax.adamw(1e-2), 20)


class TestInPlace:
    @pytest.mark.parametrize(
        ("mesh", "strategy"),
        [
            ("1x1", None),
            ("1x8", None),
            ("2x4", None),
            pytest.param("1x8", "SHARD_GRAD_OP", marks=pytest.mark.slow),
            pytest.param("1x8", "SHARD_OPT", marks=pytest.mark.slow),
            pytest.param("8x1", "NO_SHARD", marks=pytest.mark.slow),
            pytest.param("1x3", None, marks=pytest.mark.slow),
        ],
    )
    def test_blocks_in_a_python_loop_train_as_on_one_device(self, mesh, strategy, alone):
        """C-06: the first block runs twice."""
        model = Model()
        for block in model.blocks:
            fully_shard(block)
        assert fully_shard(model, mesh=submesh(mesh), strategy=strategy) is model
        assert isinstance(model.blocks[0], Block) and type(model.blocks[0]).__name__ == "Block"
        rows = 16 - 16 % submesh(mesh).size
        batch = jax.tree.map(lambda a: a[:rows], batch_of())
        want = alone if rows == 16 else train_alone(Model(), batch, optax.adamw(1e-2), 20)
        state, _ = train(model, batch, optax.adamw(1e-2), 20)
        assert_close(state.logical_params(), want[0], 1e-11)
        moments = jax.tree.leaves(state.opt_state[0].nu)
        if rows == 16 and mesh == "1x1":
            assert_close(moments, jax.tree.leaves(want[1][0].nu), 1e-11)

    def test_a_sharded_module_computes_outside_the_step_until_a_state_takes_its_arrays(self):
        x, plain, model = batch_of()["x"], Model(), Model()
        fully_shard(model, mesh=submesh("1x8"), auto_wrap_policy=ModuleWrapPolicy({Block}))
        kernel = model.blocks[0].up.kernel.get_value()
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 24)
        np.testing.assert_allclose(model(x), plain(x), rtol=1e-12)
        state = TrainState.create(model, optax.sgd(0.1))
        with pytest.raises(RuntimeError, match="TrainState took this module's parameters. Call state.module()"):
            model(x)
        np.testing.assert_allclose(state.module()(x), plain(x), rtol=1e-12)

    def test_nested_units_own_what_is_theirs(self):
        class Outer(nnx.Module):
            def __init__(self, rngs):
                self.inner, self.w = Block(rngs), nnx.Param(jnp.ones((WIDTH,), DTYPE))

            def __call__(self, x):
                return self.inner(x) * self.w

        class Two(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(1)
                self.outer, self.out = Outer(rngs), linear(WIDTH, 13, rngs)

            def __call__(self, x):
                return self.out(self.outer(x))

        model = Two()
        fully_shard(model.outer.inner)
        fully_shard(model.outer)
        fully_shard(model, mesh=submesh("1x8"))
        units = {leaf.path: leaf.unit for leaf in plan_of(model).leaves}
        assert units["outer.w"] == "outer" and units["outer.inner.up.kernel"] == "outer.inner"
        assert units["out.bias"] == ""
        want, _ = train_alone(Two(), batch_of(), optax.sgd(0.1), 5)
        state, _ = train(model, batch_of(), optax.sgd(0.1), 5)
        assert_close(state.logical_params(), want, 1e-12)

    def test_a_parameter_of_two_units_goes_to_the_root_and_its_gradients_add_up(self):
        """C-05 for modules that are no vocabulary: one stored copy, one set of moments."""

        class Tied(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(2)
                self.a, self.b, self.out = Block(rngs), Block(rngs), linear(WIDTH, 13, rngs)
                self.b.up.kernel = self.a.up.kernel

            def __call__(self, x):
                return self.out(self.b(self.a(x)))

        model = fully_shard(Tied(), mesh=submesh("1x8"), auto_wrap_policy=ModuleWrapPolicy({"Block"}))
        plan = plan_of(model)
        assert [leaf.path for leaf in plan.leaves if leaf.path.endswith("up.kernel")] == ["a.up.kernel"]
        want, moments = train_alone(Tied(), batch_of(), optax.adamw(1e-2), 5)
        state, _ = train(model, batch_of(), optax.adamw(1e-2), 5)
        assert_close(state.logical_params(), want, 1e-11)
        assert len(jax.tree.leaves(state.opt_state[0].mu)) == len(jax.tree.leaves(want))

    def test_what_is_no_module_or_has_no_plan_says_what_to_call(self):
        with pytest.raises(TypeError, match="takes an nnx.Module and got function.*init_sharded"):
            fully_shard(Model.__call__)
        with pytest.raises(ValueError, match="this Model has no plan. Call fully_shard"):
            TrainState.create(Model(), optax.sgd(0.1))


class TestMethods:
    """C-73."""

    def test_methods_of_the_root_and_registered_methods_of_units_gather(self):
        class Encoder(nnx.Module):
            def __init__(self, rngs):
                self.block = Block(rngs)

            def __call__(self, x):
                return self.encode(x) + 1

            def encode(self, x):
                return self.block(x)

        class Two(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(1)
                self.encoder, self.out = Encoder(rngs), linear(WIDTH, 13, rngs)

            def generate(self, x):
                return self.out(self.encoder.encode(x))

        def by_method(model, batch, key):
            return ((model.generate(batch["x"]) - batch["y"]) ** 2).mean()

        model = Two()
        fully_shard(model.encoder)
        fully_shard(model, mesh=submesh("1x8"))
        state = TrainState.create(model, optax.sgd(0.1))
        with pytest.raises(RuntimeError, match="encoder.block.*register_fsdp_forward_method"):
            train_step(by_method, optax.sgd(0.1), state.plan)(state, batch_of())

        model = Two()
        fully_shard(model.encoder)
        register_fsdp_forward_method(model.encoder, "encode")
        fully_shard(model, mesh=submesh("1x8"))
        want, _ = train_alone(Two(), batch_of(), optax.sgd(0.1), 3, loss=by_method)
        np.testing.assert_allclose(model.generate(batch_of()["x"]), Two().generate(batch_of()["x"]), rtol=1e-12)
        state, _ = train(model, batch_of(), optax.sgd(0.1), 3, loss=by_method)
        assert_close(state.logical_params(), want, 1e-12)
        after = state.module()
        assert after.encoder.encode(batch_of()["x"]).shape == (16, WIDTH)
        kernel = state.params["encoder"]["block"]["up"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 24)

    def test_registering_asks_for_a_unit_and_a_method(self):
        model = Model()
        with pytest.raises(ValueError, match="this Model is no unit yet"):
            register_fsdp_forward_method(model, "encode")
        fully_shard(model)
        with pytest.raises(ValueError, match="Model has no method 'attend'"):
            register_fsdp_forward_method(model, "attend")


class TestAfterForward:
    @pytest.fixture(scope="class")
    @staticmethod
    def want():
        with jax.enable_x64(True):
            return train_alone(Model(), batch_of(), optax.sgd(0.1), 5)[0]

    @pytest.mark.parametrize(
        ("mesh", "strategy", "kept"), [("1x8", None, 4), ("2x4", "FULL_SHARD", 4), ("1x8", None, 2)]
    )
    def test_a_number_gathers_again_inside_small_groups(self, mesh, strategy, kept, want):
        """ZeRO++ hpZ: the forward gather spans all shards, the backward one groups of neighbours."""
        model = Model()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=kept)
        fully_shard(model, mesh=submesh(mesh), strategy=strategy)
        tx = optax.sgd(0.1)
        state = TrainState.create(model, tx)
        step = train_step(loss, tx, state.plan)
        gathers = [
            c
            for c in audit.lowered_collectives(step.lower(state, batch_of()), state.plan.mesh)
            if c.kind == "all-gather"
        ]
        sizes = sorted({c.group_size for c in gathers})
        assert sizes == [kept, 8]
        for _ in range(5):
            state, _ = step(state, batch_of())
        assert_close(state.logical_params(), want, 1e-12)

    def test_units_may_differ_in_strategy_and_precision(self, want):
        """The first block keeps everything whole, the second is freed, the third is kept until backward."""
        model = Model()
        fully_shard(model.blocks[0], strategy="NO_SHARD")
        fully_shard(model.blocks[1])
        fully_shard(model.blocks[2], reshard_after_forward=False, mp_policy=MixedPrecision(reduce_dtype="float32"))
        fully_shard(model, mesh=submesh("2x4"), shard_placement_fn=lambda path, shape: len(shape) - 1)
        plan = plan_of(model)
        by_path = {leaf.path: leaf for leaf in plan.leaves}
        assert by_path["blocks.0.up.kernel"].dim is None and by_path["blocks.1.up.kernel"].dim == 0
        assert by_path["out.kernel"].dim == 1
        assert by_path["blocks.2.up.kernel"].reduce_dtype == jnp.float32
        state, _ = train(model, batch_of(), optax.sgd(0.1), 5)
        assert_close(state.logical_params(), want, 1e-6)  # one unit's gradients travel in float32

    def test_numbers_that_do_not_divide_and_strategies_that_keep_are_refused(self):
        with pytest.raises(ValueError, match=r"reshard_after_forward is 3, which does not divide 8 shards. Use one of"):
            fully_shard(Model(), mesh=submesh("1x8"), reshard_after_forward=3)
        with pytest.raises(ValueError, match="NO_SHARD, which keeps parameters whole"):
            fully_shard(Model(), mesh=submesh("1x8"), strategy="NO_SHARD", reshard_after_forward=True)


class TestPolicies:
    """C-66."""

    def test_a_class_that_is_not_there_lists_those_that_are(self):
        with pytest.raises(
            ValueError, match="no module is a DecoderLayr. The model has modules of the classes Block, Linear"
        ):
            fully_shard(Model(), mesh=submesh("1x8"), auto_wrap_policy=ModuleWrapPolicy({"DecoderLayr"}))

    def test_a_threshold_above_the_model_says_how_large_it_is(self):
        with pytest.raises(ValueError, match="whole model has 2,645 parameters"):
            fully_shard(Model(), mesh=submesh("1x8"), auto_wrap_policy=size_based_auto_wrap_policy(10**6))

    def test_size_merges_remainders_upwards_and_every_parameter_has_one_unit(self):
        units = size_based_auto_wrap_policy(400)(Model())
        assert set(units) == {f"blocks.{i}.up" for i in range(3)} | {f"blocks.{i}.down" for i in range(3)}
        assert set(size_based_auto_wrap_policy(500)(Model())) == {"blocks.0", "blocks.1", "blocks.2"}
        assert set(size_based_auto_wrap_policy(400, force_leaf_modules={Block})(Model())) == {
            "blocks.0",
            "blocks.1",
            "blocks.2",
        }
        excluded = size_based_auto_wrap_policy(400, exclude_wrap_modules={nnx.Linear})(Model())
        assert set(excluded) == {"blocks.0", "blocks.1", "blocks.2"}

    def test_one_single_unit_is_warned_of_with_its_bytes(self, caplog):
        fully_shard(Model(), mesh=submesh("1x8"))
        assert f"the whole model is one unit of {2645 * 8:,} bytes" in caplog.text

    def test_the_units_can_be_printed(self):
        model = fully_shard(Model(), mesh=submesh("1x8"), auto_wrap_policy=ModuleWrapPolicy({Block}))
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(sharding_table(plan_of(model)))
        words = console.export_text()
        assert all(name in words for name in ("blocks.0", "blocks.2", "root", "out.kernel", "2,645 parameters"))

    def test_a_function_gives_options_per_unit(self):
        def choose(path, module):
            if isinstance(module, Block):
                return dict(precision=MixedPrecision(param_dtype="bf16"))
            return dict(strategy="NO_SHARD") if path == "out" else False

        model = fully_shard(Model(), mesh=submesh("1x8"), auto_wrap_policy=CustomPolicy(choose))
        by_path = {leaf.path: leaf for leaf in plan_of(model).leaves}
        assert by_path["blocks.1.up.kernel"].param_dtype == jnp.bfloat16
        assert by_path["out.kernel"].dim is None and by_path["out.kernel"].param_dtype == DTYPE
        with pytest.raises(ValueError, match="the policy chose none of the modules: blocks.0.down"):
            fully_shard(Model(), mesh=submesh("1x8"), auto_wrap_policy=CustomPolicy(lambda path, module: False))


class TestFrozen:
    """C-34."""

    def test_a_frozen_kernel_is_gathered_never_reduced_and_never_changed(self):
        class Adapted(nnx.Module):
            def __init__(self, rngs):
                self.kernel = nnx.Param(0.1 * jax.random.normal(rngs.params(), (64, 64), DTYPE))
                self.a = nnx.LoRAParam(0.1 * jax.random.normal(rngs.params(), (64, 4), DTYPE))
                self.b = nnx.LoRAParam(0.1 * jax.random.normal(rngs.params(), (4, 64), DTYPE))

            def __call__(self, x):
                return x @ self.kernel[...] + (x @ self.a[...]) @ self.b[...]

        class One(nnx.Module):
            def __init__(self):
                self.layer = Adapted(nnx.Rngs(0))

            def __call__(self, x):
                return self.layer(x)

        def loss(model, batch, key):
            return ((model(batch) - 1) ** 2).mean()

        batch = np.random.default_rng(0).normal(size=(16, 64))
        tx = optax.adamw(1e-2, weight_decay=0.1)
        model = One()
        fully_shard(model.layer)
        fully_shard(model, mesh=submesh("1x8"), trainable=nnx.LoRAParam)
        before = np.asarray(model.layer.kernel.get_value())
        state = TrainState.create(model, tx)
        assert sum(a.size for a in jax.tree.leaves(state.opt_state[0].mu)) == 512
        step = train_step(loss, tx, state.plan)
        moved = audit.lowered_collectives(step.lower(state, batch), state.plan.mesh)
        reduced = [a for c in moved if c.kind == "reduce-scatter" for a in c.operands]
        assert sum(math.prod(a.shape) for a in reduced) == 512
        for _ in range(5):
            state, metrics = step(state, batch)
        want, _ = train_alone(One(), batch, tx, 5, loss=loss, wrt=nnx.LoRAParam)
        assert_close(state.logical_params(), want, 1e-11)
        assert np.array_equal(state.params["layer"]["kernel"], before)

    def test_nothing_to_train_is_refused(self):
        with pytest.raises(ValueError, match="every parameter is frozen"):
            TrainState.create(fully_shard(Model(), mesh=submesh("1x8"), trainable=nnx.LoRAParam), optax.sgd(0.1))


class Noisy(nnx.Module):
    """Dropout in a stack, in a unit, and at the root."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed, dropout=7)
        self.blocks = Stack(DropBlock, 2, rngs=rngs)
        self.unit = DropBlock(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = linear(WIDTH, 13, rngs)

    def __call__(self, x):
        return self.out(self.drop(self.unit(self.blocks(x))))


class DropBlock(nnx.Module):
    def __init__(self, rngs):
        self.w, self.drop = linear(WIDTH, WIDTH, rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.w(x))


class TestRandomness:
    """C-14."""

    @staticmethod
    def losses(mesh, **options):
        """Of three steps, and the state after them."""

        def build():
            model = Noisy()
            fully_shard(model.unit)
            return model

        params, plan = init_sharded(build, mesh=submesh(mesh))
        tx = optax.sgd(0.1)
        state, step, out = TrainState.create(params, tx, plan), train_step(loss, tx, plan, **options), []
        for _ in range(3):
            state, metrics = step(state, batch_of())
            out.append(float(metrics["loss"]))
        return out, state

    @pytest.fixture(scope="class")
    @staticmethod
    def on_eight():
        with jax.enable_x64(True):
            return TestRandomness.losses("1x8")

    def test_dropout_follows_the_example_on_every_mesh_and_with_any_micro_batches(self, on_eight):
        one, _ = self.losses("1x1")
        assert one[0] != one[1]
        for got, _ in (on_eight, self.losses("2x4", accumulate=2)):
            np.testing.assert_allclose(got, one, rtol=1e-12)

    def test_evaluation_drops_nothing(self, on_eight):
        _, state = on_eight
        evaluate = eval_step(loss, state.plan)
        first, second = (float(evaluate(state.params, batch_of(), state.buffers)[0]) for _ in range(2))
        module = state.module()
        module.eval()
        assert first == second
        np.testing.assert_allclose(first / 16, loss(module, batch_of(), None), rtol=1e-12)

    def test_masks_differ_between_rows_and_steps_and_not_between_meshes(self):
        class Mask(nnx.Module):
            def __init__(self):
                self.w, self.drop = nnx.Param(jnp.ones((), DTYPE)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
                self.seen = nnx.Variable(jnp.zeros((8, 1000), DTYPE))

        def loss(model, batch, key):
            mask = model.drop(jnp.ones((batch.shape[0], 1000), DTYPE))
            at = randomness.current().first
            # A buffer that differs between devices is averaged: each writes its rows, times the number of devices.
            n = 8 // batch.shape[0]
            rows = jax.lax.dynamic_update_slice(jnp.zeros((8, 1000), DTYPE), mask * n, (at, jnp.zeros_like(at)))
            model.seen.set_value(rows)
            return (mask * model.w[...]).mean()

        def masks(mesh):
            model = fully_shard(Mask(), mesh=submesh(mesh))
            state = TrainState.create(model, optax.sgd(0.0))
            step = train_step(loss, optax.sgd(0.0), state.plan)
            seen = []
            for _ in range(2):
                state, _ = step(state, np.zeros((8, 1)))
                seen.append(np.asarray(state.buffers["seen"]))
            return seen

        first, second = masks("1x1")
        assert not np.array_equal(first, second) and set(np.unique(first)) == {0.0, 2.0}
        agreement = [(first[i] == first[j]).mean() for i in range(8) for j in range(i)]
        assert 0.4 < min(agreement) and max(agreement) < 0.6
        for mesh in ("1x8", "2x4"):
            for got, want in zip(masks(mesh), (first, second)):
                np.testing.assert_array_equal(got, want)


class TestState:
    def test_batch_norms_use_the_whole_batch(self):
        class Normed(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(0)
                self.inner = Block(rngs)
                self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, param_dtype=DTYPE, dtype=DTYPE)
                self.out = linear(WIDTH, 13, rngs)

            def __call__(self, x):
                return self.out(self.inner(self.norm(x)))

        tx, model = optax.sgd(0.1), Normed()
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        for _ in range(4):

            def objective(params, rest):
                module = nnx.merge(graph, params, jax.tree.map(lambda a: a, rest))
                return loss(module, batch_of(), None), nnx.state(module, nnx.Not(nnx.Param))

            grads, rest = jax.jit(jax.grad(objective, has_aux=True))(params, rest)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        model = Normed()
        fully_shard(model.inner)
        state, _ = train(fully_shard(model, mesh=submesh("2x4")), batch_of(), tx, 4)
        assert_close(state.logical_params(), nnx.to_pure_dict(params), 1e-11)
        assert_close(state.buffers, nnx.to_pure_dict(rest), 1e-11)

    @pytest.mark.parametrize("place", ["unit", "stack"])
    def test_what_no_parameter_is_may_be_read_inside_a_unit(self, place):
        """A constant, a buffer, and a mean over the whole batch that is differentiated."""
        scale = np.linspace(0.5, 1.5, WIDTH)

        class Reads(nnx.Module):
            def __init__(self, rngs):
                self.w, self.shift = linear(WIDTH, WIDTH, rngs), nnx.Variable(jnp.ones((WIDTH,), DTYPE))

            def __call__(self, x, *given):
                return x + jnp.tanh(self.w(x)) * scale + self.shift[...] * sum(given)

        class Whole(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(0)
                self.first = linear(WIDTH, WIDTH, rngs)
                self.reads = Reads(rngs) if place == "unit" else Stack(Reads, 2, rngs=rngs)
                self.out = linear(WIDTH, 13, rngs)

            def __call__(self, x):
                x = self.first(x)
                means = x.mean(0)
                if randomness.current() is not None:
                    means = jax.lax.pmean(means, ("replica", "shard"))  # of all rows, as on one device
                return self.out(self.reads(x, means))

        want, _ = train_alone(Whole(), batch_of(), optax.sgd(0.1), 4)
        model = Whole()
        fully_shard(model.reads)
        state, _ = train(fully_shard(model, mesh=submesh("2x4")), batch_of(), optax.sgd(0.1), 4)
        assert_close(state.logical_params(), want, 1e-11)

    @pytest.mark.parametrize("bare", [False, True])
    def test_batch_norms_inside_units(self, bare):
        class Normed(nnx.Module):
            def __init__(self, rngs):
                self.w = linear(WIDTH, WIDTH, rngs)
                self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, param_dtype=DTYPE, dtype=DTYPE)

            def __call__(self, x):
                return self.norm(self.w(x))

        class Whole(nnx.Module):
            def __init__(self):
                rngs = nnx.Rngs(0)
                self.normed, self.out = Normed(rngs), linear(WIDTH, 13, rngs)

            def __call__(self, x):
                return self.out(self.normed(x))

        tx = optax.sgd(0.1)
        models = [Whole(), Whole()]
        fully_shard(models[0].normed.norm if bare else models[0].normed)
        (state, _), (one, _) = (
            train(fully_shard(m, mesh=submesh(at)), batch_of(), tx, 4) for m, at in zip(models, ("2x4", "1x1"))
        )
        assert_close(state.logical_params()["out"], one.logical_params()["out"], 1e-11)
        assert_close(state.buffers, one.buffers, 1e-11)
        assert not np.allclose(state.buffers["normed"]["norm"]["mean"], 0)

    def test_integer_and_boolean_state_is_kept_and_counted(self):
        class Counting(nnx.Module):
            def __init__(self):
                self.block = Block(nnx.Rngs(0))
                self.positions = nnx.Variable(jnp.arange(300))
                self.mask, self.calls = nnx.Variable(jnp.array([True, False])), nnx.Variable(jnp.uint32(0))

            def __call__(self, x):
                self.calls.set_value(self.calls.get_value() + 1)
                return self.block(x)

        def loss(model, batch, key):
            return (model(batch["x"]) ** 2).mean()

        model = Counting()
        fully_shard(model.block)
        state, _ = train(
            fully_shard(model, mesh=submesh("1x8")), batch_of(), optax.sgd(0.1), 3, loss=loss, accumulate=2
        )
        assert np.array_equal(state.buffers["positions"], np.arange(300))
        assert state.buffers["mask"].tolist() == [True, False] and int(state.buffers["calls"]) == 6

    def test_integer_state_that_follows_the_rows_is_refused(self):
        class Bad(nnx.Module):
            def __init__(self):
                self.block, self.top = Block(nnx.Rngs(0)), nnx.Variable(jnp.int32(0))

        def loss(model, batch, key):
            model.top.set_value(jnp.argmax(batch["x"][0]).astype(jnp.int32))
            return (model.block(batch["x"]) ** 2).mean()

        state = TrainState.create(fully_shard(Bad(), mesh=submesh("1x8")), optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"buffer top \(int32\) differs between devices"):
            train_step(loss, optax.sgd(0.1), state.plan)(state, batch_of())


class TestSmallCases:
    @pytest.mark.parametrize("mesh", ["1x1", "1x2", "1x8", "2x4"])
    @pytest.mark.parametrize("shape", [(1,), ()], ids=str)
    def test_tiny_and_scalar_parameters_of_an_inner_unit(self, mesh, shape):
        """C-03, C-04."""

        class Scale(nnx.Module):
            def __init__(self):
                self.s = nnx.Param(jnp.full(shape, 2.0, DTYPE))

            def __call__(self, x):
                return x * self.s[...]

        class Outer(nnx.Module):
            def __init__(self):
                self.inner = Scale()

        model = Outer()
        fully_shard(model.inner)
        fully_shard(model, mesh=submesh(mesh))
        x = np.arange(1.0, 9)[:, None]
        state, metrics = train(model, x, optax.sgd(0.1), 1, loss=lambda m, b, k: m.inner(b).mean())
        np.testing.assert_allclose(state.params["inner"]["s"], np.full(shape, 1.55), rtol=1e-12)
        np.testing.assert_allclose(metrics["grad_norm"], 4.5, rtol=1e-12)

    def test_a_unit_that_no_example_or_only_some_use(self):
        """C-07."""

        class Branch(nnx.Module):
            def __init__(self):
                self.used, self.idle = Weight(1.0), Weight(3.0)

        class Weight(nnx.Module):
            def __init__(self, value):
                self.w = nnx.Param(jnp.full((), value, DTYPE))

            def __call__(self, x):
                return x * self.w[...]

        def loss(model, x, key):
            return jnp.where(x % 2 == 0, model.used(x), 0.0).mean()

        model = Branch()
        fully_shard(model.used)
        fully_shard(model.idle)
        fully_shard(model, mesh=submesh("1x8"))
        tx = optax.adamw(1e-2, weight_decay=0.0)
        state = TrainState.create(model, tx)
        state, metrics = train_step(loss, tx, state.plan)(state, np.arange(1.0, 9)[:, None])
        np.testing.assert_allclose(metrics["grad_norm"], 2.5, rtol=1e-12)
        assert float(state.params["idle"]["w"]) == 3.0

    def test_units_inside_a_stack_are_refused(self):
        model = Noisy()
        fully_shard(model.blocks.each)
        with pytest.raises(ValueError, match="blocks.each is inside a Stack"):
            fully_shard(model, mesh=submesh("1x8"))

    def test_a_stack_takes_options(self):
        model = Noisy()
        fully_shard(model.blocks, reshard_after_forward=False)
        plan = plan_of(fully_shard(model, mesh=submesh("1x8")))
        assert plan.units["blocks.each"] == UnitOptions(stacked=True, reshard_after_forward=False)


class TestAccumulation:
    class Looped(nnx.Module):
        """A stack inside a unit, or the same in the caller's own loop."""

        def __init__(self, trips):
            self.inner, self.trips = Stack(Block, 2, rngs=nnx.Rngs(0)), trips

        def __call__(self, x):
            if self.trips == 1:
                return self.inner(x)
            graph, state = nnx.split(self.inner)
            return jax.lax.scan(lambda x, _: (nnx.merge(graph, state)(x), None), x, length=self.trips)[0]

    class Outer(nnx.Module):
        def __init__(self, trips):
            self.looped, self.out = TestAccumulation.Looped(trips), linear(WIDTH, 13, nnx.Rngs(1))

        def __call__(self, x):
            return self.out(self.looped(x))

    @pytest.mark.parametrize("trips", [1, 2])
    def test_a_stack_inside_a_unit_or_a_loop_equals_one_device(self, trips):
        want, _ = train_alone(self.Outer(trips), batch_of(), optax.sgd(0.1), 3)
        model = self.Outer(trips)
        fully_shard(model.looped)
        state, _ = train(fully_shard(model, mesh=submesh("1x8")), batch_of(), optax.sgd(0.1), 3)
        assert_close(state.logical_params(), want, 1e-12)

    @pytest.mark.parametrize("no_sync", [False, True])
    def test_a_unit_inside_a_loop_with_micro_batches(self, no_sync):
        class Looped(nnx.Module):
            def __init__(self):
                self.block, self.out = Block(nnx.Rngs(0)), linear(WIDTH, 13, nnx.Rngs(1))

            def __call__(self, x):
                return self.out(jax.lax.scan(lambda x, _: (self.block(x), None), x, length=2)[0])

        want, _ = train_alone(Looped(), batch_of(), optax.sgd(0.1), 3)
        model = Looped()
        fully_shard(model.block)
        options = dict(accumulate=2, no_sync=no_sync)
        state, _ = train(fully_shard(model, mesh=submesh("2x4")), batch_of(), optax.sgd(0.1), 3, **options)
        assert_close(state.logical_params(), want, 1e-12)

    def test_with_micro_batches_the_unit_adds_up_and_the_loop_is_refused(self):
        want, _ = train_alone(self.Outer(1), batch_of(), optax.sgd(0.1), 3)
        models = [fully_shard(self.Outer(trips), mesh=submesh("1x8")) for trips in (1, 2)]
        state, _ = train(models[0], batch_of(), optax.sgd(0.1), 3, accumulate=2)
        assert_close(state.logical_params(), want, 1e-12)
        with pytest.raises(NotImplementedError, match="inside a loop or jax.checkpoint.*accumulate=1"):
            train(models[1], batch_of(), optax.sgd(0.1), 1, accumulate=2)
