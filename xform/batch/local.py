"""A program over the whole batch as a program over a microbatch.

`analyse` goes over a body with the states of its inputs and asks `rules` at each equation (`bodies`, for what
holds some); it raises `Mixes` at the first that does more with the rows of a batch than can be had from
microbatches. The `Local` that it gives runs the body on a microbatch: each equation as it stands, but for
those whose parameters say how large the batch is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from xform.axes import Scope
from xform.batch.bodies import BODIES
from xform.batch.rules import RULES, TAKES_GROUPS
from xform.batch.states import (
    AFTER,
    GROUPS,
    SAME,
    Batch,
    Case,
    Micro,
    Mixes,
    Outcome,
    State,
    constant_state,
)
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Value, Var, at_source, bind, source_line


@dataclasses.dataclass(frozen=True)
class Local:
    """A body with the state of each variable.

    outcomes: one an equation; folded: where each microbatch draws numbers of its own.
    """

    jaxpr: Jaxpr
    states: dict[Var, State]
    outcomes: tuple[Outcome, ...]
    folded: list[str]

    @property
    def outs(self) -> list[State]:
        return [state_of(self.states, v) for v in self.jaxpr.outvars]

    def run(self, args: Sequence[Value], micro: Micro) -> list[Value]:
        """The results for a microbatch, of inputs at its size."""
        env: dict[Var, Value] = dict(zip(self.jaxpr.all_invars, [*self.jaxpr.consts, *args], strict=True))
        evaluate(zip(self.jaxpr.eqns, self.outcomes, strict=True), env, micro)
        return [read(env, v) for v in self.jaxpr.outvars]


def read(env: dict[Var, Value], v: Atom) -> Value:
    return v.val if isinstance(v, Literal) else env[v]


def state_of(states: dict[Var, State], v: Atom) -> State:
    return constant_state(v) if isinstance(v, Literal) else states[v]


def evaluate(pairs: Iterable[tuple[JaxprEqn, Outcome]], env: dict[Var, Value], micro: Micro) -> None:
    """Runs equations at the size of a microbatch; their results go into `env`."""
    for eqn, outcome in pairs:
        args = [read(env, v) for v in eqn.invars]
        with at_source(eqn):
            outs = bind(eqn, args, eqn.params) if outcome.emit is None else outcome.emit(args, micro)
        env.update(zip(eqn.outvars, outs, strict=True))


def analyse(jaxpr: Jaxpr, inputs: Sequence[State], scope: Scope, batch: Batch, folded: list[str]) -> Local:
    """The body with inputs in these states. Raises Mixes with the user's line."""
    states: dict[Var, State] = dict(zip(jaxpr.invars, inputs, strict=True))
    states.update((v, SAME) for v in jaxpr.constvars)
    outcomes = []
    for index, eqn in enumerate(jaxpr.eqns):
        outcome = apply(eqn, index, states, scope, batch, folded)
        states.update(zip(eqn.outvars, outcome.states, strict=True))
        outcomes.append(outcome)
    return Local(jaxpr, states, tuple(outcomes), folded)


def apply(
    eqn: JaxprEqn, index: int, states: dict[Var, State], scope: Scope, batch: Batch, folded: list[str]
) -> Outcome:
    """The outcome of one equation. Raises Mixes, with its primitive and the user's line."""
    case = Case(eqn, index, [state_of(states, v) for v in eqn.invars], scope, batch, folded)
    name = eqn.primitive.name
    try:
        if AFTER in case.states:
            raise Mixes("what was made of sums over the batch is used for each of its rows")
        if GROUPS in case.states and name not in TAKES_GROUPS and name not in BODIES:
            raise Mixes("the numbers of rows that groups have are used for something else than products")
        if eqn.effects and not all(s.is_same for s in case.states):
            raise Mixes("it has an effect")
        if name in BODIES:
            return BODIES[name](case, analyse)
        if name in RULES:
            return RULES[name](case)
        return unknown(case)
    except Placed as why:
        why.line = why.line or source_line(eqn)
        raise
    except Mixes as why:
        line = source_line(eqn)
        raise Placed(f"{name}: {why}", line) from None


class Placed(Mixes):
    """`Mixes` with the user's line, and the number of the outermost equation in which it is so."""

    def __init__(self, why: str, line: str) -> None:
        super().__init__(why)
        self.line, self.equation = line, -1


def unknown(case: Case) -> Outcome:
    """What no rule is known for does what it does to what is the same for all, if the result has no rows."""
    if not all(s.is_same for s in case.states):
        raise Mixes("it is not known what it does with the rows of a batch")
    if any(case.batch.of(case.scope, v).is_rows for v in case.eqn.outvars if v in case.scope.raw):
        raise Mixes("it makes something for each row that is the same in no microbatch")
    return case.everywhere(SAME)
