"""Optimised HLO text, parsed as far as an audit needs it.

Owns the spellings: instructions, shapes, element types, loops, groups of devices. What the figures mean is
told in `program.py`. Reads what `compiled.as_text()` prints on CPU and GPU from JAX 0.10 to 0.12.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
Groups = tuple[tuple[int, ...], ...]

_WRAPPERS = ("fusion", "fusion-start", "async-start")  # a computation that runs as one operation
_MOVES = {"parameter", "bitcast", "copy", "transpose", "reshape", "tuple", "get-tuple-element"}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")


class Array(NamedTuple):
    """Dtype, by JAX's name, and shape of one array on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Instruction(NamedTuple):
    """`%name = type op(operands), attributes`."""

    name: str
    type: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    @property
    def arrays(self) -> list[Array]:
        """The arrays that it gives, those of a tuple in order."""
        bare = re.sub(r"\{[^{}]*\}", "", self.type)  # without layouts
        found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", bare)
        return [Array(dtype(name), tuple(_ints(dims)) if dims else ()) for name, dims in found]

    @property
    def kind(self) -> str | None:
        kind = self.op.removesuffix("-start")
        return kind if kind in KINDS else None

    @property
    def trips(self) -> int | None:
        """Trips of a while loop; None where they depend on data."""
        trips = self.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return trips and int(trips)

    @property
    def body(self) -> str:
        return self.attribute(r"body=%?([\w.\-]+)")

    @property
    def condition(self) -> str:
        return self.attribute(r"condition=%?([\w.\-]+)")

    @property
    def branches(self) -> list[str]:
        """The computations of a call, a conditional, or a fusion and its asynchronous relatives."""
        if self.op == "conditional":
            listed = self.attribute(r"branch_computations=\{([^}]*)\}") or " ".join(
                re.findall(r"(?:true|false)_computation=(%?[\w.\-]+)", self.rest))
            return re.findall(r"[\w.\-]+", listed)
        if self.op == "call" or self.op in _WRAPPERS:
            return [self.attribute(r"(?:to_apply|calls)=%?([\w.\-]+)")]
        return []

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.rest)
        return found and found[1]


class Module:
    """HLO by computation: `{computation: {name: instruction}}`, in the order of the text.

    That is the order of execution where `is_scheduled`.
    """

    def __init__(self, text: str):
        header, *lines = text.splitlines()
        self.name = re.match(r"HloModule ([\w.\-]+)", header)[1]
        self.is_scheduled = "is_scheduled=true" in header
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        """The instruction whose value a computation gives."""
        for line in lines:
            if line.endswith("{") and " -> " in line and line[0] != " ":
                name = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", line)[1]
                current = self.computations[name] = {}
                if line.startswith("ENTRY"):
                    self.entry = name
            elif found := _INSTRUCTION.match(line):
                current[found[1]] = Instruction(*found.groups())
                if line.lstrip().startswith("ROOT "):
                    self.roots[name] = found[1]

    def collectives_of(self, i: Instruction, computation: str) -> Iterator[tuple[Instruction, list[Array]]]:
        """The collective that an instruction is, or those that it wraps, each with what it takes."""
        if i.kind:
            home = self.computations[computation]
            yield i, [x for o in i.operands for x in home[o].arrays]
        elif i.op in _WRAPPERS:
            for inner in self.computations[i.branches[0]].values():
                yield from self.collectives_of(inner, i.branches[0])

    def is_copy(self, i: Instruction) -> bool:
        """Whether it moves bytes and computes nothing."""
        if i.op != "fusion":
            return i.op == "copy"
        ops = {inner.op for inner in self.computations[i.branches[0]].values()}
        return ops <= _MOVES and bool(ops & {"copy", "transpose"})

    def is_widening_matmul(self, i: Instruction, computation: str, *, min_flops: int) -> bool:
        """Whether bf16 matrices are multiplied into f32 ones; not so if the f32 stays inside a fusion."""
        is_kernel = i.op in ("dot", "fusion", "custom-call")
        if not is_kernel or self.matmul_flops_of(i, computation) < min_flops:
            return False
        home = self.computations[computation]
        inputs = {x.dtype for o in i.operands for x in home[o].arrays if len(x.shape) > 1}
        return inputs == {"bfloat16"} and i.arrays[0].dtype == "float32"

    @functools.cache  # noqa: B019 - a module lives as long as one reading of it
    def matmul_flops(self, computation: str) -> int:
        """Of one execution, inner loops included; those of unknown length count once."""
        return sum(self.matmul_flops_of(i, computation) for i in self.computations[computation].values())

    def matmul_flops_of(self, i: Instruction, computation: str) -> int:
        if i.op == "while":
            return (i.trips or 1) * self.matmul_flops(i.body)
        if i.branches:
            return max(map(self.matmul_flops, i.branches))
        if i.op != "dot" and "__cublas" not in i.rest:
            return 0
        # `lhs_contracting_dims={1}` of a dot, `"lhs_contracting_dimensions":["1"]` of a cuBLAS call.
        dims = re.findall(r"\d+", i.attribute(r'lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)') or "")
        left = self.computations[computation][i.operands[0]].arrays[0].shape
        return 2 * math.prod(i.arrays[0].shape) * math.prod(left[int(d)] for d in dims)


