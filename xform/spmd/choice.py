"""Which layout an operation runs in: of those that its operands have and its result is wanted in, the one
that moves the fewest bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from xform.spmd.forms import Form
from xform.spmd.layout import Dim, Grid, Laid, Piece
from xform.spmd.moves import Router
from xform.spmd.wishes import Wish

FLOPS_A_BYTE = 1000.0
"""What a byte on the wire is worth in arithmetic: a chip's peak over its links' bandwidth, roughly."""

MEMORY_A_BYTE = 0.1
"""What a byte of memory traffic is worth in bytes on the wire."""

Assignment = tuple[Dim, ...]
"""The pieces of each factor of an operation."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """laids: the layouts that a value can be had in as it is; the first is its own. itemsize: bytes. made: it
    is made as it is wanted. weight: it is one; the rows of others are to stay where they are.
    """

    laids: tuple[Laid, ...]
    itemsize: int
    made: bool
    weight: bool


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation to be laid out. itemsizes, wishes: of its results. partial: the axes over which its
    operands are terms of a sum that goes through it. waits: axes over which what is summed whole is summed
    after a loop.
    """

    form: Form
    operands: tuple[Operand, ...]
    itemsizes: tuple[int, ...]
    wishes: tuple[Wish | None, ...]
    partial: tuple[str, ...] = ()
    waits: frozenset[str] = frozenset()


