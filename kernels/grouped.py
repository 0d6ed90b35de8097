"""The product of sorted tokens with the weights of the expert of each: megablox in place of `ragged_dot`.

    out[m,n] = operation[grouped_matmul] x[m,k] w[x,k,n] sizes[x]

Rows 0 to sizes[0] are multiplied with w[0], the next sizes[1] with w[1], and so on; rows past the sum of the
sizes are zero. Three operations: this one, the same with the weights transposed (the gradient of the rows),
and the grouped outer product (the gradient of the weights), all of JAX's kernels `gmm` and `tgmm`
(jax.experimental.pallas.ops.tpu.megablox), or of tokamax's (`kernels.tokamax_grouped`). They want whole tiles
of rows and leave rows without a group as they find them, so rows are padded, and those rows made zero. Groups
lie along m, so it is k and n that may lie over devices; of k there are terms of a sum then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from xform.errors import PlanError
from xform.kernels import tokamax_grouped
from xform.ops import apply
from xform.trace import without_vma

Tiles = tuple[int, int, int]

DTYPES = ("bfloat16", "float32")
"""What megablox multiplies."""

LANES = 128
"""The multiple that the last dimension of a block is of, unless it is the array's."""

SCOPED = {"v5e": 16 << 20, "v5p": 16 << 20, "v6e": 32 << 20}
"""Bytes of VMEM that the compiler gives a kernel that asks for no other limit, as megablox does."""

SPARE = 1 << 20
"""Bytes of it that are left to the compiler: megablox took up to 0.6 MiB more than `vmem` says."""

# The longest tiles (m, k, n), of rows with weights and of the weights' gradient.
# The matrix unit is busy in 92 % (product) and 73 % (outer) of the scheduled bundles with those of v5e, and
# each byte that is read is used in more operations than the chip has for a byte of its memory's bandwidth.
PRODUCT: dict[str, Tiles] = {"v5e": (512, 1024, 1024), "v5p": (512, 1024, 1024), "v6e": (512, 2048, 2048)}
OUTER: dict[str, Tiles] = {"v5e": (512, 1024, 512), "v5p": (512, 1024, 512), "v6e": (512, 1024, 2048)}
OTHER = "v5e"
"""The chip whose row is taken for one that has none."""


@dataclasses.dataclass(frozen=True)
class _Grouped:
    """What the three operations share. dtype: of the result. chip: "v5e". tiles: (m, k, n), in place of those
    of the table. precision: of float32 products, as jax.default_matmul_precision takes it; "": what is set.
    library: whose kernels, "jax" or "tokamax".
    """

    dtype: str
    chip: str = OTHER
    tiles: Tiles | None = None
    precision: str = ""
    interpret: bool = False
    library: str = "jax"

    def _precise(self) -> Any:
        return jax.default_matmul_precision(self.precision or None)

    def _tiles(self, kind: str, sizes: Sequence[int], dtype: Any) -> Tiles:
        """The tiles of the table, or those asked for, no longer than the operands."""
        if self.tiles is None:
            return tiles_of(kind, self.chip, sizes, dtype, self.dtype)
        check(kind, self.chip, self.tiles, dtype, self.dtype)
        return self.tiles[0], min(self.tiles[1], sizes[1]), min(self.tiles[2], sizes[2])


