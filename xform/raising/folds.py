"""Values at points of equations that take many elements for one: reductions, running sums, products.

What is summed over is enumerated along a new leading dimension of the index, in pieces where that is much. A
rule is as in `lookups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xform.raising.indices import Array, Index, dtype_of, inserted, replaced
from xform.raising.lookups import Ask, Rule
from xform.trace import JaxprEqn, shape_of

_MOST = 1 << 23
"""Elements that are enumerated at once."""


def _rank(index: Index) -> int:
    return max((i.ndim for i in index), default=0)


def _pieces(sizes: Sequence[int], index: Index) -> Iterator[list[Array]]:
    """Indices of all that is enumerated, each dimension along a leading one of its own, some at a time."""
    rank = _rank(index)
    points = math.prod(np.broadcast_shapes(*(i.shape for i in index)))
    rest = points * math.prod(sizes[1:])
    step = max(1, _MOST // max(rest, 1)) if sizes else 1
    for first in range(0, sizes[0], step):
        ranges = [np.arange(first, min(sizes[0], first + step)), *map(np.arange, sizes[1:])]
        # The first of them is the outermost dimension.
        yield [r.reshape(-1, *[1] * (rank + len(sizes) - 1 - n)) for n, r in enumerate(ranges)]


def _lead(value: Array, shape: Sequence[int], rank: int) -> Array:
    """The value with its enumerated dimensions in full, whether it varies along them or not."""
    value = value.reshape(*[1] * (rank + len(shape) - value.ndim), *value.shape)
    return np.broadcast_to(value, (*shape, *value.shape[len(shape) :]))


def _summable(x: Array) -> Array:
    """Small floats are summed in float32."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "biu" else x


