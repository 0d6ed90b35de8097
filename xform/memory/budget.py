"""Finds the choice that meets a budget of device memory: a search between at most three compilations.

The first compilation is of the step that keeps nothing; it says what the rest takes. A choice adds at most
the bytes that it keeps, as the step's own arrays have them: its loops compute less and hold less else. The
best choice by that, without the host, is compiled second. What it takes corrects the prediction of all
others, and if one of them is better, with the host or without, or if it did not fit, that one is compiled
third. What is returned has been compiled and fits. Where no compiler is asked (CPU), a liveness estimate
stands in for it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from xform.errors import PlanError
from xform.higher_order import equations
from xform.memory.choice import Choice, Choices
from xform.memory.trial import Trial
from xform.report import Report, amount
from xform.trace import Jaxpr

UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)}
UNITS |= {f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)}

MARGIN = 0.002
"""Of the budget: what the last compilation's prediction leaves free, since after it there is no other."""

HOST_MARGIN = 0.05
"""The same where none with offloads was compiled yet: they change the schedule of a loop, and with it what is
alive in it."""


def parse_size(text: str | int, where: str) -> int:
    """Bytes, from `14GiB`, `15.5GB`, `900MiB` or a number. Raises PlanError."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    if isinstance(text, bool) or found is None or found[2] not in UNITS or float(found[1]) <= 0:
        raise PlanError(
            f"{where} = {text!r} is no amount of memory: write 14GiB, 15.5GB or a number of bytes"
        )
    return int(float(found[1]) * UNITS[found[2]])


@dataclasses.dataclass(frozen=True)
class Tried:
    """A choice whose step was made: what it was predicted to take, and what it takes, bytes on a device."""

    choice: Choice
    predicted: float
    peak: float


@dataclasses.dataclass(frozen=True)
class Found:
    """The choice, and all that were made on the way, in order; `none` is what the step takes that keeps
    nothing.
    """

    tried: Tried
    all: tuple[Tried, ...]
    none: float
    compiled: int  # how many compilations that took


def find(budget: int, where: str, none: Trial, choices: Choices, make: Callable[[Choice], Trial]) -> Found:
    """The best choice that fits. `none`: the step that keeps nothing; `make` makes the step of a choice.

    Raises PlanError, beginning with `where`, with the least that can be met.
    """
    base = none.peak if math.isfinite(none.peak) else max(none.estimate, float(budget))
    tried = [Tried(choices.nothing, none.peak, none.peak)]
    offset = 0.0

    def attempt(choice: Choice) -> None:
        nonlocal offset
        peak, predicted = make(choice).peak, base + choice.nbytes + offset
        tried.append(Tried(choice, predicted, peak))
        offset += (peak if math.isfinite(peak) else max(predicted, float(budget))) - predicted

    # What is kept is a bound: loops that keep more compute less and hold less else.
    first = choices.best(budget - base, host=False) or choices.smallest
    if first != choices.nothing:
        attempt(first)
    room = budget * (1 - MARGIN) - base - offset
    ways = [choices.best(room, host=False)]
    if first.offload:
        ways.append(choices.best(room, host=True))
    elif tried[-1].peak <= budget:
        ways.append(choices.best(room - HOST_MARGIN * budget, host=True))
    best = _best(tried, budget)
    second = min((c for c in ways if c is not None), key=_rank, default=choices.smallest)
    if all(second != t.choice for t in tried) and (best is None or _rank(second) < _rank(best.choice)):
        attempt(second)
    best = _best(tried, budget)
    if best is None:
        least = min(tried, key=lambda t: t.peak)
        said = "the compiler's figure" if none.is_compiled else "an estimate"
        enough = amount(_rounded_up(least.peak))
        raise PlanError(
            f"{where}: {amount(budget)} cannot be met: the smallest budget that can is {enough}"
            f" ({said}), with {_spelled(least.choice)}"
        )
    return Found(best, tuple(tried), none.peak, len(tried) if none.is_compiled else 0)


def nothing_to_choose(where: str, jaxpr: Jaxpr) -> str:
    """Why a step has no layers to choose for."""
    remats = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "remat2"]
    if any(eqn.params["differentiated"] for eqn in remats):
        return (
            f"{where}: no layer is left to choose for: the model calls jax.checkpoint itself;"
            ' existing = "override" takes its calls away'
        )
    return f"{where}: the program differentiates no layer: there is no backward pass to keep anything for"


def _rounded_up(nbytes: float) -> float:
    """Bytes up to the next that are written with two decimals: a budget of these can be met."""
    if not math.isfinite(nbytes):
        return nbytes
    scale = next((unit for unit in (1e9, 1e6, 1e3) if nbytes >= unit), 100.0)
    return math.ceil(nbytes / scale * 100) / 100 * scale


def _rank(choice: Choice) -> tuple[bool, float]:
    return choice.waiting > 0, choice.seconds


def _best(tried: list[Tried], budget: int) -> Tried | None:
    fitting = [t for t in tried if t.peak <= budget]
    return min(fitting, key=lambda t: _rank(t.choice), default=None)


def _spelled(choice: Choice) -> str:
    if not choice.offload:
        return "everything computed again"
    return f"everything computed again but {', '.join(choice.offload)}, on the host"


def tell(report: Report, found: Found, choices: Choices, budget: int) -> None:
    """What was chosen, and what each choice bought."""
    choice, cost = found.tried.choice, found.tried.choice.cost
    kept = [*choice.save, *choice.offload]
    peak, predicted = amount(found.tried.peak), amount(found.tried.predicted)
    if found.compiled:
        how = f"the compiler's peak is {peak}, predicted {predicted}, in {found.compiled} compilations"
    else:
        how = f"an estimate of the peak, {peak}: no compiler was asked, as a CPU's plans no memory"
    report.did("remat", f"met a budget of {amount(budget)} a device", how)
    for name in choice.save:
        report.did("remat", f"saves {name}: +{_bought(choices, kept, name)}")
    for name in choice.offload:
        report.did("remat", f"offloads {name}: {_bought(choices, kept, name)}, in host memory")
    none = choices.cost(())
    report.did(
        "remat",
        f"computes {work(cost.flops)} a device and step again",
        f"of {work(none.flops)} with nothing kept, which takes {amount(found.none)}",
    )
    if choice.waiting > 0:
        report.declined(
            "remat",
            "a budget met without waiting for the host",
            f"nothing else fits: {choice.waiting * 1e3:.0f} ms a step of transfers are not hidden",
        )
    if choices.left_out:
        report.declined(
            "remat", f"a choice for {', '.join(choices.left_out)}", "others buy more for each byte"
        )


def _bought(choices: Choices, kept: list[str], name: str) -> str:
    """What a name takes, and how much more would be computed again without it."""
    with_it, without = choices.cost(kept), choices.cost([k for k in kept if k != name])
    saved = work(without.flops - with_it.flops)
    return f"{amount(with_it.held[name])}, {saved} not computed again"


def work(flops: float) -> str:
    """Floating-point operations as a person reads them: `3.10 TFLOP`."""
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= scale:
            return f"{flops / scale:.2f} {unit}"
    return f"{flops:.0f} FLOP"
