"""What a step moves and keeps, by formula: instant, from a `Plan` alone, and held to the compiled program by tests.

Owns the arithmetic of the table of strategies. `audit/program.py` reads the same figures from a compiled program.

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

Note [Bytes kept]
At the peak, early in the backward pass, a device holds its state, gradient shards, what all layers saved, and the
larger of two: the window of whole units (gathered ones, the gradient that was computed, the one that waits and its
staging for the wire), or what layers work with and the unit whose weights they use. With a late reduction nothing
waits for a layer's gradients, and XLA computes the next layer again beside this one's backward pass: both are alive
(Note [Order] in `planning/footprint.py`). A sharded vocabulary's table is copied once more, transposed for its rows.
The staging is fitted to compiled programs and nothing else is: `benchmarks/plan_accuracy.py` prints formula and
compiler side by side. What is left is gaps in XLA's heap: 1 to 3 percent of a step's temporary memory.

With several micro-batches, shards held for earlier ones become the result in place, unless replicas are summed in the
last one. From three on, XLA unrolls their loop too and makes room for the next one's activations while the last one's
are still there: what layers save counts twice.

What lies on the host comes when it is used: layers one by one, where there is room anyway, and moments for the update,
those of one parameter and the first of the next. Described GPUs have no host, so no compiled program is beside this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfsdp import quantise
from jfsdp.layout import ParamLayout, Plan
from jfsdp.offload import HOST
from jfsdp.planning.footprint import Layers
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
    reshard_after_backward: bool = True,
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
        if not reshard_after_backward:
            moves += counter.kept_for_window(max(1, len(uses)))
        elif uses and counter.cut and tokens is not None:
            moves += counter.vocabulary(uses, tokens)
        else:
            moves += counter.plain()
    return [m for m in moves if m.received]


def memory(
    plan: Plan,
    state,
    layers: Sequence[Layers],
    *,
    schedule: Schedule = Schedule(),
    accumulate: int = 1,
    no_sync: bool = False,
    tokens: int | None = None,
) -> list[Kept]:
    """What one device keeps at the peak of a step, by category. See Note [Bytes kept].

    state: an abstract or real `TrainState`.
    layers: the footprint of each stack on one micro-batch; none leaves out what depends on the batch.
    tokens: of one device and micro-batch; None leaves out the logits.
    """
    trained = [leaf for leaf in plan.leaves if leaf.trainable]
    finished, held = _shards(trained), _held(trained, no_sync) if accumulate > 1 else 0
    window = _window(plan, schedule)
    at_work = max((one.backward + (one.again if schedule.late_reduce else 0) for one in layers), default=0)
    saved = sum((one.count - 1) * one.saved for one in layers)
    saves = " + ".join(f"{one.count - 1} layers x {_mib(one.saved)}, one at work" for one in layers)
    if accumulate > 2:
        saved, saves = 2 * saved, f"{saves}; and room for the next micro-batch's"
    weights = min(unit_bytes(plan), window.weights) if _frees(plan) else window.weights
    passing = [
        Kept("gathered window", window.weights + window.gradients, window.words),
        Kept("activations saved", saved, saves),
        Kept(
            "activations at work",
            max(0.0, at_work + weights - window.bytes),
            f"{_mib(at_work)} and {_mib(weights)} of weights, less window and staging",
        ),
        Kept("reduce staging", window.staged, "of a layer's gradient, in the dtype of its wire"),
        Kept("vocabulary", sum(_table_copy(leaf, plan) for leaf in plan.leaves), "a shard of the table, transposed"),
    ]
    beside = sum(k.bytes for k in passing)
    if state.ema is not None:
        passing.append(Kept("average", device_bytes(state.ema), "of the weights, fp32, sharded as they are"))
    updated = sum(leaf.size * leaf.dtype.itemsize for leaf in trained if _is_gathered_after(leaf))
    summed = sum(_summed(leaf, plan) for leaf in trained)
    alone = max(updated, summed and summed + window.gradients + window.staged, _fetched(plan, state, trained))
    return [
        Kept("parameters", device_bytes(state.params), "stored shards, masters of what is trained"),
        Kept("gradients", finished + held, "finished shards, stored dtype" + (_HELD[no_sync] if held else "")),
        Kept("optimizer", device_bytes(state.opt_state), "its own state, sharded as the parameters"),
        *passing,
        _at_the_head(plan, tokens or 0, window, finished + beside - saved, beside),
        Kept("optimizer step", max(0.0, alone - beside), "what the update takes beyond the room that these leave"),
    ]


def _at_the_head(plan: Plan, tokens: int, window: _Window, before: float, after: float) -> Kept:
    """Logits, or the gradient of a table that is used whole, where one is more than what else is there.

    before, after: what is counted besides that is not there yet when logits are, or no more when layers are done.
    """
    leaves = plan.leaves if tokens else ()
    logits = max((_logits(leaf, plan, tokens) for leaf in leaves), default=0)
    words = f"{_mib(logits)} with their gradient, before gradients and window are there: less these"
    if not (table := max((_whole_gradient(leaf, plan, tokens) for leaf in leaves), default=0)):
        return Kept("logits", max(0.0, logits - before), words)
    layer = unit_bytes(plan) + window.staged  # whose gradient waits meanwhile
    words += f"; or {_mib(table)} of a whole table's gradient, beside one layer of the window"
    return Kept("logits", max(0.0, logits - before, table + layer - after), words)


def host_memory(plan: Plan, state) -> list[Kept]:
    """What one device keeps in the memory of its host, by category; nothing where nothing is offloaded.

    What the host updates is there twice until the step is over: see `HostUpdated` in `offload.py`.
    """
    updates, words = (2, ", old and updated") if plan.offload.step_on == "host" else (1, "")
    trained = [leaf for leaf in plan.leaves if leaf.trainable]
    return [
        Kept("parameters", updates * host_bytes(state.params), f"shards, each brought when it is used{words}"),
        Kept("gradients", _shards(trained) if plan.offload.gradients else 0, "finished shards"),
        Kept("optimizer", updates * host_bytes(state.opt_state), f"its own state{words}"),
        Kept("average", host_bytes(state.ema), "of the weights"),
    ]


def host_traffic(
    plan: Plan, state, *, schedule: Schedule = Schedule(), accumulate: int = 1, no_sync: bool = False
) -> tuple[float, float]:
    """Bytes that one device gets from its host's memory and gives to it, per optimizer step. See `offload.py`."""
    policy, trained = plan.offload, [leaf for leaf in plan.leaves if leaf.trainable]
    got = given = 0.0
    if policy.params:
        for unit, leaves in _units(plan).items():
            whole = leaves[0].placement.whole_at_rest
            passes = 2 if whole else _Unit(unit, leaves, plan, schedule, accumulate, no_sync).passes()[0]
            got += accumulate * (passes if leaves[0].layers else 1) * _stored(leaves)
        if any(map(_is_gathered_after, trained)):
            got, given = got + _shards(trained), given + _stored(trained)
        if state.ema is not None:
            got, given = got + _stored(trained) + host_bytes(state.ema), given + host_bytes(state.ema)
    if policy.gradients:
        given += _shards(trained)
    if policy.step_on == "device":
        back = host_bytes(state.opt_state) + (_shards(trained) if policy.params else 0)
        got, given = got + back + (_shards(trained) if policy.gradients else 0), given + back
    return got, given


