"""A recurrence that may be written in chunks, held to its steps at points.

A chunk is evaluated from a made-up state, and has to be what the recurrence makes of it, step by step; so are
others, the first and the last among them, since a chunk may be told from others by its number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xform.raising.following import static
from xform.raising.indices import Array
from xform.raising.loops import Carry, Loop
from xform.raising.points import Known, Points, Unknown, in_turn, of_turn, random_known
from xform.raising.roots import Root
from xform.raising.terms import Factor, Index, Terms
from xform.raising.unrolled import unrolled
from xform.trace import DropVar, Var

TURNS, TOLERANCE = 8, 1e-6
"""How many chunks are evaluated, at most, and how far they may be from their steps."""


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


def agrees(case: Chunked, guess: Guess) -> tuple[float, str]:
    """The scale of queries, and why chunks are not the steps of a recurrence; "" where they are."""
    if not _alike(case.loop):
        return 1.0, "its chunks are told apart by their number"
    last = case.loop.length - 1
    some = np.random.default_rng(0).permutation(np.arange(1, max(last, 1)))[: TURNS - 2]
    scale: float | None = None
    for turn in dict.fromkeys((0, last, *map(int, some))):
        own, why = _chunk(case, guess, turn, scale)
        if why:
            return 1.0, why
        scale = own if scale is None else scale
    assert scale is not None
    return (1.0 if abs(scale - 1) < TOLERANCE else scale), ""


def _alike(loop: Loop) -> bool:
    """Whether what turns get that is in the program itself is the same in each."""
    fixed = static(loop.view)
    for v, (atom, timed) in loop.inputs.items():
        if timed and atom in fixed and v in loop.body.users:
            try:
                rows = Points(loop.view).all(atom)
            except Unknown:
                return False
            if not np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape)):
                return False
    return True


def _chunk(case: Chunked, guess: Guess, turn: int, scale: float | None) -> tuple[float, str]:
    """The scale of queries in a chunk, and why it is not the steps of a recurrence (with this scale)."""
    sizes = case.around.labels.sizes
    loop, view = case.loop, case.loop.view
    known = _known(case, guess, turn)
    around = Points(view, known, wide=True)
    rng = np.random.default_rng(turn)
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
    wanted: dict[int, Array] = {}
    try:
        for step in reversed(range(case.chunk)) if loop.reverse else range(case.chunk):
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
            wanted[step] = np.sum(q * state, axis=0)
        inside = Points(loop.body, known, wide=True)
        got = inside.at(case.carry.out, at(case.state, rows | columns))
        steps = np.arange(case.chunk)[:, None]
        read = around.at(case.out, at(case.index, columns | {case.place: steps}))
    except Unknown as why:
        return 1.0, f"a chunk of it cannot be evaluated: {why}"
    want = np.stack([wanted[step] for step in range(case.chunk)])
    if not _close(got, state):
        return 1.0, "the state after a chunk is not what a gated linear recurrence makes of its steps"
    own = float(np.sum(read * want) / np.sum(want * want))
    if abs(own) < TOLERANCE or not _close(read, want * (own if scale is None else scale)):
        return 1.0, "what is read of a chunk is not what a gated linear recurrence reads in its steps"
    return own, ""


def _close(a: Any, b: Any) -> bool:
    return bool(np.all(np.abs(a - b) <= TOLERANCE * (np.max(np.abs(b)) + 1)))


def is_log(case: Chunked, decay: Root) -> bool:
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
    return np.exp(value) if is_log(case, decay) else value


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
        known[r.atom] = _negative(raw) if is_log(case, r) else _strength(raw)
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
            known[var] = _in_one(in_turn(inside, atom), turn)
    around.known.update(known)
    inside.known.update(known)
    return known


def _in_one(f: Known, turn: int) -> Known:
    def values(index: Any) -> Array:
        if not np.all(np.asarray(index[0]) == turn):
            raise Unknown("what other chunks give")
        return np.asarray(f(index))

    return values


def _scaled(f: Known, by: float) -> Known:
    return lambda index: f(index) * by


def _strength(f: Known) -> Known:
    return lambda index: 1 / (1 + np.exp(-np.asarray(f(index), np.float64)))


def _negative(f: Known) -> Known:
    return lambda index: -np.abs(np.asarray(f(index), np.float64)) / 4
