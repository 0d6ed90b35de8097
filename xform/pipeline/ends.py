"""What is around the stack: how a microbatch comes into it, what becomes of it at the end, and the gradients
of both. It is computed outside of the region over the stages, so it may lie over their axis as over another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.ad import Zero

from xform.batch.microbatches import Leaves
from xform.ops import resident
from xform.pipeline.arrays import put_in, replaced, row_at, typed
from xform.pipeline.setting import Setting
from xform.trace import Value, inline


class Ends:
    """fixed: what is made once."""

    def __init__(self, setting: Setting, fixed: Sequence[Value]) -> None:
        self.setting, self.fixed = setting, fixed

    def entering(self, microbatch: Value) -> list[Value]:
        """What goes into the first layer, as it travels."""
        data = self.at(microbatch)
        outs = inline(self.setting.pieces.enter, *self.fixed, *data, microbatch)
        types = self.setting.pieces.z
        outs = [_like(x, t) for x, t in zip(outs, types, strict=False)]
        return [*outs, *(jnp.zeros(t.shape, t.dtype) for t in types[len(outs) :])]

    def nothing(self) -> list[Value]:
        return [jnp.zeros(t.shape, t.dtype) for t in self.setting.pieces.z]

    def left(self, every: Any, z: Sequence[Value], m: Value, slot: Value) -> dict[str, Any]:
        """What becomes of a microbatch that has been through all layers; and the gradient of that."""
        every = dict(every)
        data = self.at(m)
        floats = self.setting.chunks.floats

        def end(zs: Leaves, outer: Leaves, rows: Leaves) -> Any:
            given, fixed, own = list(z), list(self.fixed), list(data)
            for n, x in zip(floats, zs, strict=True):
                given[n] = x
            for k, x in zip(self.setting.outer, outer, strict=True):
                fixed[k] = x
            for i, x in zip(self.setting.rows, rows, strict=True):
                own[i] = x
            leaves = [given[n] for n in self.setting.pieces.leaves]
            outs = inline(self.setting.pieces.leave, *leaves, *fixed, *own, m)
            return [outs[k] for k in self.setting.wanted], outs

        args = (
            [z[n] for n in floats],
            [self.fixed[k] for k in self.setting.outer],
            [data[i] for i in self.setting.rows],
        )
        if not self.setting.pulls:
            outs = end(*args)[1]
        else:
            _, pull, outs = jax.vjp(end, *args, has_aux=True)
            for k, cts in enumerate(self.setting.pulls):
                dz, outer, rows = pull([_ct(ct) for ct in cts])
                ended = [put_in(buffer, x, slot) for buffer, x in zip(every["ended"][k], dz, strict=True)]
                every["ended"] = replaced(every["ended"], k, ended)
                every = self.outer_added(every, k, outer, rows, m)
        every["sums"] = self.setting.of.added(every["sums"], outs)
        stacked = self.setting.of.stacked(outs)
        every["stacked"] = [
            put_in(buffer, x, m)
            for buffer, x in zip(every["stacked"], [*stacked[0], *stacked[1]], strict=True)
        ]
        return every

    def returned(self, every: Any, dz: Any, m: Value) -> dict[str, Any]:
        """The gradient of what goes into the first layer, through what makes it."""
        data = self.at(m)
        entered = len(self.setting.pieces.enter.outvars)
        floats = [n for n in self.setting.chunks.floats if n < entered]

        def start(outer: Leaves, rows: Leaves) -> list[Value]:
            fixed, own = list(self.fixed), list(data)
            for k, x in zip(self.setting.outer, outer, strict=True):
                fixed[k] = x
            for i, x in zip(self.setting.rows, rows, strict=True):
                own[i] = x
            outs = inline(self.setting.pieces.enter, *fixed, *own, m)
            return [_like(outs[n], self.setting.pieces.z[n]) for n in floats]

        _, pull = jax.vjp(
            start, [self.fixed[k] for k in self.setting.outer], [data[i] for i in self.setting.rows]
        )
        for k, each in enumerate(dz):
            by = dict(zip(self.setting.chunks.floats, each, strict=True))
            outer, rows = pull([by[n] for n in floats])
            every = self.outer_added(every, k, outer, rows, m)
        return every

    def outer_added(self, every: Any, k: int, outer: Leaves, rows: Leaves, m: Value) -> dict[str, Any]:
        every = dict(every)
        totals = [resident.accumulate(t, x) for t, x in zip(every["outer"][k], outer, strict=True)]
        every["outer"] = replaced(every["outer"], k, totals)
        moved = [resident.added(t, x, m) for t, x in zip(every["moved"][k], rows, strict=True)]
        every["moved"] = replaced(every["moved"], k, moved)
        return every

    def at(self, m: Value) -> list[Value]:
        """A microbatch's data."""
        return [row_at(x, m) for x in self.setting.data]


def _like(x: Value, t: Any) -> Value:
    x = jnp.asarray(x, t.dtype) if not hasattr(x, "dtype") else x
    return typed(x, t)


def _ct(ct: Any) -> Any:
    if not isinstance(ct, Zero):
        return ct
    aval: Any = ct.aval
    return jnp.zeros(aval.shape, aval.dtype)
