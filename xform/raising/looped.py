"""Products of a loop over experts, unrolled or not: an expert's weights a turn, and what tells its tokens.

for e: y += where(chosen == e, x @ w[e], 0)        scan over w: carry + gates[:, e] * (x @ w_e)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from xform.axes import Factor, Scope, find_axes
from xform.higher_order import SCATTERS
from xform.raising.choosing import MOVED, Routed, is_float, routed
from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View
from xform.raising.indices import SAME
from xform.raising.loops import Loop, counts, loops
from xform.raising.points import Points, Unknown
from xform.raising.terms import Same
from xform.trace import Atom, DropVar, JaxprEqn, Literal, Var, shape_of

MEETINGS = frozenset(("mul", "select_n", "dot_general", "div"))
SUMS = frozenset(("add", "add_any", "sub", "max", "min"))


@dataclasses.dataclass(frozen=True)
class Turned:
    """A product of tokens x with one expert's share of w, along dimension `dim`; -1: an array for each.
    summed: the dimensions of w that it sums over.
    """

    number: int
    x: Atom
    w: Var
    dim: int
    experts: int
    keys: frozenset[object]
    summed: frozenset[int] = frozenset()


Meeting = tuple[Var, tuple[int, ...]]
"""A routed value that decides over something, and which of several that it decides over this is: the place
among the cases of a selection, or in what was put together.
"""


@dataclasses.dataclass(frozen=True)
class _One:
    """A product in an unrolled loop. position: of the expert in w. by: what decides over it."""

    number: int
    x: Atom
    w: Var
    dim: int
    position: object
    by: frozenset[object]
    sources: frozenset[Var]
    summed: frozenset[int]


def turned(view: View, scope: Scope, routes: Mapping[Var, Routed], pure: Collection[Var]) -> Iterator[Turned]:
    """The products of loops over experts in a view. routes, pure: what is routed, and weights, in it."""
    yield from _unrolled(view, routes, pure)
    for loop in loops(view):
        yield from _in_loop(loop, routes)


# ---------------------------------------------------------------- unrolled


def _unrolled(view: View, routes: Mapping[Var, Routed], pure: Collection[Var]) -> Iterator[Turned]:
    found: list[_One] = []
    if not routes:
        return
    same = Same(view)
    for number, eqn in enumerate(view.eqns):
        if eqn.primitive.name != "dot_general" or not is_float(eqn.outvars[0]):
            continue
        for side in (1, 0):
            w, x = eqn.invars[side], eqn.invars[1 - side]
            if not isinstance(w, Var) or w not in pure or len([n for n in shape_of(w) if n > 1]) < 2:
                continue
            cut = _cut(view, w)
            if cut is None:
                continue
            by = _meetings(view, routes, pure, number, x)
            if by:
                base, dim, position = cut
                sources = frozenset[Var]().union(*(routes[v].sources for v, _ in by))
                own = frozenset((same(v), place) for v, place in by)
                summed = frozenset(d + (0 <= dim <= d) for d in eqn.params["dimension_numbers"][0][side])
                found.append(_One(number, x, base, dim, position, own, sources, summed))
                break
    for group in _by_sources(found):
        yield from _all_experts(view, group)


def _by_sources(found: list[_One]) -> list[list[_One]]:
    groups: list[tuple[set[Var], list[_One]]] = []
    for one in found:
        same = [g for g in groups if g[0] & one.sources]
        sources = set(one.sources).union(*(g[0] for g in same))
        members = [m for g in same for m in g[1]] + [one]
        groups = [g for g in groups if g not in same] + [(sources, members)]
    return [members for _, members in groups]


def _all_experts(view: View, group: list[_One]) -> Iterator[Turned]:
    """The products of a group, where all experts have theirs, and what each is met by is its own."""
    cut = [one for one in group if one.dim >= 0]
    alone = [one for one in group if one.dim < 0]
    bases: dict[tuple[Var, int], list[_One]] = {}
    for one in cut:
        bases.setdefault((one.w, one.dim), []).append(one)
    for (w, dim), ones in bases.items():
        n = shape_of(w)[dim]
        if n > 1 and {one.position for one in ones} == set(range(n)) and _each_its_own(ones):
            for one in ones:
                yield Turned(one.number, one.x, w, dim, n, frozenset(one.sources), one.summed)
    shapes: dict[tuple[tuple[int, ...], int], list[_One]] = {}
    for one in alone:
        shapes.setdefault((shape_of(one.w), 0), []).append(one)
    n = len({one.by for one in alone})
    if n > 1 and all(len(ones) % n == 0 for ones in shapes.values()):
        for one in alone:
            yield Turned(one.number, one.x, one.w, -1, n, frozenset(one.sources), one.summed)


def _each_its_own(ones: list[_One]) -> bool:
    """Whether what decides over one expert's product is not what decides over another's."""
    by: dict[object, frozenset[object]] = {}
    for one in ones:
        by[one.position] = by.get(one.position, frozenset()) | one.by
    sets = list(by.values())
    return all(sets[i] - sets[j] for i in range(len(sets)) for j in range(len(sets)) if i != j)


def _cut(view: View, w: Atom) -> tuple[Var, int, object] | None:
    """The array that a weight is one entry of, along which dimension, and which; an input alone: -1."""
    atom = w
    while isinstance(atom, Var) and (eqn := view.maker(atom)) is not None:
        name = eqn.primitive.name
        if name in MOVED or name in SAME:
            atom = eqn.invars[0]
            continue
        base = eqn.invars[0]
        if not isinstance(base, Var) or len([n for n in shape_of(base) if n > 1]) < 3:
            return None
        found = _entry(view, eqn, eqn.outvars.index(atom))
        if found is None:
            return None
        while (maker := view.maker(base)) is not None and maker.primitive.name in SAME:
            base = maker.invars[0]
        return (base, *found) if isinstance(base, Var) else None
    return (atom, -1, atom) if isinstance(atom, Var) and len(shape_of(w)) == 2 else None


def _entry(view: View, eqn: JaxprEqn, k: int) -> tuple[int, object] | None:
    sizes, p = shape_of(eqn.invars[0]), eqn.params
    match eqn.primitive.name:
        case "unstack":
            return p["axis"], k
        case "split" if set(p["sizes"]) == {1}:
            return p["axis"], k
        case "slice":
            taken = [d for d, n in enumerate(shape_of(eqn.outvars[0])) if n != sizes[d]]
            if len(taken) == 1 and shape_of(eqn.outvars[0])[taken[0]] == 1:
                return taken[0], p["start_indices"][taken[0]]
        case "dynamic_slice":
            taken = [d for d, n in enumerate(p["slice_sizes"]) if n != sizes[d]]
            if len(taken) == 1 and p["slice_sizes"][taken[0]] == 1:
                try:
                    return taken[0], int(Points(view).at(eqn.invars[1 + taken[0]], ()))
                except Unknown:
                    return None
    return None


def _meetings(
    view: View, routes: Mapping[Var, Routed], pure: Collection[Var], number: int, x: Atom
) -> set[Meeting]:
    """What is routed, for several tokens, and meets what becomes of a product, or what went into it."""
    found: set[Meeting] = set()
    atom = x
    for _ in range(12):
        maker = view.maker(atom)
        if maker is None or atom in routes:
            break
        name = maker.primitive.name
        mine = [v for v in maker.invars if isinstance(v, Var) and v in routes and shape_of(v)]
        if mine and (name in MEETINGS or name in ("gather", "dynamic_slice")):
            found.update((v, ()) for v in mine)
            break
        if not (name in MOVED or name in SAME):
            break
        atom = maker.invars[0]
    todo: list[Meeting] = [(v, ()) for v in view.eqns[number].outvars if isinstance(v, Var)]
    seen: set[int] = set()
    while todo and len(seen) < 200:
        v, place = todo.pop()
        for user in view.users.get(v, ()):
            if user < 0 or user in seen:
                continue
            seen.add(user)
            eqn = view.eqns[user]
            name = eqn.primitive.name
            mine = [
                w for w in eqn.invars if isinstance(w, Var) and w in routes and w is not v and shape_of(w)
            ]
            if mine and (name in MEETINGS or name in SCATTERS or (name == "gather" and place)):
                case = (eqn.invars.index(v),) if name == "select_n" else ()
                found.update((w, place + case) for w in mine)
            elif name in ("concatenate", "stack"):
                todo.append((eqn.outvars[0], (*place, eqn.invars.index(v))))
            elif _goes_through(eqn, v, pure):
                todo += [(w, place) for w in eqn.outvars if not isinstance(w, DropVar)]
    return found


def _goes_through(eqn: JaxprEqn, v: Var, pure: Collection[Var]) -> bool:
    """Whether the result of an equation is still that expert's alone."""
    name = eqn.primitive.name
    others = [w for w in eqn.invars if w is not v and not isinstance(w, Literal)]
    if name in SUMS:
        return not others or (name != "max" and all(w in pure for w in others))
    if name in ("mul", "div", "select_n", "dot_general") or name in MOVED or name in SAME:
        return True
    return is_elementwise(eqn) and not others


