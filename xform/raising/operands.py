"""Products of two values, and where the values come from: back through what moves, repeats, casts or scales.

k = repeat(x, 2, axis=2) * 0.25 ; dot_general q k    ->    k is x [b, s, n, d], times 0.25
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from xform.axes.factors import Shape
from xform.raising.flat import dtype_of, size
from xform.raising.points import Unknown
from xform.raising.reading import MOVES, Reading, Space
from xform.trace import Atom, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Source:
    """A value of which an operand is made: the operand is `factor` times it, moved, repeated and cast by the
    equations `numbers`. useful: it is smaller than what is made of it, or before a scale.
    """

    atom: Atom
    dims: Shape
    factor: float
    numbers: tuple[int, ...]
    useful: bool


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a product. dims: of the value the product takes; sources: it, then what it is made of."""

    atom: Atom
    dims: Shape
    sources: tuple[Source, ...]

    @property
    def last(self) -> Source:
        return self.sources[-1]


@dataclasses.dataclass(frozen=True)
class Product:
    """A sum of products of two values over the dimensions that the result lacks.

    numbers: its equations; two where it is a multiplication and a sum.
    """

    out: Var
    numbers: tuple[int, ...]
    sides: tuple[Operand, Operand]
    dims: Shape

    def contracted(self, space: Space) -> set[int]:
        """The factors that are summed over."""
        inside = space.all(self.sides[0].dims) | space.all(self.sides[1].dims)
        return inside - space.all(self.dims)


def product(reading: Reading, space: Space, number: int) -> Product | None:
    """The product that an equation makes: a dot_general, or the sum of an elementwise product."""
    eqn = reading.view.eqns[number]
    name = eqn.primitive.name
    if name == "dot_general":
        sides = operand(reading, space, eqn.invars[0]), operand(reading, space, eqn.invars[1])
        dims = space.after(eqn, [s.dims for s in sides])
        return Product(eqn.outvars[0], (number,), sides, dims)
    if name != "reduce_sum":
        return None
    way: list[int] = []
    at = reading.number(eqn.invars[0])
    while at >= 0 and (inner := reading.view.eqns[at]).primitive.name == "convert_element_type":
        way.append(at)
        at = reading.number(inner.invars[0])
    if at < 0 or (inner := reading.view.eqns[at]).primitive.name != "mul":
        return None
    if any(len(size(v)) != len(size(inner.outvars[0])) for v in inner.invars):
        return None
    sides = operand(reading, space, inner.invars[0]), operand(reading, space, inner.invars[1])
    space.factors.tie(sides[0].dims, sides[1].dims)
    sides = operand_alone(space, sides[0], sides[1]), operand_alone(space, sides[1], sides[0])
    kept = [d for i, d in enumerate(sides[0].dims) if i not in eqn.params["axes"]]
    other = [d for i, d in enumerate(sides[1].dims) if i not in eqn.params["axes"]]
    dims = tuple(a or b for a, b in zip(kept, other, strict=True))
    return Product(eqn.outvars[0], (number, *way, at), sides, dims)


def operand_alone(space: Space, one: Operand, other: Operand) -> Operand:
    """A side of an elementwise product, without the dimensions along which it is only repeated."""
    own = space.all(one.last.dims) if len(one.sources) > 1 else space.all(one.dims)
    theirs = space.all(other.last.dims) if len(other.sources) > 1 else space.all(other.dims)
    dims = tuple(() if set(space.leaves(d)) & (theirs - own) else d for d in one.dims)
    return dataclasses.replace(one, dims=dims)


def operand(reading: Reading, space: Space, atom: Atom) -> Operand:
    """A value and the values of which it is made."""
    chain = list(_back(reading, atom))
    deepest = chain[-1][1] if chain else atom
    dims = space.fresh(deepest)
    factor, numbers, useful = (
        _total(chain),
        tuple(step.number for step, _ in chain),
        any(s.useful for s, _ in chain),
    )
    sources = [Source(deepest, dims, factor, numbers, useful)]
    for k in range(len(chain) - 1, -1, -1):
        step, _ = chain[k]
        dims = _through(reading, space, step, dims)
        above = chain[:k]
        at = reading.view.eqns[step.number].outvars[step.result]
        sources.append(
            Source(
                at, dims, _total(above), tuple(s.number for s, _ in above), any(s.useful for s, _ in above)
            )
        )
    sources.reverse()
    return Operand(atom, dims, tuple(sources))


@dataclasses.dataclass(frozen=True)
class _Step:
    number: int
    side: int
    result: int
    factor: float
    useful: bool
    repeat: tuple[int, int, str] | None = None


