"""Which experts tokens go to, and what masks of tokens and experts have there.

    i = top_k scores; g = sum_j w[m,j] (i[m,j] == x)    ->    ids[m,j], g at [m,ids[m,j]]

The numbers of experts are the nearest ones that a mask follows from: of a choice, or given to the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod

import jax.numpy as jnp
import numpy as np

from xform.axes import Factor, Scope
from xform.errors import Decline
from xform.experts.numbers import is_whole
from xform.raising.flat import View, place_of
from xform.raising.following import static
from xform.trace import Atom, JaxprEqn, Literal, Value, Var, shape_of

CHOICES = frozenset(("top_k", "approx_top_k", "argmax", "argmin"))


# ---------------------------------------------------------------- axes in front


def leading(x: Value, dims: Sequence[Sequence[Factor]], lead: Sequence[Factor]) -> Value:
    """A value with some axes in front, each a dimension, of size 1 where it lacks it; then what is left of
    its own dimensions.
    """
    flat = [f for dim in dims for f in dim]
    rest = [f for f in flat if f not in lead]
    own = [f for f in lead if f in flat]
    x = jnp.transpose(x.reshape([f.size for f in flat]), [flat.index(f) for f in (*own, *rest)])
    front = [f.size if f in flat else 1 for f in lead]
    return x.reshape(
        *front, *(prod(f.size for f in dim if f not in lead) for dim in dims if rests(dim, lead))
    )


def rests(dim: Sequence[Factor], lead: Sequence[Factor]) -> bool:
    """Whether anything is left of a dimension when some axes are taken to the front."""
    return any(f.size > 1 and f not in lead for f in dim)


def back(x: Value, dims: Sequence[Sequence[Factor]], lead: Sequence[Factor], shape: Sequence[int]) -> Value:
    """What `leading` has made of a value as it was."""
    flat = [f for dim in dims for f in dim]
    order = [f for f in lead if f in flat] + [f for f in flat if f not in lead]
    x = x.reshape([f.size for f in order])
    return jnp.transpose(x, [order.index(f) for f in flat]).reshape(shape)


# ---------------------------------------------------------------- what chose


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The numbers of experts that tokens go to: variables with the axes of tokens and, some, of choices.

    bounded: all are of experts that there are. apart: no token goes to an expert twice.
    """

    view: View
    scope: Scope
    sources: tuple[Var, ...]
    tokens: tuple[Factor, ...]
    experts: int
    bounded: bool
    apart: bool

    @property
    def size(self) -> int:
        return prod(f.size for f in self.tokens)

    @property
    def choices(self) -> int:
        """How many a token has."""
        own = ([f.size for dim in self.scope[v] for f in dim if f not in self.tokens] for v in self.sources)
        return sum(map(prod, own))

    def ids(self, read: Callable[[Var], Value]) -> Value:
        """[tokens, choices], that of no expert where it is none or a token goes there already."""
        wide = [leading(read(v), self.scope[v], self.tokens) for v in self.sources]
        each = [
            jnp.broadcast_to(x, (*(f.size for f in self.tokens), *x.shape[len(self.tokens) :])) for x in wide
        ]
        ids = jnp.concatenate([x.reshape(self.size, -1) for x in each], 1).astype(np.int32)
        if not self.bounded:
            ids = jnp.where((ids >= 0) & (ids < self.experts), ids, self.experts)
        if not self.apart and ids.shape[1] > 1:
            same = ids[:, :, None] == ids[:, None]
            again = (same & jnp.tri(ids.shape[1], k=-1, dtype=bool)).any(2)
            ids = jnp.where(again, self.experts, ids)
        return ids


def chosen(view: View, scope: Scope, masks: Sequence[Var], tokens: Sequence[Factor], experts: int) -> Chosen:
    """What chose, of what masks follow from. Raises Decline where nothing is found, or what is found has
    other axes than tokens.
    """
    found = sources(view, masks)
    if not found:
        raise Decline("nothing that says which expert a token goes to is the number of one")
    among = [choice_of(view, v) for v in found]
    bounded = all(choice is not None and choice[0] == experts for choice in among)
    for v, choice in zip(found, among, strict=True):
        own = {f for dim in scope[v] for f in dim if f.size > 1}
        if own - set(tokens) and choice is not None and choice[1] is None:
            raise Decline("numbers of experts have other axes than tokens")
    apart = len(found) == 1 and bounded
    return Chosen(view, scope, tuple(found), tuple(tokens), experts, bounded, apart)


