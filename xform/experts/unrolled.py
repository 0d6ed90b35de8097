"""Experts that stand one after the other in a program, all at once.

    y = 0 + g0 f(x, w0) + g1 f(x, w1) ..    ->    y = sum_e g[e] f(x, w[e])

What all of them make is followed back together: the same operations of operands that are alike in turn, down
to entries of one array, numbers, what is the same for all, and arrays that are stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import Decline
from xform.experts.each import SUMS, AtOnce, Each, bound, is_zero, last_of, peeled, put, taken, whole
from xform.raising.flat import View, place_of
from xform.raising.following import static
from xform.raising.placing import Claim
from xform.raising.sending import Product
from xform.trace import Atom, JaxprEqn, Literal, Value, Var, at_source, bind, shape_of


def unrolled(view: View, group: Sequence[Product]) -> AtOnce:
    """What stands in the place of products of all experts. Raises Decline where they are not alike."""
    return _Unrolled(view, group).claim()


@dataclasses.dataclass(frozen=True)
class _Terms:
    """What a result is made of: what experts make, `added`; or put where a mask holds (`masks`, one each, of
    later ones rather than of earlier ones; None: elsewhere); or side by side, `joined`. rest: what else is in
    it. order: which mask, or place, is that of each part.
    """

    parts: tuple[Atom, ...]
    masks: tuple[tuple[Atom, bool] | None, ...] = ()
    which: Atom | None = None
    joined: JaxprEqn | None = None
    rest: tuple[Atom, ...] = ()
    order: tuple[int, ...] = ()


class _Unrolled:
    """Products of experts that stand one after the other in a view."""

    def __init__(self, view: View, group: Sequence[Product]) -> None:
        self.view, self.count = view, group[0].experts
        numbers = sorted({p.number for p in group})
        self.static = static(view)
        self.has = self._follows(numbers)
        if len(numbers) % self.count:
            raise Decline("experts are not alike")
        self.each = len(numbers) // self.count
        self.takes: dict[Var, None] = {}
        whole = (1 << len(numbers)) - 1
        outs = (v for eqn in view.eqns for v in eqn.outvars if self.has.get(v, 0) == whole)
        self.out: Var | None = next(outs, None)

    def _follows(self, numbers: Sequence[int]) -> dict[Any, int]:
        """Which of the products each variable follows from, a bit each."""
        found: dict[Any, int] = {}
        bits = {n: 1 << k for k, n in enumerate(numbers)}
        for n, eqn in enumerate(self.view.eqns):
            own = bits.get(n, 0)
            for v in eqn.invars:
                own |= found.get(v, 0) if isinstance(v, Var) else 0
            if own:
                found.update((v, own) for v in eqn.outvars)
        return found

    def _is_part(self, v: Atom) -> bool:
        """Whether it is made by one expert."""
        return isinstance(v, Var) and 0 < self.has.get(v, 0).bit_count() <= self.each

    def _follow(self, v: Atom) -> bool:
        return isinstance(v, Var) and v in self.has

    # ------------------------------------------------------------ the terms of a result

    def _terms(self, out: Var, bare: bool) -> _Terms:
        eqn = self.view.maker(out)
        assert eqn is not None
        name = eqn.primitive.name
        if name in SUMS:
            parts, rest = self._addends(out, bare)
            return _Terms(tuple(parts), rest=tuple(rest))
        if name in ("stack", "concatenate") and all(map(self._is_part, eqn.invars)):
            return _Terms(tuple(eqn.invars), joined=eqn)
        if name == "select_n" and len(eqn.invars) > 3 and all(map(self._is_part, eqn.invars[1:])):
            return _Terms(tuple(eqn.invars[1:]), which=eqn.invars[0])
        if name == "select_n" and len(eqn.invars) == 3:
            return self._cases(out, bare)
        raise Decline("what experts make is not added up")

    def _addends(self, v: Atom, bare: bool) -> tuple[list[Atom], list[Atom]]:
        """What experts make, and what else there is. bare: what the first is added to is no part of it."""
        if self._is_part(v) and not (bare and self._is_begun(v, SUMS)):
            return [v], []
        if not self._follow(v):
            return [], [v]
        eqn = self.view.maker(v)
        if eqn is None or eqn.primitive.name not in SUMS:
            raise Decline("what experts make is not added up")
        first = next((w for w in eqn.invars if self._follow(w)), None)
        left, right = (self._addends(w, bare and w is first) for w in eqn.invars)
        return left[0] + right[0], left[1] + right[1]

    def _is_begun(self, v: Atom, names: Sequence[str]) -> bool:
        """Whether it puts together what one expert makes, and what none has."""
        eqn = self.view.maker(v)
        return eqn is not None and eqn.primitive.name in names and sum(map(self._follow, eqn.invars)) == 1

    def _cases(self, v: Atom, bare: bool) -> _Terms:
        """Of nested selections, the innermost first."""
        parts: list[Atom] = []
        masks: list[tuple[Atom, bool] | None] = []
        rest: list[Atom] = []
        while True:
            eqn = self.view.maker(v)
            if self._is_part(v) and not (bare and self._is_begun(v, ("select_n",))):
                parts.append(v)
                masks.append(None)
                break
            if not self._follow(v):
                rest.append(v)
                break
            if eqn is None or eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
                raise Decline("what experts make is not added up")
            mask, off, on = eqn.invars
            holds = self._is_part(on)
            if not holds and not self._is_part(off):
                raise Decline("what experts make is not added up")
            if holds and self._is_part(off) and len(parts) + 2 < self.count:
                raise Decline("what experts make is not added up")
            parts.append(on if holds else off)
            masks.append((mask, holds))
            v = off if holds else on
        return _Terms(tuple(parts[::-1]), tuple(masks[::-1]), rest=tuple(rest))

    # ------------------------------------------------------------ all of them at once

    def claim(self) -> AtOnce:
        if self.out is None:
            raise Decline("what experts make does not come together")
        out, (terms, plan) = self.out, self._planned(self.out)
        narrow = [peeled(self.view, m[0]) for m in terms.masks if m is not None]
        if terms.which is not None:
            narrow.append(peeled(self.view, terms.which))
        elif narrow:
            self._alike(tuple(v for v, _ in narrow), plan)
        reads = [v for v, _ in narrow if terms.which is not None] + list(terms.rest)
        self.takes.update((v, None) for v in reads if isinstance(v, Var))

        def emit(values: Mapping[Var, Value], scope: str) -> Mapping[Var, Value]:
            def read(v: Atom) -> Value:
                return v.val if isinstance(v, Literal) else values[v]

            self.scope = scope
            x = whole(self._made(terms.parts, plan, {}, read), self.count)
            return {out: self._together(terms, plan, x, narrow, read)}

        return Claim(self.view, list(self.takes), [out], lambda values: emit(values, "")), emit

    def _planned(self, out: Var) -> tuple[_Terms, dict[tuple[int, ...], Any]]:
        """The terms, and how they are made; the first one with what it is added to, or without."""
        for bare in (True, False):
            plan: dict[tuple[int, ...], Any] = {}
            self.takes = {}
            try:
                terms = self._terms(out, bare)
                if len(terms.parts) == self.count:
                    self._alike(terms.parts, plan)
                    return self._ordered(terms, plan), plan
            except Decline:
                if not bare:
                    raise
        raise Decline("experts are not alike")

    def _ordered(self, terms: _Terms, plan: dict[tuple[int, ...], Any]) -> _Terms:
        """The terms in the order of experts, as the first array has them that each takes an entry of."""
        places: list[int] = next((how[2] for how in plan.values() if isinstance(how, tuple)), [])
        if terms.joined is not None or sorted(places) != list(range(self.count)) or places == sorted(places):
            return terms
        order = sorted(range(self.count), key=places.__getitem__)
        parts = tuple(terms.parts[n] for n in order)
        plan.clear()
        self._alike(parts, plan)
        return dataclasses.replace(terms, parts=parts, order=tuple(order))

    def _together(
        self, terms: _Terms, plan: Mapping[Any, Any], x: Value, narrow: Sequence[Any], read: Any
    ) -> Value:
        if terms.joined is not None:
            p = terms.joined.params
            axis = p["axis"] if "axis" in p else p["dimension"]
            return jnp.moveaxis(x, 0, axis).reshape(shape_of(terms.joined.outvars[0]))
        rest = [read(v) for v in terms.rest if not is_zero(self.view, v)]
        if terms.which is not None:
            which, spread = narrow[0]
            line = np.asarray(terms.order or range(self.count)).reshape(-1, *[1] * len(shape_of(which)))
            return put(x, read(which) == line.astype(read(which).dtype), spread, None)
        if not terms.masks:
            total = x.sum(0).astype(x.dtype)
            return sum(rest, total)
        own = self._made(tuple(v for v, _ in narrow), plan, {}, read)
        alone = last_of(self._hits(terms, whole(own, len(narrow))))
        if terms.order:
            alone = jnp.stack([alone[n] for n in terms.order])
        return put(x, alone, narrow[0][1], rest[0] if rest else None)

    def _hits(self, terms: _Terms, own: Value) -> Value:
        """The masks, of what is nested deepest first; that is where no other one is."""
        signs = [m[1] for m in terms.masks if m is not None]
        if not all(signs):
            own = own ^ ~np.asarray(signs).reshape(-1, *[1] * (own.ndim - 1))
        if terms.masks[0] is None:
            own = jnp.concatenate([jnp.ones_like(own[:1]), own])
        return own

    def _alike(self, atoms: tuple[Atom, ...], plan: dict[tuple[int, ...], Any]) -> None:
        """Plans how values of all experts are made of the same operations, or of arrays in a stack."""
        key = tuple(map(id, atoms))
        if key in plan:
            return
        first = atoms[0]
        if all(isinstance(v, Literal) for v in atoms):
            plan[key] = "numbers"
        elif all(v is first for v in atoms) and not self._follow(first):
            plan[key] = "same"
            self.takes.update({v: None for v in (first,) if isinstance(v, Var)})
        elif (entries := self._entries(atoms)) is not None:
            plan[key] = entries
            self.takes[entries[0]] = None
        elif (eqn := self._one_kind(atoms)) is not None:
            plan[key] = eqn
            makers = [self.view.maker(v) for v in atoms]
            for each in zip(*(e.invars for e in makers if e is not None), strict=True):
                self._alike(each, plan)
        elif any(map(self._follow, atoms)) or len({str(v.aval) for v in atoms}) > 1:
            raise Decline("experts are not alike")
        else:
            plan[key] = "stack"
            self.takes.update((v, None) for v in atoms if isinstance(v, Var))

    def _one_kind(self, atoms: tuple[Atom, ...]) -> JaxprEqn | None:
        """The first of the equations that make values, where all do the same."""
        makers = [self.view.maker(v) for v in atoms]
        first = makers[0]
        if first is None:
            return None
        params = str(first.params)
        for eqn, v in zip(makers, atoms, strict=True):
            if eqn is None or eqn.primitive is not first.primitive or eqn.effects:
                return None
            if place_of(eqn, v) != place_of(first, atoms[0]) or str(eqn.params) != params:
                return None
            if [w.aval for w in eqn.invars] != [w.aval for w in first.invars]:
                return None
        return first

    def _entries(self, atoms: tuple[Atom, ...]) -> tuple[Var, int, list[int]] | None:
        """One array that values are an entry each of, along which dimension, and which."""
        found = [self._entry(v) for v in atoms]
        first = found[0]
        if first is None or any(f is None or f[:2] != first[:2] for f in found):
            return None
        return first[0], first[1], [f[2] for f in found if f is not None]

    def _entry(self, v: Atom) -> tuple[Var, int, int] | None:
        eqn = self.view.maker(v)
        base = None if eqn is None or not eqn.invars else eqn.invars[0]
        if eqn is None or not isinstance(base, Var):
            return None
        sizes, p, name = shape_of(base), eqn.params, eqn.primitive.name
        if name == "unstack" or (name == "split" and set(p["sizes"]) == {1}):
            return base, p["axis"], place_of(eqn, v)
        if name not in ("slice", "dynamic_slice"):
            return None
        cut = [d for d, n in enumerate(shape_of(v)) if n != sizes[d]]
        if len(cut) != 1 or shape_of(v)[cut[0]] != 1:
            return None
        if name == "slice":
            return base, cut[0], p["start_indices"][cut[0]]
        at = eqn.invars[1 + cut[0]]
        number = self._number(at)
        return None if number is None else (base, cut[0], int(np.clip(number, 0, sizes[cut[0]] - 1)))

    def _number(self, v: Atom) -> Any:
        """A number that the program has; None for others."""
        if isinstance(v, Literal):
            return v.val
        eqn = self.view.maker(v)
        if eqn is None or v not in self.static or shape_of(v):
            return None
        args = [self._number(w) for w in eqn.invars]
        if any(a is None for a in args):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(bind(eqn, [jnp.asarray(a) for a in args], eqn.params)[place_of(eqn, v)])

    def _made(
        self, atoms: tuple[Atom, ...], plan: Mapping[Any, Any], env: dict[Any, Each], read: Any
    ) -> Each:
        key = tuple(map(id, atoms))
        if key not in env:
            env[key] = self._make(atoms, plan, env, read)
        return env[key]

    def _make(
        self, atoms: tuple[Atom, ...], plan: Mapping[Any, Any], env: dict[Any, Each], read: Any
    ) -> Each:
        how = plan[tuple(map(id, atoms))]
        if how == "numbers":
            values = [np.asarray(v.val) for v in atoms if isinstance(v, Literal)]
            same = all(np.array_equal(x, values[0]) for x in values)
            return Each(values[0]) if same else Each(np.stack(values), True)
        if how == "same":
            return Each(read(atoms[0]))
        if how == "stack":
            return Each(jnp.stack([read(v) for v in atoms]), True)
        if isinstance(how, tuple):
            base, d, places = how
            return Each(taken(read(base), d, places).reshape(self.count, *shape_of(atoms[0])), True)
        makers = [self.view.maker(v) for v in atoms]
        operands = zip(*(e.invars for e in makers if e is not None), strict=True)
        args = [self._made(each, plan, env, read) for each in operands]
        with at_source(how, self.scope):
            return bound(how, args)[place_of(how, atoms[0])]
