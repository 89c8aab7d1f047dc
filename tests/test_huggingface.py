"""Hugging Face folders: what comes in equals transformers, what goes out is what came in, nothing is read whole.

transformers and PyTorch are the judges where they are installed; the rest compares with the `safetensors` format and
with itself. Weights are random and larger than at the start, so that a mistake shows.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.huggingface import _cast, entries, fetch_layer, load_pretrained, name_parameters, save_pretrained
from jfsdp.lora import LoraOptions, add_lora
from jfsdp.offload import HOST, CPUOffloadPolicy
from jfsdp.safetensors import Entry, Tensor, read_safetensors, write_safetensors
from jfsdp.state import TrainState
from jfsdp.step import eval_step, train_step
from jfsdp.wrap import plan_module
from models import gpt2, llama, t5
from models.experts import ExpertOptions
from tests import huggingface_processes
from tests.support import bitwise_equal, settings, submesh

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
BALANCE = 0.5
DECODER = dict(
    vocab_size=67, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=128,
    attention_dropout=0.0,
)  # fmt: skip
T5 = dict(
    vocab_size=67, d_model=40, d_kv=12, d_ff=72, num_layers=3, num_decoder_layers=2, num_heads=4,
    relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0, decoder_start_token_id=0,
)  # fmt: skip
# name: class of transformers, its configuration, our family
MODELS = {
    "llama3": ("Llama", {**DECODER, "rope_parameters": {**ROPE, "original_max_position_embeddings": 32}}, llama),
    "llama-tied": ("Llama", {**DECODER, "rope_parameters": YARN, "tie_word_embeddings": True, "head_dim": 8}, llama),
    "mistral": ("Mistral", {**DECODER, "rope_parameters": LINEAR, "sliding_window": 5}, llama),
    "qwen2": ("Qwen2", {**DECODER, "tie_word_embeddings": True, "head_dim": 8}, llama),
    "qwen3": ("Qwen3", {**DECODER, "attention_bias": False}, llama),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **DECODER,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": BALANCE,
        },
        llama,
    ),
    "gpt2": (
        "GPT2",
        dict(
            vocab_size=67,
            n_embd=48,
            n_layer=3,
            n_head=6,
            n_positions=32,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        gpt2,
    ),
    "t5": ("T5", T5, t5),
    "t5-gated": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "num_layers": 2, "num_decoder_layers": 3}, t5),
}
QUICK = ("llama3", "gpt2", "qwen3-moe", "t5-gated")
one_of_each = pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (m not in QUICK)) for m in MODELS]
)
every_model = pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (m == "qwen3")) for m in MODELS]  # its norms: qwen3-moe
)


@functools.cache
def theirs(name):
    """A model of transformers with weights that are not those of a start."""
    transformers = pytest.importorskip("transformers", reason="transformers is the judge of parity")
    torch = pytest.importorskip("torch", reason="transformers needs PyTorch")
    kind, options, _ = MODELS[name]
    torch.set_num_threads(1)  # more would spin beside those of XLA
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="eager")
    head = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            is_scale = "norm" in path or ".ln_" in path
            p.copy_((1.0 if is_scale and path.endswith("weight") else 0.0) + 0.15 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @functools.cache
    def save(name):
        path = tmp_path_factory.mktemp(name)
        theirs(name).save_pretrained(path, max_shard_size="40KB")
        return path

    return save


def open_model(folder, family, mesh="1x8", **sharding):
    """Stored parameters, plan and configuration of what is in a folder."""
    config = family.config_from(json.loads((folder / "config.json").read_text()))
    make = lambda: family.build(config, rngs=nnx.Rngs(0), remat="none")  # noqa: E731  compiles sooner
    plan = plan_module(make, mesh=submesh(mesh), **sharding)
    return load_pretrained(folder, plan, family), plan, config


@functools.cache
def batch_for(name):
    """Rows of unequal length, padded on the right, and what they must predict; for T5 a source as well."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 67, (8, 14)).astype(np.int32)
    length = np.array([14, 3, 9, 14, 1, 12, 7, 14])
    weights = (np.arange(14)[None] < length[:, None] - 1).astype(np.float32)
    batch = dict(tokens=tokens * (np.arange(14)[None] < length[:, None]), weights=weights)
    batch["targets"] = np.roll(batch["tokens"], -1, axis=1)
    if MODELS[name][2] is t5:
        source = rng.integers(1, 67, (8, 17)).astype(np.int32)
        mask = (np.arange(17)[None] < np.array([17, 2, 9, 17, 30, 12, 7, 17])[:, None]).astype(np.int32)
        batch |= dict(source=source * mask, source_mask=mask)
    return batch


