"""The Llama family in Flax NNX: configurations, the model, and how Hugging Face names its parts.

Owns the architecture and what follows from it (`presets`, `config_from`, `flops`, `NAMES`). Sharding is not
here: blocks live in a `Stack`, the vocabulary in `Embed` and `Head`, and these decide where weights lie and
when they are gathered. Without a mesh this is an ordinary NNX model.

Dims: `L B T D F V` layers, batch, tokens, width, inner width, vocabulary; `H K h` query heads, key/value
heads, head width.

Note [Dtypes]
There is no dtype setting. Parameters are created in fp32, and a matmul runs in the dtype of the weights it
is handed, so whoever casts the weights (a precision policy) chooses the compute dtype. Norms, RoPE and
softmax compute in fp32 and give back the dtype they were given.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jfsdp.stack import Stack
from jfsdp.vocab import Embed, Head

from .attention import IMPLEMENTATIONS, attention, document_starts, wide


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of RoPE to rows longer than it was first trained on."""

    factor: float
    """How many times slower the slow frequencies turn."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this over the original length are slowed by the whole factor."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns than this stay as they are; between the two, the factor fades in."""
    original_max_position_embeddings: int = 8192
    """Tokens of the rows that it was first trained on."""

    def __post_init__(self):
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor is {self.high_freq_factor}, not above low_freq_factor "
                f"{self.low_freq_factor}: frequencies are graded between the two. Llama 3 uses 1.0 and 4.0."
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a Llama; the defaults are that of `llama-2m`, over bytes."""

    vocab_size: int = 256
    """Token ids run from 0 to this, exclusive."""
    width: int = 192
    """Numbers per token between blocks (D)."""
    num_layers: int = 4
    """Blocks (L)."""
    num_heads: int = 6
    """Query heads (H)."""
    num_kv_heads: int = 2
    """Key/value heads (K), each shared by H/K query heads."""
    head_dim: int | None = None
    """Width of a head (h); None takes width / num_heads."""
    inner_width: int = 640
    """Width inside the MLP (F)."""
    rope_theta: float = 500_000.0
    """Base of the RoPE wavelengths."""
    rope_scaling: RopeScaling | None = None
    """None leaves the wavelengths as they are."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Whether the head uses the embedding's table."""
    attention: str = "auto"
    """auto, xla, cudnn or chunked; see models/attention.py."""
    query_chunk: int = 256
    """Queries per chunk of chunked attention."""

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads if self.head_dim is None else self.head_dim

    def __post_init__(self):
        counts = "vocab_size width num_layers num_heads num_kv_heads inner_width query_chunk"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a count, so use 1 or more.")
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} does not split into {self.num_heads} heads. "
                f"Use a multiple of {self.num_heads}, or set head_dim."
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_dim is {self.head_size}; RoPE turns pairs, so set it to 2, 4, 6 or so.")
        if self.num_heads % self.num_kv_heads:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: each "
                f"key/value head serves as many query heads. Set num_kv_heads to one of {fitting}."
            )
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention is {self.attention!r}; use one of {', '.join(IMPLEMENTATIONS)}.")


_SMALL = dict(query_chunk=64)  # scores of 64 queries stay in a CPU's cache
_LLAMA3 = dict(num_kv_heads=8, vocab_size=128_256)
presets: dict[str, Config] = {
    # Over bytes, so they need no tokenizer.
    "llama-tiny": Config(**_SMALL, width=96, num_layers=3, num_heads=6, num_kv_heads=2, inner_width=256),
    "llama-2m": Config(**_SMALL),
    "llama-30m": Config(**_SMALL, width=512, num_layers=10, num_heads=8, num_kv_heads=4, inner_width=1408),
    # For token ids of a tokenizer with 32,000.
    "llama-125m": Config(vocab_size=32_000, width=768, num_layers=16, num_heads=12, num_kv_heads=4,
                         inner_width=2048, tied=True),
    # As published: Llama 3.2 1B, 3.1 8B, 3.1 70B.
    "llama3-1b": Config(**_LLAMA3, width=2048, num_layers=16, num_heads=32, inner_width=8192, tied=True,
                        rope_scaling=RopeScaling(factor=32.0)),
    "llama3-8b": Config(**_LLAMA3, width=4096, num_layers=32, num_heads=32, inner_width=14_336,
                        rope_scaling=RopeScaling(factor=8.0)),
    "llama3-70b": Config(**_LLAMA3, width=8192, num_layers=80, num_heads=64, inner_width=28_672,
                         rope_scaling=RopeScaling(factor=8.0)),
}


