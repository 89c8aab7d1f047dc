"""Arrays on disk: one folder per array, cut as the devices were, read in any other cut.

Owns what a global array becomes as files, both ways, and its content hash. Knows no training state: which arrays
there are, what they are called and what their padding is comes from `checkpoint.py`, which also decides when.

Note [Files of an array]
An array is a Zarr 3 array of its logical shape, in a folder of its own. Each shard that a device holds is one file,
written by the process that holds the first copy of it, so replicas write nothing twice and nobody gathers. What a
shard holds beyond the logical shape is padding and stays out. Inside a file the shard is cut further (Zarr's
`sharding_indexed`), so another mesh reads the part it needs and not whole files; each of these chunks carries a
CRC-32C that is checked whenever it is read, and a chunk that is not there is an error, never zeros.

Note [Content hash]
The sum modulo 2^32, over all elements, of the element's bits mixed with its place in the logical array. A sum does
not care how the array is cut, so the hash of what was saved on one mesh can be compared with the hash of what was
restored on another, from what the devices hold. It notices what no checksum of a file can: files exchanged, or
values put in another place. It is no defence against someone who wants it to match.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jfsdp.offload import fetched

_CHUNK_BYTES = 4 << 20
_RUN_BYTES = 16 << 10  # a cut that leaves less in one run makes copying slow
_IN_FLIGHT_BYTES = 256 << 20  # of copies that encoding and reading make, beside the arrays themselves
_THREADS = 8
_NICER = 10  # of 19 steps of priority: a tenth of a core where others want all of it
_CACHE = {"cache_pool": {"total_bytes_limit": 32 << 20}}  # a chunk that two shards share is read once

Slices = tuple[slice, ...]


class Piece(NamedTuple):
    """A part of an array in host memory."""

    where: Slices
    """In the logical array."""
    values: np.ndarray


@dataclass(frozen=True)
class HostArray:
    """This process's part of a global array, copied to host memory."""

    name: str
    shape: tuple[int, ...]
    """Logical shape."""
    dtype: np.dtype
    chunk: tuple[int, ...]
    """What one device holds, padding included: the part of the array that one file has."""
    pieces: list[Piece]


def is_key(dtype: Any) -> bool:
    """Whether arrays of `dtype` are typed random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_host(
    arrays: Mapping[str, jax.Array], shapes: Mapping[str, tuple[int, ...]], *, every: bool = False
) -> list[HostArray]:
    """This process's shards in host memory, without padding; afterwards the arrays may be donated.

    On CPUs it is the devices' own memory: where a donated buffer is looked at by NumPy, XLA computes into a new one.

    shapes: logical shapes. every: also shards whose first copy another process holds.
    """
    for array in arrays.values():
        array.copy_to_host_async()
    return [_host_array(name, array, shapes[name], every) for name, array in arrays.items()]


def _host_array(name: str, array: jax.Array, shape: tuple[int, ...], every: bool) -> HostArray:
    pieces: dict[tuple, Piece] = {}
    for shard in array.addressable_shards:
        where = _inside(shard.index, shape)
        place = tuple((s.start, s.stop) for s in where)
        if (every or shard.replica_id == 0) and place not in pieces and all(a < b for a, b in place):
            values = np.asarray(shard.data)[tuple(slice(b - a) for a, b in place)]
            pieces[place] = Piece(where, np.asarray(values, order="C"))
    return HostArray(name, shape, array.dtype, array.sharding.shard_shape(array.shape), list(pieces.values()))


def _inside(index: Slices, shape: tuple[int, ...]) -> Slices:
    """The part of a shard that lies inside the logical shape; empty where the shard is padding alone."""
    bounds = [(s.start or 0, n if s.stop is None else min(s.stop, n)) for s, n in zip(index, shape)]
    return tuple(slice(min(a, b), b) for a, b in bounds)


# Zarr, one folder per array: See Note [Files of an array]


def write_zarr(folder: Path, arrays: Sequence[HostArray], *, is_first: bool) -> None:
    """Write this process's pieces; `is_first` process also writes what describes the arrays. Lets go of each piece.

    Raises: OSError for whatever the file system refuses.
    """
    with _reads_as_os_error(folder):
        opened = [_open(folder, a.name, a if is_first else None, assume=None if is_first else a) for a in arrays]
        budget = _Budget(_IN_FLIGHT_BYTES)
        writes = []
        for array, t in zip(arrays, opened):
            while array.pieces:
                where, values = array.pieces.pop()
                budget.take(values.nbytes)
                done = t[where].write(values, can_reference_source_data_indefinitely=True)
                done.add_done_callback(lambda _, n=values.nbytes: budget.give(n))
                writes.append(done)
                del values
        # None is left running: who cleans up after a failure must not race with it.
        if errors := [error for error in (done.exception() for done in writes) if error is not None]:
            raise errors[0]


def _open(folder: Path, name: str, create: HostArray | None = None, *, assume: HostArray | None = None, context=None):
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder.absolute() / file_name(name))},
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,  # a chunk of zeros is written too: no chunk means damage
    }
    if (array := create or assume) is None:
        return tensorstore.open(spec, open=True, recheck_cached_data=False, context=context).result()
    spec["metadata"] = _zarr_metadata(array)
    if create is not None:
        return tensorstore.open(spec, create=True).result()
    return tensorstore.open(spec, open=True, assume_metadata=True).result()


def _zarr_metadata(array: HostArray) -> dict[str, Any]:
    chunk = [max(1, n) for n in array.chunk]
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [little, {"name": "crc32c"}]
    sharding = {"chunk_shape": _inner_chunk(chunk, array.shape, array.dtype.itemsize), "codecs": codecs}
    return {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "sharding_indexed", "configuration": {**sharding, "index_codecs": codecs}}],
    }


def _inner_chunk(chunk: list[int], shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Shape of the chunks in a file: few bytes, and none reaches over the end of the array, which would be padding.

    Dims that the devices cut are cut further, so that up to eight times as many devices find their parts in chunks of
    their own and each byte is read once.
    """
    inner = [math.gcd(c, n) or 1 for c, n in zip(chunk, shape)]

    def nbytes(first: int = 0) -> int:
        return math.prod(inner[first:]) * itemsize

    def halve(d: int) -> None:
        inner[d] //= next((p for p in range(2, math.isqrt(inner[d]) + 1) if inner[d] % p == 0), inner[d])

    for d in range(len(inner)):
        while nbytes() > _CHUNK_BYTES and inner[d] > 1:
            halve(d)
    for d in range(len(inner)):
        begun = inner[d]
        while chunk[d] < shape[d] and begun // inner[d] < 8 and inner[d] % 2 == 0 and nbytes(d) // 2 >= _RUN_BYTES:
            inner[d] //= 2
    return inner


