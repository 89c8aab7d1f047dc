"""The exponential moving average of the weights: one float32 leaf per trained parameter, placed like the parameter.

Owns how the average starts, moves and is read. When it moves (after an applied update, never after a skipped step) is
the step's; a frozen parameter is its own average and has none.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jfsdp.layout import Plan
from jfsdp.offload import to_device
from jfsdp.precision import wide

Decay = float | Callable[[Array], Array]
"""What the average keeps per update: a number, or a function of the updates applied before this one."""


def start(params, plan: Plan):
    """The average at step 0: the weights themselves, in buffers of its own."""

    def copies(params):
        return jax.tree.map(lambda w: jnp.copy(w.astype(wide(w.dtype))), plan.only_trainable(to_device(params)))

    return jax.jit(copies, out_shardings=plan.only_trainable(plan.rest_shardings))(params)


def abstract(plan: Plan):
    """Shapes and shardings of the average."""

    def one(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.rest_shape, wide(leaf.dtype), sharding=sharding) if leaf.trainable else None

    return plan.map(one, plan.rest_shardings)


def advance(average, params, plan: Plan, decay: Decay, updates: Array):
    """`decay * average + (1 - decay) * params`; call inside `jit`. Moves nothing between devices."""
    decay = decay(updates) if callable(decay) else decay

    def one(old, new):
        # This order leaves an average that equals the weights bitwise as it is.
        return old + (1 - jnp.asarray(decay, old.dtype)) * (new.astype(old.dtype) - old)

    return jax.tree.map(one, average, plan.only_trainable(params))


def averaged(average, params, plan: Plan):
    """The average as stored parameters, each in its parameter's dtype and a buffer of its own; frozen ones are those of
    `params`."""

    def copies(average):
        return plan.map(lambda leaf, a: jnp.copy(a.astype(leaf.dtype)) if leaf.trainable else None, to_device(average))

    shardings = plan.only_trainable(plan.rest_shardings)
    return plan.with_trainable(params, jax.jit(copies, out_shardings=shardings)(average))
