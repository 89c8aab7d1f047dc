"""Experts: each token gets what the experts that it chose compute, none is dropped, and balance is that of the batch.

What equals transformers, and that gradients do, is in `test_huggingface.py` (`qwen3-moe`).
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train
from jfsdp.lora import LoraOptions, add_lora
from jfsdp.planning.forecast import Forecast
from jfsdp.planning.workload import Workload
from models import llama
from models.experts import ExpertOptions, Experts, Load, balance_loss

TINY = llama.presets["moe-tiny"]


def make(count=5, per_token=2, renormalised=True):
    """Experts with weights far from zero, and tokens."""
    options = ExpertOptions(count=count, per_token=per_token, renormalised=renormalised)
    module = Experts(12, 7, options, std=0.5, rngs=nnx.Rngs(0))
    for i, p in enumerate(jax.tree.leaves(nnx.state(module), is_leaf=lambda p: isinstance(p, nnx.Variable))):
        p.set_value(0.5 * jax.random.normal(jax.random.key(i), p.shape))
    return module, jax.random.normal(jax.random.key(9), (3, 8, 12))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("count, per_token, renormalised", [(5, 2, True), (5, 2, False), (1, 1, True), (40, 3, True)])
def test_each_token_gets_the_sum_of_its_experts(count, per_token, renormalised):
    """Token by token in fp64; of 40 experts some have no token."""
    module, x = make(count, per_token, renormalised)
    got, load = nnx.jit(lambda module, x: module.routed(x, jnp.ones(x.shape[:2])))(module, x)
    router, gate, up, down = (np.asarray(getattr(module, n)[...], np.float64) for n in ("router", "gate", "up", "down"))
    rows, want, busy = np.asarray(x, np.float64).reshape(-1, 12), [], np.zeros(count)
    for row in rows:
        likes = np.exp(row @ router) / np.exp(row @ router).sum()
        chosen = np.argsort(-likes)[:per_token]
        weights = likes[chosen] / (likes[chosen].sum() if renormalised else 1)
        want.append(sum(w * (silu(row @ gate[e]) * (row @ up[e]) @ down[e]) for w, e in zip(weights, chosen)))
        busy[chosen] += 1
    np.testing.assert_allclose(got.reshape(-1, 12), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(load.chosen, busy)
    assert count < 40 or (busy == 0).any()
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, x), got)


def test_a_token_depends_on_no_other():
    """There is no capacity to run out of: every token the same still gets its two experts."""
    module, x = make()
    run = nnx.jit(lambda module, x: module(x))
    alone = run(module, x[:1, :1])
    crowd = run(module, jnp.broadcast_to(x[:1, :1], x.shape))
    np.testing.assert_allclose(crowd, np.broadcast_to(alone, x.shape), rtol=1e-5, atol=1e-6)


def test_balance_is_least_when_experts_are_equally_busy_and_leaves_out_what_does_not_count():
    options = ExpertOptions(count=4, per_token=2, balance=0.5)
    even = Load(jnp.full((3, 4), 5.0), jnp.full((3, 4), 2.5))
    term = balance_loss(even, jnp.ones((2, 5)), options)
    assert (float(term.sum / term.weight), term.coefficient) == (pytest.approx(2.0), 0.5)  # k
    one = Load(jnp.array([[10.0, 10, 0, 0]] * 3), jnp.array([[5.0, 5, 0, 0]] * 3))
    assert float(balance_loss(one, jnp.ones((2, 5)), options).sum) / 10 == pytest.approx(4.0)
    module, x = make()
    counted = jnp.asarray(np.arange(24).reshape(3, 8) % 3 == 0, jnp.float32)
    _, load = module.routed(x, counted)
    _, want = module.routed(x.reshape(-1, 12)[::3][None], jnp.ones((1, 8)))
    np.testing.assert_allclose(load.chosen, want.chosen)
    np.testing.assert_allclose(load.liked, want.liked, rtol=1e-5)


@pytest.mark.parametrize("options, mend", [
    (dict(count=4, per_token=5), "per_token is 5 of 4 experts. Use 1 to 4"),
    (dict(count=4, per_token=0), "per_token is 0 of 4 experts"),
    (dict(count=4, per_token=2, balance=-1.0), "balance is -1.0; use 0"),
])  # fmt: skip
def test_impossible_options_are_refused(options, mend):
    with pytest.raises(ValueError, match=mend):
        ExpertOptions(**options)


def test_only_what_some_published_model_is_can_be_written():
    with pytest.raises(NotImplementedError, match="no Hugging Face model is Llama with these experts. Set qk_norm"):
        llama.config_to(dataclasses.replace(TINY, qk_norm=False))
    hf = llama.config_to(TINY)
    with pytest.raises(NotImplementedError, match="mlp_only_layers is \\[0\\]"):
        llama.config_from({**hf, "mlp_only_layers": [0]})
    with pytest.raises(ValueError, match="lacks num_experts"):
        llama.config_from({name: value for name, value in hf.items() if name != "num_experts"})


def test_experts_have_no_adapters():
    """Only the layers that PEFT adapts in the same model do."""
    model = nnx.eval_shape(lambda: llama.build(TINY, rngs=nnx.Rngs(0)))
    add = lambda target: add_lora(model, LoraOptions(targets=(target,)), rngs=nnx.Rngs(0))  # noqa: E731
    with pytest.raises(ValueError, match="no layer is called down. Use some of k, o, q, v, or all"):
        nnx.eval_shape(lambda: add("down"))


def test_the_planner_counts_the_experts_of_a_token():
    """Of 128 experts 8; and in the trace of a layer the blocks, which hold twice the rows."""
    forecast = Forecast(Workload(model="qwen3-30b-a3b", mesh="1x8"))
    others, experts, scores = 2048 * (2 * (4096 + 512) + 128), 3 * 8 * 2048 * 768, 4 * 4096 * 4096
    assert forecast.shape.active_params == others + experts
    assert forecast.shape.layer_params == others + 16 * experts
    assert any("goes through 57M of a layer's 623M parameters" in words for words in forecast.warnings)
    (layers,) = forecast.work.layers
    assert layers.forward_flops == pytest.approx(4096 * (2 * (others + 2 * experts) + scores), rel=1e-3)


@pytest.mark.slow
def test_train_py_balances_experts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one two three four five six seven\n" * 200)
    words = "--model moe-tiny --data text.txt --steps 3 --seq-len 32 --batch-size 8 --eval-batches 1"
    assert train.main([*words.split(), "--metrics", "run.jsonl"]) == 0
    records = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert all(2 <= r["balance"] < 8 for r in records if "balance" in r) and "balance" in records[0]
