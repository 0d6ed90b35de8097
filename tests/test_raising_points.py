"""Values at points: the same as the program's, whatever it is made of."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.raising.flat import flat, views
from xform.raising.points import Points, Unknown, depends, origin, random_inputs, random_known

X = np.random.RandomState(0).randn(3, 5, 7).astype(np.float32)
M = np.random.RandomState(1).randn(7, 4).astype(np.float32)
B = X > 0

PROGRAMS = {
    "transpose and reshape": lambda: jnp.reshape(jnp.asarray(X).transpose(2, 0, 1), (3, 7, 5)),
    "merge and split": lambda x: x.reshape(15, 7).reshape(5, 3, 7, 1).reshape(5, 21),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None, :1], (3, 2, 1, 7)) + x[0, 0, 0],
    "slice with steps": lambda x: x[::2, 1:4:2, ::-1],
    "roll": lambda x: jnp.roll(x, 2, axis=1),
    "concatenate": lambda x: jnp.concatenate([x, x[:, :2] + 1, 2 * x], axis=1),
    "stack": lambda x: jnp.stack([x, -x], axis=1),
    "unstack": lambda x: jnp.unstack(x, axis=1)[3],
    "split": lambda x: lax.split(x, [2, 5], axis=2)[1],
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
    "repeat": lambda x: jnp.repeat(x, 3, axis=1),
    "pad": lambda x: lax.pad(x, 9.0, ((0, 0, 1), (2, -1, 0), (-1, 3, 2))),
    "where": lambda x: jnp.where(x > 0, x, -1e9),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "select of three": lambda x: lax.select_n((x > 0).astype(jnp.int32) + (x > 1), x, 2 * x, 3 * x),
    "sum": lambda x: x.sum((0, 2)),
    "mean of the last": lambda x: x.mean(-1, keepdims=True),
    "max, min": lambda x: x.max(1) - x.min(1),
    "any, all": lambda x: (x > 0).any(1) & (x > -3).all(1),
    "softmax": lambda x: jax.nn.softmax(x, axis=1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=2),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=(0, 2)),
    "cumsum": lambda x: jnp.cumsum(x, axis=1),
    "cumsum from the end": lambda x: lax.cumsum(x, axis=2, reverse=True),
    "cummax": lambda x: lax.cummax(x, axis=0),
    "associative scan": lambda x: lax.associative_scan(jnp.add, x, axis=2),
    "argmax": lambda x: x.argmax(1),
    "matmul": lambda x: x @ M,
    "scores": lambda x: jnp.einsum("btd,bsd->bts", x, 2 * x),
    "weighted": lambda x: jnp.einsum("tbd,bsd,sc->tcb", x, x.transpose(1, 0, 2), x[0, :3, :5]),
    "outer": lambda x: jnp.einsum("a,b->ba", x[0, 0], x[0, :, 0]),
    "sum of integers": lambda x: jnp.einsum("btd,bsd->bts", (x > 0).astype(int), (x < 1).astype(int)),
    "gather of rows": lambda x: x[:, jnp.array([4, -1, 0])],
    "gather of elements": lambda x: x[jnp.array([[0], [2]]), 1, jnp.array([1, 5, 3])],
    "gather, out of bounds": lambda x: jnp.take(x, jnp.array([0, 9, 2]), axis=1),
    "gather, clipped": lambda x: jnp.take(x, jnp.array([0, 9, 2]), axis=1, mode="clip"),
    "along an axis": lambda x: jnp.take_along_axis(x, x.argmax(2, keepdims=True), axis=2),
    "dynamic slice": lambda x: lax.dynamic_slice(x, (1, jnp.argmax(x[0, :, 0]), 9), (2, 2, 3)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, x[:2, :2] + 1, (9, 1, 0)),
    "integers": lambda x: (x * 10).astype(jnp.int32) // 3 + (x * 10).astype(jnp.int32) % 3,
    "remainder": lambda x: lax.rem((x * 10).astype(jnp.int32), 3) - lax.div((x * 10).astype(jnp.int32), -3),
    "bits": lambda x: ~((x > 0) ^ (x > 1)) | (x < -1),
    "powers": lambda x: x**3 + x**-2 + jnp.abs(x) ** 0.5 + lax.rsqrt(x * x + 1) + jnp.square(x),
    "functions": lambda x: jax.nn.gelu(x, approximate=False) + jnp.tanh(x) + jax.nn.silu(x) + jnp.expm1(x),
    "softplus and the like": lambda x: jax.nn.softplus(x) + jnp.logaddexp(x, 1.0) + jax.nn.relu(x),
    "half precision": lambda x: (x.astype(jnp.bfloat16) * jnp.bfloat16(1.7) + 1).astype(jnp.float32),
    "rounding": lambda x: jnp.round(x) + jnp.floor(x) + jnp.ceil(x) + jnp.sign(x) + jnp.trunc(x),
    "next": lambda x: jnp.nextafter(x, jnp.inf),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * 2),
    "one hot": lambda x: jax.nn.one_hot(x.argmax(2), 7).cumsum(1),
    "triangle": lambda x: jnp.where(jnp.tril(jnp.ones((5, 7), bool), 1), x, -jnp.inf),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_at_points_are_the_programs(name):
    fn = PROGRAMS[name]
    args = () if name == "transpose and reshape" else (X,)
    view = flat(jax.make_jaxpr(fn)(*args))
    known = dict.fromkeys(view.jaxpr.invars, lambda index: X[index])
    want = np.asarray(fn(*map(jnp.asarray, args)))
    (out,) = view.jaxpr.outvars
    got = Points(view, known).all(out)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    rng = np.random.RandomState(2)
    index = tuple(rng.randint(0, n, (4, 1) if d % 2 else (3,)) for d, n in enumerate(want.shape))
    np.testing.assert_allclose(Points(view, known).at(out, index), want[index], rtol=2e-6, atol=2e-6)


def test_a_mask_of_a_long_sequence_is_read_in_a_few_rows():
    def mask():
        t, s = jnp.arange(32768)[:, None], jnp.arange(32768)[None, :]
        return jnp.where((s <= t) & (t - s < 4096), 0.0, -1e9)[None, None]

    view = flat(jax.make_jaxpr(mask)())
    started = time.time()
    rows = np.array([[0], [5000], [32767]])
    got = Points(view).at(view.jaxpr.outvars[0], (0, 0, rows, np.arange(32768)))
    assert time.time() - started < 1
    assert (got == 0).sum(1).tolist() == [1, 4096, 4096]


def test_attention_over_a_long_sequence_is_evaluated_at_a_few_points():
    def attention(q, k, v):
        p = jax.nn.softmax(jnp.einsum("td,sd->ts", q, k).astype(jnp.float32) / 8)
        return p.astype(q.dtype) @ v

    long = jax.ShapeDtypeStruct((32768, 16), jnp.bfloat16)
    view = flat(jax.make_jaxpr(attention)(long, long, long))
    known = random_inputs(view.jaxpr.invars)
    got = Points(view, known, wide=True).at(view.jaxpr.outvars[0], (np.array([3, 31000]), np.array([7, 15])))
    q, k, v = (
        known[x](np.ix_(np.arange(32768), np.arange(16))).astype(np.float64) for x in view.jaxpr.invars
    )
    scores = np.exp(q[[3, 31000]] @ k.T / 8)
    want = (scores / scores.sum(1, keepdims=True)) @ v
    np.testing.assert_allclose(got, want[[0, 1], [7, 15]], rtol=1e-10)


def test_wide_values_forget_casts_and_the_others_do_not():
    view = flat(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))(X))
    (x,), (out,) = view.jaxpr.invars, view.jaxpr.outvars
    known = {x: lambda index: X[index]}
    assert (Points(view, known, wide=True).all(out) == X).all()
    assert (Points(view, known).all(out) == np.asarray(jnp.asarray(X).astype(jnp.bfloat16), np.float32)).all()


def test_what_is_not_known_is_said():
    view = flat(jax.make_jaxpr(lambda x, y: jnp.concatenate([x, jnp.sort(y)], axis=0))(X, X))
    points = Points(view, {view.jaxpr.invars[0]: lambda index: X[index]})
    (out,) = view.jaxpr.outvars
    assert points.at(out, (2, 1, 1)) == X[2, 1, 1]
    with pytest.raises(Unknown, match="sort"):
        points.at(out, (3, 1, 1))


def test_a_case_that_is_not_taken_need_not_be_known():
    view = flat(jax.make_jaxpr(lambda x: jnp.where(jnp.tri(5, 7, dtype=bool), x, -1.0))(X))
    (out,) = view.jaxpr.outvars
    assert Points(view).at(out, (0, 1, 5)) == -1
    with pytest.raises(Unknown, match="input of the program"):
        Points(view).at(out, (0, 1, 1))


def test_values_from_outside_of_a_loop_are_known_inside():
    def layers(x, ws):
        mask = jnp.tril(jnp.ones((5, 5)))

        def layer(x, w):
            return mask @ x * w, None

        return lax.scan(layer, x, ws)[0]

    _, inner = views(jax.make_jaxpr(layers)(X[0], np.ones(4, np.float32)))
    product = next(e for e in inner.eqns if e.primitive.name == "dot_general")
    assert Points(inner).all(product.invars[0]).sum() == 15
    with pytest.raises(Unknown, match="input of a body"):
        Points(inner).at(product.outvars[0], (0, 0))
    assert depends(inner, product.invars[0]) == set()
    assert depends(inner, product.outvars[0]) == {inner.jaxpr.invars[-2]}


def test_a_value_is_followed_to_where_its_numbers_are():
    def program(x):
        return jnp.repeat(jnp.exp(x), 3, axis=1).transpose(2, 0, 1).reshape(7, 45)[:, ::-1]

    view = flat(jax.make_jaxpr(program)(X))
    made = next(e.outvars[0] for e in view.eqns if e.primitive.name == "exp")
    atom, index = origin(view, view.jaxpr.outvars[0], (6, 0))
    assert atom is made
    assert [int(i) for i in index] == [2, 4, 6]


def test_made_up_inputs_are_the_same_at_the_same_place_and_differ_by_seed():
    (x,) = jax.make_jaxpr(lambda x: x)(X).invars
    whole = random_known(x, 1)(np.ix_(range(3), range(5), range(7)))
    assert whole[2, 3, 4] == random_known(x, 1)((np.asarray(2), np.asarray(3), np.asarray(4)))
    assert len(np.unique(whole)) == whole.size
    assert not np.isin(whole, random_known(x, 2)(np.ix_(range(3), range(5), range(7)))).any()
    assert abs(whole.mean()) < 0.3 and 0.7 < whole.std() < 1.3


def test_nothing_is_recorded_while_a_program_is_traced():
    view = flat(jax.make_jaxpr(lambda x: lax.lgamma(lax.digamma(x)) + jnp.tanh(x))(X))
    (x,), (out,) = view.jaxpr.invars, view.jaxpr.outvars

    def traced(y):
        assert Points(view, {x: lambda index: np.abs(X[index]) + 2}).all(out).shape == X.shape
        return y + 1

    assert [e.primitive.name for e in jax.make_jaxpr(traced)(1.0).eqns] == ["add"]
