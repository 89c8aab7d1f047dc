"""The GPU program of our own step beside the annotation-only rival, compiled ahead of time for GPUs that are not there.

    python -m benchmarks.gpu_program                 # every row
    python -m benchmarks.gpu_program --only 8b-1x8   # rows whose name contains this
    python -m benchmarks.gpu_program --json rows.json

Memory, collectives and their order are what GPUs would get; microseconds are XLA's cost model: nothing runs.
Needs the extra `jfsdp[aot]`. Each row compiles in a process of its own, in 15 to 60 seconds on 2 cores.

Rows: one Llama shape, 4096 tokens a sequence, bf16 compute, fp32 reduction, AdamW, full activation
checkpointing, attention in rematerialised query chunks of 256, no documents, no clipping unless named. `rival`
rows are `benchmarks/annotations.py` with the option set that its users tune; ours use one option.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from benchmarks.annotations import maxtext_options
from jfsdp.audit import gpu
from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.wrap import plan_module
from models import llama

MIB = 2**20
SIZES = {"8b": "llama3-8b", "1b": "llama3-1b"}
OURS, RIVAL = "benchmarks.gpu_program:ahead", "benchmarks.annotations:ahead"
LEAN = {"prefetch": 0, "late_reduce": False}


class Row(NamedTuple):
    """One program to compile, and what it should not exceed (None: no bar)."""

    name: str
    mesh: str
    arguments: dict[str, Any]
    memory_mib: float | None = None
    exposed_us: float | None = None
    body_us: float | None = None


ROWS = [
    Row("8b-1x8-b1", "1x8", {"size": "8b"}, 18_850, 100, 5),
    Row("8b-1x8-b2", "1x8", {"size": "8b", "batch": 2}, 21_100, 50, 5),
    Row("8b-1x8-b1 lean", "1x8", {"size": "8b", **LEAN}, 17_600),
    Row("8b-4x8-b1", "4x8", {"size": "8b"}, 18_910, None, 0.1),
    Row("1b-1x8-b1", "1x8", {"size": "1b"}, 4_200, 300, 5),
    Row("1b-1x8-b2", "1x8", {"size": "1b", "batch": 2}, 5_400, 300, 5),
    Row("8b-1x8-b1 clip", "1x8", {"size": "8b", "clip_norm": 1.0}),
    Row("8b-1x8-b1 cudnn", "1x8", {"size": "8b", "attention": "cudnn"}),
]
RIVALS = [
    Row("8b-1x8-b1 rival", "1x8", {"size": "8b"}),
    Row("8b-1x8-b2 rival", "1x8", {"size": "8b", "batch": 2}),
    Row("8b-4x8-b1 rival", "4x8", {"size": "8b"}),
    Row("1b-1x8-b1 rival", "1x8", {"size": "1b"}),
    Row("1b-1x8-b2 rival", "1x8", {"size": "1b", "batch": 2}),
]


def ahead(
    mesh: Mesh,
    size: str = "8b",
    *,
    batch: int = 1,
    seq_len: int = 4096,
    layers: int | None = None,
    clip_norm: float | None = None,
    attention: str = "chunked",
    strategy: str | None = None,
    accumulate: int = 1,
    remat: str = "full",
    **schedule: Any,
):
    """The jitted step and its abstract arguments, for `jfsdp.audit.gpu.compile_ahead`.

    batch: sequences per GPU and micro-batch. layers: fewer than the model has. The head is untied.
    """
    shape = dataclasses.replace(llama.presets[SIZES[size]], attention=attention, tied=False)
    if layers is not None:
        shape = dataclasses.replace(shape, num_layers=layers)

    def make():
        return llama.build(shape, rngs=nnx.Rngs(0), schedule=Schedule(**schedule), remat=remat)

    plan = plan_module(make, mesh=mesh, strategy=strategy, mp_policy=MixedPrecision(param_dtype=jnp.bfloat16))
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    step = train_step(_loss, tx, plan, clip_norm=clip_norm, nonfinite="ignore", accumulate=accumulate)
    rows = (batch * mesh.size * accumulate, seq_len)
    ids = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=plan.batch_sharding)
    weights = jax.ShapeDtypeStruct(rows, jnp.float32, sharding=plan.batch_sharding)
    return step, (TrainState.abstract(tx, plan), {"tokens": ids, "targets": ids, "weights": weights})


def _loss(model, batch, key):
    return model.loss(batch["tokens"], batch["targets"], batch["weights"])


def measure(row: Row, target: str) -> dict[str, Any]:
    """Compile one row and read its figures; `error` says why there are none."""
    figures: dict[str, Any] = {"row": row.name, "mesh": row.mesh, **row.arguments}
    options = maxtext_options(jax.__version__) if target == RIVAL else None
    try:
        report = gpu.compile_ahead(target, row.arguments, mesh=row.mesh, options=options)
    except RuntimeError as error:
        said = [line for line in str(error).splitlines() if "Error" in line] or [str(error).splitlines()[-1]]
        return figures | {"error": said[-1].strip()[:160]}
    program, bodies = report.program, report.exposed.bodies
    loops = [bodies[b.body].exposed_us for b in program.loops if b.body in bodies]
    moved = {
        f"{kind} {axes} {dtype}": round(program.received_bytes(kind, axes, dtype=dtype) / MIB, 1)
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
        for axes in ("shard", "replica")
        for dtype in ("bfloat16", "float32")
        if program.received_bytes(kind, axes, dtype=dtype) >= MIB
    }
    blocking = [c for c in program.collectives if c.is_sync and c.payload_bytes() >= MIB]
    return figures | {
        "jax": report.jax_version,
        "memory_mib": round(report.memory.needed / MIB, 1),
        "exposed_us": round(report.exposed.step_us, 1),
        "worst_body_us": round(max(loops, default=0.0), 2),
        "blocking": len(blocking),
        "received_mib": moved,
        "compile_s": round(report.compile_seconds, 1),
        "warnings": list(report.exposed.warnings),
    }


def show(results: list[dict], rows: list[Row]) -> Table:
    bars = {row.name: row for row in rows}
    table = Table(title="one training step, compiled for H100 (nothing ran; us are XLA's cost model)")
    moves = ("all-gather", "reduce-scatter", "all-reduce")
    for column in ("row", "MiB per GPU", "exposed us", "worst body us", "blocking", *moves, "compile s"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for r in results:
        if "error" in r:
            table.add_row(r["row"], r["error"])
            continue
        bar = bars[r["row"]]
        received = [
            "\n".join(
                f"{mib:,.0f} {name.split()[-1]}" for name, mib in r["received_mib"].items() if name.startswith(kind)
            )
            for kind in moves
        ]
        table.add_row(
            r["row"],
            _against(r["memory_mib"], bar.memory_mib),
            _against(r["exposed_us"], bar.exposed_us),
            _against(r["worst_body_us"], bar.body_us),
            str(r["blocking"]),
            *received,
            str(r["compile_s"]),
        )
    return table


def _against(value: float, bar: float | None) -> str:
    if bar is None:
        return f"{value:,}"
    return f"[{'green' if value <= bar else 'red'}]{value:,}[/] <= {bar:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    args = parser.parse_args()
    if missing := gpu.missing_tools():
        raise SystemExit(f"{missing} is not installed. Install the extra: python -m pip install -e '.[aot]'")
    rows = [(row, OURS) for row in ROWS] + [(row, RIVAL) for row in RIVALS]
    chosen = [(row, target) for row, target in rows if args.only in row.name]
    console = Console() if Console().is_terminal else Console(width=160)
    results = []
    for row, target in chosen:
        results.append(measure(row, target))
        console.print({k: v for k, v in results[-1].items() if k != "received_mib"}, highlight=False)
    console.print(show(results, [row for row, _ in chosen]))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
