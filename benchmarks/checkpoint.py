"""Speed of checkpoints on this machine: `python -m benchmarks.checkpoint`.

What is asked: bytes per second of a save and of a restore, against a plain copy of the same bytes on the same disk;
the time that the training stands still for a save in the background, and by how much it is slower while one is
written; host memory beside the state's own; and, on another mesh, how many bytes are read for each byte of the state.

A simulated device computes on the cores that the writer needs, too, which a GPU does not. So a save is measured twice:
among steps that compute on simulated devices, and among steps that only wait, where what a GPU takes to copy its shard
to the host is left out. Lost is the time beyond that of so many steps without a save, as a part of the save's. The
state is that of a stack of matrices with AdamW, so that it is all bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from jfsdp import TrainState, UnitOptions, make_mesh, make_plan, run_stack, train_step
from jfsdp.checkpoint import restore
from jfsdp.run_folder import Checkpoints

WIDTH = 1024
WAIT = 0.1  # seconds of a step that leaves the cores alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=384, help="size of the state, moments included")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--kind", choices=["sharded", "local"], default="sharded")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows = measure(folder, options.mib, options.repeats, options.kind)
    finally:
        shutil.rmtree(folder)
    table = Table(title=f"{options.kind} checkpoint, best of {options.repeats}", title_justify="left")
    for column in ("what", "value", "how"):
        table.add_column(column)
    for name, (value, how) in rows.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}", how)
    Console(width=130).print(table)
    if options.json:
        options.json.write_text(json.dumps({name: value for name, (value, _) in rows.items()}, indent=1))


def measure(folder: Path, mib: int, repeats: int, kind: str) -> dict[str, tuple]:
    """Each figure with how it came about."""
    plan, tx, step, batch = make("1x8", mib)
    state = create(plan, tx)
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    rows: dict[str, tuple] = {"state, MiB": (size / 2**20, f"{len(jax.tree.leaves(state))} arrays, fp32, mesh 1x8")}

    checkpoints = Checkpoints(folder / "run", newest=1, best=0, kind=kind)

    def compute(state):
        state, _ = step(state, batch)
        return jax.block_until_ready(state)

    def wait(state):
        time.sleep(WAIT)
        return replace(state, step=state.step + 1)

    copies, saves, work, restores, peaks, stalls, computing, waiting = ([] for _ in range(8))
    wanted = TrainState.abstract(tx, plan)
    for _ in range(repeats + 1):  # the first one compiles and is not counted
        state = compute(state)
        with Peak() as memory:
            begun, before = time.perf_counter(), time.process_time()
            checkpoints.save(state)
            checkpoints.wait()
            saves.append(time.perf_counter() - begun)
            work.append(time.process_time() - before)
        peaks.append(memory.grown)
        run = checkpoints.path(int(state.step))
        copies.append(copy(run, folder / "copy"))
        begun = time.perf_counter()
        state = jax.block_until_ready(restore(run, wanted))
        restores.append(time.perf_counter() - begun)
        for advance, lost in ((wait, waiting), (compute, computing)):
            stall, part, state = save_between(checkpoints, state, advance)
            lost.append(part)
            if advance is wait:
                stalls.append(stall)
    checkpoints.close()
    run = checkpoints.path(checkpoints.steps()[-1])
    copy_s, save_s, work_s, restore_s = (min(x[1:]) for x in (copies, saves, work, restores))
    cores = len(os.sched_getaffinity(0))
    rows["copy, MiB/s"] = (size / 2**20 / copy_s, "every file read and written again, with fsync")
    rows["save, MiB/s"] = (size / 2**20 / save_s, "until it is complete on disk, nothing else running")
    rows["save / copy"] = (copy_s / save_s, "bytes per second in relation to the copy")
    rows["restore, MiB/s"] = (size / 2**20 / restore_s, "onto the same mesh, hashes checked")
    rows["restore / copy"] = (copy_s / restore_s, "")
    rows["stands still, ms"] = (min(stalls[1:]) * 1e3, "until save() returns and the state may be donated")
    rows["stands still / save"] = (min(stalls[1:]) / save_s, "")
    rows["lost / save"] = (
        float(np.median(waiting[1:])),
        f"of steps that wait {WAIT * 1e3:.0f} ms, as for a GPU, and leave it the cores; target: below 0.05",
    )
    rows["lost / save, cores taken"] = (
        float(np.median(computing[1:])),
        "of steps of 8 simulated devices, which need every core themselves",
    )
    rows["work / save"] = (
        work_s / cores / save_s,
        f"of the {cores} cores' time; no save in the background loses less where steps need them all",
    )
    rows["memory / state"] = (peaks[0] / size, "growth of the process's memory in the first save; 1 is the copy itself")
    if kind == "sharded":
        rows |= other_mesh(run, mib, size)
    return rows


def save_between(checkpoints: Checkpoints, state: TrainState, advance) -> tuple[float, float, TrainState]:
    """Save while steps go on: seconds that `save` took, the part of the save's duration that is lost, the state."""
    alone = []
    for _ in range(5):
        begun = time.perf_counter()
        state = advance(state)
        alone.append(time.perf_counter() - begun)
    done, count, begun = checkpoints.path(int(state.step)), 0, time.perf_counter()
    checkpoints.save(state)
    stall = time.perf_counter() - begun
    while not (done / "jfsdp.json").exists():
        state = advance(state)
        checkpoints.check()
        count += 1
    seconds = time.perf_counter() - begun
    checkpoints.wait()
    return stall, (seconds - count * float(np.median(alone))) / seconds, state


