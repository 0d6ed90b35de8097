"""Which dimensions of which values have one order: each row is treated alone, or rows are added up.

    t = mul g 0.1      (g, 0) and (t, 0) are one node
    n = sub w t        and so are (w, 0) and (n, 0)
    c = cumsum t       takes rows together: t in the model's own order, and c is so too

A node is a dimension of a value at one call site; layers may be the outermost part of one. What an equation
does to its dimensions is read from `xform.spmd.forms`; bodies are entered. An equation that wants a dimension
in the model's own order has None there, and so have constants, which anything may want in another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from xform.higher_order import bodies, carries, equations, operands, scan_parts
from xform.ops.operation import grouped_of, operation_of
from xform.ops.rows import Reorder, reorder_of
from xform.rewrite import Path
from xform.spmd.forms import Draft, Form, each_alone, form_of
from xform.trace import Atom, Jaxpr, JaxprEqn, Var, shape_of, source_line

Place = tuple[Path, int]
"""An equation: the body in which it stands, and its number there."""
Dims = tuple[int | None, ...]
"""For each dimension its node; None: in the model's own order, or of a size that no order has."""

CALLS = ("jit", "closed_call", "core_call", "remat2", "custom_jvp_call", "custom_vjp_call")
ENTERED = (*CALLS, "cond", "scan", "while")
"""The primitives whose bodies are read."""


@dataclasses.dataclass(frozen=True)
class Use:
    """An equation, what dimensions of its operands are to have, and what those of its results have.

    turns: how often it is done. own: the node of that side of a reordering which has the model's own order;
    the other side's is None.
    """

    eqn: JaxprEqn
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    turns: int
    own: int | None = None


