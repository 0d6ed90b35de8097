"""Which keys each query sees, as tokamax's splash attention takes it: causal, an array, segments.

a Band, [segments], [mask]     ->     Seen: what the kernel gets, for the whole batch or row by row
                                      sees_some: which queries see a key at all
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.kernels.attention import seen_of
from xform.kernels.blocks import Sizes
from xform.ops import Band

CAUSAL = Band(right=0)


class Seen:
    """What each query sees, as operands for the kernel: an array of booleans, segments, or neither."""

    def __init__(
        self,
        band: Band,
        mask: Any,
        segments: tuple[Any, Any] | None,
        lengths: tuple[int, int],
        sizes: Sizes,
    ) -> None:
        t, s = lengths
        self.causal = band == CAUSAL and mask is None
        if mask is not None or not is_native(band):
            whole = seen_of(band, None, mask, t, s)
            mask = whole if mask is None else whole.reshape(mask.shape)
            mask = pad(pad(mask, -2, sizes.rows, False), -1, sizes.keys, False)
        elif segments is None and sizes.keys > s and (band.is_full or t > s):
            # Keys of the padding are of a segment that no query is of.
            segments = jnp.zeros((1, t), jnp.int32), jnp.zeros((1, s), jnp.int32)
        if segments is not None:
            own, others = (x.astype(jnp.int32) for x in segments)
            segments = pad(own, 1, sizes.rows, 0), pad(others, 1, sizes.keys, np.iinfo(np.int32).min)
            if own.shape[0] == 1:
                segments = segments[0][0], segments[1][0]
        self.mask, self.segments = mask, segments

    def each(self, one: Callable[..., tuple[Any, ...]], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`one` of arrays [heads, ...], for arrays [b, heads, ...]: all rows of the batch at once, as heads,
        or, where rows see different keys, one after the other.
        """
        masks = () if self.mask is None else (self.mask,)
        segments = self.segments or ()
        axes = (*(0 if x.ndim == 3 else None for x in masks), *(0 if x.ndim == 2 else None for x in segments))
        # How many blocks are visited is data, over which the kernels cannot be mapped.
        run: Any = jax.custom_batching.sequential_vmap(one) if axes else one
        if 0 in axes:
            made = jax.vmap(run, (*[0] * len(args), *axes))(*args, *masks, *segments)
            return made  # type: ignore[no-any-return]
        made = run(*(x.reshape(-1, *x.shape[2:]) for x in args), *masks, *segments)
        return tuple(x.reshape(len(args[0]), -1, *x.shape[1:]) for x in made)

    def options(self, flash: Any, *hidden: Any) -> dict[str, Any]:
        """The arguments of a call, of what `given` is in one row of the batch."""
        made: dict[str, Any] = {}
        rest = list(hidden)
        if self.mask is not None:
            made["mask"] = rest.pop(0)
        elif self.causal:
            made["mask"] = _causal(flash)
        if rest:
            made["segment_ids"] = _segment_ids(flash)(*rest)
        return made


def is_native(band: Band) -> bool:
    """Whether a mask by position is one of the kernel's own; else it is an array."""
    return band.is_full or band == CAUSAL


def sees_some(band: Band, segments: tuple[Any, Any] | None, mask: Any, t: int, s: int) -> Any:
    """Whether each query sees a key, for [b, n, g, t]; None: all do. Nothing whole is made without need."""
    if mask is not None or not is_native(band):
        seen = seen_of(band, segments, mask, t, s)
        return jnp.any(jnp.broadcast_to(seen, (*seen.shape[:-1], s)), -1)
    if segments is None:
        return None

    def one(own: Any, others: Any) -> Any:
        order = jnp.argsort(others, stable=True)
        at = jnp.minimum(jnp.searchsorted(others[order], own), s - 1)
        first = order[at]  # the first key of the query's segment, where it has one
        return (others[first] == own) & (band.is_full | (first <= jnp.arange(t)))

    return jax.vmap(one)(*segments)[:, None, None]


def _causal(flash: Any) -> Any:
    """Its causal mask: the type is public only as the one that other masks are turned into."""
    nothing = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    return dataclasses.replace(flash.bind(nothing, nothing, nothing).arguments["mask"], is_causal=True)


def _segment_ids(flash: Any) -> Any:
    """Its type for segments, public only in the types of the call."""
    kinds = typing.get_args(inspect.signature(flash.bind).parameters["segment_ids"].annotation)
    return kinds[0]


def pad(x: Any, axis: int, to: int, value: Any) -> Any:
    """x with `value` after its end, up to a length of `to`."""
    missing = to - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, constant_values=value)
