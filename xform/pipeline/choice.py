"""Which schedule a plan takes that names none: of those that fit the device, the one that computes least.

Whole steps are tried, each under a schedule of its own, and compiled: so known are the memory that one takes,
how much it multiplies, idle slots among it, what it copies because its loops want other layouts, and what it
sends. Where no compiler plans memory (a CPU), the schedule is taken that keeps few inputs of chunks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from xform.memory import Trial
from xform.report import Report, amount, duration
from xform.schedules import SCHEDULES, cost, make

LAYERS, STACKS, MICROBATCHES = "pipeline.layers", "pipeline.stacks", "pipeline.microbatches"
"""The names under which the report has how many there are."""

DEFAULT = "eager-1f1b"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule by name, with its chunks a stage."""

    schedule: str
    repeats: int

    def __str__(self) -> str:
        return self.schedule + (f" of {self.repeats} chunks a stage" if self.repeats > 1 else "")


@dataclasses.dataclass(frozen=True)
class Tried:
    """What a schedule takes, as compiled. seconds: of products and copies; idle: of the table's slots. peak:
    bytes of memory at most, infinite where it does not fit; wire: bytes that a device sends.
    """

    choice: Choice
    seconds: float
    idle: float
    peak: float
    wire: float

    def __str__(self) -> str:
        if math.isinf(self.peak):
            return "does not fit the device"
        sends = f", {amount(self.wire)} sent" if self.wire else ""
        return (
            f"{duration(self.seconds)}, {amount(self.peak)} of memory{sends}, {self.idle:.1%} of slots idle"
        )


def choices(layers: int, stages: int, repeats: int, delay: int, stacks: int = 1) -> list[Choice]:
    """The schedules to try, the first the one that is taken where nothing can be compared.

    repeats: as the plan says; with 1, a layer a chunk too where layers allow, and a chunk for each of several
    stacks. delay: where there is one, those that take it.
    """
    most = repeats if repeats > 1 else layers // stages if layers % stages == 0 else 1
    single, several = (DEFAULT, "1f1b", "gpipe"), (DEFAULT, "circular")
    found = [Choice(name, repeats) for name in (several if repeats > 1 else single)]
    if repeats == 1 < stacks and layers >= stages * stacks:
        found = [*(Choice(name, stacks) for name in several), *found]
    found += [Choice(name, most) for name in several if most > 1]
    found = [choice for choice in found if not delay or SCHEDULES[choice.schedule].delays]
    return list(dict.fromkeys(found))


def best(trial: Callable[[Choice], Trial], axis: str, repeats: int, delay: int, report: Report) -> Choice:
    """The schedule to take; the report is told of it and of the others. axis: that of the stages."""
    first = choices(0, 1, repeats, delay)[0]
    start = trial(first)
    facts, stages = start.program.report.facts, start.mesh.shape[axis]
    layers, stacks, microbatches = (int(facts.get(name, 0)) for name in (LAYERS, STACKS, MICROBATCHES))
    those = choices(layers, stages, repeats, delay, stacks)
    if not start.is_compiled or not layers:
        why = "it keeps few inputs of chunks; these devices' compiler plans no memory to choose by"
        report.did("pipeline", f"schedule {those[0]} is taken", why)
        return those[0]
    found = [
        _tried(choice, start if choice == first else trial(choice), stages, microbatches) for choice in those
    ]
    taken = _least(found)
    report.did("pipeline", f"schedule {taken.choice} is taken", str(taken))
    for other in found:
        if other is not taken:
            report.declined("pipeline", f"schedule {other.choice}", str(other))
    return taken.choice


def _tried(choice: Choice, trial: Trial, stages: int, microbatches: int) -> Tried:
    table = cost(make(choice.schedule, stages, microbatches, choice.repeats))
    traffic = trial.program.report.traffic
    return Tried(choice, trial.seconds, table.bubble, trial.peak, traffic.total if traffic else 0.0)


def _least(found: Sequence[Tried]) -> Tried:
    """Of those that fit the quickest, then that which sends least; the first where none fits."""
    fit = [each for each in found if math.isfinite(each.peak)]
    return min(fit or found[:1], key=lambda each: (each.seconds, each.wire))
