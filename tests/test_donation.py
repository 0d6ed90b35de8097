"""Donated arguments: reused, or not, by what the compiled program says."""

import jax
import jax.numpy as jnp
import pytest

from xform.aot.donation import Donation, chosen, donation
from xform.errors import PlanError

STATE = {"a": jnp.ones(3), "b": jnp.ones(5)}


def found(fn, *args, donate=(0,)):
    lowered = jax.jit(fn, donate_argnums=donate).lower(*args)
    return donation(lowered, lowered.compile().as_text())


def test_state_whose_next_value_is_a_result_is_reused():
    step = found(lambda state, x: (jax.tree.map(lambda a: a + 1, state), x.sum()), STATE, jnp.ones(7))
    assert step == Donation(("[0]['a']", "[0]['b']"), ())
    assert str(step) == "donated arrays reused by results: 2 of 2"


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_array_without_a_result_of_its_type_is_named():
    step = found(lambda state, x: ({"a": state["a"] + 1, "b": state["b"].sum()}, x), STATE, jnp.ones(7))
    assert step.left == ("[0]['b']",)
    assert str(step) == (
        "donated arrays reused by results: 1 of 2; no result has the type and layout of [0]['b']"
    )


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_an_argument_that_nothing_reads_shifts_no_number():
    step = found(lambda unused, state: jax.tree.map(lambda a: a * 2, state), jnp.ones(2), STATE, donate=(1,))
    assert step == Donation(("[1]['a']", "[1]['b']"), ())


def test_nothing_donated_is_said():
    assert "nothing is donated" in str(found(lambda x: x + 1, jnp.ones(2), donate=()))


def test_auto_donates_what_comes_back_as_a_result():
    def step(state, moments, x):
        return jax.tree.map(lambda a: a + 1, state), moments * 2, x.sum()

    assert chosen("auto", step, (STATE, jnp.ones(4), jnp.ones(7))) == (0, 1)
    assert chosen("auto", lambda state: state, (STATE,)) == (0,)
    assert chosen("auto", lambda state, x: x.sum(), (STATE, jnp.ones(7))) == ()
    assert chosen("auto", lambda lr, x: x * lr, (0.1, jnp.ones(7))) == (1,)


def test_arguments_are_donated_by_number_or_not_at_all():
    assert chosen("none", lambda x: x, (jnp.ones(2),)) == ()
    assert chosen("1, 0,1", lambda x, y: x, (jnp.ones(2), jnp.ones(2))) == (1, 0)
    for wrong in ("2", "-1", "x", ""):
        with pytest.raises(PlanError, match="which are 0 to 1"):
            chosen(wrong, lambda x, y: x, (jnp.ones(2), jnp.ones(2)))
