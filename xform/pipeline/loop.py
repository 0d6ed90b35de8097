"""The program of a pipeline: the ticks of a schedule as loops, in which stages run chunks and send on.

    for each tick:                                     all stages at once, in one program
      z0 = enter(microbatch)                           where one comes to the first block
      z  = a chunk of the stage's layers               in the manual region over the axis of the stages
      register = ppermute z                            to the next stage
      loss, dz = leave(z of the last stage), its vjp   where one leaves the last block
      dz = the chunk's gradients, weights' added up    backward works
      register = ppermute dz                           to the stage before

`Pipelined` is in the place of the scan over microbatches (`xform.batch.Microbatches`), with the same values
and gradients. What is before and after the stack is computed outside of the manual region, so it may lie over
the axis of the stages as over any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.batch import Cut, Micro, Microbatches
from xform.batch.microbatches import Leaves, Swept
from xform.errors import Decline, PlanError
from xform.ops import resident
from xform.pipeline.arrays import row_at
from xform.pipeline.chunks import Own
from xform.pipeline.cutting import cut
from xform.pipeline.ends import Ends
from xform.pipeline.pieces import Pieces, Stack, find_stacks, size_of
from xform.pipeline.rounds import Phase, Round
from xform.pipeline.setting import Setting, Shape, Sort, When
from xform.pipeline.stages import Stages
from xform.pipeline.ticks import KINDS, Window
from xform.pipeline.weights import Weights
from xform.report import Report
from xform.sharding.memory import Space, is_host, to
from xform.trace import Jaxpr, Value, at_line, inline, shape_of, trace_flat, typeof

Chosen = Sequence[tuple[Value, Sequence[bool]]]
"""Numbers of chunks, and which parts each has layers of."""


class Pipelined(Microbatches):
    """The microbatches of a program through the stages of its stack."""

    who = "pipeline"

    shape: Shape

    def __init__(self, found: Cut, dtype: str, report: Report) -> None:
        super().__init__(found, dtype, None, report)

    @functools.cached_property
    def program(self) -> Jaxpr:
        """One microbatch: of what is the same for all, its data and its number, the parts and the rows."""
        return microbatch(self.cut)

    @functools.cached_property
    def stacks(self) -> tuple[list[Stack], list[Stack]]:
        """The loops over layers, and others that are too small to be cut. Raises Decline if there is none."""
        return find_stacks(self.program, len(self.cut.same))

    def pieces(self, inside: bool) -> Pieces:
        """The program cut at them; of no use for gradients."""
        return cut(self.program, len(self.cut.same), (), inside)

    def travels(self) -> list[tuple[int, str]]:
        """What goes from stage to stage with a microbatch, bytes of the whole of it, and what it is."""
        setting = Setting(self, self.shape, self.program, len(self.cut.same), [], (), (), ())
        found = []
        for what in dict.fromkeys(setting.pieces.what):
            those = zip(setting.pieces.z, setting.pieces.what, setting.crossing, strict=True)
            types = [t for t, mine, crosses in those if crosses and mine == what]
            if types:
                names = ", ".join(t.str_short() for t in types[:4])
                found.append((sum(map(size_of, types)), f"{what}: {names}"))
        return found

    def sweep(
        self, same: Leaves, data: Leaves, which: Sequence[int], wanted: Sequence[int], pulls: Sequence[Leaves]
    ) -> Swept:
        setting = Setting(self, self.shape, self.program, len(same), list(data), which, wanted, pulls)
        try:
            with at_line(self.stacks[0][0].eqn):
                return _Sweep(setting, list(same)).run()
        except Decline as why:  # of what is asked of the program once it is differentiated
            raise PlanError(f"{self.who}: {why}") from None


def microbatch(found: Cut) -> Jaxpr:
    """The program of one microbatch, of (*same, *data, number)."""

    def function(*args: Value) -> list[Value]:
        env = dict(zip((*found.same, *found.data), args, strict=False))
        return found.run_inside(env, Micro(args[-1], found.split, 0))

    small = [v.aval.update(shape=found.split.small(shape_of(v), found.states[v])) for v in found.data]
    number = typeof(np.int32(0))
    return trace_flat(function, [*(v.aval for v in found.same), *small, number], "microbatch")


class _Sweep:
    """One pass over all microbatches. same: what is the same for all."""

    def __init__(self, setting: Setting, same: list[Value]) -> None:
        self.setting, self.same = setting, same

    def run(self) -> Swept:
        once, first = self.setting.pieces.once, self.setting.first

        def made(chosen: Leaves) -> list[Value]:
            given = list(self.same)
            for i, x in zip(first, chosen, strict=True):
                given[i] = x
            return inline(once, *given)

        chosen = [self.same[i] for i in first]
        fixed, pull = jax.vjp(made, chosen) if self.setting.pulls else (made(chosen), None)
        self.weights = Weights(self.setting, fixed)
        self.ends = Ends(self.setting, self.weights.fixed)
        self.stages = Stages(self.setting, self.weights.fixed)
        state = self.start()
        for group in self.setting.runs.groups(self.parts_of):
            state = self.windows(group, state)
        return self.results(state, pull)

    def start(self) -> dict[str, Any]:
        """Registers with a microbatch's own values, so that works that are none have finite numbers."""
        runs, chunks, stages = self.setting.runs, self.setting.chunks, self.setting.shape.stages
        outside = self.ends.entering(np.int32(0))
        types = self.setting.pieces.z

        def each(x: Value, *lead: int) -> Value:
            return jnp.broadcast_to(x, (stages, *lead, *x.shape))

        def empty(t: Any, *lead: int) -> Value:
            return jnp.zeros((stages, *lead, *t.shape), t.dtype)

        def room(t: Any, *lead: int) -> Value:
            return (
                to(empty(t, *lead), Space.Host)
                if is_host(t)
                else resident.room((stages, *lead, *t.shape), t.dtype)
            )

        own: Own = {"register": [each(x) for x in outside]}
        own["ahead"] = [list(own["register"]) for _ in range(runs.delay[0])]
        if runs.waiting[0]:
            own["waiting"] = [each(x, runs.waiting[0] + 1) for x in outside]
        every: dict[str, Any] = {}
        if self.setting.windowed:
            own["weights"] = self.weights.held
        if self.setting.pulls:
            floats = [types[n] for n in chunks.floats]
            streams = range(len(self.setting.pulls))
            own["saved"] = self.slots(room, runs.saved, [layer.kept for layer in self.setting.layers])
            own["register_back"] = [[empty(t) for t in floats] for _ in streams]
            own["behind"] = [[[empty(t) for t in floats] for _ in streams] for _ in range(runs.delay[1])]
            if runs.waiting[1]:
                own["waiting_back"] = [[empty(t, runs.waiting[1] + 1) for t in floats] for _ in streams]
            late = [layer.late if any(runs.late) else () for layer in self.setting.layers]
            own["late"] = [self.slots(empty, runs.late, late) for _ in streams]
            own["totals"] = [self.weights.totals() for _ in streams]
            every["ended"] = [
                [resident.room((runs.ended, *t.shape), t.dtype) for t in floats] for _ in streams
            ]
            every["whole"] = [self.weights.wholes() for _ in streams]
            every["outer"] = [
                [self.weights.accumulator(self.weights.fixed[k]) for k in self.setting.outer] for _ in streams
            ]
            every["moved"] = [
                [jnp.zeros_like(self.setting.data[i]) for i in self.setting.rows] for _ in streams
            ]
        every["sums"] = self.setting.of.zeros()
        every["stacked"] = [
            jnp.zeros((self.setting.of.cut.split.steps, *v.aval.shape), v.aval.dtype)
            for v in self.stacked_outs
        ]
        return {"own": own, "every": every}

    def slots(self, made: Any, counts: Sequence[int], types: Sequence[Sequence[Any]]) -> list[list[Value]]:
        """Of each part, buffers of so many slots and one more, for all layers of a chunk."""
        sizes = [placing.size for placing in self.setting.placings]
        return [
            [made(t, count + 1, size) for t in mine]
            for count, size, mine in zip(counts, sizes, types, strict=True)
        ]

    @property
    def stacked_outs(self) -> list[Any]:
        """Results of a microbatch that are no sums: extremes, then rows."""
        parts = len(self.setting.of.kinds)
        outs = self.setting.program.outvars
        extremes = [v for v, kind in zip(outs, self.setting.of.kinds, strict=False) if kind != "sum"]
        return [*extremes, *outs[parts:]]

    # Ticks in loops

    def windows(self, group: Sequence[Window], state: Any) -> Any:
        """Windows that are alike: what is fetched, the ticks, what is flushed."""
        start, stop = group[0].start, group[0].stop
        first = Round((Phase(start, 1, 1),), 1)
        beside = [first] if group[0].early or group[0].late else []
        rounds = self.setting.runs.rounds(start + len(beside), stop)
        numbers = _stacked([[[np.int32(n) for n in some] for some in window.chunks] for window in group])
        columns = _stacked([self.rounds([*beside, *rounds], window.start - start) for window in group])
        parts = [list(map(self.parts_of, chunks)) for chunks in group[0].chunks]

        def turn(state: Any, xs: Any) -> tuple[Any, None]:
            columns, chunks = xs
            fetch, flush, early, late = (
                list(zip(*each, strict=True)) for each in zip(chunks, parts, strict=True)
            )
            for chunk, some in fetch:
                state = self.weights.fetched(state, chunk, some)
            if beside:
                state = self.beside(first, columns[0], early, late, state)
            for each, cols in zip(rounds, columns[len(beside) :], strict=True):
                state = self.round(each, cols, state)
            for chunk, some in flush:
                state = self.weights.flushed(state, chunk, some)
            return state, None

        xs = (columns, numbers)
        if len(group) == 1:
            return turn(state, _first(xs))[0]
        return jax.lax.scan(turn, state, xs)[0]

    def beside(self, first: Round, columns: Any, early: Chosen, late: Chosen, state: Any) -> Any:
        """A tick, and beside it weights of chunks for later, and the sums of gradients of earlier ones."""
        brought = [self.weights.brought(*each) for each in early]
        terms = [self.weights.terms(state, *each) for each in late]
        for each in terms:
            state = self.weights.read(state, each)
        state = self.round(first, columns, state)
        there = jax.tree.leaves([state["own"].get(name) for name in ("register", "register_back")])
        for (chunk, _), parts in zip(early, brought, strict=True):
            weights = [[resident.after(x, there) for x in rows] for rows in parts]
            state = self.weights.placed(state, chunk, weights)
        for (chunk, _), each in zip(late, terms, strict=True):
            state = self.weights.summed(state, chunk, each)
        return state

    def parts_of(self, chunk: int) -> list[bool]:
        """Which parts a chunk has layers of, on any stage."""
        return [bool(placing.counts[:, chunk].any()) for placing in self.setting.placings]

    def rounds(self, rounds: Sequence[Round], later: int) -> Any:
        """The numbers of rounds, so many ticks later."""
        return [
            _stacked(
                [
                    [self.columns(phase, later + n * each.ticks) for phase in each.phases]
                    for n in range(each.count)
                ]
            )
            for each in rounds
        ]

    def round(self, each: Round, columns: Any, state: Any) -> Any:
        def turn(state: Any, columns: Any) -> tuple[Any, None]:
            for phase, cols in zip(each.phases, columns, strict=True):
                state = self.phase(each, phase, cols, state)
            return state, None

        if each.count == 1:
            return turn(state, _first(columns))[0]
        return jax.lax.scan(turn, state, columns)[0]

    def phase(self, each: Round, phase: Phase, columns: Any, state: Any) -> Any:
        ticks = [self.merged(each, phase, j) for j in range(phase.period)]

        def turn(state: Any, cols: Any) -> tuple[Any, None]:
            for j, tick in enumerate(ticks):
                state = self.tick(tick, {name: x[j] for name, x in cols.items()}, state)
            return state, None

        return jax.lax.scan(turn, state, columns)[0]

    def merged(self, each: Round, phase: Phase, j: int) -> Sort:
        """What the ticks of a loop do that stand at the same place of it, each time that it runs."""
        ticks = [
            self.setting.runs.ticks[t + n * each.ticks]
            for t in range(phase.start + j, phase.stop, phase.period)
            for n in range(each.count)
        ]
        kinds = tuple(kind for kind in KINDS if any(kind in tick.kinds for tick in ticks))

        def when(name: str) -> When:
            said = {getattr(tick, name) >= 0 for tick in ticks}
            return "sometimes" if len(said) == 2 else "always" if said.pop() else "never"

        ends = when("enters"), when("ends"), when("returns")
        sends = any(tick.sends for tick in ticks), any(tick.sends_back for tick in ticks)
        return Sort(kinds, *ends, *sends, phase.mixed)

    def columns(self, phase: Phase, later: int = 0) -> dict[str, Any]:
        """The table's numbers, [count, period, ...], of a phase or one so many ticks later."""
        rows = slice(phase.start + later, phase.stop + later)
        lead = (phase.count, phase.period)
        found = {name: x[rows].reshape(*lead, x.shape[1]) for name, x in self.setting.runs.columns.items()}
        ticks = self.setting.runs.ticks[rows]
        for name in ("enters", "ends", "returns"):
            found[name] = np.asarray([getattr(tick, name) for tick in ticks], np.int32).reshape(lead)
        for name in ("forward", "back"):
            found[name] = np.asarray([getattr(tick, name) for tick in ticks], bool).reshape(lead)
        return found

    def tick(self, tick: Sort, cols: Mapping[str, Any], state: Any) -> Any:
        own, every = dict(state["own"]), state["every"]
        outside = None
        if tick.enters != "never" and not self.setting.pieces.inside:
            outside = _when(tick.enters, cols["enters"], self.ends.entering, self.ends.nothing)
        ended = None
        if tick.back:
            slot = cols["ending"][0]
            ended = [[row_at(x, slot) for x in xs] for xs in every["ended"]]
        own = self.stages.tick(tick, own, own.get("weights", self.weights.held), cols, outside, ended)
        z, dz = own.pop("z", None), own.pop("dz", None)
        if tick.returns != "never" and not self.setting.pieces.inside:

            def returned(m: Value) -> Any:
                return self.ends.returned(state["every"], self.stages.of_stage(dz, 0), m)

            every = _when(tick.returns, cols["returns"], returned, lambda: state["every"])
        if tick.ends != "never":
            before, last = every, self.setting.shape.stages - 1

            def left(m: Value) -> Any:
                return self.ends.left(before, self.stages.of_stage(z, last), m, cols["ended"][0])

            every = _when(tick.ends, cols["ends"], left, lambda: before)
        return {"own": own, "every": every}

    def results(self, state: Any, pull: Any) -> Swept:
        every = state["every"]
        extremes = sum(kind != "sum" for kind in self.setting.of.kinds)
        stacked = (list(every["stacked"][:extremes]), list(every["stacked"][extremes:]))
        if not self.setting.pulls:
            return Swept(every["sums"], stacked, [], [])
        gradients = []
        for k in range(len(self.setting.pulls)):
            (found,) = pull(self.weights.gathered(state, k, self.stages.summed))
            gradients.append([g.astype(self.setting.of.kept(g.dtype)) for g in found])
        return Swept(every["sums"], stacked, gradients, every["moved"])


def _when(when: When, number: Value, f: Callable[[Value], Any], otherwise: Callable[[], Any]) -> Any:
    """What is done at some ticks of a loop with a microbatch: a condition of the tick alone, the same on all
    devices, so there may be collectives in it.
    """
    if when == "always":
        return f(number)
    return jax.lax.cond(number >= 0, lambda: f(jnp.maximum(number, 0)), otherwise)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)
