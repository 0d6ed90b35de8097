"""Whether a bias is ALiBi: for each head a line over the positions of keys, or over their distance.

    slopes[n] * (s - t)      slopes[n] * s      -slopes[n] * |t - s|      slopes[n] * (cumsum(mask) - 1)

What comes from data is looked at as if all of it were one: no padding, slopes of one.
"""

from __future__ import annotations

import numpy as np

from xform.raising.dims import Sizes, place
from xform.raising.flat import View, dtype_of
from xform.raising.indices import Array, Index
from xform.raising.meaning import Tensor
from xform.raising.points import Known, Points, Unknown, depends
from xform.trace import Var

_KEYS = 64


def is_alibi(view: View, tensor: Tensor, sizes: Sizes) -> bool:
    """Whether it is a line over keys for each head, at a few of them."""
    letters = "".join(tensor.dims)
    if "s" not in letters or sizes["s"] < 3:
        return False
    keys = np.arange(min(sizes["s"], _KEYS))
    queries = np.arange(min(sizes["t"], _KEYS)) if "t" in letters else np.zeros(1, np.int64)
    heads = {c: np.arange(sizes[c]) for c in "ng" if c in letters}
    if not heads:
        return False
    at = {"s": keys, "t": queries[:, None]}
    at |= {c: x.reshape(-1, *[1] * (2 + i)) for i, (c, x) in enumerate(reversed(heads.items()))}
    known: dict[Var, Known] = {v: _ones(v) for v in depends(view, tensor.atom)}
    try:
        value = Points(view, known).at(tensor.atom, place(tensor.dims, at, sizes)).astype(np.float64)
    except Unknown:
        return False
    value = value.reshape(-1, *np.broadcast_shapes(value.shape[-2:], (1, 1)))
    hidden = value <= -9999
    value = np.where(hidden, np.nan, value)
    return _is_line(value, keys - queries[:, None] if len(queries) > 1 else keys[None, :])


def _ones(v: Var) -> Known:
    def values(index: Index) -> Array:
        return np.ones((), dtype_of(v))

    return values


def _is_line(value: Array, apart: Array) -> bool:
    """Whether each head's values [heads, t, s] are a slope times s, or times |s - t|, and something a row."""
    for x in (apart, np.abs(apart)):
        steps, by = np.diff(value, axis=-1), np.diff(np.broadcast_to(x, value.shape[1:]), axis=-1)
        slopes = (steps / np.where(by == 0, np.nan, by)).reshape(len(value), -1)
        some = ~np.isnan(slopes)
        if not some.any(axis=1).all():
            continue
        low, high = np.nanmin(slopes, axis=1), np.nanmax(slopes, axis=1)
        even = np.isclose(low, high, rtol=2e-2, atol=0).all() and (np.abs(low) > 0).all()
        still = (np.abs(np.where(by == 0, steps, 0.0)) <= 1e-6 * np.abs(low)[:, None, None]) | np.isnan(steps)
        if even and still.all():
            return True
    return False
