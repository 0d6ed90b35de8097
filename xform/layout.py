"""Rules to layouts: which mesh axes each dimension of a value lies on, by its logical name.

A name's rules are tried in order, and the first whose mesh axes are all free in that value wins; an axis that
does not divide the dimension is dropped, and the report says so. The algorithm and the default rules are
MaxText's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from xform.errors import PlanError
from xform.logical import Named
from xform.report import Report

Alternatives = list[tuple[str, ...]]


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

    def spec(self, dims: Sequence[Named], where: str, partial: bool = False) -> tuple[PartitionSpec, str]:
        """The layout of a value with these dimensions, and the reason in words.

        partial: leave to the partitioner (instead of whole) what no rule can speak of: dimensions whose role
        is not told, and those that the axes of their rule do not divide.
        """
        used: set[str] = set()
        entries: list[Any] = []
        why = []
        for dim in dims:
            open_entry = PartitionSpec.UNCONSTRAINED if partial and dim.size > 1 else None
            if dim.name is None:
                entries.append(open_entry)
                if dim.size > 1:
                    why.append(f"{dim.role} has no rule")
                continue
            self._met.add(dim.name)
            axes, dropped = self._axes_for(dim, used, where)
            used.update(axes)
            entries.append(_entry(axes) if axes else open_entry if dropped else None)
            said = f"{dim.name} -> {','.join(axes)}" if axes else f"{dim.name} whole"
            why.append(said + (f" ({dim.size} does not divide by {dropped})" if dropped else ""))
        self._used |= used
        return _trimmed(entries), ", ".join(why) or "whole"

    def _axes_for(self, dim: Named, used: set[str], where: str) -> tuple[tuple[str, ...], str]:
        """The mesh axes of one dimension, and those of its rule that do not divide it."""
        for axes in self.rules.get(dim.name or "", []):
            present = [a for a in axes if self.sizes.get(a, 1) > 1]
            if not present or any(a in used for a in present):
                continue
            kept: list[str] = []
            dropped: list[str] = []
            for axis in present:
                if dim.size % math.prod(self.sizes[a] for a in (*kept, axis)) == 0:
                    kept.append(axis)
                else:
                    dropped.append(f"{axis}={self.sizes[axis]}")
            if dropped:
                self.report.dropped(
                    "shard", f"{', '.join(dropped)} for {dim.name}", f"{dim.size} does not divide", where
                )
            return tuple(kept), ", ".join(dropped)
        return (), ""

    def spread(
        self,
        spec: PartitionSpec,
        dims: Sequence[Named],
        shape: Sequence[int],
        axes: Sequence[str],
        where: str,
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
            "shard", ", ".join(free), f"no dimension of {tuple(shape)} divides by {ways}", where
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
