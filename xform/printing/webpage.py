"""The stages of a program on one HTML page, for a reader who has never seen a jaxpr.

The page stands alone: no other file, no network. It says what it shows and how a line is read, lists what
each pass did, and shows each pass's changes with everything else folded away. The folded lines travel as data
and become elements only when they are opened, so a program of tens of thousands of lines opens at once.
"""

from __future__ import annotations

import html as escaping
import itertools
import json
import linecache
from collections import Counter
from collections.abc import Sequence
from typing import Any

from xform.printing import listing, phrases
from xform.printing.compare import compare
from xform.printing.difference import DiffLine, fold, rows_of
from xform.printing.keys import Fingerprints
from xform.printing.listing import Line, Names, count
from xform.printing.page import CSS, GLOSSARY, JS, TOP
from xform.printing.stablehlo import stablehlo_rows
from xform.trace import Jaxpr, JaxprEqn, source_frame

Changes = list[tuple[str, list[DiffLine]]]
"""Each pass with all lines of the program, as it changed them."""

KINDS = ("eqn", "call", "input", "const", "body", "again", "return", "output", "text")
CLASSES = {"+": "add", "-": "del", "~": "again", " ": "", ".": ""}

LONGEST_RUN = 60
"""Of longer runs of lines that were added or removed, the middle is folded."""


