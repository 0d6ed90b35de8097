"""Cuts the axes of a mesh where they turn a corner of the torus, so that collectives go one way at a time.

A scatter over all chips of a slice at once is compiled to an all-reduce and a slice: twice the bytes. Along
one dimension of the torus, or along two where it has three, it stays a reduce-scatter. `staged` finds out how
the mesh lies on the machine and gives each axis its *parts*, outermost first:

    fsdp 64 on v5p 4x4x4        fsdp.xy 16, fsdp.z 4
    fsdp 256 on v5e 16x16       fsdp.x 16, fsdp.y 16
    fsdp 32 on two v5e 4x4      fsdp.dcn 2, fsdp.x 4, fsdp.y 4

A value that lies over the parts in their order lies as it does over the axis: it is scattered from the first
part to the last and gathered from the last to the first, and nothing has to be put in order in between. The
bytes sent are those of one collective over the whole axis.

How many dimensions one stage may take was measured with libtpu 0.0.52, on bfloat16 arrays of [4096, 11008]
and [32, 4096, 128]: the fewest stages whose scatters all stay scatters. On v5e and v6e two dimensions do up
to 8 devices (over 16 as 4x4 all become all-reduces, over 64 of 256 some); on v4, v5p and tpu7x two do up to
32 (over 64 as 8x8 some become all-reduces), and three do not. A ring through all of 2x2x2 or 4x4 chips, which
goes along no dimension, does in two stages of any sizes. Gathers stay gathers over anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from xform.errors import PlanError
from xform.sharding.layout import entry_axes

# The most devices of a stage along two dimensions, of a slice that has three, and of one that has two.
CUBE = 32
FLAT = 8


@dataclasses.dataclass(frozen=True)
class Staged:
    """A mesh whose axes are cut where they turn: the same devices in the same order.

    `mesh` has the parts for axes. `parts`: those of each axis of the mesh that was cut, outermost first; an
    axis that isn't cut is its own single part. `dcn`: the parts that cross slices.
    """

    mesh: jax.sharding.Mesh
    parts: Mapping[str, tuple[str, ...]]
    dcn: frozenset[str]

    def refined(self, spec: PartitionSpec) -> PartitionSpec:
        """The same layout with each axis spelt in its parts."""
        entries: list[Any] = []
        for entry in spec:
            names = tuple(part for axis in entry_axes(entry) for part in self.parts[axis])
            whole = PartitionSpec.UNCONSTRAINED if entry is PartitionSpec.UNCONSTRAINED else None
            entries.append(names[0] if len(names) == 1 else names or whole)
        return PartitionSpec(*entries)

    def owner(self, part: str) -> str:
        """The axis that a part was cut from; KeyError where there is no such part."""
        for axis, parts in self.parts.items():
            if part in parts:
                return axis
        raise KeyError(part)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where each device of a mesh is: `numbers` [*mesh, len(names)], one number for each dimension `names`.

    "dcn" is the slice. Devices that know no coordinates have one dimension "ici" for all within a slice.
    """

    names: tuple[str, ...]
    numbers: np.ndarray

    def moved(self, line: np.ndarray) -> set[str]:
        """The dimensions that differ anywhere along the first axis of `line` [size, ..., len(names)]."""
        differs = (line != line[:1]).any(axis=tuple(range(line.ndim - 1)))
        return {name for name, moves in zip(self.names, differs, strict=True) if moves}

    def together(self, dimensions: set[str], size: int) -> bool:
        """Whether one collective over `size` devices along these dimensions does what it is asked."""
        turning = len(dimensions - {"core"})
        most = CUBE if self.numbers[..., self.names.index("z")].any() else FLAT
        return turning < 2 or (turning == 2 and size <= most)

    def text(self, dimensions: set[str]) -> str:
        return "".join(name for name in self.names if name in dimensions)


def staged(mesh: jax.sharding.Mesh, dcn: Mapping[str, int] | None = None) -> Staged:
    """The mesh with its axes cut where they turn a corner of the torus, or leave a slice.

    Parts are named by where they move: `fsdp.x`, `fsdp.xy`, `fsdp.zcore`, `fsdp.dcn`. An axis that does not
    move along one dimension after the other, all its lines alike (a ring), is cut into `fsdp.major` and
    `fsdp.minor` where it is too long for one stage. Devices without coordinates (CPU) have `ici` for all that
    is in a slice.

    `dcn`: by how much each axis crosses slices, outermost (`xform.topologies.make_mesh`), for devices that
    know no slices; -1, what is left, is nothing there. PlanError where an axis is not the mesh's or its size
    no multiple.
    """
    places = _places(mesh, dcn or {})
    parts: dict[str, tuple[str, ...]] = {}
    sizes: list[int] = []
    crossing: set[str] = set()
    for number, axis in enumerate(mesh.axis_names):
        lines = np.moveaxis(places.numbers, number, 0)
        cut = _cut(places, lines)
        names = [f"{axis}.{where}" for _, where in cut] if len(cut) > 1 else [axis]
        parts[axis] = tuple(names)
        sizes += [size for size, _ in cut]
        crossing |= {name for name, (_, where) in zip(names, cut, strict=True) if "dcn" in where}
    names = [name for axis in mesh.axis_names for name in parts[axis]]
    types = [kind for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) for _ in parts[axis]]
    refined = jax.sharding.Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=tuple(types))
    return Staged(refined, parts, frozenset(crossing))


