"""Choices of tokens to the devices of their experts, as many to each as there are: a ragged all-to-all.

    rows = ragged_all_to_all x[order of devices]         z[choice] = ragged_all_to_all out

What arrives lies in a buffer, the rows of one device after those of another. As `routes` otherwise. XLA has
the collective for TPU alone; elsewhere the same rows are taken from those of all devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.experts.routes import Axes, decoded, devices, encoded, ordered
from xform.ops import apply
from xform.trace import Value


@dataclasses.dataclass(frozen=True)
class Exchange:
    """rows [n, ...] in the order of the devices that they go to, counts [from, to] -> [room, ...], those of
    each device in turn, then zeros.
    """

    axes: Axes
    room: int
    rank: int

    name = "ragged_all_to_all"
    cut = ""
    interpret = False

    @property
    def operands(self) -> tuple[str, ...]:
        return "n" + self._rest, "xy"

    @property
    def results(self) -> tuple[str, ...]:
        return ("r" + self._rest,)

    @property
    def _rest(self) -> str:
        return "abcdefgh"[: self.rank - 1]

    @property
    def sent(self) -> tuple[str, Axes]:
        """What it is to those who count what is sent: rows go to all devices evenly, as far as is known."""
        return "all-to-all", self.axes

    def plain(self, *args: Value) -> Sequence[Value]:
        rows, counts = args
        me, every = lax.axis_index(self.axes), lax.all_gather(rows, self.axes, axis=0, tiled=False)
        ends = jnp.cumsum(counts[:, me])
        at = jnp.arange(self.room)
        source = jnp.minimum(jnp.sum(at[:, None] >= ends, axis=1), len(ends) - 1)
        place = at - (ends - counts[:, me])[source] + _before(counts)[source, me]
        found = every.at[source, place].get(mode="fill", fill_value=0)
        return (jnp.where(_column(at < ends[-1], rows), found, jnp.zeros((), rows.dtype)),)

    def kernel(self, *args: Value) -> Sequence[Value]:
        rows, counts = args
        me, counts = lax.axis_index(self.axes), counts.astype(jnp.int32)
        there = jnp.cumsum(counts, axis=0) - counts  # where the rows of each device begin at each
        out = jnp.zeros((self.room, *rows.shape[1:]), rows.dtype)
        made = lax.ragged_all_to_all(
            rows,
            out,
            _before(counts)[me],
            counts[me],
            there[me],
            counts[:, me],
            axis_name=self.axes if len(self.axes) > 1 else self.axes[0],
        )
        return (made,)


def _before(counts: Value) -> Value:
    """Where the rows for each device begin among those of each."""
    made: Value = jnp.cumsum(counts, axis=1) - counts
    return made


def _column(x: Value, rows: Value) -> Value:
    return x.reshape(-1, *(1,) * (rows.ndim - 1))


@dataclasses.dataclass(frozen=True)
class RaggedRoute:
    """choices: in the order of devices; slots: where each is. counts [from, to]. numbers: as of a `Route`."""

    axes: Axes
    room: int
    choices: Value
    slots: Value
    counts: Value
    numbers: Value

    def there(self, x: Value, of: int = 1, dtype: str = "") -> Value:
        return _there(self.axes, self.room, dtype, ordered(x, self.choices, self.slots, of), self.counts)

    def back(self, rows: Value) -> Value:
        return _back(self.axes, self.choices.shape[0], rows, self.counts)


def ragged_route(ids: Value, axes: Axes, ways: int, experts: int, room: int) -> RaggedRoute:
    """As `routes.route`; room: the choices that a device has room for, of all devices."""
    device, me = devices(ids, axes, ways, experts), lax.axis_index(axes)
    order = jnp.argsort(device)
    inverse, counts = jnp.argsort(order), _counts(device, axes, ways)
    arrived = jnp.sum(counts, axis=0)
    there = _there(axes, room, "", ids[order], counts)
    numbers = jnp.where(jnp.arange(room) < arrived[me], there, -1)
    return RaggedRoute(axes, room, order, inverse, counts, numbers)


def ragged_overflows(ids: Value, axes: Axes, ways: int, experts: int, room: int) -> Value:
    """Whether any of the devices would have no room for all choices of its experts."""
    counts = _counts(devices(ids, axes, ways, experts), axes, ways)
    return jnp.max(jnp.sum(counts, axis=0)) > room


def _counts(device: Value, axes: Axes, ways: int) -> Value:
    """How many choices go from each device to each."""
    own = jnp.bincount(device, length=ways).astype(jnp.int32)
    made: Value = lax.all_gather(own, axes, axis=0, tiled=False)
    return made


def _moved(axes: Axes, room: int, x: Value, counts: Value) -> Value:
    made: Value = apply(Exchange(axes, room, x.ndim), x, counts)[0]
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _there(axes: Axes, room: int, dtype: str, x: Value, counts: Value) -> Value:
    return decoded([_moved(axes, room, part, counts) for part in encoded(x, dtype)], x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _back(axes: Axes, room: int, rows: Value, counts: Value) -> Value:
    return _moved(axes, room, rows, counts.T)


def _none_of(x: Value) -> Value:
    """Nothing of each row: how many rows there are."""
    return jnp.zeros((x.shape[0], 0), x.dtype)


def _there_forward(axes: Axes, room: int, dtype: str, x: Value, counts: Value) -> tuple[Value, Any]:
    return _there(axes, room, dtype, x, counts), (counts, _none_of(x))


def _there_backward(axes: Axes, room: int, dtype: str, saved: Any, dy: Value) -> tuple[Value, None]:
    counts, x = saved
    return _back(axes, x.shape[0], dy, counts), None


def _back_forward(axes: Axes, room: int, rows: Value, counts: Value) -> tuple[Value, Any]:
    return _back(axes, room, rows, counts), (counts, _none_of(rows))


def _back_backward(axes: Axes, room: int, saved: Any, dy: Value) -> tuple[Value, None]:
    counts, rows = saved
    return _moved(axes, rows.shape[0], dy, counts), None


_there.defvjp(_there_forward, _there_backward)
_back.defvjp(_back_forward, _back_backward)
