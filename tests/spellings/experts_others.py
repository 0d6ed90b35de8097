"""What looks like experts: heads, ensembles, adapters, layers; and routers whose experts are elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings import LookAlike
from tests.spellings.experts_ways import FLAT, OTHER, WHOLE, B, D, F, L, T, W, X, array, top


def heads(w, x):
    """Projections head by head, and attention."""
    q, k, v = (jnp.einsum("bld,hdk->bhlk", x, w[n]) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k))
    return jnp.einsum("bhlk,hkd->bld", jnp.einsum("bhts,bhsk->bhtk", weights, v), w["o"])


def heads_with_segments(w, x, segments):
    q, k, v = (jnp.einsum("bld,hdk->bhlk", x, w[n]) for n in "qkv")
    seen = segments[:, None, :, None] == segments[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, jnp.einsum("bhtk,bhsk->bhts", q, k), -1e9))
    return jnp.einsum("bhlk,hkd->bld", jnp.einsum("bhts,bhsk->bhtk", weights, v), w["o"])


def heads_with_learned_relative_bias(w, table, x, buckets):
    q, k, v = (jnp.einsum("bld,hdk->bhlk", x, w[n]) for n in "qkv")
    logits = jnp.einsum("bhtk,bhsk->bhts", q, k) + jnp.transpose(table[buckets], (2, 0, 1))
    return jnp.einsum("bhlk,hkd->bld", jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(logits), v), w["o"])


def banks_of_low_rank_adapters(w, x):
    """All adapters, added up."""
    return x + jnp.einsum("xtf,xfd->td", jnp.einsum("td,xdf->xtf", x, w["up"]), w["down"]) / X


def ensemble(w, x):
    return jax.vmap(lambda up, down: jnp.tanh(x @ up) @ down)(w["up"], w["down"]).mean(0)


def ensemble_and_its_vote(w, x):
    """Each model's class, and how many models chose it: the product with the tokens is not sent anywhere."""
    logits = jax.vmap(lambda up: x @ up)(w["up"])
    return jax.nn.one_hot(jnp.argmax(logits, -1), F).sum(0)


def soft_mixture(w, x):
    gates = jax.nn.softmax(x @ w["router"])
    made = jnp.einsum("txf,xfd->txd", jnp.tanh(jnp.einsum("td,xdf->txf", x, w["up"])), w["down"])
    return jnp.einsum("txd,tx->td", made, gates)


def mixture_of_softmaxes(w, x):
    parts = jax.nn.softmax(jnp.einsum("td,xdf->txf", x, w["up"]), -1)
    return jnp.einsum("txf,tx->tf", parts, jax.nn.softmax(x @ w["router"]))


def block_diagonal(w, x):
    return jnp.einsum("txd,xdf->txf", x, w["up"]).reshape(T, X * F)


def grouped_convolution(kernel, x):
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", feature_group_count=2, dimension_numbers=("NHC", "HIO", "NHC")
    )


def parts_of_the_sequence(w, x):
    """By position: rows 0 to 2 to the first, and so on."""
    x = x.reshape(X, 3, D)
    return jnp.einsum("xcf,xfd->xcd", jnp.tanh(jnp.einsum("xcd,xdf->xcf", x, w["up"])), w["down"]).reshape(
        -1, D
    )


def parts_of_the_sequence_by_slices(w, x):
    parts = [jnp.tanh(x[3 * e : 3 * e + 3] @ w["up"][e]) @ w["down"][e] for e in range(X)]
    return jnp.concatenate(parts)


def loop_over_layers(w, x):
    for e in range(X):
        x = x + jnp.tanh(x @ w["up"][e]) @ w["down"][e]
    return x


def scan_over_layers(w, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, (w["up"], w["down"]))[0]


def classes_of_a_head(w, x):
    logits = x @ w["router"]
    return jnp.argmax(logits, -1), jax.nn.one_hot(jnp.argmax(logits, -1), X) * logits


def router_alone(w, x):
    gates, chosen = top(w, x)
    mask = jax.nn.one_hot(chosen, X).sum(1)
    return gates, X * jnp.sum(mask.mean(0) * jax.nn.softmax(x @ w["router"]).mean(0))


def embeddings_looked_up(table, w, tokens):
    return jnp.einsum("bld,xdf->blxf", table[tokens], w["up"])


