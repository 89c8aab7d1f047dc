"""The README's Python examples run as they stand, and its options exist."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jfsdp
from jfsdp import checkpoint, consolidated, run_folder

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def test_there_are_examples_of_both_doors():
    assert any("fully_shard" in source for source in EXAMPLES)
    assert any("make_plan" in source for source in EXAMPLES)


@pytest.mark.parametrize("source", EXAMPLES, ids=lambda source: re.search(r"import (\S+)", source)[1].strip(","))
def test_example_runs_and_prints_finite_numbers(source, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if "equinox" in source:
        pytest.importorskip("equinox", reason="Equinox is not installed")
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    numbers = [float(word) for word in capsys.readouterr().out.split()]
    assert numbers and all(abs(n) < 1e6 for n in numbers)


def test_what_stands_for_a_name_of_pytorch_exists():
    """In the right column of the page, what is called is exported and its keywords are known."""
    page = README.split("### Every argument and method")[1].split("\n### ")[0]
    cells = [row.split("|")[2] for row in page.splitlines() if row.startswith("| ") and "| ---" not in row]
    calls = [call for cell in cells for call in re.findall(r"(\w+)\(([^`]*)\)`", cell)]
    assert len(calls) > 20
    for name, arguments in calls:
        known = {**vars(jfsdp), **vars(checkpoint), **vars(run_folder), **vars(consolidated), "module": None}
        assert name in known, f"{name}(...) does not exist"
        if known[name] is None:
            continue
        parameters = inspect.signature(known[name]).parameters
        takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for keyword in re.findall(r"(\w+)=", re.sub(r"\w+\(.*\)|\{.*\}", "", arguments)):
            assert takes_more or keyword in parameters, f"{name} has no {keyword}"


def test_options_in_the_readme_exist():
    root = Path(__file__).parent.parent
    shown = subprocess.run([sys.executable, "train.py", "--help"], capture_output=True, text=True, cwd=root).stdout
    used = {o for line in re.findall(r"python train\.py (.*)", README) for o in re.findall(r"--[a-z-]+", line)}
    assert used and not {o for o in used if o not in shown and o != "--help"}
