"""What looks like a cross-entropy over a vocabulary, and is wrong in one place."""

import jax
import jax.numpy as jnp
import optax

from tests.spellings import LookAlike

B, T, D, V = 2, 5, 3, 11
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
W = jax.ShapeDtypeStruct((D, V), jnp.float32)
LABELS = jax.ShapeDtypeStruct((B, T), jnp.int32)
IDS = jax.ShapeDtypeStruct((7,), jnp.int32)
TABLE = jax.ShapeDtypeStruct((V, D), jnp.float32)
ROWS = jax.ShapeDtypeStruct((7, D), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))
EXPERTS = jax.ShapeDtypeStruct((D, 4), jnp.float32)


def own(logp, labels):
    return jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]


def contrastive(a, b):
    """B x B: the labels are the rows' own places."""
    logits = a @ b.T / 0.07
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(a))).mean()


def contrastive_both_ways(a, b):
    logits = a @ b.T
    down, across = jax.nn.log_softmax(logits, 0), jax.nn.log_softmax(logits, 1)
    return -(jnp.diag(down) + jnp.diag(across)).mean()


def contrastive_one_hot(a, b):
    return -(jnp.eye(len(a)) * jax.nn.log_softmax(a @ b.T)).sum(-1).mean()


def first_of_all(a, b):
    """The right one is always the first."""
    return -jax.nn.log_softmax(a @ b.T)[:, 0].mean()


def over_tokens(x, w, labels):
    """The softmax over tokens, the label from the vocabulary."""
    return -own(jax.nn.log_softmax(x @ w, axis=1), labels).mean()


def other_tokens(x, w, labels):
    """The log-sum-exp of one token, the label's logit of the one before."""
    logits = x @ w
    return (jax.nn.logsumexp(logits, -1) - own(jnp.roll(logits, 1, axis=1), labels)).mean()


def without_log(x, w, labels):
    return -own(jax.nn.softmax(x @ w), labels).mean()


def log_of_a_sum_without_exp(x, w, labels):
    logits = x @ w
    return (jnp.log(jnp.sum(jnp.abs(logits), -1)) - own(logits, labels)).mean()


def mean_over_vocabulary(x, w, labels):
    """The mean over the vocabulary where the sum belongs."""
    return -jnp.mean(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(x @ w), axis=-1)


def mean_over_all(x, w, labels):
    return -jnp.mean(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(x @ w))


def no_label(x, w):
    """As far from uniform as it is."""
    return -jax.nn.log_softmax(x @ w).mean(-1)


def divergence(x, w, teacher):
    """Of two models."""
    p = jax.nn.log_softmax(x @ teacher)
    return jnp.sum(jnp.exp(p) * (p - jax.nn.log_softmax(x @ w)), -1).mean()


def distilled(x, w, teacher):
    """The labels are another model's probabilities."""
    return -jnp.sum(jax.nn.softmax(x @ teacher) * jax.nn.log_softmax(x @ w), -1).mean()


def entropy(x, w):
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.sum(jnp.exp(logp) * logp, -1)


def sigmoids(x, w, labels):
    return optax.sigmoid_binary_cross_entropy(x @ w, jax.nn.one_hot(labels, V)).sum(-1).mean()


def focal(x, w, labels):
    p = own(jax.nn.softmax(x @ w), labels)
    return (-((1 - p) ** 2) * jnp.log(p)).mean()


