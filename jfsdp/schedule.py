"""When collectives run relative to compute: the options, and the reductions that follow one unit behind.

`stack.py` and `vocab.py` walk down their units in the backward pass and hand each gradient to a `Reducer`,
which scatters it during the next unit and all-reduces it (over replicas) during the one after.

Note [Late reduction]
In iteration l the reducer holds the gradient of unit l+1 (`pending`, whole) and the shard of unit l+2
(`partial`). Both move on before unit l computes and wait for nothing that unit l computes, so the compiler may
overlap them with its matmuls. It costs one unit's gradient, which `late_reduce=False` saves.

Note [The one wasted all-reduce]
With replicas the first iteration of the backward loop has no shard waiting yet, and all-reduces zeros: 1/(L-1)
more over `replica` (3.2 percent for 32 layers). Peeling one more unit off the loop would save it, for one more
copy of the block in the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
    """Reduce a gradient during the next unit's backward; False reduces at once, exposed, with one unit's gradient less in memory."""
    unroll: int = 1
    """Layers per loop iteration in the program: 1 or 2."""

    def __post_init__(self):
        if self.prefetch not in (0, 1, 2):
            raise ValueError(f"prefetch is {self.prefetch}; it counts units gathered ahead, so use 0, 1 or 2.")
        if self.unroll not in (1, 2):
            raise ValueError(f"unroll is {self.unroll}; it counts layers per loop iteration, so use 1 or 2.")


class Waiting(NamedTuple):
    """What a reducer carries from unit to unit. None: nothing waits at that stage."""

    pending: Arrays | None
    """Whole gradients that wait for their reduce-scatter."""
    partial: Arrays | None
    """Shards that wait for their all-reduce."""
    grads: Arrays
    """`[L, ...]` buffers that finished gradients are written into."""


class Reducer:
    """Reduces the gradients of L equal units, handed in from unit L-1 down to 0. See Note [Late reduction]."""

    def __init__(self, layouts: Sequence[ParamLayout], held: Sequence[Array | None], regime: Regime, schedule: Schedule):
        placement = layouts[0].placement
        self.layouts, self.held, self.regime = list(layouts), list(held), regime
        self.top = layouts[0].layers - 1
        moves_now = regime.last or not regime.no_sync
        self.late_scatter = schedule.late_reduce and bool(placement.shard_axes) and moves_now
        self.late_all_reduce = schedule.late_reduce and bool(placement.replica_axes) and regime.last

    def start(self) -> Waiting:
        grads = [h if self._in_place(h, leaf) else empty_slot(leaf, self.regime) for h, leaf in zip(self.held, self.layouts)]
        return Waiting(None, None, grads)

    def advance(self, state: Waiting, unit: Index) -> Waiting:
        """Before `unit` computes: scatter the gradient of the unit above, all-reduce the shard of the one above that."""
        pending, partial, grads = state
        scattered = None if pending is None else self._scatter(grads, pending, self._above(unit, 1))
        if not self.late_all_reduce:
            return state if scattered is None else Waiting(None, None, self._store(grads, scattered, self._above(unit, 1)))
        if partial is not None:
            grads = self._store(grads, partial, self._above(unit, 2 if self.late_scatter else 1))
        return Waiting(None, scattered, grads)

    def push(self, state: Waiting, gradient: Arrays, unit: Index) -> Waiting:
        """Hand in the whole gradient of `unit`."""
        if self.late_scatter:
            return state._replace(pending=gradient)
        shards = self._scatter(state.grads, gradient, unit)
        if self.late_all_reduce:
            return state._replace(partial=shards)
        return state._replace(grads=self._store(state.grads, shards, unit))

    def fill(self, state: Waiting) -> Waiting:
        """Before a loop, whose carry has fixed types: zeros where no shard waits yet. See Note [The one wasted all-reduce]."""
        if not self.late_all_reduce or state.partial is not None:
            return state
        return state._replace(partial=[empty_slot(replace(leaf, layers=None), Regime(last=False)) for leaf in self.layouts])

    def finish(self, state: Waiting) -> Arrays:
        """After unit 0: bring what still waits home."""
        state = self.advance(state, -1)
        return self.advance(state, -2 if self.late_scatter else -1).grads if self.late_all_reduce else state.grads

    def _scatter(self, grads: Arrays, gradient: Arrays, unit: Index) -> Arrays:
        held = [
            None if h is None else at(g if self._in_place(h, leaf) else h, unit)
            for g, h, leaf in zip(grads, self.held, self.layouts)
        ]
        with jax.named_scope("reduce_scatter"):
            return absorb(gradient, [None] * len(gradient), held, self.layouts, self.regime)

    def _store(self, grads: Arrays, shards: Arrays, unit: Index) -> Arrays:
        if self.regime.last:
            with jax.named_scope("all_reduce"):
                shards = collectives.all_reduce(shards, self.layouts)
        return [lax.dynamic_update_index_in_dim(g, s, unit, 0) for g, s in zip(grads, shards)]

    def _in_place(self, held: Array | None, leaf: ParamLayout) -> bool:
        """What is held becomes the result where it is: shapes agree, and types too unless copies are still to be summed."""
        if held is None:
            return False
        return not self.regime.last or not (self.regime.holds_whole(leaf) or leaf.placement.replica_axes)

    def _above(self, unit: Index, by: int) -> Index:
        # Clamped: in the first iterations a stage of zeros is written to the top, and overwritten by the one that follows.
        return min(unit + by, self.top) if isinstance(unit, int) else jnp.minimum(unit + by, self.top)


def at(stacked: Array, unit: Index) -> Array:
    """One layer of `[L, ...]`."""
    return stacked[unit] if isinstance(unit, int) else lax.dynamic_index_in_dim(stacked, unit, 0, keepdims=False)