_HELD = {False: ", and those of earlier micro-batches", True: ", and whole ones of earlier micro-batches"}


def _shards(leaves: list[ParamLayout]) -> int:
    """Bytes of one device's pieces, in the stored dtype."""
    return sum(math.prod(leaf.stack(leaf.shard_shape)) * leaf.dtype.itemsize for leaf in leaves)


def _stored(leaves: list[ParamLayout]) -> int:
    """Bytes that one device stores between steps."""
    return sum(leaf.size * leaf.dtype.itemsize if leaf.placement.whole_at_rest else _shards([leaf]) for leaf in leaves)


def _logits(leaf: ParamLayout, plan: Plan, tokens: int) -> int:
    """Logits of one slice of the head, or all of them, and their gradient. See Note [Streamed head] in `vocab.py`."""
    if "head" not in _uses(leaf, plan):
        return 0
    rows = leaf.shape[0]
    rows = min(rows, SLICE_ROWS) if tokens * rows * 4 > STREAM_ABOVE else rows
    return tokens * rows * (4 + leaf.param_dtype.itemsize)


def _whole_gradient(leaf: ParamLayout, plan: Plan, tokens: int) -> int:
    """The gradient of a vocabulary's table that a step gathers whole, and its cast for the wire; 0 of another one."""
    uses, rows = _uses(leaf, plan), leaf.shape[0]
    is_whole = "head" in uses and tokens * rows * 4 <= STREAM_ABOVE or "embed" in uses and tokens >= rows
    if not is_whole or not leaf.trainable or leaf.dim is None or leaf.placement.shards == 1:
        return 0
    wire = leaf.reduce_dtype.itemsize if leaf.reduce_dtype != leaf.param_dtype else 0
    return leaf.size * (leaf.param_dtype.itemsize + wire)


