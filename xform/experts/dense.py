"""All tokens through all experts, of which each token takes what those make that it chose.

    h[m,x] = f_x(x[m]); y[m] = sum_x gates[m,x] h[m,x]      ->    z = operation[experts] ids[m,j] x w
    or y[m,j] = h[m,ids[m,j]]                                     y = sum_j gates[m,j] z[m,j], or z

What is done for one token by one expert is nothing where the masks that it takes, of tokens and experts, are
what they are at experts that were not chosen: by what follows from that (`single.known`), whatever else it
takes. A gate that results are linear in stays outside; what else is masked takes its mask along with the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform.axes import Factor
from xform.errors import Decline
from xform.experts.around import Around, factors, given, operands
from xform.experts.choices import Chosen, back, canonical, chosen, mask_at, spans
from xform.experts.drawings import Drawing, Drawn
from xform.experts.operation import CHOICE, Sorted
from xform.experts.places import Read
from xform.experts.rows import Operand, middle
from xform.experts.single import Known, known, linear
from xform.ops import apply
from xform.raising.choosing import is_float
from xform.raising.flat import dtype_of
from xform.raising.placing import Claim
from xform.trace import Jaxpr, JaxprEqn, Value, Var, bind, shape_of, source_line

SOFT = "a token takes something of experts that it did not choose"


def claim(around: Around, drawn: Drawn) -> Claim:
    """What stands in the place of the region. drawn: what came out of drawings so far. Raises Decline for
    what is not right.
    """
    around.leave()
    if len(around.ends) != 1:
        raise Decline("what experts make comes back to tokens in several ways")
    last = around.view.eqns[around.ends[0]]
    if last.primitive.name == "gather" and last.invars[0] in around.made:
        return _picked(around, last, drawn)
    (out,) = last.outvars
    tokens = _in_order(around, out)
    part, takes = around.part(sorted(around.eqns), [out])
    one = around.single(part, tokens)
    taken = operands(around, one, takes, tokens)
    masks = {v: o.var for v, o in zip(takes, taken, strict=True) if o.kind == CHOICE}
    if not masks:
        raise Decline(SOFT)
    chose = chosen(around.view, around.scope, list(masks), tokens, around.experts.size)
    found, gate = _told(one, masks, chose, around.experts, drawn)
    kept = [(v, o) for v, o in zip(takes, taken, strict=True) if o.var not in found]
    return _summed(around, chose, out, one, found, kept, gate)


def _in_order(around: Around, out: Var) -> tuple[Factor, ...]:
    """The axes of tokens, in the order of a result."""
    return tuple(f for dim in around.scope[out] for f in dim if f in around.tokens)


# ---------------------------------------------------------------- which masks say what


def _told(
    one: Jaxpr, masks: Mapping[Var, Var], chose: Chosen, experts: Factor, drawn: Drawn
) -> tuple[Known, Var | None]:
    """What is known of the program for one where a token is at an expert that it chose; and the gate that
    results are linear in, which is one then. Raises Decline where experts that were not chosen count.
    """
    ends = _ends(list(masks), chose, experts, drawn)
    off = {masks[v]: dtype_of(v).type(at[0][0]) for v, at in ends.items() if at[0][0] == at[0][1]}
    nothing = known(one, off)
    if any(not isinstance(v, Var) or v not in nothing or nothing[v] != 0 for v in one.outvars):
        raise Decline(SOFT)
    on = {masks[v]: dtype_of(v).type(at[1][0]) for v, at in ends.items() if at[1][0] == at[1][1]}
    found = known(one, on)
    gates = [v for v, w in masks.items() if w not in on and is_float(v) and prod(shape_of(w)) == 1]
    for v in gates:
        if len(gates) == 1 and linear(one, masks[v], found):
            return known(one, on | {masks[v]: dtype_of(v).type(1)}), v
    return found, None


def _ends(masks: Sequence[Var], chose: Chosen, experts: Factor, drawn: Drawn) -> dict[Var, Any]:
    """The least and the greatest of each mask, of all drawings, where no choice is, and where one is."""

    def check(read: Read, ids: Value) -> Any:
        return [spans(canonical(v, read(v), chose, experts), ids, experts.size) for v in masks]

    found = np.asarray(Drawing(chose, masks, drawn).values(check))  # [drawing, mask, chosen or not, 2]
    if np.isnan(found).any():
        raise Decline("masks of experts are not numbers")
    both = np.stack([found[..., 0].min(0), found[..., 1].max(0)], -1)
    return dict(zip(masks, both, strict=True))


# ---------------------------------------------------------------- the operation in their place


def _summed(
    around: Around,
    chose: Chosen,
    out: Var,
    one: Jaxpr,
    found: Known,
    kept: Sequence[tuple[Var, Operand]],
    gate: Var | None,
) -> Claim:
    experts = around.experts
    taken = [o for _, o in kept]
    made = middle(one, taken, found, chose.size * chose.choices, experts.size)
    takes = dict.fromkeys((*chose.sources, *(v for v, _ in kept), *((gate,) if gate is not None else ())))

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        ids = chose.ids(values.__getitem__)
        args = [given(around, chose, v, values[v], o, ids) for v, o in kept]
        (z,) = apply(Sorted(made), ids, *args)
        gates = ids < experts.size
        if gate is not None:
            gates = mask_at(canonical(gate, values[gate], chose, experts), ids, experts.size)
        gates = gates.reshape(ids.shape).astype(jnp.promote_types(gates.dtype, z.dtype))
        y = jnp.einsum("mj,mj...->m...", gates, z)
        y = back(y, around.scope[out], chose.tokens, shape_of(out))
        return {out: y.astype(dtype_of(out))}

    return Claim(around.view, list(takes), [out], emit)


# ---------------------------------------------------------------- what is looked up of all


def _picked(around: Around, last: JaxprEqn, drawn: Drawn) -> Claim:
    """Of what all experts make, that of those that each token chose."""
    made, (out,) = last.invars[0], last.outvars
    assert isinstance(made, Var)
    tokens = _in_order(around, out)
    part, takes = around.part([n for n in around.eqns if n not in around.ends], [made])
    one = around.single(part, tokens)
    taken = operands(around, one, takes, tokens)
    if any(o.kind == CHOICE for o in taken) or not isinstance(last.invars[1], Var):
        raise Decline("what experts make is masked before it is looked up")
    chose = chosen(around.view, around.scope, [last.invars[1]], tokens, around.experts.size)
    lead = _choices(around, chose, out)
    _check_lookup(around, chose, last, lead, drawn)
    program = middle(one, taken, {}, chose.size * chose.choices, around.experts.size)

    def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
        ids = chose.ids(values.__getitem__)
        args = [given(around, chose, v, values[v], o, ids) for v, o in zip(takes, taken, strict=True)]
        (z,) = apply(Sorted(program), ids, *args)
        return {out: back(z, around.scope[out], lead, shape_of(out)).astype(dtype_of(out))}

    return Claim(around.view, list(dict.fromkeys((*chose.sources, *takes))), [out], emit)


def _choices(around: Around, chose: Chosen, out: Var) -> tuple[Factor, ...]:
    """The axes of tokens and of their choices, as numbers of experts have them."""
    if len(chose.sources) != 1 or not chose.bounded:
        raise Decline("what is looked up may be of no expert")
    own = [f for dim in around.scope[chose.sources[0]] for f in dim if f.size > 1]
    lead = (*chose.tokens, *(f for f in own if f not in chose.tokens))
    if not set(lead) <= factors(around.scope, out):
        raise Decline("what is looked up lacks an axis of the numbers of experts")
    return lead


def _check_lookup(
    around: Around, chose: Chosen, last: JaxprEqn, lead: Sequence[Factor], drawn: Drawn
) -> None:
    """Raises Decline where a lookup gives anything but what a token's own experts make: of numbers in the
    place of what they make, and of one feature.
    """
    made, at = last.invars
    assert isinstance(at, Var)
    sizes = [n if _is_of(around, made, d) else 1 for d, n in enumerate(shape_of(made))]
    window = tuple(min(n, s) for n, s in zip(sizes, last.params["slice_sizes"], strict=True))
    if any(s not in (1, n) for s, n in zip(last.params["slice_sizes"], shape_of(made), strict=True)):
        raise Decline(f"parts of what experts make are looked up ({source_line(last)})")
    dims = [[f for f in dim if _is_in(around, f)] for dim in around.scope[made]]
    order = (*chose.tokens, around.experts)
    expected = np.arange(prod(f.size for f in order), dtype=np.int32)
    numbers = np.asarray(back(expected, dims, order, sizes))
    own = [[f for f in dim if f in lead] for dim in around.scope[last.outvars[0]]]

    def check(read: Any, ids: Value) -> Value:
        (got,) = bind(last, [jnp.asarray(numbers), read(at)], last.params | {"slice_sizes": window})
        there = jnp.arange(chose.size)[:, None] * around.experts.size + ids
        return (got == back(there, own, lead, got.shape)).all()

    if not all(map(bool, Drawing(chose, [at], drawn).values(check))):
        raise Decline(f"what is looked up is of other experts than a token chose ({source_line(last)})")


def _is_in(around: Around, f: Factor) -> bool:
    return f is around.experts or f in around.tokens


def _is_of(around: Around, v: Any, d: int) -> bool:
    return any(_is_in(around, f) for f in around.scope[v][d])
