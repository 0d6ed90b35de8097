"""Gated linear recurrences: steps and chunks of GLA, RetNet, Mamba-2, DeltaNet, gated DeltaNet and KDA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings import LookAlike, Spelling

B, T, H, D, E = 2, 6, 3, 5, 7
_random = np.random.RandomState(0)


def _a(*sizes: int) -> Any:
    return jnp.asarray(_random.standard_normal(sizes), jnp.float32)


def _unit(*sizes: int) -> Any:
    return jax.nn.sigmoid(_a(*sizes))


def _log(*sizes: int) -> Any:
    return jax.nn.log_sigmoid(_a(*sizes))


def _key(*sizes: int) -> Any:
    x = _a(*sizes)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


TIME_FIRST = (_a(T, B, H, D), _key(T, B, H, D), _a(T, B, H, E))
HEADS = (_a(B, T, H, D), _key(B, T, H, D), _a(B, T, H, E))
ONE = (_a(T, D), _key(T, D), _a(T, E))
ZERO = (B, H, D, E)


def _over_time(step: Any, state: Any, *xs: Any) -> Any:
    """A scan over the second dimension of [batch, time, ...]; results likewise."""
    xs = tuple(jnp.moveaxis(x, 1, 0) for x in xs)
    final, out = jax.lax.scan(step, state, xs)
    return jnp.moveaxis(out, 0, 1), final


# ---------------------------------------------------------------- a step a turn


def gla(q, k, v, g):
    def step(state, x):
        q, k, v, g = x
        state = state * jnp.exp(g)[..., None] + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    return _over_time(step, jnp.zeros(ZERO), q, k, v, g)


def gla_with_a_factor_and_products_by_einsum(q, k, v, a):
    def step(state, x):
        q, k, v, a = x
        state = jnp.einsum("bhk,bhkv->bhkv", a, state) + jnp.einsum("bhk,bhv->bhkv", k, v)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q) * D**-0.5

    return jax.lax.scan(step, jnp.zeros(ZERO), (q, k, v, a))


def gla_of_one_head_vmapped(q, k, v, g):
    def one(q, k, v, g):
        def step(state, x):
            q, k, v, g = x
            state = jnp.exp(g)[:, None] * state + jnp.outer(k, v)
            return state, q @ state

        return jax.lax.scan(step, jnp.zeros((D, E)), (q, k, v, g))[1]

    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v, g)


def gates_are_made_in_the_step(x, w):
    def step(state, x):
        q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
        a = jax.nn.sigmoid(x @ w["a"])
        state = a[:, :, None] * state + k[:, :, None] * v[:, None, :]
        return state, jnp.einsum("bd,bde->be", q, state)

    return jax.lax.scan(step, jnp.zeros((B, D, E)), jnp.swapaxes(x, 0, 1))


def hgrn_with_one_minus_the_gate_as_key(q, f, v):
    def step(state, x):
        q, f, v = x
        state = f[..., None] * state + (1 - f)[..., None] * v[..., None, :]
        return state, (state * q[..., None]).sum(-2)

    return _over_time(step, jnp.zeros(ZERO), q, f, v)


def retention_with_a_constant_for_each_head(q, k, v):
    gamma = 1 - 2.0 ** (-5 - jnp.arange(H, dtype=jnp.float32))

    def step(state, x):
        q, k, v = x
        state = gamma[None, :, None, None] * state + jnp.einsum("bhd,bhe->bhde", k, v)
        return state, jnp.einsum("bhd,bhde->bhe", q * D**-0.5, state)

    return _over_time(step, jnp.zeros(ZERO), q, k, v)


def retention_in_a_fori_loop(q, k, v):
    def turn(i, carried):
        state, out = carried
        state = 0.9 * state + jnp.outer(k[i], v[i])
        return state, out.at[i].set(q[i] @ state)

    return jax.lax.fori_loop(0, T, turn, (jnp.zeros((D, E)), jnp.zeros((T, E))))[1]


def retention_in_a_while_loop(q, k, v):
    def turn(carried):
        i, state, out = carried
        ki = jax.lax.dynamic_slice_in_dim(k, i, 1, 1)
        vi = jax.lax.dynamic_slice_in_dim(v, i, 1, 1)
        qi = jax.lax.dynamic_slice_in_dim(q, i, 1, 1)
        state = 0.9 * state + jnp.einsum("bthd,bthe->bhde", ki, vi)
        read = jnp.einsum("bthd,bhde->bthe", qi, state)
        return i + 1, state, jax.lax.dynamic_update_slice_in_dim(out, read, i, 1)

    first = (0, jnp.zeros(ZERO), jnp.zeros((B, T, H, E)))
    return jax.lax.while_loop(lambda c: c[0] < T, turn, first)[2]


def mamba2_with_groups_and_a_skip(x, dt, b, c, a, skip):
    def step(state, at):
        x, dt, b, c = at
        decay = jnp.exp(dt * -jnp.exp(a))
        state = state * decay[..., None, None] + (dt[..., None] * x)[..., None] * b[:, None, None, :]
        return state, jnp.einsum("bhpn,bn->bhp", state, c) + skip[:, None] * x

    return _over_time(step, jnp.zeros((B, H, E, D)), x, dt, b, c)


def mlstm_without_its_normaliser(q, k, v, i, f):
    def step(state, x):
        q, k, v, i, f = x
        state = f[..., None, None] * state + i[..., None, None] * (v[..., :, None] * k[..., None, :])
        return state, jnp.einsum("bhed,bhd->bhe", state, q)

    return _over_time(step, jnp.zeros((B, H, E, D)), q, k, v, i, f)


def linear_attention_as_a_loop(q, k, v):
    def step(state, x):
        q, k, v = x
        state = state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    return _over_time(step, jnp.zeros(ZERO), jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v)


def delta(q, k, v, beta):
    def step(state, x):
        q, k, v, beta = x
        error = v - jnp.einsum("bhd,bhde->bhe", k, state)
        state = state + beta[..., None, None] * k[..., :, None] * error[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    return _over_time(step, jnp.zeros(ZERO), q, k, v, beta)


def delta_with_key_and_value_scaled_before(q, k, v, beta):
    def step(state, x):
        q, k, v, k_beta = x
        old = (k_beta[..., :, None] * state).sum(-2)
        state = state - k[..., :, None] * old[..., None, :] + k[..., :, None] * v[..., None, :]
        return state, (q[..., :, None] * state).sum(-2)

    return _over_time(step, jnp.zeros(ZERO), q, k, v * beta[..., None], k * beta[..., None])


def delta_by_a_matrix(q, k, v, beta):
    def step(state, x):
        q, k, v, beta = x
        forget = beta * jnp.outer(k, k)
        state = state - forget @ state + beta * jnp.outer(k, v)
        return state, state.T @ q

    return jax.lax.scan(step, jnp.zeros((D, E)), (q, k, v, beta))[1]


def gated_delta_as_published(q, k, v, g, beta, state):
    q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k, v, beta, g = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (q, k, v, beta, g))
    q = q * D**-0.5
    out = jnp.zeros((B, H, T, E), jnp.float32)

    def turn(i, carried):
        out, state = carried
        qt, kt, vt = q[:, :, i], k[:, :, i], v[:, :, i]
        gt, bt = jnp.exp(g[:, :, i])[..., None, None], beta[:, :, i][..., None]
        state = state * gt
        memory = (state * kt[..., None]).sum(axis=-2)
        state = state + kt[..., None] * ((vt - memory) * bt)[..., None, :]
        return out.at[:, :, i].set((state * qt[..., None]).sum(axis=-2)), state

    out, state = jax.lax.fori_loop(0, T, turn, (out, state))
    return jnp.swapaxes(out, 1, 2).astype(jnp.bfloat16), state


def gated_delta_normed_in_the_step(q, k, v, g, beta, w):
    def step(state, x):
        q, k, v, g, beta = x
        state = jnp.exp(g)[..., None, None] * state
        state = state + jnp.einsum(
            "bhd,bhe->bhde", k, beta[..., None] * (v - jnp.einsum("bhde,bhd->bhe", state, k))
        )
        o = jnp.einsum("bhde,bhd->bhe", state, q)
        return state, o * jax.lax.rsqrt((o * o).mean(-1, keepdims=True) + 1e-6) * w

    return _over_time(step, jnp.zeros(ZERO), q, k, v, g, beta)


def gated_delta_with_decay_and_strength_multiplied(q, k, v, a, beta):
    def step(state, x):
        q, k, v, a, beta = x
        eye = jnp.eye(D)
        del eye
        state = a * (state - beta * jnp.outer(k, k @ state)) + beta * jnp.outer(k, v)
        return state, q @ state

    return jax.lax.scan(step, jnp.zeros((D, E)), (q, k, v, a, beta))


def kda(q, k, v, g, beta):
    def step(state, x):
        q, k, v, g, beta = x
        state = state * jnp.exp(g)[..., None]
        state = state + jnp.einsum("bh,bhk,bhv->bhkv", beta, k, v - jnp.einsum("bhk,bhkv->bhv", k, state))
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    return _over_time(step, jnp.zeros(ZERO), q * D**-0.5, k, v, g, beta)


def kda_transposed_state_in_bfloat16(q, k, v, g, beta):
    def step(state, x):
        q, k, v, g, beta = (y.astype(jnp.float32) for y in x)
        kept = state * jnp.exp(g)[:, :, None, :]
        error = beta[..., None] * (v - jnp.matmul(kept, k[..., None])[..., 0])
        state = kept + jnp.matmul(error[..., None], k[:, :, None, :])
        return state, jnp.matmul(state, q[..., None])[..., 0].astype(jnp.bfloat16)

    xs = tuple(x.astype(jnp.bfloat16) for x in (q, k, v, g, beta))
    return _over_time(step, jnp.zeros((B, H, E, D)), *xs)


def decay_after_the_update(q, k, v, a):
    def step(state, x):
        q, k, v, a = x
        state = (state + jnp.outer(k, v)) * a
        return state, q @ state

    return jax.lax.scan(step, jnp.zeros((D, E)), (q, k, v, a))[1]


def backwards_from_a_given_state(q, k, v, g, state):
    def step(state, x):
        q, k, v, g = x
        state = jnp.exp(g)[:, None] * state + k[:, None] * v
        return state, q @ state

    return jax.lax.scan(step, state, (q, k, v, g), reverse=True)


def heads_folded_into_batch_and_rematerialised(q, k, v, g, beta):
    q, k, v, g, beta = (jnp.moveaxis(x, 2, 1).reshape(B * H, T, *x.shape[3:]) for x in (q, k, v, g, beta))

    @jax.checkpoint
    def all_steps(q, k, v, g, beta):
        def step(state, x):
            q, k, v, g, beta = x
            state = state * jnp.exp(g)[:, None, None]
            delta = (v - jnp.einsum("nde,nd->ne", state, k)) * beta[:, None]
            state = state + k[:, :, None] * delta[:, None, :]
            return state, jnp.einsum("nde,nd->ne", state, q)

        return _over_time(step, jnp.zeros((B * H, D, E)), q, k, v, g, beta)[0]

    return all_steps(q, k, v, g, beta).reshape(B, H, T, E)


# ---------------------------------------------------------------- chunks

C = 4


def _chunks(x: Any, size: int = C) -> Any:
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def _chunked_args(seed: int, decay: int) -> Any:
    """[b, h, t, ...]: queries, unit keys, values, log decays (by channel, or by head), betas."""
    random = np.random.RandomState(seed)
    sizes = [(2, 3, 8, D), (2, 3, 8, D), (2, 3, 8, E), (2, 3, 8, D)[:decay], (2, 3, 8)]
    q, k, v, g, beta = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in sizes)
    return q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, jax.nn.log_sigmoid(g), jax.nn.sigmoid(beta)


def retention_in_chunks(q, k, v, g, beta):
    del beta
    q, k, v, g = map(_chunks, (q, k, v, g))
    total = jnp.cumsum(g, axis=-1)
    seen = jnp.tril(jnp.ones((C, C), bool))
    within = jnp.where(seen, jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], 0)), 0)

    def turn(state, x):
        q, k, v, total, within = x
        scores = jnp.einsum("bhid,bhjd->bhij", q, k) * within
        out = scores @ v + (q * jnp.exp(total)[..., None]) @ state
        last = total[..., -1:]
        state = (
            jnp.exp(last)[..., None] * state + jnp.swapaxes(k * jnp.exp(last - total)[..., None], -1, -2) @ v
        )
        return state, out

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v, total, within))
    state, out = jax.lax.scan(turn, jnp.zeros((2, 3, D, E)), xs)
    return jnp.moveaxis(out, 0, 2).reshape(2, 3, 8, E), state


def gla_in_chunks(q, k, v, g, beta):
    del beta
    q, k, v, g = map(_chunks, (q, k, v, g))
    total = jnp.cumsum(g, axis=-2)
    last = total[..., -1:, :]
    q_in, k_in, k_out = q * jnp.exp(total), k * jnp.exp(-total), k * jnp.exp(last - total)
    inside = jnp.tril(jnp.einsum("bhnid,bhnjd->bhnij", q_in, k_in)) @ v
    added = jnp.einsum("bhnid,bhnie->nbhde", k_out, v)
    kept = jnp.moveaxis(jnp.exp(last[..., 0, :]), 2, 0)[..., None]

    def turn(state, x):
        return x[0] * state + x[1], state

    _, states = jax.lax.scan(turn, jnp.zeros((2, 3, D, E)), (kept, added))
    return (inside + jnp.einsum("bhnid,nbhde->bhnie", q_in, states)).reshape(2, 3, 8, E)


def _solved(a: Any, by: str) -> Any:
    """(I + a)^-1 for strictly lower triangular `a`."""
    eye = jnp.eye(C)
    if by == "solve":
        eyes = jnp.broadcast_to(eye, a.shape)
        return jax.scipy.linalg.solve_triangular(eye + a, eyes, lower=True, unit_diagonal=True)
    if by == "doubling":
        x, power = eye - a, a @ a
        for _ in range(2):
            x, power = x + x @ power, power @ power
        return x
    rows = -a

    def turn(i, rows):
        row = rows[..., i, :]
        row = row + (row[..., :, None] * rows).sum(-2) * (jnp.arange(C) < i)
        return rows.at[..., i, :].set(row)

    return jax.lax.fori_loop(1, C, turn, rows) + eye


def _gated_delta_in_chunks(q, k, v, g, beta, by="rows"):
    scale = D**-0.5
    k_beta, v_beta = k * beta[..., None], v * beta[..., None]
    q, k, v_beta, k_beta, g = map(_chunks, (q * scale, k, v_beta, k_beta, g))
    g = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((C, C), bool))
    decay = jnp.where(lower, jnp.exp(jnp.where(lower, g[..., :, None] - g[..., None, :], 0)), 0)
    a = jnp.tril(jnp.einsum("bhnid,bhnjd->bhnij", k_beta, k) * decay, -1)
    inverse = _solved(a, by)
    u = inverse @ v_beta
    w = inverse @ (k_beta * jnp.exp(g)[..., None])

    def turn(state, x):
        q, k, u, w, g, decay = x
        scores = jnp.einsum("bhid,bhjd->bhij", q, k) * decay
        new = u - w @ state
        out = (q * jnp.exp(g)[..., None]) @ state + scores @ new
        last = g[..., -1]
        keys = k * jnp.exp(last[..., None] - g)[..., None]
        return state * jnp.exp(last)[..., None, None] + jnp.swapaxes(keys, -1, -2) @ new, out

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, u, w, g, decay))
    state, out = jax.lax.scan(turn, jnp.zeros((2, 3, D, E), jnp.float32), xs)
    return jnp.moveaxis(out, 0, 2).reshape(2, 3, 8, E), state


def _kda_in_chunks(q, k, v, g, beta):
    q, k, v, g, beta = map(_chunks, (q, k, v, g, beta))
    g = jnp.cumsum(g, axis=-2)
    pairs = jnp.exp(jnp.minimum(g[..., :, None, :] - g[..., None, :, :], 0))
    a = jnp.tril(jnp.einsum("bhnid,bhnjd,bhnijd->bhnij", k, k, pairs) * beta[..., None], -1)
    inverse = _solved(a, "solve") * beta[..., None, :]
    scores = jnp.tril(jnp.einsum("bhnid,bhnjd,bhnijd->bhnij", q, k, pairs))
    w, u = inverse @ (jnp.exp(g) * k), inverse @ v

    def turn(state, x):
        q, k, u, w, g, scores = x
        new = u - w @ state
        out = (q * jnp.exp(g)) @ state + scores @ new
        keys = k * jnp.exp(g[..., -1:, :] - g)
        return state * jnp.exp(g[..., -1, :])[..., None] + jnp.einsum("bhid,bhie->bhde", keys, new), out

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, u, w, g, scores))
    state, out = jax.lax.scan(turn, jnp.zeros((2, 3, D, E)), xs)
    return jnp.moveaxis(out, 0, 2).reshape(2, 3, 8, E), state


_LOG, _BETA = _log(B, T, H), _unit(B, T, H)
_FLAT = (*ONE, _unit(T))

SPELLINGS: dict[str, Spelling] = {
    "gla": Spelling(gla, (*HEADS, _log(B, T, H, D)), {"kind": "gla"}),
    "gla_with_a_factor_and_products_by_einsum": Spelling(
        gla_with_a_factor_and_products_by_einsum,
        (*TIME_FIRST, _unit(T, B, H, D)),
        {"kind": "gla", "scale": D**-0.5},
    ),
    "gla_of_one_head_vmapped": Spelling(gla_of_one_head_vmapped, (*HEADS, _log(B, T, H, D)), {"kind": "gla"}),
    "gates_are_made_in_the_step": Spelling(
        gates_are_made_in_the_step,
        (_a(B, T, 4), {"q": _a(4, D), "k": _a(4, D), "a": _a(4, D), "v": _a(4, E)}),
        {"kind": "gla"},
    ),
    "hgrn_with_one_minus_the_gate_as_key": Spelling(
        hgrn_with_one_minus_the_gate_as_key, (HEADS[0], _unit(B, T, H, D), HEADS[2]), {"kind": "gla"}
    ),
    "retention_with_a_constant_for_each_head": Spelling(
        retention_with_a_constant_for_each_head, HEADS, {"kind": "retention"}
    ),
    "retention_in_a_fori_loop": Spelling(retention_in_a_fori_loop, ONE, {"kind": "retention"}),
    "retention_in_a_while_loop": Spelling(retention_in_a_while_loop, HEADS, {"kind": "retention"}),
    "mamba2_with_groups_and_a_skip": Spelling(
        mamba2_with_groups_and_a_skip,
        (HEADS[2], jax.nn.softplus(_a(B, T, H)), _a(B, T, D), _a(B, T, D), _a(H), _a(H)),
        {"kind": "retention"},
    ),
    "mlstm_without_its_normaliser": Spelling(
        mlstm_without_its_normaliser, (*HEADS, _unit(B, T, H), _unit(B, T, H)), {"kind": "retention"}
    ),
    "linear_attention_as_a_loop": Spelling(linear_attention_as_a_loop, HEADS, {"kind": "linear"}),
    "delta": Spelling(delta, (*HEADS, _BETA), {"kind": "delta"}),
    "delta_with_key_and_value_scaled_before": Spelling(
        delta_with_key_and_value_scaled_before, (*HEADS, _BETA), {"kind": "delta"}
    ),
    "delta_by_a_matrix": Spelling(delta_by_a_matrix, _FLAT, {"kind": "delta"}),
    "gated_delta_as_published": Spelling(
        gated_delta_as_published, (*HEADS, _LOG, _BETA, _a(*ZERO)), {"kind": "gated_delta"}
    ),
    "gated_delta_normed_in_the_step": Spelling(
        gated_delta_normed_in_the_step, (*HEADS, _LOG, _BETA, _a(E)), {"kind": "gated_delta"}
    ),
    "gated_delta_with_decay_and_strength_multiplied": Spelling(
        gated_delta_with_decay_and_strength_multiplied, (*ONE, _unit(T), _unit(T)), {"kind": "gated_delta"}
    ),
    "kda": Spelling(kda, (*HEADS, _log(B, T, H, D), _BETA), {"kind": "kda"}),
    "kda_transposed_state_in_bfloat16": Spelling(
        kda_transposed_state_in_bfloat16, (*HEADS, _log(B, T, H, D), _BETA), {"kind": "kda"}
    ),
    "decay_after_the_update": Spelling(decay_after_the_update, _FLAT, {"kind": "retention"}),
    "backwards_from_a_given_state": Spelling(
        backwards_from_a_given_state, (*ONE, _log(T, D), _a(D, E)), {"kind": "gla"}
    ),
    "heads_folded_into_batch_and_rematerialised": Spelling(
        heads_folded_into_batch_and_rematerialised, (*HEADS, _LOG, _BETA), {"kind": "gated_delta"}
    ),
    "retention_in_chunks": Spelling(
        retention_in_chunks, _chunked_args(1, 3), {"kind": "retention", "chunk": C}
    ),
    "gla_in_chunks": Spelling(gla_in_chunks, _chunked_args(2, 4), {"kind": "gla", "chunk": C}),
    "gated_delta_in_chunks_by_rows": Spelling(
        _gated_delta_in_chunks, _chunked_args(3, 3), {"kind": "gated_delta", "chunk": C}
    ),
    "gated_delta_in_chunks_by_a_solve": Spelling(
        functools.partial(_gated_delta_in_chunks, by="solve"),
        _chunked_args(4, 3),
        {"kind": "gated_delta", "chunk": C},
    ),
    "gated_delta_in_chunks_by_doubling": Spelling(
        functools.partial(_gated_delta_in_chunks, by="doubling"),
        _chunked_args(5, 3),
        {"kind": "gated_delta", "chunk": C},
    ),
    "kda_in_chunks": Spelling(_kda_in_chunks, _chunked_args(6, 4), {"kind": "kda", "chunk": C}),
}


# ---------------------------------------------------------------- look-alikes


def _changed(update: Any, *extra: Any, read: Any = None) -> LookAlike:
    """A loop over time of one head whose state becomes update(state, k, v, a, beta)."""

    def fn(q, k, v, a, beta, *rest):
        def step(state, x):
            q, k, v, a, beta = x
            new = update(state, k, v, a, beta, *rest)
            return new, read(state, new, q, k, v) if read else q @ new

        return jax.lax.scan(step, jnp.zeros((D, E)), (q, k, v, a, beta))

    return LookAlike(fn, (*ONE, _unit(T), _unit(T), *extra))


def _near(why: str, *args: Any, **kwargs: Any) -> LookAlike:
    found = _changed(*args, **kwargs)
    return LookAlike(found.fn, found.args, why)


def diagonal(x, a, b, c):
    """Mamba's selective scan: every channel and state has a decay of its own (Gu and Dao 2023)."""

    def step(h, at):
        x, b, c = at
        h = jnp.exp(a) * h + x[:, None] * b[None, :]
        return h, h @ c

    return jax.lax.scan(step, jnp.zeros((E, D)), (x, b, c))


