"""Finds gated linear recurrences that are written in chunks: inside of one by products, from one to the next
by a loop that carries the state (Yang et al. 2024; Dao and Gu 2024).

    q, k, v, g cut into [chunks, c];  U = (I + A)^-1 ...;  S = scan(...)    ->    gated_delta q k v g beta

How a chunk is computed differs from one to the other; what it computes does not. So what goes in is found by
where values still have time in one piece (`roots`); and which is query, key, value, decay and beta by their
dimensions, by what they reach, and by an exponential on the way. Then one chunk is evaluated from a made-up
state, and has to be what the recurrence makes of it, step by step.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xform.raising.flat import View
from xform.raising.indices import groups
from xform.raising.loops import Carry, Loop
from xform.raising.meaning import Near, Product, Raised, Recurrence, Tensor
from xform.raising.points import Known, Points, Unknown, in_turn, of_turn, random_known
from xform.raising.roots import Root, Roots
from xform.raising.terms import Dim, Factor, Index, Term, Terms
from xform.raising.unrolled import unrolled
from xform.trace import DropVar, Var, shape_of

WHAT, TOLERANCE = "linear_recurrence", 1e-6


@dataclasses.dataclass(frozen=True)
class Guess:
    """Which roots are what. k, v, beta: products down to where they are made; none of beta: no delta rule."""

    q: Root
    k: Root
    v: tuple[Factor, ...]
    decays: tuple[Root, ...]
    beta: tuple[Factor, ...] | None


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A loop over chunks and what comes of it: `out`, at `index`; and the state, at `state`."""

    loop: Loop
    carry: Carry
    around: Terms
    inside: Terms
    out: Var
    index: Index
    state: Index
    turn: int
    place: int
    keys: frozenset[int]
    values: frozenset[int]

    @property
    def chunk(self) -> int:
        return self.around.labels.sizes[self.place]


def chunks(loop: Loop, carry: Carry, around: Terms, inside: Terms) -> Iterator[Raised | Near]:
    """The recurrence whose state a loop carries from chunk to chunk."""
    for out, dim, chunk in _joined(loop):
        labels = around.labels
        turn, place = labels.fresh(loop.length), labels.fresh(chunk)
        if not turn or not place:
            continue
        index = tuple(turn + place if d == dim else labels.fresh(n) for d, n in enumerate(shape_of(out)))
        roots = Roots(loop, carry, around, inside, turn, place)
        read = roots.of(out, index)
        if roots.state is None:
            continue
        kept = roots.of(carry.out, roots.state, body=True)
        read, kept = ([dataclasses.replace(r, index=roots.named(r.index)) for r in rs] for rs in (read, kept))
        index, state = roots.named(index), roots.named(roots.state)
        here = {label for d in index for label in d}
        keys = frozenset(label for d in state for label in d if label not in here)
        of_keys = frozenset().union(*(r.labels for r in read + kept if r.labels & keys))
        of_decays = frozenset().union(*(r.labels for r in read + kept if r.grown))
        values = frozenset(label for d in state for label in d) - keys - of_keys - of_decays
        if not keys or not values:
            continue
        case = Chunked(loop, carry, around, inside, out, index, state, turn[0], place[0], keys, values)
        found = False
        why = ""
        for guess in _guesses(case, read, kept):
            found = True
            scale, why = _agrees(case, guess)
            if not why:
                yield _told(case, guess, scale)
                return
        if found:
            yield Near(WHAT, why, loop.view, loop.number)
            return


def _joined(loop: Loop) -> Iterator[tuple[Var, int, int]]:
    """Values after the loop in which its turns and what follows them are one dimension: time; with the number
    of that dimension, and the length of a chunk.
    """
    view = loop.view
    todo = [v for _, v in loop.stacked if not isinstance(v, DropVar)]
    seen: set[Var] = set()
    while todo:
        v = todo.pop(0)
        for number in view.users.get(v, ()):
            if number < 0 or number == loop.number:
                continue
            eqn = view.eqns[number]
            out = eqn.outvars[0]
            if out in seen or isinstance(out, DropVar):
                continue
            seen.add(out)
            if eqn.primitive.name == "reshape":
                old, new = shape_of(eqn.invars[0]), shape_of(out)
                for left, right in groups(old, new):
                    if len(left) == 2 and len(right) == 1 and old[left[0]] == loop.length:
                        yield out, right[0], old[left[1]]
                        break
                else:
                    todo.append(out)
            else:
                todo += [w for w in eqn.outvars if isinstance(w, Var)]


def _fine(case: Chunked, r: Root) -> Term:
    (term,) = case.around.of(r.atom, r.index, lambda f: False)
    return term


