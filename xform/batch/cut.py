"""A program taken apart at its sums over the batch: once before, in each microbatch, once after.

    before   what no row goes into and is not made anew in each microbatch; what is known of all rows from the
             data alone (how many tokens there are)
    inside   what is done with rows, up to the sums (largest, smallest) over them: combined, they are the sums
             over the whole batch
    after    everything made of those: it is not linear in them, or has more in it than one of them

So a mean, a weighted mean and any function of sums over the batch come out as they were, whatever the weights
of the microbatches are. Where the rows meet before, or what was summed meets the rows again, `Mixes` is
raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from xform.axes import Axes, Factor
from xform.batch.local import Placed, apply, evaluate, read, state_of
from xform.batch.states import AFTER, SAME, Batch, Micro, Outcome, Split, State, is_float
from xform.higher_order import bodies, equations
from xform.rewrite import Site, rewrite
from xform.roles import Roles
from xform.trace import Jaxpr, JaxprEqn, Literal, Value, Var, body_effects, inline, shape_of, source_line

COSTLY = frozenset(["dot_general", "conv_general_dilated", "ragged_dot_general", "scan", "while", "stack"])
"""What is computed once, not in every microbatch, where no row goes into it."""

DRAWN_WHOLE = frozenset(["random_gamma"])
"""What draws other numbers for fewer rows: of the data alone, it is computed once, of the whole batch."""


def flat(jaxpr: Jaxpr, also: int = -1) -> Jaxpr:
    """The program with the bodies of its outermost calls of jit, and of equation `also`, in their place."""

    def rule(site: Site) -> Sequence[Value] | None:
        if site.path or (
            site.name not in ("jit", "closed_call", "core_call", "eval_jaxpr") and site.index != also
        ):
            return None
        (body,) = [v for v in site.params.values() if isinstance(v, Jaxpr)]
        eqns = [eqn if source_line(eqn) else _at(eqn, site.eqn) for eqn in body.eqns]
        return inline(flat(body.replace(eqns=eqns)), *site.args)

    return rewrite(jaxpr, rule)


def _at(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation at the user's line of the call that it is in: a library's own is in no line of his."""
    return eqn.replace(source_info=eqn.source_info.replace(traceback=call.source_info.traceback))


@dataclasses.dataclass(frozen=True)
class Cut:
    """The three parts, over the variables of `jaxpr`.

    data: variables with rows that are split among the microbatches; same: those that each takes whole, both
    inputs or results of `before`. parts: sums and others that microbatches give; gathered: the results that
    they give row by row. folded: where each microbatch draws numbers of its own.
    """

    jaxpr: Jaxpr
    split: Split
    states: dict[Var, State]
    before: tuple[JaxprEqn, ...]
    inside: tuple[tuple[JaxprEqn, Outcome], ...]
    after: tuple[JaxprEqn, ...]
    data: tuple[Var, ...]
    same: tuple[Var, ...]
    parts: tuple[Var, ...]
    gathered: tuple[Var, ...]
    folded: tuple[str, ...]
    whole: tuple[str, ...]
    apart: tuple[str, str] | None  # the first operation after that is not linear, and its line

    def run_before(self, env: dict[Var, Value]) -> None:
        self._run(self.before, env)

    def run_after(self, env: dict[Var, Value]) -> None:
        self._run(self.after, env)

    def run_inside(self, env: dict[Var, Value], micro: Micro) -> list[Value]:
        """The parts, then the rows gathered, of one microbatch; env has `same` and its `data`."""
        evaluate(self.inside, env, micro)
        return [read(env, v) for v in (*self.parts, *self.gathered)]

    def _run(self, eqns: Sequence[JaxprEqn], env: dict[Var, Value]) -> None:
        if not eqns:
            return
        made = [v for eqn in eqns for v in eqn.outvars]
        reads = [*_reads(eqns)]
        info = self.jaxpr.debug_info.with_unknown_names()
        part = self.jaxpr.replace(
            constvars=[], consts=[], invars=reads, outvars=made, eqns=list(eqns), debug_info=info
        )
        part = part.replace(effects=body_effects(part))
        env.update(zip(made, inline(part, *(env[v] for v in reads)), strict=True))


