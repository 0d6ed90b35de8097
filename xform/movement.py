"""Equations that hold the numbers of one array in another arrangement or dtype, and what a value is made of
by them.

A value may be traced back through such equations to one that holds the same in fewer bytes. That one can be
kept in its place, and the equations done again where the value is needed: the numbers are the same to the
bit, whatever the equations are, since they are the same equations applied to the same value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xform.higher_order import enter
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Value, Var, bind, shape_of

Makers = Mapping[Var, tuple[JaxprEqn, int]]
"""For each variable of a body the equation that makes it, and as which of its results."""

MOVEMENT = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "name",
        "neg",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "transpose",
    }
)
"""The primitives whose result is one operand, element for element."""


def moves(eqn: JaxprEqn) -> bool:
    """Whether the equation only moves or converts its one operand."""
    return eqn.primitive.name in MOVEMENT and len(eqn.invars) == 1 and not eqn.effects


def nbytes(atom: Atom) -> int:
    """The bytes of a value's elements; none for what is no array."""
    dtype = getattr(atom.aval, "dtype", None)
    return 0 if dtype is None else math.prod(shape_of(atom)) * dtype.itemsize


def makers(jaxpr: Jaxpr) -> Makers:
    """What makes each variable of a body."""
    return {v: (eqn, k) for eqn in jaxpr.eqns for k, v in enumerate(eqn.outvars)}


def uses(jaxpr: Jaxpr) -> frozenset[Var]:
    """The variables of a body that it gives or that one of its equations takes."""
    atoms = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
    return frozenset(v for v in atoms if isinstance(v, Var))


@dataclasses.dataclass(frozen=True)
class Derived:
    """A value as `root` with `steps` applied to it, the first first.

    whole: the value is a row of another, every row of which is made of the root.
    """

    root: Atom
    steps: tuple[Callable[[Value], Value], ...] = ()
    whole: bool = False

    def of(self, value: Value) -> Value:
        """The steps applied to a value of the root."""
        for step in self.steps:
            value = step(value)
        return value

    @property
    def key(self) -> tuple[Any, bool]:
        """What tells roots apart: literals are not hashable."""
        return (self.root if isinstance(self.root, Var) else id(self.root), self.whole)


def derivations(atom: Atom, made: Makers) -> list[Derived]:
    """The value as itself, then as ever longer derivations from what it is made of."""
    found = [Derived(atom)]
    while isinstance(atom, Var) and atom in made and moves(eqn := made[atom][0]):
        atom = eqn.invars[0]
        found.append(Derived(atom, (_step(eqn), *found[-1].steps)))
    return found


def row_derivations(atom: Atom, made: Makers) -> list[Derived]:
    """A row of the value [n, ...] as itself, then as ever longer derivations from rows of what it is made
    of.
    """
    found = [Derived(atom)]
    while isinstance(atom, Var) and atom in made and moves(eqn := made[atom][0]):
        atom = eqn.invars[0]
        whole = eqn.primitive.name == "broadcast_in_dim" and 0 not in eqn.params["broadcast_dimensions"]
        row = _row_of_broadcast(eqn) if whole else _row_of(eqn)
        if row is None:
            break
        found.append(Derived(atom, (row, *found[-1].steps), whole))
        if whole:
            break
    return found


def narrowest(ways: Sequence[Sequence[Derived]], free: Callable[[Atom], bool]) -> list[Derived]:
    """Of the derivations of each value that whose root is to be kept, so that all roots take the fewest
    bytes.

    `free` says which roots are there anyway. Of equals the first is taken.
    """

    def chosen_of(options: Sequence[Derived]) -> Derived:
        most = nbytes(options[0].root)
        return min(options, key=lambda d: 0 if free(d.root) and nbytes(d.root) <= most else nbytes(d.root))

    chosen = [chosen_of(options) for options in ways]
    for i, options in enumerate(ways):
        # What is kept for another is there too, though it be wider.
        others = {d.key for k, d in enumerate(chosen) if k != i and not free(d.root)}
        if not free(chosen[i].root) and chosen[i].key not in others:
            chosen[i] = next((way for way in options if way.key in others), chosen[i])
    return chosen


def _step(eqn: JaxprEqn) -> Callable[[Value], Value]:
    return lambda x: bind(eqn, [x], eqn.params)[0]


def _row_of(eqn: JaxprEqn) -> Callable[[Value], Value] | None:
    """What the equation does to each row [...] of [n, ...] alone; None where rows do not stay apart."""
    old, new, params = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), eqn.params
    if not old or not new or old[0] != new[0]:
        return None
    match eqn.primitive.name:
        case "reshape" if params["dimensions"] is None and old[0]:
            return lambda x: jax.lax.reshape(x, new[1:])
        case "transpose" if params["permutation"][0] == 0:
            return lambda x: jax.lax.transpose(x, [d - 1 for d in params["permutation"][1:]])
        case "squeeze" if 0 not in params["dimensions"]:
            return lambda x: jax.lax.squeeze(x, [d - 1 for d in params["dimensions"]])
        case "broadcast_in_dim" if params["broadcast_dimensions"][0] == 0:
            return _row_of_broadcast(eqn)
        case "convert_element_type" | "copy" | "copy_p" | "name" | "neg":
            return _step(eqn)
    return None


def _row_of_broadcast(eqn: JaxprEqn) -> Callable[[Value], Value]:
    """A row of a broadcast: of the operand's row or, where every row is the same, of the operand."""
    shape, dims = shape_of(eqn.outvars[0])[1:], eqn.params["broadcast_dimensions"]
    keeps = 1 if 0 in dims else 0
    return lambda x: jax.lax.broadcast_in_dim(x, shape, [d - 1 for d in dims[keeps:]])


def pruned(jaxpr: Jaxpr) -> Jaxpr:
    """The program, and the bodies in it, without equations that move what nobody uses."""
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if moves(eqn) and not used.intersection(eqn.outvars):
            continue
        params = enter(eqn, lambda body, _: pruned(body))
        kept.append(eqn if params is eqn.params else eqn.replace(params=params))
        used.update(v for v in eqn.invars if not isinstance(v, Literal))
    kept.reverse()
    same = len(kept) == len(jaxpr.eqns) and all(a is b for a, b in zip(kept, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=kept, debug_info=jaxpr.debug_info)
