"""What the planner knows of GPUs and links, against published measurements and by hand."""

import csv
from pathlib import Path

import pytest

from jfsdp.audit.gpu import GPUS
from jfsdp.planning.hardware import CHIPS, Cluster

MEASURED = Path(__file__).parents[1] / "benchmarks" / "data" / "nccl_bandwidth.csv"


def measured(system):
    with open(MEASURED, newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["system"].startswith(system) and r["bytes"] != "large"]
    return [(r["op"], float(r["bytes"]), float(r["busbw_gb_s"])) for r in rows]


def bus_bandwidth(cluster, size, group):
    return size * (group - 1) / group / cluster.seconds(size, group) / 1e9


def test_rings_inside_a_host_reach_the_measured_bandwidth_at_every_size():
    """NCCL on 8 H100, 2 to 128 MiB: the fit's own figures, so a wrong formula and not a wrong constant is caught."""
    rows = [(size, wanted) for op, size, wanted in measured("8xH100")]
    assert len(rows) == 7
    for size, wanted in rows:
        assert bus_bandwidth(Cluster(gpu="h100"), size, 8) == pytest.approx(wanted, rel=0.1)


def test_large_messages_on_other_gpus_are_right_unfitted():
    """H200 was not looked at when fitting; 16 GiB."""
    for _, size, wanted in measured("8xH200"):
        assert bus_bandwidth(Cluster(gpu="h200"), size, 8) == pytest.approx(wanted, rel=0.06)
    ((_, size, wanted),) = measured("8xB200")
    assert bus_bandwidth(Cluster(gpu="b200"), size, 8) == pytest.approx(wanted, rel=0.06)


def test_four_hosts_share_their_network_cards_and_pay_for_hops():
    """4 hosts of 8 B200 at 50 GB/s per GPU; four of five sizes within 15 percent, the fifth within 30."""
    cluster = Cluster(gpu="b200", network_gbps=400)
    errors = sorted(abs(bus_bandwidth(cluster, size, 32) / wanted - 1) for _, size, wanted in measured("4 nodes"))
    assert len(errors) == 5 and errors[3] <= 0.15 and errors[4] <= 0.3


def test_a_group_with_one_gpu_per_host_gets_one_share_of_the_network():
    cluster, size = Cluster(gpu="h100", network_gbps=100), 2**30
    replicas = cluster.seconds(size, 4, spread=8)  # 4 replicas of 8 shards
    across = cluster.seconds(size, 32)
    assert replicas == pytest.approx(size * 3 / 4 / (0.92 * 100e9 / 8) + 3 * 6e-6)
    assert across < replicas / 4  # eight cards carry it


def test_nothing_moves_alone():
    assert Cluster().seconds(2**30, 1) == 0 and Cluster().seconds(0, 8) == 0


def test_chips_agree_with_what_the_compiler_is_told():
    for name, chip in CHIPS.items():
        if chip.described:
            told = GPUS[chip.described]
            assert (chip.memory, chip.bandwidth, chip.peak) == pytest.approx(
                (told.memory_bytes, told.memory_bandwidth, told.bf16_flops), rel=0.01
            ), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "v100"}, "gpu 'v100' is unknown. Known are a100-40, a100"),
        ({"per_host": 0}, "per_host is 0; it counts GPUs in a host, so use 1 or more"),
        ({"network_gbps": 0}, "network_gbps is 0; use gigabits per second and GPU, such as 400"),
        ({"network_gbps": float("nan")}, "network_gbps is nan; use gigabits"),
        ({"network_gbps": float("inf")}, "network_gbps is inf; use gigabits"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Cluster(**options)
