"""Batches: which rows a process reads, what fills a batch that is not full, who reads ahead, and where a run stands.

Owns the step counter that a checkpoint keeps. Knows nothing of models, meshes or JAX: whoever trains places the rows
on devices.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from jfsdp.data import Packed, Row, check_count
from jfsdp.sampler import Mixed, MixedOrder, Order

_log = logging.getLogger(__name__)
_BEGIN_ANEW = "or begin anew: start_at(0), or train.py with --init-from and the checkpoint in place of --resume."


class Batches:
    """Endless training batches: dicts of `[global_batch / process_count, ...]`, this process's rows of each.

    Processes hold blocks of rows in their order, as `jax.make_array_from_process_local_data` expects for a
    mesh in device order. A row of padding is 0 everywhere, so its weights are. In place of `Packed`, anything
    serves that has a length and whose items are dicts of equally shaped arrays; if it has a `digest` of what is in it
    and a `name`, a run does not go on with other contents unnoticed.

    workers: processes that read ahead; 0 reads when asked. The order is the same.
    Raises: ValueError for fewer examples than a global batch, or a batch that processes cannot share.
    """

    def __init__(
        self,
        dataset: Packed | Mixed,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        process_index: int = 0,
        process_count: int = 1,
        workers: int = 0,
    ):
        check_count("workers", workers, 0, "it counts processes that read")
        check_count("seed", seed, 0, "it names an order of the examples")
        self._rows = _process_rows(global_batch, process_index, process_count)
        if len(dataset) < global_batch:
            raise ValueError(
                f"The training data has {len(dataset)} examples, less than a global batch of {global_batch}. "
                f"Give more data, a smaller seq_len or a global batch of at most {len(dataset)}."
            )
        if isinstance(dataset, Mixed):
            if drop_last or not shuffle:
                raise ValueError("a mixture is shuffled and has no last batch. Leave out shuffle and drop_last.")
            sizes = tuple(map(len, dataset.parts))
            self.order = MixedOrder(sizes=sizes, weights=tuple(dataset.weights), global_batch=global_batch, seed=seed)
        else:
            self.order = Order(
                examples=len(dataset), global_batch=global_batch, seed=seed, shuffle=shuffle, drop_last=drop_last
            )
        self.step = 0
        """Batches handed out so far, over all epochs."""
        self._dataset = dataset
        self._is_first_process = process_index == 0
        self._workers, self._pool, self._waiting = workers, None, deque()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return int(self.step // self.order.batches_per_epoch)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        epoch = self.epoch
        batch = self._read_ahead() if self._workers else self._next(self.step, partial(_read, self._dataset))
        self.step += 1
        if self.epoch > epoch and self._is_first_process and (dropped := self.order.dropped(epoch)).size:
            ids = np.array2string(dropped, separator=", ", threshold=16)
            _log.warning("epoch %d: drop_last left out %d examples: %s", epoch, dropped.size, ids)
        return batch

    def _next(self, step: int, read):
        return read(self.order.batch(step)[self._rows])

    def _read_ahead(self) -> Row:
        """From worker processes, which have read two batches each while others were computed with.

        Those that were ended from outside are started once more.
        """
        try:
            return self._from_workers()
        except BrokenProcessPool:
            _log.warning("a process that reads data was ended from outside; %d are started anew", self._workers)
            self.close()
        try:
            return self._from_workers()
        except BrokenProcessPool as error:
            raise ValueError(
                "processes that read it were ended from outside twice, perhaps for want of memory. Use fewer workers, "
                "or 0."
            ) from error

    def _from_workers(self) -> Row:
        if self._pool is None:
            # Not forked: JAX's threads would not survive it.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, spawn, _become_worker, (self._dataset,))
        while len(self._waiting) < 2 * self._workers:
            step = self.step + len(self._waiting)
            self._waiting.append(self._next(step, partial(self._pool.submit, _read_in_worker)))
        return self._waiting.popleft().result()

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            self._waiting.clear()

    def start_at(self, step: int) -> None:
        """Go on as if `step` batches had been handed out."""
        check_count("step", step, 0, "it counts the batches handed out")
        self.step = int(step)
        self._waiting.clear()

    def state(self) -> dict[str, Any]:
        """Where the run stands and what its order depends on, as JSON: the same in every process."""
        plain = {n: list(v) if isinstance(v, tuple) else int(v) for n, v in asdict(self.order).items()}
        source = {"digest": getattr(self._dataset, "digest", None), "source": str(getattr(self._dataset, "name", ""))}
        return {"step": self.step, **plain, **source}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state()` was taken, on any number of devices and processes.

        Raises: ValueError if the order of examples, or what they hold, would not be that of the state.
        """
        here = self.state()
        changed = [name for name in asdict(self.order) if state.get(name) != here[name]]
        if changed:
            saved = ", ".join(f"{name} {state.get(name)}" for name in changed)
            found = ", ".join(f"{name} {here[name]}" for name in changed)
            raise ValueError(
                f"The order of examples was saved with {saved}; this run has {found}. Keep data, seq_len, "
                f"seed and global batch (by accumulation on fewer devices), {_BEGIN_ANEW}"
            )
        # States saved before there were digests have none.
        if (digest := state.get("digest")) is not None and here["digest"] not in (None, digest):
            raise ValueError(
                f"The saved run learned from {state['source']}, and {here['source']} has as many examples but holds "
                f"others (digest {here['digest']} instead of {digest}). Keep the data, how they are tokenized and "
                f"seq_len, {_BEGIN_ANEW}"
            )
        self.start_at(state["step"])


