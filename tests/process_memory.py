"""How much host memory a consolidated save takes in each of several processes: bytes to `OUT/<index>.json`.

`python -m jfsdp.launch --nproc 2 -m tests.process_memory OUT FULL_SHARD-fp32`
"""

import json
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jfsdp import cli, processes
from jfsdp.consolidated import save_consolidated
from jfsdp.layout import make_plan
from jfsdp.options import DeviceConfig
from tests.support import SETTINGS


def resident() -> int:
    """Bytes of this process in memory, pages of files left out, which the system can drop."""
    fields = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) * 1024


def growth(work) -> int:
    """The most that memory grew by while `work` ran."""
    start = most = resident()
    ended = threading.Event()

    def watch():
        nonlocal most
        while not ended.is_set():
            most = max(most, resident())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    ended.set()
    watcher.join()
    return most - start


if __name__ == "__main__":
    group, out = processes.connect(), Path(sys.argv[1])
    (setting,) = (setting for setting in SETTINGS if str(setting) == sys.argv[2])
    mesh, dtype = cli.start(DeviceConfig(mesh=setting.mesh), group.count), setting.policy.param_dtype
    shapes = {f"layer{i}": jax.ShapeDtypeStruct((1024, (4 << 10) // dtype.itemsize), dtype) for i in range(64)}
    plan = make_plan(shapes, mesh)  # 256 MiB, by 4
    params = plan.create(lambda: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes))
    save_consolidated(out / "warm-up", {"layer0": params["layer0"]}, make_plan({"layer0": shapes["layer0"]}, mesh))
    grown = growth(lambda: save_consolidated(out / "model", params, plan))
    (out / f"{group.index}.json").write_text(json.dumps(grown))
