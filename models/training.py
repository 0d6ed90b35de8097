"""What the models' training steps share: state, optimizer, loss, factories, and batches of tokens.

A module of a model says what its weights and its logits are (`Model`); what is here turns that into ordinary
single-device functions of plain pytrees: a loss, a training step, a decoding step, each with its arguments.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = Any
Batch = dict[str, Any]
Cache = Any


class State(NamedTuple):
    """All that a training step carries from one call to the next."""

    step: Any
    params: Params
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Options:
    """What the models' factories take, as keywords."""

    size: Any = "tiny"  # one of the model's sizes, or a configuration
    layers: int | None = None  # in place of the size's own number
    batch: int = 8
    length: int = 64  # of the texts; of the cache in decode_step
    packed: bool = False  # several texts a row, kept apart by segment ids
    scan: bool = True  # the layers stacked, in one loop; else one after the other
    dtype: str | None = None  # of the computation, in place of the size's own
    remat: bool | None = None  # layers computed again in the backward pass; None: as the size has it
    abstract: bool = True  # arguments as ShapeDtypeStructs, else as random arrays
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Model[Config]:
    """What a model's module says of it; the factories below make the rest of it.

    A configuration is a dataclass with at least the fields `layers`, `vocab`, `dtype` and `remat`. Each
    function takes one, and whether the layers are scanned.
    """

    sizes: Mapping[str, Config]
    params: Callable[[Config, bool, jax.Array], Params]  # of a random key
    forward: Callable[[Config, bool], Callable[[Params, Batch], jax.Array]]  # the logits of a batch
    decode: Callable[[Config, bool], Callable[..., tuple[jax.Array, Cache]]]  # see decode_step
    cache: Callable[[Config, bool, int, int], Cache]  # an empty one, of a batch and a length
    tokens: Callable[[Config, Options], Batch]

    def config(self, options: Options) -> Config:
        """The configuration that the options choose. Raises ValueError when there is no such size."""
        size: Any = options.size
        if isinstance(size, str):
            if size not in self.sizes:
                raise ValueError(f"there is no size {size!r}; the sizes are {', '.join(self.sizes)}")
            size = self.sizes[size]
        layers = size.layers if options.layers is None else options.layers
        remat = size.remat if options.remat is None else options.remat
        return dataclasses.replace(size, layers=layers, dtype=options.dtype or size.dtype, remat=remat)


def forward(model: Model, options: Options) -> tuple[Callable, tuple]:
    """`forward(params, batch) -> logits` and its arguments."""
    config = model.config(options)
    params = made(lambda key: model.params(config, options.scan, key), options)
    return model.forward(config, options.scan), (params, given(model.tokens(config, options), options))


def loss(model: Model, options: Options) -> tuple[Callable, tuple]:
    """`loss(params, batch) -> scalar` and its arguments."""
    logits, arguments = forward(model, options)

    def loss(params: Params, batch: Batch) -> jax.Array:
        return cross_entropy(logits(params, batch), batch["targets"], batch["weights"])

    return loss, arguments


def init(model: Model, options: Options) -> tuple[Callable, tuple]:
    """`init(key) -> state`, before the first step, and a key."""
    config = model.config(options)

    def init(key: jax.Array) -> State:
        params = model.params(config, options.scan, key)
        return State(jnp.zeros((), jnp.int32), params, adamw().init(params))

    return init, (jax.random.key(options.seed),)


def train_step(model: Model, options: Options) -> tuple[Callable, tuple]:
    """`train_step(state, batch) -> (state, {"loss", "grad_norm"})` and its arguments."""
    objective, _ = loss(model, dataclasses.replace(options, abstract=True))
    optimizer = adamw()

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(objective)(state.params, batch)
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(gradients)}
        return State(state.step + 1, params, moments), metrics

    state = made(init(model, options)[0], options)
    return train_step, (state, given(model.tokens(model.config(options), options), options))


def decode_step(model: Model, options: Options) -> tuple[Callable, tuple]:
    """`decode_step(params, cache, token, position) -> (logits [batch, vocab], cache)` and its arguments."""
    config: Any = model.config(options)

    def start(key: jax.Array) -> tuple[Params, Cache, jax.Array, jax.Array]:
        params = model.params(config, options.scan, key)
        cache = model.cache(config, options.scan, options.batch, options.length)
        token = jax.random.randint(key, (options.batch,), 1, config.vocab)
        return params, cache, token, jnp.zeros((), jnp.int32)

    return model.decode(config, options.scan), made(start, options)


def made(make: Callable[[jax.Array], Any], options: Options) -> Any:
    """What `make` makes of a random key: its shapes alone, at no cost, when the options say abstract."""
    key = jax.random.key(options.seed)
    return jax.eval_shape(make, key) if options.abstract else make(key)


def given(arrays: Any, options: Options) -> Any:
    """The arrays, or their shapes when the options say abstract."""
    if not options.abstract:
        return arrays
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)


def adamw(
    learning_rate: float = 3e-4, warmup: int = 100, steps: int = 10_000, clip: float = 1.0
) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradients' global norm, with a linear warmup of the rate and then a cosine.

    The rate starts and ends at a tenth of `learning_rate`, so that the very first step already learns.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / 10,
        peak_value=learning_rate,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=learning_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
    )


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean, weighted by `weights` [batch, length], of the tokens' negative log-likelihoods, in float32.

    logits are [batch, length, vocab], targets [batch, length] integers.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def text_tokens(config: Any, options: Options) -> Batch:
    """Random tokens to learn: `inputs`, `targets` (the next token) and `weights`, each [batch, length].

    Token 0 is padding and is not drawn. When `packed`, each row holds two texts and a little padding:
    `segments` numbers the texts from 1 (0 is padding), and `positions` counts from 0 within each. There is no
    weight on padding, nor on the last token of a text, whose next token belongs to another one. When not
    packed, the last eighth of the first row has none.
    """
    rng = np.random.default_rng(options.seed)
    batch, length = options.batch, options.length
    tokens = rng.integers(1, config.vocab, (batch, length + 1), dtype=np.int32)
    weights = np.ones((batch, length), np.float32)
    if not options.packed:
        weights[0, length - length // 8 :] = 0.0
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    segments, positions = packing(rng, batch, length)
    following = np.concatenate([segments[:, 1:], np.zeros((batch, 1), np.int32)], axis=1)
    weights *= (segments > 0) & (segments == following)
    return {
        "inputs": np.where(segments > 0, tokens[:, :-1], 0),
        "targets": np.where(weights > 0, tokens[:, 1:], 0),
        "weights": weights,
        "segments": segments,
        "positions": positions,
    }


def packing(rng: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions, [batch, length] each, of rows cut at random into two texts and padding."""
    segments = np.zeros((batch, length), np.int32)
    positions = np.zeros((batch, length), np.int32)
    for row in range(batch):
        end = length - int(rng.integers(0, max(length // 8, 1) + 1))
        cut = int(rng.integers(1, max(end, 2)))
        for number, (start, stop) in enumerate([(0, cut), (cut, end)], start=1):
            segments[row, start:stop] = number
            positions[row, start:stop] = np.arange(stop - start)
    return segments, positions
