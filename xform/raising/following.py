"""The dataflow around an anchor: what a value follows from, what follows from it, and where that is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View
from xform.raising.indices import MOVEMENT
from xform.trace import Atom, JaxprEqn, Literal, Tracer, Var, same_constant, shape_of

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})


def static(view: View, arrays: bool = True) -> frozenset[Var]:
    """The variables whose values are in the program itself: of literals and iota, and of constants. Without
    `arrays`, of constants that are one number alone.
    """
    found = _constant(view, arrays)
    for eqn in view.eqns:
        random = eqn.primitive.name.startswith("random") or eqn.effects
        if not random and all(isinstance(v, Literal) or v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return frozenset(found)


def uniform(view: View) -> frozenset[Var]:
    """The variables of which all elements are one number, that is in the program itself."""
    found = _constant(view, arrays=False)
    for eqn in view.eqns:
        sums = eqn.primitive.name in REDUCTIONS or eqn.primitive.name == "dot_general"
        spread = all(isinstance(v, Literal) or v in found for v in eqn.invars)
        if spread and (sums or is_elementary(eqn)) and not eqn.effects:
            found.update(eqn.outvars)
    return frozenset(found)


def _constant(view: View, arrays: bool) -> set[Var]:
    """The inputs that are constants."""

    def fits(value: Any) -> bool:
        return not isinstance(value, Tracer) and (arrays or np.size(value) == 1)

    found = {v for v, value in view.constants.items() if fits(value)}
    for v, atom in view.inputs.items():
        outer = view.outer.constants if view.outer is not None else {}
        if isinstance(atom, Literal) or (atom in outer and fits(outer[atom])):
            found.add(v)
    return found


def is_elementary(eqn: JaxprEqn) -> bool:
    """Whether an equation is elementwise, moves or casts: each number of its result follows from one each."""
    return is_elementwise(eqn) or eqn.primitive.name in MOVEMENT


def kind(atom: Atom) -> str:
    """What numbers a value is of: "f" of any floats, "i", "u", "b"; "" for what is none, as keys are."""
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return ""
    return "f" if jnp.issubdtype(dtype, np.floating) else str(dtype.kind)


def width(atom: Atom) -> int:
    """The bytes of one element."""
    return int(getattr(getattr(atom.aval, "dtype", None), "itemsize", 0))


def is_outer(eqn: JaxprEqn) -> bool:
    """Whether it is a product of each element with each, or element by element: nothing is summed over."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(shape_of(eqn.invars[0])[d] == 1 for d in contracted)


def read(eqn: JaxprEqn) -> list[Var]:
    """The variables that an equation reads."""
    return [v for v in eqn.invars if isinstance(v, Var)]


def sources(
    view: View,
    atoms: Sequence[Atom],
    known: Collection[Var],
    opens: Callable[[JaxprEqn], bool],
    most: int = 60,
) -> Iterator[Var]:
    """The variables on which alone, each by itself, values depend, the nearest first; past `known`, back
    through `most` equations that `opens` takes.
    """
    frontier = {v for v in atoms if isinstance(v, Var) and v not in known}
    for _ in range(most):
        if not frontier:
            return
        v = max(frontier, key=lambda v: view.makers.get(v, -1))
        if len(frontier) == 1:
            yield v
        elif sum(w not in view.makers for w in frontier) > 1:
            return
        eqn = view.maker(v)
        if eqn is None or not opens(eqn):
            return
        frontier -= set(eqn.outvars)
        frontier |= {w for w in read(eqn) if w not in known}


def cone(view: View, v: Var, last: int | None = None) -> set[Var]:
    """All that follows from a variable, itself included; of equations up to number `last`."""
    found, todo = {v}, [v]
    while todo:
        for number in view.users.get(todo.pop(), ()):
            if number < 0 or (last is not None and number > last):
                continue
            for out in view.eqns[number].outvars:
                if out not in found:
                    found.add(out)
                    todo.append(out)
    return found


def leaves(
    view: View, atom: Atom, stop: Collection[Var], inside: Collection[Var], known: Collection[Var]
) -> list[Var]:
    """What a value depends on besides `stop`, outside of `inside` (what follows from it) and of `known`."""
    found: dict[Var, None] = {}
    seen: set[Var] = set()
    todo: list[Atom] = [atom]
    while todo:
        v = todo.pop()
        if isinstance(v, Literal) or v in stop or v in seen or v in known:
            continue
        seen.add(v)
        if v not in inside:
            found[v] = None
        elif (eqn := view.maker(v)) is not None:
            todo += eqn.invars
    return list(found)


def same(view: View, a: Atom, b: Atom, most: int = 6) -> bool:
    """Whether two values are computed alike, of the same, in no more than a few equations."""
    if a is b:
        return True
    if isinstance(a, Literal) or isinstance(b, Literal):
        return (
            isinstance(a, Literal)
            and isinstance(b, Literal)
            and same_constant(a.val, b.val)
            and a.aval == b.aval
        )
    one, other = view.maker(a), view.maker(b)
    if one is None or other is None or most == 0 or one.primitive is not other.primitive:
        return False
    if one.outvars.index(a) != other.outvars.index(b) or one.effects:
        return False
    if str(one.params) != str(other.params):
        return False
    return all(same(view, v, w, most - 1) for v, w in zip(one.invars, other.invars, strict=True))


def ends_in(view: View, v: Var, last: Var) -> bool:
    """Whether all that follows from `v` passes through `last`."""
    end = view.makers[last]
    todo, seen = [v], {v, last}
    while todo:
        for number in view.users.get(todo.pop(), ()):
            if number < 0 or number > end:
                return False
            for out in view.eqns[number].outvars:
                if out not in seen:
                    seen.add(out)
                    todo.append(out)
    return True


def chain(view: View, atom: Atom) -> list[Atom]:
    """A value, what it was moved or cast from, and so on."""
    found = [atom]
    while (
        (eqn := view.maker(found[-1])) is not None and eqn.primitive.name in MOVEMENT and len(eqn.invars) == 1
    ):
        found.append(eqn.invars[0])
    return found
