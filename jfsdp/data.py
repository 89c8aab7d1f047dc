"""Data for pre-training a language model: text or token ids in, packed rows out.

Owns reading, the held-out part and packing into rows. In which order rows come is decided in `sampler.py`, batches are
made of them in `batches.py`. Knows nothing of models, meshes or JAX.
"""

import hashlib
import json
import math
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, np.ndarray]

END_OF_TEXT = 0xFF
"""Ends each document of byte tokens. UTF-8 never uses this byte, so text needs no id beyond its bytes."""
BYTE_VOCAB = 256
"""The `vocab_size` that byte tokens need, end of document included."""
TEXT_SUFFIXES = frozenset(
    ".c .cc .cpp .css .csv .go .h .hpp .html .java .js .json .jsonl .md .py .rs .rst .sh .tex .toml .ts .tsv"
    " .txt .xml .yaml .yml".split()
)
"""What is read from a folder; every other file is skipped and counted."""

_BUILT_IN_BYTES = 20_000_000  # keeps start-up below a second on any Python; 3.11 has 11 MB
_BUILT_IN_PRUNED = frozenset("test tests idlelib lib2to3 turtledemo site-packages dist-packages".split())
_CHECKED_AT_START = 1 << 25  # ids looked at before step 1, in a fraction of a second; later ones when read
_STRETCHES, _STRETCH = 64, 1 << 19  # what a digest looks at: so many, of so many ids each at most


# Rows

# Note [Packing]
# ~~~~~~~~~~~~~~
# All documents lie one behind the other in one stream, each closed by its end-of-document token. Row i is
# the window of seq_len + 1 tokens that starts at i * seq_len: its first seq_len are `tokens`, its last
# seq_len are `targets`, so every token but the first is a target exactly once. Where documents end is read
# from the window itself: no table of documents, and a memory-mapped file is touched only where it is read.
#
# An end-of-document token belongs to the document it ends. Predicting it counts; what follows it does not,
# since that target is in the next document. A document longer than its row goes on in the next row, as a
# new segment with positions from 0 again: attention does not reach over rows.
#
#     tokens     a  b  c  $  d  e        $ ends a document
#     targets    b  c  $  d  e  f
#     weights    1  1  1  0  1  1
#     segments   1  1  1  1  2  2
#     positions  0  1  2  3  0  1


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Rows cut from `stream[start:stop]`: `dataset[i]` is a dict of `[seq_len]` arrays. See Note [Packing].

    `tokens`, `targets`, `segments` and `positions` are int32, `weights` float32. Segments count the
    documents of a row from 1. The last row is padded with 0 in all five, so a padded place has weight 0.
    Raises: ValueError for less than one full row; when read, for an id outside the vocabulary.
    """

    name: str
    stream: np.ndarray
    """Token ids `[tokens]`, of any integer dtype, in memory or memory-mapped; never copied as a whole."""
    start: int
    stop: int
    seq_len: int
    vocab_size: int
    end_of_document: int | None = None
    """The id that ends a document; None takes the stream for one document."""
    skipped: dict[str, int] = field(default_factory=dict)
    """What the source holds and was not read: how many, by reason or file suffix."""

    def __post_init__(self):
        if self.num_tokens <= self.seq_len:
            raise ValueError(
                f"{self.name} has {self.num_tokens} tokens{self._skipped_text()}; a row of seq_len "
                f"{self.seq_len} needs {self.seq_len + 1}, as each token has the next one for a target. "
                f"Give more data, a smaller seq_len or another held_out (0 for none)."
            )

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @cached_property
    def digest(self) -> str:
        """Of the ids and how they are cut, wherever the source lies and whatever its dtype.

        Of more than 2^25 ids, 64 stretches evenly spread are looked at.
        """
        found = hashlib.sha256(f"{self.num_tokens} {self.seq_len} {self.end_of_document}".encode())
        edges = [self.start + self.num_tokens * i // _STRETCHES for i in range(_STRETCHES + 1)]
        for first, end in pairwise(edges):
            found.update(self.stream[first : min(end, first + _STRETCH)].astype("<u4").data)
        return found.hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process: a memory-mapped stream is mapped again and not copied."""
        state = dict(vars(self))
        if isinstance(s := self.stream, np.memmap):
            state["stream"] = (s.filename, s.dtype, s.offset, s.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(where := state["stream"], tuple):
            file, dtype, offset, shape = where
            state["stream"] = np.memmap(file, dtype, "r", offset, shape)
        vars(self).update(state)

    def __len__(self) -> int:
        return -(-(self.num_tokens - 1) // self.seq_len)

    def __getitem__(self, i: int) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.name} has examples 0 to {len(self) - 1}; there is no example {i}.")
        first = self.start + i * self.seq_len
        window = self.stream[first : min(first + self.seq_len + 1, self.stop)]
        _check_ids(window, first, self.name, self.vocab_size)
        return _pack(window.astype(np.int32), self.seq_len, self.end_of_document)

    def __str__(self) -> str:
        rows = f"{self.num_tokens:,} tokens in {len(self):,} rows of {self.seq_len}"
        return f"{self.name}: {rows}{self._skipped_text()}"

    def _skipped_text(self) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"; skipped {counts}" if counts else ""


def _pack(window: np.ndarray, seq_len: int, end: int | None) -> Row:
    """`[n + 1]` tokens to a row of n tokens and seq_len - n zeros. See Note [Packing]."""
    tokens, targets = window[:-1], window[1:]
    ends = np.zeros(len(tokens), bool) if end is None else tokens == end
    begins = np.concatenate([[False], ends[:-1]])
    index = np.arange(len(tokens), dtype=np.int32)
    row = {
        "tokens": tokens,
        "targets": targets,
        "weights": (~ends).astype(np.float32),
        "segments": 1 + np.cumsum(begins, dtype=np.int32),
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0)),
    }
    return {name: np.pad(values, (0, seq_len - len(tokens))) for name, values in row.items()}