def loss(model, batch, key=None):
    return model.loss(**batch)


@nnx.jit
def logits(model, batch):
    return model(**{name: batch[name] for name in ("source", "source_mask", "tokens") if name in batch})


def their_inputs(name):
    import torch

    batch = {key: torch.from_numpy(np.asarray(a)).long() for key, a in batch_for(name).items()}
    if "source" not in batch:
        return dict(input_ids=batch["tokens"])
    return dict(input_ids=batch["source"], attention_mask=batch["source_mask"], decoder_input_ids=batch["tokens"])


def their_logits(name):
    return theirs(name)(**their_inputs(name)).logits


def their_losses(name):
    """The mean over what counts, and the balance of experts over the same tokens where there are experts."""
    import torch

    batch, model = batch_for(name), theirs(name)
    targets, weights = torch.from_numpy(batch["targets"]).long(), torch.from_numpy(batch["weights"])
    out = model(**their_inputs(name))
    nll = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = {"loss": (nll * weights.flatten()).sum() / weights.sum()}
    if getattr(out, "router_logits", None) is not None:
        balance = sys.modules[type(model).__module__].load_balancing_loss_func
        losses["balance"] = balance(out.router_logits, model.num_experts, model.num_experts_per_tok, weights)
    return losses


def their_gradients(name):
    """By the names that a checkpoint has: transformers joins experts after loading."""
    out = {}
    for path, p in theirs(name).named_parameters():
        prefix, _, joined = path.rpartition(".")
        if prefix.endswith("experts"):
            parts = p.grad.chunk(2, dim=1) if joined == "gate_up_proj" else [p.grad]
            kinds = ["gate_proj", "up_proj"] if joined == "gate_up_proj" else [joined]
            out |= {f"{prefix}.{i}.{kind}.weight": g for kind, part in zip(kinds, parts) for i, g in enumerate(part)}
        else:
            out[path] = p.grad
    return {path: gradient.numpy() for path, gradient in out.items()}


def tensors(params, plan, family):
    values = dict(zip(plan.leaves, jax.tree.leaves(params)))
    read = lambda leaf, layer: fetch_layer(values[leaf], leaf, plan, layer)  # noqa: E731
    return {entry.name: entry.fetch() for entry in entries(read, plan, family)}


def close(got, want, tolerance, what=""):
    worst, largest = np.abs(got - want).max(), max(1.0, np.abs(want).max())
    assert worst <= tolerance * largest, f"{what}: off by {worst}, largest {largest}"


# Parity


@every_model
def test_logits_equal_transformers(name, folder):
    family = MODELS[name][2]
    params, plan, _ = open_model(folder(name), family, "1x2")
    got = logits(plan.door.outside(plan.unpad(params), {}), batch_for(name))
    close(np.asarray(got), their_logits(name).detach().numpy(), 1e-5)


@one_of_each
def test_loss_and_every_gradient_equal_transformers(name, folder):
    """Loaded onto shards; one step of SGD at rate 1, so that a parameter moves by its gradient."""
    family, tx = MODELS[name][2], optax.sgd(1.0)
    params, plan, _ = open_model(folder(name), family, "1x8" if name in ("llama3", "qwen3-moe") else "1x2")
    before = tensors(params, plan, family)
    state, metrics = train_step(loss, tx, plan)(TrainState.create(params, tx, plan), batch_for(name))
    theirs(name).zero_grad()
    want = their_losses(name)
    (want["loss"] + BALANCE * want.get("balance", 0)).backward()
    for which, value in want.items():
        assert float(metrics[which]) == pytest.approx(value.item(), abs=1e-5)
    after = tensors(state.params, plan, family)
    gradients = their_gradients(name)
    assert set(after) == set(gradients)
    for path, gradient in gradients.items():
        assert np.abs(gradient).max() > 1e-4
        close(before[path] - after[path], gradient, 1e-5, path)


