"""Kimi Delta Attention in plain JAX, with full attention in every fourth layer, and SwiGLU.

Of each four layers three carry a state by the gated delta rule, with a decay for each channel of the keys,
behind short convolutions; the fourth is causal attention without positions (Kimi Team 2025, Kimi Linear,
2510.26692, whose experts are a dense MLP here, and whose attention has no latent).

`forward`, `loss`, `train_step`, `decode_step` and `init` are factories: each returns a function of plain
pytrees and its arguments, as shapes unless `abstract=False`. Weights and AdamW's moments are float32, the
computation is in the configuration's `dtype`; states, gates, the softmax, the norms and the loss are in
float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import training
from .training import Batch, Cache, Params

Shapes = dict[str, tuple[int, ...]]

EVERY = 4
"""Of so many layers the last is attention."""
FORGOTTEN = -50.0
"""The log decay at the first token of a text: nothing is left of the one before."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of one model; layers are a multiple of four."""

    vocab: int
    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    taps: int = 4  # of the short convolutions
    norm_epsilon: float = 1e-5
    dtype: str = "bfloat16"
    remat: bool = True  # four layers are computed again in the backward pass: nothing of them is kept


SIZES = {
    "tiny": Config(316, 4, 96, 4, 24, 224, dtype="float32", remat=False),
    "1b": Config(163_840, 16, 1536, 16, 128, 6144),
    "3b": Config(163_840, 28, 2304, 32, 128, 9216),  # Kimi Linear 48B-A3B's width, less its experts
}


def norm(x: jax.Array, scale: jax.Array, config: Config) -> jax.Array:
    """x over its root mean square, times a learnt scale."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + config.norm_epsilon) * scale).astype(x.dtype)


def unit(x: jax.Array) -> jax.Array:
    """x over its length."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[b, l, embed] to heads, [b, l, h, d]."""
    return jnp.einsum("ble,ehd->blhd", x, kernel.astype(x.dtype))


def merge(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[b, l, h, d] from the heads back to [b, l, embed]."""
    return jnp.einsum("blhd,hde->ble", x, kernel.astype(x.dtype))


def convolved(x: jax.Array, before: jax.Array, kernel: jax.Array, same: jax.Array | None) -> jax.Array:
    """x [b, l, h, d] behind the taps - 1 tokens `before`, each channel with its own kernel [taps, h, d].

    same: [taps, b, l], whether the token that a tap meets is one of the same text.
    """
    length, taps = x.shape[1], kernel.shape[0]
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    total = jnp.zeros_like(x)
    for tap in range(taps):
        met = whole[:, tap : tap + length]
        if same is not None:
            met = jnp.where(same[tap][..., None, None], met, 0)
        total = total + met * kernel[tap].astype(x.dtype)
    return jax.nn.silu(total)


def gates(x: jax.Array, weights: Params) -> tuple[jax.Array, jax.Array]:
    """The log decay [b, l, h, d], at most 0, and the strength of writing [b, l, h]."""
    low = x @ weights["decay_down"].astype(x.dtype)
    rate = project(low, weights["decay_up"]).astype(jnp.float32) + weights["decay_bias"]
    decay = -jnp.exp(weights["decay_rate"])[:, None] * jax.nn.softplus(rate)
    return decay, jax.nn.sigmoid((x @ weights["strength"].astype(x.dtype)).astype(jnp.float32))


def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One token: the state [b, h, d, d] decays, its value for the key is replaced, and the query reads it."""
    query, key, value, decay, strength = (x.astype(jnp.float32) for x in now)
    state = state * jnp.exp(decay)[..., None]
    change = strength[..., None] * (value - jnp.einsum("bhde,bhd->bhe", state, key))
    state = state + key[..., :, None] * change[..., None, :]
    return state, jnp.einsum("bhde,bhd->bhe", state, query)


@jax.named_scope("kda")
def recurrent(
    x: jax.Array, weights: Params, cache: Cache, segments: jax.Array | None, config: Config
) -> tuple[jax.Array, Cache]:
    """The delta rule over x [b, l, embed], from the cache's state on; and the cache after it."""
    same, first = None, None
    if segments is not None:
        padded = jnp.pad(segments, ((0, 0), (config.taps - 1, 0)), constant_values=-1)
        length = segments.shape[1]
        same = jnp.stack([padded[:, tap : tap + length] == segments for tap in range(config.taps)])
        first = ~same[config.taps - 2]
    mixed, after = {}, {}
    for name in ("query", "key", "value"):
        made = project(x, weights[name])
        mixed[name] = convolved(made, cache[name], weights[f"{name}_taps"], same)
        after[name] = jnp.concatenate([cache[name], made.astype(cache[name].dtype)], axis=1)[:, x.shape[1] :]
    query, key = unit(mixed["query"]), unit(mixed["key"])
    decay, strength = gates(x, weights)
    if first is not None:
        decay = jnp.where(first[..., None, None], FORGOTTEN, decay)
    steps = [jnp.moveaxis(a, 1, 0) for a in (query, key, mixed["value"], decay, strength)]
    state, out = jax.lax.scan(step, cache["state"], tuple(steps))
    out = jnp.moveaxis(out, 0, 1).astype(x.dtype) / math.sqrt(config.head_dim)
    gate = project(x @ weights["gate_down"].astype(x.dtype), weights["gate_up"])
    out = norm(out, weights["out_norm"], config) * jax.nn.sigmoid(gate)
    return merge(out, weights["out"]), after | {"state": state}


@jax.named_scope("attention")
def attention(
    x: jax.Array, weights: Params, cache: Cache, mask: jax.Array, position: jax.Array | None
) -> tuple[jax.Array, Cache]:
    """Attention over x itself, or, from `position` on, over the cache's tokens. mask: [b, q, s]."""
    query, key, value = (project(x, weights[name]) for name in ("query", "key", "value"))
    if position is not None:
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(cache[name], new, position, axis=1)
            for name, new in (("key", key), ("value", value))
        )
        cache = {"key": key, "value": value}
    scores = jnp.einsum("bqhd,bshd->bhqs", query, key).astype(jnp.float32) / math.sqrt(query.shape[-1])
    scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
    share = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return merge(jnp.einsum("bhqs,bshd->bqhd", share, value), weights["out"]), cache


