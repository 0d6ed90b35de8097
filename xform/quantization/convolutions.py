"""Convolutions, quantized, with their derivative.

    y  = conv (Q x) (Q w)                               Q x: a scale for each row of the batch
    dx = transposed conv (Q (dy * scale of w)) (codes of w)         Q w: one for each feature that comes out
    dw = transposed conv (codes of x) (Q (dy * scale of x))

As `training` otherwise. The two backward convolutions are those that JAX makes of a float one, run on codes:
windows, dilations and groups of features are its affair. What is contracted has no dimension that could lie
in blocks, so there are none. Source of the scales: Qwix 0.1.8, `conv_general_qt`, with which results and
gradients agree bit for bit (where features are in one group, and numbers are not cut off).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.quantization.arrays import Quantized, whole
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
from xform.trace import Jaxpr, Literal, Value, Var, bind

CONVOLUTION = "conv_general_dilated"


@dataclasses.dataclass(frozen=True)
class Window:
    """How a convolution goes, as `lax.conv_general_dilated` has it."""

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    left_dilation: tuple[int, ...]
    right_dilation: tuple[int, ...]
    numbers: jax.lax.ConvDimensionNumbers
    feature_groups: int = 1

    def convolved(self, left: Value, right: Value, precision: Any = None, dtype: Any = None) -> Value:
        """`lax.conv_general_dilated` of numbers or codes; dtype: that of sums."""
        return jax.lax.conv_general_dilated(
            left,
            right,
            self.strides,
            self.padding,
            self.left_dilation,
            self.right_dilation,
            self.numbers,
            self.feature_groups,
            precision=precision,
            preferred_element_type=dtype,
        )

    @property
    def shared(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions of left and right along which numbers share a scale."""
        return _but(self.numbers.lhs_spec, 0), _but(self.numbers.rhs_spec, 0)


def window_of(params: Mapping[str, Any]) -> Window:
    """Of an equation's parameters."""
    return Window(
        tuple(params["window_strides"]),
        tuple((int(a), int(b)) for a, b in params["padding"]),
        tuple(params["lhs_dilation"]),
        tuple(params["rhs_dilation"]),
        params["dimension_numbers"],
        params["feature_group_count"],
    )


def quantized_conv(
    left: Operand, right: Operand, window: Window, how: Products, precision: Any = None, dtype: Any = None
) -> Value:
    """`lax.conv_general_dilated` of floats, quantized, or given as codes. dtype: of the result; by default
    theirs.

    Raises ValueError for blocks.
    """
    if any(side.block or (side.format and side.format.block) for side in _sides(how)):
        raise ValueError("what a convolution contracts has no blocks")
    shared = window.shared
    found = range_of(left, how.left, shared[0]), range_of(right, how.right, shared[1])
    return _conv(left, right, found, window, how, precision, dtype)


def _sides(how: Products) -> tuple[Any, ...]:
    return how.left, how.right, how.dlhs, how.drhs


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _conv(
    left: Operand, right: Operand, found: Ranges, window: Window, how: Products, precision: Any, dtype: Any
) -> Value:
    return _forward(left, right, found, window, how, precision, dtype)[0]


def _forward(
    left: Operand, right: Operand, found: Ranges, window: Window, how: Products, precision: Any, dtype: Any
) -> tuple[Value, Any]:
    a = operand(left, how.left, window.shared[0], found[0])
    b = operand(right, how.right, window.shared[1], found[1])
    values, scales, total, result = _taken_apart(a, b, dtype)
    lhs, rhs = values
    out = window.convolved(lhs, rhs, precision, total)
    rows, features = window.numbers.out_spec[:2]
    for scale, place in zip(scales, (rows, features), strict=True):
        out = _times(out, scale, place)
    return out.astype(result), (kept(left, a, how.left), kept(right, b, how.right), found)


