"""Finds ragged products of sorted tokens with the weights of the expert that each was sent to.

    h = ragged_dot x up sizes; y = ragged_dot (silu h) down sizes     ->     y = experts x (up, down) sizes

It is one whatever made the groups. Products with the same sizes are one operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from xform.raising.flat import View, size
from xform.raising.following import chain, cone
from xform.raising.meaning import Experts, Near, Raised, Tensor
from xform.trace import Atom, Var

OP = "experts"
_CHAIN = "kfopqruvwy"
"""Letters of what is contracted, of what comes out and is contracted next, and so on."""


@dataclasses.dataclass(frozen=True)
class _Ragged:
    number: int
    x: Atom
    w: Atom
    sizes: Atom
    out: Var
    x_dims: tuple[int, int]  # rows, contracted
    w_dims: tuple[int, int, int]  # experts, contracted, out
    depth: int = 0


def ragged(view: View) -> Iterator[Raised | Near]:
    found: dict[Atom, list[_Ragged]] = {}
    for number, eqn in enumerate(view.eqns):
        if eqn.primitive.name != "ragged_dot_general":
            continue
        made = _read(view, number)
        if isinstance(made, str):
            yield Near(OP, made, view, number)
        else:
            key = chain(view, made.sizes)[-1]
            found.setdefault(key if isinstance(key, Var) else made.sizes, []).append(made)
    for group in found.values():
        yield _raised_ragged(view, group)


def _read(view: View, number: int) -> _Ragged | str:
    eqn = view.eqns[number]
    x, w, sizes = eqn.invars[:3]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (rows,) = numbers.lhs_ragged_dimensions
    if rows in left:
        return "the rows of its groups are summed over, as for the gradient of the weights"
    if left_batch or right_batch or rows in left_batch:
        return "its ragged product has dimensions of a batch"
    if len(numbers.rhs_group_dimensions) != 1 or len(left) != 1 or len(size(x)) != 2 or len(size(w)) != 3:
        return "its ragged product has more dimensions than rows, what is contracted, experts and columns"
    (group,) = numbers.rhs_group_dimensions
    (last,) = {0, 1, 2} - {group, right[0]}
    out = eqn.outvars[0]
    return _Ragged(number, x, w, sizes, out, (rows, left[0]), (group, right[0], last))


def _raised_ragged(view: View, group: Sequence[_Ragged]) -> Raised:
    depths: list[int] = []
    for each in group:
        before = [k for k, b in enumerate(group[: len(depths)]) if each.x in cone(view, b.out, each.number)]
        depths.append(1 + max((depths[k] for k in before), default=-1))
    names = _Letters()
    w = tuple(
        Tensor(g.w, names.weight(size(g.w), g.w_dims, depth)) for g, depth in zip(group, depths, strict=True)
    )
    first, last = group[0], group[-1]
    rows: list[str] = ["", ""]
    rows[first.x_dims[0]], rows[first.x_dims[1]] = "m", w[0].dims[first.w_dims[1]]
    names.sizes["m"] = size(first.x)[first.x_dims[0]]
    out = Tensor(last.out, ("m", w[-1].dims[last.w_dims[2]]))
    products = tuple(
        (g.x, g.w, g.sizes, g.out) for g in group if g.x_dims == (0, 1) and g.w_dims == (0, 1, 2)
    )
    results = {g.out for g in group}
    after = set().union(*(cone(view, v) for v in results))
    numbers = {n for n in view.ancestors(list(results)) if not after.isdisjoint(view.eqns[n].outvars)}
    meaning = Experts(
        "ragged_dot", Tensor(first.x, tuple(rows)), w, out, names.sizes["x"],
        Tensor(first.sizes, ("x",)), products,
    )  # fmt: skip
    return Raised(OP, view, last.number, frozenset(numbers), meaning, names.sizes)


class _Letters:
    """Letters of dimensions: one that has another size already is given another letter."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def letter(self, wanted: str, n: int) -> str:
        for each in (wanted, *"KFOPQRGHIJLMN"):
            if self.sizes.setdefault(each, n) == n:
                return each
        return ""

    def weight(self, shape: Sequence[int], dims: Sequence[int], depth: int) -> tuple[str, ...]:
        """Of a weight: experts, contracted and out, where they are, by how many products come before."""
        made = [""] * len(shape)
        wanted = ("x", *(_CHAIN[min(depth + k, len(_CHAIN) - 1)] for k in (0, 1)))
        for d, name in zip(dims, wanted, strict=True):
            if d >= 0:
                made[d] = self.letter(name, shape[d])
        return tuple(made)
