"""Quantized products and their derivatives: bit for bit those of Qwix; near those of floats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import dot_general_qt

from xform.quantization.arrays import quantized
from xform.quantization.formats import FORMATS
from xform.quantization.scales import How, calibration
from xform.quantization.training import Products, Side, quantized_dot

QTYPES = {
    "int8": jnp.int8,
    "int4": jnp.int4,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "mxfp8": "mxfp8",
    "nf4": "nf4",
}

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "matrix": ((5, 64), (64, 7), (((1,), (0,)), ((), ()))),
    "heads": ((2, 3, 64), (64, 4, 5), (((2,), (0,)), ((), ()))),
    "two contracted": ((2, 3, 4, 64), (4, 64, 6), (((2, 3), (0, 1)), ((), ()))),
    "two contracted, turned": ((6, 64, 8), (5, 8, 64), (((2, 1), (1, 2)), ((), ()))),
    "batch": ((3, 6, 64), (3, 64, 5), (((2,), (1,)), ((0,), (0,)))),
}

CASES: dict[str, tuple[str, str, str, str, int]] = {
    "int8": ("int8", "int8", "int8", "absmax", 0),
    "int8 forward": ("int8", "int8", "", "absmax", 0),
    "int8 weights": ("", "int8", "", "absmax", 0),
    "int8, scaled": ("int8", "int8", "int8", "absmax,0.5", 0),
    "int8, rms": ("int8", "int8", "int8", "rms,2", 0),
    "int8, fixed": ("int8", "int8", "int8", "fixed,-1,1", 0),
    "int8, blocks": ("int8", "int8", "int8", "absmax", 4),
    "fp8": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "absmax", 0),
    "mxfp8": ("mxfp8", "mxfp8", "fp8_e5m2", "absmax", 32),
    "int4 weights, blocks": ("", "int4", "", "absmax", 32),
    "nf4 weights, blocks": ("", "nf4", "", "absmax", 4),
}


def side(form: str, method: str = "absmax", block: int = 0) -> Side:
    return Side(FORMATS[form] if form else None, calibration(method, "test"), block=block)


def with_gradients(dot: Any, left: Any, right: Any) -> list[Any]:
    """One operation after the other: a compiler that sees several may round less often."""
    y, back = jax.vjp(dot, left, right)
    return [np.asarray(x) for x in (y, *back(jnp.cos(y)))]


def operands(shape: str, dtype: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    left, right, dims = SHAPES[shape]
    rng = np.random.RandomState(seed)
    return *(jnp.asarray(rng.standard_normal(s), dtype) for s in (left, right)), dims


FEW = ("int8", "int8, blocks", "nf4 weights, blocks")
"""Of shapes other than a matrix."""


@pytest.mark.parametrize(
    ("shape", "case", "dtype"),
    [("matrix", case, "float32") for case in CASES]
    + [("matrix", case, "bfloat16") for case in ("int8", "fp8", "int8, rms", "mxfp8")]
    + [(shape, case, "bfloat16") for shape in SHAPES if shape != "matrix" for case in FEW],
)
def test_products_and_gradients_are_those_of_qwix_bit_for_bit(shape: str, case: str, dtype: str) -> None:
    a, w, gradients, method, block = CASES[case]
    left, right, dims = operands(shape, dtype)
    how = Products(side(a, method, block), side(w, method, block), side(gradients), side(gradients))
    config = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=QTYPES.get(a),
        rhs_qtype=QTYPES.get(w),
        tile_size=block or None,
        lhs_calibration_method=method,
        rhs_calibration_method=method,
        dlhs_grad_qtype=QTYPES.get(gradients),
        drhs_grad_qtype=QTYPES.get(gradients),
    )
    theirs = with_gradients(lambda x, y: dot_general_qt.dot_general_qt(x, y, dims, config), left, right)
    ours = with_gradients(lambda x, y: quantized_dot(x, y, dims, how), left, right)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        np.testing.assert_array_equal(our, their)


ERRORS = {"int8": 0.02, "int4": 0.3, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15, "mxfp8": 0.08}
"""Of a format, the error of a product of normal numbers, root mean square over that of the product."""


@pytest.mark.parametrize("form", ERRORS)
def test_errors_are_those_of_the_format(form: str) -> None:
    left, right, dims = operands("matrix", jnp.float32)
    exact = jax.lax.dot_general(left, right, dims)
    found = quantized_dot(left, right, dims, Products(side(form), side(form)))
    error = np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))
    assert ERRORS[form] / 20 < error < ERRORS[form]


def test_a_dtype_that_is_asked_for_is_that_of_the_sum_too() -> None:
    left, right, dims = operands("matrix", jnp.bfloat16)
    how = Products(side("int8"), side("int8"), side("int8"), side("int8"))
    y = quantized_dot(left, right, dims, how, dtype=jnp.float32)
    assert y.dtype == jnp.float32
    grads = jax.grad(lambda x, w: jnp.sum(quantized_dot(x, w, dims, how, dtype=jnp.float32)), argnums=(0, 1))(
        left, right
    )
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_shows_in_what_shares_its_scale_and_nowhere_else(bad: float) -> None:
    left, right, dims = operands("matrix", jnp.float32)
    how = Products(side("int8"), side("int8"))
    clean = quantized_dot(left, right, dims, how)
    y = quantized_dot(left.at[1, 3].set(bad), right, dims, how)
    assert np.isnan(np.asarray(y[1])).all()
    rest = np.delete(np.asarray(y), 1, 0)
    np.testing.assert_array_equal(rest, np.delete(np.asarray(clean), 1, 0))


@pytest.mark.parametrize(("form", "nan", "end"), [("int8", 0, 127), ("fp8_e4m3", np.nan, 448), ("nf4", 0, 1)])
def test_with_a_fixed_range_nan_is_zero_or_stays_and_infinity_is_the_end_of_the_range(
    form: str, nan: float, end: float
) -> None:
    how = How(FORMATS[form], calibration=calibration("fixed,1", "here"))
    q = quantized(jnp.asarray([np.nan, np.inf, -np.inf, 0.5], jnp.float32), how)
    found = np.asarray(q.format.decode(q.codes, jnp.float32))
    np.testing.assert_array_equal(found[0], nan)
    assert found[1] == end and found[2] <= -end and 0 < found[3] < end


def test_rounding_at_random_is_right_on_average_and_the_same_each_time() -> None:
    x = jnp.full((4096,), 0.3)
    x = x.at[0].set(127.5)
    how = Side(FORMATS["int8"], channels=False, round="stochastic").how(1, (0,))
    codes = np.asarray(quantized(x, how, seed=1).codes)
    assert set(codes[1:].tolist()) == {0, 1}
    assert abs(codes[1:].mean() - 0.3) < 0.03
    np.testing.assert_array_equal(codes, quantized(x, how, seed=1).codes)
    assert (codes != np.asarray(quantized(x, how, seed=2).codes)).any()
    assert (codes != np.asarray(quantized(x.at[0].set(127.4), how, seed=1).codes)).any()
