"""How a program's weights are stored as codes ahead of its calls, so that products find the scales they need.

    scan over w [layers, d, heads, h]:  reshape [d, heads * h];  dot_general x w    contracted: d
                                                           ->    scales [layers, 1, heads, h]

Which dimension of an input a product contracts is told by the axes of the whole program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.axes import Scope
from xform.quantization.arrays import quantized
from xform.quantization.carrying import carried
from xform.quantization.replacing import shared
from xform.quantization.scales import How
from xform.quantization.training import Side
from xform.roles import Roles
from xform.trace import Jaxpr, JaxprEqn, ShapedArray, shape_of


@dataclasses.dataclass(frozen=True)
class Storable:
    """hows: of the weights that can be stored as codes, by path. left: those of which something takes the
    floats, and where.
    """

    hows: dict[str, How]
    left: dict[str, str]


def storable(jaxpr: Jaxpr, hows: Mapping[int, How], paths: Sequence[str]) -> Storable:
    """Which of a program's weights can be stored as codes, found by carrying such codes through it.

    hows: of the inputs that products take. paths: of all inputs.
    """
    left: dict[str, str] = {}
    hows = dict(hows)
    while hows:
        structs = [
            jax.eval_shape(functools.partial(quantized, how=hows[i]), v.aval) if i in hows else v.aval
            for i, v in enumerate(jaxpr.invars)
        ]
        leaves, tree = jax.tree.flatten(structs)
        avals = [ShapedArray(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        names = [f"args[{i}]" for i in range(len(leaves))]
        _, notes = carried(jaxpr, functools.partial(jax.tree.unflatten, tree), avals, names, {})
        if not notes:
            break
        for note in notes:
            for i in note.inputs:
                left.setdefault(paths[i], f"{note.eqn.primitive.name} at {note.where}")
                hows.pop(i, None)
    return Storable({paths[i]: how for i, how in hows.items()}, left)


def stored(
    roles: Roles, scope: Scope, eqn: JaxprEqn, weight: int, inputs: Sequence[int], side: Side
) -> Iterator[tuple[int, How]]:
    """The inputs that a product's operand `weight` is made of, and how each is stored for it."""
    assert side.format is not None
    operand = scope[eqn.invars[weight]]
    along = shared(eqn, weight)
    dims = along if side.channels else range(len(operand))
    one = {f for d in dims for f in operand[d]}  # along these numbers share a scale
    size = side.block or side.format.block
    last = set(operand[along[-1]]) if size and along else set()
    root = roles.axes.root
    for i in inputs:
        var: Any = root.jaxpr.invars[i]
        if not jnp.issubdtype(var.aval.dtype, jnp.floating) or var.aval.dtype.itemsize <= 1:
            continue
        own, shape = root[var], shape_of(var)
        together = [d for d, dim in enumerate(own) if one & set(dim)]
        cut = [d for d in together if last & set(own[d]) and shape[d] % size == 0]
        blocks = ((cut[-1], size),) if cut else ()
        free = tuple(d for d in range(len(shape)) if d not in together)
        yield i, How(side.format, free, blocks, side.calibration)
