"""How choices of tokens get to the devices of their experts, and what these give back to the tokens.

    rows[slot] = all_to_all x[choice of slot]          z[choice] = (all_to_all out)[slot of choice]

A device has so many slots for each of the devices that experts lie over. The gradient of what a route takes
there is what it brings back; nothing is added up at an index. The functions are for the inside of a manual
region over these axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.experts.combining import added
from xform.trace import Value

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Route:
    """choices [slots here]: the choice that a slot has, of so many as there are where it has none. slots
    [choices]: the slot of a choice. numbers [slots there]: of its expert; -1 where a slot has no choice.
    """

    axes: Axes
    choices: Value
    slots: Value
    numbers: Value

    def there(self, x: Value, of: int = 1, dtype: str = "") -> Value:
        """Rows [slots, ...] on the devices of experts, of x [choices // of, ...] of tokens or their choices;
        empty slots have zeros. dtype: in which they are sent, if not in their own.
        """
        return _there(self.axes, of, dtype, x, self.choices, self.slots)

    def back(self, rows: Value) -> Value:
        """Rows that were made there, in the slots here."""
        return _exchanged(rows, self.axes, _ways(self.axes))


def route(ids: Value, axes: Axes, ways: int, experts: int, room: int) -> Route:
    """The route of choices with these numbers of experts, of which each of `ways` devices has `experts`.
    room: the slots that a device has for each of the devices. A choice of no expert stays where it is.
    """
    count = ids.shape[0]
    device = devices(ids, axes, ways, experts)
    order = jnp.argsort(device)
    counts = jnp.bincount(device, length=ways)
    starts = jnp.cumsum(counts) - counts
    place = jnp.argsort(order) - starts[device]
    slots = jnp.where(place < room, device * room + place, ways * room)
    at = jnp.arange(room)
    taken = at < counts[:, None]
    choices = jnp.where(taken, order[jnp.minimum(starts[:, None] + at, count - 1)], count).reshape(-1)
    own = jnp.where(taken.reshape(-1), ids[jnp.minimum(choices, count - 1)], -1)
    return Route(axes, choices, slots, _exchanged(own, axes, ways))


def devices(ids: Value, axes: Axes, ways: int, experts: int) -> Value:
    """The device of each choice's expert; this one, of what is of no expert."""
    here = lax.axis_index(axes)
    return jnp.where(ids < ways * experts, ids // experts, here).astype(jnp.int32)


def overflows(ids: Value, axes: Axes, ways: int, experts: int, room: int) -> Value:
    """Whether a choice on any of the devices would have no slot."""
    counts = jnp.bincount(devices(ids, axes, ways, experts), length=ways).astype(jnp.int32)
    return lax.pmax(jnp.max(counts), axes) > room


def _exchanged(x: Value, axes: Axes, ways: int) -> Value:
    """Slots for each device as those from each."""
    split = x.reshape(ways, -1, *x.shape[1:])
    made: Value = lax.all_to_all(split, axes, 0, 0, tiled=False)
    return made.reshape(x.shape)


def _ways(axes: Axes) -> int:
    return int(lax.axis_size(axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _there(axes: Axes, of: int, dtype: str, x: Value, choices: Value, slots: Value) -> Value:
    parts = encoded(x, dtype)
    rows = [part.at[choices // of].get(mode="fill", fill_value=0) for part in parts]
    return decoded([_exchanged(part, axes, _ways(axes)) for part in rows], x.dtype)


def _there_forward(
    axes: Axes, of: int, dtype: str, x: Value, choices: Value, slots: Value
) -> tuple[Value, Any]:
    return _there(axes, of, dtype, x, choices, slots), slots


def _there_backward(axes: Axes, of: int, dtype: str, slots: Value, dy: Value) -> tuple[Value, None, None]:
    return added(_exchanged(dy, axes, _ways(axes)), slots.reshape(-1, of)), None, None


_there.defvjp(_there_forward, _there_backward)


# ---------------------------------------------------------------- in eight bits


def encoded(x: Value, dtype: str) -> list[Value]:
    """Rows as codes of eight bits, and a scale for each row; themselves without a dtype."""
    if not dtype:
        return [x]
    wide, axes = x.astype(jnp.float32), tuple(range(1, x.ndim))
    whole = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    scale = jnp.where(largest > 0, largest / limit, 1.0)
    codes = wide / scale
    return [(jnp.round(codes) if whole else codes).astype(dtype), scale]


def decoded(parts: Sequence[Value], dtype: Any) -> Value:
    if len(parts) == 1:
        return parts[0]
    codes, scale = parts
    return (codes.astype(jnp.float32) * scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(axes: Axes, dtype: str, x: Value) -> Value:
    """Rows of all devices along the axes; their gradients are summed, each device's where it is."""
    parts = [lax.all_gather(part, axes, axis=0, tiled=True) for part in encoded(x, dtype)]
    return decoded(parts, x.dtype)


def _gathered_forward(axes: Axes, dtype: str, x: Value) -> tuple[Value, None]:
    return gathered(axes, dtype, x), None


def _gathered_backward(axes: Axes, dtype: str, _: None, dy: Value) -> tuple[Value]:
    return (lax.psum_scatter(dy, axes, scatter_dimension=0, tiled=True),)


gathered.defvjp(_gathered_forward, _gathered_backward)


# ---------------------------------------------------------------- on one device


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ordered(x: Value, order: Value, back: Value, of: int) -> Value:
    """Rows in an order, each of x [rows // of, ...]. back: the inverse of the order."""
    made: Value = x.at[order // of].get(mode="promise_in_bounds", unique_indices=of == 1)
    return made


def _ordered_forward(x: Value, order: Value, back: Value, of: int) -> tuple[Value, Any]:
    return ordered(x, order, back, of), (order, back)


def _ordered_backward(of: int, saved: Sequence[Value], dy: Value) -> tuple[Value, None, None]:
    order, back = saved
    return (ordered(dy, back, order, 1) if of == 1 else added(dy, back.reshape(-1, of))), None, None


ordered.defvjp(_ordered_forward, _ordered_backward)
