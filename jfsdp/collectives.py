"""Collectives of one unit: gather its parameters, reduce-scatter and all-reduce its gradients; exchange rows.

The only file that calls `lax` collectives. Owns their dtypes and the bucket in which small parameters travel
together. Knows nothing of modules, schedules or optimizers: `unit.py` and `stack.py` decide when these run.
Everything here runs inside `shard_map`, on one layer's local arrays, and lists go in and come out in the
order of `layouts`.

Note [Varying axes]
Inside `shard_map` JAX types every value by the mesh axes over which it may differ. Shards are marked as
varying over the replicas *before* the gather: otherwise the transpose of the gather would first sum the whole
gathered gradient over replicas, and only then scatter it. A forgotten reduction is a type error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from jfsdp import offload, quantise
from jfsdp.layout import ParamLayout, unpad
from jfsdp.strategy import Placement

Arrays = list[Array]


def gather(shards: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """Rebuild one unit's parameters: `[.., d/shard, ..] -> [.., d, ..]` in `param_dtype`, padding cut off.

    Large parameters take one operation each, in codes of `gather_dtype` where it is set, small ones one per dtype.
    Parameters that are whole at rest only change dtype.
    """
    shards = offload.to_device(list(shards))
    # Cast first: the wire carries param_dtype.
    cast = [vary(w.astype(leaf.param_dtype), leaf.placement.data_axes) for w, leaf in zip(shards, layouts)]
    cut = [i for i, leaf in enumerate(layouts) if leaf.dim is not None and not leaf.placement.whole_at_rest]
    out = _gather_cut(cast, [i for i in cut if layouts[i].gather_dtype is None], layouts, "param_dtype", to="varying")
    for i in cut:
        if layouts[i].gather_dtype is not None:
            out[i] = _gather_quantised(vary(shards[i], layouts[i].placement.data_axes), layouts[i])
    return out


def keep(weights: Sequence[Array], shards: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """What `gather_again` needs of one unit: `[.., d, ..] -> [.., d/regather, ..]` of the gathered weights where the
    placement keeps more than the shard (hpZ), else the shard. Moves nothing."""
    units = zip(weights, shards, layouts)
    return [_own_part(_pad(w, leaf), leaf) if _regathers(leaf) else shard for w, shard, leaf in units]


def gather_again(kept: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """`gather` for the backward pass, from what `keep` gave: inside groups of `regather` neighbours where it is set."""
    if not any(map(_regathers, layouts)):
        return gather(kept, layouts)
    cast = [vary(w.astype(leaf.param_dtype), leaf.placement.data_axes) for w, leaf in zip(kept, layouts)]
    cut = [i for i, leaf in enumerate(layouts) if leaf.dim is not None and not leaf.placement.whole_at_rest]
    return _gather_cut(cast, cut, layouts, "param_dtype", to="varying", again=True)


def _regathers(leaf: ParamLayout) -> bool:
    return leaf.dim is not None and leaf.placement.regather is not None


def _own_part(w: Array, leaf: ParamLayout) -> Array:
    """This device's part of a padded parameter among the `regather` devices of its group."""
    size = leaf.padded // leaf.placement.regather
    mine = lax.axis_index(leaf.placement.shard_axes) % leaf.placement.regather
    return lax.dynamic_slice_in_dim(w, mine * size, size, axis=leaf.dim)


