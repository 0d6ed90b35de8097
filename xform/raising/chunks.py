"""Finds gated linear recurrences that are written in chunks: inside of one by products, from one to the next
by a loop that carries the state (Yang et al. 2024; Dao and Gu 2024).

    q, k, v, g cut into [chunks, c];  U = (I + A)^-1 ...;  S = scan(...)    ->    gated_delta q k v g beta

How a chunk is computed differs from one to the other; what it computes does not. So what goes in is found by
where values still have time in one piece (`roots`); and which is query, key, value, decay and beta by their
dimensions, by what they reach, and by an exponential on the way. Then one chunk is evaluated from a made-up
state, and has to be what the recurrence makes of it, step by step (`chunk_points`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from xform.raising.chunk_points import Chunked, Guess, agrees, is_log
from xform.raising.flat import View
from xform.raising.indices import groups
from xform.raising.loops import Carry, Loop
from xform.raising.meaning import Near, Product, Raised, Recurrence, Tensor
from xform.raising.roots import Root, Roots
from xform.raising.terms import Dim, Factor, Term, Terms
from xform.trace import DropVar, Var, shape_of

WHAT = "linear_recurrence"


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
        reasons = []
        for guess in _guesses(case, read, kept):
            scale, why = agrees(case, guess)
            if not why:
                yield _told(case, guess, scale)
                return
            reasons.append(why)
        if reasons:
            yield Near(WHAT, reasons[0], loop.view, loop.number)
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
        decay_is_log=bool(guess.decays) and is_log(case, guess.decays[0]),
        beta=None if guess.beta is None else product(guess.beta),
        initial=None if len(made) == 1 and made[0].coefficient == 0 else Tensor(carry.initial, state),
        final=Tensor(carry.final, state) if carry.final in loop.view.users else None,
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
