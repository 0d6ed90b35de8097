"""Operations with programs inside, seen from one shard: calls, loops, branches, bodies that are recomputed.

A call stands in the caller's place. What a loop carries has one layout, before and after every turn; what a
loop brings from outside is gathered before it, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.higher_order import bodies, hoist, scan_parts
from xform.spmd import keeping, overlap
from xform.spmd.layout import Dim, Laid, Piece, size_of
from xform.spmd.values import Val
from xform.spmd.walk import Walk
from xform.trace import (
    Jaxpr,
    JaxprEqn,
    ShapedArray,
    Value,
    Var,
    at_source,
    bind,
    fitted,
    shape_of,
    trace_flat,
    typeof,
    without_dead,
)

TRIES = 3
"""How often the layout of what a loop carries is looked for."""


def call(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    (body, *_) = bodies(eqn)
    return walk.inlined(eqn, body, vals)


def custom_jvp(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    """A function with a rule for its derivative: in a program that is differentiated already it is a call; in
    one that may be differentiated from outside it keeps its rule, which runs on the parts too.
    """
    (body,) = bodies(eqn)
    if walk.differentiated:
        return walk.inlined(eqn, body, vals)
    laids = [walk.settled(val) for val in vals]
    types: list[Any] = [v.aval for v in body.invars]
    out_laids: list[Laid] = []

    def primal(*xs: Value) -> tuple[Value, ...]:
        outs = walk.run(body, [walk.held(x, t, laid) for x, t, laid in zip(xs, types, laids, strict=True)])
        out_laids[:] = [walk.settled(out) for out in outs]
        return tuple(_out(walk, out, laid) for out, laid in zip(outs, out_laids, strict=True))

    def rule(primals: tuple[Value, ...], tangents: tuple[Value, ...]) -> tuple[Any, Any]:
        zeros = [not jnp.issubdtype(t.dtype, jnp.inexact) for t in types]
        jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
        known = list(zip(primals, types, laids, strict=True))
        moving = zip(tangents, known, zeros, strict=True)
        known += [(dx, t, laid) for dx, (_, t, laid), zero in moving if not zero]
        outs = walk.run(jaxpr.with_consts(consts), [walk.held(*each) for each in known])
        results = [_out(walk, out, laid) for out, laid in zip(outs, out_laids, strict=False)]
        given = iter(outs[len(results) :])
        moved = [
            jnp.zeros_like(x) if zero else _out(walk, next(given), laid)
            for x, zero, laid in zip(results, out_zeros, out_laids, strict=True)
        ]
        return tuple(results), tuple(moved)

    whole = jax.custom_jvp(walk.inside("branch", primal))
    whole.defjvp(walk.inside("branch", rule))
    results = whole(*(walk.get(val, laid) for val, laid in zip(vals, laids, strict=True)))
    return _held(walk, results, body, out_laids)


def remat(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    (body,) = bodies(eqn)
    laids: list[Laid] = []
    waits = walk.current_waits

    def f() -> list[Value]:
        outs = walk.run(body, vals, waits=waits)
        laids[:] = [walk.left(out, walk.scope.parent) for out in outs]
        return [_out(walk, out, laid) for out, laid in zip(outs, laids, strict=True)]

    # The operands are closed over; a body made for it keeps all that the equation says of differentiation.
    made = trace_flat(walk.inside("remat", f), [], "remat")
    params, consts = hoist(eqn, {**eqn.params, "jaxpr": made})
    return _held(walk, bind(eqn, consts, params), body, laids)


def scan(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    p = eqn.params
    consts, carry, _ = scan_parts(eqn)
    (body,) = bodies(eqn)
    fixed, first, stacked = vals[:consts], vals[consts : consts + carry], vals[consts + carry :]
    if walk.options.gather == "step":
        own = body.invars[consts + carry :]
        stacked = [keeping.together(walk, body, v, val) for v, val in zip(own, stacked, strict=True)]
    rows = [_rows(val) for val in stacked]
    xs = [walk.get(val, laid) for val, laid in zip(stacked, rows, strict=True)]
    row_types = [v.aval for v in body.invars[consts + carry :]]
    carried = [v.aval for v in body.invars[consts : consts + carry]]
    laids = [walk.settled(val) for val in first]
    found: list[Laid] = []
    out_laids: list[Laid] = []
    names: list[tuple[str, str]] = []  # of the weights that results are, or are made of
    body, adding = _added(body, consts, carry)

    def turn(state: Sequence[Value], row: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        inputs = [waiting(walk, x, t, laid) for x, t, laid in zip(state, carried, laids, strict=True)]
        inputs += [
            walk.held(_wide(x, t), t, Laid(laid.dims[1:]), val.origin, val.named)
            for x, t, laid, val in zip(row, row_types, rows, stacked, strict=True)
        ]
        walk.scope.adds = bool(adding) or any(val.terms for val in inputs)
        outs = walk.run(body, [*fixed, *inputs])
        sums: dict[int, Value] = {}
        for i, eqns in adding.items():
            if outs[i].gradient and outs[i].laid.partial:
                with at_source(eqns[0], walk.prefix):
                    sums[i] = state[i] + terms_of(walk, outs[i], laids[i])
                continue
            for eqn in eqns:
                with at_source(eqn, walk.prefix):
                    both = [inputs[i] if v is body.invars[consts + i] else outs[i] for v in eqn.invars]
                    (outs[i],) = walk.equation(eqn, both, [None])
        found[:] = [
            walk.left(out, walk.scope) if i in sums else walk.settled(out)
            for i, out in enumerate(outs[:carry])
        ]
        out_laids[:] = [walk.left(out, walk.scope.parent) for out in outs[carry:]]
        names[:] = [(out.origin, out.named) for out in outs[carry:]]
        state = [
            sums[i] if i in sums else terms_of(walk, out, laid)
            for i, (out, laid) in enumerate(zip(outs[:carry], laids, strict=True))
        ]
        state = [fitted(x, t) for x, t in zip(state, carried, strict=True)]
        return state, [_out(walk, out, laid) for out, laid in zip(outs[carry:], out_laids, strict=True)]

    spared = walk.spared
    for left in reversed(range(TRIES)):
        walk.spared = spared
        init = [
            fitted(terms_of(walk, val, laid), t) for val, laid, t in zip(first, laids, carried, strict=True)
        ]
        body_fn = walk.inside("loop", turn, p["length"])
        end, ys = _loop(walk, eqn, body_fn, init, xs)
        if found == laids or not left:
            break
        laids = list(found)
    made = [waiting(walk, x, v.aval, laid) for x, v, laid in zip(end, eqn.outvars, laids, strict=False)]
    length = (Piece(p["length"]),)
    for x, var, laid, (origin, named) in zip(ys, eqn.outvars[carry:], out_laids, names, strict=True):
        made.append(walk.held(x, var.aval, Laid((length, *laid.dims), laid.partial), origin, named))
    for val in made:
        val.gradient = bool(val.laid.partial)
    return made


def waiting(walk: Walk, x: Value, aval: Any, laid: Laid) -> Val:
    """What a body is given; terms of a sum are given as such to wait for it."""
    val = walk.held(x, aval, laid)
    val.terms = val.gradient = bool(laid.partial)
    return val


def _wide(row: Value, aval: Any) -> Value:
    """A row as wide as the body takes it, where the stack is kept narrower."""
    return row if row.dtype == aval.dtype else row.astype(aval.dtype)


def _loop(
    walk: Walk, eqn: JaxprEqn, turn: Callable[..., Any], init: Sequence[Value], xs: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    """The loop over turns; with overlap, the collectives of a turn that may be early or late are."""
    p = eqn.params
    length, reverse, unroll = p["length"], p["reverse"], p["unroll"]
    if "prefetch" in walk.options.overlap and xs and length >= overlap.LEAST:
        rows = [jax.lax.index_in_dim(x, 0, keepdims=False) for x in xs]

        def flat(*values: Value) -> list[Value]:
            state, ys = turn(values[: len(init)], values[len(init) :])
            return [*state, *ys]

        body = overlap.sunk(without_dead(trace_flat(flat, [typeof(x) for x in (*init, *rows)], "turn")))
        if (parts := overlap.cut(body, len(init))) is not None:
            walk.overlapped(eqn, parts.nbytes, len(parts.fetched), len(parts.late))
            return overlap.looped(parts, init, xs, length, reverse, unroll)
    return jax.lax.scan(lambda c, x: turn(c, x), init, xs, length=length, reverse=reverse, unroll=unroll)


def _added(body: Jaxpr, consts: int, carry: int) -> tuple[Jaxpr, dict[int, list[JaxprEqn]]]:
    """The program of a loop whose results are, for what it only adds to, what it adds; and for the number of
    each such the equations that are left out: the sum, and a layout of it.
    """
    uses = Counter(v for eqn in body.eqns for v in eqn.invars if isinstance(v, Var))
    uses.update(v for v in body.outvars if isinstance(v, Var))
    makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    outs, found = list(body.outvars), {}
    for i, before in enumerate(body.invars[consts : consts + carry]):
        eqns: list[JaxprEqn] = []
        out = outs[i]
        while isinstance(out, Var) and uses[out] == 1 and out in makers:
            eqns.insert(0, makers[out])
            if eqns[0].primitive.name != "sharding_constraint":
                break
            (out,) = eqns[0].invars
        if not eqns or eqns[0].primitive.name not in ("add", "add_any") or uses[before] != 1:
            continue
        others = [v for v in eqns[0].invars if v is not before]
        if len(others) == 1 and isinstance(others[0], Var) and _size(others[0]) == _size(before):
            outs[i], found[i] = others[0], eqns
    dropped = {id(eqn) for eqns in found.values() for eqn in eqns}
    return body.replace(eqns=[e for e in body.eqns if id(e) not in dropped], outvars=outs), found


def _size(var: Var) -> tuple[Any, Any]:
    return shape_of(var), getattr(var.aval, "dtype", None)


def terms_of(walk: Walk, val: Val, laid: Laid) -> Value:
    """A value in a layout; where that has terms of a sum that the value has not, it is all on the first
    device and zero on the others.
    """
    if val.terms or (val.make is None and set(laid.partial) <= set(val.laid.partial)):
        return walk.get(val, laid)
    x = walk.get(val, laid.summed())
    if not laid.partial:
        return x
    return jax.lax.select(jax.lax.axis_index(laid.partial) == 0, x, jnp.zeros_like(x))


def _rows(val: Val) -> Laid:
    """The layout of a stack whose rows are whole along the first dimension."""
    first: Dim = (Piece(size_of(val.laid.dims[0])),)
    return Laid((first, *val.laid.dims[1:]))


def while_loop(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    p = eqn.params
    a, b = p["cond_nconsts"], p["body_nconsts"]
    first = vals[a + b :]
    carried = [v.aval for v in p["body_jaxpr"].invars[b:]]
    laids = [walk.settled(val) for val in first]
    found: list[Laid] = []

    def state(xs: Sequence[Value]) -> list[Val]:
        return [walk.held(x, t, laid) for x, t, laid in zip(xs, carried, laids, strict=True)]

    def cond(xs: Sequence[Value]) -> Value:
        (go,) = walk.run(p["cond_jaxpr"], [*vals[:a], *state(xs)])
        return walk.whole(go)

    def body(xs: Sequence[Value]) -> list[Value]:
        outs = walk.run(p["body_jaxpr"], [*vals[a : a + b], *state(xs)])
        found[:] = [walk.settled(out) for out in outs]
        got = [_out(walk, out, laid) for out, laid in zip(outs, laids, strict=True)]
        return [fitted(x, t) for x, t in zip(got, carried, strict=True)]

    for left in reversed(range(TRIES)):
        init = [fitted(walk.get(val, laid), t) for val, laid, t in zip(first, laids, carried, strict=True)]
        test, step = walk.inside("loop", cond), walk.inside("loop", body)
        end = jax.lax.while_loop(_fresh(test), _fresh(step), init)
        if found == laids or not left:
            break
        laids = list(found)
    return [walk.held(x, v.aval, laid) for x, v, laid in zip(end, eqn.outvars, laids, strict=True)]


def _fresh(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` as a function of its own: JAX caches a trace by the function."""
    return lambda *xs: f(*xs)


