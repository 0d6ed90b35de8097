"""Bodies with their calls opened, and other things put in the place of parts of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform.errors import Decline
from xform.higher_order import equations
from xform.raising.flat import View, views
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.report import Report
from xform.trace import Jaxpr, Var, eval_jaxpr

X = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)


def names(jaxpr: Jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def found(view: View, name: str) -> tuple[list[Var], list[Var]]:
    """What the only equation of that name reads and makes."""
    (eqn,) = [e for e in view.eqns if e.primitive.name == name]
    return [v for v in eqn.invars if isinstance(v, Var)], list(eqn.outvars)


def test_calls_of_jit_and_custom_jvp_are_opened_and_loops_are_bodies_of_their_own() -> None:
    def model(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.nn.silu(y), jax.nn.softmax(x))

    outer, inner, *_ = views(jax.make_jaxpr(model)(X))
    assert "exp" in names(outer.jaxpr)
    assert "custom_jvp_call" not in names(outer.jaxpr)
    assert "logistic" in names(inner.jaxpr)
    assert inner.place[0][0] == outer.chains[names(outer.jaxpr).index("scan")]


def test_a_call_that_stands_twice_has_variables_of_its_own_each_time() -> None:
    twice = jax.jit(lambda x: jnp.exp(x) * 2)
    (view,) = views(jax.make_jaxpr(lambda x: twice(twice(x)))(X))
    made = [v for eqn in view.eqns for v in eqn.outvars]
    assert len(made) == len(set(made))
    np.testing.assert_allclose(eval_jaxpr(view.jaxpr, X)[0], twice(twice(X)))


def test_names_are_those_of_the_calls_around_an_equation() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        with jax.named_scope("deep"):
            return jnp.exp(x)

    def model(x: Any) -> Any:
        with jax.named_scope("outer"):
            return inner(x)

    (view,) = views(jax.make_jaxpr(model)(X))
    assert view.names[names(view.jaxpr).index("exp")] == "outer/deep"


def test_what_is_the_same_in_every_turn_is_known_outside() -> None:
    def model(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda y, w: (y * w + x, None), x, ws)[0]

    outer, inner = views(jax.make_jaxpr(model)(X, X[:, 0]))
    assert list(inner.inputs.values()) == [outer.jaxpr.invars[0]]


def doubled(view: View, name: str) -> Claim:
    """Twice the operand in the place of an equation."""
    takes, gives = found(view, name)
    return Claim(view, takes, gives, lambda values: {gives[0]: values[takes[0]] * 2})


def test_a_claim_is_fulfilled_in_a_loop_in_a_call_and_only_that_call_is_opened() -> None:
    @jax.jit
    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tan(y), x)

    other = jax.jit(lambda x: jnp.sin(x) + 1)
    jaxpr = jax.make_jaxpr(lambda x: other(loop(x)))(X)
    view = next(v for v in views(jaxpr) if "tan" in names(v.jaxpr))
    new = placed(jaxpr, [doubled(view, "tan")])
    assert names(new) == ["scan", "jit"]
    np.testing.assert_allclose(eval_jaxpr(new, X)[0], np.sin(8 * X) + 1, rtol=1e-5)


def test_what_nobody_needs_any_more_goes_and_what_is_read_elsewhere_stays() -> None:
    def model(x: Any) -> Any:
        y = jnp.exp(x)
        return jnp.tan(jnp.sqrt(y)), y

    jaxpr = jax.make_jaxpr(model)(X)
    (view,) = views(jaxpr)
    (_, gives), takes = found(view, "tan"), list(jaxpr.invars)
    new = placed(jaxpr, [Claim(view, takes, gives, lambda values: {gives[0]: values[takes[0]] + 1})])
    assert names(new) == ["exp", "add"]


def test_constants_of_calls_are_taken_as_they_are() -> None:
    table = jnp.asarray(X)
    jaxpr = jax.make_jaxpr(lambda x: jnp.tan(jax.jit(lambda y: y * table)(x)))(X)
    (view,) = views(jaxpr)
    (constant,) = view.constants
    takes, gives = [constant], found(view, "tan")[1]
    new = placed(jaxpr, [Claim(view, takes, gives, lambda values: {gives[0]: values[constant] * 3})])
    np.testing.assert_allclose(eval_jaxpr(new, X)[0], X * 3)


def test_a_result_that_is_needed_before_what_it_is_made_of_is_refused() -> None:
    def model(x: Any) -> Any:
        y = jnp.exp(x)
        return y, jnp.tan(x)

    jaxpr = jax.make_jaxpr(model)(X)
    (view,) = views(jaxpr)
    takes, gives = found(view, "tan")[1], found(view, "exp")[1]
    with pytest.raises(Decline, match="needed before"):
        placed(jaxpr, [Claim(view, takes, gives, lambda values: {gives[0]: values[takes[0]]})])


def test_a_claim_on_some_results_of_an_equation_whose_others_are_used_is_left_and_said() -> None:
    def model(x: Any) -> Any:
        a, b = jnp.split(x, 2)
        return jnp.tan(a), b

    jaxpr = jax.make_jaxpr(model)(X[:2])
    (view,) = views(jaxpr)
    (split,) = [e for e in view.eqns if e.primitive.name == "split"]
    gives, report = [split.outvars[0], found(view, "tan")[1][0]], Report()
    claim = Claim(
        view, list(jaxpr.invars), gives, lambda values: {v: values[jaxpr.invars[0]][:1] for v in gives}
    )
    new = placed(jaxpr, [claim], report)
    for got, want in zip(eval_jaxpr(new, X[:2]), model(X[:2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert "another result of the same equation is used" in str(report)


# ---------------------------------------------------------------- what loops are given


def shared(mask_of: Any) -> Any:
    """Layers that share a mask made outside of their loop."""

    def model(x: Any, ids: Any, ws: Any) -> Any:
        mask = mask_of(ids)

        def layer(y: Any, w: Any) -> Any:
            return jnp.where(mask, y @ w, 0.0), None

        return jax.lax.scan(layer, x, ws)[0]

    return model


def of_segments(ids: Any) -> Any:
    positions = jnp.arange(7)
    return (ids[:, None] == ids[None, :]) & (positions[:, None] >= positions)


ARGS = (
    np.linspace(-1, 1, 49, dtype=np.float32).reshape(7, 7),
    np.array([0, 0, 1, 1, 1, 2, 2]),
    np.ones((2, 7, 7), np.float32) / 7,
)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"])
def test_a_mask_of_segments_is_computed_in_the_loop(wrap: Any) -> None:
    model = wrap(shared(of_segments))
    jaxpr = jax.make_jaxpr(model)(*ARGS)
    new = sunk(jaxpr)
    (scan,) = [e for e in equations(new) if e.primitive.name == "scan"]
    assert (7, 7) not in {v.aval.shape for v in scan.invars if v.aval.dtype == bool}
    np.testing.assert_array_equal(eval_jaxpr(new, *ARGS)[0], model(*ARGS))
    same = jax.grad(lambda x: eval_jaxpr(new, x, *ARGS[1:])[0].sum())(ARGS[0])
    np.testing.assert_array_equal(same, jax.grad(lambda x: model(x, *ARGS[1:]).sum())(ARGS[0]))


@pytest.mark.parametrize(
    "mask_of",
    [lambda ids: ids == 1, lambda ids: jnp.cos(ids[:, None] + ids[None, :] * 1.0) > 0],
    ids=["as large as what it is made of", "costly"],
)
def test_what_is_not_made_of_less_or_takes_time_stays_outside(mask_of: Any) -> None:
    jaxpr = jax.make_jaxpr(shared(mask_of))(*ARGS)
    assert sunk(jaxpr) is jaxpr
