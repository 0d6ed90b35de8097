"""Layers of the state in the order of the stages: what is stored so, what is still moved, and the numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from tests.stages import (
    LAYERS,
    ORDER,
    WIDTH,
    X,
    agree,
    loss_by,
    moved,
    params_of,
    piped,
    run,
    scanned,
    step_by,
    stored,
    traced,
)
from xform.ops.rows import by_stage, in_own_order
from xform.ordering import stored_by_stage
from xform.state import Order

RATES = np.asarray([0.1, 0.2, 0.3, 0.4], np.float32)


def by_layer(gradients: Any) -> Any:
    """A rate of its own for each layer."""
    scaled = {name: RATES.reshape(-1, *[1] * (gradients[name].ndim - 1)) * gradients[name] for name in "wb"}
    return gradients | scaled


def over_layers(gradients: Any) -> Any:
    """Each layer's gradient has those of the layers before it."""
    return gradients | {name: jnp.cumsum(gradients[name], 0) for name in "wb"}


ADAMW = optax.adamw(1e-2)
OPTIMIZERS: dict[str, tuple[Any, Callable | None, int]] = {
    "clipped_adamw": (optax.chain(optax.clip_by_global_norm(0.01), ADAMW), None, 6),
    "rate_by_layer": (ADAMW, by_layer, 6),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=3), None, 4),
    "if_finite": (optax.apply_if_finite(ADAMW, 3), None, 6),
    "several_steps": (optax.MultiSteps(ADAMW, 2), None, 8),
    "ema_in_bf16": (optax.chain(optax.ema(0.9, accumulator_dtype=jnp.bfloat16), optax.sgd(0.1)), None, 4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_over_layers_by_stage_moves_no_row_and_gives_the_same_numbers(name: str) -> None:
    optimizer, change, count = OPTIMIZERS[name]
    step = step_by(piped, optimizer, change)
    args = ((params_of(), optimizer.init(params_of())), X)
    found = stored(step, *args)
    assert not found.left, found.left
    assert sum(order == Order(ORDER) for order in found.inputs) >= count
    assert found.inputs[:-1] == found.outputs[:-1]
    assert not moved(found.jaxpr)
    agree(found, step, *args)


def test_three_steps_are_those_of_the_model_without_stages() -> None:
    optimizer = OPTIMIZERS["clipped_adamw"][0]
    args = ((params_of(), optimizer.init(params_of())), X)
    found = stored(step_by(piped, optimizer), *args)
    tree = jax.tree.structure(args[0])
    once = jax.jit(lambda state: (run(found, state, X)[:-1], step_by(scanned, optimizer)(state, X)[0]))
    state = other = args[0]
    for _ in range(3):
        state = jax.tree.unflatten(tree, once(state)[0])
        other = once(other)[1]
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_program_that_reorders_nothing_is_none_of_its() -> None:
    assert stored_by_stage(traced(loss_by(scanned), params_of(), X), {}) is None


def test_what_takes_layers_together_has_them_in_order_and_that_is_told() -> None:
    step = step_by(piped, ADAMW, over_layers)
    args = ((params_of(), ADAMW.init(params_of())), X)
    found = stored(step, *args)
    assert sum(order is not None for order in found.inputs) == 6
    assert {(left.what, left.bytes) for left in found.left} == {
        ("left `in_own_order` of float32[4,3]", 48),
        ("left `in_own_order` of float32[4,3,3]", 144),
        ("put what `cumsum` gives in order, float32[4,3]", 48),
        ("put what `cumsum` gives in order, float32[4,3,3]", 144),
    }
    assert found.left[2].why == "not each layer is treated alone there"
    assert found.left[2].where.startswith("test_ordering.py:")
    assert sorted(moved(found.jaxpr)) == ["by_stage"] * 2 + ["in_own_order"] * 2
    agree(found, step, *args)


def test_a_sum_over_layers_is_told() -> None:
    optimizer = OPTIMIZERS["clipped_adamw"][0]
    found = stored(step_by(piped, optimizer), (params_of(), optimizer.init(params_of())), X)
    assert [each.what for each in found.reordered] == [f"a sum over {LAYERS} layers"]
    assert found.reordered[0].where.startswith("stages.py:")


# ---------------------------------------------------------------- small updates

W, M = (jax.random.normal(key, (LAYERS, WIDTH, LAYERS)) for key in jax.random.split(jax.random.key(1)))


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return in_own_order(2 * by_stage(x, ORDER), ORDER)


doubled.defjvp(lambda xs, ts: (doubled(*xs), 3 * jnp.cumsum(ts[0], 0)))


@jax.custom_vjp
def tripled(x: Any) -> Any:
    return by_stage(3 * x, ORDER)


tripled.defvjp(lambda x: (tripled(x), None), lambda _, g: (in_own_order(5 * g, ORDER),))


def halved(c: Any, y: Any) -> Any:
    return 0.5 * c + y


ALONE: dict[str, Callable] = {
    "add": jnp.add,
    "rate": lambda x, y: x - RATES[:, None, None] * y,
    "numbered": lambda x, y: x - 0.1 * jnp.arange(4.0)[:, None, None] * y,
    "counted": lambda x, y: x - 0.1 * lax.broadcasted_iota(jnp.float32, x.shape, 0) * y,
    "norm": lambda x, y: x / (1 + jnp.sqrt(jnp.sum(y**2))),
    "norms": lambda x, y: x / (1 + jnp.sqrt(jnp.sum(y**2, (1, 2), keepdims=True))),
    "mean_of_layers": lambda x, y: x - jnp.mean(y, 0, keepdims=True),
    "largest": lambda x, y: x * jnp.max(jnp.abs(y), 0),
    "any": lambda x, y: jnp.where(jnp.any(y > 1, 0), x, y),
    "beside": lambda x, y: jnp.cumsum(x, 1) + jnp.flip(jnp.sort(y, 2), 1),
    "products": lambda x, y: jnp.einsum("lab,lcb,ld->ldac", x, y, y[:, 0])[:, 0, :, :1] * y,
    "over_layers": lambda x, y: jnp.einsum("lab,lab->ab", x, y)[None] * y,
    "turned": lambda x, y: jnp.transpose(jnp.transpose(x, (2, 0, 1)) + 1, (1, 2, 0)) * y,
    "flat": lambda x, y: (x.reshape(LAYERS, -1) * 2).reshape(x.shape) + y,
    "ravelled": lambda x, y: 0.1 * jnp.vdot(x, y) * (x.ravel() * jnp.arange(48.0)).reshape(x.shape),
    "rows_of_all": lambda x, y: (
        x.reshape(-1, LAYERS)[:, ::-1].reshape(x.shape) * jnp.ravel(y).reshape(x.shape)
    ),
    "clip": lambda x, y: jnp.clip(x, -1.0, y),
    "cast": lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32) + y,
    "jit": lambda x, y: jax.jit(lambda x, y: jnp.sin(x) + RATES[:, None, None] * y)(x, y),
    "remat": lambda x, y: jax.checkpoint(lambda x: jnp.sin(x) * RATES[:, None, None])(x) + y,
    "scan": lambda x, y: lax.scan(lambda c, _: (halved(c, y), None), x, None, length=2)[0],
    "while": lambda x, y: lax.fori_loop(0, jnp.int32(2 + 0 * jnp.sum(x)), lambda _, c: halved(c, y), x),
    "cond": lambda x, y: lax.cond(jnp.sum(x) > 0, lambda: x + y, lambda: y),
    "relu6": lambda x, y: jax.nn.relu6(x) + y,
    "doubled": lambda x, y: doubled(x) + y,
    "within": lambda x, y: lax.scan(lambda c, _: (halved(c, doubled(y)), None), x, None, length=2)[0],
    "mapped": lambda x, y: jnp.sum(jax.vmap(doubled)(jnp.stack([x, y])), 0),
    "half_of_it": lambda x, y: jnp.concatenate([x[:, :1], y[:, 1:]], 1),
}
"""Updates of x with y that treat each layer alone or add layers up."""

