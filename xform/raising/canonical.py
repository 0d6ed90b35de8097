"""Values as an operation takes them: dimensions apart, in the operation's order, one letter each.

x [b, t, n·g, d]  ->  [b, n, g, t, d]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from xform.trace import Value


def apart(x: Value, dims: Sequence[str], sizes: Mapping[str, int]) -> tuple[Value, str]:
    """`x` with every letter of its dimensions a dimension of its own, and the letters.

    Along a dimension without letters nothing changes: its first element is taken.
    """
    x = x[tuple(slice(None) if d else slice(0, 1) for d in dims)] if x.ndim else x
    letters = "".join(dims)
    return jnp.reshape(x, [sizes[c] for c in letters]), letters


def arranged(x: Value, dims: Sequence[str], order: Sequence[str], sizes: Mapping[str, int]) -> Value:
    """`x` with dimensions in `order`, each entry the letters that it is made of; it is repeated along letters
    that it lacks.
    """
    x, have = apart(x, dims, sizes)
    wanted = "".join(order)
    if unknown := set(have) - set(wanted):
        raise ValueError(f"dimensions {sorted(unknown)} of a value have no place in {list(order)}")
    x = jnp.transpose(x, [have.index(c) for c in wanted if c in have])
    x = jnp.expand_dims(x, [i for i, c in enumerate(wanted) if c not in have])
    x = jnp.broadcast_to(x, [sizes[c] for c in wanted])
    return jnp.reshape(x, [math.prod(sizes[c] for c in entry) for entry in order])


def back(x: Value, order: Sequence[str], dims: Sequence[str], sizes: Mapping[str, int]) -> Value:
    """The inverse of `arranged`, for a value that has all letters: from `order` to `dims`."""
    x, have = apart(x, order, sizes)
    wanted = "".join(dims)
    gone = tuple(i for i, c in enumerate(have) if c not in wanted)  # of size 1
    x, have = jnp.squeeze(x, gone), "".join(c for c in have if c in wanted)
    x = jnp.transpose(x, [have.index(c) for c in wanted])
    return jnp.reshape(x, [math.prod(sizes[c] for c in dim) for dim in dims])
