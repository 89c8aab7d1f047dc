"""The rivals: the same training step, its communication left to XLA.

`annotations` says where arrays live and leaves every collective to the partitioner, as MaxText and most JAX
code do. `gather-in-body` writes the collectives down but not ahead: each layer's weights are gathered in
the scan body, under `jax.checkpoint`, so the backward pass gathers them again. Both run on any devices and
compile for described GPUs. One Llama-style model, bf16 (or fp32) compute on fp32 masters, AdamW, no clipping; nothing
of jfsdp is used, and the attention is the one that the measured models use.

Dims: `L B T D F V` layers, batch, tokens, width, inner width, vocabulary; `H K h` query heads, key/value
heads, head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.attention import attention

VARIANTS = ("annotations", "gather-in-body")
BATCH = P(("replica", "shard"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The defaults are an 8B model; `SIZES` has more."""

    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    inner_width: int = 14336
    vocabulary: int = 128256
    tokens: int = 4096
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences of one device."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; None forms all of them."""
    dtype: Any = jnp.bfloat16
    """Of gathers and matmuls."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES = {
    "8b": Config(),
    "1b": Config(width=2048, layers=16, inner_width=8192),
    "toy": Config(width=128, layers=4, heads=8, kv_heads=4, inner_width=256, vocabulary=512, tokens=64),
}


class Built(NamedTuple):
    step: Any
    """Jitted: `(state, tokens, targets) -> (state, loss)`, the latter two `[B, T]`; the state is donated."""
    init: Any
    """Jitted: `key -> state`, created sharded."""
    arguments: tuple[Any, ...]
    """Abstract arguments of `step`, shardings included."""


def build(config: Config, mesh: Mesh, variant: str = "annotations", *, log_norm: bool = False) -> Built:
    """The training step of one variant on a mesh with the axes `replica` and `shard`.

    log_norm: give `(loss, gradient norm)` instead of the loss, as our own step always does.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}. Known are {', '.join(VARIANTS)}.")
    specs = _specs(variant)
    gradients = (_annotated if variant == "annotations" else _gathered)(config, mesh, specs)
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)

    def init(key):
        params = _init(config, key)
        return params, tx.init(params)

    def step(state, tokens, targets):
        params, moments = state
        loss, grads = gradients(params, tokens, targets)
        updates, moments = tx.update(grads, moments, params)
        result = (loss, optax.global_norm(grads)) if log_norm else loss
        return (optax.apply_updates(params, updates), moments), result

    place = functools.partial(NamedSharding, mesh)
    shardings = jax.tree.map(place, specs)
    state = jax.eval_shape(init, jax.random.key(0))
    moments = optax.tree_map_params(tx, lambda _, s: s, state[1], shardings,
                                    transform_non_params=lambda _: place(P()))
    at_rest = (shardings, moments)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, at_rest)
    rows = jax.ShapeDtypeStruct((config.batch * mesh.size, config.tokens), jnp.int32, sharding=place(BATCH))
    return Built(step=jax.jit(step, donate_argnums=0, out_shardings=(at_rest, place(P()))),
                 init=jax.jit(init, out_shardings=at_rest), arguments=(state, rows, rows))


def ahead(mesh: Mesh, size: str = "8b", variant: str = "annotations", **changes: int) -> tuple[Any, tuple]:
    """A target for `jfsdp.audit.gpu.compile_ahead`."""
    built = build(replace(SIZES[size], **changes), mesh, variant)
    return built.step, built.arguments


def maxtext_options(version: str = jax.__version__) -> dict[str, Any]:
    """MaxText's XLA options for Llama on A3 (H100) hosts, those that steer the schedule, to pass per compile.

    From its `a3/llama_2_7b/1vm.sh`; the pipelining options were renamed after JAX 0.10.
    """
    options = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 128 << 20,
        "xla_gpu_all_gather_combine_threshold_bytes": 128 << 20,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 << 20,
        "xla_disable_hlo_passes": "rematerialization",
    }
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        if tuple(map(int, version.split(".")[:2])) > (0, 10):
            options[f"xla_gpu_pipeline_{kind}"] = "COLLECTIVE_PIPELINING_MODE_ON"
        else:
            options[f"xla_gpu_enable_pipelined_{kind}"] = True
    return options


# ------------------------------------------------------------------------------------------ two ways to shard


def _specs(variant: str) -> dict[str, Any]:
    """Where parameters lie: cut over `shard` on their first dim, copied over `replica`."""
    names = ("norm1", "q", "k", "v", "o", "norm2", "gate", "up", "down")
    # The partitioner looks rows up in a table that is cut on width; by hand the table is gathered whole.
    table = P(None, "shard") if variant == "annotations" else P("shard")
    blocks = dict.fromkeys(names, P(None, "shard"))
    return {"table": table, "blocks": blocks, "norm": P("shard"), "head": P("shard")}


