"""Fine-tuning from the command line: begin from a Hugging Face folder, train all of it or adapters, export.

The whole way is one run each: what `train.py` begins with, learns from, saves and prints, and what `jfsdp export`
makes of it.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train
from jfsdp.__main__ import main as jfsdp
from jfsdp.batches import Batches
from jfsdp.data import load
from jfsdp.families import find_model
from jfsdp.huggingface import load_pretrained
from jfsdp.instructions import load_instructions
from jfsdp.safetensors import read_safetensors
from jfsdp.tokenizer import Tokenizer
from jfsdp.wrap import plan_module
from models import llama
from tests.support import submesh
from tests.test_huggingface import write_random
from tests.test_instructions import TALK, folder  # noqa: F401  a tokenizer, as a fixture

CONFIG = llama.Config(vocab_size=304, width=16, num_layers=2, num_heads=2, num_kv_heads=1, inner_width=24)


@pytest.fixture
def here(tmp_path, monkeypatch, folder):  # noqa: F811
    """A folder with a model and its tokenizer, `hf`, and two kinds of data."""
    monkeypatch.chdir(tmp_path)
    write_random(Path("hf"), llama, CONFIG, jnp.bfloat16)
    for path in folder.iterdir():
        (Path("hf") / path.name).write_bytes(path.read_bytes())
    Path("text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    asks = [(f"{i} times {i}?", str(i * i)) for i in range(60)]
    talks = [{"messages": [dict(role="user", content=q), dict(role="assistant", content=a)]} for q, a in asks]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, [*talks, {"messages": TALK}])))
    return tmp_path


def run(*words: str) -> list[dict]:
    words = ("--init-from", "hf", "--seq-len", "48", "--batch-size", "16", "--metrics", "m.jsonl", *words)
    assert train.main(words) == 0
    return [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]


def first_loss(rows) -> float:
    """The loss of the first batch under the weights of the folder, without a mesh."""
    plan = plan_module(lambda: llama.build(CONFIG, rngs=nnx.Rngs(0)), mesh=submesh("1x1"))
    model = plan.door.outside(load_pretrained("hf", plan, llama), {})
    batch = next(Batches(rows, global_batch=16))
    names = "tokens targets weights segments positions".split()
    return float(jnp.divide(*nnx.jit(lambda model, batch: model.loss(**batch))(model, {n: batch[n] for n in names})))


def test_full_fine_tuning_on_text_begins_with_the_folder_or_what_was_imported_and_is_exported(here, capsys):
    last = run("--data", "text.txt", "--steps", "3", "--checkpoint", "run", "--sample", "2 times", "--eval-every", "3")
    rows, _ = load("text.txt", seq_len=48, vocab_size=304, tokenizer=Tokenizer("hf"))
    assert rows.end_of_document == Tokenizer("hf").end and len(np.unique(rows[0]["tokens"])) > 3
    assert last[0]["loss"] == pytest.approx(first_loss(rows), rel=1e-5)
    assert last[0]["lr"] < last[-1]["lr"] * 1.1 + 2e-5 <= 6e-5  # a rate for weights that are trained already
    assert "sample    2 times" in capsys.readouterr().out
    assert jfsdp(["export", "run", "out", "--dtype", "bf16"]) == 0
    exported, origin = read_safetensors("out"), read_safetensors("hf")
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in origin.items()}
    moved = [not np.array_equal(t[...], origin[name][...]) for name, t in exported.items()]
    assert any(moved) and all(
        np.abs(np.float32(t[...]) - np.float32(origin[name][...])).max() < 0.02 for name, t in exported.items()
    )
    assert Path("out/tokenizer.json").read_bytes() == Path("hf/tokenizer.json").read_bytes()
    assert llama.config_from(json.loads(Path("out/config.json").read_text())).tied == CONFIG.tied

    assert jfsdp(["import", "hf", "imported"]) == 0
    assert "parameters of" in capsys.readouterr().out
    Path("m.jsonl").unlink()
    (there,) = run("--init-from", "imported", "--tokenizer", "hf", "--data", "text.txt", "--steps", "1")
    assert (there["loss"], there["grad_norm"]) == (last[0]["loss"], last[0]["grad_norm"])
    assert jfsdp(["export", "imported", "again", "--dtype", "bf16"]) == 0
    again = read_safetensors("again")
    assert all(again[name][...].tobytes() == t[...].tobytes() for name, t in origin.items())


def test_adapters_learn_the_answers_and_are_exported_merged_or_alone(here, capsys):
    words = ("--data", "talks.jsonl", "--lora", "2,8,q+mlp.down", "--lr", "0.1", "--warmup", "0", "--checkpoint", "run")
    last = run(*words, "--steps", "4", "--mesh", "2x4", "--precision", "bf16")
    rows, held = load_instructions("talks.jsonl", Tokenizer("hf"), seq_len=48, vocab_size=304)
    assert last[0]["loss"] == pytest.approx(first_loss(rows), rel=0.02)  # bf16
    assert last[0]["tokens"] == next(Batches(rows, global_batch=16))["weights"].sum()
    assert last[-1]["loss"] < last[0]["loss"] - 0.1
    assert "of answers" in (said := capsys.readouterr().out) and "frozen" in said and str(len(held)) in said
    last = run(*words, "--steps", "5", "--mesh", "1x8", "--precision", "bf16", "--reschedule")
    assert last[-1]["step"] == 5 and "resumed" in capsys.readouterr().out

    assert jfsdp(["export", "run", "merged"]) == 0 and jfsdp(["export", "run", "alone", "--adapter"]) == 0
    merged, origin = read_safetensors("merged"), read_safetensors("hf")
    adapter = read_safetensors("alone/adapter_model.safetensors")
    settings = json.loads(Path("alone/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (2, 8.0, str(here / "hf"))
    assert len(adapter) == 2 * 2 * 2
    for name, tensor in merged.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        want = np.float32(origin[name][...])
        if (a := adapter.get(f"{module}.lora_A.weight")) is not None:
            want = want + 4.0 * adapter[f"{module}.lora_B.weight"][...] @ a[...]
            assert np.abs(want - np.float32(origin[name][...])).max() > 0.01
        np.testing.assert_array_equal(tensor[...], want.astype(tensor.dtype))


@pytest.mark.parametrize("words, mend", [
    ("--lora 8", "lora trains adapters of a model that is trained already: name it with --init-from"),
    ("--init-from hf --model gpt2", "init_from hf says what the model is. Leave out --model gpt2"),
    ("--init-from hf --lora big", "lora 'big' is not understood"),
    ("--init-from nowhere", "init_from nowhere: there is no such folder. Name a folder with the config.json"),
    ("--init-from empty", "init_from empty: there is neither a config.json nor a checkpoint in it. Name a folder"),
    ("--model t5-small", "model t5-small reads pairs of source and target, which train.py has no data for"),
    ("--data talks.jsonl", "talks.jsonl has conversations, which need a tokenizer: give --tokenizer FOLDER"),
    ("--init-from bare", "bare has no tokenizer.json, and its 304 ids are no bytes. Give --tokenizer FOLDER"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(here, capsys, words, mend):
    write_random(Path("bare"), llama, CONFIG)
    Path("empty").mkdir()
    with pytest.raises(SystemExit) as exit:
        train.main(words.split())
    assert exit.value.code == 2 and mend in capsys.readouterr().err


def test_a_config_that_one_family_knows_is_refused_in_its_words_alone(here):
    path = Path("hf/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_scaling": {"rope_type": "dynamic"}}))
    with pytest.raises(ValueError, match="rope_type is 'dynamic'") as error:
        find_model(str(path))
    assert "gpt2" not in str(error.value)


def test_a_folder_with_other_weights_is_refused_before_the_first_step(here, capsys):
    write_random(Path("hf"), llama, CONFIG, change=lambda t: {k: a for k, a in t.items() if "norm" not in k})
    with pytest.raises(SystemExit) as exit:
        run("--data", "text.txt", "--steps", "1")
    said = capsys.readouterr().err
    assert exit.value.code == 2 and "missing: model.layers.0.input_layernorm.weight" in said


def test_an_export_of_what_is_no_model_is_refused(here, capsys):
    assert jfsdp(["export", "hf", "out"]) == 2
    assert "error: hf" in capsys.readouterr().err and not Path("out").exists()
