"""A mixture of experts in the place of a block's MLP: each token goes through the few that its router likes best.

Owns routing, the experts, and the loss that keeps them equally busy. An expert is a piece of its block's unit like any
other parameter: gathered with the block and reduced with it, its gradient zero where no token came.

Note [Dispatch]
Tokens are copied once for each expert that they go to, and every expert's copies are put into blocks of their own, each
of as many rows as an expert has on average. E blocks and one more for each expert hold them however they fall, so
matmuls have fixed shapes, nothing has a capacity, no token is dropped, and none depends on what else is in the batch.
The price is at most twice the operations, and each block's matrices, copied. `jax.lax.ragged_dot` says the same in one
line, but compiled for GPUs (JAX 0.10.2 and 0.12.0.1) it multiplies every row with all E matrices.

Dims: `N D F E` tokens, width, inner width, experts; `k` experts for each token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jfsdp.collectives import total
from jfsdp.loss import Auxiliary

from .attention import wide


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """How many experts, and how tokens choose."""

    count: int
    """Experts in each block (E)."""
    per_token: int
    """Experts that each token goes through (k)."""
    renormalised: bool = True
    """Whether the k weights of a token are scaled to a sum of 1."""
    balance: float = 0.001
    """What the balance loss is multiplied by in training; 0 leaves it out."""

    def __post_init__(self):
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"experts.per_token is {self.per_token} of {self.count} experts. Use 1 to {max(self.count, 1)}."
            )
        if not self.balance >= 0:
            raise ValueError(f"experts.balance is {self.balance}; use 0 to leave the balance loss out, or more.")


class Load(NamedTuple):
    """What a block's router did, summed over tokens that count."""

    chosen: Array
    """`[E]`, how many went to each expert."""
    liked: Array
    """`[E]`, the probability that the router gave each expert."""


class Experts(nnx.Module):
    """E times SwiGLU `down(silu(gate(x)) * up(x))`, k of them for each token, added up with the router's weights."""

    def __init__(self, width: int, inner_width: int, options: ExpertOptions, *, std: float, rngs: nnx.Rngs):
        self.options, e = options, options.count

        def param(std, *shape):
            return nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape, jnp.float32))

        self.router = param(0.02, width, e)
        self.gate, self.up = param(0.02, e, width, inner_width), param(0.02, e, width, inner_width)
        self.down = param(std, e, inner_width, width)

    def __call__(self, x: Array) -> Array:
        """`[B, T, D] -> [B, T, D]`."""
        rows = x.reshape(-1, x.shape[-1])
        return self._compute(rows, *self._route(rows)[1:]).reshape(x.shape)

    def routed(self, x: Array, counted: Array) -> tuple[Array, Load]:
        """The same, and what the router did with the tokens, each weighed by `counted [B, T]`."""
        rows, counted = x.reshape(-1, x.shape[-1]), counted.reshape(-1)
        likes, weights, chosen = self._route(rows)
        times = jnp.repeat(counted.astype(likes.dtype), self.options.per_token)
        load = Load(jnp.zeros_like(likes[0]).at[chosen.reshape(-1)].add(times), counted.astype(likes.dtype) @ likes)
        return self._compute(rows, weights, chosen).reshape(x.shape), load

    def _route(self, rows: Array) -> tuple[Array, Array, Array]:
        """Probabilities `[N, E]`, and of the k likeliest experts their weights and numbers `[N, k]`; in fp32."""
        router = self.router[...]
        logits = rows.astype(router.dtype) @ router
        likes = jax.nn.softmax(logits.astype(wide(logits.dtype)), axis=-1)
        weights, chosen = lax.top_k(likes, self.options.per_token)
        if self.options.renormalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return likes, weights, chosen

    def _compute(self, rows: Array, weights: Array, chosen: Array) -> Array:
        """See Note [Dispatch]."""
        k, e = self.options.per_token, self.options.count
        size = -(-rows.shape[0] * k // e)
        place, owner = _blocks(chosen.reshape(-1), experts=e, size=size)
        gate, up, down = (w[...].at[owner].get(indices_are_sorted=True) for w in (self.gate, self.up, self.down))
        copies = jnp.repeat(rows.astype(gate.dtype), k, axis=0)
        h = jnp.zeros((2 * e * size, rows.shape[1]), gate.dtype).at[place].set(copies, unique_indices=True)
        h = h.reshape(2 * e, size, -1)
        h = jax.nn.silu(h @ gate) * (h @ up) @ down
        h = h.reshape(2 * e * size, -1).at[place].get(unique_indices=True).reshape(-1, k, rows.shape[1])
        return jnp.einsum("nkd,nk->nd", h, weights.astype(h.dtype))


def _blocks(chosen: Array, *, experts: int, size: int) -> tuple[Array, Array]:
    """Where each of `chosen [N k]` goes among the rows of 2E blocks of `size`, and each block's expert `[2E]`."""
    to_expert = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(to_expert, axis=0) - 1) * to_expert, axis=1)  # among the copies of its expert
    ends = jnp.cumsum(-(-jnp.sum(to_expert, axis=0) // size))
    owner = jnp.sum(jnp.arange(2 * experts)[:, None] >= ends[None], axis=1)
    first = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    return first[chosen] * size + rank, jnp.minimum(owner, experts - 1)


def balance_loss(load: Load, counted: Array, options: ExpertOptions) -> Auxiliary:
    """Least, k, when all experts are equally busy: E times the sum over experts of the share of tokens that went there
    and the probability that they gave it, each a mean over layers and tokens (Switch Transformer, arXiv:2101.03961).

    load: stacked `[L, E]`. The share is that of the whole batch, so the loss is one of all devices' tokens together; a
    micro-batch is balanced by itself.
    """
    layers, weight = load.chosen.shape[0], jnp.sum(counted)
    # all-reduce over the devices that hold other tokens: E + 1 numbers.
    axes = sorted(jax.typeof(load.chosen).manual_axis_type.varying)
    chosen, tokens = total(lax.stop_gradient(load.chosen.sum(0)), axes), total(weight, axes)
    share = chosen / jnp.maximum(layers * tokens, 1e-30)
    return Auxiliary(options.count / layers * jnp.sum(share * load.liked.sum(0)), weight, options.balance)


EXPERTS_NEED = ("num_experts", "num_experts_per_tok")
"""What a `config.json` must say about experts."""


def experts_from(said: Mapping[str, Any]) -> ExpertOptions:
    """Of a Hugging Face `config.json`; the balance loss where `transformers` would add it."""
    return ExpertOptions(
        count=said["num_experts"],
        per_token=said["num_experts_per_tok"],
        renormalised=said.get("norm_topk_prob", False),
        balance=said.get("router_aux_loss_coef", 0.001) if said.get("output_router_logits") else 0.0,
    )


def experts_to(options: ExpertOptions) -> dict[str, Any]:
    """What `experts_from` reads."""
    return {
        "num_experts": options.count,
        "num_experts_per_tok": options.per_token,
        "norm_topk_prob": options.renormalised,
        "output_router_logits": options.balance > 0,
        **({"router_aux_loss_coef": options.balance} if options.balance else {}),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
