"""Collectives in HLO text: what each is, who takes part, and how many bytes a device sends for it.

A collective is told from what it does, not from its opcode alone: an all-reduce of which only a slice is used
is a reduce-scatter, a collective in the second or last fusion of an asynchronous one repeats the first, and
between slices of a multi-slice machine a collective is a `send` to the runtime that carries it over the
data-centre network (megascale).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from xform.hlo import module as hlo

OPCODES = frozenset(
    ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"]
    + ["collective-broadcast"]
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Axes and sizes in the order in which partitions are numbered, and the slice of each partition.

    `parts` cuts axes finer, for collectives that run in stages: an axis to its parts and their sizes, the
    outermost first, `{"fsdp": {"fsdp.x": 4, "fsdp.y": 4}}`; axes that it leaves out are whole. ValueError
    where parts do not make up their axis.
    """

    axes: dict[str, int]
    slices: tuple[int, ...] = ()
    parts: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for axis, parts in self.parts.items():
            if math.prod(parts.values()) != self.axes.get(axis):
                raise ValueError(
                    f"axis {axis} of size {self.axes.get(axis)} is not made up of the parts {dict(parts)}"
                )

    def of_all(self, found: list[list[int]], devices: int) -> list[list[int]]:
        """Groups in the numbers of all partitions; a module of one slice among several has its own."""
        if len(self.slices) <= devices:
            return found
        own = [number for number, slice_ in enumerate(self.slices) if slice_ == self.slices[0]]
        return [[own[member] for member in group] for group in found]

    def spanned(self, found: list[list[int]]) -> str:
        """The axes along which members of any group differ, `fsdp` or `fsdp+tensor`."""
        return _spanned(self.axes, found)

    def stage(self, found: list[list[int]]) -> str | None:
        """The same in parts of axes, `fsdp.x`; None where no axis that is spanned is cut."""
        cut = [axis for axis, parts in self.parts.items() if len(parts) > 1]
        if not set(cut) & set(self.spanned(found).split("+")):
            return None
        finer: dict[str, int] = {}
        for axis, size in self.axes.items():
            finer |= self.parts.get(axis, {axis: size})
        return _spanned(finer, found)


def _spanned(axes: Mapping[str, int], found: list[list[int]]) -> str:
    shape = tuple(axes.values())
    if any(member >= math.prod(shape) for group in found for member in group):
        return "(another mesh)"
    differing: set[int] = set()
    if shape:
        for group in found:
            places = np.array(np.unravel_index(np.array(group), shape))
            differing |= set(np.nonzero((places != places[:, :1]).any(axis=1))[0].tolist())
    return "+".join(axis for index, axis in enumerate(axes) if index in differing) or "(none)"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its kind, the bytes each device sends for one run, and the groups that take part.

    dtype: of the elements of its first operand, '' where it is not known.
    """

    kind: str
    wire_bytes: float
    groups: list[list[int]]
    asynchronous: bool = False  # runs beside what is scheduled until its done
    dtype: str = dataclasses.field(default="", compare=False)


def base(opcode: str) -> str:
    """The opcode without the -start or -done of its asynchronous form."""
    return opcode.removesuffix("-start").removesuffix("-done")


def read(
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    devices: int,
    mesh: Mesh,
    kind: str | None = None,
) -> Collective:
    """A collective instruction in a module for `devices`; `kind` where it is another than its opcode's."""
    opcode = base(instruction.opcode)
    payload = _payload(computation, instruction)
    sent = [a.dtype for ref in instruction.operands[:1] for a in hlo.arrays(computation.type_of(ref))[:1]]
    dtype = "".join(sent)
    if opcode == "collective-permute":
        moving = [pair for pair in _pairs(instruction) if pair[0] != pair[1]]
        sends = mesh.of_all(moving, devices)
        return Collective(opcode, payload * len(moving) / devices, sends, dtype=dtype)
    found = groups(instruction, devices)
    factor = _factor(kind or opcode, max(map(len, found)))
    return Collective(kind or opcode, payload * factor, mesh.of_all(found, devices), dtype=dtype)


def started(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction, mesh: Mesh
) -> list[Collective]:
    """The collectives that a scheduled instruction starts or runs, each once, wherever they are hidden.

    Bodies of loops, conditionals and calls are schedules of their own, and not looked into.
    """
    opcode = instruction.opcode
    crossing = between_slices(computation, instruction, mesh)
    if crossing is not None:
        return [dataclasses.replace(crossing, asynchronous=True)]
    if base(opcode) in OPCODES and not opcode.endswith("-done"):
        found = read(computation, instruction, module.devices, mesh)
        return [dataclasses.replace(found, asynchronous=opcode.endswith("-start"))]
    if opcode in ("fusion", "async-start"):
        return _inside(module, module.body(instruction.called), mesh, opcode == "async-start")
    return []


def _inside(
    module: hlo.Module, body: hlo.Computation | None, mesh: Mesh, asynchronous: bool
) -> list[Collective]:
    """The collectives in a fusion or an asynchronous wrapper, which may call what another core runs."""
    if body is None:
        return []
    found: list[Collective] = []
    targets = {instruction.target for instruction in body if instruction.opcode == "custom-call"}
    for instruction in body:
        if base(instruction.opcode) in OPCODES and not instruction.opcode.endswith("-done"):
            part = role(body, instruction, targets)
            if part != "repeated":
                kind = "reduce-scatter" if is_scattered(body, instruction) else None
                collective = read(body, instruction, module.devices, mesh, kind)
                found.append(dataclasses.replace(collective, asynchronous=asynchronous or part == "start"))
        else:
            offloaded = (instruction.attribute("called_computations") or "").strip("{}%")
            found += _inside(module, module.body(instruction.called or offloaded), mesh, asynchronous)
    return found


