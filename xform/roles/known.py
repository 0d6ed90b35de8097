"""The evidence with what follows from it and from the roles told so far: data, weights, attention, tables.

`Known` is what the rules of `rules` look at. Nothing in it is a decision: it sorts dots into those of an
activation and a weight and those of two activations, finds the dots that make attention scores, and counts
who has which axis. All of it follows from which axis is the batch, so that is told first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from xform.axes import Factor, Scope
from xform.roles.evidence import (
    NONE,
    Conv,
    Dot,
    Evidence,
    Factors,
    Maximum,
    Pick,
    factors,
    inside,
    outside,
    union,
)
from xform.trace import JaxprEqn, Literal, Var


class Known:
    """The evidence, the roles told so far, and what follows from both."""

    def __init__(self, evidence: Evidence) -> None:
        self.e = evidence
        self.role: dict[Factor, str] = {}

    def having(self, *roles: str) -> Factors:
        return frozenset(f for f, role in self.role.items() if role in roles)

    # Data

    @cached_property
    def data(self) -> list[Var]:
        """The inputs of integers, but keys: tokens, labels, segments, positions."""
        jaxpr = self.e.axes.jaxpr
        return [v for v in jaxpr.invars if is_data(v)] or [v for v in jaxpr.constvars if is_data(v)]

    @cached_property
    def candidates(self) -> Factors:
        """The axes of the data: batch and length are among them."""
        return union(factors(self.e.axes.root[v]) for v in self.data)

    @cached_property
    def data_axes(self) -> Factors:
        """The axes of the data that come with a batch."""
        found = [factors(self.e.axes.root[v]) for v in self.data]
        return union(found if not self.batch else (d for d in found if d & self.batch))

    @cached_property
    def batch(self) -> Factors:
        return self.having("batch")

    def is_activation(self, side: Factors) -> bool:
        return not side.isdisjoint(self.batch or self.candidates)

    # Weights

    @cached_property
    def weight_dots(self) -> list[tuple[Dot, int]]:
        """Dots of an activation and a weight, with the side of the weight."""
        found = []
        for dot in self.e.dots:
            left, right = map(self.is_activation, dot.sides)
            if left != right:
                side = 1 if left else 0
                if self.e.source(dot.scope, dot.operands[side]) is not None:
                    found.append((dot, side))
        return found

    @cached_property
    def convs(self) -> list[Conv]:
        """Convolutions of an activation with a kernel; those that make a kernel's gradient are none."""
        return [conv for conv in self.e.convs if [*map(self.is_activation, conv.sides)] == [True, False]]

    @cached_property
    def uses(self) -> list[tuple[Var, Factors]]:
        """Each weight with its factors in a dot, once; where one is a sum, once more for each part in its
        place.
        """
        found: dict[tuple[Var, Factors], None] = {}
        for dot, side in self.weight_dots:
            source = self.e.source(dot.scope, dot.operands[side])
            assert source is not None
            for use in _expanded(dot.sides[side]):
                found[source, use] = None
        return list(found)

    @cached_property
    def first_uses(self) -> list[tuple[Factors, Factors]]:
        """What each weight contracts and what it makes where it is used first: forward, not in a gradient.

        Dots that batch experts count as well, where tokens were gathered into the experts' own axes.
        """
        sided = list(self.weight_dots)
        for dot in self.e.dots:
            if dot.batch & self.having("experts"):
                sources = [self.e.source(dot.scope, v) for v in dot.operands]
                sided += [(dot, i) for i in (0, 1) if sources[i] is not None and sources[1 - i] is None]
        first: dict[Var, tuple[Dot, int]] = {}
        for dot, side in sided:
            source = self.e.source(dot.scope, dot.operands[side])
            assert source is not None
            first.setdefault(source, (dot, side))
        uses = ((dot.contract, use) for dot, side in first.values() for use in _expanded(dot.sides[side]))
        return [(use & contract, use - contract) for contract, use in uses]

    @cached_property
    def weights(self) -> Factors:
        """All factors of weights."""
        return union(use for _, use in self.uses)

    @cached_property
    def count(self) -> Counter[Factor]:
        """How many weights have a factor."""
        return Counter(f for _, f in {(source, f) for source, use in self.uses for f in use})

    # Attention

    @cached_property
    def act_dots(self) -> list[Dot]:
        """Dots of two activations, of each example with itself: the batch, where there is one, is not
        contracted.
        """
        return [d for d in self.e.dots if all(map(self.is_activation, d.sides)) and self.batch <= d.batch]

    @cached_property
    def softmaxes(self) -> list[tuple[Maximum, Factors]]:
        """Maxima of attention scores, with the axes along which they are taken: the keys."""
        met = union(d.result | d.contract for d in self.act_dots)
        found = []
        for maximum in self.e.maxima:
            keys = (maximum.reduced & met) - self.weights - self.batch
            if keys and self.is_activation(maximum.rest | maximum.reduced):
                found.append((maximum, keys))
        return found

    @cached_property
    def keys(self) -> Factors:
        return union(keys for _, keys in self.softmaxes)

    @cached_property
    def score_dots(self) -> list[tuple[Dot, Factors]]:
        """Dots that make scores, or their gradient, with what is free on the side of the queries."""
        found = []
        for dot in self.act_dots:
            features = dot.contract
            if not features or features & (self.keys | self.candidates):
                continue
            if self.uses and not all(self._is_weights(f) for f in features):
                continue
            for queries, keys in ((dot.left, dot.right), (dot.right, dot.left)):
                if keys & self.keys and keys <= self.keys and self._is_softmaxed(queries, keys):
                    found.append((dot, queries))
                    break
        return found

    def _is_softmaxed(self, queries: Factors, keys: Factors) -> bool:
        """Whether a softmax along keys has these queries; a product that sends tokens to experts has none."""
        return any(keys & along and queries <= maximum.rest for maximum, along in self.softmaxes)

    def _is_weights(self, f: Factor) -> bool:
        return f in self.weights or any(self._is_weights(g) for _, dim in f.parts for g in dim)

    @cached_property
    def scores(self) -> Factors:
        """All axes of attention scores but the batch."""
        return union(dot.result for dot, _ in self.score_dots) - self.batch

    @cached_property
    def lengths(self) -> Factors:
        """What attention runs over, and the data's axes that are neither batch nor part of a weight."""
        queries = union(q for _, q in self.score_dots if self.uses or len(q) == 1)
        return (self.data_axes | self.keys | queries) - self.batch - self.weights

    @cached_property
    def states(self) -> list[Dot]:
        """Dots that sum outer products of keys and values over the length, head by head: linear attention."""
        return [
            d
            for d in self.act_dots
            if d.contract
            and d.contract <= self.lengths - self.scores
            and all(side & self.weights for side in (d.batch, d.left, d.right))
        ]

    @cached_property
    def inputs(self) -> list[Factors]:
        """The factors of the program's inputs that have a batch."""
        found = (factors(self.e.axes.root[v]) for v in self.e.axes.jaxpr.invars)
        return [fs for fs in found if self.is_activation(fs)]

    # Tables

    @cached_property
    def tables(self) -> list[tuple[Pick, frozenset[str]]]:
        """Single rows taken from an input that is no activation, with the origin of the indices."""
        found = []
        for pick in (*self.e.picks, *self.e.indexed):
            table = len(pick.rows) == 1 and pick.window and not self.is_activation(pick.factors)
            if table and self.e.source(pick.scope, pick.operand) is not None:
                found.append((pick, self.e.origin(pick.scope, pick.indices)))
        return found

    @cached_property
    def one_hots(self) -> Factors:
        """Classes into which the data's integers point."""
        return union(along for along, scope, v in one_hots(self.e) if self.points_from_data(scope, v))

    def points_from_data(self, scope: Scope, integers: Any) -> bool:
        origin = self.e.origin(scope, integers)
        return "data" in origin and "computed" not in origin

    def choices(self, among: Factors) -> Iterator[Factors]:
        """Axes into which integers point that a top_k or argmax chose among these: one-hot classes, and
        indexed rows.
        """
        for along, scope, v in one_hots(self.e):
            if self.e.chosen_from(scope, v) & among:
                yield along
        for pick in self.e.picks:
            if self.e.chosen_from(pick.scope, pick.indices) & among:
                yield pick.rows & self.weights


