"""Mixtures of experts as public models have them, and what else a choice decides over."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from tests.spellings import LookAlike, Spelling

T, D, F, E, K = 12, 6, 8, 4, 2


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


X, XB = shape(T, D), shape(2, T, D)
ROUTER, UP, DOWN = shape(D, E), shape(E, D, F), shape(E, F, D)


def top(x, router):
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router), K)
    return weights / weights.sum(-1, keepdims=True), chosen


def deepseek_groups(x, router, bias, gate, up, down):
    """Scores by sigmoid; groups of experts are chosen, then experts, by scores with a bias."""
    rows = x.reshape(-1, D)
    scores = jax.nn.sigmoid(rows @ router)
    biased = (scores + bias).reshape(-1, 2, E // 2)
    _, groups = lax.top_k(lax.top_k(biased, 2)[0].sum(-1), 1)
    kept = jax.nn.one_hot(groups, 2).sum(1)[..., None] > 0
    _, chosen = lax.top_k(jnp.where(kept, biased, -jnp.inf).reshape(-1, E), K)
    weights = jnp.take_along_axis(scores, chosen, 1)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=E)
    sent = rows[order // K]
    h = jax.nn.silu(lax.ragged_dot(sent, gate, sizes)) * lax.ragged_dot(sent, up, sizes)
    y = jnp.zeros((len(order), D)).at[order].set(lax.ragged_dot(h, down, sizes))
    return jnp.einsum("tkd,tk->td", y.reshape(-1, K, D), weights).reshape(x.shape)


def llama4(x, router, up, down):
    """Tokens are scaled on their way in; where an expert is not chosen, by zero."""
    rows = x.reshape(-1, D)
    logits = rows @ router
    values, chosen = lax.top_k(logits, 1)
    kept = jnp.full_like(logits, -jnp.inf).at[jnp.arange(len(rows))[:, None], chosen].set(values)
    sent = rows[None] * jax.nn.sigmoid(kept).T[:, :, None]
    h = jax.nn.silu(jnp.einsum("etd,edf->etf", sent, up))
    return jnp.einsum("etf,efd->etd", h, down).sum(0).reshape(x.shape)


def gpt_oss(x, router, up, up_bias, down, down_bias):
    """Weights and biases of the best are looked up; gate and up projections interleaved."""
    values, chosen = lax.top_k(x @ router, K)
    h = jnp.einsum("td,tkdf->tkf", x, up[chosen]) + up_bias[chosen]
    h = h[..., ::2] * jax.nn.sigmoid(1.702 * h[..., ::2]) * (h[..., 1::2] + 1)
    y = jnp.einsum("tkf,tkfd->tkd", h, down[chosen]) + down_bias[chosen]
    return jnp.einsum("tkd,tk->td", y, jax.nn.softmax(values))


def hash_layer(x, table, tokens, up, down):
    """A table says which expert a word goes to."""
    h = jax.nn.relu(jnp.einsum("td,edf->tef", x, up))
    return jnp.einsum("tef,efd,te->td", h, down, jax.nn.one_hot(table[tokens], E))


def scan_over_tokens(x, router, up, down):
    def turn(_, row):
        e = jnp.argmax(row @ router)
        return None, jax.nn.relu(row @ up[e]) @ down[e]

    return lax.scan(turn, None, x)[1]


def experts_choose_by_products(x, router, up, down):
    """As GLaM: each expert takes its best tokens, by a permutation of zeros and ones."""
    gates, tokens = lax.top_k(jnp.swapaxes(jax.nn.softmax(jnp.einsum("gsm,me->gse", x, router)), 1, 2), 3)
    taken = jax.nn.one_hot(tokens, T)
    sent = jnp.einsum("gecs,gsm->gecm", taken, x)
    h = jax.nn.gelu(jnp.einsum("gecm,emf->gecf", sent, up))
    return jnp.einsum("gecs,gec,gecm->gsm", taken, gates, jnp.einsum("gecf,efm->gecm", h, down))


def vision(x, router, up, down):
    """As V-MoE: groups by vmap, experts by vmap, the first choices of all tokens before the second ones."""

    def group(rows):
        weights, chosen = top(rows, router)
        hot = jax.nn.one_hot(chosen, E, dtype=jnp.int32)
        place = jnp.cumsum(hot.transpose(1, 0, 2).reshape(-1, E), 0).reshape(K, T, E).transpose(1, 0, 2)
        places = jax.nn.one_hot(place * hot - 1, 5)
        sent = jnp.einsum("tkec,td->ecd", places, rows)
        made = jax.vmap(lambda u, d, r: jax.nn.gelu(r @ u) @ d)(up, down, sent)
        return jnp.einsum("tk,tkec,ecd->td", weights, places, made)

    return jax.vmap(group)(x)


def experts_in_rows_and_columns(x, router, up, down):
    mask = jax.nn.one_hot(jnp.argmax(x @ router, -1), E).reshape(T, 2, 2)
    h = jax.nn.relu(jnp.einsum("td,abdf->tabf", x, up))
    return jnp.einsum("tabf,abfd,tab->td", h, down, mask)


def experts_side_by_side(x, router, up, down):
    """One matrix of all experts' columns, of which a token keeps its own."""
    mask = jax.nn.one_hot(jnp.argmax(x @ router, -1), E)
    h = jax.nn.relu(x @ up).reshape(T, E, F) * mask[..., None]
    return h.reshape(T, E * F) @ down


