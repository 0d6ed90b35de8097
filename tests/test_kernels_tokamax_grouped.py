"""Products by expert by tokamax: its kernels against `ragged_dot`, and in a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from tests.kernels_suite import SLICES, Case, agree, agree_in_shard_map, close, compiled
from tests.test_kernels_grouped import CASES, SHAPES, TOLERANCE, case, numbers
from xform import Kernels, Plan, parallelize
from xform.higher_order import equations
from xform.kernels.grouped import grouped_matmul
from xform.ops import operation_of

pytest.importorskip("tokamax")


def by_tokamax(each: Case) -> Case:
    return dataclasses.replace(each, op=dataclasses.replace(each.op, library="tokamax"))  # type: ignore[type-var]


@pytest.mark.parametrize("each", CASES, ids=lambda c: c.name)
def test_the_kernel_computes_what_the_plain_form_does(each: Case) -> None:
    agree(by_tokamax(each))


@pytest.mark.parametrize(("kind", "cut"), [("product", "n"), ("transposed", "n"), ("outer", "kn")])
def test_columns_may_lie_over_devices(kind: str, cut: str) -> None:
    agree_in_shard_map(by_tokamax(case(kind, "aligned")), cut)


@pytest.mark.parametrize("kind", ["product", "transposed", "outer"])
def test_tiles_need_not_divide_what_they_tile(kind: str) -> None:
    sizes, x = jnp.array([3, 0, 120, 16, 100], jnp.int32), numbers(300, 200)
    other = numbers(300, 260, seed=1) if kind == "outer" else numbers(5, 200, 260, seed=1)
    other = other.mT if kind == "transposed" else other
    op: Any = dataclasses.replace(by_tokamax(case(kind, "odd")).op, tiles=(128, 128, 256))  # type: ignore[type-var]
    agree(Case(kind, op, (x, other, sizes), TOLERANCE["float32"]))


def test_value_and_gradients_are_those_of_ragged_dot_under_a_plan() -> None:
    (m, k, n), groups = SHAPES["rows_left_over"]
    sizes, x, w = jnp.array(groups, jnp.int32), numbers(m, k), numbers(3, k, n, seed=1)

    def run(x: Any, w: Any, sizes: Any) -> Any:
        return jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(lax.ragged_dot(x, w, sizes))), (0, 1))(x, w)

    kernels = Kernels(interpret=True, library={"experts": "tokamax"})
    step = parallelize(run, Plan({"data": 1}, [kernels]), devices=jax.devices()[:1])
    program = step.trace(x, w, sizes)
    ops: list[Any] = [op for eqn in equations(program.jaxpr) if (op := operation_of(eqn)) is not None]
    assert [op.library for op in ops] == ["tokamax"] * 3
    assert "tokamax's ragged dot" in str(program.report)
    close(jax.tree.leaves(step(x, w, sizes)), jax.tree.leaves(run(x, w, sizes)), TOLERANCE["float32"])


def test_products_are_as_precise_as_they_are_asked_to_be() -> None:
    def precisions(**options: Any) -> set[Any]:
        op: Any = dataclasses.replace(by_tokamax(case("product", "odd")).op, **options)  # type: ignore[type-var]
        found = equations(jax.make_jaxpr(op.kernel)(*case("product", "odd").args))
        return {str(e.params["precision"]) for e in found if e.primitive.name == "dot_general"}

    assert all("HIGHEST" in p for p in precisions(precision="highest"))
    with jax.default_matmul_precision("highest"):
        assert all("HIGHEST" in p for p in precisions())


@pytest.mark.slow  # libtpu compiles three kernels for two dtypes
@pytest.mark.parametrize("chip", SLICES)
def test_mosaic_compiles_forward_and_backward(chip: str) -> None:
    for dtype in ("bfloat16", "float32"):

        def both(x: Any, w: Any, dout: Any) -> Any:
            sizes = jnp.array([100, 0, 120], jnp.int32)
            run = lambda x, w: grouped_matmul(x, w, sizes, chip=chip, library="tokamax")  # noqa: E731
            out, back = jax.vjp(run, x, w)
            return out, *back(dout)

        shapes = ((257, 200), (3, 200, 300), (257, 300))
        args = [jax.ShapeDtypeStruct(s, np.dtype(dtype)) for s in map(tuple, shapes)]
        _, kernels = compiled(chip, both, args, PartitionSpec())
        assert kernels == 3
