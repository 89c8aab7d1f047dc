"""`jfsdp.metrics`: throughput by a clock set by hand, records of the global batch, and the writers."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from jfsdp import metrics
from jfsdp.layout import make_plan
from jfsdp.metrics import JsonLines, Screen, TensorBoard, Throughput, describe, in_words, record
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import unshard

from .support import submesh


class Clock:
    """Seconds, moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


# Throughput


def test_throughput_numbers(clock):
    """C-74: 8 devices x 2 sequences x 128 tokens x accumulation 4 in 0.5 s, after a step that compiled."""
    throughput, places = Throughput(8, clock=clock), 8 * 2 * 128 * 4
    clock.advance(7.0)
    first = throughput.step(jnp.zeros(()), tokens=places, places=places)
    assert (first.compile_s, first.step_time_s, first.tokens_per_s) == (7.0, None, None)
    assert throughput.mean is None
    for _ in range(3):
        clock.advance(0.5)
        timing = throughput.step(jnp.zeros(()), tokens=places, places=places)
    assert (timing.tokens_per_s, timing.tokens_per_s_per_device) == (16384, 2048)
    assert (timing.step_time_s, timing.compile_s, timing.padding_tokens) == (0.5, None, 0)
    assert (throughput.mean, throughput.recent, throughput.compile_s) == (16384, 16384, 7.0)
    assert throughput.total_tokens == 4 * places


def test_padding_is_counted_apart(clock):
    throughput = Throughput(4, clock=clock)
    throughput.step((), tokens=0, places=0)
    clock.advance(2.0)
    timing = throughput.step((), tokens=np.float32(600), places=1000)
    assert (timing.tokens, timing.padding_tokens, timing.tokens_per_s) == (600, 400, 300)


def test_the_clock_stops_when_the_result_is_ready(clock):
    class Result:
        def block_until_ready(self):
            clock.advance(0.5)

    throughput = Throughput(1, clock=clock)
    throughput.step(Result(), tokens=1, places=1)
    assert throughput.step(Result(), tokens=1, places=1).step_time_s == 0.5


def test_an_evaluation_is_in_no_step(clock):
    throughput = Throughput(1, clock=clock)
    throughput.step((), tokens=10, places=10)
    clock.advance(30.0)
    throughput.restart()
    clock.advance(1.0)
    assert throughput.step((), tokens=10, places=10).step_time_s == 1.0


def test_the_recent_rate_forgets_and_the_mean_does_not(clock):
    throughput = Throughput(1, clock=clock, window=2)
    throughput.step((), tokens=10, places=10)
    for seconds in (4.0, 1.0, 1.0):
        clock.advance(seconds)
        throughput.step((), tokens=10, places=10)
    assert (throughput.recent, throughput.mean) == (10, 5)


def test_waiting_for_data_is_counted_for_each_process_alone(clock):
    throughput = Throughput(1, clock=clock)

    def slow():
        for _ in range(3):
            clock.advance(2.0)
            yield

    for _ in throughput.waits(slow()):
        clock.advance(3.0)
        throughput.step((), tokens=1, places=1)
    # The first batch is read while the model is made, and the first step compiles: neither is in a mean step.
    assert throughput.of_process() == dict(compile_s=5.0, step_s=5.0, data_s=2.0)


# Records


@pytest.mark.parametrize(("losses", "weights", "expected"), [
    (range(1, 9), [1] * 8, (4.5, 8)),
    ([2, 6, 0, 0, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0, 0, 0], (3.0, 4)),
], ids=["losses 1 to 8", "3 tokens at 2, 1 token at 6"])
def test_metrics_describe_the_global_batch(losses, weights, expected):
    """C-70 in one process: what is logged is the loss that is optimised, and its tokens, over all devices."""

    def loss(params, batch, key):
        nothing = 0 * unshard(params["w"]).sum()
        return jnp.sum(batch["loss"] * batch["weight"]) + nothing, batch["weight"].sum()

    params = {"w": jnp.zeros(8)}
    plan = make_plan(params, submesh("2x4"))
    state = TrainState.create(plan.place(params), optax.sgd(1.0), plan)
    batch = {"loss": np.asarray(losses, np.float32), "weight": np.asarray(weights, np.float32)}
    _, result = train_step(loss, optax.sgd(1.0), plan)(state, batch)
    timing = Throughput(8).step(result, tokens=result.pop("weight"), places=8)
    written = record(1, timing, **result)
    assert (written["loss"], written["tokens"]) == expected
    assert written["padding_tokens"] == 8 - expected[1]


