"""A schedule as a program runs it: for each tick and stage what runs, where it takes from, and where it puts.

What is sent lies in a register of the stage that it was sent to, until the next tick of its direction sends
again; what is not taken by then lies in a slot of a buffer. So do what a chunk has kept for the backward pass
and what the gradient of weights waits for. How many slots there are, and which one is whose, follows from the
table: every stage has as many as the one that needs the most. A stage without work at a tick in which others
run something runs it too, on what is there, since all devices run one program: what it makes goes to a slot
more, which nobody reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from xform.pipeline.rounds import Phase, Round, repeats, rounds
from xform.schedules import Kind, Schedule, Work
from xform.schedules.costs import sends
from xform.schedules.makers import soonest
from xform.schedules.table import GIVES

KINDS: tuple[Kind, ...] = ("forward", "backward", "input", "weight")
Family = Literal["forward", "input", "weight"]

REGISTER, OUTSIDE, WAITING = range(3)
"""Where a work takes its value from: what was sent last; the program around the stack; a slot."""

FAMILY: dict[Kind, Family] = {"forward": "forward", "backward": "input", "input": "input", "weight": "weight"}

COLUMNS = ("kind", "chunk", "microbatch", "take", "wait", "fresh", "put", "put_back")
"""What a tick says of each stage. kind: 1 + its number in KINDS, 0 where there is no work. take: one of the
three above; wait: the slot that it takes from. fresh: 1 for a chunk's first gradient of weights. put,
put_back: in which what has come by now goes, of activations and of gradients, before the register is sent
over. Beside these, for each part of the layers (`of_part`), saved: the slot of what is kept for the backward
pass; late: of what the gradient of weights waits for.
"""


def of_part(name: str, part: int) -> str:
    """The name of a column of slots in which a part of the layers keeps something."""
    return f"{name} {part}"


@dataclasses.dataclass(frozen=True)
class Works:
    """kinds: what some stage runs at a tick."""

    kinds: tuple[Kind, ...]

    @property
    def forward(self) -> bool:
        return "forward" in self.kinds

    @property
    def back(self) -> bool:
        return "backward" in self.kinds or "input" in self.kinds


@dataclasses.dataclass(frozen=True)
class Tick(Works):
    """enters: the microbatch that comes to the first block, ends: that leaves
    the last, returns: whose gradient has come back to the first block; -1 for none. sends: whether anything
    goes on to the next stage afterwards, sends_back: to the one before.
    """

    enters: int
    ends: int
    returns: int
    sends: bool
    sends_back: bool

    @property
    def shape(self) -> tuple[object, ...]:
        """What the program of a tick depends on, but for what is sent."""
        return self.kinds, self.enters >= 0, self.ends >= 0, self.returns >= 0


@dataclasses.dataclass(frozen=True)
class Window:
    """Ticks in which the same chunks' weights are together: those of `fetch` come before, of those of `flush`
    the gradients are whole afterwards. Beside the first tick, those of `early` come for a window after this,
    and the gradients of those of `late` are summed, which are whole since before it.
    """

    start: int
    stop: int
    fetch: tuple[int, ...]
    flush: tuple[int, ...]
    early: tuple[int, ...] = ()
    late: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each sort."""
        return self.fetch, self.flush, self.early, self.late


@dataclasses.dataclass(frozen=True)
class Run:
    """columns: by name of COLUMNS, numbers [ticks, stages]. waiting: slots for activations, and for
    gradients, on their way; ended: slots for gradients of the stack's results, in which `ended` puts them and
    `ending` finds them. saved, late: slots, by part; the one after the last is for what nobody reads. delay:
    ticks of its direction that a value is under way beyond the next, by direction. windows: what is together
    when; resident: of how many chunks at once, chunk c in place c % resident.
    """

    ticks: tuple[Tick, ...]
    columns: Mapping[str, np.ndarray]
    waiting: tuple[int, int]
    ended: int
    saved: tuple[int, ...]
    late: tuple[int, ...]
    delay: tuple[int, int]
    windows: tuple[Window, ...]
    resident: int

    @property
    def stages(self) -> int:
        return int(self.columns["kind"].shape[1])

    def rounds(self, start: int, stop: int) -> list[Round]:
        """Ticks as loops: of ticks that are alike in all, where these are few, since each is a program of its
        own; else in all but whether anything is sent on, or in the kinds of works; else one loop of all.
        """
        ticks = self.ticks[start:stop]
        said: list[tuple[int, list[object]]] = [
            (6, [(tick.shape, tick.sends, tick.sends_back) for tick in ticks]),
            (12, [tick.shape for tick in ticks]),
            (12, [tick.kinds for tick in ticks]),
        ]
        for most, shapes in said:
            found = rounds(repeats(shapes, start), [None] * start + shapes)
            if sum(len(each.phases) for each in found) <= most:
                return found
        return [Round((Phase(start, 1, stop - start, mixed=True),), 1)]

    def groups(self, parts: Callable[[int], object]) -> list[list[Window]]:
        """Windows next to each other that are one loop over windows. parts: what a chunk is made of."""

        def like(window: Window) -> object:
            ticks = self.ticks[window.start : window.stop]
            shapes = [(tick.shape, tick.sends, tick.sends_back) for tick in ticks]
            return shapes, [[parts(chunk) for chunk in chunks] for chunks in window.chunks]

        return [list(group) for _, group in itertools.groupby(self.windows, like)]


