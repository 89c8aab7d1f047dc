"""What a step really moves and keeps, read from its program.

Two texts are read: StableHLO, what JAX asked for (the dtype on the wire is decided there), and the optimised
HLO of the compiled program, what runs: how often, over which devices, hidden behind which matmuls. It may be
compiled for CPU devices, for GPUs, or for described GPUs that are not there (`gpu.py`, which also reads the
scheduler's estimates). `plan.py` predicts the same figures by formula; nothing here predicts or compiles.

Note [Counting]
    A collective counts once per execution: a start/done pair is one, one in a loop body counts once per trip,
    and a combined one that moves seven arrays is still one (`operands` has the seven). Where the trips of a
    loop depend on data, `runs` is None and sums over what it holds raise instead of guessing. Every branch
    of a conditional counts as if taken (`is_conditional` marks it). Bytes are those that one device receives
    when a ring carries the collective out: (n-1)/n of the payload among n devices, twice that to all-reduce.
    A collective of each device alone (over an axis of size 1) is none and is left out.

Note [What the CPU backend hides]
    It widens bf16 collectives to f32 (and fp8 to f16), so wire dtypes need `lowered_collectives` or a GPU
    program; it blocks in every collective, so `is_sync` is always true; and it combines none. Kinds, groups,
    trips and numbers of elements are those of the program; `psum_scatter` stays a reduce-scatter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jfsdp.audit import hlo
from jfsdp.audit.hlo import KINDS, Array

_LARGE_MATMUL = 10**9  # flops: a microsecond on an H100

UNNAMED = ("?",)
"""Axes of a collective whose groups are those of no set of mesh axes (a partitioner may make such)."""


def read(compiled: Any, mesh: Any) -> Program:
    """Read a compiled step, or its text; `mesh` (a `Mesh` or `AbstractMesh`) names the groups of devices."""
    module = hlo.Module(compiled if isinstance(compiled, str) else compiled.as_text())
    mesh_shape, visits = dict(mesh.shape), list(_visits(module))
    runs: dict[str, int | None] = {}
    for v in visits:  # a computation called from several places runs as often as all of them together
        runs[v.computation] = _combine(int.__add__, runs.get(v.computation, 0), v.runs)
    return Program(
        name=module.name, mesh_shape=mesh_shape, is_scheduled=module.is_scheduled, runs=runs,
        collectives=[c for v in visits for c in _collectives(module, v, mesh_shape) if c.axes],
        loops=[Loop(v.computation, v.trips, v.runs, v.depth, module.matmul_flops(v.computation))
               for v in visits if v.is_body],
        loop_copies=[c for v in visits if v.depth for c in _copies(module, v)],
        matmul_flops=module.matmul_flops(module.entry),
        widening_matmuls=[(c, i.name) for c in runs for i in module.computations[c].values()
                          if module.is_widening_matmul(i, c, min_flops=_LARGE_MATMUL)])


def lowered_collectives(lowered: Any, mesh: Any) -> list[Collective]:
    """The collectives that a lowered step asks for, once per place in the program, dtypes as on the wire.

    StableHLO is not scheduled and does not say how often its loops run, so `runs` is None.
    """
    found, mesh_shape = [], dict(mesh.shape)
    for function, op in _operations(lowered.compiler_ir().operation, "main"):
        kind = op.name.removeprefix("stablehlo.").replace("_", "-")
        if kind in KINDS:
            groups = _lowered_groups(op, mesh_shape)
            types = [x.type for x in op.operands]
            found.append(Collective(
                kind=kind, axes=axes_of(kind, groups, mesh_shape), groups=groups,
                operands=tuple(Array(hlo.dtype(str(t.element_type)), tuple(t.shape)) for t in types),
                computation=function, runs=None))
    return [c for c in found if c.axes]


def memory(compiled: Any) -> Memory:
    """Bytes that the step needs on each device, as the compiler laid them out."""
    m = compiled.memory_analysis()
    return Memory(argument=m.argument_size_in_bytes, output=m.output_size_in_bytes,
                  alias=m.alias_size_in_bytes, temp=m.temp_size_in_bytes)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the program; sizes are those of one execution."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes that it runs over, in the mesh's order, those of size 1 left out; see `UNNAMED`."""
    groups: hlo.Groups
    """Positions in `mesh.devices.flat`; for a collective-permute its (source, target) pairs."""
    operands: tuple[Array, ...]
    """What each device puts in."""
    computation: str
    runs: int | None
    """Executions per step; None where the program does not say."""
    is_conditional: bool = False
    is_sync: bool = True
    """Whether the device waits for it at once, so that nothing can hide it."""
    matmul_flops: int = 0
    """Work scheduled between its start and its done, on one device; 0 when it blocks."""
    op_name: str = ""
    """Where JAX made it: `jit(step)/.../while/body/all_gather`."""

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    @property
    def dtype(self) -> str:
        """The dtype of its operands, `"mixed"` if they differ."""
        dtypes = {x.dtype for x in self.operands}
        return dtypes.pop() if len(dtypes) == 1 else "mixed"

    def payload_bytes(self, dtype: Any = None) -> int:
        """Bytes of the whole arrays: what an all-gather gives back, what the other kinds take in."""
        pieces = self.group_size if self.kind == "all-gather" else 1
        wanted = None if dtype is None else jnp.dtype(dtype).name
        return pieces * sum(x.bytes for x in self.operands if wanted in (None, x.dtype))

    def received_bytes(self, dtype: Any = None) -> int:
        """Bytes that one device receives; see Note [Counting]."""
        payload, n = self.payload_bytes(dtype), self.group_size
        if self.kind == "collective-permute":
            return payload
        return payload * (n - 1) * (2 if self.kind == "all-reduce" else 1) // n


