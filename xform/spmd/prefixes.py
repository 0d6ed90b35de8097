"""Operations along a dimension that lies over devices: prefixes, places of extremes, products of groups.

    y = cumsum x [8/fsdp]   ->   own  = cumsum x               each device's own part
                                 last = all_gather own[-1:]    one row a device
                                 y    = own + sum(last of the devices before)

Each device does its own part, and what is gathered is one row, or k candidates, of each. Blocks come in the
order of the mesh axes, so among equals the lowest index is found where one device finds it. Along a dimension
of several pieces a device's elements are not next to each other: there, as in `forms`, it is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xform.spmd.forms import ragged_dot_general
from xform.spmd.layout import Laid, Piece
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import JaxprEqn, Value, bind


class Monoid(NamedTuple):
    """How partial results are put together: of two, of all along an axis, and what changes nothing."""

    join: Callable[[Value, Value], Value]
    reduce: Callable[[Value, int], Value]
    identity: Callable[[Any], Any]


def _least(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


MONOIDS = {
    "cumsum": Monoid(jax.lax.add, lambda x, axis: jax.lax.reduce_sum(x, (axis,)), lambda dtype: 0),
    "cumprod": Monoid(jax.lax.mul, lambda x, axis: jax.lax.reduce_prod(x, (axis,)), lambda dtype: 1),
    "cummax": Monoid(jax.lax.max, lambda x, axis: jax.lax.reduce_max(x, (axis,)), _least),
    "cummin": Monoid(jax.lax.min, lambda x, axis: jax.lax.reduce_min(x, (axis,)), _greatest),
    "cumlogsumexp": Monoid(jnp.logaddexp, lambda x, axis: jax.nn.logsumexp(x, axis), _least),
}
ORDERED = frozenset({"cummax", "cummin", "cumlogsumexp"})
"""Those that mean something on real numbers alone."""


def cumulative(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    (val,), axis, name = vals, eqn.params["axis"], eqn.primitive.name
    axes = over(val, axis)
    if not axes or (name in ORDERED and jnp.issubdtype(val.aval.dtype, jnp.complexfloating)):
        return None
    monoid, reverse, laid = MONOIDS[name], eqn.params["reverse"], val.laid.summed()
    (own,) = bind(eqn, [walk.get(val, laid)], eqn.params)
    last = jax.lax.index_in_dim(own, 0 if reverse else -1, axis)
    totals = walk.router.gather(last, axes, axis)
    device = jax.lax.broadcasted_iota(np.int32, totals.shape, axis)
    here = block(walk, axes)
    earlier = device > here if reverse else device < here
    identity = jnp.asarray(monoid.identity(own.dtype), own.dtype)
    before = monoid.reduce(jnp.where(earlier, totals, identity), axis)
    joined = monoid.join(own, jax.lax.expand_dims(before, (axis,)))
    return [walk.held(joined, eqn.outvars[0].aval, laid)]


def reduction(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """A reduction that collectives do not know: of each device's part, then of the results of all."""
    (val,), dims = vals, eqn.params["axes"]
    laid = val.laid.summed()
    axes = tuple(a for k in dims for piece in laid.dims[k] for a in piece.axes)
    form = walk.form(eqn)
    if not axes or val.make is not None or form is None or not _is_whole(form.kinds, form.operands[0], dims):
        return None
    (own,) = bind(eqn, [walk.get(val, laid)], eqn.params)
    parts = walk.router.gather(own[None], axes, 0)
    (x,) = bind(eqn, [parts], {**eqn.params, "axes": (0,)})
    kept = tuple(dim for k, dim in enumerate(laid.dims) if k not in dims)
    return [walk.held(x, eqn.outvars[0].aval, Laid(kept))]


def _is_whole(kinds: Any, factors: Any, dims: Any) -> bool:
    """Whether the form has these dimensions whole: it knows no collective for them."""
    return all(kinds[f] == "whole" for k in dims for f in factors[k])


