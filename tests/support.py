"""What several test files need: a small model as a pytree, its training on one device, comparison leaf by leaf."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.audit import program as audit
from jfsdp.layout import Plan, UnitOptions, make_plan
from jfsdp.mesh import make_mesh, parse_mesh
from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import TrainStep, train_step
from jfsdp.unit import call, unshard

UNITS = {"blocks": UnitOptions(stacked=True), "head": UnitOptions()}
PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class Setting:
    """A strategy, on the mesh that it is for, and a precision: what saving, going on and reading do not depend on."""

    strategy: str
    precision: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.precision}"

    @property
    def mesh(self) -> str:
        return {"FULL_SHARD": "1x8", "HYBRID_SHARD": "2x4"}[self.strategy]

    @property
    def policy(self) -> MixedPrecision:
        return MixedPrecision(param_dtype=self.precision)

    @property
    def rounding(self) -> float:
        """What a loss may differ by, of itself, where sums are added in another order: in bf16 a weight or a gradient
        may then be rounded otherwise."""
        return {"fp32": 1e-5, "bf16": 2**-8}[self.precision]

    @property
    def options(self) -> list[str]:
        """As words of `train.py`, which works out the strategy."""
        return ["--mesh", self.mesh, "--precision", self.precision]


SETTINGS = [Setting(s, p) for s, p in zip(["FULL_SHARD", "HYBRID_SHARD"] * 2, ["fp32", "bf16", "bf16", "fp32"])]


def settings(fast: int = 1) -> list:
    """All of them, to parametrise with; those after the first `fast` are slow."""
    return [pytest.param(s, id=str(s), marks=[pytest.mark.slow] * (i >= fast)) for i, s in enumerate(SETTINGS)]


def submesh(text: str):
    """The mesh `text` over the first devices."""
    replica, shard = parse_mesh(text, 8)
    return make_mesh(text, devices=jax.devices()[: replica * shard])


def toy_params(layers: int = 3, width: int = 16, inner: int = 24, out: int = 13, dtype=jnp.float64) -> dict:
    """Blocks with two matrices, a scale and a scalar; an uneven head; a root vector smaller than 8, and a scalar."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.3, dtype)  # noqa: E731
    return {
        "blocks": {
            "up": draw(layers, width, inner),
            "down": draw(layers, inner, width),
            "scale": 1 + draw(layers, width),
            "gate": 1 + draw(layers),
        },
        "head": {"kernel": draw(width, out), "bias": draw(out)},
        "shift": draw(5),
        "temperature": 1 + draw(),
    }


def toy_batch(rows: int = 16, width: int = 16, out: int = 13, dtype=np.float64) -> dict:
    """Inputs and targets with row weights 0, 1, 2, 0, 1, 2, ...: devices count very different numbers of rows."""
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(rows, width)).astype(dtype),
        "y": rng.normal(size=(rows, out)).astype(dtype),
        "w": (np.arange(rows) % 3).astype(dtype),
    }


def toy_block(weights, x, _):
    h = jnp.tanh(x @ weights["up"]) @ weights["down"]
    return x + h * weights["scale"] * weights["gate"], None


def toy_loss(schedule: Schedule = Schedule(), remat="full"):
    """`loss(params, batch, key) -> (sum, weight)`; runs sharded or on plain arrays."""

    def loss(params, batch, key):
        x, _ = run_stack(toy_block, params["blocks"], batch["x"], remat=remat, schedule=schedule)
        out = call(lambda head, x: x @ head["kernel"] + head["bias"], params["head"], x)
        root = unshard({"shift": params["shift"], "temperature": params["temperature"]})
        error = ((out * root["temperature"] - batch["y"]) ** 2).mean(-1) + root["shift"].sum() ** 2
        return (error * batch["w"]).sum(), batch["w"].sum()

    return loss


def train_alone(loss, params, batch, tx, steps: int):
    """The reference: the same loss and batch on one device. Gives last loss, parameters, optimizer state."""

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(lambda p: jnp.divide(*loss(p, batch, None)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, value = tx.init(params), None
    for _ in range(steps):
        params, state, value = step(params, state)
    return value, params, state


def train_sharded(
    loss, params, batch, tx, steps: int, mesh: str, strategy=None, units=UNITS, precision=None, **options
):
    """The same through the engine. Gives metrics of the last step, the state, and the step."""
    extra = {} if precision is None else {"precision": precision}
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=units, **extra)
    state, step, metrics = TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan, **options), None
    for _ in range(steps):
        state, metrics = step(state, batch)
    return metrics, state, step


def logical_moments(state: TrainState, step):
    """The optimizer's state without padding."""
    return step.optimizer._unpad(state.opt_state)


def assert_close(got, want, relative: float, plan: Plan | None = None) -> None:
    """Every leaf within `relative` of the largest value of the wanted leaf; shapes equal."""
    got, want = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (got, want))
    assert len(got) == len(want)
    for (path, a), (_, b) in zip(got, want):
        name, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, f"{name}: shape {a.shape}, wanted {b.shape}"
        worst = np.abs(a - b).max(initial=0)
        largest = np.abs(b).max(initial=0)
        assert worst <= relative * max(largest, 1e-30), f"{name}: off by {worst}, largest {largest}"


def bitwise_equal(a, b) -> bool:
    """Two trees of the same names, shapes, dtypes and bits."""
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    same = all(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)
    return same and jax.tree.structure(a) == jax.tree.structure(b)


@dataclass(frozen=True)
class Compiled:
    """A step compiled for simulated devices, and what the audit reads from it; `compiled(state, batch)` runs it."""

    step: TrainStep
    plan: Plan
    lowered: object
    compiled: object

    @cached_property
    def program(self) -> audit.Program:
        return audit.read(self.compiled, self.plan.mesh)

    @cached_property
    def asked(self) -> list[audit.Collective]:
        """The collectives as JAX asked for them: the dtypes on the wire."""
        return audit.lowered_collectives(self.lowered, self.plan.mesh)

    @cached_property
    def memory(self) -> audit.Memory:
        return audit.memory(self.compiled)


def compile_step(
    loss,
    params,
    batch,
    mesh: str,
    strategy=None,
    units=UNITS,
    precision=MixedPrecision(),
    tx=None,
    **options,
) -> Compiled:
    """Compile a step for parameters and a batch given as arrays or as shapes; allocates nothing."""
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=units, precision=precision)
    tx = optax.sgd(0.1) if tx is None else tx
    step = train_step(loss, tx, plan, **options)
    lowered = step.lower(TrainState.abstract(tx, plan), batch)
    return Compiled(step, plan, lowered, lowered.compile())


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)
