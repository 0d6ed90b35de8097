"""Pairs of steps of a chunk by levels: their decays, and the inverse of a triangular matrix.

Two steps j < i of a chunk differ in some highest bit, where i has one and j none: the chunk is halved, and
halved again, and each pair is parted by one boundary, at that bit's level. With a decay by channel D[i, j] is
the product of that from the boundary to i and of that from j to the boundary, both at most one, so one matrix
product a level gives all pairs of the level, exactly as stable as the recurrence itself. The inverse goes the
same way up: two halves' inverses give the whole's, inv([[a, 0], [c, b]]) = [[inv a, 0], [-(inv b) c (inv a),
inv b]], which is as stable as substitution.

Of a level's product only the rows of upper halves are wanted, so the rows of lower halves hold another
operand's (`Level.pack`): the matrix unit's time goes by rows. Where halves are whole rows of registers (8
steps) they are sliced, and nothing is moved; below, they are turned into place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

SUBLANES = 8
"""Steps of a register."""

LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Chunk:
    """size: steps, a power of two. decay: "none", "head" or "channel". delta: with the delta rule. dtype: the
    matrix unit's operands are rounded to it. roll: turns an array along a dimension by so many places
    (`jnp.roll`).
    """

    size: int
    decay: str
    delta: bool
    scale: float
    dtype: Any
    roll: Callable[[Array, int, int], Array]

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(Level(self, 1 << bit) for bit in range(self.size.bit_length() - 1))

    # ------------------------------------------------------------ products

    def dot(self, x: Array, y: Array, over: tuple[int, int] = (1, 0)) -> Array:
        """x[h] times y[h] for each head h, summed over dimension over[0] of x[h] and over[1] of y[h];
        float32.
        """
        full = self.dtype == jnp.float32
        precision = jax.lax.Precision.HIGHEST if full else jax.lax.Precision.DEFAULT
        dims = (((over[0],), (over[1],)), ((), ()))
        # Each on its own: a batched product has its operands packed in twice as many operations.
        return jnp.stack(
            [
                jax.lax.dot_general(
                    x[h].astype(self.dtype),
                    y[h].astype(self.dtype),
                    dims,
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                for h in range(x.shape[0])
            ]
        )

    def sums(self, x: Array, where: Array) -> Array:
        """x [h, i, m] times the zeros and ones [m, j] of `where`, as exact as `dtype` calls for: x in two
        parts.
        """
        ones = jnp.where(where, 1.0, 0.0)[None]
        ones = jnp.concatenate([ones] * x.shape[0])
        if self.dtype == jnp.float32:
            return self.dot(x, ones)
        high = x.astype(self.dtype).astype(jnp.float32)
        return self.dot(high, ones) + self.dot(x - high, ones)

    # ------------------------------------------------------------ masks

    def step(self, axis: int, shape: tuple[int, ...] | None = None) -> Array:
        return jax.lax.broadcasted_iota(jnp.int32, shape or (self.size, self.size), axis)

    @property
    def diagonal(self) -> Array:
        return self.step(0) == self.step(1)

    def later(self, strict: bool = False) -> Array:
        """[t, t]: where the first step is not before the second (or is after it)."""
        return self.step(0) > self.step(1) if strict else self.step(0) >= self.step(1)

    def earlier(self) -> Array:
        """[t, t]: where the first step is before the second."""
        return self.step(0) < self.step(1)

    def column(self, row: Array) -> Array:
        """[h, 1, t] -> [h, t, 1]."""
        return jnp.where(self.diagonal, row, 0.0).sum(2, keepdims=True)

    def row(self, column: Array, where: Array | None = None) -> Array:
        """[h, t, 1] -> [h, 1, t]: sums of the column over the rows that `where` [t, t] allows (its own
        alone).
        """
        where = self.diagonal if where is None else where
        return jnp.where(where, column, 0.0).sum(1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of a chunk: blocks of twice `half` steps, each a lower and an upper half."""

    chunk: Chunk
    half: int

    @property
    def sliced(self) -> bool:
        return self.half >= SUBLANES

    def upper(self, channels: int) -> Array:
        """[t, channels]: which steps are in the upper half of their block."""
        return (self.chunk.step(0, (self.chunk.size, channels)) & self.half) != 0

    @property
    def pairs(self) -> Array:
        """The level's pairs [t, t]; where `sliced`, of upper halves' rows alone [t / 2, t]."""
        bit = self.half.bit_length() - 1
        if self.sliced:
            shape = (self.chunk.size // 2, self.chunk.size)
            return self.chunk.step(1, shape) >> bit == self.chunk.step(0, shape) >> bit << 1
        i, j = self.chunk.step(0), self.chunk.step(1)
        return (j >> bit == (i >> bit) - 1) & (i & self.half != 0)

    def parted(self, x: Array) -> tuple[Array, Array]:
        """x [..., t, c] -> the lower halves' rows, and the upper halves', [..., t / 2, c]."""
        *front, t, c = x.shape
        blocks = x.reshape(*front, t // (2 * self.half), 2, self.half, c)
        return blocks[..., 0, :, :].reshape(*front, t // 2, c), blocks[..., 1, :, :].reshape(
            *front, t // 2, c
        )

    def joined(self, lower: Array, upper: Array) -> Array:
        *front, t, c = lower.shape
        halves = [x.reshape(*front, t // self.half, 1, self.half, c) for x in (lower, upper)]
        return jnp.concatenate(halves, len(front) + 1).reshape(*front, 2 * t, c)

    def turned(self, x: Array, by: int) -> Array:
        return self.chunk.roll(x, by % self.chunk.size, 1)

    def pack(self, x: Array, y: Array | None) -> Array:
        """The upper halves' rows of x, and of y if there is one, in as few rows as may be."""
        if self.sliced:
            rows = [self.parted(each)[1] for each in (x, y) if each is not None]
            return jnp.concatenate(rows, 1)
        return x if y is None else jnp.where(self.upper(x.shape[2]), x, self.turned(y, -self.half))

    def unpack(self, z: Array, two: bool) -> tuple[Array, Array | None]:
        """Of what `pack` gives, or a product of it, x's rows and y's, as `put` and `spread` take them."""
        if self.sliced:
            return z[:, : self.chunk.size // 2], z[:, self.chunk.size // 2 :] if two else None
        return z, self.turned(z, self.half) if two else None

    def put(self, into: Array, rows: Array) -> Array:
        """The pairs of the level in `into` [h, t, t] replaced by those of upper halves' rows."""
        if self.sliced:
            lower, upper = self.parted(into)
            return self.joined(lower, jnp.where(self.pairs, rows, upper))
        return jnp.where(self.pairs, rows, into)

    def spread(self, rows: Array) -> Array:
        """Upper halves' rows where they belong, [h, t, c], and zeros in lower halves."""
        if self.sliced:
            return self.joined(jnp.zeros_like(rows), rows)
        return jnp.where(self.upper(rows.shape[2]), rows, 0.0)

    def packed_pairs(self, x: Array, y: Array | None) -> Array:
        """`pack` of arrays [h, t, t], with zeros but in the level's pairs."""
        z = self.pack(x, y)
        if self.sliced:
            pairs = self.pairs
            return jnp.where(pairs if y is None else jnp.concatenate([pairs, pairs]), z, 0.0)
        i, j = self.chunk.step(0), self.chunk.step(1)
        both = ((i ^ j) < 2 * self.half) & ((j & self.half) == 0)
        return jnp.where(self.pairs if y is None else both, z, 0.0)


def inverse(chunk: Chunk, lower: Array) -> Array:
    """(1 + lower)^-1 of a strictly lower triangular matrix [h, t, t]."""
    first, *rest = chunk.levels
    eye = jnp.where(chunk.diagonal, 1.0, 0.0)
    made = eye - jnp.where(first.pairs, lower, 0.0)
    for level in rest:
        if level.sliced:
            between = jnp.where(level.pairs, level.parted(lower)[1], 0.0)
            above, below = level.parted(made)
            across = level.spread(chunk.dot(between, made))
            made = level.joined(above, below - chunk.dot(below, across))
        else:
            between = jnp.where(level.pairs, lower, 0.0)
            made -= chunk.dot(made, chunk.dot(between, made))
    return made


# ---------------------------------------------------------------- decays


@dataclasses.dataclass(frozen=True)
class Decays:
    """Decays of a chunk, all at most one.

    start [h, t, d or 1]: from before the chunk to each step; end: from each step to the chunk's end; whole
    [h, 1, d or 1]. By head: between [h, t, t], of pairs. By channel: halves, for each level [h, t, d], from
    the boundary to a step of the upper half, from a step of the lower half to the boundary.
    """

    start: Array
    end: Array
    whole: Array
    between: Array | None = None
    halves: tuple[Array, ...] = ()


def decays(chunk: Chunk, g: Array | None) -> Decays | None:
    """g: log decays, [h, t, d] by channel, [h, 1, t] by head; None without decay."""
    if chunk.decay == "none" or g is None:
        return None
    g = g * LOG2E
    if chunk.decay == "channel":
        before, after = g, jnp.zeros_like(g)
        halves = []
        for level in chunk.levels:
            total = before + after
            if level.sliced:
                (low, high), (down, up), (first, second) = (level.parted(x) for x in (before, after, total))
                halves.append(jnp.exp2(level.joined(down, high)))
                before, after = level.joined(low, high + first), level.joined(down + second, up)
            else:
                upper = level.upper(g.shape[2])
                halves.append(jnp.exp2(jnp.where(upper, before, after)))
                before += jnp.where(upper, level.turned(total, level.half), 0.0)
                after += jnp.where(upper, 0.0, level.turned(total, -level.half))
        return Decays(jnp.exp2(before), jnp.exp2(after), jnp.exp2(before[:, -1:]), halves=tuple(halves))
    later, earlier = chunk.later(), chunk.earlier()
    start = jnp.where(later, g, 0.0).sum(2, keepdims=True)
    end = jnp.where(earlier, g, 0.0).sum(2, keepdims=True)
    # The sum over steps m with j < m <= i: a product of what m <= i keeps with what m > j keeps.
    kept = chunk.sums(jnp.where(later, g, 0.0), chunk.later(strict=True))
    between = jnp.where(later, jnp.exp2(kept), 0.0)
    return Decays(jnp.exp2(start), jnp.exp2(end), jnp.exp2(g.sum(2, keepdims=True)), between)


def decays_back(chunk: Chunk, start: Array, end: Array, whole: Array, between: Array) -> Array:
    """By head: the gradient of g from those of the exponents, in the shapes of `Decays`."""
    later, earlier = chunk.later(), chunk.earlier()
    through = jnp.where(later, chunk.sums(between, earlier), 0.0)
    return chunk.row(start, later) + chunk.row(end, earlier) + whole + through.sum(1, keepdims=True)


def ends_back(start: Array, end: Array, whole: Array) -> tuple[Array, Array]:
    """By channel: gradients of the exponents `before` and `after` of the whole chunk, for `level_back`."""
    last = jax.lax.broadcasted_iota(jnp.int32, start.shape[1:], 0) == start.shape[1] - 1
    return start + jnp.where(last, whole, 0.0), end


def level_back(level: Level, before: Array, after: Array, half: Array) -> tuple[Array, Array]:
    """From those of the sums over blocks of a level to those of its halves, the highest level first.

    half: the gradient of the level's own exponents. Of the lowest level, that of `before` is that of g.
    """
    if level.sliced:
        (low, high), (down, up), (first, second) = (level.parted(x) for x in (before, after, half))
        return level.joined(low + high, high + down + second), level.joined(down + high + first, up + down)
    upper = level.upper(before.shape[2])
    total = jnp.where(upper, level.turned(after, level.half), level.turned(before, -level.half))
    return before + total + jnp.where(upper, half, 0.0), after + total + jnp.where(upper, 0.0, half)
