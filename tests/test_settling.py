"""Which rows hold, and which do not and where that is said; what is beside them stays as it was."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.lax import stack, unstack

from tests.rows import (
    ROWS,
    WIDTH,
    X,
    agree,
    descend,
    packed,
    seeded,
    sizes,
    through,
    weights,
)
from xform.trace import name_stack, source_line


def test_a_part_of_a_row_is_sliced_from_it_and_that_is_said() -> None:
    def step(ws: Any, x: Any) -> Any:
        value = lambda ws: jnp.sum(through(stack(ws[1:3]), through(stack(ws), x)))  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(value)(ws))

    found = packed(step, weights(4), X)
    assert found.inputs == ((0, 1, 2, 3), (4,))
    assert ("2 of float32[24,24] stacked for `stack`", "they are in another row, or in another order") in [
        (left.what, left.why) for left in found.left
    ]
    agree(found, step, weights(4), X)


def test_the_first_of_two_orders_is_the_row() -> None:
    def step(ws: Any, x: Any) -> Any:
        first = through(stack(ws), x)
        return through(stack(ws[::-1]), first)

    found = packed(step, weights(), X)
    assert found.inputs == ((0, 1, 2), (3,))
    assert [left.why for left in found.left][:1] == ["they are in another row, or in another order"]
    agree(found, step, weights(), X)


def test_two_loops_of_their_own_weights_have_two_rows() -> None:
    def step(ws: Any, vs: Any, x: Any) -> Any:
        value = lambda p: jnp.sum(through(stack(p[1]), through(stack(p[0]), x)) ** 2)  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, (ws, vs), jax.grad(value)((ws, vs)))

    found = packed(step, weights(4), weights(), X)
    assert found.inputs == ((0, 1, 2, 3), (4, 5, 6), (7,))
    assert found.outputs == ((0, 1, 2, 3), (4, 5, 6))
    agree(found, step, weights(4), weights(), X)


def test_what_is_computed_from_one_another_is_no_row() -> None:
    """Each weight is updated by its neighbour's new value."""

    def step(ws: Any, x: Any) -> Any:
        gradients, last = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws), jnp.zeros_like(ws[0])
        new = []
        for w, g in zip(ws, gradients, strict=True):
            last = w - 0.1 * g + 0.5 * last
            new.append(last)
        return new

    found = packed(step, weights(), X, state={0: 0, 1: 1, 2: 2})
    assert found.inputs == ((0, 1, 2), (3,))
    assert found.outputs == ((0, 1, 2),)
    assert found.left
    agree(found, step, weights(), X)


def test_a_running_sum_is_no_row_and_no_obstacle() -> None:
    """The sum runs over the leaves of two rows, in turns, after some of its own."""

    def step(ws: Any, vs: Any, x: Any) -> Any:
        value = lambda p: jnp.sum(through(stack(p[1]), through(stack(p[0]), x)) ** 2)  # noqa: E731
        first, second = jax.grad(value)((ws, vs))
        total = jnp.sum(x) + 1.0
        total = total + jnp.sum(x * 2)
        for a, b in zip(first, second, strict=True):
            total = total + jnp.sum(a**2)
            total = total + jnp.sum(b**2)
        return jax.tree.map(lambda w, g: w - g / total, (ws, vs), (first, second)), total

    found = packed(step, weights(), weights(), X)
    assert not found.left
    assert sizes(found.inputs) == [3, 3, 1]
    agree(found, step, weights(), weights(), X)


def test_a_cycle_between_rows_is_broken() -> None:
    """b0 waits for a1, and a2 for b1: neither can be one operation."""

    def step(ws: Any, x: Any) -> Any:
        g = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        a, b = [jnp.sin(g[0])], []
        a.append(jnp.sin(g[1]))
        b.append(jnp.cos(a[1] + g[0]))
        b.append(jnp.cos(a[0] + g[1]))
        a.append(jnp.sin(b[1] + g[2]))
        b.append(jnp.cos(a[2] + g[2]))
        return [w - u - v for w, u, v in zip(ws, a, b, strict=True)]

    found = packed(step, weights(), X, state={0: 0, 1: 1, 2: 2})
    assert found.inputs == found.outputs + ((3,),)
    assert found.left
    agree(found, step, weights(), X)