def _check_ids(ids: np.ndarray, first: int, name: str, vocab_size: int) -> None:
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        raise ValueError(
            f"{name}: token id {ids[bad[0]]} at position {first + bad[0]} is outside the vocabulary of "
            f"{vocab_size} ids (0 to {vocab_size - 1}). Train with the vocab_size of the tokenizer that "
            f"wrote the file, or tokenize it again with this model's."
        )


# Sources


def load(
    source: str | os.PathLike | None,
    *,
    seq_len: int,
    vocab_size: int,
    held_out: float = 0.05,
    end_of_document: int | None = None,
    tokenizer: Any = None,
) -> tuple[Packed, Packed | None]:
    """The training and the evaluation rows of a source; evaluation is None for `held_out=0`.

    None is the built-in text, the source of this Python's standard library: a first run downloads nothing.
    Text is UTF-8 as byte tokens (`BYTE_VOCAB`), held in memory. A file is one document; a `.jsonl` has one
    per line, under "text"; of a folder, `TEXT_SUFFIXES` are read in the order of their paths, nothing hidden.
    Token ids are memory-mapped: `.npy` of any integer dtype, or `.bin`, raw little-endian uint16, or uint32
    where the name ends in `.uint32.bin`. `end_of_document` is the id that closes a document there.

    tokenizer: makes ids of text in place of bytes, see `tokenizer.py`; its own id ends a document.

    `held_out` is the fraction of documents to evaluate on, evenly spread over the source; where documents are
    too few for that, and for token ids, it is the last part of the stream.
    Raises: ValueError if a source cannot be read, is too short or has ids outside the vocabulary; these are
    looked for at the start as far as that is quick, and in every row when it is read.
    """
    check_portions(seq_len=seq_len, held_out=held_out)
    check_count("vocab_size", vocab_size, 2, "it counts the ids of the model's vocabulary")
    if source is not None and not Path(source).exists():
        raise ValueError(
            f"{source}: there is no such file or folder. Give a text file, a folder of them, a .jsonl, "
            f"a .npy or .bin of token ids, or none for the built-in text."
        )
    if end_of_document is not None and not 0 <= end_of_document < vocab_size:
        raise ValueError(
            f"end_of_document is {end_of_document}, which is no id of a vocabulary of {vocab_size}. Give "
            f"the id that the tokenizer puts after each document, or None for a single document."
        )
    skipped: Counter[str] = Counter()
    if source is not None and Path(source).suffix.lower() in (".npy", ".bin"):
        name, stream = str(source), _open_ids(Path(source))
        cut = len(stream) - round(held_out * len(stream))
        for first in range(0, min(len(stream), _CHECKED_AT_START), 1 << 20):
            _check_ids(stream[first : first + (1 << 20)], first, name, vocab_size)
    else:
        name, documents = _read_text(source, skipped)
        _check_text_options(name, vocab_size, end_of_document, by_bytes=tokenizer is None)
        if tokenizer is None:
            encoded, end_of_document = [np.frombuffer(document, np.uint8) for document in documents], END_OF_TEXT
        else:
            encoded, end_of_document = [tokenizer.encode(text.decode()).ids for text in documents], tokenizer.end
        stream, cut = _join(encoded, held_out, end_of_document)
        if tokenizer is not None:
            _check_ids(stream, 0, name, vocab_size)
    shared = dict(stream=stream, seq_len=seq_len, vocab_size=vocab_size, end_of_document=end_of_document)
    train = Packed(name=f"{name} (training)", start=0, stop=cut, skipped=dict(skipped), **shared)
    if not held_out:
        return train, None
    return train, Packed(name=f"{name} (evaluation)", start=cut, stop=len(stream), **shared)


def _check_text_options(name: str, vocab_size: int, end_of_document: int | None, by_bytes: bool) -> None:
    if by_bytes and vocab_size < BYTE_VOCAB:
        raise ValueError(
            f"{name} is text, whose byte tokens need a vocabulary of {BYTE_VOCAB} ids; vocab_size is "
            f"{vocab_size}. Set vocab_size to {BYTE_VOCAB} or more, or give token ids as .npy or .bin."
        )
    if end_of_document not in (None, END_OF_TEXT if by_bytes else None):
        ends = f"{END_OF_TEXT}" if by_bytes else "the tokenizer's own id"
        raise ValueError(
            f"end_of_document is {end_of_document}, but {name} is text, whose documents end with "
            f"{ends}. Leave it out: it describes .npy and .bin files."
        )


