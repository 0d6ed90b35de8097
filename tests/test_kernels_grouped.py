"""Products by expert: megablox against `ragged_dot`, whatever the sizes of the groups and of the tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tests.kernels_suite import SLICES, Case, agree, agree_in_shard_map, close, compiled
from xform.errors import PlanError
from xform.kernels.grouped import (
    GroupedMatmul,
    GroupedOuter,
    check,
    grouped_matmul,
    refused,
    tiles_of,
    vmem,
)
from xform.ops import apply

# A bfloat16 result is rounded to eight bits, and float32 sums go in another order.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7}

SHAPES: dict[str, tuple[tuple[int, int, int], list[int]]] = {
    "odd": ((10, 5, 7), [3, 0, 7]),
    "rows_left_over": ((13, 3, 5), [0, 4, 2]),
    "no_rows": ((7, 3, 5), [0, 0]),
    "aligned": ((16, 8, 128), [8, 8]),
    "too_many": ((7, 3, 5), [5, 4, 2]),
}


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return jnp.asarray(np.random.RandomState(seed).randn(*shape), dtype)


def case(kind: str, shape: str, dtype: str = "float32") -> Case:
    (m, k, n), groups = SHAPES[shape]
    sizes, x = jnp.array(groups, jnp.int32), numbers(m, k, dtype=dtype)
    if kind == "outer":
        op: Any = GroupedOuter(dtype, interpret=True)
        args = (x, numbers(m, n, dtype=dtype, seed=1), sizes)
    else:
        op = GroupedMatmul(dtype, interpret=True, transposed=kind == "transposed")
        w = (n, k) if op.transposed else (k, n)
        args = (x, numbers(len(groups), *w, dtype=dtype, seed=1), sizes)
    return Case(f"{kind}-{shape}-{dtype}", op, args, TOLERANCE[dtype])


CASES = [case(kind, shape) for kind in ("product", "transposed", "outer") for shape in SHAPES]
CASES += [case(kind, "odd", "bfloat16") for kind in ("product", "transposed", "outer")]


@pytest.mark.parametrize("each", CASES, ids=lambda c: c.name)
def test_the_kernel_computes_what_the_plain_form_does(each: Case) -> None:
    agree(each)


@pytest.mark.parametrize("kind", ["product", "outer"])
def test_each_of_a_batch_has_groups_of_its_own(kind: str) -> None:
    each = case(kind, "rows_left_over")
    args = [jnp.stack([x, x[::-1]]) for x in each.args]
    got = jax.jit(jax.vmap(lambda *xs: apply(each.op, *xs)))(*args)
    want = [each.op.plain(*(x[k] for x in args)) for k in range(2)]
    close(got, [jnp.stack(pair) for pair in zip(*want, strict=True)], each.tolerance)


@pytest.mark.parametrize(("kind", "cut"), [("product", "n"), ("transposed", "n"), ("outer", "kn")])
def test_columns_may_lie_over_devices(kind: str, cut: str) -> None:
    agree_in_shard_map(case(kind, "aligned"), cut)


@pytest.mark.parametrize("kind", ["product", "outer"])
@pytest.mark.parametrize("tiles", [(16, 128, 128), (32, 256, 128)])
def test_groups_meet_within_tiles_and_end_past_them(kind: str, tiles: tuple[int, int, int]) -> None:
    sizes = jnp.array([3, 0, 40, 16, 0], jnp.int32)
    op: Any = (GroupedMatmul if kind == "product" else GroupedOuter)("float32", tiles=tiles, interpret=True)
    other = numbers(5, 130, 140, seed=1) if kind == "product" else numbers(67, 140, seed=2)
    agree(Case(kind, op, (numbers(67, 130), other, sizes), TOLERANCE["float32"]))


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradients_are_those_of_ragged_dot(dtype: str, interpret: bool) -> None:
    (m, k, n), groups = SHAPES["rows_left_over"]
    sizes, x = jnp.array(groups, jnp.int32), numbers(m, k, dtype=dtype)
    w, dout = numbers(3, k, n, dtype=dtype, seed=1), numbers(m, n, dtype=dtype, seed=2)

    def run(product: Any) -> Any:
        out, back = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return out, *back(dout)

    got = run(lambda *args: grouped_matmul(*args, interpret=interpret))
    close(got, run(lax.ragged_dot), TOLERANCE[dtype])


def test_rows_without_a_group_are_zero() -> None:
    out = grouped_matmul(numbers(9, 3), numbers(2, 3, 5), jnp.array([2, 3], jnp.int32), interpret=True)
    assert not np.asarray(out[5:]).any() and np.asarray(out[:5]).all()


def test_a_result_may_be_wider_than_the_operands() -> None:
    x, w = numbers(9, 3, dtype="bfloat16"), numbers(2, 3, 5, dtype="bfloat16")
    sizes = jnp.array([2, 7], jnp.int32)
    got = grouped_matmul(x, w, sizes, dtype=jnp.float32, interpret=True)
    close([got], [lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)], TOLERANCE["float32"])


def test_dtypes_that_megablox_does_not_multiply_are_refused() -> None:
    x, w, sizes = numbers(9, 3, dtype="float16"), numbers(2, 3, 5), jnp.array([2, 7])
    assert "the rows are float16" in refused(x, w, sizes)
    assert refused(numbers(9, 3), w, sizes) == ""


def test_tiles_that_do_not_fit_are_an_error_that_names_them() -> None:
    with pytest.raises(PlanError, match=r"tiles = \(512, 4096, 4096\).*v5e gives a kernel 15"):
        check("product", "v5e", (512, 4096, 4096), jnp.bfloat16, jnp.bfloat16)
    with pytest.raises(PlanError, match="multiple of 16"):
        check("product", "v5e", (24, 128, 128), jnp.bfloat16, jnp.bfloat16)


@pytest.mark.parametrize("chip", SLICES)
@pytest.mark.parametrize("kind", ["product", "outer"])
def test_tiles_of_the_table_fit_and_are_no_longer_than_a_group(chip: str, kind: str) -> None:
    for dtype in ("bfloat16", "float32"):
        for m, k, n, groups in ((8192, 7168, 2048, 8), (4096, 2048, 14336, 64), (100, 60, 257, 3)):
            tiles = tiles_of(kind, chip, (m, k, n, groups), dtype, "float32")
            check(kind, chip, tiles, dtype, "float32")
            assert vmem(kind, tiles, dtype, "float32") < 32 << 20
            assert tiles[0] <= max(128, -(-m // groups) + 15)


@pytest.mark.slow  # libtpu compiles three kernels for two dtypes
@pytest.mark.parametrize("chip", SLICES)
def test_mosaic_compiles_forward_and_backward(chip: str) -> None:
    for dtype in ("bfloat16", "float32"):

        def both(x: Any, w: Any, dout: Any) -> Any:
            sizes = jnp.array([100, 0, 120], jnp.int32)
            out, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, chip=chip), x, w)
            return out, *back(dout)

        shapes = ((257, 200), (3, 200, 300), (257, 300))
        args = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
        _, kernels = compiled(chip, both, args, PartitionSpec())
        assert kernels == 3
