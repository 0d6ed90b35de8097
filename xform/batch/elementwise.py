"""How operations that go entry by entry treat rows of the batch, and sums over them.

Rows stay rows where all operands have them, or are the same for all. Sums go through what is linear, the
largest and the smallest through what is monotone.
"""

from __future__ import annotations

from xform.batch.states import (
    MAX,
    MIN,
    SAME,
    SUM,
    ZERO,
    Case,
    Mixes,
    Outcome,
    State,
    is_bool,
    is_float,
    rowwise,
)


def elementwise(case: Case) -> Outcome:
    states = case.states
    if any(s.is_rows for s in states):
        return _rows_elementwise(case)
    if any(s.is_part for s in states):
        return case.everywhere(_parts_elementwise(case))
    zero = states and (
        all(s.zero for s in states)
        if case.name in KEEP_ZERO
        else case.name == "mul" and any(s.zero for s in states)
    )
    return case.everywhere(ZERO if zero else SAME)


def _rows_elementwise(case: Case) -> Outcome:
    state = rowwise(case)
    for k, s in enumerate(case.states):
        size = case.shape(k)[state.dim] if case.shape(k) else 1
        if s != state and not (s.is_same and size == 1):
            raise Mixes("rows meet what is not known to be rows of the same batch")
    return case.everywhere(state)


def _parts_elementwise(case: Case) -> State:
    """Sums go through what is linear, maxima and minima through what is monotone."""
    name, states = case.name, case.states
    kinds = {s.kind for s in states if s.is_part}
    if len(kinds) > 1:
        raise Mixes("a sum and a maximum over the batch meet")
    part = next(s for s in states if s.is_part)
    data = states[1:] if name == "select_n" else states
    if name == "select_n" and not states[0].is_same:
        raise Mixes("a choice by a sum over the batch")
    if part == SUM:
        whole = [s for s in data if not s.is_part]
        if name in ADDITIVE and all(s.zero for s in whole):
            return SUM
        if name == "mul" and len(whole) == 1:
            return SUM
        if name == "div" and is_float(case.eqn.outvars[0]) and not states[1].is_part:
            return SUM
        if name == "convert_element_type" and not _truncates(case):
            return SUM
    elif (name in MONOTONE and not is_bool(case.eqn.outvars[0])) or (
        BIGGEST.get(name) == part and (name in ("max", "min") or is_bool(case.eqn.outvars[0]))
    ):
        return part
    elif name == "neg":
        return MIN if part == MAX else MAX
    raise Mixes("not linear in a sum over the batch")


def _truncates(case: Case) -> bool:
    """Whether a cast of a sum is not the sum of casts: to bool, or from a float to an integer."""
    old, new = case.eqn.invars[0], case.eqn.outvars[0]
    return is_bool(new) or (is_float(old) and not is_float(new))


_NAMES = "convert_element_type copy copy_p name stop_gradient sharding_constraint"
MONOTONE = frozenset(_NAMES.split())
KEEP_ZERO = MONOTONE | frozenset(("add", "add_any", "neg", "sub"))
ADDITIVE = KEEP_ZERO - {"convert_element_type"} | {"imag", "real", "reduce_precision", "select_n"}
BIGGEST = {"max": MAX, "min": MIN, "or": MAX, "and": MIN}
