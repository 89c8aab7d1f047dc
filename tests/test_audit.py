"""What `jfsdp.audit.program` reads must be what small programs with known communication do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.audit import program as audit

LAYERS, WIDTH, ROWS = 5, 64, 32  # of activations, each device has ROWS
WEIGHT = WIDTH * WIDTH  # elements of one layer
WHOLE, BATCH = P(), P(("replica", "shard"))


def make_mesh(replica=2, shard=4, order=range(8)):
    return Mesh(np.array(jax.devices())[list(order)].reshape(replica, shard), ("replica", "shard"))


def lower(function, mesh, *arguments, out_specs=WHOLE, donate=()):
    """Lower `function` under shard_map; each argument is (shape, dtype, spec)."""
    step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=tuple(a[2] for a in arguments),
                                 out_specs=out_specs, check_vma=False), donate_argnums=donate)
    return step.lower(*(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
                        for shape, dtype, spec in arguments))


def lower_training_step(mesh):
    """Gather each layer in bf16, twice; scatter gradients in f32; all-reduce their shards and the loss."""

    @jax.custom_vjp
    def gather(w):
        return lax.all_gather(w.astype(jnp.bfloat16), "shard", tiled=True)

    def scatter(_, g):
        return (lax.psum_scatter(g.astype(jnp.float32), "shard", tiled=True),)

    gather.defvjp(lambda w: (gather(w), None), scatter)

    def step(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ gather(w)), None))
        total = lambda w: jnp.sum(lax.scan(layer, x, w)[0].astype(jnp.float32))
        loss, grads = jax.value_and_grad(total)(weights)
        return weights - lax.psum(grads, "replica"), lax.psum(loss, ("replica", "shard"))

    cut, activations = P(None, "shard"), ((8 * ROWS, WIDTH), jnp.bfloat16, BATCH)
    return lower(step, mesh, ((LAYERS, WIDTH, WIDTH), jnp.float32, cut), activations,
                 out_specs=(cut, WHOLE), donate=0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


@pytest.fixture(scope="module")
def lowered(mesh):
    return lower_training_step(mesh)


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


@pytest.fixture(scope="module")
def program(compiled, mesh):
    return audit.read(compiled, mesh)


def read_step(function, mesh):
    return audit.read(lower(function, mesh, ((64, 8), jnp.float32, WHOLE)).compile(), mesh)


ARRAY = 64 * 8 * 4  # bytes of what `read_step` gives to its function


class TestCounting:
    def test_a_collective_in_a_loop_counts_once_per_trip(self, program):
        assert program.count("all-gather", "shard") == 2 * LAYERS
        assert program.count("reduce-scatter", "shard") == LAYERS
        assert len(program.select("all-gather")) == 2

    def test_axes_are_told_apart(self, program):
        assert program.count("all-reduce", "replica") == 1
        assert program.count("all-reduce", ("replica", "shard")) == 1
        assert program.count("all-reduce", ("shard", "replica")) == 1
        assert program.count("all-reduce", "shard") == 0
        assert program.count() == 3 * LAYERS + 2

    def test_received_bytes_follow_the_ring(self, program):
        layer = 4 * WEIGHT  # f32, also on the gather: Note [What the CPU backend hides]
        assert program.received_bytes("all-gather") == 2 * LAYERS * layer * 3 // 4
        assert program.received_bytes("reduce-scatter") == LAYERS * layer * 3 // 4
        assert program.received_bytes("all-reduce", "replica") == LAYERS * layer // 4  # 2 x 1/2 of the shards
        assert program.received_bytes("all-reduce", ("replica", "shard")) == 7  # 2 x 7/8 of one float

    def test_loops_know_their_trips_and_flops(self, program):
        matmul = 2 * ROWS * WEIGHT
        assert [(loop.trips, loop.runs, loop.depth) for loop in program.loops] == [(LAYERS, LAYERS, 1)] * 2
        assert [loop.matmul_flops for loop in program.loops] == [matmul, 3 * matmul]  # backward repeats it
        assert program.matmul_flops == LAYERS * 4 * matmul

    def test_min_bytes_and_dtype_select(self, program):
        assert program.count(min_bytes=4 * WEIGHT) == 3 * LAYERS + 1  # all but the loss
        assert program.count(dtype=jnp.float32) == program.count()
        assert program.count(dtype="bfloat16") == program.received_bytes(dtype="bfloat16") == 0

    def test_nested_loops_multiply(self, mesh):
        def step(x):
            inner = lambda i, x: jnp.tanh(lax.psum(x, "shard"))
            return lax.scan(lambda x, _: (lax.fori_loop(2, 9, inner, x), None), x, length=3)[0]

        program = read_step(step, mesh)
        assert program.count("all-reduce", "shard") == 3 * 7
        assert [(loop.depth, loop.trips, loop.runs) for loop in program.loops] == [(1, 3, 3), (2, 7, 21)]

    def test_a_loop_of_unknown_length_raises_when_summed(self, mesh):
        def step(x):
            more = lambda x: lax.psum(x[0, 0], "shard") < 9.0
            x = lax.while_loop(more, lambda x: x + lax.psum(x, "replica"), x)
            return lax.all_gather(x, "shard", tiled=True)

        program = read_step(step, mesh)
        assert program.count("all-gather") == 1
        sums = program.select("all-reduce")  # one in the body, one in the condition
        assert [(c.axes, c.runs) for c in sums] == [(("replica",), None), (("shard",), None)]
        with pytest.raises(ValueError, match="as often as data say.*Select around it"):
            program.count()
        with pytest.raises(ValueError, match="cannot be summed"):
            program.received_bytes("all-reduce", "shard")

    def test_branches_of_a_conditional_are_marked(self, mesh):
        def step(x):
            y = lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "shard"), lambda x: 2 * x, x)
            return y + lax.psum(x, "replica")

        program = read_step(step, mesh)
        assert {c.axes: (c.runs, c.is_conditional) for c in program.collectives} == {
            ("shard",): (1, True), ("replica",): (1, False)}

    def test_exchanges_count_what_arrives(self, mesh):
        def step(x):
            ring = lax.ppermute(x, "shard", [(i, (i + 1) % 4) for i in range(4)])
            return ring + lax.all_to_all(x, "shard", 0, 1, tiled=True).reshape(x.shape)

        program = read_step(step, mesh)
        assert program.received_bytes("collective-permute", "shard") == ARRAY
        assert program.received_bytes("all-to-all", "shard") == ARRAY * 3 // 4

    def test_sums_and_scatters_on_one_mesh(self, mesh):
        def step(x):
            return lax.psum_scatter(x, ("replica", "shard"), tiled=True) + lax.psum(x, "shard")[:8]

        program = read_step(step, mesh)
        assert program.received_bytes("reduce-scatter", ("replica", "shard")) == ARRAY * 7 // 8
        assert program.received_bytes("all-reduce", "shard") == 2 * ARRAY * 3 // 4


class TestAxes:
    def test_an_axis_of_size_one_is_left_out(self):
        program = read_step(lambda x: lax.psum(x, ("replica", "shard")), make_mesh(1, 8))
        assert [c.axes for c in program.collectives] == [("shard",)]
        assert program.count(axes=("replica", "shard")) == program.count(axes="shard") == 1
        assert program.count(axes="replica") == 0

    def test_a_device_alone_does_not_communicate(self):
        mesh = make_mesh(1, 8)
        alone = lambda x: lax.psum(lax.ppermute(x, "replica", [(0, 0)]), "replica")
        step = lower(lambda x: alone(x) + lax.psum(x, "shard"), mesh, ((64, 8), jnp.float32, WHOLE))
        assert [c.axes for c in audit.lowered_collectives(step, mesh)] == [("shard",)]
        assert [c.axes for c in audit.read(step.compile(), mesh).collectives] == [("shard",)]

    @pytest.mark.parametrize("axis", ["replica", "shard"])
    def test_positions_not_device_ids_decide(self, axis):
        mesh = make_mesh(order=[3, 1, 7, 0, 2, 6, 5, 4])
        program = read_step(lambda x: lax.psum(x, axis), mesh)
        assert [c.axes for c in program.collectives] == [(axis,)]

    def test_a_partitioner_s_groups_are_named_too(self, mesh):
        arrays = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
                  for spec in (P(None, "shard"), P("shard", None))]
        step = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("replica")))
        program = audit.read(step.lower(*arrays).compile(), mesh)
        assert [(c.kind, c.axes) for c in program.collectives] == [("all-reduce", ("shard",))]

    def test_part_of_an_axis_has_no_name(self, mesh):
        pairs = [[0, 1], [2, 3]]
        program = read_step(lambda x: lax.psum(x, "shard", axis_index_groups=pairs), mesh)
        (pair_sum,) = program.collectives
        assert pair_sum.axes == audit.UNNAMED and pair_sum.group_size == 2
        assert program.count(axes=audit.UNNAMED) == 1 and program.count(axes="shard") == 0

    def test_questions_with_unknown_names_are_refused(self, program):
        with pytest.raises(ValueError, match=r"no axis \['data'\]. Its axes are \['replica', 'shard'\]"):
            program.count(axes="data")
        with pytest.raises(ValueError, match="unknown kind of collective 'gather'. Known are all-gather"):
            program.count("gather")


class TestLowered:
    def test_wire_dtypes_are_those_asked_for(self, lowered, mesh):
        found = {(c.kind, c.dtype, c.axes) for c in audit.lowered_collectives(lowered, mesh)}
        assert found == {("all-gather", "bfloat16", ("shard",)), ("reduce-scatter", "float32", ("shard",)),
                         ("all-reduce", "float32", ("replica",)),
                         ("all-reduce", "float32", ("replica", "shard"))}

    def test_the_cpu_widens_bf16(self, program):
        assert {c.dtype for c in program.collectives} == {"float32"}

    def test_every_kind_and_dtype_is_read(self, mesh):
        def step(x):
            return (lax.all_gather(x.astype(jnp.float8_e4m3fn), "replica", tiled=True),
                    lax.all_to_all(x > 0, "shard", 0, 1, tiled=True),
                    lax.ppermute(x.astype(jnp.int8), "shard", [(0, 1)]),
                    lax.psum(x.astype(jnp.uint32), "replica"))

        asked = audit.lowered_collectives(lower(step, mesh, ((4, 8), jnp.float32, WHOLE)), mesh)
        found = [(c.kind, c.dtype, c.axes, c.operands[0].shape) for c in asked]
        assert found == [("all-gather", "float8_e4m3fn", ("replica",), (4, 8)),
                         ("all-to-all", "bool", ("shard",), (4, 8)),
                         ("collective-permute", "int8", ("shard",), (4, 8)),
                         ("all-reduce", "uint32", ("replica",), (4, 8))]

    def test_payloads_are_whole_arrays(self, lowered, mesh):
        asked = audit.lowered_collectives(lowered, mesh)
        sizes = {c.kind: c.payload_bytes() for c in asked if c.axes == ("shard",)}
        assert sizes == {"all-gather": 2 * WEIGHT, "reduce-scatter": 4 * WEIGHT}


def test_memory_counts_donated_arguments_once(compiled):
    memory = audit.memory(compiled)
    weights = LAYERS * WEIGHT  # of 4 bytes, on 4 shards
    assert memory.argument == weights + 2 * ROWS * WIDTH
    assert memory.alias == weights and memory.output >= weights + 4
    assert memory.temp >= 2 * LAYERS * ROWS * WIDTH  # what the forward pass saves
    assert memory.needed == memory.argument + memory.output - memory.alias + memory.temp


# Spelled as in steps compiled for 2x4 H100 with JAX 0.10.2 and 0.12.0.1; put together by hand so that each
# holds every case, with most attributes cut.
GPU_0_10 = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%dot_computation (p0: bf16[512,1024], p1: bf16[1024,2048]) -> bf16[512,2048] {
  %p0 = bf16[512,1024]{1,0} parameter(0)
  %p1 = bf16[1024,2048]{1,0} parameter(1)
  ROOT %dot.1 = bf16[512,2048]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wide_computation (p2: bf16[512,1024], p3: bf16[1024,2048]) -> f32[512,2048] {
  %p2 = bf16[512,1024]{1,0} parameter(0)
  %p3 = bf16[1024,2048]{1,0} parameter(1)
  ROOT %dot.2 = f32[512,2048]{1,0} dot(%p2, %p3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%transpose_computation (p4: bf16[1024,2048]) -> bf16[2048,1024] {
  %p4 = bf16[1024,2048]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[2048,1024]{1,0} transpose(%p4), dimensions={1,0}
}

%transpose_add_computation (p6: bf16[1024,2048]) -> bf16[2048,1024] {
  %p6 = bf16[1024,2048]{1,0} parameter(0)
  %transpose.2 = bf16[2048,1024]{1,0} transpose(%p6), dimensions={1,0}
  ROOT %add.2 = bf16[2048,1024]{1,0} add(%transpose.2, %transpose.2)
}

%body (param: (s32[], bf16[512,1024], bf16[1024,2048])) -> (s32[], bf16[512,1024], bf16[1024,2048]) {
  %param = (s32[], bf16[512,1024]{1,0}, /*index=2*/bf16[1024,2048]{1,0}) parameter(0)
  %x = bf16[512,1024]{1,0} get-tuple-element(%param), index=1
  %w = bf16[1024,2048]{1,0} get-tuple-element(%param), index=2
  %a = bf16[256,2048]{1,0} fusion(%w), kind=kLoop, calls=%slice_computation
  %b = f32[512]{0} fusion(%w), kind=kLoop, calls=%slice_computation
  %all-gather-start = ((bf16[256,2048]{1,0}, f32[512]{0}), (bf16[1024,2048]{1,0}, f32[2048]{0}))\
 all-gather-start(%a, %b), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0},\
 metadata={op_name="jit(step)/while/body/all_gather"},\
 backend_config={"collective_backend_config":{"is_sync":false,"backend":"DEFAULT"}}
  %gemm.1 = bf16[512,2048]{1,0} fusion(%x, %w), kind=kCustom, calls=%dot_computation
  %gemm.2 = f32[512,2048]{1,0} fusion(%x, %w), kind=kCustom, calls=%wide_computation
  %all-gather-done = (bf16[1024,2048]{1,0}, f32[2048]{0}) all-gather-done(%all-gather-start)
  %next = bf16[1024,2048]{1,0} get-tuple-element(%all-gather-done), index=0
  %reduce-scatter-start = (bf16[1024,2048]{1,0}, bf16[256,2048]{1,0}) reduce-scatter-start(%w),\
 channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add,\
 backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}
  %gemm.3 = bf16[512,2048]{1,0} fusion(%x, %w), kind=kCustom, calls=%dot_computation
  %reduce-scatter-done = bf16[256,2048]{1,0} reduce-scatter-done(%reduce-scatter-start)
  %copy.1 = bf16[1024,2048]{1,0} copy(%next)
  %turned = bf16[2048,1024]{1,0} fusion(%next), kind=kLoop, calls=%transpose_computation
  %doubled = bf16[2048,1024]{1,0} fusion(%next), kind=kLoop, calls=%transpose_add_computation
  ROOT %out = (s32[], bf16[512,1024]{1,0}, bf16[1024,2048]{1,0}) tuple(%i, %x, %copy.1)
}

%slice_computation (p5: bf16[1024,2048]) -> bf16[256,2048] {
  %p5 = bf16[1024,2048]{1,0} parameter(0)
  ROOT %slice.1 = bf16[256,2048]{1,0} slice(%p5), slice={[0:256], [0:2048]}
}

%condition (param.1: (s32[], bf16[512,1024], bf16[1024,2048])) -> pred[] {
  %param.1 = (s32[], bf16[512,1024]{1,0}, bf16[1024,2048]{1,0}) parameter(0)
  ROOT %less = pred[] fusion(%param.1), kind=kLoop, calls=%slice_computation
}

ENTRY %main (arg: (s32[], bf16[512,1024], bf16[1024,2048])) -> bf16[512,2048] {
  %arg = (s32[], bf16[512,1024]{1,0}, bf16[1024,2048]{1,0}) parameter(0)
  %while.1 = (s32[], bf16[512,1024]{1,0}, bf16[1024,2048]{1,0}) while(%arg), condition=%condition,\
 body=%body, backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"2"}}
  %x.1 = bf16[512,1024]{1,0} get-tuple-element(%while.1), index=1
  %w.1 = bf16[1024,2048]{1,0} get-tuple-element(%while.1), index=2
  %copy.9 = bf16[1024,2048]{1,0} copy(%w.1)
  ROOT %cublas = (bf16[512,2048]{1,0}, s8[4194304]{0}) custom-call(%x.1, %w.1),\
 custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""

GPU_0_12 = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_psum.clone (param_0: f32[]) -> f32[] {
  %param_0 = f32[] parameter(0)
  ROOT %psum.1 = f32[] all-reduce(%param_0), channel_id=1,\
 replica_groups=mesh['replica'=2,'shard'=4] {'replica','shard'}, to_apply=%add,\
 backend_config={"collective_backend_config":{"is_sync":false,"backend":"DEFAULT"}}
}

%async_computation (param_1: bf16[1024,2048]) -> bf16[256,2048] {
  %param_1 = bf16[1024,2048]{1,0} parameter(0)
  ROOT %reduce-scatter.2 = bf16[256,2048]{1,0} reduce-scatter(%param_1), channel_id=2,\
 replica_groups=mesh['replica'=2,'shard'=4] {'shard'}, dimensions={0}, to_apply=%add
}

%dot_computation (p0: bf16[512,1024], p1: bf16[1024,2048]) -> bf16[512,2048] {
  %p0 = bf16[512,1024]{1,0} parameter(0)
  %p1 = bf16[1024,2048]{1,0} parameter(1)
  ROOT %dot.1 = bf16[512,2048]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[512,1024], w: bf16[1024,2048], loss: f32[], f: f32[512,512]) -> bf16[512,2048] {
  %x = bf16[512,1024]{1,0} parameter(0)
  %w = bf16[1024,2048]{1,0} parameter(1)
  %loss = f32[] parameter(2)
  %f = f32[512,512]{1,0} parameter(3)
  %true-f32 = f32[512,512]{1,0} dot(%f, %f), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %fusion-start = ((f32[]), f32[]) fusion-start(%loss), kind=kCustom, calls=%fused_psum.clone,\
 backend_config={"fusion_backend_config":{"kind":"__triton_collective"}}
  %async-start = ((bf16[1024,2048]{1,0}), bf16[256,2048]{1,0}, s32[]) async-start(%w),\
 calls=%async_computation
  %gemm.1 = bf16[512,2048]{1,0} fusion(%x, %w), kind=kCustom, calls=%dot_computation
  %fusion-done = f32[] fusion-done(%fusion-start)
  %gemm.2 = bf16[512,2048]{1,0} fusion(%x, %w), kind=kCustom, calls=%dot_computation
  %async-done = bf16[256,2048]{1,0} async-done(%async-start), calls=%async_computation
  %reduce-scatter.3 = (bf16[256,2048]{1,0}, bf16[128,1024]{1,0}) reduce-scatter(%w, %x), channel_id=3,\
 replica_groups=mesh['replica'=2,'shard'=4] {'shard'}, dimensions={0}, to_apply=%add,\
 backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}
  %all-reduce-start = ((bf16[1024,2048]{1,0}), bf16[1024,2048]{1,0}) all-reduce-start(%w), channel_id=4,\
 replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}, to_apply=%add,\
 backend_config={"collective_backend_config":{"is_sync":false,"backend":"DEFAULT"}}
  %all-reduce-done = bf16[1024,2048]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %gemm.3 = bf16[512,2048]{1,0} fusion(%x, %w), kind=kCustom, calls=%dot_computation
}
"""

