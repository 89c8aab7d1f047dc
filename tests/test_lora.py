"""LoRA: adapters are all that is trained, and what they compute leaves as one matrix or as a PEFT adapter."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jfsdp.huggingface import load_pretrained, save_adapter, save_pretrained
from jfsdp.lora import LoraOptions, add_lora, parse_lora
from jfsdp.safetensors import read_safetensors
from jfsdp.stack import Stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.wrap import plan_module
from models import gpt2, llama
from tests.support import assert_close, submesh, train_alone
from tests.test_huggingface import UNEVEN, write_random

OPTIONS = LoraOptions(rank=3, alpha=6.0, targets=("attn.q", "down"))
TARGETS = {"llama": ("attn.q", "v", "mlp.down"), "gpt2": ("qkv", "o")}
FAMILIES = {
    "llama": (llama, UNEVEN),
    "gpt2": (gpt2, gpt2.Config(vocab_size=37, width=20, num_layers=2, num_heads=2, max_positions=16)),
}


def adapted(family, config, options=OPTIONS, **more):
    return add_lora(family.build(config, rngs=nnx.Rngs(0)), options, rngs=nnx.Rngs(1), **more)


def loss(model, batch, key):
    return model.loss(**batch)


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(1, 37, (2, 8, 10)).astype(np.int32)
    return dict(tokens=tokens, targets=targets, weights=(tokens % 3).astype(np.float32))


def randomized(plan, params):
    """Adapters that are not zero, so that they show."""
    rng = np.random.default_rng(1)
    draw = lambda leaf, w: rng.normal(size=leaf.logical_shape).astype(np.float32) * 0.2 if leaf.trainable else w  # noqa: E731
    return plan.place(plan.map(draw, plan.unpad(params)))


@functools.cache
def opened(name, folder, mesh="1x8"):
    family, config = FAMILIES[name]
    make = lambda: adapted(family, config, LoraOptions(rank=3, alpha=6.0, targets=TARGETS[name]))  # noqa: E731
    plan = plan_module(make, mesh=submesh(mesh), trainable=nnx.LoRAParam)
    start = lambda: nnx.to_pure_dict(nnx.state(make(), nnx.Param))  # noqa: E731
    return plan, load_pretrained(folder, plan, family, start=start)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @functools.cache
    def write(name):
        path = tmp_path_factory.mktemp(name)
        write_random(path, *FAMILIES[name])
        return path

    return write


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def view(plan, params):
    return plan.door.outside(plan.unpad(params), {})


def test_adapters_start_without_effect_and_the_base_is_the_checkpoint(folder):
    plan, params = opened("llama", folder("llama"))
    family, config = FAMILIES["llama"]
    alone = plan_module(lambda: family.build(config, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))
    base = load_pretrained(folder("llama"), alone, family)
    same = logits(view(plan, params), batch()["tokens"]), logits(view(alone, base), batch()["tokens"])
    np.testing.assert_allclose(*same, rtol=0, atol=1e-5)
    trained = [leaf.path for leaf in plan.leaves if leaf.trainable]
    assert trained == [f"blocks.each.{layer}.lora_{x}" for layer in ("attn.q", "attn.v", "mlp.down") for x in "ab"]
    a = np.asarray(plan.unpad(params)["blocks"]["each"]["attn"]["q"]["lora_a"])
    assert a.shape == (5, 20, 3) and 0 < np.abs(a).max() <= 20**-0.5 and len(np.unique(a)) == a.size


def test_training_equals_one_device_and_touches_adapters_alone(folder):
    """Two steps on 2x4 against `jax.grad` of the adapters without a mesh; the base is bitwise as it was."""
    family, config = FAMILIES["llama"]
    plan, params = opened("llama", folder("llama"), "2x4")
    params = randomized(plan, params)
    tx = optax.adam(1e-2)
    logical = jax.tree.map(np.asarray, plan.unpad(params))
    state, step = TrainState.create(params, tx, plan), train_step(loss, tx, plan)
    held = sum(w.size for w in jax.tree.leaves(state.opt_state))
    trainable = sum(leaf.size for leaf in plan.leaves if leaf.trainable)
    assert held < 4 * trainable < plan.num_params  # two moments, padded
    for _ in range(2):
        state, metrics = step(state, batch())

    model = nnx.eval_shape(lambda: adapted(family, config, LoraOptions(rank=3, alpha=6.0, targets=TARGETS["llama"])))
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    whole = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(whole, logical)
    _, adapters, rest = nnx.split(nnx.merge(nnx.graphdef(model), whole), nnx.LoRAParam, ...)

    of_adapters = lambda adapters, batch, key: loss(nnx.merge(graph, adapters, rest), batch, key)  # noqa: E731
    value, adapters, _ = train_alone(of_adapters, adapters, batch(), tx, 2)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    got = jax.tree.map(np.asarray, state.logical_params())
    assert_close(plan.only_trainable(got), plan.only_trainable(_like(got, adapters, logical)), 2e-3)  # Adam in fp32
    for leaf, before, after in zip(plan.leaves, jax.tree.leaves(logical), jax.tree.leaves(got)):
        assert leaf.trainable or np.array_equal(before, after), leaf.path


def _like(tree, adapters, logical):
    """The logical parameters with the trained adapters in their places."""
    flat = {path: w for path, w in nnx.to_flat_state(adapters)}
    return jax.tree_util.tree_map_with_path(
        lambda path, w: np.asarray(flat[key][...]) if (key := tuple(k.key for k in path)) in flat else w, logical
    )


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_merged_export_computes_what_the_adapters_did(name, folder, tmp_path):
    family, config = FAMILIES[name]
    plan, params = opened(name, folder(name))
    params = randomized(plan, params)
    save_pretrained(tmp_path, params, plan, family, config, lora_scale=2.0)
    assert set(read_safetensors(tmp_path)) == set(read_safetensors(folder(name)))
    alone = plan_module(lambda: family.build(config, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))
    merged = load_pretrained(tmp_path, alone, family)
    got, want = logits(view(alone, merged), batch()["tokens"]), logits(view(plan, params), batch()["tokens"])
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    before = logits(view(alone, load_pretrained(folder(name), alone, family)), batch()["tokens"])
    assert np.abs(before - want).max() > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_the_adapter(name, folder, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is the judge of its format")
    transformers = pytest.importorskip("transformers", reason="peft needs transformers")
    import torch

    family, config = FAMILIES[name]
    plan, params = opened(name, folder(name))
    params = randomized(plan, params)
    options = LoraOptions(rank=3, alpha=6.0, targets=TARGETS[name])
    save_adapter(tmp_path, params, plan, family, options, base=folder(name))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["fan_in_fan_out"] == (name == "gpt2")  # peft would guess, and warn
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(name), attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    with torch.no_grad():
        got = model(input_ids=torch.from_numpy(batch()["tokens"]).long()).logits.numpy()
    want = np.asarray(logits(view(plan, params), batch()["tokens"]))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_any_nnx_model_takes_adapters_and_a_base_in_bf16():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = Stack(Block, num_layers=3, rngs=rngs)
            self.out = nnx.Linear(8, 5, rngs=rngs)

        def __call__(self, x):
            return self.out(self.blocks(x))

    model = Model(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 8))
    before = model(x)
    model = add_lora(model, LoraOptions(targets=("up", "out")), rngs=nnx.Rngs(1))
    np.testing.assert_allclose(model(x), before, rtol=1e-6)
    assert model.blocks.each.up.lora_a.shape == (3, 8, 8) and model.out.lora_b.shape == (8, 5)
    half = add_lora(Model(nnx.Rngs(0)), LoraOptions(targets=("all",)), rngs=nnx.Rngs(1), base_dtype=jnp.bfloat16)
    dtypes = {type(v): v.dtype for _, v in nnx.to_flat_state(nnx.state(half))}
    assert dtypes == {nnx.Param: jnp.bfloat16, nnx.LoRAParam: jnp.float32}
    assert len(nnx.to_flat_state(nnx.state(half, nnx.LoRAParam))) == 6


@pytest.mark.parametrize("text, want", [
    ("4", LoraOptions(rank=4, alpha=8.0)),
    ("4,2", LoraOptions(rank=4, alpha=2.0)),
    ("4,2.5,q+mlp.down", LoraOptions(rank=4, alpha=2.5, targets=("q", "mlp.down"))),
    ("4,2,q,v", LoraOptions(rank=4, alpha=2.0, targets=("q", "v"))),
])  # fmt: skip
def test_a_word_says_rank_alpha_and_targets(text, want):
    assert parse_lora(text) == want


@pytest.mark.parametrize("text, mend", [
    ("big", "lora 'big' is not understood. Write rank,alpha,targets such as 8,16,q"),
    ("8,q", "not understood"),
    ("0", "lora rank is 0; use 1 or more"),
    ("8,-1", "lora alpha is -1.0; use a number above 0"),
])  # fmt: skip
def test_a_word_that_says_nothing_is_refused(text, mend):
    with pytest.raises(ValueError, match=mend):
        parse_lora(text)


def test_a_target_that_no_layer_has_and_an_export_without_adapters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no layer is called query. Use some of down, gate, k, o, q, up, v, or all"):
        nnx.eval_shape(lambda: adapted(llama, UNEVEN, LoraOptions(targets=("q", "query"))))
    plan = plan_module(lambda: llama.build(UNEVEN, rngs=nnx.Rngs(0)), mesh=submesh("1x8"))
    with pytest.raises(ValueError, match="this model has no adapters. Make it with add_lora"):
        save_adapter(tmp_path, plan.layouts, plan, llama, OPTIONS)


def test_a_checkpoint_has_no_adapters_so_new_ones_must_be_made(folder):
    plan, _ = opened("llama", folder("llama"))
    with pytest.raises(ValueError, match="no checkpoint has adapters. Pass start, which creates new ones"):
        load_pretrained(folder("llama"), plan, llama)
