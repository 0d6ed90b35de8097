"""How often the loops of an HLO module run, by following numbers.

A loop ends by a comparison of what it carries with a limit, and both may come to it through copies, tuples,
fusions and enclosing loops. So its condition and its body are evaluated symbolically (`evaluate`), as
functions of what is carried; the start and the limit are then followed outwards through the bindings (`Bind`)
of the computations around it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from xform.hlo import module as hlo


@dataclasses.dataclass(frozen=True)
class Carry:
    """What a loop carries at `path`, plus a number."""

    path: hlo.Path
    plus: int = 0


@dataclasses.dataclass(frozen=True)
class Compare:
    direction: str
    left: Value
    right: Value


@dataclasses.dataclass(frozen=True)
class Both:
    left: Value
    right: Value


Value = int | Carry | Compare | Both | None
Bind = Callable[[int, hlo.Path], Value]
"""The value of a computation's parameter, by number and path."""

_SAME = frozenset(["copy", "bitcast", "convert", "reshape", "optimization-barrier"])
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def carried(number: int, path: hlo.Path) -> Value:
    """The binding of a loop's condition and body on their own."""
    return Carry(path)


def evaluate(
    module: hlo.Module, computation: hlo.Computation, reference: str, path: hlo.Path, bind: Bind
) -> Value:
    """The number that an operand is, as far as constants, and what `bind` says of parameters, tell it."""
    name, own = hlo.split_reference(reference)
    path = own + path
    instruction = computation.instructions[name]

    def operand(index: int, at: hlo.Path) -> Value:
        return evaluate(module, computation, instruction.operands[index], at, bind)

    match instruction.opcode:
        case "constant":
            return _integer(instruction.inside)
        case "parameter":
            return bind(int(instruction.inside), path)
        case "tuple":
            return operand(path[0], path[1:]) if path else None
        case "get-tuple-element":
            return operand(0, (int(instruction.attribute("index") or 0), *path))
        case "fusion" | "call":
            inner = module.body(instruction.called)
            return evaluate(module, inner, inner.root, path, operand) if inner else None
        case "while":
            return operand(0, path) if passes_through(module, instruction, path) else None
        case "compare":
            return Compare(instruction.attribute("direction") or "", operand(0, ()), operand(1, ()))
        case "and":
            return Both(operand(0, ()), operand(1, ()))
        case "add" | "subtract" | "multiply":
            return _arithmetic(instruction.opcode, operand(0, ()), operand(1, ()))
        case "copy-start":  # (destination, source, context)
            return operand(0, path[1:])
        case "copy-done":
            return operand(0, (0, *path))
        case opcode if opcode in _SAME:
            return operand(0, path)
    return None


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return {"true": 1, "false": 0}.get(text)


def _arithmetic(opcode: str, left: Value, right: Value) -> Value:
    if isinstance(left, int) and isinstance(right, int):
        return {"add": left + right, "subtract": left - right, "multiply": left * right}[opcode]
    if isinstance(left, Carry) and isinstance(right, int) and opcode != "multiply":
        return Carry(left.path, left.plus + (right if opcode == "add" else -right))
    if isinstance(left, int) and isinstance(right, Carry) and opcode == "add":
        return Carry(right.path, right.plus + left)
    return None


def passes_through(module: hlo.Module, loop: hlo.Instruction, path: hlo.Path) -> bool:
    """Whether a loop's body hands on what it carries at `path` as it got it."""
    body = module.body(loop.attribute("body"))
    return body is not None and evaluate(module, body, body.root, path, carried) == Carry(path)


def enter(
    module: hlo.Module, computation: hlo.Computation, call: hlo.Instruction, bind: Bind, first: int = 0
) -> Bind:
    """The binding inside a computation that `call` calls with its operands from `first` on."""

    def inner(number: int, path: hlo.Path) -> Value:
        if call.opcode == "while" and not passes_through(module, call, path):
            return None
        return evaluate(module, computation, call.operands[first + number], path, bind)

    return inner


@dataclasses.dataclass(frozen=True)
class Trips:
    """How often a loop's body runs, and what had to be assumed to say so (empty when nothing)."""

    count: int
    doubt: str = ""


def trips(module: hlo.Module, computation: hlo.Computation, loop: hlo.Instruction, bind: Bind) -> Trips:
    """How often a while loop runs: as XLA noted, else by its condition; 1, with a doubt, if neither tells."""
    noted = re.search(r"known_trip_count\W+n\W+(\d+)", loop.rest)
    if noted:
        return Trips(int(noted[1]))
    condition = module.body(loop.attribute("condition"))
    test = evaluate(module, condition, condition.root, (), carried) if condition else None
    counts = [_count(module, computation, loop, bind, each) for each in _conjuncts(test)]
    known = [count for count in counts if count is not None]
    if not known:
        return Trips(1, "trip count unknown, counted once")
    return min(known, key=lambda count: count.count)


def _conjuncts(test: Value) -> list[Compare]:
    if isinstance(test, Both):
        return _conjuncts(test.left) + _conjuncts(test.right)
    return [test] if isinstance(test, Compare) else []


def _count(
    module: hlo.Module, computation: hlo.Computation, loop: hlo.Instruction, bind: Bind, test: Compare
) -> Trips | None:
    """How often `test` holds, when one side counts by a constant step and the other stays what it is."""
    body = module.body(loop.attribute("body"))
    counter, limit, direction = test.left, test.right, test.direction
    if body is None:
        return None

    def step_of(side: Value) -> int | None:
        after = evaluate(module, body, body.root, side.path, carried) if isinstance(side, Carry) else None
        same = isinstance(after, Carry) and isinstance(side, Carry) and after.path == side.path
        return after.plus if same and isinstance(after, Carry) else None

    if not step_of(counter):
        counter, limit, direction = limit, counter, _FLIPPED.get(direction, "")
    step = step_of(counter)
    if not step or not isinstance(counter, Carry):
        return None
    start = evaluate(module, computation, loop.operands[0], counter.path, bind)
    if isinstance(limit, Carry):
        fixed = (
            evaluate(module, computation, loop.operands[0], limit.path, bind) if step_of(limit) == 0 else None
        )
        limit = fixed + limit.plus if isinstance(fixed, int) else None
    if not isinstance(limit, int):
        return None
    doubt = "" if isinstance(start, int) else "where the loop starts is unknown, taken as 0"
    first = (start if isinstance(start, int) else 0) + counter.plus
    distance = {"LT": limit - first, "LE": limit - first + 1, "GT": first - limit, "GE": first - limit + 1}
    if direction == "NE":
        distance["NE"] = abs(limit - first)
    if direction not in distance:
        return None
    return Trips(max(0, math.ceil(distance[direction] / abs(step))), doubt)
