"""The gated linear recurrence as two Pallas kernels for TPU: over chunks of time forwards, and back.

A program of the grid takes a few heads and one chunk; the grid goes over groups of heads, then over chunks in
order, and the state stays in VMEM from chunk to chunk. The heads' chains of small dependent products are
independent of each other and are scheduled into each other's gaps, which is why a program takes several.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xform.kernels.recurrence_chunk import backward, forward
from xform.kernels.recurrence_levels import Chunk

Array = jax.Array

VMEM = 32 * 2**20
"""Bytes up to which a program takes more heads. A chip has 64 MiB or more."""

# By chip, then by whether there is a decay by channel and whether there is the delta rule: steps of a chunk
# and heads of a program, those with the fewest bundles a step, forwards and back together, as counted by
# `python -m tests.benchmarks.kernels_recurrence`. v5p's two cores share out the programs: fewer heads, more
# programs.
BLOCKS = {
    "v5e": {
        (True, True): (64, 16),
        (True, False): (64, 16),
        (False, True): (64, 16),
        (False, False): (128, 8),
    },
    "v5p": {(True, True): (64, 8), (True, False): (64, 8), (False, True): (64, 8), (False, False): (128, 4)},
    "v6e": {
        (True, True): (64, 16),
        (True, False): (64, 16),
        (False, True): (128, 8),
        (False, False): (128, 8),
    },
}


def default_blocks(chip: str, decay: str, delta: bool) -> tuple[int, int]:
    """Steps of a chunk and heads of a program; of a chip that the table does not have, v5e's."""
    return BLOCKS.get(chip, BLOCKS["v5e"])[decay == "channel", delta]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the arrays as the kernels take them: rows (batch and heads), steps and channels after padding."""

    rows: int
    heads: int
    chunks: int
    chunk: int
    d: int
    e: int


def sizes_of(shape: Sequence[int], e: int, chunk: int, heads: int) -> Sizes:
    """Of q's shape [b, n, t, d]: a short sequence is one short chunk, and a program takes as many heads as
    divide.
    """
    b, n, t, d = shape
    chunk = min(chunk, max(16, 1 << (t - 1).bit_length()))
    heads = max((h for h in range(1, heads + 1) if b * n % h == 0), default=1)
    return Sizes(b * n, heads, -(-t // chunk), chunk, _padded(d), _padded(e))


def vmem_bytes(sizes: Sizes, decay: str, delta: bool, item: int) -> int:
    """An upper estimate of what the backward kernel, the larger, takes of VMEM; item: bytes of q's dtype.

    Blocks of operands and results twice, since the next is fetched while one is worked on; and what does not
    fit in registers, counted as if all values of a chunk were there at once, twice for float32, whose
    products are of three parts. (Seen: 6.1 to 6.9 MiB where this says 8.9, and 18.8 where it says 19.9.)
    """
    lanes = -(-sizes.chunk // 128) * 128
    d, e = (-(-x // 128) * 128 for x in (sizes.d, sizes.e))
    steps = sizes.chunk * (4 * d + 3 * e) * item + (2 * sizes.chunk * d * 4 if decay == "channel" else 0)
    rows = 8 * lanes * 4 * (2 * (decay == "head") + 2 * delta)
    states = d * e * (item + 2 * 4)
    levels = sizes.chunk.bit_length() - 1 if decay == "channel" else 1
    inside = sizes.chunk * 4 * ((4 * levels + 10) * d + 4 * e + (6 + levels) * lanes)
    return sizes.heads * (2 * (steps + rows + states) + int(inside * (2 if item == 4 else 0.8)))


def fitted(sizes: Sizes, decay: str, delta: bool, item: int) -> Sizes:
    """With as many heads, a divisor of the rows and at most those given, as VMEM takes; one at least."""
    for heads in range(sizes.heads, 1, -1):
        fewer = dataclasses.replace(sizes, heads=heads)
        if sizes.rows % heads == 0 and vmem_bytes(fewer, decay, delta, item) <= VMEM:
            return fewer
    return dataclasses.replace(sizes, heads=1)


def _padded(channels: int) -> int:
    """Of keys or values: as many as half a row of lanes, or whole rows."""
    return 64 if channels <= 64 else -(-channels // 128) * 128


def _pad(x: Array, **to: int) -> Array:
    """Zeros behind, in dimensions 2 ("t", "d" or "e" of the name) and 3."""
    widths = [(0, 0), (0, 0)] + [(0, size - had) for size, had in zip(to.values(), x.shape[2:], strict=True)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


@dataclasses.dataclass(frozen=True)
class Packed:
    """The operands as the kernels take them, rows of all batch elements and heads in one dimension."""

    sizes: Sizes

    def steps(self, x: Array, channels: int) -> Array:
        """[b, n, t, d] -> [rows, t, d], padded."""
        s = self.sizes
        return _pad(x, t=s.chunks * s.chunk, d=channels).reshape(s.rows, s.chunks * s.chunk, channels)

    def scalars(self, x: Array) -> Array:
        """[b, n, t] -> [rows, chunks, 1, chunk], padded."""
        s = self.sizes
        return _pad(x, t=s.chunks * s.chunk).reshape(s.rows, s.chunks, 1, s.chunk)

    def state(self, x: Array) -> Array:
        """[b, n, (c,) d, e] -> [rows, (c,) d, e], padded."""
        s = self.sizes
        widths = [(0, 0)] * (x.ndim - 2) + [(0, s.d - x.shape[-2]), (0, s.e - x.shape[-1])]
        x = jnp.pad(x, widths) if s.d != x.shape[-2] or s.e != x.shape[-1] else x
        return x.reshape(s.rows, *x.shape[2:])

    def specs(self, kinds: str, turn: Callable[[Any], Any]) -> list[pl.BlockSpec]:
        """Blocks by kind: d, e: steps of so many channels; s: scalars; c: a chunk's state; f: a state."""
        s = self.sizes
        made = {
            "d": pl.BlockSpec((s.heads, s.chunk, s.d), lambda i, j: (i, turn(j), 0)),
            "e": pl.BlockSpec((s.heads, s.chunk, s.e), lambda i, j: (i, turn(j), 0)),
            "s": pl.BlockSpec((s.heads, 1, 1, s.chunk), lambda i, j: (i, turn(j), 0, 0)),
            "c": pl.BlockSpec((s.heads, 1, s.d, s.e), lambda i, j: (i, turn(j), 0, 0)),
            "f": pl.BlockSpec((s.heads, s.d, s.e), lambda i, j: (i, 0, 0)),
        }
        return [made[kind] for kind in kinds]

    def shapes(self, kinds: str, dtypes: Sequence[Any], like: Sequence[Array]) -> list[jax.ShapeDtypeStruct]:
        s = self.sizes
        steps = s.chunks * s.chunk
        made = {
            "d": (s.rows, steps, s.d),
            "e": (s.rows, steps, s.e),
            "s": (s.rows, s.chunks, 1, s.chunk),
            "c": (s.rows, s.chunks, s.d, s.e),
            "f": (s.rows, s.d, s.e),
        }
        return [shaped(made[kind], dtype, like) for kind, dtype in zip(kinds, dtypes, strict=True)]


