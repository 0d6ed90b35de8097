"""The middle, what is done with the rows of experts, as a program for other sizes: rows, experts on a device,
and features of theirs on a device.

Each is a dimension that the rules of `batch` cut, as they do a batch: rows are each alone, features may be
summed over, and of a group (an expert) nothing but its own rows is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from xform.axes import Factor, find_axes
from xform.batch.local import Local, analyse
from xform.batch.states import SAME, Batch, Micro, Split, State, rows
from xform.trace import Jaxpr, Value, shape_of, trace_flat


@dataclasses.dataclass(frozen=True)
class Sized(Split):
    """Other numbers of rows than a program was written for: `have` in the place of `whole`."""

    have: int = 0

    def part(self, n: int) -> int:
        return n // self.whole * self.have


def local(jaxpr: Jaxpr, states: Sequence[State], split: Split, groups: bool = False) -> Local:
    """The program with what the first input that has rows has them of in other numbers. Raises `Mixes`, with
    the line, where rows meet.
    """
    axes = find_axes(jaxpr)
    seeds = [(axes.root.raw[v], s.dim) for v, s in zip(jaxpr.invars, states, strict=True) if s.is_rows]
    (start, at), *others = seeds
    for shape, dim in others:  # not all of them need meet in the program
        axes.factors.tie_dim(start[at], shape[dim])
    axes._forget()
    return analyse(jaxpr, states, axes.root, Batch(axes.dims(start)[at], split, groups=groups), [])


def ran(made: Local, args: Sequence[Value], split: Split) -> list[Value]:
    return made.run(args, Micro(jnp.int32(0), split))


def resized(
    jaxpr: Jaxpr, states: Sequence[State], whole: int, have: int, groups: bool = False
) -> tuple[Jaxpr, list[State]]:
    """The program for `have` in the place of `whole` rows, and the states of its results."""
    split = Sized(whole, 1, have=have)
    made = local(jaxpr, states, split, groups)
    avals: list[Any] = [
        v.aval.update(shape=split.small(shape_of(v), s)) for v, s in zip(jaxpr.invars, states, strict=True)
    ]
    name = jaxpr.debug_info.func_name
    return trace_flat(lambda *xs: ran(made, xs, split), avals, name), made.outs


def places(jaxpr: Jaxpr, factor: Factor) -> dict[int, int]:
    """The inputs that have a factor as a dimension of theirs, by number, and which it is."""
    axes = find_axes(jaxpr).root
    return {n: d for n, v in enumerate(jaxpr.invars) for d, dim in enumerate(axes[v]) if dim == (factor,)}


def with_rows(count: int, at: Mapping[int, int]) -> list[State]:
    """The states of so many inputs, of which these have rows, along a dimension each."""
    return [rows(at[n]) if n in at else SAME for n in range(count)]
