"""A checkpoint of a training state: complete or not one, and restored onto any mesh.

Owns what a checkpoint holds, when it counts as complete and what is refused. How an array becomes files is `store.py`;
saving behind the training, and which checkpoints of a run are kept, is `run_folder.py`.

Note [A checkpoint on disk]
    run/step_00000200/arrays/params.head.kernel/...   sharded: a Zarr array of the logical shape for every leaf
                      local/process_00000.bin         or local: what each process held, for the same devices again
                      jfsdp.json                      what is in it; written last, so it marks a complete one
A checkpoint is written under another name and renamed once it is complete. Names are the paths in the state, shapes
are logical: whatever mesh, strategy and padding there were, nothing of them is in the arrays.

Note [Damage]
Before anything is read, jfsdp.json is compared with its own checksum, which covers those of the processes' tables, and
the size of every file with what was written; while it is read, each chunk with its checksum; and once it is on the
devices, each leaf with its content hash. The automatic choice of a checkpoint to go on from falls back to an older one
only for damage. A checkpoint that does not fit the model is an error: an older one would not fit either.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata as packages
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jfsdp import store
from jfsdp.layout import Plan, path_name

_MARK = "jfsdp.json"
_ARRAYS, _LOCAL, _HASHES = "arrays", "local", "hashes"
_log = logging.getLogger(__name__)


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete or is not what was written."""


# What a checkpoint holds


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the state."""

    shape: tuple[int, ...]
    """Logical shape; of the key data, for random keys."""
    dtype: str
    hash: str = ""
    """See Note [Content hash] in `store.py`."""
    key: str | None = None
    """Generator of typed random keys, None for other arrays."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Everything but the values; the content of jfsdp.json."""

    kind: str
    """sharded or local."""
    step: int
    leaves: dict[str, Leaf]
    mesh: dict[str, int]
    strategy: str
    processes: int
    generator: dict[str, Any]
    """JAX's settings that random numbers depend on."""
    metric: float | None = None
    """What "best" is decided by: less is better."""
    counters: dict[str, int] = field(default_factory=dict)
    """Batches consumed, steps skipped, updates applied."""
    data: dict[str, Any] | None = None
    """Position in the data and what its order depends on."""
    run: dict[str, Any] = field(default_factory=dict)
    """Whatever else the run wants back, as JSON."""
    files: dict[str, int] = field(default_factory=dict)
    """Size of every file."""
    tables: dict[str, str] = field(default_factory=dict)
    """Checksum of each process's table, in a local checkpoint."""
    versions: dict[str, str] = field(default_factory=dict)
    saved_at: str = ""
    format: str = "jfsdp-checkpoint-1"
    checksum: str = ""
    """Of everything else in jfsdp.json; see `_checksum`."""

    def where(self) -> str:
        """What it was saved on, in words."""
        return _describe_devices(self.mesh, self.strategy, self.processes)


class Checkpoint(NamedTuple):
    """A complete checkpoint: what is in it, and its values part by part. Open it with `open_checkpoint`."""

    path: Path
    metadata: Metadata
    reader: store.ZarrReader | store.LocalReader

    def read(self, name: str, where: store.Slices = ()) -> np.ndarray:
        """Part of a leaf in its logical shape, or all of it; nothing else is read.

        Raises: DamagedCheckpoint naming the file, KeyError for a name that is not in it.
        """
        if name not in self.metadata.leaves:
            raise KeyError(f"{self.path} has no {name}. It has {', '.join(self.metadata.leaves)}.")
        try:
            return self.reader.read(name, where)
        except OSError as error:
            raise DamagedCheckpoint(f"{self.path}: {name} cannot be read: {error}. {_USE_ANOTHER}") from error

    def check_hashes(self, hashes: Mapping[str, int]) -> None:
        """Compare hashes of whole leaves, by name, with those of what was saved. Raises: DamagedCheckpoint."""
        if wrong := [name for name, value in hashes.items() if _hex(value) != self.metadata.leaves[name].hash]:
            raise DamagedCheckpoint(
                f"{self.path}: {', '.join(wrong[:5])} did not come back as saved (content hash differs). {_USE_ANOTHER}"
            )


