"""Hugging Face folders in and out: `config.json` and safetensors to sharded parameters, and back, tensor by tensor.

Owns how a family's table of names is applied, in both directions, and what is checked before a value is read. The file
format is `safetensors.py`; what a name means is the family's (`NAMES`, see Note [Families] in `families.py`); the
commands are in `convert.py`.

Note [Streaming]
No process ever holds more than one tensor of the file, or one layer of one parameter (of experts, all), in host
memory. On the way in, each process reads the rows and columns that its devices hold, places them as the plan says
(padded and sharded), and writes them into the stacked parameter on the devices, in place; where parameters are
offloaded it then goes to pinned host memory, and the devices hold one at a time. On the way out, one layer of one
parameter is fetched, written and let go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.checkpoint import Checkpoint, open_checkpoint
from jfsdp.families import read_config
from jfsdp.layout import ParamLayout, Plan
from jfsdp.lora import ADAPTERS, BASE, LoraOptions, merge
from jfsdp.precision import parse_dtype
from jfsdp.safetensors import MAX_FILE_BYTES, Entry, Tensor, read_safetensors, write_safetensors, write_small
from jfsdp.summon import fetch_layer, insert_layer

_COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")
"""What an export takes over from the folder that the run started from."""


Read = Callable[[ParamLayout, int], np.ndarray]
"""One layer of a parameter, in its logical shape."""


class Named(NamedTuple):
    """A parameter and what Hugging Face calls it: one name, or one for each layer, or one for each expert of each."""

    leaf: ParamLayout
    names: list[str]
    transposed: bool
    is_split: bool = False
    """Whether the first dim of a layer counts tensors of their own (experts)."""

    @property
    def layers(self) -> list[list[str]]:
        """Names of the tensors that each layer is made of."""
        n = self.leaf.shape[0] if self.is_split else 1
        return [self.names[i : i + n] for i in range(0, len(self.names), n)]

    def shape(self) -> tuple[int, ...]:
        """Of one tensor in the file."""
        shape = self.leaf.shape[1:] if self.is_split else self.leaf.shape
        return shape[::-1] if self.transposed else shape

    def read(self, tensors: list[Tensor], index: tuple[slice, ...]) -> np.ndarray:
        """A piece of a layer, from the tensors that it is made of."""
        if self.is_split:
            return np.stack([self._turned(tensor, index[1:]) for tensor in tensors[index[0]]])
        return self._turned(tensors[0], index)

    def _turned(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        return np.ascontiguousarray(tensor[index[::-1]].T) if self.transposed else tensor[index]


def load_pretrained(folder: str | Path, plan: Plan, family: Any, *, start: Callable[[], Any] | None = None) -> Any:
    """The parameters in a Hugging Face folder, stored as `plan` says, in the plan's dtypes. See Note [Streaming].

    folder: or a checkpoint of ours, or a run's folder: the weights of its newest one, saved on any mesh.
    start: makes the logical parameters of a new model; the adapters are taken from it, which no checkpoint has.
    Raises: ValueError that lists every tensor that is missing, unknown or misshapen, before any is read.
    """
    if is_hugging_face(folder):
        named, found = match_pretrained(folder, plan, family)
    else:
        named, found = _match_saved(open_checkpoint(folder), plan)
    own = _new_parameters(plan, start, [leaf.path for leaf in plan.leaves if is_adapter(leaf)])
    placed = {one.leaf.path: _settle(_place(one, found, plan), one.leaf, plan) for one in named}
    return plan.map(lambda leaf: {**own, **placed}[leaf.path])


def is_hugging_face(folder: str | Path) -> bool:
    """Whether a folder (or file) is of Hugging Face's kind, and not a checkpoint of ours."""
    return Path(folder).is_file() or (Path(folder) / "config.json").is_file()