def _annotated(config: Config, mesh: Mesh, specs: dict) -> Callable:
    """Loss and gradients; activations are pinned to the batch, so that the partitioner gathers weights."""
    pin = lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, BATCH))
    whole = lambda tree: jax.tree.map(lambda w: w.astype(config.dtype), tree)

    def loss(params, tokens, targets):
        return _loss(config, params, tokens, targets, whole, pin) / targets.size

    return jax.value_and_grad(loss)


def _gathered(config: Config, mesh: Mesh, specs: dict) -> Callable:
    """Loss and gradients under `shard_map`; each use of a parameter gathers it and reduces its gradient."""

    @jax.custom_vjp
    def gather(w):
        # all-gather over `shard` in the compute dtype: each device receives (S-1)/S of the unit, overlapping by luck.
        return lax.all_gather(w.astype(config.dtype), "shard", tiled=True)

    def reduce(_, g):
        # reduce-scatter over `shard`, then all-reduce of the shard over `replica`, both in fp32.
        return (lax.psum(lax.psum_scatter(g.astype(jnp.float32), "shard", tiled=True), "replica"),)

    gather.defvjp(lambda w: (gather(w), None), reduce)

    def local(params, tokens, targets):
        def loss(params):
            whole = functools.partial(jax.tree.map, gather)
            return _loss(config, params, tokens, targets, whole, lambda x: x) / (targets.size * mesh.size)

        loss, grads = jax.value_and_grad(loss)(params)
        return lax.psum(loss, ("replica", "shard")), grads

    return jax.shard_map(local, mesh=mesh, in_specs=(specs, BATCH, BATCH), out_specs=(P(), specs),
                         check_vma=False)


# ------------------------------------------------------------------------------------------ the model


def _init(c: Config, key: Array) -> dict[str, Any]:
    D, F, kv_width = c.width, c.inner_width, c.kv_heads * c.head_width
    shapes = {"q": (D, D), "k": (D, kv_width), "v": (D, kv_width), "o": (D, D),
              "gate": (D, F), "up": (D, F), "down": (F, D)}
    keys = iter(jax.random.split(key, len(shapes) + 2))
    draw = lambda *shape: 0.02 * jax.random.normal(next(keys), shape, jnp.float32)
    ones = functools.partial(jnp.ones, dtype=jnp.float32)
    blocks = {name: draw(c.layers, *shape) for name, shape in shapes.items()}
    blocks |= {"norm1": ones((c.layers, D)), "norm2": ones((c.layers, D))}
    return {"table": draw(c.vocabulary, D), "blocks": blocks, "norm": ones(D), "head": draw(D, c.vocabulary)}


def _loss(c: Config, params: dict, tokens: Array, targets: Array, whole: Callable, pin: Callable) -> Array:
    """Cross-entropy summed over `targets [B, T]`.

    whole: gives the weights, in the compute dtype, of a tree of parameters.
    pin: applied to activations `[B, T, ...]`.
    """
    remat = functools.partial(jax.checkpoint, prevent_cse=False)  # a scan keeps both passes apart by itself

    @remat
    def block(x, params):
        return pin(_block(c, whole(params), x)), None

    x = pin(whole(params["table"])[tokens])
    x, _ = lax.scan(block, x, params["blocks"])
    x = _norm(x, whole(params["norm"]))
    head = whole(params["head"])

    def chunk_loss(total, part):
        x, targets = part
        # bf16 logits, as in MaxText: XLA's cost model prices a matmul with fp32 result many times too high.
        logits = (pin(x) @ head).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return total + jnp.sum(jax.nn.logsumexp(logits, -1) - chosen), None

    zero = jnp.zeros((), jnp.float32)
    if c.loss_chunk is None:
        return chunk_loss(zero, (x, targets))[0]
    # Cut along T: every device keeps its own sequences.
    split = lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, c.loss_chunk, *a.shape[2:]), 1, 0)
    return lax.scan(remat(chunk_loss), zero, (split(x), split(targets)))[0]


def _block(c: Config, w: dict, x: Array) -> Array:
    heads = lambda a, n: a.reshape(*a.shape[:2], n, c.head_width)
    h = _norm(x, w["norm1"])
    q, k = _rope(heads(h @ w["q"], c.heads)), _rope(heads(h @ w["k"], c.kv_heads))
    mixed = attention(q, k, heads(h @ w["v"], c.kv_heads), None, implementation="chunked")
    x = x + mixed.reshape(x.shape) @ w["o"]
    h = _norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def _norm(x: Array, scale: Array) -> Array:
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return (x * scale.astype(jnp.float32)).astype(scale.dtype)


def _rope(x: Array) -> Array:
    """Turn `[B, T, H, h]` by its positions, halves of a head as pairs."""
    half = x.shape[-1] // 2
    turns = 500_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * turns)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
