"""Finds the rows of a program: values that are computed alike, one beside the other, and can be one array.

    stack w0 w1 w2; unstack dW -> g0 g1 g2        rows (w0 w1 w2), (g0 g1 g2), then by the flow of values
    a0 = mul g0 0.1;  n0 = sub w0 a0     ->       (a0 a1 a2), (n0 n1 n2): each one batched equation
    a1 = mul g1 0.1;  n1 = sub w1 a1 ...

From what a `stack` takes and an `unstack` gives, rows are proposed without a proof: backward, the equations
that make a row, if they do the same, and their operands; forward, the equations that read it alike, those
first that have the same meaning down to the inputs. Then what does not hold is refuted, until all that is
left does: each operand of a packed equation is a row, the same for all, or so small that it is stacked there.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence

from xform.state.groups import Group, Row, batches, inside, one_type, size, stacking, stacks, unstacks
from xform.state.scopes import ENTERED, Op, Port, Scope, Scopes
from xform.trace import Atom, Jaxpr, Var


class Search:
    """The groups that are proposed for a program, and where each value would stand.

    stacks: the equations that stack. keep, state: as for `xform.state.pack`.
    """

    def __init__(
        self, jaxpr: Jaxpr, paths: Sequence[str], keep: Collection[int], state: Mapping[int, int]
    ) -> None:
        self.scopes = Scopes(jaxpr, paths)
        self.keep = frozenset(keep)
        self._next: dict[Var, list[Var]] = {}
        for out, number in sorted(state.items()):
            atom = jaxpr.outvars[out]
            if isinstance(atom, Var):
                self._next.setdefault(atom, []).append(jaxpr.invars[number])
        self.place: dict[Var, tuple[Row, int]] = {}
        self.groups: list[Group] = []
        self.stacks: list[Op] = []
        self._backward: collections.deque[tuple[Scope, tuple[Atom, ...]]] = collections.deque()
        self._forward: collections.deque[Row] = collections.deque()
        self._loose: collections.deque[Row] = collections.deque()
        self._seed()
        self._propose()

    def _seed(self) -> None:
        todo = [self.scopes.top]
        while todo:
            for op in todo.pop(0).ops:
                if unstacks(op.eqn):
                    self._claim((op,), [], [(op.scope, tuple(op.eqn.outvars))])
                elif stacks(op.eqn):
                    self.stacks.append(op)
                elif op.eqn.primitive.name in ENTERED and any(map(stacking, inside(op.eqn))):
                    entry = self.scopes.enter(op)
                    todo += entry.scopes if entry is not None else []
        largest = sorted(self.stacks, key=lambda op: -size(op.eqn.outvars[0]))
        self._backward.extend((op.scope, tuple(op.eqn.invars)) for op in largest)

    def _propose(self) -> None:
        while True:
            if self._backward:
                self._back(*self._backward.popleft())
            elif self._forward:
                row = self._forward.popleft()
                self._ahead(row, loose=False)
                self._loose.append(row)
            elif self._loose:
                self._ahead(self._loose.popleft(), loose=True)
            else:
                return

    def _claim(
        self,
        members: tuple[Op, ...] | tuple[Port, ...],
        columns: list[tuple[Scope, tuple[Atom, ...]]],
        rows: Sequence[tuple[Scope, tuple[Var, ...]]],
    ) -> None:
        group = Group(members, columns)
        self.groups.append(group)
        for member in members:
            member.claim = group
        for scope, column in rows:
            row = Row(scope, column, group)
            group.rows.append(row)
            self.place.update((v, (row, i)) for i, v in enumerate(column))
            self._forward.append(row)
        self._backward.extend(columns)

    def _back(self, scope: Scope, column: tuple[Atom, ...]) -> None:
        """Proposes what makes a column of operands as a row."""
        if self.scopes.shared(column):
            return
        values = [v for v in column if isinstance(v, Var) and v not in self.place]
        if len(values) < len(column) or len(set(values)) < len(values) or not one_type(values):
            return
        made = [self.scopes.maker.get(v) for v in values]
        if made[0] is not None:
            makers = [m[0] for m in made if m is not None]
            if len(makers) < len(made):
                return
            if all(m is makers[0] for m in makers):
                self.scopes.enter(makers[0])
            elif len({k for _, k in filter(None, made)}) == 1:
                self._equations(makers)
        if all(v in self.scopes.bound for v in values):
            self._ports([self.scopes.bound[v] for v in values])
        elif all(v in self.scopes.inputs and self.scopes.inputs[v] not in self.keep for v in values):
            self._claim((), [], [(scope, tuple(values))])

    def _equations(self, ops: Sequence[Op]) -> bool:
        """Proposes equations as one, batched."""
        first = ops[0]
        if len({id(op) for op in ops}) < len(ops) or any(
            op.claim or op.entry or op.key != first.key for op in ops
        ):
            return False
        if first.eqn.effects or not batches(first.eqn) or any(op.scope is not first.scope for op in ops):
            return False
        columns = [(first.scope, column) for column in zip(*(op.eqn.invars for op in ops), strict=True)]
        self._claim(
            tuple(ops),
            columns,
            [(first.scope, row) for row in zip(*(op.eqn.outvars for op in ops), strict=True)],
        )
        return True

    def _ports(self, ports: Sequence[Port | None]) -> None:
        """Proposes that what goes through these ports goes through stacked."""
        first = ports[0]
        found = [p for p in ports if p is not None and p.claim is None]
        if first is None or len(found) < len(ports) or len({id(p) for p in found}) < len(found):
            return
        if any((len(p.takes), len(p.gives)) != (len(first.takes), len(first.gives)) for p in found):
            return
        columns = [(t[0][0], tuple(a for _, a in t)) for t in zip(*(p.takes for p in found), strict=True)]
        rows = [(g[0][0], tuple(v for _, v in g)) for g in zip(*(p.gives for p in found), strict=True)]
        one = all(len({id(s) for s, _ in t}) == 1 for t in zip(*(p.gives for p in found), strict=True))
        if one and all(one_type(row) for _, row in rows):
            self._claim(tuple(found), columns, rows)

    def _ahead(self, row: Row, loose: bool) -> None:
        """Proposes what reads a row, each element alike. `loose`: whatever it means."""
        tables = [self._readers(v, loose) for v in row.vars]
        for (sense, k), ops in tables[0].items():
            others = [table.get((sense, k), []) for table in tables[1:]]
            for number, op in enumerate(ops):
                if op.claim is not None or any(len(found) <= number for found in others):
                    continue
                members = [op, *(found[number] for found in others)]
                self._equations(members)
        if not loose:
            self._through(row)

    def _readers(self, v: Var, loose: bool) -> dict[tuple[int, int], list[Op]]:
        table: dict[tuple[int, int], list[Op]] = {}
        for op, k in self.scopes.readers.get(v, ()):
            if op.claim is None:
                table.setdefault((op.key if loose else op.sense, k), []).append(op)
        return table

    def _through(self, row: Row) -> None:
        """Proposes that a row goes whole into the equations that read all of it, and out of its body."""
        first, *rest = ([(op, k) for op, k in self.scopes.readers.get(v, ())] for v in row.vars)
        for op in dict.fromkeys(op for op, _ in first):
            numbers = [[k for other, k in found if other is op] for found in (first, *rest)]
            if all(numbers) and op.claim is None and (entry := self.scopes.enter(op)) is not None:
                for ks in zip(*numbers, strict=False):
                    self._ports([entry.operands.get(k) for k in ks])
        for ports in zip(*(self.scopes.leaving.get(v, ()) for v in row.vars), strict=False):
            self._ports(ports)
        for inputs in self.inputs_next(row):
            self._back(row.scope, inputs)

    def inputs_next(self, row: Row) -> Iterator[tuple[Var, ...]]:
        """The inputs that a row becomes in the next step."""
        return zip(*(self._next.get(v, ()) for v in row.vars), strict=False)