# ---------------------------------------------------------------- in a loop


def _in_loop(loop: Loop, routes: Mapping[Var, Routed]) -> Iterator[Turned]:
    body = loop.body
    counters = {c.into for c in loop.carries if counts(body, c)}
    carried = {c.into for c in loop.carries} - counters
    timed = {v for v, (_, sliced) in loop.inputs.items() if sliced}
    seeds = {
        v: Routed(frozenset(), routes[atom].sources, routes[atom].given)
        for v, (atom, _) in loop.inputs.items()
        if isinstance(atom, Var) and atom in routes
    }
    given = {
        v: Routed(sources=frozenset(), given=True)
        for v in body.jaxpr.invars
        if v not in seeds and not is_float(v)
    }
    scope = find_axes(body.jaxpr).root
    inside = {
        v: r for v, r in routed(body, scope, _features(body, scope), seeds | given).items() if r.sources
    }
    for number, eqn in enumerate(body.eqns):
        if eqn.primitive.name != "dot_general" or not is_float(eqn.outvars[0]):
            continue
        for side in (1, 0):
            w, x = eqn.invars[side], eqn.invars[1 - side]
            base = _turns(loop, w, counters)
            if base is None or _depends(body, x, carried):
                continue
            outer, dim = base
            summed = frozenset(d + (dim <= d) for d in eqn.params["dimension_numbers"][0][side])
            if shape_of(outer)[dim] != loop.length or loop.length < 2:
                continue
            by = _meetings(body, inside, (), number, x)
            own = [v for v, _ in by if _depends(body, v, counters | timed)]
            sources = frozenset[Var]().union(*(inside[v].sources for v in own))
            sources |= _sent(loop, x, routes, counters) | _kept(loop, routes)
            if sources:
                given_x = loop.inputs.get(x, (x, False))[0] if isinstance(x, Var) else x
                yield Turned(loop.number, given_x, outer, dim, loop.length, frozenset(sources), summed)
                break