def test_an_update_that_differs_between_layers_is_stacked_at_the_end_and_that_is_said() -> None:
    """The first layer is frozen."""

    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        return [ws[0], *(w - 0.1 * g for w, g in zip(ws[1:], gradients[1:], strict=True))]

    found = packed(step, weights(), X, state={0: 0, 1: 1, 2: 2})
    assert (found.inputs, found.outputs) == (((0, 1, 2), (3,)), ((0, 1, 2),))
    stacked = [left for left in found.left if left.what == "3 of float32[24,24] stacked for what is returned"]
    assert [left.bytes for left in stacked] == [3 * 24 * 24 * 4]
    agree(found, step, weights(), X)


def test_weights_of_different_types_are_no_row() -> None:
    def step(ws: Any, x: Any) -> Any:
        return through(stack([w.astype(jnp.float32) for w in ws]), x)

    ws = [w.astype(jnp.bfloat16) if i == 1 else w for i, w in enumerate(weights())]
    found = packed(step, ws, X)
    assert sizes(found.inputs) == [1, 1, 1, 1]
    assert found.left[0].why.startswith("the first is not computed, number 1 made by `convert_element_type`")
    agree(found, step, ws, X)


def test_a_condition_for_each_leaf_is_not_batched() -> None:
    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        return [
            jax.lax.cond(jnp.sum(g) > 0, lambda w, g: w - g, lambda w, g: w + jnp.sin(g), w, g)
            for w, g in zip(ws, gradients, strict=True)
        ]

    found = packed(step, weights(), X)
    assert sum(eqn.primitive.name == "cond" for eqn in found.jaxpr.eqns) == 3
    assert "each has a condition of its own" in {left.why for left in found.left}
    agree(found, step, weights(), X)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_random_bits_are_batched_where_they_stay_the_same(kind: Any) -> None:
    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        keys = jax.random.split(jax.random.key(3, impl=kind), len(ws))
        return [w - g - jax.random.normal(k, w.shape) for w, g, k in zip(ws, gradients, keys, strict=True)]

    found = packed(step, weights(), X)
    assert bool(found.left) == (kind == "rbg")
    agree(found, step, weights(), X)


def test_what_is_not_of_the_state_stays_as_it_was_written() -> None:
    """A user's own stacks, keys and parts of activations."""

    def step(ws: Any, x: Any) -> Any:
        a, b = jax.random.split(jax.random.key(0))
        y = x * jax.random.bernoulli(a, 0.5, x.shape) + jax.random.bernoulli(b, 0.5, x.shape)
        pair = jnp.stack([jnp.sin(y), jnp.sin(x)])
        return through(stack(ws), pair.sum(0) + jnp.stack([x, y], axis=-1).sum(-1))

    x = seeded(5, 4 * ROWS, WIDTH)
    found = packed(step, weights(), x, own=True)
    assert found.inputs == ((0, 1, 2), (3,))
    assert not found.left
    names = [eqn.primitive.name for eqn in found.jaxpr.eqns]
    assert (names.count("stack"), names.count("unstack"), names.count("sin")) == (2, 1, 2)
    agree(found, step, weights(), x)


def test_small_values_read_from_a_large_row_leave_it_whole() -> None:
    """The norm of all gradients alone."""

    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        return sum(jnp.sum(g**2) for g in gradients)

    found = packed(step, weights(), X)
    assert not found.left
    agree(found, step, weights(), X)


