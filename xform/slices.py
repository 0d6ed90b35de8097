"""A slice of a product's result, taken of what is multiplied instead.

    logits = dot_general x w                 y = slice x
    scaled = mul logits 0.5          ->      logits = dot_general y w
    most = slice scaled                      most = mul logits 0.5

A loss that leaves out a text's last token computes all the logits and takes a part: so written, the product
makes only what is needed, and there is one size of everything that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from xform.axes.rules import ELEMENTWISE
from xform.tensors.runs import replaced
from xform.trace import Jaxpr, JaxprEqn, Literal, Value, Var, at_equation, bind, shape_of


def sliced_before(jaxpr: Jaxpr, number: int, side: int) -> Jaxpr:
    """The program with the only slice that is made of the product `number` made of its operand `side`.

    The same program where more is made of the product than that slice of it, entry by entry, or where the
    slice leaves out some of what only the other operand has.
    """
    way = _way(jaxpr, number)
    if way is None:
        return jaxpr
    bounds = _bounds(jaxpr.eqns[way[-1]])
    free = _dimensions(jaxpr.eqns[number], side)
    if not set(bounds) <= set(free):
        return jaxpr
    own = {free[d]: part for d, part in bounds.items()}
    return replaced(jaxpr, [(way, lambda part: _moved(part, side, own, bounds))], "slice")


Bounds = dict[int, tuple[int, int, int]]
"""Of each dimension that a slice leaves something out of: where it begins and ends, and its stride."""


def _way(jaxpr: Jaxpr, number: int) -> list[int] | None:
    """The equations from a product to the slice of it, if they are all that is made of it."""
    way = [number]
    while True:
        (v,) = jaxpr.eqns[way[-1]].outvars
        readers = [i for i, eqn in enumerate(jaxpr.eqns) if v in eqn.invars]
        if len(readers) != 1 or v in jaxpr.outvars:
            return None
        eqn = jaxpr.eqns[readers[0]]
        way += readers
        if eqn.primitive.name == "slice":
            return way
        if eqn.primitive.name not in ELEMENTWISE or len(eqn.outvars) != 1 or eqn.effects:
            return None


def _bounds(eqn: JaxprEqn) -> Bounds:
    p, shape = eqn.params, shape_of(eqn.invars[0])
    strides = p["strides"] or (1,) * len(shape)
    parts = enumerate(zip(p["start_indices"], p["limit_indices"], strides, strict=True))
    return {d: part for d, part in parts if part != (0, shape[d], 1)}


def _dimensions(eqn: JaxprEqn, side: int) -> dict[int, int]:
    """Which dimension of operand `side`, and of it alone, each dimension of a product's result is."""
    contracting, batch = eqn.params["dimension_numbers"]
    free = [
        [d for d in range(len(shape_of(v))) if d not in (*contracting[k], *batch[k])]
        for k, v in enumerate(eqn.invars)
    ]
    first = len(batch[0]) + (len(free[0]) if side else 0)
    return {first + i: d for i, d in enumerate(free[side])}


def _moved(part: Jaxpr, side: int, own: Bounds, bounds: Bounds) -> Callable[..., Sequence[Value]]:
    """The product, and all up to the slice, of the slice of operand `side`."""
    product, *steps, _ = part.eqns

    def emit(*args: Value) -> list[Value]:
        env: dict[Var, Value] = dict(zip(part.invars, args, strict=True))
        shape = shape_of(product.outvars[0])
        made: set[Var] = set()

        def read(v: Var | Literal) -> Value:
            return v.val if isinstance(v, Literal) else env[v]

        def fitting(v: Var | Literal) -> Value:
            """An operand beside what is made of the product, at the size of the slice."""
            if isinstance(v, Literal) or v in made or not shape_of(v):
                return read(v)
            return _sliced(env[v], {d: b for d, b in bounds.items() if shape_of(v)[d] == shape[d]})

        with at_equation(product):
            operands = [read(v) for v in product.invars]
            operands[side] = _sliced(operands[side], own)
            outs = bind(product, operands, product.params)
        env.update(zip(product.outvars, outs, strict=True))
        made.update(product.outvars)
        for eqn in steps:
            with at_equation(eqn):
                outs = bind(eqn, [fitting(v) for v in eqn.invars], eqn.params)
            env.update(zip(eqn.outvars, outs, strict=True))
            made.update(eqn.outvars)
        return list(outs)

    return emit


def _sliced(x: Value, bounds: Bounds) -> Value:
    for d, (start, limit, stride) in bounds.items():
        x = jax.lax.slice_in_dim(x, start, limit, stride, d)
    return x
