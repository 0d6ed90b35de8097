"""Computes attention over a length that lies over devices, each of which has a part of the texts.

    s = dot_general q k                        o, lse = operation[attention, ring] q k v
    p = softmax s, masked             ->       and backward:
    o = dot_general p v                        dq, dk, dv = operation[attention_backward, ring] q k v lse ...

`Shard` lays the length of activations over the axis; everything but attention then works on parts. Attention
is put before autodiff as an operation that may be cut along its length, and sends what it needs itself
(`xform.kernels.across`): keys and values all together, or around in a ring, or heads in exchange for length.
Where Kernels has found a kernel for it, that runs inside. How it is sent is the strategy with the fewest
bytes for these heads and this mask, if the plan does not say.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from xform.context import Context as Told
from xform.errors import Decline, PlanError
from xform.higher_order import bodies, equations
from xform.kernels import balance, lowering
from xform.kernels.across import AcrossBackward, AcrossForward
from xform.kernels.attention import AttentionForward, attention_and_lse
from xform.kernels.carried import CarriedBackward, CarriedForward, carried
from xform.kernels.lengths import Padded, in_order
from xform.kernels.lowering import Options
from xform.kernels.recurrence import RecurrenceForward
from xform.kernels.sent import STRATEGIES, Sent
from xform.ops import Operation, operation_of
from xform.ops.rows import balanced, in_text_order
from xform.ordering import not_kept
from xform.plans.rules import ways
from xform.raising.finding import find
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.report import Report, amount
from xform.rewrite import Site, rewrite
from xform.sharding import regions
from xform.trace import Jaxpr, Value, shape_of, source_line

INNER = "context_usp_ulysses"
"""MaxText's name of the mesh axis along which "usp" exchanges heads."""


RINGS = ("ring", "usp")

SHARE = 0.5
"""Of what attention takes and gives, how much may be moved in a forward pass for another order of tokens. A
backward pass takes operands of a convolution, say, once more.
"""


