"""What to run: strategies, meshes and checkpointing that fit, ranked by predicted speed, each with its reason.

Owns the search and the advice that comes before it: whether anything needs to be sharded at all, and from where on more
GPUs save nothing. Every figure is `forecast.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jfsdp.planning.forecast import GIB, Forecast
from jfsdp.planning.workload import Workload

LORA = "8,16,all"
"""What advice tries where training everything does not fit; any family has these targets."""
ACTIVATIONS = ("activations saved", "activations at work")
"""What grows with the batch."""
STATE = ("parameters", "optimizer", "gradients")
FOUR_BITS = 0.55
"""Bytes of a weight quantised to 4 bits, with its part of a block's scale."""
RECOMPUTED = {
    "none": "nothing computed twice",
    "dots": "all but matmuls computed twice",
    "full": "activations computed twice",
}


@dataclass(frozen=True)
class Choice:
    """One way to run a workload."""

    forecast: Forecast
    largest_batch: int
    """Sequences per GPU and micro-batch that fit, by powers of two."""
    reason: str

    @property
    def work(self) -> Workload:
        return self.forecast.work


def advice(work: Workload) -> Iterator[str]:
    """What to know before choosing: one sentence each."""
    alone = Forecast(replace(work, mesh="1x1", strategy=None))
    state = sum(k.bytes for k in alone.kept if k.name in STATE)
    if alone.fits:
        yield f"One GPU is enough ({_gib(alone.needed)} of {_gib(alone.capacity)}), so NO_SHARD works on any mesh."
    else:
        yield (
            f"The model's state is {_gib(state)} and a {work.cluster.chip.name} has "
            f"{_gib(work.cluster.chip.memory)}{_instead(work, alone)}."
        )
    if not Forecast(work).fits:
        yield from _offloaded(work)
    full = Forecast(replace(work, strategy="FULL_SHARD"))
    floor = sum(k.bytes for k in full.kept if k.name in (*ACTIVATIONS, "gathered window", "reduce staging"))
    if floor > full.capacity:
        yield (
            f"No number of GPUs is enough at this batch: whole layers and activations alone take {_gib(floor)}. "
            "Use remat full, fewer tokens per GPU, or smaller units."
        )
    else:
        fewest = math.ceil(state / max(full.capacity - floor, 1))
        enough = math.ceil(state / (0.1 * floor))
        yield (
            f"FULL_SHARD fits from about {fewest} GPUs on. Whole layers and activations take {_gib(floor)} however "
            f"many there are; from about {enough} GPUs on, further ones save less than a tenth of that."
        )


def _offloaded(work: Workload) -> Iterator[str]:
    """Whether these GPUs hold it with the memory of their hosts, and the least that must lie there."""
    for name in ("optimizer", "all") if work.offload == "none" else ():
        there = Forecast(replace(work, offload=name))
        if there.fits:
            hosts = f"{_gib(there.per_host)} in the memory of each host"
            yield f"--offload {name} fits these {work.devices} ({_gib(there.needed)} each, {hosts})."
            return


def _instead(work: Workload, alone: Forecast) -> str:
    """What fits one GPU instead of training everything, or these GPUs where they do not hold that either."""
    if work.lora is not None:
        return ", so it must be sharded"
    lora = Forecast(replace(alone.work, lora=LORA))
    quantised = lora.needed - (work.compute_dtype.itemsize - FOUR_BITS) * alone.work.plan.num_params
    base = f"LoRA on a frozen {work.precision} base (--lora {LORA})"
    if lora.fits:
        return f". {base} fits one GPU ({_gib(lora.needed)}), without sharding"
    words = ", so it must be sharded"
    if quantised <= alone.capacity:
        words = f". LoRA on a base quantised to 4 bits, which jfsdp does not store, would fit one ({_gib(quantised)})"
    here = Forecast(replace(work, lora=LORA))
    if here.fits and not Forecast(work).fits:
        words += f". {base} fits these {work.devices} ({_gib(here.needed)} each), training everything does not"
    return words


def recommend(work: Workload, most: int = 8) -> list[Choice]:
    """Choices that fit, fastest first; empty when none does. The workload's own batch and sequence length are kept."""
    found = [Forecast(one) for one in _candidates(work)]
    fitting = sorted((f for f in found if f.fits), key=lambda f: (-round(f.timing.tokens_per_second, 3), f.needed))
    seen: list[Choice] = []
    for forecast in fitting[:most]:
        seen.append(Choice(forecast, _largest_batch(forecast), _reason(forecast, fitting[0])))
    return seen


def _candidates(work: Workload) -> Iterator[Workload]:
    devices = work.devices
    meshes = [f"1x{devices}"]
    fits = lambda s: devices <= work.per_host or not work.per_host % s or not s % work.per_host
    meshes += [f"{devices // s}x{s}" for s in _divisors(devices) if 1 < s < devices and fits(s)]
    for remat in RECOMPUTED:
        for mesh in meshes:
            names = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD"]
            for name in names if mesh == meshes[0] else ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]:
                yield replace(work, mesh=mesh, strategy=name, remat=remat)


def _divisors(n: int) -> list[int]:
    """Shard counts worth a look: powers of two, and what is left when they are divided out."""
    return [d for d in range(2, n + 1) if n % d == 0 and (d & (d - 1) == 0)]


def _largest_batch(forecast: Forecast) -> int:
    """From what depends on the batch, which grows with it."""
    per_batch = sum(k.bytes for k in forecast.kept if k.name in ACTIVATIONS) / forecast.work.batch
    batch = forecast.work.batch
    while per_batch and forecast.needed + (2 * batch - forecast.work.batch) * per_batch <= forecast.capacity:
        batch *= 2
        if batch >= 1024:
            break
    return batch


def _reason(forecast: Forecast, best: Forecast) -> str:
    work, timing = forecast.work, forecast.timing
    placement = work.plan.placement
    parts = []
    if forecast is best:
        parts.append("fastest that fits")
    if placement.whole_at_rest and not placement.shard_axes:
        parts.append("nothing sharded, one all-reduce")
    elif placement.whole_at_rest:
        parts.append("weights whole, so no gathers")
    elif not placement.reshard_after_forward:
        parts.append("weights kept from forward to backward: one gather")
    else:
        parts.append("weights freed after forward")
    if placement.replica_axes:
        inside = placement.shards <= work.per_host
        parts.append("gathers inside a host" if inside else "gathers across hosts")
    elif work.devices > work.per_host and placement.shard_axes and not placement.whole_at_rest:
        parts.append("gathers across hosts")
    parts.append(RECOMPUTED[work.remat])
    if timing.exposed > 0.05 * timing.seconds:
        parts.append(f"{timing.exposed / timing.seconds:.0%} of a step waits")
    return ", ".join(parts)


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
