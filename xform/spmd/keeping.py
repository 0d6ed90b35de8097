"""Weights that come together once and stay so for the whole step: forward, backward, every microbatch.

    scan over w[layers, e/fsdp, f] {          k = gather (cast w)        once, all layers
      .. = dot x (gather (cast w))      ->    scan over k {
    }                                           .. = dot x (cast (wide k)) }

One gather instead of one for each pass and each microbatch, for the memory of all weights, in the dtype that
they are multiplied in. Gradients are scattered as before.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from xform.higher_order import bodies, operands
from xform.spmd.layout import Laid, Piece
from xform.spmd.values import Val
from xform.spmd.walk import MOVES, Walk
from xform.trace import Jaxpr, Var, in_trace


def together(walk: Walk, body: Jaxpr, row: Var, val: Val) -> Val:
    """A stack of weights with all its rows together, in the dtype that the body makes of each, as it would
    come of them one by one; what is no weight, as it is.
    """
    if not walk.keeps(val) or val.make is not None:
        return val
    dtype = narrowed(body, row)
    here, walk.scope = walk.scope, walk.outside(val.scope)
    try:
        with in_trace(walk.scope.trace):
            kept = walk.cast(val, dtype)
            dims = tuple(
                tuple(Piece(p.size, tuple(a for a in p.axes if a not in walk.batch)) for p in dim)
                for dim in kept.laid.dims
            )
            x = walk.get(kept, Laid(dims))
    finally:
        walk.scope = here
    return walk.held(x, val.aval, Laid(dims), val.origin)


def narrowed(body: Jaxpr, var: Var) -> Any:
    """The dtype that every use of a float makes of it first; its own where there are several."""
    own: Any = getattr(var.aval, "dtype", None)
    found = _made(body, {var}, own)
    return found.pop() if len(found) == 1 else own


def _made(body: Jaxpr, held: set[Var], own: Any) -> set[Any]:
    held, found = set(held), set[Any]()
    for eqn in body.eqns:
        used = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in held]
        if not used:
            continue
        if inner := bodies(eqn):
            for number, each in enumerate(inner):
                passed = {each.invars[k] for k, i in enumerate(operands(eqn, number)) if i in used}
                found |= _made(each, passed, own)
        elif eqn.primitive.name == "convert_element_type":
            new = jnp.dtype(eqn.params["new_dtype"])
            is_less = jnp.issubdtype(new, jnp.floating) and new.itemsize < own.itemsize
            found.add(new if is_less else own)
        elif eqn.primitive.name in MOVES:
            held.update(eqn.outvars)
        else:
            found.add(own)
    if any(v in held for v in body.outvars):
        found.add(own)
    return found