def _reads(eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
    """The variables that equations read from outside, in order."""
    made: set[Var] = set()
    reads: dict[Var, None] = {}
    for eqn in eqns:
        reads.update((v, None) for v in eqn.invars if isinstance(v, Var) and v not in made)
        made.update(eqn.outvars)
    return reads


def live(jaxpr: Jaxpr) -> list[int]:
    """The numbers of the equations on which the results depend, or that have an effect."""
    wanted = {v for v in jaxpr.outvars if isinstance(v, Var)}
    found = []
    for i in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[i]
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            wanted.update(v for v in eqn.invars if isinstance(v, Var))
            found.append(i)
    return found[::-1]


# ---------------------------------------------------------------- which axis is the batch


def find_batch(jaxpr: Jaxpr, roles: Roles) -> Iterator[tuple[Factor, ...]]:
    """Axes that may be the batch, the likeliest first: what the roles say, then what leads the data.

    An axis of something that is differentiated is the last to be tried: it is a weight's, as a rule.
    """
    root = roles.axes.root
    data = jaxpr.constvars or jaxpr.invars
    votes: dict[tuple[Factor, ...], int] = {}
    for v in data:
        for d, dim in enumerate(root[v]):
            if dim and (d == 0 or set(dim) <= roles.batch):
                told = bool(roles.batch) and set(dim) <= roles.batch
                votes[dim] = votes.get(dim, 0) + 1 + (1000 if told else 0)
    weights = {f for v in jaxpr.invars for dim in root[v] for f in dim} if jaxpr.constvars else set()
    order = sorted(votes, key=lambda dim: (bool(set(dim) & weights), -votes[dim], dim[0].id))
    yield from order


# ---------------------------------------------------------------- the cut


def cut(jaxpr: Jaxpr, axes: Axes, factors: tuple[Factor, ...], split: Split) -> Cut:
    """Takes apart a program whose batch is the axis of these factors. Raises Mixes with the user's line."""
    return _Cut(jaxpr, axes, Batch(factors, split)).cut()


class _Cut:
    def __init__(self, jaxpr: Jaxpr, axes: Axes, batch: Batch) -> None:
        self.jaxpr, self.axes, self.batch = jaxpr, axes, batch
        self.states: dict[Var, State] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.free: set[Var] = set()  # made of the data alone
        self.whole: dict[int, str] = {}  # equations of the data alone that take the batch as a whole
        self.once: set[int] = set()  # equations that are computed before
        self.after: list[int] = []
        self.folded: list[str] = []
        self.apart: tuple[str, str] | None = None

    def cut(self) -> Cut:
        self.inputs()
        numbers = live(self.jaxpr)
        for i in numbers:
            self.equation(i)
        return self.parts(numbers)

    def inputs(self) -> None:
        for v in self.jaxpr.all_invars:
            state = self.states[v] = self.batch.of(self.axes.root, v)
            weight = state.is_same and shape_of(v) and is_float(v)
            if not weight:
                self.free.add(v)

    def equation(self, i: int) -> None:
        eqn = self.jaxpr.eqns[i]
        free = all(isinstance(v, Literal) or v in self.free for v in eqn.invars)
        if free:
            self.free.update(eqn.outvars)
        count = len(self.folded)
        try:
            outcome = apply(eqn, i, self.states, self.axes.root, self.batch, self.folded)
        except Placed as why:
            del self.folded[count:]
            self.mixed(i, free, why)
            return
        others = len(self.folded) > count and eqn.primitive.name in DRAWN_WHOLE
        if free and (others or any(s.is_part for s in outcome.states)):
            del self.folded[count:]
            self.taken_whole(i)
            return
        if all(s.is_same for s in outcome.states) and outcome.states:
            costly = any(e.primitive.name in COSTLY for e in (eqn, *_inner(eqn)))
            if costly or eqn.effects:
                self.once.add(i)
        self.outcomes[i] = outcome
        self.states.update(zip(eqn.outvars, outcome.states, strict=True))

    def mixed(self, i: int, free: bool, why: Placed) -> None:
        """What mixes rows: of the data alone, it is computed whole; of sums alone, after; else not at all."""
        eqn = self.jaxpr.eqns[i]
        states = [state_of(self.states, v) for v in eqn.invars]
        if free and AFTER not in states:
            self.taken_whole(i)
        elif not any(s.is_rows for s in states):
            self.after.append(i)
            self.states.update((v, AFTER) for v in eqn.outvars)
            self.apart = self.apart or (str(why), why.line)
        else:
            why.equation = i
            raise why

    def taken_whole(self, i: int) -> None:
        """Computed once of the whole batch; of what has rows, each microbatch gets its own."""
        eqn = self.jaxpr.eqns[i]
        self.once.add(i)
        line = source_line(eqn)
        self.whole[i] = f"{eqn.primitive.name} ({line})" if line else eqn.primitive.name
        for v in eqn.outvars:
            self.states[v] = self.batch.of(self.axes.root, v) if v in self.axes.root.raw else SAME

    def parts(self, numbers: Sequence[int]) -> Cut:
        eqns = self.jaxpr.eqns
        outs = [v for v in self.jaxpr.outvars if isinstance(v, Var)]
        whole: dict[Var, None] = dict.fromkeys(outs)  # needed as they are of the whole batch
        for i in self.after:
            whole.update((v, None) for v in eqns[i].invars if isinstance(v, Var))
        parts = [v for v in whole if self.states[v].is_part]
        gathered = [v for v in whole if self.states[v].is_rows and v not in self.given]
        inside, taken = self.closure(numbers, [*parts, *gathered])
        data = [v for v in taken if self.states[v].is_rows]
        same = [v for v in taken if not self.states[v].is_rows]
        effects = [i for i in numbers if eqns[i].effects and i in self.once]
        wanted = [*taken, *(v for v in whole if self.states[v].is_same or v in self.given)]
        before = self.needed(numbers, wanted, effects)
        return Cut(
            self.jaxpr,
            self.batch.split,
            self.states,
            tuple(eqns[i] for i in before),
            tuple((eqns[i], self.outcomes[i]) for i in inside),
            tuple(eqns[i] for i in self.after),
            tuple(data),
            tuple(same),
            tuple(parts),
            tuple(gathered),
            tuple(dict.fromkeys(self.folded)),
            tuple(dict.fromkeys(self.whole[i] for i in before if i in self.whole)),
            self.apart,
        )

    @property
    def given(self) -> set[Var]:
        """Variables that are there before any microbatch: inputs, and what is computed once."""
        made = {v for i in self.once for v in self.jaxpr.eqns[i].outvars}
        return {*self.jaxpr.all_invars, *made}

    def closure(self, numbers: Sequence[int], wanted: Sequence[Var]) -> tuple[list[int], list[Var]]:
        """The equations inside that make these, and what they take from outside."""
        need, given = set(wanted), self.given
        inside: list[int] = []
        for i in reversed(numbers):
            eqn = self.jaxpr.eqns[i]
            if i in self.outcomes and i not in self.once and any(v in need for v in eqn.outvars):
                inside.append(i)
                need.update(v for v in eqn.invars if isinstance(v, Var))
        inside.reverse()
        order = [*self.jaxpr.all_invars, *(v for i in numbers for v in self.jaxpr.eqns[i].outvars)]
        return inside, [v for v in order if v in need and v in given]

    def needed(self, numbers: Sequence[int], wanted: Sequence[Var], effects: Sequence[int]) -> list[int]:
        """The equations at the size of the whole batch that make these."""
        need = set(wanted)
        found = []
        for i in reversed(numbers):
            eqn = self.jaxpr.eqns[i]
            if i in effects or any(v in need for v in eqn.outvars):
                found.append(i)
                need.update(v for v in eqn.invars if isinstance(v, Var))
        return found[::-1]


def _inner(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for body in bodies(eqn):
        yield from equations(body)
