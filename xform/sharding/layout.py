"""Rules to layouts: which mesh axes each dimension of a value lies on, by its logical name.

Names have their turn in the order of the table of rules, whatever the order of the dimensions, so that a
value and its transpose lie alike. A name's rules are tried in order, and the first whose mesh axes are all
free in that value wins; an axis that does not divide the dimension is dropped, and the report says so. The
algorithm and the default rules are MaxText's (flax.linen.logical_to_mesh_axes).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from xform.errors import PlanError
from xform.report import Report
from xform.roles.logical import Named

Alternatives = list[tuple[str, ...]]
Where = str | Callable[[], str]
"""What the report calls a place: text, or how to make it, since looking up a source line takes time."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """A layout, the reason for it, and what was dropped and why."""

    spec: PartitionSpec
    why: str
    dropped: list[tuple[str, str]]


class Layout:
    """Gives a value's dimensions their mesh axes. Remembers which rules and axes were of use.

    rules: name -> alternatives, in order. given: those of them that the plan itself names: their axes must
    exist.
    """

    def __init__(
        self, mesh: Mesh, rules: Mapping[str, Alternatives], given: Mapping[str, Alternatives], report: Report
    ) -> None:
        self.sizes: dict[str, int] = dict(mesh.shape)
        self.report, self.given = report, given
        self.rules = {**rules, **given}
        self._met: set[str] = set()
        self._used: set[str] = set()
        self._spread: dict[frozenset[str], str | None] = {}
        self._found: dict[tuple[tuple[Named, ...], bool], _Found] = {}
        self._turn = {name: i for i, name in enumerate(self.rules)}
        for name, alternatives in given.items():
            for axis in dict.fromkeys(a for axes in alternatives for a in axes):
                self.check_axis(f"the rule {name!r}", axis)

    def check_axis(self, who: str, axis: str) -> None:
        """Raises PlanError when the mesh has no such axis."""
        if axis not in self.sizes:
            raise PlanError(
                f"shard: {who} names the mesh axis {axis!r}; the mesh has"
                f" {', '.join(self.sizes) or 'no axes'}. Add the axis to [mesh], or take it out of the rule"
            )

    def spec(self, dims: Sequence[Named], where: Where, partial: bool = False) -> tuple[PartitionSpec, str]:
        """The layout of a value with these dimensions, and the reason in words.

        partial: leave to the partitioner (instead of whole) what no rule can speak of: dimensions whose role
        is not told, and those that the axes of their rule do not divide. where: for the report.
        """
        key = (tuple(dims), partial)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._spec(dims, partial)
        for what, why in found.dropped:
            self.report.dropped("shard", what, why, where if isinstance(where, str) else where())
        return found.spec, found.why

    def _spec(self, dims: Sequence[Named], partial: bool) -> _Found:
        entries: list[Any] = [None] * len(dims)
        why: list[str] = [""] * len(dims)
        dropped: list[tuple[str, str]] = []
        used: set[str] = set()
        for i in sorted(range(len(dims)), key=lambda i: self._turn.get(dims[i].name or "", len(self._turn))):
            dim = dims[i]
            open_entry = PartitionSpec.UNCONSTRAINED if partial and dim.size > 1 else None
            if dim.name is None:
                entries[i] = open_entry
                why[i] = f"{dim.role} has no rule" if dim.size > 1 else ""
                continue
            self._met.add(dim.name)
            axes, odd, taken = self._axes_for(dim, used)
            used.update(axes)
            entries[i] = _entry(axes) if axes else open_entry if odd else None
            why[i] = f"{dim.name} -> {','.join(axes)}" if axes else f"{dim.name} whole"
            if odd:
                why[i] += f" ({dim.size} does not divide by {', '.join(odd)})"
                dropped.append((f"{', '.join(odd)} for {dim.name}", f"{dim.size} does not divide"))
            elif not axes:
                why[i] += f" ({', '.join(taken)} taken)" if taken else self._why_whole(dim.name)
        self._used |= used
        return _Found(_trimmed(entries), ", ".join(filter(None, why)) or "whole", dropped)

    def _why_whole(self, name: str) -> str:
        """Why a dimension of this name lies on no axis, though none is taken and all divide."""
        if name not in self.rules:
            return " (no rule)"
        axes = ", ".join(dict.fromkeys(a for axes in self.rules[name] for a in axes))
        return f" (no {axes} in the mesh)" if axes else " (by its rule)"

    def _axes_for(self, dim: Named, used: set[str]) -> tuple[tuple[str, ...], list[str], list[str]]:
        """The mesh axes of one dimension, those of its rule that do not divide it, and those another took."""
        taken: list[str] = []
        for axes in self.rules.get(dim.name or "", []):
            present = [a for a in axes if self.sizes.get(a, 1) > 1]
            taken += [a for a in present if a in used and a not in taken]
            if not present or any(a in used for a in present):
                continue
            kept: list[str] = []
            odd: list[str] = []
            for axis in present:
                if dim.size % math.prod(self.sizes[a] for a in (*kept, axis)) == 0:
                    kept.append(axis)
                else:
                    odd.append(f"{axis}={self.sizes[axis]}")
            return tuple(kept), odd, []
        return (), [], taken

    def spread(
        self,
        spec: PartitionSpec,
        dims: Sequence[Named],
        shape: Sequence[int],
        axes: Sequence[str],
        where: Where,
    ) -> tuple[PartitionSpec, str]:
        """`spec` with further mesh axes on one dimension that divides: embed, or else the first that is not
        layers and lies on no tensor axis.

        Weights of the same roles are spread over the same role, however their dimensions are ordered, so that
        a gradient, born transposed or a layer at a time, lies as the optimizer's state does.
        """
        free = [a for a in axes if self.sizes[a] > 1 and a not in spec_axes(spec)]
        if not free or not shape:
            return spec, ""
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        ways = math.prod(self.sizes[a] for a in free)
        kind = frozenset(d.role for d in dims) - {"layers"}
        if kind not in self._spread:
            fitting = [
                dim.role
                for entry, dim, size in zip(entries, dims, shape, strict=True)
                if dim.role != "layers"
                and size % (ways * math.prod(self.sizes[a] for a in entry_axes(entry))) == 0
                and not any(a.startswith("tensor") for a in entry_axes(entry))
            ]
            # Embed where it fits, as the weights themselves lie under FSDP; else the first.
            fitting.sort(key=lambda role: role != "embed")
            self._spread[kind] = next(iter(fitting), None)
        role = self._spread[kind]
        for i, (entry, dim, size) in enumerate(zip(entries, dims, shape, strict=True)):
            have = entry_axes(entry)
            if dim.role == role and size % (ways * math.prod(self.sizes[a] for a in have)) == 0:
                entries[i] = _entry((*have, *free))
                self._used.update(free)
                return _trimmed(entries), f", and {dim.name or dim.role} also -> {','.join(free)}"
        self.report.dropped(
            "shard",
            ", ".join(free),
            f"no dimension of {tuple(shape)} divides by {ways}",
            where if isinstance(where, str) else where(),
        )
        return spec, ""

    def check_used(self, strict: bool) -> None:
        """Says which rules of the plan matched nothing (PlanError when strict), and which mesh axes nothing
        lies on.
        """
        for name in self.given:
            if name in self._met:
                continue
            met = ", ".join(sorted(self._met))
            if strict:
                raise PlanError(
                    f"shard: the rule {name!r} matches nothing in this program,"
                    f" whose dimensions are called {met}. Take it out, or set strict = false"
                )
            self.report.declined("shard", f"rule {name}", "no dimension of this program has that name")
        for axis, size in self.sizes.items():
            if size > 1 and axis not in self._used:
                why = "nothing in this program lies on it: all devices along it do the same work"
                self.report.declined("shard", f"mesh axis {axis}={size}", why)


def alternatives(name: str, value: Any) -> Alternatives:
    """A rule as a plan writes it: an axis, a list of axes, or a list of such lists to try in order."""
    if isinstance(value, str):
        return [(value,)]
    items = list(value)
    if all(isinstance(i, str) for i in items):
        return [tuple(items)] if items else []
    if any(isinstance(i, str) for i in items):
        raise PlanError(f"shard: the rule {name!r} mixes axes with lists of axes; write [[a, b], [c]]")
    return [tuple(i) for i in items]


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes in a PartitionSpec."""
    return tuple(a for entry in spec for a in entry_axes(entry))


def _entry(axes: Sequence[str]) -> Any:
    return axes[0] if len(axes) == 1 else tuple(axes)


def _trimmed(entries: list[Any]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
