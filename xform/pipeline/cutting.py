"""A microbatch's program cut at its stack of layers: what comes before it, one layer, what comes after it.

    z = embed(tokens, table)               enter    what goes into the first layer
    for w in layers: z = layer(z, w, m)    layer    one turn of the loop; m from outside of it
    loss = head(z, labels, norm)           leave    what becomes of what the last one gives

What a layer or the end takes besides is one of these: `fixed`, made of nothing of the microbatch (weights,
tables of rotations): made once, before all microbatches, and given to every stage. `told`, made of the
microbatch's data alone, without weights (positions, masks, keys): each stage makes it of the data. Else it
travels from stage to stage with what the layers carry (`rider`). What layers give one by one, a loss of each,
travels too, as rows that are filled on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform.batch.cut import COSTLY
from xform.errors import Decline
from xform.higher_order import bodies, equations, scan_parts
from xform.pipeline.arrays import is_floating
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Var, body_effects, shape_of, source_line

NO_STACK = (
    "no loop over layers was found: one that carries activations through weights of its own for each turn"
)


@dataclasses.dataclass(frozen=True)
class Stack:
    """The loop over layers, in a microbatch's program. What layers read besides what they carry, `consts`
    and `rows`, is split by where it comes from: numbers of the loop's operands.
    """

    eqn: JaxprEqn
    index: int

    @property
    def body(self) -> Jaxpr:
        body: Jaxpr = self.eqn.params["jaxpr"]
        return body

    @property
    def layers(self) -> int:
        return int(self.eqn.params["length"])

    @property
    def reverse(self) -> bool:
        return bool(self.eqn.params["reverse"])

    @property
    def parts(self) -> tuple[int, int]:
        """How many operands are the same for all layers, and how many are carried."""
        consts, carry, _ = scan_parts(self.eqn)
        return consts, carry


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The program of a microbatch, of inputs `same` (the same for all), `data` and its number `index`.

    fixed: variables that are made once of `same`, by `once`, and read in what follows. carried: what the
    first layer takes. riders: what travels unchanged with it. `told`: what layers read that is made of data
    alone; told_rows, a row of it a layer. ys: types of what one layer gives besides. enter gives (*carried,
    *riders) of (*fixed, *data, index); tell gives (*told, *told_rows) of the same; leave the results of
    (*carried, *ys, *riders, *fixed, *data, index). of_layer: where each operand of the loop comes from.
    """

    stack: Stack
    once: Jaxpr
    fixed: tuple[Var, ...]
    carried: tuple[Any, ...]  # types
    riders: tuple[Var, ...]
    told: tuple[Var, ...]
    told_rows: tuple[Var, ...]
    ys: tuple[Any, ...]  # types of what one layer gives
    enter: Jaxpr
    tell: Jaxpr
    leave: Jaxpr
    of_layer: tuple[tuple[str, int], ...]  # where each operand of the layer's body comes from


def find_stacks(jaxpr: Jaxpr, same: int) -> list[Stack]:
    """The loops over layers of a microbatch's program, whose first `same` inputs are the same for all; the
    one with the most weights first. Raises Decline where there is none.
    """
    fixed = made_of(jaxpr, jaxpr.invars[:same], jaxpr.invars[same:])
    weights = {v for v in jaxpr.invars[:same] if is_weight(v)}
    heavy = reached(jaxpr, weights)
    found: list[tuple[int, Stack]] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan":
            continue
        consts, carry, _ = scan_parts(eqn)
        rows = [v for v in eqn.invars[consts + carry :] if v in fixed and v in heavy and len(shape_of(v)) > 1]
        moves = [v for v in eqn.outvars[:carry] if v not in fixed and is_floating(v.aval)]
        if rows and moves:
            found.append((sum(size_of(v.aval) for v in rows), Stack(eqn, i)))
    if not found:
        raise Decline(NO_STACK)
    return [stack for _, stack in sorted(found, key=lambda each: (-each[0], each[1].index))]


