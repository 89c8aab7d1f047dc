"""Checkpoints of ours to Hugging Face folders and back: the commands `jfsdp export` and `jfsdp import`.

Owns what the commands ask and say, and how a checkpoint is read for an export: tensor by tensor from disk, on no
device. What is in such a folder is `huggingface.py`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from tyro.conf import DisallowNone, Positional

from jfsdp.checkpoint import open_checkpoint, steps_in
from jfsdp.families import find_model
from jfsdp.huggingface import SavedLayer, check_holds, load_pretrained, write_adapter, write_model
from jfsdp.layout import ParamLayout
from jfsdp.lora import add_lora, parse_lora
from jfsdp.mesh import make_mesh
from jfsdp.run_folder import Checkpoints, SaveError
from jfsdp.safetensors import MAX_FILE_BYTES
from jfsdp.state import TrainState
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


def _run_command(prog: str, kind: type, run: Callable[[Any], str], argv: Sequence[str]) -> int:
    options = tyro.cli(kind, prog=prog, args=list(argv))
    try:
        print(run(options))
    except (ValueError, OSError, NotImplementedError, SaveError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def export(options: Export) -> str:
    """What `jfsdp export` writes, and says.

    Raises: ValueError for a checkpoint that does not say which model it holds, or holds another one.
    """
    if options.out.exists() and not options.overwrite and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"{options.out} is there already and not empty. Name another folder, or use --overwrite.")
    found = open_checkpoint(options.checkpoint)
    run = found.metadata.run
    if (name := options.model or run.get("model")) is None:
        raise ValueError(f"{found.path} does not say which model it holds. Name it with --model.")
    model, lora = find_model(name), parse_lora(run["lora"]) if run.get("lora") else None
    base = options.base or run.get("init_from")

    def make() -> nnx.Module:
        module = model.family.build(model.config, rngs=nnx.Rngs(0))
        return module if lora is None else add_lora(module, lora, rngs=nnx.Rngs(0))

    plan = plan_module(make, mesh=make_mesh("1x1", devices=jax.devices()[:1]))
    held = found.metadata.leaves
    check_holds(found, {leaf.path: leaf.logical_shape for leaf in plan.leaves}, options.part)
    stored = lambda leaf: jnp.dtype(held[f"{options.part}.{leaf.path}"].dtype)  # noqa: E731
    plan = replace(plan, layouts=plan.map(lambda leaf: replace(leaf, dtype=stored(leaf))))

    def read(leaf: ParamLayout, layer: int) -> np.ndarray:
        name, layer = f"{options.part}.{leaf.path}", None if leaf.layers is None else layer
        return SavedLayer(found, name, layer, leaf.shape)[tuple(slice(0, n) for n in leaf.shape)]

    if options.adapter:
        if lora is None:
            raise ValueError(f"{found.path} is of a run without --lora, so it has no adapters. Leave out --adapter.")
        return _told(options.out, write_adapter(options.out, read, plan, model.family, lora, base=base))
    scale = 1.0 if lora is None else lora.scale
    shape = dict(dtype=options.dtype, base=base, lora_scale=scale, max_file_bytes=MAX_FILE_BYTES)
    return _told(options.out, write_model(options.out, read, plan, model.family, model.config, **shape))


def _told(folder: Path, files: list[Path]) -> str:
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return f"{folder}: {count}, {sum(file.stat().st_size for file in files):,} bytes of weights"


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
    plan = plan_module(lambda: model.family.build(model.config, rngs=nnx.Rngs(0)), mesh=make_mesh("auto"))
    params = load_pretrained(options.folder, plan, model.family)
    with Checkpoints(options.checkpoint) as checkpoints:
        state = TrainState.create(params, optax.identity(), plan)
        checkpoints.save(state, run=dict(model=str(path), init_from=str(options.folder.absolute())))
    return f"{checkpoints.path(0)}: {plan.num_params:,} parameters of {model.name}"
