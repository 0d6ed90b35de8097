"""Whether a table can run: every dependency met, every microbatch through every block once, nothing twice.

The rules: forward through block b after that through block b - 1; backward through b after forward through b
and after backward through b + 1; the gradient of weights after that of the input. Between stages, what is
sent is there `delay` ticks after the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from xform.errors import PlanError
from xform.schedules.table import GIVES, Kind, Schedule, Work, hop, needs

Done = dict[tuple[Kind, int, int], tuple[int, int, Work]]
"""By kind, block and microbatch: tick, stage and work that gives it."""


def check(schedule: Schedule) -> None:
    """Raises a `PlanError` that names the first slot which is wrong, and what it would take."""
    faults = list(itertools.islice(problems(schedule), 100))
    if faults:
        more = len(faults) - 1
        rest = f" (and {more if more < 99 else 'at least 99'} more)" if more else ""
        raise PlanError(f"{schedule.name}: {faults[0]}{rest}")


def problems(schedule: Schedule) -> Iterator[str]:
    """What is wrong with a table: numbers out of range, works twice, works too early, works missing."""
    done: Done = {}
    for tick, stage, work in schedule.works():
        here = f"tick {tick}, stage {stage}: {_said(schedule, stage, work)}"
        if work.chunk >= schedule.repeats:
            yield f"{here}: there is no chunk {work.chunk}; repeats is {schedule.repeats}, chunks begin at 0"
            continue
        if work.microbatch >= schedule.microbatches:
            yield (
                f"{here}: there is no microbatch {work.microbatch}; there are {schedule.microbatches}, "
                "and they begin at 0"
            )
            continue
        for kind in GIVES[work.kind]:
            key = (kind, _block(schedule, stage, work), work.microbatch)
            if key in done:
                first, _, other = done[key]
                yield (
                    f"{here} runs a second time: {schedule.cell(other)} at tick {first} has done it; "
                    "write . in one of the two slots"
                )
                break
            done[key] = (tick, stage, work)
    yield from _early(schedule, done)
    yield from _missing(schedule, done)


def _early(schedule: Schedule, done: Done) -> Iterator[str]:
    for tick, stage, work in schedule.works():
        for need in needs(work, stage, schedule.stages, schedule.repeats):
            found = done.get((need.kind, need.block, work.microbatch))
            if found is None:
                continue
            there, source, other = found
            soonest = there + hop(schedule, source, stage)
            if tick < soonest:
                on = f"stage {source}" if source != stage else "its own stage"
                yield (
                    f"tick {tick}, stage {stage}: {_said(schedule, stage, work)} needs "
                    f"{schedule.cell(other)} of {on}, which runs at tick {there}: it cannot run before tick "
                    f"{soonest}"
                )


def _missing(schedule: Schedule, done: Done) -> Iterator[str]:
    """Works that no slot has; first, for each microbatch, those that others wait for."""
    wanted: dict[tuple[Kind, int, int], tuple[int, int, Work]] = {}
    for tick, stage, work in schedule.works():
        for need in needs(work, stage, schedule.stages, schedule.repeats):
            wanted.setdefault((need.kind, need.block, work.microbatch), (tick, stage, work))
    split = any(work.kind in ("input", "weight") for _, _, work in schedule.works())
    kinds: tuple[Kind, ...] = ("forward", "input", "weight") if split else ("forward", "input")
    for kind, block, microbatch in itertools.product(
        kinds, range(schedule.blocks), range(schedule.microbatches)
    ):
        if (kind, block, microbatch) in done:
            continue
        own: Kind = "backward" if kind == "input" and not split else kind
        work = Work(own, block // schedule.stages, microbatch)
        stage = block % schedule.stages
        yield (
            f"stage {stage}: {_said(schedule, stage, work)} is missing; "
            f"{_place(schedule, done, work, stage, wanted.get((kind, block, microbatch)))}"
        )


def _place(
    schedule: Schedule, done: Done, work: Work, stage: int, waiting: tuple[int, int, Work] | None
) -> str:
    """Where a missing work would have to stand."""
    known = [
        done.get((need.kind, need.block, work.microbatch))
        for need in needs(work, stage, schedule.stages, schedule.repeats)
    ]
    after = [
        (there + hop(schedule, source, stage), source, other) for there, source, other in filter(None, known)
    ]
    said = []
    if waiting is not None:
        tick, target, other = waiting
        said.append(
            f"{schedule.cell(other)} on stage {target} at tick {tick} needs it at tick "
            f"{tick - hop(schedule, stage, target)} or before"
        )
    if after:
        soonest, source, other = max(after, key=lambda each: each[0])
        said.append(f"after {schedule.cell(other)} of stage {source} it can run at tick {soonest} or later")
    return ", and ".join(said) or "it takes a free slot"


def _block(schedule: Schedule, stage: int, work: Work) -> int:
    return work.chunk * schedule.stages + stage


NAMES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradient of the input",
    "weight": "gradient of the weights",
}


def _said(schedule: Schedule, stage: int, work: Work) -> str:
    """`F1.5 (forward of microbatch 5, block 6)`."""
    block = _block(schedule, stage, work)
    where = f", block {block}" if schedule.repeats > 1 else ""
    return f"{schedule.cell(work)} ({NAMES[work.kind]}, microbatch {work.microbatch}{where})"
