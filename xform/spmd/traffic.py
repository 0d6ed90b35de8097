"""What a program sends against what its plan must send, and why it sends more where it does.

The bound, of weights that lie in parts over the axes of the batch: each is gathered once for the forward pass
and once for the backward pass where that reads it too, in the dtype in which it is multiplied, and its
gradient is scattered once, in the dtype in which it is born; each at (n-1)/n of its bytes on n devices. Axes
of the batch that do not divide a weight add the sum of a device's part of its gradient, 2(n-1)/n. What a
tensor axis sends are activations: it has no bound here, and is told beside.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from xform.higher_order import bodies, equations, operands
from xform.movement import nbytes as nbytes_of
from xform.ops.resident import ACCUMULATOR, PLACE, SETTLED, STACKED, TOGETHER
from xform.ops.rows import reorder_of
from xform.report import Traffic, amount
from xform.spmd.ledger import Sent
from xform.spmd.torus import Staged
from xform.spmd.values import GRADIENT, WEIGHT
from xform.spmd.walk import MOVES
from xform.trace import Jaxpr, Var, name_stack, shape_of

SMALL = 0.001
"""Of the bytes a step: what is left out of the report's reasons."""

ROWS = frozenset({"dynamic_slice", "reduce_precision"})
"""How a chunk's rows are taken of a stack, and rounded, before they come together."""

LINES = 8
"""The most lines of the program whose activations the report names."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight as the bound sees it. nbytes: of the part that a device multiplies by, on all axes of the
    batch.

    ways: the devices that it is divided among along the batch; copies: those along the batch that have the
    same part. passes: how many of forward and backward read it. trained: it has a gradient.
    """

    path: str
    nbytes: float
    ways: int
    copies: int
    passes: int
    trained: bool

    @property
    def once(self) -> float:
        """The bytes of one gather, or of one scatter of the gradient."""
        return self.nbytes * (self.ways - 1) / self.ways

    @property
    def bound(self) -> float:
        summed = self.nbytes / self.ways * 2 * (self.copies - 1) / self.copies
        return self.once * (self.passes + self.trained) + (summed if self.trained else 0.0)


def traffic(sent: Sequence[Sent], weights: Sequence[Weight], staged: Staged, batch: Sequence[str]) -> Traffic:
    """Sums up the collectives of a program. batch: the plan's axes that the batch lies over."""
    total = sum(s.total for s in sent)
    own = {p for axis in batch for p in staged.parts[axis]}
    axes: dict[str, dict[str, float]] = {}
    for s in sent:
        stage = "+".join(a for a in staged.mesh.axis_names if a in s.axes)
        name = "+".join(dict.fromkeys(staged.owner(a) for a in stage.split("+")))
        stages = axes.setdefault(name, {})
        stages[stage] = stages.get(stage, 0.0) + s.total
    gathers: dict[str, list[Sent]] = {}
    of_weights = 0.0
    other: dict[tuple[str, str, str], float] = {}
    for s in sent:
        path = _weight(s)
        if path and own.issuperset(s.axes):
            gathers.setdefault(path, []).append(s)
            of_weights += s.total
        elif own.issuperset(s.axes) and (s.kind in ("reduce-scatter", "all-reduce") or GRADIENT in s.where):
            of_weights += s.total
        elif s.total > SMALL * total:
            key = (s.kind, "+".join(s.axes), s.line)
            other[key] = other.get(key, 0.0) + s.total
    bound = sum(w.bound for w in weights)
    brought = sum(s.total for group in gathers.values() for s in group)
    reasons = [*_repeated(gathers, total), *_looped(weights, gathers, of_weights - brought)]
    ranked = sorted(other.items(), key=lambda item: -item[1])
    for (kind, names, line), n in ranked[:LINES]:
        reasons.append((f"{amount(n)} of {kind} over {names}", "activations", line))
    if left := ranked[LINES:]:
        reasons.append((f"{amount(sum(n for _, n in left))} in {len(left)} others", "activations", ""))
    return Traffic(total, of_weights, bound, total - of_weights, axes, batch, reasons)


def _weight(s: Sent) -> str:
    """The path of the weight that a gather brings together, or ''."""
    found = re.search(rf"{WEIGHT}([^/()]*)", s.where)
    return found[1] if found else ""


