"""Where the dataflow of one body repeats: blocks of equations, each taking what the one before it made.

Two blocks are matched backward from their results, in lockstep: the same operation on both sides goes on to
its operands, until both sides read the same value (it is shared), the right side reads what the left one made
(it is carried), or the sides part (it is each one's own). From what is carried the walk goes on to the block
before. So it does not matter where an equation stands in the text: layers may be interleaved, keys split or
weights cast all at the beginning, and what only the first layer computes for all is not part of it. Where the
sides part at something made of the left block, they are no two blocks; that is the difference to report.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from xform.higher_order import OPAQUE, bodies
from xform.printing.keys import Fingerprints
from xform.printing.phrases import SILENT
from xform.printing.spell import const_key, spell
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, shape_of

PLAIN = (bool, int, float, str, type(None), np.dtype)


def kind_of(atom: Atom) -> tuple[Any, ...]:
    """The type of a value as two blocks must agree on it: shape and dtype."""
    return shape_of(atom), getattr(atom.aval, "dtype", None) or str(atom.aval)


def alike(a: Atom, b: Atom) -> bool:
    """Whether two values have one type, weak or not."""
    return kind_of(a) == kind_of(b)


class Keys:
    """What an equation does, as a number: its primitive, parameters, bodies and types, no names."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._prints = Fingerprints()

    def of(self, eqn: JaxprEqn) -> int:
        return self._number((self.shell(eqn), tuple(map(self._prints.digest, bodies(eqn)))))

    def shell(self, eqn: JaxprEqn) -> int:
        """What it does but for its bodies."""
        inside = bodies(eqn)
        silent = (SILENT | {"name"} if inside else SILENT) - {"bwd"}
        params = tuple((k, self._param(eqn, v)) for k, v in eqn.params.items() if k not in silent)
        split = tuple(map(len, eqn.params["ft_in"].unpack())) if eqn.primitive.name == "scan" else ()
        types = tuple(map(kind_of, eqn.outvars))
        return self._number((eqn.primitive.name, params, split, types, len(eqn.invars)))

    def _number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def _param(self, eqn: JaxprEqn, value: Any) -> Hashable:
        if isinstance(value, Jaxpr):
            return "body", self._prints.digest(value) if eqn.primitive.name in OPAQUE else None
        if isinstance(value, PLAIN):
            return type(value).__name__, value
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *(self._param(eqn, v) for v in value))
        return spell(value)


class View:
    """A body as the walks read it: who makes and who reads each variable, and what each equation is.

    `readers` has only what counts for the body's results or effects, -1 for the results themselves. Equations
    in `taken` belong to a stack already.
    """

    def __init__(self, jaxpr: Jaxpr, keys: Keys) -> None:
        self.jaxpr, self.eqns, self.keys = jaxpr, jaxpr.eqns, keys
        self.maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars if not isinstance(v, DropVar)}
        self.live = self._live()
        self.key = [keys.of(e) if live else -1 for e, live in zip(self.eqns, self.live, strict=True)]
        self.taken: set[int] = set()
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            if self.live[i]:
                for v in {v for v in eqn.invars if isinstance(v, Var)}:
                    self.readers.setdefault(v, []).append(i)
        for v in {v for v in jaxpr.outvars if isinstance(v, Var)}:
            self.readers.setdefault(v, []).append(-1)
        self.consts = {v: const_key(c) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True)}

    def _live(self) -> list[bool]:
        needed = {v for v in self.jaxpr.outvars if isinstance(v, Var)}
        live = [False] * len(self.eqns)
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[i]
            if eqn.effects or not needed.isdisjoint(eqn.outvars):
                live[i] = True
                needed.update(v for v in eqn.invars if isinstance(v, Var))
        return live

    def same(self, a: Atom, b: Atom) -> bool:
        """Whether two operands are the same value: one variable, or equal literals or constants."""
        if isinstance(a, Literal) and isinstance(b, Literal):
            return alike(a, b) and const_key(a.val) == const_key(b.val)
        if isinstance(a, Literal) or isinstance(b, Literal):
            return False
        return a is b or (a in self.consts and self.consts[a] == self.consts.get(b))

    def made_by(self, atom: Atom) -> int | None:
        """The equation that makes a value; None for inputs, constants and literals."""
        return None if isinstance(atom, Literal) else self.maker.get(atom)


@dataclasses.dataclass
class Step:
    """A block (right) matched with the block before it (left).

    pairs: equation right -> left. carried: what right takes of left -> what left takes in its place. stops:
    (left, right) where the sides part. differences: where the types differ, and, once `part` has sorted them
    out, where right depends on left. tails: equations of left that only prepare what right takes, with no
    match in right.
    """

    seeds: list[tuple[Atom, Var]]
    pairs: dict[int, int] = dataclasses.field(default_factory=dict)
    carried: dict[Var, Atom] = dataclasses.field(default_factory=dict)
    stops: list[tuple[Atom, Atom]] = dataclasses.field(default_factory=list)
    differences: list[tuple[Atom, Atom]] = dataclasses.field(default_factory=list)
    tails: list[int] = dataclasses.field(default_factory=list)


