"""Operations whose parts take more than the same operation: lookups and scatters, extremes, prefixes, random
bits.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from xform.sharding.layout import entry_axes
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.spmd.wishes import wish_of
from xform.trace import JaxprEqn


def sharding_constraint(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    (val,) = vals
    wish = wish_of(eqn, walk.parts)
    if wish is None:
        return [val]
    moved = walk.moved_to(val, walk.granted(val, wish))
    rest = _automatic(eqn)
    if not any(rest) or moved.make is not None:
        return [moved]
    x = jax.lax.with_sharding_constraint(walk.get(moved, moved.laid), PartitionSpec(*rest))
    return [walk.held(x, moved.aval, moved.laid, moved.origin)]


def _automatic(eqn: JaxprEqn) -> list[Any]:
    """What a constraint says of the axes that are left to the compiler, a dimension at a time."""
    rest: list[Any] = []
    here = jax.sharding.get_abstract_mesh()
    others = set(here.axis_names) - set(here.manual_axes)  # a constraint may speak of another mesh altogether
    for entry in eqn.params["sharding"].spec:
        axes = tuple(a for a in entry_axes(entry) if a in others)
        rest.append(axes or None)
    return rest


HANDLERS = {"sharding_constraint": sharding_constraint}
