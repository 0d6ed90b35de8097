"""Llama 7B training steps compiled for TPU slices, against MaxText's on the same shapes.

    python -m tests.benchmarks.llama_7b [ROW ...]

Prints, per device and step, argument and temp memory, bytes on the wire and dot flops of ours, and the ratio
to MaxText 0.2.5's (its own training step through its own ahead-of-time entry, on jax 0.12.0.1 and libtpu
0.0.52). Both are partitioned automatically, with full remat, float32 weights and moments, bfloat16 compute.
MaxText uses splash attention, whose flops are not among its dots; ours is written plainly, so its dots hold
attention's too.
"""

from __future__ import annotations

import dataclasses
import sys

from xform import Plan, Shard, parallelize, topologies
from xform.aot import compile_lowered
from xform.models import llama


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration, and what MaxText gets: GB of arguments, of temporaries and on the wire, TFLOP of
    dots.
    """

    mesh: dict[str, int]
    topology: str
    batch: int
    argument: float
    temp: float
    wire: float
    dots: float


ROWS = {
    "A1": Row({"fsdp": 16}, "v5e-16", 16, 5.05, 3.70, 40.58, 101.8),
    "A4": Row({"fsdp": 64}, "v5p-128", 128, 1.26, 3.01, 51.84, 203.6),
    "B1": Row({"fsdp": 4, "tensor": 4}, "v5e-16", 16, 5.05, 3.74, 29.74, 101.8),
    "I1": Row({"fsdp": 256}, "v5e-256", 256, 0.32, 1.79, 52.43, 101.8),
    "I2": Row({"data": 16, "fsdp": 16}, "v5e-256", 256, 5.05, 3.92, 39.30, 101.8),
}


def main(names: list[str]) -> None:
    titles = ("argument GB", "temp GB", "wire GB", "dot TFLOP")
    print(f"{'row':4} {'mesh':22} " + " ".join(f"{title:>16}" for title in titles) + "   (ratio)")
    for name in names or ROWS:
        row = ROWS[name]
        topology = topologies.parse(row.topology)
        fn, args = llama.train_step(size="7b", batch=row.batch, length=2048)
        step = parallelize(fn, Plan(row.mesh, [Shard()]), devices=topology.devices(), donate_argnums=0)
        lowered = step.lower(*args)
        found = compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh)
        wire = sum(kind.wire_bytes for kind in found.costs.collectives.values())
        ours = (found.memory["argument"] or 0, found.memory["temp"] or 0, wire)
        cells = [
            f"{have / 1e9:8.2f} ({have / 1e9 / want:4.2f})"
            for have, want in zip(ours, (row.argument, row.temp, row.wire), strict=True)
        ]
        cells.append(f"{found.costs.flops / 1e12:8.1f} ({found.costs.flops / 1e12 / row.dots:4.2f})")
        mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items())
        print(f"{name:4} {mesh:22} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
