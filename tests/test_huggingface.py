"""Hugging Face folders: what comes in equals transformers, what goes out is what came in, nothing is read whole.

transformers and PyTorch are the judges where they are installed; the rest compares with the `safetensors` format and
with itself. Weights are random and larger than at the start, so that a mistake shows.
"""

import functools
import json
import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.huggingface import entries, load_pretrained, name_parameters, save_pretrained
from jfsdp.safetensors import Entry, read_safetensors, write_safetensors
from jfsdp.step import TrainState, train_step
from jfsdp.wrap import fully_shard, plan_module
from models import gpt2, llama, t5
from tests.support import submesh

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
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
    "llama-tied": ("Llama", {**DECODER, "tie_word_embeddings": True, "head_dim": 8}, llama),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 5}, llama),
    "qwen2": ("Qwen2", {**DECODER, "tie_word_embeddings": True, "head_dim": 8}, llama),
    "qwen3": ("Qwen3", {**DECODER, "attention_bias": False}, llama),
    "gpt2": (
        "GPT2",
        dict(vocab_size=67, n_embd=48, n_layer=3, n_head=6, n_positions=32, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0),
        gpt2,
    ),
    "t5": ("T5", T5, t5),
    "t5-gated": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "num_layers": 2, "num_decoder_layers": 3}, t5),
}
every_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def theirs(name):
    """A model of transformers with weights that are not those of a start."""
    transformers = pytest.importorskip("transformers", reason="transformers is the judge of parity")
    torch = pytest.importorskip("torch", reason="transformers needs PyTorch")
    kind, options, _ = MODELS[name]
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
    plan = plan_module(lambda: family.build(config, rngs=nnx.Rngs(0)), mesh=submesh(mesh), **sharding)
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


def their_loss(name):
    import torch

    batch = batch_for(name)
    targets, weights = torch.from_numpy(batch["targets"]).long(), torch.from_numpy(batch["weights"])
    nll = torch.nn.functional.cross_entropy(their_logits(name).flatten(0, 1), targets.flatten(), reduction="none")
    return (nll * weights.flatten()).sum() / weights.sum()


def tensors(params, plan, family):
    return {entry.name: entry.fetch() for entry in entries(params, plan, family)}


def close(got, want, tolerance, what=""):
    worst, largest = np.abs(got - want).max(), max(1.0, np.abs(want).max())
    assert worst <= tolerance * largest, f"{what}: off by {worst}, largest {largest}"


# Parity


@every_model
def test_logits_loss_and_every_gradient_equal_transformers(name, folder):
    """Loaded onto 8 shards; one step of SGD at rate 1, so that a parameter moves by its gradient."""
    family = MODELS[name][2]
    params, plan, _ = open_model(folder(name), family)
    close(np.asarray(logits(plan.door.outside(plan.unpad(params), {}), batch_for(name))),
          their_logits(name).detach().numpy(), 1e-5)  # fmt: skip

    tx = optax.sgd(1.0)
    before = tensors(params, plan, family)
    state, metrics = train_step(loss, tx, plan)(TrainState.create(params, tx, plan), batch_for(name))
    theirs(name).zero_grad()
    want = their_loss(name)
    want.backward()
    assert float(metrics["loss"]) == pytest.approx(want.item(), abs=1e-5)
    after = tensors(state.params, plan, family)
    gradients = {path: p.grad.numpy() for path, p in theirs(name).named_parameters()}
    assert set(after) == set(gradients)
    for path, gradient in gradients.items():
        assert np.abs(gradient).max() > 1e-4
        close(before[path] - after[path], gradient, 1e-5, path)


@pytest.mark.parametrize("both_ways", [True, False])
def test_t5_buckets_equal_those_of_transformers(both_ways):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    import torch

    index = torch.arange(300)
    for buckets, far in ((32, 128), (8, 20), (10, 61)):
        want = modeling.T5Attention._relative_position_bucket(index[None] - index[:, None], both_ways, buckets, far)
        np.testing.assert_array_equal(t5._bucket_of(300, buckets, far, both_ways), want.numpy())


# In and out


@every_model
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
