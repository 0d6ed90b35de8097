"""Compiles a lowered program for a TPU topology, without a TPU, and reads what the compiler made of it.

The real XLA:TPU compiler runs (libtpu), in a child process (`xform.aot.child`). By default it is ended as
soon as the scheduled, buffer-assigned module is on disk: seconds, where code generation takes minutes.
Traffic, arithmetic, trip counts and memory are those of a full compilation; what only that can tell
(estimated cycles, peak memory, errors of code generation) needs `full=True`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from xform import hlo, promises
from xform.aot.donation import Donation, donation
from xform.aot.packing import pack
from xform.errors import PlanError
from xform.hlo import buffers
from xform.hlo import collectives as hlo_collectives
from xform.hlo import costs as hlo_costs
from xform.hlo import overlap as hlo_overlap
from xform.promises import multiplied
from xform.report import Report, Traffic
from xform.topologies import ENVIRONMENT, Topology, prepare_environment
from xform.trace import Jaxpr

CHILD = Path(__file__).with_name("child.py")
POLL_SECONDS = 0.05
PROGRESS_SECONDS = 5.0
WORTH_NAMING = 1000  # buffers of at least this part of a device's memory are named
SMALL = 0.001  # of the bytes on the wire: below it a stage is not shown
WHERE = 16  # columns for the axes that a collective spans, at least
SCOPES = 12  # parts of the model whose cycles are shown
_SCHEDULED = "*.after_optimizations_after_buffer_assignment.txt"
_BUFFERS = "*.after_optimizations-buffer-assignment.txt"
_UNFINISHED = "stopped before code generation: its errors, cycles and peak memory stay unseen (see full)"


class OutOfDeviceMemory(PlanError):
    """The program needs more memory than the topology's devices have. `largest`: the largest buffers."""

    def __init__(self, message: str, largest: list[buffers.Buffer]) -> None:
        super().__init__(message)
        self.largest = largest


class CompilerError(RuntimeError):
    """XLA refused the program, for a reason other than memory; its own words."""