def focal_of_loss(x, w, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return ((1 - jnp.exp(-losses)) ** 2 * losses).mean()


def hinge(x, w, labels):
    logits = x @ w
    return jnp.maximum(0, 1 + logits.max(-1) - own(logits, labels)).mean()


def perplexity_as_weight(x, w, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return (jax.lax.stop_gradient(jnp.exp(losses)) * losses).mean()


def some_of_the_vocabulary(x, w, labels):
    """Summed over a slice, the labels of all."""
    logits = x @ w
    return (jax.nn.logsumexp(logits[..., :7], -1) - own(logits, labels)).mean()


def sampled(x, table, labels, ids):
    """Against some rows that were drawn."""
    logits = x @ table[ids].T
    right = jnp.sum(x * table[labels], -1)
    return (jax.nn.logsumexp(logits, -1) - right).mean()


def gathered_table(x, table, ids, labels):
    """Labels among rows that were looked up."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ table[ids].T, labels % 7).mean()


def own_choice(x, w):
    """The label is the largest logit."""
    logits = x @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, logits.argmax(-1)).mean()


def drawn(x, w, key):
    """The label is drawn from the logits."""
    logits = x @ w
    return own(jax.nn.log_softmax(logits), jax.random.categorical(key, logits)).mean()


def router(x, w):
    """Experts' load and their logits' size."""
    logits = x @ w
    p = jax.nn.softmax(logits)
    load = jax.nn.one_hot(p.argmax(-1), 4).mean((0, 1))
    return 4 * jnp.sum(load * p.mean((0, 1))) + jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)


def pointers(x, keys, labels):
    """Over the positions of another text of the same row: no table."""
    logits = jnp.einsum("btd,bsd->bts", x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def floor_added(x, w, labels):
    """A small number is added to the probability."""
    return -jnp.log(own(jax.nn.softmax(x @ w), labels) + 1e-6).mean()


def wrong_sign(x, w, labels):
    logits = x @ w
    return (jax.nn.logsumexp(logits, -1) + own(logits, labels)).mean()


def two_tables(x, w, other, labels):
    """The sum is over one table's logits, the label's logit is another's."""
    return (jax.nn.logsumexp(x @ w, -1) - own(x @ other, labels)).mean()


def by_token_temperature(x, w, labels):
    """Logits over their own size."""
    logits = x @ w
    logits = logits / jnp.linalg.norm(logits, axis=-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.custom_vjp
def own_rule(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _forward(logits, labels):
    return own_rule(logits, labels), (jax.nn.softmax(logits), labels)


def _backward(saved, g):
    p, labels = saved
    return g[..., None] * (p - jax.nn.one_hot(labels, V)), None


own_rule.defvjp(_forward, _backward)


def with_own_rule(x, w, labels):
    """Its derivative could be another."""
    return own_rule(x @ w, labels).mean()


LOOKALIKES = {
    "contrastive": LookAlike(contrastive, (ROWS, ROWS), "contrastive"),
    "contrastive_both_ways": LookAlike(contrastive_both_ways, (ROWS, ROWS)),
    "contrastive_one_hot": LookAlike(contrastive_one_hot, (ROWS, ROWS)),
    "first_of_all": LookAlike(first_of_all, (ROWS, ROWS)),
    "over_tokens": LookAlike(over_tokens, (X, W, LABELS)),
    "other_tokens": LookAlike(other_tokens, (X, W, LABELS)),
    "without_log": LookAlike(without_log, (X, W, LABELS)),
    "log_of_a_sum_without_exp": LookAlike(log_of_a_sum_without_exp, (X, W, LABELS)),
    "mean_over_vocabulary": LookAlike(mean_over_vocabulary, (X, W, LABELS), "mean over the vocabulary"),
    "mean_over_all": LookAlike(mean_over_all, (X, W, LABELS), "mean over the vocabulary"),
    "no_label": LookAlike(no_label, (X, W)),
    "divergence": LookAlike(divergence, (X, W, W)),
    "distilled": LookAlike(distilled, (X, W, W), "model"),
    "entropy": LookAlike(entropy, (X, W)),
    "sigmoids": LookAlike(sigmoids, (X, W, LABELS)),
    "focal": LookAlike(focal, (X, W, LABELS), "weighted"),
    "focal_of_loss": LookAlike(focal_of_loss, (X, W, LABELS), "weighted"),
    "hinge": LookAlike(hinge, (X, W, LABELS)),
    "perplexity_as_weight": LookAlike(perplexity_as_weight, (X, W, LABELS), "weighted"),
    "some_of_the_vocabulary": LookAlike(some_of_the_vocabulary, (X, W, LABELS), "vocabulary"),
    "sampled": LookAlike(sampled, (X, TABLE, LABELS, IDS)),
    "gathered_table": LookAlike(gathered_table, (X, TABLE, IDS, LABELS), "data"),
    "own_choice": LookAlike(own_choice, (X, W)),
    "drawn": LookAlike(drawn, (X, W, KEY)),
    "router": LookAlike(router, (X, EXPERTS)),
    "pointers": LookAlike(pointers, (X, X, LABELS), "each"),
    "floor_added": LookAlike(floor_added, (X, W, LABELS)),
    "wrong_sign": LookAlike(wrong_sign, (X, W, LABELS)),
    "two_tables": LookAlike(two_tables, (X, W, W, LABELS)),
    "with_own_rule": LookAlike(with_own_rule, (X, W, LABELS), "custom_vjp"),
    "by_token_temperature": LookAlike(by_token_temperature, (X, W, LABELS)),
}
