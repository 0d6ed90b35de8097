"""Values as sums of products of other values: what a contraction, a scaling or an update does, however
spelled.

    s + dot_general(k, v - sum(s * k)) * b    ->    s[d,e] + k[d] v[e] b - k[d] k[m] s[m,e] b

`Terms.of(value, index)` pulls a symbolic index, a tuple of labels a dimension, back through whatever moves
numbers, and opens sums, products and contractions on the way; a label that only factors have is summed over.
What depends on a value in `states` is always opened, and raises `NotLinear` where that cannot be done;
anything else is a factor as soon as `stop` says so. Casts between floats are no part of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xform.higher_order import bodies
from xform.raising.flat import View
from xform.raising.indices import SAME, groups
from xform.trace import Atom, JaxprEqn, Literal, Var, shape_of

Dim = tuple[int, ...]
"""The labels that a dimension's index is made of, the outermost first; none where it is of size 1."""

Index = tuple[Dim, ...]


class NotLinear(Exception):
    """A state goes through an equation that is no sum and no product."""

    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__(f"its state goes through {eqn.primitive.name}")
        self.eqn = eqn


@dataclasses.dataclass(frozen=True)
class Factor:
    """A value at an index; power -1: what is divided by."""

    atom: Var
    index: Index
    power: int = 1

    @property
    def labels(self) -> frozenset[int]:
        return frozenset(label for dim in self.index for label in dim)


@dataclasses.dataclass(frozen=True)
class Term:
    """A coefficient times factors, summed over the labels that the value itself does not have."""

    coefficient: float
    factors: tuple[Factor, ...] = ()

    def times(self, other: Term) -> Term:
        return Term(self.coefficient * other.coefficient, self.factors + other.factors)

    @property
    def labels(self) -> frozenset[int]:
        return frozenset().union(*(f.labels for f in self.factors))


