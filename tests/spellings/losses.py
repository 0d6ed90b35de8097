"""Cross-entropy over a vocabulary as it is written, from hidden states to a loss."""

import jax
import jax.numpy as jnp
import optax

from tests.spellings import Spelling
from tests.spellings.losses_alike import LOOKALIKES

B, T, D, V = 2, 5, 3, 11
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
X16 = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
W = jax.ShapeDtypeStruct((D, V), jnp.float32)
W16 = jax.ShapeDtypeStruct((D, V), jnp.bfloat16)
TABLE = jax.ShapeDtypeStruct((V, D), jnp.float32)
BIAS = jax.ShapeDtypeStruct((V,), jnp.float32)
LABELS = jax.ShapeDtypeStruct((B, T), jnp.int32)
SOFT = jax.ShapeDtypeStruct((B, T, V), jnp.float32)
MASK = jax.ShapeDtypeStruct((B, T), jnp.float32)

LOSS = {"soft": False, "smoothing": 0.0, "z_loss": 0.0, "axes": {"batch": B * T, "embed": D, "vocab": V}}


def log_softmax_gather(x, w, labels):
    logp = jax.nn.log_softmax(x @ w, axis=-1)
    return -jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0].mean()


def integer_labels(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def one_hot_labels(x, w, labels):
    return optax.softmax_cross_entropy(x @ w, jax.nn.one_hot(labels, V)).sum()


def tied(x, table, labels):
    """As Hugging Face: the embedding transposed, masked tokens weighted by zero."""
    logits = jnp.dot(x, table.T)
    safe = jnp.where(labels == -100, 0, labels)
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(safe, V)) * (labels != -100)
    return losses.sum() / (labels != -100).sum()


def next_token(x, w, tokens):
    """Logits shifted against tokens."""
    logits, targets = (x @ w)[:, :-1], tokens[:, 1:]
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(jax.nn.one_hot(targets, V) * logp, axis=-1).mean()


def summed_at_once(x, w, labels):
    """The one-hot product summed over everything."""
    return -jnp.sum(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(x @ w)) / labels.size


def by_hand(x, w, labels):
    """The maximum taken off, the exponentials summed, the label found by comparing."""
    logits = jnp.einsum("btd,dv->btv", x, w)
    shift = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    total = jnp.log(jnp.sum(jnp.exp(logits - shift), -1)) + shift[..., 0]
    own = jnp.sum(jnp.where(jnp.arange(V) == labels[..., None], logits, 0.0), -1)
    return jnp.mean(total - own)


def without_maximum(x, w, labels):
    logits = x @ w
    own = jnp.take_along_axis(logits, labels[..., None], -1).squeeze(-1)
    return jnp.log(jnp.exp(logits).sum(-1)) - own


def softmax_then_log(x, w, labels):
    p = jax.nn.softmax(x @ w, axis=-1)
    return -jnp.log(jnp.take_along_axis(p, labels[..., None], -1)).mean()


def log_of_softmax(x, w, labels):
    return -(jnp.log(jax.nn.softmax(x @ w)) * jax.nn.one_hot(labels, V)).sum(-1)


def left_operand(x, w, labels):
    """Logits with the vocabulary first."""
    logits = jnp.einsum("dv,btd->vbt", w, x)
    lse = jax.nn.logsumexp(logits, axis=0)
    return lse - jnp.take_along_axis(logits, labels[None], 0)[0]


def flattened(x, w, labels):
    logits = (x @ w).reshape(-1, V)
    flat = labels.reshape(-1)
    return -jax.nn.log_softmax(logits)[jnp.arange(flat.size), flat].mean()


def vmapped(x, w, labels):
    """A function of one token."""

    def one(row, label):
        logits = w.T @ row
        return jax.nn.logsumexp(logits) - logits[label]

    return jax.vmap(jax.vmap(one))(x, labels).mean()


def capped(x, table, labels):
    """As Gemma 2: tanh, in float32."""
    logits = jnp.einsum("btd,vd->btv", x, table).astype(jnp.float32)
    logits = 30.0 * jnp.tanh(logits / 30.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def scaled(x, table, labels):
    """As T5 with tied weights."""
    logits = (x * D**-0.5) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits / 0.7, labels)


def with_bias(x, w, bias, labels):
    logits = x @ w + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def smoothed(x, w, labels):
    soft = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
    return optax.softmax_cross_entropy(x @ w, soft).mean()


def smoothed_t5x(x, w, labels):
    """As T5X: less for the label, the rest for all others, the least value taken off; and z-loss."""
    high, low = 0.9, 0.1 / (V - 1)
    least = -(high * jnp.log(high) + (V - 1) * low * jnp.log(low + 1e-20))
    soft = jnp.where(labels[..., None] == jnp.arange(V), high, low)
    logits = x @ w
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    losses = -jnp.sum(soft * (logits - lse), -1) - least
    return (losses + 1e-4 * jnp.square(lse[..., 0])).sum()


def z_loss(x, w, labels):
    """As MaxText, with the log-sum-exp returned."""
    logits = x @ w
    lse = jax.nn.logsumexp(logits, axis=-1)
    losses = lse - jnp.sum(logits * jax.nn.one_hot(labels, V), -1)
    losses = losses + 1e-3 * lse**2
    return losses.mean(), lse.mean()


