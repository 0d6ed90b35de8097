"""How a program's weights are stored as codes ahead of its calls, so that products find the scales they need.

    scan over w [layers, d, heads, h]:  reshape [d, heads * h];  dot_general x w    contracted: d
                                                           ->    scales [layers, 1, heads, h]

Where each dimension of a weight ends up is found by carrying codes through the program that have scales along
this dimension alone: a product sees along which of its own there are scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.errors import PlanError
from xform.quantization.arrays import quantized
from xform.quantization.carrying import Carried, Place, carried
from xform.quantization.formats import FORMATS
from xform.quantization.replacing import shared
from xform.quantization.scales import Calibration, How
from xform.quantization.training import Side
from xform.trace import Jaxpr, JaxprEqn, ShapedArray, shape_of, source_line


@dataclasses.dataclass(frozen=True)
class Taker:
    """A product that takes a weight: as which operand, quantized how."""

    eqn: JaxprEqn
    operand: int
    side: Side
    name: str


@dataclasses.dataclass(frozen=True)
class Storable:
    """hows: of the weights that can be stored as codes, by path. left: those of which something takes the
    floats, and where.
    """

    hows: dict[str, How]
    left: dict[str, str]


def storable(
    jaxpr: Jaxpr, takers: Mapping[Place, Taker], inputs: Sequence[int], paths: Sequence[str]
) -> Storable:
    """Which of a program's inputs can be stored as codes, and how. inputs: those that are weights of the
    products `takers`. paths: of all. Raises PlanError where products want one in different ways.
    """
    weights = [i for i in inputs if _is_float(jaxpr.invars[i].aval)]
    into = _dimensions(jaxpr, takers, weights)
    hows: dict[int, How] = {}
    for (i, place), dims in into.items():
        taker = takers[place]
        how = _how(shape_of(jaxpr.invars[i]), dims, taker, paths[i])
        both = _for_both(hows.get(i, how), how)
        if both is None:
            raise PlanError(
                f"quantize: several products want {paths[i]} quantized in different ways, {taker.name} at"
                f" {source_line(taker.eqn)} among them: give them one recipe by a rule"
            )
        hows[i] = both
    left: dict[str, str] = {}
    while hows and (notes := _carried(jaxpr, hows).whole):
        for note in notes:
            for i in note.inputs:
                left.setdefault(paths[i], note.text)
                hows.pop(i, None)
    return Storable({paths[i]: hows[i] for i in sorted(hows)}, left)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize > 1


def _dimensions(
    jaxpr: Jaxpr, takers: Mapping[Place, Taker], weights: Sequence[int]
) -> dict[tuple[int, Place], list[set[int]]]:
    """For each weight and product that takes it, into which of the operand's dimensions each of the weight's
    goes.
    """
    found: dict[tuple[int, Place], list[set[int]]] = {}
    for d in range(max((len(shape_of(jaxpr.invars[i])) for i in weights), default=0)):
        hows = {i: How(FORMATS["int8"], (d,)) for i in weights if d < len(shape_of(jaxpr.invars[i]))}
        for taken in _carried(jaxpr, hows).taken:
            if taken.place in takers and taken.operand == takers[taken.place].operand:
                for i in taken.inputs:
                    dims = found.setdefault((i, taken.place), [set() for _ in shape_of(jaxpr.invars[i])])
                    dims[d] |= {j for j, n in enumerate(taken.scale) if n > 1}
    return found


def _how(shape: Sequence[int], dims: Sequence[set[int]], taker: Taker, path: str) -> How:
    side, along = taker.side, shared(taker.eqn, taker.operand)
    assert side.format is not None
    found, channels = side.calibration, side.channels
    if found.is_kept:  # a range that is kept for a step's weights, one an array; a stored weight has its own
        found, channels = Calibration("absmax", (found.factor,) if found.factor else ()), False
    # Along what goes into dimensions that are contracted, numbers share a scale; without channels, along all.
    together = [d for d, into in enumerate(dims) if (into & set(along) if channels else into)]
    size = side.block or side.format.block
    cut = [d for d in together if along and along[-1] in dims[d]] if size else []
    blocks = _blocks(shape, cut, size, taker, path)
    apart = cut[: cut.index(blocks[0][0])] if blocks else []  # outside of a block
    free = tuple(d for d in range(len(shape)) if d not in together or d in apart)
    return How(side.format, free, blocks, found)


def _blocks(
    shape: Sequence[int], cut: Sequence[int], size: int, taker: Taker, path: str
) -> tuple[tuple[int, int], ...]:
    """Blocks of so many numbers along the dimensions `cut`, which a product contracts as one, as they lie."""
    left = size
    for d in reversed(cut):
        if shape[d] % left == 0:
            return ((d, left),)
        if left % shape[d]:
            break
        left //= shape[d]
    if not cut:
        return ()
    lie = " x ".join(str(shape[d]) for d in cut)
    raise PlanError(
        f"quantize: blocks of {size} do not divide {path}, of which {taker.name} contracts {lie} numbers"
        f" ({source_line(taker.eqn)}): give it another recipe by a rule, or other blocks"
    )


def _for_both(a: How, b: How) -> How | None:
    """How a weight is stored that products take in different ways, as it is and transposed: numbers share a
    scale that do so for either. None: they want other codes.
    """
    if (a.format, a.calibration) != (b.format, b.calibration):
        return None
    free = tuple(d for d in a.channels if d in b.channels)
    return dataclasses.replace(a, channels=free, blocks=a.blocks if a.blocks == b.blocks else ())


def _carried(jaxpr: Jaxpr, hows: Mapping[int, How]) -> Carried:
    """The program with weights given as such codes."""
    structs = [
        jax.eval_shape(functools.partial(quantized, how=hows[i]), v.aval) if i in hows else v.aval
        for i, v in enumerate(jaxpr.invars)
    ]
    leaves, tree = jax.tree.flatten(structs)
    avals = [ShapedArray(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
    names = [f"args[{i}]" for i in range(len(leaves))]
    return carried(jaxpr, functools.partial(jax.tree.unflatten, tree), avals, names, {})
