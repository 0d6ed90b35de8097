"""How much of every value one device holds, told from the layouts in a program; the program is not changed.

Layouts stand at a program's inputs and in its sharding constraints. Between these, a dimension lies on the
mesh axes that the same axis of the program (`xform.axes`) lies on among an operation's operands, none twice,
as XLA's partitioner hands layouts on. What a loop carries lies as its body leaves it.

    spread = Spread(axes, {"fsdp": 16}, [PartitionSpec("fsdp"), None])
    spread.nbytes(axes.root, var)     # on one device; 0 in host memory
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from xform.axes import Axes, Factor, Scope
from xform.higher_order import bodies, carries, operands, scan_parts
from xform.sharding.layout import entry_axes
from xform.trace import Jaxpr, JaxprEqn, Literal, Var, shape_of

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of each dimension."""


class Spread:
    """`sizes`: those of the mesh's axes. `layouts`: of the program's inputs, None where nothing is said."""

    def __init__(self, axes: Axes, sizes: Mapping[str, int], layouts: Sequence[PartitionSpec | None]) -> None:
        self.axes, self.sizes = axes, sizes
        self._specs: dict[Scope, dict[Var, Spec]] = {}
        root = axes.root
        ins = [_entries(p, len(shape_of(v))) for v, p in zip(root.jaxpr.invars, layouts, strict=True)]
        self._body(root, ins)

    def spec(self, scope: Scope, atom: Var | Literal) -> Spec:
        """The mesh axes that each dimension of a value lies on."""
        none: Spec = ((),) * len(shape_of(atom))
        return none if isinstance(atom, Literal) else self._specs.get(scope, {}).get(atom, none)

    def ways(self, spec: Sequence[tuple[str, ...]]) -> int:
        """How many parts something so laid out is in."""
        return math.prod(self.sizes.get(a, 1) for axes in spec for a in axes)

    def nbytes(self, scope: Scope, atom: Var | Literal) -> float:
        """Bytes of device memory on one device; 0 for a value in host memory."""
        aval: Any = atom.aval
        if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
            return 0.0
        return whole_bytes(aval) / self.ways(self.spec(scope, atom))

    # ------------------------------------------------------------ layouts, handed on

    def _body(self, scope: Scope, ins: Sequence[Spec]) -> list[Spec]:
        specs = self._specs[scope] = dict(zip(scope.jaxpr.invars, ins, strict=True))
        for index, eqn in enumerate(scope.jaxpr.eqns):
            inner = [(n, b) for n, b in enumerate(bodies(eqn)) if (index, n) in scope.children]
            if eqn.primitive.name == "sharding_constraint":
                spec = _entries(getattr(eqn.params["sharding"], "spec", None), len(shape_of(eqn.outvars[0])))
                outs = [spec]
                if isinstance(source := eqn.invars[0], Var) and source not in scope.jaxpr.invars:
                    specs[source] = spec  # what makes it makes it so
            elif eqn.primitive.name == "shard_map":
                outs = [
                    _entries(p, len(shape_of(v)))
                    for p, v in zip(eqn.params["out_specs"], eqn.outvars, strict=True)
                ]
            elif inner:
                ways = [self._call(scope, index, eqn, number, body) for number, body in inner]
                outs = next((w for w in reversed(ways) if len(w) == len(eqn.outvars)), [])
                outs = outs or [self._derived(scope, eqn, v) for v in eqn.outvars]
            else:
                outs = [self._derived(scope, eqn, v) for v in eqn.outvars]
            specs.update(zip(eqn.outvars, outs, strict=True))
        return [self.spec(scope, v) for v in scope.jaxpr.outvars]

    def _call(self, scope: Scope, index: int, eqn: JaxprEqn, number: int, body: Jaxpr) -> list[Spec]:
        """The layouts of an equation's results, from one of its bodies."""
        below, looped = scope.enter(index, number), carries(eqn, number)
        given = [
            ((),) * 9 if at is None else self.spec(scope, eqn.invars[at]) for at in operands(eqn, number)
        ]
        ranks = [len(shape_of(v)) for v in body.invars]
        ins = [spec[len(spec) - rank :] for spec, rank in zip(given, ranks, strict=True)]
        outs = self._body(below, ins)
        if any(outs[i] != ins[j] for i, j in looped.items()):
            for i, j in looped.items():
                ins[j] = outs[i] if self.ways(outs[i]) >= self.ways(ins[j]) else ins[j]
            outs = self._body(below, ins)
        carried = scan_parts(eqn)[1] if eqn.primitive.name == "scan" else len(outs)
        return [spec if i < carried else ((), *spec) for i, spec in enumerate(outs)]

    def _derived(self, scope: Scope, eqn: JaxprEqn, var: Var) -> Spec:
        """The layout of a result that nothing is said about: that of the same axes among the operands."""
        lies: dict[Factor, tuple[str, ...]] = {}
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                continue
            for dim, axes in zip(scope[atom], self.spec(scope, atom), strict=True):
                if dim and axes:
                    lies.setdefault(dim[0], axes)
        found: list[tuple[str, ...]] = []
        used: set[str] = set()
        for dim, size in zip(scope[var], shape_of(var), strict=True) if lies else ():
            axes = lies.get(dim[0], ()) if dim else ()
            fits = not used & set(axes) and size % self.ways([axes]) == 0
            found.append(axes if fits else ())
            used.update(found[-1])
        return tuple(found) if lies else ((),) * len(shape_of(var))


def whole_bytes(aval: Any) -> int:
    """Bytes of a value over all devices together; keys count as their numbers."""
    dtype = aval.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * int(getattr(dtype, "itemsize", 8))
    return math.prod(aval.shape) * np.dtype(dtype).itemsize


def _entries(spec: Any, rank: int) -> Spec:
    entries = tuple(entry_axes(entry) for entry in (spec or ()))
    return entries[:rank] + ((),) * (rank - len(entries))
