"""Every operation that the walk knows, on parts laid out in many ways, against one device.

A case is a function of arrays; a program is the case on several copies of its arguments, each laid out its
own way: dimensions over one axis or two, in pieces, or as the terms of a sum. So a case compiles once.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import xform
from tests import random_programs
from xform.higher_order import equations
from xform.ops import apply
from xform.report import Report
from xform.spmd import blocks, calls, prefixes
from xform.spmd.forms import FORMS
from xform.spmd.partition import partitioned
from xform.spmd.torus import staged
from xform.trace import Jaxpr, JaxprEqn, eval_jaxpr, shape_of, trace_flat, typeof

WAYS = {"a": 2, "b": 4}
COPIES = 3
"""How many layouts of its arguments a case runs on."""


class Given(NamedTuple):
    """An array as a program is given it, how it lies, and what the program makes of it."""

    x: Any
    spec: PartitionSpec
    taken: Callable[[Any], Any]


# ---------------------------------------------------------------- arguments


def real(*shape: int) -> np.ndarray:
    """Multiples of 1/32 in [-2, 2], so that sums are exact in any order."""
    return np.random.default_rng(len(shape) + sum(shape)).integers(-64, 64, shape).astype(np.float32) / 32


def unit(*shape: int) -> np.ndarray:
    """Within (0, 1)."""
    return (np.random.default_rng(sum(shape)).integers(1, 31, shape) / 32).astype(np.float32)


def whole(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(np.int32)


def flags(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 5, shape) > 0


def square(*shape: int) -> np.ndarray:
    """Symmetric, positive definite matrices."""
    x = real(*shape)
    return x @ np.swapaxes(x, -1, -2) + 8 * np.eye(shape[-1], dtype=np.float32)


# ---------------------------------------------------------------- layouts


def specs(shape: Sequence[int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to lay a shape out on the mesh: the axes of each dimension."""
    places = [None, *range(len(shape))]
    for a, b in itertools.product(places, places):
        for order in ("ab", "ba") if a == b and a is not None else ("ab",):
            spec = tuple(
                tuple(axis for axis in order if {"a": a, "b": b}[axis] == dim) for dim in range(len(shape))
            )
            if all(
                n % math.prod(WAYS[axis] for axis in axes) == 0 for n, axes in zip(shape, spec, strict=True)
            ):
                yield spec


def ways(x: np.ndarray, rng: np.random.Generator) -> list[Given]:
    """Ways to give an array: laid out in each way, as terms of a sum over an axis, and in pieces."""
    shape, found = x.shape, []
    for spec in specs(shape):
        found.append(Given(x, PartitionSpec(*spec), lambda y: y))
        used = {axis for axes in spec for axis in axes}
        for axis in set(WAYS) - used if x.dtype != np.bool_ else ():
            parts = rng.integers(-8, 8, (WAYS[axis], *shape)).astype(x.dtype)
            parts[0] += x - parts.sum(0)
            found.append(Given(parts, PartitionSpec(axis, *spec), lambda y: jnp.sum(y, 0, dtype=y.dtype)))
    for dim, n in enumerate(shape):
        if n % 16 == 0:
            split = x.reshape(*shape[:dim], 4, n // 4, *shape[dim + 1 :])
            for axes in (("a", "b"), ("b", "a"), (None, "b")):
                spec = PartitionSpec(*[None] * dim, *axes)
                found.append(Given(split, spec, lambda y: y.reshape(shape)))
    return found


def copies(args: Sequence[np.ndarray], seed: int, count: int) -> list[list[Given]]:
    """Several ways to give all arguments."""
    rng = np.random.default_rng(seed)
    each = [ways(np.asarray(x), rng) for x in args]
    for options in each:
        rng.shuffle(options)  # type: ignore[arg-type]
    number = min(count, math.prod(map(len, each)))
    return [[options[i % len(options)] for options in each] for i in range(number)]


def explicit(program: Jaxpr, mesh: jax.sharding.Mesh, ins: Sequence[PartitionSpec], report: Report) -> Jaxpr:
    """The program as each device runs it; every second result lies over `b` where its rows divide."""
    outs: list[Any] = []
    for i, var in enumerate(program.outvars):
        divides = var.aval.shape and var.aval.shape[0] % WAYS["b"] == 0
        outs.append(NamedSharding(mesh, PartitionSpec("b")) if i % 2 and divides else None)
    shardings = [NamedSharding(mesh, spec) for spec in ins]
    return partitioned(program, staged(mesh), list(WAYS), shardings, outs, report).jaxpr


def the_mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(*WAYS.values()), tuple(WAYS))