def _fetched(plan: Plan, state, trained: list[ParamLayout]) -> float:
    """What an update on the device has there of what lies on the host: arrays of one parameter, and one of the next."""
    arrays = 0.0
    if plan.offload.opt_state and plan.offload.step_on == "device":
        arrays += host_bytes(state.opt_state) / _shards(trained)
    if plan.offload.params and state.ema is not None:
        arrays += 2  # the average, and the weight that it follows
    return (arrays + 1) * max(_shards([leaf]) for leaf in trained) if arrays else 0


def _held(trained: list[ParamLayout], no_sync: bool) -> int:
    """Gradients of earlier micro-batches that do not become the result where they are; see `Reducer`."""

    def one(leaf: ParamLayout) -> int:
        if no_sync and not leaf.never_whole:
            return leaf.size
        return math.prod(leaf.stack(leaf.shard_shape)) if leaf.placement.replica_axes else 0

    return sum(one(leaf) * leaf.dtype.itemsize for leaf in trained)


def unit_bytes(plan: Plan) -> int:
    """Bytes of one gathered layer of the largest stack; 0 without a stack."""
    return max((_layer_bytes(leaves, "param_dtype") for leaves in _stacks(plan)), default=0)


class _Window(NamedTuple):
    """Whole units: gathered ones, and gradients on their way."""

    weights: float
    gradients: float
    """One that was computed, and with a late reduction one that waits."""
    staged: float
    words: str

    @property
    def bytes(self) -> float:
        return self.weights + self.gradients + self.staged


def _window(plan: Plan, schedule: Schedule) -> _Window:
    stacks = _stacks(plan)
    if not stacks:
        return _Window(0, 0, 0, "no stack of layers")
    most = max(stacks, key=lambda leaves: _layer_bytes(leaves, "param_dtype"))
    placement, size = most[0].placement, _layer_bytes(most, "param_dtype")
    if placement.whole_at_rest:
        gathered, words = size, f"a layer's weights, cast, {_mib(size)}"
    elif placement.reshard_after_forward:
        alive = min(schedule.prefetch + 1, most[0].layers)
        gathered, words = alive * size, f"{alive} layers of {_mib(size)}"
    else:
        gathered = sum(leaves[0].layers * _layer_bytes(leaves, "param_dtype") for leaves in stacks)
        words = "every layer, from forward to backward"
    trained = [leaf for leaf in most if leaf.trainable]
    gradient, waits = float(_layer_bytes(trained, "param_dtype")), schedule.late_reduce and placement.shards > 1
    staged = _STAGED * _layer_bytes(trained, "reduce_dtype") if waits else 0.0
    words += ", gradients of one and of one that waits" if waits else ", gradients of one"
    return _Window(gathered, gradient * (1 + waits), staged, words)


