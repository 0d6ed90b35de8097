"""Where a step measures ranges that are kept: the marks at every depth, and the loops around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from xform.errors import PlanError
from xform.flops import AGAIN
from xform.higher_order import OPAQUE, READ, bodies, equations
from xform.ops.marks import FORWARD, Mark, mark_of
from xform.rewrite import Path
from xform.trace import Jaxpr, JaxprEqn, name_stack, source_line


@dataclasses.dataclass(frozen=True)
class Place:
    """A mark in the program, and its path. loops: the bodies of the loops around it, from the outermost, with
    how many turns each has (0: nobody knows). own: which of them have a range for each turn. again: it is
    computed a second time, for a backward pass. measures: what is measured here is kept.
    """

    mark: Mark
    path: Path
    dtype: Any
    line: str
    loops: tuple[tuple[Path, int], ...]
    own: tuple[bool, ...]
    again: bool
    measures: bool = True


def places_in(jaxpr: Jaxpr, entered: Collection[str], measures: bool) -> list[Place]:
    """All of them. What is computed again measures only where it is not computed before. entered: the
    primitives that a range can be brought into. measures: calibrated ranges are to be found, not others.

    Raises PlanError for a mark whose range cannot be kept, with its line.
    """
    found = list(_found(jaxpr, (), "", False, (), entered))
    first = {place.mark for place in found if not place.again}

    def kept(place: Place) -> bool:
        return measures != bool(place.mark.steps) and not (place.again and place.mark in first)

    return [dataclasses.replace(place, measures=kept(place)) for place in found]


def check_stages(jaxpr: Jaxpr) -> None:
    """Raises PlanError for a range of layers that are stages of a pipeline: which layer's it is follows from
    a table there, not from the turn of a loop.
    """
    regions = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map")
    inside = (each for region in regions for body in bodies(region) for each in equations(body))
    if (found := next(((m, e) for e in inside if (m := mark_of(e)) is not None), None)) is not None:
        mark, eqn = found
        raise PlanError(
            f"quantize: the range of {mark.key} cannot be kept with pipeline in the plan, whose stages run"
            f" its layer ({source_line(eqn)}); {_RULE}: current scaling, int8 or fp8, works there, and"
            " products before and after the layers may keep theirs"
        )


def _found(
    jaxpr: Jaxpr,
    path: Path,
    names: str,
    again: bool,
    loops: tuple[tuple[Path, int], ...],
    entered: Collection[str],
) -> Iterator[Place]:
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name in READ or eqn.primitive.name in OPAQUE:
            continue
        stack = f"{names}/{name_stack(eqn)}"
        if (mark := mark_of(eqn)) is not None:
            second = mark.side in FORWARD and (again or AGAIN in stack)
            yield _place(mark, eqn, (*path, (index, 0)), loops, second)
        for number, body in enumerate(bodies(eqn)):
            inner = (*path, (index, number))
            is_loop = eqn.primitive.name in ("scan", "while")
            around = (*loops, (inner, eqn.params.get("length", 0))) if is_loop else loops
            twice = again or bool(eqn.primitive.name == "remat2" and eqn.params["differentiated"])
            for place in _found(body, inner, stack, twice, around, entered):
                _check_enters(eqn, body, place, entered)
                yield place


def _place(mark: Mark, eqn: JaxprEqn, path: Path, loops: tuple[tuple[Path, int], ...], again: bool) -> Place:
    own = _aligned(mark.loops, [turns for _, turns in loops])
    if own is None or any(apart and not turns for (_, turns), apart in zip(loops, own, strict=True)):
        raise PlanError(
            f"quantize: the range of {mark.key} cannot be kept: its weight is another one in each turn of a "
            f"loop, and nobody knows how many those are ({source_line(eqn)}); use lax.scan, or {_RULE}"
        )
    aval: Any = eqn.invars[0].aval
    return Place(mark, path, aval.dtype, source_line(eqn), loops, own, again)


_RULE = "give it a recipe without delayed and calibrated ranges by a rule"


def _check_enters(eqn: JaxprEqn, body: Jaxpr, place: Place, entered: Collection[str]) -> None:
    """Raises PlanError for a program inside an equation that nothing can be told to."""
    name = eqn.primitive.name
    tests = name == "while" and body is eqn.params["cond_jaxpr"]
    if tests or name not in entered:
        raise PlanError(
            f"quantize: the range of {place.mark.key} ({place.line}) cannot be kept: the product stands in "
            f"{'the condition of a while loop' if tests else name} ({source_line(eqn)}); {_RULE}"
        )


def _aligned(model: Sequence[tuple[int, bool]], turns: Sequence[int]) -> tuple[bool, ...] | None:
    """Which of the loops around a mark have a weight for each turn. They are those that were around the
    product in the model and, outside, others, all of whose turns take the same. What is the same in all turns
    may have been taken out of a loop.
    """
    if not model:
        return (False,) * len(turns)
    *outer, (number, own) = model
    if turns and turns[-1] == number and (found := _aligned(outer, turns[:-1])) is not None:
        return (*found, own)
    return None if own else _aligned(outer, turns)
