"""Experts that have so many places each, to which products with masks take tokens and from which they bring
what experts make of them.

    r = dispatch[g,s,x,c] x[g,s]; h = f_x(r)    ->    z = operation[experts] ids[m,j] x w
    y = combine[g,s,x,c] h                            y = sum_j gates[m,j] z[m,j]

A token that finds no place in an expert that it chose goes to none there: which these are is told from sums
over places (`places`). What is held to it, of numbers drawn at random: a token has one place at most in an
expert, no place has two tokens, it is one of an expert that was chosen; and no result comes from a place to
another token than the one that it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.axes import Factor
from xform.errors import Decline
from xform.experts.around import Around, factors, of_experts, of_tokens
from xform.experts.choices import Chosen, back, chosen, leading, mask_at
from xform.experts.drawings import Drawing, Drawn
from xform.experts.operation import TOKEN, Middle, Sorted
from xform.experts.places import Places, Read, moments
from xform.experts.rows import ALL, EXPERT, Operand, middle
from xform.ops import apply
from xform.raising.flat import dtype_of
from xform.raising.placing import Claim
from xform.trace import JaxprEqn, Literal, Value, Var, shape_of, source_line

TOLERANCE = 1e-5
"""Of sums in float32 that have one term that is not zero."""


def claim(around: Around, drawn: Drawn) -> Claim:
    """What stands in the place of the region. drawn: what came out of drawings so far. Raises Decline for
    what is not right.
    """
    around.leave()
    masks = _masks(around)
    chose = chosen(
        around.view, around.scope, [masks.dispatch, masks.combine], masks.tokens, around.experts.size
    )
    _check(masks, chose, drawn)
    return _Raised(masks, chose).claim()


@dataclasses.dataclass(frozen=True)
class _Masks:
    """The two products. rows: what is dispatched; sent: to places; made: of it, there; out: combined.

    tokens: groups and what is in one, in the order of rows; groups: those of them that places are in.
    """

    around: Around
    dispatch: Var
    combine: Var
    rows: Var
    sent: Var
    made: Var
    last: JaxprEqn
    tokens: tuple[Factor, ...]
    groups: tuple[Factor, ...]
    places: Factor

    @property
    def out(self) -> Any:
        return self.last.outvars[0]

    def place(self, v: Var) -> int:
        """The dimension of places."""
        return self.around.scope[v].index((self.places,))


def _masks(around: Around) -> _Masks:
    view, scope = around.view, around.scope
    if len(around.sent) != 1 or len(around.ends) != 1:
        raise Decline("tokens go to experts, or come back, by several products")
    first, last = view.eqns[around.sent[0]], view.eqns[around.ends[0]]
    if last.primitive.name != "dot_general":
        raise Decline(f"what experts make does not come back by a product ({source_line(last)})")
    dispatch, rows = _sides(first, [around.experts in factors(scope, v) for v in first.invars])
    combine, made = _sides(last, [v not in around.made for v in last.invars])
    sent = first.outvars[0]
    places = around.tokens - factors(scope, rows)
    own = factors(scope, dispatch) - {around.experts} - places
    tokens = tuple(f for dim in scope[rows] for f in dim if f in own)
    groups = tuple(f for f in tokens if f in around.tokens)
    if len(places) != 1 or set(tokens) != own:
        raise Decline(f"a mask has other axes than tokens, experts and places ({source_line(first)})")
    found = _Masks(around, dispatch, combine, rows, sent, made, last, tokens, groups, next(iter(places)))
    _shapes(found, first)
    return found


def _sides(eqn: JaxprEqn, which: Sequence[bool]) -> tuple[Var, Var]:
    """The operand for which it holds, and the other one."""
    one = eqn.invars[which.index(True)] if True in which else eqn.invars[0]
    other = eqn.invars[1 - list(eqn.invars).index(one)]
    if isinstance(one, Literal) or isinstance(other, Literal) or all(which) or not any(which):
        raise Decline(f"it is no product of a mask and what has features ({source_line(eqn)})")
    return one, other


def _shapes(masks: _Masks, first: JaxprEqn) -> None:
    """Raises Decline where the products go along other axes than theirs."""
    scope, experts, places = masks.around.scope, masks.around.experts, masks.places
    inside = set(masks.tokens) - set(masks.groups)
    expected = (
        (first, masks.dispatch, inside, {experts, places}),
        (masks.last, masks.combine, {experts, places}, inside),
    )
    for eqn, mask, summed, free in expected:
        side = list(eqn.invars).index(mask)
        contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
        rest = [d for d in range(len(shape_of(mask))) if d not in (*contracted, *batch)]
        has = [{f for d in dims for f in scope[mask][d] if f.size > 1} for dims in (contracted, batch, rest)]
        if has != [summed, set(masks.groups), free] or (places,) not in scope[mask]:
            raise Decline(f"a mask has other axes than tokens, experts and places ({source_line(eqn)})")


# ---------------------------------------------------------------- held to numbers drawn at random


def _check(masks: _Masks, chose: Chosen, drawn: Drawn) -> None:
    """Raises Decline where masks do not say which token has which place."""
    experts = masks.around.experts
    needed = _read_by(masks)
    drawing = Drawing(chose, list(needed.taken), drawn)
    weights = moments(masks.places.size, 7)

    def check(read: Read, ids: Value) -> Any:
        sums: dict[str, list[Value]] = {"dispatch": [], "combine": []}
        for w in weights:
            at = Places(masks.around.view, read, w)
            for name, v in (("dispatch", masks.dispatch), ("combine", masks.combine)):
                sums[name].append(_summed(masks, chose, at, v))
        alone = [_one_hot(masks, read, weights, each) for each in needed.alone]
        return _holds(masks, chose, sums, ids, weights[2], experts) | {
            "a mask that is compared with zero has several places": jnp.asarray(alone, bool).all()
        }

    for found in drawing.values(check):
        for why, right in found.items():
            if not right:
                raise Decline(why)


def _read_by(masks: _Masks) -> Places:
    """What the sums over places are of: traced, so that nothing is computed."""
    at = Places(masks.around.view, lambda v: jnp.zeros(shape_of(v), dtype_of(v)))
    jax.eval_shape(lambda: [at.sum(v, masks.place(v)) for v in (masks.dispatch, masks.combine)])
    return at


def _summed(masks: _Masks, chose: Chosen, at: Places, v: Var) -> Value:
    """The sum over places of a mask, as [tokens, experts]."""
    dims = [dim for dim in masks.around.scope[v] if dim != (masks.places,)]
    x = leading(at.sum(v, masks.place(v)), dims, (*masks.tokens, masks.around.experts))
    return x.reshape(chose.size, masks.around.experts.size)


def _one_hot(masks: _Masks, read: Read, weights: Sequence[Any], which: Any) -> Value:
    """Whether there is one place at most that is not zero, by sums with weights."""
    atom, dim, first, count = which
    sums = [Places(masks.around.view, read, w).sum(atom, dim, first, count) for w in weights]
    return _is_one(sums, weights[2])


def _is_one(sums: Sequence[Value], random: Any) -> Value:
    total, numbers, others = sums
    place = jnp.round(numbers / jnp.where(total != 0, total, 1))
    inside = (place >= 0) & (place < len(random))
    expected = total * jnp.asarray(random)[jnp.where(inside, place, 0).astype(jnp.int32)]
    near = jnp.abs(others - expected) <= TOLERANCE * jnp.abs(total)
    return (inside & near & (jnp.abs(numbers - place * total) <= TOLERANCE * jnp.abs(numbers))).all()


def _holds(
    masks: _Masks,
    chose: Chosen,
    sums: Mapping[str, Sequence[Value]],
    ids: Value,
    random: Any,
    experts: Factor,
) -> dict[str, Value]:
    has, place, others = sums["dispatch"]
    gate = sums["combine"][0]
    here = has != 0
    hits = (ids[:, :, None] == jnp.arange(experts.size, dtype=np.int32)).any(1)
    number = jnp.where(here, jnp.round(place), 0).astype(jnp.int32)
    there = jnp.asarray(random)[jnp.clip(number, 0, len(random) - 1)]
    group = _group(masks)[:, None]
    slot = (group * experts.size + np.arange(experts.size)) * masks.places.size + number
    count = jnp.zeros(_groups(masks) * experts.size * masks.places.size, jnp.int32)
    count = count.at[slot.reshape(-1)].add(here.reshape(-1).astype(jnp.int32))
    near = jnp.abs(sums["combine"][2] - gate * there) <= TOLERANCE * jnp.abs(gate)
    near &= jnp.abs(sums["combine"][1] - gate * number) <= TOLERANCE * jnp.abs(gate) * (1 + number)
    return {
        "a token has several places in an expert, or is scaled there": (~here | (has == 1)).all()
        & _is_one((has, place, others), random),
        "a token has a place in an expert that it did not choose": (hits | ~here).all(),
        "a place has several tokens": (count <= 1).all(),
        "what comes back to a token is of another place than its own": ((gate == 0) | here).all()
        & near.all(),
        "no token that was drawn has a place": here.any(),
    }


def _group(masks: _Masks) -> Any:
    """The number of each token's group."""
    number = np.zeros((), int)
    for f in masks.tokens:
        own = np.arange(f.size) if f in masks.groups else np.zeros(f.size, int)
        number = number[..., None] * (f.size if f in masks.groups else 1) + own
    return number.reshape(-1)


