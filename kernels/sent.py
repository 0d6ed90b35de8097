"""What devices send each other for an attention whose length lies over them, in bytes, by strategy.

With T one device's queries in the dtype they are sent in, as many heads of keys, and C devices: all-gather
and ring send 2(C-1)T forward and 3(C-1)T backward, when there the queries move, heads for length 11T(C-1)/C.
With fewer heads of keys these are smaller, and backward it is they that move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from xform.kernels import ring
from xform.ops import Band

STRATEGIES = ("all_gather", "ring", "ulysses", "usp")

WIDE = 4
"""Bytes of a number of lse, of delta and of segments."""


def hops(band: Band, n: int, t: int, moving: str, balance: str = "") -> int:
    """How often something is sent on in a ring of n devices with t queries and keys each."""
    return len(ring.turns(band, n, t, t, moving, balance)) - 1


def repeated(n: int, g: int, ways: int) -> int | None:
    """How often n key heads of g queries each are repeated so that they divide; None: they cannot."""
    return next((r for r in range(1, g + 1) if g % r == 0 and n * r % ways == 0), None)


def alike(band: Band, t: int) -> bool:
    """Whether a band is the same for all keys that stand at a multiple of t, but for where the queries do."""
    return band.prefix == 0 and (band.chunk is None or t % band.chunk == 0)


@dataclasses.dataclass(frozen=True)
class Sent:
    """A part of t queries and keys of n key heads of g queries each, d and e wide, in numbers of so many
    bytes; with segments or without; for so many rows of the batch; in the order of this balance.
    """

    n: int
    g: int
    t: int
    d: int
    e: int
    itemsize: int
    segments: bool = False
    rows: int = 1
    balance: str = ""

    @classmethod
    def of(cls, q: Any, v: Any, segments: bool) -> Sent:
        """Of values [b, n, g, t, d] and [b, n, t, e] on a device."""
        b, n, g, t, d = q.shape
        return cls(n, g, t, d, v.shape[3], q.dtype.itemsize, segments, b)

    @property
    def queries(self) -> int:
        return self.rows * self.n * self.g * self.t * self.d * self.itemsize

    @property
    def out(self) -> int:
        return self.rows * self.n * self.g * self.t * self.e * self.itemsize

    @property
    def keys(self) -> int:
        """Keys and values."""
        return self.rows * self.n * self.t * (self.d + self.e) * self.itemsize

    @property
    def sums(self) -> int:
        """lse, or delta."""
        return self.rows * self.n * self.g * self.t * WIDE

    @property
    def numbers(self) -> int:
        """Segments."""
        return self.rows * self.t * WIDE if self.segments else 0

    def backward(self, keys: int, queries: int) -> tuple[int, int]:
        """Of a backward pass in which keys and their gradients are sent so often, or queries and theirs."""
        asked = 2 * self.queries + self.out + 2 * self.sums
        return keys * (2 * self.keys + self.numbers), queries * (asked + self.numbers)

    def moving(self, keys: int, queries: int) -> str:
        """Which of the two it is."""
        by_keys, by_queries = self.backward(keys, queries)
        return "queries" if by_queries < by_keys else "keys"

    def by(self, strategy: str, band: Band, ways: int, inner: int, differentiated: bool) -> float | None:
        """The bytes that a device sends over `ways` devices, of which heads are exchanged, by "usp", over
        `inner`; None where the heads do not divide.
        """
        exchanged = {"ulysses": ways, "usp": inner}.get(strategy, 1)
        times = repeated(self.n, self.g, exchanged)
        if times is None:
            return None
        heads, length = self.n * times // exchanged, self.t * exchanged
        part = dataclasses.replace(self, n=heads, g=self.g // times, t=length)
        total = part._along(strategy, band, ways // exchanged, differentiated)
        there = self.queries + part.keys + self.out + self.sums
        back = there + self.queries + part.keys + self.sums
        share = (exchanged - 1) / exchanged
        total += share * (there + (back if differentiated else 0))
        return total + 2 * (exchanged - 1) * self.numbers * (1 + differentiated)

    def ways_of(
        self, names: Iterable[str], band: Band, ways: int, inner: int, differentiated: bool
    ) -> dict[str, float]:
        """The bytes of each of these strategies that there is, as `by` has them."""
        costs = {name: self.by(name, band, ways, inner, differentiated) for name in names}
        return {name: cost for name, cost in costs.items() if cost is not None}

    def undivided(self, strategy: str, what: str, ways: int, inner: int) -> str:
        """The error where heads do not divide."""
        exchanged, heads = ways if strategy == "ulysses" else inner, self.n * self.g
        fit = [n for n in range(2, heads + 1) if repeated(self.n, self.g, n) is not None]
        return (
            f"context.strategy = {strategy!r} {what}: {heads} on a device do not divide over {exchanged}"
            f" devices; over {', '.join(map(str, fit)) or 'none'} they would, and 'all_gather' and 'ring'"
            " take any"
        )

    def _along(self, strategy: str, band: Band, ways: int, differentiated: bool) -> float:
        """Of keys, or queries, that are sent to all of so many devices."""
        keys = queries = ways - 1
        if strategy != "all_gather":
            keys, queries = (hops(band, ways, self.t, what, self.balance) for what in ("keys", "queries"))
        total = keys * (self.keys + self.numbers)
        if differentiated:
            by_keys, by_queries = self.backward(keys, queries)
            total += (
                by_keys
                if strategy == "all_gather" and (self.balance or not alike(band, self.t))
                else min(by_keys, by_queries)
            )
        return total
