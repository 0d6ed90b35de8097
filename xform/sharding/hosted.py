"""Traces a program anew with some of its inputs and results in the host's memory.

What updates an array element by element (`xform.regions`) runs in a loop over slices of it, in place. A loop
that scans an array fetches a slice a turn. Everything else reads an array whole: it is brought over where it
is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from xform.context import Context
from xform.higher_order import scan_parts
from xform.regions import Region, find_regions, in_slices, run_slice
from xform.sharding.layout import spec_axes
from xform.sharding.memory import in_memory, is_host, to
from xform.sharding.twins import twins
from xform.tensors.runs import gathered
from xform.trace import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Value,
    Var,
    at_equation,
    bind,
    inline,
    shape_of,
    source_line,
    trace_flat,
)

Space = jax.memory.Space

SLICE = 4 << 20
"""Bytes on a device of a slice of what has no layers; a layer is a slice whatever it takes."""

UNEVEN = 4
"""How many times more slices than needed are taken where a dimension has no better divisor."""


NEITHER = "no loop over layers reads it there, nor is it updated element by element"
SPLIT = "the mesh splits every dimension that could be sliced, or none has a fitting divisor"


class Hosted:
    """The program traced anew, with some inputs and results on the host.

    layers: inputs whose first dimension is a stack of layers. inputs: those on the host, by number. outputs:
    for each result on the host the number of the input whose next value it is.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        context: Context,
        layers: set[Var],
        inputs: dict[int, Var],
        outputs: dict[int, int],
    ) -> None:
        self.context, self.layers, self.inputs = context, layers, inputs
        regions = find_regions(jaxpr, list(inputs.values()))
        self.jaxpr, starts = gathered(jaxpr, [region.numbers for region in regions])
        self.regions = dict(zip(starts, regions, strict=True))
        self.ways = {v: _ways(context.in_shardings[i]) for i, v in enumerate(jaxpr.invars)}
        # A result's buffer is the memory of the input whose next value it is.
        self.home: dict[Var, Var] = {}
        for n, i in enumerate(twins(context.inputs, context.outputs)):
            out = jaxpr.outvars[n]
            if i is not None and isinstance(out, Var):
                self.home.setdefault(out, jaxpr.invars[i])
        self.host = {jaxpr.outvars[n] for n in outputs if isinstance(jaxpr.outvars[n], Var)}
        self.outputs = outputs
        self.last = {v: n for n, eqn in enumerate(self.jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
        self.last |= {v: len(self.jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
        self.whole: dict[Var, tuple[str, str]] = {}  # what comes over whole: why, and where
        self.env: dict[Var, Value] = {}

    def traced(self) -> Jaxpr:
        hosted = set(self.inputs.values())
        avals = [in_memory(v.aval, Space.Host) if v in hosted else v.aval for v in self.jaxpr.invars]
        names = [leaf.path for leaf in self.context.inputs]
        return trace_flat(self.run, avals, "offload", names)

    def run(self, *args: Value) -> list[Value]:
        self.env.update(zip(self.jaxpr.all_invars, [*self.jaxpr.consts, *args], strict=True))
        number, end = 0, len(self.jaxpr.eqns)
        while number < end:
            if number in self.regions:
                stop = number + len(self.regions[number].numbers)
                self.region(number, stop, self.regions[number])
            elif self.fetches(number):
                stop = number + 1
                self.fetching(self.jaxpr.eqns[number])
            else:
                stop = number + 1
                while stop < end and stop not in self.regions and not self.fetches(stop):
                    stop += 1
                self.plain(number, stop)
            number = stop
        return [self.result(n, v) for n, v in enumerate(self.jaxpr.outvars)]

    def fetches(self, number: int) -> bool:
        return any(map(self.is_there, self.jaxpr.eqns[number].invars))

    def is_there(self, v: Any) -> bool:
        """Whether a value lies on the host that the program takes to be on the device."""
        there = isinstance(v, Var) and v in self.env and is_host(jax.typeof(self.env[v]))
        return there and not is_host(v.aval)

    def result(self, number: int, v: Any) -> Value:
        value = v.val if isinstance(v, Literal) else self.env[v]
        return to(value, Space.Host if number in self.outputs else Space.Device)

    # ---------------------------------------------------------------- equations as they are

    def plain(self, start: int, stop: int) -> None:
        """Equations that read nothing from the host."""
        eqns = self.jaxpr.eqns[start:stop]
        made = [v for eqn in eqns for v in eqn.outvars if self.last.get(v, -1) >= stop]
        reads = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var)))
        inside = {v for eqn in eqns for v in eqn.outvars}
        reads = [v for v in reads if v not in inside]
        part = self.jaxpr.replace(
            constvars=[], invars=reads, outvars=made, eqns=eqns, consts=[],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )  # fmt: skip
        self.env.update(zip(made, inline(part, *(self.env[v] for v in reads)), strict=True))

    def fetching(self, eqn: JaxprEqn) -> None:
        """An equation that reads from the host: a layer at a time if it scans, else all of it first."""
        params, scanned = eqn.params, frozenset[int]()
        with at_equation(eqn):
            if eqn.primitive.name == "scan":
                consts, carry, _ = scan_parts(eqn)
                scanned = frozenset(
                    i for i, v in enumerate(eqn.invars) if i >= consts + carry and self.is_there(v)
                )
                if scanned:
                    params = {**params, "jaxpr": _fetching_body(params["jaxpr"], scanned)}
            args = [self.operand(v, i in scanned, eqn) for i, v in enumerate(eqn.invars)]
            self.env.update(zip(eqn.outvars, bind(eqn, args, params), strict=True))

    def operand(self, v: Any, stays: bool, eqn: JaxprEqn) -> Value:
        if isinstance(v, Literal):
            return v.val
        if not self.is_there(v) or stays:
            return self.env[v]
        self.whole.setdefault(v, (NEITHER, source_line(eqn)))
        return to(self.env[v], Space.Device)

    # ---------------------------------------------------------------- what works element by element

    def region(self, start: int, stop: int, region: Region) -> None:
        eqns = self.jaxpr.eqns[start:stop]
        made = {v for eqn in eqns for v in eqn.outvars}
        reads = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var) and v not in made)
        given = {v: self.env[v] for v in reads}
        results = [v for eqn in eqns for v in eqn.outvars if self.last.get(v, -1) >= stop]
        axis, size = self._slice(region)
        if size == region.shape[axis]:
            self.whole.update((v, (SPLIT, source_line(eqns[0]))) for v in reads if self.is_there(v))
            here = {v: to(x, Space.Device) for v, x in given.items()}
            env = run_slice(eqns, here, region.shape, axis, size)
            self.env.update((v, self._back(v, env[v])) for v in results)
            return
        homes = self._homes(results, given)
        buffers = [given[home] if home is not None else self._empty(v) for v, home in homes.items()]
        scalars = {v: x for v, x in given.items() if not shape_of(v)}

        def body(take: Callable[[Value], Value], now: Sequence[Value]) -> list[Value]:
            at = dict(given) | {h: b for h, b in zip(homes.values(), now, strict=True) if h is not None}
            slices = {v: to(take(x), Space.Device) for v, x in at.items() if v not in scalars}
            env = run_slice(eqns, slices | scalars, region.shape, axis, size)
            return [self._back(v, env[v]) for v in homes]

        with at_equation(eqns[0]):
            self.env.update(zip(homes, in_slices(buffers, axis, size, body), strict=True))

    def _slice(self, region: Region) -> tuple[int, int]:
        """The dimension along which a region is sliced, one that no mesh axis splits, and a slice's size."""
        if self.layers.issuperset(region.starts) and not self._split(region, 0):
            return 0, 1
        largest = max(region.starts, key=lambda v: nbytes_of(v) / self.ways[v])
        count = math.ceil(nbytes_of(largest) / self.ways[largest] / SLICE)
        for axis, length in enumerate(region.shape) if count > 1 else ():
            if not self._split(region, axis) and length >= count:
                size = next(s for s in range(length // count, 0, -1) if length % s == 0)
                if length // size <= UNEVEN * count:
                    return axis, size
        return 0, region.shape[0]

    def _split(self, region: Region, axis: int) -> bool:
        specs = [self.context.in_shardings[i] for i, v in self.inputs.items() if v in region.starts]
        return any(s is not None and axis < len(s.spec) and s.spec[axis] is not None for s in specs)

    def _homes(self, results: Iterable[Var], given: dict[Var, Value]) -> dict[Var, Var | None]:
        """For each result the value in whose memory it is made: of its type, and in the same memory."""
        taken: set[Var] = set()
        homes: dict[Var, Var | None] = {}
        for v in results:
            home = self.home.get(v)
            fits = (
                home is not None
                and home in given
                and home not in taken
                and _kind(home) == _kind(v)
                and self.is_there(home) == (v in self.host)
            )
            homes[v] = home if fits else None
            taken |= {home} if fits and home is not None else set()
        return homes

    def _empty(self, v: Var) -> Value:
        shape, dtype = _kind(v)
        return self._back(v, jax.lax.full(shape, 0, dtype))

    def _back(self, v: Var, value: Value) -> Value:
        """A value, or a slice of it, in the memory where the result lies."""
        return to(value, Space.Host) if v in self.host else value

    # ---------------------------------------------------------------- what it takes

    def held(self, v: Var) -> int:
        """Bytes of an input, or of what is not known to be split, on a device."""
        return nbytes_of(v) // self.ways.get(v, 1)

    def large(self) -> dict[Var, tuple[str, str]]:
        """What comes over whole though it is more than a slice: why, and where."""
        return {v: found for v, found in self.whole.items() if self.held(v) > 2 * SLICE}


def _fetching_body(body: Jaxpr, hosted: frozenset[int]) -> Jaxpr:
    """The body of a scan that takes some of its slices from the host."""
    avals = [in_memory(v.aval, Space.Host) if i in hosted else v.aval for i, v in enumerate(body.invars)]

    def fetched(*args: Value) -> list[Value]:
        return inline(body, *(to(x, Space.Device) if i in hosted else x for i, x in enumerate(args)))

    return trace_flat(fetched, avals, "body")


def _ways(sharding: NamedSharding | None) -> int:
    """Over how many devices an array is split."""
    if sharding is None:
        return 1
    return math.prod(sharding.mesh.shape[axis] for axis in spec_axes(sharding.spec))


def nbytes_of(v: Var) -> int:
    """Bytes of a value, on all devices together."""
    return int(getattr(_kind(v)[1], "itemsize", 0)) * math.prod(shape_of(v))


def _kind(v: Var) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype."""
    return shape_of(v), getattr(v.aval, "dtype", None)
