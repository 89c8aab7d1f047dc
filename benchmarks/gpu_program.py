"""The GPU program of our own step beside the annotation-only rival, compiled ahead of time for GPUs that are not there.

    python benchmarks/gpu_program.py                  # the rows of the table in the README
    python benchmarks/gpu_program.py --rows 8b-1x8    # rows whose name contains this
    python benchmarks/gpu_program.py --json rows.json

Memory, collectives and their order are what GPUs would get. Microseconds are XLA's cost model: nothing runs.
Needs the extra `jfsdp[aot]`; each row compiles in a process of its own, in 10 to 60 seconds.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.step import TrainState, train_step
from jfsdp.wrap import plan_module
from models import llama

SIZES = {"8b": "llama3-8b", "1b": "llama3-1b"}


def ahead(mesh, size: str, batch: int = 1, seq_len: int = 4096, clip_norm=None, attention="chunked", strategy=None, accumulate=1, remat="full", **schedule):
    """The jitted step and its abstract arguments, for `jfsdp.gpu.compile_ahead`. `batch`: sequences per GPU and micro-batch."""
    config = dataclasses.replace(llama.presets[SIZES[size]], attention=attention, tied=False)
    make = lambda: llama.build(config, rngs=nnx.Rngs(0), schedule=Schedule(**schedule), remat=remat)  # noqa: E731
    precision = MixedPrecision(param_dtype=jnp.bfloat16)
    plan = plan_module(make, mesh=mesh, strategy=strategy, mp_policy=precision)
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    step = train_step(loss, tx, plan, clip_norm=clip_norm, nonfinite="ignore", accumulate=accumulate)
    rows = batch * mesh.size * accumulate
    ids = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32, sharding=plan.batch_sharding)
    weights = jax.ShapeDtypeStruct((rows, seq_len), jnp.float32, sharding=plan.batch_sharding)
    return step, (TrainState.abstract(tx, plan), {"tokens": ids, "targets": ids, "weights": weights})


def loss(model, batch, key):
    return model.loss(batch["tokens"], batch["targets"], batch["weights"])