def test_reference_losses_come_out_of_the_folder_on_8_devices():
    """Four files in bf16, and the losses that transformers 5 gave; some devices count nothing in batch 3."""
    data = Path(__file__).parent / "data/llama-untied"
    params, plan, _ = open_model(data / "model", llama)
    known = {**np.load(data / "batches.npz"), **np.load(data / "reference.npz")}
    evaluate = eval_step(loss, plan)
    for i in (1, 3):
        targets = known["targets"][i]
        batch = dict(tokens=known["input_ids"][i], targets=np.maximum(targets, 0), weights=np.float32(targets >= 0))
        total, weight = evaluate(params, batch)
        assert float(weight) == known["n_targets"][i]
        assert float(total / weight) == pytest.approx(known["loss"][i], abs=1e-5)


@pytest.mark.parametrize("both_ways", [True, False])
def test_t5_buckets_equal_those_of_transformers(both_ways):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    import torch

    index = torch.arange(300)
    for buckets, far in ((32, 128), (8, 20), (10, 61)):
        want = modeling.T5Attention._relative_position_bucket(index[None] - index[:, None], both_ways, buckets, far)
        np.testing.assert_array_equal(t5._bucket_of(300, buckets, far, both_ways), want.numpy())


# In and out


@one_of_each
def test_transformers_loads_what_is_exported(name, folder, tmp_path):
    """The same configuration, the same tensors bitwise; tied weights once."""
    transformers = pytest.importorskip("transformers")
    family = MODELS[name][2]
    params, plan, config = open_model(folder(name), family, mesh="2x4")
    save_pretrained(tmp_path, params, plan, family, config, max_file_bytes=30_000)
    assert family.config_from(json.loads((tmp_path / "config.json").read_text())) == config
    kind = type(theirs(name))
    loaded, info = kind.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    want = theirs(name).state_dict()
    assert set(loaded.state_dict()) == set(want)
    assert all(a.equal(want[path]) for path, a in loaded.state_dict().items())
    assert getattr(transformers, type(loaded.config).__name__)
    close(loaded(**their_inputs(name)).logits.detach().numpy(), their_logits(name).detach().numpy(), 0)


UNEVEN = llama.Config(
    vocab_size=37, width=20, num_layers=5, num_heads=2, num_kv_heads=1, head_dim=6, inner_width=13, qk_norm=True
)
UNEVEN_EXPERTS = dataclasses.replace(UNEVEN, experts=ExpertOptions(count=3, per_token=2), num_layers=2)
MESHES = [("1x8", "FULL_SHARD"), ("2x4", None), ("2x4", "FULL_SHARD"), ("1x8", "SHARD_OPT"), ("2x4", "NO_SHARD")]


def shapes_of(family, config):
    """Names and shapes of a checkpoint, from the plan of a model."""
    plan = plan_module(lambda: family.build(config, rngs=nnx.Rngs(0)), mesh=submesh("1x1"))
    return {name: one.shape() for one in name_parameters(plan, family) for name in one.names}


def write_random(folder, family, config, dtype=np.float32, change=lambda tensors: tensors, **options):
    """A checkpoint of random tensors; gives them."""
    rng = np.random.default_rng(0)
    random = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes_of(family, config).items()}
    random = change(random)
    items = [Entry(name, a.shape, a.dtype, lambda a=a: a) for name, a in random.items()]
    write_safetensors(folder, items, **options)
    (folder / "config.json").write_text(json.dumps(family.config_to(config)))
    return random


