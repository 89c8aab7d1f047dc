"""What a unit leaves for its backward pass: activations, and nothing that its weights alone decide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jfsdp.residuals import Split, hoist

ROWS, WIDTH, INNER = 2, 4, 6
WEIGHT, ACTIVATION = (WIDTH, INNER), (ROWS, INNER)


def arguments():
    """`w` a flat weight, `x` an activation and an integer, `s` a shared scale, `g` a per-layer input."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return [draw(WIDTH * INNER)], [draw(ROWS, WIDTH), jnp.arange(ROWS)], [draw(INNER)], [draw(INNER)]


def unit(weights, x, shared, inputs, low=jnp.bfloat16):
    """Derives values from weights only, from shared values and inputs only, from both, from activations."""
    (w,), (x, n), (s,), (g,) = weights, x, shared, inputs
    kernel = w.reshape(WEIGHT).astype(low)  # weights only
    mask = jnp.exp(s * g)  # shared and inputs only
    scaled = jnp.sin(kernel.astype(s.dtype)) * mask  # weights and shared: kept
    hidden = jnp.tanh(x.astype(low) @ kernel).astype(s.dtype)  # activations: kept
    out = jnp.sin(checkpoint_name(hidden * mask, "masked")) + jnp.cos(x @ scaled) * n[:, None]
    return [out @ kernel.T.astype(s.dtype), n + 1]


def split(fn=unit, differentiate=((True,), (True,), (True,))):
    return Split(fn, *arguments(), differentiate)


def saved(fn) -> list[tuple]:
    """Shapes and dtypes of what `fn` keeps."""
    return [(a.shape, a.dtype.name) for a in split(fn).forward(*arguments())[1]]


def saved_by_jax(fn) -> list[tuple]:
    """The same for `jax.vjp`, as it would be without the sorting."""
    w, (x, n), s, g = arguments()
    _, pullback = jax.vjp(lambda w, x, s, g: fn(w, [x, n], s, g), w, x, s, g)
    return [(a.shape, a.dtype.name) for a in jax.tree.leaves(pullback)]


POLICIES = {
    "plain": lambda fn: fn,
    "full": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False),
    "dots": lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False),
    "names": lambda fn: jax.checkpoint(
        fn, policy=jax.checkpoint_policies.save_only_these_names("masked"), prevent_cse=False
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_that_follows_from_weights_alone_is_saved(policy):
    kept = saved(POLICIES[policy](unit))
    assert (WEIGHT, "bfloat16") not in kept  # the cast and reshaped weight
    assert ((WIDTH * INNER,), "float32") not in kept  # the weight itself


def test_jax_would_have_saved_them():
    """The comparison can fail: without the sorting the cast weight is a residual."""
    assert (WEIGHT, "bfloat16") in saved_by_jax(unit)
    wasteful = jax.checkpoint(unit, policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False)
    assert (WEIGHT, "bfloat16") in saved_by_jax(wasteful)
    assert (WEIGHT, "bfloat16") not in saved(wasteful)


def test_activations_are_saved_and_a_policy_decides_how_many():
    activations = {p: [k for k in saved(POLICIES[p](unit)) if k[0] == ACTIVATION] for p in POLICIES}
    assert len(activations["plain"]) > len(activations["dots"]) > len(activations["full"]) == 0
    assert activations["names"] == [(ACTIVATION, "float32")]
    # Whole recomputation needs the block's input and nothing else.
    assert sorted(saved(POLICIES["full"](unit))) == [((ROWS,), "int32"), ((ROWS, WIDTH), "float32")]


def test_values_of_shared_alone_are_rebuilt_and_those_of_weights_and_shared_saved():
    def alone(weights, x, shared, inputs):
        return [jnp.sin(x[0] @ weights[0].reshape(WEIGHT)) * jnp.exp(shared[0] * inputs[0])]

    assert ((INNER,), "float32") in saved_by_jax(alone)  # exp(s * g), and s and g themselves
    assert [k for k in saved(alone) if k[0] == (INNER,)] == []

    def together(weights, x, shared, inputs):
        return [x[0] @ jnp.sin(weights[0].reshape(WEIGHT) * shared[0])]

    assert (WEIGHT, "float32") in saved(together)  # rebuilding it would need both; it is kept


DIFFERENTIATED = [(policy, True, True) for policy in POLICIES]
DIFFERENTIATED += [("full", False, True), ("plain", False, False)]


@pytest.mark.parametrize(("policy", "shared", "inputs"), DIFFERENTIATED)
def test_numbers_are_those_of_jax_vjp(policy, shared, inputs, float64):
    fn = POLICIES[policy](functools.partial(unit, low=jnp.float64))
    w, x, s, g = jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, arguments())
    out, pullback = jax.vjp(lambda w, f, s, g: fn(w, [f, x[1]], s, g), w, x[0], s, g)
    cotangents = [out[0], np.zeros(ROWS, jax.dtypes.float0)]  # the output as its own cotangent: any would do
    want_w, want_x, want_s, want_g = pullback(cotangents)
    want = want_w, [want_x], want_s if shared else [], want_g if inputs else []

    unit_split = Split(fn, w, x, s, g, ([True], [shared], [inputs]))
    got_out, kept = unit_split.forward(w, x, s, g)
    got = unit_split.pullback(w, kept, s, g, cotangents)
    assert [len(group) for group in got] == [len(group) for group in want]
    for a, b in zip(jax.tree.leaves([got_out, got]), jax.tree.leaves([out, want]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-14)  # float64 rounding


def test_the_pullback_reads_the_weights_that_it_is_given():
    """They are those gathered for the backward pass: with others in their place the result must change."""
    w, x, s, g = arguments()
    unit_split = split()
    _, kept = unit_split.forward(w, x, s, g)
    pull = functools.partial(unit_split.pullback, saved=kept, shared=s, inputs=g)
    cotangents = [jnp.ones((ROWS, WIDTH)), np.zeros(ROWS, jax.dtypes.float0)]
    same, other = (pull(weights, cotangents=cotangents)[1][0] for weights in (w, [2 * w[0]]))
    assert not np.allclose(same, other)


def test_hoisting_turns_closed_over_tracers_into_arguments():
    """A `custom_vjp` may not close over what is differentiated; hoisted, the gradient comes through."""

    def total(scale, x):
        fn, consts = hoist(lambda x: {"y": x * scale}, x)
        assert len(consts) == 1

        @jax.custom_vjp
        def run(consts, x):
            return fn(consts, x)["y"]

        run.defvjp(
            lambda consts, x: (run(consts, x), (consts, x)),
            lambda saved, g: jax.vjp(lambda consts, x: fn(consts, x)["y"], *saved)[1](g),
        )
        return run(consts, x).sum()

    to_scale, to_x = jax.grad(total, argnums=(0, 1))(jnp.float32(3), jnp.arange(4.0))
    assert float(to_scale) == 6
    assert to_x.tolist() == [3.0] * 4
