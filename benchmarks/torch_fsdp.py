"""Step time of our step against PyTorch's `fully_shard` (FSDP2), in turn, on the same two CPU cores.

    python -m benchmarks.torch_fsdp                                     # torch in this environment
    python -m benchmarks.torch_fsdp --torch-python ~/torch/bin/python   # torch in another one
    python -m benchmarks.torch_fsdp --precision bf16 --remat none --pairs 5 --json torch.json

The same Llama on both sides (preset `llama-30m`, 256 tokens a sequence), the same batch, AdamW, gradient norm. Theirs:
two processes of one thread, gloo, eager, `F.scaled_dot_product_attention`, fused AdamW. Ours: two simulated devices in
one process. Sides live in processes of their own and wait for a word on their standard input, so only one computes at
a time; figures are ratios, ours over theirs, turn by turn. Beside wall time stands processor time, which a busy machine
disturbs less. This shows how the CPU compiler compares with PyTorch's kernels; it says nothing about GPUs.

This file also runs where jax is not installed (`--worker torch`), so it imports both frameworks late.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SHARDS = 2
INSTALL = (
    "PyTorch is not installed for {python}, so there is nothing to compare with. Install the extra "
    "(python -m pip install -e '.[torch]'), or name a Python that has it: --torch-python PATH."
)


class Setting(NamedTuple):
    """One row: what both sides run."""

    precision: str
    """fp32, or bf16: compute and gathers in bf16, masters and reductions in fp32."""
    remat: str
    """Activation checkpointing of each block: full or none."""
    shape: dict[str, Any]
    """Fields of `models.llama.Config`."""
    batch: int
    """Sequences per device."""
    tokens: int
    """Tokens per sequence."""


class Turn(NamedTuple):
    """What one side spent per step of one turn, in seconds."""

    wall: float
    cpu: float


# ------------------------------------------------------------------------------------------ the two sides in turn


class Side:
    """The processes of one framework, asleep until told to take steps."""

    def __init__(self, commands: list[list[str]]):
        env = dict(os.environ, OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")
        pipe = subprocess.PIPE
        self._children = [subprocess.Popen(c, stdin=pipe, stdout=pipe, text=True, env=env) for c in commands]
        self.loss = float("nan")

    def take(self, steps: int) -> Turn:
        for child in self._children:
            child.stdin.write(f"{steps}\n")
            child.stdin.flush()
        answers = [self._answer(child) for child in self._children]
        self.loss = answers[0]["loss"]
        return Turn(max(a["wall"] for a in answers) / steps, sum(a["cpu"] for a in answers) / steps)

    def close(self) -> None:
        for child in self._children:
            child.stdin.close()
        for child in self._children:
            child.wait(timeout=60)

    @staticmethod
    def _answer(child: subprocess.Popen) -> dict[str, float]:
        for line in child.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{' '.join(child.args[:3])} ... ended with {child.wait()}; its own words are above.")


@contextmanager
def sides(setting: Setting, torch_python: str) -> Iterator[tuple[Side, Side]]:
    """Ours and theirs, ready to take steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = json.dumps(setting)
        ours = Side([[sys.executable, "-m", "benchmarks.torch_fsdp", "--worker", "ours", "--setting", words]])
        worker = [torch_python, str(Path(__file__).resolve()), "--worker", "torch", "--setting", words]
        store = ["--store", str(Path(folder, "store"))]
        theirs = Side([[*worker, *store, "--rank", str(rank)] for rank in range(SHARDS)])
        yield ours, theirs
        ours.close()
        theirs.close()


def compare(ours: Side, theirs: Side, pairs: int, steps: int) -> list[tuple[Turn, Turn]]:
    """`pairs` turns of `steps` steps each, after one of each that is not counted; who goes first alternates."""
    for side in (ours, theirs):
        side.take(2)
    turns = []
    for i in range(pairs):
        first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        taken = {side: side.take(steps) for side in (first, second)}
        turns.append((taken[ours], taken[theirs]))
    return turns


def serve(once: Callable[[], float]) -> None:
    """Take as many steps as each line of standard input says, and answer with what they cost."""
    for line in sys.stdin:
        wall, cpu, loss = time.perf_counter(), time.process_time(), float("nan")
        for _ in range(int(line)):
            loss = once()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss}
        print(json.dumps(spent), flush=True)


def _batch(setting: Setting):
    import numpy as np

    size = (setting.batch * SHARDS, setting.tokens + 1)
    rows = np.random.default_rng(0).integers(0, setting.shape["vocab_size"], size, np.int32)
    return rows[:, :-1], rows[:, 1:]


# ------------------------------------------------------------------------------------------ ours


def our_step(setting: Setting) -> Callable[[], float]:
    from jfsdp.mesh import make_mesh, simulate_devices

    simulate_devices(SHARDS)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    from jfsdp.precision import MixedPrecision
    from jfsdp.state import TrainState
    from jfsdp.step import train_step
    from jfsdp.wrap import init_sharded
    from models import llama

    config = llama.Config(**setting.shape)
    params, plan = init_sharded(
        lambda: llama.build(config, rngs=nnx.Rngs(0), remat=setting.remat),
        mesh=make_mesh(f"1x{SHARDS}"),
        mp_policy=MixedPrecision(param_dtype={"bf16": jnp.bfloat16, "fp32": None}[setting.precision]),
    )
    tx = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
    step = train_step(lambda m, b, k: m.loss(*b), tx, plan, nonfinite="ignore")
    tokens, targets = _batch(setting)
    batch = jax.device_put((tokens, targets, np.ones(tokens.shape, np.float32)), plan.batch_sharding)
    state = TrainState.create(params, tx, plan)

    def once() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return once


