"""Products by expert by tokamax's ragged dot (an extra): what `kernels.grouped` asks for, as it takes it.

    gmm(x, w, sizes, ...)     ->   tokamax.ops.tpu.RaggedDot(...)(x, w, sizes, ...)
    tgmm(x^T, y, sizes, ...)  ->   the same, contracted along rows

It descends from megablox, and is tiled alike. No dimension may be shorter than `LEAST`: shorter ones are
padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.trace import inline, plain_aval, trace_flat, typeof

LEAST = 128

Tiles = tuple[int, int, int]


def product(
    x: Any, w: Any, sizes: Any, dtype: Any, tiles: Tiles, *, transposed: bool, precision: str, interpret: bool
) -> Any:
    """x[m, k] times w[group, k, n], or w[group, n, k] where transposed. Rows past the groups are as they are
    found, as megablox's.
    """
    m, n = x.shape[0], w.shape[1 if transposed else 2]
    (tm, tk, tn), (to_m, to_k, to_n) = _whole((m, x.shape[1], n), tiles, interpret)
    x = _padded(x, (to_m, to_k))
    w = _padded(w, (w.shape[0], to_n, to_k) if transposed else (w.shape[0], to_k, to_n))
    numbers = _numbers((1, 2 if transposed else 1), grouped=True)
    # Transposed, it takes what is contracted for the product's n.
    config = (tm, tn, tk) if transposed else (tm, tk, tn)
    return _run(x, w, sizes, numbers, config, dtype, precision, interpret)[:m, :n]


def outer(x: Any, y: Any, sizes: Any, dtype: Any, tiles: Tiles, *, precision: str, interpret: bool) -> Any:
    """The sum over the rows of each group of x[m, k] times y[m, n]: [group, k, n]."""
    k, n = x.shape[1], y.shape[1]
    config, (to_m, to_k, to_n) = _whole((x.shape[0], k, n), tiles, interpret)
    x, y = _padded(x, (to_m, to_k)), _padded(y, (to_m, to_n))
    numbers = _numbers((0, 0), grouped=False)
    return _run(x, y, sizes, numbers, config, dtype, precision, interpret)[:, :k, :n]


def _run(
    x: Any, y: Any, sizes: Any, numbers: Any, tiles: Tiles, dtype: Any, precision: str, interpret: bool
) -> Any:
    from tokamax.ops import tpu

    config = tpu.RaggedDotConfig(tile_m=tiles[0], tile_k=tiles[1], tile_n=tiles[2])
    run = tpu.RaggedDot(config=config, interpret=interpret, bypass_device_check=True)

    def call(x: Any, y: Any, sizes: Any) -> Any:
        return run(
            x,
            y,
            group_sizes=sizes,
            ragged_dot_dimension_numbers=numbers,
            precision=precision or jax.config.jax_default_matmul_precision,  # it does not look itself
            preferred_element_type=jnp.dtype(dtype),
        )

    return (_interpreted if interpret else lambda f, *args: f(*args))(call, x, y, sizes.astype(jnp.int32))


def _interpreted(call: Callable[..., Any], *args: Any) -> Any:
    """A call as if on a TPU: the pipeline in the kernel asks how memory is tiled there, interpreted too."""
    chip = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=chip)):
        jaxpr = trace_flat(lambda *xs: [call(*xs)], [plain_aval(typeof(x)) for x in args], "ragged_dot")
    return inline(jaxpr, *args)[0]


def _numbers(contracted: tuple[int, int], grouped: bool) -> Any:
    """grouped: the second operand has a dimension of groups, its first."""
    left, right = contracted
    return lax.RaggedDotDimensionNumbers(
        (([left], [right]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0] if grouped else []
    )


def _whole(sizes: Tiles, tiles: Tiles, interpret: bool) -> tuple[Tiles, Tiles]:
    """The tiles, and the sizes padded: to what is taken, and, in the interpreter, which has no part of a tile
    in its pipelines, to whole tiles.
    """
    fitted = [LEAST if n < LEAST else t for n, t in zip(sizes, tiles, strict=True)]
    to = [-(-n // t) * t if interpret else max(n, LEAST) for n, t in zip(sizes, fitted, strict=True)]
    return (fitted[0], fitted[1], fitted[2]), (to[0], to[1], to[2])


def _padded(x: Any, to: tuple[int, ...]) -> Any:
    return jnp.pad(x, [(0, size - n) for size, n in zip(to, x.shape, strict=True)])
