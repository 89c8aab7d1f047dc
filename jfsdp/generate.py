"""Sampling from sharded parameters with a cache of keys and values: enough to look at what a model writes.

Owns the loop over tokens and the choice of each. The model brings `new_cache` and `decode`; layers are gathered by its
`Stack` as in training, once for the prompt and once for every token, so this is for samples and not for serving.

Note [Rows]
Prompts are padded on the left, so that all rows write their next token at the same place; `starts` says where a row
begins. Rows are dealt out over all devices. A row's random numbers follow its place among the prompts, so what is
written does not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jfsdp import collectives
from jfsdp.layout import Plan
from jfsdp.unit import enter


def make_generate(
    plan: Plan,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    end: int | None = None,
) -> Callable[..., list[list[int]]]:
    """Build `generate(params, prompts, seed=0) -> continuations`: lists of token ids in, lists of token ids out.

    params: as stored between steps. Compiles once for each number of prompts and length of the longest.
    temperature: 0 takes the likeliest token, 1 draws from the model's distribution.
    top_k: draw from the likeliest so many only; None from all.
    end: the id after which a row stops; it is left out.
    Raises: ValueError for a setting out of range, an empty prompt or a token outside the vocabulary.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; use 1 or more.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; use 0 for the likeliest token, or more.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; use 1 or more, or None for all.")
    compiled, everywhere = _jitted(plan, max_new_tokens, temperature, top_k), plan.sharding(PartitionSpec())

    def generate(params: Any, prompts: Sequence[Sequence[int]], seed: int = 0, buffers: Any = None) -> list[list[int]]:
        padded, starts = _pad(prompts, plan.placement.shards * plan.placement.replicas)
        place = lambda a: jax.make_array_from_callback(a.shape, plan.batch_sharding, lambda index: a[index])  # noqa: E731
        placed = [place(a) for a in (padded, starts, np.arange(len(padded), dtype=np.int32))]
        tokens = compiled(params, {} if buffers is None else buffers, *placed, jax.random.key(seed))
        if not tokens.is_fully_addressable:
            tokens = jax.jit(lambda t: t, out_shardings=everywhere)(tokens)
        return [_until(row, end) for row in np.asarray(tokens)[: len(prompts)].tolist()]

    return generate


def _jitted(plan: Plan, max_new_tokens: int, temperature: float, top_k: int | None) -> Callable[..., Array]:
    """The loop over tokens, as one program.

    Without the options of a training step: XLA (0.10.2 and 0.12.0.1) cannot double-buffer a loop over tokens that holds
    one over layers, and says so by an internal error.
    """
    axes, everywhere = plan.placement.data_axes, PartitionSpec()
    door = plan.door.evaluating()

    def local(params, buffers, prompts, starts, row_ids, key):
        model = door.enter(plan.map(lambda leaf, w: enter(w, None, None, leaf), params), buffers)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids)
        length = prompts.shape[1]
        cache = model.new_cache(len(prompts), length + max_new_tokens, _compute_dtype(plan))
        cache = jax.tree.map(lambda a: collectives.vary(a, axes), cache)

        def step(carry, i):
            logits, cache = carry
            token = _choose(logits, keys, i, temperature, top_k)
            return model.decode(token[:, None], cache, starts, length + i), token

        carry = model.decode(prompts, cache, starts, jnp.int32(0))
        carry = jax.tree.map(lambda a: collectives.vary(a, axes), carry)
        (logits, _), tokens = jax.lax.scan(step, carry, jnp.arange(max_new_tokens - 1, dtype=jnp.int32))
        last = _choose(logits, keys, max_new_tokens - 1, temperature, top_k)
        return jnp.concatenate([tokens.T, last[:, None]], axis=1)

    rows = PartitionSpec(axes)
    specs = (plan.map(lambda leaf: leaf.rest_spec), everywhere, rows, rows, rows, everywhere)
    sharded = jax.shard_map(local, mesh=plan.mesh, axis_names=set(axes), in_specs=specs, out_specs=rows)
    return jax.jit(sharded)


def _pad(prompts: Sequence[Sequence[int]], devices: int) -> tuple[np.ndarray, np.ndarray]:
    """`[rows, longest]` with zeros on the left, rows a multiple of the devices; and where each begins, `[rows, 1]`."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("every prompt needs one token or more; give the id that starts a document for an empty one.")
    rows, longest = -(-len(prompts) // devices) * devices, max(map(len, prompts))
    padded, starts = np.zeros((rows, longest), np.int32), np.full((rows, 1), longest - 1, np.int32)
    for i, prompt in enumerate(prompts):
        padded[i, longest - len(prompt) :] = prompt
        starts[i] = longest - len(prompt)
    return padded, starts


def _choose(logits: Array, keys: Array, i, temperature: float, top_k: int | None) -> Array:
    """One token for each row: `[B, V]` and `[B]` keys to `[B]`."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    draw = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, i), row))
    return draw(keys, logits / temperature).astype(jnp.int32)


def _compute_dtype(plan: Plan) -> jnp.dtype:
    """What the layers compute in, for the cache: that of the largest parameter."""
    return max(plan.leaves, key=lambda leaf: leaf.size).param_dtype


def _until(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
