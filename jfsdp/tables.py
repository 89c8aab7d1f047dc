"""What a run prints: the heading, the sharding table, the forecast of a dry run, the summary.

Owns words and columns only; every number in them is somebody else's. Progress while it runs is `metrics.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jfsdp import plan as planning
from jfsdp.audit.gpu import GPUS
from jfsdp.cli import Job, seems_to_have_gpus
from jfsdp.layout import ParamLayout, Plan, UnitOptions
from jfsdp.mesh import REPLICA, SHARD
from jfsdp.metrics import Record, Throughput, in_words
from jfsdp.planning.footprint import trace
from jfsdp.state import TrainState
from jfsdp.vocab import STREAM_ABOVE

_TITLE = dict(title_justify="left", title_style="bold cyan")


def console() -> Console:
    """The screen, for the first process only; wide enough for the tables where it is a file."""
    found = Console(highlight=False, quiet=jax.process_index() > 0)
    return found if found.is_terminal else Console(highlight=False, quiet=found.quiet, width=120)


def heading(job: Job) -> Table:
    """What runs, on what, from what."""
    c, mesh = job.config, job.mesh
    micro = f" x {c.data.accumulate} micro-batches" if c.data.accumulate > 1 else ""
    parts = f"{mesh.devices.size} devices{micro} x {job.share}"
    lines = {
        "model": job.model.name,
        "devices": f"{_device_words(mesh)}, mesh {mesh.shape[REPLICA]}x{mesh.shape[SHARD]}",
        "strategy": job.sharding["strategy"].value,
        "compute": f"{c.model.precision}, gradients reduced in {c.model.reduce_dtype}, remat {c.model.remat}",
        "data": "" if job.rows is None else str(job.rows),
        "held out": "" if job.held_out is None else str(job.held_out),
        "batch": f"{job.batch_size} sequences of {c.data.seq_len} tokens = {parts}",
    }
    if job.group.count > 1:
        own = jax.local_device_count()
        lines["processes"] = f"{job.group}, {own} device{'s' * (own > 1)} each"
    elif c.output.dry_run:
        lines["processes"] = str(job.group)
    table = Table.grid(padding=(0, 2))
    for name, words in lines.items():
        if words:
            table.add_row(f"[bold cyan]{name}", escape(words))
    return table


def note(name: str, words: str) -> Table:
    """A line below the heading, and aligned with it; where there are several, all begin below each other."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=8)
    table.add_row(f"[bold cyan]{name}", escape(words))
    return table


def _device_words(mesh: Mesh) -> str:
    device, count = mesh.devices.flat[0], mesh.devices.size
    if device.platform != "cpu":
        return f"{count} x {device.device_kind}"
    words = f"{count} simulated CPU device{'s' * (count > 1)}"
    if seems_to_have_gpus():
        words += "; this JAX cannot use the GPUs that are here: pip install 'jfsdp[cuda12]'"
    return words


def sharding_table(plan: Plan, *, tokens: int | None = None) -> Table:
    """A line per parameter, by unit: where it is cut, what a device holds, and why.

    tokens: of one device and micro-batch; tells how vocabulary tables are used.
    """
    whole = sum(_at_rest(leaf) for leaf in plan.leaves if leaf.dim is None or leaf.placement.whole_at_rest)
    stored = sum(math.prod(leaf.rest_shape) * leaf.dtype.itemsize for leaf in plan.leaves)
    padding = stored - sum(leaf.size * leaf.dtype.itemsize for leaf in plan.leaves)
    notes = [f"{in_words(whole)} whole on every device"] if whole else []
    notes += [f"{in_words(padding)} padding"] if padding else []
    table = Table(box=box.SIMPLE, show_footer=True)
    table.add_column("parameter", f"{plan.num_params:,} parameters")
    table.add_column("shape")
    table.add_column("cut")
    table.add_column("per device", in_words(sum(map(_at_rest, plan.leaves))), justify="right")
    table.add_column("why", "; ".join(notes) or "none whole, none padded", style="dim")
    units: dict[str, list[ParamLayout]] = {}
    for leaf in plan.leaves:
        units.setdefault(leaf.unit, []).append(leaf)
    for unit, leaves in units.items():
        names = [leaf.path for leaf in leaves]
        if len(leaves) > 1:
            layers, held = leaves[0].layers, in_words(sum(map(_at_rest, leaves)))
            of_each = f"[dim], {layers} layers" if layers else ""
            table.add_row(f"[bold]{unit or 'root'}[/]{of_each}", "", "", f"[bold]{held}")
            names = ["  " + name.removeprefix(unit + ".") for name in names]
        for name, leaf in zip(names, leaves):
            shape, held = " x ".join(map(str, leaf.shape)) or "scalar", in_words(_at_rest(leaf))
            first = Text(name, "" if len(leaves) > 1 else "bold")
            table.add_row(first, shape, _cut(leaf), held, leaf.reason + _use(plan, leaf, tokens))
    return table