def gru(x, w, u):
    def step(h, x):
        z = jax.nn.sigmoid(x @ w + h @ u)
        h = (1 - z) * h + z * jnp.tanh(x @ w)
        return h, h

    return jax.lax.scan(step, jnp.zeros((B, E)), x)


def lru(x, a, b):
    def step(h, x):
        h = a * h + x @ b
        return h, h

    return jax.lax.scan(step, jnp.zeros((B, E)), x)


def parallel_retention(q, k, v):
    """The same numbers in one product of length by length: no state, and no softmax."""
    t = jnp.arange(T)
    decay = jnp.where(t[:, None] >= t, 0.9 ** (t[:, None] - t), 0)
    return jnp.einsum("bhts,bshe->bthe", jnp.einsum("bthd,bshd->bhts", q, k) * decay, v)


def recursive_least_squares(p, k):
    def step(p, k):
        gain = p @ k / (1 + k @ p @ k)
        return p - jnp.outer(gain, k @ p), gain

    return jax.lax.scan(step, p, k)


def momentum(w, xs, ys):
    def step(carried, at):
        w, m = carried
        x, y = at
        m = 0.9 * m + jnp.outer(x, x @ w - y)
        return (w - 0.1 * m, m), ()

    return jax.lax.scan(step, (w, jnp.zeros((D, E))), (xs, ys))[0]


