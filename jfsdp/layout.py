"""Layout: for every parameter which dim is cut, its padding, its spec, its unit, and why.

A `Plan` is made once, before anything compiles, from shapes alone. It is what the engine, the checkpoint
and the printed table agree on. How bytes move is in `collectives.py`; what a strategy means in `strategy.py`.

Note [Which dim is cut]
The first dim that divides by the number of shards (a cut on dim 0 gathers without a transpose). Where none
divides, the dim that wastes least is padded with zeros. A parameter with fewer elements than there are
shards stays whole: a shard would hold less than one element. Rules look at one layer: the layers of a stack
are one leaf `[L, ...]` in memory and L parameters in every other respect, so L is never cut.

Note [Logical and stored shapes]
The logical shape is the model's; the stored shape has the padding and is what the devices hold between
steps. Padding is zero, and never trained, saved, counted or normed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfsdp.offload import HOST, OffloadPolicy
from jfsdp.order import Prefetch
from jfsdp.precision import MixedPrecision
from jfsdp.strategy import Placement, ShardingStrategy, resolve

SMALL = 16384
"""Parameters of at most this many elements travel together in one bucket: alone, each would pay a latency."""


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What one unit (a prefix of parameter paths) does differently from the root."""

    stacked: bool = False
    """Leaves are `[L, ...]`: L equal blocks, each gathered on its own."""
    cut_dim: int | Callable[[str, tuple[int, ...]], int | None] | None = None
    """Cut this dim (of one layer; negative counts from the end) whatever the others, or the one that a function of path
    and shape names; None follows Note [Which dim is cut]."""
    never_whole: bool = False
    """The unit's gradients never exist whole (vocabulary tables), so no_sync accumulates shards of them."""
    strategy: str | ShardingStrategy | None = None
    """Strategy of this unit; None takes the plan's."""
    reshard_after_forward: bool | int | None = None
    """True frees weights after forward, False keeps them until backward, a number keeps that fraction; None follows
    the strategy. See `strategy.resolve`."""
    precision: MixedPrecision | None = None
    """Dtypes of this unit; None takes the plan's."""
    remat: str | tuple[str, ...] = "none"
    """Activation checkpointing of a unit that is called, see `stack.checkpointed`; a `Stack` has its own."""
    gradient_divide_factor: float | None = None
    """Divide the sum of the devices' gradients by this number instead of by the number of devices, as FSDP2's
    `set_gradient_divide_factor`."""
    gradient_hook: Callable[[str, Array], Array] | None = None
    """`(path, shard) -> shard` for each finished gradient of the unit, one layer at a time: this device's piece,
    reduced and unscaled, before norm and clipping. Padding is zero, and what a hook adds there is dropped."""
    uses: tuple[str, ...] = ()
    """What a vocabulary table serves as, "embed" and "head"; for the traffic that `plan.py` predicts."""

    def __post_init__(self):
        factor = self.gradient_divide_factor
        if factor is not None and not factor > 0:
            raise ValueError(f"gradient_divide_factor is {factor}; it divides gradients, so use a positive number.")


