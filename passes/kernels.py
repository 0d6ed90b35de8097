"""Computes recognised operations by kernels: attention by splash attention, products by expert by megablox.

    s = dot_general q k                       o, lse = operation[attention causal] q k v
    p = softmax s, masked              ->     and backward:
    o = dot_general p v                       dq, dk, dv = operation[attention_backward] q k v lse ...

`xform.raising` says what the program means, `xform.kernels` has the operations; this puts one in the place of
the other, before autodiff. An operation says in plain JAX what it computes, which all other passes read, and
is lowered to its kernel last, where it is known what of it one device has: in the one manual region of an
explicit plan, or in a `shard_map` of its own over the axes that its operands lie on.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import AxisType, PartitionSpec

from xform.axes import Scope
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.heads import CHUNKED
from xform.higher_order import equations, manual_axes
from xform.kernels import lowering
from xform.kernels.lowering import Options
from xform.ops import Operation, apply, operation_of
from xform.ops.operation import on_parts, sums_of, terms_of, told_of
from xform.plans.rules import ways
from xform.raising.finding import find
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.registry import unknown
from xform.report import Promise
from xform.rewrite import Site, rewrite
from xform.roles import Roles
from xform.roles.logical import logical_names
from xform.rotations import Rotations
from xform.sharding.layout import entry_axes
from xform.topologies import kind_of
from xform.trace import Jaxpr, Value, Var, name_stack, shape_of, source_line

NOWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Options:

    only: the operations to lower, of "attention", "cross_entropy", "experts" and "linear_recurrence";
        by default each that a kernel computes in less time or memory, and rotations of heads' halves.
    where: a regular expression; only operations are lowered whose name stack or source line matches it.
    shortest: attention over fewer keys or queries stays as it is: its scores take less than a kernel's setup.
    blocks: block sizes in place of the table's, by operation: {"attention": {"block_q": 256}}.
    library: whose kernels, by operation: {"attention": "tokamax"} for those of tokamax, which has to be
        installed (`pip install 'xform[tokamax]'`), in place of "jax"'s.
    interpret: where there is no TPU, run kernels in the interpreter, to try them; else operations are
        computed there as the program has them.

    Raises PlanError for an operation that is not in the table, for blocks that a chip's memory cannot hold,
    and for a library that is not installed or does not have the operation.
    """

    only: Sequence[str] = ()
    where: str = ""
    shortest: int = 128
    blocks: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    library: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interpret: bool = False

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "shard")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        self._check()
        device = context.mesh.devices.flat[0]
        kind = kind_of(device)
        inside = sunk(jaxpr)
        found = find(inside)
        for near in found.declined:
            context.report.declined("kernels", near.what, near.why, near.line or near.where)
        if not self.only or "cross_entropy" in self.only:
            _tell_chunked(inside, context)
        claims = []
        for r in found.raised:
            if self.where and not re.search(self.where, f"{r.where} {r.line}"):
                continue
            if r.op == "cross_entropy" and _is_chunked(r.where):
                continue  # which was said
            what = lowering.spelled(r)
            try:
                if r.op not in lowering.LOWERINGS:
                    raise Decline("no kernel: the compiler fuses it with its neighbours")
                if self.only and r.op not in self.only:
                    raise Decline(f"kernels.only names {', '.join(self.only)}")
                if kind is None and not self.interpret:
                    raise Decline(f"no TPU but {device.platform}: it is computed as it is written")
                chip = kind.name if kind else "v5e"
                blocks = self.blocks.get(r.op, {})
                options = Options(
                    chip,
                    kind is None,
                    self.shortest,
                    blocks,
                    bool(self.only),
                    library=self.library.get(r.op, "jax"),
                    tokens_over=ways(["activation_batch"], context.mesh.shape),
                    vocab_over=ways(["vocab"], context.mesh.shape),
                    memory=kind.hbm if kind else math.inf,
                )
                made = lowering.LOWERINGS[r.op](r, options)
            except Decline as reason:
                context.report.declined("kernels", what, str(reason), r.line or r.where)
                continue
            context.report.did("kernels", f"{what} by a kernel", made[0].why, r.line or r.where)
            if kind is not None:
                context.report.promise(Promise("kernels", r.op, "kernel", r.line or r.where))
            claims += [Claim(r.view, each.takes, each.gives, each.emit) for each in made]
        return placed(inside, claims, context.report) if claims else jaxpr

    def _check(self) -> None:
        for name in (*self.only, *self.blocks, *self.library):
            if name not in lowering.LOWERINGS:
                options = "kernels.only, kernels.blocks and kernels.library"
                raise unknown("operation", name, lowering.LOWERINGS, options)
        for name, library in self.library.items():
            lowering.provided(name, library)
        try:
            re.compile(self.where)
        except re.error as error:
            raise PlanError(f"kernels.where = {self.where!r} is no regular expression: {error}") from None

    # ------------------------------------------------------------ in the whole step

    def _rotated(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Halves of heads that are rotated into each other, as products; where there are vector registers."""
        if self.only or kind_of(context.mesh.devices.flat[0]) is None:
            return jaxpr
        rule = Rotations(self.where)
        new = rewrite(jaxpr, rule, context.report, "kernels")
        for line, times in Counter(rule.lines).items():
            what = "halves of heads that are rotated into each other, by a product"
            context.report.did("kernels", what, f"exact; {times} in the program", line)
        return new

    def finish(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Operations outside of any manual region get one, over the axes that their operands lie on: a kernel
        cannot be partitioned by the compiler.
        """
        jaxpr = self._rotated(jaxpr, context)
        if context.mesh.size == 1 or not _stand_alone(jaxpr):
            return jaxpr
        roles = context.roles(jaxpr) if context.spec else None

        def rule(site: Site) -> Sequence[Value] | None:
            op = operation_of(site.eqn)
            if op is None or _is_manual(site.eqn):
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
            return _region(op, axes, scattered, context, inside)(*site.args)

        return rewrite(jaxpr, rule, context.report, "kernels")


def _tell_chunked(jaxpr: Jaxpr, context: Context) -> None:
    """Says of a loss that goes through chunks that it gets no kernel."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "scan" and _is_chunked(name_stack(eqn)):
            what = f"the head and its cross_entropy in {eqn.params['length']} chunks"
            why = "chunkedloss has cut it up before; the kernel, for all tokens at once and with no logits in"
            why += " memory, is for plans without chunkedloss"
            context.report.declined("kernels", what, why, source_line(eqn))


def _is_chunked(where: str) -> bool:
    return CHUNKED in re.split(r"\W+", where)


def _stand_alone(jaxpr: Jaxpr) -> bool:
    return any(operation_of(eqn) is not None and not _is_manual(eqn) for eqn in equations(jaxpr))


def _is_manual(eqn: Any) -> bool:
    return bool(getattr(eqn.ctx.cur_abstract_mesh, "manual_axes", ()))


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

    over = ", ".join(f"{c} over {','.join(a)}" for c, a in axes.items() if a)
    context.report.did("kernels", f"{op.name} in a shard_map of its own", over or "whole on every device")
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
