"""A table of short cells as text in lines of a width that a page has, and back.

    1f1b: stages 2, microbatches 2
    tick      0  1  2  3  4  5
    stage 0  F0 F1  . B0  . B1
    stage 1   . F0 B0 F1 B1  .

A row a stage, a column a tick; `.` is idle. What is wider than the page stands in parts, one below the other.
When it is read, the first line, the rows of ticks and of what travels, blank lines and those that begin with
`#` may be there or not, as may the words `stage 0`, where there is but one part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from xform.errors import PlanError
from xform.registry import unknown

WIDTH = 110
IDLE = "."
TOLD = ("tick", "next", "previous")
"""Rows that say something about the others: when a table is read, they are left out."""

NUMBERS = ("stages", "microbatches", "repeats", "delay")
"""What the first line has, each with its number."""


def written(rows: Mapping[str, Sequence[str]], width: int = WIDTH) -> str:
    """Rows of equally many cells, by their names, in lines of at most `width`: as few parts as that takes,
    all of one length if they can be.
    """
    columns = list(zip(*rows.values(), strict=True))
    margin = max(map(len, rows), default=0) + 1
    cell = max((len(each) for column in columns for each in column), default=0) + 1
    most = max(1, (width - margin) // cell)
    parts = -(-len(columns) // most)
    size = -(-len(columns) // max(1, parts))
    blocks = []
    for start in range(0, len(columns), max(1, size)):
        lines = [
            name.ljust(margin) + "".join(each.rjust(cell) for each in cells[start : start + size])
            for name, cells in rows.items()
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def read(text: str) -> tuple[str, dict[str, int], list[list[str]]]:
    """The name ("" if there is none), the numbers and the rows of cells, a stage each, that a text has."""
    name = ""
    numbers: dict[str, int] = {}
    labelled: dict[int, list[str]] = {}
    bare: list[list[str]] = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if ":" in line:
            if name:
                raise PlanError(f"{line.strip()!r}: a table has one line with a name, and {name!r} is there")
            name, numbers = _first(line)
        elif words[0] in TOLD:
            continue
        elif words[0] == "stage":
            if len(words) < 2 or not words[1].isdecimal():
                raise PlanError(
                    f"{line.strip()!r}: the number of the stage is missing, as in `stage 0 F0 F1`"
                )
            labelled.setdefault(int(words[1]), []).extend(words[2:])
        else:
            bare.append(words)
    if labelled and bare:
        raise PlanError(f"{' '.join(bare[0])!r}: begins with no stage, while other rows do: `stage 0 F0 F1`")
    for number in range(len(labelled)):
        if number not in labelled:
            raise PlanError(f"stage {number} has no row; there are rows for {_listed(sorted(labelled))}")
    return name, numbers, bare or [labelled[number] for number in range(len(labelled))]


def _first(line: str) -> tuple[str, dict[str, int]]:
    name, _, rest = line.partition(":")
    numbers = {}
    for part in filter(None, map(str.strip, rest.split(","))):
        found = re.fullmatch(r"(\S+)\s+(\d+)", part)
        if found is None:
            raise PlanError(f"{line.strip()!r}: {part!r} is no number with its name, such as `stages 4`")
        if found[1] not in NUMBERS:
            raise unknown("number", found[1], NUMBERS, line.strip())
        numbers[found[1]] = int(found[2])
    return name.strip(), numbers


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