def blocks_of_sorted_tokens(x, router, up, down):
    """As MegaBlocks: sorted, padded to blocks of one expert, which looks its weights up."""
    chosen, size = jnp.argmax(x @ router, -1), 2
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=E)
    padded = (sizes + size - 1) // size * size
    starts, own = jnp.cumsum(padded) - padded, jnp.cumsum(sizes) - sizes
    place = starts[chosen[order]] + jnp.arange(T) - own[chosen[order]]
    rows = T + E * size
    sent = jnp.zeros((rows, D)).at[place].set(x[order]).reshape(-1, size, D)
    of = jnp.searchsorted(jnp.cumsum(padded), jnp.arange(0, rows, size), side="right").clip(0, E - 1)
    made = lax.map(lambda a: jax.nn.relu(a[0] @ up[a[1]]) @ down[a[1]], (sent, of)).reshape(rows, D)
    return jnp.zeros_like(x).at[order].set(made[place])


def nested_selections(x, router, up, down):
    chosen = jnp.argmax(x @ router, -1)[:, None]
    a, b, c, d = (jax.nn.relu(x @ up[e]) @ down[e] for e in range(E))
    return jnp.where(chosen == 0, a, jnp.where(chosen == 1, b, jnp.where(chosen == 2, c, d)))


def one_selection(x, router, up, down):
    chosen = jnp.broadcast_to(jnp.argmax(x @ router, -1)[:, None], (T, D)).astype(jnp.int32)
    return lax.select_n(chosen, *(jax.nn.relu(x @ up[e]) @ down[e] for e in range(E)))


def outer_product_with_a_mask(x, router, up, down):
    logits = x @ router
    mask = (logits == logits.max(-1, keepdims=True)).astype(x.dtype)
    h = jax.nn.relu(jnp.einsum("tx,td,xdf->txf", mask, x, up))
    return jnp.einsum("txf,xfd->td", h, down)


def counted_with_rows_that_are_found(x, router, up, down):
    chosen = jnp.argmax(x @ router, -1)

    def turn(e, y):
        rows = jnp.nonzero(chosen == e, size=T, fill_value=T)[0]
        mine = x.at[rows].get(mode="fill", fill_value=0)
        return y.at[rows].add(jax.nn.relu(mine @ up[e]) @ down[e], mode="drop")

    return lax.fori_loop(0, E, turn, jnp.zeros_like(x))


