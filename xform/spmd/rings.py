"""All-gather and reduce-scatter built of permutes, which every TPU starts and finishes on its own.

On chips whose compiler runs gathers and scatters while nothing else runs (v5p, v6e), a ring of permutes takes
their place where something else is to run beside them. Both directions of the ring are used. The bytes are
those of the collective.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xform.trace import Value

RINGS = ("ring_gather", "ring_scatter")
"""The names of the calls that these are, in a program."""


def gather(x: Value, axis: str, n: int, dim: int) -> Value:
    """All-gather of dimension `dim` over a mesh axis of n devices, tiled."""

    def ring_gather(x: Value) -> Value:
        here, size = jax.lax.axis_index(axis), x.shape[dim]
        shape = (*x.shape[:dim], size * n, *x.shape[dim + 1 :])
        whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, here * size, dim)
        for steps, way in (((n - 1 + 1) // 2, 1), ((n - 1) // 2, -1)):
            part = x
            for k in range(1, steps + 1):
                part = jax.lax.ppermute(part, axis, [(i, (i + way) % n) for i in range(n)])
                at = (here - way * k) % n * size
                whole = jax.lax.dynamic_update_slice_in_dim(whole, part, at, dim)
        return whole

    return jax.jit(ring_gather)(x)


def scatter(x: Value, axis: str, n: int, dim: int) -> Value:
    """Reduce-scatter of dimension `dim` over a mesh axis of n devices, tiled."""

    def ring_scatter(x: Value) -> Value:
        here, size = jax.lax.axis_index(axis), x.shape[dim] // n

        def block(k: Value) -> Value:
            return jax.lax.dynamic_slice_in_dim(x, k % n * size, size, dim)

        total = block(here)
        # The sum for a device starts at the farthest one of each half of the ring, and is added to on the
        # way.
        for steps, way in (((n - 1 + 1) // 2, 1), ((n - 1) // 2, -1)):
            if not steps:
                continue
            part = block(here + way * steps)
            for k in range(steps - 1, -1, -1):
                part = jax.lax.ppermute(part, axis, [(i, (i + way) % n) for i in range(n)])
                if k:
                    part = part + block(here + way * k)
            total = total + part
        return total

    return jax.jit(ring_scatter)(x)
