"""Train a language model with its parameters sharded over a mesh of devices: `python train.py --help`.

What happens in a run: the options are checked against the devices, the model and the data; the model is created
sharded; each step reads a batch, computes and updates; now and then held-out data is evaluated. How a step works is
told in `jfsdp/step.py`, what the options mean in `jfsdp/cli.py`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from jfsdp import cli, data
from jfsdp import metrics as measures
from jfsdp.precision import MixedPrecision
from jfsdp.schedule import Schedule
from jfsdp.step import TrainState, eval_step, train_step
from jfsdp.strategy import parse_strategy
from jfsdp.wrap import fully_shard, plan_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code: 0, 130 after Ctrl-C, 2 for usage, 1 for a run that failed."""
    with cli.exits(2, ValueError, RuntimeError, OSError):
        config = cli.parse(argv)
        run = prepare(config)
    console = cli.console()
    cli.show_start(...)
    if config.output.dry_run:
        ...
        return 0
    with cli.exits(1, FloatingPointError, cli.RunError):
        return train(run, console)
