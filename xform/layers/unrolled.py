"""The stacks of a body that stand in it block by block, found from their ends.

From each activation, last first, earlier ones that are made alike are tried as the result of the block
before; `repeats` matches the two blocks, and goes on to those before. Where an alignment of blocks holds, a
block may begin anywhere in it: taken is what makes the most blocks, then what has the least to carry.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from xform.axes import Scope
from xform.higher_order import bodies, operands
from xform.layers.blocks import Rows, aligned
from xform.layers.repeats import Step, View, alike, chain, match, part, settle
from xform.roles import Roles
from xform.trace import Atom, JaxprEqn, Var, shape_of

TRIES = 64
"""How many earlier values are tried as the result of the block before: a layer has several made alike."""


SAME_WEIGHTS = "blocks that are alike all read the same weights: there is nothing to stack"
TOO_MANY = "what comes before repeats in too many ways: it was not searched for layers"

LATER = 8
"""How many values after the end of a stack are tried as its end, that are made like what it carries."""

FOLLOWED = 8
"""How often, on average, an equation is matched before the search ends: a stack takes one or two, a long loop
through time, unrolled, has no end of alignments that come to nothing.
"""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Blocks that may be a stack: side by side, the steps they were found in, the step that went no
    further.
    """

    rows: Rows
    steps: list[Step]
    failed: Step | None

    @property
    def score(self) -> tuple[int, int, int, int]:
        """Most blocks, least carried, latest end."""
        size = sum(math.prod(shape_of(row[-1])) for row in self.rows.carried)
        end = max(row[-1] or 0 for row in self.rows.equations)
        return self.rows.blocks, -len(self.rows.carried), -size, end


@dataclasses.dataclass(frozen=True)
class Miss:
    """What is no stack, but nearly: where two blocks differ, or why they are none though they do not."""

    step: Step
    difference: tuple[Atom, Atom] | None
    why: str = ""


class Kinds:
    """What the roles say of the values of one body."""

    def __init__(self, roles: Roles, scope: Scope) -> None:
        self.roles, self.scope = roles, scope

    def is_activation(self, v: Any) -> bool:
        """Whether a value has the batch, or part of it: a microbatch."""
        roles = (role for dim in self.roles.of(self.scope, v) for role in dim)
        return self.roles.is_activation(self.scope, v) or any(r.startswith("batch") for r in roles)

    def is_stream(self, v: Any) -> bool:
        return is_real(v) and self.is_activation(v)

    def is_weight(self, v: Any) -> bool:
        return isinstance(v, Var) and is_real(v) and not self.is_activation(v)

    def is_matrix(self, v: Any) -> bool:
        """Whether a value is a weight of more than one dimension: a norm's scale alone makes no layer."""
        return self.is_weight(v) and len(shape_of(v)) > 1


