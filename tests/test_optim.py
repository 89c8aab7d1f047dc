"""Optimizers on shards: whatever optax offers, equal to one device with one leaf per layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jfsdp.layout import UnitOptions, make_plan
from jfsdp.optim import Optimizer, label_params
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import unshard
from tests.support import HYBRID, PLAIN, assert_close, submesh

LAYERS = 3
BLOCKS = {"blocks": UnitOptions(stacked=True)}


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def values(shapes: dict, seed=0):
    """Blocks and a head whose layers differ in size by factors of ten, so that what is per layer shows."""
    rng = np.random.default_rng(seed)
    blocks = {
        name: np.stack([10.0**i * rng.normal(size=dims) for i in range(LAYERS)]).astype(np.float32)
        for name, dims in shapes.items()
    }
    return {
        "blocks": blocks,
        "head": {name: rng.normal(size=dims).astype(np.float32) for name, dims in shapes.items()},
    }


def one_leaf_per_layer(tree):
    layers = {f"{i}": {name: w[i] for name, w in tree["blocks"].items()} for i in range(LAYERS)}
    return {"blocks": layers, "head": tree["head"]}


def update(tx, params, gradients, mesh, strategy=None, units=BLOCKS, steps=2):
    """Logical parameters and the stored state after `steps` updates on shards, and the optimizer."""
    plan = make_plan(params, submesh(mesh), strategy=strategy, units=units)
    optimizer = Optimizer(tx, plan)
    shards = optimizer.stored_shards(plan.place(params))
    state, run = optimizer.init(plan.place(params)), jax.jit(optimizer.update)
    grads = optimizer.stored_shards(plan.place(gradients))
    for _ in range(steps):
        shards, state = run(grads, state, shards)
    return (
        plan.map(lambda leaf, w: np.asarray(w)[tuple(slice(n) for n in leaf.logical_shape)], shards),
        state,
        optimizer,
    )


def update_alone(tx, params, gradients, steps=2):
    params, state, run = jax.tree.map(jnp.asarray, params), tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = run(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2, weight_decay=0.1, mask=is_matrix),
    "muon": optax.contrib.muon(1e-2),
    "adamw masked by ndim": optax.adamw(1e-2, weight_decay=0.5, mask=is_matrix),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("mesh", "strategy"), [("1x8", "FULL_SHARD"), ("2x4", "HYBRID_SHARD")])
def test_stacked_layers_equal_one_leaf_per_layer(name, mesh, strategy):
    """Rule 9, on uneven matrices, vectors and scalars: layer by layer, off by 45 to 246 percent otherwise."""
    shapes = {"kernel": (13, 20), "scale": (20,), "gate": ()}
    params, gradients, tx = values(shapes), values(shapes, 1), OPTIMIZERS[name]
    got, _, _ = update(tx, params, gradients, mesh, strategy)
    want, _ = update_alone(tx, one_leaf_per_layer(params), one_leaf_per_layer(gradients))
    start = one_leaf_per_layer(params)
    moved, wanted = (jax.tree.map(np.subtract, end, start) for end in (one_leaf_per_layer(got), want))
    # Against what moved: fp32 steps near 1e-2 on values up to 1e2 keep 1e-2 / (100 x 6e-8) = 3 digits.
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(wanted)):
        assert np.abs(b).max() > 1e-4
        assert np.abs(a - b).max() <= 2e-3 * np.abs(b).max() + 1e-5


class TestWholeMatrices:
    @pytest.mark.parametrize("steps", [1, 3])
    @pytest.mark.parametrize(("mesh", "strategy"), [("1x8", "FULL_SHARD"), ("2x4", "HYBRID_SHARD")])
    def test_adafactor_keeps_the_factors_of_the_whole_matrix(self, mesh, strategy, steps):
        """C-27: one 256x256 parameter."""
        rng = np.random.default_rng(0)
        params, gradients = ({"w": rng.normal(size=(256, 256)).astype(np.float32)} for _ in range(2))
        tx = optax.adafactor(1e-2)
        got, state, _ = update(tx, params, gradients, mesh, strategy, units={}, steps=steps)
        want, wanted_state = update_alone(tx, params, gradients, steps)
        assert_close(got, want, 1e-5)
        assert [a.shape for a in jax.tree.leaves(state)] == [a.shape for a in jax.tree.leaves(wanted_state)]
        assert (256,) in [a.shape for a in jax.tree.leaves(state)]  # factored
        assert_close(state, wanted_state, 1e-5)

    def test_lamb_has_one_trust_ratio_per_parameter(self):
        """C-28: the 8 row blocks of a 32x8 parameter are scaled by 1, 2, 4 to 128."""
        rng = np.random.default_rng(0)
        params, gradients = ({"w": rng.normal(size=(32, 8)).astype(np.float32)} for _ in range(2))
        params["w"] *= 2.0 ** (np.arange(32) // 4)[:, None].astype(np.float32)
        got, _, _ = update(optax.lamb(1e-2), params, gradients, "1x8", units={}, steps=1)
        want, _ = update_alone(optax.lamb(1e-2), params, gradients, 1)
        moved, wanted = got["w"] - params["w"], np.asarray(want["w"]) - params["w"]
        np.testing.assert_allclose(moved, wanted, rtol=1e-5, atol=1e-5)  # of 0.7 on values up to 300
        assert np.abs(wanted).min() > 0.1


@pytest.mark.parametrize(("mesh", "strategy"), [*(("1x8", s) for s in PLAIN), *(("2x4", s) for s in HYBRID)])
def test_weight_decay_follows_names_and_shapes(mesh, strategy):
    """C-26: only the kernel decays, by 1 - 0.1 x 0.5; bias and scale stay bitwise."""
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(4, 6)), "bias": rng.normal(size=6), "scale": rng.normal(size=6)}
    params = {name: w.astype(np.float32) for name, w in params.items()}
    by_name = lambda params: {name: name == "kernel" for name in params}  # noqa: E731
    for mask in (by_name, is_matrix):
        tx = optax.adamw(0.1, weight_decay=0.5, mask=mask)
        got, _, _ = update(tx, params, jax.tree.map(np.zeros_like, params), mesh, strategy, units={}, steps=1)
        np.testing.assert_allclose(got["kernel"], 0.95 * params["kernel"], rtol=1e-6)
        np.testing.assert_array_equal(got["bias"], params["bias"])
        np.testing.assert_array_equal(got["scale"], params["scale"])


@pytest.mark.parametrize("layers", [None, LAYERS])
def test_a_model_that_is_one_array_has_its_moments_cut(layers):
    """Without a name of its own: its path, and that of what Adam counts, are those of Adam's state alone."""
    params = np.random.default_rng(0).normal(size=(*(() if layers is None else (layers,)), 13, 5)).astype(np.float32)
    units, tx = {"": UnitOptions(stacked=layers is not None)}, optax.adam(1e-2)
    got, state, _ = update(tx, params, params, "1x8", units=units)
    want, _ = update_alone(tx, params, params)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert {a.addressable_shards[0].data.shape[-2:] for a in (state[0].mu, state[0].nu)} == {(2, 5)}


