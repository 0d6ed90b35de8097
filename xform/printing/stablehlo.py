"""The difference of two StableHLO texts that ignores how their values and private functions are numbered.

A text is read line by line. `%12`, `%arg3` and `@silu_4` are names; lines are aligned by what is left when
the names are taken out, and a name of the second text is put back as the name that it answers to in the
first.
"""

from __future__ import annotations

import dataclasses
import re

from xform.printing.align import align
from xform.printing.difference import DiffLine, Mark, fold, render
from xform.printing.listing import Line

NAME = re.compile(r"%[A-Za-z0-9_$.\-]+(?:#\d+)?|@[A-Za-z0-9_$.\-]+")
SEE_THROUGH = re.compile(r"sdy\.sharding_constraint|stablehlo\.optimization_barrier|@Sharding")
RESULTS = re.compile(r"^\s*(%[^=]*?)\s*=\s")
LOCATION = re.compile(r"\s*loc\((?:#loc\d*|\"[^\"]*\"[^)]*|unknown)\)|^#loc.*$")


def stablehlo_diff(before: str, after: str, context: int = 2, *, color: bool = False) -> str:
    """What turns one text into the other, '' if only numbering and locations differ."""
    return "\n".join(render(row, color, False) for row in stablehlo_rows(before, after, context))


def stablehlo_rows(before: str, after: str, context: int | None = 2) -> list[DiffLine]:
    """The same, line by line; `context` unchanged lines around each change, None for all of them."""
    old, new = _read(before), _read(after)
    bare_old, bare_new = [_bare(line) for line in old], [_bare(line) for line in new]
    pairs = align([(_deep(old, bare_old), _deep(new, bare_new)), (bare_old, bare_new)])
    rows: list[DiffLine] = []
    names = _Correspondence()
    i, j = 0, 0
    for next_i, next_j in [*pairs, (len(old), len(new))]:
        for line in old[i:next_i]:
            names.remove(line)
            rows.append(_row("-", line))
        for line in new[j:next_j]:
            names.add(line)
            rows.append(_row("+", names.put(line)))
        if next_i < len(old) and next_j < len(new):
            a, b = old[next_i], new[next_j]
            same = names.pair(a, b)
            rows += [_row(" ", names.put(b))] if same else [_row("-", a), _row("+", names.put(b))]
        i, j = next_i + 1, next_j + 1
    rows = _nested(rows)
    if all(row.mark == " " for row in rows):
        return []
    return rows if context is None else fold(rows, context)


def _read(text: str) -> list[str]:
    lines = (LOCATION.sub("", line).rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def _function(line: str) -> bool:
    return line.lstrip().startswith("func.func")


def _bare(line: str) -> str:
    return NAME.sub(lambda m: m[0][0] if m[0][0] == "%" else _base(m[0]), line)


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _deep(lines: list[str], bare: list[str]) -> list[tuple[str, ...]]:
    """Each bare line with the bare lines that made its operands: tells alike lines apart."""
    made: dict[str, str] = {}
    found = []
    for line, key in zip(lines, bare, strict=True):
        if _function(line):
            made = {}
        results = _results(line)
        operands = [_value(name) for name in NAME.findall(line) if name[0] == "%"]
        found.append((key, *(made.get(name, "") for name in operands if name not in results)))
        made.update(dict.fromkeys(results, key))
    return found


def _results(line: str) -> list[str]:
    head = RESULTS.match(line)
    return [_value(name) for name in NAME.findall(head[1])] if head else []


def _value(name: str) -> str:
    return name.split("#")[0]


def _row(mark: Mark, line: str) -> DiffLine:
    text = line.lstrip()
    return DiffLine(mark, Line("text", (len(line) - len(text)) // 2, text))


def _nested(rows: list[DiffLine]) -> list[DiffLine]:
    """The rows with their parents, by indentation."""
    found: list[DiffLine] = []
    open_rows: list[int] = []
    for k, row in enumerate(rows):
        while open_rows and rows[open_rows[-1]].line.depth >= row.line.depth:
            open_rows.pop()
        found.append(dataclasses.replace(row, parent=open_rows[-1] if open_rows else -1))
        open_rows.append(k)
    return found


class _Correspondence:
    """Which name of the first text a name of the second answers to: functions for good, values for one
    function.

    A value made anew may stand for a value that is gone, and for one that it was made from.
    """

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.made_from: dict[str, set[str]] = {}
        self.removed: set[str] = set()
        self.taken: set[str] = set()

    def remove(self, line: str) -> None:
        self.removed.update(_results(line))

    def add(self, line: str) -> None:
        if _function(line):
            self._enter()
        results = _results(line)
        sources = {self.old(name) for name in NAME.findall(line) if _value(name) not in results}
        for name in [_value(name) for name in NAME.findall(line) if name in sources]:
            sources |= self.made_from.get(name, set())
        through = [name for name in sources if name] if SEE_THROUGH.search(line) else []
        for name in results:
            self.values.pop(name, None)
            self.made_from[name] = {source for source in sources if source}
            if len(through) == 1:
                self.values[name] = self._primed(_value(through[0]))

    def pair(self, old: str, new: str) -> bool:
        """Pairs the names of two lines; False if one of them answers to another name already."""
        if _function(new):
            self._enter()
        results = dict(zip(_results(new), _results(old), strict=False))
        for b, a in results.items():
            self.values[b] = a
            self.made_from.pop(b, None)
            self.removed.discard(a)
        pairs = zip(NAME.findall(old), NAME.findall(new), strict=False)
        return all([_value(b) in results or self._fits(a, b) for a, b in pairs])

    def _fits(self, a: str, b: str) -> bool:
        if b[0] == "@":
            return self.functions.setdefault(b, a) == a
        base = _value(b)
        if base in self.made_from and (a in self.made_from[base] or _value(a) in self.removed):
            if base not in self.values:
                self.values[base] = self._primed(_value(a))
            return True
        self.values.setdefault(base, _value(a))
        return self.old(b) == a

    def old(self, name: str) -> str:
        """The name in the first text, with the number of the result that is meant; '' if there is none."""
        table = self.functions if name[0] == "@" else self.values
        base, mark, part = name.partition("#")
        return table[base] + mark + part if base in table else ""

    def put(self, line: str) -> str:
        """The line of the second text in the names of the first; a value made anew keeps its own with a
        prime."""
        for name in _results(line):
            if name not in self.values:
                self.values[name] = self._primed(name)
        return NAME.sub(lambda m: self.old(m[0]) or m[0], line)

    def _primed(self, name: str) -> str:
        name += "'"
        while name in self.taken:
            name += "'"
        self.taken.add(name)
        return name

    def _enter(self) -> None:
        self.values, self.made_from, self.removed, self.taken = {}, {}, set(), set()
