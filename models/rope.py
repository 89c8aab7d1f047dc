"""Rotary positions: the frequencies of a head's pairs, how published models stretch them, and the turning itself.

Owns all that depends on a token's position in the Llama family. A `config` here has `head_size`, `rope_theta` and
`rope_scaling`, which is None or one of `SCALINGS`: fields are spelled as in a Hugging Face `config.json`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from .attention import wide


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency slower by one factor (position interpolation, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"
    amplitude: ClassVar[float] = 1.0

    factor: float
    """How many times slower the frequencies turn."""

    def __post_init__(self):
        _check_factor(self.factor)

    def slowed(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        return frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's stretching of RoPE to rows longer than it was first trained on."""

    kind: ClassVar[str] = "llama3"
    amplitude: ClassVar[float] = 1.0

    factor: float
    """How many times slower the slow frequencies turn."""
    low_freq_factor: float
    """Frequencies with fewer turns than this over the original length are slowed by the whole factor."""
    high_freq_factor: float
    """Frequencies with more turns than this stay as they are; between the two, the factor fades in."""
    original_max_position_embeddings: int
    """Tokens of the rows that it was first trained on."""

    def __post_init__(self):
        _check_factor(self.factor)
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor is {self.high_freq_factor}, not above low_freq_factor "
                f"{self.low_freq_factor}: frequencies are graded between the two. Llama 3 uses 1.0 and 4.0."
            )

    def slowed(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequency / (2 * np.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): the factor fades in from pair to pair, and queries and keys grow with it."""

    kind: ClassVar[str] = "yarn"

    factor: float
    """How many times slower the slow frequencies turn."""
    original_max_position_embeddings: int
    """Tokens of the rows that it was first trained on."""
    beta_fast: float = 32.0
    """The pair that turns so often over the original length is the last that stays as it is."""
    beta_slow: float = 1.0
    """The pair that turns so often is the first that is slowed by the whole factor."""
    attention_factor: float | None = None
    """What cosines and sines are multiplied by; None takes 0.1 log(factor) + 1."""
    truncate: bool = True
    """Whether the two pairs are rounded outwards to whole ones."""

    def __post_init__(self):
        _check_factor(self.factor)
        if not self.beta_slow < self.beta_fast:
            raise ValueError(
                f"rope_scaling.beta_fast is {self.beta_fast}, not above beta_slow {self.beta_slow}: the factor fades "
                "in between the two. YaRN uses 32 and 1."
            )

    @property
    def amplitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def slowed(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        pairs, length = len(frequency), self.original_max_position_embeddings
        first, last = (pairs * math.log(length / (2 * np.pi * n), theta) for n in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        whole = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return frequency * (1 - whole + whole / self.factor)


SCALINGS = {scaling.kind: scaling for scaling in (LinearScaling, Llama3Scaling, YarnScaling)}
"""By `rope_type`."""


def rope_frequencies(config: Any) -> np.ndarray:
    """Radians per token for each pair of a head, `[h/2]` fp32, slowed as `rope_scaling` says."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_size, 2) / config.head_size)
    if config.rope_scaling is not None:
        frequency = config.rope_scaling.slowed(frequency, config.rope_theta)
    return frequency.astype(np.float32)


def rope_tables(config: Any, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines for `positions [B, T]`, each `[B, T, h/2]` fp32 whatever the compute dtype."""
    angle = positions[:, :, None].astype(jnp.float32) * rope_frequencies(config)[None, None, :]
    amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """Turn each head of `x [B, T, heads, h]`; a pair is entry i of both halves, as Hugging Face stores it."""
    cos, sin = (table[:, :, None, :].astype(wide(x.dtype)) for table in rope)
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _check_factor(factor: float) -> None:
    if not factor >= 1:
        raise ValueError(f"rope_scaling.factor is {factor}; rows get longer by it, so use 1 or more.")
