"""`jfsdp plan --compile`: the real step, compiled for GPUs that need not be there, beside the formulas.

Owns the comparison, row by row. `audit/gpu.py` compiles, `audit/report.py` tells of the program, `forecast.py` has the
formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from jfsdp.audit import gpu
from jfsdp.audit import report as auditor
from jfsdp.audit.report import Audited
from jfsdp.mesh import REPLICA, SHARD
from jfsdp.metrics import in_words
from jfsdp.planning.forecast import Forecast
from jfsdp.planning.hardware import CHIPS
from jfsdp.planning.workload import Workload


@dataclass(frozen=True)
class Row:
    """One figure by formula and by the compiler, in bytes."""

    name: str
    formula: float
    compiled: float

    @property
    def error(self) -> float:
        """Of the formula, over the compiler's figure; 0 where both are nothing."""
        return (self.formula - self.compiled) / self.compiled if self.compiled else float(bool(self.formula))


@dataclass(frozen=True)
class Compared:
    """A compiled workload."""

    work: Workload
    report: gpu.Report

    @property
    def audited(self) -> Audited:
        replicas, shards = self.work.shape
        return Audited(
            name=f"{self.work.model} {self.work.mesh} {self.work.gpu} {self.work.plan.placement.strategy.value}",
            text=self.report.text,
            mesh_shape={REPLICA: replicas, SHARD: shards},
            memory=self.report.memory,
            platform=self.work.gpu,
            jax_version=self.report.jax_version,
            exposed=self.report.exposed,
            network_gbps=self.work.network_gbps,
            per_host=self.work.per_host,
        )

    @property
    def spare(self) -> float:
        """Bytes of the GPU that the compiled step leaves, allowances apart; below 0 it does not fit."""
        return Forecast(self.work).capacity - self.report.memory.needed

    def rows(self) -> list[Row]:
        """Formula and compiler for the same attention: memory, then traffic of 1 MiB and more by kind, axes, dtype."""
        forecast, found = Forecast(self.work), self.audited
        at_rest = sum(k.bytes for k in forecast.kept if k.name in ("parameters", "optimizer"))
        memory = self.report.memory
        rows = [
            Row("memory: state and batch", at_rest, memory.argument),
            Row("memory: while it runs", forecast.needed - at_rest, memory.needed - memory.argument),
            Row("memory: needed", forecast.needed, memory.needed),
        ]
        formula: dict[tuple[str, str, str], float] = {}
        for m in forecast.moves:
            key = (m.kind, " x ".join(a for a in m.axes if found.mesh_shape[a] > 1), m.dtype)
            formula[key] = formula.get(key, 0) + m.received
        for key in dict.fromkeys([*formula, *found.traffic]):
            both = formula.get(key, 0.0), found.traffic.get(key, 0)
            if max(both) >= auditor.MIB and key[1]:
                rows.append(Row(f"{key[0]} over {key[1]}, {key[2]}", *both))
        return rows

    def tables(self, forecast: Forecast) -> Iterator[Table | str]:
        devices = f"{self.work.devices} x {CHIPS[self.work.gpu].name}"
        seconds = self.report.lower_seconds + self.report.compile_seconds
        spare = in_words(abs(self.spare))
        verdict = f"fits, {spare} to spare" if self.spare >= 0 else f"does not fit, by {spare}"
        yield (
            f"[bold]Compiled for {devices} by JAX {self.report.jax_version}[/] in {seconds:,.0f} s; nothing ran. So it "
            f"{verdict}."
        )
        table = Table(box=box.SIMPLE, title="Formula and compiler", **auditor._TITLE)
        for name in ("what", "formula", "compiled", "formula is off by"):
            table.add_column(name, justify="left" if name == "what" else "right")
        for row in self.rows():
            table.add_row(row.name, in_words(row.formula), in_words(row.compiled), f"{row.error:+.1%}")
        yield table
        yield from auditor.tables(self.audited)
        if step := self.audited.step_played:
            by_formula = Forecast(self.work).timing.exposed * 1e3
            yield (
                f"The formula hides what it can and exposes {by_formula:,.1f} ms of a step; replayed in the order that "
                f"XLA chose, {step.exposed_us / 1e3:,.1f} ms."
            )
        if self.work.devices > self.work.per_host:
            yield (
                f"[yellow]note[/]  XLA was told {_nic_gbps(self.work)} Gbit/s of network per GPU, half of what there "
                "is: at the whole it prices an all-reduce over hosts at twice what their cards carry."
            )
        if forecast.work.attention != self.work.attention:
            yield (
                "[yellow]note[/]  compiled with chunked attention, as there is no cuDNN here, and compared with the "
                "formula for the same; the tables above are for cuDNN's."
            )

    def draw(self, path) -> None:
        self.audited.draw(path)

    def save(self, path) -> None:
        self.audited.save(path)

    def to_json(self) -> dict[str, Any]:
        memory, exposed = self.report.memory, self.report.exposed
        played, name_of = self.audited.played, self.audited.bodies
        entry = next(iter(self.audited.program.runs))
        return {
            "jax": self.report.jax_version,
            "memory_bytes": memory._asdict() | {"needed": memory.needed},
            "fits": self.spare >= 0,
            "spare_bytes": round(self.spare),
            "rows": [dataclasses.asdict(r) | {"error": r.error} for r in self.rows()],
            "collectives": [
                {
                    "kind": c.kind,
                    "where": name_of.get(c.computation, c.computation),
                    "runs": c.runs,
                    "over": list(c.axes),
                    "groups": [len(c.groups), c.group_size],
                    "dtype": c.dtype,
                    "payload_bytes": c.payload_bytes(),
                    "received_bytes": c.received_bytes(),
                    "blocks": c.is_sync,
                    "beside_matmul_flops": c.matmul_flops,
                }
                for c in self.audited.program.collectives
            ],
            "xla_exposed_us": None if exposed.is_void() else exposed.step_us,
            "xla": {
                "outside of loops" if name == entry else name_of.get(name, name): None
                if exposed.is_void(name)
                else {"us": one.total_us, "exposed_us": one.exposed_us}
                for name, one in exposed.bodies.items()
            },
            "xla_warnings": list(exposed.warnings),
            "replay": {
                "a step" if name == entry else name_of.get(name, name): {"us": p.us, "exposed_us": p.exposed_us}
                for name, p in played.items()
            },
            "compile_seconds": self.report.compile_seconds,
        }


