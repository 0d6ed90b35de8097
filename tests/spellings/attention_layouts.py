"""Attention in many layouts: where batch, heads, queries and keys lie, and how the products are written."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from tests.spellings import Spelling
from tests.spellings.attention_parts import ROOT, by_name, heads_first, qkv, rand


def einsum_bhqk(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.shape[-1]), k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def einsum_bqhk(q, k, v):
    logits = jnp.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bqhk,bkhd->bqhd", jax.nn.softmax(logits, axis=3), v)


def einsum_keys_before_queries(q, k, v):
    logits = jnp.einsum("bkhd,bqhd->bhkq", k, q) * q.shape[-1] ** -0.5
    return jnp.einsum("bhkq,bkhd->bqhd", jax.nn.softmax(logits, axis=2), v)


def einsum_keys_outermost(q, k, v):
    logits = jnp.einsum("bkhd,bqhd->kbqh", k * q.shape[-1] ** -0.5, q)
    return jnp.einsum("kbqh,bkhd->bqhd", jax.nn.softmax(logits, axis=0), v)


def values_on_the_left(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bkhd,bqhd->bhqk", k, q) * q.shape[-1] ** -0.5)
    return jnp.einsum("bkhd,bhqk->bhdq", v, weights)


def matmul_and_swapaxes(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])) @ v


def matmul_of_transposed_keys(q, k, v):
    q, v = q.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    logits = jnp.matmul(q, k.transpose(0, 2, 3, 1)) / math.sqrt(q.shape[-1])
    return jnp.matmul(jax.nn.softmax(logits), v).transpose(0, 2, 1, 3).reshape(*q.shape[:1], q.shape[2], -1)


def dot_general_raw(q, k, v):
    logits = lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))))
    weights = jax.nn.softmax(logits * q.shape[-1] ** -0.5, axis=-1)
    return lax.dot_general(weights, v, (((3,), (1,)), ((0, 1), (0, 2))))


def heads_folded_into_the_batch(q, k, v):
    def fold(x):
        return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])

    out = jax.nn.softmax(jnp.einsum("ntd,nsd->nts", fold(q) * q.shape[-1] ** -0.5, fold(k))) @ fold(v)
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(0, 2, 1, 3)


def batch_folded_into_the_heads_by_moveaxis(q, k, v):
    q, k, v = (jnp.moveaxis(x, 2, 0).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v))
    return jnp.einsum("nts,nsd->ntd", jax.nn.softmax(jnp.einsum("ntd,nsd->nts", q, k) * ROOT), v)


def single_head_in_two_dimensions(q, k, v):
    return jax.nn.softmax(jnp.dot(q, k.T) / math.sqrt(k.shape[1]), axis=1).dot(v)


def no_heads(q, k, v):
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) * q.shape[-1] ** -0.5) @ v


def no_batch(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("hts,she->the", weights, v)


def vmap_over_heads_and_batch(q, k, v):
    def head(q, k, v):
        return jax.nn.softmax(q @ k.T * q.shape[-1] ** -0.5) @ v

    return jax.vmap(jax.vmap(head, in_axes=1, out_axes=1))(q, k, v)


def vmap_over_each_query(q, k, v):
    def query(q, k, v):
        return jax.nn.softmax(k @ q * q.shape[0] ** -0.5) @ v

    return jax.vmap(jax.vmap(query, in_axes=(0, None, None)))(q, k, v)


def map_over_heads(q, k, v):
    def head(qkv):
        q, k, v = qkv
        return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) * q.shape[-1] ** -0.5) @ v

    return lax.map(head, tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v)))


def map_over_chunks_of_queries(q, k, v):
    def chunk(q):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    b, t, n, d = q.shape
    chunks = q.reshape(b, 2, t // 2, n, d).swapaxes(0, 1)
    return lax.map(chunk, chunks).swapaxes(0, 1).reshape(q.shape)


def scan_over_the_batch(q, k, v):
    def row(carry, qkv):
        q, k, v = qkv
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5)
        return carry + 1, jnp.einsum("hqk,khd->qhd", weights, v)

    return lax.scan(row, 0, (q, k, v))


def loop_over_heads(q, k, v):
    outs = []
    for h in range(q.shape[2]):
        weights = jax.nn.softmax(q[:, :, h] @ k[:, :, h].swapaxes(1, 2) * q.shape[-1] ** -0.5)
        outs.append(weights @ v[:, :, h])
    return jnp.stack(outs, axis=2)


def loop_over_the_batch_in_two_dimensions(q, k, v):
    each = [jax.nn.softmax(q[i] @ k[i].T * ROOT) @ v[i] for i in range(q.shape[0])]
    return jnp.stack(each)


def heads_in_the_embedding(q, k, v):
    q, k, v = (x.reshape(*x.shape[:2], 4, 8) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 8**0.5)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*q.shape[:2], 32)


def head_split_and_concatenate(q, k, v):
    q, k, v = (jnp.concatenate(jnp.split(x, 4, axis=2), axis=0) for x in (q, k, v))
    out = jax.nn.softmax(jnp.matmul(q, k.transpose(0, 2, 1)) / 8**0.5) @ v
    return jnp.concatenate(jnp.split(out, 4, axis=0), axis=2)


def time_before_batch(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("tbhd,sbhd->bhts", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhts,sbhd->tbhd", weights, v)


def ellipsis_over_two_dimensions_of_batch(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def head_dim_in_two_parts(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhcd,bkhcd->bhqk", q, k) * 8**-0.5)
    return jnp.einsum("bhqk,bkhcd->bqhcd", weights, v)


def values_of_another_dimension(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhe->bqhe", weights, v)


def values_projected_by_the_output(q, k, v, w):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bqhd,hdm->bqm", jnp.einsum("bhqk,bkhd->bqhd", weights, v), w)


def output_stays_transposed(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bkqh", q, k) * q.shape[-1] ** -0.5, axis=1)
    return jnp.einsum("bkqh,bkhd->dbhq", weights, v)


def one_query_without_a_dimension(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bhd,bkhd->bhk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhk,bkhd->bhd", weights, v)


def learned_query_for_all_of_the_batch(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("hd,bkhd->bhk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhk,bkhd->bhd", weights, v)


def pooling_by_one_vector(q, x):
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(jnp.einsum("bsd,d->bs", x, q)), x)


def keys_and_values_for_all_of_the_batch(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,khd->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,khd->bqhd", weights, v)


def keys_reversed_before_the_product(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k[:, ::-1]) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def values_of_the_token_before(q, k, v):
    before = jnp.pad(v, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, before)


def neighbours_gathered_for_each_query(q, k, v):
    near = (jnp.arange(5)[:, None] + jnp.arange(3)) % 5
    logits = jnp.einsum("bthd,btwhd->bthw", q, k[:, near]) * q.shape[-1] ** -0.5
    return jnp.einsum("bthw,btwhd->bthd", jax.nn.softmax(logits), v[:, near])


def blocks_of_their_own(q, k, v):
    q, k, v = (x.reshape(x.shape[0], 2, 3, *x.shape[2:]) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bnqhd,bnkhd->bnhqk", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bnhqk,bnkhd->bnqhd", weights, v).reshape(2, 6, 4, 8)


def product_and_sum_in_place_of_dots(q, k, v):
    logits = (q[:, :, None] * k[:, None]).sum(-1) * q.shape[-1] ** -0.5
    return (jax.nn.softmax(logits, axis=2)[..., None] * v[:, None]).sum(2)


FULL = {"mask": "full", "scale": ROOT}
AXES = {"axes": {"batch": 2, "kv_heads": 4, "q_group": 1, "length": 5, "kv_length": 5, "head_dim": 8}}
FLAT = tuple(x.reshape(2, 5, 32) for x in qkv())

SPELLINGS = by_name(
    Spelling(einsum_bhqk, qkv(), FULL | AXES),
    Spelling(einsum_bqhk, qkv(), FULL | AXES),
    Spelling(einsum_keys_before_queries, qkv(), FULL | AXES),
    Spelling(einsum_keys_outermost, qkv(5, 7), FULL | {"axes": {"length": 5, "kv_length": 7}}),
    Spelling(values_on_the_left, qkv(), FULL | AXES),
    Spelling(matmul_and_swapaxes, heads_first(*qkv()), FULL | AXES),
    Spelling(matmul_of_transposed_keys, qkv(), FULL | AXES),
    Spelling(dot_general_raw, qkv(), FULL | AXES),
    Spelling(
        heads_folded_into_the_batch, qkv(), FULL | {"axes": {"length": 5, "kv_length": 5, "head_dim": 8}}
    ),
    Spelling(batch_folded_into_the_heads_by_moveaxis, qkv(5, 7), FULL | {"axes": {"kv_length": 7}}),
    Spelling(single_head_in_two_dimensions, (rand(1, 5, 8), rand(2, 7, 8), rand(3, 7, 8)), FULL),
    Spelling(no_heads, (rand(1, 2, 5, 8), rand(2, 2, 7, 8), rand(3, 2, 7, 8)), FULL | {"axes": {"batch": 2}}),
    Spelling(no_batch, (rand(1, 5, 3, 8), rand(2, 5, 3, 8), rand(3, 5, 3, 7)), FULL),
    Spelling(vmap_over_heads_and_batch, qkv(), FULL | AXES),
    Spelling(vmap_over_each_query, (rand(1, 2, 5, 8), rand(2, 2, 7, 8), rand(3, 2, 7, 8)), FULL),
    Spelling(map_over_heads, qkv(), FULL | {"axes": {"batch": 2, "length": 5}}),
    Spelling(map_over_chunks_of_queries, qkv(6), FULL | {"axes": {"length": 3, "kv_length": 6}}),
    Spelling(scan_over_the_batch, qkv(), FULL),
    Spelling(loop_over_heads, qkv(n=3), FULL, count=3),
    Spelling(loop_over_the_batch_in_two_dimensions, (rand(1, 2, 5, 8),) * 3, FULL, count=2),
    Spelling(heads_in_the_embedding, FLAT, FULL | AXES),
    Spelling(head_split_and_concatenate, FLAT, FULL),
    Spelling(time_before_batch, (rand(1, 5, 2, 4, 8), rand(2, 7, 2, 4, 8), rand(3, 7, 2, 4, 8)), FULL),
    Spelling(
        ellipsis_over_two_dimensions_of_batch,
        (rand(1, 2, 3, 5, 4, 8), rand(2, 2, 3, 5, 4, 8), rand(3, 2, 3, 5, 4, 8)),
        FULL | {"axes": {"batch": 6, "kv_heads": 4, "length": 5}},
    ),
    Spelling(head_dim_in_two_parts, tuple(rand(i, 2, 5, 3, 2, 4) for i in range(3)), FULL),
    Spelling(values_of_another_dimension, qkv(e=7), FULL | {"axes": {"head_dim": 8, "v_head_dim": 7}}),
    Spelling(values_projected_by_the_output, (*qkv(), rand(4, 4, 8, 9)), FULL | AXES),
    Spelling(output_stays_transposed, qkv(5, 7), FULL),
    Spelling(
        one_query_without_a_dimension, (rand(1, 2, 4, 8), *qkv(7)[1:]), FULL | {"axes": {"kv_length": 7}}
    ),
    Spelling(learned_query_for_all_of_the_batch, (rand(1, 4, 8), *qkv(7)[1:]), FULL),
    Spelling(pooling_by_one_vector, (rand(1, 9), rand(2, 2, 7, 9)), {"mask": "full", "scale": 1.0}),
    Spelling(keys_and_values_for_all_of_the_batch, (qkv()[0], rand(2, 7, 4, 8), rand(3, 7, 4, 8)), FULL),
    Spelling(keys_reversed_before_the_product, qkv(), FULL | AXES),
    Spelling(values_of_the_token_before, qkv(), FULL | AXES),
    Spelling(neighbours_gathered_for_each_query, qkv(), FULL | {"axes": {"kv_length": 3}}),
    Spelling(blocks_of_their_own, qkv(6), FULL | {"axes": {"length": 3, "kv_length": 3}}),
    Spelling(product_and_sum_in_place_of_dots, qkv(), FULL | AXES),
)
