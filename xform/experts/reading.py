"""Finds where tokens are sorted by expert, and what is done with the rows until they are back.

    order = argsort(ids);  rows = x[order // k];  counts = bincount(ids)
    out = middle(rows, counts, w);  z = out[argsort(order)]           ->    z = operation[experts] ids x w

Numbers that are made of the experts' numbers alone (an order, its inverse, counts) are not read but computed,
for experts drawn at random: so it does not matter how a program makes them. What is done with the rows in
between has to treat each alone (`Middle.check`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.errors import Decline
from xform.experts.operation import CHOICE, COUNTS, GIVEN, IDS, TOKEN, Middle, Sorted
from xform.higher_order import equations, is_plain_jit
from xform.ops import apply
from xform.raising.flat import View, flat
from xform.raising.following import static
from xform.raising.placing import Claim, placed
from xform.report import Report
from xform.tensors.runs import taken_out
from xform.trace import (
    Atom,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Value,
    Var,
    eval_jaxpr,
    has_effects,
    shape_of,
    source_line,
)

WHAT = "tokens sorted by expert"


def lifted(jaxpr: Jaxpr, name: str, report: Report) -> Jaxpr:
    """The program with what is done with tokens sorted by expert as one operation each; itself where there is
    none. The report is told of each, and of what nearly is one, under the name of a pass.
    """
    if not any(_is_argsort(eqn) for eqn in equations(jaxpr)):
        return jaxpr
    claims = []
    todo = [flat(jaxpr, calls=is_plain_jit)]
    while todo:
        view = todo.pop(0)
        todo += view.inner()
        for number, eqn in enumerate(view.eqns):
            if not _is_argsort(eqn):
                continue
            try:
                claim = _Dispatch(view, number).claim()
            except Decline as why:
                report.declined(name, WHAT, str(why), _line(view, number))
                continue
            if claim is not None:
                claims.append(claim)
                what = f"{WHAT} are one operation"
                report.did(name, what, "right for any number of tokens", _line(view, number))
    with jax.named_scope("experts"):
        return placed(jaxpr, claims, report)


def _is_argsort(eqn: JaxprEqn) -> bool:
    """Whether it sorts integers, one dimension, and takes something along."""
    p = eqn.params
    return (
        eqn.primitive.name == "sort"
        and p["num_keys"] == 1
        and len(eqn.invars) == 2
        and len(shape_of(eqn.invars[0])) == 1
        and isinstance(eqn.invars[0], Var)
        and _is_whole(eqn.invars[0])
    )


def _line(view: View, number: int) -> str:
    """The user's line of a sort; where that is a library's own, of what comes next."""
    lines = (view.line(n) for n in range(number, len(view.eqns)))
    return next(filter(None, lines), "")


def _is_whole(v: Atom) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


@dataclasses.dataclass(frozen=True)
class _Way:
    """Where rows come back: equation `number` takes `out` to where they belong, in rows of its own."""

    number: int
    out: Var
    added: bool  # to what is there, the choices of a token summed


class _Dispatch:
    """What follows from one sort of experts' numbers."""

    def __init__(self, view: View, number: int) -> None:
        self.view, self.number = view, number
        self.sort = view.eqns[number]
        self.ids: Any = self.sort.invars[0]
        self.size = shape_of(self.ids)[0]
        self.static = static(view)

    def claim(self) -> Claim | None:
        """What is to be put in its place; None where it is no sort of tokens by expert. Raises Decline for
        what nearly is one.
        """
        self.base: Any = self._base(self.ids)
        self.made = self._made_of_ids()
        self.follows = self._follows_ids()
        self.order: Any = self._carried_along()
        if self.order is None:
            return None
        rows = {n for n in range(self.number, len(self.view.eqns)) if self._is_lookup(n, into_rows=True)}
        inside, ways = self._followed(rows)
        counts = self._counts(inside)
        if not ways or not counts:
            return None
        self.known = self._evaluated(counts)
        self.choices, self.first = self._layout(rows & set(inside.rows))
        return self._claim(inside, ways)

    # ------------------------------------------------------------ what is made of the experts' numbers alone

    def _base(self, v: Var) -> Var:
        """The numbers before they were laid out in one dimension."""
        while (eqn := self.view.maker(v)) is not None:
            source = eqn.invars[0] if eqn.invars else None
            if eqn.primitive.name not in ("reshape", "transpose", "convert_element_type", "squeeze", "copy"):
                break
            if not isinstance(source, Var) or not _is_whole(source):
                break
            v = source
        return v

    def _made_of_ids(self) -> dict[Var, int]:
        """Each variable that follows from the experts' numbers, and its equation."""
        found: dict[Var, int] = {self.base: -1}
        for number, eqn in enumerate(self.view.eqns):
            own = [v for v in eqn.invars if isinstance(v, Var)]
            if has_effects(eqn) or not any(v in found for v in own):
                continue
            if all(v in found or v in self.static for v in own):
                found.update((v, number) for v in eqn.outvars if not isinstance(v, DropVar))
        return found

    def _follows_ids(self) -> set[Var]:
        """The variables that the experts' numbers go into."""
        found: set[Var] = {self.base}
        for eqn in self.view.eqns:
            if any(isinstance(v, Var) and v in found for v in eqn.invars):
                found.update(v for v in eqn.outvars if not isinstance(v, DropVar))
        return found

    def _carried_along(self) -> Var | None:
        """The order: what is sorted with the experts' numbers."""
        other, order = self.sort.invars[1], self.sort.outvars[1]
        known = isinstance(other, Literal) or other in self.static
        return None if isinstance(order, DropVar) or not known else order

    def _evaluated(self, counts: Sequence[Var]) -> dict[Var, Any]:
        """The values of what is made of the experts' numbers, some drawings of these, by variable."""
        wanted = [v for v in self.made if _is_whole(v) and shape_of(v) and v is not self.base]
        part = self._program(wanted)
        for v in counts:
            self.experts = shape_of(v)[0]
            drawings = range(2 if self._is_bounded() else 3)
            runs = zip(*self._drawn(part, drawings), strict=True)
            found = [[self._draw(seed) for seed in drawings], *map(list, runs)]
            values = dict(zip((self.base, *wanted), found, strict=True))
            self.counts = {w for w in counts if self._counted(values, w)}
            if self.counts:
                return values
        raise Decline(
            "what products take as the numbers of rows of experts is something else, or counts numbers of"
            " experts that there are not"
        )

    def _is_bounded(self) -> bool:
        """Whether the numbers are of the largest of so many as there are experts: there are no others."""
        maker = self.view.maker(self.base)
        if maker is None or maker.primitive.name not in ("top_k", "approx_top_k", "argmax", "argmin"):
            return False
        p, x = maker.params, shape_of(maker.invars[0])
        (axis,) = p.get("axes") or (p.get("axis", p.get("reduction_dimension", -1)),)
        return bool(x[axis] == self.experts)

    def _counted(self, values: Mapping[Var, Any], v: Var) -> bool:
        n = self.experts
        return shape_of(v) == (n,) and all(
            np.array_equal(np.bincount(np.maximum(ids.reshape(-1), 0), minlength=n)[:n], found)
            for ids, found in zip(values[self.ids], values[v], strict=True)
        )

    def _draw(self, seed: int) -> Any:
        """Numbers of experts, not evenly drawn; in the second drawing one has no token, in the third some
        tokens have a number that is none.
        """
        rng = np.random.default_rng(seed)
        end = (self.experts, max(self.experts - 1, 1), self.experts + 2)[seed]
        low, high = (rng.integers(0, end, shape_of(self.base)) for _ in range(2))
        signed = seed == 2 and self.base.aval.dtype.kind == "i"
        return (np.minimum(low, high) - signed).astype(self.base.aval.dtype)

    def _program(self, wanted: Sequence[Var]) -> Jaxpr:
        numbers = {self.made[v] for v in wanted}
        numbers |= self.view.ancestors(wanted, stop=lambda v: v is self.base)
        if self.base in self.view.makers:
            numbers.discard(self.view.makers[self.base])
        part = taken_out(self.view.jaxpr, sorted(numbers))
        return part.replace(outvars=list(wanted), debug_info=part.debug_info.with_unknown_names())

    def _drawn(self, part: Jaxpr, drawings: Sequence[int]) -> list[list[Any]]:
        found = []
        with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
            run = jax.jit(lambda *args: eval_jaxpr(part, *args))
            for seed in drawings:
                given = [self._draw(seed) if v is self.base else self.view.constants[v] for v in part.invars]
                found.append([np.asarray(x) for x in run(*given)])
        return found

    # ------------------------------------------------------------ rows, from where they are sorted

    def _is_lookup(self, number: int, into_rows: bool = False) -> bool:
        """Whether it looks up whole rows, one after the other, by what is made of the experts' numbers."""
        eqn = self.view.eqns[number]
        if eqn.primitive.name != "gather" or eqn.invars[1] not in self.made or eqn.invars[0] in self.made:
            return False
        d, x = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
        lead = len(shape_of(eqn.invars[1])) - 1
        return (
            tuple(d.collapsed_slice_dims) == tuple(d.start_index_map) == (0,)
            and not d.operand_batching_dims
            and tuple(d.offset_dims) == tuple(range(lead, lead + len(x) - 1))
            and tuple(eqn.params["slice_sizes"]) == (1, *x[1:])
            and (not into_rows or shape_of(eqn.invars[1]) == (self.size, 1))
        )

    def _way_back(self, number: int, rows: set[Var]) -> _Way | None:
        eqn = self.view.eqns[number]
        if self._is_lookup(number) and eqn.invars[0] in rows:
            return _Way(number, eqn.invars[0], False)
        if eqn.primitive.name not in ("scatter-add", "scatter") or eqn.invars[1] not in self.made:
            return None
        d, (x, at, new) = eqn.params["dimension_numbers"], map(shape_of, eqn.invars)
        whole = (
            at == (self.size, 1)
            and tuple(d.inserted_window_dims) == tuple(d.scatter_dims_to_operand_dims) == (0,)
            and not d.operand_batching_dims
            and tuple(d.update_window_dims) == tuple(range(1, len(x)))
            and new == (self.size, *x[1:])
        )
        if not whole or eqn.invars[2] not in rows or eqn.invars[0] in rows:
            return None
        return _Way(number, eqn.invars[2], eqn.primitive.name == "scatter-add")

    def _followed(self, lookups: set[int]) -> tuple[_Inside, list[_Way]]:
        """The equations between the rows' lookups and the ways back, and those."""
        rows: set[Var] = set()
        numbers: set[int] = set()
        ways: list[_Way] = []
        for number, eqn in enumerate(self.view.eqns):
            way = self._way_back(number, rows) if rows else None
            if way is not None:
                ways.append(way)
            elif number in lookups:
                rows.update(eqn.outvars)
            elif any(isinstance(v, Var) and v in rows for v in eqn.invars):
                rows.update(eqn.outvars)
                numbers.add(number)
        outs = list(dict.fromkeys(way.out for way in ways))
        numbers &= self.view.ancestors(outs)
        made = {v for n in numbers for v in self.view.eqns[n].outvars}
        reads = [v for n in sorted(numbers) for v in self.view.eqns[n].invars] + outs
        takes = list(dict.fromkeys(v for v in reads if isinstance(v, Var) and v not in made))
        used = {self.view.makers[v] for v in takes if v in self.view.makers}
        return _Inside(sorted(numbers), takes, outs, frozenset(lookups & used)), ways

    def _counts(self, inside: _Inside) -> list[Var]:
        """What may be the number of rows of each expert; what has not as many as there are rows first."""
        found = [v for v in inside.takes if v in self.made and _is_whole(v) and len(shape_of(v)) == 1]
        return sorted(found, key=lambda v: shape_of(v)[0] == self.size)

    # ------------------------------------------------------------ whose rows they are

    def _index(self, v: Any) -> list[Any]:
        return [x.reshape(-1) for x in self.known[v]]

    def _layout(self, lookups: set[int]) -> tuple[int, bool]:
        """How many choices a token has, and whether those of a token come one after the other."""
        if not self._sorts():
            raise Decline("what is sorted along with the numbers of experts is not the number of each row")
        order = self.known[self.order]
        for number in sorted(lookups):
            eqn = self.view.eqns[number]
            tokens, at = shape_of(eqn.invars[0])[0], eqn.invars[1]
            if tokens == self.size or self.size % tokens or self._is_sorted_ids(at):
                continue
            choices = self.size // tokens
            for first in (True, False):
                own = [n // choices if first else n % tokens for n in order]
                if all(map(np.array_equal, self._index(at), own)):
                    return choices, first
            raise Decline(f"rows in another order than tokens in that of experts ({source_line(eqn)})")
        return 1, True

    def _sorts(self) -> bool:
        count = np.arange(self.size)
        return all(
            np.array_equal(np.sort(order), count) and bool((np.diff(ids.reshape(-1)[order]) >= 0).all())
            for ids, order in zip(self.known[self.ids], self.known[self.order], strict=True)
        )

    def _completed(self, inside: _Inside) -> tuple[list[int], dict[Var, str]]:
        """The middle with whatever else is made of the numbers of experts, and what it takes, each of a kind.
        Raises Decline where that is none.
        """
        numbers, kinds = set(inside.numbers), dict[Var, str]()
        todo = list(inside.takes)
        while todo:
            v = todo.pop()
            if v in kinds or self.view.makers.get(v, -1) in numbers:
                continue
            kind, maker = self._kind(v), self.view.makers.get(v, -1)
            if kind:
                kinds[v] = kind
            elif maker < 0 or maker == self.number or v is self.base:
                raise Decline("what is done with rows takes more that is made of the numbers of experts")
            else:
                numbers.add(maker)
                todo += [w for w in self.view.eqns[maker].invars if isinstance(w, Var)]
        reads = [v for n in sorted(numbers) for v in self.view.eqns[n].invars if isinstance(v, Var)]
        return sorted(numbers), {v: kinds[v] for v in (*reads, *inside.outs) if v in kinds}

    def _kind(self, v: Var) -> str:
        """What an operand of the middle is; "" for what the middle has to make itself."""
        maker = self.view.maker(v)
        if self._is_row(v):
            assert maker is not None
            return CHOICE if shape_of(maker.invars[0])[0] == self.size else TOKEN
        if v in self.counts:
            return COUNTS
        if v in self.known and shape_of(v) == (self.size,) and self._is_sorted_ids(v):
            return IDS
        if v in self.static and maker is not None and self.size in shape_of(v):
            if maker.primitive.name == "iota":
                raise Decline(f"rows are numbered in the order of experts ({source_line(maker)})")
            return ""
        return "" if v in self.follows else GIVEN

    def _is_row(self, v: Var) -> bool:
        """Whether it is rows of tokens, or of their choices, in the order of experts."""
        maker = self.view.makers.get(v, -1)
        if maker < 0 or v in self.made or not self._is_lookup(maker, into_rows=True):
            return False
        x, at = self.view.eqns[maker].invars[:2]
        if shape_of(x)[0] not in (self.size, self.size // self.choices):
            return False
        order = self.known[self.order]
        own = order if shape_of(x)[0] == self.size else [self._token(n) for n in order]
        return all(map(np.array_equal, self._index(at), own))

    def _token(self, n: Any) -> Any:
        return n // self.choices if self.first else n % (self.size // self.choices)

    def _is_sorted_ids(self, v: Any) -> bool:
        triples = zip(self.known[self.ids], self.known[self.order], self.known[v], strict=True)
        return all(np.array_equal(ids.reshape(-1)[order], x.reshape(-1)) for ids, order, x in triples)

    def _returns(self, way: _Way) -> None:
        """Raises Decline where rows come back anywhere but at their tokens' choices, or, added, tokens."""
        eqn = self.view.eqns[way.number]
        pairs = zip(self._index(eqn.invars[1]), self.known[self.order], strict=True)
        if way.added and shape_of(eqn.invars[0])[0] != self.size:
            right = all(np.array_equal(at, self._token(order)) for at, order in pairs)
        elif eqn.primitive.name == "gather":
            right = all(np.array_equal(order[at], np.arange(self.size)) for at, order in pairs)
        else:
            right = all(np.array_equal(at, order) for at, order in pairs)
        if not right:
            raise Decline(f"rows do not come back to the tokens that they are of ({source_line(eqn)})")

    # ------------------------------------------------------------ the operation in their place

    def _claim(self, inside: _Inside, ways: Sequence[_Way]) -> Claim:
        for way in ways:
            self._returns(way)
        numbers, operands = self._completed(inside)
        kinds, part = tuple(operands.values()), taken_out(self.view.jaxpr, numbers)
        info = part.debug_info.with_unknown_names()
        program = part.replace(invars=list(operands), outvars=list(inside.outs), debug_info=info)
        middle = Middle(program, kinds, self.size, self.experts)
        middle.check()
        op, sources = Sorted(middle), [self._source(v, k) for v, k in operands.items()]
        others = [self.view.eqns[way.number].invars[0] for way in ways if self._is_scatter(way)]
        takes = dict.fromkeys(v for v in (self.ids, *sources, *others) if isinstance(v, Var))
        gives = [self.view.eqns[way.number].outvars[0] for way in ways]

        def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
            def read(v: Atom) -> Value:
                return v.val if isinstance(v, Literal) else values[v]

            args = [self._by_token(read(self.ids))]
            for v, kind in zip(sources, kinds, strict=True):
                if v is not None:
                    args.append(self._by_token(read(v)) if kind == CHOICE else read(v))
            made = dict(zip(inside.outs, apply(op, *args), strict=True))
            return {give: self._back(way, made[way.out], read) for give, way in zip(gives, ways, strict=True)}

        return Claim(self.view, list(takes), gives, emit)

    def _source(self, v: Var, kind: str) -> Atom | None:
        """What the operation takes for an operand of the middle; None for what it makes itself."""
        if kind in (IDS, COUNTS):
            return None
        return self.view.eqns[self.view.makers[v]].invars[0] if kind in (TOKEN, CHOICE) else v

    def _by_token(self, x: Value) -> Value:
        """Something for each choice as [tokens, choices, ...]."""
        tokens, rest = self.size // self.choices, x.shape[1:]
        if self.first:
            return x.reshape(tokens, self.choices, *rest)
        return x.reshape(self.choices, tokens, *rest).swapaxes(0, 1)

    def _is_scatter(self, way: _Way) -> bool:
        return self.view.eqns[way.number].primitive.name != "gather"

    def _back(self, way: _Way, x: Value, read: Any) -> Value:
        """[tokens, choices, ...] as the way back has it."""
        eqn = self.view.eqns[way.number]
        if way.added and shape_of(eqn.invars[0])[0] != self.size:
            there = read(eqn.invars[0])
            return there + x.astype(there.dtype).sum(1)
        x = x if self.first else x.swapaxes(0, 1)
        x = x.reshape(shape_of(eqn.outvars[0]))
        return read(eqn.invars[0]) + x if way.added else x


@dataclasses.dataclass(frozen=True)
class _Inside:
    """Equations `numbers`, which make `outs` of `takes`; rows: the lookups that some of these are."""

    numbers: Sequence[int]
    takes: Sequence[Var]
    outs: Sequence[Var]
    rows: frozenset[int]
