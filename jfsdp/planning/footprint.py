"""What the layers of a model save and work with, read from a trace of the model on one device's batch.

Owns the look into the program before any compiler: bytes that a layer saves for its backward pass, the most that is
alive inside one layer's backward pass, and operations per layer. Weights and their gradients are left out: these are
`plan.py`'s. Nothing is allocated and nothing is sharded; a trace takes half a second whatever the size.

Note [Fusion]
A compiler for GPUs writes an array to memory where a matmul, a loop, a sort or an indexed read makes or takes it, or
where it leaves the layer. What lies between (casts, norms, activation functions, masks, transposes) runs inside such
kernels and has no array of its own. `_walk` goes through one layer's program with that rule and adds up what is alive.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

_LOOPS = ("scan", "while", "cond")
_KERNELS = ("dot_general", "scan", "while", "cond", "sort", "gather", "scatter", "scatter-add", "conv_general_dilated")
_VIEWS = ("reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "pvary", "pcast", "copy")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """One stack of equal layers. Bytes and operations are those of one layer on one device and micro-batch."""

    count: int
    saved: int
    """Kept from the forward pass to the backward pass."""
    forward: int
    """Most that is alive at once inside a forward pass, weights left out."""
    backward: int
    """Most that is alive at once inside a backward pass, what it computes again included."""
    carried: int
    """What one layer hands to the next."""
    forward_flops: int
    backward_flops: int
    """Matmuls of the backward pass, those that are computed again included."""


def trace(
    make_model: Callable[[], nnx.Module], *, sequences: int, tokens: int, dtype: Any, loops_are_kernels: bool = False
) -> list[Layers]:
    """The stacks of a language model (Note [Families]) in order, from its loss on `[sequences, tokens]`.

    loops_are_kernels: a loop inside a layer keeps nothing but what it takes and gives, as a fused attention kernel.
    """
    graph, params = nnx.split(nnx.eval_shape(make_model))
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), params)
    batch = batch_shapes(nnx.merge(graph, params), (sequences, tokens))

    def loss(params, batch):
        return nnx.merge(graph, params).loss(**batch)[0]

    whole = _Program(jax.make_jaxpr(jax.value_and_grad(loss))(params, batch).jaxpr)
    counts = {a.shape[0] for a in jax.tree.leaves(params) if len(a.shape) > 1}
    data = whole.reached_from(whole.invars[-len(batch) :])
    loops = [_Loop.of(op, whole, data) for op in whole.ops if op.name == "scan" and op.params["length"] in counts]
    loops = [loop for loop in loops if loop.weights and any(op.name == "dot_general" for op in loop.body.ops)]
    forward = [loop for loop in loops if not loop.is_backward]
    backward = [loop for loop in loops if loop.is_backward]
    return [_layers(f, b, loops_are_kernels) for f, b in zip(forward, reversed(backward))]


def batch_shapes(model: nnx.Module, rows: tuple[int, int], sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """What a model's `loss` takes, by name: token ids and the like, and `weights`."""
    known = inspect.signature(model.loss).parameters.values()
    names = [p.name for p in known if p.default is p.empty or p.name in ("segments", "positions")]
    dtypes = {name: jnp.float32 if name == "weights" else jnp.int32 for name in names}
    return {name: jax.ShapeDtypeStruct(rows, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def _layers(forward: _Loop, backward: _Loop, loops_are_kernels: bool) -> Layers:
    """A stack from the loop that runs it and the loop that differentiates it."""
    body = forward.body
    reached = body.reached_from(forward.carried_in)
    own = {False: set(), True: backward.others_out}  # gradients of weights are counted elsewhere
    f, b = (_walk(loop.body, loop.weights | own[loop.is_backward], loops_are_kernels) for loop in (forward, backward))
    return Layers(
        count=forward.length,
        saved=sum(body.bytes(t) for t in forward.others_out if t in reached),
        carried=sum(body.bytes(t) for t in forward.carried_out),
        forward=f.peak,
        backward=b.peak,
        forward_flops=f.flops,
        backward_flops=b.flops,
    )


class _Op(NamedTuple):
    """One equation; values are numbers, equal ones have one number."""

    name: str
    params: dict
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class _Program:
    """A jaxpr with calls written out and equal computations joined, as a compiler would."""

    def __init__(self, jaxpr: Any):
        self.avals: list[Any] = []
        self.ops: list[_Op] = []
        self._known: dict[Any, tuple[int, ...]] = {}
        env = {v: self._new(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars)}
        self.invars = [env[v] for v in jaxpr.invars]
        self.outvars = self._run(jaxpr, env)

    def bytes(self, value: int) -> int:
        aval = self.avals[value]
        return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0

    def reached_from(self, values: Sequence[int]) -> set[int]:
        """Everything that depends on one of these."""
        known = set(values)
        for op in self.ops:
            if known.intersection(op.ins):
                known.update(op.outs)
        return known

    def _run(self, jaxpr: Any, env: dict) -> list[int]:
        for e in jaxpr.eqns:
            ins = tuple(self._read(v, env) for v in e.invars)
            inner = next((e.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in e.params), None)
            inner = getattr(inner, "jaxpr", inner)
            if e.primitive.name not in _LOOPS and inner is not None and len(inner.invars) == len(ins):  # a call
                outs = self._run(inner, dict(zip(inner.invars, ins)))
            else:
                outs = self._apply(e, ins)
            env.update(zip(e.outvars, outs))
        return [self._read(v, env) for v in jaxpr.outvars]

    def _apply(self, e: Any, ins: tuple[int, ...]) -> tuple[int, ...]:
        key = (e.primitive.name, ins, str(e.params)) if e.primitive.name != "scan" else (id(e), ins)
        if key not in self._known:
            outs = tuple(self._new(v.aval) for v in e.outvars)
            self._known[key] = outs
            self.ops.append(_Op(e.primitive.name, e.params, ins, outs))
        return self._known[key]

    def _read(self, v: Any, env: dict) -> int:
        if isinstance(v, Literal):
            key = ("literal", str(v.val), str(v.aval))
            if key not in self._known:
                self._known[key] = (self._new(v.aval),)
            return self._known[key][0]
        if v not in env:  # a constant of an inner program
            env[v] = self._new(v.aval)
        return env[v]

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1


class _Loop(NamedTuple):
    """A scan: one iteration, and which of its values are what."""

    length: int
    is_backward: bool
    body: _Program
    carried_in: list[int]
    weights: set[int]
    carried_out: list[int]
    others_out: set[int]

    @classmethod
    def of(cls, op: _Op, whole: _Program, data: set[int]) -> _Loop:
        """data: values of the whole program that depend on the batch; the others are weights."""
        body = _Program(op.params["jaxpr"].jaxpr)
        ins, outs = body.invars, body.outvars
        # Which are carried, by shape, as the names of a scan's parameters change with JAX: what goes through a loop has
        # one shape inside and outside, what it walks over and what it collects are `[length, ...]` outside.
        carries = sum(body.avals[v].shape == whole.avals[o].shape for v, o in zip(outs, op.outs))
        walked = sum(body.avals[v].shape != whole.avals[o].shape for v, o in zip(ins, op.ins))
        consts, first = len(ins) - carries - walked, len(ins) - walked
        return cls(
            op.params["length"],
            op.params["reverse"],
            body,
            ins[consts:first],
            {v for v, given in zip(ins[first:], op.ins[first:]) if given not in data},
            outs[:carries],
            set(outs[carries:]),
        )


class _Peak(NamedTuple):
    peak: int
    flops: int


def _walk(program: _Program, free: set[int] = frozenset(), loops_are_kernels: bool = False) -> _Peak:
    """Most bytes that are alive in a program and the operations of its matmuls; values in `free` take no room."""
    wanted = set(program.outvars).union(*(op.ins for op in program.ops if op.name in _KERNELS))
    sources = {v: {v} for v in program.invars}
    first = dict.fromkeys(program.invars, 0)
    last = dict.fromkeys(program.invars, 0)
    inside, flops = [0] * (len(program.ops) + 1), 0
    for i, op in enumerate(program.ops):
        reads = set().union(*(sources.get(v, ()) for v in op.ins))
        is_kernel = op.name in _KERNELS
        if op.name == "scan":
            inner = _walk(_Program(op.params["jaxpr"].jaxpr))
            flops += op.params["length"] * inner.flops
            inside[i] = 0 if loops_are_kernels else inner.peak
        elif op.name == "dot_general":
            flops += _dot_flops(program, op)
        for v in op.outs:
            if (is_kernel or v in wanted) and not (op.name in _VIEWS and len(reads) == 1):
                first[v] = last[v] = i
                sources[v] = {v}
                last.update(dict.fromkeys(reads, i))
            else:
                sources[v] = reads
    for v in program.outvars:
        last.update(dict.fromkeys(sources.get(v, ()), len(program.ops)))
    change = [0] * (len(program.ops) + 2)
    for v in first.keys() - free:
        change[first[v]] += program.bytes(v)
        change[last[v] + 1] -= program.bytes(v)
    alive, peak = 0, 0
    for i, extra in enumerate(inside):
        alive += change[i]
        peak = max(peak, alive + extra)
    return _Peak(peak, flops)


def _dot_flops(program: _Program, op: _Op) -> int:
    (contracted, _), _ = op.params["dimension_numbers"]
    left = program.avals[op.ins[0]].shape
    return 2 * math.prod(program.avals[op.outs[0]].shape) * math.prod(left[d] for d in contracted)
