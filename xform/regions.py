"""Parts of a program that work element by element, and so can run a slice at a time.

    m' = mul m 0.9              for i in slices:  m_i = m[i]
    g' = mul g 0.1                                g_i = g[i]
    n  = add m' g'          ->                    n[i] = m_i * 0.9 + g_i * 0.1

A region grows forwards from given values, through elementwise equations that lead to a result of the program
by such equations alone, and takes in what is only computed for it. Two regions that meet are one. A region is
convex: nothing that it reads needs what it gives, so that it can stand in one place; where that would fail (a
norm of all updates scales each of them) it ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.axes.rules import ELEMENTWISE
from xform.trace import Jaxpr, JaxprEqn, Literal, Value, Var, at_equation, bind, fitted, shape_of

_NOT_SLICED = """
    sharding_constraint layout_constraint reshard relayout copy_p pvary preduced reduced_vary_cast
    vary_unreduced_cast xla_metadata_value random_fold_in random_gamma
"""
"""Elementwise operations that say where the whole lies, or that differ for a slice of it."""

SLICED = ELEMENTWISE - frozenset(_NOT_SLICED.split())


@dataclasses.dataclass(frozen=True)
class Region:
    """numbers: its equations. starts: the given values that it grew from. shape: of all its arrays."""

    numbers: tuple[int, ...]
    starts: tuple[Var, ...]
    shape: tuple[int, ...]


def find_regions(jaxpr: Jaxpr, starts: Sequence[Var]) -> list[Region]:
    """The regions of the top level of a program that grow from `starts`, each value in at most one."""
    found = _Regions(starts)
    leading = _leading(jaxpr)
    for number, eqn in enumerate(jaxpr.eqns):
        found.add(number, eqn, number in leading)
    found.take_in(jaxpr)
    members: dict[int, list[int]] = {}
    for number, region in found.home.items():
        members.setdefault(found.find(region), []).append(number)
    return [
        Region(
            tuple(sorted(numbers)),
            tuple(v for i, v in enumerate(starts) if found.find(i) == region),
            shape_of(starts[region]),
        )
        for region, numbers in sorted(members.items())
    ]


def _leading(jaxpr: Jaxpr) -> set[int]:
    """The elementwise equations that lead to a result of the program by such equations alone."""
    wanted = {v for v in jaxpr.outvars if isinstance(v, Var)}
    found: set[int] = set()
    for number in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[number]
        if not wanted.isdisjoint(eqn.outvars) and is_sliced(eqn):
            found.add(number)
            wanted.update(v for v in eqn.invars if isinstance(v, Var))
    return found


class _Regions:
    """Regions are numbered by the first start in them; joined ones by a union-find."""

    def __init__(self, starts: Sequence[Var]) -> None:
        self.parent = list(range(len(starts)))
        self.starts = frozenset(starts)
        self.shapes = [shape_of(v) for v in starts]
        self.of = {v: i for i, v in enumerate(starts)}  # the region that has a value
        self.behind: dict[Var, frozenset[int]] = {}  # regions that a value outside of them needs
        self.needs: list[frozenset[int]] = [frozenset()] * len(starts)  # regions that a region needs
        self.home: dict[int, int] = {}  # of equations

    def find(self, region: int) -> int:
        while self.parent[region] != region:
            region = self.parent[region]
        return region

    def add(self, number: int, eqn: JaxprEqn, leads: bool) -> None:
        """The next equation: of a region, or outside."""
        reads = [v for v in eqn.invars if isinstance(v, Var)]
        own = {self.find(self.of[v]) for v in reads if v in self.of}
        behind = frozenset[int]().union(*(self.behind.get(v, frozenset()) for v in reads))
        if own and leads and shape_of(eqn.outvars[0]) == self.shapes[min(own)] and self._join(own, behind):
            self.home[number] = self.find(min(own))
            self.of.update((v, self.home[number]) for v in eqn.outvars)
            return
        behind |= {self.find(self.of[v]) for v in reads if v in self.of and v not in self.starts}
        if behind:
            self.behind.update((v, behind) for v in eqn.outvars)

    def _join(self, regions: Collection[int], behind: frozenset[int]) -> bool:
        """Makes the regions one that needs also `behind`, unless it would then need itself."""
        needed = self._all_behind(behind.union(*(self.needs[r] for r in regions)))
        if needed & set(regions):
            return False
        first = min(regions)
        for r in regions:
            self.parent[r] = first
        self.needs[first] = frozenset(needed)
        return True

    def _all_behind(self, regions: Iterable[int]) -> set[int]:
        """The regions, and all that they need."""
        seen: set[int] = set()
        todo = [self.find(r) for r in regions]
        while todo:
            if (r := todo.pop()) not in seen:
                seen.add(r)
                todo += [self.find(n) for n in self.needs[r]]
        return seen

    def take_in(self, jaxpr: Jaxpr) -> None:
        """Elementwise equations whose results only one region reads become part of it."""
        outside = -1
        readers: dict[Var, set[int]] = {v: {outside} for v in jaxpr.outvars if isinstance(v, Var)}
        for number in range(len(jaxpr.eqns) - 1, -1, -1):
            eqn = jaxpr.eqns[number]
            homes = set[int]().union(*(readers.get(v, ()) for v in eqn.outvars))
            if number not in self.home and len(homes) == 1 and outside not in homes and is_sliced(eqn):
                (home,) = homes
                if shape_of(eqn.outvars[0]) == self.shapes[home]:
                    self.home[number] = home
            at = self.find(self.home[number]) if number in self.home else outside
            for v in eqn.invars:
                if isinstance(v, Var):
                    readers.setdefault(v, set()).add(at)


def is_sliced(eqn: JaxprEqn) -> bool:
    """Whether a slice of an equation's result follows from the same slice of its operands."""
    shape = shape_of(eqn.outvars[0]) if len(eqn.outvars) == 1 else ()
    if not shape or eqn.effects:
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and shape_of(eqn.invars[0]) == ()
    return eqn.primitive.name in SLICED and all(shape_of(v) in ((), shape) for v in eqn.invars)


