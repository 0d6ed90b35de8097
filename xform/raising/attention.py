"""Attention: softmax over keys of the products of queries and keys, times values, however it is written.

    s = einsum("bthd,bshd->bhts", q * 0.25, repeat(k)) ; p = softmax(where(m, s, -1e9)) ;
    einsum("bhts,bshe->bthe", p, v)
        ->    Attention(q, k, v, scale=0.25, mask=causal)

An exponential is followed forward to a product with values (`softmax`) and back to the products whose results
are its logits (`logits`), and these to queries and keys (`operands`), dimensions as factors all the way. What
stands beside them is added, masks or weighs (`beside`). Then the result is held to the formula (`holding`),
so that no reading of the structure is believed as such.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from xform.axes.factors import Shape
from xform.raising.beside import factors, is_bias, sink, terms, weighed
from xform.raising.flat import View, size
from xform.raising.holding import NAME, Structure, held
from xform.raising.lettering import Setting, letters
from xform.raising.logits import Added, Logits, Miss, Part, Tracer
from xform.raising.meaning import Near, Raised
from xform.raising.operands import Operand, operand
from xform.raising.reading import Reading, Space
from xform.raising.seen import Term
from xform.raising.softmax import Mixing, mixings, normalised, way_back
from xform.raising.softmax import after as moved_on
from xform.trace import Atom, Var


def attention(view: View) -> Iterator[Raised | Near]:
    """Every attention of a body, and what nearly is one."""
    starts = [n for n, eqn in enumerate(view.eqns) if eqn.primitive.name in ("exp", "exp2")]
    if not starts:
        return
    reading = Reading(view)
    for n in starts:
        if n not in reading.live:
            continue
        try:
            candidate = _Candidate(reading, n)
            structure = candidate.structure()
            found = None if structure is None else held(reading, candidate.space, structure)
        except Miss as miss:
            yield Near(NAME, str(miss), view, miss.number)
            continue
        if found is not None:
            yield found


class _Candidate:
    """An exponential that may be an attention's."""

    def __init__(self, reading: Reading, number: int) -> None:
        self.reading, self.number, self.space = reading, number, Space()
        self.view = reading.view
        eqn = self.view.eqns[number]
        self.start: Var = eqn.outvars[0]
        self.argument: Atom = eqn.invars[0]
        self.dims: Shape = self.space.fresh(self.start)

    def structure(self) -> Structure | None:
        """The attention as it is written; None where it is nothing like it. Raises `Miss`."""
        mixing = self._mixing()
        if mixing is None:
            return None
        logits = Tracer(self.reading, self.space).of(self.argument)
        if logits is None:
            return None
        if self.view.eqns[self.number].primitive.name == "exp2":
            logits = logits.times(math.log(2.0))
        self.space.factors.tie(logits.dims, self.dims)
        return self._assembled(mixing, logits)

    def _mixing(self) -> Mixing | None:
        """The product with values; that which sums over what is not summed over before, where there are
        several.
        """
        found = list(mixings(self.reading, self.space, self.start, self.dims))
        found = [m for m in found if self._keys(m) and self.reading.takes_inputs(m.values.atom)]
        if not found:
            return None
        return min(found, key=lambda m: m.product.numbers[0])

    def _keys(self, mixing: Mixing) -> set[int]:
        return self.space.all(mixing.dims) - self.space.all(mixing.product.dims)

    # ---------------------------------------------------------------- putting it together

    def _assembled(self, mixing: Mixing, logits: Logits) -> Structure | None:
        keys = self._keys(mixing)
        parts, added = self._parts(logits, keys, mixing.values)
        if not parts:
            return None
        made = {p.product.out for p in parts}
        if self.reading.follows(mixing.values.atom, made):
            raise Miss("its values depend on its logits", mixing.product.numbers[0])
        out, out_dims, total = self._result(mixing, added, made)
        core = self._check_uses(made, out)
        v = self._values(mixing, out)
        q, k = self._queries_and_keys(parts, keys)
        q, k, v, s = self._joined(parts, q, k, v, keys, [logits.dims, mixing.dims, out_dims])
        rows = frozenset(self.space.all(parts[0].dims) - set(s))
        self._check_dims(q, k, v, rows, s, mixing)
        found = terms(self.reading, self.space, logits, added, made, s)
        more = sink(self.reading, self.space, logits, mixing, total, made, (self.start, self.dims))
        masks, weighing, scale = weighed(self.reading, mixing)
        setting = Setting(
            q[0],
            k[0],
            v,
            rows,
            s,
            self._contracted(parts[0], k[0]),
            tuple(
                f for part, each in zip(parts[1:], k[1:], strict=True) for f in self._contracted(part, each)
            ),
            out_dims,
            tuple(self._factors(t) for t in (*found, *masks) if not is_bias(self.view, t)),
            tuple(self._factors(t) for t in found if is_bias(self.view, t)),
        )
        return Structure(
            start=self.start,
            mixing=mixing,
            parts=parts,
            logits=logits,
            terms=found,
            masks=masks,
            weighing=weighing,
            scale=scale,
            sink=more,
            q=q,
            k=k,
            v=v,
            out=(out, out_dims),
            rows=rows,
            s=s,
            named=letters(self.reading, self.space, setting),
            core=core,
        )

    def _factors(self, term: Term) -> frozenset[int]:
        return factors(self.reading, self.space, term.atom, term.dims)

    def _contracted(self, part: Part, k: Operand) -> tuple[int, ...]:
        inside = part.product.contracted(self.space)
        return tuple(leaf for dim in k.dims for leaf in self.space.leaves(dim) if leaf in inside)

    def _values(self, mixing: Mixing, out: Var) -> Operand:
        """What is mixed; without the ones that stand beside it, where their sum is cut off again."""
        way = way_back(self.reading, out, mixing.product.out)
        if not any(eqn.primitive.name == "slice" for eqn, _ in way):
            return mixing.values
        for x in mixing.values.sources:
            number = self.reading.number(x.atom)
            if number < 0 or (eqn := self.view.eqns[number]).primitive.name != "concatenate":
                continue
            rest = [v for v in eqn.invars if self.reading.constant(v) != 1]
            if len(eqn.invars) != 2 or len(rest) != 1:
                break
            inner = operand(self.reading, self.space, rest[0])
            ins = [inner.dims if v is rest[0] else None for v in eqn.invars]
            self.space.factors.tie(x.dims, self.space.after(eqn, ins))
            numbers = (*x.numbers, number)
            sources = [dataclasses.replace(y, numbers=(*numbers, *y.numbers)) for y in inner.sources]
            return dataclasses.replace(inner, sources=tuple(sources))
        return mixing.values

    def _joined(
        self,
        parts: list[Part],
        q: list[Operand],
        k: list[Operand],
        v: Operand,
        keys: set[int],
        shapes: list[Shape],
    ) -> tuple[list[Operand], list[Operand], Operand, tuple[int, ...]]:
        """With keys that are cut into several factors as one where they may be; and which they are."""

        def order() -> tuple[int, ...]:
            return tuple(f for dim in k[0].dims for f in self.space.leaves(dim) if f in keys)

        together = order()
        sides = [*q, *k, v]
        strict = [
            *shapes,
            *(x.dims for x in sides),
            *(p.dims for p in parts),
            *(p.product.dims for p in parts),
        ]
        if len(together) < 2 or not all(self._stand(together, dims) for dims in strict):
            return q, k, v, together
        cut = [self._cut(x, together) for x in sides]
        if any(x is None for x in cut):
            return q, k, v, together
        one = self.space.join(together)
        made = [x for x in cut if x is not None]
        return made[: len(q)], made[len(q) : -1], made[-1], (one,)

    def _stand(self, together: tuple[int, ...], dims: Shape) -> bool:
        """Whether factors stand one after the other wherever one of them does."""
        for dim in dims:
            leaves = self.space.leaves(dim)
            if set(leaves) & set(together):
                start = leaves.index(together[0]) if together[0] in leaves else 0
                if leaves[start : start + len(together)] != together:
                    return False
        return True

    def _cut(self, x: Operand, together: tuple[int, ...]) -> Operand | None:
        """An operand by its sources in which factors stand together; None where the others matter."""
        kept = [y for y in x.sources if self._stand(together, y.dims)]
        lost = [y for y in x.sources if y not in kept]
        least = min(math.prod(size(y.atom)) for y in kept)
        if any(math.prod(size(y.atom)) < least or y.factor != kept[-1].factor for y in lost):
            return None
        return dataclasses.replace(x, sources=tuple(kept))

    def _parts(self, logits: Logits, keys: set[int], v: Operand) -> tuple[list[Part], list[Added]]:
        """The products of queries and keys among those that the logits are a sum of; others are biases."""
        parts, added = [], list(logits.added)
        for part in logits.parts:
            own = [self.space.all(side.last.dims) for side in part.product.sides]
            has = [bool(keys & each) for each in own]
            rows = self.space.all(part.dims) - keys
            asked, keyed = (own[1], own[0]) if has[0] else (own[0], own[1])
            if has[0] != has[1] and not (keyed & rows) - asked - self.space.all(v.last.dims):
                parts.append(part)
            else:
                added.append(Added(part.atom, part.rest, part.dims))
        return parts, added

    def _queries_and_keys(self, parts: list[Part], keys: set[int]) -> tuple[list[Operand], list[Operand]]:
        q, k = [], []
        for part in parts:
            one, two = part.product.sides
            if keys & self.space.all(one.last.dims):
                one, two = two, one
            q.append(one)
            k.append(two)
        return q, k

    def _check_dims(
        self, q: list[Operand], k: list[Operand], v: Operand, rows: frozenset[int], s: tuple[int, ...],
        mixing: Mixing,
    ) -> None:  # fmt: skip
        at = mixing.product.numbers[0]
        values = self.space.all(v.last.dims)
        if not s or not set(s) <= values:
            raise Miss("its values do not have the dimension of its keys", at)
        keyed = set[int]().union(*(self.space.all(each.last.dims) for each in k))
        asked = set[int]().union(*(self.space.all(each.last.dims) for each in q))
        own = (asked & rows) - keyed
        if own & values:
            raise Miss("each query has values of its own: its weights are a router's or a gate's", at)

    def _result(self, mixing: Mixing, added: list[Added], made: set[Var]) -> tuple[Var, Shape, Atom | None]:
        """Where attention ends: its result, dimensions, and the sum that weights are divided by."""
        if mixing.is_normalised:
            first = next(step for step in mixing.steps if step.kind == "norm")
            return mixing.product.out, mixing.product.dims, first.atom
        for each in added:
            if self.reading.follows(each.atom, made) and self._has_exp(each.atom, made):
                return mixing.product.out, mixing.product.dims, None
        found = normalised(self.reading, mixing, self.start)
        if found is None:
            raise Miss("its weights are not divided by their sum", mixing.product.numbers[0])
        out, number = found
        eqn = self.view.eqns[number]
        inner = [w for w in eqn.invars if self.reading.follows(w, {mixing.product.out})]
        below = next((w for w in eqn.invars if w is not inner[0]), inner[0])
        return out, moved_on(self.reading, self.space, mixing, out), below

    def _has_exp(self, atom: Atom, made: set[Var]) -> bool:
        numbers = self.reading.between(made, [atom])
        return any(self.view.eqns[n].primitive.name in ("exp", "exp2") for n in numbers)

    def _check_uses(self, made: set[Var], out: Var) -> set[int]:
        """That nothing between scores and result is used elsewhere; the numbers of the equations there."""
        core = self.reading.between(made, [out])
        for v in [*made, *(v for n in sorted(core) for v in self.view.eqns[n].outvars)]:
            if v is out or not isinstance(v, Var):
                continue
            if all(n in core for n in self.reading.users(v)):
                continue
            after = v is self.start or self.reading.follows(v, {self.start})
            what = "weights" if after else "logits"
            if after and size(v)[-1:] <= (1,):
                what = "weights' sum or what is made of them"
            raise Miss(f"its {what} are used elsewhere too", max(self.reading.number(v), 0))
        return core