def choice_of(view: View, v: Atom) -> tuple[int, int | None] | None:
    """Among how many a number was chosen, and along which dimension several are; None for what is none."""
    eqn = view.maker(v)
    if eqn is None:
        return None
    name, p = eqn.primitive.name, eqn.params
    if name in CHOICES:
        x = shape_of(eqn.invars[0])
        (axis,) = p.get("axes") or (p.get("axis", p.get("reduction_dimension", -1)),)
        return x[axis], axis % len(x) if "top_k" in name else None
    if name == "slice" and (made := view.maker(eqn.invars[0])) is not None and made.primitive.name == "sort":
        whole, d = choice_of(view, eqn.invars[0]), made.params["dimension"]
        cut = [k for k, n in enumerate(shape_of(v)) if n != shape_of(eqn.invars[0])[k]]
        return whole if cut == [d] and p["strides"] is None else None
    if name == "sort" and p["num_keys"] == 1:
        d, line = p["dimension"], view.maker(eqn.invars[place_of(eqn, v)])
        numbered = line is not None and line.primitive.name == "iota" and line.params["dimension"] == d
        return (shape_of(v)[d], d) if numbered else None
    return None


def sources(view: View, masks: Sequence[Var]) -> list[Var]:
    """The nearest numbers that were chosen, or that the program was given."""
    found: dict[Var, None] = {}
    seen: set[Var] = set()
    todo: list[Atom] = list(masks)
    own = static(view)
    while todo:
        v = todo.pop()
        if isinstance(v, Literal) or v in seen or v in own:
            continue
        seen.add(v)
        eqn = view.maker(v)
        if is_whole(v) and (eqn is None or choice_of(view, v) is not None or _is_table(eqn)):
            found[v] = None
        elif eqn is not None and eqn.primitive.name not in CHOICES:
            todo += eqn.invars
    return sorted(found, key=lambda v: view.makers.get(v, -1))


def _is_table(eqn: JaxprEqn) -> bool:
    """Whether it looks numbers up in a table, of which nothing but that is known."""
    return eqn.primitive.name == "gather" and is_whole(eqn.invars[0])


def mask_at(x: Value, ids: Value, experts: int) -> Value:
    """What a mask [tokens, experts, ...] has at [tokens, choices]: zero for an expert that there is not."""
    hits = ids[:, :, None] == jnp.arange(experts, dtype=np.int32)
    hits = hits.reshape(*hits.shape, *[1] * (x.ndim - 2))
    if x.dtype == np.bool_:
        return (hits & x[:, None]).any(2)
    return jnp.where(hits, x[:, None], 0).sum(2).astype(x.dtype)


def canonical(v: Var, x: Value, chose: Chosen, experts: Factor) -> Value:
    """A mask as [tokens, experts, ...]."""
    lead = (*chose.tokens, experts)
    x = leading(x, chose.scope[v], lead)
    sizes = [f.size for f in lead]
    x = jnp.broadcast_to(x, (*sizes, *x.shape[len(sizes) :]))
    return x.reshape(chose.size, experts.size, *x.shape[len(sizes) :])


def spans(x: Value, ids: Value, experts: int) -> Value:
    """Of a mask [tokens, experts, ...] the least and the greatest where no choice is, and where one is."""
    hits = (ids[:, :, None] == jnp.arange(experts, dtype=np.int32)).any(1)
    hits = hits.reshape(*hits.shape, *[1] * (x.ndim - 2))
    x = x.astype(np.float32)
    ends = [(jnp.where(at, x, np.inf).min(), jnp.where(at, x, -np.inf).max()) for at in (~hits, hits)]
    return jnp.asarray(ends)
