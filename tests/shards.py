"""A function on arrays laid out by hand, as every device runs it, held to what one device gives."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xform.higher_order import bodies
from xform.report import Report
from xform.spmd.partition import partitioned
from xform.spmd.torus import staged
from xform.trace import Jaxpr, JaxprEqn, eval_jaxpr, shape_of, trace_flat, typeof

COLLECTIVES = ("all_gather", "all_to_all", "pmax", "pmin", "psum", "psum_invariant", "reduce_scatter")


class Parted(NamedTuple):
    """The program in one manual region, what was said of it, and its results."""

    jaxpr: Jaxpr
    report: Report
    results: list[Any]

    def moves(self) -> list[tuple[str, tuple[str, ...], int]]:
        """The collectives: name, axes, and the elements that go in on a device."""
        return [
            (eqn.primitive.name, _axes(eqn.params), math.prod(shape_of(eqn.invars[0])))
            for eqn in _equations(self.jaxpr)
            if eqn.primitive.name in COLLECTIVES
        ]

    def shapes(self, primitive: str) -> list[tuple[int, ...]]:
        """The shapes that the operations of this name give on a device."""
        return [shape_of(e.outvars[0]) for e in _equations(self.jaxpr) if e.primitive.name == primitive]


def grid(sizes: Mapping[str, int]) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return jax.sharding.Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


def parted(
    fn: Callable[..., Any],
    args: Sequence[Any],
    sizes: Mapping[str, int],
    ins: Sequence[PartitionSpec],
    out: PartitionSpec,
    wish: PartitionSpec | None = None,
) -> Parted:
    """`fn` with its arguments laid out as `ins` and its result as `out`; it equals one device's to the bit.

    wish: the layout that a sharding constraint asks for the result.
    """
    mesh, report = grid(sizes), Report()

    def asked(*xs: Any) -> Any:
        y = fn(*xs)
        return [y if wish is None else jax.lax.with_sharding_constraint(y, NamedSharding(mesh, wish))]

    given, wanted = [NamedSharding(mesh, spec) for spec in ins], [NamedSharding(mesh, out)]
    jaxpr = trace_flat(asked, [typeof(jax.numpy.asarray(x)) for x in args], "asked")
    made = partitioned(jaxpr, staged(mesh), mesh.axis_names, given, wanted, report).jaxpr
    results = jax.jit(lambda *xs: eval_jaxpr(made, *xs))(*args)
    np.testing.assert_array_equal(np.asarray(results[0]), np.asarray(jax.jit(fn)(*args)))
    return Parted(made, report, results)


def _axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name"))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from _equations(body)
