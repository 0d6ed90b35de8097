"""The last word on an attention: its result at a few points, against the formula of what it is said to mean.

Scores are made up, and so are values, biases and booleans that masks are made of; all is computed in float64.
What agrees at random points to five digits computes the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xform.axes.factors import Shape
from xform.raising.logits import Part
from xform.raising.operands import Source
from xform.raising.points import Known, Points, Unknown, depends, random_inputs, random_known
from xform.raising.reading import Reading, Space
from xform.raising.seen import Read
from xform.trace import Atom, Var

RTOL = 2e-5


@dataclasses.dataclass(frozen=True)
class Factor:
    """What weights are multiplied by after the softmax, or what is added before: an atom, its dimensions."""

    atom: Atom
    dims: Shape
    factor: float = 1.0
    seen: bool | None = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a result is said to be, in factors.

    v: values; weights: what goes into their product; out: the result. read: mask and biases, whose tensors
    have letters: `letters` says which factors they are. raw: the same as the program has it.
    """

    parts: Sequence[Part]
    amp: float | None
    read: Read
    raw: Sequence[Factor]
    sink: Factor | None
    after: Sequence[Factor]
    scale: float
    v: Source
    weights: tuple[Atom, Shape]
    out: tuple[Atom, Shape]
    rows: frozenset[int]
    s: tuple[int, ...]
    letters: Mapping[int, str]
    sizes: Mapping[str, int]


