"""Train a language model with its parameters sharded over a mesh of devices: `python train.py --help`.

What happens in a run: options (`jfsdp/options.py`) are checked against devices, model and data (`jfsdp/cli.py`); the
model is created sharded, or restored (`jfsdp/checkpoint.py`); each step reads a batch (`jfsdp/batches.py`), computes
and updates (`jfsdp/step.py`); now and then held-out data is evaluated and the state is saved; what was measured goes to
the screen and to files (`jfsdp/metrics.py`, `jfsdp/tables.py`).
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import islice
from typing import Any, Self

import jax
import optax
from flax import nnx
from rich.console import Console

from jfsdp import cli, processes, tables
from jfsdp.audit import report as auditor
from jfsdp.batches import Batches, evaluation_batches
from jfsdp.checkpoint import DamagedCheckpoint, Metadata, open_checkpoint, restore
from jfsdp.data import END_OF_TEXT, Row
from jfsdp.generate import make_generate
from jfsdp.huggingface import load_pretrained
from jfsdp.layout import Plan
from jfsdp.mesh import process_share
from jfsdp.metrics import Screen, Throughput, memory, record
from jfsdp.options import TrainingConfig, parse
from jfsdp.run_folder import SaveError
from jfsdp.state import TrainState
from jfsdp.step import eval_step, train_step
from jfsdp.watchdog import Watchdog
from jfsdp.wrap import plan_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and give 0, or what a signal made of it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.

    Exits with 2 for usage and 1 for a failed run.
    """
    with processes.together():
        return run(argv)


def run(argv: Sequence[str] | None) -> int:
    """Check the options, tell what they come to, and train."""
    with cli.exits(2, ValueError, RuntimeError, OSError):
        job = cli.prepare(parse(argv))
    console = tables.console()
    console.print(tables.heading(job))
    if job.config.output.dry_run:
        plan = plan_module(job.make_model, **job.sharding)
        training = job.config.training
        state = TrainState.abstract(optimizer(training, plan)[0], plan, ema=training.ema is not None)
        for table in tables.forecast(job, plan, state):
            console.print(table)
        return 0
    with cli.exits(1, FloatingPointError, cli.RunError), cli.stops_between_steps() as stop:
        return train(job, console, stop)


def train(job: cli.Job, console: Console, stop: cli.Stop) -> int:
    """Create or restore the model, take the steps, tell how it went."""
    stop.nothing_to_lose = True
    config, steps = job.config, job.config.training.steps
    plan = plan_module(job.make_model, **job.sharding)
    processes.introduce(plan.mesh)
    console.print(tables.sharding_table(plan, tokens=job.tokens))

    tx, schedule = optimizer(config.training, plan)
    with cli.exits(2, ValueError):
        state, saved = begin(job, plan, tx, console)
    start = 0 if saved is None else saved.step
    if start >= steps:
        words = f"nothing to do: step {start} of {steps} is in {job.resume}."
        console.print(f"{words} More --steps with --reschedule train longer.")
        return 0
    how = dict(accumulate=config.data.accumulate, no_sync=not config.training.sync)
    step = train_step(loss, tx, plan, **how, clip_norm=config.training.clip_norm, ema=config.training.ema)
    evaluate, sample = evaluation(job, plan), sampling(job, plan)

    throughput, losses, updates = Throughput(plan.mesh.devices.size), [], int(state.step - state.skipped)
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.processes.hang_timeout))
        saver = stack.enter_context(Saver(job, state))
        stack.callback(job.batches.close)
        writers = [*job.writers, Screen(console, steps, throughput)]
        for writer in writers:
            stack.callback(writer.close)
        if job.held_out is not None:  # compiled while there is nothing to lose, so that a signal need not wait for it
            evaluate(looked_at(state), lambda: True)
            if sample is not None:
                sample(looked_at(state))
            watchdog.beat("compiling the evaluation")
            throughput.restart()
        for number, batch in enumerate(throughput.waits(ahead(job.batches, plan, steps - start)), start=start + 1):
            lr = schedule(updates)  # of those applied: a skipped step moves no schedule
            if number == start + 1 and (config.output.audit or config.output.audit_file):
                audit(job, plan, step.lower(state, batch).compile(), console)
            state, result = step(state, batch)
            asks = processes.vote(lambda: stop.is_set() or saver.is_late())
            timing = throughput.step(result, tokens=result.pop("weight"), places=job.places)
            stop.nothing_to_lose, updates = False, int(result["updates"])
            watchdog.beat(f"step {number}")
            values, asked = dict(result, lr=lr), asks()
            is_last = asked and processes.vote(stop.is_set)()
            if job.evaluates_after(number) and not is_last:
                values["eval_loss"] = evaluate(looked_at(state), stop.is_set)
                is_last = processes.vote(stop.is_set)()
                watchdog.beat(f"the evaluation after step {number}")
                if sample is not None and not is_last:
                    console.print(tables.note("sample", sample(looked_at(state))))
            saver.after(number, state, metric=values.get("eval_loss"), now=asked or is_last)
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
    return stop.exit_code if is_last else 0


