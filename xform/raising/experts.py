"""Finds products of tokens with the weights of the expert that each was sent to.

    h = ragged_dot x up sizes; y = ragged_dot (silu h) down sizes     ->     y = experts x (up, down) sizes

A ragged product of rows in groups is one whatever made the groups. Of all other spellings (one-hot dispatch,
buffers, loops, all experts and a choice, weights looked up) there are proposed the products with a bank of
weights, of three dimensions or more, that hang together: they take the same tokens, or one takes what another
gives. The first value through which all that they give passes is the result, if it is routed (`routing`):
evaluated, it says that a token's expert follows from data. Products of one dispatch are one operation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from xform.raising.banks import Candidate, candidates
from xform.raising.flat import View, size
from xform.raising.following import chain, cone, is_elementary, kind, static
from xform.raising.meaning import Experts, Near, Raised, Tensor
from xform.raising.routing import Routing, TooLarge
from xform.trace import Atom, Var

OP = "experts"
_CHAIN = "kfopqruvwy"
"""Letters of what is contracted, of what comes out and is contracted next, and so on."""


ROUTES = frozenset({"approx_top_k", "argmax", "argmin", "sort", "top_k"})
"""By what a router chooses, where it is written in the body itself."""


def experts(view: View) -> Iterator[Raised | Near]:
    """The products by expert of a body, one for each dispatch, and what nearly are."""
    yield from ragged(view)
    known = static(view)
    for group in _groups(view, list(candidates(view, known))):
        yield from _Group(view, group, known).raised()


# ---------------------------------------------------------------- ragged products


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


# ---------------------------------------------------------------- all other spellings


def _groups(view: View, found: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Candidates that hang together."""
    parents = list(range(len(found)))

    def root(k: int) -> int:
        while parents[k] != k:
            k = parents[k]
        return k

    after = [_elementary(view, c) for c in found]
    for j, c in enumerate(found):
        for k in range(j):
            together = c.number == found[k].number
            same_tokens = c.tokens is not None and c.tokens is found[k].tokens
            next_to = found[k].index == c.index and not after[k].isdisjoint({c.given, c.tokens})
            if together or same_tokens or next_to:
                parents[root(j)] = root(k)
    groups: dict[int, list[Candidate]] = {}
    for k, c in enumerate(found):
        groups.setdefault(root(k), []).append(c)
    yield from groups.values()


def _elementary(view: View, c: Candidate) -> set[Var]:
    """What follows from a product element by element, or moved."""
    found = set(view.eqns[c.number].outvars)
    for eqn in view.eqns[c.number + 1 :]:
        if is_elementary(eqn) and any(v in found for v in eqn.invars if isinstance(v, Var)):
            found.update(eqn.outvars)
    return found


