"""Tables run as a program runs them, with values that say what they are: what a tick takes and puts."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from xform.pipeline.rounds import Phase
from xform.pipeline.ticks import KINDS, OUTSIDE, WAITING, Run, forward_only, run_of
from xform.schedules import SCHEDULES, Kind, Schedule, Work, check, cost, make
from xform.schedules.table import GIVES, needs

Said = tuple[Any, ...] | None
"""("x", block, microbatch) goes into a block, ("dx", ...) is its gradient; None is nothing."""


def named(name: str) -> Iterator[Schedule]:
    """Every table of a name that is small."""
    maker = SCHEDULES[name]
    for stages, microbatches in itertools.product((1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 8)):
        if maker.whole and microbatches % stages:
            continue
        for repeats, delay in itertools.product((1, 2, 3), (0, 1, 2)):
            if (repeats == 1 or maker.repeats) and (delay == 0 or maker.delays):
                yield make(name, stages, microbatches, repeats, delay)


def drawn(random_: random.Random, stages: int, microbatches: int, repeats: int) -> Schedule:
    """A table of works that run at any time at which they can."""
    done: set[tuple[str, int, int]] = set()
    kinds: list[Kind] = ["forward", "input", "weight"] if random_.random() < 0.5 else ["forward", "backward"]
    every = [Work(*each) for each in itertools.product(kinds, range(repeats), range(microbatches))]
    left = [list(every) for _ in range(stages)]
    rows = []

    def can(work: Work, stage: int) -> bool:
        return all((n.kind, n.block, work.microbatch) in done for n in needs(work, stage, stages, repeats))

    while any(left):
        able = [[work for work in works if can(work, stage)] for stage, works in enumerate(left)]
        row = tuple(random_.choice([None, *those, *those]) for those in able)
        for stage, work in enumerate(row):
            if work is not None:
                left[stage].remove(work)
                block = work.chunk * stages + stage
                done |= {(kind, block, work.microbatch) for kind in GIVES[work.kind]}
        rows.append(row)
    return Schedule("drawn", tuple(rows), microbatches, repeats)


# ---------------------------------------------------------------- a program run by hand


@dataclasses.dataclass
class Stage:
    """What lies on one stage. A slot that nothing has been put in is None, as is what came of nothing."""

    run: Run

    def __post_init__(self) -> None:
        run = self.run
        self.register: list[Said] = [None, None]  # of activations, of gradients
        self.under_way: list[list[Said]] = [[None] * run.delay[0], [None] * run.delay[1]]
        self.waiting: list[list[Said]] = [[None] * (n + 1) for n in run.waiting]
        self.saved: list[Said] = [None] * (run.saved[0] + 1)
        self.late: list[Said] = [None] * (run.late[0] + 1)
        there = [("w", chunk) for chunk in range(run.resident)]
        self.weights: list[Said] = [None] * run.resident if windowed(run) else [*there]
        self.totals: list[set[tuple[int, int]]] = [set() for _ in range(run.resident)]


def windowed(run: Run) -> bool:
    return len(run.windows) > 1


def order(run: Run) -> Iterator[tuple[int, Phase, int]]:
    """The ticks as loops take them, each with its loop and the number of its program in there."""
    for group in run.groups(lambda chunk: None):
        rounds = run.rounds(group[0].start, group[0].stop)
        for window, each in itertools.product(group, rounds):
            later = window.start - group[0].start
            for n, phase in itertools.product(range(each.count), each.phases):
                for tick in range(phase.start, phase.stop):
                    yield later + tick + n * each.ticks, phase, (tick - phase.start) % phase.period


class Program:
    """The whole, a tick at a time; wrong values are found where they are used."""

    def __init__(self, schedule: Schedule, prefetch: bool = False) -> None:
        self.schedule, self.run = schedule, run_of(schedule, prefetch=prefetch)
        self.stages = [Stage(self.run) for _ in range(schedule.stages)]
        self.ended: list[Said] = [None] * self.run.ended
        self.blocks = schedule.blocks
        self.results: list[int] = []
        self.returned: list[int] = []
        self.whole: dict[int, list[set[tuple[int, int]]]] = {}
        self.differentiated = any(tick.back for tick in self.run.ticks)

    def cols(self, tick: int, stage: int) -> dict[str, int]:
        return {name: int(x[tick, stage % x.shape[1]]) for name, x in self.run.columns.items()}

    def go(self) -> None:
        begins = {window.start: window for window in self.run.windows}
        stops = {window.stop: window for window in self.run.windows}
        assert list(begins) == [0, *list(stops)[:-1]] and list(stops)[-1] == len(self.run.ticks)
        at = 0
        for tick, _, _ in order(self.run):
            assert tick == at
            at += 1
            if tick in begins:
                for chunk in begins[tick].fetch:
                    self.fetch(chunk)
                for chunk in begins[tick].late:
                    self.flush(chunk)
            self.tick(tick)
            if tick in begins:
                for chunk in begins[tick].early:
                    self.fetch(chunk)
            if tick + 1 in stops:
                for chunk in stops[tick + 1].flush:
                    self.flush(chunk)
        assert at == len(self.run.ticks) == self.schedule.ticks

    def fetch(self, chunk: int) -> None:
        for stage in self.stages:
            stage.weights[chunk % self.run.resident] = ("w", chunk)

    def flush(self, chunk: int) -> None:
        assert chunk not in self.whole
        self.whole[chunk] = [set(stage.totals[chunk % self.run.resident]) for stage in self.stages]

    def tick(self, number: int) -> None:
        tick = self.run.ticks[number]
        sent: list[list[Said]] = [[s.register[0] for s in self.stages], [s.register[1] for s in self.stages]]
        made: list[Said] = [None] * len(self.stages)
        returned: list[Said] = [None] * len(self.stages)
        for s, stage in enumerate(self.stages):
            cols = self.cols(number, s)
            for way, put, moves in ((0, "put", tick.forward), (1, "put_back", tick.back)):
                if self.run.waiting[way] and moves:
                    stage.waiting[way][cols[put]] = stage.register[way]
            work = self.schedule.table[number][s]
            assert cols["kind"] == (0 if work is None else 1 + KINDS.index(work.kind))
            if work is None and len(tick.kinds) != 1:
                continue  # the branch that does nothing
            kind = tick.kinds[0] if work is None else work.kind
            if work is not None:
                assert (cols["chunk"], cols["microbatch"]) == (work.chunk, work.microbatch)
                assert stage.weights[work.chunk % self.run.resident] == ("w", work.chunk)
            if kind == "forward":
                made[s] = sent[0][s] = self.forward(number, s, work)
            elif kind in ("backward", "input"):
                returned[s] = sent[1][s] = self.back(number, s, work, kind)
            else:
                self.weight(number, s, work)
        n = len(self.stages)
        for way, step, moves in ((0, 1, tick.forward), (1, -1, tick.back)):
            if not moves:
                continue
            for s, stage in enumerate(self.stages):
                chain = [sent[way][(s - step) % n], *stage.under_way[way]]
                stage.register[way], stage.under_way[way] = chain[-1], chain[:-1]
        if tick.ends >= 0:
            assert made[-1] == ("x", self.blocks, tick.ends)
            self.results.append(tick.ends)
            if self.differentiated:
                slot = int(self.run.columns["ended"][number, 0])
                self.ended[slot] = ("dx", self.blocks, tick.ends)
        if tick.returns >= 0:
            assert returned[0] == ("dx", 0, tick.returns)
            self.returned.append(tick.returns)

    def taken(self, number: int, s: int, way: int, outside: Said) -> Said:
        cols, stage = self.cols(number, s), self.stages[s]
        if cols["take"] == OUTSIDE:
            return outside
        return stage.waiting[way][cols["wait"]] if cols["take"] == WAITING else stage.register[way]

    def forward(self, number: int, s: int, work: Work | None) -> Said:
        cols, stage = self.cols(number, s), self.stages[s]
        if work is None:  # what is made of what is there
            if self.differentiated:
                assert cols["saved 0"] == self.run.saved[0]
                stage.saved[cols["saved 0"]] = ("any",)
            return None
        block, m = work.chunk * len(self.stages) + s, work.microbatch
        enters = self.run.ticks[number].enters
        found = self.taken(number, s, 0, ("x", 0, enters))
        assert found == ("x", block, m)
        if self.differentiated:
            assert cols["saved 0"] < self.run.saved[0]
            stage.saved[cols["saved 0"]] = ("saved", block, m)
        return ("x", block + 1, m)

    def back(self, number: int, s: int, work: Work | None, kind: str) -> Said:
        cols, stage = self.cols(number, s), self.stages[s]
        if work is None:
            assert stage.saved[cols["saved 0"]][0] == "saved"  # what is added for nothing is to be a number
            if kind == "input":
                assert cols["late 0"] == self.run.late[0]
                stage.late[cols["late 0"]] = ("any",)
            return None
        block, m = work.chunk * len(self.stages) + s, work.microbatch
        ended = self.ended[int(self.run.columns["ending"][number, 0])]
        assert self.taken(number, s, 1, ended) == ("dx", block + 1, m)
        assert stage.saved[cols["saved 0"]] == ("saved", block, m)
        if kind == "input":
            assert cols["late 0"] < self.run.late[0]
            stage.late[cols["late 0"]] = ("late", block, m)
        else:
            self.add(number, s, work)
        return ("dx", block, m)

    def weight(self, number: int, s: int, work: Work | None) -> None:
        cols, stage = self.cols(number, s), self.stages[s]
        if work is None:
            return
        block, m = work.chunk * len(self.stages) + s, work.microbatch
        assert stage.saved[cols["saved 0"]] == ("saved", block, m)
        assert stage.late[cols["late 0"]] == ("late", block, m)
        self.add(number, s, work)

    def add(self, number: int, s: int, work: Work) -> None:
        """A gradient of weights to its sum; a chunk's first where chunks take turns begins one."""
        place = work.chunk % self.run.resident
        total = self.stages[s].totals[place]
        if self.cols(number, s)["fresh"] and windowed(self.run):
            total.clear()
        assert (work.chunk, work.microbatch) not in total
        total.add((work.chunk, work.microbatch))


