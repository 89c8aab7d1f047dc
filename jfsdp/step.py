"""The train step: micro-batches, gradients, clipping, the optimizer, and the state that it carries.

Owns the story of one optimizer step and nothing of how a unit moves. A step is one compiled program:

    total weight of the window -> micro-batches (a scan, the last one peeled) -> finished gradient shards
    -> norm -> clip -> optimizer on shards -> new state, or the old one when a gradient is not finite

Note [Sum and weight]
A loss is a sum and a weight. The weight depends on the batch only, so its total over devices and micro-batches is
known before the first backward pass, and each local sum is divided by it there: what travels is a part of the mean,
whatever the mesh, and no loss or gradient needs rescaling afterwards.

Note [The last micro-batch]
It is taken out of the scan, because its backward pass also adds what the others accumulated, layer by layer, and
runs the all-reduce over replicas. The program holds two backward loops, however many micro-batches there are.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.interpreters import partial_eval as pe
from jax.sharding import PartitionSpec

from jfsdp import collectives
from jfsdp.gpu import compiler_options
from jfsdp.layout import Plan
from jfsdp.optim import Optimizer, global_norm, gradient_sums
from jfsdp.precision import wide
from jfsdp.unit import Regime, empty_slot, enter, track


class Auxiliary(NamedTuple):
    """A loss beside the main one, averaged on its own and logged under its own name."""

    sum: Array
    weight: Array
    coefficient: float = 1.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "skipped", "params", "opt_state", "key"),
    meta_fields=("plan",),
)
@dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step, sharded as the plan says. Donated to every step."""

    step: Array
    """Batches consumed, skipped ones included; int32."""
    skipped: Array
    """Steps whose gradients were not finite; int32. `step - skipped` updates were applied."""
    params: Any
    opt_state: Any
    key: Array
    """Typed random key; step k uses `fold_in(key, k)`."""
    plan: Plan

    @classmethod
    def create(cls, params, tx: optax.GradientTransformation, plan: Plan, *, seed: int = 0) -> TrainState:
        """A state at step 0 from stored parameters (`plan.place` or `plan.create` make them).

        The optimizer's state is created sharded.

        Raises: ValueError when a parameter is not placed as the plan says, or two leaves share a buffer.
        """
        _check_placed(params, plan)
        everywhere = plan.sharding(PartitionSpec())
        scalars = jax.jit(lambda: (jnp.int32(0), jnp.int32(0), jax.random.key(seed)), out_shardings=everywhere)()
        state = cls(scalars[0], scalars[1], params, Optimizer(tx, plan).init(params), scalars[2], plan)
        check_separate_buffers(state)
        return state

    @classmethod
    def abstract(cls, tx: optax.GradientTransformation, plan: Plan) -> TrainState:
        """The shapes and shardings of a state, nothing allocated: for compiling a step that is not run."""

        def struct(shape, dtype, sharding):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        everywhere = plan.sharding(PartitionSpec())
        params = plan.map(lambda leaf: struct(leaf.rest_shape, leaf.dtype, plan.sharding(leaf.rest_spec)))
        scalar = struct((), jnp.int32, everywhere)
        key = struct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, everywhere)
        return cls(scalar, scalar, params, Optimizer(tx, plan).abstract_state(), key, plan)

    def logical_params(self):
        """The parameters in their logical shapes, sharded."""
        return self.plan.unpad(self.params)

    def model(self):
        """A callable view of the current parameters, for use outside the step; valid until the state is donated."""
        return self.plan.view(self.logical_params())


