"""Rows of the state: what is stored stacked, the step over it, and that its numbers are the leaves' own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.lax import stack

from tests.rows import (
    X,
    agree,
    copied,
    descend,
    loss,
    packed,
    params_of,
    rolled,
    sgd,
    sizes,
    through,
    weights,
    with_gradients,
    with_optimizer,
)
from xform.state import pack
from xform.trace import trace_flat, typeof


def test_sgd_runs_over_stacked_weights() -> None:
    params = params_of()
    found = packed(sgd, params, X)
    assert found.inputs == ((0,), (1, 3, 5), (2, 4, 6), (7,))
    assert found.outputs == ((0,), (1, 3, 5), (2, 4, 6), (7,))
    assert found.jaxpr.debug_info.arg_names[1:3] == ("args[*]", "args[*]")
    assert not found.left
    assert [e.primitive.name for e in found.jaxpr.eqns][-6:] == ["mul", "sub"] * 3
    agree(found, sgd, params, X)
    assert not copied(found.jaxpr)


def test_a_program_without_stacks_is_left_alone() -> None:
    jaxpr = trace_flat(lambda x: [x + 1], [typeof(X)], "step")
    assert pack(jaxpr, ["x"]) is None


def test_inputs_to_be_kept_are_stacked_in_the_step_and_that_is_said() -> None:
    found = packed(sgd, params_of(), X, keep=[4])
    assert found.inputs == ((0,), (1, 3, 5), (2,), (4,), (6,), (7,))
    assert [left.what for left in found.left] == ["stack of float32[24,24]", "unstack of float32[3,24,24]"]
    assert [left.bytes for left in found.left] == [3 * 24 * 24 * 4] * 2
    assert found.left[0].why == "number 1 is not to be stacked"
    assert found.left[0].where.startswith("rows.py:")
    agree(found, sgd, params_of(), X)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2),
    "adamw_bf16_moment": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)),
    "lion": lambda: optax.lion(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "decay_of_matrices": lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "if_finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    "several_steps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    "skips_not_finite": lambda: optax.MultiSteps(
        optax.adamw(1e-2), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "by_kind": lambda: optax.multi_transform(
        {"m": optax.adamw(1e-2), "v": optax.sgd(0.1)},
        lambda p: jax.tree.map(lambda x: "m" if x.ndim > 1 else "v", p),
    ),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "muon": lambda: optax.contrib.muon(1e-2),
}


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_runs_leaf_by_leaf_over_stacks_and_gives_the_same_numbers(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    params = params_of()
    args = (params, jax.jit(optimizer.init)(params), X)
    found = packed(with_optimizer(optimizer), *args)
    assert not found.left, found.left
    assert found.inputs == found.outputs[: len(found.inputs) - 1] + (found.inputs[-1],)
    agree(found, with_optimizer(optimizer), *args, tolerance=1e-5 if name == "muon" else 1e-6)
    assert not copied(found.jaxpr)


def test_the_same_step_is_packed_the_same() -> None:
    step = with_optimizer(OPTIMIZERS["clipped"]())
    args = (params_of(), OPTIMIZERS["clipped"]().init(params_of()), X)
    assert str(packed(step, *args).jaxpr) == str(packed(step, *args).jaxpr)


# ---------------------------------------------------------------- other steps


def clipped_by_hand(params: Any, gradients: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, 0.01 / norm)
    return jax.tree.map(lambda p, g: p - scale * g, params, gradients), norm


def adamw_by_hand(params: Any, gradients: Any, m: Any, v: Any, t: Any) -> Any:
    t = t + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, gradients)
    rate = 0.01 * jnp.sqrt(1 - 0.99**t) / (1 - 0.9**t)
    params = jax.tree.map(lambda p, m, v: p * 0.999 - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v)
    return params, m, v, t


def in_bf16(params: Any, x: Any) -> Any:
    """Weights cast outside the layers, as mixed precision has it."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return loss(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


def with_l2(params: Any, x: Any) -> Any:
    return loss(params, x) + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def twice(params: Any, x: Any) -> Any:
    """The same layers in two loops: their stacks are one."""
    return jnp.mean(rolled(params["layers"], rolled(params["layers"], x @ params["embed"])) ** 2)


def checkpointed(params: Any, x: Any) -> Any:
    return jax.checkpoint(loss)(params, x)


def jitted(params: Any, x: Any) -> Any:
    return jax.jit(lambda p, x: jax.jit(loss)(p, x))(params, x)


def accumulated(params: Any, x: Any) -> Any:
    """A user's own microbatches: the loop carries the gradients and closes over the weights."""

    def turn(total: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, rows)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    gradients, _ = jax.lax.scan(turn, zeros, jnp.stack([x, x * 0.5]))
    return descend(params, gradients)


def repeated(params: Any, x: Any) -> Any:
    """Steps until something is reached, in a while loop."""

    def turn(state: Any) -> Any:
        count, params = state
        return count + 1, descend(params, jax.grad(loss)(params, x))

    return jax.lax.while_loop(lambda s: (s[0] < 3) & (s[1]["embed"][0, 0] < 99), turn, (0, params))


def switched(params: Any, x: Any) -> Any:
    gradients = jax.grad(loss)(params, x)
    finite = jnp.all(jnp.isfinite(gradients["embed"]))
    return jax.lax.cond(finite, lambda: descend(params, gradients), lambda: params)


def norms(params: Any, gradients: Any) -> Any:
    return descend(params, gradients), jax.tree.map(lambda g: jnp.sqrt(jnp.sum(g**2)), gradients)


