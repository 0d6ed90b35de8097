"""Rotations of halves of heads as products: the same numbers, with no head taken apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import Kernels, Plan, parallelize, topologies
from xform.higher_order import equations
from xform.rewrite import rewrite
from xform.rotations import Rotations
from xform.trace import Jaxpr, eval_jaxpr, trace_flat, typeof, without_dead

B, T, H, D = 2, 5, 3, 14


def turned(x: Any, c: Any, s: Any) -> Any:
    """As our models have it."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)


def half_turned(x: Any, c: Any, s: Any) -> Any:
    """As others have it."""
    a, b = x[..., : D // 2], x[..., D // 2 :]
    c, s = (jnp.concatenate([y, y], -1).astype(x.dtype) for y in (c, s))
    return x * c + jnp.concatenate([-b, a], -1) * s


def graded(turn: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(x: Any, c: Any, s: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(turn(x, c, s)).astype(jnp.float32)))(x)

    return gradient


def operands(dtype: Any = jnp.bfloat16) -> list[Any]:
    rng = np.random.default_rng(0)
    angles = rng.normal(size=(B, T, 1, D // 2))
    x = jnp.asarray(rng.normal(size=(B, T, H, D)), dtype)
    return [x, *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))]


def changed(f: Callable[..., Any], *args: Any) -> tuple[Jaxpr, Jaxpr]:
    before = trace_flat(lambda *xs: [f(*xs)], [typeof(x) for x in args], "turn")
    return before, without_dead(rewrite(before, Rotations()))


def halves(jaxpr: Jaxpr) -> list[str]:
    """What takes heads apart, or puts them together."""
    return [
        eqn.primitive.name
        for eqn in equations(jaxpr)
        if eqn.primitive.name in ("split", "slice", "concatenate") and H in eqn.outvars[0].aval.shape
    ]


@pytest.mark.parametrize("turn", [turned, half_turned, graded(turned)], ids=["ours", "others", "gradient"])
def test_halves_rotated_into_each_other_are_a_product_with_the_same_numbers(turn: Any) -> None:
    args = operands()
    before, after = changed(turn, *args)
    assert halves(before) and not halves(after)
    (got,), (want,) = (eval_jaxpr(p, *args) for p in (before, after))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_rotations_in_a_loop_that_is_differentiated() -> None:
    x, c, s = operands()

    def loss(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jax.checkpoint(turned)(x, c, s), None), x, length=3)[0].sum()

    before, after = changed(jax.grad(loss), x)
    assert halves(before) and not halves(after)
    (got,), (want,) = (eval_jaxpr(p, x) for p in (before, after))
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_numbers_that_a_product_would_round_stay() -> None:
    before, after = changed(turned, *operands(jnp.float32))
    assert halves(after) == halves(before)


def test_angles_of_each_heads_own_are_not_put_together_twice() -> None:
    x, c, s = operands()
    c, s = (jnp.broadcast_to(y, (B, T, H, D // 2)) for y in (c, s))
    before, after = changed(turned, x, c, s)
    assert halves(after) == halves(before)


def test_halves_that_are_put_together_in_other_ways_stay() -> None:
    def joined(x: Any, c: Any, s: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * c.astype(x.dtype), b * s.astype(x.dtype)], -1)

    before, after = changed(joined, *operands())
    assert halves(after) == halves(before)


@pytest.mark.slow  # loads the TPU's compiler
def test_a_step_for_a_tpu_takes_no_head_apart_and_one_for_a_cpu_does() -> None:
    topologies.prepare_environment()
    args = operands()
    for devices, taken in ((topologies.parse("v5e-4").devices(), False), (jax.devices()[:4], True)):
        step = parallelize(graded(turned), Plan({"data": 4}, [Kernels()]), devices=devices)
        program = step.trace(*args)
        assert bool(halves(without_dead(program.jaxpr))) is taken
        assert ("rotated into each other, by a product" in str(program.report)) is not taken
