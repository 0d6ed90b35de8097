"""What the dimensions of an attention are: batch, heads, queries of a head, queries, keys.

Queries, keys and values share the batch's dimensions and those of key heads; only queries have the queries'
own and those of several heads to one key head. Which of two is the heads' is told by what the dimension was
made of: heads come from a projection's weights, stand in one dimension with others of them or with their own,
and masks of data have none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence

from xform.axes.factors import Shape
from xform.raising.operands import Operand
from xform.raising.projections import made
from xform.raising.reading import Reading, Space
from xform.trace import Atom

BATCH = "bcABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEYS, WIDTHS, MORE, VALUES = "suw", "dkm", "ryz", "efpq"
"""Letters of keys, of what is contracted, of what other pairs are, and of values; one each as a rule."""
OWN = KEYS + WIDTHS + MORE + VALUES


@dataclasses.dataclass(frozen=True)
class Setting:
    """The operands of an attention as found, and what tells its dimensions apart.

    rows: factors of the logits but for keys; s, d: of keys and of what is contracted; more: of what other
    queries and keys are contracted over, whose products are added. out: dimensions of the
    result. masked: for each mask the factors that it has; biased: for each bias.
    """

    q: Operand
    k: Operand
    v: Operand
    rows: frozenset[int]
    s: tuple[int, ...]
    d: tuple[int, ...]
    more: tuple[int, ...]
    out: Shape
    masked: tuple[frozenset[int], ...]
    biased: tuple[frozenset[int], ...]


def letters(reading: Reading, space: Space, found: Setting) -> dict[int, str]:
    """A letter for each factor."""
    own = space.all(found.q.last.dims)
    keyed = space.all(found.k.last.dims) | space.all(found.v.last.dims)
    common = [f for f in _order(space, found) if f in found.rows and f in keyed]
    alone = [f for f in _order(space, found) if f in found.rows and f in own and f not in keyed]
    others = sorted(found.rows - set(common) - set(alone))
    heads = _Heads(reading, space, found)
    named: dict[int, str] = {}
    named.update(zip(found.s, KEYS, strict=False))
    named.update(zip(found.d, WIDTHS, strict=False))
    named.update(zip((f for f in found.more if f not in named), MORE, strict=False))
    values = [f for f in _in_order(space, found.v.last.dims) if f not in found.rows and f not in found.s]
    named.update(zip((f for f in reversed(values) if f not in named), VALUES, strict=False))
    t, groups = _queries(space, found, heads, alone, common)
    if t is not None:
        named[t] = "t"
    named.update(zip(groups, ("g", "h", "i", "j"), strict=False))
    n = _key_heads(space, found, heads, common, groups)
    if n is not None:
        named[n] = "n"
    free = iter(c for c in BATCH if c not in named.values())
    for f in (*common, *others):
        if f not in named:
            named[f] = next(free)
    return named


def _in_order(space: Space, dims: Shape) -> list[int]:
    return [leaf for dim in dims for leaf in space.leaves(dim)]


def _order(space: Space, found: Setting) -> list[int]:
    """All factors of rows, as they stand in queries, then in keys."""
    shapes = (found.q.dims, found.k.dims, found.v.dims, found.out)
    return list(dict.fromkeys(leaf for dims in shapes for leaf in _in_order(space, dims)))


class _Heads:
    """How much each factor looks like one of heads."""

    def __init__(self, reading: Reading, space: Space, found: Setting) -> None:
        self.reading, self.space, self.found = reading, space, found

    def score(self, f: int) -> int:
        """Above 0: heads; below: queries or batch; 0: nothing tells."""
        votes = 0
        for side, width in ((self.found.q, self.found.d), (self.found.k, self.found.d), (self.found.v, None)):
            votes += 2 * self._projected(side, f, width) + self._beside(side, f, width)
        return votes

    def _projected(self, side: Operand, f: int, width: Collection[int] | None) -> int:
        """1 where the same operand of a product made this dimension and the width; -1 where the other did."""
        where = _axis(self.space, side, lambda leaves: f in leaves)
        if width is None:
            rows = {*self.found.rows, *self.found.s}
            ends = _axis(self.space, side, lambda leaves: bool(leaves) and not rows & set(leaves))
        else:
            ends = _axis(self.space, side, lambda leaves: bool(set(leaves) & set(width)))
        if where is None or ends is None or (where[0] is not ends[0] and where[1] == ends[1]):
            return 0
        one, two = made(self.reading, *where), made(self.reading, *ends)
        if one is None or two is None or one.number != two.number or two.side < 0:
            return 0
        return 0 if one.side < 0 else 1 if one.side == two.side else -1

    def _beside(self, side: Operand, f: int, width: Collection[int] | None) -> int:
        """1 where it was once in one dimension with the width, just before it."""
        for source in side.sources:
            for dim in source.dims:
                leaves = self.space.leaves(dim)
                if f in leaves and leaves[-1] not in {f, *self.found.s, *self.found.rows}:
                    return 1
        return 0


def _axis(space: Space, side: Operand, holds: Callable[[tuple[int, ...]], bool]) -> tuple[Atom, int] | None:
    """The deepest value of an operand that has a dimension for which `holds`, and which that is."""
    for source in reversed(side.sources):
        for axis, dim in enumerate(source.dims):
            if holds(space.leaves(dim)):
                return source.atom, axis
    return None


def _queries(
    space: Space, found: Setting, heads: _Heads, alone: Sequence[int], common: Sequence[int]
) -> tuple[int | None, list[int]]:
    """Of the factors that only queries have the queries' own, and the others."""
    if not alone:
        return None, []
    shared = [c for c in common if not _cuts_keys(space, found, c)]
    together = {f for f in alone if any(_together(space, found, f, c) for c in shared)}
    single = all(any(not dim for dim in source.dims) for source in found.q.sources)

    def standing(f: int) -> tuple[int, int, int, int]:
        """The least is the queries'."""
        with_keys = sum(f in m for m in found.masked)
        return (
            (2 if f in together else 0) + heads.score(f) - with_keys,
            -int(space.size(f) == math.prod(map(space.size, found.s))),
            0,
            alone.index(f),
        )

    ranked = sorted(alone, key=standing)
    best = ranked[0]
    if (best in together or heads.score(best) > 0) and not any(best in m for m in found.masked):
        return None, list(alone)
    if len(alone) == 1 and single and not any(best in m for m in (*found.masked, *found.biased)):
        return None, list(alone)
    return best, [f for f in alone if f != best]


