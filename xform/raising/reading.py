"""What is asked of a body again and again: which equations matter, along which dimensions a value changes,
and what is a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from xform.axes.factors import Factors, Raw, Shape
from xform.axes.rules import ELEMENTWISE, RULES
from xform.raising.flat import View, dtype_of, size
from xform.raising.indices import SAME
from xform.raising.masks import Masks
from xform.raising.points import Points, Unknown
from xform.trace import Atom, JaxprEqn, Literal, Tracer, Var, has_effects

MOVES = SAME - {"stop_gradient"} | {"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"}
"""Primitives whose result holds the numbers of an operand, all of them, perhaps cast or repeated."""

REDUCTIONS = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
    ]
)


def moved(eqn: JaxprEqn, v: Var) -> int | None:
    """Which result of an equation that only moves or casts holds the numbers of `v`."""
    if eqn.primitive.name not in MOVES:
        return None
    return next((k for k, w in enumerate(eqn.invars) if w is v and k < len(eqn.outvars)), None)


class Reading:
    """A body being read. live: the numbers of equations on which its results or effects depend."""

    def __init__(self, view: View, whole: bool = True) -> None:
        self.view = view
        self.points = Points(view, wide=True)
        self.masks: dict[object, Masks] = {}  # by the sizes of their letters
        self._static = self._find_static()
        self._varies: dict[Var, tuple[bool, ...]] = {}
        self._numbers: dict[Var, float | None] = {}
        self.live: set[int] = self._find_live() if whole else set()

    def _find_live(self) -> set[int]:
        view = self.view
        live = view.ancestors(view.jaxpr.outvars)
        effects = [n for n, eqn in enumerate(view.eqns) if n not in live and has_effects(eqn)]
        if effects:
            live |= view.ancestors([v for n in effects for v in view.eqns[n].invars]) | set(effects)
        return live

    def users(self, v: Var) -> list[int]:
        """The numbers of equations that read a value and matter; -1 where the body returns it."""
        return [n for n in self.view.users.get(v, ()) if n == -1 or n in self.live]

    def number(self, atom: Atom) -> int:
        """Of the equation that makes it; -1 where none does."""
        return self.view.makers.get(atom, -1) if isinstance(atom, Var) else -1

    def follows(self, atom: Atom, after: Collection[Var]) -> bool:
        """Whether a value depends on one of these."""
        first = min(map(self.number, after), default=0)
        seen: set[int] = set()
        todo = [atom]
        while todo:
            v = todo.pop()
            if isinstance(v, Literal):
                continue
            if v in after:
                return True
            n = self.number(v)
            if n >= first and n >= 0 and n not in seen:
                seen.add(n)
                todo += self.view.eqns[n].invars
        return False

    def between(self, start: Collection[Var], end: Sequence[Atom]) -> set[int]:
        """The numbers of equations that depend on one of `start`, and on which one of `end` does."""
        first = min(map(self.number, start), default=0)
        back: set[int] = set()
        todo = list(end)
        while todo:
            v = todo.pop()
            n = self.number(v)
            if n >= first and n >= 0 and n not in back and v not in start:
                back.add(n)
                todo += self.view.eqns[n].invars
        after = set(start)
        found = set()
        for n in sorted(back):
            eqn = self.view.eqns[n]
            if any(isinstance(v, Var) and v in after for v in eqn.invars):
                found.add(n)
                after.update(eqn.outvars)
        return found

    def constant(self, atom: Atom) -> float | None:
        """The number that every element of a value is, whatever the inputs are; None where it is not so."""
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return (
                float(value)
                if (value.size == 1 and value.dtype.kind in "biuf") or value.dtype.name == "bfloat16"
                else None
            )
        if atom not in self._numbers:
            self._numbers[atom] = self._constant(atom)
        return self._numbers[atom]

    def _constant(self, v: Var) -> float | None:
        if any(self.varies(v)) or self.takes_inputs(v):
            return None
        try:
            return float(self.points.at(v, (0,) * len(size(v))))
        except (Unknown, TypeError, ValueError):
            return None

    def takes_inputs(self, atom: Atom) -> bool:
        """Whether a value depends on an input of the program, a turn of a loop, or what is random."""
        return isinstance(atom, Var) and atom not in self._static

    def is_boolean(self, atom: Atom) -> bool:
        """Whether a value is a boolean's 0 and 1, cast and moved."""
        while dtype_of(atom).kind != "b":
            number = self.number(atom)
            if number < 0 or len(self.view.eqns[number].invars) != 1:
                return False
            atom = self.view.eqns[number].invars[0]
        return True

    def _find_static(self) -> set[Var]:
        view = self.view
        found = {v for v, value in view.constants.items() if not isinstance(value, Tracer)}
        if view.outer is not None and view.inputs:
            outer = Reading(view.outer, whole=False)
            found |= {v for v, atom in view.inputs.items() if not outer.takes_inputs(atom)}
        for eqn in view.eqns:
            if eqn.primitive.name.startswith(("random", "threefry", "rng")) or eqn.effects:
                continue
            if all(isinstance(v, Literal) or v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return found

    def varies(self, atom: Atom) -> tuple[bool, ...]:
        """Along which dimensions a value may change, by what makes it."""
        if isinstance(atom, Literal):
            return tuple(n > 1 for n in size(atom))
        if atom not in self._varies:
            todo = [atom]
            while todo:
                v = todo[-1]
                eqn = self.view.maker(v)
                first = [] if eqn is None or eqn.primitive.name not in _SPREADS else eqn.invars
                missing = [w for w in first if isinstance(w, Var) and w not in self._varies]
                if missing:
                    todo += missing
                    continue
                todo.pop()
                self._varies[v] = self._spread(v, eqn)
        return self._varies[atom]

    def _spread(self, v: Var, eqn: JaxprEqn | None) -> tuple[bool, ...]:
        sizes = size(v)
        wide = tuple(n > 1 for n in sizes)
        if eqn is None or eqn.primitive.name not in _SPREADS:
            value = self.view.constants.get(v)
            if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
                return (False,) * len(sizes)
            return wide
        name, params = eqn.primitive.name, eqn.params
        ins = [self.varies(w) if isinstance(w, Var) else (False,) * len(size(w)) for w in eqn.invars]
        if name == "iota":
            return tuple(n > 1 and d == params["dimension"] for d, n in enumerate(sizes))
        if name == "broadcast_in_dim":
            made = [False] * len(sizes)
            for d, own in zip(params["broadcast_dimensions"], ins[0], strict=True):
                made[d] = own
            return tuple(made)
        if name == "transpose":
            return tuple(ins[0][d] for d in params["permutation"])
        if name == "squeeze":
            return tuple(own for d, own in enumerate(ins[0]) if d not in params["dimensions"])
        if name in REDUCTIONS:
            return tuple(own for d, own in enumerate(ins[0]) if d not in params["axes"])
        if name == "slice":
            return tuple(a and b for a, b in zip(ins[0], wide, strict=True))
        if name == "reshape":
            return _reshaped(ins[0], size(eqn.invars[0]), sizes)
        full = [each for each in ins if len(each) == len(sizes)]
        return tuple(any(each[d] for each in full) for d in range(len(sizes)))


_SPREADS = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "iota", "reshape", "slice", "squeeze", "transpose"}


