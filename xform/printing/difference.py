"""The difference of two programs as lines: what was added, removed and changed, the rest folded away.

Both programs use one set of names: a variable of the second is called what its counterpart in the first is
called, a new one that takes the place of `x` is `x'`, and later equations that read `x'` count as unchanged.
Two programs that are the same up to the names of their variables have an empty difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal as OneOf

from xform.higher_order import bodies
from xform.printing import listing
from xform.printing.compare import Match, Step, compare
from xform.printing.listing import Line, Names, is_empty
from xform.printing.phrases import SILENT
from xform.printing.spell import spell, type_text
from xform.trace import DropVar, Jaxpr, JaxprEqn, Literal, Var

Mark = OneOf[" ", "+", "-", "~", "."]

COLORS = {"+": "\033[32m", "-": "\033[31m", "~": "\033[33m", ".": "\033[2m", " ": ""}
RESET = "\033[0m"


@dataclasses.dataclass(frozen=True)
class DiffLine:
    """A line of a difference: in both (' '), '+', '-', the same change again ('~'), or a fold ('.').

    `parent` is the index, in the unfolded list, of the line that this one stands under, -1 at the top.
    `rewired`: the equation reads a new variable in place of an old one. `changed`: this '-' or '+' is one
    side of an equation that both programs have; `note` says what differs where its line does not show it. A
    fold stands for `folded`, the lines that are left out.
    """

    mark: Mark
    line: Line
    parent: int = -1
    rewired: bool = False
    changed: bool = False
    note: str = ""
    folded: tuple[DiffLine, ...] = ()

    def __str__(self) -> str:
        text = f"{' ' if self.mark == '.' else self.mark} {self.line}"
        return f"{text}  ({self.note})" if self.note else text


def diff(before: Jaxpr, after: Jaxpr, context: int | None = 2) -> list[DiffLine]:
    """What turns `before` into `after`; `context` unchanged lines around each change, None for all of
    them."""
    rows, _ = rows_of(compare(before, after), None)
    if context is None:
        return rows if any(row.mark != " " for row in rows) else []
    return fold(rows, context)


def diff_text(
    before: Jaxpr, after: Jaxpr, context: int = 2, *, color: bool = False, source: bool = True
) -> str:
    """The difference as text, '' if there is none; `color` for a terminal."""
    return "\n".join(render(row, color, source) for row in diff(before, after, context))


def render(row: DiffLine, color: bool, source: bool = True) -> str:
    text = str(row)
    if source:
        text = listing.with_source(text, row.line, 90)
    on = COLORS[row.mark] if color else ""
    return f"{on}{text}{RESET}" if on else text


# ---------------------------------------------------------------- folding


def fold(rows: Sequence[DiffLine], context: int) -> list[DiffLine]:
    """The changed rows, with their neighbours under the same parent and the rows that they stand under.

    Each stretch of the others becomes one row.
    """
    keep = [row.mark != " " for row in rows]
    if not any(keep):
        return []
    siblings: dict[int, list[int]] = {}
    for k, row in enumerate(rows):
        siblings.setdefault(row.parent, []).append(k)
    for among in siblings.values():
        changed = [place for place, k in enumerate(among) if rows[k].mark != " "]
        for place in changed:
            for near in among[max(0, place - context) : place + context + 1]:
                keep[near] = True
    for k in range(len(rows) - 1, -1, -1):
        if keep[k] and rows[k].parent >= 0:
            keep[rows[k].parent] = True
    found: list[DiffLine] = []
    hidden: list[DiffLine] = []
    for row, kept in zip(rows, keep, strict=True):
        if not kept:
            hidden.append(row)
            continue
        found += _folded(hidden)
        hidden = []
        found.append(row)
    return found + _folded(hidden)


def _folded(hidden: list[DiffLine]) -> list[DiffLine]:
    if len(hidden) <= 1:
        return hidden
    equations = sum(row.line.kind == "eqn" for row in hidden)
    others = len(hidden) - equations
    what = (
        f"{equations} equation{'s' * (equations != 1)}"
        if equations
        else f"{others} line{'s' * (others != 1)}"
    )
    said = f"... {what} unchanged"
    rewired = sum(row.rewired for row in hidden)
    if rewired:
        said += f", {rewired} of them reading a new variable"
    depth = min(row.line.depth for row in hidden)
    return [DiffLine(".", Line("eqn", depth, said), folded=tuple(hidden))]


# ---------------------------------------------------------------- rows


def rows_of(match: Match, names: Names | None) -> tuple[list[DiffLine], Names]:
    """Every line of both programs, marked, and the names of the second program's variables.

    `names` are those of the first, if it has been named already: so a chain of programs keeps its names
    throughout.
    """
    before = Names() if names is None else names
    after = before.new()
    writer = _Writer()
    _name_all(match.before, before)
    writer.inputs(match, before, after)
    writer.steps(match, before, after, 0, -1)
    writer.outputs(match, before, after)
    return writer.rows, after


def _name_all(jaxpr: Jaxpr, names: Names) -> None:
    """Names all variables of a program in the order in which `lines` would, before any new one gets a
    name."""
    listing.lines(jaxpr, names=names)


class _Writer:
    def __init__(self) -> None:
        self.rows: list[DiffLine] = []
        self.seen: dict[tuple[Jaxpr, Jaxpr], str] = {}
        self.alone: dict[tuple[Mark, Jaxpr], str] = {}

    def put(
        self,
        mark: Mark,
        line: Line,
        parent: int,
        *,
        rewired: bool = False,
        changed: bool = False,
        note: str = "",
    ) -> int:
        self.rows.append(DiffLine(mark, line, parent, rewired, changed, note))
        return len(self.rows) - 1

    # ------------------------------------------------------------ names

    def give(self, variables: Sequence[Var], match: Match, before: Names, after: Names) -> None:
        """Names variables of the second program after their counterparts, or as new."""
        for v in variables:
            if v in after.of or isinstance(v, DropVar):
                continue
            old = match.origin.get(v)
            if isinstance(old, Var) and not isinstance(old, DropVar):
                after.call(v, before.name(old))
            elif v in match.stands_for:
                after.call(v, after.primed(before.name(match.stands_for[v])))
            else:
                after.name(v)

    # ------------------------------------------------------------ the ends of a program

    def inputs(self, match: Match, before: Names, after: Names) -> None:
        self.give(match.after.all_invars, match, before, after)
        kept = set(match.origin.values())
        for v in match.before.constvars:
            if v not in kept:
                self.put("-", Line("const", 0, f"const {listing.typed(v, before)}"), -1)
        for v in match.after.constvars:
            mark: Mark = " " if v in match.origin else "+"
            self.put(mark, Line("const", 0, f"const {listing.typed(v, after)}"), -1)
        for i, j in match.inputs:
            if j is not None:
                (line,) = listing.input_lines(match.after, after, [j])
                self.put("+" if i is None else " ", line, -1)
            elif i is not None:
                (line,) = listing.input_lines(match.before, before, [i])
                self.put("-", line, -1)

    def outputs(self, match: Match, before: Names, after: Names) -> None:
        new = listing.output_lines(match.after, after)
        if not match.outputs_changed:
            for line in new:
                self.put(" ", line, -1)
            return
        old = listing.output_lines(match.before, before)
        for k in range(max(len(old), len(new))):
            same = k < min(len(old), len(new)) and _same_exit(match, k)
            if k < len(old) and not same:
                self.put("-", old[k], -1)
            if k < len(new):
                self.put(" " if same else "+", new[k], -1)

    # ------------------------------------------------------------ equations

    def steps(self, match: Match, before: Names, after: Names, depth: int, parent: int) -> None:
        for step in match.steps:
            self.step(step, match, before, after, depth, parent)

    def step(self, step: Step, match: Match, before: Names, after: Names, depth: int, parent: int) -> None:
        old = None if step.before is None else match.before.eqns[step.before]
        new = None if step.after is None else match.after.eqns[step.after]
        if new is not None:
            self.give(new.outvars, match, before, after)
        if old is not None and new is not None:
            self.both(step, old, new, before, after, depth, parent)
        elif new is not None and step.after is not None:
            at = self.put("+", listing.eqn_line(new, after, depth), parent)
            self.one("+", new, step.after, after, depth, at, step.wraps, before)
        elif old is not None and step.before is not None:
            at = self.put("-", listing.eqn_line(old, before, depth), parent)
            self.one("-", old, step.before, before, depth, at, step.wraps, after)

    def both(
        self, step: Step, old: JaxprEqn, new: JaxprEqn, before: Names, after: Names, depth: int, parent: int
    ) -> None:
        new_line = listing.eqn_line(new, after, depth)
        if step.changed:
            old_line = listing.eqn_line(old, before, depth)
            self.put("-", old_line, parent, changed=True)
            same_text = old_line.text == new_line.text
            note = _difference(old, new, before, after) if same_text else ""
            at = self.put("+", new_line, parent, changed=True, note=note)
        else:
            at = self.put(" ", new_line, parent, rewired=step.rewired)
        assert step.before is not None and step.after is not None
        for number_before, number, inner in step.inner:
            names_before = before.body(step.before, number_before)
            names_after = after.body(step.after, number)
            body = inner.after
            pair = (inner.before, body)
            if (is_empty(inner.before) and is_empty(body)) or not listing.shown(new):
                continue
            if pair in self.seen:
                mark: Mark = " " if inner.same else "~"
                line = listing.again_line(new, number, depth + 1, self.seen[pair], body)
                if not inner.same:
                    line = dataclasses.replace(line, text=line.text + ", the same changes")
                self.put(mark, line, at)
                continue
            if body.eqns or inner.before.eqns:
                self.seen[pair] = listing.called_so(new, after)
            self.give(body.all_invars, inner, names_before, names_after)
            line = listing.body_line(new, number, body, names_after, depth + 1)
            if all(j is not None and i is not None for i, j in inner.inputs):
                under = self.put(" ", line, at)
            else:
                gone = listing.body_line(old, number_before, inner.before, names_before, depth + 1)
                self.put("-", gone, at)
                under = self.put("+", line, at)
            self.steps(inner, names_before, names_after, depth + 2, under)
            line = listing.return_line(body, names_after, depth + 2)
            if inner.outputs_changed:
                self.put("-", listing.return_line(inner.before, names_before, depth + 2), under)
            self.put("+" if inner.outputs_changed else " ", line, under)
        for number in range(len(step.inner), len(listing.shown(old))):
            self.body("-", old, step.before, number, before, depth, at)
        for number in range(len(step.inner), len(listing.shown(new))):
            self.body("+", new, step.after, number, after, depth, at)

    def one(
        self,
        mark: Mark,
        eqn: JaxprEqn,
        index: int,
        names: Names,
        depth: int,
        at: int,
        wraps: Match | None,
        other: Names,
    ) -> None:
        """The bodies of an equation that only one of the programs has; `other` are the names of the other
        one."""
        if wraps is None:
            for number in range(len(listing.shown(eqn))):
                self.body(mark, eqn, index, number, names, depth, at)
            return
        (body,) = bodies(eqn)
        inner = names.body(index, 0)
        if mark == "+":  # the call holds what stood here
            self.give(body.all_invars, wraps, other, inner)
            under = self.put("+", listing.body_line(eqn, 0, body, inner, depth + 1), at)
            self.steps(wraps, other, inner, depth + 2, under)
            self.put("+", listing.return_line(body, inner, depth + 2), under)
        else:  # what the call held stands here
            for v, atom in zip(body.outvars, eqn.outvars, strict=True):
                if isinstance(v, Var) and not isinstance(atom, DropVar):
                    inner.call(v, names.name(atom))
            self.put("-", listing.body_line(eqn, 0, body, inner, depth + 1), at)
            self.steps(wraps, inner, other, depth, -1 if at < 0 else self.rows[at].parent)

    def body(
        self, mark: Mark, eqn: JaxprEqn, index: int, number: int, names: Names, depth: int, at: int
    ) -> None:
        """A body that only one of the programs has."""
        body, inner = bodies(eqn)[number], names.body(index, number)
        if is_empty(body):
            return
        if (mark, body) in self.alone:
            self.put(mark, listing.again_line(eqn, number, depth + 1, self.alone[mark, body], body), at)
            return
        if body.eqns:
            self.alone[mark, body] = listing.called_so(eqn, names)
        under = self.put(mark, listing.body_line(eqn, number, body, inner, depth + 1), at)
        for k, inside in enumerate(body.eqns):
            deeper = self.put(mark, listing.eqn_line(inside, inner, depth + 2), under)
            for n in range(len(listing.shown(inside))):
                self.body(mark, inside, k, n, inner, depth + 2, deeper)
        self.put(mark, listing.return_line(body, inner, depth + 2), under)


def _same_exit(match: Match, k: int) -> bool:
    old, new = match.before.outvars[k], match.after.outvars[k]
    if isinstance(old, Literal) or isinstance(new, Literal):
        return isinstance(old, Literal) and isinstance(new, Literal) and str(old) == str(new)
    return match.origin.get(new) is old or match.stands_for.get(new) is old


def _difference(old: JaxprEqn, new: JaxprEqn, before: Names, after: Names) -> str:
    """What differs between two equations whose lines read alike: parameters, operands that are not shown."""
    found = []
    for name in {**old.params, **new.params}:
        a, b = spell(old.params.get(name)), spell(new.params.get(name))
        if a != b and name not in SILENT:
            found.append(f"{name}: {a} -> {b}")
    operands = zip(map(before.name, old.invars), map(after.name, new.invars), strict=False)
    found += [f"operand {k}: {a} -> {b}" for k, (a, b) in enumerate(operands) if a != b]
    types = zip(*([type_text(v.aval) for v in eqn.outvars] for eqn in (old, new)), strict=False)
    found += [f"result {k}: {a} -> {b}" for k, (a, b) in enumerate(types) if a != b]
    for what, many in (
        ("operands", (len(old.invars), len(new.invars))),
        ("results", (len(old.outvars), len(new.outvars))),
    ):
        if many[0] != many[1]:
            found.append(f"{many[0]} {what} -> {many[1]}")
    if not found:
        return "the program inside differs"
    return "; ".join(found[:4]) + ("; ..." if len(found) > 4 else "")
