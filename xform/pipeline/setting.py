"""What one pass over all microbatches is made of: the program's pieces, the table, what is differentiated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from xform.batch import Microbatches
from xform.batch.microbatches import Leaves
from xform.derivative import reached
from xform.pipeline.arrays import is_floating
from xform.pipeline.chunks import Chunks, Placing
from xform.pipeline.cutting import cut
from xform.pipeline.layer import Layer, layer_of
from xform.pipeline.pieces import Pieces
from xform.pipeline.ticks import Run, Works, forward_only, run_of
from xform.schedules import Schedule
from xform.trace import Jaxpr, Value, Var


@dataclasses.dataclass(frozen=True)
class Shape:
    """The axis of the stages in the mesh, the schedule, and how many layers of each part its blocks have:
    sizes, by part and then by block. inside: whether the ends of the stack are parts. prefetch: whether
    weights come together beside ticks.
    """

    mesh: Mesh
    axis: str
    schedule: Schedule
    sizes: tuple[tuple[int, ...], ...]
    inside: bool
    prefetch: bool

    @property
    def stages(self) -> int:
        return self.schedule.stages


When = Literal["never", "sometimes", "always"]


@dataclasses.dataclass(frozen=True)
class Sort(Works):
    """What the program of a tick has in it: the kinds of works, what happens at the ends of the stack, and
    whether anything is sent each way. mixed: what runs differs from one turn of its loop to the next.
    """

    enters: When
    ends: When
    returns: When
    sends: bool
    sends_back: bool
    mixed: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """of: the microbatches, as they are added up. program: of one microbatch, whose first `same` inputs are
    the same for all. data: [microbatches, ...]. which: the inputs that are differentiated, wanted: the sums,
    pulls: their cotangents, one list a stream.
    """

    of: Microbatches
    shape: Shape
    program: Jaxpr
    same: int
    data: list[Value]
    which: Sequence[int]
    wanted: Sequence[int]
    pulls: Sequence[Leaves]

    @functools.cached_property
    def pieces(self) -> Pieces:
        return cut(self.program, self.same, self.which, self.shape.inside)

    @functools.cached_property
    def runs(self) -> Run:
        schedule = self.shape.schedule if self.pulls else forward_only(self.shape.schedule)
        parts = [[count > 0 for count in sizes] for sizes in self.shape.sizes]
        return run_of(schedule, parts, self.shape.prefetch)

    @functools.cached_property
    def placings(self) -> list[Placing]:
        parts = zip(self.shape.sizes, self.pieces.parts, strict=True)
        return [Placing.of(sizes, self.shape.stages, part.reverse) for sizes, part in parts]

    @functools.cached_property
    def layers(self) -> list[Layer]:
        return [layer_of(self.pieces, part, self.moved) for part in self.pieces.parts]

    @functools.cached_property
    def chunks(self) -> Chunks:
        resident = self.runs.resident if self.windowed else 0
        return Chunks(self.pieces, self.layers, self.placings, len(self.pulls), resident)

    @functools.cached_property
    def crossing(self) -> list[bool]:
        """Of what travels, what one block gives and another one takes."""
        last = self.shape.schedule.blocks - 1
        entered = 0 if self.pieces.inside else len(self.pieces.enter.outvars)
        first = {n: 0 for n in range(entered)}
        reads = dict.fromkeys(self.pieces.leaves, last)
        for part, layer, sizes in zip(self.pieces.parts, self.layers, self.shape.sizes, strict=True):
            blocks = [block for block, count in enumerate(sizes) if count]
            for n in layer.operands.moving:
                reads[n] = max(reads.get(n, 0), blocks[-1])
            for n in part.gives:
                first.setdefault(n, blocks[0])
                if n in part.gives[len(part.gives) - part.rows :]:  # filled, a row at a time
                    reads[n] = max(reads.get(n, 0), blocks[-1])
        return [n in first and first[n] < reads.get(n, 0) for n in range(len(self.pieces.z))]

    @property
    def windowed(self) -> bool:
        """Whether chunks' weights come together a few at a time."""
        return len(self.runs.windows) > 1

    # What is differentiated

    @property
    def first(self) -> list[int]:
        """Of what is the same for all."""
        return [i for i in self.which if i < self.same]

    @property
    def rows(self) -> list[int]:
        """Of the data."""
        return [i - self.same for i in self.which if i >= self.same]

    @functools.cached_property
    def moved(self) -> list[int]:
        """Of what is made once."""
        once = self.pieces.once
        moving = reached(once, [once.invars[i] for i in self.first])
        return [
            k
            for k, v in enumerate(once.outvars)
            if isinstance(v, Var) and v in moving and is_floating(v.aval)
        ]

    @functools.cached_property
    def outer(self) -> list[int]:
        """Of what is made once, that which the ends take outside of the stages."""
        if self.pieces.inside:
            return []
        reads = read(self.pieces.enter) | read(self.pieces.leave)
        return [k for k in self.moved if self.pieces.fixed[k] in reads]


def read(jaxpr: Jaxpr) -> set[Any]:
    """The variables that a program reads or gives."""
    every = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
    return {v for v in every if isinstance(v, Var)}
