"""Llama and what computes like it (Mistral, Qwen2, Qwen3, Qwen3-MoE) in Flax NNX, and how Hugging Face names parts.

Owns the architecture and what follows from it (`presets`, `config_from`, `config_to`, `flops`, `NAMES`). Sharding is
not here: blocks live in a `Stack`, the vocabulary in `Embed` and `Head`, and these decide where weights lie and
when they are gathered. Without a mesh this is an ordinary NNX model.

Dims: `L B T D F V` layers, batch, tokens, width, inner width, vocabulary; `H K h` query heads, key/value
heads, head width.

Mistral adds a sliding window, Qwen2 biases on queries, keys and values, Qwen3 norms on queries and keys, Qwen3-MoE
experts in the place of the MLP. Dtypes follow the weights: Note [Dtypes] in layers.py.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
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
from .experts import EXPERTS_NEED, ExpertOptions, Experts, Load, balance_loss, experts_from, experts_to
from .layers import Linear, RMSNorm
from .rope import SCALINGS, LinearScaling, Llama3Scaling, YarnScaling, rope_tables, rotate


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
    """Width inside the MLP, or inside each expert (F)."""
    rope_theta: float = 500_000.0
    """Base of the RoPE wavelengths."""
    rope_scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    """None leaves the wavelengths as they are."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Whether the head uses the embedding's table."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases (Qwen2)."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normed before RoPE (Qwen3)."""
    experts: ExpertOptions | None = None
    """A mixture of experts in the place of every MLP (Qwen3-MoE)."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included (Mistral); None sees all before it."""
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
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; use 1 or more, or None to see every token.")
        if self.attention not in IMPLEMENTATIONS:
            raise ValueError(f"attention is {self.attention!r}; use one of {', '.join(IMPLEMENTATIONS)}.")


_SMALL = dict(query_chunk=64)  # scores of 64 queries stay in a CPU's cache
_LLAMA3 = dict(num_kv_heads=8, vocab_size=128_256)
_STRETCHED = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_QWEN = dict(rope_theta=1_000_000.0, norm_eps=1e-6)
_QWEN2 = dict(qkv_bias=True)
_QWEN3 = dict(qk_norm=True, num_kv_heads=8, head_dim=128, vocab_size=151_936)
presets: dict[str, Config] = {
    # Over bytes, so they need no tokenizer.
    "llama-tiny": Config(**_SMALL, width=96, num_layers=3, num_heads=6, num_kv_heads=2, inner_width=256),
    "llama-2m": Config(**_SMALL),
    "llama-30m": Config(**_SMALL, width=512, num_layers=10, num_heads=8, num_kv_heads=4, inner_width=1408),
    "moe-tiny": Config(**_SMALL, width=96, num_layers=3, num_heads=6, num_kv_heads=2, inner_width=64, qk_norm=True,
                       experts=ExpertOptions(count=8, per_token=2, balance=0.01)),
    # For token ids of a tokenizer with 32,000.
    "llama-125m": Config(vocab_size=32_000, width=768, num_layers=16, num_heads=12, num_kv_heads=4,
                         inner_width=2048, tied=True),
    # As published: Llama 3.2 1B, 3.1 8B, 3.1 70B.
    "llama3-1b": Config(**_LLAMA3, width=2048, num_layers=16, num_heads=32, inner_width=8192, tied=True,
                        rope_scaling=Llama3Scaling(factor=32.0, **_STRETCHED)),
    "llama3-8b": Config(**_LLAMA3, width=4096, num_layers=32, num_heads=32, inner_width=14_336,
                        rope_scaling=Llama3Scaling(factor=8.0, **_STRETCHED)),
    "llama3-70b": Config(**_LLAMA3, width=8192, num_layers=80, num_heads=64, inner_width=28_672,
                         rope_scaling=Llama3Scaling(factor=8.0, **_STRETCHED)),
    # As published: Mistral 7B v0.1, Qwen2.5 0.5B and 7B, Qwen3 0.6B, 8B and 30B-A3B.
    "mistral-7b": Config(vocab_size=32_000, width=4096, num_layers=32, num_heads=32, num_kv_heads=8,
                         inner_width=14_336, rope_theta=10_000.0, sliding_window=4096),
    "qwen2.5-0.5b": Config(**_QWEN, **_QWEN2, width=896, num_layers=24, num_heads=14, num_kv_heads=2, inner_width=4864,
                           vocab_size=151_936, tied=True),
    "qwen2.5-7b": Config(**_QWEN, **_QWEN2, width=3584, num_layers=28, num_heads=28, num_kv_heads=4,
                         inner_width=18_944, vocab_size=152_064),
    "qwen3-0.6b": Config(**_QWEN, **_QWEN3, width=1024, num_layers=28, num_heads=16, inner_width=3072, tied=True),
    "qwen3-8b": Config(**_QWEN, **_QWEN3, width=4096, num_layers=36, num_heads=32, inner_width=12_288),
    "qwen3-30b-a3b": Config(**_QWEN, **{**_QWEN3, "num_kv_heads": 4}, width=2048, num_layers=48, num_heads=32,
                            inner_width=768, experts=ExpertOptions(count=128, per_token=8)),
}