def _key_heads(
    space: Space, found: Setting, heads: _Heads, common: Sequence[int], groups: Sequence[int]
) -> int | None:
    """Of the factors that queries and keys share the one of key heads."""
    if not common:
        return None
    for f in common:
        if any(_together(space, found, f, g) for g in groups):
            return f
    scores = {f: heads.score(f) for f in common}
    scores = {f: v - 2 * sum(f in m for m in found.masked) for f, v in scores.items()}
    scores = {f: v - 5 * _cuts_keys(space, found, f) for f, v in scores.items()}
    for f in common:
        scores[f] += sum(f in m and len(m & set(common)) < len(common) for m in found.biased)
    best = max(common, key=lambda f: (scores[f], common.index(f)))
    if scores[best] > 0:
        return best
    order = _in_order(space, found.k.dims)
    at = min((order.index(f) for f in found.s if f in order), default=0)
    inside = [f for f in common if f in order and order.index(f) > at]
    if inside:
        return inside[-1]
    if len(common) > 1:
        return common[-1]
    return None


def _cuts_keys(space: Space, found: Setting, f: int) -> bool:
    """Whether keys were cut into blocks, of which this is the number."""
    return any(_together(space, found, f, s) for s in found.s)


def _together(space: Space, found: Setting, f: int, other: int) -> bool:
    """Whether two factors were in one dimension, one next to the other."""
    shapes = [s.dims for side in (found.q, found.k, found.v) for s in side.sources]
    for dims in (*shapes, found.out):
        for dim in dims:
            leaves = space.leaves(dim)
            if any({a, b} == {f, other} for a, b in itertools.pairwise(leaves)):
                return True
    return False
