"""PyTorch FSDP's semantics for JAX and Flax: sharded training with every collective written down."""

from jfsdp.audit.live import Live, live_bytes
from jfsdp.layout import ParamLayout, Plan, UnitOptions, make_plan
from jfsdp.loss import Auxiliary
from jfsdp.mesh import make_mesh, simulate_devices
from jfsdp.offload import CPUOffloadPolicy, OffloadActivations, OffloadPolicy
from jfsdp.optim import label_params
from jfsdp.order import Prefetch
from jfsdp.policy import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from jfsdp.precision import LossScale, MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.stack import Stack, run_stack
from jfsdp.state import TrainState
from jfsdp.step import TrainStep, eval_step, train_step
from jfsdp.strategy import ShardingStrategy
from jfsdp.summon import summon_full_gradients, summon_full_params, write_full_params
from jfsdp.unit import call, unshard
from jfsdp.vocab import Embed, Head
from jfsdp.wrap import fully_shard, init_sharded, plan_module, plan_of, register_fsdp_forward_method

__all__ = [
    "Auxiliary",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "Embed",
    "Head",
    "Live",
    "LossScale",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OffloadActivations",
    "OffloadPolicy",
    "ParamLayout",
    "Plan",
    "Prefetch",
    "Schedule",
    "ShardingStrategy",
    "Stack",
    "TrainState",
    "TrainStep",
    "UnitOptions",
    "call",
    "eval_step",
    "fully_shard",
    "init_sharded",
    "label_params",
    "live_bytes",
    "make_mesh",
    "make_plan",
    "plan_module",
    "plan_of",
    "register_fsdp_forward_method",
    "run_stack",
    "simulate_devices",
    "size_based_auto_wrap_policy",
    "summon_full_gradients",
    "summon_full_params",
    "train_step",
    "unshard",
    "write_full_params",
]
