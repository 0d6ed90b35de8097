"""What finding axes and roles costs, in seconds and as a share of what tracing the same program takes.

    python -m tests.benchmarks.axes_cost [--layers 4,16,64] [--public]

Training steps of the Llama of this repository with its layers unrolled, and on request of the public models.
Each is traced and analysed three times, and the least counts. The share has to stay under a tenth, however
many layers there are."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax

from models import llama
from tests import public
from xform.axes import Axes, find_axes
from xform.roles import find_roles

REPEATS = 3
LIMIT = 0.1


def least(fn: Callable[[], Any]) -> tuple[float, Any]:
    """The least time that fn took, and what it gave."""
    best, result = float("inf"), None
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = fn()
        best = min(best, time.perf_counter() - start)
    return best, result


def cost(fn: Callable, args: Any) -> tuple[int, float, float, float]:
    """Equations at all depths, and seconds to trace, to find axes and to find roles."""
    tracing, jaxpr = least(lambda: jax.make_jaxpr(lambda *args: fn(*args))(*args))
    finding, axes = least(lambda: find_axes(jaxpr))
    telling, _ = least(lambda: find_roles(axes))
    return equations(axes), tracing, finding, telling


def equations(axes: Axes) -> int:
    return sum(len(scope.jaxpr.eqns) for scope in axes.scopes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="4,16,64")
    parser.add_argument("--public", action="store_true")
    options = parser.parse_args()
    programs = {
        f"llama, {n} layers": llama.train_step(size="tiny", layers=n, scan=False)
        for n in map(int, options.layers.split(","))
    }
    if options.public:
        programs |= {name: public.train_step(name) for name in public.PUBLIC}
    print(f"{'program':<20}{'equations':>10}{'trace':>9}{'axes':>9}{'roles':>9}{'share':>8}")
    for name, (fn, args) in programs.items():
        count, tracing, finding, telling = cost(fn, args)
        share = (finding + telling) / tracing
        over = "  over a tenth" if share > LIMIT else ""
        print(f"{name:<20}{count:>10}{tracing:>8.3f}s{finding:>8.3f}s{telling:>8.3f}s{share:>8.1%}{over}")


if __name__ == "__main__":
    main()
