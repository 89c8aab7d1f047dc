"""GPUs that are not there: describe them, compile a step for them, read what XLA's scheduler thinks of it.

Owns the descriptions, the child process in which such a step is compiled, and the scheduler's log. The
program that comes out is read by `program.py`. Nothing here runs a step: memory, collectives and their order
are what GPUs would get; microseconds are XLA's cost model, to be named so wherever they are shown.

Note [One child per compile]
    The scheduler writes its estimates to the C stderr, and some options exist only as XLA_FLAGS, which are
    read once per process. So `compile_ahead` starts a Python that compiles one step and leaves its text in
    a folder.

Note [Network]
    Left alone, the estimator does not know that a mesh spans hosts. It is told the GPUs of a host and
    `nic_gbps=200`: at 400, the rate of the network cards of such hosts, it prices an all-reduce over hosts
    at 104 GB/s per GPU, twice what one card can carry; at 200 it comes out right.

Note [Options]
    What XLA's options do to the step of Llama-3-8B, 1 sequence of 4096 tokens per H100, with clipping. MiB needed, and
    microseconds of a step that XLA's cost model exposes; loop bodies expose less than 5 unless named. Without double
    buffering loops copy 18 GiB a step (with it 3; 0.10.2):

                                                    0.10.2 1x8       0.10.2 4x8       0.12.0.1 1x8
        double buffering (what we ask for)          18,393  1,245    18,384  8,886    18,054  1,661
        none                                        18,208  1,675                     18,152  2,590
        and two collectives at a time               18,456    162    18,604  3,637    18,110    242
        and one operation per unit (thresholds)     18,782  2,781
        and no combining (thresholds of 1 byte)     18,374  2,183, 49 in each forward body
        and the latency-hiding scheduler by name    as without: it is on for Hopper and later

    Two collectives at a time (`xla_gpu_experimental_parallel_collective_overlap_limit`) look best and are not asked
    for: the model seems to give each of the two the whole link, which one host's do not have, so only a run can tell.
    On A100 and RTX 4090 the scheduler has to be named (both versions): a 1B model on two RTX 4090 without it blocks in
    every collective of its loops.
    Double buffering also unrolls the loop over micro-batches by two and makes room for the next one's activations
    early: a 1B model needs 4,066 MiB with 4 of them and 3,760 with one (0.10.2, 1x8).

Note [Analytical estimator]
    The scheduler knows what a collective takes on Hopper and Blackwell only. Elsewhere each counts as five matmuls of
    cuBLAS, and one of Triton's as nothing, so that some block. `xla_gpu_enable_analytical_latency_estimator` prices
    kernels one by one and every gather at 5 us: too little, but enough to start it beside a matmul. Exposed of all ms,
    by our replay, and how many collectives of 1 MiB and more block in loop bodies (0.10.2, 4096 tokens a sequence):

                                             without                         with
        8B, 1x8 A100 SXM                     18,613 MiB,  89 of 1,404 ms, 4  18,601 MiB,  37 of 1,352 ms, 0
        8B of 6 layers, 1x8 A100 SXM          7,038 MiB,  21 of 335 ms, 4     6,966 MiB,   8 of 322 ms, 0
            without Triton's matmuls          6,605 MiB,  17 of 335 ms, 2     6,598 MiB,   7 of 324 ms, 0
            two sequences                     8,813 MiB,  22 of 634 ms, 4     8,672 MiB,  12 of 624 ms, 0
            prefetch 0, not late              5,954 MiB,  19 of 334 ms, 6     5,852 MiB,   6 of 322 ms, 0
            4x8                               6,918 MiB,  88 of 403 ms, 4     6,804 MiB,  76 of 391 ms, 0
            1x8, replayed at PCIe's rates             710 of 1,024 ms                 759 of 1,073 ms
        1B, 1x8 A100 SXM                      4,248 MiB,  18 of 271 ms, 0     4,244 MiB,  14 of 267 ms, 0
        8B of 6 layers, 1x8 H100              6,742 MiB,   2 of 146 ms, 0     6,808 MiB,   7 of 150 ms, 0
        1B of 6 layers, 1x2 RTX 4090          7,639 MiB, 229 of 488 ms, 0     8,272 MiB, 317 of 576 ms, 0
        1B of 6 layers, 1x8 RTX 4090          2,811 MiB, 532 of 778 ms, 0     3,029 MiB, 588 of 834 ms, 0
        8B of 6 layers, 1x8 B200              XLA aborts: Unhandled primitive type 13
        8B on A100, 1B on RTX 4090, 0.12.0.1  XLA aborts: Check failed: buffer != nullptr

    So it is asked for on an A100 with NVLink, before JAX 0.11. Since an abort cannot be caught, 46 programs were
    compiled so: the memory grid of benchmarks/plan_accuracy.py but for 70B and 16 GPUs or more over hosts, evaluation,
    Adafactor, Muon, averaged weights. `train_step(options=...)` takes it back.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from jfsdp.audit import program as audit
from jfsdp.mesh import REPLICA, SHARD, make_mesh, parse_mesh


class Gpu(NamedTuple):
    """What XLA's cost models and limits ask about a GPU; from data sheets."""

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_per_core: int
    shared_per_block: int
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth: int
    clock_ghz: float
    links: int
    bf16_flops: float
    """Dense peak; not part of the description."""


