"""A step of a recurrence: its parts, held to the formula at points, and told as a meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xform.raising.flat import View
from xform.raising.loops import Carry, Loop
from xform.raising.meaning import Product, Raised, Recurrence, Tensor
from xform.raising.points import Points, Unknown, of_turn, random_inputs
from xform.raising.readout import Readout
from xform.raising.terms import Factor, Index, Term, Terms
from xform.trace import Atom, DropVar, Literal, Var, shape_of

POINTS, TOLERANCE = 16, 1e-6
"""At how many points a step is evaluated in float64, and how far it may be from the formula: what float32
constants in it make.
"""


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a step's products are; keys, values: labels of the state's dimensions."""

    keys: frozenset[int]
    values: frozenset[int]
    decay: Term
    k: Term
    v: Term
    beta: Term | None

    def named(self) -> Iterator[tuple[str, Sequence[Factor]]]:
        yield "decays", self.decay.factors
        yield "keys", self.k.factors
        yield "values", self.v.factors
        if self.beta is not None:
            yield "betas", self.beta.factors


class _At:
    """Values of products where labels stand for integer arrays that broadcast."""

    def __init__(self, points: Points, loop: Loop, sizes: Sequence[int], env: dict[int, Any]) -> None:
        self.points, self.loop, self.sizes, self.env = points, loop, sizes, env

    def index(self, index: Index) -> tuple[Any, ...]:
        found = []
        for dim in index:
            at: Any = np.zeros((), np.int64)
            for label in dim:
                at = at * self.sizes[label] + self.env[label]
            found.append(at)
        return tuple(found)

    def __call__(self, term: Term) -> Any:
        made: Any = term.coefficient
        for f in term.factors:
            points = (
                self.points
                if _inside(self.loop.body, f.atom)
                else Points(self.loop.view, self.points.known, True)
            )
            made = made * np.asarray(points.at(f.atom, self.index(f.index)), np.float64) ** f.power
        return made


def _inside(body: View, atom: Var) -> bool:
    return atom in body.makers or atom in body.jaxpr.all_invars


def agrees(loop: Loop, carry: Carry, terms: Terms, index: Index, parts: Parts, out: Readout) -> str:
    """Why a step does not compute what its parts say, at points with made-up operands; "" where it does."""
    sizes, (time,) = terms.labels.sizes, (terms.outer.time,) if terms.outer else ((),)
    turn = loop.length // 2
    known = _known(loop, carry, terms, parts, out, turn)
    points = Points(loop.body, known, wide=True)
    rng = np.random.default_rng(0)
    labels = sorted({label for dim in index for label in dim})
    env: dict[int, Any] = {label: rng.integers(0, sizes[label], POINTS) for label in labels}
    env |= dict.fromkeys(time, np.asarray(turn))
    at = _At(points, loop, sizes, env)
    state = Term(1.0, (Factor(carry.into, index),))
    keys = sorted(parts.keys)
    summed = np.ix_(np.zeros(1, int), *(np.arange(sizes[label]) for label in keys))[1:]
    wide = {
        label: np.asarray(a).reshape(-1, *[1] * len(keys)) if np.ndim(a) else a for label, a in env.items()
    }
    over = _At(points, loop, sizes, wide | dict(zip(keys, summed, strict=True)))
    axes = tuple(range(1, 1 + len(keys)))
    try:
        wanted = at(parts.decay) * at(state)
        if parts.beta is None:
            wanted = wanted + at(parts.k) * at(parts.v)
        else:
            asked = np.sum(over(parts.k) * over(parts.decay) * over(state), axis=axes)
            wanted = wanted + at(parts.beta) * at(parts.k) * (at(parts.v) - asked)
        got = points.at(carry.out, at.index(index))
        reading = Points(loop.body, {**known, **_states(out)}, wide=True)
        read = _At(reading, loop, sizes, over.env)
        query = Term(out.scale, out.query)
        want = np.sum(
            np.broadcast_arrays(read(query) * read(Term(1.0, (Factor(out.root, out.state),))))[0], axis=axes
        )
        have = reading.at(out.out, at.index(out.index))
    except Unknown as why:
        return f"what it computes cannot be checked: {why}"
    for name, a, b in (("state", got, wanted), ("result", have, want)):
        if not np.all(np.abs(a - b) <= TOLERANCE * (1 + np.abs(b))):
            return f"its {name} is not what a gated linear recurrence computes"
    return ""


def _states(out: Readout) -> dict[Var, Any]:
    return random_inputs([out.root], 7)


