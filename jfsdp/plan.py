"""What a step moves and keeps, by formula: instant, from a `Plan` alone, and held to the compiled program by tests.

Owns the arithmetic of the table of strategies. `audit.py` reads the same figures from a compiled program.

Note [Bytes received]
Ring cost, per device and optimizer step: of an array of B bytes over n devices, a gather or a reduce-scatter
receives B (n-1)/n and an all-reduce 2B (n-1)/n. U units of P bytes in all, S shards, R replicas:

    FULL_SHARD      gathers 2P(S-1)/S (the last unit of a stack is kept; its loop gathers one it does not read),
                    reduce-scatter P(S-1)/S
    SHARD_GRAD_OP   gathers P(S-1)/S, reduce-scatter P(S-1)/S
    SHARD_OPT       reduce-scatter P(S-1)/S, updated shards gathered P(S-1)/S
    NO_SHARD        all-reduce 2P(S-1)/S
    HYBRID_*        as above inside `shard`, and 2(P/S)(R-1)/R over `replica`

Micro-batches multiply gathers and reduce-scatters (without no_sync), never the all-reduce over replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jfsdp.layout import ParamLayout, Plan
from jfsdp.schedule import Schedule
from jfsdp.vocab import SLICE_ROWS, STREAM_ABOVE


@dataclass(frozen=True)
class Move:
    """One kind of communication of one unit in one optimizer step."""

    unit: str
    kind: str
    """all-gather, reduce-scatter, all-reduce or all-to-all."""
    axes: tuple[str, ...]
    dtype: str
    passes: float
    """How often the unit's bytes travel this way in a step."""
    received: float
    """Bytes that one device receives per step."""
    why: str


@dataclass(frozen=True)
class Kept:
    """One category of memory on one device."""

    name: str
    bytes: float
    formula: str


def traffic(
    plan: Plan,
    *,
    schedule: Schedule = Schedule(),
    accumulate: int = 1,
    no_sync: bool = False,
    tokens: int | None = None,
) -> list[Move]:
    """What every unit receives per device and optimizer step. See Note [Bytes received].

    tokens: of one device and micro-batch; decides how vocabulary tables are used. None counts them as plain units.
    """
    moves: list[Move] = []
    for unit, leaves in _units(plan).items():
        options = plan.units.get(unit)
        uses = options.uses if options and tokens is not None else ()
        counter = _Unit(unit, leaves, plan, schedule, accumulate, no_sync)
        moves += counter.vocabulary(uses, tokens) if uses and counter.cut and tokens is not None else counter.plain()
    return [m for m in moves if m.received]


def memory(plan: Plan, state, *, schedule: Schedule = Schedule(), saved_per_layer: int = 0) -> list[Kept]:
    """What one device keeps, by category; compute's own working set (one block, one slice of logits) is left out.

    state: an abstract or real `TrainState`.
    saved_per_layer: bytes that each layer saves for its backward pass (its input `[b, T, D]` under full activation
        checkpointing).
    """
    stacked = [leaf for leaf in plan.leaves if leaf.layers is not None]
    layers = stacked[0].layers if stacked else 0
    one_unit = max(
        (
            sum(_bytes(leaf, leaf.param_dtype) for leaf in leaves)
            for leaves in _units(plan).values()
            if leaves[0].layers
        ),
        default=0,
    )
    staging = max(
        (
            sum(_bytes(leaf, leaf.reduce_dtype) for leaf in leaves)
            for leaves in _units(plan).values()
            if leaves[0].layers
        ),
        default=0,
    )
    alive = _alive(plan, schedule, layers)
    grads = sum(math.prod(leaf.stack(leaf.shard_shape)) * leaf.dtype.itemsize for leaf in plan.leaves)
    return [
        Kept("parameters", device_bytes(state.params), "stored shards, fp32 masters"),
        Kept("optimizer", device_bytes(state.opt_state), "its own state, sharded as the parameters"),
        Kept("gradients", grads, "finished shards, stored dtype"),
        Kept("gathered", alive * one_unit, f"{alive} units of {one_unit / 2**20:,.1f} MiB"),
        Kept(
            "gradients in flight",
            (1 + schedule.late_reduce) * one_unit + staging,
            "computed, waiting, and staged for the wire",
        ),
        Kept("saved activations", layers * saved_per_layer, f"{layers} layers x {saved_per_layer / 2**20:,.1f} MiB"),
    ]


def device_bytes(tree) -> int:
    """Bytes of a pytree of arrays (or abstract ones with shardings) on one device."""

    def one(a) -> int:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return 0
        return math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize

    return sum(one(a) for a in jax.tree.leaves(tree))


