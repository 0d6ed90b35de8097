"""A microbatch's program cut at its stacks of layers: what comes before them, layers, what comes after them.

    z = embed(tokens, table)                enter    what goes into the first layer
    for w in layers: z = layer(z, w, m)     part     one turn of the loop; m from outside of it
    e, y = norm(z), table[targets]          part     what is between two stacks, a layer of its own
    for w in others: y = layer(y, e, w)     part     the second stack
    loss = head(y, labels, norm)            leave    what becomes of what the last one gives

What layers or the end take besides is one of these: `fixed`, made of nothing of the microbatch (weights,
tables of rotations): made once, before all microbatches, and given to every stage. `told`, made of the
microbatch's data alone, without weights (positions, masks, keys): each stage makes it of the data. What is
made of these two entry by entry, a bias of both, is `light`: each layer makes it again. Else it travels from
stage to stage with what layers carry (`xform.pipeline.travel`). What layers give one by one, a loss of each,
travels too, as rows that are filled on the way.

What is before the stacks and after them is computed outside of the stages, or is a part like the others
(`inside`), in the first block and in the last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform.axes.rules import ELEMENTWISE
from xform.batch.cut import COSTLY
from xform.errors import Decline
from xform.higher_order import bodies, equations, scan_parts
from xform.pipeline.arrays import is_floating
from xform.pipeline.travel import CARRIED, READ, ROWS, Travel
from xform.trace import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Value,
    Var,
    body_effects,
    inline,
    shape_of,
    source_line,
    trace_flat,
)

NO_STACK = (
    "no loop over layers was found: one that carries activations through weights of its own for each turn"
)
SMALL = 8
"""A loop with less than an eighth of the weights of the largest is no stack, but part of what is around."""

LIGHT = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"} - {
    "random_gamma"
}
"""What costs little, of values that are there, beside sending its result on."""


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


def cut(jaxpr: Jaxpr, same: int, differentiated: Sequence[int], inside: bool = False) -> Pieces:
    """A microbatch's program in its pieces. jaxpr: its inputs are `same` the same for all, then the data,
    then the number of the microbatch. differentiated: numbers of inputs. inside: whether the ends are parts.
    Raises Decline, with the user's line, where a stack cannot be cut.
    """
    return _Cut(jaxpr, same, differentiated).pieces(inside)


class _Cut:
    def __init__(self, jaxpr: Jaxpr, same: int, differentiated: Sequence[int]) -> None:
        self.jaxpr = jaxpr
        self.inputs, self.moving = jaxpr.invars[:same], jaxpr.invars[same:]
        self.stacks = find_stacks(jaxpr, same)[0]
        self.constant = made_of(jaxpr, (), self.moving)
        moved = {jaxpr.invars[i] for i in differentiated}
        # a vector of which no gradient is wanted may be one of frequencies
        given = [v for v in (*self.inputs, *jaxpr.constvars) if is_weight(v) and len(shape_of(v)) > 1]
        heavy = {v for v in moved if v not in self.inputs or is_weight(v)} | set(given)
        self.heavy = reached(jaxpr, heavy)
        self.costly = reached(jaxpr, (v for e in jaxpr.eqns if _costs(e) for v in e.outvars))
        self.maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        every = [*self.moving, *self.maker]
        self.there = self.constant | {v for v in every if self.is_told(v)}
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
        return {v for i in numbers for v in self.jaxpr.eqns[i].outvars}

    def reads(self, numbers: Sequence[int], gives: Iterable[Any] = ()) -> list[Var]:
        """What equations, and results, read that they do not make."""
        made = self.made(numbers)
        read = [*(v for i in numbers for v in self.jaxpr.eqns[i].invars), *gives]
        return list(dict.fromkeys(v for v in read if isinstance(v, Var) and v not in made))

    def pieces(self, inside: bool) -> Pieces:
        jaxpr, stacks = self.jaxpr, self.stacks
        for stack in stacks:
            self.check(stack)
        made = {v for stack in stacks for v in stack.eqn.outvars}
        there = made | self.constant | set(self.moving)
        # Before each stack, what it takes of what is made between it and the last one.
        needed = self.upstream([v for s in stacks for v in (*s.carried, *s.consts) if self.travels(v)], there)
        self.between = [
            [i for i in needed if self.level(jaxpr.eqns[i].outvars[0]) == n] for n in range(len(stacks))
        ]
        self.between = [sorted({*each, *self.sunk(self.reads(each))}) for each in self.between]
        self.after = [i for i in self.upstream(jaxpr.outvars, there) if i not in needed or self.again(i)]
        # What is there before the end, and the end needs too, rides along, but for what the data tell.
        there = (made | self.made(needed)) - self.made(self.after)
        self.last = [v for v in self.reads(self.after, jaxpr.outvars) if v in there]
        self.travel, self.first = self.begun()
        entering = self.upstream(
            [v for v in self.first if isinstance(v, Var)], self.constant | set(self.moving)
        )
        self.told, self.told_rows = self.of_data(entering if inside else [], self.after if inside else [])
        tell = self.upstream([*self.told, *self.told_rows], self.constant | set(self.moving))
        sunk = [i for stack in stacks for i in self.sunk(stack.consts)]
        read = [v for i in (*needed, *entering, *tell, *sunk, *self.after) for v in jaxpr.eqns[i].invars]
        read += [v for s in stacks for v in s.eqn.invars] + [*jaxpr.outvars, *self.first]
        self.fixed = tuple(dict.fromkeys(v for v in read if isinstance(v, Var) and v in self.constant))
        self.pure(jaxpr.eqns[i] for i in (*needed, *entering, *tell, *self.after))
        parts = self.parts()
        ends, leaves = self.last, tuple(self.travel.place[v] for v in self.last)
        data = [*self.fixed, *self.moving]
        enter = self.program(entering, data, self.first)
        leave = self.program(self.after, [*ends, *data], jaxpr.outvars)
        if inside:
            parts = [self.entrance(entering), *parts, self.exit()]
            leaves = parts[-1].gives
            types = [self.travel.types[n] for n in leaves] + [v.aval for v in data]
            leave = trace_flat(lambda *args: args[: len(leaves)], types, "leave")
        return Pieces(
            tuple(parts),
            self.program(self.upstream(self.fixed, set(self.inputs)), self.inputs, self.fixed),
            self.fixed,
            tuple(self.travel.types),
            tuple(self.travel.what),
            self.told,
            self.told_rows,
            enter,
            self.program(tell, data, [*self.told, *self.told_rows]),
            leave,
            leaves,
            inside,
        )

    def check(self, stack: Stack) -> None:
        """Raises Decline where layers differ by what is no weight, or do more than compute."""
        for v in stack.rows:
            if self.travels(v):
                raise Decline(
                    "the loop over layers goes through something that activations are made into, made"
                    f" {_made(self, v)}: give all layers the same, or make it of weights alone"
                )
        self.pure(equations(stack.body))

    def pure(self, eqns: Iterable[JaxprEqn]) -> None:
        if (at := next((e for e in eqns if e.effects), None)) is not None:
            raise Decline(
                f"{at.primitive.name} has an effect, and a schedule runs it otherwise ({source_line(at)})"
            )

    def again(self, i: int) -> bool:
        """Whether an equation that both ends need is done in both."""
        return not any(self.travels(v) for v in self.jaxpr.eqns[i].outvars)

    # What travels, and what is made of data

    def begun(self) -> tuple[Travel, list[Any]]:
        """What travels as it begins, and the values that do: what loops carry that is no layer's, and what is
        read of what is before the first. Times: 2 n + 1 is the n-th stack, 2 n what is before it.
        """
        read: dict[Any, int] = {}
        carried: dict[Any, int] = {}
        for n, stack in enumerate(self.stacks):
            before = self.reads(self.between[n]) if n else []
            read.update((v, 2 * n) for v in before if self.travels(v))
            read.update((v, 2 * n + 1) for v in stack.consts if self.travels(v))
            carried.update((v, 2 * n + 1) for v in stack.carried if self.level(v))
        read.update((v, 2 * len(self.stacks)) for v in self.last)
        travel, first = Travel(read, carried), []
        self.begins: list[dict[int, int]] = [{} for _ in self.stacks]
        for n, stack in enumerate(self.stacks):
            for k, (v, aval) in enumerate(zip(stack.carried, stack.carry_types, strict=True)):
                if not self.level(v):
                    self.begins[n][k] = travel.new(aval, CARRIED, 2 * n + 1)
                    first.append(v)
        for v in read:
            if not self.level(v):
                travel.make(v, READ, -1)
                first.append(v)
        return travel, first

    def of_data(self, *ends: Sequence[int]) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        """What parts read that the data tell, and that of which each layer reads a row."""
        read = [v for s in self.stacks for v in (*s.consts, *self.reads(self.sunk(s.consts)))]
        read += [v for eqns in self.between[1:] for v in self.reads(eqns)]
        read += [v for eqns in ends for v in self.reads(eqns, self.first if eqns is ends[0] else ())]
        rows = [v for stack in self.stacks for v in stack.rows]
        told, told_rows = ([v for v in vs if isinstance(v, Var) and self.is_told(v)] for vs in (read, rows))
        return tuple(dict.fromkeys(told)), tuple(dict.fromkeys(told_rows))

    # Parts

    def parts(self) -> list[Part]:
        found = []
        for n, stack in enumerate(self.stacks):
            if n and (part := self.middle(n)) is not None:
                found.append(part)
            found.append(self.layers(n, stack))
        return found

    def middle(self, n: int) -> Part | None:
        """What is made before a stack of what the ones before have given."""
        travel, stack = self.travel, self.stacks[n]
        takes = self.reads(self.between[n])
        gives: dict[int, Any] = {}
        made = [v for i in self.between[n] for v in self.jaxpr.eqns[i].outvars if travel.needed(v) > 2 * n]
        sources = [self.source(v) for v in takes]
        for v in made:
            gives[travel.make(v, READ, 2 * n)] = v
        for k, v in enumerate(stack.carried):
            if self.level(v):
                place, copied = travel.begin(v, stack.carry_types[k], 2 * n + 1, self.begins[n].values())
                if copied:
                    if v not in made and v not in takes:
                        takes.append(v)
                        sources.append(("z", travel.place[v]))
                    gives[place] = v
                self.begins[n][k] = place
        if not gives:
            return None
        body = self.program(self.between[n], takes, gives.values())
        name = f"what is before the stack of {stack.layers} layers"
        return Part(body, 1, False, tuple(sources), tuple(gives), 0, name)

    def layers(self, n: int, stack: Stack) -> Part:
        travel, (_, carry) = self.travel, stack.parts
        body, consts = self.body(stack)
        places = [self.begins[n][k] for k in range(carry)]
        sources = [*map(self.source, consts), *(("z", place) for place in places)]
        sources += [self.source(v, row=True) for v in stack.rows]
        outs = stack.eqn.outvars
        for v, place in zip(outs, places, strict=False):
            travel.becomes(v, place)
        for v, row in zip(outs[carry:], stack.body.outvars[carry:], strict=True):
            places.append(travel.new(row.aval.update(shape=(stack.layers, *row.aval.shape)), ROWS, 0))
            travel.becomes(v, places[-1])
        name, backwards = f"{stack.layers} layers", bool(stack.eqn.params["reverse"])
        rows = len(outs) - carry
        return Part(body, stack.layers, backwards, tuple(sources), tuple(places), rows, name, stack)

    def body(self, stack: Stack) -> tuple[Jaxpr, list[Any]]:
        """A layer that makes what is light itself, and what it takes in the place of the loop's constants."""
        sunk, count = self.sunk(stack.consts), stack.parts[0]
        if not sunk:
            return stack.body, list(stack.consts)
        takes = self.reads(sunk)
        light = [v for v in stack.consts if self.is_light(v)]
        others = [v for v in stack.consts if not self.is_light(v)]
        made = self.program(sunk, takes, light)

        def layer(*args: Value) -> list[Value]:
            given, rest = args[: len(takes)], args[len(takes) :]
            values = iter(inline(made, *given)), iter(rest[: len(others)])
            consts = [next(values[not self.is_light(v)]) for v in stack.consts]
            return inline(stack.body, *consts, *rest[len(others) :])

        types = [v.aval for v in (*takes, *others, *stack.body.invars[count:])]
        return trace_flat(layer, types, "layer"), [*takes, *others]

    def entrance(self, entering: Sequence[int]) -> Part:
        """What is before the first stack as a layer."""
        takes = self.reads(entering, self.first)
        self.no_gradient(takes)
        body = self.program(entering, takes, self.first)
        gives = tuple(range(len(self.first)))
        return Part(body, 1, False, tuple(map(self.source, takes)), gives, 0, "what is before the layers")

    def exit(self) -> Part:
        """What is after the last stack as a layer."""
        takes, outs = self.reads(self.after, self.jaxpr.outvars), self.jaxpr.outvars
        self.no_gradient([v for v in takes if v not in self.last])
        body = self.program(self.after, takes, outs)
        sources = tuple(("z", self.travel.place[v]) if v in self.last else self.source(v) for v in takes)
        gives = tuple(self.travel.new(v.aval, READ, 0) for v in outs)
        return Part(body, 1, False, sources, gives, 0, "what is after the layers")

    def no_gradient(self, takes: Iterable[Var]) -> None:
        if any(v in self.moving and self.travels(v) for v in takes):
            raise Decline(
                "gradients of the data are wanted, which the ends of the stack have outside of the stages"
                ' alone: pipeline.ends = "outside"'
            )

    def source(self, v: Any, row: bool = False) -> tuple[str, Any]:
        """Where a part finds what it reads."""
        if isinstance(v, Literal):
            return "literal", v.val
        if v in self.constant:
            return ("row" if row else "fixed"), self.fixed.index(v)
        if row:
            return "told_row", self.told_rows.index(v)
        return ("told", self.told.index(v)) if self.is_told(v) else ("z", self.travel.place[v])

    def program(self, numbers: Sequence[int], takes: Sequence[Any], gives: Iterable[Any]) -> Jaxpr:
        jaxpr, gives = self.jaxpr, list(gives)
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
            outvars=gives,
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
