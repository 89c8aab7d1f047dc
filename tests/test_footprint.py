"""What layers save and work with, against sums by hand and against what XLA keeps."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jfsdp.planning.footprint import trace
from jfsdp.planning.workload import Workload
from jfsdp.stack import Stack
from models import llama

B, T, D, F, L = 2, 96, 32, 80, 5


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, F, rngs=rngs, use_bias=False), nnx.Linear(F, D, rngs=rngs, use_bias=False)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self, remat):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(jnp.zeros((16, D)))
        self.blocks = Stack(Block, num_layers=L, rngs=rngs, remat=remat)

    def loss(self, tokens, targets, weights):
        x = self.blocks(self.table[...][tokens])
        return jnp.sum(x.mean(-1) * weights), jnp.sum(weights)


def layers(remat):
    (one,) = trace(lambda: Model(remat), sequences=B, tokens=T, dtype=jnp.float32)
    return one


def test_full_checkpointing_saves_the_input():
    one = layers("full")
    assert one.count == L and one.saved == one.carried == 4 * B * T * D


def test_without_checkpointing_matmul_inputs_and_the_activation_are_saved():
    # x for `up`; tanh(up(x)) for `down`; and the derivative of tanh, which JAX makes an array of its own.
    assert layers("none").saved == 4 * B * T * (D + 2 * F)


def test_what_waits_for_a_loop_that_is_computed_again_is_counted_with_the_masks_constant():
    """As compiled programs have it: the -1e30 is an array of a chunk's scores, beside the rotated queries (before and
    after they are cut into chunks) and keys; values are saved. The zeros are the result's and those of the gradients
    of queries, keys and values. cuDNN has no such loop."""
    batch, tokens, queries, keys, heads, chunk = 2, 4096, 2048, 512, 32, 256
    work = {attention: Workload(model="llama3-1b", remat="dots", batch=batch, attention=attention).layers[0]
            for attention in ("chunked", "cudnn")}  # fmt: skip
    scores = 4 * batch * heads * chunk * tokens
    others = 2 * batch * tokens * (2 * queries + keys)
    zeros = 2 * batch * tokens * (2 * queries + 2 * keys)
    assert work["chunked"].again == pytest.approx(scores + others + zeros, rel=1e-3)
    assert work["cudnn"].again == pytest.approx(others, rel=1e-3)
    full = Workload(model="llama3-1b", remat="full", batch=batch, attention="chunked").layers[0]
    assert full.again > work["chunked"].again  # there what the rest of the layer reads is more


def test_operations_are_those_of_the_matmuls():
    forward = 2 * B * T * 2 * D * F
    assert layers("none").forward_flops == forward
    assert layers("none").backward_flops == 2 * forward
    assert layers("full").backward_flops == 2 * forward + forward // 2  # `down` need not be computed again


def test_the_working_set_is_what_one_layers_backward_pass_holds():
    # The cotangent and the input, both [B, T, D]; tanh and its cotangent, both [B, T, F]; weights count elsewhere.
    least, most = 4 * B * T * (D + 2 * F), 4 * B * T * (3 * D + 3 * F)
    assert least <= layers("full").backward <= most
    assert layers("full").backward > layers("full").saved


@pytest.fixture(scope="module")
def config():
    return llama.Config(
        width=64, num_layers=3, num_heads=4, num_kv_heads=2, inner_width=160, attention="chunked", query_chunk=32
    )


def of_llama(config, remat="full", tokens=96, **options):
    build = lambda: llama.build(config, rngs=nnx.Rngs(0), remat=remat)
    (one,) = trace(build, sequences=B, tokens=tokens, dtype=jnp.bfloat16, **options)
    return one


def test_a_llama_layer_computes_what_its_family_says(config):
    """`llama.flops` is written from the architecture; the trace counts matmuls."""
    one = of_llama(config)
    layer = llama.flops(config, 96) - 6 * config.width * config.vocab_size
    assert one.forward_flops == layer / 3 / config.num_layers * B * 96


def test_a_llama_layer_saves_what_the_compiler_carries_from_loop_to_loop(config):
    """The sum that XLA's forward loop hands to its backward loop for Llama-3-8B (1072 MiB of 4096 tokens), by array.

    Equal arrays count once: q, k and v read one normed input. Weights and what follows from them alone do not count.
    """
    one, tokens = of_llama(config, remat="none"), B * 96
    width, kv, inner = config.width, config.num_kv_heads * config.head_size, config.inner_width
    fp32 = 4 * width + 4  # both norms: input and normed; mean square and its root
    bf16 = 3 * width + 2 * kv + width + 6 * inner
    assert one.saved == tokens * (4 * fp32 + 2 * bf16)


def test_dots_save_what_matmuls_with_weights_give_and_no_scores(config):
    one, width, kv, inner = of_llama(config, remat="dots"), config.width, 32, config.inner_width
    assert one.saved == 2 * B * 96 * (3 * width + 2 * kv + 2 * inner)  # input, q, attention's output; k, v; gate, up


def test_a_fused_kernel_keeps_no_scores(config):
    scores = of_llama(config, tokens=512)
    fused = of_llama(config, tokens=512, loops_are_kernels=True)
    assert fused.saved == scores.saved
    assert scores.backward - fused.backward >= 4 * B * config.num_heads * 32 * 512  # a chunk's scores, fp32


class Twice(nnx.Module):
    """A block of inner width 2F, then one of inner width F."""

    def __init__(self, rngs):
        matrix = lambda d_in, d_out: nnx.Linear(d_in, d_out, rngs=rngs, use_bias=False)  # noqa: E731
        self.up, self.down, self.up2, self.down2 = matrix(D, 2 * F), matrix(2 * F, D), matrix(D, F), matrix(F, D)

    def __call__(self, x):
        x = x + self.down(jnp.tanh(self.up(x)))
        return x + self.down2(jnp.tanh(self.up2(x)))


def test_gradients_of_weights_come_last_so_what_they_read_is_alive_to_the_end(monkeypatch):
    """By hand, while the first block's inner gradient is made: of the second its input, both gradients and tanh.

    Else these would be gone, and the peak lie in the second block: 7F, as both up(x) and tanh of the first are there.
    """
    monkeypatch.setattr(f"{__name__}.Block", Twice)
    narrow, wide = 4 * B * T * D, 4 * B * T * F
    first = narrow + 3 * 2 * wide  # x; up(x), its tanh, and tanh's gradient
    second = 3 * narrow + 2 * wide  # its input, dy and d input; tanh(up(input)) and d up(input)
    assert layers("full").backward == first + second


def test_what_is_computed_again_and_read_later():
    """`up(x)`, of which tanh and its derivative are made where they are read; nothing where all is saved."""
    assert layers("full").again == 4 * B * T * F
    assert layers("none").again == 0


def test_frozen_weights_have_no_gradients_to_compute_or_to_wait_for():
    kernels = lambda path, _: "up" in path  # noqa: E731
    (one,) = trace(lambda: Model("full"), sequences=B, tokens=T, dtype=jnp.float32, trainable=kernels)
    matmul = 2 * B * T * D * F
    assert one.backward_flops == matmul + 2 * matmul + matmul  # up again; through down and up; up's gradient
    assert layers("full").backward_flops == one.backward_flops + matmul


def test_tokens_and_sequences_scale_what_is_saved(config):
    assert of_llama(config, tokens=192).saved == 2 * of_llama(config, tokens=96).saved