def shaped(shape: Sequence[int], dtype: Any, like: Sequence[Array]) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over a `shard_map`'s axes as any of the operands does."""
    varying: frozenset[Any] = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in like))
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying)
    )


def run(
    kernel: Callable[..., None],
    packed: Packed,
    kinds: str,
    operands: Sequence[Array],
    results: str,
    dtypes: Sequence[Any],
    *,
    reverse: bool,
    interpret: bool,
    name: str,
    vmem: int,
) -> list[Array]:
    s = packed.sizes
    turn = (lambda j: s.chunks - 1 - j) if reverse else (lambda j: j)
    made: list[Array] = pl.pallas_call(
        kernel,
        grid=(s.rows // s.heads, s.chunks),
        in_specs=packed.specs(kinds, turn),
        out_specs=packed.specs(results, turn),
        out_shape=packed.shapes(results, dtypes, operands),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY), vmem_limit_bytes=vmem
        ),
        interpret=interpret,
        name=name,
    )(*operands)
    return made


def chunk_of(sizes: Sizes, decay: str, delta: bool, scale: float, dtype: Any) -> Chunk:
    return Chunk(sizes.chunk, decay, delta, scale, dtype, pltpu.roll)


def run_forward(
    args: Sequence[Array],
    decay: str,
    delta: bool,
    scale: float,
    chunk: int,
    heads: int,
    keep: bool,
    interpret: bool,
) -> list[Array]:
    """args: q, k, v, [g], [beta], initial. Gives o, the final state, and where `keep`, the states that enter
    chunks.
    """
    q, k, v, *rest, initial = args
    (b, n, t, d), e = q.shape, v.shape[3]
    sizes = fitted(sizes_of(q.shape, e, chunk, heads), decay, delta, q.dtype.itemsize)
    vmem = max(VMEM, vmem_bytes(sizes, decay, delta, q.dtype.itemsize))
    packed = Packed(sizes)
    kinds, more = _gates(packed, decay, delta, rest)
    operands = [packed.steps(q, sizes.d), packed.steps(k, sizes.d), packed.steps(v, sizes.e), *more]
    results, dtypes = "ef" + "c" * keep, [v.dtype, jnp.float32, q.dtype][: 2 + keep]
    kernel = functools.partial(_forward_kernel, chunk_of(sizes, decay, delta, scale, q.dtype), len(operands))
    out, final, *states = run(
        kernel, packed, f"dde{kinds}f", [*operands, packed.state(initial)], results, dtypes,
        reverse=False, interpret=interpret, name="recurrence_forward", vmem=vmem,
    )  # fmt: skip
    out = out.reshape(b, n, -1, sizes.e)[:, :, :t, :e]
    final = final.reshape(b, n, sizes.d, sizes.e)[:, :, :d, :e]
    return [out, final, *(x.reshape(b, n, *x.shape[1:])[..., :d, :e] for x in states)]


