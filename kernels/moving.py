"""What devices along mesh axes send each other of attention: parts together, sums in parts, on in a ring,
heads for length.

The functions are for the inside of a manual region over these axes, outermost first; a dimension that lies
over them lies in blocks, in their order. Gathers and scatters go over one axis after the other, along the
dimension in front: so the TPU compiler keeps a scatter one (of another dimension it makes an all-reduce), and
an axis that is cut along the torus has a stage for each of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def ways(axes: Axes) -> int:
    """How many devices there are along the axes."""
    return math.prod(lax.axis_size(a) for a in axes)


def number(axes: Axes) -> Any:
    """Which of them this one is."""
    return lax.axis_index(axes)


def gathered(x: Any, axes: Axes, dim: int) -> Any:
    """All of a dimension, of its parts."""
    shape = x.shape
    for axis in reversed(axes):
        x = lax.all_gather(x, axis, axis=0, tiled=False)
    x = jnp.moveaxis(x.reshape(-1, *shape), 0, dim)
    return x.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def scattered(x: Any, axes: Axes, dim: int) -> Any:
    """This device's part of a dimension of the sum over the devices."""
    sizes = [lax.axis_size(a) for a in axes]
    shape = x.shape
    x = x.reshape(*shape[:dim], math.prod(sizes), -1, *shape[dim + 1 :])
    x = jnp.moveaxis(x, dim, 0)
    x = x.reshape(*sizes, *x.shape[1:])
    for axis in axes:
        x = lax.psum_scatter(x, axis, scatter_dimension=0, tiled=False)
    return x


def on(xs: Sequence[Any], axes: Axes, by: int = 1) -> list[Any]:
    """Values of the device so many places before this one, in the ring of all; None stays none."""
    n = ways(axes)
    pairs = [(i, (i + by) % n) for i in range(n)]
    name = axes[0] if len(axes) == 1 else axes
    return [None if x is None else lax.ppermute(x, name, pairs) for x in xs]


def by_heads(x: Any, axes: Axes, length: int) -> Any:
    """The whole length of this device's share of the heads, dimension 1, of a part of the length of all."""
    return lax.all_to_all(x, axes, split_axis=1, concat_axis=length, tiled=True)


def by_length(x: Any, axes: Axes, length: int) -> Any:
    """The inverse of `by_heads`."""
    return lax.all_to_all(x, axes, split_axis=length, concat_axis=1, tiled=True)
