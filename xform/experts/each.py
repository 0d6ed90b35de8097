"""Values of all turns of a loop at once, which are the same in all, or have the turns in front.

y = dot x w[e], e = 0, 1, ..    ->    y[e] = dot x w[e]; w is all of it, not looked up
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xform.raising.flat import View
from xform.raising.following import kind
from xform.raising.indices import SAME
from xform.raising.placing import Claim
from xform.trace import Atom, JaxprEqn, Literal, Value, Var, bind, shape_of

SUMS = ("add", "add_any")

Emit = Callable[[Mapping[Var, Value], str], Mapping[Var, Value]]
"""As that of a claim, with a name for the equations."""

AtOnce = tuple[Claim, Emit]
"""What stands in the place of turns; and its `emit`, with a name for the equations."""


@dataclasses.dataclass(frozen=True)
class Each:
    """A value that is the same in all turns, or `own`, with the turns in front. Arrays of numpy are known."""

    value: Value
    own: bool = False

    @property
    def known(self) -> bool:
        return isinstance(self.value, (np.ndarray, np.generic, int, float, bool))


def bound(eqn: JaxprEqn, args: Sequence[Each]) -> list[Each]:
    """An equation in all turns."""
    if (entry := _entry(eqn, args)) is not None:
        return [entry]
    own = any(a.own for a in args)
    axes = tuple(0 if a.own else None for a in args)

    def run(*xs: Value) -> Sequence[Value]:
        return bind(eqn, xs, eqn.params)

    def called() -> Sequence[Value]:
        made: Sequence[Value] = (jax.vmap(run, axes) if own else run)(*(jnp.asarray(a.value) for a in args))
        return made

    if all(a.known for a in args) and all(
        kind(v) in "iub" and np.prod(shape_of(v)) == 1 for v in eqn.outvars
    ):
        with jax.ensure_compile_time_eval():
            return [Each(np.asarray(x), own) for x in called()]
    return [Each(x, own) for x in called()]


def _entry(eqn: JaxprEqn, args: Sequence[Each]) -> Each | None:
    """One entry a turn of what is the same in all, by a number that is known."""
    name, p = eqn.primitive.name, eqn.params
    if name not in ("dynamic_slice", "gather") or args[0].own or not all(a.known for a in args[1:]):
        return None
    sizes, window = shape_of(eqn.invars[0]), p["slice_sizes"]
    cut = [d for d, n in enumerate(window) if n != sizes[d]]
    if len(cut) != 1 or window[cut[0]] != 1:
        return None
    d = cut[0]
    if name == "dynamic_slice":
        at = args[1 + d]
    else:
        numbers = p["dimension_numbers"]
        if tuple(numbers.start_index_map) != (d,) or tuple(numbers.collapsed_slice_dims) not in ((d,), ()):
            return None
        at = args[1]
    if not at.own or np.size(at.value) != len(at.value):
        return None
    places = np.clip(np.asarray(at.value).reshape(-1), 0, sizes[d] - 1)
    x = taken(args[0].value, d, places)
    return Each(x.reshape(len(places), *shape_of(eqn.outvars[0])), True)


def taken(x: Value, d: int, places: Sequence[int]) -> Value:
    """Entries along a dimension, which goes to the front."""
    x = jnp.moveaxis(x, d, 0)
    if list(places) == list(range(x.shape[0])):
        return x
    return jnp.stack([x[int(n)] for n in places])


def read_in(env: Mapping[Var, Each], v: Atom) -> Each:
    return Each(v.val) if isinstance(v, Literal) else env[v]


def whole(x: Each, length: int) -> Value:
    return x.value if x.own else jnp.broadcast_to(x.value, (length, *jnp.shape(x.value)))


# ---------------------------------------------------------------- where a turn's mask holds


def peeled(view: View, mask: Atom) -> tuple[Atom, list[JaxprEqn]]:
    """A mask before it was broadcast, and the equations that did."""
    spread: list[JaxprEqn] = []
    while (eqn := view.maker(mask)) is not None:
        if eqn.primitive.name == "broadcast_in_dim":
            spread.insert(0, eqn)
        elif eqn.primitive.name not in SAME or kind(eqn.invars[0]) != kind(mask):
            break
        mask = eqn.invars[0]
    return mask, spread


def last_of(hits: Value, reverse: bool = False) -> Value:
    """Where each turn's mask holds and no later one's does."""
    later = jax.lax.cumsum(hits.astype(np.int32), 0, reverse=not reverse) - hits
    return hits & (later == 0)


def put(x: Value, alone: Value, spread: Sequence[JaxprEqn], rest: Value | None) -> Value:
    """The sum of what turns make, each where it is alone; and the rest where none is. spread: how a mask is
    broadcast.
    """
    here, none = Each(alone, True), Each(~alone.any(0))
    for eqn in spread:
        (here,), (none,) = bound(eqn, [here]), bound(eqn, [none])
    total = jnp.where(here.value, x, 0).astype(x.dtype).sum(0).astype(x.dtype)
    return total if rest is None else total + jnp.where(none.value, rest, 0).astype(x.dtype)


def is_zero(view: View, atom: Atom) -> bool:
    """Whether a value is zeros that the program has."""
    while (eqn := view.maker(atom)) is not None and eqn.primitive.name in ("broadcast_in_dim", *SAME):
        atom = eqn.invars[0]
    return isinstance(atom, Literal) and not np.ndim(atom.val) and atom.val == 0