def _guesses(case: Chunked, read: Sequence[Root], kept: Sequence[Root]) -> Iterator[Guess]:
    """Which roots may be which, the likeliest first."""
    known = {r.atom for r in kept}
    both = {r.atom: r for r in (*read, *kept)}
    decays = tuple(r for r in both.values() if r.grown and any(x.grown for x in kept if x.atom is r.atom))
    plain = [r for r in both.values() if not r.grown]
    queries = [r for r in plain if r.labels & case.keys and r.atom not in known]
    written = [r for r in plain if r.labels & case.keys and r.atom in known]
    of_values = [r for r in plain if r.labels & case.values and r.atom in known]
    scalars = [r for r in plain if not r.labels & (case.keys | case.values) and r.atom in known]
    if len(decays) > 1 or not written or len(of_values) != 1 or len(queries) > 1:
        return
    written.sort(key=lambda r: len(_fine(case, r).factors))
    k = written[0]
    q = queries[0] if queries else k
    own = Counter(_fine(case, k).factors)
    extra: Counter[Factor] = Counter()
    for other in written[1:]:
        left = Counter(_fine(case, other).factors)
        if own - left:
            return
        extra |= left - own
    alone = tuple(Factor(r.atom, r.index) for r in scalars)
    v = Counter(_fine(case, of_values[0]).factors)
    whole = (Factor(of_values[0].atom, of_values[0].index),)
    beta = (*extra.elements(), *alone)
    if beta:
        yield Guess(q, k, tuple((v - extra).elements()) if extra and not extra - v else whole, decays, beta)
    else:
        yield Guess(q, k, whole, decays, None)
    yield Guess(q, k, whole, decays, beta or ())
    if alone:
        yield Guess(q, k, (*whole, *alone), decays, None)


# ---------------------------------------------------------------- one chunk at points


def _agrees(case: Chunked, guess: Guess) -> tuple[float, str]:
    """The scale of queries, and why a chunk is not the steps of a recurrence; "" where it is."""
    sizes = case.around.labels.sizes
    loop, view = case.loop, case.loop.view
    turn = loop.length // 2
    known = _known(case, guess, turn)
    around = Points(view, known, wide=True)
    rng = np.random.default_rng(0)
    fixed = {label: int(rng.integers(0, sizes[label])) for d in case.state for label in d}
    env: dict[int, Any] = {**fixed, case.turn: turn}
    keys, values = sorted(case.keys), sorted(case.values)
    width = [min(sizes[label], 4) for label in values]
    n, m = [sizes[label] for label in keys], math.prod(width)
    d_at = np.unravel_index(np.arange(math.prod(n)), n)
    e_at = np.unravel_index(np.arange(m), width)

    def at(index: Index, more: dict[int, Any]) -> tuple[Any, ...]:
        found = []
        for dim in index:
            place: Any = np.zeros((), np.int64)
            for label in dim:
                place = place * sizes[label] + (more[label] if label in more else env[label])
            found.append(place)
        return tuple(found)

    def value(factors: Sequence[Factor], more: dict[int, Any]) -> Any:
        made: Any = 1.0
        for f in factors:
            made = made * np.asarray(around.at(f.atom, at(f.index, more)), np.float64) ** f.power
        return made

    rows = {label: a[:, None] for label, a in zip(keys, d_at, strict=True)}
    columns = {label: a[None, :] for label, a in zip(values, e_at, strict=True)}
    first = known[case.carry.into]
    state = np.array(first(at(case.state, rows | columns)), np.float64)
    state = np.broadcast_to(state, (math.prod(n), m))
    wanted = []
    try:
        for step in range(case.chunk):
            now = {case.place: step}
            k = value([Factor(guess.k.atom, guess.k.index)], rows | now)
            v = value(guess.v, columns | now)
            for r in guess.decays:
                state = state * _decay(case, r, value([Factor(r.atom, r.index)], rows | now))
            if guess.beta is None:
                state = state + k * v
            else:
                state = state + value(guess.beta, now) * k * (v - np.sum(k * state, axis=0, keepdims=True))
            q = value([Factor(guess.q.atom, guess.q.index)], rows | now)
            wanted.append(np.sum(q * state, axis=0))
        inside = Points(loop.body, known, wide=True)
        got = inside.at(case.carry.out, at(case.state, rows | columns))
        steps = np.arange(case.chunk)[:, None]
        read = around.at(case.out, at(case.index, columns | {case.place: steps}))
    except Unknown as why:
        return 1.0, f"a chunk of it cannot be evaluated: {why}"
    want = np.stack(wanted)
    if not _close(got, state):
        return 1.0, "the state after a chunk is not what a gated linear recurrence makes of its steps"
    scale = float(np.sum(read * want) / np.sum(want * want))
    if not _close(read, want * scale):
        return 1.0, "what is read of a chunk is not what a gated linear recurrence reads in its steps"
    return (1.0 if abs(scale - 1) < TOLERANCE else scale), ""


def _close(a: Any, b: Any) -> bool:
    return bool(np.all(np.abs(a - b) <= TOLERANCE * (np.max(np.abs(b)) + 1)))


def _is_log(case: Chunked, decay: Root) -> bool:
    """Whether a decay is a logarithm: no running product is taken of it."""
    view = case.loop.view
    after = {decay.atom}
    for eqn in view.eqns:
        if any(isinstance(v, Var) and v in after for v in eqn.invars):
            if eqn.primitive.name == "cumprod":
                return False
            after.update(eqn.outvars)
    return True