class Loop(NamedTuple):
    """A while loop: trips of one execution, how often its body runs in a step, matmul flops of one trip."""

    body: str
    trips: int | None
    runs: int | None
    depth: int
    matmul_flops: int


class Copy(NamedTuple):
    """A copy inside a loop body, and the bytes that it writes each time."""

    name: str
    computation: str
    bytes: int
    runs: int | None
    type: str


class Memory(NamedTuple):
    """Bytes per device. `alias`: outputs that live in the memory of a donated argument."""

    argument: int
    output: int
    alias: int
    temp: int

    @property
    def needed(self) -> int:
        return self.argument + self.output - self.alias + self.temp


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step, read."""

    name: str
    mesh_shape: Mapping[str, int]
    is_scheduled: bool
    """Whether the text is in the order of execution, which `Collective.matmul_flops` relies on."""
    runs: Mapping[str, int | None]
    """How often each computation (entry, loop bodies and conditions, branches) runs in a step."""
    collectives: Sequence[Collective]
    loops: Sequence[Loop]
    loop_copies: Sequence[Copy]
    matmul_flops: int
    """Of one device and step; loops of unknown length count once."""
    widening_matmuls: Sequence[tuple[str, str]]
    """(computation, name) of large bf16 x bf16 -> f32 matmuls, which XLA's GPU cost model prices wrong."""

    def select(self, kind: str | None = None, axes: str | Sequence[str] | None = None, *,
               dtype: Any = None, min_bytes: int = 0) -> list[Collective]:
        """The collectives of a kind, over exactly these axes, moving this dtype, of at least this payload."""
        if kind is not None and kind not in KINDS:
            raise ValueError(f"unknown kind of collective {kind!r}. Known are {', '.join(KINDS)}.")
        wanted = None if axes is None else self._axes((axes,) if isinstance(axes, str) else tuple(axes))
        return [c for c in self.collectives if kind in (None, c.kind) and wanted in (None, c.axes)
                and (dtype is None or c.payload_bytes(dtype)) and c.payload_bytes() >= min_bytes]

    def count(self, kind: str | None = None, axes: str | Sequence[str] | None = None, **which: Any) -> int:
        """Executions per step of what `select` gives for the same arguments."""
        return sum(_known(c) for c in self.select(kind, axes, **which))

    def received_bytes(self, kind: str | None = None, axes: str | Sequence[str] | None = None, *,
                       dtype: Any = None, min_bytes: int = 0) -> int:
        """Bytes that one device receives per step in what `select` gives, in arrays of `dtype` if given."""
        chosen = self.select(kind, axes, dtype=dtype, min_bytes=min_bytes)
        return sum(_known(c) * c.received_bytes(dtype) for c in chosen)

    def copies(self, min_bytes: int) -> list[Copy]:
        """Copies in loop bodies that write at least `min_bytes`: carried weights moved instead of renamed."""
        return [c for c in self.loop_copies if c.bytes >= min_bytes]

    def _axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        if axes == UNNAMED:
            return axes
        if unknown := set(axes) - set(self.mesh_shape):
            raise ValueError(f"the mesh has no axis {sorted(unknown)}. Its axes are {list(self.mesh_shape)}.")
        return tuple(axis for axis, n in self.mesh_shape.items() if n > 1 and axis in axes)


def _known(c: Collective) -> int:
    if c.runs is None:
        raise ValueError(
            f"{c.kind} over {c.axes} in {c.computation!r} runs as often as data say (a while loop without a "
            "fixed number of trips), so it cannot be summed. Select around it, or read `Collective.runs`."
        )
    return c.runs