@dataclasses.dataclass(frozen=True)
class Context:
    """Options:

    axis: the mesh axis that the length lies over; with `context_usp_ulysses`, where the mesh has it.
    strategy: "all_gather" of keys and values; "ring", in which they go round; "ulysses", all of the length of
        some heads in exchange for some of the length of all; "usp", that along the axis
        `context_usp_ulysses` and a ring along the other. By default, for each attention, the one that sends
        the fewest bytes.

    balance: the order in which tokens lie over the devices, so that under a causal mask all have as much to
        do: "zigzag", an early and a late piece of the text each, or "striped", every n-th token
        (`kernels.balance`). Tokens, labels, positions and masks are put in it as they come; within the
        program nothing is moved but what takes neighbours together, which the report tells; where that is
        more than half of what attention takes and gives, texts keep their own order.

    In the stages of a pipeline there is no ring: a permute is waited for by all devices, also by stages that
    run something else at that tick.

    Raises PlanError where the mesh lacks the axis, where heads do not divide as a strategy that is named has
    to have them, for a ring in a pipeline, and where a length that should lie over the axis does not.
    """

    axis: str = "context"
    strategy: Literal["all_gather", "ring", "ulysses", "usp"] | None = None
    balance: Literal["zigzag", "striped"] | None = None

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels", "shard")

    def rewrite(self, jaxpr: Jaxpr, context: Told) -> Jaxpr:
        sizes = self._sizes(context)
        raised = self._raised(jaxpr, context)
        balanced = self._balanced(raised, sizes, context) if self.balance is not None else None
        if balanced is not None:
            return balanced
        placing = _Placing(self.strategy, sizes, context, context.report)
        return rewrite(raised, placing.rule, context.report, "context")

    def _balanced(self, jaxpr: Jaxpr, sizes: Mapping[str, int], context: Told) -> Jaxpr | None:
        """The program with tokens in the order that is asked for; None where that is not worth it."""
        placing = _Placing(self.strategy, sizes, context, Report(), str(self.balance))
        made = rewrite(jaxpr, placing.rule, placing.report, "context")
        why = not_kept(made, SHARE)
        if context.stage_axes:
            why = "the texts in the stages of a pipeline keep their own order"
        elif not placing.grows:
            why = "; ".join(dict.fromkeys(placing.why_not)) or "no attention sees more keys from later tokens"
        if why:
            context.report.declined("context", f"balance = {self.balance!r}", why)
            return None
        for note in (note for note, count in placing.report for _ in range(count)):
            context.report.add(note)
        return made

    def finish(self, jaxpr: Jaxpr, context: Told) -> Jaxpr:
        """Operations outside of any manual region get one. By now all are told where their length lies."""
        jaxpr = regions.written(jaxpr, context, "context", _is_across)
        for eqn in equations(jaxpr):
            op = operation_of(eqn)
            if op is not None and _is_across(op) and not _axes(op):
                raise PlanError(
                    f"context ({source_line(eqn)}): the length of this {op.name} lies over no {self.axis!r}."
                    " Shard has to be in the plan, and to lay it so: by MaxText's rules it does, but for a"
                    " dimension that is not told to be the length (the plan's `axes` names it) or that a"
                    " rule of the plan leaves whole"
                )
        return jaxpr

    def _sizes(self, context: Told) -> dict[str, int]:
        """The mesh axes of the length, and how many devices they have."""
        mesh = dict(context.mesh.shape)
        if self.axis not in mesh:
            raise PlanError(
                f"context.axis = {self.axis!r}: the mesh has {', '.join(mesh) or 'no axes'}; name one of"
                f" them, or give the mesh {self.axis} = 4, say"
            )
        found = {a: mesh[a] for a in dict.fromkeys((self.axis, INNER)) if mesh.get(a, 1) > 1}
        if not found:
            raise PlanError(f"context.axis = {self.axis!r} has one device in the mesh: it takes two or more")
        if self.strategy == "usp" and len(found) < 2:
            has = ", ".join(f"{a}={n}" for a, n in mesh.items())
            raise PlanError(
                f"context.strategy = 'usp' takes two mesh axes, {self.axis!r} for the ring and {INNER!r} for"
                f" the heads, each of two devices or more; the mesh has {has}"
            )
        if self.balance is not None and self.strategy in ("ulysses", "usp"):
            raise PlanError(
                f"context.balance = {self.balance!r} with context.strategy = {self.strategy!r}: where heads"
                " are exchanged for length devices have as much to do as it is; take 'ring', 'all_gather', or"
                " no balance"
            )
        if self.strategy in RINGS and context.stage_axes:
            stages = ", ".join(context.stage_axes)
            raise PlanError(
                f"context.strategy = {self.strategy!r} with pipeline: stages over {stages} run different"
                " things at a tick, where a ring's permutes would wait for ever; take 'all_gather' or"
                " 'ulysses'"
            )
        return found

    def _raised(self, jaxpr: Jaxpr, context: Told) -> Jaxpr:
        """The program with attention and recurrences that have no kernel as operations too."""
        inside = sunk(jaxpr)
        each = [find(inside, name) for name in ("attention", "linear_recurrence")]
        for near in (near for found in each for near in found.declined):
            context.report.declined("context", near.what, near.why, near.line or near.where)
        claims = []
        for r in (r for found in each for r in found.raised):
            try:
                made = lowering.LOWERINGS[r.op](r, Options("", shortest=1, library="none"))
            except Decline as reason:
                context.report.declined("context", lowering.spelled(r), str(reason), r.line or r.where)
                continue
            claims += [Claim(r.view, each.takes, each.gives, each.emit) for each in made]
        return placed(inside, claims, context.report) if claims else jaxpr