def check_compilable(work: Workload) -> None:
    """Refuse what cannot be compiled, before anything is.

    Raises: ValueError for a GPU that cannot be described to the compiler and for memory of a host, RuntimeError where
        the compiler is not installed.
    """
    if work.cluster.chip.described is None:
        known = ", ".join(name for name, chip in CHIPS.items() if chip.described)
        raise ValueError(f"gpu {work.gpu!r} is not described to the compiler. Compile for one of {known}.")
    if work.offload != "none":
        raise ValueError(
            f"offload is {work.offload!r}, but GPUs that are only described have no host whose memory a program could "
            "name. Leave out --compile to plan it by formula, or --offload to compile the rest."
        )
    if missing := gpu.missing_tools():
        raise RuntimeError(f"compiling for GPUs without one needs {missing}: pip install 'jfsdp[aot]'.")


def compile_workload(work: Workload) -> Compared:
    """Compile the step of a workload ahead of time. Raises what `check_compilable` does."""
    check_compilable(work)
    work = dataclasses.replace(work, attention=work.attention if work.attention not in (None, "cudnn") else "chunked")
    fields = {f.name: getattr(work, f.name) for f in dataclasses.fields(work)}
    report = gpu.compile_ahead(
        "jfsdp.planning.workload:ahead",
        fields,
        gpu=work.cluster.chip.described,
        mesh=work.mesh,
        per_host=work.per_host,
        nic_gbps=_nic_gbps(work),
    )
    return Compared(work, report)


def _nic_gbps(work: Workload) -> int:
    """What XLA is told of the network; see Note [Network] in audit/gpu.py."""
    return max(1, round(work.cluster.network * 8 / 1e9 / 2))
