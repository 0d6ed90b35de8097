"""Random numbers of a microbatch: those that the whole batch draws for its rows.

    random_bits[shape=(12, 5)] key   ->   threefry2x32 of the key and of the numbers of this microbatch's rows

Where the bits of an element follow from its number (`threefry`), values and gradients are those of the whole
batch. Else a microbatch draws numbers of its own, and the line is kept (`Case.folded`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform import threefry
from xform.batch.elementwise import elementwise
from xform.batch.states import SAME, Case, Micro, Mixes, Outcome, State, rowwise
from xform.threefry import Counts
from xform.trace import Value, bind

TOGETHER = frozenset(
    [
        ("random_bits", "key<rbg>"),
        *((f"random_{name}", "key<urbg>") for name in ("bits", "fold_in", "gamma", "split")),
    ]
)
"""Operations, and types of keys of which several draw together: each draws other numbers among fewer."""


def random(case: Case) -> Outcome:
    """Bits, or keys that are split off: [*keys, *shape], of keys [*keys]."""
    key = case.states[0]
    if key.is_rows:
        return _of_rows(case, case.everywhere(rowwise(case)))
    if key.is_part:
        raise Mixes("a key that is a sum over the batch")
    out = case.new_rows()
    if not out.is_rows:
        return case.everywhere(SAME)
    lead = len(case.shape(0))
    if out.dim < lead:
        raise Mixes("a key for each row, of which it is not known whose it is")
    drawn = dataclasses.replace(out, dim=out.dim - lead)
    if not threefry.draws_by_number(case.eqn.invars[0].aval):
        return _folded(case, out, shape=case.split.small(case.params["shape"], drawn))
    aval: Any = case.eqn.outvars[0].aval

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        keys, counts = _in_group(args[0], _numbers(case.params["shape"], drawn, micro), micro)
        if case.name == "random_split":
            return [threefry.split(keys, counts)]
        return [threefry.bits(keys, counts, aval.dtype)]

    return Outcome((out,), emit)


def _numbers(shape: Sequence[int], state: State, micro: Micro) -> Counts:
    """The numbers, in an array of the whole batch, of the elements of a microbatch."""
    small = micro.split.small(shape, state)
    places = [lax.iota(np.uint32, size) for size in small]
    places[state.dim] = micro.entries(places[state.dim], state.inner)
    return threefry.numbers(places, shape)


def _in_group(keys: Value, counts: Counts, micro: Micro) -> tuple[Value, Counts]:
    """Keys and numbers, all of them each group's own, not the low words alone: threefry's operands have one
    shape, and `vmap` does not see to that.
    """
    if micro.split.groups == 1:
        return keys, counts
    nothing = (micro.group ^ micro.group).astype(np.uint32)
    data, (high, low) = jax.random.key_data(keys) ^ nothing, counts
    return jax.random.wrap_key_data(data, impl=threefry.IMPLEMENTATION), (high ^ nothing, low)


def fold_in(case: Case) -> Outcome:
    """Keys with numbers folded in."""
    return _of_rows(case, elementwise(case))


def gamma(case: Case) -> Outcome:
    """Gamma numbers, each of a key that is split off by how many there are."""
    outcome, (key, a) = elementwise(case), case.states
    if key.is_rows or not a.is_rows:
        return _of_rows(case, outcome)
    return _folded(case, outcome.states[0])


def _of_rows(case: Case, outcome: Outcome) -> Outcome:
    """What is drawn with keys of the rows' own, told where the rows beside have a part in it."""
    aval: Any = case.eqn.invars[0].aval
    if outcome.states[0].is_rows and (case.name, str(aval.dtype)) in TOGETHER:
        case.folded.append(case.line)
    return outcome


def _folded(case: Case, out: State, **params: Any) -> Outcome:
    """The equation with another key in each microbatch."""
    case.folded.append(case.line)

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        fold: Callable[..., Any] = jax.random.fold_in
        for _ in case.shape(0):
            fold = jax.vmap(fold, (0, None))
        return bind(case.eqn, [fold(args[0], micro.number), *args[1:]], {**case.params, **params})

    return Outcome((out,), emit)
