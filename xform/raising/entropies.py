"""Values of one number a token, fitted to what a cross-entropy is made of.

    y = lse * log-sum-exp + own * label's logit + mean * mean of logits + square * log-sum-exp^2 + constant

Evaluated for made-up logits, of another level and spread in each row, so that these terms are told apart, and
made-up labels; in float64. In one of the draws logits lie far apart, and a label is the largest: what is
clipped shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xform.raising.flat import View, size
from xform.raising.following import chain, is_elementary, kind, leaves, sources
from xform.raising.indices import MOVEMENT, Array, Index
from xform.raising.points import Points, Unknown, random_known
from xform.raising.vocabulary import Logits, Other
from xform.trace import JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Fit:
    """A value a token: lse * the log-sum-exp + own * the label's logit + ... of these labels.

    summed: it is the operand of a sum over the vocabulary and tokens, whose result is `out`.
    """

    out: Var
    lse: float = 0.0
    own: float = 0.0
    mean: float = 0.0
    square: float = 0.0
    constant: float = 0.0
    labels: Var | None = None
    soft: bool = False
    outside: tuple[str, str] = ("none", "none")
    summed: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, or minus one."""
        return abs(self.lse) == 1 and _near(self.lse, -self.own - self.mean) and self.own * self.lse < 0

    @property
    def is_lse(self) -> bool:
        return (self.lse, self.own, self.mean, self.square, self.constant) == (1, 0, 0, 0, 0)

    @property
    def is_own(self) -> bool:
        return (self.lse, self.own, self.mean, self.square, self.constant) == (0, 1, 0, 0, 0)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)


