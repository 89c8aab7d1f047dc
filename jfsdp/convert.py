"""Checkpoints of ours to Hugging Face folders and back: the commands `jfsdp export` and `jfsdp import`.

Owns what the commands ask, show and say, and that both ways go piece by piece from disk to disk, on no device. What is
in such a folder is `huggingface.py`'s.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tyro.conf import DisallowNone, Positional

from jfsdp.checkpoint import (
    Checkpoint,
    Leaf,
    describe,
    is_complete,
    open_checkpoint,
    step_folder,
    steps_in,
    write_pieces,
)
from jfsdp.families import find_model
from jfsdp.huggingface import (
    Named,
    Read,
    check_holds,
    is_adapter,
    match_pretrained,
    tokenizer_files,
    write_adapter,
    write_model,
)
from jfsdp.layout import ParamLayout, Plan
from jfsdp.lora import add_lora, parse_lora
from jfsdp.mesh import make_mesh
from jfsdp.safetensors import MAX_FILE_BYTES, PART, Tensor
from jfsdp.store import Piece, hash_piece
from jfsdp.wrap import plan_module


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the model in a checkpoint of a run as a Hugging Face folder, tensor by tensor; no device holds it."""

    checkpoint: Positional[Path]
    """A checkpoint, or a run's folder: its newest one."""
    out: Positional[Path]
    """The folder to write."""
    model: DisallowNone[str | None] = None
    """The model, as for train.py; what the run was started with unless given."""
    base: DisallowNone[Path | None] = None
    """The Hugging Face folder that the run began with: its config.json is kept where the model does not say otherwise,
    and its tokenizer is copied. What the run was started with unless given."""
    dtype: DisallowNone[Literal["fp32", "bf16", "fp16"] | None] = None
    """Dtype of the tensors on disk; each keeps its own unless given."""
    adapter: bool = False
    """Write the LoRA adapters alone, for peft; without it they are merged into the weights."""
    part: Literal["params", "ema"] = "params"
    """The weights, or their moving average."""
    overwrite: bool = False
    """Write into a folder that has files already."""


def export_command(argv: Sequence[str]) -> int:
    """`jfsdp export CKPT OUT`; gives the exit code."""
    return _run_command("jfsdp export", Export, export, argv)


def import_command(argv: Sequence[str]) -> int:
    """`jfsdp import FOLDER CKPT`; gives the exit code."""
    return _run_command("jfsdp import", Import, import_, argv)


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
"""What launchers number processes by. Where one starts a command several times, the first process does it alone."""


