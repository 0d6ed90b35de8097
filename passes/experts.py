"""Sends tokens to the experts that they chose, which lie over devices, and what these give back.

    order = argsort ids; rows = x[order // j]                  y = operation[experts] ids x w gates
    z = ragged_dot (silu (ragged_dot rows up)) down      ->    and backward:
    y = einsum gates z[argsort order]                          dx, dw, dg = operation[experts_backward] ...

The experts that a token goes to, and which have no place for it, stay the program's own: the ids are what the
program has computed. Before autodiff all that lies between them and the tokens' results becomes one operation
(`xform.experts.dispatch`), which may be cut along tokens and experts and sends what it needs itself. How it
sends is what takes the fewest bytes, if the plan does not say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from xform.axes import Scope, find_axes
from xform.context import Context
from xform.errors import Decline, PlanError
from xform.experts import Sorted, lifted
from xform.experts.combining import Combine, Combined, combined
from xform.experts.dispatch import (
    NONE,
    RAGGED,
    SLOTS,
    Dispatch,
    DispatchBackward,
    DispatchForward,
    dispatched,
)
from xform.experts.function import Function
from xform.experts.sent import Sent
from xform.higher_order import equations
from xform.ops import Operation, operation_of
from xform.plans.rules import MAXTEXT_RULES
from xform.raising.flat import View, views
from xform.raising.placing import Claim, placed
from xform.report import amount
from xform.sharding import regions
from xform.trace import Jaxpr, Value, Var, shape_of
from xform.trace import Literal as Constant


@dataclasses.dataclass(frozen=True)
class Experts:
    """Options:

    axis: the mesh axis that experts lie over.
    dispatch: how tokens come to the devices of their experts: "ring", all tokens to all of these devices and
        sums of the results back (MaxText's ring of experts); "all_to_all", each choice to the device of its
        expert and back, in slots; "ragged_all_to_all", as many to each device as there are for it, which not
        all slices can; "none", experts come together on each device. By default, for each layer, what sends
        the fewest bytes where experts have equally many tokens.
    capacity: the slots that a device has for each of the devices, of "ragged_all_to_all" for all, of as many
        as it takes where experts have equally many tokens. No token is dropped: when some device has more
        choices for another than slots, the layer's tokens go by a ring.
    block: rows of a device's experts are computed in blocks, of so many of those that it has where experts
        have equally many tokens, and no more blocks than it has rows for.
    dtype: in which tokens are sent to their experts, with a scale for each: "int8" or "float8_e4m3fn"; "" for
        their own. By default eight bits where Quantize has experts multiply them in eight bits. What comes
        back, and gradients, are sent as they are.
    chunks: tokens are sent in so many chunks, so that one may be sent while another is multiplied.

    Raises PlanError where the mesh lacks the axis, for numbers that are none of these, and where a layer's
    experts do not divide over the axis though the plan says how they are sent.
    """

    axis: str = "expert"
    dispatch: Literal["ring", "all_to_all", "ragged_all_to_all", "none"] | None = None
    capacity: float = 2.0
    block: float = 1.25
    chunks: int = 1
    dtype: Literal["int8", "float8_e4m3fn", ""] | None = None

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = (
        "roll",
        "chunkedloss",
        "sparseexperts",
        "quantize",
        "kernels",
        "shard",
    )
    brings: ClassVar[tuple[str, ...]] = ("sparseexperts",)

    @property
    def expert_axis(self) -> str:
        return self.axis

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        for option, least in (("capacity", 1.0), ("block", 0.1), ("chunks", 1)):
            if not (have := getattr(self, option)) >= least:
                raise PlanError(f"experts.{option} = {have}: it takes {least} or more")
        if self.axis not in context.mesh.shape:
            has = ", ".join(context.mesh.shape) or "no axes"
            raise PlanError(
                f"experts.axis = {self.axis!r}: the mesh has {has}; name one of them, or give the mesh"
                f" {self.axis} = 4, say"
            )
        jaxpr = lifted(jaxpr, "experts", context.report)
        claims = []
        for view in views(jaxpr):
            scope = None
            for number, eqn in enumerate(view.eqns):
                op = operation_of(eqn)
                if isinstance(op, Sorted):
                    scope = scope or find_axes(view.jaxpr).root
                    claims.append(self._claim(view, scope, number, op, context))
        if not claims:
            why = "no tokens sorted by expert were found; `xform dump --raise` shows what is recognised"
            context.report.declined("experts", "the program", why)
        return placed(jaxpr, claims, context.report)

    def _claim(self, view: View, scope: Scope, number: int, op: Sorted, context: Context) -> Claim:
        eqn, function = view.eqns[number], Function.of(op.middle)
        ids, *others = eqn.invars
        (z,) = eqn.outvars
        try:
            found = combined(view, scope, z)
        except Decline as why:
            context.report.declined(
                "experts", "what a token's choices give, added up", str(why), view.line(number)
            )
            found = Combined(Combine(), (), z)
        how = self._how(function, found.combine, shape_of(ids), view.line(number), context)
        sources = [others[function.sources[n]] for n in function.taken]
        gates = [gate.source for gate in found.gates]
        takes = list(dict.fromkeys(v for v in (ids, *sources, *gates) if isinstance(v, Var)))

        def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
            def read(v: Any) -> Value:
                return v.val if isinstance(v, Constant) else values[v]

            laid = [gate.laid(read(gate.source), *shape_of(ids)) for gate in found.gates]
            y = dispatched(how, read(ids), *map(read, sources), *laid)
            return {found.y: y.reshape(shape_of(found.y))}

        return Claim(view, takes, [found.y], emit)

    def _how(
        self, function: Function, combine: Combine, shape: Sequence[int], line: str, context: Context
    ) -> Dispatch:
        ways = context.mesh.shape[self.axis]
        tokens, choices = shape
        what = f"{function.experts} experts, {choices} for each of {tokens} tokens"
        why = self._undivided(function, ways, tokens, context)
        if why or ways == 1 or self.dispatch == NONE:
            if why and self.dispatch not in (None, NONE):
                raise PlanError(f"experts.dispatch = {self.dispatch!r} ({line}): {what}: {why}")
            context.report.did("experts", f"{what}: none sent", why or "experts whole on each device", line)
            return Dispatch(function, combine)
        outer = self._outer(context)
        own = tokens // (outer * ways)
        if own % self.chunks:
            fit = ", ".join(str(n) for n in range(2, own + 1) if own % n == 0 and n <= 2 * self.chunks)
            raise PlanError(
                f"experts.chunks = {self.chunks} ({line}): {what}: the {own} of a device do not divide into"
                f" so many; into {fit or 'none'} they would"
            )
        dtype = function.codes if self.dtype is None else self.dtype
        sent = Sent.of(function, combine, own, choices, ways, self.capacity, dtype)
        costs = sent.all(context.differentiated, named=self.dispatch)
        chosen: str = self.dispatch or min(costs, key=lambda name: costs[name])
        others = ", ".join(f"{name} {amount(cost)}" for name, cost in costs.items() if name != chosen)
        cost = f"{amount(costs[chosen])} a device, {sent.passes(context.differentiated)}, over {self.axis}"
        if chosen in (SLOTS, RAGGED) and sent.may_overflow(chosen):
            cost += "; by the ring where a device has more for another than it has slots"
        if dtype and chosen != NONE:
            cost += f"; tokens go there as {dtype}"
        context.report.did("experts", f"{what}: {chosen}", f"{cost}; by {others}", line)
        if chosen == NONE:
            return Dispatch(function, combine)
        sizes = (ways, outer, self.capacity, self.chunks, self.block, dtype)
        return Dispatch(function, combine, chosen, (self.axis,), *sizes, line=line)

    def _undivided(self, function: Function, ways: int, tokens: int, context: Context) -> str:
        """Why experts cannot lie over so many devices; "" where they can."""
        if function.experts % ways:
            return f"{function.experts} experts do not divide over {ways} devices of {self.axis!r}"
        parts = self._outer(context) * ways
        if tokens % parts:
            return f"{tokens} tokens do not divide over {parts} devices"
        return function.refused(ways)

    def _outer(self, context: Context) -> int:
        """Over how many devices tokens lie by axes further out than that of experts, by MaxText's rules."""
        axes = next(axes for name, axes in MAXTEXT_RULES if name == "activation_batch")
        before = axes[: axes.index(self.axis)] if self.axis in axes else axes
        sizes = context.mesh.shape
        return math.prod(sizes[a] for a in before if a in sizes and a not in context.stage_axes)

    def finish(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        """Operations outside of any manual region get one. By now all are told where their experts lie."""
        jaxpr = regions.written(jaxpr, context, "experts", _is_dispatch)
        for eqn in equations(jaxpr):
            op: Any = operation_of(eqn)
            op = getattr(op, "op", op)  # of a mapped one
            if op is None or not _is_dispatch(op) or op.ways == 1 or op.axes:
                continue
            tokens, parts = math.prod(shape_of(eqn.invars[0])[:-1]), op.outer * op.ways
            if tokens % parts:
                raise PlanError(
                    f"experts ({op.line}): {tokens} tokens of a microbatch do not divide over the {parts}"
                    " devices of the batch and of experts: take fewer microbatches, or a larger batch"
                )
            raise PlanError(
                f"experts ({op.line}): these experts lie over no {self.axis!r}. Shard has to be in the plan,"
                " and to lay them so: by MaxText's rules it does, but for a dimension that is not told to be"
                " of experts (the plan's `axes` names it) or that a rule of the plan leaves whole"
            )
        return jaxpr


def _is_dispatch(op: Operation) -> bool:
    return isinstance(getattr(op, "op", op), DispatchForward | DispatchBackward)
