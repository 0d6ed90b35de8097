"""Look-alikes of attention that are something else: other weights, other scores, other uses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings import LookAlike
from tests.spellings.attention_parts import attend, by_name, mix, qkv, rand, scores

T = 5
TRI = np.tri(T, dtype=np.float32)


# ---------------------------------------------------------------- other weights than a softmax


def sigmoid_weights(q, k, v):
    return mix(jax.nn.sigmoid(scores(q, k) - np.log(T)), v)


def rectified_weights(q, k, v):
    return mix(jax.nn.relu(scores(q, k)) / T, v)


def rectified_squares(q, k, v):
    return mix(jnp.square(jax.nn.relu(scores(q, k))), v)


def rectified_weights_that_sum_to_one(q, k, v):
    w = jax.nn.relu(scores(q, k)) + 1e-6
    return mix(w / w.sum(-1, keepdims=True), v)


def squares_that_sum_to_one(q, k, v):
    w = scores(q, k) ** 2
    return mix(w / w.sum(-1, keepdims=True), v)


def softplus_that_sums_to_one(q, k, v):
    w = jax.nn.softplus(scores(q, k))
    return mix(w / w.sum(-1, keepdims=True), v)


def exponentials_less_one(q, k, v):
    w = jnp.expm1(jax.nn.relu(scores(q, k))) + 1e-3
    return mix(w / w.sum(-1, keepdims=True), v)


def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    w = jnp.einsum("bqhd,bkhd->bhqk", q, k) * TRI
    return mix(w / w.sum(-1, keepdims=True), v)


def linear_attention_with_exponential_features(q, k, v):
    q, k = jax.nn.softmax(q, axis=-1), jnp.exp(k)
    state, total = jnp.einsum("bkhd,bkhe->bhde", k, v), k.sum(1)
    return jnp.einsum("bqhd,bhde->bqhe", q, state) / jnp.einsum("bqhd,bhd->bqh", q, total)[..., None]


def efficient_attention(q, k, v):
    context = jnp.einsum("bkhd,bkhe->bhde", jax.nn.softmax(k, axis=1), v)
    return jnp.einsum("bqhd,bhde->bqhe", jax.nn.softmax(q, axis=-1), context)


def random_features(q, k, v, w):
    q, k = (jnp.exp(x @ w - (x * x).sum(-1, keepdims=True) / 2) for x in (q, k))
    weights = jnp.einsum("bqhm,bkhm->bhqk", q, k)
    return mix(weights / weights.sum(-1, keepdims=True), v)


def decay_without_normalisation(q, k, v):
    i, j = np.ogrid[:T, :T]
    decay = np.where(i >= j, 0.9 ** (i - j), 0)
    return mix(scores(q, k) * decay, v)


def decay_of_data_without_normalisation(q, k, v, g):
    total = jnp.cumsum(-jax.nn.softplus(g), axis=1).transpose(0, 2, 1)
    decay = jnp.exp(jnp.where(TRI > 0, total[..., :, None] - total[..., None, :], -jnp.inf))
    return mix(scores(q, k) * decay, v)


def product_of_scores_and_values(q, k, v):
    return mix(scores(q, k), v)


def normal_weights_and_a_constant(q, k, v):
    return mix(jax.nn.softmax(scores(q, k)) - 1 / T, v)


def weights_and_the_identity(q, k, v):
    return mix(jax.nn.softmax(scores(q, k)) + jnp.eye(T), v)


def one_less_the_weights(q, k, v):
    return mix(1 - jax.nn.softmax(scores(q, k)), v)


def weights_squared(q, k, v):
    return mix(jax.nn.softmax(scores(q, k)) ** 2, v)


def weights_rounded(q, k, v):
    return mix(jnp.round(jax.nn.softmax(scores(q, k)) * 255) / 255, v)


def weights_stretched_and_clipped(q, k, v):
    return mix(jnp.clip(jax.nn.softmax(scores(q, k)) * 1.06 - 0.03, 0, 1), v)


def weights_without_a_gradient(q, k, v):
    w = jax.nn.softmax(scores(q, k))
    return mix(jax.nn.one_hot(w.argmax(-1), T) + w - lax.stop_gradient(w), v)


def stick_breaking(q, k, v):
    x = scores(q, k)
    beta = jax.nn.sigmoid(x)
    left = jnp.cumsum(jax.nn.log_sigmoid(-x), axis=-1) - jax.nn.log_sigmoid(-x)
    return mix(beta * jnp.exp(left), v)


# ---------------------------------------------------------------- other scores


def scores_squared(q, k, v):
    return attend(scores(q, k) ** 2, v)


def scores_without_sign(q, k, v):
    return attend(jnp.abs(scores(q, k)), v)


def scores_rectified(q, k, v):
    return attend(jax.nn.relu(scores(q, k)), v)


def scores_clipped(q, k, v):
    return attend(jnp.clip(scores(q, k), -0.5, 0.5), v)


def scores_rounded(q, k, v):
    return attend(jnp.round(scores(q, k) * 16) / 16, v)


def scores_times_scores(q, k, v):
    return attend(scores(q, k) * scores(k, q), v)


def scores_capped_by_another_function(q, k, v):
    return attend(5 * jnp.arctan(scores(q, k) / 5), v)


def scores_normalised_over_keys(q, k, v):
    x = scores(q, k)
    return attend((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True), v)


def scores_summed_along_keys(q, k, v):
    return attend(jnp.cumsum(scores(q, k), axis=-1), v)


def scores_smoothed_by_their_neighbours(q, k, v):
    x = scores(q, k)
    return attend(0.5 * x + 0.5 * jnp.roll(x, 1, axis=2), v)


def scores_of_distances(q, k, v):
    return attend(-((q[:, :, None] - k[:, None]) ** 2).sum(-1).transpose(0, 3, 1, 2), v)


def additive_attention(q, k, v, w):
    x = jnp.einsum("bqkhd,d->bhqk", jnp.tanh(q[:, :, None] + k[:, None]), w)
    return attend(x, v)


def graph_attention(x, w, a, b, edges):
    h = x @ w
    e = jax.nn.leaky_relu((h @ a)[:, :, None] + (h @ b)[:, None, :], 0.2)
    return jax.nn.softmax(jnp.where(edges, e, -1e9)) @ h


def synthesised_scores(x, w1, w2, v):
    return jax.nn.softmax(jax.nn.relu(x @ w1) @ w2) @ v


def learned_scores_of_positions(w, v):
    return jnp.einsum("ts,bsd->btd", jax.nn.softmax(jnp.where(TRI > 0, w, -1e30)), v)


def attention_free(q, k, v, w):
    weights = jnp.exp(w)
    top, bottom = (
        jnp.einsum("ts,bsd->btd", weights, jnp.exp(k) * v),
        jnp.einsum("ts,bsd->btd", weights, jnp.exp(k)),
    )
    return jax.nn.sigmoid(q) * top / bottom


def running_average_of_exponentials(k, v):
    e = jnp.exp(k)
    return jnp.cumsum(e * v, axis=1) / jnp.cumsum(e, axis=1)


def dynamic_convolution(x, w):
    taps = jax.nn.softmax(x @ w, axis=-1)
    windows = jnp.stack([jnp.roll(x, i, axis=1) for i in range(3)], axis=2)
    return jnp.einsum("btw,btwd->btd", taps, windows)


# ---------------------------------------------------------------- other uses of a softmax


def router_of_experts(x, router, experts):
    w = jax.nn.softmax(x @ router)
    return jnp.einsum("bte,betd->btd", w, jnp.einsum("btd,edf->betf", x, experts))


def router_of_the_best_experts(x, router, experts):
    top, at = lax.top_k(x @ router, 2)
    chosen = experts[at]
    return jnp.einsum("btk,btkf->btf", jax.nn.softmax(top), jnp.einsum("btd,btkdf->btkf", x, chosen))


def soft_mixture_of_slots(x, slots, experts):
    logits = jnp.einsum("btd,sd->bts", x, slots)
    inside = jnp.einsum("bts,btd->bsd", jax.nn.softmax(logits, axis=1), x)
    return jnp.einsum(
        "bts,bsd->btd", jax.nn.softmax(logits, axis=2), jnp.einsum("bsd,sde->bse", inside, experts)
    )


def mixture_of_softmaxes(x, priors, heads, table):
    p = jax.nn.softmax(x @ priors)
    each = jax.nn.softmax(jnp.einsum("btd,hde->bthe", x, heads) @ table.T)
    return jnp.log(jnp.einsum("bth,bthv->btv", p, each))


def contrastive_loss(a, b):
    logits = a @ b.T / 0.07
    return -(jnp.diag(jax.nn.log_softmax(logits)) + jnp.diag(jax.nn.log_softmax(logits, axis=0))).mean()


def pointer_loss(q, k, at):
    p = jax.nn.log_softmax(jnp.einsum("bd,bsd->bs", q, k))
    return -jnp.take_along_axis(p, at[:, None], axis=1).mean()


def distillation_of_attention(q, k, q2, k2):
    p, r = jax.nn.softmax(scores(q, k)), jax.nn.log_softmax(scores(q2, k2))
    return -jnp.einsum("bhqk,bhqk->", p, r)


def gradient_of_a_softmax_by_hand(q, k, g):
    w = jax.nn.softmax(scores(q, k))
    dw = jnp.einsum("bqhd,bkhd->bhqk", g, k)
    return jnp.einsum("bhqk,bkhd->bqhd", w * (dw - (w * dw).sum(-1, keepdims=True)), k)


def expected_label(x, w):
    return jax.nn.softmax(x @ w) @ jnp.arange(6.0)


def pooling_by_a_gate(x, w):
    gate = jax.nn.softmax(jax.nn.gelu(x @ w), axis=1)
    return (gate * x).sum(1)


def sinkhorn(q, k, v):
    w = jnp.exp(scores(q, k))
    for axis in (2, 3, 2):
        w = w / w.sum(axis, keepdims=True)
    return mix(w, v)


def capsules_that_vote(votes):
    logits = jnp.zeros(votes.shape[:3])
    for _ in range(2):
        out = jnp.einsum("bio,biod->bod", jax.nn.softmax(logits, axis=2), votes)
        logits = logits + jnp.einsum("bod,biod->bio", out, votes)
    return out


def softmax_over_edges(q, k, v, source, target):
    x = jnp.exp((q[target] * k[source]).sum(-1))
    total = jax.ops.segment_sum(x, target, 5)
    return jax.ops.segment_sum((x / total[target])[:, None] * v[source], target, 5)


X = rand(1, 2, T, 8)
SQUARE = rand(2, 8, 8)
EDGES = np.array([0, 1, 2, 3, 4, 0, 2])

LOOKALIKES = by_name(
    LookAlike(sigmoid_weights, qkv()),
    LookAlike(rectified_weights, qkv()),
    LookAlike(rectified_squares, qkv()),
    LookAlike(rectified_weights_that_sum_to_one, qkv()),
    LookAlike(squares_that_sum_to_one, qkv()),
    LookAlike(softplus_that_sums_to_one, qkv()),
    LookAlike(exponentials_less_one, qkv()),
    LookAlike(linear_attention, qkv()),
    LookAlike(linear_attention_with_exponential_features, qkv()),
    LookAlike(efficient_attention, qkv()),
    LookAlike(random_features, (*qkv(), rand(4, 8, 6))),
    LookAlike(decay_without_normalisation, qkv()),
    LookAlike(decay_of_data_without_normalisation, (*qkv(), rand(4, 2, T, 4))),
    LookAlike(product_of_scores_and_values, qkv()),
    LookAlike(normal_weights_and_a_constant, qkv()),
    LookAlike(weights_and_the_identity, qkv()),
    LookAlike(one_less_the_weights, qkv()),
    LookAlike(weights_squared, qkv()),
    LookAlike(weights_rounded, qkv()),
    LookAlike(weights_stretched_and_clipped, qkv()),
    LookAlike(weights_without_a_gradient, qkv()),
    LookAlike(stick_breaking, qkv()),
    LookAlike(scores_squared, qkv()),
    LookAlike(scores_without_sign, qkv()),
    LookAlike(scores_rectified, qkv()),
    LookAlike(scores_clipped, qkv()),
    LookAlike(scores_rounded, qkv()),
    LookAlike(scores_times_scores, qkv()),
    LookAlike(scores_capped_by_another_function, qkv()),
    LookAlike(scores_normalised_over_keys, qkv()),
    LookAlike(scores_summed_along_keys, qkv()),
    LookAlike(scores_smoothed_by_their_neighbours, qkv()),
    LookAlike(scores_of_distances, qkv()),
    LookAlike(additive_attention, (*qkv(), rand(4, 8))),
    LookAlike(graph_attention, (X, SQUARE, rand(3, 8), rand(4, 8), np.eye(T) + TRI > 0)),
    LookAlike(synthesised_scores, (X, SQUARE, rand(3, 8, T), rand(4, 2, T, 8))),
    LookAlike(learned_scores_of_positions, (rand(1, T, T), X)),
    LookAlike(attention_free, (X, X + 1, X - 1, rand(4, T, T))),
    LookAlike(running_average_of_exponentials, (X, X + 1)),
    LookAlike(dynamic_convolution, (X, rand(4, 8, 3))),
    LookAlike(router_of_experts, (X, rand(2, 8, 3), rand(3, 3, 8, 8))),
    LookAlike(router_of_the_best_experts, (X, rand(2, 8, 3), rand(3, 3, 8, 8))),
    LookAlike(soft_mixture_of_slots, (X, rand(2, 3, 8), rand(3, 3, 8, 8))),
    LookAlike(mixture_of_softmaxes, (X, rand(2, 8, 3), rand(3, 3, 8, 8), rand(4, 9, 8))),
    LookAlike(contrastive_loss, (rand(1, 5, 8), rand(2, 5, 8))),
    LookAlike(pointer_loss, (rand(1, 2, 8), X, np.array([1, 4]))),
    LookAlike(distillation_of_attention, (*qkv()[:2], *qkv()[1:])),
    LookAlike(gradient_of_a_softmax_by_hand, qkv()),
    LookAlike(expected_label, (X, rand(2, 8, 6))),
    LookAlike(pooling_by_a_gate, (X, SQUARE)),
    LookAlike(sinkhorn, qkv()),
    LookAlike(capsules_that_vote, (rand(1, 2, 3, 4, 8),)),
    LookAlike(softmax_over_edges, (*(rand(i, 5, 8) for i in range(3)), EDGES, EDGES[::-1].copy())),
)
