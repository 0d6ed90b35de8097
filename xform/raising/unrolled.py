"""Values at points of what `points` has no rule for: loops, turn by turn, and triangular systems.

What is asked for at one place of a dimension is computed at that place alone; along others, in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from xform.raising.flat import View
from xform.raising.indices import Array, Index
from xform.raising.loops import Loop, loops
from xform.raising.points import Known, Points, Unknown
from xform.trace import DropVar, JaxprEqn, Var, shape_of

LARGEST, TURNS = 1 << 20, 512


def unrolled(view: View, known: dict[Var, Known], leave: JaxprEqn | None = None) -> None:
    """Adds to `known` the results of loops and triangular systems of a view, but of the equation `leave`."""
    for loop in loops(view):
        if loop.eqn is leave or loop.length > TURNS:
            continue
        for n, v in enumerate(loop.eqn.outvars):
            if not isinstance(v, DropVar):
                known.setdefault(v, _result(loop, n, known))
    for eqn in view.eqns:
        if eqn.primitive.name == "triangular_solve":
            known.setdefault(eqn.outvars[0], _solution(view, eqn, known))
        elif eqn.primitive.name == "scatter" and _is_window(eqn):
            known.setdefault(eqn.outvars[0], _written(view, eqn, known))


Box = tuple[Array, ...]


def _box(index: Index, sizes: tuple[int, ...]) -> Box:
    """The places asked for, a dimension each: one, or all."""
    found = []
    for at, n in zip(index, sizes, strict=True):
        first = int(np.asarray(at).flat[0])
        found.append(np.asarray([first]) if bool(np.all(np.asarray(at) == first)) else np.arange(n))
    if math.prod(len(b) for b in found) > LARGEST:
        raise Unknown("a loop too large to be unrolled")
    return tuple(found)


def _taken(value: Array, box: Box, index: Index) -> Array:
    """Of a value in a box what an index asks for."""
    at = []
    for places, i in zip(box, index, strict=True):
        i = np.asarray(i)
        if len(places) == 1:
            if not np.all(i == places[0]):
                raise Unknown("a loop at other places than it was asked for")
            i = np.zeros_like(i)
        at.append(i)
    return np.asarray(value[tuple(at)])


def _reader(value: Array, box: Box) -> Known:
    return lambda index: _taken(value, box, index)


def _result(loop: Loop, number: int, known: Mapping[Var, Known]) -> Known:
    carried = len(loop.carries)
    place = number
    made: dict[tuple[bytes, ...], tuple[Array, Box]] = {}

    def values(index: Index) -> Array:
        stacked = place >= carried
        sizes = shape_of(loop.eqn.outvars[number])
        box = _box(index, sizes)
        key = tuple(b.tobytes() for b in box)
        if key not in made:
            made[key] = _run(loop, place, box[1:] if stacked else box, stacked, known), box
        value, box = made[key]
        if stacked:
            value, box = value[box[0]], box
        return _taken(value, box, index)

    return values


def _run(loop: Loop, place: int, box: Box, stacked: bool, known: Mapping[Var, Known]) -> Array:
    """The loop turn by turn; what is carried in the box, where it is of the result's shape."""
    sizes = shape_of(loop.eqn.outvars[place])[1 if stacked else 0 :]
    around = Points(loop.view, known, wide=True)
    state: list[tuple[Array, Box]] = []
    for c in loop.carries:
        own = (
            box
            if shape_of(c.into) == sizes
            else _box(np.ix_(*map(np.arange, shape_of(c.into))), shape_of(c.into))
        )
        state.append((np.array(around.at(c.initial, np.ix_(*own) if own else ())), own))
    outs = []
    for turn in range(loop.length):
        at = loop.length - 1 - turn if loop.reverse else turn
        here = dict(known) | {c.into: _reader(*s) for c, s in zip(loop.carries, state, strict=True)}
        for v, (atom, timed) in loop.inputs.items():
            if timed:
                here[v] = _slice(around, atom, at)
        unrolled(loop.body, here)
        points = Points(loop.body, here, wide=True)
        if stacked:
            atom, _ = loop.stacked[place - len(loop.carries)]
            outs.append((at, np.array(points.at(atom, np.ix_(*box) if box else ()))))
        new = [
            np.array(points.at(c.out, np.ix_(*own) if own else ()))
            for c, (_, own) in zip(loop.carries, state, strict=True)
        ]
        state = [(value, own) for value, (_, own) in zip(new, state, strict=True)]
    if stacked:
        return np.stack([value for _, value in sorted(outs, key=lambda pair: pair[0])])
    return state[place][0]


