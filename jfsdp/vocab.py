"""The two ends of a language model: embedding by row exchange, head and cross-entropy streamed in vocabulary slices.

Owns how a vocabulary table is used without being gathered whole. The table `[V, D]` is cut on its width for both
uses, so tied weights have one layout and one summed gradient. Works on whole tables too (no mesh, or a strategy
that keeps parameters whole).

Note [Row exchange]
Every device holds some columns of every row. It gathers the token ids of its group (4 bytes a token), looks up its
columns of all of them, and an all-to-all turns "my columns of everyone's tokens" into "all columns of my tokens".
T tokens receive 4(S-1)T bytes of ids and, both ways, T x D x bytes x (S-1)/S of rows; gathering the table would
receive V x D x bytes x (S-1)/S. So rows are exchanged when a device has fewer tokens than the vocabulary has rows.

Note [Streamed head]
Logits of N tokens are `[N, V]`, often the largest array of a step. The head is taken in slices of the vocabulary, each
a unit of its own with the gather one slice ahead and the reduction one behind, and cross-entropy is carried as a
running maximum and sum of exponentials. The backward pass computes each slice's logits again from the saved
log-sum-exp. It costs one more matmul per slice and the second gather, and neither the head nor the logits exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jfsdp import collectives
from jfsdp.layout import ParamLayout
from jfsdp.precision import wide
from jfsdp.schedule import Reducer, Schedule
from jfsdp.unit import Regime, Sharded, call, call_uncast, is_sharded, unshard

STREAM_ABOVE = 64 << 20
"""Bytes of float32 logits per device above which the head is streamed."""
SLICE_ROWS = 2048
"""At most this many rows of the vocabulary in one slice of the streamed head.

The last slice's reduction has little to hide behind, so slices are small: compiled for a 1B model on 8 H100 (JAX
0.10.2), 8192, 4096 and 2048 rows leave 424, 345 and 262 us of a step exposed, in 4,179, 4,143 and 4,105 MiB."""


class Embed(nnx.Module):
    """`embed(tokens) -> [..., D]` in the compute dtype, from `table` `[V, D]`."""

    def __init__(self, vocab_size: int, width: int, *, rngs: nnx.Rngs, init: Callable = nnx.initializers.normal(0.02)):
        self.table = nnx.Param(init(rngs.params(), (vocab_size, width)))

    def __call__(self, tokens: Array) -> Array:
        table = self.table.get_value()
        return embed(table, tokens)


class Head(nnx.Module):
    """Logits and cross-entropy from `table` `[V, D]`; pass an embedding's `table` to tie the two.

    stream_above: bytes of float32 logits per device above which `loss` streams. See Note [Streamed head].
    slice_rows: most rows of the vocabulary in one slice.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        init: Callable = nnx.initializers.normal(0.02),
        table: nnx.Param | None = None,
        stream_above: int = STREAM_ABOVE,
        slice_rows: int = SLICE_ROWS,
    ):
        self.table = nnx.Param(init(rngs.params(), (vocab_size, width))) if table is None else table
        self.stream_above, self.slice_rows = stream_above, slice_rows

    def __call__(self, h: Array) -> Array:
        """Logits `[..., D] -> [..., V]`, in float32 or wider."""
        return call(_logits, self.table.get_value(), h)

    def loss(self, h: Array, targets: Array, weights: Array) -> Array:
        """Sum of `weights * -log p(target)` over all positions: `h [..., D]`, `targets` and `weights` `[...]`."""
        flat = h.reshape(-1, h.shape[-1])
        nll = cross_entropy(
            self.table.get_value(),
            flat,
            targets.reshape(-1),
            stream_above=self.stream_above,
            slice_rows=self.slice_rows,
        )
        return jnp.sum(nll * weights.reshape(-1).astype(nll.dtype))


def embed(table: Sharded | Array, tokens: Array) -> Array:
    """Rows of a table: `[V, D], [...] -> [..., D]`. See Note [Row exchange]."""
    rows = _exchange_rows(table, tokens) if exchanges(table, tokens.size) else unshard(table)[tokens]
    return table.layout.precision.cast_outputs(rows) if is_sharded(table) else rows


def exchanges(table: Sharded | Array, tokens: int) -> bool:
    """Whether `embed` exchanges rows for this many tokens per device; else the table is gathered as a plain unit."""
    if not is_sharded(table) or table.layout.placement.whole_at_rest or table.layout.dim != 1:
        return False
    return tokens < table.layout.shape[0]


