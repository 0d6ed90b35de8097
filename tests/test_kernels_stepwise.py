"""Recurrences whose loops compute more than the state in a step: it is computed for all steps at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.kernels_suite import close
from xform import Kernels, Plan, parallelize
from xform.higher_order import equations
from xform.ops import operation_of

B, T, W, D, E = 2, 6, 4, 5, 3
KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (T, B, W))
WEIGHTS = {
    name: jax.random.normal(key, shape) * 0.5
    for name, key, shape in zip(
        ("q", "k", "a", "v", "g"), KEYS[1:], ((W, D), (W, D), (W, D), (W, E), (W, E)), strict=False
    )
}
START = jax.random.normal(KEYS[6], (B, D, E))


def moved(state: Any, x: Any, w: Any) -> tuple[Any, Any]:
    """The next state, and what is read of it."""
    k, v, a = x @ w["k"], x @ w["v"], jax.nn.sigmoid(x @ w["a"])
    state = a[:, :, None] * state + k[:, :, None] * v[:, None, :]
    return state, jnp.einsum("bd,bde->be", x @ w["q"], state)


def gates_in_the_step(x: Any, w: Any, start: Any) -> Any:
    return jax.lax.scan(lambda state, x: moved(state, x, w), start, x)


def backwards(x: Any, w: Any, start: Any) -> Any:
    return jax.lax.scan(lambda state, x: moved(state, x, w), start, x, reverse=True)


def normed_and_gated(x: Any, w: Any, start: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        state, o = moved(state, x, w)
        gate = jax.nn.silu(x @ w["g"])
        o = o * jax.lax.rsqrt(jnp.mean(o**2, -1, keepdims=True) + 1e-3)
        return state, (gate * o, jnp.max(gate, -1))

    return jax.lax.scan(step, start, x)


def by_number(x: Any, w: Any, start: Any) -> Any:
    """Steps take rows of x themselves, and what is read is weighed by their number."""

    def step(carry: Any, _: Any) -> Any:
        number, state = carry
        state, o = moved(state, x[number], w)
        return (number + 1, state), o * (1.0 + number)

    (_, final), out = jax.lax.scan(step, (0, start), length=T, reverse=True)
    return final, out


def in_a_while_loop(x: Any, w: Any, start: Any) -> Any:
    def step(t: Any, carry: Any) -> Any:
        state, out = carry
        state, o = moved(state, x[t], w)
        return state, out.at[t].set(o)

    return jax.lax.fori_loop(0, T, step, (start, jnp.zeros((T, B, E))))


def with_a_sum(x: Any, w: Any, start: Any) -> Any:
    """More than the state is carried, of what is read."""

    def step(carry: Any, x: Any) -> Any:
        state, total = carry
        state, o = moved(state, x, w)
        o = jnp.tanh(o)
        return (state, total + o), o

    (final, total), out = jax.lax.scan(step, (start, jnp.zeros((B, E))), x)
    return final, total, out


def with_the_state(x: Any, w: Any, start: Any) -> Any:
    """What is read goes through the state besides."""

    def step(state: Any, x: Any) -> Any:
        state, o = moved(state, x, w)
        return state, jnp.tanh(o) + jnp.max(state, 1)

    return jax.lax.scan(step, start, x)


def lowered(fn: Any) -> tuple[Any, Any]:
    passes = [Kernels(interpret=True, shortest=1)]
    step = parallelize(fn, Plan({"data": 1}, passes), devices=jax.devices()[:1])
    return step, step.trace(X, WEIGHTS, START)


def operations(program: Any) -> list[str]:
    return [op.name for eqn in equations(program.jaxpr) if (op := operation_of(eqn)) is not None]


@pytest.mark.parametrize("fn", [gates_in_the_step, backwards, normed_and_gated, by_number, in_a_while_loop])
def test_what_a_step_computes_is_computed_for_all_steps_and_the_state_by_a_kernel(fn: Any) -> None:
    def gradients(*args: Any) -> Any:
        def loss(*args: Any) -> Any:
            outs = fn(*args)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(outs)), outs

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)

    step, program = lowered(fn)
    assert len(operations(program)) == 1
    assert not any(eqn.primitive.name in ("scan", "while") for eqn in program.jaxpr.eqns)
    close(
        jax.tree.leaves(step(X, WEIGHTS, START)),
        jax.tree.leaves(jax.jit(fn)(X, WEIGHTS, START)),
        tolerance=1e-5,
    )
    step, _ = lowered(gradients)
    got, want = step(X, WEIGHTS, START), jax.jit(gradients)(X, WEIGHTS, START)
    close(jax.tree.leaves(got), jax.tree.leaves(want), tolerance=1e-4)  # sums in another order


@pytest.mark.parametrize("fn", [with_a_sum, with_the_state])
def test_what_follows_from_what_the_loop_carries_is_left_as_it_was(fn: Any) -> None:
    step, program = lowered(fn)
    assert not operations(program)
    reasons = " ".join(f"{n.what} {n.why}" for n in program.report.of("declined"))
    assert "linear_recurrence" in reasons
    close(jax.tree.leaves(step(X, WEIGHTS, START)), jax.tree.leaves(fn(X, WEIGHTS, START)), tolerance=1e-6)