@dataclasses.dataclass(frozen=True)
class GroupedMatmul(_Grouped):
    """x[m,k], w[x,k,n], sizes[x] -> out[m,n]; transposed: the weights are w[x,n,k]."""

    transposed: bool = False

    name = "grouped_matmul"
    results = ("mn",)
    cut = "n"
    sums = "k"
    grouped = "m"
    groups = "x"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("mk", "xnk" if self.transposed else "xkn", "x")

    def plain(self, *args: jax.Array) -> Sequence[jax.Array]:
        x, w, sizes = args
        with self._precise():
            return (_ragged(x, w, sizes, (1, 2 if self.transposed else 1), self.dtype),)

    def kernel(self, *args: jax.Array) -> Sequence[jax.Array]:
        x, w, sizes = args
        (m, k), n = x.shape, w.shape[1 if self.transposed else 2]
        if not m * k * n:
            return (jnp.zeros((m, n), self.dtype),)
        tiles = self._tiles("product", (m, k, n, w.shape[0]), x.dtype)
        ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), m)
        x = _pad(x, tiles[0])
        given: Any = (x, w, jnp.diff(ends, prepend=0), jnp.dtype(self.dtype), tiles)
        with self._precise(), without_vma():
            if self.library == "tokamax":
                out = tokamax_grouped.product(
                    *given, transposed=self.transposed, precision=self.precision, interpret=self.interpret
                )
            else:
                out = gmm(*given, transpose_rhs=self.transposed, interpret=self.interpret)
        rows = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
        return (jnp.where(rows < ends[-1], out, jnp.zeros((), out.dtype))[:m],)


@dataclasses.dataclass(frozen=True)
class GroupedOuter(_Grouped):
    """x[m,k], y[m,n], sizes[x] -> out[x,k,n]: the sum of x times y over the rows of each group."""

    name = "grouped_outer"
    operands = ("mk", "mn", "x")
    results = ("xkn",)
    cut = "kn"
    grouped = "m"
    groups = "x"

    def plain(self, *args: jax.Array) -> Sequence[jax.Array]:
        x, y, sizes = args
        with self._precise():
            return (_ragged(x, y, sizes, (0, 0), self.dtype),)

    def kernel(self, *args: jax.Array) -> Sequence[jax.Array]:
        x, y, sizes = args
        (m, k), n = x.shape, y.shape[1]
        if not m * k * n:
            return (jnp.zeros((sizes.shape[0], k, n), self.dtype),)
        tiles = self._tiles("outer", (m, k, n, sizes.shape[0]), x.dtype)
        ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32)), m)
        x, y = _pad(x, tiles[0]), _pad(y, tiles[0])
        given: Any = (y, jnp.diff(ends, prepend=0), jnp.dtype(self.dtype), tiles)
        with self._precise(), without_vma():
            if self.library == "tokamax":
                out = tokamax_grouped.outer(x, *given, precision=self.precision, interpret=self.interpret)
            else:
                out = tgmm(x.T, *given, interpret=self.interpret)
        return (out,)


