"""Writes the program over what is stored by stage: reorderings fall away, and rows are moved where they must.

An equation that treats rows alone is carried over as it is, in whatever order they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.higher_order import RULES, enter, equations, hoist
from xform.ops.rows import by_stage, in_own_order, reorder_of
from xform.ordering.choosing import Choice, Move
from xform.ordering.ties import Place, Use
from xform.rewrite import Path, Site, rewrite
from xform.state import Left, Order, Orders, Reordered
from xform.trace import (
    Atom,
    Jaxpr,
    Literal,
    Tracer,
    Value,
    Var,
    bind,
    eval_jaxpr,
    fitted,
    inline,
    trace_flat,
    typeof,
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A program over a state that is stored by stage.

    inputs, outputs: the order of each. left: what is still moved. reordered: sums over rows. edge: inputs and
    outputs that are moved into and out of the order of a length, and do not count as left.
    """

    jaxpr: Jaxpr
    inputs: Orders
    outputs: Orders
    left: tuple[Left, ...]
    reordered: tuple[Reordered, ...]
    edge: tuple[str, ...] = ()


def stored_by_stage(jaxpr: Jaxpr, state: Mapping[int, int], keep: Collection[int] = ()) -> Stored | None:
    """The program with what it reorders (`xform.ops.rows`) stored so. None where it reorders nothing.

    state: output -> the input that it is at the next call; it comes back in the order in which it was given.
    keep: inputs that stay in the model's own order.
    """
    if not any(reorder_of(eqn) for eqn in equations(jaxpr)):
        return None
    choice = Choice(jaxpr, state, keep)
    moves = {place: choice.moves(place, use) for place, use in choice.ties.uses.items()}
    acting = [path for (path, i), use in choice.ties.uses.items() if moves[path, i] or choice.cancels(use)]
    around = {(path[:n], path[n][0]) for path in acting for n in range(len(path))}
    inner = rewrite(jaxpr, _Rewriting(choice, moves, around).rule, name="state")
    entering = [choice.entering(n) for n in range(len(jaxpr.invars))]
    leaving = [choice.leaving(n) for n in range(len(jaxpr.outvars))]
    new = inner if not any((*entering, *leaving)) else _bordered(inner, entering, leaving)
    return Stored(
        new, tuple(choice.in_orders), tuple(choice.out_orders), choice.left(), choice.sums(), choice.edge()
    )


def not_kept(jaxpr: Jaxpr, share: float) -> str:
    """Why what a program reorders would not be kept in that order, since more than a share of it would be
    moved for that; "" where it would.
    """
    return "; ".join(dict.fromkeys(why for why, _ in Choice(jaxpr, {}, (), share).refused))


def _bordered(jaxpr: Jaxpr, entering: Sequence[Sequence[Move]], leaving: Sequence[Sequence[Move]]) -> Jaxpr:
    """The program with rows of inputs moved before it, and of outputs after it."""

    def flat(*values: Value) -> list[Value]:
        values = tuple(map(_moved, values, entering))
        return list(map(_moved, inline(jaxpr, *values), leaving))

    avals = [v.aval for v in jaxpr.invars]
    names = jaxpr.debug_info.safe_arg_names(len(avals))
    return trace_flat(flat, avals, jaxpr.debug_info.func_name, names)


