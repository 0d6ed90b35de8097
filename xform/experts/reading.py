"""Finds where tokens are sorted by expert, and what is done with the rows until they are back.

    order = argsort(ids);  rows = x[order // k];  counts = bincount(ids)
    out = middle(rows, counts, w);  z = out[argsort(order)]           ->    z = operation[experts] ids x w

What follows from the numbers of experts alone is known by what it comes out as (`numbers`). What is done with
the rows in between has to treat each alone (`Middle.check`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xform.errors import Decline
from xform.experts.numbers import Drawn, Numbers, is_argsort, is_whole
from xform.experts.operation import CHOICE, COUNTS, GIVEN, IDS, TOKEN, Middle, Sorted
from xform.higher_order import equations, is_plain_jit
from xform.ops import apply
from xform.ops.marks import mark_of
from xform.raising.flat import View, flat
from xform.raising.placing import Claim, placed
from xform.report import Report
from xform.tensors.runs import taken_out
from xform.trace import Atom, Jaxpr, Literal, Value, Var, shape_of, source_line

WHAT = "tokens sorted by expert"

KEPT = (
    "its products have ranges that are kept from step to step, which would be those of other tokens on each"
    " device and in each microbatch: take a recipe that keeps none, 'int8' or 'fp8'"
)


def lifted(jaxpr: Jaxpr, name: str, report: Report) -> Jaxpr:
    """The program with what is done with tokens sorted by expert as one operation each; itself where there is
    none. The report is told of each, and of what nearly is one, under the name of a pass.
    """
    if not any(is_argsort(eqn) for eqn in equations(jaxpr)):
        return jaxpr
    claims = []
    todo = [flat(jaxpr, calls=is_plain_jit)]
    while todo:
        view = todo.pop(0)
        todo += view.inner()
        for number, eqn in enumerate(view.eqns):
            if not is_argsort(eqn):
                continue
            try:
                claim = _claim(view, number)
            except Decline as why:
                report.declined(name, WHAT, str(why), _line(view, number))
                continue
            if claim is not None:
                claims.append(claim)
                what = f"{WHAT} are one operation"
                report.did(name, what, "right for any number of tokens", _line(view, number))
    with jax.named_scope("experts"):
        return placed(jaxpr, claims, report)


def refused(report: Report) -> str:
    """What was said of tokens that are sorted and stay so, for an error that follows from it; "" for none."""
    those = [note for note in report.of("declined") if note.what == WHAT]
    return "".join(f"; {WHAT} stay so: {note.why} ({note.where})" for note in those)


def _line(view: View, number: int) -> str:
    """The user's line of a sort; where that is a library's own, of what comes next."""
    lines = (view.line(n) for n in range(number, len(view.eqns)))
    return next(filter(None, lines), "")


def _claim(view: View, number: int) -> Claim | None:
    """What is to be put in the place of what follows from one sort; None where it is none of tokens by
    expert. Raises Decline for what nearly is one.
    """
    numbers = Numbers(view, number)
    if numbers.order is None:
        return None
    inside = _followed(numbers)
    counts = inside.counts(numbers)
    if not inside.ways or not counts:
        return None
    return _Dispatch(numbers, inside, numbers.drawn(counts)).claim()


# ---------------------------------------------------------------- rows, from where they are sorted


@dataclasses.dataclass(frozen=True)
class _Way:
    """Where rows come back: equation `number` takes `out` to where they belong. added: to what is there."""

    number: int
    out: Var
    added: bool


@dataclasses.dataclass(frozen=True)
class _Inside:
    """Equations `eqns`, which make `outs` of `takes`; lookups: of rows, that some of these are."""

    eqns: Sequence[int]
    takes: Sequence[Var]
    outs: Sequence[Var]
    lookups: Sequence[int]
    ways: Sequence[_Way]

    def counts(self, numbers: Numbers) -> list[Var]:
        """What may be the number of rows of each expert; what has not as many as there are rows first."""
        found = [v for v in self.takes if v in numbers.made and is_whole(v) and len(shape_of(v)) == 1]
        return sorted(found, key=lambda v: shape_of(v)[0] == numbers.size)


def _followed(numbers: Numbers) -> _Inside:
    """The equations between the rows' lookups and the ways back."""
    view = numbers.view
    lookups = {n for n in range(len(view.eqns)) if _is_lookup(numbers, n, into_rows=True)}
    rows: set[Var] = set()
    eqns: set[int] = set()
    ways: list[_Way] = []
    for number, eqn in enumerate(view.eqns):
        way = _way_back(numbers, number, rows) if rows else None
        if way is not None:
            ways.append(way)
        elif number in lookups:
            rows.update(eqn.outvars)
        elif any(isinstance(v, Var) and v in rows for v in eqn.invars):
            rows.update(eqn.outvars)
            eqns.add(number)
    outs = list(dict.fromkeys(way.out for way in ways))
    eqns &= view.ancestors(outs)
    made = {v for n in eqns for v in view.eqns[n].outvars}
    reads = [v for n in sorted(eqns) for v in view.eqns[n].invars] + outs
    takes = list(dict.fromkeys(v for v in reads if isinstance(v, Var) and v not in made))
    used = {view.makers[v] for v in takes if v in view.makers}
    return _Inside(sorted(eqns), takes, outs, sorted(lookups & used), ways)


