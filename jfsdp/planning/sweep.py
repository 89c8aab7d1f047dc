"""Memory and time of every strategy over numbers of devices: a table, and a plot.

Owns the matrix and its drawing; every figure is `forecast.py`'s. The .png needs matplotlib (the extra `plot`), which is
imported only then; the .html holds the same plot as SVG and needs nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from jfsdp.planning.forecast import GIB, Forecast
from jfsdp.planning.workload import Workload

STRATEGIES = ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COLOURS = {"NO_SHARD": "#d62728", "SHARD_OPT": "#e08f2e", "SHARD_GRAD_OP": "#5a9e5a", "FULL_SHARD": "#3b75af"}


@dataclass(frozen=True)
class Point:
    """One strategy on one number of devices. Memory in bytes, time in seconds."""

    devices: int
    strategy: str
    needed: float
    capacity: float
    compute: float
    exposed: float
    slowed: float
    tokens_per_second: float
    mfu: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity

    def to_json(self) -> dict[str, Any]:
        return self.__dict__ | {"fits": self.fits}


def sweep(work: Workload, counts: Sequence[int] = COUNTS) -> list[Point]:
    """Every strategy on 1xN of the workload's GPUs; the batch of a GPU stays."""
    points = []
    for n in counts:
        if n > work.per_host and n % work.per_host:
            continue
        for strategy in STRATEGIES:
            f = Forecast(replace(work, mesh=f"1x{n}", strategy=strategy))
            t = f.timing
            points.append(
                Point(
                    devices=n,
                    strategy=strategy,
                    needed=f.needed,
                    capacity=f.capacity,
                    compute=t.forward + t.backward + t.head + t.optimizer,
                    exposed=t.exposed,
                    slowed=t.slowed,
                    tokens_per_second=t.tokens_per_second,
                    mfu=t.mfu,
                )
            )
    return points


def table(points: Sequence[Point], work: Workload) -> Table:
    """GiB of a GPU and tokens per second of a GPU; what does not fit in red."""
    out = Table(box=box.SIMPLE, title=_title(work), title_justify="left", title_style="bold cyan")
    out.add_column("GPUs", justify="right")
    for strategy in STRATEGIES:
        out.add_column(f"{strategy}\nGiB, tokens/s per GPU", justify="right")
    for n in dict.fromkeys(p.devices for p in points):
        cells = []
        for p in (p for p in points if p.devices == n):
            words = f"{p.needed / GIB:,.1f}, {p.tokens_per_second:,.0f}"
            cells.append(words if p.fits else f"[red]{p.needed / GIB:,.1f}, too much[/]")
        out.add_row(str(n), *cells)
    return out


def draw(points: Sequence[Point], work: Workload, path: Path) -> None:
    """The memory ladder and the split of a step's time, as .png or .html.

    Raises: ValueError for another ending, RuntimeError where matplotlib is not installed for a .png.
    """
    if path.suffix.lower() == ".png":
        _draw_png(points, work, path)
    elif path.suffix.lower() in (".html", ".htm"):
        path.write_text(_page(points, work))
    else:
        raise ValueError(f"the plot of a sweep is a .png or an .html, and {path} is neither.")


