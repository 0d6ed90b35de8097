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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.ad import Zero
from jax.sharding import Mesh, PartitionSpec

from xform.batch import Cut, Micro, Microbatches
from xform.batch.microbatches import Leaves, Swept
from xform.errors import Decline
from xform.ops import resident, rows
from xform.pipeline.chunks import Chunks, Own, Placing
from xform.pipeline.cutting import Pieces, cut, is_float, reached
from xform.pipeline.layer import layer_of
from xform.pipeline.ticks import KINDS, Phase, Round, Run, Window, forward_only, run_of
from xform.report import Report
from xform.schedules import Kind, Schedule
from xform.trace import Jaxpr, Value, Var, inline, shape_of, trace_flat, typeof


@dataclasses.dataclass(frozen=True)
class Shape:
    """The axis of the stages in the mesh, the schedule, and how many layers each of its blocks has."""

    mesh: Mesh
    axis: str
    schedule: Schedule
    sizes: tuple[int, ...]

    @property
    def stages(self) -> int:
        return self.schedule.stages


When = Literal["never", "sometimes", "always"]


@dataclasses.dataclass(frozen=True)
class _Sort:
    """What the program of a tick has in it: the kinds of works, and what happens at the ends of the stack."""

    kinds: tuple[Kind, ...]
    enters: When
    ends: When
    returns: When

    @property
    def forward(self) -> bool:
        return "forward" in self.kinds

    @property
    def back(self) -> bool:
        return "backward" in self.kinds or "input" in self.kinds


class Pipelined(Microbatches):
    """The microbatches of a program through the stages of its stack."""

    who = "pipeline"

    def __init__(self, found: Cut, dtype: str, shape: Shape, report: Report) -> None:
        super().__init__(found, dtype, None, report)
        self.shape = shape

    def program(self) -> Jaxpr:
        """One microbatch: of what is the same for all, its data and its number, the parts and the rows."""
        return microbatch(self.cut)

    def sweep(
        self, same: Leaves, data: Leaves, which: Sequence[int], wanted: Sequence[int], pulls: Sequence[Leaves]
    ) -> Swept:
        return _Sweep(self, same, data, which, wanted, pulls).run()


def microbatch(found: Cut) -> Jaxpr:
    """The program of one microbatch, of (*same, *data, number)."""

    def function(*args: Value) -> list[Value]:
        env = dict(zip((*found.same, *found.data), args, strict=False))
        return found.run_inside(env, Micro(args[-1], found.split, 0))

    small = [
        v.aval.update(shape=found.split.small(shape_of(v), found.states[v])) for v in found.data
    ]
    number = typeof(np.int32(0))
    return trace_flat(function, [*(v.aval for v in found.same), *small, number], "microbatch")


