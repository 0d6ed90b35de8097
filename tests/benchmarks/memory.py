"""Llama 7B training steps compiled for TPU slices, against MaxText's on the same shapes: the memory.

    python -m tests.benchmarks.memory [ROW ...] [--use PASS ...] [--peak COUNT]

Prints, per device and step, temp memory, arguments, bytes on the wire and dot flops of ours, each with its
ratio to MaxText 0.2.5's (its own training step through its own ahead-of-time entry, on jax 0.12.0.1 and
libtpu 0.0.52), and the seconds the row took, to lower and to compile up to code generation. The model is
plain; the plan says the rest: the row's remat, Shard, and the passes of `--use`, by default `narrow`, with
`roll` for unrolled layers; `--use shard` for nothing else. `--peak` lists the largest buffers in use at the
fullest time.

Both have float32 weights and moments and bfloat16 compute. MaxText uses splash attention, which has no matrix
of scores, and whose flops are not among its dots; ours is written plainly and has both. So there is a second
figure, without scores: temp memory less what the most bytes in use at once fall by, when buffers with two
dimensions of the texts' length are not counted. H1 is compared with its own row; to reach is 1.05 of what
MaxText takes with unrolled layers, which the last column gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys

from tests.benchmarks.in_use import Compiled, Temporary, compiled, peak
from xform import Plan, parallelize, topologies
from xform.models import llama

LENGTH = 2048
UNROLLED = 1.760


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration, and what MaxText gets: GB of temporaries, arguments and on the wire, TFLOP of dots."""

    mesh: str
    topology: str
    batch: int
    remat: str
    temp: float
    argument: float
    wire: float
    dots: float
    layers: int = 32
    scan: bool = True


ROWS = {
    "A1": Row("fsdp=16", "v5e-16", 16, "full", 3.701, 5.054, 40.58, 101.8),
    "A2": Row("fsdp=16", "v5e-16", 16, "minimal", 8.365, 5.054, 41.84, 81.2),
    "A3": Row("fsdp=16", "v5e-16", 16, "save_qkv_proj", 5.201, 5.054, 40.99, 95.2),
    "A4": Row("fsdp=64", "v5p-128", 128, "full", 3.01, 1.26, 51.84, 203.6),
    "B1": Row("fsdp=4,tensor=4", "v5e-16", 16, "full", 3.74, 5.05, 29.74, 101.8),
    "B2": Row("fsdp=4,tensor=4", "v5e-16", 16, "minimal", 8.58, 5.05, 28.13, 81.2),
    "I1": Row("fsdp=256", "v5e-256", 256, "full", 1.79, 0.32, 52.43, 101.8),
    "I2": Row("data=16,fsdp=16", "v5e-256", 256, "full", 3.92, 5.05, 39.30, 101.8),
    "H1": Row("", "v5e-1", 1, "full", 3.620, 8.003, 0.0, 7.87, layers=2),
    "H2": Row("", "v5e-1", 1, "full", UNROLLED, 8.003, 0.0, 7.87, layers=2, scan=False),
}


def result(row: Row, uses: list[str] | None) -> Compiled:
    """Our step under the row's plan, compiled."""
    topology = topologies.parse(row.topology)
    fn, args = llama.train_step(
        size="7b", batch=row.batch, length=LENGTH, layers=row.layers, scan=row.scan, remat=False
    )
    if uses is None:
        uses = ["narrow", *([] if row.scan else ["roll"])]
    plan = Plan.from_flags(row.mesh, [f"remat:policy={row.remat}", *uses])
    return compiled(parallelize(fn, plan, devices=topology.devices(), donate_argnums=0), args, topology)


def is_scores(temporary: Temporary) -> bool:
    """Whether it has two dimensions of the texts' length: scores of attention, their gradients, a mask."""
    return bool(re.search(rf"\[([\d,]*\b)?{LENGTH},([\d,]*,)?{LENGTH}\b", temporary.shape))


def against(have: float, want: float) -> str:
    return f"{have:8.2f} ({have / want:4.2f})" if want else f"{have:8.2f} (    )"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.memory")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--use", action="append", metavar="PASS", help="a pass, as xform takes it")
    parser.add_argument("--peak", type=int, default=0, metavar="COUNT", help="the largest buffers in use")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"there is no row {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
    titles = ("temp GB", "without scores", "argument GB", "wire GB", "dot TFLOP")
    print(f"{'row':4} {'plan':32} " + " ".join(f"{title:>15}" for title in titles) + "  seconds (ratio)")
    for name in options.rows or ROWS:
        row = ROWS[name]
        found = result(row, options.use)
        full, rest = (peak(found.temporaries, c) for c in (lambda t: True, lambda t: not is_scores(t)))
        temp = found.memory["temp"]
        bare = (temp - (full.nbytes - rest.nbytes)) / 1e9
        cells = [
            against(temp / 1e9, row.temp),
            against(bare, row.temp),
            against(found.memory["argument"] / 1e9, row.argument),
            against(found.wire / 1e9, row.wire),
            against(found.costs.flops / 1e12, row.dots),
        ]
        unrolled = f"  {bare / UNROLLED:4.2f} of unrolled" if name == "H1" else ""
        plan = f"{row.mesh or 'one chip'} {row.remat}"
        seconds = f"{found.lowering:4.1f} + {found.compiling:4.1f}"
        print(f"{name:4} {plan:32} {' '.join(f'{c:>15}' for c in cells)}  {seconds}{unrolled}", flush=True)
        for temporary in full.temporaries[: options.peak]:
            print(f"     {'scores ' if is_scores(temporary) else '       '}{temporary}")


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