def _known(loop: Loop, carry: Carry, terms: Terms, parts: Parts, out: Readout, turn: int) -> dict[Var, Any]:
    """Made-up values of all that the products are made of, where it is made; slices of a turn follow."""
    products = [f for _, factors in parts.named() for f in factors] + list(out.query)
    fine = [g for f in products for g in _opened(terms, f)]
    leaves = dict.fromkeys(f.atom for f in fine if f.atom not in loop.view.constants)
    known = random_inputs([*leaves, carry.into])
    same = terms.same
    known.update({w: known[v] for w, v in same.of.items() if v in known and w is not v})
    if terms.outer is not None:
        same = terms.outer.terms.same
        known.update({w: known[v] for w, v in same.of.items() if v in known and w is not v})
    around = Points(loop.view, known, wide=True)
    for v, (atom, timed) in loop.inputs.items():
        if timed and v not in known:
            known[v] = of_turn(around, atom, turn)
    for c in loop.carries:
        if c.into not in known:
            known |= random_inputs([c.into], 3)
    return known


def _opened(terms: Terms, f: Factor) -> Sequence[Factor]:
    inside = _inside(terms.view, f.atom)
    if not inside and terms.outer is not None:
        terms = terms.outer.terms
    (term,) = terms.of(f.atom, f.index, lambda g: False)
    return term.factors


# ---------------------------------------------------------------- as a meaning


def told(loop: Loop, carry: Carry, terms: Terms, index: Index, parts: Parts, out: Readout) -> Raised:
    """The recurrence as a meaning."""
    name = _Letters(loop, terms, index, parts)
    decay, is_log = _logarithm(loop, terms, parts.decay)
    has_decay = bool(parts.decay.factors) or parts.decay.coefficient != 1.0
    by_key = any(f.labels & parts.keys for f in parts.decay.factors)
    if parts.beta is None:
        kind = "gla" if by_key else "retention" if has_decay else "linear"
    else:
        kind = "kda" if by_key else "gated_delta" if has_decay else "delta"
    whole, read = _results(loop, terms, out, name)
    zero = _is_zero(terms, carry.initial, index)
    state = name.dims(index)
    meaning = Recurrence(
        kind=kind,
        q=name.product(Term(1.0, out.query)),
        k=name.product(parts.k),
        v=name.product(parts.v),
        out=whole,
        decay=name.product(decay) if has_decay else None,
        decay_is_log=is_log,
        beta=None if parts.beta is None else name.product(parts.beta),
        initial=None if zero else Tensor(carry.initial, state),
        final=Tensor(carry.final, state) if carry.final in loop.view.users else None,
        state=state,
        scale=out.scale,
        reverse=loop.reverse,
        read=read,
        step=loop.body if name.steps or read is not None else None,
    )
    return Raised(
        "linear_recurrence",
        loop.view,
        loop.number,
        frozenset((loop.number,)),
        meaning,
        name.sizes,
        _note(loop, carry, terms),
    )


def _note(loop: Loop, carry: Carry, terms: Terms) -> str:
    others = [c for c in loop.carries if c is not carry and shape_of(c.into) and c.into in terms.view.users]
    return "the loop carries more than the state" if others and loop.eqn.primitive.name == "scan" else ""


class _Letters:
    """The letters of labels."""

    def __init__(self, loop: Loop, terms: Terms, index: Index, parts: Parts) -> None:
        self.loop = loop
        self.steps = False
        time = terms.outer.time if terms.outer is not None else ()
        order = [label for dim in index for label in dim]
        batch = [label for label in order if label not in parts.keys | parts.values]
        self.letters: dict[int, str] = dict.fromkeys(time, "t")
        for mine, letters in (
            ([x for x in order if x in parts.keys], "dKLM"),
            ([x for x in order if x in parts.values], "eFGH"),
            (batch[::-1], "nbcABCDEPQRSTUV"),
        ):
            self.letters.update(zip(mine, letters, strict=False))
        self.sizes = {c: terms.labels.sizes[label] for label, c in self.letters.items()}
        self.sizes.setdefault("t", loop.length)

    def dims(self, index: Index) -> tuple[str, ...]:
        return tuple("".join(self.letters[label] for label in dim) for dim in index)

    def tensor(self, atom: Atom, index: Index) -> Tensor:
        given = self.loop.inputs.get(atom) if isinstance(atom, Var) else None
        if given is not None:
            front = ("t" if self.loop.length > 1 else "",) if given[1] else ()
            return Tensor(given[0], (*front, *self.dims(index)))
        self.steps |= isinstance(atom, Var) and atom in self.loop.body.makers
        return Tensor(atom, self.dims(index))

    def product(self, term: Term) -> Product:
        times = tuple(self.tensor(f.atom, f.index) for f in term.factors if f.power > 0)
        over = tuple(self.tensor(f.atom, f.index) for f in term.factors if f.power < 0)
        return Product(times, over, term.coefficient)


