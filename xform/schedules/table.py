"""A schedule of a pipeline is a table: at each tick, what each stage runs, if anything.

A stack of layers is cut into blocks, and block b lies on stage b % stages, as that stage's chunk b // stages:
with one chunk a stage is a run of layers, with more its chunks are apart and each microbatch comes round once
for each, from the last stage to the first again. A stage's work is one microbatch through one chunk:

    F1.5   forward of microbatch 5 through chunk 1; what it gives goes to the next stage
    B1.5   backward, both gradients; that of its input goes to the previous stage
    I1.5   the gradient of its input alone, which goes to the previous stage
    W1.5   the gradient of its weights alone, after I1.5

Where stages have one chunk, F5 says the same as F0.5. The table says nothing of how long a tick is:
`xform.schedules.costs` does.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from xform.errors import PlanError
from xform.faults import text_of
from xform.registry import unknown
from xform.schedules import grid

Kind = Literal["forward", "backward", "input", "weight"]

LETTERS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
_LETTER = {kind: letter for letter, kind in LETTERS.items()}

GIVES: dict[Kind, tuple[Kind, ...]] = {
    "forward": ("forward",),
    "backward": ("input", "weight"),
    "input": ("input",),
    "weight": ("weight",),
}
"""What there is when a work is done: a backward gives both gradients."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One microbatch through one chunk of a stage, forward or for its gradients. Numbers begin at 0."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{_LETTER[self.kind]}{self.chunk}.{self.microbatch}"

    @classmethod
    def loads(cls, cell: str) -> Self:
        """The work that a cell such as `F1.5`, or `F5` for chunk 0, stands for."""
        found = re.fullmatch(r"([FBIW])(?:(\d+)\.)?(\d+)", cell)
        if found is None:
            raise PlanError(
                f"no work {cell!r}: write one of F (forward), B (backward), I (gradient of the input) and W "
                "(of the weights) with chunk and microbatch, as in F0.3, or . where a stage is idle"
            )
        return cls(LETTERS[found[1]], int(found[2] or 0), int(found[3]))


@dataclasses.dataclass(frozen=True)
class Need:
    """What must be there before a work runs: what a work of that kind gives, of this block."""

    kind: Kind
    block: int


