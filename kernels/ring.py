"""Attention over a length that lies over devices, in a ring: keys and values go round, or queries do.

    hop r: device i has keys of i - r    o_r, lse_r = attention of its own queries and those keys
                                         o, lse     = both put together with those before

Which keys of a part queries of another see is known of every pair, so a hop's work is chosen by the device's
number: nothing (causal, keys of a later part), without a mask, or with the band as it is there; where the
length is balanced (`kernels.balance`), of a half of the queries or of the keys. Hops that no device has work
in are not made: a window takes as many as it reaches back. The backward pass takes lse of all keys. Gradients
of what goes round go with it, from the first hop on, added up in float32 and sent in the dtype of the values;
those of a device's own part stay at home.

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
from xform.kernels.balance import Block, Blocks, Range, blocks
from xform.kernels.moving import Axes, number, on, ways
from xform.ops import Band

Segments = tuple[Any, Any] | None


@functools.lru_cache(maxsize=256)
def turns(
    band: Band, n: int, t: int, s: int, moving: str, balance: str = ""
) -> tuple[tuple[Blocks, ...], ...]:
    """For each hop, and each of n devices, what its t queries see of the s keys there; `balance`: which those
    are.

    moving: "keys", which at hop r are those of the device r places before; or "queries", r places after.
    """

    def at(hop: int, device: int) -> Blocks:
        queries, keys = (device, (device - hop) % n) if moving == "keys" else ((device + hop) % n, device)
        return blocks(balance, band, n, t, s, queries, keys)

    found = [tuple(at(hop, device) for device in range(n)) for hop in range(n)]
    while len(found) > 1 and not any(found[-1]):
        found.pop()
    return tuple(found)


def forward(
    op: AttentionForward,
    by_kernel: bool,
    axes: Axes,
    balance: str,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    segments: Segments,
) -> tuple[Any, Any]:
    """out and lse of a device's queries."""
    own, keyed = segments or (None, None)
    shape = (*q.shape[:4], v.shape[-1])
    out, lse = jnp.zeros(shape, jnp.float32), jnp.full(shape[:4], -jnp.inf, jnp.float32)
    for hop, kinds in enumerate(turns(op.band, ways(axes), q.shape[3], k.shape[2], "keys", balance)):
        if hop:  # else the compiler makes all hops before the first block: work has no cost to it
            (k, v, keyed), (out, lse) = jax.lax.optimization_barrier((on((k, v, keyed), axes), (out, lse)))

        def seen(found: Blocks, hop: int = hop, k: Any = k, v: Any = v, keyed: Any = keyed) -> Any:
            sums = jnp.zeros(shape, jnp.float32), jnp.full(shape[:4], -jnp.inf, jnp.float32)
            for i, block in enumerate(found):
                first = hop == 0 and all(block.queries[0] >= each.queries[1] for each in found[:i])
                sunk = sinks if first else None
                part = dataclasses.replace(op, band=block.band, sinks=sunk is not None, complete=False)
                given = None if own is None else (_of(own, block.queries, 1), _of(keyed, block.keys, 1))
                rows, (seen_k, seen_v) = _of(q, block.queries, 3), (_of(x, block.keys, 2) for x in (k, v))
                made, lse = part.run(by_kernel, rows, seen_k, seen_v, sunk, given)
                made = _in(made.astype(jnp.float32), block.queries, shape[3], 3)
                lse = _in(lse, block.queries, shape[3], 3, -jnp.inf)
                sums = (made, lse) if i == 0 else _together(*sums, made, lse)
            return sums

        out, lse = _together(out, lse, *_chosen(kinds, axes, seen))
    return out.astype(q.dtype), lse


def backward(
    op: AttentionForward,
    by_kernel: bool,
    axes: Axes,
    balance: str,
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
    rows, columns = (q, lse, delta, dout, asked), (k, v, keyed)
    home, gone = [jnp.zeros(x.shape, jnp.float32) for x in ((q,) if keys else (k, v))], None
    table = turns(op.band, ways(axes), q.shape[3], k.shape[2], moving, balance)
    by = 1 if keys else -1
    for hop, kinds in enumerate(table):
        if hop:
            sent = on(columns if keys else rows, axes, by)
            gone = gone if gone is None else _on_sums(gone, (k, v) if keys else (q,), axes, by)
            sent, home, gone = jax.lax.optimization_barrier((sent, home, gone))
            rows, columns = (rows, sent) if keys else (sent, columns)

        def seen(found: Blocks, rows: Any = rows, columns: Any = columns) -> Any:
            sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
            for i, block in enumerate(found):
                made = _backward_of(op, by_kernel, block, rows, columns)
                sums = made if i == 0 else _added(sums, made)
            return sums

        made = _chosen(kinds, axes, seen)
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


def _backward_of(
    op: AttentionForward, by_kernel: bool, block: Block, rows: Sequence[Any], columns: Sequence[Any]
) -> list[Any]:
    """What a block adds to dq, dk and dv. rows: q, lse, delta, dout and segments; columns: k, v, segments."""
    (*whole, asked), (*held, keyed) = rows, columns
    t, s = whole[0].shape[3], held[0].shape[2]
    part = dataclasses.replace(op, band=block.band, complete=False).backward
    given = None if asked is None else (_of(asked, block.queries, 1), _of(keyed, block.keys, 1))
    q, lse, delta, dout = (_of(x, block.queries, 3) for x in whole)
    k, v = (_of(x, block.keys, 2) for x in held)
    dq, dk, dv = (x.astype(jnp.float32) for x in part.run(by_kernel, q, k, v, given, lse, delta, dout))
    return [_in(dq, block.queries, t, 3), _in(dk, block.keys, s, 2), _in(dv, block.keys, s, 2)]


def _of(x: Any, rows: Range, dim: int) -> Any:
    """Some rows along a dimension."""
    return jax.lax.slice_in_dim(x, *rows, axis=dim)


def _in(x: Any, rows: Range, count: int, dim: int, fill: float = 0.0) -> Any:
    """These rows among so many."""
    if rows == (0, count):
        return x
    more = [(0, 0)] * x.ndim
    more[dim] = rows[0], count - rows[1]
    return jnp.pad(x, more, constant_values=fill)


def _on_sums(sums: Sequence[Any], like: Sequence[Any], axes: Axes, by: int) -> list[Any]:
    """Sums of the device so many places before, which are sent in the dtypes of the values they are of."""
    sent = on([x.astype(y.dtype) for x, y in zip(sums, like, strict=True)], axes, by)
    return [x.astype(jnp.float32) for x in sent]


def _added(sums: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    return [x + y for x, y in zip(sums, more, strict=True)]


def _chosen(found: Sequence[Blocks], axes: Axes, seen: Callable[[Blocks], Any]) -> Any:
    """`seen` of what this device has, of that of all."""
    kinds = list(dict.fromkeys(found))
    if len(kinds) == 1:
        return seen(kinds[0])
    here = number(axes)
    kind = sum(jnp.where(here == i, kinds.index(each), 0) for i, each in enumerate(found))
    return jax.lax.switch(kind, [functools.partial(seen, each) for each in kinds])


def _together(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[Any, Any]:
    """Attention over two sets of keys, of that over each."""
    both = jnp.logaddexp(lse, more_lse)
    known = jnp.where(both == -jnp.inf, 0.0, both)
    first, second = (jnp.exp(each - known)[..., None] for each in (lse, more_lse))
    return first * out + second * more, both
