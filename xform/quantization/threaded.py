"""Traces a step again with its ranges going down to the products, and what they measure coming up.

    scan over layers           scans over their histories, and stacks what each layer measured
    scan over microbatches     has one history for all turns, and carries the largest that any measured
    call, branch, checkpoint   has one result more for each range measured inside

What is between is carried over as it is. Numbers that are not finite leave no trace in a history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.higher_order import bodies, hoist, scan_parts
from xform.ops.marks import Mark
from xform.quantization.places import Place
from xform.quantization.undifferentiated import undifferentiated
from xform.rewrite import Path, interface
from xform.state.kept import Phase
from xform.trace import (
    Jaxpr,
    JaxprEqn,
    Literal,
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

Ranges = Mapping[Mark, Value]
Measured = dict[Mark, Value]


class Walk:
    """places: of all marks. phase: "measure" takes the ranges just measured; "start" where none is known yet;
    in "run" nothing waits for what is measured.
    """

    def __init__(self, places: Sequence[Place], phase: Phase) -> None:
        self.phase = phase
        self.holding = {place.path[:n] for place in places for n in range(len(place.path) + 1)}
        self.places = {place.path: place for place in places}
        self.given: dict[Path, dict[Mark, None]] = {}  # what is measured in a body
        self.own: dict[Path, set[Mark]] = {}  # of a loop's body: for each turn
        for place in places:
            for n in range(len(place.path)):
                if place.measures:
                    self.given.setdefault(place.path[:n], {})[place.mark] = None
            for (path, _), own in zip(place.loops, place.own, strict=True):
                if own:
                    self.own.setdefault(path, set()).add(place.mark)
        self.prefix = ""

    def gives(self, path: Path) -> list[Mark]:
        """The marks that are measured in a body."""
        return list(self.given.get(path, ()))

    def run(
        self, jaxpr: Jaxpr, args: Sequence[Value], path: Path, ranges: Ranges
    ) -> tuple[list[Any], Measured]:
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
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    (x,) = args
    path, index = at
    place = walk.places[(*path, (index, 0))]
    mark = place.mark
    kept = ranges[mark]
    if place.measures:
        largest = (jnp.max(x) if jnp.ndim(x) else x).astype(kept.dtype)
        _add(measured, {mark: jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))})
    if walk.phase == "measure":
        return [x]
    known = jnp.broadcast_to(kept, jnp.shape(x)).astype(x.dtype)
    return [jnp.where(known > 0, known, x) if mark.steps and walk.phase == "start" else known]


def _call(
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
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
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    """A function with a rule for its derivative, which knows nothing of what is measured in its body."""
    (body, *_) = bodies(eqn)
    path = (*at[0], (at[1], 0))
    marks, line = walk.gives(path), source_line(eqn)

    def function(*xs: Value) -> list[Value]:
        outs, new = walk.run(body, xs, path, ranges)
        return [*outs, *(new[m] for m in marks)]

    why = (
        f"quantize: a step that keeps ranges is differentiated from outside, through a function with a "
        f"rule of its own ({line}); take the derivative in the function that is parallelized"
    )
    outs = walk.inside(undifferentiated(function, why))(*args)
    _add(measured, dict(zip(marks, outs[len(eqn.outvars) :], strict=True)))
    return [fitted(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=False)]


def _remat(
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
) -> list[Value]:
    (body,) = bodies(eqn)
    path = (*at[0], (at[1], 0))
    marks = walk.gives(path)

    def f() -> list[Value]:
        outs, new = walk.run(body, args, path, ranges)
        return [
            *(fitted(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=True)),
            *(new[m] for m in marks),
        ]

    # The operands are closed over; a body made for it keeps all that the equation says of differentiation.
    params, consts = hoist(eqn, {**eqn.params, "jaxpr": trace_flat(walk.inside(f), [], "remat")})
    outs = bind(eqn, consts, params)
    _add(measured, dict(zip(marks, outs[len(eqn.outvars) :], strict=True)))
    return outs[: len(eqn.outvars)]


def _scan(
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
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
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
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
    walk: Walk, eqn: JaxprEqn, args: Sequence[Value], at: _At, ranges: Ranges, measured: Measured
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


Handler = Callable[[Walk, JaxprEqn, Sequence[Value], _At, Ranges, Measured], list[Value]]

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
