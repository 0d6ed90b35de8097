"""Tokens to the experts that they chose and back, where tokens and experts lie over devices.

    y[m,:] = operation[experts] ids[m,j] x[m,:] w[x,...] gates[m,j]

One operation forward and one backward. What is done with the rows of each expert is the user's program
(`Middle`), and so is how what a token's choices give is put together (`Combine`); tokens are sorted on the
device that has them, or that has their experts. The operation is told of the mesh axes that experts lie over
and sends what it needs itself, so that it stays one equation until its layout is known. The backward pass
keeps nothing but what the operation took: rows are sorted, sent and multiplied with the first weights again.

strategy: how tokens come to the devices of their experts. "ring": all tokens to all of these devices, and
sums of what each gives back (MaxText's ring of experts). "none": experts lie whole on each device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.experts.combining import Combine
from xform.experts.function import EXPERT, LOOKED, Function
from xform.experts.operation import CHOICE, COUNTS, IDS, TOKEN
from xform.ops import apply
from xform.trace import Value

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """function: what is done with rows. combine: what is made of their results. lies: the mesh axes of the plan
    over which experts are to lie, `ways` devices; outer: the parts in which tokens lie over axes further out
    than these. axes: those over which experts do lie.
    """

    function: Function
    combine: Combine
    strategy: str = "none"
    lies: Axes = ()
    ways: int = 1
    outer: int = 1
    axes: Axes = ()

    told = EXPERT
    interpret = False

    @property
    def shared(self) -> tuple[str, str, int, int] | None:
        return ("m", EXPERT, self.outer, self.ways) if self.ways > 1 else None

    @property
    def takes(self) -> tuple[str, ...]:
        """The letters of what it takes after the ids."""
        return (*(self.function.letters[n] for n in self.function.taken), *("mj",) * self.combine.gates)

    @property
    def sums(self) -> str:
        return self.function.features

    # ------------------------------------------------------------ on the devices of experts

    def together(self, arrays: Sequence[Value]) -> list[Value]:
        """Arrays of tokens: those of all devices that experts lie over."""
        if not self.axes:
            return list(arrays)
        return [lax.all_gather(x, self.axes, axis=0, tiled=True) for x in arrays]

    def apart(self, x: Value) -> Value:
        """This device's tokens of what the devices of experts give, terms of a sum."""
        if not self.axes:
            return x
        return lax.psum_scatter(x, self.axes, scatter_dimension=0, tiled=True)

    def local(self, ids: Value, args: Sequence[Value]) -> Value:
        """What this device's experts make of tokens, [m, ...]; of those of others zero."""
        return self.combine.run(*self._sent(ids, args))

    def _sent(self, ids: Value, args: Sequence[Value]) -> tuple[Value, Sequence[Value]]:
        function, count = self.function, len(self.function.taken)
        (tokens, choices), flat = ids.shape, ids.reshape(-1)
        experts, own = function.experts, None
        if self.axes:
            experts = experts // self.ways
            number = lax.axis_index(self.axes)
            mine = (flat >= number * experts) & (flat < (number + 1) * experts)
            none = (number == 0) & ((flat < 0) | (flat >= function.experts))  # of no expert: the first has them
            own, flat = mine | none, jnp.where(mine, flat - number * experts, experts)
        order = jnp.argsort(flat)
        back = jnp.argsort(order)
        numbers, counts = flat[order], jnp.bincount(flat, length=experts)
        here = numbers if own is None else jnp.where(own[order], numbers, 0)
        given = dict(zip(function.taken, args[:count], strict=True))
        takes: list[Any] = []
        for n, (v, kind) in enumerate(zip(function.jaxpr.invars, function.takes, strict=True)):
            x, aval = given.get(n), _aval(v)
            if kind == IDS:
                x = here.astype(aval.dtype)
            elif kind == COUNTS:
                x = counts.astype(aval.dtype)
            elif kind == TOKEN:
                x = _rows_of(x, order, back, choices)
            elif kind == CHOICE:
                x = _rows_of(x.reshape(-1, *x.shape[2:]), order, back, 1)
            elif kind == LOOKED:
                x = x.at[here].get(**function.lookups[n])
            takes.append(x)
        made = _rows_of(function.run(takes), back, order, 1)
        if own is not None:
            made = jnp.where(own.reshape(-1, *(1,) * (made.ndim - 1)), made, jnp.zeros((), made.dtype))
        return made.reshape(tokens, choices, *made.shape[1:]), args[count:]


