"""A loop over layers that does nothing but run another, as one loop over both.

    scan ws[3, 4, ...] { scan w[4, ...] { layer } }      ->      scan w[12, ...] { layer }

What both loops go through has its two leading dimensions made one; what only the outer goes through (numbers:
an index, a key) is looked up by the number of the turn. A loop that does anything else stays, and says what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import Decline
from xform.higher_order import scan_parts
from xform.layers.unrolled import is_real
from xform.rewrite import Site, rewrite
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, body_effects, inline, source_line


@dataclasses.dataclass(frozen=True)
class Nest:
    """Two loops that one can stand for.

    before: what the outer body makes, in each turn the same, of the constants of the outer loop. consts,
    carry, xs: for each operand of the inner body, what it is: ("outer", n), operand n of the outer loop or,
    further on, a value of `before`; ("turn", n), of which each turn of the outer loop has its own;
    ("again", n), which each goes through anew; or a literal. gives: for each result of the outer loop the
    inner result that it is, or ("outer", n).
    """

    outer: JaxprEqn
    inner: JaxprEqn
    before: Jaxpr
    consts: tuple[Any, ...]
    carry: tuple[Any, ...]
    xs: tuple[Any, ...]
    gives: tuple[Any, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.outer.params["length"], self.inner.params["length"]

    def emit(self, *args: Any) -> list[Any]:
        """The one loop, of the operands of the outer."""
        outer, inner = self.lengths
        args = (*args, *inline(self.before, *args[: len(self.before.invars)]))
        turns = np.arange(outer * inner, dtype=np.int32)
        body: Jaxpr = self.inner.params["jaxpr"]
        xs = [_joined(args[n]) if kind == "outer" else None for kind, n in self.xs]

        def turn(carry: Any, scanned: Any) -> Any:
            group, layer, own = scanned
            at = {"turn": group, "again": layer}

            def value(source: Any) -> Any:
                if isinstance(source, Literal):
                    return source.val
                kind, n = source
                return (
                    args[n] if kind == "outer" else jax.lax.dynamic_index_in_dim(args[n], at[kind], 0, False)
                )

            mine = [value(source) if x is None else x for x, source in zip(own, self.xs, strict=True)]
            outs = inline(body, *map(value, self.consts), *carry, *mine)
            return outs[: len(self.carry)], outs[len(self.carry) :]

        carry, ys = jax.lax.scan(
            turn,
            [args[n] for _, n in self.carry],
            (turns // inner, turns % inner, xs),
            reverse=self.inner.params["reverse"],
            unroll=self.inner.params["unroll"],
        )
        outs = [*carry, *(y.reshape(outer, inner, *y.shape[1:]) for y in ys)]
        return [args[n] if kind == "outer" else outs[n] for kind, n in self.gives]


def _joined(x: Any) -> Any:
    return jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def nest_of(eqn: JaxprEqn) -> Nest:
    """Two loops that one can stand for. Raises Decline, naming what is in the way."""
    body = rewrite(eqn.params["jaxpr"], _inlined)
    consts, carry, _ = scan_parts(eqn)
    before, rest = _before(body, consts)
    for other in rest:
        if other.primitive.name == "remat2":
            raise Decline("jax.checkpoint is around the inner loop: as one loop, each layer's input is kept")
        if other.primitive.name != "scan":
            raise Decline(f"`{other.primitive.name}` ({source_line(other)}) stands around the inner loop")
    if len(rest) != 1:
        raise Decline(f"{len(rest)} inner loops stand side by side ({source_line(rest[-1])})")
    (inner,) = rest
    if inner.params["reverse"] != eqn.params["reverse"]:
        raise Decline("one of the loops runs backwards")
    at = {v: n for n, v in enumerate(body.invars)}
    made = {v: len(body.invars) + n for n, v in enumerate(before.outvars)}
    still = {n for n in range(carry) if body.outvars[n] is body.invars[consts + n]}

    def kind(v: Atom) -> Any:
        """What a value is to the outer loop."""
        if isinstance(v, Literal):
            return v
        if v in made:
            return "outer", made[v]
        n = at[v]
        if n < consts or n - consts in still:
            return "outer", n
        return ("carried", n) if n < consts + carry else ("scanned", n)

    def constant(v: Atom) -> Any:
        source = kind(v)
        if isinstance(v, Literal) or source[0] == "outer":
            return source
        if source[0] == "carried":
            raise Decline(f"the inner loop reads {_told(v)}, which the outer carries, without carrying it")
        return "turn", _looked_up(v, source[1], "the inner loop shares it")

    def scanned(v: Atom) -> Any:
        source = kind(v)
        if isinstance(v, Var) and source[0] == "scanned":
            return "outer", source[1]
        if isinstance(v, Var) and source[0] == "outer":
            return "again", _looked_up(v, source[1], "each turn of the outer loop goes through it anew")
        raise Decline(f"the inner loop goes through {_told(v)}, which the outer carries")

    def carried(v: Atom, n: int) -> Any:
        source = kind(v)
        if isinstance(v, Literal) or source[0] != "carried":
            raise Decline(f"the inner loop carries {_told(v)}, which starts anew in each turn of the outer")
        if body.outvars[source[1] - consts] is not inner.outvars[n]:
            raise Decline(f"what the inner loop makes of {_told(v)} is not what the outer carries on")
        return "outer", source[1]

    def given(v: Atom, n: int) -> Any:
        if n in still:
            return "outer", consts + n
        if isinstance(v, Var) and v in inner.outvars:
            k = inner.outvars.index(v)
            if (k < inner_carry) == (n < carry):
                return "inner", k
        elif isinstance(v, Var) and kind(v)[0] == "scanned" and n >= carry:
            return "outer", kind(v)[1]
        raise Decline(
            f"each turn of the outer loop gives {_told(v)}, which is no result of the inner for a layer"
        )

    inner_consts, inner_carry, _ = scan_parts(inner)
    ins = inner.invars
    return Nest(
        eqn,
        inner,
        before,
        tuple(map(constant, ins[:inner_consts])),
        tuple(carried(v, n) for n, v in enumerate(ins[inner_consts : inner_consts + inner_carry])),
        tuple(map(scanned, ins[inner_consts + inner_carry :])),
        tuple(given(v, n) for n, v in enumerate(body.outvars)),
    )


def _inlined(site: Site) -> Sequence[Any] | None:
    """The calls of jit directly in a body, dissolved."""
    return inline(site.params["jaxpr"], *site.args) if site.name == "jit" and not site.path else None


def _before(body: Jaxpr, consts: int) -> tuple[Jaxpr, list[JaxprEqn]]:
    """What a loop's body makes of its constants alone, as a program of these; and its other equations."""
    varying, before, rest = set(body.invars[consts:]), list[JaxprEqn](), list[JaxprEqn]()
    for eqn in body.eqns:
        if eqn.effects or not varying.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
            rest.append(eqn)
            varying.update(eqn.outvars)
        else:
            before.append(eqn)
    outs = [v for eqn in before for v in eqn.outvars if not isinstance(v, DropVar)]
    info = body.debug_info.with_unknown_names()
    whole = body.replace(invars=body.invars[:consts], outvars=outs, eqns=before, debug_info=info)
    return whole.replace(effects=body_effects(whole)), rest


def _looked_up(v: Var, n: int, why: str) -> int:
    """A value to look up by the number of the turn; no weights: their gradient would be summed up in whole in
    every turn.
    """
    if is_real(v):
        raise Decline(f"{_told(v)} is not one a layer: {why}")
    return n


def _told(v: Atom) -> str:
    return v.aval.str_short() if isinstance(v, Var) else str(v.val)


def divisor(n: int) -> int:
    """The divisor of n that is nearest to its root, not below; n itself where n is prime."""
    return next(k for k in range(1, n + 1) if n % k == 0 and k * k >= n)


def kept(avals: Sequence[Any]) -> int:
    """The bytes of values of these types."""
    return sum(
        int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in avals if hasattr(a.dtype, "itemsize")
    )
