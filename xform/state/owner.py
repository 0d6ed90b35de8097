"""Which argument of a function is its state: one that comes back as its next value.

A part of the result with the argument's structure may as well be its gradient. The next value of an array is
made of it element by element, `p - rate * g`; a gradient is made of what the array was multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xform.higher_order import bodies, operands
from xform.trace import Jaxpr, JaxprEqn, Var, shape_of

SUMS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "reduce_sum")
"""Past these, a result is not made of an operand element by element."""


LOOKED_AT = 5
"""How many leaves of an argument, the largest, tell whether it comes back."""


def state_argument(
    in_tree: Any, out_tree: Any, numbers: Sequence[int], jaxpr: Jaxpr
) -> tuple[int | str, bool]:
    """The first argument that comes back, by number or keyword, and True; else the first one, and False.

    numbers: of the leaves of (args, kwargs) that are inputs of the program.
    """
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    inputs = {leaf: i for i, leaf in enumerate(numbers)}
    result = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    for name, argument in given.items():
        leaves, tree = jax.tree.flatten(argument)
        if leaves and not jax.tree_util.treedef_is_leaf(tree):
            part = next((x for x in _parts(result, tree) if _is_it(x, tree)), None)
            if part is not None and _comes_back(jaxpr, inputs, leaves, jax.tree.leaves(part)):
                return name, True
    return next(iter(given), 0), False


def _parts(whole: Any, tree: Any) -> list[Any]:
    return list(jax.tree.leaves(whole, is_leaf=lambda x: _is_it(x, tree)))


def _is_it(x: Any, tree: Any) -> bool:
    return bool(jax.tree.structure(x) == tree)


def _comes_back(
    jaxpr: Jaxpr, inputs: Mapping[int, int], leaves: Sequence[int], results: Sequence[int]
) -> bool:
    """Whether results are made of these leaves, one of each, element by element: most of the largest."""
    pairs = [(inputs[leaf], out) for leaf, out in zip(leaves, results, strict=True) if leaf in inputs]
    pairs.sort(key=lambda pair: -math.prod(shape_of(jaxpr.invars[pair[0]])))
    made = [i in _made_of(jaxpr, [out]) for i, out in pairs[:LOOKED_AT]]
    return 2 * sum(made) > len(made)


def _made_of(jaxpr: Jaxpr, results: Sequence[int]) -> set[int]:
    """The inputs of a program of which any of these results is made without a sum or a product of several
    elements.
    """
    need = {v for n in results if isinstance(v := jaxpr.outvars[n], Var)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in SUMS or need.isdisjoint(eqn.outvars):
            continue
        if bodies(eqn):
            need.update(_through(eqn, [n for n, v in enumerate(eqn.outvars) if v in need]))
        else:
            need.update(v for v in eqn.invars if isinstance(v, Var))
    return {i for i, v in enumerate(jaxpr.invars) if v in need}


def _through(eqn: JaxprEqn, results: Sequence[int]) -> set[Var]:
    """The operands of an equation with bodies of which these results are made."""
    found = set()
    for number, body in enumerate(bodies(eqn)):
        if len(body.outvars) == len(eqn.outvars):
            outer = operands(eqn, number)
            found |= {outer[i] for i in _made_of(body, results)}
    return {v for at in found if at is not None and isinstance(v := eqn.invars[at], Var)}
