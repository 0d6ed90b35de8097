"""Functions with a derivative of the user's own, at the size of a microbatch.

The rule of a derivative is a program over the whole batch as well, so it is analysed and run like the
function: the tangent of what has rows has rows, the cotangent of a sum is the same for all rows, and the
cotangent of what is the same for all is a sum over them. A rule that does anything else mixes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.axes import find_axes
from xform.batch.states import SAME, SUM, Batch, Case, Micro, Mixes, Outcome, State, is_float
from xform.trace import Jaxpr, Value, trace_flat

Analyse = Callable[..., Any]


def _alone(jaxpr: Jaxpr, inputs: Sequence[State], case: Case, analyse: Analyse) -> Any:
    """A program that stands nowhere in the analysed one, with its own axes."""
    axes, size = find_axes(jaxpr), case.batch.size
    seeds = [(axes.root.raw[v], s) for v, s in zip(jaxpr.invars, inputs, strict=True) if s.is_rows]
    if not seeds:
        return analyse(jaxpr, inputs, axes.root, Batch((), case.split, in_rule=True), case.folded)
    entries = [prod(f.size for f in axes.dims(shape)[s.dim]) for shape, s in seeds]
    majors = [n // (size * s.inner) for n, (_, s) in zip(entries, seeds, strict=True)]
    for (shape, s), major in zip(seeds, majors, strict=True):
        if s.inner > 1 or major > 1:
            axes.split(shape, s.dim, [n for n in (major, size, s.inner) if n > 1])
    (start, s), *others = seeds
    first, at = start[s.dim], _factors(axes.dims(start)[s.dim], majors[0], size)
    if at is None:
        raise Mixes("the rule of its derivative takes rows of the batch apart")
    for (shape, other), major in zip(others, majors[1:], strict=True):
        if (other.inner, major) == (s.inner, majors[0]):
            axes.factors.tie_dim(first, shape[other.dim])
    axes._forget()
    at = _factors(axes.dims(start)[s.dim], majors[0], size)
    assert at is not None
    return analyse(jaxpr, inputs, axes.root, Batch(at, case.split, in_rule=True), case.folded)


def _factors(dim: Any, major: int, size: int) -> Any:
    """The factors of an axis of this size, after `major` entries; None where none are."""
    before, found = 1, []
    for f in dim:
        if before >= major * size:
            break
        if before >= major:
            found.append(f)
        before *= f.size
    return tuple(found) if prod(f.size for f in found) == size else None


def custom_jvp(case: Case, analyse: Analyse) -> Outcome:
    p = case.params
    local = analyse(p["call_jaxpr"], case.states, case.scope.enter(case.index, 0), case.batch, case.folded)
    if case.batch.in_rule:
        return Outcome(tuple(local.outs), local.run)
    if all(s.is_same for s in case.states) and all(s.is_same for s in local.outs):
        return Outcome(tuple(local.outs))
    zeros = [not is_float(v) for v in case.eqn.invars[p["num_consts"] :]]
    jaxpr, consts, zero_outs = p["jvp_jaxpr_fun"].call_wrapped(*zeros)
    rule = jaxpr.with_consts(consts)
    primals = case.states[p["num_consts"] :]
    states = [*primals, *(s for s, zero in zip(primals, zeros, strict=True) if not zero)]
    derivative = _alone(rule, [s if not s.zero else SAME for s in states], case, analyse)
    tangents = [s for s, zero in zip(local.outs, zero_outs, strict=True) if not zero]
    if not all(map(_fits, derivative.outs, [*local.outs, *tangents])):
        raise Mixes("the rule of its derivative does something else with the batch")

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        @jax.custom_jvp
        def function(*xs: Value) -> list[Value]:
            return local.run(xs, micro)

        @function.defjvp
        def _(xs: Sequence[Value], ts: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            given = [t for t, zero in zip(ts[p["num_consts"] :], zeros, strict=True) if not zero]
            outs = derivative.run([*xs[p["num_consts"] :], *given], micro)
            values, rest = outs[: len(zero_outs)], iter(outs[len(zero_outs) :])
            return values, [
                _zero(x) if zero else next(rest) for x, zero in zip(values, zero_outs, strict=True)
            ]

        return function(*args)

    return Outcome(tuple(local.outs), emit)


def _fits(found: State, wanted: State) -> bool:
    return found == wanted or (found.is_same and wanted.is_same)


def _zero(x: Any) -> Any:
    if is_float(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def custom_vjp(case: Case, analyse: Analyse) -> Outcome:
    p = case.params
    local = analyse(p["call_jaxpr"], case.states, case.scope.enter(case.index, 0), case.batch, case.folded)
    if case.batch.in_rule:
        return Outcome(tuple(local.outs), local.run)
    if all(s.is_same for s in case.states) and all(s.is_same for s in local.outs):
        return Outcome(tuple(local.outs))
    return Outcome(tuple(local.outs), _with_vjp(case, local, analyse))


def _with_vjp(case: Case, local: Any, analyse: Analyse) -> Any:
    p, n = case.params, case.params["num_consts"]
    primals = case.states[n:]
    floats = [is_float(v) for v in case.eqn.invars[n:]]
    jaxpr, consts = p["fwd_jaxpr_thunk"].call_wrapped(*floats)
    forward = _alone(jaxpr.with_consts(consts), [SAME if s.zero else s for s in primals], case, analyse)
    _, tree, forwarded = p["out_trees"]()
    made = tree.num_leaves - sum(f is not None for f in forwarded)
    if not all(map(_fits, forward.outs[made:], local.outs)):
        raise Mixes("the rule of its derivative does something else with the batch")

    def residuals(found: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        rest = iter(found)
        return [next(rest) if f is None else inputs[f] for f in forwarded]

    held = residuals(forward.outs[:made], primals)
    held_vars = residuals(jaxpr.outvars[:made], case.eqn.invars[n:])
    outs = case.eqn.outvars
    cotangents = [SAME if s.is_part else s for s in local.outs]
    which = [is_float(v) for v in outs]
    avals = [v.aval for v in held_vars] + [v.aval for v, w in zip(outs, which, strict=True) if w]
    places: list[int] = []

    def backward(*xs: Value) -> list[Value]:
        given = iter(xs[len(held) :])
        cts = [next(given) if w else _zero(v.aval) for v, w in zip(outs, which, strict=True)]
        found, _ = p["bwd"].call_wrapped(*xs[: len(held)], *cts)
        places[:] = [i for i, ct in enumerate(found) if floats[i] and hasattr(ct, "dtype")]
        return [found[i] for i in places]

    rule = trace_flat(backward, avals, "backward")
    states = [
        *(SAME if s.zero else s for s in held),
        *(s for s, w in zip(cotangents, which, strict=True) if w),
    ]
    back = _alone(rule, states, case, analyse)
    for i, found in zip(places, back.outs, strict=True):
        wanted = primals[i] if primals[i].is_rows else SUM
        if found != wanted and not found.zero:
            raise Mixes("the rule of its derivative does something else with the batch")

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        @jax.custom_vjp
        def function(*xs: Value) -> list[Value]:
            return local.run([*args[:n], *xs], micro)

        def fwd(*xs: Value) -> tuple[list[Value], Any]:
            found = forward.run(xs, micro)
            return found[made:], (residuals(found[:made], xs), micro.index, micro.group)

        def bwd(kept: Any, cts: Sequence[Value]) -> tuple[Any, ...]:
            held, index, group = kept
            given = [ct for ct, w in zip(cts, which, strict=True) if w]
            found = dict(
                zip(places, back.run([*held, *given], Micro(index, micro.split, group)), strict=True)
            )
            return tuple(found.get(i) for i in range(len(primals)))

        function.defvjp(fwd, bwd)
        return function(*args[n:])

    return emit
