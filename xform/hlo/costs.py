"""What a compiled, partitioned program does on each device in one call: traffic, arithmetic, kernels, cycles.

Everything is weighted by trip counts: a loop's body stands once in the text. Collectives are found wherever
the TPU compiler hides them, and each is counted once: plain, as X-start and X-done, in async-start wrappers,
in the fusions of an asynchronous collective (the start counts; continuation and done repeat the same
operation), and as the all-reduce inside an `all-reduce-scatter` fusion, which is a reduce-scatter.

*Wire bytes* are what a device sends under the bandwidth-optimal algorithm: for n devices, (n-1)/n of the
gathered output of an all-gather and of the input of a reduce-scatter or all-to-all, twice that of an
all-reduce, and all of a permute times the share of devices that send. What a Pallas kernel sends, and its
arithmetic, can't be seen. Of a conditional the dearest branch counts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xform.hlo import collectives as hlo_collectives
from xform.hlo import module as hlo
from xform.hlo import trips as hlo_trips
from xform.hlo.collectives import base

KERNEL = "tpu_custom_call"


@dataclasses.dataclass
class Traffic:
    """Collectives of one sort: how many run, the bytes a device sends for them, how many are asynchronous."""

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
    """A Pallas kernel: how often it runs, and the flops its author's cost estimate claims for all runs."""

    count: int = 0
    claimed_flops: int = 0


class Product(NamedTuple):
    """A dot or convolution: its operation's name, the element types that it multiplies, its flops."""

    op_name: str
    dtypes: tuple[str, ...]
    flops: float


@dataclasses.dataclass
class Costs:
    """Per device and call. `axes` has the same traffic by the mesh axes it spans, `fsdp` or `fsdp+tensor`.

    `stages` has it by the parts of axes besides, where axes are cut: `stages["fsdp"]["fsdp.x"]`.
    """

    collectives: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    axes: dict[str, dict[str, Traffic]] = dataclasses.field(default_factory=dict)
    stages: dict[str, dict[str, dict[str, Traffic]]] = dataclasses.field(default_factory=dict)
    sent: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)  # bytes, by kind and dtype
    dot_flops: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # by phase: forward, backward, remat
    again: Counter[float] = dataclasses.field(default_factory=Counter)  # of phase remat: by flops of one
    products: Counter[Product] = dataclasses.field(default_factory=Counter)  # how often each runs
    kernels: dict[str, Kernel] = dataclasses.field(default_factory=dict)
    copied: int = 0  # bytes of arrays that are written a second time, as they are or in another layout
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
        for axes, stages in other.stages.items():
            own = self.stages.setdefault(axes, {})
            tables += [(own.setdefault(stage, {}), kinds) for stage, kinds in stages.items()]
        for mine, theirs in tables:
            for kind, part in theirs.items():
                mine.setdefault(kind, Traffic()).merge(part)
        for phase, flops in other.dot_flops.items():
            self.dot_flops[phase] = self.dot_flops.get(phase, 0.0) + flops
        for kind, dtypes in other.sent.items():
            self.sent.setdefault(kind, Counter()).update(dtypes)
        self.again.update(other.again)
        self.products.update(other.products)
        for name, part_kernel in other.kernels.items():
            kernel = self.kernels.setdefault(name, Kernel())
            kernel.count += part_kernel.count
            kernel.claimed_flops += part_kernel.claimed_flops
        for scope, cycles in other.scopes.items():
            self.scopes[scope] = self.scopes.get(scope, 0) + cycles
        self.cycles += other.cycles
        self.copied += other.copied
        self.notes += [note for note in other.notes if note not in self.notes]


def costs(
    text: str | hlo.Module,
    mesh: Mapping[str, int] | hlo_collectives.Mesh | None = None,
    slices: Sequence[int] = (),
) -> Costs:
    """The costs of a module, given as text or parsed.

    `mesh` maps axes to sizes, in the order in which partitions are numbered, and `slices` is the slice of
    each partition; a `collectives.Mesh` says both, and how axes are cut.
    """
    module = hlo.parse(text) if isinstance(text, str) else text
    if not isinstance(mesh, hlo_collectives.Mesh):
        mesh = hlo_collectives.Mesh(dict(mesh or {}), tuple(slices))
    reader = _Reader(module, mesh)
    reader.walk(module.entry, 1, lambda number, path: None)
    return reader.costs


