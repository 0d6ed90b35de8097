"""Every program of the pipeline's tests under every schedule and on every mesh, held to one device.

    python -m tests.benchmarks.pipeline_pairs [PROGRAM ...] [--some N] [--seed S]

On eight virtual CPU devices, in float64, so that what differs is no rounding. The pairs come in an order that
is drawn, N of them or all, which takes hours; each is printed with its seconds and its largest difference,
beside the largest entry of an array, and at the end how many agree. What a program has too few layers for
is left out. The tests have several programs at once, and each schedule with a few.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"

import jax  # noqa: E402  (after the environment)
import numpy as np  # noqa: E402

from tests import layered, test_pipeline, test_pipeline_combined  # noqa: E402  (import jax)
from tests.test_pipeline import EXACT, MESHES, graded, piped, scheduled, wide  # noqa: E402  (imports jax)
from xform import PlanError  # noqa: E402  (imports jax)

PROGRAMS = layered.PROGRAMS | {
    "seven layers": lambda: layered.of_layers(7),
    "ten layers backwards": lambda: layered.of_layers(10, reverse=True),
    "microbatches of five": lambda: layered.of_layers(layered.LAYERS, 5),
    "one microbatch": lambda: layered.of_layers(layered.LAYERS, 3),
    "divided": test_pipeline.divided,
    "left nothing": test_pipeline_combined.left_nothing,
    "running once": test_pipeline_combined.running_once,
}
MICROBATCHES = {"microbatches of five": 5, "one microbatch": 1, "divided": 3}
"""Where they are not four."""
SCHEDULED = {name: scheduled(name) for name in test_pipeline.SCHEDULED} | {
    "circular, early": {"schedule": "circular", "repeats": 2, "prefetch": True},
    "circular, ends on stages": {"schedule": "circular", "repeats": 2, "ends": "stages"},
    "zb-h1, ends on stages": {"schedule": "zb-h1", "ends": "stages"},
}

CLEARED = 10
"""After so many pairs what was compiled is forgotten, which else fills the memory."""


@functools.cache
def program(name: str) -> Any:
    """The step, its arguments in float64, and what one device gives."""
    loss, params, data = PROGRAMS[name]()
    step, args = graded(loss), jax.tree.map(wide, (params, *data))
    return step, args, jax.tree.map(np.asarray, jax.jit(step)(*args))


def apart(found: Any, wanted: Any) -> float:
    """The largest difference, beside the largest entry of an array."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        worst = max(worst, float(np.abs(np.asarray(a) - b).max(initial=0) / np.abs(b).max(initial=1e-300)))
        assert np.isfinite(worst), "numbers that are none"
    return worst


def run(name: str, schedule: str, mesh: str) -> float:
    sizes, passes = ({"stage": 2}, ()) if mesh == "two stages" else MESHES[mesh]
    step, args, wanted = program(name)
    options = SCHEDULED[schedule] | {"microbatches": MICROBATCHES.get(name, 4)}
    return apart(piped(step, *passes, mesh=sizes, **options)(*args), wanted)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--some", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    pairs = list(itertools.product(options.programs, SCHEDULED, ("two stages", *MESHES)))
    random.Random(options.seed).shuffle(pairs)
    bad = 0
    for n, pair in enumerate(pairs[: options.some], 1):
        start = time.perf_counter()
        try:
            found = run(*pair)
            said, ok = f"{found:.0e}", found <= EXACT
        except PlanError as why:
            said, ok = f"left out: {why}".splitlines()[0], True
        except Exception as why:
            said, ok = (str(why).strip() or type(why).__name__).splitlines()[0], False
        bad += not ok
        spent = time.perf_counter() - start
        print(
            f"{n}: {', '.join(pair)}: {'' if ok else 'NOT AS ONE DEVICE: '}{said} ({spent:.0f} s)", flush=True
        )
        if n % CLEARED == 0:
            jax.clear_caches()
    print(f"{len(pairs[: options.some]) - bad} of {len(pairs[: options.some])} agree")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
