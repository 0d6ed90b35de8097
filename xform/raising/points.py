"""The values of a program's variables at single points, computed from nothing but what these points take.

    points = Points(view, known={q: f, k: g})       f(index) gives values of q at an index
    points.at(logits, (0, 3, rows, keys))           rows: [r, 1], keys: [1, s] integers: an array [r, s]

A value is asked for at an index, a tuple of integer arrays that broadcast, one a dimension. Each equation
answers for its result by asking for its operands: one that moves numbers asks at another index, an
elementwise one at the same, a reduction and a product at all that they sum over. So a mask of 32768 x 32768
is read in any few rows, and no array of the program is ever made. What depends on something not known raises
`Unknown`.

`known` gives values of any variables: inputs, or results in the midst of a program; they are given before
anything else is looked at. An input of a loop's body that is the same in every turn is followed out of it.

The numbers are those of the program, dtype by dtype; or, `wide`, all floating-point numbers are float64 and
casts between floats do nothing, so that two ways to compute the same agree to 1e-9 whatever the program's
dtypes are. `depends` gives the inputs that a value depends on; `origin` follows a value back to where its
numbers were made; `random_known` makes up an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.higher_order import bodies
from xform.raising.elementwise import cast, elementwise, is_elementwise
from xform.raising.flat import View, flat, place_of
from xform.raising.folds import FOLDS
from xform.raising.indices import ZERO, Array, Index, dtype_of, source
from xform.raising.lookups import LOOKUPS
from xform.trace import Atom, JaxprEqn, Literal, Tracer, Var, shape_of

Known = Callable[[Index], Any]
"""The values of a variable at an index; in the shape that the index broadcasts to, or less."""


class Unknown(Exception):
    """The value depends on something that is not known: `what`."""


class Points:
    """Values of a view's variables at points. known: values that are given, by variable."""

    def __init__(self, view: View, known: Mapping[Var, Known] | None = None, wide: bool = False) -> None:
        self.view = view
        self.known = dict(known or {})
        self.wide = wide
        self._inner: dict[int, tuple[JaxprEqn, View]] = {}
        self._constants: dict[Var, Array] = {}

    def at(self, atom: Atom, index: Sequence[Any]) -> Array:
        """The values at an index, of the shape that the index broadcasts to. Raises `Unknown`."""
        shape = np.broadcast_shapes(*(np.shape(i) for i in index))
        return np.broadcast_to(self.lazy(atom, index), shape)

    def lazy(self, atom: Atom, index: Sequence[Any]) -> Array:
        """As `at`, but of size 1, or without, the leading dimensions along which nothing changes."""
        with np.errstate(all="ignore"):
            return _Asking(self).value(self.view, atom, tuple(np.asarray(i, np.int64) for i in index))

    def all(self, atom: Atom) -> Array:
        """The whole value: for small ones."""
        return self.at(atom, np.ix_(*map(np.arange, shape_of(atom))))

    def dtype(self, atom: Atom) -> Any:
        """The dtype in which an atom's values are given. Raises `Unknown` for what is no array of numbers."""
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            raise Unknown(f"a value of type {atom.aval}")
        if self.wide and jax.numpy.issubdtype(dtype, np.floating):
            return np.dtype(np.float64)
        if self.wide and jax.numpy.issubdtype(dtype, np.complexfloating):
            return np.dtype(np.complex128)
        return np.dtype(dtype)

    def _inside(self, view: View, eqn: JaxprEqn) -> View:
        """The body of an equation that only calls it."""
        if id(eqn) not in self._inner:
            number = next(n for n, e in enumerate(view.eqns) if e is eqn)
            place = (*view.place, (view.chains[number], 0))
            inner = flat(bodies(eqn)[0], place=place, names=view.names[number], outer=view, holder=eqn)
            self._inner[id(eqn)] = eqn, inner
        return self._inner[id(eqn)][1]

    def _constant(self, var: Var, value: Any) -> Array:
        if var not in self._constants:
            if isinstance(value, Tracer) or not getattr(value, "is_fully_addressable", True):
                raise Unknown("a constant that is not at hand")
            self.dtype(var)
            self._constants[var] = np.asarray(value)
        return self._constants[var]


