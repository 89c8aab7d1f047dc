"""Temporary memory and compile time of our step, beside gather-in-body and annotations, from the compiled program.

    python -m benchmarks.program                    # 8 simulated CPU devices
    python -m benchmarks.program --json program.json

Memory is XLA's own figure for one device. Compile time is the least of three, at 8 and at 64 layers.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks import annotations
from benchmarks.step_time import SHAPE
from jfsdp import plan
from jfsdp.audit import program as audit
from jfsdp.mesh import make_mesh, simulate_devices
from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.wrap import plan_module
from models import llama

MIB = 2**20
VARIANTS = {
    "depth 0, reduced at once": Schedule(prefetch=0, late_reduce=False),
    "depth 1, reduced at once": Schedule(prefetch=1, late_reduce=False),
    "depth 2, reduced at once": Schedule(prefetch=2, late_reduce=False),
    "depth 1, reduced late (default)": Schedule(),
}


def ours(mesh, shape: annotations.Config, schedule: Schedule):
    """The lowered step of our engine for the rivals' shape, and bytes of one gathered unit."""
    config = llama.Config(
        vocab_size=shape.vocabulary,
        width=shape.width,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        inner_width=shape.inner_width,
        attention="chunked",
        tied=False,
    )
    made = plan_module(
        lambda: llama.build(config, rngs=nnx.Rngs(0), schedule=schedule),
        mesh=mesh,
        mp_policy=MixedPrecision(param_dtype=jnp.bfloat16),
    )
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    step = train_step(lambda m, b, k: m.loss(*b), tx, made, nonfinite="ignore")
    ids = jax.ShapeDtypeStruct((shape.batch * mesh.size, shape.tokens), jnp.int32, sharding=made.batch_sharding)
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32, sharding=made.batch_sharding)
    state = TrainState.abstract(tx, made)
    return step.lower(state, (ids, ids, weights)), plan.unit_bytes(made)


def theirs(mesh, shape: annotations.Config, variant: str):
    built = annotations.build(shape, mesh, variant)
    return built.step.lower(*built.arguments)


def compile_seconds(lower, times: int = 3) -> float:
    """Least of some compiles, nothing cached."""
    best = float("inf")
    for _ in range(times):
        jax.clear_caches()
        lowered = lower()
        began = time.perf_counter()
        lowered.compile()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    simulate_devices(8)
    mesh = make_mesh("1x8")
    table = Table(title="temporary memory of a step, MiB per device (8 simulated CPU devices)")
    for column in ("program", "MiB", "gathered units over the first row"):
        table.add_column(column)
    figures, first, unit = {}, None, 1.0
    for name, schedule in VARIANTS.items():
        lowered, unit = ours(mesh, SHAPE, schedule)
        figures[name] = audit.memory(lowered.compile()).temp
    for variant in annotations.VARIANTS:
        figures[variant] = audit.memory(theirs(mesh, SHAPE, variant).compile()).temp
    for name, size in figures.items():
        first = first if first is not None else size
        table.add_row(name, f"{size / MIB:,.1f}", f"{(size - first) / unit:+.2f}")
    console = Console()
    console.print(table)
    seconds = {
        layers: compile_seconds(lambda n=layers: ours(mesh, replace(SHAPE, layers=n), Schedule())[0])
        for layers in (8, 64)
    }
    ratio = seconds[64] / seconds[8]
    console.print(f"compile, least of 3: {seconds[8]:.2f} s at 8 layers, {seconds[64]:.2f} s at 64, ratio {ratio:.2f}")
    if args.json:
        rows = {"temporary_bytes": figures, "unit_bytes": unit, "compile_seconds": seconds}
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
