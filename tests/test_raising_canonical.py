"""Values arranged as an operation takes them, and back."""

import numpy as np
import pytest

from xform.raising.canonical import arranged, back

SIZES = {"b": 2, "n": 3, "g": 5, "t": 7, "d": 4, "s": 1}


def test_joined_heads_come_apart_and_go_back() -> None:
    x = np.arange(2 * 7 * 15 * 4).reshape(2, 7, 15, 4)
    y = arranged(x, ("b", "t", "ng", "d"), ("b", "n", "g", "t", "d"), SIZES)
    np.testing.assert_array_equal(y, x.reshape(2, 7, 3, 5, 4).transpose(0, 2, 3, 1, 4))
    np.testing.assert_array_equal(back(y, ("b", "n", "g", "t", "d"), ("b", "t", "ng", "d"), SIZES), x)


def test_a_letter_that_is_missing_is_repeated_and_one_of_size_one_goes() -> None:
    x = np.arange(12).reshape(3, 4)
    y = arranged(x, ("n", "d"), ("b", "n", "s", "d"), SIZES)
    assert y.shape == (2, 3, 1, 4)
    np.testing.assert_array_equal(y[1, :, 0], x)
    np.testing.assert_array_equal(back(y, ("b", "n", "s", "d"), ("n", "b", "d"), SIZES), np.stack([x, x], 1))


def test_several_letters_of_the_batch_become_one_dimension() -> None:
    x = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert arranged(x, ("b", "n", "d"), ("nb", "d"), SIZES).shape == (6, 4)
    np.testing.assert_array_equal(arranged(x, ("b", "n", "d"), ("nb", "d"), SIZES)[1], x[1, 0])


def test_along_a_dimension_without_letters_the_first_element_is_taken() -> None:
    x = np.repeat(np.arange(3)[:, None], 6, 1)
    np.testing.assert_array_equal(arranged(x, ("n", ""), ("n",), SIZES), np.arange(3))


def test_a_dimension_that_has_no_place_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\['t'\] of a value have no place"):
        arranged(np.zeros((7,)), ("t",), ("b",), SIZES)
