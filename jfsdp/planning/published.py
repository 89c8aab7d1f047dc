"""Published ways to count the memory and traffic of sharded training, by name.

Owns the arithmetic of papers and tutorials, which round differently from a run: no padding, no vocabulary of its own,
equal units. `plan.py` counts what this library does; both stand side by side in `jfsdp plan --published`.

Note [Conventions]
Bytes per parameter:     zero     2 parameters, 2 gradients, 12 optimizer (fp32 copy and two moments): ZeRO, Adam
                         fp32     4 parameters, 4 gradients, 8 optimizer (two moments)
What SHARD_GRAD_OP is:   whole    parameters stay whole on every device (ZeRO-2 and FSDP between forward and backward)
                         at_rest  parameters are cut too between steps, and whole from forward to backward (PyTorch)
Gathered window:         two units in the forward pass (one computes, one is ahead), three in the backward pass
Traffic, in passes over the parameters: all-reduce 2 (DDP), FULL_SHARD 3, SHARD_GRAD_OP 2
All figures are exact divisions; GB are 1e9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Accounting(NamedTuple):
    """Bytes per parameter of one convention."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


ACCOUNTINGS = {"zero": Accounting(2, 2, 12), "fp32": Accounting(4, 4, 8)}
_CUT = {  # parameters, gradients, optimizer: cut or whole
    "NO_SHARD": (False, False, False),
    "SHARD_OPT": (False, False, True),
    "SHARD_GRAD_OP": (False, True, True),
    "FULL_SHARD": (True, True, True),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model as papers count it: `params` parameters in `units` equal units over `devices`."""

    params: float
    devices: int
    units: int = 1
    accounting: str = "zero"
    shard_grad_op: str = "whole"

    def __post_init__(self):
        if self.accounting not in ACCOUNTINGS:
            raise ValueError(f"accounting {self.accounting!r} is unknown. Use one of {', '.join(ACCOUNTINGS)}.")
        if self.shard_grad_op not in ("whole", "at_rest"):
            raise ValueError(f"shard_grad_op is {self.shard_grad_op!r}. Use whole or at_rest.")
        for name in ("params", "devices", "units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a count, so use 1 or more.")

    def state(self, strategy: str) -> float:
        """Bytes of parameters, gradients and optimizer on one device between steps."""
        if strategy not in _CUT:
            raise ValueError(f"strategy {strategy!r} has no published count. Use one of {', '.join(_CUT)}.")
        cut = _CUT[strategy]
        if strategy == "SHARD_GRAD_OP" and self.shard_grad_op == "at_rest":
            cut = _CUT["FULL_SHARD"]
        each = ACCOUNTINGS[self.accounting]
        return sum(self.params * size / (self.devices if is_cut else 1) for size, is_cut in zip(each, cut))

    def saved(self, strategy: str) -> float:
        """Bytes that a device holds less than under NO_SHARD."""
        return self.state("NO_SHARD") - self.state(strategy)

    def window(self, *, backward: bool = False, number_bytes: int = 2) -> float:
        """Bytes of whole parameters alive at once under FULL_SHARD."""
        return (3 if backward else 2) * self.params * number_bytes / self.units

    def peak(self) -> float:
        """State and forward window under FULL_SHARD."""
        return self.state("FULL_SHARD") + self.window()

    def traffic(self, strategy: str, *, gather_bytes: int = 2, reduce_bytes: int = 2) -> float:
        """Bytes per device and step on the wire of a large ring; an all-reduce counts as its two halves."""
        if strategy not in _CUT:
            raise ValueError(f"strategy {strategy!r} has no published count. Use one of {', '.join(_CUT)}.")
        gathers = {"FULL_SHARD": 2, "SHARD_GRAD_OP": 1, "SHARD_OPT": 1, "NO_SHARD": 0}[strategy]
        reductions = 2 if strategy == "NO_SHARD" else 1
        return self.params * (gathers * gather_bytes + reductions * reduce_bytes)


def activations(sequences: int, tokens: int, width: int, number_bytes: int = 2) -> int:
    """Bytes of one layer's input, which is what full checkpointing saves per layer."""
    return sequences * tokens * width * number_bytes
