"""Cuts a stack of layers into stages over a mesh axis, and the batch into microbatches that go through them.

    for w in layers: x = layer(x, w)        for each tick:                             (loops)
    loss = mean(head(x))             ->       x  = a chunk of this stage's layers, of x or embed
                                              x' = ppermute x                          to the next stage
                                              loss, dx = head x;  dx = the chunk's gradients

The program that is about to be differentiated is cut where it has summed over the batch, as Accumulate cuts it, and a
microbatch's part of it at its stack of layers (`xform.pipeline`). What runs when is a schedule, a table of
ticks and stages (`xform.schedules`), and values and gradients of each microbatch are computed inside it: so what is kept for
the backward pass is as much as the table says, not as much as there are microbatches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from jax.interpreters import partial_eval

from xform.batch import Cut, Mixes, Placed, Split, cut, find_batch, flat
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.pipeline import Pipelined, Shape, find_stack, microbatch
from xform.registry import unknown
from xform.schedules import SCHEDULES, Schedule, check, make
from xform.trace import Jaxpr, source_line, trace_flat


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Options:

    axis: the mesh axis of the stages.
    microbatches: into how many the batch is cut.
    schedule: a row of `xform.schedules.SCHEDULES`, or the path of a file with a table of your own.
    repeats: chunks of layers a stage, for schedules that take several.
    delay: ticks that activations are under way beyond the next.
    dtype: in which gradients are added up, "" for each gradient's own.

    Raises PlanError where the mesh lacks the axis, where there are fewer layers than blocks, where the batch
    cannot be divided so, and for a table that cannot run.
    """

    axis: str = "stage"
    microbatches: int = 8
    schedule: str = "1f1b"
    repeats: int = 1
    delay: int = 0
    dtype: Literal["float32", "bfloat16", "float16", ""] = ""

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels", "quantize", "remat")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        if context.stage == "step":
            context.stage_axes = (self.axis,)
            used = [True] * len(jaxpr.outvars)
            return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0]
        schedule = self._schedule(context)
        check(schedule)
        found = self._cut(flat(jaxpr), context)
        program = microbatch(found)
        stack = find_stack(program, len(found.same))
        sizes = _sizes(stack.layers, schedule.blocks)
        shape = Shape(context.mesh, self.axis, schedule, sizes)
        pipelined = Pipelined(found, self.dtype, shape, context.report)
        return pipelined.whole(jaxpr, "pipeline")

    def _schedule(self, context: Context) -> Schedule:
        sizes = dict(context.mesh.shape)
        if self.axis not in sizes:
            raise PlanError(f"pipeline.axis = {self.axis!r}: the mesh has {', '.join(sizes)}")
        if self.schedule in SCHEDULES:
            return make(self.schedule, sizes[self.axis], self.microbatches, self.repeats, self.delay)
        raise unknown("schedule", self.schedule, SCHEDULES, "pipeline.schedule")

    def _cut(self, jaxpr: Jaxpr, context: Context) -> Cut:
        roles = context.roles(jaxpr)
        for factors in find_batch(jaxpr, roles):
            size = 1
            for f in factors:
                size *= f.size
            try:
                found = cut(jaxpr, roles.axes, factors, Split(size, 1))
                if not found.data or not (found.parts or found.gathered):
                    continue
                return cut(jaxpr, roles.axes, factors, Split(size, self.microbatches))
            except Mixes:
                continue
        raise PlanError("pipeline: no batch")


def _sizes(layers: int, blocks: int) -> tuple[int, ...]:
    return tuple(layers // blocks + (b < layers % blocks) for b in range(blocks))
