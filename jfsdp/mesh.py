"""The device mesh: what "4x8" means, in which order devices go, and simulated devices.

Owns the two axis names. `replica` counts copies of the model and `shard` counts the pieces each copy
is cut into; "4x8" is 4 replicas of 8 shards. Which parameters use which axis is decided in `strategy.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

REPLICA, SHARD = "replica", "shard"
MOST_SIMULATED = 4096  # starts in seconds; twice as many did not in a minute (JAX 0.10.2)
_COUNT_FLAG = "--xla_force_host_platform_device_count"


def parse_mesh(text: str, device_count: int) -> tuple[int, int]:
    """Read a mesh as `(replica, shard)`: "4x8" is (4, 8), "8" is (1, 8), "auto" takes every device as a shard.

    Raises: ValueError when `text` is not a mesh or a size is 0.
    """
    if text == "auto":
        return 1, device_count
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text.strip().lower())
    if not match:
        raise ValueError(
            f"mesh {text!r} is not understood. Write REPLICASxSHARDS such as 4x8, a count of shards such as 8, or auto."
        )
    return _positive(int(match[1] or 1), int(match[2]), device_count)


def make_mesh(spec: str | tuple[int, int] = "auto", *, devices=None, allow_idle: bool = False) -> Mesh:
    """Build the mesh `("replica", "shard")` over `devices` (default: all of them).

    Devices are ordered by host, so that a shard group, which talks most, lies inside one host where it fits, whatever
    the numbers of the processes. Where there are several, all must call this, as they tell each other their host.

    allow_idle: let a mesh smaller than the machine leave the remaining devices unused.
    Raises: ValueError when the product does not match the devices, or a shard group would straddle hosts unevenly.
    """
    devices = list(jax.devices() if devices is None else devices)
    replica, shard = parse_mesh(spec, len(devices)) if isinstance(spec, str) else _positive(*spec, len(devices))
    wanted, present = replica * shard, len(devices)
    if wanted > present:
        raise ValueError(
            f"mesh {replica}x{shard} needs {wanted} devices and {present} are present. "
            f"Use a mesh whose product is {present}, such as 1x{present}, or simulate {wanted} devices on a CPU "
            f"machine (simulate_devices({wanted}), --simulate {wanted})."
        )
    if wanted < present and not allow_idle:
        raise ValueError(
            f"mesh {replica}x{shard} uses {wanted} of the {present} devices present. Use a mesh whose product is "
            f"{present}, such as 1x{present}, or allow idle devices (allow_idle=True, --allow-idle)."
        )
    host_of = _hosts(devices)
    ordered = sorted(devices, key=lambda d: (host_of[d.process_index], d.process_index, d.id))[:wanted]
    _check_hosts([host_of[d.process_index] for d in ordered], replica, shard)
    grid = np.array(ordered, dtype=object).reshape(replica, shard)
    return Mesh(grid, (REPLICA, SHARD), axis_types=(AxisType.Auto,) * 2)


def simulate_devices(count: int) -> None:
    """Make the CPU appear as `count` devices of this process. Call before JAX is used; other XLA flags are kept.

    Raises: RuntimeError when JAX has already started; ValueError when the flag already asks for another count.
    """
    if not 1 <= count <= MOST_SIMULATED:
        raise ValueError(f"cannot simulate {count} devices in a process; ask for 1 to {MOST_SIMULATED}.")
    flags = os.environ.get("XLA_FLAGS", "").split()
    asked = [f for f in flags if f.startswith(_COUNT_FLAG + "=")]
    if asked and int(asked[-1].split("=")[1]) != count:
        raise ValueError(
            f"XLA_FLAGS already holds {asked[-1]} and {count} simulated devices were asked for. "
            f"Unset it, or ask for {asked[-1].split('=')[1]}."
        )
    if _jax_has_started():
        raise RuntimeError(
            f"{count} simulated devices were asked for after JAX had started with {jax.device_count()}; "
            "the count is fixed at start-up. Call simulate_devices before anything that touches a device."
        )
    os.environ["XLA_FLAGS"] = " ".join(flags if asked else [*flags, f"{_COUNT_FLAG}={count}"])
    jax.config.update("jax_platforms", "cpu")
    if (started := jax.local_device_count()) != count:
        raise RuntimeError(
            f"asked for {count} simulated devices and JAX started {started}; XLA_FLAGS={os.environ['XLA_FLAGS']!r}."
        )


def axis_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Number of devices along `axes` together."""
    return int(np.prod([mesh.shape[a] for a in axes], dtype=int))


def process_share(mesh: Mesh) -> dict[str, int]:
    """Which share of a batch's rows this process holds, in the words of `batches.py`: processes in the mesh's order.

    Raises: ValueError when it has no device in the mesh.
    """
    processes, here = list(dict.fromkeys(d.process_index for d in mesh.devices.flat)), jax.process_index()
    if here not in processes:
        raise ValueError(f"process {here} has no device in the mesh, which has those of {processes}. Use all devices.")
    return dict(process_index=processes.index(here), process_count=len(processes))


def _hosts(devices) -> dict[int, int]:
    """For each process that has some of the devices, the first process of its host.

    A host may have several processes, one per GPU say, and a scheduler may number them round the hosts. JAX's devices
    tell on TPUs alone which host they are on. Devices that are only described, to compile for, have a process per host.
    """
    processes = {d.process_index for d in devices}
    if len(processes) < 2 or jax.process_count() < 2:
        return {process: process for process in processes}
    # all-gather over all processes, 16 bytes each, once per mesh.
    names = multihost_utils.process_allgather(np.frombuffer(_host_name(), np.uint8))
    keys = [bytes(name) for name in names]
    return {process: keys.index(keys[process]) for process in processes}


def _host_name() -> bytes:
    """16 bytes that differ from host to host: containers on one host may have names of their own, but one kernel."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not Linux
        name = socket.gethostname().encode()
    return hashlib.md5(name, usedforsecurity=False).digest()


def _positive(replica: int, shard: int, present: int) -> tuple[int, int]:
    if replica < 1 or shard < 1:
        raise ValueError(
            f"mesh {replica}x{shard} has {replica} x {shard} = {replica * shard} devices; both sizes count devices, so "
            f"use 1 or more, for example 1x{present}."
        )
    return replica, shard


def _check_hosts(hosts: list[int], replica: int, shard: int) -> None:
    per_host = Counter(hosts)
    sizes = set(per_host.values())
    if len(per_host) < 2:
        return
    host = min(sizes)
    if len(sizes) > 1 or (host % shard and shard % host):
        raise ValueError(
            f"mesh {replica}x{shard} cuts shard groups of {shard} from hosts with {sorted(per_host.values())} devices: "
            "a group would straddle hosts unevenly. Use equal hosts and a shard size that divides "
            f"{host} or is a multiple of it."
        )


def _jax_has_started() -> bool:
    from jax._src import xla_bridge  # the only place that knows without starting JAX; covered by tests on both versions

    return xla_bridge.backends_are_initialized()