def _features(body: View, scope: Scope) -> set[Factor]:
    found: set[Factor] = set()
    for eqn in body.eqns:
        if eqn.primitive.name == "dot_general" and len(eqn.params["dimension_numbers"][0][0]) == 1:
            (left, _), _ = eqn.params["dimension_numbers"]
            found |= {f for d in left for f in scope[eqn.invars[0]][d]}
    return found


def _turns(loop: Loop, w: Atom, counters: Collection[Var]) -> tuple[Var, int] | None:
    """The weights outside of which a turn gets one entry, and along which dimension."""
    body, atom = loop.body, w
    while isinstance(atom, Var) and (eqn := body.maker(atom)) is not None:
        name = eqn.primitive.name
        if name in MOVED or name in SAME:
            atom = eqn.invars[0]
            continue
        if name not in ("dynamic_slice", "gather") or not isinstance(eqn.invars[0], Var):
            return None
        sizes, window = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
        taken = [d for d, n in enumerate(window) if n != sizes[d]]
        outer = loop.inputs.get(eqn.invars[0], (None, True))
        moving = [v for v in eqn.invars[1:] if _depends(body, v, counters)]
        if (
            len(taken) != 1
            or window[taken[0]] != 1
            or outer[1]
            or not moving
            or not isinstance(outer[0], Var)
        ):
            return None
        return (outer[0], taken[0]) if len([n for n in sizes if n > 1]) >= 3 else None
    if not isinstance(atom, Var) or atom not in loop.inputs:
        return None
    base, sliced = loop.inputs[atom]
    if not sliced or not isinstance(base, Var) or len([n for n in shape_of(base) if n > 1]) < 3:
        return None
    return (base, 0) if is_float(base) else None


def _depends(view: View, atom: Atom, among: Collection[Var]) -> bool:
    if isinstance(atom, Literal):
        return False
    if atom in among:
        return True
    return any(v in among for n in view.ancestors([atom]) for v in view.eqns[n].invars if isinstance(v, Var))


def _kept(loop: Loop, routes: Mapping[Var, Routed]) -> frozenset[Var]:
    """What decides over results that are stacked, an expert each, after the loop."""
    if not loop.stacked or any(shape_of(c.into) for c in loop.carries):
        return frozenset()
    by = _meetings(loop.view, routes, (), loop.number, loop.stacked[0][1])
    return frozenset[Var]().union(*(routes[v].sources for v, _ in by))


def _sent(loop: Loop, x: Atom, routes: Mapping[Var, Routed], counters: Collection[Var]) -> frozenset[Var]:
    """What sent tokens to the places that a turn gets, expert by expert."""
    body, view, atom = loop.body, loop.view, x
    while isinstance(atom, Var) and (eqn := body.maker(atom)) is not None:
        if eqn.primitive.name == "dot_general":
            atom = next((v for v in eqn.invars if _turns(loop, v, counters) is None), eqn.invars[0])
            continue
        if eqn.primitive.name not in MOVED | SAME and not is_elementwise(eqn):
            return frozenset()
        atom = eqn.invars[0]
    outer, sliced = loop.inputs.get(atom, (None, False)) if isinstance(atom, Var) else (None, False)
    if not sliced:
        return frozenset()
    while isinstance(outer, Var) and (eqn := view.maker(outer)) is not None:
        mine = [v for v in eqn.invars if isinstance(v, Var) and v in routes]
        name = eqn.primitive.name
        if mine and (name in MEETINGS or name in SCATTERS or name == "gather"):
            return frozenset[Var]().union(*(routes[v].sources for v in mine))
        if name not in MOVED | SAME | {"slice", "dynamic_update_slice", "pad", "concatenate"}:
            return frozenset()
        outer = eqn.invars[0]
    return frozenset()
