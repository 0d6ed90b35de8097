"""A stage's weights while the loops run, and their gradients: laid out by stage, whole along the axes of the
batch for all chunks at once or for a few at a time, and summed over devices when they are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.ops import resident, rows
from xform.pipeline.arrays import is_array, is_floating, narrowed, put_rows, rows_at
from xform.pipeline.chunks import Placing
from xform.pipeline.layer import Layer
from xform.pipeline.setting import Setting
from xform.trace import Value


class Weights:
    """fixed: what is made once, together but for stacks. parts: of each part of the layers, its own."""

    def __init__(self, setting: Setting, made: Sequence[Value]) -> None:
        self.setting, self.made = setting, made
        stacks = {k for layer in setting.layers for k in layer.operands.rows}
        self.fixed = [x if k in stacks else _together(x) for k, x in enumerate(made)]
        of = zip(setting.layers, setting.placings, strict=True)
        self.parts = [Stacked(setting, layer, placing, made) for layer, placing in of]

    @property
    def held(self) -> list[list[Value]]:
        """Of each part, the weights that are there from the beginning."""
        return [part.held for part in self.parts]

    def accumulator(self, x: Value, begun: bool = True) -> Value:
        return resident.accumulator(x, self.setting.of.kept(x.dtype), begun)

    def totals(self) -> list[list[Value]]:
        """Zeros for the gradients of what layers take, those of rows a row each."""
        return [part.totals(self.fixed) for part in self.parts]

    def wholes(self) -> list[list[Value]]:
        """Room for the gradients of stacks, summed over devices, where chunks take turns."""
        return [part.wholes() for part in self.parts]

    # Chunks that take turns

    def fetched(self, state: Any, chunk: Value, parts: Sequence[bool]) -> Any:
        """The weights of a chunk come together, in their place. parts: those that it has layers of."""
        return self.placed(state, chunk, self.brought(chunk, parts))

    def brought(self, chunk: Value, parts: Sequence[bool]) -> list[list[Value]]:
        """A chunk's weights, together; none of other parts."""
        return [part.brought(chunk) if there else [] for part, there in zip(self.parts, parts, strict=True)]

    def placed(self, state: Any, chunk: Value, weights: Sequence[Sequence[Value]]) -> Any:
        """The weights of a chunk in their place."""
        held = state["own"]["weights"]
        placed = [
            [put_rows(x, new, part.at(chunk)[1]) for x, new in zip(mine, rows, strict=True)] if rows else mine
            for part, mine, rows in zip(self.parts, held, weights, strict=True)
        ]
        return {**state, "own": {**state["own"], "weights": placed}}

    def flushed(self, state: Any, chunk: Value, parts: Sequence[bool]) -> Any:
        """A chunk's gradients are summed over devices; the next one's take their place when they come."""
        return self.summed(state, chunk, self.terms(state, chunk, parts))

    def terms(self, state: Any, chunk: Value, parts: Sequence[bool]) -> list[list[list[Value]]]:
        """A chunk's gradients as each device has them, by stream; none of other parts."""
        return [
            [
                part.terms(mine, chunk) if there else []
                for part, mine, there in zip(self.parts, totals, parts, strict=True)
            ]
            for totals in state["own"]["totals"]
        ]

    def read(self, state: Any, terms: Sequence[Sequence[Sequence[Value]]]) -> Any:
        """Sums that nothing is added to before these terms of them are read."""
        totals = [
            [[resident.after(x, xs) for x in mine] if xs else mine for mine, xs in zip(each, of, strict=True)]
            for each, of in zip(state["own"]["totals"], terms, strict=True)
        ]
        return {**state, "own": {**state["own"], "totals": totals}}

    def summed(self, state: Any, chunk: Value, terms: Sequence[Sequence[Sequence[Value]]]) -> Any:
        """A chunk's gradients are summed over devices."""
        whole = [
            [
                part.summed(sums, xs, chunk) if xs else sums
                for part, sums, xs in zip(self.parts, each, of, strict=True)
            ]
            for each, of in zip(state["every"]["whole"], terms, strict=True)
        ]
        return {**state, "every": {**state["every"], "whole": whole}}

    # In the end

    def gathered(self, state: Any, k: int, summed: Callable[[Value], Value]) -> list[Value]:
        """The cotangents of what is made once. summed: the sum of what stages have one each of."""
        found: dict[int, Value] = {}

        def add(n: int, g: Value) -> None:
            found[n] = found[n] + g if n in found else g

        for n, total in zip(self.setting.outer, state["every"]["outer"][k], strict=True):
            add(n, resident.settled(total, self.made[n]))
        totals, wholes = state["own"]["totals"][k], state["every"]["whole"][k]
        for part, total, whole in zip(self.parts, totals, wholes, strict=True):
            for n, g in part.gathered(total, whole, self.made, summed):
                add(n, g)
        return [found[n].astype(x.dtype) if n in found else _nothing(x) for n, x in enumerate(self.made)]


