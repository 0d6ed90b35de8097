"""Reads XLA's buffer assignment: how much device and host memory a program takes, and what takes it.

The figures are those of `memory_analysis()` of the same program compiled to the end, whose temporary memory
is up to 16 KiB larger. Memory spaces are the compiler's colours: 0 is device memory, 5 the host's, the others
on-chip.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from xform.hlo import module as hlo

DEVICE, HOST = 0, hlo.HOST_SPACE


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One value in memory: an argument, output or temp; `name` its instruction's, `what` its operation's."""

    nbytes: int
    shape: str
    kind: str
    name: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:.2f} GB {self.kind:8} {self.shape} {self.what or self.name}"


@dataclasses.dataclass(frozen=True)
class _Allocation:
    size: int
    kind: str
    space: int
    live_out: bool
    lines: tuple[str, ...]


def memory(text: str) -> dict[str, int]:
    """Bytes a device: argument, output, alias (of both), temp, and the same of host memory as host_*."""
    sizes = dict.fromkeys(["argument", "output", "alias", "temp"], 0)
    sizes |= {f"host_{key}": 0 for key in sizes}
    for allocation in _allocations(text):
        if allocation.space not in (DEVICE, HOST):
            continue
        prefix = "host_" if allocation.space == HOST else ""
        if allocation.kind in ("argument", "output", "temp"):
            sizes[prefix + allocation.kind] += allocation.size
        if allocation.kind == "argument" and allocation.live_out:  # donated
            sizes[prefix + "alias"] += allocation.size
            sizes[prefix + "output"] += allocation.size
    return sizes


def largest(text: str, module: hlo.Module | None = None, count: int = 8) -> list[Buffer]:
    """The largest buffers in device memory, one a place. `module` gives them their operations' names."""
    instructions = {i.name: i for c in module.computations.values() for i in c} if module else {}
    found: list[Buffer] = []
    for allocation in _allocations(text):
        if allocation.space != DEVICE or allocation.kind == "other":
            continue
        places: set[tuple[int, int]] = set()
        for line in allocation.lines:
            value = re.match(
                r" value: <\d+ (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)", line
            )
            if value is None or (int(value[3]), int(value[4])) in places:
                continue
            places.add((int(value[3]), int(value[4])))
            instruction = instructions.get(value[1])
            shape = re.sub(r"\{[^}]*\}", "", value[5])
            what = instruction.op_name.replace("\\'", "'") if instruction else ""
            found.append(Buffer(int(value[3]), shape, allocation.kind, value[1], what))
    return sorted(found, key=lambda buffer: -buffer.nbytes)[:count]


def _allocations(text: str) -> Iterator[_Allocation]:
    head: re.Match[str] | None = None
    lines: list[str] = []
    for line in [*text.splitlines(), "allocation"]:
        if line.startswith("allocation"):
            if head:
                yield _allocation(head, lines)
            head, lines = re.match(r"allocation \d+: size (\d+), (.*)", line), []
        else:
            lines.append(line)


def _allocation(head: re.Match[str], lines: list[str]) -> _Allocation:
    words = head[2]
    space = re.search(r"\bcolor (\d+)", words)
    live_out = "maybe-live-out" in words
    kind = "other"  # constants, and what lives only within one operation
    if re.search(r"\bparameter \d+", words):
        kind = "argument"
    elif "temp" in words:
        kind = "temp"
    elif live_out:
        kind = "output"
    return _Allocation(int(head[1]), kind, int(space[1]) if space else 0, live_out, tuple(lines))
