"""Lays a program out on a mesh: its inputs, outputs and optimizer state, its activations and its gradients.

    q = dot_general x wq            ->   q = dot_general x wq
                                         q' = sharding_constraint q [P('fsdp', None, 'tensor')]

The axes analysis says what every dimension is; rules, MaxText's by default, say which mesh axes each lies on;
XLA's partitioner does the rest. A dimension has a *logical name*: its role, and for activations `activation_`
and its role, refined as MaxText refines it (the embed of a norm's scale is `norm`, of an expert's weight
`embed_moe`, the length of the residual stream `activation_norm_length`). Constraints go where layouts are
decided (`constraints`): on the results of matrix products, lookups and convolutions, on gradients where they
are born, and on what loops carry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xform.context import Context
from xform.errors import Decline, PlanError
from xform.higher_order import manual_axes
from xform.plans.rules import MAXTEXT_RULES
from xform.report import Report, amount
from xform.rewrite import Site, rewrite
from xform.roles import Roles
from xform.roles.inputs import Kind, kinds
from xform.roles.logical import Named, logical_names
from xform.sharding.constraints import Places, spelled
from xform.sharding.layout import Layout, alternatives, entry_axes, spec_axes
from xform.sharding.twins import of_same_end, twins
from xform.spmd.values import Options
from xform.spmd.written import written
from xform.trace import Jaxpr, Var, shape_of

STAGES = ("layers", "activation_stage")
VOCABULARY = ("vocab", "activation_vocab")
SEQUENCE_PARALLEL = ("activation_norm_length", "activation_norm_length_moe")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Options:

    rules: logical name -> mesh axes (a list), or alternatives to try in order (a list of lists). A name given
        here replaces MaxText's base rules for that name; the others stay.
    optimizer_axes: mesh axes that the optimizer's state is split over as well, on its first dimension that
        divides and is not on a tensor axis: ZeRO-1 with ["data"]. Collectives that are written out scatter
        gradients so where they are born.
    gradient_axes: the same for gradients: ZeRO-2 with ["data"] in both.
    sequence_parallel: Megatron's: in the norm regions the length lies on the tensor axis, and embed does not
        (Korthikanti et al. 2022).
    collectives: "auto" leaves them to the compiler, which partitions by the constraints; "explicit" writes
        them out in one manual region, in stages along the torus. By default the one that sends fewer bytes
        by prediction, where the devices' links are known (TPU).
    automatic: mesh axes that explicit collectives leave to the compiler.
    gradient_dtype: in which gradients are summed over the batch's axes, where collectives are written out; a
        wider one than theirs rounds once, after the sum. By default the dtype they are computed in.
    gather: with explicit collectives, weights that lie in parts over the batch's axes come together for a
        "layer" at a time, in each pass and microbatch anew, or once for the whole "step".
    overlap: for loops over layers, of explicit collectives. "prefetch": the next layer's weights come
        together, and the last one's gradients are scattered, while a layer runs, for the memory of both.
        "permute": gathers and scatters are rings of permutes, which v5p and v6e start on their own, as they
        do no other collective.
    strict: a rule whose name no dimension of the program has is an error; else it is reported.

    An axis that does not divide its dimension is dropped, and the report says so. Raises PlanError for a rule
    that names an axis the mesh lacks, or, when strict, one that matches nothing.
    """

    rules: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    optimizer_axes: Sequence[str] = ()
    gradient_axes: Sequence[str] = ()
    sequence_parallel: bool = False
    strict: bool = True
    collectives: Literal["auto", "explicit"] | None = None
    automatic: Sequence[str] = ()
    gradient_dtype: Literal["float32", "bfloat16"] | None = None
    gather: Literal["layer", "step"] = "layer"
    overlap: Sequence[Literal["prefetch", "permute"]] = ()

    stages: ClassVar[tuple[str, ...]] = ("step",)
    after: ClassVar[tuple[str, ...]] = ("narrow", "pipeline")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        layout = self._layout(context)
        if own := _in_types(jaxpr):
            why = f"its arrays' types say where they lie (Explicit mesh axes {', '.join(own)})"
            context.report.declined("shard", "the program", f"{why}; use Auto axes to leave that to a plan")
            return jaxpr
        roles = context.roles(jaxpr)
        context.kinds = input_kinds = kinds(jaxpr, roles, len(context.kept))
        self._lay_out_arguments(jaxpr, context, roles, layout, input_kinds)
        spread = self.gradient_axes or (self.optimizer_axes if self._is_explicit(context) else ())
        places = Places(roles, layout, _weights(jaxpr, roles, input_kinds), spread)
        found = places.find()
        for what, count in sorted(places.placed.items()):
            context.report.did("shard", f"constrained {count} x {what}")
        layout.check_used(self.strict)
        context.spec = lambda dims: layout.spec(dims, "")[0]

        def constrain(site: Site) -> list[Any] | None:
            specs = found.get(site.path, {}).get(site.index)
            if specs is None:
                return None
            inside = manual_axes(jaxpr, site.path)
            return [
                x if s is None else jax.lax.with_sharding_constraint(x, _there(context.mesh, s, inside))
                for x, s in zip(site.bind(), specs, strict=True)
            ]

        return rewrite(jaxpr, constrain, context.report, "shard") if found else jaxpr

    def _is_explicit(self, context: Context) -> bool:
        """Whether collectives may be written out. Then gradients are scattered as the optimizer's state lies:
        a sum over all devices first, of which each takes its part, would send twice the bytes.
        """
        known = context.mesh.devices.flat[0].platform == "tpu"
        return self.collectives == "explicit" or (self.collectives is None and known)

    def finish(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """After all other passes: the program in one manual region, its collectives written out."""
        made = self._written_out(jaxpr, context)
        if made is jaxpr and context.mesh.size > 1:
            why = "collectives are left to the compiler; take collectives = 'explicit'"
            if self.gradient_dtype is not None:
                context.report.declined("shard", f"gradients summed in {self.gradient_dtype}", why)
            if self.gather != "layer":
                context.report.declined("shard", "weights gathered once a step", why)
            if self.overlap:
                context.report.declined("shard", f"overlap by {' and '.join(self.overlap)}", why)
        return made

    def _written_out(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        mesh, report = context.mesh, context.report
        for axis in self.automatic:
            if axis not in mesh.shape:
                raise PlanError(
                    f"shard: automatic names the mesh axis {axis!r}; the mesh has {', '.join(mesh.shape)}"
                )
        manual = [a for a, n in mesh.shape.items() if n > 1 and a not in self.automatic]
        if self.collectives == "auto" or not manual or not context.kinds:
            return jaxpr
        if not self._is_explicit(context):
            report.did("shard", "collectives are the compiler's", "nothing is known of these devices' links")
            return jaxpr
        notes = Report()
        try:
            options = Options(self.gradient_dtype, tuple(self.overlap), self.gather)
            found = written(jaxpr, context, manual, options, notes)
        except Decline as why:
            if self.collectives == "explicit":
                raise PlanError(f"shard: collectives = 'explicit' cannot be: {why}; take 'auto'") from None
            report.declined("shard", "collectives written out", str(why))
            return jaxpr
        own, others = amount(found.traffic.total), amount(found.compiler)
        if self.collectives is None and found.traffic.total > found.compiler:
            more = f"they would send {own} a device and step, the compiler's {others} by prediction"
            report.declined("shard", "collectives written out", more)
            return jaxpr
        report.did(
            "shard",
            "collectives written out",
            f"{own} a device and step, the compiler's {others} by prediction",
        )
        for note, count in notes:
            for _ in range(count):
                report.add(note)
        found.traffic.tell(report)
        return found.jaxpr

    def _layout(self, context: Context) -> Layout:
        rules: dict[str, list[tuple[str, ...]]] = {}
        for name, axes in MAXTEXT_RULES:
            rules.setdefault(name, []).append(tuple(axes))
        if self.sequence_parallel:
            rules |= {n: [("tensor", *axes) for axes in rules.get(n) or [()]] for n in SEQUENCE_PARALLEL}
            rules["activation_embed"] = []
        if context.stage_axes:
            rules = {name: [staged(name, axes, context) for axes in each] for name, each in rules.items()}
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
        parameters = [i for i, kind in enumerate(input_kinds) if kind == "parameter"]
        owners = of_same_end([context.inputs[i] for i in parameters], context.inputs)
        whole = total = 0
        for i, (var, leaf, kind) in enumerate(zip(jaxpr.invars, context.inputs, input_kinds, strict=True)):
            if kind == "kept":
                continue  # it lies as the pass says that keeps it
            names = logical_names(roles, root, var)
            if kind == "optimizer" and (owner := owners[i]) is not None:
                names = _kept(roles, jaxpr.invars[parameters[owner]], var) or names
            spec, why = layout.spec(names, leaf.path)
            if kind == "optimizer":
                spec, more = layout.spread(spec, names, shape_of(var), self.optimizer_axes, leaf.path)
                why += more
            context.in_shardings[i] = NamedSharding(context.mesh, spec)
            context.reasons[leaf.path] = f"{kind}, {spelled(roles, root, var)}: {why}"
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
            zip(jaxpr.outvars, twins(context.inputs, context.outputs), strict=True)
        ):
            spec = PartitionSpec()
            if i >= len(context.outputs) - len(context.kept):
                continue
            if twin is not None and context.in_shardings[twin] is not None:
                context.out_shardings[i] = context.in_shardings[twin]
                continue
            if isinstance(out, Var):
                spec, _ = layout.spec(logical_names(roles, root, out), context.outputs[i].path)
            context.out_shardings[i] = NamedSharding(context.mesh, spec)


def _there(mesh: Mesh, spec: PartitionSpec, inside: frozenset[str]) -> NamedSharding:
    """The sharding of a value in a region that is manual over the axes `inside`: of the others."""
    if not inside:
        return NamedSharding(mesh, spec)
    left = [tuple(a for a in entry_axes(e) if a not in inside) or None for e in spec]
    here = mesh.abstract_mesh.update_axis_types(dict.fromkeys(inside, AxisType.Manual))
    return NamedSharding(here, PartitionSpec(*left))


def staged(name: str, axes: tuple[str, ...], context: Context) -> tuple[str, ...]:
    """A rule's axes where some have stages of layers: no rows lie over those, but the vocabulary does, so
    that the embedding and the head take no more of one stage than of another; unless they are on one.
    """
    if name in STAGES:
        return axes
    left = tuple(a for a in axes if a not in context.stage_axes)
    return (*left, *context.vocabulary_axes) if name in VOCABULARY else left


def _in_types(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The mesh axes over which the program itself lays out its arrays, in their types."""
    meshes = [v.aval.sharding.mesh for v in jaxpr.invars if hasattr(v.aval, "sharding")]
    meshes += [eqn.ctx.cur_abstract_mesh for eqn in jaxpr.eqns]
    return tuple(dict.fromkeys(axis for mesh in meshes for axis in mesh.explicit_axes))


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


def _kept(roles: Roles, parameter: Var, state: Var) -> list[Named]:
    """The names that the dimensions of a state have in its parameter; a factored moment has some of them."""
    root = roles.axes.root
    names = iter(zip(root[parameter], logical_names(roles, root, parameter), strict=True))
    dims = root[state]
    found = [next((name for other, name in names if other == dim), None) for dim in dims]
    return [name for name in found if name is not None] if dims and all(found) else []


def _bytes(aval: Any) -> int:
    return int(getattr(aval.dtype, "itemsize", 0)) * math.prod(aval.shape)
