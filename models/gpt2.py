"""GPT-2 in Flax NNX, and how Hugging Face names its parts.

Owns the architecture (learned positions, LayerNorm, biases everywhere, GELU, a head that is the embedding) and what
follows from it (`presets`, `config_from`, `config_to`, `flops`, `NAMES`). Dims as in llama.py; dtypes follow the
weights: Note [Dtypes] in layers.py. Dropout, which the published configurations ask for, is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jfsdp.stack import Stack
from jfsdp.vocab import Embed, Head

from .attention import IMPLEMENTATIONS, attend_cached, attention, document_starts
from .config_json import check_config
from .layers import LayerNorm, Linear


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a GPT-2; the defaults are that of the smallest published one."""

    vocab_size: int = 50_257
    """Token ids run from 0 to this, exclusive."""
    width: int = 768
    """Numbers per token between blocks (D)."""
    num_layers: int = 12
    """Blocks (L)."""
    num_heads: int = 12
    """Heads (H)."""
    inner_width: int | None = None
    """Width inside the MLP (F); None takes 4 times the width."""
    max_positions: int = 1024
    """Longest row: each position has a learned vector."""
    norm_eps: float = 1e-5
    """Added to the variance in LayerNorm."""
    attention: str = "auto"
    """auto, xla, cudnn or chunked; see models/attention.py."""
    query_chunk: int = 256
    """Queries per chunk of chunked attention."""

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads

    @property
    def inner_size(self) -> int:
        return 4 * self.width if self.inner_width is None else self.inner_width

    def __post_init__(self):
        for name in "vocab_size width num_layers num_heads inner_size max_positions query_chunk".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a count, so use 1 or more.")
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} does not split into {self.num_heads} heads. Use a multiple of {self.num_heads}."
            )
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention is {self.attention!r}; use one of {', '.join(IMPLEMENTATIONS)}.")


presets: dict[str, Config] = {
    "gpt2": Config(),
    "gpt2-medium": Config(width=1024, num_layers=24, num_heads=16),
    "gpt2-large": Config(width=1280, num_layers=36, num_heads=20),
    "gpt2-xl": Config(width=1600, num_layers=48, num_heads=25),
    "gpt2-tiny": Config(vocab_size=256, width=96, num_layers=3, num_heads=6, query_chunk=64),  # over bytes
}


def build(config: Config, *, rngs: nnx.Rngs, **stack: Any) -> "GPT2":
    """A GPT-2 with fresh weights; `stack` goes to `jfsdp.stack.Stack` (`remat=...` and the like)."""
    return GPT2(config, rngs=rngs, **stack)