@dataclasses.dataclass
class Result:
    """What one compilation told; all figures are per device and call.

    `memory` is in bytes; `peak`, and `costs.cycles` with it, only where `full`. `hlo_text` is the scheduled
    module. `ideal_flops`: what the model needs of them, where that was given. `written`: what the program
    sends as it is written, where its collectives are written out.
    """

    topology: Topology
    mesh: dict[str, int]
    seconds: dict[str, float]
    memory: dict[str, int | None]
    costs: hlo_costs.Costs
    overlap: hlo_overlap.Overlap
    hlo_text: str
    full: bool
    donation: Donation
    ideal_flops: float | None = None
    written: Traffic | None = None

    @property
    def notes(self) -> list[str]:
        donated = f"{self.donation}{_sized(self.memory['alias'], ' ({})')}"
        return [donated, *self.costs.notes, *self.overlap.notes, *([] if self.full else [_UNFINISHED])]

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of its own compute: no kernels, collectives or waiting; not a step time."""
        return self.costs.cycles if self.full else None

    def check_promises(self, jaxpr: Jaxpr, report: Report) -> None:
        """Raises PromiseError where this program, compiled from `jaxpr`, breaks a promise of the report."""
        devices = math.prod(self.mesh.values())
        promises.check(jaxpr, report, self.hlo_text, self.costs, self.memory, devices)

    def to_json(self) -> dict[str, Any]:
        costs = self.costs
        return {
            "topology": self.topology.name,
            "mesh": self.mesh,
            "seconds": {key: round(value, 3) for key, value in self.seconds.items()},
            "memory": self.memory,
            "collectives": {kind: traffic.to_json() for kind, traffic in sorted(costs.collectives.items())},
            "collectives_by_axis": {
                axes: {kind: traffic.to_json() for kind, traffic in sorted(kinds.items())}
                for axes, kinds in sorted(costs.axes.items())
            },
            "collectives_by_stage": {
                axes: {
                    stage: {kind: traffic.to_json() for kind, traffic in sorted(kinds.items())}
                    for stage, kinds in sorted(stages.items())
                }
                for axes, stages in sorted(costs.stages.items())
            },
            "written": None if self.written is None else _written_json(self.written, costs),
            "overlap": self.overlap.to_json(),
            "cycles": self.cycles,
            "cycles_by_scope": dict(sorted(costs.scopes.items())) if self.full else None,
            "dot_flops": costs.flops,
            "ideal_dot_flops": self.ideal_flops,
            "dot_flops_by_phase": dict(sorted(costs.dot_flops.items())),
            "kernels": [
                {"name": name, "count": kernel.count, "claimed_flops": kernel.claimed_flops}
                for name, kernel in sorted(costs.kernels.items())
            ],
            "quantized_dots": None if (found := multiplied.share(costs)) is None else found.to_json(),
            "host_transfers": {way: traffic.to_json() for way, traffic in sorted(costs.host.items())},
            "notes": self.notes,
            "full": self.full,
        }

    def render(self) -> str:
        """The same for people."""
        return "\n".join(_rendered(self))


def compile_lowered(
    lowered: jax.stages.Lowered,
    *,
    topology: Topology,
    mesh: jax.sharding.Mesh,
    full: bool = False,
    seconds: Mapping[str, float] | None = None,
    progress: Callable[[str], None] | None = None,
    ideal_flops: float | None = None,
    directory: Path | None = None,
    parts: Mapping[str, Mapping[str, int]] | None = None,
    written: Traffic | None = None,
) -> Result:
    """Compile a program lowered for devices of `topology`: `jax.jit(...).lower(...)` with shardings on them.

    Stops before code generation unless `full`. `seconds` are those that were spent before (trace, rewrite,
    lower), to be reported with this compilation's. `progress` is told, now and then, what is going on.
    `ideal_flops`: what the model needs for one call, on all devices together (`xform.flops`). `directory`:
    an empty one, in which what the compiler writes down is left (under `dump`). `parts`: how axes of the mesh
    are cut for collectives that run in stages, as `collectives.Mesh` has it. `written`: what the program
    sends as it is written, to be reported beside what is compiled. Raises OutOfDeviceMemory, CompilerError,
    and PlanError without libtpu.
    """
    prepare_environment()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xform-aot-") as name:
        work = directory or Path(name)
        pack(lowered, topology, work)
        _run_child(work, full, progress or (lambda line: None))
        text, memory = _outcome(work, full, topology)
    axes = dict(mesh.shape)
    slices = tuple(getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat)
    partitions = hlo_collectives.Mesh(axes, slices, parts or {})
    module = hlo.parse(text)
    chip = hlo_overlap.Chip(topology.peak_flops, topology.bandwidth, topology.clock)
    result = Result(
        topology,
        axes,
        dict(seconds or {}),
        memory,
        hlo_costs.costs(module, partitions),
        hlo_overlap.overlap(module, chip, partitions),
        text,
        full,
        donation(lowered, text),
        ideal_flops / mesh.size if ideal_flops else None,
        written,
    )
    result.seconds["compile"] = time.monotonic() - start
    return result


def _run_child(directory: Path, full: bool, progress: Callable[[str], None]) -> None:
    """Run the child until it ends, or has written what is wanted. It never outlives this call."""
    environment = ENVIRONMENT | os.environ | {"JAX_PLATFORMS": "cpu"}
    start = told = time.monotonic()
    with (directory / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), str(directory)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
        try:
            while child.poll() is None and (full or _scheduled(directory) is None):
                time.sleep(POLL_SECONDS)
                if time.monotonic() - told > PROGRESS_SECONDS:
                    told = time.monotonic()
                    last = "generating code" if full else "writing out the schedule"
                    stage = "compiling" if _found(directory, _BUFFERS) is None else last
                    progress(f"{stage}: {told - start:.0f} s")
        finally:
            child.kill()
            child.wait()


def _found(directory: Path, pattern: str) -> Path | None:
    return min((directory / "dump").glob(pattern), default=None)


def _scheduled(directory: Path) -> str | None:
    """The scheduled module's text, once all of it, and the buffer assignment before it, are on disk."""
    path = _found(directory, _SCHEDULED)
    if path is None or _found(directory, _BUFFERS) is None:
        return None
    text = path.read_text()
    return text if "\nENTRY " in text and text.rstrip().endswith("\n}") else None


