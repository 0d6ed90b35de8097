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

from xform.state import Order, Placed, order_at, plain


def put(x: Any, sharding: NamedSharding | None) -> Any:
    """x on the mesh. Across processes each must hold the same whole value, and keeps only its own shards."""
    if sharding is None:
        return x
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(_in_memory(x), sharding)
    if jax.dtypes.issubdtype(dtype_of(x), jax.dtypes.prng_key):
        data = put(jax.random.key_data(x), NamedSharding(sharding.mesh, sharding.spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _in_memory(x: Any) -> Any:
    """What one CPU has, as the numbers that they are: an array of a device is cut up by a program, which jax
    compiles for each shape.
    """
    if not isinstance(x, jax.Array) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    devices: list[Any] = list(x.sharding.device_set)
    return np.asarray(x) if len(devices) == 1 and devices[0].platform == "cpu" else x


def put_row(row: Sequence[Any], sharding: NamedSharding | None, order: Order | None = None) -> Any:
    """Arrays of one type, or elements of other stacks, stacked on the mesh; a single one as it is. In this
    order of its rows, where there is one.
    """
    arrays = list(map(plain, row))
    if len(arrays) == 1 and order is None:
        return put(arrays[0], sharding)
    if sharding is None:
        return _stacked(arrays, order)
    there = set(sharding.mesh.devices.flat)
    if all(isinstance(x, jax.Array) and x.sharding.device_set == there for x in arrays):
        on_device = NamedSharding(sharding.mesh, sharding.spec)
        return put(_together(on_device, order)(*arrays), sharding)
    if jax.dtypes.issubdtype(dtype_of(arrays[0]), jax.dtypes.prng_key):
        return put(_stacked(arrays, order), sharding)
    hosted = [np.asarray(x) for x in arrays]
    whole = hosted[0] if len(hosted) == 1 else np.stack(hosted)
    return put(whole if order is None else order.of(whole), sharding)


def _stacked(arrays: Sequence[Any], order: Order | None) -> Any:
    whole = arrays[0] if len(arrays) == 1 else jnp.stack(arrays)
    return whole if order is None else order.of(whole)


def taken_apart(placed: Placed) -> Any:
    """The model's own tree, each array of a row laid out as the row is."""
    leaves: dict[int, Any] = {}
    layout = placed.layout
    for number, (group, array) in enumerate(zip(layout.groups, placed.arrays, strict=False)):
        if (order := order_at(layout.orders, number)) is not None:
            array = _in_own_order(array, order)
        leaves.update(zip(group, [array] if len(group) == 1 else _rows(array), strict=True))
    return jax.tree.unflatten(layout.tree, [leaves[i] for i in range(len(leaves))])


def _in_own_order(array: Any, order: Order) -> Any:
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return order.back(array)
    own = array.sharding
    on_device = NamedSharding(own.mesh, own.spec)
    return jax.device_put(_back(on_device, order)(jax.device_put(array, on_device)), own)


def _rows(array: Any) -> Sequence[Any]:
    size = array.shape[0]
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return [array[i] for i in range(size)]
    layout = NamedSharding(array.sharding.mesh, PartitionSpec(*array.sharding.spec[1:]))
    if array.sharding.memory_kind not in (None, layout.memory_kind):
        array = jax.device_put(array, NamedSharding(array.sharding.mesh, array.sharding.spec))
    return _apart(size, layout)(array)


@functools.cache
def _together(layout: NamedSharding, order: Order | None) -> Any:
    """Stacks arrays on the mesh; one function a layout, so that each type is compiled once."""
    return jax.jit(lambda *xs: _stacked(xs, order), out_shardings=layout)


@functools.cache
def _back(layout: NamedSharding, order: Order) -> Any:
    """The model's own order of what lies so, laid out the same."""
    return jax.jit(order.back, out_shardings=layout)


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
