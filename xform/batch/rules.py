"""How each primitive treats rows of the batch: a table from its name to the states of its results.

A rule answers only what holds of every row: entry (row i) of a result depends on row i of the operands and on
what is the same for all, or the result is a sum (maximum, minimum) over rows. Everything else raises `Mixes`,
and so does a primitive that has no rule. Elementwise primitives are those of `axes.rules.ELEMENTWISE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from xform.axes.rules import ELEMENTWISE
from xform.batch.elementwise import elementwise
from xform.batch.indexing import gather, scatter
from xform.batch.products import converted, convolution, dot_general, operation, ragged_dot_general, without
from xform.batch.randoms import fold_in, gamma, random
from xform.batch.states import (
    MAX,
    MIN,
    SAME,
    SUM,
    Case,
    Micro,
    Mixes,
    Outcome,
    State,
    is_bool,
    rows,
    rowwise,
)
from xform.higher_order import SCATTERS
from xform.ops.marks import APART, mark_of
from xform.trace import Value, bind

Rule = Callable[[Case], Outcome]


def with_params(case: Case, state: State, **params: Any) -> Outcome:
    """The equation bound with other parameters where its result has rows."""

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        return bind(case.eqn, args, {**case.params, **params})

    return Outcome((state,) * len(case.eqn.outvars), emit)


# ---------------------------------------------------------------- shapes


def _one(case: Case, place: Callable[[Case, int], int]) -> Outcome:
    """One operand (the first) with rows, its dimension going elsewhere; parts go through."""
    state = case.states[0]
    if state.is_rows:
        state = dataclasses.replace(state, dim=place(case, state.dim))
    return case.everywhere(state)


def transpose(case: Case) -> Outcome:
    return _one(case, lambda c, d: c.params["permutation"].index(d))


def squeeze(case: Case) -> Outcome:
    rank = len(case.shape(0))
    return _one(case, lambda c, d: without([a % rank for a in c.params["dimensions"]], d))


def broadcast_in_dim(case: Case) -> Outcome:
    state = case.states[0]
    if state.is_part:
        return case.everywhere(state)
    if state.is_rows:
        out = dataclasses.replace(state, dim=case.params["broadcast_dimensions"][state.dim])
    else:
        out = case.new_rows()
    if not out.is_rows:
        return case.everywhere(state)
    sizes = dict(zip(case.params["broadcast_dimensions"], case.shape(0), strict=True))
    if state.is_same and sizes.get(out.dim, 1) > 1:
        raise Mixes("it has something for each row that is not known to be the row's")
    return with_params(case, out, shape=case.split.small(case.out_shape, out))


def reshape(case: Case) -> Outcome:
    state, sizes = case.states[0], case.params["new_sizes"]
    if not state.is_rows:
        return case.everywhere(state)
    if case.params["dimensions"] is not None:
        raise Mixes("rows are transposed by a reshape")
    size, n = case.batch.size, case.shape(0)[state.dim]
    before = prod(case.shape(0)[: state.dim]) * (n // (size * state.inner))  # entries before the rows
    for d, n in enumerate(sizes):
        first = prod(sizes[:d])
        major = before // first
        if first * major == before and n >= major * size and (major == 1 or case.batch.is_minor):
            if n % (major * size) == 0:
                out = rows(d, n // (major * size))
                return with_params(case, out, new_sizes=case.split.small(sizes, out))
            break
    raise Mixes(f"rows of the batch are taken apart by a reshape to {tuple(sizes)}")


def concatenate(case: Case) -> Outcome:
    return _joined(case, case.params["dimension"])


def stack(case: Case) -> Outcome:
    outcome = _joined(case, None)
    at = case.params["axis"]
    moved = (_shifted(s, at) for s in outcome.states)
    return Outcome(tuple(moved))


def unstack(case: Case) -> Outcome:
    state, at = case.states[0], case.params["axis"]
    if state.is_rows and state.dim == at:
        raise Mixes("the rows of the batch are taken one by one")
    return _one(case, lambda c, d: without([at], d))


def _shifted(state: State, at: int) -> State:
    return dataclasses.replace(state, dim=state.dim + (state.dim >= at)) if state.is_rows else state


def _joined(case: Case, dimension: int | None) -> Outcome:
    states = set(case.states)
    if not any(s.is_rows for s in states):
        return case.everywhere(_all_parts(case))
    state = rowwise(case)
    if len(states) > 1 or state.dim == dimension:
        raise Mixes("rows are joined with others")
    return case.everywhere(state)


def _all_parts(case: Case) -> State:
    """All operands parts of the same kind, or all the same."""
    parts = [s for s in case.states if s.is_part]
    if not parts:
        return SAME
    if any(s != parts[0] and not (s.zero and parts[0] == SUM) for s in case.states):
        raise Mixes("a sum over the batch is joined with something else")
    return parts[0]


# ---------------------------------------------------------------- along some dimensions


def _apart_from(touched: Callable[[Case], Iterable[int]], why: str) -> Rule:
    """A rule for what goes along some dimensions: rows must be along another, and stay where they are."""

    def rule(case: Case) -> Outcome:
        if not any(s.is_rows for s in case.states):
            if any(s.is_part for s in case.states):
                raise Mixes("not linear in a sum over the batch")
            return case.everywhere(SAME)
        state = rowwise(case)
        for k, s in enumerate(case.states):
            if s != state and not (s.is_same and not case.shape(k)):
                raise Mixes("rows meet what is not known to be rows of the same batch")
        rank = len(case.shape(0))
        if state.dim in {d % rank for d in touched(case)}:
            raise Mixes(why)
        return case.everywhere(state)

    return rule


def _axis(name: str) -> Callable[[Case], Iterable[int]]:
    return lambda case: (case.params[name],)


def reduce(case: Case) -> Outcome:
    """A sum over rows is a part of one, and so for the largest and the smallest."""
    state, axes = case.states[0], case.params["axes"]
    part = REDUCTIONS.get(case.name)
    if case.name in ("reduce_or", "reduce_and") and not is_bool(case.eqn.invars[0]):
        part = None
    if state.is_rows:
        if state.dim not in axes:
            return _one(case, lambda c, d: without(axes, d))
        if part is None:
            raise Mixes("not a sum, maximum or minimum over the batch")
        return case.everywhere(part)
    if state.is_part and state != part:
        raise Mixes("not linear in a sum over the batch")
    return case.everywhere(state if state.is_part else SAME)


REDUCTIONS = {
    "reduce_sum": SUM,
    "reduce_max": MAX,
    "reduce_min": MIN,
    "reduce_or": MAX,
    "reduce_and": MIN,
}


def argmax(case: Case) -> Outcome:
    state, axes = case.states[0], case.params["axes"]
    if state.is_part or (state.is_rows and state.dim in axes):
        raise Mixes("it picks a row of the batch")
    return _one(case, lambda c, d: without(axes, d))


def cumulative(case: Case) -> Outcome:
    if case.name in ("cumsum", "rev") and case.states[0] == SUM:
        return case.everywhere(SUM)
    axes = case.params.get("dimensions", (case.params.get("axis"),))
    return _apart_from(lambda _: axes, "it goes along the batch")(case)


def slice_(case: Case) -> Outcome:
    state, p = case.states[0], case.params
    if not state.is_rows:
        return case.everywhere(state)
    d = state.dim
    if case.out_shape[d] != case.shape(0)[d]:
        raise Mixes("it takes a part of the batch")
    limits = list(p["limit_indices"])
    limits[d] = case.split.part(limits[d])
    return with_params(case, state, limit_indices=tuple(limits))


def pad(case: Case) -> Outcome:
    state = case.states[0]
    if not state.is_rows and state != SUM:
        return _apart_from(lambda _: (), "")(case)
    if not (case.states[1].zero or (state.is_rows and case.states[1].is_same)):
        raise Mixes("rows are padded with a value of other rows")
    if state.is_rows and tuple(case.params["padding_config"][state.dim]) != (0, 0, 0):
        raise Mixes("the batch is padded")
    return case.everywhere(state)


def dynamic_slice(case: Case) -> Outcome:
    state = case.states[0]
    if not all(s.is_same for s in case.states[1:]):
        raise Mixes("a place that depends on the batch")
    if not state.is_rows:
        return case.everywhere(state)
    sizes = case.params["slice_sizes"]
    if sizes[state.dim] != case.shape(0)[state.dim]:
        raise Mixes("it takes a part of the batch")
    return with_params(case, state, slice_sizes=case.split.small(sizes, state))


def dynamic_update_slice(case: Case) -> Outcome:
    state, update = case.states[:2]
    if not all(s.is_same for s in case.states[2:]):
        raise Mixes("a place that depends on the batch")
    if state.is_same and update.is_same:
        return case.everywhere(SAME)
    if (state == SUM and (update == SUM or update.zero)) or (state.zero and update == SUM):
        return case.everywhere(SUM)
    if state != update or not state.is_rows or case.shape(0)[state.dim] != case.shape(1)[state.dim]:
        raise Mixes("a part of the batch is written")
    return case.everywhere(state)


def top_k(case: Case) -> Outcome:
    axis = case.params.get("axis", case.params.get("reduction_dimension", -1))
    return _apart_from(lambda _: (axis,), "it picks rows of the batch")(case)


def leading(keep: int) -> Callable[[Case], Iterable[int]]:
    """The last dimensions, along which decompositions and transforms work."""
    return lambda case: range(len(case.shape(0)) - keep, len(case.shape(0)))


def fft(case: Case) -> Outcome:
    n = len(case.params["fft_lengths"])
    return _apart_from(leading(n), "it goes along the batch")(case)


def window(case: Case) -> Outcome:
    p = case.params
    steps = zip(p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    touched = [d for d, (n, s, pad) in enumerate(steps) if (n, s, tuple(pad)) != (1, 1, (0, 0))]
    return _apart_from(lambda _: touched, "a window goes along the batch")(case)


# ---------------------------------------------------------------- what has rows though its operands have none


def iota(case: Case) -> Outcome:
    out = case.new_rows()
    if not out.is_rows:
        return case.everywhere(SAME)
    d, shape = case.params["dimension"], case.split.small(case.out_shape, out)

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        (count,) = bind(case.eqn, args, {**case.params, "shape": shape})
        if d == out.dim:  # the number of the row in the whole batch
            count = micro.entries(count, out.inner)
        return [count]

    return Outcome((out,), emit)


def named(case: Case) -> Outcome:
    """A range that is kept for later steps: each microbatch has its own of it, the largest of all is kept.
    Or one of each microbatch's own.
    """
    if mark_of(case.eqn) is not None:
        return case.everywhere(SAME)
    if case.params["name"] == APART and case.states[0].is_part:
        return case.everywhere(SAME)
    return elementwise(case)


def each(case: Case) -> Outcome:
    """Result i is operand i."""
    return Outcome(tuple(case.states))


def _all(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **dict.fromkeys((*sorted(ELEMENTWISE), "threefry2x32"), elementwise),
    **_all("reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod reduce_xor", reduce),
    **_all("argmax argmin", argmax),
    **_all("cumsum cumprod cummax cummin cumlogsumexp rev", cumulative),
    **_all("reduce_window reduce_window_sum reduce_window_max reduce_window_min", window),
    **_all("random_bits random_split", random),
    **_all("random_wrap random_unwrap random_seed random_clone", _apart_from(lambda _: (), "")),
    **_all(
        "cholesky triangular_solve eigh lu qr svd householder_product",
        _apart_from(leading(2), "it goes along the batch"),
    ),
    **dict.fromkeys(SCATTERS, scatter),
    **_all("top_k approx_top_k", top_k),
    "bitcast_convert_type": _apart_from(lambda _: (), ""),
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "convert_element_type": converted,
    "conv_general_dilated": convolution,
    "device_put": each,
    "dot_general": dot_general,
    "operation": operation,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "fft": fft,
    "gather": gather,
    "iota": iota,
    "name": named,
    "optimization_barrier": each,
    "pad": pad,
    "ragged_dot_general": ragged_dot_general,
    "random_fold_in": fold_in,
    "random_gamma": gamma,
    "reshape": reshape,
    "slice": slice_,
    "sort": _apart_from(_axis("dimension"), "it goes along the batch"),
    "split": _apart_from(_axis("axis"), "it takes a part of the batch"),
    "squeeze": squeeze,
    "stack": stack,
    "transpose": transpose,
    "unstack": unstack,
}
"""Primitive name -> what becomes of rows and of sums over them."""

TAKES_GROUPS = frozenset({"convert_element_type", "operation", "ragged_dot_general"})
"""What may take the numbers of rows that groups have."""
