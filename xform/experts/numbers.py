"""What a program makes of the numbers of experts alone, orders, their inverses and counts, as it comes out
for numbers drawn at random: so it does not matter how a program makes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from xform.errors import Decline
from xform.raising.flat import View
from xform.raising.following import static
from xform.tensors.runs import taken_out
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, eval_jaxpr, has_effects, shape_of

COUNTED = (
    "products take other numbers of rows than each expert has, or count numbers of experts that there are"
    " not: jnp.bincount(ids, length=experts) is what is taken"
)


def is_argsort(eqn: JaxprEqn) -> bool:
    """Whether it sorts integers, one dimension, and takes something along."""
    p = eqn.params
    return (
        eqn.primitive.name == "sort"
        and p["num_keys"] == 1
        and len(eqn.invars) == 2
        and len(shape_of(eqn.invars[0])) == 1
        and isinstance(eqn.invars[0], Var)
        and is_whole(eqn.invars[0])
    )


def is_whole(v: Atom) -> bool:
    """Whether it is of integers."""
    dtype = getattr(v.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


class Numbers:
    """The numbers of experts that equation `number` of a view sorts, `size` of them.

    ids: the numbers as they are sorted; base: before they were laid out in one dimension. made: each variable
    that follows from them alone, and its equation. follows: each that they go into. static: those that are
    the program's own. order: what is sorted along; None where that is not the program's own.
    """

    def __init__(self, view: View, number: int) -> None:
        sort = view.eqns[number]
        self.view, self.ids = view, cast(Var, sort.invars[0])
        self.size = shape_of(self.ids)[0]
        self.static = static(view)
        self.base: Any = self._base(self.ids)
        self.made = self._made()
        self.follows = self._follows()
        along, order = sort.invars[1], sort.outvars[1]
        known = isinstance(along, Literal) or along in self.static
        self.order: Any = None if isinstance(order, DropVar) or not known else order

    def _base(self, v: Var) -> Var:
        while (eqn := self.view.maker(v)) is not None:
            source = eqn.invars[0] if eqn.invars else None
            if eqn.primitive.name not in ("reshape", "transpose", "convert_element_type", "squeeze", "copy"):
                break
            if not isinstance(source, Var) or not is_whole(source):
                break
            v = source
        return v

    def _made(self) -> dict[Var, int]:
        found: dict[Var, int] = {self.base: -1}
        for number, eqn in enumerate(self.view.eqns):
            own = [v for v in eqn.invars if isinstance(v, Var)]
            if has_effects(eqn) or not any(v in found for v in own):
                continue
            if all(v in found or v in self.static for v in own):
                found.update((v, number) for v in eqn.outvars if not isinstance(v, DropVar))
        return found

    def _follows(self) -> set[Var]:
        found: set[Var] = {self.base}
        for eqn in self.view.eqns:
            if any(isinstance(v, Var) and v in found for v in eqn.invars):
                found.update(v for v in eqn.outvars if not isinstance(v, DropVar))
        return found

    # ------------------------------------------------------------ drawn

    def drawn(self, counts: Sequence[Var]) -> Drawn:
        """What all comes out as. counts: what may be the number of rows of each expert. Raises Decline where
        none of it is.
        """
        wanted = [v for v in self.made if is_whole(v) and shape_of(v) and v is not self.base]
        part = self._program(wanted)
        for experts in dict.fromkeys(shape_of(v)[0] for v in counts):
            drawings = range(2 if self.is_bounded(experts) else 3)
            given = [self._draw(seed, experts) for seed in drawings]
            results = zip(*self._run(part, given), strict=True)
            values = dict(zip((self.base, *wanted), [given, *map(list, results)], strict=True))
            found = Drawn(values, values[self.ids], values[self.order], experts)
            right = frozenset(v for v in counts if found.counted(v))
            if right:
                return dataclasses.replace(found, counts=right)
        raise Decline(COUNTED)

    def is_bounded(self, experts: int) -> bool:
        """Whether the numbers are of the largest of so many as there are experts: there are no others."""
        maker = self.view.maker(self.base)
        if maker is None or maker.primitive.name not in ("top_k", "approx_top_k", "argmax", "argmin"):
            return False
        p, x = maker.params, shape_of(maker.invars[0])
        (axis,) = p.get("axes") or (p.get("axis", p.get("reduction_dimension", -1)),)
        return bool(x[axis] == experts)

    def _draw(self, seed: int, experts: int) -> Any:
        """Numbers of experts, not evenly drawn; in the second drawing one has no token, in the third some
        tokens have a number that is none.
        """
        rng, dtype = np.random.default_rng(seed), self.base.aval.dtype
        end = (experts, max(experts - 1, 1), experts + 2)[seed]
        low, high = (rng.integers(0, end, shape_of(self.base)) for _ in range(2))
        drawn = np.minimum(low, high)
        if seed == 2:
            others = [experts, experts + 1, *([-1] if dtype.kind == "i" else [])]
            at = rng.permutation(drawn.size)[: drawn.size // 2]
            drawn.reshape(-1)[at] = np.resize(others, at.size)
        return drawn.astype(dtype)

    @property
    def is_natural(self) -> bool:
        """Whether none of them is negative, as far as it is seen."""
        return _is_natural(self.view, self.base)

    def _program(self, wanted: Sequence[Var]) -> Jaxpr:
        """The program of these, of the base and what is the program's own."""
        numbers = self.view.ancestors(wanted, stop=lambda v: v is self.base)
        part = taken_out(self.view.jaxpr, sorted(numbers))
        return part.replace(outvars=list(wanted), debug_info=part.debug_info.with_unknown_names())

    def _run(self, part: Jaxpr, drawings: Sequence[Any]) -> list[list[Any]]:
        with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
            run = jax.jit(lambda *args: eval_jaxpr(part, *args))
            others = {v: own_value(self.view, v) for v in part.invars if v is not self.base}
            return [
                [np.asarray(x) for x in run(*(others.get(v, drawn) for v in part.invars))]
                for drawn in drawings
            ]


