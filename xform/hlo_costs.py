"""What a compiled, partitioned program does on each device in one call: traffic, arithmetic, kernels, cycles.

Everything is weighted by trip counts: a loop's body stands once in the text. Collectives are found wherever the TPU compiler
hides them, and each is counted once: plain, as X-start and X-done, in async-start wrappers, in the fusions of an
asynchronous collective (the start counts; continuation and done repeat the same operation), and as the all-reduce inside an
`all-reduce-scatter` fusion, which is a reduce-scatter.

*Wire bytes* are what a device sends under the bandwidth-optimal algorithm: for n devices, (n-1)/n of the gathered output of an
all-gather and of the input of a reduce-scatter or all-to-all, twice that of an all-reduce, and all of a permute times the
share of devices that send. What a Pallas kernel sends, and its arithmetic, can't be seen. Of a conditional the dearest
branch counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from xform import hlo

COLLECTIVES = frozenset(
    ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"]
    + ["collective-broadcast"]
)

KERNEL = "tpu_custom_call"


@dataclasses.dataclass
class Traffic:
    """Collectives of one sort: how many run, the bytes a device sends for them, and how many of them are asynchronous."""

    count: int = 0
    wire_bytes: float = 0.0
    async_count: int = 0

    def add(self, times: int, wire_bytes: float, asynchronous: bool) -> None:
        self.count += times
        self.wire_bytes += times * wire_bytes
        self.async_count += times * asynchronous

    def merge(self, other: Traffic) -> None:
        self.count += other.count
        self.wire_bytes += other.wire_bytes
        self.async_count += other.async_count

    def to_json(self) -> dict[str, int]:
        return {"count": self.count, "wire_bytes": round(self.wire_bytes), "async_count": self.async_count}


@dataclasses.dataclass
class Kernel:
    """A Pallas kernel: how often it runs, and the flops that its author's cost estimate claims for all runs together."""

    count: int = 0
    claimed_flops: int = 0


@dataclasses.dataclass
class Costs:
    """Per device and call. `axes` has the same traffic by the mesh axes it spans, `fsdp` or `fsdp+tensor`."""

    collectives: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    axes: dict[str, dict[str, Traffic]] = dataclasses.field(default_factory=dict)
    dot_flops: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # by phase: forward, backward, remat
    kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict)
    cycles: int = 0
    scopes: dict[str, int] = dataclasses.field(default_factory=dict)  # cycles by the model's name stack
    host: dict[str, Traffic] = dataclasses.field(default_factory=dict)  # copies to_host and from_host
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def flops(self) -> float:
        """Of all dots and convolutions, 2 a multiply-add."""
        return sum(self.dot_flops.values())

    @property
    def wire_bytes(self) -> float:
        return sum(traffic.wire_bytes for traffic in self.collectives.values())

    def add(self, other: Costs) -> None:
        """Add the costs of a part."""
        tables = [(self.collectives, other.collectives), (self.host, other.host)]
        tables += [(self.axes.setdefault(axes, {}), kinds) for axes, kinds in other.axes.items()]
        for mine, theirs in tables:
            for kind, part in theirs.items():
                mine.setdefault(kind, Traffic()).merge(part)
        for phase, flops in other.dot_flops.items():
            self.dot_flops[phase] = self.dot_flops.get(phase, 0.0) + flops
        for name, part_kernel in other.kernels.items():
            kernel = self.kernels.setdefault(name, Kernel())
            kernel.count += part_kernel.count
            kernel.claimed_flops += part_kernel.claimed_flops
        for scope, cycles in other.scopes.items():
            self.scopes[scope] = self.scopes.get(scope, 0) + cycles
        self.cycles += other.cycles
        self.notes += [note for note in other.notes if note not in self.notes]


def costs(text: str | hlo.Module, mesh: Mapping[str, int] | None = None) -> Costs:
    """The costs of a module, given as text or parsed. `mesh`: axis to size, in the order in which partitions are numbered."""
    module = hlo.parse(text) if isinstance(text, str) else text
    reader = _Reader(module, dict(mesh or {}))
    reader.walk(module.entry, 1, lambda number, path: None)
    return reader.costs


