"""`jfsdp plan`: options in, tables, JSON and pictures out.

Owns the words and columns of the planner; every number comes from `forecast.py`, `recommend.py`, `sweep.py` and
`compare.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import DisallowNone, OmitArgPrefixes, arg

from jfsdp.audit.picture import ENDINGS
from jfsdp.metrics import check_writable, in_words
from jfsdp.planning.forecast import GIB, Forecast
from jfsdp.planning.recommend import Choice, advice, recommend
from jfsdp.planning.workload import Workload

_TITLE = dict(title_justify="left", title_style="bold cyan")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Say what a run needs, moves and takes before it runs: by formula, at once, on any machine.

    With no option: Llama-3-8B on one host of 8 H100.

      jfsdp plan --model llama3-8b --gpu h100 --mesh 4x8
      jfsdp plan --model path/to/config.json --gpu rtx4090 --mesh 1x2 --per-host 2 --recommend
      jfsdp plan --model llama3-70b --mesh 1x64 --compile --picture schedule.html
    """

    workload: Workload = Workload()
    recommend: bool = False
    """Rank strategies, meshes and checkpointing that fit these GPUs."""
    sweep: bool = False
    """Memory and time of every strategy over numbers of devices, whatever mesh and strategy say."""
    published: bool = False
    """Also count as papers do: by convention, without padding."""
    compile: bool = False
    """Compile the real step for these GPUs, which need not be there, and compare it with the formulas; needs the extra
    `aot`."""
    picture: Annotated[DisallowNone[Path | None], arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """With --compile an .html of the schedule; with --sweep a .png or .html of the plot."""
    save: Annotated[DisallowNone[Path | None], arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """With --compile, keep the program for `jfsdp audit`."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self):
        if self.picture and not (self.compile or self.sweep):
            raise ValueError("picture needs something to draw: add --compile or --sweep.")
        if self.save and not self.compile:
            raise ValueError("save keeps a compiled program: add --compile.")
        if self.sweep and (self.recommend or self.compile or self.published):
            raise ValueError("sweep is a table of its own: leave out --recommend, --compile and --published.")
        if self.picture and self.compile and self.workload.devices == 1:
            raise ValueError("picture shows what overlaps with communication, and one GPU has none. Leave it out.")
        if self.save:
            check_writable(self.save)
        if self.picture:
            check_writable(self.picture, ENDINGS if self.compile else (".png", *ENDINGS))


def command(argv: Sequence[str]) -> int:
    """`jfsdp plan`: 0, 1 where the run does not fit, 2 for options that cannot be."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs: no GPU is looked for, and none of its memory is taken
    try:
        options = tyro.cli(OmitArgPrefixes[PlanOptions], prog="jfsdp plan", args=list(argv))
        return _run(options)
    except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
        print(f"jfsdp plan: error: {error}", file=sys.stderr)
        return 2


def _run(options: PlanOptions) -> int:
    console, work = _console(), options.workload
    forecast = Forecast(work)
    if options.compile:  # imports the compiler's side, so only here
        from jfsdp.planning import compare

        compare.check_compilable(work)
    if options.sweep:
        from jfsdp.planning import sweep

        rows = sweep.sweep(work)
        if options.picture:
            sweep.draw(rows, work, options.picture)
        console.print_json(json.dumps([r.to_json() for r in rows])) if options.json else console.print(
            sweep.table(rows, work)
        )
        return 0
    choices = recommend(work) if options.recommend else []
    words = list(advice(work)) if options.recommend else []
    if options.json:
        found = forecast.to_json()
        if options.published:
            found["published_bytes"] = dict(forecast.published())
        if options.recommend:
            found["advice"] = words
            found["choices"] = [
                c.forecast.to_json() | {"largest_batch": c.largest_batch, "reason": c.reason} for c in choices
            ]
    else:
        for part in list(tables(forecast)):  # all of it or, where a formula refuses, none
            console.print(part)
        if options.published:
            console.print(published_table(forecast))
        for line in words:
            console.print(f"[bold]{escape(line)}")
        if choices:
            console.print(choices_table(choices))
        elif options.recommend:
            console.print("Nothing fits these GPUs. Use more of them, fewer tokens, frozen weights, or --offload.")
    fits = forecast.fits
    if options.compile:
        compared = compare.compile_workload(work)
        fits = compared.spare >= 0
        if options.picture:
            compared.draw(options.picture)
        if options.save:
            compared.save(options.save)
        if options.json:
            found["compiled"] = compared.to_json()
        else:
            for part in compared.tables(forecast):
                console.print(part)
    if options.json:
        print(json.dumps(found, indent=1))
    return 0 if fits else 1


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def tables(forecast: Forecast) -> Iterator[Table | str]:
    """What `jfsdp plan` prints for one workload."""
    work = forecast.work
    placement, chip = work.plan.placement, work.cluster.chip
    head = Table.grid(padding=(0, 2))
    replicas, shards = work.shape
    sequences = work.batch * work.accumulate
    scale = ", loss scaled" if work.state.scale is not None else ""
    lines = {
        "model": f"{work.model}: {work.plan.num_params:,} parameters"
        + (f", {forecast.trained:,} of them trained" if work.lora else ""),
        "devices": f"{work.devices} x {chip.name}, mesh {replicas}x{shards}, {placement.strategy.value}",
        "batch": f"{sequences:,} sequence{'s' if sequences > 1 else ''} of {work.seq_len:,} tokens per GPU and step"
        + (f", in {work.accumulate} micro-batches" if work.accumulate > 1 else ""),
        "compute": f"{work.precision}, gradients reduced in {work.reduce_dtype}{scale}, remat {work.remat}, "
        f"{work.optimizer}",
    }
    for name, words in lines.items():
        head.add_row(f"[bold cyan]{name}", escape(words))
    yield head
    yield memory_table(forecast)
    if forecast.on_host:
        yield host_table(forecast)
    yield traffic_table(forecast)
    yield time_table(forecast)
    for warning in forecast.warnings:
        yield f"[yellow]note[/]  {escape(warning)}"


def memory_table(forecast: Forecast) -> Table:
    chip = forecast.work.cluster.chip
    spare = forecast.spare
    verdict = f"fits, {in_words(spare)} to spare" if forecast.fits else f"[red]does not fit[/], by {in_words(-spare)}"
    allowed = sum(k.bytes for k in forecast.allowance)
    parts = ", ".join(f"{k.name} {in_words(k.bytes)}" for k in forecast.allowance)
    table = Table(box=box.SIMPLE, show_footer=True, title=f"Memory of one GPU: {verdict}", **_TITLE)
    table.add_column("what", "in all")
    table.add_column("bytes", in_words(forecast.needed + allowed), justify="right")
    table.add_column("formula", f"of {in_words(chip.memory)}", style="dim")
    for one in forecast.kept:
        table.add_row(one.name, in_words(one.bytes), escape(one.formula))
    table.add_section()
    table.add_row("needed by the step", in_words(forecast.needed), "what the compiled program allocates")
    table.add_row("allowance", in_words(allowed), parts)
    return table


def host_table(forecast: Forecast) -> Table:
    got, given = forecast.host_traffic
    count = min(forecast.work.devices, forecast.work.per_host)
    table = Table(box=box.SIMPLE, show_footer=True, title="Memory of the host for one GPU", **_TITLE)
    table.add_column("what", "in all")
    table.add_column("bytes", in_words(sum(k.bytes for k in forecast.on_host)), justify="right")
    words = f"{in_words(forecast.per_host)} a host of {count}; a step gets {in_words(got)} and gives {in_words(given)}"
    table.add_column("formula", words, style="dim")
    for one in forecast.on_host:
        table.add_row(one.name, in_words(one.bytes), escape(one.formula))
    return table


def traffic_table(forecast: Forecast) -> Table:
    ratio = forecast.received / forecast.replicated if forecast.replicated else 0.0
    against = f"{ratio:.2f} x DDP in fp32 ({in_words(forecast.replicated)})" if forecast.replicated else "one GPU"
    table = Table(box=box.SIMPLE, show_footer=True, title="Traffic of a step", **_TITLE)
    for name, footer in (("collective", "in all"), ("over", ""), ("dtype", "")):
        table.add_column(name, footer)
    table.add_column("a GPU receives", in_words(forecast.received), justify="right")
    table.add_column("units", against, style="dim")
    sums: dict[tuple, list] = {}
    for move in forecast.moves:
        sums.setdefault((move.kind, " x ".join(move.axes), move.dtype), []).append(move)
    for (kind, axes, dtype), moves in sums.items():
        units = ", ".join(dict.fromkeys(m.unit for m in moves))
        table.add_row(kind, axes, dtype, in_words(sum(m.received for m in moves)), escape(units))
    return table


def time_table(forecast: Forecast) -> Table:
    t = forecast.timing
    low, high = t.range
    table = Table(box=box.SIMPLE, show_footer=True, title="Time of a step (an estimate: nothing ran)", **_TITLE)
    table.add_column("what", "step")
    table.add_column("ms", _ms(t.seconds), justify="right")
    per_token = f"{t.tokens_per_second:,.0f} tokens/s per GPU, {t.mfu:.0%} of the peak"
    table.add_column("", f"{_ms(low)} to {_ms(high)}; {per_token}", style="dim")
    again = f", {forecast.work.remat} recomputed" if forecast.work.remat != "none" else ""
    hidden = t.communication - t.exposed
    for name, seconds, words in (
        ("forward", t.forward, "matmuls, attention, and what lies between"),
        ("backward", t.backward, f"twice the matmuls{again}"),
        ("head and loss", t.head, ""),
        ("optimizer", t.optimizer, "bound by memory bandwidth"),
        ("slowed", t.slowed, f"compute beside {_ms(hidden)} ms of hidden communication"),
        ("exposed", t.exposed, f"of {_ms(t.communication)} ms of communication"),
        ("host copies", t.copies, f"at {forecast.work.cluster.chip.host / 1e9:,.0f} GB/s, as if nothing hid them"),
    ):
        if seconds or name != "host copies":
            table.add_row(name, _ms(seconds), words)
    return table


def _ms(seconds: float) -> str:
    """Milliseconds, with three digits where they are few."""
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 or not ms else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def published_table(forecast: Forecast) -> Table:
    table = Table(box=box.SIMPLE, title="As papers count (GB are 1e9 bytes)", **_TITLE)
    table.add_column("convention")
    table.add_column("GB", justify="right")
    for name, size in forecast.published():
        table.add_row(name, f"{size / 1e9:,.3f}")
    return table


def choices_table(choices: Sequence[Choice]) -> Table:
    table = Table(box=box.SIMPLE, title="What fits, fastest first (by estimate)", **_TITLE)
    for name in ("mesh", "strategy", "remat", "GiB", "tokens/s per GPU", "MFU", "batch up to", "why"):
        table.add_column(name, justify="right" if name in ("GiB", "tokens/s per GPU", "MFU", "batch up to") else "left")
    for c in choices:
        f = c.forecast
        table.add_row(
            c.work.mesh,
            c.work.strategy,
            c.work.remat,
            f"{f.needed / GIB:,.1f}",
            f"{f.timing.tokens_per_second:,.0f}",
            f"{f.timing.mfu:.0%}",
            str(c.largest_batch),
            c.reason,
        )
    return table
