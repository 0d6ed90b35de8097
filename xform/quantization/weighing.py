"""Whether a product is worth quantizing on a chip: what of it one device has, by the plan's rules, and what
that takes (`costs`).

    16 x 2048 tokens, 4096 x 11008, fsdp 16     ->     2048 tokens, 4096 x 11008, a 16th of which is encoded

Codes of weights travel, so that a device encodes its own part of one. An operand that several products take
is encoded once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from xform.axes import Scope
from xform.errors import Decline
from xform.plans.rules import ways
from xform.quantization import costs
from xform.quantization.training import Products
from xform.roles import Roles
from xform.roles.logical import logical_names
from xform.topologies import Kind
from xform.trace import Atom, JaxprEqn, shape_of

MARGIN = 1.05
"""How much longer than floats a quantized product may take by estimate before it is left alone: closer, the
estimate cannot tell.
"""


def sizes_of(
    roles: Roles,
    scope: Scope,
    eqn: JaxprEqn,
    weight: int | None,
    mesh: Mapping[str, int],
    shared: Sequence[float] = (1, 1),
) -> costs.Sizes:
    """Of a `dot_general`. shared: among how many products each operand is;
    infinity: it has its codes already."""
    left, right = eqn.invars[:2]
    (out,) = eqn.outvars
    contracted = eqn.params["dimension_numbers"][0][0]

    def names(v: Atom, dims: Sequence[int] | None = None) -> list[str]:
        named = logical_names(roles, scope, v)
        return [named[d].name or "" for d in (range(len(named)) if dims is None else dims)]

    def numbers(v: Atom) -> float:
        return math.prod(shape_of(v)) / ways(names(v), mesh)

    activation = left if weight != 0 else right
    along = contracted if weight != 0 else eqn.params["dimension_numbers"][0][1]
    free = [d for d in range(len(shape_of(activation))) if d not in along]
    # What is summed is together where the result lies over the same axes, and of a weight all that the device
    # multiplies is.
    rest = ways(names(activation, along), mesh, names(out))
    summed = math.prod(shape_of(activation)[d] for d in along) / rest
    result = numbers(out)
    multiplied = result * summed
    taken = [numbers(left), numbers(right)]
    if weight is not None:
        rows = math.prod(shape_of(activation)[d] for d in free) / ways(names(activation, free), mesh)
        taken[1 - weight], taken[weight] = rows * summed, multiplied / rows
    encoded = [numbers(v) / n for v, n in zip((left, right), shared, strict=True)]
    avals: list[Any] = [v.aval for v in (left, right, out)]
    nbytes = [int(aval.dtype.itemsize) for aval in avals]
    return costs.Sizes(
        multiplied,
        (taken[0], taken[1], result),
        (encoded[0], encoded[1]),
        (nbytes[0], nbytes[1], nbytes[2]),
        1 if weight is None else weight,
    )


def check_pays(kind: Kind, sizes: costs.Sizes, how: Products) -> None:
    """Raises Decline, with the estimates, for a product that takes longer quantized than in floats, or whose
    codes the chip multiplies no faster. Weights alone are quantized for the sake of memory and of what is
    sent, and not weighed.
    """
    if how.left.format is None or how.right.format is None:
        return
    trained = costs.is_trained(how)
    plain, codes = costs.in_floats(kind, sizes, trained), costs.quantized(kind, sizes, how, trained)
    lack = lacking(kind, how)
    if lack is None and codes <= MARGIN * plain:
        return
    why = f"left in float: {_time(codes)} against {_time(plain)}"
    if lack is not None:
        why += f", as {lack}"
    raise Decline(f"{why}; force = true, or a rule, quantizes it all the same")


def lacking(kind: Kind, how: Products) -> str | None:
    """Why a chip multiplies these no faster than bfloat16; None: it does."""
    units = costs.forward_units(how)
    if not units:
        return "its codes are made floats again before they are multiplied"
    if costs.peak(kind, units) <= kind.peak_flops:
        return f"{kind.name} multiplies {units} no faster than bfloat16"
    return None


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"
