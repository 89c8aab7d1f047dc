"""PyTorch's side of `test_torch.py`: one rank of FSDP2 on gloo. Imports no JAX: any Python that has PyTorch runs it.

    python -m tests.torch_ranks FOLDER RANK

`FOLDER/job.json` says what to run, `FOLDER/start.npz` holds weights and tokens; rank 0 leaves its answers there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from benchmarks.torch_fsdp import Setting, torch_llama


def train(job: dict, case: dict, start, rank: int) -> dict[str, np.ndarray]:
    """Loss and gradient norm of every step, and the parameters after the last one."""
    model = torch_llama(Setting(**case["setting"]))
    with torch.no_grad():
        for name, w in model.named_parameters():
            w.copy_(torch.from_numpy(start[name]))
    _shard(model, model.blocks, case)
    params = dict(model.named_parameters())
    adamw = torch.optim.AdamW(params.values(), **job["adamw"])
    losses, norms = [], []
    for batch in start["tokens"]:
        rows = torch.from_numpy(np.array_split(batch, dist.get_world_size())[rank].astype(np.int64))
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in params.values()]).full_tensor().item())
        adamw.step()
        adamw.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    whole = {name: p.full_tensor().detach().numpy() for name, p in params.items()}
    return {"losses": np.array(losses), "norms": np.array(norms), **whole}


def count(case: dict) -> dict[str, int]:
    """Collectives of one step on square matrices: `layers` blocks, each a unit, and one matrix in the root unit."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(case["width"], case["width"], bias=False)

        def forward(self, x):
            if case["checkpointed"]:
                return checkpoint(lambda x: x + torch.tanh(self.w(x)), x, use_reentrant=False)
            return x + torch.tanh(self.w(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(case["layers"])))
            self.out = nn.Linear(case["width"], case["width"], bias=False)

        def forward(self, x):
            return self.out(self.blocks(x))

    model = Model()
    _shard(model, model.blocks, case)
    with CommDebugMode() as seen:
        model(torch.ones(2, case["width"])).square().mean().backward()
    names = {"allgather": "all-gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce"}
    out = dict.fromkeys(names.values(), 0)
    for op, times in seen.get_comm_counts().items():
        out[next(kind for name, kind in names.items() if name in str(op))] += times
    return out


def _shard(model: nn.Module, blocks, case: dict) -> None:
    replicas, shards = case["mesh"]
    if replicas == 1:
        mesh = init_device_mesh("cpu", (shards,))
    else:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if case.get("setting", {}).get("precision") == "bf16" else MixedPrecisionPolicy()
    for module in (*blocks, model):
        reshard = case["reshard_after_forward"]
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def main(folder: Path, rank: int) -> None:
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job["ranks"])
    start = dict(np.load(folder / "start.npz"))
    for name, case in job["train"].items():
        answer = train(job, case, start, rank)
        if rank == 0:
            np.savez(folder / f"{name}.npz", **answer)
    counts = {name: count(case) for name, case in job["count"].items()}
    if rank == 0:
        (folder / "counts.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
