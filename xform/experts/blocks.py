"""The rows of a device's experts, a block at a time, as many blocks as there are rows for.

    while start < rows:  out[start:] = f(x[order[start:]], w);  start += size

How many rows the experts of a device get is known only when tokens have chosen, and may be all; what is
computed and held is for those that there are. Rows are sorted, those of no concern last. The backward pass is
a loop of its own, in which the gradients of weights are added up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.experts.combining import added
from xform.experts.function import LOOKED, Function
from xform.experts.operation import CHOICE, COUNTS, IDS, TOKEN
from xform.experts.routes import ordered
from xform.raising.flat import dtype_of
from xform.trace import Value

WEIGHT = -1
"""The number of what results are multiplied with, among what is taken."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """ids [rows]: the number of the expert of each choice; local: among those here, their count and more for
    others; own: which are to be computed, None for all; experts: how many there are here.
    """

    ids: Value
    local: Value
    own: Value | None
    experts: int


def computed(
    function: Function,
    rows: Rows,
    given: Sequence[Value],
    weights: Value | None,
    choices: int,
    size: int,
) -> tuple[Value, Value, Value]:
    """The function's results for all choices of tokens in the order of experts, that order, and its inverse;
    for those that are not to be computed zeros. given: what it takes besides numbers of experts. size: rows
    at once.
    """
    order = jnp.argsort(rows.local)
    back = jnp.argsort(order)
    counts = jnp.bincount(rows.local, length=rows.experts).astype(jnp.int32)
    looked = rows.local[order]
    if rows.own is not None:
        there = jnp.sum(rows.own).astype(jnp.int32)  # they come first
        looked = jnp.where(jnp.arange(order.shape[0]) < there, looked, 0)  # for the others a number
    known = dict(zip(function.taken, given, strict=True))
    moved: dict[int, Value] = {}
    for n, x in known.items():
        if function.takes[n] in (TOKEN, CHOICE):
            of = choices if function.takes[n] == TOKEN else 1
            known[n] = x if of > 1 else x.reshape(order.shape[0], *_shape(function, n)[1:])
            moved[n] = of
    if weights is not None:
        known[WEIGHT], moved[WEIGHT] = weights.reshape(-1), 1
    numbers = order, back, rows.ids[order], looked, counts
    if rows.own is None or order.shape[0] <= size:
        takes = {n: ordered(x, order, back, moved[n]) if n in moved else x for n, x in known.items()}
        made = _run(function, takes, numbers[2], looked, counts)
    else:
        each = tuple(moved.get(n, 0) for n in known)
        made = _in_blocks(function, each, size, there, numbers, tuple(known.values()))
    if rows.own is not None:
        own = (jnp.arange(order.shape[0]) < there).reshape(-1, *(1,) * (made.ndim - 1))
        made = jnp.where(own, made, jnp.zeros((), made.dtype))
    return made, order, back


def _shape(function: Function, n: int) -> tuple[int, ...]:
    aval: Any = function.jaxpr.invars[n].aval
    return tuple(aval.shape)


def _run(function: Function, known: Mapping[int, Value], ids: Value, looked: Value, counts: Value) -> Value:
    """The function of rows that are sorted."""
    takes: list[Any] = []
    for n, (v, kind) in enumerate(zip(function.jaxpr.invars, function.takes, strict=True)):
        dtype = dtype_of(v)
        if kind == IDS:
            takes.append(ids.astype(dtype))
        elif kind == COUNTS:
            takes.append(counts.astype(dtype))
        elif kind == LOOKED:
            takes.append(known[n].at[looked].get(**function.lookups[n]))
        else:
            takes.append(known[n])
    made = function.run(takes)
    if WEIGHT not in known:
        return made
    wide = jnp.promote_types(made.dtype, jnp.float32)
    weights = known[WEIGHT].astype(wide).reshape(-1, *(1,) * (made.ndim - 1))
    return (made.astype(wide) * weights).astype(made.dtype)


# ---------------------------------------------------------------- the loop


Numbers = tuple[Value, Value, Value, Value, Value]
"""order and its inverse; in that order the number of each row's expert, as given and as looked up; counts."""


