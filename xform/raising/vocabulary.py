"""Logits over a vocabulary: the product that makes them, what is done to them, and what their dimensions are.

    z = 30 * tanh((x @ w) / 30) + bias      ...      exp(z - max(z))

From the exponential back to the one product; from there, which element of the product each element under the
exponential is, by following indices; and what is done to each on the way, by made-up values: the cap, the
scale and the bias, whatever the softmax takes off from all of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from xform.higher_order import bodies
from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View, flat, size
from xform.raising.following import (
    REDUCTIONS,
    chain,
    cone,
    is_elementary,
    kind,
    leaves,
    read,
    same,
    width,
)  # fmt: skip
from xform.raising.indices import Array, Index, source
from xform.raising.points import Points, Unknown, depends
from xform.raising.tokens import grouped, named
from xform.trace import Atom, JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class Logits:
    """What an exponential is taken of, as cap(scale * product) + bias.

    products: the result of x . w, and others that are computed alike; exponent: the operand of the
    exponential, up to what is the same for a whole row; axis, at: the vocabulary's dimension in each; valid:
    how many of the vocabulary, the first ones, are not masked away. tokens: the exponent's other dimensions;
    letters: what each is; part: see meaning.CrossEntropy.
    """

    view: View
    products: tuple[Var, ...]
    exponent: Var
    axis: int
    at: int
    x: Atom
    w: Atom
    x_dims: tuple[str, ...]
    w_dims: tuple[str, ...]
    tokens: tuple[int, ...]
    letters: tuple[str, ...]
    sizes: dict[str, int]
    part: tuple[tuple[int, int], ...] | None
    inside: frozenset[Var]
    scale: float = 1.0
    cap: float | None = None
    bias: Var | None = None
    valid: int = 0

    @property
    def product(self) -> Var:
        return self.products[0]

    @property
    def vocab(self) -> int:
        return size(self.exponent)[self.axis]

    @property
    def rows(self) -> int:
        return math.prod(self.tokens)

    def index(self, rows: Array, v: Any) -> Index:
        """The index in the exponent of tokens, counted through, at places `v` of the vocabulary."""
        at = list(np.unravel_index(rows, self.tokens)) if self.tokens else []
        at.insert(self.axis, np.asarray(v))
        return tuple(np.asarray(i) for i in at)

    def values(self, known: Callable[[Index], Any], rows: Array, bias: Any) -> Array:
        """All logits [rows, vocab] of some tokens, where `known` gives the product's values."""
        ours = self.index(rows[:, None], np.arange(self.vocab)[None])
        index = place(self.view, self.exponent, ours, self.product, self.inside)
        assert index is not None
        z = self.scale * np.asarray(known(index), np.float64)
        z = z if self.cap is None else self.cap * np.tanh(z / self.cap)
        z = z + (0.0 if bias is None else bias)
        z = np.where(np.arange(self.vocab) < self.valid, z, -1e30)
        return np.broadcast_to(z, (len(rows), self.vocab))

    def dims(self, shape: Sequence[int]) -> tuple[str, ...] | None:
        """What the dimensions of a value of all tokens are, one letter or several."""
        return grouped("".join(self.letters), self.sizes, shape)


class Other(Exception):
    """It is near to what is looked for, but for this."""


def logits(view: View, number: int, known: Collection[Var]) -> Logits | None:
    """The logits that the exponential, equation `number`, is taken of; None where there are none, or no
    logarithm follows. Raises `Other`.
    """
    exponential = view.eqns[number]
    exponent = exponential.invars[0]
    if not isinstance(exponent, Var) or exponent in known:
        return None
    axis = _summed(view, exponential)
    if axis is None:
        return None
    products = [view.eqns[n].outvars[0] for n in _products(view, exponent, known)]
    if not products:
        return None
    alike = [e.outvars[0] for e in view.eqns if e.primitive.name == "dot_general"]
    alike = [v for v in alike if v is not products[0] and same(view, products[0], v)]
    inside = frozenset().union(*(cone(view, v) for v in (products[0], *alike)))
    try:
        if any(v is not products[0] and v not in alike for v in products):
            raise Other("its logits are made of several products")
        found = _laid_out(view, (products[0], *alike), exponent, axis, inside)
        return None if found is None else _transformed(found, known)
    except Other:
        # Without a label that is looked up it may be attention, its weights computed from their logarithm.
        if any(eqn.primitive.name == "gather" and set(read(eqn)) & inside for eqn in view.eqns):
            raise
        return None


