"""When collectives run relative to compute: the options, and the reduction that follows one unit behind.

`stack.py` and `vocab.py` walk down their units in the backward pass and hand each gradient to a `Reducer`, which
reduces it while the next unit computes.

Note [Late reduction]
In iteration l the reducer holds the whole gradient of unit l+1 (`pending`). It is reduce-scattered, and its shard
all-reduced over replicas, beside the compute of unit l and without waiting for it, so the compiler may overlap both
with the matmuls. That costs the memory of one unit's gradient, which `late_reduce=False` saves.
All-reducing one iteration later still was compiled too (8B, 4 replicas x 8 shards of H100, JAX 0.10.2): it keeps
one more shard, starts with an all-reduce of zeros, and leaves more exposed (18,934 against 18,569 MiB, 4.9 against
2.9 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array, lax

from jfsdp import collectives
from jfsdp.layout import ParamLayout
from jfsdp.unit import Regime, absorb, empty_slot

Index = int | Array
Arrays = list[Array]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of gathers, compute and reductions of a stack."""

    prefetch: int = 1
    """Units gathered ahead of the one that computes: 0, 1 or 2. Each costs the memory of one gathered unit."""
    late_reduce: bool = True
    """Reduce a gradient during the next unit's backward; False reduces at once, exposed, and keeps one unit's gradient
    less in memory."""
    unroll: int = 1
    """Layers per loop iteration in the program: 1 or 2."""

    def __post_init__(self):
        if self.prefetch not in (0, 1, 2):
            raise ValueError(f"prefetch is {self.prefetch}; it counts units gathered ahead, so use 0, 1 or 2.")
        if self.unroll not in (1, 2):
            raise ValueError(f"unroll is {self.unroll}; it counts layers per loop iteration, so use 1 or 2.")


class Waiting(NamedTuple):
    """What a reducer carries from unit to unit."""

    pending: Arrays | None
    """Whole gradients that wait for their reduction; None when none does."""
    grads: Arrays
    """`[L, ...]` buffers that finished gradients are written into."""


class Reducer:
    """Reduces the gradients of L equal units, handed in from unit L-1 down to 0. See Note [Late reduction]."""

    def __init__(
        self, layouts: Sequence[ParamLayout], held: Sequence[Array | None], regime: Regime, schedule: Schedule
    ):
        self.layouts, self.held, self.regime = list(layouts), list(held), regime
        moves = (regime.last or not regime.no_sync) and any(leaf.placement.data_axes for leaf in layouts)
        self.is_late = schedule.late_reduce and moves

    def start(self) -> Waiting:
        grads = [
            h if self._in_place(h, leaf) else empty_slot(leaf, self.regime) for h, leaf in zip(self.held, self.layouts)
        ]
        return Waiting(None, grads)

    def advance(self, state: Waiting, unit: Index) -> Waiting:
        """Before `unit` computes: reduce the gradient of the unit above."""
        if state.pending is None:
            return state
        return Waiting(None, self._reduce(state.grads, state.pending, unit + 1))

    def push(self, state: Waiting, gradient: Arrays, unit: Index) -> Waiting:
        """Hand in the whole gradient of `unit`."""
        return (
            Waiting(gradient, state.grads) if self.is_late else Waiting(None, self._reduce(state.grads, gradient, unit))
        )

    def finish(self, state: Waiting) -> Arrays:
        """After unit 0: bring what still waits home."""
        return self.advance(state, -1).grads

    def _reduce(self, grads: Arrays, gradient: Arrays, unit: Index) -> Arrays:
        """Add what is held, reduce, and write the result of `unit` into the buffers."""
        held = [
            None if h is None else at(g if self._in_place(h, leaf) else h, unit)
            for g, h, leaf in zip(grads, self.held, self.layouts)
        ]
        with jax.named_scope("reduce_scatter"):
            shards = absorb(gradient, [None] * len(gradient), held, self.layouts, self.regime)
        if self.regime.last:
            with jax.named_scope("all_reduce"):
                shards = collectives.all_reduce(shards, self.layouts)
        return [lax.dynamic_update_index_in_dim(g, s, unit, 0) for g, s in zip(grads, shards)]

    def _in_place(self, held: Array | None, leaf: ParamLayout) -> bool:
        """Whether what is held becomes the result where it is: shapes agree, and types too unless copies are still to
        be summed."""
        if held is None:
            return False
        return not self.regime.last or not (self.regime.holds_whole(leaf) or leaf.placement.replica_axes)


def at(stacked: Array, unit: Index) -> Array:
    """One layer of `[L, ...]`."""
    return stacked[unit] if isinstance(unit, int) else lax.dynamic_index_in_dim(stacked, unit, 0, keepdims=False)
