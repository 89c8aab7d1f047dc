"""What one process and many must agree on, run by both: the tests call `everything` in their own process, and the
launcher starts this file in several, each of which writes what it saw to `OUT/<index>.json`. Each of the two also goes
on from a checkpoint of the other.

`python -m jfsdp.launch --nproc 2 -m tests.process_scenarios OUT CHECKPOINTS_OF_ONE`
"""

import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jfsdp import cli, processes, run_folder
from jfsdp import mesh as meshes
from jfsdp.audit import program as audit
from jfsdp.batches import Batches, evaluation_batches
from jfsdp.checkpoint import restore
from jfsdp.layout import Plan, make_plan
from jfsdp.loss import Auxiliary
from jfsdp.mesh import make_mesh, process_share
from jfsdp.metrics import Throughput, record
from jfsdp.options import DeviceConfig
from jfsdp.randomness import example_keys
from jfsdp.run_folder import Checkpoints
from jfsdp.state import TrainState
from jfsdp.step import eval_step, train_step
from jfsdp.unit import unshard
from tests.support import UNITS, toy_batch, toy_loss, toy_params
from train import place


class Rows:
    """Arrays of equal length as a data set."""

    def __init__(self, **arrays):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, i: int) -> dict:
        return {name: array[i] for name, array in self._arrays.items()}


def everything(folder: Path) -> dict:
    """Every scenario's result, in JSON's types; checkpoints go to `folder`."""
    return {
        "masks": masks(folder),
        "FULL_SHARD": training("1x8", "FULL_SHARD"),
        "HYBRID_SHARD": training("2x4", "HYBRID_SHARD"),
        "ids": ids_of_an_epoch(make_mesh("2x4")),
        "cyclic": cyclic(),
        "metrics": metrics(([*range(1, 9)], [1] * 8), ([2, 6, 0, 0, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0, 0, 0])),
        "evaluations": evaluations(66, 3),
        "rates": learning_rates(),
        "votes": votes(),
        "refusals": refusals(folder),
    }


def training(mesh: str, strategy: str) -> dict:
    """Three steps of the toy model: losses, norms, the parameters afterwards, hosts and groups of collectives."""
    params = toy_params(dtype=jnp.float32)
    plan = make_plan(params, make_mesh(mesh), strategy=strategy, units=UNITS)
    tx = optax.adamw(1e-2)
    state = TrainState.create(plan.place(params), tx, plan)
    placed = all_of(plan.unpad(state.params))
    step = train_step(toy_loss(), tx, plan, clip_norm=1.0, accumulate=2)
    batch = place(next(batches(Rows(**toy_batch(dtype=np.float32)), 16, plan)), plan)
    program = audit.read(step.lower(state, batch).compile(), plan.mesh)
    losses, norms = [], []
    for _ in range(3):
        state, result = step(state, batch)
        losses.append(float(result["loss"]))
        norms.append(float(result["grad_norm"]))
    return {
        "placed": placed == all_of(params),
        "losses": losses,
        "norms": norms,
        "params": all_of(state.logical_params()),
        "hosts": [[device.process_index for device in row] for row in plan.mesh.devices],
        "groups": [[c.kind, c.groups] for c in program.collectives],
    }


def dropped(params, batch, key):
    """A loss under dropout 0.5 of examples, and beside it the mask as a number: bit i is that of example i."""
    kept = jax.vmap(jax.random.bernoulli)(example_keys())
    mask = Auxiliary((kept * batch["bit"]).sum(), batch["one"].sum(), coefficient=0.0)
    return (kept * unshard(params["w"]).sum()).sum(), batch["one"].sum(), {"mask": mask}


def dropout_run(mesh: str):
    """Plan and optimizer of a model that no mesh cuts without padding, the state's shapes, and `go(state, steps)`."""
    plan, tx = make_plan({"w": jnp.ones((13, 3))}, make_mesh(mesh)), optax.adamw(0.1)
    step, rows = (
        train_step(dropped, tx, plan),
        Rows(bit=2.0 ** np.arange(16, dtype=np.float32), one=np.ones(16, np.float32)),
    )
    batch = place(next(evaluation_batches(rows, global_batch=16, **process_share(plan.mesh))), plan)

    def go(state: TrainState, steps: int) -> tuple[TrainState, list[int]]:
        seen = []
        for _ in range(steps):
            state, result = step(state, batch)
            seen.append(int(16 * float(result["mask"])))
        return state, seen

    return plan, tx, go


def masks(folder: Path) -> dict:
    """C-59: the masks of six steps on 1x8, and the state after four of them, which is saved."""
    plan, tx, go = dropout_run("1x8")
    state, first = go(TrainState.create(plan.place({"w": jnp.ones((13, 3))}), tx, plan, seed=7), 4)
    saved = values(state)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
    return {"all": first + go(state, 2)[1], "saved": saved, "resumed": resumed(folder)}


def resumed(folder: Path) -> dict:
    """C-59: the state that a checkpoint gives on 2x4, and the masks of the two steps after it."""
    plan, tx, go = dropout_run("2x4")
    state = restore(folder, TrainState.abstract(tx, plan))
    assert jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
    return {"state": values(state), "masks": go(state, 2)[1]}


def values(state: TrainState) -> list:
    """Parameters, moments, counters and key, without padding."""
    adam = state.opt_state[0]
    moments = [state.plan.unpad(moment) for moment in (adam.mu, adam.nu)]
    return all_of([state.logical_params(), moments, adam.count, state.step, jax.random.key_data(state.key)])


