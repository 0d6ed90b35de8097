"""Letters for the dimensions of tokens, in whatever way they were put together, taken apart or left out.

logits [b, t, v]  ->  [b, t - 1, v]  ->  [b * (t - 1), v]      "A", "B"  ->  "AB"
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xform.raising.indices import Array


def named(
    tokens: Sequence[int], axis: int, grid: Sequence[Array]
) -> tuple[tuple[str, ...], list[str], dict[str, int], list[int]] | None:
    """Letters for the tokens' dimensions under the exponential, and for those of the product: its indices for
    each token are `grid`. And their sizes, and where each dimension of the product starts.
    """
    rank = len(tokens) + 1
    full = [g.reshape(*[1] * (rank - g.ndim), *g.shape) for g in grid]
    full = [np.squeeze(g, axis) for g in full]
    varies = [[_varies(g, i) for i in range(len(tokens))] for g in full]
    names = iter("ABCEGHIJKLMOPQRSTUWXYZ")
    sizes: dict[str, int] = {}
    ours, theirs = [""] * len(tokens), [""] * len(full)
    for i, n in enumerate(tokens):
        mine = [j for j in range(len(full)) if varies[j][i]]
        if len(mine) > 1:
            if any(sum(varies[j]) > 1 for j in mine):
                return None
            for j in mine:
                theirs[j] = next(names)
                sizes[theirs[j]] = int(full[j].max() - full[j].min()) + 1
                ours[i] += theirs[j]
        elif mine:
            ours[i] = next(names)
            sizes[ours[i]] = n
            theirs[mine[0]] += ours[i]
    starts = [int(g.min()) if g.size else 0 for g in full]
    place_of: dict[str, Array] = {}
    for i, dim in enumerate(ours):
        along = np.arange(tokens[i]).reshape([-1 if k == i else 1 for k in range(len(tokens))])
        if dim:
            if math.prod(sizes[c] for c in dim) != tokens[i]:
                return None
            place_of |= dict(zip(dim, np.unravel_index(along, [sizes[c] for c in dim]), strict=True))
    for g, dim, start in zip(full, theirs, starts, strict=True):
        linear: Array = np.zeros((), np.int64)
        for c in dim:
            linear = linear * sizes[c] + place_of[c]
        if not (np.broadcast_to(linear + start, np.broadcast_shapes(linear.shape, g.shape)) == g).all():
            return None
    return tuple(ours), theirs, sizes, starts


def _varies(g: Array, axis: int) -> bool:
    return g.shape[axis] > 1 and bool((g != np.take(g, [0], axis)).any())


def grouped(letters: str, sizes: dict[str, int], shape: Sequence[int]) -> tuple[str, ...] | None:
    """Letters for the dimensions of a shape, that are these in order, some together."""
    left, found = list(letters), []
    for n in shape:
        dim = ""
        while math.prod(sizes[c] for c in dim) < n and left:
            dim += left.pop(0)
        if math.prod(sizes[c] for c in dim) != n:
            return None
        found.append(dim)
    return None if left else tuple(found)
