"""Experts that take turns, in a loop or one after the other, all at once instead.

    for e: y = y + g[:, e] f(x, w[e])           ->    y = y + sum_e g[:, e] f(x, w[e])
    for e: y = where(m[e], f(x, w[e]), y)       ->    y = sum_e where(m[e] and no later m, f(x, w[e]), 0)

What differs from turn to turn has the turns as a dimension in front: an entry of an array for each is the
array, arrays of their own are stacked, numbers are a range. It is not to be run so: it is what `dense` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xform.errors import Decline
from xform.experts.each import SUMS, AtOnce, Each, Emit, bound, is_zero, last_of, peeled, put, read_in, whole
from xform.experts.unrolled import unrolled
from xform.higher_order import bodies, is_plain_jit
from xform.raising.flat import View, dtype_of, flat
from xform.raising.loops import Loop, counts, loops
from xform.raising.placing import Claim
from xform.raising.sending import Product
from xform.trace import Atom, Literal, Value, Var, at_source

NEEDED = "an expert needs what another one makes"


@dataclasses.dataclass(frozen=True)
class Turns:
    """Experts that take turns, with the user's line; and what they are all at once, or why that cannot be."""

    line: str
    claim: Claim | None = None
    emit: Emit | None = None
    why: str = ""

    def within(self, scope: str) -> Claim:
        """The claim, its equations under a name."""
        claim, emit = self.claim, self.emit
        assert claim is not None and emit is not None
        return dataclasses.replace(claim, emit=lambda values: emit(values, scope))


def turns(view: View, products: Sequence[Product]) -> Iterator[Turns]:
    """The loops, written out or not, that products with the weights of one expert a turn are in."""
    here = {p.number for p in products if p.style == "loop"}
    for loop in loops(view):
        if loop.number in here:
            made = _looped(loop)
            own = (n for n, eqn in enumerate(loop.body.eqns) if eqn.primitive.name == "dot_general")
            line = next((loop.body.line(n) for n in own), view.line(loop.number))
            yield (
                Turns(line, why="an expert needs what another one makes")
                if made is None
                else Turns(line, *made)
            )
    todo = [p for p in products if p.style == "loop" and view.eqns[p.number].primitive.name == "dot_general"]
    while todo:
        group = [p for p in todo if p.keys & todo[0].keys]
        todo = [p for p in todo if p not in group]
        line = view.line(min(p.number for p in group))
        try:
            yield Turns(line, *unrolled(view, group))
        except Decline as why:
            yield Turns(line, why=str(why))


# ---------------------------------------------------------------- loops


def _looped(loop: Loop) -> AtOnce | None:
    """What a loop gives, of all turns at once; None where a turn needs what another one gives."""
    which = loop.body.place[-1][1]
    body = flat(bodies(loop.eqn)[which], calls=is_plain_jit)
    at = {v: n for n, v in enumerate(loop.body.jaxpr.invars)}
    same = dict(zip(loop.body.jaxpr.outvars, body.jaxpr.outvars, strict=True))
    inputs = {body.jaxpr.invars[at[v]]: given for v, given in loop.inputs.items()}
    counters: dict[Var, Literal] = {}
    sums: list[_Carried] = []
    for c in loop.carries:
        into = body.jaxpr.invars[at[c.into]]
        if counts(loop.body, c) and isinstance(c.initial, Literal):
            counters[into] = c.initial
        elif c.out is c.into:
            inputs[into] = (c.initial, False)
        elif isinstance(c.out, Var) and (added := _added(body, same[c.out], into)) is not None:
            sums.append(_Carried(*added, c.initial, c.final))
        else:
            return None
    return _Loop(loop, body, inputs, counters, sums).claim() if sums or loop.stacked else None


@dataclasses.dataclass(frozen=True)
class _Carried:
    """What a loop carries: `part` is added to it, or put in its place where `mask` holds."""

    part: Atom
    mask: Atom | None
    initial: Atom
    final: Var


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop of which no turn needs another. inputs: of the body, whether one a turn; counters: numbers."""

    loop: Loop
    body: View
    inputs: Mapping[Var, tuple[Atom, bool]]
    counters: Mapping[Var, Literal]
    sums: Sequence[_Carried]

    def claim(self) -> AtOnce | None:
        places = {v: n for n, v in enumerate(self.loop.body.jaxpr.outvars)}
        stacked = [(self.body.jaxpr.outvars[places[v]], final) for v, final in self.loop.stacked]
        wanted = [v for c in self.sums for v in (c.part, c.mask) if v is not None] + [v for v, _ in stacked]
        needs = sorted(self.body.ancestors(wanted))
        given = {*self.inputs, *self.counters, *self.body.constants}
        reads = [v for n in needs for v in self.body.eqns[n].invars] + wanted
        made = {v for n in needs for v in self.body.eqns[n].outvars}
        if any(isinstance(v, Var) and v not in given and v not in made for v in reads):
            return None
        finals = [c.final for c in self.sums] + [v for _, v in stacked]
        if any(self.loop.view.users.get(v) and v not in finals for v in self.loop.eqn.outvars):
            return None

        def emit(values: Mapping[Var, Value], scope: str) -> Mapping[Var, Value]:
            def read(v: Atom) -> Value:
                return v.val if isinstance(v, Literal) else values[v]

            env = self._inputs(read)
            for n in needs:
                eqn = self.body.eqns[n]
                with at_source(eqn, scope):
                    outs = bound(eqn, [read_in(env, v) for v in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))
            sums = {c.final: self._final(env, read, c) for c in self.sums}
            return sums | {v: whole(read_in(env, own), self.loop.length) for own, v in stacked}

        takes = dict.fromkeys(v for v in self.loop.eqn.invars if isinstance(v, Var))
        return Claim(self.loop.view, list(takes), finals, lambda values: emit(values, "")), emit

    def _inputs(self, read: Any) -> dict[Var, Each]:
        env = {v: Each(x) for v, x in self.body.constants.items()}
        env |= {v: Each(read(x), sliced) for v, (x, sliced) in self.inputs.items()}
        numbers = np.arange(self.loop.length)
        for v, first in self.counters.items():
            env[v] = Each((numbers + first.val).astype(dtype_of(v)), True)
        return env

    def _final(self, env: Mapping[Var, Each], read: Any, c: _Carried) -> Value:
        x = whole(read_in(env, c.part), self.loop.length)
        rest = None if is_zero(self.loop.view, c.initial) else read(c.initial)
        if c.mask is None:
            total = x.sum(0).astype(x.dtype)
            return total if rest is None else rest + total
        narrow, spread = peeled(self.body, c.mask)
        hits = whole(read_in(env, narrow), self.loop.length)
        return put(x, last_of(hits, self.loop.reverse), spread, rest)


def _added(body: View, out: Atom, into: Var) -> tuple[Atom, Atom | None] | None:
    """What is added to what is carried; or put in its place, and where."""
    eqn = body.maker(out)
    if eqn is None:
        return None
    if eqn.primitive.name in SUMS and eqn.invars.count(into) == 1:
        return eqn.invars[1 - eqn.invars.index(into)], None
    if eqn.primitive.name == "select_n" and len(eqn.invars) == 3 and eqn.invars[1] is into:
        return eqn.invars[2], eqn.invars[0]
    return None
