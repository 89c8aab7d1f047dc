"""What the planner knows of GPUs and of the links between them.

Owns the table of GPUs, the network of a cluster and the time that one collective takes. Figures are those of data
sheets and of published measurements; `audit/gpu.py` describes the same chips to XLA.

Note [Time of a collective]
Inside a host a ring reaches a part of its best bandwidth that follows from the size of the message: measured on 8 H100
(NCCL rings, 2 to 128 MiB; NVIDIA/Megatron-LM PR 5596, NVIDIA/nccl issue 1281), best / (1 + (8.8 MiB / size)^0.71)
meets seven of eight figures within 5 percent and the eighth within 9. Across hosts all GPUs of a host that belong to
one group share its network cards, so the ring of a group that fills its hosts runs at their sum, and a group with one
GPU per host at one GPU's share. Every hop costs 6 us there (all-reduce over 4 hosts of 8 B200, 1 MiB to 1 GiB;
stas00/ml-engineering).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_HALF_SPEED = 8.8 * 2**20
"""Bytes of a message that reaches half of the best bandwidth inside a host."""
_HOP_SECONDS = 6e-6
_NVLINK_EFFICIENCY, _PCIE_EFFICIENCY, _NETWORK_EFFICIENCY = 0.78, 0.7, 0.92
"""Best measured bus bandwidth over one-way link speed: 350 of 450 GB/s on 8 H100, 362 of 400 over 4 hosts."""


class Chip(NamedTuple):
    """One kind of GPU. Bytes and seconds; memory is what the driver reports, not what the box says."""

    name: str
    memory: float
    bandwidth: float
    """Of its memory, bytes per second."""
    peak: float
    """Dense bf16 operations per second on the data sheet."""
    matmul: float
    """What large bf16 matmuls reach; where nobody has published it, 0.8 of the peak."""
    link: float
    """Bytes per second that it sends to its neighbours in the host, one way."""
    host: float
    """Bytes per second that copies between its memory and pinned memory of the host reach, one way."""
    described: str | None
    """Its name in `gpu.GPUS`, if it can be compiled for."""
    is_switched: bool = True
    """Whether every pair has the full link (NVLink and a switch); else traffic goes through the host."""


_GB = 1e9
_PCIE4, _PCIE5 = 25e9, 55e9
"""What a copy from pinned memory reaches over 16 lanes, of 32 and 64 GB/s."""

CHIPS: dict[str, Chip] = {
    "a100-40": Chip("A100 40GB SXM", 42.4e9, 1.555e12, 312e12, 271e12, 300e9, _PCIE4, "a100-40"),
    "a100": Chip("A100 80GB SXM", 85.1e9, 2.039e12, 312e12, 271e12, 300e9, _PCIE4, "a100"),
    "h100": Chip("H100 80GB SXM", 84.94e9, 3.352e12, 989e12, 794e12, 450e9, _PCIE5, "h100"),
    "h100-500w": Chip("H100 96GB, 500 W, HBM2e", 101.9e9, 2.4e12, 989e12, 0.8 * 794e12, 450e9, _PCIE5, None),
    "h100-pcie": Chip("H100 80GB PCIe", 84.9e9, 2.039e12, 756e12, 0.8 * 756e12, 55e9, _PCIE5, None, False),
    "h200": Chip("H200 141GB SXM", 151.4e9, 4.8e12, 989e12, 794e12, 450e9, _PCIE5, "h200"),
    "b200": Chip("B200 180GB SXM", 191.5e9, 7.672e12, 2250e12, 1745e12, 900e9, _PCIE5, "b200"),
    "l40s": Chip("L40S 48GB", 47.7e9, 0.864e12, 362e12, 0.8 * 362e12, 28e9, _PCIE4, "l40s", False),
    "rtx4090": Chip("GeForce RTX 4090 24GB", 25.4e9, 1.008e12, 165e12, 0.8 * 165e12, 14e9, _PCIE4, "rtx4090", False),
    "rtx3090": Chip("GeForce RTX 3090 24GB", 25.3e9, 0.936e12, 71e12, 0.8 * 71e12, 14e9, _PCIE4, "rtx3090", False),
}
"""GeForce boards have no peer-to-peer in the stock driver: a byte crosses PCIe twice, which halves 28 GB/s."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind in equal hosts."""

    gpu: str = "h100"
    per_host: int = 8
    network_gbps: float | None = None
    """Gigabits per second of network per GPU, one way; None takes 400 for NVLink hosts of today (A100: 200) and 25
    for a card in a PCIe slot."""

    def __post_init__(self):
        if self.gpu not in CHIPS:
            raise ValueError(f"gpu {self.gpu!r} is unknown. Known are {', '.join(CHIPS)}.")
        if self.per_host < 1:
            raise ValueError(f"per_host is {self.per_host}; it counts GPUs in a host, so use 1 or more.")
        if self.network_gbps is not None and not 0 < self.network_gbps < math.inf:
            raise ValueError(f"network_gbps is {self.network_gbps}; use gigabits per second and GPU, such as 400.")

    @property
    def chip(self) -> Chip:
        return CHIPS[self.gpu]

    @property
    def network(self) -> float:
        """Bytes per second and GPU over the network, one way."""
        if self.network_gbps is not None:
            return self.network_gbps / 8 * _GB
        return (25 if not self.chip.is_switched else 200 if self.gpu.startswith("a100") else 400) / 8 * _GB

    def seconds(self, size: float, group: int, spread: int = 1) -> float:
        """Time of an all-gather or reduce-scatter of `size` bytes (the whole array) over `group` GPUs.

        spread: ranks between neighbours in the group: 1 for shards, which fill hosts, S for replicas of S shards.
        An all-reduce takes twice as long. See Note [Time of a collective].
        """
        if group < 2 or not size:
            return 0.0
        together = max(1, min(group, self.per_host // spread))  # members of the group in one host
        efficiency = _NVLINK_EFFICIENCY if self.chip.is_switched else _PCIE_EFFICIENCY
        near = efficiency * self.chip.link / (1 + (_HALF_SPEED / size) ** 0.71)
        received = size * (group - 1) / group
        if together == group:
            return received / near
        far = _NETWORK_EFFICIENCY * self.network * together
        return received / min(near, far) + _HOP_SECONDS * (group - 1)
