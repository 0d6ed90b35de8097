"""Losses of tiny stacks of layers, each with one thing in it that a pipeline must get right.

`PROGRAMS[name]()` gives `(loss, params, data)`, with `loss(params, *data)` a number. All are mean losses of
`BATCH` rows of `LENGTH` tokens through `layers` layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH, LENGTH, EMBED, MLP, VOCAB, LAYERS, EXPERTS = 8, 5, 8, 12, 16, 8, 3

Program = tuple[Callable[..., Any], dict[str, Any], tuple[Any, ...]]
"""A loss, its weights, and its data."""


def weights(layers: int = LAYERS, **more: tuple[int, ...]) -> dict[str, Any]:
    """An embedding and two matrices a layer, and arrays of other shapes; all random, of about one in sum."""
    shapes = {
        "embedding": (VOCAB, EMBED),
        "up": (layers, EMBED, MLP),
        "down": (layers, MLP, EMBED),
        "norm": (layers, EMBED),
    } | more
    rng = np.random.default_rng(0)
    return {
        name: np.float32(rng.normal(size=s) / np.sqrt(s[-2] if len(s) > 1 else 1))
        for name, s in shapes.items()
    }


def text(batch: int = BATCH) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (batch, LENGTH), dtype=np.int32)


def normed(x: Any) -> Any:
    """A norm whose derivative divides by what is kept."""
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def mlp(x: Any, w: dict[str, Any]) -> Any:
    return x + 0.5 * jax.nn.silu(normed(x) * (1 + w["norm"]) @ w["up"]) @ w["down"]


def stacked(params: dict[str, Any], *names: str) -> dict[str, Any]:
    """What layers have one each of."""
    return {name: params[name] for name in ("up", "down", "norm", *names)}


def entropy(logits: Any, tokens: Any) -> Any:
    """The loss of each token, of the one that follows: [batch, length - 1]."""
    chances = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(chances, tokens[:, 1:, None], -1)[..., 0]


def tied(params: dict[str, Any], x: Any, tokens: Any) -> Any:
    """Over tokens that are not the first of the vocabulary, by their number in the data."""
    counts = tokens[:, 1:] != 0
    return jnp.sum(entropy(x @ params["embedding"].T, tokens) * counts) / jnp.sum(counts)


def through(layer: Callable[..., Any], x: Any, rows: Any, **options: Any) -> Any:
    """x through all layers, which give nothing else."""
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, rows, **options)[0]


def of_layers(layers: int, batch: int = BATCH, **options: Any) -> Program:
    """The plain one: tied embeddings, and a loss weighted by tokens."""

    def loss(params: Any, tokens: Any) -> Any:
        return tied(params, through(mlp, params["embedding"][tokens], stacked(params), **options), tokens)

    return loss, weights(layers), (text(batch),)


def plain() -> Program:
    return of_layers(LAYERS)


def backwards() -> Program:
    return of_layers(LAYERS, reverse=True)


def untied() -> Program:
    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"][tokens] + params["positions"]
        x = through(mlp, x, stacked(params))
        return jnp.mean(entropy(normed(x) * params["scale"] @ params["head"] + params["bias"], tokens))

    more = {"positions": (LENGTH, EMBED), "head": (EMBED, VOCAB), "bias": (VOCAB,), "scale": (EMBED,)}
    return loss, weights(**more), (text(),)


def given_weights() -> Program:
    """Weights of tokens that differ between microbatches, in the data."""

    def loss(params: Any, tokens: Any, mask: Any) -> Any:
        x = through(mlp, params["embedding"][tokens], stacked(params))
        return jnp.sum(entropy(x @ params["embedding"].T, tokens) * mask) / jnp.maximum(jnp.sum(mask), 1.0)

    mask = np.random.default_rng(2).integers(0, 3, (BATCH, LENGTH - 1)) * np.arange(BATCH)[:, None]
    return loss, weights(), (text(), np.float32(mask))


# ---------------------------------------------------------------- what layers give besides


def routed(x: Any, w: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A layer of experts, with each token's chances of them and its choice."""
    chances = jax.nn.softmax(normed(x) @ w["router"])
    choice = jax.nn.one_hot(jnp.argmax(chances, -1), EXPERTS)
    gate = jnp.sum(chances * choice, -1, keepdims=True)
    return mlp(x, w) * (1 + gate), chances, choice


