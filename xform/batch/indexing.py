"""How gathers and scatters treat rows of the batch.

Rows go through where each index is a row's own (a lookup in a table), where a whole row is in the window, and
where the rows are paired with their own indices: by batching dimensions, or by counting them, as in
x[arange(n), labels]. A count is of the whole batch; in a microbatch it is divided down to the rows at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform.axes.integers import component
from xform.batch.states import SAME, SUM, Case, Micro, Mixes, Outcome, State, rows
from xform.trace import Value, bind

UNKNOWN = "it picks rows of the batch"

ADDING = frozenset(("scatter-add", "scatter-sub"))
"""Scatters that add what is written to what is there, or take it away."""


def gather(case: Case) -> Outcome:
    operand, indices = case.states
    numbers, sizes = case.params["dimension_numbers"], case.params["slice_sizes"]
    if operand.is_part or indices.is_part:
        if operand.is_part and indices.is_same:
            return case.everywhere(operand)
        raise Mixes("a place that depends on a sum over the batch")
    if not operand.is_rows and not indices.is_rows:
        return case.everywhere(SAME)
    if not operand.is_rows:
        return case.everywhere(_looked_up(case, numbers, indices))
    d = operand.dim
    if indices.is_same:
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        if d in gone or sizes[d] != case.shape(0)[d]:
            raise Mixes(UNKNOWN)
        window = [i for i in range(len(case.shape(0))) if i not in gone]
        out = rows(numbers.offset_dims[window.index(d)], operand.inner)
        return _resized(case, out, d, None)
    if d in numbers.operand_batching_dims:
        at = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(d)]
        if indices != rows(at, operand.inner):
            raise Mixes(UNKNOWN)
        return case.everywhere(_looked_up(case, numbers, indices))
    if d in numbers.collapsed_slice_dims:
        k = _counted(case, operand, indices, list(numbers.start_index_map))
        return _resized(case, _looked_up(case, numbers, indices), None, k)
    raise Mixes(UNKNOWN)


def _looked_up(case: Case, numbers: Any, indices: State) -> State:
    """Where in the result the indices' rows are."""
    outside = [i for i in range(len(case.out_shape)) if i not in numbers.offset_dims]
    return rows(outside[indices.dim], indices.inner)


def _counted(case: Case, operand: State, indices: State, dims: list[int]) -> int:
    """Which component of the indices counts the rows; Mixes if none does."""
    if operand.inner == indices.inner and operand.dim in dims:
        k = dims.index(operand.dim)
        _, maker = component(case.scope.jaxpr, case.scope.makers, case.eqn.invars[1], k)
        if maker is not None and maker.primitive.name == "iota":
            count = maker.outvars[0]
            state = case.batch.of(case.scope, count)
            if state == rows(maker.params["dimension"], operand.inner):
                return k
    raise Mixes(UNKNOWN)


def _resized(case: Case, out: State, window: int | None, counted: int | None) -> Outcome:
    """With the window along dimension `window` as large as a microbatch, and a component that counts rows
    divided down."""
    params = dict(case.params)
    if window is not None:
        sizes = list(params["slice_sizes"])
        sizes[window] = case.split.part(sizes[window])
        params["slice_sizes"] = tuple(sizes)

    def emit(args: Sequence[Value], micro: Micro) -> list[Value]:
        args = list(args)
        if counted is not None:
            args[1] = _divided(args[1], counted, case.states[0].inner, micro)
        return bind(case.eqn, args, params)

    return Outcome((out,), emit)


def _divided(indices: Value, k: int, inner: int, micro: Micro) -> Value:
    """Component k, the number of an entry in the whole batch, as its number in the microbatch."""
    number = indices[..., k]
    return indices.at[..., k].set(micro.here(number // inner) * inner + number % inner)


def scatter(case: Case) -> Outcome:
    operand, indices, update = case.states
    numbers = case.params["dimension_numbers"]
    if all(s.is_same for s in case.states):
        return case.everywhere(SAME)
    if not any(s.is_rows for s in case.states):
        if indices.is_same and _is_linear(case) and _additive(operand) and _additive(update):
            return case.everywhere(SUM)
        raise Mixes("not linear in a sum over the batch")
    if any(s.is_part and s is not operand for s in case.states):
        raise Mixes("a sum over the batch is used for each of its rows")
    if not operand.is_rows:
        return _added_up(case)
    d = operand.dim
    if indices.is_same:
        inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = [i for i in range(len(case.shape(0))) if i not in inserted]
        if d in inserted or update != rows(numbers.update_window_dims[window.index(d)], operand.inner):
            raise Mixes(UNKNOWN)
        return case.everywhere(operand)
    where = [j for j in range(len(case.shape(2))) if j not in numbers.update_window_dims]
    if update != rows(where[indices.dim], indices.inner):
        raise Mixes(UNKNOWN)
    if d in numbers.operand_batching_dims:
        at = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(d)]
        if indices != rows(at, operand.inner):
            raise Mixes(UNKNOWN)
        return case.everywhere(operand)
    if d in numbers.inserted_window_dims:
        k = _counted(case, operand, indices, list(numbers.scatter_dims_to_operand_dims))
        return _resized(case, operand, None, k)
    raise Mixes(UNKNOWN)


def _is_linear(case: Case) -> bool:
    """Whether a scatter of sums is the sum of scatters. `x.at[i].apply(f)` is a scatter with a program."""
    return case.name in ADDING or (case.name == "scatter" and case.params["update_jaxpr"] is None)


def _additive(state: State) -> bool:
    return state == SUM or state.zero


def _added_up(case: Case) -> Outcome:
    """Each row's updates added to what begins with zero: a sum over the batch."""
    operand, indices, update = case.states
    numbers = case.params["dimension_numbers"]
    where = [j for j in range(len(case.shape(2))) if j not in numbers.update_window_dims]
    if case.name not in ADDING or not _additive(operand):
        raise Mixes("rows of the batch are written over one another")
    for s in (indices, update):
        if s.is_rows and s is update and s.dim not in where:
            raise Mixes("rows of the batch are written over one another")
    if indices.is_rows and update != rows(where[indices.dim], indices.inner):
        raise Mixes("rows meet what is not known to be rows of the same batch")
    if indices.is_same:
        raise Mixes("rows are added at places that are not their own")
    return case.everywhere(SUM)
