"""Puts arrays on a mesh, whether every process sees all of it or not, and lays them out before a program is
known.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def put(x: Any, sharding: NamedSharding | None) -> Any:
    """x on the mesh. Across processes each must hold the same whole value, and keeps only its own shards."""
    if sharding is None:
        return x
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    if jax.dtypes.issubdtype(dtype_of(x), jax.dtypes.prng_key):
        data = put(jax.random.key_data(x), NamedSharding(sharding.mesh, sharding.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def provisional(tree: Any, mesh: Mesh) -> Any:
    """A layout for arrays whose program is not known yet: a tree of NamedShardings like `tree`.

    Each lies over as many mesh axes as divide its largest dimension that any divides: what no plan asks for,
    and what no device's memory overflows from.
    """
    return jax.tree.map(lambda x: NamedSharding(mesh, _over_all_axes(np.shape(x), mesh)), tree)


def _over_all_axes(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    best: tuple[int, int, tuple[str, ...]] = (1, 0, ())
    for i in sorted(range(len(shape)), key=lambda i: -shape[i]):
        axes: tuple[str, ...] = ()
        for axis, size in mesh.shape.items():
            if size > 1 and shape[i] % math.prod(mesh.shape[a] for a in (*axes, axis)) == 0:
                axes = (*axes, axis)
        ways = math.prod(mesh.shape[a] for a in axes)
        if ways > best[0]:
            best = (ways, i, axes)
    _, dimension, axes = best
    return PartitionSpec(*[None] * dimension, axes) if axes else PartitionSpec()


def dtype_of(x: Any) -> Any:
    """The dtype of an array, a ShapeDtypeStruct or a Python scalar."""
    return x.dtype if hasattr(x, "dtype") else np.result_type(x)
