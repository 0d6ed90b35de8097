"""Rows of an array in another order: what a stack of layers is to the stages that run it.

    x = by_stage(w, (0, 2, 1, 3))          x[1] is w[2]
    w = in_own_order(x, (0, 2, 1, 3))      w[2] is x[1]

Stages that run several chunks of layers each have rows that lie apart. Each of the two is one equation, and
the gradient of one goes back by the other; `xform.ordering` has the state stored so that both fall away.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xform.ops.operation import apply, operation_of
from xform.trace import JaxprEqn, Value, typeof

MANY = 128
"""More runs of rows than layers on stages have."""


@dataclasses.dataclass(frozen=True)
class Reorder:
    """The rows along `dim` of an array of `rank` dimensions: new[i] = old[order[i]]; the other way, where it
    goes back. is_length: rows are the tokens of a text, which come in the model's own order with every call;
    else they are layers, whose arrays can be stored in the other.
    """

    order: tuple[int, ...]
    rank: int
    dim: int = 0
    goes_back: bool = False
    is_length: bool = False

    @property
    def name(self) -> str:
        return "in_own_order" if self.goes_back else "balanced" if self.is_length else "by_stage"

    @property
    def operands(self) -> tuple[str, ...]:
        return (string.ascii_lowercase[: self.rank],)

    @property
    def results(self) -> tuple[str, ...]:
        return self.operands

    @property
    def cut(self) -> str:
        (dims,) = self.operands
        return dims[: self.dim] + dims[self.dim + 1 :]

    @property
    def interpret(self) -> bool:
        return False

    @property
    def back(self) -> Reorder:
        return dataclasses.replace(self, goes_back=not self.goes_back)

    @property
    def batched(self) -> Reorder:
        return dataclasses.replace(self, rank=self.rank + 1, dim=self.dim + 1)

    @property
    def taken(self) -> tuple[int, ...]:
        """For each new row the old one that it is."""
        return inverse(self.order) if self.goes_back else self.order

    def plain(self, x: Value) -> Sequence[Value]:
        found = runs(self.taken)
        if len(found) > MANY and (sizes := turned(self.taken)) is not None:
            return [_looked_up(x, self._rows(sizes), self.dim)]
        parts = [jax.lax.slice_in_dim(x, a, b, axis=self.dim) for a, b in found]
        return [jax.lax.concatenate(parts, self.dim) if len(parts) > 1 else x]

    def kernel(self, x: Value) -> Sequence[Value]:
        return [take(x, self.taken, self.dim)]

    def _rows(self, sizes: tuple[int, int, int]) -> Value:
        """What is taken, as the program counts it: a reshape would have the length be two axes everywhere."""
        a, b, c = sizes
        at = jax.lax.iota(np.int32, a * b * c)
        return (at // c % a * b + at // (a * c)) * c + at % c


def by_stage(x: Value, order: Sequence[int], dim: int = 0) -> Value:
    """The rows of x along a dimension in this order: new[i] = x[order[i]]. x itself where that is its own.

    Raises ValueError where `order` does not have each row once.
    """
    return _reordered(x, Reorder(tuple(map(int, order)), _rank(x), dim))


def balanced(x: Value, order: tuple[int, ...], dim: int) -> Value:
    """The tokens of x along a dimension in this order, as `by_stage`."""
    return _reordered(x, Reorder(order, _rank(x), dim, is_length=True))


def in_own_order(x: Value, order: Sequence[int], dim: int = 0) -> Value:
    """The rows of `by_stage(., order)` as they were: new[order[i]] = x[i]."""
    return _reordered(x, Reorder(tuple(map(int, order)), _rank(x), dim, goes_back=True))


def in_text_order(x: Value, order: tuple[int, ...], dim: int) -> Value:
    """The tokens of `balanced(., order)` as they were."""
    return _reordered(x, Reorder(order, _rank(x), dim, goes_back=True, is_length=True))


def reorder_of(eqn: JaxprEqn) -> Reorder | None:
    """The reordering that an equation is; None where it is something else."""
    op = operation_of(eqn)
    return op if isinstance(op, Reorder) else None


def take(x: Value, rows: Sequence[int], dim: int) -> Value:
    """new[i] = x[rows[i]] along a dimension, with little sent where it lies over devices: chunks that stages
    take in turn are a transpose.
    """
    sizes = turned(rows)
    if sizes is None:
        return _looked_up(x, np.asarray(rows), dim)
    split = jnp.reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))
    return jnp.reshape(jnp.swapaxes(split, dim, dim + 1), x.shape)


def _looked_up(x: Value, rows: Value, dim: int) -> Value:
    at = (slice(None),) * dim + (rows,)
    return x.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False, unique_indices=True)


def turned(order: Sequence[int]) -> tuple[int, int, int] | None:
    """(a, b, c) of an order that is rows [a, b, c] as [b, a, c], one that stages give: None of any other."""
    first, chunk = runs(order)[0]
    step, left = divmod(order[chunk] - first, chunk) if 0 == first < chunk < len(order) else (0, 0)
    if step < 1 or left or len(order) % (step * chunk):
        return None
    sizes = len(order) // (step * chunk), step, chunk
    made = np.arange(len(order)).reshape(sizes).swapaxes(0, 1).ravel()
    return sizes if tuple(made) == tuple(order) else None


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Where each row is in that order."""
    place = {row: i for i, row in enumerate(order)}
    return tuple(place[row] for row in range(len(order)))


def runs(order: Sequence[int]) -> list[tuple[int, int]]:
    """The order as runs of rows that follow one another: (first, after the last)."""
    found = []
    for _, group in itertools.groupby(enumerate(order), lambda pair: pair[1] - pair[0]):
        rows = [row for _, row in group]
        found.append((rows[0], rows[-1] + 1))
    return found


def _rank(x: Value) -> int:
    return len(typeof(x).shape)


def _reordered(x: Value, op: Reorder) -> Value:
    rows = range(typeof(x).shape[op.dim])
    if sorted(op.order) != list(rows):
        raise ValueError(f"{op.name}: {op.order} is no order of the {len(rows)} rows of dimension {op.dim}")
    return x if op.order == tuple(rows) else apply(op, x)[0]
