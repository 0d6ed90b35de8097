"""Attention with masks and biases: which keys a query sees, and how that is written."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings import Spelling
from tests.spellings.attention_parts import ROOT, attend, by_name, mix, positions, qkv, rand, scores

T = 7
FUTURE = np.triu(np.ones((16, 16), bool), k=1)
BLOCKED = -1e10


def causal_by_tril(q, k, v):
    x = scores(q, k)
    return attend(jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, jnp.finfo(x.dtype).min), v)


def causal_by_adding_infinities_above_the_diagonal(q, k, v):
    return attend(scores(q, k) + jnp.triu(jnp.full((T, T), -jnp.inf), k=1), v)


def causal_by_one_less_tril_times_a_billion(q, k, v):
    return attend(scores(q, k) + (1.0 - jnp.tri(T)) * -1e9, v)


def causal_by_a_product_and_a_difference(q, k, v):
    seen = jnp.tril(jnp.ones((T, T))).reshape(1, 1, T, T)
    return attend(scores(q, k) * seen - 1e10 * (1 - seen), v)


def causal_by_iota_and_select(q, k, v):
    x = scores(q, k)
    rows, columns = (lax.broadcasted_iota(jnp.int32, x.shape, i) for i in (2, 3))
    return attend(lax.select(rows >= columns, x, jnp.full_like(x, -1e30)), v)


def causal_where_the_future_is_replaced(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where((j > i)[None, None], BLOCKED, scores(q, k)), v)


def causal_by_a_slice_of_a_constant(q, k, v):
    hidden = lax.dynamic_slice(jnp.asarray(FUTURE)[None, None], (0, 0, 0, 0), (1, 1, T, T))
    return attend(jnp.where(jnp.logical_not(hidden), scores(q, k), -jnp.inf), v)


def causal_aligned_with_the_last_key(q, k, v):
    t, s = q.shape[1], k.shape[1]
    return attend(jnp.where(jnp.tril(jnp.ones((t, s), bool), k=s - t), scores(q, k), -1e30), v)


def causal_by_positions_that_are_a_cumulative_sum(q, k, v):
    at = jnp.cumsum(jnp.ones((2, T), jnp.int32), axis=1) - 1
    return attend(jnp.where(at[:, None, :, None] >= at[:, None, None, :], scores(q, k), -1e30), v)


def causal_before_the_scale(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return attend(jnp.where(jnp.tri(T, dtype=bool), x, -1e30) / q.shape[-1] ** 0.5, v)


def causal_with_keys_before_queries(q, k, v):
    x = jnp.einsum("bkhd,bqhd->bhkq", k, q) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.triu(jnp.ones((T, T), bool)), x, -1e30), axis=2)
    return jnp.einsum("bhkq,bkhd->bqhd", weights, v)


def causal_by_where_of_softmax(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), where=jnp.tri(T, dtype=bool)), v)


def causal_by_products_after_exp(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True)) * jnp.tri(T)
    return mix(e / e.sum(-1, keepdims=True), v)


def causal_and_masked_weights_zeroed_again(q, k, v):
    seen = jnp.tri(T, dtype=bool)
    return mix(jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores(q, k), -1e30)), 0.0), v)


def causal_by_flax_and_padding(q, k, v, tokens):
    mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0))
    return attend(jnp.where(mask > 0, scores(q, k), jnp.finfo(jnp.float32).min), v)


def causal_of_layers_in_a_scan(q, ws):
    mask = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e30)

    def layer(x, w):
        return attend(scores(x, x @ w) + mask, x), None

    return lax.scan(layer, q, ws)


def causal_by_chunks_of_queries(q, k, v):
    def chunk(part):
        start, q = part
        seen = start + jnp.arange(2)[:, None] >= jnp.arange(6)
        return attend(jnp.where(seen, scores(q, k), -1e30), v)

    return lax.map(chunk, (jnp.arange(3) * 2, q.reshape(2, 3, 2, 4, 8).swapaxes(0, 1)))


def window_by_two_comparisons(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where((j <= i) & (j > i - 3), scores(q, k), -1e30), v)


def window_by_a_difference_of_triangles(q, k, v):
    band = jnp.tril(jnp.ones((T, T), jnp.int32)) - jnp.tril(jnp.ones((T, T), jnp.int32), -3)
    return attend(scores(q, k) + jnp.where(band == 1, 0.0, -1e9), v)


def window_by_the_logarithm_of_a_band(q, k, v):
    band = jnp.triu(jnp.tril(jnp.ones((T, T))), k=-2)
    return attend(scores(q, k) + jnp.log(band), v)


def window_to_both_sides(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where(jnp.abs(i - j) <= 2, scores(q, k), -jnp.inf), v)


def chunks_by_division(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where(i // 3 == j // 3, scores(q, k), -1e30), v)


def chunks_by_a_kronecker_product(q, k, v):
    blocks = jnp.kron(jnp.eye(2), jnp.ones((3, 3)))
    return attend(jnp.where(blocks > 0, scores(q, k), -1e30), v)


def causal_in_chunks(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where((i - i % 3 == j - j % 3) & (i >= j), scores(q, k), -1e30), v)


def prefix_seen_by_all(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where((j <= i) | (j < 3), scores(q, k), -1e30), v)


def prefix_of_a_length_that_is_data(q, k, v, prefix):
    i, j = positions(T, T)
    seen = (j <= i)[None] | (j[None] < prefix[:, None, None])
    return attend(jnp.where(seen[:, None], scores(q, k), -1e30), v)


def every_other_key(q, k, v):
    i, j = positions(T, T)
    return attend(jnp.where((i >= j) & ((i - j) % 2 == 0), scores(q, k), -1e30), v)


def everything_is_seen(q, k, v):
    return attend(jnp.where(jnp.ones((T, T), bool), scores(q, k), -1e30), v)


def segments_and_causal(q, k, v, segments):
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return attend(jnp.where(same & jnp.tri(T, dtype=bool), scores(q, k), -1e30), v)


def segments_counted_from_ends_of_text(q, k, v, tokens):
    document = jnp.cumsum(tokens == 2, axis=1)
    same = jnp.equal(jnp.expand_dims(document, 2), jnp.expand_dims(document, 1))
    return attend(scores(q, k) + jnp.where(same, 0.0, -1e30)[:, None], v)


def segments_padding_and_causal_multiplied(q, k, v, segments):
    mask = nn.make_attention_mask(segments, segments, jnp.equal)
    mask = mask * nn.make_attention_mask(segments > 0, segments > 0) * nn.make_causal_mask(segments)
    return attend(scores(q, k) + lax.select(mask > 0, jnp.zeros(mask.shape), jnp.full(mask.shape, -1e10)), v)


def padding_by_lengths(q, k, v, lengths):
    seen = jnp.arange(k.shape[1]) < lengths[:, None]
    return attend(jnp.where(seen[:, None, None, :], scores(q, k), -1e30), v)


def padding_added_where_the_mask_is_set(q, k, v, mask):
    bias = lax.select(mask > 0, jnp.full(mask.shape, 0.0), jnp.full(mask.shape, jnp.finfo(jnp.float32).min))
    return attend(scores(q, k) + bias[:, None, None, :], v)


def padding_where_tokens_are_nought(q, k, v, tokens):
    hidden = jnp.expand_dims(jnp.equal(tokens, 0), (1, 2))
    return attend(jnp.where(hidden, -jnp.inf, scores(q, k)), v)


def padding_by_a_boolean_less_one(q, k, v, mask):
    bias = (mask.astype(jnp.float32) - 1.0)[:, None, None, :] * 1e9
    return attend(scores(q, k) + bias, v)


def integers_times_a_large_number_are_a_bias(q, k, v, mask):
    return attend(scores(q, k) + (1.0 - mask[:, None, None, :]) * -10000.0, v)


def any_mask_that_is_given(q, k, v, mask):
    return attend(jnp.where(mask, scores(q, k), -1e30), v)


def positions_that_are_given(q, k, v, at):
    return attend(jnp.where(at[:, None, :, None] >= at[:, None, None, :], scores(q, k), -1e30), v)


def minimum_of_two_added_masks(q, k, v, mask):
    causal = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)
    return attend(scores(q, k) + jnp.minimum(causal, jnp.where(mask, 0.0, -1e9)[:, None, None]), v)


def sum_of_two_added_masks(q, k, v, mask):
    causal = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)
    return attend(scores(q, k) + causal[None, None] + jnp.where(mask, 0.0, -1e9)[:, None, None, :], v)


def either_the_future_or_padding_hidden(q, k, v, mask):
    i, j = positions(T, T)
    hidden = jnp.logical_or(i < j, jnp.logical_not(mask)[:, None, None, :])
    return attend(jnp.where(hidden, -jnp.inf, scores(q, k)), v)


def one_mask_after_another(q, k, v, mask):
    x = jnp.where(mask[:, None, None, :], scores(q, k), -1e30)
    return attend(jnp.where(jnp.tri(T, dtype=bool), x, -1e30), v)


def less_two_above_the_diagonal(q, k, v):
    return attend(scores(q, k) + jnp.where(jnp.tri(T, dtype=bool), 0.0, -2.0), v)


def alibi_of_distances(q, k, v):
    i, j = positions(T, T)
    slopes = 2.0 ** (-8.0 * jnp.arange(1, 5) / 4)
    x = scores(q, k) + slopes[:, None, None] * (j - i)
    return attend(jnp.where(j <= i, x, -1e30), v)


def alibi_to_both_sides(q, k, v):
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
    return attend(scores(q, k) - distance * jnp.asarray([0.5, 0.25, 0.125, 0.0625])[:, None, None], v)


def alibi_of_positions_of_keys(q, k, v):
    bias = jnp.arange(1 - T, 1, dtype=jnp.float32)[None, None] * (2.0 ** -np.arange(1, 5))[:, None, None]
    x = jnp.where(jnp.tri(T, dtype=bool), scores(q, k) + bias, jnp.finfo(jnp.float32).min)
    return attend(x, v)


def bias_by_distance_from_a_table(q, k, v, table):
    bias = table[jnp.arange(T)[None, :] - jnp.arange(T)[:, None] + T - 1]
    return attend(scores(q, k) + bias.transpose(2, 0, 1), v)


def bias_that_is_learned_whole(q, k, v, bias):
    return attend(scores(q, k) + bias[None], v)


def bias_of_pairs(q, k, v, pairs, w):
    return attend(scores(q, k) + jnp.einsum("btsc,ch->bhts", pairs, w), v)


def bias_before_causal(q, k, v, bias):
    return attend(jnp.where(jnp.tri(T, dtype=bool), scores(q, k) + bias, -1e30), v)


SEEN = np.arange(T) < np.array([[5], [7]])
TOKENS = np.where(SEEN, np.random.RandomState(0).randint(1, 4, (2, T)), 0).astype(np.int32)
SEGMENTS = np.array([[1, 1, 2, 2, 2, 3, 3], [1, 1, 1, 1, 2, 2, 0]], np.int32)


def _row(fn, mask, *more, args=None):
    return Spelling(fn, (args or qkv(T)) + more, {"mask": mask, "scale": ROOT} if mask else {"scale": ROOT})


SPELLINGS = by_name(
    _row(causal_by_tril, "causal"),
    _row(causal_by_adding_infinities_above_the_diagonal, "causal"),
    _row(causal_by_one_less_tril_times_a_billion, "causal"),
    _row(causal_by_a_product_and_a_difference, "causal"),
    _row(causal_by_iota_and_select, "causal"),
    _row(causal_where_the_future_is_replaced, "causal"),
    _row(causal_by_a_slice_of_a_constant, "causal"),
    _row(causal_aligned_with_the_last_key, "causal", args=qkv(3, T)),
    _row(causal_by_positions_that_are_a_cumulative_sum, "causal"),
    _row(causal_before_the_scale, "causal"),
    _row(causal_with_keys_before_queries, "causal"),
    _row(causal_by_where_of_softmax, "causal"),
    _row(causal_by_products_after_exp, "causal"),
    _row(causal_and_masked_weights_zeroed_again, "causal"),
    _row(causal_by_flax_and_padding, "causal+padding", TOKENS),
    _row(causal_of_layers_in_a_scan, "causal", rand(2, 3, 8, 8), args=qkv(T)[:1]),
    _row(causal_by_chunks_of_queries, "", args=qkv(6)),
    _row(window_by_two_comparisons, "causal+window"),
    _row(window_by_a_difference_of_triangles, "causal+window"),
    _row(window_by_the_logarithm_of_a_band, "causal+window"),
    _row(window_to_both_sides, "window"),
    _row(chunks_by_division, "chunked"),
    _row(chunks_by_a_kronecker_product, "chunked", args=qkv(6)),
    _row(causal_in_chunks, "causal+chunked"),
    _row(prefix_seen_by_all, "prefix"),
    _row(prefix_of_a_length_that_is_data, "arbitrary", np.array([2, 4], np.int32)),
    _row(every_other_key, "arbitrary"),
    _row(everything_is_seen, "full"),
    _row(segments_and_causal, "causal+segments", SEGMENTS),
    _row(segments_counted_from_ends_of_text, "segments", TOKENS),
    _row(segments_padding_and_causal_multiplied, "causal+segments+padding", SEGMENTS),
    _row(padding_by_lengths, "padding", np.array([4, 6], np.int32), args=qkv(5, 6)),
    _row(padding_added_where_the_mask_is_set, "padding", SEEN.astype(np.int32)),
    _row(padding_where_tokens_are_nought, "padding", TOKENS),
    _row(padding_by_a_boolean_less_one, "padding", SEEN),
    _row(integers_times_a_large_number_are_a_bias, "bias", SEEN.astype(np.int32)),
    _row(any_mask_that_is_given, "arbitrary", rand(9, 2, 1, T, T) < 1),
    _row(
        positions_that_are_given,
        "arbitrary",
        np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]], np.int32),
    ),
    _row(minimum_of_two_added_masks, "causal+padding", SEEN),
    _row(sum_of_two_added_masks, "causal+padding", SEEN),
    _row(either_the_future_or_padding_hidden, "causal+padding", SEEN),
    _row(one_mask_after_another, "causal+padding", SEEN),
    _row(less_two_above_the_diagonal, "bias"),
    _row(alibi_of_distances, "causal+alibi"),
    _row(alibi_to_both_sides, "alibi"),
    _row(alibi_of_positions_of_keys, "causal+alibi"),
    _row(bias_by_distance_from_a_table, "bias", rand(4, 2 * T - 1, 4)),
    _row(bias_that_is_learned_whole, "bias", rand(4, 4, T, T)),
    _row(bias_of_pairs, "bias", rand(4, 2, T, T, 3), rand(5, 3, 4)),
    _row(bias_before_causal, "causal+bias", rand(4, 4, T, T)),
)
