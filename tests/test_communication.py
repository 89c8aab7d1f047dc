"""What a step moves: how many collectives, how many bytes, over which devices, in which dtype.

Read from compiled programs on 8 simulated devices. Dtypes on the wire are read from StableHLO, because the
CPU backend widens bf16 collectives to fp32.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp import plan as planning
from jfsdp.layout import UnitOptions
from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.unit import call
from jfsdp.vocab import cross_entropy, embed
from tests.support import HYBRID, PLAIN, compile_step, shape, submesh, toy_batch, toy_loss, toy_params

UNITS, MIB = 8, 1 << 20
UNIT = 128 * 256 * 4
"""One matrix per unit, too large for the bucket of small ones: an operation moves one unit."""
P = UNITS * UNIT
BLOCKS = {"blocks": UnitOptions(stacked=True)}
STATISTICS = 64
"""Bytes of loss, weight and norm, which travel in all-reduces of their own or beside a gradient."""


def blocks_loss(schedule=Schedule(), remat="full"):
    def block(w, x, _):
        return x + jnp.tanh(x @ w["kernel"]) @ w["kernel"].T, None

    def loss(params, batch, key):
        x = batch["x"].astype(params["blocks"]["kernel"].layout.param_dtype)
        x, _ = run_stack(block, params["blocks"], x, remat=remat, schedule=schedule)
        return jnp.sum(x.astype(jnp.float32) ** 2), jnp.float32(x.shape[0])

    return loss


@cache
def equal_units(
    mesh="1x8",
    strategy=None,
    *,
    units=UNITS,
    width=128,
    inner=256,
    remat="full",
    late=True,
    rows=32,
    **options,
):
    """P = 1 MiB of float32 in equal units, unless said otherwise."""
    params = {"blocks": {"kernel": shape(units, width, inner)}}
    loss = blocks_loss(Schedule(late_reduce=late), remat)
    return compile_step(loss, params, {"x": shape(rows, width)}, mesh, strategy, BLOCKS, **options)


class TestBytes:
    """C-39, C-40: bytes that each device receives equal the table of strategies, everything named."""

    @pytest.mark.parametrize(
        ("mesh", "strategy", "gathers", "reductions"),
        [
            # 2U: U forward, U - 1 backward, and the one that the backward loop makes and does not use.
            ("1x8", "FULL_SHARD", 2 * UNITS, UNITS),
            ("2x4", "FULL_SHARD", 2 * UNITS, UNITS),
            ("1x8", "SHARD_GRAD_OP", UNITS, UNITS),
            ("1x8", "SHARD_OPT", UNITS, UNITS),
            ("1x8", "NO_SHARD", 0, 0),
            ("2x4", "NO_SHARD", 0, 0),
        ],
    )
    def test_plain_strategies_move_what_the_table_says(self, mesh, strategy, gathers, reductions):
        program = equal_units(mesh, strategy).program
        every_axis = tuple(a for a, n in program.mesh_shape.items() if n > 1)
        assert program.received_bytes("all-gather", every_axis) == gathers * UNIT * 7 // 8
        assert program.received_bytes("reduce-scatter", every_axis) == reductions * UNIT * 7 // 8
        gradients = 2 * P * 7 // 8 if strategy == "NO_SHARD" else 0
        assert 0 <= program.received_bytes("all-reduce") - gradients < STATISTICS
        table = {"FULL_SHARD": 2.625, "SHARD_GRAD_OP": 1.75, "SHARD_OPT": 1.75, "NO_SHARD": 1.75}[strategy]
        assert program.received_bytes() == pytest.approx(table * MIB, rel=0.01)

    @pytest.mark.parametrize("late", [True, False])
    @pytest.mark.parametrize(("strategy", "shard_mib"), [("HYBRID_SHARD", 2.25), ("HYBRID_SHARD_ZERO2", 1.5)])
    def test_hybrid_strategies_add_an_all_reduce_of_the_shard(self, strategy, shard_mib, late):
        program = equal_units("2x4", strategy, late=late).program
        gathers, scatters = (program.received_bytes(kind, "shard") for kind in ("all-gather", "reduce-scatter"))
        assert gathers + scatters == shard_mib * MIB
        assert program.received_bytes("all-reduce", "replica") == MIB // 4
        assert program.received_bytes() == pytest.approx((shard_mib + 0.25) * MIB, rel=0.01)

    def test_hybrid_groups_are_the_shards_of_a_replica_and_the_copies_of_a_shard(self):
        """C-40 in one process: shards in {0..3} and {4..7}, one all-reduce per unit in the pairs {i, i+4}."""
        program = equal_units("2x4", "HYBRID_SHARD", late=True).program
        for c in [*program.select("all-gather"), *program.select("reduce-scatter")]:
            assert c.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
        pairs = program.select("all-reduce", "replica")
        assert pairs and {c.groups for c in pairs} == {((0, 4), (1, 5), (2, 6), (3, 7))}
        assert all(c.payload_bytes() <= STATISTICS for c in program.select("all-reduce") if c not in pairs)


class TestGathers:
    """How often a unit is gathered: one matrix per unit, so operations count units."""

    @pytest.mark.parametrize("remat", ["none", "full", "dots"])
    def test_activation_checkpointing_adds_no_gather(self, remat):
        """C-38: 4 units, at most 8 gathers; 12 is the error."""
        program = equal_units(units=4, remat=remat).program
        assert program.count("all-gather") == 8
        assert program.count("reduce-scatter") == 4

    def test_full_shard_gathers_twice_and_shard_grad_op_once(self):
        """C-35, the gathers."""
        assert equal_units("1x8", "FULL_SHARD").program.count("all-gather") == 2 * UNITS
        assert equal_units("1x8", "SHARD_GRAD_OP").program.count("all-gather") == UNITS

    @pytest.mark.parametrize(("prefetch", "gathers"), [(0, 2 * UNITS - 1), (1, 2 * UNITS), (2, 2 * UNITS + 1)])
    def test_each_depth_of_prefetch_gathers_one_unit_that_it_does_not_use(self, prefetch, gathers):
        params = {"blocks": {"kernel": shape(UNITS, 128, 256)}}
        loss = blocks_loss(Schedule(prefetch=prefetch))
        got = compile_step(loss, params, {"x": shape(32, 128)}, "1x8", units=BLOCKS)
        assert got.program.count("all-gather") == gathers

    def test_a_gather_in_the_loop_produces_one_layer(self):
        """C-36, the gathers: 16 layers of (64, 64), each gather gives 4096 elements."""
        program = equal_units(units=16, width=64, inner=64).program
        gathers = program.select("all-gather")
        assert {c.payload_bytes() for c in gathers} == {4096 * 4}
        assert sum(c.runs > 1 for c in gathers) == 2  # one place in either loop
        assert program.count("all-gather") == 32

    def test_a_unit_outside_a_stack_is_gathered_twice(self):
        """The compiler must not find the forward pass's gather again and keep its result to the end."""
        got = small_units(stacked=False)
        assert len([c for c in got.asked if c.kind == "all-gather"]) == 8
        assert got.program.count("all-gather") == 8