TOGETHER: dict[str, Callable] = {
    "cumsum": lambda x, y: 0.3 * jnp.cumsum(x, 0) + y,
    "sort": lambda x, y: jnp.sort(x, 0) + y,
    "reversed": lambda x, y: x[::-1] * y,
    "looped": lambda x, y: lax.scan(lambda c, r: (c + r, c), jnp.zeros(x.shape[1:]), x)[1] * y,
    "in_scan": lambda x, y: lax.scan(lambda c, _: (halved(jnp.cumsum(c, 0), y), None), x, None, length=2)[0],
    "in_jit": lambda x, y: jax.jit(lambda x: jnp.cumsum(x, 0) * RATES[:, None, None])(x) + y,
    "in_remat": lambda x, y: jax.checkpoint(lambda x: jnp.cumsum(jnp.sin(x), 0))(x) + y,
    "in_cond": lambda x, y: lax.cond(x[0, 0, 0] > 0, lambda: x + y, lambda: jnp.flip(y, 0)),
    "flat_cumsum": lambda x, y: 0.1 * jnp.cumsum(x.ravel()).reshape(x.shape) + y,
    "cut_otherwise": lambda x, y: (x.reshape(2, 2, -1) * RATES[:2, None, None]).reshape(x.shape) + y,
    "one_layer": lambda x, y: x.at[1].multiply(2.0) + y,
    "layers_by_layers": lambda x, y: x + jnp.einsum("lab,mab->lm", x, y)[:, None],
    "staged": lambda x, y: x * tripled(y),
    "another_order": lambda x, y: 0.5 * by_stage(x, (3, 1, 0, 2)) + y,
    "noise": lambda x, y: x + jax.random.normal(jax.random.key(0), x.shape) * y,
    "constant_out": lambda x, y: lax.cond(x[0, 0, 0] > 0, lambda: y, lambda: jnp.asarray(np.asarray(W))) + x,
}
"""Updates for which layers have to be in the model's own order."""