def save_pretrained(
    folder: str | Path,
    params: Any,
    plan: Plan,
    family: Any,
    config: Any,
    *,
    dtype: Any = None,
    base: str | Path | None = None,
    lora_scale: float = 1.0,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write stored parameters as a folder that `transformers` loads; gives its weight files. See Note [Streaming].

    config: of the model that `transformers` shall find.
    dtype: of the tensors on disk; None keeps each parameter's own.
    base: the Hugging Face folder that the model came from: its `config.json` is kept where the model does not say
        otherwise, and its tokenizer is copied.
    lora_scale: adapters are added to the weights they adapt, times this.
    """
    options = dict(dtype=dtype, base=base, lora_scale=lora_scale, max_file_bytes=max_file_bytes)
    return write_model(folder, _from_devices(params, plan), plan, family, config, **options)


def write_model(
    folder: str | Path, read: Read, plan: Plan, family: Any, config: Any, *, dtype, base, lora_scale, max_file_bytes
) -> list[Path]:
    """`save_pretrained` of parameters that `read` finds."""
    folder, is_writer = Path(folder), jax.process_index() == 0
    written = {**_read_config(base), **family.config_to(config)}
    dtype = None if dtype is None else parse_dtype(dtype)
    files = write_safetensors(
        folder,
        entries(read, plan, family, dtype=dtype, lora_scale=lora_scale),
        aliases=aliases(plan, family),
        max_file_bytes=max_file_bytes,
        is_writer=is_writer,
    )
    if is_writer:
        stored = {np.dtype(dtype or leaf.dtype).name for leaf in plan.leaves if not is_adapter(leaf)}
        written.pop("dtype", None)
        written["torch_dtype"] = stored.pop() if len(stored) == 1 else "float32"
        write_small(folder / "config.json", _json(written))
        for path in tokenizer_files(base):
            write_small(folder / path.name, path.read_bytes())
    return files


def save_adapter(
    folder: str | Path, params: Any, plan: Plan, family: Any, options: LoraOptions, *, base: str | Path | None = None
) -> list[Path]:
    """Write the adapters alone, in fp32, as a folder that `peft` loads onto the base model; gives its weight files.

    base: what the adapter was trained on, as `peft` shall find it: a folder or a name on the hub.
    Raises: ValueError when the model has no adapters.
    """
    return write_adapter(folder, _from_devices(params, plan), plan, family, options, base=base)


def write_adapter(folder: str | Path, read: Read, plan: Plan, family: Any, options: LoraOptions, *, base) -> list[Path]:
    """`save_adapter` of parameters that `read` finds."""
    layouts = {leaf.path: leaf for leaf in plan.leaves}
    modules, out, is_writer = set(), [], jax.process_index() == 0

    def fetch(leaf: ParamLayout, layer: int) -> np.ndarray:
        return read(leaf, layer).T.astype(np.float32)

    for one in name_parameters(plan, family):
        adapters = [layouts[path] for path in _adapter_paths(one.leaf) if path in layouts]
        for layer, name in enumerate(one.names if adapters else []):
            modules.add(module := name.removesuffix(".weight"))
            for leaf, theirs in zip(adapters, ("lora_A", "lora_B")):
                path = f"base_model.model.{module}.{theirs}.weight"
                out.append(Entry(path, leaf.shape[::-1], np.dtype(np.float32), partial(fetch, leaf, layer)))
    if not out:
        raise ValueError("this model has no adapters. Make it with add_lora, or export it with save_pretrained.")
    files = write_safetensors(folder, out, stem="adapter_model", is_writer=is_writer)
    if is_writer:
        written = {
            "peft_type": "LORA",
            "task_type": "SEQ_2_SEQ_LM" if getattr(family, "READS_PAIRS", False) else "CAUSAL_LM",
            "base_model_name_or_path": None if base is None else str(base),
            "r": options.rank,
            "lora_alpha": options.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": not any(transposed for name, transposed in family.NAMES.values() if "{}" in name),
            "target_modules": sorted(modules),
        }
        write_small(Path(folder) / "adapter_config.json", _json(written))
    return files


def name_parameters(plan: Plan, family: Any) -> list[Named]:
    """Every parameter but the adapters, with its names in a checkpoint, in the order of the plan.

    Raises: ValueError for a parameter that the family's table does not know.
    """
    out, unknown = [], []
    for leaf in plan.leaves:
        if is_adapter(leaf):
            continue
        entry = family.NAMES.get(key_of(leaf))
        if entry is None:
            unknown.append(leaf.path)
        else:
            name, transposed = entry
            is_split = name.count("{}") > (leaf.layers is not None)
            experts = range(leaf.shape[0] if is_split else 1)
            names = [name.format(i, j) for i in range(leaf.layers or 1) for j in experts]
            out.append(Named(leaf, names, transposed, is_split))
    if unknown:
        raise ValueError(
            f"{family.__name__}.NAMES has no Hugging Face name for {', '.join(unknown)}. Add it to the table."
        )
    return out


def key_of(leaf: ParamLayout) -> str:
    """A parameter's path as a table of names spells it: `blocks.{}.attn.q.kernel`."""
    path = leaf.path
    if leaf.layers is not None:
        path = f"{leaf.unit.removesuffix('.each')}.{{}}{leaf.path.removeprefix(leaf.unit)}"
    return path.replace(f".{BASE}.", ".")


def aliases(plan: Plan, family: Any) -> dict[str, str]:
    """Hugging Face names of what a tied model uses twice and stores once: `{other: stored}`."""
    there = {key_of(leaf) for leaf in plan.leaves}
    tied = {family.NAMES[other][0]: family.NAMES[kept][0] for other, kept in family.TIED.items() if other not in there}
    return {**getattr(family, "SHARED", {}), **tied}


def entries(read: Read, plan: Plan, family: Any, *, dtype: Any = None, lora_scale: float = 1.0) -> Iterator[Entry]:
    """The tensors of a checkpoint, layer by layer, adapters merged; each is fetched when it is written."""
    layouts = {leaf.path: leaf for leaf in plan.leaves}
    named = name_parameters(plan, family)

    @lru_cache(1)  # experts of a layer are written one after the other
    def read_split(leaf: ParamLayout, layer: int) -> np.ndarray:
        return read(leaf, layer)

    def fetch(one: Named, layer: int, piece: int, dtype) -> np.ndarray:
        value = read_split(one.leaf, layer)[piece] if one.is_split else read(one.leaf, layer)
        adapters = [layouts.get(path) for path in _adapter_paths(one.leaf)]
        if all(adapters):
            value = merge(value, *(read(leaf, layer) for leaf in adapters), scale=lora_scale)
        return (value.T if one.transposed else value).astype(dtype, copy=False)

    by_layer = [(layer, i, names) for i, one in enumerate(named) for layer, names in enumerate(one.layers)]
    for layer, i, names in sorted(by_layer):
        stored = np.dtype(dtype or named[i].leaf.dtype)
        for piece, name in enumerate(names):
            yield Entry(name, named[i].shape(), stored, partial(fetch, named[i], layer, piece, stored))


def _from_devices(params: Any, plan: Plan) -> Read:
    values = dict(zip((leaf.path for leaf in plan.leaves), jax.tree.leaves(params), strict=True))
    return lambda leaf, layer: fetch_layer(values[leaf.path], leaf, plan, layer)


def is_adapter(leaf: ParamLayout) -> bool:
    return leaf.path.rpartition(".")[2] in ADAPTERS


def _adapter_paths(leaf: ParamLayout) -> list[str]:
    parent, _, rest = leaf.path.rpartition(f".{BASE}.")
    return [f"{parent}.{name}" for name in ADAPTERS] if parent and rest == "kernel" else [""]


def match_pretrained(folder: str | Path, plan: Plan, family: Any) -> tuple[list[Named], dict[str, Tensor]]:
    """The parameters of a plan, and the tensors of a Hugging Face folder by the names of the table.

    Raises: ValueError that lists every tensor that is missing, unknown or misshapen.
    """
    named, tensors = name_parameters(plan, family), read_safetensors(folder)
    wanted = {name: one for one in named for name in one.names}
    prefix, tied = family.PREFIX, aliases(plan, family)
    found, unknown = {}, []
    for name, tensor in tensors.items():
        full = name if name in wanted or name in tied else prefix + name
        if full in wanted or full in tied:
            found[full] = tensor
        elif not any(fnmatch(name, pattern) for pattern in family.IGNORED):
            unknown.append(name)
    missing = [name for name in wanted if name not in found]
    there = [(name, found[name], one) for name, one in wanted.items() if name in found]
    misshapen = [
        f"{name} is {list(tensor.shape)}, expected {list(one.shape())}"
        for name, tensor, one in there
        if tensor.shape != one.shape()
    ]
    quantised = [f"{name} holds {t.dtype.name}" for name, t, _ in there if not jnp.issubdtype(t.dtype, jnp.floating)]
    differing = [
        f"{other} differs from {kept}, which a tied model uses in its place"
        for other, kept in tied.items()
        if other in found and kept in found and not _equal(found[other], found[kept])
    ]
    lists = dict(missing=missing, unknown=unknown, misshapen=misshapen, quantised=quantised, tied=differing)
    problems = [
        f"{what}: {'; '.join(names[:20])}{f' and {len(names) - 20} more' if len(names) > 20 else ''}."
        for what, names in lists.items()
        if names
    ]
    if problems:
        raise ValueError(
            f"{folder} does not hold this model. {' '.join(problems)} "
            "Build the model from the config.json beside the weights."
        )
    return named, found


@dataclass(frozen=True)
class SavedLayer:
    """A parameter in a checkpoint of ours, or one layer of it, read like a tensor in a file."""

    found: Checkpoint
    name: str
    layer: int | None
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if self.layer is None:
            return self.found.read(self.name, index)
        return self.found.read(self.name, (slice(self.layer, self.layer + 1), *index))[0]


def _match_saved(found: Checkpoint, plan: Plan) -> tuple[list[Named], dict[str, SavedLayer]]:
    """Every parameter but the adapters, and its layers in a checkpoint of ours.

    Raises: ValueError that lists what does not fit.
    """
    leaves = {leaf.path.replace(f".{BASE}.", "."): leaf for leaf in plan.leaves if not is_adapter(leaf)}
    check_holds(found, {path: leaf.logical_shape for path, leaf in leaves.items()})
    named, layers = [], {}
    for path, leaf in leaves.items():
        names = [f"{path}[{i}]" for i in range(leaf.layers or 1)]
        named.append(Named(leaf, names, transposed=False))
        for i, name in enumerate(names):
            layers[name] = SavedLayer(found, f"params.{path}", None if leaf.layers is None else i, leaf.shape)
    return named, layers


def check_holds(found: Checkpoint, wanted: dict[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint of ours whose parameters are not `wanted`, logical shapes by path.

    Raises: ValueError that lists what differs.
    """
    if found.metadata.kind != "sharded":
        raise ValueError(
            f"{found.path} is a {found.metadata.kind} checkpoint, to be read only by a run like its own, on "
            f"{found.metadata.where()}. Let that go on with --checkpoint-kind sharded, and use what it saves."
        )
    start = "params."
    have = {
        path.removeprefix(start): one.shape for path, one in found.metadata.leaves.items() if path.startswith(start)
    }
    problems = [
        f"{path} is {list(have[path]) if path in have else 'missing'}, "
        f"expected {list(wanted[path]) if path in wanted else 'none'}"
        for path in {**wanted, **have}
        if have.get(path) != wanted.get(path)
    ]
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            f"{found.path} does not hold this model: {'; '.join(problems[:20])}{more}. Name the model that it was "
            "saved with."
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bitwise, a MiB or so at a time."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    rows = max(1, (1 << 20) // max(1, a.shape[-1]))
    return all(a[i : i + rows].tobytes() == b[i : i + rows].tobytes() for i in range(0, a.shape[0], rows))


def _place(one: Named, found: dict[str, Tensor], plan: Plan) -> jax.Array:
    """A parameter from its tensors, as the plan stores it."""
    leaf, layers = one.leaf, [[found[name] for name in names] for names in one.layers]
    rest = plan.sharding(leaf.rest_spec)
    if leaf.layers is None:
        return jax.block_until_ready(_cast(rest, leaf.dtype)(_place_layer(one, layers[0], rest, leaf.rest_shape)))
    sharding = plan.sharding(PartitionSpec(*leaf.rest_spec[1:]))
    stacked = _zeros(rest, leaf.rest_shape, leaf.dtype)()
    for layer, tensors in enumerate(layers):
        placed = _place_layer(one, tensors, sharding, leaf.rest_shape[1:])
        stacked = jax.block_until_ready(
            insert_layer(rest)(stacked, placed, layer)
        )  # waits, or host copies would pile up
    return stacked


def _settle(value: jax.Array, leaf: ParamLayout, plan: Plan) -> jax.Array:
    """A parameter where it lies between steps: on the host if it is offloaded."""
    return jax.block_until_ready(jax.device_put(value, plan.rest_sharding(leaf)))


def _place_layer(one: Named, tensors: list[Tensor], sharding: NamedSharding, stored: tuple[int, ...]) -> jax.Array:
    """One layer on the devices: each piece is read once a process, however many devices hold it."""
    shape = one.leaf.shape

    @lru_cache(None)
    def read(spans: tuple[tuple[int, int], ...]) -> np.ndarray:
        inside = tuple(slice(first, min(end, n)) for (first, end), n in zip(spans, shape))
        part = one.read(tensors, inside)
        return np.pad(part, [(0, end - first - n) for (first, end), n in zip(spans, part.shape)])

    return jax.make_array_from_callback(
        stored, sharding, lambda index: read(tuple(s.indices(n)[:2] for s, n in zip(index, stored)))
    )


def _new_parameters(plan: Plan, start, paths: list[str]) -> dict[str, jax.Array]:
    """Those of a new model's parameters at `paths`, created as the plan stores them; the others are never computed."""
    if not paths:
        return {}
    if start is None:
        raise ValueError(f"{', '.join(paths[:3])}: no checkpoint has adapters. Pass start, which creates new ones.")
    leaves = plan.leaves
    chosen = [i for i, leaf in enumerate(leaves) if leaf.path in paths]

    def create():
        flat = jax.tree.leaves(plan.pad(start()))
        return [flat[i] for i in chosen]

    made = jax.jit(create, out_shardings=[plan.rest_sharding(leaves[i]) for i in chosen])()
    return {leaves[i].path: value for i, value in zip(chosen, made)}


def _read_config(base: str | Path | None) -> dict[str, Any]:
    path = None if base is None else Path(base) / "config.json"
    return read_config(path) if path is not None and path.is_file() else {}


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2) + "\n").encode()


def tokenizer_files(base: str | Path | None) -> list[Path]:
    """What a Hugging Face folder has of a tokenizer."""
    found = set() if base is None else {path for pattern in _COPIED for path in Path(base).glob(pattern)}
    return sorted(path for path in found if path.is_file())


@lru_cache(None)
def _zeros(sharding: NamedSharding, shape, dtype):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@lru_cache(None)
def _cast(sharding: NamedSharding, dtype):
    # A copy also where the dtype stays: what was placed may share the host's memory, and parameters are donated.
    return jax.jit(lambda w: jnp.copy(w.astype(dtype)), out_shardings=sharding)
