"""The loss of a token over a vocabulary, of the token's vector and the head's weights, with no logits in HBM.

    loss[t], lse[t] = operation[cross_entropy] x[t,d] w[d,v] labels[t]

lse is log(sum(exp(logits))), loss is lse minus the logit of the label. Two operations, this and its
gradient, each one kernel (`cross_entropy_kernels`). The backward kernel makes the logits again, so that both
together do the arithmetic of a loss in chunks that are computed again, four products of t x d x v.

Tokens may lie over devices, and the vocabulary in blocks: then a few numbers a token are put together
forward, and gradients are terms of a sum. A label that is none of 0..v-1 picks nothing: its loss is lse. lse
is named for `jax.checkpoint`, so that with "lse" saved the forward kernel does not run again. A z-loss is the
caller's, of lse, whose gradient is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from xform.errors import PlanError
from xform.kernels import cross_entropy_kernels as kernels
from xform.kernels.cross_entropy_blocks import OTHER, Blocks, Sizes, chip_of, sizes_of
from xform.kernels.cross_entropy_kernels import Form
from xform.ops import apply
from xform.trace import without_vma

DTYPES = ("bfloat16", "float32")

TOKENS = "tsrqponmlkjihg"
"""The letters of the dimensions of tokens."""

LSE = "lse"
"""The name under which the log of the sum is saved."""


@dataclasses.dataclass(frozen=True)
class _Loss:
    """What both operations share. form: the function. blocks: in place of the table's for the chip. tokens:
    a letter for each of their dimensions. axes: the mesh axes over which the vocabulary lies in blocks.
    """

    form: Form
    chip: str = OTHER
    blocks: Blocks = dataclasses.field(default_factory=Blocks)
    interpret: bool = False
    tokens: str = "t"
    axes: tuple[str, ...] = ()

    told = "v"

    @property
    def inputs(self) -> tuple[str, ...]:
        weights = "vd" if self.form.transposed else "dv"
        return (f"{self.tokens}d", weights, self.tokens, *(["v"] if self.form.bias else []))

    @property
    def operands(self) -> tuple[str, ...]:
        return self.inputs

    def over(self, axes: Mapping[str, tuple[str, ...]]) -> Self:
        return dataclasses.replace(self, axes=axes["v"])

    def _here(self, w: jax.Array, labels: jax.Array) -> tuple[Form, jax.Array]:
        """The form on this block of the vocabulary, and labels counted from its first class; -1: others."""
        v = w.shape[0 if self.form.transposed else 1]
        form = dataclasses.replace(self.form, ways=math.prod(lax.axis_size(a) for a in self.axes))
        labels = labels - lax.axis_index(self.axes) * v if self.axes else labels
        return form, jnp.where((labels >= 0) & (labels < v), labels, -1)

    def _padded(self, way: str, args: Sequence[jax.Array]) -> tuple[Sizes, list[jax.Array]]:
        """Block sizes, and the operands with tokens in one dimension, by rows of zeros a whole number of
        blocks of them.
        """
        x, w = args[:2]
        t, d, v = math.prod(x.shape[:-1]), x.shape[-1], w.shape[0 if self.form.transposed else 1]
        sizes = sizes_of(self.chip, way, t, d, v, x.dtype.itemsize, self.blocks)

        def padded(a: jax.Array, dims: str) -> jax.Array:
            if dims not in (self.tokens, f"{self.tokens}d"):
                return a
            flat = a.reshape(t, *a.shape[len(self.tokens) :])
            return jnp.pad(flat, [(0, -t % sizes.t), *[(0, 0)] * (flat.ndim - 1)])

        return sizes, [padded(a, dims) for a, dims in zip(args, self.operands, strict=True)]


@dataclasses.dataclass(frozen=True)
class CrossEntropy(_Loss):
    """x[t,d], w[d,v] (or [v,d]), labels[t], bias[v] if the form has one -> loss[t], lse[t] in float32.

    Where the vocabulary lies over devices, what each makes of its block is put together here.
    """

    name = "cross_entropy"

    @property
    def results(self) -> tuple[str, ...]:
        return self.tokens, self.tokens

    @property
    def cut(self) -> str:
        return f"{self.tokens}v"

    def plain(self, *args: jax.Array) -> Sequence[jax.Array]:
        x, w, labels, *bias = args
        form, labels = self._here(w, labels)
        z = form.logits(x, w, bias[0] if bias else None)
        return self._together(jnp.sum(_shares(form, labels, z) * z, -1), jax.nn.logsumexp(z, -1))

    def kernel(self, *args: jax.Array) -> Sequence[jax.Array]:
        shape, t = args[2].shape, args[2].size
        sizes, (x, w, labels, *bias) = self._padded("forward", args)
        form, labels = self._here(w, labels)
        with without_vma():
            made = kernels.forward(form, sizes, self.interpret, x, w, labels, bias[0] if bias else None)
        return self._together(*(each[:t].reshape(shape) for each in made))

    def _together(self, target: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss and lse of all of the vocabulary, of what the labels weigh and lse of each block."""
        if self.axes:
            most = lax.pmax(lse, self.axes)
            most = jnp.where(jnp.isfinite(most), most, 0.0)
            lse = most + jnp.log(lax.psum(jnp.exp(lse - most), self.axes))
            target = lax.psum(target, self.axes)
        return lse - target, lse


