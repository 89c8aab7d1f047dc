"""Many processes: how they find each other, what they agree on between steps, and how they end together.

Owns `jax.distributed` and the label that a process's messages carry. Which rows a process reads is arithmetic in
`batches.py`, in which order devices go is decided in `mesh.py`; processes are started on one machine by `launch.py`, on
many by a scheduler.

Note [Ending together]
A process that fails leaves at once, by `os._exit`: JAX's own farewell would wait for the others, who wait for this one
in a collective. The others then lose their connection to it, or miss its heartbeat after `HEARTBEAT_S` seconds; who
only sees a connection break stays until the coordination service has named the process that is gone.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEARTBEAT_S = 30
"""Seconds without a sign of life after which a process counts as gone, and all others end."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of a run, and which of them this is."""

    source: str
    """Who told, in words."""
    count: int = 1
    index: int = 0
    coordinator: str | None = None
    """HOST:PORT, where process 0 listens and the others meet."""
    local_index: int = 0
    """Which of the processes on this host this is."""
    local_count: int = 1
    owns_devices: bool = False
    """Whether the launcher shows this process no GPUs but its own."""

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 ({self.source})"
        return f"{self.count} ({self.source}), coordinator {self.coordinator}"


ALONE = Group(source="neither torchrun, Open MPI, Slurm, a Kubernetes job nor --coordinator found")
_here = ALONE


# Finding each other


def detect(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Group:
    """Work out the processes from the environment; what is given wins, and `num_processes=1` asks nobody.

    Understood are torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE),
    Open MPI, Slurm and indexed Kubernetes jobs, in this order, since the first two may run inside the others.

    Raises: ValueError when something is missing or out of range.
    """
    if num_processes == 1:
        return replace(ALONE, source="--num-processes 1")
    asked = dict(coordinator=coordinator, count=num_processes, index=process_id)
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) == 3:
        return _checked(Group(source="--coordinator", **given))
    found = next((group for find in (_torchrun, _open_mpi, _slurm, _kubernetes) if (group := find(environ))), None)
    if found is None and given:
        raise ValueError(
            f"{', '.join(_FLAGS[name] for name in given)} given, but not {_missing(asked)}, and no launcher was found "
            "that tells. Give all three: the address of process 0, how many processes there are, and which this is."
        )
    return ALONE if found is None else _checked(replace(found, **given))


_FLAGS = {"coordinator": "--coordinator", "count": "--num-processes", "index": "--process-id"}


def _missing(values: Mapping[str, object]) -> str:
    return " and ".join(_FLAGS[name] for name, value in values.items() if value is None)


def _checked(group: Group) -> Group:
    if group.count == 1:
        return group
    if not 0 <= group.index < group.count:
        raise ValueError(
            f"process {group.index} of {group.count} ({group.source}): processes are numbered from 0, and there is at "
            f"least one. Use --num-processes 1 or more and --process-id 0 to {max(group.count - 1, 0)}."
        )
    if group.coordinator is None:
        raise ValueError(
            f"{group.source} tells of {group.count} processes, but not where process 0 can be reached. Give "
            "--coordinator HOST:PORT, with the host of process 0 and a free port there (for torchrun's variables: "
            "MASTER_ADDR and MASTER_PORT)."
        )
    if not (found := re.fullmatch(r".+:(\d{1,5})", group.coordinator)) or not 0 < int(found[1]) < 1 << 16:
        raise ValueError(
            f"the coordinator {group.coordinator!r} is no HOST:PORT. Write for example node1:1234; ports end at 65535."
        )
    if not 0 <= group.local_index < group.local_count:
        raise ValueError(
            f"{group.source} say that this is process {group.local_index} of {group.local_count} on this host, counted "
            "from 0. Set LOCAL_RANK and LOCAL_WORLD_SIZE to what is the case, or neither."
        )
    return group