def test_a_row_that_is_the_next_steps_state_stacks_the_input_that_it_becomes() -> None:
    """The last gradients are kept, and not read."""

    def step(ws: Any, last: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        return descend(ws, gradients), gradients

    found = packed(step, weights(), weights(), X, state={i: i for i in range(6)})
    assert not found.left
    assert (found.inputs, found.outputs) == (((0, 1, 2), (3, 4, 5), (6,)), ((0, 1, 2), (3, 4, 5)))
    agree(found, step, weights(), weights(), X)


def test_a_condition_computed_for_each_leaf_that_is_one_for_all_is_no_hindrance() -> None:
    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        positive = [jnp.sum(x) > 0 for _ in ws]
        return [
            jax.lax.cond(p, lambda w, g: w - g, lambda w, g: w + g, w, g)
            for w, g, p in zip(ws, gradients, positive, strict=True)
        ]

    found = packed(step, weights(), X)
    assert not found.left
    names = [eqn.primitive.name for eqn in found.jaxpr.eqns]
    assert (names.count("cond"), names.count("gt")) == (1, 1)
    agree(found, step, weights(), X)


def test_small_operands_of_different_shapes_are_not_stacked() -> None:
    """Each layer's scale is summed from an array of its own length."""

    def step(ws: Any, vs: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        return [w - g * jnp.sum(v) for w, g, v in zip(ws, gradients, vs, strict=True)]

    vs = [seeded(i, 3 + i) for i in range(3)]
    found = packed(step, weights(), vs, X)
    assert not found.left
    assert sizes(found.inputs) == [3, 1, 1, 1, 1]
    agree(found, step, weights(), vs, X)


def test_a_stack_where_rows_do_not_go_is_told() -> None:
    @jax.custom_vjp
    def layers(ws: Any, x: Any) -> Any:
        return through(stack(ws), x)

    layers.defvjp(lambda ws, x: (layers(ws, x), None), lambda _, g: (None, g))

    def step(ws: Any, vs: Any, x: Any) -> Any:
        return layers(ws, through(stack(vs), x))

    found = packed(step, weights(), weights(), X, own=True)
    assert sizes(found.inputs) == [1, 1, 1, 3, 1]
    assert [left.why for left in found.left] == ["it is inside a `custom_vjp_call`"]
    agree(found, step, weights(), weights(), X)


def test_keys_of_layers_are_a_row() -> None:
    def step(ws: Any, keys: Any, x: Any) -> Any:
        def layer(x: Any, each: Any) -> Any:
            return jnp.tanh(x @ each[0]) * jax.random.uniform(each[1], x.shape), None

        return jax.lax.scan(layer, x, (stack(ws), stack(keys)))[0], [jax.random.split(k)[0] for k in keys]

    keys = list(jax.random.split(jax.random.key(1), 3))
    found = packed(step, weights(), keys, X)
    assert found.inputs == ((0, 1, 2), (3, 4, 5), (6,))
    assert found.outputs == ((0,), (1, 2, 3))
    agree(found, step, weights(), keys, X)


def test_a_row_of_one_is_an_array_as_it_was() -> None:
    def step(ws: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws))

    found = packed(step, weights(1), X)
    assert (found.inputs, found.outputs) == (((0,), (1,)), ((0,),))
    agree(found, step, weights(1), X)


def test_stacks_from_what_all_share_are_no_stacks() -> None:
    """Where a tangent or cotangent is the same for all layers."""

    def step(ws: Any, x: Any) -> Any:
        def value(ws: Any) -> Any:
            y, parts = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x @ w), x, stack(ws))
            return jnp.sum(y) + sum(jnp.sum(part) for part in unstack(parts))

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(value)(ws))

    found = packed(step, weights(), X)
    assert not found.left
    agree(found, step, weights(), X)


def test_lines_and_names_stay() -> None:
    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)

    found = packed(step, weights(), X)
    assert [name_stack(eqn) for eqn in found.jaxpr.eqns[-2:]] == ["optimizer"] * 2
    assert all(source_line(eqn).startswith("test_settling.py:") for eqn in found.jaxpr.eqns[-2:])
