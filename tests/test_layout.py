"""Where every parameter lives: which dim is cut and why, what is stored; start values ignore the mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.precision import MixedPrecision
from jfsdp.stack import Stack
from tests.support import bitwise_equal, submesh

STACKED = UnitOptions(stacked=True)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def one(dims, mesh="1x8", strategy="FULL_SHARD", options=UnitOptions()):
    """The layout of a single parameter `unit.w`."""
    plan = make_plan({"unit": {"w": shape(*dims)}}, submesh(mesh), strategy=strategy, units={"unit": options})
    return plan.leaves[0]


# ------------------------------------------------------------ which dim


@pytest.mark.parametrize(
    ("dims", "dim", "padded", "reason"),
    [
        ((16, 24), 0, 16, "dim 0 divides"),
        ((13, 8), 1, 8, "first dim that divides"),
        ((13, 8, 16), 1, 8, "first dim that divides"),
        ((496, 3), 0, 496, "dim 0 divides"),
        ((13, 5), 0, 16, "none divides, least padding, 13 -> 16"),
        ((5, 15), 1, 16, "none divides, least padding, 15 -> 16"),
        ((9, 9), 0, 16, "none divides, least padding, 9 -> 16"),  # a tie goes to the first
        ((7, 6), 0, 8, "none divides, least padding, 7 -> 8"),
        ((8,), 0, 8, "dim 0 divides"),
        ((2, 4), 1, 8, "none divides, least padding, 4 -> 8"),  # eight elements: one for each shard
        ((7,), None, 0, "7 elements for 8 shards"),
        ((1, 7), None, 0, "7 elements for 8 shards"),
        ((), None, 0, "1 elements for 8 shards"),
        ((0,), None, 0, "0 elements for 8 shards"),
        ((16, 0), None, 0, "0 elements for 8 shards"),
    ],
    ids=str,
)
def test_the_dim_that_is_cut_on_eight_shards(dims, dim, padded, reason):
    leaf = one(dims)
    assert (leaf.dim, leaf.padded, leaf.reason) == (dim, padded, reason)


def test_shards_of_a_parameter_cover_its_padded_shape():
    leaf = one((13, 5))
    assert (leaf.shape, leaf.padded_shape, leaf.shard_shape) == ((13, 5), (16, 5), (2, 5))
    assert leaf.rest_shape == (16, 5)
    assert leaf.logical_shape == (13, 5)
    assert leaf.size == 13 * 5  # padding is not counted


@pytest.mark.parametrize(
    ("mesh", "strategy", "spec", "shards"),
    [
        ("1x8", "FULL_SHARD", PartitionSpec("shard"), 8),
        ("8x1", "FULL_SHARD", PartitionSpec("replica"), 8),
        ("2x4", "FULL_SHARD", PartitionSpec(("replica", "shard")), 8),
        ("2x4", "HYBRID_SHARD", PartitionSpec("shard"), 4),
        ("2x4", "NO_SHARD", PartitionSpec(), 1),
    ],
)
def test_specs_follow_the_axes_of_the_strategy(mesh, strategy, spec, shards):
    leaf = one((16, 3), mesh, strategy)
    assert leaf.shard_spec == leaf.rest_spec == spec
    assert leaf.shard_shape == (16 // shards, 3)


def test_whole_parameters_at_rest_have_cut_gradients_and_no_padding():
    leaf = one((13, 5), strategy="SHARD_OPT")
    assert (leaf.rest_spec, leaf.rest_shape) == (PartitionSpec(), (13, 5))
    assert (leaf.shard_spec, leaf.shard_shape) == (PartitionSpec("shard"), (2, 5))
    assert one((13, 5), strategy="NO_SHARD").reason == "strategy keeps copies"


def test_the_layers_of_a_stack_are_never_cut():
    leaf = one((8, 13, 16), options=STACKED)
    assert (leaf.layers, leaf.shape, leaf.dim, leaf.stacked_dim) == (8, (13, 16), 1, 2)
    assert leaf.shard_spec == PartitionSpec(None, None, "shard")
    assert leaf.rest_shape == leaf.logical_shape == (8, 13, 16)
    assert leaf.size == 8 * 13 * 16
    vector = one((8, 4), options=STACKED)  # four elements a layer
    assert (vector.dim, vector.stacked_dim, vector.reason) == (None, None, "4 elements for 8 shards")
    padded = one((3, 13, 5), options=STACKED)
    assert (padded.rest_shape, padded.logical_shape, padded.shard_shape) == ((3, 16, 5), (3, 13, 5), (2, 5))


def test_a_cut_dim_that_is_asked_for_wins():
    leaf = one((16, 24), options=UnitOptions(cut_dim=-1))
    assert (leaf.dim, leaf.reason) == (1, "asked for")
    leaf = one((16, 13), options=UnitOptions(cut_dim=1))
    assert (leaf.dim, leaf.padded, leaf.reason) == (1, 16, "asked for, 13 -> 16")
    assert one((2, 3), options=UnitOptions(cut_dim=1)).dim is None  # six elements stay whole all the same


def test_the_precision_of_a_unit_overrides_that_of_the_plan():
    units = {"a": UnitOptions(precision=MixedPrecision(param_dtype="float32")), "b": UnitOptions()}
    params = {"a": shape(8), "b": shape(8)}
    plan = make_plan(params, submesh("1x8"), units=units, precision=MixedPrecision(param_dtype="bf16"))
    assert [leaf.param_dtype.name for leaf in plan.leaves] == ["float32", "bfloat16"]
    assert [leaf.reduce_dtype.name for leaf in plan.leaves] == ["float32", "float32"]


# ------------------------------------------------------------ units and paths


def test_the_longest_prefix_names_the_unit_and_the_rest_is_the_root():
    params = {"blocks": {"mlp": {"up": shape(2, 8)}, "mlp2": shape(2, 8)}, "norm": [shape(8), shape(8)]}
    plan = make_plan(
        params, submesh("1x8"), units={"blocks": STACKED, "blocks.mlp": STACKED, "norm.1": UnitOptions()}
    )
    assert {leaf.path: leaf.unit for leaf in plan.leaves} == {
        "blocks.mlp.up": "blocks.mlp",
        "blocks.mlp2": "blocks",
        "norm.0": "",
        "norm.1": "norm.1",
    }
    assert plan.num_params == 48


def test_a_unit_that_matches_nothing_is_refused():
    message = r"unit 'block' matches no parameter. Parameters start with: \['blocks', 'norm'\]"
    with pytest.raises(ValueError, match=message):
        make_plan({"blocks": shape(2, 8), "norm": shape(8)}, submesh("1x8"), units={"block": STACKED})


def test_parameters_that_cannot_be_laid_out_are_refused():
    mesh = submesh("1x8")
    with pytest.raises(TypeError, match="a.count: dtype int32 cannot be trained. Freeze it, or keep integer state out"):
        make_plan({"a": {"count": shape(8, dtype=jnp.int32)}}, mesh)
    with pytest.raises(ValueError, match=r"a: unit 'a' is stacked, so every leaf needs a leading layer dim"):
        make_plan({"a": shape()}, mesh, units={"a": STACKED})
    with pytest.raises(ValueError, match=r"a: cut_dim 2 is not a dim of shape \(8, 8\)"):
        make_plan({"a": shape(8, 8)}, mesh, units={"a": UnitOptions(cut_dim=2)})
    with pytest.raises(ValueError, match=r"a.w has 2 layers and a.v has 3; .* Give 'a.w' a unit of its own"):
        make_plan({"a": {"v": shape(3, 8), "w": shape(2, 8)}}, mesh, units={"a": STACKED})


# ------------------------------------------------------------ putting arrays on the mesh


def test_place_pads_shards_and_copies():
    plan = make_plan({"w": shape(13, 5), "b": shape(5)}, submesh("1x8"))
    logical = {"w": jnp.arange(65.0).reshape(13, 5), "b": jnp.arange(5.0)}
    placed = plan.place(logical)
    stored = np.asarray(placed["w"])
    assert stored.shape == (16, 5)
    assert not stored[13:].any()
    assert [s.data.shape for s in placed["w"].addressable_shards] == [(2, 5)] * 8
    assert [s.data.shape for s in placed["b"].addressable_shards] == [(5,)] * 8
    assert bitwise_equal(plan.unpad(placed), logical)
    for w in jax.tree.leaves(placed):
        w.delete()  # as a donated step would
    assert float(logical["b"].sum()) == 10.0
    assert float(logical["w"].sum()) == 64 * 65 / 2


def test_place_refuses_another_shape():
    plan = make_plan({"blocks": {"w": shape(3, 13, 5)}}, submesh("1x8"), units={"blocks": STACKED})
    with pytest.raises(
        ValueError, match=r"blocks.w: got shape \(2, 13, 5\), the plan was made for \(3, 13, 5\)"
    ):
        plan.place({"blocks": {"w": np.zeros((2, 13, 5), np.float32)}})


def init(key):
    """Normal start values in the shapes of C-31, and a stack."""
    keys = iter(jax.random.split(key, 6))
    draw = lambda *dims: jax.random.normal(next(keys), dims)  # noqa: E731
    return {
        "even": draw(16, 24),
        "tall": draw(496, 3),
        "uneven": draw(13, 8),
        "odd": draw(13, 5),
        "blocks": draw(3, 9, 7),
    }


@functools.cache
def start_values(mesh):
    key = jax.random.key(0)
    plan = make_plan(jax.eval_shape(init, key), submesh(mesh), units={"blocks": STACKED})
    return plan.unpad(plan.create(init, key))


@pytest.mark.parametrize("mesh", ["1x2", "1x8", "2x4", "8x1"])
def test_start_values_do_not_depend_on_the_mesh(mesh):
    """C-31."""
    assert bitwise_equal(start_values(mesh), start_values("1x1"))
    assert start_values(mesh)["even"].std() > 0.9


def test_parameters_are_created_sharded():
    """C-32: eight units of P/8 bytes; while they are made and afterwards no device holds the model."""
    units, unit = 8, 128 * 256 * 4

    def init(key):
        linear = functools.partial(nnx.Linear, 128, 256, use_bias=False)
        stack = Stack(lambda rngs: linear(rngs=rngs), units, rngs=nnx.Rngs(key))
        return {"blocks": stack.each.kernel[...]}

    key = jax.random.key(0)
    plan = make_plan(jax.eval_shape(init, key), submesh("1x8"), units={"blocks": STACKED})
    start = jax.jit(lambda key: plan.pad(init(key)), out_shardings=plan.rest_shardings)
    memory = audit.memory(start.lower(key).compile())
    whole = units * unit
    assert memory.output == whole // 8
    assert memory.output + memory.temp <= 1.1 * (whole // 8 + unit)
    before = {id(a) for a in jax.live_arrays()}
    params = plan.create(init, key)
    made = [a for a in jax.live_arrays() if id(a) not in before]
    assert any(a is params["blocks"] for a in made)
    assert {s.data.shape for s in params["blocks"].addressable_shards} == {(units, 128 // 8, 256)}
    assert max(s.data.nbytes for a in made for s in a.addressable_shards) == whole // 8
