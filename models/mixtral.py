"""Mixtral in Flax NNX: a Llama whose layers have experts, two of which a token goes to, for one device.

    chances = softmax(x @ router);  weights, chosen = the two largest, made to sum up to one
    y = sum over chosen of weight * expert(x)

`routing` says how that is computed: `sorted`, tokens in the order of their experts through `ragged_dot`;
`dense`, all tokens through all experts; `capacity`, through einsums with so many places an expert in each
text, and what finds none is dropped (GShard, arXiv 2006.16668). The factories are those of `llama`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from . import llama, training

Routing = Literal["sorted", "dense", "capacity"]


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
    """The sizes of one Mixtral. mlp: of an expert. top: experts that a token goes to. capacity: places of an
    expert in a text, of so many as it would have if all had the same.
    """

    rope_base: float = 1_000_000.0
    experts: int = 8
    top: int = 2
    routing: Routing = "sorted"
    capacity: float = 1.25


SIZES = {
    "tiny": Config(320, 2, 96, 12, 4, 16, 112, dtype="float32", remat=False, experts=4),
    "8x7b": Config(32_000, 32, 4096, 32, 8, 128, 14_336),
    "8x22b": Config(32_768, 56, 6144, 48, 8, 128, 16_384),
}


def stacked(experts: int, size_in: int, size_out: int, rngs: nnx.Rngs) -> nnx.Param:
    """A matrix for each expert, [experts, size_in, size_out]."""
    normal = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
    return nnx.Param(normal(rngs.params(), (experts, size_in, size_out), jnp.float32))


class Experts(nnx.Module):
    """A router, and as many SwiGLUs as there are experts, stacked."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.router = nnx.Linear(config.embed, config.experts, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.gate = stacked(config.experts, config.embed, config.mlp, rngs)
        self.up = stacked(config.experts, config.embed, config.mlp, rngs)
        self.down = stacked(config.experts, config.mlp, config.embed, rngs)

    @jax.named_scope("experts")
    def __call__(self, x: jax.Array) -> jax.Array:
        chances = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(chances, self.config.top)
        weights = (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype)
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        routed = functools.partial(ROUTINGS[self.config.routing], x, weights, chosen, (gate, up, down))
        return routed(self.config.capacity) if self.config.routing == "capacity" else routed()


Weights = tuple[jax.Array, jax.Array, jax.Array]
"""Gate and up [experts, embed, mlp], down [experts, mlp, embed]."""


def through_sorted(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Weights) -> jax.Array:
    """x [batch, length, embed] of tokens with weights of the experts that are chosen, [batch, length, top]:
    one product for each expert's tokens.
    """
    gate, up, down = experts
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    rows = x.reshape(-1, x.shape[-1])[order // chosen.shape[-1]]
    sizes = jnp.bincount(flat, length=gate.shape[0]).astype(jnp.int32)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    out = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
    return jnp.einsum("blk,blke->ble", weights, out.reshape(*chosen.shape, -1))


def through_all(x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Weights) -> jax.Array:
    """The same, of all experts' results for all tokens."""
    gate, up, down = experts
    hidden = jax.nn.silu(jnp.einsum("ble,xem->blxm", x, gate)) * jnp.einsum("ble,xem->blxm", x, up)
    combine = jnp.einsum("blk,blkx->blx", weights, jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype))
    return jnp.einsum("blx,blxe->ble", combine, jnp.einsum("blxm,xme->blxe", hidden, down))


def through_places(
    x: jax.Array, weights: jax.Array, chosen: jax.Array, experts: Weights, capacity: float
) -> jax.Array:
    """The same where an expert has so many places in a text: first choices take them before second ones, in
    the order of the tokens, and a choice that finds none adds nothing.
    """
    gate, up, down = experts
    (batch, length, top), count = chosen.shape, gate.shape[0]
    places = math.ceil(length * top * capacity / count)
    wants = jax.nn.one_hot(chosen, count, dtype=jnp.int32)
    turns = jnp.swapaxes(wants, 1, 2).reshape(batch, top * length, count)
    before = jnp.cumsum(turns, axis=1) - turns
    place = jnp.sum(before * turns, axis=-1).reshape(batch, top, length).swapaxes(1, 2)
    taken = jax.nn.one_hot(place, places, dtype=x.dtype)  # nothing from `places` on
    dispatch = jnp.einsum("blkx,blkc->blxc", wants.astype(x.dtype), taken)
    combine = jnp.einsum("blk,blkx,blkc->blxc", weights, wants.astype(x.dtype), taken)
    rows = jnp.einsum("blxc,ble->bxce", dispatch, x)
    hidden = jax.nn.silu(jnp.einsum("bxce,xem->bxcm", rows, gate)) * jnp.einsum("bxce,xem->bxcm", rows, up)
    return jnp.einsum("blxc,bxce->ble", combine, jnp.einsum("bxcm,xme->bxce", hidden, down))


ROUTINGS: dict[str, Callable[..., jax.Array]] = {
    "sorted": through_sorted,
    "dense": through_all,
    "capacity": through_places,
}

MODEL = training.Model(
    SIZES,
    functools.partial(llama.initial_params, mlp=Experts),
    functools.partial(llama.apply, mlp=Experts),
    functools.partial(llama.decode, mlp=Experts),
    llama.empty_cache,
    training.text_tokens,
)


def chosen(routing: Routing | None, options: dict[str, Any]) -> training.Options:
    """The options, with a configuration that has the routing. Raises ValueError for one that there is not."""
    if routing is None:
        return training.Options(**options)
    if routing not in ROUTINGS:
        raise ValueError(f"there is no routing {routing!r}; there are {', '.join(ROUTINGS)}")
    size = MODEL.config(training.Options(**options))
    return training.Options(**options | {"size": dataclasses.replace(size, routing=routing)})


def forward(routing: Routing | None = None, **options: Any) -> tuple[Callable, tuple]:
    """`forward(params, batch) -> logits [batch, length, vocab]` and its arguments; see `training.Options`."""
    return training.forward(MODEL, chosen(routing, options))


def loss(routing: Routing | None = None, **options: Any) -> tuple[Callable, tuple]:
    """`loss(params, batch) -> scalar` and its arguments; see `training.Options`."""
    return training.loss(MODEL, chosen(routing, options))


def init(routing: Routing | None = None, **options: Any) -> tuple[Callable, tuple]:
    """`init(key) -> state`, the training state before the first step, and a key; see `training.Options`."""
    return training.init(MODEL, chosen(routing, options))


def train_step(routing: Routing | None = None, **options: Any) -> tuple[Callable, tuple]:
    """`train_step(state, batch) -> (state, metrics)` and its arguments; see `training.Options`."""
    return training.train_step(MODEL, chosen(routing, options))


def decode_step(routing: Routing | None = None, **options: Any) -> tuple[Callable, tuple]:
    """`decode_step(params, cache, token, position) -> (logits [batch, vocab], cache)` and its arguments; see
    `llama.decode_step`.
    """
    return training.decode_step(MODEL, chosen(routing, options))