class Ties:
    """The nodes of a program. uses: equations that have some. leads: for a node those that it is made of, a
    row of a row. fixed: nodes in the model's own order, and why. sums: equations that add up rows of floats,
    with their nodes.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        found = [op for eqn in equations(jaxpr) if (op := reorder_of(eqn)) is not None]
        self.lengths = {len(op.order) for op in found}
        self.uses: dict[Place, Use] = {}
        self.leads: dict[int, list[int]] = {}
        self.fixed: dict[int, str] = {}
        self.sums: list[tuple[Place, int]] = []
        self._parent: list[int] = []
        self._nodes: dict[tuple[Path, Var, int], int] = {}
        self._consts: dict[Path, frozenset[Var]] = {}
        self._body((), jaxpr, 1)

    # ------------------------------------------------------------ nodes

    def has(self, size: int) -> bool:
        """Whether a dimension of this size may have an order: it is of as many rows, or of as many blocks."""
        if len(self.lengths) > 1:  # which blocks would depend on whose order it is
            return size in self.lengths
        return size > 0 and all(size % length == 0 for length in self.lengths)

    def node(self, path: Path, atom: Atom, dim: int) -> int | None:
        """Of a dimension of a value in the body at `path`; None of constants, and of other sizes."""
        if self.is_constant(path, atom) or not self.has(shape_of(atom)[dim]):
            return None
        assert isinstance(atom, Var)
        key = path, atom, dim
        if key not in self._nodes:
            self._nodes[key] = self._fresh()
        return self._nodes[key]

    def is_constant(self, path: Path, atom: Atom) -> bool:
        return not isinstance(atom, Var) or atom in self._consts[path]

    def dims(self, path: Path, atom: Atom) -> Dims:
        return tuple(self.node(path, atom, d) for d in range(len(shape_of(atom))))

    def find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def tie(self, a: int | None, b: int | None) -> None:
        """Both have one order."""
        if a is not None and b is not None:
            self._parent[self.find(a)] = self.find(b)

    def line(self, place: Place) -> str:
        """The user's line of an equation; of one inside a function of a library, that of its call."""
        path, _ = place
        own = source_line(self.uses[place].eqn)
        return own if own or not path else self.line((path[:-1], path[-1][0]))

    def behind(self, nodes: list[int]) -> set[int]:
        """These nodes, and those that they are made of."""
        met, todo = set(nodes), list(nodes)
        while todo:
            new = [n for n in self.leads.get(todo.pop(), ()) if n not in met]
            met.update(new)
            todo += new
        return met

    def _fresh(self) -> int:
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    # ------------------------------------------------------------ equations

    def _body(self, path: Path, jaxpr: Jaxpr, turns: int) -> None:
        self._consts[path] = frozenset(jaxpr.constvars)
        for index, eqn in enumerate(jaxpr.eqns):
            if any(self.has(size) for v in (*eqn.invars, *eqn.outvars) for size in shape_of(v)):
                self._equation((path, index), eqn, turns)

    def _equation(self, place: Place, eqn: JaxprEqn, turns: int) -> None:
        sides = _Sides(self, place, eqn)
        own: int | None = None
        if (op := reorder_of(eqn)) is not None:
            own = self._reorder(sides, op)
        elif eqn.primitive.name in ENTERED:
            self._enter(sides, turns)
        elif (form := _form(eqn)) is not None:
            self._form(sides, form)
        self.uses[place] = Use(eqn, sides.dims(False), sides.dims(True), turns, own)

    def _reorder(self, sides: _Sides, op: Reorder) -> int | None:
        """The dimensions beside are treated alone; the node of the side that has the model's own order."""
        for d in range(op.rank):
            if d != op.dim:
                sides.tied([(False, 0, d), (True, 0, d)])
        return sides.tied([(op.goes_back, 0, op.dim)])

    def _form(self, sides: _Sides, form: Form) -> None:
        """Factors that are dimensions by themselves, or layers in front of others, unless they are whole."""
        alone: dict[int, list[_Side]] = {}
        refused = {f for f, kind in enumerate(form.kinds) if kind == "whole"} | form.blocks
        for is_result, arrays in ((False, form.operands), (True, form.results)):
            for number, dims in enumerate(arrays):
                for d, factors in enumerate(dims):
                    large = [f for f in factors if form.sizes[f] != 1]
                    if len(large) == 1 or (large and {form.sizes[large[0]]} == self.lengths):
                        alone.setdefault(large.pop(0), []).append((is_result, number, d))
                    refused.update(large)
        for f, places in alone.items():
            if f not in refused and self.has(form.sizes[f]):
                node = sides.tied(places)
                if form.kinds[f] == "sum" and node is not None and _is_inexact(sides.eqn):
                    self.sums.append((sides.place, node))

    # ------------------------------------------------------------ bodies

    def _enter(self, sides: _Sides, turns: int) -> None:
        eqn, (path, index) = sides.eqn, sides.place
        first, carried = _scanned(eqn)
        for number, body in enumerate(bodies(eqn)):
            inner = (*path, (index, number))
            self._body(inner, body, turns * eqn.params.get("length", 1))
            for i, k in enumerate(operands(eqn, number)):
                for d, node in enumerate(self.dims(inner, body.invars[i])):
                    if node is None:
                        continue
                    if k is None:
                        self.fixed[node] = f"`{eqn.primitive.name}` brings it"
                    else:
                        sides.joined((False, k, d + int(k >= first)), node, inward=True)
            if eqn.primitive.name == "while" and body is eqn.params["cond_jaxpr"]:
                continue
            around = carries(eqn, number)
            for k, atom in enumerate(body.outvars):
                for d, size in enumerate(shape_of(atom)):
                    if not self.has(size):
                        continue
                    made = self.node(inner, atom, d)
                    if made is None:
                        made = self._fresh()
                        self.fixed[made] = f"a constant comes out of a `{eqn.primitive.name}`"
                    sides.joined((True, k, d + int(k >= carried)), made)
                    again = self.node(inner, body.invars[around[k]], d) if k in around else None
                    if again is not None:
                        self.tie(made, again)
                        self.leads.setdefault(again, []).append(made)


_Side = tuple[bool, int, int]
"""A dimension of an equation: whether of a result, of which, and the dimension."""


