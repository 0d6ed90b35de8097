"""A pytree as an indented tree, a line a leaf, in which what is alike stands once.

    [0]                                                     [0]
      .params['layers'][0]['up']     f32[8,16]  e x m         .params['layers'][0..1]
      .params['layers'][0]['gate']   f32[8,16]  e x m    ->     ['gate', 'up']         f32[8,16]  e x m
      .params['layers'][1]['up']     f32[8,16]  e x m         .mu, .nu                 as [0].params: 4 leaves
      ...

Siblings below which everything is the same share a line: layers, gate and up, both moments of Adam. A branch
that is the same as one printed before only refers to it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

Shape = int
"""A number for a branch: equal numbers, equal branches."""

WORTH_A_REFERENCE = 4
"""Leaves from which on a branch seen before is referred to instead of printed again."""


@dataclasses.dataclass
class _Node:
    cells: tuple[str, ...] = ()  # of a leaf
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)
    shape: Shape = -1
    leaves: int = 1


def tree(leaves: Iterable[tuple[Sequence[str], Sequence[str]]]) -> list[tuple[str, ...]]:
    """Rows of a table for leaves given as (path, cells): the indented name, then the cells.

    A path is a sequence of keys as `str` writes those of jax: `[0]`, `.params`, `['w']`.
    """
    root = _Node()
    for path, cells in leaves:
        node = root
        for key in path:
            node = node.children.setdefault(key, _Node())
        node.cells = tuple(cells)
    _number(root, {})
    rows: list[tuple[str, ...]] = []
    _print(root, "", 0, rows, {})
    return rows


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows as lines, in columns as wide as what stands in them; of a row, the last cell may be any length."""
    rows = [tuple(row) for row in rows]
    widths: dict[int, int] = {}
    for row in rows:
        for i, cell in enumerate(row[:-1]):
            widths[i] = max(widths.get(i, 0), len(cell))
    lines = (
        "  ".join([*(c.ljust(widths[i]) for i, c in enumerate(row[:-1])), *row[-1:]]).rstrip() for row in rows
    )
    return "\n".join(lines)


def _number(node: _Node, known: dict[object, Shape]) -> None:
    for child in node.children.values():
        _number(child, known)
    inside = tuple((key, child.shape) for key, child in node.children.items())
    node.shape = known.setdefault((node.cells, inside), len(known))
    node.leaves = sum(child.leaves for child in node.children.values()) if node.children else 1


def _print(node: _Node, path: str, depth: int, rows: list[tuple[str, ...]], seen: dict[Shape, str]) -> None:
    groups: dict[Shape, list[str]] = {}
    for key, child in node.children.items():
        groups.setdefault(child.shape, []).append(key)
    for shape, keys in groups.items():
        child, name, here = node.children[keys[0]], joined(keys), path + joined(keys)
        while len(child.children) == 1 and shape not in seen:
            (key, child), shape = next(iter(child.children.items())), -1
            name, here, shape = name + key, here + key, child.shape
        lead = "  " * depth + name
        if not child.children:
            rows.append((lead, *child.cells))
        elif shape in seen:
            rows.append((lead, f"as {seen[shape]}: {child.leaves} leaves"))
        else:
            rows.append((lead,))
            _print(child, here, depth + 1, rows, seen)
            if child.leaves >= WORTH_A_REFERENCE:
                seen[shape] = here


def joined(keys: Sequence[str]) -> str:
    """Keys of the same level as one: `[0..31]`, `['gate', 'up']`, `['block_0..11']`, `.mu, .nu`."""
    if len(keys) == 1:
        return keys[0]
    for left, right, quote in (("['", "']", "'"), ("[", "]", "")):
        if all(key.startswith(left) and key.endswith(right) for key in keys):
            names = _ranges([key[len(left) : -len(right)] for key in keys])
            return "[" + ", ".join(f"{quote}{name}{quote}" for name in names) + "]"
    return ", ".join(_ranges(keys))


def _ranges(names: Sequence[str]) -> list[str]:
    """The names, those that differ only in one number as one a run of numbers: block_0..3."""
    numbered: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*)(\D*)", name)
        lead, number, end = match.groups() if match else (name, None, "")
        numbered.setdefault((lead, end), []).extend([] if number is None else [int(number)])
    return [f"{lead}{run}{end}" for (lead, end), ns in numbered.items() for run in _runs(sorted(ns))]


def _runs(numbers: Sequence[int]) -> list[str]:
    """0, 1, 2, 5 as 0..2 and 5; no number at all as the empty word."""
    if not numbers:
        return [""]
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    runs = [numbers[i:j] for i, j in zip([0, *breaks], [*breaks, len(numbers)], strict=True)]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
