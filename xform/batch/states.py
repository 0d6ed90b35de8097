"""What the microbatches of a batch have to do with a value: the same in each, rows of it, or a part of a sum.

A value of a program over the whole batch is computed in each microbatch from fewer rows. How the whole is had
from what the microbatches give is its `State`:

    same   each gives the whole value: it depends on no row
    rows   each gives its own rows, along dimension `dim`, each row `inner` entries long
    sum    the whole is the sum of what each gives (max and min alike)
    after  only to be computed from whole values, when all microbatches are through
    groups  each has its own: how many of its rows, sorted, each of several groups (experts) has
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xform.axes import Factor, Scope
from xform.errors import Decline
from xform.trace import JaxprEqn, Value, Var, shape_of, source_line
from xform.trace import Literal as Constant

Kind = Literal["same", "rows", "sum", "max", "min", "after", "groups"]


@dataclasses.dataclass(frozen=True)
class State:
    """`zero`: the same in each and known to be 0, so that it is a sum's beginning as well."""

    kind: Kind
    dim: int = -1
    inner: int = 1
    zero: bool = False

    @property
    def is_rows(self) -> bool:
        return self.kind == "rows"

    @property
    def is_same(self) -> bool:
        return self.kind == "same"

    @property
    def is_part(self) -> bool:
        """Whether microbatches give parts of it that are combined."""
        return self.kind in ("sum", "max", "min")


SAME, ZERO, AFTER = State("same"), State("same", zero=True), State("after")
GROUPS = State("groups")
SUM, MAX, MIN = State("sum"), State("max"), State("min")


def rows(dim: int, inner: int = 1) -> State:
    return State("rows", dim, inner)


class Mixes(Decline):
    """Rows of the batch meet where no sum of them is all that comes out; says at which operation."""


def join(a: State, b: State) -> State | None:
    """The state of what is one or the other, at the loop's turn or the branch's choice; None for no such."""
    if a == b:
        return a
    if a.is_same and b.is_same:
        return SAME
    for x, y in ((a, b), (b, a)):
        if (x.zero and y.kind == "sum") or (x.is_same and y.kind in ("max", "min")):
            return y
    return None


