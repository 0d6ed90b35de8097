"""Which dimensions of a program are the same axis, found by walking it once; the program is not changed.

Every dimension is a product of factors (`Dim`, major to minor). Operations tie factors: a dot what it contracts and
batches, an elementwise operation dimension to dimension, a reshape by refining both sides, a scan its carry
(`axis_rules` has one rule a primitive, `factors` the algebra). What is tied is one `Factor`. Two axes whose sizes merely
agree are never tied, and a body called twice is analysed once for each call: factors are asked for in a `Scope`, which is a
body at one call site.

    axes = find_axes(jax.make_jaxpr(step)(state, batch))
    axes.root[axes.jaxpr.invars[0]]          # ((Factor 0 of 24,), (Factor 1 of 4, Factor 2 of 6))
    axes.root.enter(17, 0)[var]              # inside the first body of equation 17
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from xform.axis_rules import ELEMENTWISE, RULES, fresh
from xform.factors import Cut, Factors, Raw, Shape
from xform.higher_order import OPAQUE, bodies
from xform.trace import Jaxpr, JaxprEqn, Literal, Var

INDEXED = frozenset(("gather", "scatter", "scatter-add", "scatter_add"))
"""Primitives that index an axis with integers."""

Path = tuple[tuple[int, int], ...]
"""A call site: (equation index, body index) from the outermost program inward."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Factor:
    """One axis. `id` counts axes in the order in which the program meets them.

    `parts` are the stretches of it that the program takes or joins: ((first index, size, stride), dimension) each, in
    order. An axis that is a sum (q, k and v in one projection) has the parts it is the sum of in `sum`, major to minor.
    """

    id: int
    size: int
    parts: tuple[tuple[Cut, Dim], ...] = ()
    sum: tuple[Dim, ...] = ()

    def __repr__(self) -> str:
        return f"Factor {self.id} of {self.size}"


Dim = tuple[Factor, ...]
"""One array dimension, major to minor; () for size 1."""


class Scope:
    """The axes of the variables of one body at one call site. `parent` and `index` say which equation holds it."""

    def __init__(self, axes: Axes, jaxpr: Jaxpr, parent: Scope | None, index: int, body: int) -> None:
        self.axes, self.jaxpr, self.parent, self.index, self.body = axes, jaxpr, parent, index, body
        self.raw: dict[Var, Shape] = {}
        self.alias: dict[Var, tuple[int, Any]] = {}
        self.children: dict[tuple[int, int], Scope] = {}
        self._made: dict[Any, JaxprEqn] | None = None

    def __getitem__(self, var: Var | Literal) -> tuple[Dim, ...]:
        """The factors of each dimension. Raises KeyError for a variable of another body."""
        return self.axes.dims(self.raw_of(var))

    def raw_of(self, var: Var | Literal) -> Shape:
        if isinstance(var, Literal):
            return self.axes.factors.fresh(var.aval.shape) if var.aval.shape else ()
        return self.raw[var]

    def identity(self, var: Any) -> tuple[int, Any]:
        """The same for a variable in here and the one outside that it is."""
        return self.alias.get(var, (id(self), var if isinstance(var, Var) else id(var)))

    def enter(self, eqn_index: int, body_index: int) -> Scope:
        """The scope of a body of one of the equations here. KeyError if the analysis did not go into it."""
        return self.children[eqn_index, body_index]

    def count(self, indices: Any, k: int) -> JaxprEqn | None:
        """The iota that is the k-th component of the indices of a gather, if it is one."""
        if self._made is None:
            self._made = {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}
        eqn = self._made.get(indices)
        if eqn is not None and eqn.primitive.name == "concatenate" and len(eqn.invars) > k:
            eqn = self._made.get(eqn.invars[k])
        while eqn is not None and eqn.primitive.name in (
            "broadcast_in_dim",
            "convert_element_type",
            "select_n",
        ):
            v = eqn.invars[1 if eqn.primitive.name == "select_n" else 0]
            eqn = None if isinstance(v, Literal) else self._made.get(v)
        return eqn if eqn is not None and eqn.primitive.name == "iota" else None

    @property
    def path(self) -> Path:
        return () if self.parent is None else (*self.parent.path, (self.index, self.body))

    @property
    def eqn(self) -> JaxprEqn | None:
        """The equation that holds this body."""
        return None if self.parent is None else self.parent.jaxpr.eqns[self.index]


