"""Live bytes by category, read from compiled steps; `U` is one unit's bytes."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp.audit import program as audit
from jfsdp.audit.live import live_bytes
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.schedule import Schedule
from jfsdp.stack import run_stack
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import unshard
from tests.support import compile_step, shape, submesh

LAYERS, WIDTH, INNER = 8, 128, 256
U = WIDTH * INNER * 4
BLOCKS = {"blocks": UnitOptions(stacked=True)}


@cache
def read(strategy=None, rows=8, remat="full", tx=optax.sgd(0.1), ema=None, **options):
    """Live bytes of a step of 8 equal units without prefetch, and the compiler's own figures."""
    schedule = Schedule(prefetch=0, late_reduce=False)

    def block(w, x, _):
        return x + jnp.tanh(x @ w["kernel"]) @ w["kernel"].T, None

    def loss(params, batch, key):
        return jnp.mean(run_stack(block, params["blocks"], batch["x"], remat=remat, schedule=schedule)[0] ** 2)

    params, batch = {"blocks": {"kernel": shape(LAYERS, WIDTH, INNER)}}, {"x": shape(rows, WIDTH)}
    plan = make_plan(params, submesh("1x8"), strategy=strategy, units=BLOCKS)
    state = TrainState.abstract(tx, plan, ema=ema is not None)
    compiled = train_step(loss, tx, plan, ema=ema, **options).lower(state, batch).compile()
    return live_bytes(compiled, state), audit.memory(compiled)


@pytest.mark.parametrize(
    ("strategy", "gathered", "gradients"),
    # A unit at work, and its gradient or a second copy of it on its way out.
    [
        ("FULL_SHARD", (1, 2), (1, 2)),
        ("SHARD_GRAD_OP", (8, 9), (1, 2)),
        ("SHARD_OPT", (8, 8), (0, 1)),
        ("NO_SHARD", (0, 0), (8, 10)),
    ],
)
def test_what_a_strategy_keeps_shows_in_its_category(strategy, gathered, gradients):
    live, _ = read(strategy)
    assert gathered[0] <= round(live.gathered / U, 1) <= gathered[1]
    assert gradients[0] <= round(live.gradients / U, 1) <= gradients[1] + 0.2
    at_rest = LAYERS * U if strategy in ("SHARD_OPT", "NO_SHARD") else LAYERS * U / 8
    assert (live.parameters, live.optimizer) == (at_rest, 0)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD"])
def test_categories_add_up_to_what_the_compiler_set_aside(strategy):
    """Independent of how buffers are named: their moment of most bytes is the compiler's figure, with few gaps."""
    live, memory = read(strategy)
    assert live.total == memory.needed
    assert 0 <= live.unused <= 0.03 * memory.temp


class TestWhatAddsToACategory:
    def test_moments_and_the_average(self):
        live, _ = read(tx=optax.adamw(1e-3), ema=0.9)
        assert live.optimizer == pytest.approx(2 * LAYERS * U / 8, abs=100)
        assert live.average == live.parameters == LAYERS * U / 8

    def test_no_sync_holds_whole_gradients(self):
        synced, held = (read(rows=32, accumulate=4, no_sync=no_sync)[0] for no_sync in (False, True))
        assert held.gradients - synced.gradients >= (LAYERS - 3) * U
        assert held.gathered <= 3 * U

    def test_saved_activations(self):
        """512 rows a device: the input of each layer is saved, and without checkpointing the hidden values too."""
        few, many = read(rows=8)[0], read(rows=8 * 512)[0]
        saved = LAYERS * 512 * WIDTH * 4
        assert saved <= many.activations - few.activations
        assert many.gathered <= few.gathered + U
        unchecked = read(rows=8 * 512, remat="none")[0]
        assert unchecked.activations - many.activations >= (LAYERS - 2) * 512 * INNER * 4


def test_a_state_of_arrays_reads_like_an_abstract_one():
    tx, params = optax.adamw(1e-3), {"w": np.ones((64, 64), np.float32)}
    batch = {"x": np.ones((8, 64), np.float32)}
    got = compile_step(lambda p, b, k: jnp.mean((b["x"] @ unshard(p)["w"]) ** 2), params, batch, "1x8", units={}, tx=tx)
    state = TrainState.create(got.plan.place(params), tx, got.plan)
    live = live_bytes(got.compiled, state)
    assert live == live_bytes(got.compiled, TrainState.abstract(tx, got.plan))
    held = sum(s.data.nbytes for a in jax.tree.leaves(state.params) for s in a.addressable_shards if s.device.id == 3)
    assert live.parameters == held == 64 * 64 * 4 // 8


def test_a_compiler_that_gives_sums_only_is_named_with_a_way_out():
    silent = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(serialized_buffer_assignment_proto=b""))
    with pytest.raises(NotImplementedError, match="gives sums only.*Compile the same step for simulated CPU devices"):
        live_bytes(silent, None)
