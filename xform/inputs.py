"""What each input of a program is to it: a parameter, optimizer state, or data.

Told from the dataflow, never from names. Data has a batch or length axis. Of the rest, what flows into an
activation (anything with a batch or length axis) is a parameter; what meets only parameters and their
gradients, and never reaches an activation, is the optimizer's: a moment, a count. In a loss or a forward pass
there is no optimizer state.
"""

from __future__ import annotations

from typing import Literal

from xform.axes import Scope
from xform.higher_order import bodies, carries, operands
from xform.logical import ACTIVATION
from xform.roles import Roles
from xform.trace import Jaxpr, JaxprEqn, Var

Kind = Literal["parameter", "optimizer", "data"]


def is_activation(roles: Roles, scope: Scope, var: Var) -> bool:
    """Whether a value has a batch or length axis."""
    return any(role in ACTIVATION for dim in roles.of(scope, var) for role in dim)


def kinds(jaxpr: Jaxpr, roles: Roles) -> list[Kind]:
    """What each of the program's inputs (not its constants) is, in order."""
    root = roles.axes.root
    reaching = _reaching(jaxpr, root, roles)
    found: list[Kind] = []
    for var in jaxpr.invars:
        if is_activation(roles, root, var):
            found.append("data")
        elif var in reaching:
            found.append("parameter")
        else:
            found.append("optimizer")
    return found


def _reaching(jaxpr: Jaxpr, scope: Scope, roles: Roles, live_out: frozenset[int] = frozenset()) -> set[Var]:
    """The variables of a body that flow into an activation, or into those of its outputs numbered in
    live_out.
    """
    reaching: set[Var] = {v for i, v in enumerate(jaxpr.outvars) if i in live_out and isinstance(v, Var)}
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        inner = bodies(eqn)
        if inner:
            reaching |= _through(eqn, index, inner, scope, roles, reaching)
        elif any(v in reaching or is_activation(roles, scope, v) for v in eqn.outvars):
            reaching.update(v for v in eqn.invars if isinstance(v, Var))
    return reaching


def _through(
    eqn: JaxprEqn, index: int, inner: list[Jaxpr], scope: Scope, roles: Roles, reaching: set[Var]
) -> set[Var]:
    """The operands of an equation with bodies that flow into an activation inside it, or through it into one
    after.
    """
    live = frozenset(i for i, v in enumerate(eqn.outvars) if v in reaching)
    found: set[Var] = set()
    for number, body in enumerate(inner):
        below = scope.enter(index, number)
        outs = live if len(body.outvars) == len(eqn.outvars) else frozenset()
        carried = carries(eqn, number)
        while True:
            inside = _reaching(body, below, roles, outs)
            more = outs | {o for o, i in carried.items() if body.invars[i] in inside}
            if more == outs:
                break
            outs = more
        for var, position in zip(body.invars, operands(eqn, number), strict=True):
            if var in inside and position is not None and isinstance(eqn.invars[position], Var):
                found.add(eqn.invars[position])
    return found
