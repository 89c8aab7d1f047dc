"""What each strategy cuts, over which axes, and when it frees: one table, read by everything else."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jfsdp.layout import make_plan
from jfsdp.strategy import ShardingStrategy, parse_strategy, resolve
from tests.support import submesh

BOTH, SHARD, REPLICA = ("replica", "shard"), ("shard",), ("replica",)


TABLE = [  # strategy, mesh, axes that cut, axes that copy, whole at rest, freed after forward
    ("FULL_SHARD", "1x8", SHARD, (), False, True),
    ("FULL_SHARD", "2x4", BOTH, (), False, True),
    ("FULL_SHARD", "8x1", REPLICA, (), False, True),
    ("FULL_SHARD", "1x1", SHARD, (), False, True),
    ("SHARD_GRAD_OP", "1x8", SHARD, (), False, False),
    ("SHARD_GRAD_OP", "2x4", BOTH, (), False, False),
    ("SHARD_OPT", "2x4", BOTH, (), True, False),
    ("NO_SHARD", "1x8", (), SHARD, True, False),
    ("NO_SHARD", "2x4", (), BOTH, True, False),
    ("HYBRID_SHARD", "2x4", SHARD, REPLICA, False, True),
    ("HYBRID_SHARD", "8x1", SHARD, REPLICA, False, True),
    ("HYBRID_SHARD_ZERO2", "2x4", SHARD, REPLICA, False, False),
]


@pytest.mark.parametrize(
    ("strategy", "mesh", "shard_axes", "replica_axes", "whole_at_rest", "reshards"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in TABLE],
)
def test_the_table(strategy, mesh, shard_axes, replica_axes, whole_at_rest, reshards):
    mesh = submesh(mesh)
    got = resolve(strategy, mesh)
    assert got.strategy is ShardingStrategy[strategy]
    assert (got.shard_axes, got.replica_axes) == (shard_axes, replica_axes)
    assert (got.whole_at_rest, got.reshard_after_forward) == (whole_at_rest, reshards)
    assert got.shards == np.prod([mesh.shape[a] for a in shard_axes])
    assert got.replicas == np.prod([mesh.shape[a] for a in replica_axes])
    assert got.shards * got.replicas == mesh.size  # every device takes its part of the batch
    assert got.data_axes == tuple(a for a in BOTH if a in shard_axes + replica_axes)


def test_the_default_follows_the_mesh():
    assert resolve(None, submesh("1x8")).strategy is ShardingStrategy.FULL_SHARD
    assert resolve(None, submesh("2x4")).strategy is ShardingStrategy.HYBRID_SHARD
    assert make_plan({}, submesh("4x2")).placement.strategy is ShardingStrategy.HYBRID_SHARD


@pytest.mark.parametrize(
    "name", ["HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", ShardingStrategy.HYBRID_SHARD_ZERO2]
)
def test_names_and_pytorch_spelling_and_members_are_accepted(name):
    assert parse_strategy(name, submesh("2x4")) is ShardingStrategy.HYBRID_SHARD_ZERO2


@pytest.mark.parametrize("name", ["full_shrad", "FULL-SHARD", "hybrid", "full_shard", ""])
def test_unknown_names_are_refused_with_the_known_ones(name):
    """C-65, the library's part: nothing is guessed from a near miss."""
    known = "FULL_SHARD, SHARD_GRAD_OP, SHARD_OPT, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"
    with pytest.raises(ValueError, match=f"strategy '{name}' is unknown. Use one of {known}."):
        resolve(name, submesh("1x8"))


@pytest.mark.parametrize(
    ("name", "plain"), [("HYBRID_SHARD", "FULL_SHARD"), ("_HYBRID_SHARD_ZERO2", "SHARD_GRAD_OP")]
)
def test_hybrid_on_one_replica_is_refused_and_the_plain_twin_works(name, plain):
    message = f"mesh 1x8 has one replica. Use {plain}, or a mesh with 2 or more replicas such as 2x4"
    with pytest.raises(ValueError, match=message):
        resolve(name, submesh("1x8"))
    hybrid, twin = resolve(name, submesh("2x4")), resolve(plain, submesh("1x8"))
    assert hybrid.reshard_after_forward == twin.reshard_after_forward


def test_axes_of_the_model_are_left_alone():
    mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("replica", "shard", "tensor"))
    got = resolve("FULL_SHARD", mesh)
    assert (got.shard_axes, got.replica_axes, got.shards) == (SHARD, (), 4)
