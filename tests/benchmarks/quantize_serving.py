"""Steps that serve with their weights as codes, compiled for a TPU slice to the end.

    python -m tests.benchmarks.quantize_serving [decode prefill fsdp] [--recipes int8_weights,nf4_weights]

Llama 3 8B, all floats bfloat16, per device: "decode", one token for each of 16 texts of 128, and "prefill", 8
texts of 512, both with tensor=8 on v5e-8; "fsdp", the prefill with fsdp=8, whose weights come together for
each layer. Printed are gigabytes of arguments, of temporaries and on the wire, millions of estimated cycles,
each with its ratio to the same step in bfloat16, and how many numbers the largest array of floats made of
codes has that stands in the device's memory; what a fusion with its product holds inside does not.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from xform import Plan, Quantize, Shard, hlo, parallelize, topologies
from xform.aot import Result, compile_lowered
from xform.models import llama
from xform.quantization.recipes import RECIPES

STEPS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "decode": (llama.decode_step, {"tensor": 8}, {"batch": 16, "length": 128}),
    "prefill": (llama.forward, {"tensor": 8}, {"batch": 8, "length": 512}),
    "fsdp": (llama.forward, {"fsdp": 8}, {"batch": 8, "length": 512}),
}
FLOATS = "bfloat16"
OF_CODES = re.compile(r"\bweights\.")
TITLES = ("argument GB", "temp GB", "wire GB", "Mcycles", "codes in floats")
SHOWN = (FLOATS, "int8_weights", "int8_forward", "fp8_weights", "int4_weights", "nf4_weights")


def compiled(step: str, recipe: str) -> Result:
    """A step with the weights that a recipe quantizes given as codes."""
    make, mesh, options = STEPS[step]
    fn, args = make(size="8b", **options)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), args[0])
    topology = topologies.parse("v5e-8")
    shard = Shard(collectives="explicit")
    passes = [shard] if recipe == FLOATS else [Quantize(recipe), shard]
    donated = 1 if step == "decode" else None
    ours = parallelize(fn, Plan(mesh, passes), devices=topology.devices(), donate_argnums=donated)
    given = params if recipe == FLOATS else ours.quantize(params, *args[1:])
    lowered = ours.lower(given, *args[1:])
    result = compile_lowered(lowered.lowered, topology=topology, mesh=ours.mesh, full=True)
    result.check_promises(lowered.program.laid_out, lowered.program.report)
    return result


def figures(result: Result) -> tuple[float, float, float, float]:
    """GB of arguments, of temporaries and on the wire; millions of cycles."""
    memory = result.memory
    gb = ((memory["argument"] or 0) / 1e9, (memory["temp"] or 0) / 1e9, result.costs.wire_bytes / 1e9)
    return (*gb, (result.cycles or 0) / 1e6)


def in_floats(result: Result) -> int:
    """The numbers of the largest array of floats in the device's memory that is made of codes and no product,
    outside of fusions; 0: there is none.
    """
    module = hlo.parse(result.hlo_text)
    every = [i for computation in module.computations.values() for i in computation]
    fused = {i.called for i in every if i.opcode == "fusion"}
    outside = [i for name, body in module.computations.items() if name not in fused for i in body]
    made = [i for i in outside if OF_CODES.search(i.op_name) and not i.op_name.endswith("dot_general")]
    arrays = [a for i in made for a in hlo.arrays(i.type) if a.bits > 8 and a.space == 0]
    return max((math.prod(a.dims) for a in arrays), default=0)


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--recipes", default=",".join(SHOWN))
    options = parser.parse_args()
    for step in options.steps or STEPS:
        if step not in STEPS:
            parser.error(f"no step {step!r}; there are {', '.join(STEPS)}")
        print(f"\n{step:16}" + "".join(f"{title:>18}" for title in TITLES))
        base: tuple[float, ...] | None = None
        for recipe in options.recipes.split(","):
            if recipe != FLOATS and recipe not in RECIPES:
                parser.error(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
            result = compiled(step, recipe)
            own = figures(result)
            base = base or own
            cells = [f"{x:.3f} ({x / y:.2f})" if y else f"{x:.3f}" for x, y in zip(own, base, strict=True)]
            cells.append(str(in_floats(result)) if recipe != FLOATS else "")
            print(f"{recipe:16}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