class _Reader:
    """One walk over a module's schedule, summing into `costs`."""

    def __init__(self, module: hlo.Module, mesh: dict[str, int]) -> None:
        self.module = module
        self.mesh = mesh
        self.costs = Costs()

    def note(self, text: str) -> None:
        if text not in self.costs.notes:
            self.costs.notes.append(text)

    def walk(self, computation: hlo.Computation, times: int, bind: hlo.Bind) -> None:
        """A computation that is scheduled instruction by instruction, run `times` times."""
        for instruction in computation:
            opcode = instruction.opcode
            if cycles := instruction.cycles:
                self.costs.cycles += cycles * times
                scope = scope_of(instruction.op_name) or f"({_slashed(instruction.op_name)[-1] or 'unnamed'})"
                self.costs.scopes[scope] = self.costs.scopes.get(scope, 0) + cycles * times
            if opcode == "while":
                found = hlo.trips(self.module, computation, instruction, bind)
                if found.doubt:
                    self.note(f"loop {instruction.op_name or instruction.name}: {found.doubt}")
                body = self.module.body(instruction.attribute("body"))
                if body is not None:
                    inner = hlo.enter(self.module, computation, instruction, bind)
                    self.walk(body, times * found.count, inner)
            elif opcode == "conditional":
                self.branch(computation, instruction, times, bind)
            elif opcode == "call":
                body = self.module.body(instruction.called)
                if body is not None:
                    self.walk(body, times, hlo.enter(self.module, computation, instruction, bind))
            elif opcode == "fusion":
                self.fused(self.module.body(instruction.called), times)
            elif opcode == "async-start":
                self.fused(self.module.body(instruction.called), times, asynchronous=True)
            else:
                self.single(computation, instruction, times)

    def branch(self, computation: hlo.Computation, call: hlo.Instruction, times: int, bind: hlo.Bind) -> None:
        dearest = Costs()
        branches = self.module.branches(call)
        for index, body in enumerate(branches):
            reader = _Reader(self.module, self.mesh)
            reader.walk(body, times, hlo.enter(self.module, computation, call, bind, first=index + 1))
            if _weight(reader.costs) >= _weight(dearest):
                dearest = reader.costs
        self.costs.add(dearest)
        if len(branches) > 1:
            self.note(f"conditional {call.op_name or call.name}: its dearest branch counts")

    def fused(self, body: hlo.Computation | None, times: int, asynchronous: bool = False) -> None:
        """What runs inside a fusion, or inside an asynchronous wrapper: dots, collectives, copies to and from the host."""
        if body is None:
            return
        targets = {instruction.target for instruction in body if instruction.opcode == "custom-call"}
        for instruction in body:
            if instruction.opcode in ("fusion", "call"):
                self.fused(self.module.body(instruction.called), times, asynchronous)
            elif _base(instruction.opcode) in COLLECTIVES:
                role = _role(body, instruction, targets)
                if role != "repeated":
                    kind = "reduce-scatter" if _is_scattered(body, instruction) else None
                    self.collective(body, instruction, times, asynchronous or role == "start", kind)
            else:
                self.single(body, instruction, times, asynchronous)

    def single(
        self,
        computation: hlo.Computation,
        instruction: hlo.Instruction,
        times: int,
        asynchronous: bool = False,
    ) -> None:
        opcode = instruction.opcode
        if opcode in ("dot", "convolution"):
            phase = phase_of(instruction.op_name)
            flops = (_dot_flops if opcode == "dot" else _convolution_flops)(computation, instruction)
            self.costs.dot_flops[phase] = self.costs.dot_flops.get(phase, 0.0) + flops * times
        elif _base(opcode) in COLLECTIVES and not opcode.endswith("-done"):
            self.collective(computation, instruction, times, opcode.endswith("-start"))
        elif opcode == "custom-call" and instruction.target == KERNEL:
            kernel = self.costs.kernels.setdefault(re.sub(r"\.\d+$", "", instruction.name), Kernel())
            claimed = re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.rest)
            kernel.count += times
            kernel.claimed_flops += times * (int(claimed[1]) if claimed else 0)
        elif moved := _host_bytes(computation, instruction):
            way, nbytes = moved
            asynchronous = asynchronous or opcode.endswith("-start")
            self.costs.host.setdefault(way, Traffic()).add(times, nbytes, asynchronous)

    def collective(
        self,
        computation: hlo.Computation,
        instruction: hlo.Instruction,
        times: int,
        asynchronous: bool,
        kind: str | None = None,
    ) -> None:
        base = _base(instruction.opcode)
        kind = kind or base
        payload = _payload(computation, instruction)
        if base == "collective-permute":
            pairs = _pairs(instruction)
            moving = [pair for pair in pairs if pair[0] != pair[1]]
            wire = payload * len(moving) / self.module.devices
            axes = _axes(self.mesh, moving)
        else:
            found = groups(instruction, self.module.devices)
            n = max((len(group) for group in found), default=1)
            factor = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
            wire = payload * factor
            axes = _axes(self.mesh, found)
        if base == "ragged-all-to-all":
            self.note("ragged all-to-all: bytes are those of the whole buffer, an upper bound")
        self.costs.collectives.setdefault(kind, Traffic()).add(times, wire, asynchronous)
        if self.mesh:
            self.costs.axes.setdefault(axes, {}).setdefault(kind, Traffic()).add(times, wire, asynchronous)