@jax.named_scope("mlp")
def mlp(x: jax.Array, weights: Params, config: Config) -> jax.Array:
    """The residual branch of the MLP, norm and all."""
    normed = norm(x, weights["mlp_norm"], config)
    hidden = jax.nn.silu(normed @ weights["mlp_gate"].astype(x.dtype)) * (
        normed @ weights["mlp_up"].astype(x.dtype)
    )
    return hidden @ weights["mlp_down"].astype(x.dtype)


def four(
    x: jax.Array,
    weights: Params,
    cache: Cache,
    mask: jax.Array,
    segments: jax.Array | None,
    position: jax.Array | None,
    config: Config,
) -> tuple[jax.Array, Cache]:
    """Three layers that carry a state, and one of attention."""
    after = []
    for layer, entry in zip(weights["recurrent"], cache["recurrent"], strict=True):
        mixed, entry = recurrent(norm(x, layer["norm"], config), layer, entry, segments, config)
        x = x + mixed
        x = x + mlp(x, layer, config)
        after.append(entry)
    layer = weights["attention"]
    mixed, entry = attention(norm(x, layer["norm"], config), layer, cache["attention"], mask, position)
    x = x + mixed
    return x + mlp(x, layer, config), {"recurrent": after, "attention": entry}


def initial_params(config: Config, scan: bool, key: jax.Array) -> Params:
    """Random weights; `layers` are groups of four, stacked where they are scanned, else a list."""
    if config.layers % EVERY:
        raise ValueError(f"{config.layers} layers are no multiple of {EVERY}")
    keys = jax.random.split(key, 2 + config.layers // EVERY)
    embed = jax.random.normal(keys[0], (config.vocab, config.embed)) * 0.02
    head = jax.random.normal(keys[1], (config.embed, config.vocab)) * config.embed**-0.5
    groups = [_group(config, each) for each in keys[2:]]
    layers: Any = jax.tree.map(lambda *xs: jnp.stack(xs), *groups) if scan else groups
    return {"embed": embed, "layers": layers, "norm": jnp.ones(config.embed), "head": head}


def _group(config: Config, key: jax.Array) -> Params:
    e, h, d, m = config.embed, config.heads, config.head_dim, config.mlp
    heads, back = (e, h, d), (h, d, e)
    shared: Shapes = {"mlp_gate": (e, m), "mlp_up": (e, m), "mlp_down": (m, e), "out": back}
    shared |= dict.fromkeys(("query", "key", "value"), heads)
    own: Shapes = {f"{name}_taps": (config.taps, h, d) for name in ("query", "key", "value")}
    own |= {"decay_down": (e, d), "decay_up": (d, h, d), "gate_down": (e, d), "gate_up": (d, h, d)}
    own |= {"strength": (e, h)}

    def layer(key: jax.Array, shapes: Shapes) -> Params:
        keys = jax.random.split(key, len(shapes))
        made: Params = {}
        for each, (name, shape) in zip(keys, shapes.items(), strict=True):
            fan = h * d if name == "out" else shape[0]
            made[name] = jax.random.normal(each, shape) * fan**-0.5
        return made | {"norm": jnp.ones(e), "mlp_norm": jnp.ones(e)}

    *ours, last = jax.random.split(key, EVERY)
    gated = {"decay_rate": jnp.zeros(h), "decay_bias": jnp.zeros((h, d)), "out_norm": jnp.ones(d)}
    carrying = [layer(each, shared | own) | gated for each in ours]
    return {"recurrent": carrying, "attention": layer(last, shared)}


def _empty(config: Config, batch: int, length: int) -> Cache:
    """What four layers have seen, which is nothing; with room for the keys of `length` tokens."""
    h, d = config.heads, config.head_dim
    few = jnp.zeros((batch, config.taps - 1, h, d), config.dtype)
    seen = {"state": jnp.zeros((batch, h, d, d)), "query": few, "key": few, "value": few}
    held = {name: jnp.zeros((batch, length, h, d), config.dtype) for name in ("key", "value")}
    return {"recurrent": [seen] * (EVERY - 1), "attention": held}


def empty_cache(config: Config, scan: bool, batch: int, length: int) -> Cache:
    """Of all groups of four layers, stacked where they are scanned, else a list."""
    count, one = config.layers // EVERY, _empty(config, batch, length)
    return jax.tree.map(lambda x: jnp.stack([x] * count), one) if scan else [one] * count


def _logits(x: jax.Array, params: Params, config: Config) -> jax.Array:
    return norm(x, params["norm"], config) @ params["head"].astype(x.dtype)


def apply(config: Config, scan: bool) -> Callable[[Params, Batch], jax.Array]:
    """The logits of a batch as a function of the weights."""

    def forward(params: Params, batch: Batch) -> jax.Array:
        tokens, segments = batch["inputs"], batch.get("segments")
        index = jnp.arange(tokens.shape[1])
        mask = (index[:, None] >= index[None, :])[None]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        x = params["embed"].astype(config.dtype)[tokens]

        def run(x: jax.Array, weights: Params) -> jax.Array:
            return four(x, weights, _empty(config, x.shape[0], 0), mask, segments, None, config)[0]

        run = jax.checkpoint(run, prevent_cse=not scan) if config.remat else run
        if scan:
            x = jax.lax.scan(lambda x, weights: (run(x, weights), None), x, params["layers"])[0]
        else:
            for weights in params["layers"]:
                x = run(x, weights)
        return _logits(x, params, config)

    return forward


def decode(config: Config, scan: bool) -> Callable[..., tuple[jax.Array, Cache]]:
    """One more token's logits, and the cache with it, as a function of weights, cache, token and position."""

    def one(params: Params, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        entry = cache["attention"] if scan else cache[0]["attention"]
        mask = (jnp.arange(entry["key"].shape[-3]) <= position)[None, None]
        x = params["embed"].astype(config.dtype)[token[:, None]]

        def run(x: jax.Array, each: tuple[Params, Cache]) -> tuple[jax.Array, Cache]:
            return four(x, *each, mask, None, position, config)

        if scan:
            x, cache = jax.lax.scan(run, x, (params["layers"], cache))
        else:
            after = []
            for each in zip(params["layers"], cache, strict=True):
                x, entry = run(x, each)
                after.append(entry)
            cache = after
        return _logits(x, params, config)[:, 0], cache

    return one


MODEL = training.Model(SIZES, initial_params, apply, decode, empty_cache, training.text_tokens)


def forward(**options: Any) -> tuple[Callable, tuple]:
    """`forward(params, batch) -> logits [batch, length, vocab]` and its arguments; see `training.Options`."""
    return training.forward(MODEL, training.Options(**options))


def loss(**options: Any) -> tuple[Callable, tuple]:
    """`loss(params, batch) -> scalar` and its arguments; see `training.Options`."""
    return training.loss(MODEL, training.Options(**options))


def init(**options: Any) -> tuple[Callable, tuple]:
    """`init(key) -> state`, the training state before the first step, and a key; see `training.Options`."""
    return training.init(MODEL, training.Options(**options))


def train_step(**options: Any) -> tuple[Callable, tuple]:
    """`train_step(state, batch) -> (state, metrics)` and its arguments; see `training.Options`."""
    return training.train_step(MODEL, training.Options(**options))


def decode_step(**options: Any) -> tuple[Callable, tuple]:
    """`decode_step(params, cache, token, position) -> (logits, cache)` and its arguments."""
    return training.decode_step(MODEL, training.Options(**options))
