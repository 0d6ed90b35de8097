"""Regions: what works element by element, where it ends, and that slices of it give the same numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xform.regions import Region, find_regions, in_slices, is_sliced, run_slice
from xform.trace import Jaxpr, check_jaxpr, eval_jaxpr, trace_flat

SHAPE = (3, 5, 7)


def traced(fn: Callable, *shapes: tuple[int, ...]) -> Jaxpr:
    return jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def found(fn: Callable, *shapes: tuple[int, ...], starts: Sequence[int]) -> list[tuple[list[str], int]]:
    """For each region the primitives in it and how many of the starts."""
    jaxpr = traced(fn, *shapes)
    return [
        ([jaxpr.eqns[i].primitive.name for i in region.numbers], len(region.starts))
        for region in find_regions(jaxpr, [jaxpr.invars[i] for i in starts])
    ]


def momentum(m: Any, g: Any, w: Any) -> Any:
    m = 0.9 * m + g
    return m, w - 0.1 * m


def test_an_update_is_a_region_with_what_is_computed_for_it_alone() -> None:
    def clipped(m: Any, g: Any, w: Any) -> Any:
        scale = jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(g * g)))
        return momentum(m, (g * scale).astype(jnp.float32), w)

    ((primitives, starts),) = found(clipped, SHAPE, SHAPE, SHAPE, starts=[0])
    assert starts == 1
    assert sorted(primitives) == ["add", "mul", "mul", "mul", "sub"]  # the scaled gradient, and not its norm


def test_two_moments_that_meet_are_one_region_and_two_weights_are_two() -> None:
    def adam(m: Any, v: Any, g: Any, w: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return m, v, w - m / (jnp.sqrt(v) + 1e-8)

    assert [starts for _, starts in found(adam, *[SHAPE] * 4, starts=[0, 1])] == [2]

    def both(m: Any, g: Any, w: Any, n: Any, h: Any, u: Any) -> Any:
        return momentum(m, g, w), momentum(n, h, u)

    assert [starts for _, starts in found(both, *[SHAPE] * 3, *[(2, 5)] * 3, starts=[0, 3])] == [1, 1]


def test_a_region_ends_where_it_would_need_itself() -> None:
    def trusted(m: Any, g: Any, w: Any) -> Any:
        m = 0.9 * m + g
        return m, w - m * (jnp.sum(w * w) / jnp.sum(m * m))

    ((primitives, _),) = found(trusted, SHAPE, SHAPE, SHAPE, starts=[0])
    assert sorted(primitives) == ["add", "mul"]

    def crossed(m: Any, n: Any) -> Any:
        m, n = 0.9 * m, 0.9 * n
        a = m + jnp.sum(n)  # needs the other region
        return a, n * jnp.sum(a)  # would need this one, which needs the other

    first, second = found(crossed, SHAPE, SHAPE, starts=[0, 1])
    assert [sorted(first[0]), sorted(second[0])] == [["add", "mul"], ["mul"]]


def test_regions_that_need_one_another_do_not_join() -> None:
    def joined(m: Any, n: Any) -> Any:
        m, n = 0.9 * m, 0.9 * n
        n = n * jnp.sum(m)
        return m + n

    parts = found(joined, SHAPE, SHAPE, starts=[0, 1])
    assert [starts for _, starts in parts] == [1, 1]
    assert sorted(parts[1][0]) == ["mul", "mul"]


def test_a_start_that_is_read_otherwise_too_hinders_nothing() -> None:
    """A weight goes into the model, whose gradient comes back, before it is updated."""

    def step(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.einsum("abc,xc->abx", w.astype(jnp.bfloat16), x))))(w)
        return momentum(m, g, w)

    jaxpr = traced(step, SHAPE, SHAPE, (2, 7))
    (region,) = find_regions(jaxpr, [jaxpr.invars[0], jaxpr.invars[1]])
    assert len(region.starts) == 2
    names = [jaxpr.eqns[i].primitive.name for i in region.numbers]
    assert "dot_general" not in names and names[-1] == "sub"
    casts = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "convert_element_type"]
    assert casts[0] not in region.numbers  # the model's


def test_what_is_no_elementwise_operation_is_not_sliced() -> None:
    for fn in (jnp.cumsum, jnp.sort, jnp.flip, jnp.transpose, jnp.sum):
        jaxpr = traced(fn, (5, 7))
        assert not any(is_sliced(eqn) for eqn in jaxpr.eqns), fn
    (eqn,) = traced(lambda x: jnp.broadcast_to(x, (3, 5)), ()).eqns
    assert is_sliced(eqn)
    assert not is_sliced(traced(lambda x: jnp.broadcast_to(x, (3, 5)), (5,)).eqns[0])


def sliced(jaxpr: Jaxpr, region: Region, axis: int, size: int) -> Jaxpr:
    """A program that is all one region, run in slices."""

    def run(*args: Any) -> list[Any]:
        whole = dict(zip(jaxpr.invars, args, strict=True))

        def body(take: Callable, now: Any) -> list[Any]:
            env = {v: take(x) if x.shape else x for v, x in whole.items()}
            done = run_slice(jaxpr.eqns, env, region.shape, axis, size)
            return [done[v] for v in jaxpr.outvars]

        return in_slices([jnp.zeros(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars], axis, size, body)

    return trace_flat(run, [v.aval for v in jaxpr.invars], "sliced")


@pytest.mark.parametrize(("axis", "size"), [(0, 1), (0, 2), (1, 5), (2, 7)])
def test_a_region_in_slices_gives_the_same_numbers(axis: int, size: int) -> None:
    shape = (4, 5, 21)

    def update(m: Any, g: Any, rate: Any) -> Any:
        rates = jax.lax.broadcast_in_dim(rate, shape, ())
        m = jax.lax.select(g > 0, 0.9 * m + g, rates)
        return m, jax.lax.clamp(-1.0, m / rate, 1.0).astype(jnp.bfloat16)

    jaxpr = traced(update, shape, shape, ())
    (region,) = find_regions(jaxpr, [jaxpr.invars[0]])
    assert len(region.numbers) == len(jaxpr.eqns)
    args = [*(jax.random.normal(jax.random.key(i), shape) for i in range(2)), jnp.float32(0.3)]
    result = sliced(jaxpr, region, axis, size)
    check_jaxpr(result)
    for ours, theirs in zip(eval_jaxpr(result, *args), eval_jaxpr(jaxpr, *args), strict=True):
        assert ours.dtype == theirs.dtype
        assert jnp.array_equal(ours, theirs)
