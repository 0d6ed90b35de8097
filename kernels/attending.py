"""Attention as splash attention: which fits, and how masks become its own.

A mask by position is a `Band`; what else is hidden, padding and other segments, becomes numbers of segments.
A query that may see no key gets afterwards what the program has for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import Decline
from xform.kernels import splash, tokamax
from xform.kernels.attention import AttentionForward, attention_and_lse
from xform.kernels.blocks import Blocks
from xform.kernels.lowered import Lowered, Options, checked, value
from xform.kernels.tokamax_masks import is_native
from xform.ops import Band
from xform.raising.canonical import arranged, back
from xform.raising.flat import dtype_of
from xform.raising.lettering import OWN
from xform.raising.meaning import Attention, Chosen, Raised, Tensor
from xform.trace import Value, Var

SOFT = -1e6
"""A finite number that is added to the logits of unseen keys hides them from queries that see others; where
it is larger than this, a query that sees none still tells keys apart."""


def attended(r: Raised, options: Options) -> list[Lowered]:
    """Attention by splash attention: masks by position and by segments, soft cap, grouped heads, sinks; by
    tokamax's, where it is asked for, masks that are data too.
    """
    m = r.meaning
    assert isinstance(m, Attention)
    masked = _Masked(m, whole=options.library == "tokamax")
    if m.bias:
        raise Decline(f"{' and '.join(m.bias_kinds) or 'bias'} on the logits, which the kernel does not take")
    if m.dropout:
        raise Decline("dropout on the weights, which the kernel does not take")
    if set(r.sizes) & set(OWN) - set("sde"):
        raise Decline(
            "its keys, or the width of its heads, lie in several dimensions or are a sum of several"
        )
    sizes = {"n": 1, "g": 1, "t": 1, "s": 1, "d": 1, "e": 1, **r.sizes}
    short = {"queries": sizes["t"], "keys": sizes["s"]}
    for what, size in short.items():
        if size < options.shortest:
            raise Decline(f"{size} {what}, fewer than kernels.shortest = {options.shortest}")
    batch = "".join(c for c in r.sizes if c not in "ngtsde")
    lengths = sizes["t"], sizes["s"]
    empty = masked.may_be_empty(*lengths)
    if empty and m.mask.uneven:
        raise Decline("a query that may see no key tells keys apart by what hides them")
    if empty and m.mask.added and m.mask.filled > SOFT:
        raise Decline(f"a query that sees no key would see all, since the mask adds only {m.mask.filled:g}")
    if empty and m.mask.added and m.cap is not None:
        raise Decline("a query that may see no key moves its capped scores, to which the mask is added")
    kind = jnp.result_type(*(dtype_of(t.atom) for t in (m.q, m.k, m.v)))
    rows = jax.ShapeDtypeStruct((1, sizes["n"], sizes["g"], sizes["t"], sizes["d"]), kind)
    values_ = jax.ShapeDtypeStruct((1, sizes["n"], sizes["s"], sizes["e"]), kind)
    op = AttentionForward(
        band=masked.band,
        scale=m.scale,
        cap=m.cap,
        sinks=m.sinks is not None,
        complete=not empty,
        chip=options.chip,
        interpret=options.interpret,
    )
    by = _by_tokamax if options.library == "tokamax" else _by_splash
    if options.library == "none":
        by = _plainly
    call = by(r, op, masked, options, rows, values_)
    takes = [t.atom for t in masked.tensors if isinstance(t.atom, Var)]
    if any(v not in r.view.makers and v not in r.view.jaxpr.all_invars for v in takes):
        raise Decline("its mask is made outside of the body that it stands in")
    if m.more:
        raise Decline("its logits are the sum of several products")
    assert isinstance(m.out.atom, Var)
    out_var: Var = m.out.atom

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        def of(tensor: Tensor, *order: str) -> Value:
            return arranged(value(tensor, values), tensor.dims, order, sizes)

        q, k, v = of(m.q, batch, *"ngtd"), of(m.k, batch, *"nsd"), of(m.v, batch, *"nse")
        q, k, v = (x.astype(kind) for x in (q, k, v))
        segments = masked.segments(
            lambda tensor, letter: of(tensor, batch, letter),
            (q.shape[0], sizes["t"]),
            (q.shape[0], sizes["s"]),
        )
        sinks = None if m.sinks is None else of(m.sinks, *"ng")
        out, lse = call(q, k, v, sinks, segments, masked.array(of, batch))
        if empty:
            out = masked.filled(out, lse, q, k, v)
        out = back(out, (batch, *"ngte"), m.out.dims, sizes)
        return {out_var: out.astype(dtype_of(out_var))}

    whys = {"jax": "splash attention", "none": "plainly"}
    why = whys.get(options.library) or masked.by_tokamax
    return [Lowered(tuple(dict.fromkeys(takes)), (out_var,), emit, why)]


def _by_splash(
    r: Raised, op: AttentionForward, masked: _Masked, options: Options, q: Any, v: Any
) -> Callable[..., Any]:
    """The call of JAX's kernels, for values of the types of q and v."""
    blocks: Any = dict(checked(options, r.op, [f.name for f in dataclasses.fields(Blocks)]))
    op = dataclasses.replace(op, blocks=Blocks(**blocks))
    splash.check(q, v, masked.has_segments, options.chip, op.blocks)

    def call(q: Value, k: Value, v: Value, sinks: Value, segments: tuple[Value, ...], array: Value) -> Any:
        del array  # none
        return attention_and_lse(dataclasses.replace(op, segments=bool(segments)), q, k, v, sinks, *segments)

    return call