def run(
    f: Callable[..., Any], args: Sequence[np.ndarray], count: int = COPIES, seed: int = 0
) -> tuple[Jaxpr, Report]:
    """Runs a case in several layouts, compares with one device; returns the case as a program, the report."""
    mesh, report = the_mesh(), Report()
    taken = copies(args, seed, count)
    flat = [each for copy in taken for each in copy]

    def program(*xs: Any) -> list[Any]:
        values = [each.taken(x) for x, each in zip(xs, flat, strict=True)]
        rows = itertools.batched(values, len(args))
        return [leaf for row in rows for leaf in jax.tree.leaves(f(*row))]

    inputs = [jnp.asarray(each.x) for each in flat]
    made = explicit(
        trace_flat(program, [typeof(x) for x in inputs], "case"), mesh, [each.spec for each in flat], report
    )
    # From the host's memory: an array of a device is cut for the others by a program for each way to cut.
    results = jax.jit(lambda *xs: eval_jaxpr(made, *xs))(*(each.x for each in flat))
    one = alone(f, args)
    expected = jax.jit(lambda *xs: eval_jaxpr(one, *xs))(*args)
    for i, (x, y) in enumerate(zip(results, expected * len(taken), strict=True)):
        text = ", ".join(f"{each.x.shape} {each.spec}" for each in taken[i // len(expected)])
        agree(x, y, f"result {i % len(expected)} of {text}")
    return one, report


def alone(f: Callable[..., Any], args: Sequence[Any]) -> Jaxpr:
    """A case as a program for one device."""
    return trace_flat(lambda *xs: jax.tree.leaves(f(*xs)), [typeof(jnp.asarray(x)) for x in args], "alone")


def agree(x: Any, y: Any, text: str) -> None:
    assert (x.shape, x.dtype) == (y.shape, y.dtype), text
    if jnp.issubdtype(y.dtype, jnp.inexact):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6, err_msg=text)
    else:
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=text)


def primitives(jaxpr: Jaxpr) -> set[str]:
    """The names of all operations in a program, at any depth."""
    return {eqn.primitive.name for eqn in equations(jaxpr)}


# ---------------------------------------------------------------- one element at a time


def words(text: str) -> list[str]:
    return text.split()


REAL = words(
    """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc
    exp exp2 expm1 floor is_finite lgamma log log1p log2 logistic neg one_minus_square round rsqrt sign sin
    sinh sqrt square tan tanh"""
)
TWO = words("add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub")
BITS = words("shift_left shift_right_arithmetic shift_right_logical")
ELEMENTS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "of one real": (lambda x: [getattr(lax, name)(x) for name in REAL], (unit(8, 3),)),
    "of two reals": (lambda x, y: [getattr(lax, name)(x + 1, y) for name in TWO], (unit(8, 4), unit(8, 4))),
    "of integers": (
        lambda x, y: [
            *[getattr(lax, name)(x, jnp.abs(y)) for name in BITS],
            lax.bitwise_and(x, y),
            lax.bitwise_or(x, y),
            lax.bitwise_xor(x, y),
            lax.bitwise_not(x),
            lax.clz(x),
            lax.population_count(x),
            lax.integer_pow(x, 3),
            lax.convert_element_type(x, np.float32),
            lax.bitcast_convert_type(x, np.float32) > 0,
        ],
        (whole(8, 3), whole(8, 3)),
    ),
    "of complex numbers": (
        lambda x, y: [lax.real(z := lax.complex(x, y)), lax.imag(z), lax.conj(z), lax.abs(z * z)],
        (real(8, 5), real(8, 5)),
    ),
    "with scalars": (
        lambda x, y, s: [
            lax.clamp(s, x, s + 1),
            lax.clamp(y - 1, x, y),
            lax.select_n(s > 0, x, y),
            lax.select_n(x > y, x, y),
            lax.stop_gradient(x),
            lax.reduce_precision(x, 8, 3),
            checkpoint_name(x, "x"),
            jnp.array(x, copy=True),
            jax.lax.optimization_barrier((x, s))[1] + x,
            jax.device_put(x),
            lax.dce_sink((x, s)) or y,
        ],
        (real(8, 4), real(8, 4), real()),
    ),
    "of special functions": (
        lambda x, y, z: [lax.polynomial(x, [y, z]), lax.igamma(x + 1, y)],
        (unit(8), unit(8), unit(8)),
    ),
    "of keys": (
        lambda x: [
            jax.random.key_data(k := jax.vmap(jax.random.key)(x)),
            jax.random.key_data(jax.vmap(jax.random.fold_in)(k, x)),
            jax.random.key_data(jax.vmap(lambda k: jax.random.split(k, 3))(k)),
            jax.random.key_data(jax.random.wrap_key_data(jax.random.key_data(k))),
        ],
        (np.arange(8, dtype=np.int32),),
    ),
}

