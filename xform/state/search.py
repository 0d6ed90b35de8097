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
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import networkx as nx

from xform.higher_order import bodies, equations
from xform.stacking import stack_p, unstack_p
from xform.state.scopes import ENTERED, Op, Port, Scope, Scopes
from xform.trace import Atom, Jaxpr, JaxprEqn, ShapedArray, Var, source_line

SMALL = 1024
"""Bytes of an element up to which it is read from its row, or put into one, where it is wanted."""

WHOLE = (
    "while", "shard_map", "pallas_call", "mpmd_map", "ffi_call", "pure_callback", "custom_partitioning",
    "rng_bit_generator", "rng_uniform",
)  # fmt: skip
"""Primitives whose batched form is another program, or gives other numbers, or is none."""


@dataclasses.dataclass(eq=False)
class Row:
    """Values that are one array. They are defined in `scope`, by `group`."""

    scope: Scope
    vars: tuple[Var, ...]
    group: Group


@dataclasses.dataclass(eq=False)
class Group:
    """What makes rows: equations or ports in a row, an unstack, inputs.

    columns: what the members take, operand by operand. why: the reason, once it is refuted.
    """

    members: tuple[Op, ...] | tuple[Port, ...]
    columns: list[tuple[Scope, tuple[Atom, ...]]]
    rows: list[Row] = dataclasses.field(default_factory=list)
    alive: bool = True
    why: str = ""


class Rows:
    """The rows of a program. Read with `row` and `found`, after it is made."""

    def __init__(self, jaxpr: Jaxpr, paths: Sequence[str], keep: Collection[int]) -> None:
        self.scopes = Scopes(jaxpr, paths)
        self.keep = frozenset(keep)
        self.place: dict[Var, tuple[Row, int]] = {}
        self.groups: list[Group] = []
        self.stacks: list[Op] = []
        self._backward: collections.deque[tuple[Scope, tuple[Atom, ...]]] = collections.deque()
        self._forward: collections.deque[Row] = collections.deque()
        self._loose: collections.deque[Row] = collections.deque()
        self._seed()
        self._propose()
        self._settle()

    # ------------------------------------------------------------ what others ask

    def row(self, column: Sequence[Atom]) -> Row | None:
        """The row that these values are, in order and all of it."""
        first = column[0]
        row, at = self.place.get(first, (None, 0)) if isinstance(first, Var) else (None, 0)
        if row is None or at or not row.group.alive or len(row.vars) != len(column):
            return None
        return row if all(a is b for a, b in zip(row.vars, column, strict=True)) else None

    def element(self, v: Var) -> tuple[Row, int] | None:
        """The row that a value is in, and where."""
        found = self.place.get(v)
        return found if found is not None and found[0].group.alive else None

    # ------------------------------------------------------------ proposing

    def _seed(self) -> None:
        todo = [self.scopes.top]
        while todo:
            for op in todo.pop(0).ops:
                if unstacks(op.eqn):
                    self._claim((op,), [], [(op.scope, tuple(op.eqn.outvars))])
                elif stacks(op.eqn):
                    self.stacks.append(op)
                elif op.eqn.primitive.name in ENTERED and any(map(_stacking, inside(op.eqn))):
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
        if len(values) < len(column) or len(set(values)) < len(values) or not _one_type(values):
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
        if first.eqn.effects or not _batches(first.eqn) or any(op.scope is not first.scope for op in ops):
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
        if one and all(_one_type(row) for _, row in rows):
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

    # ------------------------------------------------------------ refuting

    def _settle(self) -> None:
        users: dict[Row, list[Group]] = {}
        for group in self.groups:
            for _, column in group.columns:
                if (row := self.row(column)) is not None:
                    users.setdefault(row, []).append(group)
        self._users = users
        for group in self.groups:
            self._judge(group)
        while self._acyclic():
            pass
        self._anchor()

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
            if self.row(column) is None and not self.scopes.shared(column):
                if not all(map(stackable, column)):
                    return self.difference(column)
            elif number == 0 and _conditional(group) and not self.scopes.shared(column):
                return "each has a condition of its own"
        return ""

    def difference(self, column: Sequence[Atom]) -> str:
        """Why a column is no row."""
        makers = [self.scopes.maker.get(v) if isinstance(v, Var) else None for v in column]
        first = makers[0]
        for number, (atom, made) in enumerate(zip(column, makers, strict=True)):
            if (made[0].key if made else None) != (first[0].key if first else None):
                return f"the first is {_made_by(first)}, number {number} {_made_by(made)}"
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
            around = set[Group | Op](nx.nodes_with_selfloops(flow))
            around.update(*(c for c in nx.strongly_connected_components(flow) if len(c) > 1))
            for group in self.groups if around else ():
                depths = {op.depth for op in group.members if isinstance(op, Op)}
                if group in around and group.alive and len(depths) > 1:
                    found = True
                    for user in self._refute(group, "one is computed from another"):
                        self._judge(user)
        return found

    def unit(self, op: Op) -> Group | Op:
        """What an equation is part of: its group, or itself."""
        claim = op.claim
        return claim if isinstance(claim, Group) and claim.alive and len(claim.members) > 1 else op

    def units(self, scope: Scope) -> dict[Group | Op, dict[Group | Op, None]]:
        """The equations of a scope, those of a group as one, and the units that each waits for."""
        needs: dict[Group | Op, dict[Group | Op, None]] = {}
        for op in scope.ops:
            mine = needs.setdefault(self.unit(op), {})
            for v in op.eqn.invars:
                made = self.scopes.maker.get(v) if isinstance(v, Var) else None
                if made is not None:
                    mine[self.unit(made[0])] = None
        return needs

    def _anchor(self) -> None:
        """Refutes what hangs together with no state: with no input and no result of the program."""
        beside: dict[Group, list[Group]] = {}
        for group in self.groups:
            for _, column in group.columns:
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
            same = all(self.scopes.shared(column) for g in found for _, column in g.columns)
            if not (state or same) or seeds.isdisjoint(found):
                for group in found:
                    group.alive, group.why = False, "they are not of the state"

    # ------------------------------------------------------------ what remains

    def remaining(self) -> Iterator[tuple[Op, str]]:
        """The stacks of single inputs and unstacks of what is returned that are no rows, and why."""
        for op in self.stacks:
            column = op.eqn.invars
            built = self.row(column) is None and not self.scopes.shared(column)
            if any(isinstance(v, Var) and self.element(v) for v in column):
                continue  # said where it is built
            if built and not all(map(stackable, column)) and any(map(self._of_one_input, column)):
                yield op, self.difference(column)
        for group in self.groups:
            apart = next((m for m in group.members if isinstance(m, Op) and unstacks(m.eqn)), None)
            if apart is None or group.alive or all(map(stackable, apart.eqn.outvars)):
                continue
            if any(map(self._returned, apart.eqn.outvars)):
                yield apart, "what is done with its parts differs"

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


