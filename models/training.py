"""What the models' training steps share: state, optimizer, the loss over tokens, and batches of tokens.

A model module gives `loss(params, batch) -> scalar`; what is here turns that into an ordinary single-device
training step of plain pytrees, `train_step(state, batch) -> (state, metrics)`.
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
Loss = Callable[[Params, Batch], jax.Array]


class State(NamedTuple):
    """All that a training step carries from one call to the next."""

    step: Any
    params: Params
    optimizer: Any


def choose[Config](sizes: Mapping[str, Config], size: str | Config, **changes: Any) -> Config:
    """The configuration called `size` (or `size` itself, when it is one), with the changes that are not None.

    Raises ValueError, naming the sizes there are, when none is called so.
    """
    if isinstance(size, str):
        if size not in sizes:
            raise ValueError(f"there is no size {size!r}; the sizes are {', '.join(sizes)}")
        size = sizes[size]
    return dataclasses.replace(size, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[type-var]


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


def new_state(params: Params, optimizer: optax.GradientTransformation) -> State:
    """The state before the first step."""
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def step_of(
    loss: Loss, optimizer: optax.GradientTransformation
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """The training step of `loss` with `optimizer`; its metrics are the loss and the gradients' norm."""

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "grad_norm": optax.global_norm(gradients)}
        return State(state.step + 1, params, moments), metrics

    return train_step


def shapes(tree: Any) -> Any:
    """The same tree with every array replaced by its ShapeDtypeStruct."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def made(make: Callable[[jax.Array], Any], seed: int, abstract: bool) -> Any:
    """What `make` makes of the random key of `seed`: its shapes alone, at no cost, when `abstract`."""
    key = jax.random.key(seed)
    return jax.eval_shape(make, key) if abstract else jax.jit(make)(key)


def token_batch(batch: int, length: int, vocab: int, packed: bool, seed: int) -> Batch:
    """Random tokens to learn: `inputs`, `targets` (the next token) and `weights`, each [batch, length].

    Token 0 is padding and is not drawn. When `packed`, each row holds two texts and a little padding:
    `segments` numbers the texts from 1 (0 is padding), and `positions` counts from 0 within each. There is no
    weight on padding, nor on the last token of a text, whose next token belongs to another one. When not
    packed, the last eighth of the first row has none.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab, (batch, length + 1), dtype=np.int32)
    weights = np.ones((batch, length), np.float32)
    if not packed:
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