def _outcome(directory: Path, full: bool, topology: Topology) -> tuple[str, dict[str, int | None]]:
    """The module's text and memory figures, or the error that stopped the child before it had them."""
    assigned = _found(directory, _BUFFERS)
    memory: dict[str, int | None] = {"peak": None}
    if full and (directory / "memory.json").exists():
        stats = json.loads((directory / "memory.json").read_text())
        memory |= {key: stats.get(f"{key}_size_in_bytes", 0) for key in buffers.memory("")}
        memory["peak"] = stats["peak_memory_in_bytes"]
        return (directory / "compiled.txt").read_text(), memory
    text = None if full else _scheduled(directory)
    if text is not None and assigned is not None:
        return text, memory | buffers.memory(assigned.read_text())
    error = directory / "error.txt"
    if not error.exists():
        log = (directory / "log.txt").read_text(errors="replace").strip()
        raise CompilerError(f"the compiler's process died:\n{_first_lines(log) or '(it said nothing)'}")
    message = error.read_text()
    device_memory = re.search(r"RESOURCE_EXHAUSTED.*\bhbm\b", message, re.DOTALL | re.IGNORECASE)
    if device_memory:  # and not a kernel's own, vmem
        raise _out_of_memory(message, directory, topology)
    raise CompilerError(_first_lines(message))


def _first_lines(text: str, count: int = 12) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines[:count]) + (f"\n... {len(lines) - count} more lines" if len(lines) > count else "")


def _out_of_memory(message: str, directory: Path, topology: Topology) -> OutOfDeviceMemory:
    """The compiler's message made into what takes the memory, and what could be done about it."""
    found = re.search(r"required for (.*?) \(([\d.]+\w)\w*\) exceeds available HBM \(([\d.]+\w)\)", message)
    said = f"{found[1]} need {found[2]}iB, a device has {found[3]}iB" if found else _first_lines(message, 3)
    lines = [f"out of device memory on {topology.name}: {said}"]
    assigned, printed = _found(directory, _BUFFERS), _found(directory, "*.after_optimizations.txt")
    largest: list[buffers.Buffer] = []
    help_: list[str] = []
    if assigned is not None:
        text = assigned.read_text()
        largest = buffers.largest(text, hlo.parse(printed.read_text()) if printed else None)
        sizes = buffers.memory(text)
        lines.append(
            f"a device holds {_gb(sizes['argument'])} of arguments, {_gb(sizes['temp'])} of temporaries;"
            " the largest are"
        )
        lines += [f"  {buffer}" for buffer in largest if buffer.nbytes > topology.hbm / WORTH_NAMING]
        kept = sizes["argument"] + sizes["output"] - sizes["alias"]
        if sizes["temp"] > topology.hbm / 2:
            help_ += ["computing more again in the backward pass (jax.checkpoint)"]
            help_ += ["a smaller batch a device, or its gradients accumulated over parts of it"]
        if kept > topology.hbm / 2:
            help_ += ["weights and optimizer state over more devices"]
        if sizes["output"] - sizes["alias"] > topology.hbm / 4:
            help_ += ["donating the arguments that the outputs replace (--donate, donate_argnums)"]
    help_ += ["more devices on the mesh axes that shard these buffers", "devices with more memory"]
    lines += ["what would help:", *(f"  {each}" for each in help_)]
    return OutOfDeviceMemory("\n".join(lines), largest)


# For people


