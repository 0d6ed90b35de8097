"""Gives operations that stand alone a manual region each: a kernel cannot be partitioned by the compiler, nor
can an operation that sends things itself.

    o, lse = operation[attention] q k v  ->  o, lse = shard_map operation[attention] q k v
                                                      over the axes that its operands lie on

Where collectives are written out there is one region for all, and nothing is left to be done here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from xform.axes import Scope
from xform.context import Context
from xform.higher_order import equations, manual_axes
from xform.ops import Operation, apply, operation_of
from xform.ops.operation import on_parts, shared_of, sums_of, terms_of, told_of
from xform.rewrite import Site, rewrite
from xform.roles import Roles
from xform.roles.logical import logical_names
from xform.sharding.layout import entry_axes
from xform.trace import Jaxpr, JaxprEqn, Value, Var, shape_of

NOWHERE = PartitionSpec()


def written(jaxpr: Jaxpr, context: Context, who: str, mine: Callable[[Operation], bool]) -> Jaxpr:
    """The program with every operation that is outside of a manual region in one; itself where there is
    none. who: the pass, for the report. mine: which operations it is for.
    """
    if context.mesh.size == 1 or not any(_stands_alone(eqn, mine) for eqn in equations(jaxpr)):
        return jaxpr
    roles = context.roles(jaxpr) if context.spec else None

    def rule(site: Site) -> Sequence[Value] | None:
        op = operation_of(site.eqn)
        if op is None or not _stands_alone(site.eqn, mine):
            return None
        inside = manual_axes(jaxpr, site.path)  # the stages of a pipeline, say
        axes: dict[str, tuple[str, ...]] = {}
        scattered: Sequence[PartitionSpec] = [PartitionSpec()] * len(op.results)
        if roles is not None:
            scope = roles.axes.scope(site.path)
            axes = _axes(op, site, roles, scope, context)
            axes = {c: tuple(a for a in over if a not in inside) for c, over in axes.items()}
            scattered = [
                _scattered(dims, var, terms_of(op, number, axes), axes, roles, scope, context)
                for number, (dims, var) in enumerate(zip(op.results, site.eqn.outvars, strict=True))
            ]
        over = ", ".join(f"{c} over {','.join(a)}" for c, a in axes.items() if a)
        context.report.did(who, f"{op.name} in a shard_map of its own", over or "whole on every device")
        return _region(op, axes, scattered, context, inside)(*site.args)

    return rewrite(jaxpr, rule, context.report, who)


def _stands_alone(eqn: JaxprEqn, mine: Callable[[Operation], bool]) -> bool:
    op = operation_of(eqn)
    return op is not None and mine(op) and not getattr(eqn.ctx.cur_abstract_mesh, "manual_axes", ())


def _region(
    op: Operation,
    axes: Mapping[str, tuple[str, ...]],
    scattered: Sequence[PartitionSpec],
    context: Context,
    inside: frozenset[str],
) -> Callable[..., list[Value]]:
    """The operation in a shard_map over the axes of its dimensions; what it gives as terms of a sum is added
    up there, and where the sum is to lie over the axes of its terms, `scattered` says so. inside: axes of
    manual regions that it stands in, which are not for it.
    """

    def spec(dims: str, more: PartitionSpec = NOWHERE) -> PartitionSpec:
        rest = [*more, *[None] * (len(dims) - len(more))]
        return PartitionSpec(
            *((*axes.get(c, ()), *entry_axes(e)) or None for c, e in zip(dims, rest, strict=True))
        )

    def run(*args: Value) -> list[Value]:
        return [
            _summed(x, terms_of(op, number, axes), scattered[number])
            for number, x in enumerate(apply(on_parts(op, axes), *args))
        ]

    mesh = context.mesh.abstract_mesh.update_axis_types(dict.fromkeys(inside, AxisType.Manual))
    region: Callable[..., Any] = jax.shard_map(
        run,
        mesh=mesh if inside else context.mesh,
        axis_names=set(context.mesh.axis_names) - inside,
        in_specs=tuple(map(spec, op.operands)),
        out_specs=[spec(dims, more) for dims, more in zip(op.results, scattered, strict=True)],
        check_vma=False,
    )

    def within(*args: Value) -> list[Value]:
        with jax.sharding.use_abstract_mesh(mesh):
            return list(region(*args))

    return within if inside else lambda *args: list(region(*args))


def _summed(x: Value, axes: Sequence[str], spec: PartitionSpec) -> Value:
    """The sum over mesh axes of the terms that devices hold, scattered over those that `spec` names."""
    parts = [(dim, a) for dim, entry in enumerate(spec) for a in entry_axes(entry)]
    for dim, a in parts:
        x = jax.lax.psum_scatter(x, a, scatter_dimension=dim, tiled=True)
    rest = tuple(a for a in axes if a not in {a for _, a in parts})
    return jax.lax.psum(x, rest) if rest else x


def _scattered(
    dims: str,
    var: Any,
    terms: Sequence[str],
    axes: Mapping[str, tuple[str, ...]],
    roles: Roles,
    scope: Scope,
    context: Context,
) -> PartitionSpec:
    """Of the axes that a result is terms over, those that its dimensions are to lie on, which are whole."""
    entries: list[tuple[str, ...]] = []
    wanted = _entries(roles, scope, var, context) if terms else [()] * len(dims)
    for c, size, entry in zip(dims, shape_of(var), wanted, strict=True):
        own = () if axes.get(c) or not set(entry) <= set(terms) else entry
        entries.append(own if size % math.prod(context.mesh.shape[a] for a in own) == 0 else ())
    return PartitionSpec(*(entry or None for entry in entries))


def _entries(roles: Roles, scope: Scope, var: Var, context: Context) -> list[tuple[str, ...]]:
    """The mesh axes that each dimension of a value is to lie on, by what it is."""
    assert context.spec is not None
    spec = context.spec(logical_names(roles, scope, var))
    entries = [*spec, *[None] * (len(shape_of(var)) - len(spec))]
    return [() if e is PartitionSpec.UNCONSTRAINED else entry_axes(e) for e in entries]


def _axes(op: Any, site: Site, roles: Roles, scope: Scope, context: Context) -> dict[str, tuple[str, ...]]:
    """The mesh axes of the dimensions along which an operation may be cut, by the layouts of what it gives
    and takes.
    """
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    layouts = [
        (c, size, entry)
        for dims, var in (
            *zip(op.results, site.eqn.outvars, strict=True),
            *zip(op.operands, site.eqn.invars, strict=True),
        )
        if isinstance(var, Var)
        for c, size, entry in zip(dims, shape_of(var), _entries(roles, scope, var, context), strict=True)
    ]
    lies = tuple(a for a in getattr(op, "lies", ()) if a in context.mesh.shape)
    for c, size, _ in layouts:
        if lies and c in told_of(op) and size % math.prod(context.mesh.shape[a] for a in lies) == 0:
            found[c], taken = lies, set(lies)
    if lies and (shared := shared_of(op)) is not None and shared[1] in found:
        rows, _, outer, _ = shared
        over = next((entry for c, _, entry in layouts if c == rows and entry), ())
        before = _before(over, lies, outer, context)
        found[rows] = (*before, *lies)
        taken |= set(before)
    # What an operation is told of it is made to be cut along: it comes before the dimensions of other values.
    for letters in (told_of(op), op.cut + sums_of(op)):
        for c, size, entry in layouts:
            axes = tuple(a for a in entry if a not in taken)
            if c not in letters or c in found or not axes:
                continue
            if size % math.prod(context.mesh.shape[a] for a in axes) == 0:
                found[c] = axes
                taken |= set(axes)
    return found


def _before(axes: Sequence[str], lies: Sequence[str], outer: int, context: Context) -> tuple[str, ...]:
    """Of the axes that rows lie over, those further out than the axes that they share with blocks."""
    found = tuple(a for a in axes if a not in lies)
    return found if math.prod(context.mesh.shape[a] for a in found) == outer else ()
