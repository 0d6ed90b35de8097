"""A step made with one choice of a pass's options, and how much device memory it takes: compiled, or told.

For the devices of a TPU topology, or a TPU that is attached, the TPU compiler is asked ahead of time, which
takes seconds (`xform.aot`); for a CPU, whose compiler plans no memory, the estimate stands alone; another
device's own compiler is asked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from xform import aot
from xform.axes import find_axes
from xform.errors import PlanError
from xform.memory.liveness import estimate
from xform.memory.speeds import Speeds, speeds_of
from xform.memory.spread import Spread
from xform.program import Program
from xform.raising.flat import dtype_of
from xform.topologies import Topology, kind_of, parse
from xform.trace import inline, shape_of


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A program and the mesh that it is for."""

    program: Program
    mesh: Mesh

    @functools.cached_property
    def spread(self) -> Spread:
        """What a device holds of each of its values."""
        layouts = [None if s is None else s.spec for s in self.program.in_shardings]
        return Spread(find_axes(self.program.laid_out), dict(self.mesh.shape), layouts)

    @functools.cached_property
    def estimate(self) -> float:
        """Bytes of device memory at most, without asking a compiler."""
        return estimate(self.spread, [leaf.donated for leaf in self.program.inputs]).peak

    @property
    def speeds(self) -> Speeds:
        return speeds_of(self.mesh.devices.flat[0])

    @property
    def is_compiled(self) -> bool:
        """Whether `peak` is a compiler's."""
        return bool(self.mesh.devices.flat[0].platform != "cpu")

    @functools.cached_property
    def peak(self) -> float:
        """Bytes of device memory that the compiled program takes: arguments, results that take no argument's
        place, and temporaries; the estimate where no compiler is asked. Infinite where it does not fit.
        """
        if not self.is_compiled:
            return self.estimate
        try:
            if (compiled := self.compiled) is not None:
                memory = compiled.memory
                sizes = {key: float(memory[key] or 0) for key in ("argument", "output", "alias", "temp")}
            else:
                stats = self.lower().compile().memory_analysis()
                sizes = {
                    key: float(getattr(stats, f"{key}_size_in_bytes"))
                    for key in ("argument", "output", "alias", "temp")
                }
        except (aot.OutOfDeviceMemory, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, aot.OutOfDeviceMemory) or "RESOURCE_EXHAUSTED" in str(error):
                return math.inf
            raise
        return sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]

    @functools.cached_property
    def compiled(self) -> aot.Result | None:
        """What the TPU compiler makes of it; None for other devices. Raises `aot.OutOfDeviceMemory` where it
        does not fit.
        """
        topology = topology_of(self.mesh)
        if topology is None:
            return None
        return aot.compile_lowered(self.lower(), topology=topology, mesh=self.mesh)

    @property
    def seconds(self) -> float:
        """How long the compiled step computes: its products at the device's peak, and what it copies; 0 where
        that is not known.
        """
        if math.isinf(self.peak) or self.compiled is None:
            return 0.0
        costs = self.compiled.costs
        return costs.flops / self.speeds.flops + 2 * costs.copied / self.speeds.memory

    def lower(self) -> jax.stages.Lowered:
        """The program lowered as it would be for a call."""
        program = self.program

        def run(*values: Any) -> list[Any]:
            outs = inline(program.jaxpr, *map(_laid, values, program.in_shardings))
            return list(map(_laid, outs, program.out_shardings))

        whole = NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        structs = [
            jax.ShapeDtypeStruct(shape_of(v), dtype_of(v), sharding=s or whole)
            for v, s in zip(program.jaxpr.invars, program.in_shardings, strict=True)
        ]
        donated = [i for i, leaf in enumerate(program.inputs) if leaf.donated]
        return jax.jit(run, donate_argnums=donated).lower(*structs)


def _laid(value: Any, layout: NamedSharding | None) -> Any:
    return value if layout is None else jax.lax.with_sharding_constraint(value, layout)


def topology_of(mesh: Mesh) -> Topology | None:
    """The TPU slices that a mesh's devices are; None where they are not whole ones."""
    devices = list(mesh.devices.flat)
    kind = kind_of(devices[0])
    if kind is None:
        return None
    shape = tuple(max(d.coords[i] for d in devices) + 1 for i in range(kind.dims))
    slices = len({getattr(d, "slice_index", None) or 0 for d in devices})
    try:
        topology = parse(Topology(kind, shape, slices).name)
    except PlanError:  # a part of a slice
        return None
    whole = {(d.id, tuple(d.coords)) for d in topology.devices()}
    return topology if whole == {(d.id, tuple(d.coords)) for d in devices} else None