def cache(q, k, v):
    def step(carried, x):
        keys, values, i = carried
        q, k, v = x
        keys, values = keys.at[i].set(k), values.at[i].set(v)
        weights = jax.nn.softmax(jnp.where(jnp.arange(T) <= i, keys @ q, -jnp.inf))
        return (keys, values, i + 1), weights @ values

    return jax.lax.scan(step, (jnp.zeros((T, D)), jnp.zeros((T, E)), 0), (q, k, v))[1]


def keys_of_the_last_output(x, w):
    def step(carried, x):
        state, last = carried
        k, v, q = (x + last) @ w["k"], x @ w["v"], x @ w["q"]
        state = 0.9 * state + jnp.outer(k, v)
        last = q @ state
        return (state, last), last

    return jax.lax.scan(step, (jnp.zeros((D, E)), jnp.zeros(E)), x)[1]


def all_states(q, k, v):
    def step(state, x):
        state = 0.9 * state + jnp.outer(*x)
        return state, state

    states = jax.lax.scan(step, jnp.zeros((D, E)), (k, v))[1]
    return jnp.einsum("td,sde->tse", q, states)


def chunk_without_its_own_tokens(q, k, v, g, beta):
    """What comes from earlier chunks alone."""
    del beta
    q, k, v, g = map(_chunks, (q, k, v, g))
    total = jnp.cumsum(g, axis=-1)

    def turn(state, x):
        q, k, v, total = x
        last = total[..., -1:]
        out = (q * jnp.exp(total)[..., None]) @ state
        return jnp.exp(last)[..., None] * state + jnp.swapaxes(
            k * jnp.exp(last - total)[..., None], -1, -2
        ) @ v, out

    xs = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v, total))
    return jax.lax.scan(turn, jnp.zeros((2, 3, D, E)), xs)