class _Asking:
    """One question: what was evaluated on the way is kept until it is answered."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.values: dict[tuple[Any, ...], Array] = {}
        self.indices: dict[tuple[Any, ...], Array] = {}

    def value(self, view: View, atom: Atom, index: Index) -> Array:
        if isinstance(atom, Literal):
            return cast(np.asarray(atom.val, dtype_of(atom)), self.points.dtype(atom))
        index = tuple(ZERO if n == 1 else self._same(i) for n, i in zip(shape_of(atom), index, strict=True))
        key = (atom, *map(id, index))
        if key not in self.values:
            self.values[key] = cast(np.asarray(self._value(view, atom, index)), self.points.dtype(atom))
        return self.values[key]

    def _same(self, i: Array) -> Array:
        """One object for equal arrays, so that what was asked before is seen to be the same."""
        return self.indices.setdefault((i.shape, i.dtype.str, i.tobytes()), i)

    def _value(self, view: View, var: Var, index: Index) -> Array:
        if var in self.points.known:
            return np.asarray(self.points.known[var](index))
        if var in view.constants:
            return np.asarray(self.points._constant(var, view.constants[var])[index])
        eqn = view.maker(var)
        if eqn is None:
            if var in view.inputs and view.outer is not None:
                return self.value(view.outer, view.inputs[var], index)
            if view.outer is not None and var not in view.jaxpr.invars:
                return self.value(view.outer, var, index)  # of a view around this one
            raise Unknown("an input of the program" if view.outer is None else "an input of a body")
        return self._made(view, eqn, eqn.outvars.index(var), index)

    def _made(self, view: View, eqn: JaxprEqn, k: int, index: Index) -> Array:
        name = eqn.primitive.name
        moved = source(eqn, k, index)
        if moved is not None:
            value = self.value(view, eqn.invars[moved[0]], moved[1])
            if name == "reduce_precision" and not self.points.wide:
                return elementwise(eqn, [value])
            return value
        if name == "select_n":
            return self._selected(view, eqn, index)
        if is_elementwise(eqn):
            return elementwise(eqn, [self._operand(view, v, index) for v in eqn.invars])

        def ask(number: int, at: Index) -> Array:
            return self.value(view, eqn.invars[number], at)

        rule = LOOKUPS.get(name) or FOLDS.get(name)
        if rule is not None:
            found = rule(eqn, k, index, ask)
            if found is not None:
                return found
        if name in _CALLS and len(bodies(eqn)) == 1:
            inner = self.points._inside(view, eqn)
            return self.value(inner, inner.jaxpr.outvars[k], index)
        raise Unknown(f"a result of {name}")

    def _operand(self, view: View, atom: Atom, index: Index) -> Array:
        return self.value(view, atom, index if shape_of(atom) else ())

    def _selected(self, view: View, eqn: JaxprEqn, index: Index) -> Array:
        """Only the case that is taken at these points is asked for, where it is one alone."""
        which = self._operand(view, eqn.invars[0], index)
        if which.size and (which == which.flat[0]).all():
            taken = self._operand(view, eqn.invars[1 + int(which.flat[0])], index)
            return np.broadcast_to(taken, np.broadcast_shapes(taken.shape, which.shape))
        return elementwise(eqn, [which, *(self._operand(view, v, index) for v in eqn.invars[1:])])


_CALLS = ("checkpoint", "remat", "remat2", "custom_vjp_call", "custom_jvp_call", "jit", "closed_call")
"""Equations whose results are those of a body, turn for turn the operands its inputs."""


def origin(view: View, atom: Atom, index: Sequence[Any]) -> tuple[Atom, Index]:
    """The atom of this view that holds the numbers of another at an index, and where in it: back through
    whatever only moves or casts them.
    """
    at = tuple(np.asarray(i, np.int64) for i in index)
    while (eqn := view.maker(atom)) is not None:
        moved = source(eqn, place_of(eqn, atom), at)
        if moved is None:
            break
        atom, at = eqn.invars[moved[0]], moved[1]
    return atom, at


def depends(view: View, atom: Atom, stop: Iterable[Var] = ()) -> frozenset[Var]:
    """The inputs that a value depends on: of the program, and of bodies where a turn gives them. Constants
    are none, unless not at hand. Variables of `stop` are taken for inputs.
    """
    found: set[Var] = set()
    seen, stops = set(), frozenset(stop)
    todo: list[tuple[View, Atom]] = [(view, atom)]
    while todo:
        here, v = todo.pop()
        if isinstance(v, Literal) or v in seen:
            continue
        seen.add(v)
        eqn = here.maker(v)
        if v in stops:
            found.add(v)
        elif eqn is not None:
            todo += [(here, w) for w in eqn.invars]
        elif v in here.constants:
            if isinstance(here.constants[v], Tracer):
                found.add(v)
        elif v in here.inputs and here.outer is not None:
            todo.append((here.outer, here.inputs[v]))
        else:
            found.add(v)
    return frozenset(found)


def random_known(var: Atom, seed: int, high: int = 8) -> Known:
    """Made-up values of a variable, the same at the same index, others for another seed: floats of mean 0 and
    variance 1 in the variable's dtype, integers from 0 to `high`, exclusive, booleans of both kinds.
    """
    sizes, dtype = shape_of(var), dtype_of(var)

    def values(index: Index) -> Array:
        linear = np.zeros((), np.uint64)
        for i, n in zip(index, sizes, strict=True):
            linear = linear * np.uint64(n) + np.asarray(i).astype(np.uint64)
        bits = _mixed(linear + _mixed(np.asarray(seed + 1, np.uint64)))
        if dtype == np.bool_:
            return np.asarray(bits >> np.uint64(63) == 1)
        if np.issubdtype(dtype, np.integer):
            return np.asarray((bits >> np.uint64(33)) % np.uint64(high)).astype(dtype)
        unit = (bits >> np.uint64(11)).astype(np.float64) / 2.0**53
        return np.asarray((unit - 0.5) * 12.0**0.5).astype(dtype)

    return values


def random_inputs(variables: Iterable[Var], seed: int = 0, high: int = 8) -> dict[Var, Known]:
    """Made-up values of several variables, all different: for `Points(known=)`."""
    return {v: random_known(v, seed * 1009 + n, high) for n, v in enumerate(variables)}


def _mixed(x: Array) -> Array:
    """Steele, Lea and Flood's splitmix64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def of_turn(points: Points, atom: Atom, turn: int) -> Known:
    """The values of row `turn` of an atom: what a loop's body is given in that turn."""
    return lambda index: points.at(atom, (np.asarray(turn), *index))


def in_turn(points: Points, atom: Atom) -> Known:
    """The values of an atom of a body as the rows that the loop stacks: the same in each."""
    return lambda index: points.at(atom, index[1:])
