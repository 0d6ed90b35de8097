"""Cuts a stack of layers into stages over a mesh axis, and the batch into microbatches that go through them.

    for w in layers: x = layer(x, w)        for each tick:                             (loops)
    loss = mean(head(x))             ->       x  = a chunk of this stage's layers, of x or embed
                                              x' = ppermute x                          to the next stage
                                              loss, dx = head x;  dx = the chunk's gradients

The program that is about to be differentiated is cut where it has summed over the batch, as Accumulate cuts
it, and a microbatch's part of it at its stack of layers (`xform.pipeline`). What runs when is a schedule, a
table of ticks and stages (`xform.schedules`), and a microbatch's gradients are computed inside of it: so as
much is kept for the backward pass as the table says, not as much as there are microbatches.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from jax.interpreters import partial_eval

from xform.batch import Cut, Placed, Split, cut_along_batch, divided
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.experts import lifted, refused
from xform.memory import Trial
from xform.pipeline import Pipelined, Shape
from xform.pipeline.arrays import is_floating
from xform.pipeline.balance import sizes_of
from xform.pipeline.choice import LAYERS, MICROBATCHES, STACKS, Choice, best
from xform.pipeline.chunks import Placing
from xform.pipeline.pieces import Stack
from xform.pipeline.ticks import run_of
from xform.registry import unknown
from xform.report import Report, amount
from xform.schedules import SCHEDULES, Schedule, check, cost, make
from xform.spmd.keeping import narrowed
from xform.trace import Jaxpr, source_line


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Options:

    axis: the mesh axis of the stages.
    microbatches: into how many the batch is cut; with Accumulate in the plan, so many in each of its steps.
    schedule: a row of `xform.schedules.SCHEDULES`, or the path of a file with a table of your own. By default
        some are compiled, and of those that fit the devices the one is taken that computes and copies least.
    repeats: chunks of layers a stage, for schedules that take several.
    delay: ticks that activations are under way beyond the next, for `gpipe` and `circular`.
    ends: where what is before and after the layers is computed, embedding and head: `outside` of the stages,
        by all of them, the vocabulary over them; or on the first and the last of the `stages`, which then
        have fewer layers, while all have room for these weights.
    dtype: in which gradients are added up over microbatches, or as Accumulate says that is in the plan too.
        "" for that in which a layer has them: of weights that it casts first, the one that it casts to.
    prefetch: where a stage's chunks take turns, whether the next one's weights come together, and the last
        one's gradients are summed over devices, beside a tick of the one that runs. By default where a chunk
        is one layer: several are a loop, and the TPU compiler sends nothing beside a loop.

    A stack that the model has layer by layer is made a loop before (Roll), which the plan need not name.
    Raises PlanError where the mesh lacks the axis, where there is no stack or fewer layers than blocks, where
    the batch cannot be divided or rows of it meet, with the line, and for a table that cannot run.
    """

    axis: str = "stage"
    microbatches: int = 8
    schedule: str = ""
    repeats: int = 1
    delay: int = 0
    ends: Literal["outside", "stages"] = "outside"
    dtype: Literal["float32", "bfloat16", "float16", ""] = ""
    prefetch: bool | None = None

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    after: ClassVar[tuple[str, ...]] = (
        "roll",
        "chunkedloss",
        "kernels",
        "context",
        "experts",
        "quantize",
        "remat",
        "accumulate",
    )
    brings: ClassVar[tuple[str, ...]] = ("roll",)

    @property
    def stage_axis(self) -> str:
        """The mesh axis that layers lie over, and nothing else but the vocabulary."""
        return self.axis

    def cuts(self, rows: int) -> int:
        """Into how many microbatches a batch is cut."""
        return self.microbatches

    @property
    def vocabulary_axis(self) -> str:
        """The same axis, if the vocabulary lies over it."""
        return "" if self._inside else self.axis

    def settle(self, trial: Callable[[Any], Trial], report: Report) -> Pipeline:
        """The pass with a schedule, by trial of whole steps, where the plan names none."""
        if self.schedule:
            return self

        def settled(choice: Choice) -> Pipeline:
            return dataclasses.replace(self, schedule=choice.schedule, repeats=choice.repeats)

        def tried(choice: Choice) -> Trial:
            return trial(settled(choice))

        return settled(best(tried, self.axis, self.repeats, self.delay, report))

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        if context.stage == "step":
            used = [True] * len(jaxpr.outvars)
            return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0]
        schedule, dtype = self._schedule(context), self._dtype(context)
        check(schedule)
        found = cut_along_batch(
            lifted(jaxpr, "pipeline", context.report),
            context.roles,
            "pipeline",
            context.report,
            lambda size, found: self._split(size, schedule, found, context),
        )
        if isinstance(found, Placed):
            where = f" ({found.line})" if found.line else ""
            what = f"pipeline: the batch cannot be cut into microbatches: {found}{where}"
            raise PlanError(what + refused(context.report))
        pipelined = Pipelined(found, dtype, context.report)
        try:
            sizes = self._sizes(pipelined, schedule)
            early = max(map(max, sizes)) == 1 if self.prefetch is None else self.prefetch
            pipelined.shape = Shape(context.mesh, self.axis, schedule, sizes, self._inside, early)
            self._tell(pipelined, context)
            return pipelined.whole(jaxpr, "pipeline")
        except Decline as why:
            raise PlanError(f"pipeline: {why}") from None

    def _schedule(self, context: Context) -> Schedule:
        sizes = dict(context.mesh.shape)
        if self.axis not in sizes:
            raise PlanError(
                f"pipeline.axis = {self.axis!r}: the mesh has {', '.join(sizes) or 'no axes'}; name one of"
                f" them, or give the mesh {self.axis} = 4, say"
            )
        stages, microbatches = sizes[self.axis], self.microbatches * context.steps
        if stages == 1:
            raise PlanError(
                f"pipeline.axis = {self.axis!r} has one device in the mesh: a pipeline takes two or more"
            )
        if self.microbatches < 1:
            raise PlanError(f"pipeline.microbatches = {self.microbatches}: it is a whole number of 1 or more")
        if self.schedule in SCHEDULES:
            return make(self.schedule, stages, microbatches, self.repeats, self.delay)
        if not os.path.exists(self.schedule):
            error = unknown("schedule", self.schedule, SCHEDULES, "pipeline.schedule")
            raise PlanError(f"{error}; or the path of a file with a table, which {self.schedule!r} is not")
        own = Schedule.load(self.schedule)
        for what, has, wants in (
            ("stages", own.stages, stages),
            ("microbatches", own.microbatches, microbatches),
        ):
            if has != wants:
                of = f"the mesh axis {self.axis!r} has" if what == "stages" else "pipeline.microbatches says"
                raise PlanError(f"pipeline.schedule = {self.schedule!r} has {has} {what}, and {of} {wants}")
        return own

    def _dtype(self, context: Context) -> str:
        """In which gradients are added up; Accumulate in the plan has a say too."""
        if context.sums is None or not self.dtype:
            return context.sums or self.dtype
        if context.sums != self.dtype:
            raise PlanError(
                f"pipeline.dtype = {self.dtype!r} and accumulate.dtype = {context.sums!r}: gradients are"
                " added up in one of them; give both the same, or leave out pipeline.dtype"
            )
        return self.dtype

    @property
    def _inside(self) -> bool:
        return self.ends == "stages"

    def _sizes(self, pipelined: Pipelined, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
        """How many layers of each part the blocks have."""
        stacks, (stages, repeats) = pipelined.stacks[0], (schedule.stages, schedule.repeats)
        if sum(stack.layers for stack in stacks) < schedule.blocks:
            has = " and ".join(f"{stack.layers} layers ({source_line(stack.eqn)})" for stack in stacks)
            raise PlanError(
                f"pipeline: the stack has {has}, and {stages} stages of {repeats} chunks need"
                f" {schedule.blocks} or more: take fewer repeats, or fewer stages"
            )
        return sizes_of(pipelined.pieces(self._inside).parts, stages, repeats)

    def _split(self, size: int, schedule: Schedule, found: Cut, context: Context) -> Split:
        if size % schedule.microbatches:
            fit = [n for n in range(1, size + 1) if size % n == 0]
            paths = [leaf.path for leaf in context.inputs]
            option = f"pipeline.microbatches = {self.microbatches}"
            if context.steps > 1:
                option += f", times accumulate.steps = {context.steps},"
            raise divided(option, size, 1, found, paths, fit)
        return Split(size, schedule.microbatches)

    def _tell_prefetched(self, schedule: Schedule, line: str, report: Report) -> None:
        windows = run_of(schedule, prefetch=True).windows
        if len(windows) == 1:
            why = f"the schedule {schedule.name} wants the weights of all of a stage's chunks at once"
            return report.declined("pipeline", "prefetch", why, line) if self.prefetch else None
        early, late = (sum(len(window.chunks[n]) for window in windows) for n in (2, 3))
        report.did(
            "pipeline",
            "the next chunk's weights come together beside a tick of this one's",
            f"{_counted(early, 'time')}; gradients are summed so {_counted(late, 'time')}",
            line,
        )

    def _tell(self, pipelined: Pipelined, context: Context) -> None:
        schedule, report = pipelined.shape.schedule, context.report
        stacks, small = pipelined.stacks
        report.facts[LAYERS] = sum(stack.layers for stack in stacks)
        report.facts[STACKS], report.facts[MICROBATCHES] = len(stacks), schedule.microbatches
        parts = pipelined.pieces(self._inside).parts
        for part, sizes in zip(parts, pipelined.shape.sizes, strict=True):
            if part.stack is not None:
                what = f"{part.layers} layers are {schedule.stages} stages over {self.axis!r}"
                line = source_line(part.stack.eqn)
                report.did("pipeline", what, _layers(sizes, schedule), line)
                placing = Placing.of(sizes, schedule.stages, part.reverse)
                if placing.ragged:
                    why = (
                        f"blocks differ in layers: each step puts {part.layers} in {placing.layers.size} rows"
                    )
                    report.declined("pipeline", "layers stored as stages have them", why, line)
            else:
                where = f"on stage {sizes.index(1) % schedule.stages}"
                report.did("pipeline", f"{part.name} is a layer of its own", where)
        rows = _counted(pipelined.cut.split.rows, "row")
        report.did("pipeline", f"{schedule.microbatches} microbatches of {rows}")
        taken = cost(schedule)
        report.did(
            "pipeline",
            f"schedule {schedule.name}: {schedule.ticks} ticks, {taken.idle} of {taken.slots} slots idle"
            f" ({taken.bubble:.1%})",
            f"a stage keeps at most {max(taken.alive)} inputs of a chunk; {taken.permutes('next')} ticks send"
            f" to the next stage, {taken.permutes('previous')} to the one before",
        )
        if pipelined.shape.prefetch:
            self._tell_prefetched(schedule, source_line(stacks[0].eqn), report)
        if context.differentiated:
            cast = ", ".join(sorted({dtype for stack in stacks for dtype in _cast(stack)}))
            how = f"of weights that layers cast first, {cast}: pipeline.dtype names another" if cast else ""
            if pipelined.dtype:
                report.did("pipeline", f"gradients are added up in {pipelined.dtype}")
            else:
                report.did("pipeline", "gradients are added up in their own dtype", how)
        for nbytes, what in pipelined.travels():
            report.did("pipeline", f"{amount(nbytes)} travel with each microbatch", what)
        for other in small:
            why = "it has less than an eighth of the weights of the largest: it stays in what is around"
            report.declined("pipeline", "another loop over layers", why, source_line(other.eqn))


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _cast(stack: Stack) -> set[str]:
    """The dtypes to which layers cast weights of their own before anything else."""
    rows: list[Any] = [v for v in stack.body.invars[sum(stack.parts) :] if is_floating(v.aval)]
    return {str(dtype) for v in rows if (dtype := narrowed(stack.body, v)) != v.aval.dtype}


def _layers(sizes: Sequence[int], schedule: Schedule) -> str:
    """How a stack's layers lie."""
    there = [n for n in sizes if n]
    uneven = f", or {min(there)}" if min(there) < max(there) else ""
    chunks = {n // schedule.stages for n, size in enumerate(sizes) if size}
    runs = f"{len(chunks)} chunks of" if len(chunks) > 1 else "a run of"
    blocks = len(chunks) * schedule.stages
    some = f" on {len(there)} of {blocks} blocks" if len(there) < blocks else ""
    return f"{runs} {_counted(max(there), 'layer')}{uneven} each{some}"