def _plainly(
    r: Raised, op: AttentionForward, masked: _Masked, options: Options, q: Any, v: Any
) -> Callable[..., Any]:
    """The call of the operation without a kernel."""
    del r, masked, options, q, v
    op = dataclasses.replace(op, plainly=True)

    def call(q: Value, k: Value, v: Value, sinks: Value, segments: tuple[Value, ...], array: Value) -> Any:
        del array  # none
        return attention_and_lse(dataclasses.replace(op, segments=bool(segments)), q, k, v, sinks, *segments)

    return call


def _by_tokamax(
    r: Raised, op: AttentionForward, masked: _Masked, options: Options, q: Any, v: Any
) -> Callable[..., Any]:
    """The call of tokamax's kernels, for values of the types of q and v."""
    if str(q.dtype) not in tokamax.DTYPES:
        raise Decline(f"tokamax's kernel takes {' and '.join(tokamax.DTYPES)}, these are {q.dtype}")
    blocks = tokamax.blocks_of(checked(options, r.op, tokamax.BLOCKS))
    by = tokamax.TokamaxForward(
        dataclasses.replace(op, blocks=blocks), "bts" if masked.whole or masked.pairs else ""
    )
    tokamax.check(by, q, v)

    def call(q: Value, k: Value, v: Value, sinks: Value, segments: tuple[Value, ...], array: Value) -> Any:
        return tokamax.attention(by, q, k, v, sinks, segments or None, array)

    return call


