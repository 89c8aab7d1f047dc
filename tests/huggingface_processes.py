"""A Hugging Face folder through several processes: loaded by all, exported again, and sampled from.

`python -m jfsdp.launch --nproc 2 -m tests.huggingface_processes IN OUT`
"""

import json
import sys
from pathlib import Path

import jax
from flax import nnx

from jfsdp import cli, processes
from jfsdp.generate import make_generate
from jfsdp.huggingface import load_pretrained, save_pretrained
from jfsdp.mesh import make_mesh
from jfsdp.options import DeviceConfig
from jfsdp.wrap import plan_module
from models import llama

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]


def through(folder: Path, out: Path, mesh: str) -> dict:
    """What was sampled, and how much of the model this process's devices hold."""
    config = llama.config_from(json.loads((folder / "config.json").read_text()))
    plan = plan_module(lambda: llama.build(config, rngs=nnx.Rngs(0)), mesh=make_mesh(mesh))
    params = load_pretrained(folder, plan, llama)
    save_pretrained(out, params, plan, llama, config, max_file_bytes=2000)
    held = sum(s.data.size for w in jax.tree.leaves(params) for s in w.addressable_shards)
    return {"tokens": make_generate(plan, max_new_tokens=5, temperature=1.0)(params, PROMPTS), "held": held}


if __name__ == "__main__":
    group = processes.connect()
    cli.start(DeviceConfig(mesh="8"), group.count)
    source, target = map(Path, sys.argv[1:])
    with processes.together():
        seen = through(source, target, "1x8")
    (target / f"process_{group.index}.json").write_text(json.dumps(seen))
