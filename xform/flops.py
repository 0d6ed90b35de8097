"""The arithmetic that a program asks for: the flops of its matrix products and convolutions.

What rematerialization computes again is left out, so that of a training step as its user wrote it this is the
ideal that a compiled program is measured by. A scan's body counts once a turn; a `while`, whose turns nobody
knows, once; of a conditional the dearest branch.
"""

from __future__ import annotations

import math

from xform.higher_order import bodies
from xform.trace import Jaxpr, JaxprEqn, name_stack, shape_of

AGAIN = "rematted_computation"
"""What jax calls the recomputed part of a checkpointed function, in name stacks."""


def product_flops(jaxpr: Jaxpr) -> float:
    """Floating-point operations of one call, 2 a multiply-add, over all devices together."""
    return sum(_of(eqn) for eqn in jaxpr.eqns if AGAIN not in name_stack(eqn))


def _of(eqn: JaxprEqn) -> float:
    inside = [product_flops(body) for body in bodies(eqn)]
    if eqn.primitive.name == "cond":
        return max(inside, default=0.0)
    if inside:
        return float(eqn.params["length"] if eqn.primitive.name == "scan" else 1) * sum(inside)
    return 2.0 * math.prod(shape_of(eqn.outvars[0])) * terms(eqn) if eqn.outvars else 0.0


def terms(eqn: JaxprEqn) -> int:
    """How many products are summed into one element of the result; 0 for what is no product."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return math.prod(shape_of(eqn.invars[0])[d] for d in contracted)
    if eqn.primitive.name == "ragged_dot_general":
        (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return math.prod(shape_of(eqn.invars[0])[d] for d in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, numbers = shape_of(eqn.invars[1]), eqn.params["dimension_numbers"]
        return math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    return 0
