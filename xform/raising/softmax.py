"""From an exponential forward to the product with values that its weights are for, whatever lies between.

e = exp(x - m); w = e / sum(e); o = w . v        e -> w -> o, normalised before the product
e = exp(x - m); o = (e . v) * (1 / sum(e))       e -> o -> ., and after it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from xform.axes.factors import Shape
from xform.raising.flat import dtype_of, size
from xform.raising.operands import Operand, Product, operand
from xform.raising.reading import MOVES, Reading, Space, moved
from xform.trace import Atom, JaxprEqn, Literal, ShapedArray, Var


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done to the weights on the way. kind "norm": divided or multiplied by what they make
    themselves; "scale": by a constant; "mul": multiplied by another value; "select": where `atom` is `seen`,
    else zero.
    """

    kind: str
    number: int
    atom: Atom | None = None
    factor: float = 1.0
    seen: bool = True
    dims: Shape = ()


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Weights on their way into a product with values.

    weights: what goes into it, dims its dimensions; product: with the values, whose side is `1 - side`.
    """

    weights: Var
    dims: Shape
    steps: tuple[Step, ...]
    product: Product
    side: int

    @property
    def values(self) -> Operand:
        return self.product.sides[1 - self.side]

    @property
    def is_normalised(self) -> bool:
        return any(step.kind == "norm" for step in self.steps)


def mixings(reading: Reading, space: Space, start: Var, dims: Shape) -> Iterator[Mixing]:
    """The products into which weights go that an exponential `start` makes."""
    todo: list[tuple[Var, Shape, tuple[Step, ...]]] = [(start, dims, ())]
    seen: set[Var] = set()
    while todo:
        v, own, steps = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        for n in reading.users(v):
            if n < 0:
                continue
            eqn = reading.view.eqns[n]
            name = eqn.primitive.name
            if name == "dot_general" and (repeated := _repeated(reading, n, v, own)) is not None:
                todo.append((eqn.outvars[0], repeated[0], (*steps, repeated[1])))
            elif name == "dot_general":
                mixing = _dot(reading, space, n, v, own, steps, start)
                if mixing is not None:
                    yield mixing
            if name == "dot_general":
                continue
            k = moved(eqn, v)
            if k is not None or name == "slice":
                k = k or 0
                ins: list[Shape | None] = [own if w is v else None for w in eqn.invars]
                todo.append((eqn.outvars[k], space.after(eqn, ins, k), steps))
            elif name in ("mul", "div"):
                mixing = _elementwise(reading, space, n, v, own, steps, start)
                if mixing is not None:
                    yield mixing
                    continue
                step = _scaling(reading, n, v, own, start)
                if step is not None:
                    todo.append((eqn.outvars[0], own, (*steps, step)))
            elif name == "select_n":
                step = _choice(reading, n, v, own, start)
                if step is not None:
                    todo.append((eqn.outvars[0], own, (*steps, step)))


def _repeated(reading: Reading, n: int, v: Var, own: Shape) -> tuple[Shape, Step] | None:
    """A product that sums over nothing, with what is the same number everywhere and has no dimension of its
    own: its dimensions, and what it does. Masks of heads that mask none are such.
    """
    eqn = reading.view.eqns[n]
    contracted, batch = eqn.params["dimension_numbers"]
    side = next(k for k, w in enumerate(eqn.invars) if w is v)
    other = eqn.invars[1 - side]
    if contracted[0] or len(batch[1 - side]) != len(size(other)):
        return None
    factor = reading.constant(other)
    if factor is None:
        return None
    rest = [d for d in range(len(own)) if d not in batch[side]]
    dims = tuple(own[d] for d in (*batch[side], *rest))
    return dims, Step("scale", n, factor=factor)


def _dot(
    reading: Reading, space: Space, n: int, v: Var, own: Shape, steps: tuple[Step, ...], start: Var
) -> Mixing | None:
    eqn = reading.view.eqns[n]
    side = 0 if eqn.invars[0] is v else 1
    if eqn.invars[0] is eqn.invars[1] or reading.follows(eqn.invars[1 - side], {start}):
        return None
    other = operand(reading, space, eqn.invars[1 - side])
    sides = [other, other]
    sides[side] = Operand(v, own, ())
    dims = space.after(eqn, [s.dims for s in sides])
    return Mixing(v, own, steps, Product(eqn.outvars[0], (n,), (sides[0], sides[1]), dims), side)


def _elementwise(
    reading: Reading, space: Space, n: int, v: Var, own: Shape, steps: tuple[Step, ...], start: Var
) -> Mixing | None:
    """A product spelled as a multiplication and a sum: sum(w[:, :, None] * v, axis=1)."""
    eqn = reading.view.eqns[n]
    if eqn.primitive.name != "mul" or eqn.invars[0] is eqn.invars[1]:
        return None
    side = 0 if eqn.invars[0] is v else 1
    other = eqn.invars[1 - side]
    numbers, out = [n], eqn.outvars[0]
    while True:
        users = reading.users(out)
        if len(users) != 1 or users[0] < 0:
            return None
        eqn_after = reading.view.eqns[users[0]]
        numbers.append(users[0])
        if eqn_after.primitive.name == "convert_element_type":
            out = eqn_after.outvars[0]
            continue
        break
    if eqn_after.primitive.name != "reduce_sum" or len(size(other)) != len(own):
        return None
    if reading.follows(other, {start}) or reading.constant(other) is not None:
        return None
    values = operand(reading, space, other)
    axes = eqn_after.params["axes"]
    repeated = reading.varies(v)
    weights = tuple(d if changes else () for d, changes in zip(own, repeated, strict=True))
    space.factors.tie(
        tuple(d for d, c in zip(own, repeated, strict=True) if c),
        tuple(d for d, c in zip(values.dims, repeated, strict=True) if c),
    )
    theirs = tuple(
        d if changes else () for d, changes in zip(values.dims, reading.varies(other), strict=True)
    )
    dims = tuple(a or b for i, (a, b) in enumerate(zip(weights, theirs, strict=True)) if i not in axes)
    other_side = dataclasses.replace(values, dims=theirs)
    mine = Operand(v, weights, ())
    sides = (mine, other_side) if side == 0 else (other_side, mine)
    made = Product(eqn_after.outvars[0], tuple(reversed(numbers)), sides, dims)
    return Mixing(v, weights, steps, made, side)


def _scaling(reading: Reading, n: int, v: Var, own: Shape, start: Var) -> Step | None:
    eqn = reading.view.eqns[n]
    if eqn.invars[0] is eqn.invars[1]:
        return None
    side = 0 if eqn.invars[0] is v else 1
    other = eqn.invars[1 - side]
    divides = eqn.primitive.name == "div"
    if divides and side == 1:
        return None
    c = reading.constant(other)
    if c is not None and c != 0:
        return Step("scale", n, factor=1.0 / c if divides else c)
    if divides or reading.follows(other, {start}):
        return Step("norm", n, other)
    return Step("mul", n, other, dims=own if size(other) else ())


def _choice(reading: Reading, n: int, v: Var, own: Shape, start: Var) -> Step | None:
    """where(m, w, 0)."""
    eqn = reading.view.eqns[n]
    if len(eqn.invars) != 3 or eqn.invars[0] is v or eqn.invars[1] is eqn.invars[2]:
        return None
    side = 1 if eqn.invars[1] is v else 2
    if reading.constant(eqn.invars[3 - side]) != 0 or reading.follows(eqn.invars[0], {start}):
        return None
    return Step("select", n, eqn.invars[0], seen=side == 2, dims=own if size(eqn.invars[0]) else ())


def normalised(reading: Reading, mixing: Mixing, start: Var) -> tuple[Var, int] | None:
    """Where what is made of values and weights is divided by the weights' sum: the result, and the number of
    the equation.
    """
    v = mixing.product.out
    for _ in range(8):
        users = reading.users(v)
        if len(users) == 2 and all(n >= 0 and reading.view.eqns[n].primitive.name == "slice" for n in users):
            return _beside(reading, *(reading.view.eqns[n].outvars[0] for n in users))
        if len(users) != 1 or users[0] < 0:
            return None
        n = users[0]
        eqn = reading.view.eqns[n]
        if eqn.primitive.name in MOVES and len(eqn.invars) == 1:
            v = eqn.outvars[0]
            continue
        if eqn.primitive.name not in ("mul", "div"):
            return None
        other = eqn.invars[1] if eqn.invars[0] is v else eqn.invars[0]
        if reading.constant(other) is not None:
            v = eqn.outvars[0]
            continue
        return (eqn.outvars[0], n) if reading.follows(other, {start}) else None
    return None


def _beside(reading: Reading, *slices: Var) -> tuple[Var, int] | None:
    """Where one part of a product is divided by the other: the sum of the weights stood beside the values."""
    ends = []
    for v in slices:
        users = reading.users(v)
        while (
            len(users) == 1 and users[0] >= 0 and (eqn := reading.view.eqns[users[0]]).primitive.name in MOVES
        ):
            users = reading.users(eqn.outvars[0])
        ends.append(users)
    if len(ends[0]) != 1 or ends[0] != ends[1] or ends[0][0] < 0:
        return None
    (n,) = ends[0]
    eqn = reading.view.eqns[n]
    return (eqn.outvars[0], n) if eqn.primitive.name == "div" else None


def after(reading: Reading, space: Space, mixing: Mixing, out: Var) -> Shape:
    """The dimensions of a value that the product with the values has become by moves and scales."""
    dims, product = mixing.product.dims, mixing.product.out
    for eqn, v in reversed(way_back(reading, out, product)):
        dims = space.after(eqn, [dims if w is v else None for w in eqn.invars])
    return dims


def way_back(reading: Reading, out: Atom, product: Var) -> list[tuple[JaxprEqn, Atom]]:
    """The equations by which a product becomes a result, the last first, each with the operand that it is."""
    way: list[tuple[JaxprEqn, Atom]] = []
    while out is not product:
        eqn = reading.view.eqns[reading.number(out)]
        out = max(
            (w for w in eqn.invars if reading.follows(w, {product})), key=lambda w: sum(reading.varies(w))
        )
        way.append((eqn, out))
    return way


def summed(
    reading: Reading, space: Space, mixing: Mixing, below: Atom, start: Var, dims: Shape
) -> Sinking | None:
    """What is added to the sum of exponentials `below` the weights, before they are divided by it."""
    v, number = below, -1
    while isinstance(v, Var) and v is not start:
        number = reading.number(v)
        eqn = reading.view.eqns[number]
        into = [w for w in eqn.invars if reading.follows(w, {start})]
        if eqn.primitive.name in ("add", "add_any") and len(into) == 1:
            break
        if not into or eqn.primitive.name in ("reduce_sum", "dot_general"):
            return None
        v = into[0]
    else:
        return None
    addend = eqn.invars[1] if eqn.invars[0] is into[0] else eqn.invars[0]
    if reading.constant(addend) is not None:
        return None
    way: list[JaxprEqn] = [eqn]
    v = into[0]
    while isinstance(v, Var) and v is not start:
        way.append(reading.view.eqns[reading.number(v)])
        v = next(w for w in way[-1].invars if reading.follows(w, {start}))
    here: Shape = dims
    for each in reversed(way):
        here = space.after(each, [here if reading.follows(w, {start}) else None for w in each.invars])
    return Sinking(addend, here, number)


@dataclasses.dataclass(frozen=True)
class Sinking:
    """A value that is added to the sum of exponentials, with the sum's dimensions."""

    atom: Atom
    dims: Shape
    number: int


def exponent(reading: Reading, atom: Atom, products: set[Var]) -> Atom | None:
    """Of exp(y - m), with m from the logits, y."""
    v = atom
    while (number := reading.number(v)) >= 0:
        eqn = reading.view.eqns[number]
        name = eqn.primitive.name
        if name in MOVES:
            v = eqn.invars[0]
        elif name == "exp":
            v = eqn.invars[0]
            break
        else:
            return None
    while (number := reading.number(v)) >= 0:
        eqn = reading.view.eqns[number]
        if eqn.primitive.name in MOVES:
            v = eqn.invars[0]
            continue
        if eqn.primitive.name == "sub" and reading.follows(eqn.invars[1], products):
            return eqn.invars[0]
        if eqn.primitive.name == "neg" and reading.follows(v, products):
            return Literal(np.zeros((), dtype_of(v)), ShapedArray((), dtype_of(v)))  # type: ignore[no-untyped-call]
        return None if reading.follows(v, products) else v
    return v
