"""Splits the batch into microbatches and adds up their gradients: no activation of one outlives it.

    loss = mean(f(params, batch))           for i in range(steps):             (a scan)
                                    ->        s_i, g_i = value_and_grad(sum . f)(params, batch[i])
                                              s += s_i; g += g_i
                                            loss = s / n

The program that is about to be differentiated is cut where it has summed over the batch (`xform.batch`); what
is before runs on each microbatch, what is after once, on the sums over all of them. So the result is that of
the whole batch, whatever is done with the sums; random numbers are those that the whole batch draws for the
rows, where they can be had alone (of threefry keys), else the report says so. A scan computes the sums and
their gradients at once, as the loss is linear in one of them as a rule; where it is not, a second scan
computes the gradient when it is known how the loss depends on each. Casts of weights stay in the microbatch,
where they cost no memory; stacked weights and products of weights are made once.
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import ClassVar, Literal

from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from xform.batch import Cut, Microbatches, Mixes, Placed, Split, cut, find_batch, flat
from xform.context import Context
from xform.errors import PlanError
from xform.plans.rules import MAXTEXT_RULES
from xform.report import Report
from xform.trace import Jaxpr, source_line

BATCH_AXES = dict(MAXTEXT_RULES)["activation_batch"]
"""The mesh axes that the batch may lie on."""


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Options:

    steps: the number of microbatches.
    rows: instead, how many rows of the whole batch a microbatch has.
    dtype: in which gradients are added up, "" for each gradient's own; wider ones keep theirs.
    reduce: "each" sums gradients over the devices in every microbatch, and they lie as the parameters do;
        "once" at the end, and until then each device holds those of its own rows, as large as the
        parameters are without the mesh axes of the batch.

    Raises PlanError where the batch cannot be divided so. A program whose microbatches would not give exactly
    what the whole batch gives is left alone, and the report names the operation and its line.
    """

    steps: int = 0
    rows: int = 0
    dtype: Literal["float32", "bfloat16", "float16", ""] = "float32"
    reduce: Literal["each", "once"] = "each"

    stages: ClassVar[tuple[str, ...]] = ("model", "step")
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels", "quantize", "remat")

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        self._check()
        if context.stage == "step":
            used = [True] * len(jaxpr.outvars)
            return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0]
        found = self._cut(flat(jaxpr), context)
        if found is None:
            return jaxpr
        self._tell(found, context.report)
        groups = (
            NamedSharding(context.mesh, PartitionSpec(self._axes(context)))
            if found.split.groups > 1
            else None
        )
        return Microbatches(found, self.dtype, groups, context.report).whole(jaxpr, "accumulate")

    def _check(self) -> None:
        if (self.steps > 0) == (self.rows > 0) or min(self.steps, self.rows) < 0:
            raise PlanError(
                "accumulate: give steps, the number of microbatches, or rows, the rows in each, and not both;"
                f" it has steps = {self.steps}, rows = {self.rows}"
            )

    def _cut(self, jaxpr: Jaxpr, context: Context) -> Cut | None:
        """The program cut along the likeliest axis along which that can be."""
        roles = context.roles(jaxpr)
        refused: Placed | None = None
        for factors in find_batch(jaxpr, roles):
            size = prod(f.size for f in factors)
            try:
                found = cut(jaxpr, roles.axes, factors, Split(size, 1))
                if not found.data or not (found.parts or found.gathered):
                    continue
                split = self._split(size, jaxpr, found, context)
                if split.steps > 1:
                    return cut(jaxpr, roles.axes, factors, split)
                whole = f"one microbatch is the whole batch of {size}"
                context.report.declined("accumulate", "the model", whole)
                return None
            except Mixes as why:
                refused = refused or (why if isinstance(why, Placed) else Placed(str(why), ""))
        if refused is None:
            none = "none of its inputs has a batch that is summed over: name its axis in the plan, as batch"
            context.report.declined("accumulate", "the model", none)
            return None
        eqn = jaxpr.eqns[refused.equation] if refused.equation >= 0 else None
        if eqn is not None and eqn.primitive.name == "remat2":
            what = "took away a jax.checkpoint with the loss in it"
            context.report.did("accumulate", what, "it ends after the sum over the batch", source_line(eqn))
            return self._cut(flat(jaxpr, refused.equation), context)
        context.report.declined("accumulate", "the model", str(refused), refused.line)
        return None

    def _split(self, size: int, jaxpr: Jaxpr, found: Cut, context: Context) -> Split:
        groups = prod(context.mesh.shape[axis] for axis in self._axes(context))
        steps = self.steps or max(size // self.rows, 1)
        whole, option = steps * groups, f"steps = {self.steps}"
        if self.rows:
            whole, option = steps * self.rows, f"rows = {self.rows}"
        if size % whole or size % (steps * groups):
            each = groups if self.steps else 1
            fit = [
                n for n in range(1, size + 1) if size % (n * each) == 0 and (self.steps or n % groups == 0)
            ]
            by = f" on {groups} groups of devices" if groups > 1 else ""
            raise PlanError(
                f"accumulate.{option} does not divide the batch of {size}{by}, of"
                f" {_paths(jaxpr, found, context)}; what does: {', '.join(map(str, fit)) or 'nothing'}"
            )
        return Split(size, steps, groups)

    def _axes(self, context: Context) -> tuple[str, ...]:
        """The mesh axes whose devices have rows of their own, for which gradients are kept apart."""
        if self.reduce == "each":
            return ()
        sizes = context.mesh.shape
        axes = tuple(a for a in BATCH_AXES if sizes.get(a, 1) > 1)
        if not axes and any(n > 1 for n in sizes.values()):
            raise PlanError(
                f'accumulate.reduce = "once": the mesh has {", ".join(map(str, sizes))} and none of the axes'
                f" that the batch lies on, {', '.join(BATCH_AXES)}"
            )
        return axes

    def _tell(self, found: Cut, report: Report) -> None:
        split = found.split
        report.did(
            "accumulate",
            f"{split.steps} microbatches of {split.rows} rows",
            f"gradients are added up in {self.dtype or 'their own dtype'}",
        )
        for what in found.whole:
            report.did("accumulate", f"{what} is computed once of the whole batch", "of the data alone")
        for line in found.folded:
            report.did(
                "accumulate",
                "random numbers of each microbatch's own",
                "others than the whole batch draws, of the same distribution: threefry2x32 keys and"
                " jax_threefry_partitionable draw the same, but for gamma",
                line,
            )


def _paths(jaxpr: Jaxpr, found: Cut, context: Context) -> str:
    paths = dict(zip(jaxpr.invars, (leaf.path for leaf in context.inputs), strict=False))
    named = [paths.get(v) or v.aval.str_short() for v in found.data]
    return ", ".join(named[:3])