def _reshaped(own: Sequence[bool], old: Sequence[int], new: Sequence[int]) -> tuple[bool, ...]:
    f = Factors()
    dims = f.fresh(old)
    made = f.reshape(dims, new)
    changing = {leaf for d, changes in zip(dims, own, strict=True) if changes for leaf in f.leaves(d)}
    known = {leaf for d in dims for leaf in f.leaves(d)}
    return tuple(any(leaf in changing or leaf not in known for leaf in f.leaves(d)) for d in made)


class Space:
    """The dimensions of values as factors, for what is followed from place to place."""

    def __init__(self) -> None:
        self.factors = Factors()
        self.joined: list[tuple[Raw, int]] = []

    def fresh(self, atom: Atom) -> Shape:
        return self.factors.fresh(size(atom))

    def leaves(self, dim: Raw) -> Raw:
        found = self.factors.leaves(dim)
        for together, one in self.joined:
            n = len(together)
            for i in range(len(found) - n + 1):
                if found[i : i + n] == together:
                    found = (*found[:i], one, *found[i + n :])
                    break
        return found

    def join(self, together: Raw) -> int:
        """One factor in place of several, wherever they stand in this order in one dimension."""
        (one,) = self.factors.fresh((self.factors.length(together),))[0]
        self.joined.append((together, one))
        return one

    def all(self, dims: Shape) -> set[int]:
        """The factors of all dimensions."""
        return {leaf for dim in dims for leaf in self.leaves(dim)}

    def size(self, leaf: int) -> int:
        return self.factors.size[leaf]

    def after(self, eqn: JaxprEqn, ins: Sequence[Shape | None], k: int = 0) -> Shape:
        """The dimensions of result `k`; None for operands that are not followed, e.g. what is added."""
        name = eqn.primitive.name
        sizes = size(eqn.outvars[k])
        if name in ELEMENTWISE or name in SAME:
            made: Shape | None = None
            for dims in ins:
                if dims is not None and len(dims) == len(sizes):
                    made = dims if made is None else self.factors.meet(made, dims)
            return self.factors.fresh(sizes) if made is None else made
        rule = RULES.get(name)
        if rule is None:
            return self.factors.fresh(sizes)
        given = [self.fresh(v) if dims is None else dims for v, dims in zip(eqn.invars, ins, strict=True)]
        return tuple(rule(self.factors, eqn, given)[k])
