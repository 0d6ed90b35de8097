"""Repeated blocks side by side: which of their values correspond, what each has of its own, what all share.

A row has one entry a block, first to last. What `repeats` matched pair by pair is put together here, checked
(no block may read from outside what another made), and widened by what each block does besides: a loss of its
own, an update of its cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from xform.higher_order import bodies, equations
from xform.layers.repeats import Step, View, alike, kind_of, one
from xform.trace import Atom, DropVar, JaxprEqn, Literal, Var, shape_of


@dataclasses.dataclass(frozen=True)
class Rows:
    """Blocks as a table. Of the last block an equation may be missing, and so a result."""

    equations: list[tuple[int | None, ...]]
    carried: list[tuple[Any, ...]]
    results: list[tuple[Any, ...]]
    own: list[tuple[Atom, ...]]
    shared: list[Atom]

    @property
    def blocks(self) -> int:
        return len(self.equations[0])

    @property
    def covered(self) -> int:
        """How many equations are in blocks."""
        return len(self.equations) * self.blocks

    def owner(self) -> dict[int, int]:
        """Equation -> block."""
        return {i: n for row in self.equations for n, i in enumerate(row) if i is not None}

    def extra(self, view: View) -> list[tuple[Var, ...]]:
        """The rows of variables of which some are read outside: not in their block, and not in the next as
        what it takes. What the last block leaves as its result is no extra.
        """
        owner, found = self.owner(), []
        results = [{row[n] for row in self.results} for n in range(self.blocks)]
        for row in self.equations:
            if any(i is None for i in row):
                continue
            for variables in zip(*(view.eqns[i].outvars for i in row if i is not None), strict=True):
                for n, v in enumerate(variables):
                    passed = v in results[n]
                    own = {n, n + 1} if passed else {n}
                    last = passed and n == self.blocks - 1
                    if not last and any(owner.get(i) not in own for i in view.readers.get(v, ())):
                        found.append(variables)
                        break
        return found


def aligned(view: View, steps: Sequence[Step]) -> Rows | None:
    """The blocks that steps from last to first have matched; fewer where an early one feeds a later one
    directly; None where less than two are left.
    """
    table = _equations(view, steps)
    takes = [list(steps[0].carried), *(list(step.carried.values()) for step in steps)][::-1]
    carried = [tuple(row) for row in zip(*takes, strict=True)]
    while table and len(table[0]) > 1:
        rows = _classified(view, table, carried)
        crossing = _crossing(view, rows) if rows is not None else 0
        if rows is not None and not crossing:
            return rows
        if rows is None:
            return None
        table = [row[crossing:] for row in table]
        carried = [row[crossing:] for row in carried]
    return None


def _equations(view: View, steps: Sequence[Step]) -> list[tuple[int | None, ...]]:
    """The rows of equations. The pattern is the last block but one, which has the tails too."""
    first = steps[0]
    after = {left: right for right, left in first.pairs.items()}
    table: list[tuple[int | None, ...]] = []
    for i in sorted({*after, *first.tails}):
        row: list[int | None] = [i]
        for step in steps[1:]:
            found = step.pairs.get(row[-1]) if row[-1] is not None else None
            row.append(found)
        if None in row:
            continue
        last = after.get(i, _tail(view, i, after, first) if i in first.tails else None)
        if last is not None:
            after[i] = last
        table.append((*row[::-1], last))
    table.sort(key=lambda row: row[-1] is None)
    return table


def _tail(view: View, i: int, after: dict[int, int], step: Step) -> int | None:
    """The equation that does in the last block what i does in the one before, if it is there."""
    takes = {id(left): right for right, left in step.carried.items()}

    def image(v: Atom) -> Atom:
        if id(v) in takes:
            return takes[id(v)]
        made = view.made_by(v)
        if isinstance(v, Literal) or made is None or made not in after:
            return v
        return view.eqns[after[made]].outvars[view.eqns[made].outvars.index(v)]

    wanted = [image(v) for v in view.eqns[i].invars]
    users = [
        j
        for v in wanted
        if isinstance(v, Var)
        for j in view.readers.get(v, ())
        if j >= 0 and j != i and view.key[j] == view.key[i]
        if all(view.same(a, b) for a, b in zip(view.eqns[j].invars, wanted, strict=True))
    ]
    return users[0] if len(set(users)) == 1 else None


def _classified(
    view: View, table: list[tuple[int | None, ...]], carried: list[tuple[Any, ...]]
) -> Rows | None:
    """The rows of operands sorted into what is inside, carried, shared and own; None if they do not line
    up.
    """
    images: dict[Var, tuple[Any, ...]] = {}
    for row in table:
        outs = [view.eqns[i].outvars if i is not None else None for i in row]
        for k, v in enumerate(outs[0] or ()):
            images[v] = tuple(None if out is None else out[k] for out in outs)
    known = {id(row[-1]): row for row in carried}
    results = []
    for taken in carried:
        made = images.get(taken[1])  # what the second block takes, the first has made
        if made is None or any(a is not b for a, b in zip(made[:-1], taken[1:], strict=True)):
            return None
        results.append(made)
    own: dict[tuple[int, ...], tuple[Atom, ...]] = {}
    shared: dict[Atom, None] = {}
    for row in table:
        ins = [view.eqns[i].invars for i in row if i is not None]
        for atoms in zip(*ins, strict=True):
            inside = images.get(atoms[0]) if isinstance(atoms[0], Var) else None
            takes = [known.get(id(atoms[-1]))] if len(atoms) == len(row) else carried
            if any(each is not None and _starts(view, each, atoms) for each in (inside, *takes)):
                continue
            if all(view.same(atoms[0], b) for b in atoms[1:]):
                if isinstance(atoms[0], Var):
                    shared[atoms[0]] = None
            elif all(alike(atoms[0], b) for b in atoms[1:]) and len(atoms) == len(row):
                own[tuple(map(id, atoms))] = atoms
            else:
                return None
    return Rows(table, carried, results, list(own.values()), list(shared))


def _starts(view: View, row: Sequence[Any], atoms: Sequence[Any]) -> bool:
    return all(one(view, a, b) for a, b in zip(row, atoms, strict=False))


def _levels(view: View, rows: Rows) -> list[int]:
    """For each equation of the body, the number, from 1, of the last block that it depends on or is in; 0 for
    none.
    """
    owner = rows.owner()
    levels: list[int] = []
    for i, eqn in enumerate(view.eqns):
        before = (levels[m] for v in eqn.invars if (m := view.made_by(v)) is not None)
        levels.append(max(before, default=0) if i not in owner else owner[i] + 1)
    return levels


def _crossing(view: View, rows: Rows) -> int:
    """How many of the first blocks something outside of the blocks carries on from; 0 is as it should be."""
    levels = _levels(view, rows)
    read = [*rows.shared, *(atom for row in rows.own for atom in row), *(row[0] for row in rows.carried)]
    made = (view.made_by(atom) for atom in read)
    return max((levels[m] for m in made if m is not None), default=0)


# ---------------------------------------------------------------- what each block does besides


def grown(view: View, rows: Rows) -> Rows:
    """The blocks with what every one of them does, alike, with its own values alone."""
    owner, levels = rows.owner(), _levels(view, rows)
    place: dict[Var, tuple[int, int]] = {}
    classes: list[tuple[Var, ...]] = []
    todo = [row for row in rows.carried if all(isinstance(v, Var) for v in row)]

    def add(row: tuple[int | None, ...]) -> None:
        if None not in row:
            for variables in zip(*(view.eqns[i].outvars for i in row if i is not None), strict=True):
                place.update((v, (len(classes), n)) for n, v in enumerate(variables))
                classes.append(variables)
                todo.append(variables)

    for row in rows.equations:
        add(row)
    taken = {(id(v), n): ("carried", k) for k, row in enumerate(rows.carried) for n, v in enumerate(row)}
    found = list(rows.equations)
    own = {tuple(map(id, row)): row for row in rows.own}
    shared = dict.fromkeys(rows.shared)

    def name(atom: Atom, n: int) -> Any:
        """What an operand is in block n: equal for operands that correspond. None for what is of another."""
        if isinstance(atom, Literal):
            return "literal"
        if (id(atom), n) in taken:
            return taken[id(atom), n]
        number, block = place.get(atom, (None, n))
        if number is not None:
            return number if block == n else None
        made = view.made_by(atom)
        return "outside" if made is None or levels[made] == 0 else None

    def counterpart(j: int, n: int, at: Var, names: list[Any]) -> int | None:
        hits = [
            i
            for i in view.readers.get(at, ())
            if i >= 0 and i not in owner and i not in view.taken and view.key[i] == view.key[j]
            if [name(v, n) for v in view.eqns[i].invars] == names
        ]
        return hits[0] if len(hits) == 1 else None

    last = rows.blocks - 1
    for variables in todo:  # which grows
        for j in view.readers.get(variables[-1], ()):
            if j < 0 or j in owner or j in view.taken:
                continue
            names = [name(v, last) for v in view.eqns[j].invars]
            if None in names:
                continue
            row = tuple(counterpart(j, n, v, names) for n, v in enumerate(variables))
            atoms = list(zip(*(view.eqns[i].invars for i in row if i is not None), strict=True))
            if None in row or not all(alike(a[0], b) for a in atoms for b in a):
                continue
            for which, operand in zip(names, atoms, strict=True):
                if which in ("literal", "outside"):
                    if not all(view.same(operand[0], b) for b in operand):
                        own[tuple(map(id, operand))] = operand
                    elif isinstance(operand[0], Var):
                        shared[operand[0]] = None
            owner.update((i, n) for n, i in enumerate(row) if i is not None)
            found.append(row)
            add(row)
    found.sort(key=lambda row: row[-1] is None)
    return dataclasses.replace(rows, equations=found, own=list(own.values()), shared=list(shared))


# ---------------------------------------------------------------- cycles


def cycle(view: View, rows: Rows) -> int:
    """How many blocks it takes until what differs between them comes again: 3 for windows of 8, 8, all.

    What never comes again (weights, an index) is left out; 1 where nothing cycles.
    """
    periods = {p for row in rows.own if (p := _period(view, row)) < len(row)}
    period = math.lcm(*periods)
    return period if rows.blocks % period == 0 and rows.blocks > period else 1


def _period(view: View, row: Sequence[Atom]) -> int:
    """The shortest period of a row that goes through it at least twice; its length if there is none."""
    size = len(row)
    for p in range(2, size // 2 + 1):
        if size % p == 0 and all(view.same(row[n], row[n + p]) for n in range(size - p)):
            return p
    return size


def merged(view: View, rows: Rows, period: int) -> Rows:
    """The table with each `period` blocks as one."""
    if period == 1:
        return rows

    def split(table: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        return [tuple(row[k::period]) for k in range(period) for row in table]

    own, shared = [], dict.fromkeys(rows.shared)
    for row in split(rows.own):
        if not all(view.same(row[0], b) for b in row):
            own.append(row)
        elif isinstance(row[0], Var) and not isinstance(row[0], DropVar):
            shared[row[0]] = None
    return Rows(
        equations=split(rows.equations),
        carried=[tuple(row[::period]) for row in rows.carried],
        results=[tuple(row[period - 1 :: period]) for row in rows.results],
        own=own,
        shared=list(shared),
    )


def sublayers(view: View, rows: Rows) -> int:
    """How many layers, alike but for a part, a block is made of: 2 for one with and one without experts.

    The residual stream is cut wherever all of it goes through one value like it. Of the ways to group what
    lies between, the finest is taken whose groups have a part in common: the same attention, the same MLP.
    """
    main = max(range(len(rows.carried)), key=lambda k: math.prod(shape_of(rows.carried[k][-1])))
    result, entry = rows.results[main][0], rows.carried[main][0]
    inside = sorted(row[0] for row in rows.equations if row[0] is not None)
    stream, last = {entry}, {result: len(view.eqns)}
    for i in inside:
        if not stream.isdisjoint(v for v in view.eqns[i].invars if isinstance(v, Var)):
            stream.update(view.eqns[i].outvars)
            last |= {
                v: i for v in view.eqns[i].invars if isinstance(v, Var) and v in stream and v is not result
            }
    parts = [Counter[Hashable]()]
    ahead = {entry: last.get(entry, 0)}  # what is still to be read of the stream, and by which equation last
    for i in inside:
        eqn = view.eqns[i]
        if not stream.isdisjoint(eqn.outvars):
            parts[-1].update(products(eqn))
            ahead = {v: until for v, until in ahead.items() if until > i}
            ahead |= {v: last[v] for v in eqn.outvars if v in last}
            if len(ahead) == 1 and alike(next(iter(ahead)), rows.carried[main][-1]):
                parts.append(Counter())
    parts = [part for part in parts if part]
    for groups in range(len(parts), 1, -1):
        length, rest = divmod(len(parts), groups)
        columns = [parts[k::length] for k in range(length)]
        if not rest and any(
            column.count(column[0]) == groups == parts.count(column[0]) for column in columns
        ):
            return groups
    return 1


def products(eqn: JaxprEqn) -> list[Hashable]:
    """The contractions of an equation, its bodies' among them, each by its types."""
    return [
        (each.primitive.name, tuple(map(kind_of, (*each.invars, *each.outvars))))
        for each in (eqn, *(inner for body in bodies(eqn) for inner in equations(body)))
        if each.primitive.name.startswith(("dot_general", "ragged_dot", "conv_general"))
    ]