class _Sides:
    """The dimensions of one equation in the making: what nothing is said of is in the model's own order."""

    def __init__(self, ties: Ties, place: Place, eqn: JaxprEqn) -> None:
        self.ties, self.place, self.eqn = ties, place, eqn
        self._nodes: dict[_Side, int] = {}

    def atom(self, side: _Side) -> Atom:
        is_result, number, _ = side
        return self.eqn.outvars[number] if is_result else self.eqn.invars[number]

    def value(self, side: _Side) -> int | None:
        """The node of the value that stands there."""
        return self.ties.node(self.place[0], self.atom(side), side[2])

    def joined(self, side: _Side, node: int, inward: bool = False) -> None:
        """A dimension has the node's order, and its value has it too. inward: the node is made of it."""
        value = self.value(side)
        self.ties.tie(self._nodes.setdefault(side, node), node)
        self.ties.tie(value, node)
        if value is not None:
            made = node if inward else value
            self.ties.leads.setdefault(made, []).append(value if inward else node)

    def tied(self, sides: list[_Side]) -> int | None:
        """These have one order, whatever it is; a node that has it, where a value has."""
        values = {side: self.value(side) for side in sides}
        known = [node for node in values.values() if node is not None]
        if not known:
            return None
        for side in sides:
            self._nodes[side] = known[0]
        for node in known:
            self.ties.tie(known[0], node)
        given = [node for side, node in values.items() if node is not None and not side[0]]
        for side, made in values.items():
            if side[0] and made is not None:
                self.ties.leads.setdefault(made, []).extend(given)
        return known[0]

    def dims(self, is_result: bool) -> tuple[Dims, ...]:
        atoms = self.eqn.outvars if is_result else self.eqn.invars
        return tuple(
            tuple(self._nodes.get((is_result, n, d)) for d in range(len(shape_of(atom))))
            for n, atom in enumerate(atoms)
        )


def _form(eqn: JaxprEqn) -> Form | None:
    """What an equation does to dimensions, where its word holds for rows in any order."""
    if (op := operation_of(eqn)) is not None and grouped_of(op):  # rows come one group after the other
        return None
    name = eqn.primitive.name
    return LOOKUPS[name](eqn) if name in LOOKUPS else form_of(eqn)


def _gather(eqn: JaxprEqn) -> Form:
    """Indices each look up a row of their own."""
    d, n, taken = Draft(eqn), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    batched = dict(zip(n.start_indices_batching_dims, n.operand_batching_dims, strict=True))
    for k, row in enumerate(k for k in range(len(out)) if k not in n.offset_dims):
        d.tie({0: batched[k], 1: k} if k in batched else {1: k}, {0: row})
    windowed = (k for k in range(len(shape)) if k not in (*n.collapsed_slice_dims, *batched.values()))
    for k, offset in zip(windowed, n.offset_dims, strict=True):
        if taken[k] == shape[k]:
            d.tie({0: k}, {0: offset})
    return d.form()


def _scatter(eqn: JaxprEqn) -> Form:
    """Rows are each put in a place of their own, or added up there."""
    d, n = Draft(eqn), eqn.params["dimension_numbers"]
    shape, updated = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    batched = dict(zip(n.scatter_indices_batching_dims, n.operand_batching_dims, strict=True))
    for k, row in enumerate(k for k in range(len(updated)) if k not in n.update_window_dims):
        if k in batched:
            d.tie({0: batched[k], 1: k, 2: row}, {0: batched[k]})
        elif eqn.primitive.name != "scatter":  # of two rows for one place the last remains
            d.tie({1: k, 2: row}, {}, "sum")
    windowed = (k for k in range(len(shape)) if k not in (*n.inserted_window_dims, *batched.values()))
    for k, window in zip(windowed, n.update_window_dims, strict=True):
        if updated[window] == shape[k]:
            d.tie({0: k, 2: window}, {0: k})
    return d.form()


LOOKUPS: dict[str, Callable[[JaxprEqn], Form]] = {
    "sharding_constraint": each_alone,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-min", "scatter-max"), _scatter),
}
"""Operations that the walk of `xform.spmd` treats otherwise."""


def _scanned(eqn: JaxprEqn) -> tuple[float, float]:
    """From which operand, and from which result on, a loop takes and gives a row a turn."""
    if eqn.primitive.name != "scan":
        return math.inf, math.inf
    consts, carry, _ = scan_parts(eqn)
    return consts + carry, carry


def _is_inexact(eqn: JaxprEqn) -> bool:
    dtype: Any = getattr(eqn.outvars[0].aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
