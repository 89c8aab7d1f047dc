"""Step time of our own step against annotations and against gather-in-body, in turn, in one process.

    python -m benchmarks.step_time                       # fp32 and bf16 on 1x2, 1x4 and 2x2, 15 pairs each
    python -m benchmarks.step_time --dtype fp32 --mesh 1x2 --pairs 5 --json times.json

Simulated CPU devices: nothing overlaps there, so this shows what the schedule costs, not what it hides. Figures are
ratios, ours over theirs, pair by pair, because absolute times of a shared machine drift. The same Llama shape, data,
AdamW and attention on both sides, fp32 masters; both report the gradient's norm. XLA computes bf16 in fp32 on a CPU,
and what a schedule carries from layer to layer is then converted to and fro: those rows measure that, too.

By itself XLA's CPU compiler also copies twice what a loop carries; it is told to analyse regions, for both sides, and
then it does not. To see the difference, name the flag yourself:
    XLA_FLAGS=--xla_cpu_copy_insertion_use_region_analysis=false python -m benchmarks.step_time
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks import annotations
from jfsdp.mesh import make_mesh, parse_mesh, simulate_devices
from jfsdp.precision import MixedPrecision
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.wrap import init_sharded
from models import llama

SHAPE = annotations.Config(
    width=256, layers=8, heads=8, kv_heads=4, inner_width=768, vocabulary=2048, tokens=256, batch=2
)

ANALYSE = "--xla_cpu_copy_insertion_use_region_analysis"
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def ours(mesh, shape: annotations.Config) -> Callable[[], Any]:
    """A function that takes one more step and waits for it."""
    config = llama.Config(
        vocab_size=shape.vocabulary, width=shape.width, num_layers=shape.layers, num_heads=shape.heads,
        num_kv_heads=shape.kv_heads, inner_width=shape.inner_width, attention="chunked", tied=False,
    )  # fmt: skip
    params, plan = init_sharded(
        lambda: llama.build(config, rngs=nnx.Rngs(0)), mesh=mesh, mp_policy=MixedPrecision(param_dtype=shape.dtype)
    )
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    step = train_step(lambda m, b, k: m.loss(*b), tx, plan, nonfinite="ignore")
    tokens, targets = _tokens(mesh, shape)
    batch = jax.device_put((tokens, targets, np.ones(tokens.shape, np.float32)), plan.batch_sharding)
    state = TrainState.create(params, tx, plan)

    def once():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"].block_until_ready()

    return once


def theirs(mesh, shape: annotations.Config, variant: str) -> Callable[[], Any]:
    built = annotations.build(shape, mesh, variant, log_norm=True)
    state = built.init(jax.random.key(0))
    batch = jax.device_put(_tokens(mesh, shape), jax.sharding.NamedSharding(mesh, annotations.BATCH))

    def once():
        nonlocal state
        state, (loss, _) = built.step(state, *batch)
        return loss.block_until_ready()

    return once


def compare(a: Callable, b: Callable, pairs: int) -> list[float]:
    """Ratios a/b of `pairs` steps taken in turn, after two of each that are not counted."""
    for once in (a, b, a, b):
        once()
    ratios = []
    for i in range(pairs):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        times = {}
        for once in (first, second):
            began = time.perf_counter()
            once()
            times[once] = time.perf_counter() - began
        ratios.append(times[a] / times[b])
    return ratios


def _tokens(mesh, shape: annotations.Config):
    rows = np.random.default_rng(0).integers(0, shape.vocabulary, (shape.batch * mesh.size, shape.tokens + 1), np.int32)
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", nargs="+", default=["1x2", "1x4", "2x2"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="compute dtypes")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the ratios here as well")
    args = parser.parse_args()
    if ANALYSE not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ANALYSE}=true".strip()
    simulate_devices(max(int(np.prod(parse_mesh(m, 1))) for m in args.mesh))
    table = Table(title="step time, ours / theirs (simulated CPU devices)")
    for column in ("compute", "mesh", "against", "median", "least", "most"):
        table.add_column(column)
    rows = []
    for dtype, text, variant in itertools.product(args.dtype, args.mesh, annotations.VARIANTS):
        mesh = make_mesh(text, devices=jax.devices()[: int(np.prod(parse_mesh(text, 1)))])
        shape = replace(SHAPE, dtype=DTYPES[dtype])
        ratios = compare(ours(mesh, shape), theirs(mesh, shape, variant), args.pairs)
        rows.append({"compute": dtype, "mesh": text, "against": variant, "ratios": ratios})
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        table.add_row(dtype, text, variant, f"{median:.3f}", f"{least:.3f}", f"{most:.3f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
