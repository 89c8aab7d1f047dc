"""How long a step takes, by formula: compute on one lane, communication on another, unit by unit.

Owns the model of time; `hardware.py` has the figures of GPUs and links, `plan.py` the bytes. What comes out is an
estimate: `benchmarks/plan_accuracy.py` scores it against published runs and fits the constants below on a declared few.

Note [Two lanes]
A unit's forward pass takes its matmuls at the rate that matmuls reach in training, its attention at a part of that
(the causal half only), and what lies between the matmuls at the bandwidth of the memory. The backward pass takes twice
the matmuls (once where weights are frozen), two and a half times the attention, and what checkpointing computes again.
Beside it, one unit is gathered ahead and one reduced behind: an iteration takes as long as the longer lane, and compute
is slowed while the other lane moves bytes, because both share the GPU. The first gather and the last reduction have
nothing to hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jfsdp.planning.hardware import Cluster

RECOMPUTED = {"none": (0.0, 0.0, 0.0), "selective": (0.5, 0.0, 1.0), "dots": (0.0, 1.0, 1.0), "full": (1.0, 1.0, 1.0)}
"""Parts of the forward pass that the backward pass repeats: matmuls, attention, what lies between. "selective" is what
published PyTorch runs call so: every second matmul is kept, and attention."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What no data sheet says. Fitted; see the module's docstring."""

    matmul: float = 0.71
    """Of the rate that large matmuls reach alone, what a training step reaches on GPUs that throttle (Hopper and
    later)."""
    matmul_ampere: float = 0.91
    attention: float = 0.44
    """Rate of attention over that of matmuls."""
    between: float = 20.0
    """Numbers per token and width that a compiled layer's forward pass moves between its matmuls."""
    between_eager: float = 40.0
    """The same where every operation is a kernel of its own."""
    slowdown: float = 0.3
    """Seconds of compute lost per second of communication beside it."""
    memory: float = 0.85
    """Of the memory's bandwidth, what kernels reach."""
    low: float = 0.75
    """A step may take this much less than said, ..."""
    high: float = 1.35
    """... or this much more: nine of ten held-out runs lie between."""

    def matmuls(self, cluster: Cluster) -> float:
        """Operations per second of bf16 matmuls in a training step."""
        throttles = not cluster.gpu.startswith(("a100", "rtx", "l40"))
        return cluster.chip.matmul * (self.matmul if throttles else self.matmul_ampere)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer and a batch, as far as time goes. Per device and micro-batch."""

    layers: int
    layer_params: float
    """In matmuls of one layer."""
    active_params: float | None = None
    """Of these, those that one token goes through; None is all, as where there are no experts."""
    trained_params: float | None = None
    """Of a layer's, those that have gradients; None is all."""
    head_params: float
    """In the head's matmul: vocabulary x width."""
    is_head_trained: bool = True
    params: float
    """All that the optimizer updates."""
    width: int
    attention: float
    """Operations of attention per token and layer, forward, causal half."""
    tokens: float
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """How it is trained, as far as time goes."""

    shards: int = 1
    replicas: int = 1
    gathers: int = 2
    """Of each unit in a step: 2 where it is freed after the forward pass, 1 where it is kept, 0 where it is whole."""
    wire_bytes: int = 2
    """Of a gathered number."""
    reduce_bytes: int = 4
    state_bytes: float = 28.0
    """Moved by the optimizer per parameter of a device; 0 where the host does it."""
    host_bytes: float = 0.0
    """Moved between the memories of a device and its host."""
    checkpointing: str = "full"
    accumulate: int = 1
    reduces_each: bool = True
    """Whether every micro-batch reduces its gradients."""
    prefetch: bool = True
    late_reduce: bool = True
    recomputes_logits: bool = True
    """Whether the head is streamed, which runs its matmul once more."""
    is_fp32: bool = False
    is_eager: bool = False


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one optimizer step."""

    forward: float
    backward: float
    head: float
    optimizer: float
    exposed: float
    """Communication that nothing hides."""
    communication: float
    """All of it, hidden or not."""
    slowed: float
    """What compute loses to communication beside it."""
    copies: float
    """Between the memories of device and host, counted as if nothing hid them."""
    tokens: float
    model_flops: float
    peak: float
    low: float
    high: float

    @property
    def seconds(self) -> float:
        return sum((self.forward, self.backward, self.head, self.optimizer, self.exposed, self.slowed, self.copies))

    @property
    def range(self) -> tuple[float, float]:
        return self.seconds * self.low, self.seconds * self.high

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Operations that training the model takes, none counted twice, over the peak for bf16."""
        return self.model_flops * self.tokens_per_second / self.peak


