"""A program as lines: one equation a line, its bodies indented beneath it, the user's source line at the
right.

    input a: f32[3,8,8]                                       # p
    input b: f32[16,8]                                        # x
    c: f32[16,8] = scan b a [length 3, ...]                   # train.py:20  jvp()
      body: carried d: f32[16,8]; scanned e: f32[8,8]
        f: f32[16,8] = dot_general d e [contract 1x0]         # train.py:14  block
        return f
    output c                                                  # result[0]

Variables are named a, b, ... in the order in which they appear. A body that was printed before is not
printed again.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any
from typing import Literal as OneOf

from xform.higher_order import READ, bodies
from xform.printing import phrases, spell
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, name_stack, source_frame

Kind = OneOf["input", "const", "eqn", "body", "again", "return", "output", "text"]

MOST_NAMES = 12
"""Of longer lists of variables only the first eight are shown."""

WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        abs add an and as at ceil cond copy cos div dot eq erf exp ge gt if in iota is jit le log lt
        max min mod mul name ne neg not of or pad pow rem scan sign sin sort sqrt sub tan tanh to xor
        """,
    )
)
"""Never the name of a variable."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line: its text without indentation, where in the user's source it is from, and its name stack or,
    for an input or output of the whole program, what the user calls it."""

    kind: Kind
    depth: int
    text: str
    source: str = ""
    scope: str = ""
    eqn: JaxprEqn | None = dataclasses.field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "  " * self.depth + self.text


class Names:
    """What the variables of a body are called. The bodies of its equations have names of their own, by their
    place."""

    def __init__(self, fresh: Iterator[str] | None = None, taken: set[str] | None = None) -> None:
        self.of: dict[Var, str] = {}
        self._inner: dict[tuple[int, int], Names] = {}
        self._fresh = _fresh_names() if fresh is None else fresh
        self._taken: set[str] = set() if taken is None else taken

    def name(self, atom: Atom) -> str:
        """The name of a variable, given here when it has none yet; the value of a literal."""
        if isinstance(atom, Literal):
            return spell.literal_text(atom)
        if isinstance(atom, DropVar):
            return "_"
        found = self.of.get(atom)
        if found is None:
            found = self.of[atom] = next(self._fresh)
        return found

    def call(self, var: Var, name: str) -> None:
        self.of[var] = name

    def primed(self, name: str) -> str:
        """`x'`, or with more primes the first that is free."""
        name += "'"
        while name in self._taken:
            name += "'"
        self._taken.add(name)
        return name

    def body(self, equation: int, number: int) -> Names:
        return self._inner.setdefault((equation, number), Names(self._fresh, self._taken))

    def new(self) -> Names:
        """An empty table that shares the supply of fresh names."""
        return Names(self._fresh, self._taken)


def _fresh_names() -> Iterator[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    for length in itertools.count(1):
        for parts in itertools.product(letters, repeat=length):
            name = "".join(parts)
            if name not in WORDS:
                yield name


def lines(jaxpr: Jaxpr, *, names: Names | None = None) -> list[Line]:
    """The program, line by line."""
    found: list[Line] = []
    names = Names() if names is None else names
    found += input_lines(jaxpr, names)
    _body_lines(jaxpr, names, 0, found, {})
    found += output_lines(jaxpr, names)
    return found


def text(jaxpr: Jaxpr, *, source: bool = True) -> str:
    """The program as text, with the user's source lines at the right unless `source` is false."""
    return "\n".join(with_source(str(line), line) if source else str(line) for line in lines(jaxpr))


def with_source(text: str, line: Line, column: int = 88) -> str:
    """The text with the line's source and scope behind it."""
    where = "  ".join(part for part in (line.source, line.scope) if part)
    return f"{text:<{column}}  # {where}" if where else text


def _body_lines(jaxpr: Jaxpr, names: Names, depth: int, out: list[Line], seen: dict[Jaxpr, str]) -> None:
    for k, eqn in enumerate(jaxpr.eqns):
        out.append(eqn_line(eqn, names, depth))
        for number, body in enumerate(shown(eqn)):
            if is_empty(body):
                continue
            if body in seen:
                out.append(again_line(eqn, number, depth + 1, seen[body], body))
                continue
            if body.eqns:
                seen[body] = called_so(eqn, names)
            inner = names.body(k, number)
            out.append(body_line(eqn, number, body, inner, depth + 1))
            _body_lines(body, inner, depth + 2, out, seen)
            out.append(return_line(body, inner, depth + 2))


# ---------------------------------------------------------------- single lines


def eqn_line(eqn: JaxprEqn, names: Names, depth: int) -> Line:
    operands = _few([names.name(v) for v in eqn.invars])
    results = _few([typed(v, names) for v in eqn.outvars], ", ")
    details = phrases.phrases(eqn)
    parts = [f"{results} =" if results else "", phrases.label(eqn), operands]
    if details:
        parts.append("[" + ", ".join(details) + "]")
    return Line("eqn", depth, " ".join(p for p in parts if p), source(eqn), name_stack(eqn), eqn)


def typed(v: Var, names: Names) -> str:
    return f"{names.name(v)}: {spell.type_text(v.aval)}"


def source(eqn: JaxprEqn) -> str:
    """`train.py:12`, of the user's source."""
    frame = source_frame(eqn)
    return "" if frame is None else f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}"


