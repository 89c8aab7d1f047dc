"""What the layers of a model save and work with, read from a trace of the model on one device's batch.

Owns the look into the program before any compiler: bytes that a layer saves for its backward pass, the most that is
alive inside one layer's backward pass, and operations per layer. Weights and their gradients are left out: these are
`plan.py`'s. Nothing is allocated and nothing is sharded; a trace takes half a second whatever the size.

Note [Fusion]
A compiler for GPUs writes an array to memory where a matmul, a loop, a sort or an indexed read makes or takes it, or
where it leaves the layer. What lies between (casts, norms, activation functions, masks, transposes) runs inside such
kernels and has no array of its own. `_walk` goes through one layer's program with that rule and adds up what is alive.

Note [Order]
A backward pass has three parts: what it computes again, which needs no gradient; the chain from the gradient of a
layer's output to that of its input; and gradients of weights, for which no later layer waits. XLA's schedules for GPUs
run them in this order, so what the gradients of weights read is alive all the while, and the parts of two layers
overlap: the next layer is computed again while this one's chain runs. Both are counted here; `plan.py` says when.

A loop that is computed again (attention by chunks) runs before that chain or after it, in compiled programs both occur.
Before, it leaves what the rest of its layer reads. After, what it takes waits, and with it what depends on nothing and
so is written when the step begins: the -1e30 of the mask, an array of the size of a chunk's scores, and the zeros in
which results of the layer's loops are collected. Where matmuls are saved the first is little and the second decides.
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
    """Most that is alive at once inside a backward pass, in the order of Note [Order]."""
    again: int
    """Of what a backward pass computes again, what is there beside another layer's: Note [Order]."""
    carried: int
    """What one layer hands to the next."""
    forward_flops: int
    backward_flops: int
    """Matmuls of the backward pass, those that are computed again included."""


def trace(
    make_model: Callable[[], nnx.Module],
    *,
    sequences: int,
    tokens: int,
    dtype: Any,
    trainable: Any = nnx.Param,
    loops_are_kernels: bool = False,
) -> list[Layers]:
    """The stacks of a language model (Note [Families]) in order, from its loss on `[sequences, tokens]`.

    trainable: an NNX filter; other parameters have no gradients.
    loops_are_kernels: a loop inside a layer keeps nothing but what it takes and gives, as a fused attention kernel.
    """
    graph, *params = nnx.split(nnx.eval_shape(make_model), trainable, ...)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), params)
    batch = batch_shapes(nnx.merge(graph, *params), (sequences, tokens))

    def loss(trained, others, batch):
        return nnx.merge(graph, trained, others).loss(**batch)[0]

    whole = _Program(jax.make_jaxpr(jax.value_and_grad(loss))(*params, batch).jaxpr)
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
    again, others = _parts(backward)
    backward.body.ops[:] = again + others
    f, b = (_walk(loop.body, loop.weights | own[loop.is_backward], loops_are_kernels) for loop in (forward, backward))
    return Layers(
        count=forward.length,
        saved=sum(body.bytes(t) for t in forward.others_out if t in reached),
        carried=sum(body.bytes(t) for t in forward.carried_out),
        forward=f.peak,
        backward=b.peak,
        again=max(_left(backward.body, again, others), 0 if loops_are_kernels else _waiting(backward.body, again)),
        forward_flops=f.flops,
        backward_flops=b.flops,
    )


def _parts(loop: _Loop) -> tuple[list[_Op], list[_Op]]:
    """A backward pass in two: what it computes again, and the chain followed by gradients of weights alone."""
    ops = loop.body.ops
    differentiated, wanted, chain = loop.body.reached_from(loop.carried_in), set(loop.carried_out), set()
    for op in reversed(ops):
        if wanted.intersection(op.outs):
            wanted.update(op.ins)
            chain.update(op.outs)
    again = [op for op in ops if not differentiated.intersection(op.outs)]
    others = [op for op in ops if differentiated.intersection(op.outs)]
    return again, sorted(others, key=lambda op: not chain.intersection(op.outs))


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


class _Lives(NamedTuple):
    """Arrays in memory: from the operation that writes one to the last that reads it, by position."""

    first: dict[int, int]
    last: dict[int, int]
    sources: dict[int, set[int]]
    """For each value the arrays that it is read from: itself, or what is computed with inside its readers."""

    @classmethod
    def of(cls, program: _Program, ops: Sequence[_Op], stored: set[int]) -> _Lives:
        """stored: values that are arrays though no kernel makes them; see Note [Fusion]."""
        sources = {v: {v} for v in program.invars}
        first, last = dict.fromkeys(program.invars, 0), dict.fromkeys(program.invars, 0)
        for i, op in enumerate(ops):
            reads = set().union(*(sources.get(v, ()) for v in op.ins))
            for v in op.outs:
                if (op.name in _KERNELS or v in stored) and not (op.name in _VIEWS and len(reads) == 1):
                    first[v] = last[v] = i
                    sources[v] = {v}
                    last.update(dict.fromkeys(reads, i))
                else:
                    sources[v] = reads
        return cls(first, last, sources)


def _read_by_kernels(ops: Sequence[_Op]) -> set[int]:
    return {v for op in ops if op.name in _KERNELS for v in op.ins}


def _left(program: _Program, ops: Sequence[_Op], others: Sequence[_Op]) -> int:
    """Bytes that operations leave in memory for others that follow, their own inputs apart."""
    sources = _Lives.of(program, ops, _read_by_kernels(ops)).sources
    arrays = set().union(*(sources.get(v, ()) for op in others for v in op.ins))
    return sum(map(program.bytes, arrays.difference(program.invars)))


def _waiting(program: _Program, ops: Sequence[_Op]) -> int:
    """Most bytes that are alive just before a loop among operations, the program's own inputs apart, and the zeros of
    all its loops."""
    first, last, _ = _Lives.of(program, program.ops, _read_by_kernels(program.ops))
    made = first.keys() - set(program.invars)
    loops = [i for i, op in enumerate(ops) if op.name == "scan"]
    alive = [sum(program.bytes(v) for v in made if first[v] < i <= last[v]) for i in loops]
    zeros = sum(program.bytes(v) for op in program.ops if op.name == "scan" for v in op.outs)
    return max(alive) + zeros if alive else 0


def _walk(program: _Program, free: set[int] = frozenset(), loops_are_kernels: bool = False) -> _Peak:
    """Most bytes that are alive in a program and the operations of its matmuls; values in `free` take no room."""
    inside, flops = [0] * (len(program.ops) + 1), 0
    for i, op in enumerate(program.ops):
        if op.name == "scan":
            inner = _walk(_Program(op.params["jaxpr"].jaxpr))
            flops += op.params["length"] * inner.flops
            inside[i] = 0 if loops_are_kernels else inner.peak
        elif op.name == "dot_general":
            flops += _dot_flops(program, op)
    first, last, sources = _Lives.of(program, program.ops, _read_by_kernels(program.ops).union(program.outvars))
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
