"""Finds gated linear recurrences: loops over time that carry an outer product with decay.

    S = exp(g) * S;  S = S + beta * outer(k, v - k @ S);  o = q @ S        ->    kda q k v g beta

A loop's body says what becomes of its state. Written out as a sum of products (`terms`), a recurrence has
three terms, whatever its layouts, casts and order of operations are:

    S'[d,e] = a[d] S[d,e] + beta k[d] v[e] - beta k[d] k[m] a[m] S[m,e]        o[e] = q[d] S'[d,e]

What is in them is told apart by labels, compared as products down to where they are made, outside of the loop
if need be; then the body is evaluated at points and held to the formula. A loop over chunks is `chunks`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from xform.raising.chunks import chunks
from xform.raising.flat import View, dtype_of
from xform.raising.loops import Carry, Loop, counts, loops
from xform.raising.meaning import Near, Raised
from xform.raising.readout import ReadOtherwise, Readout, readout
from xform.raising.steps import Parts, agrees, told
from xform.raising.terms import Factor, Index, Labels, NotLinear, Outer, Term, Terms
from xform.trace import Literal, Var, shape_of

WHAT = "linear_recurrence"


class Missing(Exception):
    """What is nearly a recurrence lacks something: the reason."""


def recurrences(view: View) -> Iterator[Raised | Near]:
    """The gated linear recurrences among the loops of a view."""
    labels = Labels()
    around = None
    for loop in loops(view):
        for carry in loop.carries:
            if not _may_be_state(carry):
                continue
            around = around or Terms(view, labels)
            step = _Step(loop, carry, around)
            try:
                found, why = step.raised(), ""
            except Missing as missing:
                found, why = None, str(missing)
            if found is not None:
                yield found
                continue
            in_chunks = list(chunks(loop, carry, around, step.terms))
            yield from in_chunks
            if why and not in_chunks:
                yield Near(WHAT, why, view, loop.number)


def _may_be_state(carry: Carry) -> bool:
    dims = [n for n in shape_of(carry.into) if n > 1]
    return len(dims) >= 2 and dtype_of(carry.into).kind in "fV" and isinstance(carry.out, Var)


def anything(factor: Factor) -> bool:
    return True


def nothing(factor: Factor) -> bool:
    return False


class _Step:
    """A loop with one carried value that may be the state of a recurrence, a step a turn."""

    def __init__(self, loop: Loop, carry: Carry, around: Terms) -> None:
        self.loop, self.carry = loop, carry
        self.labels = around.labels
        self.time = self.labels.fresh(loop.length)
        outer = Outer(around, loop.inputs, self.time)
        self.terms = Terms(loop.body, self.labels, [carry.into], outer)

    def raised(self) -> Raised | None:
        """The recurrence; None where it is none at all."""
        index = self.labels.whole(shape_of(self.carry.into))
        try:
            rough = self.terms.of(self.carry.out, index, anything)
        except NotLinear:
            return None
        kept, mixed, added = self._sorted(rough, index)
        if not (kept or mixed) or not added or not self._is_outer(added):
            return None
        if not kept:
            raise Missing("its state is mixed by a matrix, not decayed")
        try:
            out = readout(self.terms, self.carry, index)
        except ReadOtherwise as other:
            raise Missing(str(other)) from None
        if out is None:
            return None
        index = tuple(map(self.labels.resolved, index))
        parts = self._parts(index, out)
        if parts is None:
            return None
        if why := self._other_steps(parts):
            raise Missing(why)
        if why := agrees(self.loop, self.carry, self.terms, index, parts, out):
            raise Missing(why)
        return told(self.loop, self.carry, self.terms, index, parts, out)

    def _sorted(self, terms: Sequence[Term], index: Index) -> tuple[list[Term], list[Term], list[Term]]:
        """Terms with the state where it was, with it elsewhere, and without it."""
        index = tuple(map(self.labels.resolved, index))
        kept: list[Term] = []
        mixed: list[Term] = []
        added: list[Term] = []
        for term in (self.labels.term(t) for t in terms):
            states = [f for f in term.factors if f.atom is self.carry.into]
            if not states:
                added.append(term)
            elif len(states) == 1 and states[0].index == index:
                kept.append(term)
            else:
                mixed.append(term)
        return kept, mixed, added

    def _is_outer(self, added: Sequence[Term]) -> bool:
        """Whether what is added has no factor that runs over all of the state."""
        whole = max((t.labels for t in added), key=len)
        fine = [self._fine(t.factors) for t in added]
        return len(whole) >= 2 and all(not f.labels >= whole for t in fine for f in t.factors)

    def _fine(self, factors: Sequence[Factor]) -> Term:
        """The product of factors, each down to where it is no product any more."""
        made = Term(1.0)
        for f in factors:
            (one,) = self.terms.of(f.atom, f.index, nothing)
            if f.power < 0:
                one = Term(
                    1.0 / one.coefficient, tuple(dataclasses.replace(g, power=-g.power) for g in one.factors)
                )
            made = made.times(one)
        return self.labels.term(made)

    def _parts(self, index: Index, out: Readout) -> Parts | None:
        """What is decay, key, value, beta and query; None where the state is no matrix of keys and values."""
        keys = out.keys
        kept, mixed, added = self._sorted(self.terms.of(self.carry.out, index, anything), index)
        fine = [self._fine(t.factors) for t in added]
        of_keys = [f for t in fine for f in t.factors if f.labels & keys]
        of_decay = [f for t in kept for f in t.factors if f.atom is not self.carry.into]
        of_delta = [f for t in mixed for f in t.factors if f.atom is not self.carry.into]
        own = frozenset(label for dim in index for label in dim)
        shared = frozenset().union(*(f.labels for f in (*of_keys, *out.query, *of_decay)))
        values = own - keys - shared
        if not of_keys or any(f.labels & values for f in of_keys):
            return None
        if not values:
            if len(own) > len(keys | frozenset().union(*(f.labels for f in (*of_keys, *out.query)))):
                raise Missing("its decay is not the same for all values of a key")
            return None
        if len(kept) > 1:
            raise Missing("its decay is a sum of several terms")
        if len(added) > 1:
            raise Missing("more is added to its state than one outer product")
        if len(mixed) > 1:
            raise Missing("its state is mixed in more ways than by a delta rule")
        if any(f.labels & values for f in of_delta):
            raise Missing("its state is mixed by a matrix that is not the same for all values")

        def rough(f: Factor) -> bool:
            return not (f.labels & keys and f.labels & values)

        (update,) = self._sorted(self.terms.of(self.carry.out, index, rough), index)[2]
        if update.labels - own:
            raise Missing("what is added to its state is a sum of outer products")
        decay = Term(kept[0].coefficient, tuple(of_decay))
        k = tuple(f for f in update.factors if f.labels & keys)
        v = tuple(f for f in update.factors if f.labels & values)
        rest = tuple(f for f in update.factors if not f.labels & (keys | values))
        if not mixed:
            return Parts(keys, values, decay, Term(1.0, k), Term(update.coefficient, (*v, *rest)), None)
        return self._delta(index, keys, values, decay, update, mixed[0])

    def _delta(
        self,
        index: Index,
        keys: frozenset[int],
        values: frozenset[int],
        decay: Term,
        update: Term,
        mixed: Term,
    ) -> Parts:
        (state,) = [f for f in mixed.factors if f.atom is self.carry.into]
        places = [d for d, (a, b) in enumerate(zip(state.index, index, strict=True)) if a != b]
        if len(places) != 1 or set(index[places[0]]) != keys:
            raise Missing("its state is mixed by a matrix along other dimensions than its keys'")
        read = frozenset(state.index[places[0]])

        def apart(f: Factor) -> bool:
            return not (f.labels & keys and f.labels & read)

        found = self._sorted(self.terms.of(self.carry.out, index, apart), index)[1]
        if len(found) != 1:
            raise Missing("its state is mixed in more ways than by a delta rule")
        # The labels that are summed over are new ones each time.
        (state,) = [f for f in found[0].factors if f.atom is self.carry.into]
        read = frozenset(state.index[places[0]])
        back = dict(zip(state.index[places[0]], index[places[0]], strict=True))
        factors = [f for f in found[0].factors if f.atom is not self.carry.into]
        fine = self._fine(factors)
        if any(f.labels & keys and f.labels & read for f in fine.factors):
            raise Missing("its state is mixed by a matrix that is no outer product")
        a = self._fine(decay.factors)
        a_keys = Counter(f for f in a.factors if f.labels & keys)
        k_written = Counter(f for f in fine.factors if f.labels & keys)
        k_asked = Counter(_renamed([f for f in fine.factors if f.labels & read], back))
        if k_asked != k_written + a_keys:
            if a_keys and k_asked == k_written:
                raise Missing("its delta reads the state before its decay")
            raise Missing("the key with which its delta reads is not the one with which it writes")
        new = self._fine(update.factors)
        if Counter(f for f in new.factors if f.labels & keys) != k_written:
            raise Missing("the key with which its delta writes is not the one with which values are written")
        return self._solved(
            keys, values, decay, a, update, new, found[0], fine, factors, k_written, read, back
        )

    def _solved(
        self, keys: frozenset[int], values: frozenset[int], decay: Term, a: Term, update: Term, new: Term,
        mixed: Term, fine: Term, factors: Sequence[Factor], own: Counter[Factor], read: frozenset[int],
        back: dict[int, int],
    ) -> Parts:  # fmt: skip
        """beta from twice the key, its own and that with which is read, and v from what is left."""
        both = keys | read

        def scalars(term: Term) -> Counter[Factor]:
            return Counter(f for f in term.factors if not f.labels & (both | values))

        candidates = [
            [
                Factor(f.atom, _back(f.index, back), f.power)
                for f in factors
                if f.labels & read and not self._is_decay(f, a, back)
            ],
            [f for f in factors if f.labels & keys],
            [f for f in update.factors if f.labels & keys],
        ]
        a_scalars = scalars(a)
        for k in candidates:
            key = self._fine(k)
            if Counter(f for f in key.factors if f.labels & keys) != own:
                continue
            twice = scalars(key) + scalars(key) + a_scalars
            if twice - scalars(fine):
                continue
            beta = scalars(fine) - twice
            left = scalars(new)
            if (scalars(key) + beta) - left:
                continue
            left = left - scalars(key) - beta
            all_fine = mixed.coefficient * fine.coefficient
            strength = -all_fine / (key.coefficient**2 * a.coefficient * decay.coefficient)
            if strength < 0:
                raise Missing("its delta is added, not taken away")
            v = [f for f in update.factors if f.labels & values]
            value = self._fine(v)
            of_v = update.coefficient * new.coefficient / (key.coefficient * strength)
            if scalars(value) == left:
                made_v = Term(of_v / value.coefficient, tuple(v))
            else:
                kept = tuple(f for f in new.factors if f.labels & values)
                made_v = Term(of_v, (*kept, *left.elements()))
            return Parts(
                keys, values, decay, Term(1.0, tuple(k)), made_v,
                self._beta(beta, strength, [*factors, *update.factors], both | values),
            )  # fmt: skip
        raise Missing("its delta and its values are not scaled alike")

    def _is_decay(self, f: Factor, a: Term, back: dict[int, int]) -> bool:
        fine = Counter(_renamed(self._fine([f]).factors, back))
        return bool(fine) and not fine - Counter(a.factors)

    def _beta(
        self, beta: Counter[Factor], strength: float, among: Sequence[Factor], others: frozenset[int]
    ) -> Term:
        """The product as values of the program: one that is there, or down to where it is made."""
        for f in among:
            fine = self._fine([f])
            if not f.labels & others and Counter(fine.factors) == beta:
                return Term(strength / fine.coefficient, (f,))
        return Term(strength, tuple(beta.elements()))

    def _other_steps(self, parts: Parts) -> str:
        """What of the operands follows from what the loop carries: then steps cannot be computed together."""
        carried = {c.into for c in self.loop.carries if not isinstance(c.out, Literal)}
        carried -= {c.into for c in self.loop.carries if counts(self.loop.body, c)}
        body = self.loop.body
        for name, factors in parts.named():
            atoms = [f.atom for f in factors]
            read = {v for n in body.ancestors(atoms) for v in body.eqns[n].invars if isinstance(v, Var)}
            if carried & (read | set(atoms)):
                return f"its {name} depend on what the loop carries"
        return ""


def _back(index: Index, back: dict[int, int]) -> Index:
    return tuple(tuple(back.get(label, label) for label in dim) for dim in index)


def _renamed(factors: Sequence[Factor], back: dict[int, int]) -> list[Factor]:
    return [Factor(f.atom, _back(f.index, back), f.power) for f in factors]
