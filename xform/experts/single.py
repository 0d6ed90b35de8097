"""What one expert does with one token: cut out of a program that does it for all of both at once.

    h = silu (x[m,d] up[x,d,f]); y = sum_x g[m,x] (h[m,x,f] down[x,f,d])    ->    y = g (silu (x up) down)

Along each axis a program is held to treat each alone (`batch.local`), and is made anew for one: dimensions
of tokens and experts are of size 1 then. The experts' may be summed over at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from xform.axes import Factor, Scope, find_axes
from xform.batch.local import Local, analyse
from xform.batch.states import Batch, Micro, Mixes, Split, State
from xform.errors import Decline
from xform.raising.flat import dtype_of
from xform.trace import Jaxpr, JaxprEqn, Literal, ShapedArray, Var, bind, shape_of, source_line, trace_flat

Labels = list[list[Factor]]
"""The axes of each dimension of a value, as far as they are left."""


@dataclasses.dataclass(frozen=True)
class _One(Split):
    """One of `whole`."""

    def part(self, n: int) -> int:
        return n // self.whole


def single(
    part: Jaxpr, labels: Sequence[Labels], axes: Sequence[Factor], summed: Collection[Factor]
) -> Jaxpr:
    """The program for one of each axis. labels: the axes of its inputs. Raises Decline, with the line, where
    it does more than treat each alone, and sum over some at the end.
    """
    left = [[list(dim) for dim in own] for own in labels]
    for axis in axes:
        scope = find_axes(part).root
        found = _found(part, scope, left, axis)
        if found is None:
            continue  # gone with another
        own, there = found
        if not set(own) <= set(axes) or len({f in summed for f in own}) > 1:
            raise Decline("tokens and experts are not axes of their own")
        part, outs = _along(part, scope, there)
        if any(not s.is_rows and (axis not in summed or s.kind != "sum") for s in outs):
            raise Decline("what comes of it is no value of each token, or no sum over the experts")
        left = [[[f for f in dim if f not in own] for dim in dims] for dims in left]
    return part


def _found(
    part: Jaxpr, scope: Scope, labels: Sequence[Labels], axis: Factor
) -> tuple[list[Factor], Factor] | None:
    """Which axis of a part is one of the whole program; with those that are one with it in the part."""
    for v, dims in zip(part.invars, labels, strict=True):
        for d, dim in enumerate(dims):
            if axis not in dim:
                continue
            own, there = list(dim), [f for f in scope[v][d] if f.size > 1]
            while own and there:
                if own[0].size == there[0].size:
                    if own[0] is axis:
                        return [axis], there[0]
                    own, there = own[1:], there[1:]
                elif len(there) == 1 and there[0].size == prod(f.size for f in own):
                    return own, there[0]
                else:
                    raise Decline("axes of tokens and experts are taken apart")
    return None


def _along(part: Jaxpr, scope: Scope, axis: Factor) -> tuple[Jaxpr, list[State]]:
    """The program for one of an axis, and what its results are along it."""
    split = _One(axis.size, 1)
    batch = Batch((axis,), split)
    try:
        states = [batch.of(scope, v) for v in part.invars]
        local = analyse(part, states, scope, batch, [])
    except Mixes as why:
        line = getattr(why, "line", "")
        raise Decline(f"{why} ({line})" if line else str(why)) from None
    _check(part, local)
    avals = [
        ShapedArray(split.small(shape_of(v), s), dtype_of(v))
        for v, s in zip(part.invars, states, strict=True)
    ]
    made = trace_flat(lambda *args: local.run(args, Micro(np.int32(0), split)), avals, "experts")
    return made, local.outs


def _check(part: Jaxpr, local: Local) -> None:
    """Raises Decline where what is made for each depends on its number, or is drawn at random."""
    for eqn in part.eqns:
        name = eqn.primitive.name
        states = [local.states[v] for v in eqn.outvars if v in local.states]
        counts = name == "iota" and any(s.is_rows and s.dim == eqn.params["dimension"] for s in states)
        drawn = name.startswith(("random", "threefry")) and any(s.is_rows for s in states)
        if counts or drawn:
            why = "numbered" if counts else "given random numbers"
            line = source_line(eqn)
            raise Decline(f"tokens, places or experts are {why}" + (f" ({line})" if line else ""))


# ---------------------------------------------------------------- what follows from what is known

Known = dict[Var, Any]
"""Variables all of whose elements are one number, and that."""

_ZEROS = """
    reshape broadcast_in_dim transpose squeeze expand_dims slice reduce_sum convert_element_type neg copy
    reduce_precision rev cumsum mul dot_general
"""
_MOVES = frozenset(_ZEROS.split())
"""What is zero where (one of) its operands is."""


def known(part: Jaxpr, given: Mapping[Var, Any]) -> Known:
    """What follows from inputs that are known: so also that a result is zero, whatever the others are."""
    found: Known = dict(given)

    def value(v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val if np.ndim(v.val) == 0 else None
        return found.get(v)

    for eqn in part.eqns:
        values = [value(v) for v in eqn.invars]
        out = eqn.outvars[0]
        if eqn.effects or len(eqn.outvars) != 1:
            continue
        if all(v is not None for v in values):
            if (made := _computed(eqn, values)) is not None:
                found[out] = made
        elif eqn.primitive.name in _MOVES and any(v is not None and v == 0 for v in values):
            found[out] = np.zeros((), dtype_of(out))
        elif eqn.primitive.name == "select_n" and (made := _selected(values)) is not None:
            found[out] = made
        elif eqn.primitive.name == "and" and any(v is not None and not v for v in values):
            found[out] = np.zeros((), dtype_of(out))
    return found


def _selected(values: Sequence[Any]) -> Any:
    """The case that is selected, if it is known; or what all cases are."""
    which, *cases = values
    if which is not None:
        return cases[int(which)]
    return cases[0] if all(c is not None and c == cases[0] for c in cases) else None


def _computed(eqn: JaxprEqn, values: Sequence[Any]) -> Any:
    """What comes of values that are known; None where that is not one number."""
    args = [np.full(shape_of(v), x, dtype_of(v)) for v, x in zip(eqn.invars, values, strict=True)]
    if sum(x.size for x in args) > 1 << 20:
        return None
    with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
        (out,) = bind(eqn, args, eqn.params)
    made = np.asarray(out).reshape(-1)
    return made[0] if made.size and (made == made[0]).all() else None


def linear(part: Jaxpr, v: Var, found: Known) -> bool:
    """Whether all results are linear in an input."""
    has = {v}
    for eqn in part.eqns:
        mine = [w for w in eqn.invars if isinstance(w, Var) and w in has]
        if not mine:
            continue
        others = [w for w in eqn.invars if not isinstance(w, Var) or w not in has]
        if not _is_linear(eqn, mine, others, found):
            return False
        has.update(eqn.outvars)
    return all(isinstance(w, Var) and w in has for w in part.outvars)


def _is_linear(eqn: JaxprEqn, mine: Sequence[Var], others: Sequence[Any], found: Known) -> bool:
    name = eqn.primitive.name
    if name in ("add", "sub", "add_any", "concatenate"):
        return not others
    if name in ("mul", "dot_general"):
        return len(mine) == 1
    if name == "div":
        return len(mine) == 1 and eqn.invars[0] is mine[0]
    if name == "select_n":
        cases = [w for w in eqn.invars[1:] if w not in mine]
        zero = (v.val == 0 if isinstance(v, Literal) else found.get(v) == 0 for v in cases)
        return eqn.invars[0] not in mine and all(zero)
    return name in _MOVES
