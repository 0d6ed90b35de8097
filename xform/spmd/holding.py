"""The values of a program as one shard holds them: in which layouts, in which body, and how one comes about.

What was gathered is kept for the next use in the same body, and for loops inside it where it fits; for the
backward pass, and for what is computed again, it is gathered anew, unless the plan keeps weights together.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import numpy as np

from xform.spmd.layout import Grid, Laid, whole
from xform.spmd.moves import Router
from xform.spmd.values import GRADIENT, PLAIN, WEIGHT, Options, Scope, Val
from xform.spmd.wishes import Wish
from xform.trace import Value, in_trace


class Holding:
    """grid: the axes of the manual region. options: how collectives are written out. scope: the body at hand.
    phase: 1 in the backward pass. largest: bytes of the largest weight.
    """

    def __init__(self, grid: Grid, options: Options = PLAIN) -> None:
        self.grid, self.options = grid, options
        self.router = Router(grid)
        self.largest = 0
        self.scope = Scope("step", None)
        self.phase = 0

    def held(self, x: Value, aval: Any, laid: Laid, origin: str = "", named: str = "") -> Val:
        """A value of the original program, of type `aval`, that is held as `x` in layout `laid`."""
        laid = self.grid.normal(laid)
        val = Val(aval, laid, self.scope)
        val.origin, val.named = origin, named
        if origin and self.scope.parent is None:
            self.largest = max(self.largest, math.prod(val.shape) * val.itemsize)
        self.scope.forms[val] = {laid: (x, None)}
        return val

    def constant(self, x: Value, aval: Any) -> Val:
        if isinstance(x, np.ndarray):
            x = np.asarray(x)  # a literal of a region over other axes has their mesh in its type
        return self.held(x, aval, whole(getattr(aval, "shape", ())))

    def forms(self, val: Val) -> dict[Laid, tuple[Value, Scope]]:
        """The forms that a value has here. What was gathered for the forward pass is not kept for the
        backward pass, nor across a body that is computed again.
        """
        found: dict[Laid, tuple[Value, Scope]] = {}
        scope, again = self.scope, False
        while True:
            for laid, (x, phase) in scope.forms.get(val, {}).items():
                kept = phase in (None, self.phase) or scope.last is val
                if laid == val.laid or (kept and not again) or self.keeps(val):
                    found.setdefault(laid, (x, scope))
            if scope is val.scope:
                return found
            if scope.kind == "loop":
                again = False  # what was gathered before a loop is for all of its turns
            elif scope.kind == "remat":
                again = again or not self.early(val)
            assert scope.parent is not None
            scope = scope.parent

    def get(self, val: Val, want: Laid) -> Value:
        """The value as it lies in layout `want`."""
        want = self.grid.normal(want)
        found = self.forms(val)
        if want in found:
            return found[want][0]
        if val.make is not None:
            x = val.make(want)
            self.scope.forms.setdefault(val, {})[want] = (x, self.phase)
            return x
        have = min(found, key=lambda laid: self.router.route(laid, want).sent)
        x, where = found[have]
        route = self.router.route(have, want)
        if val.turned is not None and route.sent:
            source, order = val.turned
            dims = [want.dims[order.index(k)] for k in range(len(order))]
            x = jax.lax.transpose(self.get(source, Laid(tuple(dims))), order)
            self.scope.forms.setdefault(val, {})[want] = (x, self.phase)
            return x
        target = self.outside(where, self.early(val)) if route.sent else self.scope
        if target is not self.scope and val.origin and not self._fits(target, val, want):
            target = self.scope
        with in_trace(target.trace):
            if self.phase and target.later is not None and self._was_gathered(target, val, want):
                x, _ = jax.lax.optimization_barrier((x, target.later))
            x = self._moved(x, val, have, want)
        target.forms.setdefault(val, {})[want] = (x, self.phase if route.sent else None)
        if val.origin and route.sent:
            target.last = val
        return x

    def early(self, val: Val) -> bool:
        """Whether a weight is a row of a loop whose rows come together a turn early."""
        return "prefetch" in self.options.overlap and bool(val.origin) and val.scope.kind == "loop"

    def keeps(self, val: Val) -> bool:
        """Whether a weight, once it is together, stays so for the whole step."""
        return self.options.gather == "step" and bool(val.origin)

    def outside(self, where: Scope, early: bool = False) -> Scope:
        """The body before the outermost loop around this one that `where` is not in: what is done there with
        what is known in `where` is done once. early: and before a body that is computed again.
        """
        target, scope = self.scope, self.scope
        while scope is not where and scope.parent is not None:
            if scope.kind == "loop" or (early and scope.kind == "remat"):
                target = scope.parent
            scope = scope.parent
        return target

    def _fits(self, target: Scope, val: Val, want: Laid) -> bool:
        """Whether a weight is kept together while loops run: as many as are not more than two of the
        largest.
        """
        nbytes = math.prod(self.grid.local(want)) * val.itemsize
        if target.kept + nbytes > 2 * self.largest and not self.keeps(val):
            return False
        target.kept += nbytes
        return True

    def _was_gathered(self, target: Scope, val: Val, want: Laid) -> bool:
        """Whether the forward pass, in the same body, has gathered the same: the compiler would make one of
        both, and keep it from one to the other.
        """
        return (
            bool(val.origin)
            and not self.keeps(val)
            and target.forms.get(val, {}).get(want, (None, 1))[1] == 0
        )

    def _moved(self, x: Value, val: Val, have: Laid, want: Laid) -> Value:
        if val.origin:
            with jax.named_scope(WEIGHT + val.origin):
                return self.router.emit(x, have, want, self._in_rings())
        if not val.gradient or have.partial == want.partial:
            with jax.named_scope(WEIGHT + val.named) if val.named else contextlib.nullcontext():
                return self.router.emit(x, have, want)
        dtype = val.aval.dtype
        with jax.named_scope(GRADIENT + str(dtype)):
            x = x.astype(self.options.sum_dtype or dtype)
            return self.router.emit(x, have, want, self._in_rings()).astype(dtype)

    def _in_rings(self) -> bool:
        """Whether collectives here are built of permutes: in a loop, beside which they can run."""
        scope: Scope | None = self.scope
        while scope is not None and scope.kind != "loop":
            scope = scope.parent
        return "permute" in self.options.overlap and scope is not None

    def whole(self, val: Val) -> Value:
        """The value, all of it on every device."""
        return self.get(val, whole(val.shape))

    def settled(self, val: Val) -> Laid:
        """How a value that leaves its body lies: as it is held, summed, but for terms that wait."""
        if val.terms:
            return val.laid
        if val.make is None:
            return val.laid.summed()
        made = [laid for laid in self.forms(val) if not laid.partial]
        return max(made, key=lambda laid: self.grid.ways(laid.axes), default=val.laid)

    def moved_to(self, val: Val, want: Laid) -> Val:
        """The value held in another layout, instead of its own."""
        if want == val.laid and val.make is None:
            return val
        moved = self.held(self.get(val, want), val.aval, want, val.origin, val.named)
        moved.gradient = val.gradient and bool(want.partial)
        moved.terms = val.terms and bool(want.partial)
        return moved

    def granted(self, val: Val, wish: Wish) -> Laid:
        """The layout that fulfils a wish, as the value has it where the wish says nothing. The terms of a
        gradient that a loop adds up are scattered, but wait to be summed where they would be whole.
        """
        waits = val.gradient and self.adding(self.scope)
        partial = tuple(a for a in val.laid.partial if waits and a not in wish.laid.axes)
        return self.grid.normal(Laid(wish.granted(val.laid).dims, partial))

    def adding(self, scope: Scope | None) -> bool:
        """Whether a body, or one around it, is of a loop that adds to what it carries."""
        return scope is not None and (scope.adds or self.adding(scope.parent))

    def left(self, val: Val, scope: Scope | None) -> Laid:
        """How a value leaves its body for the body `scope`: the terms of a gradient as they are, if one there
        adds them up; all else settled.
        """
        if val.gradient and val.laid.partial and self.adding(scope):
            return val.laid
        return self.settled(val)
