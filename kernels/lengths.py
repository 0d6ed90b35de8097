"""The length of an attention as it can lie over devices: filled up where it does not divide, and in an order
in which all devices have as much to do.

    q [.., 22, d]                ->   q [.., 24, d], what is filled up seen by no query
    q k v -> out                 ->   balanced q, k, v -> out in the text's own order
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform.kernels import balance
from xform.kernels.attention import AttentionForward
from xform.ops.rows import balanced
from xform.trace import Value


@dataclasses.dataclass(frozen=True)
class Padded:
    """An attention whose length, of queries and keys, is filled up `to` one that divides. No query of the
    program sees a key that is filled up: by position, or since its segment is no query's.

    args: q, k, v, sinks or None, and segments, if any.
    """

    op: AttentionForward
    args: tuple[Any, ...]
    length: int
    to: int

    @classmethod
    def of(cls, op: AttentionForward, args: Sequence[Value], count: int) -> Padded:
        q, k, v, sinks, segments = op.named(args)
        length, keys = q.shape[3], k.shape[2]
        to = -(-length // count) * count
        if to == length or length != keys:
            return cls(op, (q, k, v, sinks, *(segments or ())), length, length)
        band = op.band
        behind = band.right is not None and band.right + band.offset <= 0 and band.prefix <= keys
        if segments is None and not behind:
            segments = (jnp.zeros((q.shape[0], length), jnp.int32),) * 2
        op = dataclasses.replace(op, segments=segments is not None)
        q, k, v = _filled(q, 3, to), _filled(k, 2, to), _filled(v, 2, to)
        if segments is not None:
            segments = _filled(segments[0], 1, to), _filled(segments[1], 1, to, np.iinfo(np.int32).min)
        return cls(op, (q, k, v, sinks, *(segments or ())), length, to)

    def laid(self, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Any, ...]:
        """The arguments, their length over mesh axes: what it was filled up from lies over none."""
        q, k, v, sinks, *segments = self.args

        def over(x: Any, dim: int) -> Any:
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            entries[dim] = axes
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

        return over(q, 3), over(k, 2), over(v, 2), sinks, *(over(x, 1) for x in segments)


def _filled(x: Any, dim: int, to: int, value: int = 0) -> Any:
    """An array filled up along a dimension."""
    more = [(0, to - n if i == dim else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, more, constant_values=value)


def in_order(args: Sequence[Any], name: str, ways: int, keys: bool) -> list[Any]:
    """q, k, v, sinks or None, and segments, with their length in the order of a balance over so many devices;
    the keys' too, where they lie so.
    """
    q, k, v, sinks, *segments = args
    order = balance.order(name, q.shape[3], ways)
    asked = [balanced(x, order, 1) for x in segments[:1]]
    q = balanced(q, order, 3)
    if keys:
        k, v = balanced(k, order, 2), balanced(v, order, 2)
        segments = [balanced(x, order, 1) for x in segments]
    return [q, k, v, sinks, *asked, *segments[1:]]