@dataclasses.dataclass
class _Placing:
    """Puts attention over a length in parts in a program's place of it.

    sizes: the mesh axes of the length. balance: the order of tokens, "" their own; why_not: why an attention
    has them in their own; grows: whether later tokens have more to do in one of the others.
    """

    strategy: str | None
    sizes: Mapping[str, int]
    context: Told
    report: Report
    balance: str = ""
    why_not: list[str] = dataclasses.field(default_factory=list)
    grows: bool = False

    @property
    def ways(self) -> int:
        return math.prod(self.sizes.values())

    def rule(self, site: Site) -> Sequence[Value] | None:
        found = _differentiated(site)
        if found is None:
            return None
        op, results = found
        if isinstance(op, RecurrenceForward):
            return self._carried(op, site, results)
        padded = Padded.of(op, site.args, self.ways)
        across = self._across(padded.op, site, padded.length)
        args = padded.args
        if padded.length != padded.to:
            args = padded.laid(self.context.mesh, tuple(self.sizes))
        if not across.balance:
            made = attention_and_lse(across, *args)
            return [made[i][:, :, :, : padded.length] for i in results]
        order = balance.order(across.balance, padded.length, self.ways)
        made = attention_and_lse(across, *in_order(args, across.balance, self.ways, not across.cross))
        return [in_text_order(made[i], order, 3) for i in results]

    def _carried(self, op: RecurrenceForward, site: Site, results: Sequence[int]) -> Sequence[Value]:
        """A recurrence whose steps lie in parts."""
        t = shape_of(site.eqn.invars[0])[2]
        order = self.balance if self.balance == "zigzag" and t % (2 * self.ways) == 0 else ""
        what = f"recurrence of {t} steps"
        if t % self.ways:
            raise Decline(f"{what}, which do not divide over {self.ways}: all devices do all")
        why = "a part's own steps, and what they make of a state that enters, sent to all"
        self.report.did("context", f"{what}{', ' * bool(order)}{order}", why, site.line)
        across, args = CarriedForward(op, tuple(self.sizes), balance=order), site.args
        if not order:
            made = carried(across, tuple(args))
            return [made[i] for i in results]
        rows = balance.order(order, t, self.ways)
        out, final = carried(across, (*(balanced(x, rows, 2) for x in args[:-1]), args[-1]))
        made = in_text_order(out, rows, 2), final
        return [made[i] for i in results]

    def _across(self, op: AttentionForward, site: Site, length: int) -> AcrossForward:
        """The operation that is put in its place, which the report is told of."""
        sizes, count, mesh = self.sizes, self.ways, self.context.mesh.shape
        shapes = [shape_of(v) for v in site.eqn.invars]
        (b, n, g, t, d), s, e = shapes[0], shapes[1][2], shapes[2][3]
        what = f"attention of {t} queries, {n * g} heads, {n} of keys"
        whole, order = -(-t // count) * count, self.balance
        if order and (why := balance.why_not(order, op.band, count, t)):
            self.why_not.append(why)
            order = ""
        if t != s:
            if t % count:
                raise Decline(f"{what}, and {s} keys: {t} queries do not divide over {count}; {whole} would")
            self.report.did("context", f"{what}, and {s} keys", "queries in parts, keys whole", site.line)
            return AcrossForward(op, "all_gather", cross=True, lies=tuple(sizes), balance=order)
        if whole != length:
            over = f"{count} devices of {', '.join(sizes)}"
            why = f"{length} does not divide over {over}: what is around it has the length whole"
            self.report.did("context", f"{what}, filled up to {whole}", why, site.line)
        rows, heads = ways(["activation_batch"], mesh), ways(["activation_kv_heads"], mesh)
        size = Sent(
            n // heads if n % heads == 0 else n,
            g,
            whole // count,
            d,
            e,
            site.avals[0].dtype.itemsize,
            op.segments,
            b // rows if b % rows == 0 else b,
            order,
        )
        chosen, known = self._strategy(op, size, f"({site.line}): {what}")
        others = ", ".join(f"{name} {amount(cost)}" for name, cost in known.items() if name != chosen)
        own = f"{amount(known[chosen])} a device and pass over {', '.join(sizes)}"
        own += f"; by {others}" if others else ""
        named = f"{chosen}, {order}" if order else chosen
        self.report.did("context", f"{what}: {named}", own, site.line)
        if order:
            self.grows |= op.band.grows
        inner = INNER if chosen == "usp" else ""
        return AcrossForward(op, chosen, inner, lies=tuple(sizes), balance=order)

    def _strategy(self, op: AttentionForward, size: Sent, what: str) -> tuple[str, dict[str, float]]:
        """How an attention sends what it needs, and the bytes of each way that there is."""
        inner, named = self.sizes.get(INNER, 1), ("all_gather", "ring") if size.balance else STRATEGIES
        names = [
            name
            for name in named
            if (name != "usp" or len(self.sizes) > 1) and not (name in RINGS and self.context.stage_axes)
        ]
        known = size.ways_of(names, op.band, self.ways, inner, self.context.differentiated)
        chosen = self.strategy or min(known, key=lambda name: known[name])
        if chosen not in known:
            raise PlanError(size.undivided(chosen, what, self.ways, inner))
        return chosen, known


def _differentiated(site: Site) -> tuple[AttentionForward | RecurrenceForward, list[int]] | None:
    """The attention or recurrence that a call with a derivative of its own computes, of its operands in their
    order, and which of its results it gives.
    """
    if site.name != "custom_vjp_call":
        return None
    (body, *_) = bodies(site.eqn)
    found = [eqn for eqn in body.eqns if operation_of(eqn) is not None]
    if len(found) != 1 or list(found[0].invars) != list(body.invars):
        return None
    op: Any = operation_of(found[0])
    if not isinstance(op, AttentionForward | RecurrenceForward):
        if op.name == "attention":
            raise Decline("its kernel is not JAX's, and does not run on parts: kernels.library has another")
        return None
    numbers: dict[Any, int] = {v: i for i, v in enumerate(found[0].outvars)}
    for eqn in body.eqns:
        if eqn.primitive.name == "name" and eqn.invars[0] in numbers:
            numbers[eqn.outvars[0]] = numbers[eqn.invars[0]]
    return op, [numbers[v] for v in body.outvars]


def _is_across(op: Operation) -> bool:
    kinds = AcrossForward | AcrossBackward | CarriedForward | CarriedBackward
    return isinstance(getattr(op, "op", op), kinds)


def _axes(op: Any) -> tuple[str, ...]:
    """The mesh axes over which an operation's length lies."""
    op = getattr(op, "op", op)
    axes: tuple[str, ...] = getattr(op, "forward", op).axes
    return axes
