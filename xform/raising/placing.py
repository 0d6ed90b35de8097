"""Puts something else in the place of raised operations.

    a = dot_general q k; ...; o = dot_general p v     ->     o = attention q k v

A `Claim` says which values an operation takes and gives, and how the ones are made of the others. What stood
there before and nobody needs any more goes. Only those calls are opened that hold a part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from xform.errors import Decline
from xform.higher_order import enter, hoist
from xform.raising.flat import Chain, Place, View, flat
from xform.report import Report
from xform.rewrite import Site, rewrite
from xform.trace import DropVar, Jaxpr, Value, Var, has_effects, without_dead

Emit = Callable[[Mapping[Var, Value]], Mapping[Var, Value]]
"""From the values of variables of a view to those of others."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """In `view`, `gives` follow from `takes` by `emit`."""

    view: View
    takes: Sequence[Var]
    gives: Sequence[Var]
    emit: Emit


def placed(jaxpr: Jaxpr, claims: Sequence[Claim], report: Report | None = None) -> Jaxpr:
    """The program with all claims fulfilled; itself where there is none.

    The report is told of those whose equations have other results that are needed.

    Raises Decline where a claim's results are needed before all that it takes is there.
    """
    by_place: dict[Place, list[Claim]] = {}
    for claim in claims:
        by_place.setdefault(claim.view.place, []).append(claim)
    return without_dead(_body(jaxpr, (), by_place, report)) if claims else jaxpr


def _body(
    jaxpr: Jaxpr, here: Place, by_place: Mapping[Place, Sequence[Claim]], report: Report | None
) -> Jaxpr:
    mine = by_place.get(here, ())
    depth = len(here)
    deeper = {place[depth][0] for place in by_place if len(place) > depth and place[:depth] == here}
    if not mine and not deeper:
        return jaxpr
    chains = deeper | {c for claim in mine for c in _chains(claim)}
    opens = {chain[:n] for chain in chains for n in range(1, len(chain))}
    view = flat(jaxpr, opens.__contains__, here)
    numbers = {chain: number for number, chain in enumerate(view.chains)}
    first: dict[int, Claim] = {}
    later: dict[int, Claim] = {}
    for claim in mine:
        at = sorted(numbers[claim.view.chains[claim.view.makers[v]]] for v in claim.gives)
        takes = [
            numbers[claim.view.chains[claim.view.makers[v]]] for v in claim.takes if v in claim.view.makers
        ]
        if takes and max(takes) >= at[0]:
            raise Decline("a result of it is needed before all that it takes is computed")
        first[at[0]] = claim
        later.update((n, claim) for n in at[1:])
    made: dict[int, Mapping[Var, Value]] = {}

    def rule(site: Site) -> Sequence[Value] | None:
        if site.path:
            return None
        if site.index in first:
            claim = first[site.index]
            values = claim.emit(_values(claim, view, numbers, site))
            results = _results(claim, values, site, view)
            made[id(claim)] = values
            return results
        if site.index in later and id(later[site.index]) in made:
            claim = later[site.index]
            return _results(claim, made[id(claim)], site, view)
        if (chain := view.chains[site.index]) in deeper:
            params = enter(site.eqn, lambda b, n: _body(b, (*here, (chain, n)), by_place, report))
            params, consts = hoist(site.eqn, params)
            return site.bind(*consts, *site.args, **params)
        return None

    return rewrite(view.jaxpr, rule, report, "kernels")


def _chains(claim: Claim) -> list[Chain]:
    view = claim.view
    return [view.chains[view.makers[v]] for v in (*claim.takes, *claim.gives) if v in view.makers]


def _values(claim: Claim, view: View, numbers: Mapping[Chain, int], site: Site) -> dict[Var, Value]:
    """What a claim takes, by the variables of its own view, where only some calls are open."""
    found: dict[Var, Value] = {}
    for v in claim.takes:
        number = claim.view.makers.get(v)
        if number is None:
            inputs = v not in claim.view.constants or v in view.constants
            found[v] = site.values([v])[0] if inputs else claim.view.constants[v]
            continue
        at = claim.view.eqns[number].outvars.index(v)
        same = view.eqns[numbers[claim.view.chains[number]]].outvars[at]
        found[v] = site.values([same])[0]
    return found


def _results(claim: Claim, made: Mapping[Var, Value], site: Site, view: View) -> list[Value]:
    """The results of an equation of which a claim gives some; the others are read at most on the way to what
    it gives as well.
    """
    own: dict[Chain, dict[int, Value]] = {claim.view.chains[claim.view.makers[v]]: {} for v in claim.gives}
    for v in claim.gives:
        number = claim.view.makers[v]
        own[claim.view.chains[number]][claim.view.eqns[number].outvars.index(v)] = made[v]
    given = own[view.chains[site.index]]
    numbers = {chain: number for number, chain in enumerate(view.chains)}
    replaced = {view.eqns[numbers[chain]].outvars[at] for chain, made_of in own.items() for at in made_of}
    outs = []
    for at, var in enumerate(site.eqn.outvars):
        if at not in given and not isinstance(var, DropVar) and _is_read(view, var, replaced):
            raise Decline("another result of the same equation is used")
        outs.append(given[at] if at in given else site.bind()[at])
    return outs


def _is_read(view: View, var: Var, replaced: Collection[Var]) -> bool:
    """Whether a value is needed for anything but what is replaced."""
    todo, seen = [var], set[int]()
    while todo:
        for number in view.users.get(todo.pop(), ()):
            if number < 0:
                return True
            if number not in seen:
                seen.add(number)
                eqn = view.eqns[number]
                if has_effects(eqn):
                    return True
                todo += [v for v in eqn.outvars if not isinstance(v, DropVar) and v not in replaced]
    return False
