"""How what a token's choices give is put together: found after the rows are back, and done on what a device has.

    y = einsum("mj,mje->me", gates, z)                 y = reduce_sum(z * gates[..., None], axis=1)

What is followed is linear in the rows and treats each token alone, by the axes of its dimensions. So a device
that has some of the experts gives its terms of y, which is `j` times less than z.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from xform.axes import Factor, Scope
from xform.errors import Decline
from xform.raising.flat import View
from xform.trace import Atom, JaxprEqn, Literal, Value, Var, shape_of

MOVED = frozenset(("reshape", "transpose", "squeeze", "expand_dims", "copy"))


@dataclasses.dataclass(frozen=True)
class Combine:
    """steps: ("cast", dtype), ("times", number of a gate), ("sum",), or ("dot", number of a gate, precision,
    dtype), a product that sums over choices. gates: how many there are.
    """

    steps: tuple[tuple[Any, ...], ...] = ()
    gates: int = 0

    def run(self, z: Value, gates: Sequence[Value]) -> Value:
        """z [m,j,...] and gates [m,j] -> [m,...]; z itself where no step sums."""
        for kind, *how in self.steps:
            if kind == "cast":
                z = z.astype(how[0])
            elif kind == "times":
                z = z * gates[how[0]].reshape(*gates[how[0]].shape, *(1,) * (z.ndim - 2))
            elif kind == "sum":
                z = z.sum(1, dtype=z.dtype)
            else:
                number, precision, dtype = how
                z = lax.dot_general(
                    gates[number],
                    z,
                    (((1,), (1,)), ((0,), (0,))),
                    precision=precision,
                    preferred_element_type=dtype,
                )
        return z


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate of each choice of each token, in the program; first: tokens are its outer dimensions."""

    source: Atom
    first: bool

    def laid(self, x: Value, tokens: int, choices: int) -> Value:
        """[tokens, choices]"""
        return x.reshape(tokens, choices) if self.first else x.reshape(choices, tokens).T


@dataclasses.dataclass(frozen=True)
class Combined:
    """y is what `combine` makes of z and gates."""

    combine: Combine
    gates: tuple[Gate, ...]
    y: Var


def combined(view: View, scope: Scope, z: Var) -> Combined:
    """What is made of rows that are back, z [m,j,...]. Raises Decline, with the line, where that is more than
    a sum over a token's choices.
    """
    return _Walk(view, scope, z).found()


class _Walk:
    def __init__(self, view: View, scope: Scope, z: Var) -> None:
        self.view, self.scope, self.z = view, scope, z
        self.tokens, self.choices = (tuple(scope[z][d]) for d in (0, 1))
        self.gates: list[Gate] = []

    def found(self) -> Combined:
        steps: list[tuple[Any, ...]] = []
        v = self.z
        summed = not self.choices
        while not summed:
            eqn = self._next(v)
            name = eqn.primitive.name
            if name == "convert_element_type":
                steps.append(("cast", eqn.params["new_dtype"]))
            elif name == "mul":
                steps.append(("times", self._gate(eqn, v)))
            elif name == "reduce_sum":
                axes = tuple(f for d in sorted(eqn.params["axes"]) for f in self.scope[v][d])
                summed = axes == self.choices
                if not summed:
                    raise self._unknown(eqn)
                steps.append(("sum",))
            elif name == "dot_general":
                steps.append(self._product(eqn, v))
                summed = True
            elif name not in MOVED:
                raise self._unknown(eqn)
            (v,) = eqn.outvars  # type: ignore[assignment]
        if not self.choices:
            steps.append(("sum",))
        steps, v = self._narrowed(steps, v)
        wanted = (*self.tokens, *(f for dim in self.scope[self.z][2:] for f in dim))
        if tuple(f for dim in self.scope[v] for f in dim) != wanted:
            raise Decline(f"what is made of a token's choices has other dimensions ({self._line(v)})")
        return Combined(Combine(tuple(steps), len(self.gates)), tuple(self.gates), v)

    def _next(self, v: Var) -> JaxprEqn:
        """The one equation that takes a value."""
        users = self.view.users.get(v, [])
        if len(users) != 1 or users[0] < 0:
            raise Decline(f"what experts give is used for more than a sum of it ({self._line(v)})")
        return self.view.eqns[users[0]]

    def _narrowed(self, steps: list[tuple[Any, ...]], v: Var) -> tuple[list[tuple[Any, ...]], Var]:
        """The cast of the sum to fewer bytes, if it comes next, is done before it is sent."""
        users = self.view.users.get(v, [])
        if len(users) == 1 and users[0] >= 0:
            eqn = self.view.eqns[users[0]]
            if eqn.primitive.name == "convert_element_type":
                new: Any = eqn.outvars[0]
                old: Any = v.aval
                if new.aval.dtype.itemsize < old.dtype.itemsize and new.aval.dtype.kind == old.dtype.kind:
                    return [*steps, ("cast", eqn.params["new_dtype"])], new
        return steps, v

    def _product(self, eqn: JaxprEqn, v: Var) -> tuple[Any, ...]:
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        left = eqn.invars[0] is v
        if eqn.invars[0] is eqn.invars[1]:
            raise self._unknown(eqn)
        mine, batch = (lc, lb) if left else (rc, rb)
        dims = self.scope[v]
        if tuple(f for d in mine for f in dims[d]) != self.choices or {
            f for d in batch for f in dims[d]
        } != set(self.tokens):
            raise self._unknown(eqn)
        gate = self._gate_of(eqn.invars[1] if left else eqn.invars[0], eqn)
        return "dot", gate, eqn.params["precision"], eqn.params["preferred_element_type"]

    def _gate(self, eqn: JaxprEqn, v: Var) -> int:
        """The number of what rows are multiplied with."""
        other = eqn.invars[1] if eqn.invars[0] is v else eqn.invars[0]
        if other is v:
            raise self._unknown(eqn)
        while (maker := self.view.maker(other)) is not None and maker.primitive.name == "broadcast_in_dim":
            other = maker.invars[0]
        return self._gate_of(other, eqn)

    def _gate_of(self, source: Atom, eqn: JaxprEqn) -> int:
        if isinstance(source, Literal):
            raise self._unknown(eqn)
        own = tuple(f for dim in self.scope[source] for f in dim)
        for first, wanted in ((True, (*self.tokens, *self.choices)), (False, (*self.choices, *self.tokens))):
            if own == wanted:
                gate = Gate(source, first)
                if gate not in self.gates:
                    self.gates.append(gate)
                return self.gates.index(gate)
        raise self._unknown(eqn)

    def _unknown(self, eqn: JaxprEqn) -> Decline:
        line = self.view.line(self.view.makers[eqn.outvars[0]])  # type: ignore[index]
        return Decline(f"{eqn.primitive.name}: more than a sum over what a token's choices give ({line})")

    def _line(self, v: Var) -> str:
        return self.view.line(self.view.makers[v]) if v in self.view.makers else ""