class TestRules:
    """Masks and labels by logical path and shape."""

    PARAMS = {
        "blocks": {"each": {"up": {"kernel": np.ones((3, 4, 6), np.float32)}, "norm": np.ones((3, 6), np.float32)}},
        "embed": {"table": np.ones((10, 6), np.float32)},
        "frozen": np.ones((8, 8), np.float32),
    }
    UNITS = {"blocks.each": UnitOptions(stacked=True), "embed": UnitOptions()}

    def plan(self, mesh="1x8", strategy=None):
        trainable = lambda path: path != "frozen"  # noqa: E731
        return make_plan(self.PARAMS, submesh(mesh), strategy=strategy, units=self.UNITS, trainable=trainable)

    def test_a_rule_sees_the_names_and_shapes_of_the_model(self):
        """C-26: layers by number, shapes of one layer, whatever is stacked and padded; frozen parameters not at all."""
        seen = {}
        label_params(lambda path, shape: seen.update({path: shape}), self.plan())
        block = {"up.kernel": (4, 6), "norm": (6,)}
        layers = {f"blocks.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
        assert seen == {**layers, "embed.table": (10, 6)}

    @pytest.mark.parametrize(("mesh", "strategy"), [*(("1x8", s) for s in PLAIN), *(("2x4", s) for s in HYBRID)])
    def test_decay_follows_a_rule_on_path_and_shape(self, mesh, strategy):
        """C-26: kernels decay by 1 - 0.1 x 0.5; norms and the embedding, a matrix too, stay bitwise."""
        plan = self.plan(mesh, strategy)
        mask = label_params(lambda path, shape: len(shape) == 2 and not path.startswith("embed"), plan)
        tx = optax.adamw(0.1, weight_decay=0.5, mask=mask)
        loss = lambda params, batch, key: 0.0 * jnp.sum(batch["x"])  # noqa: E731
        state = TrainState.create(plan.place(self.PARAMS), tx, plan)
        state, _ = train_step(loss, tx, plan)(state, {"x": np.ones(8, np.float32)})
        got = state.logical_params()
        np.testing.assert_allclose(got["blocks"]["each"]["up"]["kernel"], np.full((3, 4, 6), 0.95), rtol=1e-6)
        for same in (got["blocks"]["each"]["norm"], got["embed"]["table"], got["frozen"]):
            np.testing.assert_array_equal(same, np.ones(same.shape))

    def test_labels_choose_an_optimizer(self):
        plan = self.plan()
        labels = label_params(lambda path, shape: "muon" if path.startswith("blocks") else "sgd", plan)
        assert jax.tree.leaves(labels) == ["muon", "muon", "sgd"]
        tx = optax.partition({"muon": optax.sgd(1.0), "sgd": optax.sgd(0.5)}, labels)
        loss = lambda params, batch, key: jnp.mean(batch["x"]) * sum(  # noqa: E731
            jnp.sum(w) for w in jax.tree.leaves(unshard(params["embed"]))
        )
        state = TrainState.create(plan.place(self.PARAMS), tx, plan)
        state, _ = train_step(loss, tx, plan)(state, {"x": np.ones(8, np.float32)})
        np.testing.assert_array_equal(state.logical_params()["embed"]["table"], np.full((10, 6), 0.5))

    def test_layers_of_a_stack_cannot_be_told_apart(self):
        with pytest.raises(ValueError, match=r"True of blocks.0.* and False of blocks.2.*one stack.*a stack of"):
            label_params(lambda path, shape: not path.startswith("blocks.2"), self.plan())


class TestPadding:
    def test_padding_is_never_trained(self):
        """An optimizer that moves everything, zeros too, leaves the padding of its moments at zero."""

        def push(gradients, state, params):
            moved = jax.tree.map(lambda m: m + 1, state)
            return moved, moved

        tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), push)
        params = {"blocks": {"kernel": np.ones((2, 13, 5), np.float32)}, "head": np.ones(11, np.float32)}
        _, state, optimizer = update(tx, params, params, "1x8", steps=3)
        plan = optimizer.plan
        for leaf, moment in zip(plan.leaves, jax.tree.leaves(state)):
            moment = np.moveaxis(np.asarray(moment), leaf.stacked_dim, 0)
            size = leaf.shape[leaf.dim]
            assert len(moment) > size
            assert (moment[:size] == 3).all() and (moment[size:] == 0).all()

    def test_the_step_keeps_stored_padding_at_zero(self):
        params = {"w": np.ones(13, np.float32)}
        plan, tx = make_plan(params, submesh("1x8")), optax.adamw(0.1, weight_decay=0.5)
        loss = lambda params, batch, key: jnp.mean(batch["x"]) * jnp.sum(unshard(params)["w"])  # noqa: E731
        state, step = TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan)
        for _ in range(2):
            state, metrics = step(state, {"x": np.ones(8, np.float32)})
        for leaf in (state.params["w"], *(a for a in jax.tree.leaves(state.opt_state) if a.ndim)):
            assert leaf.shape == (16,) and not np.asarray(leaf)[13:].any() and np.asarray(leaf)[:13].all()
        assert float(metrics["grad_norm"]) == pytest.approx(13**0.5)  # padding is not normed


