"""The axis along which a program can be cut into microbatches, found by trying the likeliest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from xform.axes import Factor
from xform.batch.cut import Cut, cut, find_batch, flat
from xform.batch.local import Placed
from xform.batch.states import Mixes, Split
from xform.errors import PlanError
from xform.report import Report
from xform.roles import Roles
from xform.roles.logical import EXAMPLES
from xform.trace import Jaxpr, source_line

NONE = "none of its inputs has a batch that is summed over: name its axis in the plan, as batch"
CHUNKS = (
    "the program goes through the batch in a loop of {0} chunks, and rows of one chunk would be in several of"
    " {1} microbatches: take a number of chunks that is a multiple of the microbatches"
)

RolesOf = Callable[[Jaxpr], Roles]


def cut_along_batch(
    jaxpr: Jaxpr, roles_of: RolesOf, name: str, report: Report, split: Callable[[int, Cut], Split]
) -> Cut | Placed:
    """The program cut along the likeliest axis along which that can be; else what is in the way, with its
    line. name: the pass's. split: into what a batch of so many rows is split.
    """
    jaxpr = flat(jaxpr)
    while True:
        found = _tried(jaxpr, roles_of(jaxpr), split)
        if isinstance(found, Cut):
            return found
        eqn = jaxpr.eqns[found.equation] if found.equation >= 0 else None
        if eqn is None or eqn.primitive.name != "remat2":
            return found
        what = "took away a jax.checkpoint with the loss in it"
        report.did(name, what, "it ends after the sum over the batch", source_line(eqn))
        jaxpr = flat(jaxpr, found.equation)


def _tried(jaxpr: Jaxpr, roles: Roles, split: Callable[[int, Cut], Split]) -> Cut | Placed:
    refused: Placed | None = None
    for factors in find_batch(jaxpr, roles):
        size = prod(f.size for f in factors)
        try:
            found = cut(jaxpr, roles.axes, factors, Split(size, 1))
            if not found.data or not (found.parts or found.gathered):
                continue
            chosen = split(size, found)
            return cut(jaxpr, roles.axes, factors, chosen) if chosen.steps > 1 else found
        except Mixes as why:
            refused = refused or (why if isinstance(why, Placed) else Placed(str(why), ""))
        minor = _minor(jaxpr, roles, factors, split)
        if isinstance(minor, Cut):
            return minor
        refused = minor or refused
    return refused or Placed(NONE, "")


def _minor(
    jaxpr: Jaxpr, roles: Roles, factors: tuple[Factor, ...], split: Callable[[int, Cut], Split]
) -> Cut | Placed | None:
    """The program cut along the minor part of a batch that it takes apart itself, as a loss in chunks does;
    what is in the way, or None where that can be cut no more than the whole.
    """
    size = prod(f.size for f in factors)
    if not {roles.name(f) for f in factors} <= EXAMPLES:
        return None
    for k in range(1, len(factors)):
        minor = factors[k:]
        try:
            chosen = split(size, cut(jaxpr, roles.axes, minor, Split(size, 1)))
            parts = prod(f.size for f in minor)
            if chosen.groups > 1 or parts % chosen.steps:
                return Placed(CHUNKS.format(parts, chosen.parts), "")
            return cut(jaxpr, roles.axes, minor, chosen)
        except Mixes:
            continue
    return None


def divided(
    option: str, size: int, groups: int, found: Cut, paths: Sequence[str], fit: Sequence[int]
) -> PlanError:
    """The error for a batch that a number of microbatches does not divide. paths: of the program's inputs."""
    by = f" on {groups} groups of devices" if groups > 1 else ""
    names = dict(zip(found.jaxpr.invars, paths, strict=False))
    named = ", ".join([names.get(v) or v.aval.str_short() for v in found.data][:3])
    what = ", ".join(map(str, fit)) or "nothing"
    return PlanError(f"{option} does not divide the batch of {size}{by}, of {named}; what does: {what}")
