"""What a run carries from step to step, and the checks before a step may take it.

Owns how a state is made and viewed. What a step does with it is in `step.py`, how it is kept on disk in
`checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from jfsdp import ema as averages
from jfsdp import offload
from jfsdp.layout import Plan
from jfsdp.optim import Optimizer
from jfsdp.precision import LossScale, ScaleState
from jfsdp.wrap import take


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "skipped", "params", "opt_state", "key", "buffers", "scale", "ema"),
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
    buffers: Any
    """What the model keeps beside its parameters (batch statistics, counters, random streams), the same on every
    device; `{}` when there is nothing."""
    scale: ScaleState | None
    """The loss scale; None where nothing is computed or reduced in float16."""
    ema: Any
    """The average of the trained parameters, float32, placed as they are; None without one. See `ema.py`."""
    plan: Plan

    @classmethod
    def create(
        cls,
        params,
        tx: optax.GradientTransformation,
        plan: Plan | None = None,
        *,
        seed: int = 0,
        buffers: Any = None,
        loss_scale: LossScale | None = None,
        ema: bool = False,
    ) -> TrainState:
        """A state at step 0 from a module that `fully_shard` was called on, or from stored parameters and their plan
        (`plan.place` or `plan.create` make them). It takes the arrays: a module is no use afterwards, see `module`.

        The optimizer's state is created sharded, for the trained parameters alone.

        buffers: a pytree of arrays that the model reads and may write; None for what the plan knows of.
        loss_scale: None is `LossScale()` where a parameter is computed or reduced in float16, else no scale.
        ema: keep an average of the weights, which starts as the weights and moves as `train_step(ema=...)` says.
        Raises: ValueError when a parameter is not placed as the plan says, two leaves share a buffer, or a trained
            parameter is stored in float16.
        """
        if plan is None:
            params, taken, plan = take(params)
            buffers = taken if buffers is None else buffers
        _check_placed(params, plan)
        everywhere, rule = plan.sharding(PartitionSpec()), _loss_scale(plan, loss_scale)
        step, skipped, key, scale = jax.jit(
            lambda: (jnp.int32(0), jnp.int32(0), jax.random.key(seed), rule and ScaleState.start(rule)),
            out_shardings=everywhere,
        )()
        buffers = plan.door.initial_buffers() if buffers is None else buffers
        buffers = jax.tree.map(lambda b: jax.device_put(jnp.copy(b), everywhere), buffers)
        average = averages.start(params, plan) if ema else None
        state = cls(step, skipped, params, Optimizer(tx, plan).init(params), key, buffers, scale, average, plan)
        check_separate_buffers(state)
        return state

    @classmethod
    def abstract(
        cls,
        tx: optax.GradientTransformation,
        plan: Plan,
        *,
        buffers: Any = None,
        loss_scale: LossScale | None = None,
        ema: bool = False,
    ) -> TrainState:
        """The shapes and shardings of a state, nothing allocated: for compiling a step that is not run."""

        def struct(shape, dtype, sharding):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        everywhere, rule = plan.sharding(PartitionSpec()), _loss_scale(plan, loss_scale)
        params = plan.map(lambda leaf: struct(leaf.rest_shape, leaf.dtype, plan.rest_sharding(leaf)))
        scalar = struct((), jnp.int32, everywhere)
        key = struct((), jax.eval_shape(lambda: jax.random.key(0)).dtype, everywhere)
        buffers = plan.door.buffer_shapes() if buffers is None else buffers
        buffers = jax.tree.map(lambda b: struct(b.shape, b.dtype, everywhere), buffers)
        scale = rule and jax.tree.map(
            lambda a: struct(a.shape, a.dtype, everywhere), jax.eval_shape(partial(ScaleState.start, rule))
        )
        average = averages.abstract(plan) if ema else None
        return cls(scalar, scalar, params, Optimizer(tx, plan).abstract_state(), key, buffers, scale, average, plan)

    def logical_params(self):
        """The parameters in their logical shapes, sharded."""
        return self.plan.unpad(offload.fetched(self.params))

    def averaged_params(self):
        """The average of the weights, stored as parameters are: for `eval_step`, an export, or
        `replace(state, params=...)`. Frozen parameters are the state's own, so it is valid until the state is donated.

        Raises: ValueError when the state keeps no average.
        """
        if self.ema is None:
            raise ValueError("the state keeps no average of its weights. Use TrainState.create(..., ema=True).")
        return averages.averaged(self.ema, self.params, self.plan)

    def module(self, *, averaged: bool = False):
        """A callable view of the current parameters, or of their average, for use outside the step; valid until the
        state is donated."""
        params = self.averaged_params() if averaged else self.params
        return self.plan.door.outside(self.plan.unpad(offload.fetched(params)), self.buffers)


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


def _loss_scale(plan: Plan, asked: LossScale | None) -> LossScale | None:
    """The rule of the loss scale: what was asked for, or the default where float16 needs one."""
    if stored := [leaf.path for leaf in plan.leaves if leaf.trainable and leaf.dtype == jnp.float16]:
        raise ValueError(
            f"{stored[0]} is trained and stored in float16, where updates and unscaled gradients vanish. Store it in "
            "float32 and compute in float16 with MixedPrecision(param_dtype='fp16')."
        )
    is_half = any(jnp.float16 in (leaf.param_dtype, leaf.reduce_dtype) for leaf in plan.leaves)
    return LossScale() if asked is None and is_half else asked


def _check_placed(params, plan: Plan) -> None:
    for leaf, w in zip(plan.leaves, jax.tree.leaves(params), strict=True):
        wanted = plan.rest_sharding(leaf)
        if tuple(w.shape) != leaf.rest_shape or not w.sharding.is_equivalent_to(wanted, w.ndim):
            raise ValueError(
                f"{leaf.path}: got {tuple(w.shape)} placed as {w.sharding}, "
                f"the plan stores {leaf.rest_shape} as {leaf.rest_spec}. "
                "Place parameters with plan.place(params), or create them with plan.create(init)."
            )
