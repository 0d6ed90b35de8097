"""Steps whose layers run in the order of stages, as a pipeline has them, and what there is to ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.higher_order import equations
from xform.ops.rows import by_stage, in_own_order, reorder_of
from xform.ordering import Stored, stored_by_stage
from xform.trace import Jaxpr, eval_jaxpr, trace_flat, typeof

ORDER = (0, 2, 1, 3)
"""Two stages that take two layers each in turn: layers 0 and 2 are the first's."""
LAYERS, WIDTH = 4, 3
X = jax.random.normal(jax.random.key(7), (5, WIDTH))


def params_of() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH))
    return {
        "w": w,
        "b": jax.random.normal(keys[1], (LAYERS, WIDTH)),
        "head": jax.random.normal(keys[2], (3, 5)),
    }


def layer(x: Any, w: Any, b: Any) -> Any:
    return jnp.tanh(x @ w + b)


def in_turn(layers: Any, x: Any) -> Any:
    """The layers one after the other, their rows in the order of the stages."""
    for row in np.argsort(ORDER):
        x = layer(x, layers["w"][row], layers["b"][row])
    return x


@jax.custom_vjp
def piped(layers: Any, x: Any) -> Any:
    """The layers, with a backward pass by hand that is in the order of the stages too."""
    return in_turn(jax.tree.map(lambda w: by_stage(w, ORDER), layers), x)


def _forward(layers: Any, x: Any) -> Any:
    return jax.vjp(in_turn, jax.tree.map(lambda w: by_stage(w, ORDER), layers), x)


def _backward(back: Any, cotangent: Any) -> Any:
    layers, x = back(cotangent)
    return jax.tree.map(lambda g: in_own_order(g, ORDER), layers), x


piped.defvjp(_forward, _backward)


def scanned(layers: Any, x: Any) -> Any:
    """The layers as the model has them."""
    return jax.lax.scan(lambda x, each: (layer(x, each["w"], each["b"]), None), x, layers)[0]


def loss_by(run: Callable[..., Any]) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        layers = {"w": params["w"], "b": params["b"]}
        return jnp.mean((run(layers, x) @ params["head"]) ** 2)

    return loss


def step_by(
    run: Callable[..., Any], optimizer: Any, change: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """A training step; change: of the gradients before the optimizer."""

    def step(state: Any, x: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss_by(run))(params, x)
        gradients = gradients if change is None else change(gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        return (jax.tree.map(jnp.add, params, updates), moments), value

    return step


def traced(fn: Callable[..., Any], *args: Any) -> Jaxpr:
    leaves, tree = jax.tree.flatten(args)

    def flat(*values: Any) -> list[Any]:
        return jax.tree.leaves(fn(*jax.tree.unflatten(tree, values)))

    return trace_flat(flat, [typeof(jnp.asarray(x)) for x in leaves], "step")


def stored(fn: Callable[..., Any], *args: Any, state: int | None = None) -> Stored:
    """The program over what is stored by stage. state: how many of the first inputs come back first, by
    default the leaves of the first argument.
    """
    count = len(jax.tree.leaves(args[0])) if state is None else state
    found = stored_by_stage(traced(fn, *args), {i: i for i in range(count)})
    assert found is not None
    return found


def run(found: Stored, *args: Any) -> list[Any]:
    """The results in the model's own order, of arguments in it."""
    leaves = jax.tree.leaves(args)
    orders = zip(leaves, found.inputs, strict=True)
    outs = eval_jaxpr(found.jaxpr, *(x if order is None else order.of(jnp.asarray(x)) for x, order in orders))
    results = zip(outs, found.outputs, strict=True)
    return [x if order is None else order.back(x) for x, order in results]


def agree(found: Stored, fn: Callable[..., Any], *args: Any, tolerance: float = 1e-6) -> None:
    """The program gives the numbers of the function."""
    got, want = jax.jit(lambda *xs: (run(found, *xs), jax.tree.leaves(fn(*xs))))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def moved(jaxpr: Jaxpr) -> list[str]:
    """What is left that moves rows."""
    kinds = [op.name if (op := reorder_of(e)) is not None else e.primitive.name for e in equations(jaxpr)]
    return [kind for kind in kinds if kind in ("by_stage", "in_own_order", "gather")]