def other_mesh(run: Path, mib: int, size: int) -> dict[str, tuple]:
    """Restore onto 2x4 and count what is read."""
    plan, tx, _, _ = make("2x4", mib)
    before, begun = bytes_read(), time.perf_counter()
    jax.block_until_ready(restore(run, TrainState.abstract(tx, plan)))
    seconds = time.perf_counter() - begun
    return {
        "restore onto 2x4, MiB/s": (size / 2**20 / seconds, "HYBRID_SHARD: two copies on the devices"),
        "read / state": ((bytes_read() - before) / size, "bytes that the process asked the system for; 1 is each once"),
    }


def make(mesh: str, mib: int):
    layers = max(1, mib * 2**20 // (3 * 4 * WIDTH * WIDTH))
    shapes = {"blocks": {"w": jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)}}
    plan = make_plan(shapes, make_mesh(mesh), units={"blocks": UnitOptions(stacked=True)})
    tx = optax.adamw(1e-4)

    def loss(params, batch, key):
        x, _ = run_stack(lambda w, x, _: (x + jnp.tanh(x @ w["w"]), None), params["blocks"], batch)
        return (x**2).mean()

    batch = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
    return plan, tx, train_step(loss, tx, plan), batch


def create(plan, tx) -> TrainState:
    shape = plan.leaves[0].logical_shape
    return TrainState.create(
        plan.create(lambda: {"blocks": {"w": 0.01 * jax.random.normal(jax.random.key(0), shape)}}), tx, plan
    )


def copy(source: Path, target: Path) -> float:
    """Seconds to copy every file, until the disk has it."""
    begun = time.perf_counter()
    for path in source.rglob("*"):
        if path.is_file():
            there = target / path.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as old, there.open("wb") as new:
                shutil.copyfileobj(old, new, 1 << 24)
                new.flush()
                os.fsync(new.fileno())
    seconds = time.perf_counter() - begun
    shutil.rmtree(target)
    return seconds


class Peak:
    """How much this process's memory grew at most, in bytes."""

    def __enter__(self):
        self._begun, self._peak, self._stop = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.005):
            self._peak = max(self._peak, resident())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.grown = max(0, self._peak - self._begun)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_read() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


if __name__ == "__main__":
    main()
