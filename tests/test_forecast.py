"""`jfsdp plan` as a library: known numbers of memory and traffic, what fits, what is recommended, what is swept.

Formulas need no devices: a mesh of 1,024 GPUs is as quick as one of 8.
"""

import io
import json
import re
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

import train
from jfsdp import cli, tables
from jfsdp.audit import program as audit
from jfsdp.mesh import REPLICA, SHARD
from jfsdp.metrics import in_words
from jfsdp.options import parse
from jfsdp.plan import memory
from jfsdp.planning import sweep
from jfsdp.planning.forecast import GIB, Forecast
from jfsdp.planning.recommend import advice, recommend
from jfsdp.planning.workload import Workload, ahead
from jfsdp.state import TrainState
from jfsdp.wrap import plan_module
from tests.support import submesh

P = 8_030_261_248
"""Parameters of Llama-3-8B."""
SMALL = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=256, hidden_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, rms_norm_eps=1e-5, rope_theta=1e4,
    tie_word_embeddings=False, hidden_act="silu", max_position_embeddings=8192,
)  # fmt: skip
"""A config.json."""


@cache
def forecast(**fields):
    return Forecast(Workload(**fields))


def kept(f, name):
    return next(k.bytes for k in f.kept if k.name == name)


class TestMemory:
    def test_the_state_is_sixteen_bytes_a_parameter_over_all_shards(self):
        for mesh, shards in (("1x8", 8), ("1x64", 64), ("1x1024", 1024), ("4x8", 8)):
            f = forecast(mesh=mesh)
            state = sum(kept(f, name) for name in ("parameters", "optimizer", "gradients"))
            assert state == pytest.approx(16 * P / shards, rel=1e-4), mesh

    def test_one_device_has_no_second_copy_of_updated_parameters(self):
        """Compiled, SHARD_OPT on one device is the program of NO_SHARD."""
        alone = [forecast(mesh="1x1", strategy=name).needed for name in ("SHARD_OPT", "NO_SHARD")]
        assert alone[0] == alone[1]

    def test_strategies_keep_what_their_table_says(self):
        whole = forecast(strategy="NO_SHARD")
        assert [kept(whole, n) / P for n in ("parameters", "optimizer", "gradients")] == pytest.approx([4, 8, 4])
        only_state = forecast(strategy="SHARD_OPT")
        assert [kept(only_state, n) / P for n in ("parameters", "optimizer")] == pytest.approx([4, 1], rel=1e-3)

    def test_the_window_is_depth_plus_one_layers(self):
        layer = 2 * 218_112_000
        for depth in (0, 1, 2):
            window = (depth + 3) * layer  # and two of gradients: one computed, one that waits
            assert kept(forecast(prefetch=depth), "gathered window") == window
            alone = forecast(prefetch=depth, late_reduce=False)
            assert kept(alone, "gathered window") == (depth + 2) * layer and kept(alone, "reduce staging") == 0
        assert kept(forecast(strategy="SHARD_GRAD_OP"), "gathered window") == 34 * layer

    def test_full_checkpointing_saves_each_layers_input(self):
        """4 sequences of 2048 tokens of width 4096 in 16 bit are 67 MB a layer; the last one is at work."""
        assert kept(forecast(batch=4, seq_len=2048), "activations saved") == 31 * 67_108_864

    def test_accumulation_holds_gradients_and_no_sync_holds_them_whole(self):
        one = kept(forecast(), "gradients")
        assert kept(forecast(accumulate=4), "gradients") == one  # they become the result in place
        hybrid = forecast(mesh="4x8", accumulate=4)  # not where replicas are summed in the last micro-batch
        assert kept(hybrid, "gradients") == 2 * one
        no_sync = kept(forecast(accumulate=4, sync=False), "gradients")
        assert no_sync - one == 4 * (P - 2 * 128_256 * 4096)  # vocabulary tables never exist whole

    def test_three_micro_batches_and_more_make_room_for_the_next_ones_activations(self):
        one, two, three = (kept(forecast(accumulate=n), "activations saved") for n in (1, 2, 3))
        assert one == two == three / 2

    def test_optimizers_have_the_moments_that_they_have(self):
        moments = {name: kept(forecast(optimizer=name), "optimizer") for name in ("adamw", "lion", "momentum", "sgd")}
        shard = 4 * P / 8
        assert [round(moments[n] / shard, 3) for n in moments] == [2, 1, 1, 0]

    def test_what_does_not_fit_says_by_how_much(self):
        f = forecast(model="llama3-70b", mesh="1x8")
        assert not f.fits and f.spare == f.capacity - f.needed < 0
        assert forecast(model="llama3-70b", mesh="1x64").fits


    def test_logits_count_where_they_are_more_than_what_comes_after_them(self, tmp_path):
        assert kept(forecast(), "logits") == 0
        (tmp_path / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 32_000}))
        f = Forecast(Workload(model=str(tmp_path / "config.json"), seq_len=4096, batch=4))
        slices = 4 * 4096 * 2048 * (4 + 2)  # of the streamed head: fp32, and their gradient in bf16
        after = sum(kept(f, n) for n in ("gradients", "gathered window", "activations at work", "reduce staging"))
        assert kept(f, "logits") == slices - after - kept(f, "vocabulary") > 0

    def test_a_head_whose_logits_come_at_once_has_a_whole_gradient_when_layers_are_done(self):
        """Few tokens: compiled for 16 H100 (attention by chunks, JAX 0.10.2) it needs 2,736 MiB."""
        f = forecast(model="llama3-1b", mesh="1x16", seq_len=64, attention="chunked")
        passing = ("gathered window", "activations saved", "activations at work", "reduce staging", "vocabulary")
        without = memory(f.work.plan, f.work.state, f.work.layers, schedule=f.work.schedule)
        assert next(k.bytes for k in without if k.name == "logits") == 0  # nobody said how many tokens
        one_layer = kept(f, "gathered window") / 4 + kept(f, "reduce staging")
        whole = 128_256 * 2048 * (2 + 4)
        assert kept(f, "logits") == pytest.approx(whole + one_layer - sum(kept(f, n) for n in passing))
        assert f.needed / 2**20 == pytest.approx(2736, rel=0.06)

    def test_half_precision_takes_what_bf16_takes_whatever_its_name(self):
        half, brain = forecast(precision="fp16", mesh="4x8"), forecast(mesh="4x8")
        assert [(k.name, k.bytes) for k in half.kept] == [(k.name, k.bytes) for k in brain.kept]
        assert half.received == brain.received and half.timing == brain.timing
        assert {m.dtype for m in half.moves} == {"float16", "float32", "int32"}
        assert half.work.state.scale is not None  # the engine's loss scale: two numbers


