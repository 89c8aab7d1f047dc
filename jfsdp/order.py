"""When the gather of a called unit may begin: the bound on gathered units, and PyTorch's explicit prefetch lists.

Owns the order of `unit.call`s in one tracing of a loss. A `Stack` needs none of this, its loop is the order.

Note [Tickets]
Nothing but data keeps a gather from running early, and too many early gathers are the whole model. So every call makes
a ticket, a scalar that exists once the call's inputs do, and a gather waits for the ticket of an earlier call: with
`limit=2` the one before, so unit k+1 is gathered while unit k computes and not sooner. The ticket's cotangent exists
once the call's cotangents do, so the same wire, read backwards, lets unit k-1 be gathered for its backward pass while
unit k's runs. No number is computed with a ticket: optimization barriers tie it to what it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.extend.core
from jax import Array

Names = tuple[str, ...]


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
    ticket: Array | None = None
    is_opened: bool = False
    """Whether a later call opens this one's backward gather."""

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

    def next(self, unit: str) -> Turn:
        """The turn of a unit that is called now."""
        here = jax.extend.core.get_opaque_trace_state()
        turns = next((turns for state, turns in self._turns if state == here), None)
        if turns is None:
            self._turns.append((here, turns := []))
        before = turns[1 - self.prefetch.limit] if 1 < self.prefetch.limit <= len(turns) + 1 else None
        turn = Turn(unit, self._after(unit, turns, before), self._opens(unit, turns, before))
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
