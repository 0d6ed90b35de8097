"""What each value of a microbatch's program is made of, by dataflow.

`fixed`: of nothing of the microbatch. `told`: of its data alone, without weights, at little cost. `light`: of
these two, entry by entry. All else is an activation, and goes from stage to stage to where it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xform.axes.rules import ELEMENTWISE
from xform.batch.cut import COSTLY
from xform.derivative import reached
from xform.higher_order import bodies, equations
from xform.pipeline.pieces import Stack, is_weight, made_of
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Var, shape_of, source_line

LIGHT = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"} - {
    "random_gamma"
}
"""What costs little, of values that are there, beside sending its result on."""


class Origins:
    """jaxpr: a microbatch's program, whose first `same` inputs are the same for all. differentiated: numbers
    of inputs. stacks: its loops over layers, in order.
    """

    def __init__(
        self, jaxpr: Jaxpr, same: int, differentiated: Sequence[int], stacks: Sequence[Stack]
    ) -> None:
        self.jaxpr, self.stacks = jaxpr, stacks
        self.inputs, self.data = jaxpr.invars[:same], jaxpr.invars[same:]
        self.constant = made_of(jaxpr, (), self.data)
        moved = {jaxpr.invars[i] for i in differentiated}
        # a vector of which no gradient is wanted may be one of frequencies
        given = [v for v in (*self.inputs, *jaxpr.constvars) if is_weight(v) and len(shape_of(v)) > 1]
        heavy = {v for v in moved if v not in self.inputs or is_weight(v)} | set(given)
        self.heavy = reached(jaxpr, heavy)
        self.costly = reached(jaxpr, (v for e in jaxpr.eqns if _costs(e) for v in e.outvars))
        self.maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.there = self.constant | {v for v in (*self.data, *self.maker) if self.is_told(v)}
        self.light = self.lightly()
        self.levels = self.leveled()

    def is_fixed(self, v: Atom) -> bool:
        return isinstance(v, Literal) or v in self.constant

    def is_told(self, v: Any) -> bool:
        """Whether a value is made of the microbatch's data alone, at little cost."""
        return not self.is_fixed(v) and v not in self.heavy and v not in self.costly

    def travels(self, v: Any) -> bool:
        """Whether a value goes from stage to stage to where it is read."""
        return not self.is_fixed(v) and v not in self.there and v not in self.light

    def lightly(self) -> set[Any]:
        """What is made entry by entry of what is fixed and what the data tell."""
        found: set[Any] = set()
        for eqn in self.jaxpr.eqns:
            known = all(self.is_fixed(v) or v in self.there or v in found for v in eqn.invars)
            if known and eqn.primitive.name in LIGHT:
                found.update(v for v in eqn.outvars if v not in self.there)
        return found

    def sunk(self, vs: Iterable[Any]) -> list[int]:
        """The equations that make of these what is light, where it is read."""
        return self.upstream(filter(self.is_light, vs), self.there)

    def is_light(self, v: Any) -> bool:
        return isinstance(v, Var) and v in self.light

    def leveled(self) -> dict[Any, int]:
        """Of each value that layers go into, how many stacks are before it."""
        number = {id(stack.eqn): n + 1 for n, stack in enumerate(self.stacks)}
        levels: dict[Any, int] = {}
        for eqn in self.jaxpr.eqns:
            level = number.get(id(eqn), max((self.level(v, levels) for v in eqn.invars), default=0))
            levels.update((v, level) for v in eqn.outvars if level)
        return levels

    def level(self, v: Any, levels: dict[Any, int] | None = None) -> int:
        return 0 if isinstance(v, Literal) else (self.levels if levels is None else levels).get(v, 0)

    def made_by(self, v: Any) -> str:
        """The equation that makes a value, for a message."""
        if (made := self.maker.get(v)) is None:
            return "of the data"
        eqn = self.jaxpr.eqns[made]
        return f"by {eqn.primitive.name} ({source_line(eqn)})"

    def upstream(self, wanted: Iterable[Any], stop: set[Any]) -> list[int]:
        """The equations that make these, but for what is there already."""
        need = {v for v in wanted if isinstance(v, Var) and v not in stop}
        found = []
        for i in range(len(self.jaxpr.eqns) - 1, -1, -1):
            eqn = self.jaxpr.eqns[i]
            if any(v in need for v in eqn.outvars):
                found.append(i)
                need.update(v for v in eqn.invars if isinstance(v, Var) and v not in stop)
        return found[::-1]

    def made(self, numbers: Iterable[int]) -> set[Any]:
        """What equations make."""
        return {v for i in numbers for v in self.jaxpr.eqns[i].outvars}

    def reads(self, numbers: Sequence[int], gives: Iterable[Any] = ()) -> list[Var]:
        """What equations, and results, read that they do not make."""
        made = self.made(numbers)
        read = [*(v for i in numbers for v in self.jaxpr.eqns[i].invars), *gives]
        return list(dict.fromkeys(v for v in read if isinstance(v, Var) and v not in made))


def _costs(eqn: JaxprEqn) -> bool:
    inner = [e for body in bodies(eqn) for e in equations(body)]
    return any(e.primitive.name in COSTLY for e in (eqn, *inner))
