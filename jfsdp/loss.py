"""What a loss gives, brought into one form: sums and weights by name, and the buffers after it.

Owns how the caller's loss is called inside `shard_map` and what its result means. Gradients of it are `step.py`'s.

Note [Sum and weight]
A loss is a sum and a weight. The weight depends on the batch only, so its total over devices and micro-batches is
known before the first backward pass, and each local sum is divided by it there: what travels is a part of the mean,
whatever the mesh, and no loss or gradient needs rescaling afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import partial_eval as pe

from jfsdp import collectives, offload, randomness
from jfsdp.layout import Door, Plan, path_name
from jfsdp.order import Order
from jfsdp.precision import cast_floating, wide
from jfsdp.unit import Regime, enter, track


class Auxiliary(NamedTuple):
    """A loss beside the main one, averaged on its own and logged under its own name."""

    sum: Array
    weight: Array
    coefficient: float = 1.0


def loss_terms(loss: Callable, plan: Plan, door: Door, params, buffers, batch, key) -> tuple[dict[str, Auxiliary], Any]:
    """Call a loss on tracked parameters; gives {"loss": ..., and auxiliary ones by name}, and the new buffers."""
    seen = _cast_buffers(buffers, plan)
    entered = door.enter(track(params), seen)
    out = loss(entered, batch, key)
    if not isinstance(out, tuple):
        rows = jax.tree.leaves(batch)[0].shape[0]
        out = (out * rows, jnp.asarray(rows, out.dtype))
    if len(out) not in (2, 3, 4):
        raise TypeError(
            f"the loss returned {len(out)} values. Return a mean, (sum, weight), (sum, weight, {{name: Auxiliary}}), "
            "or the same and the new buffers."
        )
    total, weight, others, returned = (*out, *(None,) * (4 - len(out)))
    others = dict(others or {})
    if clash := set(others) & {"loss", "weight", "grad_norm", "skipped", "updates", "loss_scale", "bad"}:
        raise ValueError(
            f"an auxiliary loss is named {sorted(clash)}, which the step logs itself. Choose another name."
        )
    new = jax.tree.map(_store_buffer, buffers, seen, door.leave(entered, seen, returned))
    return {"loss": Auxiliary(total, weight), **others}, new


def total_weights(terms: Callable, plan: Plan, params, buffers, micro, keys, axes) -> dict[str, Array]:
    """Total weight of each loss over all devices and micro-batches, without running the model.

    Raises: ValueError when a weight depends on the parameters, on buffers or on random numbers.
    """

    def only_weights(params, buffers, key, batch):
        with randomness.examples(key, jax.lax.axis_index(axes), jax.tree.leaves(batch)[0].shape[0]):
            parts, _ = terms(params, buffers, batch, key)
        return {name: jnp.asarray(t.weight, wide(t.sum.dtype)) for name, t in parts.items()}

    known = (enter_params(plan, params, None, None, Regime()), buffers, keys[0])
    traced, shape = jax.make_jaxpr(only_weights, return_shape=True)(*known, jax.tree.map(lambda a: a[0], micro))
    jaxpr, used = pe.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    n_known = len(jax.tree.leaves(known))
    if any(used[:n_known]):
        raise ValueError(
            "the weight of the loss depends on the parameters, on buffers or on random numbers. It must follow from "
            "the batch alone (count its tokens or rows), because gradients are divided by its total before the "
            "backward pass."
        )

    def count(batch):
        leaves = [a for a, u in zip(jax.tree.leaves(batch), used[n_known:]) if u]
        return [collectives.vary(w, axes) for w in jax.core.eval_jaxpr(jaxpr, traced.consts, *leaves)]

    sums = [w.sum() for w in jax.lax.map(count, micro)]
    return jax.tree.unflatten(jax.tree.structure(shape), [collectives.total(s, axes) for s in sums])


def settle_buffers(old, new, axes: tuple[str, ...]):
    """New buffers as every device must hold them: floating ones that differ between devices are averaged.

    Raises: ValueError for a buffer that changed its shape or dtype, or holds integers that follow from the batch.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(old)

    def one(path, before, after):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                f"buffer {path_name(path)} came back as {after.dtype}{list(after.shape)} and went in as "
                f"{before.dtype}{list(before.shape)}. A buffer keeps its shape and dtype from step to step."
            )
        if not jax.typeof(after).manual_axis_type.varying:
            return after
        if not jnp.issubdtype(after.dtype, jnp.floating):
            raise ValueError(
                f"buffer {path_name(path)} ({after.dtype}) differs between devices, because it follows from their "
                "rows of the batch. Only floating buffers are averaged; sum counts over the batch in the loss instead."
            )
        return collectives.mean(after, axes)

    return jax.tree.unflatten(tree, [one(path, b, a) for (path, b), a in zip(flat, tree.flatten_up_to(new))])


def enter_params(plan: Plan, params, slots, held, regime: Regime):
    tree = jax.tree.structure(plan.layouts)
    absent = [None] * len(plan.leaves)
    # Not `tree.leaves`: None is a frozen parameter's slot here, and a node of the caller's own pytree there.
    flat = [absent if t is None else tree.flatten_up_to(t) for t in (params, slots, held)]
    order = Order(plan.prefetch)
    # Layers of a stack are fetched from the host one by one, by the gather.
    flat[0] = [w if leaf.layers is not None else offload.to_device(w) for leaf, w in zip(plan.leaves, flat[0])]
    entered = [enter(w, slot, h, leaf, regime, order) for leaf, w, slot, h in zip(plan.leaves, *flat)]
    return jax.tree.unflatten(tree, entered)


def own_key(key: Array, axes: tuple[str, ...]) -> Array:
    """A key of this device's own, so that no two devices draw the same numbers."""
    return jax.random.fold_in(key, jax.lax.axis_index(axes))


def _cast_buffers(buffers, plan: Plan):
    """Floating buffers in the `buffer_dtype` of their unit."""
    return jax.tree_util.tree_map_with_path(
        lambda path, b: cast_floating(b, plan.precision_of(path_name(path)).buffer_dtype), buffers
    )


def _store_buffer(stored: Array, seen: Array, new: Array) -> Array:
    """A buffer in its stored dtype again: elements that are as they were seen are as they were stored, bitwise."""
    if new is seen or seen.dtype == stored.dtype:
        return stored if new is seen else new
    return jnp.where(new == seen, stored, new.astype(stored.dtype)) if new.dtype == seen.dtype else new
