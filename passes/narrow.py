"""Stacks what a loop stacks in the narrowest dtype that holds it, once, and not at all where it is there
anyway.

    g[n,...] = scan {                       s[n,...] = scan {
      h:bf16 = dot_general x y                h:bf16 = dot_general x y
      g:f32 = convert_element_type h   ->     } h
      } g                                   g:f32 = convert_element_type s

A loop's stacked result is often a value in another arrangement or dtype: the gradient of a weight is computed
in bfloat16 and stacked in float32, a residual is kept in both. Such a result is traced back in the body to
where it takes the fewest bytes (`xform.movement`); that is stacked, and the rest is done after the loop,
where it takes no memory: what reads it computes it on the way. A loop that reads a stacked array row by row
does it to each row; one that reads rows wide and uses them narrow rounds each in its body. The numbers are
the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from xform.context import Context
from xform.higher_order import equations, is_plain_jit, scan_parts
from xform.movement import Derived, derivations, makers, narrowest, nbytes, pruned, row_derivations, uses
from xform.report import Report, amount
from xform.rewrite import Site, rewrite
from xform.trace import Atom, Jaxpr, JaxprEqn, Literal, Value, Var, inline, shape_of

CHECKPOINT = "remat2"


@dataclasses.dataclass(frozen=True)
class Narrow:
    """There are no options.

    A program without this pass may carry a value on in float32 where it says bfloat16 (XLA's excess
    precision); what is stacked in bfloat16 is rounded, as the program says.
    """

    stages: ClassVar[tuple[str, ...]] = ("step",)

    def rewrite(self, jaxpr: Jaxpr, context: Context) -> Jaxpr:
        report = Report()
        new = rewrite(rewrite(jaxpr, _opened), _Results(report))
        while (read := rewrite(new, _Operands(report))) is not new:
            new = read  # what a loop now computes may be what a loop in its body reads
        new = rewrite(new, _Rounded(report))
        if not len(report):
            context.report.did("narrow", "no loop stacks anything wider or oftener than it needs")
            return jaxpr
        devices = " over all devices" if context.mesh.size > 1 else ""
        for note, count in report:
            for _ in range(count):
                context.report.add(dataclasses.replace(note, why=note.why + devices))
        return pruned(new)


# ---------------------------------------------------------------- calls that hide what is stacked


def _opened(site: Site) -> Sequence[Value] | None:
    """Puts the body of a jit with loops in its place: what a loop stacks in one is read in another."""
    if not is_plain_jit(site.eqn) or all(
        eqn.primitive.name != "scan" for eqn in equations(site.params["jaxpr"])
    ):
        return None
    return inline(rewrite(site.params["jaxpr"], _opened), *site.args)


def _surfaced(jaxpr: Jaxpr, results: Sequence[int]) -> Jaxpr:
    """The body with the calls opened that hide what its results of these numbers are derived from."""
    while True:
        made = makers(jaxpr)
        hidden: dict[int, None] = {}
        for i in results:
            root = derivations(jaxpr.outvars[i], made)[-1].root
            if isinstance(root, Var) and root in made and _gains(*made[root]):
                hidden[id(made[root][0])] = None
        if not hidden:
            return jaxpr

        def rule(site: Site, hidden: dict[int, None] = hidden) -> Sequence[Value] | None:
            if site.path or id(site.eqn) not in hidden:
                return None
            return inline(site.params["jaxpr"], *site.args) if site.name == "jit" else _rebound(site)

        jaxpr = rewrite(jaxpr, rule)


def _gains(eqn: JaxprEqn, result: int) -> bool:
    """Whether a call's result of this number is derived, inside, from what takes fewer bytes or is given."""
    if not is_plain_jit(eqn) and eqn.primitive.name != CHECKPOINT:
        return False
    body = _surfaced(eqn.params["jaxpr"], [result])
    (derived,) = _within(body, [result])
    return bool(derived.steps) or derived.root in body.invars


def _within(body: Jaxpr, results: Sequence[int]) -> list[Derived]:
    made, inputs = makers(body), frozenset(body.invars)
    return narrowest(
        [derivations(body.outvars[i], made) for i in results],
        lambda atom: isinstance(atom, Literal) or atom in inputs,
    )


