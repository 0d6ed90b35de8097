"""What all stages do at a tick, in the manual region over their axis: one work each, and what it gives is
sent on to the stage beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from xform.pipeline.arrays import put_in
from xform.pipeline.chunks import Own
from xform.pipeline.setting import Setting, Sort, read
from xform.pipeline.ticks import KINDS
from xform.trace import Value

TABLES = ("rows", "layers", "counts")
"""What a stage has of its own that no tick changes."""


class Stages:
    """fixed: what is made once."""

    def __init__(self, setting: Setting, fixed: Sequence[Value]) -> None:
        self.setting, self.fixed = setting, fixed

    def tick(
        self, tick: Sort, own: Own, weights: Any, cols: Mapping[str, Any], outside: Any, ended: Any
    ) -> Own:
        """The stages' own arrays after a tick. weights: a stage's, of the chunks that are there. outside:
        what comes into the stack, ended: the gradient of what came out of it.
        """
        placings = self.setting.placings
        tables = {"layers": [jnp.asarray(p.layers) for p in placings]}
        tables["counts"] = [jnp.asarray(p.counts) for p in placings]
        given = {
            "outside": outside,
            "fixed": self.of_layers(),
            "data": self.setting.data if self.needs_data else [],
            "ended": ended,
            "moves": (cols["forward"], cols["back"]),
        }
        mine = {name: cols[name] for name in self.setting.runs.columns if name not in ("ended", "ending")}
        made: Own = self.region(
            lambda own, cols, given: (self.work(tick, own, cols, given), {}),
            {**own, "rows": weights, **tables},
            mine,
            given,
        )[0]
        return made

    @property
    def needs_data(self) -> bool:
        return bool(self.setting.pieces.told or self.setting.pieces.told_rows)

    def of_layers(self) -> list[Any]:
        """What is made once, where stages read it; a number for the rest."""
        tells, fixed = read(self.setting.pieces.tell), self.setting.pieces.fixed
        reads = {k for layer in self.setting.layers for k in layer.operands.fixed}
        reads |= {k for k, v in enumerate(fixed) if v in tells}
        return [x if k in reads else np.int32(0) for k, x in enumerate(self.fixed)]

    def region(self, f: Any, own: Any, cols: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Any, Any]:
        """`f` on every stage: of its own arrays, its numbers of the table, and what all have. It gives the
        stage's own, and what all have again.
        """
        axis = self.setting.shape.axis
        ours, all_ = PartitionSpec(axis), PartitionSpec()

        def local(own: Any, cols: Any, given: Any) -> Any:
            mine, every = f(jax.tree.map(_without, own), jax.tree.map(_without, cols), given)
            return jax.tree.map(_with, mine), every

        made: tuple[Any, Any] = jax.shard_map(
            local,
            mesh=self.setting.shape.mesh,
            in_specs=(ours, ours, all_),
            out_specs=(ours, all_),
            axis_names={axis},
            check_vma=False,
        )(own, cols, given)
        return made

    def of_stage(self, own: Any, stage: int) -> Any:
        """One stage's arrays, on every stage."""
        axis = self.setting.shape.axis

        def one(x: Value) -> Value:
            wide = x.astype(np.int8) if x.dtype == np.bool_ else x
            here = jax.lax.axis_index(axis) == stage
            return jax.lax.psum(jnp.where(here, wide, jnp.zeros_like(wide)), axis).astype(x.dtype)

        return self.region(lambda own, cols, given: ([], jax.tree.map(one, own)), own, {}, {})[1]

    def summed(self, own: Value) -> Value:
        """The sum of what stages have one each of."""
        axis = self.setting.shape.axis
        return self.region(lambda own, cols, given: ([], jax.lax.psum(own, axis)), own, {}, {})[1]

    def work(self, tick: Sort, own: Own, cols: Mapping[str, Value], given: Mapping[str, Any]) -> Own:
        """A stage's tick: what has come is put where it waits, the work is done, and its result sent on."""
        own = dict(own)
        # Numbers that are the same at every tick of a loop are not to be known: an update in place at a known
        # number is one that the compiler makes in a copy.
        cols = jax.lax.optimization_barrier(dict(cols))
        fixed = {name: own.pop(name) for name in TABLES}
        for name, put in (("", "put"), ("_back", "put_back")):
            if "waiting" + name in own and (tick.forward if not name else tick.back):
                own["waiting" + name] = jax.tree.map(
                    lambda buffer, x, put=put: put_in(buffer, x, cols[put]),
                    own["waiting" + name],
                    own["register" + name],
                )
        own["sent"] = own["register"]
        if self.setting.pulls:
            own["sent_back"] = own["register_back"]
        programs = [
            self.setting.chunks.forward,
            self.setting.chunks.backward,
            self.setting.chunks.input,
            self.setting.chunks.weight,
        ]
        runs = [programs[KINDS.index(kind)] for kind in tick.kinds]
        if len(runs) == 1 and not tick.mixed:
            own = runs[0]({**own, **fixed}, cols, given)
        else:
            numbers = [1 + KINDS.index(kind) for kind in tick.kinds]
            branch: Any = np.int32(0)
            for n, number in enumerate(numbers):
                branch = jnp.where(cols["kind"] == number, n + 1, branch)
            keys = tuple(own)

            def done(run: Any) -> Any:
                return lambda own: _only(run({**own, **fixed}, cols, given), keys)

            own = jax.lax.switch(branch, [lambda own: own, *map(done, runs)], own)
        own = {k: v for k, v in own.items() if k not in fixed}
        return self.sent(tick, own, given)

    def sent(self, tick: Sort, own: Own, given: Mapping[str, Any]) -> Own:
        """What a stage has after what it made was sent on."""
        own = dict(own)
        z, dz = own.pop("sent"), own.pop("sent_back", None)
        if tick.ends != "never":
            own["z"] = z
        if tick.returns != "never":
            own["dz"] = dz
        for name, chain, value, way, moves in (
            ("register", "ahead", z, 1, 0),
            ("register_back", "behind", dz, -1, 1),
        ):
            if not (tick.forward if way > 0 else tick.back):
                continue
            if tick.sends if way > 0 else tick.sends_back:
                value = self.passed(value) if way > 0 else [self.passed_back(each) for each in value]
            new = [value, *own[chain]]
            arrived = new[-1] if len(new) > 1 else new[0]
            rest = new[:-1]
            if tick.mixed:  # at a tick of another sort nothing of this direction moves
                arrived = _kept(given["moves"][moves], arrived, own[name])
                rest = [_kept(given["moves"][moves], a, b) for a, b in zip(rest, own[chain], strict=True)]
            own[name], own[chain] = arrived, rest
        return own

    def passed(self, z: Sequence[Value]) -> list[Value]:
        """What travels, on the next stage, but for what never leaves its block."""
        return [self.permuted(x, 1) if goes else x for x, goes in zip(z, self.setting.crossing, strict=True)]

    def passed_back(self, dz: Sequence[Value]) -> list[Value]:
        """The gradients of that, on the stage before."""
        goes = [self.setting.crossing[n] for n in self.setting.chunks.floats]
        return [self.permuted(x, -1) if crosses else x for x, crosses in zip(dz, goes, strict=True)]

    def permuted(self, x: Value, way: int) -> Value:
        n = self.setting.shape.stages
        return jax.lax.ppermute(x, self.setting.shape.axis, [(i, (i + way) % n) for i in range(n)])


def _without(x: Value) -> Value:
    return jax.lax.squeeze(x, (0,))


def _with(x: Value) -> Value:
    return jax.lax.reshape(x, (1, *x.shape))


def _kept(which: Value, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), new, old)


def _only(own: Own, keys: Sequence[str]) -> Own:
    return {key: own[key] for key in keys}
