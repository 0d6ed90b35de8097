"""Products of sorted rows with the weights of their groups (experts), quantized, with their derivative.

    y[m,n]    = ragged_dot (Q x) (Q w) sizes                    Q w: a scale for each column, of all experts
    dx[m,k]   = ragged_dot (Q (dy * scale of w)) (codes of w) sizes
    dw[g,k,n] = ragged_dot (codes of x) (Q (dy * scale of x)) sizes    the rows of each group contracted

As `training` otherwise. Experts share the scales of their columns, so that the gradient takes a row of scales
on, whichever expert a row went to. Codes are multiplied where both operands have them, and no blocks; arrays
in blocks are made whole first. Source: Qwix 0.1.8, `ragged_dot_qt`, with which results and gradients agree
bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xform.quantization.arrays import Quantized, arranged, whole
from xform.quantization.products import NARROW, Operand, dtypes, is_float
from xform.quantization.training import (
    Products,
    Ranges,
    gradient_operands,
    kept,
    operand,
    range_of,
    straight_through,
    taken,
)
from xform.trace import Value

RAGGED = "ragged_dot_general"

Numbers = jax.lax.RaggedDotDimensionNumbers


class Form(NamedTuple):
    """numbers: as `lax.ragged_dot_general` has them. shared: the dimensions of left and right along which
    numbers share a scale. places: for each dimension of the result that of the left scale, of the right one.
    """

    numbers: Numbers
    shared: tuple[tuple[int, ...], tuple[int, ...]]
    places: tuple[tuple[int | None, ...], tuple[int | None, ...]]


FORWARD = Form(Numbers((((1,), (1,)), ((), ())), (0,), (0,)), ((1,), (0, 1)), ((0, None), (None, 2)))
"""[m,k] [g,k,n] -> [m,n]"""
DLHS = Form(Numbers((((1,), (2,)), ((), ())), (0,), (0,)), ((1,), (0, 2)), ((0, None), (None, 1)))
"""[m,n] [g,k,n] -> [m,k]"""
DRHS = Form(Numbers((((0,), (0,)), ((), ())), (0,), ()), ((0,), (0,)), ((None, 1, None), (None, None, 1)))
"""[m,k] [m,n] -> [g,k,n]"""


def is_forward(numbers: Numbers) -> bool:
    """Whether these are the numbers of `lax.ragged_dot`: [m,k] [g,k,n] -> [m,n]."""
    (contracted, batch), own = numbers.dot_dimension_numbers, FORWARD.numbers
    found = (tuple(map(tuple, contracted)), tuple(map(tuple, batch)))
    groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    return found == own.dot_dimension_numbers and groups == (
        own.lhs_ragged_dimensions,
        own.rhs_group_dimensions,
    )


def quantized_ragged_dot(
    left: Operand, right: Operand, sizes: Value, how: Products, precision: Any = None, dtype: Any = None
) -> Value:
    """`lax.ragged_dot` of floats, [m,k] [g,k,n] [g] -> [m,n], quantized, or given as codes.
    dtype: of the result; by default theirs.
    """
    found = range_of(left, how.left, FORWARD.shared[0]), range_of(right, how.right, FORWARD.shared[1])
    return _ragged(left, right, sizes, found, how, precision, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _ragged(
    left: Operand, right: Operand, sizes: Value, found: Ranges, how: Products, precision: Any, dtype: Any
) -> Value:
    return _forward(left, right, sizes, found, how, precision, dtype)[0]


def _forward(
    left: Operand, right: Operand, sizes: Value, found: Ranges, how: Products, precision: Any, dtype: Any
) -> tuple[Value, Any]:
    a = operand(left, how.left, FORWARD.shared[0], found[0])
    b = operand(right, how.right, FORWARD.shared[1], found[1])
    out = _product(a, b, sizes, FORWARD, precision, dtype)
    return out, (kept(left, a, how.left), kept(right, b, how.right), sizes, found)


def _backward(how: Products, precision: Any, dtype: Any, saved: Any, dy: Value) -> tuple[Any, ...]:
    left, right, sizes, found = saved
    made, w = gradient_operands(
        dy, taken(right), how.dlhs, DLHS.shared, how.seed, lambda s: arranged(s, FORWARD.places[1])
    )
    dx = _product(made, w, sizes, DLHS, precision)
    made, x = gradient_operands(
        dy, taken(left), how.drhs, DRHS.shared[::-1], how.seed, lambda s: arranged(s, FORWARD.places[0])
    )
    dw = _product(x, made, sizes, DRHS, precision)
    dx = straight_through(dx, left, found[0], how.left)
    return dx, straight_through(dw, right, found[1], how.right), None, (None, None)


_ragged.defvjp(_forward, _backward)


def _product(
    left: Operand, right: Operand, sizes: Value, form: Form, precision: Any, dtype: Any = None
) -> Value:
    total, result = dtypes(left, right, dtype)
    if not all(map(_is_codes, (left, right))):
        left, right = (whole(x) if isinstance(x, Quantized) else x for x in (left, right))
        total = dtype
    values = [x.codes if isinstance(x, Quantized) else x for x in (left, right)]
    a, b = (x.astype(jnp.int8) if x.dtype in NARROW else x for x in values)
    out = jax.lax.ragged_dot_general(
        a, b, sizes, form.numbers, precision=precision, preferred_element_type=total
    )
    for x, places in zip((left, right), form.places, strict=True):
        if isinstance(x, Quantized):
            out = out * arranged(x.scale, places)
    return out.astype(result)


def _is_codes(x: Operand) -> bool:
    if not isinstance(x, Quantized):
        return not is_float(x.dtype)
    return not x.format.table and x.zero is None and not x.blocks()
