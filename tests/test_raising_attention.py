"""What is read of an attention: its heads, its keys, what it takes; and why another is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import raised
from xform.raising.attention import attention
from xform.raising.flat import views
from xform.raising.meaning import Attention, Near, Raised


def rand(seed, *shape):
    return np.random.RandomState(seed).normal(size=shape).astype(np.float32)


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) * 8**-0.5


def mix(w, v):
    return jnp.einsum("bhts,bshd->bthd", w, v)


Q, K, V = (rand(i, 2, 5, 6, 8) for i in range(3))
FEW = tuple(rand(i, 2, 5, 3, 8) for i in range(2))


def found(fn, *args) -> list[Raised | Near]:
    return [each for view in views(jax.make_jaxpr(fn)(*args)) for each in attention(view)]


def one(fn, *args) -> tuple[Raised, Attention]:
    (r,) = found(fn, *args)
    assert isinstance(r, Raised), r
    assert isinstance(r.meaning, Attention)
    return r, r.meaning


def why(fn, *args) -> str:
    (near,) = found(fn, *args)
    assert isinstance(near, Near)
    return near.why


def repeated_by(repeat):
    def f(q, k, v):
        return mix(jax.nn.softmax(scores(q, repeat(k))), repeat(v))

    return f


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: jnp.repeat(x, 2, axis=2),
        lambda x: jnp.stack([x, x], axis=3).reshape(2, 5, 6, 8),
        lambda x: x[:, :, jnp.arange(6) // 2],
    ],
    ids=["repeat", "stack", "lookup"],
)
def test_keys_that_are_repeated_are_taken_before_they_are(repeat):
    r, m = one(repeated_by(repeat), Q, *FEW)
    assert (r.sizes["n"], r.sizes["g"]) == (3, 2)
    assert m.q.dims == ("b", "t", "ng", "d")
    assert m.k.dims == ("b", "s", "n", "d")


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: jnp.tile(x, (1, 1, 2, 1)),
        lambda x: jnp.concatenate([x, x], axis=2),
        lambda x: x[:, :, jnp.arange(6) % 3],
    ],
    ids=["tile", "concatenate", "lookup"],
)
def test_heads_that_are_tiled_are_declined(repeat):
    assert "tiled" in why(repeated_by(repeat), Q, *FEW)


def test_keys_from_pages_are_one_dimension():
    def f(q, pages, table):
        k = pages[table].reshape(2, 6, 6, 8)
        return mix(jax.nn.softmax(scores(q, k)), k)

    r, m = one(f, Q, rand(3, 5, 3, 6, 8), np.array([[0, 3], [4, 1]]))
    assert r.sizes["s"] == 6
    assert m.k.dims == ("b", "s", "n", "d")


def test_keys_and_widths_in_several_dimensions_have_letters_and_sizes_of_their_own():
    def f(q, k, v):
        x = jnp.einsum("bthcd,bpuhcd->bhtpu", q, k)
        w = jax.nn.softmax(x.reshape(2, 3, 5, 14)).reshape(x.shape)
        return jnp.einsum("bhtpu,bpuhe->bthe", w, v)

    args = rand(1, 2, 5, 3, 2, 4), rand(2, 2, 2, 7, 3, 2, 4), rand(3, 2, 2, 7, 3, 9)
    entries = [e for e in raised(f, *args)["raised"] if e["op"] == "attention"]
    assert [e["axes"] for e in entries] == [
        {"batch": 2, "kv_heads": 3, "length": 5, "kv_length": 14, "head_dim": 8, "v_head_dim": 9}
    ]


def test_queries_and_keys_in_two_pairs_are_both_in_the_meaning():
    def f(q, latent, rope):
        x = jnp.einsum("bthr,bsr->bhts", q[..., :5], latent) + jnp.einsum("bthd,bsd->bhts", q[..., 5:], rope)
        return jnp.einsum("bhts,bsr->bthr", jax.nn.softmax(x), latent)

    _, m = one(f, Q, rand(3, 2, 7, 5), rand(4, 2, 7, 3))
    assert len(m.more) == 1
    assert m.latent


def test_a_sum_that_stands_beside_the_values_is_cut_off_them():
    def f(q, k, v):
        x = scores(q, k)
        e = jnp.exp(x - x.max(-1, keepdims=True))
        both = mix(e, jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1))
        return both[..., :-1] / both[..., -1:]

    r, m = one(f, Q, K, V)
    assert r.sizes["e"] == 8
    assert m.v.atom.aval.shape == V.shape


def test_a_sink_of_zero_is_one():
    def f(q, k, v):
        x = scores(q, k)
        top = jnp.maximum(x.max(-1, keepdims=True), 0)
        e = jnp.exp(x - top)
        return mix(e / (jnp.exp(-top) + e.sum(-1, keepdims=True)), v)

    assert one(f, Q, K, V)[1].sinks is not None


def test_logits_times_a_mask_need_it_added_too():
    seen = np.tri(5, dtype=np.float32)

    def both(q, k, v):
        return mix(jax.nn.softmax(scores(q, k) * seen - 1e10 * (1 - seen)), v)

    def times(q, k, v):
        return mix(jax.nn.softmax(scores(q, k) * seen), v)

    assert one(both, Q, K, V)[1].mask.kinds == ("causal",)
    assert "multiplied by an array" in why(times, Q, K, V)


def test_a_padding_mask_that_is_added_tells_rows_of_the_batch_from_heads():
    def f(q, k, v, mask):
        return mix(jax.nn.softmax(scores(q, k) + jnp.where(mask, 0, -1e9)[:, None, None]), v)

    r, m = one(f, Q, K, V, np.ones((2, 5), bool))
    assert (r.sizes["b"], r.sizes["n"]) == (2, 6)
    assert m.mask.kinds == ("padding",)


def test_weights_divided_by_the_sum_of_others_are_declined():
    def f(q, k, v, x):
        return mix(jnp.exp(scores(q, k)) / jnp.exp(x).sum(-1, keepdims=True), v)

    assert "add up to one" in why(f, Q, K, V, rand(5, 2, 6, 5, 5))


def test_attention_of_long_sequences_is_read_without_their_square():
    def f(q, k, v):
        t = jnp.arange(q.shape[1])
        x = jnp.where(t[:, None] >= t, scores(q, k), -1e30)
        return mix(jax.nn.softmax(x), v)

    shape = jax.ShapeDtypeStruct((1, 8192, 2, 8), jnp.bfloat16)
    assert one(f, shape, shape, shape)[1].mask.kinds == ("causal",)
