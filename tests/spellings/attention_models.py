"""Attention as published models have it, each with what is particular to it, and with a cache."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings import Spelling
from tests.spellings.attention_parts import ROOT, attend, by_name, mix, positions, qkv, rand, scores

T = 7


def rotary(x):
    """Rotary positions, halves turned against each other; x [b, t, n, d]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


def rms(x, w):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + w)


def gpt2_like(x, w, b, out):
    q, k, v = jnp.split(x @ w + b, 3, axis=2)
    q, k, v = (y.reshape(*y.shape[:2], 4, 8) for y in (q, k, v))
    seen = lax.dynamic_slice(jnp.tril(jnp.ones((1, 1, 16, 16), bool)), (0, 0, 0, 0), (1, 1, T, T))
    bias = lax.select(seen, jnp.zeros(seen.shape), jnp.full(seen.shape, jnp.finfo(jnp.float32).min))
    return attend(scores(q, k) + bias, v).reshape(x.shape) @ out


def nano_gpt_like(x, w):
    b, t, c = x.shape
    y = (x @ w).reshape(b, t, 3, 4, c // 4)
    q, k, v = (y[:, :, i].swapaxes(1, 2) for i in range(3))
    att = (q @ k.swapaxes(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    att = jnp.where(jnp.tril(jnp.ones((1, 1, t, t))) == 0, -jnp.inf, att)
    return (jax.nn.softmax(att, axis=-1) @ v).swapaxes(1, 2).reshape(b, t, c)


def gpt_j_like(x, w, mask):
    q, k, v = (jnp.reshape(x @ w[i], (*x.shape[:2], 4, 8)) for i in range(3))
    sin, cos = (f(jnp.arange(T)[:, None, None] / 10.0 ** jnp.arange(4)) for f in (jnp.sin, jnp.cos))

    def turn(y):
        twisted = jnp.stack((-y[..., 1::2], y[..., ::2]), axis=-1).reshape(y.shape)
        return y * jnp.repeat(cos, 2, axis=-1) + twisted * jnp.repeat(sin, 2, axis=-1)

    seen = jnp.tri(T, dtype=bool)[None, None] & (mask[:, None, None, :] > 0)
    return attend(jnp.where(seen, scores(turn(q), turn(k)), -1e9), v).reshape(x.shape)


def bloom_like(q, k, v, mask):
    slopes = jnp.array([2.0 ** (-2 * (i + 1)) for i in range(4)])
    tensor = ((mask.cumsum(axis=-1) - 1) * mask)[:, None, :]
    alibi = (slopes[..., None] * tensor).reshape(2, 4, 1, T)
    x = jnp.einsum("bqhd,bkhd->bhqk", q * (1.0 / math.sqrt(8)), k) + alibi
    seen = jnp.tri(T, dtype=bool)[None, None] & (mask[:, None, None] == 1)
    return attend(x + jnp.where(seen, 0.0, -1e9), v)


def t5_like(q, k, v, table):
    distance = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
    n = jnp.abs(distance)
    far = 2 + (jnp.log(n / 2 + 1e-6) / math.log(8 / 2) * 2).astype(jnp.int32)
    bucket = jnp.where(distance > 0, 4, 0) + jnp.where(n < 2, n, jnp.minimum(far, 3))
    bias = jnp.transpose(table[bucket], (2, 0, 1))[None]
    return attend(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, v)


def t5x_like(q, k, v, segments):
    bias = lax.select(
        (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tri(T, dtype=bool),
        jnp.full((2, 1, T, T), 0.0),
        jnp.full((2, 1, T, T), -1e10),
    )
    x = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) + bias
    return mix(jax.nn.softmax(x).astype(jnp.bfloat16), v)


def vit_like(x, token, w):
    x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
    q, k, v = jnp.moveaxis((x @ w).reshape(2, -1, 3, 4, 8), 2, 0)
    return attend(scores(q, k), v).reshape(x.shape)


def swin_like(q, k, v, table, shifted):
    at = np.stack(np.meshgrid(range(2), range(3), indexing="ij")).reshape(2, -1)
    index = ((at[:, :, None] - at[:, None, :]) + np.array([[[1]], [[2]]])).transpose(1, 2, 0) @ np.array(
        [5, 1]
    )
    x = scores(q, k) + table[index.reshape(-1)].reshape(6, 6, 4).transpose(2, 0, 1)[None]
    x = x.reshape(2, 3, 4, 6, 6) + shifted[None, :, None]
    return attend(x.reshape(6, 4, 6, 6), v)


def whisper_cross_like(x, memory, w):
    q = (x @ w[0] * 8**-0.5).reshape(2, -1, 4, 8)
    k, v = ((memory @ w[i]).reshape(2, -1, 4, 8) for i in (1, 2))
    return mix(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


def perceiver_like(latents, inputs, w):
    latents = jnp.broadcast_to(latents, (inputs.shape[0], *latents.shape))
    q, k, v = latents @ w[0], inputs @ w[1], inputs @ w[2]
    return jax.nn.softmax(jnp.einsum("bld,bid->bli", q, k) / math.sqrt(q.shape[-1])) @ v


def palm_like(x, w):
    fused = x @ w
    q, k, v, ff = jnp.split(fused, [32, 40, 48], axis=-1)
    q, k = rotary(q.reshape(2, T, 4, 8)), rotary(k[:, :, None])[:, :, 0]
    x = jnp.einsum("bihd,bjd->bhij", q * 8**-0.5, k)
    x = jnp.where(jnp.triu(jnp.ones((T, T), bool), 1), -jnp.finfo(x.dtype).max, x)
    x = x - lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return jnp.einsum("bhij,bjd->bihd", jax.nn.softmax(x), v).reshape(2, T, 32), jax.nn.silu(ff)


def mistral_like(q, k, v):
    i, j = positions(T, T)
    q, k = rotary(q), rotary(k)
    q = q.reshape(2, T, 3, 2, 8)
    x = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * 8**-0.5
    x = jnp.where((i >= j) & (i - j < 4), x, -(2.0**30))
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(x), v).reshape(2, T, 48)


def gemma2_like(q, k, v):
    for local in (True, False):
        x = jnp.einsum("BTNH,BSNH->BTNS", rotary(q) * 256**-0.5, rotary(k))
        x = jnp.tanh(x / 50.0) * 50.0
        mask = jnp.tri(T, dtype=bool)
        if local:
            mask *= jnp.triu(jnp.ones((T, T), bool), -2)
        x = jnp.where(mask[None, :, None, :], x, -2.3819763e38)
        q = jnp.einsum("BTNS,BSNH->BTNH", jax.nn.softmax(x, axis=-1).astype(k.dtype), v)
    return q


def gemma3_like(q, k, v, wq, wk):
    q, k = rotary(rms(q, wq)), rotary(rms(k, wk))
    q = (q * 0.3).reshape(2, T, 3, 2, 8)
    x = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(2, T, 6, T)
    x = jnp.where(jnp.expand_dims(jnp.tri(T, dtype=bool)[None], -2), x, -2.3819763e38)
    w = jax.nn.softmax(x, axis=-1).reshape(2, T, 3, 2, T)
    return jnp.einsum("BTKGS,BSKH->BTKGH", w, v).reshape(2, T, 6, 8)


def gpt_oss_like(q, k, v, sinks):
    q = q.reshape(T, 3, 2, 8)
    k, v = (jnp.broadcast_to(x[:, :, None], (T, 3, 2, 8)) for x in (k, v))
    x = jnp.einsum("qhmd,khmd->hmqk", q, k) * 8**-0.5
    x += jnp.triu(jnp.full((T, T), -jnp.inf), k=1) + jnp.tril(jnp.full((T, T), -jnp.inf), k=-3)
    sink = jnp.broadcast_to(sinks.reshape(3, 2, 1, 1), (3, 2, T, 1))
    w = jax.nn.softmax(jnp.concatenate([x, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("hmqk,khmd->qhmd", w, v).reshape(T, -1)


def llama4_chunked_like(q, k, v):
    i, j = positions(T, T)
    k, v = (jnp.repeat(x, 2, axis=2) for x in (rotary(k), v))
    seen = (jnp.abs(i // 4 - j // 4) == 0) & (j <= i)
    return attend(jnp.where(seen, scores(rotary(q), k), jnp.finfo(jnp.float32).min), v)


def latent_keys_and_values(q, latent, rope, w):
    c = latent / jnp.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)
    k_nope, v = jnp.split(jnp.einsum("bsr,rhe->bshe", c, w), [8], axis=-1)
    k_rope = jnp.broadcast_to(rotary(rope[:, :, None]), (2, T, 4, 4))
    q = jnp.concatenate([q[..., :8], rotary(q[..., 8:])], axis=-1)
    x = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.concatenate([k_nope, k_rope], axis=-1)) * 12**-0.5
    return attend(jnp.where(jnp.tri(T, dtype=bool), x, -1e30), v)


def latent_keys_absorbed(q, latent, rope, w_k, w_v):
    q_latent = jnp.einsum("bqhd,rhd->bqhr", q[..., :8], w_k)
    x = jnp.einsum("bqhr,bkr->bhqk", q_latent, latent) + jnp.einsum("bqhd,bkd->bhqk", q[..., 8:], rope)
    o = jnp.einsum("bhqk,bkr->bqhr", jax.nn.softmax(x * 12**-0.5), latent)
    return jnp.einsum("bqhr,rhe->bqhe", o, w_v)


def transformer_xl_like(q, k, v, r, u, w):
    x = jnp.einsum("bqhd,rhd->bhqr", q + w, r)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(2, 4, T + 1, T)[:, :, 1:]
    x = (jnp.einsum("bqhd,bkhd->bhqk", q + u, k) + x) * 8**-0.5
    return attend(jnp.where(jnp.tri(T, dtype=bool), x, -1e30), v)


def segment_anything_like(q, k, v, rows, columns):
    """Queries and keys on a grid of 2 by 3; q, k, v [b * n, 6, d]."""
    x = (q * 8**-0.5) @ k.swapaxes(-2, -1)
    grid = q.reshape(-1, 2, 3, 8)
    down, across = jnp.einsum("bhwc,hkc->bhwk", grid, rows), jnp.einsum("bhwc,wkc->bhwk", grid, columns)
    x = (x.reshape(-1, 2, 3, 2, 3) + down[..., None] + across[..., None, :]).reshape(x.shape)
    return jax.nn.softmax(x) @ v


def pair_bias_and_gate_like_alphafold(q, k, v, mask, pairs, gate):
    bias = 1e9 * (mask.astype(jnp.float32) - 1.0)[:, :, None, None, :]
    x = jnp.einsum("bsqhc,bskhc->bshqk", q * 8**-0.5, k) + bias + pairs[:, None]
    return jnp.einsum("bshqk,bskhc->bsqhc", jax.nn.softmax(x), v) * jax.nn.sigmoid(gate)


def decode_with_a_cursor(q, k, v, keys, values, at):
    keys = lax.dynamic_update_slice(keys, k, (0, at, 0, 0))
    values = lax.dynamic_update_slice(values, v, (0, at, 0, 0))
    seen = jnp.arange(keys.shape[1]) <= at
    return attend(jnp.where(seen[None, None, None], scores(q, keys), -1e30), values), keys, values


def decode_with_a_cursor_for_each_row(q, k, v, keys, values, at):
    write = jax.vmap(lambda c, x, i: lax.dynamic_update_slice_in_dim(c, x, i, axis=0))
    keys, values = write(keys, k, at), write(values, v, at)
    bias = jnp.where(jnp.arange(keys.shape[1])[None] < at[:, None] + 1, 0.0, -1e30)
    return attend(scores(q, keys) + bias[:, None, None], values), (keys, values)


def decode_by_a_one_hot_write(q, k, v, keys, values, at):
    hot = jax.nn.one_hot(at, keys.shape[1], dtype=keys.dtype)[None, :, None, None]
    keys, values = keys * (1 - hot) + k * hot, values * (1 - hot) + v * hot
    seen = lax.broadcasted_iota(jnp.int32, (1, 1, 1, keys.shape[1]), 3) <= at
    return attend(jnp.where(seen, scores(q, keys), -1e10), values), keys, values


def decode_of_three_at_once(q, k, v, keys, values, at):
    rows = at + jnp.arange(3)
    keys, values = jnp.asarray(keys).at[:, rows].set(k), jnp.asarray(values).at[:, rows].set(v)
    seen = rows[:, None] >= jnp.arange(keys.shape[1])[None]
    return attend(jnp.where(seen, scores(q, keys), -1e30), values), keys, values


def decode_of_groups_in_a_scan_of_layers(q, k, v, keys, values, at):
    def layer(x, cache):
        keys, values = (
            lax.dynamic_update_slice(c, y, (0, at, 0, 0)) for c, y in zip(cache, (k, v), strict=True)
        )
        w = jnp.einsum("bngd,bsnd->bngs", x, keys) * 8**-0.5
        w = jax.nn.softmax(jnp.where(jnp.arange(T) <= at, w, -1e30))
        return jnp.einsum("bngs,bsnd->bngd", w, values), (keys, values)

    return lax.scan(layer, q, (keys, values))


def decode_from_pages(q, pages_k, pages_v, table, lengths):
    k, v = (pages[table].reshape(2, -1, 4, 8) for pages in (pages_k, pages_v))
    seen = jnp.arange(k.shape[1]) < lengths[:, None]
    return attend(jnp.where(seen[:, None, None], scores(q, k), -1e30), v)


def memory_of_the_segment_before(q, k, v, keys, values):
    k, v = jnp.concatenate([keys, k], axis=1), jnp.concatenate([values, v], axis=1)
    i, j = positions(q.shape[1], k.shape[1])
    return attend(jnp.where(j <= i + keys.shape[1], scores(q, k), -1e30), v)


def layers_in_a_scan(x, ws, mask):
    bias = jnp.where(mask, 0.0, -1e9)[:, None, None]

    @jax.checkpoint
    def layer(x, w):
        q, k, v = (rms(x, 0) @ w[i] for i in range(3))
        q, k, v = (y.reshape(2, T, 4, 8) for y in (q, k, v))
        return x + attend(scores(q, k) + bias, v).reshape(x.shape), None

    return lax.scan(layer, x, ws)


SEEN = np.arange(T) < np.array([[5], [7]])
SEGMENTS = np.array([[1, 1, 2, 2, 2, 3, 3], [1, 1, 1, 1, 2, 2, 2]], np.int32)
CACHE = (rand(4, 2, T, 4, 8), rand(5, 2, T, 4, 8))
AT = np.array(4, np.int32)
X = rand(6, 2, T, 32)
CAUSAL = {"mask": "causal", "scale": ROOT}
ONE = {"axes": {"batch": 2, "length": 1, "kv_length": T, "head_dim": 8}}
DECODE = {"mask": "decode", "scale": ROOT}
LAYERS = (
    rand(1, 2, 3, 2, 8),
    rand(2, 2, 1, 3, 8),
    rand(3, 2, 1, 3, 8),
    *(rand(i, 5, 2, T, 3, 8) for i in (4, 5)),
)

SPELLINGS = by_name(
    Spelling(gpt2_like, (X, rand(1, 32, 96), rand(2, 96), rand(3, 32, 32)), CAUSAL),
    Spelling(nano_gpt_like, (X, rand(1, 32, 96)), CAUSAL),
    Spelling(
        gpt_j_like, (X, rand(1, 3, 32, 32), SEEN.astype(np.int32)), {"mask": "causal+padding", "scale": ROOT}
    ),
    Spelling(bloom_like, (*qkv(T), SEEN.astype(np.int32)), {"mask": "causal+padding+alibi", "scale": ROOT}),
    Spelling(t5_like, (*qkv(T), rand(4, 8, 4)), {"mask": "bias", "scale": 1.0}),
    Spelling(t5x_like, (*qkv(T, dtype=jnp.bfloat16), SEGMENTS), {"mask": "causal+segments", "scale": 1.0}),
    Spelling(vit_like, (X, rand(1, 1, 32), rand(2, 32, 96)), {"mask": "full", "axes": {"length": T + 1}}),
    Spelling(swin_like, (*qkv(6, b=6), rand(4, 15, 4), rand(5, 3, 6, 6)), {"mask": "bias", "scale": ROOT}),
    Spelling(
        whisper_cross_like,
        (X, rand(1, 2, 9, 32), rand(2, 3, 32, 32)),
        {"mask": "full", "axes": {"batch": 2, "kv_heads": 4, "length": T, "kv_length": 9}},
    ),
    Spelling(
        perceiver_like,
        (rand(1, 3, 8), rand(2, 2, T, 8), rand(3, 3, 8, 8)),
        {"mask": "full", "scale": ROOT, "axes": {"length": 3, "kv_length": T}},
    ),
    Spelling(palm_like, (X, rand(1, 32, 96)), {"mask": "causal", "axes": {"kv_heads": 1, "q_group": 4}}),
    Spelling(
        mistral_like,
        qkv(T, n=6, kv=3),
        {"mask": "causal+window", "scale": ROOT, "axes": {"kv_heads": 3, "q_group": 2}},
    ),
    Spelling(
        gemma2_like, qkv(T), {"mask": ["causal", "causal+window"], "scale": 1 / 16, "cap": 50.0}, count=2
    ),
    Spelling(
        gemma3_like,
        (*qkv(T, n=6, kv=3), rand(4, 8), rand(5, 8)),
        {"mask": "causal", "axes": {"kv_heads": 3, "q_group": 2}},
    ),
    Spelling(
        gpt_oss_like,
        (*(x[0] for x in qkv(T, n=6, kv=3)), rand(4, 6)),
        {"mask": "causal+window", "scale": ROOT, "sinks": True, "axes": {"kv_heads": 3, "q_group": 2}},
    ),
    Spelling(
        llama4_chunked_like,
        qkv(T, n=6, kv=3),
        {"mask": "causal+chunked", "scale": ROOT, "axes": {"kv_heads": 3, "q_group": 2}},
    ),
    Spelling(
        latent_keys_and_values,
        (rand(1, 2, T, 4, 12), rand(2, 2, T, 6), rand(3, 2, T, 4), rand(4, 6, 4, 15)),
        {"mask": "causal", "scale": 12**-0.5, "axes": {"head_dim": 12, "v_head_dim": 7}},
    ),
    Spelling(
        latent_keys_absorbed,
        (rand(1, 2, 5, 4, 12), rand(2, 2, T, 6), rand(3, 2, T, 4), rand(4, 6, 4, 8), rand(5, 6, 4, 7)),
        {"mask": "full", "scale": 12**-0.5},
    ),
    Spelling(
        transformer_xl_like,
        (*qkv(T), rand(4, T, 4, 8), rand(5, 4, 8), rand(6, 4, 8)),
        {"mask": "causal+bias", "scale": ROOT},
    ),
    Spelling(
        segment_anything_like,
        (*(rand(i, 8, 6, 8) for i in range(3)), rand(4, 2, 2, 8), rand(5, 3, 3, 8)),
        {"mask": "bias", "scale": ROOT},
    ),
    Spelling(
        pair_bias_and_gate_like_alphafold,
        (
            *(rand(i, 2, 3, 5, 4, 8) for i in range(3)),
            rand(4, 2, 3, 5) < 1,
            rand(5, 2, 4, 5, 5),
            rand(6, 2, 3, 5, 4, 8),
        ),
        {"mask": "padding+bias", "scale": ROOT, "axes": {"batch": 6, "kv_heads": 4, "length": 5}},
    ),
    Spelling(decode_with_a_cursor, (*qkv(1), *CACHE, AT), DECODE | ONE),
    Spelling(decode_with_a_cursor_for_each_row, (*qkv(1), *CACHE, np.array([3, 5], np.int32)), DECODE | ONE),
    Spelling(decode_by_a_one_hot_write, (*qkv(1), *CACHE, AT), DECODE | ONE),
    Spelling(decode_of_three_at_once, (*qkv(3), *CACHE, np.array(2, np.int32)), DECODE),
    Spelling(decode_of_groups_in_a_scan_of_layers, (*LAYERS, AT), DECODE | {"axes": {"kv_heads": 3}}),
    Spelling(
        decode_from_pages,
        (*qkv(1)[:1], rand(2, 5, 3, 4, 8), rand(3, 5, 3, 4, 8), np.array([[0, 3], [4, 1]]), np.array([4, 6])),
        {"scale": ROOT, "axes": {"kv_length": 6, "length": 1}},
    ),
    Spelling(
        memory_of_the_segment_before, (*qkv(3), *CACHE), CAUSAL | {"axes": {"length": 3, "kv_length": 10}}
    ),
    Spelling(layers_in_a_scan, (X, rand(1, 2, 3, 32, 32), SEEN), {"mask": "padding", "scale": ROOT}),
)
