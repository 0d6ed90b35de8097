"""A condition as the conditions that all hold where it does.

    and(le(s, t), broadcast(ne(ids, 0)))    ->    s <= t,  ids != 0
    mul(q_valid, k_valid) > 0               ->    q_valid != 0,  k_valid != 0

Booleans, and numbers taken for them: where a value is not zero. Only what is the same for all values is taken
apart, so that nothing rests on what the data happen to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xform.raising.dims import Dims, Facts, Sizes, pulled
from xform.raising.elementwise import cast, elementwise
from xform.raising.flat import View, place_of
from xform.raising.indices import SAME, dtype_of
from xform.raising.meaning import Tensor
from xform.trace import Atom, JaxprEqn, Literal, Var, shape_of

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


@dataclasses.dataclass(frozen=True)
class Condition:
    """It holds where a value of `view`, whose dimensions are `dims`, is not zero; or, where `sense` is False,
    is zero. above: where `factor` times it is greater than that, instead; pure: it is 0 wherever that holds.
    """

    view: View
    atom: Atom
    dims: Dims
    sense: bool = True
    above: float | None = None
    factor: float = 1.0
    pure: bool = False


class Conditions:
    """Takes conditions apart."""

    def __init__(self, facts: Facts, sizes: Sizes) -> None:
        self.facts = facts
        self.sizes = sizes

    def of(self, c: Condition) -> list[Condition]:
        """Conditions that all hold exactly where this one does; each follows from constants alone, or from
        data in a way that could not be taken apart.
        """
        atom = c.atom
        if isinstance(atom, Literal) or self.facts.static(c.view, atom):
            return [c]
        eqn = c.view.maker(atom)
        if eqn is None:
            if atom in c.view.inputs and c.view.outer is not None:
                outside = dataclasses.replace(c, view=c.view.outer, atom=c.view.inputs[atom])
                apart = self.of(outside)
                # The body has the value itself; what is made of it outside is of use where it is simpler.
                return apart if len(apart) > 1 or self._wide(apart[0]) < self._wide(c) else [c]
            return [c]
        moved = pulled(eqn, eqn.outvars.index(atom), c.dims, self.sizes)
        if moved is not None:
            below = dataclasses.replace(c, atom=eqn.invars[moved[0]], dims=moved[1])
            return self.of(below) if self._keeps_zero(c.view, eqn, moved[0]) else [c]
        if eqn.primitive.name in COMPARISONS:
            return self._compared(c, eqn)
        rule = _RULES.get(eqn.primitive.name)
        return (None if rule is None else rule(self, c, eqn)) or [c]

    def _wide(self, c: Condition) -> int:
        return sum(bool(dim) for dim in c.dims)

    def narrowed(self, c: Condition) -> Condition:
        """The condition of the smallest value of its view that it can be read from."""
        while (eqn := c.view.maker(c.atom)) is not None:
            k = place_of(eqn, c.atom)
            moved = pulled(eqn, k, c.dims, self.sizes)
            if moved is None or not self._keeps_zero(c.view, eqn, moved[0]):
                break
            c = dataclasses.replace(c, atom=eqn.invars[moved[0]], dims=moved[1])
        return c

    def smallest(self, view: View, atom: Atom, dims: Dims) -> Tensor:
        """The smallest value of the view that has the same numbers."""
        while (eqn := view.maker(atom)) is not None:
            moved = pulled(eqn, place_of(eqn, atom), dims, self.sizes)
            if moved is None or dtype_of(eqn.invars[moved[0]]) != dtype_of(atom):
                break
            atom, dims = eqn.invars[moved[0]], moved[1]
        return Tensor(atom, dims)

    def _keeps_zero(self, view: View, eqn: JaxprEqn, k: int) -> bool:
        """Whether a result of an equation that moves or casts is zero just where the operand is."""
        if eqn.primitive.name not in SAME:
            return True
        before, after = dtype_of(eqn.invars[k]), dtype_of(eqn.outvars[k])
        whole = before.kind in "biu" and (after.kind not in "iu" or after.itemsize >= before.itemsize)
        wider = before.kind == after.kind and after.itemsize >= before.itemsize
        return whole or wider or after == np.bool_ or self.facts.binary(view, eqn.invars[k])

    def _operand(self, c: Condition, v: Atom, sense: bool) -> list[Condition]:
        dims = c.dims if shape_of(v) else ()
        return self.of(dataclasses.replace(c, atom=v, dims=dims, sense=sense))

    def _compared(self, c: Condition, eqn: JaxprEqn) -> list[Condition]:
        for side in (0, 1):
            x, y = eqn.invars[side], eqn.invars[1 - side]
            bound = self.facts.constant(c.view, y)
            if bound is None:
                continue
            if self.facts.binary(c.view, x):
                off, on = (self._at(eqn, side, value, bound) for value in (0, 1))
                if off != on:
                    return self._operand(c, x, c.sense == on)
            name, whole = eqn.primitive.name, dtype_of(x).kind in "iu"
            if name in ("eq", "ne") and bound == 0 and whole:
                apart = self._operand(c, x, c.sense == (name == "ne"))
                if len(apart) > 1:
                    return apart
        return [c]

    def _at(self, eqn: JaxprEqn, side: int, value: float, bound: float) -> bool:
        dtype = dtype_of(eqn.invars[side])
        x, y = cast(np.asarray(value), dtype), cast(np.asarray(bound), dtype)
        return bool(elementwise(eqn, [x, y] if side == 0 else [y, x]))

    def _logical(self, c: Condition, v: Atom) -> bool:
        """Whether bits are truth values."""
        return self.facts.binary(c.view, v)

    def _and(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        if c.sense and all(self._logical(c, v) for v in eqn.invars):
            return [each for v in eqn.invars for each in self._operand(c, v, True)]
        return None

    def _or(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        whole = eqn.primitive.name == "or" or all(self._logical(c, v) for v in eqn.invars)
        if not c.sense and whole:
            return [each for v in eqn.invars for each in self._operand(c, v, False)]
        return None

    def _not(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        (x,) = eqn.invars
        return self._operand(c, x, not c.sense) if dtype_of(x) == np.bool_ else None

    def _mul(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        whole = dtype_of(eqn.outvars[0]).kind in "biu"
        if c.sense and (whole or all(self._logical(c, v) for v in eqn.invars)):
            return [each for v in eqn.invars for each in self._operand(c, v, True)]
        return None

    def _sub(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        one, x = eqn.invars
        if self.facts.constant(c.view, one) == 1 and self._logical(c, x):
            return self._operand(c, x, not c.sense)
        return None

    def _xor(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        for x, y in (eqn.invars, eqn.invars[::-1]):
            flip = self.facts.constant(c.view, y)
            if flip is not None and self._logical(c, x):
                return self._operand(c, x, c.sense != bool(flip))
        return None

    def _select(self, c: Condition, eqn: JaxprEqn) -> list[Condition] | None:
        if len(eqn.invars) != 3:
            return None
        which, *cases = eqn.invars
        fixed = [None if (x := self.facts.constant(c.view, v)) is None else bool(x) for v in cases]
        if None not in fixed:
            return None if fixed[0] == fixed[1] else self._operand(c, which, fixed[1] == c.sense)
        for k, other in ((0, 1), (1, 0)):
            if fixed[k] is not None and fixed[k] != c.sense:
                return [*self._operand(c, which, bool(other)), *self._operand(c, cases[other], c.sense)]
        return None


_Rule = Callable[[Conditions, Condition, JaxprEqn], list[Condition] | None]

_RULES: Mapping[str, _Rule] = {
    "and": Conditions._and,
    "min": Conditions._and,
    "or": Conditions._or,
    "max": Conditions._or,
    "not": Conditions._not,
    "mul": Conditions._mul,
    "sub": Conditions._sub,
    "xor": Conditions._xor,
    "select_n": Conditions._select,
}


def sides(c: Condition) -> tuple[str, Any, Any] | None:
    """What is compared, where a condition is a comparison: its name, whatever the sense, and both values."""
    eqn = c.view.maker(c.atom) if isinstance(c.atom, Var) else None
    if eqn is None or eqn.primitive.name not in COMPARISONS or c.above is not None:
        return None
    opposite = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
    name = eqn.primitive.name
    return name if c.sense else opposite[name], eqn.invars[0], eqn.invars[1]
