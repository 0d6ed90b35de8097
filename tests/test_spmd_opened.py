"""Manual regions that a program brings itself, opened into the one that everything is in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.shards import grid
from xform import Plan, PlanError, Shard, parallelize
from xform.higher_order import equations

SIZES = {"fsdp": 4, "tensor": 2}
RNG = np.random.default_rng(0)
PARAMS = {
    "up": RNG.normal(size=(16, 24)).astype(np.float32) / 8,
    "down": RNG.normal(size=(24, 12)).astype(np.float32) / 8,
}
X = RNG.normal(size=(32, 16)).astype(np.float32)


def product(x, w, axes, check_vma):
    """x @ w by hand, over the tensor axis, with one of each collective on the way."""

    def body(x, w):
        y = lax.psum(x @ w, "tensor")
        whole = lax.all_gather(y, "tensor", axis=1, tiled=True)
        again = lax.psum_scatter(whole, "tensor", scatter_dimension=1, tiled=True)
        turned = lax.ppermute(again, "tensor", [(0, 1), (1, 0)])
        twice = lax.all_to_all(lax.all_to_all(turned, "tensor", 0, 1, tiled=True), "tensor", 1, 0, tiled=True)
        twice, _ = lax.scan(lambda c, _: (jnp.tanh(c), None), twice, None, length=2)
        return twice * (1.0 + lax.axis_index("tensor"))

    rows = "fsdp" if "fsdp" in axes else None
    return jax.shard_map(
        body,
        mesh=grid(SIZES),
        in_specs=(P(rows, "tensor"), P("tensor")),
        out_specs=P(rows, "tensor"),
        axis_names=set(axes),
        check_vma=check_vma,
    )(x, w)


def step(axes, check_vma=True):
    def loss(params, x):
        y = product(jnp.tanh(x @ params["up"]), params["down"], axes, check_vma)
        return jnp.mean(y**2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    return step


def explicit(**options):
    return Plan(SIZES, [Shard(strict=False, collectives="explicit", **options)])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [("tensor",), ("fsdp", "tensor")], ids="+".join)
def test_a_step_with_a_region_of_its_own_is_that_of_one_region(axes, check_vma):
    fn = step(axes, check_vma)
    parallel = parallelize(fn, explicit())
    program = parallel.trace(PARAMS, X)
    (region,) = [e for e in equations(program.jaxpr) if e.primitive.name == "shard_map"]
    assert region.params["newly_manual_axes"] == {"fsdp", "tensor"}
    # Over `tensor` alone, the author's rows are still those of one device along `fsdp`.
    products = [
        e.outvars[0].aval.shape for e in equations(program.jaxpr) if e.primitive.name == "dot_general"
    ]
    assert (8, 12) in products
    assert "whole values" not in str(program.report)
    wanted, found = jax.jit(fn)(PARAMS, X), parallel(PARAMS, X)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_region_over_an_axis_that_is_left_to_the_compiler_is_declined():
    says = "is over 'tensor', which the plan leaves to the compiler"
    with pytest.raises(PlanError, match=says):
        parallelize(step(("tensor",)), explicit(automatic=["tensor"])).trace(PARAMS, X)


def test_a_collective_in_groups_is_declined():
    def fn(x):
        def body(x):
            return lax.all_gather(x, "fsdp", axis_index_groups=[[0, 1], [2, 3]], tiled=True)

        return jax.shard_map(
            body, mesh=grid(SIZES), in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
        )(x)

    with pytest.raises(PlanError, match=r"has a collective in groups, at test_spmd_opened.py:\d+"):
        parallelize(lambda w, x: (fn(x) @ w["up"]).sum(), explicit()).trace(PARAMS, X)