@pytest.mark.parametrize(
    "mesh, strategy, shape", [*((*where, UNEVEN) for where in MESHES), ("2x4", None, UNEVEN_EXPERTS)]
)
def test_a_round_trip_is_bitwise_without_padding(mesh, strategy, shape, tmp_path):
    """C-48: no padding on disk and every value as it was; bf16 in the file, fp32 in memory, bf16 in the file."""
    want = write_random(tmp_path / "in", llama, shape, jnp.bfloat16, max_file_bytes=2000)
    params, plan, config = open_model(tmp_path / "in", llama, mesh, strategy=strategy)
    if strategy != "NO_SHARD" and mesh == "1x8":
        assert any(leaf.padded_shape != leaf.shape for leaf in plan.leaves)
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(params))
    save_pretrained(tmp_path / "out", params, plan, llama, config, dtype="bf16", base=tmp_path / "in")
    got = read_safetensors(tmp_path / "out")
    assert sum(np.prod(tensor.shape) for tensor in got.values()) == plan.num_params
    assert set(got) == set(want)
    for name, a in want.items():
        assert got[name].dtype == jnp.bfloat16
        assert got[name][...].tobytes() == a.tobytes()
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_is_loaded_equals_what_was_placed_and_may_be_donated(tmp_path):
    """Padding is zero; a step after loading leaves the files as they were."""
    want = write_random(tmp_path, llama, UNEVEN)
    params, plan, _ = open_model(tmp_path, llama)
    q = np.stack([want[f"model.layers.{i}.self_attn.q_proj.weight"].T for i in range(5)])
    stored = np.asarray(params["blocks"]["each"]["attn"]["q"]["kernel"])
    assert (stored[:, :20, :12] == q).all() and not stored[:, 20:].any() and not stored[:, :, 12:].any()
    tx = optax.sgd(1e-2)
    step = train_step(lambda model, batch, key: (model.norm.scale[...].sum(), 1.0), tx, plan)
    step(TrainState.create(params, tx, plan), {"x": np.zeros((8, 1))})
    assert all(tensor[...].tobytes() == want[name].tobytes() for name, tensor in read_safetensors(tmp_path).items())


def test_offloaded_parameters_are_loaded_into_host_memory(tmp_path):
    """Adapters are created there; what goes out is what came in, and a state takes all of it."""
    want = write_random(tmp_path / "in", llama, UNEVEN)
    options = LoraOptions(rank=2, targets=("q", "down"))
    make = lambda: add_lora(llama.build(UNEVEN, rngs=nnx.Rngs(0)), options, rngs=nnx.Rngs(1))  # noqa: E731
    plan = plan_module(make, mesh=submesh("1x2"), offload_policy=CPUOffloadPolicy(), trainable=nnx.LoRAParam)
    start = lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param))  # noqa: E731
    params = load_pretrained(tmp_path / "in", plan, llama, start=start)
    assert {w.sharding.memory_kind for w in jax.tree.leaves(params)} == {HOST}
    TrainState.create(params, optax.sgd(1.0), plan)
    save_pretrained(tmp_path / "out", params, plan, llama, UNEVEN)
    got = read_safetensors(tmp_path / "out")
    assert all(got[name][...].tobytes() == a.tobytes() for name, a in want.items())


def test_neither_way_holds_more_than_a_tensor_on_the_host(tmp_path):
    """Peak of NumPy's memory: the embedding is the largest tensor, the stacked MLP and the whole are far larger."""
    config = llama.Config(vocab_size=2048, width=256, num_layers=16, num_heads=4, num_kv_heads=4, inner_width=1024)
    largest, whole = 4 * 2048 * 256, 4 * 16 * 3 * 256 * 1024
    write_random(tmp_path / "in", llama, config)
    open_model(tmp_path / "in", llama)  # compiles, which allocates too

    def peak(run):
        tracemalloc.start()
        out = run()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return out, used

    (params, plan, _), used = peak(lambda: open_model(tmp_path / "in", llama))
    assert used < 2.5 * largest < whole / 8
    _, used = peak(lambda: save_pretrained(tmp_path / "out", params, plan, llama, config))
    assert used < 2.5 * largest


