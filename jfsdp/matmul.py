"""`x @ w` for a unit's weights, in the form for which the platform has a fast kernel.

Owns one product and its two gradients. It is the plain `@` but for bf16 on a CPU. See Note [bf16 on a CPU].

Note [bf16 on a CPU]
XLA (JAX 0.10.2) turns the operands of a bf16 `@` into fp32 on a CPU and runs an fp32 kernel; the bf16 units that newer
CPUs have stay idle. Two forms reach them (one core with AMX, x [512, 512], w [512, 1408]):

    x @ w in fp32 out of bf16, rounded afterwards            1,030 GFLOP/s against 115
    x^T g, with x transposed by a copy                       680 GFLOP/s against 121

A plain transpose would be folded into the matmul, which leads back to fp32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def matmul(x: Array, w: Array) -> Array:
    """`[N, d_in], [d_in, d_out] -> [N, d_out]`, all of one dtype."""
    return _on_cpu(x, w) if w.dtype == jnp.bfloat16 and platform() == "cpu" else x @ w


def platform() -> str:
    """Where what is being traced will run: the mesh's inside a sharded step, else this process's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


@jax.custom_vjp
def _on_cpu(x: Array, w: Array) -> Array:
    return _dot(x, w, 1, 0)


def _gradients(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    return _dot(g, w, 1, 1), _over_rows(x, g)


_on_cpu.defvjp(lambda x, w: (_on_cpu(x, w), (x, w)), _gradients)


def _over_rows(x: Array, g: Array) -> Array:
    """`x^T g`: `[N, d_in], [N, d_out] -> [d_in, d_out]`."""
    rows, width = x.shape
    if rows % 16:
        return _dot(x, g, 0, 0)
    # With the rows as two dims it is no transpose that XLA could fold into the matmul.
    turned = jnp.moveaxis(x.reshape(rows // 16, 16, width), -1, 0).reshape(width, rows)
    return _dot(turned, g, 1, 0)


def _dot(a: Array, b: Array, i: int, j: int) -> Array:
    """Sum over dim i of a and dim j of b."""
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32).astype(a.dtype)