def extreme(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """argmax and argmin: each device's own, then the first device whose value is the extreme one."""
    (val,), (axis,) = vals, eqn.params["axes"]
    axes = over(val, axis)
    if not axes or jnp.issubdtype(val.aval.dtype, jnp.complexfloating):
        return None
    laid, dtype = val.laid.summed(), eqn.params["index_dtype"]
    x = walk.get(val, laid)
    (place,) = bind(eqn, [x], eqn.params)
    # A NaN is the greatest and the least, and stays one in the reduction.
    reduced = jax.lax.reduce_max if eqn.primitive.name == "argmax" else jax.lax.reduce_min
    best = walk.router.gather(reduced(x, (axis,))[None], axes, 0)
    here = block(walk, axes).astype(dtype) * jnp.asarray(x.shape[axis], dtype)
    places = walk.router.gather((place + here)[None], axes, 0)
    (winner,) = bind(eqn, [best], {**eqn.params, "axes": (0,)})
    device = jax.lax.broadcasted_iota(dtype, places.shape, 0)
    found = jax.lax.reduce_sum(jnp.where(device == winner, places, jnp.zeros((), dtype)), (0,))
    kept = tuple(dim for k, dim in enumerate(laid.dims) if k != axis)
    return [walk.held(found, eqn.outvars[0].aval, Laid(kept))]


def top_k(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """The k greatest of each device, then of these. Equal ones are in the order of their index in both."""
    (val,), axis, k = vals, eqn.params["axis"], eqn.params["k"]
    axes = over(val, axis)
    laid = val.laid.summed()
    if not axes or not 0 < k < walk.grid.local(laid)[axis]:
        return None
    x = walk.get(val, laid)
    values, places = bind(eqn, [x], eqn.params)
    places += block(walk, axes) * x.shape[axis]
    values, places = (walk.router.gather(each, axes, axis) for each in (values, places))
    best, order = bind(eqn, [values], eqn.params)
    places = jnp.take_along_axis(places, order, axis, mode="promise_in_bounds")
    dims = Laid((*laid.dims[:axis], (Piece(k),), *laid.dims[axis + 1 :]))
    return [walk.held(x, v.aval, dims) for x, v in zip((best, places), eqn.outvars, strict=True)]


def ragged_dot(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """Rows in groups that lie over devices: what of each group is here is a group of the rows here."""
    lhs, rhs, sizes = vals
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (rows,), ((lc, rc), _) = numbers.lhs_ragged_dimensions, numbers.dot_dimension_numbers
    form = ragged_dot_general(eqn, "sum" if rows in lc else "map")
    if form is None:
        return None
    operands = [(0, lhs.laid.summed()), (1, rhs.laid.summed())]
    axes = over(lhs, rows)
    if not axes and rows in lc:
        axes = over(rhs, rc[lc.index(rows)])
        operands.reverse()
    if not axes:
        return None
    n = lhs.shape[rows] // walk.grid.ways(axes)
    first = (block(walk, axes) * n).astype(sizes.aval.dtype)
    whole = walk.whole(sizes)
    ends = jnp.cumsum(whole, dtype=whole.dtype)
    here = jnp.clip(ends, first, first + n) - jnp.clip(ends - whole, first, first + n)
    chosen = walk.choice.combined(form, operands, [])
    return walk.bound(eqn, form, [lhs, rhs, walk.constant(here, sizes.aval)], chosen)


def over(val: Val, dim: int) -> tuple[str, ...]:
    """The mesh axes that a dimension lies over in one run of blocks; none of what is made as wanted."""
    pieces = val.laid.dims[dim]
    return pieces[0].axes if val.make is None and len(pieces) == 1 else ()


def block(walk: Walk, axes: tuple[str, ...]) -> Value:
    """The number of this device's block of what lies over these axes, int32."""
    number = jax.lax.axis_index(axes[0])
    for axis in axes[1:]:
        number = number * walk.grid.sizes[axis] + jax.lax.axis_index(axis)
    return number


HANDLERS = {
    **dict.fromkeys(MONOIDS, cumulative),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "reduce_and", "reduce_or"), reduction),
    "argmax": extreme,
    "argmin": extreme,
    "top_k": top_k,
    "ragged_dot_general": ragged_dot,
}
"""What is told in the order of a dimension, for each primitive."""
