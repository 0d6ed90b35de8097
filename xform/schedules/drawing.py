"""A schedule drawn as text: its table, what travels at every tick, and what it takes.

The text is one that `Schedule.loads` reads: what is not the table is a comment, or a row it knows.
"""

from __future__ import annotations

from xform.schedules import grid
from xform.schedules.costs import Cost, Direction
from xform.schedules.table import Schedule

WAYS: tuple[Direction, ...] = ("next", "previous")


def draw(schedule: Schedule, cost: Cost, width: int = grid.WIDTH) -> str:
    """The table in lines of at most `width`, with rows of how many values travel after each tick."""
    rows = schedule.rows()
    for way in WAYS:
        travel = [0] * schedule.ticks
        for send in cost.sends:
            travel[send.tick] += send.direction == way
        rows[way] = [str(count or grid.IDLE) for count in travel]
    told = [f"# {line}" for line in figures(schedule, cost)]
    return "\n".join([schedule.title(), grid.written(rows, width), *told])


def figures(schedule: Schedule, cost: Cost) -> list[str]:
    """What it takes, a line each."""
    sent = {way: sum(send.direction == way for send in cost.sends) for way in WAYS}
    travels = [f"{sent[way]} to the {way} stage in {cost.permutes(way)} ticks" for way in WAYS]
    late = [f"gradients kept for those of weights at most, by stage: {spread(cost.late)}"]
    return [
        f"ticks {schedule.ticks}, idle {cost.idle} of {cost.slots} slots ({percent(cost.bubble)})",
        f"inputs of a chunk and microbatch alive at most, by stage: {spread(cost.alive)}",
        *(late if any(cost.late) else ()),
        f"values that wait for their tick at most, by stage: {spread(cost.waiting)}",
        f"travels: {', '.join(travels)}",
        f"costs: {cost.costs}",
        f"time: {cost.free:g} when stages go on as soon as they can ({percent(cost.lost(cost.free))} idle)",
        f"time: {cost.in_step:g} when all wait at every tick ({percent(cost.lost(cost.in_step))} idle)",
    ]


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def spread(counts: tuple[int, ...]) -> str:
    """`4, 3, 2, 1`, or `4 each`."""
    return f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts))
