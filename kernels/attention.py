"""Attention as two operations, forward and backward, that run as the splash kernels which JAX ships.

    logits = scale * q . k        s   the kernel, a block of queries against a block of keys at a time:
    out = softmax(logits) . v    ->   out, and for the backward pass lse = log sum exp logits

Queries are [b, n, g, t, d]: n heads of keys and values, g heads of queries each; keys [b, n, s, d], values
[b, n, s, e]. Which keys a query sees is a `Band` of positions, and, where there are segments, those of the
same segment; numbers of segments are data, so padding is a segment of its own. A query that sees no key has
out = 0 and lse = -inf, and takes no part in gradients. `sinks` is a logit more for each head, with no value.

The plain form is the reference: the same numbers, in float32, with the scores whole. `kernels.splash` has
the kernel's form, `kernels.blocks` its sizes. Out and lse are named "context": where both are saved,
recomputing a layer does not run the kernel again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from xform.kernels import splash
from xform.kernels.blocks import Blocks
from xform.kernels.splash import Shift
from xform.ops import Band, Operation, apply

CONTEXT = "context"
"""The name under which what the kernel computes can be saved."""


@dataclasses.dataclass(frozen=True)
class AttentionForward:
    """q, k, v, [sinks], [q_segments, kv_segments] -> out, lse.

    scale: of the product of q and k; cap: c of c * tanh(x / c), after it. segments, sinks: whether there are
    such operands: int32 [b, t] and [b, s], and [n, g]. complete: each query is known to see a key (with
    segments that cannot be read off the program); a promise, for which nothing is done about those that see
    none. chip: "v5e", "v5p", "v6e", ...: which the blocks are for. blocks: sizes other than the table's.
    plainly: there is no kernel, on a TPU neither.
    """

    band: Band = dataclasses.field(default_factory=Band)
    scale: float = 1.0
    cap: float | None = None
    segments: bool = False
    sinks: bool = False
    complete: bool = False
    chip: str = ""
    blocks: Blocks = dataclasses.field(default_factory=Blocks)
    interpret: bool = False
    plainly: bool = False

    @property
    def name(self) -> str:
        return "attention"

    @property
    def backward(self) -> AttentionBackward:
        return AttentionBackward(self)

    @property
    def operands(self) -> tuple[str, ...]:
        return ("bngtd", "bnsd", "bnse", *(("ng",) * self.sinks), *(("bt", "bs") if self.segments else ()))

    @property
    def results(self) -> tuple[str, ...]:
        return ("bngte", "bngt")

    @property
    def cut(self) -> str:
        return "bng"

    def named(self, args: Sequence[Any]) -> tuple[Any, Any, Any, Any, tuple[Any, Any] | None]:
        """q, k, v, sinks or None, segments or None."""
        q, k, v, *rest = args
        sinks = rest.pop(0) if self.sinks else None
        return q, k, v, sinks, (rest[0], rest[1]) if self.segments else None

    def plain(self, *args: Any) -> tuple[Any, Any]:
        return plain_forward(self, *self.named(args))

    def kernel(self, *args: Any) -> tuple[Any, Any]:
        return self.run(True, *self.named(args))

    def run(
        self,
        by_kernel: bool,
        q: Any,
        k: Any,
        v: Any,
        sinks: Any,
        segments: tuple[Any, Any] | None,
        shift: Shift | None = None,
    ) -> tuple[Any, Any]:
        """out and lse, by the kernel or in plain JAX; shift: where the queries stand, in place of the band's
        offset.
        """
        if self.plainly or not by_kernel:
            return plain_forward(self, q, k, v, sinks, segments, shift=shift)
        return splash.forward(
            q,
            k,
            v,
            sinks,
            segments,
            band=self.band,
            scale=self.scale,
            cap=self.cap,
            complete=self.complete,
            chip=self.chip,
            blocks=self.blocks,
            interpret=self.interpret,
            shift=shift,
        )


@dataclasses.dataclass(frozen=True)
class AttentionBackward:
    """q, k, v, [q_segments, kv_segments], lse, delta, dout -> dq, dk, dv.

    delta [b, n, g, t]: the sum over e of out * dout, less the gradient of lse. The gradient of the sinks
    follows from lse and delta alone (`attention`), which is why they are no operand.
    """

    forward: AttentionForward

    @property
    def name(self) -> str:
        return "attention_backward"

    @property
    def operands(self) -> tuple[str, ...]:
        segments = ("bt", "bs") if self.forward.segments else ()
        return ("bngtd", "bnsd", "bnse", *segments, "bngt", "bngt", "bngte")

    @property
    def results(self) -> tuple[str, ...]:
        return ("bngtd", "bnsd", "bnse")

    @property
    def cut(self) -> str:
        return "bn"

    @property
    def interpret(self) -> bool:
        return self.forward.interpret

    def named(self, args: Sequence[Any]) -> tuple[Any, Any, Any, tuple[Any, Any] | None, Any, Any, Any]:
        """q, k, v, segments or None, lse, delta, dout."""
        q, k, v, *segments, lse, delta, dout = args
        return q, k, v, (segments[0], segments[1]) if segments else None, lse, delta, dout

    def plain(self, *args: Any) -> tuple[Any, Any, Any]:
        return plain_backward(self.forward, *self.named(args))

    def kernel(self, *args: Any) -> tuple[Any, Any, Any]:
        return self.run(True, *self.named(args))

    def run(
        self,
        by_kernel: bool,
        q: Any,
        k: Any,
        v: Any,
        segments: tuple[Any, Any] | None,
        lse: Any,
        delta: Any,
        dout: Any,
        shift: Shift | None = None,
    ) -> tuple[Any, Any, Any]:
        """dq, dk and dv, as `AttentionForward.run`."""
        op = self.forward
        if op.plainly or not by_kernel:
            return plain_backward(op, q, k, v, segments, lse, delta, dout, shift=shift)
        return splash.backward(
            q,
            k,
            v,
            segments,
            lse,
            delta,
            dout,
            band=op.band,
            scale=op.scale,
            cap=op.cap,
            chip=op.chip,
            blocks=op.blocks,
            interpret=op.interpret,
            shift=shift,
        )


# ---------------------------------------------------------------- in plain JAX


def plain_forward(
    op: AttentionForward,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    segments: tuple[Any, Any] | None,
    mask: Any = None,
    shift: Shift | None = None,
) -> tuple[Any, Any]:
    """out and lse. mask: booleans besides, [t, s] or [b, t, s], for kernels that take them."""
    logits = _capped(_logits(op, q, k), op.cap)
    seen = seen_of(op.band, segments, mask, q.shape[-2], k.shape[-2], shift)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    most = jnp.max(logits, -1, keepdims=True)
    if sinks is not None:
        sunk = sinks.astype(jnp.float32)[None, :, :, None, None]
        most = jnp.maximum(most, sunk)
    most = jnp.where(most == -jnp.inf, 0.0, most)
    weights = jnp.exp(logits - most)
    total = jnp.sum(weights, -1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sunk - most)
    out = jnp.einsum("bngts,bnse->bngte", weights, v.astype(jnp.float32))
    out = out / jnp.where(total == 0, 1.0, total)
    return out.astype(q.dtype), (most + jnp.log(total))[..., 0]


def plain_backward(
    op: AttentionForward,
    q: Any,
    k: Any,
    v: Any,
    segments: tuple[Any, Any] | None,
    lse: Any,
    delta: Any,
    dout: Any,
    mask: Any = None,
    shift: Shift | None = None,
) -> tuple[Any, Any, Any]:
    """dq, dk and dv."""
    wide = dout.astype(jnp.float32)
    uncapped = _logits(op, q, k)
    logits = _capped(uncapped, op.cap)
    seen = seen_of(op.band, segments, mask, q.shape[-2], k.shape[-2], shift)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None])
    dv = jnp.einsum("bngts,bngte->bnse", weights, wide)
    dlogits = weights * (jnp.einsum("bngte,bnse->bngts", wide, v.astype(jnp.float32)) - delta[..., None])
    if op.cap is not None:
        dlogits *= 1 - jnp.tanh(uncapped / op.cap) ** 2
    dlogits *= op.scale
    dq = jnp.einsum("bngts,bnsd->bngtd", dlogits, k.astype(jnp.float32))
    dk = jnp.einsum("bngts,bngtd->bnsd", dlogits, q.astype(jnp.float32))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def seen_of(
    band: Band, segments: tuple[Any, Any] | None, mask: Any, t: int, s: int, shift: Shift | None = None
) -> Any:
    """Which keys each query sees, booleans that broadcast to the logits; None: all."""
    seen = None
    if not band.is_full:
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (t, s), axis) for axis in (0, 1))
        if shift is not None:
            rows, band = shift.positions(t)[:, None], dataclasses.replace(band, offset=0)
        seen = band.allowed(rows, columns)
    if segments is not None:
        same = (segments[0][:, :, None] == segments[1][:, None, :])[:, None, None]
        seen = same if seen is None else seen & same
    if mask is not None:
        whole = mask if mask.ndim == 2 else mask[:, None, None]
        seen = whole if seen is None else seen & whole
    return seen


def _logits(op: AttentionForward, q: Any, k: Any) -> Any:
    return op.scale * jnp.einsum("bngtd,bnsd->bngts", q.astype(jnp.float32), k.astype(jnp.float32))


def _capped(logits: Any, cap: float | None) -> Any:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


# ---------------------------------------------------------------- differentiated


class Differentiated(Operation, Protocol):
    """An operation of the operands and results of `AttentionForward`, and that which gives its gradients."""

    @property
    def backward(self) -> Operation: ...


def attention(
    op: AttentionForward,
    q: Any,
    k: Any,
    v: Any,
    *,
    q_segments: Any = None,
    kv_segments: Any = None,
    sinks: Any = None,
) -> Any:
    """out [b, n, g, t, e] of the operation, with its own rule of differentiation."""
    op = dataclasses.replace(op, segments=q_segments is not None, sinks=sinks is not None)
    segments = () if q_segments is None else (q_segments, kv_segments)
    return attention_and_lse(op, q, k, v, sinks, *segments)[0]


def attention_and_lse(
    op: Differentiated,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any = None,
    q_segments: Any = None,
    kv_segments: Any = None,
) -> tuple[Any, Any]:
    """out and lse of the operation, both differentiable: attention over parts of the keys can be put together
    from both of each part.
    """
    out, lse = _attention(op, *alike(q, k, v, sinks, q_segments, kv_segments))
    return out, lse


def alike(*args: Any) -> tuple[Any, ...]:
    """Arrays, or None, that vary alike. Inside a shard_map: what is the same on all devices has a gradient
    that is summed over them.
    """
    axes: set[Any] = set().union(*(_varying(x) for x in args if x is not None))

    def one(x: Any) -> Any:
        missing = () if x is None else tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(map(one, args))


def _varying(x: Any) -> frozenset[Any]:
    return jax.typeof(x).manual_axis_type.varying  # type: ignore[no-any-return]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(op: Differentiated, *args: Any) -> tuple[Any, Any]:
    return forward(op, *args)[0]


def forward(op: Operation, *args: Any) -> tuple[Any, Any]:
    """(out, lse), by their name, and what the backward pass takes: the arguments, of which some are None, and
    both.
    """
    out, lse = apply(op, *(x for x in args if x is not None))
    out, lse = checkpoint_name(out, CONTEXT), checkpoint_name(lse, CONTEXT)
    return (out, lse), (*args, out, lse)


def _backward(op: Differentiated, kept: Any, given: Any) -> tuple[Any, ...]:
    q, k, v, sinks, q_segments, kv_segments, out, lse = kept
    dout, dlse = given
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    segments = () if q_segments is None else (q_segments, kv_segments)
    dq, dk, dv = apply(op.backward, q, k, v, *segments, lse, delta, dout)
    dsinks = None
    if sinks is not None:
        shares = jnp.exp(sinks.astype(jnp.float32)[None, :, :, None] - lse)
        dsinks = -jnp.sum(shares * delta, (0, 3)).astype(sinks.dtype)
    return dq, dk, dv, dsinks, None, None


_attention.defvjp(forward, _backward)
