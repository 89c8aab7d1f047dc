"""The train step: micro-batches, gradients, clipping, the optimizer.

Owns the story of one optimizer step and nothing of how a unit moves (`unit.py`), what a loss gives (`loss.py`) or what
a state is (`state.py`). A step is one compiled program:

    total weight of the window -> micro-batches (a scan, the last one peeled) -> finished gradient shards, unscaled
    -> norm -> clip -> optimizer on shards -> new state, or the old one when a gradient is not finite

Note [The last micro-batch]
It is taken out of the scan, because its backward pass also adds what the others accumulated, layer by layer, and
runs the all-reduce over replicas. The program holds two backward loops, however many micro-batches there are.

Note [One micro-batch after the other]
A forward pass does not read what was accumulated, so a compiler may run it before the last backward pass ends, and with
its loops unrolled XLA does: the activations of two or three micro-batches are then alive at once. `_after` makes each
batch wait. Compiled for 8 H100, 4 micro-batches of a 1B model (JAX 0.10.2), without and with it: 5,365 and 4,066 MiB,
and 2.2 and 3.1 ms exposed in a step.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from jfsdp import collectives, offload, offload_check, randomness
from jfsdp import ema as averages
from jfsdp.audit.gpu import compiler_options
from jfsdp.layout import ParamLayout, Plan, UnitOptions
from jfsdp.loss import enter_params, loss_terms, own_key, settle_buffers, total_weights
from jfsdp.mesh import REPLICA, SHARD
from jfsdp.optim import Optimizer, global_norm, gradient_sums
from jfsdp.state import TrainState, check_separate_buffers
from jfsdp.unit import Regime, empty_slot


class TrainStep:
    """A compiled train step; make it with `train_step`."""

    def __init__(
        self,
        loss,
        tx,
        plan: Plan,
        *,
        accumulate,
        no_sync,
        reshard_after_backward,
        clip_norm,
        clip_value,
        norm_type,
        nonfinite,
        ema,
        donate,
        options,
    ):
        self.loss, self.plan, self.optimizer = loss, plan, Optimizer(tx, plan)
        self.trained = jax.tree.leaves(plan.trainable)
        self.accumulate, self.no_sync, self.reshard_after_backward = accumulate, no_sync, reshard_after_backward
        self.clip_norm, self.norm_type, self.nonfinite = clip_norm, norm_type, nonfinite
        self.clip_value, self.ema = clip_value, ema
        self._donate, self.options = donate, options
        self._is_checked = False
        self._made = lambda: None  # weak reference to the last state that this step returned

    def __call__(self, state: TrainState, batch) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step on a global batch (arrays with equal leading size, a multiple of devices x accumulate).

        Gives the new state and metrics: `loss`, `weight` (tokens counted), `grad_norm`, `skipped` and `updates` (steps
        so far without and with an update), `loss_scale` (this step's, if there is one), and the auxiliary losses.
        Raises: ValueError for a batch that does not divide, and for a state of another plan or in which two leaves
            share a buffer; FloatingPointError under nonfinite="raise", whose `state` is the state before the step.
        """
        self.check_batch(batch)
        self._check_plan(state)
        if self._donate and self._made() is not state:
            check_separate_buffers(state)
        if not self._is_checked:
            self._check_offload(state, batch)
        state, metrics = self.jitted(state, batch)
        self._made = weakref.ref(state)
        if self.nonfinite == "raise" and bool(jnp.any(metrics["bad"])):
            error = FloatingPointError(self._explain(state, metrics))
            error.state = state  # the old one was donated; this one holds the same values
            raise error
        return state, {k: v for k, v in metrics.items() if k != "bad"}

    def lower(self, state, batch):
        """The lowered step for real or abstract arguments; `.compile()` gives the program that a run would use."""
        self.check_batch(batch)
        self._check_plan(state)
        return self.jitted.lower(state, batch)

    @cached_property
    def jitted(self):
        how = dict(out_shardings=(self._state_shardings(), None), compiler_options=self.options or None)
        how |= dict(donate_argnums=(0,) if self._donate else ())
        if self.plan.offload.step_on == "host":
            return offload.HostUpdated(self._step, self.plan.batch_sharding, how)
        return jax.jit(self._step, in_shardings=(None, self.plan.batch_sharding), **how)

    def gradients(self, state: TrainState, batch):
        """The finished gradients that a step would hand to clipping, as stored shards (None where frozen).

        See `summon.summon_full_gradients` for whole ones, by name.
        """
        self.check_batch(batch)
        self._check_plan(state)
        return self._jitted_gradients(state, batch)

    @cached_property
    def _jitted_gradients(self):
        return jax.jit(
            lambda state, batch: self._gradients(state, batch)[0],
            in_shardings=(None, self.plan.batch_sharding),
            out_shardings=self.plan.only_trainable(self.plan.shard_shardings),
            compiler_options=self.options or None,
        )

    def with_plan(self, plan: Plan) -> TrainStep:
        """The same step for another plan of the same parameters; it donates nothing."""
        new = copy.copy(self)
        for made in ("jitted", "_jitted_gradients"):
            new.__dict__.pop(made, None)
        new.plan, new.optimizer, new._donate, new._is_checked = plan, Optimizer(self.optimizer.tx, plan), False, True
        new.trained = jax.tree.leaves(plan.trainable)
        return new

    def _check_offload(self, state: TrainState, batch) -> None:
        """Before the first step, see Note [The check at the start] in `offload.py`. JAX keeps what is traced here."""
        with offload.seen() as activations:
            self.jitted.trace(state, batch)
        if self.plan.offload or activations:
            offload_check.check(self, state, batch, tuple(activations))
        self._is_checked = True

    def check_batch(self, batch) -> None:
        rows = {a.shape[0] if a.shape else None for a in jax.tree.leaves(batch)}
        devices = self.plan.placement.shards * self.plan.placement.replicas
        share = devices * self.accumulate
        if len(rows) != 1 or None in rows:
            raise ValueError(
                f"the arrays of a batch have leading sizes {sorted(map(str, rows))}; all need the same number of rows."
            )
        (size,) = rows
        if size == 0 or size % share:
            below, above = size // share * share, -(-max(size, 1) // share) * share
            nearest = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"a batch of {size} rows does not divide by {devices} devices x {self.accumulate} micro-batches = "
                f"{share}. Use {nearest} rows."
            )

    def _check_plan(self, state: TrainState) -> None:
        is_real = isinstance(state.step, Array) and not isinstance(state.step, jax.core.Tracer)
        if is_real and state.step.is_deleted():
            raise RuntimeError(
                "this state was given to a step before, which took its arrays. Go on with the state that the step "
                "returned, or build the step with donate=False."
            )
        if state.plan is not self.plan:
            raise ValueError(
                "the state was made with another plan than the step, even if both say the same. "
                "Make one plan and pass it to TrainState.create and to train_step."
            )
        if (state.ema is None) != (self.ema is None):
            has, wants = ("no average", "ema") if state.ema is None else ("an average", "no ema")
            raise ValueError(
                f"the state keeps {has} of its weights and the step has {wants}. Give both, "
                "TrainState.create(..., ema=True) and train_step(..., ema=0.999), or neither."
            )

    # ---------------------------------------------------------------- one step

    def _step(self, state: TrainState, batch):
        plan = self.plan
        grads, buffers, metrics, sums = self._gradients(state, batch)
        finite = jnp.all(jnp.isfinite(sums))
        if self.clip_norm is not None:
            # Divide by the larger of the two: exact where nothing is clipped, and no 0/0.
            scale = self.clip_norm / jnp.maximum(metrics["grad_norm"], self.clip_norm)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        if self.clip_value is not None:
            grads = jax.tree.map(lambda g: jnp.clip(g, -self.clip_value, self.clip_value), grads)
        old = self.optimizer.stored_shards(offload.to_device(plan.only_trainable(state.params)))
        skips = self.nonfinite != "ignore" or state.scale is not None
        params, opt_state = self._update(grads, state.opt_state, old, finite if skips else None)
        step, skipped, scale = state.step + 1, state.skipped, state.scale
        if skips:
            buffers = jax.tree.map(partial(jnp.where, finite), buffers, state.buffers)
            skipped = skipped + 1 - finite.astype(jnp.int32)
        metrics |= {"skipped": skipped, "updates": step - skipped, "bad": ~jnp.isfinite(sums)}
        if scale is not None:
            metrics["loss_scale"], scale = scale.scale, scale.after(finite)
            metrics["bad"] &= scale.scale == metrics["loss_scale"]  # no matter of scale
        params = plan.with_trainable(state.params, self._gather_whole(params))
        ema = offload.to_device(state.ema)
        if ema is not None:
            moved = averages.advance(ema, offload.to_device(params), plan, self.ema, state.step - state.skipped)
            ema = jax.tree.map(partial(jnp.where, finite), moved, ema) if skips else moved
        # What lies on the host goes there because `jitted` says so of its results.
        new = dict(params=params, opt_state=opt_state, buffers=buffers, scale=scale, ema=ema)
        return replace(state, step=step, skipped=skipped, **new), metrics

    def _update(self, grads, opt_state, old, finite: Array | None):
        """New parameter shards and optimizer state, or the old ones where `finite` says no (None: always new)."""

        def compute(grads, opt_state, old, finite):
            new = self.optimizer.update(grads, opt_state, old)
            return new if finite is None else jax.tree.map(partial(jnp.where, finite), new, (old, opt_state))

        policy = self.plan.offload
        if policy.gradients:
            grads = offload.to_host(grads)
        if policy.step_on == "host":
            return offload.computed_on_host(compute)(grads, opt_state, old, finite)
        return compute(offload.to_device(grads), offload.to_device(opt_state), old, finite)

    def _gradients(self, state: TrainState, batch):
        """Finished gradient shards (global arrays, None where frozen), new buffers, metrics, and what each trained
        parameter adds to the norm `[leaves]`."""
        plan, axes = self.plan, self.plan.placement.data_axes
        everywhere = PartitionSpec()
        local = jax.shard_map(
            self._local_gradients,
            mesh=plan.mesh,
            axis_names={REPLICA, SHARD},
            in_specs=(plan.map(lambda leaf: leaf.rest_spec), everywhere, PartitionSpec(axes), everywhere, everywhere),
            out_specs=([leaf.shard_spec for leaf in self.trained], everywhere, everywhere, everywhere),
        )
        key, scale = jax.random.fold_in(state.key, state.step), state.scale and state.scale.scale
        grads, *others = local(state.params, state.buffers, batch, key, scale)
        return jax.tree.unflatten(jax.tree.structure(plan.trainable), grads), *others

    def _local_gradients(self, params, buffers, batch, key, scale):
        plan, axes, n = self.plan, self.plan.placement.data_axes, self.accumulate
        if not self.reshard_after_backward:
            params, plan = _gathered_for_window(params, plan)
        micro = jax.tree.map(lambda a: a.reshape(n, a.shape[0] // n, *a.shape[1:]), batch)
        keys = jax.random.split(own_key(key, axes), n)
        terms = partial(loss_terms, self.loss, plan, plan.door)
        totals = total_weights(terms, plan, params, buffers, micro, keys, axes)
        weights = {
            name: jnp.where(w == 0, 1, w) for name, w in totals.items()
        }  # nothing counted: the loss is 0, not NaN
        rows = jax.tree.leaves(micro)[0].shape[1]

        def backward(held, buffers, batch, own_key, index, regime: Regime):
            def objective(slots):
                entered = enter_params(plan, params, slots, held, regime)
                with randomness.examples(key, jax.lax.axis_index(axes) * n * rows + index * rows, rows):
                    parts, new = terms(entered, buffers, batch, own_key)
                sums = {name: t.sum for name, t in parts.items()}
                mean = sum(t.coefficient * t.sum / weights[name] for name, t in parts.items())
                return mean if scale is None else mean * scale, (sums, new)

            slots = plan.map(lambda leaf: empty_slot(leaf, regime) if leaf.trainable else None)
            (_, (sums, new)), grads = jax.value_and_grad(objective, has_aux=True)(slots)
            sums = {name: collectives.vary(s, axes) for name, s in sums.items()}
            return sums, settle_buffers(buffers, new, axes), grads

        if n == 1:
            sums, buffers, grads = backward(None, buffers, _at(micro, 0), keys[0], 0, Regime())
        else:
            early, last = Regime(last=False, no_sync=self.no_sync), Regime(last=True, no_sync=self.no_sync)

            def accumulate(carry, one):
                (held, buffers), (batch, own_key, index) = carry, one
                sums, buffers, held = backward(held, buffers, _after(held, batch), own_key, index, early)
                return (held, buffers), sums

            first = jax.tree.map(lambda a: a[: n - 1], (micro, keys, jnp.arange(n)))
            empty = plan.map(lambda leaf: empty_slot(leaf, early) if leaf.trainable else None)
            (held, buffers), sums = jax.lax.scan(accumulate, (empty, buffers), first)
            # See Note [The last micro-batch]
            batch = _after(held, _at(micro, n - 1))
            last_sums, buffers, grads = backward(held, buffers, batch, keys[n - 1], n - 1, last)
            sums = {name: last_sums[name] + s.sum() for name, s in sums.items()}
        grads = jax.tree.leaves(grads)
        if scale is not None:
            grads = [g / scale.astype(g.dtype) for g in grads]
        grads = [_finish(g, leaf, plan.units.get(leaf.unit)) for g, leaf in zip(grads, self.trained)]
        norm_sums = self._norm_sums(grads)
        metrics = {name: collectives.total(s, axes) / weights[name] for name, s in sums.items()}
        metrics |= {"weight": totals["loss"], "grad_norm": global_norm(norm_sums, self.norm_type)}
        return grads, buffers, metrics, norm_sums

    def _norm_sums(self, grads: list[Array]) -> Array:
        """Per trained parameter, its part of the norm, each counted once: `[leaves]`, the same on every device."""
        out = [gradient_sums(g, self.norm_type) for g in grads]
        combine = collectives.largest if math.isinf(self.norm_type) else collectives.total
        by_axes: dict[tuple[str, ...], list[int]] = {}
        for i, leaf in enumerate(self.trained):
            if leaf.dim is not None:
                by_axes.setdefault(leaf.placement.shard_axes, []).append(i)
        for axes, cut in by_axes.items():
            # One small all-reduce over the shard axes: a number per parameter.
            summed = combine(jnp.stack([out[i] for i in cut]), axes)
            for at, i in enumerate(cut):
                out[i] = summed[at]
        return jnp.stack([a.astype(jnp.result_type(*out)) for a in out])

    def _gather_whole(self, shards):
        """New parameter shards to whole parameters, unit by unit, where they are whole at rest (SHARD_OPT)."""
        flat, tree = jax.tree.flatten(shards)
        leaves = self.trained
        units: dict[str, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if leaf.placement.whole_at_rest and leaf.dim is not None:
                units.setdefault(leaf.unit, []).append(i)
        chosen = [i for members in units.values() for i in members]

        flat = offload.to_device(flat) if chosen else flat

        def local(*flat):
            given = dict(zip(chosen, flat))
            for members in units.values():
                given.update(zip(members, collectives.gather_updated(*zip(*((given[i], leaves[i]) for i in members)))))
            return tuple(given[i] for i in chosen)

        if chosen:
            specs = tuple(leaves[i].shard_spec for i in chosen)
            out_specs = tuple(PartitionSpec() for _ in chosen)
            whole = jax.shard_map(local, mesh=self.plan.mesh, in_specs=specs, out_specs=out_specs)
            for i, w in zip(chosen, whole(*(flat[i] for i in chosen))):
                flat[i] = w
        return jax.tree.unflatten(tree, flat)

    def _state_shardings(self):
        everywhere = self.plan.sharding(PartitionSpec())
        params, opt_state = self.plan.rest_shardings, self.optimizer.state_shardings
        ema = None if self.ema is None else self.plan.only_trainable(params)
        scalar = buffers = everywhere
        return TrainState(scalar, scalar, params, opt_state, scalar, buffers, scalar, ema, self.plan)

    def _explain(self, state: TrainState, metrics) -> str:
        bad = [leaf.path for leaf, is_bad in zip(self.trained, metrics["bad"]) if is_bad]
        named = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        return (
            f"step {int(state.step)}: the gradient of {named} is not finite (loss {float(metrics['loss']):.6g}); "
            "nothing was updated. "
            "Lower the learning rate or look at this batch; nonfinite='skip' goes on without it."
        )


def train_step(
    loss: Callable,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    accumulate: int = 1,
    no_sync: bool = False,
    reshard_after_backward: bool = True,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    norm_type: float = 2.0,
    nonfinite: str = "raise",
    ema: averages.Decay | None = None,
    donate: bool = True,
    options: dict | None = None,
) -> TrainStep:
    """Build `step(state, batch) -> (state, metrics)` for `loss(params, batch, key)`.

    loss: sees one device's rows of one micro-batch and gives `(sum, weight)`, or `(sum, weight, {name: Auxiliary})`,
        or a scalar, which is the mean over its rows. The weight may depend on the batch only: Note [Sum and weight] in
        `loss.py`.
    accumulate: micro-batches per step.
    no_sync: keep whole unreduced gradients until the last micro-batch (one reduction per step, all of the gradient's
        bytes); False reduce-scatters each micro-batch into shards. Same result.
    reshard_after_backward: False gathers all weights once and keeps them whole for all micro-batches, P(S-1)/S bytes
        received instead of up to 2 x accumulate as many, for the memory of the whole model in `param_dtype`.
    clip_norm: clip to this norm over all parameters; None does not clip.
    clip_value: cut every entry to between minus this and this, after `clip_norm` if both are given; the reported norm
        is that before clipping.
    norm_type: 1, 2, 3, ... or `math.inf`.
    nonfinite: "raise" stops at a gradient that is not finite and names the parameter, "skip" goes on with the state as
        it was, "ignore" does not look. A step is never half applied. With a loss scale an overflow is skipped all the
        same, and "raise" stops when the scale can be lowered no further.
    ema: what the average of the weights keeps in each applied update, such as 0.999, or a function of the updates
        before; for a state made with `ema=True`.
    options: XLA options of this compile, beside the ones that `gpu.compiler_options` chooses for the platform.
    Raises: ValueError for a setting out of range.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; it counts micro-batches, so use 1 or more.")
    if accumulate == 1 and not reshard_after_backward:
        raise ValueError(
            "reshard_after_backward=False keeps weights from one micro-batch to the next, and accumulate is 1. Use "
            "SHARD_GRAD_OP, which keeps them from forward to backward, or more micro-batches."
        )
    if nonfinite not in ("raise", "skip", "ignore"):
        raise ValueError(f"nonfinite {nonfinite!r} is unknown. Use raise, skip or ignore.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; use a positive norm, or None not to clip.")
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value is {clip_value}; use a positive bound, or None not to clip.")
    if not norm_type >= 1:
        raise ValueError(f"norm_type is {norm_type}; use 1 or more, or math.inf.")
    if ema is not None and not callable(ema) and not 0 <= ema < 1:
        raise ValueError(f"ema is {ema}; it is what the average keeps, so use a number from 0 to below 1, as 0.999.")
    return TrainStep(
        loss,
        tx,
        plan,
        accumulate=accumulate,
        no_sync=no_sync,
        reshard_after_backward=reshard_after_backward,
        clip_norm=clip_norm,
        clip_value=clip_value,
        norm_type=norm_type,
        nonfinite=nonfinite,
        ema=ema,
        donate=donate,
        options={**compiler_options(plan.mesh.devices.flat[0]), **(options or {})},
    )


def eval_step(loss: Callable, plan: Plan) -> Callable:
    """Build `evaluate(params, batch, buffers={}) -> (sum, weight)` over the global batch, without gradients.

    `loss` as for `train_step`; a Flax module is in `eval()` mode, and what it writes to its buffers is dropped.
    """
    axes, everywhere = plan.placement.data_axes, PartitionSpec()
    door = plan.door.evaluating()

    def local(params, batch, buffers):
        entered = enter_params(plan, params, None, None, Regime())
        rows, key = jax.tree.leaves(batch)[0].shape[0], jax.random.key(0)
        with randomness.examples(key, jax.lax.axis_index(axes) * rows, rows):
            term = loss_terms(loss, plan, door, entered, buffers, batch, own_key(key, axes))[0]["loss"]
        return collectives.total(term.sum, axes), collectives.total(term.weight, axes)

    sharded = jax.shard_map(
        local,
        mesh=plan.mesh,
        axis_names={REPLICA, SHARD},
        in_specs=(plan.map(lambda leaf: leaf.rest_spec), PartitionSpec(axes), everywhere),
        out_specs=(everywhere, everywhere),
    )
    options = compiler_options(plan.mesh.devices.flat[0])
    placed = (plan.rest_shardings, plan.batch_sharding, plan.sharding(everywhere))
    compiled = jax.jit(sharded, in_shardings=placed, compiler_options=options or None)
    return lambda params, batch, buffers=None: compiled(params, batch, {} if buffers is None else buffers)


def _gathered_for_window(params, plan: Plan):
    """Whole parameters, and a plan of the same gradients that finds them whole."""
    flat, tree = jax.tree.flatten(plan.layouts)
    whole = [offload.to_device(w) for w in tree.flatten_up_to(params)]
    units: dict[str, list[int]] = {}
    for i, leaf in enumerate(flat):
        units.setdefault(leaf.unit, []).append(i)
    for members in units.values():
        for i, w in zip(members, collectives.gather_for_window(*zip(*((whole[i], flat[i]) for i in members)))):
            whole[i] = w
    kept = [replace(i, placement=replace(i.placement, whole_at_rest=True, reshard_after_forward=False)) for i in flat]
    return jax.tree.unflatten(tree, whole), replace(plan, layouts=jax.tree.unflatten(tree, kept))


def _finish(grad: Array, leaf: ParamLayout, options: UnitOptions | None) -> Array:
    """What a unit's own options do to a finished gradient: its divide factor, then its hook."""
    if options is None:
        return grad
    if options.gradient_divide_factor is not None:
        grad = grad * (leaf.placement.shards * leaf.placement.replicas / options.gradient_divide_factor)
    if options.gradient_hook is None:
        return grad
    hook = partial(options.gradient_hook, leaf.path)
    new = hook(grad) if leaf.layers is None else jax.vmap(hook)(grad)
    if (new.shape, new.dtype) != (grad.shape, grad.dtype):
        raise ValueError(
            f"the gradient hook of {leaf.path} took {grad.dtype}{list(grad.shape)} and gave "
            f"{new.dtype}{list(new.shape)}. Give back the shape and dtype that it takes."
        )
    return _without_padding(new, leaf)


def _without_padding(shard: Array, leaf: ParamLayout) -> Array:
    """This device's piece with zeros where the parameter has padding."""
    if leaf.dim is None or leaf.padded == leaf.shape[leaf.dim]:
        return shard
    size = shard.shape[leaf.stacked_dim]
    first = jax.lax.axis_index(leaf.placement.shard_axes) * size
    row = first + jax.lax.broadcasted_iota(jnp.int32, shard.shape, leaf.stacked_dim)
    return jnp.where(row < leaf.shape[leaf.dim], shard, 0)


def _after(held, batch):
    """The batch, once what is held has been computed. See Note [One micro-batch after the other]."""
    return jax.lax.optimization_barrier((batch, held))[0]


def _at(tree, i: int):
    return jax.tree.map(lambda a: a[i], tree)
