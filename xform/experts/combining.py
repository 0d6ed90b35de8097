"""How what a token's choices give is put together: found after the rows are back, and done on what a device
has.

    y = einsum("mj,mje->me", gates, z)                 y = reduce_sum(z * gates[..., None], axis=1)

What is followed is linear in the rows and treats each token alone, by the axes of its dimensions. So a device
that has some of the experts gives its terms of y, which is `j` times less than z.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.axes import Scope
from xform.errors import Decline
from xform.raising.flat import View, dtype_of
from xform.trace import Atom, JaxprEqn, Literal, Value, Var

MOVED = frozenset(("reshape", "transpose", "squeeze", "expand_dims", "copy"))


@dataclasses.dataclass(frozen=True)
class Combine:
    """y = sum_j gates[m,j] z[m,j], gates being the product of so many, in dtype `out`; without an `out` z
    stays as it is.
    """

    gates: int = 0
    out: str = ""

    def weights(self, gates: Sequence[Value]) -> Value | None:
        """What the result of each choice is multiplied with, [m,j]; None where it is nothing."""
        return functools.reduce(jnp.multiply, gates) if gates else None

    def run(self, rows: Value, order: Value, places: Value) -> Value:
        """[m, ...], or of each choice [m,j, ...], of `rows` of choices, multiplied. order: the choice of each
        row, more than there are for none; places [m,j]: the row of each choice, more than there are for none.
        """
        if not self.out:
            made: Value = taken(rows, order, places.reshape(-1))
            return made.reshape(*places.shape, *rows.shape[1:])
        return summed(self.out, rows, order, places)


@jax.custom_vjp
def taken(rows: Value, order: Value, places: Value) -> Value:
    """The row of each choice, zeros where there is none. A choice has one row, so that gradients are looked
    up too, where JAX's would be added up at an index.
    """
    made: Value = rows.at[places].get(mode="fill", fill_value=0)
    return made


def _taken_forward(rows: Value, order: Value, places: Value) -> tuple[Value, Any]:
    return taken(rows, order, places), (order, places)


def _taken_backward(saved: Any, dz: Value) -> tuple[Value, None, None]:
    order, places = saved
    return taken(dz, places, order), None, None


taken.defvjp(_taken_forward, _taken_backward)


def added(rows: Value, places: Value, dtype: Any = None) -> Value:
    """[m, ...], the sum of rows at places [m,j], zeros where there is none; never all at once."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    found = (rows.at[places[:, i]].get(mode="fill", fill_value=0) for i in range(places.shape[1]))
    return functools.reduce(jnp.add, (x.astype(wide) for x in found)).astype(dtype or rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(out: str, rows: Value, order: Value, places: Value) -> Value:
    """sum_j rows[places[m,j]]"""
    return added(rows, places, out)


def _summed_forward(out: str, rows: Value, order: Value, places: Value) -> tuple[Value, Any]:
    return summed(out, rows, order, places), (rows[:0], order, places)


def _summed_backward(out: str, saved: Any, dy: Value) -> tuple[Value, None, None]:
    none, order, places = saved
    there = dy.at[order // places.shape[1]].get(mode="fill", fill_value=0)
    return there.astype(none.dtype), None, None


summed.defvjp(_summed_forward, _summed_backward)


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


def _only(eqn: JaxprEqn) -> Var:
    """The result of an equation that has one."""
    (v,) = eqn.outvars
    return v


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
        v = self.z
        summed = not self.choices
        while not summed:
            eqn = self._next(v)
            name = eqn.primitive.name
            if name == "convert_element_type":
                if not jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact):
                    raise self._unknown(eqn)
            elif name == "mul":
                self._gate(eqn, v)
            elif name == "reduce_sum":
                axes = tuple(f for d in sorted(eqn.params["axes"]) for f in self.scope[v][d])
                summed = axes == self.choices
                if not summed:
                    raise self._unknown(eqn)
            elif name == "dot_general":
                self._product(eqn, v)
                summed = True
            elif name not in MOVED:
                raise self._unknown(eqn)
            v = _only(eqn)
        v = self._narrowed(v)
        wanted = (*self.tokens, *(f for dim in self.scope[self.z][2:] for f in dim))
        if tuple(f for dim in self.scope[v] for f in dim) != wanted:
            raise Decline(f"what is made of a token's choices has other dimensions ({self._line(v)})")
        return Combined(Combine(len(self.gates), str(dtype_of(v))), tuple(self.gates), v)

    def _next(self, v: Var) -> JaxprEqn:
        """The one equation that takes a value."""
        users = self.view.users.get(v, [])
        if len(users) != 1 or users[0] < 0:
            raise Decline(f"what experts give is used for more than a sum of it ({self._line(v)})")
        return self.view.eqns[users[0]]

    def _narrowed(self, v: Var) -> Var:
        """The sum in fewer bytes, if that comes next: it is cast before it is sent."""
        users = self.view.users.get(v, [])
        if len(users) == 1 and users[0] >= 0:
            eqn = self.view.eqns[users[0]]
            if eqn.primitive.name == "convert_element_type":
                new, old = dtype_of(_only(eqn)), dtype_of(v)
                if new.itemsize < old.itemsize and new.kind == old.kind:
                    return _only(eqn)
        return v

    def _product(self, eqn: JaxprEqn, v: Var) -> None:
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
        self._gate_of(eqn.invars[1] if left else eqn.invars[0], eqn)

    def _gate(self, eqn: JaxprEqn, v: Var) -> None:
        """What rows are multiplied with."""
        other = eqn.invars[1] if eqn.invars[0] is v else eqn.invars[0]
        if other is v:
            raise self._unknown(eqn)
        while (maker := self.view.maker(other)) is not None and maker.primitive.name == "broadcast_in_dim":
            other = maker.invars[0]
        self._gate_of(other, eqn)

    def _gate_of(self, source: Atom, eqn: JaxprEqn) -> None:
        if isinstance(source, Literal):
            raise self._unknown(eqn)
        own = tuple(f for dim in self.scope[source] for f in dim)
        for first, wanted in ((True, (*self.tokens, *self.choices)), (False, (*self.choices, *self.tokens))):
            if own == wanted:
                self.gates.append(Gate(source, first))
                return
        raise self._unknown(eqn)

    def _unknown(self, eqn: JaxprEqn) -> Decline:
        line = self._line(_only(eqn))
        return Decline(f"{eqn.primitive.name}: more than a sum over what a token's choices give ({line})")

    def _line(self, v: Var) -> str:
        return self.view.line(self.view.makers[v]) if v in self.view.makers else ""
