"""Every program of the pipeline's tests under every schedule and on every mesh, held to one device.

    python -m tests.benchmarks.pipeline_pairs [PROGRAM ...]

On eight virtual CPU devices; prints each pair that differs by more than float32 rounding, and the number of
those that agree. The tests have each program and each schedule once.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"


def main(names: list[str]) -> int:
    from tests.test_pipeline import MESHES, PROGRAMS, SCHEDULED, agree, graded, piped, scheduled, wanted

    found = bad = 0
    meshes = {"two stages": ({"stage": 2}, ()), **MESHES}
    for name, schedule, mesh in itertools.product(names or PROGRAMS, SCHEDULED, meshes):
        loss, params, data = PROGRAMS[name]()
        sizes, passes = meshes[mesh]
        found += 1
        try:
            step = piped(graded(loss), *passes, mesh=sizes, **scheduled(schedule))
            agree(step(params, *data), wanted(name))
        except Exception as why:
            bad += 1
            print(f"{name}, {schedule}, {mesh}: {str(why).strip().splitlines()[0]}", flush=True)
    print(f"{found - bad} of {found} agree")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