def _is_natural(view: View, v: Atom, depth: int = 8) -> bool:
    """Whether a value is a number of something, or made of such, or of constants that are not negative."""
    if isinstance(v, Literal):
        return bool(np.all(np.asarray(v.val) >= 0))
    maker = view.maker(v)
    if maker is None or not depth:
        return v in view.constants and bool(np.all(np.asarray(view.constants[v]) >= 0))
    name, some = maker.primitive.name, maker.invars
    if name in ("top_k", "approx_top_k", "argmax", "argmin", "iota"):
        return name not in ("top_k", "approx_top_k") or maker.outvars[1] is v
    if name == "max":
        return any(_is_natural(view, x, depth - 1) for x in some)
    if name == "select_n":
        some = some[1:]
    elif name not in _KEEP_NATURAL:
        return False
    return all(_is_natural(view, x, depth - 1) for x in some)


_KEEP_NATURAL = frozenset(
    ("add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "min", "mul")
    + ("reshape", "slice", "squeeze", "transpose")
)


def own_value(view: View, v: Var) -> Any:
    """The value of what is the program's own: a constant, here or of what is around a body."""
    if v in view.constants:
        return view.constants[v]
    atom = view.inputs[v]
    if isinstance(atom, Literal):
        return atom.val
    assert view.outer is not None
    return view.outer.constants[atom]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """values: of integers that follow from the experts' numbers, a list of what came out, by variable; ids
    and order are two of these. counts: which of them are the number of rows of each of so many experts.
    """

    values: Mapping[Var, list[Any]]
    ids: list[Any]
    order: list[Any]
    experts: int
    counts: frozenset[Var] = frozenset()

    def is_(self, v: Any, expected: Sequence[Any]) -> bool:
        """Whether a variable's values, in one dimension, are these."""
        found = (x.reshape(-1) for x in self.values[v])
        return all(map(np.array_equal, found, expected))

    def counted(self, v: Var) -> bool:
        n = self.experts
        ids = (np.maximum(each.reshape(-1), 0) for each in self.ids)
        return shape_of(v) == (n,) and self.is_(v, [np.bincount(each, minlength=n)[:n] for each in ids])

    @property
    def sorts(self) -> bool:
        """Whether the order is one: of all, and of the numbers as they rise."""
        return all(
            np.array_equal(np.sort(order), np.arange(len(order))) and bool((np.diff(ids) >= 0).all())
            for ids, order in zip(self.sorted_ids, self.order, strict=True)
        )

    @property
    def sorted_ids(self) -> list[Any]:
        pairs = zip(self.ids, self.order, strict=True)
        return [np.take(ids.reshape(-1), order, mode="clip") for ids, order in pairs]

    def inverts(self, v: Any) -> bool:
        """Whether a variable's values are the place in the order of each in turn."""
        places = [np.empty_like(order) for order in self.order]
        for place, order in zip(places, self.order, strict=True):
            place[order] = np.arange(len(order))
        return self.is_(v, places)