def between_slices(
    computation: hlo.Computation, instruction: hlo.Instruction, mesh: Mesh
) -> Collective | None:
    """The collective over the data-centre network that a `send` is, if it is one.

    Its target is slices times devices, `{1,2}x{0:3}`, or groups or pairs of device numbers, 100000 a slice,
    slices from 1. Of its groups, one device of each slice is given.
    """
    found = re.search(
        r'_xla_megascale_target="?(.*?)"?,_xla_megascale_transfer_type="(\w+)"', instruction.rest
    )
    if instruction.opcode != "send" or found is None:
        return None
    payload = sum(a.nbytes for a in hlo.arrays(computation.type_of(instruction.operands[0])))
    kind = found[2].lower().replace("_", "-")
    crossed = re.match(r"\{([\d,]+)\}x", found[1])
    if crossed:
        members = [[int(number) for number in crossed[1].split(",")]]
    else:
        listed = re.findall(r"\{([\d,>\-]+)\}", found[1])
        members = [[int(number) // 100000 for number in re.findall(r"\d+", group)] for group in listed]
    leaders = {number: mesh.slices.index(number) for number in set(mesh.slices)}
    parts = [[leaders.get(number - 1, 0) for number in group] for group in members]
    if kind == "one-to-one":
        return Collective("collective-permute", payload * len(members) / max(1, len(mesh.slices)), parts)
    return Collective(kind, payload * _factor(kind, max(map(len, members), default=1)), parts)


def _factor(kind: str, n: int) -> float:
    """Bytes sent for each byte of the operand, in a group of n."""
    if kind == "all-gather":
        return n - 1
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n


def role(body: hlo.Computation, instruction: hlo.Instruction, targets: set[str]) -> str:
    """Which part of an asynchronous collective fusion a collective stands for: start, repeated, or plain."""
    flags = re.search(r'"async_collective_fusion_config":\{([^}]*)\}', instruction.rest)
    if flags:
        start = re.search(r'"flag_start":"?(-?\d+)', flags[1])
        return "start" if start and start[1] == "-1" else "repeated"
    if "AsyncCollectiveDone" in targets:
        return "repeated"
    if "AsyncCollectiveStart" in targets:
        return "start"
    continued = body.name.startswith("async_collective_fusion") or "chain_id=" in instruction.rest
    return "repeated" if continued else "plain"


def is_scattered(body: hlo.Computation, instruction: hlo.Instruction) -> bool:
    """Whether an all-reduce in a fusion is a reduce-scatter: of its sum, only a slice is ever used."""
    if instruction.opcode != "all-reduce":
        return False
    if "all-reduce-scatter" in body.name:
        return True
    users = [other for other in body if instruction.name in {ref.split("#")[0] for ref in other.operands}]
    while len(users) == 1 and users[0].opcode in ("bitcast", "reshape", "copy", "convert"):
        last = users[0].name
        users = [other for other in body if last in other.operands]
    return bool(users) and all(user.opcode == "dynamic-slice" for user in users)


def _payload(computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Bytes of the operands that are sent: of an in-place permute or a ragged all-to-all only the first."""
    sizes = [sum(a.nbytes for a in hlo.arrays(computation.type_of(ref))) for ref in instruction.operands]
    opcode = base(instruction.opcode)
    in_place = opcode == "collective-permute" and len(sizes) >= 4
    return sizes[0] if sizes and (in_place or opcode == "ragged-all-to-all") else sum(sizes)


def groups(instruction: hlo.Instruction, devices: int) -> list[list[int]]:
    """The groups of partitions that a collective runs in, from any of the spellings of replica_groups."""
    text = re.search(r"replica_groups=(.*)", instruction.rest)
    everyone = [list(range(devices))]
    if text is None:
        return everyone
    named = re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text[1])
    if named:
        sizes = [(axis, int(size)) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])]
        chosen = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[2])
        return _mesh_groups(sizes, chosen)
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text[1])
    if iota:
        shape, dims = (tuple(int(n) for n in part.split(",")) for part in (iota[1], iota[2]))
        numbers = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            numbers = numbers.transpose([int(n) for n in iota[3].split(",")])
        return numbers.reshape(shape).tolist()
    listed = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text[1])
    found = (
        [[int(n) for n in part.split(",") if n] for part in re.findall(r"\{([\d,]*)\}", listed[1])]
        if listed
        else []
    )
    return [group for group in found if group] or everyone


def _mesh_groups(sizes: list[tuple[str, int]], chosen: list[tuple[str, str, str]]) -> list[list[int]]:
    """The groups along some axes of a mesh; ('a', '2', '4'): of axis a, the part of size 4 after one of 2."""
    dims: list[int] = []
    along: list[int] = []
    for axis, size in sizes:
        cuts = {1, size}
        parts = [(int(before or 1), int(part or size)) for name, before, part in chosen if name == axis]
        for before, part in parts:
            cuts |= {before, before * part}
        edges = sorted(cuts)
        for low, high in itertools.pairwise(edges):
            if any(before <= low and high <= before * part for before, part in parts):
                along.append(len(dims))
            dims.append(high // low)
    rest = [index for index in range(len(dims)) if index not in along]
    numbers = np.arange(math.prod(dims)).reshape(dims).transpose(rest + along)
    return numbers.reshape(-1, math.prod(dims[index] for index in along)).tolist()


def _pairs(instruction: hlo.Instruction) -> list[list[int]]:
    text = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.rest)
    return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", text[1])] if text else []
