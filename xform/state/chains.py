"""Finds chains of one operation over many terms, in which whole rows stand and can be taken at once.

    t0 = add n0 n1; t1 = add t0 a; t2 = add t1 n2      ->      s = reduce_sum n; t2 = add s a

The norm of all gradients is such a chain, of hundreds of scalars: written term by term it would grow with the
number of layers. A row is taken whole where the chain has all its elements, once each, and nothing else reads
the results in between. A sum or a product of floats comes out in another order, which is told; one of floats
of less than 32 bits, where that shows, stays as it is.
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
from xform.trace import Atom, Var, shape_of

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

ROUNDED = {"add": "sum", "add_any": "sum", "mul": "product"}
"""Those whose result depends on the order where they round, and what that is called."""


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
    def rounds(self) -> str:
        """ "sum" or "product" where another order may give another last place; "" where it does not."""
        return _rounds(self.last) if self.terms > 2 else ""

    @property
    def dtype(self) -> Any:
        return _result(self.last).aval.dtype

    @property
    def narrow(self) -> bool:
        """Whether rounding in another order would show."""
        return bool(self.rounds) and jnp.finfo(self.dtype).bits < 32


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
    a, b = op.eqn, last.eqn
    return (a.primitive, a.params, a.ctx, _result(op).aval) == (
        b.primitive,
        b.params,
        b.ctx,
        _result(last).aval,
    )


def _result(op: Op) -> Any:
    return op.eqn.outvars[0]


def _rounds(op: Op) -> str:
    exact = not jnp.issubdtype(_result(op).aval.dtype, jnp.inexact)
    return "" if exact else ROUNDED.get(op.eqn.primitive.name, "")
