"""What every pass did to a program, what it left alone and why, and what it promised of the compiled result.

The report is the log: nothing else prints. Passes call `did`, `declined` and `promised`; the command line and
`Lowered.report()` render it. What can be checked in the compiled program is a `Promise` besides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

Kind = Literal["did", "declined", "dropped", "promised"]
Keeping = Literal["saved", "recomputed", "offloaded", "kernel", "quantized"]


@dataclasses.dataclass(frozen=True)
class Note:
    """One line of the report. `what` is the thing, `why` the reason, `where` the user's source line."""

    kind: Kind
    pass_name: str
    what: str
    why: str = ""
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.pass_name}: " + ("" if self.kind == "did" else f"{self.kind} ") + self.what
        if self.why:
            text += f": {self.why}"
        if self.where:
            text += f" ({self.where})"
        return text


@dataclasses.dataclass(frozen=True)
class Promise:
    """That a tensor is saved, computed again, on the host, made by a kernel or multiplied in eight bits: what
    the compiled program can be held to.

    tensor: the name it bears in the program, or, with `nbytes`, what it is: that many bytes of arguments a
    device; of a kernel the operation, of what is quantized the product. where: the layers, as the report
    calls them, or the line.
    """

    pass_name: str
    tensor: str
    kind: Keeping
    where: str = ""
    nbytes: int = 0


def amount(nbytes: float) -> str:
    """Bytes as a person reads them: `1.62 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """A time as a person reads it: `1.62 s`, `3.20 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.1f} us"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that a device sends in a step, as the program is written (`xform.spmd.traffic`).

    weights: of them, those of gathering weights and summing gradients; bound: the least that takes. rest:
    everything else (activations over tensor axes, what is computed across the batch). axes: by the plan's
    axis and its stage; batch: those of the axes that the batch lies over. reasons: what is sent beyond the
    bound, why, and the line.
    """

    total: float
    weights: float
    bound: float
    rest: float
    axes: Mapping[str, Mapping[str, float]]
    batch: Sequence[str]
    reasons: Sequence[tuple[str, str, str]]

    def tell(self, report: Report) -> None:
        """Writes it into the report, as lines and as data."""
        report.traffic = self
        ratio = f", {self.weights / self.bound:.2f} of it" if self.bound else ""
        report.did(
            "shard",
            f"{amount(self.total)} a device and step on the wire, as written",
            f"weights and gradients {amount(self.weights)}, the plan's bound {amount(self.bound)}{ratio};"
            f" the rest {amount(self.rest)}",
        )
        for axis, stages in self.axes.items():
            large = {stage: n for stage, n in stages.items() if n > self.total / 1000}
            if large:
                parts = ", ".join(f"{stage} {amount(n)}" for stage, n in large.items())
                report.did("shard", f"along {axis}: {amount(sum(stages.values()))}", parts * (len(large) > 1))
        for what, why, where in self.reasons:
            report.did("shard", what, why, where)


class Report:
    """Notes in the order in which they were made; the same note made n times stands once, with its count."""

    def __init__(self) -> None:
        self._counts: dict[Note, int] = {}
        self._promises: dict[Promise, None] = {}
        self.traffic: Traffic | None = None
        self.facts: dict[str, float] = {}

    def add(self, note: Note) -> None:
        self._counts[note] = self._counts.get(note, 0) + 1

    def did(self, pass_name: str, what: str, why: str = "", where: str = "") -> None:
        self.add(Note("did", pass_name, what, why, where))

    def declined(self, pass_name: str, what: str, why: str, where: str = "") -> None:
        self.add(Note("declined", pass_name, what, why, where))

    def dropped(self, pass_name: str, what: str, why: str, where: str = "") -> None:
        """An axis of a rule that could not be used, with the reason."""
        self.add(Note("dropped", pass_name, what, why, where))

    def promised(self, pass_name: str, what: str, why: str = "", where: str = "") -> None:
        self.add(Note("promised", pass_name, what, why, where))

    def promise(self, promise: Promise) -> None:
        """What the compiled program is held to (`xform.promises`); the same promise stands once."""
        self._promises[promise] = None

    @property
    def promises(self) -> tuple[Promise, ...]:
        return tuple(self._promises)

    def __iter__(self) -> Iterator[tuple[Note, int]]:
        return iter(self._counts.items())

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, kind: Kind) -> list[Note]:
        return [note for note in self._counts if note.kind == kind]

    def lines(self) -> list[str]:
        """The report as text, a line a note."""
        return [str(note) + (f" [x{count}]" if count > 1 else "") for note, count in self]

    def __str__(self) -> str:
        return "\n".join(self.lines())