class TestFewLargeCollectives:
    @pytest.mark.parametrize("stacked", [True, False])
    def test_small_parameters_of_a_unit_travel_together(self, stacked):
        """C-75: 12 small parameters, 4 units: 2 gathers and 1 reduction per unit."""
        program = small_units(stacked).program
        assert program.count("all-gather") == 2 * 4
        assert program.count("reduce-scatter") == 4
        assert all(
            c.payload_bytes() <= 4 * 48 + STATISTICS for c in program.select("all-reduce")
        )  # the norm: a number per parameter

    def test_large_parameters_have_an_operation_each_beside_the_bucket(self):
        params = {"blocks": {"kernel": shape(4, 128, 256), "scale": shape(4, 128), "bias": shape(4, 256)}}

        def block(w, x, _):
            return x + jnp.tanh((x * w["scale"]) @ w["kernel"] + w["bias"]) @ w["kernel"].T, None

        def loss(params, batch, key):
            return jnp.mean(run_stack(block, params["blocks"], batch["x"])[0] ** 2)

        program = compile_step(loss, params, {"x": shape(32, 128)}, "1x8", units=BLOCKS).program
        assert program.count("all-gather") == 2 * 8
        assert program.count("reduce-scatter") == 2 * 4


@cache
def small_units(stacked):
    names = [f"p{i:02}" for i in range(12)]
    shapes = [(16,), (5, 3), (24, 2), (9,)] * 3

    def apply(w, x):
        for name in names:
            x = x * (1 + jnp.mean(w[name]))
        return x

    def loss(params, batch, key):
        x = batch["x"]
        if stacked:
            x, _ = run_stack(lambda w, x, _: (apply(w, x), None), params["blocks"], x)
        for unit in () if stacked else params:
            x = call(apply, params[unit], x)
        return jnp.mean(x)

    lead = (4,) if stacked else ()
    unit = {name: shape(*lead, *dims) for name, dims in zip(names, shapes)}
    params = {"blocks": unit} if stacked else {f"unit{i}": unit for i in range(4)}
    units = BLOCKS if stacked else {name: UnitOptions() for name in params}
    return compile_step(loss, params, {"x": shape(8, 4)}, "1x8", units=units)


