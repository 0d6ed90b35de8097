"""Which result of a program is the next value of which of its inputs, told from their paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform.context import Leaf


def twins(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> list[int | None]:
    """For each output the input it is the next value of: of the same type, with the longest common end of its
    path.
    """
    return of_same_end(inputs, outputs, lambda leaf: (leaf.aval.shape, leaf.aval.dtype))


def of_same_end(
    inputs: Sequence[Leaf], others: Sequence[Leaf], alike: Callable[[Leaf], Any] = lambda leaf: None
) -> list[int | None]:
    """For each leaf the first input that is alike and has the longest end of its path in common, by keys."""
    ends: dict[tuple[Any, str], int] = {}
    for i, leaf in enumerate(inputs):
        for end in _ends(leaf.path):
            ends.setdefault((alike(leaf), end), i)
    found: list[int | None] = []
    for leaf in others:
        hits = (ends.get((alike(leaf), end)) for end in _ends(leaf.path))
        found.append(next((i for i in hits if i is not None), None))
    return found


def _ends(path: str) -> list[str]:
    """The ends of a path that begin where a key does, longest first."""
    return [path[i:] for i, c in enumerate(path) if c in "[."]