def match(
    view: View,
    seeds: list[tuple[Atom, Var]],
    outside: Iterable[Var] = (),
    known: Sequence[Atom] = (),
) -> Step:
    """Two blocks matched backward from pairs of their results (left, right).

    outside: what the right block is known to read from outside. known: what it is known to take of the left.
    The right block's equations are met latest first: what it takes of the left is then always recognised.
    """
    step, left = Step(seeds), set[int]()
    beyond, taking = set(outside), {v for v in known if isinstance(v, Var)}
    heap: list[tuple[int, int, Atom, Var]] = []
    met = set[tuple[int, int]]()

    def meet(a: Atom, b: Atom) -> None:
        if (id(a), id(b)) in met or view.same(a, b):
            return
        met.add((id(a), id(b)))
        made = view.made_by(b)
        if not alike(a, b):
            step.differences.append((a, b))
        elif isinstance(b, Literal) or made is None:
            step.stops.append((a, b))
        else:
            heapq.heappush(heap, (-made, len(met), a, b))

    for a, b in seeds:
        meet(a, b)
    while heap:
        minus, _, a, b = heapq.heappop(heap)
        j, i = -minus, view.made_by(a)
        if b in taking or (not taking and j in left):
            if not one(view, step.carried.setdefault(b, a), a):
                step.differences.append((a, b))
        elif i is None or b in beyond or not _matches(view, step, left, i, j, a, b):
            step.stops.append((a, b))
        elif step.pairs.get(j) != i:
            step.pairs[j] = i
            left.add(i)
            for x, y in zip(view.eqns[i].invars, view.eqns[j].invars, strict=True):
                meet(x, y)
    return step


def one(view: View, a: Atom, b: Atom) -> bool:
    """Whether two values are one; of a literal each reader has an object of its own."""
    return a is b or (isinstance(a, Literal) and view.same(a, b))


def _matches(view: View, step: Step, left: set[int], i: int, j: int, a: Atom, b: Var) -> bool:
    if step.pairs.get(j, i) != i or (i in left and step.pairs.get(j) != i) or i >= j:
        return False
    if view.key[i] != view.key[j] or i in step.pairs or j in left or not view.taken.isdisjoint((i, j)):
        return False
    return next(k for k, v in enumerate(view.eqns[j].outvars) if v is b) == next(
        k for k, v in enumerate(view.eqns[i].outvars) if v is a
    )


def part(view: View, step: Step) -> None:
    """Moves the stops whose right side is made of the left block to the differences."""
    left = set(step.pairs.values())
    first = min(left, default=0)
    free: set[int] = set()

    def depends(start: int) -> bool:
        todo, seen = [start], set[int]()
        while todo:
            at = todo.pop()
            if at in left:
                return True
            if at >= first and at not in free and at not in seen:
                seen.add(at)
                todo += sorted(m for v in view.eqns[at].invars if (m := view.made_by(v)) is not None)
        free.update(seen)
        return False

    stops, step.stops = step.stops, []
    for a, b in stops:
        made = view.made_by(b)
        (step.differences if made is not None and depends(made) else step.stops).append((a, b))


def settle(view: View, step: Step, main: Atom) -> None:
    """Moves what only prepares carried values, other than the main one, from the head of a block to the tail
    of the block before, where that leaves no more to carry: a key, not the pair of keys it is taken from; a
    running sum, not what is summed.
    """
    moved = True
    while moved:
        moved = False
        for j in sorted(step.pairs):
            taken = list(dict.fromkeys(v for v in view.eqns[j].invars if isinstance(v, Var)))
            if not taken or main in taken or not all(v in step.carried for v in taken):
                continue
            if _movable(view, step, j, taken):
                out = view.eqns[j].outvars[0]
                step.carried[out] = view.eqns[step.pairs.pop(j)].outvars[0]
                for v in taken:
                    del step.carried[v]
                step.tails.append(j)
                moved = True


def _movable(view: View, step: Step, j: int, taken: list[Var]) -> bool:
    """Whether equation j is all that a block does with these values, and its result no more to carry."""
    outs = view.eqns[j].outvars
    if len(outs) != 1 or outs[0] is step.seeds[0][1]:
        return False
    if any(sum(i in step.pairs for i in view.readers[v]) > 1 for v in taken):
        return False
    needed = {v for i in step.tails for v in view.eqns[i].invars if isinstance(v, Var)}
    if any(isinstance(u := step.carried[v], Var) and u in needed for v in taken):
        return False
    return math.prod(shape_of(outs[0])) <= sum(math.prod(shape_of(v)) for v in taken)


def chain(view: View, first: Step) -> tuple[list[Step], Step | None]:
    """The steps from the last two blocks back to the first two, and the one that failed if it came to any."""
    steps = [first]
    while True:
        last = steps[-1]
        seeds = [(u, w) for w, u in last.carried.items()]
        taken = [u for u, _ in seeds]
        if any(view.made_by(u) is None for u in taken) or len(set(taken)) < len(taken):
            return steps, None
        outside = [a for a, _ in last.stops if isinstance(a, Var)]
        step = match(view, seeds, outside, taken)
        part(view, step)
        if not _follows(view, step, taken):
            return steps, step
        step.carried = {v: step.carried[v] for v in taken if isinstance(v, Var)}  # in the order of the last
        steps.append(step)


def _follows(view: View, step: Step, taken: Sequence[Atom]) -> bool:
    ends = all(step.pairs.get(view.maker[w]) == view.made_by(u) for u, w in step.seeds)
    return ends and not step.differences and set(step.carried) == set(taken)
