"""Ticks as loops: a run of ticks that repeat is a phase, and phases that repeat are a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Phase:
    """Ticks that repeat: `count` times those from `start` to `start + period`. mixed: what runs differs from
    one time to the next.
    """

    start: int
    period: int
    count: int
    mixed: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclasses.dataclass(frozen=True)
class Round:
    """Phases, one after the other, so many times; the later times with the ticks that follow."""

    phases: tuple[Phase, ...]
    count: int

    @property
    def ticks(self) -> int:
        """Of one time."""
        return self.phases[-1].stop - self.phases[0].start


def repeats(shapes: Sequence[object], start: int) -> list[Phase]:
    """Ticks as loops of up to three that repeat."""
    found: list[Phase] = []
    at = 0
    while at < len(shapes):
        best = Phase(at, 1, 1)
        for period in (1, 2, 3):
            count = 1
            while shapes[at : at + period] == shapes[at + period * count : at + period * (count + 1)]:
                count += 1
            if count > 1 and period * count > best.period * best.count:
                best = Phase(at, period, count)
        found.append(dataclasses.replace(best, start=best.start + start))
        at = best.stop
    return found


def rounds(phases: Sequence[Phase], shapes: Sequence[object]) -> list[Round]:
    """Phases as loops of some that repeat. shapes: of each tick."""
    said = [(p.period, p.count, *shapes[p.start : p.start + p.period]) for p in phases]
    found: list[Round] = []
    at = 0
    while at < len(phases):
        length, count = 1, 1
        for several in range(1, (len(phases) - at) // 2 + 1):
            times = 1
            while said[at : at + several] == said[at + several * times : at + several * (times + 1)]:
                times += 1
            if times > 1 and several * times > length * count:
                length, count = several, times
        found.append(Round(tuple(phases[at : at + length]), count))
        at += length * count
    return found
