"""How the equations that hold programs of their own (scan, cond, jit, remat, custom rules ...) are entered
and rebuilt.

A body is found by its type: a parameter that is a jaxpr, or a tuple of them, whatever the primitive is
called. The tables below name only the exceptions. Because a rewrite keeps a body's type, an equation is
rebuilt by putting the new bodies where the old ones were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from xform.trace import Jaxpr, JaxprEqn, in_shard_map, lazily

SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
"""The primitives that write to places given by indices, as jax spells them. All but the first always hold the
program that combines an old scalar with a new one; the first does where `x.at[i].apply` made it.
"""

OPAQUE: dict[str, str] = {
    "pallas_call": "a kernel is left whole",
    "mpmd_map": "a kernel is left whole",
    "reduce": "combines two scalars",
    "reduce_window": "combines two scalars",
    "select_and_scatter": "combines two scalars",
    **dict.fromkeys(SCATTERS, "combines two scalars"),
}
"""Primitives whose jaxpr parameters are not programs to enter, and why."""

READ: frozenset[str] = frozenset({"operation"})
"""Primitives whose program says what they compute, and is not what runs: it is read, never rewritten."""

RULES: dict[str, str] = {"custom_jvp_call": "jvp_jaxpr_fun", "custom_vjp_call": "fwd_jaxpr_thunk"}
"""Primitives with a differentiation rule that is a program too, made when asked for: the parameter that gives
it.
"""


CLOSED: dict[str, str] = {"remat2": "jaxpr"}
"""Primitives whose body may hold no constants: what a rewrite brings becomes their first operands instead."""


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation, in the order of its parameters. Their numbers are the body indices of
    a path.
    """
    if eqn.primitive.name in OPAQUE:
        return []
    found: list[Jaxpr] = []
    for value in eqn.params.values():
        if isinstance(value, Jaxpr):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            for v in value:
                if isinstance(v, Jaxpr):
                    found.append(v)
    return found


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation at every depth, outer ones before what is in their bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body)


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Whether this is a call of jit that says nothing of where its arrays lie: its body can stand in its
    place.
    """
    if eqn.primitive.name != "jit":
        return False
    layouts = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return not any(isinstance(s, jax.sharding.Sharding) for s in layouts)


def enter(eqn: JaxprEqn, f: Callable[[Jaxpr, int], Jaxpr]) -> dict[str, Any]:
    """The equation's parameters with f(body, number) in place of each body; the same dict when nothing
    changed.

    When the body of a custom_jvp or custom_vjp changes, its rule is changed alike when JAX asks for it:
    otherwise the rewrite would be gone under differentiation. The rule's jaxpr comes with number -1: no
    analysis has seen it.
    """
    if eqn.primitive.name in OPAQUE or eqn.primitive.name in READ:
        return eqn.params
    number = 0
    new: dict[str, Any] = {}

    def one(body: Jaxpr) -> Jaxpr:
        nonlocal number
        with scope(eqn):
            result = f(body, number)
        number += 1
        return result

    for name, value in eqn.params.items():
        if isinstance(value, Jaxpr):
            changed = one(value)
            if changed is not value:
                new[name] = changed
        elif isinstance(value, (tuple, list)) and any(isinstance(v, Jaxpr) for v in value):
            items = [one(v) if isinstance(v, Jaxpr) else v for v in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                rebuild: Any = type(value)
                new[name] = rebuild(*items) if hasattr(value, "_fields") else rebuild(items)
    if not new:
        return eqn.params
    rule = RULES.get(eqn.primitive.name)
    if rule is not None:
        new[rule] = lazily(eqn.params[rule], lambda jaxpr: f(jaxpr, -1))
    return {**eqn.params, **new}


def hoist(eqn: JaxprEqn, params: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """The parameters with the body's constants as its first inputs, where it may hold none; and those
    constants.
    """
    name = CLOSED.get(eqn.primitive.name)
    if name is None or not params[name].consts:
        return params, []
    body = params[name]
    return {**params, name: body.with_consts(())}, body.consts


def scope(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """The context in which a replacement inside this equation's bodies is traced: named axes and the manual
    mesh.
    """
    if eqn.primitive.name == "shard_map":
        p = eqn.params
        return in_shard_map(p["mesh"], p["newly_manual_axes"], p["check_vma"])
    return contextlib.nullcontext()


def manual_axes(jaxpr: Jaxpr, path: Sequence[tuple[int, int]]) -> frozenset[str]:
    """The mesh axes over which the regions are manual that a body stands in."""
    found: set[str] = set()
    for index, number in path:
        eqn = jaxpr.eqns[index]
        if eqn.primitive.name == "shard_map":
            found |= set(eqn.params["newly_manual_axes"])
        jaxpr = bodies(eqn)[number]
    return frozenset(found)


# ---------------------------------------------------------------- what is passed to a body, and what comes
# back


def scan_parts(eqn: JaxprEqn) -> tuple[int, int, int]:
    """How many of a scan's operands are constants, carried, and scanned over."""
    consts, carry, xs = eqn.params["ft_in"].unpack()
    return len(consts), len(carry), len(xs)


def operands(eqn: JaxprEqn, number: int) -> list[int | None]:
    """For each input of a body, the number of the operand of the equation that it is (its first value, in a
    loop).

    None where the body has an input that is no operand.
    """
    body = bodies(eqn)[number]
    inputs = len(body.invars)
    name = eqn.primitive.name
    if name == "while":
        cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carried = range(cond_consts + body_consts, len(eqn.invars))
        if body is eqn.params["cond_jaxpr"]:
            return [*range(cond_consts), *carried]
        return [*range(cond_consts, cond_consts + body_consts), *carried]
    if name == "custom_linear_solve":
        # One function after the other has its constants among the operands; the right-hand side comes last.
        lengths = eqn.params["const_lengths"]
        present = [k for k in lengths._fields if getattr(eqn.params["jaxprs"], k) is not None]
        first = sum(getattr(lengths, k) for k in present[:number])
        consts = getattr(lengths, present[number])
        right = range(sum(lengths), len(eqn.invars))
        rest = [None] * (inputs - consts) if "solve" not in present[number] else list(right)
        return [*range(first, first + consts), *rest]
    # cond has its predicate first; everything else passes its operands as they are.
    offset = 1 if name == "cond" else 0
    return [i + offset if i + offset < len(eqn.invars) else None for i in range(inputs)]


def carries(eqn: JaxprEqn, number: int) -> dict[int, int]:
    """For the body of a loop: number of a result -> number of the input that it becomes on the next turn."""
    body = bodies(eqn)[number]
    if eqn.primitive.name == "scan":
        consts, carry, _ = scan_parts(eqn)
        return {i: consts + i for i in range(carry)}
    if eqn.primitive.name == "while" and body is eqn.params["body_jaxpr"]:
        consts = eqn.params["body_nconsts"]
        return {i: consts + i for i in range(len(body.outvars))}
    return {}
