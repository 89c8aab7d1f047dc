"""T5 in Flax NNX: an encoder and a decoder of unequal stacks, cross attention, one embedding for both.

Owns the architecture (relative positions by buckets, RMSNorm, scores that are not scaled) and what follows from it
(`presets`, `config_from`, `config_to`, `flops`, `NAMES`). The encoder's output and the position biases reach every
block of a `Stack` as shared arguments, and their gradients are summed over its layers. Dims as in llama.py, and `S`
for source tokens; dtypes follow the weights: Note [Dtypes] in layers.py. Dropout is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jfsdp.stack import Stack
from jfsdp.vocab import Embed, Head

from .attention import wide
from .config_json import check_config
from .layers import Linear, RMSNorm


@dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a T5; the defaults are that of `t5-small`."""

    vocab_size: int = 32_128
    """Token ids run from 0 to this, exclusive."""
    width: int = 512
    """Numbers per token between blocks (D)."""
    num_layers: int = 6
    """Blocks of the encoder."""
    num_decoder_layers: int = 6
    """Blocks of the decoder."""
    num_heads: int = 8
    """Heads (H)."""
    head_size: int = 64
    """Width of a head (h), whatever width / num_heads is."""
    inner_width: int = 2048
    """Width inside the MLP (F)."""
    gated: bool = False
    """Whether the MLP is `down(gelu(gate(x)) * up(x))` (version 1.1) and not `down(relu(inner(x)))`."""
    buckets: int = 32
    """Distances between tokens that have their own bias; half of them are exact, half are ranges."""
    max_distance: int = 128
    """Tokens from which on distances share the last bucket."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """Whether the head uses the embedding's table, on outputs divided by the root of the width."""

    def __post_init__(self):
        counts = "vocab_size width num_layers num_decoder_layers num_heads head_size inner_width"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a count, so use 1 or more.")
        if self.buckets < 4 or self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"buckets is {self.buckets} and max_distance {self.max_distance}; use an even number of 4 or more "
                "buckets, and more than half as large a distance. T5 uses 32 and 128."
            )


_V1_1 = dict(gated=True, tied=False)
presets: dict[str, Config] = {
    # As published: T5 and T5 version 1.1.
    "t5-small": Config(),
    "t5-base": Config(width=768, num_layers=12, num_decoder_layers=12, num_heads=12, inner_width=3072),
    "t5-v1.1-small": Config(**_V1_1, num_layers=8, num_decoder_layers=8, num_heads=6, inner_width=1024),
    "t5-v1.1-base": Config(**_V1_1, width=768, num_layers=12, num_decoder_layers=12, num_heads=12, inner_width=2048),
}


def build(config: Config, *, rngs: nnx.Rngs, **stack: Any) -> "T5":
    """A T5 with fresh weights; `stack` goes to `jfsdp.stack.Stack` (`remat=...` and the like)."""
    return T5(config, rngs=rngs, **stack)


def flops(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token of the target, with a source as long, counted as in llama.py."""
    c, heads = config, config.num_heads * config.head_size
    attention, mlp = 4 * c.width * heads, (3 if c.gated else 2) * c.width * c.inner_width
    encoder, decoder = c.num_layers * (attention + mlp), c.num_decoder_layers * (2 * attention + mlp)
    scores = (c.num_layers + 2 * c.num_decoder_layers) * heads * seq_len
    return 6 * (encoder + decoder + c.width * c.vocab_size) + 12 * scores


class T5(nnx.Module):
    """Encoder-decoder transformer: reads a source, predicts a target."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs, **stack: Any):
        self.config = c = config
        init = nnx.initializers.normal(1.0)
        bias = nnx.initializers.normal(c.width**-0.5)
        self.embed = Embed(c.vocab_size, c.width, rngs=rngs, init=init)
        self.encoder_bias = nnx.Param(bias(rngs.params(), (c.buckets, c.num_heads)))
        self.encoder = Stack(lambda rngs: EncoderBlock(c, rngs=rngs), c.num_layers, rngs=rngs, **stack)
        self.encoder_norm = RMSNorm(c.width, c.norm_eps)
        self.decoder_bias = nnx.Param(bias(rngs.params(), (c.buckets, c.num_heads)))
        self.decoder = Stack(lambda rngs: DecoderBlock(c, rngs=rngs), c.num_decoder_layers, rngs=rngs, **stack)
        self.decoder_norm = RMSNorm(c.width, c.norm_eps)
        self.head = Head(c.vocab_size, c.width, rngs=rngs, init=init, table=self.embed.table if c.tied else None)

    def __call__(self, source: Array, tokens: Array, *, source_mask: Array | None = None) -> Array:
        """Logits `[B, T, V]` for the token after each of `tokens [B, T]`, given `source [B, S]`.

        tokens: what the decoder has read: the target behind a start token (0 in the published models).
        source_mask: `[B, S]`, 0 on padding; None when there is none.
        """
        return self.head(self._hidden(source, tokens, source_mask))

    def loss(
        self, source: Array, tokens: Array, targets: Array, weights: Array, *, source_mask: Array | None = None
    ) -> tuple[Array, Array]:
        """Sum of `weights * -log p(target)` in nats, and sum of the weights; `[B, T]` but for the source."""
        h = self._hidden(source, tokens, source_mask)
        return self.head.loss(h, targets, weights), jnp.sum(weights)

    def encode(self, source: Array, *, source_mask: Array | None = None) -> Array:
        """What the decoder sees of `source [B, S]`: `[B, S, D]`."""
        S = source.shape[1]
        bias = _position_bias(self.encoder_bias[...], S, self.config, both_ways=True)
        return self.encoder_norm(self.encoder(self.embed(source), _masked(bias, source_mask)))

    def _hidden(self, source: Array, tokens: Array, source_mask: Array | None) -> Array:
        memory = self.encode(source, source_mask=source_mask)
        T = tokens.shape[1]
        bias = _position_bias(self.decoder_bias[...], T, self.config, both_ways=False)
        bias = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], bias, -1e30)
        across = _masked(jnp.zeros((1, 1, 1, source.shape[1]), bias.dtype), source_mask)
        x = self.decoder_norm(self.decoder(self.embed(tokens), bias, memory, across))
        return x * self.config.width**-0.5 if self.config.tied else x


