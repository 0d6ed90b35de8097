"""The gated linear recurrence within one chunk of time: what leaves it, given the state that enters.

    o, S' = forward(q, k, v, g, beta, S)

With D[i, j] the decay between steps j and i, in a chunk that the state S enters:

    A[i, j] = k[i] . (D[i, j] * k[j]), j < i           P[i, j] = scale * q[i] . (D[i, j] * k[j]), j <= i
    R = v - (D[i, start] * k) S                        W = (1 + beta A)^-1 (beta R)     (no beta: W = v)
    o = scale * (D[i, start] * q) S + P W              S' = D[end, start] * S + (D[end, j] * k)^T W

(the WY form of the delta rule: Bischof and Van Loan 1987; Yang et al., "Parallelizing linear transformers
with the delta rule over sequence length", 2024). All decays are exponents of sums of log decays over runs of
steps: none is above one, and none is a difference of large sums. How pairs of steps are divided into levels,
and why, is said in `recurrence_levels`.

Arrays are float32 with a leading dimension of heads, which are treated alike, side by side: [h, t, d].
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xform.kernels.recurrence_levels import Chunk, Decays, decays, decays_back, ends_back, inverse, level_back

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Inside:
    """What a chunk makes of its own steps, whatever state enters; q is scaled.

    a, p: of the module's words; solved: (1 + beta A)^-1; beta: [h, t, 1]. q_start, k_start, k_end: decayed.
    packed: for each level the left and the right operand of the product that gives its pairs.
    """

    q: Array
    k: Array
    decays: Decays | None
    p: Array
    q_start: Array
    k_start: Array
    k_end: Array
    a: Array | None = None
    beta: Array | None = None
    solved: Array | None = None
    packed: tuple[tuple[Array, Array], ...] = ()

    @property
    def whole(self) -> Array | float:
        """[h, d or 1, 1]: the decay of the state."""
        if self.decays is None:
            return 1.0
        return jnp.swapaxes(self.decays.whole, 1, 2) if self.decays.whole.shape[2] > 1 else self.decays.whole


def inside(chunk: Chunk, q: Array, k: Array, g: Array | None, beta: Array | None) -> Inside:
    """q, k: [h, t, d]; g as `decays` has it; beta [h, 1, t], None without the delta rule."""
    q, k = chunk.scale * q.astype(jnp.float32), k.astype(jnp.float32)
    through = decays(chunk, g)
    packed = []
    a = None
    if through is None or through.between is not None:
        both = jnp.concatenate([q, k], 1) if chunk.delta else q
        pairs = chunk.dot(both, k, (1, 1))
        p, between = pairs[:, : chunk.size], None if through is None else through.between
        p = jnp.where(chunk.later(), p, 0.0) if between is None else p * between
        if chunk.delta:
            a = pairs[:, chunk.size :] if between is None else pairs[:, chunk.size :] * between
            a = jnp.where(chunk.later(strict=True), a, 0.0)
    else:
        p = jnp.where(chunk.diagonal, (q * k).sum(2, keepdims=True), 0.0)
        a = jnp.zeros_like(p) if chunk.delta else None
        for level, half in zip(chunk.levels, through.halves, strict=True):
            right = k * half
            left = level.pack(q * half, right if chunk.delta else None)
            of_q, of_k = level.unpack(chunk.dot(left, right, (1, 1)), chunk.delta)
            p = level.put(p, of_q)
            if of_k is not None and a is not None:
                a = level.put(a, of_k)
            packed.append((left, right))
    q_start, k_start, k_end = (
        (q, k, k) if through is None else (q * through.start, k * through.start, k * through.end)
    )
    made = Inside(q, k, through, p, q_start, k_start, k_end, packed=tuple(packed))
    if beta is None or a is None:
        return made
    column = chunk.column(beta)
    return dataclasses.replace(made, a=a, beta=column, solved=inverse(chunk, column * a))


def values(chunk: Chunk, made: Inside, v: Array, from_state: Array | None) -> tuple[Array, Array]:
    """R and W: what is left of v [h, t, e] to write, and what is written. from_state: k_start S."""
    v = v.astype(jnp.float32)
    if made.solved is None or made.beta is None or from_state is None:
        return v, v
    left = v - from_state
    return left, chunk.dot(made.solved, made.beta * left)


def forward(
    chunk: Chunk, q: Array, k: Array, v: Array, g: Array | None, beta: Array | None, state: Array
) -> tuple[Array, Array]:
    """o [h, t, e] and the state that leaves, of the state [h, d, e] that enters."""
    made = inside(chunk, q, k, g, beta)
    if chunk.delta:
        read = chunk.dot(jnp.concatenate([made.q_start, made.k_start], 1), state)
        seen, from_state = read[:, : chunk.size], read[:, chunk.size :]
    else:
        seen, from_state = chunk.dot(made.q_start, state), None
    _, written = values(chunk, made, v, from_state)
    out = seen + chunk.dot(made.p, written)
    return out, made.whole * state + chunk.dot(made.k_end, written, (0, 0))


# ---------------------------------------------------------------- backward


def backward(
    chunk: Chunk,
    q: Array,
    k: Array,
    v: Array,
    g: Array | None,
    beta: Array | None,
    state: Array,
    dout: Array,
    dstate: Array,
) -> tuple[Array, Array, Array, Array | None, Array | None, Array]:
    """Gradients of q, k, v, g, beta and the state that enters, of those of o and of the state that leaves."""
    made = inside(chunk, q, k, g, beta)
    size = chunk.size
    dout = dout.astype(jnp.float32)
    from_state = chunk.dot(made.k_start, state) if chunk.delta else None
    left, written = values(chunk, made, v, from_state)
    dwritten = chunk.dot(made.p, dout, (0, 0)) + chunk.dot(made.k_end, dstate)
    dk_end = chunk.dot(written, dstate, (1, 1))
    dbeta = da = None
    if made.solved is None or made.a is None or made.beta is None:
        dv, below, reads = dwritten, dout, made.q_start
        dp = chunk.dot(dout, written, (1, 1))
    else:
        y = chunk.dot(made.solved, dwritten, (0, 0))
        dv = made.beta * y
        pairs = chunk.dot(jnp.concatenate([dout, y], 1), written, (1, 1))
        dp, lost = pairs[:, :size], pairs[:, size:]
        da = -made.beta * lost
        dbeta = chunk.row((y * left).sum(2, keepdims=True) - (lost * made.a).sum(2, keepdims=True))
        below = jnp.concatenate([dout, dv], 1)
        reads = jnp.concatenate([made.q_start, -made.k_start], 1)
    through_state = chunk.dot(below, state, (1, 1))
    dq_start = through_state[:, :size]
    dk_start = -through_state[:, size:] if chunk.delta else None
    dentering = made.whole * dstate + chunk.dot(reads, below, (0, 0))
    kept = (made.whole * state.astype(jnp.float32) * dstate).sum(2, keepdims=True)
    dq, dk, dg = _products_back(chunk, made, dp, da, dq_start, dk_start, dk_end, kept)
    return dq, dk, dv, dg, dbeta, dentering


def _products_back(
    chunk: Chunk,
    made: Inside,
    dp: Array,
    da: Array | None,
    dq_start: Array,
    dk_start: Array | None,
    dk_end: Array,
    kept: Array,
) -> tuple[Array, Array, Array | None]:
    """Gradients of q, k and g. dp, da: not masked; kept [h, d, 1]: of the exponents of the state's decay."""
    q, k, through = made.q, made.k, made.decays
    if through is not None:
        dq_start, dk_end = through.start * dq_start, through.end * dk_end
        dk_start = None if dk_start is None else through.start * dk_start
    dq, dk = dq_start, dk_end if dk_start is None else dk_end + dk_start
    start = q * dq_start if dk_start is None else q * dq_start + k * dk_start
    end = k * dk_end
    if through is not None and through.between is None:
        diagonal = jnp.where(chunk.diagonal, dp, 0.0).sum(2, keepdims=True)
        dq, dk = dq + diagonal * k, dk + diagonal * q
        before, after = ends_back(start, end, jnp.swapaxes(kept, 1, 2))
        for level, half, (left, right) in [*zip(chunk.levels, through.halves, made.packed, strict=True)][
            ::-1
        ]:
            pairs = level.packed_pairs(dp, da)
            of_q, of_k = level.unpack(chunk.dot(pairs, right), chunk.delta)
            dq_at = level.spread(of_q) * half
            dk_at = chunk.dot(pairs, left, (0, 0))
            dk_at = (dk_at if of_k is None else dk_at + level.spread(of_k)) * half
            dq, dk = dq + dq_at, dk + dk_at
            before, after = level_back(level, before, after, q * dq_at + k * dk_at)
        return chunk.scale * dq, dk, before
    if through is None or through.between is None:
        dp, dg = jnp.where(chunk.later(), dp, 0.0), None
        da = None if da is None else jnp.where(chunk.later(strict=True), da, 0.0)
    else:
        between = dp * made.p if da is None or made.a is None else dp * made.p + da * made.a
        start, end = start.sum(2, keepdims=True), end.sum(2, keepdims=True)
        dg = decays_back(chunk, start, end, kept.sum(1, keepdims=True), between)
        dp = dp * through.between
        da = None if da is None else jnp.where(chunk.later(strict=True), da * through.between, 0.0)
    if da is None:
        return chunk.scale * (dq + chunk.dot(dp, k)), dk + chunk.dot(dp, q, (0, 0)), dg
    both = jnp.concatenate([dp, da], 1)
    by_k = chunk.dot(both, k)
    dk = dk + by_k[:, chunk.size :] + chunk.dot(both, jnp.concatenate([q, k], 1), (0, 0))
    return chunk.scale * (dq + by_k[:, : chunk.size]), dk, dg
