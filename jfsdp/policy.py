"""Auto wrap policies: which modules of a model become units of their own.

A policy is a function of the model that gives `{path: UnitOptions}`; `fully_shard(..., auto_wrap_policy=...)` asks it.
The names are PyTorch's. Knows module trees and sizes; what a unit does is in `unit.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jfsdp.layout import UnitOptions

Policy = Callable[[nnx.Module], Mapping[str, UnitOptions]]


def ModuleWrapPolicy(module_classes, **options) -> Policy:  # noqa: N802, as PyTorch spells it
    """Every module of one of the classes becomes a unit; classes may be given by name.

    options: fields of `UnitOptions` for all of them.
    Raises: ValueError, when asked, if no module matches; it lists the classes that the model has.
    """
    wanted = {c if isinstance(c, str) else c.__name__ for c in module_classes}

    def policy(module: nnx.Module) -> dict[str, UnitOptions]:
        found = {name: node for name, node in _modules(module)}
        units = {name: UnitOptions(**options) for name, node in found.items() if wanted & _names(node)}
        known = sorted({type(node).__name__ for node in found.values()})
        for name in wanted:
            if not any(name in _names(node) for node in found.values()):
                raise ValueError(f"no module is a {name}. The model has modules of the classes {', '.join(known)}.")
        return units

    return policy


def CustomPolicy(fn: Callable[[str, nnx.Module], bool | Mapping[str, Any] | UnitOptions]) -> Policy:  # noqa: N802
    """`fn(path, module)` says of every module below the root whether it is a unit: True, False, or its options (a
    `UnitOptions` or a dict of its fields).

    Raises: ValueError, when asked, if it says no to every module.
    """

    def policy(module: nnx.Module) -> dict[str, UnitOptions]:
        units = {}
        for name, node in _modules(module):
            said = fn(name, node)
            if said is not False and said is not None:
                options = {} if said is True else said
                units[name] = options if isinstance(options, UnitOptions) else UnitOptions(**options)
        if not units:
            modules = ", ".join(f"{name} ({type(node).__name__})" for name, node in _modules(module))
            raise ValueError(f"the policy chose none of the modules: {modules}.")
        return units

    return policy


def size_based_auto_wrap_policy(
    min_num_params: int, *, force_leaf_modules=(), exclude_wrap_modules=(), **options
) -> Policy:
    """Modules of at least `min_num_params` parameters become units, children first; what a module's own units leave
    over counts for the module itself, so that a remainder is merged upwards.

    force_leaf_modules: classes whose inside is never looked into.
    exclude_wrap_modules: classes that are no units themselves; their inside is looked into.
    Raises: ValueError, when asked, if the threshold is above the size of the model or not above 0.
    """
    if min_num_params < 1:
        raise ValueError(f"min_num_params is {min_num_params}; it counts parameters, so use 1 or more.")

    def policy(module: nnx.Module) -> dict[str, UnitOptions]:
        nodes = dict(_modules(module))
        sizes = {name: _num_params(node) for name, node in nodes.items()}
        leaves = [name for name, node in nodes.items() if isinstance(node, tuple(force_leaf_modules))]
        units: dict[str, int] = {}
        for name, node in nodes.items():  # inside first
            if any(_inside(name, leaf) for leaf in leaves) or isinstance(node, tuple(exclude_wrap_modules)):
                continue
            outermost = [u for u in units if _inside(u, name)]
            if sizes[name] - sum(units[u] for u in outermost) >= min_num_params:
                units = {**units, name: sizes[name] - sum(units[u] for u in outermost)}
        if not units and (total := _num_params(module)) < min_num_params:
            raise ValueError(
                f"min_num_params is {min_num_params:,} and the whole model has {total:,} parameters, so no module is "
                f"a unit of its own. The largest module has {max(sizes.values(), default=0):,}."
            )
        return {name: UnitOptions(**options) for name in units}

    return policy


def _modules(module: nnx.Module):
    """Path and module of everything below the root, inside first; containers (lists, dicts) left out."""
    for path, node in nnx.iter_modules(module):
        if path and not isinstance(node, (nnx.List, nnx.Dict)):
            yield ".".join(map(str, path)), node


def _names(node: nnx.Module) -> set[str]:
    return {c.__name__ for c in type(node).__mro__}


def _num_params(module: nnx.Module) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _inside(name: str, outer: str) -> bool:
    return name.startswith(outer + ".")
