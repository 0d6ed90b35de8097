"""Masks: which keys a query sees, whatever they are written as."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.ops.masks import Band
from xform.raising.flat import flat, views
from xform.raising.masks import Masks, Term
from xform.raising.meaning import Chosen, Tensor
from xform.raising.points import Points, random_inputs

T, S, B, N = 7, 7, 2, 3
I, J = np.arange(T)[:, None], np.arange(S)[None, :]


def pieces(fn, *args, dims, role="seen", t=T, s=S, factor=1.0, fill=-math.inf):
    """The view of a function that makes a mask, and what it is read as."""
    view = flat(jax.make_jaxpr(fn)(*args))
    (out,) = view.jaxpr.outvars
    sizes = {"b": B, "n": N, "t": t, "s": s}
    masks = Masks(view, sizes)
    found = masks.of([Term(Tensor(out, dims), role, fill, factor)])
    _check(masks, view, out, dims, sizes, role, factor, found)
    return found


def _check(masks, view, out, dims, sizes, role, factor, found):
    """What is read is what the function computes, at every point, for made-up inputs."""
    points = Points(view, random_inputs(view.jaxpr.invars, high=3))
    at = dict(zip(sizes, np.ix_(*map(np.arange, sizes.values())), strict=True))
    value = masks.value(Tensor(out, dims), points, at)
    seen = masks.seen(found.mask, points, at)
    if role != "added":
        want = (value != 0) == (role == "seen")
        assert (np.broadcast_to(seen, tuple(sizes.values())) == want).all()
        return
    value = value.astype(np.float64) * factor
    rest = sum(masks.value(b, points, at) * f for b, f in zip(found.bias, found.factors, strict=True))
    shape = tuple(sizes.values())
    value, seen, rest = (np.broadcast_to(x, shape) for x in (value, seen, rest))
    np.testing.assert_allclose(rest[seen], value[seen], rtol=1e-5)
    assert (value[~seen] <= -9999).all()


BY_POSITION = {
    "causal": (lambda: jnp.asarray(I) >= J, Band(right=0), ("causal",)),
    "causal of zeros and ones": (lambda: jnp.tril(jnp.ones((T, S))), Band(right=0), ("causal",)),
    "strictly causal": (lambda: jnp.tril(jnp.ones((T, S), bool), -1), Band(right=0, offset=-1), ("causal",)),
    "full": (lambda: jnp.ones((T, S), bool), Band(), ("full",)),
    "causal window": (
        lambda: jnp.tril(jnp.ones((T, S), int)) - jnp.tril(jnp.ones((T, S), int), -3) == 1,
        Band(right=0, left=2),
        ("causal", "window"),
    ),
    "window": (lambda: jnp.abs(jnp.asarray(I - J)) <= 2, Band(right=2, left=2), ("window",)),
    "window to the left": (lambda: jnp.asarray(J >= I - 2) & True, Band(left=2), ("window",)),
    "chunks": (lambda: jnp.asarray(I // 3 == J // 3), Band(chunk=3), ("chunked",)),
    "causal chunks": (
        lambda: jnp.asarray(I // 3 == J // 3) & jnp.tri(T, dtype=bool),
        Band(right=0, chunk=3),
        ("causal", "chunked"),
    ),
    "prefix": (lambda: (jnp.asarray(J) < 3) | (jnp.asarray(J) <= I), Band(right=0, prefix=3), ("prefix",)),
    "window and first keys": (
        lambda: jnp.tri(T, dtype=bool) & ((jnp.asarray(J) > I - 2) | (jnp.asarray(J) < 1)),
        Band(right=0, left=1, prefix=1),
        ("window", "prefix"),
    ),
    "every other": (lambda: jnp.asarray((I - J) % 2 == 0), None, ("arbitrary",)),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_a_mask_by_position_is_the_band_that_it_is(name):
    fn, band, kinds = BY_POSITION[name]
    mask = pieces(fn, dims=("t", "s")).mask
    assert (mask.band, mask.kinds) == (band, kinds)
    assert mask.table == (band is None)


def test_hidden_is_the_contrary_of_seen():
    hidden = pieces(lambda: jnp.triu(jnp.ones((T, S), bool), 1), dims=("t", "s"), role="hidden")
    assert hidden.mask.band == Band(right=0)


def test_causal_may_be_aligned_with_the_last_key():
    mask = pieces(lambda: jnp.tril(jnp.ones((3, S), bool), S - 3), dims=("t", "s"), t=3).mask
    assert (mask.band, mask.kinds) == (Band(right=0, offset=4), ("causal",))


def test_a_mask_is_read_through_reshapes_for_all_heads():
    def fn():
        return jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, N, T, S)).reshape(B * N, T, S)

    assert pieces(fn, dims=("bn", "t", "s")).mask.band == Band(right=0)


def test_a_mask_that_differs_by_head_is_no_band():
    def fn():
        return jnp.asarray(J)[None] <= jnp.asarray(I)[None] + jnp.arange(N)[:, None, None]

    mask = pieces(fn, dims=("n", "t", "s")).mask
    assert mask.table and mask.kinds == ("arbitrary",)


SEEN = np.ones((B, S), bool)


def test_padding_is_taken_out_of_a_causal_mask():
    def fn(ids):
        return jnp.tri(T, dtype=bool)[None, None] & (ids > 0)[:, None, None, :]

    mask = pieces(fn, np.ones((B, S), np.int32), dims=("b", "", "t", "s")).mask
    assert (mask.band, mask.kinds) == (Band(right=0), ("causal", "padding"))
    assert [c.dims for c in mask.chosen] == [("b", "s")]


def test_what_either_hides_is_seen_where_both_do_not():
    def fn(m):
        return jnp.logical_or(jnp.asarray(J > I)[None], ~m[:, None, :])

    mask = pieces(fn, SEEN, dims=("b", "t", "s"), role="hidden").mask
    assert (mask.band, mask.kinds) == (Band(right=0), ("causal", "padding"))


def test_a_product_of_masks_is_padding_of_queries_and_of_keys():
    def fn(m):
        m = m.astype(jnp.float32)
        return (m[:, None, :, None] * m[:, None, None, :]) > 0.5

    mask = pieces(fn, SEEN, dims=("b", "", "t", "s")).mask
    assert sorted(c.dims for c in mask.chosen) == [("b", "s"), ("b", "t")]
    assert mask.kinds == ("padding",)


def test_equal_numbers_are_segments():
    def fn(seg):
        return (seg[:, :, None] == seg[:, None, :]) & jnp.tri(T, dtype=bool)

    mask = pieces(fn, np.ones((B, S), np.int32), dims=("b", "t", "s")).mask
    ((q, k),) = mask.segments
    assert (q.dims, k.dims) == (("b", "t"), ("b", "s"))
    assert mask.kinds == ("causal", "segments")


def test_a_negated_condition_says_so():
    mask = pieces(lambda p: p[:, None, :], SEEN, dims=("b", "", "s"), role="hidden").mask
    (chosen,) = mask.chosen
    assert isinstance(chosen, Chosen) and chosen.negated and chosen.dims == ("b", "s")


def test_a_bound_found_at_run_time_is_decoding():
    mask = pieces(lambda n: (jnp.arange(S) <= n)[None, :], np.int32(3), dims=("", "s"), t=1).mask
    assert mask.kinds == ("decode",)


def test_lengths_of_keys_are_padding_and_given_positions_are_arbitrary():
    lengths = pieces(lambda n: jnp.arange(S) < n[:, None], np.array([3, 5], np.int32), dims=("b", "s"))
    assert lengths.mask.kinds == ("padding",)
    at = pieces(lambda p: p[:, :, None] >= p[:, None, :], np.ones((B, S), np.int32), dims=("b", "t", "s"))
    assert at.mask.kinds == ("arbitrary",)


def test_any_of_data_and_position_is_not_taken_apart():
    mask = pieces(lambda m: jnp.tri(T, dtype=bool) | m[:, None, :], SEEN, dims=("b", "t", "s")).mask
    assert mask.kinds == ("arbitrary",)


ADDED = {
    "where": lambda m: jnp.where(m, 0.0, -1e9),
    "one less": lambda m: (1.0 - m.astype(jnp.float32)) * -1e9,
    "less one": lambda m: (m.astype(jnp.float32) - 1) * 1e9,
    "logarithm": lambda m: jnp.log(m.astype(jnp.float32)),
    "the lowest number": lambda m: jnp.where(~m, jnp.finfo(jnp.float32).min, 0),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_is_a_mask_where_it_is_nought_or_far_below(name):
    found = pieces(lambda m: ADDED[name](m)[:, None, None, :], SEEN, dims=("b", "", "", "s"), role="added")
    assert found.mask.kinds == ("padding",) and found.mask.added and not found.bias
    assert found.mask.filled <= -1e9


def test_added_masks_together_are_all_of_them():
    def both(m):
        causal = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)
        return causal + jnp.where(m, 0.0, -1e9)[:, None, :]

    def least(m):
        return jnp.minimum(jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9), jnp.where(m, 0.0, -1e9)[:, None, :])

    for fn in (both, least):
        found = pieces(fn, SEEN, dims=("b", "t", "s"), role="added")
        assert found.mask.kinds == ("causal", "padding") and not found.bias


def test_small_numbers_and_unknown_numbers_are_a_bias():
    for fn, dims in (
        (lambda m: jnp.where(jnp.tri(T, dtype=bool), 0.0, -2.0), ("t", "s")),
        (lambda m: (1.0 - m) * -1e9, ("b", "s")),
    ):
        found = pieces(fn, SEEN.astype(np.int32), dims=dims, role="added")
        assert found.mask.kinds == ("full",) and found.kinds == ("bias",)


def test_a_bias_keeps_its_factor():
    found = pieces(
        lambda x: x, np.ones((N, T, S), np.float32), dims=("n", "t", "s"), role="added", factor=0.5
    )
    assert found.factors == (0.5,) and found.kinds == ("bias",)


SLOPES = np.array([0.5, 0.25, 0.125], np.float32)[:, None, None]
ALIBI = {
    "distances": lambda m: SLOPES * jnp.asarray(J - I)[None],
    "both sides": lambda m: -SLOPES * jnp.abs(jnp.asarray(J - I))[None],
    "keys": lambda m: SLOPES * jnp.arange(S, dtype=jnp.float32)[None, None],
    "counted": lambda m: SLOPES * ((jnp.cumsum(m, -1) - 1) * m)[:, None, None],
}


@pytest.mark.parametrize("name", ALIBI)
def test_a_line_over_keys_for_each_head_is_alibi(name):
    dims = ("b", "n", "", "s") if name == "counted" else ("n", "" if name == "keys" else "t", "s")
    found = pieces(ALIBI[name], SEEN.astype(np.int32), dims=dims, role="added")
    assert found.kinds == ("alibi",)


def test_a_table_of_distances_is_a_bias_and_no_alibi():
    def fn(table):
        return table[:, jnp.asarray(J - I + T - 1)]

    found = pieces(fn, np.ones((N, 2 * T - 1), np.float32), dims=("n", "t", "s"), role="added")
    assert found.kinds == ("bias",)


def test_alibi_with_a_causal_mask_in_one_array_is_both():
    def fn():
        return jnp.where(jnp.tri(T, dtype=bool), SLOPES * jnp.asarray(J - I)[None], -jnp.inf)

    found = pieces(fn, dims=("n", "t", "s"), role="added")
    assert found.mask.kinds == ("causal",) and found.kinds == ("alibi",)


def test_a_mask_made_outside_of_a_loop_is_taken_apart_outside():
    def layers(x, m, ws):
        mask = jnp.tri(T, dtype=bool)[None] & m[:, None, :]

        def layer(x, w):
            return jnp.where(mask, x * w, -1e9), None

        return lax.scan(layer, x, ws)[0]

    outer, inner = views(jax.make_jaxpr(layers)(np.ones((B, T, S)), SEEN, np.ones(4)))
    select = next(e for e in inner.eqns if e.primitive.name == "select_n")
    masks = Masks(inner, {"b": B, "t": T, "s": S})
    mask = masks.of([Term(Tensor(select.invars[0], ("b", "t", "s")))]).mask
    assert mask.band == Band(right=0) and mask.kinds == ("causal", "padding")
    assert [(c.atom, c.dims) for c in mask.chosen] == [(outer.jaxpr.invars[1], ("b", "s"))]


def test_a_long_mask_is_held_to_every_position():
    n = 4096

    def fn():
        t, s = jnp.arange(n)[:, None], jnp.arange(n)[None, :]
        return (s <= t) & ((t != 3001) | (s != 17))

    started = time.time()
    view = flat(jax.make_jaxpr(fn)())
    mask = Masks(view, {"t": n, "s": n}).of([Term(Tensor(view.jaxpr.outvars[0], ("t", "s")))]).mask
    assert mask.table and mask.band is None
    assert time.time() - started < 2


def test_whole_numbers_times_a_large_one_do_not_overflow():
    def fn():
        return jnp.triu(jnp.ones((T, S), jnp.int32), 1).astype(jnp.float32)

    found = pieces(fn, dims=("t", "s"), role="added", factor=-1e10)
    assert found.mask.band == Band(right=0) and not found.bias


def test_a_cast_to_whole_numbers_is_not_what_was_cast():
    def fn(x):
        return (jnp.where(x > 0, 0.0, -1e9) + jnp.where(x > 1, 0.6, 0.0)).astype(jnp.int32)

    found = pieces(fn, np.ones((B, S), np.float32), dims=("b", "s"), role="added")
    assert found.kinds == ("bias",)
