"""What a product takes on a TPU, in floats and quantized, as the TPU compiler counts cycles.

    in floats      3 products
    quantized      3 products of codes; operands and gradient read for their ranges, and again to be encoded

A product takes the longest of its arithmetic, what it reads and what it writes, and a part of the rest, which
the compiler does not hide. Scaling the result goes with the product, and its codes stay in the chip's memory.
Ranges and codes are made by passes of their own, which take longer than the memory's bandwidth would have it.
`SHARES` says how much of what a chip is sold for the compiler reckons with; `python -m
tests.benchmarks.quantize_costs` has estimates and the compiler's cycles side by side.
"""

from __future__ import annotations

import dataclasses

from xform.quantization.formats import Format
from xform.quantization.products import SHORTEST_BLOCK
from xform.quantization.training import Products, Side
from xform.topologies import Kind


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A product and its gradients, on one device. multiplied: pairs of numbers, in each of the three.
    numbers: of the left operand, the right one, and the result. encoded: of the operands, those that the
    device makes codes of itself, for this product: fewer where weights travel as codes, or products share an
    operand.
    nbytes: of a number of each. weight: the operand whose gradient contracts the tokens.
    """

    multiplied: float
    numbers: tuple[float, float, float]
    encoded: tuple[float, float]
    nbytes: tuple[int, int, int] = (2, 2, 2)
    weight: int = 1


@dataclasses.dataclass(frozen=True)
class Shares:
    """Parts of a chip's peak and of its memory's bandwidth. int8: of the peak in integers. tokens: the same
    where what is contracted are rows of both operands, as in the gradient of a weight. read, write: products.
    passes: ranges and codes. seen: of what is shorter than the longest, how much adds to it.
    """

    int8: float
    tokens: float
    read: float
    write: float
    passes: float
    seen: float


SHARES = {
    "v5e": Shares(int8=0.98, tokens=0.5, read=0.67, write=0.27, passes=0.26, seen=0.1),
    "v5p": Shares(int8=0.98, tokens=0.5, read=0.67, write=0.27, passes=0.21, seen=0.1),
    "v6e": Shares(int8=0.6, tokens=0.6, read=0.76, write=0.3, passes=0.29, seen=0.25),
}
SHARES["v4"], SHARES["tpu7x"] = SHARES["v5p"], SHARES["v6e"]
"""By the name of a generation: read from the cycles of the compiler (libtpu 0.0.52); of v4 and tpu7x they are
those of the chip that is built most alike.
"""

SETUP = 2.5e3
"""Cycles that each pass takes beside."""

RESIDENT = 2**26
"""Bytes of an operand that stays in the chip's memory. Where both have more, they are read again for blocks
of the result.
"""

BLOCK = 1536
"""Rows and columns of such a block."""

PASSES = {"absmax": 1, "minmax": 1, "rms": 1, "percentile": 100, "fixed": 0, "delayed": 0, "calibrated": 0}
"""How often an operand is read for its range, by calibration: a percentile sorts; what a history takes in is
measured where codes are made.
"""

BOTH = 1.6
"""Passes that make codes of a gradient for both products, in one: it is read once."""


def in_floats(kind: Kind, sizes: Sizes, trained: bool) -> float:
    """Seconds for the product, and for both gradients where `trained`."""
    return sum(_product(kind, sizes, result, "") for result in ((2, 0, 1) if trained else (2,)))


def quantized(kind: Kind, sizes: Sizes, how: Products, trained: bool) -> float:
    """Seconds for the same, quantized."""
    sides = (how.left, how.right)
    total = _product(kind, sizes, 2, forward_units(how))
    total += sum(_encoded(kind, sizes, k, side) for k, side in enumerate(sides))
    if not trained:
        return total
    gradients = (how.dlhs, how.drhs)
    for k, (gradient, other) in enumerate(zip(gradients, (how.right, how.left), strict=True)):
        total += _product(kind, sizes, k, _backward_units(gradient, other))
        if gradient.anew and (other.format is None or _is_in_blocks(other)):
            total += _encoded(kind, sizes, 1 - k, dataclasses.replace(gradient, round="nearest"))
    formats = [g for g in gradients if g.format is not None]
    if not formats:
        return total
    ranges = max(PASSES[g.calibration.method] for g in formats)
    codes = BOTH if len(formats) == 2 else 1
    return total + (ranges + codes) * _pass(kind, sizes.numbers[2] * sizes.nbytes[2])


def is_trained(how: Products) -> bool:
    """Whether gradients are quantized: else both ways have them in floats, and they are not compared."""
    return how.dlhs.format is not None or how.drhs.format is not None


def forward_units(how: Products) -> str:
    """What multiplies: "int8", "fp8", or "" for units of floats."""
    if any(_is_short(side) for side in (how.left, how.right)):
        return ""
    return _units(how.left.format, how.right.format)


def peak(kind: Kind, units: str) -> float:
    """Operations a second of a chip's units; those it lacks are the ones of bfloat16."""
    return {"int8": kind.peak_int8, "fp8": kind.peak_fp8}.get(units, 0.0) or kind.peak_flops


def _backward_units(gradient: Side, other: Side) -> str:
    if gradient.format is None:
        return ""
    if gradient.anew and (other.format is None or _is_in_blocks(other)):
        return "" if _is_short(gradient) else _units(gradient.format, gradient.format)
    if other.format is None or _is_in_blocks(other) or _is_short(gradient):
        return ""
    return _units(gradient.format, other.format)


def _units(left: Format | None, right: Format | None) -> str:
    found = {_unit(f) for f in (left, right)}
    return found.pop() if len(found) == 1 else ""


def _unit(form: Format | None) -> str:
    if form is None or form.table:
        return ""
    return "int8" if form.is_integer else "fp8"


def _is_in_blocks(side: Side) -> bool:
    return bool(side.block or (side.format and side.format.block))


def _is_short(side: Side) -> bool:
    """Whether blocks are so short that codes are made floats again."""
    return 0 < (side.block or (side.format.block if side.format else 0)) < SHORTEST_BLOCK


def _product(kind: Kind, sizes: Sizes, result: int, units: str) -> float:
    """Seconds of one of the three products: of that which gives the left operand's gradient (0), the right
    one's (1), or the result (2).
    """
    share = SHARES[kind.name]
    rate = peak(kind, units)
    if rate == kind.peak_int8 != kind.peak_flops:
        rate *= share.tokens if result == sizes.weight else share.int8
    taken = [] if units else [sizes.numbers[k] * sizes.nbytes[k] for k in (0, 1, 2) if k != result]
    read = float(sum(taken))
    if taken and min(taken) > RESIDENT:
        read = max(read, 2 * sizes.multiplied * min(sizes.nbytes) / BLOCK)
    parts = (
        2 * sizes.multiplied / rate,
        read / (share.read * kind.bandwidth),
        sizes.numbers[result] * sizes.nbytes[result] / (share.write * kind.bandwidth),
    )
    longest = max(parts)
    return longest + share.seen * (sum(parts) - longest) + SETUP / kind.clock


def _encoded(kind: Kind, sizes: Sizes, k: int, side: Side) -> float:
    if side.format is None:
        return 0.0
    return (PASSES[side.calibration.method] + 1) * _pass(kind, sizes.encoded[k] * sizes.nbytes[k])


def _pass(kind: Kind, nbytes: float) -> float:
    return nbytes / (SHARES[kind.name].passes * kind.bandwidth) + SETUP / kind.clock