def dtype(name: str) -> str:
    """JAX's name of an HLO or MLIR element type: `bf16 -> bfloat16`, `f8E4M3FN -> float8_e4m3fn`."""
    special = {"pred": "bool", "i1": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
    parts = re.fullmatch(r"(ui|[suif])(\d+)(\w*)", name.lower())
    if name in special or parts is None:
        return special.get(name, name)
    word = {"s": "int", "i": "int", "f": "float"}.get(parts[1], "uint")
    return word + parts[2] + (f"_{parts[3]}" if parts[3] else "")


def device_groups(attributes: str, devices: int) -> Groups:
    """Which devices a collective joins, as positions in `mesh.devices.flat`, from any spelling of it.

    A collective-permute gives its (source, target) pairs.
    Raises: ValueError for a spelling that is not known.
    """
    if m := re.search(r"source_target_pairs=\{(.*?\})\}", attributes):
        return tuple(tuple(_ints(pair)) for pair in re.findall(r"\{([\d, ]+)\}", m[1]))
    if m := re.search(r"replica_groups=\{(\{[\d,{} ]*\})?\}", attributes):
        return ordered(map(_ints, re.findall(r"\{([\d, ]+)\}", m[1] or "")) if m[1] else [range(devices)])
    if m := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\]\S*)", attributes):
        return ordered(_iota(m[2]).reshape(_ints(m[1])))
    if m := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*?)\}", attributes):
        return ordered(_named_groups(*m.groups()))
    raise ValueError(
        f"cannot read the groups of devices in {attributes[:200]!r}: jfsdp.audit.hlo does not know this spelling. "
        "Please report it with the versions of jax and jaxlib."
    )


def ordered(groups: Any) -> Groups:
    """Groups in one canonical order, so that equal ones compare equal."""
    return tuple(sorted(tuple(sorted(int(i) for i in g)) for g in groups))


def _named_groups(axes: str, device_ids: str | None, used: str) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`: `a`, and of `b` the inner factor of 2."""
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = {axis: (int(outer or 1), int(size or sizes[axis]))
             for axis, outer, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)}
    # Every axis becomes three dims: outside the part that is grouped, that part, inside of it.
    split = []
    for axis, n in sizes.items():
        outer, size = parts.get(axis, (n, 1))
        split += [outer, size, n // (outer * size)]
    ids = np.arange(math.prod(sizes.values())) if device_ids is None else _iota(device_ids)
    ids = np.moveaxis(ids.reshape(split), range(1, len(split), 3), range(-len(sizes), 0))
    return ids.reshape(-1, math.prod(split[1::3]))


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0, 1, 2, ... in that shape, transposed; or the ids themselves, `0,4,1,5`."""
    m = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if m is None:
        return np.array(_ints(text))
    ids = np.arange(math.prod(_ints(m[1]))).reshape(_ints(m[1]))
    return ids.transpose(_ints(m[2])) if m[2] else ids


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
