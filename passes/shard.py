"""Lays a program out on a mesh: its inputs, outputs and optimizer state, its activations and its gradients.

    q = dot_general x wq            ->   q = dot_general x wq
                                         q' = sharding_constraint q [P('fsdp', None, 'tensor')]

The axes analysis says what every dimension is; rules, MaxText's by default, say which mesh axes each lies on; XLA's
partitioner does the rest. A dimension has a *logical name*: its role, and for activations `activation_` and its role,
refined as MaxText refines it (the embed of a norm's scale is `norm`, of an expert's weight `embed_moe`, the length of
the residual stream `activation_norm_length`). Constraints go where layouts are decided: on the results of the matrix
products, lookups and convolutions, on gradients where they are born, and on what loops carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.axes import Scope
from xform.context import Context, Leaf
from xform.errors import PlanError
from xform.higher_order import bodies, carries
from xform.inputs import ACTIVATION, Kind, kinds
from xform.plans.rules import MAXTEXT_RULES
from xform.report import Report
from xform.rewrite import Path, Site, rewrite
from xform.roles import Roles
from xform.trace import Jaxpr, Var

PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "gather"})
"""Operations whose result gets its layout from the rules, not from its operands."""

HEADS = frozenset({"heads", "kv_heads", "q_group"})

Rules = Mapping[str, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Options:

    rules: logical name -> mesh axes (a list), or alternatives to try in order (a list of lists). A name given here
        replaces MaxText's base rules for that name; the others stay.
    optimizer_axes: mesh axes that the optimizer's state is split over as well, on its first dimension that divides and
        is not on a tensor axis: ZeRO-1 with ["data"].
    gradient_axes: the same for gradients: ZeRO-2 with ["data"] in both.
    sequence_parallel: Megatron's: in the norm regions the length lies on the tensor axis, and embed does not.

    An axis that does not divide its dimension is dropped, and the report says so. Raises PlanError for a rule that
    names an axis the mesh lacks, or a name that no dimension of the program has.
    """

    rules: Rules = dataclasses.field(default_factory=dict)
    optimizer_axes: Sequence[str] = ()
    gradient_axes: Sequence[str] = ()
    sequence_parallel: bool = False

    stages: ClassVar[tuple[str, ...]] = ("step",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        layout = Layout(self, context.mesh, context.report)
        roles = context.roles(jaxpr)
        input_kinds = kinds(jaxpr, roles)
        self._lay_out_arguments(jaxpr, context, roles, layout, input_kinds)
        constraints = Constraints(roles, layout, _weights(jaxpr, roles, input_kinds))
        result = rewrite(jaxpr, constraints.rule, context.report, "shard")
        for what, count in sorted(constraints.placed.items()):
            context.report.did("shard", f"constrained {count} x {what}")
        layout.check_used()
        return result

    def _lay_out_arguments(
        self, jaxpr: Jaxpr, context: Context, roles: Roles, layout: Layout, input_kinds: Sequence[Kind]
    ) -> None:
        root = roles.axes.root
        whole, split = 0, 0
        for i, (var, leaf, kind) in enumerate(zip(jaxpr.invars, context.inputs, input_kinds, strict=True)):
            spec, reason = layout.of_value(roles, root, var, kind, leaf.path)
            context.in_shardings[i] = NamedSharding(context.mesh, spec)
            context.reasons[leaf.path] = f"{kind} {_signature(roles, root, var)}: {reason}"
            if kind != "data":
                size = _bytes(leaf.aval)
                split, whole = (split + size, whole) if _axes(spec) else (split, whole + size)
        if split + whole:
            context.report.did(
                "shard",
                f"laid out {len(jaxpr.invars)} inputs and {len(jaxpr.outvars)} outputs",
                f"{whole / (split + whole):.2%} of the state's bytes are on every device whole",
            )
        twins = _twins(context.inputs, context.outputs)
        for i, (var, twin) in enumerate(zip(jaxpr.outvars, twins, strict=True)):
            if twin is not None:
                context.out_shardings[i] = context.in_shardings[twin]
            elif isinstance(var, Var):
                spec, _ = layout.of_value(roles, root, var, "parameter", context.outputs[i].path)
                context.out_shardings[i] = NamedSharding(context.mesh, spec)
            else:
                context.out_shardings[i] = NamedSharding(context.mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class Named:
    """A dimension for the rules: its logical name, and how far it can be split (the size of its major factor)."""

    name: str
    size: int


class Layout:
    """Rules applied: logical names to a PartitionSpec."""

    def __init__(self, options: Shard, mesh: Mesh, report: Report) -> None:
        self.options, self.mesh, self.report = options, mesh, report
        self.sizes = dict(mesh.shape)
        self.rules: dict[str, list[tuple[str, ...]]] = {}
        for name, axes in MAXTEXT_RULES:
            self.rules.setdefault(name, []).append(tuple(axes))
        if options.sequence_parallel:
            for name in ("activation_norm_length", "activation_norm_length_moe"):
                self.rules[name] = [("tensor", *axes) for axes in self.rules.get(name, [()])]
            self.rules["activation_embed"] = []
        self._given = {name: _alternatives(name, value) for name, value in options.rules.items()}
        self._used: set[str] = set()
        self._met: set[str] = set()
        for name, alternatives in self._given.items():
            for axis in {a for axes in alternatives for a in axes}:
                self._check_axis(f"rule {name!r}", axis)
            self.rules[name] = alternatives
        for option in ("optimizer_axes", "gradient_axes"):
            for axis in getattr(options, option):
                self._check_axis(option, axis)

    def _check_axis(self, who: str, axis: str) -> None:
        if axis not in self.sizes:
            raise PlanError(
                f"shard: {who} names the mesh axis {axis!r}; the mesh has {', '.join(self.sizes) or 'no axes'}."
                " Add the axis to [mesh] or take it out of the rule"
            )

    def check_used(self) -> None:
        """Raises PlanError for a given rule whose name no dimension has; notes a mesh axis nothing lies on."""
        for name in self._given:
            if name not in self._met:
                raise PlanError(
                    f"shard: the rule {name!r} matches nothing in this program; its dimensions are called"
                    f" {', '.join(sorted(self._met))}"
                )
        for axis, size in self.sizes.items():
            if size > 1 and axis not in self._used:
                self.report.declined(
                    "shard",
                    f"mesh axis {axis}",
                    "nothing in this program lies on it: every device along it does the same work",
                )

    def spec(self, dims: Sequence[Named | None], where: str, open_dropped: bool) -> tuple[PartitionSpec, str]:
        """The spec of a value, and why. A dimension with no name (or, if open_dropped, one whose axis did not divide)
        is left to the partitioner in activations."""
        used: set[str] = set()
        entries: list[Any] = []
        why = []
        for dim in dims:
            entry: Any = PartitionSpec.UNCONSTRAINED if dim is None and open_dropped else None
            if dim is not None:
                self._met.add(dim.name)
                axes, dropped = self._axes_for(dim, used, where)
                if axes:
                    used.update(axes)
                    entry = axes[0] if len(axes) == 1 else axes
                    why.append(f"{dim.name} -> {','.join(axes)}")
                elif dropped:
                    why.append(f"{dim.name} ({dim.size}) does not divide by {dropped}")
                    entry = PartitionSpec.UNCONSTRAINED if open_dropped else None
                else:
                    why.append(f"{dim.name} whole")
            entries.append(entry)
        self._used |= used
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries), ", ".join(why) or "whole"

    def _axes_for(self, dim: Named, used: set[str], where: str) -> tuple[tuple[str, ...], str]:
        """The mesh axes of one dimension: the first rule of its name whose axes are all free, less what cannot divide."""
        for axes in self.rules.get(dim.name, []):
            present = [a for a in axes if self.sizes.get(a, 1) > 1]
            if not present or any(a in used for a in present):
                continue
            kept, dropped, parts = [], [], 1
            for axis in present:
                if dim.size % (parts * self.sizes[axis]) == 0:
                    kept.append(axis)
                    parts *= self.sizes[axis]
                else:
                    dropped.append(f"{axis}={self.sizes[axis]}")
            if dropped:
                self.report.dropped(
                    "shard", f"{', '.join(dropped)} for {dim.name}", f"{dim.size} does not divide", where
                )
            return tuple(kept), ", ".join(dropped)
        return (), ""

    def of_value(
        self, roles: Roles, scope: Scope, var: Var, kind: Kind, where: str
    ) -> tuple[PartitionSpec, str]:
        """The layout of an input or output."""
        names = logical_names(roles, scope, var)
        spec, why = self.spec(names, where, open_dropped=False)
        if kind == "optimizer" and self.options.optimizer_axes:
            spec, more = self.spread(spec, var.aval.shape, self.options.optimizer_axes)
            why += more
        return spec, why

    def gradient_spec(self, names: Sequence[Named | None], shape: Sequence[int], where: str) -> PartitionSpec:
        spec, _ = self.spec(names, where, open_dropped=False)
        if self.options.gradient_axes:
            spec, _ = self.spread(spec, shape, self.options.gradient_axes)
        return spec

    def spread(self, spec: PartitionSpec, shape: Sequence[int], axes: Sequence[str]) -> tuple[PartitionSpec, str]:
        """`spec` with further mesh axes on the first dimension that divides and is on no tensor axis."""
        entries: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
        free = [a for a in axes if self.sizes[a] > 1 and a not in _axes(spec)]
        extra = 1
        for axis in free:
            extra *= self.sizes[axis]
        if extra == 1:
            return spec, ""
        for i, size in enumerate(shape):
            have = _entry_axes(entries[i])
            parts = extra
            for axis in have:
                parts *= self.sizes[axis]
            if size % parts == 0 and not any(a.startswith("tensor") for a in have):
                entries[i] = (*have, *free) if have or len(free) > 1 else free[0]
                self._used.update(free)
                return PartitionSpec(*entries), f", dimension {i} also -> {','.join(free)}"
        if shape:
            self.report.dropped(
                "shard", ", ".join(free), f"no dimension of {tuple(shape)} divides by {extra} beside {spec}"
            )
        return spec, ""


class Constraints:
    """The rule that inserts sharding constraints. Counts what it placed, by what it was."""

    def __init__(self, roles: Roles, layout: Layout, weights: frozenset[Any]) -> None:
        self.roles, self.layout, self.weights = roles, layout, weights
        self.placed: dict[str, int] = {}
        self._carried: dict[tuple[Path, int], frozenset[Var]] = {}
        self._scopes: dict[Path, Scope] = {}

    def rule(self, site: Site) -> list[Any] | None:
        if not site.eqn.outvars or any(number < 0 for _, number in site.path) or _manual(site):
            return None
        self._note_carries(site)
        scope = self._scope(site.path)
        carried = self._carried.get((site.path[:-1], site.path[-1][0]), frozenset()) if site.path else frozenset()
        specs = [self._spec(site, scope, var, carried) for var in site.eqn.outvars]
        if not any(specs):
            return None
        if bodies(site.eqn):
            return None
        outs = site.bind()
        return [
            x if s is None else jax.lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh, s))
            for x, s in zip(outs, specs, strict=True)
        ]

    def _scope(self, path: Path) -> Scope:
        scope = self._scopes.get(path)
        if scope is None:
            scope = self._scopes[path] = self.roles.axes.scope(path)
        return scope

    def _note_carries(self, site: Site) -> None:
        """Before a loop's body is walked: which of its variables the next turn starts from."""
        for number, body in enumerate(bodies(site.eqn)):
            found = carries(site.eqn, number)
            if found:
                outs = frozenset(v for o in found if isinstance(v := body.outvars[o], Var))
                self._carried[(site.path, site.index)] = outs

    def _spec(self, site: Site, scope: Scope, var: Var, carried: frozenset[Var]) -> PartitionSpec | None:
        shape = getattr(var.aval, "shape", ())
        if not shape:
            return None
        product = site.name in PRODUCTS
        birth = not product and self._loses_batch(site, scope)
        if not (product or birth or var in carried):
            return None
        names = logical_names(self.roles, scope, var)
        dims = self.roles.of(scope, var)
        flat = [role for dim in dims for role in dim]
        if any(role in ACTIVATION for role in flat):
            if sum(role in ("length", "kv_length") for role in flat) > 1 or "batch" not in flat:
                return None  # Attention's own scores follow from q and k; masks from positions.
            spec, _ = self.layout.spec(names, site.line, open_dropped=True)
            what = "activation"
        else:
            if frozenset(flat) not in self.weights:
                return None
            spec, what = self.layout.gradient_spec(names, shape, site.line), "gradient"
        if not _axes(spec):
            return None
        if var in carried and not product:
            what = f"carried {what}"
        key = f"{what} [{', '.join('.'.join(d) or '1' for d in dims)}] {spec}"
        self.placed[key] = self.placed.get(key, 0) + 1
        return spec

    def _loses_batch(self, site: Site, scope: Scope) -> bool:
        """Whether the operation sums or scatters over the batch: the place where a gradient is born."""
        if not (site.name.startswith("scatter") or site.name == "reduce_sum"):
            return False

        def active(var: Any) -> bool:
            return isinstance(var, Var) and "batch" in {r for d in self.roles.of(scope, var) for r in d}

        return any(active(v) for v in site.eqn.invars) and not any(active(v) for v in site.eqn.outvars)


