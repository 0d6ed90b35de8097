"""A mask by position as a band, a chunk or a prefix: read in a few rows, and held to every point.

The rows suggest where a query's keys begin and end; each combination of these is a `Band`, the simplest
first. One that has the rows as they are is compared with the mask at all positions: at those where either may
change, if they are known (`breaks`), else at each, by blocks, since it is never made whole. A row in which
they differ is one more row to read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from xform.ops.masks import Band
from xform.raising.indices import Array

Seen = Callable[[Array, Array], Array]
"""Whether queries, [rows, 1], see keys, [1, keys]: something that broadcasts to [rows, keys]."""

_BLOCK = 1 << 22
_TRIES = 6


def fit(seen: Seen, queries: int, keys: int, breaks: Sequence[Array] | None = None) -> Band | None:
    """The band that a mask is, at each of its positions; None where it is none. breaks: the keys at which it
    may change, each [queries] or for all of them, if these are known.
    """
    columns = np.arange(keys, dtype=np.int32)[None, :]
    rows = sample(queries)
    tried: set[Band] = set()
    for _ in range(_TRIES):
        read = _read(seen, rows, columns)
        for band in _candidates(seen, rows, read, queries, keys):
            if band in tried or not _agrees(band, rows, columns, read):
                continue
            tried.add(band)
            wrong = _first_wrong(band, seen, queries, columns, breaks)
            if wrong is None:
                return band
            rows = np.unique([*rows, wrong])
            break
        else:
            return None
    return None


def kinds(band: Band, queries: int, keys: int) -> tuple[str, ...]:
    """What a band is called: full, or some of causal, window, prefix, chunked."""
    if band.is_full:
        return ("full",)
    found = []
    at = np.array([0, queries - 1])
    ahead = None if band.right is None else band.right + band.offset
    causal = ahead is not None and ahead <= max(0, keys - queries)
    if causal and not band.prefix:
        found.append("causal")
    limited = band.left is not None and bool((at + band.offset - band.left > 0).any())
    if limited or (ahead is not None and not causal):
        found.append("window")
    if band.prefix:
        found.append("prefix")
    if band.chunk is not None:
        found.append("chunked")
    return tuple(found) or ("full",)


def sample(n: int) -> Array:
    """A few of n positions: the first, the last and some between."""
    some = [0, 1, 2, 3, n // 4, n // 3, n // 2, n // 2 + 1, 3 * n // 4, n - 3, n - 2, n - 1]
    return np.unique([i for i in some if 0 <= i < n])


def blocks(queries: int, keys: int) -> Iterator[Array]:
    """The numbers of all queries, [rows, 1], some at a time."""
    step = max(1, min(_BLOCK // max(keys, 1), queries))
    for first in range(0, queries, step):
        yield np.arange(first, min(first + step, queries), dtype=np.int32)[:, None]


def _read(seen: Seen, rows: Array, columns: Array) -> Array:
    return np.broadcast_to(seen(rows[:, None], columns), (len(rows), columns.size))


def _agrees(band: Band, rows: Array, columns: Array, read: Array) -> bool:
    return bool((band.allowed(rows[:, None].astype(np.int32), columns) == read).all())


def _first_wrong(
    band: Band, seen: Seen, queries: int, columns: Array, breaks: Sequence[Array] | None
) -> int | None:
    places = None if breaks is None else _places(band, queries, columns.size, breaks)
    for rows in blocks(queries, columns.size if places is None else places.shape[1]):
        at = columns if places is None else places[rows[:, 0]]
        differs = band.allowed(rows, at) != seen(rows, at)
        if differs.any():
            whole = np.broadcast_to(differs, (len(rows), at.shape[1]))
            return int(rows[np.argmax(whole.any(axis=1)), 0])
    return None


def _places(band: Band, queries: int, keys: int, breaks: Sequence[Array]) -> Array:
    """For each query the keys at which the mask or the band may change, and the first, [queries, places]."""
    own = [np.zeros((), np.int64), *band.bounds(queries, keys), np.asarray(band.prefix)]
    each = [np.broadcast_to(x, (queries,)) for x in (*own, *breaks)]
    return np.clip(np.stack(each, 1), 0, keys - 1).astype(np.int32)


def _runs(row: Array) -> list[tuple[int, int]]:
    """Where the keys of a row begin and end: each run of them, the end exclusive."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _candidates(seen: Seen, rows: Array, read: Array, queries: int, keys: int) -> Iterator[Band]:
    """Bands that the rows suggest, the simplest first."""
    runs = [(int(r), _runs(row)) for r, row in zip(rows, read, strict=True)]
    prefixes, ends, begins, chunks = {0}, set(), set(), set()
    for r, found in runs:
        if not found:
            continue
        (_, first_end), (begin, end) = found[0], found[-1]
        if found[0][0] == 0 and (len(found) > 1 or r == 0) and first_end < keys:
            prefixes.add(first_end)
        if end < keys:
            ends.add(end - 1 - r)
        if begin > 0:
            begins.add(r - begin)
            chunks.add(begin)
    if chunks:
        everyone = np.arange(queries, dtype=np.int32)[:, None]
        for key in prefixes:
            column = np.broadcast_to(seen(everyone, np.array([[min(key, keys - 1)]])), (queries, 1))[:, 0]
            chunks.update(end for _, end in _runs(column))
            chunks.update(end - begin for begin, end in _runs(column))
        chunks.update(np.gcd.reduce(list(chunks)).ravel().tolist())
    rights: Sequence[int | None] = [None, *sorted(ends, key=lambda c: (c != 0, abs(c)))]
    lefts: Sequence[int | None] = [None, *sorted(begins)]
    pieces: Sequence[int | None] = [None, *sorted(c for c in chunks if c > 1)]
    offsets = sorted({0, keys - queries})
    choices = itertools.product(sorted(prefixes), pieces, rights, lefts)
    for prefix, chunk, right, left in sorted(choices, key=lambda c: sum(x not in (None, 0) for x in c[:2])):
        for offset in offsets if chunk is not None else (0,):
            yield _band(right, left, chunk, prefix, offset, keys - queries)


def _band(
    right: int | None, left: int | None, chunk: int | None, prefix: int, offset: int, more: int
) -> Band:
    """A band about the diagonal that its last keys lie on where that is a query's own, or the keys' end."""
    if chunk is None and right is not None and (left is None or right in (0, more)):
        offset = right
    return Band(
        right=None if right is None else right - offset,
        left=None if left is None else left + offset,
        offset=offset,
        chunk=chunk,
        prefix=prefix,
    )
