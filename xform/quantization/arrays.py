"""An array as codes and scales.

q = quantized(x, how)         q.codes int8 [t, d], q.scale [t, 1]
whole(q)                      codes * scale, as float again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from xform.quantization.formats import Format
from xform.quantization.scales import How, Range, measured, noise_for, scale_of
from xform.trace import Value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Quantized:
    """An array as codes, a pytree of its arrays: the number at a place is (code - zero) * scale.

    codes: of the array's shape. scale: as many dimensions; of a size that divides the codes'; in the array's
    dtype. zero: the code of zero, of the scale's shape; None: 0.
    """

    codes: Value
    scale: Value
    format: Format = dataclasses.field(metadata={"static": True})
    zero: Value | None = None

    def __repr__(self) -> str:
        shapes = [list(getattr(x, "shape", ())) for x in (self.codes, self.scale)]
        return (
            f"Quantized({self.format.name}{shapes[0]}, scale {getattr(self.scale, 'dtype', '')}{shapes[1]})"
        )

    def blocks(self) -> dict[int, int]:
        """The dimensions with several scales for several numbers each, and for how many."""
        pairs = enumerate(zip(self.codes.shape, self.scale.shape, strict=True))
        return {d: n // s for d, (n, s) in pairs if s != n and s != 1}


def quantized(x: Value, how: How, found: Range | None = None, seed: int = 0) -> Quantized:
    """An array of floats as codes. found: the range, where it is known already."""
    scale, zero = scale_of(measured(x, how) if found is None else found, how.format)
    scale = scale.astype(x.dtype)
    shifted = along(jnp.divide, x, scale)
    if zero is not None:
        shifted = along(jnp.add, shifted, zero.astype(shifted.dtype))
    noise = noise_for(x, seed) if how.round == "stochastic" and how.format.is_integer else None
    return Quantized(how.format.encode(shifted, noise), scale, how.format, zero)


def whole(q: Quantized) -> Value:
    """The array of floats, in the scale's dtype."""
    x = q.format.decode(q.codes, q.scale.dtype)
    if q.zero is not None:
        x = along(jnp.subtract, x, q.zero.astype(x.dtype))
    return along(jnp.multiply, x, q.scale)


def mapped(q: Quantized, f: Callable[[Value], Value]) -> Quantized:
    """The same done to codes, scales and codes of zero."""
    return dataclasses.replace(
        q, codes=f(q.codes), scale=f(q.scale), zero=None if q.zero is None else f(q.zero)
    )


def along(op: Callable[[Value, Value], Value], x: Value, y: Value) -> Value:
    """`op` of two arrays of as many dimensions, whose sizes divide one another: blocks share a number."""
    if all(a == b or a == 1 or b == 1 for a, b in zip(x.shape, y.shape, strict=True)):
        return op(x, y)
    left: list[int] = []
    right: list[int] = []
    out: list[int] = []
    for a, b in zip(x.shape, y.shape, strict=True):
        out.append(max(a, b))
        few = min(a, b)
        if a == b or few == 1:
            left.append(a)
            right.append(b)
        else:
            left += [few, a // few]
            right += [few, b // few]
    return op(x.reshape(left), y.reshape(right)).reshape(out)


def split(x: Value, blocks: dict[int, int]) -> Value:
    """Each of these dimensions in two: the blocks, and what is in one."""
    shape: list[int] = []
    for d, n in enumerate(x.shape):
        shape += [n // blocks[d], blocks[d]] if d in blocks else [n]
    return x.reshape(shape)


def arranged(x: Value, places: Sequence[int | None]) -> Value:
    """The dimensions in another order, new ones of size 1 where None, those of size 1 left out at will."""
    kept = [d for d in places if d is not None and x.shape[d] != 1]
    sizes = [1 if d is None else x.shape[d] for d in places]
    if kept != sorted(kept):
        order = [*kept, *(d for d in range(x.ndim) if d not in kept)]
        x = x.transpose(order)
    return x.reshape(sizes)
