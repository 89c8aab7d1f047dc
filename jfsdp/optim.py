"""The optimizer on shards: any optax transformation, on global arrays of logical shapes, one layer at a time.

Owns how the optimizer's state is laid out, and what the optimizer gets to see. It runs outside `shard_map`,
under `jit` with pinned shardings, so elementwise optimizers move nothing and whole-matrix ones get the
collectives that they need from the partitioner.

Note [One layer at a time]
A stacked leaf `[L, ...]` is L parameters. The transformation is mapped with `vmap` over the layer dim of stacked
leaves alone, so it sees the shape of one layer: `ndim` tests, Adafactor's factors, LAMB's ratios and Muon's
matrices mean what they mean for separate layers, and the program does not grow with L. A transformation that
mixes parameters (a global norm inside the chain) would see one layer of each stack at a time, so it is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec

from jfsdp.layout import SMALL, ParamLayout, Plan, pad, path_name, unpad
from jfsdp.offload import HOST, to_device
from jfsdp.precision import wide

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _StateLeaf:
    """One array of the optimizer's state: the parameter it belongs to, and whether it has the parameter's shape."""

    param: ParamLayout | None
    like_param: bool

    @property
    def stacked_unit(self) -> str | None:
        return self.param.unit if self.param is not None and self.param.layers is not None else None

    @property
    def spec(self) -> PartitionSpec:
        return self.param.shard_spec if self.like_param else PartitionSpec()


class Optimizer:
    """`tx` for the parameters of `plan`. States come and go as stored arrays (padded, sharded).

    Raises: ValueError when `tx` mixes parameters and some of them are stacked.
    """

    def __init__(self, tx: optax.GradientTransformation, plan: Plan):
        self.tx, self.plan, self.layouts = tx, plan, plan.trainable
        one_layer = self._map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        state = jax.eval_shape(tx.init, one_layer)
        self.leaves, self._shapes = _state_leaves(state, self.layouts), state
        trained = jax.tree.leaves(self.layouts)
        self._stacked = sorted({leaf.unit for leaf in trained if leaf.layers is not None})
        if not trained:
            raise ValueError("every parameter is frozen, so there is nothing to train. Leave some of them trainable.")
        if self._stacked:
            _check_separate(tx, trained, one_layer, state)

    def _map(self, f, *trees):
        """`f(layout, *leaves)` over trees of trained parameters, None where one is frozen."""
        return jax.tree.map(f, self.layouts, *trees)

    @property
    def state_shardings(self):
        """Where the state lies between steps."""

        def one(leaf: _StateLeaf):
            sharding = self.plan.sharding(leaf.spec)
            return sharding.with_memory_kind(HOST) if leaf.like_param and self.plan.offload.opt_state else sharding

        return jax.tree.map(one, self.leaves)

    def init(self, params):
        """Stored state for stored parameters, created sharded."""
        self._tell_of_whole()
        return jax.jit(self._create, out_shardings=self.state_shardings)(self.plan.only_trainable(params))

    def abstract_state(self):
        """Shapes and shardings of the stored state."""
        self._tell_of_whole()
        params = self._map(lambda leaf: jax.ShapeDtypeStruct(leaf.rest_shape, leaf.dtype))
        shapes = jax.eval_shape(self._create, params)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.state_shardings
        )

    def _tell_of_whole(self) -> None:
        """Warn of what lies whole on every device, and is larger than a shard of the parameter that it belongs to."""
        shards = self.plan.placement.shards
        flat = jax.tree_util.tree_flatten_with_path(self._shapes)[0]
        for (path, array), leaf in zip(flat, jax.tree.leaves(self.leaves)):
            own = SMALL if leaf.param is None else max(SMALL, math.prod(leaf.param.shape) // shards)
            if shards > 1 and not leaf.like_param and math.prod(array.shape) > own:
                whose = "no parameter's path ends its own" if leaf.param is None else f"{leaf.param.path} has another"
                _log.warning(
                    "the optimizer's %s %s is not sharded, every device holds all of it: only arrays of a parameter's "
                    "shape under its path are (%s). Keep the state in trees like the parameters.",
                    path_name(path),
                    list(array.shape),
                    whose,
                )

    def update(self, grads, state, shards):
        """One step on stored shards of gradients and parameters; gives new shards and state, stored and pinned.

        Call inside `jit`.
        """
        pin = jax.lax.with_sharding_constraint
        logical = lambda tree: self._map(lambda leaf, a: unpad(a, leaf), tree)  # noqa: E731
        shards = logical(shards)
        update = self._per_layer(
            self.tx.update,
            [self._param_axes, self._state_axes, self._param_axes],
            lambda u: (self._param_axes(u), self._state_axes(u)),
        )
        updates, state = update(logical(grads), self._unpad(state), shards)
        new = optax.apply_updates(shards, updates)
        new = self._map(lambda leaf, w: pin(pad(w, leaf), self.plan.sharding(leaf.shard_spec)), new)
        return new, jax.tree.map(lambda a, s: pin(a, self.plan.sharding(s.spec)), self._pad(state), self.leaves)

    def stored_shards(self, params):
        """Stored parameters as stored shards: of what is whole at rest each device takes its piece; moves nothing."""

        def one(leaf: ParamLayout, w):
            if not leaf.placement.whole_at_rest:
                return w
            return jax.lax.with_sharding_constraint(pad(w, leaf), self.plan.sharding(leaf.shard_spec))

        return self._map(one, params)

    def _create(self, params):
        params = to_device(params)
        params = self._map(lambda leaf, w: w if leaf.placement.whole_at_rest else unpad(w, leaf), params)
        return self._pad(self._per_layer(self.tx.init, [self._param_axes], self._state_axes)(params))

    def _per_layer(self, fn, in_axes: list, out_axes):
        """Map `fn` over the layers of each stacked unit in turn. See Note [One layer at a time]."""
        for unit in self._stacked:
            fn = jax.vmap(fn, in_axes=tuple(axes(unit) for axes in in_axes), out_axes=out_axes(unit))
        return fn

    def _param_axes(self, unit: str):
        return self._map(lambda leaf: 0 if leaf.layers is not None and leaf.unit == unit else None)

    def _state_axes(self, unit: str):
        return jax.tree.map(lambda s: 0 if s.stacked_unit == unit else None, self.leaves)

    def _pad(self, state):
        return jax.tree.map(lambda s, a: pad(a, s.param) if s.like_param else a, self.leaves, state)

    def _unpad(self, state):
        return jax.tree.map(lambda s, a: unpad(a, s.param) if s.like_param else a, self.leaves, state)


def label_params(rule: Callable[[str, tuple[int, ...]], Any], plan: Plan):
    """What `rule(path, shape)` says of every trained parameter, as optax takes masks (`optax.adamw(mask=...)`) and
    labels (`optax.partition`).

    Rules see the model's own names and shapes, layer by layer, whatever is stacked, sharded or padded:
    `blocks.3.mlp.up.kernel`, `(d_in, d_out)`.
    Raises: ValueError when a rule tells the layers of a stack apart: they are one array, and one program of the
        optimizer runs over all of them. What differs by layer must be a value in the optimizer's state.
    """

    def one(leaf: ParamLayout):
        said = {path: rule(path, leaf.shape) for path in leaf.logical_paths}
        first, *_ = said
        if other := next((path for path in said if said[path] != said[first]), None):
            raise ValueError(
                f"the rule says {said[first]!r} of {first} and {said[other]!r} of {other}, which are layers of one "
                f"stack: one array, updated by one program. Say the same of all of them, or take layers that differ "
                "out of the stack (a stack of their own, or blocks in a Python loop)."
            )
        return said[first]

    return plan.map(lambda leaf: one(leaf) if leaf.trainable else None)


def global_norm(sums: jax.Array, norm_type: float) -> jax.Array:
    """Norm of all gradients from `gradient_sums`: the p-th root of their sum, or their maximum for infinity."""
    return jnp.max(sums) if math.isinf(norm_type) else jnp.sum(sums) ** (1.0 / norm_type)


def gradient_sums(grad: jax.Array, norm_type: float) -> jax.Array:
    """What one local gradient adds to the norm, in float32 or wider: sum of |g|^p, or max |g| for infinity."""
    g = jnp.abs(grad.astype(wide(grad.dtype)))
    if math.isinf(norm_type):
        return jnp.max(jnp.where(jnp.isnan(g), jnp.inf, g), initial=0.0)  # an all-reduce of maxima drops a NaN
    return jnp.sum(g * g if norm_type == 2 else g**norm_type)


def _check_separate(tx: optax.GradientTransformation, trained: list[ParamLayout], params, state) -> None:
    """Refuse a transformation in which one parameter's update reads another's gradient.

    See Note [One layer at a time].
    """
    traced, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    others = [False] * (len(traced.jaxpr.outvars) - len(jax.tree.leaves(updates)))
    for i, leaf in enumerate(trained):
        wanted = [j == i for j in range(len(trained))] + others
        _, used = pe.dce_jaxpr(traced.jaxpr, wanted)
        if read := [other.path for other, is_read in zip(trained, used) if is_read and other is not leaf]:
            raise ValueError(
                f"the optimizer mixes parameters: the update of {leaf.path} reads the gradient of {read[0]}. "
                "The layers of a stack are updated one at a time, so it would see one layer only. Clip by global norm "
                "with train_step(clip_norm=...) instead of optax.clip_by_global_norm, and skip bad steps with "
                "nonfinite='skip'."
            )


def _state_leaves(state, layouts) -> Any:
    """Pair each array of an optimizer state with the parameter whose path ends its own path."""
    params = sorted(jax.tree_util.tree_flatten_with_path(layouts)[0], key=lambda pair: -len(pair[0]))

    def one(path, array):
        ends = lambda p: path_name(path[max(len(path) - len(p), 0) :]) == path_name(p)  # noqa: E731
        owner = next((leaf for p, leaf in params if ends(p)), None)
        return _StateLeaf(owner, owner is not None and tuple(array.shape) == owner.shape)

    return jax.tree_util.tree_map_with_path(one, state)