def html(
    stages: Sequence[tuple[str, Jaxpr]],
    *,
    notes: Sequence[str] = (),
    title: str = "What the passes did",
    stablehlo: tuple[str, str] | None = None,
) -> str:
    """The page. `stages` are (name, program): the program as it came, then as each pass left it. A stage
    without a name is no pass's: the program the next pass was given, where JAX has made another of what the
    last one left.

    `notes` are lines of the report, `Pass: ...`; each is shown with its pass. `stablehlo` are the texts of
    the first and the last stage as they go to the compiler.
    """
    page = _Page()
    changes = _changes(stages)
    by_pass, general = _sorted(notes, [name for name, _ in changes])
    sections = [page.stage(k, name, rows, by_pass[name]) for k, (name, rows) in enumerate(changes, 1)]
    sections += page.whole(stages, changes)
    if stablehlo is not None:
        sections.append(page.compiler(*stablehlo))
    equations = count(stages[0][1]) if stages else 0
    parts = [
        TOP.format(title=_e(title), css=CSS, equations=f"{equations:,}"),
        _table(changes),
        _notes(general, "Notes"),
        page.legend(changes),
        "</header><main>",
        *sections,
        "</main>",
        page.data(),
        f"<script>{JS}</script></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _changes(stages: Sequence[tuple[str, Jaxpr]]) -> Changes:
    """Each stage but the first as the difference to the one before, in names that stay."""
    found: Changes = []
    names: Names | None = None
    keys = Fingerprints()
    for (_, before), (name, after) in itertools.pairwise(stages):
        if not name:
            names = None
            continue
        rows, names = rows_of(compare(before, after, keys), names)
        found.append((name, rows))
    return found


def _sorted(notes: Sequence[str], names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The notes of each pass, found by the first word of its stage's name, and the others."""
    by_pass: dict[str, list[str]] = {name: [] for name in names}
    lowered: dict[str, str] = {}
    for name in names:
        lowered.setdefault(name.split()[0].lower() if name.split() else "", name)
    general: list[str] = []
    for note in notes:
        start, _, rest = note.partition(": ")
        known = lowered.get(start.lower()) if rest else None
        if known is None:
            general.append(note)
        else:
            by_pass[known].append(rest)
    return by_pass, general


# ---------------------------------------------------------------- what a pass did, in numbers


def _counts(rows: Sequence[DiffLine]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Equations added, removed and changed, by primitive."""
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for row in rows:
        if row.mark not in "+-" or row.line.kind != "eqn" or row.line.eqn is None:
            continue
        name = row.line.eqn.primitive.name
        if row.changed:
            changed[name] += row.mark == "+"
        else:
            (added if row.mark == "+" else removed)[name] += 1
    return added, removed, +changed


def _told(counts: Counter[str], what: str) -> str:
    if not counts:
        return ""
    most = counts.most_common(4)
    rest = counts.total() - sum(n for _, n in most)
    listed = ", ".join(f"{n} {name}" for name, n in most) + (f", {rest} others" if rest else "")
    return f"{what} {counts.total():,} {_equations(counts.total())} ({listed})"


def _equations(n: int) -> str:
    return "equation" if n == 1 else "equations"


def _summary(rows: Sequence[DiffLine]) -> str:
    added, removed, changed = _counts(rows)
    told = [_told(added, "added"), _told(removed, "removed"), _told(changed, "changed")]
    again = sum(row.mark == "~" for row in rows)
    if again:
        told.append(f"the same changes in {again} more call{'s' * (again != 1)} of the same body")
    said = "; ".join(t for t in told if t)
    if said:
        return said
    same = all(row.mark == " " for row in rows)
    return "left the program as it was" if same else "changed only inputs and outputs"


def _table(changes: Changes) -> str:
    if not changes:
        return ""
    heads = "".join(f"<th>{name}</th>" for name in ("Pass", "Added", "Removed", "Changed", "What it did"))
    rows = []
    for k, (name, lines) in enumerate(changes, 1):
        added, removed, changed = (c.total() for c in _counts(lines))
        rows.append(
            f'<tr><td><a href="#pass{k}">{k}. {_e(name)}</a></td>'
            f'<td class="n plus">{_signed("+", added)}</td><td class="n minus">{_signed(MINUS, removed)}</td>'
            f'<td class="n mod">{changed or ""}</td><td>{_e(_summary(lines))}</td></tr>'
        )
    return f'<table class="passes"><tr>{heads}</tr>{"".join(rows)}</table>'


MINUS = "\u2212"


def _signed(sign: str, n: int) -> str:
    return f"{sign}{n:,}" if n else ""


def _notes(notes: Sequence[str], title: str) -> str:
    if not notes:
        return ""
    listed = '<ul class="notes">' + "".join(f"<li>{_e(note)}</li>" for note in notes) + "</ul>"
    if len(notes) <= 6:
        return listed
    return f'<details class="soft"><summary>{title}: {len(notes)}</summary>{listed}</details>'


def _e(text: str) -> str:
    return escaping.escape(text)


# ---------------------------------------------------------------- sections and lines


class _Table:
    """Things by number, each once."""

    def __init__(self, first: Any) -> None:
        self._numbers: dict[Any, int] = {first: 0}

    def number(self, thing: Any) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def all(self) -> list[Any]:
        return list(self._numbers)


class _Page:
    """Writes sections, keeping what is folded for the page's data."""

    def __init__(self) -> None:
        self.texts = _Table("")
        self.sources = _Table(("", "", ""))
        self.scopes = _Table("")
        self.folds: list[list[list[Any]]] = []
        self.primitives: set[str] = set()
        self.places: dict[JaxprEqn, tuple[str, str, str]] = {}

    def section(self, name: str, title: str, head: str, body: str) -> str:
        body = body or '<p class="soft none">No line changed.</p>'
        return (
            f'<section id="{name}"><div class="head"><h2>{_e(title)}</h2>{head}</div>'
            f'<div class="body">{body}</div></section>'
        )

    def stage(self, k: int, name: str, rows: Sequence[DiffLine], notes: Sequence[str]) -> str:
        head = f"<p>{_e(_summary(rows))}</p>{_notes(notes, 'Notes')}"
        return self.section(f"pass{k}", f"{k}. {name}", head, self.rows(_short_runs(fold(rows, 2))))

    def whole(self, stages: Sequence[tuple[str, Jaxpr]], changes: Changes) -> list[str]:
        """The first and the last program, all of it, folded."""
        if not stages:
            return []
        first = [DiffLine(" ", line) for line in listing.lines(stages[0][1])]
        ends = [("before", "The whole program as it came", first)]
        if changes:
            last = [DiffLine(" ", row.line) for row in changes[-1][1] if row.mark in " +~"]
            ends.append(("after", "The whole program after all passes", last))
        return [
            self.section(name, title, "", self.folded(rows, 0, f"{len(rows):,} lines"))
            for name, title, rows in ends
        ]

    def compiler(self, before: str, after: str) -> str:
        head = "<p>The same change, as the compiler is given it. Renumbered values do not count.</p>"
        rows = _short_runs(stablehlo_rows(before, after))
        return self.section("stablehlo", "What goes to the compiler (StableHLO)", head, self.rows(rows))

    def legend(self, changes: Changes) -> str:
        """How a line is read, on a line of this program, and what the operations in the changes do."""
        used: set[str] = set()
        example: Line | None = None
        for row in itertools.chain.from_iterable(rows for _, rows in changes):
            eqn = row.line.eqn
            if eqn is None:
                continue
            if row.mark in "+-":
                used.add(eqn.primitive.name)
            if example is None and eqn.primitive.name == "dot_general" and row.line.source:
                example = row.line
        words = "".join(
            f'<li><code class="o">{_e(name)}</code> {_e(GLOSSARY[name])}</li>'
            for name in sorted(used)
            if name in GLOSSARY
        )
        known = (
            "<details><summary>The operations in the changes</summary>"
            f'<ul class="words">{words}</ul></details>'
            if words
            else ""
        )
        return (
            '<details class="legend" open><summary>How to read a line</summary>'
            f"{_anatomy(example) if example is not None else ''}"
            '<p class="soft">Each variable is set once; they are named a, b, c and so on. '
            "<code>x'</code> is a new variable that takes the place of <code>x</code>: a line that merely "
            "reads <code>x'</code> now does not count as changed. Indented lines are the body of the line "
            "above. Point at an operation or a type to have it explained, at a variable to see where else it "
            "occurs.</p>"
            f"{known}</details>"
        )

    def data(self) -> str:
        held = {
            "texts": self.texts.all(),
            "sources": self.sources.all(),
            "scopes": self.scopes.all(),
            "folds": self.folds,
            "words": {name: GLOSSARY[name] for name in sorted(self.primitives) if name in GLOSSARY},
        }
        text = json.dumps(held, separators=(",", ":")).replace("<", "\\u003c")
        return f'<script type="application/json" id="data">{text}</script>'

    # ------------------------------------------------------------ lines

    def rows(self, rows: Sequence[DiffLine]) -> str:
        return "".join(
            self.folded(row.folded, row.line.depth, row.line.text.removeprefix("... "))
            if row.mark == "."
            else self.row(row)
            for row in rows
        )

    def row(self, row: DiffLine) -> str:
        line = row.line
        where, function, code = self.source(line)
        scope = f"scope: {line.scope}" if where and line.scope else ""
        hover = "\n".join(t for t in (f"{where} in {function}" if where else "", code, scope) if t)
        place = f"<b>{_e(where)}</b> {_e(code)}" if where else _e(line.scope)
        note = f' data-note="{_e(row.note)}"' if row.note else ""
        mark = row.mark.strip().replace("-", MINUS)
        look = CLASSES[row.mark] + (" pair" if row.changed else "") + (" wide" if line.kind == "text" else "")
        return (
            f'<div class="l {look}" style="--d:{line.depth}" data-k="{self.kind(line)}"{note}>'
            f'<span class="m">{mark}</span><span class="t">{_e(line.text)}</span>'
            f'<span class="s" title="{_e(hover)}">{place}</span></div>'
        )

    def folded(self, rows: Sequence[DiffLine], depth: int, said: str) -> str:
        self.folds.append([self.packed(row) for row in rows])
        return (
            f'<details class="fold" style="--d:{depth}" data-rows="{len(self.folds) - 1}">'
            f'<summary>{_e(said)}</summary><div class="rows"></div></details>'
        )

    def packed(self, row: DiffLine) -> list[Any]:
        line = row.line
        packed: list[Any] = [
            line.depth,
            KINDS.index(self.kind(line)),
            self.texts.number(line.text),
            self.sources.number(self.source(line)),
            self.scopes.number(line.scope),
        ]
        return packed if row.mark == " " else [*packed, row.mark]

    def source(self, line: Line) -> tuple[str, str, str]:
        """`train.py:12`, the function, and what stands there."""
        if line.eqn is None or not line.source:
            return line.source, "", ""
        found = self.places.get(line.eqn)
        if found is None:
            frame = source_frame(line.eqn)
            code = linecache.getline(frame.file_name, frame.start_line).strip() if frame is not None else ""
            found = (line.source, frame.function_name if frame is not None else "", code)
            self.places[line.eqn] = found
        return found

    def kind(self, line: Line) -> str:
        if line.eqn is None:
            return line.kind
        self.primitives.add(line.eqn.primitive.name)
        return "call" if " " in phrases.label(line.eqn) else "eqn"


def _short_runs(rows: Sequence[DiffLine]) -> list[DiffLine]:
    """The rows, with the middle of very long runs of added or of removed lines folded."""
    found: list[DiffLine] = []
    for mark, run in itertools.groupby(rows, lambda row: row.mark):
        lines = list(run)
        found += _shortened(lines, "added" if mark == "+" else "removed") if mark in "+-" else lines
    return found


def _shortened(run: list[DiffLine], what: str) -> list[DiffLine]:
    if len(run) <= LONGEST_RUN:
        return run
    ends = LONGEST_RUN // 4
    middle = run[ends:-ends]
    depth = min(row.line.depth for row in middle)
    said = Line("text", depth, f"{len(middle):,} more lines {what}")
    return [*run[:ends], DiffLine(".", said, folded=tuple(middle)), *run[-ends:]]


def _anatomy(line: Line) -> str:
    """A matrix multiplication with a word under each of its parts."""
    eqn = line.eqn
    assert eqn is not None
    head, _, rest = line.text.partition(" = ")
    name, _, kind = head.partition(": ")
    call, _, details = rest.partition(" [")
    label = phrases.label(eqn)
    explained = [
        (name, "v", "the variable that this line sets"),
        (f": {kind}", "y", "its type: the number format, and the size of each dimension"),
        (f"= {label}", "o", "the operation, here a matrix multiplication"),
        (call.removeprefix(label).strip(), "v", "what it is applied to"),
        (f"[{details}", "x", _contraction(eqn)),
        (line.source, "s", "the line of your source that it comes from"),
    ]
    spans = "".join(
        f'<span><code class="{look}">{_e(text)}</code><small>{_e(meaning)}</small></span>'
        for text, look, meaning in explained
    )
    return f'<div class="anatomy">{spans}</div>'


def _contraction(eqn: JaxprEqn) -> str:
    (left, right), _ = eqn.params["dimension_numbers"]
    if not len(left):
        return "details"
    return f"details: dimension {left[0]} of the first is summed against dimension {right[0]} of the second"