# ---------------------------------------------------------------- the rest, by the primitive that is meant


def _windowed(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: f(x, (1, 2, 1), (1, 2, 1), "VALID")


def _grad(f: Callable[..., Any], number: int = 0) -> Callable[..., Any]:
    """The gradient of a sum of f's squares."""
    return jax.grad(lambda *xs: jnp.sum(f(*xs) ** 2), number)


def _conv(x: Any, w: Any, features: int = 1, batches: int = 1) -> Any:
    return lax.conv_general_dilated(
        x,
        w,
        (2,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=features,
        batch_group_count=batches,
    )


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 2, 1), "SAME")


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.cumsum(x, 0)


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (jnp.clip(g, -1, 1) * x,))


@jax.custom_batching.custom_vmap
def _doubled(x: Any) -> Any:
    return jnp.cumsum(x, 0) * 2


@_doubled.def_vmap
def _doubled_rows(size: int, batched: Any, x: Any) -> tuple[Any, bool]:
    return jnp.cumsum(x, 1) * 2, True


GROUPS = np.array([3, 0, 6, 5], np.int32)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """An operation that treats b and o alone, and needs all of i: a part of i would sum too few."""

    interpret: bool = False

    name = "mixing"
    operands = ("bi", "io")
    results = ("bo", "bi")
    cut = "bo"

    def plain(self, x: Any, w: Any) -> Sequence[Any]:
        return [x @ w, jnp.cumsum(x, axis=1)]

    def kernel(self, x: Any, w: Any) -> Sequence[Any]:
        raise AssertionError("the plain form runs where there is no TPU")


@dataclasses.dataclass(frozen=True)
class Adding:
    """An operation that adds up over t and over v where a result lacks them; it is told which v it has."""

    interpret: bool = False
    axes: tuple[str, ...] = ()

    name = "adding"
    operands = ("ti", "iv")
    results = ("ti", "iv", "t", "tv")
    cut = ""
    sums = "tv"
    told = "v"

    def over(self, axes: Mapping[str, tuple[str, ...]]) -> "Adding":
        return dataclasses.replace(self, axes=axes["v"])

    def plain(self, x: Any, w: Any) -> Sequence[Any]:
        first = lax.axis_index(self.axes) * w.shape[1] if self.axes else 0
        y = jnp.cumsum(x, axis=1) @ w + first + jnp.arange(w.shape[1])
        return [y @ w.T, x.T @ y, jnp.sum(y, 1), y]

    def kernel(self, x: Any, w: Any) -> Sequence[Any]:
        raise AssertionError("the plain form runs where there is no TPU")


CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "argmax": (lambda x: [jnp.argmax(x, 0), jnp.argmax(x, 1), jnp.argmax(x > 0, 0)], (whole(16, 8),)),
    "argmin": (lambda x: [jnp.argmin(x, 0), jnp.argmin(x, 1)], (whole(16, 8),)),
    "argmax nan": (lambda x: [jnp.argmax(jnp.log(x), 0), jnp.argmin(jnp.log(x), 1)], (real(16, 8),)),
    "approx_top_k": (lambda x: lax.approx_max_k(x, 3, 0), (real(16, 8),)),
    "bitcast_convert_type": (
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.int16), np.int32),
        (whole(8, 4),),
    ),
    "broadcast_in_dim": (
        lambda x: [
            jnp.broadcast_to(x[:, None], (8, 16, 4)) * x[:, None],
            lax.broadcast_in_dim(x, (3, 8, 4), (1, 2)),
        ],
        (real(8, 4),),
    ),
    "concatenate": (
        lambda x, y: [lax.concatenate([x, y], 0), lax.concatenate([x, y, x], 1)],
        (real(8, 4), real(8, 4)),
    ),
    "conv_general_dilated": (
        lambda x, w: [_conv(x, w), _grad(_conv, 0)(x, w), _grad(_conv, 1)(x, w)],
        (whole(8, 7, 4).astype(np.float32), whole(3, 4, 8).astype(np.float32)),
    ),
    "conv_general_dilated features": (
        lambda x, w: [
            _conv(x, w, 4),
            *jax.grad(lambda x, w: jnp.sum(_conv(x, w, 4) ** 2), (0, 1))(x, w),
        ],
        (whole(8, 5, 8).astype(np.float32), whole(3, 2, 16).astype(np.float32)),
    ),
    "conv_general_dilated batches": (
        lambda x, w: [
            _conv(x, w, 1, 4),
            *jax.grad(lambda x, w: jnp.sum(_conv(x, w, 1, 4) ** 2), (0, 1))(x, w),
        ],
        (whole(16, 5, 4).astype(np.float32), whole(3, 4, 8).astype(np.float32)),
    ),
    "cumsum": (lambda x: [lax.cumsum(x, 0), lax.cumsum(x, 1, reverse=True)], (real(16, 8),)),
    "cumprod": (lambda x: [lax.cumprod(x, 0), lax.cumprod(x, 1, reverse=True)], (whole(16, 8),)),
    "cummax": (lambda x: [lax.cummax(x, 0), lax.cummax(jnp.log(x), 1, reverse=True)], (real(16, 8),)),
    "cummin": (lambda x: [lax.cummin(x, 0, reverse=True), lax.cummin(jnp.log(x), 1)], (real(16, 8),)),
    "cumlogsumexp": (
        lambda x: [lax.cumlogsumexp(x, 0), lax.cumlogsumexp(jnp.log(jnp.abs(x)), 1, reverse=True)],
        (real(16, 8),),
    ),
    "operation": (lambda x, w: tuple(apply(Mixing(), x, w)), (real(8, 8), real(8, 16))),
    "operation sums": (lambda x, w: tuple(apply(Adding(), x, w)), (real(8, 8), real(8, 16))),
    "dot_general": (
        lambda x, y: [
            jnp.einsum("bij,bjk->bik", x, y),
            jnp.einsum("bij,cjk->bick", x, y),
            jnp.einsum("bij,bjk->", x, y),
        ],
        (real(8, 3, 4), real(8, 4, 2)),
    ),
    "dynamic_slice": (
        lambda x, i: [lax.dynamic_slice(x, (i, 0), (3, 8)), lax.dynamic_index_in_dim(x, i, 1)],
        (real(16, 8), np.int32(3)),
    ),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i)),
        (real(16, 8), real(4, 8), np.int32(3)),
    ),
    "empty": (lambda x: lax.empty((8, 4), np.float32) * 0 + x, (real(8, 4),)),
    "fft": (
        lambda x: [jnp.real(jnp.fft.fft2(x))],
        (real(8, 4, 6),),
    ),
    "iota": (lambda x: [lax.broadcasted_iota(np.int32, (8, 16), d) + x for d in range(2)], (whole(8, 16),)),
    "linalg": (
        lambda x, y: [
            jnp.linalg.cholesky(x),
            jnp.linalg.eigh(x)[0],
            jnp.abs(jnp.linalg.qr(x)[1]),
            jnp.linalg.svd(x)[1],
            (lu := lax.linalg.lu(x))[0],
            lax.linalg.lu_pivots_to_permutation(lu[1], 3),
            lax.linalg.householder_product(x, x[..., 0] / 9),
            lax.linalg.triangular_solve(x, y, left_side=True, lower=True),
            jnp.sort(jnp.abs(jnp.linalg.eigvals(x)), -1),
            jnp.abs(lax.linalg.tridiagonal(x)[1]),
            jnp.abs(lax.linalg.hessenberg(x)[0]),
            jnp.abs(lax.linalg.schur(x)[0]),
            lax.linalg.tridiagonal_solve(x[..., 0] * 0, x[..., 0] + 9, x[..., 1] * 0, y),
            jax.scipy.linalg.qr(x[0], pivoting=True)[2],
        ],
        (square(8, 3, 3), real(8, 3, 4)),
    ),
    "pad": (
        lambda x: [lax.pad(x, 1.0, ((1, 2, 0), (0, 0, 0))), lax.pad(x, 0.0, ((0, 0, 0), (-1, 2, 1)))],
        (real(8, 4),),
    ),
    "ragged_dot_general": (
        lambda x, w: [
            lax.ragged_dot(x, w, GROUPS),
            *jax.grad(lambda *a: lax.ragged_dot(*a, GROUPS).sum(), (0, 1))(x, w),
        ],
        (real(16, 8), real(4, 8, 4)),
    ),
    "reduce": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: a * b + a + b, (1,)),
        (real(8, 4) / 4,),
    ),
    "reduce_and": (
        lambda x, y: [lax.reduce_and(x, (0,)), lax.reduce_and(y | 2, (0,)), lax.reduce_and(y, (0, 1))],
        (flags(8, 4), whole(8, 4)),
    ),
    "reduce_or": (
        lambda x, y: [lax.reduce_or(x, (1,)), lax.reduce_or(y & 5, (0,)), lax.reduce_or(y, (0, 1))],
        (flags(8, 4), whole(8, 4)),
    ),
    "reduce_xor": (lambda x: [lax.reduce_xor(x, (0,)), lax.reduce_xor(x, (0, 1))], (whole(16, 8),)),
    "reduce_prod": (lambda x: [jnp.prod(x, 0), jnp.prod(x, (0, 2))], (whole(16, 8, 3) | 1,)),
    "reduce_max": (lambda x: [jnp.max(x, 0), jnp.max(x), jnp.max(x > 1, 1)], (real(16, 8),)),
    "reduce_min": (lambda x: [jnp.min(x, 0), jnp.min(x), jnp.min(x > 1, 1)], (real(16, 8),)),
    "reduce_sum": (lambda x: [jnp.sum(x, 0), jnp.sum(x), jnp.sum(x, 1).sum(0)], (real(16, 8),)),
    "reduce_window": (
        lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b, (1, 2, 1), (1, 1, 1), "VALID"),
        (real(8, 5, 4),),
    ),
    "reduce_window_max": (_pool, (real(8, 5, 4),)),
    "reduce_window_min": (
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 1), (1, 2, 1), "VALID"),
        (real(8, 5, 4),),
    ),
    "reduce_window_sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 2, 2), "VALID"),
        (real(8, 5, 4),),
    ),
    "select_and_scatter_add": (_grad(_pool), (real(8, 5, 4),)),
    "select_and_gather_add": (lambda x, y: jax.jvp(_pool, (x,), (y,))[1], (real(8, 5, 4), real(8, 5, 4))),
    "reshape": (
        lambda x: [
            x.reshape(16, 8, 6) * 2,
            x.reshape(4, 4, 48),
            x.reshape(128, 6),
            x.reshape(2, 8, 2, 24),
            lax.reshape(x, (8, 96), (1, 0, 2)),
            x.reshape(16, 8, 2, 3, 1).reshape(16, 12, 4),
            x.reshape(-1),
        ],
        (real(16, 8, 6),),
    ),
    "rev": (lambda x: [lax.rev(x, (0,)), lax.rev(x, (0, 1))], (real(8, 4),)),
    "slice": (lambda x: [x[2:6], x[:, ::2], x[1:, :3], x[:, 4:]], (real(16, 8),)),
    "sort": (
        lambda x, y: [*lax.sort((x, y), dimension=0, num_keys=1), *lax.sort((y, x), dimension=1, num_keys=2)],
        (whole(8, 4), real(8, 4)),
    ),
    "split": (lambda x: [*jnp.split(x, 2, 0), *lax.split(x, (3, 5), 1)], (real(16, 8),)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (real(8, 1, 4),)),
    "stack": (
        lambda x, y: [lax.stack([x, y], axis) for axis in range(3)],
        (real(8, 4), real(8, 4)),
    ),
    "tile": (lambda x: [jnp.tile(x, (1, 4)), jnp.tile(x, (4, 2))], (real(8, 4),)),
    "top_k": (
        lambda x: [lax.top_k(x, 1, axis=0), lax.top_k(x, 3, axis=0), lax.top_k(jnp.log(x), 1, axis=1)],
        (real(32, 8),),
    ),
    "transpose": (lambda x: [x.T, x.transpose(1, 0, 2)], (real(8, 4, 3),)),
    "unstack": (lambda x: [*lax.unstack(x, 0), *lax.unstack(x, 1)], (real(4, 8, 2),)),
    "custom_jvp_call": (
        lambda x: [jax.nn.relu(x), jax.grad(lambda x: jax.nn.relu6(x).sum())(x)],
        (real(8, 4),),
    ),
    "custom_vjp_call": (
        lambda x: [_clipped(x), jax.grad(lambda x: jnp.sum(_clipped(x) ** 2))(x)],
        (real(8, 4),),
    ),
    "custom_vmap_call": (lambda x: _doubled(x) + 1, (real(8, 4),)),
    "custom_linear_solve": (jnp.linalg.solve, (square(8, 3, 3), real(8, 3, 4))),
    "composite": (lambda x: lax.composite(lambda x: jnp.tanh(x) * 2, "xform.doubled")(x), (real(8, 4),)),
    "debug_print": (lambda x: jax.debug.print("", ordered=False) or x, (real(8, 4),)),
    "debug_callback": (lambda x: jax.debug.callback(lambda x: None, x.sum()) or x, (real(8, 4),)),
    "concatenate blocks": (
        lambda x: [jnp.concatenate([x, x[:16] * 2], 0), jnp.concatenate([x, -x], 1), jnp.roll(x, 8, 0)],
        (real(48, 8),),
    ),
    "pad blocks": (
        lambda x: [
            jnp.pad(x, ((16, 8), (0, 0)), constant_values=3),
            jnp.pad(x, ((0, 0), (8, 16))),
            lax.pad(x, 1.0, ((-8, 16, 0), (0, 0, 0))),
        ],
        (real(48, 8),),
    ),
    "slice blocks": (lambda x: [x[8:24], x[16:], x[:, 4:]], (real(48, 8),)),
    "split blocks": (
        lambda x: [
            *jnp.split(x, 3, 0),
            *lax.split(x, (32, 8, 8), 0),
            _grad(lambda x: jnp.split(x, 3, 0)[1])(x),
        ],
        (real(48, 8),),
    ),
    "associative_scan": (lambda x: lax.associative_scan(jnp.add, x), (real(16, 3),)),
    "nothing": (lambda x: [x[:0].sum(0), jnp.concatenate([x[:0], x]), x[:0].reshape(0, 2, 2)], (real(8, 4),)),
    "narrow": (
        lambda x: [
            lax.cumsum(x.astype(np.int8), 0),
            lax.cummax(x.astype(np.uint8), 0),
            jnp.max(x.astype(np.uint8), 0),
            jnp.argmax(x.astype(jnp.bfloat16), 0),
            lax.cumprod(x.astype(np.int16), 0, reverse=True),
        ],
        (whole(16, 4),),
    ),
    "complex": (
        lambda x: [
            y
            for f in (lambda z: lax.cumsum(z, 0), lambda z: jnp.sum(z, 0), lambda z: jnp.max(z, 0))
            for y in (jnp.real(f(x + 1j * x)), jnp.imag(f(x + 1j * x)))
        ],
        (real(16, 4),),
    ),
}

