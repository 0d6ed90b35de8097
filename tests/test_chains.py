"""Chains of one operation: rows taken whole, so that a norm does not grow with the number of layers."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.lax import stack, unstack

import xform
from tests.rows import WIDTH, X, agree, packed, seeded, through, weights
from xform.models import llama
from xform.state import Packed, Reordered

# Parts of an array, one by one.
READS = ("slice", "squeeze", "dynamic_slice", "unstack")


def params_of(layers: int) -> dict[str, Any]:
    """Layers of two weights with the same number of dimensions."""
    blocks = [
        {"up": seeded(i, WIDTH, 2 * WIDTH), "down": seeded(40 + i, 2 * WIDTH, WIDTH)} for i in range(layers)
    ]
    return {"embed": seeded(31, WIDTH, WIDTH), "layers": blocks}


def step_with(norm: Callable[[Any], Any]) -> Callable:
    """A step whose update depends on something of all its gradients."""

    def loss(params: Any, x: Any) -> Any:
        stacked = {name: stack([layer[name] for layer in params["layers"]]) for name in params["layers"][0]}
        layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x @ params["embed"], stacked)[0] ** 2)

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        size = norm(gradients)
        return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + size), params, gradients), size

    return step


def squares(gradients: Any) -> list[Any]:
    return [jnp.sum(g**2) for g in jax.tree.leaves(gradients)]


def finite(gradients: Any) -> list[Any]:
    return [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]


def largest(gradients: Any) -> Any:
    return jax.tree.reduce(jnp.maximum, jax.tree.map(lambda g: jnp.max(jnp.abs(g)), gradients))


def counts(found: Packed) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in found.jaxpr.eqns)


NORMS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda g: sum(squares(g)),
    "norm": optax.tree.norm,
    "zeros_multiplied": lambda g: math.prod(jnp.sum(g == 0, dtype=jnp.int32) for g in jax.tree.leaves(g)),
    "largest": largest,
    "smallest": lambda g: -jax.tree.reduce(jnp.minimum, jax.tree.map(lambda g: jnp.min(g), g)),
    "finite": lambda g: jax.tree.reduce(jnp.logical_and, finite(g)),
    "not_finite": lambda g: jax.tree.reduce(jnp.logical_or, [~x for x in finite(g)]),
    "zeros": lambda g: sum(jnp.sum(g == 0, dtype=jnp.int32) for g in jax.tree.leaves(g)),
    "stacked": lambda g: jnp.stack(squares(g)).sum(),
    "array": lambda g: jnp.all(jnp.array(finite(g))),
    "concatenated": lambda g: jnp.linalg.norm(jnp.concatenate([s[None] for s in squares(g)])),
}
ROUNDED = {"sum": ["a sum of 11 terms"], "norm": ["a sum of 11 terms"]}


@pytest.mark.parametrize("name", NORMS)
def test_what_is_computed_of_all_leaves_does_not_grow_with_the_layers(name: str) -> None:
    step = step_with(NORMS[name])
    three, five = (packed(step, params_of(layers), X) for layers in (3, 5))
    assert counts(three) == counts(five)
    assert not any(counts(five)[read] for read in READS)
    assert not five.left
    assert [each.what for each in five.reordered] == ROUNDED.get(name, [])


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("name", NORMS)
def test_what_is_computed_of_all_leaves_is_the_same_number(name: str) -> None:
    step, params = step_with(NORMS[name]), params_of(3)
    agree(packed(step, params, X), step, params, X)


def test_the_line_of_a_sum_in_another_order_is_told() -> None:
    found = packed(step_with(lambda g: sum(squares(g))), params_of(3), X)
    (told,) = found.reordered
    assert isinstance(told, Reordered)
    assert told.where.startswith("test_chains.py:")


def totals(add: Callable[[list[Any], Any], Any]) -> Callable:
    """A step that gives what it adds up of each layer's gradient, [n] scalars, and of x."""

    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x) ** 2))(ws)
        return [w - g for w, g in zip(ws, gradients, strict=True)], add(squares(gradients), jnp.sum(x))

    return step


def running(norms: list[Any], other: Any) -> Any:
    """All sums in between are results."""
    found = [other]
    for n in norms:
        found.append(found[-1] + n)
    return found