def file_name(name: str) -> str:
    """The name of an array as a folder's: `params.blocks.up`, with what a file system may refuse escaped."""
    return quote(name, safe="[]()=, ")


class ZarrReader:
    """The arrays of a folder, by name. Reads parts, keeps nothing."""

    def __init__(self, folder: Path):
        self._folder, self._context, self._opened, self._lock = (
            folder,
            tensorstore.Context(_CACHE),
            {},
            threading.Lock(),
        )

    def read(self, name: str, where: Slices = ()) -> np.ndarray:
        """Part of an array, or all of it.

        Raises: OSError if a file is missing, cut off or changed, with its name.
        """
        with _reads_as_os_error(self._folder):
            with self._lock:
                if name not in self._opened:
                    self._opened[name] = _open(self._folder, name, context=self._context)
            return np.asarray(self._opened[name][where].read().result())


def take_spare_time() -> None:
    """Let the calling thread, and what it starts, have only the cores' time that the training leaves (Linux)."""
    # tensorstore writes with several threads. On few cores they would stand in line before the one that takes steps.
    if sys.platform == "linux":
        me = os.PRIO_PROCESS, threading.get_native_id()
        os.setpriority(*me, min(os.getpriority(*me) + _NICER, 19))


@contextmanager
def _reads_as_os_error(folder: Path) -> Iterator[None]:
    """tensorstore reports what the file system said as ValueError; its text names the file."""
    try:
        yield
    except ValueError as error:
        text = str(error).partition(" [source locations=")[0]
        file, code = re.search(r'file "([^"]+)"', text), re.search(r"os_error_code='(\d+)'", text)
        if file and code:
            raise OSError(int(code[1]), os.strerror(int(code[1])), file[1]) from error
        raise OSError(f"{text} (in {folder})") from error


class _Budget:
    """Bytes that may be in flight at a time; one request larger than that is let through alone."""

    def __init__(self, limit: int):
        self._free, self._limit, self._changed = limit, limit, threading.Condition()

    def take(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= min(count, self._limit))
            self._free -= count

    def give(self, count: int) -> None:
        with self._changed:
            self._free += count
            self._changed.notify_all()


# One file per process, for a restart on the same devices


