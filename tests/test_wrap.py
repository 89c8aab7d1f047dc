"""The NNX door: a module becomes units and sharded parameters, and a callable view of both."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.precision import MixedPrecision
from jfsdp.stack import Stack
from jfsdp.state import TrainState
from jfsdp.step import eval_step, train_step
from jfsdp.unit import is_sharded
from jfsdp.vocab import Embed, Head
from jfsdp.wrap import init_sharded, plan_module
from tests.support import bitwise_equal, submesh

VOCAB, WIDTH = 13, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 24, rngs=rngs)
        self.down = nnx.Linear(24, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """Embedding, three blocks, a norm that belongs to the root, and a head."""

    def __init__(self, tied=False):
        rngs = nnx.Rngs(0)
        self.embed = Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = Stack(Block, 3, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = Head(VOCAB, WIDTH, rngs=rngs, table=self.embed.table if tied else None)

    def hidden(self, tokens):
        return self.norm(self.blocks(self.embed(tokens)))

    def __call__(self, tokens):
        return self.head(self.hidden(tokens))


def loss(model, batch, key):
    weights = batch["weights"]
    return model.head.loss(model.hidden(batch["tokens"]), batch["targets"], weights), jnp.sum(weights)


def token_batch():
    ids = np.random.default_rng(0).integers(0, VOCAB, size=(2, 16, 3), dtype=np.int32)
    weights = np.broadcast_to((np.arange(16) % 3)[:, None], (16, 3)).astype(np.float32)
    return {"tokens": ids[0], "targets": ids[1], "weights": weights}


class TestUnits:
    def test_stacks_and_tables_are_units_and_the_rest_is_the_root(self):
        plan = plan_module(Model, mesh=submesh("1x8"))
        by_unit = {}
        for leaf in plan.leaves:
            by_unit.setdefault(leaf.unit, []).append(leaf.path)
        assert set(by_unit) == {"", "blocks.each", "embed.table", "head.table"}
        assert by_unit[""] == ["norm.scale"] and len(by_unit["blocks.each"]) == 4
        assert {leaf.layers for leaf in plan.leaves if leaf.unit == "blocks.each"} == {3}
        tables = [leaf for leaf in plan.leaves if leaf.unit.endswith("table")]
        assert [(leaf.dim, leaf.never_whole) for leaf in tables] == [(1, True)] * 2

    def test_a_tied_table_is_one_unit_counted_once(self):
        untied, tied = (plan_module(lambda: Model(tied=tied), mesh=submesh("1x8")) for tied in (False, True))  # noqa: B023
        assert untied.num_params - tied.num_params == VOCAB * WIDTH
        assert "head.table" not in tied.units and "embed.table" in tied.units

    def test_a_bare_stack_is_a_unit(self):
        plan = plan_module(lambda: Stack(Block, 2, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))
        assert {leaf.unit for leaf in plan.leaves} == {"each"}

    def test_planning_allocates_nothing(self):
        class Huge(nnx.Module):
            def __init__(self):
                self.embed = Embed(1 << 20, 1 << 20, rngs=nnx.Rngs(0))  # 4 TiB

        assert plan_module(Huge, mesh=submesh("1x8")).num_params == 1 << 40


@pytest.mark.usefixtures("compiled_as_for_users")
class TestStart:
    @pytest.fixture(scope="class")
    @staticmethod
    def alone(compiled_as_for_users):
        return nnx.to_pure_dict(nnx.state(nnx.jit(Model)(), nnx.Param))

    @pytest.mark.parametrize("mesh", ["1x1", "1x8", "2x4", "8x1"])
    def test_start_values_are_those_of_the_unsharded_module_on_every_mesh(self, mesh, alone):
        """C-31 for the NNX door."""
        params, plan = init_sharded(Model, mesh=submesh(mesh))
        assert bitwise_equal(plan.unpad(params), alone)
        for leaf, w in zip(plan.leaves, jax.tree.leaves(params)):
            assert w.sharding.is_equivalent_to(plan.sharding(leaf.rest_spec), w.ndim)


class TestView:
    @pytest.mark.parametrize(("mesh", "strategy"), [("1x8", "FULL_SHARD"), ("2x4", "HYBRID_SHARD_ZERO2")])
    def test_evaluation_equals_the_unsharded_module(self, mesh, strategy):
        params, plan = init_sharded(Model, mesh=submesh(mesh), strategy=strategy)
        total, weight = eval_step(loss, plan)(params, token_batch())
        want = loss(Model(), token_batch(), None)
        np.testing.assert_allclose((total, weight), want, rtol=1e-5)

    def test_the_step_sees_shards_and_the_state_a_callable_module(self):
        params, plan = init_sharded(Model, mesh=submesh("1x8"), mp_policy=MixedPrecision(param_dtype="bf16"))
        seen = []

        def looking(model, batch, key):
            seen.append((is_sharded(model.embed.table.get_value()), model.norm.scale.get_value().dtype.name))
            assert all(
                is_sharded(w) for w in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model.blocks)), is_leaf=is_sharded)
            )
            return loss(model, batch, key)

        state, step = (
            TrainState.create(params, optax.sgd(0.1), plan),
            train_step(looking, optax.sgd(0.1), plan),
        )
        logits = state.module()(token_batch()["tokens"])
        np.testing.assert_allclose(logits, Model()(token_batch()["tokens"]), rtol=1e-5, atol=1e-6)
        view = state.module()
        state, _ = step(state, token_batch())
        assert set(seen) == {(True, "bfloat16")}
        assert not np.allclose(state.module()(token_batch()["tokens"]), logits)
        with pytest.raises(RuntimeError, match="deleted"):
            view.norm.scale.get_value().block_until_ready()
