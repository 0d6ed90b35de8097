"""Which experts tokens go to, and what is made of that, as it comes out for numbers drawn at random.

    i = top_k scores; g = sum_j w[m,j] (i[m,j] == x)    ->    i; g is zero but at the experts that i has

What a mask follows from is cut at the numbers of experts that were chosen and at all that does not follow
from these: gates, scores, paddings. For any of both, drawn apart from each other, a mask has to come out the
same at all experts that were not chosen. So it does not matter how it is spelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.axes import Factor, Scope
from xform.errors import Decline
from xform.experts.numbers import is_whole, own_value
from xform.raising.flat import View, dtype_of, place_of
from xform.raising.following import static
from xform.raising.indices import SAME
from xform.tensors.runs import taken_out
from xform.trace import (
    Atom,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    ShapedArray,
    Value,
    Var,
    eval_jaxpr,
    has_effects,
    shape_of,
)

CHOICES = frozenset(("top_k", "approx_top_k", "argmax", "argmin"))

DRAWINGS = 3

SIZES = (-12, 12)
"""Powers of ten between which numbers are drawn."""

Drawn = dict[Any, list[Any]]
"""What came out of drawings, by the program that they were put in."""


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
    among = [_choice(view, v) for v in found]
    bounded = all(choice is not None and choice[0] == experts for choice in among)
    for v, choice in zip(found, among, strict=True):
        own = {f for dim in scope[v] for f in dim if f.size > 1}
        if own - set(tokens) and choice is not None and choice[1] is None:
            raise Decline("numbers of experts have other axes than tokens")
    apart = len(found) == 1 and bounded
    return Chosen(view, scope, tuple(found), tuple(tokens), experts, bounded, apart)


def _choice(view: View, v: Atom) -> tuple[int, int | None] | None:
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
        whole, d = _choice(view, eqn.invars[0]), made.params["dimension"]
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
        if is_whole(v) and (eqn is None or _choice(view, v) is not None or _is_table(eqn)):
            found[v] = None
        elif eqn is not None and eqn.primitive.name not in CHOICES:
            todo += eqn.invars
    return sorted(found, key=lambda v: view.makers.get(v, -1))


def _is_table(eqn: JaxprEqn) -> bool:
    """Whether it looks numbers up in a table, of which nothing but that is known."""
    return eqn.primitive.name == "gather" and is_whole(eqn.invars[0])


# ---------------------------------------------------------------- drawn


class Drawing:
    """Values of a view for numbers of experts and all else drawn at random, one drawing for each number.

    `read` gives those that were asked for. drawn: what came out before, of layers that are alike.
    """

    def __init__(self, chose: Chosen, wanted: Sequence[Var], drawn: Drawn) -> None:
        self.chose, self.view, self.drawn = chose, chose.view, drawn
        self.wanted = tuple(dict.fromkeys(v for v in wanted if isinstance(v, Var)))
        self.static = static(self.view)
        self.follows = self._follows()
        self.part = self._program()

    def _follows(self) -> set[Var]:
        found = set(self.chose.sources)
        for eqn in self.view.eqns:
            if any(isinstance(v, Var) and v in found for v in eqn.invars) and not has_effects(eqn):
                found.update(v for v in eqn.outvars if not isinstance(v, DropVar))
        return found

    def _program(self) -> Jaxpr:
        """What is wanted, of the numbers of experts and all that does not follow from them."""
        goes_on = self.follows - set(self.chose.sources) | self.static
        numbers = self.view.ancestors(self.wanted, stop=lambda v: v not in goes_on)
        part = taken_out(self.view.jaxpr, sorted(numbers))
        made = {v for eqn in part.eqns for v in eqn.outvars}
        takes = dict.fromkeys((*part.invars, *self.chose.sources, *(v for v in self.wanted if v not in made)))
        info = part.debug_info.with_unknown_names()
        return part.replace(invars=list(takes), outvars=list(self.wanted), debug_info=info)

    def values(self, check: Callable[[Callable[[Var], Value], Value], Any]) -> list[Any]:
        """What a function gives for the values of variables and the numbers of experts [tokens, choices]."""

        def run(*args: Value) -> Any:
            made = dict(zip(self.part.invars, args, strict=True))
            made |= dict(zip(self.wanted, eval_jaxpr(self.part, *args), strict=True))
            return check(made.__getitem__, self.chose.ids(made.__getitem__))

        with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
            traced = jax.jit(run).trace(*(ShapedArray(shape_of(v), dtype_of(v)) for v in self.part.invars))
            text = str(traced.jaxpr), *(np.asarray(x).tobytes() for x in traced.jaxpr.consts)
            key = text, *map(self._kind, self.part.invars)
            if key not in self.drawn:
                compiled = traced.lower().compile()
                given = map(self._given, range(DRAWINGS))
                made = [compiled(*(each[v] for v in self.part.invars)) for each in given]
                self.drawn[key] = jax.tree.map(np.asarray, made)
        return self.drawn[key]

    def _kind(self, v: Var) -> Any:
        """What is drawn for an input."""
        if v in self.chose.sources:
            eqn, number = self.view.maker(v), self.chose.sources.index(v)
            name = None if eqn is None else eqn.primitive.name
            return number, name, _choice(self.view, v), self._is_apart(v)
        if v in self.static:
            return np.asarray(own_value(self.view, v)).tobytes()
        return is_positive(self.view, v)

    def _given(self, seed: int) -> dict[Var, Any]:
        rng = np.random.default_rng(seed)
        found: dict[Var, Any] = dict(zip(self.chose.sources, self._ids(rng, seed), strict=True))
        for v in self.part.invars:
            if v not in found:
                own = v in self.static and v not in self.view.makers
                found[v] = own_value(self.view, v) if own else self._other(rng, v)
        return found

    def _other(self, rng: Any, v: Var) -> Any:
        """What does not follow from the numbers of experts: any, but that what cannot be negative is not."""
        dtype = dtype_of(v)
        if dtype == np.bool_:
            return rng.random(shape_of(v)) < 0.5
        if not jnp.issubdtype(dtype, jnp.floating):
            raise Decline("which expert a token goes to depends on other numbers than those of experts")
        x = 10.0 ** rng.uniform(*SIZES, shape_of(v))  # of all sizes, whatever it is compared with
        if not is_positive(self.view, v):
            x *= rng.choice((-1, 1), shape_of(v))
        return jnp.asarray(x, dtype)

    def _ids(self, rng: Any, seed: int) -> list[Any]:
        """Numbers of experts, not evenly drawn, so that some have many tokens."""
        before: list[Any] = []
        for v in self.chose.sources:
            shape, dtype, choice = shape_of(v), dtype_of(v), _choice(self.view, v)
            if choice is None:
                low, high = (rng.integers(-1, self.chose.experts + 1, shape) for _ in range(2))
                low = low if dtype.kind == "i" else np.maximum(low, 0)
                if seed == DRAWINGS - 1:
                    low = high = np.full(shape, rng.integers(self.chose.experts))
                before.append(np.minimum(np.maximum(low, high * (seed > 0)), high).astype(dtype))
                continue
            among, axis = choice
            rest = [n for d, n in enumerate(shape) if d != axis]
            scores = rng.random((*rest, among)) + 0.4 * seed * rng.random(among)
            if seed == DRAWINGS - 1:  # all tokens choose alike
                scores = np.broadcast_to(scores.reshape(-1, scores.shape[-1])[0], scores.shape).copy()
            for other in before:
                if other.shape == shape and axis is None and self._is_apart(v):
                    np.put_along_axis(scores, other[..., None], -1, -1)
            order = np.argsort(-scores, -1, kind="stable")
            ids = order[..., 0] if axis is None else np.moveaxis(order[..., : shape[axis]], -1, axis)
            before.append(ids.astype(dtype))
        return before

    def _is_apart(self, v: Var) -> bool:
        """Whether a choice is made of what earlier ones left, which are its ancestors."""
        before = self.chose.sources[: self.chose.sources.index(v)]
        earlier = {self.view.makers[w] for w in before if w in self.view.makers}
        return bool(earlier & self.view.ancestors([v]))


def is_positive(view: View, atom: Atom, most: int = 40) -> bool:
    """Whether a value cannot be negative, as exponents, and what is made of such."""
    if isinstance(atom, Literal):
        return bool(np.all(np.asarray(atom.val) >= 0))
    eqn = view.maker(atom)
    if eqn is None or not most:
        return False
    name = eqn.primitive.name
    if name in ("exp", "logistic", "abs", "square"):
        return True
    if name in _KEEPS_SIGN or name in SAME:
        own = eqn.invars[:1] if name in _FIRST else eqn.invars[name == "select_n" :]
        return all(is_positive(view, v, most - 1) for v in own)
    return False


_FIRST = frozenset(("gather", "top_k", "approx_top_k", "dynamic_slice"))
_SIGNED = """
    mul add add_any div max reduce_sum reduce_max reduce_min broadcast_in_dim reshape transpose squeeze slice
    split concatenate select_n
"""
_KEEPS_SIGN = _FIRST | frozenset(_SIGNED.split())


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