def _slice(around: Points, atom: Any, turn: int) -> Known:
    return lambda index: around.at(atom, (np.asarray(turn), *index))


def _solution(view: View, eqn: JaxprEqn, known: Mapping[Var, Known]) -> Known:
    a, b = eqn.invars
    p = eqn.params
    made: dict[tuple[bytes, ...], tuple[Array, Box]] = {}

    def values(index: Index) -> Array:
        sizes = shape_of(b)
        batch = _box(index[:-2], sizes[:-2])
        n, m = shape_of(a)[-1], sizes[-2:]
        box = (*batch, np.arange(m[0]), np.arange(m[1]))
        key = tuple(x.tobytes() for x in box)
        if key not in made:
            points = Points(view, known, wide=True)
            left = np.array(points.at(a, np.ix_(*batch, np.arange(n), np.arange(n))), np.float64)
            right = np.array(points.at(b, np.ix_(*box)), np.float64)
            left = np.tril(left) if p["lower"] else np.triu(left)
            if p["unit_diagonal"]:
                left = left * (1 - np.eye(n)) + np.eye(n)
            if p["transpose_a"]:
                left = np.swapaxes(left, -1, -2)
            if p["left_side"]:
                solved = np.linalg.solve(left, right)
            else:
                solved = np.swapaxes(
                    np.linalg.solve(np.swapaxes(left, -1, -2), np.swapaxes(right, -1, -2)), -1, -2
                )
            made[key] = solved, box
        return _full(*made[key], index)

    return values


def _is_window(eqn: JaxprEqn) -> bool:
    """Whether a scatter writes one window: `x.at[i].set(row)`."""
    dims = eqn.params["dimension_numbers"]
    whole = len(dims.update_window_dims) == len(shape_of(eqn.invars[2])) and not dims.operand_batching_dims
    return whole and len(shape_of(eqn.invars[1])) == 1 and not eqn.params.get("update_jaxpr")


def _written(view: View, eqn: JaxprEqn, known: Mapping[Var, Known]) -> Known:
    x, places, new = eqn.invars
    dims = eqn.params["dimension_numbers"]
    sizes = shape_of(x)
    left = [d for d in range(len(sizes)) if d not in dims.inserted_window_dims]
    window = dict(zip(left, shape_of(new), strict=True))

    def values(index: Index) -> Array:
        points = Points(view, known, wide=True)
        first = np.zeros(len(sizes), np.int64)
        at = np.asarray(points.at(places, (np.arange(len(dims.scatter_dims_to_operand_dims)),)))
        first[list(dims.scatter_dims_to_operand_dims)] = at
        room = [n - window.get(d, 1) for d, n in enumerate(sizes)]
        if "CLIP" in str(eqn.params["mode"]):
            first = np.clip(first, 0, room)
        elif not all(0 <= i <= n for i, n in zip(first, room, strict=True)):
            return points.at(x, index)
        inside: Any = np.asarray(True)
        for d, i in enumerate(index):
            inside = inside & (i >= first[d]) & (i < first[d] + window.get(d, 1))
        if not np.any(inside):
            return points.at(x, index)
        moved = tuple(np.clip(index[d] - first[d], 0, window[d] - 1) for d in left)
        old = points.at(x, index) if not np.all(inside) else np.zeros(())
        return np.where(inside, points.at(new, moved), old)

    return values


def _full(value: Array, box: Box, index: Index) -> Array:
    at = list(index)
    for d, places in enumerate(box):
        if len(places) == 1 and value.shape[d] == 1:
            if not np.all(np.asarray(at[d]) == places[0]):
                raise Unknown("a system at other places than it was asked for")
            at[d] = np.zeros_like(np.asarray(at[d]))
    return np.asarray(value[tuple(at)])
