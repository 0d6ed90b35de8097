"""Loops that gather a weight once, and sum its gradient over the devices once, not at every turn.

    scan {                                   c = cast w, whole                         (gathered here)
      y = dot_general x (cast w)        ->   scan {
      g += dot_general x dy }                  y = dot_general x c
                                               s[groups] += dot_general x[groups] dy[groups] }
                                             g += sum of s                             (summed here)

A loop over chunks of the data that multiplies by a weight which lies in parts on the mesh gathers it at every
turn, and at every turn sums the gradient over the devices that have rows of their own. Here the weight is
constrained to lie whole along the mesh axes of the batch before the loop, and a sum that the loop carries has
an entry for each group of devices, which are added up after it: on a device, the memory of a whole weight and
of a whole gradient. Sums are rounded to the dtype that their products are rounded to before they go over the
network, as they would be without a loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.axes import Scope
from xform.context import Context
from xform.higher_order import scan_parts
from xform.movement import moves, nbytes
from xform.rewrite import Site
from xform.roles import Roles
from xform.sharding.layout import entry_axes
from xform.trace import JaxprEqn, Literal, Value, Var, at_equation, bind, shape_of

CALLS = frozenset({"jit", "closed_call", "core_call", "eval_jaxpr", "remat2"})
STEPS = frozenset({"convert_element_type", "copy", "sharding_constraint", "transpose"})
"""What may be done with a product before it is added up."""

Key = tuple[int, Var]
"""A variable of a body: the body's scope, by its id, and the variable."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A constant of the loop, after what is done with it at every turn; and how it lies when gathered."""

    const: int
    steps: tuple[JaxprEqn, ...]
    spec: PartitionSpec

    def gathered(self, value: Value, mesh: Mesh) -> Value:
        for eqn in self.steps:
            (value,) = bind(eqn, [value], eqn.params)
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, self.spec))


@dataclasses.dataclass(frozen=True)
class Sum:
    """A carried sum of products over the batch: the product, by its scope and number, which of the dimensions
    that it contracts is the batch's, and what is done with it before it is added, and with the sum after.
    """

    product: tuple[int, int]
    eqn: JaxprEqn
    pair: int
    steps: tuple[JaxprEqn, ...]
    after: tuple[JaxprEqn, ...]


