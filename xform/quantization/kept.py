"""Takes the ranges that a step's products are quantized by from what earlier steps measured.

    a = name[range:...] amax            r = max history                    (an input of the program)
    s = div a 448                  ->   s = div (r > 0 ? r : amax) 448
                                        history' = [amax, *history[:-1]]   (a result)

The marks (`marks`) are found at every depth of the whole step, after autodiff, and the program is traced
again: what the histories say goes down to them, what they measure comes up. A loop over layers scans over
histories, and stacks what is measured; from a loop over microbatches comes the largest of its turns. What is
computed again for a backward pass only reads. Numbers that are not finite leave no trace. Where a history has
nothing yet, the range is the one just measured. Ranges that were calibrated are read alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.context import Context, Kept
from xform.errors import PlanError
from xform.flops import AGAIN
from xform.higher_order import OPAQUE, READ, bodies, hoist, scan_parts
from xform.quantization.marks import FORWARD, SIDES, Mark, mark_of
from xform.report import amount
from xform.rewrite import Path, interface
from xform.trace import (
    Jaxpr,
    JaxprEqn,
    Literal,
    ShapedArray,
    Value,
    Var,
    at_source,
    bind,
    body_effects,
    fitted,
    inline,
    name_stack,
    source_line,
    trace_flat,
)

CALLS = ("jit", "closed_call", "core_call", "eval_jaxpr")
RULED = ("custom_jvp_call", "custom_vjp_call")


def with_kept_ranges(jaxpr: Jaxpr, context: Context) -> Jaxpr:
    """The step with its ranges from the state, which the context is told; itself where it keeps none.

    Raises PlanError for a range that cannot be told to its product, with the line.
    """
    found = list(_found(jaxpr, (), "", False, ()))
    if not found:
        return jaxpr
    marks = sorted({place.mark for place in found}, key=_order)
    dtypes = {place.mark: jnp.promote_types(jnp.float32, place.dtype) for place in found}
    kept = [Kept(m.path, ShapedArray(m.shape, dtypes[m]), 0.0 if m.steps else None) for m in marks]
    walk = _Walk(jaxpr, found, context.measures)

    def program(*args: Value) -> list[Value]:
        histories = dict(zip(marks, args[len(jaxpr.invars) :], strict=True))
        ranges = {m: jnp.max(h, -1) if m.steps else h for m, h in histories.items()}
        outs, measured = walk.run(jaxpr, args[: len(jaxpr.invars)], (), ranges)
        return [*outs, *(_next(m, h, measured.get(m), context.measures) for m, h in histories.items())]

    avals = [*(v.aval for v in jaxpr.invars), *(k.aval for k in kept)]
    names = [*(jaxpr.debug_info.arg_names or ()), *(k.path for k in kept)]
    made = trace_flat(program, avals, "quantize", names)
    context.keep(kept)
    _tell(marks, found, kept, context)
    return made


def _order(mark: Mark) -> Any:
    numbers = mark.key.partition(":")[0].split(".")
    return [int(n) for n in numbers if n.isdigit()], mark.key, SIDES.index(mark.side)


def _next(mark: Mark, history: Value, measured: Value | None, measures: bool) -> Value:
    """What is kept for the next step."""
    if measured is None or measures == bool(mark.steps):
        return history
    if measures:
        return jnp.maximum(history, measured)
    return jnp.concatenate([measured[..., None], history[..., :-1]], -1)


def _tell(marks: Sequence[Mark], found: Sequence[_Place], kept: Sequence[Kept], context: Context) -> None:
    sizes = {k.path: math.prod(k.aval.shape) * k.aval.dtype.itemsize for k in kept}
    for steps in dict.fromkeys(mark.steps for mark in marks):
        own = [mark for mark in marks if mark.steps == steps]
        what = f"kept {len(own)} amax histories of {steps} steps" if steps else f"kept {len(own)} ranges"
        size = amount(sum(sizes[mark.path] for mark in own))
        why = "of the steps before, in the state" if steps else "from step.calibrate, in the state"
        if steps and not context.returns:
            why = "read alone: the function does not return the argument that they are part of"
        context.report.did("quantize", f"{what}, {size}", why)
    for place in found:
        for turns, own in zip(place.loops, place.own, strict=True):
            if not own and place.mark.steps and place.measures:
                what = f"{place.mark.key}, {place.mark.side}: the largest of {turns or 'all'} turns"
                context.report.did("quantize", what, "they take the same weight", place.line)


# ---------------------------------------------------------------- where ranges are measured


@dataclasses.dataclass
class _Place:
    """A mark in the program: the loops around it, from the outermost, by their paths and turns, and which of
    them have a history for each turn. again: computed a second time, for a backward pass.
    """

    mark: Mark
    path: Path
    dtype: Any
    line: str
    again: bool
    at: tuple[Path, ...]
    loops: tuple[int, ...]
    own: tuple[bool, ...]
    measures: bool = True


_Around = tuple[tuple[Path, int], ...]


def _found(jaxpr: Jaxpr, path: Path, names: str, again: bool, around: _Around) -> Iterator[_Place]:
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name in READ or eqn.primitive.name in OPAQUE:
            continue
        stack = f"{names}/{name_stack(eqn)}"
        if (mark := mark_of(eqn)) is not None:
            turns = tuple(n for _, n in around)
            own = _aligned(mark.loops, turns)
            line = source_line(eqn)
            if own is None or any(n == 0 and apart for n, apart in zip(turns, own, strict=True)):
                raise PlanError(
                    f"quantize: the range of {mark.key} ({line}) cannot be kept: its weight is another one in "
                    "each turn of a loop of which nobody knows the turns; use lax.scan, or give this product a "
                    "recipe without delayed and calibrated ranges by a rule"
                )
            second = mark.side in FORWARD and (again or AGAIN in stack)
            dtype = eqn.invars[0].aval.dtype  # type: ignore[union-attr]
            yield _Place(mark, (*path, (index, 0)), dtype, line, second, tuple(p for p, _ in around), turns, own)
        for number, body in enumerate(bodies(eqn)):
            inner = (*path, (index, number))
            loop = eqn.primitive.name in ("scan", "while")
            rest = (*around, (inner, eqn.params.get("length", 0))) if loop else around
            twice = again or bool(eqn.primitive.name == "remat2" and eqn.params["differentiated"])
            for place in _found(body, inner, stack, twice, rest):
                _check_enters(eqn, body, place)
                yield place


def _check_enters(eqn: JaxprEqn, body: Jaxpr, place: _Place) -> None:
    """Raises PlanError for a program inside an equation that nothing can be told to."""
    name = eqn.primitive.name
    if name not in HANDLERS or (name == "while" and body is eqn.params["cond_jaxpr"]):
        raise PlanError(
            f"quantize: the range of {place.mark.key} ({place.line}) cannot be kept: the product stands in "
            f"{'the condition of a while loop' if name == 'while' else name} ({source_line(eqn)}); give it a "
            "recipe without delayed and calibrated ranges by a rule"
        )


def _aligned(model: Sequence[tuple[int, bool]], turns: Sequence[int]) -> tuple[bool, ...] | None:
    """Which of the loops around a mark have a weight for each turn. They are those that were around the
    product in the model and, outside, others, all of whose turns take the same. What is the same in all turns
    may have been taken out of a loop.
    """
    if not model:
        return (False,) * len(turns)
    *outer, (number, own) = model
    if turns and turns[-1] == number and (found := _aligned(outer, turns[:-1])) is not None:
        return (*found, own)
    return None if own else _aligned(outer, turns)


# ---------------------------------------------------------------- the program, traced again

Ranges = Mapping[Mark, Value]
Measured = dict[Mark, Value]


class _Walk:
    def __init__(self, jaxpr: Jaxpr, found: Sequence[_Place], measures: bool) -> None:
        first = {place.mark for place in found if not place.again}
        for place in found:
            place.measures = (measures != bool(place.mark.steps)) and not (
                place.again and place.mark in first
            )
        self.measures = measures
        self.holding = {place.path[:n] for place in found for n in range(len(place.path) + 1)}
        self.places = {place.path: place for place in found}
        self.given: dict[Path, dict[Mark, bool]] = {}  # what comes out of a body; of a loop's, for each turn
        self.own: dict[Path, set[Mark]] = {}  # of which a loop's turns have a range each
        for place in found:
            for n in range(len(place.path)):
                if place.measures:
                    self.given.setdefault(place.path[:n], {})[place.mark] = True
            for path, own in zip(place.at, place.own, strict=True):
                if own:
                    self.own.setdefault(path, set()).add(place.mark)
        self.prefix = ""

    def gives(self, path: Path) -> list[Mark]:
        """The marks that are measured in a body."""
        return list(self.given.get(path, ()))

    def run(self, jaxpr: Jaxpr, args: Sequence[Value], path: Path, ranges: Ranges) -> tuple[list[Any], Measured]:
        """The results of a body, and what was measured in it."""
        env: dict[Var, Value] = dict(zip(jaxpr.all_invars, [*jaxpr.consts, *args], strict=True))
        measured: Measured = {}
        start = 0
        for index, eqn in enumerate(jaxpr.eqns):
            holds = any((*path, (index, n)) in self.holding for n in range(max(1, len(bodies(eqn)))))
            if not holds:
                continue
            self.straight(jaxpr, start, index, env)
            with at_source(eqn, self.prefix):
                values = [_read(env, v) for v in eqn.invars]
                outs = HANDLERS[eqn.primitive.name](self, eqn, values, (path, index), ranges, measured)
            env.update(zip(eqn.outvars, outs, strict=True))
            start = index + 1
        self.straight(jaxpr, start, len(jaxpr.eqns), env)
        return [_read(env, v) for v in jaxpr.outvars], measured

    def straight(self, jaxpr: Jaxpr, start: int, stop: int, env: dict[Var, Value]) -> None:
        """Equations without marks, as they are."""
        if start == stop:
            return
        reads, live = interface(jaxpr, start, stop)
        info = jaxpr.debug_info.with_unknown_names()
        eqns = jaxpr.eqns[start:stop]
        part = jaxpr.replace(constvars=[], consts=[], invars=reads, outvars=live, eqns=eqns, debug_info=info)
        part = part.replace(effects=body_effects(part))
        env.update(zip(live, inline(part, *(env[v] for v in reads)), strict=True))

    def inside(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f`, traced as a body of its own."""

        def traced(*args: Any) -> Any:
            before, self.prefix = self.prefix, ""
            try:
                return f(*args)
            finally:
                self.prefix = before

        return traced