_STAGED = 0.4
"""See Note [Bytes kept]."""


def device_bytes(tree) -> int:
    """Bytes of a pytree of arrays (or abstract ones with shardings) in the memory of one device."""
    return sum(_one_device(a) for a in jax.tree.leaves(tree) if a.sharding.memory_kind != HOST)


def host_bytes(tree) -> int:
    """Bytes of a pytree of arrays that one device keeps in the memory of its host."""
    return sum(_one_device(a) for a in jax.tree.leaves(tree) if a.sharding.memory_kind == HOST)


def _one_device(a) -> int:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return 0
    return math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize


class _Unit:
    """The moves of one unit."""

    def __init__(
        self, name: str, leaves: list[ParamLayout], plan: Plan, schedule: Schedule, accumulate: int, no_sync: bool
    ):
        self.name, self.leaves, self.schedule, self.micro = name or "root", leaves, schedule, accumulate
        self.placement = leaves[0].placement
        self.cut = [leaf for leaf in leaves if leaf.dim is not None]
        self.whole = [leaf for leaf in leaves if leaf.dim is None]
        self.layers = leaves[0].layers
        self.is_root = not name
        self.trained = [leaf for leaf in leaves if leaf.trainable]
        self.reductions = 1 if no_sync and not leaves[0].never_whole else accumulate

    def plain(self) -> Iterator[Move] | list[Move]:
        return [*self._gathers(), *self._again(), *self._reductions(), *self._after_reduction()]

    def kept_for_window(self, uses: int) -> list[Move]:
        """Gathered once for all micro-batches; each use of a vocabulary's table is reduced by itself."""
        reductions = [move for _ in range(uses) for move in self._reductions()]
        self.micro = 1
        return [*self._gathers(1, "once, kept for all micro-batches"), *reductions, *self._after_reduction()]

    def vocabulary(self, uses: tuple[str, ...], tokens: int) -> list[Move]:
        """A table used by row exchange, by a streamed head, or by both; see the notes in vocab.py."""
        (table,) = self.leaves
        rows, width = table.shape
        n, item = self.placement.shards, table.param_dtype.itemsize
        moves, reduced = [], 0
        if "embed" in uses:
            if tokens < rows and not self.placement.whole_at_rest:
                ids, rows_moved = 4 * (n - 1) * tokens, tokens * table.padded * item * (n - 1) / n
                times = self.micro * (2 if table.trainable else 1)
                why = "rows there, gradients back" if table.trainable else "rows there"
                moves.append(self._move("all-gather", "int32", self.micro, self.micro * ids, "token ids of the group"))
                moves.append(self._move("all-to-all", table.param_dtype.name, times, times * rows_moved, why))
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
            moves += self._reductions()
        return moves + self._after_reduction()

    def _gathers(self, passes: float | None = None, why: str = "") -> list[Move]:
        if self.placement.whole_at_rest or not self.cut:
            return []
        if passes is None:
            passes, why = self.passes()
        out = []
        wires = [(*_gather_wire(leaf), leaf.layers or 1) for leaf in self.cut]
        for dtype in sorted({name for name, _, _ in wires}):
            size = sum(bytes_ * layers for name, bytes_, layers in wires if name == dtype)
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

    def passes(self) -> tuple[float, str]:
        if not self.placement.reshard_after_forward:
            return 1, "forward; kept into backward"
        if self.placement.regather:
            return 1, "forward; gathered again inside small groups"
        if self.layers is None:
            return (1, "root, kept into backward") if self.is_root else (2, "forward and backward")
        unused = min(self.schedule.prefetch, self.layers)
        return (
            2 * self.layers - 1 + unused
        ) / self.layers, f"forward and backward, last layer kept, {unused} gathered and not read"

    def _again(self) -> list[Move]:
        """The second gather where it runs inside groups of `regather` neighbours."""
        group = self.placement.regather
        if not group or self.is_root or not self.cut:
            return []
        size = sum(_bytes(leaf, leaf.param_dtype) * (leaf.layers or 1) for leaf in self.cut)
        dtype = self.cut[0].param_dtype.name
        return [self._move("all-gather", dtype, self.micro, self.micro * _ring(size, group), f"groups of {group}")]

    def _reductions(self) -> list[Move]:
        axes = self.placement.shard_axes
        out = []
        cut, whole = ([leaf for leaf in kind if leaf.trainable] for kind in (self.cut, self.whole))
        for kind, which, times in (("reduce-scatter", cut, 1), ("all-reduce", whole, 2)):
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
        if self.placement.replica_axes and self.trained:
            size = sum(math.prod(leaf.stack(leaf.shard_shape)) * leaf.reduce_dtype.itemsize for leaf in self.trained)
            received = 2 * _ring(size, self.placement.replicas)
            dtype = self.trained[0].reduce_dtype.name
            out.append(
                self._move("all-reduce", dtype, 1, received, "shards over replicas", self.placement.replica_axes)
            )
        trained = [leaf for leaf in self.cut if leaf.trainable]
        if self.placement.whole_at_rest and self.placement.shard_axes and trained:
            size = sum(_bytes(leaf, leaf.dtype) * (leaf.layers or 1) for leaf in trained)
            out.append(
                self._move(
                    "all-gather", trained[0].dtype.name, 1, _ring(size, self.placement.shards), "updated parameters"
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


def _stacks(plan: Plan) -> list[list[ParamLayout]]:
    return [leaves for leaves in _units(plan).values() if leaves[0].layers]


def _layer_bytes(leaves: list[ParamLayout], dtype: str) -> int:
    """Bytes of one layer of a unit in the dtype that its leaves name so."""
    return sum(_bytes(leaf, getattr(leaf, dtype)) for leaf in leaves)


def _frees(plan: Plan) -> bool:
    """Whether stacks free gathered weights after the forward pass, or gather none."""
    return all(
        leaves[0].placement.reshard_after_forward or leaves[0].placement.whole_at_rest for leaves in _stacks(plan)
    )


def _is_gathered_after(leaf: ParamLayout) -> bool:
    """Whether updated shards become whole parameters at the end of a step (SHARD_OPT)."""
    return leaf.placement.whole_at_rest and bool(leaf.placement.shard_axes) and leaf.placement.shards > 1


def _uses(leaf: ParamLayout, plan: Plan) -> tuple[str, ...]:
    return plan.units[leaf.unit].uses if leaf.unit in plan.units else ()


def _table_copy(leaf: ParamLayout, plan: Plan) -> int:
    """An embedding that is cut on its width is copied once, transposed, to look rows up."""
    is_whole = leaf.dim is None or leaf.placement.whole_at_rest or leaf.placement.shards == 1
    if is_whole or "embed" not in _uses(leaf, plan):
        return 0
    return math.prod(leaf.shard_shape) * leaf.dtype.itemsize


def _summed(leaf: ParamLayout, plan: Plan) -> int:
    """What adding both gradients of a whole tied table takes, after the backward pass: the embedding's, and the sum."""
    if len(_uses(leaf, plan)) < 2 or leaf.dim is not None:
        return 0
    return leaf.size * (leaf.param_dtype.itemsize + leaf.dtype.itemsize)


def _gather_wire(leaf: ParamLayout) -> tuple[str, int]:
    """Dtype and bytes of one layer of a parameter on the gather's wire."""
    if leaf.gather_dtype is None:
        return leaf.param_dtype.name, _bytes(leaf, leaf.param_dtype)
    return "uint8", leaf.placement.shards * quantise.wire_bytes(math.prod(leaf.shard_shape))


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _bytes(leaf: ParamLayout, dtype) -> int:
    """Bytes of one layer of a parameter, with its padding, in a dtype."""
    return math.prod(leaf.padded_shape) * jnp.dtype(dtype).itemsize


def _ring(size: float, devices: int) -> float:
    return size * (devices - 1) / devices
