"""Which dimensions of a program are the same axis, found by walking it once; the program is not changed.

Every dimension is a product of factors (`Dim`, major to minor). Operations tie factors: a dot what it
contracts and batches, an elementwise operation dimension to dimension, a reshape by refining both sides, a
scan its carry (`rules` has one rule a primitive, `factors` the algebra). What is tied is one `Factor`.
Two axes whose sizes merely agree are never tied, and a body called twice is analysed once for each call:
factors are asked for in a `Scope`, which is a body at one call site.

    axes = find_axes(jax.make_jaxpr(step)(state, batch))
    axes.root[axes.jaxpr.invars[0]]          # ((Factor 0 of 24,), (Factor 1 of 4, Factor 2 of 6))
    axes.root.enter(17, 0)[var]              # inside the first body of equation 17
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from xform.axes.factors import Cut, Factors, Raw, Shape
from xform.axes.integers import INDEXED, component
from xform.axes.rules import ELEMENTWISE, RULES, fresh
from xform.higher_order import OPAQUE, bodies
from xform.ops.rows import reorder_of
from xform.trace import Jaxpr, JaxprEqn, Literal, Var, shape_of

Path = tuple[tuple[int, int], ...]
"""A call site: (equation index, body index) from the outermost program inward."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Factor:
    """One axis. `id` counts axes in the order in which the program meets them.

    `parts` are the stretches of it that the program takes or joins: ((first index, size, stride), dimension)
    each, in order. An axis that is a sum (q, k and v in one projection) has the parts it is the sum of in
    `sum`, major to minor."""

    id: int
    size: int
    parts: tuple[tuple[Cut, Dim], ...] = ()
    sum: tuple[Dim, ...] = ()

    def __hash__(self) -> int:  # sets of factors have the same order in every process
        return self.id

    def __repr__(self) -> str:
        return f"Factor {self.id} of {self.size}"


Identity = tuple[Any, Any]
"""Which integers a variable holds: the same inside and outside of a call."""

Dim = tuple[Factor, ...]
"""One array dimension, major to minor; () for size 1."""


class Scope:
    """The axes of the variables of one body at one call site. `parent` and `index` say which equation holds
    it.
    """

    def __init__(self, axes: Axes, jaxpr: Jaxpr, parent: Scope | None, index: int, body: int) -> None:
        self.axes, self.jaxpr, self.parent, self.index, self.body = axes, jaxpr, parent, index, body
        self.raw: dict[Var, Shape] = {}
        self.alias: dict[Var, Identity] = {}
        self.children: dict[tuple[int, int], Scope] = {}

    def __getitem__(self, var: Var | Literal) -> tuple[Dim, ...]:
        """The factors of each dimension. Raises KeyError for a variable of another body."""
        return self.axes.dims(self.raw_of(var))

    def raw_of(self, var: Var | Literal) -> Shape:
        if isinstance(var, Literal):
            return self.axes.factors.fresh(shape_of(var))
        return self.raw[var]

    def identity(self, var: Any) -> Identity:
        """Equal for a variable in here and the one outside that it is."""
        return (id(self), id(var)) if isinstance(var, Literal) else self.alias.get(var, (id(self), var))

    def enter(self, eqn_index: int, body_index: int) -> Scope:
        """The scope of a body of one of the equations here. KeyError if the analysis did not go into it."""
        return self.children[eqn_index, body_index]

    @functools.cached_property
    def makers(self) -> dict[Any, int]:
        """Which equation of the body makes a variable."""
        return {v: index for index, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}

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
        """The axis of which a factor is a part at a place known only when the program runs
        (dynamic_slice).
        """
        loose = self.factors.loose.get(self._nodes[factor])
        return None if loose is None else self.dim((loose,))[0]

    def split(self, shape: Shape, dimension: int, sizes: Sequence[int]) -> None:
        """Refine a dimension into a product, here and wherever the axis occurs. Factors asked for before are
        void.
        """
        f = self.factors
        f.tie_dim(shape[dimension], tuple(raw[0] for raw in f.fresh(sizes) if raw))
        self._forget()

    def _forget(self) -> None:
        self._shapes, self._dims, self._by_node, self._nodes, self._ids = {}, {}, {}, {}, {}

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
        axes.root.raw[v] = axes.factors.fresh(shape_of(v))
    walk.equations(axes.root)
    axes.factors.tie_equal_sums()
    return axes


