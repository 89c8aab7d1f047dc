"""When the gather of a called unit may begin: the bound on gathered units, and PyTorch's explicit prefetch lists.

Owns the order of `unit.call`s in one tracing of a loss. A `Stack` needs none of this, its loop is the order.

Note [Tickets]
Nothing but data keeps a gather from running early, and too many early gathers are the whole model. So every call makes
a ticket, a scalar that exists once the call's inputs do, and a gather waits for the ticket of an earlier call: with
`limit=2` the one before, so unit k+1 is gathered while unit k computes and not sooner. The ticket's cotangent exists
once the call's cotangents do, so the same wire, read backwards, lets unit k-1 be gathered for its backward pass while
unit k's runs. A second wire holds what is below unit k back until the gradient of unit k+1 is reduced.

XLA drops whatever it can see to change nothing: a barrier's operand that nobody reads, a ticket made of a constant. So
a ticket is an element of what it stands for, and what waits for it is selected by a condition on it that is always true
and that XLA cannot decide. The selected values are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.extend.core
import jax.numpy as jnp
from jax import Array

Names = tuple[str, ...]


def ticket(arrays) -> Array:
    """A float32 scalar that exists once the arrays do."""
    numbers = [a for a in jax.tree.leaves(arrays) if a.size and not jnp.issubdtype(a.dtype, jax.dtypes.extended)]
    return sum((a.reshape(-1)[0].astype(jnp.float32) for a in numbers), jnp.float32(0))


def after(tickets: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """The same arrays, bitwise, but not before the tickets exist."""
    # The barrier keeps XLA from making the selection in one kernel with something else that reads the arrays, such as
    # the optimizer, which would then have to come first.
    arrays = jax.lax.optimization_barrier(list(arrays))
    bits = jax.lax.bitcast_convert_type(sum(tickets[1:], tickets[0]), jnp.uint32)
    is_there = jax.lax.population_count(bits) <= 32  # of 32 bits
    return [jnp.where(is_there, a, jnp.zeros_like(a)) for a in arrays]


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Which called units are gathered ahead of the one that computes. Units are named by their paths."""

    limit: int = 2
    """Gathered units alive at once, the one that computes included; 1 gathers only when a unit's inputs are there."""
    forward: Mapping[str, Names] = field(default_factory=dict)
    """`{unit: (units, ...)}` that may be gathered when it begins its forward pass, whatever `limit` says; as
    `set_modules_to_forward_prefetch` in PyTorch."""
    backward: Mapping[str, Names] = field(default_factory=dict)
    """The same for the backward pass; as `set_modules_to_backward_prefetch`."""

    def __post_init__(self):
        if self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it counts gathered units, so use 1 or more.")

    def check(self, units: Names) -> None:
        """Raises: ValueError for a list that names what is no unit."""
        for direction in (self.forward, self.backward):
            for name in {*direction, *(n for names in direction.values() for n in names)}:
                if name not in units:
                    raise ValueError(
                        f"prefetch names {name!r}, which is no unit. Units are {', '.join(sorted(units))}."
                    )


@dataclass(eq=False)
class Turn:
    """One call of a unit."""

    unit: str
    after: list[Turn]
    """Calls whose tickets its gather waits for; empty waits for the call's own inputs."""
    opens: list[Turn]
    """Calls whose backward gather may begin with this call's backward pass."""
    previous: Turn | None
    """The call before, which may not compute its backward pass's last cotangent before this one's gradient is reduced:
    the same wire again, `reduced`."""
    uses: list[str]
    """The order's."""
    ticket: Array | None = None
    reduced: Array | None = None
    is_opened: bool = False
    """Whether a later call opens this one's backward gather."""

    @property
    def is_only(self) -> bool:
        """Whether this call is the one use of the unit; known when the backward pass begins."""
        return self.uses.count(self.unit) == 1

    @property
    def wires(self) -> list[Turn]:
        """The calls that this one takes a ticket of."""
        return list(dict.fromkeys([*self.after, *self.opens]))


class Order:
    """The calls so far, apart for every level of tracing, as a ticket is of no use outside its own. Compared by
    identity."""

    def __init__(self, prefetch: Prefetch = Prefetch()):
        self.prefetch = prefetch
        self._turns: list[tuple[object, list[Turn]]] = []
        self.uses: list[str] = []
        """The unit of every use so far, called or not."""

    def next(self, unit: str) -> Turn:
        """The turn of a unit that is called now."""
        here = jax.extend.core.get_opaque_trace_state()
        turns = next((turns for state, turns in self._turns if state == here), None)
        if turns is None:
            self._turns.append((here, turns := []))
        before = turns[1 - self.prefetch.limit] if 1 < self.prefetch.limit <= len(turns) + 1 else None
        self.uses.append(unit)
        previous = turns[-1] if turns else None
        turn = Turn(unit, self._after(unit, turns, before), self._opens(unit, turns, before), previous, self.uses)
        for opened in turn.opens:
            opened.is_opened = True
        turns.append(turn)
        return turn

    def _after(self, unit: str, turns: list[Turn], before: Turn | None) -> list[Turn]:
        asked = [name for name, ahead in self.prefetch.forward.items() if unit in ahead]
        found = next((turn for turn in reversed(turns) if turn.unit in asked), before)
        return [] if found is None else [found]

    def _opens(self, unit: str, turns: list[Turn], before: Turn | None) -> list[Turn]:
        listed = {name for ahead in self.prefetch.backward.values() for name in ahead}
        mine = self.prefetch.backward.get(unit, ())
        opens = [turn for turn in turns if turn.unit in mine and not turn.is_opened]
        if before is not None and before.unit not in listed and not before.is_opened:
            opens.append(before)
        return opens
