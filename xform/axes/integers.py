"""Which axis integers index: what the same integers index is the same axis, and a count indexes what it
counts.

A table and its gradient have no operation in common but that one is gathered from, the other scattered into,
by the same integers. Here are the places where equations index (`INDEXED`), and the integers as they were
before they were wrapped, cast and shaped for it (`component`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xform.higher_order import SCATTERS
from xform.trace import Jaxpr, JaxprEqn, Literal, shape_of

Places = list[tuple[int, Any, int]]
"""Dimensions of the first operand that an equation indexes: dimension, indices, and which component of
them.
"""


def _gathered(eqn: JaxprEqn) -> Places:
    places = enumerate(eqn.params["dimension_numbers"].start_index_map)
    return [(d, eqn.invars[1], k) for k, d in places if eqn.params["slice_sizes"][d] == 1]


def _scattered(eqn: JaxprEqn) -> Places:
    numbers = eqn.params["dimension_numbers"]
    places = enumerate(numbers.scatter_dims_to_operand_dims)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in gone]
    update = shape_of(eqn.invars[2])
    single = {d for d, at in zip(window, numbers.update_window_dims, strict=True) if update[at] == 1}
    return [(d, eqn.invars[1], k) for k, d in places if d in numbers.inserted_window_dims or d in single]


def _sliced(eqn: JaxprEqn) -> Places:
    return [(d, eqn.invars[1 + d], 0) for d, n in enumerate(eqn.params["slice_sizes"]) if n == 1]


def _updated(eqn: JaxprEqn) -> Places:
    update: Any = eqn.invars[1].aval
    return [(d, eqn.invars[2 + d], 0) for d, n in enumerate(update.shape) if n == 1]


INDEXED: dict[str, Callable[[JaxprEqn], Places]] = {
    "gather": _gathered,
    **dict.fromkeys(SCATTERS, _scattered),
    "dynamic_slice": _sliced,
    "dynamic_update_slice": _updated,
}
"""Primitives that take single indices, and where."""

SHAPES = frozenset(("broadcast_in_dim", "convert_element_type", "reshape", "squeeze"))
"""Primitives that leave all integers as they are."""


def component(
    jaxpr: Jaxpr, makers: Mapping[Any, int], indices: Any, k: int = 0
) -> tuple[Any, JaxprEqn | None]:
    """The k-th component of the indices, before it was wrapped and shaped, and the equation that made it."""
    var = indices
    while not isinstance(var, Literal) and var in makers:
        eqn = jaxpr.eqns[makers[var]]
        name = eqn.primitive.name
        if name == "concatenate" and len(eqn.invars) > k and len(eqn.invars) == var.aval.shape[-1]:
            var = eqn.invars[k]
        elif name in SHAPES:
            var = eqn.invars[0]
        elif name == "select_n" and _wraps(jaxpr, makers, eqn):
            var = eqn.invars[1]
        else:
            return var, eqn
    return var, None


def _wraps(jaxpr: Jaxpr, makers: Mapping[Any, int], select: JaxprEqn) -> bool:
    """Whether a select_n is how an index counts from the end when it is negative: select(i < 0, i, i + n)."""
    if len(select.invars) != 3:
        return False
    test, kept, other = select.invars
    for v, name in ((test, "lt"), (other, "add")):
        if isinstance(v, Literal) or v not in makers:
            return False
        eqn = jaxpr.eqns[makers[v]]
        if eqn.primitive.name != name or eqn.invars[0] is not kept:
            return False
    return True
