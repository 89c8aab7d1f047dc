"""The safetensors format on disk: one file or a numbered set with an index, read and written tensor by tensor.

Owns files, names inside them and dtypes; whoever calls says what a tensor holds. Neither direction has more than one
tensor in memory: a reader maps one tensor at a time, a writer asks for one at a time. The `safetensors` package is
not used because its NumPy side knows no bfloat16 and writes only what is whole in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 << 30
"""A file of a set is at most this large, as on the Hugging Face hub, unless one tensor is larger."""

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """A tensor to be written: what it is, and how to get it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. `tensor[index]` reads only that part of it, and keeps nothing mapped."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    """Bytes from the start of the file."""

    def __getitem__(self, index) -> np.ndarray:
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)[index]
        # One map per read: what it touched stops counting as this process's memory when the map goes away.
        mapped = np.memmap(self.path, self.dtype, "r", offset=self.offset, shape=self.shape)
        return np.array(np.asarray(mapped)[index])


def read_safetensors(folder: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a folder (a set with an index, or every .safetensors file in it) or of one file; no value is read.

    Raises: ValueError for a file that is cut off or is not safetensors, and for an index that names what no file holds.
    """
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        wanted: dict[str, str] = json.loads(index.read_text())["weight_map"]
        found = {name: t for file in sorted(set(wanted.values())) for name, t in _read_header(folder / file).items()}
        if lost := sorted(set(wanted) - set(found)):
            raise ValueError(f"{index} names {', '.join(lost[:5])}, which no file holds. Fetch the files again.")
        return found
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors files. Give a folder as the Hugging Face hub lays it out.")
    return {name: tensor for file in files for name, tensor in _read_header(file).items()}


def write_safetensors(
    folder: str | os.PathLike,
    entries: Iterable[Entry],
    *,
    aliases: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    stem: str = "model",
    is_writer: bool = True,
) -> list[Path]:
    """Write tensors as `stem.safetensors`, or as `stem-00001-of-0000N.safetensors` with an index; gives the files.

    Each is fetched when its turn comes, in order, and let go. A file appears under its name once it is complete, and
    the index once all files are there.

    aliases: other names of tensors that are written once (tied weights), `{other: written}`; kept in the metadata of
        the files, as `safetensors.torch` does, and of the index.
    is_writer: False fetches everything and writes nothing: fetching may be a collective that all processes join.
    Raises: ValueError when a name comes twice, an alias means nothing, or what was fetched is not what was announced.
    """
    folder, entries, aliases = Path(folder), list(entries), dict(aliases or {})
    names = {entry.name for entry in entries}
    if len(names) < len(entries) or names & set(aliases) or not set(aliases.values()) <= names:
        raise ValueError("names and aliases of tensors must differ, and an alias must mean a tensor that is written.")
    groups = _split(entries, max_file_bytes)
    if len(groups) == 1:
        files = [folder / f"{stem}.safetensors"]
    else:
        files = [folder / f"{stem}-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    for path, group in zip(files, groups):
        here = {other: name for other, name in aliases.items() if name in {entry.name for entry in group}}
        _write_file(path, group, {"format": "pt", **here}, is_writer)
    if len(groups) > 1 and is_writer:
        total = sum(_nbytes(entry) for entry in entries)
        index = {
            "metadata": {"total_size": total, **({"aliases": aliases} if aliases else {})},
            "weight_map": {entry.name: path.name for path, group in zip(files, groups) for entry in group},
        }
        text = json.dumps(index, indent=2) + "\n"
        write_text(folder / f"{stem}.safetensors.index.json", text)
    return files


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it is there completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def _read_header(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            tensor = Tensor(path, tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]]), 8 + length + first)
            if end - first != math.prod(tensor.shape) * tensor.dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"{name} should end at byte {8 + length + end} of {size}")
            tensors[name] = tensor
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} cannot be read as safetensors ({detail}). Fetch or export it again.") from error
    return tensors


def _split(entries: list[Entry], limit: int) -> list[list[Entry]]:
    """Entries in order, in groups of at most `limit` bytes where single tensors allow it."""
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + _nbytes(entry) > limit:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += _nbytes(entry)
    return groups


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * np.dtype(entry.dtype).itemsize


def _write_file(path: Path, entries: list[Entry], metadata: dict[str, str], is_writer: bool) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for entry in entries:
        code, first, end = _CODES[np.dtype(entry.dtype)], end, end + _nbytes(entry)
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    part = path.with_name(path.name + ".part")
    with part.open("wb") if is_writer else nullcontext() as file:
        if is_writer:
            file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            value = np.asarray(entry.fetch())
            if value.shape != tuple(entry.shape) or value.dtype != np.dtype(entry.dtype):
                raise ValueError(
                    f"{entry.name} was announced as {np.dtype(entry.dtype).name}{list(entry.shape)} and came as "
                    f"{value.dtype.name}{list(value.shape)}."
                )
            if is_writer:
                file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            del value  # before the next one is fetched
        if is_writer:
            file.flush()
            os.fsync(file.fileno())
    if is_writer:
        part.replace(path)