class TrainStep:
    """A compiled train step; make it with `train_step`."""

    def __init__(self, loss, tx, plan: Plan, *, accumulate, no_sync, clip_norm, norm_type, nonfinite, donate, options):
        self.loss, self.plan, self.optimizer = loss, plan, Optimizer(tx, plan)
        self.accumulate, self.no_sync = accumulate, no_sync
        self.clip_norm, self.norm_type, self.nonfinite = clip_norm, norm_type, nonfinite
        self._donate, self._options = donate, options
        self._made = lambda: None  # weak reference to the last state that this step returned

    def __call__(self, state: TrainState, batch) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step on a global batch (arrays with equal leading size, a multiple of devices x accumulate).

        Gives the new state and metrics: `loss`, `weight` (tokens counted), `grad_norm`, `skipped`, and the auxiliary
        losses.
        Raises: ValueError for a batch that does not divide, and for a state of another plan or in which two leaves
            share a buffer; FloatingPointError under nonfinite="raise", whose `state` is the state before the step.
        """
        self.check_batch(batch)
        self._check_plan(state)
        if self._donate and self._made() is not state:
            check_separate_buffers(state)
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
        return jax.jit(
            self._step,
            donate_argnums=(0,) if self._donate else (),
            in_shardings=(None, self.plan.batch_sharding),
            out_shardings=(self._state_shardings(), None),
            compiler_options=self._options or None,
        )

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
        if state.plan is not self.plan:
            raise ValueError(
                "the state was made with another plan than the step, even if both say the same. "
                "Make one plan and pass it to TrainState.create and to train_step."
            )

    # ---------------------------------------------------------------- one step

    def _step(self, state: TrainState, batch):
        plan = self.plan
        grads, metrics, sums = self._gradients(state, batch)
        finite = jnp.all(jnp.isfinite(sums))
        if self.clip_norm is not None:
            # Divide by the larger of the two: exact where nothing is clipped, and no 0/0.
            scale = self.clip_norm / jnp.maximum(metrics["grad_norm"], self.clip_norm)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        old = self.optimizer.stored_shards(state.params)
        params, opt_state = self.optimizer.update(grads, state.opt_state, old)
        if self.nonfinite != "ignore":
            params, opt_state = jax.tree.map(partial(jnp.where, finite), (params, opt_state), (old, state.opt_state))
            metrics["bad"] = ~jnp.isfinite(sums)
        if plan.placement.whole_at_rest:
            params = self._gather_whole(params)
        skipped = state.skipped + (0 if self.nonfinite == "ignore" else 1 - finite.astype(jnp.int32))
        metrics["skipped"] = skipped
        return replace(state, step=state.step + 1, skipped=skipped, params=params, opt_state=opt_state), metrics

    def _gradients(self, state: TrainState, batch):
        """Finished gradient shards (global arrays), metrics, and what each parameter adds to the norm `[leaves]`."""
        plan, axes = self.plan, self.plan.placement.data_axes
        everywhere = PartitionSpec()
        local = jax.shard_map(
            self._local_gradients,
            mesh=plan.mesh,
            axis_names=set(plan.mesh.axis_names),
            in_specs=(plan.map(lambda leaf: leaf.rest_spec), PartitionSpec(axes), everywhere),
            out_specs=(plan.map(lambda leaf: leaf.shard_spec), everywhere, everywhere),
        )
        return local(state.params, batch, jax.random.fold_in(state.key, state.step))

    def _local_gradients(self, params, batch, key):
        plan, axes, n = self.plan, self.plan.placement.data_axes, self.accumulate
        micro = jax.tree.map(lambda a: a.reshape(n, a.shape[0] // n, *a.shape[1:]), batch)
        keys = jax.random.split(_own_key(key, axes), n)
        terms = partial(loss_terms, self.loss, plan.view)
        totals = total_weights(terms, plan, params, micro, keys, axes)
        weights = {
            name: jnp.where(w == 0, 1, w) for name, w in totals.items()
        }  # nothing counted: the loss is 0, not NaN

        def backward(held, batch, key, regime: Regime):
            def objective(slots):
                entered = _enter(plan, params, slots, held, regime)
                parts = terms(entered, batch, key)
                return sum(t.coefficient * t.sum / weights[name] for name, t in parts.items()), {
                    name: t.sum for name, t in parts.items()
                }

            slots = plan.map(lambda leaf: empty_slot(leaf, regime))
            (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(slots)
            return {name: collectives.vary(s, axes) for name, s in sums.items()}, grads

        if n == 1:
            sums, grads = backward(None, _at(micro, 0), keys[0], Regime())
        else:
            early, last = Regime(last=False, no_sync=self.no_sync), Regime(last=True, no_sync=self.no_sync)

            def accumulate(held, one):
                sums, held = backward(held, *one, early)
                return held, sums

            first = jax.tree.map(lambda a: a[: n - 1], (micro, keys))
            held, sums = jax.lax.scan(accumulate, plan.map(lambda leaf: empty_slot(leaf, early)), first)
            last_sums, grads = backward(held, _at(micro, n - 1), keys[n - 1], last)  # See Note [The last micro-batch]
            sums = {name: last_sums[name] + s.sum() for name, s in sums.items()}
        norm_sums = self._norm_sums(grads)
        metrics = {name: collectives.total(s, axes) / weights[name] for name, s in sums.items()}
        metrics |= {"weight": totals["loss"], "grad_norm": global_norm(norm_sums, self.norm_type)}
        return grads, metrics, norm_sums

    def _norm_sums(self, grads) -> Array:
        """Per parameter, its part of the norm, each parameter counted once: `[leaves]`, the same on every device."""
        leaves = self.plan.leaves
        local = [gradient_sums(g, self.norm_type) for g in jax.tree.leaves(grads)]
        combine = collectives.largest if math.isinf(self.norm_type) else collectives.total
        cut = [i for i, leaf in enumerate(leaves) if leaf.dim is not None]
        out = list(local)
        if cut:
            # One small all-reduce over the shard axes: a number per parameter.
            summed = combine(jnp.stack([local[i] for i in cut]), self.plan.placement.shard_axes)
            for at, i in enumerate(cut):
                out[i] = summed[at]
        return jnp.stack([a.astype(jnp.result_type(*out)) for a in out])

    def _gather_whole(self, shards):
        """SHARD_OPT: new parameter shards to whole parameters, unit by unit, in the stored dtype."""
        plan = self.plan
        flat, tree = jax.tree.flatten(shards)
        units: dict[str, list[int]] = {}
        for i, leaf in enumerate(plan.leaves):
            units.setdefault(leaf.unit, []).append(i)

        def local(*flat):
            out = list(flat)
            for members in units.values():
                whole = collectives.gather_updated([flat[i] for i in members], [plan.leaves[i] for i in members])
                for i, w in zip(members, whole):
                    out[i] = w
            return tuple(out)

        specs = tuple(leaf.shard_spec for leaf in plan.leaves)
        whole = jax.shard_map(local, mesh=plan.mesh, in_specs=specs, out_specs=tuple(PartitionSpec() for _ in flat))(
            *flat
        )
        return jax.tree.unflatten(tree, whole)

    def _state_shardings(self):
        everywhere = self.plan.sharding(PartitionSpec())
        return TrainState(
            everywhere, everywhere, self.plan.rest_shardings, self.optimizer.state_shardings, everywhere, self.plan
        )

    def _explain(self, state: TrainState, metrics) -> str:
        bad = [leaf.path for leaf, is_bad in zip(self.plan.leaves, metrics["bad"]) if is_bad]
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
    clip_norm: float | None = None,
    norm_type: float = 2.0,
    nonfinite: str = "raise",
    donate: bool = True,
    options: dict | None = None,
) -> TrainStep:
    """Build `step(state, batch) -> (state, metrics)` for `loss(params, batch, key)`.

    loss: sees one device's rows of one micro-batch and gives `(sum, weight)`, or `(sum, weight, {name: Auxiliary})`,
        or a scalar, which is the mean over its rows. The weight may depend on the batch only: Note [Sum and weight].
    accumulate: micro-batches per step.
    no_sync: keep whole unreduced gradients until the last micro-batch (one reduction per step, all of the gradient's
        bytes); False reduce-scatters each micro-batch into shards. Same result.
    clip_norm: clip to this norm over all parameters; None does not clip.
    norm_type: 1, 2, 3, ... or `math.inf`.
    nonfinite: "raise" stops at a gradient that is not finite and names the parameter, "skip" goes on with the state as
        it was, "ignore" does not look. A step is never half applied.
    options: XLA options of this compile, beside the ones that `gpu.compiler_options` chooses for the platform.
    Raises: ValueError for a setting out of range.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; it counts micro-batches, so use 1 or more.")
    if nonfinite not in ("raise", "skip", "ignore"):
        raise ValueError(f"nonfinite {nonfinite!r} is unknown. Use raise, skip or ignore.")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; use a positive norm, or None not to clip.")
    if not norm_type >= 1:
        raise ValueError(f"norm_type is {norm_type}; use 1 or more, or math.inf.")
    platform = plan.mesh.devices.flat[0].platform
    return TrainStep(
        loss,
        tx,
        plan,
        accumulate=accumulate,
        no_sync=no_sync,
        clip_norm=clip_norm,
        norm_type=norm_type,
        nonfinite=nonfinite,
        donate=donate,
        options={**compiler_options(platform), **(options or {})},
    )


