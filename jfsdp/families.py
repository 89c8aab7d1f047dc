"""Model families: what a name on the command line stands for.

Owns the look-up and nothing of any model: a family is a module, known by what it offers.

Note [Families]
A family is a module found under its name in the entry-point group `jfsdp.models`, or written out as
`package.module:preset`. It offers

    presets                               name -> config, which has a `vocab_size`
    build(config, *, rngs, remat, schedule)   a module with `loss(tokens, targets, weights, *, segments, positions)`,
                                          which gives the sum over tokens and its weight, and may give auxiliary
                                          losses by name (`loss.py`)
    flops(config, seq_len)                to train on one token
    config_from(dict), config_to(config)  a Hugging Face `config.json`, read and written
    MODEL_TYPES                           what `model_type` says in those that `config_from` reads
    NAMES                                 our path -> (Hugging Face name, whether it is stored transposed); `{}` is the
                                          layer; one table for both directions
    TIED                                  a path that a tied model lacks -> the one it uses instead
    PREFIX, IGNORED                       what names of some checkpoints lack, and patterns of what is no weight

and, where there is something to say, SHARED (other names of a stored tensor) and READS_PAIRS (its loss needs a source
beside the tokens). What is sampled from also has `new_cache` and `decode`: see `generate.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple


class Model(NamedTuple):
    """What `--model` named. See Note [Families]."""

    name: str
    family: Any
    config: Any


def find_model(name: str) -> Model:
    """The model that `name` means: a preset, a family, a path of a config.json, or `package.module:preset`.

    Raises: ValueError for a name that is not known, with those that are, and for a config.json that no
    family takes.
    """
    if name.endswith(".json") or os.sep in name:
        return _from_config_json(Path(name))
    module, _, preset = name.rpartition(":")
    try:
        families = {module: importlib.import_module(module)} if module else _families()
    except ImportError as error:
        raise ValueError(f"model {name!r}: {error}. Write package.module:preset, or a preset.") from error
    if module and not hasattr(families[module], "presets"):
        raise ValueError(f"model {name!r}: {module} has no presets, so it is no family. Use models.llama, for example.")
    known = {p: Model(p, family, c) for family in families.values() for p, c in family.presets.items()}
    firsts = {family: next(iter(module.presets)) for family, module in families.items()}
    if (preset := firsts.get(preset, preset)) not in known:
        names = ", ".join(known)
        raise ValueError(f"model {name!r} is unknown. Use one of {names}, or a path of a config.json.")
    return known[preset]


def _from_config_json(path: Path) -> Model:
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"model {path}: there is no such file. Name a config.json, the folder of one, or a preset.")
    hf, families, refusals = read_config(path), _families().values(), []
    kind = hf.get("model_type")
    asked = [family for family in families if kind is None or kind in family.MODEL_TYPES]
    if not asked:
        known = ", ".join(name for family in families for name in family.MODEL_TYPES)
        raise ValueError(
            f"model {path}: its model_type is {kind!r}, which no family computes. Known are {known}: use a checkpoint "
            "of one of these, or write a family of your own and name it as package.module:preset."
        )
    for family in asked:
        try:
            return Model(str(path), family, family.config_from(hf))
        except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
            refusals.append(str(error))
    # Of a file that does not say what it is, those that would take it tell more than the others.
    told = [words for words in refusals if "model_type is" not in words] or refusals
    raise ValueError(f"model {path}: {' '.join(told)}")


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json. Raises: ValueError for what is none."""
    try:
        hf = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no config.json that can be read: {error}.") from error
    if not isinstance(hf, dict):
        raise ValueError(f"{path} holds a {type(hf).__name__}; a config.json is one object of fields, {{...}}.")
    return hf


def _families() -> dict[str, Any]:
    """Installed families, and those of the source tree around this file, also before it is installed."""
    found = {point.name: point.value for point in metadata.entry_points(group="jfsdp.models")}
    if (project := Path(__file__).parents[1] / "pyproject.toml").exists():
        here = tomllib.loads(project.read_text())["project"]["entry-points"]["jfsdp.models"]
        found = {**here, **found}
    return {name: importlib.import_module(module) for name, module in sorted(found.items())}
