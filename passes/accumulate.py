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

from xform.batch import Cut, Microbatches, Placed, Split, cut_along_batch, divided
from xform.context import Context
from xform.errors import PlanError
from xform.experts import lifted
from xform.plans.rules import MAXTEXT_RULES
from xform.report import Report
from xform.trace import Jaxpr

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
    after: ClassVar[tuple[str, ...]] = (
        "roll",
        "chunkedloss",
        "kernels",
        "context",
        "experts",
        "quantize",
        "remat",
    )

    def cuts(self, rows: int) -> int:
        """Into how many microbatches a batch is cut."""
        return self.steps or max(rows // max(self.rows, 1), 1)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        self._check()
        if context.stage == "step":
            used = [True] * len(jaxpr.outvars)
            return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0]
        if context.stage_axes:
            return self._through_stages(jaxpr, context)
        found = cut_along_batch(
            lifted(jaxpr, "accumulate", context.report),
            context.roles,
            "accumulate",
            context.report,
            lambda size, found: self._split(size, found, context),
        )
        if isinstance(found, Placed):
            context.report.declined("accumulate", "the model", str(found), found.line)
            return jaxpr
        if found.split.steps == 1:
            whole = f"one microbatch is the whole batch of {found.split.whole}"
            context.report.declined("accumulate", "the model", whole)
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

    def _through_stages(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """With Pipeline in the plan, its microbatches are so many times as many."""
        if self.rows:
            raise PlanError(
                "accumulate: with pipeline in the plan, give steps: so many times as many microbatches go"
                " through the stages"
            )
        if self.reduce != "each":
            raise PlanError(
                f"accumulate.reduce = {self.reduce!r}: with pipeline in the plan, the schedule says when"
                " gradients are summed over devices; leave it out: with shard.collectives = 'explicit' they"
                " are summed when the last of them is there"
            )
        context.steps, context.sums = self.steps, self.dtype
        context.report.did(
            "accumulate",
            f"{self.steps} times as many microbatches go through the pipeline",
            "the schedule says when their gradients are summed over devices",
        )
        return jaxpr

    def _split(self, size: int, found: Cut, context: Context) -> Split:
        groups = prod(context.mesh.shape[axis] for axis in self._axes(context))
        steps = self.cuts(size)
        whole, option = steps * groups, f"steps = {self.steps}"
        if self.rows:
            whole, option = steps * self.rows, f"rows = {self.rows}"
        if size % whole or size % (steps * groups):
            each = groups if self.steps else 1
            fit = [
                n for n in range(1, size + 1) if size % (n * each) == 0 and (self.steps or n % groups == 0)
            ]
            paths = [leaf.path for leaf in context.inputs]
            raise divided(f"accumulate.{option}", size, groups, found, paths, fit)
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
