"""The safetensors format on disk: one file or a numbered set with an index, read and written tensor by tensor.

Owns files, names inside them and dtypes; whoever calls says what a tensor holds. Neither direction has more than one
tensor in memory: a reader maps one tensor at a time, a writer asks for one at a time. The `safetensors` package is
not used because its NumPy side knows no bfloat16 and writes only what is whole in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 << 30
"""A file of a set is at most this large, as on the Hugging Face hub, unless one tensor is larger."""

PART = ".part"
"""What the name of a file that is not complete ends with."""

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
        wanted = _read_index(index)
        found = {name: t for file in sorted(set(wanted.values())) for name, t in _read_header(folder / file).items()}
        if lost := sorted(set(wanted) - set(found)):
            raise ValueError(f"{index} names {', '.join(lost[:5])}, which no file holds. Fetch the files again.")
        return found
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files and (pickled := next((p for p in folder.glob("*.*") if p.suffix in (".bin", ".pt", ".pth")), None)):
        raise ValueError(
            f"{folder} has no .safetensors files. {pickled.name} is a pickle, which may run any code when it is read, "
            "so it is not. Load the folder with transformers and save_pretrained it: that writes safetensors."
        )
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

    Each is fetched when its turn comes, in order, and let go. Files appear under their names once all are complete, the
    index last, and what else a set of this stem left in the folder goes. A failure before that leaves nothing behind.

    aliases: other names of tensors that are written once (tied weights), `{other: written}`; kept in the metadata of
        the files, as `safetensors.torch` does, and of the index.
    is_writer: False fetches everything and writes nothing: fetching may be a collective that all processes join.
    Raises: ValueError when a name comes twice, an alias means nothing, or what was fetched is not what was announced;
        OSError that names the file that the file system refused, and its bytes.
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
        _make_folder(folder)
    index = folder / f"{stem}.safetensors.index.json"
    written = [*files, index] if len(groups) > 1 else files
    with _removed_on_failure(written if is_writer else ()):
        for path, group in zip(files, groups):
            here = {other: name for other, name in aliases.items() if name in {entry.name for entry in group}}
            _write_file(path, group, {"format": "pt", **here}, is_writer)
        if index in written and is_writer:
            total = sum(_nbytes(entry) for entry in entries)
            content = {
                "metadata": {"total_size": total, **({"aliases": aliases} if aliases else {})},
                "weight_map": {entry.name: path.name for path, group in zip(files, groups) for entry in group},
            }
            _write_part(index, (json.dumps(content, indent=2) + "\n").encode())
    if is_writer:
        _put_in_place(folder, written, index, stem)
    return files


def _make_folder(folder: Path) -> None:
    """Raises: OSError in words where there is no folder and none can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {folder} cannot be made: {error.strerror}. Name another one.") from error


def write_small(path: Path, content: bytes) -> None:
    """Write a small file so that it is there completely or not at all.

    Raises: OSError that names it, and its bytes.
    """
    with _removed_on_failure([path]):
        _write_part(path, content)
    _part(path).replace(path)


def _put_in_place(folder: Path, written: list[Path], index: Path, stem: str) -> None:
    """Give complete files their names. An index of another set goes first: it would name tensors of both."""
    index.unlink(missing_ok=True)
    for path in written:
        _part(path).replace(path)
    of_a_set = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors(\.index\.json)?({re.escape(PART)})?")
    for path in folder.iterdir():
        if of_a_set.fullmatch(path.name) and path not in written:
            path.unlink()


def _part(path: Path) -> Path:
    """What a file is called until it is complete."""
    return path.with_name(path.name + PART)


def _write_part(path: Path, content: bytes) -> None:
    with _tells_of(path, len(content)):
        _part(path).write_bytes(content)


@contextmanager
def _removed_on_failure(paths: Iterable[Path]) -> Iterator[None]:
    """What is half written goes: it would keep a disk full."""
    try:
        yield
    except BaseException:
        for path in paths:
            _part(path).unlink(missing_ok=True)
        raise


@contextmanager
def _tells_of(path: Path, size: int) -> Iterator[None]:
    """What the file system refuses is told with the file that it was for."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path}, a file of {size:,} bytes, could not be written: {error.strerror}. Make room, or name another "
            "folder."
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    """Names of tensors and of their files."""
    try:
        return {str(name): str(file) for name, file in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} has no weight_map that can be read ({detail}). Fetch it again.") from error


def _read_header(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise ValueError("it is a pointer of Git LFS, and `git lfs pull` gets the file")
            length = int.from_bytes(start, "little")
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            tensor = Tensor(path, tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]]), 8 + length + first)
            if first < 0 or end - first != math.prod(tensor.shape) * tensor.dtype.itemsize or 8 + length + end > size:
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
    """Write a file under the name that it has until all of its set are complete."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for entry in entries:
        code, first, end = _CODES[np.dtype(entry.dtype)], end, end + _nbytes(entry)
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    size = 8 + len(text) + end
    with _opened(path, size) if is_writer else nullcontext() as write:
        if is_writer:
            write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            value = np.asarray(entry.fetch())
            if value.shape != tuple(entry.shape) or value.dtype != np.dtype(entry.dtype):
                raise ValueError(
                    f"{entry.name} was announced as {np.dtype(entry.dtype).name}{list(entry.shape)} and came as "
                    f"{value.dtype.name}{list(value.shape)}."
                )
            if is_writer:
                write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            del value  # before the next one is fetched


@contextmanager
def _opened(path: Path, size: int) -> Iterator[Callable[[Any], None]]:
    """A function that writes bytes to the file; they are on the disk when the block ends."""
    with _tells_of(path, size):
        file = _part(path).open("wb", buffering=0)

    def write(content: Any) -> None:
        left = memoryview(content)
        with _tells_of(path, size):
            while left:
                left = left[file.write(left) :]

    with file:
        yield write
        with _tells_of(path, size):
            os.fsync(file.fileno())