def run_of(schedule: Schedule, parts: Sequence[Sequence[bool]] | None = None, prefetch: bool = False) -> Run:
    """What a program runs for a schedule that can run; a table without backward works is that of a program
    that is not differentiated. parts: for each part of the layers, which blocks have some of it. prefetch:
    chunks' weights come together, and their gradients are summed, beside ticks, not between them.
    """
    return _Run(schedule, parts or [[True] * schedule.blocks], prefetch).run()


def forward_only(schedule: Schedule) -> Schedule:
    """The forward works of a schedule, each stage's in their order and as soon as they can. What is longer
    under way stays where it is, and ticks that are left with none go.
    """
    rows = [
        tuple(work if work is not None and work.kind == "forward" else None for work in row)
        for row in schedule.table
    ]
    if schedule.delay:
        return dataclasses.replace(schedule, table=tuple(row for row in rows if any(row)))
    orders = [[work for work in works if work is not None] for works in zip(*rows, strict=True)]
    return dataclasses.replace(schedule, table=soonest(orders, schedule.repeats))


class _Run:
    def __init__(self, schedule: Schedule, parts: Sequence[Sequence[bool]], prefetch: bool) -> None:
        self.schedule, self.parts, self.prefetch = schedule, parts, prefetch
        self.stages, self.repeats = schedule.stages, schedule.repeats
        self.last = schedule.blocks - 1
        table = schedule.table
        self.columns = {name: np.zeros((len(table), self.stages), np.int32) for name in COLUMNS}
        travels = {(each.tick, each.direction) for each in sends(schedule)}
        self.ticks = tuple(self.tick(n, row, travels) for n, row in enumerate(table))
        self.turns = {
            "forward": [t for t, tick in enumerate(self.ticks) if tick.forward],
            "input": [t for t, tick in enumerate(self.ticks) if tick.back],
        }
        self.done: dict[tuple[Kind, int, int], int] = {}
        for tick, stage, work in schedule.works():
            for kind in GIVES[work.kind]:
                self.done[kind, self.block(stage, work), work.microbatch] = tick

    def block(self, stage: int, work: Work) -> int:
        return work.chunk * self.stages + stage

    def tick(self, number: int, row: Sequence[Work | None], travels: Container[tuple[int, str]]) -> Tick:
        kinds = tuple(kind for kind in KINDS if any(w is not None and w.kind == kind for w in row))
        enters = ends = returns = -1
        for stage, work in enumerate(row):
            if work is None:
                continue
            block = self.block(stage, work)
            if work.kind == "forward":
                enters = work.microbatch if block == 0 else enters
                ends = work.microbatch if block == self.last else ends
            elif work.kind in ("backward", "input") and block == 0:
                returns = work.microbatch
        return Tick(kinds, enters, ends, returns, *((number, way) in travels for way in ("next", "previous")))

    def run(self) -> Run:
        columns = self.columns
        met: set[tuple[int, int]] = set()
        for tick, stage, work in self.schedule.works():
            if "weight" in GIVES[work.kind] and (stage, work.chunk) not in met:
                met.add((stage, work.chunk))
                columns["fresh"][tick, stage] = 1
            columns["kind"][tick, stage] = 1 + KINDS.index(work.kind)
            columns["chunk"][tick, stage] = work.chunk
            columns["microbatch"][tick, stage] = work.microbatch
        forward, ahead = self.arrivals("forward")
        back, behind = self.arrivals("input")
        ended = self.ended()
        saved = self.saved()
        late = self.late()
        self.borrowed(saved, late)
        windows, resident = self.windows()
        return Run(
            self.ticks, columns, (forward, back), ended, saved, late, (ahead, behind), windows, resident
        )

    # Which chunks' weights are together

    def windows(self) -> tuple[tuple[Window, ...], int]:
        """The ticks cut where the weights of a chunk are wanted first, and where its gradients are whole; all
        in one where all chunks are wanted at once. Where all forward works come first, weights come together
        once for these and once for the others, so that each half has them in the order in memory that it
        likes best. Gradients are whole at the next border; after the last fetch borders are as far apart as
        before it, so that the last windows are like the others.
        """
        every = Window(0, len(self.ticks), (), ())
        split = max(self.turns["forward"]) + 1
        if any(t < split for t in self.turns["input"]):
            split = 0
        spans: dict[tuple[bool, int], tuple[int, int]] = {}
        for tick, _, work in self.schedule.works():
            key = (tick >= split, work.chunk)
            first, last = spans.get(key, (tick, tick))
            spans[key] = (min(first, tick), max(last, tick))

        def apart(a: tuple[bool, int], b: tuple[bool, int]) -> bool:
            before, after = sorted((spans[a], spans[b]))
            return a[0] != b[0] or before[1] + self.prefetch < after[0]

        def fits(n: int) -> bool:
            return all(apart(a, b) for a, b in itertools.combinations(spans, 2) if (a[1] - b[1]) % n == 0)

        resident = next(n for n in range(1, self.repeats + 1) if n == self.repeats or fits(n))
        if resident == self.repeats:
            return (every,), resident
        if self.prefetch:
            return self.beside(spans, resident), resident
        fetch: dict[int, list[int]] = {}
        flush: dict[int, list[int]] = {}
        for (_, chunk), (first, _) in sorted(spans.items(), key=lambda item: item[1]):
            fetch.setdefault(first, []).append(chunk)
        before, latest = sorted(fetch)[-2:]
        later = [*fetch, *range(latest, len(self.ticks), latest - before), len(self.ticks)]
        for (back, chunk), (_, last) in spans.items():
            if back and self.turns["input"]:
                flush.setdefault(min(t for t in later if t > last), []).append(chunk)
        borders = sorted({0, len(self.ticks), *fetch, *flush})
        return tuple(
            Window(a, b, tuple(fetch.get(a, ())), tuple(flush.get(b, ())))
            for a, b in itertools.pairwise(borders)
        ), resident

    def beside(self, spans: Mapping[tuple[bool, int], tuple[int, int]], resident: int) -> tuple[Window, ...]:
        """The same where there is a tick to do it beside: weights come as soon as their place is free, and
        stay for the gradients where nothing takes it before; gradients are summed at the next tick.
        """
        fetch: dict[int, list[int]] = {}
        flush: dict[int, list[int]] = {}
        early: dict[int, list[int]] = {}
        late: dict[int, list[int]] = {}
        holds: dict[int, tuple[int, int]] = {}  # by place, the chunk that is there and its last tick
        for (back, chunk), (first, last) in sorted(spans.items(), key=lambda item: item[1]):
            held, free = holds.get(chunk % resident, (-1, -1))
            holds[chunk % resident] = (chunk, last)
            if held != chunk:
                where, at = (early, free + 1) if free + 1 < first else (fetch, first)
                where.setdefault(at, []).append(chunk)
            if back and self.turns["input"]:
                (late if last + 1 < len(self.ticks) else flush).setdefault(last + 1, []).append(chunk)
        borders = sorted({0, len(self.ticks), *fetch, *flush, *early, *late})

        def window(start: int, stop: int) -> Window:
            those = (fetch, start), (flush, stop), (early, start), (late, start)
            return Window(start, stop, *(tuple(chunks.get(at, ())) for chunks, at in those))

        return tuple(window(a, b) for a, b in itertools.pairwise(borders))

    # What is sent

    def arrivals(self, family: Family) -> tuple[int, int]:
        """Where what is sent in a direction is taken from: how many slots it waits in, and how many ticks of
        its direction it is under way beyond the next.
        """
        number = {tick: n for n, tick in enumerate(self.turns[family])}
        sent: list[
            tuple[int, int, int, int]
        ] = []  # stage, from and to: ticks of the direction; tick it is taken at
        for tick, stage, work in self.schedule.works():
            block = self.block(stage, work)
            before = block - 1 if family == "forward" else block + 1
            if FAMILY[work.kind] != family:
                continue
            if not 0 <= before <= self.last:
                if family == "forward":
                    self.columns["take"][tick, stage] = OUTSIDE
                continue
            made = number[self.done["forward" if family == "forward" else "input", before, work.microbatch]]
            sent.append((stage, made, number[tick], tick))
        delay = min([self.schedule.delay, *(to - made - 1 for _, made, to, _ in sent)])
        spans = {}
        for stage, made, to, tick in sent:
            there = made + 1 + delay
            if to == there:
                self.columns["take"][tick, stage] = REGISTER
            else:
                self.columns["take"][tick, stage] = WAITING
                spans[stage, tick] = (self.turns[family][there], tick)
        slots, placed = colored(spans)
        for (stage, tick), slot in placed.items():
            self.columns["wait"][tick, stage] = slot
        # the slot that a register's value goes to, at the tick at which it has come; the spare one for others
        put = np.full((len(self.ticks), self.stages), slots, np.int32)
        for (stage, tick), (there, _) in spans.items():
            put[there, stage] = placed[stage, tick]
        self.columns["put" if family == "forward" else "put_back"] = put
        return slots, delay

    def ended(self) -> int:
        """In how many slots the gradients of the stack's results wait for the last block; 0 where each is
        taken before the next is made.
        """
        spans = {}
        for tick, stage, work in self.schedule.works():
            if FAMILY[work.kind] == "input" and self.block(stage, work) == self.last:
                spans[0, work.microbatch] = (self.done["forward", self.last, work.microbatch], tick)
                self.columns["take"][tick, stage] = OUTSIDE
        slots, placed = colored(spans)
        self.columns["ended"] = np.zeros((len(self.ticks), 1), np.int32)
        self.columns["ending"] = np.zeros((len(self.ticks), 1), np.int32)
        for (_, microbatch), (made, taken) in spans.items():
            self.columns["ended"][made] = placed[0, microbatch]
            self.columns["ending"][taken] = placed[0, microbatch]
        return slots

    # What is kept

    def saved(self) -> tuple[int, ...]:
        """In how many slots what a chunk keeps for its gradients lies, by part; none where there are none."""
        if not self.turns["input"]:
            return (0,) * len(self.parts)
        return self.slots("saved", self.spans("forward", KINDS))

    def late(self) -> tuple[int, ...]:
        """The same of what the gradient of weights waits for."""
        return self.slots("late", self.spans("input", ("weight",)))

    def spans(self, first: Kind, others: Sequence[Kind]) -> dict[tuple[int, int, int], tuple[int, int]]:
        """By stage, chunk and microbatch, the ticks from a work of one kind to the last one of others."""
        found: dict[tuple[int, int, int], tuple[int, int]] = {}
        for tick, stage, work in self.schedule.works():
            key = (stage, work.chunk, work.microbatch)
            if work.kind == first:
                found[key] = (tick, tick)
            elif work.kind in others:
                found[key] = (found[key][0], tick)
        return found

    def slots(self, name: str, spans: Mapping[tuple[int, int, int], tuple[int, int]]) -> tuple[int, ...]:
        """How many slots each part takes; the numbers are in a column of its own."""
        counts = []
        for part, there in enumerate(self.parts):
            mine = {key: span for key, span in spans.items() if there[key[1] * self.stages + key[0]]}
            count, placed = colored(mine)
            column = np.full((len(self.ticks), self.stages), count, np.int32)
            for tick, stage, work in self.schedule.works():
                key = (stage, work.chunk, work.microbatch)
                if key in placed and spans[key][0] <= tick:
                    column[tick, stage] = placed[key]
            self.columns[of_part(name, part)] = column
            counts.append(count)
        return tuple(counts)

    def borrowed(self, saved: Sequence[int], late: Sequence[int]) -> None:
        """Where a stage has no work, it runs that of the others on what it has: it reads the slot that its
        last forward work has written. Every stage has had one when the first gradient goes back. What it has
        made without work does not do: where the others' works are of several kinds, it makes nothing.
        """
        for stage, (part, there) in itertools.product(range(self.stages), enumerate(self.parts)):
            last = {"saved": saved[part], "late": late[part]}
            columns = {name: self.columns[of_part(name, part)] for name in last if self.turns["input"]}
            for t, tick in enumerate(self.ticks):
                work = self.schedule.table[t][stage]
                if work is not None and not there[self.block(stage, work)]:
                    continue
                if work is not None and work.kind == "forward" and columns:
                    last["saved"] = int(columns["saved"][t, stage])
                elif work is None and not tick.forward:
                    columns["saved"][t, stage] = last["saved"]
                    self.columns["chunk"][t, stage] = 0
                if work is not None and work.kind == "input":
                    last["late"] = int(columns["late"][t, stage])
                elif work is None and "input" not in tick.kinds and "weight" in tick.kinds:
                    columns["late"][t, stage] = last["late"]


def colored[Key: tuple[int, ...]](spans: Mapping[Key, tuple[int, int]]) -> tuple[int, dict[Key, int]]:
    """A slot for each span of ticks, both ends included, so that none has two at once. The first number of a
    key is the stage, which has slots of its own; how many there are is what the stage takes that needs most.
    """
    placed: dict[Key, int] = {}
    for _, group in itertools.groupby(sorted(spans), key=lambda key: key[0]):
        ends: list[int] = []  # by slot, the tick until which it is taken
        for key in sorted(group, key=lambda key: (spans[key], key)):
            first, last = spans[key]
            slot = next((n for n, end in enumerate(ends) if end < first), len(ends))
            ends[slot : slot + 1] = [last]
            placed[key] = slot
    return _count(placed.values()), placed


def _count(slots: Iterable[int]) -> int:
    return max(slots, default=-1) + 1