GPUS: dict[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), cores=108, fpus_per_core=64, shared_per_core=167936,
                shared_per_block=166912, l2_bytes=40 << 20, memory_bytes=85_100_068_864,
                memory_bandwidth=2_039_040_000_000, clock_ghz=1.41, links=12, bf16_flops=312e12),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), cores=108, fpus_per_core=64, shared_per_core=167936,
                   shared_per_block=166912, l2_bytes=40 << 20, memory_bytes=42_331_013_120,
                   memory_bandwidth=1_555_200_000_000, clock_ghz=1.41, links=12, bf16_flops=312e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), cores=132, fpus_per_core=128, shared_per_core=233472,
                shared_per_block=232448, l2_bytes=50 << 20, memory_bytes=84_942_979_072,
                memory_bandwidth=3_352_320_000_000, clock_ghz=1.98, links=18, bf16_flops=989e12),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", (9, 0), cores=132, fpus_per_core=128, shared_per_core=233472,
                shared_per_block=232448, l2_bytes=50 << 20, memory_bytes=151_397_597_184,
                memory_bandwidth=4_800_000_000_000, clock_ghz=1.98, links=18, bf16_flops=989e12),
    "b200": Gpu("NVIDIA B200", (10, 0), cores=148, fpus_per_core=128, shared_per_core=233472,
                shared_per_block=232448, l2_bytes=132_644_864, memory_bytes=191_514_411_008,
                memory_bandwidth=7_672_320_000_000, clock_ghz=1.965, links=18, bf16_flops=2250e12),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), cores=128, fpus_per_core=128, shared_per_core=102400,
                   shared_per_block=101376, l2_bytes=72 << 20, memory_bytes=25_393_692_672,
                   memory_bandwidth=1_008_096_000_000, clock_ghz=2.52, links=0, bf16_flops=165e12),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), cores=82, fpus_per_core=128, shared_per_core=102400,
                   shared_per_block=101376, l2_bytes=6 << 20, memory_bytes=25_300_000_000,
                   memory_bandwidth=936_096_000_000, clock_ghz=1.695, links=0, bf16_flops=71e12),
    "l40s": Gpu("NVIDIA L40S", (8, 9), cores=142, fpus_per_core=128, shared_per_core=102400,
                shared_per_block=101376, l2_bytes=96 << 20, memory_bytes=47_700_000_000,
                memory_bandwidth=864_000_000_000, clock_ghz=2.52, links=0, bf16_flops=362e12),
}


def compiler_options(device: Any) -> dict[str, Any]:
    """What jfsdp asks of XLA for a step on such devices, there or described, to be passed per compile.

    Nothing on a CPU. Double buffering unrolls each loop by two, so that gathered weights which the loop carries change
    names instead of being copied. It also doubles what a loop with a large carry needs. The latency-hiding scheduler
    is on by itself for Hopper and later only; without it an A100 or a GeForce blocks in every collective. For what an
    A100 gets see Note [Analytical estimator].
    """
    if device.platform != "gpu":
        return {}
    options = {"xla_gpu_enable_while_loop_double_buffering": True, "xla_gpu_enable_latency_hiding_scheduler": True}
    if device.compute_capability == "8.0" and "SXM" in device.device_kind and jax.__version_info__ < (0, 11):
        options["xla_gpu_enable_analytical_latency_estimator"] = True
    return options


