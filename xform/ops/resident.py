"""Weights that come together before loops and stay so, and gradients that are summed over devices after them.

    w  = stacked w             a layer each along the first dimension
    b  = room shape            what is written before it is read
    w' = together w            whole along the axes of the batch from here on
    x  = after x y             x, once y is there
    g  = accumulator w'        zeros: each device's own terms of a gradient that is not yet summed
    g  = accumulate g dw i     g[i] += dw, as each device has it
    dw = settled g w           summed over the devices, and laid out as w is

Each is a call of its own name, and right as it stands; `xform.spmd.resident` gives it its meaning where
collectives are written out. None is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

STACKED, ROOM, TOGETHER, AFTER = (f"resident_{name}" for name in ("stacked", "room", "together", "after"))
ACCUMULATOR, PLACE, ACCUMULATE, CHOSEN, BEGUN, SETTLED = (
    f"resident_{name}" for name in ("accumulator", "place", "accumulate", "chosen", "begun", "settled")
)

FLAGS = {ACCUMULATE: 0, CHOSEN: 1, BEGUN: 2}
"""How many operands of a call that adds up are flags, `real` and `fresh`, between what is added and where."""


def stacked(w: Any) -> Any:
    """Weights of layers, one each along the first dimension."""

    def resident_stacked(w: Any) -> Any:
        return jax.lax.copy_p.bind(w)

    return jax.jit(resident_stacked)(w)


def together(w: Any) -> Any:
    """A weight, whole along the axes that the batch lies over."""

    def resident_together(w: Any) -> Any:
        return jax.lax.copy_p.bind(w)

    return jax.jit(resident_together)(w)


def after(x: Any, others: Sequence[Any]) -> Any:
    """x, which nothing uses before the others are there: what is written over an array that they are made of
    is written in place.
    """

    def resident_after(x: Any, *others: Any) -> Any:
        return jax.lax.optimization_barrier((x, *others))[0]

    return jax.jit(resident_after)(x, *others)


def room(shape: Sequence[int], dtype: Any) -> Any:
    """An array whose numbers are all written before they are read: none need be there before."""

    def resident_room() -> Any:
        return jnp.zeros(shape, dtype)

    return jax.jit(resident_room)()


def accumulator(w: Any, dtype: Any, begun: bool = True) -> Any:
    """Zeros of a weight's shape, in another dtype, to add up gradients in. begun: else the first that is
    added takes the place of what is there, and the zeros may be anything.
    """

    def resident_accumulator(w: Any) -> Any:
        return _like(jnp.zeros(w.shape, dtype), w)

    def resident_place(w: Any) -> Any:
        return resident_accumulator(w)

    return jax.jit(resident_accumulator if begun else resident_place)(w)


def accumulate(total: Any, x: Any, *at: Any, real: Any = None, fresh: Any = None) -> Any:
    """The terms with x added at these numbers of the first dimensions. x: total's shape without them. real:
    whether x is anything; else nothing is added, whatever its numbers are. fresh: whether it is the first
    there, and takes the place of what is there.
    """

    def resident_accumulate(total: Any, x: Any, *at: Any) -> Any:
        return added(total, x, *at)

    def resident_chosen(total: Any, x: Any, real: Any, *at: Any) -> Any:
        return added(total, x, *at, real=real)

    def resident_begun(total: Any, x: Any, real: Any, fresh: Any, *at: Any) -> Any:
        return added(total, x, *at, real=real, fresh=fresh)

    if real is None:
        return jax.jit(resident_accumulate)(total, x, *at)
    if fresh is None:
        return jax.jit(resident_chosen)(total, x, real, *at)
    return jax.jit(resident_begun)(total, x, real, fresh, *at)


def added(total: Any, x: Any, *at: Any, real: Any = None, fresh: Any = None) -> Any:
    """total[at] += x, or where `fresh`, total[at] = x; with zero for x where it is not `real`."""
    if real is not None:
        x = jax.lax.select(jnp.broadcast_to(real, x.shape), x, jnp.zeros_like(x))
    if not at:
        return total + x.astype(total.dtype)
    start = (*at, *[np.int32(0)] * (total.ndim - len(at)))
    shape = (*[1] * len(at), *total.shape[len(at) :])
    before = jax.lax.dynamic_slice(total, start, shape, allow_negative_indices=False)
    if fresh is not None:
        before = jax.lax.select(jnp.broadcast_to(fresh, shape), jnp.zeros_like(before), before)
    after = before + jax.lax.reshape(x.astype(total.dtype), shape)
    return jax.lax.dynamic_update_slice(total, after, start, allow_negative_indices=False)


def settled(total: Any, w: Any) -> Any:
    """The sum over devices, as w lies."""

    def resident_settled(total: Any, w: Any) -> Any:
        return plain(_like(total, w))

    return jax.jit(resident_settled)(total, w)


def plain(x: Any) -> Any:
    """x in the order of its dimensions in memory: else the order that a loop's products like best is that of
    all that goes into the loop and comes out of it, arguments and results of the whole program among it,
    which are copied to it. Keys of random numbers have an order of their own.
    """
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _like(x: Any, w: Any) -> Any:
    """x, of which w is to be seen as an operand in the program; the compiler sees that it is none."""
    return jax.lax.select(jnp.zeros(x.shape, bool), w.astype(x.dtype), x)
