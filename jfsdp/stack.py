"""L equal units in one scan, gathers one unit ahead both ways, reductions one unit behind.

Owns the loops: which unit is gathered, kept, freed and computed in which iteration. What follows a gradient is
`schedule.py`, what moves is `collectives.py`, which residuals survive is `residuals.py`; the maths is the caller's.

Note [The loop]
Forward, prefetch depth 1, units 0..L-1:

    gather 0 | gather 1, compute 0 | gather 2, compute 1 | ... | compute L-1
              '-------------- scan over 0..L-2 --------------'   kept into backward

Backward walks down. In iteration l: gather l-1, reduce the gradient of l+1, compute the gradient of l.
Nothing in an iteration waits for what that iteration moves, so the compiler may overlap all of it with the
matmuls. The carry holds the gathered units ahead, head first.

Note [The one unused gather]
The forward loop is peeled at its end and gathers each unit once. The backward loop is not: its last iteration
gathers unit 0 once more and nobody reads it, so a step gathers 2L units where 2L-1 would do (with depth 2, 2L+1).
Peeling that iteration was compiled (8B, 8 H100, JAX 0.10.2): 364 MiB less received, and 488 us exposed at the end of
the step instead of 0, as the last two reductions then have nothing to hide behind; and one more copy of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jfsdp import collectives, order
from jfsdp.offload import OffloadActivations, is_on_host
from jfsdp.residuals import Arrays, Split, from_bits, hoist, is_floating, spread, to_bits
from jfsdp.schedule import Index, Reducer, Schedule, Waiting, at
from jfsdp.unit import Sharded, fill_integers, is_sharded, stand_ins


def run_stack(block: Callable, params, x, *shared, inputs=None, remat="full", schedule: Schedule = Schedule()):
    """Run `x, out = block(weights, x, input, *shared)` over L layers; gives the last x and the stacked outs.

    params: pytree of stacked leaves `[L, ...]`, `Sharded` inside the step and plain arrays anywhere else.
    x: pytree that keeps its shapes and dtypes from layer to layer.
    inputs: pytree of `[L, ...]` arrays, one slice per layer (keys, layer scales); None when there are none.
    shared: the same for every layer; the gradient of what is differentiated (an encoder's output) is summed over
        layers.
    remat: see `checkpointed`.
    Raises: TypeError when a block changes the shape or dtype of x.
    """
    block = checkpointed(block, remat)
    leaves, tree = jax.tree.flatten(params, is_leaf=is_sharded)
    if any(is_sharded(leaf) for leaf in leaves):
        return _run_sharded(block, leaves, tree, x, shared, inputs, schedule)
    return lax.scan(lambda x, layer: block(layer[0], x, layer[1], *shared), x, (params, inputs), unroll=schedule.unroll)


def checkpointed(block: Callable, remat: str | Sequence[str] | OffloadActivations) -> Callable:
    """Apply activation checkpointing to one block.

    remat: "none" saves every activation, "full" the block's input only, "dots" also what matmuls with weights give
    (those of activations alone, such as attention's scores, are computed again); a sequence saves what
    `jax.ad_checkpoint.checkpoint_name` gave those names; `OffloadActivations` keeps some of it on the host.
    Raises: ValueError for an unknown word.
    """
    policies = jax.checkpoint_policies
    if isinstance(remat, OffloadActivations):
        return remat.applied_to(block)
    if not isinstance(remat, str):
        return jax.checkpoint(block, policy=policies.save_only_these_names(*remat), prevent_cse=False)
    known = {"none": None, "full": policies.nothing_saveable, "dots": policies.dots_with_no_batch_dims_saveable}
    if remat not in known:
        raise ValueError(f"remat {remat!r} is unknown. Use none, full, dots, or a list of checkpoint names.")
    return block if remat == "none" else jax.checkpoint(block, policy=known[remat], prevent_cse=False)


class _Saved(NamedTuple):
    """What the forward pass leaves for the backward pass: (activations, kept weights), stacked in `loop`, listed in
    `tail`."""

    loop: tuple | None
    tail: list[tuple]
    shards: Arrays
    """What the backward pass gathers: the shards, or larger pieces of this step's weights (hpZ), `[L, ...]`."""
    last_weights: Arrays | None


class _Back(NamedTuple):
    """Carry of the backward loop."""

    cotangent: Arrays
    queue: list[Arrays]
    waiting: Waiting
    to_shared: Arrays


class _Stack:
    """A stack's two passes over flat lists of arrays. See Note [The loop]."""

    def __init__(self, block: Callable, params: list[Sharded], schedule: Schedule):
        self.block, self.schedule = block, schedule
        self.layouts, self.regime = [p.layout for p in params], params[0].regime
        self.trained = [p.slot is not None for p in params]
        placement = self.layouts[0].placement
        self.axes = placement.data_axes
        self.num_layers = self.layouts[0].layers
        self.frees = placement.reshard_after_forward and not placement.whole_at_rest
        self.keeps_parts = self.frees and placement.regather is not None
        self.keeps = not placement.reshard_after_forward and not placement.whole_at_rest
        self.depth = 0 if placement.whole_at_rest else min(schedule.prefetch, self.num_layers)
        self.tail_start = self.num_layers - min(max(self.depth, 1), self.num_layers)

    def fetch(self, shards: Arrays, unit: Index, again: bool = False, after: Arrays | None = None) -> Arrays:
        mine = [at(w, unit) for w in shards]
        gather = collectives.gather_again if again else collectives.gather
        with jax.named_scope("gather"):
            return gather(_not_before(after, mine), self.layouts)

    def forward(
        self, shards: Arrays, x: Arrays, inputs: Arrays, shared: Arrays, wanted=None
    ) -> tuple[Arrays, Arrays, _Saved | None]:
        """Gives x, stacked outs and what is saved.

        wanted: which inputs and shared values get a gradient; None saves nothing.
        """
        if wanted is not None:
            first = [at(a, 0) for a in inputs]
            gradients = (self.trained, wanted[1], wanted[0])
            self.split = Split(self.block, stand_ins(self.layouts), x, shared, first, gradients)
        queue = [self.fetch(shards, i) for i in range(self.depth)]

        def unit(x, queue, i: Index, given):
            """Unit i computes with the head of the queue, while the unit behind its end is gathered."""
            if not isinstance(i, int) or i + self.depth < self.num_layers:
                queue = [*queue, self.fetch(shards, i + self.depth)]
            weights = queue[0]
            if wanted is None:
                out, saved = self.block(weights, x, shared, given), []
            else:
                out, saved = self.split.forward(weights, x, shared, given)
            kept = weights if self.keeps and wanted is not None else None
            parts = []
            if self.keeps_parts and wanted is not None:
                parts = collectives.keep(weights, [at(w, i) for w in shards], self.layouts)
            return out[: len(x)], queue[1:], out[len(x) :], (saved, kept), parts, weights

        def body(carry, layer):
            x, queue, out, saved, parts, _ = unit(*carry, *layer)
            return (x, queue), (out, to_bits(saved), parts)

        loop_out, loop, loop_parts = None, None, None
        if self.tail_start:
            layers = (jnp.arange(self.tail_start), [a[: self.tail_start] for a in inputs])
            (x, queue), (loop_out, loop, loop_parts) = lax.scan(body, (x, queue), layers, unroll=self.schedule.unroll)
        tail_out, tail, tail_parts, weights = [], [], [], None
        for i in range(self.tail_start, self.num_layers):
            x, queue, out, saved, parts, weights = unit(x, queue, i, [at(a, i) for a in inputs])
            tail_out.append(out)
            tail.append(saved)
            tail_parts.append(parts)
        parts = _join(loop_parts, tail_parts) if self.keeps_parts else shards
        return x, _join(loop_out, tail_out), _Saved(loop, tail, parts, weights if self.frees else None)

    def backward(self, held, inputs: Arrays, shared: Arrays, saved: _Saved, to_x: Arrays, to_outs: Arrays, wanted):
        """Cotangents of slots, x, inputs and shared values (the wanted ones)."""
        trained = [leaf for leaf, is_trained in zip(self.layouts, self.trained) if is_trained]
        reducer = Reducer(trained, held, self.regime, self.schedule)
        queue = []
        if self.frees:
            ahead = range(self.num_layers - 2, max(self.num_layers - 1 - self.depth, -1), -1)
            queue = [saved.last_weights, *(self.fetch(saved.shards, i, again=True, after=to_x) for i in ahead)]
        state = _Back(
            cotangent=to_x,
            queue=queue,
            waiting=reducer.start(),
            # What is the same on every device (a constant, a mean over the batch) gets a gradient that is, too.
            to_shared=[
                collectives.vary(jnp.zeros(s.shape, s.dtype), jax.typeof(s).manual_axis_type.varying)
                for s, w in zip(shared, wanted[1])
                if w
            ],
        )

        def unit(state: _Back, i: Index, kept, given, to_out, after: Arrays | None = None):
            """Gather below (not before `after`), reduce above, compute the gradient of unit i."""
            activations, weights = kept
            queue = [weights] if self.keeps else state.queue or [self.fetch(saved.shards, i, again=self.frees)]
            if self.frees and self.depth:
                below = i - self.depth  # clamped at the end: Note [The one unused gather]
                below = max(below, 0) if isinstance(i, int) else jnp.maximum(below, 0)
                queue = [*queue, self.fetch(saved.shards, below, again=True, after=after)]
            waiting = reducer.advance(state.waiting, i)
            to_weights, to_x, to_shared, to_given = self.split.pullback(
                queue[0], activations, shared, given, [*state.cotangent, *to_out]
            )
            to_x, to_shared = _fill(state.cotangent, to_x), [a + b for a, b in zip(state.to_shared, to_shared)]
            return _Back(to_x, queue[1:], reducer.push(waiting, to_weights, i), to_shared), to_given

        to_tail = []
        for i in reversed(range(self.tail_start, self.num_layers)):
            activations, weights = saved.tail[i - self.tail_start]
            after = None if i == self.num_layers - 1 else state.cotangent
            kept = (_not_before(after, activations), weights)
            given, to_out = [at(a, i) for a in inputs], [at(o, i) for o in to_outs]
            state, to_given = unit(state, i, kept, given, to_out, after)
            to_tail.insert(0, to_given)
        to_loop = None
        if self.tail_start:
            layers = jax.tree.map(
                lambda a: a[: self.tail_start], (jnp.arange(self.num_layers), saved.loop, inputs, to_outs)
            )

            def body(state, layer):
                i, kept, given, to_out = layer
                return unit(state, i, from_bits(kept, saved.tail[0]), given, to_out)

            state, to_loop = lax.scan(body, state, layers, reverse=True, unroll=self.schedule.unroll)
        to_slots = spread(reducer.finish(state.waiting), self.trained)
        return to_slots, state.cotangent, _join(to_loop, to_tail), state.to_shared


def _run_sharded(block, leaves: list[Sharded], tree, x, shared, inputs, schedule: Schedule):
    _check_leaves(leaves)
    layouts, axes = [p.layout for p in leaves], leaves[0].layout.placement.data_axes
    precision = leaves[0].layout.precision
    x = precision.cast_inputs(x)
    (x, x_tree), (inputs, inputs_tree), (shared, shared_tree) = (jax.tree.flatten(t) for t in (x, inputs, shared))
    x, inputs, shared = ([_vary(a, axes) for a in flat] for flat in (x, inputs, shared))
    out_tree: list = []

    def flat_block(weights, x, given, shared):
        new_x, out = block(
            *(jax.tree.unflatten(t, flat) for t, flat in ((tree, weights), (x_tree, x), (inputs_tree, given))),
            *jax.tree.unflatten(shared_tree, shared),
        )
        _check_carry(x, x_tree, new_x)
        out, structure = jax.tree.flatten(out)
        out_tree.append(structure)
        return [_vary(a, axes) for a in (*jax.tree.leaves(new_x), *out)]

    hoisted, consts = hoist(flat_block, stand_ins(layouts), x, [at(a, 0) for a in inputs], shared)
    n, shared = len(shared), [*shared, *consts]
    stack = _Stack(lambda w, x, s, given: hoisted(s[n:], w, x, given, s[:n]), leaves, schedule)

    def primal(slots, shards, held, x, inputs, shared):
        return stack.forward(shards, x, inputs, shared)[:2]

    def forward(slots, shards, held, x, inputs, shared):
        stack.wanted = [[p.perturbed and is_floating(p.value) for p in group] for group in (inputs, shared)]
        shards, held, x, inputs, shared = _values((shards, held, x, inputs, shared))
        *out, saved = stack.forward(shards, x, inputs, shared, stack.wanted)
        return tuple(out), (held, x, inputs, shared, saved)

    def backward(residuals, cotangents):
        held, x, inputs, shared, saved = residuals
        to_slots, to_x, to_inputs, to_shared = stack.backward(
            [h for h, is_trained in zip(held, stack.trained) if is_trained],
            inputs,
            shared,
            saved,
            *jax.tree.map(_instantiate, list(cotangents), is_leaf=_is_zero),
            stack.wanted,
        )
        return (
            to_slots,
            [None] * len(leaves),
            [None] * len(leaves),
            fill_integers([t for t, a in zip(to_x, x) if is_floating(a)], x),
            spread(to_inputs, stack.wanted[0]),
            spread(to_shared, stack.wanted[1]),
        )

    run = jax.custom_vjp(primal)
    run.defvjp(forward, backward, symbolic_zeros=True)
    x, out = run(
        [p.slot for p in leaves], [p.shard for p in leaves], [p.take_held() for p in leaves], x, inputs, shared
    )
    return jax.tree.unflatten(x_tree, precision.cast_outputs(x)), jax.tree.unflatten(out_tree[-1], out)


class Stack(nnx.Module):
    """L equal blocks as one module: parameters are stacked `[L, ...]`, `stack(x, *shared)` runs them in order.

    make_block: `make_block(rngs) -> nnx.Module`, traced once for all layers; each layer has its own keys.
    remat: activation checkpointing of each block, see `checkpointed`.
    schedule: when gathers and reductions run; used inside a sharded step only.

    Without a mesh this is a `lax.scan`. Blocks are called `block(x, *shared)` and return x.
    """

    def __init__(
        self, make_block: Callable, num_layers: int, *, rngs: nnx.Rngs, remat="full", schedule: Schedule = Schedule()
    ):
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}; a stack needs 1 layer or more.")
        self.num_layers, self.remat, self.schedule = num_layers, remat, schedule
        keys = jax.random.split(rngs.params(), num_layers)
        graph = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(keys[0]))))[0]
        # One layer after the other: all at once would hold the random bits of every layer beside the parameters.
        self.each = nnx.merge(graph, lax.map(lambda key: nnx.state(make_block(nnx.Rngs(key))), keys))

    def __call__(self, x, *shared):
        graph, params, rest = nnx.split(self.each, nnx.Param, ...)

        def block(weights, x, rest, *shared):
            before, module = jax.tree.leaves(rest), nnx.merge(graph, weights, rest)
            return module(x, *shared), written(before, module)

        x, rest = run_stack(block, params, x, *shared, inputs=rest, remat=self.remat, schedule=self.schedule)
        nnx.update(self.each, rest)
        return x

    def scan(self, method: str, x, inputs, *shared):
        """`x, out = block.method(x, input, *shared)` in order, each block with its slice of `inputs` `[L, ...]`; gives
        the last x and the outs, stacked. For what a block keeps between calls, such as a cache of keys and values."""
        graph, params = nnx.split(self.each)

        def block(weights, x, given, *shared):
            return getattr(nnx.merge(graph, weights), method)(x, given, *shared)

        return run_stack(block, params, x, *shared, inputs=inputs, remat=self.remat, schedule=self.schedule)