class _Visit(NamedTuple):
    """One way in which a step gets to a computation."""

    computation: str
    runs: int | None
    depth: int
    is_conditional: bool
    is_body: bool = False
    trips: int | None = None


def _visits(module: hlo.Module) -> Iterator[_Visit]:
    """The computations that a step runs, callers first. Fusions are not visited: they are one instruction."""
    todo = [_Visit(module.entry, 1, 0, False)]
    while todo:
        v = todo.pop(0)
        yield v
        for i in module.computations[v.computation].values():
            if i.op == "while":
                inside = _combine(int.__mul__, v.runs, i.trips)
                tests = _combine(int.__add__, inside, v.runs)  # one more than trips, each time
                todo.append(_Visit(i.body, inside, v.depth + 1, v.is_conditional, True, i.trips))
                todo.append(_Visit(i.condition, tests, v.depth + 1, v.is_conditional))
            elif i.op in ("call", "conditional"):
                maybe = v.is_conditional or i.op == "conditional"
                todo += [v._replace(computation=b, is_conditional=maybe, is_body=False) for b in i.branches]


def _combine(operation: Any, a: int | None, b: int | None) -> int | None:
    return None if None in (a, b) else operation(a, b)


def _collectives(module: hlo.Module, v: _Visit, mesh_shape: dict[str, int]) -> Iterator[Collective]:
    order = list(module.computations[v.computation].values())
    ends = {i.operands[0]: at for at, i in enumerate(order) if i.op.endswith("-done") and i.operands}
    for at, i in enumerate(order):
        for inner, operands in module.collectives_of(i, v.computation):
            is_sync = not i.op.endswith("-start") or '"is_sync":true' in i.rest + inner.rest
            between = [] if is_sync else order[at + 1:ends.get(i.name, at)]
            groups = hlo.device_groups(inner.rest, math.prod(mesh_shape.values()))
            yield Collective(
                kind=inner.kind, axes=axes_of(inner.kind, groups, mesh_shape), groups=groups,
                operands=tuple(operands), computation=v.computation, runs=v.runs,
                is_conditional=v.is_conditional, is_sync=is_sync,
                matmul_flops=sum(module.matmul_flops_of(j, v.computation) for j in between),
                op_name=inner.attribute(r'op_name="([^"]*)"') or "")


def _copies(module: hlo.Module, v: _Visit) -> Iterator[Copy]:
    for i in module.computations[v.computation].values():
        if module.is_copy(i):
            yield Copy(i.name, v.computation, sum(x.bytes for x in i.arrays), v.runs, i.type)


def axes_of(kind: str, groups: hlo.Groups, mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ, if the groups are the whole of those axes."""
    places = np.array(list(np.ndindex(*mesh_shape.values())))
    moves = [any(np.ptp(places[list(g), dim]) for g in groups) for dim in range(len(mesh_shape))]
    if kind != "collective-permute" and groups != _axis_groups(tuple(mesh_shape.values()), tuple(moves)):
        return UNNAMED
    return tuple(axis for axis, moved in zip(mesh_shape, moves, strict=True) if moved)


@functools.cache
def _axis_groups(sizes: tuple[int, ...], is_grouped: tuple[bool, ...]) -> hlo.Groups:
    dims = [dim for dim, grouped in enumerate(is_grouped) if grouped]
    ids = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), dims, range(-len(dims), 0))
    return hlo.ordered(ids.reshape(-1, math.prod(sizes[dim] for dim in dims)))


def _operations(op: Any, function: str) -> Iterator[tuple[str, Any]]:
    """Every operation below `op`, with the name of the function that holds it."""
    for inner in (o.operation for region in op.regions for block in region for o in block.operations):
        here = inner.attributes["sym_name"].value if inner.name == "func.func" else function
        yield here, inner
        yield from _operations(inner, here)


def _lowered_groups(op: Any, mesh_shape: dict[str, int]) -> hlo.Groups:
    if op.name.endswith("collective_permute"):
        return tuple(map(tuple, np.array(op.attributes["source_target_pairs"]).tolist()))
    groups = op.attributes["replica_groups"]
    if "mesh_axes" not in str(groups):
        return hlo.ordered(np.array(groups).tolist())
    # JAX 0.12 names the axes of the `shard_map` that asked, which are the mesh's own.
    used = [axis for axis in mesh_shape if f'axis_ref<name = "{axis}">' in str(groups)]
    return _axis_groups(tuple(mesh_shape.values()), tuple(axis in used for axis in mesh_shape))