def test_a_record_holds_python_numbers_and_nothing_unmeasured(clock):
    timing = Throughput(1, clock=clock).step((), tokens=jnp.float32(3), places=4)
    written = record(2, timing, loss=jnp.float32(0.5), skipped=np.int32(0), eval_loss=None)
    assert written == dict(step=2, loss=0.5, skipped=0, tokens=3, padding_tokens=1, compile_s=0.0)
    assert all(type(value) in (int, float) for value in written.values())


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    def device(used):
        return SimpleNamespace(memory_stats=lambda: {"bytes_in_use": used, "peak_bytes_in_use": 2 * used})

    monkeypatch.setattr(jax, "local_devices", lambda: [device(10), device(30), device(20)])
    assert metrics.memory() == {"memory_bytes": 30, "peak_memory_bytes": 60}


def test_simulated_devices_share_the_memory_of_the_process():
    (name, value), = metrics.memory().items()
    assert name == "host_peak_memory_bytes" and 50 << 20 < value < 500 << 30


# Writers


def test_json_lines_can_be_read_while_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("of an older run\n")
    writer = JsonLines(path)
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5})
        lines = path.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    writer.close()


def test_json_lines_refuse_a_place_that_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="no folder .*missing. Make it"):
        JsonLines(tmp_path / "missing" / "metrics.jsonl")
    with pytest.raises(ValueError, match="is a folder. Name a file in it"):
        JsonLines(tmp_path)


def test_a_file_of_someone_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match="m.jsonl must not be written by this user. Name another"):
        JsonLines(tmp_path / "m.jsonl")


def test_tensorboard_gets_every_name_but_the_step(monkeypatch, tmp_path):
    scalars = []
    close = lambda: scalars.append("closed")  # noqa: E731
    fake = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar), close=close)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=lambda folder: fake))
    writer = TensorBoard(tmp_path)
    writer.write({"step": 7, "loss": 0.5, "lr": 0.1})
    writer.close()
    assert scalars == [("loss", 0.5, 7), ("lr", 0.1, 7), "closed"]


def test_tensorboard_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'jfsdp\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_the_screen_of_a_file_gets_a_line_every_twentieth(tmp_path):
    with (tmp_path / "log").open("w+") as file:
        screen = Screen(Console(file=file, width=100), 200, Throughput(1))
        for step in range(1, 41):
            screen.write({"step": step, "loss": 2.0, **({"eval_loss": 3.0} if step == 25 else {})})
        screen.close()
        file.seek(0)
        lines = file.read().splitlines()
    assert [line.split("/")[0] for line in lines] == [f"step {step:>3}" for step in (1, 11, 21, 25, 35)]
    assert "eval 3.000" in lines[3]


def test_a_terminal_shows_progress():
    console = Console(force_terminal=True, width=100, record=True)
    screen = Screen(console, 10, Throughput(1))
    screen.write({"step": 3, "loss": 2.5, "peak_memory_bytes": 3 << 29})
    screen.close()
    assert "3/10 loss 2.500  1.5 GiB" in console.export_text()


def test_a_record_in_words():
    assert describe({"loss": 2.3456, "eval_loss": 2.5, "host_peak_memory_bytes": 1 << 20}, 12345.6) == (
        "loss 2.346  eval 2.500  12,346 tokens/s  1.0 MiB")


@pytest.mark.parametrize(("count", "words"), [
    (0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (3 << 40, "3,072.0 GiB")])
def test_bytes_in_words(count, words):
    assert in_words(count) == words
