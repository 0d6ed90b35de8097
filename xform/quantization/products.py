"""Products of quantized arrays: of their codes, scaled afterwards, or of floats, where codes are no numbers.

    product(Quantized a, Quantized b, dims) = dot_general(a.codes, b.codes) * a.scale * b.scale

Codes are multiplied where both operands have them. Integers are summed in int32, floats of eight bits in the
result's dtype. Blocks along what is contracted become a dimension that is summed after scaling; short ones,
and tables (nf4), are made whole first, which the compiler fuses into the product. Source of the order of
operations: Qwix 0.1.8, `dot_general`, with which the results agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.quantization.arrays import Quantized, along, arranged, mapped, split, whole
from xform.trace import Value

Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""As `lax.dot_general` has them: (contracted of left and right), (batch of left and right)."""

SHORTEST_BLOCK = 128
"""Blocks of fewer numbers are no products that a matrix unit would do well: arrays are made whole."""

NARROW = (jnp.int4, jnp.uint4)
"""Codes that are stored in four bits, and multiplied in eight: no matrix unit here takes fewer."""

Operand = Value | Quantized


def product(left: Operand, right: Operand, dims: Dims, precision: Any = None, dtype: Any = None) -> Value:
    """`lax.dot_general` of arrays, quantized or not. dtype: of the result; by default that of the scales."""
    in_blocks = any(isinstance(x, Quantized) and x.blocks() for x in (left, right))
    ones = [_ones(x, *(pair[k] for pair in dims)) for k, x in enumerate((left, right))]
    if in_blocks and any(ones):
        # With a dimension of one row more, the compiler makes whole arrays of blocks ahead of a product.
        few = [_without(x, drop) for x, drop in zip((left, right), ones, strict=True)]
        numbers: Any = tuple(tuple(_moved_up(pair[k], ones[k]) for k in (0, 1)) for pair in dims)
        out = product(few[0], few[1], numbers, precision, dtype)
        return out.reshape(_result_shape(left, right, dims))
    if not multiplied_as_codes(left, right, dims):
        left, right = (whole(x) if isinstance(x, Quantized) else x for x in (left, right))
        return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=dtype)
    return _of_codes(left, right, dims, precision, dtype)


