"""Attention by tokamax: its kernels against the plain forms, masks that are data, and what may be asked of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.kernels_suite import SLICES, Case, agree, agree_in_shard_map, agree_under_vmap, close, compiled
from xform.kernels.attention import AttentionForward
from xform.kernels.blocks import Blocks
from xform.kernels.tokamax import TokamaxBackward, TokamaxForward, attention
from xform.ops import Band

pytest.importorskip("tokamax")

CAUSAL = Band(right=0)
SMALL = Blocks(128, 256, 128, 128, 256, 128, use_fused_bwd_kernel=True)
FLOAT32 = 1e-5
"""Powers of two in place of e: the logits are rounded once more."""

BFLOAT16 = 2e-2
"""Rounding q * scale, weights and results to eight bits."""


def forward(band: Band = CAUSAL, mask: str = "", **options: Any) -> TokamaxForward:
    of = AttentionForward(band=band, scale=0.3, interpret=True, **{"blocks": SMALL} | options)
    return TokamaxForward(of, mask)


def operands(
    op: TokamaxForward,
    b: int = 1,
    n: int = 1,
    g: int = 2,
    t: int = 7,
    s: int = 7,
    d: int = 5,
    e: int = 3,
    dtype: Any = jnp.float32,
) -> tuple[Any, ...]:
    """The second query sees no key where there is a mask, nor do queries of the last segment."""
    keys = jax.random.split(jax.random.key(t * s), 7)
    shapes = ((b, n, g, t, d), (b, n, s, d), (b, n, s, e))
    args = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False)]
    if op.of.sinks:
        args.append(jax.random.normal(keys[3], (n, g)))
    if op.of.segments:
        args += [jnp.sort(jax.random.randint(keys[4], (b, t), 0, 3))]
        args += [jnp.sort(jax.random.randint(keys[5], (b, s), 0, 2))]
    if op.mask:
        shape = (t, s) if op.mask == "ts" else (b, t, s)
        args.append(jax.random.bernoulli(keys[6], 0.3, shape) & (np.arange(t) != 1)[:, None])
    return tuple(args)


# name: the operation, sizes other than those of `operands`
TABLE: dict[str, tuple[TokamaxForward, dict[str, Any]]] = {
    "causal": (forward(), {}),
    "causal, aligned": (forward(), {"t": 128, "s": 128, "d": 128, "e": 128}),
    "causal, bfloat16": (forward(), {"t": 100, "s": 100, "d": 64, "e": 64, "dtype": jnp.bfloat16}),
    "causal, more queries than keys": (forward(), {"t": 300, "s": 100}),
    "causal, many blocks": (forward(), {"t": 300, "s": 1100, "g": 1}),
    "full": (forward(Band()), {"t": 100, "s": 197, "b": 2, "n": 2, "g": 1}),
    "full, aligned": (forward(Band()), {"t": 128, "s": 256}),
    "window": (forward(Band(right=0, left=30)), {"t": 197, "s": 300}),
    "prefix": (forward(Band(right=0, prefix=37)), {"t": 100, "s": 100}),
    "some see none": (forward(Band(right=-20)), {"t": 100, "s": 100}),
    "a block sees none": (forward(Band(right=0, offset=-150)), {"t": 300, "s": 300}),
    "mask": (forward(Band(), "ts"), {"t": 100, "s": 150}),
    "mask, causal": (forward(mask="ts"), {"t": 300, "s": 300}),
    "mask of each row": (forward(Band(), "bts"), {"t": 20, "s": 30, "b": 3, "n": 2}),
    "mask, segments, sinks, cap": (
        forward(mask="bts", segments=True, sinks=True, cap=2.0),
        {"t": 20, "s": 20, "b": 2, "n": 2},
    ),
    "segments": (forward(segments=True), {"t": 100, "s": 100, "b": 2}),
    "segments, full": (forward(Band(), segments=True), {"t": 100, "s": 150}),
    "sinks": (forward(sinks=True), {"t": 100, "s": 100, "n": 3}),
    "cap": (forward(cap=2.0), {"t": 100, "s": 100}),
}


def case(name: str) -> Case:
    op, sizes = TABLE[name]
    bfloat16 = sizes.get("dtype") == jnp.bfloat16
    return Case(name, op, operands(op, **sizes), BFLOAT16 if bfloat16 else FLOAT32)


def backward(case: Case) -> Case:
    """The same of the backward operation, with what the forward one gives."""
    op: Any = case.op
    out, lse = op.plain(*case.args)
    dout = jax.random.normal(jax.random.key(3), out.shape, out.dtype)
    q, k, v, _, segments, mask = op.named(case.args)
    hidden = (*(segments or ()), *(() if mask is None else (mask,)))
    return Case(case.name, TokamaxBackward(op), (q, k, v, *hidden, out, lse, dout), case.tolerance)


@pytest.mark.parametrize("name", TABLE)
def test_the_kernel_computes_what_the_plain_form_does(name: str) -> None:
    agree(case(name))


@pytest.mark.parametrize("name", TABLE)
def test_the_backward_kernel_computes_what_the_plain_form_does(name: str) -> None:
    agree(backward(case(name)))


MAPPED = ["mask, segments, sinks, cap", "causal"]


@pytest.mark.parametrize("form", [lambda each: each, backward], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MAPPED)
def test_under_vmap_they_agree(name: str, form: Any) -> None:
    agree_under_vmap(form(case(name)))


@pytest.mark.parametrize("cut", ["b", "n", "bn"])
def test_in_shard_map_they_agree(cut: str) -> None:
    both = case("mask, segments, sinks, cap")
    agree_in_shard_map(both, cut)
    agree_in_shard_map(backward(both), cut)
