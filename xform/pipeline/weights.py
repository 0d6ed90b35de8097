"""A stage's weights while the loops run, and their gradients: laid out by stage, whole along the axes of the
batch for all chunks at once or for a few at a time, and summed over devices when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.ops import resident, rows
from xform.pipeline.arrays import is_array, is_floating, narrowed, put_rows, replaced, rows_at
from xform.pipeline.setting import Setting
from xform.trace import Value


class Weights:
    """fixed: what is made once, together but for stacks. apart: the stacks by stage, [stages, rows, ...], as
    they lie; held: those of the chunks that are there from the beginning.
    """

    def __init__(self, setting: Setting, made: Sequence[Value]) -> None:
        self.setting, self.made = setting, made
        layer, placing, stages = setting.layer, setting.placing, setting.shape.stages
        stacks = set(layer.operands.rows)
        self.fixed = [x if k in stacks else _together(x) for k, x in enumerate(made)]
        self.apart: list[Value] = []
        self.held: list[Value] = []
        places = setting.runs.resident * placing.size
        for k, aval in zip(layer.operands.rows, layer.row_types, strict=True):
            x = resident.stacked(made[k] if setting.windowed else made[k].astype(aval.dtype))
            shape = (stages, len(placing.order) // stages, *x.shape[1:])
            by_stage = resident.plain(jax.lax.reshape(self.ordered(x), shape))
            self.apart.append(by_stage)
            if setting.windowed:
                self.held.append(resident.room((stages, places, *x.shape[1:]), aval.dtype))
            else:
                self.held.append(resident.together(by_stage))

    def ordered(self, x: Value) -> Value:
        """Layers in the order of the rows they are in."""
        order = self.setting.placing.order
        if self.setting.placing.ragged:  # some rows repeat a layer
            return jnp.take(x, np.asarray(order, np.int32), axis=0)
        return rows.by_stage(x, order)

    def natural(self, g: Value, layers: int) -> Value:
        """Gradients of rows as those of layers, in the layers' own order."""
        g = resident.stacked(g)
        order = self.setting.placing.order
        if not self.setting.placing.ragged:
            return rows.in_own_order(g, order)
        back = np.zeros(layers, np.int32)
        for row, (number, is_valid) in enumerate(zip(order, self.setting.placing.valid.ravel(), strict=True)):
            if is_valid:
                back[number] = row
        return jnp.take(g, back, axis=0)

    # Gradients

    def totals(self) -> list[Value]:
        """Zeros for the gradients of what a layer takes, those of rows a row each."""
        layer, stages, first = self.setting.layer, self.setting.shape.stages, self.setting.first_row
        found = []
        for n in layer.wanted:
            if n >= first:
                found.append(self.accumulator(self.held[n - first], not self.setting.windowed))
            else:
                x = self.fixed[layer.operands.fixed[n]]
                found.append(self.accumulator(jnp.broadcast_to(x, (stages, *x.shape))))
        return found

    def accumulator(self, x: Value, begun: bool = True) -> Value:
        return resident.accumulator(x, self.setting.of.kept(x.dtype), begun)

    def wholes(self) -> list[Value]:
        """Room for the gradients of stacks, summed over devices, where chunks take turns."""
        s = self.setting
        if not s.windowed:
            return []
        return [
            resident.room(self.apart[n - s.first_row].shape, s.of.kept(s.layer.rest[n].dtype))
            for n in s.stacked_wants
        ]

    # Chunks that take turns

    def fetched(self, state: Any, chunk: Value) -> Any:
        """A chunk's weights come together, in their place."""
        return self.placed(state, chunk, self.brought(chunk))

    def brought(self, chunk: Value) -> list[Value]:
        """A chunk's weights, together."""
        size = self.setting.placing.size
        return [
            resident.together(narrowed(rows_at(x, chunk * size, size), held.dtype))
            for held, x in zip(self.held, self.apart, strict=True)
        ]

    def placed(self, state: Any, chunk: Value, rows: Sequence[Value]) -> Any:
        """The weights of a chunk in their place."""
        weights = [
            put_rows(held, x, self.place(chunk))
            for held, x in zip(state["own"]["weights"], rows, strict=True)
        ]
        return {**state, "own": {**state["own"], "weights": weights}}

    def place(self, chunk: Value) -> Value:
        """The first row of a chunk, of those that are there."""
        return chunk % self.setting.runs.resident * self.setting.placing.size

    def flushed(self, state: Any, chunk: Value) -> Any:
        """A chunk's gradients are summed over devices; the next one's take their place when they come."""
        return self.summed(state, chunk, self.terms(state, chunk))

    def terms(self, state: Any, chunk: Value) -> list[list[Value]]:
        """A chunk's gradients as each device has them, by stream."""
        size, wanted = self.setting.placing.size, self.setting.layer.wanted
        return [
            [rows_at(totals[wanted.index(n)], self.place(chunk), size) for n in self.setting.stacked_wants]
            for totals in state["own"]["totals"]
        ]

    def read(self, state: Any, terms: Sequence[list[Value]]) -> Any:
        """Sums that nothing is added to before these terms of them are read."""
        totals = [
            [resident.after(total, xs) for total in totals]
            for totals, xs in zip(state["own"]["totals"], terms, strict=True)
        ]
        return {**state, "own": {**state["own"], "totals": totals}}

    def summed(self, state: Any, chunk: Value, terms: Sequence[list[Value]]) -> Any:
        """A chunk's gradients are summed over devices."""
        size, every = self.setting.placing.size, dict(state["every"])
        for k, xs in enumerate(terms):
            whole = list(every["whole"][k])
            for j, (n, x) in enumerate(zip(self.setting.stacked_wants, xs, strict=True)):
                like = rows_at(self.apart[n - self.setting.first_row], chunk * size, size)
                whole[j] = put_rows(whole[j], resident.settled(x, like), chunk * size)
            every["whole"] = replaced(every["whole"], k, whole)
        return {**state, "every": every}

    # In the end

    def gathered(self, state: Any, k: int) -> list[Value]:
        """The cotangents of what is made once."""
        found: dict[int, Value] = {}

        def add(n: int, g: Value) -> None:
            found[n] = found[n] + g if n in found else g

        for n, total in zip(self.setting.outer, state["every"]["outer"][k], strict=True):
            add(n, resident.settled(total, self.made[n]))
        layer, first = self.setting.layer, self.setting.first_row
        for n, total in zip(layer.wanted, state["own"]["totals"][k], strict=True):
            if n >= first:
                number = layer.operands.rows[n - first]
                if self.setting.windowed:
                    sums = state["every"]["whole"][k][self.setting.stacked_wants.index(n)]
                else:
                    sums = resident.settled(total, self.apart[n - first])
                flat = jax.lax.reshape(sums, (len(self.setting.placing.order), *total.shape[2:]))
                add(number, self.natural(flat, self.setting.pieces.stack.layers))
            else:
                number = layer.operands.fixed[n]
                add(number, resident.settled(total.sum(0), self.made[number]))
        return [found[n].astype(x.dtype) if n in found else _nothing(x) for n, x in enumerate(self.made)]


def _together(x: Value) -> Value:
    return resident.together(x) if is_array(x) and x.ndim and is_floating(x) else x


def _nothing(x: Value) -> Any:
    if is_array(x) and is_floating(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
