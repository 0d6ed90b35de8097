"""Attention: softmax over keys of the products of queries and keys, times values, however it is written.

    s = einsum("bthd,bshd->bhts", q * 0.25, repeat(k)) ; p = softmax(where(m, s, -1e9)) ;
    einsum("bhts,bshe->bthe", p, v)
        ->    Attention(q, k, v, scale=0.25, mask=causal)

An exponential is followed forward to a product with values (`softmax`) and back to the products whose results
are its logits (`logits`), and these to queries and keys (`operands`), dimensions as factors all the way. What
is added or masked is classified by evaluating it (`masks`). Then the result is computed at random points and
compared with the formula (`probing`), so that no reading of the structure is believed as such.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from xform.axes.factors import Shape
from xform.raising.flat import View, dtype_of, size
from xform.raising.lettering import OWN, Setting, letters
from xform.raising.logits import FAR, Added, Logits, Miss, Part, Selected, Tracer
from xform.raising.meaning import Attention, Near, Raised, Tensor
from xform.raising.operands import Operand, Source, operand
from xform.raising.points import Unknown, depends
from xform.raising.probing import Claim, Factor, Probe, product_holds
from xform.raising.projections import projected
from xform.raising.reading import Reading, Space
from xform.raising.seen import Term, classified
from xform.raising.softmax import Mixing, exponent, mixings, normalised, summed, way_back
from xform.raising.softmax import after as moved_on
from xform.trace import Atom, Var

NAME = "attention"
MULTIPLIED = "its logits are multiplied by an array, not by a constant"


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
            found = _Candidate(reading, n).raised()
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

    def raised(self) -> Raised | None:
        """The attention; None where it is nothing like it. Raises `Miss`."""
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

    def _assembled(self, mixing: Mixing, logits: Logits) -> Raised | None:
        keys = self._keys(mixing)
        parts, added = self._parts(logits, keys, mixing.values)
        if not parts:
            return None
        made = {p.product.out for p in parts}
        if any(self.reading.follows(side.atom, made) for side in (mixing.values,)):
            raise Miss("its values depend on its logits", mixing.product.numbers[0])
        out, out_dims, total = self._result(mixing, added, made)
        self._check_uses(made, out)
        v = self._values(mixing, out)
        q, k = self._queries_and_keys(parts, keys)
        q, k, v, s = self._joined(parts, q, k, v, keys, [logits.dims, mixing.dims, out_dims])
        rows = frozenset(self.space.all(parts[0].dims) - set(s))
        self._check_dims(q, k, v, rows, s, mixing)
        terms, _ = self._terms(logits, added, made, s)
        sink = self._sink(logits, mixing, total, made)
        masks, weighing, scale = self._after(mixing)
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
            tuple(self._factors(t.atom, t.dims) for t in (*terms, *masks) if not self._is_bias(t)),
            tuple(self._factors(t.atom, t.dims) for t in terms if self._is_bias(t)),
        )
        named = letters(self.reading, self.space, setting)
        return self._verified(
            mixing,
            parts,
            logits,
            terms,
            masks,
            weighing,
            scale,
            sink,
            (q, k, v),
            (out, out_dims),
            rows,
            s,
            named,
        )

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
        if not parts and logits.parts:
            ours = [p for p in logits.parts if not keys & self.space.all(p.product.dims)]
            if ours:
                return [], added
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

    def _check_uses(self, made: set[Var], out: Var) -> None:
        """That nothing between scores and result is used elsewhere."""
        core = self.reading.between(made, [out])
        self.core = core
        for v in [*made, *(v for n in sorted(core) for v in self.view.eqns[n].outvars)]:
            if v is out or not isinstance(v, Var):
                continue
            if all(n in core for n in self.reading.users(v)):
                continue
            after = v is self.start or self.reading.follows(v, {self.start})
            what = "weights" if after else "logits"
            if after and not any(size(v)[i] > 1 for i in range(len(size(v)) - 1, len(size(v)))):
                what = "weights' sum or what is made of them"
            raise Miss(f"its {what} are used elsewhere too", max(self.reading.number(v), 0))

    # ---------------------------------------------------------------- what is added, masked, dropped

    def _factors(self, atom: Atom, dims: Shape) -> frozenset[int]:
        """The factors along which a value that is laid along `dims` changes."""
        if not dims:
            return frozenset()
        pairs = zip(dims, self.reading.varies(atom), strict=True)
        return frozenset(leaf for dim, changes in pairs if changes for leaf in self.space.leaves(dim))

    def _is_bias(self, term: Term) -> bool:
        """Whether what is added may be more than a mask: made of floating-point numbers or positions."""
        if term.seen is not None:
            return False
        inputs = depends(self.view, term.atom)
        return not inputs or any(dtype_of(v).kind not in "biu" for v in inputs)

    def _terms(
        self, logits: Logits, added: list[Added], made: set[Var], s: tuple[int, ...]
    ) -> tuple[list[Term], list[Added]]:
        terms: list[Term] = []
        dropped: list[Added] = []
        for each in added:
            own = self._factors(each.atom, each.dims)
            keyed = not own.isdisjoint(s)
            inside = self.reading.follows(each.atom, made)
            if keyed and inside:
                raise Miss(
                    "its logits are shifted by what is not the same for all keys",
                    self.reading.number(each.atom),
                )
            if not keyed and (inside or not self.reading.takes_inputs(each.atom) or not own):
                dropped.append(each)
            else:
                terms.append(Term(each.atom, each.dims, each.factor, None, 0.0))
        for chosen in logits.selected:
            if self.reading.follows(chosen.atom, made):
                raise Miss("which keys are seen depends on its logits", self.reading.number(chosen.atom))
            terms.append(self._selected(chosen))
        return terms, dropped

    def _selected(self, chosen: Selected) -> Term:
        if not chosen.fill <= FAR:
            raise Miss(
                f"where its mask is not set its logits are {chosen.fill:g}: such keys are seen",
                self.reading.number(chosen.atom),
            )
        return Term(chosen.atom, chosen.dims, 1.0, chosen.seen, chosen.fill)

    def _after(self, mixing: Mixing) -> tuple[list[Term], list[Factor], float]:
        """What is done to weights: masks, what they are multiplied by (dropout), and a constant."""
        masks: list[Term] = []
        weighing: list[Factor] = []
        scale = 1.0
        norms = [i for i, step in enumerate(mixing.steps) if step.kind == "norm"]
        last = norms[-1] if norms else len(mixing.steps)
        for i, step in enumerate(mixing.steps):
            if step.kind == "scale":
                scale *= step.factor if i > last or not norms else 1.0
            elif step.kind in ("select", "mul"):
                assert step.atom is not None
                if self._is_random(step.atom):
                    weighing.append(
                        Factor(step.atom, step.dims, 1.0, step.seen if step.kind == "select" else None)
                    )
                elif step.kind == "select" or self.reading.is_boolean(step.atom):
                    seen = step.seen if step.kind == "select" else True
                    masks.append(Term(step.atom, step.dims, 1.0, seen, -math.inf, weights=True))
                else:
                    raise Miss("its weights are multiplied by other values before they mix", step.number)
        return masks, weighing, scale

    def _is_random(self, atom: Atom) -> bool:
        return any(
            self.view.eqns[n].primitive.name.startswith(("random_", "threefry", "rng_"))
            for n in self.view.ancestors([atom])
        )

    def _sink(self, logits: Logits, mixing: Mixing, total: Atom | None, made: set[Var]) -> Factor | None:
        """A logit more, that has no value."""
        if logits.sink is not None:
            atom, number = logits.sink
            axis = self.view.eqns[number].params["dimension"]
            dims = tuple(() if i == axis else d for i, d in enumerate(logits.dims))
            return self._reduced(Factor(atom, dims))
        if total is None:
            return None
        found = summed(self.reading, self.space, mixing, total, self.start, self.dims)
        if found is None:
            return None
        y = exponent(self.reading, found.atom, made)
        if y is None:
            raise Miss("something is added to the sum of its weights that is no logit", found.number)
        dims = found.dims if len(size(y)) == len(found.dims) else ()
        return self._reduced(Factor(y, dims))

    def _reduced(self, factor: Factor) -> Factor:
        """The smallest value that is repeated to be this one."""
        side = operand(self.reading, self.space, factor.atom)
        if not factor.dims:
            return factor
        known = tuple(
            d if c else () for d, c in zip(side.dims, self.reading.varies(factor.atom), strict=True)
        )
        self.space.factors.tie(known, tuple(d if k else () for d, k in zip(factor.dims, known, strict=True)))
        small = [x for x in side.sources if x.factor == 1.0]
        best = min(small, key=lambda x: (math.prod(size(x.atom)), len(size(x.atom))))
        return dataclasses.replace(factor, atom=best.atom, dims=best.dims)

    # ---------------------------------------------------------------- the meaning, and the check

    def _verified(
        self,
        mixing: Mixing,
        parts: list[Part],
        logits: Logits,
        terms: list[Term],
        masks: list[Term],
        weighing: list[Factor],
        scale: float,
        sink: Factor | None,
        sides: tuple[list[Operand], list[Operand], Operand],
        result: tuple[Var, Shape],
        rows: frozenset[int],
        s: tuple[int, ...],
        named: dict[int, str],
    ) -> Raised:
        q, k, v = sides
        out, out_dims = result
        sizes = self._sizes(named)
        read = classified(self.reading, self.space, [*terms, *masks], named, sizes)
        mask = read.pieces.mask
        chosen_q = [self._chosen(x, named, True) for x in q]
        chosen_k = [self._chosen(x, named, True) for x in k]
        chosen_v = self._chosen(v, named, False)
        at = mixing.product.numbers[0]
        for part, a, b in zip(parts, chosen_q, chosen_k, strict=True):
            if not (isinstance(a.atom, Var) and isinstance(b.atom, Var)):
                raise Miss("its queries or keys are constants", part.product.numbers[0])
            if not product_holds(self.reading, self.space, part, a, b):
                raise Miss("its scores are not products of queries and keys", part.product.numbers[0])
        amp = logits.amp
        scales = {
            part.factor * a.factor * b.factor * (amp or 1.0)
            for part, a, b in zip(parts, chosen_q, chosen_k, strict=True)
        }
        if max(scales) - min(scales) > 1e-6 * abs(max(scales)):
            raise Miss("the products that are its logits are scaled differently", parts[1].product.numbers[0])
        claim = Claim(
            parts,
            amp,
            read,
            [Factor(t.atom, t.dims, t.factor, t.seen) for t in (*terms, *masks)],
            sink,
            weighing,
            scale,
            chosen_v,
            (mixing.weights, mixing.dims),
            result,
            rows,
            s,
            named,
            sizes,
        )
        try:
            for seed in (1, 2):
                if mistake := Probe(self.reading, self.space, claim).mistake(seed):
                    if logits.zeroed is not None:
                        raise Miss(MULTIPLIED, logits.zeroed)
                    raise Miss(mistake, at)
        except Unknown as unknown:
            norms = [step.atom for step in mixing.steps if step.kind == "norm" and step.atom is not None]
            if any(not self.reading.follows(x, {self.start}) for x in norms):
                raise Miss("it is divided by another sum: its weights do not add up to one", at) from None
            raise Miss(f"it cannot be checked: it depends on {unknown}", at) from None
        if abs(scale - 1.0) > 1e-6 and not weighing:
            raise Miss(f"its weights are scaled by {scale:g}", at)
        for x in (*chosen_q, *chosen_k, chosen_v):
            self._check_groups(x, named, at)
        for x in chosen_k:
            self._check_sharing(x, chosen_v, named, at)
        pairs = [
            (self._tensor(a.atom, a.dims, named), self._tensor(b.atom, b.dims, named))
            for a, b in zip(chosen_q, chosen_k, strict=True)
        ]
        meaning = Attention(
            q=pairs[0][0],
            k=pairs[0][1],
            v=self._tensor(chosen_v.atom, chosen_v.dims, named),
            out=self._tensor(out, out_dims, named),
            scale=max(scales),
            mask=mask,
            cap=amp,
            bias=read.pieces.bias,
            bias_kinds=read.pieces.kinds,
            sinks=None if sink is None else self._tensor(sink.atom, sink.dims, named),
            dropout=bool(weighing),
            cross=self._is_cross(q[0], k[0], named, mask.kinds, parts),
            latent=len(pairs) > 1 or self._is_latent(k[0], v, named),
            softmax=str(dtype_of(self.start)),
            more=tuple(pairs[1:]),
            bias_factors=read.pieces.factors,
        )
        numbers = set(self.core)
        for part in parts:
            numbers |= set(part.product.numbers)
        for x in (*chosen_q, *chosen_k, chosen_v):
            numbers |= set(x.numbers)
        return Raised(NAME, self.view, self.reading.number(out), frozenset(numbers), meaning, sizes)

    def _sizes(self, named: dict[int, str]) -> dict[str, int]:
        sizes = {letter: self.space.size(leaf) for leaf, letter in named.items()}
        for c in "tsde":
            sizes.setdefault(c, 1)
        return sizes

    def _tensor(self, atom: Atom, dims: Shape, named: dict[int, str]) -> Tensor:
        return Tensor(atom, tuple("".join(named[leaf] for leaf in self.space.leaves(dim)) for dim in dims))

    def _chosen(self, side: Operand, named: dict[int, str], scaled: bool) -> Source:
        """The value to take for an operand: as small as it gets, and as it lay in the product."""
        options = [
            x
            for x in side.sources
            if (scaled or x.factor == 1.0)
            and isinstance(x.atom, Var)
            and all(leaf in named for leaf in self.space.all(x.dims))
        ]
        if not options:
            raise Miss(
                "a dimension of its operands is none of attention's", max(self.reading.number(side.atom), 0)
            )

        def rank(x: Source) -> tuple[int, int, int]:
            bytes_ = math.prod(size(x.atom)) * dtype_of(x.atom).itemsize
            joined = sum(len(self.space.leaves(d)) > 1 for d in x.dims)
            ones = sum(not d for d in x.dims)
            return (bytes_, joined, ones)

        scales = [abs(x.factor) for x in options]
        deepest = [x for x, c in zip(options, scales, strict=True) if c == scales[-1]]
        return min(deepest, key=rank)

    def _check_groups(self, x: Source, named: dict[int, str], at: int) -> None:
        for dim in x.dims:
            joined = "".join(named.get(leaf, "") for leaf in self.space.leaves(dim))
            if "g" in joined and "n" in joined and joined.index("g") < joined.index("n"):
                raise Miss("query heads share key heads by h % n, as tiled, not by h // g, as repeated", at)

    def _check_sharing(self, k: Source, v: Source, named: dict[int, str], at: int) -> None:
        """That keys and values are of the same rows of the batch, and values more than one number each."""
        own = [{named[leaf] for leaf in self.space.all(x.dims)} - set("ngt" + OWN) for x in (k, v)]
        if own[0] != own[1]:
            what = "keys" if own[0] - own[1] else "values"
            raise Miss(f"its {what} differ by row of the batch, or by query, and the others do not", at)
        if "e" not in {named[leaf] for leaf in self.space.all(v.dims)} and all(map(len, v.dims)):
            raise Miss("its values have no dimension of their own", at)

    def _is_cross(
        self, q: Operand, k: Operand, named: dict[int, str], kinds: tuple[str, ...], parts: list[Part]
    ) -> bool:
        """Whether keys are made of something else than queries."""
        if "decode" in kinds or "causal" in kinds:
            return False
        made = [self._made_of(side, named) for side in (q, k)]
        if made[0] is not None and made[1] is not None:
            return made[0] is not made[1]
        sizes = self._sizes(named)
        return sizes["t"] > 1 and sizes["t"] != sizes["s"]

    def _made_of(self, side: Operand, named: dict[int, str]) -> Atom | None:
        for x in side.sources:
            for axis, dim in enumerate(x.dims):
                if any(named.get(leaf) == "d" for leaf in self.space.leaves(dim)):
                    return projected(self.reading, x.atom, axis)
        return None

    def _is_latent(self, k: Operand, v: Operand, named: dict[int, str]) -> bool:
        """Whether keys are some that heads share, beside some of a latent that the values are made of too."""
        number = self.reading.number(k.sources[-1].atom)
        for x in k.sources:
            n = self.reading.number(x.atom)
            if n >= 0 and self.view.eqns[n].primitive.name == "concatenate":
                number = n
        if number < 0 or self.view.eqns[number].primitive.name != "concatenate":
            return k.last.atom is v.last.atom
        spread = [sum(self.reading.varies(w)) for w in self.view.eqns[number].invars]
        return len(spread) == 2 and min(spread) < max(spread)
