"""Reads HLO text into instructions, types and trip counts; changes nothing.

`parse` takes the text XLA prints for a module, scheduled or not, and keeps of every instruction what can be asked of it: its
opcode, operands, type and attributes. Both spellings of a tuple's element are understood, `get-tuple-element(%t), index=1`
and the dumps' `%t#1`. What the program does a number of times is known only by following numbers: `Loop.trips` evaluates a
loop's condition and step symbolically through copies, tuples, fusions and enclosing loops (`evaluate`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|tf32|[suf]\d+(?:e\d+m\d+\w*)?|c64|c128)\[([\d,<=]*)\]")
_NAME = r"[\w.\-]+"
_HEAD = re.compile(rf"^\s*(ROOT )?%?({_NAME}) = ")
_COMPUTATION = re.compile(rf"^(ENTRY )?%?({_NAME})\s*(?:\(.*\)\s*->.*)?\{{\s*$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_REFERENCE = re.compile(rf"%({_NAME}(?:#[\d.]+)?)")
_COMMENT = re.compile(r"/\*.*?\*/")

Path = tuple[int, ...]
HOST_SPACE = 5  # the memory space, S(5) in a layout, that is the host's


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array: element type, dimensions, and the memory space its layout names (5 is the host's)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def bits(self) -> int:
        known = _BITS.get(self.dtype)
        return int(re.findall(r"\d+", self.dtype)[0]) if known is None else known

    @property
    def nbytes(self) -> int:
        return (math.prod(self.dims) * self.bits + 7) // 8


def arrays(text: str) -> list[Array]:
    """Every array in a type, in order: one, or those of a tuple."""
    found = []
    for match in _ARRAY.finditer(text):
        dims = tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)
        layout = re.match(r"\{[^}]*S\((\d+)\)", text[match.end() : match.end() + 120])
        found.append(Array(match[1], dims, int(layout[1]) if layout else 0))
    return found


def element(text: str, path: Path) -> str:
    """The type at `path` inside a tuple's type."""
    for index in path:
        parts = _split(_COMMENT.sub("", text).strip()[1:-1])
        text = parts[index].strip()
    return text


def _split(text: str) -> list[str]:
    """The comma-separated parts of a text, commas in brackets aside."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line. `operands` are names, those of tuple elements as `name#1`; `inside` is what the brackets hold."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    inside: str
    rest: str

    def attribute(self, key: str) -> str | None:
        """The value of `key=` up to the next comma outside brackets, a leading % dropped."""
        match = re.search(rf"(?:^|[\s,]){key}=", self._structure)
        if match is None:
            return None
        return _split(self._structure[match.end() :])[0].strip().lstrip("%")

    @functools.cached_property
    def _structure(self) -> str:
        ends = [at for at in (self.rest.find(", metadata={"), self.rest.find(", backend_config=")) if at >= 0]
        return self.rest[: min(ends)] if ends else self.rest

    @property
    def target(self) -> str:
        """The target of a custom call."""
        return (self.attribute("custom_call_target") or "").strip('"')

    @property
    def called(self) -> str | None:
        """The computation of a fusion, call or async wrapper."""
        return self.attribute("calls") or self.attribute("to_apply")

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return match[1] if match else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate, in programs compiled to the end; 0 where it has none."""
        match = re.search(r'"estimated_cycles":"?(\d+)', self.rest)
        return int(match[1]) if match else 0


@dataclasses.dataclass(eq=False)
class Computation:
    name: str
    instructions: dict[str, Instruction]
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def type_of(self, reference: str) -> str:
        """The type of an operand as it is written: `name`, or `name#1`."""
        name, path = _reference(reference)
        return element(self.instructions[name].type, path)


