"""Constants in which calls are else alike, made operands of the calls, so that layers differ in values alone.

    remat2 { lt a 3 } x w0                remat2 { lt a n } x w0 3
    remat2 { lt a 4 } x w1        ->      remat2 { lt a n } x w1 4

Two calls of one body that are the same program but for numbers and arrays written into it (a window size, a
layer's index) are made the same program. A call of jit is dissolved for that, if it has to be; jax.checkpoint
takes the constants as operands. What is in a loop, a branch or a custom rule stays as it is, and so does what
a constant has decided while the program was traced: a shape, an exponent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from xform.higher_order import CLOSED, RULES, bodies, enter
from xform.layers.repeats import Keys
from xform.printing.spell import const_key
from xform.rewrite import Path, Rule, Site, rewrite
from xform.trace import Atom, DropVar, Jaxpr, JaxprEqn, Literal, Var, body_effects, inline

CALLS = frozenset({"jit", *CLOSED})
"""Primitives that run their one body once: those that are dissolved, and those that keep it."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A constant in a body: the calls on the way to it, and its value."""

    path: Path
    value: Any


def lifted(jaxpr: Jaxpr) -> Jaxpr:
    """The program without equations that nobody reads, and with such constants as operands; itself if there
    is nothing to do.
    """
    return _Lifting().body(jaxpr)


class _Lifting:
    def __init__(self) -> None:
        self.keys = Keys()
        self.known: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        """A body, changed; one that stands in several places is changed once."""
        if id(jaxpr) not in self.known:
            self.known[id(jaxpr)] = (jaxpr, self.changed(jaxpr))
        return self.known[id(jaxpr)][1]

    def changed(self, jaxpr: Jaxpr) -> Jaxpr:
        jaxpr = pruned(jaxpr)
        eqns, changed = [], False
        for eqn in jaxpr.eqns:
            if bodies(eqn) and eqn.primitive.name not in RULES:
                params = enter(eqn, lambda body, number: self.body(body))
                changed |= params is not eqn.params
                eqn = eqn.replace(params=params)
            eqns.append(eqn)
        if changed:
            jaxpr = jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)
        jaxpr = self.dissolved(jaxpr)
        return self.raised(jaxpr)

    def groups(self, jaxpr: Jaxpr) -> Iterator[tuple[list[int], list[list[Leaf]], list[int]]]:
        """Calls that are alike but for some of their constants: which equations, the constants of each, and
        the numbers of those that differ.
        """
        alike: dict[Hashable, list[int]] = {}
        leaves: dict[int, list[Leaf]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name in CALLS:
                leaves[i] = []
                alike.setdefault(self.outline(eqn, ((i, 0),), leaves[i]), []).append(i)
        for numbers in alike.values():
            columns = zip(*(leaves[i] for i in numbers), strict=True)
            values = [{const_key(leaf.value) for leaf in column} for column in columns]
            if differing := [k for k, each in enumerate(values) if len(each) > 1]:
                yield numbers, [leaves[i] for i in numbers], differing

    def outline(self, eqn: JaxprEqn, path: Path, leaves: list[Leaf]) -> Hashable:
        """What a call does, its constants left open; these are added to `leaves`."""
        (body,) = bodies(eqn)
        numbers: dict[Any, int] = {v: n for n, v in enumerate(body.all_invars)}
        leaves += [Leaf(path, const) for const in body.consts]

        def read(v: Atom) -> Hashable:
            if not isinstance(v, Literal):
                return numbers[v]
            leaves.append(Leaf(path, v.val))
            return v.aval.str_short(), getattr(v.aval, "weak_type", False)

        lines: list[Hashable] = [tuple(str(v.aval) for v in body.all_invars)]
        for i, inner in enumerate(body.eqns):
            operands = tuple(map(read, inner.invars))
            if inner.primitive.name in CALLS:
                what = self.outline(inner, (*path, (i, 0)), leaves)
            else:
                what = self.keys.of(inner)
            lines.append((what, operands))
            numbers.update((v, len(numbers) + k) for k, v in enumerate(inner.outvars))
        return self.keys.shell(eqn), tuple(lines), tuple(map(read, body.outvars))

    def dissolved(self, jaxpr: Jaxpr) -> Jaxpr:
        """The program with the bodies of jit calls that have such a constant in their place."""
        places: set[Path] = set()
        for _, leaves, differing in self.groups(jaxpr):
            for each in leaves:
                places |= {each[k].path[: n + 1] for k in differing for n in range(len(each[k].path))}

        def within(prefix: Path) -> Rule:
            def rule(site: Site) -> Sequence[Any] | None:
                place = (*prefix, *site.path, (site.index, 0))
                if place not in places or site.name in CLOSED:
                    return None
                return inline(rewrite(site.params["jaxpr"], within(place)), *site.args)

            return rule

        return rewrite(jaxpr, within(())) if places else jaxpr

    def raised(self, jaxpr: Jaxpr) -> Jaxpr:
        """The program with such constants, directly in the bodies of calls now, as operands."""
        eqns = list(jaxpr.eqns)
        for numbers, leaves, differing in self.groups(jaxpr):
            for i, each in zip(numbers, leaves, strict=True):
                eqns[i] = _raised(eqns[i], {k: each[k] for k in differing}, iter(range(len(each))))
        if all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
            return jaxpr
        return jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)


def _raised(eqn: JaxprEqn, open_: dict[int, Leaf], count: Iterator[int]) -> JaxprEqn:
    """The call with these of its constants as its last operands. `count` numbers them as `outline` does."""
    (body,) = bodies(eqn)
    operands: list[Atom] = []
    inputs: list[Var] = []
    for _ in body.consts:
        next(count)

    def read(v: Atom) -> Atom:
        if not isinstance(v, Literal) or next(count) not in open_:
            return v
        operands.append(v)
        inputs.append(Var(v.aval))
        return inputs[-1]

    eqns = []
    for inner in body.eqns:
        before = list(inner.invars)
        new = inner.replace(invars=[read(v) for v in before])
        if inner.primitive.name in CALLS:
            new = _raised(new, open_, count)
            more = new.invars[len(before) :]
            new = new.replace(invars=[*new.invars[: len(before)], *map(_again(operands, inputs), more)])
        eqns.append(new)
    outs = [read(v) for v in body.outvars]
    if not inputs:
        return eqn
    new_body = body.replace(
        invars=[*body.invars, *inputs],
        outvars=outs,
        eqns=eqns,
        debug_info=body.debug_info.with_unknown_names(),
    )
    name = CLOSED[eqn.primitive.name]
    return eqn.replace(invars=[*eqn.invars, *operands], params={**eqn.params, name: new_body})


def _again(operands: list[Atom], inputs: list[Var]) -> Any:
    """Makes a constant that an inner call takes one that the outer takes."""

    def passed(literal: Atom) -> Atom:
        operands.append(literal)
        inputs.append(Var(literal.aval))
        return inputs[-1]

    return passed


def pruned(jaxpr: Jaxpr) -> Jaxpr:
    """A body without the equations whose results nobody reads and that have no effects."""
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars if not isinstance(v, DropVar)):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    if len(kept) == len(jaxpr.eqns):
        return jaxpr
    new = jaxpr.replace(eqns=kept[::-1], debug_info=jaxpr.debug_info)
    return new.replace(effects=body_effects(new))
