"""Equations taken together: out of a program, next to each other, and back."""

import jax
import jax.numpy as jnp
import pytest

from xform import printing
from xform.errors import Decline
from xform.tensors.runs import gathered, replaced, taken_out
from xform.trace import Jaxpr, check_jaxpr, eval_jaxpr, inline

X = jnp.array([1.0, 2.0, 5.0])


def interleaved(x):
    """Equations 0 and 2 are one block, 1 and 3 the other."""
    a = jnp.sin(x)
    b = jnp.cos(x)
    a = a * 3.0
    b = b * 5.0
    return a + b, b


def primitives(jaxpr: Jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_what_is_taken_out_takes_what_it_reads_and_gives_what_is_read_of_it() -> None:
    jaxpr = jax.make_jaxpr(interleaved)(X)
    part = taken_out(jaxpr, (3, 1))
    assert primitives(part) == ["cos", "mul"]
    assert part.invars == jaxpr.invars
    assert part.outvars == [jaxpr.eqns[3].outvars[0]]  # read by an equation and a result, once
    check_jaxpr(part)
    assert jnp.array_equal(eval_jaxpr(part, X)[0], interleaved(X)[1])


def test_groups_are_gathered_without_changing_what_is_computed() -> None:
    jaxpr = jax.make_jaxpr(interleaved)(X)
    found, starts = gathered(jaxpr, [(0, 2), (1, 3)])
    assert primitives(found) == ["sin", "mul", "cos", "mul", "add"]
    assert starts == [0, 2]
    check_jaxpr(found)
    for a, b in zip(eval_jaxpr(found, X), interleaved(X), strict=True):
        assert jnp.array_equal(a, b)
    assert gathered(found, [(0, 1), (2, 3)])[0] is found


def test_a_group_that_needs_what_comes_later_is_moved_behind_it() -> None:
    def late(x):
        a = jnp.sin(x)
        b = jnp.cos(x)
        return a * b

    found, starts = gathered(jax.make_jaxpr(late)(X), [(0, 2)])
    assert primitives(found) == ["cos", "sin", "mul"]
    assert starts == [1]


def test_effects_keep_their_order() -> None:
    def prints(x):
        a = jnp.sin(x)
        jax.debug.print("first {}", a, ordered=True)
        b = jnp.cos(x)
        jax.debug.print("second {}", b, ordered=True)
        return a * b

    jaxpr = jax.make_jaxpr(prints)(X)
    effects = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.effects]
    with pytest.raises(Decline, match="each need"):
        # One would have both prints, with the cosine between them in the other.
        gathered(jaxpr, [(0, effects[1]), (effects[0], effects[0] + 1)])
    found, _ = gathered(jaxpr, [(0, effects[0] + 1)])
    assert [eqn for eqn in found.eqns if eqn.effects] == [jaxpr.eqns[i] for i in effects]


def test_groups_that_need_each_other_are_declined() -> None:
    def knot(x):
        a = jnp.sin(x)
        b = jnp.cos(a)
        c = jnp.tan(b)
        return jnp.exp(c)

    with pytest.raises(Decline, match="each need"):
        gathered(jax.make_jaxpr(knot)(X), [(0, 2), (1, 3)])


def test_runs_are_replaced_wherever_their_equations_stand() -> None:
    def doubled(part: Jaxpr):
        return lambda *args: [2 * y for y in inline(part, *args)]

    def after(x):
        a = 2.0 * (jnp.sin(x) * 3.0)
        b = 2.0 * (jnp.cos(x) * 5.0)
        return a + b, b

    jaxpr = jax.make_jaxpr(interleaved)(X)
    found = replaced(jaxpr, [((0, 2), doubled), ((1, 3), doubled)], "double")
    assert printing.diff(found, jax.make_jaxpr(after)(X)) == []
    assert replaced(jaxpr, [], "double") is jaxpr