def test_each_piece_is_read_once_however_many_devices_hold_it(tmp_path, monkeypatch):
    write_random(tmp_path, llama, UNEVEN)
    reads, real = [], Tensor.__getitem__
    monkeypatch.setattr(Tensor, "__getitem__", lambda self, index: reads.append(1) or real(self, index))
    open_model(tmp_path, llama, "2x4", strategy="NO_SHARD")
    assert len(reads) == len(read_safetensors(tmp_path))
    reads.clear()
    _, plan, _ = open_model(tmp_path, llama, "2x4")
    pieces = sum((leaf.layers or 1) * (1 if leaf.dim is None else 4) for leaf in plan.leaves)
    assert len(reads) == pieces


def test_a_parameter_shares_no_memory_with_what_was_placed():
    """Copies on several CPU devices may be one buffer of the host's, and the step donates them."""
    sharding = jax.sharding.NamedSharding(submesh("1x2"), jax.sharding.PartitionSpec())
    placed = jax.device_put(jnp.zeros((8, 8)), sharding)
    kept = _cast(sharding, jnp.dtype(jnp.float32))(placed)
    pointers = [shard.data.unsafe_buffer_pointer() for a in (placed, kept) for shard in a.addressable_shards]
    assert len(set(pointers)) == 4


@pytest.mark.slow
def test_two_processes_load_export_and_sample_as_one_does(tmp_path):
    """Each holds half; the first writes, bitwise what was read."""
    want = write_random(tmp_path / "in", llama, UNEVEN, max_file_bytes=2000)
    environment = {**os.environ, "XLA_FLAGS": ""}
    words = ["--nproc", "2", "-m", "tests.huggingface_processes", tmp_path / "in", tmp_path / "out"]
    command = [sys.executable, "-m", "jfsdp.launch", *words]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"out/process_{i}.json").read_text()) for i in range(2)]
    alone = huggingface_processes.through(tmp_path / "in", tmp_path / "alone", "1x8")
    assert seen[0]["tokens"] == seen[1]["tokens"] == alone["tokens"]
    assert seen[0]["held"] == seen[1]["held"] == alone["held"] / 2
    got = read_safetensors(tmp_path / "out")
    assert set(got) == set(want) and all(got[name][...].tobytes() == a.tobytes() for name, a in want.items())


