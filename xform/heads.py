"""Where a program makes logits over a vocabulary, and the region from there to where they are reduced away.

The head is the product of an activation and a weight whose result has the vocabulary's axis and is the
largest. Its region is everything that reads what is as large as the logits, what such equations read of that
size, and what lies between: it takes the hidden states, the labels and the head's weights, and gives what
each token, or all of them together, made of the logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from xform.axes import Factor, Scope
from xform.batch.local import apply
from xform.batch.states import Batch, Outcome, State
from xform.errors import Decline
from xform.movement import moves
from xform.roles import Roles
from xform.trace import JaxprEqn, Var, shape_of, source_line

CHUNKED = "chunked_loss"
"""The name of a loop in which tokens go through the head and the loss in chunks."""


class Refused(Decline):
    """With the user's line."""

    def __init__(self, why: str, line: str) -> None:
        super().__init__(why)
        self.line = line


@dataclasses.dataclass(frozen=True)
class Head:
    """The product that makes the logits. tokens: the axes along which it can be cut, the best first."""

    roles: Roles
    scope: Scope
    number: int

    @property
    def eqn(self) -> JaxprEqn:
        return self.scope.jaxpr.eqns[self.number]

    @property
    def side(self) -> int:
        """Which operand of the product is the activation."""
        return next(k for k, v in enumerate(self.eqn.invars) if self.roles.is_activation(self.scope, v))

    @property
    def line(self) -> str:
        return source_line(self.eqn)

    @property
    def what(self) -> str:
        shape = shape_of(self.eqn.outvars[0])
        return f"with logits [{', '.join(map(str, shape))}]"

    @property
    def tokens(self) -> list[tuple[str, tuple[Factor, ...]]]:
        dims = [d for d in self.scope[self.eqn.outvars[0]] if not _has_vocab(self.roles, d)]
        # A part of the length is a length of its own.
        alone = [(self.roles.name(f).removesuffix("_part"), (f,)) for dim in dims for f in dim]
        order = {"length": 0, "batch": 2}
        several = [("tokens", tuple(dim)) for dim in dims if len(dim) > 1]
        return sorted([*alone, *several], key=lambda entry: order.get(entry[0], 1))


def _has_vocab(roles: Roles, dim: Sequence[Factor]) -> bool:
    return any(roles.name(f) == "vocab" for f in dim)


def find_head(roles: Roles) -> Head | None:
    """The product of an activation and a weight with the largest result that has the vocabulary's axis."""
    found: list[tuple[int, Head]] = []
    for scope in roles.axes.scopes:
        for number, eqn in enumerate(scope.jaxpr.eqns):
            if eqn.primitive.name != "dot_general" or not roles.is_activation(scope, eqn.outvars[0]):
                continue
            if any(_has_vocab(roles, dim) for dim in scope[eqn.outvars[0]]) and any(
                roles.is_weight(scope, v) for v in eqn.invars if isinstance(v, Var)
            ):
                found.append((math.prod(shape_of(eqn.outvars[0])), Head(roles, scope, number)))
    return max(found, key=lambda entry: entry[0])[1] if found else None


class Region:
    """The equations from the head to where the logits have been reduced, and what they do with the tokens.

    tokens: the axis of the tokens, as the rows of a batch. numbers: the equations. outcomes: what each makes
    of rows; states: of the values that they read and make. Raises Refused where an operation mixes tokens, or
    where the logits are needed whole.
    """

    def __init__(self, tokens: Batch, head: Head) -> None:
        self.tokens, self.scope, self.head = tokens, head.scope, head
        self.jaxpr = head.scope.jaxpr
        self.wide = math.prod(shape_of(head.eqn.outvars[0])) // 2
        self.made = {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}
        self.numbers = self._closed(self._grown())
        self.states: dict[Var, State] = {}
        self.outcomes: dict[int, Outcome] = {}
        for i in sorted(self.numbers):
            eqn = self.jaxpr.eqns[i]
            self.states |= {v: tokens.of(self.scope, v) for v in self._read(eqn) if v not in self.states}
            try:
                self.outcomes[i] = apply(eqn, i, self.states, self.scope, tokens, [])
            except Decline as why:
                raise Refused(str(why), getattr(why, "line", "") or source_line(eqn)) from None
            self.states.update(zip(eqn.outvars, self.outcomes[i].states, strict=True))
        self._check()

    @property
    def sums(self) -> bool:
        """Whether tokens are added up in it, or the largest of them is found."""
        return any(s.is_part for s in self.states.values())

    def _read(self, eqn: JaxprEqn) -> list[Var]:
        return [v for v in eqn.invars if isinstance(v, Var)]

    def _is_wide(self, v: Any) -> bool:
        """Whether a value is as large as the logits and has tokens."""
        if not isinstance(v, Var) or math.prod(shape_of(v)) < self.wide or v not in self.scope.raw:
            return False
        return self.tokens.of(self.scope, v).is_rows

    def _grown(self) -> set[int]:
        """The head, all that reads what is wide and follows from it, all wide that these read, and the
        casts of weights.
        """
        numbers = {self.head.number}
        while True:
            wide = {v for i in numbers for v in self.jaxpr.eqns[i].outvars if self._is_wide(v)}
            more = {i for i, eqn in enumerate(self.jaxpr.eqns) if wide & set(self._read(eqn))}
            for i in (numbers | more) - {self.head.number}:  # not what makes the hidden states
                reads = self._read(self.jaxpr.eqns[i])
                more |= {self.made[v] for v in reads if v in self.made and self._is_wide(v)}
            if more <= numbers:
                return numbers | self._casts(numbers)
            numbers = numbers | more

    def _casts(self, numbers: Collection[int]) -> set[int]:
        """What casts the weights of products: inside, their gradients add up in the weights' own dtype."""
        found: set[int] = set()
        for i in numbers:
            if self.jaxpr.eqns[i].primitive.name != "dot_general":
                continue
            for v in self._read(self.jaxpr.eqns[i]):
                if self.tokens.of(self.scope, v).is_rows:
                    continue
                way: list[int] = []
                while (
                    v in self.made
                    and moves(eqn := self.jaxpr.eqns[self.made[v]])
                    and isinstance(eqn.invars[0], Var)
                ):
                    way.append(self.made[v])
                    v = eqn.invars[0]
                    if eqn.primitive.name == "convert_element_type":
                        found.update(way)
        return found

    def _closed(self, numbers: set[int]) -> set[int]:
        """With all that needs some of it and is needed by some of it."""
        after: set[Var] = set()
        below: set[int] = set()
        for i, eqn in enumerate(self.jaxpr.eqns):
            if i in numbers or not after.isdisjoint(self._read(eqn)):
                below.add(i)
                after.update(eqn.outvars)
        before: set[Var] = set()
        above: set[int] = set()
        for i in range(len(self.jaxpr.eqns) - 1, -1, -1):
            eqn = self.jaxpr.eqns[i]
            if i in numbers or not before.isdisjoint(eqn.outvars):
                above.add(i)
                before.update(self._read(eqn))
        return below & above

    def _check(self) -> None:
        """That nothing wide leaves the region."""
        wide = {v for i in self.numbers for v in self.jaxpr.eqns[i].outvars if self._is_wide(v)}
        if wide & {v for v in self.jaxpr.outvars if isinstance(v, Var)}:
            raise Decline(
                "its logits, or what is made of them, are a result of the function: they are needed whole"
            )