class _Reader:
    """One walk over a module's schedule, summing into `costs`."""

    def __init__(self, module: hlo.Module, mesh: hlo_collectives.Mesh) -> None:
        self.module = module
        self.mesh = mesh
        self.costs = Costs()

    def note(self, text: str) -> None:
        if text not in self.costs.notes:
            self.costs.notes.append(text)

    def walk(self, computation: hlo.Computation, times: int, bind: hlo_trips.Bind) -> None:
        """A computation that is scheduled instruction by instruction, run `times` times."""
        for instruction in computation:
            opcode = instruction.opcode
            if cycles := instruction.cycles:
                self.costs.cycles += cycles * times
                scope = scope_of(instruction.op_name) or f"({_slashed(instruction.op_name)[-1] or 'unnamed'})"
                self.costs.scopes[scope] = self.costs.scopes.get(scope, 0) + cycles * times
            for found in hlo_collectives.started(self.module, computation, instruction, self.mesh):
                self.collective(found, times)
            if opcode == "while":
                trips = hlo_trips.trips(self.module, computation, instruction, bind)
                if trips.doubt:
                    self.note(f"loop {instruction.op_name or instruction.name}: {trips.doubt}")
                body = self.module.body(instruction.attribute("body"))
                if body is not None:
                    inner = hlo_trips.enter(self.module, computation, instruction, bind)
                    self.walk(body, times * trips.count, inner)
            elif opcode == "conditional":
                self.branch(computation, instruction, times, bind)
            elif opcode == "call":
                body = self.module.body(instruction.called)
                if body is not None:
                    self.walk(body, times, hlo_trips.enter(self.module, computation, instruction, bind))
            elif opcode == "fusion":
                self.fused(self.module.body(instruction.called), times)
            elif opcode == "async-start":
                self.fused(self.module.body(instruction.called), times, asynchronous=True)
            else:
                self.single(computation, instruction, times)

    def branch(
        self, computation: hlo.Computation, call: hlo.Instruction, times: int, bind: hlo_trips.Bind
    ) -> None:
        branches = self.module.branches(call)
        _, part = dearest(self.module, self.mesh, computation, call, times, bind)
        self.costs.add(part)
        if len(branches) > 1:
            self.note(f"conditional {call.op_name or call.name}: its dearest branch counts")

    def fused(self, body: hlo.Computation | None, times: int, asynchronous: bool = False) -> None:
        """What runs inside a fusion or an asynchronous wrapper besides collectives: dots, host copies."""
        if body is None:
            return
        for instruction in body:
            if instruction.opcode in ("fusion", "call"):
                self.fused(self.module.body(instruction.called), times, asynchronous)
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
        if flops := _flops(computation, instruction):
            phase = phase_of(instruction.op_name)
            self.costs.dot_flops[phase] = self.costs.dot_flops.get(phase, 0.0) + flops * times
            if phase == "remat":
                self.costs.again[flops] += times
            dtypes = tuple(hlo.arrays(computation.type_of(ref))[0].dtype for ref in instruction.operands[:2])
            self.costs.products[Product(instruction.op_name, dtypes, flops)] += times
        elif opcode == "custom-call" and instruction.target == KERNEL:
            # XLA appends to the name what tells instances apart: splash_fwd.3, double.2.x_ref
            kernel = self.costs.kernels.setdefault(instruction.name.partition(".")[0], Kernel())
            kernel.count += times
            kernel.claimed_flops += times * claimed(instruction, "flops")
        elif opcode == "copy":
            self.costs.copied += times * sum(array.nbytes for array in hlo.arrays(instruction.type))
        elif moved := _host_bytes(computation, instruction):
            way, nbytes = moved
            asynchronous = asynchronous or opcode.endswith("-start")
            self.costs.host.setdefault(way, Traffic()).add(times, nbytes, asynchronous)

    def collective(self, found: hlo_collectives.Collective, times: int) -> None:
        if found.kind == "ragged-all-to-all":
            self.note("ragged all-to-all: bytes are those of the whole buffer, an upper bound")
        tables = [self.costs.collectives]
        if self.mesh.axes:
            axes, stage = self.mesh.spanned(found.groups), self.mesh.stage(found.groups)
            tables.append(self.costs.axes.setdefault(axes, {}))
            if stage is not None:
                tables.append(self.costs.stages.setdefault(axes, {}).setdefault(stage, {}))
        for table in tables:
            table.setdefault(found.kind, Traffic()).add(times, found.wire_bytes, found.asynchronous)
        self.costs.sent.setdefault(found.kind, Counter())[found.dtype] += round(times * found.wire_bytes)


