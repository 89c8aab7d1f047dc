"""The checkpoints of a run, in one folder: saved behind the training, some of them kept, the newest good one found.

Owns when a save happens and what becomes of a failed one; Orbax runs it behind the training and moves a finished
folder into place. What a checkpoint holds, and how it is restored, is `checkpoint.py`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
import socket
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jfsdp import store
from jfsdp.checkpoint import (
    Arrays,
    DamagedCheckpoint,
    Leaf,
    Metadata,
    complete,
    describe,
    is_complete,
    named_arrays,
    open_checkpoint,
    read_metadata,
    read_together,
    restore,
    step_folder,
    steps_in,
    write_part,
)

_UNFINISHED, _DELETED, _DAMAGED = ".orbax-checkpoint-tmp", ".deleted", ".damaged"
_SHOWN_WITHIN_S = 10  # that a network file system shows in one host what another has written
_log = logging.getLogger(__name__)
# Orbax logs, with its traceback, what `Checkpoints.check` raises as a SaveError.
logging.getLogger("absl").addFilter(lambda record: "Commit callback in background save thread" not in str(record.msg))


class SaveError(RuntimeError):
    """A checkpoint could not be written. The state is untouched, and so are older checkpoints."""


class Checkpoints:
    """The checkpoints of one run, in one folder: saves behind the training, keeps some, restores the newest good one.

    Every process makes one and calls the same methods at the same steps.

    newest: how many of the newest to keep; None keeps all. best: how many to keep beside them for their metric.
    kind: "sharded" restores onto any mesh and strategy; "local" is written faster and restores onto the same only.
    Raises: OSError when the folder cannot be written, is not the same in every process, or another run saves in it;
    ValueError for a setting out of range.
    """

    def __init__(self, folder: str | os.PathLike, *, newest: int | None = 3, best: int = 1, kind: str = "sharded"):
        if kind not in ("sharded", "local"):
            raise ValueError(f"kind {kind!r} is unknown. Use sharded or local.")
        if newest is not None and newest < 1:
            raise ValueError(f"newest is {newest}; it counts checkpoints that are kept, so use 1 or more, or None.")
        if best < 0:
            raise ValueError(f"best is {best}; it counts checkpoints that are kept for their metric, so use 0 or more.")
        self.folder, self._newest, self._best, self.kind = Path(folder).absolute(), newest, best, kind
        self._is_first = jax.process_index() == 0
        self._handler = _Handler()
        self._saver = ocp.AsyncCheckpointer(
            self._handler, async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False)
        )
        self._last: int | None = None
        self._pending: int | None = None
        self._remover = ThreadPoolExecutor(1, "remove")
        self._removals: list[Future] = []
        self._lock = self._prepare()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _prepare(self) -> IO | None:
        """Make the folder, see that all can use it, and remove what an earlier run left unfinished.

        The first process gets the lock that keeps other runs out until it is closed.
        """
        lock, probe = None, self.folder / f".writable{_DELETED}"
        if self._is_first:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"x" * 4096)
                lock = (self.folder / ".lock").open("ab+", buffering=0)
                weakref.finalize(self, lock.close)
            except OSError as error:
                words = f"checkpoints cannot be written to {self.folder}: {error}"
                raise OSError(f"{words}. Name another folder.") from error
        self._check_shared(probe)
        if self._is_first:
            probe.unlink()
            self._take(lock)
            for left in [*self.folder.glob(f"step_*{_UNFINISHED}*"), *self.folder.glob(f"step_*{_DELETED}")]:
                shutil.rmtree(left, ignore_errors=True)
        return lock

    def _check_shared(self, probe: Path) -> None:
        """See that what the first process has written is there for all others; each would write its part elsewhere."""
        if jax.process_count() == 1:
            return
        multihost_utils.process_allgather(np.int32(0))  # written by now
        deadline = time.monotonic() + _SHOWN_WITHIN_S
        while not (is_there := probe.exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
        seen = multihost_utils.process_allgather(np.int32(is_there))
        if not seen.all():
            others = ", ".join(map(str, np.flatnonzero(seen == 0)))
            raise OSError(
                f"{self.folder} of process 0 is not there for process {others}. Name a folder for checkpoints that all "
                "hosts share."
            )

    def _take(self, lock: IO) -> None:
        """Two runs would remove each other's unfinished saves and write at the same steps."""
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            with lock:
                lock.seek(0)
                who = lock.read().decode(errors="replace")
            words = f"another run saves in {self.folder} ({who})"
            raise OSError(f"{words}. Let it end, or name another folder.") from error
        with suppress(OSError):  # no room to say who
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [step for step in steps_in(self.folder) if is_complete(self.path(step))]

    def has_any(self) -> bool:
        """Whether there are checkpoints, good or damaged."""
        return bool(steps_in(self.folder))

    def newest(self) -> Metadata | None:
        """What the newest complete checkpoint says of itself."""
        found = self._metadata()
        return found[max(found)] if found else None

    def best_step(self) -> int | None:
        """The step with the least metric; None where no checkpoint has one."""
        return next(iter(self._best_first()), None)

    def path(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def save(self, state, *, metric: float | None = None, data: dict | None = None, run: dict | None = None) -> bool:
        """Save a state in the background; it may be donated once this returns. False when its step is saved already.

        Waits for the save before, if that is still being written.

        metric: what "best" is decided by, less is better. data, run: JSON to be found again in the metadata.
        Raises: SaveError when this save cannot begin or the one before has failed.
        """
        step, plan = int(state.step), getattr(state, "plan", None)
        if step == self._last:
            return False
        self.wait()
        arrays = named_arrays(state, plan)
        metadata = describe(state, plan, self.kind, step=step, metric=metric, data=data, run=run or {})
        self._pending = step
        try:
            self._saver.save(self.path(step), args=_SaveArgs(arrays, metadata))
        except (OSError, ValueError) as error:
            raise self._failed(error) from error
        self._last = step
        return True

    def check(self) -> None:
        """Call between steps: raises SaveError if a save has failed, and lets old checkpoints go after a new one."""
        if self._pending is None:
            return
        try:
            self._saver.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error
        if is_complete(self.path(self._pending)):
            self._pending = None
            self._remove_old()

    def wait(self) -> None:
        """Wait until the save that is being written is complete, and what it replaces is gone from the disk.

        Raises: SaveError if it has failed.
        """
        if self._pending is not None:
            try:
                self._saver.wait_until_finished()
            except Exception as error:
                raise self._failed(error) from error
            self.check()
        while self._removals:
            self._removals.pop().result()

    def close(self) -> None:
        """Wait for the last save. Raises: SaveError if it has failed."""
        try:
            self.wait()
        finally:
            self._saver.close()
            self._remover.shutdown()
            if self._lock is not None:
                self._lock.close()

    def restore(self, like, *, path: str | os.PathLike | None = None, **options) -> tuple[Any, Metadata] | None:
        """The newest state that is not damaged, and its metadata; None where there is no checkpoint.

        Damaged ones are told of in one warning and renamed, so that the run can save at their steps again.

        path: this checkpoint and no other. options: as for `restore`.
        Raises: DamagedCheckpoint when all are, ValueError for one that does not fit `like`.
        """
        damaged: list[str] = []
        for candidate in [path] if path is not None else map(self.path, reversed(steps_in(self.folder))):
            try:
                found = read_together(lambda at=candidate: open_checkpoint(at), candidate)
                state = restore(found, like, **options)
            except DamagedCheckpoint as error:
                if path is not None:
                    raise
                damaged.append(str(error))
                continue
            step = found.metadata.step
            if damaged:
                _log.warning("going on from step %d, the newest good checkpoint:\n  %s", step, "\n  ".join(damaged))
                self._set_aside(step)
            if found.path.absolute() == self.path(step):
                self._last = step
            return state, found.metadata
        if damaged:
            raise DamagedCheckpoint(f"{self.folder} has no good checkpoint:\n  " + "\n  ".join(damaged))
        return None

    def _set_aside(self, good: int) -> None:
        if self._is_first:
            for step in steps_in(self.folder):
                if step > good:
                    names = (self.path(step).with_name(f"{self.path(step).name}{_DAMAGED}{n or ''}") for n in count())
                    self.path(step).rename(next(name for name in names if not name.exists()))

    def _best_first(self) -> list[int]:
        scored = [(m.metric, step) for step, m in self._metadata().items() if m.metric is not None]
        return [step for metric, step in sorted(scored, key=lambda s: (math.isnan(s[0]), s))]

    def _metadata(self) -> dict[int, Metadata]:
        found = {}
        for step in self.steps():
            try:
                found[step] = read_metadata(self.path(step))
            except DamagedCheckpoint:
                continue
        return found

    def _remove_old(self) -> None:
        """Only ever called after a newer checkpoint is complete. Files go behind the training, which takes a while."""
        if not self._is_first or self._newest is None:
            return
        steps = self.steps()
        keep = {*steps[-self._newest :], *self._best_first()[: self._best]}
        for step in set(steps) - keep:
            gone = self.path(step).rename(self.path(step).with_name(f"{self.path(step).name}{_DELETED}"))
            self._removals.append(self._remover.submit(shutil.rmtree, gone, ignore_errors=True))

    def _failed(self, error: Exception) -> SaveError:
        step, self._pending, self._last = self._pending, None, None
        if self._is_first:  # what was written of it would keep the disk full
            for left in self.folder.glob(f"{self.path(step).name}{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        steps = self.steps()
        rest = f"The newest complete one is of step {steps[-1]}." if steps else "There is no complete one."
        return SaveError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {str(error).rstrip('.')}. {rest} "
            "Make room or name another folder."
        )


# What Orbax calls


@dataclass
class _SaveArgs(ocp.args.CheckpointArgs):
    """What Orbax hands to the handler."""

    arrays: Arrays
    metadata: Metadata


class _Handler(ocp.AsyncCheckpointHandler):
    """Writes this process's part of a state into the folder that Orbax prepared."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._described: tuple[Metadata, dict[str, Leaf]] | None = None

    async def async_save(self, directory, args: _SaveArgs):
        """Take hold of it in host memory, so that the state may be donated; the rest goes on behind the training.

        On CPUs nothing is copied: see `store.to_host`. From other devices this waits for the copy.
        """
        hashes = store.content_hashes(args.arrays.values, args.arrays.shapes)
        is_local = args.metadata.kind == "local"
        host = store.to_host(args.arrays.values, args.arrays.shapes, every=is_local)
        self._described = args.metadata, args.arrays.leaves
        return [self._pool.submit(write_part, Path(directory), host, hashes, is_local=is_local)]

    def finalize(self, directory) -> None:
        """Every process has written its part."""
        complete(Path(directory), *self._described)

    def save(self, directory, *args, **kwargs):
        raise NotImplementedError("saved through async_save only")

    def restore(self, directory, *args, **kwargs):
        raise NotImplementedError("restored by `checkpoint.restore`")

    def close(self) -> None:
        self._pool.shutdown()


ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)(_SaveArgs)
