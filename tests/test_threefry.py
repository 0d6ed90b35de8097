"""The numbers of some elements, and bits and keys of theirs, are those of the whole array."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import threefry

KEY = jax.random.key(7)
SHAPE = (6, 3, 5)


def places(*which: Any) -> list[Any]:
    return [jnp.asarray(each, np.uint32) for each in which]


SOME = places([4, 0, 5], [1], [0, 2, 4])


def some(x: Any) -> Any:
    return x[np.ix_(*map(np.asarray, SOME))]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_bits_of_some_elements_are_the_whole_arrays(dtype: str) -> None:
    with jax.enable_x64(True):
        made = threefry.bits(KEY, threefry.numbers(SOME, SHAPE), dtype)
        wanted = some(jax.random.bits(KEY, SHAPE, dtype))
    assert made.dtype == wanted.dtype
    np.testing.assert_array_equal(made, wanted)


def test_bits_of_an_array_of_keys_have_the_keys_dimensions_first() -> None:
    keys = jax.random.split(KEY, (2, 4))
    made = threefry.bits(keys, threefry.numbers(SOME, SHAPE), np.uint32)
    for i in np.ndindex(keys.shape):
        np.testing.assert_array_equal(made[i], some(jax.random.bits(keys[i], SHAPE)))


def test_some_of_the_keys_that_are_split_off_are_those_of_all() -> None:
    made = threefry.split(KEY, threefry.numbers(SOME, SHAPE))
    wanted = some(jax.random.key_data(jax.random.split(KEY, SHAPE)))
    np.testing.assert_array_equal(jax.random.key_data(made), wanted)


def test_numbers_go_on_beyond_32_bits() -> None:
    sizes = (7, 1 << 31, 3)
    where = ([0, 6], [0, (1 << 31) - 1], [0, 2])
    high, low = threefry.numbers(places(*where), sizes)
    for i in np.ndindex(high.shape):
        a, b, c = (each[n] for each, n in zip(where, i, strict=True))
        assert (int(high[i]) << 32) + int(low[i]) == (a * sizes[1] + b) * sizes[2] + c


@pytest.mark.parametrize("factor", [1, 7, (1 << 32) - 1, 1 << 32, (5 << 32) + 3, (1 << 63) + 12345])
def test_numbers_beyond_32_bits_are_multiplied_in_two_words(factor: int) -> None:
    x = np.array([0, 1, 3, 65537, (1 << 31) + 5, (1 << 32) - 1], np.uint32)
    high, low = threefry.times(jnp.asarray(x), factor)
    got = [int(h) * (1 << 32) + int(w) for h, w in zip(high, low, strict=True)]
    assert got == [int(each) * factor % (1 << 64) for each in x]


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_keys_do_not_draw_by_number(impl: str) -> None:
    assert threefry.draws_by_number(KEY)
    assert not threefry.draws_by_number(jax.random.key(7, impl=impl))
    with jax.threefry_partitionable(False):
        assert not threefry.draws_by_number(KEY)
