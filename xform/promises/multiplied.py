"""Whether what was quantized is multiplied in eight bits: in the program, and in what it is compiled to.

A quantized product and its derivative's stand under a name, which autodiff and the compiler keep:

    jit(step)/transpose(jvp(mlp))/quantized.mlpwi_0/dot_general    ->    mlpwi_0, backward

The backward products of some recipes take floats. So the compiled program is held to what the program itself
multiplies in eight bits, by name and by phase: where it has codes only, the compiler has to have no floats.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from xform.higher_order import bodies
from xform.hlo import Array
from xform.hlo.costs import Costs, phase_of
from xform.report import Promise
from xform.trace import Jaxpr, name_stack

_SCOPE = re.compile(r"\bquantized\.(\w*)")

DOTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


def scope(name: str) -> str:
    """The name under which a quantized product stands; name: the product's own, or ''."""
    return f"quantized.{name}"


def product_of(op_name: str) -> str | None:
    """The quantized product that an operation of this name belongs to; None: to none."""
    found = _SCOPE.findall(op_name)
    return found[-1] if found else None


@dataclasses.dataclass
class Share:
    """Of the compiled dots of quantized products, those in eight bits: how many run, and their flops."""

    count: int = 0
    of: int = 0
    flops: float = 0.0
    of_flops: float = 0.0

    def __str__(self) -> str:
        return f"{self.count} of {self.of}, {self.flops / self.of_flops:.2f} of their arithmetic"

    def to_json(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def share(costs: Costs) -> Share | None:
    """None: nothing is quantized."""
    found = Share()
    for product, count in costs.products.items():
        if product_of(product.op_name) is not None:
            found.of += count
            found.of_flops += count * product.flops
            if in_eight_bits(product.dtypes):
                found.count += count
                found.flops += count * product.flops
    return found if found.of else None


def in_eight_bits(dtypes: Sequence[str]) -> bool:
    """Whether all these element types of a compiled program have eight bits or fewer."""
    return all(Array(dtype, ()).bits <= 8 for dtype in dtypes)


def broken(promises: Sequence[Promise], jaxpr: Jaxpr, costs: Costs) -> Iterator[str]:
    """A line for each product that is multiplied in floats, though the program has it in eight bits."""
    if not promises:
        return
    wanted = _in_codes(jaxpr)
    for name in dict.fromkeys(promise.tensor for promise in promises):
        own = {
            product: count
            for product, count in costs.products.items()
            if product_of(product.op_name) == name and wanted.get((name, phase_of(product.op_name)))
        }
        wide = {product: count for product, count in own.items() if not in_eight_bits(product.dtypes)}
        if wide:
            lines = ", ".join(dict.fromkeys(p.where for p in promises if p.tensor == name and p.where))
            where = f" ({lines})" if lines else ""
            types = " and ".join(sorted({" x ".join(product.dtypes) for product in wide}))
            phases = " and ".join(sorted({phase_of(product.op_name) for product in wide}))
            there, total = sum(own.values()) - sum(wide.values()), sum(own.values())
            yield (
                f"  quantization of {name or 'a product'}{where}: {there} of {total} dots multiplied in eight"
                f" bits: the compiler multiplies {types} ({phases})"
            )


def unseen(promises: Sequence[Promise], costs: Costs) -> list[str]:
    """The products of which the compiled program has no dot at all, as the compiler makes small ones sums."""
    seen = {product_of(product.op_name) for product in costs.products}
    names = {promise.tensor for promise in promises if promise.kind == "quantized"}
    return sorted(name or "a product" for name in names - seen)


def _in_codes(jaxpr: Jaxpr) -> dict[tuple[str, str], bool]:
    """By product and phase, whether the program multiplies nothing but codes."""
    found: dict[tuple[str, str], bool] = {}
    _read(jaxpr, "", found)
    return found


def _read(jaxpr: Jaxpr, names: str, found: dict[tuple[str, str], bool]) -> None:
    for eqn in jaxpr.eqns:
        here = f"{names}/{name_stack(eqn)}"
        name = product_of(here)
        if name is not None and eqn.primitive.name in DOTS:
            key = name, phase_of(here)
            avals: list[Any] = [v.aval for v in eqn.invars[:2]]
            codes = all(aval.dtype.itemsize <= 1 for aval in avals)
            found[key] = found.get(key, True) and codes
        for body in bodies(eqn):
            _read(body, here, found)
