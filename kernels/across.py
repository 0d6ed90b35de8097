"""Attention over a length that lies over devices: each has a part of the queries, and of keys and values.

    out, lse = operation[attention] q k v   ->   k', v' = all_gather k v; attention of this device's queries
                                                 hops of a ring: attention with each other device's keys
                                                 all_to_all: all of the length of a part of the heads

One operation forward and one backward, as `kernels.attention` has them, whose letter of the length may be cut
over mesh axes. It is told of these and sends what it needs itself, so that it stays one equation until its
layout is known, and has a kernel inside where it would have one on one device. What lies on one device whole
is plain attention. What is sent in the backward pass, keys and values with their gradients or queries with
theirs, is what takes fewer bytes.

strategy: "all_gather", "ring" (`kernels.ring`), "ulysses", heads for length (Jacobs et al. 2023, DeepSpeed
Ulysses), or "usp", heads for length along the mesh axis `inner` and a ring along the others (Fang and Zhao
2024, USP).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform.errors import PlanError
from xform.kernels import ring
from xform.kernels.attention import AttentionForward
from xform.kernels.balance import back, places, there
from xform.kernels.moving import Axes, by_heads, by_length, gathered, number, scattered, ways
from xform.kernels.ring import Segments
from xform.kernels.sent import Sent, alike, hops, repeated
from xform.kernels.splash import Shift
from xform.ops import Band


@dataclasses.dataclass(frozen=True)
class AcrossForward:
    """q, k, v, [sinks], [q_segments, kv_segments] -> out, lse, of as many queries as keys, in parts that
    belong together.

    of: the attention. cross: keys are of another length, and lie whole on each device, the queries alone in
    parts. lies: the mesh axes of the plan over which the length is to lie; axes: those over which it does,
    outermost first. balance: the order in which the length comes (`kernels.balance`), as parts of `lies` have
    it; positions are those of the model's own.
    """

    of: AttentionForward
    strategy: str
    inner: str = ""
    cross: bool = False
    lies: Axes = ()
    axes: Axes = ()
    balance: str = ""

    told = "t"
    cut = "bngt"

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def backward(self) -> AcrossBackward:
        return AcrossBackward(self)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(map(self.lettered, self.of.operands))

    def lettered(self, dims: str) -> str:
        """Keys have the letter of the queries' length where they lie as these do."""
        return dims if self.cross else dims.replace("s", "t")

    @property
    def results(self) -> tuple[str, ...]:
        return self.of.results

    @property
    def interpret(self) -> bool:
        return self.of.interpret

    def over(self, axes: Mapping[str, Axes]) -> AcrossForward:
        return dataclasses.replace(self, axes=axes["t"])

    def plain(self, *args: Any) -> tuple[Any, Any]:
        return self._run(False, *self.of.named(args))

    def kernel(self, *args: Any) -> tuple[Any, Any]:
        return self._run(True, *self.of.named(args))

    @property
    def parts(self) -> tuple[Axes, Axes]:
        """The axes along which other devices have other parts of the length, whatever the heads, and those
        along which heads are exchanged for length, the innermost.
        """
        if self.cross or not self.axes:
            return self.axes, ()
        if self.strategy != "usp":
            return ((), self.axes) if self.strategy == "ulysses" else (self.axes, ())
        inner = tuple(a for a in self.axes if a == self.inner or a.startswith(f"{self.inner}."))
        rest = self.axes[: len(self.axes) - len(inner)]
        if (*rest, *inner) != self.axes:
            raise PlanError(f"context: {self.inner!r} is not the innermost of {', '.join(self.axes)}")
        return rest, inner

    def _run(
        self, by_kernel: bool, q: Any, k: Any, v: Any, sinks: Any, segments: Segments
    ) -> tuple[Any, Any]:
        axes, exchanged = self.parts
        if not exchanged:
            return self._along(axes, by_kernel, q, k, v, sinks, segments)
        heads = Heads.of(q, exchanged)
        args = heads.queries(q), *heads.keys(k, v), heads.sinks(sinks), heads.segments(segments)
        out, lse = self._along(axes, by_kernel, *args)
        return heads.back(out), heads.back(lse)

    def _along(
        self, axes: Axes, by_kernel: bool, q: Any, k: Any, v: Any, sinks: Any, segments: Segments
    ) -> tuple[Any, Any]:
        if not axes:
            return self.of.run(by_kernel, q, k, v, sinks, segments)
        if self.cross:
            return self.of.run(by_kernel, q, k, v, sinks, segments, self.shift(axes, q.shape[3]))
        if self.strategy != "all_gather":
            return ring.forward(self.of, by_kernel, axes, self.balance, q, k, v, sinks, segments)
        shift = self.shift(axes, q.shape[3])
        if segments is not None:
            segments = segments[0], self.together(segments[1], axes, 1)
        k, v = (self.together(x, axes, 2) for x in (k, v))
        return self.of.run(by_kernel, q, k, v, sinks, segments, shift)

    def together(self, x: Any, axes: Axes, dim: int) -> Any:
        """All of a length, in the model's own order."""
        x = gathered(x, axes, dim)
        return back(x, self.balance, ways(axes), dim) if self.balance else x

    def apart(self, x: Any, axes: Axes, dim: int) -> Any:
        """This device's part of a sum over the devices, of which all are given as `together` has it."""
        x = there(x, self.balance, ways(axes), dim) if self.balance else x
        return scattered(x, axes, dim)

    def shift(self, axes: Axes, t: int) -> Shift | None:
        """Where a device's queries stand among all keys."""
        band = self.of.band
        return None if band.is_full else places(self.balance, band, ways(axes), t, number(axes))


