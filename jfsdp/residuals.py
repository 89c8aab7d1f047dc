"""What a unit saves for its backward pass: activations, and nothing that its weights alone decide.

`jax.vjp` saves whatever its pullback reads, and that includes gathered weights and anything computed from them
(a cast, a reshape, a transpose). A unit that frees its weights must not keep those. `Split` traces the unit
once, asks for every saved value which inputs it depends on, and sorts it:

    saved     depends on activations (or on weights and shared values together): kept for the backward pass
    rebuilt   depends on weights only, or on shared values and per-layer inputs only: dropped after forward
              and computed again in the backward pass, from the weights gathered there

What `jax.checkpoint` does inside the unit decides how many activations there are; it never adds a gather.

Note [Stacks of bits]
XLA computes 16-bit floats in fp32 on a CPU, and to write one layer into a stack `[L, ...]` counts as computing: all L
layers are turned into fp32 and back, once per layer. Integers of the same bits are written in place. A GPU converts
nothing either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import partial_eval as pe

Arrays = list[Array]


class Split:
    """A function `fn(weights, x, shared, inputs) -> outputs`, all flat lists, cut into forward and pullback.

    differentiate: for `weights`, `shared` and `inputs`, which entries get a cotangent. Every floating entry of `x`
    does.
    """

    def __init__(self, fn: Callable, weights, x, shared, inputs, differentiate: tuple[Sequence[bool], ...]):
        self._args = (len(weights), len(x), len(shared), len(inputs))
        self._wanted = [
            *differentiate[0],
            *[is_floating(a) for a in x],
            *differentiate[1],
            *differentiate[2],
        ]
        flat = [*weights, *x, *shared, *inputs]

        def vjp(*flat):
            def of_wanted(*wanted):
                wanted = iter(wanted)
                merged = [next(wanted) if w else a for w, a in zip(self._wanted, flat)]
                return fn(*self._groups(merged))

            out, pullback = jax.vjp(of_wanted, *(a for w, a in zip(self._wanted, flat) if w))
            leaves, self._pullback_tree = jax.tree.flatten(pullback)
            self._num_outputs = len(out)
            return [*out, *leaves]

        self._traced = jax.make_jaxpr(vjp)(*flat)
        self._sort()

    def forward(self, weights, x, shared, inputs) -> tuple[Arrays, Arrays]:
        """Outputs of the unit and what must be saved."""
        values = jax.core.eval_jaxpr(self._traced.jaxpr, self._traced.consts, *weights, *x, *shared, *inputs)
        return values[: self._num_outputs], [values[self._num_outputs + i] for i in self._saved]

    def pullback(self, weights, saved, shared, inputs, cotangents) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Cotangents of the floating entries of x, and of what `differentiate` asked for; in the order of `fn`."""
        # `x` is never read by what is rebuilt, so placeholders stand in for it.
        known = [*weights, *[None] * self._args[1], *shared, *inputs]
        read = (a for a, used in zip(known, self._rebuild_reads) if used)
        rebuilt = jax.core.eval_jaxpr(self._rebuild, self._traced.consts, *read)
        residuals: list[Any] = [None] * len(self._source)
        for i, (is_saved, at) in enumerate(self._source):
            residuals[i] = saved[at] if is_saved else rebuilt[at]
        out = iter(jax.tree.unflatten(self._pullback_tree, residuals)(cotangents))
        return tuple([next(out) for w in group if w] for group in self._groups(self._wanted))

    def _groups(self, flat: list) -> list[list]:
        out, at = [], 0
        for n in self._args:
            out.append(flat[at : at + n])
            at += n
        return out

    def _sort(self) -> None:
        """Decide for each residual whether it is saved or rebuilt; a value saved twice is kept once."""
        jaxpr, first = self._traced.jaxpr, self._num_outputs
        residuals = jaxpr.outvars[first:]
        self._saved, rebuilt, self._source = [], [], []
        seen: dict[int, tuple[bool, int]] = {}
        for i, var in enumerate(residuals):
            if id(var) not in seen:
                reads = self._groups(_reads(jaxpr, first + i))
                on_weights, on_x, on_others = any(reads[0]), any(reads[1]), any(reads[2]) or any(reads[3])
                is_saved = on_x or (on_weights and on_others)
                kept = self._saved if is_saved else rebuilt
                seen[id(var)] = (is_saved, len(kept))
                kept.append(i)
            self._source.append(seen[id(var)])
        wanted = [False] * len(jaxpr.outvars)
        for i in rebuilt:
            wanted[first + i] = True
        self._rebuild, self._rebuild_reads = pe.dce_jaxpr(jaxpr, wanted)


def to_bits(tree):
    """16-bit floats as integers, for what a loop is to stack. See Note [Stacks of bits]."""
    return jax.tree.map(lambda a: lax.bitcast_convert_type(a, jnp.uint16) if _is_16_bit_float(a) else a, tree)


def from_bits(tree, like):
    """The way back, for one layer; `like` has the dtypes."""
    return jax.tree.map(lambda a, b: lax.bitcast_convert_type(a, b.dtype) if _is_16_bit_float(b) else a, tree, like)


def _is_16_bit_float(a) -> bool:
    return is_floating(a) and a.dtype.itemsize == 2


def spread(cotangents: Arrays, wanted: Sequence[bool]) -> list:
    """Put None, JAX's zero cotangent, where none was wanted."""
    given = iter(cotangents)
    return [next(given) if w else None for w in wanted]


def is_floating(a) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def hoist(fn: Callable, *args) -> tuple[Callable, Arrays]:
    """Trace `fn` once; give `fn'(consts, *args)` and the traced values that `fn` had closed over.

    A `custom_vjp` must not close over values that are being differentiated; afterwards they are arguments.
    """
    tree: list = []
    outside = level()

    def flat_fn(*args):
        token = _OUTSIDE.set((jax.extend.core.get_opaque_trace_state(), outside))
        try:
            leaves, structure = jax.tree.flatten(fn(*args))
        finally:
            _OUTSIDE.reset(token)
        tree.append(structure)
        return leaves

    traced = jax.make_jaxpr(flat_fn)(*args)

    def hoisted(consts, *args):
        return jax.tree.unflatten(tree[-1], jax.core.eval_jaxpr(traced.jaxpr, consts, *jax.tree.leaves(args)))

    return hoisted, list(traced.consts)


_OUTSIDE: ContextVar[tuple] = ContextVar("outside", default=(None, None))


def level():
    """Where JAX is tracing: differs inside a loop or a checkpoint, and not inside `hoist`, which runs its function
    once."""
    here, (inside, outside) = jax.extend.core.get_opaque_trace_state(), _OUTSIDE.get()
    return outside if here == inside else here


def _reads(jaxpr, output: int) -> list[bool]:
    wanted = [i == output for i in range(len(jaxpr.outvars))]
    return pe.dce_jaxpr(jaxpr, wanted)[1]
