"""Everything that is recognised in a program, and what nearly was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from xform.raising.attention import attention
from xform.raising.experts import experts
from xform.raising.flat import View, views
from xform.raising.losses import losses
from xform.raising.meaning import Near, Raised
from xform.raising.norms import norms
from xform.raising.recurrences import recurrences
from xform.trace import Jaxpr

RECOGNISERS: dict[str, Callable[[View], Iterator[Raised | Near]]] = {
    "attention": attention,
    "cross_entropy": losses,
    "experts": experts,
    "linear_recurrence": recurrences,
    "norm": norms,
}
"""Each gives the operations of one kind in a body."""


@dataclasses.dataclass(frozen=True)
class Found:
    """raised: operations, outer bodies first, in program order. declined: near misses."""

    raised: tuple[Raised, ...]
    declined: tuple[Near, ...]


def find(jaxpr: Jaxpr, only: str = "") -> Found:
    """What a program means; `only`: of one kind."""
    raised: list[Raised] = []
    declined: list[Near] = []
    for view in views(jaxpr):
        here: list[Raised] = []
        for name, recognise in RECOGNISERS.items():
            if only in ("", name):
                for each in recognise(view):
                    (here if isinstance(each, Raised) else declined).append(each)  # type: ignore[arg-type]
        raised += sorted(here, key=lambda r: r.number)
    return Found(tuple(raised), tuple(declined))
