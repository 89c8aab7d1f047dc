"""What "4x8" means, in which order devices go, and devices that are simulated or refused."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jfsdp import mesh as meshes
from jfsdp.mesh import axis_size, make_mesh, parse_mesh, process_share, simulate_devices


@dataclass(frozen=True)
class Device:
    """As much of a device as a mesh asks for."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "none"


def hosts(*sizes: int) -> list[Device]:
    """Devices of hosts with these many devices each, in an order that mixes hosts."""
    devices = [(rank, host) for host, size in enumerate(sizes) for rank in range(size)]
    return [Device(id=10 * host + rank, process_index=host) for rank, host in sorted(devices)]


def groups(mesh) -> list[list[int]]:
    """The host of each device, shard group by shard group."""
    return [[d.process_index for d in row] for row in mesh.devices]


# ------------------------------------------------------------ reading a mesh


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4x8", (4, 8)), ("2x4", (2, 4)), ("8", (1, 8)), ("auto", (1, 8)), (" 2X4 ", (2, 4)), ("16x1", (16, 1))],
)
def test_a_mesh_is_replicas_by_shards(text, sizes):
    assert parse_mesh(text, 8) == sizes


@pytest.mark.parametrize("text", ["", "x8", "8x", "2x2x2", "-1x8", "2*4", "4 8", "eight"])
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ValueError, match="is not understood. Write REPLICASxSHARDS such as 4x8, .* or auto"):
        parse_mesh(text, 8)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("4x8", "mesh 4x8 needs 32 devices and 8 are present. Use a mesh whose product is 8, such as 1x8"),
        ("3x3", "mesh 3x3 needs 9 devices and 8 are present"),
        (
            "0x8",
            "mesh 0x8 has 0 x 8 = 0 devices; both sizes count devices, so use 1 or more",
        ),
        ((0, 8), "mesh 0x8 has 0 x 8 = 0 devices; both sizes"),
        (
            "1x4",
            r"mesh 1x4 uses 4 of the 8 devices present. .* idle devices \(allow_idle=True, --allow-idle\)",
        ),
    ],
    ids=["too-many", "not-square", "zero", "zero-as-numbers", "too-few"],
)
def test_a_mesh_that_does_not_match_the_devices_is_refused_with_both_numbers(mesh, message):
    """C-64, the library's part."""
    with pytest.raises(ValueError, match=message):
        make_mesh(mesh)


def test_meshes_that_match_the_devices():
    """C-64: "8" is 1x8, 2x4 runs, 1x4 runs with the option; the default takes every device as a shard."""
    for spec, shape in (("8", (1, 8)), ("2x4", (2, 4)), ((4, 2), (4, 2)), ("auto", (1, 8))):
        mesh = make_mesh(spec)
        assert mesh.axis_names == ("replica", "shard")
        assert mesh.devices.shape == shape
    assert make_mesh().devices.shape == (1, 8)
    assert make_mesh("1x4", allow_idle=True).devices.ravel().tolist() == jax.devices()[:4]
    with pytest.raises(ValueError, match="needs 16 devices and 8 are present"):
        make_mesh("2x8", allow_idle=True)


def test_axis_size_multiplies():
    mesh = make_mesh("2x4")
    sizes = [axis_size(mesh, axes) for axes in ((), ("replica",), ("shard",), ("replica", "shard"))]
    assert sizes == [1, 2, 4, 8]


# ------------------------------------------------------------ hosts


def test_shard_groups_lie_inside_one_host():
    mesh = make_mesh("2x4", devices=hosts(4, 4))
    assert groups(mesh) == [[0] * 4, [1] * 4]
    assert [d.id for d in mesh.devices[0]] == [0, 1, 2, 3]
    assert groups(make_mesh("4x2", devices=hosts(4, 4))) == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_a_shard_group_may_span_whole_hosts():
    assert groups(make_mesh("1x8", devices=hosts(4, 4))) == [[0] * 4 + [1] * 4]
    assert groups(make_mesh("2x8", devices=hosts(4, 4, 4, 4))) == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]


