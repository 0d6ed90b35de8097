"""Which items of two sequences are the same one: an alignment that keeps the order and costs little on long
programs.

Several keys are given for each item, from the most telling to the least. The first aligns what it can; each
further key works only in the gaps that are left. One key is aligned by Myers' greedy algorithm ("An O(ND)
Difference Algorithm and its Variations", 1986), which is fast when few items differ. Beyond `MOST_EDITS`
edits the sequences are first cut at anchors: the k-th occurrence of a key on one side is the k-th on the
other when both sides have it equally often, and the longest run of such pairs that rises on both sides is
kept (the idea of patience diff, with repeated keys counted).
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

Pairs = list[tuple[int, int]]
Keys = Sequence[Hashable | None]
"""A key an item; items whose key is None are aligned to nothing."""

MOST_EDITS = 500


def align(rounds: Sequence[tuple[Keys, Keys]]) -> Pairs:
    """Pairs (i, j), rising in both, of items that are the same under the first round that tells."""
    pairs: Pairs = []
    n, m = len(rounds[0][0]), len(rounds[0][1])
    for a, b in rounds:
        found: Pairs = []
        i, j = 0, 0
        for next_i, next_j in [*pairs, (n, m)]:
            if i < next_i and j < next_j:
                found.extend((i + x, j + y) for x, y in _common(a[i:next_i], b[j:next_j]))
            if next_i < n:
                found.append((next_i, next_j))
            i, j = next_i + 1, next_j + 1
        pairs = found
    return pairs


def _common(a: Keys, b: Keys) -> Pairs:
    head = 0
    while head < len(a) and head < len(b) and a[head] is not None and a[head] == b[head]:
        head += 1
    tail = 0
    while (
        tail < len(a) - head
        and tail < len(b) - head
        and a[len(a) - 1 - tail] is not None
        and a[len(a) - 1 - tail] == b[len(b) - 1 - tail]
    ):
        tail += 1
    pairs = [(i, i) for i in range(head)]
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    pairs += [(head + i, head + j) for i, j in _inner(inner_a, inner_b)]
    pairs += [(len(a) - t, len(b) - t) for t in range(tail, 0, -1)]
    return pairs


def _inner(a: Keys, b: Keys) -> Pairs:
    """The sequences without what only one of them has, and then the cheapest way to make one from the
    other."""
    both = (set(a) & set(b)) - {None}
    if not both:
        return []
    at_a = [i for i, key in enumerate(a) if key in both]
    at_b = [j for j, key in enumerate(b) if key in both]
    small_a, small_b = [a[i] for i in at_a], [b[j] for j in at_b]
    pairs = _myers(small_a, small_b)
    if pairs is None:
        pairs = _between_anchors(small_a, small_b)
    return [(at_a[i], at_b[j]) for i, j in pairs]


def _between_anchors(a: Keys, b: Keys) -> Pairs:
    pairs: Pairs = []
    i, j = 0, 0
    for next_i, next_j in [*_anchors(a, b), (len(a), len(b))]:
        between = _myers(a[i:next_i], b[j:next_j])
        pairs += [(i + x, j + y) for x, y in between or []]
        if next_i < len(a):
            pairs.append((next_i, next_j))
        i, j = next_i + 1, next_j + 1
    return pairs


def _anchors(a: Keys, b: Keys) -> Pairs:
    count_a, count_b = Counter(a), Counter(b)
    places: dict[Hashable | None, list[int]] = defaultdict(list)
    for j, key in enumerate(b):
        places[key].append(j)
    seen: Counter[Hashable | None] = Counter()
    candidates = []
    for i, key in enumerate(a):
        if count_a[key] == count_b[key]:
            candidates.append((i, places[key][seen[key]]))
            seen[key] += 1
    return _rising(candidates)


def _rising(candidates: Pairs) -> Pairs:
    """The longest part of the candidates, which rise in i, that rises in j too."""
    tops: list[int] = []
    top_at: list[int] = []
    previous: list[int] = []
    for index, (_, j) in enumerate(candidates):
        place = bisect.bisect_left(tops, j)
        previous.append(top_at[place - 1] if place else -1)
        if place == len(tops):
            tops.append(j)
            top_at.append(index)
        else:
            tops[place], top_at[place] = j, index
    chain: Pairs = []
    index = top_at[-1] if top_at else -1
    while index >= 0:
        chain.append(candidates[index])
        index = previous[index]
    return chain[::-1]


def _myers(a: Keys, b: Keys) -> Pairs | None:
    """A longest common subsequence as pairs, or None where it takes over `MOST_EDITS` edits."""
    n, m = len(a), len(b)
    if not n or not m:
        return []
    reach = {1: 0}  # diagonal i - j -> the furthest i
    history: list[dict[int, int]] = []
    for edits in range(min(n + m, MOST_EDITS) + 1):
        history.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
            )
            i = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            j = i - diagonal
            while i < n and j < m and a[i] == b[j]:
                i, j = i + 1, j + 1
            reach[diagonal] = i
            if i >= n and j >= m:
                return _walk_back(history, n, m)
    return None


def _walk_back(history: list[dict[int, int]], i: int, j: int) -> Pairs:
    pairs: Pairs = []
    for edits in range(len(history) - 1, 0, -1):
        reach, diagonal = history[edits], i - j
        down = diagonal == -edits or (
            diagonal != edits and reach.get(diagonal - 1, -1) < reach.get(diagonal + 1, -1)
        )
        start_i = reach[diagonal + 1] if down else reach[diagonal - 1]
        start_j = start_i - (diagonal + 1 if down else diagonal - 1)
        entered = start_i if down else start_i + 1
        while i > entered:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        i, j = start_i, start_j
    pairs += [(k, k) for k in range(i - 1, -1, -1)]
    return pairs[::-1]
