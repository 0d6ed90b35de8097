"""What the loop of a recurrence computes in each step besides the state: all steps at once.

    for each t:                                     k = vmap f x
        k = f x[t]; S = a S + k v                ->     o = the recurrence of k, v, q
        y[t] = g (q S) x[t]                             y = vmap g o x

A part of the loop's body that does not follow from the state is the same function of every step's slices, so
it is mapped over them. What follows from what is read of the state, and from nothing else of it, is mapped
over what the kernel gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from xform.errors import Decline
from xform.raising.flat import dtype_of
from xform.raising.loops import Carry, Loop, counts, loops
from xform.raising.meaning import Raised, Recurrence
from xform.trace import Atom, DropVar, Jaxpr, Literal, Value, Var, eval_jaxpr, has_effects


class Steps:
    """The steps of a recurrence's loop. Raises Decline where what is taken or given follows from what the
    loop carries.

    wanted: values of the loop's body that the recurrence takes.
    """

    def __init__(self, r: Raised, wanted: Sequence[Var]) -> None:
        m = r.meaning
        assert isinstance(m, Recurrence) and m.step is not None
        self.view, self.wanted = m.step, list(dict.fromkeys(wanted))
        self.loop: Loop = next(each for each in loops(r.view) if each.number == r.number)
        read = None if m.read is None else m.read.atom
        self.read: Var | None = read if isinstance(read, Var) else None
        self.counters = {c.into: c for c in self.loop.carries if counts(self.loop.body, c)}
        self.before = self._part(self.wanted)
        self.stacked: list[tuple[Atom, Var]] = []
        if self.read is not None:
            outs = self.view.jaxpr.outvars[len(self.loop.carries) :]
            pairs = zip(outs, self.loop.stacked, strict=True)
            self.stacked = [(mine, var) for mine, (_, var) in pairs if not isinstance(var, DropVar)]
            self._check_results(m)
            self.after = self._part([atom for atom, _ in self.stacked], self.read)

    @property
    def takes(self) -> list[Var]:
        """What the loop takes."""
        return [v for v in self.loop.eqn.invars if isinstance(v, Var)]

    @property
    def gives(self) -> list[Var]:
        """What follows from what is read of the state."""
        return [var for _, var in self.stacked]

    def first(self, values: Mapping[Var, Value]) -> dict[Var, Value]:
        """Each of `wanted` with a dimension of steps in front, in the order of the loop's slices."""
        made = self._mapped(self.before, values, ())
        return dict(zip(self.wanted, made, strict=True))

    def last(self, values: Mapping[Var, Value], read: Value) -> dict[Var, Value]:
        """Each of `gives`, of what the body reads of the state, a dimension of steps in front of both."""
        made = self._mapped(self.after, values, (read,))
        return dict(zip(self.gives, made, strict=True))

    def _check_results(self, m: Recurrence) -> None:
        finals = [c.final for c in self.loop.carries if not isinstance(c.final, DropVar)]
        used = [v for v in finals if v in self.loop.view.users and (m.final is None or v is not m.final.atom)]
        if used or not self.loop.stacked:
            raise Decline("its loop gives more than its state and what is stacked of each step")

    def _part(self, outs: Sequence[Atom], read: Var | None = None) -> tuple[Jaxpr, list[Var]]:
        """The part of the body that makes `outs`, as a program, and its inputs; `read` is the first."""
        body = self.view.jaxpr
        numbers = sorted(self.view.ancestors(outs, lambda v: v is read))
        eqns = [body.eqns[n] for n in numbers]
        if any(map(has_effects, eqns)):
            raise Decline("what it takes or gives is computed with side effects")
        made = {v for eqn in eqns for v in eqn.outvars}
        needed = [a for eqn in eqns for a in eqn.invars] + list(outs)
        inputs = [v for v in dict.fromkeys(a for a in needed if isinstance(a, Var)) if v not in made]
        for v in inputs:
            if v is not read and not (
                v in self.loop.inputs or v in self.counters or v in self.view.constants
            ):
                raise Decline("what it takes or gives in a step follows from what its loop carries")
        inputs = [*([read] if read is not None else []), *(v for v in inputs if v is not read)]
        info = body.debug_info.with_unknown_names()
        jaxpr = body.replace(
            constvars=[], consts=[], invars=inputs, outvars=list(outs), eqns=eqns, debug_info=info
        )
        return jaxpr, inputs

    def _mapped(
        self, part: tuple[Jaxpr, list[Var]], values: Mapping[Var, Value], given: tuple[Value, ...]
    ) -> Sequence[Value]:
        jaxpr, inputs = part
        pairs = [self._input(v, values) for v in inputs[len(given) :]]
        args, axes = [*given, *(x for x, _ in pairs)], [*[0] * len(given), *(axis for _, axis in pairs)]
        made: Sequence[Value] = jax.vmap(
            lambda *xs: eval_jaxpr(jaxpr, *xs), axes, axis_size=self.loop.length
        )(*args)
        return made

    def _input(self, v: Var, values: Mapping[Var, Value]) -> tuple[Value, int | None]:
        """The value of an input of the body, and the dimension along which steps take slices."""
        if v in self.view.constants:
            return self.view.constants[v], None
        if v in self.counters:
            return self._counted(self.counters[v], values), 0
        atom, timed = self.loop.inputs[v]
        return _value(atom, values), 0 if timed else None

    def _counted(self, carry: Carry, values: Mapping[Var, Value]) -> Value:
        steps = jnp.arange(self.loop.length, dtype=dtype_of(carry.into))
        return _value(carry.initial, values) + (steps[::-1] if self.loop.reverse else steps)


def _value(atom: Atom, values: Mapping[Var, Value]) -> Value:
    return atom.val if isinstance(atom, Literal) else values[atom]
