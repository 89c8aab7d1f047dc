"""What a run needs, moves and takes, by formula: everything that `jfsdp plan` says of one workload.

Owns how the formulas are put together: memory and traffic from `plan.py`, time from `roofline.py`, the limits of a GPU
from `hardware.py`. What to do about it is `recommend.py`; how it is printed is `command.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jfsdp import plan as formulas
from jfsdp.plan import Kept, Move
from jfsdp.planning.published import ACCOUNTINGS, Published, activations
from jfsdp.planning.roofline import Run, Shape, Timing, step_time, tokens_to_hide
from jfsdp.planning.workload import Workload
from jfsdp.vocab import STREAM_ABOVE

GIB = 2**30
CONTEXT_BYTES, COMMUNICATOR_BYTES = 0.6 * GIB, 0.4 * GIB
"""Outside of the compiler's memory: a CUDA context with its libraries, and NCCL's buffers per group of devices."""
FRAGMENTS = 0.03
"""Of what a GPU has left, what an allocator cannot hand out."""
HOST_LIMIT = 64 * GIB
"""Pinned memory that JAX takes on a host in one process, unless told otherwise."""


@dataclass(frozen=True)
class Forecast:
    """The formulas of one workload; everything is worked out when asked for."""

    work: Workload

    @cached_property
    def kept(self) -> list[Kept]:
        w = self.work
        return formulas.memory(
            w.plan,
            w.state,
            w.layers,
            schedule=w.schedule,
            accumulate=w.accumulate,
            no_sync=not w.sync,
            tokens=w.tokens,
        )

    @cached_property
    def on_host(self) -> list[Kept]:
        """What one GPU keeps in its host's memory; empty where nothing is offloaded."""
        return [k for k in formulas.host_memory(self.work.plan, self.work.state) if k.bytes]

    @cached_property
    def host_traffic(self) -> tuple[float, float]:
        """Bytes that one GPU gets from its host's memory and gives to it, per step."""
        w = self.work
        how = dict(schedule=w.schedule, accumulate=w.accumulate, no_sync=not w.sync)
        return formulas.host_traffic(w.plan, w.state, **how)

    @cached_property
    def moves(self) -> list[Move]:
        w = self.work
        return formulas.traffic(
            w.plan, schedule=w.schedule, accumulate=w.accumulate, no_sync=not w.sync, tokens=w.tokens
        )

    @property
    def needed(self) -> float:
        """Bytes of one GPU that the compiled step allocates."""
        return sum(k.bytes for k in self.kept)

    @property
    def allowance(self) -> list[Kept]:
        """Bytes of a GPU that no step can have."""
        groups = sum(n > 1 for n in self.work.shape)
        outside = CONTEXT_BYTES + COMMUNICATOR_BYTES * groups
        fragments = FRAGMENTS * (self.work.cluster.chip.memory - outside)
        return [
            Kept("CUDA", CONTEXT_BYTES, "a context with its libraries"),
            Kept("NCCL", COMMUNICATOR_BYTES * groups, "buffers, per kind of group"),
            Kept("fragments", fragments, f"{FRAGMENTS:.0%} of what is left"),
        ]

    @property
    def capacity(self) -> float:
        """Bytes that a step may need on this GPU."""
        return self.work.cluster.chip.memory - sum(k.bytes for k in self.allowance)

    @property
    def spare(self) -> float:
        """Bytes to spare; below 0 it does not fit."""
        return self.capacity - self.needed

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def fraction(self) -> float:
        """What XLA_CLIENT_MEM_FRACTION must be at least; JAX takes 0.75 where it is not set."""
        return math.ceil(self.needed / self.work.cluster.chip.memory * 100) / 100

    @property
    def per_host(self) -> float:
        """Bytes in the memory of one host."""
        return sum(k.bytes for k in self.on_host) * min(self.work.devices, self.work.per_host)

    @property
    def received(self) -> float:
        """Bytes that one GPU receives per step."""
        return sum(m.received for m in self.moves)

    @cached_property
    def replicated(self) -> float:
        """The same under plain data parallelism: gradients of all that is trained, all-reduced in fp32."""
        return 2 * 4 * self.trained * (self.work.devices - 1) / self.work.devices

    @cached_property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return sum(leaf.size for leaf in self.work.plan.leaves if leaf.trainable)

    @cached_property
    def shape(self) -> Shape:
        w, plan = self.work, self.work.plan
        matrices = [leaf for leaf in plan.leaves if leaf.layers and len(leaf.shape) >= 2]
        layers = max((leaf.layers for leaf in matrices), default=1)
        tables = [leaf for leaf in plan.leaves if leaf.never_whole]
        family, config = w.found.family, w.found.config
        attention = family.flops(config, w.seq_len) - family.flops(config, 0)  # both directions, all keys
        head_params = float(math.prod(tables[-1].shape)) if tables else 0.0
        return Shape(
            layers=layers,
            layer_params=sum(leaf.size for leaf in matrices) / layers,
            active_params=(family.flops(config, 0) / 6 - head_params) / layers,
            trained_params=sum(leaf.size for leaf in matrices if leaf.trainable) / layers,
            head_params=head_params,
            is_head_trained=not tables or tables[-1].trainable,
            params=self.trained,
            width=tables[-1].shape[1] if tables else matrices[0].shape[0],
            attention=attention / 6 / layers,
            tokens=w.tokens,
            vocabulary=tables[-1].shape[0] if tables else 0,
        )

    @cached_property
    def run(self) -> Run:
        w = self.work
        placement = w.plan.placement
        gathers = 0 if placement.whole_at_rest else 2 if placement.reshard_after_forward else 1
        moments = {"adamw": 2, "lion": 1, "momentum": 1, "sgd": 0}[w.optimizer]
        return Run(
            shards=placement.shards,
            replicas=placement.replicas,
            gathers=gathers,
            wire_bytes=w.compute_dtype.itemsize,
            reduce_bytes=2 if w.reduce_dtype == "bf16" else 4,
            # Parameter read and written, gradient read, moments read and written.
            state_bytes=0 if w.plan.offload.step_on == "host" else 4 * (3 + 2 * moments),
            host_bytes=sum(self.host_traffic),
            checkpointing=w.remat,
            accumulate=w.accumulate,
            reduces_each=w.sync,
            prefetch=w.prefetch > 0,
            late_reduce=w.late_reduce,
            recomputes_logits=w.tokens * self.shape.vocabulary * 4 > STREAM_ABOVE,
            is_fp32=w.precision == "fp32",
        )

    @cached_property
    def timing(self) -> Timing:
        return step_time(self.shape, self.run, self.work.cluster)

    @property
    def warnings(self) -> list[str]:
        """What a reader should know before trusting or running it."""
        found = []
        unit = self.shape.layer_params
        if self.run.gathers and self.run.shards > 1:
            if self.work.tokens < (least := tokens_to_hide(self.shape, self.run, self.work.cluster)):
                found.append(
                    f"{self.work.tokens:,} tokens per GPU compute less long than a layer takes to gather; from about "
                    f"{math.ceil(least):,} on it hides."
                )
            if unit < 50e6:
                found.append(
                    f"a layer has {_millions(unit)} parameters; units of 50 to 200M make a gather's latency small."
                )
            if unit > 200e6:
                window = next(k.bytes for k in self.kept if k.name == "gathered window")
                found.append(
                    f"a layer has {_millions(unit)} parameters, above the usual 50 to 200M: whole layers take "
                    f"{window / GIB:,.1f} GiB, however many GPUs share the rest."
                )
        if (active := self.shape.active_params) < 0.9 * unit:
            found.append(
                f"a token goes through {_millions(active)} of a layer's {_millions(unit)} parameters: time counts "
                "these, and the rows of experts, in blocks, may take up to twice as long."
            )
        if self.work.plan.offload.step_on == "host":
            found.append("the host computes the update, which takes its own time: that is not in the estimate.")
        if (pinned := self.per_host) > HOST_LIMIT:
            setting = f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={math.ceil(pinned / GIB)}"
            found.append(
                f"a process that has a host's GPUs keeps {pinned / GIB:,.1f} GiB in pinned memory and JAX takes 64 at "
                f"most: set {setting}, or start one process per GPU."
            )
        if self.fits and self.fraction > 0.75:
            setting = f"XLA_CLIENT_MEM_FRACTION={self.fraction + 0.02:.2f}"
            found.append(f"JAX takes 75 percent of a GPU at start: set {setting}.")
        return found

    def published(self) -> list[tuple[str, float]]:
        """The model as papers count it, by convention."""
        plan, strategy = self.work.plan, self.work.plan.placement.strategy.value.removeprefix("HYBRID_")
        strategy = {"SHARD": "FULL_SHARD", "SHARD_ZERO2": "SHARD_GRAD_OP"}.get(strategy, strategy)
        devices = self.work.plan.placement.shards
        lines = []
        for name in ACCOUNTINGS:
            meanings = ("whole", "at_rest") if strategy == "SHARD_GRAD_OP" else ("whole",)
            for meaning in meanings:
                one = Published(
                    params=plan.num_params,
                    devices=devices,
                    units=self.shape.layers,
                    accounting=name,
                    shard_grad_op=meaning,
                )
                note = f", SHARD_GRAD_OP {meaning}" if len(meanings) > 1 else ""
                lines.append((f"state, {name}{note}", one.state(strategy)))
                lines.append((f"state replicated, {name}", one.state("NO_SHARD")))
        lines.append(("window, 2 units forward", one.window()))
        lines.append(("window, 3 units backward", one.window(backward=True)))
        lines.append(("traffic", one.traffic(strategy)))
        lines.append(("traffic of DDP", one.traffic("NO_SHARD")))
        lines.append(("traffic, reduced in fp32", one.traffic(strategy, reduce_bytes=4)))
        lines.append(("traffic of DDP, reduced in fp32", one.traffic("NO_SHARD", reduce_bytes=4)))
        lines.append(
            ("activations, one layer's input", activations(self.work.batch, self.work.seq_len, self.shape.width))
        )
        return list(dict.fromkeys(lines))

    def to_json(self) -> dict[str, Any]:
        w, t = self.work, self.timing
        low, high = t.range
        return {
            "model": w.model,
            "parameters": w.plan.num_params,
            "trained_parameters": self.trained,
            "gpu": w.gpu,
            "mesh": w.mesh,
            "strategy": w.plan.placement.strategy.value,
            "tokens_per_gpu": w.tokens * w.accumulate,
            "memory_bytes": {k.name: round(k.bytes) for k in self.kept},
            "needed_bytes": round(self.needed),
            "allowance_bytes": {k.name: round(k.bytes) for k in self.allowance},
            "capacity_bytes": round(self.capacity),
            "fits": self.fits,
            "spare_bytes": round(self.spare),
            "host_memory_bytes": {k.name: round(k.bytes) for k in self.on_host},
            "host_traffic_bytes": {"got": round(self.host_traffic[0]), "given": round(self.host_traffic[1])},
            "traffic": [
                {
                    "unit": m.unit,
                    "kind": m.kind,
                    "axes": list(m.axes),
                    "dtype": m.dtype,
                    "received_bytes": round(m.received),
                }
                for m in self.moves
            ],
            "received_bytes": round(self.received),
            "data_parallel_received_bytes": round(self.replicated),
            "step_seconds": t.seconds,
            "step_seconds_range": [low, high],
            "exposed_seconds": t.exposed,
            "communication_seconds": t.communication,
            "host_copy_seconds": t.copies,
            "tokens_per_second_per_gpu": t.tokens_per_second,
            "mfu": t.mfu,
            "warnings": self.warnings,
        }


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f}M" if count >= 1e6 else f"{count:,.0f}"
