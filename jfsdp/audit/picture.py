"""The schedule as a picture: compute and communication lanes of loop bodies, one HTML file that needs nothing else.

Owns the drawing. What happens when is `replay.py`'s.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

from jfsdp.audit.replay import Event, Played

ENDINGS = (".html", ".htm")
_WIDTH, _LANE = 1160, 34
_LANES = ("compute", "communication")
_COLOURS = {
    "matmul": "#3b75af",
    "attention": "#6aa2d8",
    "loop": "#6aa2d8",
    "other": "#c3d3e3",
    "all-gather": "#e08f2e",
    "reduce-scatter": "#5a9e5a",
    "all-reduce": "#9467bd",
    "all-to-all": "#8c6d46",
    "collective-permute": "#8c6d46",
    "exposed": "#d62728",
}
_WORDS = {
    "matmul": "matmul",
    "attention": "attention (an inner loop)",
    "loop": "inner loop",
    "other": "other kernels",
    "exposed": "compute waits (exposed)",
}
_STYLE = """
 body { font: 14px/1.45 system-ui, sans-serif; margin: 24px auto; max-width: 1200px; color: #222; background: #fff }
 h1 { font-size: 18px; margin: 0 0 4px } h2 { font-size: 15px; margin: 26px 0 4px } p { margin: 0 0 8px; color: #555 }
 svg { display: block; background: #f7f8fa; border: 1px solid #dde1e6 } text { font: 11px system-ui, sans-serif }
 .key span { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; border-radius: 2px }
"""


def draw(bodies: Mapping[str, Played], path: Path, *, title: str, subtitle: str) -> None:
    """Write the picture of some computations, by the name they shall have."""
    parts = [f"<h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>", _key(bodies)]
    for name, body in bodies.items():
        words = f"{body.us:,.0f} us, of which compute waits {body.exposed_us:,.0f} us"
        parts.append(f"<h2>{html.escape(name)}</h2><p>{words}</p>{_lanes(body)}")
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    path.write_text(page + "\n".join(parts))


def _key(bodies: Mapping[str, Played]) -> str:
    used = dict.fromkeys(_kind(e) for body in bodies.values() for e in body.events)
    spans = [f'<span style="background:{_COLOURS[kind]}"></span>{_WORDS.get(kind, kind)}' for kind in used]
    return f'<p class="key">{"".join(spans)}</p>'


def _lanes(body: Played) -> str:
    left, scale = 110, (_WIDTH - 120) / max(body.us, max((e.end for e in body.events), default=1.0))
    height = len(_LANES) * (_LANE + 10) + 30
    parts = [f'<svg width="{_WIDTH}" height="{height}" role="img" aria-label="schedule">']
    for row, lane in enumerate(_LANES):
        parts.append(f'<text x="8" y="{row * (_LANE + 10) + 28}">{lane}</text>')
    for e in body.events:
        row = 1 if e.lane == "communication" else 0
        x, width = left + e.begin * scale, max((e.end - e.begin) * scale, 0.6)
        tip = html.escape(f"{e.what}\n{e.name}\n{e.begin:,.0f} to {e.end:,.0f} us")
        parts.append(
            f'<rect x="{x:.1f}" y="{row * (_LANE + 10) + 8}" width="{width:.1f}" height="{_LANE}" rx="1.5" '
            f'fill="{_COLOURS[_kind(e)]}" stroke="#fff" stroke-width="0.4"><title>{tip}</title></rect>'
        )
        label = next((words for words in (e.what, e.what.split()[0]) if len(words) * 7 + 8 < width), "")
        if label:
            parts.append(
                f'<text x="{x + 4:.1f}" y="{row * (_LANE + 10) + 29}" fill="#fff" pointer-events="none">'
                f"{html.escape(label)}</text>"
            )
    for tick in range(6):
        x, us, anchor = left + tick / 5 * body.us * scale, tick / 5 * body.us, "end" if tick == 5 else "start"
        parts.append(f'<text x="{x:.0f}" y="{height - 8}" fill="#777" text-anchor="{anchor}">{us:,.0f} us</text>')
    return "".join([*parts, "</svg>"])


def _kind(e: Event) -> str:
    if e.lane == "wait":
        return "exposed"
    first = e.what.split()[0]
    return first if first in _COLOURS else "other"