class TestOffload:
    def test_the_optimizers_state_lies_on_the_host_and_crosses_twice(self):
        here, there = forecast(), forecast(offload="optimizer")
        moved = kept(here, "optimizer") - kept(there, "optimizer")
        assert moved == pytest.approx(8 * P / 8, rel=1e-4) and kept(there, "optimizer") < 16  # its counter
        assert here.needed - there.needed == moved == sum(k.bytes for k in there.on_host)
        assert there.host_traffic == (moved, moved) and here.host_traffic == (0, 0)
        assert there.timing.seconds - here.timing.seconds == pytest.approx(2 * moved / 55e9)

    def test_all_leaves_gradients_and_what_passes_through(self):
        here, there = forecast(), forecast(offload="all")
        assert kept(there, "parameters") == 0 and kept(there, "gradients") == kept(here, "gradients")
        shards = 4 * P / 8
        # Parameters and moments twice: XLA cannot write the host's results in place of their arguments.
        assert [k.bytes for k in there.on_host] == pytest.approx([2 * shards, shards, 4 * shards], rel=1e-4)
        assert there.per_host == pytest.approx(28 * P, rel=1e-4)
        got, given = there.host_traffic
        tables = 4 * 2 * 128_256 * 4096 / 8  # once; layers before both gathers, the last one's being kept
        assert got == pytest.approx(2 * (shards - tables) + tables, rel=1e-3)
        assert given == pytest.approx(shards, rel=1e-4)
        assert there.timing.optimizer == 0 and "the host computes the update" in " ".join(there.warnings)
        assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=210" in " ".join(there.warnings)

    def test_an_update_that_has_no_room_left_by_activations_is_counted(self):
        """Two moments of the largest parameter and one of the next, where everything is whole."""
        f = forecast(model="llama3-1b", strategy="NO_SHARD", offload="optimizer")
        largest = 4 * 16 * 2048 * 8192
        passing = ("gathered window", "activations saved", "activations at work", "reduce staging")
        assert kept(f, "optimizer step") == 3 * largest - sum(kept(f, n) for n in passing) > 0
        # Compiled for an H100 with its arguments placed by hand (JAX 0.10.2): 12,775 MiB.
        assert f.needed / 2**20 == pytest.approx(12_775, rel=0.05)

    @pytest.mark.parametrize(
        "words",
        ["", "--offload optimizer", "--offload all --precision fp16 --accumulate 4", "--lora 2,4,q+v --offload all"],
    )
    def test_a_dry_run_of_train_py_counts_the_same(self, words, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(SMALL))
        words = f"--mesh 1x8 --batch-size 32 --seq-len 64 --dry-run {words}"
        given = [*words.split(), "--init-from", str(tmp_path)]
        job = cli.prepare(parse(given))
        plan = plan_module(job.make_model, **job.sharding)
        state = TrainState.abstract(train.optimizer(job.config.training, plan)[0], plan)
        console = Console(width=200, file=io.StringIO())
        for table in tables.forecast(job, plan, state):
            console.print(table)
        said = re.sub(" +", " ", console.file.getvalue())
        c = job.config
        f = forecast(
            model=str(tmp_path / "config.json"), batch=32 // 8 // c.data.accumulate, accumulate=c.data.accumulate,
            seq_len=64, precision=c.model.precision, offload=c.model.offload, lora=c.model.lora, remat="none",
            attention="xla",
        )  # fmt: skip
        for row in (*f.kept, *f.on_host):
            size = row.bytes + 4 * (row.name == "optimizer")  # train.py's schedule counts steps, too
            assert f" {row.name} {in_words(size)} {row.formula}" in said
        assert f" needed by the step {in_words(f.needed)}" in said


