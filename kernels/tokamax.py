"""Attention by tokamax's splash attention (an extra): masks that are data too, which JAX's own does not take.

    q [b, n, g, t, d]         ->   q [heads, rows, d] of each row of the batch, scaled, padded to whole blocks
    a Band and a mask [b, t, s] -> causal, or one array of booleans; blocks that hold no key are not visited
    out, lse of all rows      <-   0 and -inf where a row sees nothing

`tokamax.ops.experimental.tpu.SplashAttention` descends from the kernel that JAX ships, and takes what that
takes: no bias on the logits, and one mask for all heads. Beyond it, a mask may be an array that is computed
when the program runs. So all but causal masks are one here, of queries x keys bytes, for each row of the
batch where it depends on that; segments stay numbers. Its forward and backward kernels are called apart, as
operations: the second is the op's `vjp`, which takes the result in place of the sum `delta`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from xform.errors import PlanError
from xform.kernels.attention import (
    AttentionForward,
    alike,
    forward,
    plain_backward,
    plain_forward,
)
from xform.kernels.blocks import LANES, Blocks, Shape, Sizes, backward_sizes, forward_sizes
from xform.kernels.tokamax_masks import Seen, is_native, pad, sees_some
from xform.ops import apply
from xform.trace import without_vma

OPERATIONS = ("attention", "experts")
"""What may be asked of tokamax."""

BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
"""The sizes of blocks that its kernels have: the backward pass is one kernel."""

DTYPES = ("bfloat16", "float32")
"""What they multiply."""

UNSEEN = -1e30
"""What the kernels take for the logit of a key that is not seen."""

REDUCED = 3
"""The kernel writes sums of dq for each block of keys, or adds them up into so many."""


def required(option: str) -> None:
    """Raises PlanError, naming the option, where tokamax is not installed."""
    try:
        import tokamax  # noqa: F401
    except ImportError as error:
        why = f"tokamax cannot be imported ({error}): pip install 'xform[tokamax]'"
        raise PlanError(f"{option}: {why}") from None


@dataclasses.dataclass(frozen=True)
class TokamaxForward:
    """q, k, v, [sinks], [q_segments, kv_segments], [mask] -> out, lse.

    of: the attention without the mask. mask: the dimensions of an array of booleans, true where a query sees
    a key: "ts" or "bts"; "": none.
    """

    of: AttentionForward
    mask: str = ""

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.of.operands, *((self.mask,) if self.mask else ()))

    @property
    def results(self) -> tuple[str, ...]:
        return self.of.results

    @property
    def cut(self) -> str:
        return self.of.cut

    @property
    def interpret(self) -> bool:
        return self.of.interpret

    def named(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """q, k, v, sinks or None, segments or None, mask or None."""
        last = len(args) - bool(self.mask)
        return (*self.of.named(args[:last]), args[last] if self.mask else None)

    def plain(self, *args: Any) -> tuple[Any, Any]:
        return plain_forward(self.of, *self.named(args))

    def kernel(self, *args: Any) -> tuple[Any, Any]:
        q, k, v, sinks, segments, mask = self.named(args)
        op, (t, s) = self.of, (q.shape[3], k.shape[2])
        sizes = forward_sizes(_shape(self, q, v), op.chip, op.blocks)
        seen = Seen(op.band, mask, segments, (t, s), sizes)
        flash, given = _tokamax(), _options(op)
        heads = () if sinks is None else (jnp.tile(sinks.astype(jnp.float32).reshape(1, -1), (len(q), 1)),)

        def one(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
            given_ = given | seen.options(flash, *rest[len(heads) :]) | {"sinks": rest[0] if heads else None}
            config = flash.bind(q, k, v, **given_).heuristics_config
            blocks = {"block_q": sizes.q, "block_kv": sizes.kv, "block_kv_compute": sizes.kv_compute}
            run = flash.replace(config=dataclasses.replace(config, **blocks))
            out, (_, lse) = run(q, k, v, return_residuals=True, **given_)
            return out, lse

        args = (_rows(_scaled(q, op.scale), sizes), *_keys(k, v, sizes), *heads)
        with _interpreted(op.interpret), without_vma():
            out, lse = seen.each(one, args)
        out, lse = (x[:, :, :t].reshape(*q.shape[:4], *x.shape[3:]) for x in (out, lse))
        some = None
        if sinks is None and not (op.complete and mask is None):
            some = sees_some(op.band, segments, mask, t, s)
        if some is not None:  # blocks without a key are not visited, and what is there is not written
            some = jnp.broadcast_to(some, lse.shape)
            out, lse = jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf)
        return out, lse


@dataclasses.dataclass(frozen=True)
class TokamaxBackward:
    """q, k, v, [q_segments, kv_segments], [mask], out, lse, dout -> dq, dk, dv.

    The gradient of sinks follows from out, lse and dout, so that they are no operand.
    """

    forward: TokamaxForward

    @property
    def name(self) -> str:
        return "attention_backward"

    @property
    def operands(self) -> tuple[str, ...]:
        segments = ("bt", "bs") if self.forward.of.segments else ()
        mask = (self.forward.mask,) if self.forward.mask else ()
        return ("bngtd", "bnsd", "bnse", *segments, *mask, "bngte", "bngt", "bngte")

    @property
    def results(self) -> tuple[str, ...]:
        return ("bngtd", "bnsd", "bnse")

    @property
    def cut(self) -> str:
        return "bn"

    @property
    def interpret(self) -> bool:
        return self.forward.interpret

    def named(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """q, k, v, segments or None, mask or None, out, lse, dout."""
        q, k, v, *rest, out, lse, dout = args
        mask = rest.pop() if self.forward.mask else None
        return q, k, v, (rest[0], rest[1]) if rest else None, mask, out, lse, dout

    def plain(self, *args: Any) -> tuple[Any, Any, Any]:
        q, k, v, segments, mask, out, lse, dout = self.named(args)
        delta = _delta(out, dout)
        return plain_backward(self.forward.of, q, k, v, segments, lse, delta, dout, mask)

    def kernel(self, *args: Any) -> tuple[Any, Any, Any]:
        q, k, v, segments, mask, out, lse, dout = self.named(args)
        op, (t, s) = self.forward.of, (q.shape[3], k.shape[2])
        sizes = backward_sizes(_shape(self.forward, q, v), op.chip, op.blocks)
        seen = Seen(op.band, mask, segments, (t, s), sizes)
        flash, given = _tokamax(), _options(op)
        vjp: Any = flash.vjp
        config = vjp.config_cls(
            block_q_dkv=sizes.q,
            block_kv_dkv=sizes.kv,
            block_kv_dkv_compute=sizes.kv_compute,
            dq_reduction_steps=REDUCED if sizes.keys // sizes.kv > REDUCED else None,
        )
        run = vjp.replace(config=config, bypass_device_check=True)

        def one(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, *hidden: Any) -> tuple[Any, Any, Any]:
            made = run((lse, lse), out, dout, q, k, v, **(given | seen.options(flash, *hidden)))
            return made["q"], made["k"], made["v"]

        lse = jnp.where(lse == -jnp.inf, 0.0, lse)  # exp(UNSEEN - 0) is 0: what saw nothing has no weights
        rows = (_rows(x, sizes) for x in (out, lse, dout.astype(v.dtype)))
        with _interpreted(op.interpret), without_vma():
            dq, dk, dv = seen.each(one, (_rows(_scaled(q, op.scale), sizes), *_keys(k, v, sizes), *rows))
        dq = _scaled(dq[:, :, :t], op.scale).reshape(q.shape)
        return dq.astype(q.dtype), dk[:, :, :s].astype(k.dtype), dv[:, :, :s].astype(v.dtype)


def check(op: TokamaxForward, q: Any, v: Any) -> None:
    """For values of the types of q and v: raises PlanError where blocks that a plan has do not fit the chip,
    Decline where no blocks do.
    """
    forward_sizes(_shape(op, q, v), op.of.chip, op.of.blocks)
    backward_sizes(_shape(op, q, v), op.of.chip, op.of.blocks)


# ---------------------------------------------------------------- differentiated


def attention(
    op: TokamaxForward, q: Any, k: Any, v: Any, sinks: Any = None, segments: Any = None, mask: Any = None
) -> tuple[Any, Any]:
    """out [b, n, g, t, e] of the operation, with its own rule of differentiation, and lse, which has none.

    segments: those of queries and of keys. mask: [t, s] or [b, t, s].
    """
    of = dataclasses.replace(op.of, sinks=sinks is not None, segments=segments is not None)
    op = TokamaxForward(of, "" if mask is None else "bts"[3 - mask.ndim :])
    own, others = (None, None) if segments is None else segments
    out, lse = _attention(op, *alike(q, k, v, sinks, own, others, mask))
    return out, jax.lax.stop_gradient(lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(op: TokamaxForward, *args: Any) -> tuple[Any, Any]:
    return forward(op, *args)[0]


def _backward(op: TokamaxForward, kept: Any, given: Any) -> tuple[Any, ...]:
    q, k, v, sinks, own, others, mask, out, lse = kept
    dout, _ = given
    hidden = [x for x in (own, others, mask) if x is not None]
    dq, dk, dv = apply(TokamaxBackward(op), q, k, v, *hidden, out, lse, dout)
    dsinks = None
    if sinks is not None:
        shares = jnp.exp(sinks.astype(jnp.float32)[None, :, :, None] - lse)
        dsinks = -jnp.sum(shares * _delta(out, dout), (0, 3)).astype(sinks.dtype)
    return dq, dk, dv, dsinks, None, None, None


_attention.defvjp(forward, _backward)


def _delta(out: Any, dout: Any) -> Any:
    return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1)


# ---------------------------------------------------------------- as tokamax takes it


def _tokamax() -> Any:
    """Its operation, for any device: programs are compiled for chips that are not there."""
    from tokamax.ops.experimental import tpu

    return tpu.SplashAttention(bypass_device_check=True)


def _options(op: AttentionForward) -> dict[str, Any]:
    return {"mask_value": UNSEEN, "attn_logits_soft_cap": op.cap}


def _interpreted(interpret: bool) -> Any:
    """Its kernels have no option for the interpreter: Pallas is told, as by `pallas_call(interpret=True)`."""
    return pltpu.force_tpu_interpret_mode(interpret or None)  # type: ignore[arg-type]


def _shape(op: TokamaxForward, q: Any, v: Any) -> Shape:
    """What is to be computed, for the table of blocks: these kernels take rows by the 128."""
    of, size = op.of, jnp.dtype(q.dtype).itemsize
    whole = bool(op.mask) or not is_native(of.band)
    return Shape(max(q.shape[3], LANES), v.shape[2], q.shape[-1], v.shape[-1], size, True, whole)


def _rows(x: Any, sizes: Sizes) -> Any:
    """[b, n, g, t, ...] as [b, n * g, rows, ...]."""
    return pad(x.reshape(x.shape[0], -1, *x.shape[3:]), 2, sizes.rows, 0)


def _keys(k: Any, v: Any, sizes: Sizes) -> tuple[Any, Any]:
    return pad(k, 2, sizes.keys, 0), pad(v, 2, sizes.keys, 0)


def _scaled(x: Any, scale: float) -> Any:
    """scale * x, rounded once."""
    return x if scale == 1.0 else (scale * x.astype(jnp.float32)).astype(x.dtype)


def blocks_of(sizes: Mapping[str, int]) -> Blocks:
    """The blocks of a plan, for one backward kernel."""
    return Blocks(**sizes, use_fused_bwd_kernel=True)
