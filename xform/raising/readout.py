"""How a loop's state is read: the one product with it, after its update, along the dimension of its keys."""

from __future__ import annotations

import dataclasses

from xform.raising.loops import Carry
from xform.raising.terms import Factor, Index, NotLinear, Term, Terms
from xform.trace import Atom, JaxprEqn, Literal, Var, shape_of


class ReadOtherwise(Exception):
    """The state is used otherwise than by one product: how."""


Read = tuple[Var, Index, Term]


@dataclasses.dataclass(frozen=True)
class Readout:
    """out = scale times query times the new state, summed over the labels `keys`; at `index`. In labels of
    the state.

    root: the variable that is the new state, at `state`.
    """

    out: Var
    index: Index
    scale: float
    query: tuple[Factor, ...]
    keys: frozenset[int]
    root: Var
    state: Index


def readout(terms: Terms, carry: Carry, index: Index) -> Readout | None:
    """The product that reads the state; None where nothing reads it. Raises ReadOtherwise.

    index: labels of the state, as it is carried.
    """
    root, at = _root(terms, carry, index)
    _unseen(terms, carry, root)
    found = _Reading(terms, carry, root).found()
    if found is None:
        return None
    out, out_index, term = _scaled(terms, *found)
    (state,) = [f for f in term.factors if f.atom is root]
    at = tuple(map(terms.labels.resolved, at))
    rename: dict[int, int] = {}
    for mine, theirs in zip(at, state.index, strict=True):
        if len(mine) != len(theirs):
            raise ReadOtherwise("its state is read in other dimensions than it is carried in")
        rename.update(zip(theirs, mine, strict=True))
    here = {label for dim in out_index for label in dim}
    keys = frozenset(rename[label] for dim in state.index for label in dim if label not in here)
    query = tuple(
        Factor(f.atom, _renamed(f.index, rename), f.power) for f in term.factors if f.atom is not root
    )
    if any(f.labels - set(rename.values()) for f in query):
        raise ReadOtherwise("its state is read by several queries at once")
    return Readout(out, _renamed(out_index, rename), term.coefficient, query, keys, root, at)


def _scaled(terms: Terms, out: Var, index: Index, term: Term) -> Read:
    """With what is read multiplied by a number, where it is used for nothing else."""
    view = terms.view
    while len(users := view.users.get(out, [])) == 1 and users[0] >= 0:
        eqn = view.eqns[users[0]]
        numbers = [v for v in eqn.invars if isinstance(v, Literal)]
        if (
            eqn.primitive.name not in ("mul", "div")
            or len(numbers) != 1
            or (eqn.invars[0] is not out and eqn.primitive.name == "div")
        ):
            break
        by = float(numbers[0].val)
        term = Term(term.coefficient * (by if eqn.primitive.name == "mul" else 1 / by), term.factors)
        out = eqn.outvars[0]
    return out, index, term


def _renamed(index: Index, rename: dict[int, int]) -> Index:
    return tuple(tuple(rename.get(label, label) for label in dim) for dim in index)


def _root(terms: Terms, carry: Carry, index: Index) -> tuple[Var, Index]:
    """The value that is the new state, before it is moved or cast to what is carried."""
    atom: Atom = carry.out
    while isinstance(atom, Var) and atom is not carry.into:
        moved = terms.moved(atom, index)
        if moved is None or isinstance(moved[0], Literal):
            break
        atom, index = moved
    assert isinstance(atom, Var)
    return atom, index


def _unseen(terms: Terms, carry: Carry, root: Var) -> None:
    """Raises ReadOtherwise where something on the way to the new state is used for more than that."""
    view = terms.view
    way = view.ancestors([root])
    for number in way:
        for v in view.eqns[number].outvars:
            if v is not root and v in terms.touched and set(view.users.get(v, ())) - way:
                raise ReadOtherwise("what its state is on the way to the next one is used elsewhere")
    if set(view.users.get(carry.into, ())) - way:
        raise ReadOtherwise("its state is read before its update, or used elsewhere")


class _Reading:
    """The way forward from the new state to what is read of it."""

    def __init__(self, terms: Terms, carry: Carry, root: Var) -> None:
        self.terms, self.carry, self.root = terms, carry, root

    def found(self) -> Read | None:
        view = self.terms.view
        todo, reads = [self.root], []
        while todo:
            v = todo.pop()
            for number in view.users.get(v, ()):
                if number < 0:
                    self._returned(v)
                    continue
                eqn = view.eqns[number]
                made = self._read(eqn)
                if made is None:
                    todo += [w for w in eqn.outvars if isinstance(w, Var)]
                else:
                    reads.append(made)
        unique = {id(out): (out, index, term) for out, index, term in reads}
        if len(unique) > 1:
            raise ReadOtherwise("its state is read more than once in a step")
        return next(iter(unique.values()), None)

    def _returned(self, v: Var) -> None:
        outs = self.terms.view.jaxpr.outvars
        places = [at for at, out in enumerate(outs) if out is v]
        if any(out is v and out is not self.carry.out for out in outs) or len(places) > 1:
            raise ReadOtherwise("the states of all its steps are returned")

    def _read(self, eqn: JaxprEqn) -> Read | None:
        """What an equation reads of the state: None where it has all of it still."""
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if out is None:
            raise ReadOtherwise(f"its state goes through {eqn.primitive.name}")
        index = self.terms.labels.whole(shape_of(out))
        try:
            made = self.terms.of(out, index, lambda f: True, frozenset((self.root,)))
        except NotLinear as why:
            raise ReadOtherwise(str(why)) from None
        index = tuple(map(self.terms.labels.resolved, index))
        if len(made) != 1 or sum(f.atom is self.root for f in made[0].factors) != 1:
            raise ReadOtherwise("its state is added to something before it is read")
        here = {label for dim in index for label in dim}
        (state,) = [f for f in made[0].factors if f.atom is self.root]
        if state.labels <= here:
            return None
        return out, index, made[0]
