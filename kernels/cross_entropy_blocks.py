"""Sizes of the blocks in which the loss of a vocabulary is computed, by chip and shape, checked to fit.

Forward, each byte of the weights is read once for a block of tokens: the longer that is, the fewer bytes.
Backward, each vector of a token is read, and its gradient read and written in float32, once for a block of
the vocabulary. So long blocks of the one that stays, and short ones of the one that passes by.
"""

from __future__ import annotations

import dataclasses

from xform.errors import PlanError

LANES = 128
MIB = 1 << 20

SPARE = 6 * MIB
"""What a kernel gets beyond what is counted here (`forward_bytes`, `backward_bytes`)."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tokens and vocabulary of a block, forward (t, v) and backward; 0: those of the table."""

    t: int = 0
    v: int = 0
    back_t: int = 0
    back_v: int = 0


@dataclasses.dataclass(frozen=True)
class Chip:
    """vmem: bytes that a kernel may ask for. blocks: the longest. cores: of a device, each with its own VMEM.
    flops, bandwidth: of a device, a second. busy: the share of the flops that the kernels' scheduled bundles
    come to (tests/benchmarks/kernels_cross_entropy).
    """

    vmem: int
    blocks: Blocks
    cores: int
    flops: float
    bandwidth: float
    busy: float = 1.0


CHIPS = {
    "v5e": Chip(100 * MIB, Blocks(512, 1280, 256, 1280), 1, 197e12, 819e9),
    "v5p": Chip(60 * MIB, Blocks(512, 640, 256, 640), 2, 459e12, 2765e9),
    "v6e": Chip(100 * MIB, Blocks(1024, 640, 256, 1280), 1, 918e12, 1638e9, 0.75),
}
OTHER = "v5e"
"""The chip whose row is taken for one that has none."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is given: tokens and vocabulary of a block, the bytes of VMEM to ask for, and cores."""

    t: int
    v: int
    vmem: int
    cores: int = 1


def chip_of(name: str) -> Chip:
    return CHIPS.get(name, CHIPS[OTHER])


def forward_bytes(bt: int, bv: int, d: int, size: int) -> int:
    """Bytes of VMEM: x and w twice, what is kept of each lane, columns of labels and results, the logits."""
    return 2 * size * d * (bt + bv) + 4 * 4 * bt * LANES + 6 * 4 * bt * LANES + 8 * bt * bv


def backward_bytes(bt: int, bv: int, d: int, size: int) -> int:
    """Bytes of VMEM: x, its transpose and w twice; the gradient of w, twice and a sum in float32, or twice in
    float32; the gradient of x, twice and once more, columns, the logits.
    """
    weights = 2 * size + max(2 * size + 4, 8)
    return d * bt * (4 * size + 12) + d * bv * weights + 8 * 4 * bt * LANES + 8 * bt * bv


def sizes_of(chip: str, way: str, t: int, d: int, v: int, size: int, asked: Blocks) -> Sizes:
    """Blocks of a pass ("forward", "backward") for t tokens, d, v and numbers of `size` bytes.

    Those of the table, no longer than the operands; of at least half that many the largest number that
    divides them. They are halved until they fit; PlanError where those asked for don't.
    """
    row, count = chip_of(chip), forward_bytes if way == "forward" else backward_bytes
    back = way == "backward"
    wanted = (asked.back_t, asked.back_v) if back else (asked.t, asked.v)
    longest = (row.blocks.back_t, row.blocks.back_v) if back else (row.blocks.t, row.blocks.v)
    rows = LANES if back else 32 // size  # backward they are lanes too, of the transpose
    if wanted[0] % rows or wanted[1] % LANES:
        raise PlanError(
            f"blocks of {wanted} (tokens, vocabulary): multiples of {rows} and {LANES} are allowed"
        )
    bt, bv = (a or b for a, b in zip(wanted, longest, strict=True))
    while True:
        own = wanted[0] or _dividing(t, bt, rows), wanted[1] or _dividing(v, bv, LANES)
        own = min(own[0], _up(t, rows)), min(own[1], _up(v, LANES))
        taken = count(*own, d, size)
        if taken + SPARE <= row.vmem:
            return Sizes(*own, taken + SPARE, row.cores if back else 1)
        can_v, can_t = not wanted[1] and bv > LANES, not wanted[0] and bt > rows
        if not (can_v or can_t):
            raise PlanError(
                f"blocks of {own[0]} tokens and {own[1]} of the vocabulary, {way}, take"
                f" {taken / MIB:.1f} MiB of VMEM;"
                f" a kernel on {chip} may have {(row.vmem - SPARE) / MIB:.0f}: make them smaller"
            )
        if can_v and (bv >= bt or not can_t):
            bv = _up(bv // 2, LANES)
        else:
            bt = _up(bt // 2, rows)


def _dividing(size: int, longest: int, multiple: int) -> int:
    found = range(longest, longest // 2 - 1, -multiple)
    return next((b for b in found if size % b == 0), longest)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
