"""Llama 7B training steps with long texts over a context axis, compiled for a TPU slice, against MaxText's.

    python -m tests.benchmarks.context [ROW ...] [--save] [--balance ORDER] [--cycles]
        [--use PASS ...]

Prints for each strategy, per device and step as compiled: bytes on the wire with their ratio to those of
MaxText's row of the same strategy; temp memory with its ratio; and below it the collectives over each axis,
by kind (weights and their gradients lie over both). `--save` keeps attention's result and log-sum-exp for the
backward pass (Remat's `save=context`), which then needs no second forward kernel, nor what that is sent.
`--balance` has tokens in that order, `zigzag` or `striped`.
`--cycles` compiles to the end for the compiler's estimate of cycles. Passes are `narrow` and `kernels`, or
those of `--use`.

`--lengths` prints instead, of a step on one text of 131072 tokens with two such layers, for 1, 2, 4 and 8
chips of v6e along the axis: temp memory, seconds that rewriting took, and the arrays that have the length, or
what a device has of it, twice: none has.

The rows: v5e 4x4, fsdp 4 x context 4, length 32768, batch 4, each layer recomputed, AdamW.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Sequence

from tests.benchmarks.rows_maxtext import Row, compiled, parser, print_sent, step
from tests.benchmarks.traffic import sharded
from xform import topologies
from xform.aot import OutOfDeviceMemory, compile_lowered

LENGTH = 32768
MESH = "fsdp=4,context=4"

ROWS = {
    name: Row(MESH, "v5e-16", 4, "full", temp, 5.06, wire, 407.2, mcycles, length=LENGTH)
    for name, temp, wire, mcycles in (
        ("all_gather", 8.269, 92.83, 7958.8),
        ("ring", 9.916, 122.90, 0.0),
        ("ulysses", 7.335, 60.62, 0.0),
    )
}
"""MaxText's rows E1 to E3, by the strategy."""


LONG = 131072
CHIPS = {
    1: ("", "v6e-1"),
    2: ("data=2,context=2", "v6e-4"),
    4: ("context=4", "v6e-4"),
    8: ("context=8", "v6e-8"),
}
"""For so many parts the mesh and the slice. None has two chips, and one text does not lie over `data`."""


def lengths(uses: Sequence[str], balance: str) -> None:
    """Temp memory of a step on one text, over more and more chips."""
    for chips, (mesh, topology) in CHIPS.items():
        row = Row(mesh, topology, 1, "full", 0, 0, 0, 0, layers=2, length=LONG)
        over = [f"context:strategy=all_gather{f',balance={balance}' if balance else ''}"] * (chips > 1)
        made, args, machine = step(row, sharded([*uses, *over], "explicit") if chips > 1 else uses)
        start = time.perf_counter()
        lowered = made.lower(*args).lowered
        seconds = time.perf_counter() - start
        try:
            found = compile_lowered(lowered, topology=machine, mesh=made.mesh)
        except OutOfDeviceMemory as error:
            print(f"context={chips}  does not fit: {error}", flush=True)
            continue
        shapes = set(re.findall(r"\w+\[([\d,]+)\]", found.hlo_text))
        sizes = [[int(n) for n in shape.split(",")] for shape in shapes]
        twice = [shape for shape in sizes if sum(n >= LONG // chips and n % 1024 == 0 for n in shape) > 1]
        temp = (found.memory["temp"] or 0) / 1e9
        print(f"context={chips}  temp {temp:6.2f} GB  rewritten and lowered in {seconds:.1f} s", end="")
        print(f"  length x length: {twice or 'none'}", flush=True)


def main(arguments: list[str]) -> None:
    flags = parser("tests.benchmarks.context", list(ROWS))
    flags.add_argument("--cycles", action="store_true", help="compile to the end")
    flags.add_argument("--save", action="store_true", help="attention's results are kept")
    flags.add_argument("--balance", default="", help="the order of tokens")
    flags.add_argument("--lengths", action="store_true", help="one long text over 1 to 8 chips")
    options = flags.parse_args(arguments)
    if options.lengths:
        return lengths(options.use or ["chunkedloss", "kernels"], options.balance)
    for name in options.rows or ROWS:
        row = ROWS[name]
        if options.save:
            row = dataclasses.replace(row, remat="custom,save=context")
        uses = [*(options.use or ["narrow", "kernels"]), f"context:strategy={name}"]
        if options.balance:
            uses[-1] += f",balance={options.balance}"
        made, args, topology = step(row, sharded(uses, "explicit"))
        notes = ("context:", "shard: along", "kernels: attention")
        found = compiled(f"{name:12}", made, args, topology, options.cycles, notes)
        if found is not None:
            print_sent(f"{name:12}", found, row, full=options.cycles)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
