"""Lifts what was recognised into one equation each, and lowers it back as it was.

s = dot_general q k ... o = dot_general p v     ->     o = operation[attention causal] q k v
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from xform.ops import apply, operation_of
from xform.raising.describe import mask_name
from xform.raising.finding import find
from xform.raising.flat import View
from xform.raising.meaning import Attention, Raised
from xform.raising.placing import Claim, placed
from xform.rewrite import Site, rewrite
from xform.tensors.runs import taken_out
from xform.trace import Jaxpr, Value, Var, eval_jaxpr, inline


@dataclasses.dataclass(frozen=True)
class AsItWas:
    """A recognised operation, computed as the program had it. text: what it is."""

    name: str
    text: str
    region: Jaxpr = dataclasses.field(repr=False)
    interpret: bool = False
    cut: str = ""

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple("" for _ in self.region.invars)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple("" for _ in self.region.outvars)

    def plain(self, *args: Value) -> Sequence[Value]:
        return eval_jaxpr(self.region, *args)

    def kernel(self, *args: Value) -> Sequence[Value]:
        return eval_jaxpr(self.region, *args)


def lifted(jaxpr: Jaxpr) -> Jaxpr:
    """The program with every recognised operation one equation; itself where there is none.

    Of operations that share equations (a norm's, inside an expert's), the first stays.
    """
    claims: list[Claim] = []
    taken: dict[int, set[int]] = {}
    for r in find(jaxpr).raised:
        claim = _claim(r)
        numbers = _between(r.view, claim.takes, claim.gives)
        mine = taken.setdefault(id(r.view), set())
        if mine.isdisjoint(numbers):
            mine |= numbers
            claims.append(claim)
    return placed(jaxpr, claims)


def lowered(jaxpr: Jaxpr) -> Jaxpr:
    """The program with lifted operations as they were."""

    def rule(site: Site) -> Sequence[Value] | None:
        op = operation_of(site.eqn)
        return inline(op.region, *site.args) if isinstance(op, AsItWas) else None

    return rewrite(jaxpr, rule)


def _claim(r: Raised) -> Claim:
    gives = results_of(r)
    takes, region = region_of(r.view, r.numbers, gives)
    text = f"{r.op} {mask_name(r.meaning)}" if isinstance(r.meaning, Attention) else r.op
    op = AsItWas(r.op, text, region)

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        return dict(zip(gives, apply(op, *(values[v] for v in takes)), strict=True))

    return Claim(r.view, takes, gives, emit)


def results_of(r: Raised) -> list[Var]:
    """The variables that an operation gives."""
    found = [getattr(r.meaning, name, None) for name in ("out", "final")]
    return [t.atom for t in found if t is not None and isinstance(t.atom, Var)]


def region_of(view: View, numbers: Collection[int], gives: Sequence[Var]) -> tuple[list[Var], Jaxpr]:
    """What the equations of a region read from outside of it, and the region as a program that gives
    `gives`.
    """
    part = taken_out(view.jaxpr, sorted(numbers))
    return list(part.invars), part.replace(
        outvars=list(gives), debug_info=part.debug_info.with_unknown_names()
    )


def _between(view: View, takes: Sequence[Var], gives: Sequence[Var]) -> set[int]:
    return view.ancestors(gives, stop=frozenset(takes).__contains__)
