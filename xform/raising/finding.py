"""Everything that is recognised in a program, and what nearly was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from xform.raising.attention import attention
from xform.raising.experts import experts
from xform.raising.flat import View, views
from xform.raising.losses import losses
from xform.raising.meaning import Near, Raised
from xform.raising.norms import norms
from xform.raising.recurrences import recurrences
from xform.trace import Jaxpr, Tracer

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


def find(jaxpr: Jaxpr, *only: str) -> Found:
    """What a program means; `only`: of some kinds."""
    with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
        return _find(_of_what_is_known(jaxpr), only)


def _find(jaxpr: Jaxpr, only: Sequence[str]) -> Found:
    raised: list[Raised] = []
    declined: list[Near] = []
    for view in views(jaxpr):
        here: list[Raised] = []
        for name, recognise in RECOGNISERS.items():
            if not only or name in only:
                for each in recognise(view):
                    if isinstance(each, Raised):
                        here.append(each)
                    else:
                        declined.append(each)
        raised += sorted(here, key=lambda r: r.number)
    return Found(tuple(raised), tuple(declined))


def _of_what_is_known(jaxpr: Jaxpr) -> Jaxpr:
    """The program with constants that are known only when it runs, tracers that it closes over, as inputs."""
    pairs = list(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    later = [v for v, value in pairs if isinstance(value, Tracer)]
    if not later:
        return jaxpr
    known = [(v, value) for v, value in pairs if not isinstance(value, Tracer)]
    return jaxpr.replace(
        constvars=[v for v, _ in known],
        consts=[value for _, value in known],
        invars=[*jaxpr.invars, *later],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
