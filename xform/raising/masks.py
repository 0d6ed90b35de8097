"""Which keys a query sees, and what is added to its logits: read from whatever a program makes masks of.

    masks = Masks(view, sizes)                         one for a view; sizes of letters
    pieces = masks.of([Term(Tensor(m, dims)),                      the logits stay where m is not zero,
                       Term(Tensor(p, dims), "hidden", -1e9),      are -1e9 where p is not zero,
                       Term(Tensor(a, dims), "added", factor=2)])  and 2 * a is added to them
    pieces.mask      a Mask: all that hides keys, of all terms together
    pieces.bias      the terms added that hide nothing: tensors, their factors and their kinds

    masks.seen(pieces.mask, points, at)   booleans, for `at`: an integer array for each letter
    masks.value(tensor, points, at)       a bias, or any tensor, there

Conditions are taken apart by `conditions`. What follows from constants alone is evaluated over positions and
fitted by `bands`. What comes from data is told by the letters that it changes with: with keys alone (or
queries) it is padding; numbers of queries that equal numbers of keys are segments; a bound for keys that is
found when the program runs is decoding; anything else is arbitrary. What is added is a mask where it is 0 or
FAR and below at every point, whatever the data; else it is a bias, and alibi where it is a line over keys
for each head.

An atom of the mask may be one of a view around this one, where that has the simpler values: each turn of this
body is given the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any
from typing import Literal as OneOf

import numpy as np

from xform.ops.masks import Band
from xform.raising.addends import FAR, Addends, Found, Impure
from xform.raising.bands import blocks, fit, kinds
from xform.raising.breaks import breaks
from xform.raising.conditions import Condition, Conditions, sides
from xform.raising.dims import Dims, Facts, Sizes, place
from xform.raising.flat import View, dtype_of
from xform.raising.indices import Array
from xform.raising.meaning import Chosen, Mask, Tensor
from xform.raising.points import Points, Unknown, depends
from xform.raising.slopes import is_alibi
from xform.trace import Atom, Var, shape_of

_MANY = 1 << 24


@dataclasses.dataclass(frozen=True)
class Term:
    """What is done to logits: they stay where `tensor` is not zero ("seen") or is zero ("hidden"), and are
    `filled` elsewhere; or `factor` times it is added.
    """

    tensor: Tensor
    role: OneOf["seen", "hidden", "added"] = "seen"
    filled: float = -math.inf
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The mask of all terms, and what is added besides: factor times tensor; kinds: "alibi", "bias"."""

    mask: Mask
    bias: tuple[Tensor, ...] = ()
    factors: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()