class _Walk:
    """One walk over a program: the environment is the scopes, the result what is tied in `axes.factors`."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.f = axes, axes.factors
        self.rows: dict[tuple[Any, int], Raw] = {}  # what some integers index, by its size
        self.elements: dict[Any, Any] = {}  # integers stacked by a scan -> what they are inside
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
            outs = self._inside(scope, index, eqn, ins) if rule is None else rule(self.f, eqn, ins)
            for var, shape in zip(eqn.outvars, outs, strict=True):
                raw[var] = shape
            if name in INDEXED:
                self._indexed(scope, eqn, ins)

    def _indexed(self, scope: Scope, eqn: JaxprEqn, ins: list[Shape]) -> None:
        """What the same integers index is the same axis: a table, and its gradient that they scatter into.

        And what a count indexes is the axis that it counts: the first of x[arange(n), labels].
        """
        operand = shape_of(eqn.invars[0])
        places = INDEXED[eqn.primitive.name](eqn)
        for place, indices, k in places:
            var, maker = component(scope.jaxpr, scope.makers, indices, k)
            if isinstance(var, Literal) or not ins[0][place]:
                continue
            dim = ins[0][place]
            self.f.tie_dim(dim, self.rows.setdefault((scope.identity(var), operand[place]), dim))
            if maker is not None and maker.primitive.name == "iota" and len(places) > 1:
                dimension = maker.params["dimension"]
                if maker.params["shape"][dimension] == operand[place]:
                    self.f.tie_dim(dim, scope.raw[var][dimension])

    def body(
        self,
        scope: Scope,
        index: int,
        number: int,
        jaxpr: Jaxpr,
        args: Sequence[Shape],
        alias: dict[Var, Identity] | None = None,
    ) -> list[Shape]:
        """Walk a body at this call site; the dimensions of its results. `alias`: inputs that are known
        outside.
        """
        inner = self.axes._scope(jaxpr, scope, index, number)
        inner.alias.update(alias or {})
        for v in jaxpr.constvars:
            inner.raw[v] = self.f.fresh(shape_of(v))
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
                outs = self.body(scope, index, 0, inner[0], ins, _same(scope, eqn.invars, inner[0].invars))
                below = scope.children[index, 0]
                for v, result in zip(eqn.outvars, inner[0].outvars, strict=True):
                    if _is_integers(v):
                        scope.alias[v] = _origin(below, result)
                return ins if reorder_of(eqn) is not None else outs
        self.axes.unruled[name] = self.axes.unruled.get(name, 0) + 1
        return fresh(self.f, eqn, ins)

    def _scan(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
        """The carry is the same before and after; all that is scanned over or stacked shares its first
        axis.
        """
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        first = consts + carry
        scanned = [dims[0] for dims in ins[first:]]
        lead = scanned[0] if scanned else self.f.fresh((eqn.params["length"],))[0]
        for dim in scanned[1:]:
            self.f.tie_dim(lead, dim)
        args = [*ins[:first], *(dims[1:] for dims in ins[first:])]
        jaxpr = eqn.params["jaxpr"]
        alias = _same(scope, eqn.invars[:consts], jaxpr.invars)
        for v, w in zip(jaxpr.invars[first:], eqn.invars[first:], strict=True):
            if _is_integers(v):
                outside = scope.identity(w)
                alias[v] = self.elements.get(outside, ("element", outside))
        outs = self.body(scope, index, 0, jaxpr, args, alias)
        inner = scope.children[index, 0]
        for v, w in zip(eqn.outvars[carry:], jaxpr.outvars[carry:], strict=True):
            if _is_integers(v):
                self.elements[scope.identity(v)] = _origin(inner, w)
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
        outs = [
            self.body(scope, index, i, b, ins[1:], _same(scope, eqn.invars[1:], b.invars))
            for i, b in enumerate(branches)
        ]
        for other in outs[1:]:
            for a, b in zip(outs[0], other, strict=True):
                self.f.tie(a, b)
        return outs[0]

    def _shard_map(self, scope: Scope, index: int, eqn: JaxprEqn, ins: list[Shape]) -> list[Shape]:
        """Inside, a split dimension is an axis of its own; a result split in the same way has the axis
        outside again.
        """
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
            tuple(map(local, dims, shape_of(v), shape_of(inner), _spec(spec, len(dims))))
            for dims, v, inner, spec in zip(ins, eqn.invars, body.invars, p["in_specs"], strict=True)
        ]
        outs = self.body(scope, index, 0, body, args)
        same: dict[tuple[tuple[int, str], Raw], Raw] = {}
        for way, outside, inside in split:
            self.f.tie_dim(outside, same.setdefault((way, self.f.leaves(inside)), outside))
        return [
            tuple(map(outer, dims, shape_of(v), shape_of(inner), _spec(spec, len(dims))))
            for dims, v, inner, spec in zip(outs, eqn.outvars, body.outvars, p["out_specs"], strict=True)
        ]


def _spec(spec: Any, rank: int) -> Iterator[str]:
    entries = list(spec)
    yield from (str(entry) for entry in entries + [None] * (rank - len(entries)))


def _is_call(eqn: JaxprEqn, body: Jaxpr) -> bool:
    """Whether a body takes and gives what the equation does: jit, remat, custom_jvp and the like."""
    pairs = ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
    return all(
        len(a) == len(b) and all(shape_of(x) == shape_of(y) for x, y in zip(a, b, strict=True))
        for a, b in pairs
    )


def _is_integers(v: Any) -> bool:
    return getattr(getattr(v.aval, "dtype", None), "kind", "") == "i"


def _same(scope: Scope, operands: Sequence[Any], inner: Sequence[Var]) -> dict[Var, Identity]:
    """What the first inputs of a body are outside, where they are integers."""
    pairs = zip(operands, inner, strict=False)
    return {v: scope.identity(operand) for operand, v in pairs if _is_integers(v)}


def _origin(scope: Scope, var: Any) -> Identity:
    """The identity of the integers that these are, wrapped and shaped."""
    return scope.identity(component(scope.jaxpr, scope.makers, var)[0])
