"""A program as the search for rows reads it: who makes and who reads each value, through loops and branches.

A body is a scope; an equation in it is an `Op`. What goes into a body and what comes back goes through a
`Port`: an operand of a loop is the body's input, its first value, the body's result and the loop's result, so
that either all of these are elements of a row or none is. Bodies are read when the search comes to them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from xform.higher_order import bodies, carries, operands, scan_parts
from xform.layers.repeats import Keys
from xform.printing.spell import const_key
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Var, rename_effects

ENTERED = ("scan", "while", "cond", "jit", "remat2", "optimization_barrier")
"""The primitives that a row goes through, whole."""


@dataclasses.dataclass(eq=False)
class Op:
    """An equation of a scope.

    key: what it does, to what types. sense: what it does to what, down to the inputs. depth: how many
        equations it waits for. claim: the group that it was proposed for.
    """

    scope: Scope
    index: int
    eqn: JaxprEqn
    key: int
    sense: int
    depth: int
    entry: Entry | None = None
    claim: Any = None


@dataclasses.dataclass(eq=False)
class Port:
    """A way into an equation's bodies, out of them, or around a loop.

    takes: the values that come in by it, each in its scope; gives: the variables that they are known by then.
    """

    takes: tuple[tuple[Scope, Atom], ...]
    gives: tuple[tuple[Scope, Var], ...]
    claim: Any = None


@dataclasses.dataclass(eq=False)
class Entry:
    """An equation whose bodies are read. Ports by the number of the operand, and of the result."""

    op: Op
    scopes: list[Scope]
    operands: dict[int, Port]
    results: dict[int, Port]


@dataclasses.dataclass(eq=False)
class Scope:
    """A body, its variables its own."""

    jaxpr: Jaxpr
    ops: list[Op] = dataclasses.field(default_factory=list)


class Scopes:
    """All that has been read of a program so far."""

    def __init__(self, jaxpr: Jaxpr, paths: Sequence[str]) -> None:
        self.maker: dict[Var, tuple[Op, int]] = {}
        self.readers: dict[Var, list[tuple[Op, int]]] = {}
        self.bound: dict[Var, Port] = {}
        self.leaving: dict[Var, list[Port]] = {}
        self.constants: dict[Var, Any] = {}
        self.scopes: list[Scope] = []
        self._keys = Keys()
        self._numbers: dict[Hashable, int] = {}
        self._sense: dict[Var, int] = {}
        senses = [
            self._number(("input", v.aval, re.sub(r"\d+", "#", path)))
            for v, path in itertools.zip_longest(jaxpr.invars, paths, fillvalue="")
            if isinstance(v, Var)
        ]
        self.top = self._read(jaxpr, senses)
        self.inputs = {v: i for i, v in enumerate(jaxpr.invars)}

    def same(self, a: Atom, b: Atom) -> bool:
        """Whether two operands are one value: one variable, or equal literals or constants."""
        if a is b:
            return True
        if isinstance(a, Literal) or isinstance(b, Literal):
            literals = isinstance(a, Literal) and isinstance(b, Literal)
            return literals and self._of(a) == self._of(b)
        return a in self.constants and b in self.constants and self._sense[a] == self._sense[b]

    def shared(self, column: Sequence[Atom]) -> bool:
        return all(self.same(column[0], atom) for atom in column[1:])

    def enter(self, op: Op) -> Entry | None:
        """The equation's bodies, read; None where rows do not go through it."""
        if op.entry is None and op.claim is None and op.eqn.primitive.name in ENTERED:
            op.entry = self._enter(op)
        return op.entry

    def _number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def _read(self, jaxpr: Jaxpr, senses: Iterable[int]) -> Scope:
        scope = Scope(jaxpr)
        self.scopes.append(scope)
        self._sense.update(zip(jaxpr.invars, senses, strict=True))
        for v, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            self.constants[v] = value
            self._sense[v] = self._number(("const", v.aval, const_key(value)))
        depths: dict[Var, int] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            key = self._number((self._keys.of(eqn), eqn.ctx, *(v.aval for v in (*eqn.invars, *eqn.outvars))))
            sense = self._number((key, *map(self._of, eqn.invars)))
            read = [v for v in eqn.invars if isinstance(v, Var)]
            op = Op(scope, index, eqn, key, sense, 1 + max((depths.get(v, 0) for v in read), default=0))
            scope.ops.append(op)
            for k, atom in enumerate(eqn.invars):
                if isinstance(atom, Var):
                    self.readers.setdefault(atom, []).append((op, k))
            # Results of a program of its own, like those of an unstack, are told apart by their types alone.
            apart = not bodies(eqn) and eqn.primitive.name not in ("unstack", *ENTERED)
            for k, v in enumerate(eqn.outvars):
                depths[v] = op.depth
                self.maker[v] = (op, k)
                self._sense[v] = self._number((sense, k if apart else v.aval))
        return scope

    def _of(self, atom: Atom) -> int:
        if isinstance(atom, Literal):
            value = atom.val
            bits = value.tobytes() if isinstance(value, (np.ndarray, np.generic)) else repr(value)
            return self._number(("literal", atom.aval, bits))
        return self._sense[atom]

    def _enter(self, op: Op) -> Entry:
        eqn = op.eqn
        senses = [self._of(v) for v in eqn.invars]
        scopes = []
        for number, body in enumerate(bodies(eqn)):
            looped = set(carries(eqn, number).values())
            inputs = [
                self._number((eqn.primitive.name, i in looped, -1 if k is None else senses[k], v.aval))
                for i, (k, v) in enumerate(zip(operands(eqn, number), body.invars, strict=True))
            ]
            scopes.append(self._read(_fresh(body), inputs))
        entry = Entry(op, scopes, {}, {})
        for taken, given in _ways(eqn, len(eqn.outvars)):
            takes = [(op.scope, eqn.invars[k]) for k in taken["operand"]]
            takes += [(scopes[b], scopes[b].jaxpr.outvars[k]) for b, k in taken["leaves"]]
            gives = [(scopes[b], scopes[b].jaxpr.invars[k]) for b, k in given["enters"]]
            gives += [(op.scope, eqn.outvars[k]) for k in given["result"]]
            port = Port(tuple(takes), tuple(gives))
            entry.operands.update((k, port) for k in taken["operand"])
            entry.results.update((k, port) for k in given["result"])
            for scope, atom in takes:
                if scope is not op.scope and isinstance(atom, Var):
                    self.leaving.setdefault(atom, []).append(port)
            self.bound.update((v, port) for scope, v in gives)
        return entry


