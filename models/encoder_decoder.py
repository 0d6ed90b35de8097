"""An encoder-decoder in plain JAX (T5): relative position biases, RMSNorm, cross attention, a tied embedding.

`forward`, `loss`, `train_step`, `decode_step` and `init` are factories: each returns a function of plain
pytrees and its arguments, as shapes unless `abstract=False`. `length` is that of the inputs; the targets, and
the cache of `decode_step`, have half of it. Weights and AdamW's moments are float32, the computation is in
the configuration's `dtype`, and the softmax, the norms and the loss are in float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import training
from .training import Batch, Cache, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of one T5; the encoder and the decoder have `layers` layers each."""

    vocab: int
    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    buckets: int = 32  # of relative positions
    furthest: int = 128  # the distance from which on all share a bucket
    norm_epsilon: float = 1e-6
    dtype: str = "bfloat16"
    remat: bool = True  # each layer is computed again in the backward pass: nothing of it is kept


SIZES = {
    "tiny": Config(312, 2, 96, 4, 16, 160, buckets=24, furthest=40, dtype="float32", remat=False),
    "small": Config(32_128, 6, 512, 8, 64, 2048),
    "base": Config(32_128, 12, 768, 12, 64, 3072),
    "large": Config(32_128, 24, 1024, 16, 64, 4096),
    "3b": Config(32_128, 24, 1024, 32, 128, 16_384),
    "11b": Config(32_128, 24, 1024, 128, 128, 65_536),
}


def norm(x: jax.Array, scale: jax.Array, config: Config) -> jax.Array:
    """x over its root mean square, times a learnt scale."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + config.norm_epsilon) * scale).astype(x.dtype)


def bucket(distance: jax.Array, both_ways: bool, config: Config) -> jax.Array:
    """The bucket of each distance (key minus query): exact when near, logarithmic when far (T5, 1910.10683).

    With both_ways, keys after the query have the upper half of the buckets; else they are all in that of 0.
    """
    buckets, offset = config.buckets, jnp.zeros_like(distance)
    if both_ways:
        buckets //= 2
        offset = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    ratio = jnp.maximum(distance, 1) / exact
    far = exact + (jnp.log(ratio) / math.log(config.furthest / exact) * (buckets - exact)).astype(jnp.int32)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


def position_bias(
    table: jax.Array, query: jax.Array, key: jax.Array, both_ways: bool, config: Config
) -> jax.Array:
    """The float32 bias [1, heads, q, s] of keys at `key` [s] for queries at `query` [q]."""
    buckets = bucket(key[None, :] - query[:, None], both_ways, config)
    return jnp.transpose(table[buckets], (2, 0, 1))[None]


def masked(mask: jax.Array) -> jax.Array:
    """A bias that hides what is false in mask [b, q, s]: [b, 1, q, s]."""
    return jnp.where(mask, 0.0, -1e9)[:, None]


def attend(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    """Unscaled attention of query [b, q, h, d] over key and value [b, s, h, d]; bias adds to [b, h, q, s]."""
    scores = jnp.einsum("bqhd,bshd->bhqs", query, key).astype(jnp.float32) + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhqs,bshd->bqhd", weights, value)


def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[b, l, embed] to heads, [b, l, h, d]."""
    return jnp.einsum("ble,ehd->blhd", x, kernel.astype(x.dtype))


def merge(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[b, l, h, d] from the heads back to [b, l, embed]."""
    return jnp.einsum("blhd,hde->ble", x, kernel.astype(x.dtype))


@jax.named_scope("attention")
def attention(x: jax.Array, source: jax.Array, weights: Params, bias: jax.Array) -> jax.Array:
    """Attention of x over source."""
    key, value = project(source, weights["key"]), project(source, weights["value"])
    return merge(attend(project(x, weights["query"]), key, value, bias), weights["out"])


@jax.named_scope("mlp")
def mlp(x: jax.Array, weights: Params, config: Config) -> jax.Array:
    """The residual branch of the MLP, norm and all."""
    hidden = jax.nn.relu(norm(x, weights["mlp_norm"], config) @ weights["up"].astype(x.dtype))
    return hidden @ weights["down"].astype(x.dtype)


def encoder_layer(x: jax.Array, weights: Params, bias: jax.Array, config: Config) -> jax.Array:
    """Self-attention and MLP, each behind a norm and added to the residual stream."""
    normed = norm(x, weights["self_norm"], config)
    x = x + attention(normed, normed, weights["self"], bias)
    return x + mlp(x, weights, config)


def decoder_layer(
    x: jax.Array, encoded: jax.Array, weights: Params, bias: jax.Array, cross_bias: jax.Array, config: Config
) -> jax.Array:
    """Self-attention, attention over what is encoded, and MLP."""
    normed = norm(x, weights["self_norm"], config)
    x = x + attention(normed, normed, weights["self"], bias)
    x = x + attention(norm(x, weights["cross_norm"], config), encoded, weights["cross"], cross_bias)
    return x + mlp(x, weights, config)


def cached_layer(
    x: jax.Array, weights: Params, cache: Cache, position: jax.Array, bias: jax.Array, config: Config
) -> tuple[jax.Array, Cache]:
    """The decoder's layer for one token [b, 1, embed] at `position`; its key and value go into the cache."""
    normed = norm(x, weights["self_norm"], config)
    own, cross = weights["self"], weights["cross"]
    update = jax.lax.dynamic_update_slice_in_dim
    key = update(cache["key"], project(normed, own["key"]), position, axis=1)
    value = update(cache["value"], project(normed, own["value"]), position, axis=1)
    x = x + merge(attend(project(normed, own["query"]), key, value, bias), own["out"])
    query = project(norm(x, weights["cross_norm"], config), cross["query"])
    visible = masked(cache["visible"][:, None])
    x = x + merge(attend(query, cache["cross_key"], cache["cross_value"], visible), cross["out"])
    return x + mlp(x, weights, config), cache | {"key": key, "value": value}


def stack(
    x: jax.Array, layers: Params, layer: Callable[[jax.Array, Params], jax.Array], config: Config
) -> jax.Array:
    """x through the layers: a list of weights one after the other, stacked weights in one loop."""
    if config.remat:  # in a loop, nothing can be merged with the first computation anyway
        layer = jax.checkpoint(layer, prevent_cse=isinstance(layers, list))
    if isinstance(layers, list):
        for weights in layers:
            x = layer(x, weights)
        return x
    return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, layers)[0]