SPECIAL = words("igamma_grad_a igammac polygamma regularized_incomplete_beta zeta")
SLOW = {"linalg", "custom_linear_solve", "narrow", "iota", "conv_general_dilated features", "split blocks"}
UNREACHED = {
    **dict.fromkeys(("add_any", "tie"), "autodiff's own"),
    **dict.fromkeys(
        ("eq_to", "le_to", "lt_to", "threefry2x32", "select_and_scatter"), "made while JAX lowers"
    ),
    **dict.fromkeys(("to_edtype", "from_edtype"), "of extended dtypes, made while JAX lowers"),
    **dict.fromkeys(("geqp3", "geqrf", "ormqr"), "made while JAX lowers qr"),
    **dict.fromkeys(SPECIAL, "take seconds to compile; of elements, as igamma"),
    "io_callback": "takes whole values, and says so",
    "layout_constraint": "of accelerators alone",
    "mulhi": "JAX 0.12 does not lower it for CPU under shard_map",
    "symmetric_product": "of GPUs alone",
}
"""Operations with a form that no case has in its program, and why."""


@pytest.mark.parametrize("name", ELEMENTS)
def test_an_operation_on_elements_is_exact_on_parts(name: str) -> None:
    _, report = run(*ELEMENTS[name], count=1)
    assert not report.of("declined"), report


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_exact_on_parts(name: str) -> None:
    program, report = run(*CASES[name], count=1 if name in SLOW else COPIES)
    assert not report.of("declined"), report
    assert name.split()[0] in primitives(program) | {
        "linalg",
        "associative_scan",
        "nothing",
        "narrow",
        "complex",
    }