class TestAccumulation:
    """C-41: what micro-batches move, with and without no_sync."""

    MICRO = 4

    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_no_sync_reduces_once_and_holds_whole_gradients(self, mesh):
        got = equal_units(mesh, late=False, accumulate=self.MICRO, no_sync=True)
        assert got.program.count("reduce-scatter") == UNITS
        assert got.program.count("all-gather") <= 2 * UNITS * self.MICRO  # less what is lifted out of the loop
        assert got.program.received_bytes("all-reduce", "replica") == (MIB // 4 if mesh == "2x4" else 0)
        assert held(got) == [(UNITS, 128, 256)]

    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_without_no_sync_each_micro_batch_reduces_into_the_shard(self, mesh):
        got = equal_units(mesh, late=False, accumulate=self.MICRO)
        shards = int(mesh[-1])
        assert got.program.count("reduce-scatter") == UNITS * self.MICRO
        assert got.program.received_bytes("all-reduce", "replica") == (MIB // 4 if mesh == "2x4" else 0)
        assert held(got) == [(UNITS, 128 // shards, 256)]

    def test_weights_kept_for_the_window_are_gathered_once(self):
        got = equal_units(late=False, accumulate=self.MICRO, reshard_after_backward=False)
        assert got.program.received_bytes("all-gather", "shard") == MIB * 7 // 8
        assert got.program.count("reduce-scatter") == UNITS * self.MICRO
        moves = planning.traffic(got.plan, accumulate=self.MICRO, reshard_after_backward=False)
        assert sum(m.received for m in moves if m.kind == "all-gather") == MIB * 7 // 8

    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_both_apply_the_same_gradient(self, mesh):
        rng = np.random.default_rng(0)
        start = {"blocks": {"kernel": rng.normal(size=(UNITS, 128, 256)).astype(np.float32) * 0.1}}
        batch = {"x": rng.normal(size=(32, 128)).astype(np.float32)}
        ends = []
        for no_sync in (False, True):
            got = equal_units(mesh, late=False, accumulate=self.MICRO, **({"no_sync": True} if no_sync else {}))
            state = TrainState.create(got.plan.place(start), got.step.optimizer.tx, got.plan)
            state, metrics = got.compiled(state, jax.device_put(batch, got.plan.batch_sharding))
            ends.append((np.asarray(state.params["blocks"]["kernel"]), float(metrics["grad_norm"])))
        (synced, norm), (late, late_norm) = ends
        moved = np.abs(synced - start["blocks"]["kernel"])
        assert moved.max() > 0.01
        np.testing.assert_allclose(late, synced, rtol=1e-6, atol=1e-6 * moved.max())
        assert late_norm == pytest.approx(norm, rel=1e-6)


def held(got):
    """Shapes that the loop over micro-batches adds to, from the jaxpr: its carry, as one device holds it."""
    state = TrainState.abstract(got.step.optimizer.tx, got.plan)
    jaxpr = jax.make_jaxpr(got.step._step)(state, {"x": shape(32, 128)})
    (inner,) = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    loops = [e for e in inner.params["jaxpr"].eqns if e.params.get("length") == TestAccumulation.MICRO - 1]
    (loop,) = [e for e in loops if any(i.primitive.name == "scan" for i in e.params["jaxpr"].jaxpr.eqns)]
    return [a.shape for a in loop.params["jaxpr"].out_avals if a.ndim]  # scalars are the micro-batch's sums


class TestWireDtypes:
    """C-42: gathers carry the compute dtype, reductions theirs."""

    def test_bf16_compute_gathers_bf16_and_reduces_fp32(self):
        got = equal_units(units=4, precision=MixedPrecision(param_dtype="bf16"))
        gathers = [c for c in got.asked if c.kind == "all-gather"]
        assert gathers and {c.dtype for c in gathers} == {"bfloat16"}
        assert {c.payload_bytes() for c in gathers} == {UNIT // 2}
        assert {c.dtype for c in got.asked if c.kind == "reduce-scatter"} == {"float32"}

    def test_fp32_compute_gathers_fp32(self):
        got = equal_units(units=4)
        assert {c.dtype for c in got.asked if c.kind == "all-gather"} == {"float32"}
        assert {c.payload_bytes() for c in got.asked if c.kind == "all-gather"} == {UNIT}

    def test_reductions_in_bf16_on_request_for_shards_and_copies(self):
        precision = MixedPrecision(param_dtype="bf16", reduce_dtype="bf16")
        got = equal_units("2x4", "HYBRID_SHARD", units=4, precision=precision)
        statistics = {("all-reduce", ("shard",)), ("all-reduce", ("replica", "shard"))}
        reductions = [c for c in got.asked if c.kind != "all-gather" and (c.kind, c.axes) not in statistics]
        assert {c.kind for c in reductions} == {"reduce-scatter", "all-reduce"}
        assert {c.dtype for c in reductions} == {"bfloat16"}

    def test_a_unit_with_an_fp32_override_carries_fp32(self):
        units = {
            "blocks": UnitOptions(stacked=True),
            "head": UnitOptions(precision=MixedPrecision(param_dtype="fp32")),
        }

        def loss(params, batch, key):
            x = batch["x"].astype(jnp.bfloat16)
            x, _ = run_stack(lambda w, x, _: (x + x @ w["kernel"], None), params["blocks"], x)
            out = call(lambda w, x: x.astype(w["kernel"].dtype) @ w["kernel"], params["head"], x)
            assert out.dtype == jnp.float32
            return jnp.mean(out)

        params = {"blocks": {"kernel": shape(3, 144, 144)}, "head": {"kernel": shape(144, 152)}}
        precision = MixedPrecision(param_dtype="bf16")
        got = compile_step(loss, params, {"x": shape(8, 144)}, "1x8", units=units, precision=precision)
        gathers = [c for c in got.asked if c.kind == "all-gather"]
        by_size = {c.payload_bytes() // jnp.dtype(c.dtype).itemsize: c.dtype for c in gathers}
        assert by_size == {144 * 144: "bfloat16", 144 * 152: "float32"}


DEFAULT_RUN = ("FULL_SHARD", "SHARD_OPT", "HYBRID_SHARD")
NOTHING_ELSE = [
    pytest.param(mesh, strategy, marks=() if strategy in DEFAULT_RUN else pytest.mark.slow)
    for mesh, strategies in (("1x8", PLAIN), ("2x4", HYBRID))
    for strategy in strategies
]


class TestNothingElse:
    """Whatever is not named is not there."""

    @pytest.mark.parametrize(("mesh", "strategy"), NOTHING_ELSE)
    def test_padding_clipping_and_adamw_move_nothing(self, mesh, strategy):
        """Uneven, small and scalar parameters, AdamW, clipping: no collective outside `shard_map`."""
        params, batch = toy_params(dtype=jnp.float32), toy_batch(dtype=np.float32)
        got = compile_step(toy_loss(), params, batch, mesh, strategy, tx=optax.adamw(1e-3), clip_norm=1.0)
        collectives = got.program.collectives
        assert collectives
        assert [c.op_name for c in collectives if "shard_map" not in c.op_name] == []
        assert {c.kind for c in collectives} <= {"all-gather", "reduce-scatter", "all-reduce"}
        assert all(set(c.axes) <= {"replica", "shard"} for c in collectives)


class TestVocabulary:
    """The vocabulary's own rows of the table."""

    VOCAB, WIDTH, TOKENS = 512, 64, 48
    TABLE = VOCAB * WIDTH * 4

    @pytest.mark.parametrize("mesh", ["1x8", "2x4"])
    def test_an_embedding_exchanges_ids_and_rows(self, mesh):
        shards = int(mesh[-1])
        program = self.compiled(mesh, lambda params, ids: embed(params["table"], ids)).program
        assert program.received_bytes("all-gather") == 4 * (shards - 1) * self.TOKENS
        assert program.received_bytes("all-to-all") == 2 * self.TOKENS * self.WIDTH * 4 * (shards - 1) // shards
        assert program.count("reduce-scatter") == 0
        shard = self.TABLE // shards if mesh == "2x4" else 0  # summed over 2 copies: 2 (R-1)/R = 1
        assert 0 <= program.received_bytes("all-reduce") - shard < STATISTICS

    @pytest.mark.parametrize(
        ("mesh", "strategy"), [("1x8", "FULL_SHARD"), ("1x8", "SHARD_GRAD_OP"), ("2x4", "HYBRID_SHARD")]
    )
    def test_a_streamed_head_is_gathered_twice_and_reduced_once(self, mesh, strategy):
        def head(params, ids):
            h = jnp.broadcast_to((ids % 7)[:, None] / 7, (self.TOKENS, self.WIDTH))
            return cross_entropy(params["table"], h, ids, stream_above=0, slice_rows=128)

        shards = int(mesh[-1])
        program = self.compiled(mesh, head, strategy).program
        assert program.received_bytes("all-gather") == 2 * self.TABLE * (shards - 1) // shards
        assert program.received_bytes("reduce-scatter") == self.TABLE * (shards - 1) // shards
        slices = {c.payload_bytes() for c in program.select("all-gather")}
        assert slices == {self.TABLE // 4}  # 128 rows each: never whole

    def compiled(self, mesh, use, strategy=None):
        def loss(params, batch, key):
            return jnp.mean(use(params, batch["ids"]))

        units = {"table": UnitOptions(cut_dim=-1, never_whole=True)}
        params = {"table": shape(self.VOCAB, self.WIDTH)}
        return compile_step(loss, params, {"ids": shape(self.TOKENS * 8, dtype=jnp.int32)}, mesh, strategy, units)


def test_submeshes_use_the_first_devices():
    assert [d.id for d in submesh("2x2").devices.flat] == [0, 1, 2, 3]
