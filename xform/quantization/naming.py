"""What the ranges that a model's products keep are called: one name for an operand, however many take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xform.ops.marks import APART, FORWARD, SIDES, Loops, Mark
from xform.quantization.training import Products, Side
from xform.roles import Roles
from xform.tensors.names import NamedProduct
from xform.trace import Atom, Jaxpr, Var


def marked(
    how: Products, names: Mapping[str, tuple[str, str]], loops: Loops, microbatches: bool = False
) -> Products:
    """How a product is quantized, the ranges that are kept under their marks. names: of each side, the
    product and its side that a range is named after. microbatches: those that are not kept are of each
    microbatch's own, or of each device's tokens.
    """

    def one(side: str) -> Side:
        own: Side = getattr(how, side)
        if own.format is not None and not own.calibration.is_kept and microbatches:
            return dataclasses.replace(own, mark=APART)
        if own.format is None or not own.calibration.is_kept:
            return own
        return dataclasses.replace(own, mark=Mark(*names[side], own.calibration.steps, loops).text)

    left, right, dlhs, drhs = map(one, SIDES)
    return Products(left, right, dlhs, drhs, how.seed)


class Names:
    """What the ranges of a model's products are named after: each side after itself, but an operand that
    several products of a body take in one way has one range, so that it is encoded once for all.
    """

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.first: dict[Any, tuple[str, str]] = {}

    def of(self, p: NamedProduct, key: str, how: Products) -> dict[str, tuple[str, str]]:
        jaxpr = self.roles.axes.scope(p.path).jaxpr
        names = {side: (key, side) for side in SIDES}
        for side, v in zip(FORWARD, jaxpr.eqns[p.index].invars[:2], strict=True):
            own: Side = getattr(how, side)
            what = (p.path, _origin(jaxpr, p.index, v), own.format, own.calibration)
            names[side] = self.first.setdefault(what, names[side])
        return names


def _origin(jaxpr: Jaxpr, index: int, v: Atom) -> tuple[Any, ...]:
    """What a value is told by: where it is a cast, what was cast, and to what."""
    for eqn in reversed(jaxpr.eqns[:index]):
        if v in eqn.outvars and eqn.primitive.name == "convert_element_type":
            cast = eqn.invars[0]
            return (cast, v.aval.str_short()) if isinstance(cast, Var) else (id(v),)
    return (v,) if isinstance(v, Var) else (id(v),)
