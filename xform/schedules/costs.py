"""What a table takes: idle slots, what a stage keeps, what travels, and how long it is with given costs.

How long a tick is follows from its works, and from whether stages wait for each other. One program whose
every tick ends in permutes runs *in step*: a tick takes as long as its longest work. Stages that go on as
soon as they can are *free*: a work begins when what it needs is there and the one before it is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from xform.errors import PlanError
from xform.registry import unknown
from xform.schedules.checks import check
from xform.schedules.table import GIVES, Kind, Schedule, Work, hop, needs

Direction = Literal["next", "previous"]


@dataclasses.dataclass(frozen=True)
class Costs:
    """How long a microbatch takes through one chunk, in a unit of your own: forward, for the gradient of its
    input, for that of its weights. recompute: what is added where the forward pass is computed again, once,
    before the first of the two gradients.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    recompute: float = 0

    def of(self, work: Work) -> float:
        both = self.input + self.recompute + self.weight
        lasts: dict[Kind, float] = {
            "forward": self.forward,
            "backward": both,
            "input": self.input + self.recompute,
            "weight": self.weight,
        }
        return lasts[work.kind]

    @classmethod
    def loads(cls, text: str) -> Costs:
        """`forward=1,weight=0.5`: those left out keep their defaults."""
        known = [field.name for field in dataclasses.fields(cls)]
        found: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, number = map(str.strip, part.partition("="))
            if name not in known:
                raise unknown("cost", name, known)
            try:
                found[name] = float(number)
            except ValueError:
                found[name] = -1.0
            if not 0 <= found[name] < float("inf"):
                raise PlanError(f"cost {name}: expected a number of 0 or more, got {number!r}")
        return cls(**found)

    def __str__(self) -> str:
        numbers = dataclasses.asdict(self)
        return ", ".join(f"{name} {x:g}" for name, x in numbers.items() if x or name != "recompute")