def _places(mesh: jax.sharding.Mesh, dcn: Mapping[str, int]) -> _Places:
    devices = list(mesh.devices.flat)
    slices = np.array([getattr(device, "slice_index", None) or 0 for device in devices])
    outer, inner = _declared(mesh, dcn)
    if slices.any():
        outer = slices.reshape(outer.shape)
    if any(getattr(device, "coords", None) is None for device in devices):
        return _Places(("dcn", "ici"), np.stack([outer, inner], -1))
    within = np.array(
        [(*device.coords[:3], getattr(device, "core_on_chip", None) or 0) for device in devices]
    )
    numbers = np.concatenate([outer[..., None], within.reshape(*outer.shape, -1)], -1)
    return _Places(("dcn", "x", "y", "z", "core"), numbers)


def _declared(mesh: jax.sharding.Mesh, dcn: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """The slice of each device as `dcn` has it, and its number within the slice; both [*mesh]."""
    for axis, count in dcn.items():
        size = mesh.shape.get(axis)
        if size is None:
            raise PlanError(f"mesh: dcn axis {axis} is none of the mesh's: {', '.join(mesh.axis_names)}")
        if count != -1 and (count < 1 or size % count):
            raise PlanError(f"mesh: dcn {axis} = {count} doesn't divide the axis, which has {size} devices")
    outer = inner = np.zeros(mesh.devices.shape, int)
    for (axis, size), index in zip(mesh.shape.items(), np.indices(mesh.devices.shape), strict=True):
        count = max(1, dcn.get(axis, 1))
        across, within = np.divmod(index, size // count)
        outer, inner = outer * count + across, inner * (size // count) + within
    return outer, inner


def _cut(places: _Places, lines: np.ndarray) -> list[tuple[int, str]]:
    """The parts of an axis, how long and where, from the places [size, ..., len(names)] along it."""
    size, moves = len(lines), places.moved(lines)
    if "dcn" not in moves:
        return _within(places, lines)
    crossed = len(np.unique(lines.reshape(size, -1, lines.shape[-1])[:, 0, 0]))
    inside = lines.reshape(crossed, -1, *lines.shape[1:]) if size % crossed == 0 else lines
    rest = np.moveaxis(inside, 1, 0)
    if places.moved(inside) != {"dcn"} or "dcn" in places.moved(rest):
        return [(size, places.text(moves))]
    return [(crossed, "dcn"), *(_within(places, rest) if len(rest) > 1 else ())]


def _within(places: _Places, lines: np.ndarray) -> list[tuple[int, str]]:
    """The parts of an axis that stays within slices."""
    size, moves = len(lines), places.moved(lines)
    if digits := _digits(places, lines):
        return [(radix, places.text(moves)) for radix, moves in _grouped(places, digits)]
    major = next(count for count in range(math.isqrt(size - 1) + 1, size + 1) if size % count == 0)
    if len(moves) < 2 or major == size or places.together(moves, size):
        return [(size, places.text(moves))]
    return [(major, "major"), (size // major, "minor")]


def _digits(places: _Places, lines: np.ndarray) -> list[tuple[int, set[str]]]:
    """The axis as a number whose digits each move along one dimension, outermost first; [] if it is none."""
    size, line = len(lines), lines.reshape(len(lines), -1, lines.shape[-1])[:, 0]
    radices: list[int] = []
    while (stride := math.prod(radices)) < size:
        steps = line[::stride]
        alike = max(count for count in range(1, len(steps) + 1) if len(places.moved(steps[:count])) <= 1)
        radix = max(count for count in range(1, alike + 1) if len(steps) % count == 0)
        if radix == 1:
            return []
        radices.append(radix)
    radices.reverse()
    split = lines.reshape(*radices, *lines.shape[1:])
    moves = [places.moved(np.moveaxis(split, digit, 0)) for digit in range(len(radices))]
    if any(len(each) != 1 for each in moves) or len(set().union(*moves)) != len(moves):
        return []
    return list(zip(radices, moves, strict=True))


def _grouped(places: _Places, digits: Sequence[tuple[int, set[str]]]) -> list[tuple[int, set[str]]]:
    """The digits in as few stages as may be. The first takes what it can: it sends most, over most links."""
    groups: list[tuple[int, set[str]]] = []
    for radix, moves in digits:
        size, before = groups[-1] if groups else (1, set())
        if groups and places.together(before | moves, size * radix):
            groups[-1] = (size * radix, before | moves)
        else:
            groups.append((radix, moves))
    return groups