def _backward(
    window: Window, how: Products, precision: Any, dtype: Any, saved: Any, dy: Value
) -> tuple[Any, ...]:
    left, right, found = saved
    own = taken(left), taken(right)
    numbers, grads = window.numbers, []
    rows, features = numbers.out_spec[:2]
    sides = ((how.dlhs, rows, numbers.lhs_spec[0]), (how.drhs, features, numbers.rhs_spec[0]))
    for k, (side, channel, there) in enumerate(sides):
        at, other = (features, rows)[k], own[1 - k]
        alone = tuple(d for d in range(dy.ndim) if d != channel)
        everything = tuple(range(dy.ndim))
        as_dy = functools.partial(_at, place=at, ndim=dy.ndim)
        made, other = gradient_operands(dy, other, side, (alone, everything), how.seed, as_dy)
        values, (scale, more), total, result = _taken_apart(made, other)
        shapes = [(x.codes if isinstance(x, Quantized) else x).shape for x in own]
        (out,) = _on_codes(_transposed(window, shapes, k, precision), values, total)
        grads.append(_times(_times(out, scale, there), more, there).astype(result))
    first = straight_through(grads[0], left, found[0], how.left)
    return first, straight_through(grads[1], right, found[1], how.right), (None, None)


_conv.defvjp(_forward, _backward)


def _taken_apart(
    left: Operand, right: Operand, dtype: Any = None
) -> tuple[list[Value], list[Value | None], Any, Any]:
    """What is convolved, in one dtype, and the scales of codes; in which dtype sums are, and the result."""
    total, result = dtypes(left, right, dtype)
    if not all(map(_is_codes, (left, right))):
        left, right = (whole(x) if isinstance(x, Quantized) else x for x in (left, right))
        total = dtype
    codes = [x.codes if isinstance(x, Quantized) else x for x in (left, right)]
    values = [x.astype(jnp.int8) if x.dtype in NARROW else x for x in codes]
    if values[0].dtype != values[1].dtype:  # of codes, bfloat16 holds each
        floats = [x.dtype if is_float(x.dtype) else jnp.dtype(jnp.bfloat16) for x in values]
        values = [x.astype(jnp.result_type(*floats)) for x in values]
    return values, [x.scale if isinstance(x, Quantized) else None for x in (left, right)], total, result


def _is_codes(x: Operand) -> bool:
    if not isinstance(x, Quantized):
        return not is_float(x.dtype)
    return not x.format.table and x.zero is None


def _times(x: Value, scale: Value | None, place: int) -> Value:
    return x if scale is None else x * _at(scale, place, x.ndim)


def _at(scale: Value, place: int, ndim: int) -> Value:
    """A scale, of one dimension at most, as dimension `place` of so many."""
    return scale.reshape([scale.size if d == place else 1 for d in range(ndim)])


def _but(spec: Sequence[int], k: int) -> tuple[int, ...]:
    return tuple(d for d in range(len(spec)) if d != spec[k])


def _transposed(window: Window, shapes: list[tuple[int, ...]], k: int, precision: Any) -> Jaxpr:
    """The program, of floats, from a convolution's gradient and its other operand to that of operand k."""
    own, other = (jax.ShapeDtypeStruct(shapes[j], jnp.float32) for j in (k, 1 - k))

    def convolved(x: Value, y: Value) -> Value:
        return window.convolved(*((x, y) if k == 0 else (y, x)), precision)

    def transposed(dy: Value, y: Value) -> Value:
        return jax.linear_transpose(lambda x: convolved(x, y), own)(dy)

    out = jax.eval_shape(convolved, own, other)
    jaxpr: Jaxpr = jax.make_jaxpr(transposed)(out, other)
    return jaxpr


def _on_codes(jaxpr: Jaxpr, args: list[Value], total: Any) -> list[Value]:
    """A program that moves numbers and convolves them, on numbers of another type; total: that of sums."""
    env: dict[Var, Value] = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Value:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        sums = {"preferred_element_type": total} if eqn.primitive.name == CONVOLUTION else {}
        outs = bind(eqn, [read(v) for v in eqn.invars], {**eqn.params, **sums})
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]
