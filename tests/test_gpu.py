"""Described GPUs: what can be checked without compiling, and one step compiled for them."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.audit import gpu
from jfsdp.audit import program as audit

LAYERS, WIDTH, ROWS = 6, 1024, 2048


def prefetching_step(mesh, layers=LAYERS):
    """A target for `compile_ahead`: a forward pass whose layers are gathered in bf16, one ahead."""

    def gather(weights, i):
        w = lax.dynamic_index_in_dim(weights, i, keepdims=False)
        return lax.all_gather(w.astype(jnp.bfloat16), "shard", tiled=True)

    def step(weights, x):
        def layer(carry, i):
            x, w = carry
            return (jnp.tanh(x @ w), gather(weights, jnp.minimum(i + 1, layers - 1))), None

        (x, _), _ = lax.scan(layer, (x, gather(weights, 0)), jnp.arange(layers))
        return lax.psum(jnp.sum(x.astype(jnp.float32)), ("replica", "shard"))

    cut, batch = P(None, "shard"), P(("replica", "shard"))
    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, cut))
    x = jax.ShapeDtypeStruct((mesh.size * ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, batch))
    step = jax.shard_map(step, mesh=mesh, in_specs=(cut, batch), out_specs=P(), check_vma=False)
    return jax.jit(step), (weights, x)


def failing_step(mesh):
    raise ValueError("no such model")


def aborting_step(mesh):
    """As XLA does where a check of its own fails."""
    frames = "".join(f"    @     0x7f06c55{i:05x}  xla::Frame()\n" for i in range(40))
    said = "F1130 08:16:36.311329 31256 shape.h:847] Check failed: buffer\n*** Check failure stack trace: ***\n"
    os.write(2, (said + frames).encode())
    os.abort()


needs_compiler = pytest.mark.skipif(gpu.missing_tools() is not None, reason=f"needs {gpu.missing_tools()}")


@pytest.mark.aot
@needs_compiler
class TestCompiled:
    @pytest.fixture(scope="class")
    @staticmethod
    def report():
        return gpu.compile_ahead(f"{__name__}:prefetching_step", gpu="h100", mesh="2x4")

    def test_gathers_travel_in_bf16_and_hide(self, report):
        layer = 2 * WIDTH * WIDTH
        program = report.program
        assert report.jax_version == jax.__version__ and program.is_scheduled
        received = program.received_bytes("all-gather", "shard", dtype=jnp.bfloat16)
        assert received == program.received_bytes("all-gather") == (LAYERS + 1) * layer * 3 // 4
        ahead = [c for c in program.select("all-gather") if c.runs > 1]
        assert ahead and all(not c.is_sync and c.matmul_flops > 0 for c in ahead)

    def test_double_buffering_renames_weights_instead_of_copying_them(self, report):
        plain = gpu.compile_ahead(f"{__name__}:prefetching_step", {"layers": LAYERS}, mesh="2x4", options={})
        weight = 2 * WIDTH * WIDTH
        assert [loop.trips for loop in report.program.loops] == [LAYERS // 2]
        assert [loop.trips for loop in plain.program.loops] == [LAYERS]
        assert len(plain.program.copies(weight)) > len(report.program.copies(weight)) == 0

    @pytest.mark.parametrize("name", ["a100", "rtx4090"])
    def test_gpus_before_hopper_overlap_as_well_because_it_is_asked_for(self, name):
        loops = lambda report: [c for c in report.program.select("all-gather") if c.runs > 1]
        asked = loops(gpu.compile_ahead(f"{__name__}:prefetching_step", gpu=name, mesh="2x4"))
        assert asked and all(not c.is_sync and c.matmul_flops > 0 for c in asked)
        only = {"xla_gpu_enable_while_loop_double_buffering": True}
        left = gpu.compile_ahead(f"{__name__}:prefetching_step", gpu=name, mesh="2x4", options=only)
        assert any(c.is_sync for c in loops(left))

    def test_memory_and_estimates_come_along(self, report):
        weights = LAYERS * WIDTH * WIDTH * 4 // 4  # float32, on 4 shards
        assert report.memory.argument == weights + ROWS * WIDTH * 2
        loop = report.exposed.bodies[report.program.loops[0].body]
        assert 0 <= loop.exposed_us < loop.total_us
        assert report.exposed.step_us == pytest.approx(sum(
            body.exposed_us * report.program.runs[name] for name, body in report.exposed.bodies.items()))

    def test_a_failing_target_says_why(self):
        with pytest.raises(RuntimeError, match="did not compile for 1x8 h100:(.|\n)*no such model"):
            gpu.compile_ahead(f"{__name__}:failing_step")

    def test_an_abort_is_told_by_its_cause_and_not_by_its_stack(self):
        with pytest.raises(RuntimeError, match=r"did not compile for 1x8 h100:\n(.*\n)*F1130 .*Check failed: buffer$"):
            gpu.compile_ahead(f"{__name__}:aborting_step")

    @pytest.mark.parametrize("name", gpu.GPUS)
    def test_every_description_is_understood(self, name):
        hosts = [d.process_index for d in gpu.devices(name, 16)]
        assert hosts == [0] * 8 + [1] * 8


class TestRefusals:
    def test_unknown_gpus_are_listed(self):
        with pytest.raises(ValueError, match="gpu 'v100' is not described. Known are a100, a100-40"):
            gpu.devices("v100", 8)

    def test_hosts_are_full(self):
        with pytest.raises(ValueError, match="12 GPUs do not fill hosts of 8. Use a multiple of 8"):
            gpu.devices("h100", 12)

    def test_an_absent_compiler_names_the_extra(self, monkeypatch):
        monkeypatch.setattr(gpu, "_has_module", lambda name: False)
        with pytest.raises(RuntimeError, match=r"jax-cuda12-pjrt.*pip install 'jfsdp\[aot\]'"):
            gpu.devices("h100", 8)

    @needs_compiler
    def test_jax_must_not_look_for_gpus(self):
        asked = jax.config.jax_platforms
        jax.config.update("jax_platforms", "cuda,cpu")
        try:
            with pytest.raises(RuntimeError, match="is 'cuda,cpu', so JAX would look.*Set JAX_PLATFORMS=cpu"):
                gpu.devices("h100", 8)
        finally:
            jax.config.update("jax_platforms", asked)


def asked_for(capability, kind=""):
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=kind)
    return {name.removeprefix("xla_gpu_enable_") for name, is_on in gpu.compiler_options(device).items() if is_on}


def test_only_gpus_get_options():
    assert gpu.compiler_options(jax.devices()[0]) == {}
    assert asked_for("9.0") == {"while_loop_double_buffering", "latency_hiding_scheduler"}


class TestAnalyticalEstimator:
    """It helps one GPU, hurts others, and makes XLA abort on some: Note [Analytical estimator]."""

    def test_an_a100_with_nvlink_gets_it_where_xla_survives_it(self, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
        assert asked_for("8.0", gpu.GPUS["a100"].name) - asked_for("9.0") == {"analytical_latency_estimator"}
        monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
        assert asked_for("8.0", gpu.GPUS["a100"].name) == asked_for("9.0")

    @pytest.mark.parametrize(("capability", "kind"), [
        ("8.0", "NVIDIA A100 80GB PCIe"), ("8.6", "NVIDIA GeForce RTX 3090"), ("8.9", "NVIDIA GeForce RTX 4090"),
        ("9.0", "NVIDIA H100 80GB HBM3"), ("10.0", "NVIDIA B200"), ("7.0", "Tesla V100-SXM2-32GB")])
    def test_no_other_gets_it(self, capability, kind, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
        assert asked_for(capability, kind) == asked_for("9.0")


# Trimmed from what XLA writes for 4x8 H100 with JAX 0.12.0.1.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} custom-call(), custom_call_target="x"
  %sum = f32[8]{0} all-reduce(%x), replica_groups=[4,8]<=[32], to_apply=%add
  ROOT %p = (s32[], f32[8]{0}) parameter(0)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] custom-call(%q), custom_call_target="less"
}

ENTRY %main (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]{0}) parameter(0)
  %a = bf16[1024,1024]{1,0} custom-call(), custom_call_target="a"
  %dot = f32[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all = f32[8]{0} all-reduce(%dot), replica_groups={}, to_apply=%add
  ROOT %while = (s32[], f32[8]{0}) while(%arg), condition=%condition, body=%body,\
 backend_config={"known_trip_count":{"n":"10"}}
}
"""