@dataclasses.dataclass(frozen=True)
class AcrossBackward:
    """q, k, v, [q_segments, kv_segments], lse, delta, dout -> dq, dk, dv, as `AttentionBackward`."""

    forward: AcrossForward

    told = "t"

    @property
    def lies(self) -> Axes:
        return self.forward.lies

    @property
    def cut(self) -> str:
        return "bn" if self.forward.cross else "bnt"

    @property
    def sums(self) -> str:
        return "t" if self.forward.cross else ""

    @property
    def name(self) -> str:
        return self.forward.of.backward.name

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(map(self.forward.lettered, self.forward.of.backward.operands))

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(map(self.forward.lettered, self.forward.of.backward.results))

    @property
    def interpret(self) -> bool:
        return self.forward.interpret

    def over(self, axes: Mapping[str, Axes]) -> AcrossBackward:
        return AcrossBackward(self.forward.over(axes))

    def plain(self, *args: Any) -> tuple[Any, Any, Any]:
        return self._run(False, *self.forward.of.backward.named(args))

    def kernel(self, *args: Any) -> tuple[Any, Any, Any]:
        return self._run(True, *self.forward.of.backward.named(args))

    def _run(
        self, by_kernel: bool, q: Any, k: Any, v: Any, segments: Segments, lse: Any, delta: Any, dout: Any
    ) -> tuple[Any, Any, Any]:
        axes, exchanged = self.forward.parts
        if not exchanged:
            return self._along(axes, by_kernel, q, k, v, segments, lse, delta, dout)
        heads = Heads.of(q, exchanged)
        rows = (heads.queries(x) for x in (lse, delta, dout))
        args = heads.queries(q), *heads.keys(k, v), heads.segments(segments), *rows
        dq, dk, dv = self._along(axes, by_kernel, *args)
        return heads.back(dq), heads.keys_back(dk), heads.keys_back(dv)

    def _along(
        self,
        axes: Axes,
        by_kernel: bool,
        q: Any,
        k: Any,
        v: Any,
        segments: Segments,
        lse: Any,
        delta: Any,
        dout: Any,
    ) -> tuple[Any, Any, Any]:
        of = self.forward.of
        if not axes:
            return of.backward.run(by_kernel, q, k, v, segments, lse, delta, dout)
        n, t = ways(axes), q.shape[3]
        if self.forward.cross:
            given = q, k, v, segments, lse, delta, dout
            return of.backward.run(by_kernel, *given, self.forward.shift(axes, t))
        sizes = Sent.of(q, v, segments is not None)
        if self.forward.strategy != "all_gather":
            balance = self.forward.balance
            what = sizes.moving(*(hops(of.band, n, t, each, balance) for each in ("keys", "queries")))
            return ring.backward(of, by_kernel, axes, balance, q, k, v, segments, lse, delta, dout, what)
        if not self.forward.balance and alike(of.band, t) and sizes.moving(n - 1, n - 1) == "queries":
            shift = among_keys(of.band, axes, t)
            if segments is not None:
                segments = gathered(segments[0], axes, 1), segments[1]
            q, lse, delta, dout = (gathered(x, axes, 3) for x in (q, lse, delta, dout))
            dq, dk, dv = of.backward.run(by_kernel, q, k, v, segments, lse, delta, dout, shift)
            return scattered(dq, axes, 3), dk, dv
        shift, whole = self.forward.shift(axes, t), self.forward
        if segments is not None:
            segments = segments[0], whole.together(segments[1], axes, 1)
        k, v = (whole.together(x, axes, 2) for x in (k, v))
        dq, dk, dv = of.backward.run(by_kernel, q, k, v, segments, lse, delta, dout, shift)
        return dq, whole.apart(dk, axes, 2), whole.apart(dv, axes, 2)


