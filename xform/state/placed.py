"""`Placed`: a tree of the user's in the plan's layout: arrays of a kind stacked into one, rows in the plan's
order.

    {'layers': [{'w': a}, {'w': b}, {'w': c}], 'norm': d}      the model's own tree
    Placed: ['layers'][*]['w']: [a b c]    ['norm']: d         as the step takes and returns it

What a pass rolls into a loop is stored stacked, once, and the compiled step neither stacks nor takes apart.
What it runs in another order, layers on stages, is stored in that one, and the step moves no row. A `Placed`
is a pytree of its arrays; its layout is part of its structure. Both ways are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.state.order import Order, Ordered, Orders, order_at

__all__ = [
    "Element",
    "Layout",
    "Placed",
    "apart",
    "closed",
    "gathered",
    "is_placed",
    "opened",
    "plain",
    "row_path",
    "scattered",
    "stored",
    "whole",
]

Groups = tuple[tuple[int, ...], ...]
"""For each array the leaves it holds: (i,) for leaf i as it is, a row (i, j, ...) for those stacked."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """tree: the structure of the model's own tree. groups: what each array holds of its leaves; orders: in
    which order. kept: the names of arrays of the plan's own that go with them, from call to call; begun: each
    has something in it.
    """

    tree: Any
    groups: Groups
    kept: tuple[str, ...] = ()
    begun: bool = False
    orders: Orders = ()

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The arrays' names: a leaf's path, with * where those of a row differ, and an order after an @: what
        is saved in one order is not read in another.
        """
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        )
        paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        names = [row_path([paths[i] for i in group]) for group in self.groups]
        orders = [order_at(self.orders, n) for n in range(len(names))]
        marked = (f"{name}@{order}" if order else name for name, order in zip(names, orders, strict=True))
        return (*marked, *self.kept)


class _Name:
    """An array of a `Placed` as a key in a path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return self.path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)


class Placed:
    """The arrays of a tree as the plan stores them. `step.unplace(placed)` is the model's own tree again.

    arrays: one for each group of the layout, in its order; a row of n leaves of shape [...] is [n, ...]. Then
    those that are kept.
    """

    def __init__(self, layout: Layout, arrays: Iterable[Any]) -> None:
        self.layout, self.arrays = layout, tuple(arrays)

    def opened(self) -> Any:
        """The model's tree; leaves of a row are `Element`s, those in another order `Ordered`."""
        layout = self.layout
        leaves = scattered(layout.groups, self.arrays[: len(layout.groups)], layout.orders)
        return jax.tree.unflatten(layout.tree, leaves)

    @property
    def kept(self) -> dict[str, Any]:
        """What the plan keeps besides the tree, by name."""
        return dict(zip(self.layout.kept, self.arrays[len(self.layout.groups) :], strict=True))

    def __repr__(self) -> str:
        kinds = (
            f"  {path}: {getattr(x, 'dtype', x)}{list(getattr(x, 'shape', ()))}"
            for path, x in zip(self.layout.paths, self.arrays, strict=True)
        )
        return "Placed(\n" + "\n".join(kinds) + "\n)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "layout" not in self.__dict__:
            raise AttributeError(name)
        raise AttributeError(f"{name!r}: {_NOT_ITS_TREE.format(f'.{name}')}")

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(_NOT_ITS_TREE.format(f"[{key!r}]"))


_NOT_ITS_TREE = (
    "this tree lies as the plan wants it, layers stacked (xform.Placed); step.unplace(tree){} reads the"
    " model's own tree"
)

jax.tree_util.register_pytree_with_keys(
    Placed,
    lambda placed: (
        tuple(zip(map(_Name, placed.layout.paths), placed.arrays, strict=True)),
        placed.layout,
    ),
    Placed,
    lambda placed: (placed.arrays, placed.layout),
)


@dataclasses.dataclass(frozen=True)
class Element:
    """One leaf of a row: number `index` of the `size` that are stacked in `stacked`."""

    stacked: Any
    index: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stacked.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.stacked.dtype

    def array(self) -> Any:
        return jax.lax.index_in_dim(plain(self.stacked), self.index, keepdims=False)


def plain(x: Any) -> Any:
    """A leaf as an array of its own, in the model's own order."""
    return x.array() if isinstance(x, Element | Ordered) else x


def opened(tree: Any) -> Any:
    """The tree with the model's own in place of every `Placed` in it."""
    return jax.tree.map(lambda x: x.opened() if isinstance(x, Placed) else x, tree, is_leaf=is_placed)


def is_placed(x: Any) -> bool:
    return isinstance(x, Placed)


