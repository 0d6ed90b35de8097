"""Which inputs of a function are weights that come as codes, where the function itself takes floats.

step({"w": Quantized(codes, scale), "b": b}, x)      inputs: codes, scale, b, x
                                                      values: w, b, x
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xform.quantization.arrays import Quantized
from xform.quantization.formats import bits
from xform.trace import ShapedArray


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


@dataclasses.dataclass(frozen=True)
class Given:
    """tree: of the values. items: for each value the leaf of the function's arguments that it is, by number,
    or codes and scale as such numbers. numbers: the leaves that are arrays, which are the inputs, in order.
    """

    tree: Any
    items: tuple[int | Quantized, ...]
    numbers: tuple[int, ...]

    @property
    def values(self) -> list[int]:
        """Which values are arrays."""
        arrays = frozenset(self.numbers)
        return [k for k, item in enumerate(self.items) if is_quantized(item) or item in arrays]

    @property
    def coded(self) -> list[int]:
        """Which of the arrays among the values are given as codes."""
        return [n for n, k in enumerate(self.values) if is_quantized(self.items[k])]

    def static(self, static: Mapping[int, Any]) -> dict[int, Any]:
        """The static leaves, by the number of the value."""
        return {k: static[i] for k, i in enumerate(self.items) if isinstance(i, int) and i in static}

    def types(self, avals: Sequence[Any]) -> list[Any]:
        """The types of the values, from those of the inputs: codes are floats of their scale's dtype."""
        of = dict(zip(self.numbers, avals, strict=True))

        def one(item: Any) -> Any:
            if not is_quantized(item):
                return of[item]
            return ShapedArray(of[item.codes].shape, of[item.scale].dtype)

        return [one(self.items[k]) for k in self.values]

    def sizes(self, avals: Sequence[Any]) -> dict[str, tuple[int, float]]:
        """How many weights are given in each format, and the bytes of their codes and scales."""
        of = dict(zip(self.numbers, avals, strict=True))
        found: dict[str, tuple[int, float]] = {}
        for item in self.items:
            if isinstance(item, Quantized):
                count, size = found.get(item.format.name, (0, 0.0))
                arrays = [of[i] for i in jax.tree.leaves(item)]
                size += sum(math.prod(a.shape) * bits(a.dtype) / 8 for a in arrays)
                found[item.format.name] = count + 1, size
        return found

    def held(self, inputs: Sequence[Any]) -> list[Any]:
        """The values that are made of these inputs, codes as `Quantized`."""
        of = dict(zip(self.numbers, inputs, strict=True))
        return [jax.tree.map(lambda i: of[i], self.items[k]) for k in self.values]


def given(tree: Any, numbers: Sequence[int]) -> Given | None:
    """What is given as codes in a tree of arguments, of whose leaves these are arrays; None: nothing."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    items, floats = jax.tree.flatten(numbered, is_leaf=is_quantized)
    if not any(map(is_quantized, items)):
        return None
    return Given(floats, tuple(items), tuple(numbers))