def build(config: Config, *, rngs: nnx.Rngs, **stack: Any) -> "Llama":
    """A Llama with fresh weights; `stack` goes to `jfsdp.stack.Stack` (`remat=...` and the like)."""
    return Llama(config, rngs=rngs, **stack)


def flops(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token: forward and backward, nothing recomputed.

    `6 N + 12 L H h T`: N weights in matmuls (the embedding's look-up and the norms are none), 2 operations
    each, three times over as the backward pass costs two forward ones; likewise T keys per query, once for
    scores and once for values. The half that a causal kernel can skip is counted, as in published figures of
    utilisation (PaLM, appendix B). Of experts, those that the token goes through.
    """
    c, heads = config, config.num_heads * config.head_size
    mlps, router = (1, 0) if c.experts is None else (c.experts.per_token, c.experts.count)
    layer = 2 * c.width * (heads + c.num_kv_heads * c.head_size) + c.width * (3 * mlps * c.inner_width + router)
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
        return self.head(self._hidden(tokens, segments, positions)[0])

    def loss(
        self, tokens: Array, targets: Array, weights: Array, *,
        segments: Array | None = None, positions: Array | None = None,
    ) -> tuple:
        """Sum of `weights * -log p(target)` in nats, and sum of the weights; their ratio is the mean loss. With experts
        the balance loss beside them, over the same tokens.

        All are `[B, T]`. Logits are never formed whole. Where the weight is 0 the target may be any valid id.
        """
        options = self.config.experts
        counted = weights if options is not None and options.balance else None
        h, load = self._hidden(tokens, segments, positions, counted)
        out = self.head.loss(h, targets, weights), jnp.sum(weights)
        return out if load is None else (*out, {"balance": balance_loss(load, weights, options)})

    def _hidden(
        self, tokens: Array, segments: Array | None, positions: Array | None, counted: Array | None = None
    ) -> tuple[Array, Load | None]:
        """`[B, T, D]` for the head, and what the routers did with the tokens that are `counted`."""
        if segments is not None and segments.shape != tokens.shape:
            raise ValueError(
                f"segments have shape {segments.shape} and tokens {tokens.shape}; give each token its "
                f"document's number (0 for padding), or leave segments out where a row is one document."
            )
        starts = None if segments is None else document_starts(segments)
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if positions is None:
            positions = index if starts is None else index - starts
        starts = self._window(starts, index)
        x, rope = self.embed(tokens), rope_tables(self.config, positions)
        if counted is None:
            return self.norm(self.blocks(x, rope, starts)), None
        x, load = self.blocks.scan("routed", x, None, rope, starts, counted)
        return self.norm(x), load

    def new_cache(self, rows: int, length: int, dtype: DTypeLike = jnp.float32) -> tuple[Array, Array]:
        """Room for the keys and values of `length` tokens of each row, `[L, rows, length, K, h]` each."""
        c = self.config
        shape = (c.num_layers, rows, length, c.num_kv_heads, c.head_size)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def decode(
        self, tokens: Array, cache: tuple[Array, Array], starts: Array, offset: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Logits `[B, V]` for what follows `tokens [B, T]`, which stand at `offset..` of their rows; and the cache.

        starts: `[B, 1]`, where each row begins; what lies before is padding.
        """
        index = offset + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rope = rope_tables(self.config, jnp.maximum(index - starts, 0))
        starts = self._window(jnp.broadcast_to(starts, tokens.shape), index)
        x, cache = self.blocks.scan("decode", self.embed(tokens), cache, rope, starts, offset)
        return self.head(self.norm(x)[:, -1]), cache

    def _window(self, starts: Array | None, index: Array) -> Array | None:
        """The first token that each token sees, under a sliding window."""
        if (window := self.config.sliding_window) is None:
            return starts
        first = jnp.maximum(index - window + 1, 0)
        return first if starts is None else jnp.maximum(starts, first)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to its input: `[B, T, D] -> [B, T, D]`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        c, std = config, _residual_std(config)
        self.mlp = (
            Mlp(c, rngs=rngs) if c.experts is None else Experts(c.width, c.inner_width, c.experts, std=std, rngs=rngs)
        )

    def __call__(self, x: Array, rope: tuple[Array, Array], starts: Array | None = None) -> Array:
        x = x + self.attn(self.attn_norm(x), rope, starts).astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype)

    def routed(self, x: Array, _, rope: tuple[Array, Array], starts: Array | None, counted: Array):
        """The same, and what the router did with the tokens that are `counted [B, T]`."""
        x = x + self.attn(self.attn_norm(x), rope, starts).astype(x.dtype)
        out, load = self.mlp.routed(self.mlp_norm(x), counted)
        return x + out.astype(x.dtype), load

    def decode(self, x: Array, cache, rope: tuple[Array, Array], starts: Array, offset: Array) -> tuple[Array, Any]:
        out, cache = self.attn.decode(self.attn_norm(x), cache, rope, starts, offset)
        x = x + out.astype(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).astype(x.dtype), cache


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = c = config
        q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
        self.q = Linear(c.width, q, bias=c.qkv_bias, rngs=rngs)
        self.k = Linear(c.width, kv, bias=c.qkv_bias, rngs=rngs)
        self.v = Linear(c.width, kv, bias=c.qkv_bias, rngs=rngs)
        self.q_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_size, c.norm_eps) if c.qk_norm else None
        self.o = Linear(q, c.width, std=_residual_std(c), rngs=rngs)

    def __call__(self, x: Array, rope: tuple[Array, Array], starts: Array | None) -> Array:
        c, (q, k, v) = self.config, self._project(x, rope)
        out = attention(q, k, v, starts, implementation=c.attention, chunk=c.query_chunk)
        return self.o(out.reshape(*x.shape[:2], -1))

    def decode(
        self, x: Array, cache: tuple[Array, Array], rope: tuple[Array, Array], starts: Array, offset: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """The same for tokens `offset..` of rows whose earlier keys and values `[B, S, K, h]` are in `cache`."""
        out, cache = attend_cached(*self._project(x, rope), cache, starts, offset)
        return self.o(out.reshape(*x.shape[:2], -1)), cache

    def _project(self, x: Array, rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        q, k, v = (f(x).reshape(*x.shape[:2], -1, self.config.head_size) for f in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v


class Mlp(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.inner_width, rngs=rngs)
        self.up = Linear(config.width, config.inner_width, rngs=rngs)
        self.down = Linear(config.inner_width, config.width, std=_residual_std(config), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


def _residual_std(config: Config) -> float:
    """Smaller by the root of the 2L sums, so that the last block's input does not grow with depth (GPT-2)."""
    return 0.02 / math.sqrt(2 * config.num_layers)


NAMES: dict[str, tuple[str, bool]] = {
    "embed.table": ("model.embed_tokens.weight", False),
    "blocks.{}.attn_norm.scale": ("model.layers.{}.input_layernorm.weight", False),
    "blocks.{}.attn.q.kernel": ("model.layers.{}.self_attn.q_proj.weight", True),
    "blocks.{}.attn.k.kernel": ("model.layers.{}.self_attn.k_proj.weight", True),
    "blocks.{}.attn.v.kernel": ("model.layers.{}.self_attn.v_proj.weight", True),
    "blocks.{}.attn.q.bias": ("model.layers.{}.self_attn.q_proj.bias", False),
    "blocks.{}.attn.k.bias": ("model.layers.{}.self_attn.k_proj.bias", False),
    "blocks.{}.attn.v.bias": ("model.layers.{}.self_attn.v_proj.bias", False),
    "blocks.{}.attn.q_norm.scale": ("model.layers.{}.self_attn.q_norm.weight", False),
    "blocks.{}.attn.k_norm.scale": ("model.layers.{}.self_attn.k_norm.weight", False),
    "blocks.{}.attn.o.kernel": ("model.layers.{}.self_attn.o_proj.weight", True),
    "blocks.{}.mlp_norm.scale": ("model.layers.{}.post_attention_layernorm.weight", False),
    "blocks.{}.mlp.gate.kernel": ("model.layers.{}.mlp.gate_proj.weight", True),
    "blocks.{}.mlp.up.kernel": ("model.layers.{}.mlp.up_proj.weight", True),
    "blocks.{}.mlp.down.kernel": ("model.layers.{}.mlp.down_proj.weight", True),
    "blocks.{}.mlp.router": ("model.layers.{}.mlp.gate.weight", True),
    "blocks.{}.mlp.gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", True),
    "blocks.{}.mlp.up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", True),
    "blocks.{}.mlp.down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", True),
    "norm.scale": ("model.norm.weight", False),
    "head.table": ("lm_head.weight", False),
}
"""Our path -> Hugging Face name, and whether the matrix is stored transposed; `{}` is the layer, a second one the
expert. A model has those that its configuration asks for."""
TIED = {"head.table": "embed.table"}
"""A parameter that a tied model lacks, and the one it uses instead."""
PREFIX = "model."
"""What the names of some checkpoints go without."""
IGNORED = ("*.rotary_emb.inv_freq",)
"""What checkpoints hold that is no weight."""

_HF_FIELDS = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "inner_width": "intermediate_size",
}
_HF_WIDTH_OF_EXPERTS = {"inner_width": "moe_intermediate_size"}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Of a `config.json`."""
_HF_KNOWN = {  # what this model computes; a config.json that says otherwise describes another one
    "model_type": MODEL_TYPES,
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "rope_type": ("default", *SCALINGS),
    "mscale": (),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "quantization_config": (),
}


def config_from(hf: Mapping[str, Any]) -> Config:
    """Read a Hugging Face `config.json`, its RoPE spelled as in Llama 3 (`rope_theta`, `rope_scaling`) or as
    transformers 5 does (`rope_parameters`).

    Raises: ValueError for a field that is missing, NotImplementedError for one that asks for another model.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    hf = {"num_experts": hf["num_local_experts"], **hf} if "num_local_experts" in hf else hf  # as transformers 5 writes
    said = {**hf, **rope, "rope_type": rope.get("rope_type") or rope.get("type")}  # "type" until 2024
    scaling = SCALINGS.get(said["rope_type"])
    stretch = [] if scaling is None else fields(scaling)
    kind = said.get("model_type", "llama")
    is_mixture = kind == "qwen3_moe"
    names = {**_HF_FIELDS, **(_HF_WIDTH_OF_EXPERTS if is_mixture else {})}
    counts = [*names.values(), *(EXPERTS_NEED if is_mixture else ())]
    stretched = [f.name for f in stretch if f.default is MISSING]
    check_config(said, _HF_KNOWN, counts, stretched, family="models/llama.py")
    return Config(
        **{ours: said[theirs] for ours, theirs in names.items()},
        num_kv_heads=said.get("num_key_value_heads") or said["num_attention_heads"],
        head_dim=said.get("head_dim") or (128 if kind == "qwen3" else None),
        rope_theta=said.get("rope_theta", 10_000.0),
        rope_scaling=scaling and scaling(**{f.name: said[f.name] for f in stretch if said.get(f.name) is not None}),
        norm_eps=said.get("rms_norm_eps", 1e-6),
        tied=said.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=experts_from(said) if is_mixture else None,
        sliding_window=said.get("sliding_window", 4096) if kind == "mistral" else None,
    )


