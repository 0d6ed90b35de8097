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

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.context import Context as Told
from xform.errors import Decline, PlanError
from xform.higher_order import bodies, equations
from xform.kernels import lowering
from xform.kernels.across import AcrossBackward, AcrossForward
from xform.kernels.attention import AttentionForward, attention_and_lse
from xform.kernels.lowering import Options
from xform.kernels.sent import STRATEGIES, Sent, repeated
from xform.ops import Operation, operation_of
from xform.plans.rules import ways
from xform.raising.finding import find
from xform.raising.placing import Claim, placed
from xform.raising.sinking import sunk
from xform.report import amount
from xform.rewrite import Site, rewrite
from xform.sharding import regions
from xform.trace import Jaxpr, Value, shape_of, source_line

INNER = "context_usp_ulysses"
"""MaxText's name of the mesh axis along which "usp" exchanges heads."""


RINGS = ("ring", "usp")


@dataclasses.dataclass(frozen=True)
class Context:
    """Options:

    axis: the mesh axis that the length lies over; with `context_usp_ulysses`, where the mesh has it.
    strategy: "all_gather" of keys and values; "ring", in which they go round; "ulysses", all of the length of
        some heads in exchange for some of the length of all; "usp", that along the axis
        `context_usp_ulysses` and a ring along the other. By default, for each attention, the one that sends
        the fewest bytes.

    In the stages of a pipeline there is no ring: a permute is waited for by all devices, also by stages that
    run something else at that tick.

    Raises PlanError where the mesh lacks the axis, where heads do not divide as a strategy that is named has
    to have them, for a ring in a pipeline, and where a length that should lie over the axis does not.
    """

    axis: str = "context"
    strategy: Literal["all_gather", "ring", "ulysses", "usp"] | None = None

    stages: ClassVar[tuple[str, ...]] = ("model",)
    after: ClassVar[tuple[str, ...]] = ("roll", "chunkedloss", "kernels", "shard")

    def rewrite(self, jaxpr: Jaxpr, context: Told) -> Jaxpr:
        sizes = self._sizes(context)

        def rule(site: Site) -> Sequence[Value] | None:
            found = _attention(site)
            if found is None:
                return None
            op, results = found
            padded = Padded.of(op, site.args, math.prod(sizes.values()))
            across = self._across(padded.op, site, padded.length, sizes, context)
            args = padded.args if padded.length == padded.to else padded.laid(context.mesh, tuple(sizes))
            made = attention_and_lse(across, *args)
            return [made[i][:, :, :, : padded.length] for i in results]

        return rewrite(self._raised(jaxpr, context), rule, context.report, "context")

    def finish(self, jaxpr: Jaxpr, context: Told) -> Jaxpr:
        """Operations outside of any manual region get one. By now all are told where their length lies."""
        jaxpr = regions.written(jaxpr, context, "context", _is_across)
        for eqn in equations(jaxpr):
            op = operation_of(eqn)
            if op is not None and _is_across(op) and not _axes(op):
                raise PlanError(
                    f"context ({source_line(eqn)}): the length of this attention lies over no {self.axis!r}."
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
        if self.strategy in RINGS and context.stage_axes:
            stages = ", ".join(context.stage_axes)
            raise PlanError(
                f"context.strategy = {self.strategy!r} with pipeline: stages over {stages} run different"
                " things at a tick, where a ring's permutes would wait for ever; take 'all_gather' or"
                " 'ulysses'"
            )
        return found

    def _raised(self, jaxpr: Jaxpr, context: Told) -> Jaxpr:
        """The program with attention that has no kernel as an operation too."""
        inside = sunk(jaxpr)
        found = find(inside, "attention")
        for near in found.declined:
            context.report.declined("context", near.what, near.why, near.line or near.where)
        claims = []
        for r in found.raised:
            try:
                made = lowering.LOWERINGS[r.op](r, Options("", shortest=1, library="none"))
            except Decline as reason:
                context.report.declined("context", lowering.spelled(r), str(reason), r.line or r.where)
                continue
            claims += [Claim(r.view, each.takes, each.gives, each.emit) for each in made]
        return placed(inside, claims, context.report) if claims else jaxpr

    def _across(
        self, op: AttentionForward, site: Site, length: int, sizes: Mapping[str, int], context: Told
    ) -> AcrossForward:
        """The operation that is put in its place, which the report is told of."""
        shapes = [shape_of(v) for v in site.eqn.invars]
        (b, n, g, t, d), s, e = shapes[0], shapes[1][2], shapes[2][3]
        count, mesh = math.prod(sizes.values()), context.mesh.shape
        what = f"attention of {t} queries, {n * g} heads, {n} of keys"
        whole = -(-t // count) * count
        if t != s:
            if t % count:
                raise Decline(f"{what}, and {s} keys: {t} queries do not divide over {count}; {whole} would")
            context.report.did("context", f"{what}, and {s} keys", "queries in parts, keys whole", site.line)
            return AcrossForward(op, "all_gather", cross=True, lies=tuple(sizes))
        if whole != length:
            over = f"{count} devices of {', '.join(sizes)}"
            why = f"{length} does not divide over {over}: what is around it has the length whole"
            context.report.did("context", f"{what}, filled up to {whole}", why, site.line)
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
        )
        costs = {
            name: size.by(name, op.band, count, sizes.get(INNER, 1), context.differentiated)
            for name in STRATEGIES
            if (name != "usp" or len(sizes) > 1) and not (name in RINGS and context.stage_axes)
        }
        known = {name: cost for name, cost in costs.items() if cost is not None}
        chosen: str = self.strategy or min(known, key=lambda name: known[name])
        if chosen not in known:
            raise PlanError(_undivided(chosen, size, what, site.line, count, sizes.get(INNER, 1)))
        others = ", ".join(f"{name} {amount(cost)}" for name, cost in known.items() if name != chosen)
        own = f"{amount(known[chosen])} a device and pass over {', '.join(sizes)}; by {others}"
        context.report.did("context", f"{what}: {chosen}", own, site.line)
        return AcrossForward(op, chosen, INNER if chosen == "usp" else "", lies=tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Padded:
    """An attention whose length, of queries and keys, is filled up `to` one that divides. No query of the
    program sees a key that is filled up: by position, or since its segment is no query's.

    args: q, k, v, sinks or None, and segments, if any.
    """

    op: AttentionForward
    args: tuple[Any, ...]
    length: int
    to: int

    @classmethod
    def of(cls, op: AttentionForward, args: Sequence[Value], count: int) -> Padded:
        q, k, v, sinks, segments = op.named(args)
        length, keys = q.shape[3], k.shape[2]
        to = -(-length // count) * count
        if to == length or length != keys:
            return cls(op, (q, k, v, sinks, *(segments or ())), length, length)
        band = op.band
        behind = band.right is not None and band.right + band.offset <= 0 and band.prefix <= keys
        if segments is None and not behind:
            segments = (jnp.zeros((q.shape[0], length), jnp.int32),) * 2
        op = dataclasses.replace(op, segments=segments is not None)
        q, k, v = _filled(q, 3, to), _filled(k, 2, to), _filled(v, 2, to)
        if segments is not None:
            segments = _filled(segments[0], 1, to), _filled(segments[1], 1, to, np.iinfo(np.int32).min)
        return cls(op, (q, k, v, sinks, *(segments or ())), length, to)

    def laid(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Any, ...]:
        """The arguments, their length over mesh axes: what it was filled up from lies over none."""
        q, k, v, sinks, *segments = self.args

        def over(x: Any, dim: int) -> Any:
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            entries[dim] = axes
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

        return over(q, 3), over(k, 2), over(v, 2), sinks, *(over(x, 1) for x in segments)


def _filled(x: Any, dim: int, to: int, value: int = 0) -> Any:
    """An array filled up along a dimension."""
    more = [(0, to - n if i == dim else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, more, constant_values=value)


def _undivided(strategy: str, size: Sent, what: str, line: str, ways: int, inner: int) -> str:
    """The error where heads do not divide."""
    exchanged = ways if strategy == "ulysses" else inner
    fit = [n for n in range(2, size.n * size.g + 1) if repeated(size.n, size.g, n) is not None]
    return (
        f"context.strategy = {strategy!r} ({line}): {what}: {size.n * size.g} on a device do not divide over"
        f" {exchanged} devices; over {', '.join(map(str, fit)) or 'none'} they would, and 'all_gather' and"
        " 'ring' take any"
    )


def _attention(site: Site) -> tuple[AttentionForward, list[int]] | None:
    """The attention that a call with a derivative of its own computes, of its operands in their order, and
    which of out and lse it gives.
    """
    if site.name != "custom_vjp_call":
        return None
    (body, *_) = bodies(site.eqn)
    found = [eqn for eqn in body.eqns if operation_of(eqn) is not None]
    if len(found) != 1 or list(found[0].invars) != list(body.invars):
        return None
    op: Any = operation_of(found[0])
    if not isinstance(op, AttentionForward):
        if op.name == "attention":
            raise Decline("its kernel is not JAX's, and does not run on parts: kernels.library has another")
        return None
    numbers: dict[Any, int] = {v: i for i, v in enumerate(found[0].outvars)}
    for eqn in body.eqns:
        if eqn.primitive.name == "name" and eqn.invars[0] in numbers:
            numbers[eqn.outvars[0]] = numbers[eqn.invars[0]]
    return op, [numbers[v] for v in body.outvars]


def _is_across(op: Operation) -> bool:
    return isinstance(getattr(op, "op", op), AcrossForward | AcrossBackward)


def _axes(op: Any) -> tuple[str, ...]:
    """The mesh axes over which an operation's length lies."""
    op = getattr(op, "op", op)
    axes: tuple[str, ...] = (op.forward if isinstance(op, AcrossBackward) else op).axes
    return axes