def closed(tree: Any, layouts: Mapping[Any, Layout], kept: Mapping[str, Any] | None = None) -> Any:
    """The model's tree with a `Placed` in place of each part that has the structure of one of the layouts.

    Leaves that are `Element`s or `Ordered` elsewhere become arrays. kept: what goes with the first part whose
    layout keeps something, by name.
    """
    left = dict(kept or {})

    def here(x: Any) -> bool:
        return bool(layouts) and jax.tree.structure(x) in layouts

    def one(x: Any) -> Any:
        if not here(x):
            return plain(x)
        layout = layouts[jax.tree.structure(x)]
        arrays = gathered(layout.groups, jax.tree.leaves(x), orders=layout.orders)
        if layout.kept and all(name in left for name in layout.kept):
            return Placed(layout, [*arrays, *map(left.pop, layout.kept)])
        if all(len(group) == 1 for group in layout.groups) and not layout.orders:
            return jax.tree.unflatten(layout.tree, arrays)
        return Placed(dataclasses.replace(layout, kept=(), begun=False), arrays)

    return jax.tree.map(one, tree, is_leaf=here)


def gathered(
    groups: Groups, leaves: Sequence[Any], stack: Callable[..., Any] | None = None, orders: Orders = ()
) -> list[Any]:
    """An array for each group: a leaf as it is, a row stacked, each in its order, unless it is there so.

    stack: makes of the leaves of group number n what is not there, `stack(leaves, n)`; by default in place.
    """

    def one(number: int, group: tuple[int, ...]) -> Any:
        row, order = [leaves[i] for i in group], order_at(orders, number)
        if (found := stored(row, order)) is not None:
            return found
        if stack is not None:
            return stack(row, number)
        arrays = list(map(plain, row))
        array = arrays[0] if len(arrays) == 1 else jnp.stack(arrays)
        return array if order is None else order.of(array)

    return [one(n, group) for n, group in enumerate(groups)]


def stored(row: Sequence[Any], order: Order | None) -> Any | None:
    """What holds exactly these leaves, in this order; None where nothing does."""
    found = whole(row)
    if isinstance(found, Ordered):
        return found.stored if found.order == order else None
    return found if order is None else None


def apart(groups: Groups, leaves: Sequence[Any], orders: Orders = ()) -> list[str]:
    """What to tell of a call with leaves that are not there as they are stored."""
    stacked, moved = 0, 0
    for number, group in enumerate(groups):
        row, order = [leaves[i] for i in group], order_at(orders, number)
        if stored(row, order) is None:
            stacked += len(group) * (len(group) > 1 and whole(row) is None)
            moved += order is not None or isinstance(whole(row), Ordered)
    ways = (
        (stacked, "the model's own tree, and are stacked", "stacks"),
        (moved, "another order than the plan's, and are reordered", "reorders"),
    )
    return [
        f"{count} arrays come in {how} in every call; .place(...) {once} them once"
        for count, how, once in ways
        if count
    ]


def whole(row: Sequence[Any]) -> Any | None:
    """What holds exactly these leaves, one after the other, an `Ordered` where it has an order of its own;
    None where they are arrays of their own, or a part.
    """
    first = row[0]
    if len(row) == 1:
        return None if isinstance(first, Element) else first
    if not isinstance(first, Element) or first.size != len(row):
        return None
    same = (isinstance(x, Element) and x.stacked is first.stacked and x.index == i for i, x in enumerate(row))
    return first.stacked if all(same) else None


def scattered(groups: Groups, arrays: Sequence[Any], orders: Orders = ()) -> list[Any]:
    """The leaves that the arrays hold, those of a row as `Element`s, those in another order as `Ordered`."""
    leaves: dict[int, Any] = {}
    for number, (group, array) in enumerate(zip(groups, arrays, strict=True)):
        if (order := order_at(orders, number)) is not None:
            array = Ordered(array, order)
        if len(group) == 1:
            leaves[group[0]] = array
        else:
            leaves.update((leaf, Element(array, n, len(group))) for n, leaf in enumerate(group))
    return [leaves[i] for i in range(len(leaves))]


def row_path(paths: Sequence[str]) -> str:
    """One path for several: what they begin and end with in common, and * between."""
    if len(set(paths)) == 1:
        return paths[0]
    start = _common(paths)
    end = _common([path[len(start) :][::-1] for path in paths])[::-1]
    return f"{start}*{end}"


def _common(texts: Sequence[str]) -> str:
    """What all the texts begin with."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    return "".join(column[0] for column in columns)
