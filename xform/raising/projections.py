"""Which product made a dimension of a value: back through rotations, moves and casts, dimension by dimension.

q = rotate(reshape(x . w, [b, t, n, d]))     the dimension n was w's, t was x's
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from xform.axes.rules import ELEMENTWISE
from xform.raising.flat import size
from xform.raising.indices import groups
from xform.raising.reading import Reading
from xform.trace import Atom, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Made:
    """Made by the product of equation `number`; side: the operand that has the dimension, -1 for both; axis:
    its dimension in the product's result.
    """

    number: int
    side: int
    axis: int


def made(reading: Reading, atom: Atom, axis: int) -> Made | None:
    """The product that made dimension `axis` of a value; None where it is not to be found."""
    for _ in range(64):
        number = reading.number(atom)
        if number < 0 or not isinstance(atom, Var):
            return None
        eqn = reading.view.eqns[number]
        if eqn.primitive.name == "dot_general":
            return _of_dot(eqn, number, axis)
        step = _back(reading, eqn, atom, axis)
        if step is None:
            return None
        atom, axis = step
    return None


def projected(reading: Reading, atom: Atom, axis: int) -> Atom | None:
    """What was multiplied by weights to make a value whose dimension `axis` is the weights'."""
    found = made(reading, atom, axis)
    if found is None or found.side < 0:
        return None
    x = reading.view.eqns[found.number].invars[1 - found.side]
    while (number := reading.number(x)) >= 0:
        eqn = reading.view.eqns[number]
        if eqn.primitive.name not in (
            "reshape",
            "transpose",
            "convert_element_type",
            "broadcast_in_dim",
            "squeeze",
        ):
            break
        x = eqn.invars[0]
    return x


def _of_dot(eqn: JaxprEqn, number: int, axis: int) -> Made:
    (lc, _), (lb, _) = eqn.params["dimension_numbers"]
    if axis < len(lb):
        return Made(number, -1, axis)
    free = len(size(eqn.invars[0])) - len(lb) - len(lc)
    return Made(number, 0 if axis - len(lb) < free else 1, axis)


def _back(reading: Reading, eqn: JaxprEqn, v: Var, axis: int) -> tuple[Atom, int] | None:
    name, params = eqn.primitive.name, eqn.params
    if name == "reshape":
        old, new = size(eqn.invars[0]), size(v)
        for left, right in groups(old, new):
            if axis in right:
                return eqn.invars[0], _part(left, right, old, new, axis)
        return None
    if name == "transpose":
        return eqn.invars[0], params["permutation"][axis]
    if name == "broadcast_in_dim":
        dims = list(params["broadcast_dimensions"])
        return (eqn.invars[0], dims.index(axis)) if axis in dims else None
    if name == "squeeze":
        kept = [d for d in range(len(size(eqn.invars[0]))) if d not in params["dimensions"]]
        return eqn.invars[0], kept[axis]
    if name in ("slice", "split", "copy", "name", "optimization_barrier", "rev", "pad"):
        k = eqn.outvars.index(v) if name == "optimization_barrier" else 0
        return eqn.invars[k], axis
    if name == "dynamic_update_slice":
        return eqn.invars[1], axis
    if name in ("concatenate",):
        return eqn.invars[-1], axis
    if name not in ELEMENTWISE:
        return None
    same = [w for w in eqn.invars if isinstance(w, Var) and len(size(w)) == len(size(v))]
    if not same:
        return None
    return max(same, key=lambda w: (sum(reading.varies(w)), reading.takes_inputs(w))), axis


def _part(
    left: Sequence[int], right: Sequence[int], old: Sequence[int], new: Sequence[int], axis: int
) -> int:
    """Of the dimensions that a reshape joins or splits, the one that has the most of `axis`."""
    inner = math.prod(new[d] for d in right[right.index(axis) + 1 :])
    outer = inner * new[axis]
    at = 1
    for d in reversed(left):
        at *= old[d]
        if at >= outer or at > inner:
            return d
    return left[0]
