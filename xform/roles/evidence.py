"""What a program shows about its axes: the facts from which `roles` tells batch from length and heads from
mlp.

One pass over the equations that say something (dots, convolutions, gathers, maxima, scans, one-hot
comparisons), with the factors on each side. Two questions are answered by following values backward, when
asked: which input a value is (`source`), and where an index comes from (`origin`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from xform.axes import Axes, Dim, Factor, Scope
from xform.axes.rules import ELEMENTWISE
from xform.ops.resident import STACKED
from xform.trace import JaxprEqn, Literal, Var, shape_of

Factors = frozenset[Factor]
NONE: Factors = frozenset()


@dataclasses.dataclass(frozen=True)
class Dot:
    """A contraction, of whatever primitive. `left` and `right` are free in one operand; `group` counts ragged
    groups.
    """

    scope: Scope
    operands: tuple[Any, Any]
    batch: Factors
    contract: Factors
    left: Factors
    right: Factors
    group: Factors = NONE

    @property
    def sides(self) -> tuple[Factors, Factors]:
        both = self.batch | self.contract
        return both | self.left, both | self.right | self.group

    @property
    def result(self) -> Factors:
        return self.batch | self.left | self.right


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution: the factors it slides over, of the kernel, of those of the kernel that cut patches;
    features; all.
    """

    image: Factors
    kernel: Factors
    patch: Factors
    features: Factors
    sides: tuple[Factors, Factors]


@dataclasses.dataclass(frozen=True)
class Pick:
    """A gather of single indices: along `rows`, with `window` whole, from an operand with all these
    factors.
    """

    scope: Scope
    operand: Any
    indices: Any
    rows: Factors
    window: Factors
    factors: Factors

    @property
    def index_factors(self) -> Factors:
        return factors(self.scope[self.indices])

    @property
    def in_loop(self) -> bool:
        scope: Scope | None = self.scope
        while scope is not None and scope.eqn is not None:
            if scope.eqn.primitive.name in ("scan", "while"):
                return True
            scope = scope.parent
        return False


@dataclasses.dataclass(frozen=True)
class Maximum:
    """A maximum along `reduced`; what is left are `rest`."""

    reduced: Factors
    rest: Factors


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan: its leading factors, and the factors of what it carries and of each thing it scans over."""

    scope: Scope
    lead: Factors
    carry: Factors
    scanned: tuple[Factors, ...]
    operands: tuple[Any, ...]


class Evidence:
    """The facts of one program, in the order of its equations."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.dots: list[Dot] = []
        self.convs: list[Conv] = []
        self.picks: list[Pick] = []
        self.maxima: list[Maximum] = []
        self.scans: list[Scan] = []
        self.chosen: set[Factor] = set()  # a top_k picks along it
        self.largest: set[Factor] = set()  # an argmax does
        self.indexed: list[Pick] = []  # dynamic slices of size 1
        self.compared: list[tuple[Scope, JaxprEqn]] = []  # eq of integers
        self.stacked: set[Factor] = set()  # a pass says that a value goes by layers along it
        self._sources: dict[tuple[int, Var], Var | None] = {}
        for scope in axes.scopes:
            for index, eqn in enumerate(scope.jaxpr.eqns):
                if eqn.params.get("name") == STACKED:
                    self.stacked.update(factors(scope[eqn.outvars[0]][:1]))
                fact = FACTS.get(eqn.primitive.name)
                if fact is not None:
                    fact(self, scope, index, eqn)

    # Following values backward

    def source(self, scope: Scope, var: Any) -> Var | None:
        """The input of the program that a value is, cast, reshaped, transposed, scaled or sliced; else
        None.
        """
        if isinstance(var, Literal):
            return None
        key = (id(scope), var)
        if key not in self._sources:
            self._sources[key] = None  # a loop's own value
            self._sources[key] = self._source(scope, var)
        return self._sources[key]

    def _source(self, scope: Scope, var: Var) -> Var | None:
        while True:
            index = scope.makers.get(var)
            if index is None:
                if scope.parent is None:
                    return var
                outer = outside(scope, var)
                if outer is None:
                    return None
                return self.source(scope.parent, outer)
            eqn = scope.jaxpr.eqns[index]
            inner = inside(scope, index, eqn, var)
            if inner is not None:
                return self.source(*inner)
            name = eqn.primitive.name
            if name in MOVES:
                operand = eqn.invars[min(eqn.outvars.index(var), len(eqn.invars) - 1)]
                if isinstance(operand, Literal):
                    return None
                var = operand
            elif name in ELEMENTWISE:
                shape = shape_of(var)
                tries = (self.source(scope, v) for v in eqn.invars if shape_of(v) == shape)
                return next((s for s in tries if s is not None), None)
            else:
                return None

    def origin(self, scope: Scope, var: Any) -> frozenset[str]:
        """Where integers come from: "data" (an input), "count" (iota, cumsum), "computed", or nothing
        (constants).
        """
        return frozenset(kind for kind, _, _ in self.origins(scope, var))

    def chosen_from(self, scope: Scope, var: Any) -> Factors:
        """The axes into which integers point that a top_k or argmax made."""
        found = NONE
        for _, where, eqn in self.origins(scope, var):
            if eqn is not None and eqn.primitive.name in CHOOSES:
                operand = where[eqn.invars[0]]
                found |= factors(operand[axis] for axis in CHOOSES[eqn.primitive.name](eqn.params))
        return found

    def origins(self, scope: Scope, var: Any) -> Iterator[tuple[str, Scope, JaxprEqn | None]]:
        """The equations, or inputs, that the values of an integer array come from."""
        seen: set[tuple[int, Var]] = set()
        todo: list[tuple[Scope, Any]] = [(scope, var)]
        while todo:
            scope, var = todo.pop()
            if isinstance(var, Literal) or (id(scope), var) in seen:
                continue
            seen.add((id(scope), var))
            index = scope.makers.get(var)
            if index is None:
                outer = None if scope.parent is None else outside(scope, var)
                if scope.parent is not None and outer is not None:
                    todo.append((scope.parent, outer))
                elif scope.parent is None and var in scope.jaxpr.constvars:
                    yield from ((kind, scope, None) for kind in _constant_origin(scope, var))
                else:
                    yield "data", scope, None
                continue
            eqn = scope.jaxpr.eqns[index]
            inner = inside(scope, index, eqn, var)
            name = eqn.primitive.name
            if inner is not None:
                todo.append(inner)
            elif name in ("iota", "cumsum"):
                yield "count", scope, eqn
            elif name in COMPUTES:
                yield "computed", scope, eqn
            else:
                todo.extend((scope, v) for v in eqn.invars[VALUES.get(name, slice(None))])


