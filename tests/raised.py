"""All values of a view for made-up inputs: to hold what was raised to what the program computes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.raising.flat import View
from xform.trace import Literal, Var, bind


def made_up(aval, rng: np.random.Generator, high: int):
    """A random array of a type: integers from 0 to `high`, exclusive."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if np.issubdtype(aval.dtype, np.bool_):
        return jnp.asarray(rng.integers(0, 2, aval.shape), bool)
    if jnp.issubdtype(aval.dtype, np.integer):
        return jnp.asarray(rng.integers(0, high, aval.shape), aval.dtype)
    return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)


def run(view: View, high: int = 7, seed: int = 0, given: Sequence[Any] | None = None) -> dict[Var, jax.Array]:
    """What each variable of a view is, when its inputs are made up; or are these."""
    rng = np.random.default_rng(seed)
    values = dict(zip(view.jaxpr.constvars, view.jaxpr.consts, strict=True))
    inputs = [made_up(v.aval, rng, high) for v in view.jaxpr.invars] if given is None else given
    values |= dict(zip(view.jaxpr.invars, inputs, strict=True))
    for eqn in view.eqns:
        args = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        values.update(zip(eqn.outvars, bind(eqn, args, eqn.params), strict=True))
    return values
