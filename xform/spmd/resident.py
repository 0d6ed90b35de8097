"""Weights that are together while loops run, and gradients that are summed after them: what the operations of
`xform.ops.resident` are on the parts.

    w' = together w            all_gather over the batch's axes, once
    x  = after x y             of a device's parts; terms stay terms
    b  = room shape            of a device's part; no zeros
    g  = accumulator w'        zeros of what a device has of w'
    g  = accumulate g dw i     no collective: each device adds its own terms
    dw = settled g w           reduce_scatter, as w lies
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from xform.ops import resident
from xform.spmd.layout import Laid, Piece, whole
from xform.spmd.loops import call, terms_of
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import JaxprEqn, ShapedArray, Value


def together(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    (val,) = vals
    dims = tuple(
        tuple(Piece(p.size, tuple(a for a in p.axes if a not in walk.batch)) for p in dim)
        for dim in walk.settled(val).dims
    )
    return [walk.moved_to(val, Laid(dims))]


def after(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    first, *others = vals
    laid = first.laid if first.make is None else walk.settled(first)
    there = [walk.get(val, walk.settled(val)) for val in others]
    val = walk.held(jax.lax.optimization_barrier((walk.get(first, laid), *there))[0], first.aval, laid)
    val.terms, val.gradient = first.terms, first.gradient
    return [val]


def room(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    aval = cast(ShapedArray, eqn.outvars[0].aval)

    def make(want: Laid) -> Value:
        return jax.lax.empty(walk.grid.local(want), aval.dtype)

    return [Val(aval, whole(aval.shape), walk.scope, make)]


def accumulator(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    like, aval = vals[0], cast(ShapedArray, eqn.outvars[0].aval)
    terms = tuple(a for a in walk.grid.sizes if a in walk.batch)
    laid = Laid(walk.settled(like).dims, terms)
    filled = jax.lax.empty if eqn.params["name"] == resident.PLACE else jnp.zeros

    def make(want: Laid) -> Value:
        return filled(walk.grid.local(want), aval.dtype)

    val = Val(aval, laid, walk.scope, make)
    val.terms = val.gradient = bool(terms)
    return [val]


def accumulate(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    total, x, *others = vals
    count = resident.FLAGS[eqn.params["name"]]
    flags, at = [*map(walk.whole, others[:count]), None, None], others[count:]
    laid = total.laid if total.make is None else walk.settled(total)
    more = terms_of(walk, x, Laid(laid.dims[len(at) :], laid.partial))
    made = resident.added(walk.get(total, laid), more, *map(walk.whole, at), real=flags[0], fresh=flags[1])
    val = walk.held(made, total.aval, laid)
    val.terms = val.gradient = bool(laid.partial)
    return [val]


def settled(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    total, like = vals
    laid = walk.grid.normal(Laid(walk.settled(like).dims))
    x = walk.get(walk.moved_to(total, laid), laid)
    return [walk.held(resident.plain(x), total.aval, laid)]


_BY_NAME: dict[str, Callable[[Walk, JaxprEqn, list[Val]], list[Val]]] = {
    resident.ROOM: room,
    resident.TOGETHER: together,
    resident.AFTER: after,
    resident.ACCUMULATOR: accumulator,
    resident.PLACE: accumulator,
    **dict.fromkeys(resident.FLAGS, accumulate),
    resident.SETTLED: settled,
    resident.STACKED: lambda walk, eqn, vals: vals,
}


def named(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """A call: one of these by its name, any other in the caller's place."""
    return _BY_NAME.get(eqn.params["name"], call)(walk, eqn, vals)


HANDLERS = {"jit": named}
