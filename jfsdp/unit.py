"""One unit as a differentiable function: gather, compute, free, gather again, reduce.

Inside the step every parameter is a `Sharded`: this device's piece, and the places where its gradient comes
out. `unshard` and `call` give whole parameters to ordinary code; `stack.py` does the same for many equal units
in one loop; `vocab.py` computes on shards without gathering. None of them knows the others.

Note [Where gradients come out]
Gradients have other shapes than what is differentiated (SHARD_OPT keeps whole parameters and wants the gradient
of a shard), so the step differentiates with respect to stand-ins whose values are never read:

    slot   shaped as the gradient that the step wants; its cotangent is that gradient
    sink   shaped as the whole parameter; a use of gathered weights hands its whole gradient back here

A unit's gradient is reduced once, however often its parameters are used (tied weights, a block applied twice):
JAX adds up what the uses hand back, and `track`, the one place where the parameters entered the loss, reduces
the sum. A use that can do better, the vocabulary's, hands back a piece through the slot that `track` gives it.
The layers of a `Stack` are nearly always used once, so the stack reduces inside its own loop, straight into the
slot, and adds there what is held; a second use under accumulation would add it again and is refused.

Note [Accumulation]
Micro-batches before the last return what was held plus what they add. The last one takes what is held in,
reduces, and returns the finished gradient. What is held is either this device's piece, already summed over
the shard axes (a reduce-scatter per micro-batch, 1/S of the bytes), or the whole unreduced gradient (no_sync:
no communication, all of the bytes). The all-reduce over replicas runs only in the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero

from jfsdp import collectives, order
from jfsdp.layout import ParamLayout
from jfsdp.order import Order, Turn
from jfsdp.residuals import Arrays, Split, hoist, is_floating, level, spread

Maybe = Sequence[Array | None]


@dataclass(frozen=True)
class Regime:
    """What the backward pass of a micro-batch does with a gradient. See Note [Accumulation]."""

    last: bool = True
    """Finish: reduce over all axes."""
    no_sync: bool = False
    """What is held is whole and unreduced (parameters whose gradient is never whole hold pieces all the same)."""

    def holds_whole(self, leaf: ParamLayout) -> bool:
        return self.no_sync and not leaf.never_whole


class Unavailable:
    """Something that stands where an array is expected and explains, whatever is done with it, why it is none."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        self.explain()

    def _refuse(self, *_, **__):
        self.explain()

    __jax_array__ = __array__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse


class Once:
    """Whether, in one tracing of a loss, a use has taken what is held. Compared by identity."""

    def __init__(self):
        self.taken, self.level = False, level()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("shard", "slot", "held", "sink"),
    meta_fields=("layout", "regime", "once", "order"),
)
@dataclass(frozen=True)
class Sharded(Unavailable):
    """A parameter inside the step, as this device holds it. See Note [Where gradients come out]."""

    shard: Array
    """Stored local array: `[L, .., d/shard, ..]`, or whole where the strategy keeps it whole."""
    slot: Array | None
    held: Array | None
    """Gradient of earlier micro-batches; None when there were none."""
    sink: Array | None
    layout: ParamLayout
    regime: Regime
    once: Once
    order: Order

    def explain(self):
        raise RuntimeError(
            f"{self.layout.path} is sharded here and was used as an array. Its unit gathers while its call runs, or a "
            "method that was registered with register_fsdp_forward_method(module, name); in a loss over plain pytrees "
            "use unshard(params) or call(fn, params, ...)."
        )

    def take_held(self) -> Array | None:
        """What is held, for the one use that adds it to its own gradient.

        Raises: NotImplementedError the second time, and in a loop, because it would be added twice.
        """
        if self.held is not None and (self.once.taken or self.once.level != level()):
            raise NotImplementedError(
                f"{self.layout.path} goes through a stack more than once, or inside a loop or jax.checkpoint, in a "
                "step that accumulates micro-batches. Use accumulate=1 with a larger batch, or give each pass its own "
                "layers."
            )
        self.once.taken = True
        return self.held