def chunk_with_a_strict_triangle(q, k, v, g, beta):
    """A query that does not see its own token."""
    del beta, g
    q, k, v = map(_chunks, (q, k, v))

    def turn(state, x):
        q, k, v = x
        out = jnp.tril(q @ jnp.swapaxes(k, -1, -2), -1) @ v + q @ state
        return state + jnp.swapaxes(k, -1, -2) @ v, out

    return jax.lax.scan(turn, jnp.zeros((2, 3, D, E)), tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v)))


def _delta_rule(state, k, v, a, beta):
    return a * state + beta * jnp.outer(k, v - k @ (a * state))


LOOKALIKES: dict[str, LookAlike] = {
    "diagonal_state_space": LookAlike(diagonal, (_a(T, E), _a(E, D), _a(T, D), _a(T, D))),
    "gru": LookAlike(gru, (_a(T, B, E), _a(E, E), _a(E, E))),
    "linear_recurrent_unit": LookAlike(lru, (_a(T, B, D), _unit(E), _a(D, E))),
    "parallel_retention": LookAlike(parallel_retention, HEADS),
    "state_mixed_by_a_matrix": _near(
        "mixed by a matrix", lambda s, k, v, a, beta, w: s @ w + jnp.outer(k, v), _a(E, E)
    ),
    "decayed_state_mixed_along_keys": _near(
        "mixed by a matrix", lambda s, k, v, a, beta, w: a * s - w @ s + jnp.outer(k, v), _a(D, D)
    ),
    "recursive_least_squares": LookAlike(recursive_least_squares, (_a(D, D), _key(T, D))),
    "momentum_of_gradients": LookAlike(momentum, (_a(D, E), _a(T, D), _a(T, E))),
    "key_value_cache": LookAlike(cache, ONE),
    "keys_of_the_last_output": LookAlike(
        keys_of_the_last_output,
        (_a(T, E), {"k": _a(E, D), "v": _a(E, E), "q": _a(E, D)}),
        "depend on what the loop",
    ),
    "all_states_are_returned": LookAlike(all_states, ONE, "states"),
    "state_through_tanh": _changed(lambda s, k, v, a, beta: jnp.tanh(a * s + jnp.outer(k, v))),
    "beta_on_the_error_alone": _near(
        "scaled alike", lambda s, k, v, a, beta: s + jnp.outer(k, v) - beta * jnp.outer(k, k @ s)
    ),
    "delta_read_with_another_key": _near(
        "key", lambda s, k, v, a, beta: s + beta * jnp.outer(k, v - jnp.roll(k, 1) @ s)
    ),
    "delta_of_the_wrong_sign": _near(
        "added, not taken away", lambda s, k, v, a, beta: s + beta * jnp.outer(k, v + k @ s)
    ),
    "delta_read_before_a_decay_by_channel": _near(
        "before its decay",
        lambda s, k, v, a, beta, by: by[:, None] * s + beta * jnp.outer(k, v - k @ s),
        _unit(D),
    ),
    "decay_of_keys_and_values": _near("", lambda s, k, v, a, beta, by: by * s + jnp.outer(k, v), _unit(D, E)),
    "two_outer_products": _near(
        "more is added", lambda s, k, v, a, beta: a * s + jnp.outer(k, v) + jnp.outer(jnp.tanh(k), v * v)
    ),
    "read_before_the_update": _near("before its update", _delta_rule, read=lambda s, new, q, k, v: q @ s),
    "with_a_bonus_for_the_present": _near(
        "before its update",
        lambda s, k, v, a, beta: a * s + jnp.outer(k, v),
        read=lambda s, new, q, k, v: q @ (s + 0.5 * jnp.outer(k, v)),
    ),
    "read_twice": _near(
        "more than once", _delta_rule, read=lambda s, new, q, k, v: (q @ new, jnp.tanh(q) @ new)
    ),
    "read_squared": _near("", _delta_rule, read=lambda s, new, q, k, v: q @ (new * new)),
    "read_through_a_norm": _near(
        "", _delta_rule, read=lambda s, new, q, k, v: q @ (new / jnp.abs(new).max())
    ),
    "its_error_is_returned": _near(
        "elsewhere|before its update", _delta_rule, read=lambda s, new, q, k, v: (q @ new, v - k @ s)
    ),
    "hebbian_with_its_own_square": _changed(
        lambda s, k, v, a, beta: s + jnp.outer(k, k @ s) - s * (k @ s) ** 2
    ),
    "no_decay_and_no_outer_product": _changed(lambda s, k, v, a, beta: a * s + k[:, None]),
    "update_is_a_matrix": _changed(lambda s, k, v, a, beta, w: a * s + k[:, None] * w, _a(D, E)),
    "chunk_without_its_own_tokens": LookAlike(chunk_without_its_own_tokens, _chunked_args(7, 3)),
    "chunk_with_a_strict_triangle": LookAlike(chunk_with_a_strict_triangle, _chunked_args(8, 3)),
}