class TestTraffic:
    def test_full_shard_receives_three_passes_over_the_parameters_and_ddp_two(self):
        f = forecast()
        # Gathers in bf16 twice (2+2 bytes) and a reduction in fp32 (4): 8P(S-1)/S, as an all-reduce in fp32 (2 x 4).
        assert f.replicated == pytest.approx(8 * P * 7 / 8)
        assert f.received == pytest.approx(f.replicated, rel=0.07)  # the embedding exchanges rows instead
        same = forecast(reduce_dtype="bf16")
        assert same.received / (same.replicated / 2) == pytest.approx(1.5, rel=0.07)

    def test_hybrid_adds_shards_over_replicas_once(self):
        over = {}
        for m in forecast(mesh="4x8").moves:
            over[m.axes] = over.get(m.axes, 0) + m.received
        assert over[(REPLICA,)] == pytest.approx(2 * 4 * P / 8 * 3 / 4, rel=1e-3)
        assert over[(SHARD,)] == pytest.approx(sum(m.received for m in forecast().moves))


class TestLora:
    """Frozen weights: sharded and gathered as ever, in 16 bit, without gradients or optimizer state."""

    lora = "8,16,q+v"
    ADAPTERS = 32 * 8 * ((4096 + 4096) + (4096 + 1024))
    """q: 4096 -> 4096, v: 4096 -> 1024, rank 8, 32 layers."""

    def test_only_adapters_have_gradients_and_moments(self):
        f = forecast(lora=self.lora)
        assert f.trained == self.ADAPTERS
        sizes = [kept(f, name) for name in ("parameters", "gradients", "optimizer")]
        trained = 4 * self.ADAPTERS / 8
        assert sizes == pytest.approx([2 * P / 8 + trained, trained, 2 * trained], rel=1e-3)
        layer = 2 * 218_112_000
        assert kept(f, "gathered window") == pytest.approx(2 * layer, rel=0.01)
        assert kept(forecast(), "gathered window") == 4 * layer

    def test_gathers_stay_and_frozen_weights_are_not_reduced(self):
        moved = {lora: {} for lora in (None, self.lora)}
        for lora, sums in moved.items():
            for m in forecast(lora=lora, mesh="4x8").moves:
                sums[m.kind] = sums.get(m.kind, 0) + m.received
        full, frozen = moved[None], moved[self.lora]
        assert frozen["all-gather"] == pytest.approx(full["all-gather"], rel=0.01)
        assert frozen["all-to-all"] == full["all-to-all"] / 2  # rows there, nothing back
        assert frozen["reduce-scatter"] == 4 * self.ADAPTERS * 7 / 8
        assert frozen["all-reduce"] == 2 * 4 * self.ADAPTERS / 8 * 3 / 4

    def test_formula_and_compiled_program_move_the_same(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(SMALL | {"vocab_size": 4096}))
        fields = dict(model=str(tmp_path / "config.json"), precision="fp32", seq_len=64, lora="2,4,q+v", remat="none")
        mesh = submesh("1x8")
        step, arguments = ahead(mesh, **fields)
        program = audit.read(step.lower(*arguments).compile(), mesh)
        for kind in ("all-gather", "all-to-all", "reduce-scatter"):
            found = program.received_bytes(kind, SHARD)
            assert found == sum(m.received for m in Forecast(Workload(**fields)).moves if m.kind == kind) > 0, kind

    def test_a_step_is_shorter_by_a_third_of_the_matmuls(self):
        full, frozen = forecast().timing, forecast(lora=self.lora).timing
        assert frozen.forward == pytest.approx(full.forward, rel=0.01)
        assert full.backward - frozen.backward == pytest.approx(
            32 * 2 * 218_103_808 * 4096 / (989e12 * 0.71 * 800 / 989), rel=0.2
        )
        assert frozen.seconds < full.seconds and frozen.mfu <= full.mfu * 1.05


