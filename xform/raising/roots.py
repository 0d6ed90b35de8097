"""What a result over time is made of, before time was cut into chunks: values, and where in each of them.

    reshape(scan(...)) [b, t, e]    <-    q [b, t, d], k [b, t, d], v [b, t, e], g [b, t]

Labels of the result's dimensions are carried backwards through whatever comes in between, products and loops
included; a reshape that cuts time in two makes two labels of one. The way ends where a value has both again
as one dimension.
"""

from __future__ import annotations

import dataclasses

from xform.higher_order import bodies
from xform.raising.elementwise import is_elementwise
from xform.raising.flat import dtype_of
from xform.raising.indices import SAME
from xform.raising.loops import Carry, Loop
from xform.raising.terms import Dim, Index, Labels, Terms
from xform.trace import Atom, JaxprEqn, Literal, Var, shape_of


@dataclasses.dataclass(frozen=True)
class Root:
    """A value of the view at an index. grown: an exponential, or a running product, stands on every way to
    it.
    """

    atom: Var
    index: Index
    grown: bool

    @property
    def labels(self) -> frozenset[int]:
        return frozenset(label for dim in self.index for label in dim)


class Roots:
    """Walks back from values of a loop over chunks, and of the view around it."""

    def __init__(self, loop: Loop, carry: Carry, around: Terms, inside: Terms, turn: Dim, place: Dim) -> None:
        self.loop, self.carry, self.around, self.inside = loop, carry, around, inside
        self.labels: Labels = around.labels
        self.turn, self.place = turn, place
        self.time = loop.length * self.labels.sizes[place[0]]
        self.state: Index | None = None
        self.stacked = {var: atom for atom, var in loop.stacked}
        self.one: dict[int, int] = {}

    def of(self, atom: Atom, index: Index, body: bool = False) -> list[Root]:
        """The roots of a value of the view; or, with `body`, of the loop's body."""
        self.found: dict[Var, Root] = {}
        self.seen: dict[tuple[Var, bool], tuple[bool, Index]] = {}
        self._into(atom, index, self.inside if body else self.around, False, True)
        return list(self.found.values())

    def named(self, index: Index) -> Index:
        """The index with one label for all that label the same dimension of a value; and whole time by the
        labels of the result's time, since the other steps of a chunk have labels of their own.
        """
        dims = (self.labels.resolved(dim) for dim in index)
        return tuple(
            self.turn + self.place if dim[:1] == self.turn else tuple(map(self._first, dim)) for dim in dims
        )

    def _first(self, label: int) -> int:
        while label in self.one:
            label = self.one[label]
        return label

    def _alike(self, index: Index, other: Index) -> None:
        """Two indices of one value: their labels are the same."""
        for mine, theirs in zip(index, other, strict=True):
            mine, theirs = self.labels.resolved(mine), self.labels.resolved(theirs)
            if len(mine) == len(theirs):
                for a, b in zip(map(self._first, mine), map(self._first, theirs), strict=True):
                    if a != b:
                        self.one[max(a, b)] = min(a, b)

    def _into(self, atom: Atom, index: Index, terms: Terms, grown: bool, first: bool = False) -> None:
        if isinstance(atom, Literal):
            return
        index = tuple(
            () if n == 1 else self.labels.resolved(dim) for n, dim in zip(shape_of(atom), index, strict=True)
        )
        if terms is self.around and not first and self._whole(index):
            while isinstance(atom, Var) and (moved := terms.moved(atom, index)) is not None:
                if not self._whole(tuple(map(self.labels.resolved, moved[1]))):
                    break
                atom, index = moved
            if isinstance(atom, Var):
                var = terms.same(atom)
                old = self.found.get(var)
                if old is not None:
                    self._alike(old.index, index)
                self.found[var] = Root(var, index, grown and (old is None or old.grown))
            return
        moved = terms.moved(atom, index)
        if moved is not None:
            self._into(moved[0], moved[1], terms, grown, first)
            return
        atom = terms.same(atom)
        if dtype_of(atom).kind not in "fV":
            return
        key = atom, terms is self.around
        if key in self.seen:
            self._alike(self.seen[key][1], index)
            if self.seen[key][0] <= grown:
                return
        self.seen[key] = grown, index
        eqn = terms.view.maker(atom)
        if eqn is None:
            self._input(atom, index, terms, grown)
        elif eqn is self.loop.eqn and terms is self.around:
            if atom in self.stacked and index and index[0] == self.turn:
                self._into(self.stacked[atom], index[1:], self.inside, grown)
        else:
            grown |= eqn.primitive.name in ("exp", "exp2", "cumprod")
            for operand, at in self._operands(eqn, index):
                self._into(operand, at, terms, grown)

    def _whole(self, index: Index) -> bool:
        """Whether a dimension is all of time."""
        sizes = self.labels.sizes
        for dim in index:
            total = 1
            for label in dim:
                total *= sizes[label]
            if dim[: len(self.turn)] == self.turn and total == self.time:
                return True
        return False

    def _input(self, var: Var, index: Index, terms: Terms, grown: bool) -> None:
        if terms is self.around:
            return
        if var is self.carry.into:
            if self.state is None:
                self.state = index
            self._alike(self.state, index)
        elif var in self.loop.inputs:
            out, timed = self.loop.inputs[var]
            if timed:
                self._into(out, (self.turn, *index), self.around, grown)
            else:
                self._into(out, index, self.around, grown)

    def _operands(self, eqn: JaxprEqn, index: Index) -> list[tuple[Atom, Index]]:
        name = eqn.primitive.name
        if name == "dot_general":
            return self._of_product(eqn, index)
        if is_elementwise(eqn) or name in SAME or name.startswith("cum"):
            return [(v, index if shape_of(v) else ()) for v in eqn.invars]
        if name.startswith("reduce_"):
            axes, rest = eqn.params["axes"], list(index)
            sizes = shape_of(eqn.invars[0])
            return [
                (
                    eqn.invars[0],
                    tuple(self.labels.fresh(n) if d in axes else rest.pop(0) for d, n in enumerate(sizes)),
                )
            ]
        if bodies(eqn) or name in (
            "triangular_solve",
            "slice",
            "pad",
            "concatenate",
            "gather",
            "dynamic_slice",
            "split",
        ):
            return [(v, self._aligned(v, eqn, index)) for v in eqn.invars]
        return []

    def _aligned(self, operand: Atom, eqn: JaxprEqn, index: Index) -> Index:
        """Dimensions of the same size as the result's are the same; others are new."""
        sizes, mine = shape_of(eqn.outvars[0]), shape_of(operand)
        matrix = len(mine) - 2 if eqn.primitive.name == "triangular_solve" else len(mine)
        return tuple(
            index[d]
            if len(sizes) == len(mine) and d < matrix and sizes[d] == n and index[d]
            else self.labels.fresh(n)
            for d, n in enumerate(mine)
        )

    def _of_product(self, eqn: JaxprEqn, index: Index) -> list[tuple[Atom, Index]]:
        contract, batch = eqn.params["dimension_numbers"]
        summed = self.labels.whole([shape_of(eqn.invars[0])[d] for d in contract[0]])
        rest = list(index[len(batch[0]) :])
        found = []
        for side in (0, 1):
            at: dict[int, Dim] = dict(zip(batch[side], index[: len(batch[0])], strict=True))
            at |= dict(zip(contract[side], summed, strict=True))
            dims = range(len(shape_of(eqn.invars[side])))
            found.append((eqn.invars[side], tuple(at[d] if d in at else rest.pop(0) for d in dims)))
        return found