def outside(scope: Scope, var: Var) -> Any | None:
    """The operand of the equation around a body that comes in as one of its inputs."""
    eqn, jaxpr = scope.eqn, scope.jaxpr
    if eqn is None or var not in jaxpr.invars:
        return None
    k = jaxpr.invars.index(var)
    if eqn.primitive.name == "cond":
        k += 1
    elif eqn.primitive.name == "while":
        test, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        if len(jaxpr.invars) == len(eqn.invars) - consts and jaxpr is eqn.params["cond_jaxpr"]:
            k += consts if k >= test else 0
        else:
            k += test
    return eqn.invars[k]


def inside(scope: Scope, index: int, eqn: JaxprEqn, var: Var) -> tuple[Scope, Any] | None:
    """The result of a body that an equation hands out as var."""
    k = eqn.outvars.index(var)
    for number in (1, 0) if eqn.primitive.name == "while" else (0,):
        inner = scope.children.get((index, number))
        if inner is not None and k < len(inner.jaxpr.outvars):
            return inner, inner.jaxpr.outvars[k]
    return None


def _constant_origin(scope: Scope, var: Var) -> set[str]:
    """A constant that counts up is a count."""
    value = dict(zip(scope.jaxpr.constvars, scope.jaxpr.consts, strict=False)).get(var)
    if isinstance(value, np.ndarray) and value.size > 1 and np.issubdtype(value.dtype, np.integer):
        steps = np.diff(value.reshape(-1, value.shape[-1]), axis=-1)
        return {"count"} if steps.size and (steps == 1).all() else set()
    return {"data"}


_MOVES = """
    transpose reshape squeeze broadcast_in_dim slice dynamic_slice convert_element_type copy device_put
    sharding_constraint reshard stop_gradient optimization_barrier reduce_precision gather rev split stack
    unstack
"""
MOVES = frozenset(_MOVES.split())
"""Primitives whose result i is their operand i, or their first, in another shape; of a stack, a row."""

VALUES: dict[str, slice] = {
    "gather": slice(0, 1),
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "scatter": slice(0, 3, 2),
    "select_n": slice(1, None),
}
"""Operands that the values of a result come from, where the others only say which."""

CHOOSES: dict[str, Callable[[dict[str, Any]], Sequence[int]]] = {
    "top_k": lambda p: (p["axis"],),
    "approx_top_k": lambda p: (p["reduction_dimension"],),
    "argmax": lambda p: p["axes"],
    "argmin": lambda p: p["axes"],
}
"""Primitives that point into an axis, and which."""

COMPARES = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))

COMPUTES = frozenset(
    (*CHOOSES, *COMPARES, "dot_general", "sort", "random_bits", "threefry2x32", "reduce_sum")
)
"""Primitives whose results are no longer their operands' values."""


def union(sets: Iterable[Iterable[Factor]]) -> Factors:
    return frozenset(f for fs in sets for f in fs)


