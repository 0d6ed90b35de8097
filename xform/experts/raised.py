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
from xform.experts import capacity, dense
from xform.experts.around import around
from xform.higher_order import is_plain_jit
from xform.raising.choosing import CHOICES, COMPARISONS, is_float
from xform.raising.flat import View, flat
from xform.raising.placing import Claim, placed
from xform.raising.sending import Product, Sending
from xform.report import Report
from xform.trace import Jaxpr

WHAT = "a mixture of experts"

SIGNS = CHOICES | COMPARISONS | {"exp"}
"""Without any of which nothing is chosen, or nearly so."""


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
        claims += _claims(sending, products, name, report)
    with jax.named_scope("experts"):
        return placed(jaxpr, claims, report)


def _may_have(view: View) -> bool:
    names = {eqn.primitive.name for eqn in view.eqns}
    chooses = names & SIGNS or any(not is_float(v) for v in view.jaxpr.invars)
    return bool(chooses and names & {"dot_general", "scan", "while"})


def _claims(sending: Sending, products: Sequence[Product], name: str, report: Report) -> Iterator[Claim]:
    """Of all regions of products with experts' weights. The report is told of each."""
    view, left = sending.view, list(products)
    while left:
        first = left[0]
        try:
            region = around(view, sending.scope, first, frozenset(sending.pure))
            left = [p for p in left if p.number not in region.eqns]
            yield (capacity.claim if region.sent else dense.claim)(region)
        except Decline as why:
            left = [p for p in left if p is not first]
            report.declined(name, WHAT, str(why), view.line(first.number))
        else:
            report.did(name, f"{WHAT} takes tokens sorted by expert", "", view.line(first.number))
