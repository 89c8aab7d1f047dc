"""Quantised wires: a shard as codes of one byte each with a scale per block, and back.

Owns the format. What is sent is one array of bytes, the codes first and the float32 scales of their blocks behind them,
so a parameter is still one operation. Who sends what is in `collectives.py`.

Note [The same weights everywhere]
A shard is rounded once, by the device that holds it, and everyone computes with what comes out of the wire, its owner
too: all devices hold the same weights, and the backward pass gathers the same ones again. Gradients pass as if nothing
had been rounded (straight through), and what is stored keeps its precision.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 256
"""Elements that share a scale: 4 bytes more on 256."""

_LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0}


def encode(shard: Array, code: jnp.dtype) -> Array:
    """A shard of any shape to bytes `[blocks * (BLOCK + 4)]`. `code` is int8 or float8_e4m3fn."""
    flat = shard.reshape(-1).astype(jnp.float32)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=1) / _LARGEST[code]
    codes = blocks / jnp.where(scale == 0, 1, scale)[:, None]
    codes = (jnp.round(codes) if code == jnp.int8 else codes).astype(code)
    return jnp.concatenate([_bytes(codes), _bytes(scale)])


def decode(wire: Array, shape: tuple[int, ...], code: jnp.dtype, dtype: jnp.dtype) -> Array:
    """What `encode` made of shards of `shape`, `[.., bytes]`, to `[.., *shape]` in `dtype`."""
    lead, size = wire.shape[:-1], 1
    for n in shape:
        size *= n
    blocks = -(-size // BLOCK)
    codes = lax.bitcast_convert_type(wire[..., : blocks * BLOCK].reshape(*lead, blocks, BLOCK), code)
    scale = lax.bitcast_convert_type(wire[..., blocks * BLOCK :].reshape(*lead, blocks, 4), jnp.float32)
    values = (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)
    return values.reshape(*lead, -1)[..., :size].reshape(*lead, *shape)


def wire_bytes(elements: int) -> int:
    """Bytes that `encode` makes of a shard of so many elements."""
    return -(-elements // BLOCK) * (BLOCK + 4)


def _bytes(a: Array) -> Array:
    return lax.bitcast_convert_type(a, jnp.uint8).reshape(-1)
