"""Accumulate: microbatches draw the whole batch's random numbers, or the report says where not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import public
from tests.test_accumulate import BATCH, IN, OUT, W, X, Y, agree, graded, loops
from xform import Accumulate, Plan, Remat, Roll, Shard, parallelize
from xform.axes import find_axes
from xform.batch import Micro, Split
from xform.batch.local import analyse
from xform.batch.states import SAME, Batch, rows
from xform.higher_order import equations
from xform.trace import shape_of, trace_flat, typeof

KEY = jax.random.key(7)
FOLDED = "random numbers of each microbatch's own"


def each(draw: Callable[..., Any], keys: Any) -> Any:
    return jax.vmap(draw)(keys)


def five(key: Any) -> Any:
    return jax.random.uniform(key, (IN,))


def one(key: Any) -> Any:
    return jax.random.uniform(key)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (BATCH, IN)),
    "categorical": lambda k: jax.random.categorical(k, jnp.ones((BATCH, IN, 3))),
    "gumbel": lambda k: jax.random.gumbel(k, (BATCH, IN), mode="high"),
    "normal": lambda k: jax.random.normal(k, (BATCH, IN)),
    "normal, complex": lambda k: jax.random.normal(k, (BATCH, IN), jnp.complex64).real,
    "randint": lambda k: jax.random.randint(k, (BATCH, IN), -3, 11),
    "truncated_normal": lambda k: jax.random.truncated_normal(k, -1.0, 2.0, (BATCH, IN)),
    "uniform": lambda k: jax.random.uniform(k, (BATCH, IN), jnp.bfloat16),
    "8 bits": lambda k: jax.random.bits(k, (BATCH, IN), "uint8"),
    "16 bits": lambda k: jax.random.bits(k, (BATCH, IN), "uint16"),
    "32 bits": lambda k: jax.random.bits(k, (BATCH, IN), "uint32"),
    "rows last": lambda k: jax.random.bits(k, (3, IN, BATCH), "uint8").T[..., 1],
    "rows of several entries": lambda k: jax.random.uniform(k, (BATCH * IN,)).reshape(BATCH, IN),
    "rows of several entries, last": lambda k: jax.random.uniform(k, (3, BATCH * IN))[1].reshape(BATCH, IN),
    "a key for each": lambda k: each(lambda k: jax.random.uniform(k, (BATCH, IN)), jax.random.split(k, 3))[1],
    "rows' keys, split": lambda k: each(five, jax.random.split(k, BATCH)),
    "rows' keys, split in two": lambda k: each(lambda k: each(one, k), jax.random.split(k, (BATCH, IN))),
    "rows' keys, split flat": lambda k: each(one, jax.random.split(k, BATCH * IN)).reshape(BATCH, IN),
    "rows' keys, split of others": lambda k: each(
        lambda k: each(five, jax.random.split(k, BATCH)), jax.random.split(k, 3)
    )[1],
    "rows' keys, split again": lambda k: each(
        lambda k: each(one, jax.random.split(k, IN)), jax.random.split(k, BATCH)
    ),
    "rows' keys, folded in": lambda k: each(lambda i: five(jax.random.fold_in(k, i)), jnp.arange(BATCH)),
    "rows' keys, of seeds": lambda k: each(lambda i: five(jax.random.key(i)), jnp.arange(BATCH)),
    "rows' keys, raw": lambda k: each(five, jax.random.split(jax.random.key_data(k), BATCH)),
    "rows' keys, of drawn seeds": lambda k: each(
        lambda i: five(jax.random.clone(jax.random.PRNGKey(i))), jax.random.bits(k, (BATCH,)) >> 1
    ),
}  # fmt: skip


def dropped(kept: Any) -> Callable[..., Any]:
    """A loss that multiplies its inputs by what is drawn, and the numbers drawn beside it."""

    def loss(w: Any, x: Any, key: Any) -> Any:
        drawn = kept(key)
        wide = 8 * drawn.dtype.itemsize if jnp.issubdtype(drawn.dtype, jnp.unsignedinteger) else 0
        return jnp.mean(((x * (drawn.astype(jnp.float32) * 2.0**-wide)) @ w) ** 2), drawn

    return graded(loss, has_aux=True)


def same(step: Callable[..., Any], *args: Any, passes: Any = (), mesh: Any = None, **options: Any) -> Any:
    """Holds a step in microbatches to the whole batch's, integers to the bit; the program."""
    mesh, options = mesh or {}, {"steps": 4} | options
    devices = jax.devices()[: int(np.prod(list(mesh.values()), dtype=int))]
    found = parallelize(step, Plan(mesh, (*passes, Accumulate(**options))), devices=devices)
    program, made, wanted = found.trace(*args), found(*args), jax.jit(step)(*args)
    assert loops(program.jaxpr, options["steps"]), program.report
    agree(made, wanted, 1e-6)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b)
    return program


