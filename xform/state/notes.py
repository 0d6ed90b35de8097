"""What is told of a program over its rows: stacks and slices that remain, and sums in another order."""

from __future__ import annotations

import dataclasses

from xform.state.chains import Chain
from xform.state.groups import Row
from xform.state.scopes import Op
from xform.state.settling import Rows
from xform.trace import source_line

RETURNED = "what is returned"


@dataclasses.dataclass(frozen=True)
class Left:
    """A stack or a slice that remains: what, how many bytes it copies, why, and the user's line."""

    what: str
    bytes: int
    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}, {self.bytes} bytes: {self.why}" + (f" ({self.where})" if self.where else "")


@dataclasses.dataclass(frozen=True)
class Reordered:
    """A sum that is taken in another order: of what, and the user's line."""

    what: str
    where: str


class Notes:
    """What there is to tell; of what remains, the same things added up."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str, str], int] = {}
        self._reordered: list[Reordered] = []

    def add(self, what: str, count: int, why: str, where: str) -> None:
        self._bytes[what, why, where] = self._bytes.get((what, why, where), 0) + count

    def reordered(self, chain: Chain) -> None:
        if chain.reordered:
            self._reordered.append(Reordered(f"a sum of {chain.terms} terms", source_line(chain.last.eqn)))

    def left(self) -> tuple[Left, ...]:
        return tuple(Left(what, count, why, where) for (what, why, where), count in self._bytes.items())

    def sums(self) -> tuple[Reordered, ...]:
        return tuple(self._reordered)


def name(reader: Op | None) -> str:
    """What reads a value, as a note says it."""
    return RETURNED if reader is None else f"`{reader.eqn.primitive.name}`"


def line(reader: Op | None) -> str:
    return "" if reader is None else source_line(reader.eqn)


def why_alone(rows: Rows, row: Row, reader: Op | None) -> str:
    """Why something reads an element and not the row."""
    if reader is None:
        return "not all of them are returned, in order"
    if reader.claim is not None and reader.claim.why:
        return str(reader.claim.why)
    for number, v in enumerate(row.vars):
        if all(op.key != reader.key for op, _ in rows.scopes.readers.get(v, ())):
            return f"number {number} is not used so"
    return "the others are not used so, one by one"