@dataclasses.dataclass(eq=False)
class Module:
    """`devices`: partitions times replicas."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    devices: int

    def body(self, name: str | None) -> Computation | None:
        return self.computations.get(name) if name else None

    def branches(self, conditional: Instruction) -> list[Computation]:
        """The computations of a conditional, in order."""
        listed = conditional.attribute("branch_computations")
        names: Sequence[str | None] = (
            _REFERENCE.findall(listed)
            if listed
            else [
                conditional.attribute("true_computation"),
                conditional.attribute("false_computation"),
            ]
        )
        return [self.computations[name] for name in names if name in self.computations]


def parse(text: str) -> Module:
    """The module that a text of XLA describes. ValueError when it has no ENTRY computation."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry: Computation | None = None
    pending = ""

    def flush() -> None:
        nonlocal pending
        if pending and current is not None:
            instruction, is_root = _instruction(pending)
            current.instructions[instruction.name] = instruction
            if is_root or not current.root:
                current.root = instruction.name
        pending = ""

    for line in text.splitlines():
        if current is None:
            head = _COMPUTATION.match(line)
            if head and not line[0].isspace():
                current = computations[head[2]] = Computation(head[2], {})
                entry = current if head[1] else entry
        elif line.startswith("}"):
            flush()
            current = None
        elif _HEAD.match(line):
            flush()
            pending = line
        elif pending:  # a long constant goes over several lines
            pending += " " + line.strip()
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    header = text[: text.find("\n")]
    counts = [re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count")]
    name = re.match(rf"HloModule ({_NAME})", header)
    return Module(name[1] if name else "", computations, entry, math.prod(int(n[1]) for n in counts if n))


def _instruction(line: str) -> tuple[Instruction, bool]:
    head = _HEAD.match(line)
    assert head is not None
    start = head.end()
    stop = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, stop)
    if opcode is None:
        raise ValueError(f"not an HLO instruction: {line.strip()[:120]}")
    close = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(_REFERENCE.findall(inside))
    return Instruction(head[2], opcode[1], line[start:stop], operands, inside, line[close + 1 :]), bool(
        head[1]
    )


def _closing(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`."""
    depth, at = 0, start
    while True:
        close = text.find(")", at)
        if close < 0:
            return len(text) - 1
        depth += text.count("(", at, close) - 1
        if depth == 0:
            return close
        at = close + 1


def _reference(reference: str) -> tuple[str, Path]:
    name, _, path = reference.partition("#")
    return name, tuple(int(index) for index in path.split(".")) if path else ()


# Numbers, symbolically. A loop's condition is a comparison of what it carries.


@dataclasses.dataclass(frozen=True)
class Carry:
    """What a loop carries at `path`, plus a number."""

    path: Path
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
Bind = Callable[[int, Path], Value]
"""The value of a computation's parameter, by number and path."""

_SAME = frozenset(
    ["copy", "bitcast", "convert", "reshape", "optimization-barrier", "copy-done", "copy-start"]
)
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def carried(number: int, path: Path) -> Value:
    """The binding of a loop's condition and body on their own."""
    return Carry(path)


def evaluate(module: Module, computation: Computation, reference: str, path: Path, bind: Bind) -> Value:
    """The number that an operand is, as far as it can be told: of constants, and of what `bind` says of parameters."""
    name, own = _reference(reference)
    path = own + path
    instruction = computation.instructions[name]

    def operand(index: int, at: Path) -> Value:
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


def passes_through(module: Module, loop: Instruction, path: Path) -> bool:
    """Whether a loop's body hands on what it carries at `path` as it got it."""
    body = module.body(loop.attribute("body"))
    return body is not None and evaluate(module, body, body.root, path, carried) == Carry(path)


def enter(module: Module, computation: Computation, call: Instruction, bind: Bind, first: int = 0) -> Bind:
    """The binding inside a computation that `call` calls with its operands from `first` on."""

    def inner(number: int, path: Path) -> Value:
        if call.opcode == "while" and not passes_through(module, call, path):
            return None
        return evaluate(module, computation, call.operands[first + number], path, bind)

    return inner


@dataclasses.dataclass(frozen=True)
class Trips:
    """How often a loop's body runs, and what had to be assumed to say so (empty when nothing)."""

    count: int
    doubt: str = ""


def trips(module: Module, computation: Computation, loop: Instruction, bind: Bind) -> Trips:
    """The trip count of a while loop: what XLA noted, else from its condition. 1, with a doubt, when it can't be told."""
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
    module: Module, computation: Computation, loop: Instruction, bind: Bind, test: Compare
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