def begin(job: cli.Job, plan: Plan, tx, console: Console) -> tuple[TrainState, Metadata | None]:
    """The state to begin with: new at step 0, or a checkpoint's, with all that goes on from there.

    Raises: ValueError when a checkpoint does not fit the model, the data or the learning rate.
    """
    ema = job.config.training.ema
    if job.resume is None:

        def new_params():
            return nnx.to_pure_dict(nnx.state(job.make_model(), nnx.Param))

        if (folder := job.config.model.init_from) is None:
            params = plan.create(new_params)
        else:
            params = load_pretrained(folder, plan, job.model.family, start=new_params)
        return TrainState.create(params, tx, plan, seed=job.config.training.seed, ema=ema is not None), None
    like = TrainState.abstract(tx, plan, ema=ema is not None)
    is_own = job.checkpoints is not None and job.resume == job.checkpoints.folder  # then an older one will do
    path = None if is_own else job.resume
    try:
        if job.checkpoints is not None:
            state, saved = job.checkpoints.restore(like, path=path)
        else:
            state, saved = restore(path, like), open_checkpoint(path).metadata
    except DamagedCheckpoint:
        raise
    except ValueError as error:
        raise ValueError(f"{saved_otherwise(job)}{error}") from error
    job.batches.start_at(saved.step)
    for writer in job.writers:
        writer.forget_after(saved.step)
    console.print(tables.note("resumed", f"from step {saved.step} of {job.resume}, saved on {saved.where()}"))
    for words in check_schedule(job, saved, plan):
        console.print(tables.note("changed", words))
    return state, saved


def saved_otherwise(job: cli.Job) -> str:
    """What explains that a checkpoint does not fit, in words before the error's own; else nothing."""
    run, ema = open_checkpoint(job.resume).metadata.run, job.config.training.ema
    if (other := run.get("model", job.model.name)) != job.model.name:
        return f"{job.resume} holds a run of --model {other}, not of {job.model.name}. "
    if ((kept := run.get("training", {}).get("ema")) is None) == (ema is None):
        return ""
    had, mend = ("no average", "Leave out --ema") if kept is None else ("an average", f"Give --ema {kept}")
    return f"{job.resume} was saved with {had} of the weights. {mend}. "


def check_schedule(job: cli.Job, saved: Metadata, plan: Plan) -> Iterator[str]:
    """What was asked for otherwise than in the saved run, in words.

    Raises: ValueError when the learning rate would differ, unless --reschedule allows it.
    """
    then, now = saved.run.get("training", {}), asdict(job.config.training)
    known = {name: value for name, value in then.items() if name in now}
    names = ("steps", "lr", "warmup")
    if any(now[name] != value for name, value in known.items() if name in names):
        old = optimizer(TrainingConfig(**known), plan)[1](saved.step)
        new = optimizer(job.config.training, plan)[1](saved.step)
        words = f"the learning rate of step {saved.step + 1} is {float(new):.6g} instead of {float(old):.6g}"
        options = " ".join(f"--{name} {then[name]}" for name in names if then[name] is not None)
        if not job.config.checkpoints.reschedule:
            raise ValueError(
                f"{job.resume}: {words}, as it was saved on its way along {options}. Give these to keep that schedule, "
                "or --reschedule to go on along the new one."
            )
        yield words
    for name, value in known.items():
        if now[name] != value:
            yield f"--{name.replace('_', '-')} {value} -> {now[name]}"


class Saver:
    """When to save, and what becomes of the work when a run fails."""

    def __init__(self, job: cli.Job, state: TrainState):
        self._job, self._config, self._checkpoints = job, job.config.checkpoints, job.checkpoints
        self._since, self._state = time.monotonic(), state

    def __enter__(self) -> Self:
        return self

    def is_late(self) -> bool:
        """Whether the time since the last save is up, on the first process's clock."""
        minutes = self._config.save_minutes
        is_timed = self._checkpoints is not None and minutes is not None and jax.process_index() == 0
        return is_timed and time.monotonic() - self._since > 60 * minutes

    def after(self, number: int, state: TrainState, *, metric: float | None, now: bool) -> None:
        """Save if it is time: `now`, every so many steps, and at the end.

        Raises: SaveError if this save cannot begin or one behind the training has failed.
        """
        self._state = state
        if self._checkpoints is None:
            return
        self._checkpoints.check()
        every, steps = self._config.save_every, self._job.config.training.steps
        if now or number == steps or (every is not None and number % every == 0):
            self._save(state, metric)

    def _save(self, state: TrainState, metric: float | None = None) -> None:
        job = self._job
        model = job.config.model
        run = dict(training=asdict(job.config.training), model=job.model.name, lora=model.lora)
        run |= {} if model.init_from is None else dict(init_from=str(model.init_from.absolute()))
        run |= {} if job.origin is None else dict(origin=job.origin)
        position = job.batches.state() | {"step": int(state.step)}  # which is behind what is read ahead
        self._checkpoints.save(state, metric=metric, data=position, run=run)
        self._since = time.monotonic()

    def __exit__(self, kind, error, _) -> None:
        """Wait for the last save. A run that failed alone leaves the state after its last good step."""
        if self._checkpoints is None:
            return
        try:
            if isinstance(error, FloatingPointError | SaveError | cli.RunError) and self._job.group.count == 1:
                raise cli.RunError(f"{error} {self._rescue(getattr(error, 'state', self._state))}") from error
            if kind is None:
                self._checkpoints.wait()
        except SaveError as failed:
            raise cli.RunError(f"{failed} {self._rescue(self._state)}") from failed
        finally:
            with suppress(SaveError):
                self._checkpoints.close()

    def _rescue(self, state: TrainState) -> str:
        step = int(state.step)
        try:
            self._save(state)
            self._checkpoints.wait()
        except SaveError:
            return f"A second try, at step {step}, failed, too: what came after the newest complete one is lost."
        return f"The state after step {step} is saved in {self._checkpoints.folder}."


