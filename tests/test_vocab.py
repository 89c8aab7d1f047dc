"""Both ends of a language model: exchanged rows and streamed slices equal the plain table, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.layout import UnitOptions, make_plan
from jfsdp.precision import MixedPrecision
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import enter
from jfsdp.vocab import SLICE_ROWS, Embed, Head, cross_entropy, embed, exchanges
from jfsdp.vocab import _Streamed as Streamed
from jfsdp.wrap import init_sharded
from tests.support import assert_close, compile_step, shape, submesh, train_alone, train_sharded

VOCAB, WIDTH = 37, 12
"""Neither divides by 8 or 4 shards and slices of 10 rows: 12 columns are padded, 7 rows stay over."""
TABLE = UnitOptions(cut_dim=-1, never_whole=True)
TIED, UNTIED = {"embed": TABLE}, {"embed": TABLE, "head": TABLE}


def tables(tied, dtype=np.float64):
    rng = np.random.default_rng(0)
    names = ("embed",) if tied else ("embed", "head")
    return {name: jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), dtype) for name in names}


def token_batch(dtype=np.float64, each=2, length=4):
    """Sequences whose tokens repeat, targets of every slice, and row weights 0, 1, 2."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, size=(2, 8 * each, length), dtype=np.int32)
    ids[1, 0, :2] = 0, VOCAB - 1
    weights = np.broadcast_to((np.arange(8 * each) % 3)[:, None], ids.shape[1:]).astype(dtype)
    return {"tokens": ids[0], "targets": ids[1], "weights": weights}


def language_loss(stream):
    """Embed, a fixed map, cross-entropy; `stream` takes slices of 10 rows, otherwise the head is one unit."""

    def loss(params, batch, key):
        x = jnp.tanh(embed(params["embed"], batch["tokens"])).reshape(-1, WIDTH)
        options = dict(stream_above=0, slice_rows=10) if stream else {}
        nll = cross_entropy(params.get("head", params["embed"]), x, batch["targets"].reshape(-1), **options)
        weights = batch["weights"].reshape(-1)
        return jnp.sum(nll * weights), jnp.sum(weights)

    return loss


class TestEquality:
    """C-05 among them: a tied table has one gradient, the sum of both uses."""

    @pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_three_adamw_steps_equal_one_device_in_float64(self, mesh, tied, stream, float64):
        params, batch, tx = tables(tied), token_batch(), optax.adamw(1e-2)
        want = train_alone(language_loss(False), params, batch, tx, 3)
        units = TIED if tied else UNTIED
        metrics, state, _ = train_sharded(language_loss(stream), params, batch, tx, 3, mesh, units=units)
        # 1e-11 of the largest value is the judge for float64; sums run in another order.
        assert_close(metrics["loss"], want[0], 1e-11)
        assert_close(state.logical_params(), want[1], 1e-11)

    @pytest.mark.parametrize(
        "strategy",
        ["SHARD_OPT", *(pytest.param(s, marks=pytest.mark.slow) for s in ("SHARD_GRAD_OP", "NO_SHARD"))],
    )
    def test_other_strategies_and_accumulation_agree(self, strategy, float64):
        params, batch, tx = tables(tied=True), token_batch(), optax.sgd(0.1)
        want = train_alone(language_loss(False), params, batch, tx, 2)
        options = dict(units=TIED, accumulate=2, no_sync=strategy != "SHARD_OPT")
        metrics, state, _ = train_sharded(language_loss(True), params, batch, tx, 2, "1x8", strategy, **options)
        assert_close((metrics["loss"], state.logical_params()), (want[0], want[1]), 1e-11)

    def test_chunks_of_tokens_without_a_mesh_equal_all_at_once(self, float64):
        table, batch = tables(tied=True)["embed"], token_batch()
        h, targets = jnp.tanh(table[batch["tokens"].reshape(-1)]), batch["targets"].reshape(-1)

        def mean(table, h, above):
            return cross_entropy(table, h, targets, stream_above=above).mean()

        got, want = (jax.value_and_grad(mean, (0, 1))(table, h, above) for above in (4 * VOCAB * 16, 1 << 20))
        assert_close(got, want, 1e-13)

    def test_bf16_compute_is_as_near_as_bf16_on_one_device(self):
        """fp32 tables, exchanged and streamed in bf16: rows and logits have 8 bits, gradients 24."""
        params, batch, tx = tables(True, np.float32), token_batch(np.float32), optax.sgd(1.0)
        want = train_alone(language_loss(False), params, batch, tx, 1)
        precision = MixedPrecision(param_dtype="bf16")
        metrics, state, step = train_sharded(
            language_loss(True), params, batch, tx, 1, "1x8", units=TIED, precision=precision
        )
        assert state.params["embed"].dtype == jnp.float32
        off = abs(float(metrics["loss"]) - float(want[0])) / float(want[0])
        assert 1e-6 < off < 1e-2  # eight bits; 1e-7 would be fp32
        moved, wanted = state.logical_params()["embed"] - params["embed"], want[1]["embed"] - params["embed"]
        assert np.linalg.norm(moved - wanted) < 0.02 * np.linalg.norm(wanted)


