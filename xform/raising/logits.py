"""Logits, traced back to the products that they are made of: scale, soft cap, what is added, what is masked.

where(m, 50 * tanh(x * 0.25 / 50), -1e9) + b, x = q . k    ->    x, scale 0.25, cap 50, mask m, bias b
"""

from __future__ import annotations

import dataclasses
import math

from xform.axes.factors import Shape
from xform.errors import Decline
from xform.raising.flat import size
from xform.raising.operands import Product, product
from xform.raising.reading import MOVES, Reading, Space
from xform.trace import Atom, JaxprEqn, Var

FAR = -9999.0
"""A logit that is no higher counts as masked."""


class Miss(Decline):
    """It is nearly the operation, but: the message. number: the equation that makes it another."""

    def __init__(self, why: str, number: int) -> None:
        super().__init__(why)
        self.number = number


@dataclasses.dataclass(frozen=True)
class Added:
    """A value that is added: `factor` times an atom, of the logits' shape or a scalar's."""

    atom: Atom
    factor: float
    dims: Shape


@dataclasses.dataclass(frozen=True)
class Selected:
    """Where `atom` is `seen` the logits stay; elsewhere they are `fill`."""

    atom: Atom
    seen: bool
    fill: float
    dims: Shape


@dataclasses.dataclass(frozen=True)
class Part:
    """A product in the sum that the logits are of. atom: the last value that is this product alone, moved."""

    product: Product
    factor: float
    atom: Atom
    dims: Shape
    rest: float


@dataclasses.dataclass(frozen=True)
class Logits:
    """amp * tanh(sum of parts) + added, where selected: or without the tanh.

    zeroed: number of an equation that multiplies them by an array of 0 and 1, as is to be seen.
    sink: (atom, number of the concatenation) of a logit more, which stands at the end or the start of the
    keys.
    """

    dims: Shape
    parts: tuple[Part, ...]
    amp: float | None = None
    added: tuple[Added, ...] = ()
    selected: tuple[Selected, ...] = ()
    sink: tuple[Atom, int] | None = None
    zeroed: int | None = None
    numbers: frozenset[int] = frozenset()

    def times(self, c: float) -> Logits:
        """All of it, scaled."""
        if self.amp is None:
            parts = tuple(dataclasses.replace(p, factor=p.factor * c, rest=p.rest * c) for p in self.parts)
        else:
            parts = self.parts
        return dataclasses.replace(
            self,
            parts=parts,
            amp=None if self.amp is None else self.amp * c,
            added=tuple(dataclasses.replace(a, factor=a.factor * c) for a in self.added),
            selected=tuple(dataclasses.replace(s, fill=s.fill * c) for s in self.selected),
        )

    @property
    def is_plain(self) -> bool:
        return (
            self.zeroed is None
            and self.amp is None
            and not self.added
            and not self.selected
            and self.sink is None
        )


