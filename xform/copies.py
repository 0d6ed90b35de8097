"""Products with a weight in a loop, of which each group of devices holds a copy of its own.

    y[b,v] = dot_general x w          ->      c[g,e,v] = w, one for each group          (before the loop)
                                              y[g,b/g,v] = dot_general x c, batched over g

A loop over chunks of the data that multiplies by a weight which lies in parts on the mesh gathers it at every
turn, and at every turn sums its gradient over the devices. With a copy for each group of devices that have
rows of their own, the weight is gathered once, before the loop; what a turn adds to the gradient of a copy
stays on its devices; and the gradients of the copies are summed after the loop, once. All copies are equal,
so it does not matter to the numbers which rows are whose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.trace import JaxprEqn, Value


@dataclasses.dataclass(frozen=True)
class Groups:
    """The devices of a mesh grouped by their place on these of its axes."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        return math.prod(self.mesh.shape[a] for a in self.axes)

    def laid(self, x: Value, at: int = 0) -> Value:
        """An array with a dimension of the groups: each group has its own entry; all else stays open."""
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[at] = self.axes
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def copies(self, weight: Value) -> Copies:
        """A copy of a weight for each group. What is added up for the gradients of a copy is float32."""
        own = self.laid(jnp.broadcast_to(weight, (self.count, *weight.shape)))
        return Copies(self, own.astype(jnp.promote_types(own.dtype, jnp.float32)), jax.lax.stop_gradient(own))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """A weight's copies: `sums` takes their gradients, `values` has the numbers. They are equal."""

    groups: Groups = dataclasses.field(metadata={"static": True})
    sums: Value
    values: Value

    def product(self, eqn: JaxprEqn, x: Value, side: int, rows: int) -> Value:
        """The equation `dot_general` with the weight as operand `side`, and x as the other, whose dimension
        `rows` has those of all groups, one after the other.
        """
        contracting, _ = eqn.params["dimension_numbers"]
        mine, other = contracting[1 - side], contracting[side]
        count, shape = self.groups.count, x.shape
        apart = x.reshape(*shape[:rows], count, shape[rows] // count, *shape[rows + 1 :])
        numbers = ([d + (d > rows) for d in mine], [d + 1 for d in other])
        batch = ([rows], [0])
        operands = [apart, _used(self.groups.laid(self.sums), self.values)]
        if side == 0:
            operands, numbers, batch = operands[::-1], numbers[::-1], batch[::-1]
        kept = {k: eqn.params[k] for k in ("precision", "preferred_element_type")}
        y = jax.lax.dot_general(*operands, (numbers, batch), **kept)
        own = [d for d in range(len(shape)) if d not in mine]
        before = 0 if side == 1 else self.values.ndim - 1 - len(other)
        at = before + own.index(rows)
        y = jnp.moveaxis(y, 0, at)
        return y.reshape(*y.shape[:at], shape[rows], *y.shape[at + 2 :])


@jax.custom_jvp
def _used(sums: Value, values: Value) -> Value:
    """The values, whose gradient goes to the sums in their dtype."""
    return values


@_used.defjvp
def _(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Value, Value]:
    values = _used(*primals)
    return values, tangents[0].astype(values.dtype)