def cond(walk: Walk, eqn: JaxprEqn, vals: list[Val]) -> list[Val]:
    index, *operands = vals
    branches = eqn.params["branches"]
    seen: list[list[Laid]] = []
    for body in branches:  # once to see how each lays out its results

        def look(body: Any = body) -> list[Value]:
            outs = walk.run(body, operands)
            seen.append([walk.settled(out) for out in outs])
            return [_out(walk, out, laid) for out, laid in zip(outs, seen[-1], strict=True)]

        trace_flat(walk.inside("branch", look), [], "branch")
    laids = [max(each, key=lambda laid: walk.grid.ways(laid.axes)) for each in zip(*seen, strict=True)]

    def branch(body: Any) -> Any:
        def f() -> list[Value]:
            outs = walk.run(body, operands)
            got = [_out(walk, out, laid) for out, laid in zip(outs, laids, strict=True)]
            return [fitted(x, v.aval) for x, v in zip(got, eqn.outvars, strict=True)]

        traced = walk.inside("branch", f)
        return lambda: traced()

    results = jax.lax.switch(walk.whole(index), [branch(body) for body in branches])
    return [waiting(walk, x, v.aval, laid) for x, v, laid in zip(results, eqn.outvars, laids, strict=True)]


def _out(walk: Walk, val: Val, laid: Laid) -> Value:
    """A value on its way out of a body; a literal too has a dtype there, terms of a gradient their own."""
    x = walk.get(val, laid)
    return fitted(x, val.aval) if isinstance(val.aval, ShapedArray) and not laid.partial else x


def _held(walk: Walk, results: Sequence[Value], body: Any, laids: Sequence[Laid]) -> list[Val]:
    made = [walk.held(x, v.aval, laid) for x, v, laid in zip(results, body.outvars, laids, strict=True)]
    for val in made:
        val.gradient = bool(val.laid.partial)
    return made


HANDLERS = {
    **dict.fromkeys(("jit", "closed_call", "core_call", "custom_vjp_call", "eval_jaxpr"), call),
    "cond": cond,
    "custom_jvp_call": custom_jvp,
    "remat2": remat,
    "scan": scan,
    "while": while_loop,
}
"""How each primitive with a program inside is lowered."""
