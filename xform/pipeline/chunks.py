"""What a stage does at a tick: a chunk of layers forward, or backward, on its own arrays.

Inside the manual region over the axis of the stages, an array that each stage has its own of comes without
that dimension. `Chunks` has the layers' programs and how they lie: row c of chunk r is row r * size + c of a
stage's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.ops import resident
from xform.pipeline.arrays import is_floating, replaced, typed
from xform.pipeline.cutting import Pieces
from xform.pipeline.layer import Layer
from xform.pipeline.ticks import OUTSIDE, WAITING
from xform.trace import Value, inline

Own = dict[str, Any]
"""A stage's own arrays, by what they are."""


@dataclasses.dataclass(frozen=True)
class Placing:
    """How layers lie on stages: by stage, then row, the number of the layer, and whether it is one of the
    chunk's: chunks that have fewer layers than the largest repeat their last, whose result is not taken.
    """

    layers: np.ndarray  # [stages, repeats * size]
    valid: np.ndarray
    size: int

    @classmethod
    def of(cls, sizes: Sequence[int], stages: int, reverse: bool) -> Placing:
        """sizes: how many layers each block has."""
        size, total = max(sizes), sum(sizes)
        repeats = len(sizes) // stages
        layers = np.zeros((stages, repeats * size), np.int32)
        valid = np.zeros((stages, repeats * size), bool)
        start = 0
        for block, count in enumerate(sizes):
            rows = slice(block // stages * size, (block // stages + 1) * size)
            numbers = np.minimum(np.arange(size), count - 1) + start
            layers[block % stages, rows] = total - 1 - numbers if reverse else numbers
            valid[block % stages, rows] = np.arange(size) < count
            start += count
        return cls(layers, valid, size)

    @property
    def order(self) -> tuple[int, ...]:
        """The number of the layer in each row, stage by stage."""
        return tuple(int(n) for n in self.layers.ravel())

    @property
    def ragged(self) -> bool:
        return not self.valid.all()


class Chunks:
    """Runs chunks of a stack. streams: how many cotangents there are at once. resident: how many chunks'
    weights are there at once.
    """

    def __init__(self, pieces: Pieces, layer: Layer, placing: Placing, streams: int, resident: int) -> None:
        self.resident = resident
        self.pieces, self.layer, self.placing, self.streams = pieces, layer, placing, streams
        self.carried, self.riders = len(pieces.carried), len(pieces.riders)
        self.ys = len(pieces.ys)
        self.z_types = [
            *pieces.carried,
            *(v.aval for v in pieces.riders),
            *(t.update(shape=(pieces.stack.layers, *t.shape)) for t in pieces.ys),
        ]
        self.floats = [n for n, t in enumerate(self.z_types) if is_floating(t)]
        self.moving_floats = [n for n, t in enumerate(layer.moving) if is_floating(t)]

    # ------------------------------------------------------------ forward

    def forward(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """One microbatch through one chunk: its result to `sent`, what is kept to its slot of `saved`."""
        z = self.taken(own["register"], own.get("waiting"), every["outside"], cols)
        z, saved = self.through(z, own, cols, every, own.get("saved"))
        return {**own, "sent": z, **({} if saved is None else {"saved": saved})}

    def taken(self, register: Any, waiting: Any, outside: Any, cols: Mapping[str, Value]) -> list[Value]:
        """What a work takes, from where its tick says."""
        chosen = list(register)
        if outside is not None:
            chosen = [_choose(cols["take"] == OUTSIDE, a, b) for a, b in zip(outside, chosen, strict=True)]
        if waiting is not None:
            there = [_at(x, cols["wait"]) for x in waiting]
            chosen = [_choose(cols["take"] == WAITING, a, b) for a, b in zip(there, chosen, strict=True)]
        return chosen

    def told(self, cols: Mapping[str, Value], every: Mapping[str, Any]) -> tuple[list[Value], list[Value]]:
        """What layers read that follows from the microbatch's data."""
        if not self.pieces.told and not self.pieces.told_rows:
            return [], []
        m = cols["microbatch"]
        data = [_at(x, m) for x in every["data"]]
        made = inline(self.pieces.tell, *every["fixed"], *data, m)
        n = len(self.pieces.told)
        return made[:n], made[n:]

    def rest(
        self, at: Value, number: Value, own: Own, every: Mapping[str, Any], told: Sequence[Any]
    ) -> list[Value]:
        """What the layer in a row takes besides what moves."""
        operands = self.layer.operands
        plain, rows = told
        return [
            *(every["fixed"][k] for k in operands.fixed),
            *(plain[k] for k in operands.told),
            *(_at(rows[k], number) for k in operands.told_rows),
            *(_at(w, self.place(at)) for w in own["rows"]),
        ]

    def place(self, at: Value) -> Value:
        """Where the weights of a row are, of those that are there."""
        return at if self.has_all else at % (self.resident * self.placing.size)

    @property
    def has_all(self) -> bool:
        """Whether the weights of all chunks are there at once."""
        return self.resident * self.placing.size == self.placing.layers.shape[1]

    def through(
        self, z: list[Value], own: Own, cols: Mapping[str, Value], every: Mapping[str, Any], saved: Any
    ) -> tuple[list[Value], Any]:
        size, told = self.placing.size, self.told(cols, every)
        first = cols["chunk"] * size
        program = self.layer.run if saved is None else self.layer.forward

        def one(held: Any, c: Value) -> tuple[Any, None]:
            z, saved = held
            at = first + c
            number = _at(own["layers"], at)
            moving = self.moving(z)
            outs = inline(program, *moving, *self.rest(at, number, own, every, told))
            new = outs[: self.carried]
            ys = outs[self.carried : self.carried + self.ys]
            if saved is not None:
                kept = outs[self.carried + self.ys :]
                saved = [_put(s, x, cols["saved"], c) for s, x in zip(saved, kept, strict=True)]
            if self.placing.ragged:
                valid = _at(own["valid"], at)
                new = [_choose(valid, a, b) for a, b in zip(new, z, strict=False)]
                before = [_at(buffer, number) for buffer in z[self.carried + self.riders :]]
                ys = [_choose(valid, a, b) for a, b in zip(ys, before, strict=True)]
            new = [typed(x, t) for x, t in zip(new, self.pieces.carried, strict=True)]
            rows = [_put(b, y, number) for b, y in zip(z[self.carried + self.riders :], ys, strict=True)]
            return ([*new, *z[self.carried : self.carried + self.riders], *rows], saved), None

        return _loop(one, (z, saved), size)

    def moving(self, z: Sequence[Value]) -> list[Value]:
        """Of what travels, what a layer reads."""
        return [*z[: self.carried], *(z[self.carried + k] for k in self.layer.operands.riders)]

    # ------------------------------------------------------------ backward

    def backward(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """The gradients of one microbatch through one chunk: that of its input to `sent_back`."""
        return self.back(own, cols, every, "both")

    def input(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """The gradient of the input alone."""
        return self.back(own, cols, every, "input")

    def back(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any], kind: str) -> Own:
        told, real = self.told(cols, every), cols["kind"] > 0
        first, new = cols["chunk"] * self.placing.size, dict(own)
        sent = []
        for k in range(self.streams):
            outside = None if every["ended"] is None else every["ended"][k]
            waiting = own.get("waiting_back")
            dz = self.taken(own["register_back"][k], None if waiting is None else waiting[k], outside, cols)
            dz = [_choose(real, x, jnp.zeros_like(x)) for x in dz]
            held = (dz, new["totals"][k], new["late"][k] if kind == "input" else None)

            def one(held: Any, c: Value) -> tuple[Any, None]:
                dz, totals, late = held
                c = self.placing.size - 1 - c
                at = first + c
                number = _at(own["layers"], at)
                valid = _at(own["valid"], at) if self.placing.ragged else None
                cts, passed = self.cotangents(dz, number, valid)
                kept = [_slot(s, cols["saved"], c) for s in own["saved"]]
                rest = self.rest(at, number, own, every, told)
                program = self.layer.backward if kind == "both" else self.layer.input
                outs = inline(program, *kept, *rest, *cts)
                moved, more = outs[: len(self.moving_floats)], outs[len(self.moving_floats) :]
                if kind == "both":
                    totals = self.added(totals, more, at, cols, real if valid is None else real & valid)
                else:
                    late = [_put(b, x, cols["late"], c) for b, x in zip(late, more, strict=True)]
                return (self.passed(dz, passed, moved, valid), totals, late), None

            (dz, totals, late), _ = _loop_out(one, held, self.placing.size)
            sent.append(dz)
            new["totals"] = replaced(new["totals"], k, totals)
            if kind == "input":
                new["late"] = replaced(new["late"], k, late)
        return {**new, "sent_back": sent}

    def cotangents(
        self, dz: Sequence[Value], number: Value, valid: Any
    ) -> tuple[list[Value], dict[int, Value]]:
        """Those of what a layer gives; and those of what travels on past it, by number in z."""
        by = dict(zip(self.floats, dz, strict=True))
        cts = [by[n] for n in range(self.carried) if n in by]
        passed = {n: x for n, x in by.items() if n >= self.carried}
        for j in range(self.ys):
            n = self.carried + self.riders + j
            if n in by:
                cts.append(_at(by[n], number))
                nothing = jnp.zeros(by[n].shape[1:], by[n].dtype)
                row = nothing if valid is None else _choose(valid, nothing, _at(by[n], number))
                passed[n] = _put(by[n], row, number)
        if valid is not None:
            cts = [_choose(valid, x, jnp.zeros_like(x)) for x in cts]
        return cts, passed

    def passed(
        self, dz: Sequence[Value], passed: dict[int, Value], moved: Sequence[Value], valid: Any
    ) -> list[Value]:
        """The cotangents of what goes into a layer."""
        by = dict(zip(self.floats, dz, strict=True))
        new = dict(passed)
        for n, x in zip(self.moving_floats, moved, strict=True):
            if n < self.carried:
                new[n] = typed(x if valid is None else _choose(valid, x, by[n]), by[n])
            else:
                k = self.carried + self.layer.operands.riders[n - self.carried]
                new[k] = new[k] + (x if valid is None else _choose(valid, x, jnp.zeros_like(x)))
        return [new[n] for n in self.floats]

    def weight(self, own: Own, cols: Mapping[str, Value], every: Mapping[str, Any]) -> Own:
        """The gradient of the weights, of what that of the input has left."""
        told = self.told(cols, every)
        first, new = cols["chunk"] * self.placing.size, dict(own)
        for k in range(self.streams):

            def one(totals: Any, c: Value, k: int = k) -> tuple[Any, None]:
                at = first + c
                number = _at(own["layers"], at)
                kept = [_slot(s, cols["saved"], c) for s in own["saved"]]
                late = [_slot(s, cols["late"], c) for s in own["late"][k]]
                outs = inline(self.layer.weight, *kept, *self.rest(at, number, own, every, told), *late)
                real = cols["kind"] > 0
                real = real & _at(own["valid"], at) if self.placing.ragged else real
                return self.added(totals, outs, at, cols, real), None

            totals, _ = _loop_out(one, own["totals"][k], self.placing.size)
            new["totals"] = replaced(new["totals"], k, totals)
        return new

    def added(
        self,
        totals: Sequence[Value],
        more: Sequence[Value],
        at: Value,
        cols: Mapping[str, Value],
        real: Value,
    ) -> list[Value]:
        """The gradients of what is wanted with those of one layer: those of rows at its row. Where chunks
        take turns in a place, the first of one takes the place of the last one's sum. real: whether it is one
        of the model, with work: else its cotangents are zero, but its gradients may be no numbers.
        """
        stacks = len(self.layer.rest) - len(self.layer.operands.rows)
        fresh = None if self.has_all else cols["fresh"] == 1
        return [
            resident.accumulate(total, x, self.place(at), real=real, fresh=fresh)
            if n >= stacks
            else resident.accumulate(total, x, real=real)
            for n, total, x in zip(self.layer.wanted, totals, more, strict=True)
        ]


def _choose(which: Value, a: Value, b: Value) -> Value:
    return jax.lax.select(jnp.broadcast_to(which, a.shape), a, typed(b, a))


def _at(x: Value, n: Value) -> Value:
    """x[n]"""
    return jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False)


def _slot(x: Value, slot: Value, c: Value) -> Value:
    """x[slot, c]"""
    start = (slot, c, *[np.int32(0)] * (x.ndim - 2))
    return resident.plain(jax.lax.squeeze(jax.lax.dynamic_slice(x, start, (1, 1, *x.shape[2:])), (0, 1)))


def _put(x: Value, row: Value, *at: Value) -> Value:
    """x with x[at] = row."""
    start = (*at, *[np.int32(0)] * (x.ndim - len(at)))
    update = jax.lax.reshape(typed(row, x), (*[1] * len(at), *x.shape[len(at) :]))
    return jax.lax.dynamic_update_slice(x, update, start)


def _loop(one: Any, held: Any, size: int) -> Any:
    return _loop_out(one, held, size)[0]


def _loop_out(one: Any, held: Any, size: int) -> Any:
    """One turn a layer; no loop for a single one."""
    if size == 1:
        return one(held, np.int32(0))
    return jax.lax.scan(one, held, np.arange(size, dtype=np.int32))