def write_local(path: Path, arrays: Sequence[HostArray]) -> dict[str, list]:
    """Write pieces one behind the other; gives where each is: `{name: [[start, stop] per dim, first byte]}`."""
    table: dict[str, list] = defaultdict(list)
    with path.open("wb") as file:
        for array in arrays:
            while array.pieces:
                where, values = array.pieces.pop()
                table[array.name].append([[[s.start, s.stop] for s in where], file.tell()])
                file.write(values.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return dict(table)


class LocalReader:
    """This process's own pieces, as they were written. `read` gives only what is one of them."""

    def __init__(self, path: Path, table: dict[str, list], dtypes: Mapping[str, np.dtype]):
        self._path, self._dtypes = path, dtypes
        self._at = {(n, _place(where)): first for n, pieces in table.items() for where, first in pieces}

    def read(self, name: str, where: Slices) -> np.ndarray:
        dtype, shape = self._dtypes[name], tuple(s.stop - s.start for s in where)
        if not math.prod(shape):
            return np.empty(shape, dtype)  # padding alone
        first = self._at[name, _place([[s.start, s.stop] for s in where])]
        with self._path.open("rb") as file:
            file.seek(first)
            values = np.fromfile(file, dtype, math.prod(shape))
        if values.size < math.prod(shape):
            raise OSError(f"{self._path} ends before the values of {name}.")
        return values.reshape(shape)


def _place(where) -> tuple:
    return tuple(tuple(bounds) for bounds in where)


# Onto devices


class Target(NamedTuple):
    """What an array shall be on the devices."""

    name: str
    logical: tuple[int, ...]
    shape: tuple[int, ...]
    """With padding, which is zero."""
    sharding: jax.sharding.Sharding


def to_devices(targets: Sequence[Target], read: Callable[[str, Slices], np.ndarray]) -> list[jax.Array]:
    """Read each part of each array once in this process and give every device a buffer of its own."""
    budget = _Budget(_IN_FLIGHT_BYTES)

    def one(target: Target) -> jax.Array:
        devices: dict[tuple, list] = defaultdict(list)
        for device, index in target.sharding.addressable_devices_indices_map(target.shape).items():
            where = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, target.shape))
            devices[tuple((s.start, s.stop) for s in where)].append(device)
        buffers = []
        for place, holders in devices.items():
            shape = tuple(b - a for a, b in place)
            where = _inside(tuple(slice(a, b) for a, b in place), target.logical)
            size = math.prod(shape)
            budget.take(size)
            try:
                values = read(target.name, where)
                if values.shape != shape:
                    values = np.pad(values, [(0, n - have) for n, have in zip(shape, values.shape)])
                # device_put may take a NumPy array's memory as it is, so no two devices may be given the same one.
                kind = target.sharding.memory_kind
                for i, device in enumerate(holders):
                    there = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                    buffers.append(jax.device_put(values.copy() if i else values, there))
                del values
            finally:
                budget.give(size)
        return jax.make_array_from_single_device_arrays(target.shape, target.sharding, buffers)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, targets))


# Content: See Note [Content hash]

_MIX = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_BLOCK = 1 << 15  # words that NumPy hashes at a time


def content_hashes(arrays: Mapping[str, jax.Array], shapes: Mapping[str, tuple[int, ...]]) -> Callable[[], dict]:
    """Start hashing each array within its logical shape; what comes back gives this process's part of each, an int.

    A background thread may ask for it, when the arrays are donated already. The parts of all processes add up, modulo
    2^32, to the hash. On CPUs NumPy computes it from the devices' own memory, on one core and only when it is asked
    for, as simulated devices would do so before the next step; other devices begin at once.
    """
    on_cpus = all(d.platform == "cpu" for x in arrays.values() for d in x.sharding.device_set)
    return (_hash_on_host if on_cpus else _hash_on_devices)(arrays, shapes)


def _hash_on_host(arrays, shapes) -> Callable[[], dict]:
    host = to_host(arrays, shapes)

    # One thread: each wants the interpreter between two blocks, and so does the training.
    return lambda: {a.name: sum(hash_piece(piece, a.shape) for piece in a.pieces) % 2**32 for a in host}


