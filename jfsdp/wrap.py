"""The NNX door: a Flax module's parts become units, in place, and the step gets a module to call.

Owns which module is a unit and how its call gathers; the gathering itself is `unit.call`. `Stack` and the
vocabulary's modules take their own parameters sharded, so `fully_shard` only notes options on them.

Note [Units of a module]
`fully_shard(module)` changes the module's class to a subclass of it whose call gathers, as PyTorch's does. Names,
structure and `isinstance` stay. A unit owns the parameters below it except those of units inside it; a parameter that
two units share goes to the root. The root's parameters are gathered when the step enters the module and stay until the
backward pass is through, unless `reshard_after_forward=True` is asked of it.

Note [Inside and outside the step]
Inside the step parameters are `Sharded` and a unit's call gathers them. Outside they are global arrays, and the same
call computes with them as JAX does with any sharded array. A method that was not registered and reads a unit's
parameters inside the step meets a `Sharded`, which explains itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jfsdp import randomness
from jfsdp.layout import Door, Plan, UnitOptions, make_plan
from jfsdp.offload import OffloadPolicy
from jfsdp.order import Prefetch
from jfsdp.policy import Policy
from jfsdp.precision import MixedPrecision
from jfsdp.stack import Stack, checkpointed, written
from jfsdp.strategy import ShardingStrategy
from jfsdp.unit import Unavailable, call_uncast, is_sharded, unshard
from jfsdp.vocab import Embed, Head

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """What `fully_shard` was told about a module; kept as the module's attribute `fsdp`."""

    options: UnitOptions
    methods: tuple[str, ...] = ("__call__",)
    mesh: Mesh | None = None
    ignored: Callable[[str], bool] | None = None
    trainable: Any = nnx.Param
    prefetch: Prefetch = Prefetch()
    offload: OffloadPolicy = OffloadPolicy()
    is_entered: bool = False
    """The whole model inside a step, whose calls cast although its parameters are gathered already."""