class TestNeverWhole:
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_neither_table_is_gathered_whole(self, tied):
        params = {name: shape(512, 64) for name in (("embed",) if tied else ("embed", "head"))}

        def loss(params, batch, key):
            x = embed(params["embed"], batch["tokens"])
            nll = cross_entropy(params.get("head", params["embed"]), x, batch["tokens"], stream_above=0, slice_rows=64)
            return jnp.mean(nll)

        got = compile_step(loss, params, {"tokens": shape(64, dtype=jnp.int32)}, "1x8", units=TIED if tied else UNTIED)
        assert max(c.payload_bytes() for c in got.program.collectives) == 64 * 64 * 4
        assert "f32[512,64]" not in got.compiled.as_text()
        assert f"f32[8,{512}]" not in got.compiled.as_text()  # nor the logits of 8 tokens

    def test_rows_are_exchanged_while_tokens_are_fewer_than_the_vocabulary(self):
        plan = make_plan(tables(True, np.float32), submesh("1x8"), units=TIED)
        state = TrainState.create(plan.place(tables(True, np.float32)), optax.sgd(0.1), plan)
        chosen = {}

        def loss(params, batch, key):
            chosen[batch["tokens"].size] = exchanges(params["embed"], batch["tokens"].size)
            return jnp.mean(embed(params["embed"], batch["tokens"]))

        step = train_step(loss, optax.sgd(0.1), plan)
        for length in (VOCAB - 1, VOCAB):
            step.lower(state, {"tokens": np.zeros((8, length), np.int32)})
        assert chosen == {VOCAB - 1: True, VOCAB: False}
        assert not exchanges(jnp.zeros((VOCAB, WIDTH)), 1)


class Tied(nnx.Module):
    """Embedding, and a head of the same table or of its own."""

    def __init__(self, vocab, width, tied=True, init=nnx.initializers.normal(0.02), **options):
        self.embed = Embed(vocab, width, rngs=nnx.Rngs(0))
        table = self.embed.table if tied else None
        self.head = Head(vocab, width, rngs=nnx.Rngs(1), table=table, init=init, **options)

    def __call__(self, tokens):
        return self.head(jnp.tanh(100 * self.embed(tokens)))

    def loss(self, batch):
        h = jnp.tanh(100 * self.embed(batch["tokens"]))
        return self.head.loss(h, batch["targets"], batch["weights"]), jnp.sum(batch["weights"])


def module_loss(model, batch, key):
    return model.loss(batch)


