"""Stopping and going on: what a run is after a stop, a kill or a failure is what it would have been without.

Runs of a tiny model in this process, stopped by real signals between two steps; what needs a process of its own
(a kill, a signal during compilation) has one. The judge is the uninterrupted run: its log line by line, its final
arrays bit by bit.
"""

import ctypes
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import train
from jfsdp import cli, store
from jfsdp.__main__ import main as command
from jfsdp.checkpoint import open_checkpoint
from jfsdp.options import parse
from jfsdp.safetensors import read_safetensors

from .support import SETTINGS, bitwise_equal, settings

ROOT = Path(train.__file__).parent
TINY = dict(
    model_type="llama",
    vocab_size=256,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=36,  # no multiple of 8: padded
    rms_norm_eps=1e-5,
)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a tiny model, a little text, and compiled programs that later runs find again."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "programs").mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield folder
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture(autouse=True)
def in_it(here, monkeypatch):
    monkeypatch.chdir(here)


def words(*more: str) -> list[str]:
    few = ["--model", "./config.json", "--data", "text.txt", "--seq-len", "32", "--warmup", "2", "--held-out", "0.2"]
    return [*few, *more]


def run(*more: str) -> int:
    return train.main(words(*more))


def at_step(monkeypatch, number, act):
    """Do something right after a step, before anything is made of it."""
    record = train.record

    def recording(step, *args, **values):
        if step == number:
            act()
        return record(step, *args, **values)

    monkeypatch.setattr(train, "record", recording)


def kill_self(number):
    return lambda: os.kill(os.getpid(), number)


def log(path) -> list[dict]:
    """Records without what a clock or the memory decides."""
    kept = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss", "skipped")
    return [{n: v for n, v in json.loads(line).items() if n in kept} for line in Path(path).read_text().splitlines()]


def arrays(path) -> dict[str, np.ndarray]:
    found = open_checkpoint(path)
    return {name: found.read(name) for name in found.metadata.leaves}


def steps_in(folder) -> list[int]:
    """Of what is there and can be read; nothing unfinished lies beside it."""
    found = sorted(Path(folder).glob("[!.]*"))
    return [open_checkpoint(path).metadata.step for path in found]


@contextmanager
def batches_noted():
    """What steps get while inside: the step, and the tokens of all rows in their order."""
    noted, make = [], train.train_step

    def train_step(*args, **options):
        step = make(*args, **options)

        def noting(state, batch):
            noted.append((int(state.step) + 1, np.asarray(batch["tokens"]).tolist()))
            return step(state, batch)

        return noting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", train_step)
        yield noted


class Whole(NamedTuple):
    """A run in one go."""

    options: list[str]
    folder: Path
    log: list[dict]
    batches: list[tuple[int, list]]


@cache
def in_one_go(setting, steps: int, save_every: int, warmup: int = 2) -> Whole:
    folder = Path(f"{setting}-{steps}")
    options = [*setting.options, "--steps", f"{steps}", "--warmup", f"{warmup}"]
    saves = ["--checkpoint", f"{folder}", "--save-every", f"{save_every}", "--metrics", f"{folder}.jsonl"]
    with batches_noted() as batches:
        assert run(*options, *saves) == 0
    return Whole(options, folder, log(f"{folder}.jsonl"), batches)


@pytest.fixture(params=settings(1))
def setting(request):
    return request.param


@pytest.fixture
def whole(here, setting):
    """Ten steps, saved at 4, 8 and 10."""
    return in_one_go(setting, 10, 4)


# Without a stop


@pytest.mark.parametrize("setting", settings())
def test_last_step_is_saved(setting, whole):
    """C-51, the long run; C-22: counters and data position; C-65: the strategy."""
    assert steps_in(whole.folder) == [4, 8, 10]
    assert [r["step"] for r in whole.log] == list(range(1, 11))
    found = open_checkpoint(whole.folder).metadata
    assert found.counters == {"batches": 10, "skipped": 0, "updates": 10} and found.data["step"] == 10
    assert found.metric == whole.log[-1]["eval_loss"] and found.strategy == setting.strategy


