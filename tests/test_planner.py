"""The `jfsdp` command: what it prints, its exit codes, and that it is quick."""

import json
import subprocess
import sys
import time

import pytest

from jfsdp import __main__
from jfsdp.audit import gpu
from jfsdp.planning import command as planner


def run(capsys, *words):
    try:
        code = planner.command(words)
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_tables_of_a_run_that_fits(capsys):
    code, said, _ = run(capsys, "--mesh", "4x8")
    assert code == 0
    assert "8,030,261,248 parameters" in said and "32 x H100 80GB SXM, mesh 4x8, HYBRID_SHARD" in said
    assert "Memory of one GPU: fits" in said and "of the peak" in said and "x DDP in fp32" in said


def test_a_run_that_does_not_fit_exits_with_1(capsys):
    code, said, _ = run(capsys, "--model", "llama3-70b", "--mesh", "1x8")
    assert code == 1 and "does not fit" in said


def test_json_is_json(capsys):
    code, said, _ = run(capsys, "--json", "--published", "--mesh", "1x64", "--strategy", "SHARD_GRAD_OP")
    found = json.loads(said)
    assert code == 0 and found["fits"]
    # Both meanings of SHARD_GRAD_OP, by name.
    assert {"state, zero, SHARD_GRAD_OP whole", "state, zero, SHARD_GRAD_OP at_rest"} <= set(found["published_bytes"])


def test_traffic_is_counted_as_papers_do(capsys):
    _, said, _ = run(capsys, "--json", "--published", "--mesh", "1x64")
    lines = json.loads(said)["published_bytes"]
    assert lines["traffic"] == 1.5 * lines["traffic of DDP"]
    assert lines["traffic, reduced in fp32"] == lines["traffic of DDP, reduced in fp32"] == 8 * 8_030_261_248
    assert lines["activations, one layer's input"] == 4096 * 4096 * 2


def test_recommendations_come_with_reasons(capsys):
    code, said, _ = run(capsys, "--recommend", "--mesh", "1x8", "--model", "llama3-1b")
    assert code == 0 and "One GPU is enough" in said and "fastest that fits" in said


def test_where_nothing_fits_it_says_what_would_help(capsys):
    code, said, _ = run(capsys, "--recommend", "--gpu", "rtx4090", "--mesh", "1x2", "--per-host", "2")
    assert code == 1 and "Nothing fits these GPUs. Use more of them" in said and "tokens/s per GPU  " not in said


def test_a_config_json_is_a_model(capsys, tmp_path):
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=1000, hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, rms_norm_eps=1e-5, rope_theta=1e4,
        tie_word_embeddings=False, hidden_act="silu", max_position_embeddings=2048,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, said, _ = run(capsys, "--model", str(tmp_path / "config.json"), "--mesh", "1x2", "--seq-len", "4096")
    (tmp_path / "odd.json").write_text(json.dumps(config | {"num_hidden_layers": 2.5}))
    refused = run(capsys, "--model", str(tmp_path / "odd.json"))
    assert refused[0] == 2 and "num_hidden_layers is 2.5, which is no count. Give a whole number" in refused[2]
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert code == 0 and f"{2 * layer + 2 * 64_000 + 64:,} parameters" in said


def test_an_unknown_kind_of_model_is_told_in_one_sentence(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 768}')
    code, said, complaint = run(capsys, "--model", str(tmp_path))
    assert code == 2 and said == "" and complaint.count("model_type") == 1
    assert "its model_type is 'bert', which no family computes. Known are gpt2, llama, mistral, qwen2" in complaint


def test_without_the_compiler_nothing_is_printed_but_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "missing_tools", lambda: "ptxas (nvidia-cuda-nvcc-cu12 or nvidia-cuda-nvcc)")
    for words in ((), ("--json",)):
        code, said, complaint = run(capsys, "--compile", *words)
        assert code == 2 and said == "" and "needs ptxas" in complaint and "pip install 'jfsdp[aot]'" in complaint


def test_what_a_formula_refuses_prints_no_half_of_a_table(capsys):
    code, said, complaint = run(capsys, "--model", "gpt2", "--mesh", "1x2")
    assert code == 2 and said == "" and "Use rows of at most 1024" in complaint


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("--gpu", "v100"), "gpu 'v100' is unknown. Known are"),
        (("--mesh", "0x8"), "mesh 0x8 has 0 x 8 = 0 devices; both sizes count devices, so use 1 or more"),
        (("--model", "llama4"), "model 'llama4' is unknown. Use one of"),
        (("--mesh", "1x8", "--strategy", "HYBRID_SHARD"), "has one replica"),
        (("--picture", "s.html"), "picture needs something to draw: add --compile or --sweep"),
        (("--save", "p.json"), "save keeps a compiled program: add --compile"),
        (("--compile", "--offload", "all"), "have no host whose memory a program could name. Leave out --compile"),
        (("--gpu", "h100-pcie", "--compile"), "'h100-pcie' is not described to the compiler. Compile for one of a100"),
        (("--compile", "--picture", "s.png"), "s.png ends in none of .html, .htm. Name a file that does"),
        (("--compile", "--mesh", "1x1", "--picture", "s.html"), "and one GPU has none. Leave it out"),
        (("--sweep", "--picture", "s.pdf"), "s.pdf ends in none of .png, .html, .htm"),
        (("--compile", "--save", "nowhere/p.json"), "nowhere/p.json: there is no folder nowhere. Make it"),
        (("--sweep", "--recommend"), "sweep is a table of its own: leave out --recommend"),
        (("--sweep", "--compile"), "sweep is a table of its own: leave out --recommend, --compile"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_to_do(capsys, words, advice):
    code, _, complaint = run(capsys, *words)
    assert code == 2 and advice in " ".join(complaint.replace("\n", " ").split())


def test_the_command_lists_its_commands_and_imports_nothing(capsys):
    assert __main__.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("plan", "audit", "inspect", "export", "import"))
    assert __main__.main(["plans"]) == 2
    assert "command 'plans' is unknown. Known are plan, audit" in capsys.readouterr().err


def test_every_listed_command_exists():
    import importlib

    for where, _ in __main__.COMMANDS.values():
        module, function = where.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_a_plan_takes_a_moment():
    """Instant by the user's clock: under 3 s of work, imports included (the machine may be busy with other things)."""
    code = "import resource; from jfsdp.__main__ import main; main(['plan', '--mesh', '8x8']); " + (
        "u = resource.getrusage(resource.RUSAGE_SELF); print('CPU', u.ru_utime)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rsplit("CPU", 1)[1]) < 4.0, f"{time.perf_counter() - began:.1f} s in all"
