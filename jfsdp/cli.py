"""The command line: its options, what they are checked against, the models they name, and the tables they print.

Owns everything between the words a user types and the objects of the library, and refuses what cannot work before
anything compiles. Knows models only as families (Note [Families]); the story of a run is told by `train.py`.

Note [Families]
A family is a module found under its name in the entry-point group `jfsdp.models`, or written out as
`package.module:preset`. It offers `presets` (name -> config), `build(config, *, rngs, remat, schedule)`,
`config_from(dict)` for a Hugging Face `config.json`, and `flops(config, seq_len)` per token. A config has a
`vocab_size`; what `build` makes has `loss(tokens, targets, weights, *, segments, positions) -> (sum, weight)`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import jax
import optax
import tyro
from jax.sharding import Mesh
from rich import box
from rich.table import Table
from tyro.conf import DisallowNone, OmitArgPrefixes, arg

from jfsdp.layout import ParamLayout, Plan
from jfsdp.mesh import make_mesh, parse_mesh, simulate_devices

# Options


def _worked_out(metavar: str, default: str) -> Any:
    """A field that is None until something else is known; `default` says in the help what it will be."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where it runs and what each device holds."""

    mesh: Annotated[str, arg(metavar="RxS")] = "auto"
    """4x8 is 4 replicas (copies of the model) of 8 shards (pieces of each copy); 8 is 1x8; auto takes every device as
    a shard. Without GPUs, so many CPU devices are simulated."""
    strategy: Annotated[DisallowNone[str | None], _worked_out("NAME", "HYBRID_SHARD on several replicas, else FULL_SHARD")] = None
    """FULL_SHARD, SHARD_GRAD_OP, SHARD_OPT, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2, as in PyTorch."""
    simulate: Annotated[DisallowNone[int | None], _worked_out("N", "all GPUs, else as many as the mesh, else 8")] = None
    """Simulate N devices on the CPU, whatever else is there."""
    allow_idle: bool = False
    """Let a mesh smaller than the machine leave devices unused."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained, and how each layer computes."""

    model: Annotated[str, arg(metavar="NAME")] = "llama-2m"
    """A preset such as llama-2m, a family (its first preset), a Hugging Face config.json, or package.module:preset."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gathers and matmuls; stored weights and the optimizer stay fp32."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients travel and are summed."""
    remat: Literal["none", "full", "dots"] = "none"
    """Activation checkpointing: none saves all activations, full only each layer's input, dots also matmul outputs."""
    prefetch: Literal[0, 1, 2] = 1
    """Layers gathered ahead of the one that computes; each costs the memory of one whole layer."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it learns from."""

    data: Annotated[DisallowNone[Path | None], _worked_out("PATH", "the source of Python's standard library")] = None
    """A text file, a folder of text, a .jsonl with "text", or a .npy or .bin of token ids."""
    seq_len: int = 256
    """Tokens of a sequence."""
    batch_size: Annotated[DisallowNone[int | None], _worked_out("N", "16, or the next multiple of devices x accumulate")] = None
    """Sequences of an optimizer step, over all devices and micro-batches."""
    accumulate: int = 1
    """Micro-batches that an optimizer step is computed in: less memory, the same result."""
    held_out: float = 0.05
    """Fraction of the data kept for evaluation; 0 evaluates nothing."""
    end_of_document: Annotated[DisallowNone[int | None], _worked_out("ID", "none, one document")] = None
    """The id that ends a document in a file of token ids."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How it learns: AdamW, linear warm-up, then cosine to a tenth."""

    steps: int = 150
    """Optimizer steps."""
    lr: float = 4e-3
    """Learning rate at its peak."""
    warmup: Annotated[DisallowNone[int | None], _worked_out("N", "a tenth of the steps, at most 1000")] = None
    """Steps until the peak."""
    weight_decay: float = 0.1
    """Decoupled, on matrices only."""
    clip_norm: Annotated[float | None, arg(metavar="NORM")] = 1.0
    """Largest norm of the whole gradient; None does not clip."""
    seed: int = 0
    """Start values, the order of the data, and dropout."""

    @property
    def warmup_steps(self) -> int:
        return min(self.steps // 10, 1000) if self.warmup is None else self.warmup

    def __post_init__(self):
        for name, least in dict(steps=1, warmup_steps=0, weight_decay=0, seed=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; use {least} or more.")
        if not self.lr > 0:
            raise ValueError(f"lr is {self.lr}; a learning rate is above 0, for example 1e-3.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; use a positive norm, or None not to clip.")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup is {self.warmup_steps} of {self.steps} steps; use fewer than all of them.")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What it tells."""

    eval_every: Annotated[DisallowNone[int | None], _worked_out("N", "at the end only")] = None
    """Steps between evaluations on the held-out data."""
    eval_batches: int = 16
    """Batches of an evaluation, evenly spread over the held-out data."""
    metrics: Annotated[DisallowNone[Path | None], _worked_out("FILE", "none")] = None
    """Write a JSON object per step to FILE: loss, grad_norm, lr, tokens, tokens_per_s, step_time_s and more."""
    tensorboard: Annotated[DisallowNone[Path | None], _worked_out("FOLDER", "none")] = None
    """Write the same as TensorBoard events (needs jfsdp[tensorboard])."""
    dry_run: bool = False
    """Print units, memory and traffic by formula, and train nothing."""
    config: Annotated[DisallowNone[Path | None], _worked_out("FILE", "none")] = None
    """TOML with any of these options as defaults (batch-size = 32); what is on the command line wins."""

    def __post_init__(self):
        for name in ("eval_every", "eval_batches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model with its parameters sharded, as PyTorch FSDP does, on any mesh of devices.

    Without options: a small Llama on the source of Python's standard library, on all GPUs or 8 simulated devices.

      python train.py --mesh 4x8              4 replicas of 8 shards; simulated where there are no GPUs
      python train.py --data my-texts/        your own text, a byte a token
      python train.py --model llama3-8b --data ids.bin --seq-len 4096 --precision bf16 --remat full
      python train.py --model llama3-70b --simulate 64 --mesh 8x8 --dry-run
    """

    devices: DeviceConfig = DeviceConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    output: OutputConfig = OutputConfig()


def parse(argv: Sequence[str] | None = None) -> TrainConfig:
    """Read the command line, and the file that `--config` names for its defaults.

    Exits with code 2 and a message for what is not understood. Raises: ValueError for a file that is not.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config", type=Path)
    path = early.parse_known_args(argv)[0].config
    default = TrainConfig() if path is None else _parse(_from_toml(path), f"train.py --config {path}", TrainConfig())
    return _parse(argv, "train.py", default)


def _parse(argv: list[str], prog: str, default: TrainConfig) -> TrainConfig:
    return tyro.cli(OmitArgPrefixes[TrainConfig], prog=prog, args=argv, default=default)


def _from_toml(path: Path) -> list[str]:
    """The file's options as they would be typed, so that both are read and checked by the same code."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a TOML file of options: {error}.") from error
    known = [option.name for group in fields(TrainConfig) for option in fields(group.default) if option.name != "config"]
    words = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(f"{path}: option {key!r} is unknown. Known are {', '.join(known).replace('_', '-')}.")
        if isinstance(value, (list, dict)):
            raise ValueError(f"{path}: option {key!r} is a {type(value).__name__}; write one value, as on the command line.")
        flag = name.replace("_", "-")
        words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    return words


# Devices


def start(config: DeviceConfig) -> Mesh:
    """Start JAX and lay the mesh over its devices: GPUs where there are any, else simulated ones on the CPU.

    Raises: ValueError for a mesh that is not understood or does not fit, RuntimeError when JAX cannot start as asked.
    """
    replica, shard = parse_mesh(config.mesh, config.simulate or 8)
    if config.simulate is not None:
        simulate_devices(config.simulate)
    else:
        _simulate_without_gpus(replica * shard)
    return make_mesh(config.mesh, allow_idle=config.allow_idle)


def _simulate_without_gpus(count: int) -> None:
    """Let the CPU be `count` devices should JAX find no GPUs: the flag is read by the CPU backend alone."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def device_note(mesh: Mesh) -> str:
    """`8 x NVIDIA H100 80GB HBM3`, or `8 simulated CPU devices`, and why GPUs are not used if they seem to be there."""
    device, count = mesh.devices.flat[0], mesh.devices.size
    if device.platform != "cpu":
        return f"{count} x {device.device_kind}"
    note = f"{count} simulated CPU device{'s' * (count > 1)}"
    if any(Path("/dev").glob("nvidia[0-9]*")) and not os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        note += " (there are NVIDIA GPUs, which this JAX cannot use: pip install 'jfsdp[cuda12]')"
    return note


# Models


class Model(NamedTuple):
    """What `--model` named. See Note [Families]."""

    name: str
    family: ModuleType
    config: Any


def find_model(name: str) -> Model:
    """The model that `name` means: preset, family, path of a `config.json`, or `package.module:preset`.

    Raises: ValueError listing what is known; NotImplementedError for a config.json that no family computes.
    """
    if name.endswith(".json") or os.sep in name:
        return _from_config_json(Path(name))
    if ":" in name:
        module, _, preset = name.partition(":")
        try:
            families = {module: importlib.import_module(module)}
        except ImportError as error:
            raise ValueError(f"model {name!r}: module {module!r} cannot be imported ({error}). Write package.module:preset.") from error
        name = preset
    else:
        families = _families()
    known = {preset: Model(preset, family, config) for family in families.values() for preset, config in family.presets.items()}
    firsts = {family: next(iter(module.presets)) for family, module in families.items()}
    if (preset := firsts.get(name, name)) not in known:
        raise ValueError(f"model {name!r} is unknown. Use one of {', '.join(known)}, or the path of a config.json.")
    return known[preset]


def _from_config_json(path: Path) -> Model:
    path = path / "config.json" if path.is_dir() else path
    try:
        hf = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model {str(path)!r} is no config.json that can be read ({error}).") from error
    refusals = []
    for family in _families().values():
        try:
            return Model(str(path), family, family.config_from(hf))
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            refusals.append(str(error))
    raise NotImplementedError(f"{path}: no model family takes it. {' '.join(refusals)}")


def _families() -> dict[str, ModuleType]:
    """Installed families, and those of the source tree that this file lies in (found before it is installed)."""
    found = {point.name: point.value for point in metadata.entry_points(group="jfsdp.models")}
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.exists():
        found = {**tomllib.loads(project.read_text())["project"]["entry-points"]["jfsdp.models"], **found}
    return {name: importlib.import_module(module) for name, module in sorted(found.items())}


def optimizer(config: TrainingConfig, plan: Plan) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW as is usual for language models, and its learning rate by optimizer steps done."""
    warmup = config.warmup_steps
    schedule = optax.warmup_cosine_decay_schedule(config.lr / max(warmup, 1), config.lr, warmup, config.steps, config.lr / 10)
    is_matrix = plan.map(lambda leaf: len(leaf.shape) >= 2)
    return optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=is_matrix), schedule


# What is printed


def sharding_table(plan: Plan) -> Table:
    """A line per parameter, by unit: where it is cut, what is padded or stays whole, why, and what a device holds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    whole = sum(at_rest(leaf) for leaf in plan.leaves if leaf.dim is None or leaf.placement.whole_at_rest)
    padding = sum((math.prod(leaf.stack(leaf.padded_shape)) - leaf.size) * leaf.dtype.itemsize for leaf in plan.leaves)
    notes = [f"{size(whole)} are whole on every device"] * (whole > 0) + [f"{size(padding)} are padding"] * (padding > 0)
    table.add_column("parameter", "in all")
    table.add_column("shape", f"{plan.num_params:,}")
    table.add_column("cut into", str(plan.placement.shards))
    table.add_column("per device", size(sum(map(at_rest, plan.leaves))), justify="right")
    table.add_column("why", "; ".join(notes) or "nothing is whole or padded", style="dim")
    units: dict[str, list[ParamLayout]] = {}
    for leaf in plan.leaves:
        units.setdefault(leaf.unit, []).append(leaf)
    for unit, leaves in units.items():
        layers = leaves[0].layers
        count = f" [dim]({layers} units)" if layers else ""
        table.add_row(f"[bold]{unit or '(root unit)'}[/]{count}", "", "", f"[bold]{size(sum(map(at_rest, leaves)))}")
        for leaf in leaves:
            name = leaf.path.removeprefix(unit).strip(".") or leaf.path.rpartition(".")[2]
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            table.add_row(f"  {name}", shape, _cut(leaf), size(at_rest(leaf)), leaf.reason)
    return table


def _cut(leaf: ParamLayout) -> str:
    if leaf.dim is None:
        return "whole"
    rest = "whole, gradient " if leaf.placement.whole_at_rest else ""
    return f"{rest}dim {leaf.dim}: {leaf.placement.shards} x {leaf.padded // leaf.placement.shards}"


def at_rest(leaf: ParamLayout) -> int:
    """Bytes of a parameter on each device between steps."""
    is_cut = leaf.dim is not None and not leaf.placement.whole_at_rest
    return math.prod(leaf.rest_shape) * leaf.dtype.itemsize // (leaf.placement.shards if is_cut else 1)


def size(count: float) -> str:
    """Bytes for people: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit returns")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text, from the means of up to `width` stretches of `values`."""
    cuts = [round(i * len(values) / width) for i in range(width + 1)] if len(values) > width else range(len(values) + 1)
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / ((high - low) or 1))] for v in means)


# How it ends


class RunError(Exception):
    """A run cannot go on, for a reason that is not a mistake in the code."""


@contextmanager
def exits(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, and running out of memory, into a message and an exit code; others keep their traceback."""
    try:
        yield
    except kinds as error:
        fail(code, str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).partition("\n")[0]
        fail(1, f"a device ran out of memory ({first}). Use more shards, --accumulate 2 or more, --remat full, or a shorter --seq-len.")


def fail(code: int, message: str) -> NoReturn:
    print(f"train.py: error: {message}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def stops_between_steps() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, for the loop to look at between steps; a second one stops at once."""
    asked = threading.Event()

    def ask(*_):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