class TestModules:
    @pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
    def test_a_vocabulary_of_11_on_8_devices(self, stream):
        """C-13: equal logits give ln 11, not ln 16; logits have 11 columns; three steps equal one device."""
        options = dict(stream_above=0, slice_rows=4) if stream else {}
        make = lambda: Tied(11, 8, tied=False, init=nnx.initializers.zeros, **options)  # noqa: E731
        tokens = np.arange(32, dtype=np.int32).reshape(16, 2) % 11
        batch = {"tokens": tokens, "targets": (tokens + 1) % 11, "weights": np.ones((16, 2), np.float32)}
        params, plan = init_sharded(make, mesh=submesh("1x8"))
        first = jax.tree.map(np.array, plan.unpad(params))
        tx = optax.sgd(0.5)
        state, step, losses = TrainState.create(params, tx, plan), train_step(module_loss, tx, plan), []
        assert state.module()(tokens).shape == (16, 2, 11)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[0] == pytest.approx(2.397895, abs=1e-6)

        def alone(params, batch, key):
            model = make()
            model.embed.table.set_value(params["embed"]["table"])
            model.head.table.set_value(params["head"]["table"])
            return model.loss(batch)

        _, want, _ = train_alone(alone, first, batch, tx, 3)
        assert_close(state.logical_params(), want, 1e-5)  # SGD in fp32
        assert losses[2] < losses[0]

    def test_a_tied_table_is_stored_and_counted_once(self):
        """C-05: vocabulary 10, width 4, AdamW, 3 steps on 1x8."""
        make = lambda: Tied(10, 4)  # noqa: E731
        params, plan = init_sharded(make, mesh=submesh("1x8"))
        assert plan.num_params == 40 and [leaf.path for leaf in plan.leaves] == ["embed.table"]
        first = jax.tree.map(np.array, plan.unpad(params))
        tokens = np.arange(16, dtype=np.int32).reshape(8, 2) % 10
        batch = {"tokens": tokens, "targets": (tokens + 3) % 10, "weights": np.ones((8, 2), np.float32)}
        tx = optax.adamw(1e-2)
        state, step = TrainState.create(params, tx, plan), train_step(module_loss, tx, plan)
        moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        assert len(moments) == 2
        for _ in range(3):
            state, _ = step(state, batch)

        def alone(params, batch, key):
            model = Tied(10, 4)
            model.embed.table.set_value(params["embed"]["table"])
            return model.loss(batch)

        _, want, _ = train_alone(alone, first, batch, tx, 3)
        got = np.asarray(state.logical_params()["embed"]["table"])
        np.testing.assert_allclose(got, want["embed"]["table"], rtol=0, atol=0.05 * 1e-2 * 3)  # of lr x steps


class TestPlainHead:
    """What `cross_entropy` does with few logits has a derivative of its own."""

    def numbers(self, dtype=np.float64):
        rng = np.random.default_rng(2)
        h, table = rng.normal(size=(5, WIDTH)), rng.normal(size=(VOCAB, WIDTH))
        table[7] = 9 * h[0]  # the first target is all but certain
        return jnp.asarray(table, dtype), jnp.asarray(h, dtype), jnp.array([7, 0, 36, 12, 7])

    def test_values_and_derivatives_both_ways_are_those_of_log_softmax(self, float64):
        table, h, targets = self.numbers()

        def plain(table, h):
            return -jax.nn.log_softmax(h @ table.T)[jnp.arange(5), targets]

        ours = lambda table, h: cross_entropy(table, h, targets)
        along, back = (jnp.cos(table), jnp.sin(h)), jnp.arange(5.0)
        for derivative in (
            lambda f: jax.jvp(f, (table, h), along),
            lambda f: jax.vjp(f, table, h)[1](back),
        ):
            assert_close(derivative(ours), derivative(plain), 1e-12)

    def test_one_array_of_the_logits_size_and_dtype_is_saved(self):
        table, h, targets = self.numbers(jnp.bfloat16)
        pullback = jax.vjp(lambda table, h: cross_entropy(table, h, targets), table, h)[1]
        saved = [a for a in jax.tree.leaves(pullback) if a.shape == (5, VOCAB)]
        assert [a.dtype for a in saved] == [jnp.bfloat16]


@pytest.mark.parametrize(("vocab", "count"), [(128256, 64), (50257, 29), (32000, 16), (37, 1), (4099, 3)])
def test_slices_are_equal_where_a_count_near_by_divides(vocab, count):
    plan = make_plan({"embed": shape(vocab, 64)}, submesh("1x8"), units=TIED)
    sliced = Streamed(enter(shape(vocab, 8), None, None, plan.leaves[0]), SLICE_ROWS)
    assert sliced.count == count
    assert sliced.rest == vocab - count * sliced.rows and sliced.rows <= SLICE_ROWS
    assert (sliced.rest == 0) == (vocab != 4099)  # a prime