def drawn_shapes(program: Any) -> set[tuple[int, ...]]:
    """The shapes in which a program hashes numbers."""
    return {shape_of(e.outvars[0]) for e in equations(program.jaxpr) if e.primitive.name == "threefry2x32"}


def test_a_microbatch_draws_what_the_whole_batch_draws() -> None:
    """One program of all of them, which takes a fourth of the time of as many."""

    def step(w: Any, x: Any, key: Any) -> Any:
        return {name: dropped(draw)(w, x, key) for name, draw in DRAWS.items()}

    program = same(step, W, X, KEY)
    assert len(loops(program.jaxpr, 4)) >= len(DRAWS)
    assert FOLDED not in str(program.report) and "whole batch" not in str(program.report)


def test_64_bits_are_those_of_the_whole_batch() -> None:
    with jax.enable_x64(True):
        args = (W.astype("float64"), X.astype("float64"), KEY)
        program = same(dropped(lambda k: jax.random.bits(k, (BATCH, IN), "uint64")), *args)
    assert FOLDED not in str(program.report)


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_keys_of_either_make_draw_the_whole_batchs_numbers(key: Any) -> None:
    program = same(dropped(lambda k: jax.random.bernoulli(k, 0.5, (BATCH, 1))), W, X, key)
    assert FOLDED not in str(program.report)


@pytest.mark.parametrize(("groups", "steps"), [(1, 5), (2, 1), (2, 5)])
@pytest.mark.parametrize("name", ["rows last", "rows of several entries", "rows' keys, split flat"])
def test_rows_of_each_group_and_spare_ones_are_those_of_the_whole_batch(
    name: str, groups: int, steps: int
) -> None:
    jaxpr = trace_flat(lambda k, x: [DRAWS[name](k) * x], [typeof(KEY), typeof(X)], "drawn")
    axes, split = find_axes(jaxpr), Split(BATCH, steps, groups)
    batch = Batch(axes.root[jaxpr.invars[1]][0], split)
    local = analyse(jaxpr, [SAME, rows(0)], axes.root, batch, folded := [])
    data = split.apart(X, rows(0)).reshape(split.steps, split.groups, split.rows, IN)
    made = [[local.run([KEY, x], Micro(i, split, jnp.int32(g)))[0] for g, x in enumerate(of)] for i, of in
            zip(jnp.arange(steps), data, strict=True)]  # fmt: skip
    found = split.together(jnp.asarray(made).reshape(*split.lead, split.rows, IN), rows(0))
    np.testing.assert_array_equal(found, DRAWS[name](KEY) * X)
    assert not folded


# ---------------------------------------------------------------- in models


def dropout(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def seeded(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape) / 3, jnp.float32)


V = {"up": seeded(3, IN, 7), "down": seeded(3, 7, IN)}


def block(v: Any, x: Any, key: Any) -> Any:
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + dropout(key, jnp.tanh(normed @ v["up"]) @ v["down"])


