"""Parameters as one safetensors set, readable without jfsdp: written from devices or from a checkpoint, and read back.

Owns the way from shards to whole tensors, one at a time, so that no process holds the model. Names are the paths of the
parameters and shapes are logical, layers of a stack in one tensor; the layout of a Hugging Face model is made in
`huggingface.py`, the files in `safetensors.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jfsdp import safetensors, store
from jfsdp.checkpoint import Arrays, Leaf, named_arrays, open_checkpoint
from jfsdp.layout import Plan


def save_consolidated(
    folder: str | os.PathLike, params, plan: Plan, *, aliases: Mapping[str, str] | None = None
) -> list[Path]:
    """Write parameters (or an average of them) in logical shapes as safetensors, readable without jfsdp.

    Gives the files. The first process writes them all and holds one tensor at a time. With several processes every
    one first writes its shards beside the result, one tensor at a time, so that nobody gathers.

    aliases: further names of tied parameters, `{other: written}`; recorded, not written again.
    """
    folder = Path(folder)
    arrays = named_arrays(params, plan)
    if jax.process_count() == 1:
        names = {n: (leaf, lambda n=n: _whole(n, arrays)) for n, leaf in arrays.leaves.items()}
        return _write_consolidated(folder, names, aliases)
    parts = folder / "parts"
    is_first = jax.process_index() == 0
    for name, value in arrays.values.items():
        host = store.to_host({name: value}, arrays.shapes)
        store.write_zarr(parts, host, is_first=is_first)
    multihost_utils.sync_global_devices("every shard is written")
    files = []
    if is_first:
        reader = store.ZarrReader(parts)
        names = {n: (leaf, lambda n=n: reader.read(n)) for n, leaf in arrays.leaves.items()}
        files = _write_consolidated(folder, names, aliases)
        shutil.rmtree(parts)
    multihost_utils.sync_global_devices("the consolidated set is written")
    return files


def consolidate(
    path: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    part: str = "params",
    aliases: Mapping[str, str] | None = None,
) -> list[Path]:
    """Make safetensors of one part of a sharded checkpoint (params, ema, ...), tensor by tensor; needs no devices."""
    found = open_checkpoint(path)
    leaves = {n: leaf for n, leaf in found.metadata.leaves.items() if n.startswith(f"{part}.")}
    if found.metadata.kind != "sharded" or not leaves:
        parts = ", ".join(dict.fromkeys(n.partition(".")[0] for n in found.metadata.leaves))
        raise ValueError(f"{found.path} is {found.metadata.kind} and has {parts}; {part} of a sharded one is wanted.")
    names = {n.removeprefix(f"{part}."): (leaf, lambda n=n: found.read(n)) for n, leaf in leaves.items()}
    return _write_consolidated(Path(folder), names, aliases)


def load_consolidated(folder: str | os.PathLike, plan: Plan):
    """Parameters as `plan` stores them, from what `save_consolidated` wrote; each process reads what it needs.

    Raises: ValueError listing what is missing, left over or of another shape or dtype.
    """
    found, abstract = safetensors.read_safetensors(folder), plan.map(_abstract(plan))
    wanted = named_arrays(abstract, plan)
    have = {n: Leaf(shape=tuple(t.shape), dtype=np.dtype(t.dtype).name) for n, t in found.items()}
    differing = [
        f"{n}: {have.get(n)} in the files, {wanted.leaves.get(n)} here"
        for n in {**have, **wanted.leaves}
        if have.get(n) != wanted.leaves.get(n)
    ]
    if differing:
        raise ValueError(
            f"{folder} does not fit:\n  " + "\n  ".join(differing) + "\nBuild the model it was saved from."
        )
    targets = [store.Target(n, wanted.shapes[n], tuple(v.shape), v.sharding) for n, v in wanted.values.items()]
    arrays = store.to_devices(targets, lambda name, where: found[name][where])
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def _abstract(plan: Plan):
    return lambda leaf: jax.ShapeDtypeStruct(leaf.rest_shape, leaf.dtype, sharding=plan.rest_sharding(leaf))


def _write_consolidated(folder: Path, names: dict[str, tuple], aliases) -> list[Path]:
    entries = [safetensors.Entry(n, leaf.shape, np.dtype(leaf.dtype), fetch) for n, (leaf, fetch) in names.items()]
    return safetensors.write_safetensors(folder, entries, aliases=aliases)


def _whole(name: str, arrays: Arrays) -> np.ndarray:
    """A logical array in host memory, put together from the shards of this process, which holds all of them."""
    whole = np.empty(arrays.shapes[name], arrays.values[name].dtype)
    (host,) = store.to_host({name: arrays.values[name]}, arrays.shapes)
    for where, values in host.pieces:
        whole[where] = values
    return whole
