"""What unrolled layers cost after Roll, against the same layers written in a loop.

    python -m tests.benchmarks.roll [--layers 32] [--repeats 3] [--full]

Compiles a Llama 7B training step for sixteen v5e chips (fsdp 16, one sequence of 2048 a chip, full remat)
twice, with its layers in a Python loop under a plan with Roll, and with scanned layers. Prints the seconds to
trace, rewrite and lower, the compiler's own, and temp memory, and the ratios: to reach are 1.15 for the
compiler's seconds and 1.03 for the memory. The seconds are the best of `--repeats`, which take turns; the
compiler's are given as time passed and as the processor's, which a busy machine changes less. The compiler
stops before code generation, unless `--full` has it go on, which takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys

from xform import Narrow, Plan, Remat, Roll, Shard, parallelize, topologies
from xform.aot import compile_lowered
from xform.models import llama


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds before the compiler and in it, its processor's seconds, and GB of temporaries a device."""

    lowering: float
    compiling: float
    processor: float
    temp: float


def cost(layers: int, scan: bool, full: bool) -> Cost:
    topology = topologies.parse("v5e-16")
    fn, args = llama.train_step(size="7b", batch=16, length=2048, layers=layers, scan=scan, remat=False)
    plan = Plan({"fsdp": 16}, [*([] if scan else [Roll()]), Remat("full"), Narrow(), Shard()])
    step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0)
    lowered = step.lower(*args)
    before = processor()
    found = compile_lowered(lowered.lowered, topology=topology, mesh=step.mesh, full=full)
    return Cost(
        sum(lowered.seconds.values()),
        found.seconds["compile"],
        processor() - before,
        (found.memory["temp"] or 0) / 1e9,
    )


def processor() -> float:
    """The processor's seconds of the compilations that have ended, each a process of its own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def best(costs: list[Cost]) -> Cost:
    return Cost(*(min(values) for values in zip(*map(dataclasses.astuple, costs), strict=True)))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.roll")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many")
    parser.add_argument("--full", action="store_true", help="with code generation")
    options = parser.parse_args(arguments)
    found: dict[bool, list[Cost]] = {True: [], False: []}
    for _ in range(options.repeats):
        for scan, costs in found.items():
            costs.append(cost(options.layers, scan, options.full))
    scanned, rolled = best(found[True]), best(found[False])
    pairs = zip(dataclasses.astuple(rolled), dataclasses.astuple(scanned), strict=True)
    ratio = Cost(*(a / b for a, b in pairs))
    print(f"{f'{options.layers} layers':10}  lowering s  compiling s  processor s  temp GB")
    for what, each in (("scanned", scanned), ("rolled", rolled), ("ratio", ratio)):
        times = f"{each.lowering:11.2f}  {each.compiling:11.2f}  {each.processor:11.2f}"
        print(f"{what:10} {times}  {each.temp:7.3f}")


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