def test_every_form_and_handler_has_a_case() -> None:
    seen: set[str] = set()
    for f, args in (*ELEMENTS.values(), *CASES.values()):
        seen |= primitives(alone(f, args))
    assert {*FORMS, *prefixes.HANDLERS, *calls.HANDLERS} - seen == set(UNREACHED)


# ---------------------------------------------------------------- what stays small


def on_a_device(f: Callable[..., Any], x: np.ndarray, spec: PartitionSpec) -> list[JaxprEqn]:
    """The equations that each device runs of a function of one array that lies so."""
    (region,) = explicit(alone(f, (x,)), the_mesh(), [spec], Report()).eqns
    return list(equations(region.params["jaxpr"]))


@pytest.mark.parametrize(
    ("f", "most"),
    [
        pytest.param(lambda x: jnp.cumsum(x, 0), 8 * 8, id="cumsum"),
        pytest.param(lambda x: jnp.argmax(x, 0), 8 * 8, id="argmax"),
        pytest.param(lambda x: lax.top_k(x, 3, axis=0), 8 * 3 * 8, id="top_k"),
        pytest.param(lambda x: jnp.prod(x, 0), 8 * 8, id="reduce_prod"),
    ],
)
def test_no_device_has_all_of_a_dimension_that_is_divided(f: Callable[..., Any], most: int) -> None:
    rows = on_a_device(
        lambda x: [jnp.sum(y) for y in jax.tree.leaves(f(x))], real(64, 8), PartitionSpec(("a", "b"))
    )
    assert any(eqn.primitive.name == "all_gather" for eqn in rows)
    assert max(math.prod(shape_of(v)) for eqn in rows for v in eqn.outvars) == most


