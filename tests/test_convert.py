"""The commands `jfsdp export` and `jfsdp import`: what they show, hold and leave behind when they are stopped.

That what they write is right is in `test_finetune.py` and `test_huggingface.py`.
"""

import json
import os
import re
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp import convert
from jfsdp.__main__ import main as jfsdp
from jfsdp.lora import LoraOptions, add_lora, merge
from jfsdp.run_folder import Checkpoints
from jfsdp.safetensors import read_safetensors
from jfsdp.state import TrainState
from jfsdp.wrap import plan_module
from models import llama
from tests.process_memory import growth
from tests.support import submesh
from tests.test_huggingface import write_random

CONFIG = llama.Config(vocab_size=37, width=16, num_layers=3, num_heads=2, num_kv_heads=1, inner_width=24)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A Hugging Face folder, `hf`, and a checkpoint of it, `run`."""
    monkeypatch.chdir(tmp_path)
    write_random(Path("hf"), llama, CONFIG)
    assert jfsdp(["import", "hf", "run"]) == 0
    return tmp_path


@contextmanager
def files_of_at_most(size: int):
    """What a full disk does to a file, a little later: no file may grow over `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def in_folder(path):
    return sorted(path.name for path in Path(path).rglob("*"))


def test_a_terminal_sees_a_bar_of_all_bytes_on_stderr(here, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    for words in (["export", "run", "out"], ["import", "hf", "again"]):
        assert jfsdp(words) == 0
        said = capsys.readouterr()
        done, total = re.findall(r"([\d.]+)/([\d.]+) KiB", re.sub(r"\x1b\[[0-9;?]*\w", "", said.err))[-1]
        assert done == total and 1024 * float(total) == pytest.approx(4 * 7056, rel=0.01)
        assert f"{words[0]}ing" in said.err and "/s" in said.err and "left" in said.err
        assert f"{words[0]}ing" not in said.out


def test_a_file_sees_no_bar(here, capsys):
    assert jfsdp(["export", "run", "out"]) == 0
    assert capsys.readouterr().err == ""


def test_an_import_holds_a_layer_of_a_parameter_and_not_the_model(tmp_path, here):
    """C-37: the largest tensor has 2 MiB, the model 67 MB."""
    config = llama.Config(vocab_size=2048, width=256, num_layers=16, num_heads=4, num_kv_heads=4, inner_width=1024)
    write_random(tmp_path / "large", llama, config)
    assert growth(lambda: jfsdp(["import", "large", "larger"])) < 20 << 20


def test_an_import_onto_a_full_disk_leaves_nothing_and_says_so(here, capsys):
    capsys.readouterr()
    with files_of_at_most(1000):
        assert jfsdp(["import", "hf", "other"]) == 2
    said = capsys.readouterr().err
    assert "error: other/step_00000000 could not be written" in said and "File too large" in said
    assert "Make room, or name another folder" in said and not in_folder("other")
    assert jfsdp(["import", "hf", "other"]) == 0


def test_an_export_onto_a_full_disk_leaves_nothing_and_says_so(here, capsys):
    with files_of_at_most(10_000):
        assert jfsdp(["export", "run", "out"]) == 2
    assert re.search(r"model.safetensors, a file of 3\d,\d{3} bytes, could not be written", capsys.readouterr().err)
    assert not in_folder("out")
    assert jfsdp(["export", "run", "out"]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
@pytest.mark.parametrize("words", [["export", "run", "out"], ["import", "hf", "out"]], ids=["export", "import"])
def test_a_signal_ends_a_command_without_leftovers(here, capsys, monkeypatch, words, number):
    seen, before = [], signal.getsignal(number)

    @contextmanager
    def bar(*_):
        yield lambda count: seen.append(count) or (len(seen) == 3 and os.kill(os.getpid(), number))

    monkeypatch.setattr(convert, "_bar", bar)
    with pytest.raises(SystemExit) as exit:
        jfsdp(words)
    assert exit.value.code == 128 + number and len(seen) < 6
    assert f"jfsdp {words[0]}: {number.name}: removing what is half written" in capsys.readouterr().err
    assert not in_folder("out") and signal.getsignal(number) == before


def test_an_export_takes_a_folder_that_a_killed_one_left_and_no_other(here, capsys):
    Path("out").mkdir()
    for name in ("model-00001-of-00002.safetensors.part", "model.safetensors.part"):
        Path("out", name).write_text("left")
    assert jfsdp(["export", "run", "out"]) == 0
    assert in_folder("out") == ["config.json", "model.safetensors"]
    assert jfsdp(["export", "run", "out"]) == 2
    assert "out is there already and not empty. Name another folder, or use --overwrite" in capsys.readouterr().err
    assert jfsdp(["export", "run", "out/config.json", "--overwrite"]) == 2
    assert "out/config.json is a file. Name a folder to write" in capsys.readouterr().err


def test_a_parameter_that_came_from_elsewhere_is_not_exported(here, capsys):
    """C-46: chunks and sizes are right, and only the content hash knows that the values are of another place."""
    arrays = Path("run/step_00000000/arrays")
    names = [arrays / f"params.blocks.each.attn.{name}.kernel" for name in "kv"]
    names[0].rename(arrays / "aside"), names[1].rename(names[0]), Path(arrays / "aside").rename(names[1])
    assert jfsdp(["export", "run", "out"]) == 2
    said = capsys.readouterr().err
    assert "params.blocks.each.attn.k.kernel did not come back as saved" in said and "Use another checkpoint" in said
    assert not in_folder("out")


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_of_several_processes_the_first_writes(here, capsys, monkeypatch, name):
    capsys.readouterr()
    for number, is_written in (("1", False), ("0", True)):
        monkeypatch.setenv(name, number)
        assert jfsdp(["export", "run", "out"]) == 0 and jfsdp(["import", "hf", "again"]) == 0
        said = capsys.readouterr()
        assert Path("out").exists() == Path("again").exists() == bool(said.out) == is_written
        assert (f"jfsdp export: left to process 0, as this is another one ({name}=1)." in said.err) != is_written


def test_a_folder_of_checkpoints_is_no_place_for_an_export(here, capsys):
    before = in_folder("run")
    for out in ("run", "run/step_00000000"):
        assert jfsdp(["export", "run", out, "--overwrite"]) == 2
        assert f"{out} has checkpoints, for which an export in it would be taken" in capsys.readouterr().err
    assert in_folder("run") == before


@pytest.mark.parametrize("path", ["nowhere", "hf", "hf/config.json", "x" * 300], ids=["none", "other", "file", "long"])
def test_what_is_no_checkpoint_is_told_without_a_traceback(here, capsys, path):
    for words in (["inspect", path], ["export", path, "out"]):
        assert jfsdp(words) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"jfsdp {words[0]}: error: ") and path in said and not Path("out").exists()


def test_an_import_goes_on_from_nothing_that_a_killed_one_left(here):
    for name in ("arrays/params.norm.scale/zarr.json", "hashes/process_00001.json"):
        path = Path("other/step_00000000.part", name)
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    assert jfsdp(["import", "hf", "other"]) == 0
    assert in_folder("other") == in_folder("run")


def test_an_export_over_the_folder_that_it_came_from_keeps_the_tokenizer(here):
    Path("hf/tokenizer.json").write_text("{}")
    before = {name: tensor[...] for name, tensor in read_safetensors("hf").items()}
    assert jfsdp(["export", "run", "hf", "--overwrite", "--dtype", "bf16"]) == 0
    assert in_folder("hf") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all((t[...] == before[name].astype(jnp.bfloat16)).all() for name, t in read_safetensors("hf").items())


def test_an_imported_checkpoint_is_of_use_without_its_folder(here):
    Path("hf/tokenizer.json").write_text("{}")
    assert jfsdp(["import", "hf", "again"]) == 0
    Path("hf").rename("moved")
    assert jfsdp(["export", "again", "out"]) == 0
    assert in_folder("out") == in_folder("moved") == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_base_that_is_gone_is_told_of(here, capsys):
    assert jfsdp(["export", "run", "out", "--base", "run"]) == 2
    assert "--base run has no config.json. Name the Hugging Face folder" in capsys.readouterr().err
    Path("run/step_00000000/huggingface").rename("moved")
    assert jfsdp(["export", "run", "out", "--model", "moved/config.json"]) == 0
    assert "huggingface, which the run began with, is gone, and so is its tokenizer" in capsys.readouterr().out


def test_an_average_of_adapters_is_merged_into_the_frozen_weights(here, capsys):
    config = json.loads(Path("hf/config.json").read_text())
    options = LoraOptions(rank=2, alpha=4, targets=("q",))
    make = lambda: add_lora(llama.build(llama.config_from(config), rngs=nnx.Rngs(0)), options, rngs=nnx.Rngs(1))  # noqa: E731
    plan = plan_module(make, mesh=submesh("1x2"), trainable=nnx.LoRAParam)
    params = plan.create(lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param)))
    state = TrainState.create(params, optax.sgd(1.0), plan, ema=True)
    average = jax.tree.map(lambda a: a + 0.5, state.ema)
    with Checkpoints("lora") as checkpoints:
        run = dict(model=str(Path("hf").absolute()) + "/", lora="2,4,q", init_from=str(Path("hf").absolute()))
        checkpoints.save(TrainState(**{**vars(state), "ema": average}), run=run)
    for part, adapters in (("params", state.params), ("ema", average)):
        assert jfsdp(["export", "lora", part, "--part", part]) == 0
        got, block = read_safetensors(part), adapters["blocks"]["each"]["attn"]["q"]
        base = np.asarray(state.logical_params()["blocks"]["each"]["attn"]["q"]["base"]["kernel"])
        a, b = (np.asarray(block[name])[:, :16, :16] for name in ("lora_a", "lora_b"))
        want = merge(base[1], a[1], b[1], scale=2.0).T
        np.testing.assert_array_equal(got["model.layers.1.self_attn.q_proj.weight"][...], want)
    assert jfsdp(["export", "run", "out", "--part", "ema"]) == 2
    assert "is of a run without --ema. Leave out --part ema" in capsys.readouterr().err
