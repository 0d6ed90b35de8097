"""Other ways to write a mixture of experts than tokens sorted by expert, made that operation.

    dispatch, combine: products with masks of experts' places    ->    z = operation[experts] ids x w
                                                                       y = sum_j gates[m,j] z[m,j]

Where products with experts' weights are is told by `raising.sending`; what region they are in and what is
done there for one token by one expert, by `around` and `single`; who chose, by `choices`. Nothing is taken
but what comes out so for numbers drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from xform.errors import Decline
from xform.experts import capacity, dense, lookups
from xform.experts.around import around
from xform.experts.drawings import Drawn
from xform.experts.turns import turns
from xform.higher_order import is_plain_jit
from xform.raising.choosing import CHOICES, COMPARISONS, is_float
from xform.raising.flat import flat
from xform.raising.placing import Claim, placed
from xform.raising.sending import Product, Sending
from xform.report import Report
from xform.trace import Jaxpr, Var, shape_of

WHAT = "a mixture of experts"

SIGNS = CHOICES | COMPARISONS | {"exp"}
"""Without any of which nothing is chosen, or nearly so."""

PRODUCTS = frozenset(("dot_general", "scan", "while"))

SCOPE = "turns_of_experts_"
"""What equations are called that do at once what was done in turns."""

TURNS = "experts take turns, and what they make is not added up"


def raised(jaxpr: Jaxpr, name: str, report: Report) -> Jaxpr:
    """The program with each mixture of experts as tokens sorted by expert; itself where there is none. The
    report is told of each, and of what nearly is one, under the name of a pass.
    """
    drawn: Drawn = {}
    given, jaxpr = jaxpr, _at_once(jaxpr, name, report, drawn)
    claims = [claim for _, claim in _found(jaxpr, name, report, drawn)]
    if not claims:
        return given
    with jax.named_scope("experts"):
        return placed(jaxpr, claims, report)


def _at_once(jaxpr: Jaxpr, name: str, report: Report, drawn: Drawn) -> Jaxpr:
    """The program with experts that take turns all at once, where that can be raised then: it is tried. The
    report is told where it cannot.
    """
    loops = [t for sending in _sendings(jaxpr) for t in turns(sending.view, sending.found()[0])]
    tries = {f"{SCOPE}{n}": t for n, t in enumerate(loops)}
    heard, right = Report(), set[str]()
    tried = placed(jaxpr, [t.within(scope) for scope, t in tries.items() if t.claim is not None])
    if tried is not jaxpr:
        for names, _ in _found(tried, name, heard, drawn):
            right |= set("/".join(names).split("/")) & tries.keys()
    for scope, t in tries.items():
        if scope not in right:
            whys = (note.why for note in heard.of("declined") if note.where == t.line)
            report.declined(name, WHAT, t.why or next(whys, TURNS), t.line)
    return placed(jaxpr, [t.within(scope) for scope, t in tries.items() if scope in right])


def _sendings(jaxpr: Jaxpr) -> Iterator[Sending]:
    """Of all bodies in which something may be chosen."""
    todo = [flat(jaxpr, calls=is_plain_jit)]
    while todo:
        view = todo.pop(0)
        todo += view.inner()
        names = {eqn.primitive.name for eqn in view.eqns}
        chooses = names & SIGNS or any(not is_float(v) for v in view.jaxpr.invars)
        if chooses and names & PRODUCTS:
            yield Sending(view)


def _of_turns(sending: Sending) -> Iterator[Product]:
    """Products of experts that took turns: the turns are the first dimension of the weights."""
    view, scope = sending.view, sending.scope
    for number, eqn in enumerate(view.eqns):
        if SCOPE not in view.names[number] or eqn.primitive.name != "dot_general":
            continue
        for side in (1, 0):
            x, w = eqn.invars[1 - side], eqn.invars[side]
            if not isinstance(w, Var) or w not in sending.pure or len(shape_of(w)) < 3:
                continue
            contracted = eqn.params["dimension_numbers"][0][side]
            if 0 not in contracted and len(scope[w][0]) == 1:
                summed = frozenset(f for d in contracted for f in scope[w][d])
                own = frozenset(scope[w][0])
                yield Product(number, "all", x, w, own, summed, shape_of(w)[0], frozenset())
                break


def _found(jaxpr: Jaxpr, name: str, report: Report, drawn: Drawn) -> Iterator[tuple[list[str], Claim]]:
    """All regions of products with experts' weights: the names of their equations, and what stands in their
    place. The report is told of each.
    """
    for sending in _sendings(jaxpr):
        view, (products, nears) = sending.view, sending.found()
        left = [*_of_turns(sending), *(p for p in products if p.style != "loop")]
        for near in nears:
            if SCOPE not in near.where:
                report.declined(name, WHAT, near.why, near.line)
        while left:
            first = left[0]
            try:
                if first.style == "gathered":
                    eqns, claim = lookups.claim(sending, first, drawn)
                else:
                    region = around(view, sending.scope, first, frozenset(sending.pure))
                    eqns = region.eqns
                    left = [p for p in left if p.number not in eqns]
                    claim = (capacity.claim if region.sent else dense.claim)(region, drawn)
            except Decline as why:
                left = [p for p in left if p is not first]
                report.declined(name, WHAT, str(why), view.line(first.number))
                continue
            report.did(name, f"{WHAT} takes tokens sorted by expert", "", view.line(first.number))
            left = [p for p in left if p.number not in eqns]
            yield [view.names[n] for n in eqns], claim
