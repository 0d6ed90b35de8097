"""What runs beside the collectives of a loop over layers, by chip and by the plan's `overlap`.

    python -m tests.benchmarks.overlap [--layers COUNT] [TOPOLOGY ...]

Layers of Llama 7B, full remat, fully sharded over each slice, compiled up to the schedule. Prints bytes on
the wire, how many of them are asynchronous in the schedule, the share of all compute that is scheduled
between the start and the end of some collective, and temp memory. Compute is counted at peak and at memory
bandwidth.
"""

from __future__ import annotations

import argparse
import sys

from xform import Plan, parallelize, topologies
from xform.aot import compile_lowered
from xform.models import llama
from xform.passes.narrow import Narrow
from xform.passes.remat import Remat
from xform.passes.shard import Shard

TOPOLOGIES = ("v5e-16", "v6e-16", "v5p-128")
WAYS = ((), ("prefetch",), ("permute",), ("prefetch", "permute"))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overlap")
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES, metavar="TOPOLOGY")
    parser.add_argument("--layers", type=int, default=8, metavar="COUNT")
    options = parser.parse_args(arguments)
    print(f"{'slice':10} {'overlap':20} {'wire GB':>8} {'asynchronous':>13} {'beside':>7} {'temp GB':>8}")
    for name in options.topologies:
        topology = topologies.parse(name)
        chips = topology.device_count
        for way in WAYS:
            shard = Shard(collectives="explicit", overlap=way)
            plan = Plan({"fsdp": chips}, [Remat("full"), Narrow(), shard])
            fn, args = llama.train_step(
                size="7b", batch=chips, length=2048, layers=options.layers, scan=True, remat=False
            )
            step = parallelize(fn, plan, devices=topology.devices(), donate_argnums=0)
            made = compile_lowered(step.lower(*args).lowered, topology=topology, mesh=step.mesh)
            sums = [s for kinds in made.overlap.axes.values() for s in kinds.values()]
            flying = sum(s.async_bytes for s in sums)
            wire = flying + sum(s.sync_bytes for s in sums)
            share = made.overlap.beside / made.overlap.seconds
            temp = (made.memory["temp"] or 0) / 1e9
            words = ", ".join(way) or "none"
            print(
                f"{name:10} {words:20} {wire / 1e9:8.2f} {flying / wire:13.0%} {share:7.0%} {temp:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    topologies.prepare_environment()
    main(sys.argv[1:])
