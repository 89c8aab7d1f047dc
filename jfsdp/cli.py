"""The command line: what its options are checked against, the models they name, how a run ends.

Owns everything between the options of `options.py` and the objects of the library, and refuses what cannot work before
anything compiles. Knows models only as families. The story of a run is told by `train.py`, what it prints is made in
`tables.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
from flax import nnx
from jax.sharding import Mesh

from jfsdp.batches import Batches, check_batch
from jfsdp.checkpoint import DamagedCheckpoint, Metadata, open_checkpoint
from jfsdp.data import BYTE_VOCAB, Packed, check_portions, load
from jfsdp.families import Model, find_model
from jfsdp.instructions import Answers, is_instructions, load_instructions
from jfsdp.lora import LoraOptions, add_lora, parse_lora
from jfsdp.mesh import MOST_SIMULATED, make_mesh, parse_mesh, process_share, simulate_devices
from jfsdp.metrics import JsonLines, TensorBoard, Writer, check_writable
from jfsdp.offload import POLICIES
from jfsdp.options import CheckpointConfig, DataConfig, DeviceConfig, ModelConfig, TrainConfig
from jfsdp.precision import MixedPrecision
from jfsdp.processes import Group, check_same, connect, detect, label, leave
from jfsdp.run_folder import Checkpoints
from jfsdp.sampler import mix
from jfsdp.schedule import Schedule
from jfsdp.strategy import parse_strategy
from jfsdp.tokenizer import Tokenizer

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
    rows: Packed | Answers | None
    """What to train on; None in a dry run that names no data."""
    held_out: Packed | Answers | None
    batches: Batches | None
    writers: list[Writer]
    checkpoints: Checkpoints | None
    """Where the run saves; None saves nothing."""
    resume: Path | None
    """Where it goes on from; None begins at step 0."""
    origin: str | None
    """The checkpoint of another run that this one went on from at first, so that the same command does so once."""
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
    check_same(_shared_options(config))
    precision = MixedPrecision(param_dtype=config.model.precision, reduce_dtype=config.model.reduce_dtype)
    strategy = parse_strategy(config.devices.strategy, mesh)
    devices = mesh.devices.size
    share = devices * max(text.accumulate, 1)
    nothing = (None, None, None, None)
    checkpoints, resume, origin, saved = nothing if output.dry_run else _open_checkpoints(config.checkpoints)
    batch_size = -(-16 // share) * share if text.batch_size is None else text.batch_size
    if saved is not None and saved.data is not None and text.batch_size is None:
        batch_size = saved.data["global_batch"]  # the run's own, whatever the number of devices now
    check_batch(batch_size, devices=devices, accumulate=text.accumulate)
    check_portions(seq_len=text.seq_len, held_out=text.held_out)
    if output.eval_every is not None and not text.held_out:
        raise ValueError(f"eval_every is {output.eval_every} but held_out is 0: hold some data out for it.")
    if output.sample is not None and not text.held_out:
        words = f"sample is {output.sample!r} but samples come with evaluations, and held_out is 0"
        raise ValueError(f"{words}: hold some data out.")
    rows = held_out = batches = tokenizer = None
    if text.data is not None or not output.dry_run:  # a dry run has no use for the built-in text
        sizes = dict(seq_len=text.seq_len, vocab_size=model.config.vocab_size, held_out=text.held_out)
        tokenizer = None if text.tokenizer is None else Tokenizer(text.tokenizer)
        rows, held_out = _load(text.data, text, tokenizer, sizes)
        if text.mix:
            paths, weights = _read_mix(text.mix)
            parts = [(rows, held_out), *(_load(path, text, tokenizer, sizes) for path in paths)]
            trained, evaluated = zip(*parts)
            rows = mix(trained, [1, *weights])
            held_out = mix(evaluated, [1, *weights]) if text.held_out else None
        batches = Batches(
            rows, global_batch=batch_size, seed=config.training.seed, workers=text.workers, **process_share(mesh)
        )
        # Here also for a process alone, so that no step waits for the digest at the first save.
        check_same({f"{name} of the data": str(value) for name, value in batches.state().items() if name != "source"})
        if saved is not None and saved.data is not None:
            batches.restore(saved.data)
    writers: list[Writer] = []
    if not output.dry_run and jax.process_index() == 0:
        if output.audit_file:
            check_writable(output.audit_file)
        writers += [TensorBoard(output.tensorboard)] if output.tensorboard else []
        writers += [JsonLines(output.metrics, keeps=resume is not None)] if output.metrics else []  # empties the file
    policies = dict(mp_policy=precision, offload_policy=POLICIES[config.model.offload])
    sharding = dict(mesh=mesh, strategy=strategy, **policies)
    sharding |= {} if lora is None else dict(trainable=nnx.LoRAParam)
    schedule = Schedule(prefetch=config.model.prefetch)
    files = (writers, checkpoints, resume, origin, tokenizer, lora)
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
    if folder is not None and words.is_text and model.config.vocab_size > BYTE_VOCAB:
        raise ValueError(
            f"{folder} has no tokenizer.json, and its {model.config.vocab_size} ids are no bytes. Give --tokenizer "
            "FOLDER, or token ids as .npy or .bin."
        )
    if training.lr is None:
        training = replace(training, lr=4e-3 if folder is None else 2e-5 if lora is None else 2e-4)
    return replace(config, data=words, training=training), model, lora


def _model_in(folder: Path) -> str:
    """What `find_model` calls the model in a Hugging Face folder or a checkpoint."""
    if (folder / "config.json").is_file():
        return str(folder.absolute() / "config.json")
    try:
        run = open_checkpoint(folder).metadata.run
    except DamagedCheckpoint:
        raise
    except ValueError as error:
        what = "neither a config.json nor a checkpoint in it" if folder.is_dir() else "no such folder"
        raise ValueError(
            f"init_from {folder}: there is {what}. Name a folder with the config.json and the safetensors of a model, "
            "as the Hugging Face hub has it, or another run's --checkpoint."
        ) from error
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
    return load(path, **sizes, **ends)


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


def _open_checkpoints(config: CheckpointConfig) -> tuple[Checkpoints | None, Path | None, str | None, Metadata | None]:
    """The folder to save in, what to go on from, which run that began with, and what it says of itself."""
    opened = newest = None
    if config.checkpoint_dir is not None:
        opened = Checkpoints(config.checkpoint_dir, newest=config.keep, kind=config.checkpoint_kind)
        newest = opened.newest()
    own_origin = None if newest is None else newest.run.get("origin")
    named = None if config.resume in ("auto", "never") else os.path.abspath(config.resume)
    if config.resume == "auto" or (named is not None and named == own_origin):
        found = opened is not None and opened.has_any()
        return opened, opened.folder if found else None, own_origin, newest
    resume = saved = None
    if named is not None:
        resume, saved, _ = open_checkpoint(config.resume)
    if opened is not None and (later := [step for step in opened.steps() if saved is None or step > saved.step]):
        raise ValueError(
            f"{config.checkpoint_dir} holds checkpoints of step {', '.join(map(str, later))}, which this run would "
            "write again. Name another folder for --checkpoint, move them away, or go on from them with --resume auto."
        )
    return opened, resume, named, saved


_OF_A_HOST = frozenset("init_from data tokenizer mix metrics tensorboard audit_file config".split())
"""Options that may differ between processes: where a host has its files."""


def _shared_options(config: TrainConfig) -> dict[str, str]:
    """As they are typed, with their values: those that all processes of a run must have been given alike."""
    groups = (config.devices, config.model, config.data, config.training, config.output, config.checkpoints)
    options = {name: value for group in groups for name, value in vars(group).items() if name not in _OF_A_HOST}
    absolute = {name: value.absolute() if isinstance(value, Path) else value for name, value in options.items()}
    return {f"--{name.replace('_', '-')}": str(value) for name, value in absolute.items()}


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
    if own > MOST_SIMULATED:
        raise ValueError(
            f"{count} devices over {num_processes} process{'es' * (num_processes > 1)} are more than the "
            f"{MOST_SIMULATED} that one can have. Use a smaller mesh; `jfsdp plan` needs no devices."
        )
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
    """Whether a run was asked to end, by Ctrl-C, SIGTERM, or the end of its terminal."""

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
    """Ctrl-C, SIGTERM and SIGHUP are noted, to be looked at between steps; a second one stops at once.

    Python runs our handler when the main thread is back from a compilation, which may take longer than a scheduler
    waits. So a thread listens, too, and ends the process where nothing would be lost by it, or when asked twice.

    SIGHUP is the end of the terminal: what would be printed there goes nowhere from then on. nohup ignores it, and so
    does the run.
    """
    stop, numbers, is_over = Stop(), [signal.SIGINT, signal.SIGTERM], threading.Event()
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def ask(number, _):
        if number == signal.SIGHUP:
            for fd in terminals:
                os.dup2(nowhere, fd)
        if stop.is_set():
            raise KeyboardInterrupt
        stop.signal = number
        if stop.nothing_to_lose:
            _fail(stop.exit_code, f"{signal.Signals(number).name} before the first step; there was nothing to save.")

    def listen():
        count = 0
        while heard := ear.recv(1):
            count += heard[0] in numbers
            if is_over.wait(1):  # long enough for a main thread that runs Python
                return
            if count > 1:
                words = "a second time; what came after the newest complete checkpoint is lost"
            elif count and stop.nothing_to_lose and not stop.is_set():
                words = "while compiling; there was nothing to save"
            else:
                continue
            print(f"train.py: {label()}error: {signal.Signals(heard[0]).name} {words}.", file=sys.stderr)
            leave(128 + heard[0])

    nowhere = os.open(os.devnull, os.O_WRONLY)
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = {number: signal.signal(number, ask) for number in numbers}
    heard_before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, name="signals", daemon=True).start()
    try:
        yield stop
    finally:
        is_over.set()
        signal.set_wakeup_fd(heard_before)
        mouth.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(nowhere)