def ran(schedule: Schedule, prefetch: bool = False) -> Program:
    """The program after it ran, with all that was wanted of it there."""
    program = Program(schedule, prefetch)
    program.go()
    microbatches = list(range(schedule.microbatches))
    assert sorted(program.results) == microbatches
    assert sorted(program.returned) == (microbatches if program.differentiated else [])
    if program.differentiated:
        for chunk in range(schedule.repeats):
            wanted = {(chunk, m) for m in microbatches}
            for s, stage in enumerate(program.stages):
                sums = program.whole[chunk][s] if windowed(program.run) else stage.totals[chunk]
                assert sums == wanted
    return program


# ---------------------------------------------------------------- all tables


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_work_finds_what_it_takes(name: str) -> None:
    for schedule in named(name):
        ran(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_work_of_a_program_that_is_not_differentiated_finds_what_it_takes(name: str) -> None:
    for schedule in named(name):
        ran(forward_only(schedule))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_a_table_of_ones_own_finds_what_it_takes(
    stages: int, microbatches: int, repeats: int, seed: int
) -> None:
    schedule = drawn(random.Random(seed), stages, microbatches, repeats)
    check(schedule)
    ran(schedule)
    ran(forward_only(schedule))


@pytest.mark.parametrize("name", SCHEDULES)
def test_ticks_of_one_loop_run_the_same_kinds_of_works(name: str) -> None:
    for schedule in named(name):
        run = run_of(schedule)
        alike: dict[tuple[Phase, int], set[tuple[Kind, ...]]] = {}
        for tick, phase, j in order(run):
            if not phase.mixed:
                alike.setdefault((phase, j), set()).add(run.ticks[tick].kinds)
        assert all(len(kinds) == 1 for kinds in alike.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_slots_are_kept_as_the_costs_of_a_table_say(name: str) -> None:
    for schedule in named(name):
        run, costs = run_of(schedule), cost(schedule)
        assert (run.saved[0], run.late[0]) == (max(costs.alive), max(costs.late))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_is_a_few_loops_of_ticks(name: str) -> None:
    """However many microbatches there are: what is compiled is a program of each tick of a loop."""
    for schedule in named(name):
        run = run_of(schedule)
        for group in run.groups(lambda chunk: None):
            rounds = run.rounds(group[0].start, group[0].stop)
            assert sum(len(each.phases) for each in rounds) <= 12


def test_what_is_kept_is_flat_in_microbatches_or_not() -> None:
    kept = {name: [run_of(make(name, 4, m)).saved[0] for m in (8, 16, 32)] for name in SCHEDULES}
    assert kept["gpipe"] == kept["circular"] == [8, 16, 32]
    assert kept["1f1b"] == kept["interleaved"] == kept["zb-h1"] == [4, 4, 4]
    assert kept["eager-1f1b"] == [7, 7, 7]


def test_two_chunks_at_once_are_together_where_all_microbatches_go_through_one_first() -> None:
    run = run_of(make("circular", 4, 16, 4))
    assert run.resident == 2
    assert [chunk for window in run.windows for chunk in window.fetch] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [chunk for window in run.windows for chunk in window.flush] == [3, 2, 1, 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_that_come_beside_a_tick_are_there_in_time(name: str) -> None:
    for schedule in named(name):
        ran(schedule, prefetch=True)
        ran(forward_only(schedule), prefetch=True)


def test_but_for_the_first_and_last_chunk_weights_come_and_gradients_go_beside_a_tick() -> None:
    run = run_of(make("circular", 4, 8, 4), prefetch=True)
    assert run.resident == run_of(make("circular", 4, 8, 4)).resident == 2  # no more of them at once
    assert [window.fetch for window in run.windows if window.fetch] == [(0,)]
    assert [chunk for window in run.windows for chunk in window.early] == [1, 2, 3, 1, 0]  # 3 and 2 stay
    assert [chunk for window in run.windows for chunk in window.late] == [3, 2, 1]
    assert [window.flush for window in run.windows if window.flush] == [(0,)]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
def test_a_table_of_ones_own_finds_its_weights_in_time(
    stages: int, microbatches: int, repeats: int, seed: int
) -> None:
    ran(drawn(random.Random(seed), stages, microbatches, repeats), prefetch=True)


@pytest.mark.parametrize("name", ["eager-1f1b", "interleaved"])
def test_all_chunks_are_together_where_they_take_turns(name: str) -> None:
    run = run_of(make(name, 4, 16, 3))
    assert run.resident == 3 and len(run.windows) == 1


def test_a_tick_without_work_is_one_of_the_loops() -> None:
    schedule = Schedule.of(["F0 . . . B0", ". F0 . B0 ."])
    assert ran(schedule).run.ticks[2].kinds == ()


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b", "gpipe", "zb-h1"])
def test_forward_works_alone_take_no_more_ticks_than_there_must_be(name: str) -> None:
    """Those of one chunk a stage: the time that gradients are given in between is not waited for."""
    for schedule in named(name):
        if schedule.repeats == 1 and not schedule.delay:
            assert forward_only(schedule).ticks == schedule.stages - 1 + schedule.microbatches


def test_what_is_longer_under_way_stays_so_without_gradients() -> None:
    alone = forward_only(make("gpipe", 3, 4, delay=1))
    assert alone.ticks == 2 * 2 + 4
    ran(alone)
