"""Sizes of the blocks in which attention is computed: by chip and shape, or a plan's, checked to fit.

A kernel holds a block of queries, one of keys and of values, their results and the scores between them in a
chip's vector memory, all but the scores twice, so that the next ones are fetched meanwhile. What it needs is
counted here (`needed`), since the compiler says so only when it has failed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from xform.errors import Decline, PlanError

LANES = 128
"""Lengths are padded to a multiple of it, and blocks are: the width of a register."""

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes in place of the table's, called as splash attention calls them; None: the table's.

    block_q, block_kv: of the forward kernel; block_q_dkv, block_kv_dkv: of the backward kernel for keys and
    values; block_q_dq, block_kv_dq: of the one for queries. The `compute` ones are how many keys of a block
    are computed at a time. use_fused_bwd_kernel: one backward kernel for all.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    use_fused_bwd_kernel: bool | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows and keys, padded, and the blocks of a pass over them. q_dq, kv_dq: of the kernel for dq, where it
    has one; else 0.
    """

    rows: int
    keys: int
    q: int
    kv: int
    kv_compute: int
    q_dq: int = 0
    kv_dq: int = 0
    fused: bool = False


@dataclasses.dataclass(frozen=True)
class Chip:
    """vmem: bytes of vector memory of a kernel. forward, backward: queries, keys, keys at a time."""

    vmem: int
    forward: tuple[int, int, int]
    backward: tuple[int, int, int]


# Chosen by scheduled bundles for each 512 x 512 of scores (libtpu 0.0.52, causal, heads of 128, two kernels
# in the backward pass). v5e, blocks of 512 alone: 1746 forward, 3827 backward; as below: 1394 and 3472. v6e:
# 1230 and 2701; 924 and 2255. More keys are fewer yet, but visit more of what a causal mask hides.
# fmt: off
CHIPS = {
    "v4":    Chip(16 * MIB, (512, 1024, 512), (1024, 1024, 512)),
    "v5e":   Chip(16 * MIB, (512, 1024, 512), (1024, 1024, 512)),
    "v5p":   Chip(16 * MIB, (512, 1024, 512), (1024, 1024, 512)),
    "v6e":   Chip(32 * MIB, (1024, 1024, 512), (1024, 1024, 512)),
    "tpu7x": Chip(32 * MIB, (1024, 1024, 512), (1024, 1024, 512)),
}
# fmt: on

ROWS = 16
"""Few queries are padded to a multiple of it."""

SCORES = 1.06
"""Of the scores of a step, how often a kernel holds them."""

_OPTION = "kernels.blocks: attention:"

STEP = 64
"""What a step over a block costs beside its work, in rows of work."""

PARTS = 2
"""Up to as many blocks of keys, the backward pass is one kernel: it writes dq once for each of them."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is computed: rows and keys, not padded, sizes of heads, bytes of a number, whether by segments,
    whether by a mask that is an array of a byte for each row and key.
    """

    rows: int
    keys: int
    d: int
    e: int
    itemsize: int
    segments: bool = False
    mask: bool = False


@functools.lru_cache(maxsize=256)
def forward_sizes(shape: Shape, chip: str, blocks: Blocks) -> Sizes:
    """Raises PlanError for blocks of the plan that don't fit, Decline where none of the table's would."""
    given = {"q": blocks.block_q, "kv": blocks.block_kv, "compute": blocks.block_kv_compute}
    names = {"q": "block_q", "kv": "block_kv", "compute": "block_kv_compute"}
    q, kv, compute = _fitting("forward", shape, chip, given, names)
    return Sizes(_up(shape.rows, q), _up(shape.keys, kv), q, kv, compute)


