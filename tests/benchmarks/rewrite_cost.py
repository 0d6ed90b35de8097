"""What rewriting an unrolled Llama training step costs, against tracing and lowering the original.

    python -m tests.benchmarks.rewrite_cost [layers ...]

Prints a line for each number of layers (by default 4, 16, 64): equations, seconds to trace and lower the
original, and for each way of rewriting its seconds and their ratio to that, best of three. `walk` is a rule
that claims nothing, `bind dots` one that binds every dot_general again, `inline` the copy of a program into a
trace, and `shard` the axes analysis and the Shard pass. The last lines say how each grows: the exponent of
the number of equations, 1.0 being linear. The target is a ratio of at most 1.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from xform.api import parallelize
from xform.higher_order import bodies
from xform.models import llama
from xform.passes.shard import Shard
from xform.plan import Plan
from xform.rewrite import rewrite
from xform.trace import Jaxpr, inline, trace_flat

REPEATS = 3


def best(f: Callable[[], Any]) -> tuple[float, Any]:
    """The shortest of a few runs in seconds, and the last result."""
    times, result = [], None
    for _ in range(REPEATS):
        gc.collect()
        start = time.perf_counter()
        result = f()
        times.append(time.perf_counter() - start)
    return min(times), result


def size(jaxpr: Jaxpr) -> int:
    """Equations at every depth, a body that stands in several places counted in each."""
    return sum(1 + sum(size(body) for body in bodies(eqn)) for eqn in jaxpr.eqns)


def measure(layers: int) -> tuple[int, float, dict[str, float]]:
    """Equations, seconds to trace and lower the original, and seconds of each way to rewrite."""
    step, args = llama.train_step(layers=layers, scan=False)
    leaves, tree = jax.tree.flatten(args)

    def flat(*values: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, values)))

    original, _ = best(lambda: jax.jit(lambda *args: step(*args)).trace(*args).lower())
    jaxpr = trace_flat(flat, [jax.core.ShapedArray(x.shape, x.dtype) for x in leaves], "step")

    def bind_dots(site: Any) -> Any:
        return site.bind() if site.name == "dot_general" else None

    def sharded() -> float:
        plan = Plan(mesh={"fsdp": 2, "tensor": 2}, passes=[Shard()])
        return parallelize(step, plan).trace(*args).seconds["rewrite"]

    def copied() -> Any:
        return trace_flat(lambda *xs: inline(jaxpr, *xs), [v.aval for v in jaxpr.invars], "copy")

    costs = {
        "walk": best(lambda: rewrite(jaxpr, lambda site: None))[0],
        "bind dots": best(lambda: rewrite(jaxpr, bind_dots))[0],
        "inline": best(copied)[0],
        "shard": min(sharded() for _ in range(REPEATS)),
    }
    return size(jaxpr), original, costs


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    numbers = [int(n) for n in sys.argv[1:]] or [4, 16, 64]
    rows = [(n, *measure(n)) for n in numbers]
    for n, equations, original, costs in rows:
        parts = ", ".join(f"{name} {s:.3f} s ({s / original:.2f})" for name, s in costs.items())
        print(f"{n} layers, {equations} equations: trace and lower {original:.2f} s; {parts}")
    if len(rows) > 1:
        (_, small, _, first), (_, large, _, last) = rows[0], rows[-1]
        for name in first:
            print(
                f"{name} grows as equations ** {
                    math.log(last[name] / first[name]) / math.log(large / small):.2f}"
            )


if __name__ == "__main__":
    main()
