"""Finds chains of one operation over many terms, in which whole rows stand and can be taken at once.

    t0 = add n0 n1; t1 = add t0 a; t2 = add t1 n2      ->      s = reduce_sum n; t2 = add s a

The norm of all gradients is such a chain, of hundreds of scalars: written term by term it would grow with the
number of layers. A row is taken whole where the chain has all its elements, once each, and nothing else reads
the results in between. A sum of floats is then taken in another order, which is told. One of floats of less
than 32 bits, where that would show, stays as it is, and so does a product of floats, which may overflow.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform.state.groups import Row
from xform.state.scopes import Op, Scope, Scopes
from xform.trace import Atom, JaxprEqn, Var, shape_of

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": lax.reduce_sum,
    "add_any": lax.reduce_sum,
    "mul": lax.reduce_prod,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
}
"""The primitives that make a chain, and what takes a row at once."""

ORDERED = ("add", "add_any", "mul")
"""Those whose result depends on the order, of floats."""


@dataclasses.dataclass(eq=False)
class Chain:
    """last: the equation that gives the result; members: all of them.

    rows: those that are taken whole. rest: the other terms. terms: how many there are in all.
    """

    last: Op
    members: tuple[Op, ...]
    rows: tuple[Row, ...]
    rest: tuple[Atom, ...]
    terms: int

    @property
    def reordered(self) -> bool:
        """Whether the rows taken whole make another order of it, which may round otherwise."""
        return self.terms > 2 and jnp.issubdtype(_dtype(self.last), jnp.inexact) and self._name in ORDERED

    @property
    def kept(self) -> str:
        """Why it has to stay in the order in which it is written; "" where it has not."""
        if self.reordered and self._name == "mul":
            return "a product of floats in another order may overflow on the way"
        if self.reordered and jnp.finfo(_dtype(self.last)).bits < 32:
            return f"in another order a sum of {self.terms} of {_dtype(self.last)} would be another number"
        return ""

    @property
    def _name(self) -> str:
        return str(self.last.eqn.primitive.name)


def find(
    scopes: Scopes,
    scope: Scope,
    element: Callable[[Var], tuple[Row, int] | None],
    alone: Callable[[Op], bool],
) -> Iterator[Chain]:
    """The chains of a body that have whole rows among their terms.

    element: the row that a value is in. alone: whether an equation is in no row.
    """
    returned = {v for v in scope.jaxpr.outvars if isinstance(v, Var)}
    met = set[Op]()

    def within(atom: Atom, last: Op) -> Op | None:
        """The equation of the chain that makes a value which nothing else reads."""
        if not isinstance(atom, Var) or atom in returned or len(scopes.readers.get(atom, ())) > 1:
            return None
        made = scopes.maker.get(atom)
        return made[0] if made is not None and alone(made[0]) and _alike(made[0], last) else None

    for last in reversed(scope.ops):
        if last.eqn.primitive.name not in REDUCTIONS or last in met or not alone(last):
            continue
        members, terms, todo = [last], list[Atom](), list(reversed(last.eqn.invars))
        while todo:
            atom = todo.pop()
            if (op := within(atom, last)) is None:
                terms.append(atom)
            else:
                members.append(op)
                todo += reversed(op.eqn.invars)
        met.update(members)
        if rows := _rows(terms, element, shape_of(_result(last))):
            taken = {v for row in rows for v in row.vars}
            rest = tuple(atom for atom in terms if not isinstance(atom, Var) or atom not in taken)
            yield Chain(last, tuple(members), rows, rest, sum(isinstance(atom, Var) for atom in terms))


def _rows(
    terms: list[Atom], element: Callable[[Var], tuple[Row, int] | None], shape: tuple[int, ...]
) -> tuple[Row, ...]:
    """The rows whose elements are all among the terms, once each."""
    count = collections.Counter(atom for atom in terms if isinstance(atom, Var))
    rows = dict.fromkeys(found[0] for v in count if (found := element(v)) is not None)
    return tuple(
        row for row in rows if shape_of(row.vars[0]) == shape and all(count[v] == 1 for v in row.vars)
    )


def _alike(op: Op, last: Op) -> bool:
    def kind(eqn: JaxprEqn) -> tuple[Any, ...]:
        return eqn.primitive, eqn.params, eqn.ctx, eqn.outvars[0].aval

    return kind(op.eqn) == kind(last.eqn)


def _result(op: Op) -> Any:
    return op.eqn.outvars[0]


def _dtype(op: Op) -> Any:
    return _result(op).aval.dtype
