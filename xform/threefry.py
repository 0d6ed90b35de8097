"""Random bits of threefry keys, element by element: a part of an array draws what the whole array draws.

    random_bits[shape=(6, 8)] key   ->   threefry2x32 of the key and of the numbers of some elements in (6, 8)

The bits of an element are a function of the key and of the element's number in the array, where the key is a
threefry key and `jax_threefry_partitionable` is on, as it is by default. So whoever has a part of an array, a
device or a microbatch, makes the bits of that part alone, and they are the whole array's to the bit.
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

from xform.trace import Value

KEY = "key<fry>"
IMPLEMENTATION = "threefry2x32"
WORD = 1 << 32

Counts = tuple[Value, Value]
"""Numbers of elements: their high and low words, each uint32."""


def draws_by_number(keys: Any) -> bool:
    """Whether the bits that keys draw (a value, or a variable's type) follow from the element's number."""
    return str(keys.dtype) == KEY and bool(jax.config.jax_threefry_partitionable)


def bits(keys: Value, counts: Counts, dtype: Any) -> Value:
    """Bits of an unsigned type, [*keys, *shape], of keys [*keys] and the elements' numbers [*shape].

    Source: jax's `threefry_random_bits` where it is partitionable.
    """
    high, low = words(keys, counts)
    if np.dtype(dtype).itemsize == 8:
        high, low = high.astype(dtype), low.astype(dtype)
        return lax.shift_left(high, lax.full_like(high, 32)) | low
    return (high ^ low).astype(dtype)


def split(keys: Value, counts: Counts) -> Value:
    """Keys [*keys, *shape] split off keys [*keys], of the numbers [*shape] of those that are wanted.

    Source: jax's `threefry_split` where it is partitionable.
    """
    return jax.random.wrap_key_data(jnp.stack(words(keys, counts), -1), impl=IMPLEMENTATION)


def words(keys: Value, counts: Counts) -> Counts:
    """Two words [*keys, *shape] of keys [*keys] and numbers [*shape]."""
    data = jax.random.key_data(keys)
    shape = (*keys.shape, *counts[0].shape)
    halves = [lax.index_in_dim(data, i, axis=-1, keepdims=False) for i in range(2)]
    keyed = [lax.broadcast_in_dim(half, shape, range(half.ndim)) for half in halves]
    numbered = [lax.broadcast_in_dim(n, shape, range(keys.ndim, len(shape))) for n in counts]
    high, low = threefry2x32_p.bind(*keyed, *numbered)
    return high, low


def numbers(places: Sequence[Value], sizes: Sequence[int]) -> Counts:
    """The numbers, row by row in an array of these sizes, of the elements at these places along each
    dimension: [n] uint32 each; the result has the shape [n of each].
    """
    shape = [len(each) for each in places]
    stride = math.prod(sizes)
    is_wide = stride > WORD
    high = low = jnp.zeros(shape, np.uint32)
    for k, (each, size) in enumerate(zip(places, sizes, strict=True)):
        stride //= size
        above, term = times(each, stride) if is_wide else (None, each * np.uint32(stride))
        term = lax.broadcast_in_dim(term, shape, (k,))
        low = low + term
        if above is not None:
            high = high + lax.broadcast_in_dim(above, shape, (k,)) + (low < term).astype(np.uint32)
    return high, low


def times(x: Value, factor: int) -> Counts:
    """The high and low words of uint32 numbers times a number below 2**64, modulo 2**64."""
    high, low = np.uint32(factor // WORD), lax.full_like(x, factor % WORD)
    return lax.mulhi(x, low) + x * high, x * low