def build(config: Config, *, rngs: nnx.Rngs, **stack: Any) -> "Llama":
    """A Llama with fresh weights; `stack` goes to `jfsdp.stack.Stack` (`remat=...` and the like)."""
    return Llama(config, rngs=rngs, **stack)


def flops(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token: forward and backward, nothing recomputed.

    `6 N + 12 L H h T`: N weights in matmuls (the embedding's look-up and the norms are none), 2 operations
    each, three times over as the backward pass costs two forward ones; likewise T keys per query, once for
    scores and once for values. The half that a causal kernel can skip is counted, as in published figures of
    utilisation (PaLM, appendix B).
    """
    c, heads = config, config.num_heads * config.head_size
    layer = 2 * c.width * (heads + c.num_kv_heads * c.head_size) + 3 * c.width * c.inner_width
    return 6 * (c.num_layers * layer + c.width * c.vocab_size) + 12 * c.num_layers * heads * seq_len


class Llama(nnx.Module):
    """Decoder-only transformer over packed rows of tokens."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, **stack: Any):
        self.config = config
        init = nnx.initializers.normal(0.02)
        self.embed = Embed(config.vocab_size, config.width, rngs=rngs, init=init)
        self.blocks = Stack(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs=rngs, **stack)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = Head(config.vocab_size, config.width, rngs=rngs, init=init,
                         table=self.embed.table if config.tied else None)

    def __call__(
        self, tokens: Array, *, segments: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Logits `[B, T, V]` for the token after each of `tokens [B, T]`.

        segments: `[B, T]`, the document of each token, 0 for padding: Note [Documents] in attention.py. None
            makes each row one document.
        positions: `[B, T]` or `[1, T]`; None counts from the start of each document.
        """
        return self.head(self._hidden(tokens, segments, positions))

    def loss(
        self, tokens: Array, targets: Array, weights: Array, *,
        segments: Array | None = None, positions: Array | None = None,
    ) -> tuple[Array, Array]:
        """Sum of `weights * -log p(target)` in nats, and sum of the weights; their ratio is the mean loss.

        All are `[B, T]`. Logits are never formed whole. Where the weight is 0 the target may be any valid id.
        """
        h = self._hidden(tokens, segments, positions)
        return self.head.loss(h, targets, weights), jnp.sum(weights)

    def _hidden(self, tokens: Array, segments: Array | None, positions: Array | None) -> Array:
        if segments is not None and segments.shape != tokens.shape:
            raise ValueError(
                f"segments have shape {segments.shape} and tokens {tokens.shape}; give each token its "
                f"document's number (0 for padding), or leave segments out where a row is one document."
            )
        starts = None if segments is None else document_starts(segments)
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = positions if starts is None else positions - starts
        x = self.blocks(self.embed(tokens), rope_tables(self.config, positions), starts)
        return self.norm(x)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to its input: `[B, T, D] -> [B, T, D]`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x: Array, rope: tuple[Array, Array], starts: Array | None = None) -> Array:
        x = x + self.attn(self.attn_norm(x), rope, starts).astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = c = config
        q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        self.q = Linear(c.width, q, rngs=rngs)
        self.k = Linear(c.width, kv, rngs=rngs)
        self.v = Linear(c.width, kv, rngs=rngs)
        self.o = Linear(q, c.width, std=_residual_std(c), rngs=rngs)

    def __call__(self, x: Array, rope: tuple[Array, Array], starts: Array | None) -> Array:
        B, T, _ = x.shape
        c = self.config
        q, k, v = (linear(x).reshape(B, T, -1, c.head_size) for linear in (self.q, self.k, self.v))
        q, k = rotate(q, rope), rotate(k, rope)
        out = attention(q, k, v, starts, implementation=c.attention, chunk=c.query_chunk)
        return self.o(out.reshape(B, T, -1))


class Mlp(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.inner_width, rngs=rngs)
        self.up = Linear(config.width, config.inner_width, rngs=rngs)
        self.down = Linear(config.inner_width, config.width, std=_residual_std(config), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Linear(nnx.Module):
    """`x @ kernel` in the kernel's dtype, `[..., d_in] -> [..., d_out]`. See Note [Dtypes]."""

    def __init__(self, d_in: int, d_out: int, *, std: float = 0.02, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (d_in, d_out), jnp.float32))

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...]
        # B and T as one dim: apart, XLA transposes an operand of the kernel's gradient, and on a CPU the
        # backward pass of the MLP takes twice as long (fp32, [16, 256, 192], F 640, 2 cores, JAX 0.10.2).
        y = x.reshape(-1, x.shape[-1]).astype(kernel.dtype) @ kernel
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


def _residual_std(config: Config) -> float:
    """Smaller by the root of the 2L sums, so that the last block's input does not grow with depth (GPT-2)."""
    return 0.02 / math.sqrt(2 * config.num_layers)


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per token for each pair of a head, `[h/2]` fp32, slowed as `rope_scaling` says."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_size, 2) / config.head_size)
    if (s := config.rope_scaling) is not None:
        turns = s.original_max_position_embeddings * frequency / (2 * np.pi)
        kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
        frequency = frequency * (kept + (1 - kept) / s.factor)
    return frequency.astype(np.float32)


def rope_tables(config: Config, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines for `positions [B, T]`, each `[B, T, h/2]` fp32 whatever the compute dtype."""
    angle = positions[:, :, None].astype(jnp.float32) * rope_frequencies(config)[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, rope: tuple[Array, Array]) -> Array:
    """Turn each head of `x [B, T, heads, h]`; a pair is entry i of both halves, as Hugging Face stores it."""
    cos, sin = (table[:, :, None, :].astype(wide(x.dtype)) for table in rope)
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


NAMES: dict[str, tuple[str, bool]] = {
    "embed.table": ("model.embed_tokens.weight", False),
    "blocks.{}.attn_norm.scale": ("model.layers.{}.input_layernorm.weight", False),
    "blocks.{}.attn.q.kernel": ("model.layers.{}.self_attn.q_proj.weight", True),
    "blocks.{}.attn.k.kernel": ("model.layers.{}.self_attn.k_proj.weight", True),
    "blocks.{}.attn.v.kernel": ("model.layers.{}.self_attn.v_proj.weight", True),
    "blocks.{}.attn.o.kernel": ("model.layers.{}.self_attn.o_proj.weight", True),
    "blocks.{}.mlp_norm.scale": ("model.layers.{}.post_attention_layernorm.weight", False),
    "blocks.{}.mlp.gate.kernel": ("model.layers.{}.mlp.gate_proj.weight", True),
    "blocks.{}.mlp.up.kernel": ("model.layers.{}.mlp.up_proj.weight", True),
    "blocks.{}.mlp.down.kernel": ("model.layers.{}.mlp.down_proj.weight", True),
    "norm.scale": ("model.norm.weight", False),
    "head.table": ("lm_head.weight", False),  # a tied model has none
}
"""Our path -> Hugging Face name, and whether the matrix is stored transposed; `{}` is the layer."""

_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "inner_width": "intermediate_size",
}
_HF_KNOWN = {  # what this model computes; a config.json that says otherwise describes another one
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
}


def config_from(hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json`, its RoPE spelled as in Llama 3 (`rope_theta`, `rope_scaling`) or as
    transformers 5 does (`rope_parameters`).

    Raises: ValueError for a field that is missing, NotImplementedError for one that asks for another model.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    said = {**hf, **rope, "rope_type": rope.get("rope_type") or rope.get("type")}  # "type" until 2024
    for key, known in _HF_KNOWN.items():
        if said.get(key) is not None and said[key] not in known:
            raise NotImplementedError(
                f"config.json: {key} is {said[key]!r}; models/llama.py computes without it or with one of "
                f"{list(known)}. Use a checkpoint whose config.json says so."
            )
    is_scaled = said["rope_type"] == "llama3"
    rope_fields = [f.name for f in fields(RopeScaling)] if is_scaled else []
    if missing := [key for key in [*_HF_FIELDS.values(), *rope_fields] if key not in said]:
        raise ValueError(f"config.json lacks {', '.join(missing)}. Give the file as its checkpoint has it.")
    return Config(
        **{ours: said[theirs] for ours, theirs in _HF_FIELDS.items()},
        num_kv_heads=said.get("num_key_value_heads") or said["num_attention_heads"],
        head_dim=said.get("head_dim"),
        rope_theta=said.get("rope_theta", 10_000.0),
        rope_scaling=RopeScaling(**{name: said[name] for name in rope_fields}) if is_scaled else None,
        norm_eps=said.get("rms_norm_eps", 1e-6),
        tied=said.get("tie_word_embeddings", False),
    )
