"""A program whose weights are given as codes, which go through it as codes until a product takes them.

    w: float[8,6]                            c: int8[8,6]  s: float[1,6]
    scan over layers of w                    scan over layers of c and s
      v = transpose w                 ->       d = transpose c;  t = transpose s
      y = dot_general x v                      y = dot_general x d * t

It is traced anew, with a `Quantized` in place of each such weight. What moves codes moves scales alike
(`moving`); loops, calls and branches are entered; products take codes as they are. What else needs the floats
gets them where it stands, and is noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from xform.errors import Decline
from xform.higher_order import bodies, hoist, is_plain_jit, scan_parts
from xform.quantization.arrays import Quantized, whole
from xform.quantization.convolutions import quantized_conv, window_of
from xform.quantization.moving import moved, repeated
from xform.quantization.products import product
from xform.quantization.ragged import is_forward, quantized_ragged_dot
from xform.quantization.training import Products
from xform.quantization.undifferentiated import undifferentiated
from xform.rewrite import Path
from xform.trace import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Value,
    Var,
    at_source,
    bind,
    fitted,
    name_stack,
    source_line,
    trace_flat,
    typeof,
)

Place = tuple[Path, int]
"""Where an equation stands: its body, by (equation, body) from the outermost inward, and its number there."""

Operands = list[Any]
"""Arrays and `Quantized`s."""

Made = Callable[[Operands], Value]
"""A product of operands that may be codes; raises Decline where it cannot be made so."""


@dataclasses.dataclass(frozen=True)
class Whole:
    """eqn: an operation that got a weight's floats; None: the program gives them as a result. inputs: the
    values they are made of, by number.
    """

    eqn: JaxprEqn | None
    inputs: frozenset[int]

    @property
    def what(self) -> str:
        return "the function's result" if self.eqn is None else self.eqn.primitive.name

    @property
    def where(self) -> str:
        return "" if self.eqn is None else source_line(self.eqn) or name_stack(self.eqn)

    @property
    def text(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


class Taken(NamedTuple):
    """Codes that a product took: which product, as which operand, what they are made of, with scales of which
    shape.
    """

    place: Place
    operand: int
    inputs: frozenset[int]
    scale: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Carried:
    """A program over codes. whole: what got a weight's floats. taken: what products got as codes. declined:
    products that were to be more than products by codes, and why they are not.
    """

    jaxpr: Jaxpr
    whole: list[Whole]
    taken: list[Taken]
    declined: list[tuple[JaxprEqn, str]]


@dataclasses.dataclass(frozen=True)
class _Codes:
    """inputs: the values of the program that it is made of. part: a part of one that was looked up."""

    array: Quantized
    inputs: frozenset[int]
    part: bool = False


def carried(
    jaxpr: Jaxpr,
    hold: Callable[[Sequence[Value]], Sequence[Any]],
    avals: Sequence[Any],
    names: Sequence[str],
    products: Mapping[Place, Made],
) -> Carried:
    """The program over inputs of types `avals`, called `names`, of which `hold` makes the values that the
    program takes, some of them `Quantized`. products: those that are more than products by codes.
    """
    walk = _Walk(products)

    def flat(*inputs: Value) -> list[Value]:
        values = [
            _Codes(x, frozenset([k])) if isinstance(x, Quantized) else x for k, x in enumerate(hold(inputs))
        ]
        outs = walk.run(jaxpr, values, (), "")
        return [walk.floats(x, None) for x in outs]

    made = trace_flat(flat, avals, jaxpr.debug_info.func_name, names)
    return Carried(made, list(_each_once(walk.whole)), walk.taken, walk.declined)


class _Walk:
    def __init__(self, products: Mapping[Place, Made]) -> None:
        self.products = products
        self.inside = {path[:k] for path, _ in products for k in range(1, len(path) + 1)}
        self.whole: list[Whole] = []
        self.taken: list[Taken] = []
        self.declined: list[tuple[JaxprEqn, str]] = []

    def run(self, jaxpr: Jaxpr, values: Sequence[Any], path: Path, names: str) -> list[Any]:
        """What the body gives for these values; codes may be among both."""
        env: dict[Var, Any] = dict(zip(jaxpr.all_invars, [*jaxpr.consts, *values], strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, Literal):
                return env[atom]
            return atom.val if typeof(atom.val) == atom.aval else fitted(atom.val, atom.aval)

        for index, eqn in enumerate(jaxpr.eqns):
            ins = [read(v) for v in eqn.invars]
            with at_source(eqn, names):
                env.update(zip(eqn.outvars, self.equation(eqn, index, ins, path, names), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, index: int, ins: list[Any], path: Path, names: str) -> Sequence[Any]:
        codes = [x for x in ins if isinstance(x, _Codes)]
        name, made = eqn.primitive.name, self.products.get((path, index))
        if name in PRODUCTS and (codes or made):
            for k, x in enumerate(ins):
                if isinstance(x, _Codes):
                    self.taken.append(Taken((path, index), k, x.inputs, x.array.scale.shape))
            return [fitted(self.product(eqn, ins, made), eqn.outvars[0].aval)]
        number = range(len(bodies(eqn)))
        if not codes and not any((*path, (index, k)) in self.inside for k in number):
            return bind(eqn, ins, eqn.params)
        stack = name_stack(eqn)
        where = f"{names}/{stack}" if names and stack else names or stack
        enter = ENTERED.get(name)
        if enter is not None and (name != "jit" or is_plain_jit(eqn)):
            return enter(self, eqn, ins, lambda k: (*path, (index, k)), where)
        outs = moved(eqn, [x.array if isinstance(x, _Codes) else x for x in ins])
        if outs is not None:
            part = name == "gather" or any(x.part for x in codes)
            return [_Codes(out, frozenset().union(*(x.inputs for x in codes)), part) for out in outs]
        return bind(eqn, [self.floats(x, eqn) for x in ins], eqn.params)

    def product(self, eqn: JaxprEqn, ins: list[Any], made: Made | None) -> Value:
        arrays = [x.array if isinstance(x, _Codes) else x for x in ins]
        try:
            if made is not None:
                return made(arrays)
        except Decline as why:
            self.declined.append((eqn, str(why)))
        with contextlib.suppress(Decline):  # then it gets floats, which is told
            return PRODUCTS[eqn.primitive.name](eqn, arrays)
        return bind(eqn, [self.floats(x, eqn) for x in ins], eqn.params)[0]

    def floats(self, x: Any, eqn: JaxprEqn | None) -> Value:
        """An array as an equation takes it that does not take codes."""
        if not isinstance(x, _Codes):
            return x
        if not x.part:
            self.whole.append(Whole(eqn, x.inputs))
        return whole(x.array)


# ---------------------------------------------------------------- products by codes


def _dot(eqn: JaxprEqn, ins: Operands) -> Value:
    p = eqn.params
    return product(ins[0], ins[1], p["dimension_numbers"], p["precision"], _dtype(eqn))


def _ragged_dot(eqn: JaxprEqn, ins: Operands) -> Value:
    p = eqn.params
    if not is_forward(p["ragged_dot_dimension_numbers"]) or not _shared(ins[1], (0, 1)):
        raise Decline("its codes are not those of rows x contracted, experts x contracted x columns")
    return quantized_ragged_dot(ins[0], ins[1], ins[2], Products(), p["precision"], _dtype(eqn))


def _conv(eqn: JaxprEqn, ins: Operands) -> Value:
    p = eqn.params
    window = window_of(p)
    if p["batch_group_count"] != 1 or not _shared(ins[1], window.shared[1]):
        raise Decline("its codes have other scales than one a feature")
    return quantized_conv(ins[0], ins[1], window, Products(), p["precision"], _dtype(eqn))


def _dtype(eqn: JaxprEqn) -> Any:
    out: Any = eqn.outvars[0].aval
    return out.dtype


def _shared(x: Any, dimensions: Sequence[int]) -> bool:
    """Whether all along these dimensions share a scale."""
    return not isinstance(x, Quantized) or all(x.scale.shape[d] == 1 for d in dimensions)


PRODUCTS: dict[str, Callable[[JaxprEqn, Operands], Value]] = {
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
}

# ---------------------------------------------------------------- bodies

Inner = Callable[[int], Path]
"""The path of a body, by its number."""


def _called(walk: _Walk, eqn: JaxprEqn, ins: list[Any], inner: Inner, names: str) -> list[Any]:
    return walk.run(bodies(eqn)[0], ins, inner(0), names)


def _ruled(walk: _Walk, eqn: JaxprEqn, ins: list[Any], inner: Inner, names: str) -> list[Any]:
    """A function with a rule for its derivative, which knows nothing of codes."""
    leaves, rebuild = _opened(ins)

    def plain(*xs: Value) -> list[Value]:
        return [walk.floats(x, eqn) for x in walk.run(bodies(eqn)[0], rebuild(xs), inner(0), "")]

    why = (
        "quantize: a step that is given codes is differentiated from outside, through a function with a rule"
        f" of its own ({source_line(eqn)}); take the derivative in the function that is parallelized"
    )
    return list(undifferentiated(plain, why)(*leaves))


def _recomputed(walk: _Walk, eqn: JaxprEqn, ins: list[Any], inner: Inner, names: str) -> list[Any]:
    if not eqn.params["differentiated"]:
        return _called(walk, eqn, ins, inner, names)
    leaves, rebuild = _opened(ins)

    def flat(*xs: Value) -> list[Value]:
        outs = walk.run(eqn.params["jaxpr"], rebuild(xs), inner(0), "")
        return [walk.floats(x, eqn) for x in outs]

    body = trace_flat(flat, [typeof(x) for x in leaves], eqn.primitive.name)
    params, consts = hoist(eqn, {**eqn.params, "jaxpr": body})
    return bind(eqn, [*consts, *leaves], params)


def _scanned(walk: _Walk, eqn: JaxprEqn, ins: list[Any], inner: Inner, names: str) -> list[Any]:
    p = eqn.params
    consts, carry, _ = scan_parts(eqn)
    (body,) = bodies(eqn)
    kept = _unchanged(body, consts, carry, ins)
    moving = [k for k in range(consts, consts + carry) if k not in kept]
    xs, rebuild = _opened([_apart(x, p["length"]) for x in ins[consts + carry :]])
    restore: list[Callable[[Sequence[Value]], list[Any]]] = []

    def turn(state: list[Value], row: list[Value]) -> tuple[list[Value], list[Value]]:
        values = dict(zip(moving, state, strict=True)) | {k: ins[k] for k in kept}
        given = [*ins[:consts], *(values[k] for k in range(consts, consts + carry)), *rebuild(row)]
        outs = walk.run(body, given, inner(0), "")
        # What a loop passes on of each turn, as of a model that gives its own weights back, may be codes.
        ys, closed = _opened(outs[carry:])
        restore[:] = [closed]
        return [walk.floats(outs[k - consts], eqn) for k in moving], ys

    firsts = [walk.floats(ins[k], eqn) for k in moving]
    last, ys = jax.lax.scan(
        turn, firsts, list(xs), length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
    )
    done = dict(zip(moving, last, strict=True)) | {k: ins[k] for k in kept}
    return [*(done[k] for k in range(consts, consts + carry)), *restore[0](ys)]


def _repeated(walk: _Walk, eqn: JaxprEqn, ins: list[Any], inner: Inner, names: str) -> list[Any]:
    p = eqn.params
    test, consts = p["cond_nconsts"], p["body_nconsts"]
    start = test + consts
    kept = _unchanged(p["body_jaxpr"], consts, len(ins) - start, ins[test:])
    moving = [k for k in range(start, len(ins)) if k - test not in kept]

    def given(state: list[Value]) -> list[Any]:
        values = dict(zip(moving, state, strict=True))
        return [values.get(k, ins[k]) for k in range(start, len(ins))]

    def going(state: list[Value]) -> Value:
        outs = walk.run(p["cond_jaxpr"], [*ins[:test], *given(state)], inner(0), "")
        return walk.floats(outs[0], eqn)

    def turn(state: list[Value]) -> list[Value]:
        outs = walk.run(p["body_jaxpr"], [*ins[test:start], *given(state)], inner(1), "")
        return [walk.floats(outs[k - start], eqn) for k in moving]

    return given(jax.lax.while_loop(going, turn, [walk.floats(ins[k], eqn) for k in moving]))


def _chosen(walk: _Walk, eqn: JaxprEqn, ins: list[Any], inner: Inner, names: str) -> list[Any]:
    number, *rest = ins

    def branch(k: int, body: Jaxpr) -> Callable[[], list[Value]]:
        return lambda: [walk.floats(x, eqn) for x in walk.run(body, rest, inner(k), "")]

    branches = [branch(k, body) for k, body in enumerate(eqn.params["branches"])]
    return list(jax.lax.switch(number, branches))


ENTERED: dict[str, Callable[[_Walk, JaxprEqn, list[Any], Inner, str], list[Any]]] = {
    "closed_call": _called,
    "cond": _chosen,
    "custom_jvp_call": _ruled,
    "custom_vjp_call": _ruled,
    "jit": _called,
    "remat2": _recomputed,
    "scan": _scanned,
    "while": _repeated,
}
"""What has a body that codes are carried into."""


def _unchanged(body: Jaxpr, consts: int, carry: int, ins: Sequence[Any]) -> set[int]:
    """What a loop carries of codes and gives back as it was, by the number of the operand."""
    return {
        consts + k
        for k in range(carry)
        if isinstance(ins[consts + k], _Codes) and body.outvars[k] is body.invars[consts + k]
    }


def _apart(x: Any, turns: int) -> Any:
    """Codes that a loop scans over, with scales for each turn."""
    if not isinstance(x, _Codes) or x.array.scale.shape[0] == turns:
        return x
    return dataclasses.replace(x, array=repeated(x.array, [0]))


def _opened(values: Sequence[Any]) -> tuple[list[Value], Callable[[Sequence[Value]], list[Any]]]:
    """The arrays of values, and how values are made of such arrays."""
    leaves, tree = jax.tree.flatten([x.array if isinstance(x, _Codes) else x for x in values])

    def rebuild(arrays: Sequence[Value]) -> list[Any]:
        made = jax.tree.unflatten(tree, arrays)
        return [
            dataclasses.replace(x, array=y) if isinstance(x, _Codes) else y
            for x, y in zip(values, made, strict=True)
        ]

    return leaves, rebuild


def _each_once(notes: Sequence[Whole]) -> Iterator[Whole]:
    seen: set[tuple[int, frozenset[int]]] = set()
    for note in notes:
        if (key := (id(note.eqn), note.inputs)) not in seen:
            seen.add(key)
            yield note
