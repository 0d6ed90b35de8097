"""Writes a program over its rows: equations batched, loops that carry rows, elements where they are read."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import RewriteError
from xform.higher_order import hoist, scan_parts
from xform.state.chains import REDUCTIONS, Chain
from xform.state.groups import Group, Row, joins, size, stackable, stacks, unstacks
from xform.state.notes import Notes, line, name, why_alone
from xform.state.scopes import Entry, Op, Port, Scope
from xform.state.settling import Rows, Unit
from xform.trace import (
    Atom,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    ShapedArray,
    Value,
    Var,
    at_equation,
    bind,
    fitted,
    inline,
    shape_of,
    source_line,
    trace_flat,
    typeof,
)

Lane = tuple[int, ...]
"""Numbers of operands, or of results, that go together: of one, or of a row in its order."""


class Writer:
    """One scope as it is written, into the trace at hand."""

    def __init__(self, rows: Rows, scope: Scope, notes: Notes) -> None:
        self.rows, self.scope, self.notes = rows, scope, notes
        self.values: dict[Var, Value] = dict(zip(scope.jaxpr.constvars, scope.jaxpr.consts, strict=True))
        self.whole: dict[Row, Value] = {}

    # ------------------------------------------------------------ values

    def put(self, column: Sequence[Var], value: Value) -> None:
        """What a variable is, or a row."""
        if len(column) == 1:
            self.values[column[0]] = value
        else:
            self.whole[self.rows.place[column[0]][0]] = value

    def take(self, column: Sequence[Atom], reader: Op | None = None) -> Value:
        """One value; or a column of them as one array, of the very type."""
        if len(column) == 1:
            return self.read(column[0], reader)
        value, axis = self.batch(column, reader)
        aval: Any = column[0].aval
        if axis is None:
            value = jnp.broadcast_to(value, (len(column), *aval.shape))
        return fitted(value, stacked(aval, len(column)))

    def batch(self, column: Sequence[Atom], reader: Op | None) -> tuple[Value, int | None]:
        """A column of operands, and the axis of its row: none where all are the same."""
        if self.rows.same(column):
            return self.read(column[0], reader), None
        row = self.rows.row(column)
        if row is not None:
            return self.whole[row], 0
        if all(isinstance(atom, Literal) for atom in column):
            aval: Any = column[0].aval
            return np.asarray([atom.val for atom in column if isinstance(atom, Literal)], aval.dtype), 0
        return self._built(column, reader), 0

    def read(self, atom: Atom, reader: Op | None) -> Value:
        """The value of one variable; taken from its row where it is in one."""
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            plain = typeof(atom.val) == aval
            return atom.val if plain else fitted(jnp.asarray(atom.val, aval.dtype), aval)
        found = self.rows.element(atom)
        if atom not in self.values and found is not None:
            if not stackable(atom):
                what = f"{atom.aval.str_short()} taken out of {len(found[0].vars)} for {name(reader)}"
                self.notes.add(what, size(atom), why_alone(self.rows, found[0], reader), line(reader))
            self._take_out(atom, *found)
        return self.values[atom]

    def _take_out(self, v: Var, row: Row, at: int) -> None:
        self.values[v] = jax.lax.index_in_dim(self.whole[row], at, keepdims=False)

    def _built(self, column: Sequence[Atom], reader: Op | None) -> Value:
        if not stackable(column[0]):
            what = f"{len(column)} of {column[0].aval.str_short()} stacked for {name(reader)}"
            why = self.rows.difference(column)
            self.notes.add(what, len(column) * size(column[0]), why, line(reader))
        places = [self.rows.element(v) if isinstance(v, Var) else None for v in column]
        first = places[0]
        if (
            first is not None
            and first[0] in self.whole
            and all(p == (first[0], first[1] + i) for i, p in enumerate(places))
        ):
            return jax.lax.slice_in_dim(self.whole[first[0]], first[1], first[1] + len(column))
        if stackable(column[0]) and (value := self._picked(column, places, reader)) is not None:
            return value
        for v, place in zip(column, places, strict=True):
            if isinstance(v, Var) and place is not None and v not in self.values:
                self._take_out(v, *place)
        return jnp.stack([self.read(v, reader) for v in column])

    def _picked(
        self, column: Sequence[Atom], places: Sequence[tuple[Row, int] | None], reader: Op | None
    ) -> Value | None:
        """A column out of the rows that its elements are in, joined; None where these are no fewer."""
        known = [place if place is not None and place[0] in self.whole else None for place in places]
        rows = dict.fromkeys(place[0] for place in known if place is not None)
        single = [v for v, place in zip(column, known, strict=True) if place is None]
        if len(rows) + len(single) >= len(column):
            return None
        starts: dict[Row, int] = {}
        count = 0
        for row in rows:
            starts[row] = count
            count += len(row.vars)
        rest = itertools.count(count)
        index = [next(rest) if place is None else starts[place[0]] + place[1] for place in known]
        parts = [self.whole[row] for row in rows]
        parts += [jnp.stack([self.read(v, reader) for v in single])] if single else []
        joined = jnp.concatenate(parts)
        return joined.at[np.asarray(index)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    # ------------------------------------------------------------ equations

    def run(self) -> None:
        """Writes all equations, in the order of the text as far as the rows allow."""
        for plain, units in itertools.groupby(self._schedule(), self._plain):
            if plain:
                self._carry([op for op in units if isinstance(op, Op)])
            else:
                for unit in units:
                    self._write(unit)

    def _plain(self, unit: Unit) -> bool:
        """Whether it is carried over as it is."""
        if not isinstance(unit, Op):
            return False
        if unstacks(unit.eqn):
            return not unit.claim.alive
        if joins(unit.eqn):
            small = all(map(stackable, unit.eqn.invars))
            inside = any(self.rows.element(v) for v in unit.eqn.invars if isinstance(v, Var))
            return self.rows.row(unit.eqn.invars) is None and not (small and inside)
        if stacks(unit.eqn):
            column = unit.eqn.invars
            elements = [self.rows.element(v) for v in column if isinstance(v, Var)]
            return not any(elements) and not self.rows.same(column)
        return unit.entry is None or not _changed(unit.entry)

    def _schedule(self) -> list[Unit]:
        needs = self.rows.units(self.scope)
        number = {unit: i for i, unit in enumerate(needs)}
        waits = {unit: len(before) for unit, before in needs.items()}
        after: dict[Unit, list[Unit]] = {}
        for unit, before in needs.items():
            for each in before:
                after.setdefault(each, []).append(unit)
        ready = [number[unit] for unit, count in waits.items() if not count]
        units, order = list(needs), list[Unit]()
        while ready:
            unit = units[heapq.heappop(ready)]
            order.append(unit)
            for each in after.get(unit, ()):
                waits[each] -= 1
                if not waits[each]:
                    heapq.heappush(ready, number[each])
        assert len(order) == len(units)
        return order

    def _carry(self, ops: Sequence[Op]) -> None:
        """Equations as they are, copied at one go."""
        made = {v for op in ops for v in op.eqn.outvars}
        reads: dict[Var, Op] = {}
        for op in ops:
            for v in op.eqn.invars:
                if isinstance(v, Var) and v not in made:
                    reads.setdefault(v, op)
        outs = [v for op in ops for v in op.eqn.outvars if not isinstance(v, DropVar)]
        run = self.scope.jaxpr.replace(
            constvars=[],
            invars=list(reads),
            outvars=outs,
            eqns=[op.eqn for op in ops],
            consts=[],
            debug_info=self.scope.jaxpr.debug_info.with_unknown_names(),
        )
        values = [self.read(v, op) for v, op in reads.items()]
        self.values.update(zip(outs, inline(run, *values), strict=True))

    def _write(self, unit: Unit) -> None:
        eqn = _op(unit).eqn
        with at_equation(eqn):
            if isinstance(unit, Group):
                self._batched(unit, eqn)
            elif isinstance(unit, Chain):
                self._reduced(unit, eqn)
            elif stacks(eqn):
                self.values[eqn.outvars[0]] = self.take(eqn.invars, unit)
            elif joins(eqn):
                value = self.take(eqn.invars, unit)
                self.values[eqn.outvars[0]] = value.reshape(shape_of(eqn.outvars[0]))
            elif unstacks(eqn):
                self.put(eqn.outvars, self.read(eqn.invars[0], unit))
            else:
                assert unit.entry is not None
                self._enter(unit.entry, eqn)

    def _batched(self, group: Group, eqn: JaxprEqn) -> None:
        """The equations of a group as one, its first batched."""
        operands = [self.batch(column, _op(group)) for _, column in group.columns]
        axes = [axis for _, axis in operands]
        count = len(group.members)

        def one(*args: Value) -> list[Value]:
            with at_equation(eqn):  # without a `vmap` in the name stack
                return bind(eqn, args, eqn.params)

        values = [value for value, _ in operands]
        if group in self.rows.uniform:
            for row, out in zip(group.rows, one(*values), strict=True):
                self.values.update(dict.fromkeys(row.vars, out))
            return
        outs = jax.vmap(one, in_axes=tuple(axes), out_axes=0)(*values)
        for row, out in zip(group.rows, outs, strict=True):
            aval = stacked(row.vars[0].aval, count)
            out = fitted(out, aval)
            if typeof(out).str_short() != aval.str_short():
                raise RewriteError(
                    f"state: {eqn.primitive.name} at {source_line(eqn)} on {count} at once gives"
                    f" {typeof(out).str_short()}, not {aval.str_short()}"
                )
            self.whole[row] = out

    def _reduced(self, chain: Chain, eqn: JaxprEqn) -> None:
        """A chain: its rows taken at once, then what they give and the other terms."""
        reduce = REDUCTIONS[eqn.primitive.name]
        terms = [reduce(self.take(row.vars, chain.last), axes=(0,)) for row in chain.rows]
        terms += [self.read(atom, chain.last) for atom in chain.rest]
        value = functools.reduce(lambda a, b: bind(eqn, [a, b], eqn.params)[0], terms)
        self.values[eqn.outvars[0]] = fitted(value, eqn.outvars[0].aval)
        self.notes.reordered(chain)

    # ------------------------------------------------------------ bodies

    def _enter(self, entry: Entry, eqn: JaxprEqn) -> None:
        """An equation that rows go through, whole."""
        ins = _lanes(entry.operands, len(eqn.invars))
        outs = _lanes(entry.results, len(eqn.outvars))
        args = [self.take([eqn.invars[k] for k in lane], entry.op) for lane in ins]
        match eqn.primitive.name:
            case "scan":
                results = self._scan(entry.scopes[0], eqn, ins, outs, args)
            case "while":
                results = self._while(entry, eqn, ins, outs, args)
            case "jit":
                results = self._body(entry.scopes[0], ins, args, outs)
            case "optimization_barrier":
                results = bind(eqn, args, eqn.params)
            case "cond":
                inside = [tuple(k - 1 for k in lane) for lane in ins[1:]]
                branches = tuple(self._jaxpr(scope, inside, args[1:], outs) for scope in entry.scopes)
                results = bind(eqn, args, {**eqn.params, "branches": branches})
            case _:
                (name,) = (k for k, v in eqn.params.items() if isinstance(v, Jaxpr))
                body = self._jaxpr(entry.scopes[0], ins, args, outs)
                params, consts = hoist(eqn, {**eqn.params, name: body})
                results = bind(eqn, [*consts, *args], params)
        for lane, result in zip(outs, results, strict=True):
            self.put([eqn.outvars[k] for k in lane], result)

    def _body(
        self, scope: Scope, ins: Sequence[Lane], args: Sequence[Value], outs: Sequence[Lane]
    ) -> list[Value]:
        """A body, written into the trace at hand."""
        inner = Writer(self.rows, scope, self.notes)
        for lane, value in zip(ins, args, strict=True):
            inner.put([scope.jaxpr.invars[k] for k in lane], value)
        inner.run()
        return [inner.take([scope.jaxpr.outvars[k] for k in lane]) for lane in outs]

    def _jaxpr(self, scope: Scope, ins: Sequence[Lane], args: Sequence[Value], outs: Sequence[Lane]) -> Jaxpr:
        """A body, as a program of its own."""
        avals = [stacked(scope.jaxpr.invars[lane[0]].aval, len(lane)) for lane in ins]
        return trace_flat(lambda *values: self._body(scope, ins, values, outs), avals, "body")

    def _scan(
        self, scope: Scope, eqn: JaxprEqn, ins: Sequence[Lane], outs: Sequence[Lane], args: Sequence[Value]
    ) -> list[Value]:
        consts, carry, _ = scan_parts(eqn)
        first = sum(lane[0] < consts for lane in ins)
        carried = sum(lane[0] < carry for lane in outs)

        def body(state: Sequence[Value], xs: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
            results = self._body(scope, ins, [*args[:first], *state, *xs], outs)
            return results[:carried], results[carried:]

        keep = ("length", "reverse", "unroll", "_split_transpose")
        params = {k: v for k, v in eqn.params.items() if k in keep}
        state, ys = jax.lax.scan(body, args[first : first + carried], args[first + carried :], **params)
        return [*state, *ys]

    def _while(
        self, entry: Entry, eqn: JaxprEqn, ins: Sequence[Lane], outs: Sequence[Lane], args: Sequence[Value]
    ) -> list[Value]:
        """The operands are the condition's constants, the body's, and what is carried."""
        p = eqn.params
        conds, consts = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        parts: list[list[Lane]] = [[], [], []]
        for lane in ins:
            parts[(lane[0] >= conds) + (lane[0] >= consts)].append(lane)
        own, bodys, carried = parts
        n = len(own)

        def moved(lanes: Sequence[Lane], by: int) -> list[Lane]:
            return [tuple(k - by for k in lane) for lane in lanes]

        state = args[n + len(bodys) :]
        test, step = (entry.scopes[b] for b in _test_and_step(eqn))
        cond = self._jaxpr(test, [*own, *moved(carried, consts - conds)], [*args[:n], *state], [(0,)])
        body = self._jaxpr(step, moved([*bodys, *carried], conds), args[n:], outs)
        counts = {"cond_nconsts": n, "body_nconsts": len(bodys)}
        return bind(eqn, args, {**p, **counts, "cond_jaxpr": cond, "body_jaxpr": body})


def stacked(aval: Any, count: int) -> Any:
    """The type of `count` arrays of a type as one; of one array its own."""
    if count == 1:
        return aval
    return ShapedArray(
        (count, *aval.shape), aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space
    )


def _op(unit: Unit) -> Op:
    """The equation that a unit is written as."""
    op = unit.members[0] if isinstance(unit, Group) else unit.last if isinstance(unit, Chain) else unit
    assert isinstance(op, Op)
    return op


def _changed(entry: Entry) -> bool:
    """Whether a row goes through an equation, or is in one of its bodies."""
    claims = [port.claim for port in (*entry.operands.values(), *entry.results.values())]
    inner = [op for scope in entry.scopes for op in scope.ops]
    claims += [op.claim for op in inner]
    return any(claim is not None and claim.alive for claim in claims) or any(
        op.entry is not None and _changed(op.entry) for op in inner
    )


def _lanes(ports: dict[int, Port], count: int) -> list[Lane]:
    """Operands or results in the order of the first of each lane."""
    lanes: list[Lane] = []
    numbers = {id(port): k for k, port in ports.items()}
    for k in range(count):
        claim = ports[k].claim if k in ports else None
        if claim is None or not claim.alive:
            lanes.append((k,))
        else:
            lane = tuple(numbers[id(member)] for member in claim.members)
            if k == min(lane):
                lanes.append(lane)
    return lanes


def _test_and_step(eqn: JaxprEqn) -> tuple[int, int]:
    """The numbers of the condition and of the body of a `while`."""
    names = [k for k, v in eqn.params.items() if isinstance(v, Jaxpr)]
    return names.index("cond_jaxpr"), names.index("body_jaxpr")
