"""The equations between the dispatch of tokens to experts and their return: around products with the
experts' weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from xform.axes import Factor, Scope
from xform.errors import Decline
from xform.experts.choices import Chosen, canonical, leading, mask_at
from xform.experts.operation import CHOICE, TOKEN
from xform.experts.rows import ALL, EXPERT, Operand
from xform.experts.single import Labels, single
from xform.raising.flat import View
from xform.raising.following import static, uniform
from xform.raising.sending import Product
from xform.tensors.runs import taken_out
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Value, Var, shape_of


def factors(scope: Scope, atom: Atom) -> frozenset[Factor]:
    """The axes of a value, but those of size 1."""
    return frozenset(f for dim in scope[atom] for f in dim if f.size > 1)


@dataclasses.dataclass(frozen=True)
class Around:
    """Equations `eqns` of a view, with values of each token in each expert.

    tokens: the axes of what the products take; places of experts count as such. sent: the products that
    dispatch tokens to places. ends: the equations by which results leave the experts' axis.
    """

    view: View
    scope: Scope
    experts: Factor
    tokens: frozenset[Factor]
    eqns: frozenset[int]
    sent: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def made(self) -> frozenset[Var]:
        return frozenset(v for n in self.eqns for v in self.view.eqns[n].outvars)

    def takes(self, eqns: Sequence[int]) -> list[Var]:
        """What equations take of others."""
        made = {v for n in eqns for v in self.view.eqns[n].outvars}
        reads = (v for n in sorted(eqns) for v in self.view.eqns[n].invars if isinstance(v, Var))
        return list(dict.fromkeys(v for v in reads if v not in made))

    def part(self, eqns: Sequence[int], outs: Sequence[Var]) -> tuple[Jaxpr, list[Var]]:
        """Equations as a program of what they take, which gives `outs`."""
        takes = self.takes(eqns)
        part = taken_out(self.view.jaxpr, sorted(eqns))
        info = part.debug_info.with_unknown_names()
        return part.replace(invars=takes, outvars=list(outs), debug_info=info), takes

    def single(self, part: Jaxpr, tokens: Sequence[Factor]) -> Jaxpr:
        """What is done with one token in one expert."""
        labels: list[Labels] = [
            [[f for f in dim if f.size > 1] for dim in self.scope[v]] for v in part.invars
        ]
        return single(part, labels, (self.experts, *tokens), (self.experts,))

    def kind(self, v: Var, tokens: Sequence[Factor]) -> str:
        """What an operand is of: of each token and expert, token, expert, or of all."""
        own = factors(self.scope, v)
        if self.experts in own:
            return CHOICE if own & set(tokens) else EXPERT
        return TOKEN if own & set(tokens) else ALL

    def leave(self) -> None:
        """Raises Decline where something else needs what is made in between."""
        view = self.view
        last = {v for n in self.ends for v in view.eqns[n].outvars} | static(view)
        for v in self.made - last:
            users = view.users.get(v, ())
            if factors(self.scope, v) & {self.experts} and any(n not in self.eqns for n in users):
                raise Decline("what experts make of tokens is used for something else besides")


def around(view: View, scope: Scope, first: Product, weights: frozenset[Var]) -> Around:
    """The region that a product with experts' weights is in. Raises Decline where that is none."""
    if view.eqns[first.number].primitive.name != "dot_general":
        raise Decline("experts take turns in a loop")
    if len(first.axes) != 1:
        raise Decline("experts are numbered by several axes")
    (experts,) = first.axes
    tokens = factors(scope, first.x) - first.axes - first.summed - factors(scope, first.w)
    found = _Region(view, scope, experts, tokens, weights)
    found.forward([first.number])
    found.backward()
    return Around(
        view,
        scope,
        experts,
        tokens,
        frozenset(found.eqns),
        tuple(sorted(found.sent)),
        tuple(sorted(found.ends)),
    )