def _total(chain: list[tuple[_Step, Atom]]) -> float:
    return float(np.prod([step.factor for step, _ in chain])) if chain else 1.0


def _back(reading: Reading, atom: Atom) -> Iterator[tuple[_Step, Atom]]:
    """The equations that an operand goes through, the last first, each with what goes in."""
    while isinstance(atom, Var) and (number := reading.number(atom)) >= 0:
        step = _step(reading, number, atom)
        if step is None:
            return
        atom = reading.view.eqns[number].invars[step.side]
        yield step, atom


def _step(reading: Reading, number: int, v: Var) -> _Step | None:
    eqn = reading.view.eqns[number]
    name = eqn.primitive.name
    if name == "convert_element_type":
        old, new = dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0])
        widens = np.promote_types(old, new) == new if old.kind in "fV" and new.kind in "fV" else False
        return _Step(number, 0, 0, 1.0, old != new) if widens else None
    if name in MOVES:
        result = eqn.outvars.index(v)
        grows = name == "broadcast_in_dim" and np.prod(size(v)) > np.prod(size(eqn.invars[0]))
        return _Step(number, result if len(eqn.outvars) > 1 else 0, result, 1.0, bool(grows))
    if name == "neg":
        return _Step(number, 0, 0, -1.0, True)
    if name in ("mul", "div"):
        for side in (0, 1) if name == "mul" else (0,):
            c = reading.constant(eqn.invars[1 - side])
            if c and isinstance(eqn.invars[side], Var) and len(size(eqn.invars[side])) == len(size(v)):
                return _Step(number, side, 0, c if name == "mul" else 1.0 / c, True)
        return None
    if name == "gather":
        repeat = _repeat(reading, eqn)
        return None if repeat is None else _Step(number, 0, 0, 1.0, True, repeat)
    if name == "tile":
        return _Step(number, 0, 0, 1.0, True)
    if name in ("concatenate", "stack") and all(_same(reading, w, eqn.invars[0]) for w in eqn.invars[1:]):
        axis = eqn.params["axis" if name == "stack" else "dimension"]
        return _Step(number, 0, 0, 1.0, True, (axis, len(eqn.invars), "new" if name == "stack" else "outer"))
    return None


def _same(reading: Reading, a: Atom, b: Atom) -> bool:
    """Whether two values are one, or are made of one in the same way."""
    while a is not b:
        m, n = reading.number(a), reading.number(b)
        if m < 0 or n < 0:
            return False
        one, two = reading.view.eqns[m], reading.view.eqns[n]
        if one.primitive is not two.primitive or one.primitive.name not in MOVES or len(one.invars) != 1:
            return False
        if str(one.params) != str(two.params):
            return False
        a, b = one.invars[0], two.invars[0]
    return True


def _through(reading: Reading, space: Space, step: _Step, dims: Shape) -> Shape:
    eqn = reading.view.eqns[step.number]
    if step.repeat is not None:
        axis, times, where = step.repeat
        more = space.factors.fresh((times,))[0]
        if where == "new":
            return (*dims[:axis], more, *dims[axis:])
        dim = dims[axis] + more if where == "inner" else more + dims[axis]
        return (*dims[:axis], dim, *dims[axis + 1 :])
    ins: list[Shape | None] = [None] * len(eqn.invars)
    ins[step.side] = dims
    return space.after(eqn, ins, step.result)


def _repeat(reading: Reading, eqn: JaxprEqn) -> tuple[int, int, str] | None:
    """Of a gather with indices 0 0 1 1 ("inner") or 0 1 0 1 ("outer"): the axis, how often, and which."""
    numbers, operand, indices = eqn.params["dimension_numbers"], eqn.invars[0], eqn.invars[1]
    axes = numbers.start_index_map
    if len(axes) != 1 or numbers.collapsed_slice_dims != axes or numbers.operand_batching_dims:
        return None
    axis, n = axes[0], size(operand)[axes[0]]
    whole = all(
        m == k
        for d, (m, k) in enumerate(zip(size(operand), eqn.params["slice_sizes"], strict=True))
        if d != axis
    )
    m = size(eqn.outvars[0])[axis]
    if (
        not whole
        or size(indices) != (m, 1)
        or m % n
        or axis in numbers.offset_dims
        or reading.takes_inputs(indices)
    ):
        return None
    try:
        found = reading.points.at(indices, (np.arange(m), np.zeros(m, np.int64)))
    except Unknown:
        return None
    if (found == np.arange(m) // (m // n)).all():
        return axis, m // n, "inner"
    if (found == np.arange(m) % n).all():
        return axis, m // n, "outer"
    return None
