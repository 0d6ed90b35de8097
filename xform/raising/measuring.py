"""What stands under a root: the mean of squares of rows, or their variance, and over which dimensions.

Evaluated for made-up values of each value that it follows from alone; so any way to write it will do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xform.raising.flat import View, size
from xform.raising.following import REDUCTIONS, is_elementary, kind, sources
from xform.raising.points import Points, Unknown, random_known
from xform.trace import Atom, JaxprEqn, Var

PLACES = 4
"""Places in rows that are compared."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """Under a root: factor * (mean of squares, or variance, of x over `axes`, + epsilon); if not exact, then
    for large x at least.
    """

    kind: str
    x: Var
    axes: tuple[int, ...]
    factor: float
    epsilon: float
    exact: bool = True


class Rows:
    """Places in an array: all rows along `axes` through a few elements."""

    def __init__(self, x: Var, axes: Sequence[int]) -> None:
        self.axes, self.sizes = tuple(axes), size(x)
        rng = np.random.default_rng(0)
        self.place = [rng.integers(0, n, PLACES) for n in self.sizes]
        for d in axes:
            # Different places along the rows, as far as there are.
            self.place[d] = np.arange(PLACES) * max(1, self.sizes[d] // PLACES) % self.sizes[d]

    def whole(self, known: Any) -> np.ndarray[Any, Any]:
        """The rows, [places, elements], of made-up values."""
        index = [p.reshape(-1, *[1] * len(self.axes)) for p in self.place]
        for n, d in enumerate(self.axes):
            index[d] = np.arange(self.sizes[d]).reshape(-1, *[1] * (len(self.axes) - 1 - n))
        values = np.asarray(known(tuple(index)), np.float64)
        full = np.broadcast_to(values, (PLACES, *(self.sizes[d] for d in self.axes)))
        return full.reshape(PLACES, -1)

    def of_weight(self, sizes: Sequence[int]) -> tuple[Any, ...]:
        """The places in an array over the axes, dimensions of size 1 added or not."""
        along = iter([self.place[d] for d in self.axes if self.sizes[d] != 1])
        return tuple(np.zeros(PLACES, np.int64) if n == 1 else next(along) for n in sizes)


def mean(kind: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of each row the mean of squares, or the variance."""
    return np.asarray(rows.var(-1) if kind == "layer" else (rows * rows).mean(-1))


def measures(view: View, under: Atom, known: frozenset[Var]) -> Iterator[Measure]:
    """What `under` is of values that it follows from alone, the nearest first."""
    reduced = False

    def opens(eqn: JaxprEqn) -> bool:
        nonlocal reduced
        sums = eqn.primitive.name in REDUCTIONS or eqn.primitive.name == "dot_general"
        reduced |= sums
        return sums or is_elementary(eqn)

    for x in itertools.islice(sources(view, [under], known, opens), 12):
        if reduced and kind(x) == "f":
            for axes in _axes(x, under):
                found = _measure(view, under, x, axes)
                if found is not None:
                    yield found


def _axes(x: Var, under: Atom) -> list[tuple[int, ...]]:
    """Over which dimensions of x it may be, by the sizes that are left."""
    sizes, left = size(x), size(under)
    wide = [d for d, n in enumerate(sizes) if n > 1]
    if len(left) == len(sizes):
        gone = tuple(d for d in wide if left[d] == 1)
        rest = all(left[d] == sizes[d] for d in wide if d not in gone)
        return [gone] if gone and rest else []
    missing = len(sizes) - len(left)
    if missing <= 0:
        return []
    removed = itertools.combinations(range(len(sizes)), missing)
    fits = [r for r in removed if [n for d, n in enumerate(sizes) if d not in r] == list(left)]
    return [tuple(d for d in r if d in wide) for r in fits if any(d in wide for d in r)]


def _measure(view: View, under: Atom, x: Var, axes: tuple[int, ...]) -> Measure | None:
    """The measure that it is of x over these dimensions, if it is one."""
    rows = Rows(x, axes)
    at = _index(x, under, rows)
    made = random_known(x, 1)

    def values(by: float) -> Any:
        known = {x: lambda index: made(index).astype(np.float64) * by}
        found = Points(view, known, wide=True).at(under, at)
        return np.broadcast_to(found, (PLACES,)).astype(np.float64)

    try:
        none, some, more, huge = map(values, (0.0, 1.0, 1e-3, 1e9))
    except Unknown:
        return None
    row = rows.whole(made)
    for what in ("rms", "layer"):
        means = mean(what, row)
        factor = float((some - none)[0] / means[0])
        whole = np.concatenate([some - none, more - none])
        expected = factor * np.concatenate([means, means * 1e-6])
        if factor > 0 and np.isfinite(whole).all() and np.allclose(whole, expected, 1e-7, 1e-15):
            return Measure(what, x, axes, factor, float(none[0]) / factor)
        factor = float(huge[0] / means[0]) * 1e-18
        if factor > 0 and np.isfinite(huge).all() and np.allclose(huge, factor * means * 1e18, 1e-9):
            return Measure(what, x, axes, factor, 0.0, exact=False)
    return None


def _index(x: Var, under: Atom, rows: Rows) -> list[Any]:
    """Where in what is under the root our rows are."""
    left = size(under)
    if len(left) == len(size(x)):
        return [0 if n == 1 else at for n, at in zip(left, rows.place, strict=True)]
    at: list[Any] = []
    for d, n in enumerate(size(x)):  # dimensions of size 1 that are left out are none of `axes`
        if d not in rows.axes and len(at) < len(left) and left[len(at)] == n:
            at.append(rows.place[d])
    return at