def written(before: list, module: nnx.Module) -> nnx.State:
    """A module's variables, parameters aside, that hold none of the arrays in `before`: only those need leave a traced
    call."""
    old = {id(leaf) for leaf in before}
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    return nnx.from_flat_state([(path, v) for path, v in flat if any(id(a) not in old for a in jax.tree.leaves(v))])


def _check_leaves(leaves: list) -> None:
    for leaf in leaves:
        if not is_sharded(leaf):
            raise TypeError("a stack got sharded and plain parameters together. Lay out all of them in one plan.")
        layout, first = leaf.layout, leaves[0].layout
        if layout.layers is None:
            raise ValueError(
                f"{layout.path} goes through a stack but its unit is not stacked. "
                "Mark the unit with UnitOptions(stacked=True)."
            )
        if layout.layers != first.layers:
            raise ValueError(
                f"{layout.path} has {layout.layers} layers and {first.path} has {first.layers}; "
                "a stack needs equal counts."
            )


def _check_carry(x: Arrays, x_tree, new_x) -> None:
    flat, tree = jax.tree.flatten(new_x)
    before, after = ([f"{a.dtype.name}{list(a.shape)}" for a in arrays] for arrays in (x, flat))
    if tree != x_tree or before != after:
        raise TypeError(
            f"a block of a stack must return x as it came: it got {before} and returned {after}. "
            "Cast or project inside the block."
        )