class Masks:
    """The masks of one view."""

    def __init__(self, view: View, sizes: Sizes, facts: Facts | None = None) -> None:
        self.view = view
        self.sizes = {"t": 1, "s": 1, **sizes}
        self.facts = facts or Facts()
        self.conditions = Conditions(self.facts, self.sizes)
        self._bands: dict[Any, Band | None] = {}

    def of(self, terms: Sequence[Term]) -> Pieces:
        """What all terms come to."""
        mixed: set[Atom] = set()
        while True:
            try:
                return self._of(terms, mixed)
            except Impure as e:
                mixed.add(e.condition.atom)

    def _of(self, terms: Sequence[Term], mixed: set[Atom]) -> Pieces:
        found = Found()
        for term in terms:
            atom, dims = term.tensor.atom, term.tensor.dims
            if term.role == "added":
                Addends(self.facts, self.conditions, self.sizes, found, mixed).into(
                    self.view, atom, dims, term.factor
                )
            else:
                found.conditions += self.conditions.of(Condition(self.view, atom, dims, term.role == "seen"))
                found.fills.append(term.filled)
        bias = [(Tensor(t.atom, self._changing(v, t)), f, self._bias_kind(v, t)) for v, t, f in found.bias]
        return Pieces(
            self._mask(found),
            tuple(t for t, _, _ in bias),
            tuple(f for _, f, _ in bias),
            tuple(k for _, _, k in bias),
        )

    def _mask(self, found: Found) -> Mask:
        still = [c for c in found.conditions if self.facts.static(c.view, c.atom)]
        named: dict[str, None] = {}
        alone = [c for c in still if self._by_position(c)]
        band = self._band(alone)
        table: list[Tensor] = []
        if band is not None:
            named.update(
                dict.fromkeys(k for k in kinds(band, self.sizes["t"], self.sizes["s"]) if k != "full")
            )
        chosen: list[Tensor] = []
        for c in still if band is None else [c for c in still if c not in alone]:
            named["arbitrary"] = None
            table.append(self._chosen(c))
        segments: list[tuple[Tensor, Tensor]] = []
        for c in found.conditions:
            if c in still:
                continue
            pair = self._segments(c)
            if pair is not None:
                segments.append(pair)
                named["segments"] = None
                continue
            each = self._chosen(c)
            chosen.append(each)
            named[self._kind(c, set("".join(each.dims)))] = None
        fills = found.fills or [-math.inf]
        return Mask(
            band=band,
            table=bool(table),
            chosen=tuple(dict.fromkeys((*table, *chosen))),
            segments=tuple(dict.fromkeys(segments)),
            filled=max(fills),
            uneven=len(set(fills)) > 1,
            added=found.added,
            kinds=tuple(named) or ("full",),
        )

    # ------------------------------------------------------------ values at positions

    def value(self, tensor: Tensor, points: Points, at: Mapping[str, Any]) -> Array:
        """A tensor where its letters are at `at`; it broadcasts with those. Raises `Unknown`."""
        return points.lazy(tensor.atom, place(tensor.dims, at, self.sizes))

    def seen(self, mask: Mask, points: Points, at: Mapping[str, Any]) -> Array:
        """Whether keys are seen where all letters are at `at`. Raises `Unknown`."""
        found: Array = np.ones((), np.bool_)
        if mask.band is not None:
            found = found & mask.band.allowed(np.asarray(at.get("t", 0)), np.asarray(at["s"]))
        for tensor in mask.chosen:
            value = self.value(tensor, points, at)
            if not isinstance(tensor, Chosen):
                found = found & (value != 0)
            elif tensor.above is not None:
                found = found & (value.astype(np.float64) * tensor.factor > tensor.above)
            else:
                found = found & ((value != 0) != tensor.negated)
        for q, k in mask.segments:
            found = found & (self.value(q, points, at) == self.value(k, points, at))
        return found

    # ------------------------------------------------------------ by position

    def _band(self, conditions: Sequence[Condition]) -> Band | None:
        if not conditions:
            return Band()
        queries, keys = self.sizes["t"], self.sizes["s"]
        prints = [
            (self.facts.fingerprint(c.view, c.atom), c.dims, c.sense, c.above, c.factor) for c in conditions
        ]
        key = (frozenset(prints), queries, keys)
        if key not in self._bands:

            def seen(rows: Array, columns: Array) -> Array:
                held = [self._holds(c, {"t": rows, "s": columns}) for c in conditions]
                return functools.reduce(np.logical_and, held)

            try:
                found = breaks(conditions, self.facts, self.sizes)
                self._bands[key] = fit(seen, queries, keys, found)
            except Unknown:
                self._bands[key] = None
        return self._bands[key]

    def _holds(self, c: Condition, at: Mapping[str, Any]) -> Array:
        value = self.facts.points(c.view).lazy(c.atom, place(c.dims, at, self.sizes))
        if c.above is None:
            return value if value.dtype == np.bool_ and c.sense else (value != 0) == c.sense
        wide = np.float64 if value.dtype.kind in "biu" else value.dtype
        value = value.astype(wide, copy=False) * np.asarray(c.factor, wide)
        seen = value > c.above
        if not ((value == 0) | ~seen).all() and c.pure:
            raise Impure(c)
        return np.asarray(seen)

    def _by_position(self, c: Condition) -> bool:
        """Whether a condition from constants is the same for all batches and heads."""
        changing = set("".join(self._changing(c.view, Tensor(c.atom, c.dims)))) - {"t", "s"}
        others = math.prod(self.sizes[letter] for letter in changing)
        if not changing or others == 1:
            return True
        queries, keys = self.sizes["t"], self.sizes["s"]
        if others * queries * keys > _MANY:
            return False
        columns = np.arange(keys)
        grid = np.meshgrid(*(np.arange(self.sizes[letter]) for letter in changing), indexing="ij")
        whole = {letter: x.reshape(-1, 1, 1) for letter, x in zip(changing, grid, strict=True)}
        for rows in blocks(queries, keys * others):
            try:
                held = self._holds(c, {**whole, "t": rows, "s": columns})
            except Unknown:
                return False
            if held.ndim > 2 and not (held == held[:1]).all():
                return False
        return True

    # ------------------------------------------------------------ by data

    def _changing(self, view: View, tensor: Tensor) -> Dims:
        """Its letters, where it changes along them at all."""
        along = self.facts.varies(view, tensor.atom)
        return tuple(dim if d in along else "" for d, dim in enumerate(tensor.dims))

    def _chosen(self, c: Condition) -> Chosen:
        c = c if c.above is not None else self.conditions.narrowed(c)
        dims = self._changing(c.view, Tensor(c.atom, c.dims))
        return Chosen(c.atom, dims, not c.sense, c.above, c.factor)

    def _segments(self, c: Condition) -> tuple[Tensor, Tensor] | None:
        compared = sides(c)
        if compared is None or compared[0] != "eq":
            return None
        pair = []
        for v in compared[1:]:
            if not shape_of(v) or dtype_of(v).kind not in "iu" or self.facts.static(c.view, v):
                return None
            small = self.conditions.smallest(c.view, v, c.dims)
            pair.append(Tensor(small.atom, self._changing(c.view, small)))
        letters = [set("".join(t.dims)) & {"t", "s", "n", "g"} for t in pair]
        if letters == [{"s"}, {"t"}]:
            pair.reverse()
        elif letters != [{"t"}, {"s"}]:
            return None
        return pair[0], pair[1]

    def _kind(self, c: Condition, letters: set[str]) -> str:
        """What a condition of data is called. letters: those that it changes with."""
        few = self.sizes["t"] == 1
        inputs = depends(c.view, c.atom)
        counts = all(dtype_of(v).kind in "iu" and not shape_of(v) for v in inputs if _is_array(v))
        if "s" in letters and inputs and counts:
            return "decode"
        if few and letters & {"s"} and not letters & {"n", "g"} and self._bounds_keys(c):
            return "decode"
        if letters & {"n", "g"} or letters >= {"t", "s"} or not letters & {"t", "s"}:
            return "arbitrary"
        return "padding"

    def _bounds_keys(self, c: Condition) -> bool:
        """Whether positions of keys are compared with something that is found when the program runs."""
        compared = sides(c)
        if compared is None or compared[0] in ("eq", "ne"):
            return False
        for v, w in (compared[1:], compared[:0:-1]):
            if self.facts.static(c.view, v) and not self.facts.static(c.view, w):
                dims = c.dims if shape_of(w) else ()
                return "s" not in "".join(self._changing(c.view, Tensor(w, dims)))
        return False

    def _bias_kind(self, view: View, tensor: Tensor) -> str:
        return "alibi" if is_alibi(view, tensor, self.sizes) else "bias"


def _is_array(v: Var) -> bool:
    return isinstance(getattr(v.aval, "dtype", None), np.dtype)


__all__ = ["FAR", "Masks", "Pieces", "Term"]