class TestWarnings:
    def test_layers_too_large_and_too_small_are_named(self):
        tiny = forecast(model="llama-tiny", mesh="1x2", seq_len=1024).warnings
        assert any("a layer has 98,304 parameters; units" in w for w in tiny), tiny
        assert any("218M parameters, above the usual" in w for w in forecast().warnings)
        assert any("units of 50 to 200M" in w for w in forecast(model="llama-125m", seq_len=1024).warnings)

    def test_too_few_tokens_to_hide_a_gather(self):
        few = forecast(gpu="rtx4090", mesh="1x2", model="llama3-1b", seq_len=1024)
        assert any("compute less long than a layer takes to gather" in w for w in few.warnings)
        assert not any("to gather" in w for w in forecast(batch=4).warnings)

    def test_more_than_three_quarters_of_a_gpu_needs_a_setting(self):
        f = forecast(strategy="SHARD_OPT")
        assert f.fits and any("XLA_CLIENT_MEM_FRACTION=0.9" in w for w in f.warnings)


class TestAdvice:
    def test_a_model_that_one_gpu_holds_is_not_sharded(self):
        (first, _) = advice(Workload(model="llama3-1b", mesh="1x8", batch=1))
        assert first.startswith("One GPU is enough")

    def test_a_larger_one_may_be_trained_through_adapters(self):
        first = next(advice(Workload(mesh="1x8")))
        assert "LoRA on a frozen bf16 base (--lora 8,16,all) fits one GPU" in first
        first = next(advice(Workload(mesh="1x8", model="llama3-70b")))
        assert "a base quantised to 4 bits, which jfsdp does not store, would fit one (" in first
        assert "(--lora 8,16,all) fits these 8 (" in first  # 140 of 1,120 GiB
        lora = next(advice(Workload(mesh="1x8", model="llama3-70b", lora="8,16,q+v")))
        assert lora.endswith("79.1 GiB, so it must be sharded.")

    def test_the_hosts_memory_is_named_where_it_is_enough(self):
        said = list(advice(Workload(mesh="1x8", model="llama3-70b")))
        assert any(w.startswith("--offload all fits these 8 (") and "in the memory of each host" in w for w in said)
        said = list(advice(Workload(mesh="1x16", model="llama3-70b")))
        assert any(w.startswith("--offload optimizer fits these 16 (") for w in said)  # the least that is enough
        assert not any("--offload" in w for w in advice(Workload(mesh="1x8")))

    def test_the_window_is_the_floor(self):
        _, floor = advice(Workload(mesh="1x8"))
        assert "FULL_SHARD fits from about 2 GPUs on" in floor and "further ones save less than a tenth" in floor
        _, never = advice(Workload(mesh="1x8", batch=2048))
        assert never.startswith("No number of GPUs is enough")

    def test_choices_fit_are_ranked_and_say_why(self):
        choices = recommend(Workload(mesh="2x8"), most=50)
        assert all(c.forecast.fits for c in choices)
        speeds = [c.forecast.timing.tokens_per_second for c in choices]
        assert speeds == sorted(speeds, reverse=True)
        assert choices[0].reason.startswith("fastest that fits")
        kinds = {(c.work.mesh, c.work.strategy) for c in choices}
        assert ("2x8", "HYBRID_SHARD") in kinds and ("1x16", "FULL_SHARD") in kinds
        assert not any(c.work.strategy == "NO_SHARD" for c in choices)  # 8B does not fit one H100

    def test_every_kind_of_checkpointing_is_ranked(self):
        choices = recommend(Workload(model="llama3-1b", mesh="1x2"), most=50)
        assert {c.work.remat for c in choices} == {"none", "dots", "full"}
        assert all("all but matmuls computed twice" in c.reason for c in choices if c.work.remat == "dots")

    def test_meshes_that_straddle_hosts_are_left_out(self):
        choices = recommend(Workload(model="llama3-1b", mesh="1x12", per_host=6), most=50)
        assert {c.work.mesh for c in choices} == {"1x12", "6x2"}  # groups of 4 would lie on two hosts of 6

    def test_the_largest_batch_fits_and_its_double_does_not(self):
        choice = recommend(Workload(mesh="1x8"), most=1)[0]
        fits = lambda batch: Forecast(replace(choice.work, batch=batch)).fits
        assert fits(choice.largest_batch) and not fits(2 * choice.largest_batch)