def _block(function: Function, of: Sequence[int], numbers: Numbers, start: Value, size: int) -> Any:
    """The function of the rows from `start` on, of rows that are taken and of what is the same for all."""
    _, _, ids, looked, counts = numbers
    ends = jnp.cumsum(counts)
    here = jnp.diff(jnp.clip(ends - start, 0, size), prepend=0)

    def run(args: Sequence[Value]) -> Value:
        known = dict(zip((*function.taken, WEIGHT), args, strict=False))
        return _run(function, known, _part(ids, start, size), _part(looked, start, size), here)

    return run


def _part(x: Value, start: Value, size: int) -> Value:
    return lax.dynamic_slice_in_dim(x, start, size)


def _filled(x: Value, size: int) -> Value:
    """As many rows as whole blocks have."""
    return jnp.pad(x, [(0, -x.shape[0] % size), *[(0, 0)] * (x.ndim - 1)])


def _taken(of: Sequence[int], at: Value, given: Sequence[Value]) -> list[Value]:
    return [x.at[at // k].get(mode="promise_in_bounds") if k else x for k, x in zip(of, given, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_blocks(
    function: Function,
    of: tuple[int, ...],
    size: int,
    there: Value,
    numbers: Numbers,
    given: tuple[Value, ...],
) -> Value:
    order, back, *rest, counts = numbers
    at, *rest = (_filled(x, size) for x in (order, *rest))
    filled: Any = (at, back, *rest, counts)

    def block(start: Value) -> Value:
        return _block(function, of, filled, start, size)(_taken(of, _part(at, start, size), given))

    out = jax.eval_shape(block, jnp.int32(0))

    def turn(i: Value, made: Value) -> Value:
        return lax.dynamic_update_slice_in_dim(made, block(i * size), i * size, 0)

    empty = lax.empty((at.shape[0], *out.shape[1:]), out.dtype)  # what no block writes is not looked at
    made = lax.fori_loop(0, -(-there // size), turn, empty)
    return made[: order.shape[0]]


def _forward(
    function: Function,
    of: tuple[int, ...],
    size: int,
    there: Value,
    numbers: Numbers,
    given: tuple[Value, ...],
) -> tuple[Value, Any]:
    return _in_blocks(function, of, size, there, numbers, given), (there, numbers, given)


def _backward(
    function: Function, of: tuple[int, ...], size: int, saved: Any, dz: Value
) -> tuple[None, None, tuple[Value | None, ...]]:
    there, (order, back, *rest, counts), given = saved
    dy = _filled(dz, size)
    at, *rest = (_filled(x, size) for x in (order, *rest))
    filled: Any = (at, back, *rest, counts)
    floats = [n for n, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def turn(i: Value, sums: list[Value]) -> list[Value]:
        start = i * size
        taken = _taken(of, _part(at, start, size), given)

        def run(*some: Value) -> Value:
            args = list(taken)
            for n, x in zip(floats, some, strict=True):
                args[n] = x
            return _block(function, of, filled, start, size)(args)

        found = jax.vjp(run, *(taken[n] for n in floats))[1](_part(dy, start, size))
        return [
            lax.dynamic_update_slice_in_dim(total, x, start, 0)
            if of[n]
            else jnp.where(i > 0, total, jnp.zeros((), x.dtype)) + x
            for n, total, x in zip(floats, sums, found, strict=True)
        ]

    def empty(n: int) -> Value:
        x = given[n]
        return lax.empty((at.shape[0], *x.shape[1:]) if of[n] else x.shape, x.dtype)

    # One turn at least, which begins the sums.
    turns = jnp.maximum(-(-there // size), 1)
    sums = lax.fori_loop(0, turns, turn, [empty(n) for n in floats])
    gradients: dict[int, Value] = {}
    for n, total in zip(floats, sums, strict=True):
        if of[n]:
            own = jnp.arange(at.shape[0]) < there
            total = jnp.where(own.reshape(-1, *(1,) * (total.ndim - 1)), total, jnp.zeros((), total.dtype))
            total = added(total, back.reshape(-1, of[n]))
        gradients[n] = total
    return None, None, tuple(gradients.get(n) for n in range(len(given)))


_in_blocks.defvjp(_forward, _backward)
