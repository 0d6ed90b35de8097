"""Where in an operand the numbers of a result are, for equations that only move them.

    y = transpose[permutation=(1, 0)] x        y[i, j] is x[j, i]
    y = reshape[new_sizes=(6, 5)] x            y[i, j] is x[i // 3, i % 3, j]

An index is a tuple of integer arrays that broadcast with each other, one a dimension. Dimension by dimension,
so that what runs over rows and what runs over columns stay small arrays as long as they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xform.trace import JaxprEqn, shape_of

Array = np.ndarray[Any, Any]
Index = tuple[Array, ...]
Groups = list[tuple[list[int], list[int]]]

ZERO: Array = np.zeros((), np.int64)

_SAME = """
    copy copy_p convert_element_type device_put layout_constraint name optimization_barrier preduced pvary
    reduce_precision reduced_vary_cast relayout reshard sharding_constraint stop_gradient vary_unreduced_cast
    xla_metadata_value
"""
SAME = frozenset(_SAME.split())
"""The results are the operands, element for element, cast at most."""


def dtype_of(v: Any) -> np.dtype[Any]:
    """The dtype of a variable's or a literal's numbers."""
    dtype: np.dtype[Any] = np.dtype(v.aval.dtype)
    return dtype


def groups(old: Sequence[int], new: Sequence[int]) -> Groups:
    """For a reshape, which dimensions of `old` become which of `new`; those of size 1 in none."""
    olds = [d for d, n in enumerate(old) if n != 1]
    news = [d for d, n in enumerate(new) if n != 1]
    found: Groups = []
    while olds and news:
        left, right = [olds.pop(0)], [news.pop(0)]
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            if a < b:
                left.append(olds.pop(0))
            else:
                right.append(news.pop(0))
        found.append((left, right))
    return found


def source(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index] | None:
    """Result `k` at `index`: which operand it is, and where in it; None where the equation does more than
    move.
    """
    if eqn.primitive.name in SAME:
        return k, index
    rule = _MOVES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, k, index)


def inserted(index: Index, axes: Sequence[int], values: Sequence[Array]) -> Index:
    """The index with `values` put in as dimensions `axes` of what it becomes."""
    rest, made = list(index), dict(zip(axes, values, strict=True))
    return tuple(made[d] if d in made else rest.pop(0) for d in range(len(index) + len(made)))


def replaced(index: Index, axis: int, value: Array) -> Index:
    return (*index[:axis], value, *index[axis + 1 :])


def _broadcast(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    sizes, dims = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
    return 0, tuple(ZERO if n == 1 else index[d] for n, d in zip(sizes, dims, strict=True))


def _reshape(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index] | None:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None or 0 in old:
        return None
    at = [ZERO] * len(old)
    for left, right in groups(old, new):
        linear = index[right[0]]
        for d in right[1:]:
            linear = linear * new[d] + index[d]
        for d in reversed(left[1:]):
            linear, at[d] = np.divmod(linear, old[d])
        at[left[0]] = linear
    return 0, tuple(at)


def _squeeze(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    axes = eqn.params["dimensions"]
    return 0, inserted(index, axes, [ZERO] * len(axes))


def _expand(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    return 0, tuple(at for d, at in enumerate(index) if d not in eqn.params["dimensions"])


def _transpose(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    at = dict(zip(eqn.params["permutation"], index, strict=True))
    return 0, tuple(at[d] for d in range(len(index)))


def _rev(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    sizes, axes = shape_of(eqn.invars[0]), eqn.params["dimensions"]
    return 0, tuple(sizes[d] - 1 - at if d in axes else at for d, at in enumerate(index))


def _slice(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    starts = eqn.params["start_indices"]
    steps = eqn.params["strides"] or [1] * len(starts)
    moved = zip(index, starts, steps, strict=True)
    return 0, tuple(at if (first, step) == (0, 1) else at * step + first for at, first, step in moved)


def _split(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    axis, before = eqn.params["axis"], sum(eqn.params["sizes"][:k])
    return 0, replaced(index, axis, index[axis] + before)


def _unstack(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    return 0, inserted(index, [eqn.params["axis"]], [np.asarray(k)])


def _tile(eqn: JaxprEqn, k: int, index: Index) -> tuple[int, Index]:
    sizes = shape_of(eqn.invars[0])
    moved = zip(index, sizes, eqn.params["reps"], strict=True)
    return 0, tuple(at if reps == 1 else at % size for at, size, reps in moved)


_MOVES: Mapping[str, Callable[[JaxprEqn, int, Index], tuple[int, Index] | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "transpose": _transpose,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "tile": _tile,
}

MOVEMENT = SAME | frozenset(_MOVES)
"""The primitives that `source` knows."""