def run_slice(
    eqns: Sequence[JaxprEqn], values: Mapping[Var, Value], shape: tuple[int, ...], axis: int, size: int
) -> dict[Var, Value]:
    """Evaluates the equations of a region on slices of `size` elements along `axis`; all their results.

    values: what they read, arrays of the region's shape as slices of it.
    """
    sliced = (*shape[:axis], size, *shape[axis + 1 :])
    env = dict(values)
    for eqn in eqns:
        args = [_literal(v) if isinstance(v, Literal) else env[v] for v in eqn.invars]
        params = eqn.params
        if eqn.primitive.name == "broadcast_in_dim":
            params = {**params, "shape": sliced}
        with at_equation(eqn):
            env.update(zip(eqn.outvars, bind(eqn, args, params), strict=True))
    return env


def _literal(v: Literal) -> Value:
    aval: Any = v.aval
    return fitted(np.asarray(v.val, aval.dtype), aval)


def in_slices(
    buffers: Sequence[Value],
    axis: int,
    size: int,
    body: Callable[[Callable[[Value], Value], Sequence[Value]], Sequence[Value]],
) -> list[Value]:
    """Fills `buffers`, arrays of one shape, in place, `size` elements along `axis` at a time.

    `body(take, now)` gives the slices of one turn; `now` are the buffers, `take` the slice of an array.
    """

    def turn(i: Value, now: Sequence[Value]) -> list[Value]:
        def take(x: Value) -> Value:
            return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)

        def put(buffer: Value, x: Value) -> Value:
            return jax.lax.dynamic_update_slice_in_dim(buffer, x, i * size, axis)

        return [put(b, x) for b, x in zip(now, body(take, now), strict=True)]

    return list(jax.lax.fori_loop(0, buffers[0].shape[axis] // size, turn, list(buffers)))
