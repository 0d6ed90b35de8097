"""Tokens that are sorted by expert, as one operation: found however it is written, right for any number of
tokens, and through microbatches and stages as on one device.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.spellings.experts import SPELLINGS
from tests.spellings.experts_models import SPELLINGS as MODELS
from xform.experts import Sorted, lifted
from xform.higher_order import bodies
from xform.models import deepseek, mixtral
from xform.ops import operation_of
from xform.report import Report
from xform.trace import eval_jaxpr

T, D, F, E, K = 12, 6, 8, 4, 2


def drawn(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


ARGS = (drawn(0, T, D), drawn(1, D, E), drawn(2, E, D, F), drawn(3, E, F), drawn(4, E, F, D))


def chosen(x, router):
    weights, numbers = jax.lax.top_k(jax.nn.softmax(x @ router), K)
    return weights, numbers


def experts(rows, up, bias, down, counts, numbers):
    """With a bias for each expert, looked up for each row."""
    h = jax.nn.relu(jax.lax.ragged_dot(rows, up, counts) + bias[numbers])
    return jax.lax.ragged_dot(h, down, counts)


def inverted(x, router, up, bias, down):
    weights, numbers = chosen(x, router)
    flat = numbers.reshape(-1)
    order = jnp.argsort(flat)
    out = experts(x[order // K], up, bias, down, jnp.bincount(flat, length=E), flat[order])
    return jnp.einsum("tk,tkd->td", weights, out[jnp.argsort(order)].reshape(T, K, D))


def repeated(x, router, up, bias, down):
    """Rows of choices, weighed where they are sorted, and put back by a scatter."""
    weights, numbers = chosen(x, router)
    flat = numbers.reshape(-1)
    order = jnp.argsort(flat)
    counts = jax.nn.one_hot(flat, E, dtype=jnp.int32).sum(0)
    rows = jnp.repeat(x, K, axis=0)[order]
    out = experts(rows, up, bias, down, counts, flat[order]) * weights.reshape(-1)[order, None]
    return jnp.zeros((T * K, D)).at[order].set(out).reshape(T, K, D).sum(1)


def added(x, router, up, bias, down):
    """First choices of all tokens before second ones; added to what a shared expert gives."""
    weights, numbers = chosen(x, router)
    flat = numbers.T.reshape(-1)
    order = jnp.argsort(flat)
    counts = jnp.diff(jnp.searchsorted(flat[order], jnp.arange(E + 1))).astype(jnp.int32)
    out = experts(x[order % T], up, bias, down, counts, flat[order])
    return jnp.sin(x).at[order % T].add(out * weights.T.reshape(-1)[order][:, None])


EDGES = np.arange(E + 1, dtype=np.int32)
"""A constant of the loop that it is read in."""


def looped(x, router, up, bias, down):
    """In a loop, repeated for the choices, and added up where tokens are."""

    def layer(x, _):
        weights, numbers = chosen(x, router)
        flat = numbers.reshape(-1)
        order = jnp.argsort(flat)
        counts = jnp.diff(jnp.searchsorted(flat[order], EDGES)).astype(jnp.int32)
        out = experts(jnp.repeat(x, K, axis=0)[order], up, bias, down, counts, flat[order])
        return x.at[order // K].add(out * weights.reshape(-1)[order][:, None]), None

    return jax.lax.scan(layer, x, length=2)[0]


WRITTEN = {f.__name__: f for f in (inverted, repeated, added, looped)}


def read(fn, *args):
    jaxpr, report = jax.make_jaxpr(fn)(*args), Report()
    return jaxpr, lifted(jaxpr, "test", report), str(report)


def ran(jaxpr):
    """The equations at all depths, but for what operations say they are."""
    for eqn in jaxpr.eqns:
        yield eqn
        if operation_of(eqn) is None:
            for body in bodies(eqn):
                yield from ran(body)


def operations(jaxpr):
    return [op for eqn in ran(jaxpr) if isinstance(op := operation_of(eqn), Sorted)]


@pytest.mark.parametrize("fn", WRITTEN.values(), ids=WRITTEN)
def test_it_is_one_operation_whatever_way_it_is_written(fn):
    with jax.enable_x64(True):
        args = [np.asarray(x, np.float64) for x in ARGS]
        jaxpr, new, _ = read(fn, *args)
        assert len(operations(new)) == 1
        left = [eqn.primitive.name for eqn in ran(new)]
        assert "sort" not in left and "ragged_dot_general" not in left
        for want, got in zip(eval_jaxpr(jaxpr, *args), eval_jaxpr(new, *args), strict=True):
            assert np.abs(want - got).max() <= 1e-12 * np.abs(want).max()


@pytest.mark.parametrize("fn", WRITTEN.values(), ids=WRITTEN)
def test_microbatches_have_values_and_gradients_of_the_whole_batch(fn):
    def step(x, *weights):
        return jax.value_and_grad(lambda w: jnp.mean(fn(x, *w) ** 2))(weights)

    plan = xform.Plan(mesh={"data": 1}, passes=[xform.Accumulate(steps=3)])
    with jax.enable_x64(True):
        args = [np.asarray(x, np.float64) for x in ARGS]
        want, got = jax.jit(step)(*args), xform.parallelize(step, plan, devices=jax.devices()[:1])(*args)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert np.abs(a - b).max() <= 1e-12


def out_of(middle, back=lambda order: jnp.argsort(order), counts=None, fill=False):
    """A layer of experts that does something else with its rows."""

    def layer(x, router, up, bias, down):
        _, numbers = chosen(x, router)
        flat = numbers.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=E) if counts is None else counts(flat)
        out = middle(jax.lax.ragged_dot(x[order // K], up, sizes))
        if fill:
            return out.at[back(order)].get(mode="fill", fill_value=0)
        return out[back(order)].reshape(T, K, F).sum(1)

    return layer


def into(more):
    """A layer whose rows come back into so many rows more than there are."""

    def layer(x, router, up, bias, down):
        _, numbers = chosen(x, router)
        flat = numbers.reshape(-1)
        order = jnp.argsort(flat)
        out = jax.lax.ragged_dot(x[order // K], up, jnp.bincount(flat, length=E))
        return jnp.zeros((T * K + more, F)).at[order].set(out)

    return layer


def filled(order):
    """Where rows come back, and a place more, of no row."""
    return jnp.concatenate([jnp.argsort(order), jnp.full(1, T * K, order.dtype)])


def in_turn(x, router, up, bias, down):
    """What the first rows are added to is made of others that are back."""
    _, numbers = chosen(x, router)
    flat = numbers.reshape(-1)
    order = jnp.argsort(flat)
    h = jax.lax.ragged_dot(x[order // K], up, jnp.bincount(flat, length=E))
    first = jnp.zeros((T, F)).at[order // K].add(h)
    return jnp.sin(first).at[order // K].add(h**2)


OTHERS = {
    "into more rows than there are": (into(3), "do not come back"),
    "a row that there is not": (out_of(lambda h: h, back=filled, fill=True), "do not come back"),
    "one after the other": (in_turn, "while more is made of what is back"),
    "rows are added up": (out_of(lambda h: jnp.cumsum(h, 0)), "cumsum: it goes along the batch"),
    "rows meet": (out_of(lambda h: h - h.mean(0)), "a sum over the batch is used for each of its rows"),
    "rows are numbered": (out_of(lambda h: h * jnp.arange(T * K)[:, None]), "rows are numbered"),
    "come back elsewhere": (out_of(lambda h: h, back=lambda order: order), "do not come back"),
    "counts of others": (
        out_of(lambda h: h, counts=lambda flat: jnp.bincount((flat + 1) % E, length=E)),
        "jnp.bincount(ids, length=experts) is what is taken",
    ),
}


@pytest.mark.parametrize(("fn", "why"), OTHERS.values(), ids=OTHERS)
def test_what_does_more_with_rows_stays_and_is_told(fn, why):
    jaxpr, new, report = read(fn, *ARGS)
    assert new is jaxpr
    assert why in report and "test_experts_sorted.py" in report


def test_an_error_that_follows_says_why_tokens_stay_sorted():
    params = {"up": drawn(5, 4, E, F, F)}

    def loss(params, x):
        def layer(x, w):
            numbers = jnp.argmax(x[:, :E], -1)
            order = jnp.argsort(numbers)
            out = jax.lax.ragged_dot(x[order], w["up"], jnp.bincount(numbers, length=E))
            return jnp.tanh(out + out.mean(0))[jnp.argsort(order)], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    plan = xform.Plan({"stage": 2}, [xform.Pipeline(microbatches=2)])
    step = xform.parallelize(jax.grad(loss), plan, devices=jax.devices()[:2])
    with pytest.raises(xform.PlanError, match=r"sorted by expert stay so: .*each of its rows \(test_experts"):
        step.trace(params, drawn(6, 8, F))


def test_numbers_that_may_be_of_no_expert_are_counted_as_the_program_counts_them():
    def layer(x, numbers, up, clipped):
        order = jnp.argsort(numbers)
        sizes = jnp.bincount(jnp.clip(numbers, 0, E - 1) if clipped else numbers, length=E)
        return jax.lax.ragged_dot(x[order], up, sizes)[jnp.argsort(order)]

    numbers = jnp.arange(T) % (E + 1)
    for clipped in (False, True):
        _, new, _ = read(lambda *a, clipped=clipped: layer(*a, clipped), ARGS[0], numbers, ARGS[2])
        assert len(operations(new)) == (not clipped)
        want = layer(ARGS[0], numbers, ARGS[2], clipped)
        assert jnp.allclose(want, eval_jaxpr(new, ARGS[0], numbers, ARGS[2])[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["ragged_sorted", "ragged_scattered", "deepseek_groups"])
def test_others_spellings(name):
    spelled = {**SPELLINGS, **MODELS}[name]
    _, new, _ = read(spelled.fn, *spelled.args)
    assert len(operations(new)) == 1


WHERE = {
    "written out": ({"stage": 2, "fsdp": 2, "tensor": 2}, "explicit", mixtral),
    "shared and routed, left to the compiler": ({"stage": 2, "fsdp": 2}, "auto", deepseek),
}


@pytest.mark.parametrize(("mesh", "collectives", "model"), WHERE.values(), ids=WHERE)
def test_sorted_experts_go_through_stages(mesh, collectives, model):
    """Layers of published models on two stages; in float32, as they are."""
    loss, args = model.loss(size="tiny", batch=4, length=8)
    leaves, tree = jax.tree.flatten(args)
    values = tree.unflatten(
        [
            0.1 * drawn(n, *x.shape) if x.dtype.kind == "f" else (jnp.arange(x.size) % 300).reshape(x.shape)
            for n, x in enumerate(leaves)
        ]
    )
    step = jax.value_and_grad(loss)
    passes = [xform.Shard(collectives=collectives), xform.Pipeline(microbatches=2, schedule="circular")]
    devices = jax.devices()[: math.prod(mesh.values())]
    run = xform.parallelize(step, xform.Plan(mesh=mesh, passes=passes), devices=devices)
    want, got = jax.jit(step)(*values), run(*values)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jnp.abs(a - b).max() <= 2e-6 * jnp.abs(a).max() + 1e-9