def _use(plan: Plan, leaf: ParamLayout, tokens: int | None) -> str:
    """How a vocabulary table is used: Notes [Row exchange] and [Streamed head] in vocab.py."""
    uses, words = plan.units.get(leaf.unit, UnitOptions()).uses if tokens is not None else (), ""
    if "embed" in uses:
        kinds = {m.kind for m in planning.traffic(plan, tokens=tokens) if m.unit == leaf.unit}
        words += ", rows exchanged" if "all-to-all" in kinds else ", gathered to look up"
    if "head" in uses:
        is_streamed = tokens * leaf.shape[0] * 4 > STREAM_ABOVE
        words += ", streamed in slices" if is_streamed else ", logits at once"
    return words


def _cut(leaf: ParamLayout) -> str:
    if leaf.dim is None:
        return "whole"
    note = "whole, its gradient " if leaf.placement.whole_at_rest else ""
    return f"{note}dim {leaf.dim}: {leaf.placement.shards} x {leaf.padded // leaf.placement.shards}"


def _at_rest(leaf: ParamLayout) -> int:
    """Bytes of a parameter on each device between steps."""
    is_cut = leaf.dim is not None and not leaf.placement.whole_at_rest
    return math.prod(leaf.rest_shape) * leaf.dtype.itemsize // (leaf.placement.shards if is_cut else 1)


def forecast(job: Job, plan: Plan, state: TrainState) -> Iterator[Table]:
    """The tables of a dry run: units, memory and traffic of a device, by formula."""
    yield sharding_table(plan, tokens=job.tokens)
    how = dict(accumulate=job.config.data.accumulate, no_sync=not job.config.training.sync)
    dtype = job.sharding["mp_policy"].param_dtype
    kinds = dict(dtype=dtype, trainable=job.sharding.get("trainable", nnx.Param))
    layers = trace(job.make_model, sequences=job.share, tokens=job.config.data.seq_len, **kinds)
    kept = planning.memory(plan, state, layers, schedule=job.schedule, tokens=job.tokens, **how)
    on_host = [one for one in planning.host_memory(plan, state) if one.bytes]
    for title, needed, rows in (
        ("Memory of a device", "needed by the step", kept),
        ("Memory of the host for one device", "in all", on_host),
    ):
        table = Table(box=box.SIMPLE, show_footer=True, title=title, **_TITLE)
        table.add_column("what", needed)
        table.add_column("bytes", in_words(sum(one.bytes for one in rows)), justify="right")
        table.add_column("formula", style="dim")
        for one in rows:
            table.add_row(one.name, in_words(one.bytes), one.formula)
        if rows:
            yield table

    moves = planning.traffic(plan, schedule=job.schedule, tokens=job.tokens, **how)
    table = Table(box=box.SIMPLE, show_footer=True, title="Traffic of a step", **_TITLE)
    table.add_column("unit", "in all")
    for name in ("collective", "over", "dtype"):
        table.add_column(name)
    table.add_column("passes", justify="right")
    table.add_column("a device receives", in_words(sum(move.received for move in moves)), justify="right")
    table.add_column("why", style="dim")
    for move in moves:
        over, received = " x ".join(move.axes), in_words(move.received)
        table.add_row(move.unit, move.kind, over, move.dtype, f"{move.passes:.3g}", received, move.why)
    yield table


