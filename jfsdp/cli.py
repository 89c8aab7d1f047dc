"""The command line: its options, what they are checked against, the models they name, how a run ends.

Owns everything between the words that a user types and the objects of the library, and refuses what cannot
work before anything compiles. Knows models only as families. The story of a run is told by `train.py`, what
it prints is made in `tables.py`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import jax
import tyro
from flax import nnx
from jax.sharding import Mesh
from tyro.conf import DisallowNone, OmitArgPrefixes, arg

from jfsdp import data
from jfsdp.checkpoint import Checkpoints, Metadata, open_checkpoint
from jfsdp.families import Model, find_model
from jfsdp.instructions import Answers, is_instructions, load_instructions
from jfsdp.lora import LoraOptions, add_lora, parse_lora
from jfsdp.mesh import make_mesh, parse_mesh, simulate_devices
from jfsdp.metrics import JsonLines, TensorBoard, Writer
from jfsdp.offload import CPUOffloadPolicy, OffloadPolicy
from jfsdp.precision import MixedPrecision
from jfsdp.processes import Group, connect, detect, label, leave
from jfsdp.schedule import Schedule
from jfsdp.strategy import parse_strategy
from jfsdp.tokenizer import Tokenizer

# Options


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
        for name in ("lr", "clip_norm"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; use a number above 0.")
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


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run, and where it goes on. Without --checkpoint nothing is written."""

    checkpoint: Annotated[DisallowNone[Path | None], _or_else("FOLDER", "none")] = None
    """Save here while training goes on, at the end, and when stopped by SIGTERM or Ctrl-C."""
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
    another checkpoint, or the folder of another run."""
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
    known = [option.name.replace("_", "-") for group in groups for option in group if option.name != "config"]
    words = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ValueError(f"{path}: option {key!r} is unknown. Known are {', '.join(known)}.")
        if isinstance(value, list | dict):
            kind = type(value).__name__
            raise ValueError(f"{path}: option {key!r} is a {kind}. Write one value, as you would type it.")
        words.append(f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}")
    return words


# Checks


class Job(NamedTuple):
    """A run whose options have been checked against devices, model and data."""

    config: TrainConfig
    group: Group
    model: Model
    mesh: Mesh
    sharding: dict[str, Any]
    """What `fully_shard` needs besides the model: mesh, strategy, dtypes."""
    schedule: Schedule
    batch_size: int
    rows: data.Packed | Answers | None
    """What to train on; None in a dry run that names no data."""
    held_out: data.Packed | Answers | None
    batches: data.Batches | None
    writers: list[Writer]
    checkpoints: Checkpoints | None
    """Where the run saves; None saves nothing."""
    resume: Path | None
    """Where it goes on from; None begins at step 0."""
    tokenizer: Tokenizer | None
    """None where a token is a byte, or already an id."""
    lora: LoraOptions | None

    @property
    def places(self) -> int:
        """Tokens and padding of a step."""
        return self.batch_size * self.config.data.seq_len

    @property
    def micro_batch(self) -> int:
        """Sequences that all devices compute at a time."""
        return self.batch_size // self.config.data.accumulate

    @property
    def share(self) -> int:
        """Sequences that one device computes at a time."""
        return self.micro_batch // self.mesh.devices.size

    @property
    def tokens(self) -> int:
        """Tokens that one device computes at a time."""
        return self.share * self.config.data.seq_len

    def evaluates_after(self, step: int) -> bool:
        every = self.config.output.eval_every
        is_due = step == self.config.training.steps or (every is not None and step % every == 0)
        return self.held_out is not None and is_due

    def make_model(self) -> nnx.Module:
        rngs, remat = nnx.Rngs(self.config.training.seed), self.config.model.remat
        model = self.model.family.build(self.model.config, rngs=rngs, remat=remat, schedule=self.schedule)
        if self.lora is None:
            return model
        return add_lora(model, self.lora, rngs=rngs, base_dtype=self.sharding["mp_policy"].param_dtype)


def prepare(config: TrainConfig) -> Job:
    """Start the devices and check everything that can be refused.

    Raises: ValueError, RuntimeError or OSError, with the value and what to do about it.
    """
    config, model, lora = _find_model(config)
    text, output = config.data, config.output
    c = config.processes
    group = connect(detect(coordinator=c.coordinator, num_processes=c.num_processes, process_id=c.process_id))
    mesh = start(config.devices, group.count)
    precision = MixedPrecision(param_dtype=config.model.precision, reduce_dtype=config.model.reduce_dtype)
    strategy = parse_strategy(config.devices.strategy, mesh)
    devices = mesh.devices.size
    share = devices * max(text.accumulate, 1)
    checkpoints, resume, saved = (None, None, None) if output.dry_run else _open_checkpoints(config.checkpoints)
    batch_size = -(-16 // share) * share if text.batch_size is None else text.batch_size
    if saved is not None and saved.data is not None and text.batch_size is None:
        batch_size = saved.data["global_batch"]  # the run's own, whatever the number of devices now
    data.check_batch(batch_size, devices=devices, accumulate=text.accumulate)
    if output.eval_every is not None and not text.held_out:
        raise ValueError(f"eval_every is {output.eval_every} but held_out is 0: hold some data out for it.")
    rows = held_out = batches = tokenizer = None
    if text.data is not None or not output.dry_run:  # a dry run has no use for the built-in text
        sizes = dict(seq_len=text.seq_len, vocab_size=model.config.vocab_size, held_out=text.held_out)
        tokenizer = None if text.tokenizer is None else Tokenizer(text.tokenizer)
        rows, held_out = _load(text.data, text, tokenizer, sizes)
        if text.mix:
            paths, weights = _read_mix(text.mix)
            parts = [(rows, held_out), *(_load(path, text, tokenizer, sizes) for path in paths)]
            trained, evaluated = zip(*parts)
            rows = data.mix(trained, [1, *weights])
            held_out = data.mix(evaluated, [1, *weights]) if text.held_out else None
        batches = data.Batches(
            rows, global_batch=batch_size, seed=config.training.seed, workers=text.workers, **processes()
        )
        if saved is not None and saved.data is not None:
            batches.restore(saved.data)
    writers: list[Writer] = []
    if not output.dry_run and jax.process_index() == 0:
        writers += [JsonLines(output.metrics, keeps=resume is not None)] if output.metrics else []
        writers += [TensorBoard(output.tensorboard)] if output.tensorboard else []
    offload = {"none": OffloadPolicy(), "optimizer": OffloadPolicy(opt_state=True), "all": CPUOffloadPolicy()}
    policies = dict(mp_policy=precision, offload_policy=offload[config.model.offload])
    sharding = dict(mesh=mesh, strategy=strategy, **policies)
    sharding |= {} if lora is None else dict(trainable=nnx.LoRAParam)
    schedule = Schedule(prefetch=config.model.prefetch)
    files = (writers, checkpoints, resume, tokenizer, lora)
    return Job(config, group, model, mesh, sharding, schedule, batch_size, rows, held_out, batches, *files)


def _find_model(config: TrainConfig) -> tuple[TrainConfig, Model, LoraOptions | None]:
    """The model that the options name, its adapters, and the options with what follows from these filled in."""
    c, default, folder = config.model, ModelConfig(), config.model.init_from
    lora = None if c.lora is None else parse_lora(c.lora)
    if lora is not None and folder is None:
        raise ValueError("lora trains adapters of a model that is trained already: name it with --init-from.")
    if folder is not None and c.model != default.model:
        raise ValueError(f"init_from {folder} says what the model is. Leave out --model {c.model}.")
    model = find_model(c.model if folder is None else _model_in(folder))
    if getattr(model.family, "READS_PAIRS", False):
        raise ValueError(
            f"model {model.name} reads pairs of source and target, which train.py has no data for. Use a decoder such "
            "as llama-2m, or write the loop with its own loss, as in the README."
        )
    words, training = config.data, config.training
    if folder is not None and words.tokenizer is None and not words.is_ids and (folder / "tokenizer.json").is_file():
        words = replace(words, tokenizer=folder)
    if folder is not None and words.is_text and model.config.vocab_size > data.BYTE_VOCAB:
        raise ValueError(
            f"{folder} has no tokenizer.json, and its {model.config.vocab_size} ids are no bytes. Give --tokenizer "
            "FOLDER, or token ids as .npy or .bin."
        )
    if training.lr is None:
        training = replace(training, lr=4e-3 if folder is None else 2e-5 if lora is None else 2e-4)
    return replace(config, data=words, training=training), model, lora


def _model_in(folder: Path) -> str:
    """What `find_model` calls the model in a Hugging Face folder or a checkpoint."""
    if (folder / "config.json").exists() or not folder.exists():
        return str(folder.absolute() / "config.json")
    run = open_checkpoint(folder).metadata.run
    if "model" not in run or run.get("lora"):
        what = "adapters, and which weights they adapt it does not say" if run.get("lora") else "no model that it names"
        raise ValueError(f"{folder} holds {what}. Make a folder of it with `jfsdp export` and begin with that.")
    return run["model"]


def _load(path: Path | None, config: DataConfig, tokenizer: Tokenizer | None, sizes: dict[str, Any]):
    """The training and the held-out rows of a source."""
    if is_instructions(path):
        if tokenizer is None:
            raise ValueError(f"{path} has conversations, which need a tokenizer: give --tokenizer FOLDER.")
        return load_instructions(path, tokenizer, **sizes)
    is_ids = path is not None and path.suffix.lower() in (".npy", ".bin")
    ends = dict(end_of_document=config.end_of_document, tokenizer=None if is_ids else tokenizer)
    return data.load(path, **sizes, **ends)


def _read_mix(words: Sequence[str]) -> tuple[list[Path], list[float]]:
    """`a/=0.5` as a path and a weight."""
    paths, weights = [], []
    for word in words:
        path, _, weight = word.rpartition("=")
        try:
            weights.append(float(weight))
        except ValueError:
            path = ""
        if not path:
            raise ValueError(f"mix {word!r} is no PATH=WEIGHT. Write for example code/=0.5.")
        paths.append(Path(path))
    return paths, weights


def _open_checkpoints(config: CheckpointConfig) -> tuple[Checkpoints | None, Path | None, Metadata | None]:
    """The folder to save in, what to go on from, and what that says of itself."""
    opened, steps = None, []
    if config.checkpoint is not None:
        opened = Checkpoints(config.checkpoint, newest=config.keep, kind=config.checkpoint_kind)
        steps = opened.steps()
    if config.resume == "auto":
        found = opened is not None and opened.has_any()
        return opened, opened.folder if found else None, opened.newest() if found else None
    resume = saved = None
    if config.resume != "never":
        resume, saved, _ = open_checkpoint(config.resume)
    if later := [step for step in steps if saved is None or step > saved.step]:
        raise ValueError(
            f"{config.checkpoint} holds checkpoints of step {', '.join(map(str, later))}, which this run would write "
            "again. Name another folder for --checkpoint, move them away, or go on from them with --resume auto."
        )
    return opened, resume, saved


def start(config: DeviceConfig, num_processes: int = 1) -> Mesh:
    """Start JAX and lay the mesh over its devices: GPUs where there are any, else simulated ones.

    Mesh and simulated devices are counted over all processes.
    Raises: ValueError for a mesh that is not understood or does not fit, RuntimeError if JAX does not start
    as asked.
    """
    wanted = 8 if config.simulate is None else config.simulate
    replica, shard = parse_mesh(config.mesh, max(wanted, num_processes))
    count = replica * shard if config.simulate is None else wanted
    own, rest = divmod(count, num_processes)
    if config.simulate is not None:
        if rest:
            raise ValueError(
                f"{count} simulated devices do not split equally over {num_processes} processes. Simulate "
                f"{num_processes * max(own, 1)} or {num_processes * (own + 1)}."
            )
        simulate_devices(own)
    elif "xla_force_host_platform_device_count" not in (flags := os.environ.get("XLA_FLAGS", "")):
        # Read by the CPU backend alone: where JAX finds GPUs it changes nothing.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={own + bool(rest)}".strip()
    if not seems_to_have_gpus():  # then a traceback about an unusable GPU plugin tells nothing
        for name in ("jax._src.xla_bridge", "jax_plugins"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    mesh = make_mesh(config.mesh, allow_idle=config.allow_idle)
    if (used := len({device.process_index for device in mesh.devices.flat})) < num_processes:
        raise ValueError(
            f"mesh {config.mesh} has devices of {used} of the {num_processes} processes only. Use a mesh over all "
            f"{jax.device_count()} devices, or start {used}."
        )
    return mesh


def seems_to_have_gpus() -> bool:
    """Whether the operating system shows GPUs, usable or not, that JAX has not been told to leave alone."""
    files = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]
    return bool(files) and not os.environ.get("JAX_PLATFORMS", "").startswith("cpu")


def processes() -> dict[str, int]:
    """Which share of the rows is this process's, in the words of `data.py`."""
    return dict(process_index=jax.process_index(), process_count=jax.process_count())


