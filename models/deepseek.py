"""DeepSeek-V2 and V3 in Flax NNX: latent attention, experts of which some are shared, for one device.

Keys and values are made of a latent vector a token (MLA, arXiv 2405.04434), which is what the cache keeps,
with a rotated key that all heads share. The first layers have an MLP, the others experts: a router's scores,
by softmax or sigmoid, choose some of them, within the best groups if there are groups, with a bias that
counts for the choice alone (arXiv 2412.19437). Rotary positions are plain, without YaRN's scaling.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from . import llama, mixtral, training
from .llama import Rotation, rotate
from .training import Batch, Cache, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of one DeepSeek. rank: of the latent vectors. plain, rotated, value: of a head's query and
    key that is not rotated, of that which is, and of its value. mlp: of the first `dense` layers; expert_mlp:
    of an expert. shared: experts that every token goes to, in one. groups, top_groups: of experts, and how
    many of them a token's experts are in. norm: whether the chosen weights sum up to one, before `scale`.
    """

    vocab: int
    layers: int
    embed: int
    heads: int
    rank: int
    plain: int
    rotated: int
    value: int
    mlp: int
    expert_mlp: int
    experts: int
    shared: int
    top: int
    dense: int = 1
    groups: int = 1
    top_groups: int = 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    norm: bool = False
    scale: float = 1.0
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    dtype: str = "bfloat16"
    remat: bool = True  # each layer is computed again in the backward pass: nothing of it is kept


SIZES = {
    "tiny": Config(320, 3, 96, 4, 48, 16, 8, 16, 224, 64, 4, 1, 2, dtype="float32", remat=False),
    "v2-lite-16b": Config(102_400, 27, 2048, 16, 512, 128, 64, 128, 10_944, 1408, 64, 2, 6),
}


class Norm(nnx.Module):
    """x over its root mean square, times a learnt scale."""

    def __init__(self, size: int, config: Config, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (size,), jnp.float32))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + self.epsilon) * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Self-attention whose keys and values are made of latent vectors."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(size_in: Any, size_out: Any, axis: Any = -1) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                size_in, size_out, axis=axis, use_bias=False, dtype=config.dtype, rngs=rngs
            )

        self.config = config
        self.query = linear(config.embed, (config.heads, config.plain + config.rotated))
        self.latent = linear(config.embed, config.rank + config.rotated)
        self.norm = Norm(config.rank, config, rngs)
        self.both = linear(config.rank, (config.heads, config.plain + config.value))
        self.out = linear((config.heads, config.value), config.embed, (-2, -1))

    def kept(self, x: jax.Array, rotation: Rotation) -> Cache:
        """What later tokens need of x [b, l, embed]: the latent vectors, and the key that heads share."""
        latent, key = jnp.split(self.latent(x), [self.config.rank], axis=-1)
        return {"latent": self.norm(latent), "key": rotate(key[:, :, None], rotation)[:, :, 0]}

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, rotation: Rotation, mask: jax.Array, kept: Cache | None = None) -> Any:
        """Attention of x over what is kept, by default of x itself; mask is true where a query sees a key,
        and broadcasts to [b, heads, q, s].
        """
        config, kept = self.config, self.kept(x, rotation) if kept is None else kept
        query, turned = jnp.split(self.query(x), [config.plain], axis=-1)
        key, value = jnp.split(self.both(kept["latent"]), [config.plain], axis=-1)
        scores = jnp.einsum("bqhd,bshd->bhqs", query, key)
        scores += jnp.einsum("bqhd,bsd->bhqs", rotate(turned, rotation), kept["key"])
        scores = scores.astype(jnp.float32) / math.sqrt(config.plain + config.rotated)
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
        return self.out(jnp.einsum("bhqs,bshd->bqhd", weights.astype(value.dtype), value))


def mlp(size: int, config: Config, rngs: nnx.Rngs) -> llama.Mlp:
    """A SwiGLU of another size."""
    return llama.Mlp(dataclasses.replace(config, mlp=size), rngs)


