"""Which collectives run beside compute: what a schedule has between the start and the done of each.

A schedule is a list, and an asynchronous collective is in flight from its start to its done, over all that is
listed between them: instructions, fusions that carry it on beside their own arithmetic, whole loops with all
their trips. How long that takes is the compiler's own estimate, in cycles, where the module has them (it was
compiled to the end); else the time of its arithmetic at the chip's peak or of its bytes at the memory's
bandwidth, whichever is longer, a lower bound. Neither knows how long the collective itself takes: what is
between could hide it.

What ends a collective: of `X-start` and `async-start` the done that leads back to it, through updates; of
fusions around `AsyncCollectiveStart` the next `AsyncCollectiveDone` of the same channel, which a loop's carry
may lie between; of a `send` between slices the done of the `recv` of the same rendezvous. An `async-start`
without operands only readies another core: its collective begins at the update that brings the operands.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from xform.hlo import collectives as hlo_collectives
from xform.hlo import costs as hlo_costs
from xform.hlo import module as hlo
from xform.hlo import trips as hlo_trips
from xform.hlo.collectives import OPCODES, base

Key = tuple[str, str]
"""The axes and the kind of a collective."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What turns work into seconds, of one device: FLOP/s, bytes/s of its memory, and cycles/s."""

    peak_flops: float
    bandwidth: float
    clock: float


@dataclasses.dataclass(frozen=True)
class Flight:
    """An asynchronous collective: the bytes a device sends and the seconds of compute between, of one run."""

    start: str
    kind: str
    axes: str
    wire_bytes: float
    times: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"wire_bytes": round(self.wire_bytes)}


@dataclasses.dataclass
class Sum:
    """Of collectives of one kind over the same axes, for all runs: bytes a device sends, compute beside them.

    `seconds`: what runs while any of them is in flight; what runs beside two counts once.
    """

    async_bytes: float = 0.0
    sync_bytes: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {
            "async_bytes": round(self.async_bytes),
            "sync_bytes": round(self.sync_bytes),
            "between_seconds": self.seconds,
        }


@dataclasses.dataclass
class Overlap:
    """Per device and call. `axes["fsdp"]["all-gather"]` sums up; `seconds` are those of all compute.

    `beside` are those of them with any collective in flight; `by_cycles`, whether the compiler's cycles tell.
    """

    by_cycles: bool
    flights: list[Flight] = dataclasses.field(default_factory=list)
    axes: dict[str, dict[str, Sum]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    beside: float = 0.0
    notes: list[str] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "by": "cycles" if self.by_cycles else "peak",
            "compute_seconds": self.seconds,
            "beside_seconds": self.beside,
            "by_axis": {
                axes: {kind: total.to_json() for kind, total in sorted(kinds.items())}
                for axes, kinds in sorted(self.axes.items())
            },
            "flights": [flight.to_json() for flight in self.flights],
        }


def overlap(text: str | hlo.Module, chip: Chip, mesh: hlo_collectives.Mesh) -> Overlap:
    """What a scheduled module, given as text or parsed, runs beside its collectives on a device of `chip`."""
    module = hlo.parse(text) if isinstance(text, str) else text
    by_cycles = hlo_costs.costs(module, mesh).cycles > 0
    reader = _Reader(module, chip, mesh, Overlap(by_cycles))
    reader.found.seconds = reader.walk(module.entry, 1, lambda number, path: None, frozenset())
    return reader.found