def while_a_counter_is_less(x, router, up, down):
    chosen = jnp.argmax(x @ router, -1)

    def turn(c):
        e, y = c
        return e + 1, y + jnp.where((chosen == e)[:, None], jax.nn.relu(x @ up[e]) @ down[e], 0)

    return lax.while_loop(lambda c: c[0] < E, turn, (0, jnp.zeros_like(x)))[1]


def head_of_its_domain(x, domains, heads):
    every = jnp.einsum("td,edf->tef", x, heads)
    return jnp.take_along_axis(every, domains[:, None, None], 1)[:, 0]


class Listed(nnx.Module):
    """A list of layers, each added where it is chosen."""

    def __init__(self, rngs):
        self.router = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        self.experts = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(E)])

    def __call__(self, x):
        weights, chosen = lax.top_k(jax.nn.softmax(self.router(x)), K)
        y = jnp.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y += expert(x) * jnp.sum(jnp.where(chosen == e, weights, 0), -1, keepdims=True)
        return y


class Stacked(nn.Module):
    """What all experts give is stacked, and a token's taken out."""

    @nn.compact
    def __call__(self, x):
        weights, chosen = lax.top_k(nn.softmax(nn.Dense(E)(x)), K)
        every = jnp.stack([nn.Dense(D)(nn.relu(nn.Dense(F)(x))) for _ in range(E)], 1)
        return (jnp.take_along_axis(every, chosen[..., None], 1) * weights[..., None]).sum(1)


_GRAPH, _STATE = nnx.split(nnx.eval_shape(lambda: Listed(nnx.Rngs(0))))
_PARAMS = jax.eval_shape(Stacked().init, jax.random.key(0), X)
_PLAIN = (X, ROUTER, UP, DOWN)
_IDS = shape(T, dtype=jnp.int32)


def _case(fn, args, style, products=2, experts=E):
    return Spelling(fn, args, {"style": style, "experts": experts, "products": products})


SPELLINGS = {
    "deepseek_groups": _case(deepseek_groups, (XB, ROUTER, shape(E), UP, UP, DOWN), "ragged_dot", 3),
    "llama4": _case(llama4, (XB, ROUTER, UP, DOWN), "all"),
    "gpt_oss": _case(
        gpt_oss, (X, ROUTER, shape(E, D, 2 * F), shape(E, 2 * F), DOWN, shape(E, D)), "gathered"
    ),
    "hash_layer": _case(hash_layer, (X, shape(99, dtype=jnp.int32), _IDS, UP, DOWN), "all"),
    "scan_over_tokens": _case(scan_over_tokens, _PLAIN, "gathered"),
    "experts_choose_by_products": _case(experts_choose_by_products, (XB, ROUTER, UP, DOWN), "one_hot"),
    "vision": _case(vision, (XB, ROUTER, UP, DOWN), "one_hot"),
    "experts_in_rows_and_columns": _case(
        experts_in_rows_and_columns, (X, ROUTER, shape(2, 2, D, F), shape(2, 2, F, D)), "all"
    ),
    "experts_side_by_side": _case(experts_side_by_side, (X, ROUTER, shape(D, E * F), shape(E * F, D)), "all"),
    "blocks_of_sorted_tokens": _case(blocks_of_sorted_tokens, _PLAIN, "gathered"),
    "nested_selections": _case(nested_selections, _PLAIN, "loop"),
    "one_selection": _case(one_selection, _PLAIN, "loop"),
    "outer_product_with_a_mask": _case(outer_product_with_a_mask, _PLAIN, "all"),
    "counted_with_rows_that_are_found": _case(counted_with_rows_that_are_found, _PLAIN, "loop"),
    "while_a_counter_is_less": _case(while_a_counter_is_less, _PLAIN, "loop"),
    "head_of_its_domain": _case(head_of_its_domain, (X, _IDS, UP), "all", 1),
    "one_token": _case(
        gpt_oss, (shape(1, D), ROUTER, shape(E, D, 2 * F), shape(E, 2 * F), DOWN, shape(E, D)), "gathered"
    ),
    "listed_in_nnx": _case(lambda state, x: nnx.merge(_GRAPH, state)(x), (_STATE, X), "loop", 1),
    "stacked_in_linen": _case(Stacked().apply, (_PARAMS, X), "loop"),
}


