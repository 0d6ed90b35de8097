"""What takes the place of a product, by primitive: `MAKERS`. Its operands may be codes already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform.errors import Decline
from xform.quantization.convolutions import CONVOLUTION, quantized_conv, window_of
from xform.quantization.products import Operand
from xform.quantization.ragged import is_forward, quantized_ragged_dot
from xform.quantization.training import Products, quantized_dot
from xform.trace import JaxprEqn, Value, shape_of

Contracted = list[tuple[int, int | None]]
"""What each side of `Products` has contracted, in blocks if there are any: a dimension of an operand, left 0
or right 1; None: no dimension.
"""
Make = Callable[[Sequence[Operand], Products, Any, Any], Value]
"""The product of operands, quantized so, in this precision and dtype."""


def _dot(eqn: JaxprEqn, what: str) -> tuple[Contracted, Make]:
    dims = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(len(shape_of(v))) if d not in (*dims[0][k], *dims[1][k])]
        for k, v in enumerate(eqn.invars[:2])
    ]
    along = [*zip((0, 1), dims[0], strict=True), (1, free[1]), (0, free[0])]
    return (
        [(k, ds[-1] if ds else None) for k, ds in along],
        lambda ins, how, precision, dtype: quantized_dot(ins[0], ins[1], dims, how, precision, dtype),
    )


def _ragged_dot(eqn: JaxprEqn, what: str) -> tuple[Contracted, Make]:
    if not is_forward(eqn.params["ragged_dot_dimension_numbers"]) or len(shape_of(eqn.invars[2])) != 1:
        raise Decline(
            f"{what} is a ragged product of other dimensions than rows x contracted, experts x "
            "contracted x columns: move them so, as lax.ragged_dot takes them"
        )
    return (
        [(0, 1), (1, 1), (1, 2), (0, 0)],
        lambda ins, how, precision, dtype: quantized_ragged_dot(
            ins[0], ins[1], ins[2], how, precision, dtype
        ),
    )


def _conv(eqn: JaxprEqn, what: str) -> tuple[Contracted, Make]:
    if eqn.params["batch_group_count"] != 1:
        raise Decline(f"{what} has groups of the batch, which have no scales apart: convolve each by itself")
    window = window_of(eqn.params)
    return (
        [(0, None), (1, None), (1, None), (0, None)],
        lambda ins, how, precision, dtype: quantized_conv(ins[0], ins[1], window, how, precision, dtype),
    )


MAKERS: dict[str, Callable[[JaxprEqn, str], tuple[Contracted, Make]]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    CONVOLUTION: _conv,
}
"""What is quantized, by primitive."""


def shared(eqn: JaxprEqn, k: int) -> tuple[int, ...]:
    """The dimensions of a product's operand along which its numbers share a scale; blocks are of the last."""
    p = eqn.params
    if eqn.primitive.name == CONVOLUTION:
        return window_of(p).shared[k]
    if eqn.primitive.name == "dot_general":
        return tuple(p["dimension_numbers"][0][k])
    return (1,) if k == 0 else (0, 1)