def statistics(computation, wasted, total, module="jit_step", before=""):
    at = "I1129 17:05:23.382641    4259 latency_hiding_scheduler.cc:4614]"
    return (f"{at} [latency-hiding-scheduler] Statistics after scheduling:\n{before}"
            f"{at} For computation: {computation}, module {module}(1)\n{at} Total wasted cycles: {wasted}\n"
            f"{at} Wasted cycles for all-reduce: 0\n{at} Wasted cycles for all-gather: {wasted}\n"
            f"{at} Total cycles: {total}\n{at} Memory pressure peak (bytes): 77594796\n")


ESTIMATOR = "I1129 17:05:20.490172    4186 gpu_hlo_schedule.cc:536] Using unified latency estimator\n"
UNPRICED = ("I1129 17:05:23.382501    4259 sol_latency_estimator.cc:523] Failed to compute collective time: "
            "NOT_FOUND: Cannot find key for instr: %psum.21.1 = f32[4,256]{1,0} all-reduce(%p)\n")


class TestEstimates:
    @pytest.fixture
    def program(self):
        return audit.read(PROGRAM, AbstractMesh((4, 8), ("replica", "shard")))

    def test_bodies_add_up_by_their_runs(self, program):
        log = ESTIMATOR + statistics("body", 2.5, 100) + statistics("main", 1e3, 4.2e3)
        estimate = gpu.exposed(log, program)
        assert estimate.bodies["body"] == (2.5, 100, {"all-gather": 2.5}, ())
        assert estimate.step_us == 10 * 2.5 + 1000

    def test_the_last_schedule_of_a_computation_counts(self, program):
        assert gpu.exposed(statistics("body", 9, 100) + statistics("body", 1, 100), program).step_us == 10

    def test_other_modules_are_left_out(self, program):
        estimate = gpu.exposed(ESTIMATOR + statistics("main", 7, 9, module="loop_fusion"), program)
        assert estimate.bodies == {} and estimate.step_us == 0
        assert "no estimate for this program" in estimate.warnings[0] and estimate.is_void()

    def test_one_device_has_nothing_to_estimate(self):
        alone = audit.read(PROGRAM.replace("all-reduce", "negate"), AbstractMesh((1, 1), ("replica", "shard")))
        estimate = gpu.exposed("", alone)
        assert estimate.warnings == () and not estimate.is_void() and estimate.step_us == 0

    def test_placeholder_prices_are_void(self, program):
        log = ESTIMATOR + statistics("body", 5000, 5100, before=UNPRICED)
        estimate = gpu.exposed(log, program)
        assert estimate.bodies["body"].unpriced == ("psum.21.1",)
        (warning,) = estimate.warnings
        assert warning.startswith("void: body has 1 operations at a placeholder price of 5,000 us (psum.2")

    def test_mispriced_matmuls_are_void(self, program):
        (warning,) = gpu.exposed(ESTIMATOR + statistics("main", 0, 9), program).warnings
        assert warning.startswith("void: main has 1 bf16 x bf16 -> f32 matmuls (dot) that XLA prices")

    def test_what_holds_no_collective_cannot_be_void(self, program):
        log = ESTIMATOR + statistics("condition", 0, 5100, before=UNPRICED)
        assert gpu.exposed(log, program).warnings == ()

    def test_figures_without_the_cost_model_are_not_microseconds(self, program):
        assert "not microseconds" in gpu.exposed(statistics("body", 0, 9), program).warnings[0]

    def test_a_step_that_does_not_fit_says_so(self, program):
        said = "Can't reduce memory use below 60.05GiB (64477796 bytes) by rematerialization"
        log = ESTIMATOR + statistics("body", 0, 9) + f"W1129 hlo_rematerialization.cc:3204] {said}\n"
        assert gpu.exposed(log, program).warnings == (f"the step does not fit the GPU: {said}",)
