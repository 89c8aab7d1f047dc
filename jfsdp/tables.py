"""What a run prints: the heading, the sharding table, the forecast of a dry run, the summary.

Owns words and columns only; every number in them is somebody else's. Progress while it runs is `metrics.py`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

from jfsdp.cli import Job
from jfsdp.gpu import GPUS
from jfsdp.layout import ParamLayout, Plan
from jfsdp.mesh import REPLICA, SHARD
from jfsdp.metrics import Record, Throughput, in_words


def console() -> Console:
    """The screen, for the first process only; wide enough for the tables where it is a file."""
    found = Console(highlight=False, quiet=jax.process_index() > 0)
    return found if found.is_terminal else Console(highlight=False, quiet=found.quiet, width=120)


def heading(job: Job) -> Table:
    """What runs, on what, from what."""
    c, mesh = job.config, job.mesh
    share = job.batch_size // mesh.devices.size // c.data.accumulate
    micro = f" x {c.data.accumulate} micro-batches" if c.data.accumulate > 1 else ""
    batch = f"{job.batch_size} sequences of {c.data.seq_len} = {mesh.devices.size} devices{micro} x {share}"
    lines = {
        "model": job.model.name,
        "devices": f"{_device_words(mesh)}, mesh {mesh.shape[REPLICA]}x{mesh.shape[SHARD]}",
        "strategy": job.sharding["strategy"].value,
        "compute": f"{c.model.precision}, gradients reduced in {c.model.reduce_dtype}, remat {c.model.remat}",
        "data": "" if job.rows is None else str(job.rows),
        "held out": "" if job.held_out is None else str(job.held_out),
        "batch": batch,
    }
    table = Table.grid(padding=(0, 2))
    for name, words in lines.items():
        if words:
            table.add_row(f"[bold cyan]{name}", words)
    return table


def _device_words(mesh: Mesh) -> str:
    device, count = mesh.devices.flat[0], mesh.devices.size
    if device.platform != "cpu":
        return f"{count} x {device.device_kind}"
    words = f"{count} simulated CPU device{'s' * (count > 1)}"
    if any(Path("/dev").glob("nvidia[0-9]*")) and not os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        words += " (there are NVIDIA GPUs that this JAX cannot use: pip install 'jfsdp[cuda12]')"
    return words


def sharding_table(plan: Plan) -> Table:
    """A line per parameter, by unit: where it is cut, what a device holds, and why."""
    whole = sum(_at_rest(leaf) for leaf in plan.leaves if leaf.dim is None or leaf.placement.whole_at_rest)
    stored = sum(math.prod(leaf.rest_shape) * leaf.dtype.itemsize for leaf in plan.leaves)
    padding = stored - sum(leaf.size * leaf.dtype.itemsize for leaf in plan.leaves)
    notes = [f"{in_words(whole)} whole on every device"] if whole else []
    notes += [f"{in_words(padding)} padding"] if padding else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    table.add_column("parameter", f"{plan.num_params:,}")
    table.add_column("shape")
    table.add_column("cut")
    table.add_column("per device", in_words(sum(map(_at_rest, plan.leaves))), justify="right")
    table.add_column("why", "; ".join(notes) or "nothing is whole, nothing is padded", style="dim")
    units: dict[str, list[ParamLayout]] = {}
    for leaf in plan.leaves:
        units.setdefault(leaf.unit, []).append(leaf)
    for unit, leaves in units.items():
        count = f" [dim]{leaves[0].layers} units" if leaves[0].layers else ""
        bytes_held = in_words(sum(map(_at_rest, leaves)))
        table.add_row(f"[bold]{unit or 'root'}[/]{count}", "", "", f"[bold]{bytes_held}")
        for leaf in leaves:
            name = leaf.path.removeprefix(unit).strip(".") or leaf.path.rpartition(".")[2]
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            table.add_row(f"  {name}", shape, _cut(leaf), in_words(_at_rest(leaf)), leaf.reason)
    return table


def _cut(leaf: ParamLayout) -> str:
    if leaf.dim is None:
        return "whole"
    note = "whole, its gradient " if leaf.placement.whole_at_rest else ""
    return f"{note}dim {leaf.dim}: {leaf.placement.shards} x {leaf.padded // leaf.placement.shards}"


def _at_rest(leaf: ParamLayout) -> int:
    """Bytes of a parameter on each device between steps."""
    is_cut = leaf.dim is not None and not leaf.placement.whole_at_rest
    return math.prod(leaf.rest_shape) * leaf.dtype.itemsize // (leaf.placement.shards if is_cut else 1)


def forecast(job: Job, plan: Plan) -> Iterator[Table]:
    """The tables of a dry run."""
    yield sharding_table(plan)


def summary(job: Job, history: Sequence[Record], throughput: Throughput) -> Table:
    """How a run went, and how to go on."""
    c, last = job.config, history[-1]
    losses = [one["loss"] for one in history]
    unit = "nats per token" if c.data.data and c.data.data.suffix.lower() in (".npy", ".bin") else "nats per byte"
    lines = {
        "steps": f"{last['step']} of {c.training.steps}, {sum(one['tokens'] for one in history):,} tokens",
        "loss": f"{losses[0]:.3f} [cyan]{_curve(losses)}[/] {losses[-1]:.3f} {unit}",
    }
    if "eval_loss" in last:
        lines["held out"] = f"{last['eval_loss']:.3f} {unit}"
    if (rate := throughput.mean) is not None:
        each = rate / throughput.devices
        lines["speed"] = f"{rate:,.0f} tokens/s, {each:,.0f} per device{_flops_words(job, each)}"
    lines["compile"] = f"{throughput.compile_s:.1f} s, the first step included"
    if last["step"] < c.training.steps:
        lines["stopped"] = "by Ctrl-C, between two steps"
    lines["go on"] = "--steps 1000 trains longer, --data FOLDER reads your text, --help tells of all"
    table = Table.grid(padding=(0, 2))
    for name, words in lines.items():
        table.add_row(f"[bold cyan]{name}", words)
    return table


def _flops_words(job: Job, tokens_per_s: float) -> str:
    """Operations of the model per second on a device; on known GPUs also as a share of the peak for bf16."""
    flops = job.model.family.flops(job.model.config, job.config.data.seq_len) * tokens_per_s
    peaks = {gpu.name: gpu.bf16_flops for gpu in GPUS.values()}
    peak = peaks.get(job.mesh.devices.flat[0].device_kind) if job.config.model.precision == "bf16" else None
    return f", {flops / 1e12:,.3g} TFLOP/s each" + (f" ({flops / peak:.0%} of its peak)" if peak else "")


def _curve(values: Sequence[float], width: int = 40) -> str:
    """A line of blocks, from the means of up to `width` stretches of `values`."""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / ((high - low) or 1))] for v in means)
