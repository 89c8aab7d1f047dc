"""Looking inside a sharded state: whole parameters and gradients on the host, by name, and parameters written back.

Owns the way of one tensor from its shards to the host and back. Names and shapes are the model's own, layer by layer
(`blocks.3.mlp.up.kernel`), whatever is stacked, cut or padded. Host memory holds what the caller keeps: a tensor is
fetched when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout import ParamLayout, Plan
from jfsdp.offload import fetched
from jfsdp.state import TrainState
from jfsdp.step import TrainStep


def summon_full_params(state: TrainState, paths: str | Sequence[str] = "*", *, averaged: bool = False) -> FullTensors:
    """Whole parameters by name, as NumPy arrays; `averaged` gives the average of the weights instead.

    paths: names, or patterns such as `blocks.*.mlp.*`.
    In a run of several processes each of them reads the same names in the same order. Valid until the state is donated.
    Raises: ValueError for a name or pattern that no parameter has.
    """
    return FullTensors(state.averaged_params() if averaged else state.params, state.plan, paths)


def summon_full_gradients(step: TrainStep, state: TrainState, batch, paths: str | Sequence[str] = "*") -> FullTensors:
    """Whole gradients by name, as `step(state, batch)` would hand them to clipping; the state is not changed.

    Runs the backward pass once, for any number of names. Frozen parameters have none.
    """
    return FullTensors(step.gradients(state, batch), state.plan, paths)


def write_full_params(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """A state with whole parameters put in place of its own, by name; moments, counters and the average stay.

    The state that was given keeps its arrays, and shares those that are not written with the new one: go on with one of
    the two.
    Raises: ValueError for a name that no parameter has, or another shape.
    """
    plan, found = state.plan, _by_name(state.plan.leaves)
    if unknown := [name for name in values if name not in found]:
        raise _unknown(unknown[0], found)
    for name, value in values.items():
        if (given := np.shape(value)) != found[name][0].shape:
            raise ValueError(f"{name}: got shape {given}, the parameter has {found[name][0].shape}.")
    chosen: dict[str, list[str]] = {}
    for name in values:
        chosen.setdefault(found[name][0].path, []).append(name)

    def one(leaf: ParamLayout, stored: jax.Array):
        if leaf.path not in chosen:
            return stored
        layered, sharding = leaf.layers is not None, plan.sharding(leaf.rest_spec)
        stored = _copy(sharding)(fetched(stored))
        for name in chosen[leaf.path]:
            value = np.asarray(values[name]).astype(leaf.dtype)
            shape = leaf.rest_shape[1:] if layered else leaf.rest_shape
            if value.shape != shape:
                value = np.pad(value, [(0, after - before) for before, after in zip(value.shape, shape)])
            spec = PartitionSpec(*leaf.rest_spec[1:]) if layered else leaf.rest_spec
            placed = jax.make_array_from_callback(shape, plan.sharding(spec), lambda index, v=value: v[index])
            stored = insert_layer(sharding)(stored, placed, found[name][1]) if layered else _copy(sharding)(placed)
            jax.block_until_ready(stored)  # or host copies would pile up
        return jax.device_put(stored, plan.rest_sharding(leaf))

    return replace(state, params=plan.map(one, state.params))


class FullTensors(Mapping[str, np.ndarray]):
    """Whole tensors by name, in the model's order; each is fetched when it is read, and not kept."""

    def __init__(self, values, plan: Plan, paths: str | Sequence[str]):
        arrays = dict(zip((leaf.path for leaf in plan.leaves), jax.tree.leaves(values, is_leaf=lambda x: x is None)))
        self._plan, self._arrays = plan, {path: a for path, a in arrays.items() if a is not None}
        every = _by_name(leaf for leaf in plan.leaves if leaf.path in self._arrays)
        patterns = (paths,) if isinstance(paths, str) else tuple(paths)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in every):
                raise _unknown(pattern, every)
        self._found = {n: at for n, at in every.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}

    def __getitem__(self, name: str) -> np.ndarray:
        leaf, layer = self._found[name]
        return np.array(fetch_layer(self._arrays[leaf.path], leaf, self._plan, layer))  # the caller's own, to write on

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def fetch_layer(value: jax.Array, leaf: ParamLayout, plan: Plan, layer: int = 0) -> np.ndarray:
    """One layer of a stored parameter (or its gradient, moment, average) on the host, in its logical shape; every
    process of a run must ask for it."""
    spec = PartitionSpec(*value.sharding.spec[1:]) if leaf.layers is not None else value.sharding.spec
    if not value.is_fully_addressable:
        # all-gather over the shard axes: each device receives (S-1)/S of one layer of one parameter, overlapping
        # nothing. In one process the host joins the shards instead.
        spec = PartitionSpec()
    sharding = plan.sharding(spec)
    # A copy of what is not stacked: an array keeps what NumPy has once read of it as long as it lives.
    value = _copy(sharding)(value) if leaf.layers is None else _pick(sharding)(value, layer)
    return np.asarray(value)[..., *(slice(n) for n in leaf.shape)]


def _by_name(leaves) -> dict[str, tuple[ParamLayout, int]]:
    """Every tensor's layout and layer, by its name in the model."""
    return {name: (leaf, layer) for leaf in leaves for layer, name in enumerate(leaf.logical_paths)}


def _unknown(name: str, known: Mapping[str, Any]) -> ValueError:
    some = ", ".join(list(known)[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    return ValueError(f"no parameter is called {name!r}. There are {some}.")


@lru_cache(None)
def insert_layer(sharding: NamedSharding):
    """`(stacked, w, layer) -> stacked` with one layer replaced, in place."""

    def insert(stacked, w, layer):
        return jax.lax.dynamic_update_index_in_dim(stacked, w.astype(stacked.dtype), layer, 0)

    return jax.jit(insert, out_shardings=sharding, donate_argnums=0)


@lru_cache(None)
def _pick(sharding: NamedSharding):
    return jax.jit(lambda w, layer: jax.lax.dynamic_index_in_dim(w, layer, 0, False), out_shardings=sharding)


@lru_cache(None)
def _copy(sharding: NamedSharding):
    return jax.jit(jnp.copy, out_shardings=sharding)