def _base(opcode: str) -> str:
    return opcode.removesuffix("-start").removesuffix("-done")


def _weight(part: Costs) -> tuple[float, float, int]:
    """What makes a branch dear. Cycles miss kernels and collectives, so arithmetic and traffic come first."""
    kernels = sum(kernel.count for kernel in part.kernels.values())
    return part.flops + part.wire_bytes + kernels, part.cycles, kernels


# Collectives inside fusions


def _role(body: hlo.Computation, instruction: hlo.Instruction, targets: set[str]) -> str:
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


def _is_scattered(body: hlo.Computation, instruction: hlo.Instruction) -> bool:
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
    """Bytes of the operands that are sent; of an in-place permute, only of its slices."""
    sizes = [sum(a.nbytes for a in hlo.arrays(computation.type_of(ref))) for ref in instruction.operands]
    base = _base(instruction.opcode)
    in_place = base == "collective-permute" and len(sizes) >= 4
    return sizes[0] if sizes and (in_place or base == "ragged-all-to-all") else sum(sizes)


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
    """The groups along some axes of a mesh; ('a', '2', '4') is the part of axis a of size 4 after a major part of 2."""
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


def _axes(mesh: dict[str, int], found: list[list[int]]) -> str:
    """The mesh axes along which the members of any group differ."""
    if math.prod(mesh.values()) != (1 + max((max(group) for group in found if group), default=0)) and found:
        largest = max(max(group) for group in found if group)
        if largest >= math.prod(mesh.values()):
            return "(another mesh)"
    differing: set[int] = set()
    for group in found:
        places = (
            np.array(np.unravel_index(np.array(group), tuple(mesh.values()))) if mesh else np.zeros((0, 1))
        )
        differing |= set(np.nonzero((places != places[:, :1]).any(axis=1))[0].tolist())
    return "+".join(axis for index, axis in enumerate(mesh) if index in differing) or "(none)"


# Copies between device and host


def _host_bytes(computation: hlo.Computation, instruction: hlo.Instruction) -> tuple[str, int] | None:
    """The way and the bytes of a copy that crosses between device and host memory."""
    base = _base(instruction.opcode)
    if base in ("send", "recv", "infeed", "outfeed") and not instruction.opcode.endswith("-done"):
        if base in ("send", "recv") and instruction.attribute("is_host_transfer") != "true":
            return None
        source = (
            instruction.type if base in ("recv", "infeed") else computation.type_of(instruction.operands[0])
        )
        return ("from_host" if base in ("recv", "infeed") else "to_host"), sum(
            a.nbytes for a in hlo.arrays(source)
        )
    copies = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
    if base not in copies or instruction.opcode.endswith("-done"):
        return None
    moved = hlo.arrays(computation.type_of(instruction.operands[1 if base == "dynamic-update-slice" else 0]))[
        :1
    ]
    result = hlo.arrays(instruction.type)
    if instruction.opcode.endswith("-start") and base != "copy":  # ((operands), result, context)
        result = hlo.arrays(hlo.element(instruction.type, (1,)))
    if not moved or not result or (moved[0].space == hlo.HOST_SPACE) == (result[0].space == hlo.HOST_SPACE):
        return None
    if base == "dynamic-update-slice":
        return "to_host", moved[0].nbytes
    return ("to_host" if result[0].space == hlo.HOST_SPACE else "from_host"), result[0].nbytes


