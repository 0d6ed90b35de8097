"""Arrays of codes moved as the arrays of floats are that they stand for: codes and scales alike.

    q [8,6] with scale [1,6]    transpose      ->  [6,8] with [6,1]
    q [8,6] with scale [8,1]    reshape 2,4,6  ->  [2,4,6] with [2,4,1]
    q [8,6] with scale [4,6]    slice 3:7      ->  [4,6] with [4,6]: blocks that are cut share no longer

Numbers share a scale afterwards that shared one before, where a dimension of scales can say so; else the
scale is repeated. `MOVES` has a function for each primitive, which gives None where codes cannot be moved
so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.quantization.arrays import Quantized, mapped
from xform.trace import JaxprEqn, Value, bind

Operand = Value | Quantized
Move = Callable[[JaxprEqn, list[Operand]], Quantized | list[Quantized] | None]


def with_scales(q: Quantized, codes: Value, f: Callable[[Value], Value]) -> Quantized:
    """Other codes, and this done to scales and codes of zero."""
    return dataclasses.replace(q, codes=codes, scale=f(q.scale), zero=None if q.zero is None else f(q.zero))


def repeated(q: Quantized, dimensions: Sequence[int]) -> Quantized:
    """A scale for each place along these dimensions."""
    shape = list(q.scale.shape)
    for d in dimensions:
        shape[d] = q.codes.shape[d]

    def spread(x: Value) -> Value:
        for d in dimensions:
            if x.shape[d] == 1:
                continue
            if x.shape[d] != shape[d]:
                x = jnp.repeat(x, shape[d] // x.shape[d], axis=d)
        return jnp.broadcast_to(x, [shape[d] if d in dimensions else n for d, n in enumerate(x.shape)])

    return q if shape == list(q.scale.shape) else with_scales(q, q.codes, spread)


def _cast(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize == 1:
        return None
    q = _only(ins)
    return dataclasses.replace(q, scale=q.scale.astype(dtype))


def _same(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    return _only(ins)


def _constrained(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    q = _only(ins)
    return dataclasses.replace(q, codes=bind(eqn, [q.codes], eqn.params)[0])


def _negated(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    q = _only(ins)
    return dataclasses.replace(q, scale=-q.scale)


def _transposed(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    return mapped(_only(ins), lambda x: jax.lax.transpose(x, eqn.params["permutation"]))


def _squeezed(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    return mapped(_only(ins), lambda x: jax.lax.squeeze(x, eqn.params["dimensions"]))


def _broadcast(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    q, shape, places = _only(ins), eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def spread(x: Value, like: Sequence[int]) -> Value:
        return jax.lax.broadcast_in_dim(x, like, places)

    few = [1] * len(shape)
    for d, n in zip(places, q.scale.shape, strict=True):
        few[d] = n
    return with_scales(q, spread(q.codes, shape), lambda x: spread(x, few))


def _reshaped(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    q, new = _only(ins), eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or not math.prod(new):
        return None
    pieces = _pieces(q.codes.shape, q.scale.shape, new)
    if pieces is None and q.blocks():  # cut elsewhere
        q = repeated(q, list(q.blocks()))
        pieces = _pieces(q.codes.shape, q.scale.shape, new)
    if pieces is None:
        return None
    few: list[int] = []  # the scale's shape, cut as far as both shapes are
    full: list[int] = []
    made: list[int] = []  # and as the new shape has it
    for dimension in pieces:
        last = max((i for i, (_, apart) in enumerate(dimension) if apart), default=-1)
        few += [n if apart else 1 for n, apart in dimension]
        full += [n if i <= last else 1 for i, (n, _) in enumerate(dimension)]
        made.append(math.prod(n for n, _ in dimension[: last + 1]))
    return with_scales(
        q, q.codes.reshape(new), lambda x: jnp.broadcast_to(x.reshape(few), full).reshape(made)
    )


Piece = tuple[int, bool]
"""A part of a dimension, and whether there is a scale for each place along it."""


def _pieces(old: Sequence[int], scale: Sequence[int], new: Sequence[int]) -> list[list[Piece]] | None:
    """What each new dimension consists of; None where old ones are not cut so, as [4,6] -> [6,4]."""
    left: list[Piece] = []
    for n, s in zip(old, scale, strict=True):
        left += [(s, True), (n // s, False)]
    left = [piece for piece in reversed(left) if piece[0] != 1]
    found: list[list[Piece]] = []
    for n in new:
        dimension: list[Piece] = []
        while n > 1:
            if not left:
                return None
            size, apart = left.pop()
            if n % size == 0:
                dimension.append((size, apart))
                n //= size
            elif size % n == 0:
                dimension.append((n, apart))
                left.append((size // n, apart))
                n = 1
            else:
                return None
        found.append(dimension)
    return found


def _sliced(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    q, p = _only(ins), eqn.params
    starts, limits = p["start_indices"], p["limit_indices"]
    strides = p["strides"] or (1,) * len(starts)
    cut = [d for d, (a, b) in enumerate(zip(starts, limits, strict=True)) if (a, b) != (0, q.codes.shape[d])]
    q = repeated(q, [d for d in cut if q.scale.shape[d] != 1])

    def along(x: Value) -> Value:
        own = [d in cut and x.shape[d] != 1 for d in range(x.ndim)]
        return jax.lax.slice(
            x,
            [a if on else 0 for a, on in zip(starts, own, strict=True)],
            [b if on else n for b, n, on in zip(limits, x.shape, own, strict=True)],
            [s if on else 1 for s, on in zip(strides, own, strict=True)],
        )

    codes = jax.lax.slice(q.codes, starts, limits, strides)
    if any(s != 1 for s in strides):
        q = repeated(q, [d for d, s in enumerate(strides) if s != 1 and q.scale.shape[d] != 1])
        cut = sorted({*cut, *(d for d, s in enumerate(strides) if s != 1)})
    return with_scales(q, codes, along)


def _sliced_at(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    q, starts = ins[0], [x for x in ins[1:] if not isinstance(x, Quantized)]
    sizes = eqn.params["slice_sizes"]
    if not isinstance(q, Quantized):
        return None
    cut = [d for d, n in enumerate(sizes) if n != q.codes.shape[d]]
    q = repeated(q, [d for d in cut if q.scale.shape[d] != 1])

    def along(x: Value) -> Value:
        own = [d in cut and x.shape[d] != 1 for d in range(x.ndim)]
        return jax.lax.dynamic_slice(
            x,
            [a if on else jnp.zeros_like(a) for a, on in zip(starts, own, strict=True)],
            [n if on else x.shape[d] for d, (n, on) in enumerate(zip(sizes, own, strict=True))],
        )

    return with_scales(q, jax.lax.dynamic_slice(q.codes, starts, sizes), along)


def _looked_up(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    q, indices = ins
    if not isinstance(q, Quantized) or isinstance(indices, Quantized):
        return None
    sizes = eqn.params["slice_sizes"]
    q = repeated(q, [d for d, n in enumerate(sizes) if n != q.codes.shape[d]])

    def along(x: Value) -> Value:
        few = tuple(min(n, m) for n, m in zip(sizes, x.shape, strict=True))
        # What lies outside is NaN, as the scale says; codes have none.
        fill = eqn.params["fill_value"] if x is q.scale or eqn.params["fill_value"] is None else 0
        return bind(eqn, [x, indices], {**eqn.params, "slice_sizes": few, "fill_value": fill})[0]

    return mapped(q, along)


def _concatenated(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    along = eqn.params["dimension"]
    return _joined(ins, lambda xs: jax.lax.concatenate(xs, along), along)


def _stacked(eqn: JaxprEqn, ins: list[Operand]) -> Quantized | None:
    return _joined(ins, lambda xs: jnp.stack(xs, eqn.params["axis"]))


def _joined(
    ins: list[Operand], join: Callable[[list[Value]], Value], along: int | None = None
) -> Quantized | None:
    """Codes of one format as one array, joined along a dimension, or a new one."""
    parts = [q for q in ins if isinstance(q, Quantized)]
    if len(parts) != len(ins) or len({(q.format, q.zero is None) for q in parts}) > 1:
        return None
    apart = [
        d for d in range(parts[0].codes.ndim) if d == along or len({q.scale.shape[d] for q in parts}) > 1
    ]
    parts = [repeated(q, apart) for q in parts]
    zeros = [q.zero for q in parts if q.zero is not None]
    codes, scale = join([q.codes for q in parts]), join([q.scale for q in parts])
    return dataclasses.replace(parts[0], codes=codes, scale=scale, zero=join(zeros) if zeros else None)


def _split(eqn: JaxprEqn, ins: list[Operand]) -> list[Quantized]:
    axis, q = eqn.params["axis"], _only(ins)
    shared = q.scale.shape[axis] == 1
    q = q if shared else repeated(q, [axis])
    ends = [int(n) for n in np.cumsum(eqn.params["sizes"])]
    firsts = [0, *ends[:-1]]

    def part(x: Value, first: int, end: int) -> Value:
        return jax.lax.slice_in_dim(x, first, end, axis=axis) if x.shape[axis] != 1 or not shared else x

    return [
        mapped(q, functools.partial(part, first=first, end=end))
        for first, end in zip(firsts, ends, strict=True)
    ]


def _unstacked(eqn: JaxprEqn, ins: list[Operand]) -> list[Quantized]:
    axis = eqn.params["axis"]
    q = repeated(_only(ins), [axis])

    def part(x: Value, k: int) -> Value:
        return jax.lax.index_in_dim(x, k, axis, keepdims=False)

    return [mapped(q, functools.partial(part, k=k)) for k in range(q.codes.shape[axis])]


def _reversed(eqn: JaxprEqn, ins: list[Operand]) -> Quantized:
    return mapped(_only(ins), lambda x: jax.lax.rev(x, eqn.params["dimensions"]))


def _only(ins: list[Operand]) -> Quantized:
    (q,) = ins
    assert isinstance(q, Quantized)
    return q


MOVES: dict[str, Move] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "convert_element_type": _cast,
    "copy": _same,
    "copy_p": _same,
    "dynamic_slice": _sliced_at,
    "gather": _looked_up,
    "name": _same,
    "neg": _negated,
    "reshape": _reshaped,
    "sharding_constraint": _constrained,
    "rev": _reversed,
    "slice": _sliced,
    "split": _split,
    "squeeze": _squeezed,
    "stack": _stacked,
    "transpose": _transposed,
    "unstack": _unstacked,
}
"""What moves an array without a change of its numbers, by primitive."""


def moved(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Quantized] | None:
    """The results of an equation that moves codes; None where it does more, or codes cannot be moved so."""
    move = MOVES.get(eqn.primitive.name)
    out = None if move is None else move(eqn, list(ins))
    return [out] if isinstance(out, Quantized) else out
