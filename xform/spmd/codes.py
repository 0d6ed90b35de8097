"""Weights that come as codes: what is made of them is made where it is needed, so that codes are sent.

w: int8[d,f] lies over d     v = float w;  u = v * s;  y = dot x u     ->     all_gather w, then the same
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xform.axes.rules import ELEMENTWISE
from xform.movement import MOVEMENT
from xform.quantization.formats import bits
from xform.spmd.values import Val
from xform.trace import JaxprEqn, shape_of


def codes_in(eqn: JaxprEqn, vals: Sequence[Val]) -> Val | None:
    """The codes of a weight of which an equation makes the numbers that they stand for, or what has been made
    of them so far: it is done where these numbers are needed, and the codes are brought there.
    """
    name, first = eqn.primitive.name, vals[0] if vals else None
    if first is None or len(eqn.outvars) != 1:
        return None
    weight = first.origin or first.named
    if name == "convert_element_type" and weight and first.make is None and not first.laid.partial:
        before, after = bits(first.aval.dtype), bits(eqn.params["new_dtype"])
        return first if before <= 8 and before < after else None
    if not (name in MOVEMENT or name in ELEMENTWISE):
        return None
    size = math.prod(shape_of(eqn.outvars[0]))
    others = all(v.origin or v.make is not None or math.prod(v.shape) < size for v in vals)
    return next((v for v in vals if v.codes), None) if others else None


def made_of(eqn: JaxprEqn, vals: Sequence[Val]) -> str:
    """The weight of which a result is made number by number, and of nothing else of its size."""
    if eqn.primitive.name not in MOVEMENT and eqn.primitive.name not in ELEMENTWISE:
        return ""
    shape = shape_of(eqn.outvars[0])
    full = [v for v in vals if math.prod(v.shape) == math.prod(shape) and v.make is None]
    names = {v.origin or v.named for v in full}
    return names.pop() if len(names) == 1 else ""
