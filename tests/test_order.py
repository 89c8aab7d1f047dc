"""Units called one by one: which gathers may run ahead, how many are alive, in which order gradients are reduced."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfsdp import order
from jfsdp.audit import gpu
from jfsdp.audit import program as audit
from jfsdp.layout import UnitOptions, make_plan
from jfsdp.order import Order, Prefetch
from jfsdp.state import TrainState
from jfsdp.step import train_step
from jfsdp.unit import call
from tests.support import assert_close, submesh, train_alone

aot = [pytest.mark.aot, pytest.mark.skipif(gpu.missing_tools() is not None, reason=f"needs {gpu.missing_tools()}")]
UNITS = ("a", "b", "c", "d")


def turns(prefetch: Prefetch, calls=UNITS):
    here = Order(prefetch)
    return [here.next(unit) for unit in calls]


class TestTurns:
    @pytest.mark.parametrize(("limit", "waits_for"), [(1, "----"), (2, "-abc"), (3, "--ab"), (9, "----")])
    def test_a_gather_waits_for_the_call_that_limit_names(self, limit, waits_for):
        got = turns(Prefetch(limit=limit))
        assert "".join(turn.after[0].unit if turn.after else "-" for turn in got) == waits_for

    def test_each_call_opens_the_backward_gather_of_the_one_that_waited_for_it(self):
        got = turns(Prefetch())
        assert [[t.unit for t in turn.opens] for turn in got] == [[], ["a"], ["b"], ["c"]]
        assert [turn.is_opened for turn in got] == [True, True, True, False]

    def test_lists_win_over_the_limit(self):
        prefetch = Prefetch(forward={"a": ("b", "c")}, backward={"d": ("b", "a")})
        got = turns(prefetch)
        assert [[t.unit for t in turn.after] for turn in got] == [[], ["a"], ["a"], ["c"]]
        assert [[t.unit for t in turn.opens] for turn in got] == [[], [], [], ["a", "b", "c"]]

    def test_a_level_of_tracing_has_its_own_order(self):
        here = Order()
        first, inside = here.next("a"), []
        jax.make_jaxpr(lambda x: inside.append(here.next("b")) or x)(1.0)
        assert not inside[0].after and here.next("c").after == [first]

    def test_names_that_are_no_units_and_limits_below_1_are_refused(self):
        with pytest.raises(ValueError, match="prefetch names 'x', which is no unit. Units are w0, w1"):
            start(Prefetch(forward={"x": ("w0",)}))
        with pytest.raises(ValueError, match="limit is 0; it counts gathered units"):
            Prefetch(limit=0)


def test_what_waits_is_bitwise_the_same_whatever_the_ticket():
    for value in (0.0, -1.5, np.inf, np.nan):
        (got,) = jax.jit(order.after)([jnp.float32(value)], [jnp.array([-0.0, 1.0, np.nan])])
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint32), np.array([-0.0, 1.0, np.nan], np.float32).view(np.uint32)
        )


def start(prefetch=Prefetch(), layers=4, mesh="1x8", **options):
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(16, 16)) * 0.3 for i in range(layers)}
    units = {name: UnitOptions(**options) for name in params}
    plan = make_plan(params, submesh(mesh), units=units, prefetch=prefetch)
    return params, plan


def loss(params, batch, key):
    x = batch
    for w in params.values():
        x = call(lambda w, x: jnp.tanh(x @ w), w, x)
    return (x**2).mean()


@pytest.mark.parametrize(
    "prefetch",
    [Prefetch(limit=1), Prefetch(), Prefetch(forward={"w0": ("w3",)}, backward={"w3": ("w0",)})],
    ids=["1", "2", "lists"],
)
def test_every_order_trains_as_one_device(prefetch, float64):
    params, plan = start(prefetch, mesh="2x4")
    tx, batch = optax.sgd(0.1), np.random.default_rng(1).normal(size=(8, 16))
    _, want, _ = train_alone(lambda p, b, k: (loss(p, b, k) * 8, 8.0), params, batch, tx, 5)
    state, step = TrainState.create(plan.place(params), tx, plan), train_step(loss, tx, plan, accumulate=1)
    for _ in range(5):
        state, _ = step(state, batch)
    assert_close(state.logical_params(), want, 1e-12)


@pytest.mark.parametrize(("keeps", "gathers"), [(None, 7), (False, 4)], ids=["freed", "kept"])
def test_gathers_and_reductions_per_step_are_pytorchs(keeps, gathers, float64):
    """U units: 2U gathers with reshard_after_forward=True, U with False, U reductions. The first unit needs no second
    gather here, as nobody wants the gradient of the batch."""
    params, plan = start(reshard_after_forward=keeps)
    tx = optax.sgd(0.1)
    lowered = train_step(loss, tx, plan).lower(
        TrainState.abstract(tx, plan), jax.ShapeDtypeStruct((8, 16), jnp.float64)
    )
    program = audit.read(lowered.compile(), plan.mesh)
    gathered = sum(c.runs * len(c.operands) for c in program.collectives if c.kind == "all-gather")
    asked = [c.kind for c in audit.lowered_collectives(lowered, plan.mesh)]
    assert asked.count("all-gather") == gathers and asked.count("reduce-scatter") == 4
    assert gathered == gathers


@cache
def looped(**arguments):
    return gpu.compile_ahead("tests.looped:ahead", arguments)


def events(report) -> str:
    """The entry computation in order: `<` a gather begins, `>` it is there, `(` and `)` a reduction, `.` a matmul."""
    marks = {"all-gather-start": "<", "all-gather-done": ">", "reduce-scatter-start": "(", "reduce-scatter-done": ")"}
    out, entry = "", report.text[report.text.index("\nENTRY") :]
    for line in entry.splitlines():
        if found := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\(", line):
            out += marks.get(found[2], "." if found[1].startswith("gemm_fusion") else "")
    return out


class TestGpuProgram:
    """Six blocks of two matrices in a Python loop, on 8 H100."""

    pytestmark = aot

    def test_gathers_run_beside_the_unit_before(self):
        exposed = {limit: looped(limit=limit).exposed.step_us for limit in (1, 2)}
        assert exposed[2] < exposed[1] / 4
        forward = events(looped()).split("(")[0]
        assert forward.count("<.>") >= 2 * 6 and "<>" in events(looped(limit=1))[3:]  # a matmul while it travels

    def test_no_more_units_are_gathered_than_limit_says(self):
        """Matrices whose gather has begun and whose first use has not: two per unit."""
        for limit in (1, 2, 3):
            waiting, most = 0, 0
            for event in events(looped(limit=limit)).split("(")[0]:
                waiting += (event == "<") - (event == ".")
                most = max(most, waiting)
            assert most <= 2 * limit

    def test_reductions_run_between_the_matmuls_and_do_not_pile_up(self):
        text = events(looped())
        last_gather = text.rindex("<")
        assert text[:last_gather].count("(") >= 6

    def test_lists_by_name_gather_as_the_limit_does(self):
        """Each block lets the next one be gathered, and in the backward pass the one before: the program of limit=2."""
        names = [f"blocks.{i}" for i in range(6)]
        forward, backward = {a: [b] for a, b in zip(names, names[1:])}, {b: [a] for a, b in zip(names, names[1:])}
        listed = gpu.compile_ahead("tests.looped:ahead", dict(limit=1, forward=forward, backward=backward))
        assert events(listed) == events(looped()) != events(looped(limit=1))