class Finder:
    """The search of one body. `misses` has what was nearly a stack, by what differs."""

    def __init__(self, view: View, kinds: Kinds) -> None:
        self.view, self.kinds = view, kinds
        self.misses: dict[tuple[int, ...], Miss] = {}
        self._matched = 0  # pairs of equations, in all chains
        self._start: dict[
            tuple[int, int], int
        ] = {}  # two equations matched before -> where their chain begins
        self._alike: dict[tuple[int, int], list[int]] = {}
        self._ends: list[tuple[int, int]] = []
        for i, eqn in enumerate(view.eqns):
            for k, v in enumerate(eqn.outvars):
                if view.live[i] and v in view.readers and kinds.is_stream(v):
                    self._alike.setdefault((view.key[i], k), []).append(i)
                    self._ends.append((i, k))

    def run(self) -> Iterator[Candidate]:
        """The stacks, last first. Whoever takes one adds its equations to those taken."""
        for j, k in reversed(self._ends):
            if self._matched > FOLLOWED * len(self.view.eqns):
                self.misses[()] = Miss(Step([], {j: j}), None, TOO_MANY)
                return
            if j not in self.view.taken:
                best, near = self.ending(j, k)
                while best is not None and (longer := self.longer(best)) is not None:
                    best = longer
                if best is not None:
                    yield best
                    near = best.failed if self.is_near(best.failed) else None
                if near is not None:
                    self.miss(near)

    def longer(self, best: Candidate) -> Candidate | None:
        """A longer stack that ends with the first block of this one, which then is its last layer; or one
        layer later, in another of the values that are carried.
        """
        for row in best.rows.results:
            if not self.kinds.is_stream(row[0]):
                continue
            k = next(k for k, v in enumerate(self.view.eqns[self.view.maker[row[0]]].outvars) if v is row[0])
            ends = [self.view.maker[v] for v in row if v is not None]
            later = (i for i in self._alike.get((self.view.key[ends[0]], k), ()) if i > ends[-1])
            for j in (ends[0], *itertools.islice(later, LATER)):
                other, _ = self.ending(j, k)
                if other is not None and other.rows.covered > best.rows.covered:
                    return other
        return None

    def ending(self, j: int, k: int) -> tuple[Candidate | None, Step | None]:
        """The longest stack whose last block has result k of equation j; and the first near miss."""
        view, best, near, limit, tries = self.view, None, None, j, 0
        for i in reversed(self._alike.get((view.key[j], k), ())):
            if i >= limit or i in view.taken:
                continue
            if (i, j) in self._start:
                limit = self._start[i, j]
                continue
            if (tries := tries + 1) > TRIES:
                break
            step = self.step(view.eqns[i].outvars[k], view.eqns[j].outvars[k])
            if step is not None and step.differences:
                near = near or (step if self.is_near(step) else None)
            elif step is not None:
                candidate, limit = self.longest(step)
                if candidate is not None and (best is None or candidate.rows.covered > best.rows.covered):
                    best = candidate
        return best, None if best is not None else near or self.near_call(j)

    def step(self, a: Var, b: Var) -> Step | None:
        """Two blocks, if `a` is a result of the first that the second takes, b the second's own."""
        step = match(self.view, [(a, b)])
        if a not in step.carried:
            return None
        part(self.view, step)
        if not step.differences:
            settle(self.view, step, a)
        return step

    def longest(self, step: Step) -> tuple[Candidate | None, int]:
        """The best stack with this alignment of blocks, wherever a block is said to begin; and the end of the
        first block.
        """
        view = self.view
        steps, failed = chain(view, step)
        start = view.made_by(steps[-1].seeds[0][0]) or 0
        for each in steps:
            self._start.update(((i, j), start) for j, i in each.pairs.items())
            self._matched += len(each.pairs)
        parts = [pair for each in steps for pair in each.stops if all(map(is_real, pair))]
        if parts and not any(all(map(self.kinds.is_matrix, pair)) for pair in parts):
            return None, start  # they differ in data: steps through time, microbatches
        turned = list(self.turned(step))
        fewest = min(len(each.carried) for each in (step, *turned))
        chains = [(steps, failed), *(chain(view, each) for each in turned if len(each.carried) == fewest)]
        candidates = [
            Candidate(rows, steps, failed)
            for steps, failed in chains
            if (rows := aligned(view, steps)) is not None
        ]
        best = max(candidates, key=lambda c: c.score, default=None)
        if best is None or self.is_stack(best.rows, best.rows.own):
            return best, start
        if not best.rows.own and self.is_stack(best.rows, [(v,) for v in best.rows.shared]):
            self.misses.setdefault(
                tuple(sorted(map(id, best.rows.shared))), Miss(best.steps[0], None, SAME_WEIGHTS)
            )
        return None, start

    def turned(self, step: Step) -> Iterator[Step]:
        """The same alignment with the blocks beginning elsewhere, where something like what is carried is."""
        types = [v for v in step.carried if self.kinds.is_stream(v)]
        for j, i in sorted(step.pairs.items(), reverse=True):
            for a, b in zip(self.view.eqns[i].outvars, self.view.eqns[j].outvars, strict=True):
                if b is not step.seeds[0][1] and any(alike(b, v) for v in types):
                    other = self.step(a, b)
                    if other is not None and not other.differences:
                        yield other

    def is_stack(self, rows: Rows, weights: Iterable[tuple[Atom, ...]]) -> bool:
        """Whether blocks carry the residual stream, which meets matrices among these weights in each."""
        stream = {row[-1] for row in rows.carried if self.kinds.is_stream(row[-1])}
        matrices = {row[-1] for row in weights if all(self.kinds.is_matrix(v) for v in row)}
        return meets(
            [self.view.eqns[row[-1]] for row in rows.equations if row[-1] is not None], stream, matrices
        )

    def is_near(self, step: Step | None) -> bool:
        """Whether two blocks that differ have most in common, weights of their own among it."""
        if step is None or not step.differences or not step.pairs:
            return False
        view = self.view
        own = any(self.kinds.is_weight(a) and self.kinds.is_weight(b) for a, b in step.stops)
        first = min(view.maker[w] for w in step.carried) if step.carried else 0
        todo, block = [view.maker[step.seeds[0][1]]], set[int]()
        while todo:
            at = todo.pop()
            if at > first and at not in block:
                block.add(at)
                todo += [m for v in view.eqns[at].invars if (m := view.made_by(v)) is not None]
        return own and 2 * len(step.pairs) >= len(block)

    def near_call(self, j: int) -> Step | None:
        """A layer that is one call (remat, jit), and takes the result of another that is mostly the same."""
        view, eqn = self.view, self.view.eqns[j]
        for v in eqn.invars if bodies(eqn) else ():
            i = view.made_by(v)
            if i is None or not self.kinds.is_stream(v) or i in view.taken or view.key[i] == view.key[j]:
                continue
            before = view.eqns[i]
            both = zip(bodies(before), bodies(eqn), strict=False)
            if before.primitive is not eqn.primitive or len(before.outvars) != len(eqn.outvars):
                continue
            for one, other in both:
                a, b = (Counter(map(view.keys.of, body.eqns)) for body in (one, other))
                weights = any(map(self.kinds.is_matrix, eqn.invars))
                if weights and 2 * (a & b).total() >= b.total() > 1:
                    step = Step([(before.outvars[0], eqn.outvars[0])], {j: i})
                    step.differences.append(step.seeds[0])
                    return step
        return None

    def miss(self, step: Step) -> None:
        """Notes a near miss, once for each difference: of several, that with the least to carry.

        It is the difference nearest to the beginning of the block, inputs before all.
        """
        a, b = min(step.differences, key=lambda pair: self.view.made_by(pair[1]) or 0)
        noted = self.misses.setdefault((id(a), id(b)), Miss(step, (a, b)))
        if len(step.carried) < len(noted.step.carried):
            self.misses[id(a), id(b)] = Miss(step, (a, b))