class _Region:
    def __init__(
        self, view: View, scope: Scope, experts: Factor, tokens: frozenset[Factor], weights: frozenset[Var]
    ) -> None:
        self.view, self.scope, self.experts, self.tokens = view, scope, experts, tokens
        self.weights, self.uniform = weights, uniform(view)
        self.eqns: set[int] = set()
        self.data: set[Var] = set()
        self.ends: set[int] = set()
        self.sent: set[int] = set()

    def forward(self, numbers: Sequence[int]) -> None:
        """All that follows from the products and has the experts' axis still."""
        todo = list(numbers)
        while todo:
            number = todo.pop()
            if number < 0 or number in self.eqns:
                continue
            self.eqns.add(number)
            for v in self.view.eqns[number].outvars:
                if isinstance(v, DropVar):
                    continue
                if self.experts in factors(self.scope, v):
                    self.data.add(v)
                    todo += self.view.users.get(v, ())
                else:
                    self.ends.add(number)

    def backward(self) -> None:
        """What operands are made of that have the experts' axis too, and features; and what is constant.
        Where tokens were sent to places, masks that bring them back are none of it.
        """
        self._backward(sorted(self.eqns - self.ends))
        if not self.sent:
            self._backward(sorted(self.ends))

    def _backward(self, numbers: Sequence[int]) -> None:
        todo = [v for n in numbers for v in self.view.eqns[n].invars]
        seen: set[Var] = set()
        while todo:
            v = todo.pop()
            number = self.view.makers.get(v, -1) if isinstance(v, Var) else -1
            if not isinstance(v, Var) or v in seen or number < 0 or number in self.eqns:
                continue
            seen.add(v)
            eqn = self.view.eqns[number]
            if not self._is_inside(v):
                continue
            if self._dispatches(eqn):
                self.sent.add(number)
            else:
                self.eqns.add(number)
                todo += eqn.invars

    def _is_inside(self, v: Var) -> bool:
        if v in self.uniform:
            return v in self.view.makers
        if (eqn := self.view.maker(v)) is not None and eqn.primitive.name == "iota":
            return False
        own = factors(self.scope, v)
        if v in self.weights or self.experts not in own or not own & self.tokens:
            return False
        return bool(own - {self.experts} - self.tokens)

    def _dispatches(self, eqn: JaxprEqn) -> bool:
        """Whether it sums over tokens, of a mask that has the experts' axis and what has not."""
        if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][0][0]:
            return False
        has = [self.experts in factors(self.scope, v) for v in eqn.invars]
        return sum(has) == 1 and eqn.invars[has.index(True)] not in self.weights


def operands(around: Around, part: Jaxpr, takes: Sequence[Var], tokens: Sequence[Factor]) -> list[Operand]:
    """What the program for one token and one expert takes, by kinds."""
    kinds = (around.kind(v, tokens) for v in takes)
    return [Operand(v, kind) for v, kind in zip(part.invars, kinds, strict=True)]


def given(around: Around, chose: Chosen, v: Var, x: Value, operand: Operand, ids: Value) -> Value:
    """What the operation takes for an operand: of a mask, what it is at [tokens, choices]."""
    if operand.kind == TOKEN:
        return of_tokens(v, x, chose)
    if operand.kind == CHOICE:
        return mask_at(canonical(v, x, chose, around.experts), ids, around.experts.size)
    return x if operand.kind == ALL else of_experts(around.scope, v, x, around.experts)


def of_tokens(v: Var, x: Value, chose: Chosen) -> Value:
    """What each token has as [tokens, ...]."""
    x = leading(x, chose.scope[v], chose.tokens)
    sizes = [f.size for f in chose.tokens]
    shape = (*sizes, *x.shape[len(sizes) :])
    return jnp.broadcast_to(x, shape).reshape(chose.size, *shape[len(sizes) :])


def of_experts(scope: Scope, v: Var, x: Value, experts: Factor) -> Value:
    """What each expert has as [experts, ...]."""
    if shape_of(v) and scope[v][0] == (experts,) and 1 not in shape_of(v):
        return x
    return leading(x, scope[v], (experts,))
