"""Halves of heads that are rotated into each other, without taking the heads apart.

    a, b = split x                                 y = x @ P                  x's halves the other way round
    concatenate [a*c - b*s, b*c + a*s]     ->      x * [c, c] + y * [-s, s]

A head of 128 numbers fills the lanes of a vector register. Its halves leave half of them idle in every pass
over them, and to put halves side by side again takes more passes. P is a permutation: each number of the
product is one of x, times one, and a sum of zeros, so for bfloat16 it is exact, and the matrix unit has time
for it. What is multiplied and added is the same, so the numbers are the same. That holds of finite ones: an
infinite one makes NaNs of its whole head, not of its own pair alone.

A rotation's gradient is one the other way, and has the same form: this is done last, to a whole step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.errors import Decline
from xform.movement import Makers, makers
from xform.rewrite import Site
from xform.trace import Atom, Literal, Value, Var, shape_of, typeof

LANES = 128

AMONG = (
    "a region that is manual over some axes alone has values of outside of it; explicit collectives have none"
)


@dataclasses.dataclass(frozen=True)
class Term:
    """A product, of one or two factors, that is added or subtracted."""

    sign: int
    factors: tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A factor of the whole that has one factor in the first half and another in the second. of: a value
    whose halves they are, in their order or `swapped`; or (`both`) what each is.
    """

    of: Atom
    swapped: bool = False
    both: bool = False


class Rotations:
    """The rule, for `rewrite`. where: a regular expression that the name stack or source line is to match.
    lines: where it has changed something.
    """

    def __init__(self, where: str = "") -> None:
        self.where, self.lines = where, list[str]()
        self._makers: dict[int, tuple[Any, Makers]] = {}

    def __call__(self, site: Site) -> Sequence[Value] | None:
        if site.name != "concatenate" or len(site.eqn.invars) != 2:
            return None
        first, second = site.eqn.invars
        half = shape_of(first)[-1]
        if site.params["dimension"] != len(shape_of(first)) - 1 or half % LANES == 0:
            return None
        if shape_of(first) != shape_of(second) or not isinstance(first, Var) or not isinstance(second, Var):
            return None
        found = _Halves(self.made(site), shape_of(first)).sum(first, second)
        if found is None or not any(part.swapped for _, parts in found for part in parts):
            return None
        if self.where and not re.search(self.where, f"{site.where} {site.line}"):
            return None
        meshes = {typeof(x).sharding.mesh for x in site.values([p.of for _, parts in found for p in parts])}
        if len(meshes) > 1:
            raise Decline(f"halves of heads stay: {AMONG}")
        self.lines.append(site.line or site.where)
        with jax.sharding.use_abstract_mesh(meshes.pop()):  # that of a manual region, in one
            return [_emitted(site, self.made(site), half, found)]

    def made(self, site: Site) -> Makers:
        _, found = self._makers.setdefault(id(site.jaxpr), (site.jaxpr, makers(site.jaxpr)))
        return found


Summed = list[tuple[tuple[int, int], list[Part]]]
"""What is added up: the signs of a term in both halves, and its factors."""