UPDATES = ALONE | TOGETHER


def updated(*names: str) -> Callable:
    """A step that gives weights and a moment, by these updates of what there is."""

    def step(w: Any, m: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(jnp.tanh(jnp.einsum("lab,xa->xlb", by_stage(1.5 * w, ORDER), x)) ** 2)

        g = jax.grad(loss)(w)
        pool = [w, m, g]
        for number, name in enumerate(names):
            pool.append(jnp.clip(UPDATES[name](pool[-1 - number % 2], pool[number % 3]), -4, 4))
        return pool[-1], m * 0.9 + g

    return step


@pytest.mark.parametrize("name", ALONE)
def test_an_update_that_treats_layers_alone_moves_none(name: str) -> None:
    found = stored(updated(name), W, M, X, state=2)
    assert found.inputs == (Order(ORDER), Order(ORDER), None)
    assert not found.left, found.left
    assert not moved(found.jaxpr)
    agree(found, updated(name), W, M, X)


@pytest.mark.parametrize("name", TOGETHER)
def test_an_update_that_takes_layers_together_is_as_exact(name: str) -> None:
    found = stored(updated(name), W, M, X, state=2)
    assert found.left
    agree(found, updated(name), W, M, X)


@pytest.mark.slow  # each example is compiled
@settings(
    phases=(Phase.generate,), max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.lists(st.sampled_from(sorted(UPDATES)), min_size=2, max_size=6))
def test_any_updates_are_as_exact(names: list[str]) -> None:
    agree(stored(updated(*names), W, M, X, state=2), updated(*names), W, M, X, tolerance=1e-4)


# ---------------------------------------------------------------- what is stored


def test_layers_need_not_be_the_first_dimension() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            layers = by_stage(jnp.transpose(w, (1, 0, 2)).astype(jnp.bfloat16), ORDER)
            return jnp.sum(jnp.einsum("lab,xa->xlb", layers.astype(jnp.float32), x) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    w = jnp.swapaxes(W, 0, 1)
    found = stored(step, w, X)
    assert found.inputs == (Order(ORDER, 1), None) and found.outputs == (Order(ORDER, 1),)
    assert not moved(found.jaxpr)
    agree(found, step, w, X)


def test_a_leaf_that_is_flat_is_not_stored_so_but_put_in_order() -> None:
    def step(w: Any, moment: Any) -> Any:
        gradient = in_own_order(jnp.sin(by_stage(w, ORDER)), ORDER)
        moment = 0.9 * moment + gradient.ravel()
        return w - 0.1 * moment.reshape(w.shape), moment

    found = stored(step, W, W.ravel(), state=2)
    assert found.inputs == (Order(ORDER), None)
    assert {left.what for left in found.left} == {
        "put an input in order, float32[48]",
        "put an output in order, float32[48]",
    }
    agree(found, step, W, W.ravel())


def test_stacks_of_other_lengths_have_orders_of_their_own() -> None:
    order = (0, 3, 1, 4, 2, 5)

    def step(w: Any, v: Any) -> Any:
        a, b = jnp.sin(by_stage(w, ORDER)), jnp.cos(by_stage(v, order))
        return w - 0.1 * in_own_order(a, ORDER), v - 0.1 * in_own_order(b, order) * jnp.vdot(w, w)

    v = jax.random.normal(jax.random.key(2), (6, 2))
    found = stored(step, W, v, state=2)
    assert found.inputs == (Order(ORDER), Order(order))
    assert {left.what for left in found.left} == {"put what `reshape` takes in order, float32[4,3,4]"}
    agree(found, step, W, v)


def test_weights_that_do_not_come_back_are_stored_so_and_what_meets_them_is_not() -> None:
    def step(w: Any, frozen: Any, rates: Any) -> Any:
        layers = by_stage(frozen + w, ORDER)
        return w - rates[:, None, None] * in_own_order(jnp.sin(layers), ORDER)

    found = stored(step, W, M, RATES)
    assert found.inputs == (Order(ORDER), Order(ORDER), None)
    assert [(left.what, left.bytes, left.why) for left in found.left] == [
        ("put an input in order, float32[4]", 16, "it is not stored by stage")
    ]
    agree(found, step, W, M, RATES)


def test_what_would_have_more_of_it_moved_keeps_its_own_order() -> None:
    def step(w: Any) -> Any:
        used = jnp.sum(by_stage(w, ORDER)[0])
        return w * used + jnp.cumsum(w, 0) + jnp.sort(w, 0)

    found = stored(step, W)
    assert found.inputs == (None,)
    assert [left.why for left in found.left] == [
        f"in that order, {4 * W.nbytes} bytes of it would be moved",
    ]
    assert moved(found.jaxpr) == ["by_stage"]


def test_inputs_to_be_kept_stay_as_they_are() -> None:
    found = stored_by_stage(traced(updated("add"), W, M, X), {0: 0, 1: 1}, keep=[1])
    assert found is not None and found.inputs == (Order(ORDER), None, None)
    agree(found, updated("add"), W, M, X)


def test_a_rule_of_the_users_own_is_kept_for_a_derivative_from_outside() -> None:
    def forward(w: Any, x: Any) -> Any:
        staged = jnp.sum(tripled(w) * jnp.arange(4.0)[:, None, None])
        return staged + jnp.sum(doubled(w) * jnp.sin(w)) * x[0, 0]

    found = stored(forward, W, X, state=0)
    assert found.inputs == (Order(ORDER), None)
    assert not moved(found.jaxpr)
    agree(found, forward, W, X)
    got = jax.grad(lambda w: run(found, w, X)[0])(W)
    np.testing.assert_allclose(got, jax.grad(forward)(W, X), rtol=1e-6)