class Probe:
    """Random points of an attention."""

    def __init__(self, reading: Reading, space: Space, claim: Claim) -> None:
        self.reading, self.space, self.claim = reading, space, claim
        self.keys = keys = math.prod(map(space.size, claim.s))
        self.count = 12 if keys <= 256 else 6 if keys <= 4096 else 3
        rng = np.random.default_rng(keys)
        leaves = claim.rows | space.all(claim.out[1]) | space.all(claim.v.dims) | space.all(claim.weights[1])
        self.at: dict[int, Any] = {}
        for leaf in sorted(leaves - set(claim.s)):
            n = space.size(leaf)
            values = rng.integers(0, n, self.count)
            if claim.letters.get(leaf) == "t":
                values[:3] = [n - 1, n // 2, 0][: len(values[:3])]
            self.at[leaf] = values[:, None]
        rest = np.arange(keys)[None, :]
        for leaf in reversed(claim.s):
            rest, self.at[leaf] = np.divmod(rest, space.size(leaf))
        self.by_letter = {letter: self.at[leaf] for leaf, letter in claim.letters.items() if leaf in self.at}

    def index(self, dims: Shape) -> tuple[Any, ...]:
        """Where a value of these factors is at the points."""
        found = []
        for dim in dims:
            linear: Any = np.zeros((1, 1), np.int64)
            for leaf in self.space.leaves(dim):
                linear = linear * self.space.size(leaf) + self.at[leaf]
            found.append(linear)
        return tuple(found)

    def mistake(self, seed: int) -> str:
        """What the result is not; "" where all agrees. Raises `Unknown`."""
        claim = self.claim
        known = self._known(seed)
        points = Points(self.reading.view, known, wide=True)
        x: Any = 0.0
        for part in claim.parts:
            x = x + part.factor * known[part.product.out](self.index(part.product.dims))
        if claim.amp is not None:
            x = claim.amp * np.tanh(x)
        at, pieces = self.by_letter, claim.read.pieces
        for bias, factor in zip(pieces.bias, pieces.factors, strict=True):
            x = x + factor * claim.read.masks.value(bias, points, at)
        shape = (self.count, self.keys)
        x = np.where(claim.read.masks.seen(pieces.mask, points, at), x, -np.inf)
        x = np.broadcast_to(x, shape)
        top = np.max(x, axis=1, keepdims=True)
        alive = np.isfinite(top)[:, 0]
        if not alive.any():
            return ""
        e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
        total = e.sum(axis=1, keepdims=True)
        if claim.sink is not None:
            total = total + np.exp(points.at(claim.sink.atom, self.index(claim.sink.dims)) - top)
        with np.errstate(invalid="ignore"):  # rows that see no key
            w = e / total
        for each in claim.after:
            value = points.at(each.atom, self.index(each.dims))
            w = w * (value if each.seen is None else value == each.seen)
        w = w * claim.scale
        v = known[claim.v.atom](self.index(claim.v.dims)) * claim.v.factor  # type: ignore[index]
        with np.errstate(all="ignore"):
            out = (w * v).sum(axis=1)
        theirs = points.at(claim.out[0], self.index(claim.out[1]))[:, 0]
        if close(theirs[alive], out[alive], float(np.max(np.abs(v)))):
            return ""
        return self._where(points, w, alive)

    def _where(self, points: Points, w: Any, alive: Any) -> str:
        """What of it is another: the sum of the weights, the weights, or how they are used."""
        atom, dims = self.claim.weights
        try:
            theirs = np.broadcast_to(points.at(atom, self.index(dims)), w.shape)
        except Unknown:
            return "its result is not what attention computes"
        sums = theirs[alive].sum(axis=1)
        if (
            self.claim.sink is None
            and not self.claim.after
            and not np.allclose(sums / self.claim.scale, 1.0, 1e-4)
        ):
            return "its weights do not add up to one over the keys"
        if not close(theirs[alive], w[alive], 1.0):
            return "its weights are not the softmax of its logits over the keys"
        return "its values are not mixed by its weights as in attention"

    def _known(self, seed: int) -> dict[Var, Known]:
        claim = self.claim
        view = self.reading.view
        known: dict[Var, Known] = {}
        spread = (1.0, 0.5, 2.0)[seed % 3]
        for n, part in enumerate(claim.parts):
            reach = spread / abs(part.factor) if part.factor else 1.0
            known[part.product.out] = _scaled(random_known(part.product.out, 97 * seed + n), reach)
        pieces = claim.read.pieces
        tensors = [*pieces.mask.chosen, *pieces.bias, *(t for pair in pieces.mask.segments for t in pair)]
        cut: list[tuple[Atom, tuple[str, ...] | None]] = [(t.atom, t.dims) for t in tensors]
        cut += [(f.atom, None) for f in claim.after]
        cut += [(claim.sink.atom, None)] if claim.sink is not None else []
        for n, (atom, dims) in enumerate(cut):
            if isinstance(atom, Var) and atom not in known and self.reading.takes_inputs(atom):
                known[atom] = _along(random_known(atom, 101 * seed + 11 + n, 3), dims)
        assert isinstance(claim.v.atom, Var)
        known[claim.v.atom] = random_known(claim.v.atom, 103 * seed + 7)
        rest: set[Var] = set()
        for factor in claim.raw:
            rest |= depends(view, factor.atom, known)
        for n, (v, f) in enumerate(random_inputs(sorted(rest - set(known), key=id), seed).items()):
            del n
            known[v] = f
        return known


def close(a: Any, b: Any, size: float) -> bool:
    """Whether two arrays agree to the digits that formulas agree to in float64."""
    return bool(np.allclose(a, b, rtol=RTOL, atol=RTOL * max(size, 1e-30), equal_nan=True))


def _along(f: Known, dims: tuple[str, ...] | None) -> Known:
    """Values that change only along dimensions that have letters."""
    if dims is None or all(dims):
        return f
    return lambda index: f(tuple(i if dim else np.zeros_like(i) for i, dim in zip(index, dims, strict=True)))


def _scaled(f: Known, by: float) -> Known:
    return lambda index: np.asarray(f(index), np.float64) * by


def product_holds(reading: Reading, space: Space, part: Part, q: Source, k: Source) -> bool:
    """Whether scores are the sums of products of the queries and keys at these sources, at a few points."""
    assert isinstance(q.atom, Var) and isinstance(k.atom, Var)
    known = {k.atom: random_known(k.atom, 5), q.atom: random_known(q.atom, 3)}
    rows = space.all(part.product.dims)
    inside = sorted((space.all(q.dims) | space.all(k.dims)) - rows)
    rng = np.random.default_rng(7)
    at = {
        leaf: rng.integers(0, space.size(leaf), 5).reshape([5] + [1] * len(inside)) for leaf in sorted(rows)
    }
    for i, leaf in enumerate(inside):
        shape = [1] * (len(inside) + 1)
        shape[i + 1] = space.size(leaf)
        at[leaf] = np.arange(space.size(leaf)).reshape(shape)

    def index(dims: Shape) -> tuple[Any, ...]:
        found = []
        for dim in dims:
            linear: Any = np.zeros([1] * (len(inside) + 1), np.int64)
            for leaf in space.leaves(dim):
                linear = linear * space.size(leaf) + at[leaf]
            found.append(linear)
        return tuple(found)

    ours = known[q.atom](index(q.dims)).astype(np.float64) * known[k.atom](index(k.dims)).astype(np.float64)
    whole = [5, *(space.size(leaf) for leaf in inside)]
    ours = np.broadcast_to(ours, whole).sum(axis=tuple(range(1, len(whole)))) * q.factor * k.factor
    points = Points(reading.view, known, wide=True)
    theirs = points.at(part.product.out, index(part.product.dims)).reshape(5)
    return close(theirs, ours, float(np.max(np.abs(ours))) + 1e-6)
