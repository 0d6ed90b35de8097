"""Puts arrays on a mesh, whether every process sees all of it or not, and lays them out before a program is
known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.state import Element, Placed


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


def put_row(row: Sequence[Any], sharding: NamedSharding | None) -> Any:
    """Arrays of one type, or elements of other stacks, stacked on the mesh; a single one as it is."""
    arrays = [x.array() if isinstance(x, Element) else x for x in row]
    if len(arrays) == 1:
        return put(arrays[0], sharding)
    if sharding is None:
        return jnp.stack(arrays)
    there = set(sharding.mesh.devices.flat)
    if all(isinstance(x, jax.Array) and x.sharding.device_set == there for x in arrays):
        on_device = NamedSharding(sharding.mesh, sharding.spec)
        return put(_together(on_device)(*arrays), sharding)
    if jax.dtypes.issubdtype(dtype_of(arrays[0]), jax.dtypes.prng_key):
        return put(jnp.stack(arrays), sharding)
    return put(np.stack([np.asarray(x) for x in arrays]), sharding)


def taken_apart(placed: Placed) -> Any:
    """The model's own tree, each array of a row laid out as the row is."""
    leaves: dict[int, Any] = {}
    for group, array in zip(placed.layout.groups, placed.arrays, strict=False):
        leaves.update(zip(group, [array] if len(group) == 1 else _rows(array), strict=True))
    return jax.tree.unflatten(placed.layout.tree, [leaves[i] for i in range(len(leaves))])


def _rows(array: Any) -> Sequence[Any]:
    size = array.shape[0]
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return [array[i] for i in range(size)]
    layout = NamedSharding(array.sharding.mesh, PartitionSpec(*array.sharding.spec[1:]))
    if array.sharding.memory_kind not in (None, layout.memory_kind):
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, array.sharding.spec))
    return _apart(size, layout)(array)


@functools.cache
def _together(layout: NamedSharding) -> Any:
    """Stacks arrays on the mesh; one function a layout, so that each type is compiled once."""
    return jax.jit(lambda *xs: jnp.stack(xs), out_shardings=layout)


@functools.cache
def _apart(size: int, layout: NamedSharding) -> Any:
    """The rows of a stack, each laid out so."""
    return jax.jit(lambda x: [x[i] for i in range(size)], out_shardings=[layout] * size)


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
