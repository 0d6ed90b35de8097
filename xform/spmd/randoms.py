"""Random numbers, seen from one shard: each device makes the bits of its own part.

    random_bits[shape=(6, 8)] key   ->   threefry2x32 of the key and of the numbers of the elements held here

Where the bits of an element follow from its number (`threefry`) they are made where they are used, in
whatever layout is wanted, and are those of one device to the bit. Of other keys every device makes all bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from xform import threefry
from xform.spmd.forms import elementwise
from xform.spmd.layout import Dim, Grid, Laid, Piece, whole
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.threefry import Counts
from xform.trace import JaxprEqn, Value, at_source, shape_of


def random_bits(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """Bits [*keys, *shape] of threefry keys [*keys], made as they are wanted."""
    (keys,), (out,) = vals, eqn.outvars
    if not threefry.draws_by_number(keys.aval):
        if shape_of(out):
            walk.tell(eqn, "its bits depend on the whole shape: every device makes all of them")
        return walk.undivided(eqn, vals)
    aval: Any = eqn.outvars[0].aval
    prefix, rank, dtype = walk.prefix, len(keys.shape), aval.dtype

    def make(want: Laid) -> Value:
        with at_source(eqn, prefix):
            own = walk.get(keys, Laid(want.dims[:rank]))
            return threefry.bits(own, numbers(walk.grid, want.dims[rank:]), dtype)

    laid = Laid((*keys.laid.dims, *whole(shape_of(out)[rank:]).dims))
    return [Val(out.aval, laid, walk.scope, make)]


def numbers(grid: Grid, dims: Sequence[Dim]) -> Counts:
    """The numbers in the whole array of the elements that a device holds, of the shape there."""
    pieces = [piece for dim in dims for piece in dim]
    places = [_places(grid, piece) for piece in pieces]
    shape = grid.local(Laid(tuple(dims)))
    high, low = threefry.numbers(places, [piece.size for piece in pieces])
    return high.reshape(shape), low.reshape(shape)


def _places(grid: Grid, piece: Piece) -> Value:
    """Which of a piece's entries a device holds."""
    size = piece.size // grid.ways(piece.axes)
    places = lax.iota(np.uint32, size)
    if piece.axes:
        places = places + lax.axis_index(piece.axes).astype(np.uint32) * np.uint32(size)
    return places


def words(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """Both words of keys and numbers, all [*shape]; made together as they are wanted, if those are."""
    form = elementwise(eqn)
    if any(v.make is None for v in vals):
        return walk.lower(eqn, form, vals, walk.current_wishes)
    prefix, made = walk.prefix, list[Val]()

    def maker(number: int) -> Callable[[Laid], Value]:
        def make(want: Laid) -> Value:
            assigned = walk.choice.combined(form, [], [(number, want)])
            with at_source(eqn, prefix):
                found = [walk.get(val, want) for val in walk.bound(eqn, form, vals, assigned)]
            walk.scope.forms.setdefault(made[1 - number], {})[want] = (found[1 - number], walk.phase)
            return found[number]

        return make

    chosen = walk.choice.combined(form, [(n, v.laid.summed()) for n, v in enumerate(vals)], [])
    laid = walk.choice.laid(form.results[0], chosen)
    made += [Val(v.aval, laid, walk.scope, maker(number)) for number, v in enumerate(eqn.outvars)]
    return made


def each(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """A key of every seed, a clone of every key."""
    return walk.lower(eqn, elementwise(eqn), vals, walk.current_wishes)


HANDLERS = {
    "random_bits": random_bits,
    "threefry2x32": words,
    **dict.fromkeys(("random_clone", "random_seed"), each),
}
"""How operations of random numbers are lowered; what isn't here takes whole keys."""