def _aval(v: Any) -> Any:
    return v.aval


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_of(x: Value, order: Value, back: Value, choices: int) -> Value:
    """Rows of choices, in an order, of which `choices` are one of x. back: the inverse of the order."""
    made: Value = x.at[order // choices].get(mode="promise_in_bounds", unique_indices=choices == 1)
    return made


def _rows_forward(x: Value, order: Value, back: Value, choices: int) -> tuple[Value, Any]:
    return _rows_of(x, order, back, choices), (order, back)


def _rows_backward(choices: int, saved: Any, dy: Value) -> tuple[Any, None, None]:
    """Each row has one place: so that its gradient is looked up too, where JAX's would be added up there."""
    order, back = saved
    found = dy.at[back].get(mode="promise_in_bounds", unique_indices=True)
    if choices > 1:
        found = found.reshape(-1, choices, *dy.shape[1:]).sum(1)
    return found, None, None


_rows_of.defvjp(_rows_forward, _rows_backward)


@dataclasses.dataclass(frozen=True)
class DispatchForward(Dispatch):
    """ids[m,j], what the middle takes, gates -> y[m, ...]."""

    name = "experts"
    cut = "m"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("mj", *self.takes)

    @property
    def results(self) -> tuple[str, ...]:
        return ("m" + self.function.out,)

    def over(self, axes: Mapping[str, Axes]) -> DispatchForward:
        return dataclasses.replace(self, axes=axes["x"])

    def plain(self, *args: Value) -> Sequence[Value]:
        rows = [n for n, dims in enumerate(self.operands) if dims[:1] == "m"]
        all_ = list(args)
        for n, x in zip(rows, self.together([args[n] for n in rows]), strict=True):
            all_[n] = x
        return (self.apart(self.local(all_[0], all_[1:])),)

    def kernel(self, *args: Value) -> Sequence[Value]:
        return self.plain(*args)


@dataclasses.dataclass(frozen=True)
class DispatchBackward(Dispatch):
    """What the forward operation took, and the gradient of what it gave -> those of the floats it took."""

    name = "experts_backward"
    cut = ""

    @property
    def sums(self) -> str:
        return "m" + self.function.features

    @property
    def operands(self) -> tuple[str, ...]:
        return ("mj", *self.takes, "m" + self.function.out)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(self.takes[n] for n in self.wanted)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The numbers, among what it takes after the ids, of floats."""
        floats = self.function.floats
        return (*floats, *range(len(self.function.taken), len(self.takes)))

    def over(self, axes: Mapping[str, Axes]) -> DispatchBackward:
        return dataclasses.replace(self, axes=axes["x"])

    def plain(self, *args: Value) -> Sequence[Value]:
        rows = [n for n, dims in enumerate(self.operands) if dims[:1] == "m"]
        all_ = list(args)
        for n, x in zip(rows, self.together([args[n] for n in rows]), strict=True):
            all_[n] = x
        ids, *taken, dy = all_

        def of(*some: Value) -> Value:
            given = list(taken)
            for n, x in zip(self.wanted, some, strict=True):
                given[n] = x
            return self.local(ids, given)

        found = jax.vjp(of, *(taken[n] for n in self.wanted))[1](dy)
        return [
            self.apart(x) if dims[:1] == "m" else x for dims, x in zip(self.results, found, strict=True)
        ]

    def kernel(self, *args: Value) -> Sequence[Value]:
        return self.plain(*args)


# ---------------------------------------------------------------- the two as one function


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatched(how: Dispatch, *args: Value) -> Value:
    """y of ids and what is taken, with a derivative that is an operation too."""
    made: Value = apply(_as(DispatchForward, how), *args)[0]
    return made


def _forward(how: Dispatch, *args: Value) -> tuple[Value, Any]:
    return dispatched(how, *args), args


def _backward(how: Dispatch, args: Sequence[Value], dy: Value) -> tuple[Any, ...]:
    op = _as(DispatchBackward, how)
    found = dict(zip(op.wanted, apply(op, *args, dy), strict=True))
    return (None, *(found.get(n) for n in range(len(args) - 1)))


dispatched.defvjp(_forward, _backward)


def _as(kind: Any, how: Dispatch) -> Any:
    return kind(**{f.name: getattr(how, f.name) for f in dataclasses.fields(Dispatch)})
