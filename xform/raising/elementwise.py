"""Elementwise operations on numpy arrays that broadcast, as XLA computes them.

In numpy, since a jax operation would be compiled anew for every shape, and could be recorded in the trace at
hand. What numpy has no word for is bound on the CPU, outside of any trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from scipy import special

from xform.axes.rules import ELEMENTWISE
from xform.raising.indices import SAME, Array, dtype_of
from xform.trace import JaxprEqn, bind


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether every element of the result follows from the elements of the operands at the same place."""
    name = eqn.primitive.name
    return (name in ELEMENTWISE or name in _TABLE) and len(eqn.outvars) == 1 and name not in SAME


def cast(x: Array, dtype: Any) -> Array:
    """The array in another dtype, as `convert_element_type` has it."""
    if x.dtype == dtype:
        return x
    if np.issubdtype(x.dtype, np.complexfloating) and not np.issubdtype(dtype, np.complexfloating):
        x = x.real
    return x.astype(dtype)


def elementwise(eqn: JaxprEqn, xs: Sequence[Array]) -> Array:
    """The result of an elementwise equation for operands that broadcast; its dtype may be another still."""
    name = eqn.primitive.name
    rule = _TABLE.get(name)
    if rule is not None:
        return np.asarray(rule(eqn, *xs))
    return _bound(eqn, xs)


def _bound(eqn: JaxprEqn, xs: Sequence[Array]) -> Array:
    shape = np.broadcast_shapes(*(x.shape for x in xs))
    args = [np.broadcast_to(x, shape).astype(dtype_of(v)) for x, v in zip(xs, eqn.invars, strict=True)]
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        (out,) = bind(eqn, args, dict(eqn.params))
        return np.asarray(out)


def select(which: Array, cases: Sequence[Array]) -> Array:
    """`select_n`: of the cases the one whose number `which` is."""
    if len(cases) == 2:
        off, on = cases
        if which.dtype != np.bool_:
            which = which != 0
        if on.dtype == np.bool_:  # several times as fast as np.where
            return (which & on) | (~which & off)
        return np.where(which, on, off)
    return np.choose(which, list(cases))


def _div(eqn: JaxprEqn, x: Array, y: Array) -> Array:
    if not np.issubdtype(x.dtype, np.integer):
        return np.asarray(x / y)
    by = np.where(y == 0, 1, y)
    whole = x // by
    whole = whole + ((whole * by != x) & ((x < 0) != (by < 0)))
    return np.where(y == 0, -1, whole)


def _rem(eqn: JaxprEqn, x: Array, y: Array) -> Array:
    if not np.issubdtype(x.dtype, np.integer):
        return np.asarray(np.fmod(x, y))
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y)))


def _not(eqn: JaxprEqn, x: Array) -> Array:
    return np.asarray(~x)


def _round(eqn: JaxprEqn, x: Array) -> Array:
    if int(eqn.params["rounding_method"]) == 1:
        return np.asarray(np.rint(x))
    return np.asarray(np.copysign(np.floor(np.abs(x) + np.asarray(0.5, x.dtype)), x))


def _integer_pow(eqn: JaxprEqn, x: Array) -> Array:
    power = eqn.params["y"]
    if power < 0:
        return np.asarray(np.asarray(1, x.dtype) / x**-power)
    return np.asarray(x**power)


def _select(eqn: JaxprEqn, which: Array, *cases: Array) -> Array:
    return select(which, cases)


def _plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, *xs: f(*xs)


def _special(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of scipy, which knows float32 and float64 only."""
    return lambda eqn, *xs: f(
        *(x if x.dtype in (np.float32, np.float64) else x.astype(np.float32) for x in xs)
    )


_UFUNCS: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs, "acos": np.arccos, "acosh": np.arccosh, "add": np.add, "add_any": np.add,
    "and": np.bitwise_and, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2,
    "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "eq": np.equal,
    "exp": np.exp, "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p, "log2": np.log2,
    "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal,
    "neg": np.negative, "or": np.bitwise_or, "pow": np.power, "sign": np.sign, "sin": np.sin, "sinh": np.sinh,
    "sqrt": np.sqrt, "square": np.square, "sub": np.subtract, "tan": np.tan, "tanh": np.tanh,
    "xor": np.bitwise_xor,
}  # fmt: skip

_TABLE: Mapping[str, Callable[..., Any]] = {
    **{name: _plain(f) for name, f in _UFUNCS.items()},
    "clamp": _plain(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "div": _div,
    "erf": _special(special.erf),
    "erf_inv": _special(special.erfinv),
    "erfc": _special(special.erfc),
    "exp2": _plain(lambda x: np.exp2(x)),
    "integer_pow": _integer_pow,
    "lgamma": _special(special.gammaln),
    "logistic": _special(special.expit),
    "not": _not,
    "one_minus_square": _plain(lambda x: 1 - x * x),
    "rem": _rem,
    "round": _round,
    "rsqrt": _plain(lambda x: np.asarray(1, x.dtype) / np.sqrt(x)),
    "select_n": _select,
    "zeros_like": _plain(np.zeros_like),
}