def _draw_png(points: Sequence[Point], work: Workload, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise RuntimeError(
            f"a .png needs matplotlib: pip install 'jfsdp[plot]', or write an .html. ({error})"
        ) from error
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(12, 4.6))
    for strategy in STRATEGIES:
        own = [p for p in points if p.strategy == strategy]
        memory.plot(
            [p.devices for p in own], [p.needed / GIB for p in own], "o-", label=strategy, color=_COLOURS[strategy]
        )
    memory.axhline(points[0].capacity / GIB, color="black", linestyle="--", linewidth=1, label="one GPU holds")
    memory.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="GiB per GPU", title="memory")
    memory.set_xscale("log", base=2)
    counts, largest = list(dict.fromkeys(p.devices for p in points)), max(p.needed for p in points) / GIB
    memory.set_xticks(counts, map(str, counts))
    sizes = [2**i for i in range(math.floor(math.log2(min(p.needed for p in points) / GIB)), 12) if 2**i <= largest]
    memory.set_yticks(sizes, [f"{size:g}" for size in sizes])
    memory.minorticks_off()
    memory.legend()
    own = [p for p in points if p.strategy == "FULL_SHARD"]
    names, bottom = [str(p.devices) for p in own], [0.0] * len(own)
    for part, colour in (("compute", "#3b75af"), ("slowed", "#c3d3e3"), ("exposed", "#d62728")):
        values = [getattr(p, part) * 1e3 for p in own]
        time.bar(names, values, bottom=bottom, label=part, color=colour)
        bottom = [a + b for a, b in zip(bottom, values)]
    time.set(xlabel="GPUs", ylabel="ms of a step", title="time, FULL_SHARD (estimate)")
    time.margins(y=0.2)  # room for the legend above the bars
    time.legend(loc="upper center", ncols=3)
    figure.suptitle(_title(work))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _page(points: Sequence[Point], work: Workload) -> str:
    title = html.escape(_title(work))
    key = "".join(f'<span style="color:{c}">&#9632; {name}</span> &nbsp; ' for name, c in _COLOURS.items())
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:24px auto;max-width:960px;color:#222;background:#fff}"
        "h1{font-size:18px}text{font:11px system-ui,sans-serif}svg{background:#f7f8fa}</style>"
        f"<h1>{title}</h1><p>GiB per GPU (line: one GPU holds; pale: does not fit) &nbsp; {key}</p>{_ladder(points)}"
        "<p>ms of a step, FULL_SHARD, an estimate: compute (blue), slowed by communication (grey), exposed (red)"
        f"{_split(points)}"
    )


def _ladder(points: Sequence[Point]) -> str:
    capacity = points[0].capacity
    top = capacity * 1.5
    counts = list(dict.fromkeys(p.devices for p in points))
    step, height = 920 / len(counts), 260
    parts = [f'<svg width="940" height="{height + 30}">']
    for i, n in enumerate(counts):
        for j, p in enumerate(p for p in points if p.devices == n):
            tall = min(p.needed / top, 1) * height
            x = 10 + i * step + j * (step - 12) / 4
            tip = f"{p.strategy} on {n}: {p.needed / GIB:,.1f} GiB" + ("" if p.fits else ", does not fit")
            parts.append(
                f'<rect x="{x:.1f}" y="{height - tall:.1f}" width="{(step - 16) / 4:.1f}" height="{tall:.1f}" '
                f'fill="{_COLOURS[p.strategy]}" opacity="{1 if p.fits else 0.35}"><title>{tip}</title></rect>'
            )
        parts.append(f'<text x="{10 + i * step:.0f}" y="{height + 18}">{n} GPUs</text>')
    y = height - capacity / top * height
    parts.append(f'<line x1="0" x2="940" y1="{y:.0f}" y2="{y:.0f}" stroke="#222" stroke-dasharray="5 4"/></svg>')
    return "".join(parts)


def _split(points: Sequence[Point]) -> str:
    own = [p for p in points if p.strategy == "FULL_SHARD"]
    most, height, step = max(p.compute + p.slowed + p.exposed for p in own), 200, 920 / len(own)
    parts = [f'<svg width="940" height="{height + 30}">']
    for i, p in enumerate(own):
        y = float(height)
        for part, colour in (("compute", "#3b75af"), ("slowed", "#c3d3e3"), ("exposed", "#d62728")):
            tall = getattr(p, part) / most * (height - 10)
            y -= tall
            tip = f"{part} on {p.devices}: {getattr(p, part) * 1e3:,.0f} ms"
            parts.append(
                f'<rect x="{10 + i * step:.1f}" y="{y:.1f}" width="{step - 14:.1f}" height="{tall:.1f}" '
                f'fill="{colour}">'
                f"<title>{tip}</title></rect>"
            )
        parts.append(f'<text x="{10 + i * step:.0f}" y="{height + 18}">{p.devices} GPUs</text>')
    return "".join([*parts, "</svg>"])


def _title(work: Workload) -> str:
    batch = f"{work.tokens:,} tokens per GPU, {work.precision}, remat {work.remat}"
    return f"{work.model} on {work.cluster.chip.name}, {batch}"
