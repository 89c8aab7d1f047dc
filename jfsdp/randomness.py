"""Random numbers that belong to an example and not to a device.

Owns the key of every example of the batch that a loss is computing with, so that a mask drawn for it is the same on
every mesh and with any number of micro-batches, and no two examples share one. `step.py` says which examples these
are; `wrap.py` makes Flax's dropout draw from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Examples(NamedTuple):
    """The rows of the batch that one device computes with."""

    key: Array
    """The step's random key, the same on every device."""
    first: Array
    """Index of the first row in the global batch."""
    rows: int


_CURRENT: ContextVar[Examples | None] = ContextVar("examples", default=None)


@contextmanager
def examples(key: Array, first: Array, rows: int) -> Iterator[None]:
    """Say which rows of the global batch are computed with; the step does, around every loss."""
    token = _CURRENT.set(Examples(key, first, rows))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Examples | None:
    """The rows that a loss computes with; None outside the step."""
    return _CURRENT.get()


def example_keys(key: Array | None = None) -> Array:
    """A random key for each of this device's rows: `[rows]`, the same for an example on every mesh.

    key: names the place where they are used (a layer, a branch), and must be the same on every device; None takes the
        step's key. The `key` that a loss is given is the device's own and would make the numbers depend on the mesh.
    Raises: RuntimeError outside a step.
    """
    here = current()
    if here is None:
        raise RuntimeError("example_keys() follows the rows of a batch, so it works inside a loss only.")
    ids = here.first + jnp.arange(here.rows)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(here.key if key is None else key, ids)
