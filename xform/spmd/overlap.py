"""Loops that bring together the next turn's weights, and scatter the last turn's gradients, while a turn
runs.

    scan {                                 w = gather row 0
      w  = gather row i                    scan {
      .. = dot x w                   ->      w' = gather row i+1           while
      dw = dot x dy                          .. = dot x w, dw' = dot x dy
      y  = scatter dw }                      y[i-1] = scatter dw;  w, dw = w', dw' }

What a turn computes from its rows alone, collectives included, depends on no other turn: it can be had a turn
early. What only becomes a row of the results can be done a turn late. The first turn, or the last, stands
outside the loop, so nothing is sent in vain. It takes the memory of one more turn's whole weights, and of one
turn's whole gradients.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.movement import nbytes
from xform.rewrite import Site, rewrite
from xform.spmd.rings import RINGS
from xform.trace import Jaxpr, JaxprEqn, Literal, Value, Var, at_source, bind, has_effects

COLLECTIVES = frozenset({"all_gather", "reduce_scatter"})
CARRIES_ON = frozenset({"convert_element_type", "copy", "reshape", "squeeze", "transpose"})
"""What may be done with a scattered gradient before it is a row of the results."""

LEAST = 3
"""Turns of a loop that is worth it."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """The body of a loop, cut: its carried inputs and rows; what is fetched from its rows; the gradients that
    are scattered late, with the result that each becomes.
    """

    body: Jaxpr
    carry: int
    fetched: tuple[Var, ...]
    late: Mapping[int, Var]  # number of the result -> the variable before its scatter

    @property
    def nbytes(self) -> int:
        """The memory that it takes on a device."""
        return sum(map(nbytes, (*self.fetched, *self.late.values())))

    def run(self, known: Mapping[Var, Value], wanted: Sequence[Any]) -> list[Value]:
        """The values of these variables, where others are known: only what that needs."""
        needed = {v for v in wanted if isinstance(v, Var)} - set(known)
        chosen = []
        for eqn in reversed(self.body.eqns):
            if not needed.isdisjoint(eqn.outvars):
                chosen.append(eqn)
                needed |= {v for v in eqn.invars if isinstance(v, Var) and v not in known}
        env = dict(known) | dict(zip(self.body.constvars, self.body.consts, strict=True))

        def read(atom: Any) -> Value:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in reversed(chosen):
            with at_source(eqn):
                outs = bind(eqn, [read(v) for v in eqn.invars], eqn.params)
            env.update({v: x for v, x in zip(eqn.outvars, outs, strict=True) if v not in known})
        return [read(v) for v in wanted]


def sunk(body: Jaxpr) -> Jaxpr:
    """The body with gradients scattered after what is computed again, not at the end of it."""

    def rule(site: Site) -> Sequence[Value] | None:
        if site.path or site.name != "remat2":
            return None
        inner = site.params["jaxpr"]
        tails = {n: tail for n, v in enumerate(inner.outvars) if (tail := _tail(v, inner))}
        if not tails:
            return None
        ends = [tails[n][0].invars[0] if n in tails else v for n, v in enumerate(inner.outvars)]
        outs = site.bind(jaxpr=inner.replace(outvars=ends))
        for n, tail in tails.items():
            for eqn in tail:
                with at_source(eqn):
                    (outs[n],) = bind(eqn, [outs[n]], eqn.params)
        return outs

    return rewrite(body, rule)


def cut(body: Jaxpr, carry: int) -> Turn | None:
    """The body of a loop with `carry` carried values, cut; None where nothing can be done early or late."""
    held: set[Var] = set(body.invars[:carry])  # what depends on the turns before
    sent: set[Var] = set()  # what depends on a collective
    uses: dict[Var, list[JaxprEqn | None]] = {}
    for eqn in body.eqns:
        own = [v for v in eqn.invars if isinstance(v, Var)]
        for v in own:
            uses.setdefault(v, []).append(eqn)
        if not held.isdisjoint(own):
            held.update(eqn.outvars)
        if _sends(eqn) or not sent.isdisjoint(own):
            sent.update(eqn.outvars)
    for out in body.outvars:
        if isinstance(out, Var):
            uses.setdefault(out, []).append(None)
    fetched = [
        v
        for eqn in body.eqns
        for v in eqn.outvars
        if v in sent
        and v not in held
        and any(use is None or not held.isdisjoint(use.outvars) for use in uses.get(v, []))
    ]
    late: dict[int, Var] = {}
    for number, out in enumerate(body.outvars[carry:]):
        if out in held and (tail := _tail(out, body)):
            (before,) = tail[0].invars
            assert isinstance(before, Var)
            late[number] = before
    if any(map(has_effects, body.eqns)):
        return None
    return Turn(body, carry, tuple(fetched), late) if fetched or late else None


def _sends(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in COLLECTIVES or eqn.params.get("name") in RINGS


def _tail(v: Any, body: Jaxpr) -> list[JaxprEqn]:
    """The equations, in order, by which the result v of a body is scattered and nothing else: a scatter
    first.
    """
    makers = {out: eqn for eqn in body.eqns for out in eqn.outvars}
    uses = Counter(x for eqn in body.eqns for x in eqn.invars if isinstance(x, Var))
    uses.update(x for x in body.outvars if isinstance(x, Var))
    chain: list[JaxprEqn] = []
    last = 0
    while isinstance(v, Var) and v in makers and uses[v] == 1:
        eqn = makers[v]
        if len(eqn.invars) != 1 or len(eqn.outvars) != 1:
            break
        if _sends(eqn):
            last = len(chain) + 1
        elif eqn.primitive.name not in CARRIES_ON:
            break
        chain.append(eqn)
        (v,) = eqn.invars
    return chain[:last][::-1]


def looped(
    turn: Turn, init: Sequence[Value], xs: Sequence[Value], length: int, reverse: bool, unroll: int
) -> tuple[list[Value], list[Value]]:
    """The loop over the rows of `xs`, from `init`: what is carried in the end, and the stacked results."""
    body, carry = turn.body, turn.carry
    rows_of, results = body.invars[carry:], body.outvars[carry:]
    late = list(turn.late)
    now = [n for n in range(len(results)) if n not in turn.late]
    order = [length - 1 - i for i in range(length)] if reverse else list(range(length))
    step = -1 if reverse else 1

    def rows(i: Any) -> dict[Var, Value]:
        return {
            v: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False) for v, x in zip(rows_of, xs, strict=True)
        }

    def fetch(i: Any) -> list[Value]:
        return turn.run(rows(i), turn.fetched)

    def compute(
        i: Any, state: Sequence[Value], got: Sequence[Value]
    ) -> tuple[list[Value], list[Value], list[Value]]:
        known = rows(i) | dict(zip(body.invars[:carry], state, strict=True))
        known |= dict(zip(turn.fetched, got, strict=True))
        wanted = [*body.outvars[:carry], *(results[n] for n in now), *turn.late.values()]
        outs = turn.run(known, wanted)
        return outs[:carry], outs[carry : carry + len(now)], outs[carry + len(now) :]

    def scattered(before: Sequence[Value]) -> list[Value]:
        return turn.run(dict(zip(turn.late.values(), before, strict=True)), [results[n] for n in late])

    def put(stacks: Sequence[Value], values: Sequence[Value], i: Any) -> list[Value]:
        return [jax.lax.dynamic_update_index_in_dim(s, x, i, 0) for s, x in zip(stacks, values, strict=True)]

    def empty(numbers: Sequence[int]) -> list[Value]:
        types: list[Any] = [results[n].aval for n in numbers]
        return [jnp.zeros((length, *t.shape), t.dtype) for t in types]

    state, stacks, delayed = list(init), empty(now), empty(late)
    got, first = fetch(order[0]), 0
    before: list[Value] = []
    if late:  # the first turn, which has no gradients before it
        following = fetch(order[1])
        state, own, before = compute(order[0], state, got)
        stacks, got, first = put(stacks, own, order[0]), following, 1

    def one(held: Any, i: Any) -> tuple[Any, None]:
        state, stacks, delayed, got, before = held
        following = fetch(i + step)
        delayed = put(delayed, scattered(before), i - step) if late else delayed
        state, own, before = compute(i, state, got)
        return (state, put(stacks, own, i), delayed, following, before), None

    middle = jnp.asarray(order[first:-1], jnp.int32)
    held = (state, stacks, delayed, got, before)
    (state, stacks, delayed, got, before), _ = jax.lax.scan(one, held, middle, unroll=unroll)
    last = order[-1]
    delayed = put(delayed, scattered(before), order[-2]) if late else delayed
    state, own, before = compute(last, state, got)
    stacks = put(stacks, own, last)
    delayed = put(delayed, scattered(before), last) if late else delayed
    found = dict(zip(now, stacks, strict=True)) | dict(zip(late, delayed, strict=True))
    return state, [found[n] for n in range(len(results))]
