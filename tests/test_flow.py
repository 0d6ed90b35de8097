"""The values of a program as one graph: through bodies, around loops, back to what made them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.layers import TOKENS, f, language_model
from xform.axes import find_axes
from xform.roles import find_roles
from xform.tensors.flow import Flow, dimensions_behind


def flow_of(fn: Callable, *args: Any) -> Flow:
    return Flow(find_roles(find_axes(jax.make_jaxpr(fn)(*args))))


def dots(flow: Flow) -> list[Any]:
    return [op for op in flow.ops if op.name == "dot_general"]


def params(*layers: Any) -> dict[str, Any]:
    return {"table": f(13, 12), "layers": list(layers)}


def test_a_body_is_no_border() -> None:
    @jax.jit
    def hidden(p: Any, x: Any) -> Any:
        return jax.checkpoint(lambda x: jnp.tanh(x @ p["up"]))(x)

    flow = flow_of(
        language_model(lambda p, x: x + hidden(p, x) @ p["down"]),
        params({"up": f(12, 7), "down": f(7, 12)}),
        *TOKENS,
    )
    up, down, head = dots(flow)
    assert [up.path != (), down.path, head.path] == [True, (), ()]
    assert flow.behind(down.ins[0], {up, down, head}) == [up]
    assert flow.behind(up.ins[0], {up, down, head}) == []
    assert [value.data for value in down.ins[:2]] == [True, False]
    assert [value.weight for value in down.ins[:2]] == [True, True]


def test_what_a_loop_carries_comes_from_before_it_and_from_its_last_turn() -> None:
    def loss(p: Any, tokens: Any, labels: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, p["table"][tokens] @ p["first"], p["layers"])
        return (x @ p["table"].T)[..., 0].sum() + labels.sum()

    weights = {"table": f(13, 12), "first": f(12, 12), "layers": f(3, 12, 12)}
    flow = flow_of(loss, weights, *TOKENS)
    first, inner, head = dots(flow)
    assert flow.behind(inner.ins[0], {first, inner, head}) == [first, inner]
    assert flow.behind(head.ins[0], {first, inner, head}) == [inner]
    assert inner.ins[1].weight
    assert not inner.ins[1].data


def test_a_branch_joins_what_its_bodies_give() -> None:
    def layer(p: Any, x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda x: x @ p["a"], lambda x: x @ p["b"], x)

    flow = flow_of(language_model(layer), params({"a": f(12, 12), "b": f(12, 12)}), *TOKENS)
    a, b, head = dots(flow)
    assert flow.behind(head.ins[0], {a, b, head}) == [a, b]


def test_a_dimension_is_followed_back_through_shapes_until_it_is_merged() -> None:
    def moved(x: Any) -> Any:
        x = jnp.transpose(jnp.sin(x), (2, 0, 1))  # 5 2 3
        x = x.reshape(5, 2, 1, 3)
        return x.reshape(10, 3)

    flow = flow_of(moved, f(2, 3, 5))

    def origin(dimension: int) -> int | None:
        value = flow.ops[-1].outs[0]
        while value.op is not None:
            (step,) = list(dimensions_behind(value.op, dimension)) or [None]
            if step is None:
                return None
            value, dimension = step
        return dimension

    assert origin(1) == 1  # of size 3
    assert origin(0) is None  # 5 and 2 in one
