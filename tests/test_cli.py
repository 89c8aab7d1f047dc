"""The command line, from words to exit code: what is refused and how, what a run prints, writes and returns.

`main` is called in this process, where 8 simulated devices have started; what must come before JAX starts has
a process of its own. Runs use a tiny model, so that they compile in seconds.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import train
from jfsdp import cli, data
from jfsdp import plan as planning
from jfsdp.families import find_model
from jfsdp.metrics import JsonLines
from jfsdp.offload import CPUOffloadPolicy, OffloadPolicy
from jfsdp.options import TrainingConfig, parse
from jfsdp.wrap import plan_module

from .support import submesh

ROOT = Path(train.__file__).parent
TINY = dict(
    model_type="llama", vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=32, rms_norm_eps=1e-5,
)
FLAGS = (
    "mesh strategy model data steps batch-size seq-len accumulate precision reduce-dtype remat prefetch lr "
    "weight-decay clip-norm seed simulate metrics dry-run config checkpoint checkpoint-dir save-every keep resume "
    "audit init-from lora"
).split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny model's config.json and a little text, to be named in a few letters."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY))
    Path("text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
    return tmp_path


def run(*words: str) -> int:
    """Train the tiny model on the little text."""
    return train.main(["--model", "./config.json", "--data", "text.txt", "--seq-len", "32", *words])


@pytest.fixture
def refused(capsys, monkeypatch):
    """Give a command line that must be refused before anything compiles; get the message."""

    def refuse(words: str, code: int = 2) -> str:
        with pytest.raises(SystemExit) as exit:
            train.main(words.split())
        assert exit.value.code == code
        said = capsys.readouterr()
        assert "Traceback" not in said.err and not said.out
        return " ".join(re.sub("[│╭╮╰╯─|+]|-{3,}", "", said.err).split())  # without tyro's frame

    monkeypatch.setattr(train, "plan_module", lambda *_, **__: pytest.fail("compiled before it was refused"))
    return refuse


# Usage


@pytest.mark.parametrize(("mesh", "message"), [
    ("4x8", "needs 32 devices and 8 are present"),
    ("3x3", "needs 9 devices and 8 are present"),
    ("0x8", "has 0 x 8 = 0 devices; both sizes count devices, so use 1 or more"),
    ("1x100000", "100000 devices over 1 process are more than the 4096 that one can have"),
    ("1x4", "uses 4 of the 8 devices present. .* --allow-idle"),
    ("8by1", "mesh '8by1' is not understood"),
])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(refused, mesh, message):
    """C-64, the meshes that must not run."""
    assert re.search(message, refused(f"--mesh {mesh}"))


@pytest.mark.parametrize(("words", "shape"), [
    ("--mesh 8", (1, 8)), ("--mesh 2x4", (2, 4)), ("", (1, 8)), ("--mesh 1x4 --allow-idle", (1, 4))])
def test_a_mesh_that_fits_is_laid_out(words, shape):
    """C-64, the meshes that must run."""
    assert tuple(cli.start(parse(words.split()).devices).shape.values()) == shape


@pytest.mark.parametrize("name", ["full_shrad", "FULL-SHARD", "hybrid"])
def test_an_unknown_strategy_is_refused_with_the_known_ones(refused, name):
    """C-65, the names that must not run."""
    known = "FULL_SHARD, SHARD_GRAD_OP, SHARD_OPT, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"
    said = refused(f"--strategy {name}")
    assert said == f"train.py: error: strategy {name!r} is unknown. Use one of {known}."


def test_the_strategy_is_in_the_first_lines(capsys):
    """C-65, the name that runs."""
    assert train.main(["--strategy", "FULL_SHARD", "--dry-run"]) == 0
    assert re.search(r"strategy +FULL_SHARD", "\n".join(capsys.readouterr().out.splitlines()[:4]))


@pytest.mark.parametrize(("words", "message"), [
    ("--batch-size 10", "batch_size 10 does not split equally over 8 devices x 1 .* Use 8 or 16"),  # C-60
    ("--batch-size 8 --accumulate 2", "8 devices x 2 micro-batches = 16. Use 16."),
    ("--batch-size 0", "batch_size is 0"),
    ("--accumulate 0", "accumulate is 0"),
    ("--seq-len 1", "seq_len is 1: .* nothing to learn from a single token. Use 2 or more"),  # C-12
    ("--strategy HYBRID_SHARD", "mesh 1x8 has one replica"),
    ("--model llama-3m", "model 'llama-3m' is unknown. Use one of .*llama-tiny, .* path of a config.json"),
    ("--model no.such:thing", "No module named 'no'. Write package.module:preset"),
    ("--model models.llama:thing", "model 'models.llama:thing' is unknown. Use one of llama-tiny"),
    ("--model os:thing", "model 'os:thing': os has no presets, so it is no family"),
    ("--model ./list.json", "list.json holds a list; a config.json is one object"),
    ("--model ./words.json", "config.json: hidden_size is '16', which is no number"),
    ("--model ./other.json", "model other.json: there is no such file. Name a config.json, the folder of one"),
    ("--model ./gemma.json", "its model_type is 'gemma', which no family computes. Known are gpt2, llama, mistral"),
    ("--model ./text.txt", "text.txt is no config.json that can be read"),
    ("--data no.txt", "no.txt: there is no such file or folder"),
    ("--data short.txt", "short.txt .* has . tokens; a row of seq_len 128 needs 129"),
    ("--data empty", "a row of seq_len 128 needs 129"),
    ("--data large.npy", "token id 256 at position 7 is outside the vocabulary of 256 ids"),
    ("--data text.txt --batch-size 4096", "less than a global batch of 4096"),
    ("--metrics no/m.jsonl", "there is no folder no"),
    ("--audit-file no/a.json", "no/a.json: there is no folder no. Make it"),
    ("--eval-every 5 --held-out 0", "hold some data out"),
    ("--sample hi --held-out 0", "sample is 'hi' but samples come with evaluations, and held_out is 0"),
    ("--sample=", "sample is ''; give the first words"),
    ("--eval-every 0", "eval_every is 0; use 1 or more"),
    ("--steps 0", "steps is 0; use 1 or more"),
    ("--lr 0", "lr is 0.0; use a number above 0"),
    ("--clip-norm -1", "clip_norm is -1.0; use a number above 0"),
    ("--weight-decay nan", "weight_decay is nan; use 0 or more"),
    ("--seed 4294967296", "seed is 4294967296, of which JAX takes 32 bits only. Use one below 4294967296"),
    ("--dry-run --seq-len 1", "seq_len is 1: .* Use 2 or more"),
    ("--dry-run --held-out 1", "held_out is 1.0, but is a fraction"),
    ("--mix text.txt=inf", r"weights of a mixture are \[1, inf\]. Give each source one of 0.001 or more"),
    ("--warmup 5 --steps 5", "warmup takes 5 of 5 steps"),
    ("--precision fp8", "invalid choice 'fp8' .*'fp32', 'bf16', 'fp16'"),
    ("--remat half", "invalid choice 'half' .*'none', 'full', 'dots'"),
    ("--prefetch 3", "invalid choice '3'"),
    ("--stepz 3", "Unrecognized options: --stepz.* --steps"),
    ("--config no.toml", "no.toml cannot be read as TOML: .*No such file"),
    ("--config unknown.toml", "unknown.toml: option 'batch' is unknown. Known are mesh, .* batch-size,"),
    ("--config broken.toml", "broken.toml cannot be read as TOML"),
    ("--config table.toml", "table.toml: option 'mesh' is a dict. Write one value"),
    ("--config several.toml", r"several.toml: option 'mix' is no list of strings. Write mix = \["),
    ("--config wrong.toml", "invalid choice 'fp8'"),
])
def test_what_cannot_work_is_refused_with_what_would(here, refused, words, message):
    Path("short.txt").write_text("short")
    Path("empty").mkdir()
    Path("gemma.json").write_text(json.dumps({**TINY, "model_type": "gemma"}))
    Path("list.json").write_text("[1]")
    Path("words.json").write_text(json.dumps({**TINY, "hidden_size": "16"}))
    np.save("large.npy", np.where(np.arange(9000) == 7, 256, 1))
    Path("unknown.toml").write_text("batch = 3")
    Path("broken.toml").write_text("batch-size 3")
    Path("table.toml").write_text("[mesh]\nshard = 8")
    Path("several.toml").write_text("mix = 'a=1'")
    Path("wrong.toml").write_text("precision = 'fp8'")
    assert re.search(message, refused(words))


def test_simulated_devices_are_refused_when_jax_has_started(refused):
    """C-67, too late."""
    assert "after JAX had started with 8" in refused("--simulate 8")


@pytest.mark.parametrize(("flags", "words", "code", "message"), [
    ("--xla_force_host_platform_device_count=4", "--simulate 8", 2, "holds .*=4 and 8 .* or ask for 4"),
    ("--xla_cpu_enable_fast_min_max=false", "--simulate 4", 0, "4 simulated CPU devices, mesh 1x4"),
    ("", "--mesh 2x3", 0, "6 simulated CPU devices, mesh 2x3"),
], ids=["another count is set", "other flags are kept", "as many as the mesh"])
def test_devices_are_simulated_before_jax_starts(flags, words, code, message):
    """C-67, in time; and a CPU machine simulates the mesh that it is asked for."""
    check = "import os, sys, train; train.main(sys.argv[1:]); print(os.environ['XLA_FLAGS'])"
    command = [sys.executable, "-c", check, "--model", "llama-tiny", "--dry-run", *words.split()]
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert re.search(message, done.stdout + done.stderr)
    assert code or flags in done.stdout


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--help"])
    said = capsys.readouterr().out
    assert exit.value.code == 0
    assert not [flag for flag in FLAGS if f"--{flag} " not in said.replace(",", " ")]


# Options


def test_a_file_gives_defaults_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('mesh = "2x4"\nbatch-size = 32\nseq_len = 64\nlr = 0.5\nallow-idle = true\nsync = false')
    config = parse(["--config", str(file), "--lr", "0.25", "--no-allow-idle"])
    assert (config.devices.mesh, config.data.batch_size, config.data.seq_len) == ("2x4", 32, 64)
    assert (config.training.lr, config.devices.allow_idle, config.training.sync) == (0.25, False, False)
    assert config.training.steps == TrainingConfig().steps


def test_a_file_may_name_several_sources(tmp_path):
    """What TOML has lists for; what is typed replaces the whole list."""
    file = tmp_path / "run.toml"
    for text, mix in (('["code/=0.5", "b.txt=2"]', ("code/=0.5", "b.txt=2")), ("[]", ())):
        file.write_text(f"mix = {text}\nsteps = 7")
        config = parse(["--config", str(file)])
        assert (config.data.mix, config.training.steps) == (mix, 7)
    file.write_text('mix = ["a=1", "b=1"]')
    assert parse(["--config", str(file), "--mix", "c=1"]).data.mix == ("c=1",)


@pytest.mark.parametrize("name", ["llama", "llama-tiny", "models.llama:llama-tiny"])
def test_a_model_is_found_by_family_preset_or_module(name):
    model = find_model(name)
    assert model.name == "llama-tiny" and model.config is model.family.presets["llama-tiny"]


def test_a_model_is_found_by_its_config_json(here):
    assert find_model("./config.json").config.width == find_model(f"{here}{os.sep}").config.width == 16


@pytest.mark.parametrize(("mesh", "accumulate", "size"), [
    ("8", 1, 16), ("8", 4, 32), ("6", 1, 18), ("1", 1, 16)])
def test_the_batch_has_a_size_that_divides(mesh, accumulate, size):
    config = parse(["--mesh", mesh, "--allow-idle", "--accumulate", str(accumulate)])
    assert cli.prepare(config).batch_size == size


@pytest.mark.parametrize("words", [["--precision", "fp16"], ["--offload", "all"]], ids=" ".join)
def test_dtypes_and_offload_reach_the_plan(words):
    plan = plan_module((job := cli.prepare(parse(words))).make_model, **job.sharding)
    assert {leaf.param_dtype.name for leaf in plan.leaves} == {"float16" if "fp16" in words else "float32"}
    assert plan.offload == (CPUOffloadPolicy() if "all" in words else OffloadPolicy())


def test_matrices_decay_and_norms_of_a_stack_do_not():
    model = find_model("llama-tiny")
    plan = plan_module(lambda: model.family.build(model.config, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))
    tx, schedule = train.optimizer(TrainingConfig(lr=1.0, steps=100, warmup=10, weight_decay=0.5), plan)
    # Up to the peak in ten steps, the first of which is not lost, and down to a tenth.
    assert [float(schedule(i)) for i in (0, 10, 100)] == pytest.approx([0.1, 1.0, 0.1])
    weights = plan.map(lambda leaf: np.ones(leaf.shape, np.float32))
    updates, _ = tx.update(jax.tree.map(np.zeros_like, weights), tx.init(weights), weights)
    decayed = {leaf.path for leaf, update in zip(plan.leaves, jax.tree.leaves(updates)) if np.any(update)}
    assert decayed == {leaf.path for leaf in plan.leaves if leaf.path.endswith(("kernel", "table"))}


# Runs


def test_a_run_prints_its_story_and_writes_its_metrics(here, capsys):
    assert run(*"--mesh 2x4 --accumulate 2 --steps 5 --eval-every 2 --metrics m.jsonl".split()) == 0
    said = capsys.readouterr().out
    assert "16 sequences of 32 tokens = 8 devices x 2 micro-batches x 1" in said
    words = "mesh 2x4, HYBRID_SHARD, blocks, attn.q.kernel, step 5/5, eval, 5 of 5, per byte, tokens/s, go on"
    assert not [word for word in words.split(", ") if word not in said]
    lines = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    every = set("step loss grad_norm lr skipped updates tokens padding_tokens host_peak_memory_bytes".split())
    rates = {"step_time_s", "tokens_per_s", "tokens_per_s_per_device"}
    assert [set(line) - every for line in lines] == [
        {"compile_s"}, {*rates, "eval_loss"}, rates, {*rates, "eval_loss"}, {*rates, "eval_loss"}]
    assert all(line["tokens"] + line["padding_tokens"] == 16 * 32 for line in lines)
    assert lines[0]["loss"] == pytest.approx(np.log(256), abs=0.1) and lines[4]["loss"] < lines[0]["loss"]
    assert all(line["skipped"] == 0 and line["grad_norm"] > 0 for line in lines)
    # Neither the compilation of the step nor that of the evaluation, after step 2, is in any step's time.
    assert max(line["step_time_s"] for line in lines[1:]) < lines[0]["compile_s"] / 20

    # On another mesh, without micro-batches: the same run beyond rounding.
    assert run("--steps", "5", "--metrics", "n.jsonl", "--no-sync") == 0
    others = [json.loads(line) for line in Path("n.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "tokens", "lr"):
        wanted = [line[name] for line in lines]
        assert [line[name] for line in others] == pytest.approx(wanted, rel=1e-4)  # fp32 in another order
    assert others[4]["eval_loss"] == pytest.approx(lines[4]["eval_loss"], rel=1e-4)


def test_an_evaluation_counts_every_token_once(here, monkeypatch):
    calls = []

    def count_tokens(params, batch):
        calls.append(np.asarray(batch["tokens"]))
        return batch["tokens"].sum(), batch["weights"].sum()

    monkeypatch.setattr(train, "eval_step", lambda loss, plan: count_tokens)
    words = "--model ./config.json --data text.txt --seq-len 32 --eval-batches".split()
    job = cli.prepare(parse([*words, "99"]))
    plan = plan_module(job.make_model, **job.sharding)
    rows = [job.held_out[i] for i in range(len(job.held_out))]
    sums = [sum(float(row[name].sum()) for row in rows) for name in ("tokens", "weights")]
    assert train.evaluation(job, plan)(None) == pytest.approx(sums[0] / sums[1])
    every = list(calls)
    assert len(every) == 6 and len(rows) == 82  # batches of 16: the last one holds 2 rows and padding

    calls.clear()
    train.evaluation(cli.prepare(parse([*words, "2"])), plan)(None)
    assert [a.tolist() for a in calls] == [every[0].tolist(), every[3].tolist()]


def test_batches_are_read_ahead_and_no_further_than_the_run():
    read, plan = [], plan_module(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))

    def batches():
        for i in range(9):
            read.append(i)
            yield {"tokens": np.full((8, 2), i, np.int32)}

    assert [int(batch["tokens"][0, 0]) for batch in train.ahead(batches(), plan, 3)] == [0, 1, 2]
    assert read == [0, 1, 2]


@pytest.fixture
def instant(monkeypatch):
    """Steps that do nothing, for what happens between them; the list gets a word for each one done."""
    done = []

    def step(state, batch):
        done.append("step")
        if done.count("step") == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return state, dict(loss=1.0, weight=1.0, grad_norm=1.0, skipped=0, updates=done.count("step"))

    monkeypatch.setattr(train, "train_step", lambda *_, **__: step)
    evaluation = lambda job, plan: lambda params, _: done.append("evaluation") or 1.0  # noqa: E731
    monkeypatch.setattr(train, "evaluation", evaluation)
    return done


def test_data_that_turns_out_bad_ends_the_run_with_its_place(here, instant, capsys, monkeypatch):
    monkeypatch.setattr(data, "_CHECKED_AT_START", 0)  # as in a file that is too long to look at whole
    np.save("ids.npy", np.where(np.arange(700) == 600, 999, 1))
    with pytest.raises(SystemExit) as exit:
        run("--data", "ids.npy", "--steps", "2", "--held-out", "0")
    assert exit.value.code == 1
    assert "token id 999 at position 600 is outside the vocabulary" in capsys.readouterr().err


def test_ctrl_c_stops_between_two_steps_with_a_summary(here, instant, capsys, monkeypatch):
    before, close = signal.getsignal(signal.SIGINT), JsonLines.close
    monkeypatch.setattr(JsonLines, "close", lambda file: instant.append("close") or close(file))
    assert run("--steps", "100", "--metrics", "m.jsonl", "--eval-every", "3") == 130
    # The evaluation is compiled early; who stops a run does not wait for another.
    assert instant == ["evaluation", "step", "step", "step", "close"]
    said = capsys.readouterr().out
    assert "3 of 100" in said and "by Ctrl-C" in said and "nats per byte" in said
    assert [json.loads(line)["step"] for line in Path("m.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once():
    with cli.stops_between_steps() as asked, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.is_set()
        os.kill(os.getpid(), signal.SIGINT)


def test_running_out_of_memory_is_told_with_what_helps(capsys):
    with pytest.raises(SystemExit) as exit, cli.exits(1):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
    assert exit.value.code == 1
    assert "Out of memory allocating 9 bytes.). Use more shards, --accumulate" in capsys.readouterr().err


def test_a_mistake_in_the_code_keeps_its_traceback():
    with pytest.raises(KeyError), cli.exits(2, ValueError):
        raise KeyError("mesh")


# Dry runs


def test_a_dry_run_forecasts_and_touches_nothing(here, capsys, monkeypatch):
    monkeypatch.setattr(train, "begin", lambda *_, **__: pytest.fail("a dry run made parameters"))
    words = "--model llama3-8b --mesh 2x4 --seq-len 8192 --remat full --dry-run".split()
    assert train.main([*words, "--metrics", "m.jsonl"]) == 0
    said = capsys.readouterr().out
    assert not Path("m.jsonl").exists()
    assert "8,030,261,248 parameters" in said and "rows exchanged" in said and "streamed in slices" in said
    job = cli.prepare(parse(words))
    plan = plan_module(job.make_model, **job.sharding)
    moves = planning.traffic(plan, schedule=job.schedule, tokens=8192 * 2)
    assert f"in all {sum(move.received for move in moves) / 2**30:,.1f} GiB" in re.sub(" +", " ", said)
    # A layer saves its input: 2 sequences of 8192 tokens of 4096 fp32 numbers.
    assert "31 layers x 256.0 MiB, one at work" in said


def test_padding_and_whole_parameters_are_in_the_table(here, capsys):
    Path("config.json").write_text(json.dumps({**TINY, "hidden_size": 4, "intermediate_size": 10}))
    assert run("--dry-run") == 0
    said = capsys.readouterr().out
    assert "none divides, least padding, 10 -> 16" in said
    assert re.search(r"norm.scale +4 +whole .*4 elements for 8 shards", said)
    assert re.search(r"[\d,]+ B whole on every device; [\d.]+ KiB padding", said)
