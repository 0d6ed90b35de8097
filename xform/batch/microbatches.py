"""The scan over the microbatches of a program that is cut, with its derivative.

Values and gradients come of one scan: each microbatch is differentiated in it, and of its activations nothing
is left. The gradients are those of single sums, since how the loss depends on them is known only when the
scan is over; where it depends on several, a second scan computes the gradient of the loss itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters.ad import Zero
from jax.sharding import NamedSharding, PartitionSpec

from xform.batch.cut import Cut
from xform.batch.states import Micro, is_float
from xform.errors import PlanError
from xform.report import Report
from xform.trace import Jaxpr, Literal, Value, Var, shape_of, trace_flat, typeof

MANY = 8
"""Sums of which the gradients are computed beside the values; those that nothing uses are taken away."""

Leaves = Sequence[Value]
Turn = tuple[Value, Leaves]
"""A microbatch: its number and its data."""


@dataclasses.dataclass(frozen=True)
class Swept:
    """What all microbatches gave. sums: those that are added up. stacked: extremes and rows, [steps, ...].
    gradients, rows: for each cotangent, the gradients of what is the same, added up, and of data, stacked.
    """

    sums: list[Value]
    stacked: tuple[list[Value], list[Value]]
    gradients: list[list[Value]]
    rows: list[list[Value]]


class Microbatches:
    """The scan over the microbatches, with its derivative.

    It takes what is the same for all and the data, [steps, ...], and gives the parts, combined, and the rows
    gathered, [steps, ...]. groups: how what has a dimension for each group of devices lies, if it has one.
    """

    who = "accumulate"

    def __init__(self, found: Cut, dtype: str, groups: NamedSharding | None, report: Report) -> None:
        self.cut, self.dtype, self.groups, self.report = found, dtype, groups, report
        self.kinds = [found.states[v].kind for v in found.parts]
        self.floats = [k == "sum" and is_float(v) for v, k in zip(found.parts, self.kinds, strict=True)]

    def function(self) -> Callable[[Leaves, Leaves], tuple[list[Value], list[Value]]]:
        run = jax.custom_vjp(self.values)
        run.defvjp(self.forward, self.backward, symbolic_zeros=True)
        return run

    def whole(self, jaxpr: Jaxpr, name: str) -> Jaxpr:
        """The program in which the microbatches take the place of what is between its parts."""
        found, run = self.cut, self.function()
        own = found.jaxpr

        def program(*args: Value) -> list[Value]:
            env: dict[Var, Value] = dict(zip(own.all_invars, [*own.consts, *args], strict=True))
            found.run_before(env)
            data = [self.laid(found.split.apart(env[v], found.states[v]), 1) for v in found.data]
            parts, gathered = run([env[v] for v in found.same], data)
            env.update(zip(found.parts, parts, strict=True))
            for v, x in zip(found.gathered, gathered, strict=True):
                env[v] = found.split.together(x, found.states[v])
            found.run_after(env)
            return [v.val if isinstance(v, Literal) else env[v] for v in own.outvars]

        return trace_flat(program, [v.aval for v in jaxpr.invars], name, jaxpr.debug_info.arg_names)

    def values(self, same: Leaves, data: Leaves) -> tuple[list[Value], list[Value]]:
        """Without a derivative."""
        swept = self.sweep(same, data, (), (), ())
        return self.combined(swept.sums, swept.stacked)

    def forward(self, same: Any, data: Any) -> Any:
        """The values, and beside them the gradient of each sum that is a single number."""
        which = tuple(i for i, x in enumerate((*same, *data)) if x.perturbed)
        same, data = [x.value for x in same], [x.value for x in data]
        wanted = [
            k
            for k, v in enumerate(self.cut.parts)
            if self.floats[k] and not shape_of(v) and _depends(self.cut, v, which)
        ][:MANY]
        single = [jnp.ones((), _dtype(self.cut.parts[k])) for k in wanted]
        pulls = [
            [one if i == j else Zero(typeof(one)) for i, one in enumerate(single)] for j in range(len(wanted))
        ]
        swept = self.sweep(same, data, which, wanted, pulls)
        ready = dict(zip(wanted, zip(swept.gradients, swept.rows, strict=True), strict=True))
        return self.combined(swept.sums, swept.stacked), (ready, same, data, _Which(which))

    def backward(self, kept: Any, cotangents: Any) -> Any:
        """The gradients times how the loss depends on the sum; of several sums, by a second scan."""
        ready, same, data, flags = kept
        parts, gathered = cotangents
        self.check(parts, gathered)
        used = {k: ct for k, ct in enumerate(parts) if self.floats[k] and not isinstance(ct, SymbolicZero)}
        found: list[Any] = [None] * (len(same) + len(data))
        if not used:
            return found[: len(same)], found[len(same) :]
        if len(used) == 1 and next(iter(used)) in ready:
            ((k, ct),) = used.items()
            sums, rows = ready[k]
        else:
            (sums, rows), ct = self.again(same, data, flags.numbers, used), jnp.ones(())
        if self.groups is not None:
            sums = [g.sum(0) for g in sums]
        inputs = [*same, *data]
        for i, g in zip(flags.numbers, (*sums, *rows), strict=True):
            found[i] = (g * ct.astype(g.dtype)).astype(inputs[i].dtype)
        return found[: len(same)], found[len(same) :]

    def again(self, same: Leaves, data: Leaves, which: Sequence[int], cts: dict[int, Value]) -> Any:
        """The gradient by a sweep of its own: the forward pass of each microbatch runs a second time."""
        why, line = self.cut.apart or ("several results are differentiated", "")
        self.report.did(self.who, "the forward pass runs twice: not one sum alone", why, line)
        swept = self.sweep(same, data, which, list(cts), [list(cts.values())])
        return swept.gradients[0], swept.rows[0]

    def sweep(
        self, same: Leaves, data: Leaves, which: Sequence[int], wanted: Sequence[int], pulls: Sequence[Leaves]
    ) -> Swept:
        """All microbatches, one after the other. For each of `pulls`, cotangents of the sums `wanted`, the
        gradients for the inputs `which`, numbers in (*same, *data).
        """
        first = [i for i in which if i < len(same)]

        def turn(carried: Any, x: Turn) -> tuple[Any, Any]:
            sums, gradients = carried
            outs, found = self.inside(same, x, which, wanted, pulls)
            gradients = [
                self.accumulated(own, new[: len(first)]) for own, new in zip(gradients, found, strict=True)
            ]
            rows = [new[len(first) :] for new in found]
            return (self.added(sums, outs), gradients), (self.stacked(outs), rows)

        nothing = [self.accumulators([same[i] for i in first]) for _ in pulls]
        (sums, gradients), (stacked, rows) = self.scan(turn, (self.zeros(), nothing), data)
        return Swept(sums, stacked, gradients, rows)

    # The pieces

    def scan(self, turn: Any, carried: Any, data: Leaves) -> Any:
        return jax.lax.scan(turn, carried, (jnp.arange(self.cut.split.steps), list(data)))

    def inside(
        self, same: Leaves, x: Turn, which: Sequence[int], wanted: Sequence[int], pulls: Sequence[Leaves]
    ) -> tuple[list[Value], list[list[Value]]]:
        """The results of a microbatch, and for each of `pulls`, cotangents of the sums `wanted`, the
        gradients for the inputs `which`; a group of devices each where there are groups."""
        index, data = x

        def group(data: Leaves, number: Value) -> tuple[list[Value], list[list[Value]]]:
            micro = Micro(index, self.cut.split, number)
            inputs = [*same, *data]

            def function(chosen: Leaves) -> Any:
                given = [*inputs]
                for i, value in zip(which, chosen, strict=True):
                    given[i] = value
                env = dict(zip((*self.cut.same, *self.cut.data), given, strict=True))
                outs = self.cut.run_inside(env, micro)
                return [outs[k] for k in wanted], outs

            if not pulls:
                return function([inputs[i] for i in which])[1], []
            _, pull, outs = jax.vjp(function, [inputs[i] for i in which], has_aux=True)
            return outs, [pull(list(cts))[0] for cts in pulls]

        if self.groups is None:
            return group(data, 0)
        return jax.vmap(group)(data, jnp.arange(self.cut.split.groups))

    def laid(self, x: Value, at: int = 0) -> Value:
        """An array with a dimension of groups at `at`, each with the devices that have its rows."""
        if self.groups is None:
            return x
        free = [PartitionSpec.UNCONSTRAINED] * len(x.shape)
        spec = PartitionSpec(*free[:at], *self.groups.spec, *free[at + 1 :])
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.groups.mesh, spec))

    def accumulators(self, values: Leaves) -> list[Value]:
        lead = () if self.groups is None else (self.cut.split.groups,)
        return [self.laid(jnp.zeros((*lead, *x.shape), self.kept(x.dtype))) for x in values]

    def accumulated(self, sums: Leaves, new: Leaves) -> list[Value]:
        return [self.laid(s + x.astype(s.dtype)) for s, x in zip(sums, new, strict=True)]

    def kept(self, dtype: Any) -> Any:
        """The dtype in which gradients of a dtype are added up."""
        return self.dtype if self.dtype and jnp.finfo(dtype).bits <= 32 else dtype

    def zeros(self) -> list[Value]:
        sums = [v for v, kind in zip(self.cut.parts, self.kinds, strict=True) if kind == "sum"]
        return [jnp.zeros(shape_of(v), _wide(v)) for v in sums]

    def added(self, sums: Leaves, outs: Leaves) -> list[Value]:
        new = (jnp.asarray(x) for x, kind in zip(outs, self.kinds, strict=False) if kind == "sum")
        return [
            s + (x if self.groups is None else x.sum(0, dtype=s.dtype)).astype(s.dtype)
            for s, x in zip(sums, new, strict=True)
        ]

    def stacked(self, outs: Leaves) -> tuple[list[Value], list[Value]]:
        """The largest and smallest of a microbatch, and its rows."""
        extremes = [x for x, kind in zip(outs, self.kinds, strict=False) if kind != "sum"]
        return extremes, list(outs[len(self.kinds) :])

    def combined(self, sums: Leaves, stacked: Any) -> tuple[list[Value], list[Value]]:
        added, extremes = iter(sums), iter(stacked[0])
        lead = tuple(range(len(self.cut.split.lead)))
        parts = []
        for v, kind in zip(self.cut.parts, self.kinds, strict=True):
            if kind == "sum":
                parts.append(next(added).astype(_dtype(v)))
            else:
                parts.append((jnp.max if kind == "max" else jnp.min)(next(extremes), lead))
        return parts, list(stacked[1])

    def check(self, parts: Sequence[Any], gathered: Sequence[Any]) -> None:
        """Only what is a sum over the batch can be differentiated."""

        def moves(v: Var, ct: Any) -> bool:
            return is_float(v) and not isinstance(ct, SymbolicZero)

        extremes = zip(self.cut.parts, self.kinds, parts, strict=True)
        what = (
            "a result with a row for each of the batch's"
            if any(map(moves, self.cut.gathered, gathered))
            else "the largest or smallest of the batch"
            if any(kind != "sum" and moves(v, ct) for v, kind, ct in extremes)
            else ""
        )
        if what:
            raise PlanError(
                f"{self.who}: {what} is differentiated, and the microbatches are over when it is known how:"
                " differentiate a sum over the batch, and return others beside the loss (has_aux=True) or"
                f" behind jax.lax.stop_gradient; or plan without {self.who}"
            )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Which:
    """The inputs that are differentiated, as a residual."""

    numbers: tuple[int, ...]


def _dtype(v: Any) -> Any:
    return v.aval.dtype


def _wide(v: Any) -> Any:
    """The dtype in which sums of values like this one are added up."""
    dtype = _dtype(v)
    return jnp.float32 if is_float(v) and jnp.finfo(dtype).bits < 32 else dtype


def _depends(found: Cut, part: Var, which: Sequence[int]) -> bool:
    """Whether a part is made of something that is differentiated."""
    inputs = (*found.same, *found.data)
    moving = {inputs[i] for i in which}
    for eqn, _ in found.inside:
        if any(v in moving for v in eqn.invars if isinstance(v, Var)):
            moving.update(eqn.outvars)
    return part in moving