def all_of(tree) -> list:
    """Every value of a tree of arrays, wherever they are."""
    whole = [
        leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        for leaf in jax.tree.leaves(tree)
    ]
    return [np.asarray(leaf).tolist() for leaf in whole]


def batches(rows: Rows, global_batch: int, plan: Plan) -> Batches:
    return Batches(rows, global_batch=global_batch, **process_share(plan.mesh))


def cyclic() -> dict:
    """The same where processes are dealt out to two hosts in turn, as by `srun --distribution=cyclic`: hosts of the
    shard groups, and ids."""
    name, meshes._host_name = meshes._host_name, lambda: bytes([jax.process_index() % 2] * 16)
    try:
        mesh = make_mesh("2x4")
    finally:
        meshes._host_name = name
    hosts = [sorted({device.process_index % 2 for device in row}) for row in mesh.devices]
    return {"hosts": hosts, "ids": ids_of_an_epoch(mesh)}


def ids_of_an_epoch(mesh: Mesh) -> list[list[int]]:
    """C-63: what is on all devices in each of the four batches of an epoch of 32 examples."""
    plan = make_plan({"w": jnp.zeros(8)}, mesh)
    reader = batches(Rows(id=np.arange(32, dtype=np.int32)), 8, plan)
    return [all_of(place(next(reader), plan))[0] for _ in range(4)]


def weighted(params, batch, key):
    """A loss that is told by the batch, and a gradient of 1 for each parameter."""
    return jnp.sum(batch["loss"] * batch["weight"]) + 0 * unshard(params["w"]).sum(), batch["weight"].sum()


def metrics(*given: tuple[list, list]) -> list[list[float]]:
    """C-70: loss and tokens as they are logged, for losses and weights of each batch."""
    params = {"w": jnp.zeros(8)}
    plan = make_plan(params, make_mesh("2x4"))
    tx, logged = optax.sgd(1.0), []
    state, step = TrainState.create(plan.place(params), tx, plan), train_step(weighted, tx, plan)
    for number, (losses, weights) in enumerate(given, start=1):
        rows = Rows(loss=np.array(losses, np.float32), weight=np.array(weights, np.float32))
        share = evaluation_batches(rows, global_batch=8, **process_share(plan.mesh))
        state, result = step(state, place(next(share), plan))
        timing = Throughput(8).step(result, tokens=result.pop("weight"), places=8)
        written = record(number, timing, **result)
        logged.append([written["loss"], written["tokens"]])
    return logged


def evaluations(*sizes: int) -> list[list[float]]:
    """C-71: sum and count over sets whose last batch leaves the second process nothing; example i has loss i."""
    params = {"w": jnp.zeros(8)}
    plan = make_plan(params, make_mesh("2x4"))
    step, stored, seen = eval_step(weighted, plan), plan.place(params), []
    for examples in sizes:
        rows = Rows(loss=np.arange(examples, dtype=np.float32), weight=np.ones(examples, np.float32))
        share = evaluation_batches(rows, global_batch=8, **process_share(plan.mesh))
        results = jax.device_get([step(stored, place(batch, plan)) for batch in share])
        seen.append([float(sum(s for s, _ in results)), float(sum(w for _, w in results)), len(results)])
    return seen


def learning_rates() -> list[float]:
    """C-30: what a parameter moves by when its gradient is 1, in 4 steps of 4 micro-batches, warm-up over 4 steps."""

    def product(params, batch, key):
        return (unshard(params["w"]).sum() * batch["one"]).sum(), batch["one"].sum()

    params, tx = {"w": jnp.zeros(8)}, optax.sgd(optax.linear_schedule(0.25, 1.0, 3))
    plan = make_plan(params, make_mesh("1x8"))
    state, step, at = (
        TrainState.create(plan.place(params), tx, plan),
        train_step(product, tx, plan, accumulate=4),
        [0.0],
    )
    for batch in (next(batches(Rows(one=np.ones(32, np.float32)), 32, plan)) for _ in range(4)):
        state, _ = step(state, place(batch, plan))
        at.append(-all_of(state.params)[0][0])
    return np.diff(at).tolist()


def votes() -> list:
    """What a vote says when nobody, and when only the last process agrees; and everybody's index."""
    is_last = jax.process_index() == jax.process_count() - 1
    answers = [processes.vote(lambda: False)(), processes.vote(lambda: is_last)()]
    return [*answers, processes.gather({"index": jax.process_index(), "seconds": 0.5})]


def refusals(folder: Path) -> list[str]:
    """What is said of an option that differs, of nothing that does, and of folders that are not one."""
    folder = folder.with_name(f"{folder.name}-of-{min(jax.process_index(), 1)}")
    said, run_folder._SHOWN_WITHIN_S = [], 0
    for see in (
        lambda: processes.check_same({"--steps": "3", "--checkpoint-dir": folder.name}),
        lambda: processes.check_same({"--steps": "3"}),
        lambda: Checkpoints(folder),
    ):
        try:
            see()
        except (ValueError, OSError) as error:
            said.append(str(error).replace(str(folder), "FOLDER"))
    return said


if __name__ == "__main__":
    group = processes.connect()
    cli.start(DeviceConfig(mesh="8"), group.count)
    if group.index == 1:
        warnings.warn("a warning from the second process", stacklevel=1)
    out, one = map(Path, sys.argv[1:])
    seen = everything(out / "checkpoints") | {"resumed": resumed(one)}
    (out / f"{group.index}.json").write_text(json.dumps(seen))
