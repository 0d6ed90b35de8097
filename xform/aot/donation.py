"""Which arguments to donate, and whether they were really reused: what the compiled module aliases of them.

A donated array is reused when a result of the same type and layout takes its memory. Where none does, the
compiler keeps both and says nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax

from xform.errors import PlanError

NAMED = 3  # of the arrays that were not reused


@dataclasses.dataclass(frozen=True)
class Donation:
    """Paths of the donated arrays, as `[0].params['w']`: those reused, and those that were not."""

    reused: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        total = len(self.reused) + len(self.left)
        if not total:
            return "nothing is donated: results and arguments are both held"
        names = ", ".join(self.left[:NAMED]) + (", ..." if len(self.left) > NAMED else "")
        text = f"donated arrays reused by results: {len(self.reused)} of {total}"
        return text + (f"; no result has the type and layout of {names}" if self.left else "")


def donation(lowered: jax.stages.Lowered, text: str) -> Donation:
    """What became of the donated arguments of `lowered` in the module that it was compiled to."""
    leaves = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    lowering: Any = lowered._lowering  # type: ignore[attr-defined]
    numbers = {argument: n for n, argument in enumerate(sorted(lowering.compile_args["kept_var_idx"]))}
    aliased = _aliased(text)
    reused: list[str] = []
    left: list[str] = []
    for i, (path, info) in enumerate(leaves):
        if info.donated and i in numbers:  # an argument that is not used at all is no parameter
            (reused if numbers[i] in aliased else left).append(jax.tree_util.keystr(path[1:]))
    return Donation(tuple(reused), tuple(left))


def _aliased(text: str) -> set[int]:
    """The numbers of the parameters whose memory a result takes."""
    head = text[: text.find("\n")]
    return {int(number) for number in re.findall(r"\{[\d,\s]*\}: \((\d+), \{[\d,\s]*\}, \w+-alias\)", head)}


def chosen(option: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """The arguments that `--donate` means: "none", numbers such as "0,2", or "auto".

    auto: each whose next value is among the results, as a training step's state.
    """
    if option == "none":
        return ()
    if option != "auto":
        numbers = [n.strip() for n in option.split(",")]
        if not all(n.isdecimal() and int(n) < len(args) for n in numbers):
            there = (
                f"numbers of arguments, which are 0 to {len(args) - 1}" if args else "no number: fn has none"
            )
            raise PlanError(f"--donate {option}: auto, none, or {there}")
        return tuple(dict.fromkeys(map(int, numbers)))
    out = jax.eval_shape(fn, *args)
    results = [_types(result) for result in (*(out if isinstance(out, tuple) else ()), out)]
    return tuple(i for i, arg in enumerate(args) if jax.tree.leaves(arg) and _types(arg) in results)


def _types(tree: Any) -> Any:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in map(jax.typeof, jax.tree.leaves(tree))]
