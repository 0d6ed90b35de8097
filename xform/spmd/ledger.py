"""What a program with its collectives written out sends: each of them, with its bytes, its axes and its
line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xform.higher_order import bodies
from xform.movement import nbytes
from xform.ops import operation_of
from xform.trace import Atom, Jaxpr, JaxprEqn, name_stack, shape_of, source_line

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}
"""JAX's collectives, and what the field calls them."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """One collective of a program.

    axes: the mesh axes, parts of the plan's where these are cut. nbytes: what a device sends in one run with
    the bandwidth-optimal algorithm. times: how often it runs a step; in a loop of unknown length as one turn.
    shape, dtype: of the operand on a device.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    times: int
    shape: tuple[int, ...]
    dtype: str
    where: str
    line: str

    @property
    def total(self) -> float:
        return self.nbytes * self.times


def ledger(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> list[Sent]:
    """The collectives of a program at every depth, in its order; `sizes`: of the mesh axes."""
    return list(_sent(jaxpr, sizes, 1, ""))


def _sent(jaxpr: Jaxpr, sizes: Mapping[str, int], times: int, scope: str) -> Iterator[Sent]:
    for eqn in jaxpr.eqns:
        where = "/".join(filter(None, (scope, name_stack(eqn))))
        kind, (own, over) = KINDS.get(eqn.primitive.name), getattr(operation_of(eqn), "sent", ("", ()))
        if own:  # an operation that says itself what it is for whoever counts
            yield from _of(eqn, own, over, sizes, times, where, eqn.invars[:1])
            continue
        if kind is not None:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            yield from _of(eqn, kind, axes, sizes, times, where, eqn.invars)
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        if eqn.primitive.name == "cond":  # one branch runs: the costliest
            branches = [list(_sent(body, sizes, inside, where)) for body in bodies(eqn)]
            yield from max(branches, key=lambda b: sum(s.total for s in b))
            continue
        for body in bodies(eqn):
            yield from _sent(body, sizes, inside, where)


def _of(
    eqn: JaxprEqn,
    kind: str,
    axes: Any,
    sizes: Mapping[str, int],
    times: int,
    where: str,
    operands: Sequence[Atom],
) -> Iterator[Sent]:
    names = tuple(a for a in (axes if isinstance(axes, (tuple, list)) else (axes,)) if isinstance(a, str))
    n = math.prod(sizes[a] for a in names)
    for var in operands:
        size = float(nbytes(var))
        if kind == "all-gather":
            size *= n - 1
        elif kind == "all-reduce":
            size *= 2 * (n - 1) / n
        elif kind != "permute":
            size *= (n - 1) / n
        if size:
            dtype = str(getattr(var.aval, "dtype", ""))
            yield Sent(kind, names, size, times, shape_of(var), dtype, where, source_line(eqn))
