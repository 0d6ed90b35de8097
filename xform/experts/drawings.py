"""What comes out for numbers of experts that are drawn at random.

What values follow from is cut at the numbers of experts and at all that does not follow from these; for any
of both, drawn apart from each other and of all sizes, it is looked at what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import Decline
from xform.experts.choices import Chosen, choice_of
from xform.experts.numbers import own_value
from xform.raising.flat import View, dtype_of
from xform.raising.following import static
from xform.raising.indices import SAME
from xform.tensors.runs import taken_out
from xform.trace import (
    Atom,
    DropVar,
    Jaxpr,
    Literal,
    ShapedArray,
    Value,
    Var,
    eval_jaxpr,
    has_effects,
    shape_of,
)

DRAWINGS = 3

SIZES = (-12, 12)
"""Powers of ten between which numbers are drawn."""

Drawn = dict[Any, list[Any]]
"""What came out of drawings, by the program that they were put in."""


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
            jitted = jax.jit(run)
            traced = jitted.trace(*(ShapedArray(shape_of(v), dtype_of(v)) for v in self.part.invars))
            text = str(traced.jaxpr), *(np.asarray(x).tobytes() for x in traced.jaxpr.consts)
            key = text, *map(self._kind, self.part.invars)
            if key not in self.drawn:
                given = map(self._given, range(DRAWINGS))
                made = [jitted(*(each[v] for v in self.part.invars)) for each in given]
                self.drawn[key] = jax.tree.map(np.asarray, made)
        return self.drawn[key]

    def _kind(self, v: Var) -> Any:
        """What is drawn for an input."""
        if v in self.chose.sources:
            eqn, number = self.view.maker(v), self.chose.sources.index(v)
            name = None if eqn is None else eqn.primitive.name
            return number, name, choice_of(self.view, v), self._is_apart(v)
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
            shape, dtype, choice = shape_of(v), dtype_of(v), choice_of(self.view, v)
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