# How it ends


class RunError(Exception):
    """A run cannot go on, and not for a mistake in the code."""


@contextmanager
def exits(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Make a message and an exit code of errors of these kinds, and of running out of memory.

    Other errors are mistakes in the code and keep their traceback.
    """
    try:
        yield
    except kinds as error:
        _fail(code, str(error))
    except KeyboardInterrupt:
        _fail(130, "interrupted.")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        what = str(error).partition("\n")[0]
        advice = "Use more shards, --accumulate, --remat full, or a smaller --seq-len."
        _fail(1, f"a device ran out of memory ({what}). {advice}")


def _fail(code: int, message: str) -> NoReturn:
    print(f"train.py: {label()}error: {message}", file=sys.stderr)
    raise SystemExit(code)


class Stop:
    """Whether a run was asked to end, by Ctrl-C or SIGTERM."""

    def __init__(self):
        self.signal: int | None = None
        self.nothing_to_lose = False
        """While this is true, a signal ends the process at once."""

    def is_set(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 and the signal, as shells have it: 130 for Ctrl-C, 143 for SIGTERM, also where another process got it."""
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def stops_between_steps() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM are noted, to be looked at between steps; a second one stops at once.

    Python runs our handler when the main thread is back from a compilation, which may take longer than a scheduler
    waits. So a thread listens, too, and ends the process where nothing would be lost by it.
    """
    stop, numbers = Stop(), (signal.SIGINT, signal.SIGTERM)

    def ask(number, _):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.signal = number
        if stop.nothing_to_lose:
            _fail(stop.exit_code, f"{signal.Signals(number).name} before the first step; there was nothing to save.")

    def listen():
        while heard := ear.recv(1):
            time.sleep(1)  # long enough for a main thread that runs Python
            if heard[0] in numbers and stop.nothing_to_lose and not stop.is_set():
                name = signal.Signals(heard[0]).name
                print(f"train.py: {label()}error: {name} while compiling; there was nothing to save.", file=sys.stderr)
                leave(128 + heard[0])

    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = {number: signal.signal(number, ask) for number in numbers}
    heard_before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(heard_before)
        mouth.close()
        for number, handler in before.items():
            signal.signal(number, handler)