def _logarithm(loop: Loop, terms: Terms, decay: Term) -> tuple[Term, bool]:
    """A decay that is the exponential of something: that."""
    if len(decay.factors) != 1 or decay.coefficient != 1.0 or decay.factors[0].power != 1:
        return decay, False
    atom: Atom = decay.factors[0].atom
    index = decay.factors[0].index
    around = terms.outer.terms if terms.outer is not None else None
    here: Terms | None = terms if _inside(loop.body, decay.factors[0].atom) else around
    while here is not None and isinstance(atom, Var):
        if here is terms and atom in loop.inputs and terms.outer is not None:
            atom, timed = loop.inputs[atom]
            index, here = ((terms.outer.time, *index) if timed else index), terms.outer.terms
            continue
        moved = here.moved(atom, index)
        if moved is None:
            eqn = here.view.maker(atom)
            if eqn is not None and eqn.primitive.name == "exp" and isinstance(eqn.invars[0], Var):
                return Term(1.0, (Factor(eqn.invars[0], index),)), True
            break
        atom, index = moved
    return decay, False


def _is_zero(terms: Terms, initial: Atom, index: Index) -> bool:
    if isinstance(initial, Literal):
        return bool(np.all(np.asarray(initial.val) == 0))
    if terms.outer is None:
        return False
    made = terms.outer.terms.of(initial, index, lambda f: True)
    return len(made) == 1 and made[0].coefficient == 0


def _results(loop: Loop, terms: Terms, out: Readout, name: _Letters) -> tuple[Tensor, Tensor | None]:
    """All steps of what is read, where the loop gives them as they are; else what it gives of them, and what
    is read in a step.
    """
    front = "t" if loop.length > 1 else ""
    for atom, var in loop.stacked:
        dims = _moved_from(terms, atom, out, name)
        if dims is not None and not isinstance(var, DropVar):
            return Tensor(var, (front, *dims)), None
    for carry in loop.carries:
        eqn = loop.body.maker(carry.out)
        if eqn is None or eqn.invars[0] is not carry.into:
            continue
        at = {"dynamic_update_slice": 1, "scatter": 2}.get(eqn.primitive.name)
        dims = None if at is None else _moved_from(terms, eqn.invars[at], out, name)
        sizes = shape_of(carry.into)
        if dims is not None and at is not None and loop.length in sizes:
            time = _written_along(eqn, loop.length)
            own = [c for d, c in enumerate(dims) if at == 2 or d != time]
            return Tensor(carry.final, (*own[:time], front, *own[time:])), None
    inner = Tensor(out.out, name.dims(out.index))
    after = _depend(loop.body, out.out)
    stacked = [var for atom, var in loop.stacked if isinstance(atom, Var) and atom in after]
    finals = [c.final for c in loop.carries if isinstance(c.out, Var) and c.out in after]
    whole = [v for v in (*stacked, *finals) if not isinstance(v, DropVar)] or [loop.eqn.outvars[0]]
    return Tensor(whole[0], ()), inner


def _written_along(eqn: Any, length: int) -> int:
    """The dimension of a buffer along which a turn writes one entry."""
    sizes = shape_of(eqn.invars[0])
    if eqn.primitive.name == "scatter":
        dims: Sequence[int] = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    else:
        dims = [d for d, (n, m) in enumerate(zip(sizes, shape_of(eqn.invars[1]), strict=True)) if n != m]
    return next((d for d in dims if sizes[d] == length), 0)


def _moved_from(terms: Terms, atom: Atom, out: Readout, name: _Letters) -> tuple[str, ...] | None:
    """The letters of a value that is what was read, moved or cast; None where it is something else."""
    index = terms.labels.whole(shape_of(atom))
    at = index
    while isinstance(atom, Var) and atom is not out.out:
        moved = terms.moved(atom, at)
        if moved is None:
            return None
        atom, at = moved
    if atom is not out.out:
        return None
    resolve = terms.labels.resolved
    back: Mapping[int, int] = {}
    theirs = [label for dim in at for label in resolve(dim)]
    mine = [label for dim in out.index for label in resolve(dim)]
    if len(theirs) != len(mine):
        return None
    back = dict(zip(theirs, mine, strict=True))
    if any(label not in back for dim in index for label in resolve(dim)):
        return None
    return name.dims(tuple(tuple(back[label] for label in resolve(dim)) for dim in index))


def _depend(view: View, var: Var) -> set[Var]:
    found = {var}
    for eqn in view.eqns:
        if any(isinstance(v, Var) and v in found for v in eqn.invars):
            found.update(v for v in eqn.outvars if not isinstance(v, DropVar))
    return found