@functools.lru_cache(maxsize=256)
def backward_sizes(shape: Shape, chip: str, blocks: Blocks) -> Sizes:
    """As `forward_sizes`; one kernel or two, as said at `PARTS`."""
    given = {"q": blocks.block_q_dkv, "kv": blocks.block_kv_dkv, "compute": blocks.block_kv_dkv_compute}
    names = {"q": "block_q_dkv", "kv": "block_kv_dkv", "compute": "block_kv_dkv_compute"}
    q, kv, compute = _fitting("dkv", shape, chip, given, names)
    fused = blocks.use_fused_bwd_kernel
    if fused is None:
        fused = -(-shape.keys // kv) <= PARTS and blocks.block_q_dq is None and blocks.block_kv_dq is None
    if fused:
        return Sizes(_up(shape.rows, q), _up(shape.keys, kv), q, kv, compute, fused=True)
    # Both kernels take the same padded rows and keys: the second's blocks are the first's, or part of them.
    vmem, kv_dq = _chip(chip).vmem, blocks.block_kv_dq or compute
    parts = (b for b in range(q, 0, -LANES) if q % b == 0 and needed("dq", b, kv_dq, 0, shape) <= vmem)
    given = {"q": blocks.block_q_dq or next(parts, LANES), "kv": kv_dq}
    q_dq, kv_dq, _ = _fitting("dq", shape, chip, given, {"q": "block_q_dq", "kv": "block_kv_dq"})
    rows, keys = _up(shape.rows, math.lcm(q, q_dq)), _up(shape.keys, math.lcm(kv, kv_dq))
    return Sizes(rows, keys, q, kv, compute, q_dq, kv_dq)


def _chip(name: str) -> Chip:
    return CHIPS.get(name, CHIPS["v5e"])


def _fitting(
    kind: str, shape: Shape, chip: str, given: Mapping[str, int | None], names: Mapping[str, str]
) -> tuple[int, int, int]:
    """Queries, keys, and keys at a time: what is given, and else the most of the table's that fit."""
    for key, size in given.items():
        if size is not None and (size <= 0 or size % LANES):
            raise PlanError(f"{_OPTION} {names[key]} = {size} is no positive multiple of {LANES}")
    have = _chip(chip)
    most_q, most_kv, most_compute = have.forward if kind == "forward" else have.backward
    rows = ROWS if kind == "forward" and shape.rows < LANES else LANES
    while True:
        q = _clipped(given["q"], shape.rows, rows) or _block(shape.rows, most_q, rows)
        kv = _clipped(given["kv"], shape.keys, LANES) or _block(shape.keys, most_kv, LANES)
        compute = kv
        if kind != "dq":
            compute = _clipped(given["compute"], kv, LANES) or _step(kv, most_compute)
        if kv % compute:
            raise PlanError(f"{_OPTION} {names['compute']} = {compute} does not divide {names['kv']} = {kv}")
        bytes_ = needed(kind, q, kv, compute, shape)
        if bytes_ <= have.vmem:
            return q, kv, compute
        if kind != "forward" and most_compute > LANES and given.get("compute", 0) is None:
            most_compute //= 2
        elif most_kv > LANES and given["kv"] is None:
            most_kv //= 2
        elif most_q > LANES and given["q"] is None:
            most_q //= 2
        else:
            break
    said = [f"{names[key]} = {size}" for key, size in given.items() if size is not None]
    much = f"{bytes_ / MIB:.1f} MiB of vector memory, of which {chip or 'a chip'} has {have.vmem // MIB}"
    if said:
        raise PlanError(f"{_OPTION} {' and '.join(said)} need {much}: take smaller ones")
    raise Decline(f"heads of {max(shape.d, shape.e)} need {much}, with the smallest blocks")


def needed(kind: str, q: int, kv: int, compute: int, shape: Shape) -> int:
    """Bytes of vector memory of a kernel: "forward", "dkv" (dq in it or not) or "dq".

    Operands and results are held twice, the sums once, and the scores of a step a little more than once
    (v5p takes 1.06 times, v5e and v6e three quarters). The forward kernel's steps over a block of keys hold
    theirs at the same time.
    """
    d, e = _up(shape.d, LANES), _up(shape.e, LANES)
    queries, keys = q * (d + e) * shape.itemsize, kv * (d + e) * shape.itemsize
    wide = 4 * LANES * q  # a number a query, of 4 bytes, in each lane
    mask = 2 * q * kv if shape.mask else 0
    position = wide * (1 + shape.segments)
    if kind == "forward":  # q, out; k, v; lse; positions; then the maximum, the sum and the weighted values
        held = 2 * (queries + keys + wide + position) + 2 * wide + 4 * q * e + mask
        return held + int(SCORES * 4 * q * kv)
    few = 4 * 8 * q
    if kind == "dkv":  # q, dout; k, v; dk, dv; dq; lse, delta, positions; then dk, dv, dq
        numbers = 3 * few + shape.segments * (few + 4 * LANES * kv)
        held = 2 * (queries + 2 * keys + q * d * shape.itemsize + numbers) + 4 * kv * (d + e) + 4 * q * d
        return held + mask + int(SCORES * 4 * q * compute)
    held = 2 * (queries + keys + q * d * shape.itemsize + 2 * few + position) + 4 * q * d
    return held + int(SCORES * 4 * q * kv)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _clipped(size: int | None, n: int, unit: int) -> int | None:
    """A size that was given, but no larger than what there is."""
    return None if size is None else min(size, _up(n, unit))


def _block(n: int, most: int, unit: int) -> int:
    """The block for n, up to `most`: larger ones take fewer steps, each with its own work, and pad more."""
    if n <= most:
        return _up(n, unit)
    return min(range(most, 0, -LANES), key=lambda b: _up(n, b) * (1 + STEP / b))


def _step(kv: int, most: int) -> int:
    """How many keys of a block to take at a time: a multiple of `LANES` that divides it, about `most`."""
    found = next(b for b in range(min(kv, most), 0, -LANES) if kv % b == 0)
    return kv if 2 * found < most else found
