"""GPT-2 in Flax linen: learnt positions, LayerNorm, one projection for query, key and value, a tied head.

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
from flax import linen as nn

from . import training
from .training import Batch, Cache, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of one GPT-2."""

    vocab: int
    layers: int
    embed: int
    heads: int
    mlp: int
    context: int = 1024  # the number of learnt positions
    norm_epsilon: float = 1e-5
    dtype: str = "bfloat16"
    remat: bool = True  # each layer is computed again in the backward pass: nothing of it is kept


SIZES = {
    "tiny": Config(328, 2, 96, 4, 288, context=80, dtype="float32", remat=False),
    "small": Config(50_257, 12, 768, 12, 3072),
    "medium": Config(50_257, 24, 1024, 16, 4096),
    "large": Config(50_257, 36, 1280, 20, 5120),
    "xl": Config(50_257, 48, 1600, 25, 6400),
}

initial = nn.initializers.normal(0.02)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of query [b, q, h, d] over key and value [b, s, h, d].

    mask is true where a query sees a key and broadcasts to [b, h, q, s].
    """
    scores = jnp.einsum("bqhd,bshd->bhqs", query, key).astype(jnp.float32) / math.sqrt(query.shape[-1])
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhqs,bshd->bqhd", weights, value)


class Attention(nn.Module):
    """Multi-head self-attention; given a cache, over what it holds and the tokens at `position`."""

    config: Config

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array, cache: Cache, position: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        config = self.config
        fused = nn.Dense(3 * config.embed, dtype=config.dtype, kernel_init=initial, name="qkv")(x)
        heads = (*x.shape[:2], config.heads, config.embed // config.heads)
        query, key, value = (part.reshape(heads) for part in jnp.split(fused, 3, axis=-1))
        if cache is not None and position is not None:
            update = jax.lax.dynamic_update_slice_in_dim
            key = update(cache["key"], key, position, axis=1)
            value = update(cache["value"], value, position, axis=1)
            cache = {"key": key, "value": value}
        mixed = attend(query, key, value, mask).reshape(x.shape)
        return nn.Dense(config.embed, dtype=config.dtype, kernel_init=initial, name="out")(mixed), cache


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    config: Config

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array, cache: Cache = None, position: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        config = self.config

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(config.norm_epsilon, dtype=config.dtype, name=name)

        def dense(size: int, name: str) -> nn.Dense:
            return nn.Dense(size, dtype=config.dtype, kernel_init=initial, name=name)

        mixed, cache = Attention(config, name="attention")(norm("attention_norm")(x), mask, cache, position)
        x = x + mixed
        hidden = nn.gelu(dense(config.mlp, "up")(norm("mlp_norm")(x)), approximate=True)
        return x + dense(config.embed, "down")(hidden), cache


class GPT2(nn.Module):
    """The decoder; `scan` keeps the layers' weights stacked on axis 0 and runs them in one loop."""

    config: Config
    scan: bool

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache = None,
        position: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Logits [batch, length, vocab] of tokens [batch, length], and the cache with them in it."""
        config = self.config

        def table(rows: int, name: str) -> nn.Embed:
            return nn.Embed(rows, config.embed, dtype=config.dtype, embedding_init=initial, name=name)

        embed = table(config.vocab, "embed")
        x = embed(tokens) + table(config.context, "position_embed")(positions)
        block = nn.remat(Block, prevent_cse=not self.scan) if config.remat and cache is None else Block
        if self.scan:
            run = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, 0, nn.broadcast),
                length=config.layers,
            )
            x, cache = run(config, name="layers")(x, mask, cache, position)
        else:
            entries = []
            for i in range(config.layers):
                entry = None if cache is None else cache[i]
                x, entry = block(config, name=f"layer_{i}")(x, mask, entry, position)
                entries.append(entry)
            cache = None if cache is None else entries
        x = nn.LayerNorm(config.norm_epsilon, dtype=config.dtype, name="norm")(x)
        return embed.attend(x), cache


def causal(length: int, segments: jax.Array | None) -> jax.Array:
    """Where a query sees a key, [batch or 1, 1, q, s]: not later, and in the same segment."""
    index = jnp.arange(length)
    mask = (index[:, None] >= index[None, :])[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    return mask


def initial_params(config: Config, scan: bool, key: jax.Array) -> Params:
    """Random weights as nested dicts of arrays."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return GPT2(config, scan).init(key, tokens, tokens, causal(2, None))["params"]


def empty_cache(config: Config, scan: bool, batch: int, length: int) -> Cache:
    """Room for the keys and values of `length` tokens, stacked over scanned layers, else a list of layers."""
    shape = (batch, length, config.heads, config.embed // config.heads)
    if scan:
        return {name: jnp.zeros((config.layers, *shape), config.dtype) for name in ("key", "value")}
    return [{name: jnp.zeros(shape, config.dtype) for name in ("key", "value")} for _ in range(config.layers)]


def apply(config: Config, scan: bool) -> Callable[[Params, Batch], jax.Array]:
    """The logits of a batch as a function of the weights."""
    model = GPT2(config, scan)

    def forward(params: Params, batch: Batch) -> jax.Array:
        tokens = batch["inputs"]
        positions = batch.get("positions", jnp.arange(tokens.shape[1])[None])
        mask = causal(tokens.shape[1], batch.get("segments"))
        return model.apply({"params": params}, tokens, positions, mask)[0]

    return forward


def decode(config: Config, scan: bool) -> Callable[..., tuple[jax.Array, Cache]]:
    """One more token's logits, and the cache with it, as a function of weights, cache, token and position."""
    model = GPT2(config, scan)

    def step(params: Params, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        length = (cache if scan else cache[0])["key"].shape[-3]
        mask = (jnp.arange(length) <= position)[None, None, None]
        positions = position[None, None]
        logits, cache = model.apply({"params": params}, token[:, None], positions, mask, cache, position)
        return logits[:, 0], cache

    return step


def tokens(config: Config, options: training.Options) -> Batch:
    """A batch of texts. Raises ValueError when there are fewer learnt positions than tokens in one."""
    if options.length > config.context:
        raise ValueError(f"length {options.length} is more than this size's {config.context} positions")
    return training.text_tokens(config, options)


MODEL = training.Model(SIZES, initial_params, apply, decode, empty_cache, tokens)


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
