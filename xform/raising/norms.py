"""RMSNorm and LayerNorm, found from the root of a mean of squares.

    m = mean(square(x))                   norm[rms] x, w
    y = x * rsqrt(m + 1e-6) * w     ->

Anchors are roots. What is under a root is evaluated at points, for made-up values of each value x that it
follows from alone: where that is c * (mean of squares + epsilon), or of the variance, over some of x's
dimensions, whatever way it is written, the values that follow from the root are evaluated too. The last one
that is x over the root of just that, times a scale, plus a shift, both no more than weights, is the norm. All
of that is in float64, and holds to 1e-8: so casts and the order of factors do not matter, and nothing passes
that is another function. Dimensions are the last ones of x, or others if there is a weight over just them
(channels first); so that the statistics of a batch are none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xform.raising.flat import View, size
from xform.raising.following import (
    chain,
    cone,
    ends_in,
    is_elementary,
    is_outer,
    leaves,
    uniform,
    width,
)  # fmt: skip
from xform.raising.meaning import Near, Norm, Raised, Tensor
from xform.raising.measuring import PLACES, Measure, Rows, mean, measures
from xform.raising.points import Points, Unknown, random_known
from xform.trace import Atom, Var

_CLOSE = 1e-8
_DRAWS = 4  # made-up rows, of different sizes


def norms(view: View) -> Iterator[Raised | Near]:
    """The norms of a body, one a result, and what nearly are."""
    known = uniform(view)
    done: set[int] = set()
    for number, eqn in enumerate(view.eqns):
        if eqn.primitive.name not in ("sqrt", "rsqrt", "pow") or eqn.outvars[0] in known:
            continue
        found = _Root(view, known, number).norm()
        if isinstance(found, Near):
            yield found
        elif found is not None and found.number not in done:
            done.add(found.number)
            yield found


@dataclasses.dataclass(frozen=True)
class _Fit:
    """A value that is the norm of what was measured; its weights: the variable, and whether 1 is added."""

    out: Var
    scale: Var | None = None
    add_one: bool = False
    shift: Var | None = None


class _Root:
    """One root, and whether it is a norm's."""

    def __init__(self, view: View, known: frozenset[Var], number: int) -> None:
        self.view, self.known, self.number = view, known, number
        self.eqn = view.eqns[number]
        self.root = self.eqn.outvars[0]
        self.under = self.eqn.invars[0]

    def norm(self) -> Raised | Near | None:
        found = list(measures(self.view, self.under, self.known))
        after = self._after() if found else []
        best: tuple[Measure, _Fit] | None = None
        for measure in found:
            if not measure.exact or (best is not None and not self._is_better(measure, best[0])):
                continue
            fit = self._fit(measure, after)
            if fit is not None:
                best = measure, fit
        if best is not None:
            return self._raised(*best)
        return self._near(found, after) if after else None

    # ------------------------------------------------------------ what is made of it

    def _after(self) -> list[Var]:
        """What follows from the root element by element, in order."""
        found: list[Var] = []
        seen = {self.root}
        todo = [self.root]
        while todo and len(found) < 40:
            v = min(todo, key=lambda v: self.view.makers[v])
            todo.remove(v)
            for number in self.view.users.get(v, ()):
                if number < 0:
                    continue
                eqn = self.view.eqns[number]
                out = eqn.outvars[0]
                if (is_elementary(eqn) or is_outer(eqn)) and out not in seen and len(eqn.outvars) == 1:
                    seen.add(out)
                    todo.append(out)
                    found.append(out)
        return sorted(found, key=lambda v: self.view.makers[v])

    def _is_better(self, new: Measure, old: Measure) -> bool:
        """Of the same thing: a LayerNorm of x is an RMSNorm of what was centred; before it was cast."""
        if (old.kind, new.kind) == ("rms", "layer"):
            return True
        eqn = self.view.maker(old.x)
        if new.kind != old.kind or eqn is None or eqn.primitive.name != "convert_element_type":
            return False
        return eqn.invars[0] is new.x and width(new.x) <= width(old.x)

    def _fit(self, measure: Measure, after: Sequence[Var]) -> _Fit | None:
        """The last value that is the norm, as far as what comes before is used for it alone."""
        found: list[_Fit] = []
        misses = 0
        for y in after:
            if size(y) != size(measure.x) or (found and self._widens(y)):
                continue
            fit = self._of(measure, y)
            misses = 0 if fit else misses + bool(found)
            if misses > 4 or (found and fit and not ends_in(self.view, found[-1].out, y)):
                break
            found += [fit] if fit else []
        while found and not self._holds(measure, found[-1]):
            found.pop()
        return found[-1] if found and self._is_allowed(measure, found[-1]) else None

    def _widens(self, y: Var) -> bool:
        eqn = self.view.maker(y)
        if eqn is None or eqn.primitive.name != "convert_element_type":
            return False
        return width(eqn.invars[0]) < width(y)

    def _is_allowed(self, measure: Measure, fit: _Fit) -> bool:
        """The last dimensions, not all; or those of the weights."""
        wide = [d for d, n in enumerate(size(measure.x)) if n > 1]
        trailing = measure.axes == tuple(wide[-len(measure.axes) :])
        return fit.scale is not None or (trailing and len(measure.axes) < len(wide))

    def _of(self, measure: Measure, y: Var, kind: str = "", by: float = 1.0) -> _Fit | None:
        """How `y` is the norm of x, if it is. by: how large x is; kind: what is divided, where it is not
        what was measured.
        """
        x, axes = measure.x, measure.axes
        inside = cone(self.view, x, self.view.makers[y])
        others = leaves(self.view, y, [x], inside, self.known)
        if len(others) > 3:
            return None
        rows = Rows(x, axes)
        bases = {p: self._base(p, x, axes) for p in others}
        if not all(bases.values()):
            return None
        weights = list(dict.fromkeys(bases.values()))
        known: dict[Var, Any] = {w: random_known(w, 31 + n) for n, w in enumerate(weights) if w is not None}
        ys, ns = [], []
        try:
            for draw in range(_DRAWS):
                scale = by * (1.0, 0.7, 1.6, max(measure.epsilon, 1e-12) ** 0.5)[draw]
                made = random_known(x, 100 + draw)

                def drawn(index: Any, made: Any = made, scale: float = scale) -> Any:
                    return made(index).astype(np.float64) * scale

                values = Points(self.view, known | {x: drawn}, wide=True).at(y, rows.place)
                ys.append(np.broadcast_to(values, (PLACES,)).astype(np.float64))
                row = rows.whole(drawn)
                under = mean(measure.kind, row) + measure.epsilon
                centre = row.mean(-1) if (kind or measure.kind) == "layer" else 0.0
                ns.append((drawn(tuple(rows.place)) - centre) / np.sqrt(under))
        except Unknown:
            return None
        return self._weights(y, np.array(ys), np.array(ns), rows, known)

    def _weights(self, y: Var, ys: Any, ns: Any, rows: Rows, weights: dict[Var, Any]) -> _Fit | None:
        """From y = n * scale + shift, for several n at each place: what scale and shift are."""
        if not (np.isfinite(ys).all() and np.isfinite(ns).all()):
            return None
        lines = [np.stack([n, np.ones_like(n)], -1) for n in ns.T]
        solved = [np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(lines, ys.T, strict=True)]
        scale, shift = np.array(solved).T
        if not np.allclose(ns * scale + shift, ys, rtol=_CLOSE, atol=_CLOSE):
            return None
        values = {w: np.asarray(f(rows.of_weight(size(w))), np.float64) for w, f in weights.items()}

        def same(a: Any, b: Any) -> bool:
            return bool(np.allclose(a, b, rtol=1e-6, atol=1e-7))

        shifts = [None] if same(shift, 0) else [w for w in weights if same(shift, values[w])]
        if not shifts:
            return None
        scales: list[tuple[Var | None, bool]] = [(None, False)] if same(scale, 1) else []
        scales += [(w, more) for w in weights for more in (False, True) if same(scale, values[w] + more)]
        if not scales:
            return None
        fit = _Fit(y, *scales[0], shifts[0])
        return fit if {fit.scale, fit.shift} >= set(weights) else None

    def _holds(self, measure: Measure, fit: _Fit) -> bool:
        """Whether it is the norm for large weights and rows with outliers too: nothing is clipped."""
        rows = Rows(measure.x, measure.axes)
        made = random_known(measure.x, 200)

        def drawn(index: Any) -> Any:
            far = made(index).astype(np.float64)
            for d in measure.axes:
                far = np.where(np.isin(index[d], rows.place[d]), far * 1e3, far)
            return far

        weights = [w for w in (fit.scale, fit.shift) if w is not None]
        known = {w: _scaled(random_known(w, 31 + n), 1e6) for n, w in enumerate(weights)}
        try:
            y = Points(self.view, known | {measure.x: drawn}, wide=True).at(fit.out, rows.place)
        except Unknown:
            return False
        row = rows.whole(drawn)
        n = drawn(tuple(rows.place)) - (row.mean(-1) if measure.kind == "layer" else 0.0)
        n = n / np.sqrt(mean(measure.kind, row) + measure.epsilon)
        values = [np.asarray(known[w](rows.of_weight(size(w))), np.float64) for w in weights]
        if fit.scale is not None:
            n = n * (values[0] + fit.add_one)
        if fit.shift is not None:
            n = n + values[-1]
        return bool(np.allclose(y, n, rtol=1e-6, atol=1e-6))

    def _base(self, p: Var, x: Var, axes: Sequence[int]) -> Var | None:
        """The weight that `p` holds, an array over the dimensions `axes`; before 1 was added to it."""
        sizes = [size(x)[d] for d in axes]

        def last(atoms: Sequence[Atom]) -> Var | None:
            fits = [v for v in atoms if [n for n in size(v) if n != 1] == [n for n in sizes if n != 1]]
            return fits[-1] if fits and isinstance(fits[-1], Var) else None

        ways = chain(self.view, p)
        found, eqn = last(ways), self.view.maker(ways[-1])
        if found is not None and eqn is not None and eqn.primitive.name == "add":
            terms = [v for v in eqn.invars if isinstance(v, Var) and v not in self.known]
            before = last(chain(self.view, terms[0])) if len(terms) == 1 else None
            return before or found
        return found

    # ------------------------------------------------------------ answers

    def _raised(self, measure: Measure, fit: _Fit) -> Raised:
        view, x, out = self.view, measure.x, fit.out
        letters = _letters(size(x), measure.axes)
        ends = {v for v in (x, fit.scale, fit.shift) if v is not None}
        numbers = frozenset(view.ancestors([out], stop=lambda v: v in ends))
        inner = {v for n in numbers for v in view.eqns[n].outvars} - {out} - self.known
        reads = [v for v in inner if any(u not in numbers for u in view.users.get(v, ()))]
        note = "its statistics are used elsewhere too" if reads else ""
        meaning = Norm(
            measure.kind, Tensor(x, letters), Tensor(out, letters), measure.axes, _short(measure.epsilon),
            fit.scale, fit.shift, fit.add_one,
        )  # fmt: skip
        sizes = {c: n for c, n in zip(letters, size(x), strict=True) if c}
        return Raised("norm", view, view.makers[out], numbers, meaning, sizes, note)

    def _near(self, found: Sequence[Measure], after: Sequence[Var]) -> Near | None:
        """What was missing, where it is a norm but for one thing."""
        for measure in found:
            why = self._why(measure, after)
            if why:
                return Near("norm", why, self.view, self.number)
        return None

    def _why(self, measure: Measure, after: Sequence[Var]) -> str:
        n = math.prod(size(measure.x)[d] for d in measure.axes)
        ys = [y for y in after if size(y) == size(measure.x)][:6]

        def some(measure: Measure, **how: Any) -> bool:
            return any(self._of(measure, y, **how) is not None for y in ys)

        if measure.kind == "layer" and math.isclose(measure.factor, n / (n - 1), rel_tol=1e-7):
            return "its variance is over n - 1 elements, not all n of them"
        if measure.exact and some(measure):
            return (
                f"its mean is over axes {measure.axes} of {len(size(measure.x))}, not the last ones, and no "
                "weight goes over them: statistics of a batch or of the whole, not of a row"
            )
        other = {"rms": "layer", "layer": "rms"}[measure.kind]
        if measure.exact and some(measure, kind=other):
            if other == "layer":
                return "what it divides has the mean taken off, what it measures has not"
            return "it divides by the root of the variance, but the mean is not taken off above"
        if measure.epsilon == 0 and some(measure, by=1e15):
            return "its epsilon is not added to the mean of squares, under the root, as a norm has it"
        return ""


def _scaled(known: Any, by: float) -> Any:
    return lambda index: known(index).astype(np.float64) * by


def _letters(sizes: Sequence[int], axes: Sequence[int]) -> tuple[str, ...]:
    """Capitals for what is left alone; "d" the last dimension of a row, "e", "f" those before it."""
    rows = dict(zip(reversed(axes), "defhijk", strict=False))
    others = iter("ABCDEFGHIJK")
    return tuple("" if n == 1 else rows.get(d) or next(others) for d, n in enumerate(sizes))


def _short(epsilon: float) -> float:
    """The number that was written, where the program has it in float32."""
    written = float(f"{epsilon:.5g}")
    return written if math.isclose(written, epsilon, rel_tol=3e-7) else epsilon