def test_rows_in_groups_stay_where_they_are_and_only_sums_of_weights_travel() -> None:
    w = real(4, 8, 4)

    def f(x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(lax.ragged_dot(x, w, GROUPS) ** 2))(w)

    rows = on_a_device(f, real(16, 8), PartitionSpec("b"))
    assert not any(eqn.primitive.name == "all_gather" for eqn in rows)
    assert [shape_of(eqn.outvars[0]) for eqn in rows if eqn.primitive.name == "psum"] == [w.shape]


def test_an_operation_sums_on_parts_and_only_terms_travel() -> None:
    x, w = real(256, 4), real(4, 64)
    program, report = alone(lambda x, w: apply(Adding(), x, w)[:3], (x, w)), Report()
    made = explicit(program, the_mesh(), [PartitionSpec("a"), PartitionSpec(None, "b")], report)
    inside = list(equations(made))
    (eqn,) = [eqn for eqn in inside if eqn.primitive.name == "operation"]
    assert [shape_of(v) for v in eqn.invars] == [(128, 4), (4, 16)]
    assert eqn.params["op"] == Adding(axes=("b",))
    sums = [(eqn.params["axes"], shape_of(eqn.outvars[0])) for eqn in inside if eqn.primitive.name == "psum"]
    assert sums == [(("b",), (128, 4)), (("a",), (4, 16)), (("b",), (128,))]
    for got, want in zip(eval_jaxpr(made, x, w), Adding().plain(x, w)[:3], strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


def test_blocks_of_a_split_go_where_they_belong() -> None:
    """Three parts of a dimension over four devices: of twelve blocks all but three change places."""
    rows = on_a_device(lambda x: [jnp.sum(y**2) for y in jnp.split(x, 3, 0)], real(48, 3), PartitionSpec("b"))
    moves = [eqn for eqn in rows if eqn.primitive.name == "ppermute"]
    pairs = [pair for eqn in moves for pair in eqn.params["perm"]]
    assert {shape_of(eqn.outvars[0]) for eqn in moves} == {(4, 3)}
    assert len(pairs) <= 12
    assert not any(eqn.primitive.name == "all_gather" for eqn in rows)


def test_rounds_are_the_places_that_a_unit_can_have() -> None:
    """The middle half of a dimension of 16 on two devices, and where a border falls inside every block."""
    assert blocks.rounds([blocks.Source(16, -4)], 8, 2) == (4, [(0, 1, 0, ((0, 0),)), (0, 0, 0, ((1, 1),))])
    assert blocks.rounds([blocks.Source(16, -3)], 8, 2) is not None
    assert blocks.rounds([blocks.Source(64, -3)], 32, 2) is None
    assert blocks.rounds([blocks.Source(15, 0)], 8, 2) is None


def test_what_is_printed_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("the sum is {}", x.sum())
        return x * 2

    x = real(8, 3)
    made = explicit(alone(f, (x,)), the_mesh(), [PartitionSpec("b")], Report())
    jax.block_until_ready(jax.jit(lambda x: eval_jaxpr(made, x))(x))
    jax.effects_barrier()
    assert capfd.readouterr().out == f"the sum is {x.sum()}\n"


# ---------------------------------------------------------------- whole functions


def _gathered(h: Any, y: Any) -> Any:
    """Rows of one device that meet rows of another."""
    return jnp.sum(h[::-1] * y) + jnp.sum(h[1:] * h[:-1]) + jnp.sum(h[jnp.argmax(h[:, 0])] * y[3])


def _contrast(h: Any, y: Any) -> Any:
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ y.T)))


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda h, y: jnp.mean((h - y) ** 2),
    "weighted mean": lambda h, y: jnp.sum(jnp.abs(y) * h**2) / jnp.sum(jnp.abs(y)),
    "max": lambda h, y: jnp.max(h) + jnp.sum(jnp.max(h * y, 0)),
    "arg-max and gathers": _gathered,
    "norms": lambda h, y: jnp.linalg.norm(h) + jnp.sum(jnp.linalg.norm(h - y, axis=0)) + jnp.std(h),
    "sort": lambda h, y: jnp.sum(jnp.sort(h, 0) * y),
    "top_k": lambda h, y: jnp.sum(lax.top_k(h[:, 1], 3)[0] ** 2),
    "cumulative": lambda h, y: jnp.sum((jnp.cumsum(h, 0) + lax.cummax(h, 0)) * y),
    "soft-max": lambda h, y: jnp.sum(jax.nn.logsumexp(h, 0)) + jnp.sum(jax.nn.softmax(h, 0) * y),
    "contrast": _contrast,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_function_over_the_batch_and_its_gradient_are_exact(name: str) -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return LOSSES[name](jnp.tanh(batch["x"] @ params["w"]) @ params["v"], batch["y"])

        return jax.value_and_grad(loss)(params)

    params, batch = {"w": real(8, 12), "v": real(12, 4)}, {"x": real(8, 8), "y": real(8, 4)}
    shard = xform.Shard(strict=False, collectives="explicit")
    parallel = xform.parallelize(step, xform.Plan(mesh={"fsdp": 8}, passes=[shard]))
    program = parallel.trace(params, batch)
    assert "shard_map" in primitives(program.jaxpr)
    assert not program.report.of("declined"), program.report
    for x, y in zip(
        *map(jax.tree.leaves, (parallel(params, batch), jax.jit(step)(params, batch))), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)  # sums of 64 terms, in another order