def dearest(
    module: hlo.Module,
    mesh: hlo_collectives.Mesh,
    computation: hlo.Computation,
    call: hlo.Instruction,
    times: int,
    bind: hlo_trips.Bind,
) -> tuple[int, Costs]:
    """Of a conditional the dearest branch, by number, and the costs of `times` runs of it."""
    number, costs = 0, Costs()
    for index, body in enumerate(module.branches(call)):
        reader = _Reader(module, mesh)
        reader.walk(body, times, hlo_trips.enter(module, computation, call, bind, first=index + 1))
        if _weight(reader.costs) >= _weight(costs):
            number, costs = index, reader.costs
    return number, costs


def _weight(part: Costs) -> tuple[float, float, int]:
    """What makes a branch dear. Cycles miss kernels and collectives, so arithmetic and traffic come first."""
    kernels = sum(kernel.count for kernel in part.kernels.values())
    return part.flops + part.wire_bytes + kernels, part.cycles, kernels


# Copies between device and host


def _host_bytes(computation: hlo.Computation, instruction: hlo.Instruction) -> tuple[str, int] | None:
    """The way and the bytes of a copy that crosses between device and host memory."""
    kind = base(instruction.opcode)
    if kind in ("send", "recv", "infeed", "outfeed") and not instruction.opcode.endswith("-done"):
        if "xla_megascale" in instruction.rest:  # between slices: the send is the collective
            return None
        if kind in ("send", "recv") and instruction.attribute("is_host_transfer") != "true":
            return None
        source = (
            instruction.type if kind in ("recv", "infeed") else computation.type_of(instruction.operands[0])
        )
        return ("from_host" if kind in ("recv", "infeed") else "to_host"), sum(
            a.nbytes for a in hlo.arrays(source)
        )
    copies = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
    if kind not in copies or instruction.opcode.endswith("-done"):
        return None
    moved = hlo.arrays(computation.type_of(instruction.operands[1 if kind == "dynamic-update-slice" else 0]))[
        :1
    ]
    result = hlo.arrays(instruction.type)
    if instruction.opcode.endswith("-start") and kind != "copy":  # ((operands), result, context)
        result = hlo.arrays(hlo.element(instruction.type, (1,)))
    if not moved or not result or (moved[0].space == hlo.HOST_SPACE) == (result[0].space == hlo.HOST_SPACE):
        return None
    if kind == "dynamic-update-slice":
        return "to_host", moved[0].nbytes
    return ("to_host" if result[0].space == hlo.HOST_SPACE else "from_host"), result[0].nbytes


# Arithmetic


def flops_of(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    """Floating-point operations of one run of an instruction: its dots and convolutions, fused ones too.

    Of a kernel they are what its author claims; bodies of loops, conditionals and calls are not looked into.
    """
    if instruction.target == KERNEL:
        return claimed(instruction, "flops")
    body = module.body(instruction.called) if instruction.opcode == "fusion" else None
    if body is not None:
        return sum(flops_of(module, body, inner) for inner in body)
    return _flops(computation, instruction)


def claimed(kernel: hlo.Instruction, key: str) -> int:
    """What a kernel's cost estimate says of `flops` or `bytes_accessed`; 0 where it says nothing."""
    found = re.search(rf'"cost_estimate":\{{[^}}]*"{key}":"?(\d+)', kernel.rest)
    return int(found[1]) if found else 0


def _flops(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    if instruction.opcode == "dot":
        return _dot_flops(computation, instruction)
    return _convolution_flops(computation, instruction) if instruction.opcode == "convolution" else 0.0


def _dot_flops(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    left = hlo.arrays(computation.type_of(instruction.operands[0]))[0]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    dims = [int(n) for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * math.prod(hlo.arrays(instruction.type)[0].dims) * math.prod(left.dims[d] for d in dims)


def _convolution_flops(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    """As XLA's HloCostAnalysis counts: only multiplications by elements that exist, not by padding."""
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

    Position k of the kernel under output o meets o * stride + k * kernel_dilate - pad of the input spread out
    by `dilate`. For each k, the o that do are those of one residue in a range: no loop over both (batch
    dimensions become windows).
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
    """remat, backward or forward (and all that is not differentiated), told from an operation's name."""
    if "rematted_computation" in op_name:
        return "remat"
    return "backward" if "transpose(" in op_name else "forward"


def scope_of(op_name: str) -> str:
    """The model's own part: `jit(step)/jvp(decoder)/while/body/mlp/dot_general` -> `decoder/mlp`."""
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