def test_processes_of_one_host_lie_together(monkeypatch):
    """Four processes of two devices, dealt out to two hosts in turn: 0 and 2 are on one host, 1 and 3 on the other."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    names = np.array([[1, 1], [2, 2], [1, 1], [2, 2]], np.uint8)
    monkeypatch.setattr(meshes.multihost_utils, "process_allgather", lambda own: names)
    mesh = make_mesh("2x4", devices=hosts(2, 2, 2, 2))
    assert groups(mesh) == [[0, 0, 2, 2], [1, 1, 3, 3]]
    for place, process in enumerate((0, 2, 1, 3)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert process_share(mesh) == dict(process_index=place, process_count=4)
    monkeypatch.setattr(jax, "process_index", lambda: 4)
    with pytest.raises(ValueError, match="process 4 has no device in the mesh, which has those of .0, 2, 1, 3."):
        process_share(mesh)
    with pytest.raises(ValueError, match=r"groups of 3 from hosts with \[2, 4\] devices"):  # and not [2, 2, 2]
        make_mesh("2x3", devices=hosts(2, 2, 2, 2), allow_idle=True)


def test_who_is_alone_asks_nobody(monkeypatch):
    """A mesh of one process's devices in a run of many, and one for GPUs that are only described."""
    monkeypatch.setattr(meshes.multihost_utils, "process_allgather", lambda own: pytest.fail("asked"))
    assert groups(make_mesh("2x2", devices=hosts(2, 2))) == [[0, 0], [1, 1]]
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert groups(make_mesh("1x2", devices=hosts(0, 0, 2))) == [[2, 2]]


def test_the_kernel_names_its_host(monkeypatch):
    assert meshes._host_name() == meshes._host_name() and len(meshes._host_name()) == 16
    monkeypatch.setattr(meshes.Path, "read_bytes", lambda path: b"another boot")
    by_kernel = meshes._host_name()
    monkeypatch.setattr(meshes.Path, "read_bytes", lambda path: open("/no/such/file"))
    assert len({by_kernel, meshes._host_name()}) == 2


def test_idle_devices_are_those_of_the_last_hosts():
    assert groups(make_mesh("1x4", devices=hosts(4, 4), allow_idle=True)) == [[0] * 4]


@pytest.mark.parametrize(("mesh", "sizes"), [("2x6", (4, 4, 4)), ("4x3", (4, 4, 4)), ("2x3", (4, 2))])
def test_a_shard_group_that_straddles_hosts_unevenly_is_refused(mesh, sizes):
    with pytest.raises(
        ValueError, match=f"mesh {mesh} cuts shard groups .* straddle hosts unevenly. Use equal hosts"
    ):
        make_mesh(mesh, devices=hosts(*sizes))


# ------------------------------------------------------------ simulated devices


def run(script: str, flags: str) -> str:
    """Run a script in a process of its own, where JAX has not started."""
    env = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_devices_are_simulated_before_jax_starts_and_other_flags_are_kept():
    """C-67: refused where the flag asks for another count, which starts nothing; then it works."""
    script = """
        import os, jax, jfsdp.mesh
        try:
            jfsdp.mesh.simulate_devices(8)
        except ValueError as e:
            print(e)
        os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
        jfsdp.mesh.simulate_devices(8)
        print(jax.device_count(), jax.default_backend())
        print(os.environ["XLA_FLAGS"])
    """
    refused, count, flags = run(script, "--xla_force_host_platform_device_count=4").splitlines()
    assert (
        "XLA_FLAGS already holds --xla_force_host_platform_device_count=4 and 8 simulated devices" in refused
    )
    assert "Unset it, or ask for 4." in refused
    assert count == "8 cpu"
    assert flags == "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8"


def test_simulated_devices_asked_for_too_late_are_refused():
    """C-67: it must not go on with one device."""
    script = """
        import jax, jfsdp.mesh
        jax.numpy.ones(3).block_until_ready()
        try:
            jfsdp.mesh.simulate_devices(8)
        except RuntimeError as e:
            print(e)
    """
    assert "8 simulated devices were asked for after JAX had started with 1" in run(script, "")


def test_simulated_devices_count_from_one():
    with pytest.raises(ValueError, match="cannot simulate 0 devices in a process; ask for 1 to 4096"):
        simulate_devices(0)
