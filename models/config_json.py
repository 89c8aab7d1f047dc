"""What every family asks of a Hugging Face `config.json` before it reads one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def check_config(
    said: Mapping[str, Any],
    known: Mapping[str, Sequence[Any]],
    counts: Iterable[str],
    numbers: Iterable[str] = (),
    *,
    family: str,
) -> None:
    """Refuse a `config.json` that describes another model than `family`, a file in `models/`.

    known: values with which the family computes, by field; a field that is absent or null asks for nothing.
    counts, numbers: fields that are needed and hold a whole number, or any number.
    Raises: NotImplementedError for another value, ValueError listing needed fields that are missing or no such number.
    """
    for key, values in known.items():
        if said.get(key) is not None and said[key] not in values:
            others = f" or with one of {list(values)}" if values else ""
            raise NotImplementedError(
                f"config.json: {key} is {said[key]!r}; {family} computes without it{others}. "
                "Use a checkpoint whose config.json says so."
            )
    counts = list(counts)
    needed = [*counts, *numbers]
    if missing := [key for key in needed if key not in said]:
        raise ValueError(f"config.json lacks {', '.join(missing)}. Give the file as its checkpoint has it.")
    if wrong := [f"{key} is {said[key]!r}" for key in needed if type(said[key]) not in (int, float)]:
        raise ValueError(f"config.json: {', '.join(wrong)}, which is no number. Give the number, without quotes.")
    if wrong := [f"{key} is {said[key]}" for key in counts if type(said[key]) is float]:
        raise ValueError(f"config.json: {', '.join(wrong)}, which is no count. Give a whole number.")
