"""What a call of a parallelized function costs, after the first, against the same function under jax.jit.

    python -m tests.benchmarks.call_overhead

Prints microseconds a call of each and their ratio, best of many rounds taken in turn; at most 1.10 is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xform.api import parallelize
from xform.plan import Plan

CALLS, ROUNDS = 1_000, 20


def small(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """A training step of 24 small parameters."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        x = batch
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "step": state["step"] + 1}, value


def seconds(f: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """A call of f, in seconds, from one round of calls."""
    start = time.perf_counter()
    for _ in range(CALLS):
        result = f(*args)
    taken = time.perf_counter() - start
    jax.block_until_ready(result)
    return taken / CALLS


def compare(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """Seconds a call under jax.jit and under xform, the best round of each."""
    both = jax.jit(f), parallelize(f, Plan(mesh={}))
    for g in both:
        jax.block_until_ready(g(*args))
    rounds = [[seconds(g, args) for g in both] for _ in range(ROUNDS)]
    plain, ours = (min(times) for times in zip(*rounds, strict=True))
    return plain, ours


def main() -> None:
    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))
    state = {"params": {f"w{i:02}": w for i in range(24)}, "step": jnp.int32(0)}
    for f, args in (small, (w, x)), (step, (state, x)):
        plain, ours = compare(f, args)
        print(f"{f.__name__}: jit {plain * 1e6:.2f} us, xform {ours * 1e6:.2f} us, ratio {ours / plain:.3f}")


if __name__ == "__main__":
    main()