Row = tuple[Work | None, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of works, checked only for its shape: `xform.schedules.check` says whether it can run.

    table: by tick, then by stage; None is idle. microbatches: how many there are. repeats: chunks a stage.
    delay: ticks that what is sent to another stage is on its way for, beyond the one in which it was made: 0
    has it there at the next tick. A `PlanError` for a table whose ticks differ in their stages.
    """

    name: str
    table: tuple[Row, ...]
    microbatches: int
    repeats: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", tuple(tuple(row) for row in self.table))
        plain = self.name.isprintable() and self.name == self.name.strip() and not set(self.name) & set(":=#")
        if not self.name or not plain:
            raise PlanError(f"a schedule's name is in one line, without ':', '=' and '#': {self.name!r}")
        if not self.table or not self.table[0]:
            raise PlanError(f"{self.name}: the table is empty; it takes a row a stage, such as `F0 B0`")
        for tick, row in enumerate(self.table):
            if len(row) != self.stages:
                raise PlanError(f"{self.name}: tick {tick} has {len(row)} stages, tick 0 has {self.stages}")
        for what, number, least in (
            ("microbatches", self.microbatches, 1),
            ("repeats", self.repeats, 1),
            ("delay", self.delay, 0),
        ):
            if number < least:
                raise PlanError(f"{self.name}: {what} is {number}; it is a whole number of {least} or more")

    @property
    def stages(self) -> int:
        return len(self.table[0])

    @property
    def ticks(self) -> int:
        return len(self.table)

    @property
    def blocks(self) -> int:
        """How many blocks the layers are cut into."""
        return self.stages * self.repeats

    def works(self) -> Iterator[tuple[int, int, Work]]:
        """All works with their tick and stage, by tick."""
        for tick, row in enumerate(self.table):
            for stage, work in enumerate(row):
                if work is not None:
                    yield tick, stage, work

    def cell(self, work: Work | None) -> str:
        """How a work is written in this table."""
        if work is None:
            return grid.IDLE
        return str(work) if self.repeats > 1 else f"{_LETTER[work.kind]}{work.microbatch}"

    # ------------------------------------------------------------ as text

    @classmethod
    def of(
        cls,
        rows: str | Sequence[str],
        name: str = "own",
        *,
        microbatches: int | None = None,
        repeats: int | None = None,
        delay: int = 0,
    ) -> Self:
        """The table of rows of cells, a stage each: `Schedule.of(["F0 F1 . B0 . B1", ". F0 B0 F1 B1 ."])`.

        microbatches and repeats are, unless given, as many as the cells have.
        """
        text = rows if isinstance(rows, str) else "\n".join(rows)
        said, numbers, cells = grid.read(text)
        given = {"microbatches": microbatches, "repeats": repeats, "delay": delay or None}
        numbers |= {what: number for what, number in given.items() if number is not None}
        return cls._made(said or name, numbers, cells)

    @classmethod
    def loads(cls, text: str, source: str = "schedule") -> Self:
        """The table in a text, as `dumps` writes it, or in a TOML text with `rows`, a list of strings or one
        of several lines, and `name`, `microbatches`, `repeats` and `delay`, which may be left out.

        `source` begins every error.
        """
        try:
            return cls.of(**_keys(text)) if re.search(r"^[^#]*=", text, re.MULTILINE) else cls.of(text)
        except PlanError as error:
            raise PlanError(f"{source}: {error}") from error.__cause__

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The table in a file; a `PlanError` names the file."""
        return cls.loads(text_of(path), os.fspath(path))

    def dumps(self) -> str:
        """The table as text, in lines of at most 110; `Schedule.loads(schedule.dumps()) == schedule`."""
        return f"{self.title()}\n{grid.written(self.rows())}\n"

    def title(self) -> str:
        """The first line of the text: the name and the numbers."""
        said = f"{self.name}: stages {self.stages}, microbatches {self.microbatches}"
        said += f", repeats {self.repeats}" if self.repeats > 1 else ""
        return said + (f", delay {self.delay}" if self.delay else "")

    def to_json(self) -> dict[str, Any]:
        """The numbers, and the cells by tick and stage."""
        numbers = {"microbatches": self.microbatches, "repeats": self.repeats, "delay": self.delay}
        table = [[self.cell(work) for work in row] for row in self.table]
        return {"name": self.name, "stages": self.stages, **numbers, "ticks": self.ticks, "table": table}

    def rows(self) -> dict[str, list[str]]:
        """The ticks, and the cells of each stage."""
        rows = {"tick": [str(tick) for tick in range(self.ticks)]}
        for stage, works in enumerate(zip(*self.table, strict=True)):
            rows[f"stage {stage}"] = [self.cell(work) for work in works]
        return rows

    @classmethod
    def _made(cls, name: str, numbers: Mapping[str, int], cells: Sequence[Sequence[str]]) -> Self:
        for stage, row in enumerate(cells):
            if len(row) != len(cells[0]):
                raise PlanError(
                    f"stage {stage} has {len(row)} ticks, stage 0 has {len(cells[0])}: write . where a stage "
                    "is idle"
                )
        if numbers.get("stages", len(cells)) != len(cells):
            raise PlanError(
                f"the first line says {numbers['stages']} stages, and there are {len(cells)} rows"
            )
        rows = [
            [_work(cell, tick, stage) for tick, cell in enumerate(row)] for stage, row in enumerate(cells)
        ]
        works = [work for row in rows for work in row if work is not None]
        return cls(
            name,
            tuple(zip(*rows, strict=True)),
            numbers.get("microbatches", max((work.microbatch for work in works), default=0) + 1),
            numbers.get("repeats", max((work.chunk for work in works), default=0) + 1),
            numbers.get("delay", 0),
        )


def needs(work: Work, stage: int, stages: int, repeats: int) -> tuple[Need, ...]:
    """What of its own microbatch a work on a stage takes."""
    block = work.chunk * stages + stage
    if work.kind == "forward":
        return (Need("forward", block - 1),) if block else ()
    if work.kind == "weight":
        return (Need("input", block),)
    last = block == stages * repeats - 1
    return (Need("forward", block), *(() if last else (Need("input", block + 1),)))


def hop(schedule: Schedule, source: int, target: int) -> int:
    """Ticks from a work on one stage to the earliest on another that takes what it gives."""
    return 1 if source == target else 1 + schedule.delay


def _work(cell: str, tick: int, stage: int) -> Work | None:
    if cell == grid.IDLE:
        return None
    try:
        return Work.loads(cell)
    except PlanError as error:
        raise PlanError(f"tick {tick}, stage {stage}: {error}") from None


_TYPES: dict[str, tuple[type, ...]] = {
    "rows": (str, list),
    "name": (str,),
    "microbatches": (int,),
    "repeats": (int,),
    "delay": (int,),
}


def _keys(text: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(str(error)) from error
    for key, value in table.items():
        if key not in _TYPES:
            raise unknown("key", key, _TYPES)
        fits = isinstance(value, _TYPES[key]) and not isinstance(value, bool)
        if not fits or (isinstance(value, list) and not all(isinstance(row, str) for row in value)):
            wanted = "a string, or a list of them" if key == "rows" else _TYPES[key][0].__name__
            raise PlanError(f"{key}: expected {wanted}, got {value!r}")
    if "rows" not in table:
        raise PlanError('no rows: give rows = ["F0 B0", ...], a string a stage')
    return table