def _read(env: Mapping[Var, Value], v: Any) -> Value:
    return v.val if isinstance(v, Literal) else env[v]


def _add(measured: Measured, new: Measured) -> None:
    for mark, x in new.items():
        measured[mark] = jnp.maximum(measured[mark], x) if mark in measured else x


_At = tuple[Path, int]


def _mark(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    (x,) = args
    path, index = at
    place = walk.places[(*path, (index, 0))]
    mark = place.mark
    kept = ranges[mark]
    if place.measures:
        largest = (jnp.max(x) if jnp.ndim(x) else x).astype(kept.dtype)
        _add(measured, {mark: jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))})
    if walk.measures:
        return [x]
    known = jnp.broadcast_to(kept, jnp.shape(x)).astype(x.dtype)
    return [jnp.where(known > 0, known, x) if mark.steps else known]


def _call(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    (body, *_) = bodies(eqn)
    args = _laid(args, eqn.params.get("in_shardings", ()))
    before = walk.prefix
    walk.prefix = "/".join(filter(None, (before, name_stack(eqn))))
    try:
        outs, new = walk.run(body, args, (*at[0], (at[1], 0)), ranges)
    finally:
        walk.prefix = before
    _add(measured, new)
    return _laid(outs, eqn.params.get("out_shardings", ()))


def _laid(values: Sequence[Value], shardings: Sequence[Any]) -> list[Value]:
    """What a call of jit says of where its arrays lie."""
    given = [*shardings, *[None] * (len(values) - len(shardings))]
    return [
        jax.lax.with_sharding_constraint(x, s) if isinstance(s, jax.sharding.Sharding) else x
        for x, s in zip(values, given, strict=True)
    ]


def _ruled(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    """A function with a rule for its derivative, which knows nothing of what is measured in its body."""
    (body, *_) = bodies(eqn)
    path = (*at[0], (at[1], 0))
    marks, line = walk.gives(path), source_line(eqn)

    @jax.custom_jvp
    def function(*xs: Value) -> tuple[Value, ...]:
        outs, new = walk.run(body, xs, path, ranges)
        return (*outs, *(new[m] for m in marks))

    @function.defjvp
    def _(*_: Any) -> Any:
        raise PlanError(
            f"quantize: a step that keeps ranges is differentiated from outside, through a function with a "
            f"rule of its own ({line}); take the derivative in the function that is parallelized"
        )

    outs = walk.inside(function)(*args)
    _add(measured, dict(zip(marks, outs[len(eqn.outvars) :], strict=True)))
    return [fitted(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=False)]


def _remat(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    (body,) = bodies(eqn)
    path = (*at[0], (at[1], 0))
    marks = walk.gives(path)

    def f() -> list[Value]:
        outs, new = walk.run(body, args, path, ranges)
        return [*(fitted(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=True)), *(new[m] for m in marks)]

    # The operands are closed over; a body made for it keeps all that the equation says of differentiation.
    params, consts = hoist(eqn, {**eqn.params, "jaxpr": trace_flat(walk.inside(f), [], "remat")})
    outs = bind(eqn, consts, params)
    _add(measured, dict(zip(marks, outs[len(eqn.outvars) :], strict=True)))
    return outs[: len(eqn.outvars)]


def _scan(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    (body,) = bodies(eqn)
    path = (*at[0], (at[1], 0))
    consts, carry, _ = scan_parts(eqn)
    own = walk.own.get(path, set())
    rows = [m for m in ranges if m in own]
    stacked = [m for m in walk.gives(path) if m in own]
    largest = [m for m in walk.gives(path) if m not in own]
    types = [v.aval for v in body.invars[consts : consts + carry]]

    def turn(state: Any, row: Any) -> Any:
        told = dict(ranges) | dict(zip(rows, row[1], strict=True))
        outs, new = walk.run(body, [*args[:consts], *state[0], *row[0]], path, told)
        carried = [fitted(x, t) for x, t in zip(outs[:carry], types, strict=True)]
        more = [jnp.maximum(x, new[m]) for m, x in zip(largest, state[1], strict=True)]
        ys = [fitted(x, v.aval) for x, v in zip(outs[carry:], body.outvars[carry:], strict=True)]
        return (carried, more), (ys, [new[m] for m in stacked])

    first = [fitted(x, t) for x, t in zip(args[consts : consts + carry], types, strict=True)]
    none = [_none(m, ranges) for m in largest]
    p = eqn.params
    (end, more), (ys, made) = jax.lax.scan(
        walk.inside(turn),
        (first, none),
        (list(args[consts + carry :]), [ranges[m] for m in rows]),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    _add(measured, dict(zip([*largest, *stacked], [*more, *made], strict=True)))
    return [*end, *ys]


def _none(mark: Mark, ranges: Ranges) -> Value:
    """The largest magnitude of nothing."""
    return jnp.zeros_like(ranges[mark])


def _while(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    p = eqn.params
    tested, fixed = p["cond_nconsts"], p["body_nconsts"]
    number = next(n for n, body in enumerate(bodies(eqn)) if body is p["body_jaxpr"])
    path = (*at[0], (at[1], number))
    marks = walk.gives(path)
    first = args[tested + fixed :]
    types = [v.aval for v in p["body_jaxpr"].invars[fixed:]]

    def goes_on(state: Any) -> Value:
        (go,) = inline(p["cond_jaxpr"], *args[:tested], *state[0])
        return go

    def turn(state: Any) -> Any:
        outs, new = walk.run(p["body_jaxpr"], [*args[tested : tested + fixed], *state[0]], path, ranges)
        largest = [jnp.maximum(x, new[m]) for m, x in zip(marks, state[1], strict=True)]
        return [fitted(x, t) for x, t in zip(outs, types, strict=True)], largest

    init = [fitted(x, t) for x, t in zip(first, types, strict=True)]
    end, largest = jax.lax.while_loop(
        walk.inside(goes_on), walk.inside(turn), (init, [_none(m, ranges) for m in marks])
    )
    _add(measured, dict(zip(marks, largest, strict=True)))
    return list(end)


def _cond(
    walk: _Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    paths = [(*at[0], (at[1], number)) for number in range(len(bodies(eqn)))]
    marks = list(dict.fromkeys(m for path in paths for m in walk.gives(path)))

    def branch(body: Jaxpr, path: Path) -> Callable[[], list[Value]]:
        def f() -> list[Value]:
            outs, new = walk.run(body, args[1:], path, ranges)
            outs = [fitted(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=True)]
            return [*outs, *(new[m] if m in new else _none(m, ranges) for m in marks)]

        traced = walk.inside(f)
        return lambda: traced()

    outs = jax.lax.switch(args[0], [branch(*each) for each in zip(bodies(eqn), paths, strict=True)])
    _add(measured, dict(zip(marks, outs[len(eqn.outvars) :], strict=True)))
    return list(outs[: len(eqn.outvars)])


Handler = Callable[[_Walk, JaxprEqn, Sequence[Value], _At, Ranges, Measured], list[Value]]

HANDLERS: dict[str, Handler] = {
    "name": _mark,
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(RULED, _ruled),
    "cond": _cond,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
}
"""How each primitive with marks inside is made anew."""
