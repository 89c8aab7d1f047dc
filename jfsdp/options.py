"""The options of `train.py`: a dataclass for each concern, read from the command line and from a TOML file.

Owns names, defaults, help and what can be said of a value by itself. What needs devices, model or data to be checked is
in `cli.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import DisallowNone, OmitArgPrefixes, arg


def _or_else(metavar: str, default: str) -> Any:
    """For a field that is None until more is known: `default` tells in the help what it will be."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where it runs, and what each device holds."""

    mesh: Annotated[str, arg(metavar="RxS")] = "auto"
    """4x8 is 4 replicas (copies of the model) of 8 shards (pieces of a copy); 8 is 1x8; auto is a shard for
    every device. Where there are no GPUs, so many are simulated on the CPU."""
    strategy: Annotated[
        DisallowNone[str | None], _or_else("NAME", "FULL_SHARD; HYBRID_SHARD on 2 or more replicas")
    ] = None
    """FULL_SHARD, SHARD_GRAD_OP, SHARD_OPT, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2, as in PyTorch."""
    simulate: Annotated[
        DisallowNone[int | None], _or_else("N", "all GPUs, else as many as the mesh has, else 8")
    ] = None
    """Simulate N devices on the CPU, whatever else is there."""
    allow_idle: bool = False
    """Let a mesh be smaller than the machine."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained, and how a layer computes."""

    model: Annotated[str, arg(metavar="NAME")] = "llama-2m"
    """A preset such as llama-2m, a family (its first preset), the path of a Hugging Face config.json, or
    package.module:preset."""
    init_from: Annotated[DisallowNone[Path | None], _or_else("FOLDER", "none")] = None
    """Begin with the model, weights and tokenizer of a Hugging Face folder, in place of --model; or with the weights of
    another run's checkpoint."""
    lora: Annotated[DisallowNone[str | None], arg(metavar="RANK,ALPHA,TARGETS"), _or_else("8,16,q+v", "none")] = None
    """Train adapters only: their inner width, their strength, and the layers that get one (q+v, mlp.down, all). The
    weights of --init-from are frozen and stored in --precision."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of gathers and matmuls; stored weights and the optimizer stay fp32. fp16, for GPUs before Ampere, scales
    the loss."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients travel and are summed."""
    remat: Literal["none", "full", "dots"] = "none"
    """Activations computed again in the backward pass, to save memory: none; full, all but a layer's input;
    dots, all but the results of matmuls."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Keep the optimizer's state, or parameters and gradients too, in the host's memory; all also updates there."""
    prefetch: Literal[0, 1, 2] = 1
    """Layers gathered ahead of the one that computes; each costs the memory of a whole layer."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What it learns from, in which portions."""

    data: Annotated[
        DisallowNone[Path | None], _or_else("PATH", "the source of Python's standard library")
    ] = None
    """A text file, a folder of them, a .jsonl with "text" in each line, a .npy or .bin of token ids; or a .jsonl with
    "messages", or "prompt" and "completion", whose answers are learned."""
    seq_len: int = 128
    """Tokens in a sequence."""
    batch_size: Annotated[
        DisallowNone[int | None], _or_else("N", "16, or the next multiple of devices x accumulate")
    ] = None
    """Sequences in an optimizer step, over all devices and micro-batches."""
    accumulate: int = 1
    """Micro-batches in an optimizer step: less memory, the same result."""
    held_out: float = 0.05
    """Fraction of the data kept for evaluation; 0 evaluates nothing."""
    end_of_document: Annotated[DisallowNone[int | None], _or_else("ID", "none: all is one document")] = None
    """The id that closes a document in a file of token ids."""
    tokenizer: Annotated[DisallowNone[Path | None], _or_else("FOLDER", "that of --init-from; else bytes")] = None
    """Where the tokenizer.json for text lies, and the chat template for messages."""
    mix: Annotated[tuple[str, ...], arg(metavar="PATH=WEIGHT")] = ()
    """Further sources of the same kinds; for one example of --data, so many of each are drawn."""
    workers: int = 0
    """Processes that read ahead, on each host; worth it where a batch takes longer to read than a step."""

    @property
    def is_text(self) -> bool:
        """Whether a token is a byte."""
        return self.tokenizer is None and not self.is_ids

    @property
    def is_ids(self) -> bool:
        """Whether the data are token ids already."""
        return self.data is not None and self.data.suffix.lower() in (".npy", ".bin")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How it learns: AdamW, with a linear warm-up and then a cosine down to a tenth."""

    steps: int = 200
    """Optimizer steps."""
    lr: Annotated[DisallowNone[float | None], _or_else("RATE", "0.004; 2e-5 with --init-from, 2e-4 with --lora")] = None
    """Learning rate at its peak."""
    warmup: Annotated[DisallowNone[int | None], _or_else("N", "a tenth of the steps, at most 1000")] = None
    """Steps up to the peak."""
    weight_decay: float = 0.1
    """Decoupled, and for matrices only."""
    clip_norm: Annotated[float | None, arg(metavar="NORM")] = 1.0
    """Longest gradient, all parameters together; None does not clip."""
    ema: Annotated[DisallowNone[float | None], arg(metavar="DECAY"), _or_else("0.999", "none")] = None
    """Keep an average of the weights, too, and so much of it in each step; it is what evaluations and samples look at,
    and jfsdp export --part ema."""
    sync: bool = True
    """Reduce the gradients of every micro-batch; --no-sync reduces once, and keeps them whole until then."""
    seed: int = 0
    """Names the start values and the order of the data."""

    @property
    def warmup_steps(self) -> int:
        return min(self.steps // 10, 1000) if self.warmup is None else self.warmup

    def __post_init__(self):
        for name, least in dict(steps=1, warmup_steps=0, weight_decay=0, seed=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; use {least} or more.")
        if not math.isfinite(self.weight_decay):
            raise ValueError(f"weight_decay is {self.weight_decay}; use 0 or more, as 0.1.")
        if self.seed >= 1 << 32:
            raise ValueError(f"seed is {self.seed}, of which JAX takes 32 bits only. Use one below {1 << 32}.")
        for name in ("lr", "clip_norm"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; use a number above 0.")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}, what the average keeps. Use a number from 0 to below 1, as 0.999.")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup takes {self.warmup_steps} of {self.steps} steps; leave at least one.")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What it tells."""

    eval_every: Annotated[DisallowNone[int | None], _or_else("N", "at the end")] = None
    """Steps from one evaluation on held-out data to the next."""
    eval_batches: int = 16
    """Batches of an evaluation, evenly spread over the held-out data."""
    sample: Annotated[DisallowNone[str | None], _or_else("TEXT", "none")] = None
    """Print after each evaluation how the model goes on after this text."""
    metrics: Annotated[DisallowNone[Path | None], _or_else("FILE", "none")] = None
    """Write a line of JSON per step: loss, grad_norm, lr, tokens, tokens_per_s, step_time_s and more."""
    tensorboard: Annotated[DisallowNone[Path | None], _or_else("FOLDER", "none")] = None
    """Write the same for TensorBoard."""
    dry_run: bool = False
    """Print units, memory and traffic by formula, and train nothing."""
    audit: bool = False
    """Print memory, traffic and what each loop hides, as compiled for these devices, before the first step."""
    audit_file: Annotated[DisallowNone[Path | None], _or_else("FILE", "none")] = None
    """Keep the compiled program for jfsdp audit, which compares two."""
    config: Annotated[DisallowNone[Path | None], _or_else("FILE", "none")] = None
    """TOML with options to begin with, such as batch-size = 32; the command line wins."""

    def __post_init__(self):
        for name in ("eval_every", "eval_batches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more.")
        if self.sample == "":
            raise ValueError("sample is ''; give the first words, which the model goes on from.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run, and where it goes on. Without --checkpoint nothing is written."""

    checkpoint_dir: Annotated[DisallowNone[Path | None], arg(aliases=["--checkpoint"]), _or_else("FOLDER", "none")] = (
        None
    )
    """Save here while training goes on, at the end, and when stopped by SIGTERM, Ctrl-C or the end of the terminal."""
    save_every: Annotated[DisallowNone[int | None], _or_else("N", "by time alone")] = None
    """Steps from one checkpoint to the next."""
    save_minutes: Annotated[float | None, arg(metavar="MINUTES")] = 15.0
    """And no more minutes than these; None goes by steps alone."""
    keep: int = 3
    """Newest checkpoints that are kept, beside the one with the least held-out loss."""
    checkpoint_kind: Literal["sharded", "local"] = "sharded"
    """sharded goes on on any mesh and strategy; local is written faster and goes on on the same only."""
    resume: Annotated[str, arg(metavar="auto|never|PATH")] = "auto"
    """auto goes on from the newest good checkpoint in --checkpoint, if there is one; never begins at step 0; PATH is
    another checkpoint, or the folder of another run, until there is one in --checkpoint that came of it."""
    reschedule: bool = False
    """Go on although the learning rate differs from the one that the checkpoint was on its way along."""

    def __post_init__(self):
        for name, least in dict(save_every=1, keep=1).items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} is {value}; use {least} or more.")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ValueError(f"save_minutes is {self.save_minutes}; use minutes above 0, or None.")


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """How processes find each other. torchrun, Slurm, Open MPI, Kubernetes and jfsdp.launch tell it themselves."""

    coordinator: Annotated[DisallowNone[str | None], _or_else("HOST:PORT", "as the launcher says")] = None
    """Where process 0 listens."""
    num_processes: Annotated[DisallowNone[int | None], _or_else("N", "as the launcher says, else 1")] = None
    """How many there are; 1 asks no launcher."""
    process_id: Annotated[DisallowNone[int | None], _or_else("I", "as the launcher says")] = None
    """Which of them this is, from 0."""
    hang_timeout: Annotated[float | None, arg(metavar="SECONDS")] = 1800.0
    """End the run, with the stacks of all threads, when nothing was done for so long; None waits forever."""

    def __post_init__(self):
        if self.hang_timeout is not None and not self.hang_timeout > 0:
            raise ValueError(f"hang_timeout is {self.hang_timeout}; use seconds above 0, or None.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model with its parameters sharded, as PyTorch FSDP does, on any mesh of devices.

    With no option: a small Llama on the source of Python's standard library, on all GPUs or on 8 simulated
    CPU devices.

      python train.py --mesh 4x8            4 replicas of 8 shards; simulated where there are no GPUs
      python train.py --data my-texts/      your own text, one byte a token
      python train.py --model llama3-8b --data ids.bin --seq-len 4096 --precision bf16 --remat full
      python train.py --checkpoint run/     saves there, and goes on from there when started again
      python train.py --model llama3-70b --simulate 64 --mesh 8x8 --dry-run
    """

    devices: DeviceConfig = DeviceConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    output: OutputConfig = OutputConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    processes: ProcessConfig = ProcessConfig()


def parse(argv: Sequence[str] | None = None) -> TrainConfig:
    """Read the command line, and what `--config` names as defaults for it.

    Exits with code 2 and a message for options that are not understood.
    Raises: ValueError for a file that is not.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    path = early.parse_known_args(argv)[0].config
    file = TrainConfig() if path is None else _parse(_words(path), f"train.py, {path}", TrainConfig())
    return _parse(argv, "train.py", file)


def _parse(argv: list[str], prog: str, default: TrainConfig) -> TrainConfig:
    return tyro.cli(OmitArgPrefixes[TrainConfig], prog=prog, args=argv, default=default)


def _words(path: Path) -> list[str]:
    """The options of a file as they would be typed, so that both are read and checked by the same code."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        advice = "Write lines such as batch-size = 32."
        raise ValueError(f"{path} cannot be read as TOML: {error}. {advice}") from error
    groups = [fields(group.default) for group in fields(TrainConfig)]
    known = {option.name.replace("_", "-"): option for group in groups for option in group if option.name != "config"}
    words = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ValueError(f"{path}: option {key!r} is unknown. Known are {', '.join(known)}.")
        takes_several, kind = known[name].default == (), type(value).__name__
        if takes_several and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            raise ValueError(f'{path}: option {key!r} is no list of strings. Write {name} = ["...", "..."].')
        if not takes_several and isinstance(value, list | dict):
            raise ValueError(f"{path}: option {key!r} is a {kind}. Write one value, as you would type it.")
        if takes_several:
            words += [f"--{name}", *value]
        else:
            words.append(f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}")
    return words
