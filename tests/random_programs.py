"""Random small programs: `programs()` draws a function and its arguments, for hypothesis.

A program is a list of steps over a pool of values. A step takes values from the pool and adds one: an
elementwise op, a matmul, a reduction, a reshape, a cast, an index; or a nest (jit, scan, while, cond, remat,
vmap, custom_jvp, custom_vjp, grad) around a short list of steps of its own, which may also read what is
outside. All values stay small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

SHAPES = ((), (3,), (5,), (3, 5), (5, 3), (2, 3, 5))
DTYPES = (np.float32, jnp.bfloat16, np.int32)
UNARY = (
    "tanh",
    "sin",
    "abs",
    "neg",
    "relu",
    "softmax",
    "weak",
    "sum",
    "transpose",
    "flat",
    "cumsum",
    "cast",
    "take",
)
BINARY = ("add", "mul", "max", "dot", "where", "concatenate")
NESTS = ("jit", "scan", "while", "fori", "cond", "remat", "vmap", "custom_jvp", "custom_vjp", "grad")
CONSTANT = np.linspace(0.1, 0.9, 5, dtype=np.float32)

Step = tuple[str, tuple[int, ...], Any]
"""An operation, the numbers of the values it takes (modulo the size of the pool), and a nest's own steps."""


def steps(depth: int) -> st.SearchStrategy[list[Step]]:
    """Lists of steps whose nests go `depth` deep."""
    number = st.integers(0, 30)
    leaf = st.tuples(st.sampled_from(UNARY + BINARY), st.tuples(number, number), st.none())
    if depth == 0:
        return st.lists(leaf, min_size=1, max_size=3)
    nest = st.tuples(st.sampled_from(NESTS), st.tuples(number, number), steps(depth - 1))
    return st.lists(st.one_of(leaf, nest), min_size=1, max_size=5)


@st.composite
def programs(draw: Any, depth: int = 2) -> tuple[Callable[..., list[Any]], list[Any]]:
    """A function from arrays to a list of arrays, and arguments for it, the last a Python scalar (weak)."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=3)
    )
    args: list[Any] = [_ramp(shape, dtype) for shape, dtype in kinds]
    args.append(draw(st.sampled_from([0.5, 2])))
    listing = draw(steps(depth))

    def program(*values: Any) -> list[Any]:
        pool = run(listing, list(values))
        return pool[len(values) :]

    return program, args


def run(listing: Sequence[Step], pool: list[Any]) -> list[Any]:
    """The pool with the results of the steps added to it."""
    pool = list(pool)
    for name, (i, j), inner in listing:
        x, y = pool[i % len(pool)], pool[j % len(pool)]
        pool.append(_bounded(_nest(name, inner, x, pool) if inner is not None else _op(name, x, y)))
    return pool


def _ramp(shape: tuple[int, ...], dtype: Any) -> Any:
    values = np.linspace(-1.0, 1.0, int(np.prod(shape)) or 1).reshape(shape)
    return jnp.asarray(values * (4 if np.issubdtype(dtype, np.integer) else 1), dtype)


def _bounded(x: Any) -> Any:
    """Large values made small, so that no list of steps overflows."""
    return jnp.clip(x, -8, 8)


def _op(name: str, x: Any, y: Any) -> Any:
    x, y = jnp.asarray(x), jnp.asarray(y)
    real = x if jnp.issubdtype(x.dtype, jnp.floating) else x * 0.25
    match name:
        case "tanh" | "sin":
            return getattr(jnp, name)(real)
        case "relu" | "softmax":
            return getattr(jax.nn, name)(real if x.ndim or name == "relu" else real[None])
        case "abs" | "neg":
            return getattr(jnp, name if name == "abs" else "negative")(x)
        case "weak":
            return x * 2.0 + 1
        case "sum":
            return jnp.sum(x, axis=0) if x.ndim else x + 1
        case "transpose":
            return x.T
        case "flat":
            return x.reshape(-1)
        case "cumsum":
            return jnp.cumsum(x.reshape(-1))
        case "cast":
            return x.astype(jnp.float32 if x.dtype != jnp.float32 else jnp.bfloat16)
        case "take":
            return jnp.take(x.reshape(-1), y.astype(jnp.int32), mode="clip") * CONSTANT[0]
        case "dot":
            a, b = x.reshape(-1, x.shape[-1] if x.ndim else 1), y.reshape(y.shape[0] if y.ndim else 1, -1)
            return a @ b if a.shape[1] == b.shape[0] else a @ a.T
        case "where":
            return jnp.where(x > 0, x, 0.5)
        case "concatenate":
            return jnp.concatenate([x.reshape(-1), y.reshape(-1)])
    y = jnp.broadcast_to(y, x.shape) if y.ndim <= x.ndim and _fits(y.shape, x.shape) else y.sum()
    return {"add": jnp.add, "mul": jnp.multiply, "max": jnp.maximum}[name](x, y)


def _fits(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))


def _nest(name: str, inner: Sequence[Step], x: Any, pool: list[Any]) -> Any:
    x = jnp.asarray(x)

    def body(x: Any) -> Any:
        """The steps on x, closed over the pool; the result has x's shape and dtype, and is differentiable."""
        result = run(inner, [x, *pool])[-1]
        scale = jnp.tanh(jnp.sum(result.astype(jnp.float32))) + CONSTANT.mean()
        return (x * scale).astype(x.dtype)

    rows = x if x.ndim else x[None]
    match name:
        case "jit":
            return jax.jit(body)(x)
        case "remat":
            return jax.checkpoint(body)(x)
        case "scan":
            return jax.lax.scan(lambda c, row: (body(c), body(c) + row.sum().astype(c.dtype)), x, rows)[1]
        case "while":
            return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, body(s[1])), (0, x))[1]
        case "fori":
            return jax.lax.fori_loop(0, 2, lambda i, x: body(x) + i.astype(x.dtype), x)
        case "cond":
            return jax.lax.cond(x.sum() > 0, body, lambda x: x, x)
        case "vmap":
            return jax.vmap(body)(rows)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return body(x)
    if name == "custom_jvp":
        rule = jax.custom_jvp(body)
        rule.defjvp(lambda primals, tangents: (body(*primals), jnp.tanh(tangents[0])))
        return rule(x)
    if name == "custom_vjp":
        backward = jax.custom_vjp(body)
        backward.defvjp(lambda x: (body(x), x), lambda x, g: (jnp.tanh(g) * x,))
        return backward(x)
    return jax.grad(lambda x: jnp.sum(body(x).astype(jnp.float32)))(x)