def fully_shard(
    module: nnx.Module,
    *,
    mesh: Mesh | None = None,
    strategy: str | ShardingStrategy | None = None,
    mp_policy: MixedPrecision | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[str, tuple[int, ...]], int | None] | None = None,
    ignored_params: Callable[[str], bool] | None = None,
    auto_wrap_policy: Policy | None = None,
    trainable: Any = nnx.Param,
    prefetch: Prefetch = Prefetch(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    remat: str | tuple[str, ...] = "none",
    gradient_divide_factor: float | None = None,
    gradient_hook: Callable[[str, jax.Array], jax.Array] | None = None,
) -> nnx.Module:
    """Make a module a unit, in place: its parameters are sharded, its call gathers, computes and frees. Gives it back.

    Call it on inner modules first and on the whole model last, or once with an `auto_wrap_policy`. What the whole
    model is given holds for units that say nothing themselves.

    mesh: needed for the whole model; its parameters are then placed on it.
    strategy: see `ShardingStrategy`; None is FULL_SHARD on one replica and HYBRID_SHARD on several.
    reshard_after_forward: True frees weights after forward, False keeps them until backward, a number k keeps 1/k and
        gathers that inside groups of k devices. None is False for the whole model and the strategy's for a unit.
    shard_placement_fn: `(path, shape) -> dim to cut`, None for the usual choice.
    ignored_params: `path -> bool`; those are kept whole on every device, and their gradients all-reduced.
    trainable: an NNX filter (a Variable type, a predicate); other parameters are frozen.
    prefetch: for the whole model: how far units that are called one by one are gathered ahead.
    offload_policy: for the whole model: what a `TrainState` of it keeps in the host's memory, see `offload.py`.
    remat: activation checkpointing of the unit's call, see `stack.checkpointed`; adds no gather.
    gradient_divide_factor, gradient_hook: for the gradients of this unit alone, see `UnitOptions`.
    Raises: TypeError for what is no NNX module, ValueError for options that do not fit the mesh.
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"fully_shard takes an nnx.Module and got {type(module).__name__}. To create a model sharded from the "
            "start use init_sharded(make_model, mesh=...); for other pytrees use make_plan."
        )
    options = UnitOptions(
        strategy=strategy,
        precision=mp_policy,
        reshard_after_forward=reshard_after_forward,
        cut_dim=shard_placement_fn,
        remat=remat,
        gradient_divide_factor=gradient_divide_factor,
        gradient_hook=gradient_hook,
    )
    if auto_wrap_policy is not None:
        nodes = {_name(path): node for path, node in nnx.iter_modules(module)}
        for name, chosen in auto_wrap_policy(module).items():
            _mark(nodes[name], _Mark(options=chosen))
    whole = dict(mesh=mesh, ignored=ignored_params, trainable=trainable, prefetch=prefetch, offload=offload_policy)
    _mark(module, _Mark(options=options, **whole))
    if mesh is not None and not _is_abstract(module):
        _place(module, plan_of(module))
    return module


def register_fsdp_forward_method(module: nnx.Module, name: str) -> None:
    """Make another method of a unit gather as its call does (`encode`, `generate`).

    Raises: ValueError for a module that is no unit or has no such method.
    """
    mark = getattr(module, "fsdp", None)
    if mark is None:
        raise ValueError(f"this {type(module).__name__} is no unit yet. Call fully_shard on it first.")
    if not callable(getattr(type(module), name, None)):
        raise ValueError(f"{type(module).__name__} has no method {name!r}.")
    _mark(module, replace(mark, methods=(*mark.methods, name)))


def init_sharded(make_model: Callable[[], nnx.Module], **options) -> tuple[Any, Plan]:
    """Create a model's parameters sharded, as `fully_shard(make_model(), **options)` would have them, without any
    device ever holding the model; gives them, as nested dicts, with the plan that the step needs.

    make_model: builds the module, whose parts may be units already; traced, never run on one device. Start values
        follow from its keys alone and are the same on every mesh.
    """
    plan = plan_module(make_model, **options)
    return plan.create(lambda: nnx.to_pure_dict(nnx.state(make_model(), nnx.Param))), plan


def plan_module(make_model: Callable[[], nnx.Module], **options) -> Plan:
    """The plan of `init_sharded`, from shapes alone; nothing is allocated."""
    return plan_of(fully_shard(nnx.eval_shape(make_model), **options), make_model)


def plan_of(module: nnx.Module, make_model: Callable[[], nnx.Module] | None = None) -> Plan:
    """The plan of a module that `fully_shard` was called on with a mesh.

    make_model: makes the start values of buffers where the module has shapes only.
    Raises: ValueError for another module, for units inside a `Stack`, and for two uses of a vocabulary's table that do
        not go together.
    """
    mark = getattr(module, "fsdp", None)
    if mark is None or mark.mesh is None:
        raise ValueError(
            f"this {type(module).__name__} has no plan. Call fully_shard(module, mesh=...) on the whole model first."
        )
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    variables = {_name(path): variable for path, variable in nnx.to_flat_state(params)}
    asked = mark.options.reshard_after_forward
    root = replace(mark.options, reshard_after_forward=False if asked is None else asked)
    units = {"": root, **_find_units(module, variables)}
    shared = _shared_between_units(module, units, variables)
    units |= {name: root for name in shared}
    if mark.ignored is not None:
        units |= {name: UnitOptions(strategy="NO_SHARD") for name in variables if mark.ignored(name)}
    is_trained = nnx.filterlib.to_predicate(mark.trainable)
    if len(units) == 1:
        total = sum(v.get_value().size * v.get_value().dtype.itemsize for v in variables.values())
        _log.warning(
            "the whole model is one unit of %s bytes, gathered at once: call fully_shard on its blocks first, or give "
            "an auto_wrap_policy.",
            f"{total:,}",
        )
    return make_plan(
        nnx.to_pure_dict(params),
        mark.mesh,
        strategy=root.strategy,
        precision=root.precision or MixedPrecision(),
        units=units,
        trainable=lambda name: is_trained(tuple(name.split(".")), variables[name]),
        prefetch=mark.prefetch,
        offload_policy=mark.offload,
        door=_ModuleDoor(graph, params, rest, kept=frozenset() if asked else frozenset({"", *shared}), make=make_model),
    )


def take(module: nnx.Module) -> tuple[Any, Any, Plan]:
    """Parameters (stored as the plan says), buffers and plan of a sharded module, which gives its parameters up."""
    plan = plan_of(module)
    state = nnx.state(module, nnx.Param)
    params = plan.place(nnx.to_pure_dict(state))
    buffers = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))
    nnx.update(module, jax.tree.map(lambda _: _Taken(), state))
    return params, buffers, plan


class _Taken(Unavailable):
    """Stands where a parameter was that a train state has taken."""

    def explain(self):
        raise RuntimeError("a TrainState took this module's parameters. Call state.module() for the current ones.")


class _ModuleDoor(Door):
    """A loss sees a module: the root's parameters gathered, the units' left to their calls.

    kept: units that are gathered when the step enters the module.
    """

    def __init__(self, graph, params, rest, *, kept: frozenset[str], make=None, is_training: bool = True):
        self._graph, self._params, self._rest, self._kept, self._make = graph, params, rest, kept, make
        self._is_training = is_training

    def initial_buffers(self):
        if self._make is None:
            return nnx.to_pure_dict(self._rest)
        return jax.jit(lambda: nnx.to_pure_dict(nnx.state(self._make(), nnx.Not(nnx.Param))))()

    def buffer_shapes(self):
        return jax.eval_shape(lambda rest: rest, nnx.to_pure_dict(self._rest))

    def enter(self, params, buffers):
        leaves, tree = jax.tree.flatten(params, is_leaf=is_sharded)
        axes = leaves[0].layout.placement.data_axes
        kept = [i for i, p in enumerate(leaves) if p.layout.unit in self._kept]
        for i, whole in zip(kept, unshard([leaves[i] for i in kept])):
            leaves[i] = whole
        module = self.outside(jax.tree.unflatten(tree, leaves), buffers)
        _follow_examples(module, axes)
        if not self._is_training:
            module.eval()
        if hasattr(module, "fsdp"):
            module.fsdp = replace(module.fsdp, is_entered=True)
        return module

    def leave(self, module, buffers, returned):
        new = nnx.state(module, nnx.Not(nnx.Param))
        # Random streams start afresh in every step, from the step's key, so what they counted is not carried.
        streams = dict(nnx.to_flat_state(nnx.filter_state(self._rest, nnx.RngState)))
        old = dict(_flatten(buffers))
        return _unflatten({path: old[path] if path in streams else v for path, v in _flatten(nnx.to_pure_dict(new))})

    def outside(self, params, buffers):
        states = []
        for template, values in ((self._params, params), (self._rest, buffers)):
            state = jax.tree.map(lambda v: v, template)
            nnx.replace_by_pure_dict(state, values)
            states.append(state)
        return nnx.merge(self._graph, *states)

    def evaluating(self) -> _ModuleDoor:
        return _ModuleDoor(self._graph, self._params, self._rest, kept=self._kept, make=self._make, is_training=False)


def _mark(module: nnx.Module, mark: _Mark) -> None:
    """Note what a module was told, and let the calls of a plain module gather. See Note [Units of a module]."""
    module.fsdp = mark
    if not isinstance(module, _OWN_CALLS):
        plain = getattr(type(module), "fsdp_plain_class", type(module))
        object.__setattr__(module, "__class__", _unit_class(plain, mark.methods))


_OWN_CALLS = (Stack, Embed, Head)
"""Modules that take their parameters sharded."""


@cache
def _unit_class(plain: type, methods: tuple[str, ...]) -> type:
    def gathering(name: str):
        method = getattr(plain, name)

        @wraps(method)
        def call_gathered(self, *args, **kwargs):
            return _run_unit(self, method, args, kwargs)

        return call_gathered

    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "fsdp_plain_class": plain}
    return type(plain.__name__, (plain,), {**names, **{name: gathering(name) for name in methods}})


def _run_unit(module: nnx.Module, method: Callable, args: tuple, kwargs: dict):
    """A unit's method on gathered weights, through `unit.call`; on plain arrays just the method."""
    graph, state = nnx.split(module)
    paths, values = zip(*_flatten(nnx.to_pure_dict(state)))
    inner = [path for path, node in nnx.iter_modules(module) if path and (hasattr(node, "fsdp") or _is_own(node))]
    own = [
        i for i, v in enumerate(values) if is_sharded(v) and not any(paths[i][: len(path)] == path for path in inner)
    ]
    precision = values[own[0]].layout.precision if own else module.fsdp.options.precision or MixedPrecision()
    if not own and not module.fsdp.is_entered:
        return method(module, *args, **kwargs)
    given, given_tree = jax.tree.flatten((args, kwargs), is_leaf=is_sharded)
    given = [a if is_sharded(a) else precision.cast_inputs(a) for a in given]
    if not own:
        args, kwargs = jax.tree.unflatten(given_tree, given)
        return precision.cast_outputs(method(module, *args, **kwargs))
    moving = [i for i, a in enumerate(given) if isinstance(a, (jax.Array, np.ndarray))]

    def fn(weights, arrays):
        filled = dict(zip(paths, values)) | {paths[i]: w for i, w in zip(own, weights)}
        fresh_state = jax.tree.map(lambda v: v, state, is_leaf=is_sharded)
        nnx.replace_by_pure_dict(fresh_state, _unflatten(filled))
        before, fresh = jax.tree.leaves(fresh_state, is_leaf=is_sharded), nnx.merge(graph, fresh_state)
        arguments = dict(enumerate(given)) | dict(zip(moving, arrays))
        args, kwargs = jax.tree.unflatten(given_tree, [arguments[i] for i in range(len(given))])
        out = method(fresh, *args, **kwargs)
        return out, written(before, fresh)

    fn = checkpointed(fn, module.fsdp.options.remat)
    out, rest = call_uncast(fn, [values[i] for i in own], [given[i] for i in moving])
    nnx.update(module, rest)
    return precision.cast_outputs(out)


