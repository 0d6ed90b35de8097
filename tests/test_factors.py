"""The algebra of factors, and that it is sound: an axis that comes out went in, index by index."""

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from xform.axes import Dim, find_axes
from xform.axes.factors import Factors


def sizes(f: Factors, dim: tuple[int, ...]) -> list[int]:
    return [f.size[leaf] for leaf in f.leaves(dim)]


def test_tying_products_refines_both() -> None:
    f = Factors()
    (a, b), (c,) = f.fresh((6, 4)), f.fresh((24,))
    (d, e) = f.fresh((2, 12))
    f.tie_dim(a + b, c)
    f.tie_dim(d + e, c)
    assert sizes(f, c) == [2, 3, 4]
    assert f.leaves(a) + f.leaves(b) == f.leaves(c) == f.leaves(d) + f.leaves(e)


def test_products_whose_boundaries_disagree_are_tied_up_to_there() -> None:
    f = Factors()
    (a, b, c), (d, e, g) = f.fresh((2, 6, 2)), f.fresh((2, 4, 3))
    f.tie_dim(a + b + c, d + e + g)
    assert f.leaves(a) == f.leaves(d)
    assert f.leaves(b + c) != f.leaves(e + g)


@pytest.mark.parametrize("split_first", [True, False])
def test_the_parts_of_a_product_are_its_factors(split_first: bool) -> None:
    f = Factors()
    (whole,) = f.fresh((15,))
    if split_first:
        f.divide(whole[0], (3, 5))
    part = f.part(whole, 5, 5)
    if not split_first:
        f.divide(whole[0], (3, 5))
    assert f.leaves(part) == f.leaves(whole)[1:]
    assert sizes(f, f.part(whole, 5, 10)) == [2, 5]


def test_parts_follow_the_whole_they_are_tied_to() -> None:
    f = Factors()
    (a,), (b,) = f.fresh((7,)), f.fresh((7,))
    first, second = f.part(a, 0, 3), f.part(b, 0, 3)
    assert f.leaves(first) != f.leaves(second)
    f.tie_dim(a, b)
    assert f.leaves(first) == f.leaves(second)


def test_a_whole_is_the_sum_of_its_parts() -> None:
    f = Factors()
    (a, b, c) = f.fresh((3, 4, 5))
    (one, other) = (f.whole(12, {(0, 3, 1): a, (3, 4, 1): b, (7, 5, 1): c}) for _ in range(2))
    assert f.sum(one[0]) == (a, b, c)
    f.tie_equal_sums()
    assert f.leaves(one) == f.leaves(other)
    (wider,) = (f.whole(13, {(0, 3, 1): a, (3, 4, 1): b, (7, 5, 1): c}),)
    assert f.sum(wider[0]) == ()


def test_sums_of_single_elements_are_not_the_same() -> None:
    f = Factors()
    (one, other) = (f.whole(2, {(0, 1, 1): (), (1, 1, 1): ()}) for _ in range(2))
    f.tie_equal_sums()
    assert f.leaves(one) != f.leaves(other)


SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4)


@st.composite
def moves(draw: Any) -> tuple[list[int], list[tuple[str, Any]]]:
    """A shape, and reshapes, transposes, slices and repetitions that follow each other from there."""
    shape = start = draw(SHAPES)
    steps: list[tuple[str, Any]] = []
    for kind in draw(st.lists(st.sampled_from(("reshape", "transpose", "slice", "repeat")), max_size=6)):
        if kind == "reshape":
            left, shape = math.prod(shape), []
            while left > 1:
                shape.append(draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
                left //= shape[-1]
            steps.append((kind, tuple(shape)))
        elif kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            shape = [shape[i] for i in order]
            steps.append((kind, order))
        elif kind == "slice" and shape:
            at = draw(st.integers(0, len(shape) - 1))
            begin = draw(st.integers(0, shape[at] - 1))
            end, stride = draw(st.integers(begin + 1, shape[at])), draw(st.sampled_from((1, 1, 2)))
            cut = tuple(slice(begin, end, stride) if i == at else slice(None) for i in range(len(shape)))
            shape = [*shape[:at], len(range(begin, end, stride)), *shape[at + 1 :]]
            steps.append((kind, cut))
        elif kind == "repeat" and shape and math.prod(shape) < 500:
            at = draw(st.integers(0, len(shape) - 1))
            shape = [*shape[:at], 2 * shape[at], *shape[at + 1 :]]
            steps.append((kind, at))
    return start, steps


def follow(x: Any, steps: list[tuple[str, Any]], numpy: Any) -> Any:
    for kind, how in steps:
        match kind:
            case "reshape":
                x = x.reshape(how)
            case "transpose":
                x = x.transpose(how)
            case "slice":
                x = x[how]
            case "repeat":
                x = numpy.repeat(x, 2, axis=how)
    return x


def coordinates(dims: tuple[Dim, ...], shape: tuple[int, ...]) -> list[tuple[Any, np.ndarray]]:
    """For every factor its index at every element of an array, in order."""
    found = []
    for dim, index in zip(dims, np.indices(shape), strict=True):
        for factor in reversed(dim):
            found.append((factor, index % factor.size))
            index = index // factor.size
    return found


@hypothesis.given(moves())
@hypothesis.settings(deadline=None, max_examples=150)
def test_an_axis_that_comes_out_went_in(case: tuple[list[int], list[tuple[str, Any]]]) -> None:
    """Along each axis that it shares with the input, an element of the result was at the same index there."""
    shape, steps = case
    x = np.arange(math.prod(shape)).reshape(shape)
    y = follow(x, steps, np)
    axes = find_axes(jax.make_jaxpr(lambda x: follow(x, steps, jax.numpy))(x))
    (before,), (after,) = axes.jaxpr.invars, axes.jaxpr.outvars
    went_in = coordinates(axes.root[before], x.shape)
    for factor, index in coordinates(axes.root[after], y.shape):
        same = [there for other, there in went_in if other is factor]
        assert len(same) <= 1  # nothing here makes an axis meet itself
        for there in same:
            np.testing.assert_array_equal(there.reshape(-1)[y], index)
