"""xform.raising.recurrences: gated linear recurrences, a step a turn or in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raised import run
from tests.spellings import recurrences as bench
from xform.raising.flat import views
from xform.raising.meaning import Near, Raised
from xform.raising.recurrences import recurrences
from xform.trace import Literal

B, N, T, D, E = 2, 3, 8, 5, 7
CHUNKED = [name for name, case in bench.SPELLINGS.items() if "chunk" in case.expect]


def found(fn, *args):
    return [f for view in views(jax.make_jaxpr(fn)(*args)) for f in recurrences(view)]


def meanings(fn, *args):
    return [f.meaning for f in found(fn, *args) if isinstance(f, Raised)]


def reasons(fn, *args):
    return [f.why for f in found(fn, *args) if isinstance(f, Near)]


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def one(update=lambda s, k, v, a, b: a * s + jnp.outer(k, v), read=lambda q, s: q @ s, **how):
    """One head whose state becomes update(state, k, v, a, b), from q, k, v, a, b over time."""

    def fn(q, k, v, a, b, *rest):
        def step(state, x):
            q, k, v, a, b = x
            state = update(state, k, v, a, b)
            return state, read(q, state)

        first = rest[0] if rest else jnp.zeros((D, E))
        return jax.lax.scan(step, first, (q, k, v, a, b), **how)

    return fn


ARGS = (array(T, D), array(T, D), array(T, E), array(T), array(T))
BY_KEY = (*ARGS[:3], array(T, D), array(T))


# ---------------------------------------------------------------- against the formula


def laid(tensor, letters, sizes, values):
    """A tensor of a meaning with a dimension for each of the letters, in float64."""
    atom = tensor.atom
    x = np.asarray(atom.val if isinstance(atom, Literal) else values[atom], np.float64)
    x = x[tuple(slice(None) if dim else 0 for dim in tensor.dims)]
    own = "".join(tensor.dims)
    x = x.reshape([sizes[c] for c in own]).transpose([own.index(c) for c in letters if c in own])
    return x.reshape([sizes[c] if c in own else 1 for c in letters])


def computed(r, values):
    """All that is read, [t, batch..., e], and the last state, step by step as the meaning says."""
    m, sizes = r.meaning, r.sizes
    rest = "".join(sorted(set("".join(m.state)) - {"d", "e"}))
    letters = f"t{rest}de"
    full = [sizes[c] for c in letters]

    def product(p):
        if p is None:
            return np.ones(full)
        x = np.float64(p.coefficient)
        for t in p.times:
            x = x * laid(t, letters, sizes, values)
        for t in p.over:
            x = x / laid(t, letters, sizes, values)
        return np.broadcast_to(x, full)

    q, k, v, beta = (product(p) for p in (m.q, m.k, m.v, m.beta))
    a = np.exp(product(m.decay)) if m.decay_is_log else product(m.decay)
    state = np.zeros(full[1:]) if m.initial is None else laid(m.initial, letters[1:], sizes, values)
    out = np.zeros([*full[:-2], full[-1]])
    for t in reversed(range(sizes["t"])) if m.reverse else range(sizes["t"]):
        state = a[t] * state
        asked = (k[t] * state).sum(-2, keepdims=True) if m.beta is not None else 0.0
        state = state + beta[t] * k[t] * (v[t] - asked)
        out[t] = m.scale * (q[t] * state).sum(-2)
    return out, state, letters


def held_to(r, values):
    """Holds a recurrence of a view to what the program computes."""
    out, state, letters = computed(r, values)
    read = letters.replace("d", "")
    theirs = laid(r.meaning.out, read, r.sizes, values)
    np.testing.assert_allclose(theirs, out, 2e-5, 2e-5 * np.abs(out).max())
    if r.meaning.final is not None:
        theirs = laid(r.meaning.final, letters[1:], r.sizes, values)
        np.testing.assert_allclose(theirs, state, 2e-5, 2e-5 * np.abs(state).max())


def values_of(view, args):
    """What the variables of a view are: of the whole program's for its arguments, else for made-up ones."""
    if view.outer is not None:
        return run(view)
    return run(view, given=jax.tree.leaves(args))


