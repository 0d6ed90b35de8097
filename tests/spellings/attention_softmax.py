"""Attention with the softmax, the scale and the precision written in many ways, by hand and by library."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings import Spelling
from tests.spellings.attention_parts import ROOT, attend, by_name, mix, qkv, rand, scores


def exp_of_the_difference_over_the_sum(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return mix(e / jnp.sum(e, axis=-1, keepdims=True), v)


def divided_after_the_product(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return mix(e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


def exp_without_a_shift(q, k, v):
    e = jnp.exp(scores(q, k))
    return mix(e / e.sum(-1, keepdims=True), v)


def exp_less_logsumexp(q, k, v):
    x = scores(q, k)
    return mix(jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True)), v)


def exp_of_log_softmax(q, k, v):
    return mix(jnp.exp(jax.nn.log_softmax(scores(q, k))), v)


def times_the_reciprocal(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - x.max(-1)[..., None])
    return mix(e * jnp.reciprocal(e.sum(-1))[..., None], v)


def reciprocal_as_a_power_after_the_product(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return mix(e, v) * (e.sum(-1) ** -1.0).swapaxes(1, 2)[..., None]


def sum_by_a_product_with_ones(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    total = e @ jnp.ones((e.shape[-1], 1), e.dtype)
    return mix(e / total, v)


def sum_by_a_column_of_ones_beside_the_values(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    both = mix(e, jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1))
    return both[..., :-1] / both[..., -1:]


def powers_of_two(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 * math.log2(math.e))
    e = jnp.exp2(x - x.max(-1, keepdims=True))
    return mix(e / e.sum(-1, keepdims=True), v)


def shifted_by_the_maximum_of_all(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - jnp.max(x))
    return mix(e / e.sum(-1, keepdims=True), v)


def shifted_by_a_constant(q, k, v):
    e = jnp.exp(scores(q, k) - 3.0)
    return mix(e / e.sum(-1, keepdims=True), v)


def shifted_by_the_logit_of_the_first_key(q, k, v):
    x = scores(q, k)
    e = jnp.exp(x - x[..., :1])
    return mix(e / e.sum(-1, keepdims=True), v)


def softmax_in_float32_of_bfloat16(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return mix(jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(v.dtype), v)


def softmax_in_bfloat16_throughout(q, k, v):
    return mix(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q * 0.25, k)), v)


def products_that_accumulate_in_float32(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    w = jax.nn.softmax(x).astype(v.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", w, v, preferred_element_type=jnp.float32)
    return out.astype(v.dtype)


def queries_and_keys_cast_to_float32(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) / q.shape[-1] ** 0.5
    return mix(jax.nn.softmax(x), v.astype(jnp.float32)).astype(q.dtype)


def fourth_root_on_both(q, k, v):
    root = q.shape[-1] ** -0.25
    return attend(jnp.einsum("bqhd,bkhd->bhqk", q * root, k * root), v)


def scale_on_keys_alone(q, k, v):
    return attend(jnp.einsum("bqhd,bkhd->bhqk", q, k / np.float32(np.sqrt(k.shape[-1]))), v)


def scale_in_three_places(q, k, v):
    return attend(0.5 * jnp.einsum("bqhd,bkhd->bhqk", q * 0.25, k / 3.0), v)


def no_scale(q, k, v):
    return attend(jnp.einsum("bqhd,bkhd->bhqk", q, k), v)


def scale_as_an_array_of_one_number(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return attend(lax.div(x, jnp.full(x.shape, 3.0)), v)


def cosine_with_a_constant_temperature(q, k, v):
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return attend(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 10.0, v)


def learned_temperature_on_the_queries(q, k, v, temperature):
    q, k = (x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    return attend(jnp.einsum("bqhd,bkhd->bhqk", q * jnp.exp(temperature)[:, None], k), v)


def negated_twice(q, k, v):
    x = -jnp.einsum("bqhd,bkhd->bhqk", -q, k) * q.shape[-1] ** -0.5
    return attend(x, v)


def soft_cap(q, k, v):
    return attend(jnp.tanh(scores(q, k) / 50.0) * 50.0, v)


def soft_cap_of_unscaled_logits(q, k, v):
    return attend(30.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) * (1 / 30.0)), v)


def soft_cap_with_the_scale_folded_in(q, k, v):
    q = q * (q.shape[-1] ** -0.5 / 20.0)
    return attend(jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * 20.0, v)


def soft_cap_then_causal(q, k, v):
    x = jnp.tanh(scores(q, k) / 5.0) * 5.0
    t = q.shape[1]
    return attend(jnp.where(jnp.tril(jnp.ones((t, t), bool)), x, -2.3819763e38), v)


def sink_concatenated_and_dropped(q, k, v, sinks):
    x = scores(q, k)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*x.shape[:3], 1))
    return mix(jax.nn.softmax(jnp.concatenate([x, column], axis=-1))[..., :-1], v)


def sink_before_the_keys(q, k, v, sinks):
    x = scores(q, k)
    column = jnp.tile(sinks.reshape(1, -1, 1, 1), (x.shape[0], 1, x.shape[2], 1))
    x = jnp.concatenate([column, x], axis=-1)
    x = x - x.max(-1, keepdims=True)
    return mix(jax.nn.softmax(x, axis=-1)[..., 1:], v)


def sink_added_to_the_sum(q, k, v, sinks):
    x = scores(q, k)
    top = jnp.maximum(x.max(-1), sinks[None, :, None])[..., None]
    e = jnp.exp(x - top)
    return mix(e / (e.sum(-1, keepdims=True) + jnp.exp(sinks[None, :, None, None] - top)), v)


def sink_of_a_logit_of_zero(q, k, v):
    x = scores(q, k)
    top = jnp.maximum(x.max(-1, keepdims=True), 0)
    e = jnp.exp(x - top)
    return mix(e / (jnp.exp(-top) + e.sum(-1, keepdims=True)), v)


def dropout_on_the_weights(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, weights.shape)
    return mix(jnp.where(kept, weights / 0.5, 0), v)


def jit_of_each_piece(q, k, v):
    x = jax.jit(scores)(q, k)
    weights = jax.jit(lambda x: jax.nn.softmax(x))(x)
    return jax.jit(lambda w, v: jax.jit(mix)(w, v))(weights, v)


def recomputed(q, k, v):
    return jax.checkpoint(lambda q, k, v: attend(scores(q, k), v) * 2)(q, k, v)


def in_a_branch(q, k, v):
    return lax.cond(q[0, 0, 0, 0] > 0, lambda: attend(scores(q, k), v), lambda: q)


def in_a_while_loop(q, k, v):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, attend(scores(c[1], k), v)), (0, q))


def attention_of_attention(q, k, v):
    first = attend(scores(q, k), v)
    return attend(scores(first, k), first)


BFLOAT = qkv(dtype=jnp.bfloat16)
FULL = {"mask": "full", "scale": ROOT}
ONE = {"mask": "full", "scale": 1.0}
ROUNDED = {"mask": "full", "scale": float(np.asarray(ROOT, jnp.bfloat16))}

SPELLINGS = by_name(
    Spelling(exp_of_the_difference_over_the_sum, qkv(), FULL),
    Spelling(divided_after_the_product, qkv(), FULL),
    Spelling(exp_without_a_shift, qkv(), FULL),
    Spelling(exp_less_logsumexp, qkv(), FULL),
    Spelling(exp_of_log_softmax, qkv(), FULL),
    Spelling(times_the_reciprocal, qkv(), FULL),
    Spelling(reciprocal_as_a_power_after_the_product, qkv(), FULL),
    Spelling(sum_by_a_product_with_ones, qkv(5, 7), FULL),
    Spelling(sum_by_a_column_of_ones_beside_the_values, qkv(5, 7), FULL),
    Spelling(powers_of_two, qkv(), FULL),
    Spelling(shifted_by_the_maximum_of_all, qkv(), FULL),
    Spelling(shifted_by_a_constant, qkv(), FULL),
    Spelling(shifted_by_the_logit_of_the_first_key, qkv(), FULL),
    Spelling(softmax_in_float32_of_bfloat16, BFLOAT, ROUNDED),
    Spelling(softmax_in_bfloat16_throughout, BFLOAT, {"mask": "full", "scale": 0.25}),
    Spelling(products_that_accumulate_in_float32, BFLOAT, FULL),
    Spelling(queries_and_keys_cast_to_float32, BFLOAT, FULL),
    Spelling(fourth_root_on_both, qkv(), FULL),
    Spelling(scale_on_keys_alone, qkv(), FULL),
    Spelling(scale_in_three_places, qkv(), {"mask": "full", "scale": 0.5 * 0.25 / 3}),
    Spelling(no_scale, qkv(), ONE),
    Spelling(scale_as_an_array_of_one_number, qkv(), {"mask": "full", "scale": 1 / 3}),
    Spelling(cosine_with_a_constant_temperature, qkv(), {"mask": "full", "scale": 10.0}),
    Spelling(learned_temperature_on_the_queries, (*qkv(), rand(4, 4)), ONE),
    Spelling(negated_twice, qkv(), {"mask": "full"}),
    Spelling(soft_cap, qkv(), FULL | {"cap": 50.0}),
    Spelling(soft_cap_of_unscaled_logits, qkv(), ONE | {"cap": 30.0}),
    Spelling(soft_cap_with_the_scale_folded_in, qkv(), FULL | {"cap": 20.0}),
    Spelling(soft_cap_then_causal, qkv(), {"mask": "causal", "cap": 5.0, "scale": ROOT}),
    Spelling(sink_concatenated_and_dropped, (*qkv(), rand(4, 4)), FULL | {"sinks": True}),
    Spelling(sink_before_the_keys, (*qkv(), rand(4, 4)), FULL | {"sinks": True}),
    Spelling(sink_added_to_the_sum, (*qkv(), rand(4, 4)), FULL | {"sinks": True}),
    Spelling(sink_of_a_logit_of_zero, qkv(), FULL | {"sinks": True}),
    Spelling(dropout_on_the_weights, qkv(), FULL),
    Spelling(jit_of_each_piece, qkv(), FULL),
    Spelling(recomputed, qkv(), FULL),
    Spelling(in_a_branch, qkv(), FULL),
    Spelling(in_a_while_loop, qkv(), FULL),
    Spelling(attention_of_attention, qkv(), FULL, count=2),
)
