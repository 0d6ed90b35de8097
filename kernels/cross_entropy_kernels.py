"""The loss over a vocabulary of tokens' vectors and a head's weights, in Pallas: no logit leaves the chip.

Forward: a block of tokens stays, the weights pass by a block of the vocabulary at a time. Each lane of a row
keeps a maximum, a sum of exponentials relative to it, and the logit of the label if it met it; at the end the
lanes of a row are taken together (the online softmax of Milakov and Gimelshein, arXiv:1805.02867, by lanes).

Backward: a block of the vocabulary stays, the tokens pass by. The logits are made again, once: their gradient
g = p (dloss + dlse) - [label] dloss serves the gradients of both operands. That of the weights is added up in
VMEM and written once. That of the tokens is added up in float32 in HBM: a block is fetched while the logits
are made, and sent back while the next ones are. Where a chip has two cores, each takes half of the
vocabulary, and the sum of both is left to the caller.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xform.kernels.cross_entropy_blocks import LANES, Sizes

LEAST = -1e30
"""Less than any logit, but no infinity, whose difference from itself is not a number."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The function: logits = cap(scale * x . w + bias). transposed: w is [v, d]. smoothing: the part of the
    labels' weight that all of the vocabulary share. precision: of the products, "highest" or the default.
    ways: how often the vocabulary is as large as that of w, a block of it.
    """

    scale: float = 1.0
    cap: float | None = None
    smoothing: float = 0.0
    bias: bool = False
    transposed: bool = False
    precision: str = ""
    ways: int = 1

    def dot(self, left: Any, right: Any, *dims: tuple[int, int]) -> Any:
        """A product in float32, summed over these dimensions of both."""
        numbers = ((tuple(a for a, _ in dims), tuple(b for _, b in dims)), ((), ()))
        chosen = lax.Precision.HIGHEST if self.precision == "highest" else None
        return lax.dot_general(left, right, numbers, chosen, preferred_element_type=jnp.float32)

    def logits(self, x: Any, w: Any, bias: Any) -> Any:
        """[..., v] in float32, of x [..., d]."""
        z = self.dot(x, w, (x.ndim - 1, 1 if self.transposed else 0))
        z = z * self.scale if self.scale != 1.0 else z
        z = z + bias.astype(jnp.float32) if self.bias else z
        return self.cap * jnp.tanh(z / self.cap) if self.cap is not None else z

    def share(self, v: int) -> float:
        """What a class has of the weight that all share, where w has v of them."""
        return self.smoothing / (v * self.ways)

    def slope(self, z: Any) -> Any:
        """The derivative of the logits by x . w, from the logits; without the scale: that by the bias."""
        return 1.0 - jnp.square(z / self.cap) if self.cap is not None else 1.0


def forward(
    form: Form, sizes: Sizes, interpret: Any, x: jax.Array, w: jax.Array, labels: jax.Array, bias: Any
) -> tuple[jax.Array, jax.Array]:
    """x[t,d], w, labels[t], bias[v] or None -> target[t], what the labels weigh of the logits, and lse[t], in
    float32. t is a multiple of sizes.t; labels are from 0 to v - 1, or negative: of no class.
    """
    (t, d), v = x.shape, w.shape[0 if form.transposed else 1]
    bt, bv = sizes.t, sizes.v
    column = pl.BlockSpec((bt, 1), lambda i, j: (i, 0))
    specs = [pl.BlockSpec((bt, d), lambda i, j: (i, 0)), _weights(form, d, bv, lambda i, j: j), column]
    if form.bias:
        specs.append(pl.BlockSpec((1, bv), lambda i, j: (0, j)))
    out = jax.ShapeDtypeStruct((t, 1), jnp.float32)
    target, lse = pl.pallas_call(
        functools.partial(_forward, form, v),
        grid=(t // bt, pl.cdiv(v, bv)),
        in_specs=specs,
        out_specs=[column, column],
        out_shape=[out, out],
        scratch_shapes=[pltpu.VMEM((bt, LANES), jnp.float32)] * (4 if form.smoothing else 3),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=sizes.vmem
        ),
        cost_estimate=_cost(2 * t * d * v, t * v, [x] + [w] * (t // bt), 8 * t),
        interpret=interpret,
        name="cross_entropy",
    )(x, w, labels[:, None], *([bias[None]] if form.bias else []))
    return target[:, 0], lse[:, 0]


def _forward(form: Form, v: int, x: Any, w: Any, labels: Any, *refs: Any) -> None:
    bias, refs = (refs[0], refs[1:]) if form.bias else (None, refs)
    wanted, lse, top, total, picked = refs[:5]
    sums = refs[5] if form.smoothing else None
    j, bv = pl.program_id(1), w.shape[0 if form.transposed else 1]

    @pl.when(j == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, LEAST)
        for each in (total, picked, *refs[5:]):
            each[...] = jnp.zeros_like(each)

    z = form.logits(x[...], w[...], None if bias is None else bias[...])
    own = labels[...] - j * bv
    column = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    parts = [z[:, at : at + LANES] for at in range(0, bv, LANES)]
    places = [column + at for at in range(0, bv, LANES)]
    if v % bv:
        inside = [place < v - j * bv for place in places]
        parts = [jnp.where(ok, part, LEAST) for ok, part in zip(inside, parts, strict=True)]
    before, most = top[...], functools.reduce(jnp.maximum, parts, top[...])
    top[...] = most
    total[...] = total[...] * jnp.exp(before - most) + sum(jnp.exp(part - most) for part in parts)
    hits = [jnp.where(own == place, part, 0.0) for place, part in zip(places, parts, strict=True)]
    picked[...] += sum(hits)
    if sums is not None:
        sums[...] += sum(
            [jnp.where(ok, part, 0.0) for ok, part in zip(inside, parts, strict=True)] if v % bv else parts
        )

    @pl.when(j == pl.num_programs(1) - 1)
    def _() -> None:
        highest = jnp.max(top[...], axis=1, keepdims=True)
        weight = jnp.sum(total[...] * jnp.exp(top[...] - highest), axis=1, keepdims=True)
        whole = highest + jnp.log(weight)
        target = (1.0 - form.smoothing) * jnp.sum(picked[...], axis=1, keepdims=True)
        if sums is not None:
            target += form.share(v) * jnp.sum(sums[...], axis=1, keepdims=True)
        lse[...] = whole
        wanted[...] = target


def backward(
    form: Form,
    sizes: Sizes,
    interpret: Any,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: Any,
    lse: jax.Array,
    dloss: jax.Array,
    dlse: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """The gradients of x, w, in `dtype`, and, where there is one, the bias. t is a multiple of sizes.t."""
    (t, d), v = x.shape, w.shape[0 if form.transposed else 1]
    bt, bv = sizes.t, sizes.v
    ni, nj = t // bt, pl.cdiv(v, bv)
    cores = min(sizes.cores, nj)
    each = pl.cdiv(nj, cores)

    def at(c: Any, j: Any, i: Any) -> Any:
        del i
        return jnp.minimum(c * each + j, nj - 1)

    column = pl.BlockSpec((bt, 1), lambda c, j, i: (i, 0))
    weights = _weights(form, d, bv, at)
    specs = [pl.BlockSpec((bt, d), lambda c, j, i: (i, 0)), weights, column, column, column, column]
    args = [x, w, labels[:, None], lse[:, None], dloss[:, None], (dloss + dlse)[:, None]]
    if not form.transposed:
        specs.append(pl.BlockSpec((d, bt), lambda c, j, i: (0, i)))
        args.append(x.T)
    row = pl.BlockSpec((1, bv), lambda c, j, i: (0, at(c, j, i)))
    if form.bias:
        specs.append(row)
        args.append(bias[None])
    wide = functools.partial(pltpu.VMEM, dtype=jnp.float32)
    made = pl.pallas_call(
        functools.partial(_backward, form, (v, ni, nj, each)),
        grid=(cores, each, ni),
        in_specs=specs,
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM), weights, *([row] if form.bias else [])],
        out_shape=[
            jax.ShapeDtypeStruct((cores, t, d), jnp.float32),
            jax.ShapeDtypeStruct(w.shape, dtype),
            *([jax.ShapeDtypeStruct((1, v), jnp.float32)] if form.bias else []),
        ],
        scratch_shapes=[
            wide((2, bt, d)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            *([] if dtype == jnp.float32 else [wide((bv, d) if form.transposed else (d, bv))]),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=sizes.vmem
        ),
        cost_estimate=_cost(6 * t * d * v, t * v, [x] * (2 * nj) + [w, w], 8 * t * d * nj),
        interpret=interpret,
        name="cross_entropy_back",
    )(*args)
    dx = (made[0][0] if cores == 1 else jnp.sum(made[0], axis=0)).astype(x.dtype)
    return dx, made[1], *([made[2][0].astype(bias.dtype)] if form.bias else [])


def _backward(form: Form, counts: tuple[int, int, int, int], x: Any, w: Any, labels: Any, *refs: Any) -> None:
    (v, ni, nj, each), rest = counts, list(refs)
    lse, dloss, dboth = rest[:3]
    del rest[:3]
    flipped: Any = None if form.transposed else rest.pop(0)
    bias = rest.pop(0) if form.bias else None
    dx, dw = rest[:2]
    del rest[:2]
    dbias = rest.pop(0) if form.bias else None
    near, fetched, sent = rest[:3]
    sum_w = rest[3] if len(rest) > 3 else dw  # which is float32 itself
    core, j, i = (pl.program_id(k) for k in range(3))
    block, step = core * each + j, j * ni + i
    bt, bv = x.shape[0], w.shape[0 if form.transposed else 1]
    last = step == jnp.minimum(each, nj - core * each) * ni - 1
    slot = lax.rem(step, 2) if ni > 1 else 0

    def copy(slot: Any, out: bool) -> Any:
        there = dx.at[core, pl.ds(i * bt, bt), :]
        if out:
            return pltpu.make_async_copy(near.at[slot], there, sent.at[slot])
        return pltpu.make_async_copy(there, near.at[slot], fetched.at[slot])

    @pl.when(block < nj)
    def _() -> None:
        if ni > 1:  # what this slot held has to be gone, and with it what was added to this block before
            pl.when(step >= 2)(lambda: copy(slot, True).wait())
            pl.when(j > 0)(lambda: copy(slot, False).start())

        weights = w[...]
        column = lax.broadcasted_iota(jnp.int32, (1, bv), 1)
        z = form.logits(x[...], weights, None if bias is None else bias[...])
        share = jnp.where(labels[...] - block * bv == column, 1.0 - form.smoothing, 0.0)
        share = share + form.share(v) if form.smoothing else share
        g = (jnp.exp(z - lse[...]) * dboth[...] - share * dloss[...]) * form.slope(z)
        if v % bv:
            g = jnp.where(column < v - block * bv, g, 0.0)
            across = column.reshape(bv, 1) if form.transposed else column
            weights = jnp.where(across < v - block * bv, weights, jnp.zeros_like(weights))

        @pl.when(i == 0)
        def _() -> None:
            sum_w[...] = jnp.zeros_like(sum_w)
            if dbias is not None:
                dbias[...] = jnp.zeros_like(dbias)

        if dbias is not None:
            dbias[...] += jnp.sum(g, axis=0, keepdims=True)
        g = (g * form.scale if form.scale != 1.0 else g).astype(x.dtype)
        if form.transposed:
            sum_w[...] += form.dot(g, x[...], (0, 0))
        else:
            sum_w[...] += form.dot(flipped[...], g, (1, 0))
        part = form.dot(g, weights, (1, 0 if form.transposed else 1))

        @pl.when(j == 0)
        def _() -> None:
            near[slot] = part

        @pl.when(j > 0)
        def _() -> None:
            if ni > 1:
                copy(slot, False).wait()
            near[slot] += part

        if ni > 1:
            copy(slot, True).start()
            pl.when(last)(lambda: copy(1 - slot, True).wait())
        else:
            pl.when(last)(lambda: copy(slot, True).start())
        pl.when(last)(lambda: copy(slot, True).wait())

        if sum_w is not dw:

            @pl.when(i == ni - 1)
            def _() -> None:
                dw[...] = sum_w[...].astype(dw.dtype)


def _weights(form: Form, d: int, bv: int, at: Any) -> pl.BlockSpec:
    if form.transposed:
        return pl.BlockSpec((bv, d), lambda *ids: (at(*ids), 0))
    return pl.BlockSpec((d, bv), lambda *ids: (0, at(*ids)))


def _cost(flops: int, exps: int, read: Sequence[Any], written: int) -> pl.CostEstimate:
    moved = sum(a.size * a.dtype.itemsize for a in read) + written
    return pl.CostEstimate(flops=flops, transcendentals=exps, bytes_accessed=moved)