def sampled_token(w, x):
    """The likeliest class's row, and a product with it."""
    chosen = jnp.argmax(x @ w["router"], -1)
    return w["router"].T[chosen] * x


def gates_of_all_by_sigmoid(w, x):
    gates = jax.nn.sigmoid(x @ w["router"])
    return jnp.einsum("txf,tx->tf", jnp.einsum("td,xdf->txf", x, w["up"]), gates)


def layers_after_a_choice(w, v, x):
    """One expert is added as its row, and all models of an ensemble follow."""
    chosen = jnp.argmax(x @ w["router"], -1)
    x = x + w["router"].T[chosen]
    return jax.vmap(lambda up: x @ up)(v["up"])


def best_of_several_models(w, x):
    """The whole batch's best model, by its loss."""
    made = jax.vmap(lambda up, down: jnp.tanh(x @ up) @ down)(w["up"], w["down"])
    return made.mean(0), jnp.argmin((made**2).mean((1, 2)))


def loop_over_models_with_one_mask(w, x, lengths):
    """A padding mask meets all of the products alike."""
    seen = (jnp.arange(T) < lengths[0])[:, None]
    return sum(jnp.where(seen, x @ w["up"][e], 0) for e in range(X))


def noised_heads(w, x):
    """The largest of a head's features, kept: a choice along features."""
    h = jnp.einsum("bld,hdk->blhk", x, w["q"])
    return jnp.where(h >= h.max(-1, keepdims=True), h, 0)


_HEADS = {"q": array(3, D, 5), "k": array(3, D, 5), "v": array(3, D, 5), "o": array(3, 5, D)}

LOOKALIKES: dict[str, LookAlike] = {
    "heads_and_attention": LookAlike(heads, (_HEADS, WHOLE[1])),
    "heads_with_segments": LookAlike(
        heads_with_segments, (_HEADS, WHOLE[1], jnp.asarray([[0, 0, 1, 1, 1]] * 2))
    ),
    "heads_with_learned_relative_bias": LookAlike(
        heads_with_learned_relative_bias,
        (_HEADS, array(9, 3), WHOLE[1], jnp.asarray(np.arange(5)[:, None] - np.arange(5) + 4)),
    ),
    "banks_of_low_rank_adapters": LookAlike(banks_of_low_rank_adapters, FLAT),
    "ensemble_of_networks": LookAlike(ensemble, FLAT),
    "ensemble_and_its_vote": LookAlike(ensemble_and_its_vote, FLAT),
    "mixture_by_a_softmax": LookAlike(soft_mixture, FLAT, "nothing is chosen"),
    "softmaxes_of_experts": LookAlike(mixture_of_softmaxes, FLAT),
    "blocks_side_by_side": LookAlike(block_diagonal, (W, array(T, X, D))),
    "convolution_in_groups": LookAlike(grouped_convolution, (array(3, 3, 8), array(B, L, 6))),
    "parts_of_the_sequence": LookAlike(parts_of_the_sequence, (W, array(12, D))),
    "parts_of_the_sequence_by_slices": LookAlike(parts_of_the_sequence_by_slices, (W, array(12, D))),
    "loop_over_layers": LookAlike(loop_over_layers, FLAT),
    "scan_over_layers": LookAlike(scan_over_layers, FLAT),
    "classes_of_a_head": LookAlike(classes_of_a_head, FLAT),
    "router_alone": LookAlike(router_alone, FLAT),
    "embeddings_looked_up": LookAlike(
        embeddings_looked_up, (array(11, D), W, jnp.asarray([[1, 5, 3], [0, 2, 7]]))
    ),
    "sampled_token": LookAlike(sampled_token, FLAT),
    "gates_of_all_by_sigmoid": LookAlike(gates_of_all_by_sigmoid, FLAT),
    "layers_after_a_choice": LookAlike(layers_after_a_choice, (W, OTHER, FLAT[1])),
    "best_of_several_models": LookAlike(best_of_several_models, FLAT),
    "loop_over_models_with_one_mask": LookAlike(loop_over_models_with_one_mask, (*FLAT, jnp.asarray([7, 4]))),
    "noised_heads": LookAlike(noised_heads, (_HEADS, WHOLE[1])),
}