def flops(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token: `6 N + 12 L D T`, counted as in llama.py."""
    c = config
    layer = 4 * c.width**2 + 2 * c.width * c.inner_size
    return 6 * (c.num_layers * layer + c.width * c.vocab_size) + 12 * c.num_layers * c.width * seq_len


class GPT2(nnx.Module):
    """Decoder-only transformer over packed rows of tokens; each document counts its positions from 0."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, **stack: Any):
        self.config = c = config
        init = nnx.initializers.normal(0.02)
        self.embed = Embed(c.vocab_size, c.width, rngs=rngs, init=init)
        self.positions = nnx.Param(nnx.initializers.normal(0.01)(rngs.params(), (c.max_positions, c.width)))
        self.blocks = Stack(lambda rngs: Block(c, rngs=rngs), c.num_layers, rngs=rngs, **stack)
        self.norm = LayerNorm(c.width, c.norm_eps)
        self.head = Head(c.vocab_size, c.width, rngs=rngs, table=self.embed.table)

    def __call__(self, tokens: Array, *, segments: Array | None = None, positions: Array | None = None) -> Array:
        """Logits `[B, T, V]` for the token after each of `tokens [B, T]`; the rest as for `Llama`."""
        return self.head(self._hidden(tokens, segments, positions))

    def loss(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> tuple[Array, Array]:
        """Sum of `weights * -log p(target)` in nats, and sum of the weights, all `[B, T]`."""
        h = self._hidden(tokens, segments, positions)
        return self.head.loss(h, targets, weights), jnp.sum(weights)

    def new_cache(self, rows: int, length: int, dtype: DTypeLike = jnp.float32) -> tuple[Array, Array]:
        """Room for the keys and values of `length` tokens of each row, `[L, rows, length, H, h]` each."""
        self._check_length(length)
        shape = (self.config.num_layers, rows, length, self.config.num_heads, self.config.head_size)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def decode(self, tokens: Array, cache, starts: Array, offset: Array) -> tuple[Array, tuple[Array, Array]]:
        """Logits `[B, V]` for what follows `tokens [B, T]` at `offset..` of rows that begin at `starts [B, 1]`."""
        index = offset + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x = self._embed(tokens, jnp.maximum(index - starts, 0))
        x, cache = self.blocks.scan("decode", x, cache, jnp.broadcast_to(starts, tokens.shape), offset)
        return self.head(self.norm(x)[:, -1]), cache

    def _hidden(self, tokens: Array, segments: Array | None, positions: Array | None) -> Array:
        self._check_length(tokens.shape[1])
        starts = None if segments is None else document_starts(segments)
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = positions if starts is None else positions - starts
        return self.norm(self.blocks(self._embed(tokens, positions), starts))

    def _embed(self, tokens: Array, positions: Array) -> Array:
        x = self.embed(tokens)
        return x + jnp.broadcast_to(self.positions[...][positions], x.shape).astype(x.dtype)

    def _check_length(self, length: int) -> None:
        if length > self.config.max_positions:
            raise ValueError(
                f"a row of {length} tokens is longer than the {self.config.max_positions} positions that this model "
                f"has learned. Use rows of at most {self.config.max_positions}."
            )


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to its input: `[B, T, D] -> [B, T, D]`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = c = config
        residual = 0.02 / math.sqrt(2 * c.num_layers)
        self.attn_norm = LayerNorm(c.width, c.norm_eps)
        self.qkv = Linear(c.width, 3 * c.width, bias=True, rngs=rngs)
        self.o = Linear(c.width, c.width, std=residual, bias=True, rngs=rngs)
        self.mlp_norm = LayerNorm(c.width, c.norm_eps)
        self.up = Linear(c.width, c.inner_size, bias=True, rngs=rngs)
        self.down = Linear(c.inner_size, c.width, std=residual, bias=True, rngs=rngs)

    def __call__(self, x: Array, starts: Array | None) -> Array:
        c = self.config
        out = attention(*self._project(x), starts, implementation=c.attention, chunk=c.query_chunk)
        return self._finish(x, out)

    def decode(self, x: Array, cache, starts: Array, offset: Array) -> tuple[Array, tuple[Array, Array]]:
        """The same for tokens `offset..` of rows whose earlier keys and values `[B, S, H, h]` are in `cache`."""
        out, cache = attend_cached(*self._project(x), cache, starts, offset)
        return self._finish(x, out), cache

    def _project(self, x: Array) -> list[Array]:
        qkv = self.qkv(self.attn_norm(x))
        return [part.reshape(*x.shape[:2], -1, self.config.head_size) for part in jnp.split(qkv, 3, axis=-1)]

    def _finish(self, x: Array, out: Array) -> Array:
        x = x + self.o(out.reshape(x.shape)).astype(x.dtype)
        h = jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=True)
        return x + self.down(h).astype(x.dtype)


NAMES: dict[str, tuple[str, bool]] = {
    "embed.table": ("transformer.wte.weight", False),
    "positions": ("transformer.wpe.weight", False),
    "blocks.{}.attn_norm.scale": ("transformer.h.{}.ln_1.weight", False),
    "blocks.{}.attn_norm.bias": ("transformer.h.{}.ln_1.bias", False),
    "blocks.{}.qkv.kernel": ("transformer.h.{}.attn.c_attn.weight", False),  # GPT-2 stores matrices as we do
    "blocks.{}.qkv.bias": ("transformer.h.{}.attn.c_attn.bias", False),
    "blocks.{}.o.kernel": ("transformer.h.{}.attn.c_proj.weight", False),
    "blocks.{}.o.bias": ("transformer.h.{}.attn.c_proj.bias", False),
    "blocks.{}.mlp_norm.scale": ("transformer.h.{}.ln_2.weight", False),
    "blocks.{}.mlp_norm.bias": ("transformer.h.{}.ln_2.bias", False),
    "blocks.{}.up.kernel": ("transformer.h.{}.mlp.c_fc.weight", False),
    "blocks.{}.up.bias": ("transformer.h.{}.mlp.c_fc.bias", False),
    "blocks.{}.down.kernel": ("transformer.h.{}.mlp.c_proj.weight", False),
    "blocks.{}.down.bias": ("transformer.h.{}.mlp.c_proj.bias", False),
    "norm.scale": ("transformer.ln_f.weight", False),
    "norm.bias": ("transformer.ln_f.bias", False),
    "head.table": ("lm_head.weight", False),
}
"""Our path -> Hugging Face name, and whether the matrix is stored transposed; `{}` is the layer."""
TIED = {"head.table": "embed.table"}
"""A parameter that a tied model lacks, and the one it uses instead."""
PREFIX = "transformer."
"""What the names of some checkpoints go without."""
IGNORED = ("*h.*.attn.bias", "*h.*.attn.masked_bias")
"""What checkpoints hold that is no weight: the causal mask."""

_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
}
MODEL_TYPES = ("gpt2",)
"""Of a `config.json`."""
_HF_KNOWN = {  # what this model computes; a config.json that says otherwise describes another one
    "model_type": MODEL_TYPES,
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (),
}


def config_from(hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json`; what it says of dropout is left out.

    Raises: ValueError for a field that is missing, NotImplementedError for one that asks for another model.
    """
    said = {**hf, "model_type": hf.get("model_type") or "none"}  # a file that does not say is taken for a Llama's
    check_config(said, _HF_KNOWN, _HF_FIELDS.values(), family="models/gpt2.py")
    return Config(
        **{ours: hf[theirs] for ours, theirs in _HF_FIELDS.items()},
        inner_width=hf.get("n_inner"),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
    )


def config_to(config: Config) -> dict[str, Any]:
    """The `config.json` that `config_from` reads as `config`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in _HF_FIELDS.items()},
        "n_inner": config.inner_width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": True,
    }