def _is_lookup(numbers: Numbers, number: int, into_rows: bool = False) -> bool:
    """Whether it looks up whole rows, one after the other, by what is made of the experts' numbers."""
    eqn, made = numbers.view.eqns[number], numbers.made
    if eqn.primitive.name != "gather" or eqn.invars[1] not in made or eqn.invars[0] in made:
        return False
    d, x = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    lead = len(shape_of(eqn.invars[1])) - 1
    return (
        tuple(d.collapsed_slice_dims) == tuple(d.start_index_map) == (0,)
        and not d.operand_batching_dims
        and tuple(d.offset_dims) == tuple(range(lead, lead + len(x) - 1))
        and tuple(eqn.params["slice_sizes"]) == (1, *x[1:])
        and (not into_rows or shape_of(eqn.invars[1]) == (numbers.size, 1))
    )


def _way_back(numbers: Numbers, number: int, rows: set[Var]) -> _Way | None:
    eqn = numbers.view.eqns[number]
    if _is_lookup(numbers, number) and eqn.invars[0] in rows:
        return _Way(number, eqn.invars[0], False)
    if eqn.primitive.name not in ("scatter-add", "scatter") or eqn.invars[1] not in numbers.made:
        return None
    d, (x, at, new) = eqn.params["dimension_numbers"], map(shape_of, eqn.invars)
    whole = (
        at == (numbers.size, 1)
        and tuple(d.inserted_window_dims) == tuple(d.scatter_dims_to_operand_dims) == (0,)
        and not d.operand_batching_dims
        and tuple(d.update_window_dims) == tuple(range(1, len(x)))
        and new == (numbers.size, *x[1:])
    )
    if not whole or eqn.invars[2] not in rows or eqn.invars[0] in rows:
        return None
    return _Way(number, eqn.invars[2], eqn.primitive.name == "scatter-add")