# ---------------------------------------------------------------- as ragged_dot


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    dtype: Any = None,
    chip: str = OTHER,
    tiles: Tiles | None = None,
    precision: str = "",
    interpret: bool = False,
    library: str = "jax",
) -> jax.Array:
    """`lax.ragged_dot(x, w, sizes)` as an operation, with a gradient that is two.

    x[m,k], w[x,k,n], sizes[x] integers -> [m,n], of `dtype`: that of the operands, if none is given.
    """
    wanted = str(jnp.dtype(dtype or jnp.result_type(x, w)))
    return _product(GroupedMatmul(wanted, chip, tiles, precision, interpret, library), x, w, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(op: GroupedMatmul, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    out: jax.Array = apply(op, x, w, sizes)[0]
    return out


def _forward(op: GroupedMatmul, x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _product(op, x, w, sizes), (x, w, sizes)


def _backward(op: GroupedMatmul, saved: Any, dout: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    # A gradient in float32 would have megablox multiply in float32 what the program multiplied narrow.
    dout = dout.astype(jnp.result_type(x, w))
    how = (op.chip, op.tiles, op.precision, op.interpret, op.library)
    rows, weights = GroupedMatmul(str(x.dtype), *how, transposed=True), GroupedOuter(str(w.dtype), *how)
    return apply(rows, dout, w, sizes)[0], apply(weights, x, dout, sizes)[0], None


_product.defvjp(_forward, _backward)


def refused(x: Any, w: Any, sizes: Any) -> str:
    """Why these operands (anything with shape and dtype) are not for the kernel; "" where they are."""
    for what, each in (("rows", x), ("weights", w)):
        if str(each.dtype) not in DTYPES:
            return f"megablox takes {' and '.join(DTYPES)}, the {what} are {each.dtype}"
    if len(x.shape) != 2 or len(w.shape) != 3 or len(sizes.shape) != 1:
        return f"megablox takes [m, k], [x, k, n] and [x], these are {x.shape}, {w.shape} and {sizes.shape}"
    return ""


# ---------------------------------------------------------------- tiles


def tiles_of(kind: str, chip: str, sizes: Sequence[int], dtype: Any, out: Any) -> Tiles:
    """The tiles of a product ("product") or of the weights' gradient ("outer"), of sizes (m, k, n, groups).

    Those of the table, no longer than the operands; nor, in m, than a group has rows on average, since a tile
    in which several groups meet is computed for each. Of tiles of at least half that many rows the longest
    that divides m is taken; where there is none, rows are padded. k and n are halved until VMEM holds all.
    """
    m, k, n, groups = sizes
    table = PRODUCT if kind == "product" else OUTER
    tm, tk, tn = table.get(chip, table[OTHER])
    rows = 32 // jnp.dtype(dtype).itemsize
    tm = min(tm, max(LANES, _up(-(-m // groups), rows)), _up(m, rows))
    tm = next((t for t in range(tm, tm // 2 - 1, -rows) if m % t == 0), tm)
    tk, tn = min(tk, k), min(tn, n)
    while vmem(kind, (tm, tk, tn), dtype, out) > _given(chip):
        tk, tn = (_up(tk // 2, LANES), tn) if tk > tn else (tk, _up(tn // 2, LANES))
    return tm, tk, tn


def vmem(kind: str, tiles: Tiles, dtype: Any, out: Any) -> int:
    """Bytes of VMEM that a kernel of these tiles takes: two buffers of each block, the sum in float32 and, in
    "outer", the operands masked in float32.
    """
    tm, tk, tn = (_up(tiles[0], 8), _up(tiles[1], LANES), _up(tiles[2], LANES))
    size, wide = jnp.dtype(dtype).itemsize, jnp.dtype(out).itemsize
    if kind == "product":
        return 2 * size * (tm * tk + tk * tn) + 2 * wide * tm * tn + 4 * tm * tn
    return 2 * size * tm * (tk + tn) + 2 * wide * tk * tn + 4 * tk * tn + 4 * tm * (tk + tn)


def check(kind: str, chip: str, tiles: Tiles, dtype: Any, out: Any) -> None:
    """PlanError where tiles that were asked for don't fit into the chip's VMEM, or are none."""
    wanted = f"tiles = {tiles} (m, k, n)"
    rows = 32 // jnp.dtype(dtype).itemsize
    if min(tiles) < 1 or tiles[0] % rows:
        raise PlanError(f"{wanted}: m has to be a multiple of {rows}, for {jnp.dtype(dtype)}")
    taken, given = vmem(kind, tiles, dtype, out), _given(chip)
    if taken > given:
        raise PlanError(
            f"{wanted} take {taken / 2**20:.1f} MiB of VMEM in the {kind}, and {chip} gives a kernel "
            f"{given / 2**20:.0f}: make them smaller"
        )


def _given(chip: str) -> int:
    return SCOPED.get(chip, SCOPED[OTHER]) - SPARE


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: jax.Array, tile: int) -> jax.Array:
    """With rows of zeros up to a multiple of the tile."""
    return jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))


def _ragged(
    x: jax.Array, y: jax.Array, sizes: jax.Array, contracted: tuple[int, int], dtype: str
) -> jax.Array:
    """The grouped product in plain JAX, of rows with weights; where m is contracted, of each group's rows."""
    left, right = contracted
    numbers = lax.RaggedDotDimensionNumbers((((left,), (right,)), ((), ())), (0,), () if left == 0 else (0,))
    made: jax.Array = lax.ragged_dot_general(x, y, sizes, numbers, preferred_element_type=jnp.dtype(dtype))
    return made