GEMM = 2 * 512 * 1024 * 2048


@pytest.fixture(scope="module")
def old():
    return audit.read(GPU_0_10, AbstractMesh((2, 4), ("replica", "shard")))


@pytest.fixture(scope="module")
def new():
    return audit.read(GPU_0_12, AbstractMesh((2, 4), ("replica", "shard")))


class TestGpuText:
    def test_a_start_and_its_done_are_one(self, old):
        assert [(c.kind, c.axes, c.runs) for c in old.collectives] == [
            ("all-gather", ("shard",), 6), ("reduce-scatter", ("shard",), 6)]
        assert old.collectives[0].op_name == "jit(step)/while/body/all_gather"

    def test_a_combined_gather_keeps_its_arrays_apart(self, old):
        (gather,) = old.select("all-gather")
        assert gather.operands == (("bfloat16", (256, 2048)), ("float32", (512,)))
        assert gather.dtype == "mixed"
        assert gather.payload_bytes() == 2 * 1024 * 2048 + 4 * 2048
        assert old.received_bytes("all-gather", dtype="float32") == 6 * 4 * 2048 * 3 // 4

    def test_work_between_start_and_done_covers_it(self, old):
        gather, scatter = old.collectives
        assert (gather.is_sync, gather.matmul_flops) == (False, 2 * GEMM)
        assert (scatter.is_sync, scatter.matmul_flops) == (True, 0)

    def test_a_condition_runs_once_more_than_its_body(self, old):
        assert old.runs == {"main": 1, "body": 6, "condition": 7}

    def test_flops_include_cublas_and_trips(self, old):
        assert old.matmul_flops == (6 * 3 + 1) * GEMM

    def test_copies_in_loop_bodies_are_found(self, old):
        assert [(c.name, c.bytes, c.runs) for c in old.copies(1 << 20)] == [
            ("copy.1", 4 << 20, 6), ("turned", 4 << 20, 6)]
        assert old.copies((4 << 20) + 1) == []

    def test_matmuls_that_xla_prices_wrong_are_found(self, old, new):
        assert old.widening_matmuls == [("body", "gemm.2")]
        assert new.widening_matmuls == []

    def test_wrapped_collectives_count_once(self, new):
        assert [(c.kind, c.axes) for c in new.collectives] == [
            ("all-reduce", ("replica", "shard")), ("reduce-scatter", ("shard",)),
            ("reduce-scatter", ("shard",)), ("all-reduce", ("replica",))]
        assert [c.matmul_flops for c in new.collectives] == [GEMM, 2 * GEMM, 0, 0]
        assert [c.is_sync for c in new.collectives] == [False, False, True, False]
        assert [len(c.operands) for c in new.collectives] == [1, 1, 2, 1]