class Send(NamedTuple):
    """What travels at the end of a tick: what a work gives, from a stage to one beside it in the ring."""

    tick: int
    source: int
    target: int
    direction: Direction
    work: Work


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a schedule takes.

    slots: ticks x stages. idle: how many of them run nothing. alive: by stage, the most inputs of chunks, a
    microbatch each, that are kept at once for the backward pass, from the tick of the forward pass to that of
    the last gradient. late: the same of the gradients of a chunk's results, where those of weights come after
    those of inputs. waiting: the most values, activations and gradients, that have come and lie until a later
    tick. free and in_step: how long it takes (see above) when works take what `costs` says; busy: how long
    each stage works.
    """

    slots: int
    idle: int
    alive: tuple[int, ...]
    late: tuple[int, ...]
    waiting: tuple[int, ...]
    sends: tuple[Send, ...]
    costs: Costs
    busy: tuple[float, ...]
    free: float
    in_step: float

    @property
    def bubble(self) -> float:
        """The part of all slots that is idle."""
        return self.idle / self.slots

    def lost(self, time: float) -> float:
        """The part of a time, over all stages, in which they do nothing."""
        return 1 - sum(self.busy) / (time * len(self.busy)) if time else 0.0

    def permutes(self, direction: Direction) -> int:
        """The ticks at which anything travels that way: each is one permute of the ring."""
        return len({send.tick for send in self.sends if send.direction == direction})

    def to_json(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "idle": self.idle,
            "bubble": self.bubble,
            "alive": list(self.alive),
            "late": list(self.late),
            "waiting": list(self.waiting),
            "costs": dataclasses.asdict(self.costs),
            "free": {"time": self.free, "idle": self.lost(self.free)},
            "in_step": {"time": self.in_step, "idle": self.lost(self.in_step)},
            "permutes": {"next": self.permutes("next"), "previous": self.permutes("previous")},
            "sends": [send._asdict() | {"work": str(send.work)} for send in self.sends],
        }


def cost(schedule: Schedule, costs: Costs | None = None) -> Cost:
    """What a schedule takes; a `PlanError` for a table that cannot run."""
    check(schedule)
    costs = Costs() if costs is None else costs
    runs = list(schedule.works())
    lasts = [[costs.of(work) for work in row if work is not None] for row in schedule.table]
    busy = [0.0] * schedule.stages
    for _, stage, work in runs:
        busy[stage] += costs.of(work)
    slots = schedule.ticks * schedule.stages
    return Cost(
        slots=slots,
        idle=slots - len(runs),
        alive=_kept(schedule, ("forward", "backward", "input", "weight")),
        late=_kept(schedule, ("input", "weight")),
        waiting=_waiting(schedule),
        sends=sends(schedule),
        costs=costs,
        busy=tuple(busy),
        free=_free(schedule, costs),
        in_step=float(sum(max(each, default=0) for each in lasts)),
    )


def sends(schedule: Schedule) -> tuple[Send, ...]:
    """What travels, by tick: activations to the next stage, gradients of inputs to the previous one, in a
    ring in which the first is next to the last. With one stage, nothing does.
    """
    found = []
    stages = schedule.stages
    for tick, stage, work in schedule.works():
        block = work.chunk * stages + stage
        if stages == 1 or work.kind == "weight":
            continue
        if work.kind == "forward" and block < schedule.blocks - 1:
            found.append(Send(tick, stage, (stage + 1) % stages, "next", work))
        elif work.kind != "forward" and block:
            found.append(Send(tick, stage, (stage - 1) % stages, "previous", work))
    return tuple(found)


def _kept(schedule: Schedule, kinds: Sequence[Kind]) -> tuple[int, ...]:
    """By stage, of how many microbatches of chunks a tick at most lies between the first and the last of
    these works, or is one of them.
    """
    spans: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(schedule.stages)]
    for tick, stage, work in schedule.works():
        if work.kind in kinds:
            key = (work.chunk, work.microbatch)
            spans[stage][key] = (spans[stage].get(key, (tick, tick))[0], tick)
    return tuple(_most(list(each.values())) for each in spans)


def _waiting(schedule: Schedule) -> tuple[int, ...]:
    """A value lies from the tick after it could have been taken first, to the tick before that which takes it
    last: what is taken when it comes needs no place of its own.
    """
    given: dict[tuple[Kind, int, int], tuple[int, int]] = {}
    lying: list[list[tuple[int, int]]] = [[] for _ in range(schedule.stages)]
    for tick, stage, work in schedule.works():
        block = work.chunk * schedule.stages + stage
        for need in needs(work, stage, schedule.stages, schedule.repeats):
            if need.block != block:
                there, source = given[need.kind, need.block, work.microbatch]
                lying[stage].append((there + hop(schedule, source, stage), tick - 1))
        for kind in GIVES[work.kind]:
            given[kind, block, work.microbatch] = (tick, stage)
    return tuple(_most([(first, last) for first, last in each if first <= last]) for each in lying)


def _most(spans: Sequence[tuple[int, int]]) -> int:
    """The most spans of ticks, ends included, that any tick lies in."""
    events = sorted([(first, 1) for first, _ in spans] + [(last + 1, -1) for _, last in spans])
    now = most = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


def _free(schedule: Schedule, costs: Costs) -> float:
    """When the last work ends, if each begins as soon as its stage and what it needs are there."""
    ends: dict[tuple[Kind, int, int], float] = {}
    stage_free = [0.0] * schedule.stages
    for _, stage, work in schedule.works():
        block = work.chunk * schedule.stages + stage
        needed = needs(work, stage, schedule.stages, schedule.repeats)
        start = max([stage_free[stage], *(ends[n.kind, n.block, work.microbatch] for n in needed)])
        stage_free[stage] = start + costs.of(work)
        for kind in GIVES[work.kind]:
            ends[kind, block, work.microbatch] = stage_free[stage]
    return max(stage_free)
