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
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from xform.axes import Scope
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.higher_order import equations
from xform.kernels import lowering
from xform.kernels.lowering import Options
from xform.ops import apply, operation_of
from xform.raising.finding import find
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.registry import unknown
from xform.report import Promise
from xform.rewrite import Site, rewrite
from xform.roles import Roles
from xform.roles.logical import logical_names
from xform.sharding.layout import entry_axes
from xform.topologies import kind_of
from xform.trace import Jaxpr, Value, Var, shape_of


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Options:

    only: the operations to lower, of "attention", "cross_entropy", "experts" and "linear_recurrence";
        by default each that a kernel computes in less time or memory.
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
        claims = []
        for r in found.raised:
            if self.where and not re.search(self.where, f"{r.where} {r.line}"):
                continue
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
                    context.mesh.size,
                    self.library.get(r.op, "jax"),
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

    # ------------------------------------------------------------ under automatic partitioning

    def finish(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Operations outside of any manual region get one, over the axes that their operands lie on: a kernel
        cannot be partitioned by the compiler.
        """
        if context.mesh.size == 1 or not _stand_alone(jaxpr):
            return jaxpr
        roles = context.roles(jaxpr) if context.spec else None

        def rule(site: Site) -> Sequence[Value] | None:
            op = operation_of(site.eqn)
            if op is None or _is_manual(site.eqn):
                return None
            axes: dict[str, tuple[str, ...]] = {}
            if roles is not None:
                axes = _axes(op, site, roles, roles.axes.scope(site.path), context)

            def spec(dims: str) -> PartitionSpec:
                return PartitionSpec(*(axes.get(c) or None for c in dims))

            region: Any = jax.shard_map(
                functools.partial(apply, op),
                mesh=context.mesh,
                in_specs=tuple(map(spec, op.operands)),
                out_specs=list(map(spec, op.results)),
                check_vma=False,
            )
            over = ", ".join(f"{c} over {','.join(a)}" for c, a in axes.items() if a)
            context.report.did(
                "kernels", f"{op.name} in a shard_map of its own", over or "whole on every device"
            )
            return list(region(*site.args))

        return rewrite(jaxpr, rule, context.report, "kernels")


def _stand_alone(jaxpr: Jaxpr) -> bool:
    return any(operation_of(eqn) is not None and not _is_manual(eqn) for eqn in equations(jaxpr))


def _is_manual(eqn: Any) -> bool:
    return bool(getattr(eqn.ctx.cur_abstract_mesh, "manual_axes", ()))


def _axes(op: Any, site: Site, roles: Roles, scope: Scope, context: Context) -> dict[str, tuple[str, ...]]:
    """The mesh axes of the dimensions along which an operation may be cut, by the layouts of what it gives
    and takes.
    """
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    assert context.spec is not None
    for dims, var in (
        *zip(op.results, site.eqn.outvars, strict=True),
        *zip(op.operands, site.eqn.invars, strict=True),
    ):
        if not isinstance(var, Var):
            continue
        spec = context.spec(logical_names(roles, scope, var))
        for c, size, entry in zip(
            dims, shape_of(var), [*spec, *[None] * (len(dims) - len(spec))], strict=True
        ):
            if c not in op.cut or c in found or entry is PartitionSpec.UNCONSTRAINED:
                continue
            axes = tuple(a for a in entry_axes(entry) if a not in taken)
            if axes and size % math.prod(context.mesh.shape[a] for a in axes) == 0:
                found[c] = axes
                taken |= set(axes)
    return found