def summary(job: Job, losses: Sequence[float], last: Record, throughput: Throughput) -> Table:
    """How a run went, and how to go on; `losses` of all steps and the record of the last one."""
    c = job.config
    unit = f"nats per {'byte' if c.data.is_text else 'token'}"
    lines = {
        "steps": f"{last['step']} of {c.training.steps}, {throughput.total_tokens:,} tokens",
        "loss": f"{losses[0]:.3f} [cyan]{_curve(losses)}[/] {losses[-1]:.3f} {unit}",
    }
    if "eval_loss" in last:
        lines["held out"] = f"{last['eval_loss']:.3f} {unit}"
    if (rate := throughput.mean) is not None:
        each = rate / throughput.devices
        lines["speed"] = f"{rate:,.0f} tokens/s, {each:,.0f} a device, {_flops_words(job, each)}"
    programs = f"{throughput.compilations} program{'s' * (throughput.compilations != 1)}"
    lines["compile"] = f"{throughput.compile_s:.1f} s, the first step included; {programs}"
    if last["step"] < c.training.steps:
        lines["stopped"] = "by Ctrl-C, SIGTERM or SIGHUP, between two steps"
    if (folder := c.checkpoints.checkpoint_dir) is None:
        lines["go on"] = "--steps 1000 trains longer, --data FOLDER reads your text, --help tells of all"
    elif last["step"] < c.training.steps:
        which = "the same command" if c.checkpoints.resume != "never" else "this command without --resume never"
        lines["go on"] = f"{which} goes on from step {last['step']}, which is saved in {folder}"
    else:
        lines["go on"] = f"it is saved in {folder}; more --steps with --reschedule train it longer"
    table = Table.grid(padding=(0, 2))
    for name, words in lines.items():
        table.add_row(f"[bold cyan]{name}", words)
    return table


def spread(values: Mapping[str, Sequence[float]]) -> Table:
    """What differs between processes: least, mean and most of each value, and whose it is. `values` by process.

    Names end in `_s` for seconds and in `_bytes`.
    """
    table = Table(box=box.SIMPLE, title="Over all processes", **_TITLE)
    table.add_column("each process")
    for name in ("least", "of", "mean", "most", "of"):
        table.add_column(name, justify="right", style="dim" if name == "of" else "")
    for name, each in values.items():
        what, _, unit = name.rpartition("_")
        words = in_words if unit == "bytes" else _duration
        least, most = min(each), max(each)
        shown = words(least), each.index(least), words(sum(each) / len(each)), words(most), each.index(most)
        table.add_row(what.replace("_", " "), *map(str, shown))
    return table


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.1f} ms"


def _flops_words(job: Job, tokens_per_s: float) -> str:
    """Operations of the model per second on a device; on known GPUs also as a share of the peak for bf16."""
    flops = job.model.family.flops(job.model.config, job.config.data.seq_len) * tokens_per_s
    peaks = {gpu.name: gpu.bf16_flops for gpu in GPUS.values()}
    peak = peaks.get(job.mesh.devices.flat[0].device_kind) if job.config.model.precision == "bf16" else None
    rate = f"{flops / 1e12:,.0f} TFLOP/s" if flops > 1e13 else f"{flops / 1e9:,.1f} GFLOP/s"
    return f"{rate} each" + (f" ({flops / peak:.0%} of the peak)" if peak else "")


def _curve(values: Sequence[float], width: int = 40) -> str:
    """A line of blocks, from the means of up to `width` stretches of `values`."""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / ((high - low) or 1))] for v in means)