# ---------------------------------------------------------------- roles to logical names


def logical_names(roles: Roles, scope: Scope, var: Var) -> list[Named | None]:
    """MaxText's logical name of each dimension of a value; None where its role has none."""
    dims = roles.of(scope, var)
    factors = scope[var]
    flat = {role for dim in dims for role in dim}
    active = bool(flat & ACTIVATION)
    found: list[Named | None] = []
    for dim, parts in zip(dims, factors, strict=True):
        if not dim:
            found.append(None)
            continue
        role, size = dim[0], parts[0].size
        if role in HEADS:
            role, size = _heads(dim, parts)
        name = _activation_name(role, flat) if active else _weight_name(role, flat, len(dims))
        found.append(Named(name, size))
    return found


def _heads(dim: Sequence[str], parts: Sequence[Any]) -> tuple[str, int]:
    """kv_heads·q_group together are the query heads."""
    size, count = 1, 0
    for role, part in zip(dim, parts, strict=True):
        if role not in HEADS:
            break
        size *= part.size
        count += 1
    return ("heads" if count > 1 else dim[0]), size


def _weight_name(role: str, flat: set[str], rank: int) -> str:
    moe = "experts" in flat
    match role:
        case "embed" if rank == 1 or flat == {"embed", "layers"}:
            return "norm"
        case "embed" if moe:
            return "embed_moe" if "mlp" in flat else "embed_router"
        case "embed" if flat & HEADS:
            return "embed_attn"
        case "embed" if "vocab" in flat:
            return "embed_vocab"
        case "mlp" if moe:
            return "mlp_moe"
        case "experts":
            return "exp"
        case "head_dim":
            return "kv_head_dim"
    return role


