"""Lookups and updates at indices, seen from one shard: each device serves the indices that fall on its part.

    y = table[i]              table [v/tensor, e]   ->   y' = where(i is here, table'[i - first], 0)
                                                         y  = the sum of y' over tensor
    t = zeros.at[i].add(dy)   dy [rows/fsdp, e]     ->   t' = zeros.at[i - first].add(dy'), others dropped
                                                         t  = the sum of t' over fsdp

What each does to dimensions is a form, as of any operation: a dimension that is looked up one index at a time
is summed away, since all devices but one give zero; rows that are added are summed too. So whether to look up
on the parts or to gather the table first is weighed in bytes, by the walk.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.spmd.forms import Draft, Form
from xform.spmd.layout import Dim, Laid, size_of
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import JaxprEqn, Value, at_source, bind, shape_of

DROP = lax.GatherScatterMode.FILL_OR_DROP
CLIP = lax.GatherScatterMode.CLIP
MODES = (CLIP, DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
ADDING = ("scatter-add", "scatter-sub")

Local = Callable[[list[Value], list[Laid], tuple[str, ...]], Value]
"""The result on one device, of the operands there, how they lie, and the axes whose devices add up to it."""


def gather(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """`table[indices]`; where the dimension that is looked up is left over axes, the result is partial."""
    p = eqn.params
    n, taken, mode = p["dimension_numbers"], p["slice_sizes"], p["mode"]
    shape, indexed, out = (shape_of(v) for v in (*eqn.invars, *eqn.outvars))
    if mode not in MODES or 0 in (*shape, *indexed):
        return None
    d = Draft(eqn)
    rows = [k for k in range(len(out)) if k not in n.offset_dims]
    batched = dict(zip(n.start_indices_batching_dims, n.operand_batching_dims, strict=True))
    for k, row in enumerate(rows):
        d.tie({0: batched[k], 1: k} if k in batched else {1: k}, {0: row})
    offsets = iter(n.offset_dims)
    for k, (size, part) in enumerate(zip(shape, taken, strict=True)):
        if k in n.operand_batching_dims:
            continue
        offset = None if k in n.collapsed_slice_dims else next(offsets)
        if offset is not None and part == size:
            d.tie({0: k}, {0: offset})
        elif part == 1 and k in n.start_index_map and _adds_up(vals[0]):
            d.tie({0: k}, {}, "sum")
    sized = _sized(shape, taken)

    def local(args: list[Value], laids: list[Laid], over: tuple[str, ...]) -> Value:
        table, indices = args
        here = walk.grid.local(laids[0])
        params = sized(p, [here], [])
        if not over:
            return bind(eqn, args, params)[0]
        columns, found = [], []
        for column, k in zip(_columns(indices), n.start_index_map, strict=True):
            index, clamped = _wide(column), _clamped(column, shape[k] - taken[k])
            if taken[k] != 1 or not _divided(laids[0].dims[k]):
                columns.append(index if mode is DROP else clamped)
                continue
            at, is_here = _place(walk, clamped, laids[0].dims[k])
            # Out of bounds, the one device that has the nearest index gives the fill value.
            at = _where(index == clamped, at, here[k]) if mode is DROP else at
            columns.append(_where(is_here, at, 0))
            found.append(is_here)
        x = _at(eqn, [table, lax.stack(columns, -1)], params)
        return _where(lax.broadcast_in_dim(_all(found), x.shape, rows), x, 0)

    return _lowered(walk, eqn, d.form(sized), vals, local)


def scatter(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """`operand.at[indices].set(updates)`, or add, subtract, multiply, and the least or greatest of both.

    Sums of rows that lie over axes are partial over them; the operand is counted on one device of each sum.
    """
    n, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    shape, indexed, updated = (shape_of(v) for v in eqn.invars)
    if mode not in MODES or 0 in (*shape, *indexed, *updated):
        return None
    d = Draft(eqn)
    batched = dict(zip(n.scatter_indices_batching_dims, n.operand_batching_dims, strict=True))
    for k, row in enumerate(k for k in range(len(updated)) if k not in n.update_window_dims):
        if k in batched:
            d.tie({0: batched[k], 1: k, 2: row}, {0: batched[k]})
        elif eqn.primitive.name in ADDING and _adds_up(vals[0]):
            d.tie({1: k, 2: row}, {}, "sum")
    windows, part = iter(n.update_window_dims), [1] * len(shape)
    for k, size in enumerate(shape):
        if k in n.operand_batching_dims:
            continue
        window = None if k in n.inserted_window_dims else next(windows)
        part[k] = 1 if window is None else updated[window]
        if window is not None and part[k] == size:
            d.tie({0: k, 2: window}, {0: k})
        elif part[k] == 1 and k in n.scatter_dims_to_operand_dims:
            d.tie({0: k}, {0: k})

    def local(args: list[Value], laids: list[Laid], over: tuple[str, ...]) -> Value:
        operand, indices, updates = args
        if over:
            operand = _where(lax.axis_index(over) == 0, operand, 0)
        dims = [laids[0].dims[k] for k in n.scatter_dims_to_operand_dims]
        parts = [k for k, dim in zip(n.scatter_dims_to_operand_dims, dims, strict=True) if _divided(dim)]
        if not any(part[k] == 1 for k in parts):
            return bind(eqn, [operand, indices, updates], eqn.params)[0]
        here, columns = walk.grid.local(laids[0]), []
        for column, k in zip(_columns(indices), n.scatter_dims_to_operand_dims, strict=True):
            clamped = _clamped(column, shape[k] - part[k])
            kept = clamped if mode is CLIP else _wide(column)
            if part[k] == 1 and k in parts:
                at, is_here = _place(walk, clamped, laids[0].dims[k])
                kept = _where(is_here & (kept == clamped), at, here[k])
            columns.append(kept)
        return _at(eqn, [operand, lax.stack(columns, -1), updates], {"mode": DROP})

    # Zeros with a few rows, as the gradient of a lookup is, are made on the part that is wanted of them.
    form = d.form()
    made = _made(walk, eqn, form, vals, local) if vals[0].make is not None else None
    return made or _lowered(walk, eqn, form, vals, local)


def dynamic_slice(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """One index of a dimension that lies over axes is taken where it is; the result is partial."""
    shape, taken = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    one = [k for k in range(len(shape)) if taken[k] == 1 < shape[k]]
    if (
        not any(_divided(vals[0].laid.dims[k]) for k in one)
        or not _adds_up(vals[0])
        or vals[0].make is not None
    ):
        return None
    d = Draft(eqn)
    for k, size in enumerate(shape):
        if k in one:
            d.tie({0: k}, {}, "sum")
        elif taken[k] == size:
            d.tie({0: k}, {0: k})
    sized = _sized(shape, taken)

    def local(args: list[Value], laids: list[Laid], over: tuple[str, ...]) -> Value:
        operand, starts = args[0], args[1:]
        at, found = _starts(walk, starts, shape, laids[0], one)
        (x,) = bind(eqn, [operand, *at], sized(eqn.params, [walk.grid.local(laids[0])], []))
        return _where(_all(found), x, 0) if found else x

    return _lowered(walk, eqn, d.form(sized), vals, local)


def dynamic_update_slice(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """One index of a dimension that lies over axes is written where it is; elsewhere what was there is."""
    shape, part = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    one = [k for k in range(len(shape)) if part[k] == 1 < shape[k]]
    if not any(_divided(vals[0].laid.dims[k]) for k in one) or vals[0].make is not None:
        return None
    d = Draft(eqn)
    for k, size in enumerate(shape):
        if k in one:
            d.tie({0: k}, {0: k})
        elif part[k] == size:
            d.tie({0: k, 1: k}, {0: k})

    def local(args: list[Value], laids: list[Laid], over: tuple[str, ...]) -> Value:
        operand, update, starts = args[0], args[1], args[2:]
        at, found = _starts(walk, starts, shape, laids[0], one)
        if found:
            before = lax.dynamic_slice(operand, at, update.shape, allow_negative_indices=False)
            update = lax.select(_all(found), update, before)
        return bind(eqn, [operand, update, *at], eqn.params)[0]

    return _lowered(walk, eqn, d.form(), vals, local)


def _lowered(walk: Walk, eqn: JaxprEqn, form: Form, vals: list[Val], local: Local) -> list[Val]:
    """The operation in the layout that moves the fewest bytes, emitted by `local`."""
    chosen = walk.choice.best(walk.case(eqn, form, vals, walk.current_wishes))
    x, laid = _emitted(walk, form, vals, local, chosen)
    out = walk.held(x, eqn.outvars[0].aval, laid)
    out.gradient = walk.is_gradient(form, vals, 0, laid.partial)
    return [out]


def _made(walk: Walk, eqn: JaxprEqn, form: Form, vals: list[Val], local: Local) -> list[Val] | None:
    """Where nothing is summed, the result as it is wanted wherever it is used; None where something is."""
    chosen = walk.choice.best(walk.case(eqn, form, vals, walk.current_wishes))
    if walk.choice.over(form, chosen, "sum"):
        return None
    prefix = walk.prefix

    def make(want: Laid) -> Value:
        with at_source(eqn, prefix):
            x, laid = _emitted(walk, form, vals, local, walk.choice.combined(form, [], [(0, want)]))
            return walk.router.emit(x, laid, want)

    return [Val(eqn.outvars[0].aval, walk.choice.laid(form.results[0], chosen), walk.scope, make)]


def _emitted(
    walk: Walk, form: Form, vals: list[Val], local: Local, chosen: Sequence[Dim]
) -> tuple[Value, Laid]:
    """The result on a device with dimensions laid out by `chosen`, and how it lies."""
    laids = [walk.choice.laid(factors, tuple(chosen)) for factors in form.operands]
    args = [walk.get(val, laid) for val, laid in zip(vals, laids, strict=True)]
    over = walk.choice.over(form, tuple(chosen), "sum")
    return local(args, laids, over), Laid(walk.choice.laid(form.results[0], tuple(chosen)).dims, over)


def _sized(shape: Sequence[int], taken: Sequence[int]) -> Callable[..., dict[str, Any]]:
    """The parameters on a device: of a dimension that is taken whole, what of it is there."""

    def local(params: dict[str, Any], ins: Any, outs: Any) -> dict[str, Any]:
        sizes = (h if part == size else part for h, part, size in zip(ins[0], taken, shape, strict=True))
        return {**params, "slice_sizes": tuple(sizes)}

    return local


def _adds_up(val: Val) -> bool:
    """Whether a value with zeros elsewhere can be summed over devices: numbers, not booleans or keys."""
    return jnp.issubdtype(val.aval.dtype, np.number)


def _divided(dim: Dim) -> bool:
    return any(piece.axes for piece in dim)


def _columns(indices: Value) -> list[Value]:
    """[..., n] as n arrays [...]."""
    return [lax.index_in_dim(indices, c, axis=-1, keepdims=False) for c in range(indices.shape[-1])]


def _wide(index: Value) -> Value:
    """An index in a type that holds any index into a dimension."""
    index = jnp.asarray(index)
    return index if index.dtype.itemsize == 8 else lax.convert_element_type(index, np.int32)


def _clamped(index: Value, last: int) -> Value:
    """The nearest index from 0 to `last`."""
    index = jnp.asarray(index)
    last = min(last, int(jnp.iinfo(index.dtype).max))
    return _wide(lax.clamp(index.dtype.type(0), index, index.dtype.type(last)))


def _place(walk: Walk, index: Value, dim: Dim) -> tuple[Value, Value]:
    """Where in its part of a dimension a device has this index, and whether it has it."""
    at, here, rest = _same(index, 0), [], size_of(dim)
    for piece in dim:
        rest //= piece.size
        block = piece.size // walk.grid.ways(piece.axes)
        digit = (
            lax.rem(lax.div(index, _same(index, rest)), _same(index, piece.size)) if len(dim) > 1 else index
        )
        if piece.axes:  # elsewhere `at` is any number
            digit = digit - lax.axis_index(piece.axes).astype(index.dtype) * block
            here += [digit >= 0, digit < block]
        at = at * block + digit
    return at, _all(here)


def _starts(
    walk: Walk, starts: Sequence[Value], shape: Sequence[int], laid: Laid, one: Sequence[int]
) -> tuple[list[Value], list[Value]]:
    """Where on a device a slice starts that takes one index of dimensions `one`, and whether it has each."""
    at, found = [_wide(start) for start in starts], []
    for k in one:
        if _divided(laid.dims[k]):
            place, is_here = _place(walk, _clamped(starts[k], shape[k] - 1), laid.dims[k])
            at[k] = _where(is_here, place, 0)
            found.append(is_here)
    return at, found


def _same(x: Value, number: int) -> Value:
    return lax.full_like(x, number)


def _where(condition: Value, x: Value, other: int) -> Value:
    """`x`, or this number; the condition is a scalar or of the same shape."""
    return lax.select(condition, x, _same(x, other))


def _all(conditions: Sequence[Value]) -> Value:
    return functools.reduce(operator.and_, conditions)


def _at(eqn: JaxprEqn, args: list[Value], params: dict[str, Any]) -> Value:
    """The operation at indices of which several may have become the same."""
    common = {"unique_indices": False, "indices_are_sorted": False}
    return bind(eqn, args, {**eqn.params, **common, **params})[0]


HANDLERS = {
    "gather": gather,
    **dict.fromkeys(("scatter", *ADDING, "scatter-mul", "scatter-min", "scatter-max"), scatter),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
"""How each operation at indices is lowered."""