@dataclasses.dataclass(frozen=True)
class _Reader:
    """One walk over a module's schedule, summing into `found`."""

    module: hlo.Module
    chip: Chip
    mesh: hlo_collectives.Mesh
    found: Overlap

    def walk(
        self, computation: hlo.Computation, times: int, bind: hlo_trips.Bind, above: frozenset[Key]
    ) -> float:
        """The seconds of one run of a computation that runs `times` times, with `above` in flight around."""
        spans = list(self.spans(computation))
        aloft: list[set[Key]] = [set(above) for _ in computation]
        for span in spans:
            total = self.total(span.key)
            if span.collective.asynchronous:
                total.async_bytes += times * span.collective.wire_bytes
                for beside in aloft[span.first : span.last + 1]:
                    beside.add(span.key)
            else:
                total.sync_bytes += times * span.collective.wire_bytes
        seconds: list[float] = []
        for instruction, keys in zip(computation, aloft, strict=True):
            called = self.called(computation, instruction, times, bind, frozenset(keys))
            if called is None:
                called = self.seconds(computation, instruction)
                for key in keys:
                    self.total(key).seconds += times * called
                self.found.beside += times * called if keys else 0.0
            seconds.append(called)
        for span in spans:
            if span.collective.asynchronous:
                axes, kind = span.key
                between = sum(seconds[span.first : span.last + 1])
                wire = span.collective.wire_bytes
                self.found.flights.append(Flight(span.start, kind, axes, wire, times, between))
        return sum(seconds)

    def called(
        self,
        computation: hlo.Computation,
        call: hlo.Instruction,
        times: int,
        bind: hlo_trips.Bind,
        above: frozenset[Key],
    ) -> float | None:
        """The seconds of a loop with all its trips, a call, or a conditional's dearest branch; else None."""
        body, trips, first = None, 1, 0
        if call.opcode == "while":
            body = self.module.body(call.attribute("body"))
            trips = hlo_trips.trips(self.module, computation, call, bind).count
        elif call.opcode == "call":
            body = self.module.body(call.called)
        elif call.opcode == "conditional":
            number, _ = hlo_costs.dearest(self.module, self.mesh, computation, call, times, bind)
            body, first = (*self.module.branches(call), None)[number], number + 1
        if body is None:
            return None
        inner = hlo_trips.enter(self.module, computation, call, bind, first=first)
        return trips * self.walk(body, times * trips, inner, above)

    def total(self, key: Key) -> Sum:
        axes, kind = key
        return self.found.axes.setdefault(axes, {}).setdefault(kind, Sum())

    def spans(self, computation: hlo.Computation) -> Iterable[_Span]:
        """The collectives of a schedule and where they are in flight."""
        spans: list[_Span] = []
        waiting: dict[str, list[_Span]] = {}
        for index, instruction in enumerate(computation):
            ended = _ended(self.module, computation, instruction)
            if instruction.opcode == "async-update" and len(instruction.operands) > 1:
                for span in waiting.get(_traced(computation, instruction.operands[0]), []):
                    if not computation.instructions[span.start].operands:
                        span.first = index
            elif ended and ended in waiting:
                oldest = min(span.first for span in waiting[ended])
                for span in [span for span in waiting[ended] if span.first == oldest]:
                    span.last = index
                    waiting[ended].remove(span)
            for found in hlo_collectives.started(self.module, computation, instruction, self.mesh):
                span = _Span(instruction.name, found, self.mesh.spanned(found.groups), index, index)
                spans.append(span)
                if found.asynchronous:
                    span.last = len(computation.instructions) - 1
                    waiting.setdefault(_name(self.module, instruction), []).append(span)
        unended = [span.start for left in waiting.values() for span in left]
        for start in unended:
            self.found.notes.append(f"{start} in {computation.name} has no done there: taken to end with it")
        return spans

    # How long a thing takes

    def seconds(self, computation: hlo.Computation, instruction: hlo.Instruction) -> float:
        """Of one run of an instruction that is not a call; 0 for what only starts, ends or names."""
        kernel = instruction.target == hlo_costs.KERNEL
        if self.found.by_cycles and not kernel:  # the compiler makes no estimate of kernels
            return instruction.cycles / self.chip.clock
        flops = hlo_costs.flops_of(self.module, computation, instruction)
        nbytes = hlo_costs.claimed(instruction, "bytes_accessed")
        if not kernel:
            nbytes = memory_bytes(self.module, computation, instruction)
        return max(flops / self.chip.peak_flops, nbytes / self.chip.bandwidth)


@dataclasses.dataclass
class _Span:
    """A collective, and the numbers of the first and last instructions between which it is in flight."""

    start: str
    collective: hlo_collectives.Collective
    axes: str
    first: int
    last: int

    @property
    def key(self) -> Key:
        return self.axes, self.collective.kind


# Starts and dones


def _name(module: hlo.Module, start: hlo.Instruction) -> str:
    """What the start of a collective and its done have in common."""
    if start.opcode == "fusion":
        return _channel(module.body(start.called))
    return _rendezvous(start) if start.opcode == "send" else start.name


