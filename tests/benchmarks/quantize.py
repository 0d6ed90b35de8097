"""A quantized training step, compiled for a TPU slice, against MaxText's; and whether training follows.

    python -m tests.benchmarks.quantize [F1 F2 A1 ...] [--collectives explicit|auto|both] [--recipe int8]
    python -m tests.benchmarks.quantize --train

The first prints, per device and step of Llama 7B as compiled: temp memory and bytes on the wire with their
ratios to MaxText's, which quantizes by AQT (F1) and by Qwix (F2); of the dots that were quantized, forward,
backward and computed again, how many multiply in eight bits, and what part of their arithmetic that is; and
gigabytes sent, by what sends them and of which elements. Row A1 is the same step in floats. The last column
has the aims that a row misses: temp memory and wire at most MaxText's, all dots in eight bits.
Passes are `narrow`, `kernels` and `quantize` (of the recipe), or those of `--use`. `--cycles` compiles to the
end, minutes each, for the compiler's estimate of cycles, and prints F1 and F2 over A1.

`--train` is `tests.benchmarks.quantize_training`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from tests.benchmarks import quantize_training
from tests.benchmarks.rows_maxtext import ROWS, Row, against, parser, step
from tests.benchmarks.traffic import sharded
from xform import topologies
from xform.aot import Result, compile_lowered
from xform.promises import multiplied

FLOATS = "A1"
QUANTIZED = {
    "F1": Row("fsdp=16", "v5e-16", 16, "full", 3.902, 5.054, 33.450, 101.8),
    "F2": Row("fsdp=16", "v5e-16", 16, "full", 3.511, 5.054, 28.976, 101.8),
}
LISTED = QUANTIZED | {FLOATS: ROWS[FLOATS]}
SHOWN = 0.05  # gigabytes: less is not listed


@functools.cache
def measured(way: str, uses: tuple[str, ...], full: bool) -> Result:
    """The step of these rows, which differ in MaxText's figures alone, compiled with these passes."""
    ours, args, topology = step(ROWS[FLOATS], sharded(uses, way))
    lowered = ours.lower(*args)
    result = compile_lowered(lowered.lowered, topology=topology, mesh=ours.mesh, full=full)
    result.check_promises(lowered.program.laid_out, lowered.program.report)
    return result


def figures(result: Result) -> tuple[float, float]:
    """GB of temporaries and on the wire."""
    return (result.memory["temp"] or 0) / 1e9, result.costs.wire_bytes / 1e9


def missed(name: str, result: Result) -> list[str]:
    """The aims that a row misses, with what it has and what is asked."""
    row, aims = LISTED[name], []
    for what, have, most in zip(("temp", "wire"), figures(result), (row.temp, row.wire), strict=True):
        # MaxText's figures have four digits.
        if (ratio := round(have / most, 3)) > 1:
            aims.append(f"{what} {ratio} > 1.0")
    share = multiplied.share(result.costs)
    if name in QUANTIZED and (share is None or share.count < share.of):
        aims.append(f"dots {share}")
    return aims


def sent(result: Result) -> str:
    """Gigabytes by kind of collective and element type: `all-gather 6.2 s8, 0.3 bf16`."""
    parts = []
    for kind, dtypes in sorted(result.costs.sent.items()):
        large = [f"{n / 1e9:.2f} {dtype}" for dtype, n in dtypes.most_common() if n / 1e9 >= SHOWN]
        if large:
            parts.append(f"{kind} {', '.join(large)}")
    return "; ".join(parts)


def rows(
    names: Sequence[str], ways: Sequence[str], recipe: str, uses: Sequence[str] | None, cycles: bool
) -> None:
    titles = ("temp GB", "wire GB", "in eight bits", *(["Mcycles"] if cycles else []))
    print(f"{'row':4} {'collectives':11} " + " ".join(f"{title:>15}" for title in titles) + "  aims")
    floats = ("narrow", "kernels")
    quantized = tuple(uses or (*floats, f"quantize:recipe={recipe}"))
    for name in names:
        row = LISTED[name]
        for way in ways:
            result = measured(way, quantized if name in QUANTIZED else floats, cycles)
            temp, wire = figures(result)
            share = multiplied.share(result.costs)
            cells = [
                against(temp, row.temp),
                against(wire, row.wire),
                f"{share.count} of {share.of}" if share else "-",
            ]
            if cycles:
                ratio = measured(way, floats, True).costs.cycles / 1e6 if name in QUANTIZED else row.mcycles
                cells.append(against(result.costs.cycles / 1e6, ratio))
            failed = missed(name, result)
            said = "not reached: " + ", ".join(failed) if failed else "reached"
            line = f"{name:4} {way:11} {' '.join(f'{cell:>15}' for cell in cells)}  {said}; {sent(result)}"
            print(line, flush=True)


def main(arguments: list[str]) -> int:
    flags = parser("tests.benchmarks.quantize", list(LISTED))
    flags.add_argument("--collectives", choices=("auto", "explicit", "both"), default="both")
    flags.add_argument("--recipe", default="int8", help="of quantize")
    flags.add_argument("--cycles", action="store_true", help="compile to the end")
    flags.add_argument("--train", action="store_true", help="train a small model instead")
    options = flags.parse_args(arguments)
    if options.train:
        return quantize_training.main()
    ways = ("explicit", "auto") if options.collectives == "both" else (options.collectives,)
    rows(options.rows or list(LISTED), ways, options.recipe, options.use, options.cycles)
    return 0


if __name__ == "__main__":
    topologies.prepare_environment()
    sys.exit(main(sys.argv[1:]))