def gather_updated(shards: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """Updated shards back to whole parameters at rest (SHARD_OPT), in the stored dtype; layers of a stack together.

    Runs once a step, after the optimizer: each device receives (n-1)/n of the parameters.
    """
    cut = [i for i, leaf in enumerate(layouts) if leaf.dim is not None]
    return _gather_cut(list(shards), cut, [_unstacked(leaf) for leaf in layouts], "dtype", to="invarying")


def gather_for_window(shards: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """One unit's parameters whole, all layers of a stack together, in `param_dtype`: kept for all micro-batches.

    Runs once a step, before the first: each device receives (n-1)/n of the parameters and holds all of them.
    """
    cast = [vary(w.astype(leaf.param_dtype), leaf.placement.data_axes) for w, leaf in zip(shards, layouts)]
    cut = [i for i, leaf in enumerate(layouts) if leaf.dim is not None and not leaf.placement.whole_at_rest]
    return _gather_cut(cast, cut, [_unstacked(leaf) for leaf in layouts], "param_dtype", to="varying")


def _unstacked(leaf: ParamLayout) -> ParamLayout:
    """The layout of a stack's parameter as one array `[L, ...]`."""
    return replace(leaf, shape=leaf.logical_shape, layers=None, dim=leaf.stacked_dim)


def _gather_cut(
    arrays: Arrays, cut: list[int], layouts: Sequence[ParamLayout], dtype_name: str, to: str, again: bool = False
) -> Arrays:
    """Gather the parameters listed in `cut`; the others pass through."""
    out = list(arrays)
    for i in cut:
        if not layouts[i].small:
            over = _over(layouts[i].placement, to, again)
            out[i] = unpad(_gather_dim(arrays[i], layouts[i].dim, **over), layouts[i])
    for members in _buckets([i for i in cut if layouts[i].small], layouts, dtype_name):
        leaves = [layouts[i] for i in members]
        # all-gather over the shard axes (n devices): every small parameter of the unit at once. Each device
        # receives (n-1)/n of their sum; issued with the large gathers of the same unit, so it adds one
        # latency and hides with them.
        pieces = lax.all_gather(_flat([arrays[i] for i in members]), **_over(leaves[0].placement, to, again))
        for i, piece in zip(members, _split(pieces, [arrays[i].shape for i in members])):
            out[i] = unpad(_join(piece, layouts[i].dim), layouts[i])
    return out


def _gather_quantised(shard: Array, leaf: ParamLayout) -> Array:
    # all-gather over the shard axes (n devices), a byte an element and 4 for each block of 256: each device receives
    # (n-1)/n of 1.016 bytes an element. Issued like the other large gathers of the unit.
    wire = lax.all_gather(quantise.encode(shard, leaf.gather_dtype), **_over(leaf.placement, "varying", False))
    pieces = quantise.decode(wire, shard.shape, leaf.gather_dtype, leaf.param_dtype)
    return unpad(_join(pieces, leaf.dim), leaf)


def _over(placement: Placement, to: str, again: bool) -> dict:
    """Among which devices a gather runs: all shards, or groups of `regather` neighbours in mesh order."""
    axes, k = placement.shard_axes, placement.regather
    if not again or k is None:
        return dict(axis_name=axes, to=to)
    groups = [list(range(first, first + k)) for first in range(0, placement.shards, k)]
    return dict(axis_name=axes, to=to, axis_index_groups=groups)


def reduce_scatter(grads: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """Sum one unit's gradients over the shard axes and keep one's own piece: `[.., d, ..] -> [.., d/shard, ..]`.

    Carried in `reduce_dtype`; comes back in the stored dtype. A parameter without a cut dim is all-reduced over
    the shard axes instead (nothing happens where the strategy has none).
    """
    wire = [vary(g.astype(leaf.reduce_dtype), leaf.placement.data_axes) for g, leaf in zip(grads, layouts)]
    out = list(wire)
    cut = [i for i, leaf in enumerate(layouts) if leaf.dim is not None]
    whole = [i for i, leaf in enumerate(layouts) if leaf.dim is None and leaf.placement.shard_axes]
    for i in cut:
        if not layouts[i].small:
            out[i] = _scatter_dim(_pad(wire[i], layouts[i]), layouts[i].placement.shard_axes, layouts[i].dim)
    for members in _buckets([i for i in cut if layouts[i].small], layouts, "reduce_dtype"):
        leaves = [layouts[i] for i in members]
        pieces = [_cut(_pad(wire[i], layouts[i]), layouts[i]) for i in members]
        n = leaves[0].placement.shards
        # reduce-scatter over the shard axes: the gradients of every small parameter of the unit at once,
        # (n-1)/n of their sum received; issued with the large ones.
        mine = lax.psum_scatter(
            jnp.concatenate([p.reshape(n, -1) for p in pieces], 1),
            leaves[0].placement.shard_axes,
            scatter_dimension=0,
            tiled=True,
        )
        for i, piece in zip(members, _split(mine, [leaf.shard_shape for leaf in leaves])):
            out[i] = piece.reshape(layouts[i].shard_shape)
    _all_reduce_into(out, whole, layouts, "shard_axes")
    return [g.astype(leaf.dtype) for g, leaf in zip(out, layouts)]


def all_reduce(shards: Sequence[Array], layouts: Sequence[ParamLayout]) -> Arrays:
    """Sum reduced shards over the replica axes, in `reduce_dtype`; shapes and stored dtypes stay."""
    out = [g.astype(leaf.reduce_dtype) for g, leaf in zip(shards, layouts)]
    _all_reduce_into(out, [i for i, leaf in enumerate(layouts) if leaf.placement.replica_axes], layouts, "replica_axes")
    return [g.astype(leaf.dtype) for g, leaf in zip(out, layouts)]


def vary(x: Array, axes: Sequence[str]) -> Array:
    """Type `x` as varying over `axes`; moves nothing. See Note [Varying axes]."""
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def total(x: Array, axes: Sequence[str]) -> Array:
    """Sum a scalar or short vector of statistics over `axes` (losses, weights, squared norms): a few bytes."""
    axes = tuple(axes)
    return lax.psum(vary(x, axes), axes) if axes else x


def mean(x: Array, axes: Sequence[str]) -> Array:
    """Mean over `axes` of a buffer that may differ between devices (batch statistics): its bytes, all-reduced twice.

    The second one takes out what the first one rounded, so equal values stay bitwise what they are.
    """
    x = vary(x, axes)
    near = lax.pmean(x, tuple(axes))
    return near + jnp.where(jnp.isfinite(near), lax.pmean(x - near, tuple(axes)), 0)


def largest(x: Array, axes: Sequence[str]) -> Array:
    """Maximum of a scalar or short vector over `axes`: a few bytes."""
    axes = tuple(axes)
    return lax.pmax(vary(x, axes), axes) if axes else x


def gather_rows(x: Array, axes: tuple[str, ...]) -> Array:
    """Everyone's rows: `[b, ...] -> [n*b, ...]` (token ids for the embedding: 4 bytes a token)."""
    return lax.all_gather(vary(x, axes), axes, axis=0, tiled=True)


def columns_to_rows(x: Array, axes: tuple[str, ...]) -> Array:
    """Exchange my columns of everyone's rows for all columns of my rows: `[n*b, .., d/n] -> [b, .., d]`.

    An all-to-all: each device receives (n-1)/n of `[b, .., d]`. Its transpose is `rows_to_columns`.
    """
    return lax.all_to_all(vary(x, axes), axes, split_axis=0, concat_axis=x.ndim - 1, tiled=True)


def rows_to_columns(x: Array, axes: tuple[str, ...]) -> Array:
    """The way back: `[b, .., d] -> [n*b, .., d/n]`."""
    return lax.all_to_all(vary(x, axes), axes, split_axis=x.ndim - 1, concat_axis=0, tiled=True)


def _gather_dim(w: Array, dim: int, **over) -> Array:
    # all-gather over the shard axes (n devices), [.., d/n, ..] -> [.., d, ..] in param_dtype: each device
    # receives (n-1)/n of the parameter. Issued one unit early (stack.py), so that it overlaps the previous
    # unit's matmuls. Another dim than the first is brought to the front on the shard, where it costs 1/n; the
    # matmul reads the gathered result transposed for nothing.
    return jnp.moveaxis(lax.all_gather(jnp.moveaxis(w, dim, 0), axis=0, tiled=True, **over), 0, dim)


def _scatter_dim(g: Array, axes: tuple[str, ...], dim: int) -> Array:
    # reduce-scatter over the shard axes (n devices), [.., d, ..] -> [.., d/n, ..] in reduce_dtype: each device receives
    # (n-1)/n of the gradient. Issued one unit late (schedule.py), so that it overlaps the next unit's backward.
    return jnp.moveaxis(lax.psum_scatter(jnp.moveaxis(g, dim, 0), axes, scatter_dimension=0, tiled=True), 0, dim)


def _all_reduce_into(out: Arrays, which: list[int], layouts: Sequence[ParamLayout], axes_name: str) -> None:
    # all-reduce of shards (or of parameters that are whole) over the axes: each device receives 2(n-1)/n of
    # their bytes in reduce_dtype. Over replicas it runs one unit after the reduce-scatter, beside the next
    # unit's backward.
    for i in which:
        if not layouts[i].small:
            out[i] = lax.psum(out[i], getattr(layouts[i].placement, axes_name))
    for members in _buckets([i for i in which if layouts[i].small], layouts, "reduce_dtype"):
        summed = lax.psum(_flat([out[i] for i in members]), getattr(layouts[members[0]].placement, axes_name))
        for i, piece in zip(members, _split(summed, [out[i].shape for i in members])):
            out[i] = piece.reshape(out[i].shape)


def _buckets(which: list[int], layouts: Sequence[ParamLayout], dtype_name: str) -> list[list[int]]:
    """Group small parameters that may share one operation: same dtype on the wire, same placement."""
    groups: dict = {}
    for i in which:
        groups.setdefault((getattr(layouts[i], dtype_name), layouts[i].placement, layouts[i].dim is None), []).append(i)
    return list(groups.values())


def _flat(arrays: Arrays) -> Array:
    return jnp.concatenate([a.reshape(-1) for a in arrays])


def _split(flat: Array, shapes: list[tuple[int, ...]]) -> Arrays:
    """Cut the last dim of a bucket `[.., total]` into `[.., *shape]` pieces."""
    lead, out, at = flat.shape[:-1], [], 0
    for shape in shapes:
        size = _size(shape)
        out.append(lax.slice_in_dim(flat, at, at + size, axis=flat.ndim - 1).reshape(*lead, *shape))
        at += size
    return out


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _join(pieces: Array, dim: int) -> Array:
    """`[n, .., d/n, ..] -> [.., d, ..]`."""
    moved = jnp.moveaxis(pieces, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])


def _cut(g: Array, leaf: ParamLayout) -> Array:
    """`[.., d, ..] -> [n, .., d/n, ..]`, the inverse of `_join`."""
    n = leaf.placement.shards
    return jnp.moveaxis(g.reshape(*g.shape[: leaf.dim], n, -1, *g.shape[leaf.dim + 1 :]), leaf.dim, 0)


def _pad(g: Array, leaf: ParamLayout) -> Array:
    widths = [(0, after - before) for before, after in zip(leaf.shape, leaf.padded_shape)]
    return jnp.pad(g, widths) if any(after for _, after in widths) else g