def test_short_run_saves_its_end_once(here, setting, monkeypatch):
    """C-51, the short run, and one whose last step is one of those saved; without --checkpoint nothing is written."""
    write, writes, before = store.write_zarr, [], set(here.iterdir())
    monkeypatch.setattr(store, "write_zarr", lambda *a, **k: writes.append(1) or write(*a, **k))
    assert run(*setting.options, "--steps", "3") == 0
    assert set(here.iterdir()) == before
    for every in ("4", "3"):
        folder = f"short-{setting}-{every}"
        assert run(*setting.options, "--steps", "3", "--checkpoint", folder, "--save-every", every) == 0
        assert steps_in(folder) == [3] and len(writes) == 1
        writes.clear()


# Stop and go on


@pytest.mark.parametrize("setting", settings())
def test_four_steps_and_six_are_ten(setting, whole, monkeypatch, capsys):
    """C-53: same steps, batches, losses, parameters. C-54: same learning rates. C-45: saved, exit code 143 or 130."""
    number = {"FULL_SHARD-fp32": signal.SIGTERM, "HYBRID_SHARD-fp32": signal.SIGHUP}.get(str(setting), signal.SIGINT)
    name = f"stopped-{setting}"
    options = [*whole.options, "--checkpoint", name, "--metrics", f"{name}.jsonl"]
    with monkeypatch.context() as patch, batches_noted() as first:
        at_step(patch, 4, kill_self(number))
        # The signal comes while step 4 is being noted, so step 5 is the last.
        assert run(*options) == 128 + number
    stopped = len(log(f"{name}.jsonl"))
    assert stopped in (4, 5) and open_checkpoint(name).metadata.step == stopped
    with Path(f"{name}.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')  # left by a run that was killed later
    with batches_noted() as then:
        assert run(*options) == 0
    assert f"from step {stopped} of" in capsys.readouterr().out
    assert log(f"{name}.jsonl") == whole.log and first + then == whole.batches
    assert bitwise_equal(arrays(name), arrays(whole.folder))
    assert run(*options) == 0  # and there is nothing left to do
    assert "nothing to do: step 10 of 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    "place", [["--mesh", "2x4"], ["--mesh", "1x4", "--allow-idle"], ["--strategy", "NO_SHARD"]], ids=" ".join
)
def test_another_mesh_goes_on_with_the_same_batches(setting, whole, place):
    """C-57, C-58: from step 4 on, on half of the devices too: the global batch and the order of examples stay."""
    name = f"{setting}-on" + "".join(place)
    more = ["--resume", f"{whole.folder}/step_00000004", "--metrics", f"{name}.jsonl"]
    with batches_noted() as batches:
        assert run(*whole.options[2:], *place, *more) == 0  # without the mesh
    assert batches == whole.batches[4:] and all(len(rows) == 16 for _, rows in batches)
    for got, want in zip(log(f"{name}.jsonl"), whole.log[4:], strict=True):
        assert got["step"] == want["step"] and got["tokens"] == want["tokens"] and got["lr"] == want["lr"]
        assert got["loss"] == pytest.approx(want["loss"], rel=setting.rounding)


def test_batch_of_another_device_count_is_refused_with_both_numbers(whole, capsys):
    """C-58: an explicit batch size that would change the order."""
    with pytest.raises(SystemExit) as exit:
        run(*whole.options, "--batch-size", "8", "--resume", f"{whole.folder}/step_00000004")
    assert exit.value.code == 2
    assert "saved with global_batch 16; this run has global_batch 8" in capsys.readouterr().err


def test_learning_rate_goes_on(here, setting):
    """C-54: warm-up over 10 steps, cosine to step 100, from step 40 on; the update's own counts, too."""
    long = in_one_go(setting, 100, 40, warmup=10)
    rates, name = [r["lr"] for r in long.log], f"long-{setting}.jsonl"
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True) and rates[9] < rates[10]
    more = ["--resume", f"{long.folder}/step_00000040", "--checkpoint", f"long-{setting}", "--metrics", name]
    assert run(*long.options, *more) == 0
    assert log(name) == long.log[40:]
    assert bitwise_equal(arrays(f"long-{setting}"), arrays(long.folder))