def optimizer(config: TrainingConfig, plan: Plan) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW, and its learning rate as a function of the updates done."""
    warmup, lr = config.warmup_steps, config.lr
    schedule = optax.warmup_cosine_decay_schedule(lr / max(warmup, 1), lr, warmup, config.steps, lr / 10)
    # Of one layer: a stack of norms is no matrix. None for what is frozen.
    is_matrix = jax.tree.map(lambda leaf: len(leaf.shape) >= 2, plan.trainable)
    tx = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=is_matrix)
    return tx, schedule


def loss(model: nnx.Module, batch: Row, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of the loss over one device's tokens, and how many count; the step divides the totals."""
    documents = dict(segments=batch["segments"], positions=batch["positions"])
    return model.loss(batch["tokens"], batch["targets"], batch["weights"], **documents)


def looked_at(state: TrainState) -> Any:
    """The parameters that evaluations and samples look at: the average of --ema, or the weights."""
    return state.params if state.ema is None else state.averaged_params()


def audit(job: cli.Job, plan: Plan, compiled: Any, console: Console) -> None:
    """Tell what the compiled step moves, keeps and hides, and keep it for `jfsdp audit`."""
    mesh = "x".join(str(n) for n in plan.mesh.shape.values())
    name = f"{job.model.name} {mesh} {plan.placement.strategy.value}"
    found = auditor.of_compiled(compiled, plan.mesh, name=name, jax_version=jax.__version__)
    if job.config.output.audit:
        for part in auditor.tables(found):
            console.print(part)
    if job.config.output.audit_file and jax.process_index() == 0:
        found.save(job.config.output.audit_file)


def evaluation(job: cli.Job, plan: Plan) -> Callable[..., float | None]:
    """`evaluate(params)`: mean loss per token over some batches, evenly spread over the held-out rows.

    `evaluate(params, is_stopped)` gives None when it was stopped before the end, after one batch at least.
    """
    step, wanted = eval_step(loss, plan), job.config.output.eval_batches

    def evaluate(params, is_stopped=lambda: False) -> float | None:
        batches = evaluation_batches(job.held_out, global_batch=job.micro_batch, **process_share(plan.mesh))
        stride = max(1, -(-len(job.held_out) // job.micro_batch) // wanted)
        chosen = islice(batches, 0, stride * wanted, stride)
        results: list[tuple[Any, Any]] = []
        for batch in chosen:
            stops = processes.vote(is_stopped)
            results.append(step(params, place(batch, plan)))
            jax.block_until_ready(results[-2:-1])  # one behind, so that devices do not wait and a signal is heard
            if stops():
                return None
        results = jax.device_get(results)
        return float(sum(s for s, _ in results) / sum(w for _, w in results))

    return evaluate


def sampling(job: cli.Job, plan: Plan) -> Callable[[Any], str] | None:
    """`sample(params)`: how the model goes on after the text of --sample; None where none was given."""
    if (text := job.config.output.sample) is None:
        return None
    words = job.tokenizer
    end = END_OF_TEXT if words is None else words.end
    generate = make_generate(plan, max_new_tokens=64, temperature=0.8, end=end)
    prompt = list(text.encode()) if words is None else words.encode(text).ids.tolist()

    def sample(params) -> str:
        (tokens,) = generate(params, [prompt], seed=job.config.training.seed)
        return text + (bytes(tokens).decode(errors="replace") if words is None else words.decode(tokens))

    return sample


def ahead(batches: Batches, plan: Plan, count: int) -> Iterator[Row]:
    """`count` batches on the devices, each read while the one before is computed with."""
    with ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(lambda: place(next(batches), plan))
        for left in range(count - 1, -1, -1):
            try:
                ready = waiting.result()
            except (ValueError, OSError) as error:
                raise cli.RunError(f"the data cannot be read any further: {error}") from error
            if left:
                waiting = reader.submit(lambda: place(next(batches), plan))
            yield ready


def place(batch: Row, plan: Plan) -> Row:
    """This process's rows as arrays over all devices."""
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(plan.batch_sharding, rows), batch)


if __name__ == "__main__":
    sys.exit(main())
