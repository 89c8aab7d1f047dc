"""What the families are built of: matmuls and norms, and in which dtype they compute.

Owns no architecture. Note [Dtypes]: there is no dtype setting. Parameters are created in fp32, and a matmul runs in
the dtype of the weights it is handed, so whoever casts the weights (a precision policy) chooses the compute dtype.
Norms, positions and softmax compute in fp32 and give back the dtype they were given.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from .attention import wide


class Linear(nnx.Module):
    """`x @ kernel + bias` in the kernel's dtype, `[..., d_in] -> [..., d_out]`. See Note [Dtypes]."""

    def __init__(self, d_in: int, d_out: int, *, std: float = 0.02, bias: bool = False, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (d_in, d_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(d_out, jnp.float32)) if bias else None

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...]
        # B and T as one dim: apart, XLA transposes an operand of the kernel's gradient, and on a CPU the
        # backward pass of the MLP takes twice as long (fp32, [16, 256, 192], F 640, 2 cores, JAX 0.10.2).
        y = x.reshape(-1, x.shape[-1]).astype(kernel.dtype) @ kernel
        if self.bias is not None:
            y = y + self.bias[...][None].astype(y.dtype)
        return y.reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x**2) + eps) * scale` over the last dim, in fp32."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: Array) -> Array:
        h = x.astype(wide(x.dtype))
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(h.dtype)
        return (h * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * scale + bias` over the last dim, in fp32."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: Array) -> Array:
        h = x.astype(wide(x.dtype))
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        scale, bias = (jnp.expand_dims(p[...].astype(h.dtype), range(x.ndim - 1)) for p in (self.scale, self.bias))
        return (h * scale + bias).astype(x.dtype)
