"""The gated linear recurrence: a state of outer products with decay, with or without the delta rule.

    S[t] = a[t] * S[t-1] + beta[t] k[t] (v[t] - (a[t] * S[t-1])^T k[t])^T         o[t] = scale * S[t]^T q[t]
    S[t] = a[t] * S[t-1] + k[t] v[t]^T                                            (without beta)

a = exp(g) by key channel: KDA, and without beta GLA; by head: gated DeltaNet, and without beta retention and
Mamba-2; none: DeltaNet, and without beta linear attention. `plain` is that, step by step; the kernels
(`recurrence_blocks`) go chunk by chunk (`recurrence_chunk`).

What is kept for the way back is the state that enters each chunk, in q's dtype, d / chunk times as much as o:
twice as much for 128 channels and chunks of 64 steps. It, o and the final state are named "context" for
`jax.checkpoint`; what is not saved is computed again by the forward kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xform.kernels.recurrence_blocks import default_blocks, run_backward, run_forward, sizes_of
from xform.ops import apply

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RecurrenceForward:
    """q, k, v, [g], [beta], initial -> o, final, [states].

    decay: "none" (no g), "head" (g [b, n, t]) or "channel" ([b, n, t, d]). delta: with beta. chunk: steps of
    a chunk, a power of two; heads: of a program of the kernel, at most. keep: give the states that enter
    chunks too.
    """

    decay: str
    delta: bool
    scale: float = 1.0
    chunk: int = 64
    heads: int = 4
    keep: bool = False
    interpret: bool = False

    @property
    def name(self) -> str:
        return "recurrence"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("bntd", "bntd", "bnte", *_gates(self.decay, self.delta), "bnde")

    @property
    def results(self) -> tuple[str, ...]:
        return ("bnte", "bnde", *("bncde",) * self.keep)

    @property
    def cut(self) -> str:
        return "bn"

    def plain(self, *args: Array) -> Sequence[Array]:
        return plain(self.decay, self.delta, self.scale, self.chunk, args)[: 2 + self.keep]

    def kernel(self, *args: Array) -> Sequence[Array]:
        return run_forward(
            args, self.decay, self.delta, self.scale, self.chunk, self.heads, self.keep, self.interpret
        )


@dataclasses.dataclass(frozen=True)
class RecurrenceBackward:
    """q, k, v, [g], [beta], states, do, dfinal -> dq, dk, dv, [dg], [dbeta], dinitial; fields as forwards."""

    decay: str
    delta: bool
    scale: float = 1.0
    chunk: int = 64
    heads: int = 4
    interpret: bool = False

    @property
    def name(self) -> str:
        return "recurrence_backward"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("bntd", "bntd", "bnte", *_gates(self.decay, self.delta), "bncde", "bnte", "bnde")

    @property
    def results(self) -> tuple[str, ...]:
        return ("bntd", "bntd", "bnte", *_gates(self.decay, self.delta), "bnde")

    @property
    def cut(self) -> str:
        return "bn"

    def plain(self, *args: Array) -> Sequence[Array]:
        *inputs, states, dout, dfinal = args
        initial = states[:, :, 0].astype(jnp.float32)
        _, back = jax.vjp(
            lambda *xs: plain(self.decay, self.delta, self.scale, self.chunk, xs)[:2], *inputs, initial
        )
        gradients: Sequence[Array] = back((dout, dfinal))
        return gradients

    def kernel(self, *args: Array) -> Sequence[Array]:
        return run_backward(args, self.decay, self.delta, self.scale, self.heads, self.interpret, self.chunk)


def _gates(decay: str, delta: bool) -> tuple[str, ...]:
    """The dimensions of g and of beta, those that there are."""
    return (*{"none": (), "head": ("bnt",), "channel": ("bntd",)}[decay], *("bnt",) * delta)


def plain(
    decay: str, delta: bool, scale: float, chunk: int, args: Sequence[Array]
) -> tuple[Array, Array, Array]:
    """The recurrence step by step, in float32: o, the final state, and the state that enters each chunk."""
    q, k, v, *gates, initial = args
    t = q.shape[2]
    size = sizes_of(q.shape, v.shape[3], chunk, 1).chunk
    count = -(-t // size)

    def steps(x: Array) -> Array:
        """[b, n, t, ...] -> [chunks, steps, b, n, ...]; zeros behind leave the state as it is."""
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, 0), (0, count * size - t)] + [(0, 0)] * (x.ndim - 3))
        x = jnp.moveaxis(x, 2, 0)
        return x.reshape(count, size, *x.shape[1:])

    def step(state: Array, now: Sequence[Array]) -> tuple[Array, Array]:
        q, k, v, *gates = now
        if decay != "none":
            g, *gates = gates
            state = state * jnp.exp(g[..., None] if decay == "channel" else g[..., None, None])
        if delta:
            v = gates[0][..., None] * (v - jnp.einsum("bnde,bnd->bne", state, k))
        state = state + k[..., :, None] * v[..., None, :]
        return state, scale * jnp.einsum("bnde,bnd->bne", state, q)

    @jax.checkpoint
    def a_chunk(state: Array, now: Sequence[Array]) -> tuple[Array, tuple[Array, Array]]:
        after, out = jax.lax.scan(step, state, now)
        return after, (out, state.astype(q.dtype))

    final, (out, states) = jax.lax.scan(a_chunk, initial, [steps(x) for x in (q, k, v, *gates)])
    out = jnp.moveaxis(out.reshape(count * size, *out.shape[2:])[:t], 0, 2).astype(v.dtype)
    return out, final, jnp.moveaxis(states, 0, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recurrence(op: RecurrenceForward, args: tuple[Array, ...]) -> tuple[Array, Array]:
    out, final = apply(op, *args)
    return out, final


def _forwards(
    op: RecurrenceForward, args: tuple[Array, ...]
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, final, states = (
        checkpoint_name(x, "context") for x in apply(dataclasses.replace(op, keep=True), *args)
    )
    return (out, final), (*args[:-1], states)


def _backwards(
    op: RecurrenceForward, kept: tuple[Array, ...], gradients: tuple[Array, Array]
) -> tuple[tuple[Array, ...]]:
    back = RecurrenceBackward(op.decay, op.delta, op.scale, op.chunk, op.heads, op.interpret)
    return (tuple(apply(back, *kept, *gradients)),)


_recurrence.defvjp(_forwards, _backwards)


def recurrence(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    initial: Array | None = None,
    *,
    scale: float = 1.0,
    chip: str = "v5e",
    chunk: int | None = None,
    heads: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """o [b, n, t, e], in v's dtype, and the final state [b, n, d, e], float32; differentiable in every array.

    q, k: [b, n, t, d]. v: [b, n, t, e]. g: log decay, at most 0, [b, n, t, d] or [b, n, t]. beta: [b, n, t];
    none: no delta rule. initial: the state before the first step, [b, n, d, e]. chip: whose table chunk and
    heads are of.
    """
    decay = "none" if g is None else "channel" if g.ndim == 4 else "head"
    b, n, _, d = q.shape
    e = v.shape[3]
    steps, side = default_blocks(chip, decay, beta is not None)
    op = RecurrenceForward(decay, beta is not None, scale, chunk or steps, heads or side, False, interpret)
    dtype = jnp.result_type(q, k, v)
    state = jnp.zeros((b, n, d, e), jnp.float32) if initial is None else initial.astype(jnp.float32)
    gates = [x.astype(jnp.float32) for x in (g, beta) if x is not None]
    args = (q.astype(dtype), k.astype(dtype), v.astype(dtype), *gates, state)
    return _recurrence(op, tuple(_varying(x, args) for x in args))


def _varying(x: Array, like: Sequence[Array]) -> Array:
    """In a `shard_map`, x as a value that varies over all axes that any of the others varies over."""
    axes: set[str] = set().union(*(jax.typeof(y).manual_axis_type.varying for y in like))
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
