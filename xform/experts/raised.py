"""Other ways to write a mixture of experts than tokens sorted by expert, made that operation.

    dispatch, combine: products with masks of experts' places    ->    z = operation[experts] ids x w
                                                                       y = sum_j gates[m,j] z[m,j]

Where products with experts' weights are is told by `raising.sending`; what region they are in and what is
done there for one token by one expert, by `around` and `single`; who chose, by `choices`. Nothing is taken
but what comes out so for numbers drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from xform.errors import Decline
from xform.experts import capacity
from xform.experts.around import around
from xform.higher_order import is_plain_jit
from xform.raising.choosing import CHOICES, is_float
from xform.raising.flat import View, flat
from xform.raising.placing import Claim, placed
from xform.raising.sending import Product, Sending
from xform.report import Report
from xform.trace import Jaxpr, Var

WHAT = "a mixture of experts"


def raised(jaxpr: Jaxpr, name: str, report: Report) -> Jaxpr:
    """The program with each mixture of experts as tokens sorted by expert; itself where there is none. The
    report is told of each, and of what nearly is one, under the name of a pass.
    """
    claims: list[Claim] = []
    todo = [flat(jaxpr, calls=is_plain_jit)]
    while todo:
        view = todo.pop(0)
        todo += view.inner()
        if not _may_have(view):
            continue
        sending = Sending(view)
        products, nears = sending.found()
        for near in nears:
            report.declined(name, WHAT, near.why, near.line)
        for group in _groups(products):
            line = view.line(group[0].number)
            try:
                claims.append(_claim(sending, group))
            except Decline as why:
                report.declined(name, WHAT, str(why), line)
            else:
                report.did(name, f"{WHAT} takes tokens sorted by expert", "", line)
    with jax.named_scope("experts"):
        return placed(jaxpr, claims, report)


def _may_have(view: View) -> bool:
    names = {eqn.primitive.name for eqn in view.eqns}
    chooses = names & CHOICES or any(not is_float(v) for v in view.jaxpr.invars)
    return bool(chooses and names & {"dot_general", "scan", "while"})


def _groups(products: Sequence[Product]) -> Iterator[list[Product]]:
    """Products that something in common chose, with weights of the same experts' axis."""
    left = list(products)
    while left:
        first = left.pop(0)
        group = [first]
        for p in list(left):
            if p.axes == first.axes and p.keys & first.keys and p.style != "loop":
                group.append(p)
                left.remove(p)
        yield group


def _claim(sending: Sending, group: Sequence[Product]) -> Claim:
    weights = frozenset[Var](sending.pure)
    region = around(sending.view, sending.scope, group, weights)
    if region.sent:
        return capacity.claim(region)
    raise Decline("every token goes through every expert")