# Arithmetic


def _dot_flops(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    left = hlo.arrays(computation.type_of(instruction.operands[0]))[0]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    dims = [int(n) for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * math.prod(hlo.arrays(instruction.type)[0].dims) * math.prod(left.dims[d] for d in dims)


def _convolution_flops(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    """As XLA's HloCostAnalysis counts: only multiplications by elements that exist, not by padding or dilation."""
    left, right = (hlo.arrays(computation.type_of(ref))[0].dims for ref in instruction.operands[:2])
    out = hlo.arrays(instruction.type)[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0.0
    window = _window(instruction)
    spatial = sorted(label for label in labels[1] if label.isdigit())
    valid = 1
    for index, label in enumerate(spatial):
        sizes = {key: values[index] for key, values in window.items() if index < len(values)}
        low = int(sizes.get("pad", "0_0").split("_")[0])
        numbers = {key: int(value) for key, value in sizes.items() if key != "pad"}
        valid *= _valid_positions(
            left[labels[1].index(label)],
            right[labels[2].index(label)],
            out[labels[3].index(label)],
            numbers.get("stride", 1),
            low,
            numbers.get("lhs_dilate", 1),
            numbers.get("rhs_dilate", 1),
        )
    inputs = left[labels[1].index("f")] // int(instruction.attribute("feature_group_count") or 1)
    batch = left[labels[1].index("b")] // int(instruction.attribute("batch_group_count") or 1)
    return 2.0 * valid * inputs * right[labels[2].index("o")] * batch


def _window(instruction: hlo.Instruction) -> dict[str, list[str]]:
    text = re.search(r"window=\{([^}]*)\}", instruction.rest)
    entries = [entry.split("=") for entry in text[1].split()] if text else []
    return {key: value.split("x") for key, value in entries}


@functools.lru_cache(maxsize=4096)
def _valid_positions(
    size: int, kernel: int, out: int, stride: int, pad: int, dilate: int, kernel_dilate: int
) -> int:
    """How many (output, kernel) positions of one dimension meet an element of the input.

    Position k of the kernel under output o meets o * stride + k * kernel_dilate - pad of the input spread out by `dilate`.
    For each k, the o that do are those of one residue in a range: no loop over both (batch dimensions become windows).
    """
    common = math.gcd(stride, dilate)
    period = dilate // common
    inverse = pow(stride // common, -1, period) if period > 1 else 0
    total = 0
    for position in range(kernel):
        offset = position * kernel_dilate - pad
        if offset % common:
            continue
        residue = (-offset // common) * inverse % period
        first = max(0, -(offset // stride))
        last = min(out - 1, ((size - 1) * dilate - offset) // stride)
        first += (residue - first) % period
        total += max(0, (last - first) // period + 1)
    return total


# Names

_WRAPPERS = re.compile(r"(?:jvp|transpose|vmap|checkpoint|remat|rematted_computation|custom_lin)\((.*)\)$")
_STRUCTURE = frozenset(
    [
        "while",
        "body",
        "cond",
        "scan",
        "closed_call",
        "core_call",
        "eval_jaxpr",
        "checkpoint",
        "remat",
        "remat2",
    ]
    + ["rematted_computation", "custom_jvp_call", "custom_vjp_call", "shard_map", "pjit", "jit", "branch"]
)


def phase_of(op_name: str) -> str:
    """remat, backward or forward (and all that is not differentiated), from the transformations in an operation's name."""
    if "rematted_computation" in op_name:
        return "remat"
    return "backward" if "transpose(" in op_name else "forward"


def scope_of(op_name: str) -> str:
    """The model's own part of an operation's name: `jit(step)/jvp(decoder)/while/body/mlp/dot_general` -> `decoder/mlp`."""
    scopes = []
    for part in _slashed(op_name)[:-1]:  # the last is the primitive
        while match := _WRAPPERS.match(part):
            part = match[1]
        for name in _slashed(part):
            if name and "(" not in name and name not in _STRUCTURE and not re.match(r"branch_\d+_fun$", name):
                scopes.append(name)
    return "/".join(scopes)


def _slashed(text: str) -> list[str]:
    """Split at slashes outside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