class Fits:
    """What values that follow from logits are."""

    def __init__(self, found: Logits, known: frozenset[Var]) -> None:
        self.view: View = found.view
        self.z, self.known = found, known
        self.rows = _some(found.tokens)
        self.draws = max(2, -(-14 // len(self.rows)))
        self.tables = [self._table(draw) for draw in range(self.draws)]

    # ------------------------------------------------------------ made-up values

    def _table(self, draw: int) -> tuple[Any, Array, Array | None]:
        """Made-up values of the product, another size and level in each row; our rows' logits; the bias."""
        z, product = self.z, self.z.product
        made = random_known(product, 50 + draw)

        def known(index: Index) -> Any:
            row: Array = np.zeros((), np.int64)
            for d, n in enumerate(size(product)):
                row = row if d == z.at else row * n + index[d]
            numbers = made(index).astype(np.float64)
            spread = 150.0 if draw == 1 else 1.0  # so far apart that nothing can be clipped
            numbers = numbers * spread * (1 + 0.5 * np.sin(78.2 * row + draw))
            return (numbers + 3 * np.sin(13.1 * row + 2 * draw)) / z.scale

        bias = None
        if z.bias is not None:
            bias = np.asarray(random_known(z.bias, 7)(self._bias_index()), np.float64).reshape(-1)
        return known, z.values(known, self.rows, bias), bias

    def _bias_index(self) -> Index:
        assert self.z.bias is not None
        sizes = size(self.z.bias)
        return tuple(np.arange(n) if n > 1 else np.zeros((), np.int64) for n in sizes)

    def _labels(self, draw: int) -> Array:
        """The labels of our rows; the first and the last of the vocabulary among them."""
        rng = np.random.default_rng(draw)
        made = rng.integers(0, self.z.valid, len(self.rows))
        made[draw % len(made)] = 0
        made[(draw + 1) % len(made)] = self.z.valid - 1
        if len(made) > 2:
            made[(draw + 2) % len(made)] = self.tables[draw][1][(draw + 2) % len(made)].argmax()
        return made

    def _given(self, var: Var, labels: Array) -> Any:
        """The labels as values of a variable."""
        sizes = size(var)

        def known(index: Index) -> Any:
            row: Array = np.zeros((), np.int64)
            for i, n in zip(index, sizes, strict=True):
                row = row * n + np.asarray(i)
            values = np.zeros(row.shape, np.int64)
            for at, label in zip(self.rows, labels, strict=True):
                values = np.where(row == at, label, values)
            return values

        return known

    def _values(self, y: Var, draw: int, known: dict[Var, Any], over: bool) -> Array:
        """The values of our rows, of something with one number a token; or summed `over` the vocabulary."""
        given, _, _ = self.tables[draw]
        known = known | dict.fromkeys(self.z.products, given)
        if self.z.bias is not None:
            known[self.z.bias] = random_known(self.z.bias, 7)
        points = Points(self.view, known, wide=True)
        if over:
            index = self.z.index(self.rows[:, None], np.arange(self.z.vocab)[None])
            return np.asarray(points.at(y, index), np.float64).sum(-1)
        place = np.unravel_index(self.rows, size(y)) if size(y) else ()
        return np.broadcast_to(points.at(y, place), (len(self.rows),)).astype(np.float64)

    # ------------------------------------------------------------ values of tokens

    def tokens(self) -> Iterator[Fit]:
        """What values a token are, in order."""
        missed = None
        for number in sorted({self.view.makers[v] for v in self.z.inside if v in self.view.makers}):
            for y in self.view.eqns[number].outvars:
                if y in self.z.products or y not in self.z.inside or math.prod(size(y)) != self.z.rows:
                    continue
                if kind(y) != "f":
                    continue
                fit = self.fit(y)
                missed = 0 if fit is not None and fit.is_loss else missed if missed is None else missed + 1
                if fit is not None:
                    yield fit
                if missed is not None and missed > 8:
                    return

    def fit(self, y: Var, over: bool = False) -> Fit | None:
        others = leaves(self.view, y, self.z.products, self.z.inside, {*self.known, *self._biases()})
        if not others:
            return self._alone(y, over)
        best: Fit | None = None
        for labels in self._integers(others):
            fit = self._with_labels(y, labels, over)
            if fit is None or (best is not None and "other" in fit.outside):
                break
            best = fit
        if best is None and len(others) == 1:
            best = self._soft(y, others[0], over)
        return best

    def _biases(self) -> list[Var]:
        """The bias, and what it is moved and cast to."""
        if self.z.bias is None:
            return []
        found, todo = [self.z.bias], [self.z.bias]
        while todo:
            for number in self.view.users.get(todo.pop(), ()):
                if number >= 0 and self.view.eqns[number].primitive.name in MOVEMENT:
                    found += self.view.eqns[number].outvars
                    todo += self.view.eqns[number].outvars
        return found

    def _integers(self, others: Sequence[Var]) -> list[Var]:
        """The integers, one a token, that values depend on alone, the nearest first."""

        def opens(eqn: JaxprEqn) -> bool:
            return is_elementary(eqn) or eqn.primitive.name in _JOINS

        found = []
        for v in sources(self.view, others, self.known, opens):
            if math.prod(size(v)) == self.z.rows and kind(v) in ("i", "u"):
                found.append(v)
        return found

    def _alone(self, y: Var, over: bool) -> Fit | None:
        """Of logits alone: the log-sum-exp; or a loss whose labels are places."""
        try:
            ys = [self._values(y, draw, {}, over) for draw in range(self.draws)]
        except Unknown:
            return None
        fit = self._solved(y, ys, [None] * self.draws)
        if fit is not None:
            return fit
        for places in (self.rows % self.z.vocab, np.zeros_like(self.rows)):
            fit = self._solved(y, ys, [places] * self.draws)
            if fit is not None and fit.own != 0 and fit.is_loss:
                raise Other("its labels are places, not data: a contrastive loss of rows with each other")
        return None

    def _with_labels(self, y: Var, var: Var, over: bool) -> Fit | None:
        try:
            made = [self._labels(draw) for draw in range(self.draws)]
            given = [{var: self._given(var, labels)} for labels in made]
            ys = [self._values(y, draw, given[draw], over) for draw in range(self.draws)]
            fit = self._solved(y, ys, made)
            if fit is None or fit.own == 0:
                return None
            outside = (self._outside(fit, var, -1, over), self._outside(fit, var, self.z.valid, over))
        except Unknown:
            return None
        return dataclasses.replace(fit, labels=var, outside=outside)

    def _solved(self, y: Var, ys: Sequence[Array], labels: Sequence[Array | None]) -> Fit | None:
        features, some = [], labels[0] is not None
        for (_, z, _), own in zip(self.tables, labels, strict=True):
            lse = _lse(z)
            rows = np.arange(len(z))
            columns = [lse, np.square(lse), np.ones_like(lse)]
            columns += [z[rows, own], self._mean(z)] if some else []
            features.append(np.stack(columns, -1))
        a, b = np.concatenate(features), np.concatenate(ys)
        if not np.isfinite(b).all():
            return None
        size_of = np.abs(a).max(0)
        solved = np.linalg.lstsq(a / size_of, b, rcond=None)[0] / size_of
        if not np.allclose(a @ solved, b, rtol=1e-7, atol=1e-7):
            return None
        by = [*map(tidy, solved), 0.0, 0.0][:5]
        return Fit(y, lse=by[0], own=by[3], mean=by[4], square=by[1], constant=by[2])

    def _mean(self, z: Array) -> Array:
        return np.asarray(z[:, : self.z.valid].mean(-1))

    def _outside(self, fit: Fit, var: Var, label: int, over: bool) -> str:
        """What is taken for the logit of a label that is not in the vocabulary."""
        y = self._values(fit.out, 0, {var: self._given(var, np.full(len(self.rows), label))}, over)
        z = self.tables[0][1]
        lse = _lse(z)
        own = y - fit.lse * lse - fit.square * lse * lse - fit.mean * self._mean(z) - fit.constant
        own = own / fit.own
        if np.isnan(y).all():
            return "nan"
        meanings = {"none": np.zeros(len(z)), "clamp": z[:, 0 if label < 0 else self.z.valid - 1]}
        if label < 0:
            meanings["wrap"] = z[:, label]
        fits = [name for name, value in meanings.items() if np.allclose(own, value, atol=1e-6)]
        return fits[0] if fits else "other"

    def _soft(self, y: Var, leaf: Var, over: bool) -> Fit | None:
        """Labels that are numbers of their own for every place of the vocabulary."""
        wide = [n for n in size(self.z.exponent) if n > 1]
        alike = [v for v in chain(self.view, leaf) if [n for n in size(v) if n > 1] == wide]
        var = alike[-1] if alike else None
        if not isinstance(var, Var) or kind(leaf) != "f":
            return None
        made = random_known(var, 90)
        whole = self.z.index(self.rows[:, None], np.arange(self.z.vocab)[None])
        at = iter([i for i, n in zip(whole, size(self.z.exponent), strict=True) if n > 1])
        index = tuple(next(at) if n > 1 else np.zeros((1, 1), np.int64) for n in size(var))
        p = np.broadcast_to(np.asarray(made(index), np.float64) + 2, (len(self.rows), self.z.vocab))
        features, ys = [], []
        try:
            for draw in range(self.draws):
                z = self.tables[draw][1]
                ys.append(self._values(y, draw, {var: lambda i: made(i).astype(np.float64) + 2}, over))
                features.append(np.stack([p.sum(-1) * _lse(z), (p * z).sum(-1)], -1))
        except Unknown:
            return None
        a, b = np.concatenate(features), np.concatenate(ys)
        if not np.isfinite(b).all():
            return None
        solved = np.linalg.lstsq(a, b, rcond=None)[0]
        if not np.allclose(a @ solved, b, rtol=1e-7, atol=1e-7):
            return None
        lse, own = map(tidy, solved)
        if (lse, own) not in ((1, -1), (-1, 1)):
            return None
        made_by = {self.view.eqns[n].primitive.name for n in self.view.ancestors([var])}
        if "dot_general" in made_by:
            raise Other("its labels are computed by a model, as another's probabilities are")
        return Fit(y, lse, own, labels=var, soft=True)


_JOINS = ("concatenate", "pad", "stack", "iota", "dynamic_slice")


def _some(tokens: Sequence[int]) -> Array:
    """Some tokens, counted through: all corners, and others in between."""
    rng = np.random.default_rng(3)
    ends = [(0, n - 1) for n in tokens]
    corners = list(itertools.islice(itertools.product(*ends), 8))
    inner = [tuple(int(rng.integers(0, n)) for n in tokens) for _ in range(5)]
    flat = [np.ravel_multi_index(at, tokens) if tokens else 0 for at in [*corners, *inner]]
    return np.unique(np.asarray(flat, np.int64))


def _lse(z: Array) -> Array:
    most = z.max(-1)
    return np.asarray(np.log(np.exp(z - most[:, None]).sum(-1)) + most)


def tidy(x: float) -> float:
    """A coefficient without what solving has left: of 0 and 1, and what was written in float32."""
    for whole in (0.0, 1.0, -1.0):
        if abs(x - whole) < 3e-7:
            return whole
    return float(f"{float(x):.6g}")
