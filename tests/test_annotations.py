"""The rivals must compute the same step as each other, or comparing with them means nothing."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import annotations
from jfsdp.audit import program as audit

CONFIG = replace(annotations.SIZES["toy"], layers=2, batch=2)


def make_mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("replica", "shard"))


@functools.cache
def compiled(variant, loss_chunk):
    built = annotations.build(replace(CONFIG, loss_chunk=loss_chunk), make_mesh(), variant)
    return built, built.step.lower(*built.arguments).compile()


def first_step(variant, loss_chunk=None):
    """Loss and gradients of one step; those are read from AdamW's first moment, 0.1 of them."""
    built, step = compiled(variant, loss_chunk)
    rows = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (2, 16, CONFIG.tokens), dtype=np.int32)
    tokens, targets = jax.device_put(tuple(rows), built.arguments[1].sharding)
    (_, moments), loss = step(built.init(jax.random.key(0)), tokens, targets)
    return float(loss), jax.tree.map(np.asarray, moments[0].mu)


@pytest.mark.parametrize(("variant", "loss_chunk"), [("gather-in-body", None), ("annotations", 16)])
def test_every_way_computes_the_same_gradients(variant, loss_chunk):
    want_loss, want_grads = first_step("annotations")
    loss, grads = first_step(variant, loss_chunk)
    assert loss == pytest.approx(want_loss, abs=2e-3)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        # bf16 noise: 3.7 percent seen, for the head. A forgotten reduction is off by half or more.
        assert np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want)


def test_gathers_in_the_body_run_in_both_passes():
    program = audit.read(compiled("gather-in-body", None)[1], make_mesh())
    in_loops = [c for c in program.select("all-gather", "shard") if c.runs == CONFIG.layers]
    assert len(in_loops) == 2 * 9  # seven matrices and two norms
    assert program.count("reduce-scatter", "shard") == 9 * CONFIG.layers + 3  # table, last norm, head


def test_options_follow_the_version():
    old, new = annotations.maxtext_options("0.10.2"), annotations.maxtext_options("0.12.0.1")
    assert old["xla_gpu_enable_pipelined_all_gather"] is True
    assert new["xla_gpu_pipeline_all_gather"] == "COLLECTIVE_PIPELINING_MODE_ON"
    assert "xla_gpu_enable_pipelined_all_gather" not in new


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="unknown variant 'fsdp'. Known are annotations, gather-in-body"):
        annotations.build(CONFIG, make_mesh(), "fsdp")