def _torchrun(environ: Mapping[str, str]) -> Group | None:
    if not {"RANK", "WORLD_SIZE"} <= environ.keys():
        if (count := _number(environ, "WORLD_SIZE", 1)) > 1:
            _log.warning("WORLD_SIZE is %d and RANK is not set: torchrun's variables are not used. Set both.", count)
        return None
    address = None
    if {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        port = _number(environ, "MASTER_PORT")
        port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun itself listens on MASTER_PORT
        address = f"{environ['MASTER_ADDR']}:{port}"
    return Group(
        source="torchrun's variables",
        count=_number(environ, "WORLD_SIZE"),
        index=_number(environ, "RANK"),
        coordinator=address,
        local_index=_number(environ, "LOCAL_RANK", 0),
        local_count=_number(environ, "LOCAL_WORLD_SIZE", 1),
    )


def _open_mpi(environ: Mapping[str, str]) -> Group | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    count, local_count = _number(environ, "OMPI_COMM_WORLD_SIZE"), _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = None
    if "OMPI_MCA_orte_hnp_uri" in environ:
        address = _address(_clusters().OmpiCluster, environ)
    elif count == local_count:  # Open MPI 5 does not tell the host of process 0, but here there is only one
        job = environ.get("PMIX_NAMESPACE", "")
        address = f"127.0.0.1:{61440 + zlib.crc32(job.encode()) % 4096}"
    return Group(
        source="Open MPI",
        count=count,
        index=_number(environ, "OMPI_COMM_WORLD_RANK"),
        coordinator=address,
        local_index=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_count=local_count,
    )


def _slurm(environ: Mapping[str, str]) -> Group | None:
    is_task = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys()
    if not is_task:
        if (tasks := _number(environ, "SLURM_NTASKS", 1)) > 1:
            _log.warning("Slurm gave this job %d tasks, but srun started none: training alone. Use srun.", tasks)
        return None
    per_node = _expand(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Group(
        source="Slurm",
        count=_number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"),
        index=_number(environ, "SLURM_PROCID"),
        coordinator=_address(_clusters().SlurmCluster, environ),
        local_index=_number(environ, "SLURM_LOCALID"),
        local_count=per_node[min(_number(environ, "SLURM_NODEID", 0), len(per_node) - 1)],
        owns_devices=bool({"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"} & environ.keys()),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} is {'missing in the environment' if value is None else repr(value)}; it should be a number, which "
            "launchers set. Start this with the launcher, or give --coordinator, --num-processes and --process-id."
        ) from error


def _expand(counts: str) -> list[int]:
    """Slurm's `4(x2),3` as `[4, 4, 3]`."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def _kubernetes(environ: Mapping[str, str]) -> Group | None:
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return None
    if find_spec("kubernetes") is None:
        _log.warning(
            "this pod belongs to an indexed Kubernetes job, whose size only the package kubernetes can ask for: "
            "training alone. pip install kubernetes, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )
        return None
    cluster = _clusters().K8sCluster
    try:
        cluster.is_env_present()  # loads the credentials of the pod
        return Group(
            source="Kubernetes",
            count=cluster.get_process_count(),
            index=cluster.get_process_id(),
            coordinator=cluster.get_coordinator_address(300, environ.get("JAX_COORDINATOR_PORT")),
        )
    except Exception as error:  # whatever its client raises: no credentials, no right to ask, no answer
        raise ValueError(
            f"this pod belongs to an indexed Kubernetes job, and asking for the job failed: {error}. Let the pod's "
            "service account read pods and jobs, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        ) from error


def _address(cluster, environ: Mapping[str, str]) -> str | None:
    """None where what a launcher set is not what JAX expects of it."""
    try:
        return cluster.get_coordinator_address(None, environ.get("JAX_COORDINATOR_PORT"))
    except (ValueError, LookupError):
        return None


def _clusters():
    # JAX's readers of host lists and job descriptions; private, the same on the oldest and the newest version we test.
    from jax._src import clusters

    return clusters


def connect(group: Group | None = None, *, timeout_s: int = 300) -> Group:
    """Meet the other processes; call it before anything that touches a device. Alone, it does nothing.

    From then on warnings carry the index of their process, and JAX sees the devices of all of them. GPUs of a host
    are dealt out equally to its processes.
    timeout_s: seconds to wait for the others; then the process ends, as JAX's own way of waiting cannot be left.
    Raises: RuntimeError if JAX has started or the port is taken; ValueError if GPUs cannot be dealt out.
    """
    global _here
    group = detect() if group is None else group
    if group.count == 1:
        return group
    devices = local_devices(group)
    if group.index == 0:
        _check_port(group)

    def give_up() -> None:
        print(
            f"process {group.index} of {group.count}: error: did not meet the others at {group.coordinator} within "
            f"{timeout_s} s. Check that all {group.count} run, and that this host reaches the port of process 0.",
            file=sys.stderr,
        )
        leave(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.count,
            group.index,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_s + 60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=timeout_s,  # who waits for others to end, too; one that is gone misses heartbeats
        )
    finally:
        timer.cancel()
    _here = group
    _label_messages()
    return group


def introduce(mesh: Mesh) -> None:
    """Connect the processes for every group of devices that axes of the mesh make, while all are at one place.

    On CPUs Gloo gives up when one comes 30 s later than another to a group's first collective, and compiling a step or
    reading its batch may differ by more under load. Later collectives wait as long as it takes.
    """
    if jax.process_count() == 1 or mesh.devices.flat[0].platform != "cpu":
        return
    names = mesh.axis_names
    groups = [chosen for n in range(1, len(names) + 1) for chosen in combinations(names, n)]
    rest = [PartitionSpec(*(None if name in chosen else name for name in names)) for chosen in groups]
    one = jax.device_put(np.ones(mesh.devices.shape, np.float32), NamedSharding(mesh, PartitionSpec(*names)))
    sums = jax.shard_map(
        lambda x: [jax.lax.psum(x, g) for g in groups], mesh=mesh, in_specs=PartitionSpec(*names), out_specs=rest
    )
    # all-reduce over each group, 4 bytes.
    jax.block_until_ready(jax.jit(sums)(one))


def _check_port(group: Group) -> None:
    try:
        socket.create_server(("", int(group.coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        raise RuntimeError(
            f"process 0 of {group.count} cannot listen at {group.coordinator}: {error.strerror}. Give another port."
        ) from error


def _label_messages() -> None:
    """Put the label into log records themselves, so that it is there whoever handles them; warnings are logged, too."""
    make = logging.getLogRecordFactory()

    def make_labelled(*args, **kwargs) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg = f"{label()}{record.msg}"
        return record

    logging.setLogRecordFactory(make_labelled)
    logging.captureWarnings(True)


def local_devices(group: Group, environ: Mapping[str, str] = os.environ) -> list[int] | None:
    """Which of the GPUs that this process sees it takes; None takes all of them.

    Raises: ValueError if a host has more processes than that, or no equal share for each.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    seen = len(list(Path("/dev").glob("nvidia[0-9]*"))) if listed is None else len([i for i in listed.split(",") if i])
    takes_all = group.local_count == 1 or group.owns_devices or seen < 2
    if takes_all or "JAX_LOCAL_DEVICE_IDS" in environ or environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    if seen % group.local_count:
        raise ValueError(
            f"{seen} GPUs cannot be dealt out equally to the {group.local_count} processes of this host "
            f"({group.source}). Start a number of processes that divides {seen}, such as 1 or {seen}, or set "
            "JAX_LOCAL_DEVICE_IDS for each."
        )
    share = seen // group.local_count
    return list(range(group.local_index * share, (group.local_index + 1) * share))


# Agreeing


def label() -> str:
    """What a message of this process begins with: "process 1 of 2: ", or nothing when it is alone."""
    return "" if _here.count == 1 else f"process {_here.index} of {_here.count}: "


def vote(is_true: Callable[[], bool]) -> Callable[[], bool]:
    """Ask all processes whether `is_true` of any of them; all must ask at the same place.

    What comes back waits for the answer: ask behind a step that was dispatched, and it costs the step nothing.
    """
    if _here.count == 1:
        return is_true
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    own = np.full(jax.local_device_count(), is_true())
    votes = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), own)
    # all-reduce over all devices, a number each: latency only, and behind the step's own collectives.
    answer = jax.jit(jax.numpy.any, out_shardings=NamedSharding(mesh, PartitionSpec()))(votes)
    return lambda: bool(answer)


