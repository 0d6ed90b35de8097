"""How products treat rows of the batch: paired or free they stay, contracted they are summed over."""

from __future__ import annotations

from collections.abc import Iterable

from xform.batch.elementwise import elementwise
from xform.batch.states import GROUPS, SAME, SUM, Case, Mixes, Outcome, State, rows, rowwise
from xform.ops import apply, operation_of
from xform.ops.operation import grouped_of, groups_of, sums_of, told_of


def dot_general(case: Case) -> Outcome:
    (lc, rc), (lb, rb) = case.params["dimension_numbers"]
    left, right = case.states
    if not (left.is_rows or right.is_rows):
        return case.everywhere(_bilinear(left, right))
    rowwise(case)
    for s, t, contract, other, batch in ((left, right, lc, rc, lb), (right, left, rc, lc, rb)):
        if not s.is_rows:
            continue
        if s.dim in contract:
            if t != rows(other[contract.index(s.dim)], s.inner):
                raise Mixes("the batch is contracted with what is not known to be rows of it")
            return case.everywhere(SUM)
        if s.dim in batch:
            at = batch.index(s.dim)
            if t != rows((rb if s is left else lb)[at], s.inner):
                raise Mixes("rows meet what is not known to be rows of the same batch")
            return case.everywhere(rows(at, s.inner))
    if left.is_rows and right.is_rows:
        raise Mixes("every row meets every other")
    if left.is_rows:
        return case.everywhere(rows(len(lb) + without((*lc, *lb), left.dim), left.inner))
    before = len(case.shape(0)) - len(lc)
    return case.everywhere(rows(before + without((*rc, *rb), right.dim), right.inner))


def _bilinear(left: State, right: State) -> State:
    parts = [s for s in (left, right) if s.is_part]
    if len(parts) > 1 or (parts and parts[0] != SUM):
        raise Mixes("not linear in a sum over the batch")
    return parts[0] if parts else SAME


def operation(case: Case) -> Outcome:
    """A high-level operation treats rows along some of its dimensions each alone, or sums over them; it is
    made anew for fewer.
    """
    op = operation_of(case.eqn)
    assert op is not None
    at = {(op.operands[k][s.dim], s.inner) for k, s in enumerate(case.states) if s.is_rows}
    if any(s.is_part for s in case.states):
        raise Mixes(f"{op.name} is not linear in a sum over the batch")
    grouped = grouped_of(op) if GROUPS in case.states else ""
    if case.batch.groups and at == {(groups_of(op), 1)}:
        outs = (rows(dims.index(groups_of(op))) if groups_of(op) in dims else SAME for dims in op.results)
        return Outcome(tuple(outs), lambda args, micro: apply(op, *args))
    if not at and not grouped:
        return case.everywhere(SAME)
    letter, inner = next(iter(at), ("", 1))
    if len(at) != 1 or letter not in op.cut + sums_of(op) + grouped or letter in told_of(op):
        raise Mixes(f"rows of the batch meet in {op.name}")
    if any(letter in dims and not s.is_rows for dims, s in zip(op.operands, case.states, strict=True)):
        raise Mixes("rows meet what is not known to be rows of the same batch")
    lacking = SUM if letter in sums_of(op) + grouped else SAME
    outs = (rows(dims.index(letter), inner) if letter in dims else lacking for dims in op.results)
    return Outcome(tuple(outs), lambda args, micro: apply(op, *args))


def ragged_dot_general(case: Case) -> Outcome:
    """Rows of groups times the weights of their group stay rows; of two such, each group's are summed."""
    left, right, groups = case.states[:3]
    if not (left.is_rows or right.is_rows or groups.is_rows) and groups.is_same:
        return case.everywhere(_bilinear(left, right))
    rowwise(case)
    numbers = case.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    if lb or rb:
        raise Mixes("rows meet in a product by groups")
    if groups.is_rows:
        return _by_group(case, ragged in lc)
    if groups.is_same:
        return _beside_groups(case, ragged)
    if not left.is_rows or (left.dim, left.inner) != (ragged, 1):
        raise Mixes("rows meet in a product by groups")
    if ragged not in lc:
        if not right.is_same:
            raise Mixes("every row meets every other")
        return case.everywhere(rows(without(lc, ragged)))
    if right != rows(rc[lc.index(ragged)]):
        raise Mixes("the batch is contracted with what is not known to be rows of it")
    return case.everywhere(SUM)


def _by_group(case: Case, summed: bool) -> Outcome:
    """The batch is of groups: weights have them as rows, and so has what is summed over the rows of each."""
    left, right, _ = case.states[:3]
    groups = case.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    if not case.batch.groups or not left.is_same or right != (SAME if summed else rows(groups[0])):
        raise Mixes("groups meet in a product by groups")
    return case.everywhere(rows(0) if summed else SAME)


def _beside_groups(case: Case, ragged: int) -> Outcome:
    """Rows that are neither sorted nor groups: free dimensions, or what is contracted."""
    left, right, _ = case.states[:3]
    numbers = case.params["ragged_dot_dimension_numbers"]
    (lc, rc), _ = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    if left.dim == ragged or right.dim in groups or (ragged in lc and right.dim in rc):
        raise Mixes("rows meet in a product by groups")
    for s, t, contract, other in ((left, right, lc, rc), (right, left, rc, lc)):
        if s.is_rows and s.dim in contract:
            if t != rows(other[contract.index(s.dim)], s.inner):
                raise Mixes("the batch is contracted with what is not known to be rows of it")
            return case.everywhere(SUM)
    if left.is_rows and right.is_rows:
        raise Mixes("every row meets every other")
    first = int(ragged in lc)  # the groups, before all else
    if left.is_rows:
        return case.everywhere(rows(first + without(lc, left.dim), left.inner))
    free = first + len(case.shape(0)) - len(lc)
    return case.everywhere(rows(free + without((*rc, *groups), right.dim), right.inner))


def converted(case: Case) -> Outcome:
    return case.everywhere(GROUPS) if GROUPS in case.states else elementwise(case)


def convolution(case: Case) -> Outcome:
    left, right = case.states
    if not (left.is_rows or right.is_rows):
        return case.everywhere(_bilinear(left, right))
    rowwise(case)
    spec = case.params["dimension_numbers"]
    if not right.is_same or left.dim != spec.lhs_spec[0] or case.params["batch_group_count"] > 1:
        raise Mixes("a convolution along the batch")
    return case.everywhere(rows(spec.out_spec[0], left.inner))


def without(axes: Iterable[int], d: int) -> int:
    """Where dimension d is when `axes` are gone."""
    return d - sum(a < d for a in axes)
