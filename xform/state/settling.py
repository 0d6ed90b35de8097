"""Which of the proposed rows hold, and why the others do not.

A group falls where an operand of it is no row, not the same for all, and too large to be stacked on the spot;
with it fall those that need its rows. Then those fall that wait for one another, and what has to do with no
state: a user's own stacks of activations, keys that are taken apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx

from xform.higher_order import bodies, operands
from xform.state.chains import Chain, find
from xform.state.groups import Group, Row, one_type, stackable, stacks, unstacks
from xform.state.scopes import Op, Scope
from xform.state.search import Search
from xform.trace import Atom, Jaxpr, JaxprEqn, Var, source_line

type Unit = Group | Chain | Op
"""What is written at one go: the equations of a row, those of a chain, one alone."""


class Rows:
    """The rows of a program.

    uniform: groups whose members are all the same; of those one is enough. chains: those that take rows
    whole, by their equations.
    """

    def __init__(
        self, jaxpr: Jaxpr, paths: Sequence[str], keep: Collection[int], state: Mapping[int, int]
    ) -> None:
        search = Search(jaxpr, paths, keep, state)
        self.scopes, self.groups, self.stacks = search.scopes, search.groups, search.stacks
        self.place, self.keep, self._inputs_next = search.place, search.keep, search.inputs_next
        self.uniform: set[Group] = set()
        self.chains: dict[Op, Chain] = {}
        self._kept: list[Chain] = []
        self._users: dict[Row, list[Group]] = {}
        self._settle()

    # ------------------------------------------------------------ what others ask

    def row(self, column: Sequence[Atom]) -> Row | None:
        """The row that these values are, in order and all of it."""
        first = column[0]
        row, at = self.place.get(first, (None, 0)) if isinstance(first, Var) else (None, 0)
        if row is None or at or not row.group.alive or len(row.vars) != len(column):
            return None
        return row if all(a is b for a, b in zip(row.vars, column, strict=True)) else None

    def same(self, column: Sequence[Atom]) -> bool:
        """Whether a column's values are one: the same variable or literal, or computed from such."""
        row = self.row(column)
        return self.scopes.shared(column) or (row is not None and row.group in self.uniform)

    def element(self, v: Var) -> tuple[Row, int] | None:
        """The row that a value is in, and where."""
        found = self.place.get(v)
        return found if found is not None and found[0].group.alive else None

    # ------------------------------------------------------------ refuting

    def _settle(self) -> None:
        for group in self.groups:
            for _, column in group.columns:
                if (row := self.row(column)) is not None:
                    self._users.setdefault(row, []).append(group)
        self._find_uniform()
        for group in self.groups:
            self._judge(group)
        while self._acyclic():
            pass
        self._anchor()
        found = [
            c for scope in self.scopes.scopes for c in find(self.scopes, scope, self.element, self._alone)
        ]
        self._kept = [chain for chain in found if chain.kept]
        self.chains = {op: chain for chain in found if not chain.kept for op in chain.members}

    def _find_uniform(self) -> None:
        """Groups whose members are all the same: each operand is one for all of them."""
        todo = [group for group in self.groups if _ops(group)]
        while todo:
            group = todo.pop()
            if (
                group not in self.uniform
                and len(group.members) > 1
                and all(self.same(column) for _, column in group.columns)
            ):
                self.uniform.add(group)
                todo += [user for row in group.rows for user in self._users.get(row, ()) if _ops(user)]

    def _judge(self, group: Group) -> None:
        todo = [group]
        while todo:
            now = todo.pop()
            if now.alive and (why := self._fault(now)):
                todo += self._refute(now, why)

    def _refute(self, group: Group, why: str) -> list[Group]:
        group.alive, group.why = False, why
        return [user for row in group.rows for user in self._users.get(row, ())]

    def _fault(self, group: Group) -> str:
        for number, (_, column) in enumerate(group.columns):
            if self.row(column) is None and not self.same(column):
                if not all(map(stackable, column)) or not one_type(column):
                    return self.difference(column)
            elif number == 0 and _conditional(group) and not self.same(column):
                return "each has a condition of its own"
        return ""

    def difference(self, column: Sequence[Atom]) -> str:
        """Why a column is no row."""
        makers = [self.scopes.maker.get(v) if isinstance(v, Var) else None for v in column]
        first = makers[0]
        for number, (atom, made) in enumerate(zip(column, makers, strict=True)):
            if (made[0].key if made else None) != (first[0].key if first else None):
                same = first is not None and made is not None and _primitive(first) is _primitive(made)
                return f"the first is {_made_by(first, same)}, number {number} {_made_by(made, same)}"
            if atom.aval != column[0].aval:
                return f"the first is {column[0].aval.str_short()}, number {number} {atom.aval.str_short()}"
        for number, v in enumerate(column):
            if isinstance(v, Var) and self.scopes.inputs.get(v, -1) in self.keep:
                return f"number {number} is not to be stacked"
        claims = [m[0].claim for m in makers if m is not None]
        reasons = [claim.why for claim in claims if claim is not None and claim.why]
        if reasons:
            return reasons[0]
        if any(isinstance(v, Var) and v in self.place for v in column):
            return "they are in another row, or in another order"
        return "what makes them is not done on many at once"

    def _acyclic(self) -> bool:
        """Refutes groups whose elements wait for each other; whether there were any.

        Each cycle has a group whose members wait for unequally many equations: along others the number grows.
        """
        found = False
        for scope in self.scopes.scopes:
            flow = nx.DiGraph()
            for unit, needs in self.units(scope).items():
                flow.add_edges_from((need, unit) for need in needs)
            around = set[Unit](nx.nodes_with_selfloops(flow))
            around.update(*(c for c in nx.strongly_connected_components(flow) if len(c) > 1))
            for group in self.groups if around else ():
                depths = {op.depth for op in group.members if isinstance(op, Op)}
                if group in around and group.alive and len(depths) > 1:
                    found = True
                    for user in self._refute(group, "one is computed from another"):
                        self._judge(user)
        return found

    def unit(self, op: Op) -> Unit:
        """What an equation is part of: its group, its chain, or itself."""
        claim = op.claim
        if isinstance(claim, Group) and claim.alive and len(claim.members) > 1:
            return claim
        return self.chains.get(op, op)

    def _alone(self, op: Op) -> bool:
        return self.unit(op) is op

    def units(self, scope: Scope) -> dict[Unit, dict[Unit, None]]:
        """The equations of a scope, those of a group or a chain as one, and the units that each waits for."""
        needs: dict[Unit, dict[Unit, None]] = {}
        for op in scope.ops:
            unit = self.unit(op)
            mine = needs.setdefault(unit, {})
            for v in op.eqn.invars:
                made = self.scopes.maker.get(v) if isinstance(v, Var) else None
                if made is not None and self.chains.get(made[0]) is not unit:
                    mine[self.unit(made[0])] = None
        return needs

    def _anchor(self) -> None:
        """Refutes what hangs together with no state, no input and no result, and is read one by one."""
        beside: dict[Group, list[Group]] = {}
        for group in self.groups:
            columns = [column for _, column in group.columns]
            columns += [inputs for row in group.rows for inputs in self._inputs_next(row)]
            for column in columns:
                if group.alive and (row := self.row(column)) is not None:
                    beside.setdefault(group, []).append(row.group)
                    beside.setdefault(row.group, []).append(group)
        seeds = {g for g in self.groups if g.alive and len(g.members) == 1}
        seeds.update(row.group for op in self.stacks if (row := self.row(op.eqn.invars)) is not None)
        returned = {v for v in self.scopes.top.jaxpr.outvars if isinstance(v, Var)}
        met = set[Group]()
        for start in self.groups:
            if not start.alive or start in met:
                continue
            met.add(start)
            found = [start]
            for group in found:
                new = [g for g in dict.fromkeys(beside.get(group, ())) if g not in met]
                met.update(new)
                found += new
            state = any(not g.members or any(returned.issuperset(r.vars) for r in g.rows) for g in found)
            if seeds.isdisjoint(found) or not (state or all(map(self._contained, found))):
                for group in found:
                    group.alive, group.why = False, "they are not of the state"

    def _contained(self, group: Group) -> bool:
        """Whether no large element of its rows is read by itself."""
        large = [row for row in group.rows if not all(map(stackable, row.vars))]
        readers = [op for row in large for v in row.vars for op, _ in self.scopes.readers.get(v, ())]
        stacked = {op for op in self.stacks if self.row(op.eqn.invars) is not None}
        return all(op in stacked or self.unit(op) is not op for op in readers)

    # ------------------------------------------------------------ what remains

    def remaining(self) -> Iterator[tuple[JaxprEqn, str]]:
        """The stacks of single inputs and unstacks of what is returned that are no rows, and why; sums of
        elements one by one.
        """
        for op in self.stacks:
            column = op.eqn.invars
            built = self.row(column) is None and not self.same(column)
            if any(isinstance(v, Var) and self.element(v) for v in column):
                continue  # said where it is built
            if built and not all(map(stackable, column)) and all(map(self._of_one_input, column)):
                yield op.eqn, self.difference(column)
        for group in self.groups:
            apart = next((m for m in group.members if isinstance(m, Op) and unstacks(m.eqn)), None)
            if apart is None or group.alive or all(map(stackable, apart.eqn.outvars)):
                continue
            if any(map(self._returned, apart.eqn.outvars)):
                yield apart.eqn, "what is done with its parts differs"
        yield from ((chain.last.eqn, chain.kept) for chain in self._kept)
        for op in (op for scope in self.scopes.scopes for op in scope.ops if op.entry is None):
            for number, body in enumerate(bodies(op.eqn)):
                given = dict(zip(body.invars, operands(op.eqn, number), strict=True))
                for eqn in filter(stacks, body.eqns):
                    taken = [given.get(v) if isinstance(v, Var) else None for v in eqn.invars]
                    state = all(k is not None and self._of_one_input(op.eqn.invars[k]) for k in taken)
                    if state and not all(map(stackable, eqn.invars)):
                        yield eqn, f"it is inside a `{op.eqn.primitive.name}`"

    def _of_one_input(self, atom: Atom) -> bool:
        """Whether a value is an input of the program, or made of nothing else."""
        while isinstance(atom, Var) and atom not in self.scopes.inputs:
            made, port = self.scopes.maker.get(atom), self.scopes.bound.get(atom)
            if made is not None and len(reads := [v for v in made[0].eqn.invars if isinstance(v, Var)]) == 1:
                atom = reads[0]
            elif port is not None and made is None:
                atom = port.takes[0][1]
            else:
                return False
        return isinstance(atom, Var)

    def _returned(self, v: Var) -> bool:
        """Whether a value is a part of a result of its own type."""
        todo, met = [v], {v}
        for now in todo:
            if now in self.scopes.top.jaxpr.outvars:
                return True
            for op, _ in self.scopes.readers.get(now, ()):
                new = [out for out in op.eqn.outvars if out.aval == v.aval and out not in met]
                met.update(new)
                todo += new
        return False


def _ops(group: Group) -> bool:
    return any(isinstance(member, Op) for member in group.members[:1])


def _conditional(group: Group) -> bool:
    return any(isinstance(op, Op) and op.eqn.primitive.name == "cond" for op in group.members[:1])


def _primitive(made: tuple[Op, int]) -> Any:
    return made[0].eqn.primitive


def _made_by(made: tuple[Op, int] | None, of_types: bool = False) -> str:
    """How a value comes about, as an error says it; with the types of what it is made of."""
    if made is None:
        return "not computed"
    line = source_line(made[0].eqn)
    of = " of " + ", ".join(v.aval.str_short() for v in made[0].eqn.invars) if of_types else ""
    return f"made by `{_primitive(made).name}`{of}" + (f" ({line})" if line else "")
