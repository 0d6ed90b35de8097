"""What one expert does with one token, as what all do with rows that are sorted by expert.

    y = silu (x up) down; for one    ->    y[r] = ragged_dot (silu (ragged_dot x[r] up counts)) down counts

A product of a row with an expert's array is a ragged one of all rows. Whatever else takes something of an
expert's takes that of each row's; the rest is done for each row as it is for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import Decline
from xform.experts.operation import CHOICE, COUNTS, GIVEN, IDS, TOKEN, Middle
from xform.experts.single import Known
from xform.raising.choosing import MOVED
from xform.raising.flat import dtype_of
from xform.trace import (
    Jaxpr,
    JaxprEqn,
    Literal,
    ShapedArray,
    Value,
    Var,
    at_source,
    bind,
    shape_of,
    source_line,
    trace_flat,
    without_dead,
)

ROW, EXPERT, ALL = "row", "expert", "all"


@dataclasses.dataclass(frozen=True)
class _Of:
    """A value of each row, of each expert (a dimension in front), or the same for all. short: the same
    without dimensions of size 1, where that was there first.
    """

    kind: str
    value: Value
    short: Value = None


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input of the program for one, and what the operation takes for it. kind: of what it is one.

    token: [tokens, ...]; choice: [tokens, choices, ...]; expert: [experts, ...]; all: as it is.
    """

    var: Var
    kind: str


def middle(part: Jaxpr, operands: Sequence[Operand], found: Known, size: int, experts: int) -> Middle:
    """What is done with `size` rows. part: what is done with one; found: what is known of its variables.

    Raises Decline where a product is none by expert.
    """
    kinds = {TOKEN: TOKEN, CHOICE: CHOICE, EXPERT: GIVEN, ALL: GIVEN}
    takes = (*(kinds[o.kind] for o in operands), COUNTS, IDS)
    avals: list[Any] = []
    for o in operands:
        lead = {EXPERT: (experts,), ALL: ()}.get(o.kind, (size,))
        shape = shape_of(o.var) if o.kind == ALL else squeezed(shape_of(o.var))
        avals.append(ShapedArray((*lead, *shape), dtype_of(o.var)))
    avals += [ShapedArray((n,), np.int32) for n in (experts, size)]

    def run(*values: Value) -> Sequence[Value]:
        *args, counts, ids = values
        rows = _Rows(ids, counts, experts, found)
        env: dict[Var, _Of] = {}
        for o, x in zip(operands, args, strict=True):
            kind = o.kind if o.kind in (EXPERT, ALL) else ROW
            whole = x if kind == ALL else x.reshape(x.shape[0], *shape_of(o.var))
            env[o.var] = _Of(kind, whole, x)
        return rows.run(part, env)

    jaxpr = without_dead(trace_flat(run, avals, "experts"))
    if jaxpr.consts:
        raise Decline("what is done with rows brings arrays of its own")
    if not any(v is jaxpr.invars[-1] for eqn in jaxpr.eqns for v in eqn.invars):
        info = jaxpr.debug_info.with_unknown_names()
        jaxpr, takes = jaxpr.replace(invars=jaxpr.invars[:-1], debug_info=info), takes[:-1]
    made = Middle(jaxpr, takes, size, experts)
    made.check()
    return made


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


