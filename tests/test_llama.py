"""The Llama family: equal to the reference values of transformers, and each of its rules by itself.

`data/llama-untied` is a random Llama of 492,960 parameters in Hugging Face layout, with the logits and losses
that transformers 5 gave in fp32. Its norm scales are not 1, its RoPE scaling puts frequencies in all three of
Llama 3's ranges, and its weights are large, so that a mistake shows: no scaling moves logits by 5, a norm
epsilon wrong by a factor of ten by 0.01.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from models import attention as att
from models import llama
from models.rope import LinearScaling, Llama3Scaling, YarnScaling, rope_frequencies, rotate

STRETCHED = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
DATA = Path(__file__).parent / "data" / "llama-untied"
HUB = json.loads((DATA / "config.hub.json").read_text())
SMALL = llama.Config(
    vocab_size=37, width=24, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, inner_width=40,
    query_chunk=8, rope_scaling=STRETCHED,
)


def empty(config):
    """Shapes without values: nothing is computed."""
    return nnx.eval_shape(lambda: llama.build(config, rngs=nnx.Rngs(0)))


def filled(module, seed=0):
    """Weights larger than at the start, so that mistakes show, and norm scales that are not 1."""
    rng = np.random.default_rng(seed)

    def values(path, leaf):
        return jnp.asarray(0.2 * rng.normal(size=leaf.shape) + ("norm" in path), leaf.dtype)

    return with_leaves(module, values)


@functools.cache
def small(**changes):
    return filled(empty(dataclasses.replace(SMALL, **changes)))


def halved(module):
    return with_leaves(module, lambda _, leaf: leaf.astype(jnp.bfloat16))


@nnx.jit
def logits(model, tokens, segments=None, positions=None):
    return model(tokens, segments=segments, positions=positions)


@nnx.jit
def loss(model, tokens, targets, weights, segments=None):
    return model.loss(tokens, targets, weights, segments=segments)


def tokens_of(*shape, seed=0, below=SMALL.vocab_size):
    return jax.random.randint(jax.random.key(seed), shape, 1, below)


def with_leaves(module, change):
    """The module with `change(path, leaf)` in place of each parameter; a path reads `embed.table.value`."""
    graph, state = nnx.split(module)
    path_of = jax.tree_util.keystr
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(path_of(path, simple=True, separator="."), leaf), state))


def allclose(a, b, tolerance):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=tolerance)


# Reference values


def hf_weights(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        raw = (folder / file).read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, end = (start + offset for offset in entry["data_offsets"])
                yield name, np.frombuffer(raw[first:end], ml_dtypes.bfloat16).reshape(entry["shape"])


def import_hf(config, folder):
    """A model with a checkpoint's weights, by the table of names alone."""
    weights = {name: np.float32(w) for name, w in hf_weights(folder)}

    def of(name, transposed):
        w = weights.pop(name)
        return w.T if transposed else w

    def change(path, leaf):
        for ours, (theirs, transposed) in llama.NAMES.items():
            if "{}" not in ours and path.startswith(ours):
                return jnp.asarray(of(theirs, transposed))
            if path.startswith("blocks.") and "." + ours.removeprefix("blocks.{}.") in path:
                return jnp.stack([of(theirs.format(layer), transposed) for layer in range(config.num_layers)])
        raise KeyError(path)

    model = with_leaves(empty(config), change)
    assert not weights, f"the table of names misses {sorted(weights)}"
    return model


@pytest.fixture(scope="module")
def reference():
    return {**np.load(DATA / "batches.npz"), **np.load(DATA / "reference.npz")}


@pytest.fixture(scope="module", params=["model/config.json", "config.hub.json"])
def imported(request):
    return import_hf(llama.config_from(json.loads((DATA / request.param).read_text())), DATA / "model")


def test_logits_and_losses_equal_transformers(imported, reference):
    allclose(logits(imported, reference["input_ids"][0])[reference["logit_rows"]], reference["logits"], 1e-4)
    for i in range(6):
        targets = reference["targets"][i]
        weights = (targets >= 0).astype(np.float32)
        total, weight = loss(imported, reference["input_ids"][i], np.maximum(targets, 0), weights)
        assert float(weight) == reference["n_targets"][i]
        allclose(total / weight, reference["loss"][i], 1e-5)