def test_every_wrong_tensor_is_listed_in_one_error(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = np.zeros(7, np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((20, 13), np.float32)
        del tensors["model.layers.4.self_attn.k_norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
        return {**tensors, "model.layers.0.self_attn.q_proj.bias": np.zeros(12, np.float32)}

    write_random(tmp_path, llama, UNEVEN, change=change)
    with pytest.raises(ValueError) as error:
        open_model(tmp_path, llama)
    text = str(error.value)
    assert "missing: model.layers.4.self_attn.k_norm.weight." in text
    assert "unknown: model.layers.0.self_attn.q_proj.bias." in text
    assert "model.norm.weight is [7], expected [20]" in text
    assert "model.layers.1.mlp.up_proj.weight is [20, 13], expected [13, 20]" in text
    assert "quantised: lm_head.weight holds int8." in text
    assert "Build the model from the config.json beside the weights" in text


def test_a_tied_model_takes_a_file_that_holds_its_table_twice_if_both_agree(tmp_path):
    """C-49: written once, the alias recorded, and used for both after loading."""
    config = llama.Config(vocab_size=37, width=16, num_layers=1, num_heads=2, num_kv_heads=1, inner_width=8, tied=True)
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    write_random(tmp_path / "in", llama, config, change=lambda t: {**t, head: t[table].copy()})
    params, plan, _ = open_model(tmp_path / "in", llama)
    module = plan.door.outside(plan.unpad(params), {})
    assert module.head.table is module.embed.table
    save_pretrained(tmp_path / "out", params, plan, llama, config, max_file_bytes=4000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert head not in index["weight_map"] and index["metadata"]["aliases"] == {head: table}
    write_random(tmp_path / "in", llama, config, change=lambda t: {**t, head: t[table] + 1})
    with pytest.raises(ValueError, match="tied: lm_head.weight differs from model.embed_tokens.weight"):
        open_model(tmp_path / "in", llama)


@pytest.mark.parametrize("setting", settings(1))
def test_a_tied_model_trains_on_from_its_export_as_without(tmp_path, setting):
    """C-49: an independent reader finds each name of the index and no alias; a step from there is bitwise the step
    from what was exported, and changes the table that both uses are."""
    safetensors = pytest.importorskip("safetensors", reason="the format's own package is the judge of the files")
    config = llama.Config(vocab_size=37, width=16, num_layers=1, num_heads=2, num_kv_heads=1, inner_width=8, tied=True)
    write_random(tmp_path / "in", llama, config)
    options = dict(mesh=setting.mesh, strategy=setting.strategy, mp_policy=setting.policy)
    params, plan, _ = open_model(tmp_path / "in", llama, **options)
    save_pretrained(tmp_path / "out", params, plan, llama, config, max_file_bytes=4000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and "lm_head.weight" not in index["weight_map"]
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, "np") as opened:
            assert name in opened.keys() and opened.get_slice(name).get_dtype() == "F32"
    again, plan, _ = open_model(tmp_path / "out", llama, **options)
    assert not any("head" in leaf.path for leaf in plan.leaves)

    def loss(model, batch, key):
        return model.loss(batch["tokens"], batch["targets"], batch["weights"])

    tokens = np.random.default_rng(1).integers(0, 37, (8, 6)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "weights": np.ones((8, 6), np.float32)}
    before, tx = np.array(params["embed"]["table"]), optax.sgd(0.1)
    step = train_step(loss, tx, plan)
    (ours, seen), (theirs, also) = (step(TrainState.create(p, tx, plan), batch) for p in (params, again))
    assert bitwise_equal(ours.params, theirs.params) and float(seen["loss"]) == float(also["loss"])
    assert not np.array_equal(before, ours.params["embed"]["table"])


def test_names_without_the_prefix_and_masks_are_understood(tmp_path):
    """As GPT-2 lies on the hub: `h.0.ln_1.weight`, and the causal mask as `h.0.attn.bias`."""
    config = gpt2.Config(vocab_size=37, width=16, num_layers=2, num_heads=2, max_positions=8)

    def change(tensors):
        tensors = {name.removeprefix("transformer."): a for name, a in tensors.items()}
        return {**tensors, "h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)}

    want = write_random(tmp_path, gpt2, config, change=change)
    params, plan, _ = open_model(tmp_path, gpt2)
    got = tensors(params, plan, gpt2)
    assert set(got) == {f"transformer.{name}" for name in want if name != "h.0.attn.bias"}
    assert all((a == want[name.removeprefix("transformer.")]).all() for name, a in got.items())


def test_a_parameter_without_a_name_is_refused(tmp_path):
    names = {path: name for path, name in llama.NAMES.items() if "q_norm" not in path}
    lacking = SimpleNamespace(NAMES=names, TIED={}, __name__="mine")
    plan = plan_module(lambda: llama.build(UNEVEN, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))
    with pytest.raises(ValueError, match=r"mine.NAMES has no Hugging Face name for blocks.each.attn.q_norm.scale. Add"):
        name_parameters(plan, lacking)


def test_an_export_keeps_what_else_its_origin_says_and_its_tokenizer(tmp_path):
    write_random(tmp_path / "in", llama, UNEVEN)
    path = tmp_path / "in/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7, "dtype": "float16"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "other.json"):
        (tmp_path / "in" / name).write_text(name)
    params, plan, config = open_model(tmp_path / "in", llama)
    save_pretrained(tmp_path / "out", params, plan, llama, config, base=tmp_path / "in")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["eos_token_id"], written["torch_dtype"]) == (7, "float32") and "dtype" not in written
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