def enter(
    shard: Array,
    slot: Array | None,
    held: Array | None,
    leaf: ParamLayout,
    regime: Regime = Regime(),
    order: Order | None = None,
) -> Sharded:
    """A parameter at the start of a loss. `slot` is None where no gradient is wanted (frozen, or evaluation).

    order: shared by all parameters of one loss.
    """
    return Sharded(shard, slot, held, None, leaf, regime, Once(), order or Order())


def empty_slot(leaf: ParamLayout, regime: Regime) -> Array:
    """Zeros shaped and typed as the gradient that a micro-batch returns for a parameter: finished, or held."""
    whole = not regime.last and regime.holds_whole(leaf)
    zeros = jnp.zeros(leaf.stack(leaf.shape if whole else leaf.shard_shape), leaf.dtype)
    varying = () if leaf.dim is None and not whole else leaf.placement.shard_axes
    return collectives.vary(zeros, varying if regime.last else (*varying, *leaf.placement.replica_axes))


def is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def track(params):
    """Give every unit outside a stack the one place that reduces its gradient; call once at the start of a loss."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_sharded)
    units: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if is_sharded(leaf) and leaf.layout.layers is None and leaf.slot is not None:
            units.setdefault(leaf.layout.unit, []).append(i)
    for members in units.values():
        for i, tracked in zip(members, _track_unit([leaves[i] for i in members])):
            leaves[i] = tracked
    return jax.tree.unflatten(tree, leaves)


def unshard(params):
    """Whole parameters of one unit, in their `param_dtype`; they stay gathered from forward to backward.

    For a root's own small parameters, and for what PyTorch calls `reshard_after_forward=False`. Plain arrays
    pass through, so a model that calls this runs without a mesh.
    """
    leaves, tree = jax.tree.flatten(params, is_leaf=is_sharded)
    sharded = [leaf for leaf in leaves if is_sharded(leaf)]
    whole = iter(_gather_and_keep(sharded) if sharded else [])
    return jax.tree.unflatten(tree, [next(whole) if is_sharded(leaf) else leaf for leaf in leaves])


def call(fn: Callable, params, *args):
    """`fn(whole_params, *args)` as one unit: gathered, computed, freed, and gathered again for backward.

    Under a strategy that keeps weights from forward to backward nothing is gathered again. Inputs and outputs are cast
    as the unit's `MixedPrecision` says. Plain arrays are passed on as they are.
    Raises: TypeError when only a part of `params` is sharded.
    """
    sharded = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_sharded) if is_sharded(leaf)]
    if not sharded:
        return fn(params, *args)
    precision = sharded[0].layout.precision
    return precision.cast_outputs(call_uncast(fn, params, *precision.cast_inputs(args)))


def call_uncast(fn: Callable, params, *args):
    """`call` for a function that takes care of dtypes itself."""
    leaves, tree = jax.tree.flatten(params, is_leaf=is_sharded)
    sharded = [leaf for leaf in leaves if is_sharded(leaf)]
    if not sharded:
        return fn(params, *args)
    if len(sharded) < len(leaves):
        raise TypeError(
            f"a unit got {len(sharded)} sharded and {len(leaves) - len(sharded)} plain parameters. "
            "Lay out all of them in one plan."
        )
    return _call(fn, sharded, tree, args)


def _gather_and_keep(sharded: list[Sharded]) -> Arrays:
    layouts = [p.layout for p in sharded]
    for p in sharded:
        p.order.uses.append(p.layout.unit)
    gather = jax.custom_vjp(lambda shards, sinks: collectives.gather(shards, layouts))
    gather.defvjp(
        lambda shards, sinks: (collectives.gather(shards, layouts), None),
        lambda _, grads: ([None] * len(layouts), _to_sinks(grads, sharded)),
    )
    return gather([p.shard for p in sharded], [p.sink for p in sharded])


def _call(fn: Callable, sharded: list[Sharded], tree, args):
    layouts = [p.layout for p in sharded]
    axes, frees = layouts[0].placement.data_axes, any(leaf.placement.reshard_after_forward for leaf in layouts)
    gathers = any(leaf.dim is not None and not leaf.placement.whole_at_rest for leaf in layouts)
    x, x_tree = jax.tree.flatten(args)
    x = [collectives.vary(a, axes) if is_floating(a) else a for a in x]
    fn = partial(_flat_call, fn, tree, x_tree, out_tree := [])
    fn, consts = hoist(fn, stand_ins(layouts), x)
    trained = [p.sink is not None for p in sharded]
    turn = sharded[0].order.next(layouts[0].unit)
    split: list[Split] = []

    def forward(shards, sinks, slots, x, consts, tickets, previous):
        ticket = collectives.vary(order.ticket(x), axes)
        waits_for = [t for t, other in zip(tickets, turn.wires) if other in turn.after] or [ticket]
        shards = order.after(waits_for, shards) if gathers else shards  # See Note [Tickets]
        weights = collectives.gather(shards, layouts)
        wanted = (trained, [is_floating(c) for c in consts], [])
        split.append(Split(lambda w, x, c, _: fn(c, w, x), weights, x, consts, [], wanted))
        out, saved = split[-1].forward(weights, x, consts, [])
        kept = collectives.keep(weights, shards, layouts) if frees else weights
        return (out, ticket, jnp.zeros_like(ticket)), (kept, saved, x, consts)

    def backward(residuals, cotangents):
        (kept, saved, x, consts), (cotangents, opened, reduced_above) = residuals, cotangents
        weights, opening = kept, collectives.vary(order.ticket(cotangents), axes)
        if frees:
            # Not before it is this unit's turn; and XLA must not take it for the forward pass's gather, and hold on to
            # the result of that.
            weights = collectives.gather_again(order.after([opened if turn.is_opened else opening], kept), layouts)
        to_weights, to_x, to_consts, _ = split[-1].pullback(weights, saved, consts, [], cotangents)
        to_sinks, to_slots = _hand_back(spread(to_weights, trained), sharded, turn)
        # What is below waits for the reduction above, so that no more than two whole gradients are alive.
        to_x = order.after([reduced_above], to_x)
        reduced = collectives.vary(order.ticket(to_slots), axes)
        return (
            [None] * len(layouts),
            to_sinks,
            to_slots,
            fill_integers(to_x, x),
            fill_integers(to_consts, consts),
            [opening if other in turn.opens else jnp.zeros_like(opening) for other in turn.wires],
            None if turn.previous is None else reduced,
        )

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    places = [[getattr(p, name) for p in sharded] for name in ("shard", "sink", "slot")]
    previous = None if turn.previous is None else turn.previous.reduced
    out, turn.ticket, turn.reduced = run(*places, x, consts, [other.ticket for other in turn.wires], previous)
    return jax.tree.unflatten(out_tree[-1], out)


def _hand_back(grads: Maybe, params: list[Sharded], turn: Turn) -> tuple[list, list]:
    """One use's gradients, as cotangents of sinks and of slots: of a unit that is called once they are reduced here."""
    here = [
        i
        for i, p in enumerate(params)
        if grads[i] is not None and p.layout.dim is not None and turn.is_only and not p.regime.no_sync
    ]
    to_slots: list = [None] * len(params)
    with jax.named_scope("reduce_scatter"):
        pieces = collectives.reduce_scatter([grads[i] for i in here], [params[i].layout for i in here])
    for i, piece in zip(here, pieces):
        to_slots[i] = collectives.vary(piece, params[i].layout.placement.data_axes)
    to_sinks = _to_sinks([None if i in here else g for i, g in enumerate(grads)], params)
    return to_sinks, to_slots