@pytest.mark.parametrize("imported", ["model/config.json"], indirect=True)
def test_padding_marked_as_segment_0_changes_no_loss(imported, reference):
    targets = reference["targets"][1]
    weights, segments = np.float32(targets >= 0), reference["attention_mask"][1]
    total, weight = loss(imported, reference["input_ids"][1], np.maximum(targets, 0), weights, segments)
    allclose(total / weight, reference["loss"][1], 1e-5)


# RoPE


def rope_reference(dim, theta, factor=1.0, low=1.0, high=4.0, original=8192):
    """As published with Llama 3, frequency by frequency."""
    out = []
    for i in range(dim // 2):
        frequency = 1 / theta ** (2 * i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency /= factor
        elif wavelength > original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


@pytest.mark.parametrize("name", ["llama-2m", "llama3-1b", "llama3-8b", "llama3-70b"])
def test_rope_frequencies_equal_the_published_formula(name):
    config = llama.presets[name]
    factor = config.rope_scaling.factor if config.rope_scaling else 1.0
    want = rope_reference(config.head_size, config.rope_theta, factor)
    np.testing.assert_allclose(rope_frequencies(config), want, rtol=1e-7)  # fp32 rounding


STRETCHES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768),
    "yarn-short": dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=64, beta_fast=20.0,
                       truncate=False, attention_factor=1.25),
}


@pytest.mark.parametrize("stretch", STRETCHES.values(), ids=STRETCHES)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_stretched_frequencies_equal_those_of_transformers(stretch, theta):
    """Read from a config.json by both; cosines at position 0 are what YaRN multiplies by."""
    transformers = pytest.importorskip("transformers", reason="transformers is the judge of parity")
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    hf = {**HUB, "rope_scaling": None, "rope_theta": theta, "rope_parameters": {"rope_theta": theta, **stretch}}
    their = transformers.LlamaConfig(**hf)
    want, amplitude = modeling.ROPE_INIT_FUNCTIONS[stretch["rope_type"]](their, "cpu")
    config = llama.config_from(hf)
    assert abs(want.numpy() / rope_frequencies(dataclasses.replace(config, rope_scaling=None)) - 1).max() > 0.5
    np.testing.assert_allclose(rope_frequencies(config), want.numpy(), rtol=2e-6)  # theirs is fp32 throughout
    cos, _ = llama.rope_tables(config, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, amplitude, rtol=1e-6)


def test_rope_turns_pairs_of_both_halves_by_position_times_frequency():
    position = np.array([[0, 1, 5, 4001]])
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    turned = jax.jit(lambda x: rotate(x, llama.rope_tables(SMALL, jnp.asarray(position))))(x)
    angle = position[0, :, None, None] * np.float64(rope_frequencies(SMALL))
    want = (np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])) * np.exp(1j * angle)
    want = np.concatenate([want.real, want.imag], axis=-1)
    allclose(turned[:, :3], want[:, :3], 1e-6)
    allclose(turned, want, 1e-3)  # an angle of 4001 is off by 1e-4 in fp32


def test_rope_and_norm_round_to_bf16_once_at_their_end():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 256)).astype(jnp.bfloat16)
    config = dataclasses.replace(SMALL, head_dim=256)
    rope = llama.rope_tables(config, jnp.full((1, 1), 3001))
    norm = llama.RMSNorm(256, 1e-5)
    for f in (jax.jit(lambda x: rotate(x, rope)), nnx.jit(lambda x: norm(x))):
        exact = f(x.astype(jnp.float32))
        assert f(x).dtype == jnp.bfloat16
        np.testing.assert_array_equal(f(x), exact.astype(jnp.bfloat16))


# Attention

