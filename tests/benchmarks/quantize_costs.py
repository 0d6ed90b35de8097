"""What products take in floats and quantized: estimates beside what the TPU compiler counts.

    python -m tests.benchmarks.quantize_costs [--recipes NAME ...] [--tokens COUNT ...] [--sizes DxF ...]
        [--forward] [CHIP ...]

Compiles one product of bfloat16 and its gradients for one chip, alone. Each row has milliseconds by the
compiler's estimated cycles and by `xform.quantization.costs`, in floats and quantized, and whether both come
to the same decision; last, in how many rows they do, and by how much the others were missed.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp

from xform import hlo, topologies
from xform.hlo.costs import costs
from xform.quantization.costs import Sizes, in_floats, quantized
from xform.quantization.recipes import RECIPES, Recipe
from xform.quantization.training import quantized_dot
from xform.quantization.weighing import MARGIN

TOPOLOGIES = {"v5e": "v5e-1", "v5p": "v5p:2x2x1", "v6e": "v6e-1"}
SIZES = ["256x1024", "1024x1024", "1024x4096", "4096x4096", "4096x16384", "16384x4096"]
DIMS = (((1,), (0,)), ((), ()))


def counted(topology: Any, recipe: Recipe | None, shape: tuple[int, int, int], forward: bool) -> float:
    """Seconds by the compiler's cycles."""
    t, d, f = shape

    def product(x: Any, w: Any) -> Any:
        return jnp.dot(x, w) if recipe is None else quantized_dot(x, w, DIMS, recipe.products(1, 0))

    def both(x: Any, w: Any, dy: Any) -> Any:
        if forward:
            return product(x, w)
        y, back = jax.vjp(product, x, w)
        return y, *back(dy)

    where = jax.sharding.SingleDeviceSharding(topology.devices()[0])
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where) for s in ((t, d), (d, f), (t, f))]
    text = jax.jit(both).lower(*args).compile().as_text()
    return costs(hlo.parse(text)).cycles / topology.clock


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quantize_costs")
    parser.add_argument(
        "chips", nargs="*", default=list(TOPOLOGIES), choices=list(TOPOLOGIES), metavar="CHIP"
    )
    parser.add_argument("--recipes", nargs="*", default=["int8"], choices=list(RECIPES), metavar="NAME")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 1024, 4096, 16384], metavar="COUNT")
    parser.add_argument("--sizes", nargs="*", default=SIZES, metavar="DxF")
    parser.add_argument("--forward", action="store_true", help="the product without its gradients")
    options = parser.parse_args(arguments)
    same, missed, rows = 0, [], 0
    print(
        "chip recipe         tokens  width  width    float ms (est.)      quantized ms (est.)    ratio (est.)"
    )
    for chip in options.chips:
        topology = topologies.parse(TOPOLOGIES[chip])
        for size in options.sizes:
            d, f = map(int, size.split("x"))
            for t in options.tokens:
                plain = counted(topology, None, (t, d, f), options.forward)
                sizes = Sizes(t * d * f, (t * d, d * f, t * f), (t * d, d * f))
                for name in options.recipes:
                    how = RECIPES[name].products(1, 0)
                    found = counted(topology, RECIPES[name], (t, d, f), options.forward)
                    trained = not options.forward
                    floats = in_floats(topology.kind, sizes, trained)
                    codes = quantized(topology.kind, sizes, how, trained)
                    agree = (found <= plain) == (codes <= MARGIN * floats)
                    same, rows = same + agree, rows + 1
                    if not agree:
                        missed.append(found / plain)
                    print(
                        f"{chip:4} {name:14} {t:6} {d:6} {f:6} {plain * 1e3:9.3f} ({floats * 1e3:9.3f})"
                        f"{found * 1e3:10.3f} ({codes * 1e3:9.3f})"
                        f" {found / plain:7.2f} ({codes / floats:.2f})"
                        f"{'' if agree else '  another decision'}",
                        flush=True,
                    )
    of_missed = f"; of the others, quantized over float: {', '.join(f'{x:.2f}' for x in missed)}"
    print(f"the same decision in {same} of {rows}{of_missed if missed else ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
