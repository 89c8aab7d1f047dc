"""Which example is where: the order of examples of one source, and of a mixture of several.

A function of seed and step alone, so that resuming is arithmetic, nothing is replayed, and the order is the same on
any number of devices. What an example holds is decided in `data.py`; who reads it, and when, in `batches.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from jfsdp.data import Packed, Row


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which example is where: a function of seed and step, so the same on any number of devices.

    Each epoch goes once through all examples, in its own order if `shuffle`. No batch holds two epochs: the
    last one is filled up with padding, or left out by `drop_last`.
    """

    examples: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @property
    def batches_per_epoch(self) -> int:
        return (self.examples + (0 if self.drop_last else self.global_batch - 1)) // self.global_batch

    def batch(self, step: int) -> np.ndarray:
        """Example ids of batch `step`, counted from 0 over all epochs: `[global_batch]`, -1 for padding."""
        epoch, k = divmod(step, self.batches_per_epoch)
        ids = self._epoch(epoch)[k * self.global_batch : (k + 1) * self.global_batch]
        return np.pad(ids, (0, self.global_batch - len(ids)), constant_values=-1)

    def dropped(self, epoch: int) -> np.ndarray:
        """The example ids that `drop_last` leaves out of an epoch."""
        return self._epoch(epoch)[self.batches_per_epoch * self.global_batch :]

    def _epoch(self, epoch: int) -> np.ndarray:
        return _cached_permutation(self.examples, self.seed, epoch) if self.shuffle else np.arange(self.examples)


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """Which example of which source is where: a function of seed and step, as `Order` is for one source.

    Of every `sum(weights)` examples in a row, counted from 0 on, exactly `weights[s]` are of source s, in an order of
    their own. A source goes once through all its examples, shuffled, before any comes again, at its own pace; so a
    mixture has no epochs and no last batch.
    """

    sizes: tuple[int, ...]
    """Examples of each source."""
    weights: tuple[int, ...]
    global_batch: int
    seed: int = 0

    batches_per_epoch: ClassVar[float] = math.inf

    def batch(self, step: int) -> np.ndarray:
        """Examples of batch `step`, numbered over all sources one behind the other: `[global_batch]`."""
        first, cycle = step * self.global_batch, sum(self.weights)
        last = first + self.global_batch - 1
        ids = np.concatenate([self._cycle(c) for c in range(first // cycle, last // cycle + 1)])
        return ids[first % cycle :][: self.global_batch]

    def _cycle(self, cycle: int) -> np.ndarray:
        """The `sum(weights)` examples of one round: sources take turns at random, each goes on where it was."""
        turns = np.repeat(np.arange(len(self.sizes)), self.weights)
        turns = turns[self._permutation(len(turns), self.seed, cycle, 0)]
        ids, offset = np.empty(len(turns), np.int64), 0
        for source, (size, weight) in enumerate(zip(self.sizes, self.weights)):
            epochs, places = np.divmod(np.arange(cycle * weight, (cycle + 1) * weight), size)
            orders = {int(e): self._permutation(size, self.seed, int(e), 1 + source) for e in np.unique(epochs)}
            ids[turns == source] = [offset + orders[e][p] for e, p in zip(epochs.tolist(), places)]
            offset += size
        return ids

    @cached_property
    def _permutation(self):
        return lru_cache(maxsize=2 * len(self.sizes) + 2)(_permutation)


def _permutation(examples: int, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    # Sorted raw words and not Generator.permutation: NumPy promises that only the former stay the same in
    # every version (NEP 19), and a run resumed after an upgrade would repeat examples and miss others.
    # grain could shuffle and mix too, but this is all there is to do and its iterators would own the position: a
    # `grain.MapDataset` is welcome as a source of examples.
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=[0, 0, 0, stream]).random_raw(examples)
    return np.argsort(words, kind="stable")


_cached_permutation = lru_cache(maxsize=2)(_permutation)  # 8 bytes per example, made once per epoch


@dataclass(frozen=True, eq=False)
class Mixed:
    """Several datasets one behind the other, with how often each is drawn from. See `MixedOrder`."""

    parts: list[Packed]
    weights: list[int]

    @property
    def name(self) -> str:
        return " + ".join(str(getattr(part, "name", part)) for part in self.parts)

    @property
    def digest(self) -> str | None:
        """Of all parts, in their order; None where one has none."""
        found = [getattr(part, "digest", None) for part in self.parts]
        return None if None in found else "-".join(found)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, i: int) -> Row:
        for part in self.parts:
            if i < len(part):
                return part[i]
            i -= len(part)
        raise IndexError(f"the mixture has {len(self)} examples.")

    def __str__(self) -> str:
        total = sum(self.weights)
        return "; ".join(f"{weight / total:.3g} of {part}" for part, weight in zip(self.parts, self.weights))


def mix(parts: Sequence[Packed], weights: Sequence[float]) -> Mixed:
    """A mixture of datasets; weights are how many examples are drawn of each, in relation to each other.

    Raises: ValueError for a weight that is not above 0, or weights that are too far apart.
    """
    exact = [Fraction(weight).limit_denominator(1000) if math.isfinite(weight) else 0 for weight in weights]
    if len(exact) != len(parts) or any(weight <= 0 for weight in exact):
        raise ValueError(f"the weights of a mixture are {list(weights)}. Give each source one of 0.001 or more.")
    whole = [int(weight * math.lcm(*(w.denominator for w in exact))) for weight in exact]
    common = math.gcd(*whole)
    if (cycle := sum(whole) // common) > 100_000:
        raise ValueError(f"the weights {list(weights)} come out only every {cycle} examples. Use rounder ones.")
    return Mixed(list(parts), [weight // common for weight in whole])
