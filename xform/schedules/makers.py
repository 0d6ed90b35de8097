"""The schedules that have a name, each a function of stages, microbatches, repeats and delay.

`gpipe` and `circular` are loops of ticks: a microbatch goes on by one stage a tick, and the backward pass is
the mirror image of the forward pass. The others are an order of works for each stage, and the table is what
comes of it when each work runs as soon as it can; `eager` has both in turn.

Sources: GPipe, https://arxiv.org/abs/1811.06965; circular, MaxText's pipeline
(https://github.com/AI-Hypercomputer/maxtext); eager 1F1B, https://arxiv.org/abs/2211.05322; 1F1B and
interleaved, https://arxiv.org/abs/2104.04473, section 2.2; zero bubble, https://arxiv.org/abs/2401.10241,
section 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from xform.errors import PlanError, RewriteError
from xform.registry import unknown
from xform.schedules.table import GIVES, Kind, Row, Schedule, Work, needs

Order = Sequence[Work]
"""What a stage runs, one after the other."""


@dataclasses.dataclass(frozen=True)
class Maker:
    """A schedule that has a name. `loop` makes its table of ticks, or `order` says what a stage runs."""

    loop: Callable[[int, int, int, int], Schedule] | None = None
    order: Callable[[int, int, int, int], Order] | None = None
    repeats: bool = False  # may stages have several chunks?
    delays: bool = False  # may what is sent be under way for longer?
    whole: bool = False  # must microbatches be a multiple of stages?


def make(name: str, stages: int, microbatches: int, repeats: int = 1, delay: int = 0) -> Schedule:
    """The table of a schedule by its name, one of `SCHEDULES`.

    delay: ticks that activations are on their way for beyond the next, so that the sending can run beside the
    compute of the tick between. A `PlanError` for a number that this schedule does not take.
    """
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    maker = SCHEDULES[name]
    for what, number, least in (
        ("stages", stages, 1),
        ("microbatches", microbatches, 1),
        ("repeats", repeats, 1),
        ("delay", delay, 0),
    ):
        if number < least:
            raise PlanError(f"{name}: {what} is {number}; it is a whole number of {least} or more")
    if repeats > 1 and not maker.repeats:
        others = " and ".join(other for other, its in SCHEDULES.items() if its.repeats)
        raise PlanError(f"{name}: a stage has one chunk, and repeats is {repeats}; {others} take several")
    if delay and not maker.delays:
        others = " or ".join(other for other, its in SCHEDULES.items() if its.delays)
        raise PlanError(f"{name}: delay is {delay}; only a loop of ticks takes a delay, as {others}")
    if maker.whole and microbatches % stages:
        near = [n for n in (microbatches // stages * stages, -(-microbatches // stages) * stages) if n]
        raise PlanError(
            f"{name}: {microbatches} microbatches are no multiple of {stages} stages; take "
            f"{' or '.join(map(str, near))}, or circular, which takes any number"
        )
    if maker.loop is not None:
        return dataclasses.replace(maker.loop(stages, microbatches, repeats, delay), name=name)
    assert maker.order is not None
    orders = [maker.order(stage, stages, microbatches, repeats) for stage in range(stages)]
    return Schedule(name, soonest(orders, repeats), microbatches, repeats)


def circular(stages: int, microbatches: int, repeats: int, delay: int) -> Schedule:
    """All microbatches through the first chunks, then all through the second; backward the mirror image.

    A microbatch comes round to the first stage after `turn` ticks: when all others have started, or, where
    they are few, when it is there.
    """
    hop = 1 + delay if stages > 1 else 1
    turn = max(microbatches, hop * stages)
    half = (repeats - 1) * turn + (stages - 1) * hop + microbatches
    table: list[list[Work | None]] = [[None] * stages for _ in range(2 * half)]
    for chunk in range(repeats):
        for stage in range(stages):
            for microbatch in range(microbatches):
                tick = chunk * turn + stage * hop + microbatch
                table[tick][stage] = Work("forward", chunk, microbatch)
                table[-1 - tick][stage] = Work("backward", chunk, microbatch)
    return Schedule("circular", tuple(map(tuple, table)), microbatches, repeats, delay)


def eager(stages: int, microbatches: int, repeats: int, delay: int) -> Schedule:
    """A tick in which all stages go forward, and one in which all go backward, in turn: in one program whose
    ticks end in permutes no stage waits for another that does more. Microbatches go in groups of as many as
    there are stages, each through all chunks, so that each is there at the tick after it was sent.

    Twice as many microbatches as in 1F1B are under way on the first stage, less one.
    """
    assert not delay
    round_, groups = stages * repeats, -(-microbatches // stages)
    steps = groups * round_ if repeats > 1 else microbatches

    def work(kind: Kind, step: int) -> Work | None:
        group, place = divmod(step, round_) if repeats > 1 else (0, step)
        chunk, place = divmod(place, stages) if repeats > 1 else (0, place)
        microbatch = group * stages + place
        if not 0 <= step < steps or microbatch >= microbatches:
            return None
        return Work(kind, chunk if kind == "forward" else repeats - 1 - chunk, microbatch)

    table: list[Row] = []
    for tick in range(steps + stages - 1 + round_ - 1):
        forward = tuple(work("forward", tick - stage) for stage in range(stages))
        back = tuple(work("backward", tick - round_ + 1 - (stages - 1 - stage)) for stage in range(stages))
        table += [row for row in (forward, back) if any(row)]
    return Schedule("eager-1f1b", tuple(table), microbatches, repeats)


def one_forward_one_backward(stage: int, stages: int, microbatches: int, repeats: int) -> Order:
    """Forward passes until the first gradient comes back, then one backward after each forward."""
    return _alternating(
        [Work("forward", 0, m) for m in range(microbatches)],
        [[Work("backward", 0, m)] for m in range(microbatches)],
        stages - stage - 1,
    )


def interleaved(stage: int, stages: int, microbatches: int, repeats: int) -> Order:
    """The same with several chunks: groups of as many microbatches as stages, each through all chunks."""
    if repeats == 1:
        return one_forward_one_backward(stage, stages, microbatches, repeats)
    steps = [
        (chunk, group + place)
        for group in range(0, microbatches, stages)
        for chunk in range(repeats)
        for place in range(stages)
    ]
    return _alternating(
        [Work("forward", chunk, m) for chunk, m in steps],
        [[Work("backward", repeats - 1 - chunk, m)] for chunk, m in steps],
        2 * (stages - stage - 1) + (repeats - 1) * stages,
    )


def zero_bubble(stage: int, stages: int, microbatches: int, repeats: int) -> Order:
    """As 1F1B, with gradients of weights `stage` microbatches late: every stage keeps as many inputs as the
    first keeps, and what is late fills the slots in which there would be nothing to do.
    """
    backward = [
        [Work("input", 0, m), *([Work("weight", 0, m - stage)] if m >= stage else ())]
        for m in range(microbatches)
    ]
    late = [Work("weight", 0, m) for m in range(max(0, microbatches - stage), microbatches)]
    forward = [Work("forward", 0, m) for m in range(microbatches)]
    return [*_alternating(forward, backward, stages - stage - 1), *late]


def _alternating(forward: Order, backward: Sequence[Order], ahead: int) -> Order:
    """The first `ahead` forward works; then one forward, one backward; then the backward works left."""
    ahead = min(ahead, len(forward))
    order = list(forward[:ahead])
    for step, works in enumerate(backward):
        order += [*forward[ahead + step : ahead + step + 1], *works]
    return order


def soonest(orders: Sequence[Order], repeats: int) -> tuple[Row, ...]:
    """The table in which each stage runs its works in their order, each as soon as what it needs is there."""
    stages = len(orders)
    done: set[tuple[Kind, int, int]] = set()
    at = [0] * stages
    table: list[Row] = []
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        row: list[Work | None] = [None] * stages
        for stage, order in enumerate(orders):
            work = order[at[stage]] if at[stage] < len(order) else None
            if work is not None and all(
                (need.kind, need.block, work.microbatch) in done
                for need in needs(work, stage, stages, repeats)
            ):
                row[stage] = work
                at[stage] += 1
        if not any(row):
            waiting = [f"{order[at[s]]} on stage {s}" for s, order in enumerate(orders) if at[s] < len(order)]
            raise RewriteError(f"an order of works that no stage can go on with: {', '.join(waiting)}")
        for stage, work in enumerate(row):
            if work is not None:
                block = work.chunk * stages + stage
                done |= {(kind, block, work.microbatch) for kind in GIVES[work.kind]}
        table.append(tuple(row))
    return tuple(table)


SCHEDULES: Mapping[str, Maker] = {
    "gpipe": Maker(loop=circular, delays=True),
    "circular": Maker(loop=circular, repeats=True, delays=True),
    "eager-1f1b": Maker(loop=eager, repeats=True),
    "1f1b": Maker(order=one_forward_one_backward),
    "interleaved": Maker(order=interleaved, repeats=True, whole=True),
    "zb-h1": Maker(order=zero_bubble),
}
"""The schedules by name."""
