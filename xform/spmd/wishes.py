"""How results are wanted: the layouts that sharding constraints ask for, and of which sums they speak."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xform.ops.resident import FLAGS
from xform.sharding.layout import entry_axes
from xform.spmd.layout import Laid, Piece
from xform.trace import Jaxpr, JaxprEqn, Var, shape_of

Parts = Mapping[str, tuple[str, ...]]
"""Of the plan's mesh axes, those of the manual region, outermost first."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """The layout that a constraint asks for; `free`: dimensions of which it says nothing."""

    laid: Laid
    free: frozenset[int]

    def granted(self, laid: Laid) -> Laid:
        """The layout that fulfils the wish for a value that lies so, which it keeps where nothing is said."""
        taken = set(self.laid.axes)
        return Laid(
            tuple(
                own if i in self.free and not {a for p in own for a in p.axes} & taken else dim
                for i, (dim, own) in enumerate(zip(self.laid.dims, laid.dims, strict=True))
            )
        )

    def without(self, axes: Collection[str]) -> Wish:
        """The same but for these mesh axes, of which it says nothing."""
        dims = tuple(
            tuple(Piece(p.size, tuple(a for a in p.axes if a not in axes)) for p in dim)
            for dim in self.laid.dims
        )
        return Wish(Laid(dims), self.free)


def wish_of(eqn: JaxprEqn, parts: Parts) -> Wish | None:
    """The layout that a sharding constraint asks for, as far as the region's axes go."""
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return None
    shape = shape_of(eqn.invars[0])
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    refined = [tuple(p for a in entry_axes(e) for p in parts.get(a, ())) for e in spec]
    free = frozenset(i for i, e in enumerate(spec) if e is PartitionSpec.UNCONSTRAINED)
    return Wish(Laid(tuple((Piece(n, axes),) for n, axes in zip(shape, refined, strict=True))), free)


def wishes(jaxpr: Jaxpr, parts: Parts) -> dict[Any, Wish]:
    """What is asked of each variable: by a constraint on it, of a sum, by those on its terms, and of what is
    scaled, by those on the codes' product.
    """
    found: dict[Any, Wish] = {}
    asked: dict[Any, Wish] = {}  # of a constraint's result too
    for eqn in jaxpr.eqns:
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        if name == "sharding_constraint" and isinstance(first, Var):
            if (wish := wish_of(eqn, parts)) is not None:
                found[first] = asked[first] = asked[eqn.outvars[0]] = wish
        elif name == "add_any":
            known = next((asked[v] for v in eqn.invars if v in asked), None)
            if known is not None:
                found[eqn.outvars[0]] = asked[eqn.outvars[0]] = known
        elif (becomes_float(eqn) or scales(eqn)) and isinstance(first, Var) and first in asked:
            found.setdefault(eqn.outvars[0], asked[first])
            asked[eqn.outvars[0]] = asked[first]
    return found


def terms(jaxpr: Jaxpr) -> frozenset[Var]:
    """The variables that are used once, to be added to another such (a gradient that comes from several
    uses), or are integers to be scaled: summed over devices after that, they are once, and no wider than
    floats.
    """
    uses: dict[Var, list[JaxprEqn | None]] = {}
    scaled: set[Var] = set()
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if isinstance(v, Var):
                uses.setdefault(v, []).append(eqn)
        first = eqn.invars[0] if eqn.invars else None
        of_scaled = isinstance(first, Var) and first in scaled
        if becomes_float(eqn) or (of_scaled and (scales(eqn) or eqn.primitive.name in _AS_IT_IS)):
            scaled.update(eqn.outvars)
    for v in jaxpr.outvars:
        if isinstance(v, Var):
            uses.setdefault(v, []).append(None)
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        for var in eqn.outvars:
            (use,) = uses.get(var, []) if len(uses.get(var, [])) == 1 else (None,)
            if use is None:
                continue
            through = use.primitive.name in _AS_IT_IS and use.outvars[0] in found
            added = use.primitive.name == "add_any" and use.invars[0] is not use.invars[1]
            later = becomes_float(use) or (var in scaled and use.invars[0] is var and scales(use))
            if through or added or later:
                found.add(var)
    return frozenset(found)


def waiting(jaxpr: Jaxpr, results: Sequence[bool] = ()) -> frozenset[Var]:
    """The variables that are used once, to be added to terms that stay terms: no layout is asked of them.
    results: which results of the program are.
    """
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var))
    uses.update(v for v in jaxpr.outvars if isinstance(v, Var))
    found = {v for v, waits in zip(jaxpr.outvars, results, strict=False) if waits and isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.params.get("name") in FLAGS:
            found.update(v for v in eqn.invars[1:2] if isinstance(v, Var))
        elif eqn.primitive.name in _LINEAR and eqn.outvars[0] in found:
            found.update(v for v in eqn.invars if isinstance(v, Var))
        elif scales(eqn) and eqn.outvars[0] in found and isinstance(eqn.invars[0], Var):
            found.add(eqn.invars[0])
    return frozenset(v for v in found if uses[v] == 1)


_LINEAR = frozenset(
    (
        "add_any",
        "convert_element_type",
        "copy",
        "neg",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "transpose",
    )
)
_AS_IT_IS = frozenset(("sharding_constraint", "transpose"))


def becomes_float(eqn: JaxprEqn) -> bool:
    """Whether integers are cast to floats: those of a product of codes."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before = getattr(eqn.invars[0].aval, "dtype", np.float32)
    return jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)


def scales(eqn: JaxprEqn) -> bool:
    """Whether a value is multiplied with a smaller one."""
    if eqn.primitive.name != "mul":
        return False
    first, second = (math.prod(shape_of(v)) for v in eqn.invars)
    return second < first