def _reduction(fold: Callable[..., Any], join: Callable[..., Any]) -> Rule:
    def rule(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array | None:
        axes, sizes = sorted(eqn.params["axes"]), shape_of(eqn.invars[0])
        if not axes:
            return ask(0, index)
        if 0 in sizes:
            return None
        rank, total = _rank(index), None
        for piece in _pieces([sizes[d] for d in axes], index):
            value = _lead(ask(0, inserted(index, axes, piece)), [len(p) for p in piece], rank)
            part = fold(_summable(value), axis=tuple(range(len(axes))))
            total = part if total is None else join(total, part)
        return total

    return rule


def _along(axis: int, index: Index, size: int, ask: Ask) -> Array:
    """The operand along a whole axis, as the leading dimension."""
    (piece,) = [np.arange(size).reshape(-1, *[1] * _rank(index))]
    return _lead(ask(0, replaced(index, axis, piece)), [size], _rank(index))


def _running(accumulate: Callable[..., Array]) -> Rule:
    def rule(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array | None:
        axis, backwards = eqn.params["axis"], eqn.params["reverse"]
        whole = _summable(_along(axis, index, shape_of(eqn.invars[0])[axis], ask))
        whole = whole[::-1] if backwards else whole
        whole = accumulate(whole, axis=0)
        whole = whole[::-1] if backwards else whole
        return picked(whole, index[axis])

    return rule


def picked(whole: Array, at: Array) -> Array:
    """Of the leading dimension what `at` says, point by point."""
    rank = max(whole.ndim - 1, at.ndim)
    whole = whole.reshape(len(whole), *[1] * (rank + 1 - whole.ndim), *whole.shape[1:])
    places = [np.arange(n).reshape(-1, *[1] * (rank - 1 - d)) for d, n in enumerate(whole.shape[1:])]
    places = [p if p.size > 1 else np.zeros((), np.int64) for p in places]
    return np.asarray(whole[(at, *places)])


def _arg(find: Callable[..., Any]) -> Rule:
    def rule(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
        (axis,) = eqn.params["axes"]
        size, rank = shape_of(eqn.invars[0])[axis], _rank(index)
        piece = np.arange(size).reshape(-1, *[1] * rank)
        return np.asarray(find(_lead(ask(0, inserted(index, [axis], [piece])), [size], rank), axis=0))

    return rule


def _dot_general(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array | None:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    shapes = [shape_of(v) for v in eqn.invars[:2]]
    sizes = [shapes[0][d] for d in left]
    if 0 in sizes:
        return None
    batch, rank = len(left_batch), _rank(index)
    left_free = [d for d in range(len(shapes[0])) if d not in (*left, *left_batch)]
    right_free = [d for d in range(len(shapes[1])) if d not in (*right, *right_batch)]

    def operand(number: int, summed: Any, shared: Any, free: Any, first: int, piece: list[Array]) -> Array:
        at: dict[int, Array] = dict(zip(summed, piece, strict=True))
        at.update(zip(shared, index[:batch], strict=True))
        at.update(zip(free, index[first : first + len(free)], strict=True))
        value = ask(number, tuple(at[d] for d in range(len(at))))
        whole = _lead(value, [len(p) for p in piece], rank)
        return whole.reshape(-1, *whole.shape[len(piece) :])

    dtype = eqn.params["preferred_element_type"] or dtype_of(eqn.outvars[0])
    total = None
    for piece in _pieces(sizes, index) if sizes else [[]]:
        x = operand(0, left, left_batch, left_free, batch, piece)
        y = operand(1, right, right_batch, right_free, batch + len(left_free), piece)
        part = contracted(x, y, dtype)
        total = part if total is None else total + part
    return total


def contracted(x: Array, y: Array, dtype: Any) -> Array:
    """The sum over the leading dimension of x * y, which broadcast along the others."""
    wide = np.result_type(x.dtype, y.dtype) if x.dtype == y.dtype == np.float64 else None
    kind = np.dtype(dtype)
    if wide is None:
        wide = kind if kind.kind in "iufc" and kind.itemsize >= 4 else np.dtype(np.float32)
        if kind == np.bool_:
            wide = np.dtype(np.int64)
    x, y = x.astype(wide, copy=False), y.astype(wide, copy=False)
    rank = max(x.ndim, y.ndim) - 1
    x = x.reshape(len(x), *[1] * (rank + 1 - x.ndim), *x.shape[1:])
    y = y.reshape(len(y), *[1] * (rank + 1 - y.ndim), *y.shape[1:])
    rows = [d for d in range(1, rank + 1) if x.shape[d] > 1 and y.shape[d] == 1]
    columns = [d for d in range(1, rank + 1) if y.shape[d] > 1 and x.shape[d] == 1]
    both = [d for d in range(1, rank + 1) if d not in rows and d not in columns]
    a = x.transpose(*both, *rows, *columns, 0).reshape(
        *(x.shape[d] for d in both), math.prod(x.shape[d] for d in rows), len(x)
    )
    b = y.transpose(*both, 0, *columns, *rows).reshape(
        *(y.shape[d] for d in both), len(y), math.prod(y.shape[d] for d in columns)
    )
    made = (a @ b).reshape(
        *(x.shape[d] for d in both), *(x.shape[d] for d in rows), *(y.shape[d] for d in columns)
    )
    order = [*both, *rows, *columns]
    return np.asarray(made.transpose([order.index(d) for d in range(1, rank + 1)]))


FOLDS: Mapping[str, Rule] = {
    "reduce_sum": _reduction(np.sum, np.add),
    "reduce_prod": _reduction(np.prod, np.multiply),
    "reduce_max": _reduction(np.max, np.maximum),
    "reduce_min": _reduction(np.min, np.minimum),
    "reduce_and": _reduction(np.bitwise_and.reduce, np.bitwise_and),
    "reduce_or": _reduction(np.bitwise_or.reduce, np.bitwise_or),
    "cumsum": _running(np.cumsum),
    "cumprod": _running(np.cumprod),
    "cummax": _running(np.maximum.accumulate),
    "cummin": _running(np.minimum.accumulate),
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "dot_general": _dot_general,
}
