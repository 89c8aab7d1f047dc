"""What one process and many must agree on, run by both: the tests call this in their own process, and the launcher
starts this file in several, each of which writes what it saw to `OUT/<index>.json`. Each of the two also goes on from
a checkpoint of the other.

`python -m jfsdp.launch --nproc 2 -m tests.process_scenarios OUT CHECKPOINTS_OF_ONE FULL_SHARD-fp32 ...`
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
from tests.support import SETTINGS, UNITS, Setting, toy_batch, toy_loss, toy_params
from train import place


class Rows:
    """Arrays of equal length as a data set."""

    def __init__(self, **arrays):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, i: int) -> dict:
        return {name: array[i] for name, array in self._arrays.items()}


def under(setting: Setting, folder: Path) -> dict:
    """What must hold under each strategy and precision, in JSON's types; checkpoints go to `folder`."""
    return {
        "masks": masks(setting, folder),
        "training": training(setting),
        "ids": ids_of_an_epoch(make_mesh(setting.mesh)),
        "metrics": metrics(setting),
        "partial": partial_batches(setting),
        "evaluations": evaluations(setting, 66, 3),
    }


def common(folder: Path) -> dict:
    """What has nothing to do with either."""
    return {"cyclic": cyclic(), "rates": learning_rates(), "votes": votes(), "refusals": refusals(folder)}


def training(setting: Setting) -> dict:
    """Three steps of the toy model: losses, norms, the parameters afterwards, hosts and groups of collectives."""
    params = toy_params(dtype=jnp.float32)
    plan = make_plan(params, make_mesh(setting.mesh), strategy=setting.strategy, units=UNITS, precision=setting.policy)
    tx = optax.adamw(1e-2)
    state = TrainState.create(plan.place(params), tx, plan)
    placed = all_of(plan.unpad(state.params))
    batch = place(next(batches(Rows(**toy_batch(dtype=np.float32)), 16, plan)), plan)
    step = train_step(toy_loss(), tx, plan, clip_norm=1.0, accumulate=2).lower(state, batch).compile()
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
        "groups": [[c.kind, c.groups] for c in audit.read(step, plan.mesh).collectives],
    }


def dropped(params, batch, key):
    """A loss under dropout 0.5 of examples, and beside it the mask as a number: bit i is that of example i."""
    kept = jax.vmap(jax.random.bernoulli)(example_keys())
    mask = Auxiliary((kept * batch["bit"]).sum(), batch["one"].sum(), coefficient=0.0)
    return (kept * unshard(params["w"]).sum()).sum(), batch["one"].sum(), {"mask": mask}


def dropout_run(setting: Setting, mesh: str):
    """Plan and optimizer of a model that no mesh cuts without padding, and `go(state, steps)`."""
    plan = make_plan({"w": jnp.ones((13, 3))}, make_mesh(mesh), precision=setting.policy)
    tx = optax.adamw(0.1)
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


def masks(setting: Setting, folder: Path) -> dict:
    """C-59: the masks of six steps, and the state after four of them, which is saved; what a local checkpoint gives."""
    plan, tx, go = dropout_run(setting, setting.mesh)
    state, first = go(TrainState.create(plan.place({"w": jnp.ones((13, 3))}), tx, plan, seed=7), 4)
    saved = values(state)
    for kind in ("sharded", "local"):
        with Checkpoints(folder / kind, kind=kind) as checkpoints:
            checkpoints.save(state)
    local = values(restore(folder / "local", TrainState.abstract(tx, plan)))
    return {"all": first + go(state, 2)[1], "saved": saved, "local": local, "resumed": resumed(setting, folder)}


def resumed(setting: Setting, folder: Path) -> dict:
    """C-59: the state that a checkpoint gives on the other mesh, and the masks of the two steps after it."""
    plan, tx, go = dropout_run(setting, {"1x8": "2x4", "2x4": "1x8"}[setting.mesh])
    state = restore(folder / "sharded", TrainState.abstract(tx, plan))
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


def batches(rows: Rows, global_batch: int, plan: Plan, shuffle: bool = True) -> Batches:
    return Batches(rows, global_batch=global_batch, shuffle=shuffle, **process_share(plan.mesh))


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
    """A loss that is told by the batch, and its own gradient."""
    (w,) = unshard([params["w"]])
    one = 1 + (w[0] - jax.lax.stop_gradient(w[0]))
    return (one * batch["loss"] * batch["weight"]).sum(), batch["weight"].sum()


def weighted_run(setting: Setting):
    """The plan of a model of one weight, and `go(batch)`: a step gives what is logged of loss and
    tokens, and the gradient that was applied."""
    params, tx = {"w": jnp.ones(1)}, optax.sgd(1.0)
    plan = make_plan(params, make_mesh(setting.mesh), precision=setting.policy)
    state, step = TrainState.create(plan.place(params), tx, plan), train_step(weighted, tx, plan)

    def go(batch) -> list[float]:
        nonlocal state
        before = all_of(state.logical_params())[0][0]
        state, result = step(state, place(batch, plan))
        timing = Throughput(8).step(result, tokens=result.pop("weight"), places=8)
        written = record(int(state.step), timing, **result)
        return [written["loss"], written["tokens"], before - all_of(state.logical_params())[0][0]]

    return plan, go


def metrics(setting: Setting) -> list[list[float]]:
    """C-70: losses 1 to 8 with a token each; then 3 tokens of loss 2 and 1 of loss 6."""
    plan, go = weighted_run(setting)
    logged = []
    for losses, weights in (([*range(1, 9)], [1] * 8), ([2, 6] + [0] * 6, [3, 1] + [0] * 6)):
        rows = Rows(loss=np.array(losses, np.float32), weight=np.array(weights, np.float32))
        logged.append(go(next(evaluation_batches(rows, global_batch=8, **process_share(plan.mesh)))))
    return logged


def partial_batches(setting: Setting) -> list[list[float]]:
    """C-61: the three batches of an epoch of 21 examples with losses 1 to 21."""
    plan, go = weighted_run(setting)
    rows = Rows(loss=np.arange(1, 22, dtype=np.float32), weight=np.ones(21, np.float32))
    reader = batches(rows, 8, plan, shuffle=False)
    return [go(next(reader)) for _ in range(3)]


def evaluations(setting: Setting, *sizes: int) -> list[list[float]]:
    """C-71: sum and count over sets whose last batch leaves the second process nothing; example i has loss i."""
    plan = make_plan({"w": jnp.ones(1)}, make_mesh(setting.mesh), precision=setting.policy)
    step, stored, seen = eval_step(weighted, plan), plan.place({"w": jnp.ones(1)}), []
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
    processes.introduce(cli.start(DeviceConfig(mesh="8"), group.count))
    if group.index == 1:
        warnings.warn("a warning from the second process", stacklevel=1)
    out, one = map(Path, sys.argv[1:3])
    seen = common(out / "checkpoints")
    for setting in (s for s in SETTINGS if str(s) in sys.argv[3:]):
        here = {"resumed": resumed(setting, one / str(setting))}
        seen[str(setting)] = under(setting, out / "checkpoints" / str(setting)) | here
    (out / f"{group.index}.json").write_text(json.dumps(seen))