def _rebound(site: Site) -> list[Value]:
    """A call of jax.checkpoint that gives what its results are derived from, and they derived from that."""
    results = range(len(site.eqn.outvars))
    body = _surfaced(site.params["jaxpr"], results)
    chosen = _within(body, results)
    values = {Derived(v).key: x for v, x in zip(body.invars, site.args, strict=True)}
    kept = {d.key: d.root for d in chosen if d.key not in values and isinstance(d.root, Var)}
    given = site.bind(jaxpr=_giving(body, list(kept.values())))
    values.update(zip(kept, given, strict=True))
    return [d.of(d.root.val if isinstance(d.root, Literal) else values[d.key]) for d in chosen]


def _giving(body: Jaxpr, results: Sequence[Atom]) -> Jaxpr:
    """The body with other results."""
    debug_info = body.debug_info.with_unknown_names()
    return pruned(body.replace(outvars=list(results), debug_info=debug_info))


# ---------------------------------------------------------------- what a loop stacks


class _Results:
    """The rule that has a scan stack what its results are derived from, and derives them after it."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, site: Site) -> Sequence[Value] | None:
        if site.name != "scan":
            return None
        old, (consts, carry, _) = site.params["jaxpr"], scan_parts(site.eqn)
        used = uses(site.jaxpr)
        wanted = [i for i, v in enumerate(site.eqn.outvars) if i >= carry and v in used]
        inside = rewrite(old, self)  # the loops inside first
        body = _surfaced(inside, wanted)
        constant = frozenset(body.invars[:consts])
        alive = frozenset(site.jaxpr.all_invars)
        operands = zip(body.invars, site.eqn.invars, strict=True)
        there = {v for i, (v, x) in enumerate(operands) if i >= consts + carry and x in alive}

        def free(atom: Atom) -> bool:
            return isinstance(atom, Literal) or atom in constant or atom in there

        made = makers(body)
        chosen = narrowest([derivations(body.outvars[i], made) for i in wanted], free)
        kept = {d.key: d.root for d in chosen if not free(d.root)}
        if len(kept) == len(chosen) and not any(d.steps for d in chosen):
            return None if inside is old else site.bind(jaxpr=inside)
        self.tell(site, [body.outvars[i] for i in wanted], chosen, free)
        # What nobody uses is not stacked either, but has a place among the results.
        given = _scan(site, _giving(body, [*body.outvars[:carry], *kept.values()]), carry)
        rows = dict(zip(kept, given[carry:], strict=True))
        values = dict(zip(body.invars, site.args, strict=True))
        outs = [
            *given[:carry],
            *(jnp.zeros(shape_of(v), _dtype(v)) for v in site.eqn.outvars[carry:]),
        ]
        for i, derived in zip(wanted, chosen, strict=True):
            root, shape = derived.root, shape_of(site.eqn.outvars[i])
            if isinstance(root, Literal) or root in constant:
                value = root.val if isinstance(root, Literal) else values[root]
                outs[i] = jnp.broadcast_to(derived.of(value), shape)
            else:
                outs[i] = jax.vmap(derived.of)(rows[derived.key] if derived.key in rows else values[root])
        return outs

    def tell(
        self, site: Site, results: Sequence[Atom], chosen: Sequence[Derived], free: Callable[[Atom], bool]
    ) -> None:
        counts: Counter[str] = Counter()
        kept: dict[Any, int] = {}
        for result, derived in zip(results, chosen, strict=True):
            now, before = _dtype(derived.root), _dtype(result)
            if free(derived.root):
                counts["not stacked that are there anyway"] += 1
            elif derived.key in kept:
                counts["stacked once instead of twice"] += 1
            elif derived.steps:
                counts[f"stacked in {now} instead of {before}" if now != before else "not repeated"] += 1
            if not free(derived.root):
                kept[derived.key] = nbytes(derived.root)
        fewer = (sum(map(nbytes, results)) - sum(kept.values())) * site.params["length"]
        what = ", ".join(f"{count} {how}" for how, count in counts.items())
        self.report.did("narrow", f"results of a loop: {what}", f"{amount(fewer)} less", site.line)


def _dtype(atom: Atom) -> Any:
    return getattr(atom.aval, "dtype", None)


def _scan(site: Site, body: Jaxpr, carry: int) -> list[Value]:
    """The scan with another body of the same operands, that stacks what it likes."""
    consts = len(body.invars) - len(site.eqn.invars) + scan_parts(site.eqn)[0]
    args = site.args
    first = consts + carry

    def turn(carried: Sequence[Value], rows: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        outs = inline(body, *args[:consts], *carried, *rows)
        return outs[:carry], outs[carry:]

    return _looped(site, turn, args[consts:first], args[first:])


def _looped(site: Site, turn: Callable[..., Any], carried: list[Value], rows: list[Value]) -> list[Value]:
    p = site.params
    carried, stacked = jax.lax.scan(
        turn, carried, rows, length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
    )
    return [*carried, *stacked]


# ---------------------------------------------------------------- what a loop reads


class _Operands:
    """The rule that has a scan read what its operands are derived from, and derive each row in its body."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, site: Site) -> Sequence[Value] | None:
        if site.name != "scan":
            return None
        body, (consts, carry, _) = site.params["jaxpr"], scan_parts(site.eqn)
        first, made = consts + carry, makers(site.jaxpr)
        operands = site.eqn.invars[first:]
        chosen = narrowest([row_derivations(x, made) for x in operands], lambda _: False)
        kept = {d.key: d for d in chosen}
        if len(kept) == len(chosen) and not any(d.steps for d in chosen):
            return None
        fewer = sum(map(nbytes, operands)) - sum(nbytes(d.root) for d in kept.values())
        self.report.did("narrow", "operands of a loop read narrower", f"{amount(fewer)} less", site.line)
        roots = dict(zip(kept, site.values([d.root for d in kept.values()]), strict=True))
        args = site.args

        def turn(carried: Sequence[Value], rows: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            values = {**roots, **dict(zip(read, rows, strict=True))}
            outs = inline(body, *args[:consts], *carried, *(d.of(values[d.key]) for d in chosen))
            return outs[:carry], outs[carry:]

        read = [key for key, d in kept.items() if not d.whole]
        return _looped(site, turn, args[consts:first], [roots[key] for key in read])


class _Rounded:
    """The rule that has a loop round each row that it reads wide and uses narrow, in its body.

    Else the compiler makes a narrow copy of the whole stack before the loop, alive as long as the stack is
    (its bfloat16 propagation, which goes through barriers and slices). A row of matrices is read as it lies:
    the layout that a product wants would otherwise be given to the whole stack, in another copy.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, site: Site) -> Sequence[Value] | None:
        if site.name != "scan":
            return None
        old, (consts, carry, _) = site.params["jaxpr"], scan_parts(site.eqn)
        body, first = rewrite(old, self), consts + carry
        narrow = {i: d for i, v in enumerate(body.invars) if i >= first and (d := _used_as(body, v))}
        if not narrow:
            return None if body is old else site.bind(jaxpr=body)
        kept = sum(
            nbytes(site.eqn.invars[i]) * d.itemsize // _dtype(body.invars[i]).itemsize
            for i, d in narrow.items()
        )
        self.report.did(
            "narrow", f"{len(narrow)} stacks rounded row by row", f"no copy of {amount(kept)}", site.line
        )
        args = site.args

        def turn(carried: Sequence[Value], rows: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            rows = [_rounded(x, narrow[i]) if i in narrow else x for i, x in enumerate(rows, first)]
            outs = inline(body, *args[:consts], *carried, *rows)
            return outs[:carry], outs[carry:]

        return _looped(site, turn, args[consts:first], args[first:])


def _used_as(body: Jaxpr, var: Var) -> Any:
    """The narrower float dtype that every use of a float makes of it first; None where there is none."""
    own = _dtype(var)
    if own is None or not jnp.issubdtype(own, jnp.floating) or var in body.outvars:
        return None
    found: dict[Any, None] = {}
    for eqn in body.eqns:
        for i, x in enumerate(eqn.invars):
            if x is not var:
                continue
            if eqn.primitive.name == "convert_element_type":
                found[_dtype(eqn.outvars[0])] = None
            elif is_plain_jit(eqn) or eqn.primitive.name == CHECKPOINT:
                found[_used_as(eqn.params["jaxpr"], eqn.params["jaxpr"].invars[i])] = None
            else:
                return None
    if len(found) != 1:
        return None
    (dtype,) = found
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= own.itemsize:
        return None
    # With as many bits of exponent only the significand is rounded: the same numbers, subnormal ones too.
    return dtype if jnp.finfo(dtype).nexp == jnp.finfo(own).nexp else None


def _rounded(row: Value, dtype: Any) -> Value:
    """A row in its own dtype with the precision of another."""
    if row.ndim > 2:
        row = with_layout_constraint(row, Layout(tuple(range(row.ndim))))
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(row, info.nexp, info.nmant)
