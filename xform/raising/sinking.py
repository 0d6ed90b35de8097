"""Has a loop's body compute what is made outside of it of little: a mask, of segments and positions.

    m = eq s[b,t,1] s[b,1,t]                scan over w, s {
    scan over w, m { ... m ... }      ->      m = eq s[b,t,1] s[b,1,t]
                                              ... m ... }

A mask that all layers share is an operand of their loop, as large as the scores of a head. In the body it is
seen for what it is, and nobody needs it whole. Only what is the same in every turn goes in, and only what is
made by moving, comparing and counting, of fewer elements than it has. Layers in `jax.checkpoint` are treated
alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.axes.rules import ELEMENTWISE
from xform.higher_order import bodies, is_plain_jit, scan_parts
from xform.rewrite import Site, rewrite
from xform.trace import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Literal,
    Value,
    Var,
    eval_jaxpr,
    shape_of,
    trace_flat,
    without_dead,
)

_COSTLY = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma
    igammac lgamma log log1p logistic pow random_bits random_gamma regularized_incomplete_beta rem rsqrt sin
    sinh sqrt tan tanh
"""
"""Elementwise operations that are not done again in every turn: rotations, say."""

SPREADS = (ELEMENTWISE - frozenset(_COSTLY.split())) | frozenset(
    [
        "broadcast_in_dim",
        "concatenate",
        "iota",
        "pad",
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "transpose",
    ]
)
"""What is done again in every turn for nothing: the compiler fuses it with what reads it."""


def sunk(jaxpr: Jaxpr) -> Jaxpr:
    """The program with such operands computed in the bodies; itself if there are none."""
    makers: dict[int, dict[Var, JaxprEqn]] = {}

    def rule(site: Site) -> Sequence[Value] | None:
        if site.name not in ("scan", "remat2"):
            return None
        if id(site.jaxpr) not in makers:
            makers[id(site.jaxpr)] = {v: eqn for eqn in site.jaxpr.eqns for v in eqn.outvars}
        return _Sinking(site, makers[id(site.jaxpr)]).emit()

    new = rewrite(jaxpr, rule)
    return new if new is jaxpr else without_dead(new)


class _Sinking:
    """One equation with a body, and which of its operands go into it."""

    def __init__(self, site: Site, makers: dict[Var, JaxprEqn]) -> None:
        self.site, self.makers = site, makers
        (self.body,) = bodies(site.eqn)
        fixed = scan_parts(site.eqn)[0] if site.name == "scan" else len(site.eqn.invars)
        self.chains: dict[int, list[JaxprEqn]] = {}
        self.leaves: dict[Var, None] = {}
        for number, atom in enumerate(site.eqn.invars[:fixed]):
            if isinstance(atom, Var) and (found := self._chain(atom)) is not None:
                self.chains[number] = found[0]
                self.leaves.update(dict.fromkeys(found[1]))

    def _chain(self, atom: Var) -> tuple[list[JaxprEqn], list[Var]] | None:
        """The equations that make an operand of fewer elements, in order, and what they start from."""
        eqns: dict[int, JaxprEqn] = {}
        leaves: dict[Var, None] = {}
        size = math.prod(shape_of(atom))
        todo: list[Atom] = [atom]
        while todo:
            v = todo.pop()
            if isinstance(v, Literal) or v in leaves:
                continue
            eqn = self.makers.get(v)
            if eqn is None or not _spreads(eqn) or (v is not atom and self._is_small(v, size)):
                leaves[v] = None
            elif id(eqn) not in eqns:
                eqns[id(eqn)] = eqn
                todo += eqn.invars
        if not eqns or sum(math.prod(shape_of(v)) for v in leaves) >= size:
            return None
        order = [eqn for eqn in self.site.jaxpr.eqns if id(eqn) in eqns]
        return order, list(leaves)

    def _is_small(self, v: Var, size: int) -> bool:
        """Whether a value on the way is better passed in: it is small, and made of data."""
        return math.prod(shape_of(v)) * 2 < size and not self._is_fixed(v)

    def _is_fixed(self, atom: Atom) -> bool:
        """Whether a value is made of nothing that the program is given."""
        if isinstance(atom, Literal):
            return True
        eqn = self.makers.get(atom)
        return eqn is not None and _spreads(eqn) and all(map(self._is_fixed, eqn.invars))

    def emit(self) -> list[Value] | None:
        """The equation with its body changed; None where it stays."""
        site, eqn, p = self.site, self.site.eqn, self.site.params
        kept = [n for n in range(len(eqn.invars)) if n not in self.chains]
        inner = self._inner(kept)
        if inner is self.body:
            return None
        leaves = site.values(list(self.leaves))
        args = [site.args[n] for n in kept]
        if site.name == "remat2":

            def again(*xs: Value) -> list[Value]:
                return eval_jaxpr(inner, *xs)

            return list(
                jax.checkpoint(again, prevent_cse=p["prevent_cse"], policy=p["policy"])(*args, *leaves)
            )
        _, carry, xs = scan_parts(eqn)
        fixed = len(args) - carry - xs

        def turn(carried: Sequence[Value], x: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            outs = eval_jaxpr(inner, *args[:fixed], *carried, *x, *leaves)
            return outs[:carry], outs[carry:]

        first, rest = jax.lax.scan(
            turn,
            list(map(jnp.asarray, args[fixed : fixed + carry])),
            list(args[fixed + carry :]),
            p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        return [*first, *rest]

    def _inner(self, kept: Sequence[int]) -> Jaxpr:
        """The body with what goes into it: of the operands that it keeps, and what the others start from."""
        if not self.chains:
            return sunk(self.body)
        leaves = list(self.leaves)
        places: list[tuple[int, Any]] = list(enumerate(self.site.eqn.invars))

        def program(*xs: Value) -> list[Value]:
            env: dict[Var, Value] = dict(zip(leaves, xs[len(kept) :], strict=True))
            for chain in self.chains.values():
                _evaluate(chain, env)
            given = dict(zip(kept, xs, strict=False))
            operands = [given[n] if n in given else env[v] for n, v in places]
            return eval_jaxpr(self.body, *operands)

        avals = [self.body.invars[n].aval for n in kept] + [v.aval for v in leaves]
        return sunk(trace_flat(program, avals, "sunk"))


def _spreads(eqn: JaxprEqn) -> bool:
    """Whether an equation, or a call and all that is in it, can be done in every turn."""
    if is_plain_jit(eqn):
        (body,) = bodies(eqn)
        return all(map(_spreads, body.eqns))
    return eqn.primitive.name in SPREADS and not eqn.effects and not bodies(eqn)


def _evaluate(eqns: Sequence[JaxprEqn], env: dict[Var, Value]) -> None:
    for eqn in eqns:
        if all(v in env for v in eqn.outvars):
            continue
        args = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        outs = eqn.primitive.bind(*args, **eqn.params)
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
