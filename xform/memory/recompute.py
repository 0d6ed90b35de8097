"""What it takes to compute each tensor of a layer again, given which others are kept: told from a step.

The step is one in which every tensor has its name and none is kept. A layer's backward pass there is one
checkpointed body: what computes forward values again, and what computes gradients and reads some of them.
With some names kept, what is still computed again is what the gradients reach without passing a kept name;
and of the kept names only those that are reached take memory. That is JAX's own rule, so the choice is
counted, not guessed. Keeping takes time too: a loop copies what it keeps into a stack of all its turns, and
the loop backwards copies it out.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from xform.axes import Scope
from xform.flops import AGAIN, terms
from xform.memory.flat import Op, Value, flatten
from xform.memory.liveness import FUSED, PRODUCTS, SAME
from xform.memory.speeds import Speeds
from xform.memory.spread import Spread
from xform.trace import name_stack, shape_of

BACKWARD = "transpose("
"""What JAX calls the backward pass, in name stacks."""

MOVES = 4
"""How often keeping moves a tensor, in a loop: a copy into the stack, and one out of it. In the compiler's
estimates for Llama 7B on v5e, keeping all products and the context takes 17 and 19 million cycles a GB, on
one chip and on sixteen; this gives 18. Of these 8 go into the stack and 5 out of it; the rest is the fusions
of what is kept with what reads it, which there are no longer.
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """An operation that is computed again: its cost on one device, which parts it reads, and, where its
    result has a name, that, what a device holds of it, and the seconds that keeping it takes.
    """

    flops: float
    seconds: float
    reads: tuple[int, ...]
    name: str = ""
    nbytes: float = 0.0
    keeping: float = 0.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """Layers alike. parts: in order; needed: those that gradients read.

    inputs: named values that a layer takes, which are there anyhow, and their bytes. turns: how often it
    runs in one step; rows: how many layers' values are there at once. offloads: whether the compiler can
    keep values of a loop like this in host memory.
    """

    parts: tuple[Part, ...]
    needed: tuple[int, ...]
    inputs: tuple[tuple[str, float], ...]
    turns: int
    rows: int
    offloads: bool

    def again(self, kept: Collection[str]) -> Cost:
        """What is computed again when these names are kept."""
        flops = seconds = 0.0
        held: defaultdict[str, float] = defaultdict(float)
        wanted = set(self.needed)
        for number in range(len(self.parts) - 1, -1, -1):
            if number not in wanted:
                continue
            part = self.parts[number]
            if part.name in kept:
                held[part.name] += part.nbytes * self.rows
                seconds += part.keeping * self.turns
                continue
            flops += part.flops * self.turns
            seconds += part.seconds * self.turns
            wanted.update(part.reads)
        for name, nbytes in self.inputs:
            held[name] += nbytes * self.rows
        return Cost(flops, seconds, dict(held))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What is computed again, a device and step; the seconds of that and of keeping; the bytes that each
    kept name takes.
    """

    flops: float
    seconds: float
    held: Mapping[str, float]


def total(costs: Sequence[Cost]) -> Cost:
    """All of them together."""
    held: defaultdict[str, float] = defaultdict(float)
    for cost in costs:
        for name, nbytes in cost.held.items():
            held[name] += nbytes
    return Cost(sum(c.flops for c in costs), sum(c.seconds for c in costs), dict(held))


def layers_of(spread: Spread, is_ours: Callable[[Any], bool], speeds: Speeds) -> list[Layer]:
    """The layers of a step whose policies are `is_ours`, alike ones together, in program order."""
    found: Counter[Layer] = Counter()
    for scope in spread.axes.scopes:
        eqn = scope.eqn
        if eqn is None or eqn.primitive.name != "remat2":
            continue
        if eqn.params["differentiated"] and is_ours(eqn.params["policy"]):
            found[_layer(spread, scope, speeds)] += 1
    return [
        dataclasses.replace(layer, turns=layer.turns * count, rows=layer.rows * count)
        for layer, count in found.items()
    ]


def _layer(spread: Spread, scope: Scope, speeds: Speeds) -> Layer:
    flat = flatten(spread, scope)
    again = [op for op in flat.ops if AGAIN in op.names]
    number = {value: i for i, op in enumerate(again) for value in op.outs}
    inputs = dict.fromkeys(flat.ins)
    readers = Counter(v for op in flat.ops for v in op.ins)
    loops, stacking = _loops(scope)
    parts = [_part(spread, op, number, readers, speeds, bool(stacking)) for op in again]
    named: list[tuple[str, float]] = []
    for i, op in enumerate(again):
        if op.name == "name" and op.ins and op.ins[0] in inputs:
            named.append((parts[i].name, parts[i].nbytes))
            parts[i] = dataclasses.replace(parts[i], name="")
    reads = [*flat.outs, *(v for op in flat.ops if AGAIN not in op.names for v in op.ins)]
    needed = sorted({number[v] for v in reads if v in number})
    flat_loop = len(loops) == 1 and len(stacking) == 1 and stacking[0] > 1
    return Layer(tuple(parts), tuple(needed), tuple(named), math.prod(loops), math.prod(stacking), flat_loop)


def _loops(scope: Scope) -> tuple[list[int], list[int]]:
    """The lengths of the loops around a body, and of those that go backwards: they take what was stacked.

    A loop over microbatches runs forwards, and what its turns keep takes the same place in each.
    """
    loops: list[int] = []
    stacking: list[int] = []
    outer: Scope | None = scope
    while outer is not None:
        eqn = outer.eqn
        if eqn is not None and eqn.primitive.name == "scan":
            loops.append(int(eqn.params["length"]))
            if BACKWARD in name_stack(eqn):
                stacking.append(loops[-1])
        outer = outer.parent
    return loops, stacking


def _part(
    spread: Spread,
    op: Op,
    number: Mapping[Value, int],
    readers: Mapping[Value, int],
    speeds: Speeds,
    stacked: bool,
) -> Part:
    flops, traffic = _cost(spread, op, readers)
    reads = tuple(sorted({number[v] for v in op.ins if v in number}))
    seconds = max(flops / speeds.flops, traffic / speeds.memory)
    if op.name != "name":
        return Part(flops, seconds, reads)
    nbytes = op.outs[0].nbytes
    copied = MOVES * nbytes / speeds.memory if stacked else 0.0
    return Part(0.0, 0.0, reads, str(op.eqn.params["name"]), nbytes, copied)


def _cost(spread: Spread, op: Op, readers: Mapping[Value, int]) -> tuple[float, float]:
    """The flops of an operation on one device, and the bytes that it moves to and from memory."""
    if op.name in SAME:
        return 0.0, 0.0
    if op.name in PRODUCTS:
        work = 2.0 * math.prod(shape_of(op.eqn.outvars[0])) * terms(op.eqn)
        moved = sum(v.nbytes for v in (*op.ins, *op.outs))
        return work / _shared(spread, op), moved
    if op.name in FUSED:
        return 0.0, sum(v.nbytes for v in op.outs if readers[v] > 1)
    inner = [child for (index, _), child in op.scope.children.items() if index == op.index]
    if not inner:
        return 0.0, sum(v.nbytes for v in (*op.ins, *op.outs))
    turns = op.eqn.params["length"] if op.name == "scan" else 1
    flops = moved = 0.0
    for child in inner:
        body = flatten(spread, child)
        inside = Counter(v for each in body.ops for v in each.ins)
        costs = [_cost(spread, each, inside) for each in body.ops]
        flops += turns * sum(f for f, _ in costs)
        moved += turns * sum(b for _, b in costs)
    return flops, moved


def _shared(spread: Spread, op: Op) -> int:
    """Over how many devices a product is divided: along its result's axes and those it is summed over."""
    specs = [spread.spec(op.scope, v) for v in (*op.eqn.invars[:2], op.eqn.outvars[0])]
    axes = {a for axes in specs[-1] for a in axes}
    if op.name == "dot_general":
        contracted = zip(specs, op.eqn.params["dimension_numbers"][0], strict=False)
        left, right = ({a for d in dims for a in spec[d]} for spec, dims in contracted)
        axes |= left & right
    return spread.ways([tuple(axes)])
