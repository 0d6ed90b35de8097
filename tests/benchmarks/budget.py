"""Budgets against preset policies: peaks as predicted and as compiled, and the compiler's estimated cycles.

    python -m tests.benchmarks.budget            # presets and choices of a small Llama, compiled to the end
    python -m tests.benchmarks.budget 7b         # Llama 7B on v5e-16: peaks and recomputed flops, no cycles

The compiler's cycles are those of its own compute: what is moved to and from the host is not among them. For
programs that offload, the time that PCIe takes beyond a pass over the layers, in cycles, is added. To hold:
no preset that fits a budget has fewer cycles than what is chosen for it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from xform import Plan, PlanError, Shard, aot, parallelize, topologies
from xform.memory.speeds import HOST
from xform.models import llama
from xform.passes.remat import POLICIES, Remat

SMALL = llama.Config(1024, 4, 512, 4, 4, 128, 1408, remat=False)
OMITTED = ("none", "custom", "minimal_with_quantization", "minimal_with_context_and_quantization")
BUDGETS_7B = ("9GB", "11GB", "13GB", "15.75GB")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """GB of device memory, TFLOP computed again, cycles with what waits for the host (0 where not compiled to
    the end), and what the report says of the budget.
    """

    peak: float
    again: float
    cycles: float
    said: tuple[str, ...] = ()


def compiled(
    remat: Remat, size: Any, batch: int, length: int, topology: topologies.Topology, full: bool
) -> Compiled:
    """A training step with one pass, FSDP over the whole topology."""
    fn, args = llama.train_step(size=size, batch=batch, length=length)
    plan = Plan({"fsdp": topology.device_count}, [Shard(), remat])
    step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0)
    lowered = step.lower(*args)
    result = aot.compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh, full=full)
    sizes = {key: int(result.memory[key] or 0) for key in ("argument", "output", "alias", "temp")}
    peak = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]
    moved = result.costs.host["to_host"].wire_bytes if "to_host" in result.costs.host else 0.0
    waits = max(0.0, moved / HOST - result.costs.dot_flops.get("forward", 0.0) / topology.peak_flops)
    again = result.costs.dot_flops.get("remat", 0.0)
    cycles = (result.cycles or 0) + waits * topology.clock
    said = tuple(line for line in lowered.report().splitlines() if "overridden" not in line)
    return Compiled(peak / 1e9, again / 1e12, cycles, said)


def presets() -> dict[str, Remat]:
    """The preset policies."""
    return {name: Remat(name, existing="override") for name in POLICIES if name not in OMITTED}  # type: ignore[arg-type]


def report(
    rows: dict[str, Compiled], budgets: Sequence[str], size: Any, options: tuple[Any, ...], full: bool
) -> None:
    for name, row in rows.items():
        print(
            f"{name:34} peak {row.peak:7.3f} GB  again {row.again:6.2f} TFLOP  {row.cycles / 1e6:.2f} Mcycles"
        )
    for budget in budgets:
        try:
            found = compiled(Remat(budget=budget, existing="override"), size, *options, full)
        except PlanError as error:
            print(f"\nbudget {budget}: {error}", flush=True)
            continue
        print(f"\nbudget {budget}: again {found.again:.2f} TFLOP, {found.cycles / 1e6:.2f} Mcycles")
        for line in found.said:
            if line.startswith("remat: ") and "promised" not in line:
                print(f"    {line}")
        room = float(budget.removesuffix("GB"))
        fits = {n: r for n, r in rows.items() if r.peak <= room}
        print("    presets that fit:", ", ".join(f"{n} ({r.again:.1f})" for n, r in fits.items()) or "none")
        better = [n for n, r in fits.items() if full and r.cycles < found.cycles]
        if full:
            print(f"    fewer cycles in: {', '.join(better) or 'none of them'}", flush=True)


def main(arguments: list[str]) -> None:
    if "7b" in arguments:
        options: tuple[Any, ...] = (16, 2048, topologies.parse("v5e-16"))
        size: Any = "7b"
    else:
        options, size = (8, 512, topologies.parse("v5e-4")), SMALL
    full = size != "7b"
    rows = {}
    for name, remat in presets().items():
        try:
            rows[name] = compiled(remat, size, *options, full)
        except aot.OutOfDeviceMemory:
            print(f"{name:34} does not fit the device")
    peaks = sorted(row.peak for row in rows.values())
    between = [f"{peaks[0] + (peaks[-1] - peaks[0]) * part:.4f}GB" for part in (0.3, 0.6, 1.0)]
    report(rows, between if full else BUDGETS_7B, size, options, full)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