def _hash_on_devices(arrays, shapes) -> Callable[[], dict]:
    """Each device hashes what it holds, without a collective."""
    parts = {}
    for name, x in arrays.items():
        on_device = fetched(x)
        parts[name] = _hash_parts(on_device, on_device.sharding, tuple(shapes[name]))
        if on_device is not x:  # offloaded: the device need not have room for more than one
            parts[name].block_until_ready()
    owners = {name: {s.device for s in x.addressable_shards if s.replica_id == 0} for name, x in arrays.items()}

    def own(name: str) -> int:
        return sum(int(s.data[0]) for s in parts[name].addressable_shards if s.device in owners[name]) % 2**32

    return lambda: {name: own(name) for name in parts}


def hash_piece(piece: Piece, shape: tuple[int, ...]) -> int:
    """The hash of a piece of an array of this shape, computed in blocks that stay in a core's cache."""
    if not piece.values.size:
        return 0
    itemsize = piece.values.itemsize
    unit, per = {1: (np.uint8, 1), 2: (np.uint16, 1)}.get(itemsize, (np.uint32, itemsize // 4))
    # Places count up within a run: over the dims that the piece has whole, and the last that it has not.
    d = next((d for d in reversed(range(len(shape))) if piece.values.shape[d] != shape[d]), 0)
    starts = np.zeros(1, np.uint32)
    for i, part in enumerate(piece.where[: d + 1]):
        stride = math.prod(shape[i + 1 :]) * per
        steps = np.arange(part.start, part.stop if i < d else part.start + 1, dtype=np.uint64)
        starts = (starts[:, None] + (steps * np.uint64(stride)).astype(np.uint32)).reshape(-1)
    words = np.ascontiguousarray(piece.values).reshape(-1).view(unit).reshape(starts.size, -1)
    columns = min(words.shape[1], _BLOCK)
    rows = max(1, _BLOCK // columns)
    ramp = np.arange(columns, dtype=np.uint32) * np.uint32(_MIX[0])
    mixed, shifted, total = np.empty((rows, columns), np.uint32), np.empty((rows, columns), np.uint32), 0
    for r in range(0, starts.size, rows):
        for c in range(0, words.shape[1], columns):
            w = words[r : r + rows, c : c + columns]
            h, s = mixed[: w.shape[0], : w.shape[1]], shifted[: w.shape[0], : w.shape[1]]
            first = (starts[r : r + rows] + np.uint32(c % 2**32)) * np.uint32(_MIX[0])
            np.add(first[:, None], ramp[: w.shape[1]], out=h)
            np.bitwise_xor(h, w, out=h)
            for shift, factor in ((16, _MIX[1]), (13, _MIX[2]), (16, None)):
                np.bitwise_xor(h, np.right_shift(h, shift, out=s), out=h)
                if factor is not None:
                    np.multiply(h, np.uint32(factor), out=h)
            total += int(h.sum(dtype=np.uint32))
    return total % 2**32


@partial(jax.jit, static_argnums=(1, 2))  # one by one: moments have the shapes of parameters and compile nothing new
def _hash_parts(x: jax.Array, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> jax.Array:
    """The hash of what each device holds: `[devices]`."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return _hash(x, shape, [0] * x.ndim)[None]
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    everywhere = jax.sharding.PartitionSpec(sharding.mesh.axis_names)

    def local(x: jax.Array) -> jax.Array:
        starts = [0 if axes is None else jax.lax.axis_index(axes) * n for axes, n in zip(spec, x.shape)]
        return _hash(x, shape, starts)[None]

    specs = dict(mesh=sharding.mesh, in_specs=sharding.spec, out_specs=everywhere, check_vma=False)
    return jax.shard_map(local, **specs)(x)


def _hash(x: jax.Array, shape: tuple[int, ...], starts: Sequence) -> jax.Array:
    """The hash of a part of an array of this shape, which begins at `starts`."""
    words = _words(x)
    shape, starts = shape + words.shape[x.ndim :], [*starts, *[0] * (words.ndim - x.ndim)]
    place, is_inside, stride = jnp.zeros_like(words), True, 1
    for d in reversed(range(words.ndim)):
        i = jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) + jnp.uint32(starts[d])
        place, is_inside = place + i * jnp.uint32(stride % 2**32), is_inside & (i < shape[d])
        stride *= shape[d]
    mixed = _mix(words ^ (place * jnp.uint32(_MIX[0])))
    return jnp.sum(jnp.where(is_inside, mixed, jnp.uint32(0)), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32, in a further dim where there are more than 32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's last step: every bit of the input changes about half of the output's. It gives 0 for 0."""
    x = (x ^ (x >> 16)) * jnp.uint32(_MIX[1])
    x = (x ^ (x >> 13)) * jnp.uint32(_MIX[2])
    return x ^ (x >> 16)