class Axes:
    """The axes of a program. `unruled` counts the primitives that no rule is known for: they tied nothing."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        self.factors = Factors()
        self.scopes: list[Scope] = []  # in the order of the walk, the root first
        self.unruled: dict[str, int] = {}
        self._shapes: dict[Shape, tuple[Dim, ...]] = {}
        self._dims: dict[Raw, Dim] = {}
        self._by_node: dict[int, Factor] = {}
        self._nodes: dict[Factor, int] = {}
        self._ids: dict[int, int] = {}
        self.root = self._scope(jaxpr, None, 0, 0)

    def _scope(self, jaxpr: Jaxpr, parent: Scope | None, index: int, body: int) -> Scope:
        scope = Scope(self, jaxpr, parent, index, body)
        if parent is not None:
            parent.children[index, body] = scope
        self.scopes.append(scope)
        return scope

    def scope(self, path: Path) -> Scope:
        """The body at a call site, e.g. ((17, 0), (3, 0))."""
        scope = self.root
        for index, body in path:
            scope = scope.enter(index, body)
        return scope

    def all(self) -> list[Factor]:
        """Every factor that some variable has, in order."""
        shapes = {shape for scope in self.scopes for shape in scope.raw.values()}
        found = {f for shape in shapes for dim in self.dims(shape) for f in dim}
        return sorted(found, key=lambda f: f.id)

    def dims(self, shape: Shape) -> tuple[Dim, ...]:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = tuple([self.dim(raw) for raw in shape])
        return found

    def dim(self, raw: Raw) -> Dim:
        found = self._dims.get(raw)
        if found is None:
            found = self._dims[raw] = tuple([self._factor(node) for node in self.factors.leaves(raw)])
        return found

    def whole(self, factor: Factor) -> Factor | None:
        """The axis of which a factor is a part at a place known only when the program runs (dynamic_slice)."""
        loose = self.factors.loose.get(self._nodes[factor])
        return None if loose is None else self.dim((loose,))[0]

    def split(self, shape: Shape, dimension: int, sizes: Sequence[int]) -> None:
        """Refine a dimension into a product, here and wherever the axis occurs. Factors asked for before are void."""
        f = self.factors
        f.tie_dim(shape[dimension], tuple(raw[0] for raw in f.fresh(sizes) if raw))
        self._forget()

    def _forget(self) -> None:
        for table in (self._shapes, self._dims, self._by_node, self._nodes, self._ids):
            table.clear()  # type: ignore[attr-defined]

    def _factor(self, node: int) -> Factor:
        found = self._by_node.get(node)
        if found is None:
            f = self.factors
            if not self._ids:
                roots = (n for n, up in enumerate(f.parent) if n == up and n not in f.split)
                self._ids = {n: i for i, n in enumerate(roots)}
            parts = tuple((cut, self.dim(raw)) for cut, raw in sorted(f.parts.get(node, {}).items()))
            found = Factor(self._ids[node], f.size[node], parts, tuple(map(self.dim, f.sum(node))))
            self._by_node[node] = found
            self._nodes[found] = node
        return found


def find_axes(jaxpr: Jaxpr) -> Axes:
    """Walk a closed program, as `jax.make_jaxpr` returns it, and tie what is the same axis."""
    axes = Axes(jaxpr)
    walk = _Walk(axes)
    for v in (*jaxpr.invars, *jaxpr.constvars):
        axes.root.raw[v] = axes.factors.fresh(getattr(v.aval, "shape", ()))
    walk.equations(axes.root)
    axes.factors.tie_equal_sums()
    return axes


class _Walk:
    """One walk over a program: the environment is the scopes, the result what is tied in `axes.factors`."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.f = axes, axes.factors
        self.rows: dict[tuple[Any, int, int], Raw] = {}  # what some integers index
        self.higher = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
        }

    def equations(self, scope: Scope) -> None:
        raw, meet = scope.raw, self.f.meet
        for index, eqn in enumerate(scope.jaxpr.eqns):
            name = eqn.primitive.name
            if name in ELEMENTWISE:
                out: Shape = ()
                for v in eqn.invars:
                    shape = raw[v] if type(v) is not Literal else scope.raw_of(v)
                    if shape and shape is not out:
                        out = meet(out, shape) if out else shape
                raw[eqn.outvars[0]] = out
                continue
            ins = [raw[v] if type(v) is not Literal else scope.raw_of(v) for v in eqn.invars]
            rule = RULES.get(name)
            if rule is not None:
                outs = rule(self.f, eqn, ins)
            else:
                outs = self._inside(scope, index, eqn, ins)
            for var, shape in zip(eqn.outvars, outs, strict=True):
                raw[var] = shape
            if name in INDEXED:
                self._indexed(scope, eqn, ins)

    def _indexed(self, scope: Scope, eqn: JaxprEqn, ins: list[Shape]) -> None:
        """What the same integers index is the same axis: a table, and its gradient that they scatter into.

        And what a count indexes is the axis that it counts: the first of x[arange(n), labels].
        """
        numbers = eqn.params["dimension_numbers"]
        gather = eqn.primitive.name == "gather"
        places = numbers.start_index_map if gather else numbers.scatter_dims_to_operand_dims
        single = numbers.collapsed_slice_dims if gather else numbers.inserted_window_dims
        indices, sizes = eqn.invars[1], _shape(eqn.invars[0])
        for k, place in enumerate(places):
            if place not in single:
                continue
            dim = ins[0][place]
            self.f.tie_dim(dim, self.rows.setdefault((scope.identity(indices), k, sizes[place]), dim))
            if len(places) > 1:
                count = scope.count(indices, k)
                if count is not None and count.params["shape"][count.params["dimension"]] == sizes[place]:
                    self.f.tie_dim(dim, scope.raw[count.outvars[0]][count.params["dimension"]])

    def body(
        self,
        scope: Scope,
        index: int,
        number: int,
        jaxpr: Jaxpr,
        args: Sequence[Shape],
        operands: Sequence[Any] = (),
    ) -> list[Shape]:
        """Walk a body at this call site; the dimensions of its results. The first inputs are the operands."""
        inner = self.axes._scope(jaxpr, scope, index, number)
        for v, operand in zip(jaxpr.invars, operands, strict=False):
            if _is_integers(v):
                inner.alias[v] = scope.identity(operand)
        for v in jaxpr.constvars:
            inner.raw[v] = self.f.fresh(getattr(v.aval, "shape", ()))
        inner.raw.update(zip(jaxpr.invars, args, strict=True))
        self.equations(inner)
        return [inner.raw_of(v) for v in jaxpr.outvars]

    def _inside(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> Sequence[Shape]:
        """An equation with a program inside: by its own rule, or as a call if it looks like one."""
        name = eqn.primitive.name
        higher = self.higher.get(name)
        if higher is not None:
            return higher(scope, index, eqn, ins)
        if name not in OPAQUE:
            inner = bodies(eqn)
            if len(inner) == 1 and _is_call(eqn, inner[0]):
                outs = self.body(scope, index, 0, inner[0], ins, eqn.invars)
                below = scope.children[index, 0]
                for v, result in zip(eqn.outvars, inner[0].outvars, strict=True):
                    if _is_integers(v):
                        scope.alias[v] = below.identity(result)
                return outs
        self.axes.unruled[name] = self.axes.unruled.get(name, 0) + 1
        return fresh(self.f, eqn, ins)

    def _scan(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
        """The carry is the same before and after; all that is scanned over or stacked shares its first axis."""
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        first = consts + carry
        scanned = [dims[0] for dims in ins[first:]]
        lead = scanned[0] if scanned else self.f.fresh((eqn.params["length"],))[0]
        for dim in scanned[1:]:
            self.f.tie_dim(lead, dim)
        args = [*ins[:first], *(dims[1:] for dims in ins[first:])]
        outs = self.body(scope, index, 0, eqn.params["jaxpr"], args, eqn.invars[:consts])
        for before, after in zip(ins[consts:first], outs, strict=False):
            self.f.tie(before, after)
        return [*outs[:carry], *((lead, *dims) for dims in outs[carry:])]

    def _while(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
        p = eqn.params
        numbers = {name: i for i, name in enumerate(k for k, v in p.items() if isinstance(v, Jaxpr))}
        test, consts = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        carry = ins[consts:]
        self.body(scope, index, numbers["cond_jaxpr"], p["cond_jaxpr"], [*ins[:test], *carry])
        outs = self.body(scope, index, numbers["body_jaxpr"], p["body_jaxpr"], [*ins[test:consts], *carry])
        for before, after in zip(carry, outs, strict=True):
            self.f.tie(before, after)
        return carry

    def _cond(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
        branches = eqn.params["branches"]
        operands = eqn.invars[1:]
        outs = [self.body(scope, index, i, b, ins[1:], operands) for i, b in enumerate(branches)]
        for other in outs[1:]:
            for a, b in zip(outs[0], other, strict=True):
                self.f.tie(a, b)
        return outs[0]

    def _shard_map(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
        """Inside, a split dimension is an axis of its own; a result split in the same way has the axis outside again."""
        p = eqn.params
        body: Jaxpr = p["jaxpr"]
        split: list[tuple[tuple[int, str], Raw, Raw]] = []  # (ways, mesh axes), outside, inside

        def local(dim: Raw, whole: int, n: int, axes: str) -> Raw:
            if whole == n:
                return dim
            here = self.f.leaves(dim)
            for way, outside, inside in split:
                if way == (whole // n, axes) and self.f.leaves(outside) == here:
                    return inside
            inside = self.f.fresh((n,))[0]
            split.append(((whole // n, axes), dim, inside))
            return inside

        def outer(dim: Raw, whole: int, n: int, axes: str) -> Raw:
            if whole == n:
                return dim
            here = self.f.leaves(dim)
            for way, outside, inside in split:
                if way == (whole // n, axes) and self.f.leaves(inside) == here:
                    return outside
            return self.f.fresh((whole,))[0]

        args = [
            tuple(map(local, dims, v.aval.shape, inner.aval.shape, _spec(spec, len(dims))))
            for dims, v, inner, spec in zip(ins, eqn.invars, body.invars, p["in_specs"], strict=True)
        ]
        outs = self.body(scope, index, 0, body, args)
        return [
            tuple(map(outer, dims, v.aval.shape, inner.aval.shape, _spec(spec, len(dims))))
            for dims, v, inner, spec in zip(outs, eqn.outvars, body.outvars, p["out_specs"], strict=True)
        ]


def _spec(spec: Any, rank: int) -> Iterator[str]:
    entries = list(spec)
    yield from (str(entry) for entry in entries + [None] * (rank - len(entries)))


def _is_call(eqn: JaxprEqn, body: Jaxpr) -> bool:
    """Whether a body takes and gives what the equation does: jit, remat, custom_jvp and the like."""
    pairs = ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    return all(
        len(a) == len(b) and all(_shape(x) == _shape(y) for x, y in zip(a, b, strict=True)) for a, b in pairs
    )


def _shape(v: Var | Literal) -> Any:
    return getattr(v.aval, "shape", None)


def _is_integers(v: Var) -> bool:
    return bool(_shape(v)) and getattr(v.aval.dtype, "kind", "") == "i"