class _Group:
    """Products with banks of weights that hang together."""

    def __init__(self, view: View, group: Sequence[Candidate], known: frozenset[Var]) -> None:
        self.view, self.group, self.known = view, group, known

    def raised(self) -> Iterator[Raised | Near]:
        view, group = self.view, self.group
        after = set().union(*(cone(view, v) for c in group for v in view.eqns[c.number].outvars))
        firsts = [c for c in group if isinstance(c.tokens, Var) and c.tokens not in after]
        x = firsts[0].tokens if firsts else None
        if x is None or kind(x) != "f" or any(c.bank in after or c.bank is x for c in group):
            return
        outs = list(self._ends(after))
        if not outs or not self._chooses(after, outs[-1]):
            return
        banks = list(dict.fromkeys(c.bank for c in group))
        try:
            routing = Routing(view, group, x, after, outs, self.known)
            chosen = routing.experts(banks)
        except TooLarge as why:
            if any(eqn.primitive.name in ROUTES for eqn in view.eqns):
                yield Near(OP, str(why), view, max(c.number for c in group))
            return
        if chosen is None:
            return
        out, dims = chosen
        if len({size(b)[d] for b, d in dims.items()}) > 1:
            yield Near(OP, "its weights are of different numbers of experts", view, view.makers[out])
        elif not routing.keeps_tokens_apart(out, firsts[0].contracted):
            yield Near(OP, "a token's result takes other tokens in", view, view.makers[out])
        else:
            yield self._made(x, firsts[0], out, dims, routing.numbers)

    def _ends(self, after: set[Var]) -> Iterator[Var]:
        """The values through which all that follows from the products passes, the nearest first."""
        view = self.view
        live = view.ancestors(view.jaxpr.outvars)
        last = {
            v: max(
                (math.inf if n < 0 else n for n in view.users.get(v, ()) if n < 0 or n in live), default=-1
            )
            for v in after
        }
        final = max(c.number for c in self.group)
        pending: set[Var] = set()
        count = 0
        for number, eqn in enumerate(view.eqns):
            pending |= {v for v in eqn.outvars if v in after and last[v] > number}
            pending = {v for v in pending if last[v] > number}
            if number < final or len(pending) != 1 or count >= 12:
                continue
            (v,) = pending
            if v in eqn.outvars and kind(v) == "f" and size(v):
                count += 1
                yield v

    def _chooses(self, after: set[Var], out: Var) -> bool:
        """Whether anything on the way chooses by integers or booleans that are computed."""
        for number in self.view.ancestors([out]):
            for v in self.view.eqns[number].invars:
                if isinstance(v, Var) and v not in self.known and kind(v) in ("i", "u", "b"):
                    return True
            if self.view.eqns[number].primitive.name in ("max", "top_k", "clamp"):
                return True
        return False

    def _made(
        self, x: Var, first: Candidate, out: Var, dims: dict[Var, int], within: Sequence[int]
    ) -> Raised:
        view = self.view
        names = _Letters()
        tensors: dict[Var, Tensor] = {}
        for c in self.group:
            if c.bank not in tensors:
                depth = 0 if c.tokens is x else 1
                places = (dims[c.bank], *_rest(c, dims[c.bank]))
                tensors[c.bank] = Tensor(c.bank, names.weight(size(c.bank), places, depth))
        shape = size(x)
        at = last_of(shape, first.contracted)
        k = next((t for t in tensors[first.bank].dims if t and t != "x"), "k")
        free = iter("mABCDE")
        x_dims = list(reversed([k if d == at else next(free) for d in reversed(range(len(shape)))]))
        for letter, n in zip(x_dims, shape, strict=True):
            names.sizes.setdefault(letter, n)
        rows, taken = [c for c in x_dims if c != k], iter("STUVWXYZ")
        width = size(out)
        lead = len(width) - 1
        same = lead == len(rows) and all(names.sizes[c] == n for c, n in zip(rows, width, strict=False))
        out_dims = rows if same else [next(taken) for _ in range(lead)]
        for letter, n in zip(out_dims, width, strict=False):
            names.sizes.setdefault(letter, n)
        last = self.group[-1]
        column = _rest(last, dims[last.bank])[1]
        wanted = tensors[last.bank].dims[column] if column >= 0 else ""
        out_dims = [*out_dims, names.letter(wanted or "o", width[-1])]
        numbers = view.ancestors([out]).intersection(within)
        meaning = Experts(
            first.style, Tensor(x, tuple(x_dims)), tuple(tensors.values()), Tensor(out, tuple(out_dims)),
            names.sizes["x"],
        )  # fmt: skip
        return Raised(OP, view, view.makers[out], frozenset(numbers), meaning, names.sizes)


def last_of(shape: Sequence[int], n: int) -> int:
    """The last dimension of a size; the last of all where there is none."""
    return next((d for d in reversed(range(len(shape))) if shape[d] == n), len(shape) - 1)


def _rest(c: Candidate, x: int) -> tuple[int, int]:
    """Which dimensions of a bank are contracted, and which come out."""
    rest = [d for d in range(len(size(c.bank))) if d != x and size(c.bank)[d] > 1]
    summed = [d for d in rest if d in c.summed] or rest[:1]
    others = [d for d in rest if d not in summed] or [-1]
    return summed[-1], others[-1]
