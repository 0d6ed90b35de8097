"""The order in which rows of an array are stored, where that is not the model's own.

A leaf [layers, ...] whose layers run on stages that take several chunks each lies there in the order of the
stages: so each stage holds the rows that it runs, and no step moves them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from xform.ops.rows import inverse, runs, take


@dataclasses.dataclass(frozen=True)
class Order:
    """Along `dim`, row i of what is stored is row rows[i] of the model's own array."""

    rows: tuple[int, ...]
    dim: int = 0

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Once: a layout is hashed in every call, and there may be many layers.
        return hash((self.rows, self.dim))

    def of(self, x: Any) -> Any:
        """The model's own array as it is stored; on the host where it is there."""
        if isinstance(x, np.ndarray):
            return np.take(x, self.rows, self.dim)
        return take(x, self.rows, self.dim)

    def back(self, x: Any) -> Any:
        """What is stored in the model's own order."""
        if isinstance(x, np.ndarray):
            return np.take(x, inverse(self.rows), self.dim)
        return take(x, inverse(self.rows), self.dim)

    def __str__(self) -> str:
        """As a name of an array has it: `0-1,4-5,2-3,6-7`, and the dimension, if it is not the first."""
        parts = (f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in runs(self.rows))
        return ",".join(parts) + (f":{self.dim}" if self.dim else "")


@dataclasses.dataclass(frozen=True)
class Ordered:
    """An array that is stored in an order, standing for the model's own."""

    stored: Any
    order: Order

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.shape)

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    def array(self) -> Any:
        return self.order.back(self.stored)


Orders = tuple[Order | None, ...]
"""For each array the order in which it is stored, None: the model's own. () where all have that."""


def only(orders: Orders) -> Orders:
    """The orders; () where there are none."""
    return orders if any(orders) else ()


def order_at(orders: Orders, number: int) -> Order | None:
    """The order of array `number`."""
    return orders[number] if orders else None