def _ones(x: Operand, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dimensions of one row that a product carries into its result."""
    shape = _shape(x)
    return [d for d, n in enumerate(shape) if n == 1 and d not in contracted and d not in batch]


def _shape(x: Operand) -> tuple[int, ...]:
    return tuple((x.codes if isinstance(x, Quantized) else x).shape)


def _without(x: Operand, dimensions: Sequence[int]) -> Operand:
    if isinstance(x, Quantized):
        return mapped(x, lambda v: jax.lax.squeeze(v, dimensions))
    return jax.lax.squeeze(x, dimensions)


def _moved_up(dimensions: Sequence[int], dropped: Sequence[int]) -> tuple[int, ...]:
    return tuple(d - sum(k < d for k in dropped) for d in dimensions)


def _result_shape(left: Operand, right: Operand, dims: Dims) -> tuple[int, ...]:
    shape = [_shape(left)[d] for d in dims[1][0]]
    for k, x in enumerate((left, right)):
        shape += [n for d, n in enumerate(_shape(x)) if d not in dims[0][k] and d not in dims[1][k]]
    return tuple(shape)


def multiplied_as_codes(left: Operand, right: Operand, dims: Dims) -> bool:
    """Whether the product is one of codes: in integers, or floats of eight bits."""
    for x, contracted in zip((left, right), dims[0], strict=True):
        if not isinstance(x, Quantized):
            if is_float(x.dtype):
                return False
            continue
        if x.format.table:
            return False
        for d in contracted:
            if x.scale.shape[d] > 1 and x.codes.shape[d] // x.scale.shape[d] < SHORTEST_BLOCK:
                return False
    return True


def is_float(dtype: Any) -> bool:
    """Whether numbers of this dtype are quantized: floats of more than eight bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def _of_codes(left: Operand, right: Operand, dims: Dims, precision: Any, dtype: Any) -> Value:
    (contract_l, contract_r), (batch_l, batch_r) = dims
    blocks_l, blocks_r = _blocks(left, right, contract_l, contract_r)
    values = [
        split(x.codes if isinstance(x, Quantized) else x, blocks)
        for x, blocks in ((left, blocks_l), (right, blocks_r))
    ]
    zeros = [
        split(x.zero, dict.fromkeys(blocks, 1)) if isinstance(x, Quantized) and x.zero is not None else None
        for x, blocks in ((left, blocks_l), (right, blocks_r))
    ]
    if all(zero is not None for zero in zeros):
        raise ValueError("of two operands only one can have a range that is not symmetric")
    new_l, more_l = _with_blocks(contract_l, batch_l, blocks_l)
    new_r, more_r = _with_blocks(contract_r, batch_r, blocks_r)
    split_dims = (new_l, new_r), (more_l, more_r)
    summed = tuple(range(len(batch_l), len(more_l)))
    total, result = dtypes(left, right, dtype)

    def dot(a: Value, b: Value) -> Value:
        a, b = (x.astype(jnp.int8) if x.dtype in NARROW else x for x in (a, b))
        return jax.lax.dot_general(a, b, split_dims, precision=precision, preferred_element_type=total)

    out = dot(*values)
    for k in (0, 1):
        if (zero := zeros[k]) is not None:
            full = list(zero.shape)
            for d in (*split_dims[0][k], *split_dims[1][k]):
                full[d] = values[k].shape[d]
            operands = list(values)
            operands[k] = jnp.broadcast_to(zero, full)
            out = along(jnp.subtract, out, dot(*operands))
    for k, (x, blocks) in enumerate(((left, blocks_l), (right, blocks_r))):
        if isinstance(x, Quantized):
            scale = split(x.scale, dict.fromkeys(blocks, 1))
            out = along(jnp.multiply, out, arranged(scale, _places(split_dims, values, k)))
    if summed:
        out = jnp.sum(out, axis=summed)
    return out.astype(result)


def _blocks(
    left: Operand, right: Operand, contract_l: Sequence[int], contract_r: Sequence[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The blocks of what is contracted, of each operand: where one has them, the other is cut alike."""
    own = [x.blocks() if isinstance(x, Quantized) else {} for x in (left, right)]
    found: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for l, r in zip(contract_l, contract_r, strict=True):
        sizes = {size for size in (own[0].get(l), own[1].get(r)) if size}
        if len(sizes) > 1:
            raise ValueError(f"blocks of {' and '.join(map(str, sorted(sizes)))} are contracted")
        if sizes:
            found[0][l] = found[1][r] = sizes.pop()
    return found


def _with_blocks(
    contract: Sequence[int], batch: Sequence[int], blocks: dict[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is contracted, and the batch with blocks at its end, once their dimensions are two each."""
    inside = tuple(d + sum(b <= d for b in blocks) for d in contract)
    moved = [d + sum(b < d for b in blocks) for d in batch]
    return inside, (*moved, *(d + sum(b < d for b in blocks) for d in contract if d in blocks))


def _places(dims: Dims, values: Sequence[Value], k: int) -> list[int | None]:
    """For each dimension of the result, that of operand k."""
    (contract, batch) = dims
    free = [[d for d in range(values[j].ndim) if d not in contract[j] and d not in batch[j]] for j in (0, 1)]
    places: list[int | None] = list(batch[k])
    for j in (0, 1):
        places += free[j] if j == k else [None] * len(free[j])
    return places


def dtypes(left: Operand, right: Operand, dtype: Any = None) -> tuple[Any, Any]:
    """In which dtype codes are summed, and that of the result."""
    codes, floats = [], []
    for x in (left, right):
        codes.append(x.codes.dtype if isinstance(x, Quantized) else x.dtype)
        own = x.scale.dtype if isinstance(x, Quantized) else x.dtype
        if own.itemsize <= 1:
            own = jnp.dtype(jnp.int32 if jnp.issubdtype(own, jnp.integer) else jnp.bfloat16)
        floats.append(own)
    result = jnp.result_type(*floats) if dtype is None else dtype
    integers = all(jnp.issubdtype(d, jnp.integer) for d in codes)
    return (jnp.int32 if integers else result), result
