"""Products of codes given as floats at once, where the compiler adds up devices' terms of them.

    i:s32 = dot_general a:s8 b:s8               y:bf16 = dot_general a:s8 b:s8
    i' = sharding_constraint i           ->     y' = sharding_constraint y
    y:bf16 = convert i'

A gradient is contracted over the batch, which lies over devices: the partitioner sends terms in the dtype of
the product, before the cast. The matrix unit sums in 32 bits all the same, and rounds once; the terms are
then added up as those of a product of floats are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from xform.report import Report
from xform.rewrite import Site, rewrite
from xform.trace import Jaxpr, JaxprEqn, Value, Var, bind, without_dead

CONSTRAINT = "sharding_constraint"


def as_floats(jaxpr: Jaxpr, report: Report) -> Jaxpr:
    """Outside of manual regions, where nobody but the compiler adds up terms."""
    bodies: dict[Jaxpr, tuple[dict[Var, JaxprEqn], Counter[Var]]] = {}

    def rule(site: Site) -> Sequence[Value] | None:
        if site.name != "convert_element_type" or _is_manual(site.eqn):
            return None
        dtype = site.params["new_dtype"]
        if not jnp.issubdtype(dtype, jnp.floating):
            return None
        if site.jaxpr not in bodies:
            bodies[site.jaxpr] = _makers(site.jaxpr)
        chain = _of_codes(site.eqn.invars[0], *bodies[site.jaxpr])
        if not chain:
            return None
        *constraints, dot = chain
        params = {**dot.params, "preferred_element_type": jnp.dtype(dtype)}
        (x,) = bind(dot, site.values(dot.invars), params)
        for eqn in reversed(constraints):
            (x,) = bind(eqn, [x], eqn.params)
        return [x]

    made = rewrite(jaxpr, rule, report, "quantize")
    return jaxpr if made is jaxpr else without_dead(made)


def _makers(jaxpr: Jaxpr) -> tuple[dict[Var, JaxprEqn], Counter[Var]]:
    """What makes each variable, and how often it is used."""
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var))
    uses.update(v for v in jaxpr.outvars if isinstance(v, Var))
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}, uses


def _of_codes(atom: object, makers: dict[Var, JaxprEqn], uses: Counter[Var]) -> list[JaxprEqn]:
    """The constraints on a product of codes that this alone reads, from the last, and the product itself."""
    chain: list[JaxprEqn] = []
    while isinstance(atom, Var) and uses[atom] == 1 and (eqn := makers.get(atom)) is not None:
        chain.append(eqn)
        if eqn.primitive.name == "dot_general":
            return chain if all(_is_code(v) for v in eqn.invars) else []
        if eqn.primitive.name != CONSTRAINT:
            return []
        atom = eqn.invars[0]
    return []


def _is_code(v: object) -> bool:
    dtype = getattr(getattr(v, "aval", None), "dtype", jnp.float32)
    return jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize == 1


def _is_manual(eqn: JaxprEqn) -> bool:
    return bool(getattr(eqn.ctx.cur_abstract_mesh, "manual_axes", ()))