def _find_units(module: nnx.Module, variables: dict) -> dict[str, UnitOptions]:
    """Units by path prefix: each marked module, each `Stack`'s layers, each vocabulary table."""
    units: dict[str, UnitOptions] = {}
    tables: dict[int, tuple[UnitOptions, dict[str, str]]] = {}
    marked = [_name(path) for path, node in nnx.iter_modules(module) if path and hasattr(node, "fsdp")]
    for path, node in nnx.iter_modules(module):
        name, mark = _name(path), getattr(node, "fsdp", None)
        options = UnitOptions() if mark is None or not path else mark.options
        if isinstance(node, Stack):
            units[_join(name, "each")] = replace(options, stacked=True)
        elif isinstance(node, (Embed, Head)):
            _, uses = tables.setdefault(id(node.table), (options, {}))
            uses["embed" if isinstance(node, Embed) else "head"] = _join(name, "table")
        elif path and mark is not None and any(v.startswith(name + ".") for v in variables):
            units[name] = options
    for options, uses in tables.values():  # a tied table is stored under one of its names
        path = next(p for p in uses.values() if p in variables)
        units[path] = replace(options, cut_dim=-1, never_whole=True, uses=tuple(sorted(uses)))
    for stack in [name for name, options in units.items() if options.stacked]:
        if inside := [name for name in marked if _is_under(name, stack)]:
            raise ValueError(
                f"{inside[0]} is inside a Stack, which gathers layer by layer. Call fully_shard on the Stack instead."
            )
    return units


