"""Values at points of equations that choose among operands, or where in one: joins, paddings and lookups.

A rule is given the equation, the number of the result, the index and `ask(operand, index)`; None: not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from xform.raising.elementwise import cast
from xform.raising.indices import ZERO, Array, Index, dtype_of, inserted, replaced
from xform.trace import JaxprEqn, shape_of

Ask = Callable[[int, Index], Array]
Rule = Callable[[JaxprEqn, int, Index, Ask], Array | None]


def chosen(parts: Sequence[tuple[Array, Callable[[], Array]]]) -> Array:
    """Where the first condition holds, the first value, and so on; what holds nowhere is not asked for."""
    taken = [(where, ask()) for where, ask in parts if where.any()]
    if len(taken) == 1:
        where, value = taken[0]
        return np.broadcast_to(value, np.broadcast_shapes(value.shape, where.shape))
    made = taken[-1][1]
    for where, value in reversed(taken[:-1]):
        made = np.where(where, value, made)
    return made


def _iota(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
    return cast(index[eqn.params["dimension"]], dtype_of(eqn.outvars[0]))


def _concatenate(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
    axis, first = eqn.params["dimension"], 0
    parts = []
    for number, v in enumerate(eqn.invars):
        size = shape_of(v)[axis]
        at = index[axis] - first
        there = (at >= 0) & (at < size)
        inside = replaced(index, axis, np.clip(at, 0, size - 1))
        parts.append((there, lambda number=number, inside=inside: ask(number, inside)))
        first += size
    return chosen(parts)


def _stack(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
    axis = eqn.params["axis"]
    rest = (*index[:axis], *index[axis + 1 :])
    here = np.arange(len(eqn.invars))
    return chosen([(index[axis] == n, functools.partial(ask, n, rest)) for n in here.tolist()])


def _pad(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
    inside: Array = np.ones((), np.bool_)
    where = []
    for at, size, (low, _, gap) in zip(
        index, shape_of(eqn.invars[0]), eqn.params["padding_config"], strict=True
    ):
        at, between = np.divmod(at - low, gap + 1)
        inside = inside & (between == 0) & (at >= 0) & (at < size)
        where.append(np.clip(at, 0, max(size - 1, 0)))
    return chosen([(inside, lambda: ask(0, tuple(where))), (~inside, lambda: ask(1, ()))])


def _starts(eqn: JaxprEqn, first: int, room: Sequence[int], ask: Ask) -> list[Array]:
    """Where a window begins: scalar operands from number `first` on, kept within `room`."""
    starts = [np.asarray(ask(first + d, ())).astype(np.int64).reshape(()) for d in range(len(room))]
    return [np.clip(start, 0, most) for start, most in zip(starts, room, strict=True)]


def _dynamic_slice(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
    sizes = shape_of(eqn.invars[0])
    room = [n - taken for n, taken in zip(sizes, eqn.params["slice_sizes"], strict=True)]
    starts = _starts(eqn, 1, room, ask)
    return ask(0, tuple(at + start for at, start in zip(index, starts, strict=True)))


def _dynamic_update_slice(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array:
    sizes, window = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    starts = _starts(eqn, 2, [n - taken for n, taken in zip(sizes, window, strict=True)], ask)
    inside: Array = np.ones((), np.bool_)
    where = []
    for at, start, taken in zip(index, starts, window, strict=True):
        at = at - start
        inside = inside & (at >= 0) & (at < taken)
        where.append(np.clip(at, 0, max(taken - 1, 0)))
    return chosen([(inside, lambda: ask(1, tuple(where))), (~inside, lambda: ask(0, index))])


def _gather(eqn: JaxprEqn, k: int, index: Index, ask: Ask) -> Array | None:
    numbers, window = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    sizes, names = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batch = [d for d in range(len(index)) if d not in numbers.offset_dims]
    rows = tuple(index[d] for d in batch)
    at = [ZERO] * len(sizes)
    alone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(sizes)) if d not in alone]
    for d, place in zip(kept, numbers.offset_dims, strict=True):
        at[d] = index[place]
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, place in pairs:
        at[d] = rows[place]
    inside: Array = np.ones((), np.bool_)
    for n, d in enumerate(numbers.start_index_map):
        start = ask(1, inserted(rows, [len(names) - 1], [np.asarray(n)])).astype(np.int64)
        room = sizes[d] - window[d]
        inside = inside & (start >= 0) & (start <= room)
        at[d] = at[d] + np.clip(start, 0, room)
    if eqn.params["mode"].name != "FILL_OR_DROP" or inside.all():
        return ask(0, tuple(at))
    dtype = dtype_of(eqn.outvars[0])
    fill = eqn.params["fill_value"]
    if fill is None:
        integer = np.issubdtype(dtype, np.integer)
        unsigned = np.issubdtype(dtype, np.unsignedinteger)
        fill = np.iinfo(dtype).max if unsigned else np.iinfo(dtype).min if integer else np.nan
        fill = True if dtype == np.bool_ else fill
    return chosen([(inside, lambda: ask(0, tuple(at))), (~inside, lambda: np.asarray(fill, dtype))])


LOOKUPS: Mapping[str, Rule] = {
    "iota": _iota,
    "concatenate": _concatenate,
    "stack": _stack,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
}
