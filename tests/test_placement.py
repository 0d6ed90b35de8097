"""States and batches come to lie where the plan says, or, before that is known, where nothing overflows."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import targets_for_tests as targets
from xform import Plan, Shard, parallelize
from xform.sharding.placement import provisional

FN, (PARAMS, TOKENS) = targets.step()
PLAN = Plan({"fsdp": 4, "tensor": 2}, [Shard()])


def arrays():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(s.dtype), PARAMS)
    return params, rng.integers(0, 56, TOKENS.shape).astype(np.int32)


def specs(tree):
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def test_all_arguments_together_are_placed_without_a_trace_before():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, tokens = parallelize(FN, PLAN).place(*arrays())
    assert specs(params) == {"table": P("tensor", "fsdp"), "w": P("fsdp")}
    assert tokens.sharding.spec == P("fsdp")


def test_a_state_alone_is_placed_after_a_trace_on_shapes():
    step = parallelize(FN, PLAN)
    step.trace(PARAMS, TOKENS)
    host, _ = arrays()
    placed = step.place(host)
    assert specs(placed) == {"table": P("tensor", "fsdp"), "w": P("fsdp")}
    assert all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(host), strict=True)
    )


def test_a_state_alone_before_any_trace_is_placed_provisionally_with_a_warning():
    step = parallelize(FN, PLAN)
    host, tokens = arrays()
    with pytest.warns(UserWarning, match=r"train was not traced with.*Call .trace"):
        placed = step.place(host)
    assert specs(placed) == {"table": P(("fsdp", "tensor")), "w": P(("fsdp", "tensor"))}
    after, loss = step(placed, tokens)
    assert specs(after) == {"table": P("tensor", "fsdp"), "w": P("fsdp")}
    np.testing.assert_allclose(loss, FN(host, tokens)[1], rtol=1e-6)


def test_a_state_is_born_on_the_mesh():
    def init(key):
        return jax.tree.map(lambda s: jax.random.normal(key, s.shape, s.dtype), PARAMS)

    step = parallelize(FN, PLAN)
    step.trace(PARAMS, TOKENS)
    born = step.init(init, jax.random.key(3))
    assert specs(born) == {"table": P("tensor", "fsdp"), "w": P("fsdp")}
    assert all(s.data.size * 8 == born["table"].size for s in born["table"].addressable_shards)
    np.testing.assert_allclose(born["w"], init(jax.random.key(3))["w"], rtol=1e-6)


def test_the_state_that_comes_back_needs_no_second_compilation():
    step = parallelize(FN, PLAN, donate_argnums=0)
    params, tokens = step.place(*arrays())
    for _ in range(3):
        params, _ = step(params, tokens)
    assert step._jit._cache_size() == 1


def test_a_host_state_ends_where_the_plan_says_even_when_never_placed():
    after, _ = parallelize(FN, PLAN)(*arrays())
    assert specs(after) == {"table": P("tensor", "fsdp"), "w": P("fsdp")}


def test_an_error_of_the_function_is_not_taken_for_a_missing_argument():
    def wrong(params, tokens):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        parallelize(wrong, PLAN).place(*arrays())


def test_shardings_are_a_tree_like_the_arguments():
    (params, tokens), kwargs = parallelize(FN, PLAN).shardings(PARAMS, TOKENS)
    assert params["table"].spec == P("tensor", "fsdp") and tokens.spec == P("fsdp") and kwargs == {}


def test_provisional_layouts_take_the_dimension_that_splits_the_furthest():
    mesh = parallelize(FN, PLAN).mesh
    shapes = [(), (7,), (6, 12), (8, 100), (9, 11)]
    found = provisional([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], mesh)
    assert [s.spec for s in found] == [P(), P(), P(None, ("fsdp",)), P(("fsdp", "tensor")), P()]


def test_keys_and_scalars_are_placed():
    def fn(state, x):
        return state["key"], state["count"] + 1, x

    state = {"key": jax.random.key(0), "count": 0}
    placed, _ = parallelize(fn, PLAN).place(state, jnp.ones((8, 4)))
    assert placed["key"].sharding.spec == P() and int(placed["count"]) == 0
