"""What offload in a loop within a loop takes on a TPU, and what it takes once Roll has made one loop of both.

    python -m tests.benchmarks.nesting

Prints MiB of temporaries on the device and of host memory, a device, for twelve residual MLP layers (embed
1024, hidden 4096, batch 32 x 2048, bfloat16, FSDP over the four chips of a v5e 2x2) whose hidden activations
are offloaded: one flat loop, a loop of four over loops of three, this made flat; and the flat loop without
offload, as it is and nested by the root of its length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xform import Pass, Plan, Remat, Roll, Shard, parallelize, topologies
from xform.aot import compile_lowered

EMBED, HIDDEN, BATCH, LENGTH, VOCAB = 1024, 4096, 32, 2048, 512


def loss(params: Any, tokens: Any) -> Any:
    """The mean square of what the layers make of the tokens."""

    def layers(x: Any, w: Any) -> tuple[Any, None]:
        if w["up"].ndim > 2:
            return jax.lax.scan(layers, x, w)[0], None
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = layers(params["table"][tokens], params["layers"])
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def arguments(*sizes: int) -> Any:
    def weights(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layers = {"up": weights(*sizes, EMBED, HIDDEN), "down": weights(*sizes, HIDDEN, EMBED)}
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return {"table": weights(VOCAB, EMBED), "layers": layers}, tokens


def step(params: Any, tokens: Any) -> Any:
    gradients = jax.grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def memory(sizes: tuple[int, ...], passes: list[Pass]) -> tuple[float, float]:
    """MiB of temporaries on the device and on the host."""
    topology = topologies.parse("v5e:2x2")
    fn: Callable[..., Any] = parallelize(
        step, Plan({"fsdp": 4}, [*passes, Shard()]), devices=topology.devices(), donate_argnums=0
    )
    lowered = fn.lower(*arguments(*sizes))  # type: ignore[attr-defined]
    found = compile_lowered(lowered.lowered, topology=topology, mesh=lowered.mesh).memory
    return (found["temp"] or 0) / 2**20, (found["host_temp"] or 0) / 2**20


def main() -> None:
    offload, save = Remat("custom", offload=("mlpwi",)), Remat("custom", save=("mlpwi",))
    rows = {
        "12, offloaded": ((12,), [offload]),
        "4 x 3, offloaded": ((4, 3), [offload]),
        "4 x 3, Roll, offloaded": ((4, 3), [Roll(), offload]),
        "12, saved": ((12,), [save]),
        "12, recomputed": ((12,), [Remat("full")]),
        "12, Roll(sqrt), recomputed": ((12,), [Roll("sqrt"), Remat("full")]),
    }
    for name, (sizes, passes) in rows.items():
        device, host = memory(sizes, passes)
        print(f"{name:28} {device:8.0f} MiB on the device {host:8.0f} MiB on the host", flush=True)


if __name__ == "__main__":
    topologies.prepare_environment()
    main()
