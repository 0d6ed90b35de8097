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
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from jax.interpreters import partial_eval

from xform.batch import Cut, Placed, Split, cut_along_batch, divided
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.memory import Trial
from xform.pipeline import Pipelined, Shape
from xform.pipeline.choice import LAYERS, MICROBATCHES, Choice, best
from xform.pipeline.ticks import run_of
from xform.registry import unknown
from xform.report import Report, amount
from xform.schedules import SCHEDULES, Schedule, check, cost, make
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
    dtype: in which gradients are added up over microbatches, "" for each gradient's own.
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
    dtype: Literal["float32", "bfloat16", "float16", ""] = ""
    prefetch: bool | None = None

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels", "quantize", "remat", "accumulate")
    brings: ClassVar[tuple[str, ...]] = ("roll",)

    @property
    def stage_axis(self) -> str:
        """The mesh axis that layers lie over, and nothing else but the vocabulary."""
        return self.axis

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
        schedule = self._schedule(context)
        check(schedule)
        found = cut_along_batch(
            jaxpr,
            context.roles,
            "pipeline",
            context.report,
            lambda size, found: self._split(size, schedule, found, context),
        )
        if isinstance(found, Placed):
            where = f" ({found.line})" if found.line else ""
            raise PlanError(f"pipeline: the batch cannot be cut into microbatches: {found}{where}")
        pipelined = Pipelined(found, self.dtype, context.report)
        try:
            stack = pipelined.stack
            sizes = _sizes(stack.layers, schedule, source_line(stack.eqn))
            early = max(sizes) == 1 if self.prefetch is None else self.prefetch
            pipelined.shape = Shape(context.mesh, self.axis, schedule, sizes, early)
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
        schedule, report, stack = pipelined.shape.schedule, context.report, pipelined.stack
        line, sizes = source_line(stack.eqn), pipelined.shape.sizes
        most = max(sizes)
        chunks = f"{schedule.repeats} chunks of" if schedule.repeats > 1 else "a run of"
        uneven = f", or {min(sizes)}" if min(sizes) < most else ""
        rows = pipelined.cut.split.rows
        report.facts[LAYERS], report.facts[MICROBATCHES] = stack.layers, schedule.microbatches
        report.did(
            "pipeline",
            f"{stack.layers} layers are {schedule.stages} stages over {self.axis!r}",
            f"{chunks} {_counted(most, 'layer')}{uneven} each;"
            f" {schedule.microbatches} microbatches of {_counted(rows, 'row')}",
            line,
        )
        taken = cost(schedule)
        report.did(
            "pipeline",
            f"schedule {schedule.name}: {schedule.ticks} ticks, {taken.idle} of {taken.slots} slots idle"
            f" ({taken.bubble:.1%})",
            f"a stage keeps at most {max(taken.alive)} inputs of a chunk; {taken.permutes('next')} ticks send"
            f" to the next stage, {taken.permutes('previous')} to the one before",
        )
        if pipelined.shape.prefetch:
            self._tell_prefetched(schedule, line, report)
        if context.differentiated:
            report.did("pipeline", "gradients are added up in " + (self.dtype or "their own dtype"))
        for nbytes, what in pipelined.travels():
            report.did("pipeline", f"{amount(nbytes)} travel with each microbatch", what)
        for other in pipelined.others:
            why = "it is not the largest stack: every stage computes it"
            report.declined("pipeline", "another loop over layers", why, source_line(other))


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _sizes(layers: int, schedule: Schedule, line: str) -> tuple[int, ...]:
    """How many layers each block has: as even as can be, the first ones one more."""
    blocks = schedule.blocks
    if layers < blocks:
        raise PlanError(
            f"pipeline: the stack has {layers} layers ({line}), and {schedule.stages} stages of"
            f" {schedule.repeats} chunks need {blocks} or more: take fewer repeats, or fewer stages"
        )
    return tuple(layers // blocks + (b < layers % blocks) for b in range(blocks))