def is_real(v: Any) -> bool:
    """Whether a value is an array of floating-point numbers."""
    dtype = getattr(v.aval, "dtype", np.int32)
    return bool(shape_of(v)) and jax.dtypes.issubdtype(dtype, np.inexact)


def meets(eqns: Iterable[JaxprEqn], stream: Iterable[Any], weights: Iterable[Any]) -> bool:
    """Whether some operation, at any depth, is of one value made of the stream and one made of weights alone.

    Adding up what heads or experts made of the same input is not: there the weights meet the input.
    """
    made, own = set(stream), set(weights)
    for eqn in eqns:
        from_stream = any(isinstance(v, Var) and v in made for v in eqn.invars)
        from_weights = any(isinstance(v, Var) and v in own for v in eqn.invars)
        if from_stream and from_weights:
            inside = bodies(eqn)
            if not inside:
                return True
            for number, body in enumerate(inside):
                at = operands(eqn, number)
                given = [(v, eqn.invars[i]) for v, i in zip(body.invars, at, strict=True) if i is not None]
                given = [(v, w) for v, w in given if isinstance(w, Var)]
                if meets(body.eqns, {v for v, w in given if w in made}, {v for v, w in given if w in own}):
                    return True
        if from_stream:
            made.update(eqn.outvars)
        elif from_weights and all(v in own for v in eqn.invars if isinstance(v, Var) and is_real(v)):
            own.update(eqn.outvars)
    return False
