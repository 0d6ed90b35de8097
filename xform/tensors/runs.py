"""Equations of one body taken together: gathered into a run, and taken out as a program of their own.

A pass that treats a block of a program (a layer, say) gathers its equations, wherever they stand, takes them
out, changes them, and splices the result back (`rewrite.splice`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import networkx as nx

from xform.errors import Decline
from xform.rewrite import Value, splice
from xform.trace import Jaxpr, Var, body_effects

Change = Callable[[Jaxpr], Callable[..., Sequence[Value]]]
"""Takes a run as a program; gives the function that stands in its place, of the values that it reads."""


def taken_out(jaxpr: Jaxpr, numbers: Collection[int]) -> Jaxpr:
    """The equations of these numbers as a program.

    It takes what they read, constants of the whole among it, and gives what the rest reads of them, in the
    order of first use and of definition: as `rewrite.interface` lists both of a run.
    """
    inside = frozenset(numbers)
    eqns = [jaxpr.eqns[i] for i in sorted(inside)]
    made = {v for eqn in eqns for v in eqn.outvars}
    reads: dict[Var, None] = {}
    for eqn in eqns:
        reads.update((v, None) for v in eqn.invars if isinstance(v, Var) and v not in made)
    outside = [eqn for i, eqn in enumerate(jaxpr.eqns) if i not in inside]
    used = {v for eqn in outside for v in eqn.invars if isinstance(v, Var)}
    used |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    live = [v for eqn in eqns for v in eqn.outvars if v in used]
    part = jaxpr.replace(
        constvars=[],
        invars=list(reads),
        outvars=live,
        eqns=eqns,
        consts=[],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return part.replace(effects=body_effects(part))


def gathered(jaxpr: Jaxpr, groups: Sequence[Collection[int]]) -> tuple[Jaxpr, list[int]]:
    """The program with the equations of each group next to each other; where each group starts now.

    Groups are disjoint. The order otherwise stays, as far as the dataflow lets it, and effects keep theirs.
    Raises Decline where two groups need each other.
    """
    home = {i: group for group, numbers in enumerate(groups) for i in numbers}
    first = {group: min(numbers) for group, numbers in enumerate(groups)}
    node = [first[home[i]] if i in home else i for i in range(len(jaxpr.eqns))]
    members: dict[int, list[int]] = {}
    order = nx.DiGraph()
    maker: dict[Var, int] = {}
    effect: int | None = None
    for i, eqn in enumerate(jaxpr.eqns):
        members.setdefault(node[i], []).append(i)
        order.add_node(node[i])
        before = {maker[v] for v in eqn.invars if isinstance(v, Var) and v in maker}
        if eqn.effects:
            before |= set() if effect is None else {effect}
            effect = node[i]
        order.add_edges_from((b, node[i]) for b in before if b != node[i])
        maker.update((v, node[i]) for v in eqn.outvars)
    try:
        sequence = list(nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:
        raise Decline("two blocks of equations each need what the other computes") from None
    numbers = [i for n in sequence for i in members[n]]
    place = {i: k for k, i in enumerate(numbers)}
    starts = [place[first[group]] for group in range(len(groups))]
    if numbers == list(range(len(numbers))):
        return jaxpr, starts
    return jaxpr.replace(eqns=[jaxpr.eqns[i] for i in numbers], debug_info=jaxpr.debug_info), starts


def replaced(jaxpr: Jaxpr, runs: Sequence[tuple[Collection[int], Change]], name: str) -> Jaxpr:
    """The program with what each change gives in the place of its equations."""
    changed = [change(taken_out(jaxpr, numbers)) for numbers, change in runs]
    jaxpr, starts = gathered(jaxpr, [numbers for numbers, _ in runs])
    # The last first, so that the numbers of the others stay.
    for start, (numbers, _), emit in sorted(
        zip(starts, runs, changed, strict=True), reverse=True, key=_start
    ):
        jaxpr = splice(jaxpr, start, start + len(numbers), emit, name)
    return jaxpr


def _start(entry: tuple[int, object, object]) -> int:
    return entry[0]