KEPT: dict[str, Callable[[list[Any], Any], Any]] = {
    "running": running,
    "not all": lambda norms, other: other + norms[0] + norms[1],
    "twice": lambda norms, other: norms[0] + norms[1] + norms[2] + norms[1],
    "other operations": lambda norms, other: (norms[0] + norms[1]) * norms[2],
    "scattered": lambda norms, other: (norms[0] + norms[1], norms[2] + other),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_chains_are_kept_in_their_order(name: str) -> None:
    step = totals(KEPT[name])
    found = packed(step, weights(), X)
    assert not found.left
    assert not found.reordered
    assert counts(found)["squeeze"] >= 2
    agree(found, step, weights(), X)


def test_a_sum_in_the_middle_that_is_read_stays_and_the_others_are_taken_whole() -> None:
    """The first layers' norm is a result as well; the second operation has all of its row."""

    def add(norms: list[Any], other: Any) -> Any:
        some = norms[0] + norms[1]
        doubled = [2 * n for n in norms]
        return some, some + other + doubled[0] + doubled[1] + doubled[2]

    found = packed(totals(add), weights(), X)
    assert [each.what for each in found.reordered] == ["a sum of 5 terms"]
    assert counts(found)["squeeze"] == 2
    agree(found, totals(add), weights(), X)


def test_elements_of_a_row_may_have_other_readers() -> None:
    """The norms are logged one by one, and as one."""
    step = totals(lambda norms, other: (norms, other + sum(norms)))
    found = packed(step, weights(), X)
    assert [each.what for each in found.reordered] == ["a sum of 4 terms"]
    assert not counts(found)["squeeze"]
    agree(found, step, weights(), X)


def test_a_balanced_sum_is_a_chain_too() -> None:
    step = totals(lambda norms, other: (norms[0] + norms[1]) + (norms[2] + norms[3]))
    found = packed(step, weights(4), X)
    assert len(found.reordered) == 1
    assert not counts(found)["squeeze"]
    agree(found, step, weights(4), X)


UNSAFE: dict[str, tuple[Callable[[list[Any], Any], Any], str]] = {
    "sum of bfloat16": (
        lambda norms, other: sum(n.astype(jnp.bfloat16) for n in norms),
        "in another order a sum of 3 of bfloat16 would be another number",
    ),
    "product": (
        lambda norms, other: other * math.prod(norms),
        "a product of floats in another order may overflow on the way",
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_another_order_would_change_is_kept_and_that_is_said(name: str) -> None:
    add, why = UNSAFE[name]
    step = totals(add)
    found = packed(step, weights(), X)
    assert not found.reordered
    assert [left.why for left in found.left] == [why]
    agree(found, step, weights(), X)


def test_the_largest_of_bfloat16_is_taken_whole() -> None:
    def add(norms: list[Any], other: Any) -> Any:
        return jax.tree.reduce(jnp.maximum, [n.astype(jnp.bfloat16) for n in norms])

    found = packed(totals(add), weights(), X)
    assert not found.left
    assert not counts(found)["squeeze"]
    agree(found, totals(add), weights(), X, tolerance=0)


def test_whole_arrays_are_summed_over_their_row() -> None:
    """The mean of all weights, as soups of models have it."""

    def step(ws: Any, x: Any) -> Any:
        y = through(stack(ws), x)
        new = [w * (1 + jnp.mean(y)) for w in ws]
        return new, sum(new) / len(new)

    found = packed(step, weights(), X)
    assert not found.left
    assert [each.what for each in found.reordered] == ["a sum of 3 terms"]
    agree(found, step, weights(), X)


def test_losses_that_the_layers_give_are_summed_at_once() -> None:
    def step(ws: Any, x: Any) -> Any:
        def value(ws: Any) -> Any:
            layer = lambda x, w: (jnp.tanh(x @ w), jnp.mean((x @ w) ** 2))  # noqa: E731
            y, losses = jax.lax.scan(layer, x, stack(ws))
            return jnp.mean(y) + sum(unstack(losses))

        value, gradients = jax.value_and_grad(value)(ws)
        return [w - g for w, g in zip(ws, gradients, strict=True)], value

    found = packed(step, weights(), X)
    assert not any(counts(found)[read] for read in READS)
    agree(found, step, weights(), X)


def test_the_report_tells_of_a_sum_in_another_order() -> None:
    """Norms that a step logs and clips by, of two layers of nine weights, and of three others."""
    step, args = llama.train_step(size="tiny", scan=False, layers=2)
    report = xform.parallelize(step, xform.Plan({}, [xform.Roll()])).trace(*args).report
    notes = [str(each) for each in report.of("did") if each.pass_name == "state" and "terms" in each.what]
    assert notes
    for note in notes:
        assert note.startswith(
            "state: took a sum of 21 terms row by row: another order of summation (training.py"
        )


@pytest.mark.parametrize("around", ["jit", "cond", "scan"])
def test_a_chain_in_a_body_takes_the_rows_that_come_in(around: str) -> None:
    def clipped(ws: Any, gradients: Any) -> Any:
        norm = jnp.sqrt(sum(squares(gradients)))
        return [w - g / (1 + norm) for w, g in zip(ws, gradients, strict=True)]

    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x) ** 2))(ws)
        if around == "jit":
            return jax.jit(clipped)(ws, gradients)
        if around == "cond":
            return jax.lax.cond(jnp.sum(x) > 0, clipped, lambda ws, _: ws, ws, gradients)
        return jax.lax.scan(lambda ws, _: (clipped(ws, gradients), None), ws, None, length=2)[0]

    found = packed(step, weights(), X)
    assert not found.left
    assert [each.what for each in found.reordered] == ["a sum of 3 terms"]
    agree(found, step, weights(), X)


def test_the_same_of_different_types_is_not_the_same() -> None:
    """A column of norms of arrays of two shapes, in the order in which they are stacked."""
    step = step_with(lambda g: jnp.max(jnp.stack(squares(g["layers"]))))
    found = packed(step, params_of(3), X)
    assert not found.left
    agree(found, step, params_of(3), X)