def step_time(shape: Shape, run: Run, cluster: Cluster, rates: Rates = Rates()) -> Timing:
    """See Note [Two lanes].

    Raises: ValueError for a kind of checkpointing that is not known.
    """
    if run.checkpointing not in RECOMPUTED:
        raise ValueError(f"checkpointing {run.checkpointing!r} is unknown. Use one of {', '.join(RECOMPUTED)}.")
    chip, number = cluster.chip, 4 if run.is_fp32 else 2
    rate = rates.matmuls(cluster) / (2 if run.is_fp32 else 1)  # TF32
    bandwidth = chip.bandwidth * rates.memory
    passes = rates.between_eager if run.is_eager else rates.between

    active = shape.layer_params if shape.active_params is None else shape.active_params
    trained = 1.0 if shape.trained_params is None else shape.trained_params / shape.layer_params
    matmul = 2 * active * shape.tokens / rate
    attention = shape.attention * shape.tokens / (rate * rates.attention)
    between = passes * shape.tokens * shape.width * number / bandwidth
    again = sum(part * t for part, t in zip(RECOMPUTED[run.checkpointing], (matmul, attention, between)))
    forward = matmul + attention + between
    backward = (1 + trained) * matmul + 2.5 * attention + 2 * between + again
    head_flops = 6 if shape.is_head_trained else 4
    head = (head_flops + 2 * run.recomputes_logits) * shape.head_params * shape.tokens / rate
    head += 6 * shape.vocabulary * shape.tokens * 4 / bandwidth

    unit = shape.layer_params
    gather = cluster.seconds(unit * run.wire_bytes, run.shards) if run.gathers else 0.0
    reduce = cluster.seconds(trained * unit * run.reduce_bytes, run.shards) * (1 if run.gathers else 2)
    replicate = 2 * cluster.seconds(trained * unit * run.reduce_bytes / run.shards, run.replicas, spread=run.shards)
    again_gather = gather if run.gathers > 1 else 0.0
    lanes = _Lanes(rates.slowdown)
    for micro in range(run.accumulate):
        last = micro == run.accumulate - 1
        reduced = reduce if run.reduces_each or last else 0.0
        copies = replicate if last else 0.0
        lanes.beside(shape.layers, forward, gather if run.prefetch else 0.0)
        lanes.beside(shape.layers, backward, again_gather if run.prefetch else 0.0)
        if run.late_reduce:  # the same iterations hide the reductions
            lanes.beside_more(shape.layers, backward, again_gather if run.prefetch else 0.0, reduced + copies)
        alone = gather + reduced + copies  # first and last unit
        if not run.prefetch:
            alone += shape.layers * (gather + again_gather)
        if not run.late_reduce:
            alone += shape.layers * (reduced + copies)
        lanes.alone(alone)
    n = run.accumulate
    return Timing(
        forward=n * shape.layers * forward,
        backward=n * shape.layers * backward,
        head=n * head,
        optimizer=run.state_bytes * shape.params / run.shards / bandwidth,
        exposed=lanes.exposed,
        communication=lanes.communication,
        slowed=lanes.slowed,
        copies=run.host_bytes / chip.host,
        tokens=n * shape.tokens,
        model_flops=shape.layers * ((4 + 2 * trained) * active + 6 * shape.attention) + head_flops * shape.head_params,
        peak=chip.peak,
        low=rates.low,
        high=rates.high,
    )


class _Lanes:
    """Adds up what communication costs beside compute."""

    def __init__(self, slowdown: float):
        self.slowdown = slowdown
        self.exposed = self.communication = self.slowed = 0.0

    def beside(self, times: int, compute: float, moved: float) -> None:
        slowed, exposed = self._cost(compute, moved)
        self.slowed, self.exposed = self.slowed + times * slowed, self.exposed + times * exposed
        self.communication += times * moved

    def beside_more(self, times: int, compute: float, already: float, moved: float) -> None:
        """What `moved` adds in iterations that move `already`."""
        before, after = self._cost(compute, already), self._cost(compute, already + moved)
        self.slowed += times * (after[0] - before[0])
        self.exposed += times * (after[1] - before[1])
        self.communication += times * moved

    def alone(self, moved: float) -> None:
        self.exposed, self.communication = self.exposed + moved, self.communication + moved

    def _cost(self, compute: float, moved: float) -> tuple[float, float]:
        slowed = self.slowdown * min(compute, moved)
        return slowed, max(0.0, moved - compute - slowed)


def tokens_to_hide(shape: Shape, run: Run, cluster: Cluster, rates: Rates = Rates()) -> float:
    """Tokens per device above which a unit's gather hides behind the forward pass of the one before."""
    one = step_time(replace(shape, tokens=1.0), replace(run, accumulate=1), cluster, rates)
    gather = cluster.seconds(shape.layer_params * run.wire_bytes, run.shards) if run.gathers else 0.0
    return gather / (one.forward / shape.layers)
