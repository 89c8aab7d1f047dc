"""A model whose blocks run in a Python loop, large enough for a GPU's schedule to matter; compiled only."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jfsdp.order import Prefetch
from jfsdp.precision import MixedPrecision
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.wrap import fully_shard, plan_of

WIDTH, ROWS = 4096, 4096


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, layers):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def ahead(mesh, layers: int = 6, limit: int = 2, forward=None, backward=None, remat: str = "none"):
    """The step of a model of `layers` blocks, each a unit, and its arguments."""
    model = nnx.eval_shape(lambda: Model(layers))
    for block in model.blocks:
        fully_shard(block, remat=remat)
    prefetch = Prefetch(limit=limit, forward=forward or {}, backward=backward or {})
    precision = MixedPrecision(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    plan = plan_of(fully_shard(model, mesh=mesh, prefetch=prefetch, mp_policy=precision))

    def loss(model, x, key):
        return (model(x).astype(jnp.float32) ** 2).mean()

    tx = optax.adamw(1e-3)
    batch = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.bfloat16, sharding=plan.batch_sharding)
    return train_step(loss, tx, plan, nonfinite="ignore").jitted, (TrainState.abstract(tx, plan), batch)
