"""The check at the start of a run with offload. See Note [The check at the start] in `offload.py`.

Owns the cut of a run to two layers, the comparison, and the file of verdicts. Nothing here runs without offload.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jfsdp import offload
from jfsdp.layout import Plan

STEPS, LAYERS = 2, 2


def check(step, state, batch, activations: tuple[offload.OffloadActivations, ...]) -> None:
    """Refuse to train when offload changes results here; looks it up where it has been tried before.

    activations: what the loss was seen to offload while it was traced.
    Raises: RuntimeError naming what differs.
    """
    plan = step.plan
    device = plan.mesh.devices.flat[0]
    asked = (plan.offload, *sorted(set(activations), key=repr))
    where = (jax.__version__, device.platform, device.device_kind)
    name = " | ".join(map(repr, (*where, *asked, plan.precision, step.accumulate, step.options)))
    verdicts = _read()
    if name not in verdicts:
        verdicts[name] = _difference(step, state, batch)
        _write(verdicts)
    if verdicts[name]:
        raise RuntimeError(
            f"offload gives wrong results here: {verdicts[name]} (JAX {jax.__version__}, {device.device_kind}, "
            f"{LAYERS} layers of this model, with {', '.join(map(repr, asked))} and without). "
            f"Train without it, or use another version of JAX; the verdict is kept in {_file()}."
        )


def _difference(step, state, batch) -> str:
    """What differs between a short run with offload and one without, in words; "" when nothing does."""
    start, got, losses = _run(step, state, batch, step.plan.offload)
    with offload.suspended():
        start, want, others = _run(step, state, batch, offload.OffloadPolicy())
    # Two programs that differ in rounding: bf16 keeps 3 digits. What is read from the wrong place is off by its size.
    tolerance = 1e-3 if step.plan.precision.param_dtype in (None, jnp.float32, jnp.float64) else 5e-2
    for i, (a, b) in enumerate(zip(losses, others)):
        if not abs(a - b) <= tolerance * max(abs(b), 1e-6):
            return f"the loss of step {i} is {a:.6g} and should be {b:.6g}"
    for leaf, before, a, b in zip(step.plan.leaves, start, got, want):
        moved, off = (float(jnp.linalg.norm((x - y).astype(jnp.float32))) for x, y in ((b, before), (a, b)))
        if not off <= 50 * tolerance * moved:
            return f"{leaf.path} is off by {off / max(moved, 1e-30):.2g} of its way after {STEPS} steps"
    return ""


def _run(step, state, batch, policy):
    """Parameters before and after, and losses, of two layers of the model under another offload policy."""
    plan = _cut(step.plan, policy)

    def first_layers(leaf, w):
        return jax.device_put(jnp.copy(w if leaf.layers is None else w[: leaf.layers]), plan.rest_sharding(leaf))

    params = plan.map(first_layers, offload.fetched(state.params))
    start = jax.tree.leaves(offload.fetched(params))
    run = step.with_plan(plan)
    short = type(state).create(params, run.optimizer.tx, plan, buffers=state.buffers, ema=state.ema is not None)
    short, losses = replace(short, scale=jax.tree.map(jnp.copy, state.scale)), []
    for _ in range(STEPS):
        short, metrics = run.jitted(short, batch)
        losses.append(float(metrics["loss"]))
    return start, jax.tree.leaves(offload.fetched(short.params)), losses


def _cut(plan: Plan, policy: offload.OffloadPolicy) -> Plan:
    layouts = plan.map(lambda leaf: leaf if leaf.layers is None else replace(leaf, layers=min(leaf.layers, LAYERS)))
    return replace(plan, layouts=layouts, offload=policy)


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jfsdp" / "offload.json"


def _read() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(_file().read_text()))
    return {}


def _write(verdicts: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a cache: where it cannot be kept, the next run checks again
        _file().parent.mkdir(parents=True, exist_ok=True)
        scratch = _file().with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(verdicts, indent=1))
        scratch.replace(_file())
