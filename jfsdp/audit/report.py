"""What a compiled step does, in tables: for a run (`train.py --audit`), a planned one, and two side by side.

Owns the words, and the file that keeps a program for later: `jfsdp audit A B` compares two of them. The figures are
read by `program.py`, `gpu.py` and `replay.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import tyro
from jax.sharding import AbstractMesh
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import DisallowNone, Positional, arg

from jfsdp.audit import picture
from jfsdp.audit import program as audit
from jfsdp.audit.gpu import Exposed
from jfsdp.audit.replay import Played, replay
from jfsdp.metrics import check_writable, in_words
from jfsdp.planning.hardware import CHIPS, Cluster

MIB = 2**20
_TITLE = dict(title_justify="left", title_style="bold cyan")
_OUTSIDE = "outside of loops"


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A compiled step and where it would run."""

    name: str
    text: str
    """The optimised HLO."""
    mesh_shape: Mapping[str, int]
    memory: audit.Memory
    platform: str
    """cpu, or a GPU's name in `hardware.CHIPS`, or another platform."""
    jax_version: str
    exposed: Exposed | None = None
    """The compiler's own estimate, where its log was read."""
    network_gbps: float | None = None
    per_host: int = 8

    @cached_property
    def program(self) -> audit.Program:
        return audit.read(self.text, AbstractMesh(tuple(self.mesh_shape.values()), tuple(self.mesh_shape)))

    @cached_property
    def played(self) -> dict[str, Played]:
        """The second estimate; empty for what is no known GPU, and where nothing is communicated."""
        if self.platform not in CHIPS or not self.program.collectives:
            return {}
        cluster = Cluster(gpu=self.platform, per_host=self.per_host, network_gbps=self.network_gbps)
        return replay(self.text, dict(self.mesh_shape), cluster)

    @property
    def step_played(self) -> Played | None:
        """The whole step by the second estimate."""
        return self.played.get(next(iter(self.program.runs)))

    @cached_property
    def traffic(self) -> dict[tuple[str, str, str], int]:
        """Received bytes per step by kind, axes and dtype, those that run a known number of times."""
        sums: dict[tuple[str, str, str], int] = {}
        for c in self.program.collectives:
            for dtype in dict.fromkeys(x.dtype for x in c.operands):
                key = (c.kind, " x ".join(c.axes), dtype)
                sums[key] = sums.get(key, 0) + (c.runs or 0) * c.received_bytes(dtype)
        return dict(sorted(sums.items()))

    @cached_property
    def bodies(self) -> dict[str, str]:
        """Loop bodies that communicate, by what they are: an iteration of layers works more than one of the head."""
        moving = {c.computation for c in self.program.collectives}
        scatters = {c.computation for c in self.program.collectives if c.kind == "reduce-scatter"}
        loops = [loop for loop in self.program.loops if loop.body in moving]
        named: dict[str, str] = {}
        for is_backward, direction in ((False, "forward"), (True, "backward")):
            ours = [loop for loop in loops if (loop.body in scatters) == is_backward and loop.matmul_flops]
            ours.sort(key=lambda loop: -loop.matmul_flops)
            stacks = [loop.body for loop in ours if 2 * loop.matmul_flops >= ours[0].matmul_flops]
            labels = [f"layers {direction}" + (f", loop {i + 1}" if i else "") for i in range(len(stacks))]
            labels += [f"slices of the head {direction}"]
            for loop, label in zip_longest(ours, labels[: len(ours)]):
                named[loop.body] = label or loop.body
        return named

    def save(self, path: Path) -> None:
        """Keep it for `jfsdp audit`."""
        fields = dict(
            name=self.name,
            mesh=dict(self.mesh_shape),
            memory=list(self.memory),
            platform=self.platform,
            jax=self.jax_version,
            network_gbps=self.network_gbps,
            per_host=self.per_host,
            text=self.text,
        )
        path.write_text(json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> Audited:
        """Raises: ValueError for a file that `save` did not write."""
        try:
            kept = json.loads(path.read_text())
            return cls(
                name=kept["name"],
                text=kept["text"],
                mesh_shape=kept["mesh"],
                memory=audit.Memory(*kept["memory"]),
                platform=kept["platform"],
                jax_version=kept["jax"],
                network_gbps=kept["network_gbps"],
                per_host=kept["per_host"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no program ({error!r}). Write one with jfsdp plan --compile --save FILE, "
                "or python train.py --audit-file FILE."
            ) from error

    def draw(self, path: Path) -> None:
        """The schedule of one forward and one backward body.

        Raises: ValueError where there is no known GPU, or nothing to overlap.
        """
        if not self.program.collectives:
            raise ValueError(f"{self.name} communicates nothing, so there is no schedule to draw. Use several devices.")
        if not self.played:
            raise ValueError(f"no schedule is drawn for {self.platform}: its rates are not known.")
        order = sorted(
            self.bodies.items(), key=lambda item: (not item[1].startswith("layers"), item[1] != "layers forward")
        )
        shown = {
            f"{label}, one of {self.program.runs[body] or 'its'} iterations": self.played[body]
            for body, label in order
            if label.startswith("layers")
        }
        picture.draw(
            shown or {"the step": self.played[max(self.played, key=lambda b: self.played[b].us)]},
            path,
            title=f"{self.name}: what overlaps with what",
            subtitle=f"compiled by JAX {self.jax_version}; order as compiled, lengths at declared rates: nothing ran"
            + ("; XLA unrolled loops: an iteration holds two layers" if "double_buffer" in self.text else ""),
        )


def of_compiled(compiled: Any, mesh: Any, *, name: str, jax_version: str) -> Audited:
    """A step compiled for the devices that are here; their kind decides whether a second estimate can be made."""
    device = mesh.devices.flat[0]
    kinds = {"H100 PCIe": "h100-pcie", "H100": "h100", "H200": "h200", "B200": "b200", "A100": "a100", "L40S": "l40s"}
    kinds |= {"4090": "rtx4090", "3090": "rtx3090"}
    words = getattr(device, "device_kind", "")
    platform = next((chip for word, chip in kinds.items() if word in words), device.platform)
    return Audited(
        name=name,
        text=compiled.as_text(),
        mesh_shape=dict(mesh.shape),
        memory=audit.memory(compiled),
        platform=platform,
        jax_version=jax_version,
    )


def tables(one: Audited) -> Iterator[Table | str]:
    """Memory, traffic, and what each loop hides."""
    table = Table(box=box.SIMPLE, show_footer=True, title="Memory of one device, as compiled", **_TITLE)
    table.add_column("what", "needed")
    table.add_column("bytes", in_words(one.memory.needed), justify="right")
    for name in ("argument", "output", "temp"):
        table.add_row(name, in_words(getattr(one.memory, name)))
    table.add_row("output in place of arguments", "-" + in_words(one.memory.alias))
    yield table
    if one.program.collectives:
        yield _traffic_table("Traffic of a step, as compiled", {"received": one.traffic})
        yield _loops_table(one)
        if one.exposed or one.played:
            yield _exposed_table(one)
    else:
        yield "Nothing is communicated: each device works for itself."
    yield from _doubts(one)


def _loops_table(one: Audited) -> Table:
    least = MIB if any(c.payload_bytes() >= MIB for c in one.program.collectives) else 1
    title = "Collectives of 1 MiB or more" if least == MIB else "Collectives"
    table = Table(box=box.SIMPLE, title=title, **_TITLE)
    for name in ("where", "runs", "collective", "over", "dtype", "received", "beside matmuls"):
        table.add_column(name, justify="right" if name in ("runs", "received") else "left", no_wrap=name == "where")
    rows: dict[tuple, list] = {}
    for c in one.program.collectives:
        if c.payload_bytes() >= least:
            where = one.bodies.get(c.computation, _OUTSIDE if c.runs == 1 else c.computation)
            rows.setdefault((where, str(c.runs or "?"), c.kind, " x ".join(c.axes), c.dtype), []).append(c)
    for (where, runs, kind, axes, dtype), found in rows.items():
        received = in_words(sum(c.received_bytes() for c in found))
        covered = [c.matmul_flops for c in found if not c.is_sync and c.matmul_flops]
        blocking = sum(c.is_sync for c in found)
        words = f"{len(covered)} of {len(found)}, {min(covered) / 1e9:,.0f}+ GFLOP" if covered else "none"
        words += f"; {blocking} block" if blocking else ""
        table.add_row(where, runs, f"{len(found)} x {kind}", axes, dtype, received, words)
    return table


def _exposed_table(one: Audited) -> Table:
    """Both estimates side by side: one run of each loop body, and the step."""
    xla, played = one.exposed, one.played
    step = one.step_played
    title = "Exposed communication in us, by estimate: nothing was timed"
    table = Table(box=box.SIMPLE, show_footer=True, title=title, **_TITLE)
    table.add_column("one run of", "a step")
    table.add_column("runs", "1", justify="right")
    if xla:
        table.add_column("by XLA", "void" if xla.is_void() else f"{xla.step_us:,.0f}", justify="right")
        table.add_column("of", justify="right")
    if step:
        table.add_column("by replay", f"{step.exposed_us:,.0f}", justify="right")
        table.add_column("of", f"{step.us:,.0f}", justify="right")
    for body, label in [*one.bodies.items(), (_entry(one), _OUTSIDE)]:
        cells = [label, str(one.program.runs.get(body) or "?")]
        if xla:
            found = None if xla.is_void(body) else xla.bodies.get(body)
            cells += ["void", ""] if found is None else [f"{found.exposed_us:,.0f}", f"{found.total_us:,.0f}"]
        if body in played and label != _OUTSIDE:  # the replay of the entry holds its loops
            cells += [f"{played[body].exposed_us:,.0f}", f"{played[body].us:,.0f}"]
        if label != _OUTSIDE or xla:
            table.add_row(*cells)
    return table


def _entry(one: Audited) -> str:
    return next(iter(one.program.runs))


def _doubts(one: Audited) -> Iterator[str]:
    if one.exposed:
        if one.exposed.is_void():
            yield "XLA's estimate of the step is void; the replay stands alone."
        named = one.bodies | {_entry(one): _OUTSIDE}
        for warning in one.exposed.warnings:
            words = [named.get(word, word) for word in warning.split(" ")]
            yield f"[yellow]note[/]  {escape(' '.join(words))}"
        inner = one.program.collectives and [loop for loop in one.program.loops if loop.depth > 1 and loop.matmul_flops]
        if inner and not one.exposed.is_void():
            yield (
                "[yellow]note[/]  XLA prices inner loops and attention kernels at nothing, so what they hide looks "
                "exposed; the replay counts them."
            )
    if one.platform == "cpu":
        yield "The CPU backend widens bf16 collectives to fp32 and blocks in each; kinds, groups and counts hold."


def comparison(a: Audited, b: Audited) -> Iterator[Table]:
    """Two programs side by side."""
    table = Table(box=box.SIMPLE, title="Two programs", **_TITLE)
    for name in ("what", a.name, b.name, "difference"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for words, pair in (
        ("compiled for", [x.platform for x in (a, b)]),
        ("mesh", ["x".join(map(str, x.mesh_shape.values())) for x in (a, b)]),
        ("by JAX", [x.jax_version for x in (a, b)]),
    ):
        table.add_row(words, *pair, "same" if pair[0] == pair[1] else "another")
    table.add_section()
    for name in ("argument", "temp", "needed"):
        table.add_row(f"memory: {name}", *_pair(getattr(a.memory, name), getattr(b.memory, name)))
    copied = [sum(c.bytes * (c.runs or 0) for c in x.program.copies(MIB)) for x in (a, b)]
    table.add_row("copied in loops", *_pair(*copied))
    table.add_section()
    for key in dict.fromkeys([*a.traffic, *b.traffic]):
        table.add_row(f"{key[0]} over {key[1]}, {key[2]}", *_pair(a.traffic.get(key, 0), b.traffic.get(key, 0)))
    table.add_row("collectives run", *_counts([sum(c.runs or 0 for c in x.program.collectives) for x in (a, b)]))
    if "cpu" not in (a.platform, b.platform):  # which blocks in all of them
        blocking = [sum(c.is_sync and c.payload_bytes() >= MIB for c in x.program.collectives) for x in (a, b)]
        table.add_row("places that block, 1 MiB or more", *_counts(blocking))
    table.add_section()
    table.add_row("matmuls, GFLOP", *_counts([x.program.matmul_flops / 1e9 for x in (a, b)]))
    if (steps := [x.step_played for x in (a, b)]) and all(steps):
        table.add_row("replay: step, us", *_counts([step.us for step in steps]))
        table.add_row("replay: exposed, us", *_counts([step.exposed_us for step in steps]))
        waits = [
            {label: (x.program.runs[body] or 0) * x.played[body].exposed_us for body, label in x.bodies.items()}
            for x in (a, b)
        ]
        for label in dict.fromkeys(k for one in waits for k in one):
            table.add_row(f"    in {label}", *_counts([one.get(label, 0) for one in waits]))
    yield table


def _counts(pair: Sequence[float]) -> tuple[str, str, str]:
    a, b = pair
    return f"{a:,.0f}", f"{b:,.0f}", "same" if a == b else f"{b - a:+,.0f}"


def _pair(a: float, b: float) -> tuple[str, str, str]:
    sign = "+" if b >= a else "-"
    return in_words(a), in_words(b), "same" if a == b else sign + in_words(abs(b - a))


def _traffic_table(title: str, columns: Mapping[str, Mapping[tuple, int]]) -> Table:
    table = Table(box=box.SIMPLE, show_footer=True, title=title, **_TITLE)
    for name, footer in (("collective", "in all"), ("over", ""), ("dtype", "")):
        table.add_column(name, footer)
    for name, sums in columns.items():
        table.add_column(name, in_words(sum(sums.values())), justify="right")
    for key in dict.fromkeys(k for sums in columns.values() for k in sums):
        table.add_row(*key, *(in_words(sums.get(key, 0)) for sums in columns.values()))
    return table


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Show what a compiled step moves, keeps and hides; two files are compared.

    jfsdp plan --compile --save FILE and python train.py --audit-file FILE write them.
    """

    first: Positional[Path]
    """A program."""
    second: Positional[Annotated[DisallowNone[Path | None], arg(metavar="FILE")]] = None
    """Another, to compare with."""
    picture: Annotated[DisallowNone[Path | None], arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Draw the schedule of the (last) program into an .html file."""

    def __post_init__(self):
        if self.picture:
            check_writable(self.picture, picture.ENDINGS)


def command(argv: Sequence[str]) -> int:
    """`jfsdp audit`."""
    options = tyro.cli(AuditOptions, prog="jfsdp audit", args=list(argv))
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    try:
        paths = [options.first] if options.second is None else [options.first, options.second]
        files = [replace(found := Audited.load(path), name=f"{path.name}: {found.name}") for path in paths]
        if options.picture:
            files[-1].draw(options.picture)
        for part in comparison(*files) if len(files) == 2 else tables(files[0]):
            console.print(part)
    except (ValueError, OSError) as error:
        print(f"jfsdp audit: error: {error}", file=sys.stderr)
        return 2
    return 0