PACKED = ((1,) * 5 + (2,) * 9 + (3,) * 4 + (0,) * 4, (1,) * 22, (4,) * 17 + (5,) * 5)
whole_and_packed = pytest.mark.parametrize("segments", [None, PACKED], ids=["whole rows", "documents"])


def attention_inputs(T=22, dtype=jnp.float32):
    """Queries in 6 heads, keys and values in 2, and a cotangent."""
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(3, T, heads, 8)), dtype) for heads in (6, 2, 2, 6)]


@functools.cache
def attend(segments, dtype=jnp.float32, **how):
    """Result and gradients for q, k, v."""

    @jax.jit
    def run(q, k, v, g):
        starts = None if segments is None else att.document_starts(jnp.asarray(segments))
        out, vjp = jax.vjp(lambda *qkv: att.attention(*qkv, starts, **how), q, k, v)
        return out, *vjp(g)

    return run(*attention_inputs(dtype=dtype))


def attention_by_loops(segments):
    """Float64, token by token: sees itself and what comes before it in its unbroken run of one segment."""
    q, k, v, _ = (np.float64(a) for a in attention_inputs())
    segments = np.ones(q.shape[:2]) if segments is None else np.array(segments)
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(q.shape[:3]):
        first = t
        while segments[b, t] and first and segments[b, first - 1] == segments[b, t]:
            first -= 1
        keys, values = (a[b, first : t + 1, h // 3] for a in (k, v))
        weights = np.exp(keys @ q[b, t, h] / math.sqrt(8))
        out[b, t, h] = weights @ values / weights.sum()
    return out


WAYS = {
    "xla": dict(implementation="xla"),
    "chunks": dict(implementation="chunked", chunk=8),
    "one chunk": dict(implementation="chunked", chunk=64),
}


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@whole_and_packed
def test_attention_equals_loops_over_tokens(how, segments):
    allclose(attend(segments, **how)[0], attention_by_loops(segments), 2e-6)  # fp32


@whole_and_packed
def test_chunked_attention_has_the_gradients_of_whole_attention(segments):
    chunks, wholes = attend(segments, **WAYS["chunks"]), attend(segments, **WAYS["xla"])
    for chunked, whole in zip(chunks, wholes, strict=True):
        assert np.abs(whole).max() > 0.1
        allclose(chunked, whole, 5e-6)  # fp32, sums in another order


def test_attention_in_float64_rounds_nothing_to_fp32():
    with jax.enable_x64(True):
        q, k, v = (a.astype(jnp.float64) for a in attention_inputs()[:3])
        starts = att.document_starts(jnp.asarray(PACKED, jnp.int32))
        out = jax.jit(lambda *qkv: att.attention(*qkv, starts, **WAYS["chunks"]))(q, k, v)
        allclose(out, attention_by_loops(PACKED), 1e-13)


def test_attention_in_bf16_sums_and_normalises_in_fp32():
    low = attend(PACKED, jnp.bfloat16, **WAYS["chunks"])
    assert all(a.dtype == jnp.bfloat16 for a in low)
    for got, want in zip(low, attend(PACKED, **WAYS["xla"]), strict=True):
        error = np.float64(got) - np.float64(want)
        assert np.sqrt((error**2).mean() / (np.float64(want) ** 2).mean()) < 0.006  # 1/256 is a step of bf16


@whole_and_packed
def test_cudnn_is_asked_for_the_same_attention(segments, monkeypatch):
    real = jax.nn.dot_product_attention

    def without_gpu(*args, implementation, **kw):
        assert implementation == "cudnn"
        return real(*args, implementation="xla", **kw)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_gpu)
    asked = attend.__wrapped__(segments, implementation="cudnn")
    allclose(asked[0], attend(segments, **WAYS["xla"])[0], 2e-6)


@pytest.mark.gpu
@whole_and_packed
def test_cudnn_equals_xla_on_a_gpu(segments):
    if att.cuda_capability() is None:
        pytest.skip("only an NVIDIA GPU runs cuDNN's kernels")
    cudnn, xla = (attend(segments, jnp.bfloat16, implementation=way) for way in ("cudnn", "xla"))
    for got, want in zip(cudnn, xla, strict=True):
        allclose(got, want, 0.05)  # bf16


def test_chunked_attention_keeps_the_scores_of_one_chunk():
    def temporary(**how):
        def backward(g, *qkv):
            return jax.vjp(lambda *qkv: att.attention(*qkv, None, **how), *qkv)[1](g)

        gqkv = [jax.ShapeDtypeStruct((1, 1024, heads, 8), jnp.float32) for heads in (4, 4, 2, 2)]
        return jax.jit(backward).lower(*gqkv).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 4 * 1024 * 1024  # heads x bytes x queries x keys
    assert temporary(implementation="xla") > scores
    assert temporary(implementation="chunked", chunk=32) < scores / 4  # a few buffers of 1/32 each


def test_document_starts_are_where_runs_begin_and_padding_stands_alone():
    got = att.document_starts(jnp.array([[1, 1, 2, 2, 2, 0, 0], [7, 3, 3, 7, 0, 7, 7]]))
    assert got.tolist() == [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 3, 4, 5, 5]]