WHOLE = [
    name
    for name, case in bench.SPELLINGS.items()
    if all(m.step is None for m in meanings(case.fn, *case.args))
]


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_raised_computes_what_the_program_computes(name):
    case = bench.SPELLINGS[name]
    (each,) = found(case.fn, *case.args)
    held_to(each, values_of(each.view, case.args))


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("kind", "update", "args"),
    [
        ("linear", lambda s, k, v, a, b: s + jnp.outer(k, v), ARGS),
        ("retention", lambda s, k, v, a, b: a * s + jnp.outer(k, v), ARGS),
        ("gla", lambda s, k, v, a, b: a[:, None] * s + jnp.outer(k, v), BY_KEY),
        ("delta", lambda s, k, v, a, b: s + b * jnp.outer(k, v - k @ s), ARGS),
        ("gated_delta", lambda s, k, v, a, b: a * s + b * jnp.outer(k, v - k @ (a * s)), ARGS),
        ("kda", lambda s, k, v, a, b: (t := a[:, None] * s) + b * jnp.outer(k, v - k @ t), BY_KEY),
    ],
)
def test_the_kind_says_what_decays_and_whether_there_is_a_delta(kind, update, args):
    (m,) = meanings(one(update), *args)
    assert m.kind == kind
    assert (m.decay is None) == (kind in ("linear", "delta"))
    assert (m.beta is None) == (kind in ("linear", "retention", "gla"))


def test_a_state_of_zeros_is_none_and_another_is_named():
    (zero,) = meanings(one(), *ARGS)
    (given,) = found(one(), *ARGS, array(D, E))
    assert zero.initial is None
    assert given.meaning.initial.atom is given.view.jaxpr.invars[5]
    assert given.meaning.initial.dims == given.meaning.state == ("d", "e")


def test_the_last_state_is_named_where_it_is_used():
    (used,) = found(one(), *ARGS)
    (unused,) = meanings(lambda *args: one()(*args)[1], *ARGS)
    assert used.meaning.final.atom is used.view.jaxpr.outvars[0]
    assert unused.final is None


def test_a_decay_is_a_factor_or_the_logarithm_of_one():
    (factor,) = found(one(), *ARGS)
    (log,) = found(one(lambda s, k, v, a, b: jnp.exp(a) * s + jnp.outer(k, v)), *ARGS)
    before = one()
    (outside,) = found(lambda q, k, v, g, b: before(q, k, v, jnp.exp(g), b), *ARGS)
    assert not factor.meaning.decay_is_log
    for each in (log, outside):
        assert each.meaning.decay_is_log
        assert each.meaning.decay.times[0].atom is each.view.jaxpr.invars[3]


def test_a_loop_that_runs_backwards_is_one_in_reverse():
    assert [m.reverse for m in meanings(one(reverse=True), *ARGS)] == [True]


def test_one_that_is_vmapped_has_the_mapped_dimension_as_batch():
    args = [jax.ShapeDtypeStruct((N, *a.shape), a.dtype) for a in ARGS]
    (each,) = found(jax.vmap(one()), *args)
    assert each.sizes == {"t": T, "n": N, "d": D, "e": E}
    assert each.meaning.state == ("n", "d", "e")
    held_to(each, run(each.view))


def test_one_in_a_checkpoint_is_found_in_its_body():
    (each,) = found(jax.checkpoint(one()), *ARGS)
    assert each.view.outer is not None
    held_to(each, run(each.view))


def test_one_in_a_layer_of_a_scan_over_layers_is_found_once():
    def layers(ws, *args):
        return jax.lax.scan(lambda x, w: (one()(*args[:2], x @ w, *args[3:])[1], ()), args[2], ws)

    assert [m.kind for m in meanings(layers, array(3, E, E), *ARGS)] == ["retention"]


# ---------------------------------------------------------------- near misses

NEAR = {
    "mixed by a matrix": lambda s, k, v, a, b: s @ jnp.ones((E, E)) + jnp.outer(k, v),
    "before its decay": lambda s, k, v, a, b: a[:, None] * s + b * jnp.outer(k, v - k @ s),
    "added, not taken away": lambda s, k, v, a, b: s + b * jnp.outer(k, v + k @ s),
    "more is added to its state": lambda s, k, v, a, b: s + jnp.outer(k, v) + jnp.outer(jnp.cos(k), v * v),
    "not scaled alike": lambda s, k, v, a, b: s + jnp.outer(k, v) - b * jnp.outer(k, k @ s),
}