class _Sweep:
    """One pass over all microbatches."""

    def __init__(
        self,
        of: Pipelined,
        same: Leaves,
        data: Leaves,
        which: Sequence[int],
        wanted: Sequence[int],
        pulls: Sequence[Leaves],
    ) -> None:
        self.of, self.same, self.data = of, list(same), list(data)
        self.which, self.wanted, self.pulls = which, wanted, pulls
        self.shape = of.shape
        self.jaxpr = of.program()
        self.pieces = cut(self.jaxpr, len(same), which)
        self.first = [i for i in which if i < len(same)]
        self.rows = [i - len(same) for i in which if i >= len(same)]
        self.moved = self.differentiated()
        schedule = self.shape.schedule if pulls else forward_only(self.shape.schedule)
        self.runs = run_of(schedule)
        stack = self.pieces.stack
        self.placing = Placing.of(self.shape.sizes, self.shape.stages, stack.reverse)
        self.layer = layer_of(self.pieces, self.moved)
        self.chunks = Chunks(self.pieces, self.layer, self.placing, len(pulls), self.runs.resident)

    def differentiated(self) -> list[int]:
        """Of what is made once, the numbers of those of which gradients are wanted."""
        once = self.pieces.once
        moving = reached(once, [once.invars[i] for i in self.first])
        return [
            k
            for k, v in enumerate(once.outvars)
            if isinstance(v, Var) and v in moving and is_float(v)
        ]

    # ------------------------------------------------------------ the whole

    def run(self) -> Swept:
        once = self.pieces.once

        def made(chosen: Leaves) -> list[Value]:
            given = list(self.same)
            for i, x in zip(self.first, chosen, strict=True):
                given[i] = x
            return inline(once, *given)

        chosen = [self.same[i] for i in self.first]
        fixed, pull = jax.vjp(made, chosen) if self.pulls else (made(chosen), None)
        self.lay(fixed)
        state = self.start()
        for group in self.runs.groups():
            state = self.windows(group, state)
        return self.results(state, fixed, pull)

    def lay(self, fixed: Sequence[Value]) -> None:
        """What is made once, as the loops take it: stacks of layers by stage, together."""
        stacks = set(self.layer.operands.rows)
        stages = self.shape.stages
        self.fixed = [x if k in stacks else self.together(x, k) for k, x in enumerate(fixed)]
        self.apart: list[Value] = []
        self.windowed = len(self.runs.windows) > 1
        held = self.runs.resident * self.placing.size
        self.own_rows: list[Value] = []
        for k, aval in zip(self.layer.operands.rows, self.layer.row_types, strict=True):
            x = resident.stacked(fixed[k] if self.windowed else fixed[k].astype(aval.dtype))
            ordered = self.ordered(x)
            shape = (stages, len(self.placing.order) // stages, *x.shape[1:])
            by_stage = resident.plain(jax.lax.reshape(ordered, shape))
            self.apart.append(by_stage)
            if self.windowed:
                self.own_rows.append(resident.room((stages, held, *x.shape[1:]), aval.dtype))
            else:
                self.own_rows.append(resident.together(by_stage))

    def together(self, x: Value, k: int) -> Value:
        return resident.together(x) if is_array(x) and x.ndim and is_floating(x) else x

    def ordered(self, x: Value) -> Value:
        """Layers in the order of the rows they are in."""
        order = self.placing.order
        if self.placing.ragged:  # some rows repeat a layer
            return jnp.take(x, np.asarray(order, np.int32), axis=0)
        return rows.by_stage(x, order)

    def natural(self, g: Value, layers: int) -> Value:
        """Gradients of rows as those of layers, in the layers' own order."""
        g = resident.stacked(g)
        order = self.placing.order
        if not self.placing.ragged:
            return rows.in_own_order(g, order)
        back = np.zeros(layers, np.int32)
        for row, (number, is_valid) in enumerate(zip(order, self.placing.valid.ravel(), strict=True)):
            if is_valid:
                back[number] = row
        return jnp.take(g, back, axis=0)

    # ------------------------------------------------------------ what the loops carry

    def start(self) -> dict[str, Any]:
        """Registers with a microbatch's own values, so that works that are none have finite numbers."""
        runs, chunks, stages = self.runs, self.chunks, self.shape.stages
        outside = self.entering(np.int32(0))
        types = chunks.z_types

        def each(x: Value, *lead: int) -> Value:
            return jnp.broadcast_to(x, (stages, *lead, *x.shape))

        def empty(t: Any, *lead: int) -> Value:
            return jnp.zeros((stages, *lead, *t.shape), t.dtype)

        size = self.placing.size
        own: Own = {"register": [each(x) for x in outside]}
        own["ahead"] = [list(own["register"]) for _ in range(runs.delay[0])]
        if runs.waiting[0]:
            own["waiting"] = [each(x, runs.waiting[0] + 1) for x in outside]
        every: dict[str, Any] = {}
        if self.windowed:
            own["weights"] = self.own_rows
        if self.pulls:
            floats = [types[n] for n in chunks.floats]
            streams = range(len(self.pulls))
            own["saved"] = [
                resident.room((stages, runs.saved + 1, size, *t.shape), t.dtype) for t in self.layer.kept
            ]
            own["register_back"] = [[empty(t) for t in floats] for _ in streams]
            own["behind"] = [[[empty(t) for t in floats] for _ in streams] for _ in range(runs.delay[1])]
            if runs.waiting[1]:
                own["waiting_back"] = [
                    [empty(t, runs.waiting[1] + 1) for t in floats] for _ in streams
                ]
            late = self.layer.late if runs.late else ()
            own["late"] = [[empty(t, runs.late + 1, size) for t in late] for _ in streams]
            own["totals"] = [self.totals() for _ in streams]
            every["ended"] = [
                [resident.room((runs.ended, *t.shape), t.dtype) for t in floats] for _ in streams
            ]
            every["whole"] = [
                [self.gradients_of(n) for n in self.stacked_wants] if self.windowed else []
                for _ in streams
            ]
            every["outer"] = [
                [self.accumulator(self.fixed[k]) for k in self.outer] for _ in streams
            ]
            every["moved"] = [
                [jnp.zeros_like(self.data[i]) for i in self.rows] for _ in streams
            ]
        every["sums"] = self.of.zeros()
        every["stacked"] = [
            jnp.zeros((self.of.cut.split.steps, *v.aval.shape), v.aval.dtype) for v in self.stacked_outs
        ]
        return {"own": own, "every": every}

    @property
    def stacked_outs(self) -> list[Any]:
        """Results of a microbatch that are no sums: extremes, then rows."""
        parts = len(self.of.kinds)
        outs = self.jaxpr.outvars
        extremes = [v for v, kind in zip(outs, self.of.kinds, strict=False) if kind != "sum"]
        return [*extremes, *outs[parts:]]

    @property
    def first_row(self) -> int:
        """The number of the first stack among what a layer takes besides what moves."""
        return len(self.layer.rest) - len(self.layer.operands.rows)

    @property
    def stacked_wants(self) -> list[int]:
        """Of stacks, those whose gradients are wanted."""
        return [n for n in self.layer.wanted if n >= self.first_row]

    def gradients_of(self, n: int) -> Value:
        """Room for the gradients of a stack, summed over devices."""
        dtype = self.of.kept(self.layer.rest[n].dtype)
        return resident.room(self.apart[n - self.first_row].shape, dtype)

    def totals(self) -> list[Value]:
        """Zeros for the gradients of what a layer takes, those of rows a row each."""
        layer, stages, first = self.layer, self.shape.stages, self.first_row
        found = []
        for n in layer.wanted:
            if n >= first:
                found.append(self.accumulator(self.own_rows[n - first], not self.windowed))
            else:
                x = self.fixed[layer.operands.fixed[n]]
                found.append(self.accumulator(jnp.broadcast_to(x, (stages, *x.shape))))
        return found

    def accumulator(self, x: Value, begun: bool = True) -> Value:
        return resident.accumulator(x, self.of.kept(x.dtype), begun)

    @property
    def outer(self) -> list[int]:
        """Numbers of what is made once that the ends take, and of which gradients are wanted."""
        read = {v for jaxpr in (self.pieces.enter, self.pieces.leave) for v in _read(jaxpr)}
        return [k for k in self.moved if self.pieces.fixed[k] in read]

    # ------------------------------------------------------------ ticks

    def windows(self, group: Sequence[Window], state: Any) -> Any:
        """Windows that are alike: what is fetched, the ticks, what is flushed."""
        rounds = self.runs.rounds(group[0].start, group[0].stop)
        columns = _stacked([self.rounds(rounds, window.start - group[0].start) for window in group])
        fetch = np.asarray([window.fetch for window in group], np.int32)
        flush = np.asarray([window.flush for window in group], np.int32)

        def turn(state: Any, xs: Any) -> tuple[Any, None]:
            columns, fetch, flush = xs
            for n in range(fetch.shape[0]):
                state = self.fetched(state, fetch[n])
            for each, cols in zip(rounds, columns, strict=True):
                state = self.round(each, cols, state)
            for n in range(flush.shape[0]):
                state = self.flushed(state, flush[n])
            return state, None

        if len(group) == 1:
            return turn(state, (_first(columns), fetch[0], flush[0]))[0]
        return jax.lax.scan(turn, state, (columns, fetch, flush))[0]

    def fetched(self, state: Any, chunk: Value) -> Any:
        """A chunk's weights come together, in their place."""
        size, place = self.placing.size, chunk % self.runs.resident * self.placing.size
        weights = [
            _put_rows(held, resident.together(_narrowed(_rows(x, chunk * size, size), held.dtype)), place)
            for held, x in zip(state["own"]["weights"], self.apart, strict=True)
        ]
        return {**state, "own": {**state["own"], "weights": weights}}

    def flushed(self, state: Any, chunk: Value) -> Any:
        """A chunk's gradients are summed over devices; the next one's take their place when they come."""
        size, place = self.placing.size, chunk % self.runs.resident * self.placing.size
        own, every = state["own"], dict(state["every"])
        for k in range(len(self.pulls)):
            totals, whole = list(own["totals"][k]), list(every["whole"][k])
            for j, n in enumerate(self.stacked_wants):
                like = self.apart[n - self.first_row]
                at = self.layer.wanted.index(n)
                sums = resident.settled(_rows(totals[at], place, size), _rows(like, chunk * size, size))
                whole[j] = _put_rows(whole[j], sums, chunk * size)
            every["whole"] = _set(every["whole"], k, whole)
        return {"own": own, "every": every}

    def rounds(self, rounds: Sequence[Round], later: int) -> Any:
        """The numbers of rounds, so many ticks later."""
        return [
            _stacked(
                [[self.columns(phase, later + n * each.ticks) for phase in each.phases] for n in range(each.count)]
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
                state = self.tick(tick, {name: x[j] for name, x in cols.items()}, state, phase.mixed)
            return state, None

        return jax.lax.scan(turn, state, columns)[0]

    def merged(self, each: Round, phase: Phase, j: int) -> _Sort:
        """What the ticks of a loop do that stand at the same place of it, each time that it runs."""
        ticks = [
            self.runs.ticks[t + n * each.ticks]
            for t in range(phase.start + j, phase.stop, phase.period)
            for n in range(each.count)
        ]
        kinds = tuple(kind for kind in KINDS if any(kind in tick.kinds for tick in ticks))

        def when(name: str) -> When:
            said = {getattr(tick, name) >= 0 for tick in ticks}
            return "sometimes" if len(said) == 2 else "always" if said.pop() else "never"

        return _Sort(kinds, when("enters"), when("ends"), when("returns"))

    def columns(self, phase: Phase, later: int = 0) -> dict[str, Any]:
        """The table's numbers, [count, period, ...], of a phase or one so many ticks later."""
        rows = slice(phase.start + later, phase.stop + later)
        lead = (phase.count, phase.period)
        found = {name: x[rows].reshape(*lead, x.shape[1]) for name, x in self.runs.columns.items()}
        ticks = self.runs.ticks[rows]
        for name in ("enters", "ends", "returns"):
            found[name] = np.asarray([getattr(tick, name) for tick in ticks], np.int32).reshape(lead)
        for name in ("forward", "back"):
            found[name] = np.asarray([getattr(tick, name) for tick in ticks], bool).reshape(lead)
        return found

    def tick(self, tick: _Sort, cols: Mapping[str, Any], state: Any, mixed: bool) -> Any:
        own, every = dict(state["own"]), dict(state["every"])
        outside = None
        if tick.enters != "never":
            outside = self.when(tick.enters, cols["enters"], self.entering, self.nothing)
        mine = {name: cols[name] for name in self.runs.columns if name not in ("ended", "ending")}
        given = {
            "outside": outside,
            "fixed": self.fixed_of_layers(),
            "data": self.data if self.needs_data else [],
            "ended": self.ended(every, cols) if tick.back else None,
            "moves": (cols["forward"], cols["back"]),
        }
        weights = own.get("weights", self.own_rows)
        own, sent = self.region(
            lambda own, cols, given: (self.work(tick, own, cols, given, mixed), {}),
            {**own, "rows": weights, **self.tables()},
            mine,
            given,
        )
        z, dz = own.pop("z", None), own.pop("dz", None)
        if tick.returns != "never":
            every = self.when(
                tick.returns, cols["returns"], lambda m: self.returned(every, self.of_stage(dz, 0), m), lambda: every
            )
        if tick.ends != "never":
            last, here = self.shape.stages - 1, every
            slot = cols["ended"][0]
            every = self.when(
                tick.ends, cols["ends"], lambda m: self.left(here, self.of_stage(z, last), m, slot), lambda: here
            )
        return {"own": own, "every": every}

    def when(self, when: When, number: Value, f: Callable[[Value], Any], otherwise: Callable[[], Any]) -> Any:
        """What is done at some ticks of a loop with a microbatch: a condition of the tick alone, the same on
        all devices, so there may be collectives in it.
        """
        if when == "always":
            return f(number)
        return jax.lax.cond(number >= 0, lambda: f(jnp.maximum(number, 0)), otherwise)

    def nothing(self) -> list[Value]:
        return [jnp.zeros(t.shape, t.dtype) for t in self.chunks.z_types]

    def tables(self) -> Own:
        return {
            "layers": jnp.asarray(self.placing.layers, jnp.int32),
            "valid": jnp.asarray(self.placing.valid),
        }

    @property
    def needs_data(self) -> bool:
        return bool(self.pieces.told or self.pieces.told_rows)

    def fixed_of_layers(self) -> list[Any]:
        """What is made once, where stages read it: None for the rest."""
        read = set(self.layer.operands.fixed)
        read |= {k for k, v in enumerate(self.pieces.fixed) if v in _read(self.pieces.tell)}
        read -= set(self.layer.operands.rows) - {k for k in read if self.pieces.fixed[k] in _read(self.pieces.tell)}
        return [x if k in read else np.int32(0) for k, x in enumerate(self.fixed)]

    # In the region

    def region(self, f: Any, own: Any, cols: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Any, Any]:
        """`f` on every stage: of its own arrays, its numbers of the table, and what all have. It gives the
        stage's own, and what all have again.
        """
        axis = self.shape.axis
        ours, all_ = PartitionSpec(axis), PartitionSpec()

        def local(own: Any, cols: Any, given: Any) -> Any:
            mine, every = f(jax.tree.map(_without, own), jax.tree.map(_without, cols), given)
            return jax.tree.map(_with, mine), every

        made: tuple[Any, Any] = jax.shard_map(
            local,
            mesh=self.shape.mesh,
            in_specs=(ours, ours, all_),
            out_specs=(ours, all_),
            axis_names={axis},
            check_vma=False,
        )(own, cols, given)
        return made

    def work(
        self, tick: _Sort, own: Own, cols: Mapping[str, Value], given: Mapping[str, Any], mixed: bool
    ) -> Own:
        """A stage's tick: what has come is put where it waits, the work is done, and its result sent on."""
        own = dict(own)
        # Numbers that are the same at every tick of a loop are not to be known: an update in place at a known
        # number is one that the compiler makes in a copy.
        cols = jax.lax.optimization_barrier(dict(cols))
        fixed = {name: own.pop(name) for name in ("rows", "layers", "valid")}
        for name, put in (("", "put"), ("_back", "put_back")):
            if "waiting" + name in own and (tick.forward if not name else tick.back):
                own["waiting" + name] = jax.tree.map(
                    lambda buffer, x, put=put: _put_in(buffer, x, cols[put]),
                    own["waiting" + name],
                    own["register" + name],
                )
        own["sent"] = own["register"]
        if self.pulls:
            own["sent_back"] = own["register_back"]
        programs = [self.chunks.forward, self.chunks.backward, self.chunks.input, self.chunks.weight]
        runs = [programs[KINDS.index(kind)] for kind in tick.kinds]
        if len(runs) == 1 and not mixed:
            own = runs[0]({**own, **fixed}, cols, given)
        else:
            numbers = [1 + KINDS.index(kind) for kind in tick.kinds]
            branch = np.int32(0)
            for n, number in enumerate(numbers):
                branch = jnp.where(cols["kind"] == number, n + 1, branch)
            keys = tuple(own)

            def done(run: Any) -> Any:
                return lambda own: _only(run({**own, **fixed}, cols, given), keys)

            own = jax.lax.switch(branch, [lambda own: own, *map(done, runs)], own)
        own = {k: v for k, v in own.items() if k not in fixed}
        return self.sent(tick, own, given, mixed)

    def sent(self, tick: _Sort, own: Own, given: Mapping[str, Any], mixed: bool) -> Own:
        """What a stage has after what it made was sent on."""
        own = dict(own)
        z, dz = own.pop("sent"), own.pop("sent_back", None)
        if tick.ends != "never":
            own["z"] = z
        if tick.returns != "never":
            own["dz"] = dz
        for name, chain, value, way, moves in (
            ("register", "ahead", z, 1, 0),
            ("register_back", "behind", dz, -1, 1),
        ):
            if not (tick.forward if way > 0 else tick.back):
                continue
            queue = [value, *own[chain]]
            new = [jax.tree.map(lambda x: self.permuted(x, way), queue[0]), *queue[1:]]
            arrived = new[-1] if len(new) > 1 else new[0]
            rest = new[:-1]
            if mixed:  # at a tick of another sort nothing of this direction moves
                arrived = _kept(given["moves"][moves], arrived, own[name])
                rest = [_kept(given["moves"][moves], a, b) for a, b in zip(rest, own[chain], strict=True)]
            own[name], own[chain] = arrived, rest
        return own

    def permuted(self, x: Value, way: int) -> Value:
        n = self.shape.stages
        return jax.lax.ppermute(x, self.shape.axis, [(i, (i + way) % n) for i in range(n)])

    def of_stage(self, own: Any, stage: int) -> Any:
        """One stage's arrays, on every stage."""
        axis = self.shape.axis

        def one(x: Value) -> Value:
            wide = x.astype(np.int8) if x.dtype == np.bool_ else x
            here = jax.lax.axis_index(axis) == stage
            return jax.lax.psum(jnp.where(here, wide, jnp.zeros_like(wide)), axis).astype(x.dtype)

        return self.region(lambda own, cols, given: ([], jax.tree.map(one, own)), own, {}, {})[1]

    # Outside of it

    def entering(self, microbatch: Value) -> list[Value]:
        """What goes into the first layer, as it travels."""
        data = [jax.lax.dynamic_index_in_dim(x, microbatch, 0, False) for x in self.data]
        outs = inline(self.pieces.enter, *self.fixed, *data, microbatch)
        types = self.chunks.z_types
        outs = [_like(x, t) for x, t in zip(outs, types, strict=False)]
        return [*outs, *(jnp.zeros(t.shape, t.dtype) for t in types[len(outs) :])]

    def ended(self, every: Any, cols: Any) -> list[list[Value]]:
        slot = cols["ending"][0]
        return [[jax.lax.dynamic_index_in_dim(x, slot, 0, False) for x in each] for each in every["ended"]]

    def left(self, every: Any, z: Sequence[Value], m: Value, slot: Value) -> dict[str, Any]:
        """What becomes of a microbatch that has been through all layers; and the gradient of that."""
        every = dict(every)
        data = [jax.lax.dynamic_index_in_dim(x, m, 0, False) for x in self.data]
        floats = self.chunks.floats

        def end(zs: Leaves, outer: Leaves, rows: Leaves) -> Any:
            given, fixed, own = list(z), list(self.fixed), list(data)
            for n, x in zip(floats, zs, strict=True):
                given[n] = x
            for k, x in zip(self.outer, outer, strict=True):
                fixed[k] = x
            for i, x in zip(self.rows, rows, strict=True):
                own[i] = x
            carried, riders, ys = self.split(given)
            outs = inline(self.pieces.leave, *carried, *ys, *riders, *fixed, *own, m)
            return [outs[k] for k in self.wanted], outs

        args = [z[n] for n in floats], [self.fixed[k] for k in self.outer], [data[i] for i in self.rows]
        if not self.pulls:
            outs = end(*args)[1]
        else:
            _, pull, outs = jax.vjp(end, *args, has_aux=True)
            for k, cts in enumerate(self.pulls):
                dz, outer, rows = pull([_ct(ct) for ct in cts])
                ended = [_put_in(buffer, x, slot) for buffer, x in zip(every["ended"][k], dz, strict=True)]
                every["ended"] = _set(every["ended"], k, ended)
                every = self.outer_added(every, k, outer, rows, m)
        every["sums"] = self.of.added(every["sums"], outs)
        stacked = self.of.stacked(outs)
        every["stacked"] = [
            _put_in(buffer, x, m) for buffer, x in zip(every["stacked"], [*stacked[0], *stacked[1]], strict=True)
        ]
        return every

    def split(self, z: Sequence[Value]) -> tuple[list[Value], list[Value], list[Value]]:
        carried, riders = self.chunks.carried, self.chunks.riders
        return list(z[:carried]), list(z[carried : carried + riders]), list(z[carried + riders :])

    def returned(self, every: Any, dz: Any, m: Value) -> dict[str, Any]:
        """The gradient of what goes into the first layer, through what makes it."""
        data = [jax.lax.dynamic_index_in_dim(x, m, 0, False) for x in self.data]
        kept = self.chunks.carried + self.chunks.riders
        floats = [n for n in self.chunks.floats if n < kept]

        def start(outer: Leaves, rows: Leaves) -> list[Value]:
            fixed, own = list(self.fixed), list(data)
            for k, x in zip(self.outer, outer, strict=True):
                fixed[k] = x
            for i, x in zip(self.rows, rows, strict=True):
                own[i] = x
            outs = inline(self.pieces.enter, *fixed, *own, m)
            return [_like(outs[n], self.chunks.z_types[n]) for n in floats]

        _, pull = jax.vjp(start, [self.fixed[k] for k in self.outer], [data[i] for i in self.rows])
        for k, each in enumerate(dz):
            by = dict(zip(self.chunks.floats, each, strict=True))
            outer, rows = pull([by[n] for n in floats])
            every = self.outer_added(every, k, outer, rows, m)
        return every

    def outer_added(self, every: Any, k: int, outer: Leaves, rows: Leaves, m: Value) -> dict[str, Any]:
        every = dict(every)
        totals = [resident.accumulate(t, x) for t, x in zip(every["outer"][k], outer, strict=True)]
        every["outer"] = _set(every["outer"], k, totals)
        moved = [resident.added(t, x, m) for t, x in zip(every["moved"][k], rows, strict=True)]
        every["moved"] = _set(every["moved"], k, moved)
        return every

    # ------------------------------------------------------------ results

    def results(self, state: Any, fixed: Sequence[Value], pull: Any) -> Swept:
        every = state["every"]
        extremes = sum(kind != "sum" for kind in self.of.kinds)
        stacked = (list(every["stacked"][:extremes]), list(every["stacked"][extremes:]))
        if not self.pulls:
            return Swept(every["sums"], stacked, [], [])
        gradients = []
        for k in range(len(self.pulls)):
            (found,) = pull(self.gathered(state, k, fixed))
            gradients.append([g.astype(self.of.kept(g.dtype)) for g in found])
        return Swept(every["sums"], stacked, gradients, every["moved"])

    def gathered(self, state: Any, k: int, fixed: Sequence[Value]) -> list[Value]:
        """The cotangents of what is made once."""
        found: dict[int, Value] = {}

        def add(n: int, g: Value) -> None:
            found[n] = found[n] + g if n in found else g

        for n, total in zip(self.outer, state["every"]["outer"][k], strict=True):
            add(n, resident.settled(total, fixed[n]))
        layer, first = self.layer, self.first_row
        for n, total in zip(layer.wanted, state["own"]["totals"][k], strict=True):
            if n >= first:
                number = layer.operands.rows[n - first]
                if self.windowed:
                    sums = state["every"]["whole"][k][self.stacked_wants.index(n)]
                else:
                    sums = resident.settled(total, self.apart[n - first])
                flat = jax.lax.reshape(sums, (len(self.placing.order), *total.shape[2:]))
                add(number, self.natural(flat, self.pieces.stack.layers))
            else:
                number = layer.operands.fixed[n]
                add(number, resident.settled(total.sum(0), fixed[number]))
        return [
            found[n].astype(x.dtype) if n in found else _nothing(x) for n, x in enumerate(fixed)
        ]


def _nothing(x: Value) -> Any:
    if is_array(x) and is_floating(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def is_array(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _read(jaxpr: Jaxpr) -> set[Any]:
    return {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var)} | {
        v for v in jaxpr.outvars if isinstance(v, Var)
    }


def _rows(x: Value, at: Value, size: int) -> Value:
    """x[:, at : at + size]"""
    return jax.lax.dynamic_slice_in_dim(x, at, size, 1)


def _narrowed(rows: Value, dtype: Any) -> Value:
    """Rows of weights in a narrower dtype, rounded as such: a mere cast the compiler does to the whole stack,
    before the loop.
    """
    if rows.dtype == dtype:
        return rows
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(rows, info.nexp, info.nmant).astype(dtype)


def _put_rows(x: Value, rows: Value, at: Value) -> Value:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, at, 1)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _without(x: Value) -> Value:
    return jax.lax.squeeze(x, (0,))


def _with(x: Value) -> Value:
    return jax.lax.reshape(x, (1, *x.shape))


def _put_in(buffer: Value, x: Value, slot: Value) -> Value:
    return jax.lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)


def _kept(which: Value, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), new, old)


def _only(own: Own, keys: Sequence[str]) -> Own:
    return {key: own[key] for key in keys}


def _set(xs: Sequence[Any], k: int, x: Any) -> list[Any]:
    return [*xs[:k], x, *xs[k + 1 :]]


def _like(x: Value, t: Any) -> Value:
    x = jnp.asarray(x, t.dtype) if not hasattr(x, "dtype") else x
    return x if x.dtype == t.dtype else x.astype(t.dtype)


def _ct(ct: Any) -> Any:
    return jnp.zeros(ct.aval.shape, ct.aval.dtype) if isinstance(ct, Zero) else ct


__all__ = ["Pieces", "Pipelined", "Run", "Shape", "microbatch", "Decline"]
