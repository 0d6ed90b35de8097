"""What each input of a program is to it: a parameter, optimizer state, or data.

Told from the dataflow, never from names. Data has a batch axis, or is integers along a length. Of the rest,
what flows into an activation (anything with a batch axis) is a parameter. What meets only parameters and
their gradients is the optimizer's: a moment, a count. Since the next parameters come of both, and the next
step or an evaluation may use them in the same program, the flow is not followed through anything that was
computed from a gradient. In a loss or a forward pass there is no optimizer state, and in a program without
any activation every input is a parameter.
"""

from __future__ import annotations

from typing import Literal

from xform.axes import Scope
from xform.higher_order import bodies, operands
from xform.roles.logical import is_activation
from xform.roles.naming import Roles
from xform.trace import Jaxpr, JaxprEqn, Var

Kind = Literal["parameter", "optimizer", "data", "kept"]
"""kept: what a pass keeps from step to step; no program says that of itself."""


def kinds(jaxpr: Jaxpr, roles: Roles, kept: int = 0) -> list[Kind]:
    """What each of the program's inputs (not its constants) is, in order. kept: so many of the last are."""
    root, own = roles.axes.root, jaxpr.invars[: len(jaxpr.invars) - kept]
    more: list[Kind] = ["kept"] * kept
    found: list[Kind] = []
    if not any(roles.is_activation(scope, v) for scope in roles.axes.scopes for v in scope.raw):
        found = ["parameter"] * len(own)
        return found + more
    reaching = _reaching(jaxpr, root, roles, set(), set())
    for var in own:
        if is_activation(roles, root, var):
            found.append("data")
        else:
            found.append("parameter" if var in reaching else "optimizer")
    return found + more


def _reaching(
    jaxpr: Jaxpr, scope: Scope, roles: Roles, wanted: set[Var], from_gradient: set[Var]
) -> set[Var]:
    """The variables of a body that flow into an activation, or into `wanted`, past no value made of a
    gradient.

    from_gradient: inputs of the body that were; it grows by the variables inside.
    """
    active = roles.is_activation
    made: list[bool] = []  # whether an equation makes an activation
    for eqn in jaxpr.eqns:
        makes = [active(scope, v) for v in eqn.outvars]
        made.append(any(makes))
        if any(type(v) is Var and (v in from_gradient or active(scope, v)) for v in eqn.invars):
            from_gradient.update(v for v, a in zip(eqn.outvars, makes, strict=True) if not a)
    reaching = wanted - from_gradient
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        inner = range(len(bodies(eqn)))
        if inner and all((index, number) in scope.children for number in inner):
            reaching |= _through(eqn, index, scope, roles, reaching, from_gradient)
        elif made[index] or any(v in reaching and v not in from_gradient for v in eqn.outvars):
            reaching.update(v for v in eqn.invars if type(v) is Var)
    return reaching


def _through(
    eqn: JaxprEqn, index: int, scope: Scope, roles: Roles, reaching: set[Var], from_gradient: set[Var]
) -> set[Var]:
    """The operands of an equation with bodies that flow into an activation in it, or through it into one
    after.
    """
    found: set[Var] = set()
    for number, body in enumerate(bodies(eqn)):
        wanted: set[Var] = set()
        if len(body.outvars) == len(eqn.outvars):
            pairs = zip(body.outvars, eqn.outvars, strict=True)
            wanted = {inner for inner, outer in pairs if outer in reaching and isinstance(inner, Var)}
        given = (
            (v, eqn.invars[at])
            for v, at in zip(body.invars, operands(eqn, number), strict=True)
            if at is not None
        )
        passed = [(inner, outer) for inner, outer in given if isinstance(outer, Var)]
        tainted = {inner for inner, outer in passed if outer in from_gradient}
        inside = _reaching(body, scope.enter(index, number), roles, wanted, tainted)
        found.update(outer for inner, outer in passed if inner in inside)
    return found