# ------------------------------------------------------------------------------------------ theirs


def torch_step(setting: Setting, rank: int, store: str) -> Callable[[], float]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SHARDS)
    mesh = init_device_mesh("cpu", (SHARDS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if setting.precision == "bf16" else MixedPrecisionPolicy()
    model = torch_llama(setting)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    params = list(model.parameters())
    adamw = torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    own = slice(rank * setting.batch, (rank + 1) * setting.batch)
    tokens, targets = (torch.from_numpy(a[own].astype("int64")) for a in _batch(setting))

    def once() -> float:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.get_total_norm([p.grad for p in params]).full_tensor()  # we log the norm, so they do
        adamw.step()
        adamw.zero_grad()
        mean = loss.detach() / SHARDS
        dist.all_reduce(mean)
        return mean.item()

    return once


def torch_llama(setting: Setting):
    """models/llama.py in PyTorch: fused kernels where PyTorch has them, norms in fp32 inside `rms_norm`."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    c, T = setting.shape, setting.tokens
    width, h = c["width"], c["width"] // c["num_heads"]
    kv_heads = c["num_kv_heads"]

    def linear(d_in: int, d_out: int) -> nn.Linear:
        made = nn.Linear(d_in, d_out, bias=False)
        nn.init.normal_(made.weight, std=0.02)
        return made

    turns = c["rope_theta"] ** (-torch.arange(0, h, 2, dtype=torch.float32) / h)
    angle = torch.arange(T, dtype=torch.float32)[:, None] * turns
    cos, sin = angle.cos(), angle.sin()

    def rotate(x):  # [B, heads, T, h], halves of a head as pairs, in fp32
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_norm, self.mlp_norm = (nn.RMSNorm(width, eps=c["norm_eps"]) for _ in range(2))
            self.q, self.o = linear(width, width), linear(width, width)
            self.k, self.v = linear(width, kv_heads * h), linear(width, kv_heads * h)
            self.gate, self.up = linear(width, c["inner_width"]), linear(width, c["inner_width"])
            self.down = linear(c["inner_width"], width)

        def compute(self, x):
            B = x.shape[0]
            y = self.attn_norm(x)
            q, k, v = (w(y).view(B, T, -1, h).transpose(1, 2) for w in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(B, T, width))
            y = self.mlp_norm(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

        def forward(self, x):
            # Inside the unit, so that recomputing reads the weights that were gathered for backward.
            return checkpoint(self.compute, x, use_reentrant=False) if setting.remat == "full" else self.compute(x)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(c["vocab_size"], width)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(c["num_layers"]))
            self.norm = nn.RMSNorm(width, eps=c["norm_eps"])
            self.head = linear(width, c["vocab_size"])

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Llama()


# ------------------------------------------------------------------------------------------ the command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--remat", nargs="+", default=["full", "none"], choices=["full", "none"])
    parser.add_argument("--model", default="llama-30m", help="a preset of models/llama.py")
    parser.add_argument("--attention", default="auto", help="ours: auto, xla or chunked; see models/attention.py")
    parser.add_argument("--batch", type=int, default=2, help="sequences per device")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="steps per turn")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch and numpy")
    parser.add_argument("--json", type=Path, help="write every turn here as well")
    for hidden in ("--worker", "--setting", "--store"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        setting = Setting(*json.loads(args.setting))
        is_ours = args.worker == "ours"
        serve(our_step(setting) if is_ours else torch_step(setting, args.rank, args.store))
        return
    if subprocess.run([args.torch_python, "-c", "import torch, numpy"], capture_output=True).returncode:
        print(INSTALL.format(python=args.torch_python))
        return
    _measure(args)


def _measure(args) -> None:
    from dataclasses import asdict, replace

    from rich.console import Console
    from rich.table import Table

    from models import llama

    if args.model not in llama.presets:
        raise SystemExit(f"--model {args.model!r} is unknown. Use one of {', '.join(llama.presets)}.")
    shape = asdict(replace(llama.presets[args.model], attention=args.attention, tied=False, rope_scaling=None))
    if hasattr(os, "sched_setaffinity"):  # as many cores as the processes of theirs can use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:SHARDS])
    table = Table(title=f"{args.model}, {SHARDS} shards on {SHARDS} cores, {args.batch} x {args.tokens} tokens each")
    for column in ("precision", "remat", "ours ms", "theirs ms", "ours / theirs", "least", "most", "processor time"):
        table.add_column(column, justify="left" if column in ("precision", "remat") else "right")
    rows = []
    for precision in args.precision:
        for remat in args.remat:
            setting = Setting(precision, remat, shape, args.batch, args.tokens)
            with sides(setting, args.torch_python) as (ours, theirs):
                turns = compare(ours, theirs, args.pairs, args.steps)
            wall, cpu = ([getattr(a, f) / getattr(b, f) for a, b in turns] for f in Turn._fields)
            least = [f"{1e3 * min(pair[i].wall for pair in turns):,.0f}" for i in (0, 1)]
            figures = (statistics.median(wall), min(wall), max(wall), statistics.median(cpu))
            table.add_row(precision, remat, *least, *(f"{x:.2f}" for x in figures))
            losses = {"ours": ours.loss, "theirs": theirs.loss}
            rows.append(setting._asdict() | {"turns": turns, "loss": losses})
    Console().print(table)
    print("ms are the least of all turns; ratios are medians, the least and the most of one turn")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