class EncoderBlock(nnx.Module):
    """Attention and MLP, each behind a norm and added to its input: `[B, S, D] -> [B, S, D]`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x: Array, bias: Array) -> Array:
        h = self.attn_norm(x)
        x = x + self.attn(h, h, bias).astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype)


class DecoderBlock(nnx.Module):
    """As `EncoderBlock`, with attention to the encoder's output between the two."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.cross_norm = RMSNorm(config.width, config.norm_eps)
        self.cross = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x: Array, bias: Array, memory: Array, across: Array) -> Array:
        h = self.attn_norm(x)
        x = x + self.attn(h, h, bias).astype(x.dtype)
        x = x + self.cross(self.cross_norm(x), memory, across).astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype)


class Attention(nnx.Module):
    """Attention of `x [B, T, D]` to `memory [B, S, D]` with biased scores, which are not scaled."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = c = config
        heads = c.num_heads * c.head_size
        self.q = Linear(c.width, heads, std=(c.width * c.head_size) ** -0.5, rngs=rngs)
        self.k = Linear(c.width, heads, std=c.width**-0.5, rngs=rngs)
        self.v = Linear(c.width, heads, std=c.width**-0.5, rngs=rngs)
        self.o = Linear(heads, c.width, std=heads**-0.5, rngs=rngs)

    def __call__(self, x: Array, memory: Array, bias: Array) -> Array:
        h = self.config.head_size
        q = self.q(x).reshape(*x.shape[:2], -1, h)
        k, v = (f(memory).reshape(*memory.shape[:2], -1, h) for f in (self.k, self.v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide(q.dtype))
        probabilities = jax.nn.softmax(scores + bias.astype(scores.dtype)).astype(v.dtype)
        return self.o(jnp.einsum("bhts,bshd->bthd", probabilities, v).reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    """`down(relu(inner(x)))`, or `down(gelu(gate(x)) * up(x))` where the configuration is gated."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c, std = config, config.width**-0.5
        self.inner = None if c.gated else Linear(c.width, c.inner_width, std=std, rngs=rngs)
        self.gate = Linear(c.width, c.inner_width, std=std, rngs=rngs) if c.gated else None
        self.up = Linear(c.width, c.inner_width, std=std, rngs=rngs) if c.gated else None
        self.down = Linear(c.inner_width, c.width, std=c.inner_width**-0.5, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        if self.inner is not None:
            return self.down(jax.nn.relu(self.inner(x)))
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


def _position_bias(table: Array, tokens: int, config: Config, *, both_ways: bool) -> Array:
    """`table [buckets, H]` looked up by distance, `[1, H, T, T]` in fp32 or wider."""
    buckets = _bucket_of(tokens, config.buckets, config.max_distance, both_ways)
    return jnp.moveaxis(table[buckets], -1, 0)[None].astype(wide(table.dtype))


def _bucket_of(tokens: int, buckets: int, max_distance: int, both_ways: bool) -> np.ndarray:
    """The bucket of each (query, key), `[T, T]`: near distances exactly, far ones by their logarithm (T5)."""
    distance = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    if both_ways:
        buckets //= 2
        start, distance = buckets * (distance > 0), np.abs(distance)
    else:
        start, distance = 0, np.maximum(-distance, 0)
    exact = buckets // 2
    far = np.log(np.maximum(distance, 1) / exact, dtype=np.float32) / math.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + far.astype(np.int32), buckets - 1)
    return start + np.where(distance < exact, distance, far)


