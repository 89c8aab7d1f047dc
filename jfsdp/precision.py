"""Mixed precision: which dtype parameters are gathered, computed and reduced in.

Stored parameters, gradients after the reduction and optimizer states keep the parameter's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

_NAMES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float64": "float64",
}


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of one unit, named as in PyTorch; None keeps the parameter's own dtype."""

    param_dtype: jnp.dtype | None = None
    """Dtype on the gather's wire and in the computation."""
    reduce_dtype: jnp.dtype | None = None
    """Dtype on the reduction's wire; None reduces in the stored dtype, so bf16 compute reduces in fp32."""

    def __post_init__(self):
        for field in ("param_dtype", "reduce_dtype"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, parse_dtype(value, field))
            if getattr(self, field) == jnp.float16:
                raise NotImplementedError(f"{field} float16 needs a loss scale, which is not served yet. Use bfloat16.")


def wide(dtype) -> jnp.dtype:
    """The dtype of sums, norms and losses over values of `dtype`: float32, and float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def parse_dtype(value, field: str = "dtype") -> jnp.dtype:
    """A floating dtype from its name ("bf16", "float32") or from a dtype.

    Raises: ValueError for a name or kind that cannot carry weights.
    """
    try:
        dtype = jnp.dtype(_NAMES.get(value, value) if isinstance(value, str) else value)
    except TypeError as e:
        raise ValueError(f"{field} {value!r} is not a dtype. Use one of {', '.join(_NAMES)}.") from e
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{field} {dtype.name} is not a floating dtype. Use one of {', '.join(_NAMES)}.")
    return dtype