class TestWhole:
    """What is not sharded is told: memory that does not shrink with the mesh is found by nobody."""

    PARAMS = {"blocks": {"kernel": np.ones((2, 256, 128), np.float32)}, "head": np.ones((256, 128), np.float32)}

    @pytest.mark.parametrize(
        ("init", "told"),
        [
            (lambda p: [jnp.zeros_like(w) for w in jax.tree.leaves(p)], r"s 1 \[256, 128\] is .*no parameter's path"),
            (lambda p: {"head": jnp.zeros((256, 256))}, r"s head \[256, 256\] is not sharded.*head has another"),
        ],
        ids=["no owner", "another shape"],
    )
    def test_it_is_named_where_it_is_larger_than_a_shard(self, init, told, caplog):
        tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
        plan = make_plan(self.PARAMS, submesh("1x8"), units=BLOCKS)
        TrainState.abstract(tx, plan)
        assert re.search(told, caplog.text)
        caplog.clear()
        TrainState.abstract(tx, make_plan(self.PARAMS, submesh("1x1"), units=BLOCKS))
        assert not caplog.text

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_usual_optimizers_have_none(self, name, caplog):
        plan = make_plan(self.PARAMS, submesh("1x8"), units=BLOCKS)
        TrainState.abstract(OPTIMIZERS[name], plan)
        assert not caplog.text


class TestMixing:
    def test_a_global_norm_inside_the_chain_is_refused_with_a_way_out(self):
        params = values({"kernel": (8, 8), "scale": (8,)})
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        plan = make_plan(params, submesh("1x8"), units=BLOCKS)
        with pytest.raises(ValueError, match=r"mixes parameters: .* reads the gradient of .*train_step\(clip_norm"):
            TrainState.create(plan.place(params), tx, plan)
        alone = make_plan({"blocks": params["blocks"]}, submesh("1x8"), units=BLOCKS)
        with pytest.raises(ValueError, match=r"update of blocks.kernel reads the gradient of blocks.scale"):
            Optimizer(tx, alone)

    def test_a_global_norm_of_unstacked_parameters_is_global(self):
        params = {"a": np.zeros(8, np.float32), "b": np.zeros(8, np.float32)}
        gradients = {"a": 3 * np.eye(8, dtype=np.float32)[0], "b": 4 * np.eye(8, dtype=np.float32)[7]}
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        got, _, _ = update(tx, params, gradients, "1x8", units={}, steps=1)
        np.testing.assert_allclose([got["a"][0], got["b"][7]], [-0.6, -0.8], rtol=1e-6)

    @pytest.mark.parametrize(
        "tx",
        [
            optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
            optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
            optax.chain(optax.clip(1.0), optax.adaptive_grad_clip(0.1), optax.lion(1e-3)),
            *OPTIMIZERS.values(),
        ],
    )
    def test_separate_optimizers_are_accepted(self, tx):
        Optimizer(tx, make_plan(values({"kernel": (8, 8), "scale": (8,)}), submesh("1x8"), units=BLOCKS))
