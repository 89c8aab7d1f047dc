"""A second opinion on hidden communication: a compiled schedule, played on two lanes at declared rates.

Owns the clock. The program's order is the compiler's; how long things take is said by `planning/hardware.py` and the
rates here, so that this estimate and XLA's own, which `gpu.py` reads from its log, can disagree. Nothing runs.

Note [Playing a schedule]
Instructions start in the order of the text. Matmuls take their operations at the rate of a training step, other kernels
write and read their result at the memory's bandwidth, and a loop without collectives or loops (attention) at 0.6 of the
rate. Collectives wait for one another on the second lane. The first lane waits at a `done` whose collective has not
finished, and for as long as a blocking one takes: that is what is exposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from jfsdp.audit import hlo
from jfsdp.audit import program as audit
from jfsdp.planning.hardware import Cluster
from jfsdp.planning.roofline import Rates

_NOTHING = {"get-tuple-element", "parameter", "bitcast", "tuple", "constant", "after-all", "partition-id", "iota"}
_INNER_LOOP, _LEAST_US = 0.6, 2.0


class Event(NamedTuple):
    """Something on a lane, in microseconds from the start of a computation."""

    lane: str
    """compute, communication or wait."""
    name: str
    begin: float
    end: float
    what: str


@dataclass(frozen=True)
class Played:
    """One execution of a computation, inner loops included."""

    us: float
    exposed_us: float
    """How long the compute lane waited for communication."""
    events: list[Event]


def replay(text: str, mesh_shape: dict[str, int], cluster: Cluster, rates: Rates = Rates()) -> dict[str, Played]:
    """Every computation that communicates, and the entry, by name. See Note [Playing a schedule]."""
    player = _Player(hlo.Module(text), mesh_shape, cluster, rates)
    player.play(player.module.entry)
    return player.played


class _Player:
    def __init__(self, module: hlo.Module, mesh_shape: dict[str, int], cluster: Cluster, rates: Rates):
        self.module, self.mesh_shape, self.cluster = module, mesh_shape, cluster
        self.rate = rates.matmuls(cluster)
        self.bandwidth = cluster.chip.bandwidth * rates.memory
        self.played: dict[str, Played] = {}

    def play(self, computation: str) -> Played:
        if computation in self.played:
            return self.played[computation]
        now = busy = waited = 0.0
        due: dict[str, tuple[float, str]] = {}
        events: list[Event] = []

        def wait(until: float, what: str) -> None:
            nonlocal now, waited
            if until > now:
                events.append(Event("wait", what, now, until, f"waits for {what}"))
                waited, now = waited + until - now, until

        for i in self.module.computations[computation].values():
            moved = [c for c in self.module.collectives_of(i, computation) if self._seconds(*c)]
            if i.op.endswith("-done"):
                if i.operands and i.operands[0] in due:
                    wait(*due.pop(i.operands[0]))
            elif moved:
                begin = max(busy, now)
                busy = begin + sum(self._seconds(*c) for c in moved) * 1e6
                kind = moved[0][0].kind
                size = sum(x.bytes for _, operands in moved for x in operands)
                dtype = moved[0][1][0].dtype
                events.append(Event("communication", i.name, begin, busy, f"{kind} {dtype} {size / 2**20:,.1f} MiB in"))
                if i.op.endswith("-start") and '"is_sync":true' not in i.rest:
                    due[i.name] = (busy, kind)
                else:
                    wait(busy, kind)
            elif i.op == "while":
                us, exposed, what = self._loop(i)
                events.append(Event("compute", i.name, now, now + us, what))
                now, waited = now + us, waited + exposed
                busy = max(busy, now) if exposed or self._communicates(i.body) else busy
            elif i.op not in _NOTHING and not i.op.endswith("-start"):
                us, what = self._kernel(i, computation)
                events.append(Event("compute", i.name, now, now + us, what))
                now += us
        self.played[computation] = Played(now, waited, events)
        return self.played[computation]

    def _loop(self, i: hlo.Instruction) -> tuple[float, float, str]:
        trips = i.trips or 1
        holds_loops = any(inner.op == "while" for inner in self.module.computations[i.body].values())
        if holds_loops or self._communicates(i.body):  # layers; else attention
            body = self.play(i.body)
            return trips * body.us, trips * body.exposed_us, f"loop of {trips} x {body.us:,.0f} us"
        flops = trips * self.module.matmul_flops(i.body)
        what = f"attention in a loop of {trips}" if flops else f"loop of {trips}"
        return max(flops / (_INNER_LOOP * self.rate) * 1e6, _LEAST_US), 0.0, what

    def _kernel(self, i: hlo.Instruction, computation: str) -> tuple[float, str]:
        flops = self.module.matmul_flops_of(i, computation)
        moved = 2 * self._written(i) / self.bandwidth * 1e6
        us = max(flops / self.rate * 1e6, moved, _LEAST_US)
        return us, f"matmul {flops / 1e9:,.0f} GFLOP" if flops else i.op

    def _written(self, i: hlo.Instruction) -> int:
        """Bytes of the result; of an update in place, those of the update."""
        if i.op == "fusion":
            inner = self.module.computations[i.branches[0]]
            updates = [u for u in inner.values() if u.op == "dynamic-update-slice"]
            if updates:
                return sum(x.bytes for u in updates for x in inner[u.operands[1]].arrays)
        return sum(x.bytes for x in i.arrays)

    def _communicates(self, computation: str) -> bool:
        for i in self.module.computations[computation].values():
            if any(self._seconds(*c) for c in self.module.collectives_of(i, computation)):
                return True
            if i.op == "while" and self._communicates(i.body):
                return True
        return False

    def _seconds(self, i: hlo.Instruction, operands: list[hlo.Array]) -> float:
        groups = hlo.device_groups(i.rest, math.prod(self.mesh_shape.values()))
        axes = audit.axes_of(i.kind, groups, self.mesh_shape)
        if not axes:
            return 0.0
        size = sum(x.bytes for x in operands) * (len(groups[0]) if i.kind == "all-gather" else 1)
        names = list(self.mesh_shape)
        spread = (
            math.prod(n for a, n in self.mesh_shape.items() if names.index(a) > names.index(axes[-1]))
            if (axes != audit.UNNAMED)
            else 1
        )
        once = self.cluster.seconds(size, len(groups[0]), spread)
        return 2 * once if i.kind == "all-reduce" else once
