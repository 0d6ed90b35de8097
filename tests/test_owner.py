"""Which argument of a function comes back as its next value."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xform.state.owner import state_argument

P = {"w": jnp.ones((3, 5)), "b": jnp.ones(5)}
X = jnp.ones((7, 3))


def loss(p: Any, x: Any) -> Any:
    return (jax.nn.relu(x @ p["w"] + p["b"]) ** 2).mean() + 0.1 * (p["w"] ** 2).sum()


def sgd(p: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, x))


def stepwise(p: Any, x: Any) -> Any:
    return jax.lax.scan(lambda p, _: (sgd(p, x), 0), p, None, 3)[0]


def skipping(p: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda p: sgd(p, x), lambda p: p, p)


CASES: dict[str, tuple[Any, tuple[Any, ...], tuple[int, bool]]] = {
    "sgd": (sgd, (P, X), (0, True)),
    "steps in a scan": (stepwise, (P, X), (0, True)),
    "steps left out": (skipping, (P, X), (0, True)),
    "in a call": (jax.jit(sgd), (P, X), (0, True)),
    "not the first": (lambda x, p: (x, sgd(p, x)), (X, P), (1, True)),
    "gradients": (
        lambda p, x: jax.value_and_grad(lambda p: (x @ p["w"] + p["b"]).sum() ** 2)(p),
        (P, X),
        (0, False),
    ),
    "a loss": (loss, (P, X), (0, False)),
    "an array alone": (lambda w: w + 1, (X,), (0, False)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_argument_whose_next_value_is_returned_is_the_state(name: str) -> None:
    fn, args, expected = CASES[name]
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure((args, {}))
    assert state_argument(tree, jax.tree.structure(out), range(tree.num_leaves), jaxpr) == expected