def called_so(eqn: JaxprEqn, names: Names) -> str:
    """A short way to speak of an equation: what it gives and its primitive."""
    results = [names.name(v) for v in eqn.outvars if not isinstance(v, DropVar)]
    return f"{results[0]} = {phrases.label(eqn)}" if results else phrases.label(eqn)


def again_line(eqn: JaxprEqn, number: int, depth: int, where: str, body: Jaxpr) -> Line:
    many = count(body)
    said = f"{body_label(eqn, number)}: as under `{where}` ({many} equation{'s' if many != 1 else ''})"
    return Line("again", depth, said)


def body_line(eqn: JaxprEqn, number: int, body: Jaxpr, names: Names, depth: int) -> Line:
    title = body_label(eqn, number)
    given = [typed(v, names) for v in body.invars]
    split = phrases.loop_split(eqn, title)
    if split is not None and sum(split) == len(given):
        consts, carry, _ = split
        groups = [given[:consts], given[consts : consts + carry], given[consts + carry :]]
        named = zip(("constant", "carried", "scanned"), groups, strict=True)
        told = "; ".join(f"{name} {_few(group, ', ')}" for name, group in named if group)
    else:
        told = _few(given, ", ")
    if body.constvars:
        told += f"; holds {len(body.constvars)} arrays"
    return Line("body", depth, f"{title}: {told}" if told else f"{title}:")


def body_label(eqn: JaxprEqn, number: int) -> str:
    """What a body is to its equation: `branch 1`, `condition`, `body`."""
    target, found = number, "body"
    for name, value in eqn.params.items():
        inside = [
            v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, Jaxpr)
        ]
        if target < len(inside):
            found = name
            break
        target -= len(inside)
    if found == "branches":
        two = len(eqn.params["branches"]) == 2
        return f"branch {target}" + ((" (if true)" if target else " (if false)") if two else "")
    if found == "cond_jaxpr":
        return "condition"
    return "body"


def is_empty(body: Jaxpr) -> bool:
    """Whether a body does and gives nothing, as those do that differentiation leaves behind: it is not
    listing."""
    return not body.eqns and not body.outvars


def return_line(body: Jaxpr, names: Names, depth: int) -> Line:
    return Line("return", depth, f"return {_few([names.name(v) for v in body.outvars])}".rstrip())


def input_lines(jaxpr: Jaxpr, names: Names, only: Sequence[int] | None = None) -> list[Line]:
    """The constants and inputs of a whole program, with the user's names for the inputs."""
    found = []
    if only is None:
        for v in jaxpr.constvars:
            found.append(Line("const", 0, f"const {typed(v, names)}"))
    given = _paths(jaxpr, "arg_names", len(jaxpr.invars))
    for k in range(len(jaxpr.invars)) if only is None else only:
        v = jaxpr.invars[k]
        found.append(Line("input", 0, f"input {typed(v, names)}", scope=given[k]))
    return found


def output_lines(jaxpr: Jaxpr, names: Names) -> list[Line]:
    """The outputs of a whole program, with their places in what the user's function returns."""
    paths = _paths(jaxpr, "result_paths", len(jaxpr.outvars))
    return [Line("output", 0, f"output {names.name(v)}", scope=paths[k]) for k, v in enumerate(jaxpr.outvars)]


def _paths(jaxpr: Jaxpr, field: str, many: int) -> list[str]:
    found: Any = getattr(jaxpr.debug_info, field, None) or ()
    return [str(p or "") for p in found] if len(found) == many else [""] * many


def _few(parts: Sequence[str], between: str = " ") -> str:
    if len(parts) <= MOST_NAMES:
        return between.join(parts)
    return between.join([*parts[:8], f"...{len(parts) - 8} more"])


def shown(eqn: JaxprEqn) -> Sequence[Jaxpr]:
    """The bodies of an equation that are printed: not what an operation is in plain JAX."""
    return () if eqn.primitive.name in READ else bodies(eqn)


def count(jaxpr: Jaxpr) -> int:
    """The equations of a program, those of its bodies included."""
    return _count(jaxpr, {})


def _count(jaxpr: Jaxpr, known: dict[Jaxpr, int]) -> int:
    if jaxpr not in known:
        inside = (_count(body, known) for eqn in jaxpr.eqns for body in bodies(eqn))
        known[jaxpr] = len(jaxpr.eqns) + sum(inside)
    return known[jaxpr]
