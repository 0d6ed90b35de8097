"""What a stage does at a tick: a chunk of layers forward, or backward, on its own arrays.

Inside the manual region over the axis of the stages, an array that each stage has its own of comes without
that dimension. A chunk is of one part after the other, each a loop over its layers; of a part that not every
chunk has as many layers of, each layer is under a condition. `Placing` says which layer is where: row c of
those of chunk r is row starts[r] + c of a stage's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.ops import resident
from xform.pipeline.arrays import is_floating, replaced, row_at, typed
from xform.pipeline.layer import Layer
from xform.pipeline.pieces import Part, Pieces
from xform.pipeline.ticks import OUTSIDE, WAITING, of_part
from xform.trace import Value, inline

Own = dict[str, Any]
"""A stage's own arrays, by what they are."""


@dataclasses.dataclass(frozen=True)
class Placing:
    """How a part's layers lie on stages. layers: by stage, then row, the number of the layer; rows that are
    none repeat one. starts: by chunk, its first row. counts: by stage, then chunk, how many layers it has.
    size: the most.
    """

    layers: np.ndarray  # [stages, rows]
    starts: np.ndarray  # [repeats]
    counts: np.ndarray  # [stages, repeats]
    size: int

    @classmethod
    def of(cls, sizes: Sequence[int], stages: int, reverse: bool) -> Placing:
        """sizes: how many layers each block has."""
        size, total = max(sizes), sum(sizes)
        counts = np.asarray(sizes, np.int32).reshape(-1, stages).T
        there = counts.any(0)
        starts = np.where(there, np.cumsum(there) - there, 0).astype(np.int32) * size
        layers = np.zeros((stages, int(there.sum()) * size), np.int32)
        start = 0
        for block, count in enumerate(sizes):
            if not there[block // stages]:
                continue
            row = starts[block // stages]
            numbers = np.clip(np.minimum(np.arange(size), count - 1) + start, 0, total - 1)
            layers[block % stages, row : row + size] = total - 1 - numbers if reverse else numbers
            start += count
        return cls(layers, starts, counts, size)

    @property
    def order(self) -> tuple[int, ...]:
        """The number of the layer in each row, stage by stage."""
        return tuple(int(n) for n in self.layers.ravel())

    @property
    def row_of(self) -> np.ndarray:
        """A row of each layer, of those of all stages."""
        found = np.zeros(self.counts.sum(), np.int32)
        for stage, chunk in np.ndindex(self.counts.shape):
            row = int(self.starts[chunk]) + np.arange(int(self.counts[stage, chunk]))
            found[self.layers[stage, row]] = stage * self.rows + row
        return found

    @property
    def rows(self) -> int:
        """Of a stage."""
        return self.layers.shape[1]

    @property
    def ragged(self) -> bool:
        """Whether some rows are none."""
        return len(set(self.order)) < self.layers.size

    @property
    def everywhere(self) -> bool:
        """Whether all chunks have the same number of layers."""
        return bool((self.counts == self.size).all())


@dataclasses.dataclass(frozen=True)
class Turn:
    """A layer of a chunk: at number c of those that the chunk may have, in a row of the stage's; `number` in
    the stack. there: whether the chunk has it and there is work, None where all chunks have it.
    """

    c: Value
    row: Value
    number: Value
    there: Value | None


class Chunks:
    """Runs chunks of the parts. streams: how many cotangents there are at once. resident: how many chunks'
    weights are there at once, 0 for all.
    """

    def __init__(
        self,
        pieces: Pieces,
        layers: Sequence[Layer],
        placings: Sequence[Placing],
        streams: int,
        resident: int,
    ) -> None:
        self.pieces, self.streams = pieces, streams
        self.parts = [
            Turns(n, pieces, *each, resident)
            for n, each in enumerate(zip(pieces.parts, layers, placings, strict=True))
        ]
        self.floats = [n for n, t in enumerate(pieces.z) if is_floating(t)]

    # ------------------------------------------------------------ forward

    def forward(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """One microbatch through one chunk: its result to `sent`, what is kept to its slot of `saved`."""
        z = self.taken(own["register"], own.get("waiting"), every["outside"], cols)
        saved = own.get("saved")
        for n, part in enumerate(self.parts):
            z, kept = part.through(z, own, cols, every, None if saved is None else saved[n])
            saved = None if saved is None else replaced(saved, n, kept)
        return {**own, "sent": z, **({} if saved is None else {"saved": saved})}

    def taken(self, register: Any, waiting: Any, outside: Any, cols: Mapping[str, Value]) -> list[Value]:
        """What a work takes, from where its tick says."""
        chosen = list(register)
        if outside is not None:
            chosen = [_choose(cols["take"] == OUTSIDE, a, b) for a, b in zip(outside, chosen, strict=True)]
        if waiting is not None:
            there = [row_at(x, cols["wait"]) for x in waiting]
            chosen = [_choose(cols["take"] == WAITING, a, b) for a, b in zip(there, chosen, strict=True)]
        return chosen

    # ------------------------------------------------------------ backward

    def backward(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """The gradients of one microbatch through one chunk: that of its input to `sent_back`."""
        return self.back(own, cols, every, "both")

    def input(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """The gradient of the input alone."""
        return self.back(own, cols, every, "input")

    def back(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any], kind: str) -> Own:
        real, new = cols["kind"] > 0, dict(own)
        sent = []
        for k in range(self.streams):
            outside = None if every["ended"] is None else every["ended"][k]
            waiting = own.get("waiting_back")
            dz = self.taken(own["register_back"][k], None if waiting is None else waiting[k], outside, cols)
            dz = [_choose(real, x, jnp.zeros_like(x)) for x in dz]
            by: dict[int, Value] = dict(zip(self.floats, dz, strict=True))
            totals, late = list(new["totals"][k]), list(new["late"][k])
            for n in range(len(self.parts) - 1, -1, -1):
                by, totals[n], late[n] = self.parts[n].back(by, totals[n], late[n], own, cols, every, kind)
            sent.append([by[n] for n in self.floats])
            new["totals"], new["late"] = replaced(new["totals"], k, totals), replaced(new["late"], k, late)
        return {**new, "sent_back": sent}

    def weight(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """The gradient of the weights, of what that of the input has left."""
        new = dict(own)
        for k in range(self.streams):
            totals = [
                part.weight(total, late, own, cols, every)
                for part, total, late in zip(self.parts, own["totals"][k], own["late"][k], strict=True)
            ]
            new["totals"] = replaced(new["totals"], k, totals)
        return new


class Turns:
    """Runs the layers of a part that a chunk has. index: its number."""

    def __init__(
        self, index: int, pieces: Pieces, part: Part, layer: Layer, placing: Placing, resident: int
    ) -> None:
        self.index, self.pieces, self.part = index, pieces, part
        self.layer, self.placing, self.resident = layer, placing, resident
        self.plain = part.gives[: len(part.gives) - part.rows]
        self.rows = part.gives[len(part.gives) - part.rows :]
        self.moving_floats = [n for n, t in enumerate(layer.moving) if is_floating(t)]

    def turn(self, own: Own, cols: Mapping[str, Value], c: Value) -> Turn:
        chunk = cols["chunk"]
        row = jnp.asarray(self.placing.starts)[chunk] + c
        there = None
        if not self.placing.everywhere:  # nor has a stage without work what a chunk of fewer layers keeps
            there = (c < row_at(own["counts"][self.index], chunk)) & (cols["kind"] > 0)
        return Turn(c, row, row_at(own["layers"][self.index], row), there)

    def saved(self, cols: Mapping[str, Value]) -> Value:
        return cols[of_part("saved", self.index)]

    def late(self, cols: Mapping[str, Value]) -> Value:
        return cols[of_part("late", self.index)]

    def place(self, turn: Turn, cols: Mapping[str, Value]) -> Value:
        """Where the weights of a row are, of those that are there."""
        if not self.resident:
            return turn.row
        return cols["chunk"] % self.resident * self.placing.size + turn.c

    def rest(self, turn: Turn, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> list[Value]:
        """What a layer takes besides what moves."""
        operands = self.layer.operands
        told: tuple[Sequence[Value], Sequence[Value]] = [], []
        if operands.told or operands.told_rows:
            m, count = cols["microbatch"], len(self.pieces.told)
            data = [row_at(x, m) for x in every["data"]]
            made = inline(self.pieces.tell, *every["fixed"], *data, m)
            told = made[:count], made[count:]
        return [
            *(every["fixed"][k] for k in operands.fixed),
            *(told[0][k] for k in operands.told),
            *(row_at(told[1][k], turn.number) for k in operands.told_rows),
            *(row_at(w, self.place(turn, cols)) for w in own["rows"][self.index]),
        ]

    def through(
        self, z: list[Value], own: Own, cols: Mapping[str, Value], every: Mapping[str, Any], saved: Any
    ) -> tuple[list[Value], Any]:
        """A microbatch through the layers, and what is kept of it."""
        program = self.layer.run if saved is None else self.layer.forward
        slot = None if saved is None else self.saved(cols)

        def one(held: Any, c: Value) -> tuple[Any, None]:
            z, saved = held
            turn = self.turn(own, cols, c)

            def run(z: list[Value]) -> tuple[list[Value], list[Value]]:
                moving = [z[n] for n in self.layer.operands.moving]
                outs = inline(program, *moving, *self.rest(turn, own, cols, every))
                new = list(z)
                for n, x in zip(self.plain, outs, strict=False):
                    new[n] = typed(x, z[n])
                for n, x in zip(self.rows, outs[len(self.plain) :], strict=False):
                    new[n] = _put(z[n], x, turn.number)
                return new, list(outs[len(self.part.gives) :])

            def none(z: list[Value]) -> tuple[list[Value], list[Value]]:
                return z, [] if saved is None else [_slot(s, slot, c) for s in saved]

            z, kept = _where(turn.there, run, none, z)
            if saved is not None:
                saved = [_put(s, x, slot, c) for s, x in zip(saved, kept, strict=True)]
            return (z, saved), None

        return _loop(one, (z, saved), self.placing.size)

    def back(
        self,
        dz: dict[int, Value],
        totals: Any,
        late: Any,
        own: Own,
        cols: Mapping[str, Value],
        every: Mapping[str, Any],
        kind: str,
    ) -> tuple[dict[int, Value], Any, Any]:
        """Gradients back through the layers, by number of what travels; and of weights, added up or what
        they wait for.
        """
        both = kind == "both"

        def one(held: Any, c: Value) -> tuple[Any, None]:
            turn = self.turn(own, cols, self.placing.size - 1 - c)

            def run(held: Any) -> Any:
                dz, totals, late = held
                kept = [_slot(s, self.saved(cols), turn.c) for s in own["saved"][self.index]]
                program = self.layer.backward if both else self.layer.input
                cts, past = self.cotangents(dz, turn.number)
                outs = inline(program, *kept, *self.rest(turn, own, cols, every), *cts)
                moved, more = outs[: len(self.moving_floats)], outs[len(self.moving_floats) :]
                if both:
                    totals = self.added(totals, more, turn, cols)
                else:
                    late = [_put(b, x, self.late(cols), turn.c) for b, x in zip(late, more, strict=True)]
                return self.passed(past, moved), totals, late

            return _where(turn.there, run, lambda held: held, held), None

        held: tuple[dict[int, Value], Any, Any] = _loop(one, (dz, totals, late), self.placing.size)
        return held

    def cotangents(self, dz: dict[int, Value], number: Value) -> tuple[list[Value], dict[int, Value]]:
        """Those of what a layer gives; and those of what travels past it."""
        past = dict(dz)
        cts = []
        for n, t in zip(self.part.gives, self.layer.outs, strict=True):
            if n not in dz:
                continue
            if n in self.rows:
                cts.append(typed(row_at(dz[n], number), t))
                past[n] = _put(dz[n], jnp.zeros(t.shape, dz[n].dtype), number)
            else:
                cts.append(typed(dz[n], t))
                past[n] = jnp.zeros_like(dz[n])
        return cts, past

    def passed(self, past: dict[int, Value], moved: Sequence[Value]) -> dict[int, Value]:
        """The cotangents of what goes into a layer."""
        new = dict(past)
        for k, x in zip(self.moving_floats, moved, strict=True):
            n = self.layer.operands.moving[k]
            new[n] = typed(x, past[n]) if n in self.plain else past[n] + x
        return new

    def weight(
        self, totals: Any, late: Any, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]
    ) -> Any:
        """The gradients of the weights of its layers, added up."""

        def one(totals: Any, c: Value) -> tuple[Any, None]:
            turn = self.turn(own, cols, c)

            def run(totals: Any) -> Any:
                kept = [_slot(s, self.saved(cols), c) for s in own["saved"][self.index]]
                waited = [_slot(s, self.late(cols), c) for s in late]
                outs = inline(self.layer.weight, *kept, *self.rest(turn, own, cols, every), *waited)
                return self.added(totals, outs, turn, cols)

            return _where(turn.there, run, lambda totals: totals, totals), None

        return _loop(one, totals, self.placing.size)

    def added(
        self, totals: Sequence[Value], more: Sequence[Value], turn: Turn, cols: Mapping[str, Value]
    ) -> list[Value]:
        """The gradients of what is wanted with those of one layer: those of rows at its row. Where chunks
        take turns in a place, the first of one takes the place of the last one's sum. A stage without work
        adds nothing: its cotangents are zero, but its gradients may be no numbers.
        """
        real, fresh = cols["kind"] > 0, cols["fresh"] == 1 if self.resident else None
        return [
            resident.accumulate(total, x, self.place(turn, cols), real=real, fresh=fresh)
            if n >= self.layer.first_row
            else resident.accumulate(total, x, real=real)
            for n, total, x in zip(self.layer.wanted, totals, more, strict=True)
        ]


def _where(there: Value | None, run: Callable[[Any], Any], otherwise: Callable[[Any], Any], held: Any) -> Any:
    """One or the other, where it is not known that it is there."""
    return run(held) if there is None else jax.lax.cond(there, run, otherwise, held)


def _choose(which: Value, a: Value, b: Value) -> Value:
    return jax.lax.select(jnp.broadcast_to(which, a.shape), a, typed(b, a))


def _slot(x: Value, slot: Value, c: Value) -> Value:
    """x[slot, c]"""
    start = (slot, c, *[np.int32(0)] * (x.ndim - 2))
    found = jax.lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]), allow_negative_indices=False)
    return resident.plain(jax.lax.squeeze(found, (0, 1)))


def _put(x: Value, row: Value, *at: Value) -> Value:
    """x with x[at] = row."""
    start = (*at, *[np.int32(0)] * (x.ndim - len(at)))
    update = jax.lax.reshape(typed(row, x), (*[1] * len(at), *x.shape[len(at) :]))
    return jax.lax.dynamic_update_slice(x, update, start, allow_negative_indices=False)


def _loop(one: Any, held: Any, size: int) -> Any:
    """One turn a layer; no loop for a single one."""
    if size == 1:
        return one(held, np.int32(0))[0]
    return jax.lax.scan(one, held, np.arange(size, dtype=np.int32))[0]
