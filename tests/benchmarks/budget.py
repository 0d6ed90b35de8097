"""Budgets against preset policies: peaks as predicted and as compiled, and the compiler's estimated cycles.

    python -m tests.benchmarks.budget            # 4 layers of Llama 7B on v5e-16, compiled to the end
    python -m tests.benchmarks.budget chip       # 2 layers on one chip, without collectives
    python -m tests.benchmarks.budget 7b         # all layers on v5e-16: peaks and recomputed flops, no cycles

Budgets are parts of the way from the preset that takes least to the one that takes most. The same program is
compiled once, whatever it is called: a minute of two idle cores each, and a case is ten to twelve programs.

The compiler's cycles are those of its own compute: neither collectives nor what is moved to and from the host
is among them. For programs that offload, the time that PCIe takes beyond a pass over the layers, in cycles,
is added. To hold: no preset that fits a budget has fewer cycles than what is chosen for it. It cannot hold
for any two programs: fusions, memory on the chip and windowed einsums, decided anew for each, move 1 to 3 %
of the cycles either way (on one chip, keeping `out_proj` alone has 1.5 % more than keeping nothing, on
sixteen 2.8 % fewer).
"""

from __future__ import annotations

import dataclasses
import sys

from xform import Narrow, Plan, PlanError, Shard, aot, parallelize, topologies
from xform.memory.budget import work
from xform.memory.policies import POLICIES
from xform.memory.speeds import HOST
from xform.models import llama
from xform.passes.remat import Remat

LENGTH = 2048
OMITTED = ("none", "custom", "minimal_with_quantization", "minimal_with_context_and_quantization")
BUDGETS_7B = (9e9, 11e9, 13e9, 15.75e9)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one machine; `full`: to be compiled to the end."""

    topology: str
    layers: int
    full: bool


CASES = {"small": Case("v5e-16", 4, True), "chip": Case("v5e-1", 2, True), "7b": Case("v5e-16", 32, False)}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes of device memory, flops computed again, cycles with what waits for the host (0 where not compiled
    to the end).
    """

    peak: float
    again: float
    cycles: float


class Bench:
    """Compiles steps of one case, each program once."""

    def __init__(self, case: Case) -> None:
        self.case, self.topology = case, topologies.parse(case.topology)
        self.known: dict[str, Compiled] = {}

    def compiled(self, remat: Remat) -> tuple[Compiled, list[str]]:
        """A training step with one policy, a sequence a device, FSDP over all of them; what remat said."""
        topology = self.topology
        count = topology.device_count
        fn, args = llama.train_step(
            size="7b", batch=count, length=LENGTH, layers=self.case.layers, remat=False
        )
        plan = Plan({"fsdp": count}, [Shard(), remat, Narrow()])
        step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0)
        lowered = step.lower(*args)
        said = [line for line in lowered.report().splitlines() if line.startswith("remat: ")]
        text = lowered.lowered.as_text()
        if text not in self.known:
            result = aot.compile_lowered(
                lowered.lowered, topology=topology, mesh=step.mesh, full=self.case.full
            )
            self.known[text] = _figures(result, topology)
        return self.known[text], said


def _figures(result: aot.Result, topology: topologies.Topology) -> Compiled:
    sizes = {key: int(result.memory[key] or 0) for key in ("argument", "output", "alias", "temp")}
    peak = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]
    host, flops = result.costs.host, result.costs.dot_flops
    moved = host["to_host"].wire_bytes if "to_host" in host else 0.0
    waits = max(0.0, moved / HOST - flops.get("forward", 0.0) / topology.peak_flops)
    cycles = result.cycles + waits * topology.clock if result.cycles is not None else 0.0
    return Compiled(peak, flops.get("remat", 0.0), cycles)


def line(name: str, found: Compiled) -> str:
    cycles = f"{found.cycles / 1e6:9.2f} Mcycles" if found.cycles else ""
    return f"{name:34} peak {found.peak / 1e9:7.3f} GB  again {work(found.again):>14} {cycles}"


def main(arguments: list[str]) -> None:
    case = CASES[next(iter(arguments), "small")]
    bench = Bench(case)
    presets: dict[str, Compiled] = {}
    for name in POLICIES:
        if name in OMITTED:
            continue
        try:
            presets[name] = bench.compiled(Remat(name))[0]  # type: ignore[arg-type]
            print(line(name, presets[name]), flush=True)
        except aot.OutOfDeviceMemory:
            print(f"{name:34} does not fit the device", flush=True)
    peaks = sorted(row.peak for row in presets.values())
    between = [peaks[0] + (peaks[-1] - peaks[0]) * part for part in (0.3, 0.6, 1.0)]
    for budget in between if case.full else BUDGETS_7B:
        try:
            found, said = bench.compiled(Remat(budget=int(budget)))
        except PlanError as error:
            print(f"\nbudget {budget / 1e9:.3f} GB: {error}", flush=True)
            continue
        print(line(f"\nbudget {budget / 1e9:.3f} GB", found))
        print("\n".join(f"    {each}" for each in said))
        fits = {n: row for n, row in presets.items() if row.peak <= budget}
        print("    presets that fit:")
        print("\n".join(f"        {line(*item)}" for item in fits.items()) or "        none")
        fewer = [n for n, row in fits.items() if row.cycles < found.cycles]
        if case.full:
            print(f"    fewer cycles in: {', '.join(fewer) or 'none of them'}", flush=True)


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
