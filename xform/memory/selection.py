"""Which tensors of layers a plan means: by name, by a pattern of names, by a role, or by a predicate.

selected(("query_proj", "mlp*"), tensors, "remat.save")          # names, * and ? as in a shell
selected(("heads",), tensors, "remat.save")                      # what has a dimension of that role
selected(lambda t: t.dtype == "bfloat16", tensors, "remat.save") # what is asked of each
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Sequence
from typing import Any

from xform.higher_order import equations
from xform.registry import unknown
from xform.roles import Roles
from xform.tensors.layers import Layer


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A named tensor of a layer. roles: of its dimensions, none for a name of the user's."""

    name: str
    roles: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    dtype: str


Selection = Sequence[str] | Callable[[Tensor], bool]


def tensors_of(layer: Layer, roles: Roles) -> list[Tensor]:
    """The named tensors of a layer of the program that `roles` are of, in order."""
    outer = roles.axes.scope(layer.path)
    found = []
    for i, name in layer.inputs.items():
        scope = outer.enter(layer.numbers[0], 0) if layer.scanned else outer
        found.append(_tensor(name, roles, scope, layer.jaxpr.invars[i]))
    for (path, index, result), name in layer.names.items():
        scope, number = outer, index
        if layer.scanned:
            scope = outer.enter(layer.numbers[0], 0)
        elif path:
            path = ((layer.numbers[path[0][0]], path[0][1]), *path[1:])
        else:
            number = layer.numbers[index]
        for step in path:
            scope = scope.enter(*step)
        found.append(_tensor(name, roles, scope, scope.jaxpr.eqns[number].outvars[result]))
    for eqn in equations(layer.jaxpr):
        if eqn.primitive.name == "name":
            aval: Any = eqn.outvars[0].aval
            found.append(Tensor(str(eqn.params["name"]), (), tuple(aval.shape), str(aval.dtype)))
    return list(dict.fromkeys(found))


def selected(selection: Selection, tensors: Collection[Tensor], where: str) -> frozenset[str]:
    """The names of the tensors that are meant. PlanError, beginning with `where`, for what means none."""
    if callable(selection):
        return frozenset(t.name for t in tensors if selection(t))
    found: set[str] = set()
    for entry in selection:
        names = {t.name for t in tensors if fnmatch.fnmatchcase(t.name, entry)}
        names = names or {t.name for t in tensors if any(entry in dim for dim in t.roles)}
        if not names:
            roles = {role for t in tensors for dim in t.roles for role in dim}
            there = [*sorted({t.name for t in tensors}), *sorted(roles - {entry})]
            raise unknown("tensor", entry, there, where)
        found |= names
    return frozenset(found)


def _tensor(name: str, roles: Roles, scope: Any, var: Any) -> Tensor:
    return Tensor(name, roles.of(scope, var), tuple(var.aval.shape), str(var.aval.dtype))
