"""Tokens sorted by expert, what is done with the rows of each expert, and the rows back at their tokens.

    z[m,j,:] = operation[experts] ids[m,j] x[m,:] w[x,...]

What is done with the rows, the middle, is a part of the user's program, with as many rows as that had. It
treats each row alone, but for the weights that the row's expert has, so that it can be run for any number of
rows: the operation is right for any number of tokens.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from xform.batch.local import Local
from xform.batch.states import GROUPS, SAME, Mixes, State, rows
from xform.experts.sizes import Sized, local, ran
from xform.trace import Jaxpr, Value, shape_of

TOKEN, CHOICE, IDS, COUNTS, GIVEN = "token", "choice", "ids", "counts", "given"
"""What the middle takes: rows of tokens, or of tokens' choices, in the order of experts; the expert of each
row; how many rows each expert has; weights and whatever else is the same for all rows."""

ROWS = frozenset((TOKEN, CHOICE, IDS))

LETTERS = "".join(c for c in string.ascii_letters if c not in "mj") + "".join(map(chr, range(0x3B1, 0x3CA)))
"""Of dimensions that are neither tokens nor choices."""


@dataclasses.dataclass(frozen=True, eq=False)
class Middle:
    """What is done with sorted rows: a program that takes `takes` and gives arrays with a row for each.

    size: the number of rows that it was written for. experts: how many there are. bounded: whether no row is
    of an expert that there is not; natural: whether none has a number that is negative.
    """

    jaxpr: Jaxpr
    takes: tuple[str, ...]
    size: int
    experts: int
    bounded: bool = False
    natural: bool = False

    def states(self) -> list[State]:
        return [rows(0) if t in ROWS else GROUPS if t == COUNTS else SAME for t in self.takes]

    def of(self, count: int) -> Local:
        """The program for so many rows. Raises `Mixes`, with the line, where rows meet."""
        return local(self.jaxpr, self.states(), Sized(self.size, 1, have=count))

    def check(self) -> None:
        """Raises `Mixes` where it does more with rows than treat each alone."""
        if any(not s.is_rows or s.dim != 0 or s.inner != 1 for s in self.of(self.size).outs):
            raise Mixes("what comes of the rows of experts is no row for each")

    def run(self, args: Sequence[Value], count: int) -> list[Value]:
        return ran(self.of(count), args, Sized(self.size, 1, have=count))


@dataclasses.dataclass(frozen=True)
class Sorted:
    """ids[m,j], then what the middle takes but for ids and counts -> the middle's results as [m,j,...].

    Rows of tokens are [m,...], those of their choices [m,j,...]. A number of an expert that there is not has
    no row of any; what the middle gives there is as the middle has it.
    """

    middle: Middle

    name = "experts"
    cut = "m"
    interpret = False

    @property
    def _dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        letters, jaxpr = iter(LETTERS), self.middle.jaxpr
        lead = {TOKEN: "m", CHOICE: "mj", GIVEN: ""}
        takes = []
        for v, t in zip(jaxpr.invars, self.middle.takes, strict=True):
            if t in lead:
                own = len(shape_of(v)) - (t != GIVEN)
                takes.append(lead[t] + "".join(next(letters) for _ in range(own)))
        gives = tuple("mj" + "".join(next(letters) for _ in shape_of(v)[1:]) for v in jaxpr.outvars)
        return ("mj", *takes), gives

    @property
    def operands(self) -> tuple[str, ...]:
        return self._dims[0]

    @property
    def results(self) -> tuple[str, ...]:
        return self._dims[1]

    def plain(self, *args: Value) -> Sequence[Value]:
        ids, others = args[0], iter(args[1:])
        (tokens, choices), middle = ids.shape, self.middle
        flat = ids.reshape(-1)
        order = jnp.argsort(flat)
        takes: list[Any] = []
        for v, t in zip(middle.jaxpr.invars, middle.takes, strict=True):
            aval: Any = v.aval
            if t == IDS:
                takes.append(flat[order].astype(aval.dtype))
            elif t == COUNTS:
                takes.append(jnp.bincount(flat, length=middle.experts).astype(aval.dtype))
            else:
                x = next(others)
                if t == TOKEN:
                    x = x[order // choices]
                elif t == CHOICE:
                    x = x.reshape(-1, *x.shape[2:])[order]
                takes.append(x)
        made = middle.run(takes, tokens * choices)
        back = jnp.argsort(order)
        return [x[back].reshape(tokens, choices, *x.shape[1:]) for x in made]

    def kernel(self, *args: Value) -> Sequence[Value]:
        return self.plain(*args)
