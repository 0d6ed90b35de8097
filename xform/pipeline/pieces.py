"""What a microbatch's program is cut into: stacks of layers, parts that run in stages, what is around them.

`cutting` makes these of a program; everything else in a pipeline reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform.derivative import reached
from xform.errors import Decline
from xform.higher_order import scan_parts
from xform.pipeline.arrays import is_floating
from xform.trace import Jaxpr, JaxprEqn, Var, shape_of

NO_STACK = (
    "no loop over layers was found: one that carries activations through weights of its own for each turn"
)
SMALL = 8
"""A loop with less than an eighth of the weights of the largest is no stack, but part of what is around."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """A loop over layers, in a microbatch's program. size: bytes of its weights."""

    eqn: JaxprEqn
    index: int
    size: int

    @property
    def body(self) -> Jaxpr:
        body: Jaxpr = self.eqn.params["jaxpr"]
        return body

    @property
    def layers(self) -> int:
        return int(self.eqn.params["length"])

    @property
    def parts(self) -> tuple[int, int]:
        """How many operands are the same for all layers, and how many are carried."""
        consts, carry, _ = scan_parts(self.eqn)
        return consts, carry

    @property
    def consts(self) -> Sequence[Any]:
        return self.eqn.invars[: self.parts[0]]

    @property
    def carried(self) -> Sequence[Any]:
        """What the first layer takes."""
        consts, carry = self.parts
        return self.eqn.invars[consts : consts + carry]

    @property
    def carry_types(self) -> list[Any]:
        consts, carry = self.parts
        return [v.aval for v in self.body.invars[consts : consts + carry]]

    @property
    def rows(self) -> Sequence[Any]:
        """What has a row for each layer."""
        return self.eqn.invars[sum(self.parts) :]


@dataclasses.dataclass(frozen=True)
class Part:
    """Layers that follow each other: a stack, or a single one that is before, between or after stacks.

    body: the program of one. sources: where each of its operands comes from, a kind and a number: of what
    travels ("z"), of `fixed` or `told`, a row a layer of `told_rows` ("told_row") or `fixed` ("row"); or a
    "literal" and its value. gives: the number in z of what each result becomes, or of that whose row it
    becomes, which are the last ones, `rows` of them. name: what it is, in the report.
    """

    body: Jaxpr
    layers: int
    reverse: bool
    sources: tuple[tuple[str, Any], ...]
    gives: tuple[int, ...]
    rows: int
    name: str
    stack: Stack | None = None


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The program of a microbatch, of inputs `same` (the same for all), `data` and its number `index`.

    fixed: variables that are made once of `same`, by `once`, and read in what follows. z: types of what
    travels, and what each is; enter gives the first of them, of (*fixed, *data, index), the others are
    written before they are read. told: what layers read that is made of data alone; told_rows, a row of it a
    layer: tell gives (*told, *told_rows) of the same. leave: the results, of those of z whose numbers are
    `leaves`, and (*fixed, *data, index). inside: whether the ends are parts; then enter shows what numbers
    come out of the first, and leave hands on.
    """

    parts: tuple[Part, ...]
    once: Jaxpr
    fixed: tuple[Var, ...]
    z: tuple[Any, ...]  # types
    what: tuple[str, ...]
    told: tuple[Var, ...]
    told_rows: tuple[Var, ...]
    enter: Jaxpr
    tell: Jaxpr
    leave: Jaxpr
    leaves: tuple[int, ...]
    inside: bool


def find_stacks(jaxpr: Jaxpr, same: int) -> tuple[list[Stack], list[Stack]]:
    """The loops over layers of a microbatch's program, whose first `same` inputs are the same for all, in the
    order in which they run; and those that are too small to be cut. Raises Decline where there is none.
    """
    fixed = made_of(jaxpr, jaxpr.invars[:same], jaxpr.invars[same:])
    weights = {v for v in jaxpr.invars[:same] if is_weight(v)}
    heavy = reached(jaxpr, weights)
    found: list[Stack] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan":
            continue
        consts, carry, _ = scan_parts(eqn)
        rows = [v for v in eqn.invars[consts + carry :] if v in fixed and v in heavy and len(shape_of(v)) > 1]
        moves = [v for v in eqn.outvars[:carry] if v not in fixed and is_floating(v.aval)]
        if rows and moves:
            found.append(Stack(eqn, i, sum(size_of(v.aval) for v in rows)))
    if not found:
        raise Decline(NO_STACK)
    least = max(stack.size for stack in found) / SMALL
    return [s for s in found if s.size >= least], [s for s in found if s.size < least]


def is_weight(v: Any) -> bool:
    """Whether what is the same for all microbatches may be a weight: floats that are no single number."""
    return bool(shape_of(v)) and is_floating(v.aval)


def size_of(aval: Any) -> int:
    """Bytes of a value of a type."""
    return math.prod(aval.shape) * int(getattr(aval.dtype, "itemsize", 1))


def made_of(jaxpr: Jaxpr, of: Iterable[Var], but: Iterable[Var]) -> set[Any]:
    """The variables that none of `but` goes into: those of `of`, constants, and what is made of them."""
    moving = reached(jaxpr, but)
    every = [*jaxpr.all_invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return {v for v in every if v not in moving} | set(of)