@pytest.mark.parametrize("why", NEAR)
def test_a_near_miss_says_what_is_different(why):
    fn = one(NEAR[why])
    assert not meanings(fn, *BY_KEY)
    (reason,) = reasons(fn, *BY_KEY)
    assert why in reason


# ---------------------------------------------------------------- chunks


def in_chunks(body=lambda s, i: s, after=lambda out: out, backwards=False, reverse=None):
    """Retention by chunks of 4. body: what becomes of the state first, in chunk i; after: of what is read."""

    def fn(q, k, v, g):
        q, k, v, g = (jnp.moveaxis(x.reshape(B, N, -1, 4, *x.shape[3:]), 2, 0) for x in (q, k, v, g))
        total = jax.lax.cumsum(g, axis=3, reverse=backwards)
        seen = (jnp.triu if backwards else jnp.tril)(jnp.ones((4, 4), bool))
        within = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], 0)), 0)

        def turn(state, x):
            q, k, v, total, within, i = x
            state = body(state, i)
            out = jnp.einsum("bhid,bhjd->bhij", q, k) * within @ v + q * jnp.exp(total)[..., None] @ state
            last = total[..., :1] if backwards else total[..., -1:]
            added = jnp.einsum("bhid,bhie->bhde", k * jnp.exp(last - total)[..., None], v)
            return jnp.exp(last)[..., None] * state + added, out

        xs = (q, k, v, total, within, jnp.arange(len(q)))
        runs = backwards if reverse is None else reverse
        state, out = jax.lax.scan(turn, jnp.zeros((B, N, D, E)), xs, reverse=runs)
        return jnp.moveaxis(after(out), 0, 2).reshape(B, N, -1, E), state

    return fn


def long(chunks):
    t = 4 * chunks
    return array(B, N, t, D), array(B, N, t, D), array(B, N, t, E), array(B, N, t)


@pytest.mark.parametrize("name", CHUNKED)
def test_operands_of_chunks_are_those_over_the_whole_length(name):
    case = bench.SPELLINGS[name]
    (each,) = found(case.fn, *case.args)
    m, inputs = each.meaning, each.view.jaxpr.invars
    products = [p for p in (m.q, m.k, m.v, m.decay, m.beta) if p is not None]
    assert all("t" in t.dims for p in products for t in p.times)
    assert each.sizes["t"] == T and m.chunk == 4
    assert [t.atom for t in (*m.decay.times, *(m.beta.times if m.beta else ()))] == [
        inputs[at] for at in ((3, 4) if m.beta else (3,))
    ]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("chunks", [2, 3, 11])
def test_chunks_forwards_or_backwards_are_a_recurrence(chunks, backwards):
    (each,) = found(in_chunks(backwards=backwards), *long(chunks))
    assert each.meaning.reverse == backwards
    held_to(each, run(each.view))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"body": lambda s, i: jnp.where(i == 0, 0.5, 1.0) * s}, "by their number"),
        ({"body": lambda s, i: jnp.where(i == 3, 0.0, 1.0) * s}, "by their number"),
        ({"body": lambda s, i: jnp.tanh(s)}, "not what a gated linear recurrence"),
        ({"reverse": True}, "not what a gated linear recurrence"),
        ({"backwards": True, "reverse": False}, "not what a gated linear recurrence"),
        ({"after": lambda out: out - out.mean(0)}, "other chunks"),
        ({"after": lambda out: jnp.cumsum(out, 0)}, "other chunks"),
        ({"after": lambda out: out * 0.0}, "not what a gated linear recurrence reads"),
    ],
)
def test_chunks_that_are_not_all_the_steps_of_one_recurrence_are_none(made, why):
    fn = in_chunks(**made)
    assert not meanings(fn, *long(5))
    (reason,) = reasons(fn, *long(5))
    assert why in reason


@pytest.mark.parametrize(
    "after", [lambda out: out[::-1], lambda out: jnp.roll(out, 1, 0), lambda out: out[:, :, ::-1]]
)
def test_chunks_or_heads_in_another_order_are_none(after):
    assert not meanings(in_chunks(after=after), *long(5))
