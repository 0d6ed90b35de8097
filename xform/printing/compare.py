"""What changed between two programs, as a tree of steps: kept, changed, removed, added, wrapped.

Variables have no names here. Equations are aligned by what they are (primitive, parameters, types, source
line, what made their operands), body by body, and an environment says which variable of the first program
each variable of the second one is. Where an equation of the second reads a new variable in place of an old
one, that is a rename and no change if the new variable was made from the old one (a constraint put on it, a
cast there and back), or if what made the old one is gone; the step is marked `rewired`. Any other difference
of operands is a change. A call that swallowed equations which stood beside it (remat, jit), or that was
dissolved into them, is shown as that and not as everything removed and added. A new manual region that
swallowed them holds the same program on one shard: there an equation is the same as one before whose sizes
it divides, and what is left are the collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from xform.higher_order import bodies
from xform.printing.align import Keys, align
from xform.printing.keys import Fingerprints, Key, literal_key
from xform.printing.spell import const_key, type_text
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var

LOOPS = frozenset({"scan", "while", "cond", "shard_map"})
"""Primitives with bodies that are no mere calls: their operands are not the inputs of the body one to one."""


@dataclasses.dataclass
class Step:
    """One equation, or a pair of the same equation before and after.

    `before` and `after` are indices into the two bodies, None where there is none. `inner` are the
    comparisons of the bodies, (number before, number after, match). `wraps` compares the body of an added
    call with the equations around it that it swallowed, or those that a removed call was dissolved into with
    its body.
    """

    before: int | None
    after: int | None
    changed: bool = False
    rewired: bool = False
    inner: list[tuple[int, int, Match]] = dataclasses.field(default_factory=list)
    wraps: Match | None = None

    @property
    def kept(self) -> bool:
        """Whether nothing changed, inside and out."""
        paired = self.before is not None and self.after is not None
        return paired and not self.changed and all(match.same for _, _, match in self.inner)


@dataclasses.dataclass
class Match:
    """Two bodies and their steps. `origin` says which variable before an aligned variable after is,
    `stands_for` which one a new variable has taken the place of."""

    before: Jaxpr
    after: Jaxpr
    steps: list[Step] = dataclasses.field(default_factory=list)
    origin: dict[Var, Atom] = dataclasses.field(default_factory=dict)
    stands_for: dict[Var, Var] = dataclasses.field(default_factory=dict)
    inputs: list[tuple[int | None, int | None]] = dataclasses.field(default_factory=list)
    outputs_changed: bool = False
    same: bool = False


def compare(before: Jaxpr, after: Jaxpr, keys: Fingerprints | None = None) -> Match:
    """How the second program comes from the first; `keys` of earlier comparisons save work in a chain."""
    return Comparison(Fingerprints() if keys is None else keys).bodies(before, after, None)


class Comparison:
    """What is worked out once while two programs are compared: fingerprints, and the pairs of bodies."""

    def __init__(self, keys: Fingerprints) -> None:
        self.keys = keys
        self._matches: dict[Hashable, Match] = {}

    def bodies(
        self, before: Jaxpr, after: Jaxpr, operands: list[tuple[int, int]] | None, shard: bool = False
    ) -> Match:
        """Compares two bodies. `operands` are the pairs of inputs that are fed the same; None where nothing
        feeds them. shard: the second is the view of one shard."""
        key = (before, after, None if operands is None else tuple(operands), shard)
        found = self._matches.get(key)
        if found is None:
            if self.keys.digest(before) == self.keys.digest(after):
                found = self._identical(before, after)
            else:
                found = self._different(before, after, operands, shard)
            self._matches[key] = found
        return found

    def _identical(self, before: Jaxpr, after: Jaxpr) -> Match:
        match = Match(before, after, same=True)
        match.inputs = [(k, k) for k in range(len(before.invars))]
        match.origin.update(zip(after.all_invars, before.all_invars, strict=True))
        for k, (old, new) in enumerate(zip(before.eqns, after.eqns, strict=True)):
            match.origin.update(zip(new.outvars, old.outvars, strict=True))
            pairs = zip(bodies(old), bodies(new), strict=True)
            inner = [(n, n, self.bodies(b, a, None)) for n, (b, a) in enumerate(pairs)]
            match.steps.append(Step(k, k, inner=inner))
        return match

    def _different(
        self, before: Jaxpr, after: Jaxpr, operands: list[tuple[int, int]] | None, shard: bool
    ) -> Match:
        match = Match(before, after)
        consts = [
            (const_key(c), type_text(v.aval)) for c, v in zip(before.consts, before.constvars, strict=True)
        ]
        new_consts = [
            (const_key(c), type_text(v.aval)) for c, v in zip(after.consts, after.constvars, strict=True)
        ]
        for i, j in align([(consts, new_consts)]):
            match.origin[after.constvars[j]] = before.constvars[i]
        pairs = _inputs(before, after, operands)
        for i, j in pairs:
            match.origin[after.invars[j]] = before.invars[i]
        match.inputs = _with_gaps(pairs, len(before.invars), len(after.invars))
        _Walk(self, match, shard).run()
        unpaired = any(i is None or j is None for i, j in match.inputs)
        kept = all(step.kept for step in match.steps)
        match.same = kept and not unpaired and not match.outputs_changed and len(consts) == len(new_consts)
        return match


def _inputs(before: Jaxpr, after: Jaxpr, operands: list[tuple[int, int]] | None) -> list[tuple[int, int]]:
    old = [type_text(v.aval) for v in before.invars]
    new = [type_text(v.aval) for v in after.invars]
    if operands is not None:
        return operands
    if old == new:
        return [(k, k) for k in range(len(old))]
    return align([(_named(before, old), _named(after, new)), (old, new)])


def _named(jaxpr: Jaxpr, types: list[str]) -> list[Hashable]:
    names = getattr(jaxpr.debug_info, "arg_names", None) or ()
    if len(names) != len(types):
        return [None] * len(types)
    return [pair if pair[0] else None for pair in zip(names, types, strict=True)]


def _with_gaps(pairs: Sequence[tuple[int, int]], n: int, m: int) -> list[tuple[int | None, int | None]]:
    """All of both sides, in the order of the second: the paired together, the others alone."""
    found: list[tuple[int | None, int | None]] = []
    of = {j: i for i, j in pairs}
    paired = {i for i, _ in pairs}
    found += [(i, None) for i in range(n) if i not in paired]
    found += [(of.get(j), j) for j in range(m)]
    return found


class _Walk:
    """Walks the aligned equations of two bodies in order, pairing variables and deciding what each step
    is."""

    def __init__(self, comparison: Comparison, match: Match, shard: bool = False) -> None:
        self.c = comparison
        self.shard = shard
        self.match = match
        self.before, self.after = match.before.eqns, match.after.eqns
        self.keys_before = comparison.keys.of(match.before)
        self.keys_after = comparison.keys.of(match.after)
        self.removed: dict[
            Var, tuple[Atom, ...]
        ] = {}  # variables gone, and what of the same type they came from
        self.literals: dict[Var, Literal] = {}  # variables before that stand for a literal
        self.made_from: dict[Var, tuple[Atom, ...]] = {}  # new variables, and what before they came from

    def run(self) -> None:
        match = self.match
        for v in match.after.all_invars:
            if v not in match.origin:
                self.made_from[v] = ()
        kept = set(match.origin.values())
        for u in match.before.all_invars:
            if u not in kept:
                self.removed[u] = ()
        match.steps = self.range(0, len(self.before), 0, len(self.after))
        old, new = match.before.outvars, match.after.outvars
        match.outputs_changed = len(old) != len(new) or not all(
            self.corresponds(b, a) is not None for b, a in zip(old, new, strict=True)
        )

    # ------------------------------------------------------------ equations

    def range(self, i: int, stop_i: int, j: int, stop_j: int) -> list[Step]:
        """The steps from equations i..stop_i to j..stop_j."""
        steps: list[Step] = []
        old, new = self.keys_before[i:stop_i], self.keys_after[j:stop_j]
        rounds: list[tuple[Keys, Keys]] = [
            ([k.deep for k in old], [k.deep for k in new]),
            ([k.placed for k in old], [k.placed for k in new]),
            ([k.exact for k in old], [k.exact for k in new]),
            ([k.header if k.inside else None for k in old], [k.header if k.inside else None for k in new]),
        ]
        if self.shard:
            rounds = [([(k.spot, k.unsized) for k in old], [(k.spot, k.unsized) for k in new])]
        ends = [(x + i, y + j) for x, y in align(rounds)]
        for next_i, next_j in [*ends, (stop_i, stop_j)]:
            steps += self.gap(i, next_i, j, next_j)
            if next_i < stop_i:
                steps.append(self.pair(next_i, next_j))
            i, j = next_i + 1, next_j + 1
        return steps

    def gap(self, i: int, stop_i: int, j: int, stop_j: int) -> list[Step]:
        """Equations that are not the same: first calls that swallowed others, then changed ones, the rest
        gone and new."""
        if i < stop_i and j < stop_j:
            wrapped = self.wrapped(i, stop_i, j, stop_j) or self.unwrapped(i, stop_i, j, stop_j)
            if wrapped is not None:
                return wrapped
        old, new = self.keys_before[i:stop_i], self.keys_after[j:stop_j]
        steps: list[Step] = []
        ends = (
            [(x + i, y + j) for x, y in align([([k.loose for k in old], [k.loose for k in new])])]
            if old
            else []
        )
        for next_i, next_j in [*ends, (stop_i, stop_j)]:
            steps += [self.remove(x) for x in range(i, next_i)]
            steps += [self.add(y) for y in range(j, next_j)]
            if next_i < stop_i and next_j < stop_j:
                steps.append(self.pair(next_i, next_j))
            i, j = next_i + 1, next_j + 1
        return steps

    def pair(self, i: int, j: int) -> Step:
        old, new = self.before[i], self.after[j]
        key_old, key_new = self.keys_before[i], self.keys_after[j]
        step = Step(i, j, changed=key_old.header != key_new.header)
        if self.shard:
            step.changed = key_old.unsized != key_new.unsized or not _divides(old, new)
        if len(old.invars) == len(new.invars):
            for b, a in zip(old.invars, new.invars, strict=True):
                how = self.corresponds(b, a)
                step.changed |= how is None
                step.rewired |= how == "rename"
        else:
            step.changed = True
        if key_old.inside is not None and key_new.inside is not None:
            step.inner = self.inner(old, new)
            number = {len(bodies(old)), len(bodies(new)), len(step.inner)}
            step.changed |= len(number) > 1
        elif key_old.inside != key_new.inside:
            step.changed = True
        self.results(old.outvars, new.outvars)
        return step

    def inner(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int, Match]]:
        found = []
        for number, (b, a) in enumerate(zip(bodies(old), bodies(new), strict=False)):
            operands = None
            if [v.aval for v in b.invars] != [v.aval for v in a.invars]:
                operands = self.operands(old, new, b, a)
            found.append((number, number, self.c.bodies(b, a, operands, self.shard)))
        return found

    def operands(self, old: JaxprEqn, new: JaxprEqn, b: Jaxpr, a: Jaxpr) -> list[tuple[int, int]] | None:
        """Pairs of body inputs, by the operands that feed them: needed where a body has got or lost some."""
        skip_b, skip_a = len(old.invars) - len(b.invars), len(new.invars) - len(a.invars)
        if skip_b != skip_a or skip_b < 0:
            return None
        places: dict[Atom, int] = {}
        for k, atom in enumerate(old.invars[skip_b:]):
            if not isinstance(atom, Literal):
                places.setdefault(atom, k)
        found, last = [], -1
        for k, atom in enumerate(new.invars[skip_a:]):
            source = None if isinstance(atom, Literal) else self.source(atom)
            place = places.get(source) if source is not None else None
            if place is not None and place > last:
                found.append((place, k))
                last = place
        return found

    def results(self, old: Sequence[Var], new: Sequence[Var]) -> None:
        if len(old) == len(new):
            pairs = [(k, k) for k in range(len(old))]
        else:
            pairs = align([([type_text(v.aval) for v in old], [type_text(v.aval) for v in new])])
        for x, y in pairs:
            self.match.origin[new[y]] = old[x]
        gone, more = {x for x, _ in pairs}, {y for _, y in pairs}
        self.removed.update({v: () for x, v in enumerate(old) if x not in gone})
        self.made_from.update({v: () for y, v in enumerate(new) if y not in more})

    def remove(self, i: int) -> Step:
        eqn = self.before[i]
        for v in eqn.outvars:
            self.removed[v] = self.ancestors(v, eqn, self.removed, lambda atom: atom)
        return Step(i, None)

    def add(self, j: int) -> Step:
        eqn = self.after[j]
        for v in eqn.outvars:
            self.made_from[v] = self.ancestors(v, eqn, self.made_from, self.source)
        return Step(None, j)

    def ancestors(
        self, v: Var, eqn: JaxprEqn, known: dict[Var, tuple[Atom, ...]], source: Any
    ) -> tuple[Atom, ...]:
        """The old variables of v's shape that v was made from, through equations that are all gone or all
        new."""
        found: dict[Atom, None] = {}
        shape = getattr(v.aval, "shape", None)
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                continue
            for old in known[atom] if atom in known else (source(atom),):
                if old is not None and (self.shard or getattr(old.aval, "shape", None) == shape):
                    found[old] = None
        return tuple(found)[:4]

    # ------------------------------------------------------------ operands

    def source(self, atom: Atom) -> Atom | None:
        """The variable before that a variable after is, or stands for."""
        if isinstance(atom, Literal):
            return None
        found = self.match.origin.get(atom)
        return found if found is not None else self.match.stands_for.get(atom)

    def corresponds(self, old: Atom, new: Atom) -> str | None:
        """'same', or 'rename' where a new variable is read in place of the old one, or None: another
        operand."""
        if isinstance(old, Var):
            old = self.literals.get(old, old)
        if isinstance(new, Literal) or isinstance(old, Literal):
            if not (isinstance(new, Literal) and isinstance(old, Literal)):
                return None
            return "same" if literal_key(old) == literal_key(new) else None
        origin = self.match.origin.get(new)
        if origin is not None:
            if origin is old:
                return "same"
            return "rename" if origin in self.removed.get(old, ()) else None
        stands = self.match.stands_for.get(new)
        if stands is None and new in self.made_from and (old in self.removed or old in self.made_from[new]):
            self.match.stands_for[new] = stands = old
        return "rename" if stands is old else None

    # ------------------------------------------------------------ calls put around equations, or dissolved

    def wrapped(self, i: int, stop_i: int, j: int, stop_j: int) -> list[Step] | None:
        """The gap, if a new call in it holds what stood in it before."""
        for at in range(j, stop_j):
            body, shard = _called(self.after[at]), self.shard
            if body is None and self.after[at].primitive.name == "shard_map":
                (body,), shard = bodies(self.after[at]), True
            if body is None:
                continue
            window = self.keys_before[i : min(stop_i, i + 2 * len(body.eqns) + 16)]
            first, last = self.overlap(window, self.c.keys.of(body), shard)
            if last is None:
                continue
            steps = self.gap(i, i + first, j, at)
            steps.append(self.swallow(i + first, i + last + 1, at, body, shard))
            return steps + self.gap(i + last + 1, stop_i, at + 1, stop_j)
        return None

    def overlap(self, outside: Sequence[Key], inside: Sequence[Key], shard: bool) -> tuple[int, int | None]:
        """The first and the last of `outside` that a call with `inside` holds, if it holds half of itself."""
        if shard:
            # With its collectives and what they need, a region may have twice as much as it held before.
            return _overlap([k.spot for k in outside], [k.spot for k in inside], len(outside) // 2)
        return _overlap([k.placed for k in outside], [k.placed for k in inside])

    def swallow(self, i: int, stop_i: int, at: int, body: Jaxpr, shard: bool) -> Step:
        eqn = self.after[at]
        match = Match(self.match.before, body)
        for v, atom in zip(body.invars, eqn.invars, strict=True):
            old = self.source(atom)
            if old is not None:
                match.origin[v] = old
        walk = _Walk(self.c, match, shard)
        walk.removed = self.removed
        walk.made_from = {v: () for v in body.all_invars if v not in match.origin}
        match.steps = walk.range(i, stop_i, 0, len(body.eqns))
        for v, atom in zip(eqn.outvars, body.outvars, strict=True):
            old = walk.source(atom)
            if old is not None and not isinstance(v, DropVar):
                self.match.origin[v] = old
            else:
                self.made_from[v] = ()
        return Step(None, at, wraps=match)

    def unwrapped(self, i: int, stop_i: int, j: int, stop_j: int) -> list[Step] | None:
        """The gap, if an old call in it is now the equations that it held."""
        for at in range(i, stop_i):
            body = _called(self.before[at])
            if body is None:
                continue
            window = self.keys_after[j : min(stop_j, j + 2 * len(body.eqns) + 16)]
            first, last = self.overlap(window, self.c.keys.of(body), self.shard)
            if last is None:
                continue
            steps = self.gap(i, at, j, j + first)
            steps.append(self.dissolve(at, j + first, j + last + 1, body))
            return steps + self.gap(at + 1, stop_i, j + last + 1, stop_j)
        return None

    def dissolve(self, at: int, j: int, stop_j: int, body: Jaxpr) -> Step:
        eqn = self.before[at]
        fed = list(zip(eqn.invars, body.invars, strict=True))
        inside: dict[Atom, Var] = {}
        for atom, v in fed:
            if not isinstance(atom, Literal):
                inside[atom] = v
                for old in self.removed.get(atom, ()):  # what stands for it where it is gone
                    inside.setdefault(old, v)
        match = Match(body, self.match.after)
        for v, old in self.match.origin.items():
            if not isinstance(old, Literal) and old in inside:
                match.origin[v] = inside[old]
        walk = _Walk(self.c, match, self.shard)
        walk.literals = {v: atom for atom, v in fed if isinstance(atom, Literal)}
        walk.made_from = self.made_from
        match.steps = walk.range(0, len(body.eqns), j, stop_j)
        result = dict(zip(body.outvars, eqn.outvars, strict=True))
        kept = set()
        for step in match.steps:
            for v in self.after[step.after].outvars if step.after is not None else ():
                inner = walk.source(v)
                outer = result.get(inner) if inner is not None and not isinstance(inner, Literal) else None
                if outer is not None:
                    self.match.origin[v] = outer
                    kept.add(outer)
                else:
                    self.made_from[v] = ()
        self.removed.update({v: () for v in eqn.outvars if v not in kept})
        return Step(at, None, wraps=match)


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    """The body of an equation that does nothing but call it."""
    inside = bodies(eqn)
    if len(inside) != 1 or eqn.primitive.name in LOOPS or not inside[0].eqns:
        return None
    body = inside[0]
    ins = [type_text(v.aval) for v in body.invars] == [type_text(v.aval) for v in eqn.invars]
    return body if ins and len(body.outvars) == len(eqn.outvars) else None


def _divides(whole: JaxprEqn, shard: JaxprEqn) -> bool:
    """Whether every operand and result of an equation has the shape of the other's, or a part of it."""
    pairs = [*zip(whole.invars, shard.invars, strict=False), *zip(whole.outvars, shard.outvars, strict=False)]
    for old, new in pairs:
        a, b = getattr(old.aval, "shape", ()), getattr(new.aval, "shape", ())
        if getattr(old.aval, "dtype", None) != getattr(new.aval, "dtype", None) or len(a) != len(b):
            return False
        if any(m != n and (not n or m % n) for m, n in zip(a, b, strict=True)):
            return False
    return len(whole.invars) == len(shard.invars) and len(whole.outvars) == len(shard.outvars)


def _overlap(outside: Keys, inside: Keys, least: int | None = None) -> tuple[int, int | None]:
    """The first and the last of `outside` that `inside` holds, if these are `least`, or half of `inside`."""
    pairs = align([(outside, inside)])
    enough = 2 * len(pairs) >= len(inside) or (least is not None and len(pairs) >= least)
    return (pairs[0][0], pairs[-1][0]) if pairs and enough else (0, None)
