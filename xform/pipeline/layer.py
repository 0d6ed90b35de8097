"""One layer as a schedule runs it: forward, keeping what its gradients need; and for its gradients, at once
or one after the other.

What is kept is what JAX's derivative of the layer keeps, so that policies of what is saved and what is
computed again hold here too; but nothing that weights alone are made into, a cast, a transpose: that is made
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from xform.derivative import derivative, reached, with_results
from xform.pipeline.arrays import is_floating
from xform.pipeline.pieces import Part, Pieces
from xform.rewrite import Site, rewrite
from xform.spmd.keeping import narrowed
from xform.trace import Jaxpr, Value, Var, inline, trace_flat, without_dead

OPENED = frozenset({"remat2", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
"""Calls in which the gradient of the input and that of the weights may be made by different equations."""


SOURCES = ("z", "fixed", "told", "told_row", "row")
"""Where a layer's operands come from, in the order in which its programs take them."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a layer takes, split as a schedule has it: numbers of what travels, of `Pieces.fixed`, of told and
    told_rows, and of `Pieces.fixed` again, stacks.
    """

    moving: tuple[int, ...]
    fixed: tuple[int, ...]
    told: tuple[int, ...]
    told_rows: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, part: Part) -> Operands:
        def those(kind: str) -> tuple[int, ...]:
            return tuple(dict.fromkeys(k for what, k in part.sources if what == kind))

        return cls(*map(those, SOURCES))


@dataclasses.dataclass(frozen=True)
class Layer:
    """Programs of one layer. `rest` is (*fixed, *told, *told_rows, *rows), as `operands` has them.

    run: of (*moving, *rest) gives what the part gives. forward: the same and what is kept. backward: of
    (*kept, *rest, *cotangents) gives the gradients of the floats of moving, then of `wanted`. input gives
    those of moving alone, and what `weight` needs; weight, of (*kept, *rest, *that), those of `wanted`.
    cotangents are those of the floats of what is given. wanted: numbers in rest.
    """

    operands: Operands
    moving: tuple[Any, ...]
    rest: tuple[Any, ...]
    outs: tuple[Any, ...]
    wanted: tuple[int, ...]
    run: Jaxpr
    forward: Jaxpr
    kept: tuple[Any, ...]
    backward: Jaxpr
    input: Jaxpr
    weight: Jaxpr
    late: tuple[Any, ...]

    @property
    def row_types(self) -> tuple[Any, ...]:
        """Of a layer's own of what is stacked."""
        return self.rest[self.first_row :]

    @property
    def first_row(self) -> int:
        """The number of the first stack among what a layer takes besides what moves."""
        return len(self.rest) - len(self.operands.rows)

    @property
    def stacked_wants(self) -> list[int]:
        """Of stacks, those whose gradients are wanted."""
        return [n for n in self.wanted if n >= self.first_row]


def layer_of(pieces: Pieces, part: Part, differentiated: Iterable[int]) -> Layer:
    """The programs of a part's layer. differentiated: numbers of `Pieces.fixed` of which gradients are
    wanted.
    """
    operands, body = Operands.of(part), part.body
    wanted_fixed = set(differentiated)
    moving = [pieces.z[k] for k in operands.moving]

    def row(aval: Any) -> Any:
        assert aval.shape[0] == part.layers
        return aval.update(shape=aval.shape[1:], sharding=None) if hasattr(aval, "sharding") else aval

    def narrow(k: int) -> Any:
        """The type of a row as every use of it makes it first: so it comes together, narrower."""
        uses = [n for n, source in enumerate(part.sources) if source == ("row", k)]
        dtypes = {narrowed(body, body.invars[n]) for n in uses}
        aval: Any = row(pieces.fixed[k].aval)
        return (
            aval.update(dtype=dtypes.pop())
            if len(dtypes) == 1 and is_floating(pieces.fixed[k].aval)
            else aval
        )

    fixed = [pieces.fixed[k].aval for k in operands.fixed]
    told = [pieces.told[k].aval for k in operands.told]
    told_rows = [row(pieces.told_rows[k].aval) for k in operands.told_rows]
    rows = [narrow(k) for k in operands.rows]
    rest = [*fixed, *told, *told_rows, *rows]
    taken = dataclasses.astuple(operands)
    order = [(kind, k) for kind, numbers in zip(SOURCES, taken, strict=True) for k in numbers]
    numbers = {source: n for n, source in enumerate(order)}
    wanted = tuple(n for n, k in enumerate(operands.fixed) if k in wanted_fixed) + tuple(
        len(rest) - len(rows) + n for n, k in enumerate(operands.rows) if k in wanted_fixed
    )

    def run(*args: Value) -> list[Value]:
        given: list[Any] = []
        for (kind, k), v in zip(part.sources, body.invars, strict=True):
            given.append(k if kind == "literal" else _wide(args[numbers[kind, k]], v))
        return inline(body, *given)

    types = [*moving, *rest]
    plain = trace_flat(run, types, "layer")
    outs = tuple(v.aval for v in plain.outvars)
    chosen = [n for n, t in enumerate(moving) if is_floating(t)] + [len(moving) + n for n in wanted]
    made = derivative(plain, len(moving), chosen, range(len(moving), len(types)))
    kept = made.kept
    inner = sum(map(is_floating, moving))
    input_, weight, late = _halves(made.backward, inner, len(kept) + len(rest))
    return Layer(
        operands,
        tuple(moving),
        tuple(rest),
        outs,
        wanted,
        plain,
        made.forward,
        kept,
        made.backward,
        input_,
        weight,
        late,
    )


