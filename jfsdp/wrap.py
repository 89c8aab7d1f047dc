"""The NNX door: from a Flax module to sharded parameters and a plan, and back to a callable module inside the step.

Owns how modules become units. `Stack` and the vocabulary's modules take their own parameters sharded; everything
else belongs to the root unit, which is gathered once at the start of the forward pass and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jfsdp.layout import Door, Plan, UnitOptions, make_plan
from jfsdp.precision import MixedPrecision
from jfsdp.stack import Stack
from jfsdp.strategy import ShardingStrategy
from jfsdp.unit import is_sharded, unshard
from jfsdp.vocab import Embed, Head


def fully_shard(
    make_model: Callable[[], nnx.Module],
    *,
    mesh: Mesh,
    strategy: str | ShardingStrategy | None = None,
    mp_policy: MixedPrecision = MixedPrecision(),
) -> tuple[Any, Plan]:
    """Create a module's parameters sharded on `mesh`; gives them, as nested dicts, with the plan that the step needs.

    make_model: builds the module; traced, never run on one device, so a model larger than any device can be made.
        Start values follow from its keys alone and are the same on every mesh.
    """
    plan = plan_module(make_model, mesh=mesh, strategy=strategy, mp_policy=mp_policy)
    return plan.create(lambda: nnx.to_pure_dict(nnx.state(make_model(), nnx.Param))), plan


def plan_module(
    make_model: Callable[[], nnx.Module], *, mesh: Mesh, strategy=None, mp_policy: MixedPrecision = MixedPrecision()
) -> Plan:
    """The plan of `fully_shard`, from shapes alone; nothing is allocated."""
    module = nnx.eval_shape(make_model)
    graph, state = nnx.split(module, nnx.Param)
    shapes = nnx.to_pure_dict(state)
    return make_plan(
        shapes,
        mesh,
        strategy=strategy,
        precision=mp_policy,
        units=find_units(module),
        door=_View(graph, state),
    )


def find_units(module: nnx.Module) -> dict[str, UnitOptions]:
    """Units by path prefix: each `Stack`'s layers, each vocabulary table."""
    units, tables = {}, {}
    stored = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    for path, node in nnx.iter_modules(module):
        name = ".".join(map(str, path))
        if isinstance(node, Stack):
            units[f"{name}.each" if name else "each"] = UnitOptions(stacked=True)
        elif isinstance(node, (Embed, Head)):
            uses = tables.setdefault(id(node.table), {})
            uses["embed" if isinstance(node, Embed) else "head"] = f"{name}.table" if name else "table"
    for uses in tables.values():  # a tied table is stored under one of its names
        path = next(p for p in uses.values() if p in stored)
        units[path] = UnitOptions(cut_dim=-1, never_whole=True, uses=tuple(sorted(uses)))
    return units


class _View(Door):
    def __init__(self, graph, state):
        self.graph, self.state = graph, state

    def enter(self, params, buffers):
        return _view(self.graph, self.state, params)


def _view(graph, state, params) -> nnx.Module:
    """The module over `params`: root parameters gathered, the units' left to their modules."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_sharded)
    root = [i for i, p in enumerate(leaves) if is_sharded(p) and p.layout.layers is None and not p.layout.never_whole]
    for i, whole in zip(root, unshard([leaves[i] for i in root])):
        leaves[i] = whole
    values = jax.tree.unflatten(tree, leaves)
    state = jax.tree.map(lambda v: v, state)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)