def _activation_name(role: str, flat: set[str]) -> str:
    match role:
        case "batch" if "vocab" in flat or "embed" in flat or flat <= ACTIVATION:
            return "activation_embed_and_logits_batch" if "vocab" in flat else "activation_batch"
        case "length" if "embed" in flat:
            return "activation_norm_length"
        case "experts":
            return "activation_exp"
        case "head_dim":
            return "activation_kv_head_dim"
    return f"activation_{role}"


def _signature(roles: Roles, scope: Scope, var: Var) -> str:
    return " x ".join("·".join(dim) or "1" for dim in roles.of(scope, var)) or "scalar"


# ---------------------------------------------------------------- small helpers


def _weights(jaxpr: Jaxpr, roles: Roles, input_kinds: Sequence[Kind]) -> frozenset[Any]:
    """The sets of roles that parameters have, with and without a layers axis: what a gradient can look like."""
    found = set()
    for var, kind in zip(jaxpr.invars, input_kinds, strict=True):
        if kind == "parameter":
            flat = frozenset(r for d in roles.of(roles.axes.root, var) for r in d)
            found |= {flat, flat - {"layers"}}
    return frozenset(found - {frozenset()})


def _manual(site: Site) -> bool:
    """Inside somebody's own shard_map, layouts are somebody's own affair."""
    return bool(getattr(site.eqn.ctx.cur_abstract_mesh, "manual_axes", ()))


def _alternatives(name: str, value: Any) -> list[tuple[str, ...]]:
    if isinstance(value, str):
        return [(value,)]
    items = list(value)
    if all(isinstance(i, str) for i in items):
        return [tuple(items)] if items else []
    if any(isinstance(i, str) for i in items):
        raise PlanError(f"shard: rule {name!r} mixes axes and lists of axes; write [[a, b], [c]]")
    return [tuple(i) for i in items]


def _twins(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> list[int | None]:
    """For each output the input it is the next value of: of the same type, with the longest common end of its path."""
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


def _entry_axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(a for entry in spec for a in _entry_axes(entry))


def _bytes(aval: Any) -> int:
    size = getattr(aval.dtype, "itemsize", 0)
    for n in aval.shape:
        size *= n
    return size
