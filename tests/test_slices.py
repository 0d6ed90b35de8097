"""Slices of a product's result: taken before the product, or left where they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.slices import sliced_before
from xform.trace import Jaxpr, eval_jaxpr, shape_of

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 5)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(5, 11)), jnp.float32)
BIAS = jnp.asarray(np.random.default_rng(2).normal(size=(3, 7, 11)), jnp.float32)


def rewritten(fn: Callable, side: int = 0) -> tuple[Jaxpr, Jaxpr]:
    before = jax.make_jaxpr(fn)(X, W, BIAS)
    before = getattr(before, "jaxpr", before)
    number = next(i for i, e in enumerate(before.eqns) if e.primitive.name == "dot_general")
    return before, sliced_before(before, number, side)


def made(jaxpr: Jaxpr) -> tuple[int, ...]:
    """The shape of the product."""
    return next(shape_of(e.outvars[0]) for e in jaxpr.eqns if e.primitive.name == "dot_general")


def most(x: Any, w: Any, bias: Any) -> Any:
    return (x @ w)[:, :-1]


def scaled(x: Any, w: Any, bias: Any) -> Any:
    return jnp.tanh(0.5 * (x @ w) + bias)[:, 1:6:2]


def both(x: Any, w: Any, bias: Any) -> Any:
    return (bias * (x @ w))[1:, 2:]


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(most, (3, 6, 11)), (scaled, (3, 3, 11)), (both, (2, 5, 11))],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_a_slice_goes_before_the_product(fn: Callable, shape: tuple[int, ...]) -> None:
    before, after = rewritten(fn)
    assert made(after) == shape
    want, found = eval_jaxpr(before, X, W, BIAS), eval_jaxpr(after, X, W, BIAS)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)


def test_the_activation_may_be_the_second_operand() -> None:
    before, after = rewritten(lambda x, w, b: jnp.einsum("ev,ble->vbl", w, x)[..., :-1], 1)
    assert made(after) == (11, 3, 6)
    np.testing.assert_allclose(eval_jaxpr(after, X, W, BIAS)[0], eval_jaxpr(before, X, W, BIAS)[0], rtol=1e-5)


def other_operand(x: Any, w: Any, bias: Any) -> Any:
    return (x @ w)[:, :-1, :4]


def used_whole(x: Any, w: Any, bias: Any) -> Any:
    y = x @ w
    return y[:, :-1] + y.max()


def summed(x: Any, w: Any, bias: Any) -> Any:
    return jnp.cumsum(x @ w, 1)[:, :-1]


@pytest.mark.parametrize("fn", [other_operand, used_whole, summed], ids=lambda f: f.__name__)
def test_what_else_is_made_of_the_product_leaves_it_alone(fn: Callable) -> None:
    before, after = rewritten(fn)
    assert after is before
