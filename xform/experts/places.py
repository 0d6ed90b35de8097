"""Sums over the places of experts, of masks that say which token has which place, without the masks.

    sum_c (wants[m,x] * (place[m] == c))    ->    wants[m,x] * (0 <= place[m] < places)

A mask is a product of what has no places with a comparison with their numbers, somewhere. The sum is taken
in to where that is; what is not known to let it in is summed over as it is. With a number for each place the
sum is weighed by these: so it can be told what a mask is without making it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.experts.numbers import own_value
from xform.raising.flat import View, dtype_of
from xform.raising.following import static
from xform.raising.indices import SAME
from xform.trace import Atom, JaxprEqn, Literal, Value, Var, bind, shape_of

Read = Callable[[Var], Value]
"""The value of a variable of the view."""


@dataclasses.dataclass
class Places:
    """Sums over a dimension of values of a view.

    weights: a number for each place, in the place of ones; sums are of float32 then. taken: all variables
    that were read. alone: what the sums rest upon: values that have to be zero but at one place at most,
    the dimension of places, the first of them and how many.
    """

    view: View
    read: Read
    weights: Any = None

    def __post_init__(self) -> None:
        self.taken: dict[Var, None] = {}
        self.alone: list[tuple[Atom, int, int, int]] = []
        self.static = static(self.view)

    def sum(self, atom: Atom, dim: int, first: int = 0, count: int | None = None) -> Value:
        """The sum over the places from `first` on, of so many, in the order of the other dimensions."""
        count = shape_of(atom)[dim] - first if count is None else count
        inner = self._inside(atom, dim, first, count)
        return self._whole(atom, dim, first, count) if inner is None else inner

    def value(self, atom: Atom) -> Value:
        if isinstance(atom, Literal):
            return atom.val
        self.taken[atom] = None
        return self.read(atom)

    # ------------------------------------------------------------ sums as they are

    def _numbers(self, count: int) -> Value:
        return np.ones(count, np.float32) if self.weights is None else self.weights[:count]

    def _whole(self, atom: Atom, dim: int, first: int, count: int) -> Value:
        x = jax.lax.slice_in_dim(self.value(atom), first, first + count, axis=dim)
        if self.weights is None:
            return x.sum(dim, dtype=jnp.int32 if x.dtype == bool else x.dtype)
        shape = [1] * x.ndim
        shape[dim] = count
        return (x.astype(np.float32) * self.weights[:count].reshape(shape)).sum(dim)

    def _fixed(self, atom: Atom, dim: int) -> Value | None:
        """A value that is the same all along a dimension, without it; None where that is not known."""
        if isinstance(atom, Literal):
            return atom.val if not np.ndim(atom.val) else None
        if shape_of(atom)[dim] == 1:
            return jnp.squeeze(self.value(atom), dim)
        eqn = self.view.maker(atom)
        if eqn is None:
            return None
        if eqn.primitive.name == "broadcast_in_dim":
            x, dims = eqn.invars[0], eqn.params["broadcast_dimensions"]
            if dim in dims and shape_of(x)[dims.index(dim)] != 1:
                return None
            return self._spread(eqn, dim, self.value(x))
        if eqn.primitive.name in SAME:
            same = self._fixed(eqn.invars[0], dim)
            return None if same is None else self._cast(same, atom)
        return None

    def _spread(self, eqn: JaxprEqn, dim: int, x: Value) -> Value:
        """What is broadcast, but along one dimension of the result."""
        dims = list(eqn.params["broadcast_dimensions"])
        if dim in dims:
            x = jnp.squeeze(x, dims.index(dim))
            dims.remove(dim)
        shape = list(eqn.params["shape"])
        del shape[dim]
        return jax.lax.broadcast_in_dim(x, shape, [d - (d > dim) for d in dims])

    def _cast(self, x: Value, like: Atom) -> Value:
        return jnp.asarray(x, dtype_of(like) if self.weights is None else np.float32)

    # ------------------------------------------------------------ sums taken in

    def _inside(self, atom: Atom, dim: int, first: int, count: int) -> Value | None:
        eqn = self.view.maker(atom)
        if eqn is None or len(eqn.outvars) != 1:
            return None
        if (alone := self._fixed(atom, dim)) is not None:
            total = self._numbers(count).sum()
            return jnp.where(alone, total, 0) if alone.dtype == bool else self._cast(alone * total, atom)
        rule = _RULES.get(eqn.primitive.name)
        if eqn.primitive.name in SAME:
            rule = _cast
        return None if rule is None else rule(self, eqn, dim, first, count)


def _cast(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    x, out = eqn.invars[0], eqn.outvars[0]
    if dtype_of(out) == np.bool_ and dtype_of(x) != np.bool_:
        return _nonzero(at, eqn, dim, first, count)
    return at._cast(at.sum(x, dim, first, count), out)


def _nonzero(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value:
    """Of what is not zero, or greater, where there is such a place, of one at most."""
    x = eqn.invars[0]
    at.alone.append((x, dim, first, count))

    def holds(total: Value) -> Value:
        return total > 0 if eqn.primitive.name == "gt" else total != 0

    whole = at.sum(x, dim, first, count)
    if at.weights is None:
        return holds(whole).astype(jnp.int32)
    ones = Places(at.view, at.read, np.ones_like(at.weights))
    total = ones.sum(x, dim, first, count)
    return jnp.where(holds(total), whole / jnp.where(total != 0, total, 1), 0)


def _compared(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    """With the numbers of the places; or with zero."""
    left, right = eqn.invars
    zero = isinstance(right, Literal) and not np.ndim(right.val) and right.val == 0
    if eqn.primitive.name != "eq":
        return _nonzero(at, eqn, dim, first, count) if zero else None
    for place, numbers in ((left, right), (right, left)):
        line = _line(at, numbers, dim)
        alone = None if line is None else at._fixed(place, dim)
        if alone is not None:
            return _counted(at, alone, line[first : first + count])
    return None


def _counted(at: Places, place: Value, line: Any) -> Value | None:
    """What each of `line`, numbers one after the other, has that is equal to a place."""
    if not np.array_equal(line, line[0] + np.arange(len(line))):
        return None
    inside = (place >= line[0]) & (place <= line[-1])
    if not jnp.issubdtype(place.dtype, jnp.integer):
        inside &= place == jnp.floor(place)
    if at.weights is None:
        return inside.astype(jnp.int32)
    where = jnp.where(inside, place - line[0], 0).astype(jnp.int32)
    return jnp.where(inside, jnp.asarray(at.weights)[where], 0)


def _line(at: Places, atom: Atom, dim: int) -> Any:
    """The numbers along a dimension of a value of the program's own, the same along all others; else None."""
    while isinstance(atom, Var) and (eqn := at.view.maker(atom)) is not None:
        name = eqn.primitive.name
        if name == "iota" and eqn.params["dimension"] == dim:
            return np.arange(shape_of(atom)[dim])
        if name == "broadcast_in_dim" and dim in eqn.params["broadcast_dimensions"]:
            dim, atom = eqn.params["broadcast_dimensions"].index(dim), eqn.invars[0]
        elif name in SAME:
            atom = eqn.invars[0]
        else:
            break
    if not isinstance(atom, Var) or atom not in at.static or shape_of(atom)[dim] != np.prod(shape_of(atom)):
        return None
    return np.asarray(_evaluated(at.view, atom)).reshape(-1)