def place(view: View, atom: Atom, index: Index, target: Var, inside: Collection[Var]) -> Index | None:
    """Where in `target` the element is of which another, element by element, was made; None where it is of
    several.
    """
    if atom is target:
        return index
    eqn = view.maker(atom)
    if eqn is None or not isinstance(atom, Var) or atom not in inside:
        return None
    moved = source(eqn, eqn.outvars.index(atom), index)
    if moved is not None:
        return place(view, eqn.invars[moved[0]], moved[1], target, inside)
    if is_elementwise(eqn):
        for v in read(eqn):
            if v in inside and size(v) == size(atom):
                found = place(view, v, index, target, inside)
                if found is not None:
                    return found
    return None


def _summed(view: View, exponential: JaxprEqn) -> int | None:
    """The dimension that exponentials are summed over, where a logarithm follows."""
    e = exponential.outvars[0]
    todo, seen = [e], {e}
    while todo:
        v = todo.pop(0)
        for number in view.users.get(v, ()):
            if number < 0:
                continue
            eqn = view.eqns[number]
            out = eqn.outvars[0]
            if eqn.primitive.name == "reduce_sum" and size(v) == size(e):
                wide = [d for d in eqn.params["axes"] if size(v)[d] > 1]
                if len(wide) == 1 and _has_log(view, out):
                    return int(wide[0])
            elif is_elementwise(eqn) and size(out) == size(e) and out not in seen and len(seen) < 6:
                seen.add(out)
                todo.append(out)
    return None


def _has_log(view: View, v: Var) -> bool:
    todo, seen = [v], {v}
    while todo and len(seen) < 40:
        for number in view.users.get(todo.pop(0), ()):
            if number < 0:
                continue
            eqn = view.eqns[number]
            if eqn.primitive.name in ("log", "log1p", "log2"):
                return True
            if is_elementary(eqn) or eqn.primitive.name in REDUCTIONS or eqn.primitive.name in _PICKS:
                new = [w for w in eqn.outvars if w not in seen]
                seen.update(new)
                todo += new
    return False


_PICKS = ("gather", "dynamic_slice", "concatenate")


def _products(view: View, exponent: Var, known: Collection[Var]) -> list[int]:
    """The products that the exponent follows from, element by element and by reductions."""
    found: set[int] = set()
    todo, seen = [exponent], {exponent}
    while todo and len(seen) < 80:
        number = view.makers.get(todo.pop())
        if number is None:
            continue
        eqn = view.eqns[number]
        if eqn.primitive.name == "dot_general":
            found.add(number)
        elif is_elementary(eqn) or eqn.primitive.name in REDUCTIONS:
            new = [v for v in read(eqn) if v not in seen and v not in known]
            seen.update(new)
            todo += new
    return sorted(found)


def _laid_out(
    view: View, products: tuple[Var, ...], exponent: Var, axis: int, inside: frozenset[Var]
) -> Logits | None:
    """Which operand is which, and what each dimension is."""
    product, vocab = products[0], size(exponent)[axis]
    eqn = view.maker(product)
    assert eqn is not None
    tokens = tuple(n for d, n in enumerate(size(exponent)) if d != axis)
    first: list[Any] = [0] * len(size(exponent))
    first[axis] = np.arange(vocab)
    row = place(view, exponent, tuple(map(np.asarray, first)), product, inside)
    if row is None:
        return None
    wide = [d for d, at in enumerate(row) if at.size > 1]
    if len(wide) != 1:
        return None
    at = wide[0]
    contracted, batch = eqn.params["dimension_numbers"]
    operands = list(zip(eqn.invars, contracted, batch, strict=True))
    free = [[d for d in range(len(size(v))) if d not in (*c, *b)] for v, c, b in operands]
    side = int(at >= len(batch[0]) + len(free[0]))
    if math.prod(size(eqn.invars[side])[d] for d in free[side]) != size(product)[at]:
        return None  # it is of the tokens' own dimensions
    if size(product)[at] != vocab or not (row[at] == np.arange(vocab)).all():
        raise Other("its log-sum-exp is over some of the vocabulary alone")
    if any(size(product)[d] > 1 for d in range(len(batch[0]))):
        raise Other("its table of logits is another for each row of the batch")

    at_tokens = [np.arange(n) for n in tokens]
    at_tokens.insert(axis, np.zeros(1, np.int64))
    grid = place(view, exponent, tuple(np.ix_(*at_tokens)) if at_tokens else (), product, inside)
    assert grid is not None
    names = named(tokens, axis, [g for d, g in enumerate(grid) if d != at])
    if names is None:
        raise Other("its tokens lie in another order than those of the product")
    letters, rows, sizes, starts = names
    spans = [(s, s + math.prod(sizes[c] for c in dim)) for s, dim in zip(starts, rows, strict=True)]
    left = [n for d, n in enumerate(size(product)) if d != at]
    part = None if all(span == (0, n) for span, n in zip(spans, left, strict=True)) else tuple(spans)

    dims = [dict(zip(c, "den", strict=False)) for c in contracted]
    sizes |= {c: size(eqn.invars[0])[d] for d, c in dims[0].items()} | {"v": vocab}
    dims[side] |= {d: "v" for d in free[side] if size(eqn.invars[side])[d] == vocab}
    dims[1 - side] |= dict(zip(free[1 - side], rows[len(batch[0]) :], strict=True))
    x_dims, w_dims = (
        tuple(dims[k].get(d, "") for d in range(len(size(eqn.invars[k])))) for k in (1 - side, side)
    )
    return Logits(
        view, products, exponent, axis, at, eqn.invars[1 - side], eqn.invars[side], x_dims, w_dims,
        tokens, letters, sizes, part, inside,
    )  # fmt: skip


