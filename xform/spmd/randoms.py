"""Random numbers, seen from one shard: each device makes the bits of its own part.

    random_bits[shape=(6, 8)] key   ->   threefry2x32 of the key and of the numbers of the elements held here

The bits of an element are a function of the key and of the element's number in the array, where the key is a
threefry key and `jax_threefry_partitionable` is on, as it is by default. So they are made where they are
used, in whatever layout is wanted, and are those of one device to the bit. Of other keys every device makes
all bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from xform.spmd.forms import elementwise
from xform.spmd.layout import Dim, Grid, Laid, whole
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import JaxprEqn, Value, at_source, shape_of

THREEFRY = "key<fry>"
WORD = 1 << 32


def random_bits(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """Bits [*keys, *shape] of threefry keys [*keys], made as they are wanted."""
    (keys,), (out,) = vals, eqn.outvars
    if str(keys.aval.dtype) != THREEFRY or not jax.config.jax_threefry_partitionable:
        if shape_of(out):
            walk.tell(eqn, "its bits depend on the whole shape: every device makes all of them")
        return walk.undivided(eqn, vals)
    aval: Any = eqn.outvars[0].aval
    prefix, rank, dtype = walk.prefix, len(keys.shape), aval.dtype

    def make(want: Laid) -> Value:
        with at_source(eqn, prefix):
            data = jax.random.key_data(walk.get(keys, Laid(want.dims[:rank])))
            counts = numbers(walk.grid, want.dims[rank:])
            return bits(data, counts, dtype)

    laid = Laid((*keys.laid.dims, *whole(shape_of(out)[rank:]).dims))
    return [Val(out.aval, laid, walk.scope, make)]


def bits(keys: Value, counts: tuple[Value, Value], dtype: Any) -> Value:
    """Bits of an unsigned type, [*keys, *shape], of keys [*keys, 2] and the elements' numbers [*shape].

    Source: jax's `threefry_random_bits` where it is partitionable.
    """
    shape = (*keys.shape[:-1], *counts[0].shape)
    halves = [lax.index_in_dim(keys, i, axis=-1, keepdims=False) for i in range(2)]
    keyed = [lax.broadcast_in_dim(half, shape, range(half.ndim)) for half in halves]
    numbered = [lax.broadcast_in_dim(n, shape, range(keys.ndim - 1, len(shape))) for n in counts]
    high, low = threefry2x32_p.bind(*keyed, *numbered)
    if np.dtype(dtype).itemsize == 8:
        high, low = high.astype(dtype), low.astype(dtype)
        return lax.shift_left(high, lax.full_like(high, 32)) | low
    return (high ^ low).astype(dtype)


def numbers(grid: Grid, dims: Sequence[Dim]) -> tuple[Value, Value]:
    """The numbers in the whole array, row by row, of the elements that a device holds: their high and low
    words, each uint32 of the shape there.
    """
    pieces = [piece for dim in dims for piece in dim]
    local = [piece.size // grid.ways(piece.axes) for piece in pieces]
    stride = math.prod(piece.size for piece in pieces)
    is_wide = stride > WORD
    high = low = jnp.zeros(local, np.uint32)
    for k, (piece, size) in enumerate(zip(pieces, local, strict=True)):
        stride //= piece.size
        places = lax.iota(np.uint32, size)
        if piece.axes:
            places = places + lax.axis_index(piece.axes).astype(np.uint32) * np.uint32(size)
        above, term = times(places, stride) if is_wide else (None, places * np.uint32(stride))
        term = lax.broadcast_in_dim(term, local, (k,))
        low = low + term
        if above is not None:
            high = high + lax.broadcast_in_dim(above, local, (k,)) + (low < term).astype(np.uint32)
    shape = grid.local(Laid(tuple(dims)))
    return high.reshape(shape), low.reshape(shape)


def times(x: Value, factor: int) -> tuple[Value, Value]:
    """The high and low words of uint32 numbers times a number below 2**64, modulo 2**64."""
    high, low = np.uint32(factor // WORD), lax.full_like(x, factor % WORD)
    return lax.mulhi(x, low) + x * high, x * low


def each(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """A key of every seed, a clone of every key."""
    return walk.lower(eqn, elementwise(eqn), vals, walk.current_wishes)


HANDLERS = {"random_bits": random_bits, **dict.fromkeys(("random_clone", "random_seed"), each)}
"""How operations of random numbers are lowered; what isn't here takes whole keys."""
