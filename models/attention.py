"""Causal self-attention inside documents, and the choice between three ways to compute it.

Owns the mask rule (a token sees itself and what comes before it in its own document) and which
implementation runs where. Knows nothing of weights or positions: `llama.py` makes queries, keys and values.

Dims: `B T` batch and tokens, `H K` query and key/value heads, `h` head width, `C` queries in a chunk.

Note [Documents]
Rows are packed: several documents lie behind each other, numbered from 1 by `segments`, and 0 is padding.
One array says all that attention and positions need, the index where each token's document starts: token t
sees keys `starts[t]..t`, and its position is `t - starts[t]`. Padding starts at itself, so it sees itself
alone and no softmax is ever empty. A document is an unbroken run: the same number further on is another one.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "chunked")


def attention(
    q: Array, k: Array, v: Array, starts: Array | None, *, implementation: str = "auto", chunk: int = 256
) -> Array:
    """Attend within documents: `q [B, T, H, h]`, `k` and `v [B, T, K, h]` -> `[B, T, H, h]`; K divides H.

    Scores and softmax are fp32, probabilities and result have the dtype of `v`.

    starts: `[B, T]` from `document_starts`; None means that a row is one document.
    implementation: "xla" forms all scores at once; "chunked" those of `chunk` queries at a time, and again
        in the backward pass; "cudnn" none, but documents cost it two `[B, T, T]` of q's dtype; "auto" is one
        of these, see `resolve`.
    """
    B, T, H, h = q.shape
    index = jnp.arange(T, dtype=jnp.int32)[None]
    if implementation == "auto":
        gpu = cuda_capability()
        implementation = resolve(tokens=T, chunk=chunk, head_dim=h, dtype=q.dtype, capability=gpu)
    if implementation == "cudnn":
        mask = None if starts is None else index[:, None, None, :] >= starts[:, None, :, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
    q = q.reshape(B, T, k.shape[2], -1, h)
    starts = jnp.zeros_like(index) if starts is None else starts
    if implementation == "xla":
        return _attend(q, k, v, starts, index).reshape(B, T, H, h)
    assert implementation == "chunked", f"{implementation} is not one of {IMPLEMENTATIONS}"

    C = min(chunk, T)
    padding = -T % C

    def split(a):  # [B, T, ...] -> [T/C, B, C, ...]; queries that pad the last chunk are dropped below
        a = jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(a.shape[0], -1, C, *a.shape[2:]), 1, 0)

    one = jax.checkpoint(lambda part: _attend(part[0], k, v, *part[1:]), prevent_cse=False)
    out = lax.map(one, (split(q), split(starts), split(index)))
    return jnp.moveaxis(out, 0, 1).reshape(B, T + padding, H, h)[:, :T]


def attend_cached(
    q: Array, k: Array, v: Array, cache: tuple[Array, Array], starts: Array, offset: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Attend from tokens at `offset..` to all up to themselves, keys and values of earlier ones being in `cache`.

    `q [B, T, H, h]`, `k` and `v [B, T, K, h]`, cache `[B, S, K, h]` each -> `[B, T, H, h]` and the cache with k and v.
    starts: `[B, T]`, the first token that each one sees.
    """
    B, T, H, h = q.shape
    keys, values = (
        lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), offset, axis=1) for old, new in zip(cache, (k, v))
    )
    index = offset + jnp.arange(T, dtype=jnp.int32)[None]
    out = _attend(q.reshape(B, T, k.shape[2], -1, h), keys, values, starts, index)
    return out.reshape(B, T, H, h), (keys, values)


def _attend(q: Array, k: Array, v: Array, starts: Array, index: Array) -> Array:
    """One chunk of queries against all keys: `q [B, C, K, H/K, h]`, `starts` and `index [B or 1, C]`."""
    # Dims in the order in which the matmul leaves them: another one would transpose the scores.
    scores = jnp.einsum("bckgh,btkh->bkcgt", q, k, preferred_element_type=wide(q.dtype))
    key = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
    seen = (starts[:, :, None] <= key) & (key <= index[:, :, None])
    # XLA's GPU compiler writes the -1e30 as an array of the scores' size. A mask that is added saves it, but then a
    # gather of the 1B shape has nothing beside it (4,104 instead of 4,135 MiB, 320 instead of 298 us exposed; 0.10.2).
    scores = jnp.where(seen[:, None, :, None, :], scores * q.shape[-1] ** -0.5, -1e30)
    probabilities = jax.nn.softmax(scores).astype(v.dtype)
    if platform() == "cpu":
        # Asked for c first, a CPU transposes an operand of the scores' size: a quarter of the time of attention (fp32,
        # [2, 256, 8, 64], JAX 0.10.2). A GPU does that for nothing, and needs less memory with the form below.
        return jnp.moveaxis(jnp.einsum("bkcgt,btkh->bkcgh", probabilities, v), 1, 2)
    return jnp.einsum("bkcgt,btkh->bckgh", probabilities, v)


def document_starts(segments: Array) -> Array:
    """Where each token's document starts in its row: `[B, T] -> [B, T]` int32. See Note [Documents]."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    first = (segments != jnp.roll(segments, 1, axis=1)) | (segments == 0)
    return lax.cummax(jnp.where(first, index, 0), axis=1)


def resolve(
    *, tokens: int, chunk: int, head_dim: int, dtype: DTypeLike, capability: tuple[int, int] | None
) -> str:
    """What "auto" means: cuDNN where it can run, else chunks where a row is longer than one.

    capability: compute capability of the NVIDIA GPU, None without one; see `cuda_capability`.
    """
    if (
        capability is not None and capability >= (8, 0)
        and dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0 and head_dim <= (256 if capability >= (9, 0) else 128)
        and tokens % 2 == 0  # its backward pass under a mask wants an even length
    ):
        return "cudnn"
    return "chunked" if tokens > chunk else "xla"


def cuda_capability() -> tuple[int, int] | None:
    """Compute capability of the GPUs that this process uses, None on a CPU and on other makers' GPUs."""
    device = jax.local_devices()[0]
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")  # ROCm says "gfx942"
    return (int(major), int(minor)) if device.platform == "gpu" and dot else None


def platform() -> str:
    """Where what is being traced will run: the mesh's inside a sharded step, else this process's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def wide(dtype: DTypeLike):
    """The dtype for sums, norms and softmax: fp32, and fp64 where the model runs in fp64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