A100, H100, TURING = (8, 0), (9, 0), (7, 5)


@pytest.mark.parametrize("want, changes", [
    ("cudnn", {}),
    ("cudnn", dict(dtype=jnp.float16)),
    ("cudnn", dict(head_dim=256, capability=H100)),
    ("chunked", dict(head_dim=256)),
    ("chunked", dict(head_dim=264, capability=H100)),
    ("chunked", dict(head_dim=100)),
    ("chunked", dict(dtype=jnp.float32)),
    ("chunked", dict(capability=TURING)),
    ("chunked", dict(capability=None)),
    ("chunked", dict(tokens=4095)),
    ("chunked", dict(capability=None, tokens=257)),
    ("xla", dict(capability=None, tokens=256)),
])
def test_auto_takes_cudnn_where_it_can_run(want, changes):
    usual = dict(tokens=4096, chunk=256, head_dim=128, dtype=jnp.bfloat16, capability=A100)
    assert att.resolve(**{**usual, **changes}) == want


# The model


def test_packed_documents_equal_separate_rows():
    documents = np.asarray(tokens_of(2, 12))
    first, second = documents[0, :4], documents[1, :6]
    packed = np.stack([np.concatenate([first, second, documents[0, 10:]])] * 2)  # the last two are padding
    segments = np.array([[1] * 4 + [2] * 6 + [0] * 2] * 2)
    separate = np.asarray(logits(small(), documents))
    got = np.asarray(logits(small(), packed, segments))[0]
    allclose(got[:4], separate[0, :4], 1e-5)  # fp32
    allclose(got[4:10], separate[1, :6], 1e-5)
    unmasked = np.asarray(logits(small(), packed))[0]
    assert np.abs(unmasked[4:10] - separate[1, :6]).max() > 0.1


@whole_and_packed
def test_a_sliding_window_hides_what_lies_further_back_and_keeps_documents_apart(segments):
    """One layer sees `window` tokens: changing an older one changes nothing, changing the oldest seen does."""
    window, at = 4, 4
    model = small(num_layers=1, sliding_window=window)
    segments = None if segments is None else jnp.asarray(segments)
    tokens = tokens_of(3, 22)
    changed = np.abs(logits(model, tokens, segments) - logits(model, tokens.at[:, at].add(1), segments)).max(-1)
    documents = np.ones((3, 22), int) if segments is None else np.asarray(segments)
    for row, token in np.ndindex(3, 22):
        is_seen = at <= token < at + window and documents[row, token] == documents[row, at]
        assert (changed[row, token] > 1e-4) == is_seen


def test_positions_count_from_the_start_of_each_document(monkeypatch):
    real, seen = llama.rope_tables, []

    def spy(config, positions):
        seen.append(positions)
        return real(config, positions)

    @jax.jit
    def positions(segments):
        small()(tokens_of(1, 8), segments=segments)
        return seen[-1]

    monkeypatch.setattr(llama, "rope_tables", spy)

    assert positions(jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])).tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]