def apart(x, w, labels, mask):
    """Both terms weighted and summed for themselves."""
    logits = x @ w
    own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jnp.sum(jax.nn.logsumexp(logits, -1) * mask) - jnp.sum(own * mask)) / mask.sum()


def with_accuracy(x, w, labels):
    logits = x @ w
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


def soft_labels(x, w, labels):
    return -(labels * jax.nn.log_softmax(x @ w)).sum(-1).mean()


def chunked(x, w, labels):
    """Some tokens at a time, in a loop, recomputed."""

    @jax.checkpoint
    def some(total, rows):
        row, label = rows
        return total + optax.softmax_cross_entropy_with_integer_labels(row @ w, label).sum(), None

    return jax.lax.scan(some, 0.0, (x.swapaxes(0, 1), labels.T))[0]


def mapped(x, w, labels):
    return jax.lax.map(lambda rows: jax.nn.logsumexp(rows[0] @ w) - (rows[0] @ w)[rows[1]], (x[0], labels[0]))


def in_remat(x, w, labels):
    return jax.checkpoint(log_softmax_gather)(x, w, labels)


def narrow(x, w, labels):
    """bfloat16 products, accumulated and normalised in float32."""
    logits = jax.lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def weighted(x, w, labels, mask):
    logp = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    own = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -jnp.sum(own * mask) / jnp.maximum(mask.sum(), 1)


def classes(x, w, bias, labels):
    """Images: the mean over patches, and its class."""
    return optax.softmax_cross_entropy_with_integer_labels(x.mean(1) @ w + bias, labels[:, 0]).mean()


def policy(x, w, actions, before, advantage):
    """The clipped ratio of PPO, of log-probabilities."""
    logp = jnp.take_along_axis(jax.nn.log_softmax(x @ w), actions[..., None], -1)[..., 0]
    ratio = jnp.exp(logp - before)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


def padded(x, table, labels):
    """A table of a few rows more than there are tokens, their logits masked away."""
    logits = jnp.einsum("btd,vd->btv", x, table)
    logits = jnp.where(jnp.arange(V) < 9, logits, -1e9)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


SPELLINGS = {
    "log_softmax_gather": Spelling(log_softmax_gather, (X, W, LABELS), LOSS),
    "integer_labels": Spelling(integer_labels, (X, W, LABELS), LOSS),
    "one_hot_labels": Spelling(one_hot_labels, (X, W, LABELS), LOSS),
    "tied": Spelling(tied, (X, TABLE, LABELS), LOSS),
    "next_token": Spelling(
        next_token, (X16, W16, LABELS), LOSS | {"axes": {"batch": 8, "embed": D, "vocab": V}}
    ),
    "summed_at_once": Spelling(summed_at_once, (X, W, LABELS), LOSS),
    "by_hand": Spelling(by_hand, (X, W, LABELS), LOSS),
    "without_maximum": Spelling(without_maximum, (X, W, LABELS), LOSS),
    "softmax_then_log": Spelling(softmax_then_log, (X, W, LABELS), LOSS),
    "log_of_softmax": Spelling(log_of_softmax, (X, W, LABELS), LOSS),
    "left_operand": Spelling(left_operand, (X, W, LABELS), LOSS),
    "flattened": Spelling(flattened, (X, W, LABELS), LOSS),
    "vmapped": Spelling(vmapped, (X, W, LABELS), LOSS),
    "capped": Spelling(capped, (X16, TABLE, LABELS), LOSS | {"cap": 30.0}),
    "scaled": Spelling(scaled, (X, TABLE, LABELS), LOSS),
    "with_bias": Spelling(with_bias, (X, W, BIAS, LABELS), LOSS),
    "smoothed": Spelling(smoothed, (X, W, LABELS), LOSS | {"smoothing": 0.1}),
    "smoothed_t5x": Spelling(smoothed_t5x, (X, W, LABELS), LOSS | {"smoothing": 0.11, "z_loss": 1e-4}),
    "z_loss": Spelling(z_loss, (X, W, LABELS), LOSS | {"z_loss": 1e-3}),
    "apart": Spelling(apart, (X, W, LABELS, MASK), LOSS),
    "with_accuracy": Spelling(with_accuracy, (X, W, LABELS), LOSS),
    "soft_labels": Spelling(soft_labels, (X, W, SOFT), LOSS | {"soft": True}),
    "chunked": Spelling(chunked, (X, W, LABELS), LOSS | {"axes": {"batch": B, "embed": D, "vocab": V}}),
    "mapped": Spelling(mapped, (X, W, LABELS), LOSS | {"axes": {"batch": 1, "embed": D, "vocab": V}}),
    "in_remat": Spelling(in_remat, (X, W, LABELS), LOSS),
    "narrow": Spelling(narrow, (X16, W16, LABELS), LOSS),
    "weighted": Spelling(weighted, (X, W, LABELS, MASK), LOSS),
    "classes": Spelling(classes, (X, W, BIAS, LABELS), LOSS | {"axes": {"batch": B, "embed": D, "vocab": V}}),
    "padded": Spelling(padded, (X, TABLE, LABELS), LOSS),
    "policy": Spelling(policy, (X, W, LABELS, MASK, MASK), LOSS),
}

__all__ = ["LOOKALIKES", "SPELLINGS"]
