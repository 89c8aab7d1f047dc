"""What a run measures and where it goes: throughput, memory, and the writers of one record per step.

Owns the clock and the files. Knows nothing of models, meshes or losses: whoever trains hands in numbers, and
they describe the global batch, so every process has the same record and only the first one writes it.

Note [Time of a step]
A step's clock starts when the result of the one before was ready and stops when its own is: reading data and
dispatch count, evaluation does not. The first step holds the compilation; it is reported apart, and is in no
rate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

Record = dict[str, Any]
"""One step: names and numbers; what was not measured is left out."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One step's tokens and time. Rates count tokens and no padding; the step that compiled has none."""

    tokens: float
    """Targets that count in the loss, over all devices and micro-batches."""
    padding_tokens: float
    """The rest of the batch: padding, and ends of documents that predict nothing."""
    compile_s: float | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None


_compiled: Counter[str] = Counter()


def compilations(function: str) -> int:
    """How many programs JAX has compiled, since the first call of this, for jitted functions of that name."""
    if not _compiled:
        _compiled[""] = 1  # listen once
        jax.monitoring.register_event_duration_secs_listener(_hear)
    return _compiled[f"jit({function})"]


def _hear(event: str, _: float, **details: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled[details.get("fun_name", "")] += 1


class Throughput:
    """The clock of a run on `devices` devices. See Note [Time of a step]."""

    def __init__(self, devices: int, *, clock: Callable[[], float] = time.perf_counter, window: int = 20):
        self.devices, self.compile_s, self.total_tokens = devices, None, 0
        self._clock, self._since = clock, clock()
        self._tokens, self._seconds = 0.0, 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        self.waited_s, self._steps = 0.0, 0
        self._compiled = compilations("_step")

    @property
    def compilations(self) -> int:
        """Programs compiled for the step since the clock was made: one for each shape of batches."""
        return compilations("_step") - self._compiled

    def waits(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; the time until each is there adds up in `waited_s`, the first one's apart."""
        batches = iter(batches)
        while True:
            since = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self.compile_s is not None:  # before the first step, reading starts while the model is still made
                self.waited_s += self._clock() - since
            yield batch

    def restart(self) -> None:
        """Forget the time since the last step: it went into something else, such as an evaluation."""
        self._since = self._clock()

    def step(self, result: Any, *, tokens: Any, places: int) -> Timing:
        """Wait until `result` is there and stop the clock of this step.

        tokens: targets that count in the loss. places: batch size times sequence length.
        """
        jax.block_until_ready(result)
        now = self._clock()
        seconds, self._since = now - self._since, now
        tokens = _whole(float(tokens))
        self.total_tokens += tokens
        count = dict(tokens=tokens, padding_tokens=places - tokens)
        if self.compile_s is None:
            self.compile_s = seconds
            return Timing(**count, compile_s=seconds)
        self._tokens, self._seconds, self._steps = self._tokens + tokens, self._seconds + seconds, self._steps + 1
        self._recent.append((tokens, seconds))
        rate = tokens / seconds
        each = rate / self.devices
        return Timing(**count, step_time_s=seconds, tokens_per_s=rate, tokens_per_s_per_device=each)

    @property
    def recent(self) -> float | None:
        """Tokens per second over the last steps; None before there are any."""
        seconds = sum(s for _, s in self._recent)
        return sum(t for t, _ in self._recent) / seconds if seconds else None

    @property
    def mean(self) -> float | None:
        """Tokens per second over the run, without the step that compiled."""
        return self._tokens / self._seconds if self._seconds else None

    def of_process(self) -> dict[str, float]:
        """Seconds of this process alone: `compile_s`, and of a mean step `step_s` and `data_s`, waiting for data.

        A process that is late makes the steps of all longer; whose data is late shows only in its own `data_s`.
        """
        steps = max(self._steps, 1)
        return dict(compile_s=self.compile_s or 0.0, step_s=self._seconds / steps, data_s=self.waited_s / steps)


def memory() -> dict[str, int]:
    """Bytes in use, and at most, on this process's fullest device; simulated devices share the process's."""
    stats = [s for d in jax.local_devices() if (s := d.memory_stats())]
    if stats:
        names = {"memory_bytes": "bytes_in_use", "peak_memory_bytes": "peak_bytes_in_use"}
        return {ours: max(s[theirs] for s in stats) for ours, theirs in names.items() if theirs in stats[0]}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"host_peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def record(step: int, timing: Timing, **values: Any) -> Record:
    """One step's record: Python numbers, what is None left out."""
    everything = {"step": step, **values, **asdict(timing)}
    return {n: v.item() if hasattr(v, "item") else v for n, v in everything.items() if v is not None}


def check_writable(path: Path, endings: Sequence[str] = ()) -> None:
    """Raises: ValueError where this file could not be written, or ends otherwise; asked before anything is computed."""
    if endings and path.suffix.lower() not in endings:
        raise ValueError(f"{path} ends in none of {', '.join(endings)}. Name a file that does.")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}. Make it, or name another.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Name a file in it.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} must not be written by this user. Name another, or change its permissions.")


