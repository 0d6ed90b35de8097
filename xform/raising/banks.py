"""Products with weights that may be a bank: of several experts, of which each token may take one.

    y = dot_general x (squeeze (dynamic_slice w e 0 0))          the bank is w, the tokens x

From a product's operands back through what moves, cuts out or looks up: to the weights on one side, and on
the other, through what dispatches, to the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from xform.raising.flat import View, place_of, size
from xform.raising.following import is_elementary, kind, static
from xform.raising.indices import source
from xform.raising.loops import Loop, counts, loops
from xform.trace import Atom, JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The product, or the loop that has it, is equation `number`. given: its other operand, or the loop's;
    tokens: what that was dispatched from. contracted: how many numbers are summed over; summed: which
    dimensions of the bank. index: by what weights are looked up. path: the equations from bank and tokens on.
    """

    number: int
    bank: Var
    given: Var | None
    tokens: Var | None
    contracted: int
    summed: frozenset[int]
    style: str
    path: frozenset[int]
    index: Var | None = None


@dataclasses.dataclass
class _Walk:
    """Where a value's numbers come from; dims: for each of its dimensions the one there, -1: none."""

    atom: Atom
    dims: list[int]
    numbers: list[int]
    index: Var | None = None
    cut: bool = False


def candidates(view: View, known: frozenset[Var]) -> Iterator[Candidate]:
    """The products of a body, and those in its loops over experts, with what may be a bank."""
    counters = _counters(view)
    for number, eqn in enumerate(view.eqns):
        if eqn.primitive.name == "dot_general":
            for k in (1, 0):
                found = _product(view, number, k, known, counters)
                if found is not None:
                    yield found
                    break
    for loop in loops(view):
        yield from _looped(loop, known)


def _product(
    view: View, number: int, k: int, known: frozenset[Var], counters: frozenset[Var]
) -> Candidate | None:
    eqn = view.eqns[number]
    walk = walked(view, eqn.invars[k])
    if not _is_bank(view, walk.atom, known) or walk.index in counters:
        return None
    assert isinstance(walk.atom, Var)
    other = eqn.invars[1 - k]
    tokens, path = dispatched(view, other, known)
    (contracted, batch) = eqn.params["dimension_numbers"]
    summed = frozenset(walk.dims[d] for d in contracted[k])
    shared = [d for d in batch[k]]
    if walk.index is not None:
        style = "gathered"
    elif walk.cut:
        style = "loop"
    elif shared:
        style = _dispatch(view, path)
    else:
        style = "sorted" if len(contracted[k]) > 1 else "all"
    return Candidate(
        number, walk.atom, other if isinstance(other, Var) else None, tokens,
        size(eqn.invars[k])[contracted[k][-1]] if contracted[k] else 1,
        summed, style, frozenset([number, *walk.numbers, *path]), walk.index,
    )  # fmt: skip


def _dispatch(view: View, path: list[int]) -> str:
    """How tokens came to their experts."""
    names = {view.eqns[n].primitive.name for n in path}
    if "dot_general" in names:
        return "one_hot"
    if any(name.startswith("scatter") for name in names) or "gather" in names:
        return "sorted"
    return "all"


def _looped(loop: Loop, known: frozenset[Var]) -> Iterator[Candidate]:
    """The products of a loop over experts: a turn takes the weights of one."""
    view, body = loop.view, loop.body
    counters = {c.into for c in loop.carries if counts(body, c)}
    counters |= {v for v, (atom, each) in loop.inputs.items() if each and kind(atom) in ("i", "u")}
    inner = static(body)
    for eqn in body.eqns:
        if eqn.primitive.name != "dot_general":
            continue
        for k in (1, 0):
            walk = walked(body, eqn.invars[k])
            given = loop.inputs.get(walk.atom) if isinstance(walk.atom, Var) else None
            if given is None or not (given[1] or walk.index in counters):
                continue
            outer = walked(view, given[0])
            if not _is_bank(view, outer.atom, known):
                continue
            assert isinstance(outer.atom, Var)
            tokens, _ = dispatched(body, eqn.invars[1 - k], inner)
            around = loop.inputs.get(tokens) if tokens is not None else None
            end, path = dispatched(view, around[0], known) if around is not None else (None, [])
            contracted = eqn.params["dimension_numbers"][0][k]
            shift = 1 if given[1] else 0
            summed = [walk.dims[d] + shift for d in contracted if walk.dims[d] >= 0]
            yield Candidate(
                loop.number, outer.atom, around[0] if around and isinstance(around[0], Var) else None, end,
                size(eqn.invars[k])[contracted[-1]] if contracted else 1,
                frozenset(outer.dims[d] for d in summed), "loop",
                frozenset([loop.number, *outer.numbers, *path]),
            )  # fmt: skip
            break


def _is_bank(view: View, atom: Atom, known: frozenset[Var]) -> bool:
    """Whether a value is of weights, in three dimensions or more: given, or computed elementwise from what
    is given.
    """
    if isinstance(atom, Literal) or atom in known or kind(atom) != "f":
        return False
    if sum(n > 1 for n in size(atom)) < 3:
        return False
    numbers = view.ancestors([atom])
    return len(numbers) <= 10 and all(is_elementary(view.eqns[n]) for n in numbers)


