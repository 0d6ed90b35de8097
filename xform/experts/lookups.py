"""Weights that are looked up for each token, or for each of its choices.

    y[m,j] = f(x[m], w[ids[m,j]])    ->    y = operation[experts] ids x w

Whatever is made of what is looked up by the same numbers belongs to it, up to where nothing looked up is read
any more. Which expert a lookup takes is told by the lookup itself, of the numbers of experts in the place of
their weights: so it is the same where numbers are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.axes import Factor
from xform.errors import Decline
from xform.experts.around import factors
from xform.experts.choices import back, chosen, leading, sources
from xform.experts.drawings import Drawing, Drawn
from xform.experts.operation import CHOICE, TOKEN, Sorted
from xform.experts.rows import ALL, EXPERT, Operand, middle
from xform.experts.single import known, linear, single
from xform.ops import apply
from xform.raising.choosing import MOVED, is_float
from xform.raising.flat import dtype_of
from xform.raising.following import static, uniform
from xform.raising.indices import SAME
from xform.raising.placing import Claim
from xform.raising.sending import Product, Sending
from xform.raising.terms import Same
from xform.tensors.runs import taken_out
from xform.trace import Atom, DropVar, JaxprEqn, Literal, Value, Var, bind, shape_of, source_line


def claim(sending: Sending, product: Product, drawn: Drawn) -> tuple[frozenset[int], Claim]:
    """The equations of a region, and what stands in its place. drawn: what came out of drawings so
    far. Raises Decline for what is not right.
    """
    found = _Lookups(sending, product, drawn)
    return found.eqns, found.claim()


class _Lookups:
    """What is made of weights that are looked up by the same numbers as those of a product."""

    def __init__(self, sending: Sending, product: Product, drawn: Drawn) -> None:
        self.drawn = drawn
        self.view, self.scope, self.pure = sending.view, sending.scope, sending.pure
        self.same, self.static = Same(self.view), static(self.view)
        self.uniform = uniform(self.view)
        first = self._behind(product)
        self.gathers = self._alike(first)
        self.first = self.view.eqns[first]
        self.dim = _cut(self.first)
        self.experts = shape_of(self.first.invars[0])[self.dim]
        self.eqns = self._region()
        self.out = self._end()
        own = factors(self.scope, self.first.invars[1]) & factors(self.scope, self.first.outvars[0])
        self.tokens = self._in(self.out, own & factors(self.scope, product.x))
        self.choices = self._in(self.first.outvars[0], own - set(self.tokens))
        self.is_summed = not set(self.choices) <= factors(self.scope, self.out)

    def _in(self, v: Atom, axes: frozenset[Factor]) -> tuple[Factor, ...]:
        """Axes in the order that a value has them."""
        return tuple(f for dim in self.scope[v] for f in dim if f in axes)

    # ------------------------------------------------------------ the region

    def _behind(self, product: Product) -> int:
        """The lookup that the weights of a product come from."""
        for v in self.view.eqns[product.number].invars:
            number = self.view.makers.get(v, -1) if isinstance(v, Var) else -1
            while number >= 0 and self.view.eqns[number].primitive.name in MOVED | SAME:
                number = self.view.makers.get(self.view.eqns[number].invars[0], -1)  # type: ignore[arg-type]
            if number >= 0 and self._is_lookup(self.view.eqns[number]):
                return number
        raise Decline("weights are looked up in another way than an expert's for each token")

    def _is_lookup(self, eqn: JaxprEqn) -> bool:
        """Whether it looks up whole entries of what experts have, one for each number."""
        return (
            eqn.primitive.name == "gather"
            and isinstance(eqn.invars[0], Var)
            and eqn.invars[0] in self.pure
            and not eqn.params["dimension_numbers"].operand_batching_dims
            and _cut(eqn) >= 0
        )

    def _alike(self, first: int) -> list[int]:
        """All lookups by the same numbers: made alike, or found so for those that they follow from."""
        eqn = self.view.eqns[first]
        others = [n for n, e in enumerate(self.view.eqns) if self._is_lookup(e) and self._like(e, eqn)]
        unsure = [n for n in others if self._index(n) is not self._index(first)]
        if not unsure:
            return others
        index = [self._index(n) for n in (first, *unsure)]
        tokens = sorted(factors(self.scope, eqn.outvars[0]), key=lambda f: f.id)
        chose = chosen(self.view, self.scope, index, tokens, shape_of(eqn.invars[0])[_cut(eqn)])

        def check(read: Any, _: Value) -> Any:
            pairs = zip((first, *unsure), index, strict=True)
            made = [_numbers(self.view.eqns[n], read(v)) for n, v in pairs]
            return [(x.reshape(-1) == made[0].reshape(-1)).all() for x in made[1:]]

        right = np.asarray(Drawing(chose, index, self.drawn).values(check)).all(0)
        return [n for n in others if n not in unsure or right[unsure.index(n)]]

    def _index(self, number: int) -> Var:
        at = self.view.eqns[number].invars[1]
        if isinstance(at, Literal):
            raise Decline("all tokens take the same expert")
        return self.same(at)

    def _like(self, eqn: JaxprEqn, first: JaxprEqn) -> bool:
        """Whether it looks up something of as many experts, by numbers that follow from the same."""
        ours, theirs = ((shape_of(e.invars[0])[_cut(e)], _cut(e), e.params["mode"]) for e in (eqn, first))
        if ours != theirs or isinstance(eqn.invars[1], Literal) or isinstance(first.invars[1], Literal):
            return False
        return sources(self.view, [eqn.invars[1]]) == sources(self.view, [first.invars[1]])

    def _region(self) -> frozenset[int]:
        view = self.view
        after: set[int] = set()
        weights = {v for n in self.gathers for v in view.eqns[n].outvars}
        made, uses = set(weights), list[int]()
        for n, eqn in enumerate(view.eqns):
            own = [v for v in eqn.invars if isinstance(v, Var) and v in made]
            if not own or n in self.gathers:
                continue
            after.add(n)
            made.update(v for v in eqn.outvars if not isinstance(v, DropVar))
            if all(isinstance(v, Literal) or v in weights or v in self.static for v in eqn.invars):
                weights.update(eqn.outvars)
            elif any(v in weights for v in own):
                uses.append(n)
        inside = after & (set(uses) | view.ancestors([v for n in uses for v in view.eqns[n].outvars]))
        todo = [v for n in inside for v in view.eqns[n].invars]
        while todo:  # what is constant, or only spread out
            v = todo.pop()
            n = view.makers.get(v, -1) if isinstance(v, Var) else -1
            spread = n >= 0 and view.eqns[n].primitive.name == "broadcast_in_dim"
            if n >= 0 and n not in inside and n not in self.gathers and (spread or v in self.uniform):
                inside.add(n)
                todo += view.eqns[n].invars
        return frozenset(inside)

    def _end(self) -> Var:
        """The one value that is used outside."""
        made = [v for n in sorted(self.eqns) for v in self.view.eqns[n].outvars]
        ends = [
            v
            for v in made
            if v not in self.static and any(n not in self.eqns for n in self.view.users.get(v, ()))
        ]
        ends = [v for v in ends if self.view.eqns[self.view.makers[v]].primitive.name != "broadcast_in_dim"]
        if len(ends) != 1:
            raise Decline("what is made of weights that are looked up is used in several ways")
        return ends[0]

    # ------------------------------------------------------------ the operation in its place

    def claim(self) -> Claim:
        view, lead = self.view, (*self.tokens, *self.choices)
        part = taken_out(view.jaxpr, sorted(self.eqns))
        takes = [v for v in part.invars if isinstance(v, Var)]
        part = part.replace(outvars=[self.out], debug_info=part.debug_info.with_unknown_names())
        labels = [[[f for f in dim if f.size > 1] for dim in self.scope[v]] for v in takes]
        one = single(part, labels, lead, self.choices)
        taken = [Operand(w, self._kind(v)) for v, w in zip(takes, one.invars, strict=True)]
        gate = next((k for k, o in enumerate(taken) if self._is_gate(o) and linear(one, o.var, {})), None)
        found = {} if gate is None else known(one, {taken[gate].var: dtype_of(takes[gate]).type(1)})
        kept = [(v, o) for v, o in zip(takes, taken, strict=True) if o.var not in found]
        rows = prod(f.size for f in lead)
        program = middle(one, [o for _, o in kept], found, rows, self.experts)
        self._check()
        bases = dict.fromkeys(self._source(v) for v in takes)
        index = self.first.invars[1]

        def emit(values: Mapping[Var, Value]) -> Mapping[Var, Value]:
            ids = self.ids(values[index] if isinstance(index, Var) else index.val)
            args = [self._given(v, values[self._source(v)], o) for v, o in kept]
            (z,) = apply(Sorted(program), ids, *args)
            if gate is not None:
                gates = self._of_rows(takes[gate], values[takes[gate]], lead).reshape(ids.shape)
                z = jnp.einsum("mj,mj...->m...", gates, z)
            elif self.is_summed:
                z = z.sum(1)
            own = self.tokens if self.is_summed else lead
            return {
                self.out: back(z, self.scope[self.out], own, shape_of(self.out)).astype(dtype_of(self.out))
            }

        reads = dict.fromkeys(v for v in (*bases, index) if isinstance(v, Var))
        return Claim(view, list(reads), [self.out], emit)

    def _is_gate(self, o: Operand) -> bool:
        return self.is_summed and o.kind == CHOICE and is_float(o.var) and prod(shape_of(o.var)) == 1

    def _kind(self, v: Var) -> str:
        if self.view.makers.get(v, -1) in self.gathers:
            return EXPERT
        own = factors(self.scope, v)
        return CHOICE if own & set(self.choices) else TOKEN if own & set(self.tokens) else ALL

    def _source(self, v: Var) -> Var:
        """What is taken: of what is looked up, where that is."""
        base = self.view.eqns[self.view.makers[v]].invars[0] if self._kind(v) == EXPERT else v
        assert isinstance(base, Var)
        return base

    def _given(self, v: Var, x: Value, o: Operand) -> Value:
        if o.kind == ALL:
            return x
        if o.kind == EXPERT:
            x = jnp.moveaxis(x, self.dim, 0)
            return x if 1 not in x.shape[1:] else x.reshape(x.shape[0], *(n for n in x.shape[1:] if n > 1))
        lead = (*self.tokens, *self.choices) if o.kind == CHOICE else self.tokens
        return self._of_rows(v, x, lead)

    def _of_rows(self, v: Var, x: Value, lead: Sequence[Factor]) -> Value:
        x = leading(x, self.scope[v], lead)
        rest = x.shape[len(lead) :]
        x = jnp.broadcast_to(x, (*(f.size for f in lead), *rest))
        tokens = prod(f.size for f in self.tokens)
        own = (tokens, prod(f.size for f in self.choices)) if lead != self.tokens else (tokens,)
        return x.reshape(*own, *rest)

    def ids(self, index: Value) -> Value:
        """[tokens, choices], by the lookup of the numbers of experts."""
        found = _numbers(self.first, index)
        lead = (*self.tokens, *self.choices)
        dims = [[f for f in dim if f in lead] for dim in self.scope[self.first.outvars[0]]]
        ids = leading(found, dims, lead).reshape(prod(f.size for f in self.tokens), -1)
        return jnp.where((ids >= 0) & (ids < self.experts), ids, self.experts)

    def _check(self) -> None:
        """Raises Decline where a number of no expert would be looked up as none."""
        if self.first.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
            return
        (index,) = (v for v in self.first.invars[1:] if isinstance(v, Var))
        chose = chosen(self.view, self.scope, [index], (*self.tokens, *self.choices), self.experts)

        def check(read: Any, _: Value) -> Value:
            return (self.ids(read(index)) < self.experts).all()

        inside = Drawing(chose, [index], self.drawn).values(check)
        if not chose.bounded or not all(map(bool, inside)):
            line = source_line(self.first)
            raise Decline(f"weights are looked up by numbers that may be of no expert ({line})")


def _numbers(eqn: JaxprEqn, index: Value) -> Value:
    """The numbers of the experts whose entries a lookup takes."""
    base = [1] * len(shape_of(eqn.invars[0]))
    count = base[_cut(eqn)] = shape_of(eqn.invars[0])[_cut(eqn)]
    numbers = jnp.arange(count, dtype=np.int32).reshape(base)
    params = eqn.params | {"slice_sizes": (1,) * len(base), "fill_value": -1}
    (found,) = bind(eqn, [numbers, index], params)
    return found


def _cut(eqn: JaxprEqn) -> int:
    """The dimension of which one entry is looked up, the whole of all others; -1 where that is not so."""
    sizes, window = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    cut = [d for d, n in enumerate(window) if n != sizes[d]]
    return cut[0] if len(cut) == 1 and window[cut[0]] == 1 else -1