def _rendered(result: Result) -> list[str]:
    costs, topology, memory = result.costs, result.topology, result.memory
    mesh = " x ".join(f"{axis} {size}" for axis, size in result.mesh.items())
    seconds = ", ".join(f"{key} {value:.1f}" for key, value in result.seconds.items())
    lines = [f"{topology}, mesh {mesh}; per device:", f"seconds    {seconds}"]
    shown = ("argument", "output", "alias", "temp", "host_argument", "host_output", "host_temp")
    parts = [f"{key.replace('_', ' ')} {_gb(size)}" for key in shown if (size := memory.get(key))]
    held = f"{'peak' if memory.get('peak') else 'in all'} {_gb(_held(memory))} of {_gb(topology.hbm)}"
    lines.append(f"memory     {', '.join(parts)}; {held}")
    lines += _traffic_lines(costs)
    lines += [] if result.written is None else _written_lines(result.written, costs)
    lines += _overlap_lines(result.overlap)
    lines += [_flops_line(result)]
    if result.full:
        milliseconds = costs.cycles / topology.clock * 1e3
        lines.append(f"cycles     {costs.cycles / 1e6:,.1f} M estimated, {milliseconds:,.2f} ms of compute")
        lines += [f"           {share:6.1%} {scope}" for scope, share in _dearest(costs)]
    for way, traffic in sorted(costs.host.items()):
        lines.append(f"host       {way.replace('_', ' ')}: {traffic.count} copies, {_gb(traffic.wire_bytes)}")
    if (found := multiplied.share(costs)) is not None:
        lines.append(f"quantized  dots: {found} in eight bits")
    kernels = [f"{name} x{kernel.count}" for name, kernel in sorted(costs.kernels.items())]
    lines.append(f"kernels    {', '.join(kernels) or 'none'}")
    return lines + [f"note       {note}" for note in result.notes]


def _held(memory: Mapping[str, int | None]) -> int:
    """Bytes of device memory in all: the compiler's peak, else all arguments, results and temporaries."""
    if peak := memory.get("peak"):
        return peak
    sizes = {key: memory[key] or 0 for key in ("argument", "output", "alias", "temp")}
    return sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]


def _dearest(costs: hlo_costs.Costs) -> list[tuple[str, float]]:
    """The parts of the model that take most cycles, with their shares; what is left in one line."""
    ranked = sorted(costs.scopes.items(), key=lambda item: -item[1])
    rows = [(scope or "(no name)", cycles / max(costs.cycles, 1)) for scope, cycles in ranked[:SCOPES]]
    if rest := ranked[SCOPES:]:
        rows.append((f"in {len(rest)} others", sum(c for _, c in rest) / max(costs.cycles, 1)))
    return rows


def _traffic_lines(costs: hlo_costs.Costs) -> list[str]:
    if not costs.collectives:
        return ["wire       no collectives"]
    total = hlo_costs.Traffic()
    for traffic in costs.collectives.values():
        total.merge(traffic)
    rows = [("all", "", total)]
    if len(costs.axes) != 1:  # else the same lines follow for the one axis
        rows += [("", kind, traffic) for kind, traffic in sorted(costs.collectives.items())]
    for axes, kinds in sorted(costs.axes.items()):
        rows += [(f"over {axes}", kind, traffic) for kind, traffic in sorted(kinds.items())]
        for stage, parts in sorted(costs.stages.get(axes, {}).items()):
            if parts != kinds:  # else all of the axis's traffic is of this one stage
                rows += [(f"  in {stage}", kind, traffic) for kind, traffic in sorted(parts.items())]
    width = max(WHERE, *(len(where) for where, _, _ in rows))
    lines = []
    for index, (where, kind, traffic) in enumerate(rows):
        lead = "wire" if index == 0 else ""
        overlap = f", {traffic.async_count} asynchronous" if traffic.async_count else ""
        amount = f"{_gb(traffic.wire_bytes):>12} {traffic.count:6} times{overlap}"
        lines.append(f"{lead:10} {where:{width}} {kind:20} {amount}")
    return lines


def _written_lines(written: Traffic, costs: hlo_costs.Costs) -> list[str]:
    """What the program sends as it is written, the plan's bound, and beside both what is compiled."""
    rows = [("all", f"{_gb(written.total):>12}, compiled {_gb(costs.wire_bytes)}")]
    rows += [
        (stage, f"{_gb(wrote):>12}, compiled {_gb(compiled)}")
        for stage, wrote, compiled in _stages(written, costs)
        if max(wrote, compiled) > SMALL * written.total
    ]
    if written.bound:
        weights = _over(costs, written.batch)
        said = f"compiled {_gb(weights)}, {weights / written.bound:.2f} of it"
        rows.append(("bound", f"{_gb(written.bound):>12} for weights and their gradients, {said}"))
    width = max(WHERE, *(len(where) for where, _ in rows))
    leads = ["written", *[""] * len(rows)]
    return [f"{lead:10} {where:{width}} {said}" for lead, (where, said) in zip(leads, rows, strict=False)]


