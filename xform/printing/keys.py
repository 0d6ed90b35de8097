"""What an equation is, as numbers to compare: equal numbers, equal equations.

Neither the names of variables nor the identity of objects count. A body has a digest of its whole program,
worked out once however often it is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from xform.higher_order import OPAQUE, bodies
from xform.printing import phrases
from xform.printing.spell import const_key, type_text
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, name_stack, source_line

SEE_THROUGH = frozenset({"sharding_constraint", "name", "reshard", "optimization_barrier", "copy", "copy_p"})
"""Primitives whose results are their operands: what reads them is recognised as if it read the operands."""


@dataclasses.dataclass(frozen=True)
class Key:
    """An equation as numbers: equal numbers, equal equations. `header` leaves out the bodies, `exact` has
    them, `placed` has the source line too, `deep` also what made the operands; `loose` is the primitive at
    its place in the source, `spot` that without the name stack. `unsized` is `header` without any sizes."""

    header: int
    exact: int
    placed: int
    deep: int
    loose: int
    spot: int
    unsized: int
    inside: int | None


class Fingerprints:
    """The keys and digests of the programs that are compared with each other."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[Jaxpr, list[Key]] = {}
        self._digests: dict[Jaxpr, int] = {}

    def _number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def of(self, jaxpr: Jaxpr) -> list[Key]:
        found = self._keys.get(jaxpr)
        if found is None:
            found = self._keys[jaxpr] = list(self._make_keys(jaxpr))
        return found

    def _make_keys(self, jaxpr: Jaxpr) -> Iterator[Key]:
        made_by: dict[Any, Hashable] = {}
        for eqn in jaxpr.eqns:
            header = self._number((phrases.exactly(eqn), self._opaque(eqn)))
            inside = tuple(self.digest(body) for body in bodies(eqn)) or None
            exact = self._number((header, inside))
            place = (source_line(eqn), name_stack(eqn))
            placed = self._number((exact, place))
            operands = tuple(0 if isinstance(v, Literal) else made_by.get(v, -1) for v in eqn.invars)
            deep = self._number((placed, operands))
            name = eqn.params.get("name") if inside else None
            called = (eqn.primitive.name, name if isinstance(name, str) else "")
            loose, spot = self._number((*called, place)), self._number((*called, place[0]))
            unsized = self._number(phrases.unsized(eqn))
            body = None if inside is None else self._number(inside)
            yield Key(header, exact, placed, deep, loose, spot, unsized, body)
            through = eqn.primitive.name in SEE_THROUGH and len(eqn.invars) >= len(eqn.outvars)
            for k, v in enumerate(eqn.outvars):
                made_by[v] = operands[k] if through else (placed, k)

    def _opaque(self, eqn: JaxprEqn) -> tuple[int, ...]:
        """The programs in an equation that is left whole."""
        if eqn.primitive.name not in OPAQUE:
            return ()
        return tuple(self.digest(value) for value in eqn.params.values() if isinstance(value, Jaxpr))

    def digest(self, jaxpr: Jaxpr) -> int:
        """A number equal for two bodies that are the same program up to the names of variables and source
        lines."""
        found = self._digests.get(jaxpr)
        if found is None:
            numbers = {v: k for k, v in enumerate(jaxpr.all_invars)}

            def read(atom: Atom) -> int:
                return -1 if isinstance(atom, Literal) else numbers[atom]

            whole: list[Hashable] = [tuple(type_text(v.aval) for v in jaxpr.all_invars)]
            whole += [const_key(value) for value in jaxpr.consts]
            for eqn, key in zip(jaxpr.eqns, self.of(jaxpr), strict=True):
                whole.append((key.exact, *(read(v) for v in eqn.invars)))
                for v in eqn.outvars:
                    numbers[v] = len(numbers)
            whole.append(tuple(_exit(v, read) for v in jaxpr.outvars))
            found = self._digests[jaxpr] = self._number(tuple(whole))
        return found


def _exit(atom: Atom, read: Callable[[Atom], int]) -> Hashable:
    return literal_key(atom) if isinstance(atom, Literal) else read(atom)


def literal_key(literal: Literal) -> tuple[str, str]:
    return const_key(literal.val), type_text(literal.aval)
