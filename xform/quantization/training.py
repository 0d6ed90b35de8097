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
from collections.abc import Sequence
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
    floats are.
    """

    format: Format | None = None
    calibration: Calibration = ABSMAX
    channels: bool = True
    block: int = 0
    round: str = "nearest"
    anew: bool = False

    def how(self, ndim: int, contracted: Sequence[int]) -> How:
        assert self.format is not None
        size = self.block or self.format.block
        blocks = ((contracted[-1], size),) if size and contracted else ()
        free = [d for d in range(ndim) if d not in contracted and d not in dict(blocks)]
        return How(self.format, tuple(free) if self.channels else (), blocks, self.calibration, self.round)


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
    left: Value, right: Value, dims: Dims, how: Products, precision: Any = None, dtype: Any = None
) -> Value:
    """`lax.dot_general` of floats, quantized. dtype: of the result; by default theirs."""
    dims = _hashable(dims)
    found = tuple(
        measured(x, side.how(x.ndim, contracted)) if _quantizes(side, x) else None
        for x, side, contracted in zip((left, right), (how.left, how.right), dims[0], strict=True)
    )
    return _dot(left, right, found, dims, how, precision, dtype)


def _hashable(dims: Dims) -> Any:
    return tuple(tuple(tuple(int(d) for d in each) for each in pair) for pair in dims)


def _quantizes(side: Side, x: Value) -> bool:
    return side.format is not None and is_float(x.dtype)


Ranges = tuple[Range | None, Range | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _dot(
    left: Value, right: Value, found: Ranges, dims: Dims, how: Products, precision: Any, dtype: Any
) -> Value:
    return _forward(left, right, found, dims, how, precision, dtype)[0]


def _forward(
    left: Value, right: Value, found: Ranges, dims: Dims, how: Products, precision: Any, dtype: Any
) -> tuple[Value, Any]:
    operands: list[Operand] = []
    for x, side, own, contracted in zip((left, right), (how.left, how.right), found, dims[0], strict=True):
        if own is None or side.format is None:
            operands.append(x)
        else:
            made = quantized(x, side.how(x.ndim, contracted), own)
            operands.append(jax.tree.map(lambda v: checkpoint_name(v, NAME), made))
    out = product(operands[0], operands[1], dims, precision, dtype)
    kept = tuple(_kept(*each) for each in zip((left, right), operands, (how.left, how.right), strict=True))
    return out, (*kept, found)


def _kept(x: Value, made: Operand, side: Side) -> tuple[Value | None, Operand | None]:
    """What of an operand the backward pass takes: the floats, the codes, or both."""
    codes = isinstance(made, Quantized) and not made.blocks() and made.zero is None
    floats = not codes or not side.calibration.covers_all
    return (x if floats else None), (made if codes else None)


def _backward(dims: Dims, how: Products, precision: Any, dtype: Any, kept: Any, dy: Value) -> tuple[Any, ...]:
    (left, left_codes), (right, right_codes), found = kept
    own = [left if left_codes is None else left_codes, right if right_codes is None else right_codes]
    ndims = [(x.codes if isinstance(x, Quantized) else x).ndim for x in own]
    grads = []
    for k, side in ((0, how.dlhs), (1, how.drhs)):
        numbers, order = _backward_dims(dims, ndims, k)
        grads.append(jax.lax.transpose(_gradient(dy, own[1 - k], numbers, side, how.seed, precision), order))
    for k, (x, side) in enumerate(((left, how.left), (right, how.right))):
        if found[k] is not None and not side.calibration.covers_all:
            grads[k] = _within(grads[k], x, found[k])
    types = [x.scale.dtype if isinstance(x, Quantized) else x.dtype for x in own]
    return grads[0].astype(types[0]), grads[1].astype(types[1]), (None, None)


def _gradient(dy: Value, other: Operand, dims: Dims, side: Side, seed: int, precision: Any) -> Value:
    made: Operand = dy
    if side.format is not None and is_float(dy.dtype):
        if isinstance(other, Quantized) and other.format.table:
            other = whole(other)
        if isinstance(other, Quantized):
            dy = along(jnp.multiply, dy, _as_left(other.scale, dims, dy.ndim))
            other = other.codes
        made = quantized(dy, side.how(dy.ndim, dims[0][0]), seed=seed)
        if side.anew and not isinstance(other, Quantized) and is_float(other.dtype):
            plain = dataclasses.replace(side, round="nearest")
            other = quantized(other, plain.how(other.ndim, dims[0][1]))
    return product(made, other, dims, precision)


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
