"""Rows of the state: what is stored stacked, the step over it, and that its numbers are the leaves' own."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.lax import stack, stack_p, unstack, unstack_p

from xform.higher_order import equations
from xform.state import Packed, pack
from xform.trace import Jaxpr, eval_jaxpr, name_stack, shape_of, source_line, trace_flat, typeof

LAYERS, WIDTH, ROWS = 3, 24, 5  # a weight is 2304 bytes: more than may be stacked on the spot


def seeded(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def params_of(layers: int = LAYERS) -> dict[str, Any]:
    blocks = [{"w": seeded(i, WIDTH, WIDTH), "b": seeded(9 + i, WIDTH)} for i in range(layers)]
    return {"embed": seeded(31, WIDTH, WIDTH), "layers": blocks}


X = seeded(77, ROWS, WIDTH)


def rolled(layers: list[Any], x: Any) -> Any:
    """The layers as one scan over their stacked weights, as a pass rolls them."""
    stacked = {name: stack([layer[name] for layer in layers]) for name in layers[0]}
    return jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, stacked)[0]


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(rolled(params["layers"], x @ params["embed"]) ** 2)


def flat(fn: Callable, args: Any) -> tuple[Callable, list[Any], list[str]]:
    """The function over leaves, the leaves, and their paths."""
    found, tree = jax.tree_util.tree_flatten_with_path(args)
    paths = [jax.tree_util.keystr(path) for path, _ in found]
    leaves = [jnp.asarray(leaf) for _, leaf in found]
    return lambda *xs: jax.tree.leaves(fn(*jax.tree.unflatten(tree, xs))), leaves, paths


def packed(fn: Callable, *args: Any, own: bool = False, **options: Any) -> Packed:
    """The packed step; unless it has some of its `own`, without large stacks where none is told."""
    over, leaves, paths = flat(fn, args)
    found = pack(trace_flat(over, [typeof(leaf) for leaf in leaves], "step"), paths, **options)
    assert found is not None
    assert list(map(shape_of, found.jaxpr.invars)) == [
        leaves[g[0]].shape if len(g) == 1 else (len(g), *leaves[g[0]].shape) for g in found.inputs
    ]
    assert sorted(i for g in found.inputs for i in g) == list(range(len(leaves)))
    if not found.left and not own:
        assert not [e for e in equations(found.jaxpr) if large(e) and e.primitive in (stack_p, unstack_p)]
    return found


def large(eqn: Any) -> bool:
    return any(v.aval.size > 256 for v in eqn.outvars) and max(len(eqn.invars), len(eqn.outvars)) > 1


def gathered(groups: tuple[tuple[int, ...], ...], leaves: list[Any]) -> list[Any]:
    return [leaves[g[0]] if len(g) == 1 else jnp.stack([leaves[i] for i in g]) for g in groups]


def numbers(x: Any) -> np.ndarray:
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


def agree(found: Packed, fn: Callable, *args: Any, tolerance: float = 1e-6) -> None:
    """Both programs' results. What XLA fuses differently may differ in the last place."""
    over, leaves, _ = flat(fn, args)

    def both(*xs: Any) -> Any:
        got = eval_jaxpr(found.jaxpr, *gathered(found.inputs, list(xs)))
        return got, gathered(found.outputs, over(*xs))

    got, want = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*leaves)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(numbers(a), numbers(b), rtol=tolerance, atol=tolerance)


def copied(jaxpr: Jaxpr) -> list[str]:
    """What the compiled program stacks or slices, of more than a KiB, other than a loop's turn by turn."""
    lowered = jax.jit(lambda *xs: eval_jaxpr(jaxpr, *xs)).lower(*[v.aval for v in jaxpr.invars])
    text = lowered.compile().as_text() or ""
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* (concatenate|slice|pad)\(", text)
    return [
        f"{op} {kind}[{shape}]"
        for kind, shape, op in found
        if np.prod(list(map(int, shape.split(",")))) > 256
    ]


def sizes(groups: tuple[tuple[int, ...], ...]) -> list[int]:
    return [len(group) for group in groups]


def sgd(params: Any, x: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def with_optimizer(optimizer: Any, of: Callable = loss) -> Callable:
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(of)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def test_sgd_runs_over_stacked_weights() -> None:
    params = params_of()
    found = packed(sgd, params, X)
    assert found.inputs == ((0,), (1, 3, 5), (2, 4, 6), (7,))
    assert found.outputs == ((0,), (1, 3, 5), (2, 4, 6), (7,))
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
    assert found.left[0].where.startswith("test_state.py:")
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_runs_leaf_by_leaf_over_stacks(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    params = params_of()
    found = packed(with_optimizer(optimizer), params, optimizer.init(params), X)
    assert not found.left, found.left
    assert found.inputs == found.outputs[: len(found.inputs) - 1] + (found.inputs[-1],)


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_stacks_gives_the_same_numbers(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    params = params_of()
    args = (params, optimizer.init(params), X)
    found = packed(with_optimizer(optimizer), *args)
    agree(found, with_optimizer(optimizer), *args, tolerance=1e-5 if name == "muon" else 1e-6)
    assert not copied(found.jaxpr)


# ---------------------------------------------------------------- other steps


def with_gradients(change: Callable, of: Callable = loss) -> Callable:
    """A step that does something with params and gradients."""
    return lambda params, *rest: change(params, jax.grad(of)(params, rest[-1]), *rest[:-1])


def descend(params: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


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


@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_over_stacks(name: str) -> None:
    step, state = STEPS[name]
    params = params_of()
    found = packed(step, params, *state, X)
    assert not found.left, found.left
    assert found.inputs[1:3] == ((1, 3, 5), (2, 4, 6))
    assert sizes(found.inputs).count(3) == 2 + 2 * sum(isinstance(each, dict) for each in state)
    assert sizes(found.outputs).count(3) >= 2


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("name", STEPS)
def test_a_step_over_stacks_gives_the_same_numbers(name: str) -> None:
    step, state = STEPS[name]
    args = (params_of(), *state, X)
    found = packed(step, *args)
    agree(found, step, *args, tolerance=1e-2 if name == "in_bf16" else 1e-6)
    assert not copied(found.jaxpr)


# ---------------------------------------------------------------- what is no row, and where it is said


def weights(count: int = 3) -> list[Any]:
    return [seeded(i, WIDTH, WIDTH) for i in range(count)]


def through(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


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


def test_the_same_step_is_packed_the_same() -> None:
    step = with_optimizer(OPTIMIZERS["clipped"]())
    args = (params_of(), OPTIMIZERS["clipped"]().init(params_of()), X)
    assert str(packed(step, *args).jaxpr) == str(packed(step, *args).jaxpr)


def test_lines_and_names_stay() -> None:
    def step(ws: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.sum(through(stack(ws), x)))(ws)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)

    found = packed(step, weights(), X)
    assert [name_stack(eqn) for eqn in found.jaxpr.eqns[-2:]] == ["optimizer"] * 2
    assert all(source_line(eqn).startswith("test_state.py:") for eqn in found.jaxpr.eqns[-2:])


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
    max_examples=25,
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