def _evaluated(view: View, v: Var) -> Value:
    """The value of what is the program's own."""
    eqn = view.maker(v)
    if eqn is None:
        return own_value(view, v)
    args = [w.val if isinstance(w, Literal) else _evaluated(view, w) for w in eqn.invars]
    with jax.ensure_compile_time_eval():
        return bind(eqn, args, eqn.params)[eqn.outvars.index(v)]


def _product(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    """Of values of which one has places: one is the same along them."""
    for k, v in enumerate(eqn.invars):
        alone = at._fixed(eqn.invars[1 - k], dim)
        if alone is not None:
            x = at.sum(v, dim, first, count)
            if eqn.primitive.name == "and":
                return jnp.where(alone, x, 0)
            return at._cast(x, eqn.outvars[0]) * at._cast(alone, eqn.outvars[0])
    return None


def _either(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    if any(isinstance(v, Literal) for v in eqn.invars):
        return None
    x, y = (at.sum(v, dim, first, count) for v in eqn.invars)
    return x + y if eqn.primitive.name in ("add", "add_any") else x - y


def _select(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    """Of cases that have places, by what has none; or, of those, by what has some, all or nothing."""
    which, *cases = eqn.invars
    if len(cases) != 2:
        return None
    alone = at._fixed(which, dim)
    if alone is not None:
        off, on = (at.sum(v, dim, first, count) for v in cases)
        return jnp.where(alone, on, off)
    off, on = (at._fixed(v, dim) for v in cases)
    if off is None or on is None or not isinstance(off, (int, float, np.ndarray, np.generic, jax.Array)):
        return None
    hits = at.sum(which, dim, first, count)
    total = at._numbers(count).sum()
    dtype = dtype_of(eqn.outvars[0]) if at.weights is None else np.float32
    return hits.astype(dtype) * jnp.asarray(on, dtype) + (total - hits).astype(dtype) * jnp.asarray(
        off, dtype
    )


def _broadcast(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    dims = eqn.params["broadcast_dimensions"]
    own = dims.index(dim)
    x = at.sum(eqn.invars[0], own, first, count)
    shape = list(eqn.params["shape"])
    del shape[dim]
    return jax.lax.broadcast_in_dim(x, shape, [d - (d > dim) for d in dims if d != dim])


def _transpose(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value:
    order = eqn.params["permutation"]
    own = order[dim]
    x = at.sum(eqn.invars[0], own, first, count)
    return jnp.transpose(x, [d - (d > own) for d in order if d != own])


def _reshape(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    before = np.prod(new[:dim], dtype=int)
    own = next(
        (d for d, n in enumerate(old) if n == new[dim] and np.prod(old[:d], dtype=int) == before), None
    )
    if own is None or eqn.params["dimensions"] is not None:
        return None
    x = at.sum(eqn.invars[0], own, first, count)
    return x.reshape([n for d, n in enumerate(new) if d != dim])


def _squeeze(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value:
    x = eqn.invars[0]
    gone = sorted(d % len(shape_of(x)) for d in eqn.params["dimensions"])
    own = [d for d in range(len(shape_of(x))) if d not in gone][dim]
    return jnp.squeeze(at.sum(x, own, first, count), [d - (d > own) for d in gone])


def _slice(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    p = eqn.params
    if p["strides"] is not None and p["strides"][dim] != 1:
        return None
    x = at.sum(eqn.invars[0], dim, first + p["start_indices"][dim], count)
    rest = [d for d in range(len(p["start_indices"])) if d != dim]
    strides = None if p["strides"] is None else [p["strides"][d] for d in rest]
    starts, limits = ([p[n][d] for d in rest] for n in ("start_indices", "limit_indices"))
    return jax.lax.slice(x, starts, limits, strides)


def _reduce(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value:
    axes = eqn.params["axes"]
    own = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in axes][dim]
    x = at.sum(eqn.invars[0], own, first, count)
    return x.sum([d - (d > own) for d in axes])


def _dot(at: Places, eqn: JaxprEqn, dim: int, first: int, count: int) -> Value | None:
    """The places are a dimension of one operand that is not paired with the other's."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    ranks = [len(shape_of(v)) for v in eqn.invars]
    free = [
        (k, d) for k, taken in ((0, (*lc, *lb)), (1, (*rc, *rb))) for d in range(ranks[k]) if d not in taken
    ]
    if dim < len(lb):
        return None
    side, own = free[dim - len(lb)]
    args: list[Value] = [at._cast(at.value(v), v) for v in eqn.invars]
    args[side] = at._cast(at.sum(eqn.invars[side], own, first, count), eqn.invars[side])
    numbers = [([list(lc), list(rc)][k], [list(lb), list(rb)][k]) for k in (0, 1)]
    numbers[side] = tuple([d - (d > own) for d in dims] for dims in numbers[side])  # type: ignore[assignment]
    wide = None if at.weights is None else jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        args[0],
        args[1],
        ((numbers[0][0], numbers[1][0]), (numbers[0][1], numbers[1][1])),
        precision=eqn.params["precision"] if wide is None else wide,
        preferred_element_type=eqn.params["preferred_element_type"] if wide is None else np.float32,
    )


Rule = Callable[[Places, JaxprEqn, int, int, int], Value | None]

_RULES: dict[str, Rule] = {
    "eq": _compared,
    "gt": _compared,
    "ne": _compared,
    "mul": _product,
    "and": _product,
    "add": _either,
    "add_any": _either,
    "sub": _either,
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "reduce_sum": _reduce,
    "dot_general": _dot,
}


def moments(count: int, seed: int) -> Sequence[Any]:
    """Numbers for places: one, that of the place, and others at random."""
    rng = np.random.default_rng(seed)
    return [np.ones(count, np.float32), np.arange(count, dtype=np.float32), rng.random(count, np.float32)]