# ---------------------------------------------------------------- what is done to them


def _transformed(found: Logits, known: Collection[Var]) -> Logits | None:
    """With the scale, the cap and the bias that are between the product and the exponential."""
    view = found.view
    others = leaves(view, found.exponent, found.products, found.inside, known)
    biases = [[v for v in chain(view, p) if [n for n in size(v) if n > 1] == [found.vocab]] for p in others]
    if not all(biases):
        return None
    if len(biases) > 1:
        raise Other("several terms are added to its logits")
    last = biases[0][-1] if biases else None
    bias = last if isinstance(last, Var) else None
    given: dict[Var, Any] = {} if bias is None else {bias: lambda index: np.zeros(())}
    one = _one(found, given)
    try:
        scale, most = one(1e-6) / 1e-6, one(1e12)
        cap = None if np.isclose(most, scale * 1e12, rtol=1e-6) else most
        for z in (1.0, -3.0, 20.0, -500.0):
            expected = scale * z if cap is None else cap * np.tanh(scale * z / cap)
            if not np.isclose(one(z), expected, rtol=1e-6, atol=1e-9):
                return None
    except Unknown:
        return None
    if not np.isfinite(scale) or scale == 0 or (cap is not None and cap <= 0):
        return None
    valid = _valid(found, given)
    return dataclasses.replace(
        found, scale=_short(scale), cap=None if cap is None else _short(cap), bias=bias, valid=valid
    )


def _valid(found: Logits, given: dict[Var, Any]) -> int:
    """How many of the vocabulary, the first ones, are left where some are masked by their number."""
    known = given | dict.fromkeys(found.products, lambda at: np.zeros(()))
    index = found.index(np.zeros(1, np.int64), np.arange(found.vocab))
    z = Points(found.view, known, wide=True).at(found.exponent, index)
    masked = z - z[0] < -1e3
    valid = int(np.argmax(masked)) if masked.any() else found.vocab
    return valid if masked[valid:].all() else found.vocab


def _one(found: Logits, given: dict[Var, Any]) -> Callable[[float], float]:
    """How far the exponent of one place of the vocabulary is above that of another, by what the product has
    there; it is zero elsewhere.
    """
    index = found.index(np.zeros(2, np.int64), np.array([found.vocab // 2, 0]))

    def one(z: float) -> float:
        def product(at: Index) -> Any:
            return np.where(at[found.at] == found.vocab // 2, z, 0.0)

        known = given | dict.fromkeys(found.products, product)
        above, below = Points(found.view, known, wide=True).at(found.exponent, index)
        return float(above - below)

    return one


def _short(x: float) -> float:
    """The number that was written, where the program has it in float32."""
    written = float(f"{x:.5g}")
    return written if math.isclose(written, x, rel_tol=3e-7) else x


def has_own_rule(view: View, number: int, known: Collection[Var]) -> bool:
    """Whether an equation is a loss of logits with a derivative of its own."""
    eqn = view.eqns[number]
    names = {e.primitive.name for body in bodies(eqn) for e in flat(body).eqns}
    if eqn.primitive.name != "custom_vjp_call" or not {"exp", "log", "reduce_sum"} <= names:
        return False
    wide = max(read(eqn), key=lambda v: math.prod(size(v)), default=None)
    rows = [v for v in eqn.outvars if wide is not None and size(v) == size(wide)[:-1]]
    return wide is not None and bool(rows) and bool(_products(view, wide, known))


def is_table(found: Logits, labels: Var | None) -> bool:
    """Whether the second operand can be a weight: no integers that say something of the data, indices of rows
    or tokens, are needed to compute it, nor what the labels are made of.
    """
    needs = depends(found.view, found.w)
    data = depends(found.view, labels) if labels is not None else frozenset()
    return not any(v in data or _is_data(v) for v in needs)


def _is_data(v: Var) -> bool:
    return kind(v) in ("i", "u") and width(v) > 1  # bytes are weights, quantised
