"""Llama in Flax NNX: grouped-query attention, rotary positions, RMSNorm and SwiGLU, for one device.

`forward`, `loss`, `train_step`, `decode_step` and `init` are factories: each returns a function of plain
pytrees and its arguments, as shapes unless `abstract=False`. Weights and AdamW's moments are float32, the
computation is in the configuration's `dtype`, and the softmax, the norms and the loss are in float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import training
from .training import Batch, Cache, Params

Rotation = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of one Llama."""

    vocab: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    dtype: str = "bfloat16"
    remat: bool = True  # each layer is computed again in the backward pass: nothing of it is kept


SIZES = {
    "tiny": Config(320, 2, 96, 12, 4, 16, 224, dtype="float32", remat=False),
    "7b": Config(32_000, 32, 4096, 32, 32, 128, 11_008),  # Llama 2
    "13b": Config(32_000, 40, 5120, 40, 40, 128, 13_824),  # Llama 2
    "8b": Config(128_256, 32, 4096, 32, 8, 128, 14_336, rope_base=500_000.0),  # Llama 3
    "70b": Config(128_256, 80, 8192, 64, 8, 128, 28_672, rope_base=500_000.0),  # Llama 3
}


class RMSNorm(nnx.Module):
    """x over its root mean square, times a learnt scale."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (config.embed,), jnp.float32))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.epsilon) * self.scale[...]).astype(x.dtype)


def rotation_at(positions: jax.Array, head_dim: int, base: float) -> Rotation:
    """Cosines and sines, [..., length, 1, head_dim / 2], of the angles at `positions` [..., length]."""
    frequencies = base ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x [batch, length, heads, head_dim], its halves rotated into each other (RoFormer, arXiv 2104.09864)."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of query [b, q, heads, d] over key and value [b, s, kv_heads, d].

    Each key-value head serves heads / kv_heads query heads that lie next to each other; mask is true where a
    query sees a key and broadcasts to [b, kv_heads, heads / kv_heads, q, s].
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key).astype(jnp.float32) / math.sqrt(head_dim)
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", weights, value)
    return mixed.reshape(batch, length, heads, head_dim)


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def project(heads: int) -> nnx.LinearGeneral:
            shape = (heads, config.head_dim)
            return nnx.LinearGeneral(config.embed, shape, use_bias=False, dtype=config.dtype, rngs=rngs)

        self.query = project(config.heads)
        self.key = project(config.kv_heads)
        self.value = project(config.kv_heads)
        merged = (config.heads, config.head_dim)
        self.out = nnx.LinearGeneral(
            merged, config.embed, axis=(-2, -1), use_bias=False, dtype=config.dtype, rngs=rngs
        )

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, rotation: Rotation, mask: jax.Array) -> jax.Array:
        query, key = rotate(self.query(x), rotation), rotate(self.key(x), rotation)
        return self.out(attend(query, key, self.value(x), mask))

    @jax.named_scope("attention")
    def decode(
        self, x: jax.Array, rotation: Rotation, mask: jax.Array, cache: Cache, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """One token more: its key and value go into the cache, and it attends to what is there."""
        update = jax.lax.dynamic_update_slice_in_dim
        key = update(cache["key"], rotate(self.key(x), rotation), position, axis=1)
        value = update(cache["value"], self.value(x), position, axis=1)
        mixed = attend(rotate(self.query(x), rotation), key, value, mask)
        return self.out(mixed), {"key": key, "value": value}


class Mlp(nnx.Module):
    """SwiGLU. config: with `embed`, `mlp` and `dtype`."""

    def __init__(self, config: Any, rngs: nnx.Rngs):
        def linear(size_in: int, size_out: int) -> nnx.Linear:
            return nnx.Linear(size_in, size_out, use_bias=False, dtype=config.dtype, rngs=rngs)

        self.gate = linear(config.embed, config.mlp)
        self.up = linear(config.embed, config.mlp)
        self.down = linear(config.mlp, config.embed)

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


Block = Callable[[Any, nnx.Rngs], nnx.Module]
"""Makes what a layer applies to each token, of a configuration."""


class Layer(nnx.Module):
    """Attention and MLP, or what is in its place, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config, rngs: nnx.Rngs, mlp: Block = Mlp):
        self.attention_norm = RMSNorm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config, rngs)
        self.mlp: Any = mlp(config, rngs)

    def __call__(self, x: jax.Array, rotation: Rotation, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.mlp(self.mlp_norm(x))

    def decode(
        self, x: jax.Array, rotation: Rotation, mask: jax.Array, cache: Cache, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        mixed, cache = self.attention.decode(self.attention_norm(x), rotation, mask, cache, position)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Llama(nnx.Module):
    """The decoder; `scan` keeps the layers' weights stacked on axis 0 and runs them in one loop. mlp: what
    layers have beside attention.
    """

    def __init__(self, config: Config, scan: bool, rngs: nnx.Rngs, mlp: Block = Mlp):
        self.config = config
        self.scan = scan
        self.embed = nnx.Embed(config.vocab, config.embed, dtype=config.dtype, rngs=rngs)
        if scan:
            stacked = nnx.vmap(lambda rngs: Layer(config, rngs, mlp), in_axes=0, out_axes=0)
            self.layers: Any = nnx.split_rngs(splits=config.layers)(stacked)(rngs)
        else:
            self.layers = nnx.List([Layer(config, rngs, mlp) for _ in range(config.layers)])
        self.norm = RMSNorm(config, rngs)
        self.head = nnx.Linear(config.embed, config.vocab, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Logits [batch, length, vocab] of tokens [batch, length].

        Packed texts come with positions and segments, both [batch, length].
        """
        index = jnp.arange(tokens.shape[1])
        mask = (index[:, None] >= index[None, :])[None]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        mask = mask[:, None, None]
        rotation = self.rotation(index[None] if positions is None else positions)
        x = self.embed(tokens)

        def apply(layer: Layer, x: jax.Array, rotation: Rotation, mask: jax.Array) -> jax.Array:
            return layer(x, rotation, mask)

        if self.config.remat:  # in a loop, nothing can be merged with the first computation anyway
            apply = nnx.remat(apply, prevent_cse=not self.scan)
        if self.scan:
            run = nnx.scan(apply, in_axes=(0, nnx.Carry, None, None), out_axes=nnx.Carry)
            x = run(self.layers, x, rotation, mask)
        else:
            for layer in self.layers:
                x = apply(layer, x, rotation, mask)
        return self.head(self.norm(x))

    def decode(self, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        """Logits [batch, vocab] after one more token [batch] at `position`, and the cache that holds it."""
        entry = cache if self.scan else cache[0]
        length = entry["key"].shape[-3]
        mask = (jnp.arange(length) <= position)[None, None, None, None]
        rotation = self.rotation(position[None, None])
        x = self.embed(token[:, None])
        if self.scan:

            @nnx.scan(in_axes=(0, nnx.Carry, None, None, 0, None), out_axes=(nnx.Carry, 0))
            def run(layer: Layer, x: jax.Array, *rest: Any) -> tuple[jax.Array, Cache]:
                return layer.decode(x, *rest)

            x, cache = run(self.layers, x, rotation, mask, cache, position)
        else:
            entries = []
            for layer, entry in zip(self.layers, cache, strict=True):
                x, entry = layer.decode(x, rotation, mask, entry, position)
                entries.append(entry)
            cache = entries
        return self.head(self.norm(x))[:, 0], cache

    def rotation(self, positions: jax.Array) -> Rotation:
        return rotation_at(positions, self.config.head_dim, self.config.rope_base)


def definition(config: Config, scan: bool, mlp: Block) -> nnx.GraphDef:
    """What `nnx.merge` needs beside the weights."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config, scan, nnx.Rngs(0), mlp)))[0]


def initial_params(config: Config, scan: bool, key: jax.Array, mlp: Block = Mlp) -> Params:
    """Random weights as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(Llama(config, scan, nnx.Rngs(key), mlp)))


def empty_cache(config: Config, scan: bool, batch: int, length: int) -> Cache:
    """Room for the keys and values of `length` tokens, stacked over scanned layers, else a list of layers."""
    shape = (batch, length, config.kv_heads, config.head_dim)
    if scan:
        return {name: jnp.zeros((config.layers, *shape), config.dtype) for name in ("key", "value")}
    return [{name: jnp.zeros(shape, config.dtype) for name in ("key", "value")} for _ in range(config.layers)]


def apply(config: Config, scan: bool, mlp: Block = Mlp) -> Callable[[Params, Batch], jax.Array]:
    """The logits of a batch as a function of the weights."""
    graph = definition(config, scan, mlp)

    def forward(params: Params, batch: Batch) -> jax.Array:
        model = nnx.merge(graph, params)
        return model(batch["inputs"], batch.get("positions"), batch.get("segments"))

    return forward


def decode(config: Config, scan: bool, mlp: Block = Mlp) -> Callable[..., tuple[jax.Array, Cache]]:
    """One more token's logits, and the cache with it, as a function of weights, cache, token and position."""
    graph = definition(config, scan, mlp)

    def step(params: Params, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        return nnx.merge(graph, params).decode(cache, token, position)

    return step


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
    """`decode_step(params, cache, token, position) -> (logits [batch, vocab], cache)` and its arguments.

    token is [batch]; position is a scalar, the number of tokens already in the cache. See `training.Options`.
    """
    return training.decode_step(MODEL, training.Options(**options))