class _Masked:
    """The mask of an attention as segments, queries see keys of the same one, and, where `whole` is taken, an
    array of what is data for each query and key.
    """

    def __init__(self, m: Attention, whole: bool = False) -> None:
        self.m = m
        if not whole and (m.mask.band is None or m.mask.table):
            raise Decline("its mask by position is no band, chunk or prefix")
        self.band = m.mask.band or Band()
        self.whole: list[Tensor] = []
        for each in m.mask.chosen:
            letters = set("".join(each.dims))
            if letters & {"n", "g"}:
                raise Decline("its mask differs by head")
            if {"t", "s"} <= letters:
                if not whole:
                    raise Decline("its mask is data for each query and key")
                self.whole.append(each)
        self.pairs = m.mask.segments[1:]
        if self.pairs and not whole:
            raise Decline("two kinds of segments at once")
        others = [c for c in m.mask.chosen if c not in self.whole]
        self.keys = [c for c in others if "t" not in "".join(c.dims)]
        self.queries = [c for c in others if "t" in "".join(c.dims)]

    @property
    def has_segments(self) -> bool:
        return bool(self.m.mask.segments or self.keys or self.queries)

    @property
    def by_tokamax(self) -> str:
        made = self.whole or self.pairs or not is_native(self.band)
        return f"tokamax's splash attention{', its mask an array of queries x keys' if made else ''}"

    @property
    def tensors(self) -> list[Tensor]:
        m = self.m
        pairs = [each for pair in m.mask.segments for each in pair]
        return [m.q, m.k, m.v, *m.mask.chosen, *pairs, *([m.sinks] if m.sinks else [])]

    def may_be_empty(self, queries: int, keys: int) -> bool:
        """Whether there may be a query that sees no key."""
        band = self.band
        if self.m.sinks is not None:
            return False  # it sees the sink
        if self.m.mask.chosen or not band.sees_some(queries, keys):
            return True
        if not self.m.mask.segments:
            return False
        (q, k), at = self.m.mask.segments[0], np.arange(queries)
        own = q.atom is k.atom and queries == keys
        return not (own and bool(band.allowed(at, at).all()))

    def segments(
        self, of: Callable[[Tensor, str], Value], queries: tuple[int, int], keys: tuple[int, int]
    ) -> tuple[Value, ...]:
        """The segments of queries [b, t] and keys [b, s], arrays of these shapes, or nothing.

        They are those of the program; what its mask leaves out is in a segment of its own.
        """
        if not self.has_segments:
            return ()
        if self.m.mask.segments:
            q, k = self.m.mask.segments[0]
            own, others = of(q, "t").astype(jnp.int32), of(k, "s").astype(jnp.int32)
        else:
            own, others = jnp.zeros(queries, jnp.int32), jnp.zeros(keys, jnp.int32)
        least = np.iinfo(np.int32).min
        for each in self.keys:
            others = jnp.where(_holds(each, of(each, "s")), others, least)
        for each in self.queries:
            own = jnp.where(_holds(each, of(each, "t")), own, least + 1)
        return own, others

    def array(self, of: Callable[..., Value], batch: str) -> Value:
        """Booleans [b, t, s], or [t, s] where they are the same for the batch; None: all are segments."""
        lead = (batch,) if self.pairs or any(set("".join(c.dims)) & set(batch) for c in self.whole) else ()
        seen = [_holds(each, of(each, *lead, *"ts")) for each in self.whole]
        seen += [of(q, batch, "t")[:, :, None] == of(k, batch, "s")[:, None, :] for q, k in self.pairs]
        return functools.reduce(jnp.logical_and, seen) if seen else None

    def filled(self, out: Value, lse: Value, q: Value, k: Value, v: Value) -> Value:
        """The result, [b, n, g, t, e], with what the program has for queries that see no key: its logits are
        all alike there, so that it takes the mean of the values; or they are all -inf, and so is nothing a
        number. Where the mask is added, scores are lost in it, but their derivative is not: that of a softmax
        whose weights are all alike.
        """
        none = jnp.isneginf(lse)[..., None]
        if np.isneginf(self.m.mask.filled):
            return jnp.where(none, jnp.nan, out)
        wide = v.astype(jnp.float32)
        mean = jnp.mean(wide, axis=2, keepdims=True)
        made = mean[:, :, None]
        if self.m.mask.added:
            apart = jax.lax.stop_gradient(wide - mean) * (self.m.scale / v.shape[2])
            inner = jnp.einsum("bnsd,bnse->bnde", k.astype(jnp.float32), apart)
            moves = jnp.einsum("bngtd,bnde->bngte", q.astype(jnp.float32), inner)
            made = made + moves - jax.lax.stop_gradient(moves)
        return jnp.where(none, made.astype(out.dtype), out)


def _holds(chosen: Tensor, x: Value) -> Value:
    """Where a value lets keys be seen."""
    if not isinstance(chosen, Chosen):
        return x != 0
    if chosen.above is not None:
        return x.astype(jnp.float32) * chosen.factor > chosen.above
    return (x != 0) != chosen.negated