def test_positions_can_be_given():
    model = small()
    tokens, segments = tokens_of(2, 12), jnp.array([[1] * 5 + [2] * 7, [1] * 12])
    usual = logits(model, tokens, segments)
    count = jnp.array([[*range(5), *range(7)], [*range(12)]])
    allclose(logits(model, tokens, segments, count), usual, 1e-6)
    assert np.abs(logits(model, tokens, segments, 2 * count) - usual).max() > 1e-5


def test_a_token_sees_nothing_behind_it():
    tokens = tokens_of(2, 12)
    one, other = (logits(small(), t) for t in (tokens, tokens.at[:, 8:].set(tokens_of(2, 4, seed=5))))
    allclose(one[:, :8], other[:, :8], 1e-6)
    assert np.abs(one[:, 8:] - other[:, 8:]).max() > 1e-3


def test_compute_dtype_follows_the_weights():
    model = halved(small())
    low = logits(model, tokens_of(2, 12))
    high = logits(with_leaves(model, lambda _, leaf: leaf.astype(jnp.float32)), tokens_of(2, 12))
    assert low.dtype == high.dtype == jnp.float32
    gap = np.linalg.norm(low - high) / np.linalg.norm(high)
    assert 1e-3 < gap < 3e-2  # the same weights, so it is the arithmetic: 0.009 was seen, fp32 gives 1e-6