@dataclasses.dataclass(frozen=True)
class _Rewriting:
    """The rule for the bodies under `path`. moves: of each equation. around: the equations in whose bodies
    something changes.
    """

    choice: Choice
    moves: Mapping[Place, Sequence[Move]]
    around: Collection[Place]
    path: Path = ()

    def rule(self, site: Site) -> Sequence[Value] | None:
        place = (*self.path, *site.path), site.index
        use = self.choice.ties.uses.get(place)
        if use is None:
            return None
        if self.choice.cancels(use):
            return self._given(self._taken(site, place), place)
        changes = place in self.around
        if site.name in RULES and (changes or self._is_ordered(use)):
            return self._with_rule(site, place, use)
        if not self.moves[place]:
            return None
        if site.name == "iota":
            return [self._counted(site, self.moves[place])]
        params, consts = site.params, list[Any]()
        if changes:
            params, consts = hoist(site.eqn, self._entered(site, place))
        outs = bind(site.eqn, [*consts, *self._taken(site, place)], params)
        return self._given(outs, place)

    def _is_ordered(self, use: Use) -> bool:
        dims = (*use.operands, *use.results)
        return any(self.choice.order(node) for nodes in dims for node in nodes)

    def _entered(self, site: Site, place: Place) -> dict[str, Any]:
        """The equation's parameters, its bodies written."""

        def body(jaxpr: Jaxpr, number: int) -> Jaxpr:
            inner = (*place[0], (place[1], number))
            return rewrite(jaxpr, dataclasses.replace(self, path=inner).rule, name="state")

        return enter(site.eqn, body)

    def _taken(self, site: Site, place: Place) -> list[Value]:
        """The operands as the equation wants them."""
        own = [move for move in self.moves[place] if not move.of_result]
        return [
            self._operand(site, atom, value, [move for move in own if move.number == k])
            for k, (atom, value) in enumerate(zip(site.eqn.invars, site.args, strict=True))
        ]

    def _operand(self, site: Site, atom: Atom, value: Value, moves: Sequence[Move]) -> Value:
        constant = _constant(site.jaxpr, atom) if moves else None
        if constant is None:
            return _moved(value, moves)
        for move in moves:
            assert move.held is None and move.wanted is not None
            constant = _blocks(constant, move, Order(move.wanted, move.dim).of)
        return fitted(jnp.asarray(constant), atom.aval)

    def _given(self, outs: Sequence[Value], place: Place) -> list[Value]:
        own = [move for move in self.moves[place] if move.of_result]
        return [_moved(x, [move for move in own if move.number == k]) for k, x in enumerate(outs)]

    def _counted(self, site: Site, moves: Sequence[Move]) -> Value:
        """The numbers of rows, in their order."""
        aval, dim = site.out_avals[0], site.params["dimension"]
        (rows,) = (move.wanted or () for move in moves if move.dim == dim)
        numbers = np.arange(aval.shape[dim]).reshape(len(rows), -1)[list(rows)].ravel()
        return jax.lax.broadcast_in_dim(jnp.asarray(numbers, aval.dtype), aval.shape, (dim,))

    def _with_rule(self, site: Site, place: Place, use: Use) -> Sequence[Value]:
        """A function with a differentiation rule of its own: what is differentiated from outside is the
        function as it was, in the model's own order.
        """
        eqn = site.eqn
        (name,) = (k for k, v in eqn.params.items() if isinstance(v, Jaxpr))
        written = self._entered(site, place)[name]

        def to(values: Sequence[Value], nodes: Sequence[Sequence[int | None]], back: bool) -> list[Value]:
            found = []
            for x, dims in zip(values, nodes, strict=True):
                ordered = [(d, rows) for d, node in enumerate(dims) if (rows := self.choice.order(node))]
                pairs = [(d, rows, None) if back else (d, None, rows) for d, rows in ordered]
                found.append(_moved(x, [Move(not back, 0, d, held, wanted, -1) for d, held, wanted in pairs]))
            return found

        def by_rows(*args: Value) -> list[Value]:
            return eval_jaxpr(written, *args)

        def as_it_was(*args: Value) -> list[Value]:
            return to(bind(eqn, to(args, use.operands, back=True), eqn.params), use.results, back=False)

        made: Callable[..., list[Value]] = _ruled(eqn.primitive.name, by_rows, as_it_was)
        return self._given(made(*self._taken(site, place)), place)


def _ruled(name: str, run: Callable[..., list[Value]], differentiated: Callable[..., list[Value]]) -> Any:
    """`run` with the derivative of the other."""
    if name == "custom_jvp_call":
        forward = jax.custom_jvp(run)
        forward.defjvp(lambda primals, tangents: jax.jvp(differentiated, primals, tangents))
        return forward
    reverse = jax.custom_vjp(run)
    reverse.defvjp(lambda *args: jax.vjp(differentiated, *args), lambda back, cotangents: back(cotangents))
    return reverse


def _constant(jaxpr: Jaxpr, atom: Atom) -> np.ndarray | None:
    """The numbers that a constant of a body or a literal is, where they are known."""
    value: Any = atom.val if isinstance(atom, Literal) else None
    if isinstance(atom, Var) and atom in jaxpr.constvars:
        value = jaxpr.consts[jaxpr.constvars.index(atom)]
    if value is None or isinstance(value, Tracer):
        return None
    if jnp.issubdtype(typeof(value).dtype, jax.dtypes.extended):
        return None
    here = not isinstance(value, jax.Array) or value.is_fully_addressable
    return np.asarray(value) if here else None


def _moved(x: Value, moves: Sequence[Move]) -> Value:
    for move in moves:
        x = _blocks(x, move, functools.partial(_put, move=move))
    return x


def _put(x: Value, move: Move) -> Value:
    """The rows of one order in another."""
    if move.held is not None:
        x = in_own_order(x, move.held, move.dim)
    return x if move.wanted is None else by_stage(x, move.wanted, move.dim)


def _blocks(x: Any, move: Move, f: Callable[[Any], Any]) -> Any:
    """f of x with the move's dimension as its rows, where it has more in each of them."""
    shape, count = x.shape, len(move.held or move.wanted or ())
    if shape[move.dim] == count:
        return f(x)
    split = (*shape[: move.dim], count, shape[move.dim] // count, *shape[move.dim + 1 :])
    return f(x.reshape(split)).reshape(shape)
