"""Train a language model with its parameters sharded over a mesh of devices: `python train.py --help`.

What happens in a run: options are checked against devices, model and data (`jfsdp/cli.py`); the model is
created sharded; each step reads a batch, computes and updates (`jfsdp/step.py`); now and then held-out data
is evaluated; what was measured goes to the screen and to files (`jfsdp/metrics.py`, `jfsdp/tables.py`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Any

import jax
import optax
from flax import nnx
from rich.console import Console

from jfsdp import cli, data, processes, tables
from jfsdp.layout import Plan
from jfsdp.metrics import Screen, Throughput, memory, record
from jfsdp.step import TrainState, eval_step, train_step
from jfsdp.watchdog import Watchdog
from jfsdp.wrap import init_sharded, plan_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and give 0, or 130 after Ctrl-C. Exits with 2 for usage and 1 for a failed run."""
    with processes.together():
        return run(argv)


def run(argv: Sequence[str] | None) -> int:
    """Check the options, tell what they come to, and train."""
    with cli.exits(2, ValueError, RuntimeError, OSError):
        job = cli.prepare(cli.parse(argv))
    console = tables.console()
    console.print(tables.heading(job))
    if job.config.output.dry_run:
        plan = plan_module(job.make_model, **job.sharding)
        state = TrainState.abstract(optimizer(job.config.training, plan)[0], plan)
        for table in tables.forecast(job, plan, state):
            console.print(table)
        return 0
    with cli.exits(1, FloatingPointError, cli.RunError):
        return train(job, console)


def train(job: cli.Job, console: Console) -> int:
    """Create the model, take the steps, tell how it went."""
    config, steps = job.config, job.config.training.steps
    params, plan = init_sharded(job.make_model, **job.sharding)
    console.print(tables.sharding_table(job, plan))

    tx, schedule = optimizer(config.training, plan)
    state = TrainState.create(params, tx, plan, seed=config.training.seed)
    no_sync, clip_norm = not config.training.sync, config.training.clip_norm
    step = train_step(loss, tx, plan, accumulate=config.data.accumulate, no_sync=no_sync, clip_norm=clip_norm)
    evaluate = evaluation(job, plan)

    throughput, losses = Throughput(plan.mesh.devices.size), []
    with ExitStack() as stack:
        stop = stack.enter_context(cli.stops_between_steps())
        watchdog = stack.enter_context(Watchdog(config.processes.hang_timeout))
        writers = [*job.writers, Screen(console, steps, throughput)]
        for writer in writers:
            stack.callback(writer.close)
        for number, batch in enumerate(throughput.waits(ahead(job.batches, plan, steps)), start=1):
            lr = schedule(number - 1)
            state, result = step(state, batch)
            stops = processes.vote(stop.is_set)
            timing = throughput.step(result, tokens=result.pop("weight"), places=job.places)
            watchdog.beat(f"step {number}")
            values, is_last = dict(result, lr=lr), stops()
            if job.evaluates_after(number) and not is_last:
                values["eval_loss"] = evaluate(state.params)
                watchdog.beat(f"the evaluation after step {number}")
                throughput.restart()
            last = record(number, timing, **values, **memory())
            losses.append(last["loss"])
            for writer in writers:
                writer.write(last)
            if is_last:
                break
    console.print(tables.summary(job, losses, last, throughput))
    if job.group.count > 1:
        console.print(tables.spread(processes.gather(throughput.of_process() | memory())))
    return 130 if is_last else 0


def optimizer(config: cli.TrainingConfig, plan: Plan) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW, and its learning rate as a function of the updates done."""
    warmup, lr = config.warmup_steps, config.lr
    schedule = optax.warmup_cosine_decay_schedule(lr / max(warmup, 1), lr, warmup, config.steps, lr / 10)
    is_matrix = plan.map(lambda leaf: len(leaf.shape) >= 2)  # of one layer: a stack of norms is no matrix
    tx = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=is_matrix)
    return tx, schedule


def loss(model: nnx.Module, batch: data.Row, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of the loss over one device's tokens, and how many count; the step divides the totals."""
    documents = dict(segments=batch["segments"], positions=batch["positions"])
    return model.loss(batch["tokens"], batch["targets"], batch["weights"], **documents)


def evaluation(job: cli.Job, plan: Plan) -> Callable[[Any], float]:
    """`evaluate(params)`: mean loss per token over some batches, evenly spread over the held-out rows."""
    step, wanted = eval_step(loss, plan), job.config.output.eval_batches

    def evaluate(params) -> float:
        batches = data.evaluation_batches(job.held_out, global_batch=job.micro_batch, **cli.processes())
        stride = max(1, -(-len(job.held_out) // job.micro_batch) // wanted)
        chosen = islice(batches, 0, stride * wanted, stride)
        results = jax.device_get([step(params, place(batch, plan)) for batch in chosen])
        return float(sum(s for s, _ in results) / sum(w for _, w in results))

    return evaluate


def ahead(batches: data.Batches, plan: Plan, count: int) -> Iterator[data.Row]:
    """`count` batches on the devices, each read while the one before is computed with."""
    with ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(lambda: place(next(batches), plan))
        for left in range(count - 1, -1, -1):
            try:
                ready = waiting.result()
            except ValueError as error:
                raise cli.RunError(f"the data cannot be read any further: {error}") from error
            if left:
                waiting = reader.submit(lambda: place(next(batches), plan))
            yield ready


def place(batch: data.Row, plan: Plan) -> data.Row:
    """This process's rows as arrays over all devices."""
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(plan.batch_sharding, rows), batch)


if __name__ == "__main__":
    sys.exit(main())