def test_longer_run_needs_to_say_what_becomes_of_the_learning_rate(here, setting, monkeypatch, capsys):
    """C-55: 200 steps from step 40 of 100: refused with both rates, or told with both before step 41."""
    long = in_one_go(setting, 100, 40, warmup=10)
    more = [*long.options, "--steps", "200", "--resume", f"{long.folder}/step_00000040"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        run(*more)
    assert exit.value.code == 2
    refusal = capsys.readouterr().err
    rates = re.search(
        r"learning rate of step 41 is (\S+) instead of (\S+), .* along --steps 100 .*--reschedule", refusal
    )
    assert float(rates[2]) == pytest.approx(long.log[40]["lr"], rel=1e-5) and float(rates[1]) > float(rates[2])
    at_step(monkeypatch, 41, kill_self(signal.SIGTERM))
    assert run(*more, "--reschedule", "--metrics", f"longer-{setting}.jsonl") == 143
    said = capsys.readouterr().out
    assert f"of step 41 is {rates[1]} instead of {rates[2]}" in said
    assert said.index("instead of") < said.index("step  41/200") and "--steps 100 -> 200" in said
    lines = log(f"longer-{setting}.jsonl")
    assert lines[0]["step"] == 41 and lines[0]["lr"] == pytest.approx(float(rates[1]), rel=1e-5)


def test_automatic_resume_falls_back_to_the_last_good_one(setting, whole, caplog):
    """C-46: the newest is cut in half; one warning, and the run ends where it would have ended."""
    damaged = f"{setting}-damaged"
    shutil.copytree(whole.folder, damaged)
    file = max(Path(damaged, "step_00000010/arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    os.truncate(file, file.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "jfsdp"):
        assert run(*whole.options, "--checkpoint", damaged, "--metrics", f"{damaged}.jsonl") == 0
    (record,) = [r for r in caplog.records if r.name.startswith("jfsdp.run_folder")]
    assert "going on from step 8" in record.message and file.name in record.message
    assert log(f"{damaged}.jsonl") == whole.log[8:] and bitwise_equal(arrays(damaged), arrays(whole.folder))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--checkpoint FULL_SHARD-fp32-10 --resume never", "holds checkpoints of step 4, 8, 10, which this run would"),
        (
            "--checkpoint FULL_SHARD-fp32-10 --resume FULL_SHARD-fp32-10/step_00000004",
            "of step 8, 10, which this run would",
        ),
        ("--resume nowhere", "nowhere: there is no such folder. Name a checkpoint"),
        ("--resume programs", "programs is no checkpoint of jfsdp and holds none"),
        ("--checkpoint text.txt", "checkpoints cannot be written to .*text.txt.*Name another folder"),
        ("--save-every 0", "save_every is 0; use 1 or more"),
        ("--save-minutes 0", "save_minutes is 0.0; use minutes above 0"),
        ("--keep 0", "keep is 0; use 1 or more"),
        ("--mix text.txt", "mix 'text.txt' is no PATH=WEIGHT. Write for example code/=0.5"),
        ("--workers -1", "workers is -1: it counts processes that read. Use 0 or more"),
        ("--seed 1 --resume FULL_SHARD-fp32-10", "saved with seed 0; this run has seed 1"),
        (
            "--data other.txt --resume FULL_SHARD-fp32-10",
            r"run learned from text.txt \(training\), and other.txt \(training\) has as many examples but holds others",
        ),
        (
            "--model ./other.json --resume FULL_SHARD-fp32-10",
            r"params.blocks.*is \[2, .* in the checkpoint, \[1, ",
        ),  # C-47
    ],
)
def test_what_cannot_go_on_is_refused(here, capsys, monkeypatch, more, message):
    in_one_go(SETTINGS[0], 10, 4)
    Path("other.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
    Path("other.txt").write_text(Path("text.txt").read_text().replace("is", "be"))
    monkeypatch.setattr(train, "train_step", lambda *_, **__: pytest.fail("a step was made before it was refused"))
    with pytest.raises(SystemExit) as exit:
        run("--steps", "10", *more.split())
    assert exit.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not list(Path("FULL_SHARD-fp32-10").glob("*.damaged"))


@pytest.mark.slow
def test_local_checkpoint_goes_on_on_its_own_devices_only(here, capsys):
    """Anywhere else both are named; what reads arrays by themselves refuses it, too."""
    options = ["--steps", "3", "--mesh", "2x4", "--checkpoint", "local", "--checkpoint-kind", "local"]
    assert run(*options) == 0 and run(*options) == 0
    for more in (["--mesh", "1x8", "--steps", "3", "--resume", "local"], ["--mesh", "1x8", "--init-from", "local"]):
        with pytest.raises(SystemExit) as exit:
            train.main(words(*more) if "--resume" in more else words(*more)[2:])
        assert exit.value.code == 2
        said = capsys.readouterr().err
        assert "is a local checkpoint" in said and "mesh 2x4, HYBRID_SHARD, 1 process" in said
    assert command(["export", "local", "from-local"]) == 2
    assert "is a local checkpoint" in capsys.readouterr().err and not Path("from-local").exists()


def test_same_command_again_goes_on_where_it_was_stopped(whole, monkeypatch, capsys):
    """Begun from another run's checkpoint: what a scheduler starts again does not begin there anew."""
    options, folder, wanted, _ = whole
    new = f"new-{folder}"
    origin = ["--resume", str(folder / "step_00000004"), "--checkpoint", new, "--metrics", f"{new}.jsonl"]
    for number, resumed in ((5, f"from step 4 of {folder}"), (7, f"from step 6 of {Path(new).absolute()}")):
        with monkeypatch.context() as patch:
            at_step(patch, number, kill_self(signal.SIGTERM))
            assert run(*options, *origin) == 143
        assert resumed in "".join(capsys.readouterr().out.split("\n"))
    assert run(*options, "--checkpoint", new, "--steps", "10", "--metrics", f"{new}.jsonl") == 0
    assert log(f"{new}.jsonl") == wanted[4:] and bitwise_equal(arrays(new), arrays(folder))
    assert run(*options, *origin) == 0 and "nothing to do: step 10 of 10" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(*options, "--resume", str(folder / "step_00000008"), "--checkpoint", new)
    assert "holds checkpoints of step 10, which this run would write again" in " ".join(capsys.readouterr().err.split())


def test_import_into_a_folder_with_checkpoints_is_refused(here, capsys):
    """It would be a checkpoint of step 0, and the first to go."""
    folder = str(in_one_go(SETTINGS[0], 10, 4).folder)
    assert command(["export", folder, "hub"]) == 0
    assert command(["import", "hub", folder]) == 2
    assert f"{folder} holds checkpoints already. Name another folder." in capsys.readouterr().err
    assert steps_in(folder) == [4, 8, 10]


def test_mixture_of_sources_read_by_workers_goes_on(here, monkeypatch):
    """C-56 for several sources: the log of the run in one go, without workers."""
    (here / "more.txt").write_text("All work and no play makes Jack a dull boy.\n" * 100)
    options = ["--mesh", "1x8", "--steps", "10", "--mix", "more.txt=0.5"]
    assert run(*options, "--metrics", "mixed.jsonl") == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, kill_self(signal.SIGTERM))
        assert run(*options, "--checkpoint", "mixed", "--metrics", "workers.jsonl", "--workers", "1") == 143
    assert run(*options, "--checkpoint", "mixed", "--metrics", "workers.jsonl") == 0
    assert log("workers.jsonl") == log("mixed.jsonl") != in_one_go(SETTINGS[0], 10, 4).log
    assert open_checkpoint("mixed").metadata.data["weights"] == [2, 1]


# The average of the weights


def test_average_is_kept_evaluated_exported_and_goes_on(here, monkeypatch, capsys):
    """C-29 of a run, C-53 with an average: in one go and stopped, bitwise; the average is evaluated and exported."""
    options = ["--mesh", "2x4", "--steps", "4", "--ema", "0.5", "--eval-every", "2"]
    seen, evaluation = [], train.evaluation

    def seeing(job, plan):
        evaluate = evaluation(job, plan)
        return lambda params, stopped: seen.append(np.array(params["norm"]["scale"])) or evaluate(params, stopped)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluation", seeing)
        every = ["--save-every", "1", "--keep", "9"]
        assert run(*options, "--checkpoint", "averaged", "--metrics", "a.jsonl", *every) == 0
    saved = [arrays(f"averaged/step_{step:08}") for step in range(1, 5)]
    weights, averages = ([state[f"{part}.norm.scale"] for state in saved] for part in ("params", "ema"))
    for old, weight, new in zip(averages, weights[1:], averages[1:]):
        np.testing.assert_allclose(new, (old + weight) / 2, rtol=1e-6)
        assert not np.array_equal(new, weight)
    np.testing.assert_array_equal(seen, [np.ones(16), averages[1], averages[3]])  # the first one to compile
    with monkeypatch.context() as patch:
        at_step(patch, 2, kill_self(signal.SIGTERM))
        assert run(*options, "--checkpoint", "again", "--metrics", "b.jsonl") == 143
    assert run(*options, "--checkpoint", "again", "--metrics", "b.jsonl") == 0
    assert log("a.jsonl") == log("b.jsonl") and bitwise_equal(arrays("averaged"), arrays("again"))

    assert command(["export", "averaged", "exported", "--part", "ema"]) == 0
    exported = read_safetensors("exported")["model.norm.weight"][...]
    assert np.array_equal(exported, averages[3])

    capsys.readouterr()
    for more, message in (
        (["--steps", "9"], "was saved with an average of the weights. Give --ema 0.5"),
        (["--ema", "1"], "ema is 1.0, what the average keeps. Use a number from 0 to below 1"),
    ):
        with pytest.raises(SystemExit) as exit:
            run("--checkpoint", "averaged", *more)
        assert exit.value.code == 2 and message in " ".join(capsys.readouterr().err.split())


# Time


def test_saves_by_time(here, monkeypatch):
    """Not by steps: the clock of the first process decides."""
    clock = iter(range(0, 10_000, 40))  # every look at it, 40 s later: over a minute at every second look
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run("--steps", "10", "--mesh", "1x8", "--checkpoint", "timed", "--save-minutes", "1", "--keep", "9") == 0
    assert steps_in("timed") == [2, 4, 6, 8, 10]


# Failures


@pytest.mark.parametrize("why", ["a file in the way", pytest.param("no write succeeds", marks=pytest.mark.slow)])
def test_failed_save_ends_the_run_and_the_checkpoint_before_is_good(setting, whole, why, capsys, monkeypatch):
    """C-44: nothing is written after step 2; exit code 1 at the save of step 6 at the latest. From step 2 the run goes
    on when it can write again, and ends as it would have."""
    folder = Path(f"{setting}-{why}".replace(" ", "-"))
    options = [*whole.options, "--checkpoint", f"{folder}", "--save-every", "2", "--keep", "2"]
    write, calls, obstacle = store.write_zarr, [], folder / "step_00000004"

    def failing(*args, **options):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(*args, **options)

    if why == "no write succeeds":
        monkeypatch.setattr(store, "write_zarr", failing)
    else:
        folder.mkdir()
        obstacle.write_text("")
    with pytest.raises(SystemExit) as exit:
        run(*options, "--metrics", f"{folder}.jsonl")
    assert exit.value.code == 1 and len(log(f"{folder}.jsonl")) <= 6
    said = capsys.readouterr().err
    assert "checkpoint of step 4 could not be written" in said and "complete one is of step 2" in said
    assert re.search(r"A second try, at step [456], failed", said) and "Traceback" not in said
    monkeypatch.setattr(store, "write_zarr", write)
    obstacle.unlink(missing_ok=True)
    assert steps_in(folder) == [2]
    assert run(*options) == 0 and "from step 2 of" in capsys.readouterr().out
    assert bitwise_equal(arrays(folder), arrays(whole.folder))


def test_background_write_that_fails_once_costs_nothing(here, capsys, monkeypatch):
    """A full disk stands for whatever fails behind the training: it ends the run, whose state is saved in the end."""
    write, calls = store.write_zarr, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(*args, **options)

    monkeypatch.setattr(store, "write_zarr", failing)
    with pytest.raises(SystemExit) as exit:
        run("--steps", "10", "--checkpoint", "full", "--save-every", "2")
    assert exit.value.code == 1
    said = capsys.readouterr().err
    assert "checkpoint of step 4 could not be written" in said and "No space left on device" in said
    step = int(re.search(r"The state after step (\d) is saved in", said)[1])
    assert step in (5, 6) and open_checkpoint("full").metadata.step == step
    monkeypatch.undo()


def test_run_that_fails_at_a_step_leaves_the_state_before_it(here, capsys):
    """C-19's raise, told with its step and what to do: the parameters of the last good step are not lost."""
    with pytest.raises(SystemExit) as exit:
        words = "--steps 9 --lr 1e30 --clip-norm None --checkpoint diverged --metrics diverged.jsonl"
        run(*words.split())
    assert exit.value.code == 1
    said = capsys.readouterr().err
    bad = int(re.search(r"error: step (\d): the gradient of .* is not finite .*Lower the learning rate", said)[1])
    assert "Traceback" not in said and len(log("diverged.jsonl")) == bad - 1
    assert f"The state after step {open_checkpoint('diverged').metadata.step} is saved" in said
    assert open_checkpoint("diverged").metadata.step == bad


# Signals in awkward moments: C-45


def test_signal_during_an_evaluation_ends_it_and_saves(setting, whole, monkeypatch):
    """C-45 (b): work since the last save is saved; the evaluation is not waited for. The same again goes on."""
    options, count = [*whole.options, "--checkpoint", f"evaluating-{setting}"], []

    def slow(job, plan):
        def evaluate(params, is_stopped):
            if is_stopped():  # before the first step, to compile
                return None
            os.kill(os.getpid(), signal.SIGTERM)
            while not is_stopped():
                count.append(1)
            return None

        return evaluate

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluation", slow)
        since = time.monotonic()
        assert run(*options, "--eval-every", "3") == 143 and time.monotonic() - since < 60
    assert steps_in(f"evaluating-{setting}") == [3]
    assert run(*options) == 0 and bitwise_equal(arrays(f"evaluating-{setting}"), arrays(whole.folder))


def test_real_evaluation_stops_when_asked(here):
    job = cli.prepare(parse(words("--eval-batches", "9")))
    plan = train.plan_module(job.make_model, **job.sharding)
    params = plan.create(lambda: train.nnx.to_pure_dict(train.nnx.state(job.make_model(), train.nnx.Param)))
    asked = []
    assert train.evaluation(job, plan)(params, lambda: asked.append(1) or len(asked) == 2) is None
    assert len(asked) == 2


def test_signal_during_a_slow_save_waits_for_it_and_saves_the_rest(setting, whole, monkeypatch, capsys):
    """C-45 (a): step 4 is being written when the signal comes; it becomes complete, the last step is saved, and the
    same again goes on from there."""
    options = [*whole.options, "--checkpoint", f"slow-{setting}"]
    write, begun = store.write_zarr, threading.Event()

    def slow(*args, **options):
        begun.set()
        time.sleep(1)
        return write(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_zarr", slow)
        at_step(patch, 4, lambda: (begun.wait(60), kill_self(signal.SIGTERM)()))
        since = time.monotonic()
        assert run(*options, "--save-every", "4") == 143 and time.monotonic() - since < 60
    steps = steps_in(f"slow-{setting}")
    assert steps in ([4, 5], [4])  # complete ones and nothing else
    assert run(*options) == 0 and f"from step {steps[-1]} of" in capsys.readouterr().out
    assert bitwise_equal(arrays(f"slow-{setting}"), arrays(whole.folder))


COMPILING = """
import hashlib, sys, train

def compile_for_long(*_, **__):
    def step(state, batch):
        print("compiling", flush=True)
        # As XLA does: minutes in C with the interpreter's lock released, where no Python handler runs.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
    return step

train.train_step = compile_for_long
sys.exit(train.main(sys.argv[1:]))
"""


def test_signal_during_the_first_compilation_ends_the_process(setting):
    """C-45 (c): nothing is lost by ending at once, and the grace time may be shorter than the compilation."""
    number = {"fp32": signal.SIGTERM, "bf16": signal.SIGINT}[setting.precision]
    command = [sys.executable, "-c", COMPILING, *words(*setting.options, "--checkpoint", f"compiling-{setting}")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)
    try:
        assert any("compiling" in line for line in process.stdout)
        time.sleep(0.5)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number and "while compiling; there was nothing to save" in said


def test_second_ctrl_c_ends_a_process_that_compiles(here, monkeypatch, capsys):
    """The main thread is in C and hears nothing; the first signal waits for it, since there is work to be saved."""
    left, number = [], signal.SIGINT
    monkeypatch.setattr(cli, "leave", left.append)
    timers = [threading.Timer(delay, os.kill, (os.getpid(), number)) for delay in (0.1, 1.5)]
    with cli.stops_between_steps() as stop:
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})  # so that it does not end the sleep of this thread
        try:
            for timer in timers:
                timer.start()
            ctypes.CDLL(None).usleep(1_300_000)
            assert left == []
            with pytest.raises(KeyboardInterrupt):  # when the main thread is back
                ctypes.CDLL(None).usleep(1_700_000)
                threading.Event().wait(60)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        deadline = time.monotonic() + 60
        while not left and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stop.is_set() and left == [130]
    assert "SIGINT a second time" in capsys.readouterr().err


