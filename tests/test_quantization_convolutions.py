"""Quantized convolutions and their derivatives: bit for bit those of Qwix; near those of floats."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import conv_general_qt

from tests.test_quantization_training import QTYPES, side
from xform.quantization.convolutions import Window, quantized_conv, window_of
from xform.quantization.recipes import RECIPES
from xform.quantization.training import Products

IMAGE, KERNEL = ("NHWC", "HWIO", "NHWC"), (3, 2, 4, 6)
WINDOWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "same": ((3, 7, 5, 4), KERNEL, {"window_strides": (1, 1), "padding": "SAME"}),
    "strides": ((3, 7, 5, 4), KERNEL, {"window_strides": (2, 3), "padding": "VALID"}),
    "dilated": (
        (2, 5, 6, 4),
        KERNEL,
        {
            "window_strides": (1, 2),
            "padding": ((2, 1), (0, 3)),
            "lhs_dilation": (2, 1),
            "rhs_dilation": (1, 2),
        },
    ),
    "batch last": (
        (4, 7, 3),
        (6, 4, 3),
        {"window_strides": (2,), "padding": "SAME", "dimension_numbers": ("CWN", "OIW", "NCW")},
    ),
}
GROUPS = ((3, 7, 5, 4), (3, 2, 2, 6), {"window_strides": (2, 1), "padding": "SAME", "feature_group_count": 2})
EACH_ALONE = ((3, 9, 4), (3, 1, 8), {
    "window_strides": (1,), "padding": ((2, 0),), "feature_group_count": 4,
    "dimension_numbers": ("NWC", "WIO", "NWC"),
})  # fmt: skip


def conv(options: dict[str, Any]) -> Any:
    numbers = options.get("dimension_numbers", IMAGE)
    return lambda x, w: jax.lax.conv_general_dilated(x, w, **{**options, "dimension_numbers": numbers})


def window(shapes: Any, options: dict[str, Any]) -> Window:
    (eqn,) = jax.make_jaxpr(conv(options))(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)).eqns
    return window_of(eqn.params)


def operands(left: Any, right: Any, dtype: Any) -> tuple[Any, Any]:
    rng = np.random.RandomState(0)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in (left, right))  # type: ignore[return-value]


def with_gradients(conv: Any, left: Any, right: Any) -> list[Any]:
    """One operation after the other: a compiler that sees several may round less often."""
    y, back = jax.vjp(conv, left, right)
    return [np.asarray(x) for x in (y, *back(jnp.cos(y)))]


CASES = {
    "int8": ("int8", "int8", "int8"),
    "int8 forward": ("int8", "int8", ""),
    "int8 weights": ("", "int8", ""),
    "fp8": ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
    "fp8 forward": ("fp8_e4m3", "fp8_e4m3", ""),
}


@pytest.mark.parametrize(
    ("shape", "case", "dtype"),
    [("same", case, "float32") for case in CASES]
    + [(shape, case, "bfloat16") for shape in WINDOWS for case in ("int8", "fp8")],
)
def test_convolutions_and_gradients_are_those_of_qwix_bit_for_bit(shape: str, case: str, dtype: str) -> None:
    left, right, options = WINDOWS[shape]
    a, w, gradients = CASES[case]
    how = Products(side(a), side(w), side(gradients), side(gradients))
    config = conv_general_qt.ConvGeneralQtConfig(
        lhs_qtype=QTYPES.get(a),
        rhs_qtype=QTYPES.get(w),
        dlhs_grad_qtype=QTYPES.get(gradients),
        drhs_grad_qtype=QTYPES.get(gradients),
    )
    numbers = options.get("dimension_numbers", IMAGE)
    theirs = {**options, "dimension_numbers": jax.lax.conv_dimension_numbers(left, right, numbers)}
    both = operands(left, right, dtype)
    expected = with_gradients(lambda x, y: conv_general_qt.conv_general_qt(x, y, config, **theirs), *both)
    found = with_gradients(lambda x, y: quantized_conv(x, y, window((left, right), options), how), *both)
    for our, their in zip(found, expected, strict=True):
        assert our.dtype == their.dtype
        np.testing.assert_array_equal(our, their)


ERRORS = {
    "int8": 0.04,
    "int4": 0.4,
    "fp8": 0.15,
    "fp8_e4m3": 0.1,
    "fp8_e5m2": 0.2,
    "int8_forward": 0.03,
    "fp8_forward": 0.1,
    "int8_weights": 0.02,
    "fp8_weights": 0.06,
}
"""Of a recipe, the error of the convolution and of its gradients, root mean square over that of floats."""


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [*((recipe, WINDOWS["strides"]) for recipe in ERRORS), ("int8", GROUPS), ("fp8", EACH_ALONE)],
)
def test_every_recipe_is_near_floats_forward_and_backward(recipe: str, shape: Any) -> None:
    left, right, options = shape
    both = operands(left, right, np.float32)
    exact, back = jax.vjp(conv(options), *both)
    how = RECIPES[recipe].products(1, 0)
    made = window((left, right), options)
    found, found_back = jax.vjp(lambda x, w: quantized_conv(x, w, made, how), *both)
    dy = jnp.cos(7 * exact)
    for a, b in zip((exact, *back(dy)), (found, *found_back(dy)), strict=True):
        assert np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2)) < ERRORS[recipe]


def test_the_three_convolutions_are_of_codes_in_groups_too() -> None:
    how = Products(side("int8"), side("int8"), side("int8"), side("int8"))
    for left, right, options in (WINDOWS["same"], GROUPS, EACH_ALONE):
        made = window((left, right), options)

        def step(x: Any, w: Any, made: Window = made) -> Any:
            return jax.grad(lambda *xs: jnp.sum(jnp.sin(quantized_conv(*xs, made, how))), (0, 1))(x, w)

        eqns = jax.make_jaxpr(step)(*operands(left, right, jnp.bfloat16)).eqns
        convs = [e for e in eqns if e.primitive.name == "conv_general_dilated"]
        types = [[str(v.aval.dtype) for v in (*e.invars, *e.outvars)] for e in convs]
        assert types == [["int8", "int8", "int32"]] * 3


def test_what_a_calibration_cuts_off_has_no_gradient() -> None:
    left, right, options = WINDOWS["same"]
    x, w = operands(left, right, np.float32)
    how = Products(side("int8", "absmax,0.5"), side("int8", "absmax,0.5"), side("int8"), side("int8"))
    y, back = jax.vjp(lambda x, w: quantized_conv(x, w, window((left, right), options), how), x, w)
    dx, dw = back(jnp.ones_like(y))
    for gradient, x, axes in ((dx, x, (1, 2, 3)), (dw, w, (0, 1, 2))):  # noqa: B020
        inside = np.abs(x) <= 0.5 * np.abs(x).max(axes, keepdims=True)
        assert ((np.asarray(gradient) == 0) == ~inside).all()


def test_a_dtype_that_is_asked_for_is_that_of_the_sum_too() -> None:
    left, right, options = WINDOWS["same"]
    both = operands(left, right, jnp.bfloat16)
    how = Products(side("int8"), side("int8"), side("int8"), side("int8"))
    made = window((left, right), options)

    def made_wide(x: Any, w: Any) -> Any:
        return quantized_conv(x, w, made, how, dtype=jnp.float32)

    assert made_wide(*both).dtype == jnp.float32
    grads = jax.grad(lambda *xs: jnp.sum(made_wide(*xs)), argnums=(0, 1))(*both)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]


def test_blocks_are_refused() -> None:
    left, right, options = WINDOWS["same"]
    how = Products(side("int8", block=2), side("int8"))
    with pytest.raises(ValueError, match="no blocks"):
        quantized_conv(*operands(left, right, np.float32), window((left, right), options), how)