def cross_entropy(
    table: Sharded | Array, h: Array, targets: Array, *, stream_above: int = STREAM_ABOVE, slice_rows: int = SLICE_ROWS
) -> Array:
    """`-log p(target)` per token, float32 or wider: table `[V, D]`, `h [N, D]`, `targets [N]` -> `[N]`."""
    rows = (table.layout.shape if is_sharded(table) else table.shape)[0]
    if h.shape[0] * rows * 4 <= stream_above:
        return call_uncast(_nll, table, h, targets)
    if is_sharded(table):
        return _Streamed(table, slice_rows).nll(h, targets)
    tokens = h.shape[0]  # without a mesh: chunks of tokens, each small enough
    chunks = next(
        n for n in range(1, tokens + 1) if tokens % n == 0 and (tokens // n * rows * 4 <= stream_above or n == tokens)
    )
    one = jax.checkpoint(lambda chunk: _nll(table, *chunk), prevent_cse=False)
    return lax.map(one, (h.reshape(chunks, -1, h.shape[1]), targets.reshape(chunks, -1))).reshape(-1)


def _logits(table: Array, h: Array) -> Array:
    # Out of the matmul in the compute dtype, then wide: a wide output would run it at a fraction of its speed.
    z = jnp.einsum("...d,vd->...v", h.astype(table.dtype), table)
    return z.astype(wide(z.dtype))


def _nll(table: Array, h: Array, targets: Array) -> Array:
    return _nll_of_logits(jnp.einsum("nd,vd->nv", h.astype(table.dtype), table), targets)


@jax.custom_jvp
def _nll_of_logits(z: Array, targets: Array) -> Array:
    """`[N, V], [N] -> [N]`. Saves one array of the logits' size and dtype for the backward pass, their gradient; JAX by
    itself saves two, wide."""
    return _nll_and_gradient(z, targets)[0]


@_nll_of_logits.defjvp
def _(primals, tangents):
    nll, gradient = _nll_and_gradient(*primals)
    return nll, jnp.einsum("nv,nv->n", gradient, tangents[0], preferred_element_type=nll.dtype)


def _nll_and_gradient(z: Array, targets: Array) -> tuple[Array, Array]:
    exact = z.astype(wide(z.dtype))
    lse = jax.nn.logsumexp(exact, -1)
    nll = lse - jnp.take_along_axis(exact, targets[:, None], 1)[:, 0]
    # p - 1 at the target is expm1(-nll), without the cancellation where p is near 1.
    at_target, elsewhere = jnp.expm1(-nll)[:, None], jnp.exp(exact - lse[:, None])
    return nll, jnp.where(_is_target(z, targets, 0), at_target, elsewhere).astype(z.dtype)


def _exchange_rows(table: Sharded, tokens: Array) -> Array:
    leaf = table.layout
    axes, width = leaf.placement.shard_axes, leaf.shape[1]
    everyone = leaf.placement.data_axes

    def forward(shard, slot):
        ids = collectives.gather_rows(tokens, axes)
        columns = collectives.vary(shard.astype(leaf.param_dtype), everyone)[ids]
        return collectives.columns_to_rows(columns, axes)[..., :width], ids

    def backward(ids, grad):
        if table.slot is None:
            return None, None
        grad = jnp.pad(grad, [(0, 0)] * (grad.ndim - 1) + [(0, leaf.padded - width)])
        columns = collectives.rows_to_columns(grad, axes).astype(leaf.dtype)
        zeros = collectives.vary(jnp.zeros(leaf.shard_shape, leaf.dtype), everyone)
        return None, zeros.at[ids].add(columns)

    lookup = jax.custom_vjp(lambda shard, slot: forward(shard, slot)[0])
    lookup.defvjp(forward, backward)
    return lookup(table.shard, table.slot)


class _Streamed:
    """Cross-entropy over a sharded table, slice by slice. See Note [Streamed head]."""

    def __init__(self, table: Sharded, slice_rows: int):
        self.table, self.leaf = table, table.layout
        rows = self.leaf.shape[0]
        least = -(-rows // slice_rows)
        # A count that leaves no rest, where one is near: a rest is a small unit of its own, with nothing to
        # hide behind.
        self.count = next((n for n in range(least, 2 * least) if rows % n == 0), least)
        self.rows = rows // self.count
        self.rest = rows - self.count * self.rows  # rows that do not fill a slice: one more unit, outside the loop
        self.slices = self._unit(self.rows, self.count)
        self.axes = self.leaf.placement.data_axes

    def nll(self, h: Array, targets: Array) -> Array:
        run = jax.custom_vjp(lambda shard, slot, h, targets: self.forward(shard, slot, h, targets)[0])
        run.defvjp(self.forward, self.backward)
        h, targets = collectives.vary(h, self.axes), collectives.vary(targets, self.axes)
        return run(self.table.shard, self.table.slot, h, targets)

    def forward(self, shard, slot, h, targets):
        h_compute = h.astype(self.leaf.param_dtype)
        start = [jnp.full(h.shape[:1], fill, wide(h_compute.dtype)) for fill in (-jnp.inf, 0.0, 0.0)]
        state = tuple(collectives.vary(a, self.axes) for a in start)
        if self.rest:
            state = _absorb_slice(state, self._fetch_rest(shard), h_compute, targets, self.count * self.rows)

        def body(carry, i):
            state, weights = carry
            ahead = self._fetch(shard, i + 1)
            return (_absorb_slice(state, weights, h_compute, targets, i * self.rows), ahead), None

        weights = self._fetch(shard, 0)
        if self.count > 1:
            (state, weights), _ = lax.scan(body, (state, weights), jnp.arange(self.count - 1))
        top, total, hit = _absorb_slice(state, weights, h_compute, targets, (self.count - 1) * self.rows)
        lse = top + jnp.log(total)
        return lse - hit, (shard, h, targets, lse, weights)

    def backward(self, residuals, grad):
        shard, h, targets, lse, weights = residuals
        h_compute = h.astype(self.leaf.param_dtype)
        # Pieces go through the table's slot: `track` adds what is held, sums over replicas, and joins a tied use.
        reducer = Reducer([self.slices], [None], Regime(last=False), Schedule())
        to_h = jnp.zeros(h.shape, lse.dtype)
        state = (collectives.vary(to_h, self.axes), reducer.start())

        def unit(state, i, weights):
            to_h, waiting = state
            waiting = reducer.advance(waiting, i)
            to_slice, to_table = _slice_gradient(weights, h_compute, targets, lse, grad, i * self.rows)
            return to_h + to_slice.astype(to_h.dtype), reducer.push(waiting, [to_table], i)

        def body(carry, i):
            state, weights = carry
            ahead = self._fetch(shard, jnp.maximum(i - 1, 0))  # the last one is not read, as in a stack
            return (unit(state, i, weights), ahead), None

        ahead = self._fetch(shard, max(self.count - 2, 0)) if self.count > 1 else None
        state = unit(state, self.count - 1, weights)
        if self.count > 1:
            (state, _), _ = lax.scan(body, (state, ahead), jnp.arange(self.count - 1), reverse=True)
        to_h, waiting = state
        (pieces,) = reducer.finish(waiting)
        to_table = pieces.reshape(-1, pieces.shape[-1])
        if self.rest:
            to_slice, last = _slice_gradient(
                self._fetch_rest(shard), h_compute, targets, lse, grad, self.count * self.rows
            )
            to_h = to_h + to_slice.astype(to_h.dtype)
            to_table = jnp.concatenate([to_table, *collectives.reduce_scatter([last], [self._unit(self.rest, None)])])
        return None, None if self.table.slot is None else to_table, to_h.astype(h.dtype), None

    def _unit(self, rows: int, count: int | None) -> ParamLayout:
        return replace(self.leaf, shape=(rows, self.leaf.shape[1]), layers=count)

    def _fetch(self, shard: Array, i) -> Array:
        rows = lax.dynamic_slice_in_dim(shard, i * self.rows, self.rows)
        with jax.named_scope("gather"):
            return collectives.gather([rows], [self.slices])[0]

    def _fetch_rest(self, shard: Array) -> Array:
        return collectives.gather([shard[self.count * self.rows :]], [self._unit(self.rest, None)])[0]


def _absorb_slice(state, weights: Array, h: Array, targets: Array, first):
    """Take the rows `first..` of the vocabulary into (maximum, sum of exponentials below it, logit of the target)."""
    top, total, hit = state
    z = _logits(weights, h)
    new_top = jnp.maximum(top, jnp.max(z, -1))
    total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(z - new_top[:, None]), -1)
    return new_top, total, hit + jnp.sum(jnp.where(_is_target(z, targets, first), z, 0.0), -1)


def _slice_gradient(weights: Array, h: Array, targets: Array, lse: Array, grad: Array, first) -> tuple[Array, Array]:
    """Gradients of one slice: with respect to h `[N, D]` and to the slice's rows `[rows, D]`, in the compute dtype."""
    z = _logits(weights, h)
    one_hot = _is_target(z, targets, first).astype(z.dtype)
    to_z = ((jnp.exp(z - lse[:, None]) - one_hot) * grad[:, None]).astype(h.dtype)
    return jnp.einsum("nv,vd->nd", to_z, weights), jnp.einsum("nv,nd->vd", to_z, h)


def _is_target(z: Array, targets: Array, first) -> Array:
    return lax.broadcasted_iota(jnp.int32, z.shape, 1) == (targets - first)[:, None]