def _gates(packed: Packed, decay: str, delta: bool, rest: Sequence[Array]) -> tuple[str, list[Array]]:
    """The kinds of g and beta, those that there are, and the two as the kernels take them."""
    kinds = {"none": "", "head": "s", "channel": "d"}[decay] + "s" * delta
    pairs = zip(kinds, rest, strict=True)
    return kinds, [packed.scalars(x) if kind == "s" else packed.steps(x, packed.sizes.d) for kind, x in pairs]


def _read(chunk: Chunk, refs: Sequence[Any]) -> list[Any]:
    """q, k, v, g, beta; None for the two that there are not."""
    q, k, v, *rest = refs
    g = beta = None
    if chunk.decay != "none":
        ref, *rest = rest
        g = ref[...] if chunk.decay == "channel" else ref[:, 0]
    if chunk.delta:
        beta = rest[0][:, 0]
    return [q[...], k[...], v[...], g, beta]


def _forward_kernel(chunk: Chunk, count: int, *refs: Any) -> None:
    initial, out, final, *states = refs[count:]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        final[...] = initial[...]

    state = final[...]
    for ref in states:
        ref[:, 0] = state.astype(ref.dtype)
    q, k, v, g, beta = _read(chunk, refs[:count])
    made, state = forward(chunk, q, k, v, g, beta, state)
    out[...] = made.astype(out.dtype)
    final[...] = state


def run_backward(
    args: Sequence[Array], decay: str, delta: bool, scale: float, heads: int, interpret: bool, chunk: int
) -> list[Array]:
    """args: q, k, v, [g], [beta], states, dout, dfinal. Gives gradients of q, k, v, [g], [beta], initial."""
    q, k, v, *rest, states, dout, dfinal = args
    (b, n, t, d), e = q.shape, v.shape[3]
    sizes = fitted(sizes_of(q.shape, e, chunk, heads), decay, delta, q.dtype.itemsize)
    vmem = max(VMEM, vmem_bytes(sizes, decay, delta, q.dtype.itemsize))
    packed = Packed(sizes)
    kinds, more = _gates(packed, decay, delta, rest)
    operands = [packed.steps(q, sizes.d), packed.steps(k, sizes.d), packed.steps(v, sizes.e), *more]
    after = [packed.state(states), packed.steps(dout, sizes.e), packed.state(dfinal)]
    results = f"dde{kinds}f"
    dtypes = [q.dtype, k.dtype, v.dtype, *(jnp.float32 for _ in kinds), jnp.float32]
    kernel = functools.partial(_backward_kernel, chunk_of(sizes, decay, delta, scale, q.dtype), len(operands))
    made = run(
        kernel, packed, f"dde{kinds}cef", [*operands, *after], results, dtypes,
        reverse=True, interpret=interpret, name="recurrence_backward", vmem=vmem,
    )  # fmt: skip
    whole = []
    for kind, x in zip(results, made, strict=True):
        if kind == "f":
            whole.append(x.reshape(b, n, sizes.d, sizes.e)[:, :, :d, :e])
        elif kind == "s":
            whole.append(x.reshape(b, n, -1)[:, :, :t])
        else:
            whole.append(x.reshape(b, n, -1, x.shape[2])[:, :, :t, : e if kind == "e" else d])
    return whole


def _backward_kernel(chunk: Chunk, count: int, *refs: Any) -> None:
    states, dout, dfinal, *outs, dstate = refs[count:]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        dstate[...] = dfinal[...]

    q, k, v, g, beta = _read(chunk, refs[:count])
    made = backward(chunk, q, k, v, g, beta, states[:, 0], dout[...], dstate[...])
    *gradients, before = (x for x in made if x is not None)
    for ref, x in zip(outs, gradients, strict=True):
        ref[...] = x.astype(ref.dtype).reshape(ref.shape)
    dstate[...] = before
