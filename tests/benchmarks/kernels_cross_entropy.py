"""The loss of a vocabulary in one kernel each way, beside the same in plain JAX and in chunks.

    python -m tests.benchmarks.kernels_cross_entropy [--tokens COUNT ...] [--embed D] [--vocab V] [CHIP ...]

Compiles loss and gradients for one chip. Of each kernel: scheduled bundles a block, beside the cycles that
its products take at peak; of those bundles, the share of the slots for products that are taken; milliseconds,
by the larger of bundles and HBM traffic. Of each program: temp memory, and milliseconds by the compiler's
estimated cycles, to which those of the kernels are to be added. Last, the estimates that `pays` goes by.
"""

from __future__ import annotations

import argparse
import atexit
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xform import Plan, hlo, parallelize, topologies
from xform.hlo.costs import costs
from xform.kernels import cross_entropy as fused
from xform.kernels.cross_entropy_blocks import Blocks, chip_of, sizes_of
from xform.passes.chunkedloss import ChunkedLoss

TOPOLOGIES = {"v5e": "v5e-1", "v5p": "v5p:2x2x1", "v6e": "v6e-1"}
CHUNKS = 8
LENGTH = 2048


def dumping() -> pathlib.Path:
    """A folder into which libtpu, loaded after this, writes the bundles of each kernel; gone at the end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bundles"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = f"--xla_mosaic_dump_to={folder} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return folder


def bundles(folder: pathlib.Path, kernel: str) -> tuple[int, float]:
    """The scheduled bundles of a kernel, and the share of its slots for products that are taken."""
    found = sorted(folder.glob(f"*-{kernel}.*final_hlo-static-per-bundle-utilization.txt"))
    lines = found[-1].read_text().splitlines()
    slot = [name.strip() for name in lines[1].split(",")].index("MATMUL")
    rows = [line.split() for line in lines[4:] if line.strip()]
    return len(rows), sum(int(row[slot]) for row in rows) / int(lines[2].split()[slot]) / len(rows)


def plain(x: Any, w: Any, labels: Any) -> Any:
    logits = jnp.einsum("bld,dv->blv", x, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def kernel(chip: str) -> Callable[[Any, Any, Any], Any]:
    def loss(x: Any, w: Any, labels: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1]), w, labels.reshape(-1)
        return jnp.mean(fused.cross_entropy(fused.Form(), *flat, chip=chip)[0])

    return loss


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels_cross_entropy")
    parser.add_argument("chips", nargs="*", default=["v5e"], choices=list(TOPOLOGIES), metavar="CHIP")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4096, 8192], metavar="COUNT")
    parser.add_argument("--embed", type=int, default=4096, metavar="D")
    parser.add_argument("--vocab", type=int, default=32000, metavar="V")
    options = parser.parse_args(arguments)
    folder = dumping()
    d, v = options.embed, options.vocab
    for chip in options.chips:
        topology = topologies.parse(TOPOLOGIES[chip])
        for t in options.tokens:
            ways = (
                ("plain", plain, ()),
                ("chunked", plain, (ChunkedLoss(CHUNKS),)),
                ("kernel", kernel(chip), ()),
            )
            for name, loss, passes in ways:
                made = compiled(topology, loss, passes, (t, d, v))
                temp = made.memory_analysis().temp_size_in_bytes
                cycles = costs(hlo.parse(made.as_text())).cycles
                took = cycles / topology.clock * 1e3
                print(f"{chip} {t:6} tokens {name:8} temp {temp / 1e6:8.1f} MB   {took:7.2f} ms", flush=True)
                if name == "kernel":
                    for way, word in (("forward", "cross_entropy"), ("backward", "cross_entropy_back")):
                        told(chip, topology, folder, way, word, (t, d, v))
            estimates = {
                way: f"{fused.seconds(way, chip, t, d, v) * 1e3:.2f} ms"
                for way in ("kernel", "plain", "chunked")
            }
            print(f"{chip} {t:6} tokens estimated: {estimates}", flush=True)


def told(
    chip: str, topology: Any, folder: pathlib.Path, way: str, word: str, shape: tuple[int, int, int]
) -> None:
    """Prints what is known of a kernel."""
    t, d, v = shape
    sizes = sizes_of(chip, way, t, d, v, 2, Blocks())
    count, busy = bundles(folder, word)
    products = 1 if way == "forward" else 3
    cores = chip_of(chip).cores  # which share the blocks, forward of tokens, backward of the vocabulary
    peak = topology.peak_flops / topology.clock / cores
    ideal = 2 * products * sizes.t * sizes.v * d / peak
    steps = -(-t // sizes.t) * -(-v // sizes.v) / cores
    seconds = max(
        max(count, ideal) * steps / topology.clock, fused.moved(way, sizes, t, d, v) / topology.bandwidth
    )
    print(
        f"    {way:8} blocks {sizes.t} x {sizes.v}: {sizes.vmem / 2**20:.0f} MiB of VMEM, {count} bundles, "
        f"products at peak {ideal:.0f} cycles ({ideal / max(count, ideal):.0%}), matmul slots {busy:.0%}, "
        f"{seconds * 1e3:.2f} ms",
        flush=True,
    )


def compiled(
    topology: Any, loss: Callable[..., Any], passes: tuple[Any, ...], shape: tuple[int, int, int]
) -> Any:
    """Loss and gradients for one chip, of bfloat16 vectors and float32 weights, multiplied in bfloat16."""
    t, d, v = shape
    tokens = (t // LENGTH, LENGTH)
    x, labels = jax.ShapeDtypeStruct((*tokens, d), jnp.bfloat16), jax.ShapeDtypeStruct(tokens, jnp.int32)
    step = parallelize(
        lambda *args: jax.value_and_grad(loss, (0, 1))(*args),
        Plan({"data": 1}, passes),
        devices=topology.devices()[:1],
    )
    return step.lower(x, jax.ShapeDtypeStruct((d, v), jnp.float32), labels).lowered.compile()


if __name__ == "__main__":
    main(sys.argv[1:])