def devices(gpu: str, count: int, *, per_host: int = 8) -> list[Any]:
    """Described GPUs to make a mesh from and to compile for; nothing can run on them.

    Raises: ValueError for a GPU that is not described; RuntimeError where the compiler is not installed, or
    where JAX would look for real GPUs.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu {gpu!r} is not described. Known are {', '.join(GPUS)}.")
    if count > per_host and count % per_host:
        raise ValueError(f"{count} GPUs do not fill hosts of {per_host}. Use a multiple of {per_host}.")
    if missing := missing_tools():
        raise RuntimeError(f"compiling for GPUs without one needs {missing}: pip install 'jfsdp[aot]'.")
    if jax.config.jax_platforms != "cpu":
        raise RuntimeError(
            f"JAX_PLATFORMS is {jax.config.jax_platforms!r}, so JAX would look for real GPUs. Set "
            "JAX_PLATFORMS=cpu before it starts; the GPU compiler works beside it.")
    hosts, each = max(1, count // per_host), min(count, per_host)
    return topologies.get_topology_desc(platform="cuda", topology_name="", topology=f"1x{hosts}x{each}",
                                        target_config=_description(GPUS[gpu])).devices


def missing_tools() -> str | None:
    """Which part of the GPU compiler is not installed, in words; None if all is there."""
    if not any(_has_module(f"jax_plugins.xla_cuda{v}") for v in (12, 13)):
        return "XLA's GPU compiler (jax-cuda12-pjrt or jax-cuda13-pjrt)"
    if not (shutil.which("ptxas") or Path("/usr/local/cuda/bin/ptxas").exists()
            or _has_module("nvidia.cuda_nvcc") or _has_module("nvidia.cu13")):
        return "ptxas (nvidia-cuda-nvcc-cu12 or nvidia-cuda-nvcc)"
    return None


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step compiled for described GPUs."""

    gpu: str
    program: audit.Program
    memory: audit.Memory
    exposed: Exposed
    jax_version: str
    lower_seconds: float
    compile_seconds: float
    text: str
    """The optimised HLO."""


class BodyEstimate(NamedTuple):
    """One execution of a computation, loops inside it left out."""

    exposed_us: float
    total_us: float
    by_kind: Mapping[str, float]
    """What is exposed, by kind of collective."""
    unpriced: tuple[str, ...]
    """Operations that XLA could not price; each took a placeholder of 5,000 us."""


class Exposed(NamedTuple):
    """XLA's estimate of communication that nothing hides: by computation, and summed over a step."""

    bodies: Mapping[str, BodyEstimate]
    step_us: float
    warnings: tuple[str, ...]
    """Why some of it must not be believed."""

    def is_void(self, body: str | None = None) -> bool:
        """Whether figures of a computation, or of the whole step, must not be shown."""
        start = "void: " if body is None else (f"void: {body} has ", _NO_TIME)
        return any(w.startswith(start) for w in self.warnings)


_NO_TIME = "void: XLA has no analytical estimator for this GPU"
"""How a warning begins that holds for every computation."""


def compile_ahead(target: str, arguments: Mapping[str, Any] | None = None, *, gpu: str = "h100",
                  mesh: str = "1x8", options: Mapping[str, Any] | None = None, per_host: int = 8,
                  nic_gbps: int = 200, timeout: float = 900) -> Report:
    """Compile a step for described GPUs in a child process; see Note [One child per compile].

    target: `module:function`, importable from here; `function(mesh, **arguments)` returns the jitted step and
        the abstract arguments to lower it with, shardings included.
    arguments: whatever JSON can carry.
    options: per-compile XLA options; None means `compiler_options` of that GPU.
    nic_gbps: see Note [Network].
    Raises: RuntimeError with the child's own words when it fails.
    """
    request = dict(target=target, arguments=arguments or {}, gpu=gpu, mesh=mesh, options=options, per_host=per_host)
    replicas, shards = parse_mesh(mesh, 8)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(json.dumps(request))
        child = subprocess.run([sys.executable, "-c", f"from jfsdp.audit.gpu import _child; _child({folder!r})"],
                               env=_environment(replicas * shards, per_host, nic_gbps), timeout=timeout,
                               capture_output=True, text=True)
        if child.returncode:
            said = [x for x in child.stderr.splitlines() if not re.match(r"[IW]\d{4} |\*{3} Check failure|    @ ", x)]
            raise RuntimeError(f"{target} did not compile for {mesh} {gpu}:\n" + "\n".join(said[-30:]))
        figures = json.loads(Path(folder, "figures.json").read_text())
        text = Path(folder, "program.txt").read_text()
    program = audit.read(text, AbstractMesh((replicas, shards), (REPLICA, SHARD)))
    return Report(gpu=gpu, program=program, memory=audit.Memory(*figures["memory"]), text=text,
                  exposed=exposed(child.stderr, program), jax_version=figures["jax"],
                  lower_seconds=figures["lower_seconds"], compile_seconds=figures["compile_seconds"])


