"""Reads HLO text into computations, instructions and types; changes nothing.

`parse` takes the text XLA prints for a module, scheduled or not, and keeps of every instruction what can be
asked of it: its opcode, operands, type and attributes. Both spellings of a tuple's element are understood,
`get-tuple-element(%t), index=1` and the dumps' `%t#1`. How often loops run is in `trips`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|tf32|[suf]\d+(?:e\d+m\d+\w*)?|c64|c128)\[([\d,<=]*)\]")
_NAME = r"[\w.\-]+"
_HEAD = re.compile(rf"^\s*(ROOT )?%?({_NAME}) = ")
_COMPUTATION = re.compile(rf"^(ENTRY )?%?({_NAME})\s*(?:\(.*\)\s*->.*)?\{{\s*$")
_END = re.compile(r"^\}(, execution_thread=.*)?\s*$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_REFERENCE = re.compile(rf"%({_NAME}(?:#[\d.]+)?)")
_COMMENT = re.compile(r"/\*.*?\*/")

Path = tuple[int, ...]
HOST_SPACE = 5  # the memory space, S(5) in a layout, that is the host's


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array: element type, dimensions, and the memory space that its layout names."""

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
    """One line. `operands` are names, of tuple elements `name#1`; `inside` is what the brackets hold."""

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
        name, path = split_reference(reference)
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
        elif _END.match(line):
            flush()
            current = None
        elif _HEAD.match(line):
            flush()
            pending = line
        elif pending:  # a long constant goes over several lines, and so does what a kernel says of itself
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


def split_reference(reference: str) -> tuple[str, Path]:
    """`name#1.0` -> name, (1, 0)."""
    name, _, path = reference.partition("#")
    return name, tuple(int(index) for index in path.split(".")) if path else ()
