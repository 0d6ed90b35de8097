"""Holds a compiled program to what the passes promised: the tensor and the cause of each promise it breaks.

A stacked tensor is kept if a loop carries a buffer for as many layers, of as many elements a layer as fall to
a device, in the memory that it should be in. Products that are computed again bear that in their names; those
that the compiler merged with the first computation are gone, and their arithmetic with them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from xform import hlo
from xform.errors import PromiseError
from xform.hlo.costs import Costs
from xform.hlo.costs import costs as costs_of
from xform.promises import multiplied
from xform.promises.kept import Again, Kept, again, kept
from xform.report import Keeping, Note, Promise, Report, amount
from xform.trace import Jaxpr

SLACK = 0.02
"""The part of what is computed again that the compiler may do otherwise: products that are too small."""

PEELED = 2
"""Of a loop of so many turns the compiler leaves none."""

UNROLLED = "outside a loop the compiler copies to the host as late as it likes: roll the layers"
NESTED = "in a loop within a loop the compiler keeps it on the device: flatten the loops"
NOT_SENT = "the program itself does not send it there"


def check_compiled(jaxpr: Jaxpr, report: Report, compiled: jax.stages.Compiled) -> None:
    """`check` of what `Lowered.compile` gave; where that is no TPU's program, the report says so instead."""
    if not report.promises:
        return
    devices = {device for s in jax.tree.leaves(compiled.output_shardings) for device in s.device_set}
    if any(device.platform != "tpu" for device in devices):
        what = "a check of what was promised"
        note = Note("declined", "promises", what, "only a TPU's program says where things lie; see xform aot")
        if note not in report.of("declined"):
            report.add(note)
        return
    text = compiled.as_text() or ""
    memory = {"host_temp": getattr(compiled.memory_analysis(), "host_temp_size_in_bytes", None)}
    check(jaxpr, report, text, costs_of(text), memory, len(devices))


def check(
    jaxpr: Jaxpr, report: Report, text: str, costs: Costs, memory: Mapping[str, int | None], devices: int
) -> None:
    """Raises PromiseError where the compiled program breaks promises of the report, naming each.

    jaxpr: the program after all passes. text, costs, memory: of the scheduled module it was compiled to for
    `devices` devices; memory in bytes a device, "host_temp" of it.
    """
    if not report.promises:
        return
    if found := list(broken(jaxpr, report.promises, hlo.parse(text), costs, memory, devices)):
        raise PromiseError("\n".join(["the compiled program does not keep what was promised:", *found]))
    kinds = Counter("by a kernel" if p.kind == "kernel" else p.kind for p in report.promises)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    report.did("promises", "kept in the compiled program", f"tensors {counts}")
    if unread := sorted(_unread(jaxpr, report.promises)):
        report.did(
            "promises", f"nothing is kept of {', '.join(unread)}", "the backward pass does not read it"
        )
    if unseen := multiplied.unseen(report.promises, costs):
        why = "it has no dot of theirs: the compiler makes something else of small ones"
        report.did("promises", f"in how many bits {', '.join(unseen)} multiply is not seen", why)


def broken(
    jaxpr: Jaxpr,
    promises: Sequence[Promise],
    module: hlo.Module,
    costs: Costs,
    memory: Mapping[str, int | None],
    devices: int,
) -> Iterator[str]:
    """A line for each promise that is broken."""
    tensors, repeated = kept(jaxpr), again(jaxpr)
    compiled = _Compiled(module, memory, devices)
    yield from compiled.arguments([promise for promise in promises if promise.nbytes])
    # A name is looked for in all layers at once.
    named = {(p.kind, p.tensor): p for p in reversed(promises) if not p.nbytes}
    for promise in reversed(named.values()):
        if promise.kind == "offloaded":
            yield from compiled.offloaded(promise, tensors, repeated)
        elif promise.kind == "saved":
            yield from compiled.saved(promise, tensors, repeated)
    yield from _kernels([p for p in promises if p.kind == "kernel"], costs)
    yield from multiplied.broken([p for p in promises if p.kind == "quantized"], jaxpr, costs)
    names = sorted(name for kind, name in named if kind == "recomputed")
    if names:
        yield from _recomputed(names, repeated, costs.again, devices)


def _unread(jaxpr: Jaxpr, promises: Iterable[Promise]) -> set[str]:
    """The tensors that were to be saved or offloaded, of which the backward pass reads nothing."""
    kept_names = {tensor.name for tensor in kept(jaxpr)}
    tensors = (p for p in promises if p.kind in ("saved", "offloaded") and not p.nbytes)
    return {p.tensor for p in tensors} - kept_names