def _wide(x: Value, v: Var) -> Value:
    dtype = getattr(v.aval, "dtype", None)
    return x if getattr(x, "dtype", dtype) == dtype else x.astype(dtype)


def _halves(jaxpr: Jaxpr, inner: int, known: int) -> tuple[Jaxpr, Jaxpr, tuple[Any, ...]]:
    """A backward pass in two: what gives the first `inner` results, and what gives the others. The second
    takes the first `known` inputs, and of the first what is made of the cotangents; all else it makes again.
    """
    flat = _opened(jaxpr)
    hot = reached(flat, flat.invars[known:])
    maker = {v: i for i, eqn in enumerate(flat.eqns) for v in eqn.outvars}
    first = _needed(flat, flat.outvars[:inner], maker, set())
    made = {v for i in first for v in flat.eqns[i].outvars} | set(flat.invars[known:])
    late = _reads(flat, flat.outvars[inner:], maker, made & hot)
    input_ = with_results(flat, [*flat.outvars[:inner], *late])
    takes = [*flat.invars[:known], *late]
    return input_, _rebased(flat, flat.outvars[inner:], takes), tuple(v.aval for v in late)


def _rebased(jaxpr: Jaxpr, outs: Sequence[Any], takes: Sequence[Var]) -> Jaxpr:
    """The program of these results from these variables: what makes them is left out."""
    given = set(takes)
    eqns = [eqn for eqn in jaxpr.eqns if not any(v in given for v in eqn.outvars)]
    made = jaxpr.replace(
        eqns=eqns, invars=list(takes), outvars=list(outs), debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return without_dead(made)


def _needed(jaxpr: Jaxpr, outs: Iterable[Any], maker: dict[Var, int], there: set[Var]) -> set[int]:
    found: set[int] = set()
    todo = [v for v in outs if isinstance(v, Var)]
    while todo:
        v = todo.pop()
        i = maker.get(v)
        if v in there or i is None or i in found:
            continue
        found.add(i)
        todo += [x for x in jaxpr.eqns[i].invars if isinstance(x, Var)]
    return found


def _reads(jaxpr: Jaxpr, outs: Iterable[Any], maker: dict[Var, int], there: set[Var]) -> list[Var]:
    """Of the variables that are there, those that these results need, in order."""
    needed = _needed(jaxpr, outs, maker, there)
    reads = [v for i in sorted(needed) for v in jaxpr.eqns[i].invars if isinstance(v, Var)]
    reads += [v for v in outs if isinstance(v, Var)]
    return [v for v in dict.fromkeys(reads) if v in there]


def _opened(jaxpr: Jaxpr) -> Jaxpr:
    """The program with calls and what is computed again in their place."""

    def rule(site: Site) -> Sequence[Value] | None:
        if site.path or site.name not in OPENED:
            return None
        (body, *_) = [v for v in site.params.values() if isinstance(v, Jaxpr)]
        return inline(_opened(body), *site.args)

    return rewrite(jaxpr, rule)
