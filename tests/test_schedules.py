"""The planned step against the step that XLA makes for GPUs: memory, bytes, and what hides behind what.

Each case compiles in a process of its own, in a quarter of a minute; microseconds are XLA's cost model. What one
compiled program shows by itself is in test_gpu_program.py; here formula and roofline are held to it.
"""

import json
from functools import cache

import pytest

from jfsdp.audit import gpu
from jfsdp.planning import command as planner
from jfsdp.planning.compare import compile_workload
from jfsdp.planning.forecast import Forecast
from jfsdp.planning.roofline import tokens_to_hide
from jfsdp.planning.workload import Workload

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(gpu.missing_tools() is not None, reason=f"needs {gpu.missing_tools()}"),
]
MIB = 1 << 20
FRAGMENTS = 500 * MIB
"""By how much holes in XLA's heap differ between two programs of this size, which no formula knows."""


@cache
def compiled(model="tests.few_layers:8b-4", **fields):
    return compile_workload(Workload(model=model, **fields))


def needed(compared):
    return compared.report.memory.needed


def formula(compared):
    return Forecast(compared.work).needed


class TestOneHost:
    def test_memory_is_within_its_budget(self):
        """Never under by more than 2 percent, nor over by more than 7: with 4 layers what is at work weighs more."""
        assert -0.02 <= formula(compiled()) / needed(compiled()) - 1 <= 0.07

    def test_bytes_are_those_of_the_formula(self):
        rows = [row for row in compiled().rows() if not row.name.startswith("memory")]
        assert {row.name.split(",")[0] for row in rows} >= {"all-gather over shard", "reduce-scatter over shard"}
        assert all(abs(row.error) <= 0.01 for row in rows), rows

    def test_the_state_is_exact(self):
        state = next(row for row in compiled().rows() if row.name == "memory: state and batch")
        assert abs(state.error) < 1e-4

    def test_layers_hide_their_communication_where_the_roofline_says_so(self):
        f = Forecast(compiled().work)
        assert compiled().work.tokens >= tokens_to_hide(f.shape, f.run, compiled().work.cluster)
        assert exposed(compiled()) <= 0.001

    def test_both_estimates_are_there_and_agree_on_what_matters(self):
        """XLA prices attention at nothing, the replay does not; both see nothing large exposed in a layer."""
        found = compiled().audited
        for body, label in found.bodies.items():
            if label.startswith("layers"):
                played = found.played[body]
                assert played.exposed_us <= 0.05 * played.us
                assert played.us > found.exposed.bodies[body].total_us


def exposed(compared):
    """Share of the layers' loop bodies that waits, by XLA's estimate."""
    found = compared.audited
    bodies = [found.exposed.bodies[body] for body, label in found.bodies.items() if label.startswith("layers")]
    assert len(bodies) == 2
    return sum(b.exposed_us for b in bodies) / sum(b.total_us for b in bodies)


@pytest.mark.slow
class TestGrowth:
    def grown(self, **fields):
        few, many = compiled(), compiled(**fields)
        return needed(many) - needed(few), formula(many) - formula(few)

    def test_in_layers(self):
        by_compiler, by_formula = self.grown(model="tests.few_layers:8b-8")
        assert by_compiler == pytest.approx(by_formula, rel=0.06)

    def test_in_shards(self):
        by_compiler, by_formula = self.grown(mesh="1x16")
        assert by_compiler < -1024 * MIB and by_compiler == pytest.approx(by_formula, abs=FRAGMENTS)

    def test_in_tokens(self):
        by_compiler, by_formula = self.grown(batch=2)
        assert by_compiler > 512 * MIB and by_compiler == pytest.approx(by_formula, abs=FRAGMENTS)


@pytest.mark.slow
class TestOtherShapes:
    def test_too_few_tokens_expose_layers_as_the_roofline_says(self):
        few = compiled(seq_len=512)
        f = Forecast(few.work)
        assert few.work.tokens < tokens_to_hide(f.shape, f.run, few.work.cluster)
        assert exposed(few) > 0.05

    def test_hybrid_reduces_shards_over_replicas(self):
        hybrid = compiled(mesh="4x8")
        over = {row.name: row for row in hybrid.rows() if "replica" in row.name}
        assert list(over) == ["all-reduce over replica, float32"]
        assert all(abs(row.error) <= 0.035 for row in over.values())  # a late loop may all-reduce a little more

    def test_shard_grad_op_gathers_once_and_keeps(self):
        kept, freed = compiled(strategy="SHARD_GRAD_OP"), compiled()
        gathers = lambda c: c.audited.traffic["all-gather", "shard", "bfloat16"]
        assert gathers(kept) < 0.75 * gathers(freed)  # the head is gathered twice either way
        assert needed(kept) > needed(freed)

    def test_a_consumer_gpu_is_compiled_and_its_estimate_called_void(self):
        found = compiled(model="llama3-1b", gpu="rtx4090", mesh="1x2", per_host=2, seq_len=1024)
        assert needed(found) == pytest.approx(formula(found), rel=0.1)
        assert any("not microseconds" in w or "no estimate" in w for w in found.report.exposed.warnings)
        assert found.audited.played


@pytest.mark.slow
def test_the_command_compares_draws_and_keeps(tmp_path, capsys):
    words = ["--model", "tests.few_layers:8b-4", "--compile", "--json"]
    code = planner.command([*words, "--picture", str(tmp_path / "s.html"), "--save", str(tmp_path / "p.json")])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["compiled"]["memory_bytes"]["needed"] > 0
    assert {"layers forward", "layers backward"} <= set(found["compiled"]["replay"])
    assert (tmp_path / "s.html").read_text().count("<svg") == 2
    assert json.loads((tmp_path / "p.json").read_text())["platform"] == "h100"
