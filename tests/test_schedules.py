"""Schedules are tables that can run, with the bubbles and the memory that are known of them."""

import itertools
import json
import pathlib
import re

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from tests import processes
from xform.errors import PlanError
from xform.schedules import SCHEDULES, Cost, Costs, Schedule, Send, Work, check, cost, draw, html, make

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

SMALL = [(stages, microbatches) for stages in range(1, 7) for microbatches in (1, 2, 3, 6, 7, 12, 16)]
"""Stages and microbatches, fewer, as many and more of the one than of the other."""


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(list(SCHEDULES)))
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 16))
    repeats = draw(st.integers(1, 4)) if SCHEDULES[name].repeats else 1
    delay = draw(st.integers(0, 2)) if SCHEDULES[name].delays else 0
    if SCHEDULES[name].whole:
        microbatches = -(-microbatches // stages) * stages
    return make(name, stages, microbatches, repeats, delay)


# ---------------------------------------------------------------- run by hand


def run(schedule: Schedule) -> tuple[int, list[int], list[Send]]:
    """Runs a table with values that say what they are, each in the place where it lies: idle slots, the most
    kept by each stage, and what is sent. Anything that is not there when it is needed is a KeyError.
    """
    stages, last = schedule.stages, schedule.stages * schedule.repeats - 1
    inbox = [{("forward", 0, m): ("x", 0, m) for m in range(schedule.microbatches)}] + [
        {} for _ in range(last)
    ]
    kept: list[dict[tuple[int, int], list[object]]] = [{} for _ in range(stages)]
    results, gradients, weights = {}, {}, []
    travelling, sent, idle, most = [], [], 0, [0] * stages
    for tick in range(schedule.ticks):
        for when, block, what, value in [each for each in travelling if each[0] == tick]:
            inbox[block][what] = value
            travelling.remove((when, block, what, value))
        for stage in range(stages):
            work = schedule.table[tick][stage]
            if work is None:
                idle += 1
                continue
            block, m = work.chunk * stages + stage, work.microbatch
            if work.kind == "forward":
                value = inbox[block].pop(("forward", block, m))
                assert value == ("x", block, m) and (block, m) not in kept[stage]
                kept[stage][block, m] = [value]
                following = block + 1
                if block == last:
                    results[m] = ("x", following, m)
                    inbox[block]["backward", block, m] = ("dy", following, m)
            elif work.kind in ("backward", "input"):
                value = inbox[block].pop(("backward", block, m))
                assert value == ("dy", block + 1, m)
                kept[stage][block, m].append(value)
                following = block - 1
                if block == 0:
                    gradients[m] = ("dy", 0, m)
            else:
                assert kept[stage][block, m] == [("x", block, m), ("dy", block + 1, m)]
                following = None
            if following is not None and 0 <= following <= last:
                way = "forward" if work.kind == "forward" else "backward"
                value = ("x", following, m) if way == "forward" else ("dy", block, m)
                target = following % stages
                wait = 1 if target == stage else 1 + schedule.delay
                travelling.append((tick + wait, following, (way, following, m), value))
                if target != stage:
                    sent.append(Send(tick, stage, target, "next" if way == "forward" else "previous", work))
            most[stage] = max(most[stage], len(kept[stage]))
            if work.kind in ("backward", "weight"):
                del kept[stage][block, m]
                weights.append((block, m))
    assert set(results) == set(gradients) == set(range(schedule.microbatches))
    assert sorted(weights) == list(itertools.product(range(last + 1), range(schedule.microbatches)))
    assert not travelling and not any(kept) and not any(inbox)
    return idle, most, sent


@given(schedules())
def test_every_table_runs_and_costs_what_running_it_shows(schedule: Schedule) -> None:
    check(schedule)
    found = cost(schedule)
    idle, alive, sent = run(schedule)
    assert (found.idle, list(found.alive)) == (idle, alive)
    assert list(found.sends) == sent
    assert found.slots == schedule.ticks * schedule.stages
    assert hash(schedule) == hash(make(schedule.name, *numbers(schedule)))


def numbers(schedule: Schedule) -> tuple[int, int, int, int]:
    return schedule.stages, schedule.microbatches, schedule.repeats, schedule.delay


@given(schedules())
def test_a_table_is_read_as_it_is_written_and_as_it_is_drawn(schedule: Schedule) -> None:
    assert Schedule.loads(schedule.dumps()) == schedule
    drawn = draw(schedule, cost(schedule))
    assert Schedule.loads(drawn) == schedule
    assert max(map(len, drawn.splitlines())) <= 110


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize(("stages", "microbatches"), SMALL)
def test_gpipe_idles_stages_less_one_ticks_in_each_pass(stages: int, microbatches: int) -> None:
    schedule = make("gpipe", stages, microbatches)
    assert schedule.ticks == 2 * (microbatches + stages - 1)
    for half in (schedule.table[: schedule.ticks // 2], schedule.table[schedule.ticks // 2 :]):
        idle = sum(work is None for row in half for work in row)
        assert idle / (len(half) * stages) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    found = cost(schedule)
    assert found.lost(found.free) == pytest.approx(found.bubble) == pytest.approx(found.lost(found.in_step))
    assert found.alive == (microbatches,) * stages


@pytest.mark.parametrize(("stages", "microbatches"), SMALL)
def test_1f1b_has_the_bubble_of_gpipe_and_keeps_no_more_than_stages_to_come(
    stages: int, microbatches: int
) -> None:
    found = cost(make("1f1b", stages, microbatches))
    other = cost(make("gpipe", stages, microbatches))
    assert found.alive == tuple(min(stages - stage, microbatches) for stage in range(stages))
    assert (found.slots, found.idle, found.free) == (other.slots, other.idle, other.free)


@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
@pytest.mark.parametrize(("stages", "groups"), [(1, 3), (2, 1), (3, 2), (4, 2), (6, 3)])
def test_interleaved_divides_the_bubble_by_its_chunks(stages: int, groups: int, repeats: int) -> None:
    microbatches = stages * groups
    found = cost(make("interleaved", stages, microbatches, repeats))
    runs = microbatches * repeats
    assert found.idle == stages * 2 * (stages - 1)  # as many slots as 1F1B's, of which each is 1/repeats
    assert found.idle / (found.slots - found.idle) == pytest.approx((stages - 1) / microbatches / repeats)
    assert found.free == 3 * (runs + stages - 1)
    if repeats > 1:
        ahead = [2 * (stages - stage - 1) + (repeats - 1) * stages + 1 for stage in range(stages)]
        assert found.alive == tuple(min(each, runs) for each in ahead)


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("repeats", [1, 2, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 3), (3, 3), (3, 7), (4, 2), (4, 12)])
def test_circular_idles_as_long_as_a_microbatch_takes_to_the_last_stage(
    stages: int, microbatches: int, repeats: int, delay: int
) -> None:
    schedule = make("circular", stages, microbatches, repeats, delay)
    hop = 1 + delay if stages > 1 else 1
    turn = max(microbatches, hop * stages)  # few microbatches are waited for
    ticks = (repeats - 1) * turn + microbatches + hop * (stages - 1)
    assert schedule.ticks == 2 * ticks
    assert cost(schedule).idle == 2 * stages * (ticks - microbatches * repeats)
    assert all(
        (work and work.kind) != "forward" and (mirror and mirror.kind) != "backward"
        for row, reflected in zip(schedule.table[ticks:], schedule.table[ticks - 1 :: -1], strict=True)
        for work, mirror in zip(row, reflected, strict=True)
    )
    assert all(
        (work is None) == (mirror is None)
        for row, reflected in zip(schedule.table, reversed(schedule.table), strict=True)
        for work, mirror in zip(row, reflected, strict=True)
    )


def test_what_is_delayed_has_a_tick_on_its_way() -> None:
    schedule = make("circular", 3, 7, 2, 1)
    ran = {(work.kind, work.chunk, work.microbatch, stage): tick for tick, stage, work in schedule.works()}
    taken = [
        ran["forward", send.work.chunk + (send.target == 0), send.work.microbatch, send.target] - send.tick
        for send in cost(schedule).sends
        if send.direction == "next"
    ]
    assert min(taken) == 2


@pytest.mark.parametrize(("stages", "microbatches"), SMALL)
def test_zero_bubble_idles_a_third_of_1f1b_with_its_memory(stages: int, microbatches: int) -> None:
    schedule = make("zb-h1", stages, microbatches)
    found, other = cost(schedule), cost(make("1f1b", stages, microbatches))
    assert max(found.alive) <= max(other.alive)
    assert found.free == found.in_step == schedule.ticks
    assert schedule.ticks == 2 * microbatches + stages - 1 + max(microbatches, stages)
    if microbatches >= stages:
        assert found.free - 3 * microbatches == pytest.approx((other.free - 3 * microbatches) / 3)


def test_costs_are_parameters() -> None:
    schedule = make("gpipe", 3, 5)
    costs = Costs.loads("forward=2,weight=0.5,recompute=2")
    assert costs == Costs(forward=2, input=1, weight=0.5, recompute=2)
    found = cost(schedule, costs)
    assert found.busy == (5 * (2 + 1 + 0.5 + 2),) * 3
    assert found.free == found.in_step == 7 * 5.5
    split = cost(make("zb-h1", 3, 5), costs)
    assert split.busy == found.busy
    for text, said in (("fward=1", "'forward'"), ("input=-1", "0 or more"), ("input=nan", "0 or more")):
        with pytest.raises(PlanError, match=said):
            Costs.loads(text)


def test_what_comes_early_waits_and_gradients_are_kept_for_those_of_weights() -> None:
    found = cost(make("zb-h1", 4, 8))
    assert found.late == (1, 2, 3, 4)
    assert cost(make("1f1b", 4, 8)).late == (0, 0, 0, 0)
    assert cost(make("circular", 4, 4, 3)).waiting == (0, 0, 0, 0)  # each goes on when it comes round
    assert cost(make("circular", 4, 9, 2)).waiting == (5, 0, 0, 5)  # here it waits for the last to start


def test_ticks_of_one_kind_lose_nothing_in_step_and_keep_more() -> None:
    """A forward tick and a backward tick by turns, each for all stages: nothing waits, and more is kept."""
    stages, microbatches = 4, 8
    schedule = make("eager-1f1b", stages, microbatches)
    assert all(len({work.kind for work in row if work is not None}) == 1 for row in schedule.table)
    found = cost(schedule)
    assert found.alive == (7, 5, 3, 1)
    assert found.in_step == 3 * (microbatches + stages - 1) == found.free
    mixed = cost(make("1f1b", stages, microbatches))
    assert mixed.in_step > mixed.free == found.free


# ---------------------------------------------------------------- what is wrong, and is said


def changed(schedule: Schedule, *cells: tuple[int, int, Work | None]) -> Schedule:
    """The table with other cells at a tick and stage; ticks from -1 down and after the last are new ones."""
    table = {(tick, stage): work for tick, stage, work in schedule.works()}
    for tick, stage, work in cells:
        table.pop((tick, stage), None)
        if work is not None:
            table[tick, stage] = work
    ticks = range(min(0, *(t for t, _ in table)), max(schedule.ticks - 1, *(t for t, _ in table)) + 1)
    rows = tuple(tuple(table.get((tick, stage)) for stage in range(schedule.stages)) for tick in ticks)
    return Schedule(schedule.name, rows, *numbers(schedule)[1:])


def error(schedule: Schedule) -> str:
    with pytest.raises(PlanError) as raised:
        check(schedule)
    return str(raised.value)


@given(schedules(), st.data())
def test_a_work_that_is_missing_is_named(schedule: Schedule, data: st.DataObject) -> None:
    tick, stage, work = data.draw(st.sampled_from(list(schedule.works())))
    said = error(changed(schedule, (tick, stage, None)))
    name = re.escape(schedule.cell(work))
    assert re.search(rf"stage {stage}: {name} \([a-z ]+, microbatch {work.microbatch}\D", said), said
    assert "is missing" in said and re.search(r"at tick \d+ or (before|later)|a free slot", said), said


@given(schedules(), st.data())
def test_a_work_that_runs_twice_is_named(schedule: Schedule, data: st.DataObject) -> None:
    tick, stage, work = data.draw(st.sampled_from(list(schedule.works())))
    said = error(changed(schedule, (schedule.ticks, stage, work)))
    name = schedule.cell(work)
    assert f"tick {schedule.ticks}, stage {stage}: {name} (" in said
    assert f"a second time: {name} at tick {tick}" in said


@given(schedules(), st.data())
def test_a_work_before_what_it_needs_is_named(schedule: Schedule, data: st.DataObject) -> None:
    tick, stage, work = data.draw(st.sampled_from(list(schedule.works())))
    assume(work.kind != "forward" or work.chunk or stage)
    said = error(changed(schedule, (tick, stage, None), (-1, stage, work)))
    assert f"tick 0, stage {stage}: {schedule.cell(work)} (" in said
    assert f"microbatch {work.microbatch}" in said
    assert re.search(r"needs \S+ of (its own stage|stage \d), which runs at tick \d+", said)
    assert re.search(r"cannot run before tick \d+", said)


def test_an_error_says_what_would_do() -> None:
    early = Schedule.of(["F0 F1 . B0 . B1", "F0 F1 B0 . B1 ."], "mine")
    assert error(early) == (
        "mine: tick 0, stage 1: F0 (forward, microbatch 0) needs F0 of stage 0, which runs at tick 0: it "
        "cannot run before tick 1 (and 1 more)"
    )
    missing = Schedule.of(["F0 F1 . B0 . B1", ". F0 B0 . B1 ."], "mine")
    assert error(missing) == (
        "mine: stage 1: F1 (forward, microbatch 1) is missing; B1 on stage 1 at tick 4 needs it at tick 3 or "
        "before, and after F1 of stage 0 it can run at tick 2 or later"
    )
    delayed = Schedule.of(["F0 . . B0", ". F0 B0 ."], delay=1)
    assert "F0 of stage 0, which runs at tick 0: it cannot run before tick 2" in error(delayed)
    for rows, said in (
        (["F0 I0 B0"], "tick 2, stage 0: B0 (backward, microbatch 0) runs a second time: I0 at tick 1"),
        (
            ["F0 W0 I0"],
            "tick 1, stage 0: W0 (gradient of the weights, microbatch 0) needs I0 of its own stage",
        ),
        (["F0 I0"], "W0 (gradient of the weights, microbatch 0) is missing; after I0 of stage 0"),
    ):
        assert said in error(Schedule.of(rows))
    assert "there is no microbatch 1; there are 1" in error(Schedule.of(["F0 F1 B0 B1"], microbatches=1))
    assert "there is no chunk 1; repeats is 1" in error(Schedule.of(["F0.0 F1.0 B1.0 B0.0"], repeats=1))


def test_both_gradients_at_once_and_apart_may_stand_in_one_table() -> None:
    found = cost(Schedule.of(["F0 F1 . B0 . I1 W1", ". F0 B0 F1 B1 . ."]))
    assert (found.idle, found.alive, found.late) == (5, (2, 1), (1, 0))


def test_a_table_is_read_from_text_toml_and_rows() -> None:
    rows = ["F0 F1 . B0 . B1", ". F0 B0 F1 B1 ."]
    table = Schedule.of(rows, "mine")
    check(table)
    assert Schedule.loads("# a comment: a = 1\nmine:\n" + "\n".join(rows)) == table
    quoted = ", ".join(f'"{row}"' for row in rows)
    assert Schedule.loads(f'name = "mine"\nrows = [{quoted}]\n') == table
    lines = "\n".join(rows)
    assert Schedule.loads(f'name = "mine"\nmicrobatches = 2\nrows = """\n{lines}\n"""\n') == table
    assert table.table[2] == (None, Work("backward", 0, 0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0 B0\nF0", "mine: stage 1 has 1 ticks, stage 0 has 2: write . where a stage is idle"),
        ("F0 X0", "tick 1, stage 0: no work 'X0': write one of F (forward)"),
        ("F0+B0", "tick 0, stage 0: no work 'F0+B0'"),
        ("", "own: the table is empty"),
        ("mine: stages 2\nF0 B0", "the first line says 2 stages, and there are 1 rows"),
        ("mine: stagse 2\nF0 B0", "no number 'stagse' (did you mean 'stages'?)"),
        ("mine: many\nF0 B0", "'many' is no number with its name, such as `stages 4`"),
        ("stage 1 F0 B0", "stage 0 has no row; there are rows for 1"),
        ("stage F0 B0", "the number of the stage is missing"),
        ("stage 0 F0 B0\nF0 B0", "'F0 B0': begins with no stage"),
        ('row = ["F0 B0"]', "no key 'row' (did you mean 'rows'?)"),
        ("rows = 3", "rows: expected a string, or a list of them, got 3"),
        ("delay = true", "delay: expected int, got True"),
        ("delay = 1", "no rows: give rows ="),
        ("rows = [", "mine: "),
    ],
)
def test_a_text_that_is_no_table_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        Schedule.loads(text, "mine")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (("gpip", 4, 8), "no schedule 'gpip' (did you mean 'gpipe'?)"),
        (("interleaved", 4, 6, 2), "6 microbatches are no multiple of 4 stages; take 4 or 8, or circular"),
        (("interleaved", 4, 3, 2), "take 4, or circular"),
        (
            ("1f1b", 4, 8, 2),
            "a stage has one chunk, and repeats is 2; circular and eager-1f1b and interleaved take several",
        ),
        (("zb-h1", 4, 8, 1, 1), "only a loop of ticks takes a delay, as gpipe or circular"),
        (("gpipe", 0, 8), "stages is 0"),
        (("gpipe", 4, 8, 1, -1), "delay is -1"),
    ],
)
def test_numbers_that_a_schedule_does_not_take_are_refused(numbers: tuple, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        make(*numbers)
    assert said in str(raised.value)


# ---------------------------------------------------------------- drawn


def test_a_long_table_is_drawn_in_parts() -> None:
    schedule = make("circular", 4, 16, 4)
    drawn = draw(schedule, cost(schedule)).splitlines()
    ticks = [word for line in drawn if line.startswith("tick") for word in line.split()[1:]]
    assert ticks == [str(tick) for tick in range(schedule.ticks)]
    assert len([line for line in drawn if line.startswith("previous ")]) > 5


def test_the_page_stands_alone_and_has_every_work() -> None:
    schedule = make("zb-h1", 3, 5)
    found = cost(schedule)
    text = html(schedule, found)
    for kind in ("forward", "input", "weight"):
        assert text.count(f'<td class="{kind}"') == 15
    assert text.count('<td class="idle"') == found.idle
    assert "tick 1, stage 0: forward, microbatch 1, block 0; goes to stage 1" in text
    assert "zb-h1: stages 3, microbatches 5</h1>" in text and "a stage keeps at most 3 inputs" in text
    assert "src=" not in text and "http" not in text and "<script" not in text
    assert "Darker" not in text and "--k: 30%" in html(*costed(make("circular", 2, 3, 2)))


def costed(schedule: Schedule) -> tuple[Schedule, Cost]:
    return schedule, cost(schedule)


# ---------------------------------------------------------------- the command


def xform(*args: str, code: int = 0) -> str:
    done = processes.xform("schedule", *args)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def test_the_readme_shows_what_the_command_prints() -> None:
    (shown,) = re.findall(r"^```text\n(1f1b: .*?)^```", README, re.MULTILINE | re.DOTALL)
    assert xform("1f1b", "--stages", "4", "--microbatches", "8") == shown
    assert "xform schedule 1f1b --stages 4 --microbatches 8\n" in README


def test_the_command_has_json_and_a_page(tmp_path: pathlib.Path) -> None:
    args = ("interleaved", "--stages", "2", "--microbatches", "4", "--repeats", "2", "--costs", "recompute=1")
    found = json.loads(xform(*args, "--json"))
    assert (found["stages"], found["ticks"], found["idle"], found["repeats"]) == (2, 18, 4, 2)
    assert found["table"][0] == ["F0.0", "."] and found["costs"]["recompute"] == 1
    first = {"tick": 0, "source": 0, "target": 1, "direction": "next", "work": "F0.0"}
    assert found["sends"][0] == first and found["free"]["time"] == 36
    page = tmp_path / "page.html"
    assert xform(*args, "--html", str(page)) == f"wrote {page}\n"
    assert "interleaved: stages 2" in page.read_text()


def test_the_command_reads_a_table_of_ones_own(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\nrows = ["F0 F1 . B0 . B1", ". F0 B0 F1 B1 ."]\n')
    assert xform(str(mine)).startswith("mine: stages 2, microbatches 2\ntick ")
    assert "--stages: the table in" in xform(str(mine), "--stages", "2", code=2)
    mine.write_text('rows = ["F0 B0", "F0 B0"]\n')
    assert "tick 0, stage 1: F0" in xform(str(mine), code=2)
    assert "cannot be read" in xform(str(tmp_path / "none.toml"), code=2)
    assert "1f1b: give --stages and --microbatches" in xform("1f1b", code=2)