# ---------------------------------------------------------------- whose rows they are


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the numbers of choices lie: those of a token one after the other (`first`), or of all tokens."""

    tokens: int
    choices: int
    first: bool

    def token(self, n: Any) -> Any:
        """The token of a choice."""
        return n // self.choices if self.first else n % self.tokens

    def by_token(self, x: Value) -> Value:
        """Something for each choice as [tokens, choices, ...]."""
        if self.first:
            return x.reshape(self.tokens, self.choices, *x.shape[1:])
        return x.reshape(self.choices, self.tokens, *x.shape[1:]).swapaxes(0, 1)

    def by_choice(self, x: Value) -> Value:
        """[tokens, choices, ...] in the order of choices."""
        x = x if self.first else x.swapaxes(0, 1)
        return x.reshape(self.tokens * self.choices, *x.shape[2:])


class _Dispatch:
    """What is done with the rows of one sort, now that it is known what its numbers come out as."""

    def __init__(self, numbers: Numbers, inside: _Inside, drawn: Drawn) -> None:
        self.numbers, self.inside, self.drawn = numbers, inside, drawn
        self.view, self.size = numbers.view, numbers.size
        self.layout = self._layout()

    def _layout(self) -> _Layout:
        """By the rows that are of tokens, looked up or added to: as many as there are, and in which order."""
        if not self.drawn.sorts:
            raise Decline("what is sorted along with the numbers of experts is not the number of each row")
        for number in (*self.inside.lookups, *(way.number for way in self.inside.ways if way.added)):
            eqn = self.view.eqns[number]
            tokens, at = shape_of(eqn.invars[0])[0], eqn.invars[1]
            if tokens == self.size or self.size % tokens or self.drawn.is_(at, self.drawn.sorted_ids):
                continue
            for first in (True, False):
                layout = _Layout(tokens, self.size // tokens, first)
                if self.drawn.is_(at, [layout.token(n) for n in self.drawn.order]):
                    return layout
            raise Decline(f"rows in another order than tokens in that of experts ({source_line(eqn)})")
        return _Layout(self.size, 1, True)

    def kind(self, v: Var) -> str:
        """What an operand of the middle is; "" for what the middle has to make itself."""
        maker, drawn = self.view.maker(v), self.drawn
        if (of := self.rows_of(v)) is not None:
            return CHOICE if shape_of(of)[0] == self.size else TOKEN
        if v in drawn.counts:
            return COUNTS
        if v in drawn.values and shape_of(v) == (self.size,) and drawn.is_(v, drawn.sorted_ids):
            return IDS
        if v in self.numbers.static and maker is not None and self.size in shape_of(v):
            if maker.primitive.name == "iota":
                raise Decline(f"rows are numbered in the order of experts ({source_line(maker)})")
            return ""
        return "" if v in self.numbers.follows else GIVEN

    def rows_of(self, v: Var) -> Atom | None:
        """What has the rows, of tokens or of their choices, that this is in the order of experts."""
        maker = self.view.makers.get(v, -1)
        if maker < 0 or v in self.numbers.made or not _is_lookup(self.numbers, maker, into_rows=True):
            return None
        x, at = self.view.eqns[maker].invars[:2]
        order = self.drawn.order
        expected = {self.layout.tokens: list(map(self.layout.token, order)), self.size: order}
        count = shape_of(x)[0]
        return x if count in expected and self.drawn.is_(at, expected[count]) else None

    def completed(self) -> tuple[list[int], dict[Var, str]]:
        """The middle with whatever else is made of the numbers of experts, and what it takes, each of a kind.
        Raises Decline where that is none.
        """
        eqns, kinds = set(self.inside.eqns), dict[Var, str]()
        todo = list(self.inside.takes)
        while todo:
            v = todo.pop()
            maker = self.view.makers.get(v, -1)
            if v in kinds or maker in eqns:
                continue
            if kind := self.kind(v):
                kinds[v] = kind
            elif maker < 0 or v in (self.numbers.base, self.numbers.order):
                raise Decline("what is done with rows takes more that is made of the numbers of experts")
            else:
                eqns.add(maker)
                todo += [w for w in self.view.eqns[maker].invars if isinstance(w, Var)]
        reads = [v for n in sorted(eqns) for v in self.view.eqns[n].invars if isinstance(v, Var)]
        return sorted(eqns), {v: kinds[v] for v in (*reads, *self.inside.outs) if v in kinds}

    # ------------------------------------------------------------ back at their tokens

    def to_tokens(self, way: _Way) -> bool:
        """Whether the choices of a token are added up."""
        return way.added and shape_of(self.view.eqns[way.number].invars[0])[0] != self.size

    def check(self, way: _Way) -> None:
        """Raises Decline where rows come back anywhere but at their tokens' choices, or, added, tokens."""
        eqn, drawn, layout = self.view.eqns[way.number], self.drawn, self.layout
        at, there = eqn.invars[1], shape_of(eqn.invars[0])[0]
        if eqn.primitive.name == "gather":
            right = drawn.inverts(at)
        elif self.to_tokens(way):
            right = there == layout.tokens and drawn.is_(at, list(map(layout.token, drawn.order)))
        else:
            right = there == self.size and drawn.is_(at, drawn.order)
        if not right:
            raise Decline(f"rows do not come back to the tokens that they are of ({source_line(eqn)})")

    def back(self, way: _Way, x: Value, there: Value) -> Value:
        """[tokens, choices, ...] as the way back has it. there: what rows are added to, if they are."""
        if self.to_tokens(way):
            return there + x.astype(there.dtype).sum(1)
        x = self.layout.by_choice(x).reshape(shape_of(self.view.eqns[way.number].outvars[0]))
        return there + x if way.added else x

    # ------------------------------------------------------------ the operation in their place

    def claim(self) -> Claim:
        inside, view, layout = self.inside, self.view, self.layout
        for way in inside.ways:
            self.check(way)
        eqns, operands = self.completed()
        kinds, part = tuple(operands.values()), taken_out(view.jaxpr, eqns)
        info = part.debug_info.with_unknown_names()
        program = part.replace(invars=list(operands), outvars=list(inside.outs), debug_info=info)
        if marked := next((eqn for eqn in equations(program) if mark_of(eqn) is not None), None):
            raise Decline(f"{KEPT} ({source_line(marked)})")
        experts = self.drawn.experts
        bounded = self.numbers.is_bounded(experts)
        natural = bounded or self.numbers.is_natural
        middle = Middle(program, kinds, self.size, experts, bounded, natural)
        middle.check()
        sources = [(self.rows_of(v) or v, k) for v, k in operands.items() if k not in (IDS, COUNTS)]
        there = {way: view.eqns[way.number].invars[0] for way in inside.ways if way.added}
        takes = (self.numbers.ids, *(v for v, _ in sources), *there.values())
        gives = [view.eqns[way.number].outvars[0] for way in inside.ways]
        self.in_order(takes)

        def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
            def read(v: Atom | None) -> Value:
                return v.val if isinstance(v, Literal) else None if v is None else values[v]

            args = [layout.by_token(read(v)) if k == CHOICE else read(v) for v, k in sources]
            outs = apply(Sorted(middle), layout.by_token(read(self.numbers.ids)), *args)
            made = dict(zip(inside.outs, outs, strict=True))
            pairs = zip(gives, inside.ways, strict=True)
            return {give: self.back(way, made[way.out], read(there.get(way))) for give, way in pairs}

        return Claim(view, list(dict.fromkeys(v for v in takes if isinstance(v, Var))), gives, emit)

    def in_order(self, takes: Sequence[Atom]) -> None:
        """Raises Decline where something is taken that is made after the first rows are back."""
        first = self.inside.ways[0].number
        late = (n for v in takes if isinstance(v, Var) and (n := self.view.makers.get(v, -1)) >= first)
        if (number := next(late, None)) is not None:
            raise Decline(f"rows come back while more is made of what is back ({self.view.line(number)})")
