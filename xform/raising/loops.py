"""Loops as recurrences: what is carried, what is the same in each turn, and what a turn gets a slice of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from xform.higher_order import bodies, carries, operands, scan_parts
from xform.raising.flat import View, flat
from xform.trace import Atom, JaxprEqn, Literal, Var, shape_of


@dataclasses.dataclass(frozen=True)
class Carry:
    """A value that is carried: as the body gets it and gives it, before the loop and after it."""

    into: Var
    out: Atom
    initial: Atom
    final: Var


@dataclasses.dataclass(frozen=True)
class Loop:
    """The loop that is equation `number` of a view.

    inputs: for an input of the body its atom outside, and whether a turn gets a slice of its first dimension.
    stacked: results of the body of which all turns' are stacked, and the variable outside. length: turns.
    """

    view: View
    number: int
    body: View
    carries: tuple[Carry, ...]
    inputs: dict[Var, tuple[Atom, bool]]
    stacked: tuple[tuple[Atom, Var], ...]
    length: int
    reverse: bool = False

    @property
    def eqn(self) -> JaxprEqn:
        return self.view.eqns[self.number]


def loops(view: View) -> Iterator[Loop]:
    """The loops of a view whose number of turns is known."""
    for number, eqn in enumerate(view.eqns):
        if eqn.primitive.name == "scan":
            yield _scan(view, number)
        elif eqn.primitive.name == "while":
            loop = _while(view, number)
            if loop is not None:
                yield loop


def _body(view: View, number: int, which: int) -> View:
    eqn = view.eqns[number]
    place = (*view.place, (view.chains[number], which))
    return flat(bodies(eqn)[which], place=place, names=view.names[number], outer=view, holder=eqn)


def _scan(view: View, number: int) -> Loop:
    eqn, body = view.eqns[number], _body(view, number, 0)
    consts, carried, _ = scan_parts(eqn)
    inputs = {
        v: (eqn.invars[at], at >= consts + carried)
        for at, v in enumerate(body.jaxpr.invars)
        if not consts <= at < consts + carried
    }
    stacked = tuple(zip(body.jaxpr.outvars[carried:], eqn.outvars[carried:], strict=True))
    return Loop(
        view, number, body, _carries(view, number, 0, body), inputs, stacked,
        eqn.params["length"], bool(eqn.params["reverse"]),
    )  # fmt: skip


def _carries(view: View, number: int, which: int, body: View) -> tuple[Carry, ...]:
    eqn = view.eqns[number]
    places = operands(eqn, which)
    found = []
    for out, into in carries(eqn, which).items():
        at = places[into]
        assert at is not None
        found.append(
            Carry(body.jaxpr.invars[into], body.jaxpr.outvars[out], eqn.invars[at], eqn.outvars[out])
        )
    return tuple(found)


def _while(view: View, number: int) -> Loop | None:
    """A loop that counts from a literal to one, by ones."""
    eqn = view.eqns[number]
    which = next(k for k, b in enumerate(bodies(eqn)) if b is eqn.params["body_jaxpr"])
    body = _body(view, number, which)
    found = _carries(view, number, which, body)
    length = _turns(eqn, body, found)
    if length is None:
        return None
    consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    fixed = body.jaxpr.invars[: consts[1]]
    inputs = {v: (eqn.invars[consts[0] + at], False) for at, v in enumerate(fixed)}
    return Loop(view, number, body, found, inputs, (), length)


def _turns(eqn: JaxprEqn, body: View, found: tuple[Carry, ...]) -> int | None:
    cond = flat(eqn.params["cond_jaxpr"])
    last = cond.maker(cond.jaxpr.outvars[0])
    if last is None or last.primitive.name != "lt" or not isinstance(last.invars[0], Var):
        return None
    carried = cond.jaxpr.invars[eqn.params["cond_nconsts"] :]
    if last.invars[0] not in carried:
        return None
    counter = found[carried.index(last.invars[0])]
    bound = last.invars[1]
    if isinstance(bound, Var):
        at = cond.jaxpr.invars.index(bound) if bound in cond.jaxpr.invars else -1
        fixed = eqn.params["cond_nconsts"]
        if 0 <= at < fixed:
            bound = eqn.invars[at]
        elif at >= fixed and found[at - fixed].out is found[at - fixed].into:
            bound = found[at - fixed].initial
    if not (isinstance(bound, Literal) and isinstance(counter.initial, Literal)) or not counts(body, counter):
        return None
    return int(bound.val) - int(counter.initial.val)


def counts(body: View, carry: Carry) -> bool:
    """Whether a carried value is a number that grows by one a turn."""
    eqn = body.maker(carry.out)
    if eqn is None or shape_of(carry.into) or eqn.primitive.name != "add":
        return False
    x, y = eqn.invars
    if isinstance(x, Literal):
        x, y = y, x
    return x is carry.into and isinstance(y, Literal) and float(y.val) == 1.0