@dataclasses.dataclass(frozen=True)
class CrossEntropyGradient(_Loss):
    """The operands of `CrossEntropy`, lse, dloss and dlse [t] -> the gradients of x, w and, if any, the bias.

    dtype: of the gradient of w. Tokens and vocabulary may lie over devices: the gradients of w and the bias
    are then terms of a sum over the tokens', that of x over the vocabulary's.
    """

    dtype: str = "float32"

    name = "cross_entropy_gradient"
    cut = ""

    def wider(self, dtype: str) -> Self:
        return dataclasses.replace(self, dtype=str(jnp.promote_types(self.dtype, dtype)))

    @property
    def sums(self) -> str:
        return f"{self.tokens}v"

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.inputs, self.tokens, self.tokens, self.tokens)

    @property
    def results(self) -> tuple[str, ...]:
        return (*self.inputs[:2], *(["v"] if self.form.bias else []))

    def plain(self, *args: jax.Array) -> Sequence[jax.Array]:
        x, w, labels, *bias, lse, dloss, dlse = args
        form, labels = self._here(w, labels)
        z = form.logits(x, w, bias[0] if bias else None)
        lse, dloss, dboth = (each[..., None] for each in (lse, dloss, dloss + dlse))
        g = (jnp.exp(z - lse) * dboth - _shares(form, labels, z) * dloss) * form.slope(z)
        dz = (g * form.scale).astype(x.dtype)
        dx = form.dot(dz, w, (z.ndim - 1, 0 if form.transposed else 1)).astype(x.dtype)
        tokens = range(z.ndim - 1)
        dw = form.dot(*((dz, x) if form.transposed else (x, dz)), *((k, k) for k in tokens))
        return dx, dw.astype(self.dtype), *[jnp.sum(g, axis=tuple(tokens)).astype(b.dtype) for b in bias]

    def kernel(self, *args: jax.Array) -> Sequence[jax.Array]:
        shape, t = args[0].shape, args[2].size
        sizes, (x, w, labels, *bias, lse, dloss, dlse) = self._padded("backward", args)
        form, labels = self._here(w, labels)
        given = x, w, labels, bias[0] if bias else None, lse, dloss, dlse
        with without_vma():
            dx, *rest = kernels.backward(form, sizes, self.interpret, *given, jnp.dtype(self.dtype))
        return dx[:t].reshape(shape), *rest


def _shares(form: Form, labels: jax.Array, z: jax.Array) -> jax.Array:
    """[..., v]: the weight of each logit in what is taken from lse."""
    hit = labels[..., None] == lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    shares: jax.Array = jnp.where(hit, 1.0 - form.smoothing, 0.0) + form.share(z.shape[-1])
    return shares


# ---------------------------------------------------------------- with a gradient


