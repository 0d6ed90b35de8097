"""Training steps with kernels, compiled for TPU slices: memory and calls of kernels, against MaxText's.

    python -m tests.benchmarks.kernels [ROW ...] [--collectives explicit|auto|both] [--use PASS ...]
    python -m tests.benchmarks.kernels --models

The first prints, per device and step as compiled, for each way to lower Shard's collectives: temp memory and
bytes on the wire with their ratios to MaxText's (`rows_maxtext`; it uses splash attention too), how many
Mosaic kernels run and how many of MaxText's do, and how many buffers have two dimensions of the texts'
length: scores or a mask. L32K has the length of MaxText's E1 to E3, 32768, without context parallelism: one
text a device, four times the tokens that they have on one. What layers take and what attention gives is kept
on the host, and the loss is a kernel too; its ratios are to E3, whose memory is the least, and are no aim.
The last column has the aims that a row misses: temp memory at most MaxText's, as many kernels or fewer, no
such buffer. Passes are `narrow` and `kernels`, or those of `--use`.

`--models` prints for each public model (`tests.public`), what is recognised in its loss, how much of it
becomes a kernel on a TPU, and why the rest does not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from tests.benchmarks.in_use import Compiled, compiled
from tests.benchmarks.rows_maxtext import ROWS, Row, against, is_scores, parser, step
from tests.benchmarks.traffic import sharded
from tests.public import PUBLIC
from xform import Plan, parallelize, raised, topologies

OFFLOADED = "full,offload=[decoder_layer_input,context]"
LONGER = {"L32K": Row("fsdp=16", "v5e-16", 16, OFFLOADED, 7.33, 5.06, 60.62, 407.2, length=32768)}
CALLS = {"H1": 8, "H2": 8}
"""Mosaic kernels that MaxText's step runs; 128 in the others: four a layer."""


def calls(found: Compiled) -> int:
    return sum(kernel.count for kernel in found.costs.kernels.values())


def missed(name: str, row: Row, found: Compiled, squares: int) -> list[str]:
    """The aims that a row misses, with what it has and what is asked."""
    temp = round(found.memory["temp"] / 1e9 / row.temp, 3)
    aims = [f"temp {temp} > 1.0"] if temp > 1 and name not in LONGER else []
    if (have := calls(found)) > (most := CALLS.get(name, 128)):
        aims.append(f"kernels {have} > {most}")
    return [*aims, *([f"{squares} buffers of length x length"] if squares else [])]


def rows(names: Sequence[str], ways: Sequence[str], uses: Sequence[str] | None) -> None:
    titles = ("temp GB", "wire GB", "kernels", "LxL")
    print(
        f"{'row':5} {'plan':26} {'collectives':11} " + " ".join(f"{title:>15}" for title in titles) + "  aims"
    )
    for name in names:
        row = (ROWS | LONGER)[name]
        for way in ways if row.mesh else ["one chip"]:
            kernels = "kernels:only=[attention,cross_entropy]" if name in LONGER else "kernels"
            passes = list(uses or ["narrow", kernels, *([] if row.scan else ["roll"])])
            found = compiled(*step(row, sharded(passes, way) if row.mesh else passes))
            squares = sum(is_scores(t, row.length) for t in found.temporaries)
            cells = [
                against(found.memory["temp"] / 1e9, row.temp),
                against(found.wire / 1e9, row.wire),
                f"{calls(found)} of {CALLS.get(name, 128)}",
                str(squares),
            ]
            failed = missed(name, row, found, squares)
            said = "not reached: " + ", ".join(failed) if failed else "reached"
            print(
                f"{name:5} {row.plan:26} {way:11} {' '.join(f'{c:>15}' for c in cells)}  {said}", flush=True
            )


def models() -> None:
    """The table of public models."""
    topology = topologies.parse("v5e-4")
    for name, make in PUBLIC.items():
        fn, args = make(length=256, source=384)
        found = Counter(each["op"] for each in raised(fn, *args)["raised"])
        plan = Plan.from_flags("data=4", ["kernels"])
        program = parallelize(fn, plan, devices=topology.devices()).trace(*args)
        print(f"{name}: recognised " + ", ".join(f"{n} {op}" for op, n in sorted(found.items())))
        for note, count in program.report:
            if note.pass_name == "kernels":
                print(f"    {note.kind:9} {count} x {note.what}: {note.why} ({note.where})")


def main(arguments: list[str]) -> None:
    flags = parser("tests.benchmarks.kernels", [*ROWS, *LONGER])
    flags.add_argument("--collectives", choices=("auto", "explicit", "both"), default="both")
    flags.add_argument("--models", action="store_true", help="the table of public models instead")
    options = flags.parse_args(arguments)
    if options.models:
        return models()
    ways = ("explicit", "auto") if options.collectives == "both" else (options.collectives,)
    rows(options.rows or [*ROWS, *LONGER], ways, options.use)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