def _flat_call(fn, tree, x_tree, out_tree, weights, x):
    out, structure = jax.tree.flatten(fn(jax.tree.unflatten(tree, weights), *jax.tree.unflatten(x_tree, x)))
    out_tree.append(structure)
    return out


def absorb(whole: Maybe, pieces: Maybe, held: Maybe, layouts: Sequence[ParamLayout], regime: Regime) -> list:
    """Join the parts of one unit's gradient: `whole` ones still to be scattered, `pieces` that are, and what is held.

    Gives the piece of each parameter that waits for the all-reduce over replicas, or, before the last
    micro-batch, what to hold. A part that does not exist is None.
    """
    adds_whole = [regime.holds_whole(leaf) for leaf in layouts]
    sums = [_add(w, h if a else None) for w, h, a in zip(whole, held, adds_whole)]
    # Nothing hands back pieces of what is held whole; a loop around a use makes zeros of them.
    pieces = [None if a and not regime.last else p for p, a in zip(pieces, adds_whole)]
    scatter = [i for i, s in enumerate(sums) if s is not None and (regime.last or not adds_whole[i])]
    scattered = collectives.reduce_scatter([sums[i] for i in scatter], [layouts[i] for i in scatter])
    for i, s in zip(scatter, scattered):
        sums[i] = s
    return [_add(s, p, None if a else h) for s, p, h, a in zip(sums, pieces, held, adds_whole)]


