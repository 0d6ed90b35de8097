"""Values as an operation takes them: dimensions apart, in the operation's order, one letter each.

x [b, t, n·g, d]  ->  [b, n, g, t, d]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from xform.trace import Value


def apart(x: Value, dims: Sequence[str], sizes: Mapping[str, int]) -> tuple[Value, str]:
    """`x` with every letter of its dimensions a dimension of its own, and the letters."""
    letters = "".join(dims)
    return jnp.reshape(x, [sizes[c] for c in letters]), letters


def arranged(
    x: Value, dims: Sequence[str], order: Sequence[str], sizes: Mapping[str, int], broadcast: bool = True
) -> Value:
    """`x` with dimensions in `order`: each entry the letters that it is made of; a letter that `x` lacks is
    repeated, or with broadcast=False the entry is of size 1, where `x` has none of its letters.
    """
    x, have = apart(x, dims, sizes)
    wanted = "".join(order)
    x = jnp.transpose(x, [have.index(c) for c in wanted if c in have])
    if unknown := set(have) - set(wanted):
        raise ValueError(f"dimensions {sorted(unknown)} of a value have no place in {list(order)}")
    x = jnp.expand_dims(x, [i for i, c in enumerate(wanted) if c not in have])
    shape, at = [], 0
    for entry in order:
        here = set(entry) & set(have)
        for c in entry:
            repeat = broadcast or here
            shape.append(sizes[c] if c in have or repeat else 1)
            at += 1
    if tuple(shape) != x.shape:
        x = jnp.broadcast_to(x, shape)
    ends, start = [], 0
    for entry in order:
        ends.append(math.prod(shape[start : start + len(entry)]))
        start += len(entry)
    return jnp.reshape(x, ends)


def back(x: Value, order: Sequence[str], dims: Sequence[str], sizes: Mapping[str, int]) -> Value:
    """The inverse of `arranged`, for a value that has all letters: from `order` to `dims`."""
    x, have = apart(x, order, sizes)
    x = jnp.transpose(x, [have.index(c) for c in "".join(dims)])
    return jnp.reshape(x, [math.prod(sizes[c] for c in dim) for dim in dims])