class TestSweep:
    points = staticmethod(cache(lambda: sweep.sweep(Workload(), (1, 8, 64))))

    def test_memory_falls_with_devices_only_where_it_is_cut(self):
        needed = {(p.devices, p.strategy): p.needed for p in self.points()}
        assert needed[64, "NO_SHARD"] == needed[8, "NO_SHARD"]
        assert needed[64, "FULL_SHARD"] < needed[8, "FULL_SHARD"] / 3
        ladder = [needed[64, s] for s in sweep.STRATEGIES]
        assert ladder == sorted(ladder, reverse=True)

    def test_a_page_has_a_bar_for_every_point_and_nothing_from_elsewhere(self, tmp_path):
        sweep.draw(self.points(), Workload(), tmp_path / "plot.html")
        page = (tmp_path / "plot.html").read_text()
        assert page.count("<rect") == 3 * 4 + 3 * 3
        assert "http" not in page and "<script" not in page

    def test_a_png_is_a_png(self, tmp_path):
        pytest.importorskip("matplotlib", reason="needs the extra `plot`")
        sweep.draw(self.points(), Workload(), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"

    def test_another_ending_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="is a .png or an .html, and .*plot.pdf is neither"):
            sweep.draw(self.points(), Workload(), tmp_path / "plot.pdf")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mesh": "auto"}, "mesh is 'auto', but there are no devices to count. Write REPLICASxSHARDS"),
        ({"mesh": "1x12"}, "12 GPUs, which do not fill hosts of 8. Use a multiple of 8, or say --per-host"),
        ({"mesh": "4x6"}, "cuts groups of 6 shards from hosts of 8 GPUs, .* divides 8 or is a multiple of it"),
        ({"mesh": "1x1000000000000"}, "1,000,000,000,000 GPUs are not planned, 1,048,576 at most"),
        ({"batch": 10**12}, "4,096,000,000,000,000 tokens on one GPU in a micro-batch are not planned"),
        ({"accumulate": 10**9}, "1,000,000,000 micro-batches are not planned, 65,536 at most. Use fewer"),
        ({"batch": 0}, "batch is 0; it is a count, so use 1 or more"),
        ({"lora": "eight"}, "lora 'eight' is not understood. Write rank,alpha,targets such as 8,16,q"),
        ({"optimizer": "shampoo"}, "optimizer 'shampoo' is unknown. Use one of adamw"),
        ({"gpu": "tpu"}, "gpu 'tpu' is unknown"),
        ({"offload": "params"}, "offload 'params' is unknown. Use one of none, optimizer, all"),
    ],
)
def test_what_cannot_be_planned_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Workload(**fields)


def test_json_holds_the_same_figures():
    f = forecast(mesh="4x8")
    found = json.loads(json.dumps(f.to_json()))
    assert list(found["memory_bytes"]) == [
        "parameters", "gradients", "optimizer", "gathered window", "activations saved", "activations at work",
        "reduce staging", "vocabulary", "logits", "optimizer step",
    ]  # fmt: skip
    assert sum(found["memory_bytes"].values()) == pytest.approx(found["needed_bytes"])
    allowed = sum(found["allowance_bytes"].values())
    assert found["needed_bytes"] + allowed + found["spare_bytes"] == pytest.approx(84.94e9)
    assert found["parameters"] == P and found["fits"] and found["spare_bytes"] > 50 * GIB
    assert sum(m["received_bytes"] for m in found["traffic"]) == pytest.approx(found["received_bytes"])