_USE_ANOTHER = "Use another checkpoint of the run, or restore the file from a copy."


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Look at a checkpoint, or at the newest of a run's folder: its metadata and the size of every file.

    Raises: ValueError when it is no checkpoint, DamagedCheckpoint when it is incomplete or a file is missing or cut
        off.
    """
    path = _one_checkpoint(Path(path))
    found = read_metadata(path)
    for name, size in found.files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpoint(f"{path}: file {name} is missing. {_USE_ANOTHER}")
        if (actual := file.stat().st_size) != size:
            raise DamagedCheckpoint(
                f"{path}: file {name} has {actual} bytes and was written with {size}. {_USE_ANOTHER}"
            )
    if found.kind == "sharded":
        return Checkpoint(path, found, store.ZarrReader(path / _ARRAYS))
    name = f"process_{jax.process_index():05}"
    table = {}
    if jax.process_index() < found.processes:
        content = (path / _LOCAL / f"{name}.json").read_bytes()
        if found.tables and found.tables.get(name) != _sha256(content):
            raise DamagedCheckpoint(f"{path}: file {_LOCAL}/{name}.json is not what was written. {_USE_ANOTHER}")
        table = json.loads(content)
    dtypes = {n: np.dtype(leaf.dtype) for n, leaf in found.leaves.items()}
    return Checkpoint(path, found, store.LocalReader(path / _LOCAL / f"{name}.bin", table, dtypes))


def _one_checkpoint(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder. Name a checkpoint, or the folder of a run.")
    if re.fullmatch(r"step_\d+", path.name) or (path / _MARK).exists():
        return path
    steps = steps_in(path)
    if not steps:
        raise ValueError(f"{path} is no checkpoint of jfsdp and holds none: there is no {_MARK} and no step_* in it.")
    return step_folder(path, steps[-1])


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint says of itself. Raises: DamagedCheckpoint."""
    try:
        found = json.loads((path / _MARK).read_text())
        if not isinstance(found, dict) or not str(found.get("format")).startswith("jfsdp-checkpoint-"):
            raise ValueError("it was not written by jfsdp")
        if found["format"] != Metadata.__dataclass_fields__["format"].default:
            raise ValueError(f"its format {found['format']} is of another version of jfsdp ({found.get('versions')})")
        # Those saved before it was there have none.
        if "checksum" in found and found["checksum"] != _checksum(found):
            raise ValueError("its checksum differs from what was written")
        leaves = {n: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for n, leaf in found["leaves"].items()}
        return Metadata(**{**found, "leaves": leaves})
    except FileNotFoundError as error:
        raise DamagedCheckpoint(
            f"{path} is incomplete: {_MARK}, which is written last, is not there. {_USE_ANOTHER}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path / _MARK} cannot be understood: {error}. {_USE_ANOTHER}") from error


def _checksum(found: Mapping[str, Any]) -> str:
    """Of jfsdp.json as Python values, the checksum left out: spaces and the order of keys do not count."""
    return _sha256(json.dumps({k: v for k, v in found.items() if k != "checksum"}, sort_keys=True).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def steps_in(run: Path) -> list[int]:
    """Steps of the checkpoints in a run's folder, complete or damaged, oldest first."""
    found = (re.fullmatch(r"step_(\d+)", p.name) for p in run.glob("step_*") if p.is_dir())
    return sorted(int(match[1]) for match in found if match)


def step_folder(run: Path, step: int) -> Path:
    return run / f"step_{step:08}"


def is_complete(path: Path) -> bool:
    return (path / _MARK).exists()


# From a state to named arrays


def _named(tree) -> dict[str, Any]:
    """Leaves by path: `opt_state.0.mu.blocks.up`.

    Raises: ValueError when two have one name.
    """
    flat = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if doubled := [name for name, count in Counter(name for name, _ in flat).items() if count > 1]:
        raise ValueError(f"two arrays of the state are called {doubled[0]}. Rename one: a key may not contain a dot.")
    return dict(flat)


def _logical_shapes(tree, plan: Plan | None) -> dict[str, tuple[int, ...]]:
    """Shapes without padding. A leaf is padded as the parameter whose path ends its own (a moment, an average)."""
    params = {} if plan is None else {path_name(p): x for p, x in jax.tree_util.tree_flatten_with_path(plan.layouts)[0]}

    def logical(path, leaf) -> tuple[int, ...]:
        ends = (path_name(path[i:]) for i in range(len(path)))
        owner = next((params[end] for end in ends if end in params), None)
        is_padded = owner is not None and tuple(leaf.shape) == owner.stack(owner.padded_shape)
        return owner.logical_shape if is_padded else tuple(leaf.shape)

    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): logical(path, leaf) for path, leaf in flat}


