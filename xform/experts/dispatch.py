"""Tokens to the experts that they chose and back, where tokens and experts lie over devices.

    y[m,:] = operation[experts] ids[m,j] x[m,:] w[x,...] gates[m,j]

One operation forward and one backward. What is done with the rows of each expert is the user's program
(`Middle`), and so is how what a token's choices give is put together (`Combine`); tokens are sorted on the
device that has them, or that has their experts. The operation is told of the mesh axes that experts lie over
and sends what it needs itself, so that it stays one equation until its layout is known. The backward pass
keeps nothing but what the operation took: rows are sorted, sent and multiplied with the first weights again.

strategy: how tokens come to the devices of their experts. "ring": all tokens to all of these devices, and
sums of what each gives back (MaxText's ring of experts). "all_to_all": each choice to the device of its
expert, in slots of which there are so many for each device; where a device has more choices for another than
slots, all devices take the ring instead, so that nothing is lost. "ragged_all_to_all": as many choices to
each device as there are for it, into a buffer of so many; where one has more, again the ring. "none": experts
lie whole on each device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.experts.blocks import Rows, computed
from xform.experts.combining import Combine, taken
from xform.experts.function import EXPERT, Function
from xform.experts.operation import CHOICE, TOKEN
from xform.experts.ragged import RaggedRoute, ragged_overflows, ragged_route
from xform.experts.routes import Route, gathered, overflows, route
from xform.ops import apply
from xform.trace import Value

Axes = tuple[str, ...]

ROWS = 8
"""Rows that are computed at once are a multiple of it."""

RING, SLOTS, RAGGED, NONE = "ring", "all_to_all", "ragged_all_to_all", "none"

Way = Callable[[Value, Sequence[Value]], Value]
"""y of ids and what is taken."""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """function: what is done with rows. combine: what is made of their results. lies: the mesh axes of the
    plan over which experts are to lie, `ways` devices; outer: the parts in which tokens lie over axes further
    out than these. capacity: of "all_to_all", the slots for each device of experts, of so many as its experts
    had choices if all had the same. chunks: in which tokens are sent, one after the other. block: rows that
    are computed at once, of so many as a device has if all experts had the same. dtype: in which rows
    of tokens' features are sent, if not in their own. axes: those over which experts do lie.
    line: the user's.
    """

    function: Function
    combine: Combine
    strategy: str = NONE
    lies: Axes = ()
    ways: int = 1
    outer: int = 1
    capacity: float = 1.0
    chunks: int = 1
    block: float = 1.0
    dtype: str = ""
    axes: Axes = ()
    line: str = ""

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
    def given(self) -> str:
        """The letters of what it gives: of each choice, where choices are not put together."""
        return ("m" if self.combine.out else "mj") + self.function.out

    @property
    def sums(self) -> str:
        return self.function.features

    # ------------------------------------------------------------ on the devices of experts

    def _natural(self, args: Sequence[Value]) -> Sequence[Value]:
        """What it takes; negative numbers of experts are the first's, for whom products take them."""
        return args if not self.axes else (jnp.maximum(args[0], 0), *args[1:])

    def either(self, ids: Value, made: Callable[[Way], Any]) -> Any:
        """What is made of the way by which tokens go; where choices may have no slot, that is known only when
        they are counted, and then they all go by the ring.
        """
        if not self.axes or self.strategy == RING:
            return made(self._in_chunks(self._by_ring))
        chunks = self._chunks(ids)
        tokens, choices = ids.shape[0] // chunks, ids.shape[1]
        by_slots = functools.partial(made, self._in_chunks(self._by_slots))
        room = self.room(tokens, choices)
        if room >= self.most(tokens, choices):
            return by_slots()
        parts = ids.reshape(chunks, -1)
        full_at = ragged_overflows if self.strategy == RAGGED else overflows
        full = [full_at(part, self.axes, self.ways, self.experts, room) for part in parts]
        by_ring = functools.partial(made, self._in_chunks(self._by_ring))
        return lax.cond(jnp.any(jnp.stack(full)), by_ring, by_slots)

    def _in_chunks(self, way: Way) -> Way:
        """Some tokens after the other, so that those of one chunk are sent while others are multiplied."""
        is_rows = [dims[:1] == "m" for dims in self.takes]

        def run(ids: Value, args: Sequence[Value]) -> Value:
            chunks = self._chunks(ids)
            if chunks == 1:
                return way(ids, args)

            def cut(x: Value) -> Value:
                return x.reshape(chunks, -1, *x.shape[1:])

            rows = [cut(x) if own else x for own, x in zip(is_rows, args, strict=True)]
            made = [
                way(part, [x[c] if own else x for own, x in zip(is_rows, rows, strict=True)])
                for c, part in enumerate(cut(ids))
            ]
            return jnp.concatenate(made)

        return run

    def _chunks(self, ids: Value) -> int:
        """Into how many chunks tokens are cut: fewer for a microbatch that does not divide into so many."""
        return math.gcd(self.chunks, ids.shape[0])

    def _by_ring(self, ids: Value, args: Sequence[Value]) -> Value:
        """All tokens of the devices of experts on each, and sums of what they give."""
        if self.axes:
            ids, *args = (
                gathered(self.axes, self.sent_as(n), x) if dims[:1] == "m" else x
                for n, (dims, x) in enumerate(zip(("mj", *self.takes), (ids, *args), strict=True), -1)
            )
        function, count = self.function, len(self.function.taken)
        tokens, choices = ids.shape
        flat, own = ids.reshape(-1), None
        if self.axes:
            number = lax.axis_index(self.axes)
            none = (number == 0) & (flat >= function.experts)  # those of no expert are the first device's
            own = (flat // self.experts == number) | none
        even = tokens * choices // (self.ways if self.axes else 1)
        weights = self.combine.weights(args[count:])
        rows, order, places = self._through(flat, own, args[:count], weights, choices, even)
        y = self.combine.run(rows, order, places.reshape(tokens, choices))
        return lax.psum_scatter(y, self.axes, scatter_dimension=0, tiled=True) if self.axes else y

    def _by_slots(self, ids: Value, args: Sequence[Value]) -> Value:
        """Each choice to the device of its expert, and back."""
        function, count = self.function, len(self.function.taken)
        tokens, choices = ids.shape
        way = self._route(ids.reshape(-1), self.room(tokens, choices))
        sent = []
        for k, (n, x) in enumerate(zip(function.taken, args[:count], strict=True)):
            if function.takes[n] == TOKEN:
                x = way.there(x, choices, self.sent_as(k))
            elif function.takes[n] == CHOICE:
                x = way.there(x.reshape(-1, *x.shape[2:]))
            sent.append(x)
        weights = self.combine.weights(args[count:])
        if weights is not None:
            weights = way.there(weights.reshape(-1))
        own, even = way.numbers >= 0, tokens * choices
        rows, order, places = self._through(way.numbers, own, sent, weights, 1, even)
        here = way.back(taken(rows, order, places))
        return self.combine.run(here, way.choices, way.slots.reshape(tokens, choices))

    def _route(self, ids: Value, room: int) -> Route | RaggedRoute:
        made = ragged_route if self.strategy == RAGGED else route
        return made(ids, self.axes, self.ways, self.experts, room)

    def sent_as(self, number: int) -> str:
        """The dtype in which what is taken is sent, if not in its own: of rows of tokens' features."""
        function = self.function
        if number not in function.floats or function.takes[function.taken[number]] != TOKEN:
            return ""
        return self.dtype if len(self.takes[number]) > 1 else ""

    @property
    def experts(self) -> int:
        """How many a device has."""
        return self.function.experts // (self.ways if self.axes else 1)

    def room(self, tokens: int, choices: int) -> int:
        """The slots that a device has for each device, of choices of so many tokens; of a ragged all-to-all
        for those of all devices.
        """
        even = self.capacity * tokens * choices
        slots = math.ceil(even if self.strategy == RAGGED else even / self.ways)
        return min(slots, self.most(tokens, choices))

    def most(self, tokens: int, choices: int) -> int:
        """The most slots that choices of so many tokens can take."""
        return tokens * choices * (self.ways if self.strategy == RAGGED else 1)

    def _through(
        self,
        ids: Value,
        own: Value | None,
        given: Sequence[Value],
        weights: Value | None,
        choices: int,
        even: int,
    ) -> tuple[Value, Value, Value]:
        """The function's results for choices of tokens, times weights, in the order of experts, that order,
        and its inverse; own: those that are for this device, the others' are zero; even: how many they are
        where all devices have the same.
        """
        function, local = self.function, ids
        if own is not None:
            here = ids - lax.axis_index(self.axes) * self.experts
            none = jnp.where(own, self.experts, self.experts + 1)  # of no expert, before those of others
            local = jnp.where(own & (ids < function.experts), here, none)
        size = _up(math.ceil(self.block * even), ROWS)
        return computed(function, Rows(ids, local, own, self.experts), given, weights, choices, size)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


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
        return (self.given,)

    def over(self, axes: Mapping[str, Axes]) -> DispatchForward:
        return dataclasses.replace(self, axes=axes[EXPERT])

    @jax.named_scope("dispatch")
    def plain(self, *args: Value) -> Sequence[Value]:
        ids, *taken = self._natural(args)
        return (self.either(ids, lambda way: way(ids, taken)),)

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
        return ("mj", *self.takes, self.given)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(self.takes[n] for n in self.wanted)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The numbers, among what it takes after the ids, of floats."""
        floats = self.function.floats
        return (*floats, *range(len(self.function.taken), len(self.takes)))

    def over(self, axes: Mapping[str, Axes]) -> DispatchBackward:
        return dataclasses.replace(self, axes=axes[EXPERT])

    @jax.named_scope("dispatch")
    def plain(self, *args: Value) -> Sequence[Value]:
        ids, *taken, dy = self._natural(args)

        def gradients(way: Way) -> tuple[Value, ...]:
            def of(*some: Value) -> Value:
                given = list(taken)
                for n, x in zip(self.wanted, some, strict=True):
                    given[n] = x
                return way(ids, given)

            return tuple(jax.vjp(of, *(taken[n] for n in self.wanted))[1](dy))

        found: Sequence[Value] = self.either(ids, gradients)
        return found

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
