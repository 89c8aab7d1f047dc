"""Offload: what lies in pinned host memory instead of a device's, and when it comes and goes.

Owns the policy, the moves between the two memories inside a compiled step, and the check that this JAX, platform and
set of options computes the same with offload as without. Which array lies where is a sharding's memory kind, given by
`layout.py` for parameters and by `optim.py` for the optimizer's state.

Note [When arrays come and go]
Stacked parameters come to the device one layer at a time, each just before it is gathered; other parameters when the
loss begins. Gradients, once finished, go to the host; the optimizer's state comes when it is used, after the backward
pass, and goes back with the updated parameters. Everything crosses as shards: over S shards, 1/S of the bytes.

Note [The check at the start]
Some versions of XLA computed wrong gradients with offload and said nothing (openxla/xla#46231: slices of offloaded
residuals read in the wrong order by the backward loop). So the first step of a run with offload trains two layers of
the same model, on the same devices and with the same options, with and without, and refuses to go on when they differ.
The verdict is kept in `~/.cache/jfsdp/offload.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

Space = jax.memory.Space

HOST = "pinned_host"
"""JAX's name of the memory kind."""


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """What lies in pinned host memory; nothing by default."""

    params: bool = False
    """Parameters (and their average, if the state keeps one) between steps."""
    gradients: bool = False
    """Finished gradient shards, until the optimizer reads them."""
    opt_state: bool = False
    """Arrays of the optimizer's state that are shaped like parameters."""
    step_on: str = "device"
    """Where the optimizer computes: "device", or "host", which then needs all three on the host."""

    def __post_init__(self):
        if self.step_on not in ("device", "host"):
            raise ValueError(f"step_on is {self.step_on!r}. Use device or host.")
        if self.step_on == "host" and not (self.params and self.gradients and self.opt_state):
            raise ValueError(
                "step_on is 'host', but not all that the optimizer reads and writes lies there. "
                "Set params, gradients and opt_state, or use CPUOffloadPolicy()."
            )

    def __bool__(self) -> bool:
        return self.params or self.gradients or self.opt_state


BLOCK_INPUT = "block_input"
"""The name that a block's input has for `OffloadActivations`."""


@dataclass(frozen=True, kw_only=True)
class OffloadActivations:
    """Activation checkpointing that keeps what it saves on the host: given as `remat` to a `Stack` or a unit."""

    names: tuple[str, ...] = (BLOCK_INPUT,)
    """What waits on the host for the backward pass: names of `jax.ad_checkpoint.checkpoint_name`, `BLOCK_INPUT`."""
    saved: tuple[str, ...] = ()
    """Names of what waits on the device. All else is computed again."""

    def applied_to(self, block: Callable) -> Callable:
        """`block(weights, x, ...)` with its activations saved so."""
        policies = jax.checkpoint_policies
        if _suspended.get():
            policy = policies.save_only_these_names(*self.saved, *self.names)
        else:
            _seen.get().append(self)
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=self.saved,
                names_which_can_be_offloaded=self.names,
                offload_src="device",
                offload_dst=HOST,
            )

        def named(weights, x, *others):
            return block(weights, jax.tree.map(lambda a: checkpoint_name(a, BLOCK_INPUT), x), *others)

        return jax.checkpoint(named, policy=policy, prevent_cse=False)


def CPUOffloadPolicy() -> OffloadPolicy:  # noqa: N802 - PyTorch's spelling
    """PyTorch's: parameters, gradients and optimizer state on the host, and the optimizer computes there."""
    return OffloadPolicy(params=True, gradients=True, opt_state=True, step_on="host")


POLICIES = {"none": OffloadPolicy(), "optimizer": OffloadPolicy(opt_state=True), "all": CPUOffloadPolicy()}
"""By their names on the command line."""


class HostUpdated:
    """A jitted step of `(state, batch)` that donates the state without what the host updates.

    The host would have to copy its results into the memory of their arguments, and XLA for GPUs compiles no copy within
    the host's memory (JAX 0.10.2 and 0.12.0.1). So the old arrays are there until the step is over.
    """

    def __init__(self, step: Callable, batch_sharding: Any, how: dict[str, Any]):
        def _step(state, on_host, batch):  # by this name compilations are counted
            return step(replace(state, **on_host), batch)

        self._jitted = jax.jit(_step, in_shardings=(None, None, batch_sharding), **how)

    def __call__(self, state: Any, batch):
        return self._jitted(*self._parts(state), batch)

    def lower(self, state: Any, batch):
        return self._jitted.lower(*self._parts(state), batch)

    def trace(self, state: Any, batch):
        return self._jitted.trace(*self._parts(state), batch)

    @staticmethod
    def _parts(state: Any) -> tuple[Any, dict[str, Any]]:
        on_host = {"params": state.params, "opt_state": state.opt_state}
        return replace(state, **dict.fromkeys(on_host)), on_host


def to_device(tree):
    """Bring what lies on the host to the device; nothing moves that is there. Call inside `jit`."""
    return jax.tree.map(lambda a: jax.device_put(a, Space.Device) if is_on_host(a) else a, tree)


def to_host(tree):
    """Send everything to the host. Call inside `jit`."""
    return jax.tree.map(lambda a: a if is_on_host(a) else jax.device_put(a, Space.Host), tree)


def fetched(tree):
    """Global arrays on the device, for use outside `jit`."""

    def one(a):
        on_host = isinstance(a, jax.Array) and a.sharding.memory_kind == HOST
        return jax.device_put(a, a.sharding.with_memory_kind("device")) if on_host else a

    return jax.tree.map(one, tree)


def computed_on_host(fn: Callable) -> Callable:
    """`fn` computed by the host, arguments and results in its memory. Call inside `jit`."""
    from jax.experimental import compute_on

    # JAX 0.10 calls it `compute_on2`, beside an older `compute_on` that takes other arguments.
    on = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return lambda *args: on(fn, compute_type="device_host", out_memory_spaces=Space.Host)(*to_host(args))


_suspended: ContextVar[bool] = ContextVar("suspended", default=False)
_seen: ContextVar[list] = ContextVar("seen", default=[])  # noqa: B039 - what is added outside `seen()` is never read


@contextmanager
def suspended() -> Iterator[None]:
    """Activations stay on the device in what is traced here."""
    token = _suspended.set(True)
    try:
        yield
    finally:
        _suspended.reset(token)


@contextmanager
def seen() -> Iterator[list[OffloadActivations]]:
    """Collects what is asked to offload activations in what is traced here."""
    token = _seen.set([])
    try:
        yield _seen.get()
    finally:
        _seen.reset(token)


def is_on_host(a) -> bool:
    return jax.typeof(a).memory_space == Space.Host
