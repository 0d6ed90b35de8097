"""What differs from layer to layer, as one array that a loop over the layers goes through.

w0, w1, w2             ->    stack w0 w1 w2
    3, 4, 5                ->    the constant [3, 4, 5]
    keys[0], keys[1] ...   ->    keys, as they are
    A, B, A, B, A          ->    stack A B, looked up by [0, 1, 0, 1, 0]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Tracer, Var, fitted, shape_of


@dataclasses.dataclass(frozen=True)
class Column:
    """One row of `Turn.own`, an entry a block.

    values: those that are stacked, each once; which: for each block, the number of its value, None where
    that is its own number. numbers: the constants that they are, where they are known. source: the array
    whose elements `begin`, `begin + 1`, ... they are; makers: the equations that take these.
    """

    values: tuple[Atom, ...]
    which: tuple[int, ...] | None = None
    numbers: tuple[Any, ...] | None = None
    source: Var | None = None
    begin: int = 0
    makers: tuple[int, ...] = ()
    sliced: bool = False

    @classmethod
    def of(cls, jaxpr: Jaxpr, row: Sequence[Atom]) -> Column:
        """The column of a row of values in the body `jaxpr`."""
        known = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        numbers = [v.val if isinstance(v, Literal) else known.get(v) for v in row]
        if all(map(_is_number, numbers)):
            return cls(tuple(row), numbers=tuple(numbers))
        if (elements := _elements(jaxpr, row)) is not None:
            return elements
        once = {id(v): v for v in row}
        if len(once) == len(row):
            return cls(tuple(row))
        place = {key: n for n, key in enumerate(once)}
        return cls(tuple(once.values()), which=tuple(place[id(v)] for v in row))

    def value(self, env: Mapping[Atom, Any]) -> tuple[Any, Any]:
        """What the loop goes through, [blocks, ...]; and what a turn looks it up in, None for nothing."""
        aval: Any = self.values[0].aval
        if self.numbers is not None:
            return np.stack([np.asarray(number, aval.dtype) for number in self.numbers]), None
        if self.source is not None:
            whole, end = env[self.source], self.begin + len(self.values)
            if (self.begin, end) != (0, whole.shape[0]):
                whole = jax.lax.slice_in_dim(whole, self.begin, end)
            return (jnp.expand_dims(whole, 1) if self.sliced else whole), None
        all_ = jax.lax.stack([fitted(v.val if isinstance(v, Literal) else env[v], aval) for v in self.values])
        return (all_, None) if self.which is None else (np.asarray(self.which, np.int32), all_)

    def each(self, element: Any, whole: Any) -> Any:
        """A block's value, of what the loop gives its turn."""
        return element if whole is None else jax.lax.dynamic_index_in_dim(whole, element, 0, False)


def _is_number(value: Any) -> bool:
    """Whether a value is known now; a key's is not shown."""
    dtype = getattr(value, "dtype", None)
    return (
        value is not None
        and not isinstance(value, Tracer)
        and not (dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended))
    )


def _elements(jaxpr: Jaxpr, row: Sequence[Atom]) -> Column | None:
    """The elements of one array along its first dimension, in order."""
    makers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    at = [makers.get(v) if isinstance(v, Var) else None for v in row]
    if any(i is None for i in at):
        return None
    eqns = [jaxpr.eqns[i] for i in at if i is not None]
    source = eqns[0].invars[0] if eqns[0].invars else None
    if not isinstance(source, Var) or any(eqn.invars[0] is not source for eqn in eqns):
        return None
    numbers = [_number(eqn, v) for eqn, v in zip(eqns, row, strict=True) if isinstance(v, Var)]
    first = numbers[0]
    if first is None or numbers != list(range(first, first + len(row))):
        return None
    made = tuple(sorted({i for i in at if i is not None}))
    return Column(tuple(row), None, None, source, first, made, eqns[0].primitive.name == "slice")


def _number(eqn: JaxprEqn, v: Var) -> int | None:
    """Which element along the first dimension of its operand an equation gives as `v`; None for none."""
    if eqn.primitive.name == "unstack" and eqn.params["axis"] == 0:
        return eqn.outvars.index(v)
    if eqn.primitive.name == "slice" and eqn.params["strides"] is None:
        (start, *starts), (limit, *limits) = eqn.params["start_indices"], eqn.params["limit_indices"]
        if limit == start + 1 and not any(starts) and tuple(limits) == shape_of(eqn.invars[0])[1:]:
            return int(start)
    return None
