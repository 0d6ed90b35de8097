"""What a value's dimensions are and do: letters followed back through movement, and which of them matter.

m = broadcast_in_dim[broadcast_dimensions=(0, 3)] p     m [b, n, t, s] is p [b, s]: it changes with b and s
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.raising.elementwise import is_elementwise
from xform.raising.flat import View, dtype_of
from xform.raising.folds import FOLDS
from xform.raising.indices import SAME, Array, groups
from xform.raising.points import Points, Unknown
from xform.trace import Atom, JaxprEqn, Literal, Tracer, Var, has_effects, shape_of

Dims = tuple[str, ...]
Sizes = Mapping[str, int]

_SMALL = 1 << 20


def pulled(eqn: JaxprEqn, k: int, dims: Dims, sizes: Sizes) -> tuple[int, Dims] | None:
    """Result `k` with these letters: which operand has the same numbers, all of them, and its letters."""
    name = eqn.primitive.name
    if name in SAME:
        return k, dims
    if not eqn.invars:
        return None
    old = shape_of(eqn.invars[0])
    match name:
        case "broadcast_in_dim":
            places = eqn.params["broadcast_dimensions"]
            return 0, tuple("" if n == 1 else dims[d] for n, d in zip(old, places, strict=True))
        case "squeeze":
            rest, gone = list(dims), eqn.params["dimensions"]
            return 0, tuple("" if d in gone else rest.pop(0) for d in range(len(old)))
        case "expand_dims":
            return 0, tuple(dim for d, dim in enumerate(dims) if d not in eqn.params["dimensions"])
        case "transpose":
            at = dict(zip(eqn.params["permutation"], dims, strict=True))
            return 0, tuple(at[d] for d in range(len(dims)))
        case "slice" if old == shape_of(eqn.outvars[0]):
            return 0, dims
        case "reshape" if eqn.params["dimensions"] is None and 0 not in old:
            return _reshaped(old, shape_of(eqn.outvars[0]), dims, sizes)
    return None


def _reshaped(old: Sequence[int], new: Sequence[int], dims: Dims, sizes: Sizes) -> tuple[int, Dims] | None:
    made = [""] * len(old)
    for left, right in groups(old, new):
        letters = "".join(dims[d] for d in right)
        if any(math.prod(sizes[c] for c in dims[d]) != new[d] for d in right):
            return None
        for d in left:
            while math.prod(sizes[c] for c in made[d]) < old[d]:
                made[d], letters = made[d] + letters[0], letters[1:]
            if math.prod(sizes[c] for c in made[d]) != old[d]:
                return None
        made[left[-1]] += letters  # letters of size 1
    return 0, tuple(made)


def place(dims: Dims, at: Mapping[str, Any], sizes: Sizes) -> tuple[Array, ...]:
    """The index of a value with these letters where the letters are at `at`; 0 where nothing is said."""
    index = []
    for dim in dims:
        linear: Array = np.zeros((), np.int64)
        for c in dim:
            linear = linear * sizes[c] + np.asarray(at.get(c, 0), np.int64)
        index.append(linear)
    return tuple(index)


class Facts:
    """What is known of the values of a view and of those around it, each found once."""

    def __init__(self) -> None:
        self._static: dict[int, tuple[View, frozenset[Var]]] = {}
        self._varies: dict[Var, frozenset[int]] = {}
        self._numbers: dict[Var, float | None] = {}
        self._prints: dict[Var, int] = {}
        self._points: dict[int, Points] = {}

    def points(self, view: View) -> Points:
        """Values of a view of which nothing is known but what is in the program."""
        if id(view) not in self._points:
            self._points[id(view)] = Points(view)
        return self._points[id(view)]

    def static(self, view: View, atom: Atom) -> bool:
        """Whether a value follows from constants, literals and iota alone."""
        if isinstance(atom, Literal):
            return True
        if id(view) not in self._static:
            self._static[id(view)] = view, self._all_static(view)
        return atom in self._static[id(view)][1]

    def _all_static(self, view: View) -> frozenset[Var]:
        found = {v for v, value in view.constants.items() if not isinstance(value, Tracer)}
        if view.outer is not None:
            found |= {v for v, w in view.inputs.items() if self.static(view.outer, w)}
        for eqn in view.eqns:
            if not has_effects(eqn) and all(isinstance(v, Literal) or v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return frozenset(found)

    def constant(self, view: View, atom: Atom) -> float | None:
        """The number that a value is everywhere, in itself; None where there is none."""
        if isinstance(atom, Literal):
            return _number(atom.val)
        if atom not in self._numbers:
            self._numbers[atom] = self._constant(view, atom)
        return self._numbers[atom]

    def _constant(self, view: View, atom: Var) -> float | None:
        if not self.static(view, atom) or self.varies(view, atom) or 0 in shape_of(atom):
            return None
        try:
            return _number(self.points(view).at(atom, [0] * len(shape_of(atom))))
        except Unknown:
            return None

    def varies(self, view: View, atom: Atom) -> frozenset[int]:
        """The dimensions along which a value may change."""
        if isinstance(atom, Literal):
            return frozenset()
        todo = [(view, atom)]
        while todo:  # a stack of its own: a program may be deep
            here, v = todo[-1]
            below = [] if v in self._varies else self._below(here, v)
            missing = [(h, w) for h, w in below if isinstance(w, Var) and w not in self._varies]
            if missing:
                todo += missing
                continue
            todo.pop()
            if v not in self._varies:
                sizes = shape_of(v)
                self._varies[v] = frozenset(d for d in self._along(here, v) if sizes[d] > 1)
        return self._varies[atom]

    def _below(self, view: View, v: Var) -> list[tuple[View, Atom]]:
        eqn = view.maker(v)
        if eqn is not None:
            return [(view, w) for w in eqn.invars]
        return [(view.outer, view.inputs[v])] if v in view.inputs and view.outer is not None else []

    def _along(self, view: View, v: Var) -> frozenset[int]:
        eqn, everywhere = view.maker(v), frozenset(range(len(shape_of(v))))
        if eqn is None:
            if v in view.constants:
                return _changes(view.constants[v]) if math.prod(shape_of(v)) <= _SMALL else everywhere
            if v not in view.inputs or view.outer is None:
                return everywhere
            outer = view.inputs[v]
            return frozenset() if isinstance(outer, Literal) else self._varies[outer]
        ins = [frozenset() if isinstance(w, Literal) else self._varies[w] for w in eqn.invars]
        return _after(eqn, eqn.outvars.index(v), ins, everywhere)

    def binary(self, view: View, atom: Atom) -> bool:
        """Whether a value is 0 or 1 everywhere, by how it was made."""
        if dtype_of(atom) == np.bool_:
            return True
        c = self.constant(view, atom)
        if c is not None:
            return c in (0, 1)
        if isinstance(atom, Literal):
            return False
        eqn = view.maker(atom)
        if eqn is None:
            return (
                atom in view.inputs and view.outer is not None and self.binary(view.outer, view.inputs[atom])
            )
        name, ins = eqn.primitive.name, eqn.invars
        if name in ("mul", "min", "max", "and", "or"):
            return all(self.binary(view, v) for v in ins)
        if name == "sub":
            return self.constant(view, ins[0]) == 1 and self.binary(view, ins[1])
        if name == "select_n":
            return all(self.binary(view, v) for v in ins[1:])
        if name in SAME:
            return self.binary(view, ins[eqn.outvars.index(atom)])
        return name in _MOVED and self.binary(view, ins[0])

    def fingerprint(self, view: View, atom: Atom) -> int:
        """Equal for values that are computed alike from the same; for static ones."""
        if isinstance(atom, Literal):
            return hash((str(atom.aval), str(atom.val)))
        if atom not in self._prints:
            eqn = view.maker(atom)
            if eqn is not None:
                made = tuple(self.fingerprint(view, v) for v in eqn.invars)
                params = repr(sorted((k, str(v)) for k, v in eqn.params.items()))
                self._prints[atom] = hash((eqn.primitive.name, params, made, eqn.outvars.index(atom)))
            elif atom in view.inputs and view.outer is not None:
                self._prints[atom] = self.fingerprint(view.outer, view.inputs[atom])
            elif isinstance(value := view.constants.get(atom), np.ndarray | jax.Array):
                self._prints[atom] = hash((str(atom.aval), np.asarray(value).tobytes()))
            else:
                self._prints[atom] = hash(atom)
        return self._prints[atom]


_WHOLE = "broadcast_in_dim expand_dims reshape squeeze transpose"
_PARTS = "dynamic_slice rev slice split tile unstack"
_MOVED = frozenset(f"{_WHOLE} {_PARTS}".split())


def _number(value: Any) -> float | None:
    x = np.asarray(value)
    return None if x.size != 1 or x.dtype.kind == "c" else float(x.reshape(()))


def _changes(value: Any) -> frozenset[int]:
    if isinstance(value, Tracer) or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        return frozenset(range(len(np.shape(value))))
    x = np.asarray(value)
    if x.size == 0:
        return frozenset()
    return frozenset(d for d in range(x.ndim) if not (x == x.take([0], axis=d)).all())


def _after(
    eqn: JaxprEqn, k: int, ins: Sequence[frozenset[int]], everywhere: frozenset[int]
) -> frozenset[int]:
    """The dimensions along which a result changes, where the operands do along `ins`."""
    name, params = eqn.primitive.name, eqn.params
    if name in SAME:
        return ins[k]
    if is_elementwise(eqn):
        return frozenset[int]().union(*ins)
    rank = len(everywhere)
    match name:
        case "broadcast_in_dim":
            return frozenset(params["broadcast_dimensions"][d] for d in ins[0])
        case "squeeze":
            gone = params["dimensions"]
            return frozenset(d - sum(g < d for g in gone) for d in ins[0])
        case "expand_dims":
            kept = [d for d in range(rank) if d not in params["dimensions"]]
            return frozenset(kept[d] for d in ins[0])
        case "transpose":
            return frozenset(d for d, of in enumerate(params["permutation"]) if of in ins[0])
        case "reshape" if params["dimensions"] is None and 0 not in shape_of(eqn.invars[0]):
            pairs = groups(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))
            return frozenset(d for left, right in pairs if ins[0].intersection(left) for d in right)
        case "slice" | "rev" | "split" | "tile" | "dynamic_slice":
            return ins[0]
        case "unstack":
            kept = [d for d in range(rank + 1) if d != params["axis"]]
            return frozenset(kept.index(d) for d in ins[0] if d in kept)
        case "stack":
            kept = [d for d in range(rank) if d != params["axis"]]
            return frozenset(kept[d] for each in ins for d in each) | {params["axis"]}
        case "iota":
            return frozenset((params["dimension"],))
        case "concatenate":
            return frozenset[int]().union(*ins) | {params["dimension"]}
        case "pad":
            padded = {d for d, by in enumerate(params["padding_config"]) if any(by)}
            return ins[0] | padded
        case "cumsum" | "cumprod" | "cummax" | "cummin":
            return ins[0] | {params["axis"]}
        case "gather":
            numbers = params["dimension_numbers"]
            batch = [d for d in range(rank) if d not in numbers.offset_dims]
            return frozenset(numbers.offset_dims) | {b for d, b in enumerate(batch) if d in ins[1]}
        case "dot_general":
            (lc, rc), (lb, rb) = params["dimension_numbers"]
            free = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in (*lc, *lb)]
            other = [d for d in range(len(shape_of(eqn.invars[1]))) if d not in (*rc, *rb)]
            found = {i for i, (a, b) in enumerate(zip(lb, rb, strict=True)) if a in ins[0] or b in ins[1]}
            found |= {len(lb) + i for i, d in enumerate(free) if d in ins[0]}
            return frozenset(found | {len(lb) + len(free) + i for i, d in enumerate(other) if d in ins[1]})
    if name in FOLDS and "axes" in params:
        kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in params["axes"]]
        return frozenset(kept.index(d) for d in ins[0] if d in kept)
    return everywhere