def _shared_between_units(module: nnx.Module, units: dict[str, UnitOptions], variables: dict) -> list[str]:
    """Stored paths of parameters that modules of different units use; the root gathers those.

    Raises: ValueError for a vocabulary's table that is also used as an ordinary parameter.
    """
    users: dict[int, list[tuple[str, bool]]] = {}
    for path, node in nnx.iter_modules(module):
        for name, value in vars(node).items():
            if isinstance(value, nnx.Param):
                users.setdefault(id(value), []).append((_join(_name(path), name), isinstance(node, (Embed, Head))))
    shared = []
    for uses in users.values():
        tables, names = [name for name, is_table in uses if is_table], [name for name, _ in uses]
        if tables and len(tables) < len(names):
            other = next(name for name in names if name not in tables)
            raise ValueError(
                f"{tables[0]} and {other} are one parameter, but a vocabulary's table is never gathered. Tie it to a "
                "Head or an Embed, or use nnx.Embed and nnx.Linear for both."
            )
        owners = {max((u for u in units if _is_under(name, u)), key=len) for name in names}
        if not tables and len(owners) > 1:
            shared.append(next(name for name in names if name in variables))
    return shared


def _place(module: nnx.Module, plan: Plan) -> None:
    """Put the parameters on the mesh, in place, in their logical shapes: cut where the shape divides, else whole until
    a train state pads them."""
    state = nnx.state(module, nnx.Param)

    def one(leaf, w):
        spec = leaf.rest_spec if leaf.rest_shape == leaf.logical_shape else PartitionSpec()
        return jax.device_put(w, plan.sharding(spec))

    nnx.replace_by_pure_dict(state, plan.map(one, nnx.to_pure_dict(state)))
    nnx.update(module, state)


