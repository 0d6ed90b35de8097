"""Rows of MaxText's baseline that are Llama 7B steps, what it gets in them, and our step of the same shapes.

MaxText 0.2.5's own training step through its own ahead-of-time entry, on jax 0.12.0.1 and libtpu 0.0.52, per
device and step. Both have float32 weights and AdamW moments and bfloat16 compute. MaxText uses splash
attention, which has no matrix of scores, and whose flops and cycles are not counted; ours is written plainly
and has both. So memory is given a second time, without scores: temp memory less what the most bytes in use at
once fall by, when buffers with two dimensions of the texts' length are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tests.benchmarks.in_use import Compiled, Temporary, peak
from xform import Plan, parallelize, topologies
from xform.aot import OutOfDeviceMemory, Result, compile_lowered
from xform.api import Parallelized
from xform.models import llama

LENGTH = 2048
UNROLLED = 1.760


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration, and what MaxText gets: GB of temporaries, arguments and on the wire, TFLOP of dots.

    mcycles: millions of estimated cycles, 0 where MaxText's row was not compiled to the end.
    """

    mesh: str
    topology: str
    batch: int
    remat: str
    temp: float
    argument: float
    wire: float
    dots: float
    mcycles: float = 0.0
    layers: int = 32
    scan: bool = True
    length: int = LENGTH

    @property
    def plan(self) -> str:
        return f"{self.mesh or 'one chip'} {self.remat}"


ROWS = {
    "A1": Row("fsdp=16", "v5e-16", 16, "full", 3.701, 5.054, 40.58, 101.8, 1545.8),
    "A2": Row("fsdp=16", "v5e-16", 16, "minimal", 8.365, 5.054, 41.84, 81.2),
    "A3": Row("fsdp=16", "v5e-16", 16, "save_qkv_proj", 5.201, 5.054, 40.99, 95.2),
    "A4": Row("fsdp=64", "v5p-128", 128, "full", 3.01, 1.26, 51.84, 203.6),
    "B1": Row("fsdp=4,tensor=4", "v5e-16", 16, "full", 3.74, 5.05, 29.74, 101.8, 1254.5),
    "B2": Row("fsdp=4,tensor=4", "v5e-16", 16, "minimal", 8.58, 5.05, 28.13, 81.2),
    "I1": Row("fsdp=256", "v5e-256", 256, "full", 1.79, 0.32, 52.43, 101.8, 1131.0),
    "I2": Row("data=16,fsdp=16", "v5e-256", 256, "full", 3.92, 5.05, 39.30, 101.8),
    "H1": Row("", "v5e-1", 1, "full", 3.620, 8.003, 0.0, 7.87, layers=2),
    "H2": Row("", "v5e-1", 1, "full", UNROLLED, 8.003, 0.0, 7.87, layers=2, scan=False),
}


def step(row: Row, uses: Sequence[str]) -> tuple[Parallelized, tuple[object, ...], topologies.Topology]:
    """Our step under the row's plan, its arguments as shapes, and the machine.

    uses: passes as the command line takes them, besides the row's remat.
    """
    topology = topologies.parse(row.topology)
    fn, args = llama.train_step(
        size="7b", batch=row.batch, length=row.length, layers=row.layers, scan=row.scan, remat=False
    )
    plan = Plan.from_flags(row.mesh, [f"remat:policy={row.remat}", *uses])
    return parallelize(fn, plan, devices=topology.devices(), donate_argnums=0), args, topology


def is_scores(temporary: Temporary, length: int = LENGTH) -> bool:
    """Whether it has two dimensions of the texts' length: scores of attention, their gradients, a mask."""
    return bool(re.search(rf"\[([\d,]*\b)?{length},([\d,]*,)?{length}\b", temporary.shape))


def without_scores(found: Compiled) -> float:
    """Bytes of temp memory, less what the scores add to the fullest time."""
    full, rest = peak(found.temporaries), peak(found.temporaries, lambda t: not is_scores(t))
    return found.memory["temp"] - (full.nbytes - rest.nbytes)


def wire_over(found: Compiled, axes: Collection[str]) -> float:
    """Bytes on the wire of collectives over these axes of the mesh, or some of them, and no other."""
    return sum(
        kind.wire_bytes
        for over, kinds in found.costs.axes.items()
        if set(over.split("+")) <= set(axes)
        for kind in kinds.values()
    )


def against(have: float, want: float) -> str:
    """A figure, and its ratio to another where there is one."""
    return f"{have:8.2f} ({have / want:4.2f})" if want else f"{have:8.2f} (    )"


def compiled(
    name: str,
    made: Parallelized,
    args: Sequence[object],
    topology: topologies.Topology,
    full: bool,
    notes: tuple[str, ...],
) -> Result | None:
    """A row's step as the TPU compiler has it; prints the notes of the report that begin so, and what does
    not fit. full: to the end.
    """
    for line in str(made.trace(*args).report).splitlines():
        if line.startswith(notes):
            print(f"  {line}")
    lowered = made.lower(*args).lowered
    try:
        return compile_lowered(lowered, topology=topology, mesh=made.mesh, full=full)
    except OutOfDeviceMemory as error:
        print(f"{name} does not fit: {error}", flush=True)
        return None


def print_sent(name: str, found: Result, row: Any, more: str = "", full: bool = False) -> None:
    """A row's bytes and temp memory against MaxText's, and what goes over each axis."""
    wire = sum(kind.wire_bytes for kind in found.costs.collectives.values()) / 1e9
    temp = (found.memory["temp"] or 0) / 1e9
    cycles = f"  Mcycles {against(found.costs.cycles / 1e6, row.mcycles)}" if full else ""
    print(f"{name} wire {against(wire, row.wire)}  temp {against(temp, row.temp)} GB{more}{cycles}")
    for axis, kinds in found.costs.axes.items():
        sent = ", ".join(f"{kind} {k.count} x, {k.wire_bytes / 1e9:.2f} GB" for kind, k in kinds.items())
        print(f"  over {axis}: {sent}", flush=True)


def parser(module: str, rows: Sequence[str]) -> argparse.ArgumentParser:
    """Takes rows, among `rows`, and passes."""
    made = argparse.ArgumentParser(prog=f"python -m {module}")
    # No `choices`: argparse would hold the empty list of no rows at all against them.
    made.add_argument("rows", nargs="*", metavar="ROW", type=_one_of(rows), help=", ".join(rows))
    made.add_argument("--use", action="append", metavar="PASS", help="a pass, as xform takes it")
    return made


def _one_of(rows: Sequence[str]) -> Callable[[str], str]:
    def row(name: str) -> str:
        if name not in rows:
            raise argparse.ArgumentTypeError(f"there is no row {name}; the rows are {', '.join(rows)}")
        return name

    return row
