"""How a value lies on the mesh, from the view of one shard: pieces of its dimensions, each over some axes.

A dimension is a product of *pieces*, outermost first, and each piece lies in equal blocks over its mesh axes:
`[8 over fsdp, 6]`. Most dimensions are one piece. Rows that were two dimensions before a reshape, a batch
over `fsdp` and a length over `tensor`, are two: the array on a device is a reshape of what it was, and
nothing moves. A value is *partial* over an axis when the devices along it hold the terms of a sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from xform.sharding.layout import entry_axes


class Piece(NamedTuple):
    """`size` elements over the mesh axes `axes`, outermost first."""

    size: int
    axes: tuple[str, ...] = ()


Dim = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Laid:
    """A layout: the pieces of each dimension, and the mesh axes over which the value is yet to be summed."""

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that some dimension lies over."""
        return tuple(a for dim in self.dims for piece in dim for a in piece.axes)

    @property
    def is_whole(self) -> bool:
        return not self.partial and not self.axes

    def summed(self) -> Laid:
        return Laid(self.dims) if self.partial else self


def whole(shape: Sequence[int]) -> Laid:
    """All of a value on every device."""
    return Laid(tuple((Piece(size),) for size in shape))


class Grid:
    """The mesh axes of the manual region, with their sizes; `slow` are those between slices."""

    def __init__(self, sizes: Mapping[str, int], slow: frozenset[str] = frozenset()) -> None:
        self.sizes = dict(sizes)
        self.slow = slow

    def ways(self, axes: Sequence[str]) -> int:
        """Among how many devices these axes divide what lies over them."""
        return math.prod(self.sizes[a] for a in axes)

    def local(self, laid: Laid) -> tuple[int, ...]:
        """The shape on one device."""
        return tuple(math.prod(p.size // self.ways(p.axes) for p in dim) for dim in laid.dims)

    def of_spec(self, spec: PartitionSpec, shape: Sequence[int]) -> Laid:
        """The layout that a PartitionSpec says, as far as it speaks of the region's axes."""
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        return Laid(
            tuple(
                (Piece(size, tuple(a for a in entry_axes(e) if a in self.sizes)),)
                for size, e in zip(shape, entries, strict=True)
            )
        )

    def split(self, dim: Dim, sizes: Sequence[int]) -> Dim | None:
        """The same dimension in pieces of these sizes, or None where its blocks do not fall on them."""
        rest = list(dim)
        made: list[Piece] = []
        for size in sizes:
            if size == 1:
                made.append(Piece(1))
                continue
            have = 1
            axes: tuple[str, ...] = ()
            while have < size:
                while rest and rest[0].size == 1:
                    rest.pop(0)
                if not rest:
                    return None
                head = rest.pop(0)
                need = size // have
                if head.size > need:
                    cut = self._cut(head, need)
                    if cut is None or size % have:
                        return None
                    head, tail = cut
                    rest.insert(0, tail)
                elif size % (have * head.size):
                    return None
                # What lies over axes after what does not lie wholly apart would be strided.
                if head.axes and have != self.ways(axes):
                    return None
                have, axes = have * head.size, axes + head.axes
            made.append(Piece(size, axes))
        return tuple(made)

    def _cut(self, piece: Piece, first: int) -> tuple[Piece, Piece] | None:
        """A piece as two, the first of this size."""
        if piece.size % first:
            return None
        second = piece.size // first
        for count in range(len(piece.axes), -1, -1):
            ways = self.ways(piece.axes[:count])
            rest = piece.axes[count:]
            if first % ways == 0 and second % self.ways(rest) == 0 and (not rest or ways == first):
                return Piece(first, piece.axes[:count]), Piece(second, rest)
        return None

    def normal(self, laid: Laid) -> Laid:
        """The layout in as few pieces as say the same."""
        return Laid(tuple(map(self._joined, laid.dims)), laid.partial)

    def _joined(self, dim: Dim) -> Dim:
        if not size_of(dim):
            return (Piece(0),)  # nothing lies anywhere
        if len(dim) == 1:
            return dim
        made: list[Piece] = []
        for piece in dim:
            if piece.size == 1:
                continue
            last = made[-1] if made else None
            if last is not None and (not piece.axes or last.size == self.ways(last.axes)):
                made[-1] = Piece(last.size * piece.size, last.axes + piece.axes)
            else:
                made.append(piece)
        return tuple(made) or (Piece(1),)

    def common(self, dims: Sequence[Dim]) -> list[int]:
        """The sizes of the coarsest pieces on whose borders all the borders of these dimensions fall.

        Where they cannot, borders of the first that is cut count.
        """
        size = math.prod(p.size for p in dims[0])
        if not size:
            return [0]
        borders = {1, size}
        for dim in dims:
            before = {1}
            before.update(itertools.accumulate((p.size for p in dim), lambda a, b: a * b))
            # Sizes from the outermost in: one set of borders must divide the other's, in order.
            merged = sorted(borders | before)
            if all(b % a == 0 for a, b in itertools.pairwise(merged)):
                borders = set(merged)
        ordered = sorted(borders)
        return [b // a for a, b in itertools.pairwise(ordered)] or [size]


def text(laid: Laid) -> str:
    """`f[8/fsdp,6]`-like: what lies over what."""

    def piece(p: Piece) -> str:
        return f"{p.size}/{'.'.join(p.axes)}" if p.axes else str(p.size)

    dims = ",".join("·".join(map(piece, dim)) for dim in laid.dims)
    return f"[{dims}]" + (f" of a sum over {', '.join(laid.partial)}" if laid.partial else "")


def size_of(dim: Dim) -> int:
    return math.prod(p.size for p in dim)


__all__: list[Any] = ["Dim", "Grid", "Laid", "Piece", "size_of", "text", "whole"]