def evaluation_batches(
    dataset: Packed, *, global_batch: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Row]:
    """Every example exactly once and in order; rows of padding, 0 everywhere, fill the last batch.

    Every process gets the same number of batches, so that none waits for another.
    Raises: ValueError if there are no examples, or processes cannot share a batch equally.
    """
    if not len(dataset):
        raise ValueError("There are 0 evaluation examples, so no metric. Hold out more or do not evaluate.")
    rows = _process_rows(global_batch, process_index, process_count)
    order = Order(examples=len(dataset), global_batch=global_batch, shuffle=False)
    return (_read(dataset, order.batch(step)[rows]) for step in range(order.batches_per_epoch))


def padded_length(length: int, longest: int) -> int:
    """The length that sequences of `length` are padded to: 8, 16, 32, ... up to `longest`, which always counts.

    A step is compiled once for each length that it meets, so batches of any length cost a handful of compilations.
    Raises: ValueError for a sequence longer than `longest`.
    """
    check_count("length", length, 1, "it counts the tokens of a sequence")
    if length > longest:
        raise ValueError(f"a sequence has {length} tokens, more than {longest}. Cut it, or allow longer ones.")
    return min(longest, max(8, 1 << (length - 1).bit_length()))


def pad_sequences(batch: Row, longest: int) -> Row:
    """A batch of `[rows, length]` arrays, with zeros up to `padded_length` on the right; a weight of 0 is padding."""
    return {
        name: np.pad(values, [(0, 0), (0, padded_length(values.shape[1], longest) - values.shape[1])])
        for name, values in batch.items()
    }


def check_batch(batch_size: int, *, devices: int, accumulate: int = 1) -> int:
    """The sequences of one device in one micro-batch; `batch_size` counts those of a whole optimizer step.

    Raises: ValueError if they cannot be shared equally, with the nearest sizes that can.
    """
    check_count("devices", devices, 1, "it counts the devices that share a batch")
    check_count("accumulate", accumulate, 1, "it counts the micro-batches of an optimizer step")
    shares = devices * accumulate
    return _share(batch_size, shares, f"{devices} devices x {accumulate} micro-batches = {shares}")


def _share(batch_size: int, shares: int, over: str) -> int:
    check_count("batch_size", batch_size, 1, "it counts the sequences of an optimizer step on all devices")
    if batch_size % shares:
        below = batch_size // shares * shares
        nearest = f"{below} or {below + shares}" if below else f"{shares}"
        raise ValueError(f"batch_size {batch_size} does not split equally over {over}. Use {nearest}.")
    return batch_size // shares


def _process_rows(global_batch: int, process_index: int, process_count: int) -> slice:
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index is {process_index} of {process_count} processes. Use jax.process_index() and "
            f"jax.process_count()."
        )
    share = _share(global_batch, process_count, f"{process_count} processes")
    return slice(process_index * share, (process_index + 1) * share)


_dataset: Packed | Mixed  # of a worker process


def _become_worker(dataset: Packed | Mixed) -> None:
    global _dataset
    _dataset = dataset
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the run ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Who is killed, or leaves at once, ends no workers, and they would wait for work forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _read_in_worker(ids: np.ndarray) -> Row:
    return _read(_dataset, ids)


def _read(dataset: Packed | Mixed, ids: np.ndarray) -> Row:
    """The examples stacked, `[ids, ...]`; id -1 is a row of zeros."""
    real = [dataset[int(i)] for i in ids if i >= 0]
    like = real[0] if real else dataset[0]
    padding = {name: np.zeros_like(values) for name, values in like.items()}
    rows = real + [padding] * (len(ids) - len(real))
    return {name: np.stack([row[name] for row in rows]) for name in like}