def noisy(params: Any, gradients: Any) -> Any:
    """A key for each leaf."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.tree.unflatten(tree, list(jax.random.split(jax.random.key(7), len(leaves))))
    noise = jax.tree.map(lambda k, g: jax.random.normal(k, g.shape), keys, gradients)
    return jax.tree.map(lambda p, g, n: p - 0.1 * (g + 0.01 * n), params, gradients, noise)


def averaged(params: Any, gradients: Any, mean: Any) -> Any:
    params = descend(params, gradients)
    return params, jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, mean, params)


def rates(params: Any, gradients: Any) -> Any:
    """Each layer has a rate of its own."""
    return {
        "embed": params["embed"] - 0.1 * gradients["embed"],
        "layers": [
            jax.tree.map(lambda p, g: p - rate * g, layer, g)  # noqa: B023
            for rate, layer, g in zip((0.1, 0.2, 0.3), params["layers"], gradients["layers"], strict=True)
        ],
    }


def barred(params: Any, gradients: Any) -> Any:
    return descend(params, jax.lax.optimization_barrier(gradients))


def copies(count: int) -> list[Any]:
    return [jax.tree.map(lambda p: 0.1 * p**2, params_of()) for _ in range(count)]


STEPS: dict[str, tuple[Callable, list[Any]]] = {
    "clipped_by_hand": (with_gradients(clipped_by_hand), []),
    "adamw_by_hand": (with_gradients(adamw_by_hand), [*copies(2), 0]),
    "in_bf16": (with_gradients(descend, in_bf16), []),
    "with_l2": (with_gradients(descend, with_l2), []),
    "twice": (with_gradients(descend, twice), []),
    "checkpointed": (with_gradients(descend, checkpointed), []),
    "jitted_loss": (with_gradients(descend, jitted), []),
    "jitted": (jax.jit(with_gradients(jax.jit(clipped_by_hand))), []),
    "accumulated": (accumulated, []),
    "repeated": (repeated, []),
    "switched": (switched, []),
    "norms": (with_gradients(norms), []),
    "noisy": (with_gradients(noisy), []),
    "averaged": (with_gradients(averaged), copies(1)),
    "rates": (with_gradients(rates), []),
    "barred": (with_gradients(barred), []),
    "gradients": (with_gradients(lambda params, gradients: gradients), []),
}


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_over_stacks_and_gives_the_same_numbers(name: str) -> None:
    step, state = STEPS[name]
    args = (params_of(), *state, X)
    found = packed(step, *args)
    assert not found.left, found.left
    assert found.inputs[1:3] == ((1, 3, 5), (2, 4, 6))
    assert sizes(found.inputs).count(3) == 2 + 2 * sum(isinstance(each, dict) for each in state)
    assert sizes(found.outputs).count(3) >= 2
    agree(found, step, *args, tolerance=1e-2 if name == "in_bf16" else 1e-6)
    assert not copied(found.jaxpr)


# ---------------------------------------------------------------- random updates


OPERATIONS: dict[str, Callable] = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "decay": lambda x, y: 0.9 * x + 0.1 * y,
    "norm": lambda x, y: x / (1.0 + jnp.sqrt(jnp.sum(y**2))),
    "sign": lambda x, y: jnp.sign(x) * y,
    "rows": lambda x, y: x - jnp.mean(y, axis=-1, keepdims=True),
    "dot": lambda x, y: jnp.tanh(x @ y.T),
    "cast": lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32) + y,
    "where": lambda x, y: jnp.where(x > y, x, 0.0),
    "jit": lambda x, y: jax.jit(lambda x, y: jnp.sin(x) + y)(x, y),
    "scan": lambda x, y: jax.lax.scan(lambda c, _: (0.5 * c + y, None), x, None, length=2)[0],
    "cond": lambda x, y: jax.lax.cond(jnp.float32(1) > 0, lambda: x + y, lambda: y),
}

listings = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
    min_size=1,
    max_size=6,
)


def updated(listing: Any, around: str) -> Callable:
    """A step whose update of a leaf is a list of operations on (weight, moment, gradient, a scalar of all).

    An operation whose last number is 5 is left out for the first layer.
    """

    def change(index: int, pool: list[Any]) -> tuple[Any, Any]:
        for name, i, j, odd in listing:
            x, y = pool[i % len(pool)], pool[j % len(pool)]
            if odd < 5 or index:
                pool.append(jnp.clip(OPERATIONS[name](x, y), -4, 4))
        return pool[-1], pool[len(pool) // 2]

    def step(ws: Any, ms: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x) ** 2))(ws)
        total = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))

        def all_of_it(ws: Any, ms: Any) -> Any:
            leaves = enumerate(zip(ws, ms, gradients, strict=True))
            new = [change(i, [w, m, g, g / (1 + total)]) for i, (w, m, g) in leaves]
            return [a for a, _ in new], [b for _, b in new]

        if around == "jit":
            return jax.jit(all_of_it)(ws, ms)
        if around == "cond":
            return jax.lax.cond(total > 0, all_of_it, lambda ws, ms: (ws, ms), ws, ms)
        if around == "scan":
            return jax.lax.scan(lambda c, _: (all_of_it(*c), None), (ws, ms), None, length=2)[0]
        return all_of_it(ws, ms)

    return step


@pytest.mark.slow  # each example is compiled twice
@settings(
    phases=(Phase.generate,),
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(listings, st.sampled_from(["", "jit", "cond", "scan"]))
def test_any_update_is_packed_to_the_same_numbers(listing: Any, around: str) -> None:
    step = updated(listing, around)
    args = (weights(), [0.1 * w for w in weights()], X)
    found = packed(step, *args, state={i: i for i in range(6)})
    assert found.inputs[0] == (0, 1, 2)
    agree(found, step, *args, tolerance=1e-4)
    if all(odd < 5 for *_, odd in listing):
        assert not found.left, found.left
