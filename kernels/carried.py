"""The gated linear recurrence over time that lies over devices: each has some of the steps.

    A, B = what a part makes of the state S that enters it: A S + B        on each device, of its own steps
    S'   = A'' (A' S + B') + B'' ...                                       of all before it, from theirs
    o, S = recurrence of its steps from S'

A step is affine in the state, and so is a part. Without the delta rule A is a decay by channel of the keys,
and A and B are a sum and one product; with it A is what becomes of a state that is the identity when no value
is written, and both are one run more of the recurrence. What is sent is A and B of each part, however long it
is. Backward the same goes from the last part to the first, for gradients of states: A transposed, and what
enters by the outputs. Parts are all alike, so devices have as much to do, whichever they are; where attention
has texts in zigzag (`kernels.balance`) a device has two of them.

Source: Martin and Cundy 2018, Parallelizing linear recurrent neural nets over sequence length; over devices,
Sun et al. 2024, Linear attention sequence parallelism (LASP).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.kernels.balance import order
from xform.kernels.moving import Axes, gathered, number, ways
from xform.kernels.recurrence import RecurrenceBackward, RecurrenceForward
from xform.ops import apply


@dataclasses.dataclass(frozen=True)
class CarriedForward:
    """q, k, v, [g], [beta], initial -> o, final, as `RecurrenceForward`; initial and final are the whole
    text's on each device.

    lies, axes, balance: as `AcrossForward` has them.
    """

    of: RecurrenceForward
    lies: Axes = ()
    axes: Axes = ()
    balance: str = ""

    told = "t"
    cut = "bnt"

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def operands(self) -> tuple[str, ...]:
        return self.of.operands

    @property
    def results(self) -> tuple[str, ...]:
        return self.of.results

    @property
    def interpret(self) -> bool:
        return self.of.interpret

    def over(self, axes: Mapping[str, Axes]) -> CarriedForward:
        return dataclasses.replace(self, axes=axes["t"])

    def plain(self, *args: Any) -> Sequence[Any]:
        return self._run(False, args)

    def kernel(self, *args: Any) -> Sequence[Any]:
        return self._run(True, args)

    def _run(self, by_kernel: bool, args: Sequence[Any]) -> Sequence[Any]:
        run = self.of.kernel if by_kernel else self.of.plain
        if not self.axes:
            return run(*args)
        *steps, initial = args
        parts = Parts(self.axes, self.balance)
        steps = [parts.apart(x) for x in steps]
        entering, final = parts.carried(*_map(self.of, by_kernel, steps), initial)
        out, _ = run(*steps, entering)
        return parts.together(out), final


@dataclasses.dataclass(frozen=True)
class CarriedBackward:
    """q, k, v, [g], [beta], initial, do, dfinal -> dq, dk, dv, [dg], [dbeta], dinitial."""

    forward: CarriedForward

    told = "t"
    cut = "bnt"

    @property
    def lies(self) -> Axes:
        return self.forward.lies

    @property
    def name(self) -> str:
        return "recurrence_backward"

    @property
    def operands(self) -> tuple[str, ...]:
        return (*self.forward.operands, *self.forward.results)

    @property
    def results(self) -> tuple[str, ...]:
        return self.forward.operands

    @property
    def interpret(self) -> bool:
        return self.forward.interpret

    def over(self, axes: Mapping[str, Axes]) -> CarriedBackward:
        return CarriedBackward(self.forward.over(axes))

    def plain(self, *args: Any) -> Sequence[Any]:
        return self._run(False, args)

    def kernel(self, *args: Any) -> Sequence[Any]:
        return self._run(True, args)

    def _run(self, by_kernel: bool, args: Sequence[Any]) -> Sequence[Any]:
        of, axes = self.forward.of, self.forward.axes
        *steps, initial, dout, dfinal = args
        if not axes:
            return self._of_part(by_kernel, steps, initial, dout, dfinal)
        parts = Parts(axes, self.forward.balance)
        steps, dout = [parts.apart(x) for x in steps], parts.apart(dout)
        whole, made = _map(of, by_kernel, steps)
        entering, _ = parts.carried(whole, made, initial)
        leaving, dinitial = parts.carried(
            _turned(whole), _read(of, by_kernel, steps, dout), dfinal, back=True
        )
        *gradients, _ = self._of_part(by_kernel, steps, entering, dout, leaving)
        return [*map(parts.together, gradients), dinitial]

    def _of_part(
        self, by_kernel: bool, steps: Sequence[Any], initial: Any, dout: Any, dfinal: Any
    ) -> Sequence[Any]:
        """The gradients of steps that this state enters."""
        of = self.forward.of
        keep = dataclasses.replace(of, keep=True)
        _, _, states = (keep.kernel if by_kernel else keep.plain)(*steps, initial)
        back = RecurrenceBackward(of.decay, of.delta, of.scale, of.chunk, of.heads, of.interpret)
        return (back.kernel if by_kernel else back.plain)(*steps, states, dout, dfinal)


# ---------------------------------------------------------------- what a part makes of a state


def _map(of: RecurrenceForward, by_kernel: bool, steps: Sequence[Any]) -> tuple[Any, Any]:
    """(A, B) of steps: A [b, n, d, d], or where it is a decay [b, n, d or 1, 1]; B [b, n, d, e]."""
    q, k, v, *gates = steps
    if not of.delta:
        wide = k.astype(jnp.float32), v.astype(jnp.float32)
        after, whole = _decays(of, gates, k)
        return whole, jnp.einsum("bntd,bnte->bnde", wide[0] * after, wide[1])
    none = jnp.zeros((*k.shape[:2], k.shape[3], v.shape[3]), jnp.float32)
    _, made = _run(of, by_kernel, q, k, v, gates, none)
    return _identity(of, by_kernel, q, k, gates)[1], made


def _read(of: RecurrenceForward, by_kernel: bool, steps: Sequence[Any], dout: Any) -> Any:
    """The gradient [b, n, d, e] of the state that enters the steps, by what they give."""
    q, k, _, *gates = steps
    wide = dout.astype(jnp.float32)
    if not of.delta:
        asked = of.scale * q.astype(jnp.float32) * _decays(of, gates, k, before=True)[0]
    else:
        asked = jnp.swapaxes(_identity(of, by_kernel, q, k, gates)[0], 2, 3)
        return jnp.einsum("bndt,bnte->bnde", asked.astype(jnp.float32), wide)
    return jnp.einsum("bntd,bnte->bnde", asked, wide)


def _identity(
    of: RecurrenceForward, by_kernel: bool, q: Any, k: Any, gates: Sequence[Any]
) -> tuple[Any, Any]:
    """What is read of a state that is the identity [b, n, t, d], and what becomes of it [b, n, d, d], where
    no value is written.
    """
    d = k.shape[3]
    eye = jnp.broadcast_to(jnp.eye(d, dtype=jnp.float32), (*k.shape[:2], d, d))
    return _run(of, by_kernel, q, k, jnp.zeros_like(k), gates, eye)


def _run(
    of: RecurrenceForward, by_kernel: bool, q: Any, k: Any, v: Any, gates: Sequence[Any], initial: Any
) -> tuple[Any, Any]:
    out, final = (of.kernel if by_kernel else of.plain)(q, k, v, *gates, initial)
    return out, final


def _decays(of: RecurrenceForward, gates: Sequence[Any], k: Any, before: bool = False) -> tuple[Any, Any]:
    """The decay after each step, or up to it, [b, n, t, d or 1]; and that of all, [b, n, d or 1, 1]."""
    if of.decay == "none":
        return jnp.ones((*k.shape[:3], 1), jnp.float32), jnp.ones((*k.shape[:2], 1, 1), jnp.float32)
    g = gates[0].astype(jnp.float32)
    g = g if of.decay == "channel" else g[..., None]
    to = jnp.cumsum(g, 2)
    later = jnp.flip(jnp.cumsum(jnp.flip(g, 2), 2), 2)  # sums of its own: a difference of large ones is none
    after = jnp.concatenate([later[:, :, 1:], jnp.zeros_like(g[:, :, :1])], 2)
    return jnp.exp(to if before else after), jnp.exp(jnp.swapaxes(to[:, :, -1:], 2, 3))


def _turned(whole: Any) -> Any:
    """A transposed; a decay is its own transpose."""
    return jnp.swapaxes(whole, 2, 3) if whole.shape[2] == whole.shape[3] > 1 else whole


def _applied(whole: Any, state: Any) -> Any:
    """A S"""
    if whole.shape[3] == 1:
        return whole * state
    return jnp.einsum("bnde,bnef->bndf", whole, state, precision=lax.Precision.HIGHEST)


# ---------------------------------------------------------------- parts


@dataclasses.dataclass(frozen=True)
class Parts:
    """A device's parts of the steps: one, or the two halves of zigzag, in rows of the batch."""

    axes: Axes
    balance: str

    @property
    def count(self) -> int:
        return 2 if self.balance == "zigzag" else 1

    def apart(self, x: Any) -> Any:
        """[b, n, t, ...] -> [parts * b, n, t / parts, ...]"""
        if self.count == 1:
            return x
        x = x.reshape(*x.shape[:2], self.count, -1, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0).reshape(-1, x.shape[1], *x.shape[3:])

    def together(self, x: Any) -> Any:
        if self.count == 1:
            return x
        x = jnp.moveaxis(x.reshape(self.count, -1, *x.shape[1:]), 0, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def carried(self, whole: Any, made: Any, initial: Any, back: bool = False) -> tuple[Any, Any]:
        """The state that enters each of this device's parts, and that which leaves the last of all; back:
        from the last to the first. whole, made: A and B of the parts.
        """
        n, count = ways(self.axes), self.count
        whole, made = (self._all(x) for x in (whole, made))  # [devices * parts, b, n, ...], as they lie
        places = np.argsort(order(self.balance, n * count, n)) if count > 1 else np.arange(n)
        state = initial.astype(jnp.float32)
        entering = [state] * (n * count)
        for place in places[::-1] if back else places:
            entering[place] = state
            state = _applied(whole[place], state) + made[place]
        own = lax.dynamic_slice_in_dim(jnp.stack(entering), number(self.axes) * count, count, 0)
        return own.reshape(-1, *own.shape[2:]), state

    def _all(self, x: Any) -> Any:
        x = x.reshape(self.count, -1, *x.shape[1:])
        return gathered(x, self.axes, 0)


# ---------------------------------------------------------------- differentiated


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def carried(op: CarriedForward, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """o and the final state of the recurrence, differentiable in every array."""
    out, final = apply(op, *args)
    return out, final


def _forwards(op: CarriedForward, args: tuple[Any, ...]) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    return carried(op, args), args


def _backwards(
    op: CarriedForward, args: tuple[Any, ...], gradients: tuple[Any, Any]
) -> tuple[tuple[Any, ...]]:
    return (tuple(apply(CarriedBackward(op), *args, *gradients)),)


carried.defvjp(_forwards, _backwards)
