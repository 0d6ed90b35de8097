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

from collections.abc import Iterable, Sequence
from typing import Any

from xform.errors import Decline
from xform.higher_order import equations
from xform.pipeline.origins import Origins
from xform.pipeline.pieces import Part, Pieces, Stack, find_stacks
from xform.pipeline.travel import CARRIED, READ, ROWS, Travel
from xform.trace import Jaxpr, JaxprEqn, Literal, Value, Var, body_effects, inline, source_line, trace_flat


def cut(jaxpr: Jaxpr, same: int, differentiated: Sequence[int], inside: bool = False) -> Pieces:
    """A microbatch's program in its pieces. jaxpr: its inputs are `same` the same for all, then the data,
    then the number of the microbatch. differentiated: numbers of inputs. inside: whether the ends are parts.
    Raises Decline, with the user's line, where a stack cannot be cut.
    """
    return _Cut(jaxpr, same, differentiated).pieces(inside)


class _Cut:
    def __init__(self, jaxpr: Jaxpr, same: int, differentiated: Sequence[int]) -> None:
        self.jaxpr = jaxpr
        self.stacks = find_stacks(jaxpr, same)[0]
        self.of = Origins(jaxpr, same, differentiated, self.stacks)

    def pieces(self, inside: bool) -> Pieces:
        jaxpr, stacks = self.jaxpr, self.stacks
        for stack in stacks:
            self.check(stack)
        made = {v for stack in stacks for v in stack.eqn.outvars}
        there = made | self.of.constant | set(self.of.data)
        # Before each stack, what it takes of what is made between it and the last one.
        needed = self.of.upstream(
            [v for s in stacks for v in (*s.carried, *s.consts) if self.of.travels(v)], there
        )
        self.between = [
            [i for i in needed if self.of.level(jaxpr.eqns[i].outvars[0]) == n] for n in range(len(stacks))
        ]
        self.between = [sorted({*each, *self.of.sunk(self.of.reads(each))}) for each in self.between]
        self.after = [i for i in self.of.upstream(jaxpr.outvars, there) if i not in needed or self.again(i)]
        # What is there before the end, and the end needs too, rides along, but for what the data tell.
        there = (made | self.of.made(needed)) - self.of.made(self.after)
        self.last = [v for v in self.of.reads(self.after, jaxpr.outvars) if v in there]
        self.travel, self.first = self.begun()
        entering = self.of.upstream(
            [v for v in self.first if isinstance(v, Var)], self.of.constant | set(self.of.data)
        )
        self.told, self.told_rows = self.of_data(entering if inside else [], self.after if inside else [])
        tell = self.of.upstream([*self.told, *self.told_rows], self.of.constant | set(self.of.data))
        sunk = [i for stack in stacks for i in self.of.sunk(stack.consts)]
        read = [v for i in (*needed, *entering, *tell, *sunk, *self.after) for v in jaxpr.eqns[i].invars]
        read += [v for s in stacks for v in s.eqn.invars] + [*jaxpr.outvars, *self.first]
        self.fixed = tuple(dict.fromkeys(v for v in read if isinstance(v, Var) and v in self.of.constant))
        self.pure(jaxpr.eqns[i] for i in (*needed, *entering, *tell, *self.after))
        parts = self.parts()
        ends, leaves = self.last, tuple(self.travel.place[v] for v in self.last)
        data = [*self.fixed, *self.of.data]
        enter = self.program(entering, data, self.first)
        leave = self.program(self.after, [*ends, *data], jaxpr.outvars)
        if inside:
            parts = [self.entrance(entering), *parts, self.exit()]
            leaves = parts[-1].gives
            types = [self.travel.types[n] for n in leaves] + [v.aval for v in data]
            leave = trace_flat(lambda *args: args[: len(leaves)], types, "leave")
        return Pieces(
            tuple(parts),
            self.program(self.of.upstream(self.fixed, set(self.of.inputs)), self.of.inputs, self.fixed),
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
            if self.of.travels(v):
                raise Decline(
                    "the loop over layers goes through something that activations are made into, made"
                    f" {self.of.made_by(v)}: give all layers the same, or make it of weights alone"
                )
        self.pure(equations(stack.body))

    def pure(self, eqns: Iterable[JaxprEqn]) -> None:
        if (at := next((e for e in eqns if e.effects), None)) is not None:
            raise Decline(
                f"{at.primitive.name} has an effect, and a schedule runs it otherwise ({source_line(at)})"
            )

    def again(self, i: int) -> bool:
        """Whether an equation that both ends need is done in both."""
        return not any(self.of.travels(v) for v in self.jaxpr.eqns[i].outvars)

    # What travels, and what is made of data

    def begun(self) -> tuple[Travel, list[Any]]:
        """What travels as it begins, and the values that do: what loops carry that is no layer's, and what is
        read of what is before the first. Times: 2 n + 1 is the n-th stack, 2 n what is before it.
        """
        read: dict[Any, int] = {}
        carried: dict[Any, int] = {}
        for n, stack in enumerate(self.stacks):
            before = self.of.reads(self.between[n]) if n else []
            read.update((v, 2 * n) for v in before if self.of.travels(v))
            read.update((v, 2 * n + 1) for v in stack.consts if self.of.travels(v))
            carried.update((v, 2 * n + 1) for v in stack.carried if self.of.level(v))
        read.update((v, 2 * len(self.stacks)) for v in self.last)
        travel, first = Travel(read, carried), []
        self.begins: list[dict[int, int]] = [{} for _ in self.stacks]
        for n, stack in enumerate(self.stacks):
            for k, (v, aval) in enumerate(zip(stack.carried, stack.carry_types, strict=True)):
                if not self.of.level(v):
                    self.begins[n][k] = travel.new(aval, CARRIED, 2 * n + 1)
                    first.append(v)
        for v in read:
            if not self.of.level(v):
                travel.make(v, READ, -1)
                first.append(v)
        return travel, first

    def of_data(self, *ends: Sequence[int]) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        """What parts read that the data tell, and that of which each layer reads a row."""
        read = [v for s in self.stacks for v in (*s.consts, *self.of.reads(self.of.sunk(s.consts)))]
        read += [v for eqns in self.between[1:] for v in self.of.reads(eqns)]
        read += [v for eqns in ends for v in self.of.reads(eqns, self.first if eqns is ends[0] else ())]
        rows = [v for stack in self.stacks for v in stack.rows]
        told, told_rows = (
            [v for v in vs if isinstance(v, Var) and self.of.is_told(v)] for vs in (read, rows)
        )
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
        takes = self.of.reads(self.between[n])
        gives: dict[int, Any] = {}
        made = [v for i in self.between[n] for v in self.jaxpr.eqns[i].outvars if travel.needed(v) > 2 * n]
        sources = [self.source(v) for v in takes]
        for v in made:
            gives[travel.make(v, READ, 2 * n)] = v
        for k, v in enumerate(stack.carried):
            if self.of.level(v):
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
            aval: Any = row.aval
            places.append(travel.new(aval.update(shape=(stack.layers, *aval.shape)), ROWS, 0))
            travel.becomes(v, places[-1])
        name, backwards = f"{stack.layers} layers", bool(stack.eqn.params["reverse"])
        rows = len(outs) - carry
        return Part(body, stack.layers, backwards, tuple(sources), tuple(places), rows, name, stack)

    def body(self, stack: Stack) -> tuple[Jaxpr, list[Any]]:
        """A layer that makes what is light itself, and what it takes in the place of the loop's constants."""
        sunk, count = self.of.sunk(stack.consts), stack.parts[0]
        if not sunk:
            return stack.body, list(stack.consts)
        takes = self.of.reads(sunk)
        light = [v for v in stack.consts if self.of.is_light(v)]
        others = [v for v in stack.consts if not self.of.is_light(v)]
        made = self.program(sunk, takes, light)

        def layer(*args: Value) -> list[Value]:
            given, rest = args[: len(takes)], args[len(takes) :]
            values = iter(inline(made, *given)), iter(rest[: len(others)])
            consts = [next(values[not self.of.is_light(v)]) for v in stack.consts]
            return inline(stack.body, *consts, *rest[len(others) :])

        types = [v.aval for v in (*takes, *others, *stack.body.invars[count:])]
        return trace_flat(layer, types, "layer"), [*takes, *others]

    def entrance(self, entering: Sequence[int]) -> Part:
        """What is before the first stack as a layer."""
        takes = self.of.reads(entering, self.first)
        self.no_gradient(takes)
        body = self.program(entering, takes, self.first)
        gives = tuple(range(len(self.first)))
        return Part(body, 1, False, tuple(map(self.source, takes)), gives, 0, "what is before the layers")

    def exit(self) -> Part:
        """What is after the last stack as a layer."""
        takes, outs = self.of.reads(self.after, self.jaxpr.outvars), self.jaxpr.outvars
        self.no_gradient([v for v in takes if v not in self.last])
        body = self.program(self.after, takes, outs)
        sources = tuple(("z", self.travel.place[v]) if v in self.last else self.source(v) for v in takes)
        gives = tuple(self.travel.new(v.aval, READ, 0) for v in outs)
        return Part(body, 1, False, sources, gives, 0, "what is after the layers")

    def no_gradient(self, takes: Iterable[Var]) -> None:
        if any(v in self.of.data and self.of.travels(v) for v in takes):
            raise Decline(
                "gradients of the data are wanted, which the ends of the stack have outside of the stages"
                ' alone: pipeline.ends = "outside"'
            )

    def source(self, v: Any, row: bool = False) -> tuple[str, Any]:
        """Where a part finds what it reads."""
        if isinstance(v, Literal):
            return "literal", v.val
        if v in self.of.constant:
            return ("row" if row else "fixed"), self.fixed.index(v)
        if row:
            return "told_row", self.told_rows.index(v)
        return ("told", self.told.index(v)) if self.of.is_told(v) else ("z", self.travel.place[v])

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
