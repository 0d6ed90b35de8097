"""Narrow: what loops stack before and after, that numbers stay to the bit, and what it leaves alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.layers import f
from xform import Narrow, Plan, Shard, parallelize
from xform.higher_order import equations, scan_parts
from xform.models import llama
from xform.trace import Jaxpr, eval_jaxpr

LAYERS, ROWS, WIDTH = 5, 3, 7
X, W = f(ROWS, WIDTH), f(LAYERS, WIDTH, WIDTH)


def rewritten(fn: Callable, *args: Any) -> Any:
    return parallelize(fn, Plan({}, [Narrow()])).trace(*args)


def scans(jaxpr: Jaxpr) -> list[Any]:
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]


def stacked(eqn: Any) -> list[str]:
    """What a scan stacks, a turn's."""
    carry = scan_parts(eqn)[1]
    return [v.aval.str_short(short_dtypes=True) for v in eqn.params["jaxpr"].outvars[carry:]]


def rows(eqn: Any) -> list[str]:
    """What a scan reads row by row."""
    consts, carry, _ = scan_parts(eqn)
    body = eqn.params["jaxpr"]
    return [v.aval.str_short(short_dtypes=True) for v in body.invars[consts + carry :]]


def filled(avals: Any) -> list[Any]:
    """Random arguments of these types, flat."""
    rng = np.random.default_rng(0)

    def fill(a: Any) -> Any:
        if jnp.issubdtype(a.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 9, a.shape), a.dtype)
        return jnp.asarray(rng.normal(size=a.shape) / 4, a.dtype)

    return [fill(a) for a in jax.tree.leaves(avals)]