class Tracer:
    """Traces logits of one body back."""

    def __init__(self, reading: Reading, space: Space) -> None:
        self.reading, self.space = reading, space
        self.found: dict[Var, Logits | None] = {}

    def of(self, atom: Atom) -> Logits | None:
        """What a value is made of; None where it is not made of products. Raises `Miss`."""
        if not isinstance(atom, Var):
            return None
        if atom not in self.found:
            self.found[atom] = self._of(atom)
        return self.found[atom]

    def _of(self, v: Var) -> Logits | None:
        number = self.reading.number(v)
        if number < 0:
            return None
        eqn = self.reading.view.eqns[number]
        name = eqn.primitive.name
        if name in ("dot_general", "reduce_sum"):
            made = product(self.reading, self.space, number)
            if made is None:
                return None
            numbers = frozenset(made.numbers)
            return Logits(made.dims, (Part(made, 1.0, v, made.dims, 1.0),), numbers=numbers)
        rule = _RULES.get(name)
        if rule is not None:
            got = rule(self, eqn, number)
        elif name in MOVES:
            got = self._moved(eqn, eqn.outvars.index(v))
        elif name in _OTHER:
            if any(self.of(w) is not None for w in eqn.invars):
                raise Miss(f"its logits go through `{name}`", number)
            return None
        else:
            return None
        if got is None:
            return None
        return dataclasses.replace(self._alone(got, v), numbers=got.numbers | {number})

    def _alone(self, got: Logits, v: Var) -> Logits:
        """Where it is one product alone, the value as a new name of it."""
        if len(got.parts) != 1 or not got.is_plain:
            return got
        (part,) = got.parts
        return dataclasses.replace(got, parts=(dataclasses.replace(part, atom=v, dims=got.dims, rest=1.0),))

    def _moved(self, eqn: JaxprEqn, k: int) -> Logits | None:
        got = self.of(eqn.invars[k])
        if got is None:
            return None
        ins: list[Shape | None] = [None] * len(eqn.invars)

        def after(dims: Shape) -> Shape:
            ins[k] = dims
            return self.space.after(eqn, ins, k)

        return dataclasses.replace(got, dims=after(got.dims))

    def _both(self, eqn: JaxprEqn) -> tuple[Logits | None, Logits | None]:
        return self.of(eqn.invars[0]), self.of(eqn.invars[1])

    def _multiplied(self, eqn: JaxprEqn, number: int) -> Logits | None:
        a, b = self._both(eqn)
        if a is None and b is None:
            return None
        if a is not None and b is not None:
            raise Miss("its logits are multiplied with each other", number)
        side = 0 if a is not None else 1
        got, other = (a or b), eqn.invars[1 - side]
        assert got is not None
        c = self.reading.constant(other)
        if c is None:
            if self.reading.takes_inputs(other) and not self.reading.is_boolean(other):
                raise Miss("its logits are multiplied by an array, not by a constant", number)
            return dataclasses.replace(got, zeroed=number)
        if eqn.primitive.name == "div":
            if side == 1 or c == 0:
                raise Miss("it divides by its logits", number)
            c = 1.0 / c
        return got.times(c)

    def _negated(self, eqn: JaxprEqn, number: int) -> Logits | None:
        got = self.of(eqn.invars[0])
        return None if got is None else got.times(-1.0)

    def _sum(self, eqn: JaxprEqn, number: int) -> Logits | None:
        sign = -1.0 if eqn.primitive.name == "sub" else 1.0
        (a, miss_a), (b, miss_b) = self._try(eqn.invars[0]), self._try(eqn.invars[1])
        wide = [sum(self.reading.varies(v)) for v in eqn.invars]
        if a is not None and (b is None or wide[1] < wide[0]):
            got, side, miss = a, 0, miss_b
        elif b is not None and (a is None or wide[0] < wide[1]):
            got, side, miss = b.times(sign), 1, miss_a
        elif a is not None and b is not None:
            return self._sum_of_two(a, b.times(sign), eqn, number)
        elif (first := miss_a or miss_b) is not None:
            raise first
        else:
            return None
        if miss is not None and wide[1 - side] >= wide[side]:
            raise miss
        other = eqn.invars[1 - side]
        if self.reading.constant(other) == 0:
            return got
        more = Added(other, sign if side == 0 else 1.0, got.dims if size(other) else ())
        return dataclasses.replace(got, added=(*got.added, more))

    def _try(self, atom: Atom) -> tuple[Logits | None, Miss | None]:
        try:
            return self.of(atom), None
        except Miss as miss:
            return None, miss

    def _sum_of_two(self, a: Logits, b: Logits, eqn: JaxprEqn, number: int) -> Logits:
        dims = self.space.factors.meet(a.dims, b.dims) if len(a.dims) == len(b.dims) else a.dims
        if not b.is_plain or len(b.parts) != 1:
            a, b = b, a
        if not b.is_plain:
            raise Miss("its logits are a sum of logits that were masked or capped", number)
        if a.amp is not None or a.sink is not None:
            parts, added = a.parts, (*a.added, *(Added(p.atom, p.rest, dims) for p in b.parts))
        else:
            parts, added = (*a.parts, *b.parts), a.added
        return dataclasses.replace(a, dims=dims, parts=parts, added=added, numbers=a.numbers | b.numbers)

    def _tanh(self, eqn: JaxprEqn, number: int) -> Logits | None:
        got = self.of(eqn.invars[0])
        if got is None:
            return None
        if got.amp is not None:
            raise Miss("its logits are capped twice", number)
        if got.added or got.selected or got.sink:
            raise Miss("its soft cap comes after the mask or the bias", number)
        return dataclasses.replace(got, amp=1.0)

    def _select(self, eqn: JaxprEqn, number: int) -> Logits | None:
        if len(eqn.invars) != 3 or self.of(eqn.invars[0]) is not None:
            return None
        a, b = self.of(eqn.invars[1]), self.of(eqn.invars[2])
        if a is None and b is None:
            return None
        if a is not None and b is not None:
            raise Miss("its logits are chosen from two products", number)
        got, other = (a, eqn.invars[2]) if a is not None else (b, eqn.invars[1])
        assert got is not None
        fill = self.reading.constant(other)
        if fill is None or math.isnan(fill):
            raise Miss("where its mask is not set, its logits are other values", number)
        dims = got.dims if size(eqn.invars[0]) else ()
        chosen = Selected(eqn.invars[0], a is None, fill, dims)
        return dataclasses.replace(got, selected=(*got.selected, chosen))

    def _bounded(self, eqn: JaxprEqn, number: int) -> Logits | None:
        """max(x, the lowest number) is x; what bounds logits otherwise is no attention."""
        for side in (0, 1):
            got = self.of(eqn.invars[side])
            if got is None:
                continue
            c = self.reading.constant(eqn.invars[1 - side])
            low = eqn.primitive.name == "max"
            if c is not None and (c <= -1e30 if low else c >= 1e30):
                return got
            raise Miss(f"its logits are bounded by `{eqn.primitive.name}`", number)
        return None

    def _joined(self, eqn: JaxprEqn, number: int) -> Logits | None:
        found = [(k, got) for k, v in enumerate(eqn.invars) if (got := self.of(v)) is not None]
        if not found:
            return None
        axis, rest = eqn.params["dimension"], [v for v in eqn.invars if self.of(v) is None]
        if len(found) != 1 or len(rest) != 1 or size(rest[0])[axis] != 1 or found[0][1].sink is not None:
            raise Miss("its logits are joined with others", number)
        k, got = found[0]
        dims = self.space.after(eqn, [got.dims if j == k else None for j in range(len(eqn.invars))])
        return dataclasses.replace(got, dims=dims, sink=(rest[0], number))


_RULES = {
    "mul": Tracer._multiplied,
    "div": Tracer._multiplied,
    "neg": Tracer._negated,
    "add": Tracer._sum,
    "add_any": Tracer._sum,
    "sub": Tracer._sum,
    "tanh": Tracer._tanh,
    "select_n": Tracer._select,
    "max": Tracer._bounded,
    "min": Tracer._bounded,
    "concatenate": Tracer._joined,
}

_OTHER = frozenset(
    [
        "abs",
        "asinh",
        "atan",
        "cbrt",
        "ceil",
        "clamp",
        "cos",
        "cumsum",
        "erf",
        "exp2",
        "expm1",
        "floor",
        "gather",
        "integer_pow",
        "log",
        "log1p",
        "logistic",
        "pow",
        "rev",
        "round",
        "rsqrt",
        "sign",
        "sin",
        "sort",
        "sqrt",
        "square",
        "stop_gradient",
    ]
)
"""What logits may go through without ceasing to be scores of queries and keys, but not in attention."""