class _Halves:
    """Two expressions of halves as one of wholes."""

    def __init__(self, made: Makers, shape: Sequence[int]) -> None:
        self.made, self.half, self.size = made, shape[-1], math.prod(shape)

    def sum(self, first: Var, second: Var) -> Summed | None:
        ones, others = list(self.terms(first)), list(self.terms(second))
        if len(ones) != len(others) or len(ones) > 2:
            return None
        for order in itertools.permutations(others):
            parts = [self.parts(a, b) for a, b in zip(ones, order, strict=True)]
            if all(parts):
                signs = [(a.sign, b.sign) for a, b in zip(ones, order, strict=True)]
                return [(s, p) for s, p in zip(signs, parts, strict=True) if p is not None]
        return None

    def parts(self, first: Term, second: Term) -> list[Part] | None:
        if len(first.factors) != len(second.factors):
            return None
        for order in itertools.permutations(second.factors):
            found = [self.part(a, b) for a, b in zip(first.factors, order, strict=True)]
            if all(found):
                return [part for part in found if part is not None]
        return None

    def part(self, first: Atom, second: Atom) -> Part | None:
        if first is second:  # put together twice, so it is to be small: the same for all heads
            shape = shape_of(first)
            return (
                Part(first, both=True)
                if shape[-1:] == (self.half,) and math.prod(shape) < self.size
                else None
            )
        a, b = self.half_of(first), self.half_of(second)
        if a is None or b is None or a[0] is not b[0] or a[1] == b[1] or not self.is_exact(a[0]):
            return None
        return Part(a[0], swapped=a[1] == 1)

    def half_of(self, v: Atom) -> tuple[Var, int] | None:
        """What it is a half of, and which."""
        if not isinstance(v, Var) or v not in self.made:
            return None
        eqn, k = self.made[v]
        x = eqn.invars[0] if eqn.invars else None
        if not isinstance(x, Var) or shape_of(x)[-1:] != (2 * self.half,):
            return None
        if eqn.primitive.name == "split" and eqn.params["axis"] == len(shape_of(x)) - 1:
            return (x, k) if len(eqn.outvars) == 2 and shape_of(v)[-1] == self.half else None
        if eqn.primitive.name == "slice" and eqn.params["strides"] is None:
            start, rest = eqn.params["start_indices"][-1], shape_of(v)[:-1]
            if start in (0, self.half) and rest == shape_of(x)[:-1] and shape_of(v)[-1] == self.half:
                return x, int(start > 0)
        return None

    def is_exact(self, x: Var) -> bool:
        return _dtype(source(self.made, x)) == jnp.bfloat16

    def terms(self, v: Atom, sign: int = 1) -> Iterator[Term]:
        name, args = self.call(v)
        if name in ("add", "add_any", "sub"):
            yield from self.terms(args[0], sign)
            yield from self.terms(args[1], -sign if name == "sub" else sign)
        elif name == "neg":
            yield from self.terms(args[0], -sign)
        elif name == "mul":
            factors = []
            for arg in args:
                while self.call(arg)[0] == "neg":
                    sign, arg = -sign, self.call(arg)[1][0]
                factors.append(arg)
            yield Term(sign, tuple(factors))
        else:
            yield Term(sign, (v,))

    def call(self, v: Atom) -> tuple[str, Sequence[Atom]]:
        """The operation that makes a value, and of what."""
        if isinstance(v, Literal) or v not in self.made:
            return "", ()
        eqn, _ = self.made[v]
        return eqn.primitive.name, eqn.invars


def source(made: Makers, x: Atom) -> Atom:
    """The value in the dtype that it has before it is widened."""
    if isinstance(x, Literal) or x not in made:
        return x
    eqn, _ = made[x]
    is_cast = eqn.primitive.name == "convert_element_type" and _dtype(eqn.invars[0]) == jnp.bfloat16
    return eqn.invars[0] if is_cast else x


def _dtype(x: Atom) -> Any:
    aval: Any = x.aval
    return aval.dtype


def _emitted(site: Site, made: Makers, half: int, found: Summed) -> Value:
    dtype = site.out_avals[0].dtype
    terms = []
    for signs, parts in found:
        factors = []
        for part in sorted(parts, key=lambda part: not part.both):
            (x,) = site.values([source(made, part.of) if part.swapped else part.of])
            if part.both:
                x = jnp.concatenate([-x if sign < 0 else x for sign in signs], -1)
                signs = (1, 1)
            factors.append(swapped(x, dtype) if part.swapped else x)
        if signs != (1, 1):
            factors.append(jnp.where(jnp.arange(2 * half) < half, *signs).astype(dtype))
        terms.append(functools.reduce(operator.mul, factors))
    return functools.reduce(operator.add, terms)


def swapped(x: Value, dtype: Any) -> Value:
    """x [..., 2 n], its halves the other way round, by a product."""
    n = x.shape[-1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (n, n), k) for k in (0, 1))
    permutation = (row == (column + n // 2) % n).astype(x.dtype)
    return jax.lax.dot_general(
        x, permutation, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype
    )