def among_keys(band: Band, axes: Axes, t: int) -> Shift | None:
    """Where all queries stand among the t keys of a device."""
    if band.is_full:
        return None
    return Shift(tuple((band.offset - t * i,) for i in range(ways(axes))), number(axes))


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads exchanged for length: n key heads of g queries, key heads repeated so many times that there are
    as many for each device along the axes.
    """

    axes: Axes
    n: int
    g: int
    times: int

    @classmethod
    def of(cls, q: Any, axes: Axes) -> Heads:
        n, g = q.shape[1:3]
        times = repeated(n, g, ways(axes))
        if times is None:
            raise PlanError(
                f"context: {n} key heads of {g} queries each do not divide over the {ways(axes)} devices of"
                f" {', '.join(axes)}: take another strategy"
            )
        return cls(axes, n, g, times)

    def queries(self, x: Any) -> Any:
        """All queries of some heads: [b, n, g, t, ...]."""
        x = x.reshape(x.shape[0], self.n * self.times, self.g // self.times, *x.shape[3:])
        return by_heads(x, self.axes, 3)

    def back(self, x: Any) -> Any:
        x = by_length(x, self.axes, 3)
        return x.reshape(x.shape[0], self.n, self.g, *x.shape[3:])

    def keys(self, *xs: Any) -> list[Any]:
        """[b, n, s, d]"""
        more = xs if self.times == 1 else [jnp.repeat(x, self.times, axis=1) for x in xs]
        return [by_heads(x, self.axes, 2) for x in more]

    def keys_back(self, x: Any) -> Any:
        """The gradients of keys: a head's are the sum of those of its repetitions."""
        x = by_length(x, self.axes, 2)
        if self.times == 1:
            return x
        shape = (x.shape[0], self.n, self.times, *x.shape[2:])
        return jnp.sum(x.reshape(shape).astype(jnp.float32), 2).astype(x.dtype)

    def sinks(self, x: Any) -> Any:
        """[n, g]: those of the device's heads."""
        if x is None:
            return None
        own = self.n * self.times // ways(self.axes)
        x = x.reshape(self.n * self.times, self.g // self.times)
        return lax.dynamic_slice_in_dim(x, number(self.axes) * own, own, 0)

    def segments(self, segments: Segments) -> Segments:
        if segments is None:
            return None
        return gathered(segments[0], self.axes, 1), gathered(segments[1], self.axes, 1)