def _conditional(group: Group) -> bool:
    return any(isinstance(op, Op) and op.eqn.primitive.name == "cond" for op in group.members[:1])


def _made_by(made: tuple[Op, int] | None) -> str:
    if made is None:
        return "not computed"
    line = source_line(made[0].eqn)
    return f"made by `{made[0].eqn.primitive.name}`" + (f" ({line})" if line else "")


def size(atom: Atom) -> int:
    """Bytes of a value."""
    dtype = getattr(atom.aval, "dtype", None)
    return math.prod(getattr(atom.aval, "shape", ())) * (dtype.itemsize if dtype is not None else 0)


def stackable(atom: Atom) -> bool:
    """Whether a value is so small that it may be stacked with others on the spot."""
    return isinstance(atom.aval, ShapedArray) and size(atom) <= SMALL


def _one_type(atoms: Sequence[Atom]) -> bool:
    aval: Any = atoms[0].aval
    if not isinstance(aval, ShapedArray) or any(getattr(aval.sharding, "spec", ())):
        return False
    return all(atom.aval == aval for atom in atoms)


def inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """All equations in an equation's bodies."""
    for body in bodies(eqn):
        yield from equations(body)


def stacks(eqn: JaxprEqn) -> bool:
    """Whether an equation stacks several arrays along a new first dimension."""
    return eqn.primitive is stack_p and eqn.params["axis"] == 0 and len(eqn.invars) > 1


def unstacks(eqn: JaxprEqn) -> bool:
    """Whether an equation takes an array apart along its first dimension."""
    return eqn.primitive is unstack_p and eqn.params["axis"] == 0 and len(eqn.outvars) > 1


def _stacking(eqn: JaxprEqn) -> bool:
    return stacks(eqn) or unstacks(eqn)


def _batches(eqn: JaxprEqn) -> bool:
    """Whether an equation does on many at once what it does on one, to the same numbers."""
    inner = list(inside(eqn))
    if _stacking(eqn) or any(e.primitive.name in WHOLE or _other_bits(e) for e in (eqn, *inner)):
        return False
    return all(e.primitive.name != "cond" for e in inner)


def _other_bits(eqn: JaxprEqn) -> bool:
    """Whether it works with keys of a generator whose batched form gives other numbers."""
    types = [v.aval.str_short() for v in (*eqn.invars, *eqn.outvars)]
    return any(text.startswith("key<") and not text.startswith("key<fry>") for text in types)