def _masked(bias: Array, mask: Array | None) -> Array:
    return bias if mask is None else jnp.where(mask[:, None, None, :] != 0, bias, -1e30)


def _names(stack: str, parts: dict[str, tuple[int, str]], mlp: int) -> dict[str, tuple[str, bool]]:
    out: dict[str, tuple[str, bool]] = {}
    for part, (layer, theirs) in parts.items():
        block = f"{stack}.block.{{}}.layer.{layer}"
        out[f"{stack}.{{}}.{part}_norm.scale"] = (f"{block}.layer_norm.weight", False)
        out |= {f"{stack}.{{}}.{part}.{x}.kernel": (f"{block}.{theirs}.{x}.weight", True) for x in "qkvo"}
    block = f"{stack}.block.{{}}.layer.{mlp}"
    out[f"{stack}.{{}}.mlp_norm.scale"] = (f"{block}.layer_norm.weight", False)
    for ours, theirs in dict(inner="wi", gate="wi_0", up="wi_1", down="wo").items():
        out[f"{stack}.{{}}.mlp.{ours}.kernel"] = (f"{block}.DenseReluDense.{theirs}.weight", True)
    out[f"{stack}_bias"] = (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", False)
    out[f"{stack}_norm.scale"] = (f"{stack}.final_layer_norm.weight", False)
    return out


NAMES: dict[str, tuple[str, bool]] = {
    "embed.table": ("shared.weight", False),
    **_names("encoder", {"attn": (0, "SelfAttention")}, mlp=1),
    **_names("decoder", {"attn": (0, "SelfAttention"), "cross": (1, "EncDecAttention")}, mlp=2),
    "head.table": ("lm_head.weight", False),
}
"""Our path -> Hugging Face name, and whether the matrix is stored transposed; `{}` is the layer. A model has those that
its configuration asks for."""
TIED = {"head.table": "embed.table"}
"""A parameter that a tied model lacks, and the one it uses instead."""
SHARED = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
"""Other names that checkpoints give to a tensor."""
PREFIX = ""
"""What the names of some checkpoints go without."""
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
"""What checkpoints hold that is no weight: a bias that the first version stored and never used."""
READS_PAIRS = True
"""A loss needs a source beside the tokens, so packed text does not train it."""

_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "width": "d_model",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "head_size": "d_kv",
    "inner_width": "d_ff",
}
MODEL_TYPES = ("t5",)
"""Of a `config.json`."""
_HF_KNOWN = {  # what this model computes; a config.json that says otherwise describes another one
    "model_type": MODEL_TYPES,
    "feed_forward_proj": ("relu", "gated-gelu"),
    "is_encoder_decoder": (True,),
    "quantization_config": (),
}


def config_from(hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json`; what it says of dropout is left out.

    Raises: ValueError for a field that is missing, NotImplementedError for one that asks for another model.
    """
    said = {**hf, "model_type": hf.get("model_type") or "none"}  # a file that does not say is taken for a Llama's
    check_config(said, _HF_KNOWN, _HF_FIELDS.values(), family="models/t5.py")
    # transformers 5 ties every T5 and says in another field whether outputs are divided, as tied ones are.
    tied = hf.get("tie_word_embeddings", True) and hf.get("scale_decoder_outputs", True)
    return Config(
        **{ours: hf[theirs] for ours, theirs in _HF_FIELDS.items()},
        num_decoder_layers=hf.get("num_decoder_layers") or hf["num_layers"],
        gated=hf.get("feed_forward_proj") == "gated-gelu",
        buckets=hf.get("relative_attention_num_buckets", 32),
        max_distance=hf.get("relative_attention_max_distance", 128),
        norm_eps=hf.get("layer_norm_epsilon", 1e-6),
        tied=tied,
    )


def config_to(config: Config) -> dict[str, Any]:
    """The `config.json` that `config_from` reads as `config`."""
    c = config
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        **{theirs: getattr(c, ours) for ours, theirs in _HF_FIELDS.items()},
        "num_decoder_layers": c.num_decoder_layers,
        "feed_forward_proj": "gated-gelu" if c.gated else "relu",
        "relative_attention_num_buckets": c.buckets,
        "relative_attention_max_distance": c.max_distance,
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