def _follow_examples(module: nnx.Module, axes: tuple[str, ...]) -> None:
    """Make randomness and batch statistics those of the whole batch: dropout draws per example, other random streams
    are each device's own, batch norms average over all devices."""
    here = randomness.current()
    for _, node in list(nnx.iter_graph(module)):
        if type(node) is nnx.RngStream:
            keys = node.key.get_value()
            step = jax.random.bits(here.key, dtype=jnp.uint32)
            folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys.reshape(-1), step)
            node.key.set_value(folded.reshape(keys.shape))
            object.__setattr__(node, "__class__", _OwnStream)
        elif type(node) is nnx.Dropout:
            object.__setattr__(node, "__class__", _ExampleDropout)
        elif isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axes


class _OwnStream(nnx.RngStream):
    """Keys of this device's own, so that no two draw the same numbers."""

    def __call__(self):
        return jax.random.fold_in(super().__call__(), randomness.current().first)


class _ExampleDropout(nnx.Dropout):
    """Dropout whose mask follows the example: the same on every mesh. Inputs hold whole examples, one after another."""

    def __call__(self, inputs, *, deterministic=None, rngs=None):
        off = self.deterministic if deterministic is None else deterministic
        stream = self.rngs if rngs is None else rngs
        stream = stream[self.rng_collection] if isinstance(stream, nnx.Rngs) else stream
        rows = randomness.current().rows
        if off or self.rate in (0.0, 1.0) or not isinstance(stream, nnx.RngStream) or inputs.shape[0] % rows:
            return super().__call__(inputs, deterministic=deterministic, rngs=rngs)
        shape = [1 if d in self.broadcast_dims else n for d, n in enumerate(inputs.shape)]
        key = nnx.RngStream.__call__(stream)
        draw = lambda key, shape: jax.random.bernoulli(key, 1 - self.rate, shape)  # noqa: E731
        if shape[0] == 1 < inputs.shape[0]:
            mask = draw(key, shape)
        else:
            each = jax.vmap(lambda k: draw(k, (inputs.shape[0] // rows, *shape[1:])))(randomness.example_keys(key))
            mask = each.reshape(shape)
        return jnp.where(mask, inputs / (1 - self.rate), jnp.zeros_like(inputs))


def _is_abstract(module: nnx.Module) -> bool:
    return any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _is_own(node: nnx.Module) -> bool:
    return isinstance(node, _OWN_CALLS)


def _flatten(values) -> list[tuple[tuple, Any]]:
    """Path and value of every leaf of nested dicts."""
    flat = jax.tree_util.tree_flatten_with_path(values, is_leaf=is_sharded)[0]
    return [(tuple(key.key for key in path), value) for path, value in flat]


def _unflatten(values: dict[tuple, Any]) -> dict:
    """Nested dicts of what `_flatten` gave."""
    tree: dict = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _is_under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")
