"""Static figures of the linear recurrence's kernels, by chip, kind of decay, chunk and heads of a program.

    python -m tests.benchmarks.kernels_recurrence [--steps T] [--channels D] [--form FORM ...] [CHIP ...]

Compiles both kernels for d = e = 128 in bfloat16 and reads what the compiler writes of them: the bundles
(instructions of one cycle) of a program of the grid, and for each bundle how many of each unit's slots are
taken. Printed are bundles for a step of a head, what decides which chunk and heads are best; the share of
bundles in which some matrix unit works (the roofline: the rest is time in which none does) and the average
share of the matrix units that work; vector slots; stores to spill registers; and VMEM, all allocations of the
kernel together. A product counts for as long as it occupies its unit, not for its first cycle alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path

FORMS = {
    "kda": ("channel", True),
    "gla": ("channel", False),
    "gated_delta": ("head", True),
    "retention": ("head", False),
}
CHIPS = {"v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4"}
BLOCKS = ((32, 8), (64, 4), (64, 8), (64, 16), (128, 4), (128, 8))


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one program of the grid: bundles, those in which a matrix unit works, and shares and bytes."""

    bundles: int
    products: int
    units: float
    vector: float
    spills: int
    vmem: int


def read(folder: Path, seen: set[str]) -> Figures:
    """The figures of the kernel whose files in the folder are not among those seen."""
    new = [f for f in folder.iterdir() if f.name not in seen and "-recurrence_" in f.name]
    (slots,) = (f for f in new if f.name.endswith("-final_hlo-static-per-bundle-utilization.txt"))
    _, names_line, capacity_line, *lines = slots.read_text().splitlines()
    names = [name.strip() for name in names_line.split(",")]
    capacity = dict(zip(names, map(int, capacity_line.split()), strict=True))
    rows = [dict(zip(names, map(int, line.split()), strict=True)) for line in lines[1:] if line.strip()]
    (registers,) = (f for f in new if f.name.endswith("-post-ra.txt") and "bundle" not in f.name)
    sizes = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", registers.read_text())

    def share(name: str) -> float:
        return sum(row[name] for row in rows) / capacity[name] / len(rows)

    return Figures(
        len(rows),
        sum(1 for row in rows if row["MATMUL"] or row["MATPUSH"]),
        share("MATMUL"),
        share("VALU"),
        sum(row["VSTORE:SPILL"] for row in rows),
        sum(int(size, 16) for size in sizes),
    )


def main(arguments: list[str], folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from xform import topologies
    from xform.kernels.recurrence import RecurrenceBackward, RecurrenceForward
    from xform.kernels.recurrence_blocks import default_blocks, fitted, sizes_of

    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels_recurrence")
    parser.add_argument("chips", nargs="*", default=[], metavar="CHIP")
    parser.add_argument("--form", action="append", choices=FORMS, default=[])
    parser.add_argument("--steps", type=int, default=4096, metavar="T")
    parser.add_argument("--channels", type=int, default=128, metavar="D")
    options = parser.parse_args(arguments)
    topologies.prepare_environment()
    b, n, t, d = 1, 16, options.steps, options.channels
    print(
        "chip form        chunk heads  way       bundles   a step  products  units  vector  spills  VMEM MiB"
    )
    for chip in options.chips or CHIPS:
        device = np.ravel(topologies.parse(CHIPS[chip]).devices())[0]
        on = SingleDeviceSharding(device)
        for form in options.form or FORMS:
            decay, delta = FORMS[form]
            for chunk, heads in BLOCKS:
                had = fitted(sizes_of((b, n, t, d), d, chunk, heads), decay, delta, 2).heads
                if had != heads:
                    continue
                sizes = dict(b=b, n=n, t=t, d=d, e=d, c=t // chunk)
                for op in (
                    RecurrenceForward(decay, delta, 0.1, chunk, heads, keep=True),
                    RecurrenceBackward(decay, delta, 0.1, chunk, heads),
                ):
                    args = []
                    for i, letters in enumerate(op.operands):
                        wide = letters in ("bnt", "bnde") or (i == 3 and decay == "channel")
                        shape = [sizes[letter] for letter in letters]
                        args.append(
                            jax.ShapeDtypeStruct(shape, jnp.float32 if wide else jnp.bfloat16, sharding=on)
                        )
                    seen = {f.name for f in folder.iterdir()} if folder.exists() else set()
                    jax.jit(op.kernel).lower(*args).compile()
                    got = read(folder, seen)
                    way = "forwards" if isinstance(op, RecurrenceForward) else "back"
                    best = "*" if (chunk, heads) == default_blocks(chip, decay, delta) else " "
                    print(
                        f"{chip:4} {form:11} {chunk:5} {heads:4}{best}  {way:8} {got.bundles:8} "
                        f"{got.bundles / (chunk * heads):8.2f} {got.products / got.bundles:9.0%} "
                        f"{got.units:6.0%} {got.vector:7.0%} {got.spills:7} {got.vmem / 2**20:9.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        # Read when libtpu is loaded, so before anything else.
        asked = f"--xla_jf_dump_to={made}/llo --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {asked}".strip()
        main(sys.argv[1:], Path(made) / "llo")
