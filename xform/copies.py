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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.trace import JaxprEqn, Value, shape_of


@dataclasses.dataclass(frozen=True)
class Groups:
    """The devices of a mesh grouped by their place on these of its axes."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        sizes = self.mesh.shape
        return int(jnp.prod(jnp.array([sizes[a] for a in self.axes], int))) if self.axes else 1

    def laid(self, x: Value, at: int = 0) -> Value:
        """An array with a dimension of the groups: each group has its own entry; all else stays open."""
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        entries[at] = self.axes
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))
