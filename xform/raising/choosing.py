"""What in a program says which expert a token goes to: choices, and the masks, gates and places made of them.

    i = top_k scores;  mask = eq i iota[x];  gates = mask * scores    ->    i; mask, gates (along x)

A choice is what a top_k, an argmax or a sort gives, a comparison of scores with such, or integers that the
program is given. What is made of it by arithmetic on integers and booleans, by products and by selecting is
routed too; `along` are the axes that it tells apart: those of the numbers that it was compared with, and of
what it was written to. Nothing with a dimension of the tokens' features is routed: it is data that went
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from xform.axes import Factor, Scope
from xform.higher_order import SCATTERS
from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View
from xform.raising.indices import SAME
from xform.trace import Atom, DropVar, JaxprEqn, Literal, Var, shape_of

CHOICES = frozenset(("argmax", "argmin", "top_k", "approx_top_k", "sort"))
COMPARISONS = frozenset(("eq", "ne", "ge", "gt", "le", "lt"))
_MOVES = """
    broadcast_in_dim reshape squeeze expand_dims transpose slice split unstack tile dynamic_slice concatenate
    stack pad gather copy select_n reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or cumsum
    cumprod cummax cummin dot_general sort argmax top_k clamp
"""
MOVES = frozenset(_MOVES.split())
_PARTS = frozenset(("slice", "pad"))

MOVED = frozenset(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"))


@dataclasses.dataclass(frozen=True)
class Routed:
    """along: the axes that it tells apart. sources: what chose: variables. given: no choice of the program's.
    by_sort: in order of experts.
    """

    along: frozenset[Factor] = frozenset()
    sources: frozenset[Var] = frozenset()
    given: bool = False
    by_sort: bool = False


def factors(scope: Scope, atom: Atom) -> frozenset[Factor]:
    """The axes of a value."""
    return frozenset(f for dim in scope[atom] for f in dim)


def is_float(atom: Atom) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and getattr(dtype, "kind", "") not in "iub"


def moved_from(view: View, atom: Atom) -> JaxprEqn | None:
    """The equation that computed what a value is, moved and cast."""
    eqn = view.maker(atom)
    while eqn is not None and (eqn.primitive.name in MOVED or eqn.primitive.name in SAME):
        eqn = view.maker(eqn.invars[0])
    return eqn


def routed(
    view: View, scope: Scope, features: Collection[Factor], seeds: Mapping[Var, Routed] | None = None
) -> dict[Var, Routed]:
    """What is routed in a view. features: axes of tokens' features. seeds: what is known of inputs."""
    found: dict[Var, Routed] = dict(seeds or {})
    for v in view.jaxpr.invars:
        if v not in found and shape_of(v) and _is_integral(v):
            found[v] = Routed(sources=frozenset((v,)), given=True)
    apart, several = frozenset(features), tokens(view, scope)
    for eqn in view.eqns:
        made = _made(view, eqn, found, scope, several)
        if made is None:
            continue
        for out in eqn.outvars:
            if not isinstance(out, DropVar) and (not is_float(out) or not factors(scope, out) & apart):
                found[out] = made
    return found


def _made(
    view: View, eqn: JaxprEqn, found: Mapping[Var, Routed], scope: Scope, several: frozenset[Factor]
) -> Routed | None:
    """What the results of an equation are, if they are routed."""
    name = eqn.primitive.name
    mine = [found[v] for v in eqn.invars if isinstance(v, Var) and v in found]
    if name in CHOICES:
        return _chosen(eqn, mine, scope)
    if name in COMPARISONS and not mine:
        return _compared_with_largest(view, eqn, scope)
    if not mine:
        return None
    along = frozenset[Factor]().union(*(r.along for r in mine))
    others = [v for v in eqn.invars if isinstance(v, Var) and v not in found]
    if name in COMPARISONS:
        here = frozenset[Factor]().union(
            *(factors(scope, v) for v in eqn.invars if isinstance(v, Var) and v in found)
        )
        along |= frozenset[Factor]().union(*(factors(scope, v) for v in others)) - here
    elif name in SCATTERS:
        dims = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        along |= frozenset(f for d in dims for f in scope[eqn.invars[0]][d]) - several
        if eqn.invars[1] not in found:
            return None
    elif name in _PARTS:
        pairs = zip(scope[eqn.invars[0]], scope[eqn.outvars[0]], strict=True)
        along |= frozenset(f for whole, part in pairs if along & frozenset(whole) for f in part)
    elif name in ("gather", "dynamic_slice"):
        if not is_float(eqn.invars[0]):
            pass
        elif eqn.invars[0] not in found and len(shape_of(eqn.outvars[0])) > 2:
            return None
    elif name in ("add", "sub", "add_any", "max", "min", "concatenate", "stack") and is_float(eqn.outvars[0]):
        if any(is_float(v) and not _is_number(v) for v in others):
            return None
    elif not (is_elementwise(eqn) or name in MOVES or name in SAME) and any(map(is_float, eqn.outvars)):
        return None
    sources = frozenset[Var]().union(*(r.sources for r in mine))
    return Routed(along, sources, all(r.given for r in mine), any(r.by_sort for r in mine))


def tokens(view: View, scope: Scope) -> frozenset[Factor]:
    """The axes of what chooses: of tokens, and of their choices; of integers that the program is given."""
    chosen = [v for eqn in view.eqns if eqn.primitive.name in CHOICES for v in eqn.outvars]
    given = [v for v in view.jaxpr.invars if shape_of(v) and _is_integral(v)]
    return frozenset[Factor]().union(
        *(factors(scope, v) for v in chosen + given if not isinstance(v, DropVar))
    )


def _is_integral(v: Var) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


def _is_number(v: Atom) -> bool:
    return not shape_of(v)


def _chosen(eqn: JaxprEqn, mine: list[Routed], scope: Scope) -> Routed | None:
    name = eqn.primitive.name
    along = frozenset[Factor]().union(*(r.along for r in mine))
    if name == "sort":
        along |= frozenset(scope[eqn.invars[0]][eqn.params["dimension"]])
    chosen = [r for r in mine if not r.given]
    if chosen:
        return Routed(along, frozenset[Var]().union(*(r.sources for r in chosen)), by_sort=name == "sort")
    out = next((v for v in eqn.outvars if not isinstance(v, DropVar)), None)
    if out is None:
        return None
    if mine and name == "sort":
        return Routed(along, frozenset[Var]().union(*(r.sources for r in mine)), True, True)
    return Routed(along, frozenset((out,)))


def _compared_with_largest(view: View, eqn: JaxprEqn, scope: Scope) -> Routed | None:
    """scores == max(scores)."""
    for v, other in (eqn.invars, eqn.invars[::-1]):
        if isinstance(v, Literal) or isinstance(other, Literal) or not is_float(v):
            continue
        maker = moved_from(view, v)
        if maker is not None and maker.primitive.name == "reduce_max":
            axes = maker.params["axes"]
            reduced = (f for d in axes for f in scope[maker.invars[0]][d])
            return Routed(factors(scope, other) & frozenset(reduced), frozenset((eqn.outvars[0],)))
    return None