def is_data(v: Var) -> bool:
    """Whether an input is an array of integers, but no key: what comes from a data set."""
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or not getattr(v.aval, "shape", ()):
        return False
    kind = getattr(dtype, "kind", "V")
    return kind == "b" or (kind == "i" and dtype.itemsize > 1) or dtype == np.uint8


def _expanded(use: Factors) -> Iterator[Factors]:
    yield use
    for f in sorted(use, key=lambda f: f.id):
        for part in f.sum:
            yield from _expanded((use - {f}) | frozenset(part))


def one_hots(e: Evidence) -> Iterator[tuple[Factors, Scope, Any]]:
    """Axes along which integers are compared with a count, and the integers: the classes of a one-hot
    encoding.
    """
    for scope, eqn in e.compared:
        for counted, other in (eqn.invars, eqn.invars[::-1]):
            if not isinstance(counted, Literal) and not isinstance(other, Literal):
                along = _varies_along(e, scope, counted) - _varying(e, scope, other)
                if along:
                    yield along, scope, other


def _varies_along(e: Evidence, scope: Scope, var: Any) -> Factors:
    """The axis of an iota, broadcast."""
    for where, eqn in _back(e, scope, var):
        if eqn.primitive.name == "iota":
            return factors([where[eqn.outvars[0]][eqn.params["dimension"]]])
    return NONE


def _varying(e: Evidence, scope: Scope, var: Any) -> Factors:
    """The axes that a broadcast value had before."""
    for where, eqn in _back(e, scope, var):
        if eqn.primitive.name == "broadcast_in_dim":
            return factors(where[eqn.invars[0]])
    return factors(scope[var])


def _back(e: Evidence, scope: Scope, var: Any) -> Iterator[tuple[Scope, JaxprEqn]]:
    """The chain of equations with one operand that made a value, last first."""
    while not isinstance(var, Literal):
        index = scope.makers.get(var)
        if index is None:
            outer = None if scope.parent is None else outside(scope, var)
            if scope.parent is None or outer is None:
                return
            scope, var = scope.parent, outer
            continue
        eqn = scope.jaxpr.eqns[index]
        inner = inside(scope, index, eqn, var)
        if inner is not None:
            scope, var = inner
            continue
        yield scope, eqn
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "transpose"):
            return
        var = eqn.invars[0]