def _vary(a: Array, axes: tuple[str, ...]) -> Array:
    """Floating values vary, as their cotangents will; integers (positions, counters, keys) stay as they are."""
    return collectives.vary(a, axes) if is_floating(a) else a


def _values(tree):
    """Arrays out of what a `custom_vjp` with symbolic zeros hands to its forward rule."""
    return jax.tree.map(lambda p: p.value, tree, is_leaf=lambda p: hasattr(p, "perturbed"))


def _is_zero(x) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiate(cotangent):
    """Zeros for a symbolic zero, typed as its primal; None stays JAX's zero for integers."""
    if not _is_zero(cotangent):
        return cotangent
    aval = cotangent.aval
    return collectives.vary(jnp.zeros(aval.shape, aval.dtype), aval.manual_axis_type.varying)


def _fill(old: Arrays, new: Arrays) -> Arrays:
    """Put the cotangents of the floating entries back between the others'."""
    given = iter(new)
    return [next(given) if is_floating(a) else a for a in old]


def _not_before(cotangent: Arrays | None, arrays: Arrays) -> Arrays:
    """What a unit computes or gathers again from, not before a cotangent is there; None waits for nothing. Outside a
    loop XLA would merge that with the forward pass, or gather when the step begins, and keep the result meanwhile. For
    the last unit, whose backward pass comes next, it may."""
    if cotangent is None:
        return arrays
    wait = [is_floating(a) and not is_on_host(a) for a in arrays]
    late = order.after([order.ticket(cotangent)], [a for a, waits in zip(arrays, wait) if waits])
    return [late.pop(0) if waits else a for a, waits in zip(arrays, wait)]


def _join(loop, tail: list):
    """Stack per-layer results in order: of the layers in the loop, and of those above it."""
    parts = [] if loop is None else [loop]
    parts += [jax.tree.map(lambda *a: jnp.stack(a), *tail)]
    return jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *parts)