def eval_step(loss: Callable, plan: Plan) -> Callable:
    """Build `evaluate(params, batch) -> (sum, weight)` over the global batch, without gradients.

    `loss` as for `train_step`.
    """
    axes, everywhere = plan.placement.data_axes, PartitionSpec()

    def local(params, batch):
        entered = _enter(plan, params, None, None, Regime())
        term = loss_terms(loss, plan.view, entered, batch, _own_key(jax.random.key(0), axes))["loss"]
        return collectives.total(term.sum, axes), collectives.total(term.weight, axes)

    sharded = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(plan.map(lambda leaf: leaf.rest_spec), PartitionSpec(axes)),
        out_specs=(everywhere, everywhere),
    )
    options = compiler_options(plan.mesh.devices.flat[0].platform)
    return jax.jit(sharded, in_shardings=(plan.rest_shardings, plan.batch_sharding), compiler_options=options or None)


def loss_terms(loss: Callable, view: Callable, params, batch, key) -> dict[str, Auxiliary]:
    """Call a loss on tracked parameters; bring its result into one form, {"loss": ..., and auxiliary ones by name}."""
    params = track(params)
    out = loss(view(params), batch, key)
    if not isinstance(out, tuple):
        rows = jax.tree.leaves(batch)[0].shape[0]
        return {"loss": Auxiliary(out * rows, jnp.asarray(rows, out.dtype))}
    if len(out) not in (2, 3):
        raise TypeError(
            f"the loss returned {len(out)} values. Return a mean, (sum, weight), or (sum, weight, {{name: Auxiliary}})."
        )
    others = dict(out[2]) if len(out) == 3 else {}
    if clash := set(others) & {"loss", "weight", "grad_norm", "skipped", "bad"}:
        raise ValueError(
            f"an auxiliary loss is named {sorted(clash)}, which the step logs itself. Choose another name."
        )
    return {"loss": Auxiliary(out[0], out[1]), **others}