class Arrays(NamedTuple):
    """A state as plain arrays by name: random keys as their data. `named_arrays` makes it."""

    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    """Logical."""
    leaves: dict[str, Leaf]


def named_arrays(tree, plan: Plan | None) -> Arrays:
    values, shapes, keys = _named(tree), _logical_shapes(tree, plan), {}
    for name, value in values.items():
        if store.is_key(value.dtype):
            keys[name], values[name] = _key_impl(value), _key_data(value)
            shapes[name] = tuple(values[name].shape)
    leaves = {n: Leaf(shape=shapes[n], dtype=v.dtype.name, key=keys.get(n)) for n, v in values.items()}
    return Arrays(values, shapes, leaves)


def _key_impl(key) -> str:
    """The generator of typed random keys, also of abstract ones."""
    found = []
    jax.eval_shape(lambda k: found.append(str(jax.random.key_impl(k))), key)
    return found[0]


def _key_data(key):
    if isinstance(key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)
    return jax.random.key_data(key)


def _generator() -> dict[str, Any]:
    names = ("jax_default_prng_impl", "jax_threefry_partitionable")
    return {name: getattr(jax.config, name) for name in names}


# Saving


def write_part(
    folder: Path, host: list[store.HostArray], hashes: Callable[[], dict[str, int]], *, is_local: bool
) -> None:
    """Write what this process has of a state; with everybody's part there, one of them completes it."""
    process = f"process_{jax.process_index():05}"
    for part in (_LOCAL, _HASHES) if is_local else (_ARRAYS, _HASHES):
        (folder / part).mkdir(exist_ok=True)
    with ThreadPoolExecutor(1, "write", initializer=store.take_spare_time) as beside:
        if is_local:
            written = beside.submit(store.write_local, folder / _LOCAL / f"{process}.bin", host)
        else:
            written = beside.submit(store.write_zarr, folder / _ARRAYS, host, is_first=jax.process_index() == 0)
        (folder / _HASHES / f"{process}.json").write_text(json.dumps(hashes()))
        table = written.result()
    if is_local:
        (folder / _LOCAL / f"{process}.json").write_text(json.dumps(table))


def write_pieces(
    folder: Path, pieces: Iterable[tuple[str, store.Piece]], metadata: Metadata, leaves: dict[str, Leaf]
) -> None:
    """Make a sharded checkpoint of values that come piece by piece, the pieces of an array in one shape.

    One piece is in memory at a time, and becomes a file.
    """
    hashes: dict[str, int] = {}
    for name, piece in pieces:
        shape, values = leaves[name].shape, piece.values
        is_first = name not in hashes
        hashes[name] = hashes.get(name, 0) + store.hash_piece(piece, shape)
        host = store.HostArray(name, shape, values.dtype, values.shape, [piece])
        store.write_zarr(folder / _ARRAYS, [host], is_first=is_first)
    (folder / _HASHES).mkdir()
    (folder / _HASHES / "process_00000.json").write_text(json.dumps(hashes))
    complete(folder, metadata, leaves)


