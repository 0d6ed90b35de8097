"""The flops that a program asks for, by hand."""

import jax
import jax.numpy as jnp
import pytest

from xform.flops import product_flops

ONE = 2 * 3 * 5 * 7  # of a [3, 5] by [5, 7] product
A, B = jnp.ones((3, 5)), jnp.ones((5, 7))
SQUARE = jnp.ones((5, 5))


def flops(fn, *args):
    return product_flops(jax.make_jaxpr(fn)(*args))


def test_a_product_is_two_a_multiply_add_and_a_sum_is_nothing():
    assert flops(lambda a, b: (a + 1) @ b, A, B) == ONE
    assert flops(lambda a: a + 1, A) == 0
    assert (
        flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), jnp.ones((4, 3, 5)), jnp.ones((4, 5, 7)))
        == 4 * ONE
    )


def test_a_ragged_product_counts_each_row_once():
    groups = jnp.array([1, 2], jnp.int32)
    assert flops(lambda a, b: jax.lax.ragged_dot(a, b, groups), A, jnp.ones((2, 5, 7))) == ONE


@pytest.mark.parametrize("groups, terms", [(1, 4 * 3), (2, 2 * 3)])
def test_a_convolution_sums_over_window_and_channels(groups, terms):
    x, k = jnp.ones((2, 4, 10)), jnp.ones((6, 4 // groups, 3))

    def fn(x, k):
        return jax.lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=groups)

    assert flops(fn, x, k) == 2 * (2 * 6 * 8) * terms


def test_a_scan_counts_its_turns_and_a_conditional_its_dearest_branch():
    def looped(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ SQUARE), None), x, length=11)[0]

    assert flops(looped, A) == 11 * 2 * 3 * 5 * 5
    assert flops(lambda p, a: jax.lax.cond(p, lambda a: a, lambda a: a @ SQUARE, a), True, A) == 2 * 3 * 5 * 5


def test_what_is_computed_again_is_not_what_the_model_needs():
    def loss(w, x):
        for _ in range(2):
            x = jnp.tanh(jnp.tanh(x @ w) @ w)
        return x.sum()

    def kept(w, x):
        return jax.grad(loss, (0, 1))(w, x)

    def again(w, x):
        return jax.grad(jax.checkpoint(loss), (0, 1))(w, x)

    def dots(fn):
        return str(jax.make_jaxpr(fn)(SQUARE, A)).count("dot_general")

    assert dots(again) > dots(kept)
    assert flops(again, SQUARE, A) == flops(kept, SQUARE, A) == 3 * 4 * 2 * 3 * 5 * 5