def total_weights(terms: Callable, plan: Plan, params, micro, keys, axes) -> dict[str, Array]:
    """Total weight of each loss over all devices and micro-batches, without running the model.

    Raises: ValueError when a weight depends on the parameters or on random numbers.
    """

    def only_weights(params, batch, key):
        return {name: jnp.asarray(t.weight, wide(t.sum.dtype)) for name, t in terms(params, batch, key).items()}

    entered = _enter(plan, params, None, None, Regime())
    example = _at(micro, 0)
    traced, shape = jax.make_jaxpr(only_weights, return_shape=True)(entered, example, keys[0])
    jaxpr, used = pe.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    n_params, n_batch = len(jax.tree.leaves(entered)), len(jax.tree.leaves(example))
    if any(used[:n_params]) or used[-1]:
        raise ValueError(
            "the weight of the loss depends on the parameters or on random numbers. It must follow from the batch "
            "alone "
            "(count its tokens or rows), because gradients are divided by its total before the backward pass."
        )
    reads = used[n_params : n_params + n_batch]

    def count(batch):
        leaves = [a for a, u in zip(jax.tree.leaves(batch), reads) if u]
        return [collectives.vary(w, axes) for w in jax.core.eval_jaxpr(jaxpr, traced.consts, *leaves)]

    sums = [w.sum() for w in jax.lax.map(count, micro)]
    return jax.tree.unflatten(jax.tree.structure(shape), [collectives.total(s, axes) for s in sums])


def check_separate_buffers(state) -> None:
    """Refuse a state in which two leaves share a device buffer: donating it would free the buffer twice.

    Raises: ValueError naming both leaves.
    """
    seen: dict[tuple, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for shard in data.addressable_shards:
            where = (shard.device.id, shard.data.unsafe_buffer_pointer())
            if shard.data.nbytes and seen.setdefault(where, name) != name:
                raise ValueError(
                    f"{seen[where]} and {name} share one buffer, and the step donates both. "
                    "Copy one of them (jnp.copy) first."
                )


def _enter(plan: Plan, params, slots, held, regime: Regime):
    none = plan.map(lambda leaf: None)
    flat = [
        jax.tree.leaves(t, is_leaf=lambda x: x is None)
        for t in (params, none if slots is None else slots, none if held is None else held)
    ]
    entered = [enter(w, slot, h, leaf, regime) for leaf, w, slot, h in zip(plan.leaves, *flat)]
    return jax.tree.unflatten(jax.tree.structure(plan.layouts), entered)


def _own_key(key: Array, axes: tuple[str, ...]) -> Array:
    """A key of this device's own, so that no two devices draw the same numbers."""
    return jax.random.fold_in(key, jax.lax.axis_index(axes))


def _at(tree, i: int):
    return jax.tree.map(lambda a: a[i], tree)


def _check_placed(params, plan: Plan) -> None:
    for leaf, w in zip(plan.leaves, jax.tree.leaves(params), strict=True):
        wanted = plan.sharding(leaf.rest_spec)
        if tuple(w.shape) != leaf.rest_shape or not w.sharding.is_equivalent_to(wanted, w.ndim):
            raise ValueError(
                f"{leaf.path}: got {tuple(w.shape)} placed as {w.sharding}, "
                f"the plan stores {leaf.rest_shape} as {leaf.rest_spec}. "
                "Place parameters with plan.place(params), or create them with plan.create(init)."
            )
