"""Which tokens each device has, so that all have as much to do under a causal mask, and what they compute.

    zigzag, 4 devices:  0 7 | 1 6 | 2 5 | 3 4           of eight pieces of the length, two each
    striped:            0 4 8 .. | 1 5 9 .. | ...        every fourth token

In one piece each, the last device sees all keys, the first one its own alone. A length in such an order has
on each device a part; what the queries of one part see of the keys of another is known, as blocks of both.

Source: zigzag, Llama Team 2024, The Llama 3 Herd of Models, 3.3.2; striped, Brandon et al. 2023, Striped
Attention.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform.kernels.splash import Shift
from xform.ops import Band

BALANCES = ("zigzag", "striped")

Range = tuple[int, int]
"""From, and up to."""


@dataclasses.dataclass(frozen=True)
class Block:
    """What some queries of a part see of some keys of another, by the numbers that they have in these."""

    queries: Range
    keys: Range
    band: Band


Blocks = tuple[Block, ...]
"""None: nothing is seen. Ordered by queries."""


def pieces(balance: str, ways: int) -> int:
    """What a length is a multiple of that lies so over so many devices."""
    return 2 * ways if balance == "zigzag" else ways


def why_not(balance: str, band: Band, ways: int, length: int) -> str:
    """Why attention of so many queries cannot have them in that order; "" where it can."""
    if length % pieces(balance, ways):
        return f"{length} tokens are not {pieces(balance, ways)} pieces"
    if balance == "striped" and (band.chunk or 0) % ways:
        return f"chunks of {band.chunk} are not a multiple of {ways}"
    return ""


@functools.lru_cache(maxsize=64)
def order(balance: str, length: int, ways: int) -> tuple[int, ...]:
    """The tokens in the order in which devices have them, one device after the other."""
    return tuple(there(np.arange(length), balance, ways, 0).tolist())


def there(x: Any, balance: str, ways: int, dim: int) -> Any:
    """x with the rows along `dim` in that order; numpy's arrays stay numpy's."""
    if balance == "striped":
        return _split(x, dim, (-1, ways)).swapaxes(dim, dim + 1).reshape(x.shape)
    xp = np if isinstance(x, np.ndarray) else jnp
    halves = _split(x, dim, (2, ways, -1))
    first, second = (halves.take(n, dim) if xp is np else jnp.take(halves, n, dim) for n in (0, 1))
    return xp.stack([first, xp.flip(second, dim)], dim + 1).reshape(x.shape)


def back(x: Any, balance: str, ways: int, dim: int) -> Any:
    """The rows as they were before `there`."""
    if balance == "striped":
        return _split(x, dim, (ways, -1)).swapaxes(dim, dim + 1).reshape(x.shape)
    halves = _split(x, dim, (ways, 2, -1))
    first, second = (jnp.take(halves, n, dim + 1) for n in (0, 1))
    return jnp.stack([first, jnp.flip(second, dim)], dim).reshape(x.shape)


def _split(x: Any, dim: int, sizes: tuple[int, ...]) -> Any:
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def places(balance: str, band: Band, ways: int, t: int, number: Any) -> Shift:
    """Where the t queries of each device stand among all keys, in the model's own order."""
    if balance == "striped":
        return Shift(tuple((band.offset + i,) for i in range(ways)), number, ways)
    if balance == "zigzag":
        half = t // 2
        starts = [(i * half, (2 * ways - 1 - i) * half) for i in range(ways)]
        return Shift(tuple((band.offset + a, band.offset + b) for a, b in starts), number)
    return Shift(tuple((band.offset + t * i,) for i in range(ways)), number)


@functools.lru_cache(maxsize=1024)
def blocks(balance: str, band: Band, ways: int, t: int, s: int, queries: int, keys: int) -> Blocks:
    """What the t queries of device `queries` see of the s keys of device `keys`, as many."""
    if balance == "zigzag":
        return _of_halves(band, ways, t // 2, queries, keys)
    if balance == "striped":
        found = band.strided(ways, queries, keys).simplified(t, s)
    else:
        found = band.moved(queries * t, keys * s).simplified(t, s)
    return () if found is None else (Block((0, t), (0, s), found),)


def _of_halves(band: Band, ways: int, half: int, queries: int, keys: int) -> Blocks:
    """Of parts of two halves each, in as few blocks as there can be."""
    whole, halves, full = (0, 2 * half), ((0, half), (half, 2 * half)), Band()
    if queries == keys and band == Band(right=-band.offset, offset=band.offset):
        return (Block(whole, whole, band),)  # the halves follow one another: so does one token on another
    asked, held = ((i, 2 * ways - 1 - i) for i in (queries, keys))
    table = [[band.moved(q * half, k * half).simplified(half, half) for k in held] for q in asked]
    if table == [[full, full], [full, full]]:
        return (Block(whole, whole, full),)
    for k in (0, 1):
        if [row[k] for row in table] == [full, full] and [row[1 - k] for row in table] == [None, None]:
            return (Block(whole, halves[k], full),)
    found: list[Block] = []
    for q, row in zip(halves, table, strict=True):
        if row == [full, full]:
            found.append(Block(q, whole, full))
        else:
            found += [Block(q, k, each) for k, each in zip(halves, row, strict=True) if each is not None]
    return tuple(found)