def scanned(v: Any, w: Any, x: Any, y: Any, key: Any) -> Any:
    x, _ = jax.lax.scan(
        lambda x, each: (block(each[0], x, each[1]), None), dropout(key, x), (v, jax.random.split(key, 3))
    )
    return jnp.mean((x @ w - y) ** 2)


def carried(v: Any, w: Any, x: Any, y: Any, key: Any) -> Any:
    """The key goes from layer to layer, and each is computed again."""

    @jax.checkpoint
    def layer(c: Any, v: Any) -> Any:
        key, own = jax.random.split(c[1])
        return (block(v, c[0], own), key), None

    (x, _), _ = jax.lax.scan(layer, (x, key), v)
    return jnp.mean((x @ w - y) ** 2)


def unrolled(v: Any, w: Any, x: Any, y: Any, key: Any) -> Any:
    for i in range(3):
        x = block(jax.tree.map(lambda v, i=i: v[i], v), x, jax.random.fold_in(key, i))
    return jnp.mean((x @ w - y) ** 2)


PASSES = {"": (), "remat": (Remat("full"),), "roll": (Roll(),)}


@pytest.mark.parametrize(
    ("loss", "passes"),
    [
        (scanned, ""),
        (carried, ""),
        (unrolled, ""),
        (scanned, "remat"),
        (carried, "remat"),
        (unrolled, "roll"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_dropout_in_layers_gives_the_whole_batchs_gradients(loss: Any, passes: str) -> None:
    program = same(graded(loss, argnums=(0, 1, 2)), V, W, X, Y, KEY, passes=PASSES[passes])
    assert FOLDED not in str(program.report)


def test_dropout_in_rules_of_derivatives_gives_the_whole_batchs_gradients() -> None:
    @jax.custom_vjp
    def masked(x: Any, key: Any) -> Any:
        return dropout(key, x)

    def forward(x: Any, key: Any) -> Any:
        return dropout(key, x), key

    def backward(key: Any, g: Any) -> Any:
        return 2 * dropout(key, g), None

    masked.defvjp(forward, backward)
    program = same(graded(lambda w, x, key: jnp.mean(masked(x, key) @ w) ** 2), W, X, KEY)
    assert FOLDED not in str(program.report)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(IN, 7, rngs=rngs), nnx.Linear(7, OUT, rngs=rngs)
        self.drop = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.drop(jnp.tanh(self.up(self.drop(x)))))


def test_flax_dropout_draws_the_whole_batchs_numbers_and_counts_on() -> None:
    graph, params, rest = nnx.split(Net(nnx.Rngs(0, dropout=3)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
        net = nnx.merge(graph, params, rest, copy=True)
        value = jnp.mean((net(x) - y) ** 2)
        return value, nnx.state(net, nnx.RngState)

    def step(params: Any, rest: Any, x: Any, y: Any) -> Any:
        (value, rngs), gradients = jax.value_and_grad(loss, has_aux=True)(params, rest, x, y)
        counts = jax.tree.leaves(nnx.filter_state(rngs, nnx.RngCount))
        return value, counts, jax.tree.leaves(gradients)

    assert FOLDED not in str(same(step, params, rest, X, Y).report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_public_models_with_dropout_have_the_whole_batchs_gradients(name: str) -> None:
    """Slow: traces and compiles a public model twice."""
    loss, args = public.PUBLIC[name](dropout=0.3, layers=1, batch=8)
    step = graded(loss)
    found = parallelize(step, Plan({}, (Accumulate(steps=4),)))
    assert FOLDED not in str(found.trace(*args).report)
    agree(found(*args), jax.jit(step)(*args), 5e-5)  # sums of some hundred tokens, through layers of them


# ---------------------------------------------------------------- on meshes

WIDE = jax.random.normal(jax.random.key(5), (32, IN))
TARGETS = jax.random.normal(jax.random.key(6), (32, OUT))


@pytest.mark.parametrize(
    ("loss", "collectives", "reduce"),
    [
        (scanned, "auto", "each"),
        (unrolled, "auto", "once"),
        (scanned, "explicit", "once"),
        (unrolled, "explicit", "each"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_dropout_on_a_mesh_gives_the_gradients_of_one_device(
    loss: Any, collectives: Any, reduce: Any
) -> None:
    passes, mesh = (Shard(collectives=collectives),), {"data": 2, "fsdp": 4}
    args = (V, W, WIDE, TARGETS, KEY)
    program = same(graded(loss, argnums=(0, 1)), *args, passes=passes, mesh=mesh, steps=2, reduce=reduce)
    assert FOLDED not in str(program.report) and "it takes whole values" not in str(program.report)
    if collectives == "explicit":  # each device for its own rows
        assert drawn_shapes(program) == {(2, IN) if reduce == "each" else (1, 2, IN)}


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_whose_bits_depend_on_the_whole_shape_are_others_in_each_microbatch_and_told(impl: str) -> None:
    step = dropped(lambda k: jax.random.bernoulli(k, 0.5, (BATCH, 200))[:, :IN])
    with jax.threefry_partitionable(False):
        found = parallelize(step, Plan({}, (Accumulate(steps=4),)))
        args = (W, X, jax.random.key(7, impl=impl))
        (_, drawn), _ = found(*args)
        report = str(found.trace(*args).report)
    assert len({row.tobytes() for row in np.asarray(drawn)}) > 8
    assert FOLDED in report and "(test_accumulate_randoms.py:" in report


OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "bits": lambda k: each(five, jax.random.split(k, BATCH)),
    "split": lambda k: each(lambda k: each(one, jax.random.split(k, IN)), jax.random.split(k, BATCH)),
    "fold_in": lambda k: each(lambda i: five(jax.random.fold_in(k, i)), jnp.arange(BATCH)),
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_rows_that_draw_together_are_told(impl: str, name: str) -> None:
    step = dropped(OF_ROWS[name])
    program = parallelize(step, Plan({}, (Accumulate(steps=4),))).trace(W, X, jax.random.key(7, impl=impl))
    assert loops(program.jaxpr, 4) and FOLDED in str(program.report)


def test_gamma_numbers_of_the_data_alone_are_drawn_once_and_of_weights_with_keys_of_their_own() -> None:
    def step(a: Any, w: Any, x: Any, key: Any) -> Any:
        drawn = jax.random.gamma(key, jnp.exp(a) * jnp.ones((BATCH, IN)))
        return jnp.mean((x * drawn) @ w), drawn

    def reported(of: Callable[..., Any], *args: Any) -> tuple[Any, str]:
        found = parallelize(graded(of, has_aux=True), Plan({}, (Accumulate(steps=4),)))
        return found(*args), str(found.trace(*args).report)

    given = functools.partial(step, 0.5)
    found, report = reported(given, W, X, KEY)
    agree(found, graded(given, has_aux=True)(W, X, KEY), 1e-6)
    assert "random_gamma (test_accumulate_randoms.py" in report and FOLDED not in report
    ((_, drawn), _), report = reported(step, jnp.full((1, IN), 0.5), W, X, KEY)
    assert len({row.tobytes() for row in np.asarray(drawn)}) == BATCH
    assert FOLDED in report


def test_what_is_drawn_for_no_row_is_the_same() -> None:
    step = graded(lambda w, x, key: jnp.mean(x @ (w * jax.random.bernoulli(key, 0.5, w.shape))))
    assert FOLDED not in str(same(step, W, X, KEY).report)


def test_something_for_each_row_that_is_in_no_data_is_computed_once() -> None:
    step = graded(lambda w, x, key: jnp.mean((x @ w) * jax.random.permutation(key, 31)[:BATCH, None]))
    assert "is computed once of the whole batch" in str(same(step, W, X, KEY).report)