class Experts(nnx.Module):
    """A router, its experts, and those that every token goes to."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Linear(config.embed, config.experts, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.experts)) if config.bias else None
        self.gate = mixtral.stacked(config.experts, config.embed, config.expert_mlp, rngs)
        self.up = mixtral.stacked(config.experts, config.embed, config.expert_mlp, rngs)
        self.down = mixtral.stacked(config.experts, config.expert_mlp, config.embed, rngs)
        self.shared = mlp(config.shared * config.expert_mlp, config, rngs)

    def chosen(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of the experts of each token and their numbers, [b, l, top]."""
        config, logits = self.config, self.router(x).astype(jnp.float32)
        scores = jax.nn.softmax(logits, axis=-1) if config.scores == "softmax" else jax.nn.sigmoid(logits)
        choice = scores if self.bias is None else scores + jax.lax.stop_gradient(self.bias[...])
        if config.groups > 1:
            choice = within_groups(choice, config)
        _, numbers = jax.lax.top_k(choice, config.top)
        weights = jnp.take_along_axis(scores, numbers, axis=-1)
        if config.norm:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return (weights * config.scale).astype(x.dtype), numbers

    @jax.named_scope("experts")
    def __call__(self, x: jax.Array) -> jax.Array:
        weights, numbers = self.chosen(x)
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        routed = mixtral.through_sorted(x, weights, numbers, (gate, up, down))
        return routed + self.shared(x)


def within_groups(choice: jax.Array, config: Config) -> jax.Array:
    """Scores [b, l, experts] with those outside of the best groups taken away. A group is as good as its best
    expert, or with a bias as its best two together (V3).
    """
    grouped = choice.reshape(*choice.shape[:-1], config.groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, 2 if config.bias else 1)[0], axis=-1)
    _, numbers = jax.lax.top_k(best, config.top_groups)
    kept = jnp.sum(jax.nn.one_hot(numbers, config.groups), axis=-2) > 0
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