class _Rows:
    """Runs the program for one on all rows. counts: rows of each expert; ids: the expert of each."""

    def __init__(self, ids: Value, counts: Value, experts: int, found: Known) -> None:
        self.ids, self.counts, self.experts, self.found = ids, counts, experts, found

    def run(self, part: Jaxpr, env: dict[Var, _Of]) -> list[Value]:
        for eqn in part.eqns:
            if all(v in self.found for v in eqn.outvars):
                continue
            args = [self._read(env, v) for v in eqn.invars]
            with at_source(eqn):
                env.update(zip(eqn.outvars, self._made(eqn, args), strict=True))
        outs = [self._read(env, v) for v in part.outvars]
        return [_short(_Of(ROW, self._as_row(x), x.short if x.kind == ROW else None)) for x in outs]

    def _read(self, env: dict[Var, _Of], v: Any) -> _Of:
        if isinstance(v, Literal):
            return _Of(ALL, v.val)
        if v in self.found:
            return _Of(ALL, jnp.full(shape_of(v), self.found[v], dtype_of(v)))
        return env[v]

    def _made(self, eqn: JaxprEqn, args: Sequence[_Of]) -> list[_Of]:
        kinds = {x.kind for x in args}
        if (same := self._unchanged(eqn, args) or _moved(eqn, args)) is not None:
            return [same]
        if eqn.primitive.name == "dot_general" and kinds == {ROW, EXPERT}:
            out = self._product(eqn, args)
            return [_Of(ROW, out.reshape(out.shape[0], *shape_of(eqn.outvars[0])), out)]
        if not kinds - {ALL}:
            return [_Of(ALL, x) for x in bind(eqn, [x.value for x in args], eqn.params)]
        kind = ROW if ROW in kinds else EXPERT
        if kind == ROW:
            args = [_Of(ROW, self._as_row(x)) if x.kind == EXPERT else x for x in args]
        axes = tuple(None if x.kind == ALL else 0 for x in args)
        outs = jax.vmap(lambda *xs: bind(eqn, xs, eqn.params), axes)(*(x.value for x in args))
        return [_Of(kind, x) for x in outs]

    def _unchanged(self, eqn: JaxprEqn, args: Sequence[_Of]) -> _Of | None:
        """The operand that a factor of one, or a choice that is known, leaves as it is."""
        name, value = eqn.primitive.name, [self._known(v) for v in eqn.invars]
        if name == "select_n" and value[0] is not None:
            return args[1 + int(value[0])]
        if name not in ("mul", "div", "and"):
            return None
        for k in (1, 0) if name != "div" else (1,):
            whole = shape_of(eqn.invars[1 - k]) == shape_of(eqn.outvars[0])
            if whole and value[k] is not None and value[k] == 1:
                return args[1 - k]
        return None

    def _known(self, v: Any) -> Any:
        if isinstance(v, Literal):
            return v.val if np.ndim(v.val) == 0 else None
        return self.found.get(v)

    def _as_row(self, x: _Of) -> Value:
        """What a value is for each row; of an expert that there is not, that of another one."""
        if x.kind == ALL:
            return jnp.broadcast_to(x.value, (*self.ids.shape, *jnp.shape(x.value)))
        if x.kind == ROW:
            return x.value
        own = jnp.take(_short(x), self.ids, axis=0, mode="clip")
        return own.reshape(own.shape[0], *x.value.shape[1:])

    def _product(self, eqn: JaxprEqn, args: Sequence[_Of]) -> Value:
        """Of rows and experts' arrays: dimensions that are paired or summed over, and those that are not."""
        side = 0 if args[0].kind == ROW else 1
        x, w = args[side], args[1 - side]
        contracted, batch = eqn.params["dimension_numbers"]
        own = [n for d, n in enumerate(x.value.shape[1:]) if d not in contracted[side]]
        if prod(own) != 1:
            line = source_line(eqn)
            raise Decline(f"a token has several rows in a product with an expert's array ({line})")
        summed = contracted[1 - side]
        free = [d for d in range(w.value.ndim - 1) if d not in (*summed, *batch[1 - side])]
        out = jax.lax.ragged_dot(
            _in_order(x, contracted[side], ()),
            _in_order(w, (*summed, *batch[1 - side]), free),
            self.counts,
            precision=eqn.params["precision"],
            preferred_element_type=eqn.params["preferred_element_type"],
        )
        out = out.astype(dtype_of(eqn.outvars[0]))
        return out.reshape(out.shape[0], *squeezed(shape_of(eqn.outvars[0])))


def _moved(eqn: JaxprEqn, args: Sequence[_Of]) -> _Of | None:
    """What only moves dimensions of size 1."""
    if eqn.primitive.name not in MOVED or len(args) != 1 or args[0].kind == ALL:
        return None
    x, old, new = args[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    order = [d for d in eqn.params.get("permutation", ()) if old[d] != 1]
    turned = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    if prod(old) != prod(new) or order != sorted(order) or turned:
        return None
    short = _short(x).reshape(x.value.shape[0], *squeezed(new))
    return _Of(x.kind, short.reshape(short.shape[0], *new), short)


def _short(x: _Of) -> Value:
    """A value without dimensions of size 1 but the first."""
    if x.short is not None:
        return x.short
    return x.value.reshape(x.value.shape[0], *squeezed(x.value.shape[1:]))


def _in_order(x: _Of, first: Sequence[int], then: Sequence[int]) -> Value:
    """[rows or experts, what is summed over, and what is not, if anything is]."""
    shape = x.value.shape[1:]
    there = [d for d, n in enumerate(shape) if n != 1]
    order = [there.index(d) for d in (*first, *then) if shape[d] != 1]
    short = _short(x)
    if order != sorted(order):
        short = jnp.transpose(short, (0, *(1 + d for d in order)))
    sizes = [prod(shape[d] for d in dims) for dims in (first, then)]
    return short.reshape(short.shape[0], *(sizes if x.kind == EXPERT else sizes[:1]))