def factors(dims: Iterable[Dim]) -> Factors:
    return frozenset(f for dim in dims for f in dim)


def _picked(dims: tuple[Dim, ...], axes: Iterable[int]) -> Factors:
    return frozenset(f for i in axes for f in dims[i])


def _others(dims: tuple[Dim, ...], axes: Iterable[int]) -> Factors:
    out = frozenset(axes)
    return frozenset(f for i, dim in enumerate(dims) if i not in out for f in dim)


def _dot(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    lhs, rhs = scope[eqn.invars[0]], scope[eqn.invars[1]]
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = _others(lhs, (*lc, *lb)), _others(rhs, (*rc, *rb))
    operands = (eqn.invars[0], eqn.invars[1])
    e.dots.append(Dot(scope, operands, _picked(lhs, lb), _picked(lhs, lc), left, right))


def _ragged_dot(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    lhs, rhs = scope[eqn.invars[0]], scope[eqn.invars[1]]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    group = factors(scope[eqn.invars[2]][-1:])
    left = _others(lhs, (*lc, *lb))
    right = _others(rhs, (*rc, *rb, *numbers.rhs_group_dimensions))
    operands = (eqn.invars[0], eqn.invars[1])
    e.dots.append(Dot(scope, operands, _picked(lhs, lb), _picked(lhs, lc), left, right, group))


def _conv(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    lhs, rhs = scope[eqn.invars[0]], scope[eqn.invars[1]]
    lhs_spec, rhs_spec, _ = eqn.params["dimension_numbers"]
    image, kernel = _picked(lhs, lhs_spec[2:]), _picked(rhs, rhs_spec[2:])
    taken, made = _picked(lhs, lhs_spec[1:2]), _picked(rhs, rhs_spec[:1])
    operands = (eqn.invars[0], eqn.invars[1])
    left = _picked(lhs, lhs_spec[:1]) | (image - kernel)
    e.dots.append(Dot(scope, operands, taken & made, taken - made, left, made - taken))
    pairs = [(lhs[i], rhs[j]) for i, j in zip(lhs_spec[2:], rhs_spec[2:], strict=True)]
    patch = frozenset(f for a, b in pairs if b and len(a) > len(b) and a[-len(b) :] == b for f in b)
    e.convs.append(Conv(image, kernel, patch, taken | made, (factors(lhs), factors(rhs))))


def _gather(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    operand = scope[eqn.invars[0]]
    numbers = eqn.params["dimension_numbers"]
    single = [d for d in numbers.start_index_map if eqn.params["slice_sizes"][d] == 1]
    rows = _picked(operand, single)
    gone = (*single, *numbers.operand_batching_dims)
    pick = Pick(scope, eqn.invars[0], eqn.invars[1], rows, _others(operand, gone), factors(operand))
    e.picks.append(pick)


def _dynamic_slice(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    operand = scope[eqn.invars[0]]
    single = [i for i, n in enumerate(eqn.params["slice_sizes"]) if n == 1 and operand[i]]
    if len(single) == 1:
        rows = _picked(operand, single)
        where = eqn.invars[1 + single[0]]
        e.indexed.append(Pick(scope, eqn.invars[0], where, rows, _others(operand, single), factors(operand)))


def _maximum(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    operand = scope[eqn.invars[0]]
    axes = eqn.params["axes"]
    e.maxima.append(Maximum(_picked(operand, axes), _others(operand, axes)))


def _argmax(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    _maximum(e, scope, index, eqn)
    e.largest |= e.maxima[-1].reduced


def _top_k(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    operand = scope[eqn.invars[0]]
    e.chosen |= factors(operand[axis] for axis in CHOOSES[eqn.primitive.name](eqn.params))


def _eq(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    aval: Any = eqn.invars[0].aval
    if aval.shape and np.issubdtype(aval.dtype, np.integer):
        e.compared.append((scope, eqn))


def _scan(e: Evidence, scope: Scope, index: int, eqn: JaxprEqn) -> None:
    consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
    carried = frozenset(f for v in eqn.invars[consts : consts + carry] for f in factors(scope[v]))
    scanned = [scope[v] for v in eqn.invars[consts + carry :]]
    stacked = [scope[v] for v in eqn.outvars[carry:]]
    lead = frozenset(f for dims in (scanned + stacked)[:1] for f in dims[0])
    operands = tuple(eqn.invars[consts + carry :])
    e.scans.append(Scan(scope, lead, carried, tuple(factors(dims[1:]) for dims in scanned), operands))


Fact = Callable[[Evidence, Scope, int, JaxprEqn], None]

FACTS: dict[str, Fact] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "reduce_max": _maximum,
    "argmax": _argmax,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "eq": _eq,
    "scan": _scan,
}
"""Primitives that say something about roles, and what is noted of each."""