class Stacked:
    """A part's stacks, one after the other: apart, by stage, [stages, rows, ...], as they lie; held, those of
    the chunks that are there from the beginning.
    """

    def __init__(self, setting: Setting, layer: Layer, placing: Placing, made: Sequence[Value]) -> None:
        self.setting, self.layer, self.placing = setting, layer, placing
        self.apart: list[Value] = []
        self.held: list[Value] = []
        stages, places = setting.shape.stages, setting.runs.resident * placing.size
        for k, aval in zip(layer.operands.rows, layer.row_types, strict=True):
            x = resident.stacked(made[k] if setting.windowed else made[k].astype(aval.dtype))
            shape = (stages, placing.rows, *x.shape[1:])
            by_stage = resident.plain(jax.lax.reshape(self.ordered(x), shape))
            self.apart.append(by_stage)
            if setting.windowed:
                self.held.append(resident.room((stages, places, *x.shape[1:]), aval.dtype))
            else:
                self.held.append(resident.together(by_stage))

    def ordered(self, x: Value) -> Value:
        """Layers in the order of the rows they are in."""
        if self.placing.ragged:  # some rows repeat a layer
            return jnp.take(x, np.asarray(self.placing.order, np.int32), axis=0)
        return rows.by_stage(x, self.placing.order)

    def natural(self, g: Value) -> Value:
        """Gradients of rows as those of layers, in the layers' own order."""
        g = resident.stacked(g)
        if not self.placing.ragged:
            return rows.in_own_order(g, self.placing.order)
        return jnp.take(g, self.placing.row_of, axis=0)

    def totals(self, fixed: Sequence[Value]) -> list[Value]:
        """Zeros for gradients."""
        found = []
        for n in self.layer.wanted:
            if n >= self.layer.first_row:
                like, begun = self.held[n - self.layer.first_row], not self.setting.windowed
            else:
                x = fixed[self.layer.operands.fixed[n]]
                like, begun = jnp.broadcast_to(x, (self.setting.shape.stages, *x.shape)), True
            found.append(resident.accumulator(like, self.setting.of.kept(like.dtype), begun))
        return found

    def wholes(self) -> list[Value]:
        if not self.setting.windowed:
            return []
        first, kept = self.layer.first_row, self.setting.of.kept
        return [
            resident.room(self.apart[n - first].shape, kept(self.layer.rest[n].dtype))
            for n in self.layer.stacked_wants
        ]

    def at(self, chunk: Value) -> tuple[Value, Value]:
        """The first row of a chunk, and where it is while it is there."""
        place = chunk % self.setting.runs.resident * self.placing.size
        return jnp.asarray(self.placing.starts)[chunk], place

    def brought(self, chunk: Value) -> list[Value]:
        row, size = self.at(chunk)[0], self.placing.size
        return [
            resident.together(narrowed(rows_at(x, row, size), held.dtype))
            for held, x in zip(self.held, self.apart, strict=True)
        ]

    def terms(self, totals: Sequence[Value], chunk: Value) -> list[Value]:
        place, size, wanted = self.at(chunk)[1], self.placing.size, self.layer.wanted
        return [rows_at(totals[wanted.index(n)], place, size) for n in self.layer.stacked_wants]

    def summed(self, whole: Sequence[Value], terms: Sequence[Value], chunk: Value) -> list[Value]:
        row, size, found = self.at(chunk)[0], self.placing.size, list(whole)
        for j, (n, x) in enumerate(zip(self.layer.stacked_wants, terms, strict=True)):
            like = rows_at(self.apart[n - self.layer.first_row], row, size)
            found[j] = put_rows(found[j], resident.settled(x, like), row)
        return found

    def gathered(
        self,
        totals: Sequence[Value],
        whole: Sequence[Value],
        made: Sequence[Value],
        summed: Callable[[Value], Value],
    ) -> list[tuple[int, Value]]:
        """Cotangents of what is made once, and its number."""
        found = []
        for n, total in zip(self.layer.wanted, totals, strict=True):
            if n < self.layer.first_row:
                number = self.layer.operands.fixed[n]
                found.append((number, resident.settled(summed(total), made[number])))
                continue
            number = self.layer.operands.rows[n - self.layer.first_row]
            if self.setting.windowed:
                sums = whole[self.layer.stacked_wants.index(n)]
            else:
                sums = resident.settled(total, self.apart[n - self.layer.first_row])
            flat = jax.lax.reshape(sums, (self.placing.layers.size, *total.shape[2:]))
            found.append((number, self.natural(flat)))
        return found


def _together(x: Value) -> Value:
    return resident.together(x) if is_array(x) and x.ndim and is_floating(x) else x


def _nothing(x: Value) -> Any:
    if is_array(x) and is_floating(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