# ---------------------------------------------------------------- look-alikes


def _heads(x, q, k, v):
    return (jnp.einsum("btd,dhk->bthk", x, w) for w in (q, k, v))


def decode(x, keys, values, query, out, length):
    """The mask of a cache tells keys apart, not heads."""
    q = jnp.einsum("btd,dhk->bthk", x, query)
    logits = jnp.where(jnp.arange(9) <= length, jnp.einsum("bthk,bshk->bhts", q, keys), -1e9)
    return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(logits), values, out)


def packed(x, query, key, value, out, segments):
    q, k, v = _heads(x, query, key, value)
    same = (segments[:, :, None] == segments[:, None])[:, None]
    p = jnp.where(same, jax.nn.softmax(jnp.where(same, jnp.einsum("bthk,bshk->bhts", q, k), -1e9)), 0)
    return jnp.einsum("bhts,bshk,hkd->btd", p, v, out)


def hard_attention(x, query, key, value, out):
    """Each head takes one key for a query: a choice of tokens after the product, summed over."""
    q, k, v = _heads(x, query, key, value)
    best = jnp.argmax(jnp.einsum("bthk,bshk->bhts", q, k), -1)
    return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.one_hot(best, T), v, out)


def keys_that_are_chosen(q, k, v):
    """The best keys are looked up: vectors, no matrices."""
    _, best = lax.top_k(jnp.einsum("bhd,bhsd->bhs", q, k), 4)
    k, v = (jnp.take_along_axis(a, best[..., None], 2) for a in (k, v))
    return jnp.einsum("bhs,bhsd->bhd", jax.nn.softmax(jnp.einsum("bhd,bhsd->bhs", q, k)), v)


def blocks_of_keys_that_are_chosen(q, k, v):
    _, best = lax.top_k(jnp.einsum("btd,bnd->btn", q, k.mean(2)), 2)
    k, v = (jax.vmap(lambda a, i: a[i])(a, best) for a in (k, v))
    p = jax.nn.softmax(jnp.einsum("btd,btncd->btnc", q, k), (-2, -1))
    return jnp.einsum("btnc,btncd->btd", p, v)


def largest_of_several(x, up):
    """Maxout, by argmax: a choice for each feature."""
    h = jnp.einsum("td,edf->tef", x, up)
    return jnp.take_along_axis(h, jnp.argmax(h, 1)[:, None], 1)[:, 0]


def classes_of_several_tasks(x, heads, labels):
    """A label along classes, the same task by task."""
    logits = jax.nn.log_softmax(jnp.einsum("td,edc->tec", x, heads))
    return -jnp.take_along_axis(logits, jnp.broadcast_to(labels[:, None, None], (T, E, 1)), -1).mean()


def layers_that_are_skipped(x, router, up, down):
    """Tokens skip layers, one after the other."""
    gates = (x @ router) > 0
    for e in range(E):
        x = x + jnp.where(gates[:, e, None], jax.nn.relu(x @ up[e]) @ down[e], 0)
    return x


def largest_features(x, up, down):
    h = jnp.einsum("td,edf->tef", x, up)
    return jnp.einsum("tef,efd->td", jnp.where(h >= lax.top_k(h, 3)[0][..., -1:], h, 0), down)


def chosen_only_to_be_counted(x, router, up, down):
    """All experts by softmax; what would have been chosen is only counted."""
    p = jax.nn.softmax(x @ router)
    share = jax.nn.one_hot(lax.top_k(p, K)[1], E).mean((0, 1))
    h = jax.nn.relu(jnp.einsum("td,edf->tef", x, up))
    return jnp.einsum("tef,efd,te->td", h, down, p), share


