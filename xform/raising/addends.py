"""What is added to logits, taken apart into what hides keys and what is a bias.

    causal + where(padding, -1e9, 0) + slopes * distance    ->    two conditions, and a bias

A mask is 0 or far below at every point: read there where it follows from constants; where it comes from data,
such for either truth value of the booleans that it is made of, whatever these turn out to be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from xform.raising.bands import sample
from xform.raising.conditions import Condition, Conditions
from xform.raising.dims import Dims, Facts, Sizes, place, pulled
from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View, place_of
from xform.raising.indices import Array, dtype_of
from xform.raising.meaning import Tensor
from xform.raising.points import Known, Points, Unknown
from xform.trace import Atom, JaxprEqn, Literal, Var, shape_of

FAR = -9999.0
"""A logit that is no higher counts as hidden."""


@dataclasses.dataclass
class Found:
    """What was found so far. fills: what hidden logits are, or get added."""

    conditions: list[Condition] = dataclasses.field(default_factory=list)
    bias: list[tuple[View, Tensor, float]] = dataclasses.field(default_factory=list)
    fills: list[float] = dataclasses.field(default_factory=list)
    added: bool = False


class Impure(Exception):
    """What was a mask in a few rows is none in another: `condition`."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition = condition


class Addends:
    """Adds to what was `found`. mixed: values that turned out to be no masks."""

    def __init__(
        self, facts: Facts, conditions: Conditions, sizes: Sizes, found: Found, mixed: set[Atom]
    ) -> None:
        self.facts, self.conditions, self.sizes = facts, conditions, sizes
        self.found, self.mixed = found, mixed

    def into(self, view: View, atom: Atom, dims: Dims, factor: float) -> None:
        """`factor` times a value is added to logits."""
        dims = dims if shape_of(atom) else ()
        constant = self.facts.constant(view, atom)
        if constant is not None and constant * factor == 0:
            return
        if self.facts.static(view, atom) and self._still(view, atom, dims, factor):
            return
        if isinstance(atom, Literal):
            self._bias(view, atom, dims, factor)
            return
        eqn = view.maker(atom)
        if eqn is None:
            self._outside(view, atom, dims, factor)
        elif not self._opened(view, eqn, atom, dims, factor) and not self._by_truth(view, atom, dims, factor):
            self._bias(view, atom, dims, factor)

    def _outside(self, view: View, atom: Var, dims: Dims, factor: float) -> None:
        """An input: where it is nothing but masks outside, those; else a bias that the body has itself."""
        if atom in view.inputs and view.outer is not None:
            found = self._tried(view.outer, view.inputs[atom], dims, factor)
            if not found.bias:
                self._take(found)
                return
        self._bias(view, atom, dims, factor)

    def _tried(self, view: View, atom: Atom, dims: Dims, factor: float) -> Found:
        found = Found()
        Addends(self.facts, self.conditions, self.sizes, found, self.mixed).into(view, atom, dims, factor)
        return found

    def _take(self, found: Found) -> None:
        self.found.conditions += found.conditions
        self.found.bias += found.bias
        self.found.fills += found.fills
        self.found.added |= found.added

    def _hides(self, conditions: list[Condition], fill: float) -> None:
        self.found.conditions += conditions
        self.found.fills.append(fill)
        self.found.added = True

    def _bias(self, view: View, atom: Atom, dims: Dims, factor: float) -> None:
        """A bias; where it is far below at some places, known beforehand, these are hidden besides."""
        if self.facts.static(view, atom):
            rows = self._rows(view, atom, dims, factor)
            if rows is not None and (rows <= FAR).any() and not (rows <= FAR).all():
                hidden = float(rows[rows <= FAR].max())
                self._hides([Condition(view, atom, dims, True, FAR, factor)], hidden)
        self.found.bias.append((view, self.conditions.smallest(view, atom, dims), factor))

    def _rows(self, view: View, atom: Atom, dims: Dims, factor: float) -> Array | None:
        """A few rows of a value that follows from constants."""
        letters = sorted(set("".join(dims)))
        some = {c: np.arange(self.sizes[c]) if c == "s" else sample(self.sizes[c]) for c in letters}
        last = len(letters) - 1
        at = {c: x.reshape(-1, *[1] * (last - i)) for i, (c, x) in enumerate(some.items())}
        try:
            value = self.facts.points(view).lazy(atom, place(dims, at, self.sizes))
        except Unknown:
            return None
        with np.errstate(all="ignore"):
            return np.asarray(value.astype(np.float64) * factor)

    def _still(self, view: View, atom: Atom, dims: Dims, factor: float) -> bool:
        """Whether a value that follows from constants is a mask, as far as a few rows tell; then it is taken
        for one, and `Impure` says if it is not.
        """
        rows = (
            None if isinstance(atom, Literal) or atom in self.mixed else self._rows(view, atom, dims, factor)
        )
        if rows is None or not ((rows == 0) | (rows <= FAR)).all() or (rows <= FAR).all():
            return False
        condition = Condition(view, atom, dims, True, FAR, factor, pure=True)
        if (rows <= FAR).any():
            self._hides([condition], float(rows[rows <= FAR].max()))
        else:
            self.found.conditions.append(condition)
        return True

    def _opened(self, view: View, eqn: JaxprEqn, v: Var, dims: Dims, factor: float) -> bool:
        """Sums, scales, and choices between a value and one far below."""
        name, ins = eqn.primitive.name, eqn.invars
        moved = pulled(eqn, eqn.outvars.index(v), dims, self.sizes)
        if moved is not None:
            before, after = dtype_of(ins[moved[0]]), dtype_of(v)
            if after.kind in "biu" and after != before and before != np.bool_:
                return False  # numbers are cut off
            self.into(view, ins[moved[0]], moved[1], factor)
            return True
        if name in ("add", "add_any", "sub") and not self._binary_sum(view, ins):
            found = Found()
            inner = Addends(self.facts, self.conditions, self.sizes, found, self.mixed)
            inner.into(view, ins[0], dims, factor)
            inner.into(view, ins[1], dims, -factor if name == "sub" else factor)
            if found.conditions or all(shape_of(w) == shape_of(v) for w in ins):
                self._take(found)
                return True
            return False
        if name == "neg":
            self.into(view, ins[0], dims, -factor)
            return True
        if name in ("mul", "div"):
            return self._scaled(view, eqn, dims, factor)
        if name == "select_n" and len(ins) == 3:
            return self._selected(view, eqn, dims, factor)
        if name == "min" and factor > 0:
            both = [self._tried(view, w, dims, factor) for w in ins]
            if all(not each.bias and each.added for each in both):
                for each in both:
                    self._take(each)
                return True
        if name == "max" and factor > 0:
            for w, other in (ins, ins[::-1]):
                low = self.facts.constant(view, other)
                if low is not None and low * factor <= FAR:
                    found = self._tried(view, w, dims, factor)
                    if found.conditions and not found.bias:
                        found.fills = [max(f, low * factor) for f in found.fills]
                        self._take(found)
                        return True
        return False

    def _binary_sum(self, view: View, ins: list[Atom]) -> bool:
        """1 - m, m - 1: which is looked at as a whole."""
        pairs = (ins, ins[::-1])
        return any(self.facts.constant(view, a) is not None and self.facts.binary(view, b) for a, b in pairs)

    def _scaled(self, view: View, eqn: JaxprEqn, dims: Dims, factor: float) -> bool:
        for side in (0, 1) if eqn.primitive.name == "mul" else (0,):
            by = self.facts.constant(view, eqn.invars[1 - side])
            if by is None or not by or not math.isfinite(by):
                continue
            by = by if eqn.primitive.name == "mul" else 1 / by
            found = self._tried(view, eqn.invars[side], dims, factor * by)
            if found.conditions and not found.bias:
                self._take(found)
                return True
        return False

    def _selected(self, view: View, eqn: JaxprEqn, dims: Dims, factor: float) -> bool:
        which, *cases = eqn.invars
        for k, other in ((0, 1), (1, 0)):
            far = self.facts.constant(view, cases[k])
            if far is None or not far * factor <= FAR:
                continue
            at = dims if shape_of(which) else ()
            self._hides(self.conditions.of(Condition(view, which, at, bool(other))), far * factor)
            self.into(view, cases[other], dims, factor)
            return True
        return False

    def _by_truth(self, view: View, atom: Atom, dims: Dims, factor: float) -> bool:
        """Whether a value is 0 or far below by one condition of data."""
        truth = self._truth(view, atom, dims)
        if truth is None or not isinstance(truth.atom, Var):
            return False
        ends = []
        for value in (0, 1):
            known: Mapping[Var, Known] = {truth.atom: _always(value)}
            try:
                found = Points(view, known).at(atom, [0] * len(shape_of(atom)))
            except Unknown:
                return False
            ends.append(float(found) * factor)
        for value in (0, 1):
            if ends[value] == 0 and ends[1 - value] <= FAR:
                held = dataclasses.replace(truth, sense=bool(value))
                self._hides(self.conditions.of(held), ends[1 - value])
                return True
        return False

    def _truth(self, view: View, atom: Atom, dims: Dims) -> Condition | None:
        """The one value of zeros and ones that another is computed from, with constants."""
        while not self.facts.binary(view, atom):
            eqn = view.maker(atom) if isinstance(atom, Var) else None
            if eqn is None:
                if atom not in view.inputs or view.outer is None:
                    return None
                view, atom = view.outer, view.inputs[atom]
                continue
            moved = pulled(eqn, place_of(eqn, atom), dims, self.sizes)
            if moved is not None:
                atom, dims = eqn.invars[moved[0]], moved[1]
                continue
            rest = [v for v in eqn.invars if self.facts.constant(view, v) is None]
            if not is_elementwise(eqn) or len(rest) != 1:
                return None
            (atom,) = rest
            dims = dims if shape_of(atom) else ()
        return Condition(view, atom, dims)


def _always(value: int) -> Known:
    return lambda index: np.asarray(value)