def _looped(
    weights: Sequence[Weight], gathers: Mapping[str, Sequence[Sent]], summed: float
) -> list[tuple[str, str, str]]:
    """What a loop around the whole model, over microbatches, has done anew at every turn, if there is one.
    summed: bytes of gradients that are summed over devices.
    """
    found: list[tuple[str, str, str]] = []
    often: Counter[int] = Counter()
    for w in weights:
        if gathered := w.once * w.passes:
            often[round(sum(s.total for s in gathers.get(w.path, ())) / gathered)] += 1
    for times, count in sorted(often.items()):
        if times > 1:
            why = "in a loop over microbatches; gather = 'step' brings them together once, for their memory"
            found.append((f"{count} weights gathered {times} times in each pass that reads them", why, ""))
    scattered = sum(w.bound - w.once * w.passes for w in weights)
    if scattered and (times := round(summed / scattered)) > 1:
        why = "in a loop over microbatches, which adds up the parts of them that a device keeps"
        found.append((f"gradients summed over devices {times} times", why, ""))
    return found


def _repeated(gathers: Mapping[str, Sequence[Sent]], total: float) -> list[tuple[str, str, str]]:
    """Why weights are gathered more than once, those with the same reason together."""
    found: dict[str, list[tuple[str, float]]] = {}
    for path, own in gathers.items():
        forward = [s for s in own if "transpose(" not in s.where]
        again = [s for s in own if "transpose(" in s.where]
        if not again or not forward:
            continue
        recomputed = any("rematted_computation" in s.where for s in again)
        why = "in the forward pass, and again in the backward pass"
        why += ": their layer is computed again (remat)" if recomputed else ": they lie in parts in between"
        found.setdefault(why, []).append((path, sum(s.total for s in again)))
    return [
        (f"{len(own)} weights gathered twice, {amount(sum(n for _, n in own))} for the second time", why, "")
        for why, own in found.items()
        if sum(n for _, n in own) > SMALL * total
    ]


# ---------------------------------------------------------------- the bound


def weights_of(
    jaxpr: Jaxpr,
    parameters: Mapping[int, str],
    trained: frozenset[int],
    axes: Sequence[Sequence[Sequence[str]]],
    sizes: Mapping[str, int],
    batch: Sequence[str],
    once: bool = False,
) -> list[Weight]:
    """The weights of a program that lies in its layout but has no collectives yet.

    parameters: numbers of inputs, with their paths. axes: of each input, the mesh axes of each dimension.
    once: what one pass has gathered the other reads too.
    """
    found: list[Weight] = []
    differentiated = any("jvp(" in name_stack(eqn) for eqn in equations(jaxpr))
    across = math.prod(sizes[a] for a in batch)
    for number, path in parameters.items():
        var = jaxpr.invars[number]
        mine = [a for dim in axes[number] for a in dim]
        ways = math.prod(sizes[a] for a in mine if a in batch)
        passes, itemsize = _read(jaxpr, {var}, None if differentiated else False)
        if not passes:
            continue
        rest = math.prod(sizes[a] for a in mine if a not in batch)
        nbytes = (math.prod(shape_of(var)) * itemsize if itemsize else nbytes_of(var)) / rest
        reads = 1 if once else len(passes)
        found.append(Weight(path, nbytes, ways, across // ways, reads, number in trained))
    return found


def _read(jaxpr: Jaxpr, held: set[Var], outside: bool | None, in_loop: bool = False) -> tuple[set[bool], int]:
    """Whether the forward pass (False) and the backward pass (True) read a value that is one of `held`, moved
    and cast; and the least bytes of an element where they do. outside: which of them the program is part of.
    What comes together for loops, to stay, is read once by both; a few rows at a time (`in_loop`), by each.
    """
    held, passes, least = set(held), set(), 0
    for eqn in jaxpr.eqns:
        own = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in held]
        if not own:
            continue
        stack = name_stack(eqn)
        back = True if outside or "transpose(" in stack else False if "jvp(" in stack else outside
        inner, name = bodies(eqn), eqn.params.get("name")
        if name == TOGETHER:
            passes |= {False, in_loop}
            size = getattr(getattr(eqn.invars[0].aval, "dtype", None), "itemsize", 0)
            least = min(least or size, size)
        elif name in (ACCUMULATOR, PLACE, SETTLED):
            continue  # it says how something lies
        elif name == STACKED or reorder_of(eqn) is not None or eqn.primitive.name in ROWS:
            held.update(eqn.outvars)
        elif inner:
            for number, body in enumerate(inner):
                passed = {body.invars[k] for k, i in enumerate(operands(eqn, number)) if i in own}
                looped = in_loop or eqn.primitive.name == "scan"
                more, size = _read(body, passed, back, looped)
                passes |= more
                least = min(least or size, size or least)
        elif eqn.primitive.name in MOVES:
            held.update(eqn.outvars)
        elif back is not None:
            passes.add(back)
            size = getattr(getattr(eqn.invars[own[0]].aval, "dtype", None), "itemsize", 0)
            least = min(least or size, size)
    return passes, least