def balanced() -> Program:
    """The balance of experts: products of means over the batch, of each layer."""

    def loss(params: Any, tokens: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            x, chances, choice = routed(x, w)
            return x, (jnp.mean(chances, (0, 1)), jnp.mean(choice, (0, 1)))

        x, (chances, choices) = jax.lax.scan(layer, params["embedding"][tokens], stacked(params, "router"))
        return tied(params, x, tokens) + 0.1 * EXPERTS * jnp.sum(chances * choices)

    return loss, weights(router=(LAYERS, EMBED, EXPERTS)), (text(),)


def auxiliary_rows(**options: Any) -> Program:
    """A number of each layer, a sum over tokens, of scan's second results."""

    def loss(params: Any, tokens: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            scores = normed(x) @ w["router"]
            return routed(x, w)[0], jnp.mean(jax.nn.logsumexp(scores, -1) ** 2)

        x, losses = jax.lax.scan(layer, params["embedding"][tokens], stacked(params, "router"), **options)
        return tied(params, x, tokens) + 0.1 * jnp.sum(losses * jnp.arange(1.0, 1 + LAYERS))

    return loss, weights(router=(LAYERS, EMBED, EXPERTS)), (text(),)


def auxiliary_carried() -> Program:
    """The same, added up on the way."""

    def loss(params: Any, tokens: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            x, total = carry
            scores = normed(x) @ w["router"]
            return (routed(x, w)[0], total + jnp.mean(jax.nn.logsumexp(scores, -1) ** 2)), None

        x, total = jax.lax.scan(layer, (params["embedding"][tokens], 0.0), stacked(params, "router"))[0]
        return tied(params, x, tokens) + 0.1 * total

    return loss, weights(router=(LAYERS, EMBED, EXPERTS)), (text(),)


def several_carries() -> Program:
    """Two activations, and whole numbers, one that counts layers and one a row."""

    def loss(params: Any, tokens: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            x, y, number, seen = carry
            large = jnp.sum(x > 0.5, (1, 2), dtype=jnp.int32)
            y = 0.5 * y + mlp(x, w) * jnp.cos(number.astype(jnp.float32))
            return (y, x, number + 1, seen + large), None

        x = params["embedding"][tokens]
        start = x, jnp.ones_like(x), jnp.int32(0), jnp.zeros(tokens.shape[0], jnp.int32)
        x, y, number, seen = jax.lax.scan(layer, start, stacked(params))[0]
        scale = 1 + seen[:, None, None].astype(jnp.float32) / 100
        return tied(params, (x + y) * scale / number, tokens)

    return loss, weights(), (text(),)


# ---------------------------------------------------------------- randomness


def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def key_each() -> Program:
    """A key a layer, of one for the step."""

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        keys = jax.random.split(key, LAYERS)
        rows = stacked(params) | {"key": keys}
        x = through(lambda x, w: dropped(mlp(x, w), w["key"]), params["embedding"][tokens], rows)
        return tied(params, x, tokens)

    return loss, weights(), (text(), jax.random.key(3))


def key_of_step() -> Program:
    """Keys of the layer's number and the step's."""

    def loss(params: Any, tokens: Any, step: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(5), step)
        rows = stacked(params) | {"number": jnp.arange(LAYERS)}

        def layer(x: Any, w: Any) -> Any:
            return dropped(mlp(x, w), jax.random.fold_in(key, w["number"]))

        return tied(params, through(layer, params["embedding"][tokens], rows), tokens)

    return loss, weights(), (text(), np.int32(7))


def key_carried() -> Program:
    """A key that every layer splits."""

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            return (dropped(mlp(x, w), own), key), None

        x, _ = jax.lax.scan(layer, (params["embedding"][tokens], key), stacked(params))[0]
        return tied(params, x, tokens)

    return loss, weights(), (text(), jax.random.PRNGKey(4))


# ---------------------------------------------------------------- attention, and what is made outside


def attention(x: Any, w: dict[str, Any], rotate: Callable[[Any], Any], mask: Any) -> Any:
    h = normed(x)
    q, k = rotate(h @ w["query"]), rotate(h @ w["key"])
    scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(EMBED), -1e9)
    return x + jax.nn.softmax(scores) @ (h @ w["value"])


HEADS = {name: (LAYERS, EMBED, EMBED) for name in ("query", "key", "value")}
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def table(positions: Any) -> tuple[Any, Any]:
    angles = positions[..., None] / 10.0 ** (np.arange(EMBED // 2, dtype=np.float32) / EMBED)
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    a, b = x[..., : EMBED // 2], x[..., EMBED // 2 :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rotations(outside: bool) -> Program:
    """The table of rotations, made once or by every layer."""

    def loss(params: Any, tokens: Any) -> Any:
        once = table(jnp.arange(LENGTH))

        def layer(x: Any, w: Any) -> Any:
            cos, sin = once if outside else table(jnp.arange(LENGTH))
            return mlp(attention(x, w, lambda x: rotated(x, cos, sin), CAUSAL), w)

        return tied(params, through(layer, params["embedding"][tokens], stacked(params, *HEADS)), tokens)

    return loss, weights(**HEADS), (text(),)


def documents() -> Program:
    """Several documents a row: the mask and the positions of every row are in the data."""

    def loss(params: Any, tokens: Any, segments: Any, positions: Any) -> Any:
        mask = (segments[:, :, None] == segments[:, None, :]) & CAUSAL
        cos, sin = table(positions)

        def layer(x: Any, w: Any) -> Any:
            return mlp(attention(x, w, lambda x: rotated(x, cos, sin), mask), w)

        return tied(params, through(layer, params["embedding"][tokens], stacked(params, *HEADS)), tokens)

    starts = np.random.default_rng(4).integers(1, LENGTH, BATCH)[:, None]
    segments = np.int32(np.arange(LENGTH) >= starts)
    positions = np.arange(LENGTH, dtype=np.int32) - segments * starts
    return loss, weights(**HEADS), (text(), segments, np.int32(positions))


def windows() -> Program:
    """Layers whose windows alternate: numbers, one a layer."""

    def loss(params: Any, tokens: Any) -> Any:
        apart = np.arange(LENGTH)[:, None] - np.arange(LENGTH)

        def layer(x: Any, w: Any) -> Any:
            mask = (apart >= 0) & (apart < w["window"])
            return mlp(attention(x, w, lambda x: x, mask), w)

        rows = stacked(params, *HEADS) | {"window": jnp.array([2, 4] * (LAYERS // 2))}
        return tied(params, through(layer, params["embedding"][tokens], rows), tokens)

    return loss, weights(**HEADS), (text(),)


# ---------------------------------------------------------------- values used again


def skipped() -> Program:
    """What goes into the first layer, used again after the last one."""

    def loss(params: Any, tokens: Any) -> Any:
        first = params["embedding"][tokens]
        return tied(params, through(mlp, first, stacked(params)) + 0.3 * first, tokens)

    return loss, weights(), (text(),)


def in_every_layer() -> Program:
    def loss(params: Any, tokens: Any) -> Any:
        first = jnp.tanh(params["embedding"][tokens])
        x = through(lambda x, w: mlp(x + 0.2 * first, w), first, stacked(params))
        return tied(params, x, tokens)

    return loss, weights(), (text(),)


def shared() -> Program:
    """Matrices that all layers share, and a scale of each one's own."""

    def loss(params: Any, tokens: Any) -> Any:
        rows = {"norm": params["norm"]}
        all_ = {"up": params["up"][0], "down": params["down"][0]}
        return tied(params, through(lambda x, w: mlp(x, w | all_), params["embedding"][tokens], rows), tokens)

    return loss, weights(), (text(),)


def bilinear() -> Program:
    """A loss of two sums, one through the root of the other."""

    def loss(params: Any, tokens: Any) -> Any:
        x = through(mlp, params["embedding"][tokens], stacked(params))
        return tied(params, x, tokens) * jnp.sqrt(jnp.mean(x**2))

    return loss, weights(), (text(),)


# ---------------------------------------------------------------- two stacks


def apart(params: dict[str, Any], *borders: int) -> list[dict[str, Any]]:
    """Stacks of layers, each with arrays of its own, of one that is cut here and there."""
    rows = {name: w for name, w in params.items() if len(w) == LAYERS and w.ndim > 1}
    ends = zip((0, *borders), (*borders, LAYERS), strict=True)
    return [{name: w[a:b] for name, w in rows.items()} for a, b in ends]


def translated(first: int = LAYERS // 2) -> Program:
    """An encoder, and a decoder that looks at what it gives, through a norm, where the data say so."""

    def loss(params: Any, inputs: Any, tokens: Any) -> Any:
        seen = (inputs != 0)[:, None, :]
        x = params["embedding"][inputs]
        x = through(lambda x, w: mlp(attention(x, w, lambda x: x, seen), w), x, params["encoder"])
        encoded = normed(x) * params["scale"]

        def layer(y: Any, w: Any) -> Any:
            q, k, v = normed(y) @ w["query"], encoded @ w["key"], encoded @ w["value"]
            scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(EMBED), -1e9)
            return mlp(y + jax.nn.softmax(scores) @ v, w)

        return tied(params, through(layer, params["embedding"][tokens], params["decoder"]), tokens)

    every = weights(scale=(EMBED,), **HEADS)
    encoder, decoder = apart(every, first)
    inputs = np.random.default_rng(9).integers(0, VOCAB, (BATCH, LENGTH + 2), dtype=np.int32)
    params = {name: every[name] for name in ("embedding", "scale")}
    return loss, params | {"encoder": encoder, "decoder": decoder}, (inputs, text())


def towers() -> Program:
    """Two stacks that know nothing of each other, one of which gives losses, and a third of what both give,
    which the end takes as well.
    """

    def loss(params: Any, inputs: Any, tokens: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return mlp(x, w), jnp.mean(jax.nn.logsumexp(normed(x) @ w["router"], -1) ** 2)

        x, losses = jax.lax.scan(layer, params["embedding"][inputs], params["left"])
        y = through(mlp, params["embedding"][tokens], stacked(params["right"]), reverse=True)
        z = through(mlp, x * jnp.tanh(y), stacked(params["top"]))
        return tied(params, z + 0.3 * x + 0.1 * y, tokens) + 0.1 * jnp.sum(losses)

    every = weights(router=(LAYERS, EMBED, EXPERTS))
    left, right, top = apart(every, 3, 6)
    inputs = np.random.default_rng(9).integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32)
    params = {"embedding": every["embedding"], "left": left, "right": right, "top": top}
    return loss, params, (inputs, text())


# ---------------------------------------------------------------- several of these at once


def both_ends() -> Program:
    """An end of its own weights, tokens weighted by the data, rotations made once, dropout by the step's key,
    and what goes into the first layer used again after the last one.
    """

    def loss(params: Any, tokens: Any, mask: Any, step: Any) -> Any:
        key, once = jax.random.fold_in(jax.random.key(5), step), table(jnp.arange(LENGTH))

        def layer(x: Any, w: Any) -> Any:
            x = mlp(attention(x, w, lambda x: rotated(x, *once), CAUSAL), w)
            return dropped(x, jax.random.fold_in(key, w["number"]))

        rows = stacked(params, *HEADS) | {"number": jnp.arange(LAYERS)}
        first = params["embedding"][tokens] + params["positions"]
        x = normed(through(layer, first, rows) + 0.3 * first) * params["scale"]
        losses = entropy(x @ params["head"] + params["bias"], tokens)
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1.0)

    (_, params, _), (_, _, (tokens, mask)) = untied(), given_weights()
    return loss, params | weights(**HEADS), (tokens, mask, np.int32(7))


def many_carries() -> Program:
    """Two activations, whole numbers, a loss and a key, all carried, and matrices that layers share."""

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        shared = {"up": params["up"][0], "down": params["down"][0]}

        def layer(carry: Any, w: Any) -> Any:
            x, y, number, seen, total, key = carry
            key, own = jax.random.split(key)
            large = jnp.sum(x > 0.5, (1, 2), dtype=jnp.int32)
            total += jnp.mean(jax.nn.logsumexp(normed(x) @ w["router"], -1) ** 2)
            y = 0.5 * y + dropped(mlp(x, w | shared), own) * jnp.cos(number.astype(jnp.float32))
            return (y, x, number + 1, seen + large, total, key), None

        x = params["embedding"][tokens]
        whole = jnp.int32(0), jnp.zeros(tokens.shape[0], jnp.int32)
        rows = {name: params[name] for name in ("norm", "router")}
        x, y, number, seen, total, _ = jax.lax.scan(layer, (x, jnp.ones_like(x), *whole, 0.0, key), rows)[0]
        scale = 1 + seen[:, None, None].astype(jnp.float32) / 100
        return tied(params, (x + y) * scale / number, tokens) + 0.1 * total

    return loss, weights(router=(LAYERS, EMBED, EXPERTS)), (text(), jax.random.PRNGKey(4))


def many_rows() -> Program:
    """From the last layer to the first: windows and losses of each one, rotations made by each one, and what
    goes into the first one used by all.
    """

    def loss(params: Any, tokens: Any) -> Any:
        apart = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        first = jnp.tanh(params["embedding"][tokens])

        def layer(x: Any, w: Any) -> Any:
            cos, sin = table(jnp.arange(LENGTH))
            mask = (apart >= 0) & (apart < w["window"])
            x = attention(x + 0.2 * first, w, lambda x: rotated(x, cos, sin), mask)
            return mlp(x, w), jnp.mean(jax.nn.logsumexp(normed(x) @ w["router"], -1) ** 2)

        rows = stacked(params, "router", *HEADS) | {"window": jnp.array([2, 4] * (LAYERS // 2))}
        x, losses = jax.lax.scan(layer, first, rows, reverse=True)
        return tied(params, x, tokens) + 0.1 * jnp.sum(losses * jnp.arange(1.0, 1 + LAYERS))

    return loss, weights(router=(LAYERS, EMBED, EXPERTS), **HEADS), (text(),)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "plain": plain,
    "untied": untied,
    "token weights": given_weights,
    "balanced experts": balanced,
    "a loss of each layer": auxiliary_rows,
    "a loss carried": auxiliary_carried,
    "several carries": several_carries,
    "a key a layer": key_each,
    "a key of the step": key_of_step,
    "a key carried": key_carried,
    "rotations outside": lambda: rotations(True),
    "rotations inside": lambda: rotations(False),
    "documents": documents,
    "windows": windows,
    "skip to the end": skipped,
    "skip to all": in_every_layer,
    "shared weights": shared,
    "two sums": bilinear,
    "backwards": backwards,
    "encoder and decoder": translated,
    "two towers": towers,
    "both ends": both_ends,
    "many carries": many_carries,
    "many rows": many_rows,
}
