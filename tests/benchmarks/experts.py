"""Mixtral 8x7B and DeepSeek-V2 16B training steps with experts over an axis, compiled for a TPU slice,
against MaxText's.

    python -m tests.benchmarks.experts [ROW ...] [--cycles] [--layers N] [--use PASS ...]

Prints for each row, per device and step as compiled: bytes on the wire and temp memory with their ratios to
MaxText's; arithmetic; and below it the collectives over each axis, by kind. `--cycles` compiles to the end
for the compiler's estimate of cycles. `--layers` takes fewer layers; then there are no ratios. Passes are
`narrow`, `kernels` and `experts`, or those of `--use`.

The rows: one text of 2048 tokens a chip, each layer recomputed, AdamW. C2 and C2b have places for 1.25 times
the tokens that an expert would have if all had the same, and drop the others (`routing="capacity"`); the
others drop none.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tests.benchmarks.rows_maxtext import against, compiled, parser, print_sent
from tests.benchmarks.traffic import sharded
from xform import Plan, parallelize, topologies
from xform.models import deepseek, mixtral


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration, and what MaxText gets: GB of temporaries and on the wire, TFLOP of products outside of
    kernels, millions of estimated cycles.
    """

    model: Any
    options: dict[str, Any]
    mesh: str
    topology: str
    temp: float
    wire: float
    dots: float
    mcycles: float = 0.0


_MIXTRAL = {"size": "8x7b", "batch": 64}
_CAPACITY = {**_MIXTRAL, "routing": "capacity"}

ROWS = {
    "C2": Row(mixtral, _CAPACITY, "fsdp=8,expert=8", "v5e-64", 7.989, 309.16, 271.0, 3125.5),
    "C2b": Row(mixtral, _CAPACITY, "fsdp=16,expert=4", "v5p-128", 8.830, 281.21, 271.0),
    "C3": Row(mixtral, _MIXTRAL, "fsdp=16,expert=4", "v5p-128", 7.781, 89.53, 23.6, 814.6),
    "C4": Row(mixtral, _MIXTRAL, "fsdp=16,expert=4", "v5p-128", 7.913, 85.51, 23.6),
    "G2": Row(
        deepseek, {"size": "v2-lite-16b", "batch": 32}, "fsdp=4,expert=8", "v5e-32", 7.325, 22.85, 16.5
    ),
}
"""MaxText's rows; C3 sends tokens by a ragged all-to-all, C4 and G2 by a ring of experts."""


def main(arguments: list[str]) -> None:
    flags = parser("tests.benchmarks.experts", list(ROWS))
    flags.add_argument("--cycles", action="store_true", help="compile to the end")
    flags.add_argument("--layers", type=int, help="fewer layers")
    options = flags.parse_args(arguments)
    for name in options.rows or ROWS:
        row = ROWS[name]
        if options.layers:
            row = dataclasses.replace(row, temp=0.0, wire=0.0, dots=0.0, mcycles=0.0)
        topology = topologies.parse(row.topology)
        fn, args = row.model.train_step(**row.options, length=2048, layers=options.layers, remat=False)
        uses = options.use or ["narrow", "kernels", "experts"]
        plan = Plan.from_flags(row.mesh, ["remat:policy=full", *sharded(uses, "explicit")])
        made = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0)
        notes = ("experts:", "sparseexperts:", "shard: along", "kernels:")
        found = compiled(name, made, args, topology, options.cycles, notes)
        if found is not None:
            dots = sum(found.costs.dot_flops.values()) / 1e12
            print_sent(f"{name:4}", found, row, f"  dot TFLOP {against(dots, row.dots)}", options.cycles)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
