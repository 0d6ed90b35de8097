"""Cuts and joins along a dimension that lies over devices: blocks go to where they belong.

    q, k, v = split x [.., 12/tensor]  ->  q [.., 4/tensor] from a ppermute or two of blocks of x, and so on

A dimension is seen as units of equal size, as large as all borders allow, so many on each device before and
after. For every place a unit can have in a block before and in one after there is one ppermute, among those
devices alone that have such a unit to give. What is sent is less than the result, where making the dimension
whole would send nearly all of the operand. Where the borders allow only units so small that it takes many
rounds, or a part does not divide, the dimension is made whole (`forms`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xform.spmd.layout import Laid, Piece
from xform.spmd.prefixes import block, over
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import JaxprEqn, Value, shape_of

ROUNDS = 16
"""The most ppermutes that are taken instead of one all-gather."""


class Source(NamedTuple):
    """A dimension of `size` elements, the first of which is number `start` of the result; what is out of the
    result is cut off.
    """

    size: int
    start: int


class Round(NamedTuple):
    """Unit `unit` of source `source` of a device to unit `place` of another; pairs: from which to which."""

    source: int
    unit: int
    place: int
    pairs: tuple[tuple[int, int], ...]


def rounds(sources: Sequence[Source], size: int, ways: int) -> tuple[int, list[Round]] | None:
    """The size of the units, and the rounds that make a dimension of `size` on `ways` devices out of sources;
    None where it does not divide or takes too many.
    """
    if not size or any(n % ways for n in (size, *(s.size for s in sources))):
        return None
    unit = math.gcd(size // ways, *(s.size // ways for s in sources), *(abs(s.start) for s in sources))
    there = size // ways // unit
    pairs: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for number, source in enumerate(sources):
        here = source.size // ways // unit
        for device in range(ways):
            for u in range(here):
                g = source.start // unit + device * here + u
                if 0 <= g < size // unit:
                    pairs.setdefault((number, u, g % there), []).append((device, g // there))
        if len(pairs) > ROUNDS:
            return None
    return unit, [Round(*key, tuple(each)) for key, each in pairs.items()]


def moved(
    walk: Walk,
    found: tuple[int, list[Round]],
    xs: Sequence[Value],
    dim: int,
    axes: tuple[str, ...],
    base: Value,
) -> Value:
    """The block of the result on this device, from the blocks `xs` of the sources; `base`, of the block's
    shape, has what none of them gives.
    """
    unit, steps = found
    ordered, where = _numbers(walk, axes)
    places = jnp.split(base, base.shape[dim] // unit, dim)
    for step in steps:
        part = jax.lax.slice_in_dim(xs[step.source], step.unit * unit, (step.unit + 1) * unit, axis=dim)
        if any(a != b for a, b in step.pairs):
            part = jax.lax.ppermute(part, ordered, [(where[a], where[b]) for a, b in step.pairs])
        gets = np.zeros(walk.grid.ways(axes), bool)
        gets[[b for _, b in step.pairs]] = True
        mine = jnp.asarray(gets)[block(walk, axes)]
        places[step.place] = jnp.where(mine, part, places[step.place])
    return jnp.concatenate(places, dim)


def _numbers(walk: Walk, axes: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """The axes in the mesh's order, as ppermute wants them, and there the number of each block."""
    sizes = walk.grid.sizes
    ordered = tuple(a for a in sizes if a in axes)
    blocks = np.arange(walk.grid.ways(axes)).reshape([sizes[a] for a in axes])
    return ordered, np.argsort(blocks.transpose([axes.index(a) for a in ordered]).ravel()).tolist()


def cut(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """slice and split: each result lies over the same axes."""
    (val,), p = vals, eqn.params
    if eqn.primitive.name == "split":
        dim = p["axis"]
        starts = [sum(map(int, p["sizes"][:i])) for i in range(len(p["sizes"]))]
    else:
        changed = [k for k, n in enumerate(val.shape) if shape_of(eqn.outvars[0])[k] != n]
        if len(changed) != 1 or (p["strides"] and p["strides"][changed[0]] != 1):
            return None
        (dim,) = changed
        starts = [p["start_indices"][dim]]
    axes = over(val, dim)
    if not axes:
        return None
    size, ways, laid = val.shape[dim], walk.grid.ways(axes), val.laid.summed()
    sizes = [shape_of(v)[dim] for v in eqn.outvars]
    found = [rounds([Source(size, -start)], n, ways) for start, n in zip(starts, sizes, strict=True)]
    plans = [plan for plan in found if plan is not None]
    if len(plans) < len(found):
        return None
    x, made = walk.get(val, laid), []
    for plan, n, var in zip(plans, sizes, eqn.outvars, strict=True):
        there = _with(laid, dim, n, axes)
        base = jnp.zeros(walk.grid.local(there), x.dtype)
        made.append(walk.held(moved(walk, plan, [x], dim, axes, base), var.aval, there))
    return made


def joined(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val] | None:
    """concatenate and pad: the result lies over the axes of the first operand that lies over some."""
    p, out = eqn.params, eqn.outvars[0]
    if eqn.primitive.name == "pad":
        changed = [k for k, config in enumerate(p["padding_config"]) if tuple(config) != (0, 0, 0)]
        if len(changed) != 1 or p["padding_config"][changed[0]][2]:
            return None
        (dim,), parts, starts = changed, vals[:1], [p["padding_config"][changed[0]][0]]
    else:
        dim, parts = p["dimension"], vals
        starts = [sum(val.shape[dim] for val in vals[:i]) for i in range(len(vals))]
    first = next((val for val in parts if over(val, dim)), None)
    if first is None:
        return None
    axes, laid = over(first, dim), first.laid.summed()
    sources = [Source(val.shape[dim], start) for val, start in zip(parts, starts, strict=True)]
    plan = rounds(sources, shape_of(out)[dim], walk.grid.ways(axes))
    if plan is None:
        return None
    xs = [walk.get(val, _with(laid, dim, val.shape[dim], axes)) for val in parts]
    there = _with(laid, dim, shape_of(out)[dim], axes)
    fill = walk.whole(vals[1]) if eqn.primitive.name == "pad" else jnp.zeros((), xs[0].dtype)
    base = jnp.broadcast_to(fill, walk.grid.local(there))
    return [walk.held(moved(walk, plan, xs, dim, axes, base), out.aval, there)]


def _with(laid: Laid, dim: int, size: int, axes: tuple[str, ...]) -> Laid:
    return Laid((*laid.dims[:dim], (Piece(size, axes),), *laid.dims[dim + 1 :]))


HANDLERS = {"concatenate": joined, "pad": joined, "slice": cut, "split": cut}
"""How each of them is lowered."""