def same_to_the_bit(program: Any, *values: Any) -> None:
    """Compiled so that no more precision is kept than is written."""
    exact = {"xla_allow_excess_precision": False}
    before, after = (
        jax.jit(functools.partial(eval_jaxpr, j), compiler_options=exact)(*values)
        for j in (program.original, program.jaxpr)
    )
    for x, y in zip(before, after, strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def widening(x: Any, w: Any) -> Any:
    """The gradient of a weight, as a layer in bfloat16 has it: a product, widened."""
    h = x.astype(jnp.bfloat16)
    g = jax.lax.dot_general(h, h, (((0,), (0,)), ((), ())))
    return jnp.tanh(x @ w), g.astype(jnp.float32)


def test_a_widened_result_is_stacked_narrow_and_widened_after_the_loop() -> None:
    def fn(x: Any, w: Any) -> Any:
        x, gs = jax.lax.scan(widening, x, w, reverse=True)
        return x, gs * 2

    program = rewritten(fn, X, W)
    (scan,) = scans(program.jaxpr)
    assert stacked(scan) == ["bf16[7,7]"]
    assert scan.params["reverse"]
    same_to_the_bit(program, *filled((X, W)))
    (line,) = str(program.report).splitlines()
    fewer = LAYERS * WIDTH * WIDTH * 2
    assert f"1 stacked in bfloat16 instead of float32: {fewer} bytes less (test_narrow.py:" in line


@pytest.mark.parametrize(
    ("move", "inside"),
    [
        (lambda g: g.astype(jnp.float32).T[:, None] * 1, "f32[7,1,7]"),  # not moved alone: a product
        (lambda g: -g.astype(jnp.float32).T[:, None], "bf16[7,7]"),
        (lambda g: jnp.squeeze(g.astype(jnp.float32).reshape(1, -1), 0), "bf16[7,7]"),
        (lambda g: jnp.broadcast_to(g[:1].astype(jnp.float32), (7, 7)), "bf16[1,7]"),
        (lambda g: jax.ad_checkpoint.checkpoint_name(g, "g").astype(jnp.float32), "bf16[7,7]"),
        (lambda g: (g > 0).astype(jnp.int32), "bool[7,7]"),
        (lambda g: jax.jit(lambda g: g.astype(jnp.float32))(g), "bf16[7,7]"),
        (lambda g: jax.checkpoint(lambda g: (2 * g).astype(jnp.float32))(g), "bf16[7,7]"),
        (lambda g: jax.jit(jax.checkpoint(lambda g: jax.jit(jnp.float32)(2 * g)))(g), "bf16[7,7]"),
        (lambda g: g.astype(jnp.float32).astype(jnp.bfloat16), "bf16[7,7]"),
    ],
)
def test_it_looks_through_what_moves_and_converts(move: Callable, inside: str) -> None:
    def fn(x: Any, w: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            g = widening(x, w)[1].astype(jnp.bfloat16)
            return jnp.tanh(x @ w), move(g)

        return jax.lax.scan(body, x, w)

    program = rewritten(fn, X, W)
    assert stacked(scans(program.jaxpr)[0]) == [inside]
    same_to_the_bit(program, *filled((X, W)))


def test_a_loop_that_reads_what_another_stacked_widens_each_row_itself() -> None:
    def fn(x: Any, w: Any) -> Any:
        x, gs = jax.lax.scan(widening, x, w)
        return jax.lax.scan(lambda c, g: (jnp.sin(c + g), None), jnp.zeros((7, 7)), gs, reverse=True)[0]

    program = rewritten(fn, X, W)
    first, second = scans(program.jaxpr)
    assert stacked(first) == rows(second) == ["bf16[7,7]"]
    assert all(eqn.primitive.name != "convert_element_type" for eqn in program.jaxpr.eqns)
    same_to_the_bit(program, *filled((X, W)))


def test_the_two_loops_of_a_gradient_may_stand_in_jits_of_their_own() -> None:
    @jax.jit
    def loss(w: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w).astype(jnp.bfloat16).astype(jnp.float32)
            return y * y, None

        return jax.lax.scan(body, x, w)[0].sum()

    program = rewritten(jax.grad(loss), W, X)
    _, backward = scans(program.jaxpr)
    assert "bf16[3,7]" in rows(backward)
    assert not any(eqn.primitive.name == "jit" for eqn in program.jaxpr.eqns)
    same_to_the_bit(program, *filled((W, X)))


def test_a_value_stacked_in_two_dtypes_is_stacked_once() -> None:
    def fn(x: Any, w: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = jnp.tanh(x @ w)
            return y, (y, y.astype(jnp.bfloat16), y.T, jnp.exp(y))

        x, ys = jax.lax.scan(body, x, w)
        return jax.lax.scan(lambda c, y: (c + sum(v.sum() for v in y), None), x, ys)[0]

    program = rewritten(fn, X, W)
    first, second = scans(program.jaxpr)
    assert stacked(first) == rows(second) == ["f32[3,7]", "f32[3,7]"]
    assert "2 stacked once instead of twice" in str(program.report)
    same_to_the_bit(program, *filled((X, W)))


def test_what_is_the_same_every_turn_or_there_already_is_not_stacked() -> None:
    def fn(x: Any, w: Any, c: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), (c[None].astype(jnp.float32), w.T, jnp.zeros((2,)))

        x, ys = jax.lax.scan(body, x, w)
        total, _ = jax.lax.scan(lambda t, y: (t + y[0].sum() * y[1].sum(), None), 0.0, ys[:2])
        return x, total, ys

    args = (X, W, jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16))
    program = rewritten(fn, *args)
    first, second = scans(program.jaxpr)
    assert stacked(first) == []
    assert rows(second) == ["f32[7,7]"]
    assert "3 not stacked that are there anyway" in str(program.report)
    same_to_the_bit(program, *filled(args))


def test_a_loop_within_a_loop_hands_its_narrow_results_on() -> None:
    def fn(x: Any, w: Any) -> Any:
        def outer(x: Any, w: Any) -> Any:
            return jax.lax.scan(widening, x, w)

        def back(c: Any, gs: Any) -> Any:
            return jax.lax.scan(lambda c, g: (jnp.sin(c + g), None), c, gs)[0], None

        x, gs = jax.lax.scan(outer, x, w.reshape(1, LAYERS, WIDTH, WIDTH))
        return jax.lax.scan(back, jnp.zeros((7, 7)), gs)[0]

    program = rewritten(fn, X, W)
    out, inner, back, read = scans(program.jaxpr)
    assert stacked(out) == rows(back) == ["bf16[5,7,7]"]
    assert stacked(inner) == rows(read) == ["bf16[7,7]"]
    same_to_the_bit(program, *filled((X, W)))


def test_what_nobody_uses_is_no_reason_to_touch_a_loop() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jax.lax.scan(widening, x, w)[0]

    program = rewritten(fn, X, W)
    assert program.jaxpr is program.original
    assert stacked(scans(program.jaxpr)[0]) == ["f32[7,7]"]
    assert "no loop stacks anything wider or oftener than it needs" in str(program.report)


def test_a_program_without_loops_comes_back_itself() -> None:
    program = rewritten(lambda x: jax.jit(jnp.sin)(x) * 2, X)
    assert program.jaxpr is program.original
    assert "no loop stacks anything" in str(program.report)


def test_a_loop_in_a_cond_and_one_in_a_while_are_reached() -> None:
    def fn(x: Any, w: Any) -> Any:
        def once(x: Any) -> Any:
            x, gs = jax.lax.scan(widening, x, w)
            return x + gs.sum()

        x = jax.lax.cond(x[0, 0] > 0, once, lambda x: x, x)
        return jax.lax.fori_loop(0, x.shape[0] + jnp.int32(x[0, 0]), lambda _, x: once(x), x)

    program = rewritten(fn, X, W)
    assert [stacked(scan) for scan in scans(program.jaxpr)] == [["bf16[7,7]"]] * 2
    same_to_the_bit(program, *filled((X, W)))


@pytest.mark.slow  # two training steps of a Llama, equation by equation
@pytest.mark.parametrize("remat", [False, True])
def test_a_training_step_in_bfloat16_stacks_no_wide_gradient_and_keeps_its_numbers(remat: bool) -> None:
    fn, args = llama.train_step(size="tiny", dtype="bfloat16", remat=remat, batch=2, length=8, abstract=False)
    program = rewritten(fn, *args)
    backward = scans(program.jaxpr)[-1]
    wide = [text for text in stacked(backward) if text.startswith("f32") and text.count(",")]
    assert wide == []
    same_to_the_bit(program, *jax.tree.leaves(args))


def test_it_goes_before_shard_wherever_it_stands_in_the_plan() -> None:
    fn, args = llama.train_step(size="tiny", dtype="bfloat16", batch=8, length=8)
    program = parallelize(fn, Plan({"fsdp": 8}, [Shard(), Narrow()])).trace(*args)
    assert [stage.name for stage in program.stages] == ["narrow", "shard"]
    assert not any(t.startswith("f32") and t.count(",") for t in stacked(scans(program.jaxpr)[-1]))


# ---------------------------------------------------------------- rows read wide and used narrow

ODD = jnp.ones((7, 5, 5)).at[0, 0].set(jnp.array([jnp.inf, 1e-40, 3.4e38, -0.0, 1 + 2**-8]))
STREAM = jnp.ones((3, 5), jnp.bfloat16)


def used_narrow(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, row: (x @ row.astype(jnp.bfloat16), None), x, w)[0]


def used_in_half(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, row: (x * row.astype(jnp.float16)[0, 0], None), x.astype(jnp.float16), w)[0]


def used_both_ways(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, row: (x @ row.astype(jnp.bfloat16), jnp.sum(row)), x, w)


def used_in_a_call(x: Any, w: Any) -> Any:
    layer = jax.checkpoint(lambda x, row: jnp.tanh(x @ row.astype(jnp.bfloat16)), prevent_cse=False)
    return jax.lax.scan(lambda x, row: (layer(x, row), None), x, w)[0]


def differentiated(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(used_in_a_call(x, w).astype(jnp.float32)))(w)


@pytest.mark.parametrize(
    ("fn", "count"),
    [(used_narrow, 1), (used_in_a_call, 1), (differentiated, 2), (used_both_ways, 0), (used_in_half, 0)],
)
def test_rows_used_only_in_a_narrower_dtype_of_the_same_range_are_rounded_in_the_loop(
    fn: Callable, count: int
) -> None:
    names = [eqn.primitive.name for eqn in equations(rewritten(fn, STREAM, ODD).jaxpr)]
    assert names.count("reduce_precision") == count


@pytest.mark.parametrize("fn", [used_narrow, used_in_a_call, differentiated])
def test_rounding_first_changes_no_bit(fn: Callable) -> None:
    want, got = jax.jit(fn)(STREAM, ODD), parallelize(fn, Plan({}, [Narrow()]))(STREAM, ODD)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_matrices_of_several_dimensions_are_read_as_they_lie() -> None:
    def heads(x: Any, w: Any) -> Any:
        def turn(x: Any, row: Any) -> Any:
            return jnp.einsum("bd,dhk->bhk", x, row.astype(jnp.bfloat16)).reshape(x.shape), None

        return jax.lax.scan(turn, x, w)[0]

    x, w = jnp.ones((3, 6), jnp.bfloat16), jnp.ones((5, 6, 2, 3))
    names = [eqn.primitive.name for eqn in equations(rewritten(heads, x, w).jaxpr)]
    assert names.count("layout_constraint") == 1
    got = parallelize(heads, Plan({}, [Narrow()]))(x, w)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(jax.jit(heads)(x, w), np.float32))