type _Way = tuple[dict[str, list[Any]], dict[str, list[Any]]]


def _ways(eqn: JaxprEqn, results: int) -> list[_Way]:
    """The ports of an equation, by numbers: what each takes and what it gives."""

    def way(operand: Any = (), leaves: Any = (), enters: Any = (), result: Any = ()) -> _Way:
        return {"operand": list(operand), "leaves": list(leaves)}, {
            "enters": list(enters),
            "result": list(result),
        }

    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [way(operand=[k], result=[k]) for k in range(results)]
    if name == "scan":
        consts, carry, _ = scan_parts(eqn)
        around = [way([consts + k], [(0, k)], [(0, consts + k)], [k]) for k in range(carry)]
        return [*(way([k], enters=[(0, k)]) for k in range(consts)), *around]
    inside = [operands(eqn, b) for b in range(len(bodies(eqn)))]
    entering = [
        way([k], enters=[(b, i) for b, numbers in enumerate(inside) for i, m in enumerate(numbers) if m == k])
        for k in range(len(eqn.invars))
    ]
    if name == "while":
        names = [k for k, v in eqn.params.items() if isinstance(v, Jaxpr)]
        body = names.index("body_jaxpr")
        first = len(eqn.invars) - results
        ways = entering[:first]
        for k in range(results):
            taken, given = entering[first + k]
            ways.append(({**taken, "leaves": [(body, k)]}, {**given, "result": [k]}))
        return ways
    entering = entering[1:] if name == "cond" else entering  # the predicate is no row
    return [
        *entering,
        *(way(leaves=[(b, k) for b in range(len(inside))], result=[k]) for k in range(results)),
    ]


def _fresh(jaxpr: Jaxpr) -> Jaxpr:
    """The same body with variables of its own: one may be called from several places."""
    new: dict[Var, Var] = {}

    def make(v: Var) -> Var:
        made = new[v] = type(v)(v.aval)
        return made

    def read(atom: Atom) -> Any:
        return atom if isinstance(atom, Literal) else new[atom]

    constvars, invars = [make(v) for v in jaxpr.constvars], [make(v) for v in jaxpr.invars]
    eqns = []
    for eqn in jaxpr.eqns:
        reads = [read(v) for v in eqn.invars]
        effects = rename_effects(eqn.effects, lambda v: new.get(v, v))
        eqns.append(eqn.replace(invars=reads, outvars=[make(v) for v in eqn.outvars], effects=effects))
    outvars = [read(v) for v in jaxpr.outvars]
    fresh = jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=eqns, consts=jaxpr.consts)
    return fresh.replace(effects=rename_effects(jaxpr.effects, lambda v: new.get(v, v)))