class _Unit:
    """The moves of one unit."""

    def __init__(
        self, name: str, leaves: list[ParamLayout], plan: Plan, schedule: Schedule, accumulate: int, no_sync: bool
    ):
        self.name, self.leaves, self.schedule, self.micro = name or "root", leaves, schedule, accumulate
        self.placement = plan.placement
        self.cut = [leaf for leaf in leaves if leaf.dim is not None]
        self.whole = [leaf for leaf in leaves if leaf.dim is None]
        self.layers = leaves[0].layers
        self.is_root = not name
        self.reductions = 1 if no_sync and not leaves[0].never_whole else accumulate

    def plain(self) -> Iterator[Move] | list[Move]:
        return [*self._gathers(), *self._reductions(self.cut), *self._after_reduction()]

    def vocabulary(self, uses: tuple[str, ...], tokens: int) -> list[Move]:
        """A table used by row exchange, by a streamed head, or by both; see the notes in vocab.py."""
        (table,) = self.leaves
        rows, width = table.shape
        n, item = self.placement.shards, table.param_dtype.itemsize
        moves, reduced = [], 0
        if "embed" in uses:
            if tokens < rows and not self.placement.whole_at_rest:
                ids, rows_moved = 4 * (n - 1) * tokens, 2 * tokens * table.padded * item * (n - 1) / n
                moves.append(self._move("all-gather", "int32", self.micro, self.micro * ids, "token ids of the group"))
                moves.append(
                    self._move(
                        "all-to-all",
                        table.param_dtype.name,
                        2 * self.micro,
                        self.micro * rows_moved,
                        "rows there, gradients back",
                    )
                )
            else:
                moves += self._gathers(passes=1)
                reduced += 1
        if "head" in uses:
            if tokens * rows * 4 > STREAM_ABOVE:
                moves += self._gathers(passes=2 if rows > SLICE_ROWS else 1, why="slices, forward and backward")
            else:
                moves += self._gathers(passes=2 if self.placement.reshard_after_forward else 1)
            reduced += 1
        for _ in range(reduced):
            moves += self._reductions(self.cut)
        return moves + self._after_reduction()

    def _gathers(self, passes: float | None = None, why: str = "") -> list[Move]:
        if self.placement.whole_at_rest or not self.cut:
            return []
        if passes is None:
            passes, why = self._passes()
        out = []
        for dtype in sorted({leaf.param_dtype.name for leaf in self.cut}):
            size = sum(
                _bytes(leaf, leaf.param_dtype) * (leaf.layers or 1)
                for leaf in self.cut
                if leaf.param_dtype.name == dtype
            )
            out.append(
                self._move(
                    "all-gather",
                    dtype,
                    passes * self.micro,
                    passes * self.micro * _ring(size, self.placement.shards),
                    why,
                )
            )
        return out

    def _passes(self) -> tuple[float, str]:
        if not self.placement.reshard_after_forward:
            return 1, "forward; kept into backward"
        if self.layers is None:
            return (1, "root, kept into backward") if self.is_root else (2, "forward and backward")
        unused = min(self.schedule.prefetch, self.layers)
        return (
            2 * self.layers - 1 + unused
        ) / self.layers, f"forward and backward, last layer kept, {unused} gathered and not read"

    def _reductions(self, leaves: list[ParamLayout]) -> list[Move]:
        axes = self.placement.shard_axes
        out = []
        for kind, which, times in (("reduce-scatter", leaves, 1), ("all-reduce", self.whole, 2)):
            for dtype in sorted({leaf.reduce_dtype.name for leaf in which}):
                size = sum(
                    _bytes(leaf, leaf.reduce_dtype) * (leaf.layers or 1)
                    for leaf in which
                    if leaf.reduce_dtype.name == dtype
                )
                received = self.reductions * times * _ring(size, self.placement.shards)
                out.append(
                    self._move(
                        kind,
                        dtype,
                        self.reductions,
                        received,
                        "gradients" if kind[0] == "r" else "gradients of whole parameters",
                        axes,
                    )
                )
        return out

    def _after_reduction(self) -> list[Move]:
        """Over the replicas, and back to whole parameters under SHARD_OPT."""
        out = []
        if self.placement.replica_axes:
            size = sum(math.prod(leaf.stack(leaf.shard_shape)) * leaf.reduce_dtype.itemsize for leaf in self.leaves)
            received = 2 * _ring(size, self.placement.replicas)
            dtype = self.leaves[0].reduce_dtype.name
            out.append(
                self._move("all-reduce", dtype, 1, received, "shards over replicas", self.placement.replica_axes)
            )
        if self.placement.whole_at_rest and self.placement.shard_axes and self.cut:
            size = sum(_bytes(leaf, leaf.dtype) * (leaf.layers or 1) for leaf in self.cut)
            out.append(
                self._move(
                    "all-gather", self.cut[0].dtype.name, 1, _ring(size, self.placement.shards), "updated parameters"
                )
            )
        return out

    def _move(
        self, kind: str, dtype: str, passes: float, received: float, why: str, axes: tuple[str, ...] | None = None
    ) -> Move:
        return Move(self.name, kind, self.placement.shard_axes if axes is None else axes, dtype, passes, received, why)


def _units(plan: Plan) -> dict[str, list[ParamLayout]]:
    units: dict[str, list[ParamLayout]] = {}
    for leaf in plan.leaves:
        units.setdefault(leaf.unit, []).append(leaf)
    return units


def _alive(plan: Plan, schedule: Schedule, layers: int) -> int:
    """Gathered units alive at once."""
    if plan.placement.whole_at_rest or not layers:
        return 0
    return min(schedule.prefetch + 1, layers) if plan.placement.reshard_after_forward else layers


def _bytes(leaf: ParamLayout, dtype) -> int:
    """Bytes of one layer of a parameter, with its padding, in a dtype."""
    return math.prod(leaf.padded_shape) * jnp.dtype(dtype).itemsize


def _ring(size: float, devices: int) -> float:
    return size * (devices - 1) / devices