def _run_command(prog: str, kind: type, run: Callable[[Any], str], argv: Sequence[str]) -> int:
    options = tyro.cli(kind, prog=prog, args=list(argv))
    if rank := next((f"{name}={os.environ[name]}" for name in _RANKS if os.environ.get(name, "0") != "0"), None):
        print(f"{prog}: left to process 0, as this is another one ({rank}).", file=sys.stderr)
        return 0
    try:
        with _signals_clean_up(prog):
            print(run(options))
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _signals_clean_up(prog: str) -> Iterator[None]:
    """A signal ends the command with 128 + its number, as shells have it, after what is half written was removed."""

    def stop(number: int, _) -> None:
        print(f"{prog}: {signal.Signals(number).name}: removing what is half written.", file=sys.stderr)
        raise SystemExit(128 + number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bar(words: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes in a terminal, and nothing elsewhere; what comes back advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    left = (TimeRemainingColumn(compact=True), TextColumn("[cyan]left"))
    with Progress(*columns, *left, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=total)
        yield lambda count: bar.advance(task, count)


def export(options: Export) -> str:
    """What `jfsdp export` writes, and says.

    Raises: ValueError for a checkpoint that does not say which model it holds, or holds another one.
    """
    _check_empty(options.out, options.overwrite)
    found = open_checkpoint(options.checkpoint)
    run = found.metadata.run
    if (name := options.model or run.get("model")) is None:
        raise ValueError(f"{found.path} does not say which model it holds. Name it with --model.")
    model, lora = find_model(name), parse_lora(run["lora"]) if run.get("lora") else None
    base = options.base or run.get("init_from")
    if options.base is not None and not options.adapter and not (options.base / "config.json").is_file():
        raise ValueError(f"--base {base} has no config.json. Name the Hugging Face folder that the run began with.")

    def make() -> nnx.Module:
        module = model.family.build(model.config, rngs=nnx.Rngs(0))
        return module if lora is None else add_lora(module, lora, rngs=nnx.Rngs(0))

    plan = plan_module(make, mesh=make_mesh("1x1", devices=jax.devices()[:1]))
    check_holds(found, {leaf.path: leaf.logical_shape for leaf in plan.leaves})
    names = _names(found, plan, options.part)
    stored = {path: jnp.dtype(found.metadata.leaves[name].dtype) for path, name in names.items()}
    plan = replace(plan, layouts=plan.map(lambda leaf: replace(leaf, dtype=stored[leaf.path])))
    if options.adapter and lora is None:
        raise ValueError(f"{found.path} is of a run without --lora, so it has no adapters. Leave out --adapter.")
    wanted = [names[leaf.path] for leaf in plan.leaves if is_adapter(leaf) or not options.adapter]
    with _bar("exporting", sum(found.metadata.leaves[name].nbytes for name in wanted)) as advance:
        read = _reader(found, names, advance)
        if options.adapter:
            return _told(write_adapter(options.out, read, plan, model.family, lora, base=base))
        scale = 1.0 if lora is None else lora.scale
        shape = dict(dtype=options.dtype, base=base, lora_scale=scale, max_file_bytes=MAX_FILE_BYTES)
        told = _told(write_model(options.out, read, plan, model.family, model.config, **shape))
    if base is not None and not Path(base).is_dir():
        told += f"\n{base}, which the run began with, is gone, and so is its tokenizer. Name its new place with --base."
    return told


def _reader(found: Checkpoint, names: dict[str, str], advance: Callable[[int], None]) -> Read:
    """Reads layers, and when all of a parameter were read, compares their content with what was saved.

    Raises: DamagedCheckpoint.
    """
    parts: dict[str, dict[int, int]] = {}

    def read(leaf: ParamLayout, layer: int) -> np.ndarray:
        name, where = names[leaf.path], tuple(slice(0, n) for n in leaf.shape)
        where = where if leaf.layers is None else (slice(layer, layer + 1), *where)
        values = found.read(name, where)
        hashes = parts.setdefault(name, {})
        hashes[layer] = hash_piece(Piece(where, values), leaf.logical_shape)
        if len(hashes) == (leaf.layers or 1):
            found.check_hashes({name: sum(hashes.values())})
        advance(values.nbytes)
        return values if leaf.layers is None else values[0]

    return read


def _names(found: Checkpoint, plan: Plan, part: str) -> dict[str, str]:
    """What each parameter's values are called in the checkpoint: those of the average, where frozen ones have none."""
    held = found.metadata.leaves
    if not any(name.startswith(f"{part}.") for name in held):
        raise ValueError(f"{found.path} is of a run without --{part}. Leave out --part {part}.")
    of_part = {leaf.path: f"{part}.{leaf.path}" for leaf in plan.leaves}
    return {path: name if name in held else f"params.{path}" for path, name in of_part.items()}


def _check_empty(out: Path, overwrite: bool) -> None:
    """Raises: ValueError for a folder with files that are not just what a killed export left."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file. Name a folder to write.")
    if is_complete(out) or steps_in(out):
        raise ValueError(f"{out} has checkpoints, for which an export in it would be taken. Name another folder.")
    if not overwrite and out.exists() and any(not path.name.endswith(PART) for path in out.iterdir()):
        raise ValueError(f"{out} is there already and not empty. Name another folder, or use --overwrite.")


def _told(files: list[Path]) -> str:
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return f"{files[0].parent}: {count}, {sum(file.stat().st_size for file in files):,} bytes of weights"


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a checkpoint of the weights in a Hugging Face folder, to begin runs with: train.py --init-from."""

    folder: Positional[Path]
    """The Hugging Face folder."""
    checkpoint: Positional[Path]
    """The folder of the checkpoint to write."""


def import_(options: Import) -> str:
    """What `jfsdp import` writes, and says.

    Raises: ValueError for a folder that does not hold a model that a family takes.
    """
    path = (options.folder / "config.json").absolute()
    model = find_model(str(path))
    if steps_in(options.checkpoint):
        raise ValueError(f"{options.checkpoint} holds checkpoints already. Name another folder.")
    mesh = make_mesh("1x1", devices=jax.devices()[:1])
    plan = plan_module(lambda: model.family.build(model.config, rngs=nnx.Rngs(0)), mesh=mesh)
    named, found = match_pretrained(options.folder, plan, model.family)
    beside = [path, *tokenizer_files(options.folder)]
    _write_checkpoint(target := step_folder(options.checkpoint, 0), named, found, plan, beside)
    return f"{target}: {plan.num_params:,} parameters of {model.name}"


_BESIDE = "huggingface"


def _write_checkpoint(
    target: Path, named: list[Named], found: dict[str, Tensor], plan: Plan, beside: list[Path]
) -> None:
    """A checkpoint with what is `beside` the weights, so that it is of use when the folder is gone.

    Raises: OSError in words; nothing of it is left then.
    """
    leaves = {_name(one): Leaf(shape=one.leaf.logical_shape, dtype=one.leaf.dtype.name) for one in named}
    base = target.absolute() / _BESIDE
    metadata = describe({}, plan, "sharded", step=0, run=dict(model=str(base / "config.json"), init_from=str(base)))
    part = target.with_name(target.name + PART)
    shutil.rmtree(part, ignore_errors=True)  # of an import that was killed
    try:
        part.mkdir(parents=True)
        with _bar("importing", sum(leaf.nbytes for leaf in leaves.values())) as advance:
            write_pieces(part, _pieces(named, found, advance), metadata, leaves)
        (part / _BESIDE).mkdir()
        for path in beside:
            shutil.copy(path, part / _BESIDE)
        part.rename(target)
    except OSError as error:
        raise OSError(f"{target} could not be written: {error}. Make room, or name another folder.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _pieces(
    named: list[Named], found: dict[str, Tensor], advance: Callable[[int], None]
) -> Iterator[tuple[str, Piece]]:
    """Layer by layer, each as the model stores it."""
    for one in named:
        where = tuple(slice(0, n) for n in one.leaf.shape)
        for layer, names in enumerate(one.layers):
            values = one.read([found[name] for name in names], where).astype(one.leaf.dtype, copy=False)
            if one.leaf.layers is None:
                yield _name(one), Piece(where, values)
            else:
                yield _name(one), Piece((slice(layer, layer + 1), *where), values[None])
            advance(values.nbytes)


def _name(one: Named) -> str:
    return f"params.{one.leaf.path}"
