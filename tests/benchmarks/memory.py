"""Llama 7B training steps compiled for TPU slices, against MaxText's on the same shapes: the memory.

    python -m tests.benchmarks.memory [ROW ...] [--use PASS ...] [--peak COUNT]

Prints, per device and step, temp memory, arguments, bytes on the wire and dot flops of ours, each with its
ratio to MaxText's (`rows_maxtext`), and the seconds the row took, to lower and to compile up to code
generation. The model is plain; the plan says the rest: the row's remat, Shard, and the passes of `--use`, by
default `narrow`, with `roll` for unrolled layers; `--use shard` for nothing else. `--peak` lists the largest
buffers in use at the fullest time. H1 is compared with its own row; to reach is 1.05 of what MaxText takes
with unrolled layers, which the last column gives.
"""

from __future__ import annotations

import sys

from tests.benchmarks.in_use import compiled, peak
from tests.benchmarks.rows_maxtext import ROWS, UNROLLED, against, is_scores, parser, step, without_scores
from xform import topologies


def main(arguments: list[str]) -> None:
    flags = parser("tests.benchmarks.memory", list(ROWS))
    flags.add_argument("--peak", type=int, default=0, metavar="COUNT", help="the largest buffers in use")
    options = flags.parse_args(arguments)
    titles = ("temp GB", "without scores", "argument GB", "wire GB", "dot TFLOP")
    print(f"{'row':4} {'plan':32} " + " ".join(f"{title:>15}" for title in titles) + "  seconds (ratio)")
    for name in options.rows or ROWS:
        row = ROWS[name]
        uses = options.use or ["narrow", *([] if row.scan else ["roll"])]
        found = compiled(*step(row, uses))
        bare = without_scores(found) / 1e9
        cells = [
            against(found.memory["temp"] / 1e9, row.temp),
            against(bare, row.temp),
            against(found.memory["argument"] / 1e9, row.argument),
            against(found.wire / 1e9, row.wire),
            against(found.costs.flops / 1e12, row.dots),
        ]
        unrolled = f"  {bare / UNROLLED:4.2f} of unrolled" if name == "H1" else ""
        seconds = f"{found.lowering:4.1f} + {found.compiling:4.1f}"
        print(
            f"{name:4} {row.plan:32} {' '.join(f'{c:>15}' for c in cells)}  {seconds}{unrolled}", flush=True
        )
        for temporary in peak(found.temporaries).temporaries[: options.peak]:
            print(f"     {'scores ' if is_scores(temporary) else '       '}{temporary}")


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
