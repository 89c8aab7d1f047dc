"""Mixed precision: which dtype is stored, computed in and reduced in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import train
from jfsdp.families import find_model
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.precision import MixedPrecision, parse_dtype
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import call, unshard
from jfsdp.vocab import cross_entropy, embed
from jfsdp.wrap import fully_shard, plan_module
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


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPT"])
def test_the_stored_weight_moves_in_steps_that_bf16_cannot_hold(strategy):
    """C-24: w = 1, gradient 1, Adam at 1e-3, 100 steps: 0.9; bf16 has steps of 0.004 there. SHARD_OPT gathers what was
    updated, and that in the stored dtype."""
    params = {"w": np.ones(8, np.float32)}
    plan = make_plan(params, submesh("1x8"), strategy=strategy, precision=MixedPrecision(param_dtype="bf16"))
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


class TestCalls:
    """What a call of a unit receives and gives back: `cast_forward_inputs` and `output_dtype`, as in PyTorch."""

    PARAMS = {"inner": {"w": np.eye(8, dtype=np.float32)}, "rest": np.ones(8, np.float32)}
    BATCH = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), "id": np.full((8, 1), 257, np.int32)}

    def seen(self, **precision):
        """Dtypes of what the inner unit is given and computes with, and of what its caller gets; its gradient."""
        dtypes = {}

        def unit(w, x, ids):
            dtypes.update(x=x.dtype, ids=ids.dtype, w=w["w"].dtype)
            return x @ w["w"], ids

        def loss(params, batch, key):
            out, ids = call(unit, params["inner"], batch["x"], batch["id"])
            dtypes.update(out=out.dtype, ids_out=ids.dtype, rest=unshard({"rest": params["rest"]})["rest"].dtype)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        units = {"inner": UnitOptions(precision=MixedPrecision(**precision))}
        plan, tx = make_plan(self.PARAMS, submesh("1x8"), units=units), optax.sgd(1.0)
        state, _ = train_step(loss, tx, plan)(TrainState.create(plan.place(self.PARAMS), tx, plan), self.BATCH)
        gradient = self.PARAMS["inner"]["w"] - state.params["inner"]["w"]
        return {name: dtype.name for name, dtype in dtypes.items()}, gradient

    @pytest.mark.parametrize(
        ("precision", "wanted"),
        [
            (dict(), dict(x="float32", w="float32", out="float32")),
            (dict(param_dtype="bf16"), dict(x="bfloat16", w="bfloat16", out="bfloat16")),
            (dict(param_dtype="bf16", cast_forward_inputs=False), dict(x="float32", w="bfloat16", out="float32")),
            (dict(param_dtype="bf16", output_dtype="fp32"), dict(x="bfloat16", w="bfloat16", out="float32")),
            (dict(output_dtype="bf16"), dict(x="float32", w="float32", out="bfloat16")),
        ],
    )
    def test_floating_inputs_and_outputs_have_the_dtypes_of_their_unit(self, precision, wanted):
        got, gradient = self.seen(**precision)
        assert got == {**wanted, "ids": "int32", "ids_out": "int32", "rest": "float32"}
        x, w = (jnp.asarray(a).astype(wanted[n]) for a, n in ((self.BATCH["x"], "x"), (self.PARAMS["inner"]["w"], "w")))
        by_hand = jax.grad(lambda w: jnp.mean((x @ w).astype(wanted["out"]).astype(jnp.float32) ** 2))(w)
        # Gradients of a row each are rounded to bf16 before they are summed in fp32; by hand all rows at once.
        np.testing.assert_allclose(gradient, by_hand.astype(jnp.float32), atol=1e-2 * np.abs(by_hand).max())

    def test_a_stack_carries_its_dtype_and_leaves_what_layers_share(self):
        seen = {}

        def block(w, x, _, table):
            seen.update(x=x.dtype.name, table=table.dtype.name)
            return x + x @ w["w"], None

        def loss(params, batch, key):
            table = jnp.ones(8, jnp.float32)  # as rotary tables are, in fp32 whatever the compute dtype
            out, _ = run_stack(block, params["blocks"], batch["x"], table)
            seen.update(out=out.dtype.name)
            return jnp.mean(out**2)

        precision = MixedPrecision(param_dtype="bf16", output_dtype="fp32")
        params, units = {"blocks": {"w": shape(3, 8, 8)}}, {"blocks": UnitOptions(stacked=True)}
        compile_step(loss, params, {"x": shape(8, 8)}, "1x8", units=units, precision=precision)
        assert seen == dict(x="bfloat16", table="float32", out="float32")

    @pytest.mark.parametrize("vocab", [4, 64], ids=["gathered", "exchanged"])
    def test_an_embedding_gives_rows_of_the_output_dtype_and_a_head_losses_as_they_come(self, vocab):
        seen = {}

        def loss(params, batch, key):
            rows = embed(params["table"], batch["id"])
            nll = cross_entropy(params["table"], rows.reshape(-1, 16), batch["id"].reshape(-1))
            seen.update(rows=rows.dtype.name, nll=nll.dtype.name)
            return jnp.mean(nll)

        units = {"table": UnitOptions(cut_dim=-1, never_whole=True, uses=("embed", "head"))}
        for output_dtype, rows in ((None, "bfloat16"), ("fp32", "float32"), ("bf16", "bfloat16")):
            precision = MixedPrecision(param_dtype="bf16", output_dtype=output_dtype)
            batch = {"id": shape(8, 16, dtype=jnp.int32)}
            compile_step(loss, {"table": shape(vocab, 16)}, batch, "1x8", units=units, precision=precision)
            assert seen == dict(rows=rows, nll="float32")

    def test_outside_a_step_nothing_is_cast(self):
        out = call(lambda w, x: x @ w["w"], self.PARAMS["inner"], self.BATCH["x"])
        assert out.dtype == jnp.float32


class TestBuffers:
    BUFFERS = {
        "position": np.arange(300, dtype=np.int32),
        "mask": np.arange(300) % 3 == 0,
        "count": np.full(4, 2**31 + 1, np.uint32),
        "inner": {"rotary": np.cos(np.arange(64)).astype(np.float32)},
        "mean": np.full(4, 1 / 3, np.float32),
    }

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_buffers_keep_their_kind(self, accumulate):
        """C-25: seen in bf16 where they are floating, stored as they were; 257 is no number of bf16."""
        seen = {}

        def loss(params, batch, key):
            params, buffers = params
            seen.update({name: b.dtype.name for name, b in (buffers | buffers["inner"]).items() if name != "inner"})
            new = {**buffers, "mean": buffers["mean"].at[1].set(2)}
            total = jnp.sum(buffers["inner"]["rotary"].astype(jnp.float32)) + buffers["position"][257]
            return jnp.sum(unshard(params)["p"]) * total, jnp.float32(1), {}, new

        tx, params = optax.sgd(0.0), {"p": np.ones(8, np.float32)}
        plan = make_plan(params, submesh("1x8"), precision=MixedPrecision(buffer_dtype="bf16"))
        state = TrainState.create(plan.place(params), tx, plan, buffers=self.BUFFERS)
        step = train_step(loss, tx, plan, accumulate=accumulate)
        for _ in range(2):
            state, metrics = step(state, {"x": np.ones((16, 1), np.float32)})
        assert seen == dict(position="int32", mask="bool", count="uint32", rotary="bfloat16", mean="bfloat16")
        wanted = {**self.BUFFERS, "mean": np.float32([1 / 3, 2, 1 / 3, 1 / 3])}
        for got, want in zip(jax.tree.leaves(state.buffers), jax.tree.leaves(wanted), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    def test_a_unit_sees_its_buffers_as_its_own_options_say(self):
        seen = {}

        def loss(params, batch, key):
            params, buffers = params
            seen.update(rotary=buffers["inner"]["rotary"].dtype.name, mean=buffers["mean"].dtype.name)
            return jnp.sum(unshard({"p": params["p"]})["p"])

        params = {"p": np.ones(8, np.float32), "inner": {"w": np.ones(8, np.float32)}}
        units = {"inner": UnitOptions(precision=MixedPrecision(buffer_dtype="bf16"))}
        plan, tx = make_plan(params, submesh("1x8"), units=units), optax.sgd(1.0)
        state = TrainState.create(plan.place(params), tx, plan, buffers=self.BUFFERS)
        train_step(loss, tx, plan)(state, {"x": np.ones((8, 1), np.float32)})
        assert seen == dict(rotary="bfloat16", mean="float32")


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


class TestModules:
    """The same for Flax modules whose calls are units."""

    def seen(self, root, unit, batch=TestCalls.BATCH):
        seen = {}

        class Inner(nnx.Module):
            def __init__(self):
                self.kernel = nnx.Param(jnp.eye(8))
                self.mean = nnx.BatchStat(jnp.full(8, 1 / 3))

            def __call__(self, x, ids, scale):
                seen.update(x=x.dtype.name, ids=ids.dtype.name, scale=type(scale), mean=self.mean[...].dtype.name)
                return x @ self.kernel[...] * scale

        class Model(nnx.Module):
            def __init__(self):
                self.inner = Inner()

            def __call__(self, x, ids):
                seen.update(root=x.dtype.name)
                out = self.inner(x, ids, scale=2.0)
                seen.update(inner_out=out.dtype.name)
                return out

        def loss(model, batch, key):
            out = model(batch["x"], batch["id"])
            seen.update(out=out.dtype.name)
            return jnp.mean(out.astype(jnp.float32) ** 2)

        model = Model()
        fully_shard(model.inner, mp_policy=MixedPrecision(**unit))
        fully_shard(model, mesh=submesh("1x8"), mp_policy=MixedPrecision(**root))
        tx = optax.sgd(1.0)
        state = TrainState.create(model, tx)
        state, _ = train_step(loss, tx, state.plan)(state, batch)
        mean = state.buffers["inner"]["mean"]
        assert mean.dtype == jnp.float32
        np.testing.assert_array_equal(mean, np.full(8, 1 / 3, np.float32))
        return seen

    @pytest.mark.parametrize(
        ("root", "unit", "wanted"),
        [
            ({}, {}, dict(root="float32", x="float32", inner_out="float32", out="float32", mean="float32")),
            (
                dict(param_dtype="bf16", output_dtype="fp32"),
                dict(param_dtype="fp32", output_dtype="bf16", buffer_dtype="bf16"),
                dict(root="bfloat16", x="float32", inner_out="bfloat16", out="float32", mean="bfloat16"),
            ),
            (
                dict(param_dtype="bf16", cast_forward_inputs=False),
                dict(param_dtype="bf16"),
                dict(root="float32", x="bfloat16", inner_out="bfloat16", out="bfloat16", mean="float32"),
            ),
        ],
    )
    def test_calls_of_the_root_and_of_a_unit_cast_as_each_was_told(self, root, unit, wanted):
        """C-25 too: a statistic seen in bf16 and not changed stays bitwise as it was."""
        assert self.seen(root, unit) == {**wanted, "ids": "int32", "scale": float}


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "moe-tiny", "qwen3-0.6b"])
def test_nothing_is_promoted_without_a_word(name):
    """A step converts dtypes and adds dims itself; qwen3's head is streamed. Optax's Adam promotes a count."""
    model = find_model(name)
    policy = MixedPrecision(param_dtype="bf16")
    plan = plan_module(
        lambda: model.family.build(model.config, rngs=nnx.Rngs(0), remat="full"), mesh=submesh("2x4"), mp_policy=policy
    )
    tx, tokens = optax.sgd(0.1), jax.ShapeDtypeStruct((16, 256), jnp.int32, sharding=plan.batch_sharding)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), tokens)
    batch["weights"] = tokens.update(dtype=jnp.float32)
    step = train_step(train.loss, tx, plan, clip_norm=1.0, accumulate=2)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        step.lower(TrainState.abstract(tx, plan), batch)