def _groups(masks: _Masks) -> int:
    return int(_group(masks).max()) + 1


# ---------------------------------------------------------------- the operation in their place


class _Raised:
    def __init__(self, masks: _Masks, chose: Chosen) -> None:
        self.masks, self.chose, self.around = masks, chose, masks.around
        around = masks.around
        inside = [n for n in around.eqns if n not in around.ends and n not in around.sent]
        part, self.takes = around.part(inside, [masks.made])
        one = around.single(part, sorted(around.tokens, key=lambda f: f.id))
        self.operands = [self._operand(v, w) for v, w in zip(self.takes, one.invars, strict=True)]
        self.part = one

    def _operand(self, v: Var, one: Var) -> Operand:
        if v is self.masks.sent:
            return Operand(one, TOKEN)
        kind = self.around.kind(v, tuple(self.around.tokens))
        if kind not in (EXPERT, ALL):
            raise Decline("what is done at a place takes something else of that place")
        return Operand(one, kind)

    def middle(self, choices: int) -> Middle:
        size = self.chose.size * choices
        return middle(self.part, self.operands, {}, size, self.around.experts.size)

    def claim(self) -> Claim:
        masks, chose, view = self.masks, self.chose, self.around.view
        made = self.middle(chose.choices)
        leaves = _read_by(masks).taken
        sources = [masks.rows if v is masks.sent else v for v in self.takes]
        takes = list(dict.fromkeys((*chose.sources, *sources, *leaves)))

        def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
            read = values.__getitem__
            at = Places(view, read)
            has, gate = (_summed(masks, chose, at, v) for v in (masks.dispatch, masks.combine))
            experts = self.around.experts.size
            ids = chose.ids(read)
            ids = jnp.where(mask_at(has != 0, ids, experts), ids, experts)
            args = [self._given(v, read(v), o) for v, o in zip(sources, self.operands, strict=True)]
            (z,) = apply(Sorted(made), ids, *args)
            return {masks.out: self._combined(mask_at(gate, ids, experts), z)}

        return Claim(view, takes, [masks.out], emit)

    def _given(self, v: Var, x: Value, operand: Operand) -> Value:
        if operand.kind == TOKEN:
            return of_tokens(v, x, self.chose).astype(dtype_of(operand.var))
        return x if operand.kind == ALL else of_experts(self.around.scope, v, x, self.around.experts)

    def _combined(self, gates: Value, z: Value) -> Value:
        out, eqn = self.masks.out, self.masks.last
        y = jnp.einsum(
            "mj,mj...->m...",
            gates.astype(z.dtype),
            z,
            precision=eqn.params["precision"],
            preferred_element_type=dtype_of(out),
        )
        return back(y, self.around.scope[out], self.chose.tokens, shape_of(out)).astype(dtype_of(out))
