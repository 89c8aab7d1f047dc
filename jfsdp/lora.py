"""LoRA: a frozen matrix and a small trained correction beside it.

Owns how adapters get into any Flax NNX model, which parameters are then trained, and how they are merged or written
as a PEFT adapter. A frozen base is sharded and gathered like everything else, but never reduced, and has no optimizer
state: `init_sharded(lambda: add_lora(make_model(), ...), mesh=mesh, trainable=nnx.LoRAParam)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jfsdp.stack import Stack

BASE = "base"
ADAPTERS = ("lora_a", "lora_b")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Which matrices get an adapter, and how large it is."""

    rank: int = 8
    """Inner width of an adapter."""
    alpha: float = 16.0
    """The correction is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q", "v")
    """Names of the layers that are adapted, by the end of their path: `q`, `attn.q`, `mlp.down`; `all` is every one."""

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora rank is {self.rank}; use 1 or more.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha is {self.alpha}; use a number above 0, such as twice the rank.")
        if not self.targets:
            raise ValueError("lora has no targets. Name layers such as q and v, or all.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def parse_lora(text: str) -> LoraOptions:
    """`rank,alpha,target+target`: `8`, `8,16` or `8,16,q+v`.

    Raises: ValueError for anything else.
    """
    rank, *rest = text.split(",")
    try:
        options = {"rank": int(rank)}
        if rest:
            options["alpha"] = float(rest[0])
        if len(rest) > 1:
            options["targets"] = tuple(name for part in rest[1:] for name in part.split("+"))
    except ValueError as error:
        raise ValueError(f"lora {text!r} is not understood. Write rank,alpha,targets such as 8,16,q+v.") from error
    return LoraOptions(**{"alpha": 2.0 * options["rank"], **options})


class Adapted(nnx.Module):
    """A linear layer with its adapter: `base(x) + x @ lora_a @ lora_b * scale`.

    layers: L where the layer belongs to a `Stack`, whose parameters are `[L, ...]`.
    """

    def __init__(self, base: nnx.Module, options: LoraOptions, *, layers: int | None, rngs: nnx.Rngs):
        setattr(self, BASE, base)
        self.scale = options.scale
        stack = () if layers is None else (layers,)
        d_in, d_out = base.kernel.shape[-2:]
        # As PEFT starts them: uniform within the root of 1 / d_in, and zeros, so that nothing changes at first.
        bound, shape = d_in**-0.5, (*stack, d_in, options.rank)
        self.lora_a = nnx.LoRAParam(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
        self.lora_b = nnx.LoRAParam(jnp.zeros((*stack, options.rank, d_out), jnp.float32))

    def __call__(self, x: Array) -> Array:
        a, b = self.lora_a[...], self.lora_b[...]
        h = x.reshape(-1, x.shape[-1]).astype(a.dtype)
        y = self.base(x)
        return y + ((h @ a @ b) * self.scale).reshape(y.shape).astype(y.dtype)


def add_lora(
    model: nnx.Module, options: LoraOptions, *, rngs: nnx.Rngs, base_dtype: DTypeLike | None = None
) -> nnx.Module:
    """Put adapters beside the targeted matrices of a model, in place; gives the model.

    A matrix is a module with a two-dimensional `kernel`, such as `nnx.Linear`.

    base_dtype: stores what is not trained in this dtype, for instance the one it computes in; None leaves it.
    Raises: ValueError for a target that no matrix's path ends with.
    """
    if base_dtype is not None:
        cast = jax.tree.map(lambda w: w.astype(base_dtype), nnx.state(model, nnx.Param))
        nnx.update(model, cast)
    stacks = {id(m.each): m.num_layers for _, m in nnx.iter_modules(model) if isinstance(m, Stack)}
    layers_of: dict[int, int] = {}
    for _, module in list(nnx.iter_modules(model)):
        if id(module) in stacks:
            layers_of.update({id(inner): stacks[id(module)] for _, inner in nnx.iter_modules(module)})
    found, matched = [], set()
    for path, parent in list(nnx.iter_modules(model)):
        for name, child in list(vars(parent).items()):
            layers = layers_of.get(id(parent))
            if not _is_matrix(child, layers):
                continue
            where = ".".join(map(str, (*path, name)))
            found.append(where)
            hits = [t for t in options.targets if t == "all" or where == t or where.endswith("." + t)]
            matched.update(hits)
            if hits:
                setattr(parent, name, Adapted(child, options, layers=layers, rngs=rngs))
    if lost := [t for t in options.targets if t not in matched]:
        known = sorted({where.rpartition(".")[2] for where in found})
        raise ValueError(f"lora: no layer is called {', '.join(lost)}. Use some of {', '.join(known)}, or all.")
    return model


def merge(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, *, scale: float) -> np.ndarray:
    """The matrix that computes what matrix and adapter compute together, `[d_in, d_out]`; summed in fp32."""
    wide = np.result_type(np.float32, a.dtype)
    return (kernel.astype(wide) + (a.astype(wide) @ b.astype(wide)) * wide.type(scale)).astype(kernel.dtype)


def _is_matrix(module, layers: int | None) -> bool:
    kernel = getattr(module, "kernel", None)
    return isinstance(module, nnx.Module) and isinstance(kernel, nnx.Param) and kernel.ndim == 2 + (layers is not None)
