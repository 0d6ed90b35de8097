"""Lays a program out on a mesh: its inputs, outputs and optimizer state, its activations and its gradients.

    q = dot_general x wq            ->   q = dot_general x wq
                                         q' = sharding_constraint q [P('fsdp', None, 'tensor')]

The axes analysis says what every dimension is; rules, MaxText's by default, say which mesh axes each lies on;
XLA's partitioner does the rest. A dimension has a *logical name*: its role, and for activations `activation_`
and its role, refined as MaxText refines it (the embed of a norm's scale is `norm`, of an expert's weight
`embed_moe`, the length of the residual stream `activation_norm_length`). Constraints go where layouts are
decided: on the results of the matrix products, lookups and convolutions, on gradients where they are born,
and on what loops carry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from xform.axes import Scope
from xform.context import Context, Leaf
from xform.higher_order import bodies, carries
from xform.inputs import Kind, kinds
from xform.layout import Layout, alternatives, spec_axes
from xform.logical import LENGTHS, logical_names
from xform.plans.rules import MAXTEXT_RULES
from xform.rewrite import Path, Site, rewrite
from xform.roles import Roles
from xform.trace import DropVar, Jaxpr, Literal, Var, shape_of

PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
"""Operations whose result gets its layout from the rules, not from its operands. A lookup in a table is one
more.
"""

SEQUENCE_PARALLEL = ("activation_norm_length", "activation_norm_length_moe")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Options:

    rules: logical name -> mesh axes (a list), or alternatives to try in order (a list of lists). A name given
    here
        replaces MaxText's base rules for that name; the others stay.
    optimizer_axes: mesh axes that the optimizer's state is split over as well, on its first dimension that
    divides and
        is not on a tensor axis: ZeRO-1 with ["data"].
    gradient_axes: the same for gradients: ZeRO-2 with ["data"] in both.
    sequence_parallel: Megatron's: in the norm regions the length lies on the tensor axis, and embed does not
        (Korthikanti et al. 2022).
    strict: a rule whose name no dimension of the program has is an error; else it is reported.

    An axis that does not divide its dimension is dropped, and the report says so. Raises PlanError for a rule
    that names an axis the mesh lacks, or, when strict, one that matches nothing.
    """

    rules: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    optimizer_axes: Sequence[str] = ()
    gradient_axes: Sequence[str] = ()
    sequence_parallel: bool = False
    strict: bool = True

    stages: ClassVar[tuple[str, ...]] = ("step",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        layout = self._layout(context)
        roles = context.roles(jaxpr)
        input_kinds = kinds(jaxpr, roles)
        self._lay_out_arguments(jaxpr, context, roles, layout, input_kinds)
        constraints = _Constraints(self, context, roles, layout, _weights(jaxpr, roles, input_kinds))
        result = rewrite(jaxpr, constraints.rule, context.report, "shard")
        for what, count in sorted(constraints.placed.items()):
            context.report.did("shard", f"constrained {count} x {what}")
        layout.check_used(self.strict)
        return result

    def _layout(self, context: Context) -> Layout:
        rules: dict[str, list[tuple[str, ...]]] = {}
        for name, axes in MAXTEXT_RULES:
            rules.setdefault(name, []).append(tuple(axes))
        if self.sequence_parallel:
            rules |= {n: [("tensor", *axes) for axes in rules.get(n) or [()]] for n in SEQUENCE_PARALLEL}
            rules["activation_embed"] = []
        given = {name: alternatives(name, value) for name, value in self.rules.items()}
        layout = Layout(context.mesh, rules, given, context.report)
        if self.sequence_parallel:
            layout.check_axis("sequence_parallel", "tensor")
        for option in ("optimizer_axes", "gradient_axes"):
            for axis in getattr(self, option):
                layout.check_axis(option, axis)
        return layout

    def _lay_out_arguments(
        self, jaxpr: Jaxpr, context: Context, roles: Roles, layout: Layout, input_kinds: Sequence[Kind]
    ) -> None:
        """Writes the layout of every input and output into the context, with its reason."""
        root = roles.axes.root
        whole = total = 0
        for i, (var, leaf, kind) in enumerate(zip(jaxpr.invars, context.inputs, input_kinds, strict=True)):
            names = logical_names(roles, root, var)
            spec, why = layout.spec(names, leaf.path)
            if kind == "optimizer":
                spec, more = layout.spread(spec, names, shape_of(var), self.optimizer_axes, leaf.path)
                why += more
            context.in_shardings[i] = NamedSharding(context.mesh, spec)
            context.reasons[leaf.path] = f"{kind}, {_spelled(roles, root, var)}: {why}"
            if kind != "data":
                total += _bytes(leaf.aval)
                whole += 0 if spec_axes(spec) else _bytes(leaf.aval)
        if total:
            context.report.did(
                "shard",
                f"laid out {len(jaxpr.invars)} inputs and {len(jaxpr.outvars)} outputs",
                f"{whole / total:.2%} of the state's bytes lie whole on every device",
            )
        for i, (out, twin) in enumerate(
            zip(jaxpr.outvars, _twins(context.inputs, context.outputs), strict=True)
        ):
            spec = PartitionSpec()
            if twin is not None and context.in_shardings[twin] is not None:
                context.out_shardings[i] = context.in_shardings[twin]
                continue
            if not isinstance(out, Literal):
                spec, _ = layout.spec(logical_names(roles, root, out), context.outputs[i].path)
            context.out_shardings[i] = NamedSharding(context.mesh, spec)


class _Constraints:
    """The rule that inserts sharding constraints. Counts what it placed, by what it was."""

    def __init__(
        self,
        options: Shard,
        context: Context,
        roles: Roles,
        layout: Layout,
        weights: frozenset[frozenset[str]],
    ) -> None:
        self.options, self.mesh = options, context.mesh
        self.roles, self.layout, self.weights = roles, layout, weights
        self.placed: dict[str, int] = {}
        self._carried: dict[tuple[Path, int, int], frozenset[Var]] = {}
        self._scopes: dict[Path, Scope] = {}

    def rule(self, site: Site) -> list[Any] | None:
        if any(number < 0 for _, number in site.path) or _manual(site):
            return None  # A custom rule that no analysis has seen; somebody's own shard_map.
        if bodies(site.eqn):
            self._note_carries(site)
            return None
        specs = [self._spec(site, var) for var in site.eqn.outvars]
        if not any(specs):
            return None
        return [
            x if s is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, s))
            for x, s in zip(site.bind(), specs, strict=True)
        ]

    def _note_carries(self, site: Site) -> None:
        """Before a loop's body is walked: which of its variables the next turn starts from."""
        for number, body in enumerate(bodies(site.eqn)):
            outs = frozenset(v for o in carries(site.eqn, number) if isinstance(v := body.outvars[o], Var))
            if outs:
                self._carried[site.path, site.index, number] = outs

    def _is_carried(self, site: Site, var: Var) -> bool:
        if not site.path:
            return False
        *outer, (index, number) = site.path
        return var in self._carried.get((tuple(outer), index, number), ())

    def _scope(self, path: Path) -> Scope:
        scope = self._scopes.get(path)
        if scope is None:
            scope = self._scopes[path] = self.roles.axes.scope(path)
        return scope

    def _spec(self, site: Site, var: Var) -> PartitionSpec | None:
        """The constraint on one result of an operation; None where its layout is not decided here."""
        if not shape_of(var) or isinstance(var, DropVar):
            return None
        carried = self._is_carried(site, var)
        product = site.name in PRODUCTS
        if not (product or carried or site.name == "gather" or _sums(site)):
            return None
        scope = self._scope(site.path)
        roles = [role for dim in self.roles.of(scope, var) for role in dim]
        names = logical_names(self.roles, scope, var)
        if "batch" in roles:
            if not (product or carried or (site.name == "gather" and "embed" in roles)):
                return None
            if sum(role in LENGTHS for role in roles) > 1:
                return None  # Attention's scores follow their q and k.
            spec, what = self.layout.spec(names, site.line, partial=True)[0], "activation"
        elif frozenset(roles) in self.weights and (product or carried or self._loses_batch(site, scope)):
            spec, what = self.layout.spec(names, site.line)[0], "gradient"
            spec, _ = self.layout.spread(spec, names, shape_of(var), self.options.gradient_axes, site.line)
        else:
            return None
        if not spec_axes(spec):
            return None
        kind = f"carried {what}" if carried and not product else what
        key = f"{kind} [{_spelled(self.roles, scope, var)}] {spec}"
        self.placed[key] = self.placed.get(key, 0) + 1
        return spec

    def _loses_batch(self, site: Site, scope: Scope) -> bool:
        """Whether the operation sums over the batch: where a gradient is born."""
        return any(
            not isinstance(v, Literal) and any("batch" in dim for dim in self.roles.of(scope, v))
            for v in site.eqn.invars
        )


