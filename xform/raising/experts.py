"""Finds the layers of experts of a program: their products, an operation for each dispatch.

    i = top_k scores; y = sum_x mask[t,x] (silu (x up_x) down_x)    ->    y = experts x (up, down)

Ragged products are read by `ragged`, those that a choice of the program's sends tokens to, by `sending`.
Products that lie between the same dispatch and the same combination, the up, gate and down projections of a
layer, are one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xform.axes import Factor, Scope
from xform.raising.choosing import is_float
from xform.raising.flat import View
from xform.raising.meaning import Experts, Near, Raised, Tensor
from xform.raising.ragged import ragged
from xform.raising.sending import OP, Product, Sending
from xform.trace import Atom, DropVar, Literal, Var, shape_of

_SIGNS = frozenset(("argmax", "argmin", "top_k", "approx_top_k", "sort", "eq", "ge", "gt", "exp"))
_PRODUCTS = frozenset(("dot_general", "scan", "while"))


def experts(view: View) -> Iterator[Raised | Near]:
    """The layers of experts of a view, and what nearly are."""
    yield from ragged(view)
    names = {eqn.primitive.name for eqn in view.eqns}
    chooses = names & _SIGNS or any(not is_float(v) for v in view.jaxpr.invars)
    if not chooses or not names & _PRODUCTS:
        return
    sending = Sending(view)
    products, nears = sending.found()
    for group in _groups(products):
        yield _told(view, sending.scope, group)
    yield from nears


def _groups(products: Sequence[Product]) -> list[list[Product]]:
    """Products that something they have in common chose."""
    groups: list[tuple[set[object], list[Product]]] = []
    for p in products:
        same = [g for g in groups if g[0] & p.keys]
        keys = set(p.keys).union(*(g[0] for g in same))
        members = [q for g in same for q in g[1]] + [p]
        groups = [g for g in groups if g not in same] + [(keys, members)]
    return [sorted(members, key=lambda p: p.number) for _, members in groups]


def _told(view: View, scope: Scope, group: Sequence[Product]) -> Raised:
    numbers = sorted({p.number for p in group})
    last, out = _joined(view, numbers)
    first = group[0]
    styles = [p.style for p in group]
    style = max(dict.fromkeys(styles), key=lambda s: (s == "one_hot", styles.count(s)))
    names = _Letters(scope)
    weights: dict[Var, Tensor] = {}
    for p in group:
        weights.setdefault(p.w, Tensor(p.w, names.of_weight(p)))
    x = Tensor(first.x, names.of_others(first.x, "mABCDE"))
    made = Tensor(out, names.of_others(out, "STUVWXYZ"))
    meaning = Experts(style, x, tuple(weights.values()), made, first.experts)
    return Raised(OP, view, last, frozenset(_between(view, numbers, last)), meaning, names.sizes)


class _Letters:
    """A letter for each axis: x, what is contracted and what comes out, in the order of products; others."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.letters: dict[Factor, str] = {}
        self.sizes: dict[str, int] = {}
        self.free = list("kfopqruvwyghijlnabcdestz")

    def _of(self, dim: Sequence[Factor], wanted: list[str]) -> str:
        for f in dim:
            if f.size > 1 and f not in self.letters and wanted:
                self.letters[f] = wanted.pop(0)
                self.sizes[self.letters[f]] = f.size
        return "".join(self.letters.get(f, "") for f in dim)

    def of_weight(self, p: Product) -> tuple[str, ...]:
        several = list("xXYZ") if not p.axes & self.letters.keys() else []
        for f in sorted(p.axes, key=lambda f: f.id):
            self._of((f,), several)
        own = [f for dim in self.scope[p.w] for f in dim]
        for f in sorted(own, key=lambda f: f not in p.summed):
            self._of((f,), self.free)
        return tuple(self._of(dim, self.free) for dim in self.scope[p.w])

    def of_others(self, atom: Atom, wanted: str) -> tuple[str, ...]:
        letters = [c for c in wanted if c not in self.sizes]
        if not isinstance(atom, Var) or atom not in self.scope.raw:
            return tuple("" for _ in shape_of(atom))
        return tuple(self._of(dim, letters) for dim in self.scope[atom])


def _joined(view: View, numbers: list[int]) -> tuple[int, Var]:
    """The first value that depends on all of the products, and the equation that makes it."""
    has: dict[Var, int] = {}
    whole = (1 << len(numbers)) - 1
    for number, eqn in enumerate(view.eqns[numbers[0] :], numbers[0]):
        mine = 0
        for v in eqn.invars:
            if not isinstance(v, Literal):
                mine |= has.get(v, 0)
        if number in numbers:
            mine |= 1 << numbers.index(number)
        for v in eqn.outvars:
            if not isinstance(v, DropVar):
                has[v] = mine
                if mine == whole:
                    return number, v
    last = numbers[-1]
    return last, view.eqns[last].outvars[0]


def _between(view: View, numbers: list[int], last: int) -> set[int]:
    """The equations from the first products to the last result."""
    after: set[Var] = set()
    found: set[int] = set()
    way = view.ancestors(view.eqns[last].outvars)
    for number, eqn in enumerate(view.eqns):
        if number in numbers or (
            number in way and any(isinstance(v, Var) and v in after for v in eqn.invars)
        ):
            found.add(number)
            after.update(v for v in eqn.outvars if not isinstance(v, DropVar))
    return found
