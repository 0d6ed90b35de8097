"""Attention whose keys serve several heads of queries, and attention as libraries have it."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tests.spellings import Spelling
from tests.spellings.attention_parts import ROOT, attend, by_name, heads_first, qkv, rand, scores

dot_product_attention = jax.nn.dot_product_attention


def groups_by_repeat(q, k, v):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    return attend(scores(q, k), v)


def groups_by_broadcast_and_reshape(q, k, v):
    def repeat(x):
        b, n, s, d = x.shape
        return jnp.broadcast_to(x[:, :, None], (b, n, 2, s, d)).reshape(b, n * 2, s, d)

    weights = jax.nn.softmax(jnp.matmul(q, repeat(k).swapaxes(2, 3)) / math.sqrt(q.shape[-1]))
    return jnp.matmul(weights, repeat(v))


def groups_by_stack_and_reshape(q, k, v):
    k, v = (jnp.stack([x, x], axis=3).reshape(2, 5, 6, 8) for x in (k, v))
    return attend(scores(q, k), v)


def groups_by_taking_heads(q, k, v):
    heads = jnp.arange(6) // 2
    return attend(scores(q, k[:, :, heads]), jnp.take(v, heads, axis=2))


def groups_in_five_dimensions(q, k, v):
    b, t, n, d = q.shape
    q = q.reshape(b, t, k.shape[2], -1, d)
    weights = jax.nn.softmax(jnp.einsum("btngd,bsnd->bngts", q, k) * d**-0.5, axis=-1)
    return jnp.einsum("bngts,bsnd->btngd", weights, v).reshape(b, t, n, d)


def groups_between_queries_and_keys(q, k, v):
    q = q.reshape(2, 5, 3, 2, 8)
    weights = jax.nn.softmax(jnp.einsum("bskgd,btkd->bskgt", q, k) * 8**-0.5)
    return jnp.einsum("bskgt,btkd->bskgd", weights, v)


def groups_folded_into_queries(q, k, v):
    b, n, t, d = q.shape
    q = q.reshape(b, 3, 2 * t, d)
    weights = jax.nn.softmax(jnp.einsum("bnqd,bnsd->bnqs", q, k) * d**-0.5)
    return jnp.einsum("bnqs,bnsd->bnqd", weights, v).reshape(b, n, t, d)


def groups_by_vmap(q, k, v):
    return jax.vmap(lambda q: attend(scores(q, k), v), in_axes=3, out_axes=3)(q.reshape(2, 5, 3, 2, 8))


def groups_with_a_unit_dimension_of_keys(q, k, v):
    q, k, v = q.reshape(2, 3, 2, 5, 8), k[:, :, None], v[:, :, None]
    return (jax.nn.softmax(jnp.matmul(q, jnp.matrix_transpose(k)) * 8**-0.5) @ v).reshape(2, 6, 5, 8)


def one_key_head_without_a_dimension(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bhtd,bsd->bhts", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhts,bsd->bhtd", weights, v)


def one_key_head_by_broadcasting(q, k, v):
    logits = jnp.einsum("bqhd,bkxd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkxd->bqhd", jax.nn.softmax(logits), v)


def one_key_head_with_heads_beside_queries(q, k, v):
    q = q.reshape(2, 20, 8)
    return (jax.nn.softmax(q @ k.mT * q.shape[-1] ** -0.5) @ v).reshape(2, 5, 4, 8)


def dpa(q, k, v):
    return dot_product_attention(q, k, v)


def dpa_with_a_scale(q, k, v):
    return dot_product_attention(q, k, v, scale=0.3)


def dpa_causal(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True)


def dpa_with_a_mask(q, k, v, mask):
    return dot_product_attention(q, k, v, mask=mask)


def dpa_with_a_bias(q, k, v, bias):
    return dot_product_attention(q, k, v, bias)


def dpa_with_a_window(q, k, v):
    return dot_product_attention(q, k, v, local_window_size=2)


def dpa_with_a_window_to_the_left(q, k, v):
    return dot_product_attention(q, k, v, local_window_size=(3, 0))


def dpa_with_a_window_and_causal(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True, local_window_size=(2, 2))


def dpa_with_lengths_of_keys(q, k, v, lengths):
    return dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def dpa_with_both_lengths(q, k, v, lengths):
    return dot_product_attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def dpa_of_groups(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def dpa_of_one_key_head(q, k, v):
    return dot_product_attention(q, k, v)


def dpa_without_a_batch(q, k, v):
    return dot_product_attention(q, k, v)


def dpa_in_bfloat16_with_everything(q, k, v, mask, bias):
    return dot_product_attention(q, k, v, bias, mask, scale=0.5, is_causal=True)


def linen_dot_product_attention(q, k, v, mask):
    return nn.dot_product_attention(q, k, v, mask=mask)


def linen_dot_product_attention_with_bias(q, k, v, bias):
    return nn.dot_product_attention(q, k, v, bias=bias, force_fp32_for_softmax=True)


def linen_self_attention(params, x):
    module = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32)
    return module.apply({"params": params}, x, mask=nn.make_causal_mask(x[..., 0]))


def linen_attention_with_normalised_queries(params, x, memory):
    module = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, normalize_qk=True)
    return module.apply({"params": params}, x, memory, memory)


def linen_decode(params, cache, x):
    module = nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, decode=True)
    return module.apply({"params": params, "cache": cache}, x, mutable=["cache"])


def nnx_dot_product_attention_with_dropout(q, k, v):
    return nnx.dot_product_attention(q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.5)


def nnx_dot_product_attention_causal_with_bias(q, k, v, bias):
    return nnx.dot_product_attention(q, k, v, bias, is_causal=True)


def nnx_multi_head_attention(params, x):
    made = nnx.eval_shape(lambda: nnx.MultiHeadAttention(4, 9, 32, decode=False, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(made)
    state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
    return nnx.merge(graph, state)(x)


def equinox_like(w, query, key, value):
    q, k, v = (
        jax.vmap(lambda row, w=w[name]: w @ row)(x).reshape(x.shape[0], 4, 8)
        for name, x in (("q", query), ("k", key), ("v", value))
    )

    def head(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("sd,Sd->sS", q / math.sqrt(q.shape[-1]), k), axis=-1)
        return jnp.einsum("sS,Sd->sd", weights, v)

    out = jax.vmap(head, in_axes=1, out_axes=1)(q, k, v).reshape(query.shape[0], -1)
    return jax.vmap(lambda row: w["o"] @ row)(out)


def haiku_like(w, query, key, mask):
    q, k, v = (jnp.dot(x, w[i]).reshape(*x.shape[:-1], 4, 8) for i, x in enumerate((query, key, key)))
    logits = jnp.einsum("...thd,...Thd->...htT", q, k)
    logits *= 1.0 / np.sqrt(8).astype(k.dtype)
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    attn = jnp.einsum("...htT,...Thd->...thd", weights, v)
    return jnp.reshape(attn, (*query.shape[:-1], -1))


def groups_in_a_loop_over_key_heads(q, k, v):
    outs = []
    for i in range(3):
        part = q[:, :, 2 * i : 2 * i + 2]
        weights = jax.nn.softmax(jnp.einsum("btgd,bsd->bgts", part, k[:, :, i]) * 8**-0.5)
        outs.append(jnp.einsum("bgts,bsd->btgd", weights, v[:, :, i]))
    return lax.concatenate(outs, 2)


GROUPS = qkv(n=6, kv=3)
ONE_HEAD = (rand(2, 2, 5, 8), rand(3, 2, 5, 8))
KEYS = np.arange(5) < np.array([[3], [5]])
LENGTHS = np.array([3, 5], np.int32)
FULL = {"mask": "full", "scale": ROOT}
AXES = {"axes": {"batch": 2, "kv_heads": 3, "q_group": 2, "length": 5, "kv_length": 5, "head_dim": 8}}
SHARED = {"axes": {"batch": 2, "kv_heads": 1, "q_group": 4}}
MHA = {
    **{
        f: {"kernel": rand(i, 9, 4, 8), "bias": rand(i, 4, 8)}
        for i, f in enumerate(("query", "key", "value"))
    },
    "out": {"kernel": rand(3, 4, 8, 9), "bias": rand(4, 9)},
}
NORMED = MHA | {f: {"scale": rand(i, 8)} for i, f in enumerate(("query_ln", "key_ln"))}
CACHE = {
    "cached_key": np.zeros((2, 7, 4, 8), np.float32),
    "cached_value": np.zeros((2, 7, 4, 8), np.float32),
    "cache_index": np.array(0, np.int32),
}
NNX = tuple(x for f in ("key", "out", "query", "value") for x in (MHA[f]["bias"], MHA[f]["kernel"]))
EQUINOX = {"q": rand(1, 32, 9), "k": rand(2, 32, 9), "v": rand(3, 32, 9), "o": rand(4, 9, 32)}

SPELLINGS = by_name(
    Spelling(groups_by_repeat, GROUPS, FULL | AXES),
    Spelling(groups_by_broadcast_and_reshape, heads_first(*GROUPS), FULL | AXES),
    Spelling(groups_by_stack_and_reshape, GROUPS, FULL | AXES),
    Spelling(groups_by_taking_heads, GROUPS, FULL | AXES),
    Spelling(groups_in_five_dimensions, GROUPS, FULL | AXES),
    Spelling(groups_between_queries_and_keys, GROUPS, FULL | AXES),
    Spelling(groups_folded_into_queries, heads_first(*GROUPS), FULL),
    Spelling(groups_by_vmap, GROUPS, FULL | AXES),
    Spelling(groups_with_a_unit_dimension_of_keys, heads_first(*GROUPS), FULL | AXES),
    Spelling(groups_in_a_loop_over_key_heads, GROUPS, FULL | {"axes": {"batch": 2, "length": 5}}, count=3),
    Spelling(one_key_head_without_a_dimension, (rand(1, 2, 4, 5, 8), *ONE_HEAD), FULL | SHARED),
    Spelling(one_key_head_by_broadcasting, qkv(kv=1), FULL | SHARED),
    Spelling(one_key_head_with_heads_beside_queries, (qkv()[0], *ONE_HEAD), FULL),
    Spelling(dpa, qkv(), FULL),
    Spelling(dpa_with_a_scale, qkv(), {"mask": "full", "scale": 0.3}),
    Spelling(dpa_causal, qkv(), {"mask": "causal", "scale": ROOT}),
    Spelling(dpa_with_a_mask, (*qkv(), KEYS[:, None, None]), {"mask": "padding"}),
    Spelling(dpa_with_a_bias, (*qkv(), rand(4, 1, 4, 5, 5)), {"mask": "bias"}),
    Spelling(dpa_with_a_window, qkv(7), {"mask": "window"}),
    Spelling(dpa_with_a_window_to_the_left, qkv(7), {"mask": "causal+window"}),
    Spelling(dpa_with_a_window_and_causal, qkv(7), {"mask": "causal+window"}),
    Spelling(dpa_with_lengths_of_keys, (*qkv(), LENGTHS), {"mask": "padding"}),
    Spelling(dpa_with_both_lengths, (*qkv(), LENGTHS), {"mask": "padding"}),
    Spelling(dpa_of_groups, GROUPS, {"mask": "causal", "scale": ROOT} | AXES),
    Spelling(dpa_of_one_key_head, qkv(kv=1), FULL | SHARED),
    Spelling(dpa_without_a_batch, tuple(x[0] for x in qkv(5, 7)), FULL),
    Spelling(
        dpa_in_bfloat16_with_everything,
        (*qkv(dtype=jnp.bfloat16), KEYS[:, None, None], rand(4, 1, 4, 5, 5, dtype=jnp.bfloat16)),
        {"mask": "causal+padding+bias", "scale": 0.5},
    ),
    Spelling(linen_dot_product_attention, (*qkv(), rand(4, 2, 1, 5, 5) < 1), {"mask": "arbitrary"}),
    Spelling(linen_dot_product_attention_with_bias, (*qkv(), rand(4, 2, 4, 5, 5)), {"mask": "bias"}),
    Spelling(linen_self_attention, (MHA, rand(5, 2, 7, 9)), {"mask": "causal", "scale": ROOT}),
    Spelling(linen_attention_with_normalised_queries, (NORMED, rand(5, 2, 5, 9), rand(6, 2, 7, 9)), FULL),
    Spelling(linen_decode, (MHA, CACHE, rand(5, 2, 1, 9)), {"mask": "decode", "scale": ROOT}),
    Spelling(nnx_dot_product_attention_with_dropout, qkv(), FULL),
    Spelling(
        nnx_dot_product_attention_causal_with_bias, (*qkv(), rand(4, 2, 4, 5, 5)), {"mask": "causal+bias"}
    ),
    Spelling(nnx_multi_head_attention, (NNX, rand(5, 2, 5, 9)), FULL),
    Spelling(equinox_like, (EQUINOX, rand(1, 5, 9), rand(2, 7, 9), rand(2, 7, 9)), FULL),
    Spelling(
        haiku_like,
        (rand(1, 3, 9, 32), rand(2, 2, 5, 9), rand(3, 2, 5, 9), np.tri(5, dtype=bool)),
        {"mask": "arbitrary"},
    ),
)
