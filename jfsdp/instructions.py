"""Instruction data for fine-tuning: conversations in, packed rows out, with a weight on the answers only.

Owns which tokens are learned from and how conversations share rows. Reading text for pre-training is `data.py`, words
to ids is `tokenizer.py`.

Note [Answers]
A line of the `.jsonl` is an object with

    "messages"                  [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...], written by the
                                model's chat template; every assistant message counts, up to what the template ends
                                it with
    "prompt" and "completion"   written one behind the other, as they are, and ended; the completion and its end count

The whole conversation is tokenized at once, so that no token differs from what the model will see; a token counts
where it holds a part of an answer. Conversations are packed whole: the longest first, each into the row with the least
room that is enough. None is cut, unless it is longer than a row: then its end is left out, and so is all of it where
no answer is left.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jfsdp.data import Row, check_portions
from jfsdp.tokenizer import Tokenizer


class Example(NamedTuple):
    """Token ids `[n]`, and 1 where a token is part of an answer `[n]`."""

    ids: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """Rows of packed conversations: `dataset[i]` is a dict of `[seq_len]` arrays, named and typed as those of
    `data.Packed`."""

    name: str
    examples: list[Example]
    seq_len: int
    rows: list[list[int]]
    """Which examples share a row."""
    skipped: dict[str, int] = field(default_factory=dict)
    """What was left out or cut: how many, by reason."""

    @property
    def num_tokens(self) -> int:
        return sum(len(one.ids) for one in self.examples)

    @cached_property
    def digest(self) -> str:
        """Of all conversations as they are learned from, and the length of a row."""
        found = hashlib.sha256(f"{self.seq_len}".encode())
        for ids, counts in self.examples:
            found.update(ids.astype("<u4").data)
            found.update(counts.astype(np.uint8).data)
        return found.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.name} has examples 0 to {len(self) - 1}; there is no example {i}.")
        parts = [self.examples[k] for k in self.rows[i]]
        row = {
            "tokens": np.concatenate([one.ids[:-1] for one in parts]),
            "targets": np.concatenate([one.ids[1:] for one in parts]),
            "weights": np.concatenate([one.counts[1:] for one in parts]).astype(np.float32),
            "segments": np.concatenate([np.full(len(one.ids) - 1, k, np.int32) for k, one in enumerate(parts, 1)]),
            "positions": np.concatenate([np.arange(len(one.ids) - 1, dtype=np.int32) for one in parts]),
        }
        return {name: np.pad(values, (0, self.seq_len - len(values))) for name, values in row.items()}

    def __str__(self) -> str:
        counted = sum(int(one.counts[1:].sum()) for one in self.examples)
        text = f"{len(self.examples):,} conversations, {self.num_tokens:,} tokens ({counted:,} of answers)"
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"{self.name}: {text} in {len(self):,} rows of {self.seq_len}{f'; {left}' if left else ''}"


def is_instructions(path: str | Path | None) -> bool:
    """Whether a file holds instruction data: a `.jsonl` whose first line has messages or a completion."""
    if path is None or Path(path).suffix.lower() != ".jsonl" or not Path(path).is_file():
        return False
    with Path(path).open() as file:
        first = next((line for line in file if line.strip()), "")
    try:
        return not {"messages", "completion"}.isdisjoint(json.loads(first))
    except (ValueError, TypeError):
        return False


def load_instructions(
    path: str | Path, tokenizer: Tokenizer, *, seq_len: int, vocab_size: int, held_out: float = 0.05
) -> tuple[Answers, Answers | None]:
    """The training and the evaluation rows of a `.jsonl`; evaluation is None for `held_out=0`. See Note [Answers].

    Conversations are held out whole and evenly spread over the file.
    Raises: ValueError for a line that is neither kind, ids that the model does not have, and nothing to learn from.
    """
    check_portions(seq_len=seq_len, held_out=held_out)
    skipped: Counter[str] = Counter()
    parts: tuple[list[Example], list[Example]] = ([], [])
    for i, example in enumerate(_examples(Path(path), tokenizer, vocab_size)):
        if len(example.ids) > seq_len + 1:
            skipped["cut to a row"] += 1
            example = Example(example.ids[: seq_len + 1], example.counts[: seq_len + 1])
        if not example.counts[1:].any():
            skipped["without an answer in the row"] += 1
        else:
            parts[int((i + 1) * held_out) > int(i * held_out)].append(example)
    kept, held = parts
    if not kept or (held_out and not held):
        raise ValueError(
            f"{path} has {len(kept)} conversations to train on and {len(held)} to evaluate on. Give more, a longer "
            "seq_len, or another held_out (0 for none)."
        )

    def rows(part: str, examples: list[Example], skipped: Counter[str]) -> Answers:
        lengths = [len(one.ids) - 1 for one in examples]
        name = f"{path} ({part})"
        return Answers(name=name, examples=examples, seq_len=seq_len, rows=pack(lengths, seq_len), skipped=skipped)

    return rows("training", kept, skipped), rows("evaluation", held, Counter()) if held_out else None


def pack(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Indices that share a row of `seq_len`: best fit, the longest first; rows in the order of their first index."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free places, row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[i], -1))
        free, row = room.pop(at) if at < len(room) else (seq_len, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        insort(room, (free - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def _examples(path: Path, tokenizer: Tokenizer, vocab_size: int) -> Iterator[Example]:
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                example = _example(json.loads(line), tokenizer)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(
                    f'{path}, line {number}: {line.strip()[:60]!r} is no conversation ({error}). Write "messages" with '
                    'roles and contents, or "prompt" and "completion". Mend or delete that line.'
                ) from error
            if example.ids.max(initial=0) >= vocab_size:
                raise ValueError(
                    f"{path}, line {number}: token id {example.ids.max()} is outside the model's vocabulary of "
                    f"{vocab_size}. Use the tokenizer that the model was trained with."
                )
            yield example


def _example(record: dict, tokenizer: Tokenizer) -> Example:
    if "messages" in record:
        return _conversation(record["messages"], tokenizer)
    prompt, completion = record["prompt"], record["completion"]
    ids, spans = tokenizer.encode(prompt + completion)
    counts = _inside(spans, len(prompt), len(prompt) + len(completion))
    if not ids.size or ids[-1] != tokenizer.end:
        ids, counts = np.append(ids, np.int32(tokenizer.end)), np.append(counts, True)
    counts[-1] = True
    return Example(ids, counts)


def _conversation(messages: list[dict], tokenizer: Tokenizer) -> Example:
    text = tokenizer.render(messages)
    answers = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.render(messages[:i], prompts=True) if i else ""
            after = tokenizer.render(messages[: i + 1])
            if not text.startswith(before) or not text.startswith(after):
                raise ValueError(f"the chat template writes message {i} otherwise once others follow it")
            answers.append((len(before), len(after)))
    ids, spans = tokenizer.encode(text, special=False)
    return Example(ids, np.any([_inside(spans, *answer) for answer in answers] or [np.zeros(len(ids), bool)], axis=0))


def _inside(spans: np.ndarray, first: int, end: int) -> np.ndarray:
    """Which tokens hold some of the characters `first..end`."""
    start, stop = spans.T
    return (stop > start) & (stop > first) & (start < end)