def config_to(config: Config) -> dict[str, Any]:
    """The `config.json` that `config_from` reads as `config`, spelled as on the hub.

    Raises: NotImplementedError for a combination that none of the published models is.
    """
    c = config
    asked = {"Qwen3": c.qk_norm, "Qwen2": c.qkv_bias, "Mistral": c.sliding_window is not None}
    kinds = [kind for kind, is_asked in asked.items() if is_asked] or ["Llama"]
    if len(kinds) > 1:
        raise NotImplementedError(
            f"no Hugging Face model has all that {' and '.join(kinds)} add to Llama. Leave all but one out of "
            "qk_norm, qkv_bias and sliding_window."
        )
    if (is_mixture := c.experts is not None) and kinds != ["Qwen3"]:
        words = f"no Hugging Face model is {kinds[0]} with these experts. Set qk_norm, as in Qwen3-MoE."
        raise NotImplementedError(words)
    kind, names = ("Qwen3Moe", _HF_FIELDS | _HF_WIDTH_OF_EXPERTS) if is_mixture else (kinds[0], _HF_FIELDS)
    scaling = c.rope_scaling
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": "qwen3_moe" if is_mixture else kind.lower(),
        **{theirs: getattr(c, ours) for ours, theirs in names.items()},
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_size,
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling and {"rope_type": scaling.kind, **asdict(scaling)},
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        **({"sliding_window": c.sliding_window} if kind == "Mistral" else {}),
        **(experts_to(c.experts) if is_mixture else {}),
    }