def is_weight(v: Any) -> bool:
    """Whether what is the same for all microbatches may be a weight: floats that are no single number."""
    return bool(shape_of(v)) and is_floating(v.aval)


def size_of(aval: Any) -> int:
    """Bytes of a value of a type."""
    return math.prod(aval.shape) * int(getattr(aval.dtype, "itemsize", 1))


def reached(jaxpr: Jaxpr, start: Iterable[Var]) -> set[Var]:
    """The variables that depend on these, themselves among them."""
    found = set(start)
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def made_of(jaxpr: Jaxpr, of: Iterable[Var], but: Iterable[Var]) -> set[Any]:
    """The variables that none of `but` goes into: those of `of`, constants, and what is made of them."""
    moving = reached(jaxpr, but)
    every = [*jaxpr.all_invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return {v for v in every if v not in moving} | set(of)


def cut(jaxpr: Jaxpr, same: int, differentiated: Sequence[int]) -> Pieces:
    """A microbatch's program in its pieces. jaxpr: its inputs are `same` the same for all, then the data,
    then the number of the microbatch. differentiated: numbers of inputs. Raises Decline, with the user's
    line, where the stack cannot be cut.
    """
    return _Cut(jaxpr, same, differentiated).pieces()


class _Cut:
    def __init__(self, jaxpr: Jaxpr, same: int, differentiated: Sequence[int]) -> None:
        self.jaxpr = jaxpr
        self.inputs, self.moving = jaxpr.invars[:same], jaxpr.invars[same:]
        self.stack = find_stacks(jaxpr, same)[0]
        self.fixed = made_of(jaxpr, (), self.moving)
        moved = {jaxpr.invars[i] for i in differentiated}
        # a vector of which no gradient is wanted may be one of frequencies
        given = [v for v in (*self.inputs, *jaxpr.constvars) if is_weight(v) and len(shape_of(v)) > 1]
        heavy = {v for v in moved if v not in self.inputs or is_weight(v)} | set(given)
        self.heavy = reached(jaxpr, heavy)
        self.costly = reached(jaxpr, (v for e in jaxpr.eqns if _costs(e) for v in e.outvars))
        self.maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}

    def is_fixed(self, v: Atom) -> bool:
        return isinstance(v, Literal) or v in self.fixed

    def is_told(self, v: Any) -> bool:
        """Whether a value is made of the microbatch's data alone, at little cost."""
        return not self.is_fixed(v) and v not in self.heavy and v not in self.costly

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

    def pieces(self) -> Pieces:
        jaxpr, stack, eqn = self.jaxpr, self.stack, self.stack.eqn
        consts, carry = stack.parts
        for v in eqn.invars[consts + carry :]:
            if not self.is_fixed(v) and not self.is_told(v):
                raise Decline(
                    "the loop over layers goes through something that activations are made into, made"
                    f" {_made(self, v)}: give all layers the same, or make it of weights alone"
                )
        first = list(eqn.invars[consts : consts + carry])
        others = [v for v in eqn.invars[:consts] if isinstance(v, Var) and not self.is_fixed(v)]
        shared = [v for v in others if not self.is_told(v)]
        there = set(eqn.outvars) | self.fixed | set(self.moving)
        after = self.upstream(jaxpr.outvars, there)
        made_after = {v for i in after for v in jaxpr.eqns[i].outvars}
        # What is there before the stack, and the end needs too, rides along, but for what the data tell.
        before = set(self.upstream([*first, *shared], self.fixed | set(self.moving)))
        after = [i for i in after if i not in before or self._again(i)]
        kept = {v for i in after for v in jaxpr.eqns[i].outvars}
        reads = [v for i in after for v in jaxpr.eqns[i].invars if isinstance(v, Var)]
        reads += [v for v in jaxpr.outvars if isinstance(v, Var)]
        skips = [v for v in reads if v in made_after and v not in kept]
        riders = tuple(dict.fromkeys([*shared, *skips]))
        told = tuple(dict.fromkeys(v for v in others if self.is_told(v)))
        told_rows = tuple(
            dict.fromkeys(v for v in eqn.invars[consts + carry :] if isinstance(v, Var) and self.is_told(v))
        )
        enter = self.upstream([*first, *riders], self.fixed | set(self.moving))
        tell = self.upstream([*told, *told_rows], self.fixed | set(self.moving))
        used = [v for i in (*enter, *tell, *after) for v in jaxpr.eqns[i].invars]
        used += [*eqn.invars, *jaxpr.outvars, *riders]
        fixed = tuple(dict.fromkeys(v for v in used if isinstance(v, Var) and v in self.fixed))
        once = self.upstream(fixed, set(self.inputs))
        inside = [*(jaxpr.eqns[i] for i in (*enter, *tell, *after)), *equations(stack.body)]
        if (at := next((e for e in inside if e.effects), None)) is not None:
            raise Decline(
                f"{at.primitive.name} has an effect, and a schedule runs it otherwise ({source_line(at)})"
            )
        data = list(self.moving)
        carried_out, ys = eqn.outvars[:carry], eqn.outvars[carry:]
        return Pieces(
            stack,
            self._program(once, self.inputs, fixed),
            fixed,
            tuple(v.aval for v in stack.body.invars[consts : consts + carry]),
            riders,
            told,
            told_rows,
            tuple(v.aval for v in stack.body.outvars[carry:]),
            self._program(enter, [*fixed, *data], [*first, *riders]),
            self._program(tell, [*fixed, *data], [*told, *told_rows]),
            self._program(after, [*carried_out, *ys, *riders, *fixed, *data], jaxpr.outvars),
            tuple(self._source(v, n, (fixed, riders, told, told_rows)) for n, v in enumerate(eqn.invars)),
        )

    def _again(self, i: int) -> bool:
        """Whether an equation that both ends need is done in both."""
        return all(self.is_told(v) for v in self.jaxpr.eqns[i].outvars)

    def _source(self, v: Any, n: int, known: Sequence[Sequence[Var]]) -> tuple[str, int]:
        """Where an operand of the loop comes from: of what is known, which, and its number there."""
        fixed, riders, told, told_rows = known
        consts, carry = self.stack.parts
        if consts <= n < consts + carry:
            return "carried", n - consts
        if isinstance(v, Literal):
            return "literal", n
        row = n >= consts + carry
        if v in self.fixed:
            return ("row" if row else "fixed"), fixed.index(v)
        if row:
            return "told_row", told_rows.index(v)
        return ("told", told.index(v)) if v in told else ("rider", riders.index(v))

    def _program(self, numbers: Sequence[int], takes: Sequence[Any], gives: Sequence[Any]) -> Jaxpr:
        jaxpr = self.jaxpr
        eqns = [jaxpr.eqns[i] for i in numbers]
        read = {v for eqn in eqns for v in eqn.invars if isinstance(v, Var)} | {
            v for v in gives if isinstance(v, Var)
        }
        consts = [
            (v, c) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True) if v in read and v not in takes
        ]
        made = jaxpr.replace(
            constvars=[v for v, _ in consts],
            consts=[c for _, c in consts],
            invars=list(takes),
            outvars=list(gives),
            eqns=eqns,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        return made.replace(effects=body_effects(made))


def _costs(eqn: JaxprEqn) -> bool:
    inner = [e for body in bodies(eqn) for e in equations(body)]
    return any(e.primitive.name in COSTLY for e in (eqn, *inner))


def _made(cut: _Cut, v: Any) -> str:
    made = cut.maker.get(v)
    if made is None:
        return "of the data"
    eqn = cut.jaxpr.eqns[made]
    return f"by {eqn.primitive.name} ({source_line(eqn)})"
