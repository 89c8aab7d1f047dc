"""What is alive on a device when a compiled step needs most: bytes by category, read from the program.

Owns the way from the compiler's buffers to the words of FSDP. Arguments are named by the state's own arrays. Temporary
buffers are placed in time by the schedule and named by where their values come from and go to; nothing is predicted and
nothing runs. Formulas are `plan.py`'s.

Note [Naming a buffer]
Values that are only moved (copied, sliced, carried through a loop, written into a stack) or added up keep the name of
what they hold. What comes out of an all-gather is `gathered`; what goes into or comes out of a reduce-scatter or
all-reduce is `gradients`; every other temporary buffer is `activations`, the work space of kernels among them.

Note [The moment]
Loops are laid out once, their bodies between what comes before and after, as the compiler does when it assigns memory.
A buffer lives from the first instruction that writes it to the last one that reads it, a carried one as long as its
loop. Buffers that share bytes at that moment (an update in place) count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jfsdp.audit import hlo

_ALIASES = ("bitcast", "copy-done", "optimization-barrier")
_MOVES = (
    *_ALIASES,
    "copy",
    "copy-start",
    "transpose",
    "reshape",
    "convert",
    "slice",
    "dynamic-slice",
    "pad",
    "concatenate",
    "add",
)
_FILLS = ("broadcast", "constant", "iota")
"""Where a moved value begins: buffers that were filled alike hold different things afterwards."""

_LIKELY = 64
"""Moments that are looked at closely: those with most bytes when shared ones are counted twice."""

Node = tuple[str, str, tuple[int, ...]]
"""Computation, instruction, and which of its arrays."""


class Live(NamedTuple):
    """Bytes on one device at the moment when a step needs most."""

    parameters: int
    optimizer: int
    average: int
    other_state: int
    """Counters, keys, buffers, the loss scale."""
    batch: int
    outputs: int
    """What the step gives back in memory of its own; a donated state needs none."""
    gathered: int
    gradients: int
    activations: int
    unused: int
    """Of the temporary memory: gaps between buffers, and what another moment needs."""

    @property
    def total(self) -> int:
        return sum(self)


def live_bytes(compiled: Any, state: Any) -> Live:
    """Read a compiled step, `step.lower(state, batch).compile()`; `state` may be abstract.

    Raises: NotImplementedError where the compiler does not say how it assigned its buffers: plug-ins, and so GPUs, do
        not (JAX 0.10 to 0.12).
    """
    stats = compiled.memory_analysis()
    if not stats.serialized_buffer_assignment_proto:
        raise NotImplementedError(
            "this compiler gives sums only and does not say how it assigned its buffers. Compile the same step for "
            "simulated CPU devices (make_mesh under JAX_PLATFORMS=cpu), or read `audit.memory` and `plan.memory`."
        )
    module = hlo.Module(compiled.as_text())
    names = _names(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    buffers = list(_temporary_buffers(stats.serialized_buffer_assignment_proto, names))
    sizes = _at_peak(module, buffers)
    params, optimizer, average, whole = (
        sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))
        for tree in (state.params, state.opt_state, state.ema, state)
    )
    return Live(
        parameters=params,
        optimizer=optimizer,
        average=average,
        other_state=whole - params - optimizer - average,
        batch=stats.argument_size_in_bytes - whole,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        **sizes,
        unused=stats.temp_size_in_bytes - sum(sizes.values()),
    )


class _Buffer(NamedTuple):
    """A value that the compiler gave temporary memory."""

    node: Node
    area: int
    offset: int
    size: int


class _Classes:
    """Disjoint sets of nodes."""

    def __init__(self):
        self._parent: dict[Node, Node] = {}

    def find(self, a: Node) -> Node:
        while (parent := self._parent.get(a, a)) != a:
            self._parent[a] = self._parent.get(parent, parent)
            a = parent
        return a

    def join(self, a: Node, b: Node) -> None:
        self._parent[self.find(a)] = self.find(b)


def _at_peak(module: hlo.Module, buffers: list[_Buffer]) -> dict[str, int]:
    """Bytes of each category when most are alive. See Note [The moment]."""
    same, moved = _Classes(), _Classes()
    for a, b, is_alias in _edges(module):
        moved.join(a, b)
        if is_alias:
            same.join(a, b)
    first, last = _life(module, same)
    spans = [(first.get(root, 0), last.get(root, 0)) for root in (same.find(b.node) for b in buffers)]
    names = _categories(module, moved)
    named = [(names.get(moved.find(b.node), "activations"), b) for b in buffers]

    def at(moment: int) -> dict[str, int]:
        sizes, taken = dict.fromkeys(("gathered", "gradients", "activations"), 0), {}
        alive = [pair for pair, (start, end) in zip(named, spans) if start <= moment <= end]
        for name, b in sorted(alive, key=lambda pair: (list(sizes).index(pair[0]), pair[1].offset)):
            sizes[name] += _take(taken.setdefault(b.area, []), b.offset, b.offset + b.size)
        return sizes

    def at_most(moment: int) -> int:
        return sum(b.size for b, (start, end) in zip(buffers, spans) if start <= moment <= end)

    likely = sorted({start for start, _ in spans} or {0}, key=at_most)[-_LIKELY:]
    return max(map(at, likely), key=lambda sizes: sum(sizes.values()))


def _take(taken: list[tuple[int, int]], start: int, end: int) -> int:
    """Bytes of `start..end` that nothing has taken yet; takes them."""
    free = [(start, end)]
    for a, b in taken:
        free = [(s, e) for x, y in free for s, e in ((x, min(y, a)), (max(x, b), y)) if s < e]
    taken += free
    return sum(e - s for s, e in free)


def _edges(module: hlo.Module) -> Iterator[tuple[Node, Node, bool]]:
    """Pairs of nodes that hold the same values, and whether in the same memory."""
    for home, instructions in module.computations.items():
        for i in instructions.values():
            operands = i.operands
            here: Node = (home, i.name, ())
            if i.op == "get-tuple-element":
                yield here, (home, operands[0], (int(i.attribute(r"index=(\d+)")),)), True
            elif i.op == "tuple":
                for k, operand in enumerate(operands):
                    yield (home, i.name, (k,)), (home, operand, ()), not _is_fill(module, home, operand)
            elif i.op == "while":
                roots = [
                    (i.body, module.roots[i.body]),
                    *_parameters(module, i.body),
                    *_parameters(module, i.condition),
                ]
                for k in range(len(i.arrays)):
                    for other in ((home, operands[0]), *roots):
                        yield (home, i.name, (k,)), (*other, (k,)), True
            elif i.branches and i.op != "conditional":
                for (inner, name), operand in zip(_parameters(module, i.branches[0]), operands):
                    yield (inner, name, ()), (home, operand, ()), False
                root, result = module.roots[i.branches[0]], (1,) if i.op.endswith("-start") else ()
                for index in {(), *((k,) for k in range(len(i.arrays)))} if not result else {()}:
                    yield (home, i.name, result or index), (i.branches[0], root, index), False
            elif i.op.endswith("-done"):
                yield here, (home, operands[0], (1,)), True
            elif i.op == "dynamic-update-slice":
                for operand in operands[:2]:
                    if not _is_fill(module, home, operand):
                        yield here, (home, operand, ()), False
            elif i.op in _MOVES:
                for operand in operands:
                    if not _is_fill(module, home, operand):
                        yield here, (home, operand, ()), i.op in _ALIASES


def _is_fill(module: hlo.Module, home: str, name: str) -> bool:
    i = module.computations[home].get(name)
    if i is not None and i.op == "fusion":
        return module.computations[i.branches[0]][module.roots[i.branches[0]]].op in _FILLS
    return i is None or i.op in _FILLS


def _parameters(module: hlo.Module, computation: str) -> list[tuple[str, str]]:
    """In the order of the call."""
    found = [i for i in module.computations[computation].values() if i.op == "parameter"]
    return [(computation, i.name) for i in sorted(found, key=lambda i: int(i.rest.split(")")[0]))]


def _life(module: hlo.Module, same: _Classes) -> tuple[dict[Node, int], dict[Node, int]]:
    """When each memory is first written and last used, in instructions since the start."""
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    clock = 0

    def visit(home: str) -> None:
        nonlocal clock
        for i in module.computations[home].values():
            inner = [i.condition, i.body] if i.op == "while" else i.branches if i.op in ("call", "conditional") else []
            for computation in inner:
                visit(computation)
            clock += 1
            for index in ((), *((k,) for k in range(len(i.arrays)))):
                root = same.find((home, i.name, index))
                first[root] = min(first.get(root, clock), clock)
                last[root] = max(last.get(root, clock), clock)
                for operand in i.operands:
                    root = same.find((home, operand, index))
                    last[root] = max(last.get(root, clock), clock)

    visit(module.entry)
    return first, last


def _categories(module: hlo.Module, moved: _Classes) -> dict[Node, str]:
    """The name of each set of moved values that has one. See Note [Naming a buffer]."""
    names: dict[Node, str] = {}
    for home, instructions in module.computations.items():
        for i in instructions.values():
            results = [(home, i.name, index) for index in ((), *((k,) for k in range(len(i.arrays))))]
            if i.kind in ("reduce-scatter", "all-reduce"):
                for node in (*results, *((home, operand, ()) for operand in i.operands)):
                    names.setdefault(moved.find(node), "gradients")
            elif i.kind == "all-gather":
                for node in (
                    results[2:] if i.op.endswith("-start") else results
                ):  # a start's tuple begins with its operand
                    names[moved.find(node)] = "gathered"
    return names


def _names(module: bytes) -> dict[int, tuple[str, str]]:
    """Computation and name of each instruction by its number, from an `HloModuleProto`."""
    names = {}
    for computation in (fields for number, fields in _fields(module) if number == 3):
        home = next(value.decode() for number, value in _fields(computation) if number == 1)
        for instruction in (value for number, value in _fields(computation) if number == 2):
            fields = dict(_fields(instruction))
            names[fields[35]] = (home, fields[1].decode())
    return names


def _temporary_buffers(assignment: bytes, names: dict[int, tuple[str, str]]) -> Iterator[_Buffer]:
    """From a `BufferAssignmentProto` (xla/service/hlo.proto): what is in memory of no argument, result or constant."""
    values = {}
    for value in (fields for number, fields in _fields(assignment) if number == 1):
        fields = dict(_fields(value))
        place = dict(_fields(fields.get(3, b"")))
        values[fields.get(1, 0)] = (place.get(4, 0), tuple(_numbers(place.get(3, b""))))
    for area, allocation in enumerate(fields for number, fields in _fields(assignment) if number == 3):
        fields = list(_fields(allocation))
        if {3, 5, 7, 12} & {number for number, _ in fields}:  # of a thread, a parameter, a result, a constant
            continue
        for assigned in (dict(_fields(value)) for number, value in fields if number == 9):
            number, index = values[assigned.get(1, 0)]
            if number in names:
                yield _Buffer((*names[number], index), area, assigned.get(2, 0), assigned.get(3, 0))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer: an int, or bytes for what has a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def _numbers(packed: bytes | int) -> Iterator[int]:
    """A repeated field of numbers, packed or, where there is one, plain."""
    if isinstance(packed, int):
        yield packed
        return
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
