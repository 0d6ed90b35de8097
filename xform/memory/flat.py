"""The operations of a body in one list, calls inlined, with what a device holds of each value.

The compiler inlines every call (a jit, a checkpoint, a rule of the user's own), so what is alive and what is
computed from what is told from the inlined program; loops and branches stay operations.
"""

from __future__ import annotations

import dataclasses

from xform.axes import Scope
from xform.higher_order import bodies, operands
from xform.memory.spread import Spread
from xform.trace import JaxprEqn, Literal, Var

KEPT = frozenset({"scan", "while", "cond", "pallas_call", "operation"})
"""Operations with programs inside that are no calls."""


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of a body, as it is known where it is made; `nbytes` is what a device holds of it."""

    scope: Scope
    var: Var
    nbytes: float


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """An equation that is no call. Operands that are literals are left out of `ins`."""

    eqn: JaxprEqn
    index: int
    scope: Scope
    ins: list[Value]
    outs: list[Value]
    names: str  # the name stacks around it and its own

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclasses.dataclass(frozen=True)
class Flat:
    """A body: what it takes, its operations in order, what it gives (literals left out)."""

    ins: list[Value]
    ops: list[Op]
    outs: list[Value]


def flatten(spread: Spread, scope: Scope) -> Flat:
    """The body at a call site."""
    ins = [Value(scope, v, spread.nbytes(scope, v)) for v in scope.jaxpr.invars]
    ops: list[Op] = []
    outs = _into(spread, scope, list(ins), "", ops)
    return Flat(ins, ops, [v for v in outs if v is not None])


def _into(
    spread: Spread, scope: Scope, ins: list[Value | None], names: str, ops: list[Op]
) -> list[Value | None]:
    known: dict[Var, Value | None] = dict(zip(scope.jaxpr.invars, ins, strict=True))
    known |= {v: Value(scope, v, spread.nbytes(scope, v)) for v in scope.jaxpr.constvars}

    def read(atom: Var | Literal) -> Value | None:
        return None if isinstance(atom, Literal) else known[atom]

    for index, eqn in enumerate(scope.jaxpr.eqns):
        around = f"{names}/{eqn.source_info.name_stack}"
        inner = [] if eqn.primitive.name in KEPT else bodies(eqn)
        if len(inner) == 1 and (index, 0) in scope.children and len(inner[0].outvars) == len(eqn.outvars):
            places = operands(eqn, 0)
            given = [None if at is None else read(eqn.invars[at]) for at in places]
            known.update(
                zip(eqn.outvars, _into(spread, scope.enter(index, 0), given, around, ops), strict=True)
            )
            continue
        outs = [Value(scope, v, spread.nbytes(scope, v)) for v in eqn.outvars]
        values = [v for atom in eqn.invars if (v := read(atom)) is not None]
        ops.append(Op(eqn, index, scope, values, outs, around))
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in scope.jaxpr.outvars]
