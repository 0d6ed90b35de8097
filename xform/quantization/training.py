"""A product with its derivative, each of the three products quantized in its own way.

    y    = product(Q x, Q w)                      forward
    dx   = product(Q (dy * scale of w), codes of w)    `dlhs`
    dw   = product(Q (dy * scale of x), codes of x)    `drhs`

The derivative is that of the float product: rounding counts as the identity (the straight-through estimator);
where a calibration cuts numbers off, their gradient is zero. The backward products take the codes that the
forward one made: they are what is saved, under the name "quantization". Their scales lie along what these
products contract, so that the gradient takes them on before it is quantized itself. Source: Qwix 0.1.8,
`dot_general_qt`, with which results and gradients agree bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from xform.quantization.arrays import Quantized, along, arranged, quantized, whole
from xform.quantization.formats import Format
from xform.quantization.products import Dims, Operand, is_float, product
from xform.quantization.scales import ABSMAX, Calibration, How, Range, measured
from xform.trace import Value

NAME = "quantization"
"""What codes and scales that the backward pass reads are called: `Remat` saves or offloads them by it."""


@dataclasses.dataclass(frozen=True)
class Side:
    """How one operand of a product is quantized. format: None: not at all. channels: a scale for each place
    along dimensions that are not contracted; else one for the whole array. block: along the last dimension
    that is contracted, a scale for so many numbers. round: "stochastic" for gradients. anew: of a gradient:
    the other operand is quantized alike where the forward pass has no codes that can be taken; else its
    floats are. mark: what a range that is kept is called; it is one for the whole array, whatever channels.
    """

    format: Format | None = None
    calibration: Calibration = ABSMAX
    channels: bool = True
    block: int = 0
    round: str = "nearest"
    anew: bool = False
    mark: str = ""

    def how(self, ndim: int, contracted: Sequence[int]) -> How:
        """contracted: the dimensions along which numbers share a scale; blocks are of the last one."""
        assert self.format is not None
        size = self.block or self.format.block
        blocks = ((contracted[-1], size),) if size and contracted else ()
        free = [d for d in range(ndim) if d not in contracted and d not in dict(blocks)]
        apart = self.channels and not self.calibration.is_kept
        return How(self.format, tuple(free) if apart else (), blocks, self.calibration, self.round, self.mark)


@dataclasses.dataclass(frozen=True)
class Products:
    """How a product is quantized, forward (left, right) and backward: the gradient that comes in, for the
    left operand's (dlhs) and the right one's (drhs). seed: of stochastic rounding.
    """

    left: Side = Side()
    right: Side = Side()
    dlhs: Side = Side()
    drhs: Side = Side()
    seed: int = 0


def quantized_dot(
    left: Operand, right: Operand, dims: Dims, how: Products, precision: Any = None, dtype: Any = None
) -> Value:
    """`lax.dot_general` of floats, quantized, or given as codes. dtype: of the result; by default theirs."""
    dims = _hashable(dims)
    found = tuple(
        range_of(x, side, contracted)
        for x, side, contracted in zip((left, right), (how.left, how.right), dims[0], strict=True)
    )
    return _dot(left, right, found, dims, how, precision, dtype)


def _hashable(dims: Dims) -> Any:
    return tuple(tuple(tuple(int(d) for d in each) for each in pair) for pair in dims)


def range_of(x: Operand, side: Side, contracted: Sequence[int]) -> Range | None:
    """The range of an operand; None where it is not quantized, or is already."""
    if isinstance(x, Quantized) or not side.format or not is_float(x.dtype):
        return None
    return measured(x, side.how(x.ndim, contracted))


Ranges = tuple[Range | None, Range | None]
"""Of both operands."""


def operand(x: Operand, side: Side, contracted: Sequence[int], found: Range | None) -> Operand:
    """An operand as its product takes it: codes and scales, under their name, where it has a range."""
    if found is None or isinstance(x, Quantized):
        return x
    made = quantized(x, side.how(x.ndim, contracted), found)
    return jax.tree.map(lambda v: checkpoint_name(v, NAME), made)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _dot(
    left: Operand, right: Operand, found: Ranges, dims: Dims, how: Products, precision: Any, dtype: Any
) -> Value:
    return _forward(left, right, found, dims, how, precision, dtype)[0]


def _forward(
    left: Operand, right: Operand, found: Ranges, dims: Dims, how: Products, precision: Any, dtype: Any
) -> tuple[Value, Any]:
    a = operand(left, how.left, dims[0][0], found[0])
    b = operand(right, how.right, dims[0][1], found[1])
    out = product(a, b, dims, precision, dtype)
    return out, (kept(left, a, how.left), kept(right, b, how.right), found)


Kept = tuple[Value | None, Operand | None]


def kept(x: Operand, made: Operand, side: Side) -> Kept:
    """What of an operand the backward pass takes: the floats, the codes, or both. Given codes are all there
    is.
    """
    if isinstance(x, Quantized):
        return None, x
    codes = isinstance(made, Quantized) and not made.blocks() and made.zero is None
    floats = not codes or not side.calibration.covers_all
    return (x if floats else None), (made if codes else None)


def _backward(
    dims: Dims, how: Products, precision: Any, dtype: Any, saved: Any, dy: Value
) -> tuple[Any, ...]:
    left, right, found = saved
    own = [taken(left), taken(right)]
    ndims = [(x.codes if isinstance(x, Quantized) else x).ndim for x in own]
    grads = []
    for k, side in ((0, how.dlhs), (1, how.drhs)):
        numbers, order = _backward_dims(dims, ndims, k)
        grads.append(jax.lax.transpose(_gradient(dy, own[1 - k], numbers, side, how.seed, precision), order))
    first = straight_through(grads[0], left, found[0], how.left)
    return first, straight_through(grads[1], right, found[1], how.right), (None, None)


def taken(saved: Kept) -> Operand:
    """The operand that a backward product takes: the codes, where there are some, and none in blocks."""
    floats, codes = saved
    if isinstance(codes, Quantized) and (codes.blocks() or codes.zero is not None):
        return whole(codes)
    return floats if codes is None else codes


def straight_through(gradient: Value, saved: Kept, found: Range | None, side: Side) -> Value | None:
    """The gradient of what was quantized, in its dtype: none where a calibration cut numbers off, and none of
    given codes.
    """
    if found is None and isinstance(saved[1], Quantized):
        return None
    own = taken(saved)
    if found is not None and not side.calibration.covers_all:
        assert saved[0] is not None
        gradient = _within(gradient, saved[0], found)
    return gradient.astype(own.scale.dtype if isinstance(own, Quantized) else own.dtype)


def _gradient(dy: Value, other: Operand, dims: Dims, side: Side, seed: int, precision: Any) -> Value:
    made, other = gradient_operands(
        dy, other, side, dims[0], seed, lambda scale: _as_left(scale, dims, dy.ndim)
    )
    return product(made, other, dims, precision)


def gradient_operands(
    dy: Value,
    other: Operand,
    side: Side,
    contracted: tuple[Sequence[int], Sequence[int]],
    seed: int,
    as_dy: Callable[[Value], Value],
) -> tuple[Operand, Operand]:
    """The gradient that comes in and the other operand, as a backward product takes them. contracted: where
    numbers of each share a scale. as_dy: the other's scale, in the dimensions of the gradient.

    The gradient takes the other's scale on. Of a range that is kept that is no part, where it is one number:
    else what is kept would lag behind it too.
    """
    if side.format is None or not is_float(dy.dtype):
        return dy, other
    if isinstance(other, Quantized) and other.format.table:
        other = whole(other)
    how, found = side.how(dy.ndim, contracted[0]), None
    if isinstance(other, Quantized):
        scale = as_dy(other.scale)
        if side.calibration.is_kept and scale.size == 1:
            found = {"absmax": measured(dy, how)["absmax"] * scale}
        dy = along(jnp.multiply, dy, scale)
        other = other.codes
    made = quantized(dy, how, found, seed)
    if side.anew and is_float(other.dtype):
        method = ABSMAX if side.calibration.is_kept else side.calibration
        plain = dataclasses.replace(side, round="nearest", calibration=method, mark="")
        other = quantized(other, plain.how(other.ndim, contracted[1]))
    return made, other


def _as_left(scale: Value, dims: Dims, ndim: int) -> Value:
    """The scale of the right operand, in the dimensions of the left one."""
    (contract_l, contract_r), (batch_l, batch_r) = dims
    there = dict(zip((*contract_l, *batch_l), (*contract_r, *batch_r), strict=True))
    return arranged(scale, [there.get(d) for d in range(ndim)])


def _backward_dims(dims: Dims, ndims: Sequence[int], k: int) -> tuple[Dims, tuple[int, ...]]:
    """The product of the gradient and the other operand that gives operand k's, and how to transpose it."""
    contract, batch = dims
    own, other = contract[k], contract[1 - k]
    free = [
        tuple(d for d in range(ndims[j]) if d not in contract[j] and d not in batch[j]) for j in (k, 1 - k)
    ]
    start = len(batch[k])
    first, second = (len(free[0]), len(free[1])) if k == 0 else (len(free[1]), len(free[0]))
    left, right = range(start, start + first), range(start + first, start + first + second)
    summed = tuple(right if k == 0 else left)
    numbers: Dims = ((summed, free[1]), (tuple(range(start)), batch[1 - k]))
    by_other = tuple(own[i] for i in np.argsort(other))
    order = np.argsort((*batch[k], *free[0], *by_other))
    return numbers, tuple(int(i) for i in order)


def _within(gradient: Value, x: Value, found: Range) -> Value:
    """The gradient where numbers were in range."""
    low, high = (-found["absmax"], found["absmax"]) if "absmax" in found else (found["min"], found["max"])
    inside = along(jnp.greater_equal, x, low) & along(jnp.less_equal, x, high)
    return jnp.where(inside, gradient, 0.0)


_dot.defvjp(_forward, _backward)