class Choice:
    """Chooses on one grid. batch: the axes that rows of data lie over."""

    def __init__(self, grid: Grid, router: Router, batch: frozenset[str]) -> None:
        self.grid, self.router, self.batch = grid, router, batch
        self._best: dict[tuple[object, ...], Assignment] = {}

    def best(self, case: Case) -> Assignment:
        """The cheapest assignment; of equals the first, in the order of the operands."""
        form = case.form
        shape = (form.operands, form.results, form.sizes, form.kinds, form.local is None, form.blocks)
        key = (*shape, form.flops, case.operands, case.itemsizes, case.wishes, case.partial, case.waits)
        found = self._best.get(key)
        if found is None:
            candidates = self._candidates(case)
            costs = [
                self._cost(case, c) + (0.0 if any(case.wishes) else self._leaving(case, c))
                for c in candidates
            ]
            found = self._best[key] = candidates[costs.index(min(costs))]
        return found

    def over(self, form: Form, chosen: Assignment, kind: str) -> tuple[str, ...]:
        """The axes over which factors of a kind lie."""
        return tuple(
            a for k, dim in zip(form.kinds, chosen, strict=True) if k == kind for p in dim for a in p.axes
        )

    def summed(self, form: Form, chosen: Assignment, number: int) -> tuple[str, ...]:
        """The axes over which a result is terms of a sum: those of summed factors that it lacks."""
        own = {f for factors in form.results[number] for f in factors}
        lacking = (dim for f, dim in enumerate(chosen) if form.kinds[f] == "sum" and f not in own)
        return tuple(a for dim in lacking for p in dim for a in p.axes)

    def laid(self, factors: Sequence[Sequence[int]], chosen: Assignment) -> Laid:
        """The layout of an operand or result with these factors."""
        dims = tuple(tuple(p for f in fs for p in chosen[f]) or (Piece(1),) for fs in factors)
        return self.grid.normal(Laid(dims))

    def _candidates(self, case: Case) -> list[Assignment]:
        form, partial = case.form, case.partial
        results = [(n, w.laid) for n, w in enumerate(case.wishes) if w is not None]
        numbered = list(enumerate(case.operands))
        known = [(n, o.laids[0].summed()) for n, o in numbered if not o.made]
        known += [(n, o.laids[0]) for n, o in numbered if o.made]
        found: dict[Assignment, None] = {}
        for first in range(len(known)):
            order = [known[first], *known[:first], *known[first + 1 :]]
            found[self.combined(form, order, results, partial)] = None
            found[self.combined(form, [known[first], *reversed(order[1:])], results, partial)] = None
            if results:
                found[self.combined(form, order, results, partial, results_first=True)] = None
        if not found:
            found[self.combined(form, known, results, partial)] = None
        for base in list(found):  # and what is summed over an axis, whole along it instead
            for f, (kind, dim) in enumerate(zip(form.kinds, base, strict=True)):
                if kind not in ("map", "whole") and any(p.axes for p in dim):
                    stripped = tuple(Piece(p.size) for p in dim)
                    found[(*base[:f], stripped, *base[f + 1 :])] = None
        return list(found)

    def combined(
        self,
        form: Form,
        operands: Sequence[tuple[int, Laid]],
        results: Sequence[tuple[int, Laid]],
        taken: Sequence[str] = (),
        results_first: bool = False,
    ) -> Assignment:
        """Each factor as the first of these layouts that divides it has it; no axis twice, and none of those
        that are `taken`.
        """
        chosen: list[Dim] = [(Piece(size),) for size in form.sizes]
        used = set(taken)
        ordered = [(form.operands[n], laid) for n, laid in operands]
        wanted = [(form.results[n], laid) for n, laid in results]
        for factors, laid in [*wanted, *ordered] if results_first else [*ordered, *wanted]:
            for f, dim in self._factored(form, factors, laid):
                if form.kinds[f] == "whole" or any(p.axes for p in chosen[f]):
                    continue
                kept = tuple(Piece(p.size, tuple(a for a in p.axes if a not in used)) for p in dim)
                if f in form.blocks:
                    kept = (kept[0], *(Piece(p.size) for p in kept[1:]))
                if any(p.axes for p in kept):
                    chosen[f] = kept
                    used.update(a for p in kept for a in p.axes)
                elif len(dim) > len(chosen[f]):
                    chosen[f] = kept
        return tuple(chosen)

    def _factored(self, form: Form, factors: Sequence[Sequence[int]], laid: Laid) -> list[tuple[int, Dim]]:
        """The pieces of the factors of a value's dimensions, where the borders of its pieces allow."""
        found: list[tuple[int, Dim]] = []
        for fs, dim in zip(factors, laid.dims, strict=True):
            if len(fs) == 1:
                found.append((fs[0], dim))
                continue
            sizes = [form.sizes[f] for f in fs]
            cut = self.grid.common([tuple(map(Piece, sizes)), dim])
            pieces = self.grid.split(dim, cut)
            if pieces is None:
                pieces = self._less(dim, cut)
            rest = list(pieces)
            for f, size in zip(fs, sizes, strict=True):
                own: list[Piece] = []
                while rest and math.prod(p.size for p in own) < size:
                    own.append(rest.pop(0))
                found.append((f, tuple(own) or (Piece(size),)))
        return found

    def _less(self, dim: Dim, cut: Sequence[int]) -> Dim:
        """The pieces of a dimension whole along the innermost axes, as few as needed to be cut so."""
        pieces = list(dim)
        for i in range(len(pieces) - 1, -1, -1):
            while pieces[i].axes:
                pieces[i] = Piece(pieces[i].size, pieces[i].axes[:-1])
                found = self.grid.split(tuple(pieces), cut)
                if found is not None:
                    return found
        return tuple(Piece(size) for size in cut)

    def _leaving(self, case: Case, chosen: Assignment) -> float:
        """The bytes of results whose rows do not stay on the devices that have the operands' rows, where
        nobody asks for that: they will have to come back.
        """
        form = case.form
        kept = {f for factors in form.results for fs in factors for f in fs}
        for factors, operand in zip(form.operands, case.operands, strict=True):
            if operand.weight or operand.made:
                continue
            for f, dim in self._factored(form, factors, operand.laids[0]):
                axes = {a for p in dim for a in p.axes if a in self.batch}
                stays = axes <= {a for p in chosen[f] for a in p.axes}
                if f in kept and form.kinds[f] != "whole" and not stays:
                    shapes = (self.grid.local(self.laid(fs, chosen)) for fs in form.results)
                    return float(sum(math.prod(s) * n for s, n in zip(shapes, case.itemsizes, strict=True)))
        return 0.0

    def _cost(self, case: Case, chosen: Assignment) -> float:
        """Bytes on the wire, and what work is done more than once in the same unit."""
        form, route = case.form, self.router.route
        total = work = 0.0
        for factors, operand in zip(form.operands, case.operands, strict=True):
            if not operand.made:
                want = self.laid(factors, chosen)
                if case.partial and operand.laids[0].partial:
                    want = Laid(want.dims, case.partial)
                total += operand.itemsize * min(route(laid, want).sent for laid in operand.laids)
        results = zip(form.results, case.itemsizes, case.wishes, strict=True)
        for number, (factors, size, wish) in enumerate(results):
            laid, summed = self.laid(factors, chosen), self.summed(form, chosen, number)
            work += math.prod(self.grid.local(laid)) * size * MEMORY_A_BYTE
            given = Laid(laid.dims, tuple(dict.fromkeys((*case.partial, *summed))))
            if summed or (wish is not None and given.dims):
                want = given.summed() if wish is None else wish.granted(given)
                later = tuple(a for a in given.partial if a in case.waits and a not in want.axes)
                total += size * route(given, Laid(want.dims, later)).sent
        ways = self.grid.ways([a for dim in chosen for p in dim for a in p.axes])
        work += form.flops / ways / FLOPS_A_BYTE
        if form.local is None and "sum" in form.kinds and len(form.operands) == 2:  # a product
            parts = (math.prod(p.size // self.grid.ways(p.axes) for p in dim) for dim in chosen)
            work += 2.0 * math.prod(parts) / FLOPS_A_BYTE
        return total + work
