"""A program's derivative in two programs: forward, with what is kept, and backward.

    outs = f moving rest    ->    outs, kept = forward moving rest;  gradients = backward kept rest dout

What is kept is what JAX's derivative keeps, so that policies of what is saved and what is computed again hold
here too; but nothing that is made of `rest` alone, weights cast or transposed: that is made again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.trace import Jaxpr, Literal, Value, Var, inline, trace_flat, without_dead


@dataclasses.dataclass(frozen=True)
class Derivative:
    """forward: of all arguments, gives (*results, *kept). backward: of (*kept, *there, *cotangents), those of
    the floats of the results, gives the gradients of `chosen`, in order.
    """

    forward: Jaxpr
    kept: tuple[Any, ...]
    backward: Jaxpr


def derivative(program: Jaxpr, moving: int, chosen: Sequence[int], there: Sequence[int]) -> Derivative:
    """moving: how many arguments, the first, are not at hand again but for those of `there`, numbers of
    arguments that the backward program is given again, all others among them. chosen: numbers of those whose
    gradients are wanted.
    """
    types, outs = [v.aval for v in program.invars], [v.aval for v in program.outvars]
    floats = [n for n, t in enumerate(outs) if _is_floating(t)]
    tree: Any = None

    def run(*args: Value) -> list[Value]:
        nonlocal tree

        def of(some: Sequence[Value]) -> Any:
            given = list(args)
            for n, x in zip(chosen, some, strict=True):
                given[n] = x
            every = inline(program, *given)
            return [every[n] for n in floats], every

        _, pull, every = jax.vjp(of, [args[n] for n in chosen], has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        return [*every, *leaves]

    full = trace_flat(run, types, program.debug_info.func_name)
    leaves, given = full.outvars[len(outs) :], [full.invars[n] for n in there]
    moved = reached(full, full.invars[:moving]) - set(given)
    saved = list(dict.fromkeys(v for v in leaves if isinstance(v, Var) and v in moved))
    made_again = list(dict.fromkeys(v for v in leaves if isinstance(v, Var) and v not in moved))
    again = with_results(full, made_again, given)

    def backward(*args: Value) -> list[Value]:
        known = dict(zip(saved, args, strict=False))
        others = args[len(saved) : len(saved) + len(given)]
        known |= dict(zip(made_again, inline(again, *others), strict=True))
        values = [v.val if isinstance(v, Literal) else known[v] for v in leaves]
        pull = jax.tree.unflatten(tree, values)
        return list(pull(list(args[len(saved) + len(given) :]))[0])

    kept = tuple(v.aval for v in saved)
    taken = [*kept, *(types[n] for n in there), *(outs[n] for n in floats)]
    return Derivative(
        with_results(full, [*full.outvars[: len(outs)], *saved]),
        kept,
        without_dead(trace_flat(backward, taken, program.debug_info.func_name)),
    )


def _is_floating(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def reached(jaxpr: Jaxpr, of: Iterable[Any]) -> set[Any]:
    """The variables that some go into, themselves among them."""
    found = set(of)
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def with_results(jaxpr: Jaxpr, outs: Sequence[Any], takes: Sequence[Var] | None = None) -> Jaxpr:
    """A part of a program: other results, of all its inputs or of some."""
    made = jaxpr.replace(
        outvars=list(outs),
        invars=list(jaxpr.invars if takes is None else takes),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return without_dead(made)
