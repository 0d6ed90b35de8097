"""The greatest and the least over mesh axes, as on one device: NaN, ties and derivatives too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.trace import Value


def with_derivative(
    extreme: Callable[[Value], Value], x: Value, dims: Sequence[int], axes: tuple[str, ...]
) -> Value:
    """The extreme of `x` over some dimensions and mesh axes, with the derivative that it has on one device:
    the mean of those of all elements that attain it. Of the collective itself jax knows none.
    """
    found = jax.custom_jvp(lambda x: extreme(x))

    @found.defjvp
    def derivative(values: Any, tangents: Any) -> tuple[Value, Value]:
        ((x,), (dx,)) = values, tangents
        y = found(x)
        here = (x == jax.lax.expand_dims(y, dims)).astype(x.dtype)
        total, count = (jax.lax.psum(terms.sum(dims), axes) for terms in (here * dx, here))
        return y, total / count

    return found(x)


def of_all(x: Value, axes: tuple[str, ...], reduced: Callable[..., Value]) -> Value:
    """The greatest or least over mesh axes. XLA's CPU collectives drop NaN: it is asked for apart."""
    if x.dtype == np.bool_:
        return reduced(x.astype(np.int32), axes).astype(np.bool_)
    found = reduced(x, axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    odd = jax.lax.pmax(jnp.isnan(x).astype(np.int8), axes)
    return jnp.where(odd > 0, jnp.full_like(found, jnp.nan), found)