def groups_of_a_router(x, router):
    """Groups of experts are chosen and mask the others' scores: there are no experts here."""
    scores = jnp.einsum("td,dge->tge", x, router)
    _, best = lax.top_k(scores.max(-1), 1)
    return lax.top_k((scores * jax.nn.one_hot(best, 2).sum(1)[..., None]).reshape(T, E), K)


def tokens_that_take_the_layer(x, router, up, down):
    """Mixture of depths: some tokens take the one layer."""
    _, best = lax.top_k((x @ router)[..., 0], 5)
    made = jax.nn.relu(jnp.take_along_axis(x, best[..., None], 1) @ up) @ down
    return jax.vmap(lambda a, i, u: a.at[i].add(u))(x, best, made)


def pruned_heads(x, query, out, kept):
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("btd,dhk->bthk", x, query) * kept[:, None], out)


def one_for_the_whole_batch(x, up, logits):
    """An architecture is searched: data choose, but for all tokens alike."""
    return jnp.einsum("td,edf,e->tf", x, up, jax.nn.one_hot(jnp.argmax(logits), E))


def left_early(x, up, down, lengths):
    """Layers run until a sequence's own depth."""

    def layer(x, each):
        n, u, d = each
        return jnp.where((n < lengths)[:, None, None], x + jnp.tanh(x @ u) @ d, x), None

    return lax.scan(layer, x, (jnp.arange(E), up, down))[0]


def relations_of_a_graph(x, edges, weights):
    return jax.nn.relu(jnp.einsum("ets,sd,edf->tf", edges, x, weights))


_HEAD = shape(D, 3, 4)
_OUT = shape(3, 4, D)
_CACHE = shape(2, 9, 3, 4)
_INT = shape(dtype=jnp.int32)

LOOKALIKES = {
    "decode": LookAlike(decode, (shape(2, 1, D), _CACHE, _CACHE, _HEAD, _OUT, _INT)),
    "packed": LookAlike(packed, (XB, _HEAD, _HEAD, _HEAD, _OUT, shape(2, T, dtype=jnp.int32))),
    "hard_attention": LookAlike(hard_attention, (XB, _HEAD, _HEAD, _HEAD, _OUT)),
    "keys_that_are_chosen": LookAlike(
        keys_that_are_chosen, (shape(2, 3, D), shape(2, 3, 9, D), shape(2, 3, 9, D))
    ),
    "blocks_of_keys_that_are_chosen": LookAlike(
        blocks_of_keys_that_are_chosen, (XB, shape(2, 9, 2, D), shape(2, 9, 2, D))
    ),
    "largest_of_several": LookAlike(largest_of_several, (X, UP)),
    "classes_of_several_tasks": LookAlike(classes_of_several_tasks, (X, UP, _IDS)),
    "layers_that_are_skipped": LookAlike(layers_that_are_skipped, _PLAIN),
    "largest_features": LookAlike(largest_features, (X, UP, DOWN)),
    "chosen_only_to_be_counted": LookAlike(chosen_only_to_be_counted, _PLAIN, "nothing is chosen"),
    "groups_of_a_router": LookAlike(groups_of_a_router, (X, shape(D, 2, E // 2))),
    "tokens_that_take_the_layer": LookAlike(
        tokens_that_take_the_layer, (XB, ROUTER, shape(D, F), shape(F, D))
    ),
    "pruned_heads": LookAlike(pruned_heads, (XB, _HEAD, _OUT, shape(3, dtype=jnp.bool_))),
    "one_for_the_whole_batch": LookAlike(one_for_the_whole_batch, (X, UP, shape(E))),
    "left_early": LookAlike(left_early, (XB, UP, DOWN, shape(2, dtype=jnp.int32))),
    "relations_of_a_graph": LookAlike(relations_of_a_graph, (X, shape(E, T, T), UP)),
}
