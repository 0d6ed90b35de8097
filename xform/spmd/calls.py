"""Operations that hold a program of their own besides loops, and those that reach outside: opened, done once.

What is laid out is the program as it is after autodiff, so a linear solve is its solution, and a composite or
a function with a rule for batching is its body. What prints, or calls a function that the outside notices,
does so on the first device alone, of whole values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.higher_order import bodies
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import JaxprEqn, Value, bind


def opened(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """The operation's first program, in its place."""
    (body, *_) = bodies(eqn)
    return walk.inlined(eqn, body, vals)


def linear_solve(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """The program that solves, of its own constants and the right-hand sides."""
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first = lengths.matvec + lengths.vecmat
    right = vals[sum(lengths) :]
    return walk.inlined(eqn, programs.solve, [*vals[first : first + lengths.solve], *right])


def printed(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """On one device: what is printed is a whole value, once."""
    if any(val.shape and val.make is None and not val.laid.is_whole for val in vals):
        walk.tell(eqn, "what is printed is gathered")
    args = [walk.whole(val) for val in vals]
    jax.lax.cond(_is_first(walk), lambda: bind(eqn, args, eqn.params), lambda: [])
    return []


def called_back(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """Called on one device, of whole values; all have what it returns."""
    if any(val.make is None and not val.laid.is_whole for val in vals):
        walk.tell(eqn, "what is called outside is given all of it")
    args = [walk.whole(val) for val in vals]
    types: list[Any] = [v.aval for v in eqn.outvars]
    none = [jnp.zeros(t.shape, t.dtype) for t in types]
    made = jax.lax.cond(_is_first(walk), lambda: bind(eqn, args, eqn.params), lambda: none)
    every = tuple(walk.grid.sizes)
    return [
        walk.constant(
            jax.lax.psum(x.astype(np.int8) if x.dtype == bool else x, every).astype(x.dtype), v.aval
        )
        for x, v in zip(made, eqn.outvars, strict=True)
    ]


def _is_first(walk: Walk) -> Value:
    return jnp.array([jax.lax.axis_index(axis) == 0 for axis in walk.grid.sizes]).all()


HANDLERS = {
    "composite": opened,
    "custom_linear_solve": linear_solve,
    "custom_vmap_call": opened,
    "debug_callback": printed,
    "debug_print": printed,
    "io_callback": called_back,
}
"""How each of them is lowered."""