@dataclass(frozen=True)
class ParamLayout:
    """One parameter's place. Shapes are of one layer unless their name says otherwise."""

    path: str
    unit: str
    shape: tuple[int, ...]
    """Logical shape of one layer."""
    layers: int | None
    """L for a stacked leaf `[L, *shape]`, else None."""
    dtype: jnp.dtype
    dim: int | None
    """The dim that is cut; None keeps the parameter whole."""
    padded: int
    """Size of `dim` after padding; 0 when nothing is cut."""
    reason: str
    never_whole: bool
    placement: Placement
    precision: MixedPrecision
    trainable: bool = True
    """False freezes it: gathered as the others, no gradient, no optimizer state."""

    @property
    def logical_paths(self) -> list[str]:
        """What the model calls it, layer by layer: `blocks.3.mlp.up.kernel` of `blocks.each.mlp.up.kernel`."""
        if self.layers is None:
            return [self.path]
        stack, rest = self.unit.split("."), self.path.removeprefix(self.unit)
        stack = stack[:-1] if stack[-1] == "each" else stack
        return [".".join([*stack, str(i)]) + rest for i in range(self.layers)]

    @property
    def size(self) -> int:
        """Logical elements, all layers."""
        return math.prod(self.shape) * (1 if self.layers is None else self.layers)

    @property
    def small(self) -> bool:
        return math.prod(self.shape) <= SMALL and not self.never_whole

    @property
    def param_dtype(self) -> jnp.dtype:
        floating = jnp.issubdtype(self.dtype, jnp.floating)
        return (self.precision.param_dtype if floating else None) or self.dtype

    @property
    def gather_dtype(self) -> jnp.dtype | None:
        """Dtype of the codes that the parameter is gathered as; None where it is gathered in `param_dtype`. Small
        parameters are exempt: norms and biases cost little and bear rounding least."""
        floating = jnp.issubdtype(self.dtype, jnp.floating)
        return self.precision.gather_dtype if floating and not self.small else None

    @property
    def reduce_dtype(self) -> jnp.dtype:
        return self.precision.reduce_dtype or self.dtype

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """`shape` with the padding of the cut dim."""
        return tuple(self.padded if d == self.dim else n for d, n in enumerate(self.shape))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """What one device holds of one layer's gradient and moments."""
        return tuple(n // self.placement.shards if d == self.dim else n for d, n in enumerate(self.padded_shape))

    def stack(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Put the layer dim of a stacked leaf in front of a per-layer shape."""
        return shape if self.layers is None else (self.layers, *shape)

    @property
    def stacked_dim(self) -> int | None:
        """`dim` counted in the stored array, layers included."""
        return self.dim if self.dim is None or self.layers is None else self.dim + 1

    @property
    def shard_spec(self) -> PartitionSpec:
        """Spec of gradients and moments (and of the parameter, unless it is whole at rest)."""
        if self.dim is None:
            return PartitionSpec()
        axes = self.placement.shard_axes
        return PartitionSpec(*(None,) * self.stacked_dim, axes if len(axes) > 1 else axes[0])

    @property
    def rest_spec(self) -> PartitionSpec:
        """Spec of the parameter between steps."""
        return PartitionSpec() if self.placement.whole_at_rest else self.shard_spec

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """Stored global shape of the parameter between steps, layers included."""
        return self.stack(self.shape if self.placement.whole_at_rest else self.padded_shape)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Global logical shape, layers included."""
        return self.stack(self.shape)


class Door:
    """How a loss sees parameters and buffers: here as they are, `params`, or `(params, buffers)` if there are any.

    `wrap.py` has the one that makes a Flax module of them.
    """

    def initial_buffers(self):
        """Buffers before the first step, and `buffer_shapes` of them."""
        return {}

    def buffer_shapes(self):
        return {}

    def enter(self, params, buffers):
        """What the loss is called with, inside the step."""
        return (params, buffers) if jax.tree.leaves(buffers) else params

    def leave(self, entered, buffers, returned):
        """The buffers after the loss; `returned` is what the loss gave for them, or None."""
        return buffers if returned is None else returned

    def outside(self, params, buffers):
        """The same view outside the step, over logical global arrays."""
        return self.enter(params, buffers)

    def evaluating(self) -> Door:
        """The same without dropout and the like, where the door knows of them."""
        return self


@dataclass(frozen=True, eq=False)
class Plan:
    """The layout of every parameter of a model on a mesh. Compared by identity, so it is cheap as a static argument."""

    mesh: Mesh
    placement: Placement
    layouts: Any
    """A pytree like the parameters with a `ParamLayout` at each leaf."""
    units: Mapping[str, UnitOptions] = field(default_factory=dict)
    precision: MixedPrecision = MixedPrecision()
    """Dtypes of units that say nothing of their own."""
    prefetch: Prefetch = Prefetch()
    offload: OffloadPolicy = OffloadPolicy()
    door: Door = Door()
    """How a loss sees parameters and buffers (as a module, for the NNX door)."""

    @property
    def leaves(self) -> list[ParamLayout]:
        return jax.tree.leaves(self.layouts)

    @cached_property
    def trainable(self):
        """`layouts` with None for every frozen parameter: the shape of gradients and of what the optimizer sees."""
        return self.map(lambda leaf: leaf if leaf.trainable else None)

    def only_trainable(self, params):
        """A tree like the parameters with None for every frozen one."""
        return self.map(lambda leaf, w: w if leaf.trainable else None, params)

    def with_trainable(self, params, new):
        """`params` with the trainable ones taken from `new`, whose frozen leaves are None."""
        return self.map(lambda leaf, w, n: n if leaf.trainable else w, params, new)

    def unit_of(self, path: str) -> str:
        """The prefix of the unit that a parameter or buffer at `path` belongs to; "" is the root."""
        return _unit_of(path, self.units)

    def precision_of(self, path: str) -> MixedPrecision:
        """Dtypes of the unit that a parameter or buffer at `path` belongs to."""
        options = self.units.get(self.unit_of(path))
        return (options and options.precision) or self.precision

    @property
    def num_params(self) -> int:
        """Logical parameters, each counted once."""
        return sum(leaf.size for leaf in self.leaves)

    def map(self, f, *trees):
        """`f(layout, *leaves)` over trees shaped like the parameters."""
        flat, tree = jax.tree.flatten(self.layouts)
        return jax.tree.unflatten(tree, [f(*args) for args in zip(flat, *(tree.flatten_up_to(t) for t in trees))])

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def rest_sharding(self, leaf: ParamLayout) -> NamedSharding:
        """Where a parameter lies between steps, on the device or on the host."""
        return NamedSharding(self.mesh, leaf.rest_spec, memory_kind=HOST if self.offload.params else None)

    @property
    def rest_shardings(self):
        """Shardings of the parameters between steps."""
        return self.map(self.rest_sharding)

    @property
    def shard_shardings(self):
        """Shardings of gradients and moments."""
        return self.map(lambda leaf: self.sharding(leaf.shard_spec))

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every array of a batch: rows over all data axes."""
        return self.sharding(PartitionSpec(self.placement.data_axes))

    def pad(self, params):
        """Logical parameters to what is stored between steps. See Note [Logical and stored shapes]."""
        return self.map(lambda leaf, w: w if leaf.placement.whole_at_rest else pad(w, leaf), params)

    def unpad(self, params):
        """What is stored between steps to logical parameters."""
        return self.map(lambda leaf, w: w if leaf.placement.whole_at_rest else unpad(w, leaf), params)

    def place(self, params):
        """Put logical arrays (NumPy or JAX) on the mesh as the plan says: padded and sharded.

        Raises: ValueError naming the first parameter whose shape is not the plan's.
        """

        def one(leaf: ParamLayout, w):
            if tuple(w.shape) != leaf.logical_shape:
                raise ValueError(
                    f"{leaf.path}: got shape {tuple(w.shape)}, the plan was made for {leaf.logical_shape}."
                )
            w = jnp.copy(w)  # device_put may share buffers, and the caller's arrays must survive a donated state
            return jax.device_put(w if leaf.placement.whole_at_rest else pad(w, leaf), self.rest_sharding(leaf))

        return self.map(one, params)

    def create(self, init, *args):
        """Run `init(*args) -> logical params` with every output created sharded; no device holds the whole model.

        Values do not depend on the mesh. On CPUs that takes a lower optimisation level: a vectorised loop and its
        scalar remainder may round differently (seen in `jax.random.normal`, JAX 0.12), and where the remainder lies
        follows the shard.
        """
        is_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_backend_optimization_level": 1} if is_cpu else None  # 1 does not vectorise
        start = jax.jit(lambda *a: self.pad(init(*a)), out_shardings=self.rest_shardings, compiler_options=options)
        return start(*args)


def make_plan(
    params,
    mesh: Mesh,
    *,
    strategy: str | ShardingStrategy | None = None,
    precision: MixedPrecision = MixedPrecision(),
    units: Mapping[str, UnitOptions] | None = None,
    trainable: Callable[[str], bool] = lambda path: True,
    prefetch: Prefetch = Prefetch(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    door: Door = Door(),
) -> Plan:
    """Lay out a pytree of arrays or `jax.ShapeDtypeStruct` on `mesh`.

    units: options by path prefix ("blocks", "embed"); the longest match wins and the rest is the root unit "", which
        stays gathered from forward to backward unless its own options say otherwise.
    trainable: whether the parameter at a path is trained; the others are sharded and gathered, never reduced or
        updated.
    prefetch: how far units that are called one by one are gathered ahead; a stack's `Schedule` is its own.
    offload_policy: what lies in the host's memory, see `offload.py`.
    Raises: ValueError for a prefix that matches no parameter and for a stacked unit whose leaves have unequal numbers
        of layers, TypeError for a trained parameter that is not floating.
    """
    units = dict(units or {})
    placement = resolve(strategy, mesh)
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    paths = [path_name(p) for p, _ in flat]
    for prefix in units:
        if prefix and not any(_under(path, prefix) for path in paths):
            raise ValueError(
                f"unit {prefix!r} matches no parameter. Parameters start with: "
                f"{sorted({p.split('.')[0] for p in paths})}."
            )
    layouts = []
    for path, (_, leaf) in zip(paths, flat):
        unit = _unit_of(path, units)
        options = units.get(unit, UnitOptions())
        own = _placement(options, strategy, mesh)
        layouts.append(_layout(path, unit, leaf, options, own, options.precision or precision, trainable(path)))
    _check_layers(layouts)
    prefetch.check(tuple({leaf.unit for leaf in layouts}))
    return Plan(mesh, placement, jax.tree.unflatten(tree, layouts), units, precision, prefetch, offload_policy, door)


def _placement(options: UnitOptions, strategy, mesh: Mesh) -> Placement:
    return resolve(options.strategy or strategy, mesh, options.reshard_after_forward)


def path_name(path) -> str:
    """`blocks.mlp.up.kernel` from a JAX key path."""
    return ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def pad(w, leaf: ParamLayout):
    """`[.., d, ..]` to `[.., padded, ..]` with zeros; free when the dim divides."""
    if leaf.dim is None or leaf.padded == leaf.shape[leaf.dim]:
        return w
    widths = [(0, after - before) for before, after in zip(w.shape[-len(leaf.shape) :], leaf.padded_shape)]
    return jnp.pad(w, [(0, 0)] * (w.ndim - len(widths)) + widths)


def unpad(w, leaf: ParamLayout):
    """`[.., padded, ..]` to `[.., d, ..]`."""
    if leaf.dim is None or leaf.padded == leaf.shape[leaf.dim]:
        return w
    return jax.lax.slice_in_dim(w, 0, leaf.shape[leaf.dim], axis=w.ndim - len(leaf.shape) + leaf.dim)


def _check_layers(layouts: list[ParamLayout]) -> None:
    first: dict[str, ParamLayout] = {}
    for leaf in layouts:
        other = first.setdefault(leaf.unit, leaf)
        if leaf.layers != other.layers:
            raise ValueError(
                f"{leaf.path} has {leaf.layers} layers and {other.path} has {other.layers}; "
                "the leaves of a stacked unit need "
                f"equal counts. Give {leaf.path!r} a unit of its own."
            )


def _unit_of(path: str, units: Mapping[str, UnitOptions]) -> str:
    """The longest prefix wins."""
    return max((p for p in units if _under(path, p)), key=len, default="")


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + ".")


def _layout(
    path: str,
    unit: str,
    leaf,
    options: UnitOptions,
    placement: Placement,
    precision: MixedPrecision,
    trainable: bool,
) -> ParamLayout:
    shape, dtype = tuple(leaf.shape), jnp.dtype(leaf.dtype)
    if trainable and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{path}: dtype {dtype.name} cannot be trained. Freeze it, or keep integer state out of the parameters."
        )
    layers = None
    if options.stacked:
        if not shape:
            raise ValueError(
                f"{path}: unit {unit!r} is stacked, so every leaf needs a leading layer dim; this one has shape ()."
            )
        layers, shape = shape[0], shape[1:]
    wanted = options.cut_dim(path, shape) if callable(options.cut_dim) else options.cut_dim
    dim, padded, reason = _choose_dim(path, shape, placement, wanted)
    if options.uses:
        reason = reason.replace("asked for", "a vocabulary's width")
    reason = reason if trainable else f"{reason}; frozen"
    cut = (dim, padded, reason, options.never_whole)
    return ParamLayout(path, unit, shape, layers, dtype, *cut, placement, precision, trainable)


def _choose_dim(
    path: str, shape: tuple[int, ...], placement: Placement, wanted: int | None
) -> tuple[int | None, int, str]:
    """The dim to cut, its padded size, and the reason in words. See Note [Which dim is cut]."""
    n = placement.shards
    if not placement.shard_axes:
        return None, 0, "strategy keeps copies"
    if not shape or math.prod(shape) < n:
        return None, 0, f"{math.prod(shape)} elements for {n} shards"
    if wanted is not None:
        if not -len(shape) <= wanted < len(shape):
            raise ValueError(f"{path}: cut_dim {wanted} is not a dim of shape {shape}.")
        dim, reason = wanted % len(shape), "asked for"
    elif any(d % n == 0 for d in shape):
        dim = next(i for i, d in enumerate(shape) if d % n == 0)
        reason = "first dim that divides" if dim else "dim 0 divides"
    else:
        dim = min(range(len(shape)), key=lambda i: (-(-shape[i] // n) * n / shape[i], i))
        reason = "none divides, least padding"
    padded = -(-shape[dim] // n) * n
    return dim, padded, reason if padded == shape[dim] else f"{reason}, {shape[dim]} -> {padded}"
