"""Writes out a program's collectives, counts them, and predicts what the compiler would send in their
place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from xform.context import Context
from xform.higher_order import equations
from xform.report import Report, amount
from xform.sharding.layout import entry_axes
from xform.sharding.twins import twins
from xform.spmd import opened
from xform.spmd.ledger import Sent, ledger
from xform.spmd.partition import partitioned
from xform.spmd.torus import Staged, staged
from xform.spmd.traffic import Traffic, traffic, weights_of
from xform.spmd.values import GRADIENT, WHOLE, Options
from xform.trace import Jaxpr


@dataclasses.dataclass(frozen=True)
class Written:
    """A program with its collectives written out, what it sends, and the bytes that the compiler's
    partitioner is expected to send for the same layouts.
    """

    jaxpr: Jaxpr
    traffic: Traffic
    compiler: float


def written(
    jaxpr: Jaxpr,
    context: Context,
    manual: Sequence[str],
    options: Options,
    report: Report,
) -> Written:
    """The program, laid out by constraints, in one manual region over the mesh axes `manual`.

    Raises Decline for a program that has a manual region of its own which cannot be opened in this one.
    """
    cut = staged(context.mesh, context.dcn)
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "shard_map":
            opened.check(eqn, context.mesh.shape, {axis: cut.parts[axis] for axis in manual})
    weights = {
        i: dotted(context.inputs[i].path) for i, kind in enumerate(context.kinds) if kind == "parameter"
    }
    batch = _batch_axes(context, manual)
    shardings = context.in_shardings, context.out_shardings
    region = partitioned(jaxpr, cut, manual, *shardings, report, options, weights, batch)
    axes = [_dimension_axes(s) for s in context.in_shardings]
    trained = frozenset(i for i in twins(context.inputs, context.outputs) if i is not None)
    known = weights_of(
        jaxpr, weights, trained, axes, context.mesh.shape, batch, once=options.gather == "step"
    )
    sent = ledger(region.jaxpr, cut.mesh.shape)
    if options.sum_dtype is not None:
        _tell_dtype(sent, options.sum_dtype, report)
    if options.gather == "step":
        nbytes = sum(w.nbytes for w in known if w.ways > 1)
        report.did("shard", "weights come together once a step", f"{amount(nbytes)} of them on a device")
    return Written(region.jaxpr, traffic(sent, known, cut, batch), _compiler(sent, cut) + region.spared)


def _tell_dtype(sent: Sequence[Sent], dtype: str, report: Report) -> None:
    """What gradients cost on the wire in this dtype, and would in that in which they are computed."""
    total = own = 0.0
    computed: dict[str, None] = {}
    for s in sent:
        if found := re.search(rf"{GRADIENT}(\w+)", s.where):
            computed[found[1]] = None
            total += s.total
            own += s.total * np.dtype(found[1]).itemsize / np.dtype(s.dtype).itemsize
    more, names = total - own, " and ".join(computed)
    difference = f"{amount(abs(more))} {'more' if more > 0 else 'less'} than" if more else "as many as"
    if names:
        why = f"{amount(total)} a device and step, {difference} in {names}, in which they are computed"
        report.did("shard", f"gradients are summed in {dtype}", why)


def _compiler(sent: Sequence[Sent], cut: Staged) -> float:
    """The bytes of the compiler's partitioner: it sums each term by itself, and over an axis that turns a
    corner of the torus it makes all-reduces of reduce-scatters. What is computed on whole values here, it may
    know how to divide.
    """
    turning = {
        p for parts in cut.parts.values() if len([q for q in parts if q not in cut.dcn]) > 1 for p in parts
    }
    total = 0.0
    for s in sent:
        if WHOLE in s.where:
            continue
        scatters = s.kind == "reduce-scatter" or (s.kind == "permute" and GRADIENT in s.where)
        twice = scatters and not turning.isdisjoint(s.axes)
        total += s.total * (2 if twice else 1)
    return total


def dotted(path: str) -> str:
    """`params.head.kernel` for `['params']['head']['kernel']`: a name that can stand in a name stack."""
    return re.sub(r"\[\W*(.*?)\W*\]", r".\1", path).replace("/", ".").strip(".")


def _dimension_axes(sharding: NamedSharding | None) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension."""
    return [] if sharding is None else [entry_axes(entry) for entry in sharding.spec]


def _batch_axes(context: Context, manual: Sequence[str]) -> list[str]:
    """The mesh axes, of those written out, that the data lies over."""
    data: list[Any] = [
        s for s, kind in zip(context.in_shardings, context.kinds, strict=False) if kind == "data"
    ]
    return [
        a for a in dict.fromkeys(a for s in data for dim in _dimension_axes(s) for a in dim) if a in manual
    ]
