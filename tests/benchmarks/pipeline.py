"""Llama 7B training steps through the stages of a pipeline, compiled for a TPU slice, against MaxText's.

    python -m tests.benchmarks.pipeline [ROW ...] [--cycles] [--use PASS ...]
    python -m tests.benchmarks.pipeline --sweep [ROW ...] [--use PASS ...]

The first prints for each schedule, per device and step as compiled: bytes on the wire with their ratio to
those of MaxText's row of as many layers a chunk; temp memory with its ratio; permutes over the axis of the
stages, of as many as its table has ticks that send anything, in a direction each; arithmetic of dots
with its ratio; idle slots of the table. Below it, gigabytes sent over each axis by kind, and how many
all-gathers over the stages have a weight of layers in them. `--cycles` compiles to the end, a minute or two
each, for the compiler's estimate of cycles. The last column has the aims that a row misses, with what it has
and what is asked:

    wire, temp   at most so much of MaxText's row (`AIMS`)
    D1's wire    of the circular schedule, at most so much of what MaxText sends that gathers at every tick
    cycles       of the circular schedule, at most so much of that row's
    permutes     no more than the table's
    weights      no all-gather over the stages with a weight in it

`--sweep` prints temp memory at 4 to 32 microbatches of the same size: with 1F1B it is to be flat, and what
GPipe keeps grows with them. Passes are `narrow` and `kernels`, or those of `--use`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Sequence

import jax

from tests.benchmarks.rows_maxtext import Row, against, parser, step
from tests.benchmarks.traffic import sharded
from xform import hlo, topologies
from xform.aot import OutOfDeviceMemory, Result, compile_lowered
from xform.hlo import collectives
from xform.schedules import Cost, cost, make

STAGES, MICROBATCHES, AXIS = 4, 8, "stage"
ROWS_OF_A_MICROBATCH = 4
SWEPT = (4, 8, 16, 32)
FLAT = 1.05
"""Temp memory of the most microbatches, over that at twice as many as there are stages."""

D1, D2, D3 = (
    Row(f"{AXIS}={STAGES},fsdp=4", "v5e-16", 32, "full", temp, 5.64, wire, dots, mcycles)
    for temp, wire, dots, mcycles in (
        (4.742, 76.896, 213.0, 3012.7),
        (10.871, 21.446, 213.0, 0.0),
        (8.486, 53.391, 278.8, 0.0),
    )
)
"""MaxText's circular schedule of 8 repeats, which gathers weights at each tick, or (D2) once a repeat; and
one of 1 repeat, which gathers at each tick.
"""


@dataclasses.dataclass(frozen=True)
class Aim:
    """A schedule, MaxText's row that it is against, and the most that it may have of that row's wire and temp
    memory; of D1's wire and cycles, where these are compared.
    """

    repeats: int
    row: Row
    wire: float
    temp: float
    first_wire: float = 0.0
    first_cycles: float = 0.0


AIMS = {
    "circular": Aim(8, D2, 0.52, 0.55, 0.15, 0.75),
    "eager-1f1b": Aim(1, D3, 0.13, 1.0),
}
SWEEP = ("eager-1f1b", "1f1b", "gpipe")


def compiled(
    schedule: str, repeats: int, microbatches: int, uses: Sequence[str], full: bool = False
) -> tuple[Result, list[tuple[int, ...]]]:
    """The step under a schedule, compiled; and the shapes of a layer's matrices."""
    row = dataclasses.replace(D1, batch=ROWS_OF_A_MICROBATCH * microbatches)
    pipeline = f"pipeline:schedule={schedule},repeats={repeats},microbatches={microbatches}"
    ours, args, topology = step(row, sharded([*uses, pipeline], "explicit"))
    result = compile_lowered(ours.lower(*args).lowered, topology=topology, mesh=ours.mesh, full=full)
    shapes = {x.shape[1:] for x in jax.tree.leaves(args[0]) if x.ndim > 2 and x.shape[0] == row.layers}
    return result, sorted(shapes)


