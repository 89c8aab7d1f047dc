"""Mixed precision: which dtype parameters are gathered, computed and reduced in, and the loss scale of float16.

Stored parameters, gradients after the reduction and optimizer states keep the parameter's own dtype.

Note [Loss scale]
Small gradients vanish in float16. The loss is multiplied by a scale before the backward pass, so the scale is on every
wire, and finished gradients are divided by it in the stored dtype, before anything looks at them. When one is not
finite on any device, every device skips the step and lowers the scale; after `growth_interval` good steps in a row it
grows. The rules and start values are those of PyTorch's `torch.amp.GradScaler`; `min_scale`, as in DeepSpeed, tells a
scale that was too large from a loss that is not finite at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_NAMES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
}
_CODES = {
    "int8": jnp.dtype("int8"),
    "fp8": jnp.dtype("float8_e4m3fn"),
    "float8_e4m3fn": jnp.dtype("float8_e4m3fn"),
}


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of one unit, named as in PyTorch; None keeps the parameter's own dtype."""

    param_dtype: jnp.dtype | None = None
    """Dtype of the computation, and on the gather's wire unless `gather_dtype` says otherwise."""
    reduce_dtype: jnp.dtype | None = None
    """Dtype on the reduction's wire; None reduces in the stored dtype, so bf16 compute reduces in fp32."""
    gather_dtype: jnp.dtype | None = None
    """"int8" or "fp8": large parameters are gathered as codes of one byte with a scale per 256 of them, and computed in
    `param_dtype`; gradients as if nothing had been rounded. None gathers in `param_dtype`."""
    output_dtype: jnp.dtype | None = None
    """Dtype of the floating arrays that a call of the unit gives back; None leaves them as they come."""
    buffer_dtype: jnp.dtype | None = None
    """Dtype in which the unit sees its floating buffers. They are stored in their own, and an element that the loss
    does not change stays bitwise as it is."""
    cast_forward_inputs: bool = True
    """Cast the floating arrays that a call of the unit receives to `param_dtype`. Of a stack that is what it carries
    from layer to layer; what all layers share keeps its dtype."""

    def __post_init__(self):
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, parse_dtype(value, field))

        if self.gather_dtype is not None:
            code = next((code for name, code in _CODES.items() if self.gather_dtype in (name, code)), None)
            if code is None:
                raise ValueError(f"gather_dtype {self.gather_dtype!r} is unknown. Use one of {', '.join(_CODES)}.")
            object.__setattr__(self, "gather_dtype", code)

    def cast_inputs(self, args):
        """What a call of the unit receives, as it is to see it."""
        return cast_floating(args, self.param_dtype if self.cast_forward_inputs else None)

    def cast_outputs(self, out):
        """What a call of the unit gives back, as its caller is to see it."""
        return cast_floating(out, self.output_dtype)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss scale starts and moves, named as in `torch.amp.GradScaler`. See Note [Loss scale]."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    """Multiplies the scale after `growth_interval` steps without an overflow; 1 never grows it."""
    backoff_factor: float = 0.5
    """Multiplies the scale after an overflow; 1 never lowers it."""
    growth_interval: int = 2000
    min_scale: float = 1.0
    """The scale is lowered no further: what overflows there is no matter of scale, and `nonfinite="raise"` stops."""

    def __post_init__(self):
        if not 0 < self.min_scale <= self.init_scale:
            raise ValueError(
                f"init_scale is {self.init_scale} and min_scale {self.min_scale}; both multiply the loss. Use positive "
                "numbers, init_scale not the smaller."
            )
        if not self.growth_factor >= 1:
            raise ValueError(f"growth_factor is {self.growth_factor}; use 1 (never grow) or more.")
        if not 0 < self.backoff_factor <= 1:
            raise ValueError(f"backoff_factor is {self.backoff_factor}; use 1 (never lower) or less, above 0.")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval is {self.growth_interval}; it counts steps, so use 1 or more.")

    @classmethod
    def static(cls, scale: float) -> LossScale:
        """A scale that never moves."""
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0, min_scale=scale)


@partial(jax.tree_util.register_dataclass, data_fields=("scale", "good_steps"), meta_fields=("rule",))
@dataclass(frozen=True)
class ScaleState:
    """The loss scale that a run carries from step to step, the same on every device."""

    scale: Array
    """float32."""
    good_steps: Array
    """Steps in a row without an overflow since the scale moved; int32."""
    rule: LossScale

    @classmethod
    def start(cls, rule: LossScale) -> ScaleState:
        return cls(jnp.float32(rule.init_scale), jnp.int32(0), rule)

    def after(self, finite: Array) -> ScaleState:
        """The scale for the next step. Raised no further than float32 holds, as in PyTorch."""
        good = self.good_steps + 1
        grown = self.scale * self.rule.growth_factor
        grows = finite & (good >= self.rule.growth_interval)
        scale = jnp.where(grows & jnp.isfinite(grown), grown, self.scale)
        scale = jnp.where(finite, scale, jnp.maximum(self.scale * self.rule.backoff_factor, self.rule.min_scale))
        return replace(self, scale=scale, good_steps=jnp.where(finite & ~grows, good, 0))


def cast_floating(tree, dtype: jnp.dtype | None):
    """The floating arrays of a pytree in `dtype`, everything else as it is; None leaves all as they are."""

    def one(a):
        is_array = isinstance(a, (Array, np.ndarray)) and jnp.issubdtype(a.dtype, jnp.floating)
        return a.astype(dtype) if is_array else a

    return tree if dtype is None else jax.tree.map(one, tree)


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