class Loop:
    """A scan of a program that is laid out on the mesh, with what of it can be done once.

    axes: the mesh axes of the batch.
    """

    def __init__(
        self, eqn: JaxprEqn, scope: Scope, context: Context, roles: Roles, axes: Sequence[str]
    ) -> None:
        self.eqn, self.scope, self.roles = eqn, scope, roles
        self.mesh, self.axes = context.mesh, tuple(axes)
        self.groups = math.prod(self.mesh.shape[a] for a in axes)
        root = roles.axes.root
        self.layouts: dict[frozenset[Any], dict[Any, tuple[str, ...]]] = {}
        for var, sharding in zip(roles.axes.jaxpr.invars, context.in_shardings, strict=True):
            if sharding is not None and shape_of(var):
                entries = [*sharding.spec, *[None] * (len(shape_of(var)) - len(sharding.spec))]
                found = dict(zip(root[var], map(entry_axes, entries), strict=True))
                self.layouts.setdefault(frozenset(found), found)
        self.consts, self.carry, _ = scan_parts(eqn)
        self.weights = dict(
            self._weights(scope, {v: (i, ()) for i, v in enumerate(scope.jaxpr.invars[: self.consts])})
        )
        self.sums = {k: s for k in range(self.carry) if (s := self._sum(k)) is not None}

    # What there is

    def _weights(
        self, scope: Scope, held: Mapping[Var, tuple[int, tuple[JaxprEqn, ...]]]
    ) -> Iterator[tuple[Key, Weight]]:
        """The weights that are multiplied by and lie on axes of the batch, wherever in the body that is."""
        held = dict(held)
        for index, eqn in enumerate(scope.jaxpr.eqns):
            own = [held.get(v) if isinstance(v, Var) else None for v in eqn.invars]
            if (child := _child(scope, index)) is not None:
                inner = zip(child.jaxpr.invars, own, strict=True)
                yield from self._weights(child, {v: h for v, h in inner if h is not None})
            elif moves(eqn) and own[0] is not None:
                held[eqn.outvars[0]] = (own[0][0], (*own[0][1], eqn))
            elif eqn.primitive.name == "dot_general":
                for v, h in zip(eqn.invars, own, strict=True):
                    if isinstance(v, Var) and h is not None and (spec := self._whole(scope, v)) is not None:
                        yield (id(scope), v), Weight(*h, spec)

    def _whole(self, scope: Scope, v: Any) -> PartitionSpec | None:
        """How a weight lies that is gathered along the axes of the batch; None if it is on none."""
        layout = self.layouts.get(frozenset(scope[v]))
        if layout is None or self.roles.is_activation(scope, v):
            return None
        entries = [layout[dim] for dim in scope[v]]
        kept = [tuple(a for a in entry if a not in self.axes) for entry in entries]
        return None if kept == entries else PartitionSpec(*(k or None for k in kept))

    def _sum(self, number: int) -> Sum | None:
        """The carried value as a sum of products over the batch."""
        body = self.scope.jaxpr
        start, v = body.invars[self.consts + number], body.outvars[number]
        after: list[JaxprEqn] = []
        while (eqn := _maker(self.scope, v)) is not None and eqn.primitive.name == "sharding_constraint":
            after.append(eqn)
            v = eqn.invars[0]
        uses = [v for e in body.eqns for v in e.invars if v is start]
        if eqn is None or eqn.primitive.name not in ("add", "add_any") or len(uses) != 1:
            return None
        if start in body.outvars or start not in eqn.invars:
            return None
        (v,) = [v for v in eqn.invars if v is not start]
        return self._product(v, tuple(reversed(after)))

    def _product(self, v: Any, after: tuple[JaxprEqn, ...]) -> Sum | None:
        """The product that a value is, but for steps."""
        scope, steps = self.scope, list[JaxprEqn]()
        while isinstance(v, Var) and (index := scope.makers.get(v)) is not None:
            eqn = scope.jaxpr.eqns[index]
            if (child := _child(scope, index)) is not None:
                scope, v = child, child.jaxpr.outvars[eqn.outvars.index(v)]
            elif eqn.primitive.name in STEPS:
                steps.append(eqn)
                v = eqn.invars[0]
            elif eqn.primitive.name == "dot_general" and (pair := self._pair(scope, eqn)) is not None:
                return Sum((id(scope), index), eqn, pair, tuple(reversed(steps)), after)
            else:
                break
        return None

    def _pair(self, scope: Scope, eqn: JaxprEqn) -> int | None:
        """Which of the dimensions that a product contracts is the batch's, and divides by the groups."""
        (left, right), _ = eqn.params["dimension_numbers"]
        for pair, (d, e) in enumerate(zip(left, right, strict=True)):
            dims = (scope[eqn.invars[0]][d], scope[eqn.invars[1]][e])
            fits = shape_of(eqn.invars[0])[d] % self.groups == 0
            if fits and all(dim and dim[0] in self.roles.batch for dim in dims):
                return pair
        return None

    # What it takes

    @property
    def memory(self) -> int:
        """Bytes of the gathered weights and of the sums of one group, on a device."""
        gathered = {(w.const, w.steps): self._bytes(v, w.spec) for (_, v), w in self.weights.items()}
        ways = min((self._ways(w.spec) for w in self.weights.values()), default=1)
        sums = [nbytes(self.scope.jaxpr.outvars[k]) // ways for k in self.sums]
        return sum(gathered.values()) + sum(sums)

    @property
    def saved(self) -> int:
        """Bytes that the largest value made in the loop would take more on a device without a loop."""
        largest = max(map(nbytes, _results(self.scope)), default=0)
        turns = self.eqn.params["length"] - 1
        return (
            turns
            * largest
            // self.groups
            // max(map(self._ways, (w.spec for w in self.weights.values())), default=1)
        )

    def _ways(self, spec: PartitionSpec) -> int:
        return math.prod(self.mesh.shape[a] for entry in spec for a in entry_axes(entry))

    def _bytes(self, v: Any, spec: PartitionSpec) -> int:
        return nbytes(v) // self._ways(spec)

    # The loop

    def emit(self, site: Site) -> list[Value]:
        """The loop with that done once."""
        p, args = site.params, site.args
        consts, carry = self.consts, self.carry
        held = {key: w.gathered(args[w.const], self.mesh) for key, w in self.weights.items()}
        starts = args[consts : consts + carry]
        first = [self._zeros(k) if k in self.sums else x for k, x in enumerate(starts)]

        def turn(carried: Sequence[Value], x: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            own: dict[tuple[int, int], Value] = {}
            given = [starts[k] if k in self.sums else c for k, c in enumerate(carried)]
            outs = self._run(self.scope, [*args[:consts], *given, *x], held, own)
            for k, total in self.sums.items():
                outs[k] = carried[k] + own[total.product]
            return outs[:carry], outs[carry:]

        last, ys = jax.lax.scan(
            turn, first, args[consts + carry :], p["length"], reverse=p["reverse"], unroll=p["unroll"]
        )
        return [*(self._added(k, starts[k], x) if k in self.sums else x for k, x in enumerate(last)), *ys]

    def _run(
        self,
        scope: Scope,
        args: Sequence[Value],
        held: Mapping[Key, Value],
        own: dict[tuple[int, int], Value],
    ) -> list[Value]:
        """The body on these inputs, with the gathered weights; the products of each group go into `own`."""
        jaxpr = scope.jaxpr
        env: dict[Var, Value] = dict(zip(jaxpr.all_invars, [*jaxpr.consts, *args], strict=True))

        def read(v: Any) -> Value:
            return v.val if isinstance(v, Literal) else held.get((id(scope), v), env[v])

        sums = {total.product: total for total in self.sums.values()}
        for index, eqn in enumerate(jaxpr.eqns):
            values = [read(v) for v in eqn.invars]
            with at_equation(eqn):
                if (child := _child(scope, index)) is not None:
                    outs = self._run(child, values, held, own)
                else:
                    outs = bind(eqn, values, eqn.params)
                if (total := sums.get((id(scope), index))) is not None:
                    own[total.product] = self._grouped(total, *values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _grouped(self, total: Sum, left: Value, right: Value) -> Value:
        """The product of the rows of each group of devices, [groups, ...], and its steps."""
        contracting, batch = total.eqn.params["dimension_numbers"]
        (ld, rd) = (dims[total.pair] for dims in contracting)
        numbers = (
            (_shifted(contracting[0], ld), _shifted(contracting[1], rd)),
            ([ld, *_shifted(batch[0], ld)], [rd, *_shifted(batch[1], rd)]),
        )
        kept = {k: total.eqn.params[k] for k in ("precision", "preferred_element_type")}
        x = jax.lax.dot_general(self._apart(left, ld), self._apart(right, rd), numbers, **kept)
        for eqn in total.steps:
            if eqn.primitive.name == "convert_element_type":
                x = x.astype(eqn.params["new_dtype"])
            elif eqn.primitive.name == "transpose":
                x = x.transpose(0, *(d + 1 for d in eqn.params["permutation"]))
        return self._laid(x, 0)

    def _apart(self, x: Value, d: int) -> Value:
        """A dimension as groups and what is in each."""
        return self._laid(
            x.reshape(*x.shape[:d], self.groups, x.shape[d] // self.groups, *x.shape[d + 1 :]), d
        )

    def _laid(self, x: Value, d: int) -> Value:
        """Each group's entry along a dimension on its devices; all else as it comes."""
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[d] = self.axes
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def _zeros(self, number: int) -> Value:
        v = self.scope.jaxpr.outvars[number]
        return self._laid(jnp.zeros((self.groups, *shape_of(v)), _dtype(v)), 0)

    def _added(self, number: int, start: Value, sums: Value) -> Value:
        """The groups' sums added up, in the dtype of the products, and to what the loop began with."""
        total = self.sums[number]
        made = _dtype(total.eqn.outvars[0])
        narrow = made if jnp.dtype(made).itemsize < sums.dtype.itemsize else sums.dtype
        x = jax.lax.reduce_sum(sums.astype(narrow), [0])
        for eqn in total.after:  # a sum that is to lie in parts is scattered at once
            (x,) = bind(eqn, [x], eqn.params)
        if total.after:  # one reader of the part: else each cuts its own from the whole
            x = jax.lax.optimization_barrier(x)
        return start + x.astype(sums.dtype)


def _child(scope: Scope, index: int) -> Scope | None:
    """The body of a call, which is run in its place."""
    eqn = scope.jaxpr.eqns[index]
    return scope.children.get((index, 0)) if eqn.primitive.name in CALLS else None


def _maker(scope: Scope, v: Any) -> JaxprEqn | None:
    index = scope.makers.get(v) if isinstance(v, Var) else None
    return None if index is None else scope.jaxpr.eqns[index]


def _results(scope: Scope) -> Iterator[Var]:
    for eqn in scope.jaxpr.eqns:
        yield from eqn.outvars
    for child in scope.children.values():
        yield from _results(child)


def _shifted(dims: Sequence[int], at: int) -> list[int]:
    """Where dimensions are when one more stands before dimension `at`."""
    return [d + (d >= at) for d in dims]


def _dtype(v: Any) -> Any:
    return v.aval.dtype