def _rounds(eqn: JaxprEqn) -> bool:
    """Whether an operation makes whole numbers of real ones: another order of a sum may make others."""
    dtypes = [v.aval.dtype for v in (*eqn.invars[:1], *eqn.outvars[:1])]
    return eqn.primitive.name == "convert_element_type" and jnp.issubdtype(dtypes[0], jnp.floating) > (
        jnp.issubdtype(dtypes[1], jnp.floating)
    )


@settings(max_examples=10)
@given(random_programs.programs(depth=1))
def test_random_programs_are_exact_on_parts(drawn: tuple[Callable[..., Any], list[Any]]) -> None:
    """Dimensions of 3 lie over one axis and those of 2 over the other."""
    f, args = drawn
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("three", "two"))
    axes = {3: "three", 2: "two"}
    shardings = [NamedSharding(mesh, PartitionSpec(*[axes.get(n) for n in jnp.shape(x)])) for x in args]
    program = alone(f, args)
    assume(not any(map(_rounds, equations(program))))
    outs = [None] * len(program.outvars)
    made = partitioned(program, staged(mesh), list(mesh.axis_names), shardings, outs, Report()).jaxpr
    results = jax.jit(lambda *xs: eval_jaxpr(made, *xs))(*args)
    for x, y in zip(results, jax.jit(lambda *xs: eval_jaxpr(program, *xs))(*args), strict=True):
        coarse = y.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=0.02 if coarse else 1e-5, atol=1e-5
        )
