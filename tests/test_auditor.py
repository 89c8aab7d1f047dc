"""The second estimate, the tables of a program, the picture, and two programs side by side; from programs by hand.

A hand-written schedule has known sums: what is hidden is hidden because the text says so.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import train
from jfsdp.audit import gpu
from jfsdp.audit import report as auditor
from jfsdp.audit.program import Memory
from jfsdp.audit.replay import replay
from jfsdp.audit.report import Audited
from jfsdp.planning.hardware import Cluster
from jfsdp.planning.roofline import Rates
from tests.support import compile_step, toy_batch, toy_loss, toy_params

MESH = {"replica": 1, "shard": 8}
SIZE = 2 * 4096 * 4096
"""Bytes of a gathered weight."""


def program(*lines, loop=()):
    """A scheduled entry of these instructions, with a loop body of ten trips where `loop` is given."""
    head = "HloModule jit_step, is_scheduled=true\n\n"
    if loop:
        head += "%body (p: (bf16[512,4096])) -> (bf16[512,4096]) {\n" + "\n".join(f"  {x}" for x in loop) + "\n}\n\n"
        head += "%cond (q: (bf16[512,4096])) -> pred[] {\n  ROOT %less = pred[] custom-call()\n}\n\n"
    return (
        head + "ENTRY %main (a: bf16[512,4096]) -> bf16[4096,4096] {\n" + "\n".join(f"  {x}" for x in lines) + "\n}\n"
    )


SHARD = "%w = bf16[512,4096]{1,0} parameter(0)"
X = "%x = bf16[4096,4096]{1,0} parameter(1)"


def start(name, is_sync=False):
    return (
        f"%{name} = (bf16[512,4096]{{1,0}}, bf16[4096,4096]{{1,0}}) all-gather-start(%w), replica_groups=[1,8]<=[8], "
        f'dimensions={{0}}, backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    )


def done(name):
    return f"%{name}.done = bf16[4096,4096]{{1,0}} all-gather-done(%{name})"


def matmul(name, of="%x"):
    return f"%{name} = bf16[4096,4096]{{1,0}} dot({of}, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"


GATHER_US = Cluster().seconds(SIZE, 8) * 1e6
MATMUL_US = 2 * 4096**3 / (Cluster().chip.matmul * Rates().matmul) * 1e6


def played(text, computation="main", mesh=MESH):
    return replay(text, mesh, Cluster())[computation]


class TestReplay:
    def test_a_gather_beside_a_longer_matmul_costs_nothing(self):
        assert MATMUL_US > GATHER_US
        one = played(program(SHARD, X, start("g"), matmul("m"), done("g")))
        assert one.exposed_us == 0 and one.us == pytest.approx(MATMUL_US)

    def test_a_gather_with_nothing_beside_it_is_exposed_whole(self):
        one = played(program(SHARD, X, start("g"), done("g"), matmul("m")))
        assert one.exposed_us == pytest.approx(GATHER_US)
        assert one.us == pytest.approx(GATHER_US + MATMUL_US)

    def test_a_blocking_gather_hides_behind_nothing(self):
        one = played(program(SHARD, X, start("g", is_sync=True), matmul("m"), done("g")))
        assert one.exposed_us == pytest.approx(GATHER_US)

    def test_collectives_wait_for_one_another(self):
        both = played(
            program(SHARD, X, start("g"), start("h"), start("i"), matmul("m"), done("g"), done("h"), done("i"))
        )
        assert both.exposed_us == pytest.approx(max(0.0, 3 * GATHER_US - MATMUL_US))

    def test_loops_count_by_their_trips(self):
        call = (
            "%l = (bf16[512,4096]) while(%w), condition=%cond, body=%body, "
            'backend_config={"known_trip_count":{"n":"10"}}'
        )
        text = program(SHARD, call, loop=(SHARD, X, start("g"), done("g"), matmul("m")))
        assert (
            played(text).exposed_us
            == pytest.approx(10 * played(text, "body").exposed_us)
            == pytest.approx(10 * GATHER_US)
        )

    def test_a_loop_over_layers_that_communicates_nothing_is_not_taken_for_attention(self):
        layers = "%layers = (bf16[512,4096]) while(%w), condition=%cond, body=%layer, " + LOOP[LOOP.index("backend") :]
        inside = "\n  ".join((SHARD, X, matmul("n"), LOOP))
        body = f"%layer (p: (bf16[512,4096])) -> (bf16[512,4096]) {{\n  {inside}\n}}\n\n"
        text = program(SHARD, X, layers, loop=(SHARD, X, matmul("m"))).replace("ENTRY", body + "ENTRY")
        attention = 10 * MATMUL_US / 0.6
        assert played(text).us == pytest.approx(10 * (MATMUL_US + attention))

    def test_an_all_reduce_over_replicas_pays_for_the_network(self):
        reduce = "%r = f32[4096,4096]{1,0} all-reduce(%x), replica_groups={{0,2},{1,3}}, to_apply=%add"
        near = "%r = f32[4096,4096]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add"
        mesh, cluster = {"replica": 2, "shard": 2}, Cluster(gpu="h100", per_host=2, network_gbps=100)
        far_us, near_us = (replay(program(X, line), mesh, cluster)["main"].exposed_us for line in (reduce, near))
        assert far_us == pytest.approx(2e6 * cluster.seconds(SIZE, 2, spread=2)) and far_us > 5 * near_us

    def test_matmuls_run_at_the_rate_that_the_roofline_gives_the_gpu(self):
        for name in ("h100", "a100", "rtx4090"):
            cluster = Cluster(gpu=name)
            one = replay(program(X, matmul("m")), MESH, cluster)["main"]
            assert one.us == pytest.approx(2 * 4096**3 / Rates().matmuls(cluster) * 1e6)
        ampere = Cluster(gpu="a100")
        assert Rates().matmuls(ampere) == ampere.chip.matmul * Rates().matmul_ampere

    def test_smaller_hosts_put_a_group_on_the_network(self):
        fast, slow = (audited(program(SHARD, X, start("g"), done("g")), per_host=n) for n in (8, 2))
        assert slow.played["main"].exposed_us > 2 * fast.played["main"].exposed_us

    def test_events_are_in_order_and_lanes_do_not_overlap(self):
        one = played(program(SHARD, X, start("g"), matmul("m"), done("g"), matmul("n", "%m")))
        for lane in ("compute", "communication"):
            spans = [(e.begin, e.end) for e in one.events if e.lane == lane]
            assert spans and all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:]))


LOOP = '%l = (bf16[512,4096]) while(%w), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}'
LOOPED = program(SHARD, X, LOOP, loop=(SHARD, X, start("g"), matmul("m"), done("g")))


def audited(text=LOOPED, name="ours", platform="h100", **more):
    memory = Memory(argument=4 << 30, output=4 << 30, alias=4 << 30, temp=2 << 30)
    return Audited(
        name=name, text=text, mesh_shape=MESH, memory=memory, platform=platform, jax_version=jax.__version__, **more
    )


def said(parts):
    console = Console(width=200, no_color=True, highlight=False)
    with console.capture() as found:
        for part in parts:
            console.print(part)
    return found.get()


class TestTables:
    def test_they_say_what_moves_and_behind_what(self):
        words = said(auditor.tables(audited()))
        assert "6.0 GiB" in words  # needed
        assert "layers forward" in words and "1 of 1, 137+ GFLOP" in words
        # Each gather hides behind the matmul beside it.
        assert re.search(rf"layers forward +10 +0 +{MATMUL_US:,.0f}\b", words)
        assert re.search(rf"a step +1 +0 +{10 * MATMUL_US:,.0f}\b", words)

    def test_a_void_estimate_is_called_so_and_not_printed(self):
        estimate = gpu.BodyEstimate(exposed_us=5000.0, total_us=9000.0, by_kind={}, unpriced=("psum.21",))
        exposed = gpu.Exposed(
            {"body": estimate}, 50_000.0, ("void: body has 1 operations at a placeholder price of 5,000 us",)
        )
        words = said(auditor.tables(audited(exposed=exposed)))
        assert re.search(r"layers forward +10 +void +0 ", words) and "the replay stands alone" in words
        assert "9,000" not in words and "50,000" not in words

    def test_figures_that_are_no_microseconds_are_not_printed(self):
        estimate = gpu.BodyEstimate(exposed_us=77.0, total_us=9000.0, by_kind={}, unpriced=())
        exposed = gpu.Exposed({"body": estimate}, 770.0, (gpu._NO_TIME + "; its figures are not microseconds.",))
        words = said(auditor.tables(audited(platform="rtx4090", exposed=exposed)))
        assert words.count("void") >= 3 and "not microseconds" in words and "replay" in words
        assert "9,000" not in words and "770" not in words

    def test_a_doubt_about_one_body_is_none_about_another_whose_name_begins_so(self):
        estimate = gpu.BodyEstimate(exposed_us=1.0, total_us=2.0, by_kind={}, unpriced=())
        exposed = gpu.Exposed({"body": estimate, "body.1": estimate}, 2.0, ("void: body.1 has 1 operations",))
        assert exposed.is_void("body.1") and exposed.is_void() and not exposed.is_void("body")

    def test_a_model_of_few_layers_and_a_large_vocabulary_is_not_taken_for_its_head(self):
        body = LOOPED[LOOPED.index("%body") : LOOPED.index("ENTRY")]
        small = "%m = bf16[512,4096]{1,0} dot(%w, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
        head = body.replace("%body", "%slice").replace("%cond", "%done").replace(matmul("m"), small)
        slices = LOOP.replace("%l ", "%s ").replace("%cond", "%done").replace("%body", "%slice").replace("10", "99")
        text = LOOPED.replace("ENTRY", head + "ENTRY").replace(LOOP, f"{LOOP}\n  {slices}")
        assert audited(text).bodies == {"body": "layers forward", "slice": "slices of the head forward"}
        twin = head.replace(small, matmul("m"))  # an encoder and a decoder
        assert audited(text.replace(head, twin)).bodies["slice"] == "layers forward, loop 2"

    def test_warnings_name_loops_as_the_table_does(self):
        estimate = gpu.BodyEstimate(exposed_us=1.0, total_us=2.0, by_kind={}, unpriced=("x",))
        exposed = gpu.Exposed({"body": estimate}, 2.0, ("void: body has 1 operations (body.7[1])",))
        assert "void: layers forward has 1 operations (body.7[1])" in said(auditor.tables(audited(exposed=exposed)))

    def test_one_device_communicates_nothing_and_has_no_void_figures(self, tmp_path):
        alone = audited(program(X, matmul("m")), exposed=gpu.Exposed({}, 0.0, ()))
        words = said(auditor.tables(alone))
        assert "Nothing is communicated" in words and "void" not in words and "Traffic" not in words
        with pytest.raises(ValueError, match="communicates nothing, so there is no schedule to draw"):
            alone.draw(tmp_path / "s.html")

    def test_a_cpu_program_says_what_its_backend_hides(self):
        step = compile_step(toy_loss(), toy_params(dtype=jnp.float32), toy_batch(dtype="float32"), "2x4")
        found = auditor.of_compiled(step.compiled, step.plan.mesh, name="toy", jax_version=jax.__version__)
        words = said(auditor.tables(found))
        assert found.platform == "cpu" and not found.played
        assert "reduce-scatter" in words and "widens bf16 collectives" in words
        assert found.memory.needed == step.memory.needed


class TestFiles:
    def test_a_program_comes_back_as_it_was_kept(self, tmp_path):
        audited().save(tmp_path / "a.json")
        back = Audited.load(tmp_path / "a.json")
        assert back.traffic == audited().traffic == {("all-gather", "shard", "bfloat16"): 10 * SIZE * 7 // 8}
        assert back.memory == audited().memory

    def test_two_programs_side_by_side(self, tmp_path, capsys):
        other = LOOPED.replace(matmul("m") + "\n  " + done("g"), done("g") + "\n  " + matmul("m"))
        assert other != LOOPED
        audited().save(tmp_path / "a.json")
        audited(other, name="exposed").save(tmp_path / "b.json")
        assert auditor.command([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
        words = capsys.readouterr().out
        assert "memory: needed" in words and "same" in words
        assert "a.json: ours" in words and "b.json: exposed" in words
        for place in ("replay: exposed, us", "in layers forward"):
            assert f"+{10 * GATHER_US:,.0f}" in next(line for line in words.splitlines() if place in line)

    @pytest.mark.parametrize("content", ["{}", "no json", None])
    def test_other_files_are_refused(self, tmp_path, capsys, content):
        if content is not None:
            (tmp_path / "a.json").write_text(content)
        assert auditor.command([str(tmp_path / "a.json")]) == 2
        assert "a.json holds no program" in (words := capsys.readouterr().err) and "--audit-file" in words


class TestPicture:
    def test_a_page_shows_both_lanes_and_what_waits(self, tmp_path):
        exposed = program(
            SHARD,
            X,
            LOOP,
            loop=(SHARD, X, start("g"), done("g"), matmul("m")),
        )
        audited(exposed).draw(tmp_path / "s.html")
        page = (tmp_path / "s.html").read_text()
        assert page.count("<rect") == 3  # a gather, a wait, a matmul
        assert "layers forward, one of 10 iterations" in page and "compute waits (exposed)" in page
        assert "http" not in page and "<script" not in page

    @pytest.mark.parametrize(
        ("name", "platform", "advice"),
        [
            ("s.png", "h100", "ends in none of .html, .htm. Name a file that does"),
            ("no/s.html", "h100", "there is no folder"),
            ("s.html", "cpu", "no schedule is drawn for cpu"),
        ],
    )
    def test_what_cannot_be_drawn_is_refused_before_anything_is_printed(
        self, tmp_path, capsys, name, platform, advice
    ):
        audited(platform=platform).save(tmp_path / "a.json")
        try:
            code = auditor.command([str(tmp_path / "a.json"), "--picture", str(tmp_path / name)])
        except SystemExit as left:  # options are refused where they are read
            code = left.code
        said = capsys.readouterr()
        assert code == 2 and said.out == "" and not (tmp_path / name).exists()
        assert advice in re.sub(r"\s+", " ", said.err)


def test_a_run_tells_of_its_own_program_and_keeps_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (
        "--model llama-tiny --mesh 2x4 --seq-len 32 --batch-size 8 --steps 1 --warmup 0 --held-out 0 --data text.txt"
    )
    (tmp_path / "text.txt").write_text("What a compiled step moves is read from its program. " * 40)
    assert train.main([*words.split(), "--audit", "--audit-file", "p.json"]) == 0
    said = capsys.readouterr().out
    assert "Memory of one device, as compiled" in said and "widens bf16 collectives" in said
    assert "all-reduce" in said and "block" in said  # small as it is, each collective is told of
    kept = Audited.load(tmp_path / "p.json")
    assert kept.mesh_shape == {"replica": 2, "shard": 4} and ("all-reduce", "replica", "float32") in kept.traffic