def _ended(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> str | None:
    """The `_name` of the collective that an instruction ends."""
    if instruction.opcode == "fusion":
        body = module.body(instruction.called)
        done = any(inner.target == "AsyncCollectiveDone" for inner in body or ())
        return _channel(body) if done else None
    if not instruction.opcode.endswith("-done"):
        return None
    start = computation.instructions[_traced(computation, instruction.operands[0])]
    if start.opcode in ("send", "recv"):
        return _rendezvous(start) if start.opcode == "recv" else None
    return start.name


def _traced(computation: hlo.Computation, reference: str) -> str:
    """The instruction that an operand comes from, through updates and elements of tuples."""
    instruction = computation.instructions[hlo.split_reference(reference)[0]]
    while instruction.opcode in ("async-update", "get-tuple-element"):
        instruction = computation.instructions[hlo.split_reference(instruction.operands[0])[0]]
    return instruction.name


def _channel(body: hlo.Computation | None) -> str:
    channels = [inner.attribute("channel_id") for inner in body or () if base(inner.opcode) in OPCODES]
    return f"channel {channels}"


def _rendezvous(transfer: hlo.Instruction) -> str:
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', transfer.rest)
    return f"rendezvous {found[1] if found else transfer.attribute('channel_id')}"


# Bytes to and from device memory

_UNMOVED = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"]
    + ["replica-id", "iota", "async-start", "async-update", "async-done", "copy-start", "copy-done"]
    + ["slice-start", "slice-done", "send", "send-done", "recv", "recv-done", "while", "call", "conditional"]
    + ["optimization-barrier", "opt-barrier", "domain", "infeed", "outfeed"]
)
_ALIASES = frozenset(["bitcast", "reshape", "get-tuple-element"])
_SLICES = frozenset(["dynamic-slice", "slice", "gather"])


def memory_bytes(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    """Bytes that one run of an instruction reads from and writes to device memory while its core waits.

    Slices that are taken or updated in place count as their own size. What a collective carries does not
    count, nor what lies in a memory of the core's own (a space other than 0) or moves asynchronously.
    """
    if instruction.opcode in _UNMOVED or base(instruction.opcode) in OPCODES:
        return 0
    body = module.body(instruction.called) if instruction.opcode == "fusion" else None
    if body is not None and not _computes(module, body):
        return 0
    read = 0
    for number, reference in enumerate(instruction.operands):
        whole = _device_bytes(computation.type_of(reference))
        if whole:
            read += min(whole, _taken(module, computation, instruction, number, whole))
    if body is not None:
        return read + _made(module, body, body.root, instruction.type)
    return read + _made(module, computation, instruction.name, instruction.type)


def _computes(module: hlo.Module, body: hlo.Computation) -> bool:
    """Whether a fusion does more than carry a collective."""
    if not any(base(inner.opcode) in OPCODES for inner in body):
        return True
    return body.name.startswith("async_collective_fusion") or any(
        hlo_costs.flops_of(module, body, inner) for inner in body
    )


def _device_bytes(text: str) -> int:
    return sum(array.nbytes for array in hlo.arrays(text) if array.space == 0)


def _taken(
    module: hlo.Module, computation: hlo.Computation, user: hlo.Instruction, number: int, whole: int
) -> int:
    """Bytes of its operand `number`, of `whole` bytes, that a user reads."""
    if user.opcode in _SLICES and number == 0:
        return sum(array.nbytes for array in hlo.arrays(user.type))
    if user.opcode == "dynamic-update-slice" and number == 0:
        return 0
    if user.opcode == "tuple" or base(user.opcode) in OPCODES or user.target.startswith("AsyncCollective"):
        return 0
    if user.opcode in _ALIASES:
        return _used(module, computation, user.name, whole)
    body = module.body(user.called) if user.opcode == "fusion" else None
    if body is None:
        return whole
    names = [i.name for i in body if i.opcode == "parameter" and i.inside == str(number)]
    return sum(_used(module, body, name, whole) for name in names)


def _used(module: hlo.Module, computation: hlo.Computation, name: str, whole: int) -> int:
    """Bytes of a value that its users read; all of it where it is the result."""
    if name == computation.root:
        return whole
    total = 0
    for user in computation:
        for number, reference in enumerate(user.operands):
            if hlo.split_reference(reference)[0] == name:
                total += _taken(module, computation, user, number, whole)
    return min(whole, total)


def _made(module: hlo.Module, computation: hlo.Computation, name: str, text: str) -> int:
    """Bytes that are written for a value of the type `text`: of an update in place the update alone."""
    instruction = computation.instructions[name]
    if instruction.opcode == "tuple":
        parts = zip(instruction.operands, hlo.arrays(text), strict=False)
        return sum(
            _made(module, computation, hlo.split_reference(reference)[0], computation.type_of(reference))
            for reference, array in parts
            if array.space == 0
        )
    whole = _device_bytes(text)
    if instruction.opcode == "parameter" or base(instruction.opcode) in OPCODES:
        return 0
    if instruction.opcode == "dynamic-update-slice":
        return min(whole, sum(a.nbytes for a in hlo.arrays(computation.type_of(instruction.operands[1]))))
    if instruction.opcode in _ALIASES:
        return min(whole, _made(module, computation, hlo.split_reference(instruction.operands[0])[0], text))
    body = module.body(instruction.called) if instruction.opcode == "fusion" else None
    return whole if body is None else min(whole, _made(module, body, body.root, text))