def gather(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Every process's value under each name, by process; all must ask, with the same names."""
    if _here.count == 1:
        return {name: [value] for name, value in values.items()}
    table = multihost_utils.process_allgather(np.array(list(values.values()), np.float32))
    return {name: table[:, i].tolist() for i, name in enumerate(values)}


def check_same(values: Mapping[str, str]) -> None:
    """See that every process has the same value under each name; all must ask, with the same names.

    Raises: ValueError in all of them, with who has what.
    """
    if _here.count == 1:
        return
    hashes = multihost_utils.process_allgather(np.array([zlib.crc32(v.encode()) for v in values.values()], np.uint32))
    for (name, value), found in zip(values.items(), hashes.T, strict=True):
        if (found != found[0]).any():
            text = np.frombuffer(value.encode()[:256].ljust(256), np.uint8)
            texts = [bytes(row).decode(errors="replace").rstrip() for row in multihost_utils.process_allgather(text)]
            told = {said: f"{said or 'nothing'} in process {i}" for i, said in reversed([*enumerate(texts)])}
            raise ValueError(
                f"{name} differs between the {_here.count} processes: {', '.join(reversed(told.values()))}. Start all "
                "with the same options and data."
            )


# Ending together


@contextmanager
def together() -> Iterator[None]:
    """A failure inside ends this process at once, and thereby all others. See Note [Ending together]."""
    try:
        yield
    except BaseException as error:
        if _here.count == 1:
            raise
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            code = error.code or 0
        else:
            code = 1
            with suppress(OSError):  # a terminal that is gone shall not keep this process
                print(f"{label()}failed\n{_told(error)}", file=sys.stderr)
        if code:
            leave(code)
        raise


def leave(code: int) -> None:
    """End this process without waiting for any other."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _told(error: BaseException) -> str:
    """The traceback; for a connection that broke, after waiting for word of who is gone."""
    text = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, jax.errors.JaxRuntimeError) and re.search("gloo|nccl|by peer", str(error), re.IGNORECASE):
        line = str(error).partition("\n")[0]
        print(
            f"{label()}error: a collective failed, so another process has ended; its own message tells why. Waiting "
            f"up to {HEARTBEAT_S} s for JAX to name it. ({line})",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(HEARTBEAT_S + 5)  # JAX ends this process as soon as it knows
    return text
