"""Attention over a length that lies over devices, in a ring: keys and values go round, or queries do.

    hop r: device i has keys of i - r    o_r, lse_r = attention of its own queries and those keys
                                         o, lse     = both put together with those before

Which keys of a part queries of another see is known of every pair, so a hop's work is chosen by the device's
number: nothing (causal, keys of a later part), without a mask, or with the band as it is there. Hops that no
device has work in are not made: a window takes as many as it reaches back. The backward pass takes lse of all
keys. Gradients of what goes round go with it, from the first hop on, added up in float32 and sent in the
dtype of the values; those of a device's own part stay at home.

Source: Liu et al. 2023, Ring Attention with Blockwise Transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.kernels.attention import AttentionForward
from xform.kernels.moving import Axes, number, on, ways
from xform.ops import Band

Segments = tuple[Any, Any] | None


@functools.lru_cache(maxsize=256)
def turns(band: Band, n: int, t: int, s: int, moving: str) -> tuple[tuple[Band | None, ...], ...]:
    """For each hop, and each of n devices, the band of its t queries and s keys; None: nothing is seen.

    moving: "keys", which at hop r are those of the device r places before; or "queries", r places after.
    """

    def at(hop: int, device: int) -> Band | None:
        queries, keys = (device, (device - hop) % n) if moving == "keys" else ((device + hop) % n, device)
        return band.moved(queries * t, keys * s).simplified(t, s)

    found = [tuple(at(hop, device) for device in range(n)) for hop in range(n)]
    while len(found) > 1 and not any(found[-1]):
        found.pop()
    return tuple(found)


def forward(
    op: AttentionForward, by_kernel: bool, axes: Axes, q: Any, k: Any, v: Any, sinks: Any, segments: Segments
) -> tuple[Any, Any]:
    """out and lse of a device's queries."""
    own, keyed = segments or (None, None)
    shape = (*q.shape[:4], v.shape[-1])
    out, lse = jnp.zeros(shape, jnp.float32), jnp.full(shape[:4], -jnp.inf, jnp.float32)
    for hop, bands in enumerate(turns(op.band, ways(axes), q.shape[3], k.shape[2], "keys")):
        if hop:  # else the compiler makes all hops before the first block: work has no cost to it
            (k, v, keyed), (out, lse) = jax.lax.optimization_barrier((on((k, v, keyed), axes), (out, lse)))

        def block(band: Band | None, hop: int = hop, k: Any = k, v: Any = v, keyed: Any = keyed) -> Any:
            if band is None:
                return jnp.zeros(shape, jnp.float32), jnp.full(shape[:4], -jnp.inf, jnp.float32)
            sunk = sinks if hop == 0 else None
            part = dataclasses.replace(op, band=band, sinks=sunk is not None, complete=False)
            made, lse = part.run(by_kernel, q, k, v, sunk, None if own is None else (own, keyed))
            return made.astype(jnp.float32), lse

        out, lse = _together(out, lse, *_chosen(bands, axes, block))
    return out.astype(q.dtype), lse


def backward(
    op: AttentionForward,
    by_kernel: bool,
    axes: Axes,
    q: Any,
    k: Any,
    v: Any,
    segments: Segments,
    lse: Any,
    delta: Any,
    dout: Any,
    moving: str,
) -> tuple[Any, Any, Any]:
    """dq, dk and dv of a device's queries and keys; moving: "keys" or "queries", what goes round."""
    asked, keyed = segments or (None, None)
    keys = moving == "keys"
    rows, columns = (q, asked, lse, delta, dout), (k, v, keyed)
    home, gone = [jnp.zeros(x.shape, jnp.float32) for x in ((q,) if keys else (k, v))], None
    table, by = turns(op.band, ways(axes), q.shape[3], k.shape[2], moving), 1 if keys else -1
    for hop, bands in enumerate(table):
        if hop:
            sent = on(columns if keys else rows, axes, by)
            gone = gone if gone is None else _on_sums(gone, (k, v) if keys else (q,), axes, by)
            sent, home, gone = jax.lax.optimization_barrier((sent, home, gone))
            rows, columns = (rows, sent) if keys else (sent, columns)

        def block(band: Band | None, rows: Any = rows, columns: Any = columns) -> Any:
            (q, asked, lse, delta, dout), (k, v, keyed) = rows, columns
            if band is None:
                return [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
            part = dataclasses.replace(op, band=band, complete=False).backward
            given = None if asked is None else (asked, keyed)
            made = part.run(by_kernel, q, k, v, given, lse, delta, dout)
            return [x.astype(jnp.float32) for x in made]

        made = _chosen(bands, axes, block)
        stays, goes = (made[:1], made[1:]) if keys else (made[1:], made[:1])
        home = _added(home, stays)
        if hop == 0:
            first = goes
        else:
            gone = goes if gone is None else _added(gone, goes)
    if gone is not None:
        first = _added(first, _on_sums(gone, (k, v) if keys else (q,), axes, -by * (len(table) - 1)))
    dq, dk, dv = (*home, *first) if keys else (*first, *home)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _on_sums(sums: Sequence[Any], like: Sequence[Any], axes: Axes, by: int) -> list[Any]:
    """Sums of the device so many places before, which are sent in the dtypes of the values they are of."""
    sent = on([x.astype(y.dtype) for x, y in zip(sums, like, strict=True)], axes, by)
    return [x.astype(jnp.float32) for x in sent]


def _added(sums: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    return [x + y for x, y in zip(sums, more, strict=True)]


def _chosen(bands: Sequence[Band | None], axes: Axes, block: Callable[[Band | None], Any]) -> Any:
    """`block` of the band of this device, of those of all."""
    kinds = list(dict.fromkeys(bands))
    if len(kinds) == 1:
        return block(kinds[0])
    here = number(axes)
    kind = sum(jnp.where(here == i, kinds.index(band), 0) for i, band in enumerate(bands))
    return jax.lax.switch(kind, [functools.partial(block, band) for band in kinds])


def _together(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[Any, Any]:
    """Attention over two sets of keys, of that over each."""
    both = jnp.logaddexp(lse, more_lse)
    known = jnp.where(both == -jnp.inf, 0.0, both)
    first, second = (jnp.exp(each - known)[..., None] for each in (lse, more_lse))
    return first * out + second * more, both
