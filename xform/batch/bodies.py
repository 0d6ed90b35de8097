"""How equations that hold bodies treat rows of the batch: by what their bodies do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.axes import Scope
from xform.batch.custom import custom_jvp, custom_vjp
from xform.batch.states import SAME, SUM, Case, Micro, Mixes, Outcome, State, join, rows
from xform.higher_order import bodies, scan_parts
from xform.trace import Jaxpr, Value, eval_jaxpr

Analyse = Callable[..., Any]
"""`local.analyse`."""


def call(case: Case, analyse: Analyse) -> Outcome:
    """The body in place of the call."""
    (body,) = bodies(case.eqn)
    local = analyse(body, case.states, case.scope.enter(case.index, 0), case.batch, case.folded)
    return Outcome(tuple(local.outs), local.run)


def remat(case: Case, analyse: Analyse) -> Outcome:
    body, p = case.params["jaxpr"], case.params
    local = analyse(body, case.states, case.scope.enter(case.index, 0), case.batch, case.folded)

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        def run(*xs: Value) -> list[Value]:
            return local.run(xs, micro)

        return jax.checkpoint(run, prevent_cse=p["prevent_cse"], policy=p["policy"])(*args)

    return Outcome(tuple(local.outs), emit)


def scan(case: Case, analyse: Analyse) -> Outcome:
    """The carry has the state in which it comes back; what is scanned over is without its first dimension."""
    consts, carry, _ = scan_parts(case.eqn)
    body: Jaxpr = case.params["jaxpr"]
    scope = case.scope.enter(case.index, 0)
    xs = case.states[consts + carry :]
    if any(s.is_rows and s.dim == 0 for s in xs):
        return _over_rows(case, consts, carry)
    inside = [_element(s) for s in xs]
    carried = list(case.states[consts : consts + carry])
    for _ in range(len(carried) + 2):
        count = len(case.folded)
        local = analyse(body, [*case.states[:consts], *carried, *inside], scope, case.batch, case.folded)
        now = list(map(_carried, carried, local.outs[:carry]))
        if now == carried:
            break
        del case.folded[count:]
        carried = now
    else:
        raise Mixes("what the loop carries is never twice of one kind")
    stacked = [dataclasses.replace(s, dim=s.dim + 1) if s.is_rows else s for s in local.outs[carry:]]

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        def turn(carried: Sequence[Value], x: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            outs = local.run([*args[:consts], *carried, *x], micro)
            return outs[:carry], outs[carry:]

        return _scanned(
            case, turn, args[consts : consts + carry], args[consts + carry :], case.params["length"]
        )

    return Outcome((*carried, *stacked), emit)


def _scanned(case: Case, turn: Any, carried: Any, xs: Any, length: int) -> list[Value]:
    p = case.params
    first, rest = jax.lax.scan(
        turn, list(map(jnp.asarray, carried)), list(xs), length, reverse=p["reverse"], unroll=p["unroll"]
    )
    return [*first, *rest]


def _element(state: State) -> State:
    return dataclasses.replace(state, dim=state.dim - 1) if state.is_rows else state


def _carried(before: State, after: State) -> State:
    state = join(before, after)
    if state is None:
        raise Mixes(
            "a loop adds up over the batch to what is not zero at first"
            if SUM in (before, after)
            else "what a loop carries has rows of the batch at one turn and none at another"
        )
    return state


def _over_rows(case: Case, consts: int, carry: int) -> Outcome:
    """A loop over the rows themselves, which carries nothing from one to the next."""
    if carry or not all(s.is_same for s in case.states[:consts]):
        raise Mixes("a loop goes from one row of the batch to the next")
    xs = case.states[consts:]
    if len(set(xs)) > 1 or xs[0].dim != 0:
        raise Mixes("a loop over the rows of the batch takes something else as well")
    body, length = case.params["jaxpr"], case.split.part(case.params["length"])

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        def turn(_: Any, x: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            return [], eval_jaxpr(body, *args[:consts], *x)

        return _scanned(case, turn, [], args[consts:], length)

    return Outcome((rows(0, xs[0].inner),) * len(case.eqn.outvars), emit)


def cond(case: Case, analyse: Analyse) -> Outcome:
    if not case.states[0].is_same:
        raise Mixes("a choice that depends on the batch")
    locals_ = [
        analyse(b, case.states[1:], case.scope.enter(case.index, i), case.batch, case.folded)
        for i, b in enumerate(case.params["branches"])
    ]
    outs: list[State] = []
    for states in zip(*(local.outs for local in locals_), strict=True):
        state: State | None = states[0]
        for other in states[1:]:
            state = state and join(state, other)
        if state is None or (state.is_part and state != SUM):
            raise Mixes("the branches do not do the same with the batch")
        outs.append(state)

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        branches = [lambda *xs, local=local: local.run(xs, micro) for local in locals_]
        return jax.lax.switch(jnp.asarray(args[0]).astype(jnp.int32), branches, *args[1:])

    return Outcome(tuple(outs), emit)


def while_(case: Case, analyse: Analyse) -> Outcome:
    p = case.params
    numbers = {name: i for i, name in enumerate(k for k, v in p.items() if isinstance(v, Jaxpr))}
    test, consts = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carried = list(case.states[consts:])

    def entered(name: str, inputs: Sequence[State]) -> Any:
        scope: Scope = case.scope.enter(case.index, numbers[name])
        return analyse(p[name], inputs, scope, case.batch, case.folded)

    for _ in range(len(carried) + 2):
        count = len(case.folded)
        body = entered("body_jaxpr", [*case.states[test:consts], *carried])
        now = list(map(_carried, carried, body.outs))
        if now == carried:
            break
        del case.folded[count:]
        carried = now
    else:
        raise Mixes("what the loop carries is never twice of one kind")
    again = entered("cond_jaxpr", [*case.states[:test], *carried])
    if again.outs != [SAME] and not again.outs[0].is_same:
        raise Mixes("a loop that ends when the batch says so")

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        def goes_on(c: Sequence[Value]) -> Value:
            return again.run([*args[:test], *c], micro)[0]

        def turn(c: Sequence[Value]) -> list[Value]:
            return body.run([*args[test:consts], *c], micro)

        return jax.lax.while_loop(goes_on, turn, list(map(jnp.asarray, args[consts:])))

    return Outcome(tuple(carried), emit)


BODIES: dict[str, Callable[[Case, Analyse], Outcome]] = {
    "closed_call": call,
    "cond": cond,
    "core_call": call,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "eval_jaxpr": call,
    "jit": call,
    "remat2": remat,
    "scan": scan,
    "while": while_,
}
"""Primitive name -> what becomes of rows that go into its bodies."""
