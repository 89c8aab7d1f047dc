"""Sharding strategies: what is cut at rest, over which mesh axes, and when gathered weights are freed.

One table, `_TABLE`, holds the meaning of every name; everything else in the library reads the `Placement`
that `resolve` makes of a name and a mesh and never asks for the name again.

Note [Which axes]
Plain strategies (FULL_SHARD, SHARD_GRAD_OP, SHARD_OPT) cut over every device of the mesh; HYBRID_* cut over
`shard` and keep copies over `replica`. An axis of size 1 is left out of the collectives, so a 1x8 program
names only `shard`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jax.sharding import Mesh

from jfsdp.mesh import REPLICA, SHARD, axis_size


class ShardingStrategy(enum.Enum):
    """What is sharded, in PyTorch FSDP's words (ZeRO stage in brackets)."""

    FULL_SHARD = "FULL_SHARD"  # parameters, gradients, optimizer; freed after forward (ZeRO-3)
    SHARD_GRAD_OP = "SHARD_GRAD_OP"  # the same at rest; kept from forward to backward (ZeRO-2)
    SHARD_OPT = "SHARD_OPT"  # parameters whole, gradients and optimizer sharded (ZeRO-1)
    NO_SHARD = "NO_SHARD"  # everything whole on every device (DDP)
    HYBRID_SHARD = "HYBRID_SHARD"  # FULL_SHARD inside `shard`, copies over `replica`
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"  # SHARD_GRAD_OP inside `shard`, copies over `replica`


@dataclass(frozen=True)
class Placement:
    """A strategy on a mesh: everything that the engine needs to know of it."""

    strategy: ShardingStrategy
    shard_axes: tuple[str, ...]
    """Mesh axes that cut gradients and optimizer states (and parameters, unless `whole_at_rest`)."""
    replica_axes: tuple[str, ...]
    """Mesh axes that hold copies; reduced shards are all-reduced over them."""
    shards: int
    """Devices along `shard_axes`: pieces per parameter; 1 where nothing is cut."""
    replicas: int
    whole_at_rest: bool
    """Parameters stay whole between steps (SHARD_OPT, NO_SHARD)."""
    reshard_after_forward: bool
    """Gathered weights are freed after forward and gathered again for backward."""
    regather: int | None = None
    """After forward a device keeps 1/regather of the weights instead of 1/shards, and backward gathers inside groups of
    so many neighbours (hpZ of ZeRO++); None gathers over all shards again."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which the batch is split, outermost first."""
        return tuple(a for a in (REPLICA, SHARD) if a in self.shard_axes + self.replica_axes)


_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)
#                                       cut over both | shard | nothing, whole at rest, reshard after forward
_TABLE = {
    ShardingStrategy.FULL_SHARD: ("both", False, True),
    ShardingStrategy.SHARD_GRAD_OP: ("both", False, False),
    ShardingStrategy.SHARD_OPT: ("both", True, False),
    ShardingStrategy.NO_SHARD: ("nothing", True, False),
    ShardingStrategy.HYBRID_SHARD: ("shard", False, True),
    ShardingStrategy.HYBRID_SHARD_ZERO2: ("shard", False, False),
}
_ALIASES = {"_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2"}  # PyTorch's spelling


def parse_strategy(name: str | ShardingStrategy | None, mesh: Mesh) -> ShardingStrategy:
    """The strategy called `name`; None is FULL_SHARD on one replica and HYBRID_SHARD on several.

    Raises: ValueError for an unknown name, listing the known ones, and for HYBRID_* on one replica.
    """
    replicas = mesh.shape[REPLICA]
    if name is None:
        return ShardingStrategy.HYBRID_SHARD if replicas > 1 else ShardingStrategy.FULL_SHARD
    known = [s.value for s in ShardingStrategy]
    if not isinstance(name, ShardingStrategy):
        text = _ALIASES.get(name, name)
        if text not in known:
            raise ValueError(f"strategy {name!r} is unknown. Use one of {', '.join(known)}.")
        name = ShardingStrategy(text)
    if name in _HYBRID and replicas == 1:
        plain = "FULL_SHARD" if name is ShardingStrategy.HYBRID_SHARD else "SHARD_GRAD_OP"
        raise ValueError(
            f"{name.value} keeps copies over `replica`, and mesh 1x{mesh.shape[SHARD]} has one replica. "
            f"Use {plain}, or a mesh with 2 or more replicas such as 2x{max(1, mesh.shape[SHARD] // 2)}."
        )
    return name


def resolve(
    name: str | ShardingStrategy | None, mesh: Mesh, reshard_after_forward: bool | int | None = None
) -> Placement:
    """Make the `Placement` of a strategy on a mesh. See Note [Which axes].

    reshard_after_forward: overrides what the strategy says: True frees after forward, False keeps until backward, a
        number k keeps 1/k and gathers it again inside groups of k devices (ZeRO++ hpZ).
    Raises: ValueError for a number that does not divide the shards, or where nothing is sharded at rest.
    """
    strategy = parse_strategy(name, mesh)
    cut, whole, reshard = _TABLE[strategy]
    used = tuple(a for a in (REPLICA, SHARD) if mesh.shape[a] > 1) or (SHARD,)
    shard_axes = {"both": used, "shard": (SHARD,), "nothing": ()}[cut]
    replica_axes = tuple(a for a in used if a not in shard_axes)
    shards = axis_size(mesh, shard_axes)
    reshard, regather = _after_forward(reshard_after_forward, reshard, whole, strategy, shards)
    return Placement(
        strategy=strategy,
        shard_axes=shard_axes,
        replica_axes=replica_axes,
        shards=shards,
        replicas=axis_size(mesh, replica_axes),
        whole_at_rest=whole,
        reshard_after_forward=reshard,
        regather=regather,
    )


def _after_forward(
    asked: bool | int | None, default: bool, whole: bool, strategy: ShardingStrategy, shards: int
) -> tuple[bool, int | None]:
    """Whether weights are freed after forward, and the size of the groups that gather them again."""
    if asked is None:
        return default, None
    if not isinstance(asked, int):
        raise TypeError(f"reshard_after_forward is {asked!r}; use True, False, or a number of devices.")
    if asked is False or whole:
        if asked:
            raise ValueError(
                f"reshard_after_forward is {asked} under {strategy.value}, which keeps parameters whole: there is "
                "nothing to free. Use FULL_SHARD, or leave it out."
            )
        return False, None
    if asked is True or asked == shards:
        return True, None
    if asked < 1 or shards % asked:
        raise ValueError(
            f"reshard_after_forward is {asked}, which does not divide {shards} shards. Use one of "
            f"{[k for k in range(1, shards + 1) if shards % k == 0]}, True or False."
        )
    return (False, None) if asked == 1 else (True, asked)