def _join(documents: list[np.ndarray], held_out: float, end: int) -> tuple[np.ndarray, int]:
    """One stream of ids with `end` behind each document and the held-out ones last, and where these begin."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for i, document in enumerate(documents):
        is_held = int((i + 1) * held_out) > int(i * held_out)  # each time that another whole one is due
        parts[is_held].append(document)
    kept, held = parts
    dtype = documents[0].dtype if documents else np.uint8
    closed = [part for document in [*kept, *held] for part in (document, np.array([end], dtype))]
    stream = np.concatenate(closed) if closed else np.empty(0, dtype)
    tail = sum(len(document) + 1 for document in held) if held else round(held_out * len(stream))
    return stream, len(stream) - tail


def _open_ids(path: Path) -> np.ndarray:
    if path.suffix.lower() == ".bin":
        return _open_bin(path)
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of numbers ({error}). Write it with np.save.") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {ids.dtype} of shape {ids.shape}; token ids are integers in one dim, one document "
            f"behind the other. Save ids.reshape(-1) in an integer dtype."
        )
    return ids


def _open_bin(path: Path) -> np.ndarray:
    dtype = np.dtype("<u4" if path.name.lower().endswith(".uint32.bin") else "<u2")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which is no whole number of {dtype.name} ids. Write little-endian "
            f"uint16 without a header, or uint32 in a file named *.uint32.bin."
        )
    if not size:
        return np.empty(0, dtype)  # cannot be mapped; Packed says that it is too short
    ids = np.memmap(path, dtype, mode="r")
    head = ids[:4096]
    # uint32 read as uint16 has only valid ids, every second one 0, and a loss that falls well: unnoticed.
    if dtype.itemsize == 2 and len(head) >= 32 and head.any() and not head[1::2].any():
        raise ValueError(
            f"{path}: every second uint16 is 0, so this looks like uint32. Rename it to "
            f"{path.stem}.uint32.bin, or save the ids as .npy, which knows its dtype."
        )
    return ids


def _read_text(source: str | os.PathLike | None, skipped: Counter[str]) -> tuple[str, list[bytes]]:
    """Name and documents of the built-in text, a folder or a file; counts in `skipped` what it leaves out."""
    if source is None:
        return f"Python {platform.python_version()} standard library", _read_built_in()
    path = Path(source)
    if path.is_dir():
        return str(path), _read_folder(path, TEXT_SUFFIXES, skipped)
    try:
        return str(path), _read_file(path, skipped)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}. "
            f"Convert it to UTF-8; token ids belong in a .npy or .bin file."
        ) from error


def _read_built_in() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = _read_folder(root, {".py"}, Counter(), _BUILT_IN_PRUNED, _BUILT_IN_BYTES)
    if not documents:
        raise ValueError(f"{root} has no .py files, so there is no built-in text. Name a file of text.")
    return documents


def _read_folder(
    root: Path,
    suffixes: Set[str],
    skipped: Counter[str],
    pruned: Set[str] = frozenset(),
    limit: float = math.inf,
) -> list[bytes]:
    """The documents of all files with one of the suffixes, by path, as whole files up to `limit` bytes."""
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        skipped.update("hidden" for name in folders + files if name.startswith("."))
        folders[:] = [name for name in folders if not name.startswith(".") and name not in pruned]
        paths += [Path(folder, name) for name in files if not name.startswith(".")]
    documents: list[bytes] = []
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        if path.suffix.lower() not in suffixes or not path.is_file():
            skipped[path.suffix.lower() or "without suffix"] += 1
        elif (limit := limit - path.stat().st_size) >= 0:
            try:
                documents += _read_file(path, skipped)
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
    return documents


def _read_file(path: Path, skipped: Counter[str]) -> list[bytes]:
    text = path.read_bytes()
    text.decode()  # only to raise: END_OF_TEXT is safe in UTF-8 and nowhere else
    documents = _records(path, text) if path.suffix.lower() == ".jsonl" else [text]
    filled = [document for document in documents if document]
    if len(filled) < len(documents):
        skipped["empty documents"] += len(documents) - len(filled)
    return filled


def _records(path: Path, text: bytes) -> list[bytes]:
    """The "text" of each line of JSON; a blank line is an empty document."""
    documents = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            documents.append(json.loads(line)["text"].encode() if line.strip() else b"")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{path}, line {number}: {line[:60]!r} is not a JSON object with a string under "text" '
                f"({type(error).__name__}: {error}). Mend or delete that line."
            ) from error
    return documents


def check_portions(*, seq_len: int, held_out: float) -> None:
    """Of how data are cut, what can be refused before any are read."""
    check_count("seq_len", seq_len, 2, "a next-token loss has nothing to learn from a single token")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is {held_out}, but is a fraction of the data. Use 0 (none) to below 1.")


def check_count(name: str, value: Any, least: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}, not an int: {why}. Use an int of {least} or more.")
    if value < least:
        raise ValueError(f"{name} is {value}: {why}. Use {least} or more.")