def _written_json(written: Traffic, costs: hlo_costs.Costs) -> dict[str, Any]:
    return {
        "wire_bytes": round(written.total),
        "weights": {
            "wire_bytes": round(written.weights),
            "compiled_bytes": round(_over(costs, written.batch)),
            "bound_bytes": round(written.bound),
        },
        "by_stage": {
            stage: {"wire_bytes": round(wrote), "compiled_bytes": round(compiled)}
            for stage, wrote, compiled in _stages(written, costs)
        },
    }


def _over(costs: hlo_costs.Costs, axes: Collection[str]) -> float:
    """Bytes on the wire of collectives over these axes of the mesh, or some of them, and no other."""
    return sum(_bytes(kinds) for over, kinds in costs.axes.items() if set(over.split("+")) <= set(axes))


def _stages(written: Traffic, costs: hlo_costs.Costs) -> list[tuple[str, float, float]]:
    """The stages, or axes that are not cut, that anything goes over: bytes as written and as compiled."""
    found: dict[frozenset[str], list[Any]] = {}
    for stages in written.axes.values():
        for stage, nbytes in stages.items():
            found.setdefault(frozenset(stage.split("+")), [stage, 0.0, 0.0])[1] += nbytes
    for axes, kinds in costs.axes.items():
        for stage, part in (costs.stages.get(axes) or {axes: kinds}).items():
            found.setdefault(frozenset(stage.split("+")), [stage, 0.0, 0.0])[2] += _bytes(part)
    rows = [(stage, wrote, compiled) for stage, wrote, compiled in found.values()]
    return sorted(rows, key=lambda row: -max(row[1:]))


def _bytes(kinds: Mapping[str, hlo_costs.Traffic]) -> float:
    return sum(traffic.wire_bytes for traffic in kinds.values())


def _overlap_lines(overlap: hlo_overlap.Overlap) -> list[str]:
    """What is asynchronous, and how much compute stands between starts and dones."""
    if not overlap.axes:
        return []
    by = "by the compiler's cycles" if overlap.by_cycles else "at peak and memory bandwidth, at least"
    share = overlap.beside / overlap.seconds if overlap.seconds else 0.0
    rows = [
        (axes, kind, total)
        for axes, kinds in sorted(overlap.axes.items())
        for kind, total in sorted(kinds.items())
    ]
    late = sum(total.sync_bytes for _, _, total in rows)
    lines = [
        f"overlap    collectives are in flight beside {share:.1%} of all compute"
        f" ({overlap.beside * 1e3:,.3g} of {overlap.seconds * 1e3:,.3g} ms {by}); {_gb(late)} synchronous"
    ]
    for axes, kind, total in rows:
        if total.async_bytes:
            between = (
                f"{_gb(total.async_bytes):>12} asynchronous, {total.seconds * 1e3:,.3g} ms of compute between"
            )
            lines.append(f"{'':10} {f'over {axes}':{WHERE}} {kind:20} {between}")
    return lines


def _flops_line(result: Result) -> str:
    flops = result.costs.flops
    scale, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "G")) if flops >= s), (1e6, "M"))
    phases = ", ".join(
        f"{phase} {part / scale:.3g}" for phase, part in sorted(result.costs.dot_flops.items())
    )
    milliseconds = flops / result.topology.peak_flops * 1e3
    line = f"dots       {flops / scale:.4g} {unit}FLOP ({phases or 'none'}), {milliseconds:.3g} ms at peak"
    if result.ideal_flops and flops:
        ideal = result.ideal_flops
        line += f"; the model needs {ideal / scale:.4g} {unit}FLOP, {ideal / flops:.1%} of these"
    return line


def _sized(nbytes: int | None, text: str) -> str:
    return text.format(_gb(nbytes)) if nbytes else ""


def _gb(nbytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"