def gathered(result: Result, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """The all-gathers over the stages that give a whole weight of layers, by what they give."""
    mesh, devices = collectives.Mesh(dict(result.mesh)), math.prod(result.mesh.values())
    found = []
    for computation in hlo.parse(result.hlo_text).computations.values():
        for each in computation:
            if collectives.base(each.opcode) != "all-gather" or each.opcode.endswith("-done"):
                continue
            over = mesh.spanned(collectives.read(computation, each, devices, mesh).groups)
            dims = [n for n in _dims(str(each.type)) if len(n) > 1]
            if AXIS in over.split("+") and any(n[-len(shape) :] == shape for n in dims for shape in shapes):
                found.append(str(each.type))
    return found


def _dims(text: str) -> Iterator[tuple[int, ...]]:
    """The dimensions of the arrays in a type."""
    for numbers in re.findall(r"\w\[([\d,]+)\]", text):
        yield tuple(map(int, numbers.split(",")))


def table(schedule: str, repeats: int, microbatches: int = MICROBATCHES) -> Cost:
    return cost(make(schedule, STAGES, microbatches, repeats))


def permutes(result: Result) -> int:
    """Over the axis of the stages, as often as they run."""
    kinds = result.costs.axes.get(AXIS, {})
    return kinds["collective-permute"].count if "collective-permute" in kinds else 0


def planned(found: Cost) -> int:
    return found.permutes("next") + found.permutes("previous")


def missed(name: str, result: Result, weights: Sequence[str]) -> list[str]:
    """The aims that a schedule misses."""
    aim, wire = AIMS[name], result.costs.wire_bytes / 1e9
    aims = [
        ("wire", wire / aim.row.wire, aim.wire),
        ("temp", (result.memory["temp"] or 0) / 1e9 / aim.row.temp, aim.temp),
    ]
    if aim.first_wire:
        aims.append(("D1's wire", wire / D1.wire, aim.first_wire))
    if aim.first_cycles and result.cycles:
        aims.append(("cycles", result.cycles / 1e6 / D1.mcycles, aim.first_cycles))
    # What is printed is what is judged: MaxText's figures have four digits.
    said = [f"{what} {have:.3f} > {most}" for what, have, most in aims if round(have, 3) > most]
    if (have := permutes(result)) > (most := planned(table(name, aim.repeats))):
        said.append(f"permutes {have} > {most}")
    return [*said, *(f"weights: all-gather {each} over {AXIS}" for each in weights)]


def sent(result: Result) -> list[str]:
    """Gigabytes over each axis, by kind of collective."""
    lines = []
    for over, kinds in sorted(result.costs.axes.items()):
        total = sum(kind.wire_bytes for kind in kinds.values())
        parts = [f"{kind} {each.wire_bytes / 1e9:.2f} ({each.count})" for kind, each in sorted(kinds.items())]
        lines.append(f"over {over} {total / 1e9:.2f} GB: {', '.join(parts)}")
    return lines


def rows(names: Sequence[str], uses: Sequence[str], cycles: bool) -> None:
    titles = ("wire GB", "temp GB", "permutes", "dot TFLOP", "idle slots", *(["Mcycles"] if cycles else []))
    print(f"{'schedule':12} {'repeats':7} " + " ".join(f"{title:>15}" for title in titles) + "  aims")
    for name in names:
        aim = AIMS[name]
        plan = table(name, aim.repeats)
        result, shapes = compiled(name, aim.repeats, MICROBATCHES, uses, cycles)
        weights = gathered(result, shapes)
        cells = [
            against(result.costs.wire_bytes / 1e9, aim.row.wire),
            against((result.memory["temp"] or 0) / 1e9, aim.row.temp),
            f"{permutes(result)} of {planned(plan)}",
            against(result.costs.flops / 1e12, aim.row.dots),
            f"{plan.idle} of {plan.slots}",
            *([against((result.cycles or 0) / 1e6, D1.mcycles)] if cycles else []),
        ]
        failed = missed(name, result, weights)
        said = "not reached: " + ", ".join(failed) if failed else "reached"
        print(f"{name:12} {aim.repeats:7} {' '.join(f'{cell:>15}' for cell in cells)}  {said}")
        for line in [*sent(result), f"all-gathers over {AXIS} with a weight in them: {len(weights)}"]:
            print(f"    {line}", flush=True)


def sweep(names: Sequence[str], uses: Sequence[str]) -> None:
    """The table of temp memory by microbatches."""
    print(f"{'temp GB at':12} " + " ".join(f"{n:>8}" for n in SWEPT))
    for name in names:
        cells, found = [], dict[int, float]()
        repeats = AIMS[name].repeats if name in AIMS else 1
        for n in SWEPT:
            try:
                result, _ = compiled(name, repeats, n, uses)
                found[n] = (result.memory["temp"] or 0) / 1e9
                cells.append(f"{found[n]:8.2f}")
            except OutOfDeviceMemory:
                cells.append(f"{'not fit':>8}")
        print(f"{name:12} {' '.join(cells)}  {grows(found)}", flush=True)


def grows(found: dict[int, float]) -> str:
    """How temp memory grows with the microbatches, from twice as many as there are stages on."""
    these = {n: gb for n, gb in found.items() if n >= 2 * STAGES}
    if len(these) < 2:
        return "too few fit to tell"
    first, last = min(these), max(these)
    if these[last] <= FLAT * these[first]:
        return "flat"
    return f"grows by {(these[last] - these[first]) / (last - first):.3f} a microbatch"


def main(arguments: list[str]) -> None:
    flags = parser("tests.benchmarks.pipeline", [*AIMS, *(name for name in SWEEP if name not in AIMS)])
    flags.add_argument("--cycles", action="store_true", help="compile to the end")
    flags.add_argument("--sweep", action="store_true", help="temp memory by microbatches instead")
    options = flags.parse_args(arguments)
    uses = options.use or ["narrow", "kernels"]
    if options.sweep:
        return sweep(options.rows or SWEEP, uses)
    rows([name for name in options.rows or AIMS if name in AIMS], uses, options.cycles)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