def equations(jaxpr):
    """All equations of a jaxpr, those of inner functions included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_block_gives_back_the_dtype_it_was_given_and_multiplies_in_the_weights(dtype):
    block = halved(filled(nnx.eval_shape(lambda: llama.Block(SMALL, rngs=nnx.Rngs(0)))))
    rope = jax.eval_shape(lambda: llama.rope_tables(SMALL, jnp.arange(4)[None]))
    program = jax.make_jaxpr(block)(jax.ShapeDtypeStruct((1, 4, 24), dtype), rope)
    assert program.out_avals[0].dtype == dtype
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    with_weights = [e.invars for e in products if e.invars[1].aval.ndim == 2]
    assert len(with_weights) == 7
    assert {v.aval.dtype for operands in with_weights for v in operands} == {jnp.dtype(jnp.bfloat16)}


def test_grouped_query_attention_equals_repeated_key_value_heads():
    def build(num_kv_heads):
        config = dataclasses.replace(SMALL, num_kv_heads=num_kv_heads)
        return filled(nnx.eval_shape(lambda: llama.Attention(config, rngs=nnx.Rngs(0))), seed=num_kv_heads)

    grouped, full = build(2), build(6)
    for name in ("q", "o"):
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in ("k", "v"):
        heads = np.asarray(getattr(grouped, name).kernel[...]).reshape(24, 2, 8)
        getattr(full, name).kernel[...] = jnp.asarray(heads.repeat(3, axis=1).reshape(24, 48))
    x = np.random.default_rng(0).normal(size=(2, 12, 24)).astype(np.float32)
    run = nnx.jit(lambda module: module(x, llama.rope_tables(SMALL, jnp.arange(12)[None]), None))
    assert np.abs(run(full)).max() > 0.1
    allclose(run(grouped), run(full), 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_is_the_weighted_sum_over_the_logits(tied):
    model = small(tied=tied)
    tokens, targets = tokens_of(2, 12), tokens_of(2, 12, seed=1)
    weights = jnp.linspace(0, 2, 24).reshape(2, 12)
    segments = jnp.array([[1] * 12, [1] * 6 + [2] * 6])
    total, weight = loss(model, tokens, targets, weights, segments)
    z = np.float64(logits(model, tokens, segments))
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    want = -sum(weights[at] * log_p[(*at, targets[at])] for at in np.ndindex(2, 12))
    assert float(weight) == pytest.approx(24)
    assert float(total) == pytest.approx(float(want), rel=1e-6)


def test_a_tied_head_is_the_embedding():
    tied, untied = small(tied=True), small()
    assert tied.head.table is tied.embed.table
    assert untied.head.table is not untied.embed.table
    assert "head" not in nnx.state(tied, nnx.Param)
    tokens, weights = tokens_of(2, 12), jnp.ones((2, 12))
    gradient = nnx.jit(nnx.grad(lambda model: loss(model, tokens, tokens, weights)[0]))(tied)
    of_a_row = np.abs(gradient["embed"]["table"][...]).sum(axis=1)
    assert (of_a_row > 0).all()  # also a row that no token looks up, from the head


def test_norms_start_at_1_and_sums_into_the_residual_start_smaller():
    config = dataclasses.replace(SMALL, width=128, num_layers=8, inner_width=256)
    model = nnx.jit(lambda: llama.build(config, rngs=nnx.Rngs(0)))()
    seen = set()

    def check(path, leaf):
        seen.add(path)
        assert leaf.dtype == jnp.float32
        if "norm" in path:
            assert (np.asarray(leaf) == 1).all()
        else:
            small_ones = any(name in path for name in (".o.", ".down."))
            assert np.std(leaf) == pytest.approx(0.02 / 4 if small_ones else 0.02, rel=0.05)
        return leaf

    with_leaves(model, check)
    assert len(seen) == 12


def test_segments_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(1, 12\) and tokens \(2, 12\); give each token"):
        logits(small(), tokens_of(2, 12), jnp.ones((1, 12), jnp.int32))


# Configurations


@pytest.mark.parametrize("changes, mend", [
    (dict(num_layers=0), "num_layers is 0; it is a count, so use 1 or more"),
    (dict(num_heads=7, num_kv_heads=7), "width 192 does not split into 7 heads. Use a multiple of 7"),
    (dict(num_kv_heads=4), r"Set num_kv_heads to one of \[1, 2, 3, 6\]"),
    (dict(head_dim=15), "head_dim is 15; RoPE turns pairs, so set it to 2, 4, 6"),
    (dict(head_dim=0), "head_dim is 0; RoPE turns pairs"),
    (dict(num_heads=64), "head_dim is 3; RoPE turns pairs"),
    (dict(sliding_window=0), "sliding_window is 0; use 1 or more, or None"),
    (dict(attention="flash"), "attention is 'flash'; use one of auto, xla, cudnn, chunked"),
])
def test_impossible_shapes_are_refused(changes, mend):
    with pytest.raises(ValueError, match=mend):
        llama.Config(**changes)


@pytest.mark.parametrize("scaling, mend", [
    (lambda: dataclasses.replace(STRETCHED, high_freq_factor=1.0), "not above low_freq_factor 1.0.*uses 1.0 and 4.0"),
    (lambda: YarnScaling(factor=4.0, original_max_position_embeddings=64, beta_fast=1), "beta_fast is 1.*32 and 1"),
    (lambda: LinearScaling(factor=0.5), "factor is 0.5; .* use 1 or more"),
])
def test_an_impossible_rope_scaling_is_refused(scaling, mend):
    with pytest.raises(ValueError, match=mend):
        scaling()


def test_both_spellings_of_a_config_say_the_same():
    other = json.loads((DATA / "model/config.json").read_text())
    want = llama.Config(vocab_size=515, width=96, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=16,
                        inner_width=256, rope_scaling=STRETCHED)
    assert llama.config_from(other) == want
    assert llama.config_from(HUB) == dataclasses.replace(want, head_dim=None)  # 96 / 6 either way


def test_an_old_config_means_the_defaults_of_its_time():
    later = "num_key_value_heads rope_theta rope_scaling rms_norm_eps tie_word_embeddings".split()
    config = llama.config_from({key: HUB[key] for key in HUB if key not in later} | {"rope_scaling": None})
    assert (config.num_kv_heads, config.rope_theta, config.rope_scaling) == (6, 10_000.0, None)
    assert (config.norm_eps, config.tied) == (1e-6, False)


@pytest.mark.parametrize("changes, mend", [
    (dict(attention_bias=True), r"attention_bias is True; .*one of \[False\]. Use a checkpoint"),
    (dict(mlp_bias=True), "mlp_bias is True"),
    (dict(hidden_act="gelu"), r"hidden_act is 'gelu'; .*\['silu'\]"),
    (dict(model_type="gemma"), r"model_type is 'gemma'; .*\['llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe'\]"),
    (dict(attention_dropout=0.1), "attention_dropout is 0.1"),
    (dict(rope_scaling=dict(type="longrope")), r"rope_type is 'longrope'; .*\['default', 'linear', 'llama3', 'yarn'\]"),
    (dict(rope_parameters=dict(rope_type="dynamic")), "rope_type is 'dynamic'"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=4.0, mscale=1.0)), "mscale is 1.0"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    (dict(quantization_config=dict(bits=4)), "quantization_config is {'bits': 4}"),
    (dict(model_type="qwen2", use_sliding_window=True), "use_sliding_window is True"),
])
def test_a_config_for_another_model_is_refused_by_name(changes, mend):
    with pytest.raises(NotImplementedError, match=mend):
        llama.config_from({**HUB, **changes})


YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32)
WRITTEN = ["llama3-8b", "llama3-1b", "mistral-7b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-30b-a3b"]


@pytest.mark.parametrize("config", [
    *(pytest.param(llama.presets[name], id=name) for name in WRITTEN),
    *(pytest.param(dataclasses.replace(llama.Config(), rope_scaling=s), id=s.kind)
      for s in (YARN, LinearScaling(factor=2.0))),
])
def test_a_config_written_is_read_as_it_was(config):
    read = llama.config_from(json.loads(json.dumps(llama.config_to(config))))
    assert read == dataclasses.replace(config, head_dim=config.head_size)


def test_a_mixture_that_no_published_model_is_cannot_be_written():
    mixture = dataclasses.replace(SMALL, qk_norm=True, sliding_window=8)
    with pytest.raises(NotImplementedError, match="all that Qwen3 and Mistral add to Llama. Leave all but one"):
        llama.config_to(mixture)


@pytest.mark.parametrize("lost", ["hidden_size", "original_max_position_embeddings"])
def test_a_config_with_a_hole_names_what_is_missing(lost):
    rope = {key: value for key, value in HUB["rope_scaling"].items() if key != lost}
    with pytest.raises(ValueError, match=f"lacks {lost}. Give the file as its checkpoint has it"):
        llama.config_from({key: value for key, value in {**HUB, "rope_scaling": rope}.items() if key != lost})


# Sizes

PARAMETERS = {  # from llama3-1b on as published
    "llama-tiny": 344_736, "llama-2m": 1_967_808, "llama-30m": 29_764_096, "llama-125m": 125_264_640,
    "llama3-1b": 1_235_814_400, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096, "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360, "moe-tiny": 568_320, "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", llama.presets)
def test_presets_have_the_published_number_of_parameters(name):
    leaves = jax.tree.leaves(nnx.state(empty(llama.presets[name]), nnx.Param))
    assert sum(leaf.size for leaf in leaves) == PARAMETERS[name]


def test_flops_are_the_matmuls_of_one_token_three_times():
    width, inner, vocab, heads, kv_heads, head, seq_len = 24, 40, 37, 6, 2, 8, 100
    q = o = (width, heads * head)
    k = v = (width, kv_heads * head)
    gate = up = down = (width, inner)
    scores = values = heads * head * seq_len
    layer = sum(a * b for a, b in (q, k, v, o, gate, up, down)) + scores + values
    forward = 2 * (2 * layer + width * vocab)  # 2 operations a weight; 2 layers
    assert llama.flops(SMALL, seq_len) == 3 * forward
    experts = dataclasses.replace(SMALL, experts=llama.ExpertOptions(count=5, per_token=2))
    more = 2 * 2 * (gate[0] * gate[1] * 3 + 5 * width)  # a second MLP for the token, and the router, in 2 layers
    assert llama.flops(experts, seq_len) == 3 * (forward + more)
    tied = dataclasses.replace(SMALL, tied=True)
    assert llama.flops(tied, seq_len) == llama.flops(SMALL, seq_len)  # the head's matmul stays
