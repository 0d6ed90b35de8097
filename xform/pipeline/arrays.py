"""Pieces of arrays, read and put in place; every loop of a pipeline is made of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.trace import Value


def typed(x: Value, like: Any) -> Value:
    """x in the dtype of another."""
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def row_at(x: Value, n: Value) -> Value:
    """x[n]. No number here counts from the end, which jax would have in the program for each of them."""
    return jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False, allow_negative_indices=False)


def put_in(buffer: Value, x: Value, slot: Value) -> Value:
    """The buffer with buffer[slot] = x."""
    x = typed(x, buffer)
    return jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0, allow_negative_indices=False)


def rows_at(x: Value, at: Value, size: int) -> Value:
    """x[:, at : at + size]"""
    return jax.lax.dynamic_slice_in_dim(x, at, size, 1, allow_negative_indices=False)


def put_rows(x: Value, rows: Value, at: Value) -> Value:
    """x with x[:, at : at + size] = rows."""
    return jax.lax.dynamic_update_slice_in_dim(x, rows, at, 1, allow_negative_indices=False)


def narrowed(rows: Value, dtype: Any) -> Value:
    """Rows of weights in a narrower dtype, rounded as such: a mere cast the compiler does to the whole stack,
    before the loop.
    """
    if rows.dtype == dtype:
        return rows
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(rows, info.nexp, info.nmant).astype(dtype)


def replaced(xs: Sequence[Any], k: int, x: Any) -> list[Any]:
    """The list with xs[k] = x."""
    return [*xs[:k], x, *xs[k + 1 :]]


def is_array(x: Any) -> bool:
    """Whether it is one of numbers, no keys."""
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def is_floating(x: Any) -> bool:
    """Whether it is one of floats, real or complex."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
