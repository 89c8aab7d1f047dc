"""Batches that are not full, through the real step: what counts, what it costs, and that padding changes nothing."""

import jax
import numpy as np
import optax
import pytest

from jfsdp.batches import Batches, evaluation_batches, pad_sequences, padded_length
from jfsdp.layout import make_plan
from jfsdp.metrics import compilations
from jfsdp.step import TrainState, eval_step, train_step
from jfsdp.unit import unshard

from .support import settings, submesh


class Numbers:
    """Examples whose loss is their number, `first` and up."""

    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"value": np.float32(self.first + i), "weights": np.float32(1)}


def loss(params, batch, key):
    """Whose gradient, for the one weight of the model, is the loss itself."""
    (w,) = unshard([params["w"]])
    one = 1 + (w[0] - jax.lax.stop_gradient(w[0]))
    return (one * batch["value"] * batch["weights"]).sum(), batch["weights"].sum()


@pytest.fixture(params=settings(4))
def setting(request):
    return request.param


@pytest.fixture
def made(setting):
    params = {"w": np.ones((1,), np.float32)}
    plan, tx = make_plan(params, submesh(setting.mesh), precision=setting.policy), optax.sgd(1.0)
    return plan, TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan)


def test_last_partial_batch_has_its_own_mean_and_costs_no_compilation(made, setting):
    """C-61: 21 examples, batch 8: loss 19.0 of 5 examples, gradient 19. C-77: one program over three epochs."""
    plan, state, step = made
    batches, before, seen = Batches(Numbers(21, 1), global_batch=8, shuffle=False), compilations("_step"), []
    for _ in range(9):
        old = float(state.params["w"][0])
        state, metrics = step(state, next(batches))
        seen.append((float(metrics["loss"]), float(metrics["weight"])))
        gradient = old - float(state.params["w"][0])  # SGD at rate 1
        assert gradient == pytest.approx(seen[-1][0], rel=setting.rounding)
    assert seen == [(4.5, 8), (12.5, 8), (19, 5)] * 3
    assert compilations("_step") - before == 1


@pytest.mark.parametrize("size", [8, 16])
def test_evaluation_counts_every_example_once(made, size):
    """C-62: nine examples of 0 to 8."""
    plan, state, _ = made
    evaluate = eval_step(loss, plan)
    results = [evaluate(state.params, batch) for batch in evaluation_batches(Numbers(9, 0), global_batch=size)]
    total, count = (sum(float(part[i]) for part in results) for i in (0, 1))
    assert (total / count, count) == (4.0, 9)


def test_lengths_fall_into_few_sizes_and_padding_changes_nothing(made):
    """C-77: lengths 5, 9, 13 and 30 of at most 32 make 8, 16, 16 and 32: three programs, counted."""
    plan, state, step = made
    before = compilations("_step")
    for length, size in [(5, 8), (9, 16), (13, 16), (30, 32), (9, 16)]:
        values = np.arange(8 * length, dtype=np.float32).reshape(8, length) / 100
        batch = pad_sequences({"value": values, "weights": np.ones((8, length), np.float32)}, 32)
        assert batch["value"].shape == (8, size)
        state, metrics = step(state, batch)
        assert float(metrics["weight"]) == 8 * length
        assert float(metrics["loss"]) == pytest.approx(values.mean(), rel=1e-5)
    assert compilations("_step") - before == 3
    assert [padded_length(n, 20) for n in (1, 8, 17, 20)] == [8, 8, 20, 20]
    with pytest.raises(ValueError, match="has 21 tokens, more than 20. Cut it, or allow longer ones"):
        padded_length(21, 20)