def _sums(site: Site) -> bool:
    """Operations other than products that sum over the batch: a bias's or a scale's gradient, a table's."""
    return site.name == "reduce_sum" or site.name.startswith("scatter")


def _manual(site: Site) -> bool:
    """Inside somebody's own shard_map, layouts are somebody's own affair."""
    return bool(getattr(site.eqn.ctx.cur_abstract_mesh, "manual_axes", ()))


def _weights(jaxpr: Jaxpr, roles: Roles, input_kinds: Sequence[Kind]) -> frozenset[frozenset[str]]:
    """The sets of roles that parameters have, with and without a layers axis: what a gradient can look
    like.
    """
    found: set[frozenset[str]] = set()
    for var, kind in zip(jaxpr.invars, input_kinds, strict=True):
        if kind == "parameter":
            flat = frozenset(r for dim in roles.of(roles.axes.root, var) for r in dim)
            found |= {flat, flat - {"layers"}}
    return frozenset(found - {frozenset()})


def _spelled(roles: Roles, scope: Scope, var: Var) -> str:
    return " x ".join("·".join(dim) or "1" for dim in roles.of(scope, var)) or "scalar"


def _twins(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> list[int | None]:
    """For each output the input it is the next value of: of the same type, with the longest common end of its
    path.
    """
    by_type: dict[Any, list[int]] = {}
    for i, leaf in enumerate(inputs):
        by_type.setdefault((leaf.aval.shape, leaf.aval.dtype), []).append(i)
    found: list[int | None] = []
    for leaf in outputs:
        same = by_type.get((getattr(leaf.aval, "shape", None), getattr(leaf.aval, "dtype", None)), [])
        best = max(same, key=lambda i: _common_end(inputs[i].path, leaf.path), default=None)
        found.append(best if best is not None and _common_end(inputs[best].path, leaf.path) > 1 else None)
    return found


def _common_end(a: str, b: str) -> int:
    count = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        count += 1
    return count


def _bytes(aval: Any) -> int:
    return int(getattr(aval.dtype, "itemsize", 0)) * math.prod(aval.shape)
