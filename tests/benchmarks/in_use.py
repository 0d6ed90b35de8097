"""Compiles for a TPU topology and reads which temporary buffers are in use when: what takes the memory.

The arena of temporaries is larger than what is in use at any one time, since the compiler's packing leaves
gaps. `peak` gives the fullest time; leaving some buffers out tells what they cost.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from xform import hlo
from xform.aot import compile_lowered
from xform.api import Parallelized
from xform.hlo import costs
from xform.topologies import Topology, prepare_environment

RANGE = re.compile(r"^\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A value in an arena of temporaries: its place, and the first and the last time it is there."""

    arena: int
    offset: int
    nbytes: int
    first: int
    last: int
    shape: str
    what: str

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:.3f} GB {self.shape} {self.what}"


@dataclasses.dataclass(frozen=True)
class Peak:
    """The fullest time: how many bytes are in use, and by what, largest first, one value a place."""

    nbytes: int
    temporaries: tuple[Temporary, ...]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a step takes on one device, in bytes; `seconds` to trace, rewrite and lower, and to compile."""

    memory: Mapping[str, int]
    costs: costs.Costs
    temporaries: Sequence[Temporary]
    lowering: float
    compiling: float

    @property
    def wire(self) -> float:
        return sum(kind.wire_bytes for kind in self.costs.collectives.values())


def compiled(step: Parallelized, args: tuple[Any, ...], topology: Topology) -> Compiled:
    """The step lowered for these arguments and compiled for the topology, up to code generation."""
    prepare_environment()
    start = time.perf_counter()
    lowered = step.lower(*args).lowered
    ready = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="xform-in-use-") as name:
        directory = Path(name)
        result = compile_lowered(lowered, topology=topology, mesh=step.mesh, directory=directory)
        end = time.perf_counter()
        assignment, ranges = (
            min((directory / "dump").glob(f"*after_optimizations-{kind}.txt")).read_text()
            for kind in ("buffer-assignment", "live-range")
        )
    found = temporaries(assignment, ranges, hlo.parse(result.hlo_text))
    memory = {k: v or 0 for k, v in result.memory.items()}
    return Compiled(memory, result.costs, found, ready - start, end - ready)


def temporaries(assignment: str, ranges: str, module: hlo.Module | None = None) -> list[Temporary]:
    """The values in device memory that are neither arguments nor results, from what XLA dumps under these
    names.

    module: gives the values their operations' names.
    """
    times = {(m[1], m[2]): (int(m[3]), int(m[4])) for m in RANGE.finditer(ranges)}
    names = {i.name: i.op_name for c in module.computations.values() for i in c} if module else {}
    found = []
    # Device memory is colour 0, which is not written.
    for head, body in re.findall(r"^allocation (.*)\n((?: .*\n)*)", assignment, re.MULTILINE):
        if "preallocated-temp" not in head or "color" in head:
            continue
        for name, index, size, offset, shape in VALUE.findall(body):
            if (when := times.get((name, index))) is not None:
                shape = re.sub(r"\{[^}]*\}", "", shape)
                number = int(head.split(":")[0])
                found.append(Temporary(number, int(offset), int(size), *when, shape, names.get(name) or name))
    return found


def peak(found: Sequence[Temporary], counts: Callable[[Temporary], bool] = lambda _: True) -> Peak:
    """When most bytes are in use, of the temporaries that count. What several values lie in counts once."""
    counted = [t for t in found if counts(t)]
    changes = [(t.first, True, i) for i, t in enumerate(counted)]
    changes += [(t.last + 1, False, i) for i, t in enumerate(counted)]
    alive: dict[int, None] = {}
    best, there = 0, list[Temporary]()
    for _, group in groupby(sorted(changes), key=lambda change: change[0]):
        for _, begins, i in group:
            if begins:
                alive[i] = None
            else:
                del alive[i]
        if (used := _covered(counted[i] for i in alive)) > best:
            best, there = used, [counted[i] for i in alive]
    places: dict[tuple[int, int, int], Temporary] = {}
    for t in there:
        places.setdefault((t.arena, t.offset, t.nbytes), t)
    return Peak(best, tuple(sorted(places.values(), key=lambda t: (-t.nbytes, t.offset))))


def _covered(alive: Iterable[Temporary]) -> int:
    """The bytes that at least one of these lies in."""
    total = end = 0
    arena = None
    for t in sorted(alive, key=lambda t: (t.arena, t.offset)):
        if t.arena != arena:
            arena, end = t.arena, 0
        total += max(0, t.offset + t.nbytes - max(t.offset, end))
        end = max(end, t.offset + t.nbytes)
    return total