def encode(params: Params, tokens: jax.Array, segments: jax.Array | None, config: Config) -> jax.Array:
    """[b, s, embed] of tokens [b, s], where 0 is padding."""
    index = jnp.arange(tokens.shape[1])
    mask = (tokens > 0)[:, None, :]
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    weights = params["encoder"]
    bias = position_bias(weights["position_bias"], index, index, True, config) + masked(mask)
    x = params["embed"].astype(config.dtype)[tokens]
    x = stack(x, weights["layers"], lambda x, layer: encoder_layer(x, layer, bias, config), config)
    return norm(x, weights["norm"], config)


def logits_of(x: jax.Array, params: Params, config: Config) -> jax.Array:
    """The decoder's output through its norm and the embedding it shares with the inputs, [..., vocab]."""
    normed = norm(x, params["decoder"]["norm"], config) * config.embed**-0.5
    return normed @ params["embed"].astype(x.dtype).T


def apply(config: Config, scan: bool) -> Callable[[Params, Batch], jax.Array]:
    """The logits [b, q, vocab] of a batch as a function of the weights, which show themselves if to scan."""

    def forward(params: Params, batch: Batch) -> jax.Array:
        sources, tokens = batch["inputs"], batch["decoder_inputs"]
        encoded = encode(params, sources, batch.get("input_segments"), config)
        index = jnp.arange(tokens.shape[1])
        mask = (index[:, None] >= index[None, :])[None]
        cross = (sources > 0)[:, None, :]
        if "segments" in batch:
            mask = mask & (batch["segments"][:, :, None] == batch["segments"][:, None, :])
            cross = cross & (batch["segments"][:, :, None] == batch["input_segments"][:, None, :])
        weights = params["decoder"]
        bias = position_bias(weights["position_bias"], index, index, False, config) + masked(mask)
        hidden = masked(cross)
        x = params["embed"].astype(config.dtype)[tokens]
        x = stack(
            x,
            weights["layers"],
            lambda x, layer: decoder_layer(x, encoded, layer, bias, hidden, config),
            config,
        )
        return logits_of(x, params, config)

    return forward


def decode(config: Config, scan: bool) -> Callable[..., tuple[jax.Array, Cache]]:
    """One more token's logits, and the cache with it, as a function of weights, cache, token and position."""

    def step(params: Params, cache: Cache, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Cache]:
        weights = params["decoder"]
        index = jnp.arange((cache if scan else cache[0])["key"].shape[-3])
        bias = position_bias(weights["position_bias"], position[None], index, False, config)
        bias = bias + masked((index <= position)[None, None])
        x = params["embed"].astype(config.dtype)[token[:, None]]
        if scan:

            def body(x: jax.Array, layer: tuple[Params, Cache]) -> tuple[jax.Array, Cache]:
                return cached_layer(x, *layer, position, bias, config)

            x, cache = jax.lax.scan(body, x, (weights["layers"], cache))
        else:
            entries = []
            for layer, entry in zip(weights["layers"], cache, strict=True):
                x, entry = cached_layer(x, layer, entry, position, bias, config)
                entries.append(entry)
            cache = entries
        return logits_of(x, params, config)[:, 0], cache

    return step