@dataclasses.dataclass(frozen=True)
class Split:
    """A batch of `whole` rows in `steps` microbatches, each in `groups` that are computed side by side.

    Row r of a group is row r // steps of microbatch r % steps, and the groups lie one after the other: so a
    batch that lies in blocks on the devices of a mesh is split without moving a row. Where there are too few
    rows for all to have equally many, the last row stands in the places that are left, and what is made of it
    there is cut off: it is as good a number as any, and nothing depends on it.
    """

    whole: int
    steps: int
    groups: int = 1

    @property
    def parts(self) -> int:
        return self.steps * self.groups

    @property
    def rows(self) -> int:
        """Of a group of a microbatch."""
        return -(-self.whole // self.parts)

    @property
    def spare(self) -> int:
        """The places that no row of the batch has."""
        return self.rows * self.parts - self.whole

    def part(self, n: int) -> int:
        """Of n entries along the rows, how many a group of a microbatch has."""
        return n // self.whole * self.rows if self.spare else n // self.parts

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions that go before those of a microbatch."""
        return (self.steps,) if self.groups == 1 else (self.steps, self.groups)

    def small(self, shape: Sequence[int], state: State) -> tuple[int, ...]:
        """A shape of the whole batch as it is in a group of a microbatch."""
        if not state.is_rows:
            return tuple(shape)
        return tuple(self.part(n) if i == state.dim else n for i, n in enumerate(shape))

    def apart(self, x: Value, state: State) -> Value:
        """Rows of the whole batch as [steps, groups, ...] (without groups where there is one)."""
        d, whole = state.dim, x.shape
        if self.spare:
            last = jax.lax.slice_in_dim(x, whole[d] - state.inner, whole[d], axis=d)
            x = jnp.concatenate([x, *[last] * self.spare], d)
        shape = x.shape
        own = shape[d] // (self.parts * state.inner)
        split = jnp.reshape(x, (*shape[:d], self.groups, own, self.steps, state.inner, *shape[d + 1 :]))
        front = jnp.moveaxis(split, (d + 2, d), (0, 1))
        return front.reshape(*self.lead, *self.small(whole, state))

    def together(self, x: Value, state: State) -> Value:
        """The whole batch of what the microbatches gave, [steps, groups, ...]."""
        d, shape = state.dim, x.shape[len(self.lead) :]
        own = shape[d] // state.inner
        split = jnp.reshape(x, (self.steps, self.groups, *shape[:d], own, state.inner, *shape[d + 1 :]))
        back = jnp.moveaxis(split, (0, 1), (d + 2, d))
        back = back.reshape(*shape[:d], self.parts * shape[d], *shape[d + 1 :])
        return jax.lax.slice_in_dim(back, 0, self.whole * state.inner, axis=d) if self.spare else back


@dataclasses.dataclass(frozen=True)
class Micro:
    """The microbatch at hand: its number, the group, and how the batch is split."""

    index: Value
    split: Split
    group: Value = 0

    @property
    def number(self) -> Value:
        """One for each group of each microbatch."""
        return self.index * self.split.groups + self.group

    def in_batch(self, row: Value) -> Value:
        """The number in the whole batch of a row here."""
        if self.split.groups > 1:
            row = row + (self.group * self.split.rows).astype(row.dtype)
        row = row * self.split.steps + self.index.astype(row.dtype)
        return jnp.minimum(row, self.split.whole - 1) if self.split.spare else row

    def entries(self, entry: Value, inner: int) -> Value:
        """The numbers in the whole batch of entries here, where each row is `inner` entries long."""
        return self.in_batch(entry // inner) * inner + entry % inner

    def here(self, row: Value) -> Value:
        """The number here of a row of the whole batch."""
        row = row // self.split.steps
        return row % self.split.rows if self.split.groups > 1 else row


Emit = Callable[[Sequence[Value], Micro], Sequence[Value]]
"""The equation at a microbatch's size, from its operands there."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an equation makes of its operands' states. `emit` is None where it is bound as it stands."""

    states: tuple[State, ...]
    emit: Emit | None = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """Which axis the batch is: its factors, major to minor; or the minor ones alone, where their size is a
    multiple of the microbatches, which then tell these apart as well. Row r is in microbatch r % steps.

    in_rule: in the rule of a derivative, where functions with a rule are no more than their bodies. groups:
    its rows are groups (experts), and what is sorted by them has no more than the rows of those at hand.
    """

    factors: tuple[Factor, ...]
    split: Split
    in_rule: bool = False
    groups: bool = False

    @property
    def size(self) -> int:
        """Of the axis: fewer than there are rows where it is the minor part of the batch."""
        return prod(f.size for f in self.factors)

    @property
    def is_minor(self) -> bool:
        """Whether the rows have a major part too, which is as any other axis."""
        return self.size < self.split.whole

    def of(self, scope: Scope, v: Var) -> State:
        """`rows` where the variable has a dimension of the batch, else `same`. Raises Mixes for any other."""
        found = []
        for d, dim in enumerate(scope[v]):
            if set(self.factors) & set(dim):
                n = len(self.factors)
                at = dim.index(self.factors[0]) if self.is_minor and self.factors[0] in dim else 0
                if dim[at : at + n] != self.factors:
                    raise Mixes("the batch is not the major part of a dimension")
                major = prod(f.size for f in dim[:at])
                found.append(rows(d, shape_of(v)[d] // (major * self.size)))
        if len(found) > 1:
            raise Mixes("every row meets every other")
        return found[0] if found else SAME


@dataclasses.dataclass
class Case:
    """An equation as a rule sees it."""

    eqn: JaxprEqn
    index: int
    states: Sequence[State]
    scope: Scope
    batch: Batch
    folded: list[str]  # the lines of the user's source at which each microbatch draws numbers of its own

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def split(self) -> Split:
        return self.batch.split

    def shape(self, k: int) -> tuple[int, ...]:
        """Of an operand."""
        return shape_of(self.eqn.invars[k])

    @property
    def out_shape(self) -> tuple[int, ...]:
        return shape_of(self.eqn.outvars[0])

    def new_rows(self) -> State:
        """The state of the result by its axes, for what is made of nothing that has rows."""
        return self.batch.of(self.scope, self.eqn.outvars[0])

    def everywhere(self, state: State) -> Outcome:
        return Outcome((state,) * len(self.eqn.outvars))

    @property
    def line(self) -> str:
        return source_line(self.eqn)


def constant_state(v: Constant) -> State:
    """A literal's state."""
    try:
        return ZERO if not shape_of(v) and v.val == 0 else SAME
    except TypeError:  # a key
        return SAME


def rowwise(case: Case) -> State:
    """The operand's state that has rows. Raises Mixes where another one has parts of a sum."""
    if any(s.is_part for s in case.states):
        raise Mixes("a sum over the batch is used for each of its rows")
    return next(s for s in case.states if s.is_rows)


def is_float(v: Any) -> bool:
    """Whether a variable, or a value, is one that can be differentiated."""
    return bool(jnp.issubdtype(getattr(v, "aval", v).dtype, jnp.inexact))


def is_bool(v: Any) -> bool:
    return bool(v.aval.dtype == jnp.bool_)
