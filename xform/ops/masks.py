"""Which keys a query of attention may see, by position alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from xform.trace import Value


@dataclasses.dataclass(frozen=True)
class Band:
    """A mask by positions: keys in a band around the query, in the same chunk, or before the prefix's end.

    Query number t stands at position t + offset among the keys. It sees key s where all hold:
    s <= t + offset + right; s >= t + offset - left; both lie in the same chunk of `chunk` positions, the
    first of which has begun `phase` positions before the first key; or where s < prefix. None: no such bound.
    """

    right: int | None = None
    left: int | None = None
    offset: int = 0
    chunk: int | None = None
    prefix: int = 0
    phase: int = 0

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key, by this alone, whatever their number."""
        return self.right is None and self.left is None and self.chunk is None

    @property
    def grows(self) -> bool:
        """Whether a query sees the more keys the later it stands."""
        return self.right is not None and self.left is None and self.chunk is None

    def allowed(self, t: Value, s: Value) -> Value:
        """Whether queries `t` see keys `s`: integer arrays (jax's or numpy's) that broadcast; booleans."""
        at = t + self.offset
        seen = (at == at) & (s == s)
        if self.right is not None:
            seen &= s <= at + self.right
        if self.left is not None:
            seen &= s >= at - self.left
        if self.chunk is not None:
            seen &= (at + self.phase) // self.chunk == (s + self.phase) // self.chunk
        if self.prefix:
            seen |= (s < self.prefix) & (at == at)
        return seen

    def bounds(self, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
        """For each query the first key that it sees, and the one after the last, without the prefix."""
        return self.bounds_at(np.arange(queries) + self.offset, keys)

    def bounds_at(self, at: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of queries at these positions."""
        queries = at.size
        first, last = np.zeros(queries, np.int64), np.full(queries, keys, np.int64)
        if self.right is not None:
            last = np.minimum(last, at + self.right + 1)
        if self.left is not None:
            first = np.maximum(first, at - self.left)
        if self.chunk is not None:
            start = (at + self.phase) // self.chunk * self.chunk - self.phase
            first, last = np.maximum(first, start), np.minimum(last, start + self.chunk)
        return first, np.maximum(last, first)

    def sees_some(self, queries: int, keys: int) -> bool:
        """Whether every query sees at least one of the keys."""
        return self.sees_some_at(np.arange(queries) + self.offset, keys)

    def sees_some_at(self, at: np.ndarray, keys: int) -> bool:
        """The same of queries at these positions."""
        first, last = self.bounds_at(at, keys)
        return bool(min(self.prefix, keys) > 0 or (last > first).all())

    def moved(self, queries: int, keys: int) -> Band:
        """The same band for the queries from number `queries` on and the keys from number `keys` on."""
        return dataclasses.replace(
            self,
            offset=self.offset + queries - keys,
            prefix=max(self.prefix - keys, 0),
            phase=(self.phase + keys) % self.chunk if self.chunk is not None else 0,
        )

    def strided(self, step: int, queries: int, keys: int) -> Band:
        """The same band for each `step`-th query from number `queries` on, and each such key from `keys` on.
        Chunks are a multiple of the step.
        """
        at, phase = queries + self.offset, (keys + self.phase) // step
        offset = 0 if self.chunk is None else (at + self.phase) // step - phase
        return Band(
            right=None if self.right is None else (at + self.right - keys) // step - offset,
            left=None if self.left is None else (self.left + keys - at) // step + offset,
            offset=offset,
            chunk=None if self.chunk is None else self.chunk // step,
            prefix=max(-((keys - self.prefix) // step), 0),
            phase=0 if self.chunk is None else phase % (self.chunk // step),
        )

    def simplified(self, queries: int, keys: int) -> Band | None:
        """What it is for so many queries and keys: none, where no query sees any; full, where each sees
        all.
        """
        first, last = self.bounds(queries, keys)
        first, last = np.maximum(first, 0), np.minimum(last, keys)
        if self.prefix >= keys or bool(((first == 0) & (last == keys)).all()):
            return Band()
        return self if self.prefix > 0 or bool((last > first).any()) else None