def test_evaluation_is_compiled_before_the_first_step(here, monkeypatch):
    """C-45 (c): a signal during its compilation finds nothing to lose, as one during that of the step."""
    stops, seen, listen = [], [], cli.stops_between_steps

    @contextmanager
    def stops_between_steps():
        with listen() as stop:
            stops.append(stop)
            yield stop

    def eval_step(loss, plan):
        def step(params, batch):
            seen.append(stops[0].nothing_to_lose)
            return 1.0, 1.0

        return step

    monkeypatch.setattr(cli, "stops_between_steps", stops_between_steps)
    monkeypatch.setattr(train, "eval_step", eval_step)
    assert run("--steps", "3", "--mesh", "1x8", "--eval-batches", "2") == 0
    assert seen == [True, False, False]


def test_signals_work_as_before_afterwards(here):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with cli.stops_between_steps() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set() and stop.exit_code == 143
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1


# Kills


@pytest.mark.parametrize("setting", settings(0)[:2])
def test_twenty_kills_change_nothing(here, setting):
    """A run killed 20 times at random moments ends with the parameters of the uninterrupted run, bitwise."""
    calm, killed = f"calm-{setting}", f"killed-{setting}"
    options = words(*setting.options, "--steps", "300", "--eval-every", "50", "--save-every", "3")
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(here / "programs"), "PYTHONPATH": str(ROOT)}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, str(ROOT / "train.py"), *options]
    run_of = lambda name: [*command, "--checkpoint", name, "--metrics", f"{name}.jsonl"]  # noqa: E731
    subprocess.run(run_of(calm), env=env, check=True, timeout=300)
    rng, furthest, metrics = random.Random(0), 0, Path(f"{killed}.jsonl")
    for _ in range(20):
        process, deadline = subprocess.Popen(run_of(killed), env=env), time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            done = metrics.read_text().count("\n") if metrics.exists() else 0
            if done >= furthest + rng.randint(1, 5):
                time.sleep(rng.random() * 0.1)
                break
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended by itself"
        furthest = metrics.read_text().count("\n")
    subprocess.run(run_of(killed), env=env, check=True, timeout=300)
    assert bitwise_equal(arrays(killed), arrays(calm))
    assert log(metrics) == log(f"{calm}.jsonl")