def cross_entropy(
    form: Form,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    *,
    chip: str = OTHER,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x[t,d], w[d,v] or, if `form.transposed`, [v,d], labels[t] integers, bias[v] -> loss[t], lse[t] float32.

    The tokens may have several dimensions, or none.
    Products are in the dtype of x; w may be wider, and so is its gradient then, with no rounding on the way.
    `form.bias` is set by whether there is one.
    """
    form = dataclasses.replace(form, bias=bias is not None)
    op = CrossEntropy(form, chip, blocks or Blocks(), interpret, TOKENS[: x.ndim - 1])
    loss, lse = _loss(op, x, w, labels.astype(jnp.int32), *([] if bias is None else [bias]))
    return loss, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(op: CrossEntropy, x: jax.Array, w: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, lse = apply(op, x, w.astype(x.dtype), *rest)
    return loss, lse


def _forward(op: CrossEntropy, *args: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
    loss, lse = _loss(op, *args)
    lse = checkpoint_name(lse, LSE)
    return (loss, lse), (args, lse)


def _backward(op: CrossEntropy, saved: Any, douts: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    (x, w, *rest), lse = saved
    back = CrossEntropyGradient(op.form, op.chip, op.blocks, op.interpret, op.tokens, dtype=str(w.dtype))
    dx, dw, *dbias = apply(back, x, w.astype(x.dtype), *rest, lse, *douts)
    return dx, dw, None, *dbias


_loss.defvjp(_forward, _backward)


def refused(x: Any, w: Any) -> str:
    """Why these operands (anything with shape and dtype) are not for the kernel; "" where they are."""
    if w.dtype not in (x.dtype, jnp.float32):
        return f"tokens are {x.dtype} and the weights {w.dtype}; the kernel takes the same dtype or float32"
    if str(x.dtype) not in DTYPES:
        return f"the kernel takes {' and '.join(DTYPES)}, these are {x.dtype}"
    return ""


# ---------------------------------------------------------------- what it costs


def moved(way: str, sizes: Sizes, t: int, d: int, v: int, size: int = 2) -> float:
    """Bytes between HBM and VMEM of a pass ("forward", "backward") over numbers of `size` bytes.

    Forward the weights are read for each block of tokens. Backward each block of the vocabulary reads the
    tokens and their transpose, and their gradient in float32 is read and written.
    """
    if way == "forward":
        return size * d * (t + v * -(-t // sizes.t))
    return 2 * size * d * v + (2 * size + 8) * t * d * -(-v // sizes.v)


def seconds(way: str, chip: str, t: int, d: int, v: int, size: int = 2, chunks: int = 8) -> float:
    """What the loss and its gradients take on a chip, of the larger of arithmetic and HBM traffic: "kernel";
    "plain", with whole logits; "chunked", in chunks that are computed again.

    Logits go to HBM and back about five times in float32. A chunk reads the weights three times, and its
    gradient is added to the sum in float32. Of Llama's head (4096 x 32000) on v5e this agrees with the
    compiler's estimated cycles within 20 % (plain) and 15 % (chunked), for 2048 to 8192 tokens.
    """
    row = chip_of(chip)
    product, logits = 2.0 * t * d * v / row.flops, 5 * 4.0 * t * v / row.bandwidth
    if way == "plain":
        return 3 * product + logits
    if way == "chunked":
        return 4 * product + logits + chunks * d * v * (3 * size + 8) / row.bandwidth
    passes = (("forward", 1), ("backward", 3))
    try:
        sizes = [(way, sizes_of(chip, way, t, d, v, size, Blocks()), products) for way, products in passes]
    except PlanError:  # no blocks of such vectors fit
        return math.inf
    product /= row.busy
    return sum(max(n * product, moved(way, s, t, d, v, size) / row.bandwidth) for way, s, n in sizes)


def pays(chip: str, t: int, d: int, v: int, size: int = 2, against: str = "chunked") -> bool:
    """Whether the kernels take less time than the loss in chunks, or the plain one.

    Than chunks: wherever blocks are long enough for the memory's bandwidth, since the arithmetic is the same.
    Than plain, which does a product less: where d is small (on v5e under 2400), or logits don't fit.
    """
    return seconds("kernel", chip, t, d, v, size) < seconds(against, chip, t, d, v, size)
