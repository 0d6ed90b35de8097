"""Look-alikes of attention, wrong in one place: what is contracted, the softmax, its normaliser, the mask."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings import LookAlike
from tests.spellings.attention_parts import attend, by_name, mix, qkv, rand, scores

T = 5
TRI = np.tri(T, dtype=bool)


def exponentials(q, k, axis=-1):
    x = scores(q, k)
    return jnp.exp(x - x.max(axis, keepdims=True))


# ---------------------------------------------------------------- what is contracted


def values_contracted_over_queries(q, k, v):
    return jnp.einsum("bhqk,bqhd->bkhd", jax.nn.softmax(scores(q, k)), v)


def weights_transposed_before_the_values(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.softmax(q @ k.mT / 8**0.5).mT @ v


def values_contracted_over_heads_too(q, k, v):
    return jnp.einsum("bhqk,bkhd->bqd", jax.nn.softmax(scores(q, k)), v)


def values_contracted_over_the_batch_too(q, k, v):
    return jnp.einsum("bhqk,bkhd->qhd", jax.nn.softmax(scores(q, k)), v)


def values_taken_by_the_query_and_summed_over_queries(q, k, v):
    return jnp.einsum("bhqk,bkhd->bkhd", jax.nn.softmax(scores(q, k)), v)


def values_times_weights_without_a_sum(q, k, v):
    return jax.nn.softmax(scores(q, k))[..., None] * jnp.moveaxis(v, 2, 1)[:, :, None]


def greatest_weighted_value_in_place_of_the_sum(q, k, v):
    return (jax.nn.softmax(scores(q, k))[..., None] * jnp.moveaxis(v, 2, 1)[:, :, None]).max(3)


def weights_of_the_first_keys_only(q, k, v):
    return mix(jax.nn.softmax(scores(q, k))[..., : T - 2], v[:, : T - 2])


def weights_of_a_second_source_dropped(q, k, v, memory):
    x = jnp.concatenate([scores(q, k), scores(q, memory)], axis=-1)
    return mix(jax.nn.softmax(x)[..., T:], v)


def running_sum_of_the_weights(q, k, v):
    return mix(jnp.cumsum(jax.nn.softmax(scores(q, k)), axis=-1), v)


def heads_mixed_after_the_softmax(q, k, v, w):
    return mix(jnp.einsum("bhqk,hg->bgqk", jax.nn.softmax(scores(q, k)), w), v)


def heads_mixed_before_the_softmax(q, k, v, w):
    return attend(jnp.einsum("bhqk,hg->bgqk", scores(q, k), w), v)


def weights_averaged_over_heads(q, k, v):
    return jnp.einsum("bqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)).mean(1), v)


# ---------------------------------------------------------------- the axis of the softmax


def softmax_over_queries(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), axis=2), v)


def softmax_over_heads(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), axis=1), v)


def softmax_over_the_batch(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), axis=0), v)


def softmax_over_queries_and_keys(q, k, v):
    return mix(jax.nn.softmax(scores(q, k), axis=(2, 3)), v)


def softmax_over_the_groups_of_a_key_head(q, k, v):
    x = jnp.einsum("btngd,bsnd->bngts", q.reshape(2, T, 3, 2, 8), k)
    return jnp.einsum("bngts,bsnd->btngd", jax.nn.softmax(x, axis=2), v)


def softmax_over_both_axes_multiplied(q, k, v):
    x = scores(q, k)
    return mix(jax.nn.softmax(x, axis=2) * jax.nn.softmax(x, axis=3), v)


def softmax_over_slots_then_mean_over_keys(q, k, v):
    w = jax.nn.softmax(scores(q, k), axis=2) + 1e-8
    return mix(w / w.sum(-1, keepdims=True), v)


def maximum_over_queries(q, k, v):
    e = exponentials(q, k, axis=2)
    return mix(e / jnp.exp(scores(q, k)).sum(-1, keepdims=True), v)


def maximum_of_each_key_on_both_sides(q, k, v):
    e = exponentials(q, k, axis=2)
    return mix(e / e.sum(-1, keepdims=True), v)


def maximum_over_heads(q, k, v):
    e = exponentials(q, k, axis=1)
    return mix(e / e.sum(-1, keepdims=True), v)


def sum_over_queries(q, k, v):
    e = exponentials(q, k)
    return mix(e / e.sum(2, keepdims=True), v)


def sum_over_queries_after_the_product(q, k, v):
    e = exponentials(q, k)
    return mix(e, v) / e.sum(2).swapaxes(1, 2)[..., None]


def sum_over_heads(q, k, v):
    e = exponentials(q, k)
    return mix(e / e.sum((1, 3), keepdims=True), v)


def sum_of_another_head(q, k, v):
    e = exponentials(q, k)
    return mix(e / jnp.roll(e.sum(-1, keepdims=True), 1, axis=1), v)


def sum_of_the_query_before(q, k, v):
    e = exponentials(q, k)
    return mix(e / jnp.roll(e.sum(-1, keepdims=True), 1, axis=2), v)


def sum_with_a_maximum_of_its_own(q, k, v):
    x = scores(q, k)
    total = jnp.exp(x - x.max((2, 3), keepdims=True)).sum(-1, keepdims=True)
    return mix(exponentials(q, k) / total, v)


def running_sum_as_the_denominator(q, k, v):
    e = exponentials(q, k)
    return mix(e / jnp.cumsum(e, axis=-1), v)


# ---------------------------------------------------------------- the normaliser


def never_normalised(q, k, v):
    return mix(exponentials(q, k), v)


def divided_by_the_root_of_the_sum(q, k, v):
    e = exponentials(q, k)
    return mix(e / jnp.sqrt(e.sum(-1, keepdims=True)), v)


def divided_by_the_length_of_the_vector(q, k, v):
    e = exponentials(q, k)
    return mix(e / jnp.sqrt((e * e).sum(-1, keepdims=True)), v)


def divided_by_the_greatest(q, k, v):
    e = jnp.exp(scores(q, k))
    return mix(e / e.max(-1, keepdims=True), v)


def divided_by_the_mean(q, k, v):
    e = exponentials(q, k)
    return mix(e / e.mean(-1, keepdims=True), v)


def divided_by_the_number_of_keys(q, k, v):
    return mix(exponentials(q, k) / k.shape[1], v)


def one_more_in_the_sum_after_the_shift(q, k, v):
    e = exponentials(q, k)
    return mix(e / (e.sum(-1, keepdims=True) + 1), v)


def divided_twice(q, k, v):
    e = exponentials(q, k)
    total = e.sum(-1, keepdims=True)
    return mix(e / total / total, v)


def multiplied_by_the_sum(q, k, v):
    e = exponentials(q, k)
    return mix(e * e.sum(-1, keepdims=True), v)


def sum_of_unscaled_logits(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return mix(jnp.exp(x * 8**-0.5) / jnp.exp(x).sum(-1, keepdims=True), v)


def softmax_of_the_softmax(q, k, v):
    return attend(jax.nn.softmax(scores(q, k)), v)


def logarithm_of_the_weights(q, k, v):
    return mix(jax.nn.log_softmax(scores(q, k)), v)


# ---------------------------------------------------------------- the mask


def mask_on_the_numerator_alone(q, k, v):
    e = exponentials(q, k)
    return mix(jnp.where(TRI, e, 0) / e.sum(-1, keepdims=True), v)


def mask_on_the_denominator_alone(q, k, v):
    e = exponentials(q, k)
    return mix(e / jnp.where(TRI, e, 0).sum(-1, keepdims=True), v)


def mask_after_the_softmax(q, k, v):
    return mix(jax.nn.softmax(scores(q, k)) * TRI, v)


def another_mask_above_than_below(q, k, v):
    e = exponentials(q, k)
    return mix(e * TRI / (e * np.tri(T, k=1)).sum(-1, keepdims=True), v)


def weights_cut_further_after_the_softmax(q, k, v):
    w = jax.nn.softmax(jnp.where(TRI, scores(q, k), -1e30))
    return mix(jnp.where(np.tri(T, k=1) - np.tri(T, k=-2) > 0, w, 0), v)


def masked_logits_are_nought(q, k, v):
    return attend(scores(q, k) * TRI, v)


def masked_logits_are_less_two(q, k, v):
    return attend(jnp.where(TRI, scores(q, k), -2.0), v)


def keys_chosen_by_their_logits(q, k, v):
    x = scores(q, k)
    return attend(jnp.where(x >= jax.lax.top_k(x, 3)[0][..., -1:], x, -1e30), v)


def keys_above_the_mean_logit(q, k, v):
    x = scores(q, k)
    return attend(jnp.where(x > x.mean(-1, keepdims=True), x, -1e30), v)


def small_weights_dropped(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(jnp.where(w > 0.1, w, 0), v)


def greatest_weight_only(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(jax.nn.one_hot(w.argmax(-1), T), v)


W = rand(4, 4, 4)
GROUPS = qkv(n=6, kv=3)
SUM = "add up to one"
KEYS = "quer|keys"

LOOKALIKES = by_name(
    LookAlike(values_contracted_over_queries, qkv(), KEYS),
    LookAlike(weights_transposed_before_the_values, qkv(), KEYS),
    LookAlike(values_contracted_over_heads_too, qkv()),
    LookAlike(values_contracted_over_the_batch_too, qkv()),
    LookAlike(values_taken_by_the_query_and_summed_over_queries, qkv()),
    LookAlike(values_times_weights_without_a_sum, qkv()),
    LookAlike(greatest_weighted_value_in_place_of_the_sum, qkv()),
    LookAlike(weights_of_the_first_keys_only, qkv()),
    LookAlike(weights_of_a_second_source_dropped, (*qkv(), rand(4, 2, 5, 4, 8))),
    LookAlike(running_sum_of_the_weights, qkv()),
    LookAlike(heads_mixed_after_the_softmax, (*qkv(), W)),
    LookAlike(heads_mixed_before_the_softmax, (*qkv(), W)),
    LookAlike(weights_averaged_over_heads, qkv()),
    LookAlike(softmax_over_queries, qkv(), KEYS),
    LookAlike(softmax_over_heads, qkv(), KEYS),
    LookAlike(softmax_over_the_batch, qkv(), KEYS),
    LookAlike(softmax_over_queries_and_keys, qkv(), KEYS),
    LookAlike(softmax_over_the_groups_of_a_key_head, GROUPS, KEYS),
    LookAlike(softmax_over_both_axes_multiplied, qkv()),
    LookAlike(softmax_over_slots_then_mean_over_keys, qkv()),
    LookAlike(maximum_over_queries, qkv()),
    LookAlike(maximum_of_each_key_on_both_sides, qkv(), "shift"),
    LookAlike(maximum_over_heads, qkv(), "shift"),
    LookAlike(sum_over_queries, qkv(), SUM),
    LookAlike(sum_over_queries_after_the_product, qkv(), SUM),
    LookAlike(sum_over_heads, qkv(), SUM),
    LookAlike(sum_of_another_head, qkv(), SUM),
    LookAlike(sum_of_the_query_before, qkv(), SUM),
    LookAlike(sum_with_a_maximum_of_its_own, qkv(), SUM),
    LookAlike(running_sum_as_the_denominator, qkv()),
    LookAlike(never_normalised, qkv()),
    LookAlike(divided_by_the_root_of_the_sum, qkv(), SUM),
    LookAlike(divided_by_the_length_of_the_vector, qkv()),
    LookAlike(divided_by_the_greatest, qkv()),
    LookAlike(divided_by_the_mean, qkv(), SUM),
    LookAlike(divided_by_the_number_of_keys, qkv()),
    LookAlike(one_more_in_the_sum_after_the_shift, qkv(), SUM),
    LookAlike(divided_twice, qkv()),
    LookAlike(multiplied_by_the_sum, qkv()),
    LookAlike(sum_of_unscaled_logits, qkv()),
    LookAlike(softmax_of_the_softmax, qkv()),
    LookAlike(logarithm_of_the_weights, qkv()),
    LookAlike(mask_on_the_numerator_alone, qkv(), SUM),
    LookAlike(mask_on_the_denominator_alone, qkv(), SUM),
    LookAlike(mask_after_the_softmax, qkv(), SUM),
    LookAlike(another_mask_above_than_below, qkv(), SUM),
    LookAlike(weights_cut_further_after_the_softmax, qkv(), SUM),
    LookAlike(masked_logits_are_nought, qkv()),
    LookAlike(masked_logits_are_less_two, qkv()),
    LookAlike(keys_chosen_by_their_logits, qkv()),
    LookAlike(keys_above_the_mean_logit, qkv()),
    LookAlike(small_weights_dropped, qkv()),
    LookAlike(greatest_weight_only, qkv()),
)
