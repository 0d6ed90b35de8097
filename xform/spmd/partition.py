"""A whole program in one manual region: `shard_map` over the plan's axes, every collective written out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from xform.higher_order import equations
from xform.report import Report
from xform.sharding.layout import entry_axes
from xform.spmd import blocks, calls, lookups, loops, opened, prefixes, randoms, resident, special
from xform.spmd.layout import Grid
from xform.spmd.torus import Staged
from xform.spmd.values import PLAIN, Options
from xform.spmd.walk import Walk
from xform.trace import Jaxpr, Value, eval_jaxpr, fitted, name_stack, shape_of, trace_flat, without_dead

HANDLERS = {
    **loops.HANDLERS,
    **opened.HANDLERS,
    **special.HANDLERS,
    **prefixes.HANDLERS,
    **calls.HANDLERS,
    **blocks.HANDLERS,
    **lookups.HANDLERS,
    **randoms.HANDLERS,
    **resident.HANDLERS,
}


@dataclasses.dataclass(frozen=True)
class Region:
    """A program as every device runs it. spared: bytes a step that it does not send because terms were added
    up before they were summed over devices, which the compiler's partitioner does one by one.
    """

    jaxpr: Jaxpr
    spared: float


def partitioned(
    jaxpr: Jaxpr,
    staged: Staged,
    manual: Sequence[str],
    in_shardings: Sequence[NamedSharding | None],
    out_shardings: Sequence[NamedSharding | None],
    report: Report,
    options: Options = PLAIN,
    weights: Mapping[int, str] | None = None,
    batch: Sequence[str] = (),
) -> Region:
    """The program as every device runs it, of the same type.

    manual: the axes of the plan's mesh that it is written out for; the others are left to the compiler. What
    lies how at its ends, `in_shardings` and `out_shardings` say (None: whole). options: how. weights: numbers
    of inputs that are weights, with a name for each. batch: the axes of the plan's mesh that the data lies
    over.
    """
    parts = {axis: staged.parts[axis] for axis in manual}
    names = [p for axis in manual for p in parts[axis]]
    single = [p for axis in staged.parts for p in staged.parts[axis] if staged.mesh.shape[p] == 1]
    grid = Grid({p: staged.mesh.shape[p] for p in names}, staged.dcn)

    def spec(sharding: NamedSharding | None) -> PartitionSpec:
        entries = [] if sharding is None else list(sharding.spec)
        made: list[Any] = []
        for entry in entries:
            axes = tuple(p for a in entry_axes(entry) for p in parts.get(a, ()))
            made.append(axes or None)
        return PartitionSpec(*made)

    ins, outs = [spec(s) for s in in_shardings], [spec(s) for s in out_shardings]
    avals = [v.aval for v in jaxpr.outvars]
    differentiated = any("jvp(" in name_stack(eqn) for eqn in equations(jaxpr))
    ruled = not differentiated and any(e.primitive.name == "custom_vjp_call" for e in equations(jaxpr))
    spared = 0.0

    def local(*xs: Value) -> list[Value]:
        nonlocal spared
        own = [p for axis in batch for p in parts.get(axis, ())]
        walk = Walk(grid, parts, report, HANDLERS, options, differentiated or ruled, own)
        vals = [
            walk.held(x, v.aval, grid.of_spec(s, shape_of(v)), (weights or {}).get(i, ""))
            for i, (x, v, s) in enumerate(zip(xs, jaxpr.invars, ins, strict=True))
        ]
        results = walk.run(jaxpr, vals)
        found = [
            fitted(walk.get(val, grid.of_spec(s, val.shape)), val.aval)
            for val, s in zip(results, outs, strict=True)
        ]
        spared = walk.spared
        return found

    def whole(*xs: Value) -> list[Value]:
        region: Any = jax.shard_map(
            local,
            mesh=staged.mesh,
            in_specs=tuple(ins),
            out_specs=outs,
            axis_names=frozenset((*names, *single)),
            check_vma=False,
        )
        if ruled:
            # A rule for the backward pass is a function of whole values: what is differentiated is the
            # program as it was, and the compiler lays that out.
            run, region = region, jax.custom_vjp(lambda *xs: tuple(run(*xs)))
            region.defvjp(
                lambda *xs: jax.vjp(lambda *xs: tuple(eval_jaxpr(jaxpr, *xs)), *xs),
                lambda pullback, cotangents: pullback(cotangents),
            )
        return [fitted(x, aval) for x, aval in zip(region(*xs), avals, strict=True)]

    made = trace_flat(whole, [v.aval for v in jaxpr.invars], "explicit")
    return Region(without_dead(made), spared)