class Layer(nnx.Module):
    """Attention, and an MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config, rngs: nnx.Rngs, dense: bool = False):
        self.attention_norm = Norm(config.embed, config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config.embed, config, rngs)
        self.mlp: Any = mlp(config.mlp, config, rngs) if dense else Experts(config, rngs)

    def __call__(self, x: jax.Array, rotation: Rotation, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        return x + self.mlp(self.mlp_norm(x))

    def decode(
        self, x: jax.Array, rotation: Rotation, mask: jax.Array, cache: Cache, position: jax.Array
    ) -> tuple[jax.Array, Cache]:
        normed = self.attention_norm(x)
        new = self.attention.kept(normed, rotation)
        update = jax.lax.dynamic_update_slice_in_dim
        cache = {name: update(cache[name], row, position, axis=1) for name, row in new.items()}
        x = x + self.attention(normed, rotation, mask, cache)
        return x + self.mlp(self.mlp_norm(x)), cache


class DeepSeek(nnx.Module):
    """The decoder; `scan` keeps the weights of layers with experts stacked, and runs them in one loop."""

    def __init__(self, config: Config, scan: bool, rngs: nnx.Rngs):
        self.config, self.scan = config, scan
        self.embed = nnx.Embed(config.vocab, config.embed, dtype=config.dtype, rngs=rngs)
        self.first = nnx.List([Layer(config, rngs, dense=True) for _ in range(config.dense)])
        count = config.layers - config.dense
        if scan:
            stacked = nnx.vmap(lambda rngs: Layer(config, rngs), in_axes=0, out_axes=0)
            self.layers: Any = nnx.split_rngs(splits=count)(stacked)(rngs)
        else:
            self.layers = nnx.List([Layer(config, rngs) for _ in range(count)])
        self.norm = Norm(config.embed, config, rngs)
        self.head = nnx.Linear(config.embed, config.vocab, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Logits [batch, length, vocab] of tokens [batch, length]; packed texts as `llama` has them."""
        index = jnp.arange(tokens.shape[1])
        mask = (index[:, None] >= index[None, :])[None]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        mask, rotation = mask[:, None], self.rotation(index[None] if positions is None else positions)
        x = self.embed(tokens)

        def apply(layer: Layer, x: jax.Array, rotation: Rotation, mask: jax.Array) -> jax.Array:
            return layer(x, rotation, mask)

        unrolled = nnx.remat(apply, prevent_cse=True) if self.config.remat else apply
        for layer in self.first:
            x = unrolled(layer, x, rotation, mask)
        if self.scan:
            looped = nnx.remat(apply, prevent_cse=False) if self.config.remat else apply
            run = nnx.scan(looped, in_axes=(0, nnx.Carry, None, None), out_axes=nnx.Carry)
            x = run(self.layers, x, rotation, mask)
        else:
            for layer in self.layers:
                x = unrolled(layer, x, rotation, mask)
        return self.head(self.norm(x))

    def decode(self, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        """Logits [batch, vocab] after one more token [batch] at `position`, and the cache that holds it."""
        length = (cache["layers"] if self.scan else cache["layers"][0])["key"].shape[-2]
        mask = (jnp.arange(length) <= position)[None, None, None]
        rotation = self.rotation(position[None, None])
        x = self.embed(token[:, None])
        new: dict[str, Any] = {"first": [], "layers": []}
        for name in ("first",) if self.scan else ("first", "layers"):
            for layer, entry in zip(getattr(self, name), cache[name], strict=True):
                x, entry = layer.decode(x, rotation, mask, entry, position)
                new[name].append(entry)
        if self.scan:

            @nnx.scan(in_axes=(0, nnx.Carry, None, None, 0, None), out_axes=(nnx.Carry, 0))
            def run(layer: Layer, x: jax.Array, *rest: Any) -> tuple[jax.Array, Cache]:
                return layer.decode(x, *rest)

            x, new["layers"] = run(self.layers, x, rotation, mask, cache["layers"], position)
        return self.head(self.norm(x))[:, 0], new

    def rotation(self, positions: jax.Array) -> Rotation:
        return llama.rotation_at(positions, self.config.rotated, self.config.rope_base)


def definition(config: Config, scan: bool) -> nnx.GraphDef:
    """What `nnx.merge` needs beside the weights."""
    return nnx.split(nnx.eval_shape(lambda: DeepSeek(config, scan, nnx.Rngs(0))))[0]


def initial_params(config: Config, scan: bool, key: jax.Array) -> Params:
    """Random weights as nested dicts of arrays."""
    return nnx.to_pure_dict(nnx.state(DeepSeek(config, scan, nnx.Rngs(key))))


def empty_cache(config: Config, scan: bool, batch: int, length: int) -> Cache:
    """Room for the latent vectors and the keys of `length` tokens, stacked over layers with experts if they
    are scanned.
    """
    sizes = {"latent": config.rank, "key": config.rotated}

    def entry(*layers: int) -> Cache:
        return {name: jnp.zeros((*layers, batch, length, size), config.dtype) for name, size in sizes.items()}

    count = config.layers - config.dense
    layers = entry(count) if scan else [entry() for _ in range(count)]
    return {"first": [entry() for _ in range(config.dense)], "layers": layers}


def apply(config: Config, scan: bool) -> Callable[[Params, Batch], jax.Array]:
    """The logits of a batch as a function of the weights."""
    graph = definition(config, scan)

    def forward(params: Params, batch: Batch) -> jax.Array:
        model = nnx.merge(graph, params)
        return model(batch["inputs"], batch.get("positions"), batch.get("segments"))

    return forward


def decode(config: Config, scan: bool) -> Callable[..., tuple[jax.Array, Cache]]:
    """One more token's logits, and the cache with it, as a function of weights, cache, token and position."""
    graph = definition(config, scan)

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
    """`decode_step(params, cache, token, position) -> (logits [batch, vocab], cache)` and its arguments; see
    `llama.decode_step`.
    """
    return training.decode_step(MODEL, training.Options(**options))
