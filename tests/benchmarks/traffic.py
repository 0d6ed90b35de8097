"""Llama 7B training steps compiled for TPU slices, against MaxText's on the same shapes: bytes on the wire.

    python -m tests.benchmarks.traffic [ROW ...] [--collectives auto|explicit] [--cycles] [--use PASS ...]

Prints, per device and step as compiled: bytes on the wire with their ratio to MaxText's (`rows_maxtext`); of
them those over the axes of the batch, which are weights and gradients, with their ratio to the plan's bound
(`xform.spmd.traffic`: each weight gathered once for each pass that reads it, its gradient scattered once);
those over other axes, which are activations; temp memory, and temp memory without the scores, with their
ratios. The last column has the aims that a row misses, with what it has and what is asked:

    wire/bound   bytes on the wire at most 1.02 of the bound, where fsdp is the only axis
    wire         at most what MaxText sends, in B1 at most 0.86 of it
    temp         without scores, at most MaxText's temp memory
    cycles       at most MaxText's

`--cycles` compiles A1 and B1 to the end, minutes each, for the compiler's estimate of cycles; there MaxText's
attention is a kernel and counts nothing, while ours is counted: a last figure leaves out its two products
with scores. Passes are `narrow`, or those of `--use`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.in_use import Compiled, compiled
from tests.benchmarks.rows_maxtext import ROWS, Row, against, parser, step, wire_over, without_scores
from xform import topologies
from xform.aot import compile_lowered
from xform.report import Traffic

SHOWN = [name for name, row in ROWS.items() if row.mesh]
OVER_BOUND = 1.02
OVER_MAXTEXT = {"B1": 0.86}
CYCLES = ("A1", "B1")
SCORES = "bkgqs"  # the scores in the einsums of the model's attention


def sharded(uses: Sequence[str], collectives: str) -> list[str]:
    """The passes with Shard's collectives among them."""
    option = f"collectives={collectives}"
    shards = [use for use in uses if use.split(":")[0] == "shard"] or ["shard"]
    rest = [use for use in uses if use not in shards]
    return [*rest, *(f"{use}{',' if ':' in use else ':'}{option}" for use in shards)]


def bound(row: Row, uses: Sequence[str]) -> Traffic:
    """What the row's plan must send, from its program with the collectives written out."""
    explicit, args, _ = step(row, sharded(uses, "explicit"))
    found = explicit.trace(*args).report.traffic
    assert found is not None, f"no collectives were written for {row.mesh}"
    return found


def mcycles(row: Row, uses: Sequence[str]) -> tuple[float, float]:
    """Millions of estimated cycles of our step, compiled to the end; and those apart from the two products
    with scores, which MaxText's kernel has inside.
    """
    ours, args, topology = step(row, uses)
    result = compile_lowered(ours.lower(*args).lowered, topology=topology, mesh=ours.mesh, full=True)
    scores = sum(n for scope, n in result.costs.scopes.items() if SCORES in scope)
    return result.costs.cycles / 1e6, (result.costs.cycles - scores) / 1e6


def missed(name: str, found: Compiled, least: float, bare: float, cycles: float) -> list[str]:
    """The aims that a row misses. cycles: in millions, 0 where they are not known."""
    row = ROWS[name]
    aims = [
        ("wire", found.wire / 1e9 / row.wire, OVER_MAXTEXT.get(name, 1.0)),
        ("temp", bare / 1e9 / row.temp, 1.0),
    ]
    if row.mesh.startswith("fsdp") and "," not in row.mesh:
        aims.insert(0, ("wire/bound", found.wire / least, OVER_BOUND))
    if cycles:
        aims.append(("cycles", cycles / row.mcycles, 1.0))
    # What is printed is what is judged: MaxText's figures have four digits.
    return [f"{aim} {have:.3f} > {most}" for aim, have, most in aims if round(have, 3) > most]


def main(arguments: list[str]) -> None:
    flags = parser("tests.benchmarks.traffic", SHOWN)
    flags.add_argument("--collectives", choices=("auto", "explicit"), default="explicit")
    flags.add_argument("--cycles", action="store_true", help="compile A1 and B1 to the end")
    options = flags.parse_args(arguments)
    uses = options.use or ["narrow"]
    titles = (
        "wire GB",
        "of weights",
        "bound GB",
        "activations",
        "temp GB",
        "without scores",
        "Mcycles",
        "without scores",
    )
    print(f"{'row':4} {'plan':26} " + " ".join(f"{title:>15}" for title in titles) + "  aims")
    for name in options.rows or SHOWN:
        row = ROWS[name]
        written, passes = bound(row, uses), sharded(uses, options.collectives)
        found = compiled(*step(row, passes))
        timed = options.cycles and name in CYCLES
        cycles, fewer = mcycles(row, passes) if timed else (0.0, 0.0)
        weights, bare = wire_over(found, written.batch), without_scores(found)
        failed = missed(name, found, written.bound, bare, cycles)
        cells = [
            against(found.wire / 1e9, row.wire),
            against(weights / 1e9, written.bound / 1e9),
            f"{written.bound / 1e9:8.2f}       ",
            f"{(found.wire - weights) / 1e9:8.2f}       ",
            against(found.memory["temp"] / 1e9, row.temp),
            against(bare / 1e9, row.temp),
            *(against(n, row.mcycles) if n else "-       " for n in (cycles, fewer)),
        ]
        said = "not reached: " + ", ".join(failed) if failed else "reached"
        print(f"{name:4} {row.plan:26} {' '.join(f'{c:>15}' for c in cells)}  {said}", flush=True)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