def stand_ins(layouts: Sequence[ParamLayout]) -> Arrays:
    """Zeros shaped and typed as `collectives.gather` gives one layer's parameters; for tracing only, never read."""
    return [collectives.vary(jnp.zeros(leaf.shape, leaf.param_dtype), leaf.placement.data_axes) for leaf in layouts]


def fill_integers(cotangents: Arrays, args: Arrays) -> list:
    """Put None, JAX's zero cotangent, at the integer arguments that `Split` left out."""
    return spread(cotangents, [is_floating(a) for a in args])


def _track_unit(params: list[Sharded]) -> list[Sharded]:
    """The one place where a unit's gradient is reduced. See Note [Where gradients come out]."""
    layouts, regime = [p.layout for p in params], params[0].regime

    def places(slots, held):
        def new(leaf, shape, dtype):
            return collectives.vary(jnp.zeros(shape, dtype), leaf.placement.data_axes)

        return [(new(leaf, leaf.shape, leaf.reduce_dtype), new(leaf, leaf.shard_shape, leaf.dtype)) for leaf in layouts]

    def forward(slots, held):
        held = [h.value if h is not None else None for h in held]
        return places(slots, held), held

    def backward(held, cotangents):
        whole, pieces = zip(*([None if isinstance(g, SymbolicZero) else g for g in pair] for pair in cotangents))
        out = absorb(whole, pieces, held, layouts, regime)
        out = [empty_slot(leaf, Regime(last=False)) if g is None else g for g, leaf in zip(out, layouts)]  # never used
        return collectives.all_reduce(out, layouts) if regime.last else out, [None] * len(held)

    enter_unit = jax.custom_vjp(places)
    enter_unit.defvjp(forward, backward, symbolic_zeros=True)
    pairs = enter_unit([p.slot for p in params], [p.held for p in params])
    return [replace(p, slot=slot, held=None, sink=sink) for p, (sink, slot) in zip(params, pairs)]


def _to_sinks(grads: Arrays, params: list[Sharded]) -> list:
    """Whole gradients in the dtype in which several uses are added up; None where no gradient is wanted."""
    return [None if p.sink is None or g is None else g.astype(p.layout.reduce_dtype) for g, p in zip(grads, params)]


def _add(*parts: Array | None) -> Array | None:
    """Sum of the parts that exist, in the widest of their dtypes; None when there are none."""
    there = [p for p in parts if p is not None]
    dtype = jnp.result_type(*there) if there else None
    return sum((p.astype(dtype) for p in there[1:]), there[0].astype(dtype)) if there else None
