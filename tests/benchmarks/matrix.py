"""Every model under every plan, trained for two steps against one device: the whole table, some minutes long.

    python -m tests.benchmarks.matrix [--explicit] [MODEL ...]

Prints for each the largest error of a tensor relative to its largest value, how many tensors are excused as
rounding (`xform.check`), and what is done on whole values. With `--explicit`, under the plans that write out
their collectives (`tests.test_spmd_models`). The tests compare a part of either table.
"""

from __future__ import annotations

import sys

from tests import (
    conftest,  # noqa: F401  (eight virtual devices, before jax starts)
    public,
    test_plans,
    test_spmd_models,
)
from xform import parallelize
from xform.check import check


def main(names: list[str]) -> None:
    plans = {**test_plans.PLANS, "memory": test_plans.MEMORY}
    if "--explicit" in names:
        names, plans = [name for name in names if name != "--explicit"], test_spmd_models.PLANS
    for name in names or [*test_plans.OURS, *(f"public {each}" for each in public.PUBLIC)]:
        for title, plan in plans.items():
            if name in test_plans.OURS:
                fn, args = test_plans.OURS[name].train_step(**test_plans.SIZES, scan=False, dtype="float32")
            else:
                fn, args = public.train_step(name.removeprefix("public "))
            result = check(fn, args, plan, steps=2)
            verdict = "agrees" if result.ok else f"DIFFERS at {result.first_difference}"
            print(
                f"{name:20} {title:12} {verdict:8} {result.max_rel_error:.1e}  {result.excused:4} excused",
                flush=True,
            )
            for note, _ in parallelize(fn, plan).trace(*args).report:
                if "whole values" in note.what:
                    print(f"    {note}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
