"""What is in a checkpoint, as a table: `jfsdp inspect`. Reads no array."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from jfsdp.checkpoint import open_checkpoint
from jfsdp.metrics import in_words


def inspect(path: str | os.PathLike) -> Table:
    """A table of a checkpoint: where it comes from, and each array's shape, dtype and bytes. Reads no array."""
    found = open_checkpoint(path)
    m = found.metadata
    facts = {
        "step": f"{m.step}" + (f", metric {m.metric:.6g}" if m.metric is not None else ""),
        "kind": m.kind,
        "saved on": m.where(),
        "saved at": m.saved_at,
        "with": ", ".join(f"{name} {version}" for name, version in m.versions.items()),
        "counters": ", ".join(f"{name} {value}" for name, value in m.counters.items()),
        "data": ", ".join(f"{name} {value}" for name, value in (m.data or {}).items()),
        "random": ", ".join(f"{name} {value}" for name, value in m.generator.items()),
        "on disk": f"{in_words(sum(m.files.values()))} in {len(m.files)} files, every size as written",
    }
    words = "\n".join(f"{name:10} {value}" for name, value in facts.items() if value)
    table = Table(
        box=box.SIMPLE, show_footer=True, title=f"{found.path}\n{words}", title_justify="left", title_style=""
    )
    total = sum(leaf.nbytes for leaf in m.leaves.values())
    table.add_column("array", f"{len(m.leaves)} arrays")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", in_words(total), justify="right")
    table.add_column("content hash", style="dim")
    for name, leaf in m.leaves.items():
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        table.add_row(name, shape, leaf.key or leaf.dtype, in_words(leaf.nbytes), leaf.hash)
    return table


def inspect_command(argv: Sequence[str]) -> int:
    """`jfsdp inspect CKPT`; gives the exit code."""
    parser = argparse.ArgumentParser("jfsdp inspect", description="Tell what is in a checkpoint; read no array of it.")
    parser.add_argument("checkpoint", help="a folder step_*, or the folder of a run for its newest checkpoint")
    try:
        table = inspect(parser.parse_args(list(argv)).checkpoint)
    except (ValueError, OSError) as error:
        print(f"jfsdp inspect: error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=120)).print(table)
    return 0