def walked(view: View, atom: Atom) -> _Walk:
    """Back from a value through what moves, cuts out and looks up."""
    walk = _Walk(atom, list(range(len(size(atom)))), [])
    while (eqn := view.maker(walk.atom)) is not None:
        step = _step(eqn, place_of(eqn, walk.atom))
        if step is None:
            return walk
        atom, dims = step
        name = eqn.primitive.name
        if name in ("gather", "dynamic_slice"):
            index = next((_root(view, v) for v in eqn.invars[1:] if not isinstance(v, Literal)), None)
            walk.index = walk.index or index
        if name in ("slice", "split", "unstack"):
            walk.cut = True
        walk.numbers.append(view.makers[walk.atom])  # type: ignore[index]
        walk.dims = [dims[d] if d >= 0 else -1 for d in walk.dims]
        walk.atom = atom
    return walk


def _root(view: View, v: Var) -> Var:
    """The integers that an index was wrapped, cast and moved from."""
    while (eqn := view.maker(v)) is not None:
        name = eqn.primitive.name
        if name == "select_n":
            v = next(w for w in eqn.invars[1:] if isinstance(w, Var))
        elif (is_elementary(eqn) or name == "concatenate") and any(isinstance(w, Var) for w in eqn.invars):
            v = next(w for w in eqn.invars if isinstance(w, Var))
        else:
            break
    return v


def _step(eqn: JaxprEqn, k: int) -> tuple[Atom, list[int]] | None:
    """The operand that a result's numbers are in, and which of its dimensions each one is."""
    shape = size(eqn.outvars[k])
    name = eqn.primitive.name
    if name == "gather":
        numbers = eqn.params["dimension_numbers"]
        alone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [d for d in range(len(size(eqn.invars[0]))) if d not in alone]
        dims = [-1] * len(shape)
        for d, place in zip(kept, numbers.offset_dims, strict=True):
            dims[place] = d
        return eqn.invars[0], dims
    if name == "dynamic_slice":
        return eqn.invars[0], list(range(len(shape)))
    zero = tuple(np.zeros((), np.int64) for _ in shape)
    start = source(eqn, k, zero)
    if start is None:
        return None
    dims = []
    for d, n in enumerate(shape):
        there: Any = source(eqn, k, (*zero[:d], np.ones((), np.int64), *zero[d + 1 :])) if n > 1 else start
        moved = [j for j, (a, b) in enumerate(zip(start[1], there[1], strict=True)) if int(a) != int(b)]
        dims.append(moved[0] if len(moved) == 1 else -1)
    return eqn.invars[start[0]], dims


def dispatched(view: View, atom: Atom, known: frozenset[Var]) -> tuple[Var | None, list[int]]:
    """The tokens from which a product's operand was dispatched, and the equations on the way."""
    numbers: list[int] = []
    while (eqn := view.maker(atom)) is not None:
        name = eqn.primitive.name
        step = _step(eqn, place_of(eqn, atom))
        following: Atom | None = step[0] if step is not None else None
        if name.startswith("scatter"):
            following = eqn.invars[2]
        elif name in ("dot_general", "mul"):
            a, b = eqn.invars[:2]
            if _routes(view, a, known) != _routes(view, b, known):
                following = b if _routes(view, a, known) else a
            elif not (isinstance(a, Literal) or isinstance(b, Literal)) and _routes(view, a, known):
                following = a if view.makers.get(a, -1) < view.makers.get(b, -1) else b
        elif name == "select_n":
            cases = [v for v in eqn.invars[1:] if isinstance(v, Var) and v not in known]
            following = cases[0] if len(cases) == 1 else None
        elif name in ("pad", "concatenate"):
            parts = [v for v in eqn.invars if isinstance(v, Var) and v not in known]
            following = parts[0] if len(parts) == 1 else None
        if following is None or kind(following) != "f":
            break
        numbers.append(view.makers[atom])  # type: ignore[index]
        atom = following
    return (atom if isinstance(atom, Var) else None), numbers


def _routes(view: View, atom: Atom, known: frozenset[Var]) -> bool:
    """Whether a value follows from integers or booleans that are computed or given, not by a product."""
    todo: list[Atom] = [atom]
    seen: set[Any] = set()
    while todo and len(seen) < 60:
        v = todo.pop()
        if isinstance(v, Literal) or v in seen or v in known:
            continue
        seen.add(v)
        if kind(v) in ("i", "u", "b"):
            return True
        eqn = view.maker(v)
        if eqn is None:
            continue
        if eqn.primitive.name in ("top_k", "sort", "argmax"):
            return True
        todo += eqn.invars[:1] if eqn.primitive.name == "gather" else eqn.invars
    return False


def _counters(view: View) -> frozenset[Var]:
    """Of a loop's body, the inputs that say by themselves which turn it is."""
    if view.outer is None:
        return frozenset()
    found: set[Var] = set()
    for loop in loops(view.outer):
        if loop.body.jaxpr.invars != view.jaxpr.invars:
            continue
        found |= {c.into for c in loop.carries if counts(loop.body, c)}
        outside = static(view.outer)
        found |= {v for v, (atom, each) in loop.inputs.items() if each and atom in outside}
    return frozenset(found)
