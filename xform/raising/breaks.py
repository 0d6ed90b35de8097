"""Where along the keys a mask can change at all, so that a query's need be looked at in few places.

    t - s < 4096               changes at s = t - 4095
    ids[t] == ids[s]           where ids are in order, where those of ids[t] begin and where they end
    and, or, select of these   at any of their places

Between two of these places a query sees all keys or none. So a mask that follows from comparisons of what
queries have with what keys have, which is in order, is known at every position from a few for each query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from xform.raising.conditions import COMPARISONS, Condition
from xform.raising.dims import Dims, Facts, Sizes, place, pulled
from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View, dtype_of
from xform.raising.indices import SAME, Array
from xform.raising.points import Unknown
from xform.trace import Atom, JaxprEqn, Var, shape_of

FEW = 64
"""Up to as many places that are the same for all queries."""


def breaks(conditions: Sequence[Condition], facts: Facts, sizes: Sizes) -> list[Array] | None:
    """Numbers of keys from which on a condition may begin or cease to hold, each [queries] or for all of
    them; None where that is not known. Letters besides t and s are at 0.
    """
    places, found = _Places(facts, sizes), list[Array]()
    for c in conditions:
        try:
            more = places.of(c.view, c.atom, c.dims)
        except Unknown:
            return None
        if more is None:
            return None
        found += more
    return found


@dataclasses.dataclass(frozen=True)
class _Places:
    facts: Facts
    sizes: Sizes

    def of(self, view: View, atom: Atom, dims: Dims) -> list[Array] | None:
        """Of a value with these letters."""
        letters = self._letters(view, atom, dims)
        if "s" not in letters:
            return []
        if "t" not in letters:
            x = self._along(view, atom, dims, "s")
            changes = np.flatnonzero(x[1:] != x[:-1]) + 1
            return list(changes) if changes.size <= FEW else None
        if (below := self._below(view, atom, dims)) is not None:
            return self.of(*below)
        eqn = view.maker(atom)
        if eqn is None:
            return None
        if eqn.primitive.name in COMPARISONS and (found := self._compared(view, eqn, dims)) is not None:
            return found
        return self._of_any(view, eqn, dims) if is_elementwise(eqn) else None

    def _of_any(self, view: View, eqn: JaxprEqn, dims: Dims) -> list[Array] | None:
        """Those of all operands."""
        found = list[Array]()
        for v in eqn.invars:
            more = self.of(view, v, dims if shape_of(v) else ())
            if more is None:
                return None
            found += more
        return found

    def _compared(self, view: View, eqn: JaxprEqn, dims: Dims) -> list[Array] | None:
        """Of x < y and the like: where what keys have comes to what a query has, and where it goes beyond."""
        x, y = (self._parts(view, v, dims if shape_of(v) else ()) for v in eqn.invars)
        if x is None or y is None:
            return None
        if dtype_of(eqn.invars[0]).kind in "iu":
            queries, keys = y[0] - x[0], x[1] - y[1]
        elif x[1].ndim == 0 and y[0].ndim == 0:  # numbers with a fraction are compared as they are
            queries, keys = x[0], y[1]
        elif x[0].ndim == 0 and y[1].ndim == 0:
            queries, keys = y[0], x[1]
        else:
            return None
        return _reached(np.broadcast_to(queries, (self.sizes["t"],)), keys)

    def _parts(self, view: View, atom: Atom, dims: Dims) -> tuple[Array, Array] | None:
        """What queries have and what keys have, whose sum a value is; 0 where one of them has nothing."""
        letters, none = self._letters(view, atom, dims), np.zeros((), np.int64)
        if not {"t", "s"} <= letters:
            own = self._along(view, atom, dims, "s" if "s" in letters else "t")
            own = own.astype(np.int64) if own.dtype.kind in "iu" else own
            return (none, own) if "s" in letters else (own, none)
        if dtype_of(atom).kind not in "iu":
            return None
        if (below := self._below(view, atom, dims)) is not None:
            return _fitting(self._parts(*below), atom) if dtype_of(below[1]).kind in "iu" else None
        eqn = view.maker(atom)
        if eqn is None or eqn.primitive.name not in ("add", "sub"):
            return None
        x, y = (self._parts(view, v, dims if shape_of(v) else ()) for v in eqn.invars)
        if x is None or y is None:
            return None
        sign = 1 if eqn.primitive.name == "add" else -1
        return _fitting((x[0] + sign * y[0], x[1] + sign * y[1]), atom)

    def _letters(self, view: View, atom: Atom, dims: Dims) -> set[str]:
        return set("".join(dims[d] for d in self.facts.varies(view, atom)))

    def _along(self, view: View, atom: Atom, dims: Dims, letter: str) -> Array:
        """A value at all of one letter."""
        at = {letter: np.arange(self.sizes[letter])}
        x = self.facts.points(view).at(atom, place(dims, at, self.sizes))
        return np.broadcast_to(x, (self.sizes[letter],))

    def _below(self, view: View, atom: Atom, dims: Dims) -> tuple[View, Atom, Dims] | None:
        """The value of the same numbers that one is made of by movement, or is in a view around."""
        if not isinstance(atom, Var):
            return None
        eqn = view.maker(atom)
        if eqn is None:
            around = view.outer if atom in view.inputs else None
            return None if around is None else (around, view.inputs[atom], dims)
        moved = pulled(eqn, eqn.outvars.index(atom), dims, self.sizes)
        if moved is None or (eqn.primitive.name in SAME and dtype_of(atom).kind not in "biuf"):
            return None
        return view, eqn.invars[moved[0]], moved[1]


def _fitting(parts: tuple[Array, Array] | None, atom: Atom) -> tuple[Array, Array] | None:
    """The parts of a value of integers where no sum of them is beyond its type."""
    if parts is None:
        return None
    known = np.iinfo(dtype_of(atom))
    low, high = (sum(int(f(part)) for part in parts) for f in (np.min, np.max))
    return parts if known.min <= low and high <= known.max else None


def _reached(queries: Array, keys: Array) -> list[Array] | None:
    """The first keys that have as much as each query, and more; where keys are in order, either way."""
    if keys.ndim == 0:
        return []
    if (queries != queries).any() or (keys != keys).any():
        return None
    if (keys[1:] >= keys[:-1]).all():
        return [np.searchsorted(keys, queries, side) for side in ("left", "right")]
    if (keys[1:] <= keys[:-1]).all():
        return [keys.size - np.searchsorted(keys[::-1], queries, side) for side in ("right", "left")]
    return None
