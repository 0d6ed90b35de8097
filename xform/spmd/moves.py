"""From one layout to another: the collectives that take a value there, what they send, and their emission.

    [8/fsdp, 6] -> [8, 6]                  all_gather over fsdp
    sum over fsdp, [8, 6] -> [8/fsdp, 6]   psum_scatter
    [8/fsdp, 6] -> [8, 6/fsdp]             all_to_all
    [8, 6] -> [8/fsdp, 6]                  each device takes its own part

A route is data: its steps are found once and costed without emitting anything. An axis that is cut along the
torus is several axes here, so gathers and scatters run a stage at a time; links between slices are crossed
when the value is smallest, which is first in a gather and last in a scatter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xform.spmd import rings
from xform.spmd.layout import Grid, Laid, Piece
from xform.trace import Value

Kind = Literal["slice", "scatter", "sum", "exchange", "gather"]

BETWEEN_SLICES = 32.0
"""What a byte between slices is worth in bytes within one: of v5e, 200 GB/s a chip over 25 a host of 4."""

LARGE = 1 << 16
"""From how many elements on a sum between slices is taken apart."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One move over mesh axes: of piece `piece`, or in an exchange from `piece` to `to`.

    `sent`: bytes a device sends with the bandwidth-optimal algorithm, for each byte of an element; those
    between slices count for as much as they take longer.
    """

    kind: Kind
    axes: tuple[str, ...]
    piece: int
    to: int
    sent: float


@dataclasses.dataclass(frozen=True)
class Route:
    """The pieces that a value is seen as on the way, the steps, and the elements a device sends."""

    before: tuple[int, ...]
    steps: tuple[Step, ...]
    after: tuple[int, ...]
    sent: float


class Router:
    """Finds and emits routes on one grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.route = functools.lru_cache(maxsize=None)(self._route)

    def _route(self, have: Laid, want: Laid) -> Route:
        """The route between two layouts of the same value. `want` may be partial only where `have` is."""
        grid = self.grid
        old: list[Piece] = []
        new: list[Piece] = []
        for a, b in zip(have.dims, want.dims, strict=True):
            sizes = grid.common([a, b])
            x, y = grid.split(a, sizes), grid.split(b, sizes)
            if x is None or y is None:  # borders that do not meet: the dimension is whole on the way
                sizes = grid.common([a])
                x = grid.split(a, sizes)
                y = tuple(Piece(size) for size in sizes)
                assert x is not None
                if any(p.axes for p in b):
                    return self._joined(have, want)
            old += x
            new += y
        return self._found(tuple(old), tuple(new), have.partial, want.partial, want)

    def _joined(self, have: Laid, want: Laid) -> Route:
        """By way of dimensions that are whole where the borders of their pieces do not meet."""
        middle = []
        for a, b in zip(have.dims, want.dims, strict=True):
            sizes = self.grid.common([a, b])
            meets = self.grid.split(a, sizes) is not None and self.grid.split(b, sizes) is not None
            middle.append(b if meets else (Piece(math.prod(p.size for p in b)),))
        between = Laid(tuple(middle), want.partial)
        first = self.route(have, between)
        second = self.route(between, want)
        count = len(first.before)
        tail = tuple(dataclasses.replace(s, piece=s.piece + count, to=s.to + count) for s in second.steps)
        return Route(
            first.before + second.before,
            (*first.steps, Step("sum", (), count, count, 0.0), *tail),
            second.after,
            first.sent + second.sent,
        )

    def _found(
        self,
        old: tuple[Piece, ...],
        new: tuple[Piece, ...],
        have_sum: tuple[str, ...],
        want_sum: tuple[str, ...],
        want: Laid,
    ) -> Route:
        ways = self.grid.ways
        now = [list(p.axes) for p in old]
        goal = [list(p.axes) for p in new]
        before = tuple(p.size // ways(p.axes) for p in old)
        pending = [a for a in have_sum if a not in want_sum]
        steps: list[Step] = []
        size = float(math.prod(before))

        def step(kind: Kind, axes: Sequence[str], piece: int, to: int, sent: float, factor: float) -> None:
            nonlocal size
            steps.append(Step(kind, tuple(axes), piece, to, sent))
            size *= factor

        def kept(i: int) -> int:
            """How many of the axes of piece i stay where they are."""
            same = 0
            for a, b in zip(now[i], goal[i], strict=False):
                if a != b:
                    break
                same += 1
            return same

        def crosses(axes: Sequence[str]) -> bool:
            return not self.grid.slow.isdisjoint(axes)

        def nexts() -> list[tuple[int, str]]:
            """The axis that each piece takes next, where it has none to give up first."""
            return [
                (i, goal[i][len(now[i])]) for i in range(len(now)) if kept(i) == len(now[i]) < len(goal[i])
            ]

        def once() -> bool:
            held = {a for axes in now for a in axes}
            for i, axis in nexts():
                if axis not in held and axis not in pending:
                    step("slice", [axis], i, i, 0.0, 1 / ways([axis]))
                    now[i].append(axis)
                    return True
            # Of the axes of a piece that wait for their sum, those inside a slice come first.
            for i in sorted(range(len(now)), key=lambda i: crosses(goal[i][len(now[i]) :])):
                if kept(i) < len(now[i]):
                    continue
                run: list[str] = []
                for axis in goal[i][len(now[i]) :]:
                    if axis not in pending:
                        break
                    run.append(axis)
                if run:
                    sent, left = 0.0, size
                    for axis in sorted(run, key=self.grid.slow.__contains__):
                        n = ways([axis])
                        sent += left * (n - 1) / n * self.toll(axis)
                        left /= n
                    step("scatter", run, i, i, sent, 1 / ways(run))
                    now[i] += run
                    for axis in run:
                        pending.remove(axis)
                    return True
            waiting = {axis for axes in goal for axis in axes}
            if sums := [a for a in pending if a not in waiting]:
                step("sum", sums, 0, 0, size * self.summing(sums), 1.0)
                for axis in sums:
                    pending.remove(axis)
                return True
            for i, axis in nexts():
                for j in range(len(now)):
                    if now[j] and now[j][-1] == axis and kept(j) < len(now[j]) and j != i:
                        n = ways([axis])
                        step("exchange", [axis], j, i, size * (n - 1) / n * self.toll(axis), 1.0)
                        now[j].pop()
                        now[i].append(axis)
                        return True
            for i in sorted(range(len(now)), key=lambda i: not crosses(now[i][kept(i) :])):
                drop = now[i][kept(i) :]
                if not drop:
                    continue
                needed = {axis for _, axis in nexts()}
                if needed & set(drop):
                    drop = [drop[-1]]
                sent, left = 0.0, size
                for axis in sorted(reversed(drop), key=lambda axis: axis not in self.grid.slow):
                    n = ways([axis])
                    sent += left * (n - 1) * self.toll(axis)
                    left *= n
                step("gather", drop, i, i, sent, ways(drop))
                del now[i][len(now[i]) - len(drop) :]
                return True
            return False

        while once():
            pass
        if pending:
            step("sum", tuple(pending), 0, 0, size * self.summing(pending), 1.0)
        return Route(before, tuple(steps), self.grid.local(want), sum(s.sent for s in steps))

    def toll(self, axis: str) -> float:
        """How much longer a byte takes along an axis than within a slice."""
        return BETWEEN_SLICES if axis in self.grid.slow else 1.0

    def summing(self, axes: Sequence[str]) -> float:
        """What a device sends for each byte of a sum over axes; between slices of a part, as `sum` does."""
        fast = self.grid.ways([a for a in axes if a not in self.grid.slow])
        slow = self.grid.ways([a for a in axes if a in self.grid.slow])
        return 2 * (fast - 1) / fast + 2 * (slow - 1) / slow / fast * BETWEEN_SLICES

    # ------------------------------------------------------------ emission

    def emit(self, x: Value, have: Laid, want: Laid, in_rings: bool = False) -> Value:
        """The value, local in layout `have`, in layout `want`. in_rings: gathers and scatters as permutes."""
        route = self.route(have, want)
        if not route.steps:
            return _shaped(x, route.after)
        x = _shaped(x, route.before[: _pieces(route)])
        offset = 0
        for step in route.steps:
            if step.kind == "sum" and not step.axes:  # between two parts of a route
                offset = step.piece
                x = _shaped(x, route.before[offset:])
                continue
            x = self._emit(x, step, offset, in_rings)
        return _shaped(x, route.after)

    def _emit(self, x: Value, step: Step, offset: int, in_rings: bool) -> Value:
        i, j = step.piece - offset, step.to - offset
        if step.kind == "sum":
            return self.sum(x, step.axes)
        if step.kind == "slice":
            (axis,) = step.axes
            n = self.grid.sizes[axis]
            size = x.shape[i] // n
            start = jax.lax.axis_index(axis) * size
            return jax.lax.dynamic_slice_in_dim(x, start, size, i, allow_negative_indices=False)
        if in_rings and step.kind in ("scatter", "gather") and self.grid.slow.isdisjoint(step.axes):
            ring = rings.scatter if step.kind == "scatter" else rings.gather
            for axis in step.axes if step.kind == "scatter" else reversed(step.axes):
                x = ring(x, axis, self.grid.sizes[axis], i)
            return x
        if step.kind == "scatter":
            return self.scatter(x, step.axes, i)
        if step.kind == "gather":
            return self.gather(x, step.axes, i)
        (axis,) = step.axes
        return jax.lax.all_to_all(x, axis, split_axis=j, concat_axis=i, tiled=True)

    def gather(self, x: Value, axes: Sequence[str], dim: int) -> Value:
        """All-gather of a dimension over axes, outermost first, one after the other."""
        slow = [a for a in axes if a in self.grid.slow]
        if not slow or list(axes) == slow:
            for axis in reversed(axes):
                x = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
            return x
        placed: list[str] = []
        for axis in [*slow, *[a for a in reversed(axes) if a not in slow]]:
            at = sum(axes.index(other) < axes.index(axis) for other in placed)
            x = jax.lax.all_gather(x, axis, axis=dim + at, tiled=False)
            placed.append(axis)
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + len(axes) + 1 :])

    def scatter(self, x: Value, axes: Sequence[str], dim: int) -> Value:
        """Reduce-scatter of a dimension over axes, outermost first, one after the other; those between slices
        last. Then the blocks between slices are columns of a matrix that is scattered by rows inside: every
        other spelling that was tried becomes an all-reduce in some program (libtpu 0.0.52).
        """
        slow = [a for a in axes if a in self.grid.slow]
        fast = [a for a in axes if a not in self.grid.slow]
        if not slow or not fast:
            for axis in axes:
                x = self._scattered(x, axis, dim)
            return x
        x = jnp.moveaxis(x, dim, 0)
        size, *others = x.shape
        ways, part = [self.grid.sizes[a] for a in axes], size // self.grid.ways(axes)
        x = x.reshape(*ways, part, *others)
        rows = [*(axes.index(a) for a in fast), len(ways)]
        x = jnp.moveaxis(x, rows, range(len(rows)))
        x = self.scatter(
            x.reshape(self.grid.ways(fast) * part, self.grid.ways(slow) * math.prod(others)), fast, 0
        )
        x = x.reshape(part, *(self.grid.sizes[a] for a in slow), *others)
        for axis in slow:
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=False)
        return jnp.moveaxis(x, 0, dim)

    def _scattered(self, x: Value, axis: str, dim: int) -> Value:
        """One stage. XLA:TPU keeps it a reduce-scatter and no more, of a matrix, when the blocks are a
        dimension of their own; of three dimensions, when they are not; more become a matrix (libtpu 0.0.52).
        """
        if x.ndim in (1, 3):
            return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        if x.ndim > 3:
            x = jnp.moveaxis(x, dim, 0)
            size, *others = x.shape
            x = self._scattered(x.reshape(size, math.prod(others)), axis, 0)
            return jnp.moveaxis(x.reshape(x.shape[0], *others), 0, dim)
        n = self.grid.sizes[axis]
        x = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=False)

    def sum(self, x: Value, axes: Sequence[str]) -> Value:
        """The sum over axes; between slices, of a part of it on each device."""
        slow = tuple(a for a in axes if a in self.grid.slow)
        fast = tuple(a for a in axes if a not in slow)
        ways = self.grid.ways(fast)
        if not slow or not fast or x.size < LARGE:
            return jax.lax.psum(x, tuple(axes))
        dim = next((i for i, size in enumerate(x.shape) if size % ways == 0), None)
        if dim is None:
            flat = jnp.pad(x.reshape(-1), (0, -x.size % ways))
            return self.sum(flat, axes)[: x.size].reshape(x.shape)
        return self.gather(jax.lax.psum(self.scatter(x, fast, dim), slow), fast, dim)


def _pieces(route: Route) -> int:
    """How many pieces the first part of a route has."""
    for step in route.steps:
        if step.kind == "sum" and not step.axes:
            return step.piece
    return len(route.before)


def _shaped(x: Value, shape: tuple[int, ...]) -> Value:
    return x if jnp.shape(x) == shape else jnp.reshape(x, shape)


__all__: list[Any] = ["Route", "Router", "Step"]
