"""Quantised gathers: the format, the bytes on the wire, equal weights everywhere, gradients straight through."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jfsdp import collectives, quantise
from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.plan import traffic
from jfsdp.precision import MixedPrecision
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import call, unshard
from tests.support import assert_close, bitwise_equal, shape, submesh

CODES = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype("float8_e4m3fn")}
UNITS = {"blocks": UnitOptions(stacked=True), "head": UnitOptions()}


def rounded(shard, name):
    """The format, written again in NumPy: blocks of 256 elements in the order of memory, each with its own scale."""
    flat = np.asarray(shard, np.float32).reshape(-1)
    blocks = np.pad(flat, (0, -flat.size % 256)).reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32({"int8": 127, "fp8": 448}[name])
    codes = np.divide(blocks, scale, where=scale > 0, out=np.zeros_like(blocks))
    codes = np.rint(codes) if name == "int8" else codes.astype(CODES["fp8"])
    return (codes.astype(np.float32) * scale).reshape(-1)[: flat.size].reshape(np.shape(shard))


@cache
def train(wire_dtype=None, **options):
    """`run` on the deep model."""
    return run(VALUES, wire_dtype, **options)


def run(values, wire_dtype=None, strategy=None, mesh="1x8", reshard=None, loss=None, steps=1, compute=None, **options):
    """Parameters and metrics after some steps."""
    units = {name: UnitOptions(stacked=u.stacked, reshard_after_forward=reshard) for name, u in UNITS.items()}
    precision = MixedPrecision(param_dtype=compute, gather_dtype=wire_dtype)
    plan = make_plan(values, submesh(mesh), strategy=strategy, units=units, precision=precision)
    tx = optax.sgd(0.1)
    state, step = TrainState.create(plan.place(values), tx, plan), train_step(loss or deep, tx, plan, **options)
    for _ in range(steps):
        state, metrics = step(state, {"x": X})
    return state.params, metrics


def parameters(width=128, inner=160, layers=2):
    rng = np.random.default_rng(0)
    draw = lambda *dims: (0.1 * rng.normal(size=dims)).astype(np.float32)  # noqa: E731
    blocks = {"up": draw(layers, width, inner), "down": draw(layers, inner, width), "scale": 1 + draw(layers, width)}
    return {"blocks": blocks, "head": {"w": draw(width, 140)}}


VALUES, X = parameters(), np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)


def deep(params, batch, key):
    def block(w, x, _):
        return x + jnp.tanh(x @ w["up"]) @ w["down"] * w["scale"], None

    x, _ = run_stack(block, params["blocks"], batch["x"])
    return jnp.mean(call(lambda w, x: x @ w["w"], params["head"], x).astype(jnp.float32) ** 2)


class TestFormat:
    @pytest.mark.parametrize("name", CODES)
    @pytest.mark.parametrize("dims", [(256,), (3, 300), (7,), (2, 16, 32)])
    def test_what_comes_back_is_what_numpy_computes(self, name, dims):
        shard = np.random.default_rng(0).normal(size=dims).astype(np.float32)
        shard.reshape(-1)[:3] = (0, 50, -50)  # an outlier coarsens its own block only
        wire = jax.jit(lambda a: quantise.encode(a, CODES[name]))(shard)
        assert wire.dtype == jnp.uint8 and wire.size == -(-shard.size // 256) * 260
        got = quantise.decode(jnp.stack([wire, wire]), dims, CODES[name], jnp.dtype("float32"))
        want = rounded(shard, name)
        np.testing.assert_allclose(got, np.stack([want, want]), rtol=1e-6)
        assert np.abs(want - shard).max() > 1e-3

    @pytest.mark.parametrize("name", CODES)
    def test_zeros_stay_zeros_and_nan_does_not_hide(self, name):
        back = lambda a: quantise.decode(quantise.encode(a, CODES[name]), a.shape, CODES[name], a.dtype)  # noqa: E731
        np.testing.assert_array_equal(back(jnp.zeros(512)), np.zeros(512))
        assert np.isnan(back(jnp.zeros(512).at[300].set(jnp.nan))).any()


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("1x8", None), ("2x4", "HYBRID_SHARD"), pytest.param("2x4", "FULL_SHARD", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("dims", [pytest.param((128, 160), marks=pytest.mark.slow), (145, 131)], ids=["even", "uneven"])
def test_all_devices_hold_the_same_weights_each_shard_rounded_once(name, mesh, strategy, dims):
    """Bitwise equal on 8 devices, the owner of a shard too, and equal to the rounded shards of the format."""
    values = {"w": np.random.default_rng(0).normal(size=dims).astype(np.float32)}
    precision = MixedPrecision(gather_dtype=name)
    plan = make_plan(values, submesh(mesh), strategy=strategy, precision=precision, units={})
    (leaf,), axes = plan.leaves, plan.placement.data_axes
    seen = jax.shard_map(
        lambda w: collectives.gather([w], [leaf])[0][None],
        mesh=plan.mesh,
        in_specs=leaf.rest_spec,
        out_specs=PartitionSpec(axes),
    )
    (stored,) = jax.tree.leaves(plan.place(values))
    every = np.asarray(jax.jit(seen)(stored))
    assert every.shape == (8, *dims)
    assert all(np.array_equal(every[0], other) for other in every[1:])
    pieces = np.split(np.asarray(stored), plan.placement.shards, leaf.dim)
    want = np.concatenate([rounded(piece, name) for piece in pieces], leaf.dim)[: dims[0], : dims[1]]
    np.testing.assert_allclose(every[0], want, rtol=1e-6)
    assert np.abs(every[0] - values["w"]).max() > 1e-3


@pytest.mark.parametrize("name", CODES)
def test_gradients_pass_straight_through(name):
    """A loss that is linear in the weights has the gradient of the unrounded ones, bitwise; stored weights are fp32."""

    def linear(params, batch, key):
        head = unshard(params["head"])["w"]
        return jnp.sum(jnp.mean(batch["x"], 0) @ head) + 0.0 * jnp.sum(unshard(params["blocks"])["scale"])

    values = {"blocks": {"scale": np.ones((2, 8), np.float32)}, "head": VALUES["head"]}
    assert bitwise_equal(run(values, name, loss=linear)[0], run(values, None, loss=linear)[0])


class TestTraining:
    @pytest.mark.parametrize(("name", "off"), [("int8", 0.02), pytest.param("fp8", 0.06, marks=pytest.mark.slow)])
    def test_it_follows_the_unrounded_run(self, name, off):
        """Of a weight near the largest of its block int8 keeps 1/254 and fp8 1/16, of smaller ones less."""
        want, metrics = train(steps=5)
        got, quantised = train(name, steps=5)
        assert float(quantised["loss"]) != float(metrics["loss"])
        assert float(quantised["loss"]) == pytest.approx(float(metrics["loss"]), rel=off)
        assert_close(got, want, off)

    @pytest.mark.parametrize(
        "other",
        [
            dict(strategy="SHARD_GRAD_OP"),
            pytest.param(dict(mesh="2x4", strategy="FULL_SHARD"), marks=pytest.mark.slow),
            dict(reshard=4),
            pytest.param(dict(accumulate=2, no_sync=True), marks=pytest.mark.slow),
        ],
        ids=["kept", "both axes", "hpZ", "accumulated"],
    )
    def test_backward_computes_with_the_weights_of_forward(self, other):
        """Gathered again, kept, or gathered from larger pieces of the rounded weights: the same gradients."""
        assert_close(train("int8", **other)[0], train("int8")[0], 1e-5)

    def test_small_parameters_are_exempt(self):
        """Scales of 128 elements a layer stay as they are, so a loss that reads them alone is bitwise the same."""

        def scales(params, batch, key):
            x, _ = run_stack(lambda w, x, _: (x * w["scale"], None), params["blocks"], batch["x"])
            return jnp.mean(x**2) + 0.0 * jnp.sum(call(lambda w, x: x @ w["w"], params["head"], x))

        assert bitwise_equal(run(VALUES, "int8", loss=scales)[1], run(VALUES, None, loss=scales)[1])


@pytest.mark.parametrize("name", CODES)
def test_the_wire_carries_half_of_bf16(name):
    """Read from StableHLO: a byte an element and 4 for 256 of them, in as many operations; small parameters in bf16."""
    params = jax.tree.map(lambda a: shape(*a.shape), VALUES)
    gathers = {}
    for wire in (None, name):
        precision = MixedPrecision(param_dtype="bf16", gather_dtype=wire)
        plan, tx = make_plan(params, submesh("1x8"), units=UNITS, precision=precision), optax.sgd(0.1)
        lowered = train_step(deep, tx, plan).lower(TrainState.abstract(tx, plan), {"x": shape(16, 128)})
        gathers[wire] = [c for c in audit.lowered_collectives(lowered, plan.mesh) if c.kind == "all-gather"]
    large = {w: [c for c in gathers[w] if c.received_bytes() > 2 * 128 * 8] for w in gathers}
    assert {c.dtype for c in large[None]} == {"bfloat16"} and {c.dtype for c in large[name]} == {"uint8"}
    assert len(large[name]) == len(large[None]) and len(gathers[name]) == len(gathers[None])
    received = {w: sum(c.received_bytes() for c in large[w]) for w in large}
    assert received[name] / received[None] == pytest.approx(0.5 * (1 + 4 / 256), rel=0.01)
    assert {c.dtype for c in gathers[name] if c not in large[name]} == {"bfloat16"}


def test_unknown_codes_are_refused():
    with pytest.raises(ValueError, match="gather_dtype 'int4' is unknown. Use one of int8, fp8"):
        MixedPrecision(gather_dtype="int4")
    assert MixedPrecision(gather_dtype="fp8") == MixedPrecision(gather_dtype=jnp.float8_e4m3fn)


def test_the_formula_predicts_the_bytes_of_the_program():
    """Of four layers: a loop over one or two is unrolled, and the compiler finds gathers that are there already."""
    params = jax.tree.map(lambda a: shape(*a.shape), parameters(layers=4))
    precision, tx = MixedPrecision(gather_dtype="int8"), optax.sgd(0.1)
    plan = make_plan(params, submesh("1x8"), units=UNITS, precision=precision)
    compiled = train_step(deep, tx, plan).lower(TrainState.abstract(tx, plan), {"x": shape(16, 128)}).compile()
    predicted = sum(move.received for move in traffic(plan) if (move.kind, move.dtype) == ("all-gather", "uint8"))
    moved = audit.read(compiled, plan.mesh).received_bytes("all-gather", dtype="uint8")
    assert predicted == pytest.approx(moved, rel=1e-3)
