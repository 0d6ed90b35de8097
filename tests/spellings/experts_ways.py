"""More mixtures of experts, as they are written: ragged, by places, all of them, looked up, and in loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings import Spelling

B, L, T, D, F, X, K, C = 2, 5, 10, 6, 7, 4, 2, 3
_random = np.random.RandomState(0)


def array(*sizes: int) -> Any:
    return jnp.asarray(_random.standard_normal(sizes), jnp.float32)


W = {"router": array(D, X), "gate": array(X, D, F), "up": array(X, D, F), "down": array(X, F, D)}
FLAT = (W, array(T, D))
WHOLE = (W, array(B, L, D))


def top(w: Any, x: Any, k: int = K) -> Any:
    """Weights [t, k] and numbers [t, k] of the experts of each token."""
    scores = jax.nn.softmax(x @ w["router"], axis=-1)
    gates, chosen = jax.lax.top_k(scores, k)
    return gates / gates.sum(-1, keepdims=True), chosen


# ---------------------------------------------------------------- ragged dots


def ragged(w, x):
    gates, chosen = top(w, x)
    order = jnp.argsort(chosen.reshape(-1))
    rows = x[order // K]
    sizes = jnp.bincount(chosen.reshape(-1), length=X).astype(jnp.int32)
    h = jax.nn.silu(jax.lax.ragged_dot(rows, w["gate"], sizes)) * jax.lax.ragged_dot(rows, w["up"], sizes)
    out = jax.lax.ragged_dot(h, w["down"], sizes)
    out = jnp.zeros((T * K, D)).at[order].set(out).reshape(T, K, D)
    return (out * gates[..., None]).sum(1)


def ragged_with_one_expert_a_token(w, x):
    x = x.reshape(-1, D)
    scores = jax.nn.softmax(x @ w["router"])
    chosen = jnp.argmax(scores, -1)
    order = jnp.argsort(chosen)
    sizes = jnp.sum(chosen[:, None] == jnp.arange(X), 0, dtype=jnp.int32)
    made = jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x[order], w["up"], sizes)), w["down"], sizes)
    return (made[jnp.argsort(order)] * scores.max(-1, keepdims=True)).reshape(B, L, D)


def ragged_by_take_and_segment_sum(w, x):
    gates, chosen = top(w, x)
    flat = chosen.ravel()
    order = jnp.argsort(flat, stable=True)
    token = jnp.take(jnp.repeat(jnp.arange(T), K), order)
    sizes = jax.ops.segment_sum(jnp.ones_like(flat), flat, num_segments=X)
    h = jax.nn.gelu(jax.lax.ragged_dot(jnp.take(x, token, axis=0), w["up"], sizes))
    out = jax.lax.ragged_dot(h, w["down"], sizes) * jnp.take(gates.ravel(), order)[:, None]
    return jax.ops.segment_sum(out, token, num_segments=T)


def ragged_in_bfloat16_with_searched_sizes(w, x):
    _, chosen = top(w, x, 1)
    key, order = jax.lax.sort((chosen[:, 0], jnp.arange(T)), num_keys=1)
    ends = jnp.searchsorted(key, jnp.arange(X), side="right")
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    up = w["up"].astype(jnp.bfloat16)
    return jax.lax.ragged_dot(x[order].astype(jnp.bfloat16), up, sizes, preferred_element_type=jnp.float32)


def ragged_with_sizes_that_are_given(w, x, sizes):
    return jax.lax.ragged_dot(x, w["up"], sizes)


# ---------------------------------------------------------------- places for each expert


def switch_transformer(w, x):
    """By one-hot products, with room for C tokens an expert (Fedus et al. 2021)."""
    scores = jax.nn.softmax(x @ w["router"])
    chosen = jax.nn.one_hot(jnp.argmax(scores, -1), X)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    mask = jax.nn.one_hot(place.astype(jnp.int32), C) * chosen[..., None]
    taken = jnp.einsum("ble,blxc->bxce", x, mask)
    h = jnp.tanh(jnp.einsum("bxcm,xmf->bxcf", taken, w["up"]))
    made = jnp.einsum("bxcf,xfm->bxcm", h, w["down"])
    return jnp.einsum("bxce,blxc->ble", made, mask * scores.max(-1)[..., None, None])


def gshard_with_two_experts(w, x):
    gates, chosen = top(w, x)
    mask = jax.nn.one_hot(chosen, X)
    place = (jnp.cumsum(mask.reshape(T * K, X), 0).reshape(T, K, X) * mask).sum(-1) - 1
    where = jax.nn.one_hot(place.astype(jnp.int32), C)
    combine = jnp.einsum("tk,tkx,tkc->txc", gates, mask, where)
    sent = jnp.einsum("txc,td->xcd", (combine > 0).astype(x.dtype), x)
    h = jax.nn.relu(jnp.einsum("xcd,xdf->xcf", sent, w["up"]))
    return jnp.einsum("txc,xcd->td", combine, jnp.einsum("xcf,xfd->xcd", h, w["down"]))


def buffers_by_scatter(w, x):
    gates, chosen = top(w, x)
    flat = chosen.reshape(-1)
    mask = jax.nn.one_hot(flat, X, dtype=jnp.int32)
    place = ((jnp.cumsum(mask, 0) - 1) * mask).sum(-1)
    buffer = jnp.zeros((X, C, D)).at[flat, place].set(jnp.repeat(x, K, 0), mode="drop")
    h = jax.nn.silu(jnp.einsum("xcd,xdf->xcf", buffer, w["gate"])) * jnp.einsum(
        "xcd,xdf->xcf", buffer, w["up"]
    )
    made = jnp.einsum("xcf,xfd->xcd", h, w["down"])
    out = made.at[flat, place].get(mode="fill", fill_value=0).reshape(T, K, D)
    return jnp.einsum("tkd,tk->td", out, gates)


def buffers_in_one_dimension(w, x):
    _, chosen = top(w, x, 1)
    flat = chosen[:, 0]
    mask = flat[:, None] == jnp.arange(X)
    place = jnp.take_along_axis(jnp.cumsum(mask, 0) - 1, flat[:, None], 1)[:, 0]
    slot = jnp.where(place < C, flat * C + place, X * C)
    buffer = jnp.zeros((X * C, D)).at[slot].add(x, mode="drop").reshape(X, C, D)
    made = jnp.matmul(jnp.tanh(jnp.matmul(buffer, w["up"])), w["down"]).reshape(X * C, D)
    return jnp.take(made, slot, axis=0, mode="fill", fill_value=0)


def experts_choose(w, x):
    """Experts choose their tokens (Zhou et al. 2022)."""
    scores = jax.nn.softmax(x @ w["router"], -1)
    gates, tokens = jax.lax.top_k(scores.T, C)
    sent = x[tokens]
    made = jnp.einsum("xcf,xfd->xcd", jax.nn.relu(jnp.einsum("xcd,xdf->xcf", sent, w["up"])), w["down"])
    return jnp.zeros_like(x).at[tokens.reshape(-1)].add((made * gates[..., None]).reshape(-1, D))


def mapped_over_buffers(w, x):
    _, chosen = top(w, x, 1)
    mask = jax.nn.one_hot(chosen[:, 0], X)
    place = ((jnp.cumsum(mask, 0) - 1) * mask).sum(-1).astype(jnp.int32)
    dispatch = mask[:, :, None] * jax.nn.one_hot(place, C)[:, None]
    sent = jnp.einsum("txc,td->xcd", dispatch, x)
    made = jax.lax.map(lambda a: jnp.tanh(a[0] @ a[1]) @ a[2], (sent, w["up"], w["down"]))
    return jnp.einsum("xcd,txc->td", made, dispatch)


def vmapped_over_experts(w, x):
    _, chosen = top(w, x, 1)
    mask = chosen == jnp.arange(X)

    def expert(up, down, mine):
        return jnp.tanh((x * mine[:, None]) @ up) @ down

    return jax.vmap(expert, (0, 0, 1))(w["up"], w["down"], mask).sum(0)


# ---------------------------------------------------------------- all experts, weights looked up


def all_experts_and_a_sum(w, x):
    gates, chosen = top(w, x)
    dense = jnp.zeros((B, L, X)).at[jnp.arange(B)[:, None, None], jnp.arange(L)[:, None], chosen].set(gates)
    h = jax.nn.silu(jnp.einsum("bld,xdf->blxf", x, w["gate"])) * jnp.einsum("bld,xdf->blxf", x, w["up"])
    return jnp.einsum("blxd,blx->bld", jnp.einsum("blxf,xfd->blxd", h, w["down"]), dense)


def all_experts_and_a_pick(w, x):
    gates, chosen = top(w, x)
    h = jnp.tanh(jnp.einsum("td,xdf->txf", x, w["up"]))
    out = jnp.einsum("txf,xfd->txd", h, w["down"])
    picked = jnp.take_along_axis(out, chosen[..., None], axis=1)
    return (picked * gates[..., None]).sum(1)


def all_experts_by_a_threshold(w, x):
    logits = x @ w["router"]
    least = jax.lax.top_k(logits, K)[0][:, -1:]
    gates = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf))
    return jnp.einsum("tx,txf,xfd->td", gates, jnp.tanh(jnp.einsum("td,xdf->txf", x, w["up"])), w["down"])


def masked_product_of_sorted_tokens(w, x):
    _, chosen = top(w, x, 1)
    order = jnp.argsort(chosen[:, 0])
    mask = jax.nn.one_hot(chosen[order, 0], X)
    h = jnp.tanh(jnp.einsum("md,mx,xdf->mf", x[order], mask, w["up"]))
    return jnp.einsum("mf,mx,xfd->md", h, mask, w["down"])[jnp.argsort(order)]


def weights_looked_up(w, x):
    gates, chosen = top(w, x)
    h = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, w["gate"][chosen])) * jnp.einsum(
        "td,tkdf->tkf", x, w["up"][chosen]
    )
    return jnp.einsum("tkf,tkfd,tk->td", h, w["down"][chosen], gates)


def weights_looked_up_token_by_token(w, x):
    _, chosen = top(w, x, 1)
    return jax.vmap(lambda x, e: jnp.tanh(x @ w["up"][e]) @ w["down"][e])(x, chosen[:, 0])


# ---------------------------------------------------------------- loops


def loop_with_a_mask(w, x):
    gates, chosen = top(w, x)
    out = jnp.zeros_like(x)
    for e in range(X):
        share = jnp.sum(jnp.where(chosen == e, gates, 0), -1)
        h = jax.nn.silu(x @ w["gate"][e]) * (x @ w["up"][e])
        out = out + share[..., None] * (h @ w["down"][e])
    return out


def loop_with_a_selection(w, x):
    chosen = jnp.argmax(x @ w["router"], -1)
    out = jnp.zeros_like(x)
    for e in range(X):
        out = jnp.where((chosen == e)[..., None], jnp.tanh(x @ w["up"][e]) @ w["down"][e], out)
    return out


def loop_over_rows_that_are_found(w, x):
    gates, chosen = top(w, x)
    out = jnp.zeros_like(x)
    for e in range(X):
        rows, slots = jnp.nonzero(chosen == e, size=C, fill_value=T)
        mine = x.at[rows].get(mode="fill", fill_value=0)
        made = jnp.tanh(mine @ w["up"][e]) @ w["down"][e]
        out = out.at[rows].add(made * gates[rows, slots][:, None], mode="drop")
    return out


def loop_over_weights_of_their_own(experts, router, x):
    gates, chosen = top({"router": router}, x)
    out = jnp.zeros_like(x)
    for e, w in enumerate(experts):
        mask = (chosen == e).astype(x.dtype)
        out += (gates * mask).sum(-1, keepdims=True) * (jax.nn.relu(x @ w["up"] + w["bias"]) @ w["down"])
    return out


def scan_over_experts(w, x):
    gates, chosen = top(w, x)
    dense = (jax.nn.one_hot(chosen, X) * gates[..., None]).sum(-2)

    def turn(out, expert):
        up, down, share = expert
        return out + share[:, None] * (jnp.tanh(x @ up) @ down), None

    return jax.lax.scan(turn, jnp.zeros_like(x), (w["up"], w["down"], dense.T))[0]


def fori_over_experts(w, x):
    _, chosen = top(w, x, 1)

    def turn(e, out):
        h = jnp.tanh(x @ jax.lax.dynamic_index_in_dim(w["up"], e, 0, False))
        made = h @ jax.lax.dynamic_index_in_dim(w["down"], e, 0, False)
        return jnp.where(chosen == e, made, out)

    return jax.lax.fori_loop(0, X, turn, jnp.zeros_like(x))


def mapped_over_experts(w, x):
    gates, chosen = top(w, x)
    dense = jnp.einsum("tk,tkx->xt", gates, jax.nn.one_hot(chosen, X))
    return jax.lax.map(
        lambda a: a[2][:, None] * (jnp.tanh(x @ a[0]) @ a[1]), (w["up"], w["down"], dense)
    ).sum(0)


def a_layer_in_a_scan_over_layers(layers, x):
    def layer(x, w):
        return x + switch_transformer(w, x), None

    return jax.lax.scan(layer, x, layers)[0]


def two_layers_with_one_shared_expert(w, v, shared, x):
    x = x + ragged(w, x)
    return x + ragged(v, x) + jax.nn.silu(x @ shared["up"]) @ shared["down"]


_EXPERTS = [{"up": array(D, F), "bias": array(F), "down": array(F, D)} for _ in range(X)]
_LAYERS = {name: array(3, *x.shape) for name, x in W.items()}
OTHER = {name: array(*x.shape) for name, x in W.items()}
_SHARED = {"up": array(D, F), "down": array(F, D)}

SPELLINGS: dict[str, Spelling] = {
    "ragged": Spelling(ragged, FLAT, {"style": "ragged_dot", "experts": X, "products": 3}),
    "ragged_with_one_expert_a_token": Spelling(
        ragged_with_one_expert_a_token, WHOLE, {"style": "ragged_dot"}
    ),
    "ragged_by_take_and_segment_sum": Spelling(ragged_by_take_and_segment_sum, FLAT, {"style": "ragged_dot"}),
    "ragged_in_bfloat16_with_searched_sizes": Spelling(
        ragged_in_bfloat16_with_searched_sizes, FLAT, {"style": "ragged_dot", "products": 1}
    ),
    "ragged_with_sizes_that_are_given": Spelling(
        ragged_with_sizes_that_are_given,
        (*FLAT, jnp.asarray([1, 4, 0, 3], jnp.int32)),
        {"style": "ragged_dot"},
    ),
    "switch_transformer": Spelling(
        switch_transformer, WHOLE, {"style": "one_hot", "experts": X, "products": 2}
    ),
    "gshard_with_two_experts": Spelling(gshard_with_two_experts, FLAT, {"style": "one_hot", "experts": X}),
    "buffers_by_scatter": Spelling(
        buffers_by_scatter, FLAT, {"style": "sorted", "experts": X, "products": 3}
    ),
    "buffers_in_one_dimension": Spelling(buffers_in_one_dimension, FLAT, {"style": "sorted", "experts": X}),
    "experts_choose": Spelling(experts_choose, FLAT, {"style": "sorted", "experts": X}),
    "mapped_over_buffers": Spelling(
        mapped_over_buffers, FLAT, {"style": "loop", "experts": X, "products": 2}
    ),
    "vmapped_over_experts": Spelling(vmapped_over_experts, FLAT, {"style": "all", "experts": X}),
    "all_experts_and_a_sum": Spelling(
        all_experts_and_a_sum, WHOLE, {"style": "all", "experts": X, "products": 3}
    ),
    "all_experts_and_a_pick": Spelling(all_experts_and_a_pick, FLAT, {"experts": X, "products": 2}),
    "all_experts_by_a_threshold": Spelling(all_experts_by_a_threshold, FLAT, {"style": "all", "experts": X}),
    "masked_product_of_sorted_tokens": Spelling(
        masked_product_of_sorted_tokens, FLAT, {"experts": X, "products": 2}
    ),
    "weights_looked_up": Spelling(
        weights_looked_up, FLAT, {"style": "gathered", "experts": X, "products": 3}
    ),
    "weights_looked_up_token_by_token": Spelling(
        weights_looked_up_token_by_token, FLAT, {"style": "gathered", "experts": X}
    ),
    "loop_with_a_mask": Spelling(loop_with_a_mask, FLAT, {"style": "loop", "experts": X, "products": 3}),
    "loop_with_a_selection": Spelling(loop_with_a_selection, WHOLE, {"style": "loop", "experts": X}),
    "loop_over_rows_that_are_found": Spelling(
        loop_over_rows_that_are_found, FLAT, {"style": "loop", "experts": X}
    ),
    "loop_over_weights_of_their_own": Spelling(
        loop_over_weights_of_their_own, (_EXPERTS, W["router"], FLAT[1]), {"style": "loop", "experts": X}
    ),
    "scan_over_experts": Spelling(scan_over_experts, FLAT, {"style": "loop", "experts": X, "products": 2}),
    "fori_over_experts": Spelling(fori_over_experts, FLAT, {"style": "loop", "experts": X, "products": 2}),
    "mapped_over_experts": Spelling(mapped_over_experts, FLAT, {"style": "loop", "experts": X}),
    "a_layer_in_a_scan_over_layers": Spelling(
        a_layer_in_a_scan_over_layers, (_LAYERS, WHOLE[1]), {"style": "one_hot", "experts": X}
    ),
    "two_layers_with_one_shared_expert": Spelling(
        two_layers_with_one_shared_expert, (W, OTHER, _SHARED, FLAT[1]), {"style": "ragged_dot"}, count=2
    ),
}