def start(params: Params, inputs: jax.Array, length: int, config: Config) -> Cache:
    """A cache with room for `length` tokens, that knows the inputs [b, s]: stacked where the layers are."""
    encoded = encode(params, inputs, None, config)
    shape = (inputs.shape[0], length, config.heads, config.head_dim)

    def entry(cross: Params) -> Cache:
        return {
            "key": jnp.zeros(shape, config.dtype),
            "value": jnp.zeros(shape, config.dtype),
            "cross_key": project(encoded, cross["key"]),
            "cross_value": project(encoded, cross["value"]),
            "visible": inputs > 0,
        }

    layers = params["decoder"]["layers"]
    if isinstance(layers, list):
        return [entry(layer["cross"]) for layer in layers]
    return jax.lax.map(entry, layers["cross"])


def empty_cache(config: Config, scan: bool, batch: int, length: int) -> Cache:
    """A cache as `start` makes it, of inputs of `length` tokens that are all padding but the first."""
    own = (batch, length // 2, config.heads, config.head_dim)
    cross = (batch, length, config.heads, config.head_dim)

    def entry(*layers: int) -> Cache:
        return {
            "key": jnp.zeros((*layers, *own), config.dtype),
            "value": jnp.zeros((*layers, *own), config.dtype),
            "cross_key": jnp.zeros((*layers, *cross), config.dtype),
            "cross_value": jnp.zeros((*layers, *cross), config.dtype),
            "visible": jnp.broadcast_to(jnp.arange(length) < 1, (*layers, batch, length)),
        }

    return entry(config.layers) if scan else [entry() for _ in range(config.layers)]


def initial_params(config: Config, scan: bool, key: jax.Array) -> Params:
    """Random weights, with the published deviations, as nested dicts of arrays (and lists of layers)."""
    embed, heads, head_dim = config.embed, config.heads, config.head_dim
    keys = jax.random.split(key, 5)

    def normal(key: jax.Array, shape: tuple[int, ...], size: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * size**-0.5

    def heads_of(key: jax.Array) -> Params:
        key_q, key_k, key_v, key_o = jax.random.split(key, 4)
        return {
            "query": normal(key_q, (embed, heads, head_dim), embed * head_dim),
            "key": normal(key_k, (embed, heads, head_dim), embed),
            "value": normal(key_v, (embed, heads, head_dim), embed),
            "out": normal(key_o, (heads, head_dim, embed), heads * head_dim),
        }

    def encoder_weights(key: jax.Array) -> Params:
        key_self, key_up, key_down = jax.random.split(key, 3)
        return {
            "self_norm": jnp.ones(embed),
            "self": heads_of(key_self),
            "mlp_norm": jnp.ones(embed),
            "up": normal(key_up, (embed, config.mlp), embed),
            "down": normal(key_down, (config.mlp, embed), config.mlp),
        }

    def decoder_weights(key: jax.Array) -> Params:
        key_rest, key_cross = jax.random.split(key)
        cross = {"cross_norm": jnp.ones(embed), "cross": heads_of(key_cross)}
        return encoder_weights(key_rest) | cross

    def layers(make: Callable[[jax.Array], Params], key: jax.Array) -> Params:
        stacked = jax.vmap(make)(jax.random.split(key, config.layers))
        return stacked if scan else [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.layers)]

    def half(make: Callable[[jax.Array], Params], key_layers: jax.Array, key_bias: jax.Array) -> Params:
        return {
            "position_bias": normal(key_bias, (config.buckets, heads), embed),
            "layers": layers(make, key_layers),
            "norm": jnp.ones(embed),
        }

    return {
        "embed": normal(keys[0], (config.vocab, embed), 1),
        "encoder": half(encoder_weights, keys[1], keys[2]),
        "decoder": half(decoder_weights, keys[3], keys[4]),
    }


def tokens(config: Config, options: training.Options) -> Batch:
    """Random inputs [batch, length] and targets [batch, length / 2]; token 0 is padding, and the start.

    When packed, segment n of the targets belongs to segment n of the inputs. The decoder reads, at a target,
    the one before it, or the start.
    """
    inputs = training.text_tokens(config, options)
    halved = dataclasses.replace(options, length=options.length // 2, seed=options.seed + 1)
    outputs = training.text_tokens(config, halved)
    targets = outputs["inputs"]
    before = np.concatenate([np.zeros_like(targets[:, :1]), targets[:, :-1]], axis=1)
    batch = {"inputs": inputs["inputs"], "decoder_inputs": before, "targets": targets}
    if not options.packed:
        return batch | {"weights": outputs["weights"]}
    return batch | {
        "decoder_inputs": np.where(outputs["positions"] > 0, before, 0),
        "weights": (outputs["segments"] > 0).astype(np.float32),
        "input_segments": inputs["segments"],
        "segments": outputs["segments"],
    }


MODEL = training.Model(SIZES, initial_params, apply, decode, empty_cache, tokens)


def forward(**options: Any) -> tuple[Callable, tuple]:
    """`forward(params, batch) -> logits [batch, length / 2, vocab]`, arguments; see `training.Options`."""
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

    token is [batch]; position is a scalar, the number of tokens already in the cache; `start` makes a cache.
    See `training.Options`.
    """
    return training.decode_step(MODEL, training.Options(**options))