def _decay(case: Chunked, decay: Root, value: Any) -> Any:
    return np.exp(value) if _is_log(case, decay) else value


def _known(case: Chunked, guess: Guess, turn: int) -> dict[Var, Known]:
    """Made-up values: keys of length one, decays and betas as they come; a chunk's state; and how to compute
    what comes of loops.
    """
    loop = case.loop
    channels = math.prod(case.around.labels.sizes[label] for label in case.keys)
    atoms = {guess.q.atom: channels**-0.5, guess.k.atom: channels**-0.5}
    atoms |= {f.atom: 1.0 for f in guess.v if f.atom not in loop.view.constants}
    known: dict[Var, Known] = {}
    for seed, (v, by) in enumerate(atoms.items()):
        known[v] = _scaled(random_known(v, seed), by)
    for seed, f in enumerate(guess.beta or ()):
        known[f.atom] = _strength(random_known(f.atom, 50 + seed))
    for seed, r in enumerate(guess.decays):
        raw = random_known(r.atom, 80 + seed)
        known[r.atom] = _negative(raw) if _is_log(case, r) else _strength(raw)
    same = case.around.same
    known |= {w: known[v] for w, v in same.of.items() if v in known and w is not v}
    known[case.carry.into] = random_known(case.carry.into, 99)
    around = Points(loop.view, known, wide=True)
    for v, (atom, timed) in loop.inputs.items():
        if timed:
            known.setdefault(v, of_turn(around, atom, turn))
    unrolled(loop.view, known, loop.eqn)
    unrolled(loop.body, known)
    inside = Points(loop.body, known, wide=True)
    for atom, var in loop.stacked:
        if not isinstance(var, DropVar):
            known[var] = in_turn(inside, atom)
    around.known.update(known)
    inside.known.update(known)
    return known


def _scaled(f: Known, by: float) -> Known:
    return lambda index: f(index) * by


def _strength(f: Known) -> Known:
    return lambda index: 1 / (1 + np.exp(-np.asarray(f(index), np.float64)))


def _negative(f: Known) -> Known:
    return lambda index: -np.abs(np.asarray(f(index), np.float64)) / 4


# ---------------------------------------------------------------- as a meaning


def _told(case: Chunked, guess: Guess, scale: float) -> Raised:
    loop, carry = case.loop, case.carry
    labels = case.around.labels
    letters: dict[int, str] = {}
    order = [label for d in case.state for label in d]
    batch = [label for label in order if label not in case.keys | case.values]
    for mine, given in (
        ([x for x in order if x in case.keys], "dKLM"),
        ([x for x in order if x in case.values], "eFGH"),
        (batch[::-1], "nbcABCDEPQRSTUV"),
    ):
        letters.update(zip(mine, given, strict=False))
    sizes = {c: labels.sizes[label] for label, c in letters.items()} | {"t": loop.length * case.chunk}

    def dim(d: Dim) -> str:
        d = labels.resolved(d)
        return "t" if d[:1] == (case.turn,) else "".join(letters[label] for label in d)

    def product(factors: Sequence[Factor | Root]) -> Product:
        def tensor(f: Factor | Root) -> Tensor:
            return Tensor(f.atom, tuple(map(dim, f.index)))

        over = tuple(tensor(f) for f in factors if isinstance(f, Factor) and f.power < 0)
        return Product(tuple(tensor(f) for f in factors if isinstance(f, Root) or f.power > 0), over)

    by_key = any(r.labels & case.keys for r in guess.decays)
    if guess.beta is None:
        kind = "gla" if by_key else "retention" if guess.decays else "linear"
    else:
        kind = "kda" if by_key else "gated_delta" if guess.decays else "delta"
    state = tuple(map(dim, case.state))
    made = case.around.of(carry.initial, case.state, lambda f: True)
    meaning = Recurrence(
        kind=kind,
        q=product([guess.q]),
        k=product([guess.k]),
        v=product(guess.v),
        out=Tensor(case.out, tuple(map(dim, case.index))),
        decay=product(guess.decays) if guess.decays else None,
        decay_is_log=bool(guess.decays) and _is_log(case, guess.decays[0]),
        beta=None if guess.beta is None else product(guess.beta),
        initial=None if len(made) == 1 and made[0].coefficient == 0 else Tensor(carry.initial, state),
        final=None if isinstance(carry.final, DropVar) else Tensor(carry.final, state),
        state=state,
        scale=scale,
        chunk=case.chunk,
        reverse=loop.reverse,
    )
    number = loop.view.makers[case.out]
    return Raised(WHAT, loop.view, number, frozenset(_region(loop.view, case, meaning)), meaning, sizes)


def _region(view: View, case: Chunked, meaning: Recurrence) -> set[int]:
    products = [meaning.q, meaning.k, meaning.v, meaning.decay or Product(), meaning.beta or Product()]
    stop = {t.atom for p in products for t in (*p.times, *p.over)}
    if meaning.initial is not None:
        stop.add(meaning.initial.atom)
    return view.ancestors([case.out, case.carry.final], stop=stop.__contains__)