class Labels:
    """Sizes of labels, and of which labels one turned out to be made."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.parts: dict[int, Dim] = {}

    def fresh(self, size: int) -> Dim:
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def whole(self, sizes: Sequence[int]) -> Index:
        return tuple(self.fresh(n) for n in sizes)

    def resolved(self, dim: Dim) -> Dim:
        """The labels of a dimension, those that were split as their parts."""
        if not any(label in self.parts for label in dim):
            return dim
        return tuple(
            p
            for label in dim
            for p in (self.resolved(self.parts[label]) if label in self.parts else (label,))
        )

    def factor(self, f: Factor) -> Factor:
        return Factor(f.atom, tuple(map(self.resolved, f.index)), f.power)

    def term(self, t: Term) -> Term:
        return Term(t.coefficient, tuple(map(self.factor, t.factors)))

    def divided(self, dims: Dim, sizes: Sequence[int]) -> list[Dim] | None:
        """Labels shared out among dimensions of these sizes; None where they do not fit."""
        left = list(self.resolved(dims))
        found = []
        for size in sizes:
            own: list[int] = []
            room = size
            while room > 1:
                if not left:
                    return None
                label = left.pop(0)
                n = self.sizes[label]
                if n > room:
                    if n % room:
                        return None
                    outer, inner = self.fresh(room), self.fresh(n // room)
                    self.parts[label] = outer + inner
                    label, n = outer[0], room
                    left[:0] = inner
                if room % n:
                    return None
                own.append(label)
                room //= n
            found.append(tuple(own))
        return None if left else found


class Same:
    """One variable for all that a view computes alike: the same primitive of the same operands."""

    def __init__(self, view: View) -> None:
        first: dict[Any, Var] = {}
        self.of: dict[Var, Var] = {}
        for eqn in view.eqns:
            if eqn.effects or bodies(eqn):
                continue
            key = (
                eqn.primitive.name,
                repr(sorted((k, str(v)) for k, v in eqn.params.items())),
                *map(self._key, eqn.invars),
            )
            for k, v in enumerate(eqn.outvars):
                self.of[v] = first.setdefault((key, k, str(v.aval)), v)

    def _key(self, atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return (str(atom.aval), str(atom.val))
        return self.of.get(atom, atom)

    def __call__(self, var: Var) -> Var:
        return self.of.get(var, var)


@dataclasses.dataclass
class Outer:
    """What the inputs of a loop's body are outside: terms of the view around it, and for an input its atom
    there, with the time's label in front where a turn gets a slice of it.
    """

    terms: Terms
    inputs: Mapping[Var, tuple[Atom, bool]]
    time: Dim


Stop = Callable[[Factor], bool]


class Terms:
    """Sums of products in a view. states: variables that must not be hidden inside of others."""

    def __init__(
        self, view: View, labels: Labels, states: Sequence[Var] = (), outer: Outer | None = None
    ) -> None:
        self.view = view
        self.labels = labels
        self.same = Same(view)
        self.outer = outer
        self.states = frozenset(states)
        self.touched: set[Var] = set(states)
        for eqn in view.eqns:
            if any(isinstance(v, Var) and v in self.touched for v in eqn.invars):
                self.touched.update(eqn.outvars)

    def of(self, atom: Atom, index: Index, stop: Stop, within: frozenset[Var] = frozenset()) -> list[Term]:
        """The terms of a value at an index. within: variables to be taken for factors, besides the states."""
        return [self.labels.term(t) for t in self._of(atom, index, stop, self.states | within)]

    def _of(self, atom: Atom, index: Index, stop: Stop, ends: frozenset[Var]) -> list[Term]:
        if isinstance(atom, Literal):
            return [Term(float(atom.val))]
        index = _apart(atom, index)
        while atom not in ends and (moved := self.moved(atom, index)) is not None:
            atom, index = moved
            if isinstance(atom, Literal):
                return self._of(atom, index, stop, ends)
            index = _apart(atom, index)
        if atom in ends:
            return [Term(1.0, (Factor(atom, index),))]
        var = self.same(atom)
        leaf = [Term(1.0, (Factor(var, index),))]
        touched = var in self.touched
        eqn = self.view.maker(var)
        if (
            eqn is None
            and self.outer is not None
            and var in self.outer.inputs
            and not stop(leaf[0].factors[0])
        ):
            out, timed = self.outer.inputs[var]
            return self.outer.terms._of(out, (self.outer.time, *index) if timed else index, stop, frozenset())
        if eqn is None or (not touched and stop(self.labels.factor(leaf[0].factors[0]))):
            return leaf
        opened = self._opened(eqn, index, stop, ends, touched)
        if opened is None and touched:
            raise NotLinear(eqn)
        return leaf if opened is None else opened

    def _opened(
        self, eqn: JaxprEqn, index: Index, stop: Stop, ends: frozenset[Var], touched: bool
    ) -> list[Term] | None:
        def ask(number: int, at: Index) -> list[Term]:
            v = eqn.invars[number]
            return self._of(v, at if shape_of(v) else (), stop, ends)

        match eqn.primitive.name:
            case "mul":
                return _product(ask(0, index), ask(1, index))
            case "div":
                below = ask(1, index)
                return _product(ask(0, index), _inverse(below)) if len(below) == 1 else None
            case "neg":
                return _scaled(ask(0, index), -1.0)
            case "integer_pow" | "square" if eqn.params.get("y", 2) == 2:
                return _product(ask(0, index), ask(0, index))
            case "dot_general":
                (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
                if lc and not touched and any(shape_of(eqn.invars[0])[d] > 1 for d in lc):
                    return None
                return self._dot(eqn, index, ask, (lc, rc), (lb, rb))
            case "add" | "add_any" | "sub" if touched:
                sign = -1.0 if eqn.primitive.name == "sub" else 1.0
                return ask(0, index) + _scaled(ask(1, index), sign)
            case "reduce_sum" if touched:
                axes, sizes = eqn.params["axes"], shape_of(eqn.invars[0])
                rest = list(index)
                at = tuple(self.labels.fresh(n) if d in axes else rest.pop(0) for d, n in enumerate(sizes))
                return self._summed(ask(0, at), [label for d in axes for label in at[d]])
        return None

    def _summed(self, terms: Sequence[Term], labels: Sequence[int]) -> list[Term]:
        """Terms that are summed over labels: as often as such a label counts, where a term lacks it."""
        parts = self.labels.resolved(tuple(labels))
        resolved = [self.labels.term(t) for t in terms]
        lacking = [math.prod(self.labels.sizes[p] for p in parts if p not in t.labels) for t in resolved]
        return [Term(t.coefficient * n, t.factors) for t, n in zip(resolved, lacking, strict=True)]

    def _dot(self, eqn: JaxprEqn, index: Index, ask: Any, contract: Any, batch: Any) -> list[Term]:
        sides = []
        shared = list(index[: len(batch[0])])
        summed = self.labels.whole([shape_of(eqn.invars[0])[d] for d in contract[0]])
        rest = list(index[len(shared) :])
        for side in (0, 1):
            at: dict[int, Dim] = dict(zip(batch[side], shared, strict=True))
            at |= dict(zip(contract[side], summed, strict=True))
            dims = range(len(shape_of(eqn.invars[side])))
            sides.append(ask(side, tuple(at[d] if d in at else rest.pop(0) for d in dims)))
        return self._summed(_product(*sides), [label for dim in summed for label in dim])

    def moved(self, var: Var, index: Index) -> tuple[Atom, Index] | None:
        """Where the numbers of a value are that is only moved, or cast between floats."""
        eqn = self.view.maker(var)
        if eqn is None:
            return None
        if not eqn.invars:
            return None
        x = eqn.invars[0]
        name = eqn.primitive.name
        if name in SAME:
            if name == "convert_element_type" and not (_is_float(x) and _is_float(var)):
                return None
            return eqn.invars[eqn.outvars.index(var)], index
        match name:
            case "transpose":
                at = dict(zip(eqn.params["permutation"], index, strict=True))
                return x, tuple(at[d] for d in range(len(index)))
            case "broadcast_in_dim":
                dims = zip(shape_of(x), eqn.params["broadcast_dimensions"], strict=True)
                return x, tuple(() if n == 1 else index[d] for n, d in dims)
            case "squeeze":
                rest = list(index)
                gone = eqn.params["dimensions"]
                return x, tuple(() if d in gone else rest.pop(0) for d in range(len(shape_of(x))))
            case "expand_dims":
                return x, tuple(i for d, i in enumerate(index) if d not in eqn.params["dimensions"])
            case "reshape" if eqn.params["dimensions"] is None and 0 not in shape_of(x):
                return self._reshaped(x, var, index)
        return None

    def _reshaped(self, x: Atom, var: Var, index: Index) -> tuple[Atom, Index] | None:
        old, new = shape_of(x), shape_of(var)
        at: list[Dim] = [()] * len(old)
        for left, right in groups(old, new):
            shared = self.labels.divided(sum((index[d] for d in right), ()), [old[d] for d in left])
            if shared is None:
                return None
            for d, dim in zip(left, shared, strict=True):
                at[d] = dim
        return x, tuple(at)


def _apart(atom: Atom, index: Index) -> Index:
    """Where a dimension is of size 1, elementwise equations repeat it: there is nothing to say."""
    return tuple(() if n == 1 else dim for n, dim in zip(shape_of(atom), index, strict=True))


def _is_float(x: Any) -> bool:
    return bool(np.issubdtype(x.aval.dtype, np.floating) or x.aval.dtype.name.startswith(("bfloat", "float")))


def _scaled(terms: Sequence[Term], by: float) -> list[Term]:
    return [Term(t.coefficient * by, t.factors) for t in terms]


def _product(left: Sequence[Term], right: Sequence[Term]) -> list[Term]:
    return [a.times(b) for a in left for b in right]


def _inverse(terms: Sequence[Term]) -> list[Term]:
    (term,) = terms
    factors = tuple(Factor(f.atom, f.index, -f.power) for f in term.factors)
    return [Term(1.0 / term.coefficient if term.coefficient else math.inf, factors)]