def complete(folder: Path, metadata: Metadata, leaves: dict[str, Leaf]) -> None:
    """Add up the hashes, note the files, and with that a checkpoint is complete."""
    parts = [json.loads(p.read_text()) for p in (folder / _HASHES).iterdir()]
    shutil.rmtree(folder / _HASHES)
    leaves = {n: replace(leaf, hash=_hex(sum(part[n] for part in parts))) for n, leaf in leaves.items()}
    files = sorted(p for part in (_ARRAYS, _LOCAL) for p in (folder / part).rglob("*") if p.is_file())
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in files}
    tables = {p.stem: _sha256(p.read_bytes()) for p in files if p.parent.name == _LOCAL and p.suffix == ".json"}
    # Through JSON once, so that what is summed is what will be read: tuples are lists there.
    found = json.loads(json.dumps(asdict(replace(metadata, leaves=leaves, files=sizes, tables=tables))))
    with (folder / _MARK).open("w") as file:
        json.dump({**found, "checksum": _checksum(found)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _hex(hash_: int) -> str:
    return f"{hash_ % 2**32:08x}"


@cache
def _versions() -> dict[str, str]:
    return {name: packages.version(name) for name in ("jax", "orbax-checkpoint", "optax")}


def describe(state, plan: Plan | None, kind: str, **what) -> Metadata:
    """Metadata of a state, its arrays left out."""
    leaves = jax.tree.leaves(state)
    mesh = plan.mesh if plan is not None else getattr(leaves[0].sharding, "mesh", None)
    counters = {}
    if hasattr(state, "skipped"):
        step, skipped = int(state.step), int(state.skipped)
        counters = dict(batches=step, skipped=skipped, updates=step - skipped)
    return Metadata(
        kind=kind,
        leaves={},
        mesh={} if mesh is None else dict(mesh.shape),
        strategy="" if plan is None else plan.placement.strategy.value,
        processes=jax.process_count(),
        generator=_generator(),
        counters=counters,
        versions=_versions(),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        **what,
    )


# Restoring


def restore(path: str | os.PathLike | Checkpoint, like, *, partial: bool = False, cast: bool = False):
    """The state saved at `path` (a checkpoint, opened or not, or a run's folder: its newest one), placed as `like` is.

    like: `TrainState.abstract(tx, plan)` or a real state: names, shapes, dtypes and shardings to restore to. Any mesh
        and strategy will do for a sharded checkpoint; a local one needs those that it was saved with.
    partial: take from `like`, which must be real then, what the checkpoint lacks or has in another shape, and log it.
    cast: convert to the dtypes of `like` where the checkpoint has others, and log it.
    Raises: ValueError listing what does not fit, DamagedCheckpoint for values that are not what was saved.
    """
    found = path if isinstance(path, Checkpoint) else read_together(lambda: open_checkpoint(path), path)
    plan = getattr(like, "plan", None)
    wanted = named_arrays(like, plan)
    _check_generator(found)
    if found.metadata.kind == "local":
        _check_same_devices(found, plan)
    skipped = _check_fit(found, wanted, partial, cast)
    names = [name for name in wanted.values if name not in skipped]
    targets = [
        store.Target(n, wanted.shapes[n], tuple(v.shape), v.sharding) for n, v in wanted.values.items() if n in names
    ]
    restored = dict(zip(names, read_together(lambda: store.to_devices(targets, found.read), found.path)))
    _check_hashes(found, restored, wanted.shapes)
    flat, tree = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for path_, leaf in flat:
        name = path_name(path_)
        value = restored[name] if name in restored else leaf
        if name in restored and (impl := wanted.leaves[name].key):
            value = jax.random.wrap_key_data(value, impl=impl)
        elif name in restored and value.dtype != leaf.dtype:
            value = jax.jit(lambda x, dtype=leaf.dtype: x.astype(dtype), out_shardings=value.sharding)(value)
        leaves.append(value)
    return jax.tree.unflatten(tree, leaves)


def _check_fit(found: Checkpoint, wanted: Arrays, partial: bool, cast: bool) -> set[str]:
    """Names that `partial` leaves as they are."""
    have, want = found.metadata.leaves, wanted.leaves
    missing = [f"{n} {list(leaf.shape)} is not in the checkpoint" for n, leaf in want.items() if n not in have]
    extra = [f"{n} {list(leaf.shape)} is only in the checkpoint" for n, leaf in have.items() if n not in want]
    both = [n for n in want if n in have]
    shapes = [n for n in both if have[n].shape != want[n].shape]
    differing = [f"{n} is {list(have[n].shape)} in the checkpoint, {list(want[n].shape)} here" for n in shapes]
    keys = [
        f"{n}: random keys of {have[n].key or 'no generator'} in the checkpoint, of {want[n].key or 'none'} here"
        for n in both
        if have[n].key != want[n].key
    ]
    dtypes = [
        f"{n} is {have[n].dtype} in the checkpoint, {want[n].dtype} here"
        for n in both
        if have[n].dtype != want[n].dtype and n not in shapes
    ]
    kinds = [keys, *([] if partial else [missing, extra, differing]), [] if cast else dtypes]
    problems = [line for kind in kinds for line in _first(kind)]
    if problems:
        advice = "Build the model and optimizer that it was saved with"
        if missing or extra or differing:
            advice += ", or take what fits with partial=True"
        if dtypes:
            advice += ", or convert dtypes with cast=True"
        raise ValueError(f"{found.path} does not fit:\n  " + "\n  ".join(problems) + f"\n{advice}.")
    if partial and (missing or extra or differing):
        _log.warning("%s, restored in part, left out:\n  %s", found.path, "\n  ".join([*missing, *extra, *differing]))
    if cast and dtypes:
        _log.warning("%s, dtypes converted:\n  %s", found.path, "\n  ".join(dtypes))
    return {n for n in want if n not in have} | set(shapes)


def _first(lines: list[str], most: int = 10) -> list[str]:
    """The first lines, and how many more there are: a model of another width differs in everything."""
    return [*lines[:most], f"and {len(lines) - most} more like this"] if len(lines) > most + 1 else lines


def _check_generator(found: Checkpoint) -> None:
    saved, here = found.metadata.generator, _generator()
    if changed := [name for name in saved if saved[name] != here.get(name)]:
        words = ", ".join(f"{name} {saved[name]} (here {here.get(name)})" for name in changed)
        raise ValueError(
            f"{found.path} was saved with {words}: random numbers would not go on as they were. "
            f"Set {' and '.join(f'{name.upper()}={saved[name]}' for name in changed)} in the environment."
        )


def _check_same_devices(found: Checkpoint, plan: Plan | None) -> None:
    here = (
        _describe_devices(dict(plan.mesh.shape), plan.placement.strategy.value, jax.process_count()) if plan else "none"
    )
    there = found.metadata.where()
    if here != there:
        raise ValueError(
            f"{found.path} is a local checkpoint of {there}, and this run has {here}. A local one restores only onto "
            "what it was saved on. Save sharded checkpoints to go on elsewhere."
        )


def _describe_devices(mesh: Mapping[str, int], strategy: str, processes: int) -> str:
    return f"mesh {'x'.join(map(str, mesh.values()))}, {strategy}, {processes} process{'es' * (processes > 1)}"


def _check_hashes(found: Checkpoint, restored: dict[str, jax.Array], shapes) -> None:
    hashes = store.content_hashes(restored, shapes)()
    if jax.process_count() > 1:
        parts = multihost_utils.process_allgather(np.array([*hashes.values()], np.uint32))
        hashes = dict(zip(hashes, parts.sum(axis=0, dtype=np.uint64).tolist()))
    found.check_hashes(hashes)


def read_together(read: Callable, path: str | os.PathLike):
    """Run `read` in every process; where one fails, all do, so that none is left waiting."""
    error, result = None, None
    try:
        result = read()
    except DamagedCheckpoint as caught:
        error = caught
    if jax.process_count() > 1 and error is None and multihost_utils.process_allgather(np.int32(0)).any():
        error = DamagedCheckpoint(f"{path} could not be read by another process, which says why.")
    elif jax.process_count() > 1 and error is not None:
        multihost_utils.process_allgather(np.int32(1))
    if error is not None:
        raise error
    return result
