"""A training run on paper: the model, mesh, batch and options that the planner works on.

Owns what `jfsdp plan` is asked and how it becomes the objects of the library: a `Plan` made of shapes alone, the
layers' footprint, and, for the compiler, the step that `train.py` would run. Nothing here allocates or computes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh
from tyro.conf import DisallowNone, arg

from jfsdp.families import Model, find_model
from jfsdp.layout import Plan
from jfsdp.lora import add_lora, parse_lora
from jfsdp.mesh import REPLICA, SHARD, parse_mesh
from jfsdp.offload import POLICIES, OffloadPolicy
from jfsdp.optim import label_params
from jfsdp.planning.footprint import Layers, batch_shapes, trace
from jfsdp.planning.hardware import Cluster
from jfsdp.precision import MixedPrecision, parse_dtype
from jfsdp.schedule import Schedule
from jfsdp.state import TrainState
from jfsdp.step import TrainStep, train_step
from jfsdp.wrap import plan_module

OPTIMIZERS = {
    "adamw": lambda mask: optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, mask=mask),
    "lion": lambda mask: optax.lion(1e-4, weight_decay=0.1, mask=mask),
    "momentum": lambda mask: optax.sgd(1e-2, momentum=0.9),
    "sgd": lambda mask: optax.sgd(1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, on what, how."""

    model: Annotated[str, arg(metavar="NAME")] = "llama3-8b"
    """A preset such as llama3-8b, a family, the path of a Hugging Face config.json, or package.module:preset."""
    gpu: Annotated[str, arg(metavar="NAME")] = "h100"
    """a100-40, a100, h100, h100-500w, h100-pcie, h200, b200, l40s, rtx4090 or rtx3090."""
    mesh: Annotated[str, arg(metavar="RxS")] = "1x8"
    """4x8 is 4 replicas (copies of the model) of 8 shards (pieces of a copy); 8 is 1x8."""
    strategy: Annotated[DisallowNone[str | None], arg(metavar="NAME", help_behavior_hint="(default: by the mesh)")] = (
        None
    )
    """FULL_SHARD, SHARD_GRAD_OP, SHARD_OPT, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2, as in PyTorch."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of gathers and matmuls; stored weights and the optimizer stay fp32. fp16 takes what bf16 takes."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients travel and are summed."""
    optimizer: Literal["adamw", "lion", "momentum", "sgd"] = "adamw"
    """Two moments, one, one, and none."""
    lora: Annotated[
        DisallowNone[str | None], arg(metavar="RANK,ALPHA,TARGETS", help_behavior_hint="(default: none)")
    ] = None
    """Train adapters beside frozen weights stored in --precision, such as 8,16,q+v."""
    remat: Literal["none", "full", "dots"] = "full"
    """Activations computed again in the backward pass: none; full, all but a layer's input; dots, all but that and
    what matmuls with weights give."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Keep the optimizer's state, or parameters and gradients too, in the host's memory; all also updates there."""
    seq_len: int = 4096
    """Tokens in a sequence."""
    batch: int = 1
    """Sequences per GPU and micro-batch."""
    accumulate: int = 1
    """Micro-batches in an optimizer step."""
    sync: bool = True
    """Reduce the gradients of every micro-batch; --no-sync reduces once, and keeps them whole until then."""
    prefetch: Literal[0, 1, 2] = 1
    """Layers gathered ahead of the one that computes."""
    late_reduce: bool = True
    """Reduce a layer's gradient beside the next layer; --no-late-reduce saves its memory and hides nothing."""
    attention: Annotated[DisallowNone[str | None], arg(metavar="KIND", help_behavior_hint="(default: cudnn)")] = None
    """cudnn (no scores in memory), chunked or xla. The compiler ahead of time has no cuDNN, so it takes chunked."""
    per_host: int = 8
    """GPUs in a host."""
    network_gbps: Annotated[DisallowNone[float | None], arg(help_behavior_hint="(default: by the GPU)")] = None
    """Network between hosts per GPU, one way, in gigabits per second."""

    def __post_init__(self):
        for name in ("seq_len", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a count, so use 1 or more.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is unknown. Use one of {', '.join(OPTIMIZERS)}.")
        if self.offload not in POLICIES:
            raise ValueError(f"offload {self.offload!r} is unknown. Use one of {', '.join(POLICIES)}.")
        if self.mesh == "auto":
            raise ValueError("mesh is 'auto', but there are no devices to count. Write REPLICASxSHARDS, such as 4x8.")
        if self.lora is not None:
            parse_lora(self.lora)
        self.cluster  # noqa: B018 - refuses an unknown GPU
        if self.devices > self.per_host and self.devices % self.per_host:
            raise ValueError(
                f"mesh {self.mesh} has {self.devices} GPUs, which do not fill hosts of {self.per_host}. "
                f"Use a multiple of {self.per_host}, or say --per-host."
            )
        shards = self.shape[1]
        if self.devices > self.per_host and self.per_host % shards and shards % self.per_host:
            raise ValueError(
                f"mesh {self.mesh} cuts groups of {shards} shards from hosts of {self.per_host} GPUs, so some would "
                f"straddle two. Use a number of shards that divides {self.per_host} or is a multiple of it."
            )
        for count, most, words in (
            (self.devices, 2**20, "GPUs"),
            (self.tokens, 2**31, "tokens on one GPU in a micro-batch"),
            (self.accumulate, 2**16, "micro-batches"),
        ):
            if count > most:
                raise ValueError(
                    f"{count:,} {words} are not planned, {most:,} at most. Use fewer; --batch, --seq-len and "
                    "--accumulate count what one GPU does."
                )

    @property
    def shape(self) -> tuple[int, int]:
        """Replicas and shards."""
        return parse_mesh(self.mesh, 8)

    @property
    def devices(self) -> int:
        replicas, shards = self.shape
        return replicas * shards

    @property
    def tokens(self) -> int:
        """Of one GPU and micro-batch."""
        return self.batch * self.seq_len

    @property
    def cluster(self) -> Cluster:
        return Cluster(gpu=self.gpu, per_host=self.per_host, network_gbps=self.network_gbps)

    @property
    def schedule(self) -> Schedule:
        return Schedule(prefetch=self.prefetch, late_reduce=self.late_reduce)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return parse_dtype(self.precision, "precision")

    @cached_property
    def found(self) -> Model:
        """The model, its attention as planned where the family lets one choose."""
        model = find_model(self.model)
        if not hasattr(model.config, "attention"):
            return model
        return model._replace(config=dataclasses.replace(model.config, attention=self.attention or "cudnn"))

    def make_model(self) -> nnx.Module:
        return _build(self.found, self.lora, self.compute_dtype, remat=self.remat, schedule=self.schedule)

    @property
    def plan(self) -> Plan:
        """From shapes alone, on a mesh of no devices."""
        return _plan(self.found, self.lora, self.shape, self.strategy, self._precision, POLICIES[self.offload])

    def plan_on(self, mesh: Any) -> Plan:
        """The plan on real or described devices, for a step that is compiled."""
        return plan_module(
            self.make_model,
            mesh=mesh,
            strategy=self.strategy,
            mp_policy=self._precision,
            offload_policy=POLICIES[self.offload],
            trainable=_trainable(self.lora),
        )

    @property
    def _precision(self) -> MixedPrecision:
        return MixedPrecision(param_dtype=self.precision, reduce_dtype=self.reduce_dtype)

    def transformation(self, plan: Plan) -> optax.GradientTransformation:
        return OPTIMIZERS[self.optimizer](label_params(lambda path, shape: len(shape) >= 2, plan))

    @cached_property
    def state(self) -> TrainState:
        return TrainState.abstract(self.transformation(self.plan), self.plan)

    @cached_property
    def layers(self) -> list[Layers]:
        """What each stack of layers saves and works with."""
        model, is_fused = self.found, getattr(self.found.config, "attention", None) == "cudnn"
        if is_fused:  # traced without cuDNN: as a loop over queries that keeps no scores
            model = model._replace(config=dataclasses.replace(model.config, attention="chunked"))
        return _layers(model, self.lora, self.remat, self.batch, self.seq_len, self.compute_dtype, is_fused)


def _build(model: Model, lora: str | None, dtype: jnp.dtype, **options: Any) -> nnx.Module:
    """As `train.py` builds it: with adapters, the weights beside them stored in the dtype that they compute in."""
    rngs = nnx.Rngs(0)
    built = model.family.build(model.config, rngs=rngs, **options)
    return built if lora is None else add_lora(built, parse_lora(lora), rngs=rngs, base_dtype=dtype)


def _trainable(lora: str | None) -> type[nnx.Param]:
    return nnx.Param if lora is None else nnx.LoRAParam


@cache
def _plan(
    model: Model,
    lora: str | None,
    shape: tuple[int, int],
    strategy: str | None,
    precision: MixedPrecision,
    offload: OffloadPolicy,
) -> Plan:
    """Shapes do not depend on batch, checkpointing or schedule, so workloads that differ in these share a plan."""
    return plan_module(
        lambda: _build(model, lora, precision.param_dtype),
        mesh=AbstractMesh(shape, (REPLICA, SHARD)),
        strategy=strategy,
        mp_policy=precision,
        offload_policy=offload,
        trainable=_trainable(lora),
    )


@cache
def _layers(
    model: Model,
    lora: str | None,
    remat: str,
    sequences: int,
    tokens: int,
    dtype: jnp.dtype,
    loops_are_kernels: bool,
) -> list[Layers]:
    return trace(
        lambda: _build(model, lora, dtype, remat=remat),
        sequences=sequences,
        tokens=tokens,
        dtype=dtype,
        trainable=_trainable(lora),
        loops_are_kernels=loops_are_kernels,
    )


def ahead(on: Any, /, **fields: Any) -> tuple[TrainStep, tuple[TrainState, dict[str, Any]]]:
    """The step of a workload and its abstract arguments, for `gpu.compile_ahead`."""
    work = Workload(**{"attention": "chunked", **fields})
    plan = work.plan_on(on)
    tx = work.transformation(plan)
    step = train_step(_loss, tx, plan, accumulate=work.accumulate, no_sync=not work.sync, clip_norm=1.0)
    rows = (work.batch * work.devices * work.accumulate, work.seq_len)
    batch = batch_shapes(nnx.eval_shape(work.make_model), rows, plan.batch_sharding)
    return step, (TrainState.abstract(tx, plan), batch)


def _loss(model: nnx.Module, batch: dict[str, Any], key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a language model is trained on, as in `train.py`."""
    return model.loss(**batch)