class _Compiled:
    """What lies where in a compiled program."""

    def __init__(self, module: hlo.Module, memory: Mapping[str, int | None], devices: int) -> None:
        self.memory, self.devices = memory, devices
        self.loops = [hlo.arrays(i.type) for c in module.computations.values() for i in c if _is_loop(i)]
        entry = [i for i in module.entry if i.opcode == "parameter"]
        self.host_arguments = sum(
            a.nbytes for i in entry for a in hlo.arrays(i.type) if a.space == hlo.HOST_SPACE
        )

    def arguments(self, promises: Sequence[Promise]) -> Iterator[str]:
        wanted = sum(promise.nbytes for promise in promises)
        if self.host_arguments < wanted:
            names = " and ".join(promise.tensor for promise in promises)
            both = dataclasses.replace(promises[0], tensor=names)
            yield _line(both, self.host_arguments, wanted, "as arguments they lie on the device")

    def offloaded(self, promise: Promise, tensors: Iterable[Kept], repeated: Again) -> Iterator[str]:
        own = [tensor for tensor in tensors if tensor.name == promise.tensor]
        on_host = [tensor for tensor in own if tensor.on_host]
        if not on_host:  # what the backward pass does not read is nowhere
            if own or promise.tensor in repeated.names:
                yield self._line(promise, 0, own, NOT_SENT)
            return
        looped = Counter(tensor for tensor in on_host if self._is_looped(tensor))
        for tensor, number in looped.items():
            part = self._found(tensor, number, on_host=True)
            if part < 1:
                why = NESTED if len(tensor.stacked) > 1 else "the compiler keeps it on the device"
                yield self._line(promise, part, [tensor] * number, why)
        unrolled = [tensor for tensor in on_host if not self._is_looped(tensor)]
        wanted = sum(t.nbytes for t in tensors if t.on_host and not self._is_looped(t)) // self.devices
        there = self.memory.get("host_temp") or 0
        if unrolled and there < (1 - SLACK) * wanted:
            yield self._line(promise, there / wanted, unrolled, UNROLLED)

    def saved(self, promise: Promise, tensors: Iterable[Kept], repeated: Again) -> Iterator[str]:
        own = [tensor for tensor in tensors if tensor.name == promise.tensor and not tensor.on_host]
        if promise.tensor in repeated.names:
            yield self._line(promise, 0, own, "the program itself computes it again")
        for tensor, number in Counter(filter(self._is_looped, own)).items():
            part = self._found(tensor, number, on_host=False)
            if part < 1:
                yield self._line(promise, part, [tensor] * number, "the compiler does not keep it")

    def _is_looped(self, tensor: Kept) -> bool:
        return tensor.looped and tensor.count > PEELED

    def _line(self, promise: Promise, part: float, tensors: Sequence[Kept], why: str) -> str:
        wanted = sum(tensor.nbytes for tensor in tensors) // self.devices
        return _line(promise, int(part * wanted), wanted, why)

    def _found(self, tensor: Kept, number: int, on_host: bool) -> float:
        """The part of `number` such tensors that some loop carries."""
        best = 0
        for arrays in self.loops:
            counts = [self._layers(a, tensor) for a in arrays if (a.space == hlo.HOST_SPACE) == on_host]
            best = max(best, sum(sorted(counts, reverse=True)[:number]))
        return best / (number * tensor.count)

    def _layers(self, array: hlo.Array, tensor: Kept) -> int:
        """Of how many layers an array can hold a device's part of a tensor."""
        whole, found = math.prod(tensor.shape), 0
        for lead in range(len(array.dims)):
            layers, part = math.prod(array.dims[:lead]), math.prod(array.dims[lead:])
            if part and whole % part == 0 and self.devices % (whole // part) == 0:
                if layers == tensor.count:
                    return layers
                found = found or min(layers, tensor.count)
        return found


def _is_loop(instruction: hlo.Instruction) -> bool:
    return instruction.opcode == "while"


def _recomputed(
    names: Sequence[str], repeated: Again, compiled: Counter[float], devices: int
) -> Iterator[str]:
    """Whether the arithmetic that the program asks to be done again is."""
    wanted = sum(flops * count for flops, count in repeated.flops.items())
    there = sum(flops * count for flops, count in compiled.items()) * devices
    if there >= (1 - SLACK) * wanted:
        return
    why = "the compiler merged it with the first computation"
    if repeated.merged:
        lines = ", ".join(dict.fromkeys(repeated.merged))
        why = f"jax.checkpoint(prevent_cse=False) outside a loop ({lines}): {why}"
    done = f"{there / 1e9:.4g} of {wanted / 1e9:.4g} GFLOP done again"
    yield f"  recomputation of {', '.join(names)}: {done}: {why}"


def _kernels(promises: Sequence[Promise], costs: Costs) -> Iterator[str]:
    """Whether there is a kernel for each operation that was to be one; a loop's stands once, and runs
    often.
    """
    there = sum(kernel.count for kernel in costs.kernels.values())
    if there < len(promises):
        names = ", ".join(dict.fromkeys(f"{p.tensor} ({p.where})" if p.where else p.tensor for p in promises))
        yield f"  kernels of {names}: {there} run: something else computes the others"


_KEEPING: dict[Keeping, tuple[str, str]] = {
    "saved": ("saving", "saved"),
    "offloaded": ("offload", "in host memory"),
    "recomputed": ("recomputation", "done again"),
    "kernel": ("kernel", "run"),
    "quantized": ("quantization", "multiplied"),
}


def _line(promise: Promise, there: int, wanted: int, why: str) -> str:
    noun, verb = _KEEPING[promise.kind]
    where = f" ({promise.where})" if promise.where else ""
    share = f"{amount(there)} of {amount(wanted)} a device" if wanted else "none of it"
    return f"  {noun} of {promise.tensor}{where}: {share} {verb}: {why}"