class Writer(Protocol):
    """Takes one record per step, in order."""

    def write(self, record: Record) -> None: ...

    def forget_after(self, step: int) -> None:
        """The run goes on from this step: what is known of later ones will come again."""

    def close(self) -> None: ...


class JsonLines:
    """A file of one JSON object per step, to be read while the run goes on. An old file is replaced.

    keeps: the run goes on, and so does the file; `forget_after` then removes what will be written again.
    """

    def __init__(self, path: Path, *, keeps: bool = False):
        check_writable(path)
        # Line by line: `tail -f` works and a crash loses nothing.
        self._file = path.open("a+" if keeps else "w+", buffering=1)

    def forget_after(self, step: int) -> None:
        """Remove the records of later steps, and a last line that was cut off."""
        self._file.seek(0)
        lines = [line for line in self._file if line.endswith("\n") and json.loads(line)["step"] <= step]
        self._file.seek(0)
        self._file.truncate()
        self._file.writelines(lines)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in a folder, one scalar per name."""

    def __init__(self, folder: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            mend = "pip install 'jfsdp[tensorboard]', or use --metrics, which needs nothing"
            raise ValueError(f"TensorBoard files need tensorboardX: {mend}.") from error
        self._make = lambda **options: SummaryWriter(str(folder), **options)
        self._writer = self._make()

    def forget_after(self, step: int) -> None:
        self._writer.close()
        self._writer = self._make(purge_step=step + 1)

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Screen:
    """A bar in a terminal; elsewhere a line every 5 percent of the run or 30 seconds."""

    def __init__(self, console: Console, steps: int, throughput: Throughput):
        self._console, self._steps, self._throughput = console, steps, throughput
        self._last = (0, time.monotonic())
        words, left = TextColumn("{task.description} "), TimeRemainingColumn(compact=True)
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), words, left, TextColumn("[cyan]left"))
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("[dim]compiling", total=steps)
        self._bar.start()

    def write(self, record: Record) -> None:
        step, now = record["step"], time.monotonic()
        text = describe(record, self._throughput.recent)
        self._bar.update(self._task, completed=step, description=text)
        since, seconds = step - self._last[0], now - self._last[1]
        is_due = self._bar.disable and (step == 1 or since >= self._steps / 20 or seconds >= 30)
        if is_due or "eval_loss" in record:
            self._last = (step, now)
            self._console.print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}")

    def close(self) -> None:
        self._bar.stop()


def describe(record: Mapping[str, Any], tokens_per_s: float | None = None) -> str:
    """The record in a few words: `loss 2.314  eval 2.401  12,345 tokens/s  1.2 GiB`."""
    parts = [f"loss {record['loss']:.3f}"]
    if "eval_loss" in record:
        parts.append(f"eval {record['eval_loss']:.3f}")
    if tokens_per_s:
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    used = record.get("peak_memory_bytes", record.get("host_peak_memory_bytes"))
    return "  ".join(parts + ([in_words(used)] if used else []))


def in_words(count: float) -> str:
    """Bytes for people: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value