def exposed(log: str, program: audit.Program) -> Exposed:
    """What the scheduler wrote about a program: `log` is the stderr of the process that compiled it."""
    bodies = {}
    for block in log.split("Statistics after scheduling:")[1:]:
        place = re.search(r"For computation: ([\w.\-]+), module ([\w.\-]+)", block)
        if place and place[2] == program.name and program.runs.get(place[1]) is not None:
            wait, total = (re.search(rf"Total {w}: (\S+)", block)[1] for w in ("wasted cycles", "cycles"))
            kinds = re.findall(r"Wasted cycles for ([\w\- ]+): (\S+)", block)
            failed = re.findall(r"Failed to compute collective time.*?%([\w.\-]+) =", block[:place.start()])
            bodies[place[1]] = BodyEstimate(
                exposed_us=float(wait), total_us=float(total), unpriced=tuple(dict.fromkeys(failed)),
                by_kind={kind: float(us) for kind, us in kinds if float(us)})
    step_us = sum(body.exposed_us * program.runs[name] for name, body in bodies.items())
    return Exposed(bodies, step_us, tuple(_doubts(log, bodies, program)))


def _doubts(log: str, bodies: Mapping[str, BodyEstimate], program: audit.Program) -> Iterator[str]:
    """The known ways in which the estimate goes wrong."""
    if program.collectives and not bodies:
        yield "void: XLA's log holds no estimate for this program."
    elif program.collectives and "Using unified latency estimator" not in log:
        yield f"{_NO_TIME}; its figures are not microseconds."
    for name in dict.fromkeys(c.computation for c in program.collectives if c.computation in bodies):
        if unpriced := bodies[name].unpriced:
            yield (f"void: {name} has {len(unpriced)} operations at a placeholder price of 5,000 us "
                   f"({', '.join(unpriced[:3])}); they look exposed, or hide what is.")
        if widening := [matmul for computation, matmul in program.widening_matmuls if computation == name]:
            yield (f"void: {name} has {len(widening)} bf16 x bf16 -> f32 matmuls ({', '.join(widening[:3])}) "
                   "that XLA prices far too high; what runs beside them looks hidden.")
    for line in dict.fromkeys(re.findall(r"Can't reduce memory use below .*", log)):
        yield f"the step does not fit the GPU: {line}"


def _environment(count: int, per_host: int, nic_gbps: int) -> dict[str, str]:
    flags = [os.environ.get("XLA_FLAGS", "")]
    if count > per_host:
        network = f"nic_speed_gbps={nic_gbps},gpus_per_node={per_host}"
        flags.append(f"--xla_gpu_analytical_latency_estimator_options={network}")
    return os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": " ".join(flags).strip(),
        "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "latency_hiding_scheduler=1,gpu_hlo_schedule=1,sol_latency_estimator=1"}


def _child(folder: str) -> None:
    request = json.loads(Path(folder, "request.json").read_text())
    module, function = request["target"].split(":")
    count = math.prod(parse_mesh(request["mesh"], 8))
    mesh = make_mesh(request["mesh"], devices=devices(request["gpu"], count, per_host=request["per_host"]))
    step, arguments = getattr(importlib.import_module(module), function)(mesh, **request["arguments"])
    began = time.perf_counter()
    lowered = step.lower(*arguments)
    lowered_at = time.perf_counter()
    options = request["options"]
    options = compiler_options(mesh.devices.flat[0]) if options is None else options
    compiled = lowered.compile(compiler_options=options or None)
    done = time.perf_counter()
    Path(folder, "program.txt").write_text(compiled.as_text())
    Path(folder, "figures.json").write_text(json.dumps(dict(
        memory=audit.memory(compiled), jax=jax.__version__, lower_seconds=lowered_at - began,
        compile_seconds=done - lowered_at)))


def _description(g: Gpu) -> str:
    """The protobuf text that XLA reads a GPU from; the fields are those that JAX 0.10.2 knows."""
    major, minor = g.capability
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        platform_name: "CUDA" device_description_str: "{g.name}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
          core_count: {g.cores} fpus_per_core: {g.fpus_per_core} clock_rate_ghz: {g.clock_ghz}
          device_memory_size: {g.memory_bytes} memory_bandwidth: {g.memory_bandwidth}
          l2_cache_size: {g.l2_bytes} shared_memory_per_core: {g.shared_per_core}
          shared_memory_per_block_optin: {g.shared_per_block}
          shared_memory_per_block: 49152 threads_per_warp: 32 threads_per_block_limit: 1024
          threads_per_core_limit: 2048 registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          device_interconnect_info {{ active_links: {g.links} }}
        }}"""


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False
