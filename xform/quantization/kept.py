"""Takes the ranges that a step's products are quantized by from what earlier steps measured.

    a = name[range:...] amax            r = max history                    (an input of the program)
    s = div a 448                  ->   s = div (r > 0 ? r : amax) 448
                                        history' = [amax, *history[:-1]]   (a result)

The marks (`marks`) are found at every depth of the whole step, after autodiff (`places`), and the program is
traced again (`threaded`): what the histories say goes down to them, what they measure comes up. Where a
history has nothing yet, the range is the one just measured. Ranges that were calibrated are read alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from xform.higher_order import equations
from xform.ops.marks import SIDES, Mark, mark_of
from xform.quantization.places import Place, check_stages, places_in
from xform.quantization.threaded import HANDLERS, Walk
from xform.report import Report, amount
from xform.state.kept import Kept, Phase
from xform.trace import Jaxpr, ShapedArray, Value, trace_flat, without_dead


def with_kept_ranges(
    jaxpr: Jaxpr, phase: Phase, report: Report, returns: bool = True, staged: bool = False
) -> tuple[Jaxpr, list[Kept]]:
    """The step with its ranges from the state, and what it keeps: its last inputs and results. Itself where
    it keeps none. returns: whether what is kept comes back to the next call. staged: whether layers are
    stages of a pipeline.

    Raises PlanError for a range that cannot be told to its product, with the line.
    """
    if not any(mark_of(eqn) is not None for eqn in equations(jaxpr)):
        return jaxpr, []
    jaxpr = without_dead(jaxpr)
    if staged:
        check_stages(jaxpr)
    measures = phase == "measure"
    found = places_in(jaxpr, HANDLERS, measures)
    marks = sorted({place.mark for place in found}, key=_order)
    dtypes = {place.mark: jnp.promote_types(jnp.float32, place.dtype) for place in found}
    kept = [Kept(m.path, ShapedArray(m.shape, dtypes[m]), 0.0 if m.steps else None) for m in marks]
    walk = Walk(found, phase)

    def program(*args: Value) -> list[Value]:
        histories = dict(zip(marks, args[len(jaxpr.invars) :], strict=True))
        ranges = {m: jnp.max(h, -1) if m.steps else h for m, h in histories.items()}
        outs, measured = walk.run(jaxpr, args[: len(jaxpr.invars)], (), ranges)
        return [*outs, *(_next(m, h, measured.get(m), measures) for m, h in histories.items())]

    avals = [*(v.aval for v in jaxpr.invars), *(k.aval for k in kept)]
    names = [*(jaxpr.debug_info.arg_names or ()), *(k.path for k in kept)]
    made = trace_flat(program, avals, "quantize", names)
    _tell(marks, found, kept, report, returns)
    return made, kept


def _order(mark: Mark) -> Any:
    numbers = mark.key.partition(":")[0].split(".")
    return [int(n) for n in numbers if n.isdigit()], mark.key, SIDES.index(mark.side)


def _next(mark: Mark, history: Value, measured: Value | None, measures: bool) -> Value:
    """What is kept for the next step."""
    if measured is None or measures == bool(mark.steps):
        return history
    if measures:
        return jnp.maximum(history, measured)
    return jnp.concatenate([measured[..., None], history[..., :-1]], -1)


def _tell(
    marks: Sequence[Mark], found: Sequence[Place], kept: Sequence[Kept], report: Report, returns: bool
) -> None:
    sizes = {k.path: math.prod(k.aval.shape) * k.aval.dtype.itemsize for k in kept}
    for steps in dict.fromkeys(mark.steps for mark in marks):
        own = [mark for mark in marks if mark.steps == steps]
        what = f"kept {len(own)} amax histories of {steps} steps" if steps else f"kept {len(own)} ranges"
        size = amount(sum(sizes[mark.path] for mark in own))
        why = "of the steps before, in the state" if steps else "from step.calibrate, in the state"
        if steps and not returns:
            why = "read alone: the function does not return the next value of the argument that has them"
        report.did("quantize", f"{what}, {size}", why)
    for place in found:
        for (_, turns), apart in zip(place.loops, place.own, strict=True):
            if not apart and place.mark.steps and place.measures:
                what = f"{place.mark.key}, {place.mark.side}: the largest of {turns or 'all'} turns"
                report.did("quantize", what, "they take the same weight", place.line)
