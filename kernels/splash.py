"""Attention by the splash kernels that JAX ships: what `kernels.attention` asks for, as they take it.

    q [b, n, g, t, d]      ->   q [heads, rows, d], scaled, rows padded to whole blocks
    a Band of positions    ->   the blocks of keys that each block of queries visits; a function of positions
    out, lse of all rows   <-   0 and -inf where a row has seen nothing

The kernels take the mask as data: for each block of queries the numbers of the blocks of keys to visit, in
order, and for each row its position. Both are made here from the bounds of the band, so nothing of the size
queries x keys is looked at anywhere, not when tracing either (the library's own mask objects are evaluated
position by position). Padded keys lie beyond the positions that the function lets through. Few queries of
many heads (decoding) are the rows of one block.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.kernels.blocks import Blocks, Shape, Sizes, backward_sizes, forward_sizes
from xform.ops import Band
from xform.trace import inline, splash, trace_flat, typeof, without_dead, without_vma

FEW = 16
"""Up to as many queries, the heads that share a key head are rows of one head."""

UNSEEN = -0.7 * float(np.finfo(np.float32).max)
"""What the kernels take for the logit of a key that is not seen."""


@dataclasses.dataclass(frozen=True)
class Shift:
    """Where queries stand, told when the program runs: on the device of this number, in runs of as many
    queries each, from these positions on, each so many after the one before.
    """

    starts: tuple[tuple[int, ...], ...]
    number: Any
    step: int = 1

    def at(self, count: int) -> list[np.ndarray]:
        """On each device the positions of so many queries."""
        runs = [self.step * np.arange(count // len(each)) for each in self.starts]
        return [
            (np.asarray(each)[:, None] + run).ravel() for each, run in zip(self.starts, runs, strict=True)
        ]

    def positions(self, count: int) -> Any:
        """On this device."""
        runs = len(self.starts[0])
        own = [
            sum(jnp.where(self.number == n, each[run], 0) for n, each in enumerate(self.starts))
            for run in range(runs)
        ]
        run = self.step * jnp.arange(count // runs, dtype=jnp.int32)
        return jnp.concatenate([start + run for start in own])


@dataclasses.dataclass(frozen=True)
class Seen:
    """The function of positions that the kernels call, of int32 arrays: whether q sees k.

    keys: how many keys there are, where the band alone would let a query see beyond the last.
    """

    band: Band
    keys: int | None = None

    def __call__(self, q: Any, k: Any) -> Any:
        band, terms = self.band, []
        if band.right is not None:
            terms.append(k <= (q + band.right if band.right else q))
        if band.left is not None:
            terms.append(k >= (q - band.left if band.left else q))
        if band.chunk is not None:
            phase = band.phase
            start = _chunk_start(q + phase, band.chunk) - phase if phase else _chunk_start(q, band.chunk)
            terms.append(k >= start)
            if band.right is None or band.right > 0:
                terms.append(k < start + band.chunk)
        seen = _all(terms)
        if band.prefix and seen is not None:
            seen |= k < band.prefix
        if self.keys is not None:
            seen = _all([k < self.keys] if seen is None else [seen, k < self.keys])
        return seen


def _all(terms: list[Any]) -> Any:
    seen = None
    for term in terms:
        seen = term if seen is None else seen & term
    return seen


def _chunk_start(q: Any, chunk: int) -> Any:
    """The first position of the chunk that q lies in. The kernels have no division of integers: q times a
    reciprocal, half a position off each end, is right as long as positions have fewer than 22 bits.
    """
    if chunk & (chunk - 1) == 0:
        return q & -chunk
    number = jnp.floor((q.astype(jnp.float32) + 0.5) * np.float32(1 / chunk))
    return number.astype(jnp.int32) * chunk


def forward(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    segments: tuple[Any, Any] | None,
    *,
    band: Band,
    scale: float,
    cap: float | None,
    complete: bool,
    chip: str,
    blocks: Blocks,
    interpret: bool,
    shift: Shift | None = None,
) -> tuple[Any, Any]:
    """out [b, n, g, t, e] in the dtype of q, and lse [b, n, g, t]."""
    shape, s = q.shape, k.shape[-2]
    rows = _Rows(band, shape[1], shape[2], shape[3], sinks is None, shift)
    plan = forward_sizes(rows.shape(q, v, segments), chip, blocks)
    calls = splash()
    mask = rows.mask(plan.rows, s, plan.keys, plan.q, plan.kv)
    size = calls.BlockSizes(block_q=plan.q, block_kv=plan.kv, block_kv_compute=plan.kv_compute)
    flat = None if sinks is None else sinks.reshape(-1)

    def one(q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
        out, (lse,) = calls.forward(
            mask.info(calls, "keys"),
            q,
            k,
            v,
            None if segments is None else calls.SegmentIds(*segments),
            flat,
            mask_value=UNSEEN,
            is_mqa=False,
            block_sizes=size,
            residual_checkpoint_name=None,
            save_residuals=True,
            mask_function=mask.function,
            attn_logits_soft_cap=cap,
            interpret=interpret,
        )
        return out, lse

    args = (_scaled(rows.fold(q), scale), k, v, rows.fold_segments(segments))
    with without_vma():
        out, lse = jax.vmap(one)(*_padded(args, plan))
    out, lse = (rows.unfold(x[:, :, : rows.count], shape) for x in (out, lse))
    some = all(band.sees_some_at(at, s) for at in rows.places)
    if sinks is None and not complete and (segments is not None or not some):
        none = ~(lse > 0.5 * UNSEEN)  # nothing visited gives -inf, all visited masked gives UNSEEN
        out, lse = jnp.where(none[..., None], 0, out), jnp.where(none, -jnp.inf, lse)
    return out, lse


def backward(
    q: Any,
    k: Any,
    v: Any,
    segments: tuple[Any, Any] | None,
    lse: Any,
    delta: Any,
    dout: Any,
    *,
    band: Band,
    scale: float,
    cap: float | None,
    chip: str,
    blocks: Blocks,
    interpret: bool,
    shift: Shift | None = None,
) -> tuple[Any, Any, Any]:
    """dq, dk, dv, in the dtypes of q, k and v: one kernel where its sums of dq, one for each block of keys,
    are few (`kernels.blocks`), else one for dq and one for dk and dv.
    """
    shape, s = q.shape, k.shape[-2]
    rows = _Rows(band, shape[1], shape[2], shape[3], True, shift)
    plan = backward_sizes(rows.shape(q, v, segments), chip, blocks)
    calls = splash()
    by_keys = rows.mask(plan.rows, s, plan.keys, plan.q, plan.kv)
    shared: dict[str, Any] = {
        "is_mqa": False,
        "mask_value": UNSEEN,
        "attn_logits_soft_cap": cap,
        "mask_function": by_keys.function,
        "interpret": interpret,
        **{f"{each}_layout": calls.QKVLayout.HEAD_DIM_MINOR for each in "qkv"},
    }

    def one(q: Any, k: Any, v: Any, segments: Any, lse: Any, delta: Any, dout: Any) -> tuple[Any, Any, Any]:
        # Sinks are an operand that neither kernel reads.
        given = (q, k, v, None if segments is None else calls.SegmentIds(*segments), None, lse, dout, delta)
        sizes = {"bq": plan.q, "bkv": plan.kv, "bkv_compute": plan.kv_compute}
        info = by_keys.info(calls, "all" if plan.fused else "queries")
        dkv = functools.partial(calls.dkv, **sizes, mask_info=info, use_fused_bwd_kernel=plan.fused, **shared)
        dq, dk, dv = _added(dkv, given) if plan.fused else dkv(*given)
        if not plan.fused:
            info = rows.mask(plan.rows, s, plan.keys, plan.q_dq, plan.kv_dq).info(calls, "keys")
            dq = calls.dq(*given, bq=plan.q_dq, bkv=plan.kv_dq, mask_info=info, **shared)
        return dq, dk, dv

    lse = jnp.where(lse == -jnp.inf, 0.0, lse)  # exp(UNSEEN - 0) is 0: what has seen nothing has no weights
    args = (
        _scaled(rows.fold(q), scale),
        k,
        v,
        rows.fold_segments(segments),
        rows.fold(lse),
        rows.fold(delta),
        rows.fold(dout.astype(v.dtype)),
    )
    with without_vma():
        dq, dk, dv = jax.vmap(one)(*_padded(args, plan))
    dq = rows.unfold(_scaled(dq[:, :, : rows.count], scale), shape)
    return dq, dk[:, :, :s], dv[:, :, :s]


def _added(dkv: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    """What the one kernel gives, whose dq comes in parts, one a block of keys: their sum as additions, which
    the compiler does on the way to what comes next. A sum over a dimension it does by itself, and the cast
    before it too.
    """
    leaves, tree = jax.tree.flatten(given)

    def flat(*leaves: Any) -> list[Any]:
        return list(dkv(*jax.tree.unflatten(tree, leaves)))

    jaxpr = trace_flat(flat, [typeof(x) for x in leaves], "dkv")
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def uncast(v: Any) -> Any:
        return made[v].invars[0] if made[v].primitive.name == "convert_element_type" else v

    total = made[uncast(jaxpr.outvars[0])]
    assert total.primitive.name == "reduce_sum" and total.params["axes"] == (0,)
    dq: Any = jaxpr.outvars[0].aval
    wide: Any = total.outvars[0].aval
    names = jaxpr.debug_info.with_unknown_names()
    outs = [uncast(total.invars[0]), *jaxpr.outvars[1:]]
    parts, *others = inline(without_dead(jaxpr.replace(outvars=outs, debug_info=names)), *leaves)
    each = [parts[n].astype(wide.dtype) for n in range(parts.shape[0])]
    return [functools.reduce(operator.add, each).astype(dq.dtype), *others]


def check(q: Any, v: Any, segments: bool, chip: str, blocks: Blocks) -> None:
    """For values of the types of q and v: raises PlanError where blocks that a plan has do not fit the chip,
    Decline where no blocks do. The kernels would, but only when the program is lowered.
    """
    shape = Shape(q.shape[3], v.shape[-2], q.shape[-1], v.shape[-1], jnp.dtype(q.dtype).itemsize, segments)
    forward_sizes(shape, chip, blocks)
    backward_sizes(shape, chip, blocks)


# ---------------------------------------------------------------- rows and keys


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How kernels see queries [b, n, g, t, ...]: [b, n * g, t, ...], or few of them [b, n, g * t, ...]."""

    band: Band
    n: int
    g: int
    t: int
    folded: bool
    shift: Shift | None = None

    @property
    def places(self) -> list[np.ndarray]:
        """The positions of the queries, as they may be."""
        return [np.arange(self.t) + self.band.offset] if self.shift is None else self.shift.at(self.t)

    @property
    def is_folded(self) -> bool:
        return self.folded and self.g > 1 and self.t <= FEW

    @property
    def count(self) -> int:
        return self.g * self.t if self.is_folded else self.t

    def shape(self, q: Any, v: Any, segments: Any) -> Shape:
        """What is to be computed, for the table of blocks."""
        size = jnp.dtype(q.dtype).itemsize
        return Shape(self.count, v.shape[-2], q.shape[-1], v.shape[-1], size, segments is not None)

    def fold(self, x: Any) -> Any:
        heads = self.n if self.is_folded else self.n * self.g
        return x.reshape(x.shape[0], heads, self.count, *x.shape[4:])

    def fold_segments(self, segments: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
        if segments is None or not self.is_folded:
            return segments
        return jnp.tile(segments[0], (1, self.g)), segments[1]

    def unfold(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.reshape(*shape[:4], *x.shape[3:])

    def mask(self, rows: int, s: int, keys: int, bq: int, bkv: int) -> _Mask:
        """The mask of padded rows and keys, in blocks of bq and bkv."""
        beyond = keys > s and any(
            bool((self.band.bounds_at(at, keys)[1] > s).any() or self.band.prefix > s) for at in self.places
        )
        if self.band.is_full and not beyond:
            return _Mask(None, (), None)
        each = [self._visits(at, rows, s, keys, bq, bkv) for at in self.places]
        visits = each[0] if self.shift is None else np.stack(each)
        times = self.g if self.is_folded else 1
        return _Mask(visits, (self.t, times, rows), Seen(self.band, s if beyond else None), self.shift)

    def _visits(self, at: np.ndarray, rows: int, s: int, keys: int, bq: int, bkv: int) -> np.ndarray:
        """Which blocks of keys each block of rows visits, the queries at these positions."""
        times = self.g if self.is_folded else 1
        first, last = (np.tile(each, times) for each in self.band.bounds_at(at, keys))
        last = np.minimum(last, s)
        visits = np.zeros((rows // bq, keys // bkv), bool)
        starts = np.arange(0, keys, bkv)
        for block in range(rows // bq):
            own = slice(block * bq, min((block + 1) * bq, self.count))
            lower, upper = first[own, None], last[own, None]
            visits[block] = ((lower < starts + bkv) & (upper > starts) & (lower < upper)).any(0)
        return visits | (starts < min(self.band.prefix, s))


@dataclasses.dataclass(frozen=True)
class _Mask:
    """Which blocks of keys each block of queries visits [row blocks, key blocks], how rows have positions (as
    many queries, so many times, in so many rows), and the function of positions. None: all see all. shift:
    which of the bands it is, of which each has its visits, in front.
    """

    visits: np.ndarray | None
    queries: tuple[int, ...]
    function: Seen | None
    shift: Shift | None = None

    def info(self, calls: Any, order: str) -> Any:
        """As the kernels take it. order: "keys", for each block of queries those of keys; "queries", the
        other way; "all", the same, with a turn for every block of queries, whether it is visited or not.
        """
        if self.visits is None or self.function is None:
            return calls.MaskInfo(None, None, None, None, None)
        visits = self.visits[None] if self.shift is None else self.visits
        if order == "keys":
            numbers, run = _turns(visits)
        elif order == "queries":
            numbers, run = (x.swapaxes(-1, -2) for x in _turns(visits.swapaxes(-1, -2)))
        else:
            run = visits
            numbers = np.broadcast_to(np.arange(run.shape[1])[:, None], run.shape)
        count, times, rows = self.queries
        if self.shift is None:
            at = jnp.arange(count, dtype=jnp.int32) + self.function.band.offset
        else:
            at = self.shift.positions(count)
        positions = jnp.tile(at, times)
        small = np.int8 if numbers.max() < 128 else np.int16 if numbers.max() < 1 << 15 else np.int32
        number = slice(0, 1) if self.shift is None else jnp.expand_dims(self.shift.number, 0)
        return calls.MaskInfo(
            data_next=jnp.asarray(numbers.astype(small))[number],
            mask_next=None,
            block_mask=jnp.asarray(run.astype(np.int8))[number],
            partial_mask_blocks=None,
            q_sequence=_pad(positions, 0, rows),
        )


def _turns(visits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each row the numbers of the columns it visits, in order, and whether a turn runs: rows with fewer
    than the most stay where they are for the rest, which fetches nothing.
    """
    counts = visits.sum(-1)
    width = max(int(counts.max()), 1)
    order = np.argsort(~visits, axis=-1, kind="stable")[..., :width]
    turns = np.arange(width)
    run = turns < counts[..., None]
    stay = np.minimum(turns, np.maximum(counts - 1, 0)[..., None])
    return np.take_along_axis(order, stay, axis=-1), run


def _scaled(q: Any, scale: float) -> Any:
    """scale * q, exact for a power of two, else rounded once."""
    return q if scale == 1.0 else (scale * q.astype(jnp.float32)).astype(q.dtype)


def _padded(args: tuple[Any, ...], plan: Sizes) -> tuple[Any, ...]:
    """The operands with rows and keys padded. No row sees a padded key, by the function of positions; what a
    padded row sees is dropped, and in the backward pass it has no dout.
    """
    q, k, v, segments, *others = args
    if segments is not None:
        segments = (_pad(segments[0], 1, plan.rows), _pad(segments[1], 1, plan.keys))
    k, v = _pad(k, 2, plan.keys), _pad(v, 2, plan.keys)
    return (_pad(q, 2, plan.rows), k, v, segments, *(_pad(x, 2, plan.rows) for x in others))


def _pad(x: Any, axis: int, to: int) -> Any:
    if x.shape[axis] == to:
        return x
    return jnp.pad(x, [(0, to - n if i == axis else 0) for i, n in enumerate(x.shape)])
